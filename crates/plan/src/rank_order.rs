//! Which ranks of a pipeline stand next to each other: the stages of a replica, or the replicas of a stage.

use crate::input::{SearchEffort, SearchInput};
use crate::rough::BatchSizes;
use crate::space::Candidate;
use dflop_cost::{CostModel, Sharding};
use dflop_types::{Component, Layout, RankOrder};

/// Microbatches of a replica for which the two rank orders are compared: the time of a message hardly decides.
const TYPICAL_MICROBATCHES: u64 = 8;

/// The layout with the rank order that is asked for. If none is: with the one whose reduction of gradients and messages
/// through the pipeline take less time, or with both where all candidates are judged. Within a node all are alike.
pub(crate) fn rank_orders(
    input: &SearchInput<'_>,
    model: &CostModel,
    sizes: &BatchSizes,
    layout: &Layout,
) -> Vec<Layout> {
    let of = |rank_order| Layout { rank_order, ..*layout };
    if !layout.has_rank_orders() {
        return vec![*layout];
    }
    if let Some(order) = input.only.rank_order() {
        return vec![of(order)];
    }
    if layout.num_ranks() <= input.cluster.ranks_per_node {
        return vec![*layout];
    }
    let both = RankOrder::ALL.map(of);
    if input.effort == SearchEffort::Whole {
        return both.to_vec();
    }
    let tokens = sizes.llm_tokens / (TYPICAL_MICROBATCHES * u64::from(layout.llm.dp));
    let spent_ns = |layout: &Layout| {
        let message_ns = model.transfer_ns(tokens, model.ratio_across_nodes(layout));
        spent_ns(longest_tail_ns(input, model, layout), layout.num_stages() - 1, message_ns)
    };
    both.into_iter().min_by_key(spent_ns).into_iter().collect()
}

/// What the orders differ in, in nanoseconds: the end of the step, and a message there and back over each border between stages.
pub(crate) fn spent_ns(tail_ns: u64, num_borders: u32, message_ns: u64) -> u64 {
    tail_ns.saturating_add(2 * u64::from(num_borders) * message_ns)
}

/// The longest end of the step, reduction and optimizer, of the first and the last rank of the LLM backbone and of the first
/// of the encoder, in nanoseconds: of all ranks, these have the most parameters.
fn longest_tail_ns(input: &SearchInput<'_>, model: &CostModel, layout: &Layout) -> u64 {
    let settings = Candidate::probe(input, layout).settings(input);
    let [encoder, llm] = [Component::Encoder, Component::Llm].map(|of| Sharding::of(layout, of));
    let stages = settings.rank_stages(model).unwrap_or_default();
    let of_llm = stages.first().into_iter().chain(stages.last());
    let of_llm = of_llm.map(|&stage| model.sharded_stage_tail(stage, llm).ns).max();
    let stages = settings.encoder_stages(model).unwrap_or_default();
    let of_encoder = stages.first().map(|&stage| model.sharded_encoder_stage_tail(stage, encoder).ns);
    of_llm.max(of_encoder).unwrap_or(0)
}
