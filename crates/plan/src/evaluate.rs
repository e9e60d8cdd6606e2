//! A candidate's judgement: sampled global batches, each filled by the scheduler that trains and timed by the
//! simulator.

use crate::error::PlanError;
use crate::objective::Objective;
use dflop_step::{Arm, Judgement, StepError, StepScheduler};
use dflop_types::statistics::Interval;
use dflop_types::{PlanPrediction, Rejection, SampleIndex};
use rayon::prelude::*;

/// What became of a candidate that was judged.
#[derive(Debug, Clone)]
pub(crate) enum Outlook {
    /// The judged batches.
    Fits(Vec<Judged>),
    Falls(Rejection),
}

/// One judged batch, or why the candidate is rejected.
pub(crate) type Verdict = Result<Judged, Rejection>;

/// One global batch as a candidate runs it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Judged {
    makespan_ns: u64,
    idle_ratio: f64,
    /// Peak memory of the fullest encoder rank and of the fullest LLM rank, in bytes.
    peaks: [u64; 2],
    num_predictions: u64,
    num_extrapolated: u64,
}

impl Judged {
    pub(crate) const fn makespan_ns(&self) -> u64 {
        self.makespan_ns
    }
}

/// Mean and half width of its 95 % confidence interval; the half width is 0 for one value, which has no interval.
pub(crate) fn mean_and_half_width(values: &[u64]) -> (u64, u64) {
    let values: Vec<f64> = values.iter().map(|&value| value as f64).collect();
    match Interval::of(&values) {
        Some(found) => (found.mean.round() as u64, (found.high - found.mean).round() as u64),
        None => (values.first().map_or(0, |value| value.round() as u64), 0),
    }
}

/// One global batch, filled by the scheduler that trains. When `halt` says so, the scheduler ends its search and gives
/// the best schedule so far.
pub(crate) fn judge_batch(
    scheduler: &StepScheduler,
    step: u64,
    batch: &[SampleIndex],
    halt: &dyn Fn() -> bool,
) -> Result<Verdict, PlanError> {
    let aware = match scheduler.schedule_until(step, batch, Arm::AWARE, halt) {
        Ok(aware) => aware,
        Err(
            StepError::Memory { component, needed_bytes, budget_bytes, .. }
            | StepError::SampleTooLarge { component, needed_bytes, budget_bytes, .. }
            | StepError::GiantMemory { component, needed_bytes, budget_bytes, .. },
        ) => return Ok(Err(Rejection::Memory { component, needed_bytes, budget_bytes })),
        Err(StepError::Tokens { needed_tokens, bucket_tokens_max, .. }) => {
            return Ok(Err(Rejection::BucketTokens { needed_tokens, bucket_tokens_max }));
        }
        Err(error) => return Err(error.into()),
    };
    let Judgement { timeline, coverage, peak_bytes } = scheduler.judge(&aware)?;
    let layout = scheduler.settings().layout;
    let encoder_ranks =
        if layout.is_colocated() { 0 } else { layout.by_group().encoder.num_ranks() as usize };
    let mut peaks = [0; 2];
    for (rank, bytes) in peak_bytes.into_iter().enumerate() {
        let peak = &mut peaks[usize::from(rank >= encoder_ranks)];
        *peak = bytes.max(*peak);
    }
    if layout.is_colocated() {
        // Every colocated rank holds both components, so both have the same peak.
        peaks[0] = peaks[1];
    }
    Ok(Ok(Judged {
        makespan_ns: timeline.makespan_ns,
        idle_ratio: timeline.bubble_ratio(),
        peaks,
        num_predictions: coverage.num_predictions,
        num_extrapolated: coverage.num_extrapolated,
    }))
}

/// The prediction of a plan: the judged batches taken together.
pub(crate) fn summary(judged: &[Judged]) -> PlanPrediction {
    let steps: Vec<u64> = judged.iter().map(|one| one.makespan_ns).collect();
    let (step_ns_mean, step_ns_half_width) = mean_and_half_width(&steps);
    let sum = |of: fn(&Judged) -> u64| judged.iter().map(of).sum::<u64>();
    let peak = |at: usize| judged.iter().map(|one| one.peaks[at]).max().unwrap_or(0);
    let num_predictions = sum(|one| one.num_predictions);
    let num_extrapolated = sum(|one| one.num_extrapolated);
    PlanPrediction {
        step_ns_mean,
        step_ns_half_width,
        bubble_ratio: judged.iter().map(|one| one.idle_ratio).sum::<f64>() / judged.len().max(1) as f64,
        encoder_memory_bytes_peak: peak(0),
        llm_memory_bytes_peak: peak(1),
        extrapolated_ratio: num_extrapolated as f64 / num_predictions.max(1) as f64,
        num_predictions,
        num_extrapolated,
    }
}

/// The judgement of one candidate on `batches`. `bounds_ns` has a certified lower bound for each batch. The candidate is
/// rejected as soon as `objective` puts the steps judged so far, with the bounds of the batches left, above `cutoff_ns`.
pub(crate) fn evaluate(
    scheduler: &StepScheduler,
    batches: &[Vec<SampleIndex>],
    bounds_ns: &[u64],
    objective: Objective,
    cutoff_ns: Option<u64>,
) -> Result<Outlook, PlanError> {
    let mut least_ns = bounds_ns.to_vec();
    let mut judged = Vec::with_capacity(batches.len());
    // The first batch alone: most candidates that fall do so there. The others at once.
    let (first, rest) = batches.split_at(batches.len().min(1));
    for some in [first, rest] {
        if cutoff_ns.is_some_and(|cutoff| objective.of(&least_ns) > cutoff) {
            return Ok(Outlook::Falls(Rejection::Bound));
        }
        let before = judged.len();
        let judge = |(at, batch): (usize, &Vec<SampleIndex>)| {
            judge_batch(scheduler, (before + at) as u64, batch, &|| false)
        };
        let verdicts: Vec<Verdict> =
            some.par_iter().enumerate().map(judge).collect::<Result<_, PlanError>>()?;
        for verdict in verdicts {
            if cutoff_ns.is_some_and(|cutoff| objective.of(&least_ns) > cutoff) {
                return Ok(Outlook::Falls(Rejection::Bound));
            }
            match verdict {
                Err(rejection) => return Ok(Outlook::Falls(rejection)),
                Ok(one) => {
                    least_ns[judged.len()] = one.makespan_ns;
                    judged.push(one);
                }
            }
        }
    }
    Ok(Outlook::Fits(judged))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_interval_is_students() {
        // Mean 20, deviations -10, 0, 10: s = 10, t(2) = 4.303, half width = 43.03 / sqrt(3) = 24.84.
        assert_eq!(mean_and_half_width(&[10, 20, 30]), (20, 25));
        assert_eq!(mean_and_half_width(&[7]), (7, 0));
        assert_eq!(mean_and_half_width(&[]), (0, 0));
        // Forty values are more than the table of t goes up to.
        let many: Vec<u64> = (0..40).map(|i| 100 + i % 2).collect();
        assert_eq!(mean_and_half_width(&many), (101, 0));
    }
}
