//! The tests of one step, as one binary: each one more would be linked again.

#![allow(clippy::unwrap_used, reason = "a test may give up, its helpers too")]

mod adapt;
mod arms;
mod colocated;
#[path = "../../sim/tests/common/mod.rs"]
mod common;
mod eased;
mod encoder_stages;
mod fixture;
mod giants;
mod interleaved;
mod lists;
mod parts;
mod rank_order;
#[path = "fixture/scheduling.rs"]
mod scheduling;
mod slow_shapes;
mod step;
mod tokens;
mod whole_encoders;
