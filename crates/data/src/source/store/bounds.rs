//! Bounds on what a server sends: bytes of an answer that holds no object, and the rate below which an object is given up.

use futures_util::{Stream, StreamExt as _};
use object_store::client::{HttpError, HttpErrorKind, HttpResponse};
use std::fmt;
use std::io::{Error, ErrorKind};
use std::time::Duration;
use tokio::time::Instant;

/// Bytes read of an answer that is an error: its first lines say what is wrong.
const ERROR_BYTES_MAX: usize = 64 << 10;
/// Bytes of one page of a list, at most: stores put a thousand names on a page.
const PAGE_BYTES_MAX: usize = 64 << 20;
/// The lowest rate at which an answer may come.
pub(super) const PACE: Pace = Pace { window: Duration::from_secs(30), bytes_min: 32 << 10 };

/// The fewest bytes that must come in each window of time, until the answer ends.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pace {
    window: Duration,
    bytes_min: usize,
}

/// Parts of an answer as they come, held to a pace.
pub(super) struct Paced<S> {
    chunks: S,
    pace: Pace,
    /// When the window under way began, and the bytes that came in it.
    window: (Instant, usize),
}

/// The server sends too slowly.
#[derive(Debug)]
pub(super) struct TooSlow {
    pace: Pace,
    bytes: usize,
}

impl fmt::Display for TooSlow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Pace { window, bytes_min } = self.pace;
        write!(
            f,
            "the server is too slow: {} bytes in {} s, must be at least {bytes_min}",
            self.bytes,
            window.as_secs_f64()
        )
    }
}

impl std::error::Error for TooSlow {}

impl<S: Stream + Unpin> Paced<S>
where
    S::Item: Chunk,
{
    pub(super) fn new(chunks: S, pace: Pace) -> Self {
        Self { chunks, pace, window: (Instant::now(), 0) }
    }

    /// The next chunk, `None` at the end.
    ///
    /// # Errors
    /// [`TooSlow`] where a window ends with too few bytes.
    pub(super) async fn next(&mut self) -> Result<Option<S::Item>, TooSlow> {
        loop {
            let (begin, bytes) = self.window;
            // Giving up a wait for the next chunk loses no chunk.
            match tokio::time::timeout_at(begin + self.pace.window, self.chunks.next()).await {
                Ok(chunk) => {
                    self.window.1 += chunk.as_ref().map_or(0, Chunk::num_bytes);
                    return Ok(chunk);
                }
                Err(_) if bytes < self.pace.bytes_min => return Err(TooSlow { pace: self.pace, bytes }),
                Err(_) => self.window = (Instant::now(), 0),
            }
        }
    }
}

/// A chunk of an answer, or why there is none.
pub(super) trait Chunk {
    fn num_bytes(&self) -> usize;
}

impl<E> Chunk for Result<bytes::Bytes, E> {
    fn num_bytes(&self) -> usize {
        self.as_ref().map_or(0, bytes::Bytes::len)
    }
}

/// The answer with its body read: of an error the first bytes, of anything else all of it.
///
/// For answers that a client reads as a whole, which it does whatever their length.
///
/// # Errors
/// Where a body that is no error is too long or too slow.
pub(super) async fn read(answer: HttpResponse) -> Result<HttpResponse, HttpError> {
    let is_error = !answer.status().is_success();
    let bytes_max = if is_error { ERROR_BYTES_MAX } else { PAGE_BYTES_MAX };
    let (head, body) = answer.into_parts();
    let mut chunks = Paced::new(body.bytes_stream(), PACE);
    let mut bytes = Vec::new();
    loop {
        match chunks.next().await {
            Ok(None) => break,
            Ok(Some(Ok(chunk))) => {
                bytes.extend_from_slice(&chunk[..chunk.len().min(bytes_max + 1 - bytes.len())]);
            }
            // The status says enough.
            Ok(Some(Err(_))) | Err(_) if is_error => break,
            Ok(Some(Err(error))) => return Err(error),
            Err(slow) => return Err(HttpError::new(HttpErrorKind::Unknown, slow)),
        }
        if bytes.len() > bytes_max {
            if is_error {
                break;
            }
            let cause = format!("a list has more than {bytes_max} bytes a page, must have at most that");
            return Err(HttpError::new(HttpErrorKind::Decode, Error::new(ErrorKind::InvalidData, cause)));
        }
    }
    Ok(HttpResponse::from_parts(head, bytes.into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use futures_util::stream;

    /// Parts of so many bytes without an end, each after a pause.
    fn endless(num_bytes: usize, pause: Duration) -> impl Stream<Item = Result<Bytes, Error>> + Unpin {
        Box::pin(stream::unfold((), move |()| async move {
            if !pause.is_zero() {
                tokio::time::sleep(pause).await;
            }
            Some((Ok(Bytes::from(vec![b'x'; num_bytes])), ()))
        }))
    }

    fn wait<T>(work: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_time()
            .build()
            .unwrap()
            .block_on(work)
    }

    const SHORT: Pace = Pace { window: Duration::from_millis(40), bytes_min: 1000 };

    /// A byte now and then keeps a connection alive for ever.
    #[test]
    fn a_server_that_dribbles_is_given_up() {
        let slow = wait(async {
            let mut chunks = Paced::new(endless(1, Duration::from_millis(2)), SHORT);
            loop {
                match chunks.next().await {
                    Ok(chunk) => assert!(chunk.is_some()),
                    Err(slow) => break slow.to_string(),
                }
            }
        });
        assert!(
            slow.starts_with("the server is too slow: ")
                && slow.ends_with(" bytes in 0.04 s, must be at least 1000"),
            "{slow}"
        );
    }

    #[test]
    fn a_short_answer_and_a_steady_one_are_read_to_their_end() {
        wait(async {
            let mut short = Paced::new(Box::pin(endless(1, Duration::ZERO).take(3)), SHORT);
            for _ in 0..3 {
                assert!(short.next().await.unwrap().is_some());
            }
            assert!(short.next().await.unwrap().is_none());
            // Many windows, one after the other, with enough in each: here nothing is enough.
            let patient = Pace { window: Duration::from_millis(1), bytes_min: 0 };
            let mut steady = Paced::new(Box::pin(endless(1, Duration::from_millis(3)).take(9)), patient);
            let mut num_parts = 0;
            while steady.next().await.unwrap().is_some() {
                num_parts += 1;
            }
            assert_eq!(num_parts, 9);
        });
    }
}
