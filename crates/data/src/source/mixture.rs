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
//!     format: huggingface             # optional: told by the name otherwise
//!     split: train                    # where the source has several
//!     columns: {image: img}           # our name: theirs
//!     ignore: [thumbnail]             # fields that are not to be read, without a word
//! ```
//!
//! A source alone, as a `.jsonl` file or a directory, is a mixture of one.

use crate::error::DataError;
use crate::media::MediaKind;
use crate::source::location::Location;
use crate::yaml;
use dflop_types::regular;
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use saphyr::{MarkedYaml, Scalar, YamlData};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

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
    /// Its form; `None`: told by its name.
    pub format: Option<Format>,
    /// Which of its splits is read, where it has several.
    pub split: Option<String>,
    /// Our name of a field, and theirs.
    pub columns: BTreeMap<String, String>,
    /// Their names of fields that are not read, and not told of.
    pub ignore: BTreeSet<String>,
}

/// Names that a field of a record has for us; columns of other names are not read, unless their name
/// is one of media.
pub const FIELDS: [&str; 27] = [
    "id",
    "image",
    "images",
    "video",
    "videos",
    "audio",
    "audios",
    "conversations",
    "messages",
    "system",
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
    "text",
    // Where they are there, a conversation is refused: it would be another one without them.
    "choices",
    "options",
    "tools",
    "tool_calls",
    "function_call",
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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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

/// Where relative media paths start if nothing else is said: beside a file, inside a directory.
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
#[derive(Debug, Clone, Copy, PartialEq)]
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
#[derive(Debug, Clone, Copy, PartialEq)]
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

/// Bytes of a mixture, at most.
const BYTES_MAX: u64 = 256 << 20;

/// The mixture at `path`; `media_root` stands in where a source names none, else the directory of its file does.
///
/// # Errors
/// [`DataError::Io`], and [`DataError::Mixture`] with every problem of the file.
pub fn read(path: &Path, media_root: Option<&Path>) -> Result<Mixture, DataError> {
    let location = Location::parse(&path.to_string_lossy());
    let is_remote = matches!(location, Location::Remote(_));
    if is_remote || ENDINGS.contains(&location.extension().as_str()) || path.is_dir() {
        let root = media_root.map(|root| Location::parse(&root.to_string_lossy()));
        let source = Source::new(location);
        let media_root = root.unwrap_or_else(|| source.media_root.clone());
        return Ok(Mixture { sources: vec![Source { media_root, ..source }] });
    }
    let text = regular::read_to_string(path, BYTES_MAX).map_err(|source| DataError::Io {
        act: "read",
        path: path.to_owned(),
        source,
    })?;
    parse(path, &text, media_root)
}

/// The mixture in `text`; `path` names it in errors, and its directory is where relative paths start.
///
/// # Errors
/// [`DataError::Mixture`] with every problem of the file.
pub fn parse(path: &Path, text: &str, media_root: Option<&Path>) -> Result<Mixture, DataError> {
    let unsound = |problems| DataError::Mixture { path: path.to_owned(), problems };
    let documents = yaml::load::<MarkedYaml<'_>>(text)
        .map_err(|cause| unsound(vec![format!("it is not YAML: {cause}")]))?;
    let directory = Location::parse(&path.to_string_lossy()).parent();
    let root = media_root.map(|root| Location::parse(&root.to_string_lossy()));
    let mut problems = Vec::new();
    let mut sources = Vec::new();
    match documents.first().map(|top| &top.data) {
        Some(YamlData::Mapping(top)) => {
            let mut datasets = None;
            for (key, value) in top {
                match text_of(key) {
                    Some("datasets") => datasets = Some(value),
                    other => problems.push(unknown(key, "", other, &["datasets"])),
                }
            }
            match datasets.map(|node| (&node.data, node.span.start.line())) {
                Some((YamlData::Sequence(entries), line)) => {
                    for (index, entry) in entries.iter().enumerate() {
                        let field = format!("datasets[{index}]");
                        sources.extend(source(&field, entry, &directory, root.as_ref(), &mut problems));
                    }
                    if entries.is_empty() {
                        problems
                            .push((line, "datasets: it is empty, at least one file is needed".to_owned()));
                    }
                }
                Some((_, line)) => problems.push((line, "datasets: it must be a list of files".to_owned())),
                None => problems.push((1, "datasets: it is missing".to_owned())),
            }
        }
        _ => problems.push((1, "it must be a mapping with the key `datasets`".to_owned())),
    }
    if problems.is_empty() {
        return Ok(Mixture { sources });
    }
    problems.sort_by_key(|(line, _)| *line);
    Err(unsound(problems.into_iter().map(|(line, text)| format!("line {line}: {text}")).collect()))
}

fn text_of<'y>(node: &'y MarkedYaml<'_>) -> Option<&'y str> {
    match &node.data {
        YamlData::Value(Scalar::String(text)) => Some(text),
        _ => None,
    }
}

fn unknown(key: &MarkedYaml<'_>, path: &str, name: Option<&str>, known: &[&str]) -> (usize, String) {
    let name = name.unwrap_or("(not text)");
    let text = format!("{path}{name}: unknown key, known are {}", known.join(", "));
    (key.span.start.line(), text)
}

/// One entry of `datasets`; what is wrong goes to `problems`, and reading goes on.
fn source(
    field: &str,
    entry: &MarkedYaml<'_>,
    directory: &Location,
    media_root: Option<&Location>,
    problems: &mut Vec<(usize, String)>,
) -> Option<Source> {
    let line = entry.span.start.line();
    let YamlData::Mapping(fields) = &entry.data else {
        problems.push((line, format!("{field}: it must be a mapping with `path` or `json_path`")));
        return None;
    };
    let mut read = Entry { field, sampling: Some(Sampling::All), ..Entry::default() };
    for (key, value) in fields {
        read.take(key, value, directory, problems);
    }
    let Some(name) = read.name else {
        if !fields.iter().any(|(key, _)| matches!(text_of(key), Some("path" | "json_path"))) {
            problems.push((line, format!("{field}: `path` or `json_path` is missing")));
        }
        return None;
    };
    if let Some(name) = read.columns.values().find(|theirs| read.ignore.contains(*theirs)) {
        problems.push((line, format!("{field}.ignore: `{name}` is named under `columns` too")));
    }
    let location = directory.join(name);
    let root = read.root.or_else(|| media_root.cloned());
    Some(Source {
        name: name.to_owned(),
        media_root: root.unwrap_or_else(|| self::media_root(&location, read.format)),
        location,
        sampling: read.sampling?,
        format: read.format,
        split: read.split,
        columns: read.columns,
        ignore: read.ignore,
    })
}

/// What was read of one entry.
#[derive(Default)]
struct Entry<'y> {
    field: &'y str,
    name: Option<&'y str>,
    sampling: Option<Sampling>,
    root: Option<Location>,
    format: Option<Format>,
    split: Option<String>,
    columns: BTreeMap<String, String>,
    ignore: BTreeSet<String>,
}

impl<'y> Entry<'y> {
    fn take(
        &mut self,
        key: &'y MarkedYaml<'_>,
        value: &'y MarkedYaml<'_>,
        directory: &Location,
        problems: &mut Vec<(usize, String)>,
    ) {
        const KNOWN: [&str; 9] = [
            "path",
            "json_path",
            "sampling_strategy",
            "media_root",
            "image_folder",
            "format",
            "split",
            "columns",
            "ignore",
        ];
        let field = self.field;
        let line = value.span.start.line();
        let Some(key_name) = text_of(key).filter(|k| KNOWN.contains(k)) else {
            problems.push(unknown(key, &format!("{field}."), text_of(key), &KNOWN));
            return;
        };
        if key_name == "columns" {
            self.columns = columns(field, value, problems);
            return;
        }
        if key_name == "ignore" {
            self.ignore = ignore(field, value, problems);
            return;
        }
        let mut problem = |text: String| problems.push((line, format!("{field}.{key_name}: {text}")));
        let Some(text) = text_of(value).filter(|text| !text.is_empty()) else {
            return problem("it must be text".to_owned());
        };
        match key_name {
            "path" | "json_path" if self.name.is_some() => problem("the source is named twice".to_owned()),
            "path" | "json_path" => self.name = Some(text),
            "sampling_strategy" => {
                self.sampling = Sampling::parse(text);
                if self.sampling.is_none() {
                    let rule =
                        "must be all, first:N, end:N or random:N, N a count or a percentage up to 100%";
                    problem(format!("`{text}`, {rule}"));
                }
            }
            "format" => {
                self.format = Format::parse(text);
                if self.format.is_none() {
                    let known = Format::ALL.map(Format::name).join(", ");
                    problem(format!("`{text}`, must be one of {known}"));
                }
            }
            "split" => self.split = Some(text.to_owned()),
            _ if self.root.is_some() => problem("the root of media is named twice".to_owned()),
            _ => self.root = Some(directory.join(text)),
        }
    }
}

/// `columns`: our names of fields, and theirs, each once.
fn columns(
    field: &str,
    node: &MarkedYaml<'_>,
    problems: &mut Vec<(usize, String)>,
) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let YamlData::Mapping(pairs) = &node.data else {
        let rule = "it must be a mapping of our names to theirs, as in {image: img}";
        problems.push((node.span.start.line(), format!("{field}.columns: {rule}")));
        return found;
    };
    for (key, value) in pairs {
        let Some(ours) = text_of(key).filter(|ours| FIELDS.contains(ours)) else {
            problems.push(unknown(key, &format!("{field}.columns."), text_of(key), &FIELDS));
            continue;
        };
        let mut problem =
            |text: &str| problems.push((value.span.start.line(), format!("{field}.columns.{ours}: {text}")));
        match text_of(value).filter(|theirs| !theirs.is_empty()) {
            None => problem("it must be text"),
            Some(theirs) if found.values().any(|other| other == theirs) => {
                problem(&format!("`{theirs}` has another name already"));
            }
            Some(theirs) => {
                found.insert(ours.to_owned(), theirs.to_owned());
            }
        }
    }
    found
}

/// `ignore`: their names of fields.
fn ignore(field: &str, node: &MarkedYaml<'_>, problems: &mut Vec<(usize, String)>) -> BTreeSet<String> {
    let names = match &node.data {
        YamlData::Sequence(names) => names.iter().map(|name| text_of(name).map(str::to_owned)).collect(),
        _ => None,
    };
    names.unwrap_or_else(|| {
        let rule = "it must be a list of names, as in [thumbnail]";
        problems.push((node.span.start.line(), format!("{field}.ignore: {rule}")));
        BTreeSet::new()
    })
}

#[cfg(test)]
mod tests;
