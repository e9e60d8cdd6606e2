//! Lists: the actions of every rank, in an order made for the durations of one step.

mod greedy;
mod least;
mod making;
mod search;
mod turns;
pub(crate) mod within;

pub use making::{EFFORT, Holding, data_aware, data_aware_within, makespan_min_ns, simulate_pipeline};
