//! `dflop report --watch` over real sockets.

use crate::common::Session;
use crate::from_run::with_run;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};

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
    assert_ne!(state, server.get("/state"));
    assert_eq!(steps(&server.get("/")), 12);
    // What cannot be read leaves what was there.
    fs::write(session.path("demo/run/trace.jsonl"), "no JSON\n").unwrap();
    assert_eq!(steps(&server.get("/")), 12);
    assert!(!session.path("demo/report.html").exists(), "a watch writes nothing");
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
        assert!(answer.ends_with("there is only /\n"), "{target}: {answer}");
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
