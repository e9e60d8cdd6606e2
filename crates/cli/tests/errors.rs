//! The errors people are most likely to meet, whole, of the real binary.

// `allow-unwrap-in-tests` knows test functions, not what they share.
#![allow(clippy::unwrap_used)]

use crate::common::{Session, snapshot};
use crate::from_run::with_run;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

#[test]
fn error_missing_file() {
    let session = Session { directory: tempfile::tempdir().unwrap() };
    let mut text = session.dflop(&["profile", "data"]);
    text.push_str(&session.dflop(&["schedule", "--costs", "none.csv", "--buckets", "2"]));
    text.push_str(&session.dflop(&["probe", "none.jpg", "--json"]));
    snapshot("error_missing_file", &text);
}

/// `--resume` takes a checkpoint, `export` takes its run: the hint is the command that is meant.
#[test]
fn an_export_of_no_run_names_the_run() {
    let session = Session { directory: tempfile::tempdir().unwrap() };
    fs::create_dir_all(session.path("demo/run/checkpoints/step-4")).unwrap();
    for (named, hint) in [
        ("demo/run/checkpoints/step-4", "it is a checkpoint: name its run, `dflop export demo/run --step 4`"),
        ("demo", "name the run in it, `dflop export demo/run`"),
        ("demo/run/checkpoints", "name the directory of a run of `dflop train` that wrote one"),
    ] {
        let said = session.dflop(&["export", named, "--out", "trained"]);
        assert!(said.contains(&format!("hint: {hint}")), "{said}");
    }
}

/// What stands in `dflop.yaml`, and that file itself, given as an argument: the hint says how it is given.
#[test]
fn an_argument_of_the_configuration_is_told_its_place() {
    let session = Session { directory: tempfile::tempdir().unwrap() };
    fs::create_dir(session.path("demo")).unwrap();
    fs::write(session.path("demo/dflop.yaml"), "").unwrap();
    for (arguments, hint) in [
        (&["plan", "--num-ranks", "8"][..], "`cluster.num_ranks` is a field of `dflop.yaml`: set it there"),
        (&["train", "--lr", "1e-5"], "`train.learning_rate` is a field of `dflop.yaml`: set it there"),
        (
            &["profile", "model", "--device", "cuda"],
            "`cluster.device` is a field of `dflop.yaml`: set it there",
        ),
        (&["train", "dflop.yaml"], "name the configuration by its flag: `--config dflop.yaml`"),
        (&["profile", "data", "demo"], "name the configuration by its flag: `--config demo/dflop.yaml`"),
    ] {
        let said = session.dflop(arguments);
        assert!(said.contains("status: 2"), "{said}");
        assert!(said.contains(&format!("For more information, try '--help'.\n\nhint: {hint}")), "{said}");
    }
    // The parser has a better idea, the verb reads no such file, or nobody knows what is meant.
    for arguments in
        [&["train", "--step", "3"][..], &["schedule", "--lr", "1"], &["plan", "--frobnicate"], &["plan", "x"]]
    {
        let said = session.dflop(arguments);
        assert!(said.contains("status: 2") && !said.contains("hint:"), "{said}");
    }
}

/// A report of what is no such directory: each says what it is, and what to name.
#[test]
fn a_report_of_another_thing_says_what_it_is() {
    let session = with_run(1.0);
    for (arguments, told) in [
        (&["report", "nothing"][..], "error: `nothing` is not there, must be a directory"),
        (&["report", "demo/dflop.yaml"], "error: `demo/dflop.yaml` is a file, must be a directory"),
        (
            &["report", "demo/run"],
            "hint: it is a run: name the directory around it, `dflop report demo --run demo/run`",
        ),
        (
            &["report", "demo", "--run", "demo/runs"],
            "error: `demo/runs` holds no run: there is no file `metrics.jsonl`",
        ),
        (&["report", "demo", "--against", "nothing"], "error: `nothing` is not there, must be a directory"),
    ] {
        let said = session.dflop(arguments);
        assert!(said.contains("status: 2") && said.contains(told), "{said}");
    }
    assert!(!session.path("demo/report.html").exists());
    let said = session.dflop(&["report", "demo", "--run", "demo/run"]);
    assert!(said.contains("status: 0"), "{said}");
}

/// Another journal of the run in place of its schedules.
#[test]
fn a_replay_of_another_journal_names_the_schedules() {
    let session = with_run(1.0);
    let train = ["train", "-c", "demo/dflop.yaml", "--other-device", "--oversubscribe", "--out", "again"];
    let said = session.dflop(&[&train[..], &["--replay", "demo/run/metrics.jsonl"]].concat());
    assert!(said.contains("status: 2") && said.contains("`demo/run/metrics.jsonl` line 1: "), "{said}");
    assert!(said.contains("hint: name the `schedules.jsonl` of a run"), "{said}");
}

/// A reader that left (`| head -1`) ends nothing and is no error: files are written, the status is that of the work.
#[test]
fn a_closed_pipe_is_no_error() {
    let session = Session::measured();
    for (arguments, file) in [
        (&["models"][..], None),
        (&["plan", "-c", "demo/dflop.yaml", "--only", "colocated=false"], Some("demo/plan.json")),
        (&["report", "demo"], Some("demo/report.html")),
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = Command::new(env!("CARGO_BIN_EXE_dflop"))
            .args(arguments)
            .current_dir(session.directory.path())
            .stdout(writer)
            .output()
            .unwrap();
        let talk = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{arguments:?}: {talk}");
        assert!(!talk.contains("panicked") && !talk.contains("error"), "{arguments:?}: {talk}");
        assert!(file.is_none_or(|file| session.path(file).is_file()), "{arguments:?} wrote no file: {talk}");
    }
}

/// Own data in the wrong place: what to set is told, not to leave every sample out.
#[test]
fn error_media_elsewhere() {
    let session = Session::new();
    session.edit("demo/data/mixture.yaml", |text| text.replace("media_root: media", "media_root: pictures"));
    let mut text = session.dflop(&["profile", "data", "-c", "demo/dflop.yaml"]);
    session.edit("demo/dflop.yaml", |text| text.replace("on_bad_sample: fail", "on_bad_sample: skip"));
    let only = "{\"id\": \"a\", \"image\": \"a.jpg\", \"conversations\": [{\"from\": \"human\", \"value\": \"<image>\"}, {\"from\": \"gpt\", \"value\": \"yes\"}]}\n";
    fs::write(session.path("demo/data/only.jsonl"), only).unwrap();
    session.edit("demo/dflop.yaml", |text| text.replace("mixture.yaml", "only.jsonl"));
    text.push_str(&session.dflop(&["profile", "data", "-c", "demo/dflop.yaml"]));
    session.edit("demo/dflop.yaml", |text| text.replace("dir: model", "dir: weights"));
    text.push_str(&session.dflop(&["profile", "data", "-c", "demo/dflop.yaml"]));
    snapshot("error_media_elsewhere", &text);
}

/// A global batch larger than the data set, and a trace where none can be written: each is told.
#[test]
fn a_small_data_set_and_a_bad_place() {
    let session = Session::new();
    session
        .edit("demo/dflop.yaml", |text| text.replace("global_batch_size: 64", "global_batch_size: 100000"));
    session.profile_data();
    session.record_model_profile();
    let text = session.dflop(&["plan", "-c", "demo/dflop.yaml", "--only", "colocated=false"]);
    let note = "note: the data has 48 samples, fewer than `train.global_batch_size` 100,000: every step takes all of them";
    assert!(text.contains(note), "{text}");
    let text = session.dflop(&["simulate", "-c", "demo/dflop.yaml", "--trace", "demo/dflop.yaml/trace.json"]);
    assert!(text.contains("hint: choose another place with `--trace`"), "{text}");
}

/// Data that could not be written is told, and is not success.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_behind_stdout_is_told() {
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_dflop")).arg("models").stdout(full).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(
        String::from_utf8_lossy(&output.stderr),
        "error: cannot write to standard output: No space left on device (os error 28)\n"
    );
}

/// Only Python can call the function that `model.family` names.
#[test]
fn error_family_without_python() {
    let session = Session::new();
    session
        .edit("demo/dflop.yaml", |text| text.replacen("model:\n", "model:\n  family: my_rules:shape\n", 1));
    snapshot("error_family_without_python", &session.dflop(&["profile", "data", "-c", "demo/dflop.yaml"]));
}

/// A part of a plan without a value is shown as it was written; a model that is named can be estimated.
#[test]
fn what_is_missing_is_named() {
    let session = Session::new();
    let text = session.dflop(&["plan", "-c", "demo/dflop.yaml", "--only", "llm.pp=1,llm.dp"]);
    assert!(text.contains("`llm.dp` has no value, must be FIELD=VALUE, as in `llm.pp=4`"), "{text}");
    session.edit("demo/dflop.yaml", |text| text.replace("dir: model", "name: llava-onevision-qwen2-7b"));
    let text = session.dflop(&["profile", "model", "-c", "demo/dflop.yaml"]);
    let hint =
        "hint: estimate its times, without a device: `dflop profile model --estimate`; or set `model.dir`";
    assert!(text.contains("status: 2") && text.contains(hint), "{text}");
}

#[test]
fn error_missing_artifact() {
    let session = Session::new();
    snapshot(
        "error_missing_artifact",
        &session.dflop(&["plan", "-c", "demo/dflop.yaml", "--only", "colocated=false"]),
    );
}

#[test]
fn error_corrupt_jpeg() {
    let session = Session::new();
    let mut images: Vec<PathBuf> = fs::read_dir(session.path("demo/data/media"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|e| e == "jpg"))
        .collect();
    images.sort();
    fs::write(&images[0], b"\xff\xd8\xff\xe0\x00\x10JFIF").unwrap();
    let mut text = session.dflop(&["profile", "data", "-c", "demo/dflop.yaml"]);
    // The other policy leaves it out, counted and listed.
    session.edit("demo/dflop.yaml", |yaml| yaml.replace("on_bad_sample: fail", "on_bad_sample: skip"));
    text.push_str(&session.dflop(&["profile", "data", "-c", "demo/dflop.yaml"]));
    snapshot("error_corrupt_jpeg", &text);
}

#[test]
fn error_broken_record() {
    let session = Session::new();
    fs::write(
        session.path("broken.jsonl"),
        "{\"id\": \"a\", \"conversations\": [{\"from\": \"human\", \"value\": \"hi\"}, {\"from\": \"gpt\", \"value\": \"yes\"}]}\n{\"id\": \"b\", \"conversations\": [{\"from\": \"human\"\n{\"id\": \"c\"}\n",
    )
    .unwrap();
    session.edit("demo/dflop.yaml", |yaml| yaml.replace("data/mixture.yaml", "../broken.jsonl"));
    snapshot("error_broken_record", &session.dflop(&["profile", "data", "-c", "demo/dflop.yaml"]));
}

#[test]
fn error_unknown_family() {
    let session = Session::new();
    session.edit("demo/model/config.json", |json| json.replace("llava_onevision", "mammoth_vl"));
    snapshot("error_unknown_family", &session.dflop(&["profile", "data", "-c", "demo/dflop.yaml"]));
}

#[test]
fn error_impossible_plan() {
    let session = Session::measured();
    session.edit("demo/dflop.yaml", |yaml| {
        yaml.replace("cluster:\n", "cluster:\n  memory_budget_bytes: 100000\n")
    });
    snapshot(
        "error_impossible_plan",
        &session.dflop(&["plan", "-c", "demo/dflop.yaml", "--only", "colocated=false"]),
    );
}

/// The cap on tokens of a bucket: under the longest sample, over it but too small for the microbatches, and kept by the
/// aware arm where arrival order passes it.
#[test]
fn a_cap_on_tokens() {
    let session = Session::measured();
    let train = |cap| format!("train:\n  bucket_tokens_max: {cap}\n");
    session.edit("demo/dflop.yaml", |yaml| yaml.replace("train:\n", &train(1_000)));
    let mut text = session.dflop(&["plan", "-c", "demo/dflop.yaml", "--only", "colocated=false"]);
    session.edit("demo/dflop.yaml", |yaml| yaml.replace("tokens_max: 1000", "tokens_max: 1400"));
    text.push_str(&session.dflop(&["plan", "-c", "demo/dflop.yaml", "--only", "colocated=false"]));
    session.edit("demo/dflop.yaml", |yaml| yaml.replace("tokens_max: 1400", "tokens_max: 2000"));
    text.push_str(&session.dflop(&["plan", "-c", "demo/dflop.yaml", "--only", "colocated=false"]));
    text.push_str(&session.dflop(&["simulate", "-c", "demo/dflop.yaml", "--steps", "2"]));
    snapshot("a_cap_on_tokens", &text);
}

#[test]
fn error_giants() {
    let session = Session::measured();
    let with = |giants: &'static str| {
        session.edit("demo/dflop.yaml", |text| text.replace("train:\n", &format!("train:\n{giants}")));
    };
    with("  giants: defer\n");
    let mut text = session.dflop(&["plan", "-c", "demo/dflop.yaml", "--only", "colocated=false"]);
    session.edit("demo/dflop.yaml", |text| text.replace("giants: defer", "giants: drop"));
    text.push_str(&session.dflop(&["plan", "-c", "demo/dflop.yaml", "--only", "colocated=false"]));
    session.edit("demo/dflop.yaml", |text| {
        text.replace("giants: drop", "giants: refuse\n  giant_llm_tokens: 1000")
    });
    text.push_str(&session.dflop(&["plan", "-c", "demo/dflop.yaml", "--only", "colocated=false"]));
    snapshot("error_giants", &text);
}

#[test]
fn error_other_model() {
    let session = Session::measured();
    session.edit("demo/model/config.json", |json| json.replace("\"model_type\"", " \"model_type\""));
    snapshot(
        "error_other_model",
        &session.dflop(&["plan", "-c", "demo/dflop.yaml", "--only", "colocated=false"]),
    );
}

#[test]
fn error_plan_of_another_configuration() {
    let session = Session::planned();
    session.edit("demo/dflop.yaml", |yaml| yaml.replace("global_batch_size: 64", "global_batch_size: 32"));
    let mut text = session.dflop(&["train", "-c", "demo/dflop.yaml", "--oversubscribe", "--other-device"]);
    session.edit("demo/dflop.yaml", |yaml| yaml.replace("dtype: float32", "dtype: bfloat16"));
    text.push_str(&session.dflop(&["plan", "-c", "demo/dflop.yaml", "--only", "colocated=false"]));
    session.edit("demo/dflop.yaml", |yaml| {
        yaml.replace("dtype: bfloat16", "dtype: float32")
            .replace("\ntrain:\n", "\ntrain:\n  compile: layers\n")
    });
    text.push_str(&session.dflop(&["plan", "-c", "demo/dflop.yaml", "--only", "colocated=false"]));
    snapshot("error_plan_of_another_configuration", &text);
}

/// Before torchrun is started: arms that there are none of, and logs that are not of this plan and data.
#[test]
fn error_arms_and_replays() {
    let session = Session::planned();
    let train = |flags: &[&str]| {
        let start = ["train", "-c", "demo/dflop.yaml", "--oversubscribe", "--other-device"];
        session.dflop(&[&start, flags].concat())
    };
    fs::write(session.path("empty.jsonl"), "").unwrap();
    let schedule = "{\"step\":0,\"llm\":[],\"encoder\":[],\"label_tokens\":1,\"predicted_makespan_ns\":0,\"max_load_ns\":0,\"lower_bound_ns\":0}";
    let foreign = format!(
        "{{\"step\":0,\"arm\":\"aware\",\"made_from\":{{\"data_profile\":\"sha256:1\"}},\"samples\":[],\"schedule\":{schedule}}}\n"
    );
    fs::write(session.path("foreign.jsonl"), foreign).unwrap();
    let mut text = String::new();
    for flags in [
        &["--compare", "--arms", "blind,random"][..],
        &["--compare", "--arms", "blind,tokens,blind"],
        &["--compare", "--arms", "blind"],
        &["--arms", "blind,tokens"],
        &["--compare", "--replay", "foreign.jsonl"],
        &["--replay", "missing.jsonl"],
        &["--replay", "empty.jsonl"],
        &["--replay", "foreign.jsonl"],
    ] {
        text.push_str(&train(flags));
        text.push('\n');
    }
    snapshot("error_arms_and_replays", &text);
}

/// What an option asks is done or refused, never passed over.
#[test]
fn error_options_without_effect() {
    let session = Session::planned();
    fs::write(session.path("d.json"), "{}").unwrap();
    fs::write(session.path("costs.csv"), "encoder_ns,llm_ns,llm_ns\n1,2,3\n").unwrap();
    let train = ["train", "-c", "demo/dflop.yaml", "--oversubscribe", "--other-device"];
    let measured = |flags: &[&str]| session.dflop(&[&train, flags].concat());
    let mut text = String::new();
    for flags in [
        &["--steps", "9"][..],
        &["-c", "none.yaml"],
        &["--plan", "none.json"],
        &["--data-profile", "none.parquet", "--model-profile", "none.json"],
    ] {
        text.push_str(&session.dflop(&[&["simulate", "--durations", "d.json"], flags].concat()));
    }
    text.push_str(&session.dflop(&["probe", "a.gif", "--video-max-frames", "4"]));
    text.push_str(&session.dflop(&["probe", "a.gif", "--model", "m", "--family", "f"]));
    text.push_str(&session.dflop(&["schedule", "--costs", "costs.csv", "--buckets", "2"]));
    text.push_str(&measured(&["--warmup-pairs", "1"]));
    text.push_str(&measured(&["--measure-memory-step", "24"]));
    text.push_str(&measured(&["--measure-memory-step", "4", "--steps", "4"]));
    text.push_str(&measured(&["--measure-memory-step", "6", "--steps", "4", "--compare"]));
    snapshot("error_options_without_effect", &text);
    for flags in [
        &["--measure-memory-step", "23"][..],
        &["--measure-memory-step", "3", "--steps", "4"],
        &["--measure-memory-step", "5", "--steps", "4", "--compare"],
    ] {
        let text = measured(flags);
        assert!(text.contains("needs PyTorch"), "{text}");
    }
}

#[test]
fn error_unwritable_directory() {
    let session = Session::new();
    let out = ["profile", "data", "-c", "demo/dflop.yaml", "--out", "demo/dflop.yaml/profile.parquet"];
    snapshot("error_unwritable_directory", &session.dflop(&out));
}

#[test]
fn error_no_samples() {
    let session = Session::new();
    fs::write(session.path("empty.json"), "[]").unwrap();
    session.edit("demo/dflop.yaml", |yaml| yaml.replace("data/mixture.yaml", "../empty.json"));
    snapshot("error_no_samples", &session.dflop(&["profile", "data", "-c", "demo/dflop.yaml"]));
}

#[test]
fn error_more_ranks_than_cores() {
    let session = Session::planned();
    session.edit("demo/dflop.yaml", |yaml| yaml.replace("num_ranks: 2", "num_ranks: 4096"));
    session.edit("demo/plan.json", |json| {
        json.replacen("\"data_parallel_degree\":1", "\"data_parallel_degree\":4095", 1)
    });
    snapshot(
        "error_more_ranks_than_cores",
        &session.dflop(&["train", "-c", "demo/dflop.yaml", "--other-device"]),
    );
}

#[test]
fn error_unknown_key() {
    let session = Session::new();
    session.edit("demo/dflop.yaml", |yaml| {
        yaml.replace("dtype:", "dtyp:").replace("steps:", "stepps:").replace("num_ranks: 2", "num_ranks: two")
    });
    snapshot("error_unknown_key", &session.dflop(&["profile", "data", "-c", "demo/dflop.yaml"]));
}

/// Sources and configurations that cannot be read each say what to do.
#[test]
fn errors_of_sources_have_hints() {
    let session = Session::new();
    let good = fs::read_to_string(session.path("demo/dflop.yaml")).unwrap();
    let profile = |mixture: &str| {
        session.edit("demo/dflop.yaml", |_| good.replace("data/mixture.yaml", mixture));
        session.dflop(&["profile", "data", "-c", "demo/dflop.yaml"])
    };
    fs::create_dir(session.path("shards")).unwrap();
    fs::write(session.path("shards/train-00000-of-00002.parquet"), "").unwrap();
    fs::write(session.path("cut.tar"), [0; 100]).unwrap();
    fs::write(session.path("packed.tar"), [&[0x1f, 0x8b][..], &[7; 2000]].concat()).unwrap();
    fs::write(session.path("mixture.yaml"), "datasets:\n- path: none.jsonl\n- path: shards\n").unwrap();
    let mut text = String::new();
    for source in ["none.jsonl", "../shards", "../cut.tar", "../packed.tar", "../mixture.yaml"] {
        text.push_str(&profile(source));
    }
    for config in [&b"model: {dir: model\n"[..], b"model: {dir: \xe9}\n"] {
        fs::write(session.path("demo/dflop.yaml"), config).unwrap();
        text.push_str(&session.dflop(&["profile", "data", "-c", "demo/dflop.yaml"]));
    }
    assert_eq!(text.matches("\nhint: ").count(), 7, "{text}");
    snapshot("errors_of_sources_have_hints", &text);
}

/// What is not read of a record is told; media among it are a bad sample. Names do not reach the terminal raw.
#[test]
fn fields_that_are_not_read() {
    let session = Session::new();
    let pair = "\"question\": \"a\", \"answer\": \"b\"";
    fs::write(
        session.path("told.jsonl"),
        format!(
            "{{\"id\": \"\\u001b[2J\\n\", {pair}, \"meta\": 1}}\n{{{pair}, \"meta\": 2, \"score\": 3}}\n"
        ),
    )
    .unwrap();
    fs::write(
        session.path("refused.jsonl"),
        format!("{{\"id\": \"\\u001b\", {pair}, \"img\": \"a.jpg\"}}\n"),
    )
    .unwrap();
    session.edit("demo/dflop.yaml", |yaml| yaml.replace("data/mixture.yaml", "../told.jsonl"));
    let mut text = session.dflop(&["profile", "data", "-c", "demo/dflop.yaml"]);
    session.edit("demo/dflop.yaml", |yaml| yaml.replace("../told.jsonl", "../refused.jsonl"));
    text.push_str(&session.dflop(&["profile", "data", "-c", "demo/dflop.yaml"]));
    assert!(!text.contains('\u{1b}'), "{text:?}");
    snapshot("fields_that_are_not_read", &text);
}

/// A name that the mixture misspells: the record's picture would be left out, and the sample be text.
#[test]
fn a_renamed_field_that_no_record_has_is_told() {
    let session = Session::new();
    let record = "{\"q\": \"a\", \"answer\": \"b\", \"pic\": \"a\"}\n";
    fs::write(session.path("a.jsonl"), record.repeat(2)).unwrap();
    let mixture = "datasets:\n- path: a.jsonl\n  columns: {question: q, image: picture}\n";
    fs::write(session.path("mixture.yaml"), mixture).unwrap();
    session.edit("demo/dflop.yaml", |yaml| yaml.replace("data/mixture.yaml", "../mixture.yaml"));
    let said = session.dflop(&["profile", "data", "-c", "demo/dflop.yaml"]);
    let told = "`a.jsonl`: no record has `picture`, which `columns: {image: picture}` of the mixture names";
    assert_eq!(said.matches("no record has").count(), 1, "{said}");
    assert!(said.contains("status: 0") && said.contains(told), "{said}");
}

/// A family is offered where its rule needs no file.
#[test]
fn families_without_a_model() {
    let session = Session::new();
    let mut text = String::new();
    for family in ["qwen2_vl", "qwen2_5_vl", "internvl", "mammoth_vl"] {
        text.push_str(&session.dflop(&["probe", "--family", family, "demo/data/media/demo_0000_1.jpg"]));
    }
    snapshot("families_without_a_model", &text);
    let help = session.dflop(&["probe", "--help"]);
    let named = text.rsplit_once("must be one of: ").unwrap().1.lines().next().unwrap();
    let (most, last) = named.rsplit_once(", ").unwrap();
    let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(help.contains(&format!("{most} or {last}")), "{help}");
}
