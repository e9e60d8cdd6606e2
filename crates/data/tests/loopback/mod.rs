//! A web server of one process: files from memory, ranges, and the ways in which servers fail.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// How the server answers for a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Manner {
    /// As it should.
    Sound,
    /// `Range` is ignored: 200 and the whole file.
    WithoutRanges,
    /// 403, always.
    Forbidden,
    /// 500 the first time.
    Flaky,
    /// 503, always.
    Down,
    /// Not for half a minute.
    Slow,
    /// Half the bytes that were announced, then the connection closes.
    Cut,
    /// A new tag with each answer.
    Changing,
    /// 405 to HEAD.
    WithoutHead,
    /// Only requests signed as for S3.
    Signed,
    /// 404, and a page of bytes that never ends.
    Endless,
    /// It claims to have five gibibytes, of which the server has the first.
    Vast,
}

/// Bytes that a [`Manner::Vast`] file claims to have.
pub(crate) const VAST_BYTES: u64 = 5 << 30;

#[derive(Default)]
struct State {
    files: BTreeMap<String, (Vec<u8>, Manner)>,
    /// `METHOD /path range`, in order.
    log: Vec<String>,
    /// Bytes of all bodies written.
    sent: u64,
    asked: HashMap<String, u64>,
}

/// The server; its threads end with the process.
pub(crate) struct Server {
    /// `http://127.0.0.1:PORT`.
    pub(crate) url: String,
    state: Arc<Mutex<State>>,
}

impl Server {
    pub(crate) fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let state = Arc::new(Mutex::new(State::default()));
        let shared = state.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let shared = shared.clone();
                std::thread::spawn(move || serve(&stream.unwrap(), &shared));
            }
        });
        Self { url, state }
    }

    /// Puts a file at `/path`; its URL.
    pub(crate) fn put(&self, path: &str, bytes: impl Into<Vec<u8>>, manner: Manner) -> String {
        self.state.lock().unwrap().files.insert(format!("/{path}"), (bytes.into(), manner));
        format!("{}/{path}", self.url)
    }

    /// Requests since the last call, as `METHOD /path range`.
    pub(crate) fn log(&self) -> Vec<String> {
        std::mem::take(&mut self.state.lock().unwrap().log)
    }

    /// Bytes of bodies since the last call.
    pub(crate) fn sent(&self) -> u64 {
        std::mem::take(&mut self.state.lock().unwrap().sent)
    }
}

/// Requests of one connection, one after the other.
fn serve(stream: &TcpStream, state: &Mutex<State>) {
    // Head and body are written apart: without this each answer waits for an acknowledgement.
    stream.set_nodelay(true).unwrap();
    let mut reader = BufReader::new(stream);
    loop {
        let mut lines = Vec::new();
        loop {
            let mut line = String::new();
            if reader.by_ref().take(1 << 16).read_line(&mut line).unwrap_or(0) == 0 {
                return;
            }
            if line.trim().is_empty() {
                break;
            }
            lines.push(line.trim().to_owned());
        }
        if !answer(stream, state, &lines) {
            return;
        }
    }
}

/// Answers one request; whether the connection stays.
fn answer(mut stream: &TcpStream, state: &Mutex<State>, lines: &[String]) -> bool {
    let mut words = lines[0].split(' ');
    let (method, target) = (words.next().unwrap(), words.next().unwrap());
    let header = |name: &str| {
        lines[1..].iter().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            key.eq_ignore_ascii_case(name).then(|| value.trim().to_owned())
        })
    };
    let range = header("range");
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let path = decoded(path);
    let (file, count) = {
        let mut state = state.lock().unwrap();
        let what = range.as_deref().unwrap_or("").trim_start_matches("bytes=");
        state.log.push(format!("{method} {target} {what}").trim_end().to_owned());
        let count = state.asked.entry(path.clone()).or_insert(0);
        *count += 1;
        let count = *count;
        (state.files.get(&path).cloned(), count)
    };
    let mut write = |head: &str, body: &[u8]| {
        let body = if method == "HEAD" { &[] } else { body };
        state.lock().unwrap().sent += body.len() as u64;
        stream
            .write_all(format!("HTTP/1.1 {head}\r\n\r\n").as_bytes())
            .and_then(|()| stream.write_all(body))
            .is_ok()
    };
    let mut refuse = |status: &str, body: &str| {
        write(&format!("{status}\r\nContent-Length: {}", body.len()), body.as_bytes())
    };
    if query.contains("list-type=2") {
        let page = listing(&state.lock().unwrap().files, &path, query);
        return refuse("200 OK", &page);
    }
    let Some((bytes, manner)) = file else {
        return refuse("404 Not Found", "<Error><Code>NoSuchKey</Code></Error>");
    };
    match manner {
        Manner::Forbidden => return refuse("403 Forbidden", "<Error><Code>AccessDenied</Code></Error>"),
        Manner::Signed
            if !header("authorization").is_some_and(|text| text.starts_with("AWS4-HMAC-SHA256")) =>
        {
            return refuse("403 Forbidden", "");
        }
        Manner::Flaky if count == 1 => return refuse("500 Internal Server Error", "not now"),
        Manner::Endless => {
            let page = vec![b'x'; 1 << 16];
            let mut sent = write("404 Not Found", b"");
            while sent {
                sent = write_some(stream, state, &page);
            }
            return false;
        }
        Manner::Down => return refuse("503 Service Unavailable", "a page"),
        Manner::WithoutHead if method == "HEAD" => return refuse("405 Method Not Allowed", ""),
        Manner::Slow => std::thread::sleep(Duration::from_secs(30)),
        _ => {}
    }
    let tag = if manner == Manner::Changing { count } else { 7 };
    let facts = format!("ETag: \"{tag}\"\r\nLast-Modified: Wed, 21 Oct 2015 07:28:00 GMT");
    let asked = range.filter(|_| manner != Manner::WithoutRanges);
    let (status, part) = match asked.as_deref().map(|text| span(text, bytes.len())) {
        None => ("200 OK".to_owned(), &bytes[..]),
        Some(None) => return refuse("416 Range Not Satisfiable", ""),
        Some(Some((start, end))) => (
            format!(
                "206 Partial Content\r\nContent-Range: bytes {start}-{}/{}",
                end - 1,
                if manner == Manner::Vast { VAST_BYTES } else { bytes.len() as u64 }
            ),
            &bytes[start..end],
        ),
    };
    if manner == Manner::Vast && asked.is_none() {
        write(&format!("{status}\r\nContent-Length: {VAST_BYTES}\r\n{facts}"), part);
        return false;
    }
    let is_cut = manner == Manner::Cut && method == "GET";
    let body = if is_cut { &part[..part.len() / 2] } else { part };
    write(&format!("{status}\r\nContent-Length: {}\r\n{facts}", part.len()), body) && !is_cut
}

/// Writes more of a body; whether somebody reads it.
fn write_some(mut stream: &TcpStream, state: &Mutex<State>, bytes: &[u8]) -> bool {
    let is_sent = stream.write_all(bytes).is_ok();
    state.lock().unwrap().sent += if is_sent { bytes.len() as u64 } else { 0 };
    is_sent
}

/// The path without percent escapes.
fn decoded(path: &str) -> String {
    let mut parts = path.split('%');
    let mut text = parts.next().unwrap().to_owned();
    for part in parts {
        text.push(u8::from_str_radix(&part[..2], 16).unwrap() as char);
        text.push_str(&part[2..]);
    }
    text
}

/// First byte and end of `bytes=first-last` in a file of `len` bytes.
fn span(text: &str, len: usize) -> Option<(usize, usize)> {
    let (first, last) = text.strip_prefix("bytes=")?.split_once('-')?;
    let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
    (first < len).then_some((first, len.min(last + 1)))
}

/// A page of `ListObjectsV2`, of two keys at most.
fn listing(files: &BTreeMap<String, (Vec<u8>, Manner)>, bucket: &str, query: &str) -> String {
    let value = |name: &str| {
        let text = query.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='))?;
        Some(text.replace("%2F", "/"))
    };
    let prefix = value("prefix").unwrap_or_default();
    let bucket = format!("{}/", bucket.trim_end_matches('/'));
    let mut found = BTreeSet::new();
    for (path, (bytes, _)) in files {
        let Some(rest) = path.strip_prefix(&bucket).and_then(|key| key.strip_prefix(&prefix)) else {
            continue;
        };
        found.insert(match rest.split_once('/') {
            Some((directory, _)) => (format!("{prefix}{directory}/"), None),
            None => (format!("{prefix}{rest}"), Some(bytes.len())),
        });
    }
    let start: usize = value("continuation-token").map_or(0, |token| token.parse().unwrap());
    let mut page = String::from("<?xml version=\"1.0\" encoding=\"UTF-8\"?><ListBucketResult>");
    for (key, len) in found.iter().skip(start).take(2) {
        let _ = match len {
            None => write!(page, "<CommonPrefixes><Prefix>{key}</Prefix></CommonPrefixes>"),
            Some(len) => write!(
                page,
                "<Contents><Key>{key}</Key><Size>{len}</Size>\
                 <LastModified>2015-10-21T07:28:00.000Z</LastModified><ETag>\"7\"</ETag></Contents>"
            ),
        };
    }
    if start + 2 < found.len() {
        let _ = write!(page, "<NextContinuationToken>{}</NextContinuationToken>", start + 2);
    }
    page + "</ListBucketResult>"
}
