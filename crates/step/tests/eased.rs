//! Microbatches of colocated ranks that recompute only as much as memory asks for.

use crate::fixture;
use crate::scheduling::batch;
use dflop_cost::{CostModel, CostSettings};
use dflop_step::{Arm, Easing, StepError, StepScheduler, StepSettings};
use dflop_types::{Layout, PipelineOrder, Recomputation, Recompute, SampleShape, Zero};
use proptest::prelude::*;

/// A scheduler whose ranks recompute in this mode at most; `eases`: each microbatch only as much as it needs.
fn scheduler(
    shapes: &[SampleShape],
    layout: Layout,
    most: Recompute,
    memory_budget_bytes: Option<u64>,
    eases: bool,
) -> StepScheduler {
    let profile = fixture::recomputing();
    let settings = StepSettings {
        layout,
        num_microbatches: 8,
        pipeline_order: PipelineOrder::OneFOneB,
        memory_budget_bytes,
    };
    let cost = CostSettings::default().recomputing(Recomputation::both(most));
    let model = CostModel::with(&profile, &cost).unwrap();
    let plain = StepScheduler::new(settings, model, shapes.to_vec(), 3).unwrap();
    if eases { plain.with_eased(&Easing::of(&profile, &cost, [Recomputation::both(most)])) } else { plain }
}

/// The peak of the fullest rank where all of the batch is in one microbatch.
fn peak_bytes(shapes: &[SampleShape], layout: Layout, most: Recompute) -> u64 {
    let one = scheduler(shapes, layout, most, None, false);
    let schedule = one.schedule(0, &batch(shapes), Arm::AWARE).unwrap();
    one.memory(&schedule).unwrap().iter().map(dflop_cost::RankMemory::total_bytes).max().unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Whatever the budget: no rank passes it, no microbatch recomputes more than the plan does, and the schedule that is made
    /// without easing takes no longer with it.
    #[test]
    fn easing_keeps_the_budget_and_never_lengthens_a_step(
        seed: u64, count in 2usize..24, ranks in 1u32..5, zero in 0u8..4, tight in 1u64..12, is_full: bool
    ) {
        let shapes = fixture::shapes(count, seed);
        let layout = Layout::colocated(ranks, Zero::try_from(zero).unwrap());
        let most = if is_full { Recompute::Full } else { Recompute::Selective };
        let [low, high] = [most, Recompute::None].map(|mode| peak_bytes(&shapes, layout, mode));
        let budget = low.saturating_sub(low / 8) + high.saturating_sub(low) * tight / 10;
        let plain = scheduler(&shapes, layout, most, Some(budget), false);
        let eased = scheduler(&shapes, layout, most, Some(budget), true);
        let schedule = match plain.schedule(0, &batch(&shapes), Arm::AWARE) {
            Err(StepError::Memory { .. } | StepError::SampleTooLarge { .. }) => return Ok(()),
            found => found.unwrap(),
        };
        let same = eased.simulate(&schedule).unwrap();
        prop_assert!(same.makespan_ns <= schedule.predicted_makespan_ns);
        let own = eased.schedule(0, &batch(&shapes), Arm::AWARE).unwrap();
        own.check(&batch(&shapes), |sample| shapes[sample.index()].num_parts()).unwrap();
        prop_assert!(own.lower_bound_ns <= own.max_load_ns);
        prop_assert!(eased.memory(&own).unwrap().iter().all(|memory| memory.total_bytes() <= budget));
        prop_assert_eq!(eased.simulate(&own).unwrap().makespan_ns, own.predicted_makespan_ns);
        prop_assert_eq!(own.recompute.len(), own.llm.len());
        for (modes, samples) in own.recompute.iter().zip(&own.llm) {
            prop_assert_eq!(modes.len(), samples.len());
            prop_assert!(modes.iter().all(|mode| mode.is_at_most(Recomputation::both(most))));
        }
    }
}

/// With room for everything nothing is recomputed, whatever the plan allows: times are those of no recomputation.
#[test]
fn where_all_fits_nothing_is_recomputed() {
    let shapes = fixture::shapes(12, 5);
    for zero in Zero::ALL {
        let layout = Layout::colocated(2, zero);
        let eased = scheduler(&shapes, layout, Recompute::Full, Some(1 << 50), true);
        let schedule = eased.schedule(0, &batch(&shapes), Arm::AWARE).unwrap();
        assert!(schedule.recompute.iter().flatten().all(|mode| mode.is_none()));
        let none = scheduler(&shapes, layout, Recompute::None, Some(1 << 50), false);
        assert_eq!(none.simulate(&schedule).unwrap().makespan_ns, schedule.predicted_makespan_ns);
        // Without a budget nobody knows what is needed: everything recomputes as the plan says.
        let blind = scheduler(&shapes, layout, Recompute::Full, None, true);
        let schedule = blind.schedule(0, &batch(&shapes), Arm::AWARE).unwrap();
        assert!(schedule.recompute.is_empty());
    }
}

/// One sample far larger than the others asks for full recomputation; the others, on the same plan, recompute less.
#[test]
fn a_large_sample_alone_pays_for_its_size() {
    let mut shapes = vec![fixture::sample(1, 9, 30); 16];
    shapes[3] = fixture::sample(1, 9, 20_000);
    let layout = Layout::colocated(2, Zero::Parameters);
    let alone = |most| peak_bytes(&shapes[3..4], Layout::colocated(1, Zero::Parameters), most);
    let (full, selective) = (alone(Recompute::Full), alone(Recompute::Selective));
    assert!(full < selective, "{full} {selective}");
    let budget = full.midpoint(selective);
    let eased = scheduler(&shapes, layout, Recompute::Full, Some(budget), true);
    let schedule = eased.schedule(0, &batch(&shapes), Arm::AWARE).unwrap();
    let modes: Vec<Recomputation> = schedule.recompute.iter().flatten().copied().collect();
    assert!(modes.iter().any(|mode| mode.llm > Recompute::Selective), "{modes:?}");
    assert!(modes.iter().any(|mode| mode.llm <= Recompute::Selective), "{modes:?}");
    let plain = scheduler(&shapes, layout, Recompute::Full, Some(budget), false);
    let all_full = plain.schedule(0, &batch(&shapes), Arm::AWARE).unwrap();
    assert!(schedule.predicted_makespan_ns < all_full.predicted_makespan_ns);
}
