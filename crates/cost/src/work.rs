//! A certified lower bound on the work of a global batch: what lets the planner drop a candidate without
//! simulating it.

use crate::cost::CostModel;
use crate::module::Module;
use crate::stage::{StageLayers, samples_of, segments_of};
use dflop_types::{MicrobatchShape, Recompute};

/// Certified least forward and backward time of one global batch, in nanoseconds over all replicas, however
/// its samples are packed into microbatches.
///
/// Attention is what it is; the linear part is taken at the best rate (time a token) that the curve has
/// anywhere up to the whole batch. Rounding takes less than 3 ns a part and module (forward, backward,
/// recomputation), which the methods take off.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct WorkMin {
    encoder: f64,
    num_encoder_modules: u64,
    layer: f64,
    /// What a layer takes more that recomputes more than others of its stage, and how many of a stage these are.
    first: (f64, Recompute),
    embedding: f64,
    head: f64,
}

impl WorkMin {
    /// Least work of the encoder in at most `parts` parts.
    pub fn encoder_ns(&self, parts: u64) -> u64 {
        certify(self.encoder, parts, self.num_encoder_modules)
    }

    /// Least work of one stage of the LLM backbone in at most `parts` parts.
    pub fn stage_ns(&self, stage: StageLayers, parts: u64) -> u64 {
        let (longer, mode) = self.first;
        let sum = self.layer * f64::from(stage.num_layers)
            + longer * f64::from(mode.first_layers(stage.num_layers))
            + if stage.is_first { self.embedding } else { 0.0 }
            + if stage.is_last { self.head } else { 0.0 };
        certify(sum, parts, u64::from(stage.num_layers) + 2)
    }
}

/// A sum of floats as a bound: lowered by the rounding of integers (3 ns a part and module) and of floats (1
/// in 10^12).
fn certify(ns: f64, parts: u64, num_modules: u64) -> u64 {
    (ns * (1.0 - 1e-12) - 3.0 * parts as f64 * num_modules as f64 - 1.0).max(0.0) as u64
}

impl CostModel {
    /// Certified least work of a global batch, however its samples are packed.
    ///
    /// *Complexity*: O(s log n) for s segments and samples.
    pub fn work_min(&self, batch: &MicrobatchShape) -> WorkMin {
        let total = batch.total_llm_tokens();
        let tokens = batch.tower_tokens();
        let of_module = |module: &Module| {
            let attention_ns = module.attention_ns(segments_of(&batch.encoder_segments, module.tower));
            module.ns_min(tokens[module.tower.index()]) + attention_ns as f64
        };
        // Of layers of which some recompute more than others the shorter time: how many do depends on the stages.
        let of_one = |(name, module, count): &(&str, Module, u64)| {
            let firsts = self.first.encoder.iter().filter(|(of, _)| of == name);
            firsts.map(|(_, first)| of_module(first)).fold(of_module(module), f64::min) * *count as f64
        };
        let of_layer =
            |layer: &Module| layer.ns_min(total) + layer.attention_ns(samples_of(&batch.llm_tokens)) as f64;
        // Several stages have more of the layers that recompute more than all layers as one stage. So these count as longer
        // than the others, but never as shorter, though noise may have it so: that keeps both a bound.
        let layer = of_layer(&self.layer);
        let first = self.layers_of(1).map(|(first, _)| of_layer(first)).next().unwrap_or(layer);
        let mode = match self.settings.llm.recompute {
            mode if mode.first_layers_wanted() > 0 => mode,
            _ => Recompute::None,
        };
        WorkMin {
            encoder: self.encoder.iter().map(of_one).sum(),
            num_encoder_modules: self.encoder.iter().map(|(_, _, count)| count).sum(),
            layer: layer.min(first),
            first: ((first - layer).max(0.0), mode),
            embedding: self.embedding.ns_min(total),
            head: self.head.ns_min(batch.label_tokens),
        }
    }
}
