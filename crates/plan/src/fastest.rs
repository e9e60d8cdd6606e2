//! The fastest of a rival's colocated candidates under one method.
//!
//! ```text
//! all           one global batch                        the shortest first
//! one by one    the other batches, then the fullest ones of the run
//!               left out as soon as its steps so far, with the lower bounds of the batches left, are above the best
//! the best      all batches by the whole search, where the method searches
//! ```
//!
//! What is left out is certain to be slower, so the answer is that of judging all of them.

use crate::baseline::refusal;
use crate::bound::colocated_min_ns;
use crate::contender::Known;
use crate::error::PlanError;
use crate::funnel::WHOLE_SAMPLES_MAX;
use crate::input::SearchInput;
use crate::leaders::{Leaders, in_turn};
use crate::models::Models;
use crate::rival::{Batches, Rival, none, words};
use crate::rival_modes;
use crate::space::Candidate;
use dflop_step::{Arm, Method, StepScheduler};
use dflop_types::{SampleIndex, Schedule};
use rayon::prelude::*;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Candidates of a rival that have the scheduler's whole search: those in front by their first answers.
const WHOLE_TRIED: usize = 3;

/// A candidate that fits, with its mean step in nanoseconds and its schedules of the sampled batches.
struct Timed {
    step_ns: u64,
    candidate: Candidate,
    placed: Vec<Schedule>,
}

impl Timed {
    const fn key(&self) -> (u64, Candidate) {
        (self.step_ns, self.candidate)
    }
}

/// A candidate of which not all batches have been scheduled.
#[derive(Clone)]
struct Started {
    candidate: Candidate,
    scheduler: StepScheduler,
    /// For each sampled batch the step, or a lower bound where it has not been scheduled.
    least_ns: Vec<u64>,
    placed: Vec<Schedule>,
}

impl Started {
    /// No mean step of the candidate is shorter, in nanoseconds.
    fn mean_ns(&self) -> u64 {
        mean_ns(&self.least_ns)
    }
}

/// The mean, rounded down.
pub(crate) fn mean_ns(steps_ns: &[u64]) -> u64 {
    let sum: u128 = steps_ns.iter().map(|&ns| u128::from(ns)).sum();
    u64::try_from(sum / steps_ns.len().max(1) as u128).unwrap_or(u64::MAX)
}

/// A rival's candidates on its batches.
pub(crate) struct Field<'a> {
    pub(crate) input: &'a SearchInput<'a>,
    pub(crate) models: &'a Models,
    pub(crate) known: &'a Known<'a>,
    pub(crate) batches: &'a Batches<'a>,
    /// Whether what is certain to be slower is left out. Tests compare this with judging all.
    pub(crate) prunes: bool,
}

impl Field<'_> {
    /// The rival with the fastest of `candidates`, which are colocated, under `method`.
    pub(crate) fn fastest(
        &self,
        name: &'static str,
        method: Method,
        candidates: &[Candidate],
    ) -> Result<Rival, PlanError> {
        let searches = matches!(method, Method::Aware | Method::Ordered | Method::Shaped);
        let is_of_others = method != Method::Aware;
        let arm = Arm { method, is_ahead: false };
        let leaders = Leaders::new(if searches { WHOLE_TRIED } else { 1 }, self.prunes);
        let is_cut = AtomicBool::new(false);
        let all = [candidates, &rival_modes::unequal(self.models, candidates)].concat();
        let mut found = self.race(&all, arm, &leaders, &is_cut)?;
        if let Some(first) = found.iter().min_by_key(|one| one.key()) {
            let partly = rival_modes::partly(self.input, self.models, &first.candidate);
            found.extend(self.race(&partly, arm, &leaders, &is_cut)?);
        }
        found.sort_by_key(Timed::key);
        // A method that searches is not judged by its first answer alone. Its candidates in front have the whole search, as
        // ours have.
        if searches && self.input.global_batch_size as usize <= WHOLE_SAMPLES_MAX {
            found.truncate(WHOLE_TRIED);
            for at in 0..found.len() {
                let limit_ns = found.iter().map(|one| one.step_ns).min().filter(|_| self.prunes);
                let whole = self.whole(&found[at].candidate, arm, limit_ns.unwrap_or(u64::MAX))?;
                found.extend(whole);
            }
        }
        let Some(best) = found.into_iter().min_by_key(Timed::key) else {
            return Ok(Rival { is_of_others, ..none(name) });
        };
        let candidate = best.candidate;
        let scheduler = candidate.scheduler_of_others(self.input, self.models)?;
        Ok(Rival {
            name,
            is_of_others,
            layout: words(&candidate.layout.to_string(), candidate.recompute),
            num_microbatches: candidate.num_microbatches,
            step_ns_mean: Some(best.step_ns),
            bubble_ratio: Some(idle_ratio(&scheduler, &best.placed)?),
            is_cut: is_cut.into_inner(),
            candidate: Some(candidate),
        })
    }

    /// The candidates that fit and may be among the leaders, by first answers.
    fn race(
        &self,
        candidates: &[Candidate],
        arm: Arm,
        leaders: &Leaders,
        is_cut: &AtomicBool,
    ) -> Result<Vec<Timed>, PlanError> {
        let has_some = AtomicBool::new(leaders.has_some());
        let is_halted = || {
            let is_halted = has_some.load(Relaxed) && (self.input.halt)();
            is_cut.fetch_or(is_halted, Relaxed);
            is_halted
        };
        let start = |candidate: &Candidate| {
            if is_halted() {
                return Ok(None);
            }
            let started = self.start(candidate, arm, leaders)?;
            has_some.fetch_or(started.is_some(), Relaxed);
            Ok::<_, PlanError>(started)
        };
        let started: Vec<Option<Started>> =
            candidates.par_iter().map(start).collect::<Result<_, PlanError>>()?;
        let mut waiting: Vec<Started> = started.into_iter().flatten().collect();
        waiting.sort_by_key(|one| (one.mean_ns(), one.candidate));
        has_some.store(leaders.has_some(), Relaxed);
        let ended = in_turn(&waiting, |one| {
            has_some.fetch_or(leaders.has_some(), Relaxed);
            if is_halted() { Ok(None) } else { self.end(one, arm, leaders) }
        });
        Ok(ended
            .into_iter()
            .collect::<Result<Vec<Option<Timed>>, PlanError>>()?
            .into_iter()
            .flatten()
            .collect())
    }

    /// A candidate with its first batch scheduled; `None` if that does not fit, or is certain to be too slow.
    fn start(
        &self,
        candidate: &Candidate,
        arm: Arm,
        leaders: &Leaders,
    ) -> Result<Option<Started>, PlanError> {
        let scheduler = candidate.scheduler_of_others(self.input, self.models)?;
        if self.is_certain_to_lack_memory(&scheduler) {
            return Ok(None);
        }
        let (least_ns, placed) = (self.bounds_ns(candidate), Vec::new());
        let mut one = Started { candidate: *candidate, scheduler, least_ns, placed };
        let fits = self.goes_on(&mut one, 0, arm, leaders)?;
        Ok(fits.then_some(one))
    }

    /// Whether one of the largest samples of the first batch is too much for a rank that has nothing else.
    fn is_certain_to_lack_memory(&self, scheduler: &StepScheduler) -> bool {
        let Some(budget_bytes) = self.input.memory_budget_bytes().filter(|_| self.prunes) else {
            return false;
        };
        let shape = |sample: &SampleIndex| &self.input.shapes[sample.index()];
        let samples = || self.batches.sampled.first().into_iter().flatten().map(shape);
        let largest =
            [samples().max_by_key(|one| one.llm_tokens), samples().max_by_key(|one| one.encoder_tokens())];
        largest.into_iter().flatten().any(|one| scheduler.alone(one).1 > budget_bytes)
    }

    /// The candidate with all its batches scheduled; `None` as for [`Field::start`].
    fn end(&self, one: &Started, arm: Arm, leaders: &Leaders) -> Result<Option<Timed>, PlanError> {
        let mut one = one.clone();
        for at in 1..self.batches.sampled.len() {
            if !self.goes_on(&mut one, at, arm, leaders)? {
                return Ok(None);
            }
        }
        if one.mean_ns() > leaders.limit_ns() {
            return Ok(None);
        }
        for (step, batch) in &self.batches.fullest {
            if scheduled(&one.scheduler, *step, batch, arm, &|| true)?.is_none() {
                return Ok(None);
            }
        }
        leaders.add(one.mean_ns());
        Ok(Some(Timed { step_ns: one.mean_ns(), candidate: one.candidate, placed: one.placed }))
    }

    /// Schedules the next sampled batch. `false` if it does not fit, or if the candidate is certain to be too slow.
    fn goes_on(&self, one: &mut Started, at: usize, arm: Arm, leaders: &Leaders) -> Result<bool, PlanError> {
        if one.mean_ns() > leaders.limit_ns() {
            return Ok(false);
        }
        let batch = &self.batches.sampled[at];
        let Some(schedule) = scheduled(&one.scheduler, at as u64, batch, arm, &|| true)? else {
            return Ok(false);
        };
        one.least_ns[at] = schedule.predicted_makespan_ns;
        one.placed.push(schedule);
        Ok(true)
    }

    /// A lower bound for each sampled batch, in nanoseconds.
    fn bounds_ns(&self, candidate: &Candidate) -> Vec<u64> {
        let model = self.models.of_others(self.input, candidate);
        let works = self.known.works_of(candidate, model);
        works.iter().map(|work| colocated_min_ns(model, candidate, work)).collect()
    }

    /// The candidate by the whole search on all batches; `None` if it does not fit, or takes more than `limit_ns`.
    fn whole(&self, candidate: &Candidate, arm: Arm, limit_ns: u64) -> Result<Option<Timed>, PlanError> {
        let scheduler = candidate.scheduler_of_others(self.input, self.models)?;
        let mut least_ns = self.bounds_ns(candidate);
        let num_sampled = least_ns.len();
        let mut placed = Vec::with_capacity(num_sampled);
        let all: Vec<(u64, &[SampleIndex])> = self.batches.all().collect();
        for some in all.chunks(rayon::current_num_threads()) {
            if mean_ns(&least_ns) > limit_ns {
                return Ok(None);
            }
            let whole = |&(step, batch): &(u64, &[SampleIndex])| {
                scheduled(&scheduler, step, batch, arm, &|| (self.input.halt)())
            };
            let answers: Vec<Option<Schedule>> =
                some.par_iter().map(whole).collect::<Result<_, PlanError>>()?;
            for answer in answers {
                let Some(schedule) = answer else { return Ok(None) };
                if placed.len() < num_sampled {
                    least_ns[placed.len()] = schedule.predicted_makespan_ns;
                    placed.push(schedule);
                }
            }
        }
        Ok(Some(Timed { step_ns: mean_ns(&least_ns), candidate: *candidate, placed }))
    }
}

/// The schedule of a batch; `None` if it does not fit.
pub(crate) fn scheduled(
    scheduler: &StepScheduler,
    step: u64,
    batch: &[SampleIndex],
    arm: Arm,
    halt: &dyn Fn() -> bool,
) -> Result<Option<Schedule>, PlanError> {
    match scheduler.schedule_until(step, batch, arm, halt) {
        Ok(schedule) => Ok(Some(schedule)),
        Err(error) if refusal(&error).is_some() => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Idle time over ranks and makespan, as the mean over schedules.
pub(crate) fn idle_ratio(scheduler: &StepScheduler, placed: &[Schedule]) -> Result<f64, PlanError> {
    let mut sum = 0.0;
    for schedule in placed {
        sum += scheduler.simulate(schedule)?.bubble_ratio();
    }
    Ok(sum / placed.len().max(1) as f64)
}
