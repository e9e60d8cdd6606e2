//! The baselines that a plan is compared with: other ways to run the same global batches on the same ranks.
//!
//! Every way gets what ours gets: the memory budget, the cap on tokens, and forwards that run ahead. A way that
//! cannot run is reported as refused, with the reason, and no ratio is formed with it.

use crate::data_parallel::DataParallel;
use dflop_step::{Arm, Method, StepError, StepScheduler};
use dflop_types::{RankedPlan, Refusal, SampleIndex, WayPrediction};
use rayon::prelude::*;

/// The baselines that keep the layout: arrival order, and balanced by LLM tokens.
const METHODS: [Method; 2] = [Method::Blind, Method::Tokens];

/// The ways in which the global batches are compared, in the order in which people see them: arrival order and balance by
/// tokens, without and with running ahead; data parallelism, without and with its optimizer states cut over the ranks;
/// ours, without and with running ahead.
///
/// Baselines that keep the layout are tried with half and twice the microbatches too, where `tunes_microbatches` says so,
/// and the fastest count that fits is taken; running ahead is tried with that count.
///
/// # Errors
/// As [`StepScheduler::schedule`], but for what does not fit: that is a [`Refusal`].
pub fn compare(
    scheduler: &StepScheduler,
    batches: &[Vec<SampleIndex>],
    tunes_microbatches: bool,
) -> Result<Vec<WayPrediction>, StepError> {
    let mut ways = baselines(scheduler, batches, tunes_microbatches, true)?;
    for is_ahead in [false, true] {
        ways.push(predict(scheduler, batches, Arm { method: Method::Aware, is_ahead })?);
    }
    Ok(ways)
}

/// As [`compare`], for a plan whose own step time is already known.
///
/// If a global batch has more than `lists_max` samples, no way is tried with forwards that run ahead. Making the action
/// lists for so many samples would take longer than the rest of the search.
pub(crate) fn compare_with(
    plan: &RankedPlan,
    scheduler: &StepScheduler,
    batches: &[Vec<SampleIndex>],
    tunes_microbatches: bool,
    lists_max: usize,
) -> Result<Vec<WayPrediction>, StepError> {
    let has_lists = batches.iter().all(|batch| batch.len() <= lists_max);
    let mut ways = baselines(scheduler, batches, tunes_microbatches, has_lists)?;
    let own = WayPrediction {
        way: Arm::AWARE.to_string(),
        is_baseline: false,
        num_microbatches: plan.num_microbatches,
        step_ns_mean: Some(plan.prediction.step_ns_mean),
        refusal: None,
    };
    let ahead = Arm { is_ahead: true, ..Arm::AWARE };
    let of_ahead = match (has_lists, plan.layout.is_colocated()) {
        (false, _) => None,
        (true, true) => Some(WayPrediction { way: ahead.to_string(), ..own.clone() }),
        (true, false) => Some(predict(scheduler, batches, ahead)?),
    };
    ways.push(own);
    ways.extend(of_ahead);
    Ok(ways)
}

fn baselines(
    scheduler: &StepScheduler,
    batches: &[Vec<SampleIndex>],
    tunes_microbatches: bool,
    has_lists: bool,
) -> Result<Vec<WayPrediction>, StepError> {
    let mut ways = Vec::new();
    let is_colocated = scheduler.settings().layout.is_colocated();
    for method in METHODS {
        let (tuned, plain) = fastest_count(scheduler, batches, method, tunes_microbatches)?;
        if has_lists {
            let arm = Arm { method, is_ahead: true };
            // Nothing runs ahead on colocated ranks.
            let ahead = if is_colocated {
                WayPrediction { way: arm.to_string(), ..plain.clone() }
            } else {
                predict(&tuned, batches, arm)?
            };
            ways.push(plain);
            ways.push(ahead);
        } else {
            ways.push(plain);
        }
    }
    // Plain data parallelism runs whole layers. A cost model of layers cut over a tensor group has no times for those.
    if !scheduler.settings().layout.cuts_layers() {
        for shards_states in [false, true] {
            ways.push(data_parallel(scheduler, batches, shards_states));
        }
    }
    Ok(ways)
}

/// The scheduler with the number of microbatches that is fastest under `method`, and the step it predicts.
fn fastest_count(
    scheduler: &StepScheduler,
    batches: &[Vec<SampleIndex>],
    method: Method,
    tunes_microbatches: bool,
) -> Result<(StepScheduler, WayPrediction), StepError> {
    let own = scheduler.settings().num_microbatches;
    let arm = Arm { method, is_ahead: false };
    let mut best = (scheduler.clone(), predict(scheduler, batches, arm)?);
    if !tunes_microbatches {
        return Ok(best);
    }
    let fewest_samples = batches.iter().map(Vec::len).min().unwrap_or(0) as u64;
    let replicas = u64::from(scheduler.settings().layout.llm.dp);
    for count in [own / 2, own.saturating_mul(2)] {
        if count == 0 || u64::from(count) * replicas > fewest_samples {
            continue;
        }
        let other = scheduler.with_num_microbatches(count)?;
        let found = predict(&other, batches, arm)?;
        let is_faster = match (found.step_ns_mean, best.1.step_ns_mean) {
            (Some(found), Some(best)) => found < best,
            (found, None) => found.is_some(),
            (None, Some(_)) => false,
        };
        if is_faster {
            best = (other, found);
        }
    }
    Ok(best)
}

/// The mean step of one arm, or why it cannot run.
fn predict(
    scheduler: &StepScheduler,
    batches: &[Vec<SampleIndex>],
    arm: Arm,
) -> Result<WayPrediction, StepError> {
    let step = |(step, batch): (usize, &Vec<SampleIndex>)| match scheduler.schedule(step as u64, batch, arm) {
        Ok(schedule) => Ok(Ok(schedule.predicted_makespan_ns)),
        Err(error) => refusal(&error).map(Err).ok_or(error),
    };
    let steps: Vec<Result<u64, Refusal>> =
        batches.par_iter().enumerate().map(step).collect::<Result<_, _>>()?;
    let is_baseline = METHODS.contains(&arm.method);
    Ok(way(arm.to_string(), is_baseline, scheduler.settings().num_microbatches, &steps))
}

/// The refusal that `error` stands for; `None` if the error is not about a global batch that cannot run.
pub fn refusal(error: &StepError) -> Option<Refusal> {
    match *error {
        StepError::Memory { needed_bytes, budget_bytes, .. }
        | StepError::SampleTooLarge { needed_bytes, budget_bytes, .. }
        | StepError::GiantMemory { needed_bytes, budget_bytes, .. } => {
            Some(Refusal::Memory { needed_bytes, budget_bytes })
        }
        StepError::Tokens { needed_tokens, bucket_tokens_max, .. } => {
            Some(Refusal::BucketTokens { needed_tokens, bucket_tokens_max })
        }
        _ => None,
    }
}

/// Data parallelism on the ranks of the scheduler's layout.
pub fn data_parallel_of(scheduler: &StepScheduler, shards_states: bool) -> DataParallel<'_> {
    let settings = scheduler.settings();
    DataParallel {
        model: scheduler.model(),
        shapes: scheduler.shapes(),
        num_ranks: settings.layout.num_ranks(),
        shards_states,
        memory_budget_bytes: settings.memory_budget_bytes,
        bucket_tokens_max: scheduler.bucket_tokens_max(),
    }
}

fn data_parallel(
    scheduler: &StepScheduler,
    batches: &[Vec<SampleIndex>],
    shards_states: bool,
) -> WayPrediction {
    let plain = data_parallel_of(scheduler, shards_states);
    let steps: Vec<_> = batches.par_iter().map(|batch| plain.step(batch)).collect();
    let num_microbatches = steps.iter().flatten().map(|step| step.num_microbatches).max().unwrap_or(1);
    let steps: Vec<Result<u64, Refusal>> =
        steps.into_iter().map(|step| step.map(|step| step.makespan_ns)).collect();
    way(plain.name().to_owned(), true, num_microbatches, &steps)
}

/// The mean of the steps of a way. If some step cannot run, the refusal that is furthest from fitting.
fn way(
    way: String,
    is_baseline: bool,
    num_microbatches: u32,
    steps: &[Result<u64, Refusal>],
) -> WayPrediction {
    let lack = |refusal: &Refusal| match *refusal {
        Refusal::Memory { needed_bytes, .. } => needed_bytes,
        Refusal::BucketTokens { needed_tokens, .. } => needed_tokens,
    };
    let refusal = steps.iter().filter_map(|step| step.err()).max_by_key(lack);
    let sum: u128 = steps.iter().flatten().map(|&ns| u128::from(ns)).sum();
    let mean = u64::try_from(sum / (steps.len().max(1) as u128)).unwrap_or(u64::MAX);
    WayPrediction {
        way,
        is_baseline,
        num_microbatches,
        step_ns_mean: refusal.is_none().then_some(mean),
        refusal,
    }
}
