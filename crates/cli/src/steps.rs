//! The steps of a run, whatever their arm: how long they took beside what was predicted, and what they waited for schedules.

use crate::measured::StepMetrics;
use dflop_types::statistics::quantile_of;
use dflop_types::{counted, number};
use serde::Serialize;

/// What training waited for schedules, outside of its steps.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Waits {
    /// In all steps, in milliseconds.
    #[serde(rename = "schedule_wait_ms")]
    pub(crate) ms: f64,
    /// Before one step, at most, in milliseconds.
    #[serde(rename = "schedule_wait_ms_max")]
    pub(crate) ms_max: f64,
    /// The same two in nanoseconds, for people.
    #[serde(skip)]
    pub(crate) ns: u64,
    #[serde(skip)]
    pub(crate) ns_max: u64,
    /// All waits over the time of all steps.
    #[serde(rename = "schedule_wait_ratio")]
    pub(crate) ratio: f64,
}

impl Waits {
    /// Those of `metrics`; all zero where there are none.
    pub(crate) fn of(metrics: &[StepMetrics]) -> Self {
        let sum = |of: fn(&StepMetrics) -> u64| metrics.iter().map(of).sum::<u64>() as f64;
        let most = metrics.iter().map(|m| m.schedule_wait_ns).max().unwrap_or(0);
        let waited = sum(|m| m.schedule_wait_ns);
        Self {
            ms: waited / 1e6,
            ms_max: most as f64 / 1e6,
            ns: waited as u64,
            ns_max: most,
            ratio: waited / sum(|m| m.step_ns).max(1.0),
        }
    }
}

/// The steps of a run without a comparison: how long they took, and how long they were predicted to.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Steps {
    /// Steps measured.
    pub(crate) count: usize,
    /// Median of their times, in milliseconds.
    pub(crate) step_ms_median: f64,
    /// Median of measured over predicted; above 1 steps took longer.
    pub(crate) over_predicted_median: f64,
    /// Mean idle time over ranks x makespan.
    pub(crate) idle_ratio: f64,
}

impl Steps {
    /// The steps of `metrics`. One in which ranks connect is left out if there are others, as in the last line of a rehearsal.
    /// `None` if there are no steps.
    pub(crate) fn of(metrics: &[StepMetrics]) -> Option<Self> {
        let mut measured: Vec<&StepMetrics> = metrics.iter().filter(|m| m.step_ns > 0).collect();
        if measured.iter().any(|m| !m.is_first) {
            measured.retain(|m| !m.is_first);
        }
        let over = |m: &&StepMetrics| m.step_ns as f64 / m.predicted_ns.max(1) as f64;
        (!measured.is_empty()).then(|| Self {
            count: measured.len(),
            step_ms_median: quantile_of(measured.iter().map(|m| m.step_ns as f64 / 1e6).collect(), 0.5)
                .unwrap_or(0.0),
            over_predicted_median: quantile_of(measured.iter().map(over).collect(), 0.5).unwrap_or(0.0),
            idle_ratio: measured.iter().map(|m| m.bubble_ratio).sum::<f64>() / measured.len() as f64,
        })
    }

    /// What is to be warned of: a prediction that the usual step misses by more than [`MISS_RATIO`].
    pub(crate) fn miss(&self) -> Option<String> {
        let over = self.over_predicted_median;
        ((over - 1.0).abs() > MISS_RATIO).then(|| {
            format!(
                "the prediction missed: steps took {} times as long as predicted (median of {}); what was planned with it may not be the best plan",
                number::number(over),
                counted(self.count as u64, "step")
            )
        })
    }
}

/// A prediction of the step time that is off by more than this stands among the warnings. A quiet machine is off by a
/// tenth at most, so more is a machine that differs from its profile, or a fault of the cost model.
const MISS_RATIO: f64 = 0.2;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measured::step_of_pair as step;

    #[test]
    fn a_missed_prediction_is_warned_of() {
        let metrics: Vec<_> = [8_110, 8_000, 8_300].map(|ns| step(1, "aware", ns, 2_743)).into();
        let steps = Steps::of(&metrics).unwrap();
        assert!((steps.step_ms_median - 0.00811).abs() < 1e-9);
        let miss = steps.miss().unwrap();
        assert!(
            miss.starts_with(
                "the prediction missed: steps took 2.96 times as long as predicted (median of 3 steps)"
            ),
            "{miss}"
        );
        let near: Vec<_> = [1_100, 1_190].map(|ns| step(1, "aware", ns, 1_000)).into();
        assert_eq!(Steps::of(&near).unwrap().miss(), None);
        assert!(Steps::of(&[]).is_none());
    }

    /// As the terminal counts them at the end of a rehearsal.
    #[test]
    fn a_step_in_which_ranks_connect_counts_only_where_there_is_no_other() {
        let mut metrics: Vec<_> = [9_000, 1_000, 1_200].map(|ns| step(1, "aware", ns, 1_000)).into();
        metrics[0].is_first = true;
        let steps = Steps::of(&metrics).unwrap();
        assert_eq!(steps.count, 2);
        assert!((steps.over_predicted_median - 1.1).abs() < 1e-9);
        assert_eq!(Steps::of(&metrics[..1]).unwrap().count, 1);
    }

    #[test]
    fn waits_are_summed_over_all_steps() {
        let metrics = [step(1, "blind", 40, 40), step(3, "blind", 60, 60)];
        let waits = Waits::of(&metrics);
        assert!((waits.ratio - 0.04).abs() < 1e-12);
        assert!((waits.ms_max - 3e-6).abs() < 1e-12);
        assert!(Waits::of(&[]).ratio.abs() < 1e-12);
    }
}
