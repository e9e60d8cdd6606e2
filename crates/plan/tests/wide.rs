//! The search over all that training runs: layers cut over ranks and unevenly into stages, encoder stages, sharded states.

use crate::{asked, fixture};
use dflop_plan::{Only, Outcome, Rival, SearchEffort, SearchInput, explain, search};
use dflop_types::{ModelProfile, Rejection, RejectionCount, SampleShape, Zero};

fn input<'a>(shapes: &[SampleShape], model_profile: &'a ModelProfile, num_ranks: u32) -> SearchInput<'a> {
    SearchInput {
        global_batch_size: 16,
        num_sampled_batches: 2,
        ..asked::input(shapes, model_profile, num_ranks)
    }
}

/// Searches twice, and checks that the quick one loses at most 1 %. Gives whether among the plans layers are cut over ranks,
/// encoders have several stages, stages are uneven, states are sharded.
fn kinds_of_plans(num_ranks: u32, seed: u64, budget: Option<u64>) -> [bool; 4] {
    let model_profile = fixture::cuttable();
    let only: Only = "colocated=false".parse().unwrap();
    let shapes = fixture::shapes(64, seed);
    let search = |effort| {
        let cluster = fixture::cluster(num_ranks, budget);
        let input = input(&shapes, &model_profile, num_ranks);
        let only = only.clone();
        search(&SearchInput { effort, cluster, only, ..input }).unwrap()
    };
    let (quick, whole) = (search(SearchEffort::Quick), search(SearchEffort::Whole));
    let ns = |outcome: &Outcome| outcome.ranked[0].prediction.step_ns_mean;
    let best = |outcome: &Outcome| (ns(outcome), outcome.ranked[0].layout.to_string());
    assert!(
        ns(&quick) <= ns(&whole) + ns(&whole) / 100,
        "{num_ranks}: {:?} {:?}",
        best(&quick),
        best(&whole)
    );
    let fallen: u64 = quick.rejections.iter().map(|r| r.count).sum();
    assert_eq!(fallen + quick.num_judged, quick.num_candidates, "{num_ranks} ranks");
    let mut kinds = [false; 4];
    for plan in quick.ranked.iter().chain(&whole.ranked) {
        let layout = plan.layout;
        let text = explain(&Outcome { ranked: vec![*plan], ..quick.clone() });
        assert!(text.contains(&layout.to_string()) || layout.encoder.pp == 1, "{layout}: {text}");
        kinds[0] |= layout.encoder.tp.max(layout.llm.tp) > 1;
        kinds[1] |= layout.encoder.pp > 1;
        kinds[2] |= layout.llm_cut.is_some() || layout.encoder_cut.is_some();
        kinds[3] |= layout.zero == Zero::States;
    }
    kinds
}

/// The same on more ranks: some minutes.
#[test]
#[ignore = "minutes: thousands of candidates are judged"]
fn the_quick_search_loses_no_more_on_eight_to_sixteen_ranks() {
    for (num_ranks, seed, budget) in
        [(8, 6, Some(110 << 20)), (12, 7, Some(110 << 20)), (12, 8, None), (16, 9, Some(140 << 20))]
    {
        _ = kinds_of_plans(num_ranks, seed, budget);
    }
}

/// Whoever is compared with a plan that may cut layers may cut them too, whatever the plan itself is restricted to.
#[test]
fn rivals_may_cut_layers_too() {
    let cut = fixture::cuttable();
    let whole = ModelProfile { variants: Vec::new(), ..cut.clone() };
    let shapes = fixture::shapes(64, 4);
    let rivals = |model_profile: &ModelProfile, only: &str| {
        let only = only.parse().expect("these are parts of a plan");
        let input = input(&shapes, model_profile, 4);
        // Too little for whole layers.
        let cluster = fixture::cluster(4, Some(250 << 20));
        search(&SearchInput { only, cluster, compares: true, effort: SearchEffort::Quick, ..input })
            .unwrap()
            .rivals
    };
    let (of_cut, of_whole) = (rivals(&cut, "colocated=true"), rivals(&whole, "colocated=true"));
    for name in ["megatron", "fsdp"] {
        let of = |rivals: &[Rival]| rivals.iter().find(|rival| rival.name == name).unwrap().clone();
        let (cut, whole) = (of(&of_cut), of(&of_whole));
        assert_eq!(whole.step_ns_mean, None, "{whole:?}");
        assert!(["tp 2", "tp 4"].iter().any(|tp| cut.layout.contains(tp)), "{cut:?}");
        assert!(cut.step_ns_mean.is_some(), "{cut:?}");
    }
    let of_others =
        |rivals: Vec<Rival>| rivals.into_iter().filter(|rival| rival.name != "paper").collect::<Vec<_>>();
    assert_eq!(of_others(rivals(&cut, "encoder.tp=1,llm.tp=1")), of_others(of_cut));
}

/// Pipelines whose ranks hold several chunks, where they are asked for: in words, within the layers there are, with all
/// else that a search varies; whatever falls is counted.
#[test]
fn chunks_are_planned_where_they_are_asked_for() {
    let model_profile = fixture::cuttable();
    let shapes = fixture::shapes(64, 3);
    let of = |only: &str, num_ranks| {
        let only = only.parse().unwrap();
        search(&SearchInput { only, ..input(&shapes, &model_profile, num_ranks) }).unwrap()
    };
    let outcome = of("llm.interleave=2", 6);
    assert!(!outcome.ranked.is_empty());
    for plan in &outcome.ranked {
        // Four layers: two ranks of two chunks at most.
        assert_eq!((plan.layout.llm_interleave, plan.layout.llm.pp), (2, 2), "{}", plan.layout);
        assert!(plan.prediction.step_ns_mean > 0);
    }
    assert!(explain(&outcome).contains(" interleave 2"), "{}", explain(&outcome));
    let fallen: u64 = outcome.rejections.iter().map(|r| r.count).sum();
    assert_eq!(fallen + outcome.num_judged, outcome.num_candidates);
    let too_many = |r: &&RejectionCount| matches!(r.rejection, Rejection::ChunksExceedLayers { .. });
    let found = outcome.rejections.iter().find(too_many).unwrap();
    assert_eq!(
        found.rejection.to_string(),
        "llm pp 3 x interleave 2 exceeds the 4 layers of the LLM backbone"
    );
    let none = of("llm.interleave=3,encoder.pp=1,encoder.tp=1,llm.tp=1", 4);
    assert!(none.ranked.is_empty());
    let hint = "ask for fewer chunks (`--only llm.interleave`): the stages of all ranks are 4 at most";
    assert_eq!(none.hint().unwrap(), hint);
    // Not proposed without being asked for.
    assert!(of("", 6).ranked.iter().all(|plan| plan.layout.llm_interleave == 1));
}

/// A merger stands between the layers of MiniCPM-V's encoder, and a model profile has the mean of those before and behind it.
#[test]
fn an_encoder_whose_stages_nobody_can_predict_has_one() {
    let shapes = fixture::shapes(64, 3);
    let of = |family: &str| {
        let model_profile = ModelProfile { family: family.to_owned(), ..fixture::cuttable() };
        let input = input(&shapes, &model_profile, 6);
        search(&SearchInput { only: "encoder.pp=2".parse().unwrap(), ..input }).unwrap()
    };
    assert!(of("qwen2_vl").ranked.iter().all(|plan| plan.layout.encoder.pp == 2));
    assert!(!of("qwen2_vl").ranked.is_empty());
    let none = of("minicpmv4_6");
    assert!(none.ranked.is_empty());
    let why = none.rejections.iter().map(|fallen| fallen.rejection.to_string()).collect::<Vec<_>>();
    assert_eq!(why, ["encoder pp 2, but the encoder is one stage: it cannot be cut into several"]);
}

/// Megatron interleaves where that is shorter: text alone, on ranks with less memory than the whole model takes.
#[test]
fn rivals_interleave_too() {
    let mut model_profile = fixture::cuttable();
    model_profile.variants.clear();
    model_profile.modules.get_mut("llm_layer").expect("it is there").count = 8;
    let text = fixture::shapes(64, 3).into_iter().find(|shape| shape.num_parts() == 0).unwrap();
    let shapes = vec![text; 64];
    let cluster = fixture::cluster(4, Some(250 << 20));
    let asked = SearchInput { cluster, compares: true, ..input(&shapes, &model_profile, 4) };
    let outcome = search(&asked).unwrap();
    let of = |name: &str| outcome.rivals.iter().find(|rival| rival.name == name).unwrap();
    // Four ranks of two layers each, in two chunks; of all numbers of chunks it takes the shortest step.
    assert_eq!(of("megatron").layout, "tp 1 pp 4 dp 1 interleave 2, zero 1");
    assert!(of("megatron-balanced").step_ns_mean <= of("megatron").step_ns_mean);
}

/// Tensor groups and shards of a part of their replicas, in one layout: where it is asked for, and of a node where ZeRO-3 is.
#[test]
fn shards_of_some_replicas_are_planned_with_tensor_groups() {
    let model_profile = fixture::cuttable();
    let shapes = fixture::shapes(64, 4);
    let found = |only: &str| {
        let only = only.parse().expect("these are parts of a plan");
        let cluster = dflop_types::Cluster { ranks_per_node: 4, ..fixture::cluster(8, None) };
        let input = SearchInput { only, cluster, ..input(&shapes, &model_profile, 8) };
        let outcome = search(&SearchInput { effort: SearchEffort::Whole, ..input }).unwrap();
        let of = |plan: &dflop_types::RankedPlan| {
            (plan.layout.llm.tp, plan.layout.llm.dp, u8::from(plan.layout.zero), plan.layout.shard_ranks)
        };
        // Plans that leave ranks free are beside them.
        let of_all = outcome.ranked.iter().filter(|plan| plan.layout.num_ranks() == 8);
        of_all.map(of).collect::<std::collections::BTreeSet<_>>()
    };
    let asked = found("colocated=true,llm.tp=2,shard_ranks=2,recompute=none");
    assert_eq!(asked, [(2, 4, 1, Some(2)), (2, 4, 3, Some(2))].into());
    // A node has two of the four replicas.
    let of_node = found("colocated=true,llm.tp=2,zero=3,recompute=none");
    assert_eq!(of_node, [(2, 4, 3, None), (2, 4, 3, Some(2))].into());
}

/// Tests that search many times.
mod more {
    use super::*;

    /// As on plain pipelines, with layers that can be cut over ranks, encoders of several stages, uneven cuts and sharded states:
    /// the search looks at all of them without being asked, and loses no more.
    #[test]
    #[ignore = "`make test-more` runs it"]
    fn the_quick_search_finds_every_layout_that_training_runs() {
        // A rank with less memory than a whole LLM backbone takes must share it.
        let kinds = [(4, 1, None), (5, 4, Some(140 << 20)), (6, 3, Some(110 << 20))];
        let kinds = kinds.map(|(num_ranks, seed, budget)| kinds_of_plans(num_ranks, seed, budget));
        assert_eq!([0, 1, 2, 3].map(|at| kinds.iter().any(|of| of[at])), [true; 4]);
    }
}
