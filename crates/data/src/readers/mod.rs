//! Readers: a source in, its records out, one after the other. Records are parsed later, one by one, so that a broken
//! one costs itself alone; a file is never held in memory.

mod json;

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
        }
    }

    /// First eight bytes of the SHA-256 of what it says; attached media count by their names and sizes.
    pub fn hash(&self) -> u64 {
        use sha2::{Digest as _, Sha256};
        let mut hash = Sha256::new();
        match &self.body {
            Body::Json { text, .. } => hash.update(text),
            Body::Fields(fields) => hash.update(fields.to_string()),
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
    stores.about(&source.location)?;
    match source.location.extension().as_str() {
        "jsonl" => Ok(Box::new(json::JsonFile::new(source.location.clone(), json::Form::Lines))),
        "json" => Ok(Box::new(json::JsonFile::new(source.location.clone(), json::Form::Array))),
        other => Err(DataError::Record(format!(
            "`{}`: a source ending in `{other}` is of no form we read, must be .json or .jsonl",
            source.location
        ))),
    }
}
