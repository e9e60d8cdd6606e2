//! What a training run left: `metrics.jsonl`, `trace.jsonl`, `schedules.jsonl`, and the comparison of its two arms.

use crate::Failure;
use dflop_data::estimate::student_t_975;
use dflop_types::{Action, Rank, Schedule, Span};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// One line of `metrics.jsonl`.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct StepMetrics {
    pub(crate) step: u64,
    pub(crate) arm: String,
    pub(crate) loss: f64,
    /// Start of the first action to the end of the optimizer, in nanoseconds.
    pub(crate) step_ns: u64,
    /// Predicted by the simulator before the step ran, in nanoseconds.
    pub(crate) predicted_ns: u64,
    /// Idle time over ranks x makespan.
    pub(crate) bubble_ratio: f64,
    /// Position of the pair that this step belongs to, in a comparison; `null` otherwise.
    #[serde(default)]
    pub(crate) pair: Option<u64>,
}

/// One line of `trace.jsonl`.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct StepTrace {
    pub(crate) step: u64,
    pub(crate) arm: String,
    pub(crate) makespan_ns: u64,
    spans: Vec<(u32, Action, u64, u64)>,
}

impl StepTrace {
    /// Ranks that ran an action.
    pub(crate) fn num_ranks(&self) -> u32 {
        self.spans.iter().map(|span| span.0 + 1).max().unwrap_or(0)
    }

    pub(crate) fn spans(&self) -> Vec<Span> {
        self.spans
            .iter()
            .map(|&(rank, action, start_ns, end_ns)| Span { rank: Rank(rank), action, start_ns, end_ns })
            .collect()
    }
}

/// One line of `schedules.jsonl`.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct StepSchedule {
    pub(crate) arm: String,
    pub(crate) schedule: Schedule,
}

/// The lines of a JSONL file; `None` if there is no such file. A last line cut short by a kill is left out.
pub(crate) fn read_lines<T: for<'de> Deserialize<'de>>(path: &Path) -> Result<Option<Vec<T>>, Failure> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Failure::new(format!("cannot read `{}`: {error}", path.display()), None)),
    };
    let is_cut = !text.is_empty() && !text.ends_with('\n');
    let lines: Vec<&str> = text.lines().collect();
    let mut records = Vec::with_capacity(lines.len());
    for (index, line) in lines.iter().enumerate() {
        match serde_json::from_str(line) {
            Ok(record) => records.push(record),
            Err(_) if is_cut && index + 1 == lines.len() => {
                eprintln!("warning: `{}`: its last line is cut short and left out", path.display());
            }
            Err(error) => {
                return Err(Failure::new(
                    format!("`{}` line {}: {error}", path.display(), index + 1),
                    Some("it was written by another version of dflop: train again".to_owned()),
                ));
            }
        }
    }
    Ok(Some(records))
}

/// Data-blind against data-aware steps on the same global batches: what `make demo` ends with.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Comparison {
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
    /// Median over all steps of |predicted - measured| / measured.
    pub(crate) prediction_error_median: f64,
    /// 95th percentile of the same.
    pub(crate) prediction_error_p95: f64,
    /// Pairs measured.
    pub(crate) steps: usize,
    /// Ranks.
    pub(crate) ranks: u32,
    /// Mean idle time over ranks x makespan, data-blind.
    pub(crate) idle_ratio_blind: f64,
    /// The same, data-aware.
    pub(crate) idle_ratio_aware: f64,
    /// Step times of each pair, in milliseconds.
    #[serde(skip)]
    pub(crate) pairs: Vec<(f64, f64)>,
}

impl Comparison {
    /// The comparison of the pairs in `metrics`; `None` without at least two whole pairs.
    pub(crate) fn of(metrics: &[StepMetrics], ranks: u32) -> Option<Self> {
        let arm = |name: &str| {
            let mut steps: Vec<&StepMetrics> =
                metrics.iter().filter(|m| m.arm == name && m.pair.is_some()).collect();
            steps.sort_by_key(|m| m.pair);
            steps
        };
        let (blind, aware) = (arm("blind"), arm("aware"));
        let pairs: Vec<(&StepMetrics, &StepMetrics)> = blind
            .iter()
            .filter_map(|b| aware.iter().find(|a| a.pair == b.pair).map(|a| (*b, *a)))
            .filter(|(b, a)| b.step_ns > 0 && a.step_ns > 0)
            .collect();
        if pairs.len() < 2 {
            return None;
        }
        let n = pairs.len() as f64;
        let logs: Vec<f64> = pairs.iter().map(|(b, a)| (b.step_ns as f64 / a.step_ns as f64).ln()).collect();
        let mean = logs.iter().sum::<f64>() / n;
        let variance = logs.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (n - 1.0);
        let half_width = student_t_975(pairs.len() - 1) * (variance / n).sqrt();
        let errors: Vec<f64> = pairs
            .iter()
            .flat_map(|(b, a)| [b, a])
            .map(|m| (m.predicted_ns as f64 - m.step_ns as f64).abs() / m.step_ns as f64)
            .collect();
        let ms = |ns: u64| ns as f64 / 1e6;
        let pairs_ms: Vec<(f64, f64)> = pairs.iter().map(|(b, a)| (ms(b.step_ns), ms(a.step_ns))).collect();
        Some(Self {
            step_ms_blind: (pairs_ms.iter().map(|p| p.0.ln()).sum::<f64>() / n).exp(),
            step_ms_aware: (pairs_ms.iter().map(|p| p.1.ln()).sum::<f64>() / n).exp(),
            ratio: mean.exp(),
            ratio_low: (mean - half_width).exp(),
            ratio_high: (mean + half_width).exp(),
            prediction_error_median: quantile(errors.clone(), 0.5),
            prediction_error_p95: quantile(errors, 0.95),
            steps: pairs.len(),
            ranks,
            idle_ratio_blind: pairs.iter().map(|(b, _)| b.bubble_ratio).sum::<f64>() / n,
            idle_ratio_aware: pairs.iter().map(|(_, a)| a.bubble_ratio).sum::<f64>() / n,
            pairs: pairs_ms,
        })
    }

    /// The comparison in one sentence.
    pub(crate) fn sentence(&self) -> String {
        format!(
            "On {} ranks and {} global batches, a data-aware step takes {:.0} ms where a data-blind one takes {:.0} ms: \
             {:.3}x faster (95 % interval {:.3} to {:.3}), idle time {:.1} % instead of {:.1} %; \
             the step time was predicted within {:.1} % (median; 95th percentile {:.1} %).",
            self.ranks,
            self.steps,
            self.step_ms_aware,
            self.step_ms_blind,
            self.ratio,
            self.ratio_low,
            self.ratio_high,
            self.idle_ratio_aware * 100.0,
            self.idle_ratio_blind * 100.0,
            self.prediction_error_median * 100.0,
            self.prediction_error_p95 * 100.0
        )
    }
}

/// The `q`-quantile by linear interpolation between order statistics; 0 for an empty list.
pub(crate) fn quantile(mut values: Vec<f64>, q: f64) -> f64 {
    if values.is_empty() {
        return 0.0;
    }
    values.sort_by(f64::total_cmp);
    let position = q * (values.len() - 1) as f64;
    let below = position.floor() as usize;
    let above = position.ceil() as usize;
    values[below] + (values[above] - values[below]) * (position - below as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(pair: u64, arm: &str, step_ns: u64, predicted_ns: u64) -> StepMetrics {
        StepMetrics {
            step: pair,
            arm: arm.to_owned(),
            loss: 1.0,
            step_ns,
            predicted_ns,
            bubble_ratio: if arm == "blind" { 0.2 } else { 0.1 },
            pair: Some(pair),
        }
    }

    #[test]
    fn a_comparison_of_equal_ratios_has_no_width() {
        let metrics: Vec<_> = (1..4u64)
            .flat_map(|k| [step(k, "blind", 120 * k, 120 * k), step(k, "aware", 100 * k, 110 * k)])
            .collect();
        let comparison = Comparison::of(&metrics, 2).unwrap();
        assert!((comparison.ratio - 1.2).abs() < 1e-9);
        assert!((comparison.ratio_low - 1.2).abs() < 1e-9 && (comparison.ratio_high - 1.2).abs() < 1e-9);
        assert_eq!(comparison.steps, 3);
        // Errors are 0, 0, 0, 0.1, 0.1, 0.1.
        assert!((comparison.prediction_error_median - 0.05).abs() < 1e-9);
        assert!((comparison.idle_ratio_blind - 0.2).abs() < 1e-9);
    }

    #[test]
    fn steps_without_a_partner_do_not_count() {
        let metrics = vec![step(1, "blind", 120, 120), step(1, "aware", 100, 100), step(2, "aware", 9, 9)];
        assert!(Comparison::of(&metrics, 2).is_none(), "one pair has no interval");
    }
}
