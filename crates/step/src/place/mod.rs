//! Place: which samples form which microbatch on which replica, searched with the simulator.

pub(crate) mod columns;
pub(crate) mod nodes;
pub(crate) mod placement;
mod ramp;
mod refine;
pub(crate) mod search;
pub(crate) mod shares;
mod sharing;
