//! What people see of `dflop advise`: the screen, cases by hand, a log of step times, bad inputs.

// `allow-unwrap-in-tests` knows test functions, not what they share.
#![allow(clippy::unwrap_used)]

use crate::common::{Session, snapshot};
use dflop_data::table;
use dflop_types::{DataProfile, EncoderSegments, ProfiledSample, SampleKind, SampleShape};
use serde_json::Value;
use std::fs;

const ESTIMATED: [&str; 4] = ["--model", "llava-onevision-qwen2-7b", "--hardware", "h100"];

fn empty() -> Session {
    Session { directory: tempfile::tempdir().unwrap() }
}

/// What the command says, of a screen at most.
fn screen(session: &Session, further: &[&str]) -> String {
    let said = session.dflop(&[&["advise"], further].concat());
    let shown = said.split("--- stdout\n").nth(1).unwrap().split("--- stderr").next().unwrap();
    assert!(said.contains("status: 0"), "{said}");
    assert!(shown.lines().count() <= 40, "{said}");
    assert!(shown.lines().all(|line| line.chars().count() <= 100), "{said}");
    said
}

fn answer(session: &Session, further: &[&str]) -> Value {
    let said = session.dflop(&[&["advise", "--json"], further].concat());
    let shown = said.split("--- stdout\n").nth(1).unwrap().split("--- stderr").next().unwrap();
    serde_json::from_str(shown).unwrap_or_else(|error| panic!("{error}: {said}"))
}

fn over_bound(answer: &Value, way: &str) -> f64 {
    let ways = answer["ways"].as_array().unwrap();
    ways.iter().find(|entry| entry["way"] == way).unwrap()["over_bound"]["mean"].as_f64().unwrap()
}

/// A data profile of samples with so many tiles and tokens of text.
fn write_profile(session: &Session, sizes: &[(u32, u32)]) {
    let samples = sizes.iter().zip(0..).map(|(&(tiles, text), position)| ProfiledSample {
        id: format!("sample {position}"),
        position,
        kind: if tiles == 0 { SampleKind::Text } else { SampleKind::Image },
        shape: SampleShape {
            encoder_segments: (tiles > 0).then_some(EncoderSegments::of(tiles, 729)).into_iter().collect(),
            feature_tokens: 196 * tiles,
            llm_tokens: 196 * tiles + text,
            label_tokens: text / 2,
            ..SampleShape::default()
        },
        ..ProfiledSample::default()
    });
    let profile = DataProfile {
        family: "llava_onevision".to_owned(),
        sources: vec!["made".to_owned()],
        samples: samples.collect(),
        ..DataProfile::default()
    };
    table::write(&session.path("data_profile.parquet"), &profile).unwrap();
}

/// The demo's data: with estimated costs under DDP, and with the recorded profile under FSDP2 from a dflop.yaml.
#[test]
fn screens() {
    let session = Session::new();
    session.profile_data();
    let ranks = ["demo/data_profile.parquet", "--num-ranks", "4", "--batch-size", "4"];
    let mut said = screen(&session, &[&ranks[..], &ESTIMATED].concat());
    assert!(said.contains("simulated from estimated costs"), "{said}");
    session.record_model_profile();
    said.push('\n');
    said.push_str(&screen(
        &session,
        &["demo/dflop.yaml", "--trainer", "fsdp2", "--batch-size", "4", "--accumulation", "2"],
    ));
    snapshot("advise", &said);
}

/// What is printed follows from the ways: divided by the best of the others, never by the worst.
#[test]
fn the_gain_is_over_the_best_other_way() {
    let session = Session::new();
    session.profile_data();
    let ranks = ["demo/data_profile.parquet", "--num-ranks", "8", "--batch-size", "2", "--meets", "phase"];
    let found = answer(&session, &[&ranks[..], &ESTIMATED].concat());
    let best =
        ["arrival", "grouped", "packed"].map(|way| over_bound(&found, way)).into_iter().fold(9.0, f64::min);
    for (way, ratio) in [("line", "line_ratio"), ("both", "both_ratio")] {
        let gain = found[ratio]["mean"].as_f64().unwrap();
        assert!((gain - best / over_bound(&found, way)).abs() < 1e-12, "{found}");
        assert!(found[ratio]["low"].as_f64().unwrap() <= gain, "{found}");
    }
    // Pairs of a text and a picture: half of the text's row is padding, and more.
    let padding = |way: &str| {
        let ways = found["ways"].as_array().unwrap();
        ways.iter().find(|entry| entry["way"] == way).unwrap()["padding_ratio"].as_f64().unwrap()
    };
    assert!(padding("line") > 1.1 && padding("grouped") < padding("arrival"), "{found}");
    let said = screen(&session, &[&ranks[..], &ESTIMATED].concat());
    assert!(said.contains("tokens for each real one") && said.contains("remove_padding(model)"), "{said}");
    assert!((over_bound(&found, found["best_other"].as_str().unwrap()) - best).abs() < 1e-12, "{found}");
    assert_eq!((&found["is_simulated"], &found["is_estimated"]), (&true.into(), &true.into()));
    assert_eq!(found, answer(&session, &[&ranks[..], &ESTIMATED].concat()), "the same seed, the same answer");
}

/// With padded rows every way takes longer, the line that is not told of them more than the one that is; the code tells it.
#[test]
fn padded_rows_are_simulated_and_said() {
    let session = empty();
    let sizes: Vec<(u32, u32)> = (0..256).map(|i| (0, if i % 4 == 0 { 4_000 } else { 300 })).collect();
    write_profile(&session, &sizes);
    let arguments = [&["--num-ranks", "4", "--batch-size", "4"][..], &ESTIMATED].concat();
    let padded = [&arguments[..], &["--padded"]].concat();
    let (real, found) = (answer(&session, &arguments), answer(&session, &padded));
    assert_eq!((&real["is_padded"], &found["is_padded"]), (&false.into(), &true.into()));
    assert_eq!(real["bound_ns_mean"], found["bound_ns_mean"]);
    for way in ["arrival", "packed", "line"] {
        assert!(over_bound(&found, way) > over_bound(&real, way), "{way}: {found}");
    }
    let ratio = |found: &Value, way: &str| {
        let ways = found["ways"].as_array().unwrap();
        ways.iter().find(|entry| entry["way"] == way).unwrap()["padding_ratio"].as_f64().unwrap()
    };
    assert!(ratio(&found, "line") < 1.1 && ratio(&real, "line") > 2.0, "{found} {real}");
    assert!(over_bound(&found, "line") < 0.6 * over_bound(&found, "arrival"), "{found}");
    let said = screen(&session, &padded);
    // Grouping by length pads less, over many steps: nothing to gain, and it says what would help.
    assert!(said.contains("rows padded") && said.contains("nothing to gain"), "{said}");
    assert!(said.contains("padded, a microbatch") && said.contains("remove_padding"), "{said}");
    assert!(!said.contains("padding and memory"), "{said}");
    let said = screen(&session, &arguments);
    assert!(said.contains("--padded") && !said.contains("is_padded"), "{said}");
}

/// The demo's lengths differ in every way: what is advised has `remove_padding`, in the sentence and in the code.
#[test]
fn removed_padding_is_advised_where_it_pays() {
    let session = Session::new();
    session.profile_data();
    let arguments =
        [&["demo/data_profile.parquet", "--num-ranks", "4", "--batch-size", "4"][..], &ESTIMATED].concat();
    let padded = [&arguments[..], &["--padded"]].concat();
    let found = answer(&session, &padded);
    assert_eq!((&found["advice"], &found["removes_padding"]), (&"line".into(), &true.into()), "{found}");
    let mean = |ratio: &str| found[ratio]["mean"].as_f64().unwrap();
    // Not by the second line, which adds less than 1 %.
    assert!(mean("removed_ratio") > 1.01 * mean("line_ratio"), "{found}");
    assert!(mean("both_removed_ratio") < 1.01 * mean("removed_ratio"), "{found}");
    let said = screen(&session, &padded);
    assert!(said.contains("add the first line and `remove_padding`: "), "{said}");
    assert!(
        said.contains("import remove_padding\n") && said.contains("    remove_padding(model)\n"),
        "{said}"
    );
    assert!(!said.contains("is_padded"), "{said}");
    assert_eq!(answer(&session, &arguments)["removes_padding"], false);
}

/// Frameworks pad, so `--padded` is what is simulated; without padding its own option for that stands in what is printed.
#[test]
fn frameworks_are_simulated_with_padding() {
    let session = Session::new();
    session.profile_data();
    let arguments =
        [&["demo/data_profile.parquet", "--num-ranks", "4", "--batch-size", "4"][..], &ESTIMATED].concat();
    let with = |further: &[&str]| answer(&session, &[&arguments[..], further].concat());
    let padded = with(&["--padded"]);
    for (trainer, option) in [
        ("swift", "register(remove_padding=True)"),
        ("llamafactory", "  remove_padding: true"),
        ("axolotl", "  remove_padding: true"),
        ("nemo", "  remove_padding: true"),
    ] {
        // Ranks of Automodel meet in each layer, unless it is told otherwise.
        let found = with(&["--trainer", trainer, "--meets", "step"]);
        assert_eq!(found["ways"], padded["ways"], "{trainer}");
        let code = found["code"].as_array().unwrap();
        assert!(code.iter().any(|line| line == option), "{found}");
        let said = screen(&session, &[&arguments[..], &["--trainer", trainer]].concat());
        assert!(said.contains(&format!("({trainer}; docs/frameworks.md says more)")), "{said}");
    }
    let flat = with(&["--trainer", "axolotl", "--padded=false"]);
    assert_eq!(flat["ways"], with(&[])["ways"]);
    assert!(flat["code"].as_array().unwrap().iter().any(|line| line == "batch_flattening: true"), "{flat}");
    // Another spelling of the name.
    assert_eq!(with(&["--trainer", "ms-swift"])["code"], with(&["--trainer", "swift"])["code"]);
    assert_eq!(
        with(&["--trainer", "nemo"])["ways"],
        with(&["--trainer", "nemo", "--meets", "phase", "--padded"])["ways"]
    );
    for trainer in ["llamafactory", "nemo"] {
        let refused = [&arguments[..], &["--trainer", trainer, "--padded=false"]].concat();
        let said = session.dflop(&[&["advise"], &refused[..]].concat());
        let rule = format!("`--padded` is false, must be true with `--trainer {trainer}`");
        assert!(said.contains("status: 2") && said.contains(&rule), "{said}");
    }
}

/// A frozen encoder has less of the work, adapters leave the LLM less; a configuration says so by itself, and the code repeats it.
#[test]
fn what_trains_decides_what_samples_cost() {
    let session = Session::new();
    session.profile_data();
    let data = "demo/data_profile.parquet";
    let ranks = ["--num-ranks", "4", "--batch-size", "4"];
    let share = |found: &Value| found["encoder_share"].as_f64().unwrap();
    let with = |further: &[&str]| answer(&session, &[&[data], &ranks[..], &ESTIMATED, further].concat());
    let (full, frozen) = (with(&[]), with(&["--recipe", "frozen-encoder"]));
    assert!(share(&frozen) < 0.6 * share(&full), "{} {}", share(&frozen), share(&full));
    let lora = with(&["--recipe", "lora", "--lora-rank", "8"]);
    assert!(share(&frozen) < share(&lora) && share(&lora) < share(&full));
    assert_eq!(lora["trained"]["lora_rank"], 8);
    let said = screen(
        &session,
        &[&[data], &ranks[..], &ESTIMATED, &["--recipe", "lora", "--lora-rank", "8"]].concat(),
    );
    assert!(said.contains("trains: projector, LoRA 8"), "{said}");
    assert!(said.contains("recipe=\"lora\"") && said.contains("lora_rank=8"), "{said}");
    let config = fs::read_to_string(session.path("demo/dflop.yaml")).unwrap();
    let section = "train:\n";
    assert!(config.contains(section), "{config}");
    let with_recipe = config.replacen(section, "train:\n  recipe: frozen-encoder\n", 1);
    fs::write(session.path("demo/dflop.yaml"), with_recipe).unwrap();
    let configured = answer(&session, &[&["demo/dflop.yaml"], &ranks[..], &ESTIMATED].concat());
    assert_eq!(configured["encoder_share"], frozen["encoder_share"]);
    let said = session.dflop(&[&["advise", data], &ranks[..], &ESTIMATED, &["--recipe", "half"]].concat());
    assert!(said.contains("must be one of: full, projector"), "{said}");
}

/// A table of costs that a model gave is simulated as the model itself; one of other samples is refused.
#[test]
fn costs_of_ones_own_are_simulated_as_those_of_a_model() {
    let session = empty();
    let sizes: Vec<(u32, u32)> = (0..256).map(|at| (at * 7 % 11, 30 + at * 37 % 400)).collect();
    write_profile(&session, &sizes);
    let said = session.dflop(&[&["costs", "--batch-size", "4"], &ESTIMATED[..]].concat());
    let table = said.split("--- stdout\n").nth(1).unwrap().split("--- stderr").next().unwrap();
    fs::write(session.path("costs.csv"), table).unwrap();
    let given = answer(&session, &["--costs", "costs.csv"]);
    let estimated = answer(&session, &ESTIMATED);
    assert_eq!(given["ways"], estimated["ways"]);
    assert_eq!(given["largest"], estimated["largest"]);
    assert_eq!((&given["costs"], &given["is_estimated"]), (&"costs.csv".into(), &false.into()));
    let said = screen(&session, &["--costs", "costs.csv"]);
    assert!(said.contains("costs given: `costs.csv`, read as nanoseconds"), "{said}");
    assert!(said.contains("simulated from given costs"), "{said}");
    assert!(said.contains("cost=cost)"), "{said}");

    let fewer: Vec<&str> = table.lines().take(200).collect();
    fs::write(session.path("costs.csv"), fewer.join("\n")).unwrap();
    let said = session.dflop(&["advise", "--costs", "costs.csv"]);
    assert!(
        said.contains(
            "`costs.csv` has costs of 199 samples, the data profile has 256 samples, must be equal"
        ),
        "{said}"
    );
    let mut lines: Vec<&str> = table.lines().collect();
    lines[1..].reverse();
    fs::write(session.path("costs.csv"), lines.join("\n")).unwrap();
    let said = session.dflop(&["advise", "--costs", "costs.csv"]);
    assert!(said.contains("`costs.csv`: line 3: `sample` is not above that of the line before"), "{said}");
    // Without positions another order is seen where text alone has work on the encoder.
    let unnamed: Vec<&str> = lines.iter().map(|line| line.split_once(',').unwrap().1).collect();
    fs::write(session.path("costs.csv"), unnamed.join("\n")).unwrap();
    let said = session.dflop(&["advise", "--costs", "costs.csv"]);
    assert!(said.contains("the data profile has text alone there, must be 0"), "{said}");
    let said = session.dflop(&[&["advise", "--costs", "costs.csv"], &ESTIMATED[..]].concat());
    assert!(said.contains("cannot be used with"), "{said}");
    let said = session.dflop(&["advise", "--costs", "costs.csv", "--dtype", "float32"]);
    assert!(said.contains("cannot be used with"), "{said}");
}

/// Equal samples: every way takes the bound, and the advice is to change nothing.
#[test]
fn equal_samples_have_nothing_to_gain() {
    let session = empty();
    write_profile(&session, &[(2, 100); 64]);
    let arguments = [&["--num-ranks", "4", "--accumulation", "2"][..], &ESTIMATED].concat();
    for meets in ["step", "phase"] {
        let arguments = [&arguments[..], &["--meets", meets]].concat();
        let found = answer(&session, &arguments);
        for way in ["arrival", "grouped", "packed", "line", "both"] {
            assert!((over_bound(&found, way) - 1.0).abs() < 1e-9, "{way}: {found}");
        }
        let ways = found["ways"].as_array().unwrap();
        assert!(ways.iter().all(|way| way["padding_ratio"] == 1.0), "{found}");
        assert_eq!((&found["advice"], &found["are_alike"]), (&"nothing".into(), &true.into()));
        assert_eq!(found["code"], serde_json::json!([]));
        let said = screen(&session, &arguments);
        assert!(said.contains("nothing to gain: ") && said.contains("all samples cost the same"), "{said}");
        assert!(!said.contains("import dflop") && !said.contains("remove_padding"), "{said}");
    }
}

/// One sample of forty times the text of all others: it is named with its share, and no way helps its step.
#[test]
fn a_giant_is_named() {
    let session = empty();
    let mut sizes = [(0, 200); 32];
    sizes[5] = (0, 8_000);
    write_profile(&session, &sizes);
    let arguments = [&["--num-ranks", "4", "--batch-size", "8"][..], &ESTIMATED].concat();
    let found = answer(&session, &arguments);
    assert_eq!((&found["num_giants"], &found["largest"]["id"]), (&1.into(), &"sample 5".into()));
    // Of 31 x 200 and 8,000 tokens it has 56 %; attention's squares add a little.
    let share = found["largest"]["step_share"].as_f64().unwrap();
    assert!((0.56..0.62).contains(&share), "{share}");
    // Alone on its rank it takes 4 x an even share.
    assert!((over_bound(&found, "line") - 4.0 * share).abs() < 1e-6, "{found}");
    let said = screen(&session, &arguments).split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(said.contains("1 giant has more work than an even share of a rank"), "{said}");
    assert!(
        said.contains("`sample 5` (text), has") && said.contains("an even share of a rank is 25.0 %"),
        "{said}"
    );
}

/// Steps of 100 | 300 and 200 | 200: 1.5 and 1 times the mean; 200 of the 1,000 are lost.
#[test]
fn a_log_by_hand() {
    let session = empty();
    fs::write(session.path("log.csv"), "step,rank,ms\n0,0,100\n0,1,300\n1,0,200\n1,1,200\n").unwrap();
    let found = answer(&session, &["--step-times", "log.csv"]);
    assert_eq!((&found["num_steps"], &found["num_ranks"]), (&2.into(), &2.into()));
    assert!((found["max_over_mean"]["mean"].as_f64().unwrap() - 1.25).abs() < 1e-12, "{found}");
    assert!((found["lost_share"].as_f64().unwrap() - 0.2).abs() < 1e-12, "{found}");
    assert_eq!((&found["slowest_rank"], &found["slowest_rank_steps"]), (&1.into(), &1.into()));
    let mut said = screen(&session, &["--step-times", "log.csv"]);
    fs::write(session.path("even.csv"), "step,rank,ms\n0,0,100\n0,1,100\n").unwrap();
    said.push('\n');
    said.push_str(&screen(&session, &["--step-times", "even.csv"]));
    snapshot("advise_step_times", &said);
}

#[test]
fn bad_inputs() {
    let session = empty();
    let mut said = String::new();
    let mut ask = |session: &Session, further: &[&str]| {
        let found = session.dflop(&[&["advise"], further].concat());
        assert!(found.contains("status: 2"), "{found}");
        said.push_str(&found);
        said.push('\n');
    };
    // No data; data without costs; ranks that no step has samples for; a log with other arguments; a bad log.
    ask(&session, &ESTIMATED);
    write_profile(&session, &[(1, 10); 16]);
    ask(&session, &[]);
    ask(&session, &[&["--num-ranks", "64"][..], &ESTIMATED].concat());
    ask(&session, &["--step-times", "log.csv", "--num-ranks", "8"]);
    ask(&session, &["--step-times", "log.csv"]);
    fs::write(session.path("log.csv"), "step,rank,ms\n0,0,fast\n0,1,3\n0,1,4\n").unwrap();
    ask(&session, &["--step-times", "log.csv"]);
    ask(&session, &["--model", "llava-onevision-qwen2-7b"]);
    let demo = Session::new();
    demo.profile_data();
    demo.record_model_profile();
    ask(&demo, &["demo/dflop.yaml", "--num-ranks", "7"]);
    ask(&demo, &["demo/nothing.yaml"]);
    snapshot("error_advise", &said);
}
