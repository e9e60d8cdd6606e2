//! What a profile does that a person may not expect is told: samples that are missing, silent or long.

#![allow(clippy::unwrap_used, reason = "a test may give up, its helpers too")]

use dflop_data::demo;
use dflop_data::profile::{ProfileSettings, profile};

/// Fewer samples than asked for, one that nobody answers, two longer than the model's positions: a sentence each.
#[test]
fn samples_that_are_missing_silent_or_long_are_told() {
    let dir = tempfile::tempdir().unwrap();
    demo::write(dir.path(), 0, 1, |_, _| {}).unwrap();
    let config = dir.path().join("model/config.json");
    let text = std::fs::read_to_string(&config).unwrap();
    let short = text.replace("\"max_position_embeddings\": 8192", "\"max_position_embeddings\": 3");
    assert_ne!(short, text);
    std::fs::write(&config, short).unwrap();
    let lines = [
        r#"{"question": "what is on the table", "answer": "a cup"}"#,
        r#"{"conversations": [{"from": "human", "value": "is anybody there"}]}"#,
    ];
    std::fs::write(dir.path().join("t.jsonl"), lines.join("\n")).unwrap();
    let mixture = dir.path().join("m.yaml");
    std::fs::write(&mixture, "datasets:\n- {json_path: t.jsonl, sampling_strategy: \"first:5\"}\n").unwrap();
    let settings = ProfileSettings::new(mixture, dir.path().join("model"));
    assert_eq!(
        profile(&settings, &|_, _| {}).unwrap().notices,
        [
            "`t.jsonl` has 2 samples, 5 are asked for: all are taken",
            "1 sample has no label token: such samples cost time, but the model learns nothing from them",
            "2 samples have more LLM tokens than the model's `max_position_embeddings` 3: none of them is cut",
        ]
    );
}

/// Two records with one id are two samples, and a sentence says so; records without an id have one each.
#[test]
fn an_id_that_comes_again_is_told() {
    let dir = tempfile::tempdir().unwrap();
    demo::write(dir.path(), 0, 1, |_, _| {}).unwrap();
    let line = |id: &str| format!(r#"{{{id}"question": "what is on the table", "answer": "a cup"}}"#);
    let lines = [line(r#""id": "a", "#), line(""), line(r#""id": "b", "#), line(""), line(r#""id": "a", "#)];
    let path = dir.path().join("t.jsonl");
    std::fs::write(&path, lines.join("\n")).unwrap();
    let settings = ProfileSettings::new(&path, dir.path().join("model"));
    let outcome = profile(&settings, &|_, _| {}).unwrap();
    assert_eq!(outcome.profile.samples.len(), 5);
    assert_eq!(
        outcome.notices,
        [
            "1 sample has an id that a sample before it has too, `a` is the first: each is a sample of its own, but \
             messages and `dflop check --sample` cannot tell them apart"
        ]
    );
    std::fs::write(&path, lines[..4].join("\n")).unwrap();
    assert_eq!(profile(&settings, &|_, _| {}).unwrap().notices, [""; 0]);
}
