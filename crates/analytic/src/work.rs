//! What is counted of a step: its work in each phase.

/// A phase of a step's work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// F.
    Forward,
    /// I.
    Input,
    /// W.
    Weight,
}

/// Work of one phase.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Work {
    /// As `torch.utils.flop_counter` counts.
    pub flops: u128,
    /// Bytes read and written.
    pub bytes: u128,
    /// Kernels started.
    pub kernels: u64,
}
