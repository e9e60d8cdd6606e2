//! What a layout has whatever its number of microbatches is. It is looked up once for all candidates that differ in that
//! number alone; a tail or a memory takes longer to look up than the rest of an estimate.

use dflop_cost::{CostModel, EncoderLayers, RankRole, Sharding, StageLayers};
use dflop_step::{StepError, StepSettings};
use dflop_types::{Component, Layout};

/// Pipeline ranks of the LLM backbone that hold equal layers and follow each other.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EqualStages {
    /// What each of them holds.
    pub(crate) stage: StageLayers,
    /// How many there are, at least 1.
    pub(crate) count: u32,
    /// What comes after the last action of a step (reduction and optimizer), in nanoseconds.
    pub(crate) tail_ns: u64,
}

/// What a layout has whatever its number of microbatches is.
#[derive(Debug, Clone)]
pub(crate) struct Facts {
    /// The pipeline ranks of the LLM backbone, in their order.
    pub(crate) stages: Vec<EqualStages>,
    /// As [`EqualStages::tail_ns`], of a rank that holds the whole encoder.
    pub(crate) encoder_tail_ns: u64,
    /// Bytes that do not depend on samples: of the first rank of the encoder, of the first and of the last of the LLM
    /// backbone.
    pub(crate) fixed_bytes: [u64; 3],
    /// The part of the messages from stage to stage that goes to another node.
    pub(crate) across_nodes: f64,
}

impl Facts {
    /// The facts of the layout of `settings`; `model` says what its components recompute.
    ///
    /// # Errors
    /// [`StepError`] where a component has more stages than layers, or a cut that does not have its layers.
    pub(crate) fn new(model: &CostModel, settings: &StepSettings) -> Result<Self, StepError> {
        let layout = &settings.layout;
        let [encoder, llm] = [Component::Encoder, Component::Llm].map(|of| Sharding::of(layout, of));
        let mut stages: Vec<EqualStages> = Vec::new();
        for stage in settings.rank_stages(model)? {
            match stages.last_mut() {
                Some(equal) if equal.stage == stage => equal.count += 1,
                _ => {
                    let tail_ns = model.sharded_stage_tail(stage, llm).ns;
                    stages.push(EqualStages { stage, count: 1, tail_ns });
                }
            }
        }
        let bytes = |role, sharding| model.sharded_memory(role, sharding).total_bytes();
        let of_end = |end: Option<&EqualStages>| end.map_or(0, |end| bytes(RankRole::Stage(end.stage), llm));
        Ok(Self {
            fixed_bytes: [
                bytes(first_of_encoder(model, layout), encoder),
                of_end(stages.first()),
                of_end(stages.last()),
            ],
            stages,
            encoder_tail_ns: model.sharded_encoder_tail(encoder).ns,
            across_nodes: model.ratio_across_nodes(layout),
        })
    }

    /// Pipeline ranks of the LLM backbone.
    pub(crate) fn num_stages(&self) -> u32 {
        self.stages.iter().map(|equal| equal.count).sum()
    }
}

/// What the first rank of an encoder replica holds.
fn first_of_encoder(model: &CostModel, layout: &Layout) -> RankRole {
    if layout.encoder.pp == 1 {
        return RankRole::Encoder;
    }
    let layers = layout.stage_layers(Component::Encoder, model.num_encoder_layers());
    let num_layers = layers.first().copied().unwrap_or(0);
    RankRole::EncoderStage(EncoderLayers { first_layer: 0, num_layers, is_first: true, is_last: false })
}
