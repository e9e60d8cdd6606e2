//! Prepare: one global batch in, the schedule of one step out.
//!
//! A global batch is uneven: texts, images and videos take times that differ a hundredfold, and every rank waits for
//! the fullest one. [`StepScheduler`] decides which sample goes into which microbatch on which replica, and in which
//! order each rank works. Samples are placed (`place`), action lists are made for the step ([`lists`]), and the result
//! is judged by its predicted time and memory (`judge`). An [`Arm`] says how much of that is done, so that the ways to
//! schedule can be compared. [`batches::GlobalBatches`] says which samples form the batch of a step. [`Prefetch`]
//! computes schedules in a thread beside the training. The planner and the training use the same code.
//!
//! See `docs/step.md`.
//!
//! *References*: DFLOP, arXiv 2603.25120, for balancing both components by predicted time.

mod abilities;
mod adapt;
mod arm;
mod aware;
pub mod batches;
mod colocated;
mod costs;
mod error;
#[cfg(test)]
#[path = "../tests/fixture/mod.rs"]
mod fixture;
mod giants;
mod groups;
mod judge;
pub mod lists;
mod methods;
mod openings;
mod place;
mod prefetch;
mod scheduler;
mod settings;
mod slow_shapes;
mod tokens;

pub use abilities::{PIPELINE_SHARDINGS, encoder_stages_max, expert_degrees, tensor_degrees};
pub use adapt::adjustment::{Adjustment, RowFactor, ShapeFactor};
pub use adapt::bins::ShapeBins;
pub use adapt::correction::{Correction, CorrectionState};
pub use adapt::fit::{BinExcess, Excess};
pub use adapt::live::Live;
pub use adapt::packs::Pack;
pub use adapt::rows::Sum;
pub use adapt::shape_times::{ShapeTime, ShapeTimes};
pub use adapt::tail::Tail;
pub use adapt::watch::{Alarm, Cause, Watch};
pub use arm::{Arm, Method, ParseArmError};
pub use colocated::easing::{Eased, Easing};
pub use error::StepError;
pub use giants::{GiantPolicy, GiantRule, ParseGiantPolicyError, giants};
pub use judge::critical::Link;
pub use judge::outlier::{Outlier, Outliers};
pub use judge::predict::Coverage;
pub use judge::timeline::Judgement;
pub use openings::openings;
pub use place::nodes::Traffic;
pub use prefetch::{Answer, Job, JobKey, Prefetch, WallLimit};
pub use scheduler::{Pair, StepScheduler, Stop};
pub use settings::StepSettings;
pub use slow_shapes::SlowShapes;
pub use tokens::check_samples;
