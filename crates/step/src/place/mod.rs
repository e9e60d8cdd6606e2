//! Place: which samples form which microbatch on which replica, searched with the simulator.

pub(crate) mod columns;
pub(crate) mod nodes;
mod ramp;
mod refine;
pub(crate) mod search;
pub(crate) mod shares;
pub(crate) mod sharing;
pub(crate) mod sides;
