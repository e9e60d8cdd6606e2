//! The data profile: one shape a sample, and what could not be read.

use crate::artifact::{Artifact, MadeFrom, hash_parts, hex};
use crate::index::SampleIndex;
use crate::shape::{EncoderSegments, SampleShape, Tower};
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
    /// Hash of its media; 0 where there is none. Upper 32 bits: hash of their sizes and versions (time of change, or
    /// the store's tag); lower 32 bits: hash of their sizes and first bytes.
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

/// The shapes of a dataset, sample by sample, in the order in which the mixture gives them. Its file is a table
/// (`dflop_data::table`).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DataProfile {
    /// Hashes of what it was made from: `dataset`, `tokenizer`, `processor`.
    pub made_from: MadeFrom,
    /// Model family whose shape rule was applied, for example `llava_onevision`.
    pub family: String,
    /// Settings that decide shapes and the choice of samples, by name, for example `video_max_frames`.
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

impl ProfiledSample {
    /// `Ok` if the sample is sound in a profile of `num_sources` sources, else the first rule it breaks, as "field:
    /// value, rule".
    ///
    /// # Errors
    /// The broken rule in words.
    pub fn check(&self, num_sources: usize) -> Result<(), String> {
        if self.source as usize >= num_sources {
            return Err(format!("source: {} is past the {num_sources} sources", self.source));
        }
        self.shape.check().map_err(|problem| format!("shape: {problem}"))
    }
}

/// Hash of a data profile's content, row by row: equal for equal rows made from the same with the same settings.
///
/// Where files lie and when they changed is not content; where a record stands in its file is, for it is read there.
#[derive(Debug, Clone, Default)]
pub struct ProfileHasher {
    rows: Sha256,
    num_rows: u64,
    /// The bytes of one row; kept for its memory.
    bytes: Vec<u8>,
}

impl ProfileHasher {
    /// Counts the next row in.
    pub fn push(&mut self, sample: &ProfiledSample) {
        self.num_rows += 1;
        self.bytes.clear();
        put_text(&mut self.bytes, &sample.id);
        let ProfiledSample { source, position, place, kind, shape, .. } = sample;
        let kind = SampleKind::ALL.iter().position(|k| k == kind).unwrap_or(SampleKind::ALL.len()) as u64;
        let numbers = [u64::from(*source), *position, u64::from(place.file), place.start, place.len, kind];
        // The first tower adds nothing: a profile made before there were two keeps its hash.
        let count = |s: &EncoderSegments| (s.tower.index() as u64) << 32 | u64::from(s.count);
        let segments = shape.encoder_segments.iter().flat_map(|s| [count(s), u64::from(s.tokens)]);
        let sizes = [shape.feature_tokens, shape.llm_tokens, shape.label_tokens].map(u64::from);
        let media = [sample.media_bytes, sample.media_ms, sample.record_hash, sample.media_hash];
        let parts =
            shape.encoder_parts.iter().flat_map(|p| [p.count, p.segments, p.feature_tokens].map(u64::from));
        // Both lengths in one number: a profile made before there were parts keeps its hash.
        let lengths = [(shape.encoder_parts.len() as u64) << 32 | shape.encoder_segments.len() as u64];
        let lists = lengths.into_iter().chain(segments).chain(parts);
        for number in numbers.into_iter().chain(lists).chain(sizes).chain(media) {
            self.bytes.extend_from_slice(&number.to_le_bytes());
        }
        self.rows.update(&self.bytes);
    }

    /// The hash of the rows so far under `header`, whose own samples do not count; as `sha256:...`.
    pub fn finish(self, header: &DataProfile) -> String {
        let mut bytes = Vec::new();
        put_text(&mut bytes, DataProfile::KIND);
        put_number(&mut bytes, u64::from(DataProfile::FORMAT_VERSION));
        put_text(&mut bytes, &header.family);
        for pairs in [&header.made_from, &header.settings] {
            put_number(&mut bytes, pairs.len() as u64);
            for (name, value) in pairs {
                put_text(&mut bytes, name);
                put_text(&mut bytes, value);
            }
        }
        put_number(&mut bytes, header.sources.len() as u64);
        for source in &header.sources {
            put_text(&mut bytes, source);
        }
        put_number(&mut bytes, self.num_rows);
        bytes.extend_from_slice(&self.rows.finalize());
        hash_parts([bytes.as_slice()])
    }
}

/// Hash of what the samples of a dataset say and how large their media are, in order: `dataset` of
/// [`DataProfile::made_from`].
#[derive(Debug, Clone, Default)]
pub struct DatasetHasher {
    hash: Sha256,
}

impl DatasetHasher {
    /// Counts the next sample in.
    pub fn push(&mut self, sample: &ProfiledSample) {
        self.hash.update(sample.record_hash.to_le_bytes());
        self.hash.update(sample.media_bytes.to_le_bytes());
    }

    /// The hash, as `sha256:...`.
    pub fn finish(self) -> String {
        format!("sha256:{}", hex(&self.hash.finalize()))
    }
}

fn put_number(bytes: &mut Vec<u8>, number: u64) {
    bytes.extend_from_slice(&number.to_le_bytes());
}

/// Its length first, so that no two lists of texts give the same bytes.
fn put_text(bytes: &mut Vec<u8>, text: &str) {
    put_number(bytes, text.len() as u64);
    bytes.extend_from_slice(text.as_bytes());
}

impl DataProfile {
    /// The setting that says how large the LLM backbone is whose samples these are, in the words of
    /// [`DataProfile::llm_size`]. Shapes do not depend on it; costs do.
    pub const LLM_SIZE: &'static str = "llm_size";

    /// An LLM backbone's size in words.
    pub fn llm_size(num_layers: u64, hidden_size: u64) -> String {
        format!("{num_layers} layers of width {hidden_size}")
    }

    /// Hash of its content ([`ProfileHasher`]), as `sha256:...`.
    pub fn content_hash(&self) -> String {
        let mut hasher = ProfileHasher::default();
        for sample in &self.samples {
            hasher.push(sample);
        }
        hasher.finish(self)
    }

    /// Every rule broken by what is not a sample, as "field: value, rule".
    pub fn header_problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        let num_sources = self.sources.len();
        for (index, file) in self.files.iter().enumerate().filter(|(_, f)| f.source as usize >= num_sources) {
            problems
                .push(format!("files[{index}].source: {} is past the {num_sources} sources", file.source));
        }
        if !self.strata.is_empty() && self.strata.len() != num_sources {
            problems.push(format!("strata: {}, must be 0 or one a source, {num_sources}", self.strata.len()));
        }
        for (index, stratum) in self.strata.iter().enumerate().filter(|(_, s)| s.drawn > s.population) {
            problems.push(format!(
                "strata[{index}].drawn: {}, must be at most the population, {}",
                stratum.drawn, stratum.population
            ));
        }
        if let Some(part) = self.part.filter(|part| part.index >= part.num_parts) {
            problems.push(format!("part.index: {}, must be below {}", part.index, part.num_parts));
        }
        problems
    }

    /// SHA-256 over index, LLM tokens, label tokens, segments and parts of `samples`, in lower-case hexadecimal: equal on all
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
                    if segments.tower != Tower::First {
                        hash.update([segments.tower as u8]);
                    }
                }
                for parts in &shape.encoder_parts {
                    hash.update(parts.count.to_le_bytes());
                    hash.update(parts.segments.to_le_bytes());
                    hash.update(parts.feature_tokens.to_le_bytes());
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
        let mut problems = self.header_problems();
        for (index, sample) in self.samples.iter().enumerate() {
            if let Err(problem) = sample.check(self.sources.len()) {
                problems.push(format!("samples[{index}].{problem}"));
            }
        }
        problems
    }
}
