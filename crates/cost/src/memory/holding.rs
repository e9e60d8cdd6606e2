//! What the profile of the device says about memory, apart from the modules.

use crate::error::CostError;
use dflop_types::{MemoryReserve, ModelProfile};

/// How messages are held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Buffers {
    /// Whether what was sent is held to the end of the step, or only until the next message goes.
    pub(crate) keeps_sent: bool,
    /// Whether rows are copied into messages and out of them.
    pub(crate) copies_rows: bool,
}

/// What the profile of the device says about memory, apart from the modules.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Holding {
    pub(crate) optimizer_bytes_per_parameter: u64,
    /// `None`: as many as a parameter has.
    pub(crate) gradient_bytes_per_parameter: Option<u64>,
    /// With gloo a rank knows that a message has left only if it waits for it, and the runtime waits at the end of the step.
    keeps_sent: bool,
    /// Whether collectives run while the device computes. With gloo the same cores do both.
    pub(crate) sends_beside_work: bool,
    /// Whether an fp32 master copy of the parameters is among the optimizer's states.
    pub(crate) has_masters: bool,
    pub(crate) reserve: MemoryReserve,
}

impl Holding {
    /// The memory of a profile's device.
    ///
    /// # Errors
    /// [`CostError::Dtype`].
    pub(crate) fn new(profile: &ModelProfile) -> Result<Self, CostError> {
        // Two fp32 moments of AdamW, and an fp32 master copy beside bfloat16 parameters.
        let optimizer_bytes_per_parameter = match profile.device.dtype.as_str() {
            "float32" => 8,
            "bfloat16" => 12,
            dtype => return Err(CostError::Dtype { dtype: dtype.to_owned() }),
        };
        Ok(Self {
            optimizer_bytes_per_parameter,
            gradient_bytes_per_parameter: None,
            keeps_sent: profile.device.kind != "cuda",
            sends_beside_work: profile.device.kind == "cuda",
            has_masters: optimizer_bytes_per_parameter == 12,
            reserve: profile.memory,
        })
    }

    pub(crate) const fn buffers(&self, copies_rows: bool) -> Buffers {
        Buffers { keeps_sent: self.keeps_sent, copies_rows }
    }

    pub(crate) const fn allocator_bytes(&self, tensor_bytes: u64) -> u64 {
        tensor_bytes.saturating_mul(self.reserve.allocator_overhead_permille as u64).div_ceil(1_000)
    }
}
