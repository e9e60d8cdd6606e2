//! The mixture: which files a dataset is made of, and how many samples of each.
//!
//! The form is that of LLaVA-NeXT and LLaVA-OneVision:
//!
//! ```yaml
//! datasets:
//!   - json_path: chat.json            # or .jsonl; relative to the mixture
//!     sampling_strategy: random:10%   # all, first:N, end:N, random:N; N a count or a percentage, rounded up
//!     media_root: images              # optional; relative to the mixture
//!   - path: data/charts               # any source: a file, a directory, a URL, a pattern of shards
//!     format: huggingface             # optional: else recognised by the name
//!     split: train                    # where the source has several
//!     columns: {image: img}           # our name: theirs
//!     ignore: [thumbnail]             # fields that are not to be read, without a word
//! ```
//!
//! A single source, for example a `.jsonl` file or a directory, is a mixture of one.

mod reading;

pub use reading::{parse, read};

use crate::media::MediaKind;
use crate::source::location::Location;
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use serde::Serialize;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// The files of a dataset, in order.
#[derive(Debug, Clone, PartialEq)]
pub struct Mixture {
    /// At least one.
    pub sources: Vec<Source>,
}

/// One file of samples.
#[derive(Debug, Clone, PartialEq)]
pub struct Source {
    /// As the mixture writes it.
    pub name: String,
    /// The file, directory or pattern of shards.
    pub location: Location,
    /// Where relative media paths start.
    pub media_root: Location,
    /// Which of its samples are taken.
    pub sampling: Sampling,
    /// Its form; `None`: recognised by its name.
    pub format: Option<Format>,
    /// Which of its splits is read, where it has several.
    pub split: Option<String>,
    /// Our name of a field, and theirs.
    pub columns: BTreeMap<String, String>,
    /// Fields of the data that are not read, and that no notice names.
    pub ignore: BTreeSet<String>,
}

/// Names that a field of a record has for us; columns of other names are not read, unless their name
/// is one of media.
pub const FIELDS: [&str; 34] = [
    "id",
    "image",
    "images",
    "video",
    "videos",
    "audio",
    "audios",
    "conversations",
    "messages",
    "texts",
    "system",
    "history",
    "question",
    "query",
    "problem",
    "instruction",
    "input",
    "answer",
    "label",
    "response",
    "solution",
    "caption",
    "output",
    "prompt",
    "completion",
    "text",
    // Where they are there, a conversation is refused: it would be another one without them.
    "choices",
    "options",
    "context",
    "hint",
    "tool_calls",
    "function_call",
    // What may be called.
    "tools",
    "functions",
];

/// Those of media.
pub(crate) const MEDIA: [&str; 6] = [
    MediaKind::Image.as_str(),
    MediaKind::Image.plural(),
    MediaKind::Video.as_str(),
    MediaKind::Video.plural(),
    MediaKind::Audio.as_str(),
    MediaKind::Audio.plural(),
];

/// Endings of files; another name without `format` is that of a directory.
const ENDINGS: [&str; 9] = ["json", "jsonl", "parquet", "arrow", "tar", "gz", "tgz", "zst", "zstd"];

/// The form of a source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Format {
    /// One JSON array.
    Json,
    /// One JSON object a line.
    Jsonl,
    /// Parquet: a file, or a directory of them.
    Parquet,
    /// Arrow IPC, stream or file: a file, or a directory of them.
    Arrow,
    /// A directory that `datasets` saved, or of files of the hub.
    HuggingFace,
    /// Tar shards, a sample a group of members.
    WebDataset,
    /// A directory of tar shards with `.nv-meta`.
    Energon,
}

impl Format {
    /// Every form.
    pub const ALL: [Self; 7] = [
        Self::Json,
        Self::Jsonl,
        Self::Parquet,
        Self::Arrow,
        Self::HuggingFace,
        Self::WebDataset,
        Self::Energon,
    ];

    /// The form's name in a mixture.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Json => "json",
            Self::Jsonl => "jsonl",
            Self::Parquet => "parquet",
            Self::Arrow => "arrow",
            Self::HuggingFace => "huggingface",
            Self::WebDataset => "webdataset",
            Self::Energon => "energon",
        }
    }

    /// The form of this name.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.name() == name)
    }
}

impl Source {
    /// All samples of the source at `location`, which alone makes a mixture.
    pub fn new(location: Location) -> Self {
        Self {
            name: location.name(),
            media_root: media_root(&location, None),
            location,
            sampling: Sampling::All,
            format: None,
            split: None,
            columns: BTreeMap::new(),
            ignore: BTreeSet::new(),
        }
    }

    /// Whether a record of it is read as it stands.
    pub fn has_our_names(&self) -> bool {
        self.columns.is_empty() && self.ignore.is_empty()
    }

    /// The record with its fields under our names, those to be ignored left out.
    #[must_use]
    pub fn renamed(&self, mut record: Value) -> Value {
        if let Value::Object(fields) = &mut record {
            for name in &self.ignore {
                fields.shift_remove(name);
            }
        }
        renamed(record, &self.columns)
    }
}

/// Where relative media paths start by default: for a file its directory, for a directory itself.
fn media_root(location: &Location, format: Option<Format>) -> Location {
    let is_file = matches!(format, Some(Format::Json | Format::Jsonl))
        || ENDINGS.contains(&location.extension().as_str());
    if is_file { location.parent() } else { location.clone() }
}

/// The record with its fields under our names: each of ours means the one of theirs, and nothing else.
#[must_use]
pub fn renamed(mut record: Value, columns: &BTreeMap<String, String>) -> Value {
    if let Value::Object(fields) = &mut record {
        let values: Vec<_> = columns.values().map(|theirs| fields.shift_remove(theirs)).collect();
        for (ours, value) in columns.keys().zip(values) {
            fields.shift_remove(ours);
            if let Some(value) = value {
                fields.insert(ours.clone(), value);
            }
        }
    }
    record
}

/// Which samples of a source are taken.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub enum Sampling {
    /// Every one.
    All,
    /// The first ones.
    First(Amount),
    /// The last ones.
    End(Amount),
    /// Seeded draws without repetition, in the order of the file.
    Random(Amount),
}

/// How many samples of a source are taken.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub enum Amount {
    /// So many; all, where the source has fewer.
    Count(u64),
    /// So many of a hundred, rounded up; from 0 to 100.
    Percent(f64),
}

impl Amount {
    /// Samples taken of `total`.
    pub fn of(self, total: u64) -> u64 {
        match self {
            Self::Count(count) => count.min(total),
            Self::Percent(percent) => ((total as f64 * percent / 100.0).ceil() as u64).min(total),
        }
    }

    fn parse(text: &str) -> Option<Self> {
        match text.strip_suffix('%') {
            Some(number) => {
                let percent: f64 = number.trim().parse().ok()?;
                (0.0..=100.0).contains(&percent).then_some(Self::Percent(percent))
            }
            None => text.parse().ok().map(Self::Count),
        }
    }
}

impl Sampling {
    /// The sampling that `text` names, `None` where it names none.
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        match text.split_once(':') {
            None => (text == "all").then_some(Self::All),
            Some(("first", amount)) => Amount::parse(amount.trim()).map(Self::First),
            Some(("end", amount)) => Amount::parse(amount.trim()).map(Self::End),
            Some(("random", amount)) => Amount::parse(amount.trim()).map(Self::Random),
            Some(_) => None,
        }
    }

    /// Positions taken of a source with `total` samples, ascending; `stream` keeps the draws of sources apart.
    ///
    /// *Complexity*: O(total).
    pub fn choose(self, total: u64, seed: u64, stream: u64) -> Vec<u64> {
        match self {
            Self::All => (0..total).collect(),
            Self::First(amount) => (0..amount.of(total)).collect(),
            Self::End(amount) => (total - amount.of(total)..total).collect(),
            Self::Random(amount) => {
                let mut random = ChaCha8Rng::seed_from_u64(seed);
                random.set_stream(stream);
                // Selection sampling (Knuth, Algorithm S): one pass, ascending, every subset equally likely.
                let mut wanted = amount.of(total);
                let mut chosen = Vec::with_capacity(wanted as usize);
                for position in 0..total {
                    if random.random_range(0..total - position) < wanted {
                        chosen.push(position);
                        wanted -= 1;
                    }
                }
                chosen
            }
        }
    }

    /// The count it asks for, where that is more than `total`.
    pub fn missing(self, total: u64) -> Option<u64> {
        match self {
            Self::First(Amount::Count(n)) | Self::End(Amount::Count(n)) | Self::Random(Amount::Count(n)) => {
                (n > total).then_some(n)
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests;
