//! Stores: files of this machine and objects of a remote store, read in parts.

use crate::error::DataError;
use crate::location::{Location, MediaPlace};
use crate::probe::{self, Probe};
use std::fs::File;
use std::io::{Cursor, Read, Seek, SeekFrom};

/// Something that is read at any offset, by one thread.
pub trait ReadSeek: Read + Seek + Send {}
impl<T: Read + Seek + Send> ReadSeek for T {}

/// An open file or object.
pub struct Opened {
    /// Its bytes.
    pub reader: Box<dyn ReadSeek>,
    /// How many.
    pub len: u64,
    /// What tells one version of it from the next: time of change in nanoseconds, or the store's tag.
    pub version: String,
}

/// The stores that locations name. Cheap to share between threads.
#[derive(Debug, Default)]
pub struct Stores {}

impl Stores {
    /// Stores with these options, as in `("aws_access_key_id", "...")`; names are those of `object_store`.
    pub fn new(options: impl IntoIterator<Item = (String, String)>) -> Self {
        let _ = options.into_iter().count();
        Self {}
    }

    /// The file or object at `location`. Of a remote one only what is asked for is fetched.
    ///
    /// # Errors
    /// [`DataError::Io`].
    pub fn open(&self, location: &Location) -> Result<Opened, DataError> {
        let io = |source| DataError::Io { act: "read", path: location.path(), source };
        match location {
            Location::Local(path) => {
                let file = File::open(path).map_err(io)?;
                let about = file.metadata().map_err(io)?;
                if about.is_dir() {
                    return Err(io(std::io::ErrorKind::IsADirectory.into()));
                }
                let version = about
                    .modified()
                    .ok()
                    .and_then(|time| time.duration_since(std::time::UNIX_EPOCH).ok())
                    .map_or_else(String::new, |time| time.as_nanos().to_string());
                Ok(Opened { reader: Box::new(file), len: about.len(), version })
            }
            Location::Remote(_) => {
                Err(io(std::io::Error::new(std::io::ErrorKind::Unsupported, "remote stores")))
            }
        }
    }

    /// Size and version of the file or object at `location`, without opening it.
    ///
    /// # Errors
    /// [`DataError::Io`].
    pub fn about(&self, location: &Location) -> Result<(u64, String), DataError> {
        self.open(location).map(|opened| (opened.len, opened.version))
    }

    /// Files and objects right under the directory or prefix `location`, sorted by name.
    ///
    /// # Errors
    /// [`DataError::Io`].
    pub fn list(&self, location: &Location) -> Result<Vec<Location>, DataError> {
        let io = |source| DataError::Io { act: "list", path: location.path(), source };
        match location {
            Location::Local(path) => {
                let mut found = Vec::new();
                for entry in std::fs::read_dir(path).map_err(io)? {
                    found.push(Location::Local(entry.map_err(io)?.path()));
                }
                found.sort();
                Ok(found)
            }
            Location::Remote(_) => {
                Err(io(std::io::Error::new(std::io::ErrorKind::Unsupported, "remote stores")))
            }
        }
    }

    /// The bytes of a medium, opened.
    ///
    /// # Errors
    /// [`DataError::Io`].
    pub fn open_media(&self, place: &MediaPlace) -> Result<Opened, DataError> {
        match place {
            MediaPlace::Whole(location) => self.open(location),
            MediaPlace::Range { file, start, len, .. } => {
                let opened = self.open(file)?;
                let reader = Part { reader: opened.reader, start: *start, len: *len, at: 0 };
                Ok(Opened { reader: Box::new(reader), len: *len, version: opened.version })
            }
            MediaPlace::Bytes { bytes, .. } => Ok(Opened {
                reader: Box::new(Cursor::new(bytes.clone())),
                len: bytes.len() as u64,
                version: String::new(),
            }),
        }
    }

    /// What the headers of a medium say, and its version.
    ///
    /// # Errors
    /// Those of [`probe::probe`].
    pub fn probe(&self, place: &MediaPlace) -> Result<(Probe, String), DataError> {
        let opened = self.open_media(place)?;
        let name = std::path::PathBuf::from(place.to_string());
        probe::probe_reader(&name, opened.reader, opened.len).map(|probe| (probe, opened.version))
    }

    /// All bytes of a medium.
    ///
    /// # Errors
    /// [`DataError::Io`].
    pub fn read_media(&self, place: &MediaPlace) -> Result<Vec<u8>, DataError> {
        let mut opened = self.open_media(place)?;
        let mut bytes = Vec::new();
        opened.reader.read_to_end(&mut bytes).map_err(|source| DataError::Io {
            act: "read",
            path: place.to_string().into(),
            source,
        })?;
        Ok(bytes)
    }
}

/// A part of a file that reads as a file of its own.
struct Part {
    reader: Box<dyn ReadSeek>,
    start: u64,
    len: u64,
    at: u64,
}

impl Read for Part {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let left = self.len.saturating_sub(self.at).min(buffer.len() as u64) as usize;
        if left == 0 {
            return Ok(0);
        }
        self.reader.seek(SeekFrom::Start(self.start + self.at))?;
        let read = self.reader.read(&mut buffer[..left])?;
        self.at += read as u64;
        Ok(read)
    }
}

impl Seek for Part {
    fn seek(&mut self, to: SeekFrom) -> std::io::Result<u64> {
        let at = match to {
            SeekFrom::Start(at) => Some(at),
            SeekFrom::End(by) => self.len.checked_add_signed(by),
            SeekFrom::Current(by) => self.at.checked_add_signed(by),
        };
        self.at = at.ok_or_else(|| std::io::Error::from(std::io::ErrorKind::InvalidInput))?;
        Ok(self.at)
    }
}
