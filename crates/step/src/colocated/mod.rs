//! Colocated layouts: every rank holds both components and takes one microbatch after another.
//!
//! What ranks wait for decides what is balanced. Where they meet once a step (no sharding, ZeRO-1, ZeRO-2) it is the sum
//! of a rank's work, and each rank cuts its samples into as few microbatches as its memory allows. Where they gather
//! layers (ZeRO-3) they meet in each component of each microbatch.

pub(crate) mod memory;
mod placing;
pub(crate) mod predict;
