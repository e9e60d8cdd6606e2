//! Artifacts through their files: what is written is read, what is unsound is refused by name.

#![allow(clippy::unwrap_used, reason = "tests may give up, their helpers too")]

use dflop_types::artifact::{check_made_from, hash_of, parse, read, to_text, write};
use dflop_types::{ArtifactError, DataProfile, MadeFrom, ProfiledSample, SampleKind, SampleShape};
use std::path::Path;

fn profile() -> DataProfile {
    let shape = SampleShape { llm_tokens: 10, label_tokens: 4, ..SampleShape::default() };
    let sample = |position: u64| ProfiledSample {
        id: format!("sample {position}"),
        source: 0,
        position,
        kind: SampleKind::Text,
        shape: shape.clone(),
        media_bytes: 0,
        media_ms: 0,
        ..Default::default()
    };
    DataProfile {
        made_from: MadeFrom::from([("tokenizer".to_owned(), "sha256:a".to_owned())]),
        family: "llava_onevision".to_owned(),
        sources: vec!["a.json".to_owned()],
        problems: vec![],
        samples: vec![sample(0), sample(1)],
        ..Default::default()
    }
}

#[test]
fn what_is_written_is_read_and_a_sample_stands_on_a_line() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("new/data_profile.json");
    write(&path, &profile()).unwrap();
    let found: DataProfile = read(&path).unwrap();
    assert_eq!(found, profile());
    assert_eq!(hash_of(&found), hash_of(&profile()));
    let text = std::fs::read_to_string(&path).unwrap();
    assert_eq!(text.lines().filter(|line| line.contains("\"sample ")).count(), 2);
}

#[test]
fn a_failed_write_leaves_what_was_there() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("data_profile.json");
    // A directory cannot be replaced by a file, so the last move of the write fails.
    std::fs::create_dir_all(path.join("kept")).unwrap();
    assert!(matches!(write(&path, &profile()), Err(ArtifactError::Io { act: "write", .. })));
    assert!(path.join("kept").is_dir());
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1, "no neighbour file stays");
}

#[test]
fn wrong_files_are_refused_by_name() {
    let here = Path::new("p.json");
    let refused = |text: &str| parse::<DataProfile>(here, text).unwrap_err();
    let good = to_text(&profile());
    assert!(matches!(read::<DataProfile>(Path::new("/no/such/file")), Err(ArtifactError::Missing { .. })));
    assert!(matches!(refused(&good[..good.len() / 2]), ArtifactError::Malformed { .. }));
    assert!(matches!(refused(&good.replacen("data_profile", "plan", 1)), ArtifactError::Malformed { .. }));
    let newer = good.replace("\"format_version\": 2", "\"format_version\": 7");
    assert!(matches!(refused(&newer), ArtifactError::Version { found: 7, known: 2, .. }));
    let unsound =
        good.replace("\"source\":0", "\"source\":3").replace("\"label_tokens\":4", "\"label_tokens\":40");
    let ArtifactError::Unsound { problems, .. } = refused(&unsound) else { panic!("it must be unsound") };
    assert_eq!(problems.len(), 4, "both problems of both samples: {problems:?}");
}

#[test]
fn a_stale_artifact_names_both_hashes() {
    let here = Path::new("p.json");
    assert!(check_made_from(here, &profile(), "tokenizer", "sha256:a").is_ok());
    let error = check_made_from(here, &profile(), "tokenizer", "sha256:b").unwrap_err().to_string();
    assert_eq!(error, "`p.json` was made from another `tokenizer`: sha256:a, now sha256:b");
}
