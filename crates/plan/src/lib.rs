//! Search: profiles and cluster in, ranked plans out.
//!
//! How many ranks the encoder should have, and how many the LLM backbone, depends on the data: on the mix of texts,
//! images and videos in each batch, and on how well that mix can be balanced. So a candidate is judged by simulating
//! what training will do. [`search`] draws global batches from the data profile, has each filled by the very
//! [`StepScheduler`](dflop_step::StepScheduler) that trains, and simulates the step. Its [`Outcome`] has the best plans,
//! and for each other candidate the reason why it was not chosen; [`explain`] puts the outcome into words.
//!
//! *Not modelled*: what `dflop_step` does not model.
//!
//! *References*: DFLOP, arXiv 2603.25120, for the idea of planning by data. The paper's algorithm takes the cost of
//! the mean sample; this one takes the mean of the costs. `docs/planner.md` explains the search.

mod baseline;
mod batch_shapes;
mod bound;
mod caveats;
mod communication;
mod contender;
mod cut;
mod data_parallel;
mod detail;
mod end_cut;
mod error;
mod evaluate;
mod expert_groups;
mod explain;
mod facts;
mod fastest;
mod feasible;
mod fewer_ranks;
#[cfg(test)]
#[path = "../../step/tests/fixture/mod.rs"]
mod fixture;
mod found;
mod funnel;
mod hint;
mod input;
mod judge;
mod leaders;
mod megatron;
mod mend;
mod models;
mod objective;
mod only;
mod orders;
mod outcome;
mod packed;
mod paper;
mod parts;
mod pipelines;
mod rank_order;
mod rival;
mod rival_modes;
mod rivals;
mod rough;
mod run_memory;
mod search;
mod space;
mod way_out;
mod wide;
mod work_bound;

pub use baseline::{compare, data_parallel_of, refusal};
pub use caveats::Caveats;
pub use communication::{Communication, Sent, communication};
pub use data_parallel::{DataParallel, DataParallelStep};
pub use detail::{Detail, Spent, detail, spent};
pub use error::PlanError;
pub use explain::{describe, explain, gain};
pub use fewer_ranks::{FewerRanks, fewer_ranks};
pub use found::NUM_RANKED;
pub use input::{SearchEffort, SearchInput};
pub use mend::Mend;
pub use objective::{Objective, ParseObjectiveError};
pub use only::{Only, ParseOnlyError};
pub use outcome::{Outcome, StopReason};
pub use rival::Rival;
pub use run_memory::RunMemory;
pub use search::search;
pub use space::{Candidate, layouts};
pub use way_out::{Change, WayOut, way_out, why_no_candidate};
