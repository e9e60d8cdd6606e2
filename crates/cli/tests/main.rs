//! The tests of the command, as one binary: each one more would link all of dflop again.

#![allow(clippy::unwrap_used, reason = "a test may give up, its helpers too")]

mod advise;
mod against;
mod browser;
mod common;
mod errors;
mod estimate_runs;
mod families;
mod from_run;
mod hostile;
mod named;
mod notices;
mod schedule;
mod session;
mod shapes;
mod stale;
mod watch;
mod what_if;
mod writes;
