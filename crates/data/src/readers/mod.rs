//! Readers: a source in, its records out, one after the other. Records are parsed later, one by one, so that a broken
//! one costs itself alone; a file is never held in memory.

mod energon;
mod json;
mod tar;
mod webdataset;

use crate::error::DataError;
use crate::location::{Location, MediaPlace};
use crate::mixture::Source;
use crate::store::Stores;
use dflop_types::Place;
use serde_json::Value;
use std::fmt;

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
    pub fn parse(&self) -> Result<Value, String> {
        match &self.body {
            Body::Json { text, line } => json::parse(text, *line),
            Body::Fields(fields) => Ok(fields.clone()),
            Body::Unsound(cause) => Err(cause.clone()),
        }
    }

    /// First eight bytes of the SHA-256 of what it says; attached media count by their names and sizes.
    pub fn hash(&self) -> u64 {
        use sha2::{Digest as _, Sha256};
        let mut hash = Sha256::new();
        match &self.body {
            Body::Json { text, .. } => hash.update(text),
            Body::Fields(fields) => hash.update(fields.to_string()),
            Body::Unsound(cause) => hash.update(cause),
        }
        let digest = hash.finalize();
        u64::from_be_bytes(digest[..8].try_into().expect("a SHA-256 has 32 bytes"))
    }
}

/// The records of a source, in order. An error ends the source: what is wrong with one record alone is found when it
/// is parsed.
pub type Records<'a> = Box<dyn Iterator<Item = Result<RawRecord, DataError>> + Send + 'a>;

/// The records of one source.
pub trait Reader: Send + Sync + fmt::Debug {
    /// The files that records are read from, in order; [`Place::file`] counts these.
    fn files(&self) -> &[Location];

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
    if let Some(reader) = open_shards(source, None, stores) {
        return reader;
    }
    stores.about(&source.location)?;
    match source.location.extension().as_str() {
        "json" | "jsonl" => Ok(Box::new(json::JsonFile::new(source.location.clone()))),
        other => Err(DataError::Record(format!(
            "`{}`: a source ending in `{other}` is of no form we read, must be .json, .jsonl, .tar, a pattern or \
             directory of .tar, or a directory with .nv-meta",
            source.location
        ))),
    }
}

/// The reader for tar shards, where the source is of that form: one shard, a pattern, a directory of them, or a dataset
/// of Megatron-Energon, of which `split` is read.
fn open_shards(
    source: &Source,
    split: Option<&str>,
    stores: &Stores,
) -> Option<Result<Box<dyn Reader>, DataError>> {
    let location = &source.location;
    match location.extension().as_str() {
        "tar" => return Some(webdataset::open(source, stores)),
        "yaml" | "yml" => return Some(Err(energon::metadataset(location))),
        _ => {}
    }
    let is_directory = match location {
        Location::Local(path) => path.is_dir(),
        Location::Remote(url) => url.ends_with('/') || location.extension().is_empty(),
    };
    if is_directory && energon::is_dataset(location, stores) {
        return Some(energon::open(source, split, stores));
    }
    is_directory.then(|| webdataset::open(source, stores))
}
