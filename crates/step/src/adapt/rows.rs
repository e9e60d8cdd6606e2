//! Rows: how long the actions of each rank took of what was predicted, by kind: hardware, not data.

use crate::adapt::tail::Tail;
use dflop_types::ActionKind;
use std::collections::{BTreeMap, VecDeque};

/// Steps that are remembered: few, as the speed of a machine moves; more than one, as each step has its noise.
const NUM_STEPS: usize = 8;
/// Steps before schedules use a factor.
const STEPS_MIN: usize = 3;
/// A factor counts in schedules if it is this many standard errors from 1.
const ERRORS: f64 = 2.0;
/// Factors nearer to 1 than this change no schedule.
const LEAST: f64 = 0.02;
/// Bounds of a factor that schedules use.
const BOUNDS: (f64, f64) = (0.25, 16.0);

/// Sums of a row's actions of a kind in one step. A row is a rank, or one of its components where it holds both.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sum {
    /// The row.
    pub row: usize,
    /// The kind of action.
    pub kind: ActionKind,
    /// Predicted nanoseconds, corrected by the shapes of the samples.
    pub predicted_ns: u64,
    /// Measured nanoseconds.
    pub measured_ns: u64,
    /// Median over the actions of measured over predicted time.
    pub median: f64,
}

/// One measured step.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct RowStep {
    /// Predicted and measured sums, and the median of the ratios.
    pub(crate) sums: BTreeMap<(usize, ActionKind), (u64, u64, f64)>,
    pub(crate) tail: Tail,
}

/// The last steps, the oldest first.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Rows {
    steps: VecDeque<RowStep>,
}

impl Rows {
    pub(crate) fn remember(&mut self, step: RowStep) {
        if self.steps.len() == NUM_STEPS {
            self.steps.pop_front();
        }
        self.steps.push_back(step);
    }

    pub(crate) fn steps(&self) -> Vec<(Vec<Sum>, Tail)> {
        let sums = |step: &RowStep| {
            let sum = |(&(row, kind), &(predicted_ns, measured_ns, median)): (&_, &_)| Sum {
                row,
                kind,
                predicted_ns,
                measured_ns,
                median,
            };
            step.sums.iter().map(sum).collect()
        };
        self.steps.iter().map(|step| (sums(step), step.tail)).collect()
    }

    /// Sums of the last step; none before the first.
    pub(crate) fn last(&self) -> Vec<Sum> {
        self.steps().pop().map_or_else(Vec::new, |(sums, _)| sums)
    }

    pub(crate) fn of_steps(steps: impl IntoIterator<Item = (Vec<Sum>, Tail)>) -> Self {
        let mut rows = Self::default();
        for (sums, tail) in steps {
            let sums = sums.into_iter().map(|s| ((s.row, s.kind), (s.predicted_ns, s.measured_ns, s.median)));
            rows.remember(RowStep { sums: sums.collect(), tail });
        }
        rows
    }

    fn seen(&self, row: usize, kind: ActionKind) -> impl Iterator<Item = &(u64, u64, f64)> {
        self.steps.iter().filter_map(move |step| step.sums.get(&(row, kind)))
    }

    /// Measured over predicted time of a row's actions of a kind; `None` where none was seen.
    pub(crate) fn factor(&self, row: usize, kind: ActionKind) -> Option<f64> {
        let (predicted, measured) =
            self.seen(row, kind).fold((0.0, 0.0), |sum, &(predicted, measured, _)| {
                (sum.0 + predicted as f64, sum.1 + measured as f64)
            });
        (predicted > 0.0).then(|| measured / predicted)
    }

    /// The same of the middle half of the steps, of four or more: a step whose slow samples were not known yet does not make the
    /// row slow.
    pub(crate) fn middle(&self, row: usize, kind: ActionKind) -> Option<f64> {
        let mut sums: Vec<(f64, f64)> = self
            .seen(row, kind)
            .filter(|sum| sum.0 > 0)
            .map(|&(predicted, measured, _)| (predicted as f64, measured as f64))
            .collect();
        sums.sort_by(|a, b| (a.1 / a.0).total_cmp(&(b.1 / b.0)));
        let left_out = sums.len() / 4;
        let middle = sums.get(left_out..sums.len() - left_out)?;
        let (predicted, measured) = middle.iter().fold((0.0, 0.0), |sum, it| (sum.0 + it.0, sum.1 + it.1));
        (predicted > 0.0).then(|| measured / predicted)
    }

    /// [`Rows::factor`] as schedules use it: 1 where it may be chance, shrunk towards 1 where it is not certain, bounded.
    pub(crate) fn used(&self, row: usize, kind: ActionKind) -> Option<f64> {
        let factor = self.factor(row, kind)?;
        let ratios: Vec<f64> = self
            .seen(row, kind)
            .filter(|sum| sum.0 > 0)
            .map(|&(predicted, measured, _)| measured as f64 / predicted as f64)
            .collect();
        let count = ratios.len() as f64;
        if ratios.len() < STEPS_MIN {
            return Some(1.0);
        }
        let mean = ratios.iter().sum::<f64>() / count;
        let variance =
            ratios.iter().map(|ratio| (ratio - mean) * (ratio - mean)).sum::<f64>() / (count - 1.0);
        let excess = factor - 1.0;
        let squares = ERRORS * ERRORS * variance / count;
        let confidence = if excess * excess > squares { 1.0 - squares / (excess * excess) } else { 0.0 };
        let shrunk = excess * confidence;
        Some(if shrunk.abs() < LEAST { 1.0 } else { (1.0 + shrunk).clamp(BOUNDS.0, BOUNDS.1) })
    }

    /// The middle one of the medians of the last steps; `None` where none was seen.
    pub(crate) fn median(&self, row: usize, kind: ActionKind) -> Option<f64> {
        median(&mut self.seen(row, kind).map(|sum| sum.2).collect::<Vec<f64>>())
    }

    /// What came after the actions of the last steps.
    pub(crate) fn tails(&self) -> Vec<Tail> {
        self.steps.iter().map(|step| step.tail).collect()
    }
}

/// The lower of the middle numbers; `None` of none.
pub(crate) fn median(numbers: &mut [f64]) -> Option<f64> {
    numbers.sort_by(f64::total_cmp);
    numbers.get(numbers.len().saturating_sub(1) / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(measured: &[u64]) -> Rows {
        Rows::of_steps(measured.iter().map(|&measured_ns| {
            let median = measured_ns as f64 / 1_000.0;
            (
                vec![Sum { row: 0, kind: ActionKind::F, predicted_ns: 1_000, measured_ns, median }],
                Tail::default(),
            )
        }))
    }

    #[test]
    fn chance_is_no_factor_and_a_slow_row_is_one() {
        let used = |measured: &[u64]| rows(measured).used(0, ActionKind::F);
        assert_eq!(used(&[1_300, 1_300]), Some(1.0), "too few steps");
        // By hand: mean 1.002, standard error 0.042.
        assert_eq!(used(&[900, 1_100, 1_010, 1_100, 900]), Some(1.0));
        assert_eq!(used(&[1_300; 5]), Some(1.3));
        let noisy = used(&[1_250, 1_350, 1_300, 1_280, 1_320]).unwrap();
        assert!(noisy > 1.29 && noisy < 1.3, "{noisy}");
        assert_eq!(used(&[40_000; 8]), Some(16.0));
        assert_eq!(rows(&[]).used(0, ActionKind::F), None);
        assert_eq!(rows(&[1_000, 3_000]).factor(0, ActionKind::F), Some(2.0));
        // Of four or more steps the middle half.
        assert_eq!(rows(&[1_000, 3_000]).middle(0, ActionKind::F), Some(2.0));
        assert_eq!(rows(&[9_000, 1_000, 1_200, 1_400]).middle(0, ActionKind::F), Some(1.3));
        assert_eq!(rows(&[1_000, 3_000, 2_000]).median(0, ActionKind::F), Some(2.0));
    }

    #[test]
    fn eight_steps_are_remembered() {
        let rows = rows(&[9, 1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(rows.steps().len(), 8);
        assert_eq!(rows.steps()[0].0[0].measured_ns, 1);
        assert_eq!(Rows::of_steps(rows.steps()), rows);
    }
}
