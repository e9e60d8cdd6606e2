//! The step scheduler through its verb: sound schedules for any shapes and layout, never predicted slower
//! than the blind ones, the same for the same seed, within the memory budget.

mod fixture;

use dflop_cost::{CostModel, microbatches_in_flight};
use dflop_plan::{Arm, PlanError, Prefetch, StepScheduler, StepSettings};
use dflop_types::{
    ActionKind, Component, ComponentLayout, Hint, Layout, PipelineOrder, Rank, SampleIndex, SampleShape,
    Schedule, StageIndex,
};
use proptest::prelude::*;
use std::sync::Arc;

fn layout(encoder_dp: u32, llm_pp: u32, replicas: u32) -> Layout {
    Layout {
        encoder: ComponentLayout { tp: 1, pp: 1, dp: encoder_dp },
        llm: ComponentLayout { tp: 1, pp: llm_pp, dp: replicas },
    }
}

fn settings(layout: Layout, num_microbatches: u32) -> StepSettings {
    StepSettings {
        layout,
        num_microbatches,
        pipeline_order: PipelineOrder::OneFOneB,
        memory_budget_bytes: None,
    }
}

fn scheduler(settings: StepSettings, shapes: Vec<SampleShape>, seed: u64) -> StepScheduler {
    let model = CostModel::new(&fixture::model_profile()).expect("the fixture is sound");
    StepScheduler::new(settings, model, shapes, seed).expect("the settings are sound")
}

fn indices(count: usize) -> Vec<SampleIndex> {
    (0..count as u32).map(SampleIndex).collect()
}

fn check(scheduler: &StepScheduler, schedule: &Schedule, batch: &[SampleIndex], shapes: &[SampleShape]) {
    schedule.check(batch, |s| !shapes[s.index()].encoder_segments.is_empty()).expect("a sound schedule");
    let settings = scheduler.settings();
    assert_eq!(schedule.num_microbatches(), settings.num_microbatches);
    assert!(schedule.llm.iter().all(|column| column.len() == settings.layout.llm.dp as usize));
    assert!(schedule.encoder.iter().all(|column| column.len() == settings.layout.encoder.dp as usize));
    let labels: u64 = batch.iter().map(|s| u64::from(shapes[s.index()].label_tokens)).sum();
    assert_eq!(schedule.label_tokens, labels);
    assert!(schedule.lower_bound_ns <= schedule.max_load_ns);
    let timeline = scheduler.simulate(schedule).expect("a sound step");
    assert_eq!(timeline.makespan_ns, schedule.predicted_makespan_ns);
}

#[test]
fn every_layout_and_batch_gives_a_sound_schedule() {
    let layouts = [layout(1, 1, 1), layout(1, 1, 2), layout(2, 1, 1), layout(1, 2, 1), layout(2, 2, 3)];
    let texts: Vec<SampleShape> = (1..20).map(|i| fixture::sample(0, 0, 30 * i)).collect();
    let batches = [
        ("mixed", fixture::shapes(37, 1)),
        ("text only", texts),
        ("fewer samples than buckets", fixture::shapes(3, 2)),
        ("one sample", fixture::shapes(1, 3)),
        ("empty", vec![]),
    ];
    for layout in layouts {
        for (name, shapes) in &batches {
            let scheduler = scheduler(settings(layout, 4), shapes.clone(), 7);
            let batch = indices(shapes.len());
            let aware = scheduler.schedule(5, &batch, Arm::Aware).unwrap();
            let blind = scheduler.schedule(5, &batch, Arm::Blind).unwrap();
            check(&scheduler, &aware, &batch, shapes);
            check(&scheduler, &blind, &batch, shapes);
            assert!(aware.predicted_makespan_ns <= blind.predicted_makespan_ns, "{name}, {layout}");
        }
    }
}

/// One giant among equals: it alone is longer than an even microbatch, and it alone does not fit.
#[test]
fn the_giant_is_the_outlier() {
    let mut shapes = vec![fixture::sample(2, 100, 200); 31];
    shapes.push(fixture::sample(40, 2_000, 2_400));
    let of = |memory_budget_bytes, num_microbatches| {
        let settings = StepSettings { memory_budget_bytes, ..settings(layout(1, 1, 1), num_microbatches) };
        scheduler(settings, shapes.clone(), 0).outliers(32, 3)
    };
    let free = of(None, 16);
    assert_eq!((free.heaviest.len(), free.heaviest[0].sample, free.num_longer), (3, SampleIndex(31), 1));
    assert_eq!((free.unfit.len(), free.num_unfit), (0, 0));
    // 32 samples in 16 microbatches: an even one holds two mean samples.
    let alone = |sample: &SampleShape| {
        let one = scheduler(settings(layout(1, 1, 1), 1), vec![sample.clone()], 0).outliers(1, 1);
        (one.even_encoder_ns, one.even_llm_ns)
    };
    let ((encoder, llm), (giant_encoder, giant_llm)) = (alone(&shapes[0]), alone(&shapes[31]));
    assert_eq!((free.heaviest[0].encoder_ns, free.heaviest[0].llm_ns), (giant_encoder, giant_llm));
    assert!((31 * encoder + giant_encoder).div_ceil(16).abs_diff(free.even_encoder_ns) <= 1);
    assert!((31 * llm + giant_llm).div_ceil(16).abs_diff(free.even_llm_ns) <= 1);
    // In one microbatch everything is hidden.
    assert_eq!(of(None, 1).num_longer, 0);
    let budget = free.heaviest[0].needed_bytes;
    assert_eq!(of(Some(budget), 16).num_unfit, 0);
    let tight = of(Some(budget - 1), 16);
    assert_eq!((tight.num_unfit, tight.unfit[0].sample), (1, SampleIndex(31)));
    assert_eq!(scheduler(settings(layout(1, 1, 1), 4), vec![], 0).outliers(32, 3).heaviest, []);
}

#[test]
fn an_empty_step_takes_its_tails_alone() {
    let scheduler = scheduler(settings(layout(1, 1, 1), 2), vec![], 0);
    let schedule = scheduler.schedule(0, &[], Arm::Aware).unwrap();
    // The LLM rank holds 4 layers, embedding and head: 7.2 million parameters at 3 ms a million.
    assert_eq!(schedule.predicted_makespan_ns, 21_600_000);
}

#[test]
fn blind_is_arrival_order_in_equal_counts() {
    let shapes: Vec<SampleShape> = (0..8).map(|_| fixture::sample(2, 300, 90)).collect();
    let scheduler = scheduler(settings(layout(2, 1, 2), 2), shapes, 0);
    let s = |range: std::ops::Range<u32>| range.map(SampleIndex).collect::<Vec<_>>();
    let blind = scheduler.schedule(0, &s(0..8), Arm::Blind).unwrap();
    assert_eq!(blind.llm, [[s(0..2), s(2..4)], [s(4..6), s(6..8)]]);
    assert_eq!(blind.encoder, [[s(0..2), s(2..4)], [s(4..6), s(6..8)]]);
}

#[test]
fn aware_beats_blind_clearly_on_a_skewed_batch() {
    // Four videos that arrive together and twelve texts: blind puts all videos into one microbatch.
    let mut shapes = vec![fixture::sample(16, 784, 60); 4];
    shapes.extend(vec![fixture::sample(0, 0, 200); 12]);
    let scheduler = scheduler(settings(layout(1, 1, 1), 4), shapes.clone(), 0);
    let batch = indices(16);
    let aware = scheduler.schedule(0, &batch, Arm::Aware).unwrap();
    let blind = scheduler.schedule(0, &batch, Arm::Blind).unwrap();
    assert!(aware.llm.iter().all(|column| column[0].iter().filter(|s| s.0 < 4).count() <= 2));
    let ratio = blind.predicted_makespan_ns as f64 / aware.predicted_makespan_ns as f64;
    assert!(ratio > 1.2, "{ratio}");
}

#[test]
fn equal_seeds_give_equal_schedules() {
    let shapes = fixture::shapes(64, 4);
    let batch = indices(64);
    let of = |seed, step| {
        scheduler(settings(layout(1, 1, 2), 8), shapes.clone(), seed)
            .schedule(step, &batch, Arm::Aware)
            .unwrap()
    };
    assert_eq!(of(1, 2), of(1, 2));
    assert_eq!(of(1, 2).digest(), of(1, 2).digest());
}

/// The scheduler's answer against every way to put six samples into two microbatches, in both orders.
#[test]
fn near_brute_force_on_tiny_batches() {
    let mut worst = 1.0f64;
    for seed in 0..40 {
        let shapes = fixture::shapes(6, 100 + seed);
        let scheduler = scheduler(settings(layout(1, 1, 1), 2), shapes.clone(), 0);
        let batch = indices(6);
        let found = scheduler.schedule(0, &batch, Arm::Aware).unwrap();
        let least = (0u32..64)
            .map(|mask| {
                let pick = |side: u32, all: bool| -> Vec<SampleIndex> {
                    let has = |s: &SampleIndex| all || !shapes[s.index()].encoder_segments.is_empty();
                    batch.iter().copied().filter(|s| (mask >> s.0) & 1 == side).filter(has).collect()
                };
                let schedule = Schedule {
                    llm: vec![vec![pick(0, true)], vec![pick(1, true)]],
                    encoder: vec![vec![pick(0, false)], vec![pick(1, false)]],
                    ..found.clone()
                };
                scheduler.simulate(&schedule).unwrap().makespan_ns
            })
            .min()
            .unwrap();
        worst = worst.max(found.predicted_makespan_ns as f64 / least as f64);
    }
    // Balanced buckets alone are up to 1.13 of the shortest step here: it takes the simulator to see what
    // fills a pipeline.
    assert!(worst < 1.01, "{worst}");
}

#[test]
fn the_memory_budget_is_held_or_refused_by_name() {
    let shapes = fixture::shapes(48, 9);
    let batch = indices(48);
    let free = settings(layout(1, 1, 1), 8);
    let peak = |scheduler: &StepScheduler, schedule: &Schedule| {
        scheduler.memory(schedule).unwrap().iter().map(dflop_cost::RankMemory::total_bytes).max().unwrap()
    };
    let unlimited = scheduler(free, shapes.clone(), 0);
    let needed = peak(&unlimited, &unlimited.schedule(0, &batch, Arm::Aware).unwrap());
    let mut num_held = 0;
    for percent in (50..=101).step_by(3) {
        let budget = needed * percent / 100;
        let limited =
            scheduler(StepSettings { memory_budget_bytes: Some(budget), ..free }, shapes.clone(), 0);
        match limited.schedule(0, &batch, Arm::Aware) {
            Ok(schedule) => {
                num_held += 1;
                assert!(peak(&limited, &schedule) <= budget);
                check(&limited, &schedule, &batch, &shapes);
            }
            Err(error @ (PlanError::Memory { .. } | PlanError::SampleTooLarge { .. })) => {
                assert!(error.hint().is_some());
            }
            Err(error) => panic!("{error}"),
        }
    }
    // The caps win at least something below what the schedule without them needs.
    assert!(num_held >= 2, "{num_held}");
    let tiny = scheduler(StepSettings { memory_budget_bytes: Some(1 << 20), ..free }, shapes, 0);
    let error = tiny.schedule(0, &batch, Arm::Aware).unwrap_err();
    assert!(matches!(error, PlanError::SampleTooLarge { component: Component::Llm, .. }), "{error}");
}

#[test]
fn wrong_inputs_are_named() {
    let shapes = fixture::shapes(4, 0);
    let scheduler = scheduler(settings(layout(1, 1, 1), 2), shapes.clone(), 0);
    let message = |error: PlanError| {
        assert!(error.hint().is_some(), "{error}");
        error.to_string()
    };
    assert_eq!(
        message(scheduler.schedule(0, &[SampleIndex(4)], Arm::Aware).unwrap_err()),
        "sample 4 is not in the data profile: it has 4 samples, counted from 0"
    );
    let mut foreign = scheduler.schedule(3, &indices(4), Arm::Blind).unwrap();
    foreign.llm[1].push(vec![]);
    assert_eq!(
        message(scheduler.simulate(&foreign).unwrap_err()),
        "the schedule of step 3 has 2 llm replicas in microbatch 1, the plan has 1"
    );
    let model = CostModel::new(&fixture::model_profile()).unwrap();
    let of = |settings| StepScheduler::new(settings, model.clone(), shapes.clone(), 0).unwrap_err();
    assert_eq!(
        message(of(settings(layout(1, 9, 1), 2))),
        "llm pp 9 exceeds the 4 layers of the LLM backbone"
    );
    assert_eq!(message(of(settings(layout(1, 1, 1), 0))), "`num_microbatches` is 0, must be at least 1");
    let mut tensor_parallel = layout(1, 1, 1);
    tensor_parallel.llm.tp = 2;
    assert_eq!(
        message(of(settings(tensor_parallel, 2))),
        "layout `encoder tp 1 pp 1 dp 1, llm tp 2 pp 1 dp 1` is not supported: tensor parallelism and encoder stages must be 1"
    );
}

#[test]
fn measured_spans_come_back_as_they_were_predicted() {
    let shapes = fixture::shapes(12, 5);
    let scheduler = scheduler(settings(layout(1, 2, 1), 3), shapes, 0);
    let schedule = scheduler.schedule(0, &indices(12), Arm::Aware).unwrap();
    let predicted = scheduler.simulate(&schedule).unwrap();
    assert_eq!(scheduler.simulate_measured(&schedule, &predicted.spans).unwrap(), predicted);
    let measured = scheduler.measured(&schedule, &predicted.spans, predicted.makespan_ns + 5).unwrap();
    assert_eq!(measured.makespan_ns, predicted.makespan_ns + 5);
    assert_eq!(measured.spans, predicted.spans);
}

#[test]
fn schedules_are_computed_in_a_thread_beside() {
    let shapes = fixture::shapes(32, 6);
    let scheduler = Arc::new(scheduler(settings(layout(1, 1, 1), 8), shapes, 3));
    let batch = indices(32);
    let prefetch = Prefetch::new(Arc::clone(&scheduler)).unwrap();
    prefetch.submit((1, Arm::Aware), batch.clone());
    prefetch.submit((1, Arm::Blind), batch.clone());
    prefetch.submit((1, Arm::Blind), vec![]);
    for arm in [Arm::Blind, Arm::Aware] {
        let expected = scheduler.schedule(1, &batch, arm).unwrap();
        assert_eq!(prefetch.take((1, arm)).unwrap(), expected);
    }
    assert_eq!(prefetch.take((1, Arm::Aware)), Err(PlanError::NotSubmitted { step: 1 }));
    assert_eq!(prefetch.take((2, Arm::Aware)), Err(PlanError::NotSubmitted { step: 2 }));
    prefetch.submit((3, Arm::Aware), vec![SampleIndex(99)]);
    assert!(matches!(prefetch.take((3, Arm::Aware)), Err(PlanError::UnknownSample { .. })));
}

/// The memory model's microbatches in flight are those of the very action lists that run.
#[test]
fn the_memory_model_and_the_action_lists_agree() {
    for order in [PipelineOrder::OneFOneB, PipelineOrder::GPipe] {
        for (stage, num_stages, num_microbatches) in [(0, 2, 4), (1, 3, 8), (0, 5, 3), (4, 5, 16), (2, 4, 1)]
        {
            let actions = dflop_sim::order::actions(order, StageIndex(stage), num_stages, num_microbatches);
            let (mut held, mut peak) = (0u32, 0);
            for action in actions {
                held = if action.kind == ActionKind::F { held + 1 } else { held - 1 };
                peak = held.max(peak);
            }
            let expected = microbatches_in_flight(order, StageIndex(stage), num_stages, num_microbatches);
            assert_eq!(
                peak, expected,
                "{order} stage {stage} of {num_stages}, {num_microbatches} microbatches"
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn any_batch_on_any_layout(
        seed: u64, count in 0usize..50, e in 1u32..4, pp in 1u32..4, dp in 1u32..4, m in 1u32..9, gpipe: bool
    ) {
        let shapes = fixture::shapes(count, seed);
        let order = if gpipe { PipelineOrder::GPipe } else { PipelineOrder::OneFOneB };
        let settings = StepSettings { pipeline_order: order, ..settings(layout(e, pp, dp), m) };
        let scheduler = scheduler(settings, shapes.clone(), seed);
        let mut batch = indices(count);
        batch.reverse();
        let aware = scheduler.schedule(seed % 100, &batch, Arm::Aware).unwrap();
        let blind = scheduler.schedule(seed % 100, &batch, Arm::Blind).unwrap();
        check(&scheduler, &aware, &batch, &shapes);
        check(&scheduler, &blind, &batch, &shapes);
        prop_assert!(aware.predicted_makespan_ns <= blind.predicted_makespan_ns);
        let input = scheduler.step_input(&aware).unwrap();
        for rank in 0..settings.layout.num_ranks() {
            prop_assert_eq!(input.forward_ns[Rank(rank).index()].len(), m as usize);
        }
    }
}
