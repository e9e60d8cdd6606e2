//! Artifacts through their files: what is written is read, what is unsound is refused by name.

#![allow(clippy::unwrap_used, reason = "tests may give up, their helpers too")]

use dflop_types::artifact::{check_made_from, hash_of, parse, read, to_text, write};
use dflop_types::{
    Artifact, ArtifactError, ComponentLayout, Layout, MadeFrom, MeasuredCurve, MeasuredPoint, ModelProfile,
    ModuleProfile, PipelineOrder, Plan, PlanPrediction, RankedPlan,
};
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
fn a_number_that_cannot_be_is_refused_by_its_place() {
    let module = ModuleProfile {
        count: 1,
        linear: MeasuredCurve {
            points: vec![MeasuredPoint { size: 8, forward_ns: 4_321, ..MeasuredPoint::default() }],
            ..MeasuredCurve::default()
        },
        ..ModuleProfile::default()
    };
    let modules = ModelProfile::MODULES.map(|name| (name.to_owned(), module.clone())).into();
    let good = to_text(&ModelProfile { modules, ..ModelProfile::default() });
    let cause = |number: &str| {
        let text = good.replacen("4321", number, 1);
        parse::<ModelProfile>(Path::new("p.json"), &text).unwrap_err().to_string()
    };
    assert_eq!(parse::<ModelProfile>(Path::new("p.json"), &good).unwrap().num_llm_layers(), 1);
    let place = "`p.json` is not a model_profile: modules.encoder_embedding.linear.points[0].forward_ns: ";
    for (number, rule) in [
        ("-5", "invalid value: integer `-5`, expected u64 at line "),
        ("1.5", "invalid type: floating point `1.5`, expected u64 at line "),
        ("NaN", "expected value at line "),
        ("null", "invalid type: null, expected u64 at line "),
    ] {
        let message = cause(number);
        assert!(message.starts_with(&format!("{place}{rule}")), "{message}");
    }
    let message = cause("0");
    assert!(
        message.contains("modules.encoder_embedding.linear.points[0].forward_ns: must not be 0"),
        "{message}"
    );
}

#[test]
fn a_plan_of_more_ranks_than_there_are_is_refused() {
    let degrees = |dp| ComponentLayout { tp: 1, pp: 1, dp };
    let ranked = |encoder_dp, num_microbatches| RankedPlan {
        layout: Layout { encoder: degrees(encoder_dp), llm: degrees(2) },
        num_microbatches,
        pipeline_order: PipelineOrder::OneFOneB,
        prediction: PlanPrediction::default(),
    };
    let problems = |best, runner_up| {
        let plan = Plan {
            made_from: MadeFrom::default(),
            global_batch_size: 8,
            seed: 0,
            num_sampled_batches: 1,
            best,
            runners_up: vec![runner_up],
            rejections: vec![],
        };
        plan.problems()
    };
    assert!(problems(ranked(1, 4), ranked(2, 4)).is_empty());
    assert_eq!(
        problems(ranked(u32::MAX, 4), ranked(0, u32::MAX)),
        [
            "best.layout: takes 4294967297 ranks, at most 1048576",
            "runners_up[0].layout.encoder.data_parallel_degree: must not be 0",
            "runners_up[0].num_microbatches: makes 8589934590 microbatches of all LLM replicas, at most 1048576",
        ]
    );
}

#[test]
fn a_stale_artifact_names_both_hashes() {
    let here = Path::new("p.json");
    assert!(check_made_from(here, &note(), "tokenizer", "sha256:a").is_ok());
    let error = check_made_from(here, &note(), "tokenizer", "sha256:b").unwrap_err().to_string();
    assert_eq!(error, "`p.json` was made from another `tokenizer`: sha256:a, now sha256:b");
}
