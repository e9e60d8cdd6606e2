//! `dflop report --watch`: the page of a running job over HTTP, read only.
//!
//! Three answers and no more: `/`, the page; `/state`, which changes when a file of the run does; and `/metrics`, for Prometheus. No path of a request names a
//! file, so none leaves the directory. Who asks under another name than this machine's (a page of the web whose name was made to lead
//! here) is refused.

use super::found::run_dir;
use super::{metrics, page};
use crate::Failure;
use crate::args;
use std::fmt::Write as _;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, UNIX_EPOCH};

/// Bytes of a request, at most.
const REQUEST_MAX: usize = 8 << 10;
/// Requests at once, at most.
const REQUESTS_MAX: usize = 16;
/// A client that says nothing for so long is left.
const PATIENCE: Duration = Duration::from_secs(5);
/// The next page is made after a pause of so many times what this one took.
const REST: u32 = 9;
/// What the page may do: its own styles and scripts, and ask this server.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
/// Asks now and then whether there is news, and then shows it at the same place.
const FOLLOW: &str = include_str!("watch.js");

/// Serves until the process ends.
pub(in crate::commands) fn run(arguments: &args::Report) -> Result<(), Failure> {
    let address = arguments.listen;
    let listener = TcpListener::bind(address).map_err(|error| {
        let hint = match error.kind() {
            ErrorKind::AddrInUse => Some("choose another port, as in `--listen 127.0.0.1:0`".to_owned()),
            _ => Some("name an address of this machine, as in `--listen 127.0.0.1:8765`".to_owned()),
        };
        Failure::new(format!("cannot listen at {address}: {error}"), hint)
    })?;
    let bound = listener.local_addr().unwrap_or(address);
    let watched = Watched { arguments, bound, last: Mutex::default() };
    if !bound.ip().is_loopback() {
        talk!("note: whoever reaches {bound} can read the report");
    }
    outln!("watching {} at http://{bound}/ (Ctrl-C ends)", arguments.dir.display());
    let num_open = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for stream in listener.incoming() {
            // Of a client that has gone there is nothing to say.
            let Ok(stream) = stream else { continue };
            if num_open.fetch_add(1, Ordering::SeqCst) >= REQUESTS_MAX {
                num_open.fetch_sub(1, Ordering::SeqCst);
                continue;
            }
            let (watched, num_open) = (&watched, &num_open);
            scope.spawn(move || {
                let _ = watched.answer(stream);
                num_open.fetch_sub(1, Ordering::SeqCst);
            });
        }
    });
    Ok(())
}

/// A directory, and the page of it that was made last.
struct Watched<'a> {
    arguments: &'a args::Report,
    bound: SocketAddr,
    last: Mutex<Option<Made>>,
}

/// A page that was made.
struct Made {
    /// Of the files, when it was begun.
    state: String,
    page: String,
    /// When it was done, and how long it took.
    done: Instant,
    took: Duration,
}

impl Made {
    /// Whether it is served for now, whatever the files are by now: the page of a long run takes seconds, and beside the run that it
    /// follows it shall take no more than a tenth of a core.
    fn is_fresh(&self) -> bool {
        self.done.elapsed() < self.took * REST
    }
}

/// An answer: its status, what it is, and the text.
struct Answer(&'static str, &'static str, String);

const TEXT: &str = "text/plain; charset=utf-8";

impl Watched<'_> {
    fn answer(&self, mut stream: TcpStream) -> std::io::Result<()> {
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let request = read_request(&mut stream)?;
        let Answer(status, kind, text) = self.of(&request);
        let allow = if status.starts_with("405") { "Allow: GET, HEAD\r\n" } else { "" };
        let head = format!(
            "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n{allow}Cache-Control: no-store\r\n\
             X-Content-Type-Options: nosniff\r\nReferrer-Policy: no-referrer\r\nContent-Security-Policy: {POLICY}\r\n\
             Connection: close\r\n\r\n",
            text.len()
        );
        stream.write_all(head.as_bytes())?;
        if !request.starts_with("HEAD ") {
            stream.write_all(text.as_bytes())?;
        }
        stream.flush()?;
        // What is left unread would reset the connection, and with it the answer.
        stream.shutdown(std::net::Shutdown::Write)?;
        let _ = std::io::copy(&mut stream.take(REQUEST_MAX as u64 * 8), &mut std::io::sink());
        Ok(())
    }

    fn of(&self, request: &str) -> Answer {
        let plain = |status, text: &str| Answer(status, TEXT, format!("{text}\n"));
        let mut words = request.lines().next().unwrap_or_default().split(' ');
        let (Some(method), Some(target), Some(version), None) =
            (words.next(), words.next(), words.next(), words.next())
        else {
            return plain("400 Bad Request", "no request");
        };
        if !version.starts_with("HTTP/1.") {
            return plain("505 HTTP Version Not Supported", "HTTP/1 only");
        }
        if method != "GET" && method != "HEAD" {
            return plain("405 Method Not Allowed", "read only");
        }
        let host = request.lines().skip(1).find_map(|line| {
            let (name, value) = line.split_once(':')?;
            name.eq_ignore_ascii_case("host").then(|| value.trim())
        });
        if !self.is_ours(host) {
            return plain("403 Forbidden", "not the name of this machine");
        }
        match target.split('?').next() {
            Some("/") => self.page(),
            Some("/state") => plain("200 OK", &self.state_to_show()),
            Some("/metrics") => match metrics::text(self.arguments) {
                Ok(text) => Answer("200 OK", metrics::KIND, text),
                Err(failure) => plain("503 Service Unavailable", &failure.message),
            },
            _ => plain("404 Not Found", "there is only / and /metrics"),
        }
    }

    /// Whether a client asks for this machine by a name that leads here; of an address that others reach, any name does.
    fn is_ours(&self, host: Option<&str>) -> bool {
        if !self.bound.ip().is_loopback() {
            return true;
        }
        let Some(host) = host else { return false };
        let name = host.rsplit_once(':').map_or(host, |(name, port)| {
            // The colons of a bare IPv6 address are no port.
            if port.bytes().all(|b| b.is_ascii_digit()) { name } else { host }
        });
        let name = name.trim_start_matches('[').trim_end_matches(']');
        name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
    }

    /// Length and time of change of each file that the page is made of.
    fn state(&self) -> String {
        let dir = &self.arguments.dir;
        let run = run_dir(dir, self.arguments.run.as_deref());
        let of_dir = ["data_profile.parquet", "model_profile.json", "plan.json", "dflop.yaml"];
        let of_run = ["metrics.jsonl", "trace.jsonl", "schedules.jsonl", "events.jsonl", "evaluations.jsonl"];
        let paths = of_dir.map(|name| dir.join(name)).into_iter().chain(of_run.map(|name| run.join(name)));
        let mut state = String::new();
        for path in paths {
            let found = std::fs::metadata(path).ok().map(|file| {
                let changed = file.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
                (file.len(), changed.map_or(0, |time| time.as_nanos()))
            });
            let _ = match found {
                Some((num_bytes, ns)) => write!(state, "{num_bytes}.{ns} "),
                None => write!(state, "- "),
            };
        }
        state
    }

    /// The state of what would be served now: a page asks for it to learn whether there is another.
    fn state_to_show(&self) -> String {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        match last.as_ref().filter(|last| last.is_fresh()) {
            Some(last) => last.state.clone(),
            None => self.state(),
        }
    }

    fn page(&self) -> Answer {
        // Held while the page is made: who asks meanwhile gets the same one.
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let (state, start) = (self.state(), Instant::now());
        if last.as_ref().is_none_or(|last| last.state != state && !last.is_fresh()) {
            match page(self.arguments) {
                Ok(page) => {
                    let script = format!("<script data-state=\"{state}\">{FOLLOW}</script></body>");
                    let page = page.replacen("</body>", &script, 1);
                    *last = Some(Made { state, page, done: Instant::now(), took: start.elapsed() });
                }
                // A file may be half written: what was shown before stays until it is whole.
                Err(failure) if last.is_none() => {
                    return Answer("503 Service Unavailable", TEXT, format!("{}\n", failure.message));
                }
                Err(failure) => talk!("note: the page stays as it was: {}", failure.message),
            }
        }
        let page = last.as_ref().map(|last| last.page.clone()).unwrap_or_default();
        Answer("200 OK", "text/html; charset=utf-8", page)
    }
}

/// The head of a request; what is longer than [`REQUEST_MAX`] is cut, and then is none.
fn read_request(stream: &mut TcpStream) -> std::io::Result<String> {
    let mut bytes = Vec::new();
    let mut buffer = [0; 1024];
    while bytes.len() < REQUEST_MAX && !bytes.windows(4).any(|four| four == b"\r\n\r\n") {
        let count = stream.read(&mut buffer)?;
        if count == 0 {
            break;
        }
        bytes.extend_from_slice(&buffer[..count]);
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A page that took an hour is served for nine; one that took no time is made anew for each change.
    #[test]
    fn a_page_rests_by_the_time_that_it_took() {
        let of = |took| Made { state: String::new(), page: String::new(), done: Instant::now(), took };
        assert!(of(Duration::from_hours(1)).is_fresh());
        assert!(!of(Duration::ZERO).is_fresh());
    }
}
