//! The comparison of a run's arms: the fastest baseline beside the fastest of ours, on the same global batches.

use crate::arms::{ArmSummary, BASELINES, OURS, fastest, pairs, ratio, speed};
use crate::measured::StepMetrics;
use crate::steps::Waits;
use dflop_types::number::{self, percent};
use dflop_types::statistics::{Interval, geometric_mean, quantile_of};
use serde::Serialize;

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
                " Without running ahead, `aware` takes {} and arrival order {}: {} (95 % interval {}).",
                number::ms(plain.step_ms_aware),
                number::ms(plain.step_ms_blind),
                speed(plain.ratio),
                number::ratios(plain.ratio_low, plain.ratio_high)
            )
        });
        format!(
            "On {} ranks and {} global batches, a data-aware step (`{}`) takes {} where the fastest baseline (`{}`) takes \
             {}: {verdict} (95 % interval {}), idle time {} instead of {}.{plain} \
             The step time was predicted within {} (median; 95th percentile {}){corrected}.",
            self.ranks,
            self.steps,
            best.ours,
            number::ms(best.step_ms_ours),
            best.baseline,
            number::ms(best.step_ms_baseline),
            number::ratios(best.ratio_low, best.ratio_high),
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

/// The global batch whose ratio of step times is nearest to the median: the figure shows a usual pair, not a lucky one.
pub(crate) fn usual_step(metrics: &[StepMetrics], baseline: &str, ours: &str) -> Option<u64> {
    let time = |step: u64, arm: &str| {
        metrics.iter().find(|m| m.step == step && m.arm == arm).map(|m| m.step_ns as f64)
    };
    let ratios: Vec<(f64, u64)> = metrics
        .iter()
        .filter(|m| m.arm == ours)
        .filter_map(|m| Some((time(m.step, baseline)? / time(m.step, ours)?, m.step)))
        .collect();
    let median = quantile_of(ratios.iter().map(|r| r.0).collect(), 0.5)?;
    ratios.into_iter().min_by(|a, b| (a.0 - median).abs().total_cmp(&(b.0 - median).abs())).map(|r| r.1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measured::step_of_pair as step;

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

    /// "0.95x faster" would say the contrary, and 1.005 is no gain within its interval.
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
            sentence.contains("the fastest baseline (`blind-ahead`) takes 179.9 ms: 1.010x as fast"),
            "{sentence}"
        );
        assert!(sentence.contains(
            "Without running ahead, `aware` takes 181.7 ms and arrival order 218.1 ms: 1.200x as fast"
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
    fn steps_without_a_partner_do_not_count() {
        let metrics = vec![step(1, "blind", 120, 120), step(1, "aware", 100, 100), step(2, "aware", 9, 9)];
        assert!(Comparison::of(&metrics, 2).is_none(), "one pair has no interval");
    }
}
