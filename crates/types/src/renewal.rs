//! Renewal: a model profile whose times were brought up to date by the steps of a run.

use serde::{Deserialize, Serialize};

/// What the times of a component were multiplied by, in thousandths.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RenewedTimes {
    /// Of forwards.
    pub forward_permille: u32,
    /// Of whole backwards.
    pub backward_permille: u32,
    /// Of the first halves of backwards (I).
    pub input_permille: u32,
    /// Of the second halves (W).
    pub weight_permille: u32,
}

/// Where the times of a renewed model profile come from: a run's steps, on top of the profile that the run was planned with.
///
/// Spans do not tell modules of a component apart, so all of them take the same factors, and curves keep their form. Memory,
/// links, reduction and optimizer stay as they were.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Renewal {
    /// Steps that were looked at.
    pub num_steps: u64,
    /// The last of them.
    pub last_step: u64,
    /// Of the encoder's modules.
    pub encoder: RenewedTimes,
    /// Of the LLM backbone's.
    pub llm: RenewedTimes,
}
