//! Shapes: the few integers that decide what a sample, or a microbatch of packed samples, costs.

use serde::{Deserialize, Serialize};

/// `count` pieces of `tokens` encoder tokens each, none of which attends to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct EncoderSegments {
    /// Number of pieces (tiles, frames, audio windows), at least 1.
    pub count: u32,
    /// Encoder tokens of each piece, at least 1.
    pub tokens: u32,
}

/// The sizes of a sample that decide its cost. A text-only sample has no encoder segments.
///
/// *Invariants* (checked by [`SampleShape::check`]): `feature_tokens <= llm_tokens`,
/// `label_tokens <= llm_tokens`, and `feature_tokens > 0` exactly when there are segments.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SampleShape {
    /// What the encoder reads, in the order in which the sample holds it.
    pub encoder_segments: Vec<EncoderSegments>,
    /// LLM tokens that the encoder fills, after projector and merging.
    pub feature_tokens: u32,
    /// LLM tokens, feature tokens included.
    pub llm_tokens: u32,
    /// LLM tokens that carry loss.
    pub label_tokens: u32,
}

impl SampleShape {
    /// Number of encoder segments; 0 for a text-only sample.
    pub fn num_segments(&self) -> u64 {
        self.encoder_segments.iter().map(|s| u64::from(s.count)).sum()
    }

    /// Encoder tokens over all segments; 0 for a text-only sample.
    pub fn encoder_tokens(&self) -> u64 {
        self.encoder_segments.iter().map(|s| u64::from(s.count) * u64::from(s.tokens)).sum()
    }

    /// Nothing if the invariants hold, else the first that does not, as "value, rule".
    ///
    /// # Errors
    /// The broken invariant in words.
    pub fn check(&self) -> Result<(), String> {
        if self.feature_tokens > self.llm_tokens {
            return Err(format!(
                "`feature_tokens` is {}, more than `llm_tokens` {}",
                self.feature_tokens, self.llm_tokens
            ));
        }
        if self.label_tokens > self.llm_tokens {
            return Err(format!(
                "`label_tokens` is {}, more than `llm_tokens` {}",
                self.label_tokens, self.llm_tokens
            ));
        }
        if let Some(empty) = self.encoder_segments.iter().find(|s| s.count == 0 || s.tokens == 0) {
            return Err(format!("a segment group of {} x {} tokens is empty", empty.count, empty.tokens));
        }
        if (self.feature_tokens == 0) != self.encoder_segments.is_empty() {
            return Err(format!(
                "{} feature tokens from {} segments, both or neither must be 0",
                self.feature_tokens,
                self.num_segments()
            ));
        }
        Ok(())
    }
}

/// The sizes of a microbatch of packed samples on one stage: what the cost model predicts from.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MicrobatchShape {
    /// What the encoder reads, over all samples.
    pub encoder_segments: Vec<EncoderSegments>,
    /// LLM tokens of each sample; packed samples do not attend to each other.
    pub llm_tokens: Vec<u32>,
    /// LLM tokens that carry loss, over all samples.
    pub label_tokens: u64,
}

impl MicrobatchShape {
    /// The samples packed together.
    pub fn pack<'a>(samples: impl IntoIterator<Item = &'a SampleShape>) -> Self {
        let mut packed = Self::default();
        for sample in samples {
            packed.encoder_segments.extend_from_slice(&sample.encoder_segments);
            packed.llm_tokens.push(sample.llm_tokens);
            packed.label_tokens += u64::from(sample.label_tokens);
        }
        packed
    }

    /// Encoder tokens over all segments.
    pub fn encoder_tokens(&self) -> u64 {
        self.encoder_segments.iter().map(|s| u64::from(s.count) * u64::from(s.tokens)).sum()
    }

    /// LLM tokens over all samples.
    pub fn total_llm_tokens(&self) -> u64 {
        self.llm_tokens.iter().map(|&t| u64::from(t)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shape_that_contradicts_itself_is_named() {
        let text = SampleShape { llm_tokens: 10, label_tokens: 4, ..SampleShape::default() };
        assert_eq!(text.check(), Ok(()));
        let more_labels = SampleShape { label_tokens: 11, ..text.clone() };
        assert_eq!(more_labels.check().unwrap_err(), "`label_tokens` is 11, more than `llm_tokens` 10");
        let features_from_nothing = SampleShape { feature_tokens: 3, ..text };
        assert_eq!(
            features_from_nothing.check().unwrap_err(),
            "3 feature tokens from 0 segments, both or neither must be 0"
        );
    }

    #[test]
    fn packing_adds_sizes_and_keeps_samples_apart() {
        let image = SampleShape {
            encoder_segments: vec![EncoderSegments { count: 2, tokens: 729 }],
            feature_tokens: 100,
            llm_tokens: 120,
            label_tokens: 7,
        };
        let text = SampleShape { llm_tokens: 10, label_tokens: 4, ..SampleShape::default() };
        let packed = MicrobatchShape::pack([&image, &text]);
        assert_eq!(packed.encoder_tokens(), 1458);
        assert_eq!(packed.llm_tokens, vec![120, 10]);
        assert_eq!(packed.total_llm_tokens(), 130);
        assert_eq!(packed.label_tokens, 11);
    }
}
