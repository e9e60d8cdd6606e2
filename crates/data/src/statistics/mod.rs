//! Statistics: what the samples of a profile come to, and how two profiles differ.

pub mod diff;
pub mod estimate;
pub mod summary;
pub mod tally;
