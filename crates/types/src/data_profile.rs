//! The data profile: one shape a sample, and what could not be read.

use crate::artifact::{Artifact, MadeFrom, hex};
use crate::index::SampleIndex;
use crate::shape::SampleShape;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fmt;

/// What a sample holds beside text; the heaviest kind names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SampleKind {
    /// Text alone.
    Text,
    /// One image.
    Image,
    /// Several images.
    MultiImage,
    /// At least one video.
    Video,
    /// At least one sound.
    Audio,
}

impl SampleKind {
    /// Every kind, in the order in which people see them.
    pub const ALL: [Self; 5] = [Self::Text, Self::Image, Self::MultiImage, Self::Video, Self::Audio];
}

impl fmt::Display for SampleKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Text => "text",
            Self::Image => "image",
            Self::MultiImage => "multi_image",
            Self::Video => "video",
            Self::Audio => "audio",
        })
    }
}

/// One sample as the profiler saw it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProfiledSample {
    /// The sample's own id, or its source's name and its position there.
    pub id: String,
    /// Position of its source in [`DataProfile::sources`].
    pub source: u32,
    /// Position of its record in the source's file, from 0.
    pub position: u64,
    /// What it holds.
    pub kind: SampleKind,
    /// What decides its cost.
    pub shape: SampleShape,
    /// Bytes of its media files; 0 for text.
    pub media_bytes: u64,
    /// Media time of its videos and sounds, in milliseconds; 0 where there is none.
    pub media_ms: u64,
}

/// A sample that could not be profiled, and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    /// The file at fault.
    pub file: String,
    /// Position of the sample in its source, from 0, where one sample is at fault.
    pub position: Option<u64>,
    /// The sample's id, where it is known.
    pub id: Option<String>,
    /// What is wrong: value, rule.
    pub cause: String,
}

/// The shapes of a dataset, sample by sample, in the order in which the mixture gives them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataProfile {
    /// Hashes of what it was made from: `dataset`, `tokenizer`, `processor`.
    pub made_from: MadeFrom,
    /// Model family whose shape rule was applied, as in `llava_onevision`.
    pub family: String,
    /// Names of the sources, in the order of the mixture.
    pub sources: Vec<String>,
    /// Samples left out because they could not be read, under the policy `skip`.
    pub problems: Vec<Problem>,
    /// One entry a sample; [`crate::SampleIndex`] counts these.
    pub samples: Vec<ProfiledSample>,
}

impl DataProfile {
    /// SHA-256 over index, LLM tokens, label tokens and segments of `samples`, in lower-case hexadecimal: equal on all
    /// ranks, or they train on different data. An index past the profile counts as itself alone.
    pub fn digest(&self, samples: &[SampleIndex]) -> String {
        let mut hash = Sha256::new();
        for sample in samples {
            hash.update(sample.0.to_le_bytes());
            if let Some(ProfiledSample { shape, .. }) = self.samples.get(sample.index()) {
                hash.update(shape.llm_tokens.to_le_bytes());
                hash.update(shape.label_tokens.to_le_bytes());
                for segments in &shape.encoder_segments {
                    hash.update(segments.count.to_le_bytes());
                    hash.update(segments.tokens.to_le_bytes());
                }
            }
        }
        hex(&hash.finalize())
    }
}

impl Artifact for DataProfile {
    const KIND: &'static str = "data_profile";
    const FORMAT_VERSION: u32 = 1;
    const MEND: &'static str = "dflop profile data";

    fn made_from(&self) -> &MadeFrom {
        &self.made_from
    }

    fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        for (index, sample) in self.samples.iter().enumerate() {
            if sample.source as usize >= self.sources.len() {
                problems.push(format!(
                    "samples[{index}].source: {} is past the {} sources",
                    sample.source,
                    self.sources.len()
                ));
            }
            if let Err(problem) = sample.shape.check() {
                problems.push(format!("samples[{index}].shape: {problem}"));
            }
        }
        problems
    }
}
