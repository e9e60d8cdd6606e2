//! A data profile of another configuration or other data is told by each command that reads it, before any work.

#![allow(clippy::unwrap_used)]

use crate::common::Session;
use std::fs;

fn planned() -> Session {
    let session = Session::measured();
    let said = session.dflop(&["plan", "-c", "demo/dflop.yaml", "--sampled-batches", "1"]);
    assert!(said.contains("status: 0") && !said.contains("note: the data profile"), "{said}");
    session
}

fn refused(session: &Session, name: &str, why: &str) {
    for verb in [&["plan"][..], &["simulate"], &["train"], &["rehearse"], &["check"], &["profile", "model"]] {
        let said = session.dflop(&[verb, &["-c", "demo/dflop.yaml"]].concat());
        let expected = format!("`demo/data_profile.parquet` was made from another `{name}`: {why}");
        assert!(said.contains("status: 2") && said.contains(&expected), "{said}");
        assert!(said.contains("hint: make it again with `dflop profile data`"), "{said}");
    }
}

#[test]
fn other_settings_of_the_data_are_told() {
    let session = planned();
    session.edit("demo/dflop.yaml", |text| text.replace("video_max_frames: 32", "video_max_frames: 3"));
    refused(&session, "video_max_frames", "32, now 3");
    // What is made again is of today.
    session.profile_data();
    let said = session.dflop(&["plan", "-c", "demo/dflop.yaml", "--sampled-batches", "1"]);
    assert!(said.contains("status: 0"), "{said}");
}

#[test]
fn another_family_is_told() {
    let session = planned();
    session.edit("demo/dflop.yaml", |text| text.replacen("model:\n", "model:\n  family: rules:shape\n", 1));
    refused(&session, "family", "llava_onevision, now rules:shape");
}

#[test]
fn another_chat_template_is_told() {
    let session = planned();
    fs::write(session.path("demo/own.jinja"), "{{ messages }}").unwrap();
    session
        .edit("demo/dflop.yaml", |text| text.replacen("data:\n", "data:\n  chat_template: own.jinja\n", 1));
    refused(&session, "chat_template", "nothing, now sha256:");
}

#[test]
fn other_data_are_told() {
    let session = planned();
    fs::write(session.path("demo/data/more.jsonl"), "").unwrap();
    let mixture = fs::read_to_string(session.path("demo/data/mixture.yaml")).unwrap();
    fs::write(session.path("demo/data/other.yaml"), format!("{mixture}  - json_path: more.jsonl\n")).unwrap();
    session.edit("demo/dflop.yaml", |text| text.replace("mixture.yaml", "other.yaml"));
    let num_sources = mixture.matches("json_path").count();
    refused(&session, "dataset", &format!("{num_sources} sources, now {} sources", num_sources + 1));
    session.edit("demo/dflop.yaml", |text| text.replace("other.yaml", "mixture.yaml"));

    session.edit("demo/data/mixture.yaml", |text| {
        text.replacen("sampling_strategy: all", "sampling_strategy: first:8", 1)
    });
    refused(&session, "mixture", "sha256:");
    fs::write(session.path("demo/data/mixture.yaml"), &mixture).unwrap();

    let text = fs::read_to_string(session.path("demo/data/images.jsonl")).unwrap();
    fs::write(session.path("demo/data/images.jsonl"), format!("{text}\n")).unwrap();
    let bytes = text.len();
    refused(
        &session,
        "dataset",
        &format!("`images.jsonl` of {bytes} bytes, now `images.jsonl` of {} bytes", bytes + 1),
    );
}

/// A profile that was carried to a machine without the data plans there.
#[test]
fn data_that_are_elsewhere_are_no_fault() {
    let session = planned();
    let plan = ["plan", "-c", "demo/dflop.yaml", "--sampled-batches", "1"];
    fs::remove_file(session.path("demo/data/images.jsonl")).unwrap();
    let said = session.dflop(&plan);
    let note = "note: the data profile was not compared with the files of 1 of ";
    assert!(said.contains("status: 0") && said.contains(note), "{said}");
    assert!(said.contains("`demo/data/images.jsonl` is the first"), "{said}");

    fs::remove_dir_all(session.path("demo/data")).unwrap();
    let said = session.dflop(&plan);
    let note = "note: the data profile was not compared with its data: `demo/data/mixture.yaml` is not on this machine";
    assert!(said.contains("status: 0") && said.contains(note), "{said}");
    // The settings are compared all the same.
    session.edit("demo/dflop.yaml", |text| text.replacen("data:\n", "data:\n  video_fps: 1\n", 1));
    refused(&session, "video_fps", "family, now 1");
}

/// The profile that `dflop plan` made itself is made again, unless that were other work than the first time.
#[test]
fn a_profile_that_the_plan_made_is_made_again() {
    let session = Session::new();
    let config = "model: {name: llava-onevision-qwen2-0.5b}\ndata: {mixture: demo/data/mixture.yaml, video_max_frames: 16}\n\
                  cluster: {device: h100, num_ranks: 4}\n";
    fs::write(session.path("dflop.yaml"), config).unwrap();
    let plan = ["plan", "--sampled-batches", "1"];
    let said = session.dflop(&plan);
    assert!(said.contains("status: 0") && said.contains("no data profile yet: measuring"), "{said}");
    session.edit("dflop.yaml", |text| text.replace("max_frames: 16", "max_frames: 4"));
    let said = session.dflop(&plan);
    let note = "the data profile is stale (`video_max_frames` was 16, is 4 now): measuring `./demo/data/mixture.yaml` again";
    assert!(said.contains("status: 0") && said.contains(note), "{said}");
    let said = session.dflop(&plan);
    assert!(said.contains("status: 0") && !said.contains("stale"), "{said}");

    // A random sample is the user's own choice.
    let said = session.dflop(&["profile", "data", "--sample", "20"]);
    assert!(said.contains("status: 0"), "{said}");
    session.edit("dflop.yaml", |text| text.replace("max_frames: 4", "max_frames: 8"));
    let said = session.dflop(&plan);
    assert!(said.contains("status: 2") && said.contains("another `video_max_frames`: 4, now 8"), "{said}");
}
