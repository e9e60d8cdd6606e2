//! What a rank holds, by its part of the model: independently of the samples, and for one microbatch.

use crate::cost::CostModel;
use crate::memory::footprint::Bytes;
use crate::memory::parts::{RankMemory, RankMicrobatch, RankPart};
use crate::memory::walk::{MicrobatchBytes, Piece};
use crate::module::Module;
use crate::sharding::Sharding;
use crate::stage::{StageLayers, samples_of, segments_of};
use dflop_types::Zero;

/// Bytes of a token's id, position, target (64 bits each) and mask, which every stage gets.
const INPUT_BYTES: u64 = 25;

impl CostModel {
    /// The modules of the encoder in the order of the forward, with how many of each it has.
    pub(crate) fn encoder_modules(&self) -> Vec<(&Module, u64)> {
        let mut held: Vec<_> = self.encoder.iter().collect();
        held.sort_by_key(|(name, ..)| *name == "projector");
        held.into_iter().map(|(_, module, count)| (module, *count)).collect()
    }

    /// What a rank holds independently of the samples, with its optimizer states cut over `sharding_degree` ranks (at
    /// least 1; 1: not cut). Its workspace is the workspace of the optimizer.
    pub fn fixed_memory(&self, part: RankPart, sharding_degree: u32) -> RankMemory {
        let sharding_degree = u64::from(sharding_degree.max(1));
        let sum = |of_one: fn(&Module) -> u64| match part {
            RankPart::Encoder => self.over_encoder(of_one),
            RankPart::Stage(stage) => self.over_stage(stage, of_one),
        };
        let gradient_bytes = sum(|module| module.trained_bytes);
        let num_trained = sum(|module| module.num_trained_parameters);
        let states = num_trained.saturating_mul(self.holding.optimizer_bytes_per_parameter);
        RankMemory {
            parameter_bytes: sum(|module| module.parameter_bytes),
            gradient_bytes,
            optimizer_bytes: states.div_ceil(sharding_degree),
            // AdamW over all tensors at once: the denominators of the update.
            workspace_bytes: gradient_bytes.div_ceil(sharding_degree),
            context_bytes: self.holding.reserve.context_bytes,
            ..RankMemory::default()
        }
    }

    /// As [`CostModel::fixed_memory`], on a replica of `sharding` that takes `num_microbatches` in a step.
    ///
    /// ```text
    ///             parameters              gradients            optimizer states
    /// zero 0      P                       G                    S
    /// zero 1      P + P / n               G                    S / n
    /// zero 2      P + P / n               G / n + two units    S / n
    /// zero 3      P / n + two units       G / n + two units    S / n
    /// ```
    ///
    /// over n replicas. Ranks update their part of the parameters and gather the others, so the part exists beside the
    /// gathered ones; not where the fp32 master is that part. A unit is a layer, or what has as many bytes: the one
    /// that runs and the next are gathered, and the gradients of one are made while those of another are reduced.
    /// Under zero 2 the gradients of several microbatches add up before they are reduced, once a step: then G counts.
    pub fn sharded_memory(&self, part: RankPart, sharding: Sharding, num_microbatches: u32) -> RankMemory {
        let whole = self.fixed_memory(part, sharding.degree);
        if sharding.zero == Zero::Nothing || sharding.degree < 2 {
            return self.fixed_memory(part, 1);
        }
        let part_of = |bytes: u64| bytes.div_ceil(u64::from(sharding.degree));
        let units = |of_one: fn(&Module) -> u64| self.largest_unit(part, of_one).saturating_mul(2);
        let own_bytes = if self.holding.has_masters { 0 } else { part_of(whole.parameter_bytes) };
        let parameter_bytes = if sharding.zero == Zero::Parameters {
            let gathered = units(|module| module.parameter_bytes);
            part_of(whole.parameter_bytes).saturating_add(gathered).min(own_bytes + whole.parameter_bytes)
        } else {
            whole.parameter_bytes.saturating_add(own_bytes)
        };
        let adds_up = sharding.zero == Zero::Gradients && num_microbatches > 1;
        let gradient_bytes = if sharding.zero == Zero::States || adds_up {
            whole.gradient_bytes
        } else {
            let reduced = units(|module| module.trained_bytes);
            part_of(whole.gradient_bytes).saturating_add(reduced).min(whole.gradient_bytes)
        };
        RankMemory { parameter_bytes, gradient_bytes, ..whole }
    }

    /// Bytes of the module that has most of them on a rank of `part`.
    fn largest_unit(&self, part: RankPart, of_one: fn(&Module) -> u64) -> u64 {
        let largest = match part {
            RankPart::Encoder => self.encoder.iter().map(|(_, module, _)| of_one(module)).max(),
            RankPart::Stage(stage) => [
                (stage.is_first, &self.embedding),
                (stage.num_layers > 0, &self.layer),
                (stage.is_last, &self.head),
            ]
            .into_iter()
            .filter(|(is_held, _)| *is_held)
            .map(|(_, module)| of_one(module))
            .max(),
        };
        largest.unwrap_or(0)
    }

    /// The memory that a microbatch needs on a rank of `part`, and whether a curve was asked outside its measured
    /// range.
    pub(crate) fn microbatch_bytes(
        &self,
        part: RankPart,
        microbatch: &RankMicrobatch,
    ) -> (MicrobatchBytes, bool) {
        match part {
            RankPart::Encoder => self.encoder_microbatch(microbatch),
            RankPart::Stage(stage) => self.stage_microbatch(stage, microbatch),
        }
    }

    fn encoder_microbatch(&self, microbatch: &RankMicrobatch) -> (MicrobatchBytes, bool) {
        let total = microbatch.shape.encoder_tokens();
        if total == 0 {
            return (MicrobatchBytes::default(), false);
        }
        let segments = segments_of(&microbatch.shape.encoder_segments);
        let outgoing = microbatch.feature_tokens.saturating_mul(self.hidden_bytes);
        let modules = self.encoder_modules();
        let bytes: Vec<(Bytes, u64)> = modules
            .into_iter()
            .map(|(module, count)| (module.footprint.at(total, segments.clone()), count))
            .collect();
        let pieces = (0..bytes.len())
            .map(|index| {
                let (of_one, count) = bytes[index];
                // A module keeps its input, which is the result of the one before it: no less than that.
                let next = bytes.get(index + 1).map(|(next, _)| next);
                let result = next.map_or(0, |next| next.kept);
                // And it makes the gradient of that while it runs back.
                let gradient = next.map_or(0, |next| next.kept.min(next.workspace));
                let own = if index + 1 == bytes.len() { outgoing } else { gradient };
                Piece { result, gradient, ..Piece::new(&of_one, count, own) }
            })
            .collect();
        let is_extrapolated = bytes.iter().any(|(bytes, _)| bytes.is_extrapolated);
        (MicrobatchBytes { pieces, incoming: 0, outgoing }, is_extrapolated)
    }

    fn stage_microbatch(&self, stage: StageLayers, microbatch: &RankMicrobatch) -> (MicrobatchBytes, bool) {
        let total = microbatch.shape.total_llm_tokens();
        if total == 0 {
            return (MicrobatchBytes::default(), false);
        }
        let hidden = total.saturating_mul(self.hidden_bytes);
        let features = microbatch.feature_tokens.saturating_mul(self.hidden_bytes);
        let (mut pieces, mut is_extrapolated) = (Vec::new(), false);
        let mut push = |bytes: Bytes, count: u64, is_head| {
            is_extrapolated |= bytes.is_extrapolated;
            pieces.push(Piece { is_head, ..Piece::new(&bytes, count, hidden) });
        };
        if stage.is_first {
            push(self.embedding.footprint.at(total, std::iter::empty()), 1, false);
        }
        if stage.num_layers > 0 {
            let samples = samples_of(&microbatch.shape.llm_tokens);
            push(self.layer.footprint.at(total, samples), u64::from(stage.num_layers), false);
        }
        if stage.is_last {
            push(self.head.footprint.at(microbatch.shape.label_tokens, std::iter::empty()), 1, true);
        }
        let incoming = if stage.is_first { features } else { hidden };
        // An embedding may keep nothing where the layers behind it do.
        if let Some(first) = pieces.iter_mut().find(|piece| piece.kept > 0) {
            // The first layer keeps its input: that is what came in, and it is named there.
            let named = if stage.is_first { 0 } else { incoming };
            let inputs = total.saturating_mul(INPUT_BYTES);
            first.kept = first.kept.saturating_sub(named).saturating_add(inputs);
        }
        let outgoing = if stage.is_last { 0 } else { hidden };
        (MicrobatchBytes { pieces, incoming, outgoing }, is_extrapolated)
    }
}
