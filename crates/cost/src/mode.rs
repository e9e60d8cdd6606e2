//! How a module is run: which of its passes, and what it recomputes.

use dflop_types::Recompute;

/// What a module runs, by what trains in it and before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Runs {
    /// Frozen, and so is all before it: the forward alone.
    Forward,
    /// Frozen behind something that trains: forward and gradient of the input.
    Input,
    /// Trained, nothing before it: forward and gradient of the weights.
    Weight,
    /// Trained behind something that trains: all of it.
    Whole,
}

impl Runs {
    pub(crate) const fn of(is_trained: bool, trains_before: bool) -> Self {
        match (is_trained, trains_before) {
            (false, false) => Self::Forward,
            (false, true) => Self::Input,
            (true, false) => Self::Weight,
            (true, true) => Self::Whole,
        }
    }
}

/// How a module is run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mode {
    pub(crate) name: &'static str,
    pub(crate) runs: Runs,
    pub(crate) recompute: Recompute,
}
