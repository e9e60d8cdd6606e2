//! A global batch in microbatches, with the times of each on the stages that were asked for.

use crate::input::SearchInput;
use dflop_cost::{CostModel, RankMicrobatch, StageLayers};
use dflop_schedule::baseline::{arrival_order, single_cost_lpt};
use dflop_types::{MicrobatchShape, SampleIndex};
use std::sync::Arc;

/// Forward and backward of a microbatch, in nanoseconds.
pub(crate) type Times = [u64; 2];

/// A global batch in microbatches. The times are those of one cost model: whoever asks gives the same one each time. Many ways to
/// run all ranks as pipelines have the same microbatches, and most of their stages are alike.
#[derive(Debug)]
pub(crate) struct Packed {
    microbatches: Arc<[RankMicrobatch]>,
    encoder_ns: Vec<Times>,
    stages: Vec<(StageLayers, Vec<Times>)>,
}

impl Packed {
    pub(crate) fn new(microbatches: Arc<[RankMicrobatch]>) -> Self {
        Self { microbatches, encoder_ns: Vec::new(), stages: Vec::new() }
    }

    /// The microbatches, for each replica in turn.
    pub(crate) fn microbatches(&self) -> &[RankMicrobatch] {
        &self.microbatches
    }

    /// The times of each microbatch on the encoder.
    pub(crate) fn encoder_ns(&mut self, model: &CostModel) -> &[Times] {
        if self.encoder_ns.is_empty() {
            let of = |one: &RankMicrobatch| {
                let found = model.encoder(&one.shape);
                [found.forward_ns, found.backward_ns]
            };
            self.encoder_ns = self.microbatches.iter().map(of).collect();
        }
        &self.encoder_ns
    }

    /// The times of each microbatch on a stage of the LLM backbone.
    pub(crate) fn stage_ns(&mut self, model: &CostModel, stage: StageLayers) -> &[Times] {
        let at = self.stages.iter().position(|(known, _)| *known == stage).unwrap_or_else(|| {
            let of = |one: &RankMicrobatch| {
                let found = model.llm_stage(&one.shape, stage.num_layers, stage.is_first, stage.is_last);
                [found.forward_ns, found.backward_ns]
            };
            self.stages.push((stage, self.microbatches.iter().map(of).collect()));
            self.stages.len() - 1
        });
        &self.stages[at].1
    }

    /// Whether no microbatch has more tokens than a bucket may.
    pub(crate) fn keeps_cap(&self, input: &SearchInput<'_>) -> bool {
        let tokens = |one: &RankMicrobatch| one.shape.total_llm_tokens();
        input.bucket_tokens_max.is_none_or(|cap| self.microbatches.iter().all(|one| tokens(one) <= cap))
    }
}

/// The microbatches of a global batch in arrival order, in equal counts.
pub(crate) fn by_arrival(
    input: &SearchInput<'_>,
    batch: &[SampleIndex],
    num_buckets: u32,
) -> Arc<[RankMicrobatch]> {
    pack(input, batch, &arrival_order(batch.len(), num_buckets), num_buckets)
}

/// The microbatches of a global batch by the time of each sample on both components, `costs_ns`; longest first.
pub(crate) fn by_time(
    input: &SearchInput<'_>,
    batch: &[SampleIndex],
    costs_ns: &[u64],
    num_buckets: u32,
) -> Arc<[RankMicrobatch]> {
    pack(input, batch, &single_cost_lpt(costs_ns, num_buckets), num_buckets)
}

/// The time of each sample of a batch on both components, in nanoseconds.
pub(crate) fn costs_ns(input: &SearchInput<'_>, model: &CostModel, batch: &[SampleIndex]) -> Vec<u64> {
    let whole = model.whole_stage();
    let cost = |sample: &SampleIndex| {
        let alone = MicrobatchShape::pack([&input.shapes[sample.index()]]);
        model.encoder(&alone).total_ns() + model.llm_stage(&alone, whole.num_layers, true, true).total_ns()
    };
    batch.iter().map(cost).collect()
}

/// The samples of each bucket as one microbatch.
fn pack(
    input: &SearchInput<'_>,
    batch: &[SampleIndex],
    buckets: &[u32],
    num_buckets: u32,
) -> Arc<[RankMicrobatch]> {
    let mut samples = vec![Vec::new(); num_buckets as usize];
    for (&sample, &bucket) in batch.iter().zip(buckets) {
        samples[bucket as usize].push(&input.shapes[sample.index()]);
    }
    let packed = samples.into_iter().map(|samples| RankMicrobatch {
        shape: MicrobatchShape::pack(samples.iter().copied()),
        feature_tokens: samples.iter().map(|shape| u64::from(shape.feature_tokens)).sum(),
    });
    packed.collect()
}
