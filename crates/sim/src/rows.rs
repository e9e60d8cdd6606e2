//! Durations by row and microbatch, borrowed from a step or from a file of durations.

use crate::lists::Lists;

/// Durations by `[row][microbatch]`. Those of I and W are empty if no backward is split.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::struct_field_names, reason = "a unit stands last in a name")]
pub(crate) struct DurationRows<'a> {
    pub(crate) forward_ns: &'a [Vec<u64>],
    pub(crate) backward_ns: &'a [Vec<u64>],
    pub(crate) input_ns: &'a [Vec<u64>],
    pub(crate) weight_ns: &'a [Vec<u64>],
}

impl DurationRows<'_> {
    /// The durations in one list, indexed by the slots of `lists`; 0 for a slot without an action.
    pub(crate) fn by_slot(&self, lists: &Lists) -> Vec<u64> {
        let m = lists.num_microbatches;
        let mut flat = Vec::with_capacity(self.forward_ns.len() * lists.width);
        for (row, forward_ns) in self.forward_ns.iter().enumerate() {
            flat.extend_from_slice(forward_ns);
            if lists.width == 2 * m {
                flat.extend_from_slice(&self.backward_ns[row]);
                continue;
            }
            let is_split = |j| lists.is_split(row, j);
            let backward = |j| if is_split(j) { self.input_ns[row][j] } else { self.backward_ns[row][j] };
            flat.extend((0..m).map(backward));
            flat.extend((0..m).map(|j| if is_split(j) { self.weight_ns[row][j] } else { 0 }));
        }
        flat
    }
}
