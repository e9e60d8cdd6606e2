//! Work on each value alone, bound by memory.

use crate::architecture::NormKind;
use crate::work::{Phase, Work};

/// Work on each value alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pass {
    /// Values of a row.
    pub width: u64,
    /// Values read or written for each, forward.
    pub forward_moves: u64,
    /// Values read or written for each, backward.
    pub backward_moves: u64,
    /// Values that the forward keeps for each.
    pub kept: u64,
    /// Float32 values that it keeps besides, whatever the dtype.
    pub kept_float32: u64,
    /// Kernels, forward.
    pub forward_kernels: u64,
    /// Kernels, backward.
    pub backward_kernels: u64,
    /// Whether tensor parallelism cuts its width.
    pub is_cut: bool,
}

impl Pass {
    pub(super) fn work(&self, rows: u64, phase: Phase, size: u64) -> Work {
        let (moves, kernels) = match phase {
            Phase::Forward => (self.forward_moves, self.forward_kernels),
            Phase::Input => (self.backward_moves, self.backward_kernels),
            Phase::Weight => return Work::default(),
        };
        Work { flops: 0, bytes: u128::from(rows * moves) * u128::from(self.width * size), kernels }
    }
}

/// A norm as work on each value, in values of the dtype.
///
/// Layer norm: read and write; backward reads input and gradient, writes one, and reads both again for the weight. RMS
/// norm as Hugging Face writes it: to float32, square, mean, sum, inverse root, product, back, weight: counted from
/// bfloat16, where a float32 value is two moves (`2+4 + 8 + 4 + 8 + 6 + 4 = 36` bytes, 18 moves). Of the backward four moves
/// are the gradient of the weight: a product, and its sum over the rows. A centred or wide one stays in float32 for its weight; of
/// one without a weight, that product is left out.
pub(super) const fn norm_pass(kind: NormKind, width: u64) -> Pass {
    let (forward_moves, backward_moves, forward_kernels, backward_kernels) = match kind {
        NormKind::Layer | NormKind::RmsFused => (2, 5, 1, 3),
        NormKind::Rms => (18, 30, 8, 12),
        NormKind::RmsFrozen => (18, 26, 8, 10),
        NormKind::RmsCentred | NormKind::RmsWide => (20, 36, 9, 13),
        NormKind::RmsCentredFrozen | NormKind::RmsWideFrozen => (20, 32, 9, 11),
        NormKind::RmsUnscaled => (16, 28, 7, 9),
    };
    Pass {
        width,
        forward_moves,
        backward_moves,
        kept: 0,
        kept_float32: 0,
        forward_kernels,
        backward_kernels,
        is_cut: false,
    }
}
