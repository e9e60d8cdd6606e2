//! A prediction: the times of one microbatch on one stage, and what they stand on.

use crate::network::{Basis, Transfer};

/// Predicted time of one microbatch on one stage.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Prediction {
    /// Forward (F), in nanoseconds; 0 for no work.
    pub forward_ns: u64,
    /// Backward in one pass (B), as far as there is one, recomputation included, in nanoseconds; 0 for no work.
    pub backward_ns: u64,
    /// Gradient of the inputs alone (I), recomputation included, in nanoseconds; 0 where none is wanted, and where
    /// the profile does not hold it ([`crate::CostModel::has_split`]).
    pub input_ns: u64,
    /// Gradient of the weights alone (W), after I, in nanoseconds; 0 where nothing trains, and where the profile does
    /// not hold it.
    pub weight_ns: u64,
    /// Upper bound of the standard error of `forward_ns` plus `backward_ns` that comes from the spread of the
    /// measured points, in nanoseconds. It is an upper bound because the errors of all parts are added up as if they
    /// all had the same sign. The error of the model itself is not in it.
    pub uncertainty_ns: u64,
    /// Whether a curve was asked outside its measured range, or for segments unlike those it was measured with.
    pub extrapolated: bool,
    /// Whether it holds transfers that nobody measured.
    pub assumed: bool,
}

impl Prediction {
    /// Forward and backward together, in nanoseconds.
    pub const fn total_ns(&self) -> u64 {
        self.forward_ns.saturating_add(self.backward_ns)
    }

    /// What ranks take that wait for each other after each pass: of each time the longer one.
    #[must_use]
    pub fn slower(self, other: Self) -> Self {
        Self {
            forward_ns: self.forward_ns.max(other.forward_ns),
            backward_ns: self.backward_ns.max(other.backward_ns),
            input_ns: self.input_ns.max(other.input_ns),
            weight_ns: self.weight_ns.max(other.weight_ns),
            uncertainty_ns: self.uncertainty_ns.max(other.uncertainty_ns),
            extrapolated: self.extrapolated || other.extrapolated,
            assumed: self.assumed || other.assumed,
        }
    }

    /// The same with a forward that lasts until the ranks have sent each other what they made: `sent`.
    #[must_use]
    pub fn with_exchange(self, sent: Transfer) -> Self {
        Self {
            forward_ns: self.forward_ns.saturating_add(sent.ns),
            assumed: self.assumed || sent.basis == Basis::Assumed,
            ..self
        }
    }

    /// Adds `times` runs of `one`.
    pub(crate) fn add(&mut self, one: &Self, times: u64) {
        if times == 0 {
            return;
        }
        let add = |sum: &mut u64, ns: u64| *sum = sum.saturating_add(ns.saturating_mul(times));
        add(&mut self.forward_ns, one.forward_ns);
        add(&mut self.backward_ns, one.backward_ns);
        add(&mut self.input_ns, one.input_ns);
        add(&mut self.weight_ns, one.weight_ns);
        add(&mut self.uncertainty_ns, one.uncertainty_ns);
        self.extrapolated |= one.extrapolated;
        self.assumed |= one.assumed;
    }

    /// Makes the backward longer, and the half of the backward that runs first.
    pub(crate) fn lengthen(&mut self, ns: u64, is_of_weight: bool) {
        self.backward_ns = self.backward_ns.saturating_add(ns);
        let half = if is_of_weight { &mut self.weight_ns } else { &mut self.input_ns };
        *half = half.saturating_add(ns);
    }
}
