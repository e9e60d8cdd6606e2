//! Replacing one microbatch of a simulator. A search does that between two timings.

use crate::simulator::Simulator;
use crate::wiring::Rows;
use dflop_types::Layout;

/// The times of one microbatch on every row ([`crate::StepInput::forward_ns`]), and which replicas feed each other.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MicrobatchDurations {
    /// Forward by row, in nanoseconds.
    pub forward_ns: Vec<u64>,
    /// Backward by row, in nanoseconds.
    pub backward_ns: Vec<u64>,
    /// I by row, in nanoseconds; empty where no backward is split.
    pub input_ns: Vec<u64>,
    /// W by row, in nanoseconds; empty where no backward is split.
    pub weight_ns: Vec<u64>,
    /// For each encoder replica the LLM replicas that it feeds, as in one entry of [`crate::StepInput::feeds`].
    pub feeds: Vec<Vec<u32>>,
}

impl Simulator {
    /// Replaces microbatch `at` of a simulator that was made for `layout` under a pipeline order. The next timing uses the
    /// new times.
    ///
    /// *Complexity*: O(rows), and O(microbatches x replicas) if the feeds change.
    ///
    /// # Panics
    /// If there is no microbatch `at`, if microbatches were swapped, or if a list does not have the length that the layout
    /// gives. The caller must make sure that the sum of all times does not overflow.
    pub fn set_microbatch(&mut self, at: usize, layout: Layout, times: &MicrobatchDurations) {
        let lists = &self.graph.lists;
        let (m, width, num_rows) = (lists.num_microbatches, lists.width, self.graph.rows.len());
        assert!(self.standing.get(at) == Some(&(at as u32)), "microbatch {at} of {m}, none swapped");
        assert!(times.forward_ns.len() == num_rows && times.backward_ns.len() == num_rows, "one time a row");
        for row in 0..num_rows {
            let slot = row * width + at;
            self.durations_ns[slot] = times.forward_ns[row];
            if lists.is_split(row, at) {
                self.durations_ns[slot + m] = times.input_ns[row];
                self.durations_ns[slot + 2 * m] = times.weight_ns[row];
            } else {
                self.durations_ns[slot + m] = times.backward_ns[row];
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
