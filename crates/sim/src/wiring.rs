//! Wiring: which rank waits for which, as the data flows through a step.
//!
//! A row is a stage of one replica. Its actions wait for the actions of the neighbouring rows in its own replica, and
//! over the boundary for those replicas of the other component that share samples of the microbatch with it.

use dflop_types::StageIndex;

/// Where an action's input comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// From no other stage: the forward of the first stage, the backward of the last.
    Nothing,
    /// From the same action of a neighbouring stage, which is this row.
    Row(u32),
    /// Over the boundary, from the replicas of the other component that share samples of the microbatch with
    /// this replica.
    Boundary {
        /// Replica of this rank's component.
        replica: u32,
    },
}

/// A row, with what its actions wait for.
#[derive(Debug, Clone, Copy)]
pub struct WiredRow {
    /// The stage, counted over both components.
    pub stage: StageIndex,
    /// The rank that runs it.
    pub rank: u32,
    /// Where its forwards get their input.
    pub forward: Source,
    /// Where its backwards get their gradient.
    pub backward: Source,
    /// Ranks with the same number wait for each other before their tails.
    pub component: usize,
}

/// Which replicas of the two components share samples over the boundary.
#[derive(Debug, Clone, Default)]
pub struct Feeds {
    /// For `[microbatch][llm replica]`: the rows of the last encoder stage that feed it. Forwards wait for these.
    pub forward: Rows,
    /// For `[microbatch][encoder replica]`: the rows of the first LLM stage that it feeds. Backwards wait for these.
    pub backward: Rows,
    /// For each microbatch: whether some colocated ranks encode samples of others.
    pub exchanges: Vec<bool>,
}

/// One list of row numbers for each `[microbatch][replica]`, all in one flat list.
#[derive(Debug, Clone, Default)]
pub struct Rows {
    replicas: usize,
    /// List r is `ranks[starts[r]..starts[r + 1]]`.
    starts: Vec<usize>,
    ranks: Vec<u32>,
}

impl Rows {
    /// No lists yet, for this many replicas in each microbatch.
    pub(crate) fn new(replicas: usize) -> Self {
        Self { replicas, starts: vec![0], ranks: Vec::new() }
    }

    /// Adds the next list, in order of microbatches, and of replicas within a microbatch.
    pub(crate) fn push(&mut self, ranks: impl Iterator<Item = u32>) {
        self.ranks.extend(ranks);
        self.starts.push(self.ranks.len());
    }

    /// Whether the lists of microbatch `at` are those of `other`, which has one microbatch.
    pub(crate) fn has_equal_rows(&self, at: usize, other: &Self) -> bool {
        (0..self.replicas as u32).all(|replica| self.row(at, replica) == other.row(0, replica))
    }

    /// A copy in which the lists of microbatch `at` are replaced by those of `other`, which has one microbatch.
    pub(crate) fn with_rows(&self, at: usize, other: &Self) -> Self {
        let mut rows = Self::new(self.replicas);
        let num_microbatches = (self.starts.len() - 1) / self.replicas.max(1);
        for microbatch in 0..num_microbatches {
            for replica in 0..self.replicas as u32 {
                let row =
                    if microbatch == at { other.row(0, replica) } else { self.row(microbatch, replica) };
                rows.push(row.iter().copied());
            }
        }
        rows
    }

    /// The list of a microbatch and replica.
    pub fn row(&self, microbatch: usize, replica: u32) -> &[u32] {
        let row = microbatch * self.replicas + replica as usize;
        &self.ranks[self.starts[row]..self.starts[row + 1]]
    }
}
