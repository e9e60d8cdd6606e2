//! Clients of remote stores: made once and kept, requests counted.

use super::bounds;
use super::fault::{self, Seen};
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpRequest, HttpResponse, HttpService, ReqwestConnector,
};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::http::HttpBuilder;
use object_store::path::Path;
use object_store::{BackoffConfig, ClientConfigKey, ClientOptions, ObjectStore, RetryConfig};
use std::collections::HashMap;
use std::future::Future;
use std::io::{Error, ErrorKind, Result};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Tries of a request beyond the first, where the server is overloaded or the connection breaks.
const RETRIES: usize = 4;
/// No further try later than this after the first.
const RETRY_TIMEOUT: Duration = Duration::from_mins(1);
/// The first pause before another try; each is longer, with jitter.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));
/// Until a connection stands.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Between two parts of an answer; a long answer may take long.
const READ_TIMEOUT: Duration = Duration::from_secs(30);
/// An object and the client that reaches it.
#[derive(Debug, Clone)]
pub(super) struct Object {
    pub(super) client: Arc<dyn ObjectStore>,
    pub(super) path: Path,
    pub(super) url: String,
}

impl Object {
    pub(super) fn is_web(&self) -> bool {
        self.url.starts_with("http")
    }

    /// A bucket alone would answer with its list.
    pub(super) fn check(&self) -> Result<()> {
        if self.is_web() || self.path != Path::ROOT {
            return Ok(());
        }
        Err(Error::new(ErrorKind::InvalidInput, "it names a bucket, must name an object in it"))
    }
}

/// The clients, by what they reach.
#[derive(Default)]
pub(super) struct Clients {
    options: Vec<(String, String)>,
    requests: Arc<AtomicU64>,
    /// One a bucket, by `scheme://bucket`.
    buckets: Mutex<HashMap<String, Arc<dyn ObjectStore>>>,
    /// One for every host: it keeps connections by host.
    web: Mutex<Option<HttpClient>>,
}

impl Clients {
    pub(super) fn new(options: Vec<(String, String)>) -> Self {
        Self { options, ..Self::default() }
    }

    /// Requests sent, each try counted.
    pub(super) fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
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
        let mut made = lock(&self.web);
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

/// A panic elsewhere leaves what it guards whole: each is changed by one call.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
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
        // An error here means that another part of this process has already chosen a TLS provider, which serves as well.
        drop(rustls::crypto::ring::default_provider().install_default());
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
            if let Some(seen) = &seen {
                seen.note(answer.as_ref().ok().map(|answer| answer.status().as_u16()));
            }
            // Objects, which alone have a `Seen`, are read part by part elsewhere; all else is read as a whole.
            let answer = answer?;
            let is_object = seen.is_some() && answer.status().is_success();
            if is_object { Ok(answer) } else { bounds::read(answer).await }
        })
    }
}
