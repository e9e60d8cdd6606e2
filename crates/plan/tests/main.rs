//! The tests of the search, as one binary: each one more would be linked again.

#![allow(clippy::unwrap_used, reason = "a test may give up, its helpers too")]

mod asked;
mod baseline;
mod colocated;
mod communication;
mod experts;
mod explain;
mod fewer_ranks;
#[path = "../../step/tests/fixture/mod.rs"]
mod fixture;
#[path = "../examples/mixes/mod.rs"]
mod mixes;
mod orders;
mod properties;
mod recompute;
mod run_memory;
mod search;
mod tokens;
mod way_out;
mod whole_encoders;
mod wide;
