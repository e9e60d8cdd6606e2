//! The engine: action lists and data dependencies as a graph, and the longest path through it.
//!
//! A row is a stage of one replica. A rank runs one row, or several if stages are interleaved. A slot is the number of an
//! action of a row, with m microbatches:
//!
//! ```text
//! F       row * width + microbatch              width = 2m, or 3m if some backward is split
//! B or I  row * width + microbatch + m
//! W       row * width + microbatch + 2m
//! ```
//!
//! The graph is put into topological order once. After that, timing a step is one pass over the slots: a few nanoseconds
//! an action. So a search can try many durations on one graph.

use crate::error::SimError;
use crate::lists::Lists;
use crate::wiring::{Feeds, Source, WiredRow};
use dflop_types::{Action, ActionKind, Rank, StageIndex};

/// One action in topological order. `source` is a slot, [`NOTHING`], [`BOUNDARY`] or [`MEETING`].
#[derive(Debug, Clone, Copy)]
struct Node {
    slot: u32,
    rank: u32,
    source: u32,
    /// If `source` is a slot: the slot of this row's forward of the same microbatch. If it is [`BOUNDARY`]: the replica. If it
    /// is [`MEETING`]: the number of ranks that meet, on the first of them, and 0 on the others.
    detail: u32,
}

const NOTHING: u32 = u32::MAX;
const BOUNDARY: u32 = u32::MAX - 1;
/// All ranks start this action together.
const MEETING: u32 = u32::MAX - 2;
/// The largest number of slots.
pub(crate) const SLOTS_MAX: u32 = MEETING - 1;

/// Actions of all ranks with their order and dependencies; knows no durations.
#[derive(Debug, Clone)]
pub(crate) struct Graph {
    /// By row.
    pub(crate) rows: Vec<WiredRow>,
    pub(crate) lists: Lists,
    /// A topological order.
    sequence: Vec<Node>,
}

/// The times that one pass uses. Their sums must not overflow: see [`crate::simulator`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct Times<'a> {
    /// By slot.
    pub(crate) durations_ns: &'a [u64],
    pub(crate) feeds: &'a Feeds,
    /// `order[j]` is the row of `feeds` that belongs to microbatch j.
    pub(crate) order: &'a [u32],
    pub(crate) transfer_ns: u64,
}

/// From when on a rank may have the receive of a message open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Opening {
    /// The rank that gives the message.
    pub giver: Rank,
    /// When the action that gives it starts. Messages are opened in this order, of equals the lower giver first.
    pub start_ns: u64,
    /// How many actions of the rank that takes it come before.
    pub num_before: u32,
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
    /// The graph of the `rows` whose ranks run `lists`, `feeds` over the boundary.
    ///
    /// Walks the list of each rank until an input is missing. The rank then waits for that input; the action that makes
    /// the input puts the rank back on the stack. *Complexity*: O(slots + edges) without a boundary.
    ///
    /// # Errors
    /// [`SimError::Deadlock`] if ranks are left that wait in a circle.
    pub(crate) fn new(rows: Vec<WiredRow>, lists: Lists, feeds: &Feeds) -> Result<Self, SimError> {
        let num_ranks = lists.num_ranks();
        let mut graph = Self { sequence: Vec::with_capacity(lists.num_actions()), rows, lists };
        let mut is_done = vec![false; graph.num_slots()];
        let mut first_waiter = vec![NOTHING; graph.num_slots()];
        let mut next_waiter = vec![NOTHING; num_ranks];
        let mut cursor = vec![0; num_ranks];
        let mut ready: Vec<u32> = (0..num_ranks as u32).rev().collect();
        while let Some(rank) = ready.pop() {
            let at = rank as usize;
            while let Some(&slot) = graph.lists.of(at).get(cursor[at]) {
                if let Some(input) = graph.missing_input(slot, feeds, &is_done) {
                    next_waiter[at] = first_waiter[input as usize];
                    first_waiter[input as usize] = rank;
                    break;
                }
                is_done[slot as usize] = true;
                cursor[at] += 1;
                graph.sequence.push(graph.node(slot));
                let mut waiter = first_waiter[slot as usize];
                while waiter != NOTHING {
                    ready.push(waiter);
                    waiter = next_waiter[waiter as usize];
                }
            }
        }
        if graph.sequence.len() == graph.lists.num_actions() {
            Ok(graph)
        } else {
            Err(graph.circle(feeds, &cursor, &is_done))
        }
    }

    /// The deadlock error: some ranks wait in a circle, and the error names the first pair of it, by rank. Rank r has
    /// run its list up to `cursor[r]`.
    fn circle(&self, feeds: &Feeds, cursor: &[usize], is_done: &[bool]) -> SimError {
        // The slot that a rank cannot run, and the input that this slot waits for. Every input is in the list of some
        // rank, so following the waits ends in a circle.
        let waits = |rank: usize| -> (u32, u32) {
            let slot = self.lists.of(rank)[cursor[rank]];
            (slot, self.missing_input(slot, feeds, is_done).unwrap_or(slot))
        };
        let rank_of = |slot: u32| self.rows[slot as usize / self.lists.width].rank as usize;
        let is_blocked = |rank: &usize| cursor[*rank] < self.lists.of(*rank).len();
        let mut seen = vec![false; cursor.len()];
        let mut rank = (0..cursor.len()).find(is_blocked).unwrap_or(0);
        while !seen[rank] {
            seen[rank] = true;
            rank = rank_of(waits(rank).1);
        }
        // `rank` is on the circle; walk it once more for its lowest rank.
        let (start, mut lowest) = (rank, rank);
        loop {
            rank = rank_of(waits(rank).1);
            lowest = lowest.min(rank);
            if rank == start {
                break;
            }
        }
        let (slot, input) = waits(lowest);
        let input_rank = rank_of(input);
        SimError::Deadlock {
            rank: Rank(lowest as u32),
            action: self.action(slot),
            input_rank: Rank(input_rank as u32),
            input: self.action(input),
            input_action: self.action(waits(input_rank).0),
        }
    }

    /// The same graph, but all ranks start each action together. They must run the same actions in the same order.
    pub(crate) fn meeting(mut self) -> Self {
        self.sequence.clear();
        let num_ranks = self.num_ranks();
        let longest = (0..num_ranks).map(|rank| self.lists.of(rank).len()).max().unwrap_or(0);
        for position in 0..longest {
            for rank in 0..num_ranks {
                if let Some(&slot) = self.lists.of(rank).get(position) {
                    let detail = if rank == 0 { num_ranks as u32 } else { 0 };
                    let alone = self.node(slot);
                    self.sequence.push(Node { source: MEETING, detail, ..alone });
                }
            }
        }
        self
    }

    /// The graph of many replicas. This graph is one pipeline, and each of the `num_ranks` ranks runs one of its lists:
    /// that of the rank which `pipeline_rank` gives. `row_at` gives the row of a stage on a rank, and `rows_of` gives all
    /// rows of a stage.
    ///
    /// No deadlock is possible, whichever replicas feed each other. Every dependency between two rows is also one between
    /// their stages. So the topological order of the pipeline, with each action done on all rows of its stage, is a
    /// topological order of the whole.
    pub(crate) fn replicate<R: Iterator<Item = u32>>(
        &self,
        rows: Vec<WiredRow>,
        num_ranks: u32,
        pipeline_rank: impl Fn(Rank) -> usize,
        row_at: impl Fn(Rank, StageIndex) -> usize,
        rows_of: impl Fn(StageIndex) -> R,
    ) -> Self {
        let (m, width) = (self.lists.num_microbatches, self.lists.width);
        let mut lists = Lists::new(rows.len(), m, width > 2 * m);
        for rank in (0..num_ranks).map(Rank) {
            for &slot in self.lists.of(pipeline_rank(rank)) {
                let (stage, kind, microbatch) = self.lists.decode(slot);
                lists.push(row_at(rank, self.rows[stage].stage), kind, microbatch);
            }
            lists.end_rank();
        }
        let mut graph = Self { sequence: Vec::with_capacity(lists.num_actions()), lists, rows };
        for node in &self.sequence {
            // A pipeline has one row a stage.
            let stage = node.slot as usize / width;
            let local = node.slot as usize - stage * width;
            for row in rows_of(self.rows[stage].stage) {
                let node = graph.node((row as usize * width + local) as u32);
                graph.sequence.push(node);
            }
        }
        graph
    }

    /// The action of `slot`.
    pub(crate) fn action(&self, slot: u32) -> Action {
        let (row, kind, microbatch) = self.lists.decode(slot);
        Action { stage: self.rows[row].stage, kind, microbatch: microbatch as u32 }
    }

    /// Number of ranks.
    pub(crate) fn num_ranks(&self) -> usize {
        self.lists.num_ranks()
    }

    /// Number of slots, including slots that no action takes.
    pub(crate) fn num_slots(&self) -> usize {
        self.rows.len() * self.lists.width
    }

    /// Where the first action of each microbatch stands in the topological order.
    pub(crate) fn first_positions(&self) -> Vec<usize> {
        let m = self.lists.num_microbatches;
        let mut first = vec![self.sequence.len(); m];
        for (position, node) in self.sequence.iter().enumerate().rev() {
            first[node.slot as usize % self.lists.width % m] = position;
        }
        first
    }

    /// Where a row takes the input of its F from, or of its B or I.
    fn source(&self, row: usize, is_forward: bool) -> Source {
        let wired = &self.rows[row];
        if is_forward { wired.forward } else { wired.backward }
    }

    /// The same action of the row `other`.
    fn at_row(&self, slot: u32, other: u32) -> u32 {
        let width = self.lists.width as u32;
        slot % width + other * width
    }

    fn node(&self, slot: u32) -> Node {
        let (row, kind, microbatch) = self.lists.decode(slot);
        let rank = self.rows[row].rank;
        let forward = (row * self.lists.width + microbatch) as u32;
        let alone = Node { slot, rank, source: NOTHING, detail: forward };
        if kind == ActionKind::W {
            // A W needs only its own I, which comes earlier in the list of the same rank.
            return alone;
        }
        match self.source(row, kind == ActionKind::F) {
            Source::Nothing => alone,
            // The other row is on the same rank. Its action comes earlier in the list, and nothing is sent.
            Source::Row(other) if self.rows[other as usize].rank == rank => alone,
            Source::Row(other) => Node { source: self.at_row(slot, other), ..alone },
            Source::Boundary { replica } => Node { source: BOUNDARY, detail: replica, ..alone },
        }
    }

    /// The first input of `slot` that is not done.
    fn missing_input(&self, slot: u32, feeds: &Feeds, is_done: &[bool]) -> Option<u32> {
        let is_missing = |input: &u32| !is_done[*input as usize];
        let (row, kind, microbatch) = self.lists.decode(slot);
        // A backward needs the activations that its own forward kept. A W needs what its I kept.
        let own = (kind != ActionKind::F).then(|| slot - self.lists.num_microbatches as u32);
        if let Some(own) = own.filter(is_missing) {
            return Some(own);
        }
        if kind == ActionKind::W {
            return None;
        }
        match self.source(row, kind == ActionKind::F) {
            Source::Nothing => None,
            Source::Row(other) => Some(self.at_row(slot, other)).filter(is_missing),
            Source::Boundary { replica } => {
                let rows = if kind == ActionKind::F { &feeds.forward } else { &feeds.backward };
                rows.row(microbatch, replica).iter().map(|&r| self.at_row(slot, r)).find(is_missing)
            }
        }
    }

    /// Times every action: it starts when its rank is free and its inputs have arrived.
    ///
    /// `ready_ns` is when each rank may start, empty for 0.
    pub(crate) fn run(&self, times: &Times, ready_ns: &[u64], clock: &mut Clock) {
        clock.end_ns.resize(self.num_slots(), 0);
        clock.last_end_ns.clear();
        clock.last_end_ns.extend_from_slice(ready_ns);
        clock.last_end_ns.resize(self.num_ranks(), 0);
        self.run_from(0, times, clock);
    }

    /// Times the actions from `position` of the topological order on. For the actions before `position` the clock must
    /// already hold their ends, and the last end on each rank.
    pub(crate) fn run_from(&self, position: usize, times: &Times, clock: &mut Clock) {
        let &Times { durations_ns, feeds, order, transfer_ns } = times;
        let (m, width) = (self.lists.num_microbatches, self.lists.width);
        let (end_ns, last_end_ns) = (clock.end_ns.as_mut_slice(), clock.last_end_ns.as_mut_slice());
        let mut met_ns = 0;
        for node in &self.sequence[position..] {
            let (slot, rank) = (node.slot as usize, node.rank as usize);
            let mut start = last_end_ns[rank];
            if node.source < MEETING {
                // Without a sample nothing is sent.
                let has_sample = durations_ns[node.detail as usize] > 0;
                let sent_ns = if has_sample { transfer_ns } else { 0 };
                start = start.max(end_ns[node.source as usize] + sent_ns);
            } else if node.source == BOUNDARY {
                let local = slot % width;
                let (rows, microbatch) =
                    if local < m { (&feeds.forward, local) } else { (&feeds.backward, local - m) };
                let has_sample = durations_ns[slot - local + microbatch] > 0;
                let sent_ns = if has_sample { transfer_ns } else { 0 };
                for &other in rows.row(order[microbatch] as usize, node.detail) {
                    start = start.max(end_ns[other as usize * width + local] + sent_ns);
                }
            } else if node.source == MEETING {
                if node.detail > 0 {
                    let group = &last_end_ns[rank..rank + node.detail as usize];
                    met_ns = group.iter().copied().max().unwrap_or(0);
                    if self.is_exchanged(node.slot, feeds, order) {
                        met_ns += transfer_ns;
                    }
                }
                start = met_ns;
            }
            let end = start + durations_ns[slot];
            end_ns[slot] = end;
            last_end_ns[rank] = end;
        }
    }

    /// Whether colocated ranks exchange something before this action, because some ranks encode samples of others. They
    /// exchange features before the LLM's forward, and gradients of features before the encoder's backward.
    fn is_exchanged(&self, slot: u32, feeds: &Feeds, order: &[u32]) -> bool {
        let (row, kind, microbatch) = self.lists.decode(slot);
        let is_forward = kind == ActionKind::F;
        let is_over = kind != ActionKind::W && self.source(row, is_forward) != Source::Nothing;
        is_over && feeds.exchanges.get(order[microbatch] as usize).is_some_and(|&is_exchanged| is_exchanged)
    }

    /// Calls `found` with rank, place in its list and opening of each message that an action takes from another rank, by the
    /// pass that `clock` holds; of two actions that start together, the one of the lower rank is the first. Where colocated
    /// ranks exchange something before an action, nothing is found: which ranks give it is not in the graph.
    ///
    /// `of_rank`: that rank alone.
    pub(crate) fn openings(
        &self,
        of_rank: Option<u32>,
        times: &Times,
        clock: &Clock,
        mut found: impl FnMut(u32, usize, Opening),
    ) {
        let (m, width) = (self.lists.num_microbatches, self.lists.width);
        let turn = |slot: usize| {
            let start_ns = clock.end_ns[slot] - times.durations_ns[slot];
            (start_ns, self.rows[slot / width].rank)
        };
        // What gives a message starts before the action that takes it. So the actions of a rank seen so far are enough.
        let mut started = vec![Vec::new(); self.num_ranks()];
        for node in self.sequence.iter().filter(|node| of_rank.is_none_or(|rank| rank == node.rank)) {
            let own = &mut started[node.rank as usize];
            let mut give = |slot: usize| {
                let given = turn(slot);
                let num_before = own.partition_point(|&own| own < given) as u32;
                if given.1 != node.rank {
                    found(
                        node.rank,
                        own.len(),
                        Opening { giver: Rank(given.1), start_ns: given.0, num_before },
                    );
                }
            };
            match node.source {
                _ if self.is_exchanged(node.slot, times.feeds, times.order) => {}
                NOTHING | MEETING => {}
                BOUNDARY => {
                    let local = node.slot as usize % width;
                    let (rows, microbatch) = if local < m {
                        (&times.feeds.forward, local)
                    } else {
                        (&times.feeds.backward, local - m)
                    };
                    let rows = rows.row(times.order[microbatch] as usize, node.detail);
                    for &row in rows {
                        give(row as usize * width + local);
                    }
                }
                input => give(input as usize),
            }
            own.push(turn(node.slot as usize));
        }
    }

    /// `[position][rank]`: how many actions of each rank come before each of `positions` in the topological order.
    pub(crate) fn actions_before(&self, positions: &[usize]) -> Vec<u32> {
        let num_ranks = self.num_ranks();
        let mut by_position: Vec<usize> = (0..positions.len()).collect();
        by_position.sort_unstable_by_key(|&at| positions[at]);
        let mut before = vec![0; positions.len() * num_ranks];
        let mut count = vec![0; num_ranks];
        let mut done = 0;
        for at in by_position {
            for node in &self.sequence[done..positions[at]] {
                count[node.rank as usize] += 1;
            }
            done = positions[at];
            before[at * num_ranks..(at + 1) * num_ranks].copy_from_slice(&count);
        }
        before
    }
}
