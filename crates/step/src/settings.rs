//! Settings: the part of a plan that the scheduler of a step needs.

use crate::error::StepError;
use dflop_cost::{CostModel, EncoderLayers, StageLayers};
use dflop_types::{Component, Layout, PipelineOrder, RankedPlan, Zero};

/// The part of a plan that the scheduler of a step needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepSettings {
    /// Degrees of both components, and where they sit. The tensor degrees must be those of the cost model.
    pub layout: Layout,
    /// Microbatches of a step, on each LLM replica; at least 1. Colocated ranks may leave the last ones empty.
    pub num_microbatches: u32,
    /// Order of actions.
    pub pipeline_order: PipelineOrder,
    /// Bytes one rank may use; `None`: memory is not checked.
    pub memory_budget_bytes: Option<u64>,
}

impl From<&RankedPlan> for StepSettings {
    /// The settings of a plan, without a memory budget: a plan does not carry one.
    fn from(plan: &RankedPlan) -> Self {
        Self {
            layout: plan.layout,
            num_microbatches: plan.num_microbatches,
            pipeline_order: plan.pipeline_order,
            memory_budget_bytes: None,
        }
    }
}

impl StepSettings {
    /// Buckets of a step: microbatches x LLM replicas.
    pub const fn num_buckets(&self) -> u32 {
        self.num_microbatches * self.layout.llm.dp
    }

    /// The same settings with each tensor group as one rank.
    #[must_use]
    pub(crate) const fn by_group(self) -> Self {
        Self { layout: self.layout.by_group(), ..self }
    }

    /// Layers that each stage of the LLM backbone holds. If stages are interleaved, each chunk is a stage.
    ///
    /// # Errors
    /// [`StepError::Unsupported`], [`StepError::Experts`], [`StepError::Interleave`], [`StepError::Zero`], [`StepError::StagesExceedLayers`], [`StepError::CutLayers`],
    /// [`StepError::UnsupportedOrder`], [`StepError::NoSplit`], [`StepError::TensorDegree`], [`StepError::ExpertDegree`].
    pub fn stages(&self, model: &CostModel) -> Result<Vec<StageLayers>, StepError> {
        let (encoder, llm) = (self.layout.encoder, self.layout.llm);
        let layout = self.layout;
        let is_colocated = layout.is_colocated();
        let is_placed = if is_colocated {
            encoder == llm || layout.has_whole_encoders()
        } else {
            layout.zero < Zero::Parameters
        };
        let is_divided = layout
            .shard_ranks
            .is_none_or(|ranks| encoder.dp.is_multiple_of(ranks) && llm.dp.is_multiple_of(ranks));
        if layout.has_expert_groups() && (!is_colocated || encoder != llm || llm.tp > 1) {
            return Err(StepError::Experts { layout: Box::new(layout) });
        }
        if !is_placed || !is_divided {
            return Err(StepError::Unsupported { layout: Box::new(layout) });
        }
        for (field, value) in [
            ("layout.encoder.tensor_parallel_degree", encoder.tp),
            ("layout.llm.tensor_parallel_degree", llm.tp),
            ("layout.encoder.data_parallel_degree", encoder.dp),
            ("layout.encoder.pipeline_parallel_degree", encoder.pp),
            ("layout.llm.data_parallel_degree", llm.dp),
            ("layout.llm.pipeline_parallel_degree", llm.pp),
            ("layout.llm_interleave", layout.llm_interleave),
            ("layout.expert_parallel_degree", layout.expert_parallel_degree),
            ("num_microbatches", self.num_microbatches),
        ] {
            if value == 0 {
                return Err(StepError::Zero { field });
            }
        }
        for (component, wanted, settings) in [
            (Component::Encoder, encoder.tp, model.settings().encoder),
            (Component::Llm, llm.tp, model.settings().llm),
        ] {
            let predicted = settings.tensor_parallel_degree;
            if wanted != predicted {
                return Err(StepError::TensorDegree { component, wanted, predicted });
            }
        }
        let (wanted, predicted) =
            (layout.expert_parallel_degree, model.settings().llm.expert_parallel_degree);
        if wanted != predicted {
            return Err(StepError::ExpertDegree { wanted, predicted });
        }
        if layout.is_interleaved() && (is_colocated || llm.pp == 1) {
            return Err(StepError::Interleave { chunks: layout.llm_interleave, layout: Box::new(layout) });
        }
        if is_colocated && llm.pp == 1 {
            // Each rank takes one microbatch after another, whatever the pipeline order.
            return Ok(vec![model.whole_stage()]);
        }
        // Interleaved 1F1B is only for several stages on a rank, and zero-bubble only for one.
        let is_other = match self.pipeline_order {
            PipelineOrder::Interleaved => !layout.is_interleaved(),
            PipelineOrder::ZeroBubble => layout.is_interleaved(),
            _ => false,
        };
        if is_other {
            let chunks = layout.llm_interleave;
            return Err(StepError::UnsupportedOrder { order: self.pipeline_order, chunks });
        }
        if self.pipeline_order == PipelineOrder::ZeroBubble && !model.has_split() {
            return Err(StepError::NoSplit { order: self.pipeline_order });
        }
        let component = Component::Llm;
        self.check_cut(component, model.num_llm_layers())?;
        let cut = layout.stage_layers(component, model.num_llm_layers());
        let last = cut.len() - 1;
        Ok(cut
            .into_iter()
            .enumerate()
            .map(|(stage, num_layers)| StageLayers {
                num_layers,
                is_first: stage == 0,
                is_last: stage == last,
            })
            .collect())
    }

    /// Layers that each pipeline rank of the LLM backbone holds: its stage, or all its chunks together.
    ///
    /// # Errors
    /// As [`StepSettings::stages`].
    pub fn rank_stages(&self, model: &CostModel) -> Result<Vec<StageLayers>, StepError> {
        self.stages(model).map(|stages| self.by_rank(&stages))
    }

    /// For each pipeline rank of the LLM backbone, its `stages` put together as one.
    pub(crate) fn by_rank(&self, stages: &[StageLayers]) -> Vec<StageLayers> {
        let pp = stages.len() / self.layout.llm_interleave.max(1) as usize;
        let of_rank = |first: usize| {
            let chunks = || stages.iter().skip(first).step_by(pp);
            StageLayers {
                num_layers: chunks().map(|chunk| chunk.num_layers).sum(),
                is_first: chunks().any(|chunk| chunk.is_first),
                is_last: chunks().any(|chunk| chunk.is_last),
            }
        };
        (0..pp).map(of_rank).collect()
    }

    /// Layers that each stage of the encoder holds.
    ///
    /// # Errors
    /// [`StepError::StagesExceedLayers`], [`StepError::CutLayers`].
    pub fn encoder_stages(&self, model: &CostModel) -> Result<Vec<EncoderLayers>, StepError> {
        let (component, pp) = (Component::Encoder, self.layout.encoder.pp);
        if self.layout.is_colocated() || pp == 1 {
            return Ok(vec![model.whole_encoder()]);
        }
        let num_layers = model.num_encoder_layers();
        self.check_cut(component, num_layers)?;
        let cut = self.layout.stage_layers(component, num_layers);
        let mut first_layer = 0;
        let stages = (1..).zip(cut).map(|(stage, num_layers)| {
            let (is_first, is_last) = (stage == 1, stage == pp);
            let layers = EncoderLayers { first_layer, num_layers, is_first, is_last };
            first_layer += num_layers;
            layers
        });
        Ok(stages.collect())
    }

    /// Nothing if the layers of a component can be cut into its stages as the layout says.
    fn check_cut(&self, component: Component, layers: u32) -> Result<(), StepError> {
        let (stages, cut) = match component {
            Component::Encoder => (self.layout.encoder.pp, self.layout.encoder_cut),
            Component::Llm | Component::Both => (self.layout.num_llm_stages(), self.layout.llm_cut),
        };
        let chunks = if component == Component::Encoder { 1 } else { self.layout.llm_interleave };
        if stages > layers {
            return Err(StepError::StagesExceedLayers { component, stages: stages / chunks, chunks, layers });
        }
        match cut {
            Some(cut) if cut.num_stages() != stages || cut.num_layers() != layers => {
                Err(StepError::CutLayers { component, cut, stages: stages / chunks, chunks, layers })
            }
            _ => Ok(()),
        }
    }
}
