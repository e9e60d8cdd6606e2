//! The caller's wish to end the search: asked now and then, remembered once it is there.

use std::cell::Cell;

/// A closure of the caller's that says whether to stop, and whether it has said so.
///
/// The crate reads no clock: the closure may. Its "yes" is final, so that all parts of a search end alike.
pub(crate) struct Stop<'a> {
    ask: &'a dyn Fn() -> bool,
    has_struck: Cell<bool>,
}

impl<'a> Stop<'a> {
    /// Stops once `ask` says so.
    pub(crate) fn when(ask: &'a dyn Fn() -> bool) -> Self {
        Self { ask, has_struck: Cell::new(false) }
    }

    /// Never stops.
    pub(crate) fn never() -> Self {
        Self::when(&|| false)
    }

    /// Whether to stop, by asking unless it is known.
    pub(crate) fn strikes(&self) -> bool {
        if !self.has_struck.get() && (self.ask)() {
            self.has_struck.set(true);
        }
        self.has_struck.get()
    }

    /// Whether the answer was ever yes.
    pub(crate) fn has_struck(&self) -> bool {
        self.has_struck.get()
    }
}
