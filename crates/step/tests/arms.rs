//! The arms of a step: each gives a sound schedule, each is predicted no slower than what it is built on, and lists
//! keep the memory that was promised.

use crate::fixture;
use crate::scheduling;
use crate::scheduling::{all_arms, batch, split_profile};
use dflop_step::batches::GlobalBatches;
use dflop_step::{Arm, GiantPolicy, GiantRule, Method, StepError, StepScheduler};
use dflop_types::{ActionKind, SampleIndex, SampleShape, Schedule};
use proptest::prelude::*;

fn scheduler(
    (encoder_dp, llm_pp, replicas): (u32, u32, u32),
    num_microbatches: u32,
    shapes: &[SampleShape],
    memory_budget_bytes: Option<u64>,
) -> StepScheduler {
    let sizes = (encoder_dp, llm_pp, replicas, num_microbatches);
    scheduling::scheduler(&split_profile(), sizes, shapes, memory_budget_bytes)
}

/// Most microbatches of each rank whose forward has begun and whose backward has not ended.
fn in_flight(schedule: &Schedule) -> Vec<usize> {
    let peak = |list: &Vec<dflop_types::Action>| {
        let (mut now, mut most) = (0_usize, 0);
        for action in list {
            match action.kind {
                ActionKind::F => now += 1,
                ActionKind::B | ActionKind::W => now -= 1,
                ActionKind::I => {}
            }
            most = most.max(now);
        }
        most
    };
    schedule.actions.iter().map(peak).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(10))]

    /// Every arm schedules each sample once, predicts what the simulator gives, and keeps to its ranks' memory.
    #[test]
    fn every_arm_is_sound(
        seed: u64, count in 0usize..40, m in 1u32..9, encoder_dp in 1u32..3, llm_pp in 1u32..4, llm_dp in 1u32..3
    ) {
        let shapes = fixture::shapes(count, seed);
        let batch = batch(&shapes);
        let scheduler = scheduler((encoder_dp, llm_pp, llm_dp), m, &shapes, None);
        let mut makespan_ns = std::collections::HashMap::new();
        for arm in all_arms() {
            let schedule = scheduler.schedule(2, &batch, arm).unwrap();
            schedule.check(&batch, |s| shapes[s.index()].num_parts()).unwrap();
            let timeline = scheduler.simulate(&schedule).unwrap();
            prop_assert_eq!(timeline.makespan_ns, schedule.predicted_makespan_ns, "{}", arm);
            prop_assert!(!schedule.was_stopped);
            if !arm.is_ahead && !schedule.actions.is_empty() {
                prop_assert_eq!(arm.method, Method::Aware);
                let stages = 1 + llm_pp as usize;
                let layout = scheduler.settings().layout;
                for (rank, most) in in_flight(&schedule).into_iter().enumerate() {
                    let stage = layout.coordinates(dflop_types::Rank(rank as u32)).unwrap().stage;
                    prop_assert!(most <= stages - stage.0 as usize, "{} of rank {}", most, rank);
                }
            }
            let in_order = Schedule { actions: Vec::new(), ..schedule.clone() };
            prop_assert!(scheduler.simulate(&in_order).unwrap().makespan_ns >= schedule.predicted_makespan_ns);
            makespan_ns.insert(arm, schedule.predicted_makespan_ns);
        }
        for method in [Method::Shaped, Method::Aware] {
            let of = |method, is_ahead| makespan_ns[&Arm { method, is_ahead }];
            prop_assert!(of(method, false) <= of(Method::Blind, false));
            prop_assert!(of(method, true) <= of(method, false));
        }
        let again = scheduler.schedule(2, &batch, Arm::AWARE).unwrap();
        prop_assert_eq!(again.predicted_makespan_ns, makespan_ns[&Arm::AWARE]);
    }
}

/// Stopped at once or after some questions, the schedule is whole, says so, and is no slower than arrival order.
#[test]
fn a_stopped_search_gives_its_best_so_far() {
    let shapes = fixture::shapes(60, 5);
    let batch = batch(&shapes);
    let scheduler = scheduler((1, 3, 1), 8, &shapes, None);
    let blind = scheduler.schedule(0, &batch, Arm::BLIND).unwrap();
    let whole = scheduler.schedule(0, &batch, Arm::AWARE).unwrap();
    for questions in [0, 1, 5, 20] {
        let asked = std::cell::Cell::new(0);
        let halt = || {
            asked.set(asked.get() + 1);
            asked.get() > questions
        };
        let stopped = scheduler.schedule_until(0, &batch, Arm::AWARE, &halt).unwrap();
        stopped.check(&batch, |s| shapes[s.index()].num_parts()).unwrap();
        assert!(stopped.was_stopped);
        assert!(stopped.predicted_makespan_ns <= blind.predicted_makespan_ns);
        assert!(stopped.predicted_makespan_ns >= whole.predicted_makespan_ns);
    }
}

/// A search that is stopped says so also where arrival order is better than what it had by then.
#[test]
fn a_stopped_search_says_so_whichever_schedule_is_taken() {
    let mut num_blind = 0;
    for seed in 0..300 {
        let shapes = fixture::shapes(4 + seed as usize % 5, seed);
        let batch = batch(&shapes);
        let scheduler = scheduler((2, 2, 2), 2, &shapes, None);
        let stopped = scheduler.schedule_until(0, &batch, Arm::AWARE, &|| true).unwrap();
        let blind = scheduler.schedule(0, &batch, Arm::BLIND).unwrap();
        num_blind += u32::from(stopped.llm == blind.llm);
        assert!(stopped.was_stopped, "seed {seed}");
    }
    assert!(num_blind > 0);
}

/// Whatever budget: the aware arm answers where arrival order fits, and is never predicted slower; a giant is refused
/// only where arrival order does not fit either.
#[test]
fn aware_is_never_slower_than_a_blind_schedule_that_fits() {
    let mut num_giants = 0;
    for seed in 0..40 {
        let mut shapes = fixture::shapes(10, seed);
        shapes.push(fixture::sample(30, 2_000 + 40 * seed as u32, 1_000));
        let batch = batch(&shapes);
        let free = scheduler((1, 2, 1), 6, &shapes, None);
        let blind = free.schedule(0, &batch, Arm::BLIND).unwrap();
        let needed =
            free.memory(&blind).unwrap().iter().map(dflop_cost::RankMemory::total_bytes).max().unwrap();
        for budget in [needed, needed + needed / 50] {
            let limited = scheduler((1, 2, 1), 6, &shapes, Some(budget));
            for method in [Method::Shaped, Method::Aware] {
                let aware = limited.schedule(0, &batch, Arm { method, is_ahead: false }).unwrap();
                num_giants += u32::from(!aware.giants.is_empty());
                assert!(aware.predicted_makespan_ns <= blind.predicted_makespan_ns, "seed {seed}, {budget}");
                let rule = GiantRule { policy: GiantPolicy::Refuse, ..GiantRule::default() };
                assert!(
                    limited.clone().with_giants(rule).schedule(0, &batch, Arm::AWARE).is_ok(),
                    "seed {seed}"
                );
            }
        }
    }
    assert!(num_giants > 0);
}

/// Running ahead stays within the budget: as tight a budget as the pipeline order needs is kept by every list.
#[test]
fn running_ahead_keeps_the_memory_budget() {
    let shapes = fixture::shapes(40, 8);
    let batch = batch(&shapes);
    let peak = |scheduler: &StepScheduler, schedule: &Schedule| {
        scheduler.memory(schedule).unwrap().iter().map(dflop_cost::RankMemory::total_bytes).max().unwrap()
    };
    let free = scheduler((1, 2, 1), 8, &shapes, None);
    let ahead = Arm { method: Method::Aware, is_ahead: true };
    let (within, over) =
        (free.schedule(0, &batch, Arm::AWARE).unwrap(), free.schedule(0, &batch, ahead).unwrap());
    let (least, most) = (peak(&free, &within), peak(&free, &over));
    for budget in [least, least + (most.max(least) - least) / 2] {
        let limited = scheduler((1, 2, 1), 8, &shapes, Some(budget));
        let schedule = limited.schedule(0, &batch, ahead).unwrap();
        assert!(peak(&limited, &schedule) <= budget);
    }
}

/// A sample that fits a rank alone, but not beside what 1F1B has in flight, is scheduled, named, and within the budget;
/// one that does not fit alone is refused by name.
#[test]
fn the_pipeline_runs_empty_around_a_giant() {
    let mut shapes = vec![fixture::sample(3, 300, 400); 15];
    shapes.push(fixture::sample(40, 3_000, 3_400));
    let batch = batch(&shapes);
    let free = scheduler((1, 3, 1), 8, &shapes, None);
    let alone = free.outliers(16, 1).heaviest[0];
    assert_eq!(alone.sample, SampleIndex(15));
    let budget = alone.needed_bytes + alone.needed_bytes / 20;
    let limited = scheduler((1, 3, 1), 8, &shapes, Some(budget));
    let schedule = limited.schedule(0, &batch, Arm::AWARE).unwrap();
    schedule.check(&batch, |s| shapes[s.index()].num_parts()).unwrap();
    assert_eq!(schedule.giants, [SampleIndex(15)]);
    let peaks = limited.memory(&schedule).unwrap();
    assert!(peaks.iter().all(|peak| peak.total_bytes() <= budget));
    let rule = |policy| GiantRule { policy, ..GiantRule::default() };
    let refused = limited.clone().with_giants(rule(GiantPolicy::Refuse)).schedule(0, &batch, Arm::AWARE);
    let refused = refused.unwrap_err();
    assert!(matches!(refused, StepError::GiantMemory { step: 0, sample: SampleIndex(15), .. }), "{refused}");
    let deferred = limited.clone().with_giants(rule(GiantPolicy::Defer)).schedule(0, &batch, Arm::AWARE);
    assert_eq!(deferred.unwrap(), schedule);
    let in_order = Schedule { actions: Vec::new(), ..schedule };
    assert!(limited.memory(&in_order).unwrap().iter().any(|peak| peak.total_bytes() > budget));
    let tight = scheduler((1, 3, 1), 8, &shapes, Some(alone.needed_bytes - 1));
    let error = tight.schedule(0, &batch, Arm::AWARE).unwrap_err();
    assert!(matches!(error, StepError::SampleTooLarge { sample: SampleIndex(15), .. }), "{error}");
}

/// Two replicas on each side, and four giants in three of four global batches: gathered, two share an empty pipeline each
/// time, and the steps of an epoch take less time together.
#[test]
fn deferred_giants_share_an_empty_pipeline() {
    let mut shapes = vec![fixture::sample(3, 300, 400); 60];
    shapes.extend(vec![fixture::sample(40, 3_000, 3_400); 4]);
    let free = scheduler((2, 3, 2), 4, &shapes, None);
    let alone = free.outliers(16, 1).heaviest[0];
    let limited = scheduler((2, 3, 2), 4, &shapes, Some(alone.needed_bytes + alone.needed_bytes / 20));
    let epoch = |rule: GiantRule| {
        let batches = GlobalBatches::new(64, 16, 8).unwrap().with_giants(rule, &shapes).unwrap();
        let steps = (0..4).map(|step| limited.schedule(step, &batches.batch(step), Arm::AWARE).unwrap());
        let (ns, giants): (Vec<u64>, Vec<usize>) =
            steps.map(|schedule| (schedule.predicted_makespan_ns, schedule.giants.len())).unzip();
        (ns.iter().sum::<u64>(), giants)
    };
    let rule = GiantRule { policy: GiantPolicy::Alone, llm_tokens_max: Some(1_000), steps_max: 3 };
    let (alone_ns, spread) = epoch(rule);
    let (deferred_ns, gathered) = epoch(GiantRule { policy: GiantPolicy::Defer, ..rule });
    assert!(spread.iter().filter(|&&giants| giants > 0).count() > 2, "{spread:?}");
    assert_eq!(gathered, [0, 0, 0, 4]);
    assert!(5 * deferred_ns < 4 * alone_ns, "{deferred_ns} against {alone_ns}");
}
