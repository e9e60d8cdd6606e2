//! `dflop simulate --set`: what is refused before any search, and what rows say that have no plan.

use crate::common::Session;
use std::fs;

fn session() -> Session {
    let session = Session::new();
    let config = "model: {name: llava-onevision-qwen2-0.5b}\n\
                  data: {mixture: demo/data/mixture.yaml, video_max_frames: 16}\n\
                  cluster: {device: h100, num_ranks: 8}\n";
    fs::write(session.path("dflop.yaml"), config).unwrap();
    session
}

fn simulate(session: &Session, flags: &[&str]) -> String {
    session.dflop(&[&["simulate"][..], flags].concat())
}

/// The row of what the configuration has is the plan itself: the same global batches, the same step, the same memory.
#[test]
fn the_row_of_the_own_cluster_is_the_plan() {
    let session = session();
    let json = |said: String| -> serde_json::Value {
        let text = said.split("--- stdout\n").nth(1).and_then(|rest| rest.split("--- stderr").next());
        serde_json::from_str(text.unwrap_or_default()).unwrap_or_else(|error| panic!("{error}: {said}"))
    };
    let plan = json(session.dflop(&["plan", "--json"]));
    let rows = json(simulate(&session, &["--set", "cluster.num_ranks=8,9", "--json"]));
    assert_eq!(rows[0]["step_ms"], plan["plans"][0]["step_ms"]);
    assert_eq!(rows[0]["peak_bytes"], plan["plans"][0]["peak_bytes"]);
    assert_eq!(rows[0]["plan"]["layout"], plan["plans"][0]["layout"]);
    // A ninth rank has a node of its own: it is no multiple of the eight of a node.
    assert!(rows[1]["step_ms"].as_f64() > Some(0.0), "{rows}");
}

/// Nine ranks on nodes of eight: the plan is that of one node, says that a rank stays free, and what reads it takes it as made for
/// this cluster.
#[test]
fn a_plan_that_leaves_a_rank_free_is_the_plan_of_its_cluster() {
    let session = session();
    let config = fs::read_to_string(session.path("dflop.yaml")).unwrap();
    fs::write(session.path("dflop.yaml"), config.replace("num_ranks: 8", "num_ranks: 9")).unwrap();
    let said = session.dflop(&["plan", "--sampled-batches", "1"]);
    assert!(
        said.contains("status: 0") && said.contains("\n  ranks   8 of 9: the last is left free, "),
        "{said}"
    );
    assert!(
        said.contains(
            "note: 9 ranks are planned on 2 nodes of 8 (`cluster.ranks_per_node`); the last node has 1"
        ),
        "{said}"
    );
    assert!(
        said.contains("\nspeed: ") && said.contains(", MFU ") && said.contains("\nexposed communication: "),
        "{said}"
    );
    let json = session.dflop(&["plan", "--json", "--sampled-batches", "1"]);
    assert!(json.contains("\"num_ranks\": 8") && json.contains("\"num_free_ranks\": 1"), "{json}");
    let command = session.dflop(&["plan", "--emit", "torchrun", "--sampled-batches", "1"]);
    assert!(command.contains("torchrun --standalone --nproc-per-node 8 "), "{command}");
    assert!(command.contains(" --no-python dflop train --config 'dflop.yaml'\n"), "{command}");
    // What training would look for elsewhere is said.
    fs::copy(session.path("data_profile.parquet"), session.path("it's.parquet")).unwrap();
    let other = ["--data-profile", "it's.parquet", "-o", "other.json", "--emit"];
    let of =
        |launcher| session.dflop(&[&["plan", "--sampled-batches", "1"], &other[..], &[launcher]].concat());
    let command = of("slurm");
    let told = " dflop train --config 'dflop.yaml' --data-profile 'it'\\''s.parquet' --plan 'other.json'\n";
    assert!(command.contains(told), "{command}");
    let manifest = of("kubernetes");
    assert!(manifest.contains("- '--plan'\n            - 'other.json'\n"), "{manifest}");
    let simulated = session.dflop(&["simulate", "--steps", "1"]);
    assert!(simulated.contains("status: 0"), "{simulated}");
    // Another cluster's plan is refused as before.
    fs::write(session.path("dflop.yaml"), config.replace("num_ranks: 8", "num_ranks: 10, ranks_per_node: 5"))
        .unwrap();
    let refused = session.dflop(&["simulate", "--steps", "1"]);
    assert!(refused.contains("cluster.num_ranks: 9, now 10"), "{refused}");
}

/// Samples above a limit are left out and counted, and people are told that training does not cut them.
#[test]
fn samples_above_a_limit_are_counted() {
    let session = session();
    let said = simulate(&session, &["--set", "data.llm_tokens_max=500,100000", "--json"]);
    assert!(said.contains(" of 48 samples have more than 500 LLM tokens: rows with that limit are without them; `dflop train` cuts no sample"), "{said}");
    assert!(said.contains("\"num_samples_above\": 0") && !said.contains("more than 100,000"), "{said}");
    let said = simulate(&session, &["--set", "data.llm_tokens_max=1"]);
    assert!(
        said.contains("status: 2")
            && said.contains("`--set data.llm_tokens_max=1`: all 48 samples have more LLM tokens"),
        "{said}"
    );
}

/// A step takes no more samples than the data has, as under `dflop plan`, and as many a second.
#[test]
fn a_step_has_the_samples_that_are_left() {
    let session = session();
    let config = fs::read_to_string(session.path("dflop.yaml")).unwrap();
    fs::write(session.path("dflop.yaml"), format!("{config}train: {{global_batch_size: 60}}\n")).unwrap();
    let said = simulate(&session, &["--set", "cluster.ranks_per_node=8", "--json"]);
    assert!(
        said.contains("note: the data has 48 samples, fewer than `train.global_batch_size` 60"),
        "{said}"
    );
    assert!(said.contains("\"global_batch_size\": 60") && said.contains("\"samples\": 48"), "{said}");
    let number = |name: &str| {
        let (_, rest) = said.split_once(&format!("\"{name}\": ")).unwrap();
        rest.split([',', '\n']).next().unwrap().trim().parse::<f64>().unwrap()
    };
    assert!((number("samples_per_s") * number("step_ms") / 1e3 - 48.0).abs() < 1e-6, "{said}");
}

/// A budget beyond the device's memory is planned with, and told.
#[test]
fn a_budget_beyond_the_device_is_told() {
    let session = session();
    let config = fs::read_to_string(session.path("dflop.yaml")).unwrap();
    let plan = |budget: &str| {
        let asked = format!("num_ranks: 8, memory_budget_bytes: {budget}");
        fs::write(session.path("dflop.yaml"), config.replace("num_ranks: 8", &asked)).unwrap();
        session.dflop(&["plan", "--sampled-batches", "1"])
    };
    let told = "note: `cluster.memory_budget_bytes` is 186.26 GiB, more than the ";
    assert!(plan("200e9").contains(told));
    assert!(!plan("60e9").contains("more than the "));
}

/// Each is an error of the arguments that says its rule, and nothing is searched for the values before the wrong one.
#[test]
fn what_cannot_be_set_is_refused_before_the_first_search() {
    let session = session();
    for (set, expected) in [
        (&["cluster.num_ranks=8,8.0"][..], "the value 8.0 comes twice, must come once"),
        (&["cluster.num_ranks=8", "cluster.num_ranks=16"], "the field is named twice, must be once"),
        (&["cluster.device=a100,h100,nope"], "no hardware named `nope`"),
        (
            &["cluster.num_ranks=8,100001"],
            "`--set cluster.num_ranks=100001`: must be an integer from 1 to 100000",
        ),
        (&["cluster.ranks_per_node=8,0"], "must be an integer from 1 to 100000"),
        (&["cluster.ranks_per_node=8,9"], "must not exceed `cluster.num_ranks`, 8"),
        (&["cluster.memory_budget_bytes=8e10,1e16"], "must be an integer from 1 to 1125899906842624"),
        (&["train.global_batch_size=32,4294967295"], "must be an integer from 1 to 16777216"),
        (
            &["train.global_batch_size=32,1000000"],
            "`--set train.global_batch_size=1000000`: a step of 1,000,000 samples, at most 16,384 where the data has 48",
        ),
        (&["cluster.num_ranks=8,100000"], "`--set cluster.num_ranks=100000`: a step of 400,000 samples"),
        (&["train.num_microbatches=2,65537"], "must be an integer from 1 to 65536"),
        (&["train.bucket_tokens_max=1e5,2e12"], "must be an integer from 1 to 1099511627776"),
        (&["network.node_bytes_per_s=1e9,0"], "must be an integer from 1000000 to"),
        (&["train.recipe=full,some"], "recipe `some`, must be one of: full, "),
        (&["data.weights.video=0.1,1.5"], "must be from 0 to 1"),
        (
            &["data.weights.video=0.1", "data.weights.text=0.2,0.95"],
            "the parts add up to 1.05, must to 1 at most",
        ),
        (&["data.weights.audio=0,0.1"], "the data has no such sample"),
        (&["train.seed=1"], "is no field that can be set\n\nhint: fields: cluster.num_ranks"),
    ] {
        let flags: Vec<&str> = set.iter().flat_map(|set| ["--set", *set]).collect();
        let said = simulate(&session, &flags);
        let stdout = said.split("--- stdout\n").nth(1).unwrap();
        assert!(stdout.starts_with("--- stderr\n") && said.contains("status: 2"), "{said}");
        assert!(said.contains(expected), "{expected}: {said}");
    }
    // A place that cannot be written is told before the searches too.
    let said = simulate(&session, &["--set", "cluster.num_ranks=8", "--csv", "dflop.yaml"]);
    assert!(said.contains("status: 2") && said.contains("cannot write a table"), "{said}");
}

/// A row without a plan says why and leaves the others; where no row has one, that is the answer.
#[test]
fn a_row_without_a_plan_says_why() {
    let session = session();
    for (field, few, enough, reason) in [
        ("train.bucket_tokens_max", "100", "100000", "LLM tokens, `bucket_tokens_max` is 100 for a bucket"),
        ("cluster.memory_budget_bytes", "1", "80000000000", "memory budget is 1 bytes"),
    ] {
        let both = format!("{field}={few},{enough}");
        let said = simulate(&session, &["--set", &both, "--csv", "rows.csv"]);
        assert!(said.contains("status: 0"), "{said}");
        let text = fs::read_to_string(session.path("rows.csv")).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines.len() == 3 && lines[0].ends_with(",layout,reason"), "{text}");
        assert!(lines[1].starts_with(few) && lines[1].contains("no plan fits"), "{text}");
        assert!(lines[1].contains(reason), "{text}");
        assert!(lines[2].starts_with(enough) && lines[2].ends_with(','), "{text}");
        let said = simulate(&session, &["--set", &format!("{field}={few}")]);
        assert!(said.contains("status: 1") && said.contains("error: no plan fits: "), "{said}");
        assert!(said.matches(reason).count() == 2 && said.contains("\nhint: raise "), "{said}");
    }
}

/// Tests that search several times.
mod more {
    use super::*;

    /// The order in which `--set` names fields decides nothing. A rate that is set before the device is the rate of that device's links.
    #[test]
    #[ignore = "`make test-more` runs it"]
    fn the_order_of_settings_is_no_setting() {
        let session = session();
        let rate = ["--set", "network.node_bytes_per_s=1000000000"];
        let device = ["--set", "cluster.device=a100"];
        let step_ms = |flags: &[&[&str]]| {
            let said = simulate(&session, &[flags.concat().as_slice(), &["--json"]].concat());
            let line = said.lines().find(|line| line.contains("\"step_ms\"")).map(str::to_owned);
            line.unwrap_or_else(|| panic!("{said}"))
        };
        assert_eq!(step_ms(&[&rate, &device]), step_ms(&[&device, &rate]));
        assert_ne!(step_ms(&[&rate, &device]), step_ms(&[&device]));
    }
}
