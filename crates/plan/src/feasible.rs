//! Candidates that no schedule can fit into memory, found without scheduling: one sample alone overfills a rank.

use dflop_cost::{CostModel, RankPart, StageLayers};
use dflop_step::StepScheduler;
use dflop_types::{MicrobatchShape, Rejection, SampleShape};
use std::cmp::Reverse;

/// Positions of the samples that need most memory alone: in the encoder, in a layer, in the head. They may lie
/// outside the sampled batches, so they are checked separately.
pub(crate) fn heaviest(model: &CostModel, shapes: &[SampleShape]) -> Vec<usize> {
    let layer = RankPart::Stage(StageLayers { num_layers: 1, is_first: false, is_last: false });
    let asks: [&dyn Fn(&SampleShape) -> u64; 3] = [
        &|shape| model.activation_bytes(RankPart::Encoder, &MicrobatchShape::pack([shape])),
        &|shape| model.activation_bytes(layer, &MicrobatchShape::pack([shape])),
        &|shape| u64::from(shape.label_tokens),
    ];
    let heaviest = |ask: &dyn Fn(&SampleShape) -> u64| {
        (0..shapes.len()).max_by_key(|&position| (ask(&shapes[position]), Reverse(position)))
    };
    let mut positions: Vec<usize> = asks.into_iter().filter_map(heaviest).collect();
    positions.sort_unstable();
    positions.dedup();
    positions
}

/// Why no schedule of the candidate can fit, if that is certain: the rank that a sample of `heaviest` alone
/// overfills most.
pub(crate) fn rejection(scheduler: &StepScheduler, heaviest: &[usize]) -> Option<Rejection> {
    let budget_bytes = scheduler.settings().memory_budget_bytes?;
    let needs = heaviest.iter().map(|&position| scheduler.alone(&scheduler.shapes()[position]));
    let (component, needed_bytes) = needs.max_by_key(|&(_, needed_bytes)| needed_bytes)?;
    (needed_bytes > budget_bytes).then_some(Rejection::Memory { component, needed_bytes, budget_bytes })
}
