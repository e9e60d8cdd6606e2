//! The search over layouts that deal out experts, and what their ranks send.

use crate::asked;
use crate::fixture;
use dflop_plan::{SearchEffort, SearchInput, communication, search, why_no_candidate};
use dflop_types::{ExpertsProfile, ModelProfile, Zero};

const RANKS: u32 = 4;
const PER_TOKEN: u32 = 2;

/// Most of each layer of the LLM backbone is 8 experts.
fn profile() -> ModelProfile {
    let mut profile = fixture::model_profile();
    let layer = profile.modules.get_mut("llm_layer").unwrap();
    let [num_parameters, parameter_bytes] =
        [layer.num_parameters, layer.parameter_bytes].map(|all| all / 10 * 8);
    layer.experts = Some(ExpertsProfile { count: 8, per_token: PER_TOKEN, num_parameters, parameter_bytes });
    profile
}

fn input<'a>(shapes: &[dflop_types::SampleShape], profile: &'a ModelProfile, only: &str) -> SearchInput<'a> {
    let asked = asked::input(shapes, profile, RANKS);
    let effort = SearchEffort::Quick;
    SearchInput {
        only: only.parse().unwrap(),
        global_batch_size: 96,
        num_sampled_batches: 2,
        effort,
        ..asked
    }
}

#[test]
fn experts_are_dealt_out_where_the_model_has_some() {
    let (shapes, with, without) = (fixture::shapes(96, 5), profile(), fixture::model_profile());
    let found = |profile: &ModelProfile, only: &str| search(&input(&shapes, profile, only)).unwrap();
    let number = |profile: &ModelProfile| found(profile, "colocated=true,recompute=none").num_candidates;
    // Over 2 and over 4 ranks; ZeRO-2 takes what ZeRO-1 does.
    assert_eq!(number(&with) - number(&without), 2 * 3);
    for zero in Zero::ALL {
        let only = format!("llm.ep=4,zero={},recompute=none", u8::from(zero));
        let plans = found(&with, &only).ranked;
        assert!(plans.iter().all(|plan| plan.layout.expert_parallel_degree == 4), "{only}");
        let words = plans[0].in_words();
        assert!(words.starts_with("colocated tp 1 dp 4, ep 4"), "{words}");
    }
}

#[test]
fn a_search_without_candidates_says_why_nothing_is_dealt_out() {
    let (shapes, with, without) = (fixture::shapes(96, 5), profile(), fixture::model_profile());
    let why = |profile: &ModelProfile, only: &str| {
        let asked = input(&shapes, profile, only);
        why_no_candidate(&asked, &search(&asked).unwrap()).unwrap_or_default()
    };
    assert_eq!(
        why(&without, "llm.ep=2"),
        "no layout of 4 ranks has `--only llm.ep=2`, and the model profile says of no experts; of a model with experts make it anew: `dflop profile model`"
    );
    let rule = "and the 8 experts of a layer can be dealt out over 2 or 4 ranks on nodes of 4";
    assert_eq!(why(&with, "llm.ep=3"), format!("no layout of 4 ranks has `--only llm.ep=3`, {rule}"));
}

/// Each token's two rows go there and back, forward and backward, over every layer; half of them leave a rank of a group of two.
#[test]
fn rows_are_named_apart_from_what_is_gathered() {
    let shapes = fixture::shapes(96, 5);
    let mut profile = profile();
    "cpu".clone_into(&mut profile.device.kind);
    let asked = input(&shapes, &profile, "llm.ep=2,recompute=none");
    let plan = search(&asked).unwrap().ranked[0];
    let found = communication(&asked, &plan).unwrap().unwrap();
    let sent = found.kinds.iter().find(|(kind, _)| *kind == "all-to-all").unwrap().1;
    let tokens: u64 = shapes.iter().map(|shape| u64::from(shape.llm_tokens)).sum();
    let rows = tokens * u64::from(PER_TOKEN) * u64::from(profile.count("llm_layer"));
    let bytes = 4 * rows * profile.hidden_bytes / 2 / u64::from(RANKS);
    assert!(sent.bytes.abs_diff(bytes) <= 4 + bytes / 1_000, "{} bytes, {bytes} expected", sent.bytes);
    assert!(sent.ns > 0 && sent.exposed_ns > 0);
}
