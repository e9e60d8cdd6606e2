//! Artifacts through their files: what is written is read, what is unsound is refused by name.

#![allow(clippy::unwrap_used, reason = "tests may give up, their helpers too")]

use dflop_types::artifact::{check_made_from, hash_of, parse, read, to_text, write};
use dflop_types::{Artifact, ArtifactError, MadeFrom};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// A file like ours, with a list.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Note {
    made_from: MadeFrom,
    numbers: Vec<Number>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Number {
    value: u32,
    limit: u32,
}

impl Artifact for Note {
    const KIND: &'static str = "note";
    const FORMAT_VERSION: u32 = 2;
    const MEND: &'static str = "dflop note";

    fn made_from(&self) -> &MadeFrom {
        &self.made_from
    }

    fn problems(&self) -> Vec<String> {
        let numbers = self.numbers.iter().filter(|n| n.value > n.limit);
        numbers.map(|n| format!("value: {}, must be at most {}", n.value, n.limit)).collect()
    }
}

fn note() -> Note {
    Note {
        made_from: MadeFrom::from([("tokenizer".to_owned(), "sha256:a".to_owned())]),
        numbers: vec![Number { value: 1, limit: 4 }, Number { value: 2, limit: 4 }],
    }
}

#[test]
fn what_is_written_is_read_and_an_element_stands_on_a_line() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("new/note.json");
    write(&path, &note()).unwrap();
    let found: Note = read(&path).unwrap();
    assert_eq!(found, note());
    assert_eq!(hash_of(&found), hash_of(&note()));
    let text = std::fs::read_to_string(&path).unwrap();
    assert_eq!(text.lines().filter(|line| line.contains("\"value\"")).count(), 2);
}

#[test]
fn a_failed_write_leaves_what_was_there() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("note.json");
    // A directory cannot be replaced by a file, so the last move of the write fails.
    std::fs::create_dir_all(path.join("kept")).unwrap();
    assert!(matches!(write(&path, &note()), Err(ArtifactError::Io { act: "write", .. })));
    assert!(path.join("kept").is_dir());
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1, "no neighbour file stays");
}

#[test]
fn wrong_files_are_refused_by_name() {
    let here = Path::new("p.json");
    let refused = |text: &str| parse::<Note>(here, text).unwrap_err();
    let good = to_text(&note());
    assert!(matches!(read::<Note>(Path::new("/no/such/file")), Err(ArtifactError::Missing { .. })));
    assert!(matches!(refused(&good[..good.len() / 2]), ArtifactError::Malformed { .. }));
    assert!(matches!(refused(&good.replacen("\"note\"", "\"plan\"", 1)), ArtifactError::Malformed { .. }));
    let newer = good.replace("\"format_version\": 2", "\"format_version\": 7");
    assert!(matches!(refused(&newer), ArtifactError::Version { found: 7, known: 2, .. }));
    let unsound = good.replace("\"limit\":4", "\"limit\":0");
    let ArtifactError::Unsound { problems, .. } = refused(&unsound) else { panic!("it must be unsound") };
    assert_eq!(problems, ["value: 1, must be at most 0", "value: 2, must be at most 0"]);
}

#[test]
fn a_stale_artifact_names_both_hashes() {
    let here = Path::new("p.json");
    assert!(check_made_from(here, &note(), "tokenizer", "sha256:a").is_ok());
    let error = check_made_from(here, &note(), "tokenizer", "sha256:b").unwrap_err().to_string();
    assert_eq!(error, "`p.json` was made from another `tokenizer`: sha256:a, now sha256:b");
}
