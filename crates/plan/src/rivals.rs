//! Rivals: what people run today, each with the best of its own search on the same global batches, ranks and memory.
//!
//! | name | what it does |
//! |---|---|
//! | `megatron` | one pipeline of all ranks of a replica, the encoder before the first stage, interleaved where that is shorter, fewer layers on the first and the last rank where that evens them out, layers cut over tensor groups where the profile has them; arrival order, equal counts |
//! | `megatron-balanced` | the same; samples by predicted time of both components, longest first (LPT) |
//! | `fsdp` | both components on every rank or tensor group, with each sharding and recomputation; arrival order |
//! | `fsdp-tokens` | the same; samples packed by LLM tokens, longest first |
//! | `fsdp-dflop` | the same, with our balance |
//! | `paper` | the layout that would be fastest if every sample were the mean one (DFLOP, Algorithm 1), with the paper's balance of both components |

use crate::contender::Contender;
use crate::error::PlanError;
use crate::funnel::WHOLE_SAMPLES_MAX;
use crate::input::SearchInput;
use crate::megatron::megatron;
use crate::models::Models;
use crate::rival_modes::{self, Timed};
use crate::run_memory::Held;
use crate::space::{Candidate, Rules, colocated};
use crate::wide::{colocated_groups, first_modes};
use crate::{baseline::refusal, only::Only};
use dflop_step::{Arm, Method};
use dflop_types::{Recomputation, SampleIndex};
use rayon::prelude::*;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// What people run today, or our balance in it.
#[derive(Debug, Clone, PartialEq)]
pub struct Rival {
    /// Its name.
    pub name: &'static str,
    /// Whether it is other people's work; `false` for our balance in their layouts. Ratios are formed with other people's.
    pub is_of_others: bool,
    /// Its layout and what it recomputes, in words; empty where nothing of it fits.
    pub layout: String,
    /// Microbatches of a step on each replica.
    pub num_microbatches: u32,
    /// Mean step over the global batches, in nanoseconds; `None` where nothing of it fits.
    pub step_ns_mean: Option<u64>,
    /// Idle time over ranks and makespan, as the mean over the global batches; `None` where nothing of it fits.
    pub bubble_ratio: Option<f64>,
    /// Whether the time limit struck before all its configurations were looked at: a faster one may be left.
    pub is_cut: bool,
    /// What it is, where dflop's search has such candidates.
    pub(crate) candidate: Option<Candidate>,
}

/// Candidates of a rival that have the scheduler's whole search: those in front by their first answers.
const WHOLE_TRIED: usize = 3;

/// The most layouts that are scheduled for `paper` in each mode of recomputation until enough fit, in the order of the
/// paper's estimate.
const PAPER_TRIED: usize = 24;
/// How many that fit are enough: the fastest of them counts. The paper has one, the first; but what its estimate puts first
/// changes with what else is a candidate, and a rival is not to lose by that.
const PAPER_FITTING: usize = 3;

/// The global batches that a rival is held to: the sampled ones give its time, and fuller ones of the run, with their steps,
/// must fit as well, as they must for the plan.
struct Batches<'a> {
    sampled: &'a [Vec<SampleIndex>],
    fullest: Vec<(u64, Vec<SampleIndex>)>,
}

impl Batches<'_> {
    /// Those that give the time, then those that must fit, each with its step.
    fn all(&self) -> impl Iterator<Item = (u64, &[SampleIndex])> {
        let sampled = (0..).zip(self.sampled);
        sampled.chain(self.fullest.iter().map(|(step, batch)| (*step, batch))).map(|(step, of)| (step, &**of))
    }
}

/// All rivals, each with the fastest configuration that fits. `paper` chooses among all `contenders`; the others have
/// candidates of their own.
pub(crate) fn rivals(
    input: &SearchInput<'_>,
    models: &Models,
    contenders: &[Contender],
    held: &Held<'_>,
) -> Result<Vec<Rival>, PlanError> {
    let batches = &Batches { sampled: held.batches, fullest: held.fullest() };
    let (ranks, nodes) = (input.cluster.num_ranks, input.cluster.ranks_per_node);
    let every = Only::default();
    // Rivals search all tensor degrees, even if our own search was restricted to some.
    let whole;
    let models = if input.only.tensor_degrees() == every.tensor_degrees() {
        models
    } else {
        whole = Models::cut_over(input, every.tensor_degrees())?;
        &whole
    };
    let mut together = colocated(
        ranks,
        nodes,
        input.global_batch_size,
        input.num_microbatches,
        &first_modes(models, &every),
        input.first_order(),
        &every,
    );
    let rules = Rules { only: &every, ..Rules::of(input, models.plain()) };
    together.extend(colocated_groups(&rules, models));
    let mut rivals = Vec::new();
    let all: Vec<&[SampleIndex]> = batches.all().map(|(_, batch)| batch).collect();
    for (name, is_balanced) in [("megatron", false), ("megatron-balanced", true)] {
        let found = megatron(input, models, &all, batches.sampled.len(), is_balanced);
        rivals.push(found.map_or_else(
            || none(name),
            |found| Rival {
                layout: words(&found.layout, found.recompute),
                num_microbatches: found.num_microbatches,
                step_ns_mean: Some(found.step_ns_mean),
                bubble_ratio: Some(found.idle_ratio),
                is_cut: found.is_cut,
                ..none(name)
            },
        ));
    }
    for (name, method) in
        [("fsdp", Method::Blind), ("fsdp-tokens", Method::Tokens), ("fsdp-dflop", Method::Aware)]
    {
        rivals.push(fastest(name, method != Method::Aware, &together, &[method], input, models, batches)?);
    }
    let mut at_mean: Vec<&Contender> =
        contenders.iter().filter(|one| !one.candidate.layout.is_colocated() && !one.rough.is_over).collect();
    at_mean.sort_by_key(|one| (one.rough.at_mean_ns, one.candidate));
    // In every mode of recomputation: what holds most is estimated fastest, and would be all that is tried where it lacks
    // memory. Of one layout the number of microbatches with the least estimate.
    let mut paper: Option<Rival> = None;
    for &mode in models.modes() {
        let mut seen = BTreeSet::new();
        let of_mode = at_mean.iter().filter(|one| one.candidate.recompute == mode);
        let firsts = of_mode.filter(|one| seen.insert(one.candidate.layout));
        let mut num_fitting = 0;
        for one in firsts.take(PAPER_TRIED) {
            let own = [one.candidate];
            let found = fastest("paper", true, &own, &[Method::Balanced], input, models, batches)?;
            let Some(ns) = found.step_ns_mean else { continue };
            if paper.as_ref().and_then(|best| best.step_ns_mean).is_none_or(|best| ns < best) {
                paper = Some(found);
            }
            num_fitting += 1;
            if num_fitting == PAPER_FITTING {
                break;
            }
        }
    }
    rivals.push(paper.unwrap_or_else(|| none("paper")));
    Ok(rivals)
}

const fn none(name: &'static str) -> Rival {
    Rival {
        name,
        is_of_others: true,
        layout: String::new(),
        num_microbatches: 0,
        step_ns_mean: None,
        bubble_ratio: None,
        is_cut: false,
        candidate: None,
    }
}

/// A layout, and what is recomputed, if anything is.
pub(crate) fn words(layout: &str, recompute: Recomputation) -> String {
    if recompute.is_none() { layout.to_owned() } else { format!("{layout}, {recompute} recomputation") }
}

/// The candidate with the shortest mean step under one of the methods, with and without running ahead.
fn fastest(
    name: &'static str,
    is_of_others: bool,
    candidates: &[Candidate],
    methods: &[Method],
    input: &SearchInput<'_>,
    models: &Models,
    batches: &Batches<'_>,
) -> Result<Rival, PlanError> {
    let arms = methods.iter().flat_map(|&method| {
        let ahead = candidates.iter().any(|candidate| !candidate.layout.is_colocated());
        [false, true]
            .into_iter()
            .filter(move |&is_ahead| ahead || !is_ahead)
            .map(move |is_ahead| Arm { method, is_ahead })
    });
    let arms: Vec<Arm> = arms.collect();
    let tries = |candidates: &[Candidate]| -> Vec<(Candidate, Arm)> {
        arms.iter().flat_map(|&arm| candidates.iter().map(move |&candidate| (candidate, arm))).collect()
    };
    let step = |candidate: &Candidate, arm: Arm, is_whole: bool| -> Result<Option<Timed>, PlanError> {
        let scheduler = candidate.scheduler_of_others(input, models)?;
        let (mut sum, num_sampled) = (0, batches.sampled.len());
        for (at, (step, batch)) in batches.all().enumerate() {
            match scheduler.schedule_until(step, batch, arm, &|| !is_whole || (input.halt)()) {
                Ok(schedule) => sum += u64::from(at < num_sampled) * schedule.predicted_makespan_ns,
                Err(error) if refusal(&error).is_some() => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(Some((sum / num_sampled.max(1) as u64, *candidate, arm)))
    };
    let (has_some, is_cut) = (AtomicBool::new(false), AtomicBool::new(false));
    let until_halted = |(candidate, arm): &(Candidate, Arm)| {
        if has_some.load(Relaxed) && (input.halt)() {
            is_cut.store(true, Relaxed);
            return Ok(None);
        }
        let found = step(candidate, *arm, false)?;
        has_some.fetch_or(found.is_some(), Relaxed);
        Ok(found)
    };
    let timed = |candidates: &[Candidate]| -> Result<Vec<Timed>, PlanError> {
        let tries = tries(candidates);
        let steps = tries.par_iter().map(until_halted);
        Ok(steps.collect::<Result<Vec<Option<Timed>>, PlanError>>()?.into_iter().flatten().collect())
    };
    let mut steps = timed(candidates)?;
    steps.extend(timed(&rival_modes::unequal(models, candidates, &steps))?);
    steps.extend(timed(&rival_modes::partly(input, models, &steps))?);
    steps.sort_by_key(|&(ns, candidate, _)| (ns, candidate));
    // A method that searches is not judged by its first answer alone. Its candidates in front have the whole search, as
    // ours have.
    let searches = |arm: Arm| matches!(arm.method, Method::Aware | Method::Ordered | Method::Shaped);
    let has_whole = input.global_batch_size as usize <= WHOLE_SAMPLES_MAX;
    if has_whole {
        let whole: Vec<Option<Timed>> = steps
            .iter()
            .filter(|(_, _, arm)| searches(*arm))
            .take(WHOLE_TRIED)
            .collect::<Vec<_>>()
            .par_iter()
            .map(|(_, candidate, arm)| step(candidate, *arm, true))
            .collect::<Result<_, PlanError>>()?;
        steps.extend(whole.into_iter().flatten());
    }
    let Some((ns, candidate, arm)) = steps.into_iter().min_by_key(|&(ns, candidate, _)| (ns, candidate))
    else {
        return Ok(Rival { is_of_others, ..none(name) });
    };
    // Idle time is asked of the winner alone, whose schedules are made once more for it.
    let scheduler = candidate.scheduler_of_others(input, models)?;
    let is_whole = searches(arm) && has_whole;
    let mut idle = 0.0;
    for (step, batch) in (0..).zip(batches.sampled) {
        let schedule = scheduler.schedule_until(step, batch, arm, &|| !is_whole || (input.halt)())?;
        idle += scheduler.simulate(&schedule)?.bubble_ratio();
    }
    Ok(Rival {
        name,
        is_of_others,
        layout: words(&candidate.layout.to_string(), candidate.recompute),
        num_microbatches: candidate.num_microbatches,
        step_ns_mean: Some(ns),
        bubble_ratio: Some(idle / batches.sampled.len().max(1) as f64),
        is_cut: is_cut.into_inner(),
        candidate: Some(candidate),
    })
}

#[cfg(test)]
mod tests;
