//! What people see of `dflop schedule`: answers, caps and errors of the real binary.

// `allow-unwrap-in-tests` knows test functions, not what they share.
#![allow(clippy::unwrap_used)]

use std::fmt::Write as _;
use std::fs;
use std::process::{Command, Stdio};
#[cfg(unix)]
use std::{io::Read as _, os::unix::process::ExitStatusExt, thread, time::Duration};

/// A directory with one file of costs in it.
struct Session(tempfile::TempDir);

impl Session {
    fn new(costs: &str) -> Self {
        let session = Self(tempfile::tempdir().unwrap());
        session.write("costs.csv", costs);
        session
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.0.path().join(name), text).unwrap();
    }

    /// The command on `costs.csv`, with further arguments.
    fn command(&self, further: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dflop"));
        command.args(["schedule", "--costs", "costs.csv"]).args(further);
        command.current_dir(self.0.path()).env("COLUMNS", "100");
        command
    }

    /// Status, stdout and stderr, as a person sees them.
    fn said(&self, further: &[&str]) -> String {
        let output = self.command(further).output().unwrap();
        format!(
            "$ dflop schedule --costs costs.csv {}\nstatus: {}\n--- stdout\n{}--- stderr\n{}",
            further.join(" "),
            output.status.code().unwrap_or(-1),
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        )
    }

    /// The answer in JSON, without the time it took.
    fn answer(&self, further: &[&str]) -> serde_json::Value {
        let output = self.command(&[&["--json"], further].concat()).output().unwrap();
        let mut answer: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        answer["elapsed_us"] = 0.into();
        answer
    }
}

/// The snapshot with the times it took masked.
fn snapshot(name: &str, text: &str) {
    insta::with_settings!({
        filters => vec![
            (r"\d[\d,]*(\.\d+)? (s|ms|us)\b", "[TIME]"),
            (r#""elapsed_us":\d+"#, "\"elapsed_us\":[N]"),
        ],
        omit_expression => true,
    }, {
        insta::assert_snapshot!(name, text);
    });
}

/// Costs of both components drawn evenly from 1 to 17.8 ms.
fn drawn(num_samples: usize) -> String {
    let (mut text, mut state) = ("encoder_ns,llm_ns\n".to_owned(), 5_u64);
    for _ in 0..num_samples {
        let mut draw = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            1_000_000 + (state >> 40)
        };
        let _ = writeln!(text, "{},{}", draw(), draw());
    }
    text
}

#[test]
fn balanced() {
    let session = Session::new("encoder_ns,llm_ns\n3,4\n0,5\n7,1\n2,2\n");
    snapshot("balanced", &session.said(&["--buckets", "2"]));
}

#[test]
fn bad_costs() {
    let session = Session::new("encoder_ns,llm_ns\n1,2,3\n-1,4\n5\n");
    snapshot("bad_costs", &session.said(&["--buckets", "2"]));
}

/// A cap on tokens: kept, passed by one sample, certainly too tight for all, without the column, and 0.
#[test]
fn within_tokens() {
    // The sample without a cost would go beside the first but for the cap: both buckets are full with 6 tokens.
    let session = Session::new("encoder_ns,llm_ns,tokens\n0,9,6\n0,5,3\n\n0,4,2\n0,0,1\n");
    let mut text = String::new();
    for cap in ["6", "5", "0"] {
        text.push_str(&session.said(&["--buckets", "2", "--exact", "--bucket-tokens-max", cap]));
        text.push('\n');
    }
    text.push_str(&session.said(&["--buckets", "2", "--json", "--bucket-tokens-max", "6"]));
    // 13 tokens, two buckets of 6; then no column.
    for costs in ["encoder_ns,llm_ns,tokens\n0,9,6\n0,5,5\n0,4,2\n", "encoder_ns,llm_ns\n3,4\n"] {
        session.write("costs.csv", costs);
        text.push('\n');
        text.push_str(&session.said(&["--buckets", "2", "--bucket-tokens-max", "6"]));
    }
    snapshot("within_tokens", &text);
}

/// What `--exact` is for: 32 samples in 8 buckets are proven without it; 50 in 20 keep a gap, and are proven with it, alike
/// each time.
#[test]
fn exact_proves() {
    let session = Session::new(&drawn(32));
    assert_eq!(session.answer(&["--buckets", "8"])["proven_optimal"], true);
    let session = Session::new(&drawn(50));
    let answer = |further: &[&str]| session.answer(&[&["--buckets", "20"], further].concat());
    let (quick, exact) = (answer(&[]), answer(&["--exact"]));
    assert_eq!((&quick["proven_optimal"], &exact["proven_optimal"]), (&false.into(), &true.into()));
    assert!(exact["max_load_ns"].as_u64() <= quick["max_load_ns"].as_u64());
    assert!(exact["lower_bound_ns"].as_u64() >= quick["lower_bound_ns"].as_u64());
    assert_eq!(exact, answer(&["--exact"]));
}

/// Has Ctrl-C end the command that follows: a shell starts what it runs with `&` with the signal ignored, and a child
/// inherits that. Fills its output, so that no answer can be written and the command cannot end before the signal comes.
/// Says so by a byte on stderr. Rust has no safe call for any of it.
#[cfg(unix)]
const WITH_CTRL_C: &str = "
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.set_blocking(1, False)
try:
    while True: os.write(1, b'x' * 512)
except BlockingIOError:
    os.set_blocking(1, True)
os.write(2, b'.')
os.execv(sys.argv[1], sys.argv[1:])";

/// Ctrl-C in the middle of a search with `--exact`: the signal ends it (130 for a shell), and it has written nothing,
/// neither to its output nor beside the costs.
#[cfg(unix)]
#[test]
fn ctrl_c_ends_an_exact_search() {
    const SIGINT: i32 = 2;
    // The bound is not met, and all the work is spent, half a second and more.
    let session = Session::new(&drawn(150));
    let directory = session.0.path();
    let searching = session.command(&["--buckets", "40", "--exact", "--json"]);
    let mut search = Command::new("python3")
        .args(["-c", WITH_CTRL_C])
        .arg(searching.get_program())
        .args(searching.get_args())
        .current_dir(directory)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = [0];
    search.stderr.as_mut().unwrap().read_exact(&mut said).unwrap();
    // On a free machine the search is under way by then.
    thread::sleep(Duration::from_millis(100));
    let pid = search.id().to_string();
    assert!(Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    let ended = search.wait_with_output().unwrap();
    assert_eq!(ended.status.signal(), Some(SIGINT));
    assert_eq!(ended.stderr, b"");
    assert!(ended.stdout.iter().all(|&byte| byte == b'x'));
    let names: Vec<_> = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["costs.csv"]);
}

/// A byte order mark, quotes, CRLF, blank lines and blanks around numbers: what spreadsheets and people write.
#[test]
fn a_table_is_read_as_spreadsheets_write_it() {
    let plain = Session::new("encoder_ns,llm_ns\n3,4\n5,6\n7,1\n");
    let written =
        Session::new("\u{feff}\"encoder_ns\",\"llm_ns\"\r\n\"3\",4\r\n\r\n   \r\n 5 ,6\r\n7,\"1\"\r\n");
    assert_eq!(written.answer(&["--buckets", "2"]), plain.answer(&["--buckets", "2"]));
    // Lines are counted as an editor counts them.
    let said = Session::new("\u{feff}encoder_ns,llm_ns\n\n3,4\n\n5,x\n").said(&["--buckets", "2"]);
    assert!(said.contains("line 5: llm_ns: `x`, must be an integer from 0"), "{said}");
}
