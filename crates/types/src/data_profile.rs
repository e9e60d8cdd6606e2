//! The data profile: one shape a sample, and what could not be read.

use crate::artifact::{Artifact, MadeFrom, hex};
use crate::index::SampleIndex;
use crate::shape::SampleShape;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fmt;

/// What a sample holds beside text; the heaviest kind names it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SampleKind {
    /// Text alone.
    #[default]
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

/// Where a record stands in the files of its source, so that it is found again without a scan.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Place {
    /// Position in [`DataProfile::files`].
    pub file: u32,
    /// First byte of the record in the file, from 0; the row, from 0, where the file is columnar.
    pub start: u64,
    /// Bytes of the record; 0 where the file is columnar.
    pub len: u64,
}

/// One sample as the profiler saw it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProfiledSample {
    /// The sample's own id, or its source's name and its position there.
    pub id: String,
    /// Position of its source in [`DataProfile::sources`].
    pub source: u32,
    /// Position of its record in its source, from 0.
    pub position: u64,
    /// Where the record stands.
    pub place: Place,
    /// What it holds.
    pub kind: SampleKind,
    /// What decides its cost.
    pub shape: SampleShape,
    /// Bytes of its media files; 0 for text.
    pub media_bytes: u64,
    /// Media time of its videos and sounds, in milliseconds; 0 where there is none.
    pub media_ms: u64,
    /// First eight bytes of the SHA-256 of the record.
    pub record_hash: u64,
    /// The same of the sizes and versions (time of change, or the store's tag) of its media; 0 where there is none.
    pub media_hash: u64,
}

/// What kind of fault made a sample bad; each is counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fault {
    /// The record does not parse, or breaks the rules of a conversation.
    #[default]
    Record,
    /// A media file is not there, or cannot be read.
    MediaMissing,
    /// A media file is of no format we know, breaks its format's rules, or shows something else than the record says.
    MediaUnsound,
    /// The model family has no shape for a medium.
    Shape,
    /// The chat template or the tokenizer refuses the text.
    Text,
}

impl Fault {
    /// Every kind of fault.
    pub const ALL: [Self; 5] =
        [Self::Record, Self::MediaMissing, Self::MediaUnsound, Self::Shape, Self::Text];
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Record => "record",
            Self::MediaMissing => "media_missing",
            Self::MediaUnsound => "media_unsound",
            Self::Shape => "shape",
            Self::Text => "text",
        })
    }
}

/// A sample that could not be profiled, why, and what was done about it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    /// Name of its source.
    pub file: String,
    /// Position of the sample in its source, from 0, where one sample is at fault.
    pub position: Option<u64>,
    /// Where its record stands, where that is known.
    pub place: Option<Place>,
    /// The sample's id, where it is known.
    pub id: Option<String>,
    /// Kind of fault.
    pub fault: Fault,
    /// What is wrong: value, rule.
    pub cause: String,
    /// Id of the sample that takes its turn, under the policy `substitute`; `None`: it is left out.
    pub substitute: Option<String>,
}

/// A file that records were read from.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceFile {
    /// Position of its source in [`DataProfile::sources`].
    pub source: u32,
    /// Local path or URL.
    pub path: String,
    /// Its size.
    pub bytes: u64,
    /// What tells one version of it from the next: time of change in nanoseconds, or the store's tag.
    pub version: String,
}

/// A part of a dataset, as profiled by one of several processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProfilePart {
    /// Which one, from 0.
    pub index: u32,
    /// Of how many.
    pub num_parts: u32,
}

/// How many samples of a source stand for how many.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stratum {
    /// Samples of the source that the mixture takes.
    pub population: u64,
    /// Samples drawn of them, bad ones included.
    pub drawn: u64,
}

/// The shapes of a dataset, sample by sample, in the order in which the mixture gives them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataProfile {
    /// Hashes of what it was made from: `dataset`, `tokenizer`, `processor`.
    pub made_from: MadeFrom,
    /// Model family whose shape rule was applied, as in `llava_onevision`.
    pub family: String,
    /// Settings that decide shapes and the choice of samples, by name, as in `video_max_frames`.
    pub settings: BTreeMap<String, String>,
    /// Names of the sources, in the order of the mixture.
    pub sources: Vec<String>,
    /// Files of the sources, in order.
    pub files: Vec<SourceFile>,
    /// One a source, where only a random part of the samples was profiled; empty: all were.
    pub strata: Vec<Stratum>,
    /// Which part of the dataset this is, where it is not the whole; parts are merged before they are used.
    pub part: Option<ProfilePart>,
    /// Samples that could not be read, under the policies `skip` and `substitute`.
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
    const FORMAT_VERSION: u32 = 2;
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
