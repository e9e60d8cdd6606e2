//! The nouns of dflop: what every other crate reads and hands on, and no verb.
//!
//! A multimodal sample may be a line of text or a 32-frame video. dflop measures what each costs,
//! chooses a layout for the encoder and one for the LLM backbone, and packs every global batch into
//! balanced microbatches. These are the words it does that with; one word, one meaning.
//!
//! | word | meaning | type |
//! |---|---|---|
//! | sample | one training example: text with images, video or audio | [`SampleIndex`] |
//! | shape | the sizes of a sample that decide its cost | [`SampleShape`] |
//! | segment | a piece of a sample that the encoder reads with no attention to the rest: a tile, a frame | [`EncoderSegments`] |
//! | encoder token | one patch (or audio frame) the encoder reads | |
//! | feature token | one LLM position that the encoder fills | |
//! | LLM token | one position the LLM backbone reads, text or feature | |
//! | label token | an LLM token that carries loss | |
//! | global batch | the samples of one optimizer step, over all replicas | |
//! | microbatch | samples that pass the pipeline together on one replica | [`Schedule`] |
//! | component | encoder (with its projector) or LLM backbone | [`Component`] |
//! | boundary | the hand-over of features from encoder to LLM backbone | |
//! | stage | consecutive layers of one component on one pipeline rank, the encoder's first | [`StageIndex`] |
//! | chunk | one of the stages of a pipeline rank that holds several: interleaved | `llm_interleave` |
//! | rank | one process with one device | [`Rank`] |
//! | role | what a rank holds: the encoder, a stage of it, or a stage of the LLM backbone | |
//! | degree | how many ways a component is split: `tp`, `pp`, `dp` | [`ComponentLayout`] |
//! | cut | how many layers each stage of a component holds | [`LayerCut`] |
//! | replica | all ranks that together hold one copy of a component | |
//! | layout | the degrees of both components, and where they sit | [`Layout`] |
//! | colocated | every rank holds both components: data parallelism | [`Placement`] |
//! | sharded | replicas keep a piece each of states, gradients or parameters | [`Zero`] |
//! | shard | what one replica keeps of a sharded component; of a dataset: one of its files, as the formats call it | |
//! | place | where a record stands in its source; an epoch has positions, a rank coordinates, a text placeholders | [`Place`] |
//! | problem | what is wrong with a sample or a configuration, with its place | [`Problem`] |
//! | violation | a rule that a step or its durations break, in the simulator | |
//! | cluster | devices and their memory budget | [`Cluster`] |
//! | profile | what was measured | [`DataProfile`], [`ModelProfile`] |
//! | plan | the chosen layout, number of microbatches, pipeline order and the prediction | [`Plan`] |
//! | rejection | why a candidate cannot be the plan | [`Rejection`] |
//! | part | the smallest run of encoder segments whose features are made of them alone: an image, a frame | [`EncoderParts`] |
//! | share | some parts of a sample, encoded on one replica; of a sum or a size we say fraction or ratio | [`EncoderShare`] |
//! | rectangle | what a rank holds of a parameter that is cut, in a checkpoint | |
//! | schedule | for one global batch: which samples form which microbatch on which replica, in order | [`Schedule`] |
//! | arm | a way to make the schedule of a step, for comparisons: `blind`, `aware-ahead`; `train.schedule` names one | |
//! | giant | a sample that does not fit a rank beside the microbatches that are usually in flight | |
//! | pipeline order | the order of forward and backward on each stage | [`PipelineOrder`] |
//! | action | one cell: stage, letter, microbatch; `2F0` as PyTorch writes it | [`Action`] |
//! | span, timeline | an action with start and end; all spans of a step | [`Span`], [`Timeline`] |
//! | makespan | first start to last end in a step | |
//! | bubble | idle time of a rank within the makespan, by cause | [`Idle`] |
//!
//! Units stand last in a name (`_ns`, `_bytes`, `_tokens`, `_ratio`). Times are integer nanoseconds, so
//! that equal runs are equal bit by bit. [`artifact`] opens and writes the files that hold these types, [`number`]
//! writes numbers for people, and [`statistics`] has the quantiles and intervals that several crates tell.

pub mod artifact;
mod cluster;
mod component;
mod cut;
mod data_profile;
mod family;
mod index;
mod layout;
mod model_profile;
mod neighbour;
pub mod number;
mod plan;
mod recipe;
mod recomputation;
pub mod regular;
mod renewal;
mod schedule;
mod shape;
pub mod statistics;
mod text;
mod timeline;

pub use artifact::{Artifact, ArtifactError, Hint, MadeFrom};
pub use cluster::Cluster;
pub use component::{Component, ComponentLayout, Placement, RankOrder, Zero};
pub use cut::{LayerCut, cut_layers};
pub use data_profile::{
    DataProfile, DatasetHasher, Fault, Place, Problem, ProfileHasher, ProfilePart, ProfiledSample,
    SampleKind, SourceFile, Stratum,
};
pub use family::{FAMILIES, FamilyRecord};
pub use index::{Rank, SampleIndex, StageIndex};
pub use layout::{Coordinates, Layout};
pub use model_profile::{
    Collective, Device, ExpertsProfile, LinkProfile, LinkSpan, MeasuredCurve, MeasuredPoint, MemoryReserve,
    MessagePoint, ModelProfile, ModuleProfile, Network, RecomputePoint, SplitBytes, Variant,
};
pub use neighbour::Neighbour;
pub use number::{counted, memory_size, thousands};
pub use plan::{
    BUCKETS_MAX, PipelineOrder, Plan, PlanPrediction, RankedPlan, Refusal, Rejection, RejectionCount,
    RivalPrediction, SearchedSpace, WayPrediction,
};
pub use recipe::{Recipe, Trained};
pub use recomputation::{ParseRecomputeError, Recomputation, Recompute};
pub use renewal::{Renewal, RenewedTimes};
pub use schedule::{EncoderShare, Schedule, ScheduleError};
pub use shape::{EncoderParts, EncoderSegments, MicrobatchShape, PartRange, SampleShape, Tower, TowerTokens};
pub use text::{clipped, printable, printable_lines, shown, shown_lines, without_secrets};
pub use timeline::{Action, ActionKind, Idle, ParseActionError, Span, Timeline};
