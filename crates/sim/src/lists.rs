//! Lists: which actions each rank runs, in which order. An action is written as its slot (`engine.rs` says how).

use dflop_types::ActionKind;

/// Slots of every rank in the order in which it runs them.
#[derive(Debug, Clone)]
pub(crate) struct Lists {
    pub(crate) num_microbatches: usize,
    /// Slots of a row: 2m, or 3m where a backward is split.
    pub(crate) width: usize,
    /// Rank r runs `slots[starts[r]..starts[r + 1]]`.
    starts: Vec<usize>,
    slots: Vec<u32>,
    /// Whether the backward is split, by `row * m + microbatch`; empty where none is.
    is_split: Vec<bool>,
}

impl Lists {
    /// No ranks yet, `num_rows` rows.
    pub(crate) fn new(num_rows: usize, num_microbatches: usize, has_split: bool) -> Self {
        Self {
            num_microbatches,
            width: if has_split { 3 } else { 2 } * num_microbatches,
            starts: vec![0],
            slots: Vec::with_capacity(2 * num_rows * num_microbatches),
            is_split: if has_split { vec![false; num_rows * num_microbatches] } else { Vec::new() },
        }
    }

    /// Adds an action to the list of the rank that is being written. A W needs lists made with `has_split`.
    pub(crate) fn push(&mut self, row: usize, kind: ActionKind, microbatch: usize) {
        let m = self.num_microbatches;
        let local = match kind {
            ActionKind::F => microbatch,
            ActionKind::B | ActionKind::I => m + microbatch,
            ActionKind::W => 2 * m + microbatch,
        };
        if kind == ActionKind::I {
            self.is_split[row * m + microbatch] = true;
        }
        self.slots.push((row * self.width + local) as u32);
    }

    /// Ends the list of a rank.
    pub(crate) fn end_rank(&mut self) {
        self.starts.push(self.slots.len());
    }

    /// Ranks whose lists have ended.
    pub(crate) fn num_ranks(&self) -> usize {
        self.starts.len() - 1
    }

    /// The list of a rank.
    pub(crate) fn of(&self, rank: usize) -> &[u32] {
        &self.slots[self.starts[rank]..self.starts[rank + 1]]
    }

    /// Number of actions.
    pub(crate) fn num_actions(&self) -> usize {
        self.slots.len()
    }

    /// Whether the backward of a row's microbatch is split.
    pub(crate) fn is_split(&self, row: usize, microbatch: usize) -> bool {
        self.is_split.get(row * self.num_microbatches + microbatch).is_some_and(|&is_split| is_split)
    }

    /// Row, kind and microbatch of a slot.
    pub(crate) fn decode(&self, slot: u32) -> (usize, ActionKind, usize) {
        let (m, row) = (self.num_microbatches, slot as usize / self.width);
        // One division and no remainders: this runs for every action of a timeline.
        let local = slot as usize - row * self.width;
        let (kind, microbatch) = if local < m {
            (ActionKind::F, local)
        } else if local >= 2 * m {
            (ActionKind::W, local - 2 * m)
        } else if self.is_split(row, local - m) {
            (ActionKind::I, local - m)
        } else {
            (ActionKind::B, local - m)
        };
        (row, kind, microbatch)
    }
}
