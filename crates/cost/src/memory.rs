//! The memory model: the predicted peak of a rank, part by part. The planner and the scheduler ask the same
//! functions.

use crate::cost::{CostModel, StageLayers, samples_of, segments_of};
use crate::error::CostError;
use dflop_types::{MicrobatchShape, PipelineOrder, StageIndex};

/// Predicted peak bytes of one rank, by what they hold.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RankMemory {
    /// Parameters, in the dtype of the profile.
    pub parameter_bytes: u64,
    /// Gradients, in the dtype of the profile.
    pub gradient_bytes: u64,
    /// `AdamW` states: two moments in fp32, and an fp32 master copy where the parameters are bfloat16.
    pub optimizer_bytes: u64,
    /// What the forwards in flight keep for their backwards; logits and loss buffers are in the head's.
    pub activation_bytes: u64,
    /// Features and hidden states in flight at the stage's borders, and one gradient of each.
    pub boundary_bytes: u64,
}

impl RankMemory {
    /// The parts by name, in the order in which people see them.
    pub const fn parts(&self) -> [(&'static str, u64); 5] {
        [
            ("parameters", self.parameter_bytes),
            ("gradients", self.gradient_bytes),
            ("optimizer", self.optimizer_bytes),
            ("activations", self.activation_bytes),
            ("boundary", self.boundary_bytes),
        ]
    }

    /// All parts together, in bytes.
    pub fn total_bytes(&self) -> u64 {
        self.parts().iter().fold(0, |sum, part| sum.saturating_add(part.1))
    }

    /// What the rank holds whatever the samples: parameters, gradients, optimizer states, in bytes.
    pub const fn static_bytes(&self) -> u64 {
        self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes
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

/// Microbatches whose forward has run and whose backward has not, at the peak of `stage`.
///
/// ```text
/// 1F1B:  min(M, p - s)      GPipe:  M
/// ```
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
        PipelineOrder::OneFOneB => num_microbatches.min(num_stages - stage.0),
    }
}

/// Bytes of `AdamW` states a parameter: two fp32 moments, and an fp32 master copy beside bfloat16 parameters.
pub(crate) fn optimizer_bytes_per_parameter(dtype: &str) -> Result<u64, CostError> {
    match dtype {
        "float32" => Ok(8),
        "bfloat16" => Ok(12),
        _ => Err(CostError::Dtype { dtype: dtype.to_owned() }),
    }
}

/// Largest sum of `width` consecutive entries: the order of microbatches is fixed, so those in flight follow
/// each other.
fn window_max(bytes: impl Iterator<Item = u64>, width: u32) -> u64 {
    let bytes: Vec<u64> = bytes.collect();
    let width = (width as usize).clamp(1, bytes.len().max(1));
    bytes
        .windows(width)
        .map(|window| window.iter().fold(0u64, |sum, &b| sum.saturating_add(b)))
        .max()
        .unwrap_or(0)
}

impl CostModel {
    fn rank_memory(&self, num_parameters: u64, parameter_bytes: u64) -> RankMemory {
        RankMemory {
            parameter_bytes,
            gradient_bytes: parameter_bytes,
            optimizer_bytes: num_parameters * self.optimizer_bytes_per_parameter,
            ..RankMemory::default()
        }
    }

    fn boundary_bytes(&self, tokens: &[u64], in_flight: u32) -> u64 {
        let held = window_max(tokens.iter().copied(), in_flight);
        let gradient = tokens.iter().copied().max().unwrap_or(0);
        held.saturating_add(gradient).saturating_mul(self.hidden_bytes)
    }

    /// Bytes that the encoder keeps for the backward of one microbatch.
    pub fn encoder_activation_bytes(&self, microbatch: &MicrobatchShape) -> u64 {
        self.over_encoder(|module| {
            module.activation_bytes(microbatch.encoder_tokens(), segments_of(&microbatch.encoder_segments))
        })
    }

    /// Bytes that a stage of the LLM backbone keeps for the backward of one microbatch.
    pub fn stage_activation_bytes(&self, microbatch: &MicrobatchShape, stage: StageLayers) -> u64 {
        let total = microbatch.total_llm_tokens();
        let mut sum = self
            .layer
            .activation_bytes(total, samples_of(&microbatch.llm_tokens))
            .saturating_mul(u64::from(stage.num_layers));
        if stage.is_first {
            sum = sum.saturating_add(self.embedding.activation_bytes(total, std::iter::empty()));
        }
        if stage.is_last {
            let labels = microbatch.label_tokens;
            sum = sum.saturating_add(self.head.activation_bytes(labels, std::iter::empty()));
        }
        sum
    }

    /// Predicted peak of an encoder rank that runs `microbatches` in this order, `in_flight` of them at once.
    ///
    /// *Not modelled*: the allocator's reserve and fragmentation, the context of the device, buffers of the
    /// reduction.
    pub fn encoder_memory(&self, microbatches: &[RankMicrobatch], in_flight: u32) -> RankMemory {
        let features: Vec<u64> = microbatches.iter().map(|m| m.feature_tokens).collect();
        RankMemory {
            activation_bytes: window_max(
                microbatches.iter().map(|m| self.encoder_activation_bytes(&m.shape)),
                in_flight,
            ),
            boundary_bytes: self.boundary_bytes(&features, in_flight),
            ..self.rank_memory(
                self.over_encoder(|module| module.num_parameters),
                self.over_encoder(|module| module.parameter_bytes),
            )
        }
    }

    /// Predicted peak of a rank of one stage of the LLM backbone that runs `microbatches` in this order,
    /// `in_flight` of them at once.
    ///
    /// *Not modelled*: as for [`CostModel::encoder_memory`].
    pub fn stage_memory(
        &self,
        microbatches: &[RankMicrobatch],
        stage: StageLayers,
        in_flight: u32,
    ) -> RankMemory {
        let border = |m: &RankMicrobatch| {
            let hidden = m.shape.total_llm_tokens();
            let incoming = if stage.is_first { m.feature_tokens } else { hidden };
            incoming + if stage.is_last { 0 } else { hidden }
        };
        let borders: Vec<u64> = microbatches.iter().map(border).collect();
        let (num_parameters, parameter_bytes) = self.stage_parameters(stage);
        RankMemory {
            activation_bytes: window_max(
                microbatches.iter().map(|m| self.stage_activation_bytes(&m.shape, stage)),
                in_flight,
            ),
            boundary_bytes: self.boundary_bytes(&borders, in_flight),
            ..self.rank_memory(num_parameters, parameter_bytes)
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
        assert_eq!(microbatches_in_flight(PipelineOrder::OneFOneB, StageIndex(0), 4, 2), 2);
    }

    #[test]
    fn the_fullest_window_is_found() {
        let window = |bytes: &[u64], width| window_max(bytes.iter().copied(), width);
        assert_eq!(window(&[5, 1, 4, 4, 1], 2), 8);
        assert_eq!(window(&[5, 1], 9), 6);
        assert_eq!(window(&[], 3), 0);
    }
}
