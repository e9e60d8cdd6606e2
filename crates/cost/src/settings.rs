//! How a model is run: what trains, what is recomputed, over how many ranks a layer is cut and its experts are dealt out.

use crate::mode::Runs;
use dflop_types::{Layout, ModelProfile, Recomputation, Recompute, Trained};

/// How one component is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ComponentSettings {
    /// Ranks that each of its layers is cut over, at least 1.
    pub tensor_parallel_degree: u32,
    /// Ranks among which the experts of each layer are dealt out, at least 1; more only in the LLM backbone.
    pub expert_parallel_degree: u32,
    /// What its layers recompute in the backward.
    pub recompute: Recompute,
}

impl Default for ComponentSettings {
    fn default() -> Self {
        Self { tensor_parallel_degree: 1, expert_parallel_degree: 1, recompute: Recompute::None }
    }
}

/// How a model is run. By default all of it trains, nothing is recomputed, and no layer is cut.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct CostSettings {
    /// The encoder, projector included.
    pub encoder: ComponentSettings,
    /// The LLM backbone.
    pub llm: ComponentSettings,
    /// What trains.
    pub trained: Trained,
}

impl CostSettings {
    /// The same settings with these modes of recomputation in the layers of the components.
    #[must_use]
    pub const fn recomputing(mut self, recompute: Recomputation) -> Self {
        self.encoder.recompute = recompute.encoder;
        self.llm.recompute = recompute.llm;
        self
    }

    /// The same settings with layers cut, and experts dealt out, as `layout` has them.
    #[must_use]
    pub const fn in_layout(mut self, layout: &Layout) -> Self {
        self.encoder.tensor_parallel_degree = layout.encoder.tp;
        self.llm.tensor_parallel_degree = layout.llm.tp;
        self.llm.expert_parallel_degree = layout.expert_parallel_degree;
        self
    }

    /// What a module of the encoder runs.
    pub(crate) fn encoder_runs(&self, name: &str) -> Runs {
        let trained = &self.trained;
        if ModelProfile::is_projector(name) {
            Runs::of(trained.projector, trained.encoder)
        } else if trained.encoder {
            // Pixels need no gradient, so the profile's input-gradient time of the embedding is 0.
            Runs::Whole
        } else {
            Runs::Forward
        }
    }

    /// What a module of the LLM backbone runs; `has_adapters`: it was measured with adapters that train.
    pub(crate) fn llm_runs(&self, name: &str, has_adapters: bool) -> Runs {
        let trained = &self.trained;
        let trains_before = trained.encoder || trained.projector;
        let trains = trained.llm && (trained.lora_rank == 0 || has_adapters);
        match name {
            "llm_embedding" => Runs::of(trains, trains_before),
            // What trains in the LLM backbone stands before all but its first layer.
            _ => Runs::of(trains, trains_before || trained.llm),
        }
    }
}
