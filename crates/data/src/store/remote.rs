//! Objects of remote stores: clients made once and kept, requests counted.
//!
//! One runtime of two threads serves all callers: they wait for their own request, from as many threads as they like.

use super::fault::{self, Seen};
use futures_util::StreamExt as _;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpRequest, HttpResponse, HttpService, ReqwestConnector,
};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::http::HttpBuilder;
use object_store::path::Path;
use object_store::{
    BackoffConfig, ClientConfigKey, ClientOptions, GetOptions, GetRange, ObjectMeta, ObjectStore, RetryConfig,
};
use std::collections::HashMap;
use std::future::Future;
use std::io::{Error, ErrorKind, Result};
use std::ops::Range;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;
use tokio::runtime::{Builder, Runtime};

/// Tries of a request beyond the first, where the server is overloaded or the connection breaks.
pub(super) const RETRIES: usize = 4;
/// No further try later than this after the first.
const RETRY_TIMEOUT: Duration = Duration::from_mins(1);
/// The first pause before another try; each is longer, with jitter.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));
/// Until a connection stands.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Between two parts of an answer; a long answer may take long.
const READ_TIMEOUT: Duration = Duration::from_secs(30);
/// Threads of the runtime: they move bytes, callers wait in theirs.
const WORKERS: usize = 2;
/// Largest file that is read whole from a server that ignores ranges.
pub(super) const WHOLE_BYTES_MAX: u64 = 8 << 20;
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

/// An object and the client that reaches it.
#[derive(Debug, Clone)]
pub(super) struct Object {
    client: Arc<dyn ObjectStore>,
    path: Path,
    pub(super) url: String,
}

/// Remote stores: options, clients, and what was fetched through them.
#[derive(Default)]
pub(super) struct Remote {
    options: Vec<(String, String)>,
    requests: Arc<AtomicU64>,
    bytes: AtomicU64,
    runtime: OnceLock<Result<Runtime>>,
    /// One a bucket, by `scheme://bucket`.
    buckets: Mutex<HashMap<String, Arc<dyn ObjectStore>>>,
    /// One for every host: it keeps connections by host.
    http: Mutex<Option<HttpClient>>,
    /// Files of records, opened again and again; media are not among them.
    known: Mutex<HashMap<String, About>>,
}

impl Remote {
    pub(super) fn new(options: Vec<(String, String)>) -> Self {
        Self { options, ..Self::default() }
    }

    /// Requests sent, each try counted, and bytes of objects received.
    pub(super) fn traffic(&self) -> (u64, u64) {
        (self.requests.load(Ordering::Relaxed), self.bytes.load(Ordering::Relaxed))
    }

    /// The object at `url`; nothing is sent.
    pub(super) fn object(&self, url: &str) -> Result<Object> {
        let (client, path) = match url.split_once("://") {
            Some((scheme @ ("s3" | "gs"), rest)) => {
                let (bucket, key) = rest.split_once('/').unwrap_or((rest, ""));
                (self.bucket(scheme, bucket)?, key_path(key)?)
            }
            // The whole URL is the client's base: its path and query are sent as they were written.
            _ => (self.web(url)?, Path::ROOT),
        };
        Ok(Object { client, path, url: url.to_owned() })
    }

    fn bucket(&self, scheme: &str, bucket: &str) -> Result<Arc<dyn ObjectStore>> {
        let name = format!("{scheme}://{bucket}");
        let mut buckets = lock(&self.buckets);
        if let Some(client) = buckets.get(&name) {
            return Ok(client.clone());
        }
        self.check_options()?;
        let connector = Connector { requests: self.requests.clone(), made: None };
        let client: Arc<dyn ObjectStore> = if scheme == "s3" {
            let builder = AmazonS3Builder::new()
                .with_client_options(client_options())
                .with_retry(retry())
                .with_http_connector(connector)
                .with_bucket_name(bucket);
            let options = self.parsed::<AmazonS3ConfigKey>();
            let builder = options.fold(builder, |builder, (key, value)| builder.with_config(key, value));
            Arc::new(builder.build().map_err(fault::settings)?)
        } else {
            let builder = GoogleCloudStorageBuilder::new()
                // The address of a machine's own credentials is plain http.
                .with_client_options(client_options().with_allow_http(true))
                .with_retry(retry())
                .with_http_connector(connector)
                .with_bucket_name(bucket);
            let options = self.parsed::<GoogleConfigKey>();
            let builder = options.fold(builder, |builder, (key, value)| builder.with_config(key, value));
            Arc::new(builder.build().map_err(fault::settings)?)
        };
        buckets.insert(name, client.clone());
        Ok(client)
    }

    fn web(&self, url: &str) -> Result<Arc<dyn ObjectStore>> {
        let invalid = |cause: String| Error::new(ErrorKind::InvalidInput, cause);
        let parsed = url::Url::parse(url).map_err(|cause| invalid(format!("it is no URL: {cause}")))?;
        let is_allowed = |(key, value): &(String, String)| {
            key == "allow_http"
                && matches!(value.to_ascii_lowercase().as_str(), "true" | "1" | "yes" | "on" | "y")
        };
        if parsed.scheme() == "http" && !self.options.iter().any(is_allowed) {
            return Err(invalid(
                "it is plain http, which anyone on the way can read and change: set the store option `allow_http` \
                 to `true` (`DFLOP_STORE_ALLOW_HTTP=true`), or use https"
                    .to_owned(),
            ));
        }
        let options = self
            .parsed::<ClientConfigKey>()
            .fold(client_options(), |options, (key, value)| options.with_config(key, value));
        let connector = Connector { requests: self.requests.clone(), made: Some(self.web_client(&options)?) };
        let builder = HttpBuilder::new()
            .with_url(parsed)
            .with_client_options(options)
            .with_retry(retry())
            .with_http_connector(connector);
        Ok(Arc::new(builder.build().map_err(fault::settings)?))
    }

    fn web_client(&self, options: &ClientOptions) -> Result<HttpClient> {
        let mut made = lock(&self.http);
        if let Some(client) = &*made {
            return Ok(client.clone());
        }
        self.check_options()?;
        let connector = Connector { requests: self.requests.clone(), made: None };
        let client = connector.connect(options).map_err(fault::settings)?;
        Ok(made.insert(client).clone())
    }

    /// Options that this kind of client knows.
    fn parsed<K: std::str::FromStr>(&self) -> impl Iterator<Item = (K, &str)> {
        self.options.iter().filter_map(|(key, value)| Some((key.parse().ok()?, value.as_str())))
    }

    /// A misspelt option would be a default in silence.
    fn check_options(&self) -> Result<()> {
        match self.options.iter().find(|(key, _)| !is_option(key) && !is_of_environment(key)) {
            None => Ok(()),
            Some((key, _)) => Err(Error::new(
                ErrorKind::InvalidInput,
                format!(
                    "store option `{key}` is not known; known are those of `object_store`, as in \
                     `aws_access_key_id`, `google_service_account`, `allow_http`"
                ),
            )),
        }
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

    /// The bytes of `range`, cut at the object's end, or all of them; and what the store says of the object.
    ///
    /// A server that ignores ranges gives all bytes of a file up to [`WHOLE_BYTES_MAX`], from its start.
    pub(super) fn get(&self, object: &Object, range: Option<Range<u64>>) -> Result<(About, Fetched)> {
        object.check()?;
        let seen = Seen::default();
        let start = range.as_ref().map_or(0, |range| range.start);
        let has_range = range.is_some();
        match self.wait(self.request(object, range, u64::MAX, &seen))? {
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
            return Err(Failure::Answer(format!(
                "the server ignores ranges and the file has {expected} bytes; at most {bytes_max} are read whole"
            )));
        }
        // Grows with what arrives: the length is but a claim.
        let mut bytes = Vec::new();
        let mut parts = answer.into_stream();
        while let Some(part) = parts.next().await {
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

/// Bytes from `start` of an object.
pub(super) struct Fetched {
    pub(super) start: u64,
    pub(super) bytes: Vec<u8>,
}

impl Object {
    fn is_web(&self) -> bool {
        self.url.starts_with("http")
    }

    /// A bucket alone would answer with its list.
    fn check(&self) -> Result<()> {
        if self.is_web() || self.path != Path::ROOT {
            return Ok(());
        }
        Err(Error::new(ErrorKind::InvalidInput, "it names a bucket, must name an object in it"))
    }
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

/// Whether any of the stores knows an option of this name.
pub(super) fn is_option(name: &str) -> bool {
    name.parse::<AmazonS3ConfigKey>().is_ok()
        || name.parse::<GoogleConfigKey>().is_ok()
        || name.parse::<ClientConfigKey>().is_ok()
}

/// Whether the name may come from an environment, where others have theirs.
pub(super) fn is_of_environment(name: &str) -> bool {
    name.starts_with("aws_") || name.starts_with("google_") || name.ends_with("_proxy")
}

/// The path of a key; `.` and `..` are resolved as in a path, since neither can stand in a key here.
fn key_path(key: &str) -> Result<Path> {
    let mut parts: Vec<&str> = Vec::new();
    for part in key.trim_end_matches('/').split('/') {
        match part {
            "." => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    Path::parse(parts.join("/")).map_err(|cause| Error::new(ErrorKind::InvalidInput, cause.to_string()))
}

fn retry() -> RetryConfig {
    let backoff = BackoffConfig { init_backoff: BACKOFF.0, max_backoff: BACKOFF.1, base: 2.0 };
    RetryConfig { backoff, max_retries: RETRIES, retry_timeout: RETRY_TIMEOUT }
}

fn client_options() -> ClientOptions {
    ClientOptions::new()
        .with_timeout_disabled()
        .with_connect_timeout(CONNECT_TIMEOUT)
        .with_read_timeout(READ_TIMEOUT)
}

/// A panic elsewhere leaves these maps whole: each is changed by one call.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes clients that count, or gives the one that was made.
#[derive(Debug)]
struct Connector {
    requests: Arc<AtomicU64>,
    made: Option<HttpClient>,
}

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        if let Some(made) = &self.made {
            return Ok(made.clone());
        }
        let client = ReqwestConnector::default().connect(options)?;
        Ok(HttpClient::new(Counted { client, requests: self.requests.clone() }))
    }
}

/// A client that counts requests and leaves the status of each answer in the request's [`Seen`].
#[derive(Debug)]
struct Counted {
    client: HttpClient,
    requests: Arc<AtomicU64>,
}

impl HttpService for Counted {
    fn call<'a, 'b>(
        &'a self,
        request: HttpRequest,
    ) -> Pin<Box<dyn Future<Output = std::result::Result<HttpResponse, HttpError>> + Send + 'b>>
    where
        'a: 'b,
        Self: 'b,
    {
        let seen = request.extensions().get::<Seen>().cloned();
        Box::pin(async move {
            self.requests.fetch_add(1, Ordering::Relaxed);
            let answer = self.client.execute(request).await;
            if let Some(seen) = seen {
                seen.note(answer.as_ref().ok().map(|answer| answer.status().as_u16()));
            }
            answer
        })
    }
}
