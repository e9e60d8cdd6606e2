//! Giants on ranks with several chunks: the pipeline runs empty around them, within the memory budget.

use crate::fixture;
use dflop_cost::{CostModel, RankMemory};
use dflop_step::{Arm, GiantPolicy, GiantRule, StepError, StepScheduler, StepSettings};
use dflop_types::{
    ActionKind, ComponentLayout, Layout, PipelineOrder, Rank, SampleIndex, SampleShape, Schedule,
};
use proptest::prelude::*;

const ORDERS: [PipelineOrder; 2] = [PipelineOrder::OneFOneB, PipelineOrder::DataAware];

/// The fixture with twelve layers in the LLM backbone, on a device that frees a message as soon as it has left.
fn model() -> CostModel {
    let mut profile = fixture::model_profile();
    profile.modules.get_mut("llm_layer").unwrap().count = 12;
    "cuda".clone_into(&mut profile.device.kind);
    CostModel::new(&profile).unwrap()
}

/// One encoder rank; pipeline ranks and replicas of the LLM, and the chunks of each rank.
fn settings((pp, dp, chunks): (u32, u32, u32), num_microbatches: u32, order: PipelineOrder) -> StepSettings {
    let degrees = |pp, dp| ComponentLayout { tp: 1, pp, dp };
    let layout = Layout { llm_interleave: chunks, ..Layout::disaggregated(degrees(1, 1), degrees(pp, dp)) };
    StepSettings { layout, num_microbatches, pipeline_order: order, memory_budget_bytes: None }
}

fn scheduler(
    settings: StepSettings,
    shapes: &[SampleShape],
    memory_budget_bytes: Option<u64>,
) -> StepScheduler {
    let settings = StepSettings { memory_budget_bytes, ..settings };
    StepScheduler::new(settings, model(), shapes.to_vec(), 3).unwrap()
}

fn indices(count: usize) -> Vec<SampleIndex> {
    (0..count as u32).map(SampleIndex).collect()
}

fn fullest(scheduler: &StepScheduler, schedule: &Schedule) -> u64 {
    scheduler.memory(schedule).unwrap().iter().map(RankMemory::total_bytes).max().unwrap()
}

/// Microbatches that hold something on `rank` when it runs the last forward of `giant`, beside it.
fn beside(schedule: &Schedule, rank: Rank, giant: u32) -> Vec<u32> {
    let list = &schedule.actions[rank.index()];
    let end = list.iter().rposition(|a| (a.kind, a.microbatch) == (ActionKind::F, giant)).unwrap();
    let count = |microbatch: u32, is_forward: bool| {
        let own = list[..=end].iter().filter(|action| action.microbatch == microbatch);
        own.filter(|action| (action.kind == ActionKind::F) == is_forward).count()
    };
    let others = (0..schedule.llm.len() as u32).filter(|&other| other != giant);
    others.filter(|&other| count(other, true) > count(other, false)).collect()
}

/// A sample that fits a rank alone, but not beside what interleaved 1F1B has in flight, is scheduled, named, and within the
/// budget; when a rank holds all its chunks, it holds nothing else. One that does not fit alone is refused by name.
#[test]
fn the_pipeline_runs_empty_around_a_giant_in_all_chunks() {
    for (at, layout) in
        [(2, 1, 2), (3, 1, 2), (4, 1, 2), (2, 1, 3), (4, 1, 3), (2, 2, 2)].into_iter().enumerate()
    {
        let settings = settings(layout, 8, ORDERS[at % 2]);
        let mut shapes = vec![fixture::sample(3, 300, 400); 15 * layout.1 as usize];
        let giant = SampleIndex(shapes.len() as u32);
        shapes.push(fixture::sample(40, 3_000, 3_400));
        let batch = indices(shapes.len());
        let (_, needed) = scheduler(settings, &shapes, None).alone(&shapes[giant.index()]);
        let budget = needed + needed / 20;
        let limited = scheduler(settings, &shapes, Some(budget));
        let schedule = limited.schedule(0, &batch, Arm::AWARE).unwrap();
        schedule.check(&batch, |s| shapes[s.index()].num_parts()).unwrap();
        assert_eq!(schedule.giants, [giant], "{layout:?}");
        assert!(fullest(&limited, &schedule) <= budget, "{layout:?}");
        // The lists end, when it was predicted.
        let timeline = limited.simulate(&schedule).unwrap();
        assert_eq!(timeline.makespan_ns, schedule.predicted_makespan_ns);
        let (column, replica) = (0..8)
            .flat_map(|column| (0..layout.1 as usize).map(move |replica| (column, replica)))
            .find(|&(column, replica)| schedule.llm[column][replica].contains(&giant))
            .unwrap();
        assert_eq!(schedule.llm[column][replica].len(), 1, "a bucket of its own");
        let ranks = (0..settings.layout.num_ranks()).map(Rank).filter(|&rank| {
            let at = settings.layout.coordinates(rank).unwrap();
            at.stage.0 > 0 && at.replica as usize == replica
        });
        for rank in ranks {
            let others = beside(&schedule, rank, column as u32);
            assert!(others.is_empty(), "{layout:?}, rank {rank}: {others:?}");
        }
        let in_order = Schedule { actions: Vec::new(), ..schedule };
        assert!(fullest(&limited, &in_order) > budget);
        let rule = GiantRule { policy: GiantPolicy::Refuse, ..GiantRule::default() };
        let refused = limited.with_giants(rule).schedule(0, &batch, Arm::AWARE).unwrap_err();
        assert!(matches!(refused, StepError::GiantMemory { sample, .. } if sample == giant), "{refused}");
        let tight = scheduler(settings, &shapes, Some(needed - 1));
        let error = tight.schedule(0, &batch, Arm::AWARE).unwrap_err();
        assert!(matches!(error, StepError::SampleTooLarge { sample, .. } if sample == giant), "{error}");
    }
}

/// The other microbatches keep rounds of several: an empty pipeline around one costs less than one around each.
#[test]
fn only_giants_have_rounds_of_their_own() {
    let mut shapes = vec![fixture::sample(0, 0, 400); 30];
    shapes.push(fixture::sample(40, 3_000, 3_400));
    let settings = settings((4, 1, 2), 16, PipelineOrder::OneFOneB);
    let (_, needed) = scheduler(settings, &shapes, None).alone(&shapes[30]);
    let limited = scheduler(settings, &shapes, Some(needed + needed / 20));
    let schedule = limited.schedule(0, &indices(31), Arm::AWARE).unwrap();
    assert_eq!(schedule.giants, [SampleIndex(30)]);
    // A rank that takes a microbatch through both chunks before the next one begins waits for three other ranks in between.
    let first_rank = &schedule.actions[1];
    let neighbours = first_rank
        .windows(2)
        .filter(|pair| pair.iter().all(|a| a.kind == ActionKind::F) && pair[0].stage == pair[1].stage);
    assert!(neighbours.count() >= 4, "{first_rank:?}");
}

/// Each sample fits beside as many as the order has in flight, so that none is a giant, but the buckets have several samples each
/// and do not. Then fewer are in flight.
#[test]
fn the_pipeline_runs_empty_where_buckets_are_too_few() {
    for order in ORDERS {
        let settings = settings((4, 1, 1), 6, order);
        let shapes = vec![fixture::sample(3, 300, 400); 24];
        let batch = indices(shapes.len());
        let free = scheduler(settings, &shapes, None);
        let in_order = free.schedule(0, &batch, Arm::BLIND).unwrap();
        let (most, of_bucket) = (fullest(&free, &in_order), free.alone(&fixture::sample(12, 1_200, 1_600)).1);
        let budget = u64::midpoint(most, of_bucket);
        let limited = scheduler(settings, &shapes, Some(budget));
        let schedule = limited.schedule(0, &batch, Arm::AWARE).unwrap();
        schedule.check(&batch, |s| shapes[s.index()].num_parts()).unwrap();
        assert_eq!((&*schedule.giants, fullest(&limited, &schedule) <= budget), (&[][..], true));
        assert!(
            most > budget
                && fullest(&limited, &Schedule { actions: Vec::new(), ..schedule.clone() }) > budget
        );
        assert_eq!(limited.simulate(&schedule).unwrap().makespan_ns, schedule.predicted_makespan_ns);
        let rule = GiantRule { policy: GiantPolicy::Refuse, ..GiantRule::default() };
        assert_eq!(limited.with_giants(rule).schedule(0, &batch, Arm::AWARE).unwrap(), schedule);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Any samples, as many microbatches as samples, and a budget a little above what the largest needs alone: whether or not
    /// it is a giant there, there is a schedule, within the budget, and its lists end.
    #[test]
    fn what_fits_alone_is_scheduled(
        seed: u64, count in 3usize..9, pp in 2u32..5, chunks in 2u32..4, giants in 1usize..3, order in 0usize..2,
    ) {
        let mut shapes = fixture::shapes(count, seed);
        shapes.extend((0..giants as u32).map(|at| fixture::sample(30 + at, 2_000 + 300 * at, 2_400)));
        let batch = indices(shapes.len());
        let settings = settings((pp, 1, chunks), shapes.len() as u32, ORDERS[order]);
        let free = scheduler(settings, &shapes, None);
        let needed = shapes.iter().map(|shape| free.alone(shape).1).max().unwrap();
        let budget = needed + needed / 10;
        let limited = scheduler(settings, &shapes, Some(budget));
        let schedule = limited.schedule(0, &batch, Arm::AWARE).unwrap();
        schedule.check(&batch, |s| shapes[s.index()].num_parts()).unwrap();
        prop_assert!(fullest(&limited, &schedule) <= budget);
        prop_assert_eq!(limited.simulate(&schedule).unwrap().makespan_ns, schedule.predicted_makespan_ns);
    }
}
