//! What balanced batches would give a data-parallel trainer: simulated ways to deal out samples, a log of step times, the
//! code to add.

pub(crate) mod code;
pub(crate) mod estimate;
mod frameworks;
pub(crate) mod gains;
pub(crate) mod step_times;
pub(crate) mod ways;
