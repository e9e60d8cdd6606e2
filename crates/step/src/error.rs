//! Why a global batch gets no schedule: the inputs are wrong, or the batch does not fit on the ranks.

use dflop_cost::CostError;
use dflop_schedule::BalanceError;
use dflop_sim::SimError;
use dflop_types::{Component, Hint, LayerCut, Layout, PipelineOrder, Recompute, SampleIndex, memory_size};
use thiserror::Error;

/// The name of a component in error texts.
const fn part_name(component: Component) -> &'static str {
    match component {
        Component::Encoder => "encoder",
        Component::Llm => "LLM backbone",
        Component::Both => "model",
    }
}

/// The number of chunks of each rank in words; empty if it is one.
fn times(chunks: u32) -> String {
    if chunks > 1 { format!(" x interleave {chunks}") } else { String::new() }
}

/// Why there is no schedule.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum StepError {
    /// There is nothing to schedule.
    #[error("the data profile has 0 samples, at least 1 is needed")]
    NoSamples,
    /// Global batches that are not whole shall be left out, but there are too few samples for a whole one.
    #[error(
        "{num_samples} samples are fewer than one global batch of {global_batch_size}, and a smaller one is left out"
    )]
    NoWholeBatch {
        /// Samples of the data.
        num_samples: u32,
        /// Samples of a global batch.
        global_batch_size: u32,
    },
    /// A count that must be at least 1.
    #[error("`{field}` is 0, must be at least 1")]
    Zero {
        /// The field.
        field: &'static str,
    },
    /// Corrected times that cannot be used.
    #[error("the correction of the predicted times: {problem}")]
    Adjustment {
        /// What is wrong with it.
        problem: String,
    },
    /// A sample index past the data profile.
    #[error("sample {sample} is not in the data profile: it has {num_samples} samples, counted from 0")]
    UnknownSample {
        /// The sample.
        sample: SampleIndex,
        /// Samples of the profile.
        num_samples: usize,
    },
    /// A sample that would be trained twice in one step.
    #[error("sample {sample} stands twice in the global batch of step {step}, must stand there once")]
    RepeatedSample {
        /// The sample.
        sample: SampleIndex,
        /// The step.
        step: u64,
    },
    /// A layout that this version does not run.
    #[error(
        "layout `{layout}` is not supported: parameters are cut (`zero` 3) only where components are colocated, and `shard_ranks` divides the replicas"
    )]
    Unsupported {
        /// The layout.
        layout: Box<Layout>,
    },
    /// Experts are dealt out over ranks that do not each hold encoder and LLM backbone whole.
    #[error(
        "layout `{layout}` is not supported: experts are dealt out (`expert_parallel_degree` above 1) only over colocated ranks of tp 1"
    )]
    Experts {
        /// The layout.
        layout: Box<Layout>,
    },
    /// The cost model is one of layers cut over another number of ranks than the layout says.
    #[error("layout has {component} tp {wanted}, the cost model predicts tp {predicted}")]
    TensorDegree {
        /// Whose layers.
        component: Component,
        /// The tensor degree of the layout.
        wanted: u32,
        /// The tensor degree of the cost model.
        predicted: u32,
    },
    /// The cost model is one of experts dealt out over another number of ranks than the layout says.
    #[error("layout has ep {wanted}, the cost model predicts ep {predicted}")]
    ExpertDegree {
        /// The expert parallel degree of the layout.
        wanted: u32,
        /// That of the cost model.
        predicted: u32,
    },
    /// The layout has chunks, but the LLM backbone is no pipeline of several ranks.
    #[error(
        "layout `{layout}` has `llm_interleave` {chunks}: chunks are dealt round over the ranks of a pipeline, llm pp must be 2 or more and the components on ranks of their own"
    )]
    Interleave {
        /// Chunks of a rank.
        chunks: u32,
        /// The layout.
        layout: Box<Layout>,
    },
    /// More pipeline stages than layers.
    #[error(
        "{component} pp {stages}{} exceeds the {layers} layers of the {}", times(*chunks), part_name(*component)
    )]
    StagesExceedLayers {
        /// What is cut.
        component: Component,
        /// Pipeline ranks asked for.
        stages: u32,
        /// Chunks of each of them.
        chunks: u32,
        /// Layers there are.
        layers: u32,
    },
    /// The cut has another number of stages or layers than the component.
    #[error(
        "{component} layers {cut} are {} in {} stages, the model has {layers} in the {} and the layout {component} pp {stages}{}",
        cut.num_layers(), cut.num_stages(), part_name(*component), times(*chunks)
    )]
    CutLayers {
        /// What is cut.
        component: Component,
        /// Layers by stage.
        cut: LayerCut,
        /// Pipeline ranks of the layout.
        stages: u32,
        /// Chunks of each of them.
        chunks: u32,
        /// Layers there are.
        layers: u32,
    },
    /// More layers of a stage shall recompute than any stage has.
    #[error(
        "{component} recompute `{mode}` exceeds the {layers} layers that a stage of the {} has at most", part_name(*component)
    )]
    RecomputeExceedsStage {
        /// Whose layers.
        component: Component,
        /// The mode asked for, with the number of its layers.
        mode: Recompute,
        /// Layers of the largest stage.
        layers: u32,
    },
    /// The pipeline order is for several stages on a rank and the layout has one, or the other way round.
    #[error(
        "pipeline order `{order}` is not for this layout: `llm_interleave` is {chunks}, must be {}",
        if *chunks > 1 { "1" } else { "2 or more" }
    )]
    UnsupportedOrder {
        /// The order.
        order: PipelineOrder,
        /// Chunks of each pipeline rank of the LLM backbone.
        chunks: u32,
    },
    /// The pipeline order splits the backward, but the profile has only times of whole backwards.
    #[error(
        "pipeline order `{order}` splits the backward, the model profile has it measured in one piece only"
    )]
    NoSplit {
        /// The order.
        order: PipelineOrder,
    },
    /// A schedule made for another layout or number of microbatches.
    #[error(
        "the schedule of step {step} has {found} {what} in microbatch {microbatch}, the plan has {expected}"
    )]
    ForeignSchedule {
        /// The step.
        step: u64,
        /// `encoder replicas`, `llm replicas`, `microbatches` or `parts of a sample`.
        what: &'static str,
        /// The microbatch at fault; 0 where their number is wrong.
        microbatch: usize,
        /// What the schedule has.
        found: usize,
        /// What the plan has.
        expected: usize,
    },
    /// The schedule has action lists for colocated ranks. These have none: each takes one microbatch after another.
    #[error("the schedule of step {step} has action lists, but components are colocated in `{layout}`")]
    ColocatedLists {
        /// The step.
        step: u64,
        /// The layout.
        layout: Box<Layout>,
    },
    /// One sample alone is over the memory budget of a rank.
    #[error(
        "sample {sample} does not fit: {component} rank needs {} for it alone, memory budget is {}",
        memory_size(*needed_bytes), memory_size(*budget_bytes)
    )]
    SampleTooLarge {
        /// The sample.
        sample: SampleIndex,
        /// The component whose rank is over.
        component: Component,
        /// What the rank would need, in bytes.
        needed_bytes: u64,
        /// The budget, in bytes.
        budget_bytes: u64,
    },
    /// No schedule of the global batch that fits was found.
    #[error(
        "step {step} does not fit: {component} rank needs {}, memory budget is {}",
        memory_size(*needed_bytes), memory_size(*budget_bytes)
    )]
    Memory {
        /// The step.
        step: u64,
        /// The component whose rank is over.
        component: Component,
        /// What the fullest rank would need in the best schedule found, in bytes.
        needed_bytes: u64,
        /// The budget, in bytes.
        budget_bytes: u64,
    },
    /// The rule for giants refuses samples by their tokens.
    #[error(
        "samples with more than {llm_tokens_max} LLM tokens (`train.giant_llm_tokens`): {num_giants}, the largest is sample {sample} with {llm_tokens}, and `train.giants` is `refuse`"
    )]
    GiantTokens {
        /// Samples over the limit.
        num_giants: usize,
        /// The largest of them.
        sample: SampleIndex,
        /// Its LLM tokens.
        llm_tokens: u32,
        /// The limit.
        llm_tokens_max: u64,
    },
    /// The rule for giants refuses a sample that fits a rank alone, but not beside others.
    #[error(
        "step {step}: sample {sample} fits into {} only in a pipeline that is empty around it, and `train.giants` is `refuse`",
        memory_size(*budget_bytes)
    )]
    GiantMemory {
        /// The step.
        step: u64,
        /// The first such sample of the step.
        sample: SampleIndex,
        /// The component whose rank is over the budget if the sample has others beside it.
        component: Component,
        /// What that rank would need with the others, in bytes.
        needed_bytes: u64,
        /// The budget, in bytes.
        budget_bytes: u64,
    },
    /// One sample alone is over the cap on LLM tokens.
    #[error(
        "sample {sample} has {tokens} LLM tokens, `bucket_tokens_max` is {bucket_tokens_max} for a bucket (microbatch x LLM replica)"
    )]
    SampleOverTokens {
        /// The sample.
        sample: SampleIndex,
        /// Its LLM tokens.
        tokens: u64,
        /// The cap, in LLM tokens.
        bucket_tokens_max: u64,
    },
    /// No schedule of the global batch that keeps the cap on LLM tokens was found.
    #[error(
        "step {step} does not fit: the fullest of {num_buckets} buckets (microbatches x LLM replicas) has {needed_tokens} LLM tokens, `bucket_tokens_max` is {bucket_tokens_max}"
    )]
    Tokens {
        /// The step.
        step: u64,
        /// Buckets of the step.
        num_buckets: u32,
        /// Tokens of the fullest bucket: in the schedule, or in the best packing that was found. If no packing can keep the
        /// cap, the least that it must have.
        needed_tokens: u64,
        /// The cap, in LLM tokens.
        bucket_tokens_max: u64,
        /// Whether the method looks at the cap. If it does not, another method may keep the cap.
        is_balanced: bool,
    },
    /// A schedule was asked for that was never submitted, or that was taken before.
    #[error("the schedule of step {step} was not submitted, or was taken before")]
    NotSubmitted {
        /// The step.
        step: u64,
    },
    /// The thread that computes schedules cannot be started, or has ended.
    #[error("the thread that computes schedules failed: {cause}")]
    Thread {
        /// What the system says.
        cause: String,
    },
    /// No cost model can be made of the model profile.
    #[error(transparent)]
    Cost(#[from] CostError),
    /// Samples cannot be put into buckets.
    #[error(transparent)]
    Balance(#[from] BalanceError),
    /// The step cannot be simulated.
    #[error(transparent)]
    Sim(#[from] SimError),
}

impl Hint for StepError {
    fn hint(&self) -> Option<String> {
        let text = match self {
            Self::NoSamples => {
                "point the data configuration at a dataset with samples and run `dflop profile data`"
            }
            Self::NoWholeBatch { .. } => "take smaller global batches, or keep the last one of an epoch",
            Self::UnsupportedOrder { .. } => "set `train.pipeline_order` to `1f1b` or `data-aware`",
            Self::NoSplit { .. } => {
                "measure the model again with `dflop profile model`, or set `train.pipeline_order` to `1f1b`"
            }
            Self::Zero { field } => return Some(format!("set `{field}` to 1 or more")),
            Self::UnknownSample { .. } => "make the data profile again with `dflop profile data`",
            Self::RepeatedSample { .. } => "take each sample once a step, as `GlobalBatches` does",
            Self::Adjustment { .. } => {
                "train with `train.correction: off`, or take the correction of a run of this plan"
            }
            Self::ColocatedLists { .. } => "make the schedule anew, without `actions`",
            Self::ForeignSchedule { .. }
            | Self::Unsupported { .. }
            | Self::Experts { .. }
            | Self::Interleave { .. }
            | Self::CutLayers { .. }
            | Self::TensorDegree { .. }
            | Self::ExpertDegree { .. }
            | Self::RecomputeExceedsStage { .. }
            | Self::StagesExceedLayers { .. } => "make the plan anew with `dflop plan`",
            Self::SampleTooLarge { .. } => {
                "raise `cluster.memory_budget_bytes`, or leave the sample out of the dataset"
            }
            Self::GiantTokens { .. } => {
                "raise `train.giant_llm_tokens`, or set `train.giants` to `alone` or `defer`, or leave them out of the dataset"
            }
            Self::GiantMemory { .. } => {
                "raise `cluster.memory_budget_bytes`, or set `train.giants` to `alone`, or leave the sample out of the dataset"
            }
            Self::Memory { .. } => "raise `cluster.memory_budget_bytes` or `train.num_microbatches`",
            Self::SampleOverTokens { tokens, .. } => {
                return Some(format!(
                    "raise `train.bucket_tokens_max` to {tokens} or more, or leave the sample out of the dataset"
                ));
            }
            Self::Tokens { is_balanced: true, .. } => {
                "raise `train.bucket_tokens_max` or `train.num_microbatches`, or take fewer samples a step"
            }
            Self::Tokens { is_balanced: false, .. } => {
                "take an arm that keeps to the cap (balanced, ordered, shaped, aware), or raise `train.bucket_tokens_max`"
            }
            Self::NotSubmitted { .. } => "call `submit` once for each step and arm, then `take`",
            Self::Thread { .. } => return None,
            Self::Cost(error) => return error.hint(),
            Self::Balance(error) => return error.hint(),
            Self::Sim(error) => return error.hint(),
        };
        Some(text.to_owned())
    }
}
