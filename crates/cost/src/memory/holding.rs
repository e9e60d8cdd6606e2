//! What the device says of memory, the modules apart.

use crate::error::CostError;
use crate::memory::walk::Buffers;
use dflop_types::{MemoryReserve, ModelProfile};

/// Actions whose receives the runtime has open, the running one included (`num_ahead` of its executor).
const NUM_AHEAD: usize = 4;

/// What the device says of memory, the modules apart.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Holding {
    pub(crate) optimizer_bytes_per_parameter: u64,
    /// gloo tells of a message that it has left only to who waits for it: the runtime waits at the step's end.
    keeps_sent: bool,
    pub(crate) reserve: MemoryReserve,
}

impl Holding {
    /// That of a profile's device.
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
            keeps_sent: profile.device.kind != "cuda",
            reserve: profile.memory,
        })
    }

    pub(crate) const fn buffers(&self, copies_rows: bool) -> Buffers {
        Buffers { num_ahead: NUM_AHEAD, keeps_sent: self.keeps_sent, copies_rows }
    }

    pub(crate) const fn allocator_bytes(&self, tensor_bytes: u64) -> u64 {
        tensor_bytes.saturating_mul(self.reserve.allocator_overhead_permille as u64).div_ceil(1_000)
    }
}
