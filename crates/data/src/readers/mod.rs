//! Readers: a file in, the places of its records out. Records are parsed later, one by one, so that a broken one
//! costs itself alone and a large file does not stay in memory.

mod json;

use crate::error::DataError;
use serde_json::Value;
use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};

/// Where one record stands in its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// First byte, from 0.
    pub start: u64,
    /// Bytes.
    pub len: u64,
    /// Line of the first byte, from 1.
    pub line: u64,
}

/// The records of a file, in its order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Records {
    /// The file.
    pub path: PathBuf,
    /// SHA-256 of its content, as `sha256:...`.
    pub hash: String,
    /// One a record.
    pub places: Vec<Place>,
}

impl Records {
    /// Finds the records of a `.jsonl` file (one a line, empty lines aside) or a `.json` file (one array).
    ///
    /// *Complexity*: O(bytes of the file), held in memory until the call returns.
    ///
    /// # Errors
    /// [`DataError::Io`], and [`DataError::Record`] where a JSON file is not one array.
    pub fn open(path: &Path) -> Result<Self, DataError> {
        let bytes = std::fs::read(path).map_err(|source| DataError::Io {
            act: "read",
            path: path.to_owned(),
            source,
        })?;
        let is_lines = path.extension().is_some_and(|e| e.eq_ignore_ascii_case("jsonl"));
        let places = if is_lines { json::lines(&bytes) } else { json::elements(&bytes) }
            .map_err(|cause| DataError::Record(format!("`{}`: {cause}", path.display())))?;
        Ok(Self {
            path: path.to_owned(),
            hash: dflop_types::artifact::hash_parts([bytes.as_slice()]),
            places,
        })
    }

    /// The record at `position`, parsed. Reads the file again.
    ///
    /// # Errors
    /// [`DataError::Io`], and [`DataError::Record`] with line and column where it is not JSON.
    ///
    /// # Panics
    /// If there is no such record.
    pub fn parse(&self, position: u64) -> Result<Value, DataError> {
        let place = self.places[position as usize];
        let io = |source| DataError::Io { act: "read", path: self.path.clone(), source };
        let mut file = File::open(&self.path).map_err(io)?;
        let mut bytes = vec![0; place.len as usize];
        file.seek(SeekFrom::Start(place.start)).and_then(|_| file.read_exact(&mut bytes)).map_err(io)?;
        json::parse(&bytes, place.line).map_err(DataError::Record)
    }
}
