//! The memory model: the predicted peak of a rank over one step, part by part. The planner and the scheduler ask
//! the same function.
//!
//! ```text
//! peak = parameters + gradients + optimizer states + gathered   what the rank holds whatever the samples
//!      + max over actions of (activations + logits + weight queue + boundary + workspace)
//!      + allocator overhead + device context
//! ```
//!
//! The maximum runs over the rank's own action list: microbatches differ in size, and the fullest moment need
//! not be the one with most of them in flight.

mod bytes;
pub(crate) mod footprint;
pub(crate) mod holding;
mod rank;
mod walk;

use crate::cost::CostModel;
use crate::sharding::ColocatedSharding;
use crate::stage::StageLayers;
pub use bytes::{
    MemoryError, Moment, RankChunks, RankMemory, RankMicrobatch, RankRole, RankSteps, microbatches_in_flight,
    openings_ahead,
};
use dflop_types::{Action, ActionKind, MicrobatchShape, StageIndex};
use walk::Gathered;

/// What a colocated rank holds independently of the samples.
#[derive(Debug, Clone, Copy)]
pub struct ColocatedMemory {
    /// Of both components.
    fixed: RankMemory,
    /// What the LLM backbone gathers.
    gathered: Gathered,
}

impl ColocatedMemory {
    /// Of what the encoder and the LLM backbone hold. They run one after the other, so what they gather is not there at the
    /// same time.
    fn of([encoder, llm]: [RankMemory; 2], gathered: Gathered) -> Self {
        let fixed = RankMemory {
            parameter_bytes: encoder.parameter_bytes.saturating_add(llm.parameter_bytes),
            gradient_bytes: encoder.gradient_bytes.saturating_add(llm.gradient_bytes),
            optimizer_bytes: encoder.optimizer_bytes.saturating_add(llm.optimizer_bytes),
            gathered_bytes: encoder.gathered_bytes.max(llm.gathered_bytes),
            workspace_bytes: encoder.workspace_bytes.saturating_add(llm.workspace_bytes),
            // One device, one context.
            ..llm
        };
        Self { fixed, gathered }
    }
}

impl CostModel {
    /// Bytes that one microbatch keeps on a rank from its forward to its backward, borders apart.
    pub fn activation_bytes(&self, role: RankRole, microbatch: &MicrobatchShape) -> u64 {
        let microbatch = RankMicrobatch { shape: microbatch.clone(), feature_tokens: 0 };
        let bytes = self.microbatch_bytes(role, &microbatch).0;
        bytes.pieces.iter().fold(0, |sum, piece| sum.saturating_add(piece.kept))
    }

    /// Predicted peak of a rank over a step.
    ///
    /// *Complexity*: O(a + m s log n) for a actions and m microbatches of s samples, n measured points.
    ///
    /// *Not modelled*: fragmentation beyond the reserve of the profile, scratch memory of the communication library,
    /// inputs that wait on the host.
    ///
    /// # Errors
    /// [`MemoryError`] for actions that cannot be run in this order.
    pub fn rank_peak(&self, steps: &RankSteps<'_>) -> Result<RankMemory, MemoryError> {
        let (fullest, is_extrapolated) = self.fullest_of(steps)?;
        let fixed = self.sharded_memory(steps.role, steps.sharding);
        Ok(self.at_fullest(RankMemory { is_extrapolated, ..fixed }, fullest))
    }

    /// Bytes that the microbatches add at the fullest moment of the actions to what the rank holds whatever the samples, the
    /// allocator's overhead on them included. Unlike in [`CostModel::rank_peak`], it does not matter whether the optimizer
    /// needs more after them. So the bytes of several microbatches, each alone, add up to at least what they take together,
    /// open messages apart.
    ///
    /// # Errors
    /// [`MemoryError`] for actions that cannot be run in this order.
    pub fn added_bytes(&self, steps: &RankSteps<'_>) -> Result<u64, MemoryError> {
        let ((load, _), _) = self.fullest_of(steps)?;
        Ok(load.total().saturating_add(self.holding.allocator_bytes(load.total())))
    }

    /// The fullest moment of a rank with one run of layers, and whether a curve was asked outside its measured range.
    fn fullest_of(&self, steps: &RankSteps<'_>) -> Result<((walk::Load, Moment), bool), MemoryError> {
        let mut is_extrapolated = false;
        let gathered = self.gathered(steps.role, steps.sharding);
        let microbatches: Vec<walk::MicrobatchBytes> = steps
            .microbatches
            .iter()
            .map(|microbatch| {
                let (mut bytes, outside) = self.microbatch_bytes(steps.role, microbatch);
                bytes.gather(gathered, gathered.layers);
                is_extrapolated |= outside;
                bytes
            })
            .collect();
        let buffers = self.holding.buffers(steps.copies_rows);
        let fullest = walk::fullest(&microbatches, steps.actions, steps.openings, buffers)?;
        Ok((fullest, is_extrapolated))
    }

    /// As [`CostModel::rank_peak`], of a rank that holds several runs of layers: `steps.role` is all of them as one,
    /// `chunks` are the runs in the order of the forward, and `chunk_of` is the run that a stage of its actions is.
    ///
    /// *Complexity*: O(a + c m s log n) for a actions, c chunks, m microbatches of s samples, n measured points.
    ///
    /// # Errors
    /// [`MemoryError`] for actions that cannot be run in this order.
    ///
    /// # Panics
    /// If `chunk_of` names a chunk that is not there.
    pub fn interleaved_peak(
        &self,
        steps: &RankSteps<'_>,
        chunks: &[StageLayers],
        chunk_of: impl Fn(StageIndex) -> usize,
    ) -> Result<RankMemory, MemoryError> {
        let mut is_extrapolated = false;
        let held = self.gathered(steps.role, steps.sharding).layers;
        let mut of_chunks = Vec::with_capacity(chunks.len() * steps.microbatches.len());
        for &chunk in chunks {
            let gathered = self.gathered(RankRole::Stage(chunk), steps.sharding);
            for microbatch in steps.microbatches {
                let (mut bytes, outside) = self.microbatch_bytes(RankRole::Stage(chunk), microbatch);
                bytes.gather(gathered, held);
                is_extrapolated |= outside;
                of_chunks.push(bytes);
            }
        }
        let m = steps.microbatches.len() as u32;
        let number = |action: &Action| chunk_of(action.stage) as u32 * m + action.microbatch;
        let buffers = self.holding.buffers(steps.copies_rows);
        let fullest = Self::fullest_of_chunks(&of_chunks, steps.actions, steps.openings, number, buffers)?;
        let fixed = self.sharded_memory(steps.role, steps.sharding);
        Ok(self.at_fullest(RankMemory { is_extrapolated, ..fixed }, fullest))
    }

    /// The fullest moment of a rank whose chunks' microbatches have numbers of their own, `number` of an action.
    fn fullest_of_chunks(
        microbatches: &[walk::MicrobatchBytes],
        actions: &[Action],
        openings: &[u32],
        number: impl Fn(&Action) -> u32,
        buffers: holding::Buffers,
    ) -> Result<(walk::Load, Moment), MemoryError> {
        let numbered: Vec<Action> =
            actions.iter().map(|action| Action { microbatch: number(action), ..*action }).collect();
        let (load, moment) = walk::fullest(microbatches, &numbered, openings, buffers)?;
        let named = |found: Action| actions[numbered.iter().position(|&a| a == found).unwrap_or(0)];
        let moment = match moment {
            Moment::Action(found) => Moment::Action(named(found)),
            Moment::Optimizer => Moment::Optimizer,
        };
        Ok((load, moment))
    }

    /// Predicted peak of a rank that holds the whole model and runs one microbatch after the other, each forward and
    /// then backward. `microbatch` is the largest of them. Its optimizer states are cut over `sharding_degree` ranks,
    /// as in [`CostModel::fixed_memory`].
    ///
    /// *Complexity*: O(s log n) for s samples and n measured points.
    ///
    /// *Not modelled*: buckets of gradients that the reduction copies; the rest as in [`CostModel::rank_peak`].
    pub fn whole_peak(&self, microbatch: &RankMicrobatch, sharding_degree: u32) -> RankMemory {
        let fixed = [RankRole::Encoder, RankRole::Stage(self.whole_stage())]
            .map(|role| self.fixed_memory(role, sharding_degree));
        self.peak_of_both(microbatch, microbatch, ColocatedMemory::of(fixed, Gathered::default()), 0)
    }

    /// Predicted peak of a colocated rank during one microbatch: of what it encodes, and of what its LLM backbone reads.
    /// Where the two are not of the same samples, `is_exchanged`, features and their gradients are sent and received. `fixed` is
    /// [`CostModel::colocated_memory`].
    ///
    /// *Complexity*: O(s log n) for s samples and n measured points.
    ///
    /// *Not modelled*: as [`CostModel::whole_peak`].
    pub fn colocated_peak(
        &self,
        encoder: &RankMicrobatch,
        llm: &RankMicrobatch,
        fixed: ColocatedMemory,
        is_exchanged: bool,
    ) -> RankMemory {
        let messages = encoder.feature_tokens.saturating_add(llm.feature_tokens);
        let message_bytes = if is_exchanged { messages.saturating_mul(self.feature_bytes) } else { 0 };
        self.peak_of_both(encoder, llm, fixed, message_bytes)
    }

    /// What a colocated rank holds independently of the samples.
    pub fn colocated_memory(&self, sharding: impl Into<ColocatedSharding>) -> ColocatedMemory {
        let (sharding, llm) = (sharding.into(), RankRole::Stage(self.whole_stage()));
        let fixed = [(RankRole::Encoder, sharding.encoder), (llm, sharding.llm)]
            .map(|(role, sharding)| self.sharded_memory(role, sharding));
        ColocatedMemory::of(fixed, self.gathered(llm, sharding.llm))
    }

    /// What a colocated rank holds independently of the samples, in bytes.
    pub fn colocated_static_bytes(&self, sharding: impl Into<ColocatedSharding>) -> u64 {
        self.colocated_memory(sharding).fixed.static_bytes()
    }

    fn peak_of_both(
        &self,
        encoder: &RankMicrobatch,
        llm: &RankMicrobatch,
        ColocatedMemory { fixed, gathered }: ColocatedMemory,
        message_bytes: u64,
    ) -> RankMemory {
        let (encoder, outside_encoder) = self.microbatch_bytes(RankRole::Encoder, encoder);
        let (mut bytes, outside) = self.microbatch_bytes(RankRole::Stage(self.whole_stage()), llm);
        bytes.gather(gathered, fixed.gathered_bytes);
        bytes.pieces.splice(0..0, encoder.pieces);
        // Features pass from module to module; only those of other ranks' samples are messages.
        bytes.incoming = message_bytes;
        let actions =
            [ActionKind::F, ActionKind::B].map(|kind| Action { stage: StageIndex(0), kind, microbatch: 0 });
        let fullest = walk::fullest(&[bytes], &actions, &[], self.holding.buffers(false))
            .unwrap_or_else(|error| unreachable!("one microbatch goes forward and back: {error}"));
        self.at_fullest(RankMemory { is_extrapolated: outside_encoder || outside, ..fixed }, fullest)
    }

    /// Predicted peak of a rank of a pipeline that holds the runs of layers `chunks`, dealt round over `num_ranks` ranks
    /// (one chunk: not interleaved), and passes equal microbatches as Megatron does: what was sent is not held.
    ///
    /// *Complexity*: O(a + c s log n) for a actions, c chunks, s samples of a microbatch and n measured points.
    ///
    /// # Errors
    /// [`MemoryError`] for actions that cannot be run in this order.
    pub fn chunks_peak(&self, rank: &RankChunks<'_>) -> Result<RankMemory, MemoryError> {
        let mut is_extrapolated = false;
        let of_chunk = |chunk: &StageLayers| {
            let (mut bytes, outside) = self.microbatch_bytes(RankRole::Stage(*chunk), rank.microbatch);
            is_extrapolated |= outside;
            // Megatron frees a result as soon as it has left.
            bytes.outgoing = 0;
            std::iter::repeat_n(bytes, rank.num_microbatches as usize)
        };
        let microbatches: Vec<_> = rank.chunks.iter().flat_map(of_chunk).collect();
        let number = |action: &Action| {
            action.stage.0 / rank.num_ranks.max(1) * rank.num_microbatches + action.microbatch
        };
        let openings = openings_ahead(rank.actions.len());
        let buffers = self.holding.buffers(false);
        let fullest = Self::fullest_of_chunks(&microbatches, rank.actions, &openings, number, buffers)?;
        let fixed = self.fixed_memory(RankRole::Stage(rank.whole), rank.sharding_degree);
        Ok(self.at_fullest(RankMemory { is_extrapolated, ..fixed }, fullest))
    }

    /// What a rank holds independently of the samples, plus what its fullest moment adds.
    fn at_fullest(&self, fixed: RankMemory, (load, moment): (walk::Load, Moment)) -> RankMemory {
        let mut memory = fixed;
        if load.total() > memory.workspace_bytes {
            memory.activation_bytes = load.activations;
            memory.logits_bytes = load.logits;
            memory.workspace_bytes = load.workspace;
            memory.boundary_bytes = load.boundary;
            memory.weight_queue_bytes = load.queue;
            memory.moment = moment;
        }
        memory.allocator_bytes = self.holding.allocator_bytes(memory.tensor_bytes());
        memory
    }
}
