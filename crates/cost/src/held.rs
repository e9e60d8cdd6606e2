//! What the replicas of a component hold of it by the cost model.

use crate::cost::CostModel;
use crate::dealt::Held;
use crate::stage::{EncoderLayers, StageLayers};

impl CostModel {
    pub(crate) fn held_by_encoder(&self, stage: EncoderLayers) -> Held {
        Held {
            num_trained: self.over_encoder_stage(stage, |module| module.num_trained_parameters),
            gradient_bytes: self.over_encoder_stage(stage, |module| module.gradient_bytes),
            parameter_bytes: self.over_encoder_stage(stage, |module| module.parameter_bytes),
        }
    }

    pub(crate) fn held_by_stage(&self, stage: StageLayers) -> Held {
        Held {
            num_trained: self.over_stage(stage, |module| module.num_trained_parameters),
            gradient_bytes: self.over_stage(stage, |module| module.gradient_bytes),
            parameter_bytes: self.over_stage(stage, |module| module.parameter_bytes),
        }
    }

    /// What the experts of a stage that are dealt out have of what replicas hold.
    pub(crate) fn held_by_experts(&self, stage: StageLayers) -> Held {
        Held {
            num_trained: self.over_stage(stage, |module| module.dealt.num_trained),
            gradient_bytes: self.over_stage(stage, |module| module.dealt.gradient_bytes),
            parameter_bytes: self.over_stage(stage, |module| module.dealt.parameter_bytes),
        }
    }
}
