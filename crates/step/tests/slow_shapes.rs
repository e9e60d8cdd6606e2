//! Slow shapes that are made up: which samples are slow, and what they add.

use crate::fixture;
use dflop_cost::CostModel;
use dflop_step::{Arm, SlowShapes, StepScheduler, StepSettings};
use dflop_types::{ComponentLayout, Layout, PipelineOrder, SampleIndex, SampleShape};

const NUM_SAMPLES: u32 = 400;

/// Two replicas of two LLM stages behind one encoder; samples of the given LLM tokens.
fn scheduler(llm_tokens: impl Fn(u32) -> u32) -> StepScheduler {
    let degrees = |pp, dp| ComponentLayout { tp: 1, pp, dp };
    let settings = StepSettings {
        layout: Layout::disaggregated(degrees(1, 1), degrees(2, 2)),
        num_microbatches: 4,
        pipeline_order: PipelineOrder::OneFOneB,
        memory_budget_bytes: None,
    };
    let shapes: Vec<SampleShape> = (0..NUM_SAMPLES)
        .map(|at| {
            let text = llm_tokens(at);
            SampleShape { llm_tokens: text, label_tokens: text / 2, ..SampleShape::default() }
        })
        .collect();
    let model = CostModel::new(&fixture::model_profile()).unwrap();
    StepScheduler::new(settings, model, shapes, 3).unwrap()
}

fn batch() -> Vec<SampleIndex> {
    (0..64).map(SampleIndex).collect()
}

#[test]
fn as_many_samples_are_slow_as_asked_where_sizes_differ() {
    let scheduler = scheduler(|at| 100 + at * 7 % 401);
    let usual = scheduler.schedule(0, &batch(), Arm::AWARE).unwrap();
    for (share, expected) in [(0.0001, 1), (0.01, 4), (0.03, 12), (1.0, 400)] {
        let slow = SlowShapes::drawn(&scheduler, &usual, share, 1.0, 5).unwrap();
        assert_eq!(slow.num_samples, expected);
        let held = scheduler.shapes().iter().filter(|shape| slow.holds(shape)).count();
        assert_eq!(held as u64, expected);
    }
    let drawn = |seed| SlowShapes::drawn(&scheduler, &usual, 0.03, 1.0, seed).unwrap();
    assert_eq!(drawn(5), drawn(5));
    let places: std::collections::BTreeSet<u32> = (0..16).map(|seed| drawn(seed).tokens_min).collect();
    assert!(places.len() > 8, "seeds draw different sizes: {places:?}");
}

#[test]
fn samples_of_one_size_are_slow_together() {
    // Half of all have 100 tokens: no range with them comes near to 4 samples.
    let scheduler = scheduler(|at| if at % 2 == 0 { 100 } else { 200 + at });
    let usual = scheduler.schedule(0, &batch(), Arm::AWARE).unwrap();
    for seed in 0..16 {
        let slow = SlowShapes::drawn(&scheduler, &usual, 0.01, 1.0, seed).unwrap();
        assert_eq!(slow.num_samples, 4);
        assert!(slow.tokens_min > 200);
    }
    // More than the others are: the 200 and one more must be among them.
    let slow = SlowShapes::drawn(&scheduler, &usual, 0.9, 1.0, 0).unwrap();
    assert_eq!((slow.tokens_min, slow.num_samples), (100, 360));
}

/// What each action takes longer is what its slow samples add, on every stage of the LLM and on no other.
#[test]
fn each_slow_sample_adds_its_time_to_each_of_its_actions() {
    let scheduler = scheduler(|at| 100 + at * 7 % 401);
    let schedule = scheduler.schedule(0, &batch(), Arm::AWARE).unwrap();
    let slow = SlowShapes::drawn(&scheduler, &schedule, 0.1, 2.0, 1).unwrap();
    let plain = scheduler.step_input(&schedule).unwrap();
    // The largest mean, twice: of rows whose actions all have samples, by hand.
    let mean = |times: &[u64]| times.iter().sum::<u64>() as f64 / times.len() as f64;
    let means: Vec<(f64, f64)> =
        plain.forward_ns.iter().zip(&plain.backward_ns).map(|(f, b)| (mean(f), mean(b))).collect();
    let most = means.into_iter().max_by(|a, b| (a.0 + a.1).total_cmp(&(b.0 + b.1))).unwrap();
    assert_eq!(slow.forward_ns, (2.0 * most.0) as u64);
    assert_eq!(slow.backward_ns, (2.0 * most.1) as u64);
    let mut slowed = plain.clone();
    slow.add_to(&mut slowed, &scheduler, &schedule);
    let mut num_slow = 0;
    for replica in 0..2 {
        for microbatch in 0..4 {
            let samples = &schedule.llm[microbatch][replica as usize];
            let count = samples.iter().filter(|s| slow.holds(&scheduler.shapes()[s.index()])).count() as u64;
            num_slow += count;
            for stage in 1..3 {
                let row = plain.layout.row(replica, dflop_types::StageIndex(stage));
                let more = slowed.forward_ns[row][microbatch] - plain.forward_ns[row][microbatch];
                assert_eq!(more, count * slow.forward_ns);
                let more = slowed.backward_ns[row][microbatch] - plain.backward_ns[row][microbatch];
                assert_eq!(more, count * slow.backward_ns);
            }
        }
    }
    let expected = batch().iter().filter(|s| slow.holds(&scheduler.shapes()[s.index()])).count() as u64;
    assert!(expected > 0);
    assert_eq!(num_slow, expected);
    let encoder = plain.layout.row(0, dflop_types::StageIndex(0));
    assert_eq!(slowed.forward_ns[encoder], plain.forward_ns[encoder]);
    let longer = scheduler.simulate_slow(&schedule, &slow).unwrap().makespan_ns;
    assert!(longer > scheduler.simulate(&schedule).unwrap().makespan_ns);
}
