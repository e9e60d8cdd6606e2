//! Artifacts through their files: what is written is read, what is unsound is refused by name.

#![allow(clippy::unwrap_used, reason = "tests may give up, their helpers too")]

use dflop_types::artifact::{check_made_from, hash_of, parse, read, read_text, to_text, write, write_text};
use dflop_types::{
    Artifact, ArtifactError, ComponentLayout, ExpertsProfile, Hint as _, Layout, MadeFrom, MeasuredCurve,
    MeasuredPoint, ModelProfile, ModuleProfile, PipelineOrder, Plan, PlanPrediction, RankedPlan,
    Recomputation, Recompute, Trained, Zero,
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
    // No file has a longer name, so the neighbour that would take this one cannot be made.
    let path = directory.path().join("n".repeat(255));
    let kept = "{\"dflop\": \"note\"}";
    std::fs::write(&path, kept).unwrap();
    assert!(matches!(write(&path, &note()), Err(ArtifactError::Io { act: "write", .. })));
    assert_eq!(std::fs::read_to_string(&path).unwrap(), kept);
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1, "no neighbour file stays");
}

/// Files of `directory`, links as they are.
fn names(directory: &Path) -> Vec<String> {
    let names = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<_> = names.map(|name| name.into_string().unwrap()).collect();
    names.sort();
    names
}

#[cfg(unix)]
#[test]
fn a_write_goes_where_links_lead() {
    let directory = tempfile::tempdir().unwrap();
    let (far, near) = (directory.path().join("far"), directory.path().join("near"));
    for folder in [&far, &near] {
        std::fs::create_dir(folder).unwrap();
    }
    // A link to a link to a file that is made by the first write and replaced by the second.
    std::os::unix::fs::symlink("hop.json", near.join("link.json")).unwrap();
    std::os::unix::fs::symlink("../far/note.json", near.join("hop.json")).unwrap();
    for _ in 0..2 {
        write(&near.join("link.json"), &note()).unwrap();
        let found: Note = read(&far.join("note.json")).unwrap();
        assert_eq!(found, note());
        assert!(near.join("link.json").is_symlink() && near.join("hop.json").is_symlink());
    }
    assert_eq!(
        (names(&far), names(&near)),
        (vec!["note.json".into()], vec!["hop.json".into(), "link.json".into()])
    );
    std::os::unix::fs::symlink("round.json", near.join("round.json")).unwrap();
    assert!(matches!(write(&near.join("round.json"), &note()), Err(ArtifactError::Io { act: "write", .. })));
}

#[cfg(unix)]
#[test]
fn what_is_no_regular_file_is_not_replaced() {
    use std::os::unix::fs::FileTypeExt as _;
    let directory = tempfile::tempdir().unwrap();
    let place = |name: &str| directory.path().join(name);
    let _socket = std::os::unix::net::UnixListener::bind(place("socket")).unwrap();
    std::fs::create_dir(place("folder")).unwrap();
    std::os::unix::fs::symlink("socket", place("link")).unwrap();
    for (name, found) in [
        ("socket", "a device, pipe or socket"),
        ("link", "a device, pipe or socket"),
        ("folder", "a directory"),
    ] {
        let path = place(name);
        let error = write(&path, &note()).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!(
                "cannot write a note to `{}`: it is {found}, must be a regular file or a new one",
                path.display()
            )
        );
        assert_eq!(error.hint().as_deref(), Some("choose another place with `--out`"));
    }
    assert!(std::fs::symlink_metadata(place("socket")).unwrap().file_type().is_socket());
    assert_eq!(names(directory.path()), ["folder", "link", "socket"]);
}

#[test]
fn a_file_of_another_kind_is_not_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let refused = |name: &str, text: &str| {
        let path = directory.path().join(name);
        std::fs::write(&path, text).unwrap();
        let answer = write(&path, &note()).map_err(|error| error.to_string());
        assert_eq!(answer.is_err(), std::fs::read_to_string(&path).unwrap() == text, "{answer:?}");
        answer.err().unwrap_or_default()
    };
    let plan = "{\n\"dflop\": \"plan\",\n\"format_version\": 1\n}\n";
    assert!(refused("plan.json", plan).contains("`: it is a plan, must be another note or a new file"));
    assert!(refused("compact.json", "{\"dflop\":\"plan\"}").contains("it is a plan"));
    assert!(refused("table", "PAR1...").contains("it is a data_profile"));
    assert!(refused("dflop.yaml", "model: {}").contains("it is YAML, as a configuration is"));
    // What dflop did not write: a model's configuration, notes, JSON that is no object, bytes that are no text.
    for text in ["{\"model_type\": \"qwen2\"}", "my notes", "[1, 2]", "\u{1}\u{2}", "{\"dflop\": 3}"] {
        let error = refused("config.json", text);
        let rule = "it is a file that dflop did not write as a note, must be another note or a new file";
        assert!(error.contains(rule), "{text}: {error}");
    }
    // Its own kind, whatever its name, its version, the order of its fields or its end; and an empty file.
    let own = "{\"dflop\": \"note\", \"format_ver";
    for (name, text) in [
        ("own.json", own),
        ("own.yaml", own),
        ("cut.json", "{\"dflop\": \"no"),
        ("sorted.json", "{\"author\": {\"dflop\": 1}, \"dflop\": \"note\"}"),
        ("empty", ""),
    ] {
        assert_eq!(refused(name, text), "", "{name}");
    }
    assert!(refused("sorted.json", "{\"a\": 1, \"dflop\": \"plan\"}").contains("it is a plan"));
}

/// Files that are no artifacts are known by how they begin.
#[test]
fn a_page_replaces_pages_alone() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("file");
    let written = |kind: &str, before: &str| {
        std::fs::write(&path, before).unwrap();
        write_text(&path, kind, "after").is_ok()
    };
    let page = "<!DOCTYPE html><html><head><meta name=\"generator\" content=\"dflop 0.1.0\">";
    assert!(written("report", page) && !written("trace", page));
    assert!(!written("report", "<!DOCTYPE html><html><head><title>my page about dflop</title>"));
    let trace = "{\"displayTimeUnit\":\"ns\",\"traceEvents\":[";
    assert!(written("trace", trace) && !written("plan", trace));
    let figure = "<svg xmlns=\"a\" aria-label=\"One training step before and after: tokens-ahead 3 ms\">";
    assert!(written("figure", figure) && !written("figure", "<svg xmlns=\"a\"><rect/>"));
    // What a sweep writes, and a man page: the same command a second time replaces them.
    let plot = "<svg xmlns=\"a\" aria-label=\"Samples a second by cluster.num_ranks: plans and their best baselines.\">";
    assert!(written("figure", plot) && !written("trace", plot));
    let table = "cluster.num_ranks,samples,step_ms,samples_per_s,peak_gib,work_bound_ms,best_baseline_ms,layout\n8,32";
    assert!(written("table", table) && !written("figure", table));
    assert!(!written("table", "name,samples\nmine,3\n"));
    let page = ".ie \\n(.g .ds Aq \\(aq\n.el .ds Aq '\n.TH dflop-plan 1  \"dflop 0.1.0\"";
    assert!(written("man page", page) && !written("man page", ".TH ls 1"));
    assert!(!written("trace", "{\"model_type\": \"qwen2\"}"));
    assert!(!written("summary", "{\"model_type\": \"qwen2\"}"));
    assert!(written("summary", "{\n  \"step_ms_blind\": 3.0,"));
    assert!(written(
        "summary",
        "{\n  \"best\": {\n    \"baseline\": \"blind-ahead\",\n    \"step_ms_baseline\": 3.0,"
    ));
}

#[cfg(unix)]
#[test]
fn what_may_have_no_end_is_not_read() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
    let said = |path: &Path| read::<Note>(path).unwrap_err().to_string();
    assert!(said(&path).ends_with("it is a device, pipe or socket, must be a regular file"));
    assert!(said(Path::new("/dev/zero")).ends_with("it is a device, pipe or socket, must be a regular file"));
    assert!(said(directory.path()).ends_with("it is a directory, must be a regular file"));
    let path = directory.path().join("long");
    std::fs::write(&path, "abcd").unwrap();
    assert_eq!(read_text(&path, 4).unwrap(), "abcd");
    assert_eq!(read_text(&path, 3).unwrap_err().to_string(), "it has more than 3 bytes");
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

/// Profiles made before experts were counted are read as before, and numbers of experts that cannot be are refused.
#[test]
fn experts_of_a_layer_are_optional_and_among_its_parameters() {
    let module = ModuleProfile {
        count: 1,
        linear: MeasuredCurve {
            points: vec![MeasuredPoint { size: 8, forward_ns: 1, ..MeasuredPoint::default() }],
            ..MeasuredCurve::default()
        },
        num_parameters: 100,
        parameter_bytes: 200,
        ..ModuleProfile::default()
    };
    let mut profile = ModelProfile {
        modules: ModelProfile::MODULES.map(|name| (name.to_owned(), module.clone())).into(),
        ..ModelProfile::default()
    };
    assert!(!to_text(&profile).contains("experts"));
    let of = |count, per_token, num_parameters, parameter_bytes| {
        Some(ExpertsProfile { count, per_token, num_parameters, parameter_bytes })
    };
    let mut read = |experts| {
        profile.modules.get_mut("llm_layer").unwrap().experts = experts;
        let text = to_text(&profile);
        parse::<ModelProfile>(Path::new("p.json"), &text).map_err(|error| match error {
            ArtifactError::Unsound { problems, .. } => problems,
            error => vec![error.to_string()],
        })
    };
    let good = of(8, 2, 80, 160);
    assert_eq!(read(good).unwrap().modules["llm_layer"].experts, good);
    let place = "modules.llm_layer.experts";
    assert_eq!(
        read(of(8, 9, 101, 201)).unwrap_err(),
        [
            format!("{place}.per_token: 9, must be from 1 to the 8 experts"),
            format!("{place}.num_parameters: 101, must be at most the 100 of the layer"),
            format!("{place}.parameter_bytes: 201, must be at most the 200 of the layer"),
        ]
    );
    assert!(read(of(8, 0, 80, 160)).is_err());
}

#[test]
fn a_plan_of_more_ranks_than_there_are_is_refused() {
    let degrees = |dp| ComponentLayout { tp: 1, pp: 1, dp };
    let ranked = |encoder_dp, num_microbatches| RankedPlan {
        layout: Layout::disaggregated(degrees(encoder_dp), degrees(2)),
        num_microbatches,
        pipeline_order: PipelineOrder::OneFOneB,
        recompute: Recomputation::NONE,
        is_eased: false,
        prediction: PlanPrediction::default(),
    };
    let problems = |best, runner_up| {
        let plan = Plan {
            made_from: MadeFrom::default(),
            global_batch_size: 8,
            seed: 0,
            num_sampled_batches: 1,
            trained: Trained::default(),
            best,
            ways: Vec::new(),
            rivals: Vec::new(),
            runners_up: vec![runner_up],
            rejections: vec![],
            searched: None,
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

/// A colocated plan takes as many ranks as it has replicas; what no layout can be is told by field.
#[test]
fn layouts_that_cannot_be_are_refused_by_field() {
    let plan_of = |layout| Plan {
        made_from: MadeFrom::default(),
        global_batch_size: 8,
        seed: 0,
        num_sampled_batches: 1,
        trained: Trained::default(),
        best: RankedPlan {
            layout,
            num_microbatches: 2,
            pipeline_order: PipelineOrder::OneFOneB,
            recompute: Recomputation::both(Recompute::Full),
            is_eased: false,
            prediction: PlanPrediction::default(),
        },
        ways: Vec::new(),
        rivals: Vec::new(),
        runners_up: Vec::new(),
        rejections: Vec::new(),
        searched: None,
    };
    let colocated = Layout::colocated(1 << 19, Zero::Parameters);
    let plan = plan_of(Layout { shard_ranks: Some(8), ..colocated });
    let text = to_text(&plan);
    assert!(text.contains(r#""recompute":"full""#), "{text}");
    assert_eq!(parse::<Plan>(Path::new("plan.json"), &text).unwrap(), plan);
    let mut unequal = plan.clone();
    unequal.best.recompute.encoder = Recompute::None;
    let text = to_text(&unequal);
    assert!(text.contains(r#""recompute":{"encoder":"none","llm":"full"}"#), "{text}");
    assert_eq!(parse::<Plan>(Path::new("plan.json"), &text).unwrap(), unequal);
    let wrong = text.replace(r#""llm":"full"}"#, r#""llm":"most"}"#);
    let message = parse::<Plan>(Path::new("plan.json"), &wrong).unwrap_err().to_string();
    assert!(
        message.contains("best.recompute: must be `none`, `selective`, `full`, `selective:K` or `full:K`"),
        "{message}"
    );
    let problems = |layout| plan_of(layout).problems();
    let apart = ComponentLayout { tp: 1, pp: 2, dp: 6 };
    assert_eq!(
        problems(Layout { llm: apart, shard_ranks: Some(5), ..Layout::colocated(4, Zero::States) }),
        [
            "best.layout: encoder tp 1 pp 1 dp 4, llm tp 1 pp 2 dp 6, both must be equal where they are colocated, or the encoder tp 1 with a replica on each rank",
            "best.layout.llm.pipeline_parallel_degree: 2, must be 1 where the components are colocated",
            "best.layout.shard_ranks: 5, must divide the 4 replicas of the encoder",
            "best.layout.shard_ranks: 5, must divide the 6 replicas of the llm",
        ]
    );
    assert_eq!(
        problems(Layout { shard_ranks: Some(2), ..Layout::colocated(4, Zero::Nothing) }),
        ["best.layout.shard_ranks: only where `zero` is above 0"]
    );
    // A pipeline's ranks keep whole parameters.
    let alone = ComponentLayout { tp: 1, pp: 1, dp: 2 };
    let pipeline = |zero| problems(Layout { zero, ..Layout::disaggregated(alone, alone) });
    assert!(pipeline(Zero::Gradients).is_empty());
    assert_eq!(
        pipeline(Zero::Parameters),
        [
            "best.layout.zero: 3, must be at most 2 where encoder and llm have ranks of their own: those keep whole parameters"
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
