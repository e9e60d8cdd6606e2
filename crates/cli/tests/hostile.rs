//! Hostile inputs and the real binary: it refuses them by name, whatever they hold.

// `allow-unwrap-in-tests` knows test functions, not what they share.
#![allow(clippy::unwrap_used)]

use crate::common::Session;
use serde_json::{Value, json};
use std::fs;

/// Numbers at the ends of their types, and the sizes at which sums leave them.
const ODD_NUMBERS: [u64; 6] = [0, 1, 1 << 31, 1 << 53, 1 << 63, u64::MAX];

/// The places of all whole numbers in a document, as JSON pointers.
fn numbers(value: &Value, place: &str, found: &mut Vec<String>) {
    match value {
        Value::Number(number) if number.is_u64() => found.push(place.to_owned()),
        Value::Array(items) => {
            items.iter().enumerate().for_each(|(at, item)| numbers(item, &format!("{place}/{at}"), found));
        }
        Value::Object(fields) => {
            fields.iter().for_each(|(name, field)| numbers(field, &format!("{place}/{name}"), found));
        }
        _ => {}
    }
}

/// What the command said is an answer or an error of ours, never a crash.
fn is_sound(said: &str) -> bool {
    let status = ["status: 0", "status: 1", "status: 2"].iter().any(|status| said.contains(status));
    status && !said.contains("panicked")
}

/// Tests that start hundreds of commands.
mod more {
    use super::*;

    /// Each number of a model profile in turn is one that no machine measures: it is refused, or planned with.
    #[test]
    #[ignore = "`make test-more` runs it"]
    fn no_number_of_a_model_profile_ends_the_plan() {
        let session = Session::planned();
        let path = session.path("demo/model_profile.json");
        let good: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        let mut places = Vec::new();
        numbers(&good, "", &mut places);
        // One place of each name is enough: all modules and points are read alike.
        let mut seen = std::collections::BTreeSet::new();
        let name = |place: &str| {
            place.split('/').filter(|part| part.parse::<u32>().is_err()).collect::<Vec<_>>().join("/")
        };
        places.retain(|place| seen.insert(name(place)));
        assert!(places.len() > 60, "{places:?}");
        let mut num_refused = 0;
        for (index, place) in places.iter().enumerate() {
            // Every number meets the largest and one of the others.
            for number in [u64::MAX, ODD_NUMBERS[index % ODD_NUMBERS.len()]] {
                let mut odd = good.clone();
                *odd.pointer_mut(place).unwrap() = number.into();
                fs::write(&path, odd.to_string()).unwrap();
                let said = session.dflop(&[
                    "plan",
                    "-c",
                    "demo/dflop.yaml",
                    "--only",
                    "colocated=false",
                    "--sampled-batches",
                    "1",
                ]);
                assert!(is_sound(&said), "{place} = {number}: {said}");
                num_refused += usize::from(said.contains("must be at most"));
            }
        }
        assert!(
            num_refused >= places.len() * 2 / 3,
            "{num_refused} of {} refused by a limit",
            2 * places.len()
        );
    }
}

/// All times at their limit at once: sums over microbatches and layers still fit, or are refused.
#[test]
fn a_model_profile_at_its_limits_is_no_crash() {
    let session = Session::planned();
    let path = session.path("demo/model_profile.json");
    let good: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    let mut places = Vec::new();
    numbers(&good, "", &mut places);
    for (ending, number) in [("_ns", 10_u64.pow(13)), ("_bytes", 1 << 50), ("count", 1 << 16)] {
        let mut odd = good.clone();
        for place in places.iter().filter(|place| place.ends_with(ending)) {
            *odd.pointer_mut(place).unwrap() = number.into();
        }
        fs::write(&path, odd.to_string()).unwrap();
        for verb in [&["plan"][..], &["simulate", "--steps", "1"], &["show", "model_profile"]] {
            let said = session.dflop(&[verb, &["-c", "demo/dflop.yaml"]].concat());
            assert!(is_sound(&said), "{ending}: {said}");
        }
    }
}

/// The same of what a run wrote down.
#[test]
fn no_number_of_a_run_ends_the_report() {
    let session = Session::planned();
    let metrics = json!({"step": 0, "arm": "aware", "loss": 1.0, "step_ns": 9, "predicted_ns": 9, "corrected_ns": 9,
        "data_wait_ns": 1, "schedule_wait_ns": 1, "bubble_ratio": 0.5, "pair": 0});
    let trace = json!({"step": 0, "arm": "aware", "makespan_ns": 9, "spans": [[0, "0F0", 0, 9]]});
    let schedule = json!({"step": 0, "arm": "aware", "samples": [0], "schedule": {"step": 0, "llm": [[[0]]],
        "encoder": [[[0]]], "label_tokens": 1, "predicted_makespan_ns": 9, "max_load_ns": 9, "lower_bound_ns": 9}});
    let run = session.path("demo/run");
    fs::create_dir(&run).unwrap();
    let files = [("metrics.jsonl", metrics), ("trace.jsonl", trace), ("schedules.jsonl", schedule)];
    let write = |name: &str, line: &Value| fs::write(run.join(name), format!("{line}\n{line}\n")).unwrap();
    for (name, line) in &files {
        let mut places = Vec::new();
        numbers(line, "", &mut places);
        for place in places {
            for number in ODD_NUMBERS {
                for (name, line) in &files {
                    write(name, line);
                }
                let mut odd = line.clone();
                *odd.pointer_mut(&place).unwrap() = number.into();
                write(name, &odd);
                let said = session.dflop(&["report", "demo"]);
                assert!(is_sound(&said), "{name} {place} = {number}: {said}");
                if number == u64::MAX && place.ends_with("_ns") {
                    let limit = "must be at most 1000000000000000 (eleven days)";
                    assert!(
                        said.contains(&format!("demo/run/{name}` line 1: ")) && said.contains(limit),
                        "{said}"
                    );
                }
            }
        }
    }
}

/// A pipe that nobody writes to, where a file of durations or costs is named: an answer at once.
#[test]
fn pipes_are_not_waited_for() {
    let session = Session::new();
    let made = std::process::Command::new("mkfifo").arg(session.path("pipe")).status().unwrap();
    assert!(made.success());
    for flags in [
        &["simulate", "--durations", "pipe"][..],
        &["schedule", "--costs", "pipe", "--buckets", "2"],
        &["advise", "--step-times", "pipe"],
        &["costs", "pipe", "--model", "qwen2.5-vl-7b", "--hardware", "h100"],
    ] {
        let said = session.dflop(flags);
        assert!(said.contains("status: 2"), "{said}");
        assert!(said.contains("a device, pipe or socket"), "{said}");
    }
}

/// `probe` takes no more frames than it is told, and is told no more than can be read.
#[test]
fn probe_bounds_the_frames_of_a_video() {
    let session = Session::new();
    let video = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/media/made_mpeg4.mov");
    let tokens = |frames: &[&str]| {
        let said =
            session.dflop(&[&["probe", "--family", "llava_onevision", "--json", video], frames].concat());
        assert!(said.contains("status: 0"), "{said}");
        let line = said.lines().find(|line| line.starts_with('{')).unwrap();
        serde_json::from_str::<Value>(line).unwrap()["shape"]["encoder_tokens"].as_u64().unwrap()
    };
    let one = tokens(&["--video-max-frames", "1"]);
    assert_eq!(tokens(&["--video-max-frames", "3"]), 3 * one);
    assert!(tokens(&[]) > 3 * one);
    assert_eq!(tokens(&["--video-max-frames", "65536"]), tokens(&[]));
    for odd in ["0", "65537", "4294967295", "-1", "many"] {
        let given = format!("--video-max-frames={odd}");
        let said = session.dflop(&["probe", "--family", "llava_onevision", video, &given]);
        assert!(said.contains("status: 2") && said.contains("--video-max-frames"), "{said}");
    }
}

/// A URL may carry a password or a signature, a name the bytes that clear a screen: neither reaches people.
#[test]
fn secrets_and_control_characters_are_not_shown() {
    let session = Session::new();
    session.record_model_profile();
    let secret = "5ec12e7";
    let url = format!("http://user:{secret}@127.0.0.1:1/a.jpg?X-Amz-Signature={secret}");
    let good = fs::read_to_string(session.path("demo/data/images.jsonl")).unwrap();
    let odd = [json!(url), json!("\u{1b}[2J\u{202e}gone.jpg")].map(|image| {
        json!({"id": "\u{1b}[31mred", "image": image, "conversations": [{"from": "human", "value": "<image>"},
            {"from": "gpt", "value": "yes"}]})
    });
    fs::write(session.path("demo/data/images.jsonl"), format!("{}\n{}\n{good}", odd[0], odd[1])).unwrap();
    let config = session.path("demo/dflop.yaml");
    let text = fs::read_to_string(&config).unwrap();
    fs::write(&config, text.replace("on_bad_sample: fail", "on_bad_sample: skip")).unwrap();
    let mut said = session.dflop(&["profile", "data", "-c", "demo/dflop.yaml"]);
    for verb in [&["plan"][..], &["show", "data_profile"], &["show", "data_profile", "--json"]] {
        said.push_str(&session.dflop(&[verb, &["-c", "demo/dflop.yaml"]].concat()));
    }
    said.push_str(&session.dflop(&["report", "demo"]));
    said.push_str(&session.dflop(&["profile", "data", "-c", &format!("{url}/dflop.yaml")]));
    fs::write(&config, text.replace("mixture.yaml", &url)).unwrap();
    said.push_str(&session.dflop(&["profile", "data", "-c", "demo/dflop.yaml"]));
    for name in ["demo/data_profile.problems.csv", "demo/report.html"] {
        said.push_str(&fs::read_to_string(session.path(name)).unwrap());
    }
    // The first line of each answer is the command itself, as the test wrote it.
    let said = said.lines().filter(|line| !line.starts_with("$ dflop")).collect::<Vec<_>>().join("\n");
    assert!(!said.contains(secret), "{said}");
    assert!(!said.contains(['\u{1b}', '\u{202e}']), "{said}");
    assert!(said.contains("http://***@127.0.0.1:1/a.jpg?***") && said.contains("\\u{1b}[31mred"), "{said}");
}
