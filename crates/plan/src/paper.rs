//! The rival `paper`: the layouts that DFLOP's Algorithm 1 puts first, with the paper's balance of both components.

use crate::contender::Contender;
use crate::error::PlanError;
use crate::fastest::{Field, idle_ratio, mean_ns, scheduled};
use crate::rival::{Rival, none, words};
use dflop_step::lists::makespan_min_ns;
use dflop_step::{Arm, Method, StepScheduler};
use dflop_types::{Recomputation, Schedule};
use rayon::prelude::*;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// The most layouts that are scheduled for `paper` in each mode of recomputation until enough fit, in the order of the
/// paper's estimate.
const PAPER_TRIED: usize = 24;
/// How many that fit are enough: the fastest of them counts. The paper has one, the first; but what its estimate puts first
/// changes with what else is a candidate, and a rival is not to lose by that.
const PAPER_FITTING: usize = 3;

const ARM: Arm = Arm { method: Method::Balanced, is_ahead: false };

/// A layout that fits, in the pipeline order.
struct Placed<'a> {
    one: &'a Contender,
    scheduler: StepScheduler,
    /// Its schedules of the sampled batches.
    answers: Vec<Schedule>,
    /// For each of them: no lists make the step shorter, in nanoseconds.
    least_ns: Vec<u64>,
}

impl Placed<'_> {
    fn step_ns(&self) -> u64 {
        mean_ns(&self.answers.iter().map(|schedule| schedule.predicted_makespan_ns).collect::<Vec<u64>>())
    }
}

/// The fastest that fits, with and without forwards that run ahead, of all `contenders`.
pub(crate) fn paper(field: &Field<'_>, contenders: &[Contender]) -> Result<Rival, PlanError> {
    let mut at_mean: Vec<&Contender> =
        contenders.iter().filter(|one| !one.candidate.layout.is_colocated() && !one.rough.is_over).collect();
    at_mean.sort_by_key(|one| (one.rough.at_mean_ns, one.candidate));
    let (has_some, is_cut) = (AtomicBool::new(false), AtomicBool::new(false));
    let is_halted = || {
        let is_halted = has_some.load(Relaxed) && (field.input.halt)();
        is_cut.fetch_or(is_halted, Relaxed);
        is_halted
    };
    // In every mode of recomputation: what holds most is estimated fastest, and would be all that is tried where it lacks
    // memory. Of one layout the number of microbatches with the least estimate.
    let of_mode = |&mode: &Recomputation| -> Result<Vec<Placed<'_>>, PlanError> {
        let mut seen = BTreeSet::new();
        let of_mode = at_mean.iter().filter(|one| one.candidate.recompute == mode);
        let firsts = of_mode.filter(|one| seen.insert(one.candidate.layout));
        let mut fitting = Vec::new();
        for one in firsts.take(PAPER_TRIED) {
            if fitting.len() == PAPER_FITTING || is_halted() {
                break;
            }
            fitting.extend(placed(field, one)?);
            has_some.fetch_or(!fitting.is_empty(), Relaxed);
        }
        Ok(fitting)
    };
    let modes = field.models.modes();
    let found: Vec<Vec<Placed<'_>>> =
        modes.par_iter().with_max_len(1).map(of_mode).collect::<Result<_, PlanError>>()?;
    let mut found: Vec<(usize, Placed<'_>)> = found.into_iter().flatten().enumerate().collect();
    // The most promising first. Of equals the first of the list above is taken.
    found.sort_by_key(|(at, one)| (mean_ns(&one.least_ns), *at));
    let own = found.iter().map(|(_, one)| one.step_ns()).min();
    let mut limit_ns = own.filter(|_| field.prunes).unwrap_or(u64::MAX);
    let mut best: Option<(u64, usize, Placed<'_>)> = None;
    for (at, one) in found {
        let Some((ns, one)) = ahead(field, one, limit_ns, &is_halted)? else { continue };
        limit_ns = if field.prunes { limit_ns.min(ns) } else { limit_ns };
        if best.as_ref().is_none_or(|(best_ns, first, _)| (ns, at) < (*best_ns, *first)) {
            best = Some((ns, at, one));
        }
    }
    let Some((ns, _, best)) = best else { return Ok(none("paper")) };
    let candidate = best.one.candidate;
    Ok(Rival {
        layout: words(&candidate.layout.to_string(), candidate.recompute),
        num_microbatches: candidate.num_microbatches,
        step_ns_mean: Some(ns),
        bubble_ratio: Some(idle_ratio(&best.scheduler, &best.answers)?),
        is_cut: is_cut.into_inner(),
        candidate: Some(candidate),
        ..none("paper")
    })
}

/// The layout in the pipeline order, if all batches fit. Those that are fullest come first: where a layout falls, it falls there.
fn placed<'a>(field: &Field<'_>, one: &'a Contender) -> Result<Option<Placed<'a>>, PlanError> {
    let scheduler = one.candidate.scheduler_of_others(field.input, field.models)?;
    for (step, batch) in &field.batches.fullest {
        if scheduled(&scheduler, *step, batch, ARM, &|| true)?.is_none() {
            return Ok(None);
        }
    }
    let (mut answers, mut least_ns) = (Vec::new(), Vec::new());
    for (step, batch) in (0..).zip(field.batches.sampled) {
        let Some(schedule) = scheduled(&scheduler, step, batch, ARM, &|| true)? else { return Ok(None) };
        let input = scheduler.step_input(&schedule)?;
        least_ns.push(makespan_min_ns(&input).map_err(dflop_step::StepError::from)?);
        answers.push(schedule);
    }
    Ok(Some(Placed { one, scheduler, answers, least_ns }))
}

/// The mean step of the layout, with forwards that run ahead where that makes a step shorter. `None` if it is above `limit_ns`.
fn ahead<'a>(
    field: &Field<'_>,
    mut one: Placed<'a>,
    limit_ns: u64,
    is_halted: &(dyn Fn() -> bool + Sync),
) -> Result<Option<(u64, Placed<'a>)>, PlanError> {
    let arm = Arm { is_ahead: true, ..ARM };
    let mut steps_ns = one.least_ns.clone();
    // In rounds, so that the steps so far are looked at before the next ones.
    let all: Vec<usize> = (0..steps_ns.len()).collect();
    for round in all.chunks(rayon::current_num_threads()) {
        if mean_ns(&steps_ns) > limit_ns {
            return Ok(None);
        }
        let of = |&at: &usize| {
            let own = &one.answers[at];
            if is_halted() || own.predicted_makespan_ns == one.least_ns[at] {
                return Ok(None);
            }
            scheduled(&one.scheduler, at as u64, &field.batches.sampled[at], arm, &|| true)
        };
        let answers: Vec<Option<Schedule>> = round.par_iter().map(of).collect::<Result<_, PlanError>>()?;
        for (&at, answer) in round.iter().zip(answers) {
            one.answers[at] = answer.unwrap_or_else(|| one.answers[at].clone());
            steps_ns[at] = one.answers[at].predicted_makespan_ns;
        }
    }
    Ok(Some((mean_ns(&steps_ns), one)))
}
