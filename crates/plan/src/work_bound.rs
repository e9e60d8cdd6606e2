//! The work bound: what a step takes at least, whatever the layout.

use crate::input::SearchInput;
use dflop_cost::CostModel;
use dflop_types::{MicrobatchShape, SampleIndex};

/// The work bound: all predicted work of a global batch divided by the number of ranks, in nanoseconds, as a mean over the
/// batches. No step is shorter.
///
/// The work is forward and backward of both components without recomputation, at the rate of the whole batch. If layers
/// are cut, the cost model has the time of one rank of a tensor group, so it counts once for each rank of the group.
pub(crate) fn work_bound_ns(input: &SearchInput<'_>, model: &CostModel, batches: &[Vec<SampleIndex>]) -> u64 {
    let work_ns = |batch: &Vec<SampleIndex>| {
        let whole = MicrobatchShape::pack(batch.iter().map(|sample| &input.shapes[sample.index()]));
        let llm = model.llm_stage(&whole, model.num_llm_layers(), true, true);
        let settings = model.settings();
        let of = |ns: u64, degree: u32| u128::from(ns) * u128::from(degree);
        of(model.encoder(&whole).total_ns(), settings.encoder.tensor_parallel_degree)
            + of(llm.total_ns(), settings.llm.tensor_parallel_degree)
    };
    let sum: u128 = batches.iter().map(work_ns).sum();
    let over = (batches.len().max(1) as u128) * u128::from(input.cluster.num_ranks);
    u64::try_from(sum / over).unwrap_or(u64::MAX)
}
