//! What went wrong with a remote object, in words: status, cause, and what to set.

use std::io::{Error, ErrorKind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// What became of a request: how often it was sent, and the status of the last answer.
#[derive(Debug, Clone, Default)]
pub(super) struct Seen(Arc<State>);

#[derive(Debug, Default)]
struct State {
    tries: AtomicU32,
    /// 0 where there was no answer.
    status: AtomicU32,
}

impl Seen {
    pub(super) fn note(&self, status: Option<u16>) {
        self.0.tries.fetch_add(1, Ordering::Relaxed);
        self.0.status.store(status.map_or(0, u32::from), Ordering::Relaxed);
    }

    /// Status of the last answer.
    pub(super) fn status(&self) -> Option<u32> {
        Some(self.0.status.load(Ordering::Relaxed)).filter(|&status| status != 0)
    }

    fn tries(&self) -> u32 {
        self.0.tries.load(Ordering::Relaxed)
    }
}

/// The error of the system that stands for an error of the store.
pub(super) fn explain(url: &str, error: &object_store::Error, seen: &Seen) -> Error {
    use object_store::Error as Store;
    let status = seen.status().filter(|status| *status >= 300).or(match error {
        Store::NotFound { .. } => Some(404),
        Store::PermissionDenied { .. } => Some(403),
        Store::Unauthenticated { .. } => Some(401),
        _ => None,
    });
    let root = root(error);
    let code = between(&root, "<Code>", "</Code>").map_or_else(String::new, |code| format!(" ({code})"));
    let (kind, cause) = match status {
        Some(404) => (ErrorKind::NotFound, format!("404{code}: there is no such object")),
        Some(status @ (401 | 403)) => {
            (ErrorKind::PermissionDenied, format!("{status}{code}: access is refused{}", credentials(url)))
        }
        Some(status @ (301 | 302 | 307 | 308)) => (
            ErrorKind::Other,
            format!("{status}{code}: it is elsewhere; of an S3 bucket, check the store option `aws_region`"),
        ),
        Some(status) => (ErrorKind::Other, format!("{status}{code}{}", tries(seen))),
        None if root.contains("URL scheme is not allowed") => (
            ErrorKind::InvalidInput,
            "its address is plain http: set the store option `allow_http` to `true` (`DFLOP_STORE_ALLOW_HTTP=true`), or use https".to_owned(),
        ),
        // The client asks for the rest of an answer that broke off.
        None if root.contains("Range request not supported") => (
            ErrorKind::Other,
            format!("the answer broke off, and the server gives no ranges, by which its rest could be had{}", tries(seen)),
        ),
        // It was never sent: something before it failed.
        None if seen.tries() == 0 && is_bucket(url) => {
            (ErrorKind::PermissionDenied, format!("{root}{}", credentials(url)))
        }
        None => (ErrorKind::Other, format!("{root}{}", tries(seen))),
    };
    Error::new(kind, cause)
}

/// The error of the system that stands for options that make no client.
#[expect(clippy::needless_pass_by_value, reason = "for `map_err`")]
pub(super) fn settings(error: object_store::Error) -> Error {
    Error::new(ErrorKind::InvalidInput, format!("the store options make no client: {}", root(&error)))
}

fn is_bucket(url: &str) -> bool {
    url.starts_with("s3://") || url.starts_with("gs://")
}

fn tries(seen: &Seen) -> String {
    match seen.tries() {
        0 | 1 => String::new(),
        tries => format!(", after {tries} tries"),
    }
}

/// What to set where access is refused.
fn credentials(url: &str) -> &'static str {
    if url.starts_with("s3://") {
        "; set the store options `aws_access_key_id`, `aws_secret_access_key` and `aws_region`, or \
         `aws_skip_signature` for a public bucket"
    } else if url.starts_with("gs://") {
        "; set the store option `google_service_account`, or `google_skip_signature` for a public bucket"
    } else {
        ""
    }
}

/// The innermost cause: those around it say what we say ourselves, and how long it took.
fn root(error: &object_store::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    // Some put a whole page into it.
    let text: String = cause.to_string().chars().take(400).collect();
    text.replace('\n', " ")
}

fn between<'a>(text: &'a str, start: &str, end: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(start)?;
    rest.split_once(end).map(|(inner, _)| inner)
}
