//! Losses of training and of evaluations: over all samples, and by kind and source of the samples.

/// A mean loss, and the number of label tokens over which it is the mean.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct LossPoint {
    /// The step. For an evaluation: the last step that was trained before it.
    pub step: u64,
    /// Mean loss over label tokens.
    pub loss: f64,
    /// The number of these label tokens.
    pub label_tokens: u64,
}

/// The loss of the samples of one kind, or of one source.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GroupLoss {
    /// Name of the kind or the source.
    pub name: String,
    /// Losses in training. Steps without samples of this group are missing.
    pub trained: Vec<LossPoint>,
    /// Losses in evaluations.
    pub held_out: Vec<LossPoint>,
}

impl GroupLoss {
    /// Number of label tokens that were trained.
    pub(crate) fn label_tokens(&self) -> u64 {
        self.trained.iter().fold(0, |sum, point| sum.saturating_add(point.label_tokens))
    }
}

/// Mean loss over the label tokens of all points; NaN if there are none.
pub(crate) fn mean(points: &[LossPoint]) -> f64 {
    let label_tokens: f64 = points.iter().map(|point| point.label_tokens as f64).sum();
    points.iter().map(|point| point.loss * point.label_tokens as f64).sum::<f64>() / label_tokens
}
