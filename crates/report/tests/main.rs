//! The tests of the report, as one binary: each one more would be linked again.

#![allow(clippy::unwrap_used, reason = "a test may give up, its helpers too")]

mod loss;
mod model;
mod price;
mod rehearsed;
mod render;
mod shapes;
mod small;
mod soundness;
mod sweep;
