//! A run's spans renew the profile and the plan, of the real binary.

use crate::common::Session;
use dflop_data::table;
use dflop_step::batches::GlobalBatches;
use dflop_step::{Arm, StepScheduler};
use dflop_types::{DataProfile, ModelProfile, Plan, artifact};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::fs;
use std::ops::Range;

/// A demo, planned, with a run of 12 steps on a machine whose LLM ranks take `times` of the profiled time.
pub(crate) fn with_run(times: f64) -> Session {
    let session = Session::planned();
    train(&session, "demo/run", ["plan.json", "model_profile.json"], 0..12, times);
    session
}

/// Adds steps to a run of a demo, as `dflop train` would write them: trained with the plan and the model profile of these names, on a
/// machine as told of [`with_run`].
pub(crate) fn train(session: &Session, run: &str, files: [&str; 2], steps: Range<u64>, times: f64) {
    let [plan, model] = files.map(|name| session.path("demo").join(name));
    let plan: Plan = artifact::read(&plan).unwrap();
    let model: ModelProfile = artifact::read(&model).unwrap();
    let data: DataProfile = table::read(&session.path("demo/data_profile.parquet")).unwrap();
    let scheduler = StepScheduler::of_plan(&plan, &data, &model, None, plan.seed).unwrap();
    let batches = GlobalBatches::new(data.samples.len() as u32, plan.global_batch_size, plan.seed).unwrap();
    let made_from = json!({"plan": artifact::hash_of(&plan), "data_profile": data.content_hash()});
    let (mut logged, mut traces, mut metrics) = (String::new(), String::new(), String::new());
    for step in steps {
        let samples = batches.batch(step);
        let schedule = scheduler.schedule(step, &samples, Arm::AWARE).unwrap();
        let mut measured = scheduler.simulate(&schedule).unwrap();
        // The same order of actions on a slower machine: all its times are longer, LLM ranks' work as told.
        for span in &mut measured.spans {
            let longer = if span.rank.0 < plan.best.layout.encoder.num_ranks() { 1.0 } else { times };
            let start_ns = (span.start_ns as f64 * times) as u64;
            *span = dflop_types::Span {
                start_ns,
                end_ns: start_ns + (span.duration_ns() as f64 * longer) as u64,
                ..*span
            };
        }
        let end_ns = measured.spans.iter().map(|span| span.end_ns).max().unwrap();
        let spans: Vec<Value> = measured
            .spans
            .iter()
            .map(|s| json!([s.rank.0, s.action.to_string(), s.start_ns, s.end_ns]))
            .collect();
        let turn = json!({"step": step, "arm": "aware", "made_from": made_from, "samples": samples, "schedule": schedule});
        writeln!(logged, "{turn}").unwrap();
        writeln!(traces, "{}", json!({"step": step, "arm": "aware", "makespan_ns": end_ns, "spans": spans}))
            .unwrap();
        let line = json!({"step": step, "arm": "aware", "loss": 1.0, "step_ns": end_ns,
                          "predicted_ns": schedule.predicted_makespan_ns, "bubble_ratio": 0.5});
        writeln!(metrics, "{line}").unwrap();
    }
    fs::create_dir_all(session.path(run)).unwrap();
    for (name, text) in [("schedules", logged), ("trace", traces), ("metrics", metrics)] {
        let path = session.path(format!("{run}/{name}.jsonl"));
        let before = fs::read_to_string(&path).unwrap_or_default();
        fs::write(path, before + &text).unwrap();
    }
}

#[test]
fn a_plan_from_a_run_takes_its_times_and_says_what_a_change_gains() {
    let session = with_run(1.5);
    let files = ["demo/plan.json", "demo/model_profile.json"];
    let read = || files.map(|name| fs::read(session.path(name)).unwrap());
    let before = read();
    let said = session.dflop(&["plan", "-c", "demo/dflop.yaml", "--from-run", "demo/run", "--json"]);
    assert!(said.contains("status: 0"), "{said}");
    let text = said.split("--- stdout\n").nth(1).unwrap().split("--- stderr").next().unwrap();
    let answer: Value = serde_json::from_str(text).unwrap();
    let near = |value: &Value, truth: f64| (value.as_f64().unwrap() / truth - 1.0).abs() < 0.02;
    assert!(near(&answer["from_run"]["llm"]["forward"], 1.5), "{}", answer["from_run"]);
    assert!(near(&answer["from_run"]["encoder"]["backward"], 1.0), "{}", answer["from_run"]);
    let change = &answer["change"];
    // By hand: what a step saves, over the steps left, less an assumed minute.
    let saved_ns = change["step_ns"].as_f64().unwrap() - change["best_step_ns"].as_f64().unwrap();
    let net = saved_ns / 1e9 * change["steps_left"].as_f64().unwrap() - 60.0;
    let is_same = change["is_same"].as_bool().unwrap();
    assert!(is_same || (change["net_seconds"].as_f64().unwrap() - net).abs() < 1e-6, "{change}");
    assert!(saved_ns >= 0.0 && change["steps_left"] == 12, "{change}");
    assert!(read() == before, "the run's own plan or profile was replaced");
    let plan: Plan = artifact::read(&session.path("demo/plan.live.json")).unwrap();
    let profile: ModelProfile = artifact::read(&session.path("demo/model_profile.live.json")).unwrap();
    assert_eq!(plan.made_from["model_profile"], artifact::hash_of(&profile));
    let renewal = profile.renewed.unwrap();
    assert_eq!((renewal.num_steps, renewal.last_step, renewal.llm.forward_permille), (12, 11, 1_500));
    let said =
        session.dflop(&["plan", "-c", "demo/dflop.yaml", "--from-run", "demo/run", "--restart-seconds", "5"]);
    assert!(said.contains("LLM ranks take 1.500x (forward)"), "{said}");
    assert!(said.contains("stays the best") || said.contains("5 s for a restart:"), "{said}");
}

#[test]
fn a_renewed_profile_says_so_and_a_foreign_run_is_refused() {
    let session = with_run(1.25);
    let renew = ["profile", "model", "-c", "demo/dflop.yaml", "--from-run", "demo/run"];
    let said = session.dflop(&renew);
    assert!(said.contains("status: 0") && said.contains("wrote demo/model_profile.live.json"), "{said}");
    let shown = session.dflop(&["show", "demo/model_profile.live.json"]);
    let note =
        "note: renewed by 12 steps of a run, the last is step 11: the encoder's times are 1.000x (forward)";
    assert!(shown.contains(note), "{shown}");
    session.edit("demo/run/schedules.jsonl", |text| text.replace("sha256:", "sha256:0"));
    let said = session.dflop(&renew);
    assert!(said.contains("status: 2") && said.contains("was made from another `data_profile`"), "{said}");
    fs::remove_file(session.path("demo/run/trace.jsonl")).unwrap();
    fs::remove_file(session.path("demo/run/schedules.jsonl")).unwrap();
    let said = session.dflop(&renew);
    assert!(said.contains("`demo/run` holds 0 measured steps, must be at least 4"), "{said}");
}

/// Two arms that ran the same 12 steps are 24 measurements, not 24 steps of which the last is step 11.
#[test]
fn a_comparison_says_that_its_arms_ran_the_same_steps() {
    let session = with_run(1.25);
    for log in ["schedules.jsonl", "trace.jsonl", "metrics.jsonl"] {
        session.edit(&format!("demo/run/{log}"), |text| {
            let other = text.replace(r#""arm":"aware""#, r#""arm":"blind""#);
            assert_ne!(text, other);
            text + &other
        });
    }
    let said = session.dflop(&["plan", "-c", "demo/dflop.yaml", "--from-run", "demo/run"]);
    let expected = "24 measured steps of `demo/run`, a comparison: 2 arms run the same steps, up to step 11: against the profile";
    assert!(said.contains("status: 0") && said.contains(expected), "{said}");
    let shown = session.dflop(&["show", "demo/model_profile.live.json"]);
    assert!(shown.contains("renewed by 24 measured steps of a comparison, the last is step 11:"), "{shown}");
}

/// A plan that a run beside it needs is not replaced without a word; the same plan again is no other.
#[test]
fn a_plan_that_a_run_has_is_replaced_with_a_note() {
    let session = with_run(1.0);
    let note = "note: `demo/run` was trained with the plan that is now replaced in `demo/plan.json`";
    for (only, is_replaced) in
        [("colocated=false", false), ("colocated=true", true), ("colocated=false", false)]
    {
        let said = session.dflop(&["plan", "-c", "demo/dflop.yaml", "--only", only]);
        assert!(said.contains("status: 0"), "{said}");
        assert_eq!(said.contains(note), is_replaced, "{said}");
    }
    let said = session.dflop(&[
        "plan",
        "-c",
        "demo/dflop.yaml",
        "--only",
        "colocated=true",
        "--out",
        "demo/other.json",
    ]);
    assert!(said.contains("status: 0") && !said.contains("replaced"), "{said}");
    // A run that has a copy of its plan needs none beside it.
    fs::copy(session.path("demo/plan.json"), session.path("demo/run/plan.0f1e2d3c4b5a.json")).unwrap();
    let said = session.dflop(&["plan", "-c", "demo/dflop.yaml", "--only", "colocated=true"]);
    assert!(said.contains("status: 0") && !said.contains("replaced"), "{said}");
}

/// Errors of predictions that are for another device are not shown without saying so.
#[test]
fn a_report_says_that_the_steps_ran_on_another_device() {
    let session = with_run(1.0);
    let words = "The steps ran on another device, `cuda`, than their predictions are for";
    for (device, is_other) in [("cpu", false), ("cuda", true)] {
        let request = json!({"config": {"cluster": {"device": device}}}).to_string();
        fs::write(session.path("demo/run/request.json"), request).unwrap();
        let said = session.dflop(&["report", "demo"]);
        assert!(said.contains("status: 0"), "{said}");
        assert_eq!(said.contains(words), is_other, "{said}");
        let page = fs::read_to_string(session.path("demo/report.html")).unwrap();
        assert_eq!(page.contains("The steps ran on another device, "), is_other);
    }
}

/// A cost that no longer is a number is refused by its price.
#[test]
fn a_price_has_a_limit() {
    let session = Session::new();
    for price in ["1e308", "1000001", "inf", "0"] {
        let said = session.dflop(&["plan", "--samples", "1000", "--price-per-gpu-hour", price]);
        assert!(
            said.contains("status: 2") && said.contains("must be a number above 0, at most 1000000"),
            "{said}"
        );
    }
}

/// A run keeps copies of its plan and model profile; what stands beside the configuration may be changed, moved or gone.
#[test]
fn a_run_is_planned_from_its_own_copy_of_its_plan() {
    let session = with_run(1.5);
    let run = session.path("demo/run");
    let copy = |mark: &str| {
        for of in ["plan", "model_profile"] {
            let from = session.path(format!("demo/{of}.json"));
            fs::copy(from, run.join(format!("{of}.{mark}.json"))).unwrap();
        }
    };
    copy("0f1e2d3c4b5a");
    let ask = || session.dflop(&["plan", "-c", "demo/dflop.yaml", "--from-run", "demo/run"]);
    let said = ask();
    assert!(said.contains("status: 0") && !said.contains("its own copy"), "{said}");
    // Another plan is made in its place, of another layout, and of a model profile that was measured again.
    session.edit("demo/model_profile.json", |text| {
        let mut profile: Value = serde_json::from_str(&text).unwrap();
        profile["device"]["torch"] = "a later one".into();
        profile.to_string()
    });
    let made = session.dflop(&["plan", "-c", "demo/dflop.yaml", "--only", "colocated=true"]);
    assert!(made.contains("status: 0"), "{made}");
    let said = ask();
    let its = "its plan is read from its own copy, `demo/run/plan.0f1e2d3c4b5a.json`";
    assert!(said.contains("status: 0") && said.contains(its), "{said}");
    assert!(said.contains("12 steps of `demo/run`") && said.contains("LLM ranks take 1.500x"), "{said}");
    // Moved away altogether.
    fs::rename(session.path("demo/plan.json"), session.path("demo/elsewhere.json")).unwrap();
    let said = ask();
    assert!(said.contains("status: 0") && said.contains(its), "{said}");
    // It goes on under the other plan: its steps since then are what it really runs.
    fs::rename(session.path("demo/elsewhere.json"), session.path("demo/plan.json")).unwrap();
    train(&session, "demo/run", ["plan.json", "model_profile.json"], 12..20, 1.0);
    copy("aaaabbbbcccc");
    fs::remove_file(session.path("demo/plan.json")).unwrap();
    let said = ask();
    assert!(said.contains("8 steps of `demo/run`, the last is step 19"), "{said}");
    assert!(said.contains("its own copy, `demo/run/plan.aaaabbbbcccc.json`"), "{said}");
    // Without the copy nothing says what its last steps were planned as.
    fs::remove_file(run.join("plan.aaaabbbbcccc.json")).unwrap();
    fs::remove_file(run.join("plan.0f1e2d3c4b5a.json")).unwrap();
    let said = ask();
    assert!(said.contains("status: 2"), "{said}");
}
