//! The sets of most worth among many.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// The sets of most worth among those shown.
pub(super) struct Best {
    /// The least worth on top.
    sets: BinaryHeap<Reverse<(i64, Vec<u32>)>>,
    num_sets: usize,
    least: i64,
    pub(super) most: i64,
}

impl Best {
    pub(super) fn new(num_sets: usize, least: i64) -> Self {
        Self { sets: BinaryHeap::new(), num_sets, least, most: least - 1 }
    }

    pub(super) fn is_full(&self) -> bool {
        self.sets.len() >= self.num_sets
    }

    /// The least worth that is taken up still.
    pub(super) fn least(&self) -> i64 {
        self.sets.peek().filter(|_| self.is_full()).map_or(self.least, |worst| worst.0.0 + 1)
    }

    pub(super) fn show(&mut self, worth: i64, set: &[u32]) -> i64 {
        self.most = self.most.max(worth);
        if self.is_full() {
            self.sets.pop();
        }
        self.sets.push(Reverse((worth, set.to_vec())));
        self.least()
    }

    /// The sets, the most worth first.
    pub(super) fn into_sets(self) -> Vec<Vec<u32>> {
        self.sets.into_sorted_vec().into_iter().map(|set| set.0.1).collect()
    }
}
