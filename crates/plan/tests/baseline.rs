//! What a plan is held against: data parallelism by its own sums, ways that cannot run, and no ratio formed with them.

use crate::{asked, fixture};
use dflop_cost::{CostModel, RankMicrobatch};
use dflop_plan::{DataParallel, SearchInput, compare, explain, search};
use dflop_step::batches::GlobalBatches;
use dflop_step::{Arm, Method, StepScheduler, StepSettings};
use dflop_types::{
    ComponentLayout, Layout, MadeFrom, MicrobatchShape, ModelProfile, PipelineOrder, Refusal, SampleIndex,
    SampleShape, WayPrediction, memory_size, number,
};

fn data_parallel<'a>(model: &'a CostModel, shapes: &'a [SampleShape], num_ranks: u32) -> DataParallel<'a> {
    DataParallel {
        model,
        shapes,
        num_ranks,
        shards_states: false,
        memory_budget_bytes: None,
        bucket_tokens_max: None,
    }
}

fn batch(count: u32) -> Vec<SampleIndex> {
    (0..count).map(SampleIndex).collect()
}

fn packed(shapes: &[&SampleShape]) -> RankMicrobatch {
    RankMicrobatch {
        shape: MicrobatchShape::pack(shapes.iter().copied()),
        feature_tokens: shapes.iter().map(|shape| u64::from(shape.feature_tokens)).sum(),
    }
}

/// Two ranks get two equal samples each: the step is the encoder's and the LLM's time of two samples, and what comes after
/// the last action. Longest first by LLM tokens: 900 and 100 tokens stand against 600 and 500.
#[test]
fn a_step_is_the_longest_sum_of_a_rank_and_the_reduction() {
    let model = CostModel::new(&fixture::model_profile()).unwrap();
    let work_ns = |shapes: &[&SampleShape]| {
        let shape = MicrobatchShape::pack(shapes.iter().copied());
        model.encoder(&shape).total_ns() + model.llm_stage(&shape, 4, true, true).total_ns()
    };
    let tail_ns = model.whole_tail(2, 1).ns;
    assert!(tail_ns > model.whole_tail(1, 1).ns, "two ranks reduce their gradients");
    let even = vec![fixture::sample(2, 360, 100); 4];
    let step = data_parallel(&model, &even, 2).step(&batch(4)).unwrap();
    assert_eq!(step.makespan_ns, work_ns(&[&even[0], &even[1]]) + tail_ns);
    assert_eq!(step.num_microbatches, 1);
    let mixed =
        [(0, 900), (3, 600), (0, 500), (0, 100)].map(|(tiles, tokens)| fixture::sample(tiles, 0, tokens));
    let step = data_parallel(&model, &mixed, 2).step(&batch(4)).unwrap();
    let ranks = [work_ns(&[&mixed[0], &mixed[3]]), work_ns(&[&mixed[1], &mixed[2]])];
    assert_eq!(step.makespan_ns, ranks[0].max(ranks[1]) + tail_ns, "the tiles are not looked at");
}

/// The budget decides over the number of microbatches, and then over whether there is a step at all.
#[test]
fn what_does_not_fit_is_refused_with_its_bytes() {
    let model = CostModel::new(&fixture::model_profile()).unwrap();
    let shapes = vec![fixture::sample(4, 720, 300); 16];
    let free = data_parallel(&model, &shapes, 2);
    let whole = free.step(&batch(16)).unwrap();
    let within =
        |memory_budget_bytes| DataParallel { memory_budget_bytes: Some(memory_budget_bytes), ..free };
    let tight = within(whole.needed_bytes - 1).step(&batch(16)).unwrap();
    assert!(tight.num_microbatches > 1 && tight.needed_bytes < whole.needed_bytes);
    assert!(tight.makespan_ns > whole.makespan_ns, "each microbatch pays its launches");
    let alone = model.whole_peak(&packed(&[&shapes[0]]), 1).total_bytes();
    assert_eq!(within(alone).step(&batch(16)).unwrap().num_microbatches, 8);
    let refusal = within(alone - 1).step(&batch(16)).unwrap_err();
    assert_eq!(refusal, Refusal::Memory { needed_bytes: alone, budget_bytes: alone - 1 });
    // States cut over the ranks leave room again.
    let sharded = DataParallel { shards_states: true, ..within(alone - 1) };
    assert!(sharded.step(&batch(16)).is_ok());
    // A cap on tokens is kept by more microbatches, and refused where a sample is over it.
    let capped = |cap| DataParallel { bucket_tokens_max: Some(cap), ..free }.step(&batch(16));
    assert_eq!(capped(2_040).unwrap().num_microbatches, 4);
    assert_eq!(
        capped(1_000).unwrap_err(),
        Refusal::BucketTokens { needed_tokens: 1_020, bucket_tokens_max: 1_000 }
    );
}

/// A rank with the whole model holds no less than one with either part, and its states once.
#[test]
fn the_whole_model_is_held_once() {
    let model = CostModel::new(&fixture::model_profile()).unwrap();
    let shape = fixture::sample(4, 720, 300);
    let whole = model.whole_peak(&packed(&[&shape]), 1);
    let parameters: u64 =
        fixture::model_profile().modules.values().map(|m| m.parameter_bytes * u64::from(m.count)).sum();
    assert_eq!(whole.parameter_bytes, parameters);
    assert_eq!(whole.optimizer_bytes, 2 * parameters);
    assert_eq!(model.whole_peak(&packed(&[&shape]), 4).optimizer_bytes, parameters / 2);
    // Encoder: 2,000 bytes a token of 2,916; LLM: 4 layers of 6,000 bytes, 512 of the embedding, 1,020 tokens; head: 9,000 of
    // 100 labels; and what attention keeps. All of it is held when the backward begins.
    let linear = 2_000 * 2_916 + (4 * 6_000 + 512) * 1_020 + 9_000 * 100;
    assert!(whole.activation_bytes + whole.logits_bytes >= linear, "{whole:?}");
    assert!(whole.activation_bytes + whole.logits_bytes < 2 * linear, "{whole:?}");
}

fn settings(llm_dp: u32, num_microbatches: u32, memory_budget_bytes: Option<u64>) -> StepSettings {
    let component = |pp, dp| ComponentLayout { tp: 1, pp, dp };
    StepSettings {
        layout: Layout::disaggregated(component(1, 1), component(1, llm_dp)),
        num_microbatches,
        pipeline_order: PipelineOrder::OneFOneB,
        memory_budget_bytes,
    }
}

fn fullest(scheduler: &StepScheduler, batch: &[SampleIndex], method: Method) -> u64 {
    let schedule = scheduler.schedule(0, batch, Arm { method, is_ahead: false }).unwrap();
    scheduler.memory(&schedule).unwrap().iter().map(dflop_cost::RankMemory::total_bytes).max().unwrap()
}

/// Videos that arrive together fill one microbatch of arrival order, which then does not fit where ours does. It is said with
/// its bytes, the others are compared all the same, and nothing is divided by it.
#[test]
fn a_baseline_that_cannot_run_hides_no_other() {
    let model = fixture::model_profile();
    let mut shapes = vec![fixture::sample(24, 1_176, 60); 4];
    shapes.extend(vec![fixture::sample(0, 0, 200); 12]);
    let free =
        StepScheduler::new(settings(1, 4, None), CostModel::new(&model).unwrap(), shapes.clone(), 1).unwrap();
    let batch = batch(16);
    let (blind, aware) = (fullest(&free, &batch, Method::Blind), fullest(&free, &batch, Method::Aware));
    assert!(aware < blind, "{aware} {blind}");
    let budget = aware + (blind - aware) / 2;
    let tight =
        StepScheduler::new(settings(1, 4, Some(budget)), CostModel::new(&model).unwrap(), shapes, 1).unwrap();
    let ways = compare(&tight, std::slice::from_ref(&batch), false).unwrap();
    let names: Vec<&str> = ways.iter().map(|way| way.way.as_str()).collect();
    assert_eq!(
        names,
        [
            "blind",
            "blind-ahead",
            "tokens",
            "tokens-ahead",
            "data-parallel",
            "data-parallel-sharded",
            "aware",
            "aware-ahead"
        ]
    );
    let of = |name: &str| ways.iter().find(|way| way.way == name).unwrap();
    assert_eq!(of("blind").step_ns_mean, None);
    assert_eq!(of("blind").refusal, Some(Refusal::Memory { needed_bytes: blind, budget_bytes: budget }));
    let ours = of("aware").step_ns_mean.unwrap();
    let (best, best_ns) = WayPrediction::best_baseline(&ways).unwrap();
    assert!(best.refusal.is_none() && best.is_baseline);
    assert!(
        ways.iter().filter(|way| way.is_baseline).all(|way| way.step_ns_mean.is_none_or(|ns| ns >= best_ns))
    );
    // Where it can run, arrival order is never predicted faster than ours on the same layout.
    let untied = compare(&free, std::slice::from_ref(&batch), false).unwrap();
    let free_of = |name: &str| untied.iter().find(|way| way.way == name).unwrap().step_ns_mean.unwrap();
    assert!(free_of("aware") <= free_of("blind") && ours >= free_of("aware"));
}

/// Half and twice the microbatches are tried for baselines where the count is not given, and the faster is named.
#[test]
fn baselines_may_choose_their_microbatches() {
    let shapes = fixture::shapes(32, 3);
    let model = CostModel::new(&fixture::model_profile()).unwrap();
    let scheduler = StepScheduler::new(settings(1, 2, None), model, shapes, 1).unwrap();
    let batches = [batch(32)];
    let (own, tuned) =
        (compare(&scheduler, &batches, false).unwrap(), compare(&scheduler, &batches, true).unwrap());
    assert_eq!(own[0].num_microbatches, 2);
    // Two microbatches over two ranks leave one idle half of the time: more are faster.
    assert_eq!(tuned[0].num_microbatches, 4);
    assert!(tuned[0].step_ns_mean.unwrap() < own[0].step_ns_mean.unwrap());
    assert_eq!(own.last().unwrap(), tuned.last().unwrap(), "ours is what was planned");
}

fn input<'a>(shapes: &[SampleShape], profile: &'a ModelProfile, budget: Option<u64>) -> SearchInput<'a> {
    SearchInput {
        cluster: fixture::cluster(2, budget),
        num_sampled_batches: 2,
        seed: 1,
        made_from: MadeFrom::new(),
        ..asked::input(shapes, profile, 2)
    }
}

/// A plan carries what it was compared with, and ours in it is the plan itself.
#[test]
fn a_plan_is_compared_on_the_batches_it_was_judged_on() {
    let (shapes, profile) = (fixture::shapes(100, 5), fixture::model_profile());
    let outcome = search(&input(&shapes, &profile, None)).unwrap();
    let plan = outcome.plan().unwrap();
    let of = |name: &str| plan.ways.iter().find(|way| way.way == name).unwrap().step_ns_mean.unwrap();
    let mean = plan.best.prediction.step_ns_mean;
    assert!(of("aware").abs_diff(mean) <= 1, "{} {mean}", of("aware"));
    assert!(of("blind-ahead") <= of("blind") && of("aware-ahead") <= of("aware"));
    let batch = GlobalBatches::new(100, 32, 1).unwrap().batch(0);
    assert_eq!(batch.len(), 32);
    let text = explain(&outcome);
    assert!(text.contains("the same global batches in other ways on the same ranks"), "{text}");
    let (best, ns) = WayPrediction::best_baseline(&plan.ways).unwrap();
    let ratio = format!(
        "{} over the best baseline above that can run, {}",
        number::times(ns as f64 / mean as f64),
        best.way
    );
    assert!(text.contains(&ratio), "{text}");
}

/// The number of microbatches that was asked for is what binds, and the hint names it and one with which a plan fits.
#[test]
fn the_hint_names_the_limit_that_binds() {
    let (shapes, profile) = (fixture::shapes(100, 5), fixture::model_profile());
    let of = |count, budget| {
        search(&SearchInput { num_microbatches: count, ..input(&shapes, &profile, budget) }).unwrap()
    };
    let peak = |outcome: &dflop_plan::Outcome| {
        let prediction = outcome.ranked[0].prediction;
        prediction.encoder_memory_bytes_peak.max(prediction.llm_memory_bytes_peak)
    };
    let (few, many) = (peak(&of(Some(2), None)), peak(&of(Some(16), None)));
    assert!(many < few);
    let bytes = many + (few - many) / 4;
    let budget = Some(bytes);
    assert!(!of(None, budget).ranked.is_empty(), "without that number a plan fits");
    let outcome = of(Some(2), budget);
    assert!(outcome.ranked.is_empty());
    let hint = outcome.hint().unwrap();
    let count = outcome.fitting_num_microbatches.unwrap();
    assert!(count > 2 && !of(Some(count), budget).ranked.is_empty(), "{count}");
    let both = format!(
        "`train.num_microbatches` of 2 and the memory budget of {} contradict each other: with {count} microbatches a plan fits",
        memory_size(bytes)
    );
    assert!(hint.starts_with(&both), "{hint}");
    // Where no number would do, memory is what binds.
    let hint = of(Some(2), Some(24 << 20)).hint().unwrap();
    assert!(hint.starts_with("raise `cluster.memory_budget_bytes` to "), "{hint}");
}
