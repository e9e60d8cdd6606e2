//! Stores: files of this machine and objects of a remote store, read in parts.
//!
//! `s3://`, `gs://`, `https://` and `http://` are read by ranges: a header costs one request of 64 KiB, a file read
//! from end to end one request for each 8 MiB. A try that fails by overload (429, 5xx) or a broken connection is made
//! again up to 4 times within 60 s; a connection must stand within 5 s, and no answer may pause for more than 30 s
//! (store options `connect_timeout`, `read_timeout`), nor send fewer than 32 KiB in 30 s before it ends. Of the body of
//! an error 64 KiB are read.

pub(crate) mod blocks;
mod bounds;
mod clients;
mod fault;
mod file;
mod remote;

use crate::error::DataError;
use crate::media::probe::{self, Probe};
use crate::read_seek::ReadSeek;
use crate::source::location::{Location, MediaPlace};
use dflop_types::regular;
use file::RemoteFile;
use remote::{MEDIUM_BYTES_MAX, Remote, too_large};
use std::ffi::OsString;
use std::fmt;
use std::io::{Cursor, ErrorKind, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// An open file or object.
pub struct Opened {
    /// Its bytes.
    pub reader: Box<dyn ReadSeek>,
    /// How many.
    pub len: u64,
    /// What tells one version of it from the next: time of change in nanoseconds, or the store's tag.
    pub version: String,
}

/// What is seen of a medium that is not decoded.
pub(crate) struct Look {
    pub(crate) header: Probe,
    pub(crate) version: String,
    /// Those of its bytes that tell its content; see [`blocks`].
    pub(crate) sampled: Vec<u8>,
}

/// The stores that locations name. Cheap to clone and to share between threads; clones share clients and counts.
#[derive(Clone, Default)]
pub struct Stores {
    remote: Arc<Remote>,
}

impl fmt::Debug for Stores {
    /// Says nothing of the options: some are secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stores").finish_non_exhaustive()
    }
}

impl Stores {
    /// Stores with these options, for example `("aws_access_key_id", "...")`; names are those of `object_store`. Of two
    /// values of one name the last holds.
    ///
    /// An option that no store knows is an error of the first remote read, but for `aws_...` and `google_...`: an
    /// environment has such for other programs. Nothing is read from the environment here; see [`options_among`].
    pub fn new(options: impl IntoIterator<Item = (String, String)>) -> Self {
        Self { remote: Arc::new(Remote::new(options.into_iter().collect())) }
    }

    /// Requests sent to remote stores (each try counts) and bytes of objects received.
    pub fn traffic(&self) -> (u64, u64) {
        self.remote.traffic()
    }

    /// The file or object at `location`. Of a remote one only what is asked for is fetched.
    ///
    /// What the store says of a remote object (size, version) is kept: opening it again costs no request, and reading
    /// it after it changed is an error.
    ///
    /// # Errors
    /// [`DataError::Io`].
    pub fn open(&self, location: &Location) -> Result<Opened, DataError> {
        match location {
            Location::Local(path) => open_file(path),
            Location::Remote(url) => {
                let file = self.open_remote(url, None, true).map_err(|source| DataError::Io {
                    act: "read",
                    path: location.path(),
                    source,
                })?;
                Ok(opened(file))
            }
        }
    }

    /// Size and version of the file or object at `location`, without opening it.
    ///
    /// # Errors
    /// [`DataError::Io`].
    pub fn about(&self, location: &Location) -> Result<(u64, String), DataError> {
        let Location::Remote(url) = location else {
            return self.open(location).map(|opened| (opened.len, opened.version));
        };
        let io = |source| DataError::Io { act: "read", path: location.path(), source };
        let about = if let Some(about) = self.remote.known(url) {
            about
        } else {
            let object = self.remote.object(url).map_err(io)?;
            self.remote.about(&object).map_err(io)?
        };
        self.remote.learn(url, &about);
        Ok((about.bytes, about.version))
    }

    /// Files and objects right under the directory or prefix `location`, sorted by name.
    ///
    /// # Errors
    /// [`DataError::Io`]; also where nothing is under a prefix, and for `https://` and `http://`, which have no lists.
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
            Location::Remote(url) => {
                let urls = self.remote.list(url).map_err(io)?;
                Ok(urls.into_iter().map(Location::Remote).collect())
            }
        }
    }

    /// The bytes of a medium, opened.
    ///
    /// # Errors
    /// [`DataError::Io`].
    pub fn open_media(&self, place: &MediaPlace) -> Result<Opened, DataError> {
        let io = |source| DataError::Io { act: "read", path: place.to_string().into(), source };
        match place {
            // Not kept in mind: a dataset has too many of them, and each is opened once an epoch.
            MediaPlace::Whole(Location::Remote(url)) => {
                self.open_remote(url, None, false).map(opened).map_err(io)
            }
            MediaPlace::Whole(location) => self.open(location),
            MediaPlace::Range { file: Location::Remote(url), start, len, .. } => {
                let part = part(*start, *len).map_err(io)?;
                self.open_remote(url, Some(part), true).map(opened).map_err(io)
            }
            MediaPlace::Range { file, start, len, .. } => {
                part(*start, *len).map_err(io)?;
                let opened = self.open(file)?;
                let reader = FileRange { reader: opened.reader, start: *start, len: *len, at: 0 };
                Ok(Opened { reader: Box::new(reader), len: *len, version: opened.version })
            }
            MediaPlace::Bytes { bytes, .. } => Ok(Opened {
                reader: Box::new(Cursor::new(bytes.clone())),
                len: bytes.len() as u64,
                version: String::new(),
            }),
        }
    }

    /// The object at `url`, or a part of it; where `is_kept`, what the store says of it is kept for the next time.
    fn open_remote(&self, url: &str, part: Option<Range<u64>>, is_kept: bool) -> std::io::Result<RemoteFile> {
        let object = self.remote.object(url)?;
        let known = if is_kept { self.remote.known(url) } else { None };
        let is_new = is_kept && known.is_none();
        let file = RemoteFile::open(self.remote.clone(), object, part, known)?;
        if is_new {
            self.remote.learn(url, file.about());
        }
        Ok(file)
    }

    /// What the headers of a medium say, and its version.
    ///
    /// # Errors
    /// Those of [`probe::probe`].
    pub fn probe(&self, place: &MediaPlace) -> Result<(Probe, String), DataError> {
        self.look(place).map(|look| (look.header, look.version))
    }

    /// The same, and a sample of the medium's bytes.
    ///
    /// # Errors
    /// Those of [`probe::probe`].
    pub(crate) fn look(&self, place: &MediaPlace) -> Result<Look, DataError> {
        let mut opened = self.open_media(place)?;
        let name = std::path::PathBuf::from(place.to_string());
        // Training would fail: it reads all bytes of a remote medium into memory.
        if is_remote(place) && opened.len > MEDIUM_BYTES_MAX {
            let source = std::io::Error::new(ErrorKind::FileTooLarge, too_large(opened.len));
            return Err(DataError::Io { act: "read", path: name, source });
        }
        let sampled = blocks::sample(&mut opened, is_remote(place)).map_err(|source| DataError::Io {
            act: "read",
            path: name.clone(),
            source,
        })?;
        let header = probe::probe_reader(&name, opened.reader, opened.len)?;
        Ok(Look { header, version: opened.version, sampled })
    }

    /// All bytes of a medium; of a remote one by one request.
    ///
    /// # Errors
    /// [`DataError::Io`]; also of a remote medium of more than 4 GiB.
    pub fn read_media(&self, place: &MediaPlace) -> Result<Vec<u8>, DataError> {
        let io = |source| DataError::Io { act: "read", path: place.to_string().into(), source };
        let (url, range) = match place {
            MediaPlace::Whole(Location::Remote(url)) => (url, None),
            MediaPlace::Range { file: Location::Remote(url), start, len, .. } if *len > 0 => {
                if *len > MEDIUM_BYTES_MAX {
                    return Err(io(std::io::Error::new(ErrorKind::FileTooLarge, too_large(*len))));
                }
                (url, Some(part(*start, *len).map_err(io)?))
            }
            _ => {
                let mut opened = self.open_media(place)?;
                let mut bytes = Vec::new();
                opened.reader.read_to_end(&mut bytes).map_err(io)?;
                return short(bytes, opened.len).map_err(io);
            }
        };
        let object = self.remote.object(url).map_err(io)?;
        let (_, fetched) = self.remote.get(&object, range.clone()).map_err(io)?;
        match range {
            None => Ok(fetched.bytes),
            // A server that ignores ranges gives more than was asked for.
            Some(range) => {
                let skip = usize::try_from(range.start - fetched.start).unwrap_or(usize::MAX);
                let mut bytes = fetched.bytes;
                bytes.drain(..skip.min(bytes.len()));
                bytes.truncate(usize::try_from(range.end - range.start).unwrap_or(usize::MAX));
                short(bytes, range.end - range.start).map_err(io)
            }
        }
    }
}

fn is_remote(place: &MediaPlace) -> bool {
    matches!(
        place,
        MediaPlace::Whole(Location::Remote(_)) | MediaPlace::Range { file: Location::Remote(_), .. }
    )
}

/// The options of remote stores among these variables of an environment.
///
/// Those that begin with `AWS_` or `GOOGLE_` and that `object_store` knows, for example `AWS_ACCESS_KEY_ID`; and every option
/// by its own name behind `DFLOP_STORE_`, for example `DFLOP_STORE_ALLOW_HTTP`, which holds over the former.
pub fn options_among(variables: impl IntoIterator<Item = (OsString, OsString)>) -> Vec<(String, String)> {
    let (mut theirs, mut ours) = (Vec::new(), Vec::new());
    for (name, value) in variables {
        let (Ok(name), Ok(value)) = (name.into_string(), value.into_string()) else { continue };
        let name = name.to_ascii_lowercase();
        if let Some(option) = name.strip_prefix("dflop_store_") {
            ours.push((option.to_owned(), value));
        } else if clients::is_of_environment(&name) && clients::is_option(&name) {
            theirs.push((name, value));
        }
    }
    // The order of the environment is nobody's choice.
    theirs.sort();
    ours.sort();
    theirs.append(&mut ours);
    theirs
}

/// A file of this machine.
fn open_file(path: &Path) -> Result<Opened, DataError> {
    let io = |source| DataError::Io { act: "read", path: path.to_owned(), source };
    let (file, about) = regular::open(path).map_err(io)?;
    let version = about
        .modified()
        .ok()
        .and_then(|time| time.duration_since(std::time::UNIX_EPOCH).ok())
        .map_or_else(String::new, |time| time.as_nanos().to_string());
    Ok(Opened { reader: Box::new(file), len: about.len(), version })
}

fn opened(file: RemoteFile) -> Opened {
    Opened { len: file.len(), version: file.about().version.clone(), reader: Box::new(file) }
}

/// The bytes from `start` on, `len` of them.
fn part(start: u64, len: u64) -> std::io::Result<Range<u64>> {
    let end = start.checked_add(len).ok_or_else(|| {
        std::io::Error::new(ErrorKind::InvalidInput, format!("{len} bytes from byte {start} on pass 2^64"))
    })?;
    Ok(start..end)
}

/// The bytes, if there are as many as there must be.
fn short(bytes: Vec<u8>, expected: u64) -> std::io::Result<Vec<u8>> {
    if bytes.len() as u64 == expected {
        return Ok(bytes);
    }
    let cause = format!("it has {} bytes, must have {expected}", bytes.len());
    Err(std::io::Error::new(ErrorKind::UnexpectedEof, cause))
}

/// A part of a file that reads as a file of its own.
struct FileRange {
    reader: Box<dyn ReadSeek>,
    start: u64,
    len: u64,
    at: u64,
}

impl Read for FileRange {
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

impl Seek for FileRange {
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
