//! What the steps of a training run show: the comparison of its arms, or how long steps took beside what was predicted.

use crate::measured::StepMetrics;
use dflop_types::counted;
use dflop_types::number::{self, percent};
use dflop_types::statistics::{Interval, geometric_mean, quantile_of};
use serde::Serialize;
use std::collections::BTreeMap;

/// Ways to schedule that do not look at predicted times: what dflop is held against, with and without running ahead.
pub(crate) const BASELINES: [&str; 4] = ["blind", "tokens", "blind-ahead", "tokens-ahead"];

/// All that dflop does, within the memory of the pipeline order and running ahead.
const OURS: [&str; 2] = ["aware", "aware-ahead"];

/// What `make demo` ends with: the arms of one run, on the same global batches.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Comparison {
    /// Arrival order against all that dflop does, both without running ahead; `None` where one of them was not trained.
    #[serde(flatten)]
    pub(crate) plain: Option<Plain>,
    /// The fastest baseline against the fastest of ours.
    pub(crate) best: Best,
    /// Median over all steps of |predicted - measured| / measured.
    pub(crate) prediction_error_median: f64,
    /// 95th percentile of the same.
    pub(crate) prediction_error_p95: f64,
    /// Median of the same error where each prediction is corrected by the steps before; `None` where a step has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) corrected_error_median: Option<f64>,
    /// 95th percentile of the same.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) corrected_error_p95: Option<f64>,
    /// Global batches that every arm was trained on.
    pub(crate) steps: usize,
    /// Ranks.
    pub(crate) ranks: u32,
    /// What training waited for schedules.
    #[serde(flatten)]
    pub(crate) waits: Waits,
    /// Every arm.
    pub(crate) arms: Vec<ArmSummary>,
}

/// Arrival order against data-aware steps, both without running ahead.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Plain {
    /// Step time of the data-blind arm, in milliseconds: the geometric mean, so that the two divide to `ratio`.
    pub(crate) step_ms_blind: f64,
    /// Step time of the data-aware arm, likewise.
    pub(crate) step_ms_aware: f64,
    /// Blind over aware: the geometric mean of the pairs' ratios.
    pub(crate) ratio: f64,
    /// Lower end of its 95 % confidence interval.
    pub(crate) ratio_low: f64,
    /// Upper end.
    pub(crate) ratio_high: f64,
    /// Mean idle time over ranks x makespan, data-blind.
    pub(crate) idle_ratio_blind: f64,
    /// The same, data-aware.
    pub(crate) idle_ratio_aware: f64,
}

/// The fastest baseline against the fastest of ours.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Best {
    /// The baseline with the shortest step.
    pub(crate) baseline: String,
    /// That of `aware` and `aware-ahead` with the shorter step.
    pub(crate) ours: String,
    /// Step time of the baseline, in milliseconds: the geometric mean, so that the two divide to `ratio`.
    pub(crate) step_ms_baseline: f64,
    /// Step time of ours, likewise.
    pub(crate) step_ms_ours: f64,
    /// Baseline over ours: the geometric mean of the pairs' ratios.
    pub(crate) ratio: f64,
    /// Lower end of its 95 % confidence interval.
    pub(crate) ratio_low: f64,
    /// Upper end.
    pub(crate) ratio_high: f64,
    /// Mean idle time over ranks x makespan of the baseline.
    pub(crate) idle_ratio_baseline: f64,
    /// The same of ours.
    pub(crate) idle_ratio_ours: f64,
    /// Step times of each pair, in milliseconds.
    #[serde(skip)]
    pub(crate) pairs: Vec<(f64, f64)>,
}

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
fn fastest<'a>(metrics: &[StepMetrics], names: &[&'a str]) -> Option<&'a str> {
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
                "{} {} (95 % interval {:.3} to {:.3})",
                speed(self.ratio),
                if self.ratio < 1.0 {
                    format!("as {}", self.against)
                } else {
                    format!("than {}", self.against)
                },
                self.ratio_low,
                self.ratio_high
            )
        };
        format!("{}, {speed}, idle {}", number::ms(self.step_ms), percent(self.idle_ratio))
    }
}

/// The steps of the arms `one` and `two` on the same global batches, by pair.
fn pairs<'a>(metrics: &'a [StepMetrics], one: &str, two: &str) -> Vec<(&'a StepMetrics, &'a StepMetrics)> {
    let arm = |name: &str| -> BTreeMap<u64, &StepMetrics> {
        let of_arm = metrics.iter().filter(|m| m.arm == name && m.step_ns > 0);
        of_arm.filter_map(|m| Some((m.pair?, m))).collect()
    };
    let (one, two) = (arm(one), arm(two));
    one.iter().filter_map(|(pair, a)| Some((*a, *two.get(pair)?))).collect()
}

/// First over second of pairs of steps: geometric mean and its 95 % confidence interval; `None` without at least two.
fn ratio(pairs: &[(&StepMetrics, &StepMetrics)]) -> Option<Interval> {
    Interval::of_ratios(pairs.iter().map(|(b, a)| b.step_ns as f64 / a.step_ns as f64))
}

/// Two arms over the pairs of their steps: geometric means in milliseconds, and idle times.
struct Against {
    ratio: Interval,
    step_ms: [f64; 2],
    idle_ratio: [f64; 2],
    pairs_ms: Vec<(f64, f64)>,
}

impl Against {
    /// `None` without at least two whole pairs.
    fn of(metrics: &[StepMetrics], one: &str, two: &str) -> Option<Self> {
        let pairs = pairs(metrics, one, two);
        let ratio = ratio(&pairs)?;
        let n = pairs.len() as f64;
        let ms = |m: &StepMetrics| m.step_ns as f64 / 1e6;
        let pairs_ms: Vec<(f64, f64)> = pairs.iter().map(|(a, b)| (ms(a), ms(b))).collect();
        let means = [
            geometric_mean(pairs_ms.iter().map(|pair| pair.0))?,
            geometric_mean(pairs_ms.iter().map(|pair| pair.1))?,
        ];
        let idle = |of: &dyn Fn(&(&StepMetrics, &StepMetrics)) -> f64| pairs.iter().map(of).sum::<f64>() / n;
        Some(Self {
            ratio,
            step_ms: means,
            idle_ratio: [idle(&|p| p.0.bubble_ratio), idle(&|p| p.1.bubble_ratio)],
            pairs_ms,
        })
    }
}

impl Comparison {
    /// The comparison of the arms in `metrics`; `None` without a baseline and one of ours that have at least two whole
    /// pairs.
    pub(crate) fn of(metrics: &[StepMetrics], ranks: u32) -> Option<Self> {
        let (baseline, ours) = (fastest(metrics, &BASELINES)?, fastest(metrics, &OURS)?);
        let best = Against::of(metrics, baseline, ours)?;
        let steps = || metrics.iter().filter(|m| m.pair.is_some() && m.step_ns > 0);
        let error = |ns: u64, m: &StepMetrics| (ns as f64 - m.step_ns as f64).abs() / m.step_ns as f64;
        let errors: Vec<f64> = steps().map(|m| error(m.predicted_ns, m)).collect();
        let corrected: Option<Vec<f64>> = steps().map(|m| m.corrected_ns.map(|ns| error(ns, m))).collect();
        let corrected = |q| corrected.as_ref().map(|errors| quantile_of(errors.clone(), q).unwrap_or(0.0));
        let plain = Against::of(metrics, "blind", "aware").map(|against| Plain {
            step_ms_blind: against.step_ms[0],
            step_ms_aware: against.step_ms[1],
            ratio: against.ratio.mean,
            ratio_low: against.ratio.low,
            ratio_high: against.ratio.high,
            idle_ratio_blind: against.idle_ratio[0],
            idle_ratio_aware: against.idle_ratio[1],
        });
        Some(Self {
            plain,
            prediction_error_median: quantile_of(errors.clone(), 0.5).unwrap_or(0.0),
            prediction_error_p95: quantile_of(errors, 0.95).unwrap_or(0.0),
            corrected_error_median: corrected(0.5),
            corrected_error_p95: corrected(0.95),
            steps: best.pairs_ms.len(),
            ranks,
            best: Best {
                baseline: baseline.to_owned(),
                ours: ours.to_owned(),
                step_ms_baseline: best.step_ms[0],
                step_ms_ours: best.step_ms[1],
                ratio: best.ratio.mean,
                ratio_low: best.ratio.low,
                ratio_high: best.ratio.high,
                idle_ratio_baseline: best.idle_ratio[0],
                idle_ratio_ours: best.idle_ratio[1],
                pairs: best.pairs_ms,
            },
            waits: Waits::of(metrics),
            arms: ArmSummary::all(metrics),
        })
    }

    /// The comparison in a few sentences. The first says whether anything is gained over the fastest baseline.
    pub(crate) fn sentence(&self) -> String {
        let best = &self.best;
        let verdict = if best.ratio_low > 1.0 {
            speed(best.ratio)
        } else if best.ratio_high < 1.0 {
            format!("slower, {}", speed(best.ratio))
        } else {
            format!("no gain, {}", number::times(best.ratio))
        };
        let corrected = match (self.corrected_error_median, self.corrected_error_p95) {
            (Some(median), Some(p95)) => {
                format!(", corrected by the steps before within {} ({})", percent(median), percent(p95))
            }
            _ => String::new(),
        };
        let plain = self.plain.as_ref().map_or_else(String::new, |plain| {
            format!(
                " Without running ahead, `aware` takes {} and arrival order {}: {} (95 % interval {:.3} to {:.3}).",
                number::ms(plain.step_ms_aware),
                number::ms(plain.step_ms_blind),
                speed(plain.ratio),
                plain.ratio_low,
                plain.ratio_high
            )
        });
        format!(
            "On {} ranks and {} global batches, a data-aware step (`{}`) takes {} where the fastest baseline (`{}`) takes \
             {}: {verdict} (95 % interval {:.3} to {:.3}), idle time {} instead of {}.{plain} \
             The step time was predicted within {} (median; 95th percentile {}){corrected}.",
            self.ranks,
            self.steps,
            best.ours,
            number::ms(best.step_ms_ours),
            best.baseline,
            number::ms(best.step_ms_baseline),
            best.ratio_low,
            best.ratio_high,
            percent(best.idle_ratio_ours),
            percent(best.idle_ratio_baseline),
            percent(self.prediction_error_median),
            percent(self.prediction_error_p95)
        )
    }

    /// The fastest of the baselines that run ahead, if one was trained.
    pub(crate) fn fastest_ahead(&self) -> Option<&str> {
        let ahead = self.arms.iter().filter(|arm| arm.is_baseline && arm.arm.ends_with("-ahead"));
        ahead.min_by(|a, b| a.step_ms.total_cmp(&b.step_ms)).map(|arm| arm.arm.as_str())
    }

    /// Whether the fastest of ours is measurably faster than the fastest baseline.
    pub(crate) fn is_gain(&self) -> bool {
        self.best.ratio_low > 1.0
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
    /// Those of `metrics`; `None` where there are none.
    pub(crate) fn of(metrics: &[StepMetrics]) -> Option<Self> {
        let measured: Vec<&StepMetrics> = metrics.iter().filter(|m| m.step_ns > 0).collect();
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
                "the prediction missed: steps took {over:.2} times as long as predicted (median of {}); what was planned with it may not be the best plan",
                counted(self.count as u64, "step")
            )
        })
    }
}

/// A prediction of the step time that is off by more than this stands among the warnings. A quiet machine is off by a
/// tenth at most, so more is a machine that differs from its profile, or a fault of the cost model.
const MISS_RATIO: f64 = 0.2;

/// `1.175x faster`, or `0.950x as fast` below 1: the interval that follows is of this number either way.
fn speed(ratio: f64) -> String {
    let times = number::times(ratio);
    if ratio < 1.0 { format!("{times} as fast") } else { format!("{times} faster") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(pair: u64, arm: &str, step_ns: u64, predicted_ns: u64) -> StepMetrics {
        StepMetrics {
            step: pair,
            arm: arm.to_owned(),
            loss: Some(1.0),
            loss_by: crate::measured::Groups::new(),
            step_ns,
            predicted_ns,
            corrected_ns: Some(step_ns + step_ns / 20),
            bubble_ratio: if arm == "blind" { 0.2 } else { 0.1 },
            idle_ns: None,
            tokens: None,
            samples: None,
            data_wait_ns: 0,
            schedule_wait_ns: pair,
            was_stopped: false,
            is_rehearsed: false,
            pair: Some(pair),
        }
    }

    #[test]
    fn a_comparison_of_equal_ratios_has_no_width() {
        let mut metrics: Vec<_> = (1..4u64)
            .flat_map(|k| [step(k, "blind", 120 * k, 120 * k), step(k, "aware", 100 * k, 110 * k)])
            .collect();
        let comparison = Comparison::of(&metrics, 2).unwrap();
        let plain = comparison.plain.as_ref().unwrap();
        assert!((plain.ratio - 1.2).abs() < 1e-9);
        assert!((plain.ratio_low - 1.2).abs() < 1e-9 && (plain.ratio_high - 1.2).abs() < 1e-9);
        assert!((plain.idle_ratio_blind - 0.2).abs() < 1e-9);
        assert_eq!(comparison.steps, 3);
        // Errors are 0, 0, 0, 0.1, 0.1, 0.1.
        assert!((comparison.prediction_error_median - 0.05).abs() < 1e-9);
        assert!((comparison.corrected_error_median.unwrap() - 0.05).abs() < 1e-9);
        // A step of an earlier version has no corrected prediction: then none is shown.
        metrics[3].corrected_ns = None;
        assert_eq!(Comparison::of(&metrics, 2).unwrap().corrected_error_median, None);
    }

    /// "0.95x faster" would say the contrary.
    #[test]
    fn a_slower_arm_is_not_called_faster() {
        let metrics: Vec<_> = (1..4u64)
            .flat_map(|k| [step(k, "blind", 95 * k, 95 * k), step(k, "aware", 100 * k, 100 * k)])
            .collect();
        let comparison = Comparison::of(&metrics, 2).unwrap();
        let sentence = comparison.sentence();
        assert!(
            sentence.contains("slower, 0.950x as fast (95 % interval 0.950 to 0.950)")
                && !comparison.is_gain(),
            "{sentence}"
        );
        let words = ArmSummary::all(&metrics)[1].words();
        assert!(words.contains("0.950x as fast as blind (95 %"), "{words}");
    }

    /// We divide by the fastest baseline: being faster than a slower baseline is no gain.
    #[test]
    fn ours_is_held_against_the_fastest_baseline() {
        let round = |k: u64| {
            let step_of = |arm, ns: u64| step(k, arm, 1_000_000 * ns * k, 1_000_000 * ns * k);
            [
                step_of("aware", 100),
                step_of("blind", 120),
                step_of("tokens", 110),
                step_of("blind-ahead", 99),
                step_of("shaped-ahead", 60),
                step_of("aware-ahead", 98),
            ]
        };
        let mut metrics: Vec<_> = (1..4u64).flat_map(round).collect();
        let comparison = Comparison::of(&metrics, 2).unwrap();
        assert_eq!(
            (comparison.best.baseline.as_str(), comparison.best.ours.as_str()),
            ("blind-ahead", "aware-ahead")
        );
        assert!((comparison.best.ratio - 99.0 / 98.0).abs() < 1e-9);
        // Arrival order without running ahead is still there, but does not lead.
        assert!((comparison.plain.as_ref().unwrap().ratio - 1.2).abs() < 1e-9);
        let sentence = comparison.sentence();
        assert!(
            sentence.contains("the fastest baseline (`blind-ahead`) takes 179.9 ms: 1.010x faster"),
            "{sentence}"
        );
        assert!(sentence.contains(
            "Without running ahead, `aware` takes 181.7 ms and arrival order 218.1 ms: 1.200x faster"
        ));
        let found: Vec<_> = comparison.arms.iter().map(|a| (a.arm.as_str(), a.is_baseline)).collect();
        assert_eq!(
            found,
            [
                ("aware", false),
                ("blind", true),
                ("tokens", true),
                ("blind-ahead", true),
                ("shaped-ahead", false),
                ("aware-ahead", false)
            ]
        );
        assert!(comparison.arms.iter().all(|arm| arm.against == "blind-ahead"));
        assert_eq!(comparison.fastest_ahead(), Some("blind-ahead"));
        assert!((comparison.arms[1].ratio - 99.0 / 120.0).abs() < 1e-9);
        assert!(comparison.arms[3].words().contains("what the others are held against"));
        // Where the interval holds 1, there is no gain.
        metrics.push(step(4, "blind-ahead", 90_000_000, 90_000_000));
        metrics.push(step(4, "aware-ahead", 100_000_000, 100_000_000));
        let comparison = Comparison::of(&metrics, 2).unwrap();
        let sentence = comparison.sentence();
        assert!(sentence.contains("no gain, 0.9") && !comparison.is_gain(), "{sentence}");
        // Without a baseline there is no comparison, and the first arm takes its place.
        let rest: Vec<_> =
            metrics.into_iter().filter(|m| !m.arm.starts_with("blind") && m.arm != "tokens").collect();
        assert!(Comparison::of(&rest, 2).is_none());
        assert!(ArmSummary::all(&rest).iter().all(|arm| arm.against == "aware"));
    }

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

    #[test]
    fn waits_are_summed_over_all_steps() {
        let metrics = [step(1, "blind", 40, 40), step(3, "blind", 60, 60)];
        let waits = Waits::of(&metrics);
        assert!((waits.ratio - 0.04).abs() < 1e-12);
        assert!((waits.ms_max - 3e-6).abs() < 1e-12);
        assert!(Waits::of(&[]).ratio.abs() < 1e-12);
    }

    #[test]
    fn steps_without_a_partner_do_not_count() {
        let metrics = vec![step(1, "blind", 120, 120), step(1, "aware", 100, 100), step(2, "aware", 9, 9)];
        assert!(Comparison::of(&metrics, 2).is_none(), "one pair has no interval");
    }
}
