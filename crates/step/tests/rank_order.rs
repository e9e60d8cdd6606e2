//! Which ranks stand next to each other changes no schedule: the same work on ranks of other numbers.

use crate::fixture;
use crate::scheduling::{all_arms, batch, split_profile};
use dflop_cost::CostModel;
use dflop_step::{StepScheduler, StepSettings};
use dflop_types::{
    Collective, ComponentLayout, Layout, LinkProfile, LinkSpan, PipelineOrder, Rank, RankOrder, SampleShape,
};
use proptest::prelude::*;

fn scheduler(shapes: &[SampleShape], layout: Layout, pipeline_order: PipelineOrder) -> StepScheduler {
    let settings = StepSettings { layout, num_microbatches: 6, pipeline_order, memory_budget_bytes: None };
    let mut profile = split_profile();
    profile.modules.get_mut("encoder_layer").unwrap().count = 6;
    StepScheduler::new(settings, CostModel::new(&profile).unwrap(), shapes.to_vec(), 3).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// Under every arm: the same samples in the same places, each rank the list of the rank with its coordinates in the
    /// other order, and the same step.
    #[test]
    fn the_rank_order_changes_the_numbers_of_ranks_alone(
        seed: u64, count in 8usize..24, encoder in (1u32..3, 1u32..3), llm in (1u32..4, 1u32..4), chunks in 1u32..3,
        is_aware: bool
    ) {
        let degrees = |(pp, dp)| ComponentLayout { tp: 1, pp, dp };
        let plain = Layout::disaggregated(degrees(encoder), degrees(llm));
        let plain = Layout { llm_interleave: if llm.0 == 2 { chunks } else { 1 }, ..plain };
        let other = Layout { rank_order: RankOrder::TpDpPp, ..plain };
        let order = if is_aware { PipelineOrder::DataAware } else { PipelineOrder::OneFOneB };
        let shapes = fixture::shapes(count, seed);
        let [by_stage, by_replica] = [plain, other].map(|layout| scheduler(&shapes, layout, order));
        for arm in all_arms() {
            let [a, b] = [&by_stage, &by_replica].map(|one| one.schedule(0, &batch(&shapes), arm).unwrap());
            prop_assert_eq!(&a.llm, &b.llm);
            prop_assert_eq!(&a.encoder, &b.encoder);
            prop_assert_eq!(a.predicted_makespan_ns, b.predicted_makespan_ns);
            prop_assert_eq!(by_replica.simulate(&b).unwrap().makespan_ns, b.predicted_makespan_ns);
            let twin = |rank: Rank| {
                let at = plain.coordinates(rank).unwrap();
                other.rank(at.replica, at.stage)
            };
            let ranks = || (0..plain.num_ranks()).map(Rank);
            prop_assert_eq!(a.actions.len(), b.actions.len());
            for rank in ranks().filter(|_| !a.actions.is_empty()) {
                prop_assert_eq!(&a.actions[rank.index()], &b.actions[twin(rank).index()]);
            }
            let bytes = |one: &StepScheduler, schedule| -> Vec<u64> {
                one.memory(schedule).unwrap().iter().map(dflop_cost::RankMemory::total_bytes).collect()
            };
            let (of_a, of_b) = (bytes(&by_stage, &a), bytes(&by_replica, &b));
            prop_assert!(ranks().all(|rank| of_a[rank.index()] == of_b[twin(rank).index()]));
        }
    }
}

/// Two nodes of four ranks. A message to another node takes a hundred times as long. The encoder is on rank 0, three replicas
/// of two LLM stages are on ranks 1 to 6. As (1 2) (3 4) (5 6), one replica has its stages on two nodes. As (1 4) (2 5) (3 6),
/// all three have.
#[test]
fn messages_to_another_node_take_their_own_time() {
    let degrees = |pp, dp| ComponentLayout { tp: 1, pp, dp };
    let plain = Layout::disaggregated(degrees(1, 1), degrees(2, 3));
    let other = Layout { rank_order: RankOrder::TpDpPp, ..plain };
    let shapes = fixture::shapes(12, 7);
    let mut profile = split_profile();
    let near = LinkProfile {
        collective: Collective::PointToPoint,
        span: LinkSpan::Node,
        num_ranks: 2,
        latency_ns: 1_000,
        bandwidth_bytes_per_s: 1_000_000_000,
        points: Vec::new(),
    };
    let far = LinkProfile {
        span: LinkSpan::Cluster,
        latency_ns: 100 * near.latency_ns,
        bandwidth_bytes_per_s: near.bandwidth_bytes_per_s / 100,
        ..near.clone()
    };
    profile.network.links = vec![near, far];
    let transfer_ns = |layout, ranks_per_node| {
        let settings = StepSettings {
            layout,
            num_microbatches: 2,
            pipeline_order: PipelineOrder::OneFOneB,
            memory_budget_bytes: None,
        };
        let model = CostModel::new(&profile).unwrap();
        let scheduler = StepScheduler::new(settings, model, shapes.clone(), 3).unwrap();
        let scheduler = scheduler.with_ranks_per_node(ranks_per_node).unwrap();
        let schedule = scheduler.schedule(0, &batch(&shapes), dflop_step::Arm::BLIND).unwrap();
        scheduler.step_input(&schedule).unwrap().transfer_ns
    };
    let near_ns = transfer_ns(plain, 8);
    assert_eq!(near_ns, transfer_ns(other, 8));
    // Of two borders: to the LLM one of three pairs is apart, between its stages one of three.
    let ratio = |layout| (transfer_ns(layout, 4) as f64 / near_ns as f64 - 1.0) / 99.0;
    assert!((ratio(plain) - 1.0 / 3.0).abs() < 0.01, "{}", ratio(plain));
    // The encoder's rank feeds its neighbours 1, 2 and 3; then all three replicas send to the other node.
    assert!((ratio(other) - 0.5).abs() < 0.01, "{}", ratio(other));
}
