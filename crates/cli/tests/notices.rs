//! What the command says of what is cut short, left out, assumed or repeated: each such notice with its count, of the real
//! binary.

// `allow-unwrap-in-tests` knows test functions, not what they share.
#![allow(clippy::unwrap_used)]

use crate::common::Session;
use crate::from_run::with_run;
use serde_json::json;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const PIPELINES: [&str; 5] = ["plan", "-c", "demo/dflop.yaml", "--only", "colocated=false"];

fn assert_says(said: &str, notice: &str) {
    assert!(said.contains(notice), "no `{notice}` in\n{said}");
}

/// Leaves one sample out: its picture is an empty file.
fn with_a_bad_sample(session: &Session) {
    session.edit("demo/dflop.yaml", |text| text.replace("on_bad_sample: fail", "on_bad_sample: skip"));
    let media = fs::read_dir(session.path("demo/data/media")).unwrap().map(|entry| entry.unwrap().path());
    let mut pictures: Vec<_> =
        media.filter(|path| path.extension().is_some_and(|kind| kind == "jpg")).collect();
    pictures.sort();
    fs::write(&pictures[0], "").unwrap();
    session.profile_data();
}

/// Without a network in the profile nothing is known of transfers and of the reduction of gradients.
#[test]
fn a_profile_without_links_is_told_wherever_it_is_used() {
    let session = Session::measured();
    session.edit("demo/model_profile.json", |text| {
        let mut profile: serde_json::Value = serde_json::from_str(&text).unwrap();
        profile["network"]["links"] = json!([]);
        profile.to_string()
    });
    let shown = session.dflop(&["show", "demo/model_profile.json"]);
    assert_says(
        &shown,
        "note: no link was measured, so transfers count as free; `dflop profile model --network`",
    );
    let planned = session.dflop(&PIPELINES);
    assert_says(&planned, "note: the network was not measured: transfers are taken as free");
    let simulated = session.dflop(&["simulate", "-c", "demo/dflop.yaml"]);
    assert_says(&simulated, "note: the network was not measured: transfers are taken as free");
}

/// Replicas reduce their gradients; a profile that knows point-to-point links alone does not say how long that takes.
#[test]
fn a_reduction_that_was_not_measured_is_told() {
    let session = Session::measured();
    session.edit("demo/model_profile.json", |text| {
        let mut profile: serde_json::Value = serde_json::from_str(&text).unwrap();
        let links = profile["network"]["links"].as_array_mut().unwrap();
        links.retain(|link| link["collective"] == "point_to_point");
        assert!(!links.is_empty());
        profile.to_string()
    });
    let planned = session.dflop(&["plan", "-c", "demo/dflop.yaml", "--only", "colocated=true,zero=1"]);
    let notice = "note: the reduction of the gradients was not measured: its time is assumed";
    assert_says(&planned, notice);
    assert_says(&session.dflop(&["simulate", "-c", "demo/dflop.yaml"]), notice);
}

#[test]
fn bad_samples_have_no_costs_and_stand_in_the_report() {
    let session = Session::new();
    with_a_bad_sample(&session);
    let said = session.dflop(&[
        "costs",
        "demo/data_profile.parquet",
        "--model",
        "qwen2-vl-2b",
        "--hardware",
        "h100",
    ]);
    assert_says(&said, "note: 1 bad sample without a line");
    session.record_model_profile();
    assert_says(&session.dflop(&PIPELINES), "status: 0");
    assert_says(&session.dflop(&["report", "demo"]), "status: 0");
    let page = || fs::read_to_string(session.path("demo/report.html")).unwrap();
    assert_says(&page(), "1 sample could not be read: left out");

    // The data changes under the plan, and becomes a random sample.
    let sampled = ["profile", "data", "-c", "demo/dflop.yaml", "--sample", "24"];
    assert_says(&session.dflop(&sampled), "status: 0");
    assert_says(&session.dflop(&["report", "demo"]), "status: 0");
    for notice in [
        "the plan was made from another data_profile than the one shown: plan and train again",
        "the data profile is of a random sample: `dflop train` refuses it",
    ] {
        assert_says(&page(), notice);
    }
}

/// A run that was stopped in the middle of a line, and whose searches were stopped by the wall limit.
#[test]
fn a_run_that_was_cut_off_is_told() {
    let session = with_run(1.0);
    session
        .edit("demo/run/metrics.jsonl", |text| text.replacen("\"loss\"", "\"was_stopped\":true,\"loss\"", 2));
    session.edit("demo/run/trace.jsonl", |text| text[..text.len() - 40].to_owned());
    let said = session.dflop(&["report", "demo"]);
    assert_says(&said, "warning: `demo/run/trace.jsonl`: its last line is cut short and left out");
    let page = fs::read_to_string(session.path("demo/report.html")).unwrap();
    assert_says(&page, "the search for a schedule was stopped by its wall limit in 2 steps");
    assert_says(&page, "demo/run/trace.jsonl`: its last line is cut short and left out");
}

#[test]
fn an_earlier_profile_that_cannot_be_read_is_told() {
    let session = Session::new();
    session.profile_data();
    fs::write(session.path("demo/data_profile.parquet"), "PAR1 no more").unwrap();
    let said = session.dflop(&["profile", "data", "-c", "demo/dflop.yaml"]);
    assert_says(&said, "warning: every sample is measured, the earlier profile cannot be read: ");
    assert_says(&said, "status: 0");
}

/// Samples that are held out and trained on say nothing about what was learned.
#[test]
fn samples_that_are_held_out_and_trained_on_are_counted() {
    let session = Session::new();
    session.edit("demo/dflop.yaml", |text| {
        format!("{text}\nevaluation:\n  mixture: data/mixture.yaml\n  every: 2\n")
    });
    session.profile_data();
    assert_says(&session.dflop(&["profile", "data", "-c", "demo/dflop.yaml", "--evaluation"]), "status: 0");
    session.record_model_profile();
    assert_says(&session.dflop(&PIPELINES), "status: 0");
    let said = session.dflop(&["train", "-c", "demo/dflop.yaml", "--other-device"]);
    assert_says(
        &said,
        "warning: 48 of 48 samples of `evaluation.mixture` are trained on: their records are the same",
    );
}

/// A sweep may need more samples than there are, sizes that were not measured, and links that nobody knows.
#[test]
fn what_a_sweep_assumes_is_told() {
    let session = Session::measured();
    session.edit("demo/dflop.yaml", |text| {
        text.replace("global_batch_size: 64", "global_batch_size: 16")
            .replace("num_microbatches: 16", "num_microbatches: 8")
    });
    assert_says(&session.dflop(&PIPELINES), "status: 0");
    let simulate = |flags: &[&str]| session.dflop(&[&["simulate", "-c", "demo/dflop.yaml"], flags].concat());
    let repeated = "note: the global batches of some rows need more samples than the data has: there samples";
    let few = simulate(&["--num-ranks", "2"]);
    assert!(few.contains("status: 0") && !few.contains(repeated), "{few}");
    // Ranks that hold both components are not counted twice.
    let is_colocated = simulate(&["--num-ranks", "2", "--json"]).contains("\"placement\":\"colocated\"");
    assert_says(&few, if is_colocated { " colocated 2 " } else { " encoder 1, llm 1 x 1 " });
    for many in [&["--num-ranks", "2,4"][..], &["--set", "cluster.num_ranks=2,8"]] {
        let said = simulate(many);
        assert_says(&said, repeated);
        assert_says(&said, "measured points were lower than at a smaller size");
    }
    session.edit("demo/model_profile.json", |text| {
        let mut profile: serde_json::Value = serde_json::from_str(&text).unwrap();
        profile["network"]["links"] = json!([]);
        profile.to_string()
    });
    assert_says(&session.dflop(&PIPELINES), "status: 0");
    for flags in [&["--num-ranks", "2"][..], &["--set", "cluster.num_ranks=2"]] {
        assert_says(&simulate(flags), "note: the network was not measured: transfers are taken as free");
    }
    let said = simulate(&["--set", "network.cluster_bytes_per_s=1000000000"]);
    assert_says(&said, "has no effect: the model profile knows no such link");
}

/// Who listens beyond this machine is told, and a page that can no longer be made stays with a word about why.
#[test]
fn watching_says_who_can_read_and_when_a_page_is_old() {
    let session = with_run(1.0);
    let mut process = Command::new(env!("CARGO_BIN_EXE_dflop"))
        .args(["report", "demo", "--watch", "--listen", "0.0.0.0:0"])
        .current_dir(session.directory.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let port = line.split("0.0.0.0:").nth(1).and_then(|rest| rest.split('/').next());
    let address: SocketAddr = format!("127.0.0.1:{}", port.unwrap_or_default()).parse().unwrap();
    let get = |target: &str| {
        let mut stream = TcpStream::connect(address).unwrap();
        write!(stream, "GET {target} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    let (before, state) = (get("/"), get("/state"));
    session.edit("demo/run/metrics.jsonl", |text| format!("no JSON\n{text}"));
    // A page that took long to make is served for a while, whatever the files are by then.
    let begun = Instant::now();
    while get("/state") == state && begun.elapsed() < Duration::from_mins(2) {
        std::thread::sleep(Duration::from_millis(20));
    }
    let after = get("/");
    process.kill().unwrap();
    let mut said = String::new();
    process.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    process.wait().unwrap();
    assert!(before == after && before.starts_with("HTTP/1.1 200 OK"), "{after}");
    assert_says(&said, &format!("note: whoever reaches 0.0.0.0:{} can read the report", address.port()));
    assert_says(&said, "note: the page stays as it was: `demo/run/metrics.jsonl` line 1: ");
}
