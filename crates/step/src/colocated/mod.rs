//! Colocated layouts: every rank holds both components and takes one microbatch after another.
//!
//! What is balanced depends on when ranks wait for each other:
//!
//! - Without sharding, and with ZeRO-1 and ZeRO-2, they wait once a step. The sum of each rank's work is balanced, and each
//!   rank cuts its samples into as few microbatches as its memory allows.
//! - With ZeRO-3 they gather layers, and wait in each component of each microbatch. So both components of each microbatch
//!   are balanced.

mod by_phase;
mod cutting;
pub(crate) mod easing;
mod effort;
pub(crate) mod memory;
mod placing;
pub(crate) mod predict;
mod sharing;
