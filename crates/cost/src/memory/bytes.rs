//! What a rank holds and does, by name.

use crate::sharding::Sharding;
use crate::stage::{EncoderLayers, StageLayers};
use dflop_types::{Action, MicrobatchShape, PipelineOrder, StageIndex};
use thiserror::Error;

/// When a rank is fullest.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Moment {
    /// While it runs this action.
    Action(Action),
    /// While the optimizer updates the parameters, after the last action.
    #[default]
    Optimizer,
}

impl std::fmt::Display for Moment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Action(action) => action.fmt(f),
            Self::Optimizer => f.write_str("optimizer"),
        }
    }
}

/// Predicted bytes of one rank at its fullest moment, by what they hold.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RankMemory {
    /// Parameters that the rank keeps, in the dtype of the profile.
    pub parameter_bytes: u64,
    /// Gradients of the parameters that train, in the dtype of the profile.
    pub gradient_bytes: u64,
    /// `AdamW` states: two moments in fp32, and an fp32 master copy where the parameters are bfloat16.
    pub optimizer_bytes: u64,
    /// Parameters and gradients of the layers that run, which are whole for a while where parameters are cut (zero 3).
    pub gathered_bytes: u64,
    /// What the forwards in flight keep for their backwards, without what the head keeps.
    pub activation_bytes: u64,
    /// What the head keeps: logits and what the loss needs of them.
    pub logits_bytes: u64,
    /// What the action that runs at that moment needs while it runs.
    pub workspace_bytes: u64,
    /// Open, received and sent messages; results at the rank's border, and one gradient of such a result.
    pub boundary_bytes: u64,
    /// Inputs and output gradients between I and W.
    pub weight_queue_bytes: u64,
    /// What the allocator holds above the tensors.
    pub allocator_bytes: u64,
    /// The device's context and libraries.
    pub context_bytes: u64,
    /// When the rank is fullest.
    pub moment: Moment,
    /// Whether a curve was asked outside its measured range.
    pub is_extrapolated: bool,
}

impl RankMemory {
    /// The bytes by what they are for, in the order in which people see them.
    pub const fn by_use(&self) -> [(&'static str, u64); 11] {
        [
            ("parameters", self.parameter_bytes),
            ("gradients", self.gradient_bytes),
            ("optimizer", self.optimizer_bytes),
            ("gathered", self.gathered_bytes),
            ("activations", self.activation_bytes),
            ("logits", self.logits_bytes),
            ("workspace", self.workspace_bytes),
            ("boundary", self.boundary_bytes),
            ("weight queue", self.weight_queue_bytes),
            ("allocator", self.allocator_bytes),
            ("context", self.context_bytes),
        ]
    }

    /// All of it, in bytes.
    pub fn total_bytes(&self) -> u64 {
        self.by_use().iter().fold(0, |sum, of_use| sum.saturating_add(of_use.1))
    }

    /// What tensors take: all but the allocator's overhead and the device's context, in bytes.
    pub fn tensor_bytes(&self) -> u64 {
        self.total_bytes().saturating_sub(self.allocator_bytes).saturating_sub(self.context_bytes)
    }

    /// What the rank holds independently of the samples, in bytes: parameters, gradients, optimizer states, what is gathered
    /// of them while layers run, context.
    pub const fn static_bytes(&self) -> u64 {
        self.parameter_bytes
            .saturating_add(self.gradient_bytes)
            .saturating_add(self.optimizer_bytes)
            .saturating_add(self.gathered_bytes)
            .saturating_add(self.context_bytes)
    }
}

/// One microbatch as one rank sees it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RankMicrobatch {
    /// What the rank computes.
    pub shape: MicrobatchShape,
    /// Feature tokens that pass the boundary.
    pub feature_tokens: u64,
}

/// What a rank holds of the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RankRole {
    /// The encoder with its projector.
    Encoder,
    /// A stage of the encoder.
    EncoderStage(EncoderLayers),
    /// A stage of the LLM backbone.
    Stage(StageLayers),
}

impl RankRole {
    /// Whether it belongs to the encoder.
    pub const fn is_encoder(&self) -> bool {
        matches!(self, Self::Encoder | Self::EncoderStage(_))
    }
}

/// One rank's work in a step.
#[derive(Debug, Clone, Copy)]
pub struct RankSteps<'a> {
    /// What it holds.
    pub role: RankRole,
    /// Its microbatches, by number; a microbatch without a sample of this rank is empty.
    pub microbatches: &'a [RankMicrobatch],
    /// Its actions, in order.
    pub actions: &'a [Action],
    /// For each action, how many actions come before its first receive opens; at most as many as come before the action. Where this
    /// list is too short, a receive opens just before its action.
    pub openings: &'a [u32],
    /// Whether the rows of a message are gathered from the rows of the rank, and scattered into them. This is the
    /// case where a component has several replicas.
    pub copies_rows: bool,
    /// What of its component the rank keeps only a part of.
    pub sharding: Sharding,
}

/// A rank that holds several runs of layers, and its work in a step of equal microbatches.
#[derive(Debug, Clone, Copy)]
pub struct RankChunks<'a> {
    /// Its runs of layers, in the order of the forward.
    pub chunks: &'a [StageLayers],
    /// All of them as one.
    pub whole: StageLayers,
    /// Ranks that the stages are dealt round over, at least 1: chunk c of a rank is stage c x `num_ranks` + rank.
    pub num_ranks: u32,
    /// Each of its microbatches.
    pub microbatch: &'a RankMicrobatch,
    /// How many there are.
    pub num_microbatches: u32,
    /// Its actions, in order.
    pub actions: &'a [Action],
    /// Number of ranks that its optimizer states are cut over, at least 1.
    pub sharding_degree: u32,
}

/// Openings of `num_actions` actions as they are assumed of Megatron-LM, by [`RankSteps::openings`]: the receives of an
/// action open three actions before it.
pub fn openings_ahead(num_actions: usize) -> Vec<u32> {
    (0..num_actions as u32).map(|at| at.saturating_sub(3)).collect()
}

/// An action list that cannot be run.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum MemoryError {
    /// A microbatch that the step does not have.
    #[error("action `{action}`: the step has {num_microbatches} microbatches, counted from 0")]
    UnknownMicrobatch {
        /// The action.
        action: Action,
        /// Microbatches of the step.
        num_microbatches: usize,
    },
    /// A backward before its forward, or an action twice.
    #[error("action `{action}`: out of turn, a microbatch has one F, then one B or one I and W")]
    OutOfTurn {
        /// The action.
        action: Action,
    },
}

/// Microbatches whose forward has run and whose backward has not, at the peak of `stage`.
///
/// ```text
/// 1F1B, data-aware:  min(M, p - s)      GPipe:  M      zero-bubble:  min(M, p), up to the W
/// ```
///
/// This is of one stage a rank; interleaved 1F1B is counted as 1F1B. Of ranks that hold several chunks the lists say it.
///
/// # Panics
/// If `stage` is not one of the stages.
pub fn microbatches_in_flight(
    order: PipelineOrder,
    stage: StageIndex,
    num_stages: u32,
    num_microbatches: u32,
) -> u32 {
    assert!(stage.0 < num_stages, "a stage is one of the stages");
    match order {
        PipelineOrder::GPipe => num_microbatches,
        PipelineOrder::ZeroBubble => num_microbatches.min(num_stages),
        PipelineOrder::OneFOneB | PipelineOrder::Interleaved | PipelineOrder::DataAware => {
            num_microbatches.min(num_stages - stage.0)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn in_flight_follows_the_order() {
        let at = |order, stage| microbatches_in_flight(order, StageIndex(stage), 3, 8);
        assert_eq!([0, 1, 2].map(|s| at(PipelineOrder::OneFOneB, s)), [3, 2, 1]);
        assert_eq!([0, 1, 2].map(|s| at(PipelineOrder::GPipe, s)), [8, 8, 8]);
        assert_eq!([0, 1, 2].map(|s| at(PipelineOrder::ZeroBubble, s)), [3, 3, 3]);
        assert_eq!(microbatches_in_flight(PipelineOrder::OneFOneB, StageIndex(0), 4, 2), 2);
    }
}
