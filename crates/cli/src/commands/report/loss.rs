//! What a run lost, by kind and source: for `dflop report`.

use crate::measured::{Evaluation, Groups, StepMetrics};
use dflop_report::{GroupLoss, LossPoint};
use std::collections::BTreeMap;

/// What losses are numbered by: steps, or updates where several arms trained each global batch.
pub(super) struct Axis {
    steps: Vec<u64>,
    pub(super) is_by_update: bool,
}

impl Axis {
    pub(super) fn of(metrics: &[StepMetrics]) -> Self {
        let steps: Vec<u64> = metrics.iter().map(|line| line.step).collect();
        let is_by_update = steps.windows(2).any(|pair| pair[0] == pair[1]);
        Self { steps, is_by_update }
    }

    /// The number of the line at `position`; updates count from 1.
    fn trained(&self, position: usize) -> u64 {
        if self.is_by_update { position as u64 + 1 } else { self.steps[position] }
    }

    /// The number of the last line before an evaluation after `step`.
    fn held_out(&self, step: u64) -> u64 {
        let before = || self.steps.iter().rposition(|&s| s <= step);
        if self.is_by_update { before().map_or(0, |position| position as u64 + 1) } else { step }
    }
}

/// The loss in training.
pub(super) fn trained(metrics: &[StepMetrics], axis: &Axis) -> Vec<(u64, f64)> {
    let point = |(position, line): (usize, &StepMetrics)| Some((axis.trained(position), line.loss?));
    metrics.iter().enumerate().filter_map(point).collect()
}

/// The loss of samples that are held out.
pub(super) fn held_out(evaluations: &[Evaluation], axis: &Axis) -> Vec<LossPoint> {
    let point = |one: &Evaluation| LossPoint {
        step: axis.held_out(one.step),
        loss: one.loss.unwrap_or(f64::NAN),
        label_tokens: one.label_tokens,
    };
    evaluations.iter().map(point).collect()
}

/// The losses of each group of `by` (`kind` or `source`), in training and in evaluations.
pub(super) fn groups(
    by: &str,
    metrics: &[StepMetrics],
    evaluations: &[Evaluation],
    axis: &Axis,
) -> Vec<GroupLoss> {
    let mut groups: BTreeMap<&str, GroupLoss> = BTreeMap::new();
    let trained = metrics.iter().enumerate().map(|(at, line)| (axis.trained(at), &line.loss_by, false));
    let held_out = evaluations.iter().map(|line| (axis.held_out(line.step), &line.loss_by, true));
    for (step, losses, is_held_out) in trained.chain(held_out) {
        for (name, entry) in points(losses, by) {
            let loss = entry.loss.unwrap_or(f64::NAN);
            let point = LossPoint { step, loss, label_tokens: entry.label_tokens };
            let group = groups.entry(name).or_default();
            (if is_held_out { &mut group.held_out } else { &mut group.trained }).push(point);
        }
    }
    groups.into_iter().map(|(name, group)| GroupLoss { name: name.to_owned(), ..group }).collect()
}

/// The entries of one way to group, without those that had no label tokens.
fn points<'a>(
    losses: &'a Groups,
    by: &str,
) -> impl Iterator<Item = (&'a str, &'a crate::measured::GroupEntry)> + use<'a> {
    let entries = losses.get(by).into_iter().flatten();
    entries.filter(|(_, entry)| entry.label_tokens > 0).map(|(name, entry)| (name.as_str(), entry))
}
