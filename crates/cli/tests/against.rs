//! Two runs side by side, and a run that has changed its plan, of the real binary.

use crate::from_run::{train, with_run};
use serde_json::Value;
use std::fs;

/// The cells of the line of a row, without its name.
fn row<'a>(said: &'a str, name: &str) -> Vec<&'a str> {
    let line = said.lines().find(|line| line.trim_start().starts_with(name));
    let line = line.unwrap_or_else(|| panic!("no {name}: {said}")).trim_start();
    line[name.len()..].split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect()
}

fn has(said: &str, part: &str) {
    assert!(said.contains(part), "no `{part}` in: {said}");
}

#[test]
fn two_runs_of_the_same_samples_are_held_against_each_other_by_step() {
    let session = with_run(1.5);
    train(&session, "demo/quick", ["plan.json", "model_profile.json"], 0..9, 1.0);
    let said = session.dflop(&["report", "demo", "--against", "demo/quick"]);
    has(&said, "status: 0");
    has(&said, "run against quick:");
    // As `--help` writes it, from beside the plan.
    let bare = session.dflop_in("demo", &["report", ".", "--against", "quick", "-o", "quick.html"]);
    has(&bare, "run against quick:");
    // By hand: the geometric mean of the ratios of steps 1 to 8.
    let times = |run: &str| -> Vec<f64> {
        let lines = fs::read_to_string(session.path(format!("demo/{run}/metrics.jsonl"))).unwrap();
        let ns = |line: &str| serde_json::from_str::<Value>(line).unwrap()["step_ns"].as_f64().unwrap();
        lines.lines().skip(1).take(8).map(ns).collect()
    };
    let ratios = times("run").into_iter().zip(times("quick")).map(|(own, other)| own / other);
    let mean = ratios.map(f64::ln).sum::<f64>() / 8.0;
    let step = row(&said, "step time");
    assert_eq!(step[2], format!("+{:.1} %", 100.0 * (mean.exp() - 1.0)), "{said}");
    assert!(mean.exp() > 1.48 && step[3].starts_with("+4"), "{said}");
    assert_eq!(row(&said, "predicted step time")[2..], ["0 %", "0 % to 0 %"], "the plan is the same");
    has(
        &said,
        "The numbers are of 8 steps that trained the same samples in both, of 8 steps in quick and 11 steps in run.",
    );
    has(&said, "The first step of each is left out");
    assert!(!said.contains("differs"), "{said}");
    let page = fs::read_to_string(session.path("demo/report.html")).unwrap();
    has(&page, "Two runs side by side");
    has(&page, "One global batch in both runs");
    assert_eq!(
        page.matches("\"other\":{").count(),
        8,
        "each common step is drawn with that of the other run"
    );
    // The other way round: the same, of the other sign.
    let said = session.dflop(&["report", "demo", "--run", "demo/quick", "--against", "demo/run"]);
    assert_eq!(row(&said, "step time")[2], format!("{:.1} %", 100.0 * ((-mean).exp() - 1.0)), "{said}");
}

#[test]
fn what_differs_between_two_runs_is_said() {
    let session = with_run(1.0);
    let plan = |extra: &[&str]| {
        let said = session.dflop(&[&["plan", "-c", "demo/dflop.yaml"], extra].concat());
        has(&said, "status: 0");
    };
    fs::copy(session.path("demo/plan.json"), session.path("first.json")).unwrap();
    plan(&["--only", "colocated=true"]);
    train(&session, "demo/colocated", ["plan.json", "model_profile.json"], 0..6, 1.0);
    fs::rename(session.path("demo/plan.json"), session.path("demo/plan.colocated.json")).unwrap();
    fs::rename(session.path("first.json"), session.path("demo/plan.json")).unwrap();
    let said = session.dflop(&["report", "demo", "--against", "demo/colocated"]);
    has(&said, "status: 0");
    has(&said, "The layout differs: ");
    has(&said, "The numbers are of 5 steps that trained the same samples in both");
    // Other data: no step has a pair, whatever its number.
    fs::create_dir_all(session.path("more")).unwrap();
    for name in ["dflop.yaml", "model_profile.json", "plan.json"] {
        fs::copy(session.path("demo").join(name), session.path("more").join(name)).unwrap();
    }
    fs::create_dir_all(session.path("more/run")).unwrap();
    fs::copy(session.path("demo/run/metrics.jsonl"), session.path("more/run/metrics.jsonl")).unwrap();
    let said = session.dflop(&["report", "demo", "--against", "more"]);
    has(&said, "demo against more:");
    has(&said, "No two of these steps trained the same samples, and their data profiles differ");
    assert_eq!(row(&said, "step time")[2], "0 %");
    let said = session.dflop(&["report", "demo", "--against", "demo/media"]);
    has(&said, "status: 2");
}

/// A new plan takes the place of the one before; the run that was trained with that one has kept a copy.
#[test]
fn runs_of_two_plans_that_replaced_each_other_are_held_against_each_other() {
    let session = with_run(1.0);
    for (name, kept) in
        [("plan", "plan.0f1e2d3c4b5a.json"), ("model_profile", "model_profile.0f1e2d3c4b5a.json")]
    {
        let from = session.path(format!("demo/{name}.json"));
        fs::copy(from, session.path("demo/run").join(kept)).unwrap();
    }
    let said = session.dflop(&["plan", "-c", "demo/dflop.yaml", "--only", "colocated=true"]);
    has(&said, "status: 0");
    train(&session, "demo/second", ["plan.json", "model_profile.json"], 0..6, 1.0);
    let said = session.dflop(&["report", "demo", "--run", "demo/second", "--against", "demo/run"]);
    has(&said, "status: 0");
    has(&said, "second against run:");
    has(&said, "The layout differs: ");
    has(&said, "The numbers are of 5 steps that trained the same samples in both");
    let page = fs::read_to_string(session.path("demo/report.html")).unwrap();
    assert_eq!(
        page.matches("\"other\":{").count(),
        5,
        "each common step is drawn with that of the other plan"
    );
    // The first run by itself shows its own plan, not the one that lies beside it now.
    has(&session.dflop(&["report", "demo"]), "status: 0");
    let page = fs::read_to_string(session.path("demo/report.html")).unwrap();
    has(&page, "The plan is <strong>encoder ");
    // Without the copy nothing says what its steps were trained with.
    fs::remove_file(session.path("demo/run/plan.0f1e2d3c4b5a.json")).unwrap();
    has(&session.dflop(&["report", "demo"]), "was made from another `plan`");
}

/// `dflop plan --from-run`, then `dflop train --resume auto` with what it wrote: one run of two plans.
#[test]
fn a_run_that_has_changed_its_plan_shows_both() {
    let session = with_run(1.5);
    let plan = ["plan", "-c", "demo/dflop.yaml", "--from-run", "demo/run", "--only", "colocated=false"];
    let said = session.dflop(&plan);
    has(&said, "status: 0");
    train(&session, "demo/run", ["plan.live.json", "model_profile.live.json"], 12..20, 1.0);
    let said = session.dflop(&["report", "demo"]);
    has(&said, "status: 0");
    has(&said, "plan.live.json against plan.json:");
    has(
        &said,
        "No two of these steps trained the same samples: means over 11 steps of plan.json and 7 steps of plan.live.json.",
    );
    // Held against a run of one plan, and of one step: what its means are of is said.
    train(&session, "demo/one", ["plan.json", "model_profile.json"], 0..1, 1.0);
    let other = session.dflop(&["report", "demo", "--against", "demo/one"]);
    has(&other, "Of 19 steps of run, 11 were trained with an earlier plan than the one that is named here.");
    has(
        &other,
        "The first step of run, in which ranks connect, is left out; that of one is not, which has 1 step.",
    );
    has(
        &other,
        "No two of these steps trained the same samples: means over 1 step of one and 19 steps of run.",
    );
    // The live plan knows that the LLM's ranks are slow, and its steps are as predicted.
    let error = row(&said, "prediction error, median");
    let percent = |cell: &str| cell.trim_end_matches(" %").parse::<f64>().unwrap();
    assert!(percent(error[1]) < 1.0 && percent(error[0]) > 30.0, "{said}");
    let page = fs::read_to_string(session.path("demo/report.html")).unwrap();
    has(&page, "Before and after the plan changed");
    has(&page, "the run was trained with 2 plans, 8 of its 20 steps with the last one");
    has(&page, "layout before (plan.json)");
    // Planned again from what it does now: the times are those since the change, and the plan that runs stays what it is.
    let before = fs::read(session.path("demo/plan.live.json")).unwrap();
    let said = session.dflop(&plan);
    has(&said, "status: 0");
    has(&said, "8 steps of `demo/run`, the last is step 19");
    has(&said, "LLM ranks take 1.000x (forward)");
    has(&said, "wrote demo/plan.live2.json");
    has(&said, "wrote demo/model_profile.live2.json");
    assert!(fs::read(session.path("demo/plan.live.json")).unwrap() == before);
    has(&session.dflop(&["report", "demo"]), "plan.live.json against plan.json:");
    // Of a plan that is gone the losses are shown, and nothing that would need the plan.
    fs::remove_file(session.path("demo/plan.live.json")).unwrap();
    let said = session.dflop(&["report", "demo"]);
    has(&said, "status: 0");
    has(
        &said,
        "8 steps of the run were trained with a plan that is not there any more: their losses are shown",
    );
    assert!(!said.contains("against plan.json"), "{said}");
}

/// The guide's way to go on elsewhere: another plan in the place of the first, then `dflop train --resume auto`.
#[test]
fn a_run_that_went_on_under_another_plan_is_reported() {
    let session = with_run(1.0);
    let said = session.dflop(&["plan", "-c", "demo/dflop.yaml", "--only", "colocated=true"]);
    has(&said, "status: 0");
    // No step of this plan yet: nothing to show, and the way on is named.
    let said = session.dflop(&["report", "demo"]);
    has(&said, "line 1 was made from another `plan`");
    has(&said, "go on with the one that is there: `dflop train --resume auto`");
    train(&session, "demo/run", ["plan.json", "model_profile.json"], 12..20, 1.0);
    let said = session.dflop(&["report", "demo"]);
    has(&said, "status: 0");
    has(&said, "12 steps of the run were trained with a plan that is not there any more");
    let page = fs::read_to_string(session.path("demo/report.html")).unwrap();
    has(&page, "12 steps of the run were trained with a plan that is not there any more");
    assert!(!page.contains("does not say with which plan"), "{page}");
    let said = session.dflop(&["plan", "-c", "demo/dflop.yaml", "--from-run", "demo/run"]);
    has(&said, "8 steps of `demo/run`, the last is step 19");
}
