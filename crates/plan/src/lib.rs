//! Search: profiles and cluster in, ranked plans out.
//!
//! How many ranks the encoder should have, and how many the LLM backbone, depends on the data: on the mix of
//! texts, images and videos, batch by batch, and on what balancing makes of it. So a candidate is judged by
//! what will happen: [`search`] draws global batches from the data profile, has each filled by the very
//! [`StepScheduler`] that trains, simulates the step, and gives an [`Outcome`] with the best plans and the
//! reason why each other fell; [`explain`] puts it into words. [`batches::GlobalBatches`] says which samples
//! form the batch of a step, [`Prefetch`] computes schedules in a thread beside the training.
//!
//! *Not modelled*: tensor parallelism and encoder stages (their degrees stay at 1), colocated layouts,
//! recomputation, uneven layer cuts.
//!
//! *References*: DFLOP, arXiv 2603.25120, for the idea of planning by data; its algorithm takes the cost at
//! the mean sample, this one the mean of the cost. `docs/planner.md`.

mod arm;
mod aware;
pub mod batches;
mod bound;
mod caveats;
mod columns;
mod correction;
mod error;
mod evaluate;
mod feasible;
#[cfg(test)]
#[path = "../tests/fixture/mod.rs"]
mod fixture;
mod giants;
mod listing;
mod memory;
mod methods;
mod nodes;
mod outcome;
mod outlier;
mod placing;
mod predict;
mod prefetch;
mod ramp;
mod refine;
mod search;
mod settings;
mod shares;
mod sharing;
mod space;
mod step;
mod tokens;

pub use arm::{Arm, Method, ParseArmError};
pub use caveats::Caveats;
pub use correction::Correction;
pub use error::PlanError;
pub use giants::{GiantPolicy, GiantRule, ParseGiantPolicyError, giants};
pub use nodes::Traffic;
pub use outcome::{Outcome, StopReason, describe, explain};
pub use outlier::{Outlier, Outliers};
pub use predict::Coverage;
pub use prefetch::{JobKey, Prefetch, WallLimit};
pub use search::{NUM_RANKED, SearchInput, search};
pub use settings::StepSettings;
pub use space::{Candidate, layouts};
pub use step::{StepScheduler, Stop};
