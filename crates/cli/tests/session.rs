//! What people see: whole outputs of the real binary.

// `allow-unwrap-in-tests` knows test functions, not what they share.
#![allow(clippy::unwrap_used)]

use crate::common::{Session, snapshot};
use crate::from_run::with_run;
use std::fs;
use std::path::Path;

#[test]
fn help() {
    let session = Session { directory: tempfile::tempdir().unwrap() };
    let mut pages = String::new();
    for verb in [
        &["--help"][..],
        &["demo-data", "--help"],
        &["profile", "--help"],
        &["profile", "data", "--help"],
        &["profile", "model", "--help"],
        &["profile", "merge", "--help"],
        &["profile", "diff", "--help"],
        &["plan", "--help"],
        &["simulate", "--help"],
        &["schedule", "--help"],
        &["costs", "--help"],
        &["advise", "--help"],
        &["train", "--help"],
        &["rehearse", "--help"],
        &["report", "--help"],
        &["models", "--help"],
        &["show", "--help"],
        &["probe", "--help"],
    ] {
        pages.push_str(&session.dflop(verb));
        pages.push('\n');
    }
    snapshot("help", &pages);
}

/// No PyTorch, no configuration, no weights: a profile for a device that is not at hand.
#[test]
fn estimate() {
    let session = Session { directory: tempfile::tempdir().unwrap() };
    let mut said = String::new();
    for arguments in [
        &["profile", "model", "--estimate", "--hardware", "h100", "--model", "qwen2.5-vl-7b"][..],
        &["profile", "model", "--estimate", "--model", "qwen2.5-vl-7b"],
        &["profile", "model", "--estimate", "--hardware", "h1000", "--model", "qwen2.5-vl-7b"],
        &["profile", "model", "--estimate", "--hardware", "h100", "--model", "qwen2.5-vl-8b"],
        &["profile", "model", "--hardware", "h100"],
        &["models"],
    ] {
        said.push_str(&session.dflop(arguments));
        said.push('\n');
    }
    snapshot("estimate", &said);
}

/// A plan with both components on every rank, as a person may write it: simulated, shown and reported in words.
#[test]
fn a_colocated_plan_is_simulated_shown_and_reported() {
    let session = Session::measured();
    let made = session.dflop(&["plan", "-c", "demo/dflop.yaml"]);
    assert!(made.contains("status: 0"), "{made}");
    for (zero, words) in [
        (0, "nothing sharded"),
        (2, "optimizer states and gradients sharded"),
        (3, "optimizer states, gradients and parameters sharded"),
    ] {
        session.edit("demo/plan.json", |text| {
            let mut plan: serde_json::Value = serde_json::from_str(&text).unwrap();
            let degrees = serde_json::json!({
                "tensor_parallel_degree": 1, "pipeline_parallel_degree": 1, "data_parallel_degree": 2
            });
            plan["best"]["layout"] = serde_json::json!({
                "encoder": degrees, "llm": degrees, "placement": "colocated", "zero": zero
            });
            plan.to_string()
        });
        let said = session.dflop(&["simulate", "-c", "demo/dflop.yaml", "--steps", "2"]);
        assert!(said.contains("status: 0") && said.contains("colocated tp 1 dp 2"), "{said}");
        assert!(said.contains(words) && said.contains("a rank\n"), "{said}");
        assert!(said.contains("\naware  ") && !said.contains("-ahead"), "{said}");
        let shown = session.dflop(&["show", "plan", "-c", "demo/dflop.yaml"]);
        assert!(shown.contains("status: 0") && shown.contains("colocated"), "{shown}");
        let reported = session.dflop(&["report", "demo"]);
        assert!(reported.contains("status: 0"), "{reported}");
        let page = fs::read_to_string(session.path("demo/report.html")).unwrap();
        assert!(page.contains("colocated tp 1 dp 2") && page.contains("on the same ranks"));
    }
    // Why a step was slow: of a rank that holds both, the component that an action is of.
    crate::from_run::train(&session, "demo/run", ["plan.json", "model_profile.json"], 0..3, 1.5);
    let reported = session.dflop(&["report", "demo"]);
    assert!(reported.contains("status: 0"), "{reported}");
    let page = fs::read_to_string(session.path("demo/report.html")).unwrap();
    let slow = page.split("<section id=\"slow\"").nth(1).unwrap().split("</section>").next().unwrap();
    assert!(slow.contains("(encoder, replica ") || slow.contains("(LLM, replica "), "{slow}");
    assert!(!slow.contains("(stage ") && slow.contains("waited most for rank "), "{slow}");
}

/// Whoever plans with an estimate is told so, wherever its numbers are shown.
#[test]
fn what_follows_from_an_estimate_is_marked() {
    let session = Session::new();
    session.profile_data();
    session.edit("demo/dflop.yaml", |text| text.replace("device: cpu", "device: cuda"));
    let estimate = ["profile", "model", "-c", "demo/dflop.yaml", "--estimate", "--hardware", "h200"];
    let made = session.dflop(&estimate);
    assert!(made.contains("status: 0") && made.contains("times are estimated, not measured"), "{made}");
    for verb in ["plan", "simulate"] {
        let said = session.dflop(&[verb, "-c", "demo/dflop.yaml"]);
        assert!(said.contains("status: 0") && said.contains("estimated, not measured"), "{said}");
    }
    // Whose memory is the budget, without one.
    let said = session.dflop(&["plan", "-c", "demo/dflop.yaml", "--only", "colocated=false"]);
    assert!(
        said.contains("memory budget 124.75 GiB: 95.0 % of the device's memory, as none is set"),
        "{said}"
    );
    let said = session.dflop(&["report", "demo"]);
    assert!(said.contains("status: 0"), "{said}");
    let page = fs::read_to_string(session.path("demo/report.html")).unwrap();
    assert!(page.contains("<li>estimated, not measured: times and bytes come from the analytic model</li>"));
    assert!(page.contains("The model, estimated") && page.matches("Estimated, not measured:").count() >= 2);
    // A model of the catalogue is not the one in `model.dir`.
    let other = session.dflop(&[&estimate[..], &["--model", "qwen2-vl-2b"]].concat());
    assert!(other.contains("`model.dir` holds another model than `qwen2-vl-2b`"), "{other}");
    let said = session.dflop(&["plan", "-c", "demo/dflop.yaml", "--only", "colocated=false"]);
    assert!(said.contains("status: 2") && said.contains("model_config"), "{said}");
}

#[test]
fn summaries() {
    let session = Session { directory: tempfile::tempdir().unwrap() };
    snapshot("demo_data", &session.dflop(&["demo-data", "demo", "--samples", "48"]));
    snapshot("profile_data", &session.dflop(&["profile", "data", "-c", "demo/dflop.yaml"]));
    session.record_model_profile();
    snapshot("plan", &session.dflop(&["plan", "-c", "demo/dflop.yaml", "--only", "colocated=false"]));
    snapshot("simulate", &session.dflop(&["simulate", "-c", "demo/dflop.yaml", "--steps", "3"]));
    snapshot("report", &session.dflop(&["report", "demo"]));
    fs::write(
        session.path("durations.json"),
        r#"{"forward_ns": [[2,2,2],[2,2,2]], "backward_ns": [[4,4,4],[4,4,4]], "transfer_ns": 0}"#,
    )
    .unwrap();
    let media = ["demo/data/media/demo_0000_1.jpg", "demo/data/mixture.yaml"];
    snapshot("probe", &session.dflop(&[&["probe", "--family", "llava_onevision"], &media[..]].concat()));
    let simulate = ["simulate", "--durations", "durations.json", "--order", "1f1b", "--json"];
    snapshot("simulate_json", &session.dflop(&simulate));
    let orders = |text: &mut String| {
        for order in [
            &["gpipe"][..],
            &["1f1b"],
            &["interleaved-1f1b", "--ranks", "1"],
            &["zero-bubble"],
            &["data-aware"],
        ] {
            let simulate = ["simulate", "--durations", "durations.json", "--order"];
            text.push_str(&session.dflop(&[&simulate[..], order].concat()));
        }
    };
    let mut text = String::new();
    orders(&mut text);
    // Milliseconds, and with times of I and W.
    let ms = |ns: u64| format!("[{0}, {0}, {0}]", ns * 1_000_000);
    let rows = |ns| format!("[{}, {}]", ms(ns), ms(ns));
    let fields = [("forward_ns", 2), ("backward_ns", 4), ("input_ns", 2), ("weight_ns", 2)];
    let fields = fields.map(|(name, ns)| format!("\"{name}\": {}, ", rows(ns))).concat();
    fs::write(session.path("durations.json"), format!("{{{fields}\"transfer_ns\": 0}}")).unwrap();
    orders(&mut text);
    for wrong in [&["interleaved-1f1b"][..], &["interleaved-1f1b", "--ranks", "3"], &["1f1b", "--ranks", "1"]]
    {
        let simulate = ["simulate", "--durations", "durations.json", "--order"];
        text.push_str(&session.dflop(&[&simulate[..], wrong].concat()));
    }
    snapshot("simulate_orders", &text);
    snapshot(
        "train_without_python",
        &session.dflop(&["train", "-c", "demo/dflop.yaml", "--oversubscribe", "--other-device"]),
    );
}

/// A profile against itself, then against one of fewer videos; a whole is no part.
#[test]
fn profile_diff_and_merge() {
    let session = Session::new();
    session.profile_data();
    let before = "demo/data_profile.parquet";
    let mut text = session.dflop(&["profile", "diff", before, before]);
    session.edit("demo/data/mixture.yaml", |yaml| {
        yaml.replacen("sampling_strategy: all", "sampling_strategy: first:8", 1)
    });
    let made = session.dflop(&["profile", "data", "-c", "demo/dflop.yaml", "--out", "after.parquet"]);
    assert!(made.contains("status: 0"), "{made}");
    text.push_str(&session.dflop(&["profile", "diff", before, "after.parquet"]));
    text.push_str(&session.dflop(&["profile", "merge", before, "after.parquet", "--out", "whole.parquet"]));
    text.push_str(&session.dflop(&["profile", "diff", before, "none.parquet"]));
    assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
    assert!(!session.path("whole.parquet").exists());
    snapshot("profile_diff_and_merge", &text);
    let json = session.dflop(&["profile", "diff", before, before, "--json"]);
    assert!(json.contains("status: 0") && json.contains("\"drifted\": false"), "{json}");
}

#[test]
fn show() {
    let session = Session::planned();
    let mut text = String::new();
    for artifact in ["model_profile", "plan", "data_profile"] {
        text.push_str(&session.dflop(&["show", artifact, "-c", "demo/dflop.yaml"]));
        text.push('\n');
        let json = session.dflop(&["show", artifact, "-c", "demo/dflop.yaml", "--json"]);
        assert!(json.contains(&format!("\"dflop\": \"{artifact}\"")), "{json}");
    }
    snapshot("show", &text);
}

#[test]
fn show_of_what_is_no_artifact() {
    let session = Session { directory: tempfile::tempdir().unwrap() };
    fs::write(session.path("notes.json"), "[1, 2]").unwrap();
    fs::write(session.path("other.json"), "{\"dflop\": \"schedule\"}").unwrap();
    let mut text = String::new();
    for file in ["notes.json", "other.json", "missing.json", "model_profile.json"] {
        text.push_str(&session.dflop(&["show", file]));
        text.push('\n');
    }
    snapshot("show_of_what_is_no_artifact", &text);
}

#[test]
fn a_profile_with_everything_is_shown_with_its_marks() {
    let session = Session::new();
    session.profile_data();
    let text = fs::read_to_string(
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/profiles/demo_cpu.json"),
    )
    .unwrap();
    let mut profile: serde_json::Value = serde_json::from_str(&text).unwrap();
    profile["is_estimated"] = true.into();
    profile["network"]["is_assumed"] = true.into();
    profile["memory"] = serde_json::json!({"context_bytes": 512 << 20, "allocator_overhead_permille": 35});
    let layer = &mut profile["modules"]["llm_layer"];
    layer["linear"]["out_of_memory_at"] = 8192.into();
    layer["recompute"] = serde_json::json!({
        "selective": [{"size": 2048, "extra_ns": 409_600, "activation_bytes": 4_194_304}],
        "full": [{"size": 2048, "extra_ns": 6_144_000, "activation_bytes": 524_288}],
    });
    let cut = serde_json::json!({"llm_layer": layer.clone()});
    profile["variants"] = serde_json::json!([
        {"tensor_parallel_degree": 2, "lora_rank": 0, "has_collectives": false, "modules": cut},
        {"tensor_parallel_degree": 1, "lora_rank": 16, "has_collectives": false, "modules": cut},
        {"tensor_parallel_degree": 4, "lora_rank": 0, "has_collectives": true, "modules": cut},
    ]);
    let link = |collective, span, num_ranks: u32, points: &[(u64, u64)]| {
        let points: Vec<_> = points.iter().map(|(b, ns)| serde_json::json!({"bytes": b, "ns": ns})).collect();
        serde_json::json!({"collective": collective, "span": span, "num_ranks": num_ranks, "latency_ns": 12_345,
            "bandwidth_bytes_per_s": 45_600_000_000_u64, "points": points})
    };
    profile["network"]["links"] = serde_json::json!([
        link("point_to_point", "node", 2, &[(1 << 10, 12_400), (64 << 20, 1_500_000)]),
        link("all_reduce", "cluster", 16, &[]),
    ]);
    fs::write(session.path("demo/model_profile.json"), profile.to_string()).unwrap();
    let mut text = session.dflop(&["show", "demo/model_profile.json"]);
    let planned = session.dflop(&["plan", "-c", "demo/dflop.yaml", "--only", "colocated=false"]);
    assert!(planned.contains("estimated, not measured"), "{planned}");
    let json = session.dflop(&["show", "demo/model_profile.json", "--json"]);
    assert!(json.contains("\"repairs\": ["), "{json}");
    text = text.replace("  ", " ");
    snapshot("show_everything", &text);
}

#[test]
fn a_profile_of_another_device_plans_but_does_not_train() {
    let session = Session::measured();
    session.set_device("cuda", "NVIDIA H200");
    let mut text = session.dflop(&["plan", "-c", "demo/dflop.yaml", "--only", "colocated=false"]);
    text.push_str(&session.dflop(&["train", "-c", "demo/dflop.yaml"]));
    session.record_model_profile();
    session.set_device("cpu", "A Far Machine");
    let far = session.dflop(&["train", "-c", "demo/dflop.yaml"]);
    // Systems that do not name their processor have nothing to compare.
    if fs::read_to_string("/proc/cpuinfo").is_ok_and(|text| text.contains("model name")) {
        assert!(far.contains("is of another device: A Far Machine, this machine has "), "{far}");
        assert!(far.contains("`--other-device`"), "{far}");
    }
    snapshot("error_other_device", &text);
}

#[test]
fn the_links_of_a_profile_of_another_model_are_not_replaced() {
    let session = Session::measured();
    let network = ["profile", "model", "-c", "demo/dflop.yaml", "--network"];
    let text = session.dflop(&network);
    assert!(text.contains("needs PyTorch"), "{text}");
    session.set_device("cuda", "NVIDIA H200");
    let text = session.dflop(&network);
    assert!(text.contains("cluster.device: cuda, now cpu"), "{text}");
    session.record_model_profile();
    session.edit("demo/model/config.json", |json| json.replace("\"model_type\"", " \"model_type\""));
    let text = session.dflop(&network);
    assert!(text.contains("was made from another `model_config`"), "{text}");
}

#[test]
fn a_second_write_leaves_no_litter_and_the_same_bytes() {
    let session = Session::new();
    session.profile_data();
    let first = fs::read(session.path("demo/data_profile.parquet")).unwrap();
    session.profile_data();
    assert_eq!(first, fs::read(session.path("demo/data_profile.parquet")).unwrap());
    let litter: Vec<_> = fs::read_dir(session.path("demo"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.contains("tmp"))
        .collect();
    assert_eq!(litter, Vec::<String>::new());
}

/// A second run measures what changed alone, unless it is told otherwise.
#[test]
fn a_second_profile_takes_over_what_has_not_changed() {
    let session = Session::new();
    session.profile_data();
    let again =
        |flags: &[&str]| session.dflop(&[&["profile", "data", "-c", "demo/dflop.yaml"], flags].concat());
    let text = again(&[]);
    assert!(text.contains("48 of 48 samples are as in the earlier profile"), "{text}");
    let text = again(&["--fresh"]);
    assert!(text.contains("status: 0") && !text.contains("earlier profile"), "{text}");
    session.edit("demo/data/images.jsonl", |text| format!("{}\n{text}", text.lines().last().unwrap()));
    let text = again(&[]);
    // The line is there twice, and says the same.
    assert!(text.contains("49 of 49 samples are as in the earlier profile"), "{text}");
}

/// A random sample is good for a plan, a part for nothing but the merge.
#[test]
fn samples_and_parts_say_what_they_are() {
    let session = Session::new();
    session.record_model_profile();
    let profile =
        |flags: &[&str]| session.dflop(&[&["profile", "data", "-c", "demo/dflop.yaml"], flags].concat());
    let text = profile(&["--sample", "24"]);
    assert!(text.contains("a random sample of 24 of 48 samples"), "{text}");
    let text = session.dflop(&["plan", "-c", "demo/dflop.yaml", "--only", "colocated=false"]);
    assert!(text.contains("status: 0") && text.contains("planned with a random sample: 24 of 48"), "{text}");
    let text = session.dflop(&["train", "-c", "demo/dflop.yaml", "--oversubscribe", "--other-device"]);
    assert!(text.contains("status: 2") && text.contains("without `--sample`"), "{text}");

    let out = ["--out", "demo/part.parquet"];
    let text = profile(&[&["--shard", "1/2"], out.as_slice()].concat());
    assert!(text.contains("part 1 of 2, counted from 0"), "{text}");
    for verb in ["plan", "train"] {
        let text = session.dflop(&[verb, "-c", "demo/dflop.yaml", "--data-profile", "demo/part.parquet"]);
        assert!(text.contains("status: 2") && text.contains("`dflop profile merge`"), "{text}");
    }
    for (shard, rule) in [("2/2", "as in 0/8"), ("x", "as in 0/8"), ("0/0", "as in 0/8")] {
        let text = profile(&["--shard", shard]);
        assert!(text.contains("status: 2") && text.contains(rule), "{text}");
    }
    let text = profile(&["--shard", "0/2", "--sample", "3"]);
    assert!(text.contains("status: 2") && text.contains("cannot be used with"), "{text}");
}

/// Whoever looks at data first writes two sections; the others are asked for when they are needed.
#[test]
fn data_is_profiled_without_cluster_and_train() {
    let session = Session::new();
    let model_and_data = "model: {dir: model}\ndata: {mixture: data/mixture.yaml}\n";
    fs::write(session.path("demo/dflop.yaml"), model_and_data).unwrap();
    session.profile_data();
    let said = session.dflop(&["plan", "-c", "demo/dflop.yaml", "--only", "colocated=false"]);
    // A plan asks for no section `train`; there is none without a cluster.
    assert!(said.contains("cluster.num_ranks: is missing") && !said.contains("train."), "{said}");
}

/// What plans also rehearses: no field of `train` that decides no plan is asked for.
#[test]
fn a_plan_is_rehearsed_without_train() {
    let session = Session::new();
    let sections = "model: {dir: model}\ndata: {mixture: data/mixture.yaml}\ncluster: {num_ranks: 2}\n";
    fs::write(session.path("demo/dflop.yaml"), sections).unwrap();
    session.profile_data();
    session.record_model_profile();
    let config = ["-c", "demo/dflop.yaml"];
    let said = session.dflop(&[&["plan"][..], &config].concat());
    assert!(said.contains("status: 0"), "{said}");
    // Nothing is missing but Python.
    let said = session.dflop(&[&["rehearse", "--steps", "2"][..], &config].concat());
    assert!(said.contains("error: `dflop rehearse` needs PyTorch"), "{said}");
    let said = session.dflop(&[&["train", "--steps", "2"][..], &config].concat());
    assert!(said.contains("train.steps: is missing"), "{said}");
}

/// The files of a model that is not at hand: times can be estimated from them, and sizes with a tokenizer beside them.
#[test]
fn a_model_of_the_catalogue_has_files() {
    let session = Session::new();
    let mut text = session.dflop(&["models", "--write", "qwen2-vl-2b", "qwen"]);
    text.push_str(&session.dflop(&["models", "--write", "internvl3-8b", "internvl"]));
    text.push_str(&session.dflop(&["models", "--write", "qwen2-vl-2b", "qwen"]));
    text.push_str(&session.dflop(&["models", "--write", "qwen2-vl-3b", "other"]));
    snapshot("models_write", &text);
    // The demo's data with this model and the demo's tokenizer: of the model's own files nothing is missing but the template.
    fs::copy(session.path("demo/model/tokenizer.json"), session.path("qwen/tokenizer.json")).unwrap();
    session.edit("demo/dflop.yaml", |yaml| yaml.replace("dir: model", "dir: ../qwen"));
    let config = ["-c", "demo/dflop.yaml"];
    let estimate = ["profile", "model", "--estimate", "--hardware", "h100"];
    let said = session.dflop(&[&estimate[..], &config].concat());
    assert!(said.contains("status: 0"), "{said}");
    let said = session.dflop(&[&["profile", "data"][..], &config].concat());
    assert!(said.contains("error: `demo/../qwen` has no chat template"), "{said}");
}

/// A trace has the steps that are asked for, and no others. Where no step lies in the range, the error names the first and the last.
#[test]
fn a_trace_has_the_steps_that_are_asked_for() {
    let session = with_run(1.0);
    let trace = |steps: &str| {
        session.dflop(&["report", "demo", "--trace", "demo/trace.json", "--trace-steps", steps])
    };
    let said = trace("3..5");
    assert!(said.contains("status: 0"), "{said}");
    let text = fs::read_to_string(session.path("demo/trace.json")).unwrap();
    let has = |step: u64| text.contains(&format!("\"step {step} aware measured\""));
    assert_eq!((0..12).filter(|&step| has(step)).collect::<Vec<u64>>(), [3, 4, 5]);
    session.rehearse_the_run();
    assert!(trace("3..3").contains("status: 0"));
    let text = fs::read_to_string(session.path("demo/trace.json")).unwrap();
    assert!(text.contains("\"step 3 aware rehearsed\"") && !text.contains("aware measured"), "{text}");
    let said = trace("12..20");
    assert!(
        said.contains("status: 2")
            && said.contains("`--trace-steps 12..20` holds no step of the run: the first is 0, the last 11"),
        "{said}"
    );
    let said = trace("5..3");
    assert!(said.contains("must be FIRST..LAST, as in 400..420"), "{said}");
}
