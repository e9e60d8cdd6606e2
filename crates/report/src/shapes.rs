//! The times of samples by their size, and the memory of ranks: the data that the page shows.

/// Samples of similar size in one component, over all steps of a run: their predicted and their measured time.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ShapeError {
    /// Whether the component is the encoder; otherwise it is the LLM backbone.
    pub is_encoder: bool,
    /// The fewest tokens of such a sample in this component.
    pub tokens_min: u64,
    /// The most tokens of such a sample in this component.
    pub tokens_max: u64,
    /// The fewest and the most tiles, frames or windows of such samples; zero if they have none.
    pub segments: (u64, u64),
    /// Number of such samples over all steps. A sample that comes in ten steps counts ten times.
    pub num_samples: u64,
    /// Number of tokens of these samples.
    pub num_tokens: u64,
    /// Number of actions that held some of these samples.
    pub num_actions: u64,
    /// Predicted time of these samples, in milliseconds. The time of an action is divided over its samples by tokens.
    pub predicted_ms: f64,
    /// Measured time of these samples, in milliseconds, divided in the same way.
    pub measured_ms: f64,
    /// The time beyond the prediction that these samples alone explain, as a fraction of their predicted time.
    pub excess: f64,
    /// The standard error of `excess`.
    pub excess_error: f64,
}

impl ShapeError {
    /// (predicted - measured) / measured time of these samples, so below 0 if they took longer than predicted.
    pub fn error(&self) -> f64 {
        if self.measured_ms > 0.0 {
            (self.predicted_ms - self.measured_ms) / self.measured_ms
        } else {
            f64::NAN
        }
    }

    /// Adds the samples of the next sizes. What is laid to samples alone stays that of the first.
    pub(crate) fn join(&mut self, next: &Self) {
        self.tokens_max = next.tokens_max;
        self.num_samples += next.num_samples;
        self.num_tokens += next.num_tokens;
        self.predicted_ms += next.predicted_ms;
        self.measured_ms += next.measured_ms;
    }

    /// Whether these samples differ from their prediction by more than chance: by more than 3.5 standard errors, and by at
    /// least 3 %.
    pub fn is_sure(&self) -> bool {
        self.excess.abs() >= 0.03 && self.excess.abs() > 3.5 * self.excess_error
    }
}

/// Peak memory of a kind of rank.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RankBytes {
    /// The kind of rank, for example `encoder` or `LLM stage 2`.
    pub name: String,
    /// The rank of this kind that needs most.
    pub rank: u32,
    /// Predicted bytes by part.
    pub parts: Vec<(String, u64)>,
    /// Predicted bytes of tensors alone.
    pub predicted_tensor_bytes: u64,
    /// Predicted bytes, including what the allocator and the device take.
    pub predicted_bytes: u64,
    /// When the peak is, in words.
    pub moment: String,
    /// Measured bytes of tensors; `None` if no step was measured.
    pub measured_tensor_bytes: Option<u64>,
}
