//! What a write does to what stands in its place, of the real binary.

// `allow-unwrap-in-tests` knows test functions, not what they share.
#![allow(clippy::unwrap_used)]

use crate::common::Session;
use dflop_types::Plan;
use std::fmt::Write as _;
use std::fs;

/// A slip of `--out`: the configuration, artifacts of another kind and pipes stay, and it is told before the work.
#[test]
fn what_is_of_another_kind_is_not_replaced() {
    let session = Session::planned();
    let all = ["demo/dflop.yaml", "demo/plan.json", "demo/model_profile.json", "demo/data_profile.parquet"];
    let read = || all.map(|name| fs::read(session.path(name)).unwrap());
    let before = read();
    let pipe = session.path("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let estimate = ["profile", "model", "--estimate", "--hardware", "h100", "--model", "qwen2-vl-2b"];
    let config = ["-c", "demo/dflop.yaml"];
    for (verb, out, expected) in [
        (&["plan"][..], "demo/dflop.yaml", "a plan to `demo/dflop.yaml`: it is YAML"),
        (&["plan"], "demo/model_profile.json", "it is a model_profile, must be another plan or a new file"),
        (&["plan"], "pipe", "it is a device, pipe or socket, must be a regular file"),
        (&["profile", "data"], "demo/plan.json", "a data_profile to `demo/plan.json`: it is a plan"),
        (&["profile", "data"], "demo/dflop.yaml", "a data_profile to `demo/dflop.yaml`: it is YAML"),
        (&["profile", "model"], "demo/plan.json", "a model_profile to `demo/plan.json`: it is a plan"),
        (&estimate, "demo/data_profile.parquet", "it is a data_profile, must be another model_profile"),
    ] {
        let said = session.dflop(&[verb, &config, &["--out", out]].concat());
        assert!(said.contains("status: 2") && said.contains(expected), "{expected}\n{said}");
        assert!(
            said.contains("hint: choose another place with `--out`") && !said.contains("warning"),
            "{said}"
        );
    }
    for (flag, out, kind) in [
        ("--out", "demo/plan.json", "report"),
        ("--out", "demo/dflop.yaml", "report"),
        ("--trace", "demo/model_profile.json", "trace"),
        ("--trace", "pipe", "trace"),
    ] {
        let said = session.dflop(&["report", "demo", flag, out]);
        let expected = format!("cannot write a {kind} to `{out}`: it is ");
        assert!(said.contains("status: 2") && said.contains(&expected), "{said}");
        assert!(said.contains(&format!("hint: choose another place with `{flag}`")), "{said}");
    }
    assert!(read() == before, "a file was replaced");
    // Its own kind is, each time.
    for _ in 0..2 {
        let said = session.dflop(&["plan", "-c", "demo/dflop.yaml", "--only", "colocated=false"]);
        assert!(said.contains("wrote demo/plan.json"), "{said}");
    }
}

/// A directory with files of one's own is no place for a demo; `--force` takes an earlier one's media away.
#[test]
fn a_demo_overwrites_nothing_unasked() {
    let session = Session::new();
    session.edit("demo/dflop.yaml", |text| text.replace("steps: 24", "steps: 25"));
    fs::write(session.path("demo/data/media/mine.jpg"), "mine").unwrap();
    let before = fs::read(session.path("demo/dflop.yaml")).unwrap();
    let said = session.dflop(&["demo-data", "demo", "--samples", "8"]);
    let expected = "status: 2\n--- stdout\n--- stderr\nerror: `demo/dflop.yaml` exists, the demo would overwrite it\n\n\
                    hint: choose another directory, or pass `--force`\n";
    assert!(said.contains(expected), "{said}");
    assert_eq!(fs::read(session.path("demo/dflop.yaml")).unwrap(), before);
    let said = session.dflop(&["demo-data", "demo", "--samples", "8", "--force"]);
    assert!(said.contains("status: 0"), "{said}");
    assert_ne!(fs::read(session.path("demo/dflop.yaml")).unwrap(), before);
    let media: Vec<_> = fs::read_dir(session.path("demo/data/media"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    assert!(media.contains(&"mine.jpg".to_owned()), "{media:?}");
    assert!(media.iter().all(|name| !name.starts_with("demo_") || name.as_str() < "demo_0008"), "{media:?}");
}

/// The number of ranks is that of the plan, be there traces or not.
#[test]
fn a_report_without_traces_knows_the_ranks() {
    let session = Session::planned();
    let mut metrics = String::new();
    for pair in 0..3 {
        for (arm, ns) in [("blind", 200_000_000), ("aware", 100_000_000)] {
            let line = serde_json::json!({"step": pair, "arm": arm, "loss": 1.0, "step_ns": ns, "predicted_ns": ns,
                "bubble_ratio": 0.5, "pair": pair});
            let _ = writeln!(metrics, "{line}");
        }
    }
    fs::create_dir(session.path("demo/run")).unwrap();
    fs::write(session.path("demo/run/metrics.jsonl"), metrics).unwrap();
    let said = session.dflop(&["report", "demo"]);
    assert!(said.contains("On 2 ranks and 3 global batches"), "{said}");
}

/// Evaluations and the losses of kinds and sources are on the page; what an evaluation could not read is a warning.
#[test]
fn losses_of_a_run_are_reported_by_kind_and_source() {
    let session = Session::new();
    let group = |loss: serde_json::Value| serde_json::json!({"loss": loss, "label_tokens": 8, "samples": 2});
    let by = |loss: serde_json::Value| serde_json::json!({"kind": {"image": group(loss.clone())}, "source": {"captions": group(loss)}});
    let step = serde_json::json!({"step": 0, "arm": "aware", "loss": 2.5, "loss_by": by(2.5.into()), "step_ns": 9,
        "predicted_ns": 9, "bubble_ratio": 0.5});
    let evaluation = |step: u64, loss: serde_json::Value, bad: serde_json::Value| {
        serde_json::json!({"step": step, "loss": loss, "label_tokens": 8, "samples": 2, "loss_by": by(loss), "bad": bad,
            "seconds": 0.5})
    };
    let lines = [
        evaluation(0, 1.25.into(), serde_json::json!([[3, "cut short"]])),
        evaluation(1, serde_json::Value::Null, serde_json::json!([])),
    ];
    fs::create_dir_all(session.path("demo/run")).unwrap();
    fs::write(session.path("demo/run/metrics.jsonl"), format!("{step}\n")).unwrap();
    fs::write(session.path("demo/run/evaluations.jsonl"), lines.map(|line| format!("{line}\n")).concat())
        .unwrap();
    let said = session.dflop(&["report", "demo"]);
    assert!(said.contains("status: 0"), "{said}");
    let page = fs::read_to_string(session.path("demo/report.html")).unwrap();
    for text in [
        "Held out (2 evaluations): from 1.25 after step 0 to - after step 1; the lowest is 1.25 after step 0.",
        "Loss by kind",
        "<td>image</td><td class=\"n\">8</td><td class=\"n\">2.50</td><td class=\"n\">2.50</td><td class=\"n\">1.25</td><td class=\"n\">-</td>",
        "Loss by source",
        "<td>captions</td>",
        "1 sample of the evaluation could not be read: left out of its loss",
    ] {
        assert!(page.contains(text), "{text}: {page}");
    }
}

/// A run is shown beside the plan and the data that it was trained with, or not at all.
#[test]
fn a_run_of_another_plan_is_not_reported() {
    let session = Session::planned();
    let lines = |plan: &str, data: &str| {
        let schedule = serde_json::json!({"step": 0, "llm": [], "encoder": [], "label_tokens": 0,
            "predicted_makespan_ns": 0, "max_load_ns": 0, "lower_bound_ns": 0});
        let line = |arm: &str| {
            serde_json::json!({"step": 0, "arm": arm, "made_from": {"plan": plan, "data_profile": data}, "samples": [],
                "schedule": schedule})
        };
        format!("{}\n{}\n", line("blind"), line("aware"))
    };
    let read = |name: &str| -> Plan { dflop_types::artifact::read(&session.path(name)).unwrap() };
    let plan_hash = || dflop_types::artifact::hash_of(&read("demo/plan.json"));
    let data_hash = read("demo/plan.json").made_from["data_profile"].clone();
    fs::create_dir(session.path("demo/run")).unwrap();
    let log = session.path("demo/run/schedules.jsonl");
    let metrics = serde_json::json!({"step": 0, "arm": "aware", "loss": 1.0, "step_ns": 9, "predicted_ns": 9,
        "bubble_ratio": 0.5});
    fs::write(session.path("demo/run/metrics.jsonl"), format!("{metrics}\n")).unwrap();

    fs::write(&log, lines(&plan_hash(), &data_hash)).unwrap();
    let said = session.dflop(&["report", "demo"]);
    assert!(said.contains("status: 0"), "{said}");
    let page = || fs::read_to_string(session.path("demo/report.html")).unwrap();
    let unsure = "the run does not say with which plan and data profile it trained";
    assert!(!page().contains(unsure));

    // A run of early versions, or one whose log is gone, is shown with a warning.
    fs::remove_file(&log).unwrap();
    assert!(session.dflop(&["report", "demo"]).contains("status: 0"));
    assert!(page().contains(&format!("{unsure} in 1 step: whether they are the ones shown is not known")));

    let none = "sha256:0";
    for (plan, data, name) in [(none, data_hash.as_str(), "plan"), (&plan_hash(), none, "data_profile")] {
        fs::write(&log, lines(plan, data)).unwrap();
        let said = session.dflop(&["report", "demo", "--out", "other.html"]);
        let expected =
            format!("`demo/run/schedules.jsonl` line 1 was made from another `{name}`: sha256:0, the one");
        assert!(said.contains("status: 2") && said.contains(&expected), "{said}");
        assert!(said.contains(&format!("hint: put back the {name} that the run was trained with")), "{said}");
        assert!(!session.path("other.html").exists());
    }

    // The real way: the data changes, profile and plan are made anew, the run stays.
    fs::write(&log, lines(&plan_hash(), &data_hash)).unwrap();
    session.edit("demo/data/mixture.yaml", |yaml| {
        yaml.replacen("sampling_strategy: all", "sampling_strategy: first:8", 1)
    });
    session.profile_data();
    assert!(
        session.dflop(&["plan", "-c", "demo/dflop.yaml", "--only", "colocated=false"]).contains("status: 0")
    );
    let said = session.dflop(&["report", "demo"]);
    assert!(said.contains("status: 2") && said.contains("was made from another `data_profile`"), "{said}");
}

/// A slip of `-o` does not cost a model's configuration.
#[test]
fn what_dflop_did_not_write_is_not_replaced() {
    let session = Session::planned();
    let before = fs::read(session.path("demo/model/config.json")).unwrap();
    let estimate = [
        "profile",
        "model",
        "-c",
        "demo/dflop.yaml",
        "--estimate",
        "--hardware",
        "h100",
        "--model",
        "qwen2-vl-2b",
    ];
    let durations = r#"{"forward_ns": [[2]], "backward_ns": [[4]], "transfer_ns": 0}"#;
    fs::write(session.path("durations.json"), durations).unwrap();
    for (verb, flag, kind) in [
        (&["plan", "-c", "demo/dflop.yaml", "--only", "colocated=false"][..], "--out", "plan"),
        (&estimate, "--out", "model_profile"),
        (&["profile", "data", "-c", "demo/dflop.yaml"], "--out", "data_profile"),
        (&["report", "demo"], "--out", "report"),
        (&["report", "demo"], "--trace", "trace"),
        (&["simulate", "--durations", "durations.json"], "--trace", "trace"),
    ] {
        let said = session.dflop(&[verb, &[flag, "demo/model/config.json"]].concat());
        let expected = format!(
            "cannot write a {kind} to `demo/model/config.json`: it is a file that dflop did not write as a {kind}"
        );
        assert!(said.contains("status: 2") && said.contains(&expected), "{said}");
        assert_eq!(fs::read(session.path("demo/model/config.json")).unwrap(), before);
    }
    // Its own files it writes again.
    for _ in 0..2 {
        let said = session.dflop(&["report", "demo", "--out", "page.html", "--trace", "trace.json"]);
        assert!(said.contains("status: 0"), "{said}");
    }
}
