//! How much the exact search may still do.

use crate::stop::Stop;

/// Nodes handed out at once, between two questions whether to stop: some 0.3 ms.
pub(super) const PORTION: u64 = 1 << 15;

/// Nodes left, and the caller's wish to end.
pub(super) struct Work<'a> {
    left: u64,
    stop: &'a Stop<'a>,
}

impl<'a> Work<'a> {
    pub(super) fn new(left: u64, stop: &'a Stop<'a>) -> Self {
        Self { left, stop }
    }

    /// Whether anything may still be done.
    pub(super) fn is_left(&self) -> bool {
        self.left > 0 && !self.is_stopped()
    }

    /// Whether the caller wants it to end.
    pub(super) fn is_stopped(&self) -> bool {
        self.stop.strikes()
    }

    /// Total number of nodes that may be spent.
    pub(super) fn left(&self) -> u64 {
        self.left
    }

    /// Takes up to `amount` nodes; 0 once all are spent or the stop has struck.
    pub(super) fn take(&mut self, amount: u64) -> u64 {
        let taken = if self.is_left() { amount.min(self.left) } else { 0 };
        self.left -= taken;
        taken
    }

    /// Up to `amount` nodes for a search of its own.
    pub(super) fn split(&mut self, amount: u64) -> Self {
        Self { left: self.take(amount), stop: self.stop }
    }

    /// Gives back what was taken and not needed.
    pub(super) fn give_back(&mut self, amount: u64) {
        self.left += amount;
    }
}
