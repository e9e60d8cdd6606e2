//! `dflop report --watch` over real sockets.

use crate::common::Session;
use crate::from_run::with_run;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A server that ends with the test.
pub(crate) struct Server {
    process: Child,
    pub(crate) address: SocketAddr,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Server {
    pub(crate) fn of(session: &Session) -> Self {
        let mut process = Command::new(env!("CARGO_BIN_EXE_dflop"))
            .args(["report", "demo", "--watch", "--listen", "127.0.0.1:0"])
            .current_dir(session.directory.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut said = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut said).unwrap();
        let address = said.split("http://").nth(1).and_then(|rest| rest.split('/').next());
        let address = address.unwrap_or_else(|| panic!("{said}")).parse().unwrap();
        Self { process, address }
    }

    /// The whole answer to a request, sent as it stands.
    fn raw(&self, request: &[u8]) -> String {
        let mut stream = TcpStream::connect(self.address).unwrap();
        stream.write_all(request).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    /// Waits until there is another page: one that took long to make is served for a while, whatever the files are by then.
    fn changed_from(&self, state: &str) -> String {
        let begun = Instant::now();
        loop {
            let now = self.get("/state");
            if now != state {
                return now;
            }
            assert!(begun.elapsed() < Duration::from_mins(2), "the state stays");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn get(&self, target: &str) -> String {
        self.raw(format!("GET {target} HTTP/1.1\r\nHost: {}\r\n\r\n", self.address).as_bytes())
    }
}

#[test]
fn the_page_of_a_run_is_served_and_follows_it() {
    let session = with_run(1.0);
    let whole = fs::read_to_string(session.path("demo/run/trace.jsonl")).unwrap();
    // The job has ended eleven steps and writes the twelfth.
    let cut = &whole[..whole.len() - 40];
    fs::write(session.path("demo/run/trace.jsonl"), cut).unwrap();
    let server = Server::of(&session);
    let page = server.get("/");
    assert!(page.starts_with("HTTP/1.1 200 OK\r\n") && page.contains("text/html"), "{}", &page[..200]);
    let steps = |page: &str| page.matches("{\"step\":").count();
    assert_eq!(steps(&page), 11);
    let state = server.get("/state");
    assert_eq!(state, server.get("/state"), "nothing has changed");
    fs::write(session.path("demo/run/trace.jsonl"), &whole).unwrap();
    server.changed_from(&state);
    assert_eq!(steps(&server.get("/")), 12);
    // What cannot be read leaves what was there.
    let state = server.get("/state");
    fs::write(session.path("demo/run/trace.jsonl"), "no JSON\n").unwrap();
    server.changed_from(&state);
    assert_eq!(steps(&server.get("/")), 12);
    assert!(!session.path("demo/report.html").exists(), "a watch writes nothing");
}

/// The rules of the text format, version 0.0.4: each family once, with its help and its type before its samples; names end by
/// their kind and unit; a sample is a name, labels, a number.
#[test]
fn metrics_are_what_prometheus_reads() {
    let session = with_run(1.0);
    let alarm = json!({"step": 3, "kind": "alarm", "cause": "rank", "size": 0.3, "words": "rank 1 is slow"});
    let decision = json!({"step": 3, "kind": "correction", "words": "on"});
    fs::write(session.path("demo/run/events.jsonl"), format!("{alarm}\n{decision}\n{alarm}\n")).unwrap();
    session.edit("demo/run/metrics.jsonl", |text| {
        let whole = |line: &str| {
            let mut line: Value = serde_json::from_str(line).unwrap();
            line["idle_ns"] =
                json!({"ramp": 500_000_000, "imbalance": 250_000_000, "transfer": 0, "data_wait": 1});
            (line["tokens"], line["samples"]) = (json!(1_000), json!(64));
            format!("{line}\n")
        };
        text.lines().map(whole).collect()
    });
    let server = Server::of(&session);
    let answer = server.get("/metrics");
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.contains("Content-Type: text/plain; version=0.0.4; charset=utf-8"), "{head}");
    let (mut types, mut helped, mut values) = (BTreeMap::new(), BTreeSet::new(), BTreeMap::new());
    assert!(body.ends_with('\n') && body.is_ascii(), "{body}");
    for line in body.lines() {
        if let Some(help) = line.strip_prefix("# HELP ") {
            let (name, words) = help.split_once(' ').unwrap();
            assert!(helped.insert(name) && words.ends_with('.'), "{line}");
        } else if let Some(kind) = line.strip_prefix("# TYPE ") {
            let (name, kind) = kind.split_once(' ').unwrap();
            assert!(helped.contains(name) && types.insert(name, kind).is_none(), "{line}");
            let is_name = |c: char| c.is_ascii_lowercase() || c == '_';
            assert!(name.starts_with("dflop_") && name.chars().all(is_name), "{name}");
            assert_eq!(name.ends_with("_total"), kind == "counter", "{name}");
            assert!(!name.ends_with("_ns") && !name.ends_with("_ms"), "{name}: base units only");
        } else {
            let (sample, value) = line.rsplit_once(' ').unwrap();
            let name = sample.split('{').next().unwrap();
            assert!(types.contains_key(name), "{line}: no type before it");
            let labels = &sample[name.len()..];
            assert!(
                labels.is_empty() || (labels.starts_with("{cause=\"") && labels.ends_with("\"}")),
                "{line}"
            );
            assert!(values.insert(sample, value.parse::<f64>().unwrap()).is_none(), "{line}: twice");
        }
    }
    // By hand, of twelve steps.
    let last: Value = serde_json::from_str(
        fs::read_to_string(session.path("demo/run/metrics.jsonl")).unwrap().lines().last().unwrap(),
    )
    .unwrap();
    let seconds = last["step_ns"].as_f64().unwrap() / 1e9;
    for (name, value) in [
        ("dflop_step", 11.0),
        ("dflop_is_rehearsed", 0.0),
        ("dflop_steps_total", 12.0),
        ("dflop_step_duration_seconds", seconds),
        ("dflop_step_predicted_seconds", last["predicted_ns"].as_f64().unwrap() / 1e9),
        ("dflop_idle_ratio", 0.5),
        ("dflop_idle_seconds_total{cause=\"ramp\"}", 6.0),
        ("dflop_idle_seconds_total{cause=\"imbalance\"}", 3.0),
        ("dflop_tokens_total", 12_000.0),
        ("dflop_samples_total", 768.0),
        ("dflop_tokens_per_second", 1_000.0 / seconds),
        ("dflop_loss", 1.0),
        ("dflop_alarms_total{cause=\"rank\"}", 2.0),
        ("dflop_alarms_total{cause=\"data\"}", 0.0),
    ] {
        let found = values.get(name).unwrap_or_else(|| panic!("no {name}: {body}"));
        assert!((found - value).abs() <= 1e-9 * value.abs(), "{name}: {found}, {value}");
    }
    assert!(!body.contains("corrected"), "what the run does not say is no number");
    session.rehearse_the_run();
    let rehearsed = server.get("/metrics");
    assert!(rehearsed.contains("\ndflop_is_rehearsed 1\n"), "{rehearsed}");
    // A scraper asks at any time: before the first step there is nothing to say, and nothing is wrong.
    fs::write(session.path("demo/run/metrics.jsonl"), "").unwrap();
    assert!(
        server.get("/metrics").starts_with("HTTP/1.1 200 OK") && server.get("/metrics").ends_with("\r\n\r\n")
    );
}

/// No path of a request is one of the disk, nothing is written, and only who asks for this machine is answered.
#[test]
fn nothing_else_is_served() {
    let session = with_run(1.0);
    let server = Server::of(&session);
    let host = server.address;
    for target in [
        "/plan.json",
        "/../dflop.yaml",
        "/..%2f..%2fetc/passwd",
        "//etc/passwd",
        "/run/metrics.jsonl",
        "/state/..",
        "file:///etc/passwd",
        "*",
        "http://127.0.0.1/plan.json",
        "/\\..\\",
    ] {
        let answer = server.get(target);
        assert!(answer.starts_with("HTTP/1.1 404 "), "{target}: {answer}");
        assert!(answer.ends_with("there is only / and /metrics\n"), "{target}: {answer}");
    }
    for method in ["POST", "PUT", "DELETE", "OPTIONS", "CONNECT", "get"] {
        let answer = server.raw(format!("{method} / HTTP/1.1\r\nHost: {host}\r\n\r\n").as_bytes());
        assert!(answer.starts_with("HTTP/1.1 405 ") && answer.contains("Allow: GET, HEAD\r\n"), "{answer}");
    }
    for name in
        ["Host: evil.example\r\n", "Host: evil.example:80\r\n", "Host: 127.0.0.1.evil.example\r\n", ""]
    {
        let answer = server.raw(format!("GET / HTTP/1.1\r\n{name}\r\n").as_bytes());
        assert!(answer.starts_with("HTTP/1.1 403 "), "{name}: {answer}");
    }
    for name in ["localhost", "localhost:9", "[::1]:9", "127.0.0.1"] {
        let answer = server.raw(format!("GET /state HTTP/1.1\r\nhost: {name}\r\n\r\n").as_bytes());
        assert!(answer.starts_with("HTTP/1.1 200 "), "{name}: {answer}");
    }
    let head = server.raw(format!("HEAD / HTTP/1.1\r\nHost: {host}\r\n\r\n").as_bytes());
    assert!(head.starts_with("HTTP/1.1 200 ") && head.ends_with("\r\n\r\n"), "{head}");
    assert!(head.contains("Content-Security-Policy: default-src 'none';"), "{head}");
    let long = vec![b'a'; 20_000];
    for broken in [&b""[..], b"\r\n\r\n", b"GET\r\n\r\n", b"\xff\xfe\r\n\r\n", &long] {
        let answer = server.raw(broken);
        assert!(answer.starts_with("HTTP/1.1 400 "), "{answer}");
    }
    // It still stands.
    assert!(server.get("/").starts_with("HTTP/1.1 200 "));
    let said = session.dflop(&["report", "demo", "--watch", "--listen", &host.to_string()]);
    assert!(said.contains("status: 2") && said.contains("hint: choose another port"), "{said}");
}
