//! The engine: action lists and data dependencies as a graph, and the longest path through it.
//!
//! A slot is an action on a rank: `rank * 2m + microbatch` for a forward, `m` more for a backward. The graph
//! is put into topological order once; after that, timing a step is one pass over the slots, so that trying
//! many durations on one graph costs a few nanoseconds an action.

use crate::error::SimError;
use dflop_types::{Action, ActionKind, Rank, StageIndex};

/// Where an action's input comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    /// From nowhere but the rank itself: the first forward, the last backward.
    Nothing,
    /// From the same action of a neighbouring stage, on this rank.
    Rank(u32),
    /// Over the boundary, from the replicas of the other component that share samples of the microbatch with
    /// this replica.
    Boundary {
        /// Replica of this rank's component.
        replica: u32,
    },
}

/// What a rank holds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    pub(crate) stage: StageIndex,
    pub(crate) forward: Source,
    pub(crate) backward: Source,
    /// Ranks with the same number meet before their tails.
    pub(crate) component: usize,
}

/// Who shares samples over the boundary, as ranks: rows of one flat list.
#[derive(Debug, Clone, Default)]
pub(crate) struct Feeds {
    /// Encoder ranks of `[microbatch][llm replica]`.
    pub(crate) forward: Rows,
    /// LLM ranks of `[microbatch][encoder replica]`.
    pub(crate) backward: Rows,
}

/// Rows of ranks of `[microbatch][replica]`.
#[derive(Debug, Clone, Default)]
pub(crate) struct Rows {
    replicas: usize,
    /// Row r is `ranks[starts[r]..starts[r + 1]]`.
    starts: Vec<usize>,
    ranks: Vec<u32>,
}

impl Rows {
    pub(crate) fn new(replicas: usize) -> Self {
        Self { replicas, starts: vec![0], ranks: Vec::new() }
    }

    /// Adds the next row: by microbatch, then by replica.
    pub(crate) fn push(&mut self, ranks: impl Iterator<Item = u32>) {
        self.ranks.extend(ranks);
        self.starts.push(self.ranks.len());
    }

    fn row(&self, microbatch: usize, replica: u32) -> &[u32] {
        let row = microbatch * self.replicas + replica as usize;
        &self.ranks[self.starts[row]..self.starts[row + 1]]
    }
}

/// One action in topological order. `source` is a slot, [`NOTHING`] or [`BOUNDARY`].
#[derive(Debug, Clone, Copy)]
struct Node {
    slot: u32,
    rank: u32,
    source: u32,
    replica: u32,
}

const NOTHING: u32 = u32::MAX;
const BOUNDARY: u32 = u32::MAX - 1;
/// The largest number of slots.
pub(crate) const SLOTS_MAX: u32 = BOUNDARY - 1;

/// Actions of all ranks with their order and dependencies; knows no durations.
#[derive(Debug, Clone)]
pub(crate) struct Graph {
    pub(crate) num_microbatches: usize,
    pub(crate) places: Vec<Place>,
    /// Slots of every rank in the order in which it runs them, rank by rank, 2m each.
    lists: Vec<u32>,
    /// A topological order.
    sequence: Vec<Node>,
}

/// Ends of the last pass; kept between passes so that a pass allocates nothing.
#[derive(Debug, Clone, Default)]
pub(crate) struct Clock {
    /// When each slot ends, in nanoseconds.
    pub(crate) end_ns: Vec<u64>,
    /// When each rank has run its list, in nanoseconds.
    pub(crate) last_end_ns: Vec<u64>,
}

impl Graph {
    /// The graph of the ranks in `places` with their `lists` of slots, `feeds` over the boundary.
    ///
    /// Walks each rank as far as its inputs allow and lets it wait on the first one that is not there; the
    /// action that ends the wait puts the rank back on the stack. *Complexity*: O(slots + edges) without a
    /// boundary.
    ///
    /// # Errors
    /// [`SimError::Deadlock`] if ranks are left that wait in a circle.
    pub(crate) fn new(
        places: Vec<Place>,
        lists: Vec<u32>,
        num_microbatches: usize,
        feeds: &Feeds,
    ) -> Result<Self, SimError> {
        let width = 2 * num_microbatches;
        let mut graph = Self { num_microbatches, places, lists, sequence: Vec::new() };
        graph.sequence.reserve_exact(graph.lists.len());
        let mut is_done = vec![false; graph.lists.len()];
        let mut first_waiter = vec![NOTHING; graph.lists.len()];
        let mut next_waiter = vec![NOTHING; graph.places.len()];
        let mut cursor = vec![0; graph.places.len()];
        let mut ready: Vec<u32> = (0..graph.places.len() as u32).rev().collect();
        while let Some(rank) = ready.pop() {
            let at = rank as usize;
            while cursor[at] < width {
                let slot = graph.lists[at * width + cursor[at]];
                if let Some(input) = graph.missing_input(slot, rank, feeds, &is_done) {
                    next_waiter[at] = first_waiter[input as usize];
                    first_waiter[input as usize] = rank;
                    break;
                }
                is_done[slot as usize] = true;
                cursor[at] += 1;
                graph.sequence.push(graph.node(slot, rank));
                let mut waiter = first_waiter[slot as usize];
                while waiter != NOTHING {
                    ready.push(waiter);
                    waiter = next_waiter[waiter as usize];
                }
            }
        }
        if graph.sequence.len() == graph.lists.len() {
            return Ok(graph);
        }
        // Rank and input of what each rank waits at; every input stands in some list, so the wait is a
        // circle.
        let waits = |rank: usize| -> (u32, u32) {
            let slot = graph.lists[rank * width + cursor[rank]];
            let input = graph.missing_input(slot, rank as u32, feeds, &is_done).unwrap_or(slot);
            (slot, input)
        };
        let is_blocked = |rank: &usize| cursor[*rank] < width;
        let mut seen = vec![false; graph.places.len()];
        let mut rank = (0..graph.places.len()).find(is_blocked).unwrap_or(0);
        while !seen[rank] {
            seen[rank] = true;
            rank = waits(rank).1 as usize / width;
        }
        // `rank` is on the circle; walk it once more for its lowest rank.
        let (start, mut lowest) = (rank, rank);
        loop {
            rank = waits(rank).1 as usize / width;
            lowest = lowest.min(rank);
            if rank == start {
                break;
            }
        }
        let (slot, input) = waits(lowest);
        let input_rank = input as usize / width;
        Err(SimError::Deadlock {
            rank: Rank(lowest as u32),
            action: graph.action(slot),
            input_rank: Rank(input_rank as u32),
            input: graph.action(input),
            input_action: graph.action(waits(input_rank).0),
        })
    }

    /// The graph of many ranks that run the lists of a pipeline with one rank a stage: `ranks_of` gives the
    /// ranks of a stage.
    ///
    /// No deadlock is possible, whoever feeds whom: each dependency between two ranks is one between their
    /// stages, so the order of the pipeline, with every action done on all ranks of its stage at once, is a
    /// topological order of the whole.
    pub(crate) fn replicate<R: Iterator<Item = u32>>(
        &self,
        places: Vec<Place>,
        ranks_of: impl Fn(StageIndex) -> R,
    ) -> Self {
        let width = 2 * self.num_microbatches;
        let mut graph = Self {
            num_microbatches: self.num_microbatches,
            lists: Vec::with_capacity(places.len() * width),
            sequence: Vec::with_capacity(places.len() * width),
            places,
        };
        for (rank, place) in graph.places.iter().enumerate() {
            let stage = place.stage.index();
            let shift = |slot: &u32| (*slot as usize - stage * width + rank * width) as u32;
            graph.lists.extend(self.lists[stage * width..(stage + 1) * width].iter().map(shift));
        }
        for node in &self.sequence {
            let stage = StageIndex(node.rank);
            let local = node.slot as usize - stage.index() * width;
            for rank in ranks_of(stage) {
                let node = graph.node((rank as usize * width + local) as u32, rank);
                graph.sequence.push(node);
            }
        }
        graph
    }

    /// The action of `slot`.
    pub(crate) fn action(&self, slot: u32) -> Action {
        let (rank, is_backward, microbatch) = self.parts(slot);
        let kind = if is_backward { ActionKind::B } else { ActionKind::F };
        Action { stage: self.places[rank].stage, kind, microbatch: microbatch as u32 }
    }

    /// Slots of every rank in the order in which it runs them, rank by rank.
    pub(crate) fn lists(&self) -> impl Iterator<Item = (Rank, &[u32])> {
        // An empty step has no slots, and chunks must not be empty.
        let width = (2 * self.num_microbatches).max(1);
        self.lists.chunks(width).enumerate().map(|(rank, list)| (Rank(rank as u32), list))
    }

    /// Number of actions.
    pub(crate) fn num_slots(&self) -> usize {
        self.lists.len()
    }

    /// Rank, whether it is a backward, and microbatch.
    fn parts(&self, slot: u32) -> (usize, bool, usize) {
        let m = self.num_microbatches;
        let (rank, local) = (slot as usize / (2 * m), slot as usize % (2 * m));
        (rank, local >= m, if local >= m { local - m } else { local })
    }

    fn source(&self, slot: u32, rank: u32) -> Source {
        let place = &self.places[rank as usize];
        let local = slot as usize - rank as usize * 2 * self.num_microbatches;
        if local < self.num_microbatches { place.forward } else { place.backward }
    }

    /// The same action of `other`.
    fn at_rank(&self, slot: u32, rank: u32, other: u32) -> u32 {
        let width = 2 * self.num_microbatches as u32;
        slot - rank * width + other * width
    }

    fn node(&self, slot: u32, rank: u32) -> Node {
        match self.source(slot, rank) {
            Source::Nothing => Node { slot, rank, source: NOTHING, replica: 0 },
            Source::Rank(other) => Node { slot, rank, source: self.at_rank(slot, rank, other), replica: 0 },
            Source::Boundary { replica } => Node { slot, rank, source: BOUNDARY, replica },
        }
    }

    /// The first input of `slot` that is not done.
    fn missing_input(&self, slot: u32, rank: u32, feeds: &Feeds, is_done: &[bool]) -> Option<u32> {
        let is_missing = |input: &u32| !is_done[*input as usize];
        let (_, is_backward, microbatch) = self.parts(slot);
        // A backward needs what its own forward kept.
        let forward = is_backward.then(|| slot - self.num_microbatches as u32);
        forward.filter(is_missing).or_else(|| match self.source(slot, rank) {
            Source::Nothing => None,
            Source::Rank(other) => Some(self.at_rank(slot, rank, other)).filter(is_missing),
            Source::Boundary { replica } => {
                let rows = if is_backward { &feeds.backward } else { &feeds.forward };
                rows.row(microbatch, replica).iter().map(|&r| self.at_rank(slot, rank, r)).find(is_missing)
            }
        })
    }

    /// Times every action: it starts when its rank is free and its inputs have arrived.
    ///
    /// `durations_ns` are by slot; `order[j]` is the row of `feeds` that belongs to microbatch j. Sums must
    /// not overflow: see [`crate::simulator`].
    pub(crate) fn run(
        &self,
        durations_ns: &[u64],
        feeds: &Feeds,
        order: &[u32],
        transfer_ns: u64,
        clock: &mut Clock,
    ) {
        let width = 2 * self.num_microbatches;
        clock.end_ns.resize(self.num_slots(), 0);
        clock.last_end_ns.clear();
        clock.last_end_ns.resize(self.places.len(), 0);
        let (end_ns, last_end_ns) = (clock.end_ns.as_mut_slice(), clock.last_end_ns.as_mut_slice());
        for node in &self.sequence {
            let (slot, rank) = (node.slot as usize, node.rank as usize);
            let mut start = last_end_ns[rank];
            if node.source < BOUNDARY {
                start = start.max(end_ns[node.source as usize] + transfer_ns);
            } else if node.source == BOUNDARY {
                let local = slot - rank * width;
                let (rows, microbatch) = if local < self.num_microbatches {
                    (&feeds.forward, local)
                } else {
                    (&feeds.backward, local - self.num_microbatches)
                };
                for &other in rows.row(order[microbatch] as usize, node.replica) {
                    start = start.max(end_ns[other as usize * width + local] + transfer_ns);
                }
            }
            let end = start + durations_ns[slot];
            end_ns[slot] = end;
            last_end_ns[rank] = end;
        }
    }
}
