//! Megatron-LM as people run it: pipelines of one shape over all ranks, the encoder before the first stage.

use crate::end_cut::{EndCut, end_cuts};
use crate::input::SearchInput;
use crate::models::Models;
use crate::rank_order::spent_ns;
use crate::space::{divisors, microbatch_counts};
use dflop_cost::{CostModel, RankMicrobatch, RankRole, RankSteps, Sharding, StageLayers, openings_ahead};
use dflop_schedule::baseline::{arrival_order, single_cost_lpt};
use dflop_sim::{Durations, order, simulate_interleaved};
use dflop_types::number::counted;
use dflop_types::{
    Action, Component, ComponentLayout, Layout, MicrobatchShape, Rank, RankOrder, Recomputation, SampleIndex,
    StageIndex, Zero, cut_layers,
};
use rayon::prelude::*;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// The fastest that fits.
pub(crate) struct Megatron {
    /// In its own words, recomputation apart.
    pub(crate) layout: String,
    pub(crate) recompute: Recomputation,
    pub(crate) num_microbatches: u32,
    pub(crate) step_ns_mean: u64,
    pub(crate) idle_ratio: f64,
    /// Whether the search was halted before it had looked at all of them.
    pub(crate) is_cut: bool,
}

/// One way to run all ranks as pipelines of one shape.
#[derive(Debug, Clone, Copy)]
struct Pipelines {
    /// Tensor degrees of encoder and LLM backbone. An encoder whose layers cannot be cut is whole on each rank.
    tp: [u32; 2],
    pp: u32,
    /// Chunks of a pipeline rank.
    chunks: u32,
    dp: u32,
    num_microbatches: u32,
    recompute: Recomputation,
    rank_order: RankOrder,
    /// Layers of the first and the last rank; `None`: the even cut.
    cut: Option<EndCut>,
}

/// The mean step in nanoseconds, and the mean of its idle ratio.
type Judged = (u64, f64);

/// The numbers of chunks on a pipeline rank that are tried.
const CHUNKS: [u32; 4] = [1, 2, 3, 4];

impl Pipelines {
    /// Whether its chunks can be run. Megatron asks for several pipeline ranks, at least one layer in each chunk, and a
    /// number of microbatches that is a multiple of `pp`.
    fn has_rounds(&self, num_layers: u32) -> bool {
        let is_whole = self.pp > 1 && self.num_microbatches.is_multiple_of(self.pp);
        self.chunks == 1 || is_whole && self.pp * self.chunks <= num_layers
    }

    /// The ranks of the LLM backbone alone, which hold the encoder too.
    const fn layout(&self) -> Layout {
        let none = ComponentLayout { tp: 1, pp: 1, dp: 0 };
        let plain = Layout::disaggregated(none, ComponentLayout { tp: self.tp[1], pp: self.pp, dp: self.dp });
        Layout { llm_interleave: self.chunks, rank_order: self.rank_order, ..plain }
    }

    /// How states are cut over the replicas of a stage.
    const fn sharding(&self) -> Sharding {
        let stride = self.layout().replica_stride(Component::Llm);
        Sharding { stride, ..Sharding::whole(Zero::States, self.dp) }
    }

    /// Borders between chunks.
    const fn num_borders(&self) -> u32 {
        self.pp * self.chunks - 1
    }

    /// Which part of the messages from chunk to chunk goes to another node.
    fn ratio_across_nodes(&self, ranks_per_node: u32) -> f64 {
        self.layout().borders_across_nodes(Component::Llm, ranks_per_node)
            / f64::from(self.num_borders().max(1))
    }

    /// The end of the step of the slowest rank, reduction and optimizer.
    fn tail_ns(&self, model: &CostModel, stages: &[StageLayers]) -> u64 {
        let sharding = self.sharding();
        let of = |rank| model.sharded_stage_tail(held(stages, self.pp, rank), sharding).ns;
        let first_ns = model.sharded_encoder_tail(sharding).ns + of(0);
        (0..self.pp).map(of).max().unwrap_or(0).max(first_ns)
    }

    /// The stages, as many as there are chunks.
    fn stages(&self, model: &CostModel) -> Vec<StageLayers> {
        let even = || cut_layers(model.num_llm_layers(), self.pp * self.chunks);
        let cut = self.cut.map_or_else(even, |cut| cut.stages(self.pp, self.chunks));
        let last = cut.len() - 1;
        let of =
            |(stage, num_layers)| StageLayers { num_layers, is_first: stage == 0, is_last: stage == last };
        cut.into_iter().enumerate().map(of).collect()
    }

    /// The same with the order of ranks whose reductions and messages through the pipeline take less time, as our own
    /// pipelines have it.
    fn ordered(self, input: &SearchInput<'_>, models: &Models, batch: Option<&&[SampleIndex]>) -> Self {
        let of = |rank_order| Self { rank_order, ..self };
        let is_same = !of(RankOrder::TpPpDp).layout().has_rank_orders();
        let Some(model) = models.cut(self.tp, self.recompute).filter(|_| !is_same) else { return self };
        let tokens = |samples: &[SampleIndex]| -> u64 {
            samples.iter().map(|sample| u64::from(input.shapes[sample.index()].llm_tokens)).sum()
        };
        let tokens = batch.map_or(0, |batch| tokens(batch));
        let of_microbatch = tokens / u64::from((self.num_microbatches * self.dp).max(1));
        let stages = self.stages(model);
        let spent_ns = |way: &Self| {
            let across_nodes = way.ratio_across_nodes(input.cluster.ranks_per_node);
            let message_ns = model.transfer_ns(model.llm_rows(of_microbatch), across_nodes);
            spent_ns(way.tail_ns(model, &stages), self.num_borders(), message_ns)
        };
        // Its own order first: of equals it is taken.
        [RankOrder::TpDpPp, RankOrder::TpPpDp].map(of).into_iter().min_by_key(spent_ns).unwrap_or(self)
    }

    /// The even cut, and cuts that make the ranks at the ends about as long as the others. The times are the predicted work of a
    /// batch in arrival order.
    fn cuts(&self, input: &SearchInput<'_>, models: &Models, batch: Option<&&[SampleIndex]>) -> Vec<Self> {
        let Some((model, batch)) = models.cut(self.tp, self.recompute).zip(batch) else { return vec![*self] };
        let work_ns = |of: &dyn Fn(&MicrobatchShape) -> u64| -> u64 {
            let all = arrival_packs(input, self, batch);
            all.iter().map(|microbatch| of(&microbatch.shape)).sum()
        };
        let stage = |shape: &MicrobatchShape, is_first, is_last| {
            model.llm_stage(shape, 1, is_first, is_last).total_ns()
        };
        let layer_ns = work_ns(&|shape| stage(shape, false, false));
        let first_ns = work_ns(&|shape| model.encoder(shape).total_ns() + stage(shape, true, false));
        let last_ns = work_ns(&|shape| stage(shape, false, true));
        let ends_ns = [first_ns, last_ns].map(|ns| ns.saturating_sub(layer_ns));
        let uneven = end_cuts(model.num_llm_layers(), [self.pp, self.chunks], layer_ns, ends_ns);
        let cuts = std::iter::once(None).chain(uneven.into_iter().map(Some));
        cuts.map(|cut| Self { cut, ..*self }).collect()
    }

    /// The actions of a pipeline rank; `None` if these stages cannot be interleaved.
    fn actions(&self, rank: u32) -> Option<Vec<Action>> {
        order::interleaved(Rank(rank), self.pp, self.pp * self.chunks, self.num_microbatches).ok()
    }
}

/// Microbatch counts to try. Our own plans try the same ones, but for those that make whole rounds of `pp` microbatches.
fn round_counts(global_batch_size: u32, pp: u32, dp: u32) -> Vec<u32> {
    let mut counts = microbatch_counts(global_batch_size, dp);
    let most = global_batch_size / dp;
    counts.extend((0..32).map_while(|power| pp.checked_mul(1 << power)).take_while(|&m| m <= most));
    counts.sort_unstable();
    counts.dedup();
    counts
}

/// The fastest pipelines whose encoder runs on the rank of the first stage, before it. Optimizer states are sharded over
/// the replicas (ZeRO-1; Megatron calls it the distributed optimizer). The first `num_timed` of the batches give the time; all of
/// them must fit.
pub(crate) fn megatron(
    input: &SearchInput<'_>,
    models: &Models,
    batches: &[&[SampleIndex]],
    num_timed: usize,
    is_balanced: bool,
) -> Option<Megatron> {
    let (ranks, num_layers) = (input.cluster.num_ranks, models.plain().num_llm_layers());
    let groups = models.degrees().iter().filter(|&&[encoder, tp]| {
        let is_cut = models.degrees().contains(&[tp, tp]);
        ranks.is_multiple_of(tp) && encoder == if is_cut { tp } else { 1 }
    });
    let ways: Vec<Pipelines> = groups
        .flat_map(|&tp| divisors(ranks / tp[1]).into_iter().map(move |pp| (tp, pp)))
        .filter(|&(_, pp)| pp <= num_layers)
        .flat_map(|(tp, pp)| {
            let dp = ranks / tp[1] / pp;
            let counts = input
                .num_microbatches
                .map_or_else(|| round_counts(input.global_batch_size, pp, dp), |count| vec![count]);
            let recompute = Recomputation::NONE;
            counts.into_iter().flat_map(move |num_microbatches| {
                let (rank_order, cut) = (RankOrder::TpDpPp, None);
                CHUNKS.map(|chunks| Pipelines {
                    tp,
                    pp,
                    chunks,
                    dp,
                    num_microbatches,
                    recompute,
                    rank_order,
                    cut,
                })
            })
        })
        .filter(|way| way.has_rounds(num_layers))
        .collect();
    let count = num_timed.max(1);
    let step = |way: &Pipelines, model: &CostModel, packed: &[Vec<RankMicrobatch>]| -> Option<Judged> {
        let mut sums = (0, 0.0);
        for (at, microbatches) in packed.iter().enumerate() {
            let (step_ns, idle_ns) = pipelines_ns(input, model, way, microbatches)?;
            if at < count {
                sums = (sums.0 + step_ns, sums.1 + idle_ns as f64 / step_ns.max(1) as f64);
            }
        }
        Some((sums.0 / count as u64, sums.1 / count as f64))
    };
    // More recomputation never shortens a step of the same microbatches and stages. So a mode is left out if one that recomputes
    // less fits.
    // Balance looks at times, which recomputation changes: there only unequal modes are left out for this.
    let (has_some, is_cut) = (AtomicBool::new(false), AtomicBool::new(false));
    let steps = |way: &Pipelines| {
        let mut found: Vec<(Pipelines, Judged)> = Vec::new();
        if has_some.load(Relaxed) && (input.halt)() {
            is_cut.store(true, Relaxed);
            return found;
        }
        let mut cuts = way.ordered(input, models, batches.first()).cuts(input, models, batches.first());
        for &recompute in models.modes() {
            let is_same = !is_balanced || recompute.of_both().is_none();
            if is_same {
                cuts.retain(|way| {
                    let of_cut = |(less, _): &(Pipelines, Judged)| less.cut == way.cut;
                    !found.iter().any(|one| of_cut(one) && one.0.recompute.is_at_most(recompute))
                });
            }
            let Some(model) = models.cut(way.tp, recompute).filter(|_| !cuts.is_empty()) else { continue };
            let packs = batches.iter().map(|batch| packs(input, model, way, batch, is_balanced));
            let Some(packed) = packs.collect::<Option<Vec<_>>>() else { continue };
            for way in &cuts {
                let way = Pipelines { recompute, ..*way };
                found.extend(step(&way, model, &packed).map(|judged| (way, judged)));
            }
        }
        has_some.fetch_or(!found.is_empty(), Relaxed);
        found
    };
    let found: Vec<(Pipelines, Judged)> = ways.par_iter().flat_map_iter(steps).collect();
    let (way, (step_ns_mean, idle_ratio)) = found.into_iter().min_by_key(|(_, (ns, _))| *ns)?;
    let chunks = if way.chunks > 1 { format!(" interleave {}", way.chunks) } else { String::new() };
    let cut = way.cut.map_or_else(String::new, |cut| {
        format!(", first rank {}, last {}", counted(cut.first.into(), "layer"), cut.last)
    });
    // Its own order of ranks is the other one.
    let is_own = way.rank_order == RankOrder::TpDpPp;
    let order = if is_own { String::new() } else { format!(", order {}", way.rank_order) };
    Some(Megatron {
        layout: format!("tp {} pp {} dp {}{chunks}{cut}, zero 1{order}", way.tp[1], way.pp, way.dp),
        recompute: way.recompute,
        num_microbatches: way.num_microbatches,
        step_ns_mean,
        idle_ratio,
        is_cut: is_cut.into_inner(),
    })
}

/// The microbatches of a global batch in arrival order, for each replica in turn.
fn arrival_packs(input: &SearchInput<'_>, way: &Pipelines, batch: &[SampleIndex]) -> Vec<RankMicrobatch> {
    let num_buckets = way.num_microbatches * way.dp;
    pack(input, batch, &arrival_order(batch.len(), num_buckets), num_buckets)
}

/// The microbatches of a global batch, for each replica in turn; `None` if one has too many tokens.
fn packs(
    input: &SearchInput<'_>,
    model: &CostModel,
    way: &Pipelines,
    batch: &[SampleIndex],
    is_balanced: bool,
) -> Option<Vec<RankMicrobatch>> {
    let microbatches = if is_balanced {
        let whole = model.whole_stage();
        let cost = |sample: &SampleIndex| {
            let alone = MicrobatchShape::pack([&input.shapes[sample.index()]]);
            model.encoder(&alone).total_ns()
                + model.llm_stage(&alone, whole.num_layers, true, true).total_ns()
        };
        let num_buckets = way.num_microbatches * way.dp;
        let buckets = single_cost_lpt(&batch.iter().map(cost).collect::<Vec<u64>>(), num_buckets);
        pack(input, batch, &buckets, num_buckets)
    } else {
        arrival_packs(input, way, batch)
    };
    let most = microbatches.iter().map(|microbatch| microbatch.shape.total_llm_tokens()).max().unwrap_or(0);
    input.bucket_tokens_max.is_none_or(|cap| most <= cap).then_some(microbatches)
}

/// The samples of each bucket as one microbatch.
fn pack(
    input: &SearchInput<'_>,
    batch: &[SampleIndex],
    buckets: &[u32],
    num_buckets: u32,
) -> Vec<RankMicrobatch> {
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

/// The step of a global batch and the mean idle time of its ranks, in nanoseconds; `None` if a rank has too little memory.
fn pipelines_ns(
    input: &SearchInput<'_>,
    model: &CostModel,
    way: &Pipelines,
    microbatches: &[RankMicrobatch],
) -> Option<(u64, u64)> {
    let (m, dp) = (way.num_microbatches as usize, way.dp as usize);
    let stages = way.stages(model);
    let sharding = way.sharding();
    let across_nodes = way.ratio_across_nodes(input.cluster.ranks_per_node);
    let (mut longest_ns, mut busy_ns) = (0, 0);
    for replica in 0..dp {
        // In arrival order the replicas take turns, microbatch by microbatch. Balanced microbatches are alike, so for those
        // it does not matter which replica has which.
        let own: Vec<RankMicrobatch> = (0..m).map(|at| microbatches[at * dp + replica].clone()).collect();
        if !fits(input, model, way, &stages, sharding, &own)? {
            return None;
        }
        let mut durations = Durations {
            forward_ns: Vec::new(),
            backward_ns: Vec::new(),
            input_ns: Vec::new(),
            weight_ns: Vec::new(),
            transfer_ns: 0,
        };
        let tokens: u64 = own.iter().map(|microbatch| microbatch.shape.total_llm_tokens()).sum();
        durations.transfer_ns = model.transfer_ns(model.llm_rows(tokens / m.max(1) as u64), across_nodes);
        for stage in &stages {
            let both = own.iter().map(|microbatch| {
                let mut one =
                    model.llm_stage(&microbatch.shape, stage.num_layers, stage.is_first, stage.is_last);
                if stage.is_first {
                    let encoder = model.encoder(&microbatch.shape);
                    one.forward_ns += encoder.forward_ns;
                    one.backward_ns += encoder.backward_ns;
                }
                (one.forward_ns, one.backward_ns)
            });
            let (forward_ns, backward_ns): (Vec<u64>, Vec<u64>) = both.unzip();
            busy_ns += forward_ns.iter().chain(&backward_ns).sum::<u64>();
            durations.forward_ns.push(forward_ns);
            durations.backward_ns.push(backward_ns);
        }
        longest_ns = simulate_interleaved(&durations, way.pp).ok()?.makespan_ns.max(longest_ns);
    }
    let idle_ns = longest_ns.saturating_sub(busy_ns / u64::from(way.dp * way.pp));
    Some((longest_ns + way.tail_ns(model, &stages), idle_ns))
}

/// All chunks that a pipeline rank holds, as one stage: their layers together.
fn held(stages: &[StageLayers], pp: u32, rank: u32) -> StageLayers {
    let chunks = || stages.iter().skip(rank as usize).step_by(pp as usize);
    StageLayers {
        num_layers: chunks().map(|chunk| chunk.num_layers).sum(),
        is_first: chunks().any(|chunk| chunk.is_first),
        is_last: chunks().any(|chunk| chunk.is_last),
    }
}

/// Whether the fullest rank of a pipeline fits the memory budget. That is the first rank, which also holds the encoder, or
/// the last one. `None` if the stages cannot be interleaved.
fn fits(
    input: &SearchInput<'_>,
    model: &CostModel,
    way: &Pipelines,
    stages: &[StageLayers],
    sharding: Sharding,
    microbatches: &[RankMicrobatch],
) -> Option<bool> {
    let Some(budget_bytes) = input.memory_budget_bytes() else { return Some(true) };
    let (pp, last) = (way.pp as usize, way.pp - 1);
    let of_rank = |rank: u32| {
        let actions = way.actions(rank)?;
        let role = RankRole::Stage(held(stages, way.pp, rank));
        let openings = &openings_ahead(actions.len());
        let steps =
            RankSteps { role, microbatches, actions: &actions, openings, copies_rows: false, sharding };
        let chunks: Vec<StageLayers> = stages.iter().copied().skip(rank as usize).step_by(pp).collect();
        model.interleaved_peak(&steps, &chunks, |stage| stage.index() / pp).ok()
    };
    // The encoder runs with the first chunk.
    let mut actions = way.actions(0)?;
    actions.retain(|action| action.stage == StageIndex(0));
    let role = RankRole::Encoder;
    let openings = &openings_ahead(actions.len());
    let steps = RankSteps { role, microbatches, actions: &actions, openings, copies_rows: false, sharding };
    let encoder = model.rank_peak(&steps).ok()?;
    let (first, end) = (of_rank(0)?, of_rank(last)?);
    // Encoder and first stage are on one device, which has its context only once.
    let first_bytes = (encoder.total_bytes() + first.total_bytes()).saturating_sub(encoder.context_bytes);
    Some(first_bytes.max(end.total_bytes()) <= budget_bytes)
}
