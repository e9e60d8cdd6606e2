//! A matrix product with a weight: what it computes, moves and keeps, and the part of it that a rank has.

use crate::work::{Phase, Work};

/// How tensor parallelism cuts a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cut {
    /// Every rank does it whole.
    Whole,
    /// Each rank makes a part of the outputs.
    Outputs,
    /// Each rank reads a part of the inputs; the results are then summed.
    Inputs,
}

/// A matrix product with a weight.
// Each is a fact of its own.
#[allow(clippy::struct_excessive_bools)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Product {
    /// Columns of what it reads; for a convolution the values of a window.
    pub inputs: u64,
    /// Columns of what it makes.
    pub outputs: u64,
    /// Values of its bias; 0 for none.
    pub num_biases: u64,
    /// Whether the forward keeps its input for it; false where a step before has kept the same tensor.
    pub keeps_input: bool,
    /// Whether each rank keeps all rows of its input where ranks share the rows, as a router that reads the same keeps them.
    pub keeps_all_rows: bool,
    /// Ranks that each keep a part of the rows of its input, and gather them again in the backward; 1: this rank keeps all.
    pub keepers: u64,
    /// Whether its input wants a gradient; pixels and sound do not.
    pub has_input_gradient: bool,
    /// How it is cut.
    pub cut: Cut,
    /// Matrices of these sizes that the rows are dealt to, one of them to each row, in one kernel (`grouped_mm`); 1: all rows
    /// go through one matrix.
    pub num_experts: u64,
    /// Whether the gradient of its weights may be computed later than that of its input. If not, both are computed in I. That
    /// holds for linear maps of PyTorch alone, on which adapters are put.
    pub is_split: bool,
    /// Whether its weights are frozen: no gradient of them is computed, and nothing is kept or queued for one.
    pub is_frozen: bool,
}

/// Bytes moved where the gradient of one weight, of `size` bytes, joins the sum over microbatches: it is read, and the sum, which
/// is in float32, is read and written.
pub(super) const fn summed_bytes(size: u64) -> u128 {
    (size + 2 * 4) as u128
}

impl Product {
    /// The part of one of `degree` ranks; `None` where the degree does not divide it.
    pub(super) fn cut(self, degree: u64) -> Option<Self> {
        let part = |whole: u64| whole.is_multiple_of(degree).then(|| whole / degree);
        Some(match self.cut {
            Cut::Whole => self,
            Cut::Outputs => Self { outputs: part(self.outputs)?, num_biases: part(self.num_biases)?, ..self },
            Cut::Inputs => Self { inputs: part(self.inputs)?, ..self },
        })
    }

    /// Ranks that each keep a part of the rows of its input, where `degree` ranks share the rows. Experts read copies of rows,
    /// which each rank keeps, as their router keeps rows.
    pub(super) fn keepers_of(&self, degree: u64) -> u64 {
        let is_shared = self.cut == Cut::Outputs && self.num_experts == 1 && !self.keeps_all_rows;
        if is_shared { degree } else { self.keepers }
    }

    /// Whether the gradient of its weights waits from I to W.
    pub(super) const fn waits(&self) -> bool {
        self.is_split && !self.is_frozen
    }

    /// `2 m n k` for the forward and for each gradient.
    pub(super) fn work(&self, rows: u64, phase: Phase, size: u64) -> Work {
        let (m, k, n) = (u128::from(rows), u128::from(self.inputs), u128::from(self.outputs));
        let tensors = (m * k + u128::from(self.num_read(rows)) * k * n + m * n) * u128::from(size);
        let kernels = match phase {
            Phase::Forward => 1,
            Phase::Input if self.has_input_gradient => 1,
            Phase::Input => return Work::default(),
            Phase::Weight if self.is_frozen => return Work::default(),
            // The gradient, its sum with that of the microbatches before, and the same for the bias.
            Phase::Weight => 2 + 2 * u64::from(self.num_biases > 0),
        };
        Work { flops: 2 * m * n * k, bytes: tensors + self.summed_bytes(phase, size), kernels }
    }

    /// Bytes moved where the gradient of the weight joins that of the microbatches before.
    pub(super) fn summed_bytes(&self, phase: Phase, size: u64) -> u128 {
        // Of experts that no row goes to, too: the gradient is one tensor of all of them.
        let weights = u128::from(self.num_experts * self.inputs) * u128::from(self.outputs);
        if phase == Phase::Weight { weights * summed_bytes(size) } else { 0 }
    }

    /// Matrices that rows go through, at most.
    pub(super) fn num_read(&self, rows: u64) -> u64 {
        rows.min(self.num_experts)
    }
}
