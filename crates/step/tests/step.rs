//! The step scheduler through its verb: sound schedules for any shapes and layout, never predicted slower
//! than the blind ones, the same for the same seed, within the memory budget.

use crate::fixture;
use dflop_cost::{CostModel, microbatches_in_flight};
use dflop_step::{Arm, Job, Prefetch, StepError, StepScheduler, StepSettings};
use dflop_types::{
    ActionKind, Component, ComponentLayout, EncoderShare, Hint, Layout, ModelProfile, PipelineOrder, Rank,
    SampleIndex, SampleShape, Schedule, StageIndex, Zero,
};
use proptest::prelude::*;
use std::sync::Arc;
use std::time::Duration;

pub(crate) fn layout(encoder_dp: u32, llm_pp: u32, replicas: u32) -> Layout {
    Layout::disaggregated(
        ComponentLayout { tp: 1, pp: 1, dp: encoder_dp },
        ComponentLayout { tp: 1, pp: llm_pp, dp: replicas },
    )
}

pub(crate) fn settings(layout: Layout, num_microbatches: u32) -> StepSettings {
    StepSettings {
        layout,
        num_microbatches,
        pipeline_order: PipelineOrder::OneFOneB,
        memory_budget_bytes: None,
    }
}

pub(crate) fn scheduler(settings: StepSettings, shapes: Vec<SampleShape>, seed: u64) -> StepScheduler {
    let model = CostModel::new(&fixture::model_profile()).expect("the fixture is sound");
    StepScheduler::new(settings, model, shapes, seed).expect("the settings are sound")
}

pub(crate) fn indices(count: usize) -> Vec<SampleIndex> {
    (0..count as u32).map(SampleIndex).collect()
}

pub(crate) fn check(
    scheduler: &StepScheduler,
    schedule: &Schedule,
    batch: &[SampleIndex],
    shapes: &[SampleShape],
) {
    schedule.check(batch, |s| shapes[s.index()].num_parts()).expect("a sound schedule");
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
            let aware = scheduler.schedule(5, &batch, Arm::AWARE).unwrap();
            let blind = scheduler.schedule(5, &batch, Arm::BLIND).unwrap();
            check(&scheduler, &aware, &batch, shapes);
            check(&scheduler, &blind, &batch, shapes);
            assert!(aware.predicted_makespan_ns <= blind.predicted_makespan_ns, "{name}, {layout}");
        }
    }
}

/// By hand, a sample in each microbatch of one encoder and two LLM stages. An image in range: three predictions. A text of
/// 5,000 tokens, which attention was not measured with: both stages. One of 15 label tokens, one fewer than the head was
/// measured with: the last stage alone.
#[test]
fn what_is_outside_the_measured_range_is_counted_exactly() {
    let shapes = vec![fixture::sample(1, 196, 104), fixture::sample(0, 0, 5_000), fixture::sample(0, 0, 45)];
    let scheduler = scheduler(settings(layout(1, 2, 1), 3), shapes, 0);
    let count = |batch: &[SampleIndex]| {
        let schedule = scheduler.schedule(0, batch, Arm::BLIND).unwrap();
        let coverage = scheduler.coverage(&schedule).unwrap();
        (coverage.num_predictions, coverage.num_extrapolated)
    };
    let all = indices(3);
    assert_eq!(count(&all[..1]), (3, 0));
    assert_eq!(count(&all[1..2]), (2, 2));
    assert_eq!(count(&all[2..]), (2, 1));
    assert_eq!(count(&all), (7, 3));
    // Together in one microbatch the two texts have labels enough for the head; attention is that of each sample alone.
    let schedule = Schedule {
        llm: vec![vec![vec![all[1], all[2]]], vec![vec![all[0]]], vec![vec![]]],
        encoder: vec![vec![vec![]], vec![vec![EncoderShare::whole(all[0])]], vec![vec![]]],
        ..scheduler.schedule(0, &all, Arm::BLIND).unwrap()
    };
    let coverage = scheduler.coverage(&schedule).unwrap();
    assert_eq!((coverage.num_predictions, coverage.num_extrapolated), (5, 2));
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
    let schedule = scheduler.schedule(0, &[], Arm::AWARE).unwrap();
    // The LLM rank holds 4 layers, embedding and head: 7.2 million parameters at 3 ms a million.
    assert_eq!(schedule.predicted_makespan_ns, 21_600_000);
}

#[test]
fn blind_is_arrival_order_in_equal_counts() {
    let shapes: Vec<SampleShape> = (0..8).map(|_| fixture::sample(2, 300, 90)).collect();
    let scheduler = scheduler(settings(layout(2, 1, 2), 2), shapes, 0);
    let s = |range: std::ops::Range<u32>| range.map(SampleIndex).collect::<Vec<_>>();
    let blind = scheduler.schedule(0, &s(0..8), Arm::BLIND).unwrap();
    assert_eq!(blind.llm, [[s(0..2), s(2..4)], [s(4..6), s(6..8)]]);
    let whole = |range| -> Vec<EncoderShare> { s(range).into_iter().map(EncoderShare::whole).collect() };
    assert_eq!(blind.encoder, [[whole(0..2), whole(2..4)], [whole(4..6), whole(6..8)]]);
}

#[test]
fn aware_beats_blind_clearly_on_a_skewed_batch() {
    // Four videos that arrive together and twelve texts: blind puts all videos into one microbatch.
    let mut shapes = vec![fixture::sample(16, 784, 60); 4];
    shapes.extend(vec![fixture::sample(0, 0, 200); 12]);
    let scheduler = scheduler(settings(layout(1, 1, 1), 4), shapes.clone(), 0);
    let batch = indices(16);
    let aware = scheduler.schedule(0, &batch, Arm::AWARE).unwrap();
    let blind = scheduler.schedule(0, &batch, Arm::BLIND).unwrap();
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
            .schedule(step, &batch, Arm::AWARE)
            .unwrap()
    };
    assert_eq!(of(1, 2), of(1, 2));
    assert_eq!(of(1, 2).digest(), of(1, 2).digest());
}

/// Twice in a batch is twice in the gradient; the first that repeats is named, whatever the method.
#[test]
fn a_sample_that_stands_twice_is_refused() {
    let scheduler = scheduler(settings(layout(1, 1, 1), 2), fixture::shapes(4, 2), 1);
    let batch = [3, 1, 2, 1, 3].map(SampleIndex);
    for arm in [Arm::AWARE, Arm::BLIND] {
        let error = scheduler.schedule(7, &batch, arm).unwrap_err();
        assert_eq!(error, StepError::RepeatedSample { sample: SampleIndex(1), step: 7 });
        assert_eq!(
            error.to_string(),
            "sample 1 stands twice in the global batch of step 7, must stand there once"
        );
    }
}

/// Neither a node without ranks nor a bucket without tokens is taken for another number.
#[test]
fn zero_is_no_limit() {
    let scheduler = scheduler(settings(layout(1, 1, 1), 2), fixture::shapes(4, 2), 1);
    let error = scheduler.clone().with_ranks_per_node(0).unwrap_err();
    assert_eq!(error.to_string(), "`ranks_per_node` is 0, must be at least 1");
    let error = scheduler.with_bucket_tokens_max(Some(0)).unwrap_err();
    assert_eq!(error.to_string(), "`train.bucket_tokens_max` is 0, must be at least 1");
}

/// The scheduler's answer against every way to put six samples into two microbatches, in both orders.
#[test]
fn near_brute_force_on_tiny_batches() {
    let mut worst = 1.0f64;
    for seed in 0..40 {
        let shapes = fixture::shapes(6, 100 + seed);
        let scheduler = scheduler(settings(layout(1, 1, 1), 2), shapes.clone(), 0);
        let batch = indices(6);
        let found = scheduler.schedule(0, &batch, Arm::AWARE).unwrap();
        let least = (0u32..64)
            .map(|mask| {
                let pick = |side: u32| -> Vec<SampleIndex> {
                    batch.iter().copied().filter(|s| (mask >> s.0) & 1 == side).collect()
                };
                let encoded = |side: u32| -> Vec<EncoderShare> {
                    let has = |s: &SampleIndex| !shapes[s.index()].encoder_segments.is_empty();
                    pick(side).into_iter().filter(has).map(EncoderShare::whole).collect()
                };
                let schedule = Schedule {
                    llm: vec![vec![pick(0)], vec![pick(1)]],
                    encoder: vec![vec![encoded(0)], vec![encoded(1)]],
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
    let needed = peak(&unlimited, &unlimited.schedule(0, &batch, Arm::AWARE).unwrap());
    let mut num_held = 0;
    for percent in (50..=101).step_by(3) {
        let budget = needed * percent / 100;
        let limited =
            scheduler(StepSettings { memory_budget_bytes: Some(budget), ..free }, shapes.clone(), 0);
        match limited.schedule(0, &batch, Arm::AWARE) {
            Ok(schedule) => {
                num_held += 1;
                assert!(peak(&limited, &schedule) <= budget);
                check(&limited, &schedule, &batch, &shapes);
            }
            Err(error @ (StepError::Memory { .. } | StepError::SampleTooLarge { .. })) => {
                assert!(error.hint().is_some());
            }
            Err(error) => panic!("{error}"),
        }
    }
    // The caps win at least something below what the schedule without them needs.
    assert!(num_held >= 2, "{num_held}");
    let tiny = scheduler(StepSettings { memory_budget_bytes: Some(1 << 20), ..free }, shapes, 0);
    let error = tiny.schedule(0, &batch, Arm::AWARE).unwrap_err();
    assert!(matches!(error, StepError::SampleTooLarge { component: Component::Llm, .. }), "{error}");
}

#[test]
fn wrong_inputs_are_named() {
    let shapes = fixture::shapes(4, 0);
    let scheduler = scheduler(settings(layout(1, 1, 1), 2), shapes.clone(), 0);
    let message = |error: StepError| {
        assert!(error.hint().is_some(), "{error}");
        error.to_string()
    };
    assert_eq!(
        message(scheduler.schedule(0, &[SampleIndex(4)], Arm::AWARE).unwrap_err()),
        "sample 4 is not in the data profile: it has 4 samples, counted from 0"
    );
    let mut foreign = scheduler.schedule(3, &indices(4), Arm::BLIND).unwrap();
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
    // Head and embedding are one matrix, which each end of the pipeline cuts among its own replicas.
    let cut = Layout { zero: Zero::States, ..layout(1, 2, 2) };
    let tied = CostModel::new(&ModelProfile { is_tied: true, ..fixture::model_profile() }).unwrap();
    assert!(StepScheduler::new(settings(cut, 2), tied, shapes.clone(), 0).is_ok());
    let mut tensor_parallel = layout(1, 1, 1);
    tensor_parallel.llm.tp = 2;
    assert_eq!(
        message(of(settings(tensor_parallel, 2))),
        "layout has llm tp 2, the cost model predicts tp 1"
    );
}

#[test]
fn measured_spans_come_back_as_they_were_predicted() {
    let shapes = fixture::shapes(12, 5);
    let scheduler = scheduler(settings(layout(1, 2, 1), 3), shapes, 0);
    let schedule = scheduler.schedule(0, &indices(12), Arm::AWARE).unwrap();
    let predicted = scheduler.simulate(&schedule).unwrap();
    assert_eq!(scheduler.simulate_measured(&schedule, &predicted.spans, None).unwrap(), predicted);
    let measured = scheduler.measured(&schedule, &predicted.spans, predicted.makespan_ns + 5).unwrap();
    assert_eq!(measured.makespan_ns, predicted.makespan_ns + 5);
    assert_eq!(measured.spans, predicted.spans);
}

/// Longer than any schedule here takes.
const A_MINUTE: Duration = Duration::from_mins(1);

#[test]
fn schedules_are_computed_in_a_thread_beside() {
    let shapes = fixture::shapes(32, 6);
    let scheduler = Arc::new(scheduler(settings(layout(1, 1, 1), 8), shapes, 3));
    let batch = indices(32);
    let prefetch = Prefetch::new(Arc::clone(&scheduler), Box::new(|| Box::new(|| false))).unwrap();
    let take =
        |key| prefetch.take_within(key, A_MINUTE).map(|found| found.expect("made within a minute").schedule);
    let job = |samples: Vec<SampleIndex>| Job { samples, ..Job::default() };
    prefetch.submit((1, Arm::AWARE), job(batch.clone()));
    prefetch.submit((1, Arm::BLIND), job(batch.clone()));
    prefetch.submit((1, Arm::BLIND), job(vec![]));
    for arm in [Arm::BLIND, Arm::AWARE] {
        let expected = scheduler.schedule(1, &batch, arm).unwrap();
        assert_eq!(take((1, arm)).unwrap(), expected);
    }
    assert_eq!(take((1, Arm::AWARE)), Err(StepError::NotSubmitted { step: 1 }));
    assert_eq!(take((2, Arm::AWARE)), Err(StepError::NotSubmitted { step: 2 }));
    prefetch.submit((3, Arm::AWARE), job(vec![SampleIndex(99)]));
    assert!(matches!(take((3, Arm::AWARE)), Err(StepError::UnknownSample { .. })));
}

#[test]
fn a_schedule_that_is_not_there_in_time_can_be_asked_for_again() {
    let scheduler = Arc::new(scheduler(settings(layout(1, 1, 1), 4), fixture::shapes(8, 6), 3));
    let (go, gate) = std::sync::mpsc::channel::<()>();
    // The thread asks for a wall limit before it begins, and waits for it here.
    let prefetch = Prefetch::new(
        scheduler,
        Box::new(move || {
            gate.recv().unwrap();
            Box::new(|| false)
        }),
    )
    .unwrap();
    let (key, short) = ((1, Arm::AWARE), Duration::from_millis(1));
    prefetch.submit(key, Job { samples: indices(8), ..Job::default() });
    assert_eq!(prefetch.take_within(key, short).map(|found| found.is_some()), Ok(false));
    assert_eq!(prefetch.take_within(key, short).map(|found| found.is_some()), Ok(false));
    go.send(()).unwrap();
    assert_eq!(prefetch.take_within(key, A_MINUTE).unwrap().unwrap().schedule.step, 1);
    assert_eq!(prefetch.take_within(key, short).unwrap_err(), StepError::NotSubmitted { step: 1 });
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
        let aware = scheduler.schedule(seed % 100, &batch, Arm::AWARE).unwrap();
        let blind = scheduler.schedule(seed % 100, &batch, Arm::BLIND).unwrap();
        check(&scheduler, &aware, &batch, &shapes);
        check(&scheduler, &blind, &batch, &shapes);
        prop_assert!(aware.predicted_makespan_ns <= blind.predicted_makespan_ns);
        let input = scheduler.step_input(&aware).unwrap();
        for rank in 0..settings.layout.num_ranks() {
            prop_assert_eq!(input.forward_ns[Rank(rank).index()].len(), m as usize);
        }
    }
}
