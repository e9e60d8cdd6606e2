//! The funnel: which candidates are judged, and how thoroughly.
//!
//! ```text
//! all           a rough estimate                                          microseconds each
//! the first     one global batch, the scheduler's first answer            tens of milliseconds each
//! the six best  all global batches, the scheduler's first answer
//! the best      all global batches, the scheduler's whole search
//! ```
//!
//! Every row looks at the same global batches. Counts, not times, decide how many candidates reach the next row, so that
//! the same search gives the same plan on a slower machine.

mod polish;

use crate::contender::Contender;
use crate::error::PlanError;
use crate::evaluate::{Judged, Verdict, judge_batch, summary};
use crate::found::{Found, NUM_RANKED};
use crate::input::{Depth, SearchInput};
use crate::models::Models;
use crate::run_memory::{Held, Run, RunMemory};
use crate::space::Candidate;
use dflop_step::StepScheduler;
use dflop_types::{PlanPrediction, Recomputation, Rejection, SampleIndex};
use rayon::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

/// The most candidates that are judged on the first batch.
const FIRST_MAX: usize = 96;
/// As [`FIRST_MAX`], where only a step to compare with is asked for.
const FIRST_OF_STEP: usize = 16;
/// The fewest candidates that are judged on the first batch, however many samples it has.
const FIRST_MIN: usize = 2;
/// Between these two limits: so many candidates that their batches together have this many samples. Scheduling takes
/// some tenth of a millisecond a sample.
const FIRST_SAMPLES: usize = 6_144;

/// Samples in one batch beyond which the scheduler's whole search would take longer than all that comes before it.
pub(crate) const WHOLE_SAMPLES_MAX: usize = 16_384;

/// Samples in one batch beyond which it takes seconds to judge a pipeline. One is judged there, and pipelines that leave little
/// memory free stand behind the others: they take longest.
const PIPELINE_SAMPLES_MAX: usize = 8_192;

/// Samples in one batch from which on the estimates of colocated layouts are too close to tell which is best: layouts that gather
/// inside nodes and layouts that gather across them are some percent apart. From here to [`WHOLE_SAMPLES_MAX`],
/// [`FIRST_OF_LARGE`] candidates are judged on the first batch; with fewer samples, and with more, as few as [`FIRST_MIN`].
const LARGE_SAMPLES: usize = 8_192;

/// As [`FIRST_MIN`], for large batches.
const FIRST_OF_LARGE: usize = 4;

/// Samples in one batch up to which the scheduler's whole search is cheap. It then judges all candidates near the best
/// one, and it is also tried if the first answer does not fit into memory.
const PATIENT_SAMPLES_MAX: usize = 128;

/// Samples in one batch up to which the whole search takes some milliseconds. There the whole search is as cheap
/// as a first answer.
pub(crate) const TINY_SAMPLES_MAX: usize = 16;

/// The most candidates that are tried until one fits the first batch.
const TRIED_MAX: usize = 192;

/// The most candidates that are tried in all. More than `TRIED_MAX` are needed if those that fit the sampled batches do
/// not fit other batches of the run.
const ALL_TRIED_MAX: usize = 4 * TRIED_MAX;

/// The most candidates that the scheduler's whole search judges if a batch has more than `PATIENT_SAMPLES_MAX` samples:
/// the best one, and then the one that stands in front of it.
const WHOLE_MAX: usize = 2;

/// Pipelines that are judged even if most candidates in front are colocated, so that people see what a pipeline takes.
const PIPELINES: usize = 4;

/// Colocated candidates that are judged though the estimate says that they lack memory, if it also says that they would be
/// in front; no more than are judged first where batches are large. The estimate scales the mean sample, and is some percent
/// off where memory is all but full.
const TIGHT: usize = 8;

/// Candidates of one mode of recomputation that are judged though they stand too far behind, if every judged step is far
/// above what they are estimated to take: then the estimates of the modes in front were wrong, as where memory holds so few
/// microbatches that a pipeline idles.
const OF_MODE: usize = 8;

/// Of the candidates that come after the others ([`judge_more`]): so many are judged on the first batch.
const MORE_MAX: usize = 16;

/// As [`MORE_MAX`]: so many of one layout.
const OF_LAYOUT: usize = 3;

/// Samples in one batch up to which candidates that come after the others are judged though their estimate is a twelfth behind that of
/// the best plan, or as long as its step.
const MORE_SAMPLES_MAX: usize = 2_048;

/// As [`MORE_MAX`]: so many of them on all batches, where these are not small.
const MORE_KEPT: usize = 4;

/// Candidates judged at once. It does not depend on the number of cores, so that a search does the same on any machine.
pub(crate) const AT_ONCE: usize = 8;

/// A candidate whose estimate is above this is not judged; `step_ns` is the best judged step. The margin of a twelfth is
/// there because estimates are some percent off.
pub(crate) const fn far(step_ns: u64) -> u64 {
    step_ns.saturating_add(step_ns / 12)
}

/// How many candidates are judged on the first batch, if it has so many samples.
fn first_of(num_samples: usize) -> usize {
    let is_large = (LARGE_SAMPLES..=WHOLE_SAMPLES_MAX).contains(&num_samples);
    let least = if is_large { FIRST_OF_LARGE } else { FIRST_MIN };
    (FIRST_SAMPLES / num_samples.max(1)).clamp(least, FIRST_MAX)
}

/// A contender and its judged batches.
struct Judgement {
    contender: Contender,
    judged: Vec<Judged>,
}

impl Judgement {
    fn prediction(&self) -> PlanPrediction {
        summary(&self.judged)
    }

    /// Its step on the first batch, in nanoseconds: the others are judged later.
    fn step_ns(&self) -> u64 {
        self.prediction().step_ns_mean
    }
}

/// Judges the candidates with the best estimates and adds the plans to `found`; all others are rejected.
pub(crate) fn judge(
    input: &SearchInput<'_>,
    models: &Models,
    mut contenders: Vec<Contender>,
    held: &Held<'_>,
    depth: Depth,
    found: &mut Found,
    progress: &dyn Fn(&Found),
) -> Result<(), PlanError> {
    let Held { batches, run } = held;
    let size = batches[0].len().max(1);
    // Where batches are large, few are judged. Of two pipelines that are estimated alike it is the one with ample memory: one
    // that is all but full takes several times as long to judge, and often does not fit.
    let key = |one: &Contender| {
        let is_late =
            size > PIPELINE_SAMPLES_MAX && one.rough.is_tight && !one.candidate.layout.is_colocated();
        let late_ns = if is_late { one.rough.step_ns / 32 } else { 0 };
        (one.rough.is_over, one.rough.step_ns.saturating_add(late_ns), one.rough, one.candidate)
    };
    contenders.par_sort_unstable_by_key(key);
    let is_brief = depth == Depth::Step;
    let first = if is_brief { first_of(size).min(FIRST_OF_STEP) } else { first_of(size) };
    let mut waiting = contenders.into_iter().peekable();
    let mut num_tried = 0;
    // It may be that no candidate that fits the sampled batches fits the heaviest batches of the run. Then the next
    // candidates are judged.
    while found.ranked.is_empty() && num_tried < ALL_TRIED_MAX {
        let num_before = num_tried;
        let mut judged: Vec<Judgement> = Vec::new();
        while let Some(next) = waiting.peek() {
            let best_ns = judged.iter().map(Judgement::step_ns).min();
            let most = if judged.is_empty() { TRIED_MAX.max(first) } else { first };
            let is_far = (is_brief || size > PATIENT_SAMPLES_MAX)
                && best_ns.is_some_and(|ns| judged.len() >= NUM_RANKED && next.rough.step_ns > far(ns));
            if num_tried - num_before >= most || is_far || !judged.is_empty() && (input.halt)() {
                break;
            }
            progress(found);
            let cutoff_ns = best_ns.map(|ns| ns + ns / 4);
            let next: Vec<Contender> = waiting.by_ref().take(AT_ONCE.min(first)).collect();
            num_tried += next.len();
            let verdicts = judged_first(input, models, next, batches, cutoff_ns)?;
            sort_out(verdicts, &mut judged, found);
        }
        // A pipeline beside the colocated layouts: its time is known too, and it is taken where the estimates were wrong
        // about it. One is enough where judging takes tens of seconds.
        let is_pipeline = |one: &Contender| !one.candidate.layout.is_colocated();
        let mut left: Vec<Contender> = waiting.collect();
        let most = if size <= PIPELINE_SAMPLES_MAX { PIPELINES.min(first) } else { 1 };
        let num_pipelines = judged.iter().filter(|one| is_pipeline(&one.contender)).count();
        if num_pipelines < most && !(input.halt)() {
            let next = taken(&mut left, most - num_pipelines, is_pipeline);
            let verdicts = judged_first(input, models, next, batches, None)?;
            sort_out(verdicts, &mut judged, found);
        }
        if size <= WHOLE_SAMPLES_MAX && !(input.halt)() {
            let best_ns = judged.iter().map(Judgement::step_ns).min();
            let is_tight = |one: &Contender| {
                !is_pipeline(one) && one.rough.is_over && best_ns.is_some_and(|ns| one.rough.step_ns < ns)
            };
            let next = taken(&mut left, TIGHT.min(first), is_tight);
            let verdicts = judged_first(input, models, next, batches, best_ns)?;
            sort_out(verdicts, &mut judged, found);
        }
        if size <= WHOLE_SAMPLES_MAX {
            other_modes(input, models, batches, (&mut left, &mut judged), found)?;
        }
        waiting = left.into_iter().peekable();
        judged.sort_by_key(|one| (one.step_ns(), one.contender.candidate));
        found.num_judged += judged.len() as u64;
        let kept = if size <= PATIENT_SAMPLES_MAX && !is_brief { 2 * NUM_RANKED } else { NUM_RANKED };
        while found.ranked.is_empty() && !judged.is_empty() {
            let other = best_other(&judged, kept).map(|at| judged.remove(at));
            let left = judged.split_off(kept.min(judged.len()));
            let front = std::mem::replace(&mut judged, left).into_iter().chain(other).collect();
            let fitting = rest_of_batches(input, models, front, batches, found)?;
            for one in fitting_run(input, models, fitting, run.as_ref(), found)? {
                found.insert(&one.contender.candidate, input, &one.judged);
            }
            if size <= WHOLE_SAMPLES_MAX {
                polish::polish(input, models, batches, depth, found)?;
            }
            confirm(input, models, run.as_ref(), found)?;
        }
        if waiting.peek().is_none() || (input.halt)() {
            break;
        }
    }
    let was_halted = (input.halt)();
    let cutoff_ns = found.cutoff_ns();
    for contender in waiting {
        if cutoff_ns.is_some_and(|cutoff| contender.bound_ns(input.objective) > cutoff) {
            found.rejections.push(Rejection::Bound);
        } else if was_halted && num_tried < first {
            found.num_left += 1;
        } else {
            found.rejections.push(Rejection::Estimate);
        }
    }
    Ok(())
}

/// Judges contenders that come after the others: those that are estimated to be at least as fast as the best plan so far, whose
/// own estimate is `estimate_ns`. Those that fit join `found`; the others are rejected.
pub(crate) fn judge_more(
    input: &SearchInput<'_>,
    models: &Models,
    mut contenders: Vec<Contender>,
    estimate_ns: Option<u64>,
    Held { batches, run }: &Held<'_>,
    found: &mut Found,
) -> Result<(), PlanError> {
    contenders.par_sort_unstable_by_key(|one| (one.rough.is_over, one.rough, one.candidate));
    let (size, best_ns) = (batches[0].len(), found.ranked.first().map(|plan| found.value_ns(plan)));
    // Where judging is cheap, an estimate that is some percent off costs no plan: neither the contender's nor the plan's own.
    let limit_ns = estimate_ns.map(|ns| match best_ns {
        Some(best) if size <= MORE_SAMPLES_MAX => far(ns).max(best),
        _ => ns,
    });
    let is_slower = |one: &Contender| best_ns.is_some_and(|ns| one.bound_ns(input.objective) > ns);
    let sizes = contenders.iter().filter(|one| !is_slower(one)).map(|one| one.candidate.layout.num_ranks());
    let of_size = (MORE_MAX / sizes.collect::<BTreeSet<u32>>().len().max(1)).max(OF_LAYOUT);
    let most = MORE_MAX.min(first_of(size));
    // Estimates of one layout are close, and those of the largest part are in front: others have their turn too.
    let (mut by_layout, mut by_size) = (BTreeMap::new(), BTreeMap::new());
    let mut front = Vec::new();
    for one in contenders {
        if is_slower(&one) {
            found.rejections.push(Rejection::Bound);
            continue;
        }
        let layout = one.candidate.layout;
        let number = |of: Option<&usize>| of.copied().unwrap_or(0);
        let is_full = number(by_layout.get(&layout)) >= OF_LAYOUT
            || number(by_size.get(&layout.num_ranks())) >= of_size;
        if front.len() < most && !is_full && limit_ns.is_none_or(|limit| one.rough.step_ns <= limit) {
            *by_layout.entry(layout).or_insert(0) += 1;
            *by_size.entry(layout.num_ranks()).or_insert(0) += 1;
            front.push(one);
        } else {
            found.rejections.push(Rejection::Estimate);
        }
    }
    let mut judged = Vec::new();
    sort_out(judged_first(input, models, front, batches, best_ns)?, &mut judged, found);
    judged.sort_by_key(|one| (one.step_ns(), one.contender.candidate));
    found.num_judged += judged.len() as u64;
    judged.truncate(if size <= PATIENT_SAMPLES_MAX { NUM_RANKED } else { MORE_KEPT });
    let fitting = rest_of_batches(input, models, judged, batches, found)?;
    let fitting = fitting_run(input, models, fitting, run.as_ref(), found)?;
    if fitting.is_empty() {
        return Ok(());
    }
    for one in fitting {
        found.insert(&one.contender.candidate, input, &one.judged);
    }
    if size <= WHOLE_SAMPLES_MAX {
        polish::polish(input, models, batches, Depth::Explained, found)?;
    }
    confirm(input, models, run.as_ref(), found)
}

/// Judges candidates of the modes of recomputation of which none was judged, if what was judged takes a quarter longer than
/// they are estimated to take. `left` has the best estimates first.
fn other_modes(
    input: &SearchInput<'_>,
    models: &Models,
    batches: &[Vec<SampleIndex>],
    (left, judged): (&mut Vec<Contender>, &mut Vec<Judgement>),
    found: &mut Found,
) -> Result<(), PlanError> {
    let most = OF_MODE.min(first_of(batches[0].len()));
    for &mode in models.modes() {
        let Some(best_ns) = judged.iter().map(Judgement::step_ns).min() else { return Ok(()) };
        if judged.iter().any(|one| one.contender.candidate.recompute == mode) || (input.halt)() {
            continue;
        }
        let next = taken(left, most, |one| is_missed(one, mode, best_ns));
        sort_out(judged_first(input, models, next, batches, Some(best_ns))?, judged, found);
    }
    Ok(())
}

/// Whether a contender of a mode of recomputation is estimated to take less than four fifths of the best judged step.
fn is_missed(one: &Contender, mode: Recomputation, best_ns: u64) -> bool {
    let rough = one.rough;
    one.candidate.recompute == mode
        && !rough.is_over
        && rough.step_ns.saturating_add(rough.step_ns / 4) < best_ns
}

/// The first `most` contenders of a kind, taken out of `left`.
fn taken(left: &mut Vec<Contender>, most: usize, is_of_kind: impl Fn(&Contender) -> bool) -> Vec<Contender> {
    let places: Vec<usize> = (0..left.len()).filter(|&at| is_of_kind(&left[at])).take(most).collect();
    places.into_iter().rev().map(|at| left.remove(at)).collect()
}

/// The position of the best candidate whose placement is not that of the front one, for example the best pipeline if a
/// colocated candidate is in front. `None` if it is among the first `kept` anyway, or if there is none.
fn best_other(judged: &[Judgement], kept: usize) -> Option<usize> {
    let placement = |one: &Judgement| one.contender.candidate.layout.placement;
    let best = placement(judged.first()?);
    judged.iter().position(|one| placement(one) != best).filter(|&at| at >= kept)
}

/// Contenders with their verdicts on the first batch. A contender whose bound is above the cutoff is rejected without
/// being scheduled.
fn judged_first(
    input: &SearchInput<'_>,
    models: &Models,
    contenders: Vec<Contender>,
    batches: &[Vec<SampleIndex>],
    cutoff_ns: Option<u64>,
) -> Result<Vec<(Contender, Verdict)>, PlanError> {
    let judge = |contender: Contender| {
        if cutoff_ns.is_some_and(|cutoff| contender.bounds_ns[0] > cutoff) {
            return Ok((contender, Err(Rejection::Bound)));
        }
        let scheduler = contender.candidate.scheduler(input, models)?;
        let verdict = first_answer(input, &scheduler, 0, &batches[0])?;
        Ok((contender, verdict))
    };
    contenders.into_par_iter().map(judge).collect()
}

/// Adds contenders that fit to `judged`, and the rejections of the others to `found`.
fn sort_out(verdicts: Vec<(Contender, Verdict)>, judged: &mut Vec<Judgement>, found: &mut Found) {
    for (contender, verdict) in verdicts {
        match verdict {
            Ok(one) => judged.push(Judgement { contender, judged: vec![one] }),
            Err(rejection) => found.rejections.push(rejection),
        }
    }
}

/// The scheduler's first answer for one batch. The answer of its whole search instead if the batch is tiny, or if the
/// batch is small and the first answer does not fit.
pub(crate) fn first_answer(
    input: &SearchInput<'_>,
    scheduler: &StepScheduler,
    step: u64,
    batch: &[SampleIndex],
) -> Result<Verdict, PlanError> {
    let is_tiny = batch.len() <= TINY_SAMPLES_MAX;
    let verdict = judge_batch(scheduler, step, batch, &|| !is_tiny || (input.halt)())?;
    let is_worth = batch.len() <= PATIENT_SAMPLES_MAX && !(input.halt)();
    match verdict {
        Err(Rejection::Memory { .. }) if is_worth => judge_batch(scheduler, step, batch, &|| (input.halt)()),
        verdict => Ok(verdict),
    }
}

/// Judges the same candidates on the batches after the first. Those that do not fit there are rejected.
fn rest_of_batches(
    input: &SearchInput<'_>,
    models: &Models,
    judged: Vec<Judgement>,
    batches: &[Vec<SampleIndex>],
    found: &mut Found,
) -> Result<Vec<Judgement>, PlanError> {
    let pairs: Vec<(usize, usize)> =
        (0..judged.len()).flat_map(|at| (1..batches.len()).map(move |step| (at, step))).collect();
    let verdicts: Vec<Verdict> = pairs
        .par_iter()
        .map(|&(at, step)| {
            let scheduler = judged[at].contender.candidate.scheduler(input, models)?;
            first_answer(input, &scheduler, step as u64, &batches[step])
        })
        .collect::<Result<_, PlanError>>()?;
    let mut fitting = Vec::with_capacity(judged.len());
    let mut verdicts = verdicts.into_iter();
    for mut one in judged {
        // All verdicts of this candidate are taken, also those after a rejection: the next ones belong to the next candidate.
        let own: Vec<Verdict> = verdicts.by_ref().take(batches.len() - 1).collect();
        match own.into_iter().collect::<Result<Vec<Judged>, Rejection>>() {
            Ok(rest) => {
                one.judged.extend(rest);
                fitting.push(one);
            }
            Err(rejection) => {
                found.num_judged -= 1;
                found.rejections.push(rejection);
            }
        }
    }
    Ok(fitting)
}

/// Schedules candidates on those global batches of the run that may come near the memory budget, and says which
/// candidates fit.
pub(crate) fn on_run(
    input: &SearchInput<'_>,
    models: &Models,
    run: &Run,
    asked: &[(Candidate, PlanPrediction)],
    is_plan: bool,
) -> Result<Vec<Result<RunMemory, Rejection>>, PlanError> {
    let peaks = |(candidate, prediction): &(Candidate, PlanPrediction)| {
        (*candidate, [prediction.encoder_memory_bytes_peak, prediction.llm_memory_bytes_peak])
    };
    let asked: Vec<(Candidate, [u64; 2])> = asked.iter().map(peaks).collect();
    run.check(input, models, &asked, is_plan, &|candidate, step, batch| {
        first_answer(input, &candidate.scheduler(input, models)?, step, batch)
    })
}

/// The candidates that also fit the fullest global batches of the run; the others are rejected.
fn fitting_run(
    input: &SearchInput<'_>,
    models: &Models,
    judged: Vec<Judgement>,
    run: Option<&Run>,
    found: &mut Found,
) -> Result<Vec<Judgement>, PlanError> {
    let Some(run) = run else { return Ok(judged) };
    let asked: Vec<_> = judged.iter().map(|one| (one.contender.candidate, one.prediction())).collect();
    let mut fitting = Vec::with_capacity(judged.len());
    for (one, checked) in judged.into_iter().zip(on_run(input, models, run, &asked, false)?) {
        match checked {
            Ok(of_run) => {
                found.run_memory.insert(one.contender.candidate, of_run);
                fitting.push(one);
            }
            Err(rejection) => {
                found.num_judged -= 1;
                found.rejections.push(rejection);
            }
        }
    }
    Ok(fitting)
}

/// Checks the plan in front on more batches of the run. If it does not fit, it is rejected and the next one is checked.
fn confirm(
    input: &SearchInput<'_>,
    models: &Models,
    run: Option<&Run>,
    found: &mut Found,
) -> Result<(), PlanError> {
    let Some(run) = run else { return Ok(()) };
    while let Some(best) = found.ranked.first() {
        let candidate = Candidate::from(best);
        match on_run(input, models, run, &[(candidate, best.prediction)], true)?.pop() {
            Some(Err(rejection)) => {
                found.ranked.remove(0);
                found.num_judged -= 1;
                found.rejections.push(rejection);
            }
            checked => {
                found.run_memory.extend(checked.and_then(Result::ok).map(|of_run| (candidate, of_run)));
                break;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
