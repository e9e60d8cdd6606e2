//! The tests of the public functions, as one binary: each one more would link Arrow, Parquet and the tokenizers again.

#![allow(clippy::unwrap_used, reason = "a test may give up, its helpers too")]

mod columns;
mod demo;
mod diff;
mod fuzzed;
mod hostile;
mod loopback;
mod merge;
mod notices;
mod probe;
mod remote;
mod shapes;
mod shards;
mod table;
