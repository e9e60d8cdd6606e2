//! The search over colocated tensor groups whose ranks each hold a whole encoder.

use crate::{asked, fixture};
use dflop_analytic::{EstimateSettings, Hardware, catalogue_model, estimate};
use dflop_plan::{Only, Outcome, SearchEffort, SearchInput, search};
use dflop_types::{Cluster, MadeFrom, ModelProfile, SampleShape};

fn only(text: &str) -> Only {
    text.parse().unwrap()
}

/// What is asked for is what is looked at.
#[test]
fn the_encoders_degree_may_be_asked_for() {
    let (profile, shapes) = (fixture::cuttable(), fixture::shapes(64, 3));
    let of = |text: &str| {
        let effort = SearchEffort::Quick;
        search(&SearchInput { effort, only: only(text), ..asked::input(&shapes, &profile, 8) }).unwrap()
    };
    let degrees = |outcome: &Outcome| {
        let mut found: Vec<[u32; 4]> = Vec::new();
        for plan in &outcome.ranked {
            let (encoder, llm) = (plan.layout.encoder, plan.layout.llm);
            found.push([encoder.tp, encoder.dp, llm.tp, llm.dp]);
        }
        found.sort_unstable();
        found.dedup();
        found
    };
    assert_eq!(degrees(&of("colocated=true,encoder.tp=1,llm.tp=4")), [[1, 8, 4, 2]]);
    assert_eq!(degrees(&of("colocated=true,encoder.tp=4,llm.tp=4")), [[4, 2, 4, 2]]);
}

/// The quick search over all colocated layouts loses no more than over pipelines.
#[test]
fn the_quick_search_loses_little() {
    let profile = fixture::cuttable();
    for (num_ranks, seed, budget) in [(4, 1, None), (4, 5, Some(140 << 20)), (8, 2, None)] {
        let shapes = fixture::shapes(32, seed);
        let step_ns = |effort| {
            let cluster = fixture::cluster(num_ranks, budget);
            let input = SearchInput {
                global_batch_size: 16,
                num_sampled_batches: 2,
                ..asked::input(&shapes, &profile, num_ranks)
            };
            let outcome =
                search(&SearchInput { effort, cluster, only: only("colocated=true"), ..input }).unwrap();
            outcome.ranked[0].prediction.step_ns_mean
        };
        let (quick, whole) = (step_ns(SearchEffort::Quick), step_ns(SearchEffort::Whole));
        assert!(quick <= whole + whole / 100, "{num_ranks}: {quick} {whole}");
    }
}

/// The encoder of `internvl3-78b-hf` has 25 heads, which no degree of its LLM divides. Ranks that hold the encoder whole share the LLM, and
/// the search finds that by itself.
#[test]
fn an_encoder_whose_heads_do_not_divide_stands_whole_beside_a_cut_llm() {
    let model = catalogue_model("internvl3-78b-hf").unwrap();
    let settings = EstimateSettings {
        model: model.name.clone(),
        dtype: "bfloat16".to_owned(),
        made_from: MadeFrom::new(),
        lora_rank: 0,
    };
    let profile: ModelProfile =
        estimate(&model.architecture().unwrap(), Hardware::named("h100").unwrap(), &settings).unwrap();
    // Pictures of 1 to 60 tiles of 1,024 patches, 256 features each, and text: one sample takes a whole rank's room.
    let picture = |tiles: u32| SampleShape {
        encoder_segments: vec![dflop_types::EncoderSegments::of(tiles, 1_025)],
        feature_tokens: 256 * tiles,
        llm_tokens: 256 * tiles + 300,
        label_tokens: 100,
        ..SampleShape::default()
    };
    let shapes: Vec<SampleShape> = (0..256).map(|at| picture(1 + 7 * at % 60)).collect();
    let of = |text: &str| {
        let cluster = Cluster { num_ranks: 64, ranks_per_node: 8, memory_budget_bytes: Some(72_000_000_000) };
        let input = asked::input(&shapes, &profile, 64);
        search(&SearchInput {
            cluster,
            global_batch_size: 128,
            only: only(text),
            num_sampled_batches: 2,
            ..input
        })
    };
    let free = of("colocated=true").unwrap();
    let best = free.ranked[0].layout;
    assert!(best.encoders_per_group() > 1, "{best}");
    let asked = of("colocated=true,encoder.tp=1,llm.tp=4").unwrap();
    assert_eq!(asked.ranked[0].layout.to_string(), "colocated encoder tp 1 dp 64, llm tp 4 dp 16, zero 3");
    let error = of("colocated=true,encoder.tp=4,llm.tp=4").unwrap_err().to_string();
    assert!(error.contains('4'), "{error}");
}
