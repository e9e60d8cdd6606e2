//! One microbatch of a simulator replaced: what a search changes between two timings.

use crate::simulator::Simulator;
use crate::wiring::Rows;
use dflop_types::Layout;

/// What one microbatch takes on every rank, and who feeds whom.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MicrobatchDurations {
    /// Forward by rank, in nanoseconds.
    pub forward_ns: Vec<u64>,
    /// Backward by rank, in nanoseconds.
    pub backward_ns: Vec<u64>,
    /// I by rank, in nanoseconds; empty where no backward is split.
    pub input_ns: Vec<u64>,
    /// W by rank, in nanoseconds; empty where no backward is split.
    pub weight_ns: Vec<u64>,
    /// `[encoder replica][llm replica]`, as a column of [`crate::StepInput::feeds`].
    pub feeds: Vec<Vec<bool>>,
}

impl Simulator {
    /// Replaces microbatch `at` of a simulator of `layout` under a pipeline order; the next timing has it.
    ///
    /// *Complexity*: O(ranks), and O(microbatches x replicas) where another replica feeds another than before.
    ///
    /// # Panics
    /// If there is no such microbatch, one that was swapped, or a list has another length than the layout gives. Times
    /// whose sum overflows are the caller's to keep away.
    pub fn set_microbatch(&mut self, at: usize, layout: Layout, times: &MicrobatchDurations) {
        let lists = &self.graph.lists;
        let (m, width, num_ranks) = (lists.num_microbatches, lists.width, lists.num_ranks());
        assert!(self.standing.get(at) == Some(&(at as u32)), "microbatch {at} of {m}, none swapped");
        assert!(
            times.forward_ns.len() == num_ranks && times.backward_ns.len() == num_ranks,
            "one time a rank"
        );
        for rank in 0..num_ranks {
            let slot = rank * width + at;
            self.durations_ns[slot] = times.forward_ns[rank];
            if lists.is_split(rank, at) {
                self.durations_ns[slot + m] = times.input_ns[rank];
                self.durations_ns[slot + 2 * m] = times.weight_ns[rank];
            } else {
                self.durations_ns[slot + m] = times.backward_ns[rank];
            }
        }
        self.swaps.forget();
        let (forward, backward) = crate::step::feed_rows(layout, &times.feeds);
        replace(&mut self.feeds.forward, at, &forward);
        replace(&mut self.feeds.backward, at, &backward);
    }
}

fn replace(rows: &mut Rows, at: usize, with: &Rows) {
    if !rows.has_equal_rows(at, with) {
        *rows = rows.with_rows(at, with);
    }
}
