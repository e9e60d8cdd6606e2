//! Rivals on cases that are worked out by hand. Times are in microseconds, as in the comments.
//!
//! The model: an LLM layer takes 1 us for 100 tokens forward, the encoder 1 us for 100 encoder tokens, and a backward takes twice
//! that. Embedding, projector and head take the least that a profile may say, a nanosecond, so times are compared in whole microseconds.

use super::*;
use crate::contender::Known;
use crate::fixture;
use crate::found::Found;
use crate::input::{Depth, SearchEffort};
use crate::objective::Objective;
use crate::run_memory::Run;
use crate::space::Candidate;
use dflop_step::GiantRule;
use dflop_types::{
    Cluster, EncoderSegments, MadeFrom, MeasuredCurve, MeasuredPoint, ModelProfile, ModuleProfile, Network,
    PipelineOrder, Recomputation, SampleIndex, SampleShape, Trained,
};
use std::sync::Arc;

/// Four LLM layers and an encoder of one; each LLM layer has a million parameters, the encoder two. The optimizer takes `optimizer_us`
/// for a million parameters.
fn profile(network: Network, optimizer_us: u64) -> ModelProfile {
    let module = |ns_of_hundred: u64, count, num_parameters| {
        let point = |size: u64| MeasuredPoint {
            size,
            forward_ns: (ns_of_hundred * size / 100).max(1),
            backward_ns: (2 * ns_of_hundred * size / 100).max(1),
            repeats: 9,
            ..MeasuredPoint::default()
        };
        ModuleProfile {
            count,
            linear: MeasuredCurve { points: [100, 100_000].map(point).into(), ..MeasuredCurve::default() },
            num_parameters,
            parameter_bytes: 4 * num_parameters,
            ..ModuleProfile::default()
        }
    };
    let mut profile = ModelProfile {
        family: "llava_onevision".to_owned(),
        hidden_bytes: 1,
        network,
        optimizer_ns_per_million: 1_000 * optimizer_us,
        ..ModelProfile::default()
    };
    "float32".clone_into(&mut profile.device.dtype);
    for (name, module) in [
        ("encoder_embedding", module(0, 1, 0)),
        ("encoder_layer", module(1_000, 1, 2_000_000)),
        ("projector", module(0, 1, 0)),
        ("llm_embedding", module(0, 1, 0)),
        ("llm_layer", module(1_000, 4, 1_000_000)),
        ("llm_head", module(0, 1, 0)),
    ] {
        profile.modules.insert(name.to_owned(), module);
    }
    profile
}

fn sample(encoder_tokens: u32, llm_tokens: u32) -> SampleShape {
    let segments = (encoder_tokens > 0).then(|| EncoderSegments::of(1, encoder_tokens));
    SampleShape {
        encoder_segments: segments.into_iter().collect(),
        llm_tokens,
        label_tokens: 100,
        ..SampleShape::default()
    }
}

const fn us(ns: u64) -> u64 {
    (ns + 500) / 1_000
}

/// All samples are one global batch, of two microbatches.
fn input<'a>(
    shapes: &[SampleShape],
    model_profile: &'a ModelProfile,
    num_ranks: u32,
    memory_budget_bytes: Option<u64>,
) -> SearchInput<'a> {
    SearchInput {
        shapes: Arc::from(shapes),
        model_profile,
        cluster: Cluster { num_ranks, ranks_per_node: num_ranks, memory_budget_bytes },
        global_batch_size: shapes.len() as u32,
        num_microbatches: Some(2),
        giants: GiantRule::default(),
        bucket_tokens_max: None,
        order: Some(PipelineOrder::OneFOneB),
        objective: Objective::Mean,
        trained: Trained::default(),
        num_steps: 0,
        num_sampled_batches: 1,
        only: Only::default(),
        compares: true,
        effort: SearchEffort::Quick,
        halt: &|| false,
        seed: 1,
        made_from: MadeFrom::new(),
        progress: &|_, _| {},
    }
}

/// Two ranks, four samples, two microbatches. A message takes 9 us and 1 us for 1,000 tokens, the mean microbatch: 10 us.
/// A rank has no room for all six million parameters with their gradients and states, but for four million. So there are two stages.
///
/// ```text
/// sample                  0    1    2    3
/// LLM layer, forward      6    6    4    4
/// encoder, forward       20    0   10    0
/// ```
///
/// Arrival order has samples 0 + 1 = A and 2 + 3 = B: a layer takes 12 and 8, the encoder 20 and 10. With backwards the encoder is
/// 90 in all and a layer 60. So two and two layers are 210 and 120; one and three are 150 and 180, and are tried as well.
///
/// ```text
/// 2 + 2  first rank   FA 0-44, FB -70                             BA 136-224 (88)  BB -276 (52)      276, and 4 for 4 M parameters
///        last rank    FA 54-78, BA -126, FB -142, BB -174
/// 1 + 3  first rank   FA 0-32, FB -50                             BA 160-224 (64)  BB 232-268 (36)   268, and 3 for 3 M parameters
///        last rank    FA 42-78, BA -150, FB -174, BB -222
/// ```
///
/// In two chunks of a layer each the first rank runs all its forwards, then all backwards, and ends at 300.
///
/// Balanced by time, longest first: 0 (132), 2 (78), 1 (72), 3 (48) give 0 + 3 and 2 + 1. A layer takes 10 of both, the encoder 20
/// and 10. Now the even cut is faster.
///
/// ```text
/// 2 + 2  first rank   F0 0-40, F1 -70                             B0 120-200 (80)  B1 -260 (60)      260, and 4
///        last rank    F0 50-70, B0 -110, F1 -130, B1 -170
/// 1 + 3  first rank   F0 0-30, F1 -50                             B0 140-200 (60)  B1 230-270 (40)   270, and 3
///        last rank    F0 40-70, B0 -130, F1 -160, B1 -220
/// ```
///
/// Either way the ranks work 90 + 4 x 60 = 330, so a mean one works 165.
#[test]
fn megatron_takes_what_a_hand_says() {
    let network = Network::of_pair(9_000, 1_000_000_000);
    let profile = profile(network, 1);
    let shapes = [(2_000, 600), (0, 600), (1_000, 400), (0, 400)].map(|(of, tokens)| sample(of, tokens));
    let input = input(&shapes, &profile, 2, Some(85_000_000));
    let models = Models::new(&input).unwrap();
    let batch: Vec<SampleIndex> = (0..4).map(SampleIndex).collect();
    let sampled = [batch];
    let of = |input: &SearchInput<'_>, is_balanced| {
        let known = &Known::new(input, &models, &sampled);
        let batches = &Batches { sampled: &sampled, fullest: Vec::new() };
        megatron(&Field { input, models: &models, known, batches, prunes: true }, "megatron", is_balanced)
    };
    let (blind, balanced) = (of(&input, false), of(&input, true));
    let step_us = |rival: &Rival| rival.step_ns_mean.map(us);
    let is_idle = |rival: &Rival, part: f64| (rival.bubble_ratio.unwrap() - part).abs() < 1e-4;
    assert_eq!(blind.layout, "tp 1 pp 2 dp 1, first rank 1 layer, last 3, zero 1");
    assert_eq!((step_us(&blind), blind.num_microbatches), (Some(271), 2));
    assert!(is_idle(&blind, 103.0 / 271.0), "{:?}", blind.bubble_ratio);
    assert_eq!(balanced.layout, "tp 1 pp 2 dp 1, zero 1");
    assert_eq!((step_us(&balanced), balanced.num_microbatches), (Some(264), 2));
    // Where four million are too many as well, the first rank cannot have two layers.
    let tight = Cluster { memory_budget_bytes: Some(70_000_000), ..input.cluster.clone() };
    let tight = SearchInput { cluster: tight, ..input.clone() };
    let uneven = of(&tight, true);
    assert_eq!((step_us(&uneven), uneven.layout), (Some(273), blind.layout));
    assert!(is_idle(&balanced, 95.0 / 264.0), "{:?}", balanced.bubble_ratio);
}

/// Three ranks, four equal samples, two microbatches, transfers and optimizer free. Forward and backward of a sample take 24 in
/// the encoder and 60 in the LLM backbone. Algorithm 1, `T = (m + stages - 1) max(E, L)`:
///
/// ```text
/// encoder dp 1, llm pp 2 dp 1   E = 2 x 24 = 48   L = 2 x 30 = 60    4 x 60  = 240
/// encoder dp 1, llm pp 1 dp 2   E = 2 x 24 = 48   L = 60             3 x 60  = 180
/// encoder dp 2, llm pp 1 dp 1   E = 24            L = 2 x 60 = 120   3 x 120 = 360
/// ```
///
/// The second is the layout of `paper`. Its step: the encoder runs F 0-16 and 16-32, the LLM backbone F 16-36, B -76, F -96, B -136, and
/// the encoder's last backward then takes 32: 168. The simulator knows that stages are unequal, the algorithm does not.
#[test]
fn the_paper_takes_the_layout_that_its_formula_says() {
    let profile = profile(Network::default(), 0);
    let shapes = vec![sample(800, 500); 4];
    let input = input(&shapes, &profile, 3, None);
    let models = Models::new(&input).unwrap();
    let batches = [(0..4).map(SampleIndex).collect::<Vec<_>>()];
    let known = Known::new(&input, &models, &batches);
    let layouts = [[1, 2, 1], [1, 1, 2], [2, 1, 1]].map(|[encoder, pp, dp]| {
        let degrees = |pp, dp| dflop_types::ComponentLayout { tp: 1, pp, dp };
        dflop_types::Layout::disaggregated(degrees(1, encoder), degrees(pp, dp))
    });
    let candidates = layouts.map(|layout| Candidate {
        layout,
        num_microbatches: 2,
        recompute: Recomputation::NONE,
        order: PipelineOrder::OneFOneB,
    });
    let all = crate::contender::contenders(&input, &models, &known, &candidates, &mut Vec::new()).unwrap();
    let at_mean: Vec<u64> = all.iter().map(|one| us(one.rough.at_mean_ns)).collect();
    assert_eq!(at_mean, [240, 180, 360]);
    let held = Held { batches: &batches, run: None };
    let found = rivals(&input, &models, &known, &all, &held).unwrap();
    let paper = found.iter().find(|rival| rival.name == "paper").unwrap();
    assert_eq!(paper.candidate.map(|one| one.layout), Some(layouts[1]));
    assert_eq!(paper.step_ns_mean.map(us), Some(168));
    // Backwards, the answer is the same.
    let backwards: Vec<Contender> = all.into_iter().rev().collect();
    assert_eq!(rivals(&input, &models, &known, &backwards, &held).unwrap(), found);
}

/// Rivals choose among candidates by time, and by the candidate where times are equal: not by who comes first.
#[test]
fn no_rival_depends_on_the_order_of_candidates() {
    let profile = fixture::recomputing();
    let shapes = fixture::shapes(64, 5);
    let asked = input(&shapes, &profile, 4, None);
    let asked = SearchInput { global_batch_size: 32, num_microbatches: None, ..asked };
    let models = Models::new(&asked).unwrap();
    let batches = crate::search::sampled_batches(&asked).unwrap();
    let known = Known::new(&asked, &models, &batches);
    let all = crate::search::candidates(&asked, &models, &known).unwrap().contenders;
    let held = Held { batches: &batches, run: None };
    let first = rivals(&asked, &models, &known, &all, &held).unwrap();
    for by in [7, 31] {
        assert_eq!(rivals(&asked, &models, &known, &dealt(&all, by), &held).unwrap(), first);
    }
}

/// What rivals leave out is certain to be slower: on any ranks, batches and memory their answers are those of judging all of their
/// configurations, also where the memory is so small that most of these fall.
#[test]
fn no_rival_is_weaker_for_what_it_leaves_out() {
    let (mut recomputing, mut cuttable) = (fixture::recomputing(), fixture::cuttable());
    for profile in [&mut recomputing, &mut cuttable] {
        profile.network = Network::of_pair(9_000, 1_000_000_000);
    }
    let (mut num_fitting, mut num_lacking) = (0, 0);
    for (case, num_ranks) in (0..).zip([2, 4, 6, 8, 8, 4]) {
        let profile = if case % 3 == 2 { &cuttable } else { &recomputing };
        for budget_mib in [None, Some(48), Some(80), Some(160)] {
            let shapes = fixture::shapes(96, 11 + case);
            let asked = input(&shapes, profile, num_ranks, budget_mib.map(|mib: u64| mib << 20));
            let (global_batch_size, num_sampled_batches) = (24 + 8 * case as u32, 1 + case as u32 % 3);
            let asked =
                SearchInput { global_batch_size, num_sampled_batches, num_microbatches: None, ..asked };
            let models = Models::new(&asked).unwrap();
            let batches = crate::search::sampled_batches(&asked).unwrap();
            let known = Known::new(&asked, &models, &batches);
            let all = crate::search::candidates(&asked, &models, &known).unwrap().contenders;
            let held = Held { batches: &batches, run: Run::new(&asked, &batches).unwrap() };
            let of = |prunes| rivals_with(&asked, (&models, &known), &all, &held, prunes).unwrap();
            let judged_all = of(false);
            assert_eq!(of(true), judged_all, "{num_ranks} ranks, {budget_mib:?} MiB");
            num_fitting += judged_all.iter().filter(|rival| rival.step_ns_mean.is_some()).count();
            num_lacking += judged_all.iter().filter(|rival| rival.step_ns_mean.is_none()).count();
        }
    }
    assert!(num_fitting > 60 && num_lacking > 6, "{num_fitting} fit, {num_lacking} do not");
}

/// The plan and its runners-up do not depend on the order in which candidates were made, nor do the counts.
#[test]
fn no_plan_depends_on_the_order_of_candidates() {
    check_order(16);
}

fn check_order(global_batch_size: u32) {
    let profile = fixture::recomputing();
    let shapes = fixture::shapes(400, 5);
    let asked = input(&shapes, &profile, 4, Some(120 << 20));
    let asked = SearchInput { global_batch_size, num_microbatches: None, compares: false, ..asked };
    let models = Models::new(&asked).unwrap();
    let batches = crate::search::sampled_batches(&asked).unwrap();
    let known = Known::new(&asked, &models, &batches);
    let all = crate::search::candidates(&asked, &models, &known).unwrap().contenders;
    let found = |contenders: Vec<Contender>| {
        let held = Held { batches: &batches, run: Run::new(&asked, &batches).unwrap() };
        let mut found = Found { objective: asked.objective, ..Found::default() };
        let depth = Depth::Explained;
        crate::funnel::judge(&asked, &models, contenders, &held, depth, &mut found, &|_| {}).unwrap();
        found.keep_best();
        let mut causes: Vec<String> = found.rejections.iter().map(ToString::to_string).collect();
        causes.sort_unstable();
        (found.ranked, found.num_judged, causes)
    };
    let first = found(all.clone());
    assert!(first.0.len() > 1 && all.len() > 50, "{} {}", first.0.len(), all.len());
    assert_eq!(found(dealt(&all, 7)), first, "{global_batch_size} samples");
}

/// Every `by`-th candidate, then the others: no neighbours stay together.
fn dealt(all: &[Contender], by: usize) -> Vec<Contender> {
    let places = (0..by).flat_map(|from| (from..all.len()).step_by(by));
    places.rev().map(|place| all[place].clone()).collect()
}

/// Tests that search several times.
mod more {
    use super::*;

    /// With more samples than in the test of the same name above.
    #[test]
    #[ignore = "`make test-more` runs it"]
    fn no_plan_depends_on_the_order_of_candidates() {
        check_order(40);
    }
}
