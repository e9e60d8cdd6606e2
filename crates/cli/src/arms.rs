//! The arms of a run: the steps of each on the same global batches, held against those of the fastest baseline.

use crate::measured::StepMetrics;
use dflop_types::number::{self, percent};
use dflop_types::statistics::{Interval, geometric_mean};
use serde::Serialize;
use std::collections::BTreeMap;

/// Ways to schedule that do not look at predicted times: what dflop is held against, with and without running ahead.
pub(crate) const BASELINES: [&str; 4] = ["blind", "tokens", "blind-ahead", "tokens-ahead"];

/// All that dflop does, within the memory of the pipeline order and running ahead.
pub(crate) const OURS: [&str; 2] = ["aware", "aware-ahead"];

/// One arm of a comparison beside that which it is held against.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct ArmSummary {
    /// Its name.
    pub(crate) arm: String,
    /// Whether it is one of the baselines.
    pub(crate) is_baseline: bool,
    /// The arm that `ratio` speaks of: the fastest baseline, or the first arm where no baseline was trained.
    pub(crate) against: String,
    /// Step time, in milliseconds: the geometric mean.
    pub(crate) step_ms: f64,
    /// `against` over this arm: the geometric mean of the rounds' ratios.
    pub(crate) ratio: f64,
    /// Lower end of its 95 % confidence interval.
    pub(crate) ratio_low: f64,
    /// Upper end.
    pub(crate) ratio_high: f64,
    /// Mean idle time over ranks x makespan.
    pub(crate) idle_ratio: f64,
}

/// The arms of the rounds in `metrics`, in the order of their first steps.
fn arms_of(metrics: &[StepMetrics]) -> Vec<&str> {
    let mut names: Vec<&str> = Vec::new();
    for name in metrics.iter().filter(|m| m.pair.is_some()).map(|m| m.arm.as_str()) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

/// The arm of `names` with the shortest step, by the geometric mean; `None` if no step is of any of them.
pub(crate) fn fastest<'a>(metrics: &[StepMetrics], names: &[&'a str]) -> Option<&'a str> {
    let mean = |name: &str| {
        let of_arm = metrics.iter().filter(|m| m.pair.is_some() && m.arm == name && m.step_ns > 0);
        geometric_mean(of_arm.map(|m| m.step_ns as f64))
    };
    let means = names.iter().filter_map(|name| Some((mean(name)?, *name)));
    means.min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, name)| name)
}

impl ArmSummary {
    /// Every arm of the rounds in `metrics`; those without two whole rounds are left out.
    pub(crate) fn all(metrics: &[StepMetrics]) -> Vec<Self> {
        let names = arms_of(metrics);
        let Some(against) = fastest(metrics, &BASELINES).or_else(|| names.first().copied()) else {
            return Vec::new();
        };
        let summary = |name: &str| {
            let pairs = pairs(metrics, against, name);
            let ratio = ratio(&pairs)?;
            let n = pairs.len() as f64;
            Some(Self {
                arm: name.to_owned(),
                is_baseline: BASELINES.contains(&name),
                against: against.to_owned(),
                step_ms: geometric_mean(pairs.iter().map(|(_, m)| m.step_ns as f64 / 1e6))?,
                ratio: ratio.mean,
                ratio_low: ratio.low,
                ratio_high: ratio.high,
                idle_ratio: pairs.iter().map(|(_, m)| m.bubble_ratio).sum::<f64>() / n,
            })
        };
        names.into_iter().filter_map(summary).collect()
    }

    /// The arm in a few words, without its name.
    pub(crate) fn words(&self) -> String {
        let speed = if self.arm == self.against {
            "what the others are held against".to_owned()
        } else {
            format!(
                "{} as {} (95 % interval {})",
                speed(self.ratio),
                self.against,
                number::ratios(self.ratio_low, self.ratio_high)
            )
        };
        format!("{}, {speed}, idle {}", number::ms(self.step_ms), percent(self.idle_ratio))
    }
}

/// The steps of the arms `one` and `two` on the same global batches, by pair.
pub(crate) fn pairs<'a>(
    metrics: &'a [StepMetrics],
    one: &str,
    two: &str,
) -> Vec<(&'a StepMetrics, &'a StepMetrics)> {
    let arm = |name: &str| -> BTreeMap<u64, &StepMetrics> {
        let of_arm = metrics.iter().filter(|m| m.arm == name && m.step_ns > 0);
        of_arm.filter_map(|m| Some((m.pair?, m))).collect()
    };
    let (one, two) = (arm(one), arm(two));
    one.iter().filter_map(|(pair, a)| Some((*a, *two.get(pair)?))).collect()
}

/// First over second of pairs of steps: geometric mean and its 95 % confidence interval; `None` without at least two.
pub(crate) fn ratio(pairs: &[(&StepMetrics, &StepMetrics)]) -> Option<Interval> {
    Interval::of_ratios(pairs.iter().map(|(b, a)| b.step_ns as f64 / a.step_ns as f64))
}

/// `1.175x as fast`. "Faster" would be said of 1.005x too, whatever its interval, and some read "1.2x faster" as 2.2.
pub(crate) fn speed(ratio: f64) -> String {
    format!("{} as fast", number::times(ratio))
}
