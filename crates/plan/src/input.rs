//! What a search is asked: the data, the model, the cluster, and how hard to look.

use crate::objective::Objective;
use crate::only::Only;
use dflop_step::GiantRule;
use dflop_types::{Cluster, MadeFrom, ModelProfile, PipelineOrder, SampleShape, Trained};
use std::fmt;
use std::sync::Arc;

/// What a search is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Depth {
    /// One step, to compare another plan with.
    Step,
    /// A plan.
    Plan,
    /// A plan, and all that explains it.
    Explained,
}

/// How many candidates a search judges with the scheduler and the simulator.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum SearchEffort {
    /// Only candidates that a rough estimate puts in front: seconds for a thousand ranks.
    #[default]
    Quick,
    /// All candidates that a certified bound does not rule out: minutes for 64 ranks.
    Whole,
}

/// What a search needs.
#[derive(Clone)]
pub struct SearchInput<'a> {
    /// Shapes of the data profile, by sample index.
    pub shapes: Arc<[SampleShape]>,
    /// What the model was measured to take.
    pub model_profile: &'a ModelProfile,
    /// What may be used.
    pub cluster: Cluster,
    /// Samples of a global batch, at least 1.
    pub global_batch_size: u32,
    /// Microbatches of a step on each LLM replica; `None`: the search chooses.
    pub num_microbatches: Option<u32>,
    /// What is done with giants.
    pub giants: GiantRule,
    /// The most LLM tokens of a bucket (microbatch x LLM replica); `None`: no cap.
    pub bucket_tokens_max: Option<u64>,
    /// Order of actions of pipelines; `None`: the search chooses.
    pub order: Option<PipelineOrder>,
    /// Whether plans are ranked by their mean step or by their slow ones.
    pub objective: Objective,
    /// Global batches each candidate is judged on, at least 1; one alone gives no confidence interval.
    pub num_sampled_batches: u32,
    /// Steps of the run. A plan must fit all global batches of the run, and at least those of one epoch.
    pub num_steps: u64,
    /// Which parts of the model are trained.
    pub trained: Trained,
    /// The candidates to which the search is restricted.
    pub only: Only,
    /// Whether the rivals (what people run today, such as Megatron and FSDP) are searched too, for a comparison.
    pub compares: bool,
    /// How many candidates are judged.
    pub effort: SearchEffort,
    /// Asked now and then, on several threads; `true` ends the search with the best plan so far.
    pub halt: &'a (dyn Fn() -> bool + Sync),
    /// Seed of the sampled global batches and of their schedules.
    pub seed: u64,
    /// Hashes of the files that the search reads; the plan carries them on.
    pub made_from: MadeFrom,
    /// Called with candidates done and candidates in all, as the search goes on.
    pub progress: &'a (dyn Fn(u64, u64) + Sync),
}

impl SearchInput<'_> {
    /// The order under which all pipelines are judged. Where none is asked for, the best are judged under others later.
    pub(crate) fn first_order(&self) -> PipelineOrder {
        self.order.unwrap_or(PipelineOrder::OneFOneB)
    }

    pub(crate) fn memory_budget_bytes(&self) -> Option<u64> {
        self.model_profile.memory_budget_bytes(self.cluster.memory_budget_bytes)
    }
}

impl fmt::Debug for SearchInput<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SearchInput")
            .field("num_samples", &self.shapes.len())
            .field("cluster", &self.cluster)
            .field("global_batch_size", &self.global_batch_size)
            .field("num_microbatches", &self.num_microbatches)
            .field("giants", &self.giants)
            .field("bucket_tokens_max", &self.bucket_tokens_max)
            .field("order", &self.order)
            .field("objective", &self.objective)
            .field("num_sampled_batches", &self.num_sampled_batches)
            .field("num_steps", &self.num_steps)
            .field("trained", &self.trained)
            .field("only", &self.only)
            .field("effort", &self.effort)
            .field("seed", &self.seed)
            .finish_non_exhaustive()
    }
}
