//! Pipelines of one shape over all ranks, as Megatron-LM runs them: their stages, their memory and their step.

use crate::bound::BatchWork;
use crate::end_cut::{EndCut, end_cuts};
use crate::input::SearchInput;
use crate::packed::{Packed, Times};
use crate::rank_order::spent_ns;
use dflop_cost::{CostModel, RankMicrobatch, RankRole, RankSteps, Sharding, StageLayers, openings_ahead};
use dflop_sim::{Durations, order, simulate_interleaved};
use dflop_types::{
    Action, Component, ComponentLayout, Layout, Rank, RankOrder, Recomputation, StageIndex, Zero, cut_layers,
};

/// One way to run all ranks as pipelines of one shape.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pipelines {
    /// Tensor degrees of encoder and LLM backbone. An encoder whose layers cannot be cut is whole on each rank.
    pub(crate) tp: [u32; 2],
    pub(crate) pp: u32,
    /// Chunks of a pipeline rank.
    pub(crate) chunks: u32,
    pub(crate) dp: u32,
    pub(crate) num_microbatches: u32,
    pub(crate) recompute: Recomputation,
    pub(crate) rank_order: RankOrder,
    /// Layers of the first and the last rank; `None`: the even cut.
    pub(crate) cut: Option<EndCut>,
}

impl Pipelines {
    /// Whether its chunks can be run. Megatron asks for several pipeline ranks, at least one layer in each chunk, and a
    /// number of microbatches that is a multiple of `pp`.
    pub(crate) fn has_rounds(&self, num_layers: u32) -> bool {
        let is_whole = self.pp > 1 && self.num_microbatches.is_multiple_of(self.pp);
        self.chunks == 1 || is_whole && self.pp * self.chunks <= num_layers
    }

    /// The ranks of the LLM backbone alone, which hold the encoder too.
    const fn layout(&self) -> Layout {
        let none = ComponentLayout { tp: 1, pp: 1, dp: 0 };
        let plain = Layout::disaggregated(none, ComponentLayout { tp: self.tp[1], pp: self.pp, dp: self.dp });
        Layout { llm_interleave: self.chunks, rank_order: self.rank_order, ..plain }
    }

    /// Microbatches of a step on all replicas.
    pub(crate) const fn num_buckets(&self) -> u32 {
        self.num_microbatches * self.dp
    }

    /// How states are cut over the replicas of a stage.
    fn sharding(&self) -> Sharding {
        Sharding::of(&Layout { zero: Zero::States, ..self.layout() }, Component::Llm)
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
    pub(crate) fn tail_ns(&self, model: &CostModel, stages: &[StageLayers]) -> u64 {
        let sharding = self.sharding();
        let of = |rank| model.sharded_stage_tail(held(stages, self.pp, rank), sharding).ns;
        let first_ns = model.sharded_encoder_tail(sharding).ns + of(0);
        (0..self.pp).map(of).max().unwrap_or(0).max(first_ns)
    }

    /// The stages, as many as there are chunks.
    pub(crate) fn stages(&self, model: &CostModel) -> Vec<StageLayers> {
        let even = || cut_layers(model.num_llm_layers(), self.pp * self.chunks);
        let cut = self.cut.map_or_else(even, |cut| cut.stages(self.pp, self.chunks));
        let last = cut.len() - 1;
        let of =
            |(stage, num_layers)| StageLayers { num_layers, is_first: stage == 0, is_last: stage == last };
        cut.into_iter().enumerate().map(of).collect()
    }

    /// The same with the order of ranks whose reductions and messages through the pipeline take less time, as our own
    /// pipelines have it. The batch has `llm_tokens`.
    pub(crate) fn ordered(self, input: &SearchInput<'_>, model: &CostModel, llm_tokens: u64) -> Self {
        let of = |rank_order| Self { rank_order, ..self };
        if !of(RankOrder::TpPpDp).layout().has_rank_orders() {
            return self;
        }
        let of_microbatch = llm_tokens / u64::from(self.num_buckets().max(1));
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
    pub(crate) fn cuts(&self, model: &CostModel, arrival: &mut Packed) -> Vec<Self> {
        let one = |is_first, is_last| StageLayers { num_layers: 1, is_first, is_last };
        let sum = |times: &[Times]| times.iter().map(|[forward, backward]| forward + backward).sum::<u64>();
        let [layer_ns, first_ns, last_ns] = [one(false, false), one(true, false), one(false, true)]
            .map(|stage| sum(arrival.stage_ns(model, stage)));
        let first_ns = first_ns + sum(arrival.encoder_ns(model));
        let ends_ns = [first_ns, last_ns].map(|ns| ns.saturating_sub(layer_ns));
        let uneven = end_cuts(model.num_llm_layers(), [self.pp, self.chunks], layer_ns, ends_ns);
        let cuts = std::iter::once(None).chain(uneven.into_iter().map(Some));
        cuts.map(|cut| Self { cut, ..*self }).collect()
    }

    /// The actions of a pipeline rank; `None` if these stages cannot be interleaved.
    fn actions(&self, rank: u32) -> Option<Vec<Action>> {
        order::interleaved(Rank(rank), self.pp, self.pp * self.chunks, self.num_microbatches).ok()
    }

    /// The positions of a replica's microbatches among all. In arrival order the replicas take turns, microbatch by microbatch.
    /// Balanced microbatches are alike, so for those it does not matter which replica has which.
    fn own(&self, replica: usize) -> impl Iterator<Item = usize> + Clone + use<> {
        let (m, dp) = (self.num_microbatches as usize, self.dp as usize);
        (0..m).map(move |at| at * dp + replica)
    }

    /// No step of this way is shorter, whatever the microbatches, in nanoseconds: the busiest rank does its least work of a mean
    /// replica, and then comes the end of the step.
    pub(crate) fn work_min_ns(&self, work: &BatchWork, stages: &[StageLayers], tail_ns: u64) -> u64 {
        let parts = u64::from(self.num_buckets());
        let of_rank = |rank: u32| {
            let chunks = stages.iter().skip(rank as usize).step_by(self.pp as usize);
            let llm_ns = chunks.map(|&stage| work.stage_min_ns(stage, parts)).fold(0, u64::saturating_add);
            llm_ns.saturating_add(if rank == 0 { work.encoder_min_ns(parts) } else { 0 })
        };
        // The ranks between the ends are alike, or have a layer more from the first on.
        let ranks = [0, 1, self.pp - 1].into_iter().filter(|&rank| rank < self.pp);
        (ranks.map(of_rank).max().unwrap_or(0) / u64::from(self.dp.max(1))).saturating_add(tail_ns)
    }
}

/// A way with one cut on microbatches: what of it is asked for several times.
pub(crate) struct Run<'a> {
    pub(crate) input: &'a SearchInput<'a>,
    pub(crate) model: &'a CostModel,
    pub(crate) way: Pipelines,
    pub(crate) stages: Vec<StageLayers>,
    pub(crate) tail_ns: u64,
}

impl<'a> Run<'a> {
    pub(crate) fn new(input: &'a SearchInput<'_>, model: &'a CostModel, way: Pipelines) -> Self {
        let stages = way.stages(model);
        let tail_ns = way.tail_ns(model, &stages);
        Self { input, model, way, stages, tail_ns }
    }

    /// The times of a replica's microbatches, the encoder's with those of the first stage.
    fn durations(&self, packed: &mut Packed, replica: usize) -> Durations {
        let own = self.way.own(replica);
        let tokens: u64 = own.clone().map(|at| packed.microbatches()[at].shape.total_llm_tokens()).sum();
        let rows = self.model.llm_rows(tokens / u64::from(self.way.num_microbatches.max(1)));
        let across_nodes = self.way.ratio_across_nodes(self.input.cluster.ranks_per_node);
        let encoder: Vec<Times> = own.clone().map(|at| packed.encoder_ns(self.model)[at]).collect();
        let mut durations = Durations {
            forward_ns: Vec::with_capacity(self.stages.len()),
            backward_ns: Vec::with_capacity(self.stages.len()),
            input_ns: Vec::new(),
            weight_ns: Vec::new(),
            transfer_ns: self.model.transfer_ns(rows, across_nodes),
        };
        for &stage in &self.stages {
            let times = packed.stage_ns(self.model, stage);
            let of_encoder = |at: usize| if stage.is_first { encoder[at] } else { [0; 2] };
            let both = own.clone().enumerate().map(|(at, bucket)| {
                let ([forward, backward], [more_forward, more_backward]) = (times[bucket], of_encoder(at));
                (forward + more_forward, backward + more_backward)
            });
            let (forward_ns, backward_ns) = both.unzip();
            durations.forward_ns.push(forward_ns);
            durations.backward_ns.push(backward_ns);
        }
        durations
    }

    /// No order of actions makes the step of these microbatches shorter, in nanoseconds: each pipeline rank does its work behind
    /// the forwards of some microbatch on the ranks before it, and before the backwards of some microbatch there.
    pub(crate) fn least_ns(&self, packed: &mut Packed) -> u64 {
        let of_replica = |replica| {
            let durations = self.durations(packed, replica);
            let (mut head_ns, mut longest_ns) = (0, 0);
            let pp = self.way.pp as usize;
            let sum =
                |of: &[Vec<u64>], rank: usize| -> u64 { of.iter().skip(rank).step_by(pp).flatten().sum() };
            for rank in 0..pp {
                let busy_ns = sum(&durations.forward_ns, rank) + sum(&durations.backward_ns, rank);
                longest_ns = longest_ns.max(head_ns + busy_ns);
                let least = |of: &[Vec<u64>]| of[rank].iter().min().copied().unwrap_or(0);
                let forward_ns = least(&durations.forward_ns);
                // Of a microbatch without samples nothing is sent.
                let sent_ns = if forward_ns > 0 { 2 * durations.transfer_ns } else { 0 };
                head_ns += forward_ns + least(&durations.backward_ns) + sent_ns;
            }
            longest_ns
        };
        (0..self.way.dp as usize).map(of_replica).max().unwrap_or(0).saturating_add(self.tail_ns)
    }

    /// The step of a global batch and the mean idle time of its ranks, in nanoseconds; `None` if the stages cannot be interleaved.
    pub(crate) fn step_ns(&self, packed: &mut Packed) -> Option<(u64, u64)> {
        let (mut longest_ns, mut busy_ns) = (0, 0);
        for replica in 0..self.way.dp as usize {
            let durations = self.durations(packed, replica);
            busy_ns += durations.forward_ns.iter().chain(&durations.backward_ns).flatten().sum::<u64>();
            longest_ns = simulate_interleaved(&durations, self.way.pp).ok()?.makespan_ns.max(longest_ns);
        }
        let idle_ns = longest_ns.saturating_sub(busy_ns / u64::from(self.way.dp * self.way.pp));
        Some((longest_ns + self.tail_ns, idle_ns))
    }

    /// Whether the fullest rank of each pipeline fits the memory budget. That is the first rank, which also holds the encoder, or
    /// the last one. `None` if the stages cannot be interleaved.
    pub(crate) fn fits(&self, packed: &Packed) -> Option<bool> {
        let Some(budget_bytes) = self.input.memory_budget_bytes() else { return Some(true) };
        let (pp, last, sharding) = (self.way.pp as usize, self.way.pp - 1, self.way.sharding());
        let ends = [self.way.actions(0)?, self.way.actions(last)?];
        // The encoder runs with the first chunk.
        let mut with_encoder = ends[0].clone();
        with_encoder.retain(|action| action.stage == StageIndex(0));
        for replica in 0..self.way.dp as usize {
            let own: Vec<RankMicrobatch> =
                self.way.own(replica).map(|at| packed.microbatches()[at].clone()).collect();
            let of_rank = |rank: u32, actions: &[Action]| {
                let role = RankRole::Stage(held(&self.stages, self.way.pp, rank));
                let openings = &openings_ahead(actions.len());
                let steps =
                    RankSteps { role, microbatches: &own, actions, openings, copies_rows: false, sharding };
                let chunks: Vec<StageLayers> =
                    self.stages.iter().copied().skip(rank as usize).step_by(pp).collect();
                self.model.interleaved_peak(&steps, &chunks, |stage| stage.index() / pp).ok()
            };
            let openings = &openings_ahead(with_encoder.len());
            let steps = RankSteps {
                role: RankRole::Encoder,
                microbatches: &own,
                actions: &with_encoder,
                openings,
                copies_rows: false,
                sharding,
            };
            let encoder = self.model.rank_peak(&steps).ok()?;
            let first = of_rank(0, &ends[0])?;
            // Encoder and first stage are on one device, which has its context only once.
            let first_bytes =
                (encoder.total_bytes() + first.total_bytes()).saturating_sub(encoder.context_bytes);
            if first_bytes.max(of_rank(last, &ends[1])?.total_bytes()) > budget_bytes {
                return Some(false);
            }
        }
        Some(true)
    }
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
