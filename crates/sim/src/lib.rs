//! Simulate: durations and action lists in, a timeline out.
//!
//! A pipeline of ranks is never as fast as its busiest rank: it fills, drains, waits for uneven microbatches and for
//! data under way. Durations alone do not show how much each of these costs. This crate simulates one step:
//! [`simulate`] for one pipeline given as [`Durations`], [`simulate_step`] for a whole layout with encoder and LLM
//! replicas given as [`StepInput`]. Both give a [`Timeline`] with the makespan, every span, and the idle time split
//! into ramp, imbalance, transfer and data wait. [`order::actions`] gives the action lists: the simulator times the same
//! lists that the runtime runs. Lists made for the durations of one step come from `dflop_step::lists`. [`idle_of`]
//! splits a measured step by the same causes, and [`perfetto`] draws both steps one above the other. [`Simulator`] is for
//! searches that time one step many times.
//!
//! # Examples
//! ```
//! use dflop_sim::{Durations, simulate};
//! use dflop_types::PipelineOrder;
//!
//! // 2 stages, 3 microbatches, forward 1 us, backward 2 us everywhere.
//! let durations = Durations {
//!     forward_ns: vec![vec![1_000; 3]; 2],
//!     backward_ns: vec![vec![2_000; 3]; 2],
//!     transfer_ns: 0,
//!     ..Durations::default()
//! };
//! let timeline = simulate(&durations, PipelineOrder::OneFOneB)?;
//! assert_eq!(timeline.makespan_ns, (3 + 2 - 1) * (1_000 + 2_000));
//! assert_eq!(timeline.idle_ns.ramp, 2 * (2 - 1) * (1_000 + 2_000));
//! assert_eq!(timeline.idle_ns.total_ns(), timeline.idle_ns.ramp);
//! # Ok::<(), dflop_sim::SimError>(())
//! ```
//!
//! # Not modelled
//! Contention between transfers (each takes `transfer_ns` and occupies no rank), bytes, noise, tensor parallelism (a
//! rank stands for its group), and overlap of the reduction with the backward. See `docs/simulator.md`.
//!
//! # References
//! "DFLOP: A Data-driven Framework for Multimodal LLM Training Pipeline Optimization", SIGMOD 2026,
//! DOI 10.1145/3802037, for what uneven microbatches cost.

// The document's Rust example is a test.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/simulator.md")]
struct Document;

mod bubble;
mod durations;
mod engine;
mod error;
mod lists;
pub mod order;
mod patch;
mod rows;
mod simulator;
mod step;
mod swap;
mod trace;
pub mod wiring;

pub use bubble::{durations_of, idle_of, measured_lists, measured_timeline};
pub use durations::Durations;
pub use engine::Opening;
pub use error::{SimError, Violation};
pub use patch::MicrobatchDurations;
pub use simulator::Simulator;
pub use step::StepInput;
pub use trace::perfetto;

use dflop_types::{Action, PipelineOrder, Timeline};

/// The timeline of one pipeline: p stages on p ranks, stage s on rank s.
///
/// Each action starts as soon as its rank is free and its input has arrived. Transfers take `transfer_ns` and
/// do not occupy the rank. 0 microbatches give an empty timeline.
/// Data-aware lists are not made here: a data-aware order is simulated as 1F1B, as in [`order::actions`].
///
/// *Complexity*: O(p m).
///
/// # Errors
/// [`SimError::Unsound`] with every violation of `durations`, zero-bubble without times of I and W and interleaved
/// stages (see [`simulate_interleaved`]) among them; [`SimError::Overflow`].
pub fn simulate(durations: &Durations, order: PipelineOrder) -> Result<Timeline, SimError> {
    Simulator::of_pipeline(durations, order).map(|mut simulator| simulator.timeline())
}

/// The timeline of one pipeline under interleaved 1F1B. Its p stages are dealt round over `num_ranks`: stage s is on rank
/// s modulo `num_ranks`.
///
/// An output that stays on its rank takes no transfer. *Complexity*: O(p m).
///
/// # Errors
/// As [`simulate`], and those of [`order::interleaved`].
pub fn simulate_interleaved(durations: &Durations, num_ranks: u32) -> Result<Timeline, SimError> {
    Simulator::interleaved(durations, num_ranks).map(|mut simulator| simulator.timeline())
}

/// The timeline of one step of a layout with encoder and LLM replicas.
///
/// Within a replica, a forward waits for the stage before and a backward for the stage after. Over the boundary, a
/// forward of the first LLM stage waits for every encoder replica that feeds it in this microbatch. A backward of the last
/// encoder stage waits for every LLM replica that it feeds. After its last action a rank waits for all ranks of its
/// component; then each takes its tail (reduction and optimizer). The makespan ends with the last tail. Spans hold the
/// actions alone, so that idle time + spans + tails = ranks x makespan.
///
/// *Complexity*: O(actions + pairs that feed each other).
///
/// # Errors
/// [`SimError::Unsound`] with every violation of `input`, [`SimError::Overflow`].
pub fn simulate_step(input: &StepInput) -> Result<Timeline, SimError> {
    Simulator::new(input).map(|mut simulator| simulator.timeline())
}

/// As [`simulate_step`], with the action list of each rank in place of the pipeline order.
///
/// # Errors
/// [`SimError::Unsound`] with every violation of `input` or of `lists` (each rank must run `F`, and `B` or `I` and `W`,
/// of each microbatch of its stage once), [`SimError::Deadlock`] if they make ranks wait in a circle,
/// [`SimError::Overflow`].
pub fn simulate_lists(input: &StepInput, lists: &[Vec<Action>]) -> Result<Timeline, SimError> {
    Simulator::with_lists(input, lists).map(|mut simulator| simulator.timeline())
}
