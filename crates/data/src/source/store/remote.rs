//! Objects of remote stores: their facts and bytes by single requests.
//!
//! One runtime of two threads serves all callers: they wait for their own request, from as many threads as they like.

use super::bounds::{PACE, Paced};
use super::clients::{Clients, Object, lock};
use super::fault::{self, Seen};
use object_store::{GetOptions, GetRange, ObjectMeta};
use std::collections::HashMap;
use std::future::Future;
use std::io::{Error, ErrorKind, Result};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};
use tokio::runtime::{Builder, Runtime};

/// Threads of the runtime: they move bytes, callers wait in theirs.
const WORKERS: usize = 2;
/// Largest file that is read whole from a server that ignores ranges.
pub(super) const WHOLE_BYTES_MAX: u64 = 8 << 20;
/// Largest medium that is read whole, into memory, as training reads it.
pub(super) const MEDIUM_BYTES_MAX: u64 = 4 << 30;
/// Most objects whose size and version are kept.
const KNOWN_MAX: usize = 1 << 16;

/// What a store says about an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct About {
    pub(super) bytes: u64,
    /// Its tag, else its time of change in nanoseconds, else nothing.
    pub(super) version: String,
}

impl From<&ObjectMeta> for About {
    fn from(meta: &ObjectMeta) -> Self {
        let changed_ns = meta.last_modified.timestamp_nanos_opt().filter(|&ns| ns != 0);
        let version = meta.e_tag.clone().or_else(|| changed_ns.map(|ns| ns.to_string()));
        Self { bytes: meta.size, version: version.unwrap_or_default() }
    }
}

/// Remote stores: clients, and what was fetched through them.
#[derive(Default)]
pub(super) struct Remote {
    clients: Clients,
    bytes: AtomicU64,
    runtime: OnceLock<Result<Runtime>>,
    /// Files of records, opened again and again; media are not among them.
    known: Mutex<HashMap<String, About>>,
}

impl Remote {
    pub(super) fn new(options: Vec<(String, String)>) -> Self {
        Self { clients: Clients::new(options), ..Self::default() }
    }

    /// Requests sent, each try counted, and bytes of objects received.
    pub(super) fn traffic(&self) -> (u64, u64) {
        (self.clients.requests(), self.bytes.load(Ordering::Relaxed))
    }

    /// The object at `url`; nothing is sent.
    pub(super) fn object(&self, url: &str) -> Result<Object> {
        self.clients.object(url)
    }

    /// Waits in the caller's thread.
    fn wait<T>(&self, work: impl Future<Output = T>) -> Result<T> {
        let runtime = self.runtime.get_or_init(|| {
            Builder::new_multi_thread().worker_threads(WORKERS).thread_name("store").enable_all().build()
        });
        match runtime {
            Ok(runtime) => Ok(runtime.block_on(work)),
            Err(cause) => Err(Error::new(cause.kind(), format!("no thread for the network: {cause}"))),
        }
    }

    /// Size and version of the object, by one request.
    pub(super) fn about(&self, object: &Object) -> Result<About> {
        object.check()?;
        let seen = Seen::default();
        let mut options = GetOptions { head: true, ..GetOptions::default() };
        options.extensions.insert(seen.clone());
        match self.wait(object.client.get_opts(&object.path, options))? {
            Ok(result) => Ok(About::from(&result.meta)),
            // Signed URLs and simple servers answer GET alone.
            Err(_) if object.is_web() && matches!(seen.status(), Some(200 | 400 | 401 | 403 | 405 | 501)) => {
                self.get(object, Some(0..1)).map(|(about, _)| about)
            }
            Err(error) => Err(fault::explain(&object.url, &error, &seen)),
        }
    }

    /// The bytes of `range`, cut at the object's end, or all of them, of an object of at most [`MEDIUM_BYTES_MAX`]; and
    /// what the store says of the object.
    ///
    /// A server that ignores ranges gives all bytes of a file up to [`WHOLE_BYTES_MAX`], from its start.
    pub(super) fn get(&self, object: &Object, range: Option<Range<u64>>) -> Result<(About, Fetched)> {
        object.check()?;
        let seen = Seen::default();
        let start = range.as_ref().map_or(0, |range| range.start);
        let has_range = range.is_some();
        let bytes_max = if has_range { u64::MAX } else { MEDIUM_BYTES_MAX };
        match self.wait(self.request(object, range, bytes_max, &seen))? {
            Ok((about, bytes)) => Ok((about, Fetched { start, bytes })),
            // Ranges are ignored, or none can be given: no byte of an empty object can be asked for.
            Err(_)
                if has_range && (seen.status() == Some(200) || start == 0 && seen.status() == Some(416)) =>
            {
                let seen = Seen::default();
                let whole = self.wait(self.request(object, None, WHOLE_BYTES_MAX, &seen))?;
                whole
                    .map(|(about, bytes)| (about, Fetched { start: 0, bytes }))
                    .map_err(|error| error.explain(&object.url, &seen))
            }
            Err(error) => Err(error.explain(&object.url, &seen)),
        }
    }

    async fn request(
        &self,
        object: &Object,
        range: Option<Range<u64>>,
        bytes_max: u64,
        seen: &Seen,
    ) -> std::result::Result<(About, Vec<u8>), Failure> {
        let mut options = GetOptions { range: range.map(GetRange::Bounded), ..GetOptions::default() };
        options.extensions.insert(seen.clone());
        let answer = object.client.get_opts(&object.path, options).await.map_err(Failure::Store)?;
        let about = About::from(&answer.meta);
        let expected = answer.range.end - answer.range.start;
        if expected > bytes_max {
            return Err(Failure::Answer(if bytes_max == MEDIUM_BYTES_MAX {
                too_large(expected)
            } else {
                format!(
                    "the server ignores ranges and the file has {expected} bytes; at most {bytes_max} are read whole"
                )
            }));
        }
        // Grows with what arrives: the length is but a claim.
        let mut bytes = Vec::new();
        let mut parts = Paced::new(answer.into_stream(), PACE);
        while let Some(part) = parts.next().await.map_err(|slow| Failure::Answer(slow.to_string()))? {
            let part = part.map_err(Failure::Store)?;
            self.bytes.fetch_add(part.len() as u64, Ordering::Relaxed);
            bytes.extend_from_slice(&part);
            if bytes.len() as u64 > expected {
                break;
            }
        }
        if bytes.len() as u64 != expected {
            let found = bytes.len();
            return Err(Failure::Answer(format!("the answer has {found} bytes, {expected} were announced")));
        }
        Ok((about, bytes))
    }

    /// URLs of objects and of deeper prefixes right under `url`, sorted.
    pub(super) fn list(&self, url: &str) -> Result<Vec<String>> {
        let object = self.object(url)?;
        if object.is_web() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "a web server has no list of its files: name each file",
            ));
        }
        let found = self.wait(object.client.list_with_delimiter(Some(&object.path)))?;
        // Listings carry no extensions: the status is unknown here, the cause is not.
        let found = found.map_err(|error| fault::explain(url, &error, &Seen::default()))?;
        let (scheme, rest) = url.split_once("://").unwrap_or((url, ""));
        let bucket = rest.split('/').next().unwrap_or_default();
        let objects = found.objects.into_iter().map(|object| object.location);
        let mut names: Vec<String> = objects
            .chain(found.common_prefixes)
            // An empty object of the prefix's own name stands for a directory in some tools.
            .filter(|path| *path != object.path)
            .map(|path| format!("{scheme}://{bucket}/{path}"))
            .collect();
        if names.is_empty() {
            return Err(Error::new(ErrorKind::NotFound, "nothing is under it"));
        }
        names.sort();
        names.dedup();
        Ok(names)
    }

    /// What is known of a file of records.
    pub(super) fn known(&self, url: &str) -> Option<About> {
        lock(&self.known).get(url).cloned()
    }

    pub(super) fn learn(&self, url: &str, about: &About) {
        let mut known = lock(&self.known);
        if known.len() < KNOWN_MAX {
            known.insert(url.to_owned(), about.clone());
        }
    }
}

/// Why a medium of so many bytes is not read.
pub(super) fn too_large(num_bytes: u64) -> String {
    format!(
        "it has {num_bytes} bytes; a remote medium is read into memory and must have at most {MEDIUM_BYTES_MAX}"
    )
}

/// Bytes from `start` of an object.
pub(super) struct Fetched {
    pub(super) start: u64,
    pub(super) bytes: Vec<u8>,
}

/// Why a request gave nothing.
enum Failure {
    /// What the client says.
    Store(object_store::Error),
    /// An answer that is not what was asked for.
    Answer(String),
}

impl Failure {
    fn explain(self, url: &str, seen: &Seen) -> Error {
        match self {
            Self::Store(error) => fault::explain(url, &error, seen),
            Self::Answer(cause) => Error::new(ErrorKind::InvalidData, cause),
        }
    }
}
