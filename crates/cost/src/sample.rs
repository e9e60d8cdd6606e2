//! The cost of one sample: what it adds to a microbatch of the usual size, in time and in bytes.

use crate::cost::CostModel;
use crate::stage::{EncoderLayers, StageLayers, segments_of};
use dflop_types::{SampleShape, TowerTokens};

/// The size of a microbatch on one replica around which the cost of a single sample is read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Typical {
    /// Encoder tokens of one encoder replica's share of a microbatch.
    pub encoder_tokens: TowerTokens,
    /// LLM tokens of a microbatch on one LLM replica.
    pub llm_tokens: u64,
    /// Label tokens of a microbatch on one LLM replica.
    pub label_tokens: u64,
}

impl CostModel {
    /// Forward and backward time that one sample adds to a microbatch of about `typical` size, in
    /// nanoseconds, on the encoder and on the whole LLM backbone.
    ///
    /// Additive, as a scheduler needs it: the linear part by its slope around `typical` (the launch floor is
    /// paid by the microbatch, not by the sample), the attention as it is.
    pub fn sample_cost(&self, sample: &SampleShape, typical: Typical) -> (u64, u64) {
        (self.sample_encoder_ns(sample, typical), self.sample_stage_ns(sample, typical, self.whole_stage()))
    }

    /// Forward and backward time that one sample adds on the encoder, in nanoseconds; 0 for a text-only
    /// sample.
    pub fn sample_encoder_ns(&self, sample: &SampleShape, typical: Typical) -> u64 {
        self.sample_encoder_stage_ns(sample, typical, self.whole_encoder())
    }

    /// As [`CostModel::sample_encoder_ns`], on one stage.
    pub fn sample_encoder_stage_ns(
        &self,
        sample: &SampleShape,
        typical: Typical,
        stage: EncoderLayers,
    ) -> u64 {
        let tokens = sample.tower_tokens();
        self.over_encoder_stage(stage, |module| {
            let tower = module.tower;
            module
                .marginal_ns(tokens[tower.index()], typical.encoder_tokens[tower.index()])
                .saturating_add(module.attention_ns(segments_of(&sample.encoder_segments, tower)))
        })
    }

    /// Forward and backward time that one sample adds on one stage of the LLM backbone, in nanoseconds.
    pub fn sample_stage_ns(&self, sample: &SampleShape, typical: Typical, stage: StageLayers) -> u64 {
        let tokens = u64::from(sample.llm_tokens);
        let mut sum: u64 = 0;
        for (layer, count) in self.layers_of(stage.num_layers) {
            let linear_ns = layer.marginal_ns(tokens, typical.llm_tokens);
            let of_one = linear_ns.saturating_add(layer.attention_ns(std::iter::once((1, tokens))));
            sum = sum.saturating_add(of_one.saturating_mul(count));
        }
        if stage.is_first {
            sum = sum.saturating_add(self.embedding.marginal_ns(tokens, typical.llm_tokens));
        }
        if stage.is_last {
            let labels = u64::from(sample.label_tokens);
            sum = sum.saturating_add(self.head.marginal_ns(labels, typical.label_tokens));
        }
        sum
    }

    /// Activation and boundary bytes that one sample adds on the encoder while its microbatch is in flight.
    pub fn sample_encoder_bytes(&self, sample: &SampleShape, typical: Typical) -> u64 {
        self.sample_encoder_stage_bytes(sample, typical, self.whole_encoder())
    }

    /// As [`CostModel::sample_encoder_bytes`], on one stage.
    pub fn sample_encoder_stage_bytes(
        &self,
        sample: &SampleShape,
        typical: Typical,
        stage: EncoderLayers,
    ) -> u64 {
        let tokens = sample.tower_tokens();
        let kept = self.over_encoder_stage(stage, |module| {
            let tower = module.tower;
            let attention = module.attention_bytes(segments_of(&sample.encoder_segments, tower));
            let linear = module.marginal_bytes(tokens[tower.index()], typical.encoder_tokens[tower.index()]);
            linear.saturating_add(attention)
        });
        let hidden = sample.encoder_tokens().saturating_mul(self.encoder_hidden_bytes);
        let incoming = if stage.is_first { 0 } else { hidden };
        let features = u64::from(sample.feature_tokens).saturating_mul(self.feature_bytes);
        let outgoing = if stage.is_last { features } else { hidden };
        kept.saturating_add(incoming).saturating_add(outgoing)
    }

    /// Activation and boundary bytes that one sample adds on a stage of the LLM backbone while its microbatch
    /// is in flight.
    pub fn sample_stage_bytes(&self, sample: &SampleShape, typical: Typical, stage: StageLayers) -> u64 {
        let tokens = u64::from(sample.llm_tokens);
        let mut sum: u64 = 0;
        for (layer, count) in self.layers_of(stage.num_layers) {
            let linear = layer.marginal_bytes(tokens, typical.llm_tokens);
            let of_one = linear + layer.attention_bytes(std::iter::once((1, tokens)));
            sum = sum.saturating_add(of_one.saturating_mul(count));
        }
        let rows = self.llm_rows(tokens);
        let hidden = rows.saturating_mul(self.hidden_bytes);
        let features = u64::from(sample.feature_tokens).saturating_mul(self.feature_bytes);
        let incoming = if stage.is_first { features } else { hidden };
        let outgoing = if stage.is_last { 0 } else { hidden };
        if stage.is_first {
            sum += self.embedding.marginal_bytes(tokens, typical.llm_tokens);
        }
        if stage.is_last {
            let labels = u64::from(sample.label_tokens);
            sum += self.head.marginal_bytes(labels, typical.label_tokens);
        }
        sum.saturating_add(incoming).saturating_add(outgoing)
    }
}
