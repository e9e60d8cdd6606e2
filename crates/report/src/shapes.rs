//! What samples of each size took, and what ranks hold, as the page takes them.

/// Samples of like size in one component, over the steps of a run.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ShapeError {
    /// Whether it is of the encoder; else of the LLM backbone.
    pub is_encoder: bool,
    /// The fewest tokens of such a sample in this component.
    pub tokens_min: u64,
    /// The most.
    pub tokens_max: u64,
    /// The fewest and the most tiles, frames or windows of such samples; zero without any.
    pub segments: (u64, u64),
    /// Samples of all steps: one that comes in ten steps counts ten times.
    pub num_samples: u64,
    /// Their tokens.
    pub num_tokens: u64,
    /// Actions that held some of them.
    pub num_actions: u64,
    /// Their part of predicted time, in milliseconds; an action is divided by tokens.
    pub predicted_ms: f64,
    /// Their part of measured time, in milliseconds.
    pub measured_ms: f64,
    /// What is laid to these samples alone, as a part of their predicted time.
    pub excess: f64,
    /// Its standard error.
    pub excess_error: f64,
}

impl ShapeError {
    /// (measured - predicted) / measured of the actions that hold such samples, with the sign of a prediction's error.
    pub fn error(&self) -> f64 {
        if self.measured_ms > 0.0 {
            (self.predicted_ms - self.measured_ms) / self.measured_ms
        } else {
            f64::NAN
        }
    }

    /// Whether the samples themselves part from their prediction by more than chance: 3.5 standard errors, and 3 %.
    pub fn is_sure(&self) -> bool {
        self.excess.abs() >= 0.03 && self.excess.abs() > 3.5 * self.excess_error
    }
}

/// Memory of a kind of rank at its fullest moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RankBytes {
    /// Which ranks, for example `encoder` or `LLM stage 2`; of them the one that needs most.
    pub name: String,
    /// Its number.
    pub rank: u32,
    /// Predicted bytes by part.
    pub parts: Vec<(String, u64)>,
    /// Predicted, of tensors alone.
    pub predicted_tensor_bytes: u64,
    /// Predicted, with what the allocator and the device take.
    pub predicted_bytes: u64,
    /// When, in words.
    pub moment: String,
    /// Measured, of tensors; `None` where no step was measured.
    pub measured_tensor_bytes: Option<u64>,
}
