//! Times of messages and collectives: exact where measured, by latency and bandwidth elsewhere, and marked.

use crate::fixture;
use crate::fixture::profile;
use dflop_cost::{Basis, CostError, CostModel, CostSettings, Sharding, StageLayers, Transfer};
use dflop_types::{Collective, LinkSpan, MessagePoint, ModelProfile, Network, Trained, Zero};

fn model(network: Network) -> CostModel {
    CostModel::new(&dflop_types::ModelProfile { network, ..profile() }).unwrap()
}

fn all_reduce(model: &CostModel, span: LinkSpan, num_ranks: u32, bytes: u64) -> (u64, Basis) {
    let Transfer { ns, basis } = model.transfer(Collective::AllReduce, span, num_ranks, bytes);
    (ns, basis)
}

#[test]
fn measured_messages_come_back_and_lines_join_them() {
    let model = model(fixture::network());
    let time = |bytes| all_reduce(&model, LinkSpan::Node, 2, bytes);
    assert_eq!(time(1_000), (1_100, Basis::Measured));
    assert_eq!(time(10_000), (10_300, Basis::Measured));
    assert_eq!(time(5_500), (5_700, Basis::Measured));
    // From the empty message, 100 ns, to the first point.
    assert_eq!(time(500), (600, Basis::Measured));
    assert_eq!(time(0), (0, Basis::Measured));
    // Above: 2 (n - 1) / n = 1 of the bytes at 1 byte a ns.
    assert_eq!(time(12_000), (12_300, Basis::Extrapolated));
}

#[test]
fn other_numbers_of_ranks_follow_the_ring() {
    let model = model(fixture::network());
    // 4 ranks: 6 steps instead of 2, and 3/2 of the bytes cross each link.
    assert_eq!(all_reduce(&model, LinkSpan::Node, 4, 10_000), (300 + 15_000, Basis::Extrapolated));
    assert_eq!(all_reduce(&model, LinkSpan::Node, 1, 10_000), (0, Basis::Measured));
    // Another span than any that was measured.
    assert_eq!(all_reduce(&model, LinkSpan::Cluster, 2, 1_000).1, Basis::Assumed);
    // All-gather was not measured: a ring of 50 ns steps at 2 bytes a ns, half of the bytes on each link.
    let gather = model.transfer(Collective::AllGather, LinkSpan::Node, 2, 1_000);
    assert_eq!(gather, Transfer { ns: 50 + 250, basis: Basis::Assumed });
    let nothing = self::model(Network::default());
    assert_eq!(all_reduce(&nothing, LinkSpan::Node, 2, 1_000), (0, Basis::Assumed));
}

#[test]
fn a_table_of_hardware_is_never_taken_for_measured() {
    let model = model(Network { is_assumed: true, ..fixture::network() });
    assert_eq!(all_reduce(&model, LinkSpan::Node, 2, 1_000), (1_100, Basis::Assumed));
}

#[test]
fn the_tail_reduces_what_trains_over_the_replicas() {
    let model = model(fixture::network());
    let stage = StageLayers { num_layers: 1, is_first: false, is_last: false };
    // 5,000 parameters: 1 ns each for the optimizer; 20,000 bytes to reduce, 10,000 above the last point.
    assert_eq!(model.stage_tail(stage, 1), Transfer { ns: 5_000, basis: Basis::Measured });
    let reduced = Transfer { ns: 5_000 + 10_300 + 10_000, basis: Basis::Extrapolated };
    assert_eq!(model.stage_tail(stage, 2), reduced);
}

/// The ends of a pipeline sum the gradient of a matrix that they share over the replicas of both, and nothing else there.
#[test]
fn ends_that_share_a_matrix_sum_its_gradient() {
    let tied = ModelProfile { is_tied: true, network: fixture::network(), ..profile() };
    let trained = Trained { llm: false, ..Trained::default() };
    let frozen = CostModel::with(&tied, &CostSettings { trained, ..CostSettings::default() }).unwrap();
    let (apart, shared_bytes) = (model(fixture::network()), 4 * tied.modules["llm_embedding"].num_parameters);
    let tied = CostModel::new(&tied).unwrap();
    let ring = |num_ranks, bytes| all_reduce(&apart, LinkSpan::Node, num_ranks, bytes).0;
    let end = StageLayers { num_layers: 0, is_first: true, is_last: false };
    let tail = |model: &CostModel, stage, dp| model.sharded_stage_tail(stage, Sharding::replicated(dp)).ns;
    for dp in [1, 2] {
        // The embedding alone: all of it is shared. Its optimizer has one replica's part of the tail.
        let expected = tail(&apart, end, 1) + ring(2 * dp, shared_bytes);
        assert_eq!(tail(&tied, end, dp), expected);
    }
    let layers = StageLayers { num_layers: 1, is_first: false, is_last: false };
    let whole = StageLayers { is_first: true, is_last: true, ..layers };
    assert_eq!(tail(&tied, layers, 2), tail(&apart, layers, 2));
    assert!(tail(&tied, whole, 2) <= tail(&apart, whole, 2));
    assert_eq!(tail(&frozen, end, 2), 0);
    // Cut: each of two replicas sums its half with the rank that has the same half at the other end.
    let cut = |model: &CostModel, dp| model.sharded_stage_tail(end, Sharding::whole(Zero::States, dp)).ns;
    assert_eq!(cut(&tied, 2), cut(&apart, 2) + ring(2, shared_bytes / 2));
    assert_eq!(cut(&tied, 1), cut(&apart, 1) + ring(2, shared_bytes));
}

#[test]
fn times_that_fall_are_repaired_and_counted_and_broken_links_named() {
    let mut falling = fixture::network();
    falling.links[1].points.push(MessagePoint { bytes: 20_000, ns: 10_100 });
    let model = model(falling.clone());
    let repairs = model.repairs();
    assert_eq!((repairs[0].module, repairs[0].part, repairs[0].num_points), ("network", "all_reduce", 2));
    assert_eq!(all_reduce(&model, LinkSpan::Node, 2, 20_000), (10_200, Basis::Measured));
    let message = |network| {
        let broken = dflop_types::ModelProfile { network, ..profile() };
        CostModel::new(&broken).unwrap_err().to_string()
    };
    falling.links[1].points[2].bytes = 10_000;
    assert_eq!(
        message(falling.clone()),
        "model profile, network, `all_reduce` over 2 ranks: size 10000 at point 2 does not exceed 10000"
    );
    falling.links[0].bandwidth_bytes_per_s = 0;
    assert_eq!(
        message(falling),
        "model profile, network, `point_to_point` over 2 ranks: bandwidth is 0 bytes/s, must be more"
    );
    assert!(matches!(
        CostModel::new(&dflop_types::ModelProfile::default()).unwrap_err(),
        CostError::MissingModule { .. }
    ));
}
