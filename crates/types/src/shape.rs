//! Shapes: the few integers that decide what a sample, or a microbatch of packed samples, costs.

use serde::{Deserialize, Serialize};

/// Which encoder reads a medium, where a model has two.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tower {
    /// The only one; of two, that of pictures.
    #[default]
    First,
    /// That of sounds beside one of pictures.
    Second,
}

impl Tower {
    /// Both, by their numbers.
    pub const ALL: [Self; 2] = [Self::First, Self::Second];

    /// From 0.
    pub const fn index(self) -> usize {
        self as usize
    }
}

/// Encoder tokens, by the number of the [`Tower`] that reads them.
pub type TowerTokens = [u64; 2];

/// `count` pieces of `tokens` encoder tokens each, none of which attends to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct EncoderSegments {
    /// Number of pieces (tiles, frames, audio windows), at least 1.
    pub count: u32,
    /// Encoder tokens of each piece, at least 1.
    pub tokens: u32,
    /// The encoder that reads them.
    #[serde(default, skip_serializing_if = "crate::layout::is_default")]
    pub tower: Tower,
}

impl EncoderSegments {
    /// Pieces that the first encoder reads.
    pub const fn of(count: u32, tokens: u32) -> Self {
        Self { count, tokens, tower: Tower::First }
    }

    /// Encoder tokens of all of them.
    const fn total(&self) -> u64 {
        self.count as u64 * self.tokens as u64
    }
}

/// Encoder tokens of these segments, by the encoder that reads them; 2^64 or more count as one fewer.
fn tower_tokens(segments: &[EncoderSegments]) -> TowerTokens {
    let mut sums = TowerTokens::default();
    for group in segments {
        let sum = &mut sums[group.tower.index()];
        *sum = sum.saturating_add(group.total());
    }
    sums
}

/// `count` parts in a row that are alike. A part is the smallest run of segments that can be encoded separately from the
/// others, since its features are made of them alone: an image with all its tiles, a frame of a video.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct EncoderParts {
    /// Number of parts, at least 1.
    pub count: u32,
    /// Segments of each part, at least 1.
    pub segments: u32,
    /// Feature tokens of each part, at least 1.
    pub feature_tokens: u32,
}

impl EncoderParts {
    /// `parts` with equal neighbours in one group: no two lists of the same parts differ.
    pub fn joined(parts: impl IntoIterator<Item = Self>) -> Vec<Self> {
        let mut groups: Vec<Self> = Vec::new();
        for part in parts {
            match groups.last_mut() {
                Some(last)
                    if (last.segments, last.feature_tokens) == (part.segments, part.feature_tokens)
                        && last.count.checked_add(part.count).is_some() =>
                {
                    last.count += part.count;
                }
                _ => groups.push(part),
            }
        }
        groups
    }
}

/// Some parts of a sample, one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PartRange {
    /// The first, counted from 0 over the whole sample.
    pub first: u32,
    /// How many, at least 1.
    pub count: u32,
}

/// The sizes of a sample that decide its cost. A text-only sample has no encoder segments.
///
/// *Invariants* (checked by [`SampleShape::check`]): `feature_tokens <= llm_tokens`,
/// `label_tokens <= llm_tokens`, `feature_tokens > 0` exactly when there are segments, and the parts, where there are
/// any, have the segments and the feature tokens of the sample.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SampleShape {
    /// What the encoder reads, in the order in which the sample holds it.
    pub encoder_segments: Vec<EncoderSegments>,
    /// How the segments, in their order, form parts; empty where that is not known: they are then one part.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub encoder_parts: Vec<EncoderParts>,
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
    ///
    /// *Not modelled*: 2^64 tokens or more, which count as one fewer.
    pub fn encoder_tokens(&self) -> u64 {
        self.encoder_segments.iter().map(EncoderSegments::total).fold(0, u64::saturating_add)
    }

    /// Encoder tokens by the encoder that reads them.
    pub fn tower_tokens(&self) -> TowerTokens {
        tower_tokens(&self.encoder_segments)
    }

    /// Number of parts that can be encoded separately; 0 for a text-only sample.
    ///
    /// *Not modelled*: more than `u32::MAX` parts; they count as `u32::MAX`.
    pub fn num_parts(&self) -> u32 {
        if self.encoder_parts.is_empty() {
            return u32::from(!self.encoder_segments.is_empty());
        }
        self.encoder_parts.iter().fold(0, |sum: u32, parts| sum.saturating_add(parts.count))
    }

    /// These parts as a sample of their own, without text: what encoding them costs, and the feature tokens they give.
    /// Parts past the last are left out.
    ///
    /// *Complexity*: O(groups of segments and parts).
    #[must_use]
    pub fn share(&self, parts: PartRange) -> Self {
        let whole = [EncoderParts {
            count: 1,
            segments: u32::try_from(self.num_segments()).unwrap_or(u32::MAX),
            feature_tokens: self.feature_tokens,
        }];
        let groups = if self.encoder_parts.is_empty() { &whole[..] } else { &self.encoder_parts };
        let (first, end) = (u64::from(parts.first), u64::from(parts.first) + u64::from(parts.count));
        let mut share = Self::default();
        // Parts and segments that came before the group.
        let (mut part, mut segment) = (0, 0);
        let mut segments = 0..0;
        for group in groups {
            let (from, to) = (first.max(part), end.min(part + u64::from(group.count)));
            if from < to {
                let of = |part_index: u64| segment + (part_index - part) * u64::from(group.segments);
                let start = if share.encoder_parts.is_empty() { of(from) } else { segments.start };
                segments = start..of(to);
                let count = (to - from) as u32;
                share.encoder_parts.push(EncoderParts { count, ..*group });
                share.feature_tokens =
                    share.feature_tokens.saturating_add(count.saturating_mul(group.feature_tokens));
            }
            part += u64::from(group.count);
            segment += u64::from(group.count) * u64::from(group.segments);
        }
        let mut position = 0;
        for group in &self.encoder_segments {
            let end = position + u64::from(group.count);
            let (from, to) = (segments.start.max(position), segments.end.min(end));
            if from < to {
                share.encoder_segments.push(EncoderSegments { count: (to - from) as u32, ..*group });
            }
            position = end;
        }
        share.llm_tokens = share.feature_tokens;
        share
    }

    /// `Ok` if the invariants hold, else the first that does not, as "value, rule".
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
        self.check_parts()
    }

    fn check_parts(&self) -> Result<(), String> {
        if self.encoder_parts.is_empty() {
            return Ok(());
        }
        let is_empty = |p: &&EncoderParts| p.count == 0 || p.segments == 0 || p.feature_tokens == 0;
        if let Some(empty) = self.encoder_parts.iter().find(is_empty) {
            return Err(format!(
                "a group of {} parts of {} segments and {} feature tokens is empty",
                empty.count, empty.segments, empty.feature_tokens
            ));
        }
        let sum = |of: fn(&EncoderParts) -> u32| -> u128 {
            self.encoder_parts.iter().map(|p| u128::from(p.count) * u128::from(of(p))).sum()
        };
        for (what, found, expected) in [
            ("parts", self.encoder_parts.iter().map(|p| u128::from(p.count)).sum(), None),
            ("segments", sum(|p| p.segments), Some(u128::from(self.num_segments()))),
            ("feature tokens", sum(|p| p.feature_tokens), Some(u128::from(self.feature_tokens))),
        ] {
            match expected {
                Some(expected) if found != expected => {
                    return Err(format!("the parts have {found} {what}, the sample has {expected}"));
                }
                None if found > u128::from(u32::MAX) => {
                    return Err(format!("it has {found} {what}, must be fewer than 2^32"));
                }
                _ => {}
            }
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
        self.encoder_segments.iter().map(EncoderSegments::total).sum()
    }

    /// Encoder tokens by the encoder that reads them.
    pub fn tower_tokens(&self) -> TowerTokens {
        tower_tokens(&self.encoder_segments)
    }

    /// LLM tokens over all samples.
    pub fn total_llm_tokens(&self) -> u64 {
        self.llm_tokens.iter().map(|&t| u64::from(t)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

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
            encoder_segments: vec![EncoderSegments::of(2, 729)],
            feature_tokens: 100,
            llm_tokens: 120,
            label_tokens: 7,
            ..SampleShape::default()
        };
        let text = SampleShape { llm_tokens: 10, label_tokens: 4, ..SampleShape::default() };
        let packed = MicrobatchShape::pack([&image, &text]);
        assert_eq!(packed.encoder_tokens(), 1458);
        assert_eq!(packed.llm_tokens, vec![120, 10]);
        assert_eq!(packed.total_llm_tokens(), 130);
        assert_eq!(packed.label_tokens, 11);
    }

    /// An image of 5 tiles, a video of 4 frames of which the last has a newline, an image of 2 tiles of its own size.
    fn mixed() -> SampleShape {
        let part = |count, segments, feature_tokens| EncoderParts { count, segments, feature_tokens };
        SampleShape {
            encoder_segments: vec![EncoderSegments::of(9, 81), EncoderSegments::of(2, 49)],
            encoder_parts: vec![part(1, 5, 300), part(3, 1, 25), part(1, 1, 26), part(1, 2, 90)],
            feature_tokens: 300 + 75 + 26 + 90,
            llm_tokens: 600,
            label_tokens: 10,
        }
    }

    #[test]
    fn a_share_has_the_segments_and_features_of_its_parts() {
        let sample = mixed();
        assert_eq!((sample.check(), sample.num_parts()), (Ok(()), 6));
        // Frames 1 to 3 of the video, and the last image.
        let share = sample.share(PartRange { first: 2, count: 4 });
        let segments = [EncoderSegments::of(3, 81), EncoderSegments::of(2, 49)];
        assert_eq!(share.encoder_segments, segments);
        assert_eq!((share.feature_tokens, share.llm_tokens), (2 * 25 + 26 + 90, 2 * 25 + 26 + 90));
        assert_eq!((share.num_parts(), share.check()), (4, Ok(())));
        assert_eq!(sample.share(PartRange { first: 6, count: 1 }), SampleShape::default());
        let unknown = SampleShape { encoder_parts: Vec::new(), ..sample.clone() };
        assert_eq!(unknown.num_parts(), 1);
        assert_eq!(unknown.share(PartRange { first: 0, count: 1 }).encoder_segments, sample.encoder_segments);
    }

    #[test]
    fn parts_that_do_not_add_up_are_named() {
        let mut shape = mixed();
        shape.encoder_parts[1].count = 2;
        assert_eq!(shape.check().unwrap_err(), "the parts have 10 segments, the sample has 11");
        let mut shape = mixed();
        shape.encoder_parts[1].feature_tokens = 24;
        assert_eq!(shape.check().unwrap_err(), "the parts have 488 feature tokens, the sample has 491");
        let mut shape = mixed();
        shape.encoder_parts[3].segments = 0;
        assert_eq!(
            shape.check().unwrap_err(),
            "a group of 1 parts of 0 segments and 90 feature tokens is empty"
        );
        let text =
            SampleShape { encoder_parts: mixed().encoder_parts, llm_tokens: 9, ..SampleShape::default() };
        assert_eq!(text.check().unwrap_err(), "the parts have 11 segments, the sample has 0");
    }

    proptest! {
        /// Cut anywhere, the shares have all segments and features of the sample, in order.
        #[test]
        fn shares_make_up_the_sample(
            parts in prop::collection::vec((1u32..9, 1u32..5, 1u32..99), 1..6),
            tokens in prop::collection::vec(1u32..4, 1..5),
            cut in 0u32..50
        ) {
            let parts = EncoderParts::joined(
                parts.into_iter().map(|(count, segments, feature_tokens)| EncoderParts { count, segments, feature_tokens }),
            );
            let num_segments: u32 = parts.iter().map(|p| p.count * p.segments).sum();
            let flat: Vec<u32> = (0..num_segments).map(|i| tokens[(i / 3) as usize % tokens.len()]).collect();
            let feature_tokens = parts.iter().map(|p| p.count * p.feature_tokens).sum();
            let shape = SampleShape {
                encoder_segments: flat.iter().map(|&tokens| EncoderSegments::of(1, tokens)).collect(),
                encoder_parts: parts,
                feature_tokens,
                llm_tokens: feature_tokens,
                label_tokens: 0,
            };
            prop_assert_eq!(shape.check(), Ok(()));
            let cut = cut % (shape.num_parts() + 1);
            let shares = [
                shape.share(PartRange { first: 0, count: cut }),
                shape.share(PartRange { first: cut, count: shape.num_parts() - cut }),
            ];
            let found: Vec<u32> = shares
                .iter()
                .flat_map(|s| &s.encoder_segments)
                .flat_map(|s| std::iter::repeat_n(s.tokens, s.count as usize))
                .collect();
            prop_assert_eq!(found, flat);
            prop_assert_eq!(shares.iter().map(|s| s.feature_tokens).sum::<u32>(), feature_tokens);
            prop_assert_eq!(shares.iter().map(SampleShape::num_parts).sum::<u32>(), shape.num_parts());
            prop_assert!(shares.iter().all(|s| s.check().is_ok()));
        }
    }
}
