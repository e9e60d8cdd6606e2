//! The memory model: the predicted peak of a rank over one step, part by part. The planner and the scheduler ask
//! the same function.
//!
//! ```text
//! peak = parameters + gradients + optimizer states          what the rank holds whatever the samples
//!      + max over actions of (activations + logits + weight queue + boundary + workspace)
//!      + allocator overhead + device context
//! ```
//!
//! The maximum runs over the rank's own action list: microbatches differ in size, and the fullest moment need
//! not be the one with most of them in flight.

pub(crate) mod footprint;
pub(crate) mod holding;
mod parts;
mod rank;
mod walk;

use crate::cost::CostModel;
use dflop_types::MicrobatchShape;
pub use parts::{
    MemoryError, Moment, RankMemory, RankMicrobatch, RankPart, RankSteps, microbatches_in_flight,
};

impl CostModel {
    /// Bytes that one microbatch keeps on a rank from its forward to its backward, borders apart.
    pub fn activation_bytes(&self, part: RankPart, microbatch: &MicrobatchShape) -> u64 {
        let microbatch = RankMicrobatch { shape: microbatch.clone(), feature_tokens: 0 };
        let bytes = self.microbatch_bytes(part, &microbatch).0;
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
        let mut is_extrapolated = false;
        let microbatches: Vec<walk::MicrobatchBytes> = steps
            .microbatches
            .iter()
            .map(|microbatch| {
                let (bytes, outside) = self.microbatch_bytes(steps.part, microbatch);
                is_extrapolated |= outside;
                bytes
            })
            .collect();
        let buffers = self.holding.buffers(steps.copies_rows);
        let (load, moment) = walk::fullest(&microbatches, steps.actions, buffers)?;
        let mut memory = self.fixed_memory(steps.part, steps.sharding_degree);
        memory.is_extrapolated = is_extrapolated;
        if load.total() > memory.workspace_bytes {
            memory.activation_bytes = load.activations;
            memory.logits_bytes = load.logits;
            memory.workspace_bytes = load.workspace;
            memory.boundary_bytes = load.boundary;
            memory.weight_queue_bytes = load.queue;
            memory.moment = moment;
        }
        memory.allocator_bytes = self.holding.allocator_bytes(memory.tensor_bytes());
        Ok(memory)
    }
}
