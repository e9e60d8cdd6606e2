//! The tests of the scheduler, as one binary: each one more would be linked again.

#![allow(clippy::unwrap_used, reason = "a test may give up, its helpers too")]

mod baselines;
mod examples;
mod invariants;
mod meets;
mod oracle;
mod padded;
