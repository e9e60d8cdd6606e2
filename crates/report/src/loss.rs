//! What was lost in training and in evaluations, over all samples and by kind and source.

/// A loss, and of how much it is the mean.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct LossPoint {
    /// The step; of an evaluation the last one that was trained before it.
    pub step: u64,
    /// Mean over label tokens.
    pub loss: f64,
    /// Those label tokens.
    pub label_tokens: u64,
}

/// The loss of the samples of one kind, or of one source.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GroupLoss {
    /// Of the kind or the source.
    pub name: String,
    /// In training: steps that had none of its samples are missing.
    pub trained: Vec<LossPoint>,
    /// In evaluations.
    pub held_out: Vec<LossPoint>,
}

impl GroupLoss {
    /// Label tokens that were trained.
    pub(crate) fn label_tokens(&self) -> u64 {
        self.trained.iter().fold(0, |sum, point| sum.saturating_add(point.label_tokens))
    }
}

/// Mean over the label tokens of all points; not a number without any.
pub(crate) fn mean(points: &[LossPoint]) -> f64 {
    let label_tokens: f64 = points.iter().map(|point| point.label_tokens as f64).sum();
    points.iter().map(|point| point.loss * point.label_tokens as f64).sum::<f64>() / label_tokens
}
