//! The tests of the cost model, as one binary: each one more would be linked again.

#![allow(clippy::unwrap_used, reason = "a test may give up, its helpers too")]

mod adapters;
mod experts;
mod fixture;
mod gathered;
mod heap;
mod memory;
mod network;
mod predictions;
mod settings;
mod sharding;
mod two_encoders;
mod walk;
