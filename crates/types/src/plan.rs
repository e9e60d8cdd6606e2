//! The plan: the chosen layout, what it is expected to do, and why the others were not chosen.

use crate::artifact::{Artifact, MadeFrom};
use crate::component::{Component, Zero};
use crate::layout::Layout;
use crate::number::{counted, memory_size};
use crate::recipe::Trained;
use crate::recomputation::{Recomputation, Recompute};
use serde::{Deserialize, Serialize};
use std::fmt;

/// The order of forward and backward on each stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum PipelineOrder {
    /// All forwards, then all backwards.
    #[serde(rename = "gpipe")]
    GPipe,
    /// One forward, one backward, after a warm-up as deep as the stages that follow.
    #[serde(rename = "1f1b")]
    OneFOneB,
    /// 1F1B over several stages a rank, dealt round: less ramp for more messages.
    #[serde(rename = "interleaved-1f1b")]
    Interleaved,
    /// 1F1B with the backward split into gradients of inputs (I) and of weights (W), which fill the drain.
    #[serde(rename = "zero-bubble")]
    ZeroBubble,
    /// Lists made for each step from its predicted durations, within the memory cap.
    #[serde(rename = "data-aware")]
    DataAware,
}

impl fmt::Display for PipelineOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::GPipe => "gpipe",
            Self::OneFOneB => "1f1b",
            Self::Interleaved => "interleaved-1f1b",
            Self::ZeroBubble => "zero-bubble",
            Self::DataAware => "data-aware",
        })
    }
}

/// What a plan is expected to do, over sampled global batches that the real scheduler filled.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct PlanPrediction {
    /// Mean makespan of a step, in nanoseconds, optimizer and reduction included.
    pub step_ns_mean: u64,
    /// Half width of the 95 % confidence interval of that mean, in nanoseconds.
    pub step_ns_half_width: u64,
    /// Mean idle time over ranks x makespan.
    pub bubble_ratio: f64,
    /// Predicted peak of the fullest encoder rank, in bytes.
    pub encoder_memory_bytes_peak: u64,
    /// Predicted peak of the fullest LLM rank, in bytes.
    pub llm_memory_bytes_peak: u64,
    /// Share of predictions outside the measured range, from 0 to 1.
    pub extrapolated_ratio: f64,
    /// Number of predictions of which it is a share: one for each stage of each non-empty microbatch of each sampled
    /// batch.
    #[serde(default)]
    pub num_predictions: u64,
    /// Number of predictions outside the measured range.
    #[serde(default)]
    pub num_extrapolated: u64,
}

/// The reason why one way to run the global batches cannot run on these ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "cause", rename_all = "snake_case")]
pub enum Refusal {
    /// A rank would need more than its budget.
    Memory {
        /// What the fullest rank needs over all global batches, in bytes.
        needed_bytes: u64,
        /// The budget, in bytes.
        budget_bytes: u64,
    },
    /// A bucket would hold more LLM tokens than it may.
    BucketTokens {
        /// Tokens of the fullest bucket over all global batches.
        needed_tokens: u64,
        /// The cap, in LLM tokens.
        bucket_tokens_max: u64,
    },
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory { needed_bytes, budget_bytes } => write!(
                f,
                "does not fit: a rank needs {}, memory budget {}",
                memory_size(*needed_bytes),
                memory_size(*budget_bytes)
            ),
            Self::BucketTokens { needed_tokens, bucket_tokens_max } => write!(
                f,
                "passes the cap: a bucket has {needed_tokens} LLM tokens, `bucket_tokens_max` is {bucket_tokens_max}"
            ),
        }
    }
}

/// One way to run the global batches that a plan was judged on: ours, or a baseline.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WayPrediction {
    /// Its name: an arm of `dflop train`, or a way of data parallelism, which this version simulates and does not
    /// train.
    pub way: String,
    /// Whether it is a baseline: a way that does not look at predicted times.
    pub is_baseline: bool,
    /// Microbatches of a step on each replica. For a baseline, the fastest of the numbers tried.
    pub num_microbatches: u32,
    /// Mean makespan over the global batches, in nanoseconds; `None` where it cannot run all of them.
    pub step_ns_mean: Option<u64>,
    /// Why it cannot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refusal: Option<Refusal>,
}

impl WayPrediction {
    /// The baseline with the shortest step among those that can run; `None` if none can.
    pub fn best_baseline(ways: &[Self]) -> Option<(&Self, u64)> {
        let runs = ways.iter().filter(|way| way.is_baseline).filter_map(|way| Some((way, way.step_ns_mean?)));
        runs.min_by_key(|(_, ns)| *ns)
    }
}

/// What people run today, or our balance in it, with the best of its own search on the global batches and the ranks of a plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RivalPrediction {
    /// Its name, for example `megatron`.
    pub name: String,
    /// Whether it is other people's work; `false` for our balance in their layouts.
    pub is_of_others: bool,
    /// Its layout and what it recomputes, in words; empty where nothing of it fits.
    pub layout: String,
    /// Microbatches of a step on each replica.
    pub num_microbatches: u32,
    /// Mean makespan over the global batches, in nanoseconds; `None` where nothing of it fits.
    pub step_ns_mean: Option<u64>,
}

/// A candidate that fits, with what it is expected to do.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct RankedPlan {
    /// Degrees of both components.
    pub layout: Layout,
    /// Microbatches of a step, on each LLM replica.
    pub num_microbatches: u32,
    /// Order of actions. A colocated layout has no pipeline: each rank takes one microbatch after another.
    pub pipeline_order: PipelineOrder,
    /// What the layers of each component recompute in the backward.
    #[serde(default, skip_serializing_if = "crate::layout::is_default")]
    pub recompute: Recomputation,
    /// Whether each microbatch recomputes only as much as its memory asks for, and `recompute` is the most that any does.
    #[serde(default, skip_serializing_if = "crate::layout::is_default")]
    pub is_eased: bool,
    /// What it is expected to do.
    pub prediction: PlanPrediction,
}

/// Why a candidate cannot be the plan.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(tag = "cause", rename_all = "snake_case")]
pub enum Rejection {
    /// More pipeline stages than layers.
    StagesExceedLayers {
        /// What is cut; plans of early versions name none, and mean the LLM backbone.
        #[serde(default = "Component::llm", skip_serializing_if = "Component::is_llm")]
        component: Component,
        /// Stages asked for.
        stages: u32,
        /// Layers there are.
        layers: u32,
    },
    /// More chunks of all pipeline ranks than layers of the LLM backbone.
    ChunksExceedLayers {
        /// Pipeline ranks asked for.
        pp: u32,
        /// Chunks of each of them.
        chunks: u32,
        /// Layers there are.
        layers: u32,
    },
    /// More layers of each stage shall recompute than any stage has.
    RecomputeExceedsStage {
        /// Whose layers.
        component: Component,
        /// The mode asked for, with the number of its layers.
        mode: Recompute,
        /// Layers of the largest stage.
        layers: u32,
    },
    /// Ranks that share layers would stand on several nodes.
    GroupAcrossNodes {
        /// Ranks of a node.
        ranks_per_node: u32,
    },
    /// A rank would need more than its budget.
    Memory {
        /// The component whose rank is over.
        component: Component,
        /// Smallest need over the candidates counted here as they were tried, in bytes. It is no lower bound: other layouts of as
        /// many ranks, which were not tried, may need less.
        needed_bytes: u64,
        /// The budget, in bytes.
        budget_bytes: u64,
    },
    /// Fewer samples than buckets.
    TooFewSamples {
        /// Samples of the global batch.
        global_batch_size: u32,
        /// Smallest number of buckets over the candidates counted here.
        buckets: u32,
    },
    /// A lower bound on its step is above the step of every plan in the ranking.
    Bound,
    /// It is estimated slower than the candidates that were judged, and so was not judged itself.
    Estimate,
    /// A global batch cannot be put into its buckets within the cap on LLM tokens.
    BucketTokens {
        /// Tokens of the fullest bucket at best, the smallest over the candidates counted here.
        needed_tokens: u64,
        /// The cap, in LLM tokens.
        bucket_tokens_max: u64,
    },
}

impl fmt::Display for Rejection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::StagesExceedLayers { component: Component::Encoder, stages, layers: 1 } => {
                write!(f, "encoder pp {stages}, but the encoder is one stage: it cannot be cut into several")
            }
            Self::StagesExceedLayers { component, stages, layers } => {
                let whole = if component.is_llm() { "LLM backbone" } else { "encoder" };
                write!(f, "{component} pp {stages} exceeds the {layers} layers of the {whole}")
            }
            Self::ChunksExceedLayers { pp, chunks, layers } => {
                write!(f, "llm pp {pp} x interleave {chunks} exceeds the {layers} layers of the LLM backbone")
            }
            Self::RecomputeExceedsStage { component, mode, layers } => write!(
                f,
                "{component} recompute `{mode}` exceeds the {layers} layers that a stage has at most"
            ),
            Self::GroupAcrossNodes { ranks_per_node } => {
                write!(f, "a tensor group would stand on two nodes of {ranks_per_node} ranks")
            }
            Self::Memory { component, needed_bytes, budget_bytes } => write!(
                f,
                "{component} rank does not fit: the least that was tried needs {}, memory budget is {}",
                memory_size(*needed_bytes),
                memory_size(*budget_bytes)
            ),
            Self::TooFewSamples { global_batch_size, buckets } => write!(
                f,
                "{buckets} or more microbatches over all replicas, but a global batch of {}",
                counted((*global_batch_size).into(), "sample")
            ),
            Self::BucketTokens { needed_tokens, bucket_tokens_max } => write!(
                f,
                "too few buckets for a global batch: the fullest needs {needed_tokens} or more LLM tokens, `bucket_tokens_max` is {bucket_tokens_max}"
            ),
            Self::Bound => f.write_str(
                "certainly slower than the plans listed here: even the lower bound of the step is longer",
            ),
            Self::Estimate => {
                f.write_str("estimated slower than the candidates that were judged, so not judged")
            }
        }
    }
}

/// A cause with the number of candidates it rejected.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RejectionCount {
    /// The cause, with the value nearest to fitting.
    #[serde(flatten)]
    pub rejection: Rejection,
    /// Candidates it rejected.
    pub count: u64,
}

/// The most buckets (microbatches times LLM replicas). With this limit a slip, such as -1 read as an unsigned number,
/// is an error and not a huge allocation.
pub const BUCKETS_MAX: u32 = 1 << 20;

impl RankedPlan {
    /// The layout, the microbatches and the order for people, for example `encoder tp 1 pp 1 dp 1, llm tp 1 pp 1 dp 1, 4
    /// microbatches, 1f1b`. What is as in a plain pipeline is not said.
    ///
    /// # Examples
    /// ```
    /// use dflop_types::{Layout, PipelineOrder, PlanPrediction, RankedPlan, Recomputation, Recompute, Zero};
    /// let plan = RankedPlan {
    ///     layout: Layout::colocated(8, Zero::Gradients),
    ///     num_microbatches: 4,
    ///     pipeline_order: PipelineOrder::OneFOneB,
    ///     recompute: Recomputation::both(Recompute::Full),
    ///     is_eased: false,
    ///     prediction: PlanPrediction::default(),
    /// };
    /// assert_eq!(
    ///     plan.in_words(),
    ///     "colocated tp 1 dp 8, zero 2 (encoder and LLM on every rank, optimizer states and gradients sharded), at most 4 \
    ///      microbatches a rank, recompute full"
    /// );
    /// ```
    pub fn in_words(&self) -> String {
        let (layout, num_microbatches) = (self.layout, self.num_microbatches);
        let noun = if num_microbatches == 1 { "microbatch" } else { "microbatches" };
        let recompute = match (self.recompute.is_none(), self.is_eased) {
            (true, _) => String::new(),
            (false, false) => format!(", recompute {}", self.recompute),
            (false, true) => {
                format!(", recompute at most {}, in each microbatch as memory asks", self.recompute)
            }
        };
        let zero = layout.zero;
        if layout.is_colocated() {
            let held = format!("encoder and LLM on every rank, {zero}");
            return format!("{layout} ({held}), at most {num_microbatches} {noun} a rank{recompute}");
        }
        let sharded = if zero == Zero::Nothing { String::new() } else { format!(" ({zero})") };
        format!("{layout}{sharded}, {num_microbatches} {noun}, {}{recompute}", self.pipeline_order)
    }
}

/// The most ranks of a plan, likewise.
const RANKS_MAX: u128 = 1 << 20;

impl RankedPlan {
    /// Adds what is wrong with the part `name` of a plan.
    fn check(&self, name: &str, problems: &mut Vec<String>) {
        let mut num_ranks = 0;
        for (component, degrees) in [("encoder", self.layout.encoder), ("llm", self.layout.llm)] {
            for (degree_name, degree) in [
                ("tensor_parallel_degree", degrees.tp),
                ("pipeline_parallel_degree", degrees.pp),
                ("data_parallel_degree", degrees.dp),
            ] {
                if degree == 0 {
                    problems.push(format!("{name}.layout.{component}.{degree_name}: must not be 0"));
                }
            }
            let of_component = u128::from(degrees.tp) * u128::from(degrees.pp) * u128::from(degrees.dp);
            num_ranks = if self.layout.is_colocated() { of_component } else { num_ranks + of_component };
        }
        self.layout.check(&format!("{name}.layout"), problems);
        if self.num_microbatches == 0 {
            problems.push(format!("{name}.num_microbatches: must not be 0"));
        }
        if num_ranks > RANKS_MAX {
            problems.push(format!("{name}.layout: takes {num_ranks} ranks, at most {RANKS_MAX}"));
        }
        let num_buckets = u64::from(self.num_microbatches) * u64::from(self.layout.llm.dp);
        if num_buckets > BUCKETS_MAX.into() {
            let what = "microbatches of all LLM replicas";
            problems
                .push(format!("{name}.num_microbatches: makes {num_buckets} {what}, at most {BUCKETS_MAX}"));
        }
    }
}

/// What a plan was chosen from, and what it was held to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SearchedSpace {
    /// Number of all candidates: the plan, its runners-up, and all that were not chosen.
    pub num_candidates: u64,
    /// Bytes one rank may use; `None`: memory was not limited.
    pub memory_budget_bytes: Option<u64>,
    /// Whether the configuration gives that budget; else it is a share of the device's memory.
    pub is_budget_given: bool,
    /// Samples of the largest global batch that was judged: fewer than `global_batch_size` if the data has fewer. `None` in
    /// plans of earlier versions, which do not say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub num_samples: Option<u32>,
    /// Ranks of the cluster that the plan leaves free: the last ones.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub num_free_ranks: u32,
    /// Ranks of a node of the cluster. `None` in plans of earlier versions, which do not say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ranks_per_node: Option<u32>,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
const fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// The chosen layout and its prediction, the runners-up, and why the others were not chosen.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Hashes of what it was made from: `data_profile`, `model_profile`, `model_config`.
    pub made_from: MadeFrom,
    /// Samples of a global batch.
    pub global_batch_size: u32,
    /// Seed of the sampled global batches.
    pub seed: u64,
    /// Global batches each candidate was judged on.
    pub num_sampled_batches: u32,
    /// What trains: times and memory are of that.
    #[serde(default, skip_serializing_if = "Trained::is_all")]
    pub trained: Trained,
    /// What to run.
    pub best: RankedPlan,
    /// The same global batches on the same ranks in every way that was compared, ours among them.
    #[serde(default)]
    pub ways: Vec<WayPrediction>,
    /// What people run today, where the search was asked to compare with it (`dflop plan --compare`).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rivals: Vec<RivalPrediction>,
    /// The next best, by step time.
    pub runners_up: Vec<RankedPlan>,
    /// Why others were not chosen.
    pub rejections: Vec<RejectionCount>,
    /// What it was chosen from; `None` in plans of early versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub searched: Option<SearchedSpace>,
}

impl Artifact for Plan {
    const KIND: &'static str = "plan";
    const FORMAT_VERSION: u32 = 1;
    const MEND: &'static str = "dflop plan";

    fn made_from(&self) -> &MadeFrom {
        &self.made_from
    }

    fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        let runners_up = self.runners_up.iter().enumerate();
        let named = runners_up.map(|(at, ranked)| (format!("runners_up[{at}]"), ranked));
        for (name, ranked) in std::iter::once(("best".to_owned(), &self.best)).chain(named) {
            ranked.check(&name, &mut problems);
        }
        if self.global_batch_size == 0 {
            problems.push("global_batch_size: must not be 0".to_owned());
        }
        problems
    }
}
