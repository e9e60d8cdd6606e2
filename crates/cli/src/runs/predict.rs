//! From a run to its step time and memory: the modules estimated, their costs predicted, the pipeline simulated.

use super::columns::{MemoryRank, Row};
use dflop_analytic::{AnalyticError, EstimateSettings, Gpt, estimate_gpt};
use dflop_cost::{
    ComponentSettings, CostError, CostModel, CostSettings, MemoryError, RankChunks, RankMicrobatch,
    StageLayers,
};
use dflop_sim::{Durations, SimError, order, simulate, simulate_interleaved};
use dflop_types::{
    Action, Collective, LinkSpan, MadeFrom, MicrobatchShape, ModelProfile, Rank, StageIndex, cut_layers,
};
use thiserror::Error;

/// What cuBLAS and Transformer Engine hold in PyTorch's allocator, in bytes: of Megatron's published run, what it holds at the
/// end of a step less what is counted here, 0.07 GB on A100 and 0.37 GB on H100.
const LIBRARY_BYTES: u64 = 370_000_000;

/// What is predicted of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Predicted {
    /// Time of a step, in nanoseconds.
    pub(crate) step_ns: u64,
    /// Peak of the rank that was asked for, as PyTorch's allocator counts it: without context and fragmentation.
    pub(crate) peak_bytes: u64,
    /// Whether a size lies outside the estimated ones.
    pub(crate) is_extrapolated: bool,
}

/// Why a run has no prediction.
#[derive(Debug, Error)]
pub(crate) enum Unpredicted {
    /// A layer cannot be cut like this.
    #[error(transparent)]
    Analytic(#[from] AnalyticError),
    /// The profile does not hold what is asked.
    #[error(transparent)]
    Cost(#[from] CostError),
    /// The pipeline cannot be run.
    #[error(transparent)]
    Sim(#[from] SimError),
    /// The list of a rank cannot be run.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// Layers are dealt out evenly.
    #[error("`layers` is {layers}, {stages} stages do not divide it")]
    Stages {
        /// Layers of the model.
        layers: u64,
        /// Ranks times chunks.
        stages: u64,
    },
    /// Ranks of one layer lie in one node.
    #[error("`tensor_parallel` is {tp}, a node has {gpus_per_node} devices")]
    Node {
        /// The degree.
        tp: u32,
        /// Devices of a node.
        gpus_per_node: u32,
    },
}

/// Predicts runs; keeps the last model, as tables name one model many times.
#[derive(Default)]
pub(crate) struct Predictor {
    last: Option<(Key, ModelProfile)>,
}

/// What a profile is made for.
#[derive(PartialEq, Eq)]
struct Key {
    gpt: Gpt,
    tp: u32,
    hardware: &'static str,
    dtype: &'static str,
}

impl Predictor {
    /// What a run takes.
    ///
    /// # Errors
    /// [`Unpredicted`], where Megatron would not run it either.
    pub(crate) fn predict(&mut self, row: &Row) -> Result<Predicted, Unpredicted> {
        let num_stages = u64::from(row.pp) * u64::from(row.chunks);
        if !row.gpt.num_layers.is_multiple_of(num_stages) {
            return Err(Unpredicted::Stages { layers: row.gpt.num_layers, stages: num_stages });
        }
        if row.tp > row.gpus_per_node {
            return Err(Unpredicted::Node { tp: row.tp, gpus_per_node: row.gpus_per_node });
        }
        let llm = ComponentSettings {
            tensor_parallel_degree: row.tp,
            recompute: row.recompute,
            ..ComponentSettings::default()
        };
        let settings = CostSettings { llm, ..CostSettings::default() };
        let model = CostModel::with(&self.profile(row)?, &settings)?.with_gradients_of(row.gradient_bytes);
        let run = Run { row, model: &model, num_stages: num_stages as u32 };
        let (step_ns, is_extrapolated) = run.step_ns()?;
        Ok(Predicted { step_ns, peak_bytes: run.peak_bytes()?, is_extrapolated })
    }

    /// The estimated profile of a row's model, with the links that its replicas have between them.
    fn profile(&mut self, row: &Row) -> Result<ModelProfile, AnalyticError> {
        let key = Key { gpt: row.gpt, tp: row.tp, hardware: row.hardware.name, dtype: row.dtype };
        let mut profile = match self.last.take() {
            Some((known, profile)) if known == key => profile,
            _ => {
                let settings = EstimateSettings {
                    model: "gpt".to_owned(),
                    dtype: row.dtype.to_owned(),
                    made_from: MadeFrom::new(),
                    lora_rank: 0,
                };
                estimate_gpt(&row.gpt, row.tp, row.hardware, &settings)?
            }
        };
        self.last = Some((key, profile.clone()));
        // Ranks of a layer follow each other, then replicas, then stages: so Megatron numbers them.
        if row.tp * row.dp <= row.gpus_per_node {
            profile.network.links.retain(|link| link.span == LinkSpan::Node);
        }
        Ok(profile)
    }
}

/// One run.
struct Run<'a> {
    row: &'a Row,
    model: &'a CostModel,
    num_stages: u32,
}

impl Run<'_> {
    fn microbatch(&self) -> MicrobatchShape {
        let Row { micro_batch, gpt, .. } = self.row;
        let tokens = gpt.sequence_tokens as u32;
        MicrobatchShape {
            llm_tokens: vec![tokens; *micro_batch as usize],
            label_tokens: u64::from(*micro_batch) * gpt.sequence_tokens,
            ..MicrobatchShape::default()
        }
    }

    fn stage(&self, stage: u32) -> StageLayers {
        let layers = cut_layers(self.row.gpt.num_layers as u32, self.num_stages);
        StageLayers {
            num_layers: layers[stage as usize],
            is_first: stage == 0,
            is_last: stage + 1 == self.num_stages,
        }
    }

    /// All that a rank of the pipeline holds, as one.
    fn whole(&self, rank: u32) -> StageLayers {
        StageLayers {
            num_layers: self.row.gpt.num_layers as u32 / self.row.pp,
            is_first: rank == 0,
            is_last: rank + 1 == self.row.pp,
        }
    }

    /// Span of messages between stages: across nodes where a pipeline needs several.
    fn pipeline_span(&self) -> LinkSpan {
        let Row { tp, dp, pp, gpus_per_node, .. } = *self.row;
        if tp * dp * pp > gpus_per_node { LinkSpan::Cluster } else { LinkSpan::Node }
    }

    /// Time of the step: the pipeline, then of the slowest rank the reduction of its gradients and the optimizer.
    fn step_ns(&self) -> Result<(u64, bool), SimError> {
        let row = self.row;
        let (microbatch, software) = (self.microbatch(), row.gpt.software);
        let (mut forward_ns, mut backward_ns, mut is_extrapolated) = (Vec::new(), Vec::new(), false);
        for stage in 0..self.num_stages {
            let StageLayers { num_layers, is_first, is_last } = self.stage(stage);
            let one = self.model.llm_stage(&microbatch, num_layers, is_first, is_last);
            let host_ns =
                if is_first { software.batch_ns } else { 0 } + if is_last { software.loss_ns } else { 0 };
            forward_ns.push(vec![one.forward_ns + host_ns; row.num_microbatches as usize]);
            backward_ns.push(vec![one.backward_ns; row.num_microbatches as usize]);
            is_extrapolated |= one.extrapolated;
        }
        let hidden_bytes = microbatch.total_llm_tokens() * row.gpt.width * self.value_bytes();
        let transfer_ns =
            self.model.transfer(Collective::PointToPoint, self.pipeline_span(), 2, hidden_bytes).ns;
        let durations = Durations { forward_ns, backward_ns, transfer_ns, ..Durations::default() };
        let timeline = if row.chunks > 1 {
            simulate_interleaved(&durations, row.pp)?
        } else {
            simulate(&durations, row.order)?
        };
        let tail_ns = (0..row.pp).map(|rank| self.tail_ns(rank)).max().unwrap_or(0);
        Ok((timeline.makespan_ns.saturating_add(tail_ns), is_extrapolated))
    }

    fn value_bytes(&self) -> u64 {
        if self.row.dtype == "float32" { 4 } else { 2 }
    }

    /// Reduction and optimizer of a rank. Where the reduction runs beside the backward, it is taken as hidden. The two ends
    /// of a pipeline add up the gradients of the matrix that they share.
    fn tail_ns(&self, rank: u32) -> u64 {
        let (row, whole) = (self.row, self.whole(rank));
        let replicas = if row.has_overlap { 1 } else { row.dp };
        let mut ns = self.model.stage_tail(whole, replicas).ns;
        if row.sharding_degree > 1 {
            let states_ns = self.model.stage_tail(whole, 1).ns;
            ns = ns - states_ns + states_ns / u64::from(row.sharding_degree);
        }
        if row.gpt.is_tied && row.pp > 1 && (whole.is_first || whole.is_last) {
            let parameters = row.gpt.vocabulary.div_ceil(u64::from(row.tp)) * row.gpt.width;
            let bytes = parameters * row.gradient_bytes;
            ns += self.model.transfer(Collective::AllReduce, self.pipeline_span(), 2, bytes).ns;
        }
        ns
    }

    /// Peak of the rank that is asked for.
    fn peak_bytes(&self) -> Result<u64, MemoryError> {
        match self.row.memory_rank {
            MemoryRank::One(rank) => self.peak_of(rank),
            MemoryRank::Fullest => {
                (0..self.row.pp).try_fold(0, |most, rank| Ok(self.peak_of(rank)?.max(most)))
            }
        }
    }

    fn peak_of(&self, rank: u32) -> Result<u64, MemoryError> {
        let row = self.row;
        let chunks: Vec<StageLayers> =
            (0..row.chunks).map(|chunk| self.stage(chunk * row.pp + rank)).collect();
        let microbatch = RankMicrobatch { shape: self.microbatch(), feature_tokens: 0 };
        let memory = self.model.chunks_peak(&RankChunks {
            chunks: &chunks,
            whole: self.whole(rank),
            num_ranks: row.pp,
            microbatch: &microbatch,
            num_microbatches: row.num_microbatches,
            actions: &self.actions(rank),
            sharding_degree: row.sharding_degree,
        })?;
        Ok(memory.tensor_bytes().saturating_add(LIBRARY_BYTES))
    }

    fn actions(&self, rank: u32) -> Vec<Action> {
        let (row, m) = (self.row, self.row.num_microbatches);
        // What cannot be interleaved has been refused where the step was timed.
        let interleaved = || order::interleaved(Rank(rank), row.pp, self.num_stages, m).unwrap_or_default();
        if row.chunks > 1 { interleaved() } else { order::actions(row.order, StageIndex(rank), row.pp, m) }
    }
}
