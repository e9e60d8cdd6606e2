//! What a run lost, by kind and source: for `dflop report`.

use crate::measured::{Evaluation, Groups, StepMetrics};
use dflop_report::{GroupLoss, LossPoint};
use std::collections::BTreeMap;

/// The loss of samples that are held out.
pub(super) fn held_out(evaluations: &[Evaluation]) -> Vec<LossPoint> {
    let point = |one: &Evaluation| LossPoint {
        step: one.step,
        loss: one.loss.unwrap_or(f64::NAN),
        label_tokens: one.label_tokens,
    };
    evaluations.iter().map(point).collect()
}

/// The losses of each group of `by` (`kind` or `source`), in training and in evaluations.
pub(super) fn groups(by: &str, metrics: &[StepMetrics], evaluations: &[Evaluation]) -> Vec<GroupLoss> {
    let mut groups: BTreeMap<&str, GroupLoss> = BTreeMap::new();
    let trained = metrics.iter().map(|line| (line.step, &line.loss_by, false));
    let held_out = evaluations.iter().map(|line| (line.step, &line.loss_by, true));
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
