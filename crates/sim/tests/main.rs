//! The tests of the simulator, as one binary: each one more would be linked again.

#![allow(clippy::unwrap_used, reason = "a test may give up, its helpers too")]

mod closed_forms;
mod colocated;
mod common;
mod document;
mod interleaved;
mod invariants;
mod step;
mod torch_orders;
mod trace;
