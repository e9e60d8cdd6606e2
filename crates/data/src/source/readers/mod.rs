//! Readers: a source in, its records out, one after the other. Records are parsed later, one by one, so that a broken
//! one costs itself alone; a file is never held in memory.

mod arrow;
mod arrow_rows;
mod choice;
mod energon;
mod fields;
mod huggingface;
mod json;
mod parquet;
mod tables;
mod tar;
mod webdataset;

use crate::error::DataError;
use crate::source::location::{Location, MediaPlace};
use crate::source::mixture::{Format, Source};
use crate::source::store::Stores;
use dflop_types::Place;
use serde_json::Value;
use std::borrow::Cow;
use std::fmt;
use tables::{TableFile, Tables};

/// A record before it is parsed.
#[derive(Debug, Clone, PartialEq)]
pub struct RawRecord {
    /// Where it stands; `file` counts the files of its reader.
    pub place: Place,
    /// What it says.
    pub body: Body,
    /// Media that came with it, as members of its shard or cells of its table.
    pub attachments: Vec<MediaPlace>,
}

/// What a record says.
#[derive(Debug, Clone, PartialEq)]
pub enum Body {
    /// JSON text.
    Json {
        /// The text.
        text: Vec<u8>,
        /// Line of its first byte, from 1; 0 where that is not known.
        line: u64,
    },
    /// Fields that the file keeps apart. A medium that came with the record stands as `{"attachment": k}`, its
    /// position in [`RawRecord::attachments`].
    Fields(Value),
    /// No record: what its reader found wrong with it.
    Unsound(String),
}

impl RawRecord {
    /// The record as a JSON value.
    ///
    /// # Errors
    /// Line, column and cause where its text is not JSON.
    pub fn parse(&self) -> Result<Cow<'_, Value>, String> {
        match &self.body {
            Body::Json { text, line } => json::parse(text, *line).map(Cow::Owned),
            Body::Fields(fields) => Ok(Cow::Borrowed(fields)),
            Body::Unsound(cause) => Err(cause.clone()),
        }
    }

    /// First eight bytes of the SHA-256 of what it says. Attached media are not in it: they have a hash of their own.
    pub fn hash(&self) -> u64 {
        use sha2::{Digest as _, Sha256};
        let mut hash = Sha256::new();
        match &self.body {
            Body::Json { text, .. } => hash.update(text),
            Body::Fields(fields) => hash.update(fields.to_string()),
            Body::Unsound(cause) => hash.update(cause),
        }
        let digest = hash.finalize();
        crate::digest::first_eight(&digest)
    }
}

/// The records of a source, in order. An error ends the source: what is wrong with one record alone is found when it
/// is parsed.
pub type Records<'a> = Box<dyn Iterator<Item = Result<RawRecord, DataError>> + Send + 'a>;

/// The records of one source.
pub trait Reader: Send + Sync + fmt::Debug {
    /// The files that records are read from, in order; [`Place::file`] counts these.
    fn files(&self) -> &[Location];

    /// Columns that are not read of the file at this position, as far as it was looked into; a form without columns has
    /// none.
    fn unread(&self, file: usize) -> &[String] {
        let _ = file;
        &[]
    }

    /// How many records there are. *Complexity*: O(bytes) for text files; O(1) where the file has an index.
    ///
    /// # Errors
    /// [`DataError::Io`] and [`DataError::Record`].
    fn count(&self, stores: &Stores) -> Result<u64, DataError>;

    /// Every record, in order.
    ///
    /// # Errors
    /// [`DataError::Io`] and [`DataError::Record`].
    fn records<'a>(&'a self, stores: &'a Stores) -> Result<Records<'a>, DataError>;

    /// The record at `place`, read alone.
    ///
    /// # Errors
    /// [`DataError::Io`] and [`DataError::Record`].
    fn fetch(&self, stores: &Stores, place: Place) -> Result<RawRecord, DataError>;
}

/// The reader for a source of the mixture.
///
/// # Errors
/// [`DataError::Io`] where it is not there, [`DataError::Record`] where it is of no form we read.
pub fn open(source: &Source, stores: &Stores) -> Result<Box<dyn Reader>, DataError> {
    let location = &source.location;
    let refuse = |cause: String| Err(DataError::Record(format!("`{location}`: {cause}")));
    let Form { format, is_directory } = form(source, stores)?;
    if source.split.is_some() && !is_directory && !matches!(format, Format::WebDataset | Format::Energon) {
        return refuse("`split` is set, a file has no splits".to_owned());
    }
    let parquet = |file: &Location| -> Box<dyn TableFile> {
        Box::new(parquet::ParquetFile::new(file.clone(), source.clone()))
    };
    let arrow = |file: &Location| -> Box<dyn TableFile> {
        Box::new(arrow::ArrowFile::new(file.clone(), source.clone()))
    };
    match format {
        Format::Json => Ok(Box::new(json::JsonFile::new(location.clone(), json::Form::Array))),
        Format::Jsonl => Ok(Box::new(json::JsonFile::new(location.clone(), json::Form::Lines))),
        Format::WebDataset => webdataset::open(source, stores),
        Format::Energon => energon::open(source, source.split.as_deref(), stores),
        Format::Parquet if !is_directory => {
            Ok(Box::new(Tables::open(vec![location.clone()], stores, parquet)?))
        }
        Format::Arrow if !is_directory => Ok(Box::new(Tables::open(vec![location.clone()], stores, arrow)?)),
        Format::HuggingFace | Format::Parquet | Format::Arrow => {
            let files = huggingface::files(location, source.split.as_deref(), stores)?;
            let is_parquet = files.iter().all(|file| file.extension() == "parquet");
            if is_parquet && format == Format::Arrow || !is_parquet && format == Format::Parquet {
                return refuse(format!("it holds no .{} file", format.name()));
            }
            let open: &dyn Fn(&Location) -> _ = if is_parquet { &parquet } else { &arrow };
            Ok(Box::new(Tables::open(files, stores, open)?))
        }
    }
}

/// The form of a source, and whether it is a directory.
struct Form {
    format: Format,
    is_directory: bool,
}

/// What the mixture or the name says of a source, and whether something is there.
fn form(source: &Source, stores: &Stores) -> Result<Form, DataError> {
    let location = &source.location;
    let name = location.name().to_ascii_lowercase();
    let ending = location.extension();
    match source.format {
        // Patterns name no file; their readers look for themselves.
        Some(format @ (Format::WebDataset | Format::Energon)) => {
            return Ok(Form { format, is_directory: false });
        }
        None if matches!(ending.as_str(), "yaml" | "yml") => {
            return Err(energon::metadataset(location));
        }
        None if ending == "tar" => return Ok(Form { format: Format::WebDataset, is_directory: false }),
        _ => {}
    }
    let Err(missing) = stores.about(location) else {
        return file_form(source, &name).map(|format| Form { format, is_directory: false });
    };
    let Ok(entries) = stores.list(location) else {
        return Err(missing);
    };
    if entries.is_empty() && matches!(location, Location::Local(_)) {
        return Err(DataError::Record(format!(
            "`{location}`: the directory has no `.tar` file, and none of another form we read: it is empty"
        )));
    } else if entries.is_empty() && !energon::is_dataset(location, stores) {
        return Err(missing);
    }
    let found = if energon::is_dataset(location, stores) {
        Format::Energon
    } else if entries.iter().any(|entry| entry.extension() == "tar") {
        Format::WebDataset
    } else {
        Format::HuggingFace
    };
    match source.format.unwrap_or(found) {
        Format::Json | Format::Jsonl => Err(DataError::Record(format!(
            "`{location}` is a directory, must be a file: list each file of it in a mixture"
        ))),
        format => Ok(Form { format, is_directory: true }),
    }
}

/// The form of a file.
fn file_form(source: &Source, name: &str) -> Result<Format, DataError> {
    let refuse = |cause: &str| Err(DataError::Record(format!("`{}`: {cause}", source.location)));
    if [".gz", ".tgz", ".zst", ".zstd", ".bz2", ".xz"].iter().any(|ending| name.ends_with(ending)) {
        return refuse(
            "it is compressed, but records are found by their position in bytes: unpack it first, for example with `gzip -d`, `zstd -d`, `bzip2 -d` or `xz -d`",
        );
    }
    match (source.format, source.location.extension().as_str()) {
        (Some(Format::HuggingFace) | None, "parquet") => Ok(Format::Parquet),
        (Some(Format::HuggingFace) | None, "arrow") => Ok(Format::Arrow),
        (Some(Format::HuggingFace), _) => {
            refuse("it is a file, must be a directory, a .parquet or an .arrow file")
        }
        (Some(format), _) => Ok(format),
        (None, "json") => Ok(Format::Json),
        (None, "jsonl") => Ok(Format::Jsonl),
        (None, other @ ("csv" | "tsv")) => refuse(&format!(
            "a source ending in `{other}` is of no form we read: write it as Parquet, for example with \
             `pandas.read_csv(file).to_parquet(file)`"
        )),
        (None, other) => refuse(&format!(
            "a source ending in `{other}` is of no form we read, must be .json, .jsonl, .parquet, .arrow or .tar, \
             or have a `format` in the mixture"
        )),
    }
}
