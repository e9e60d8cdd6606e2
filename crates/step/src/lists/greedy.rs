//! Greedy list scheduling: one pass over all ranks makes their action lists, by one rule, within what each rank may hold.
//!
//! Time runs forward over the moments at which a rank becomes free or something arrives. At each moment a free rank takes
//! one of at most three actions: its next forward, its next backward (B, or I if the backward is split), or its next W.
//! Which forward and which backward come next, the turns of its component say ([`Turns`]).
//!
//! A pass cannot get stuck as long as each rank has the least room that its turns ask for ([`Turns::least_room`]). Where a
//! rank has one stage that is room for each microbatch alone. Proof: take the first backward, in the order of turns, that is
//! not done on all ranks. All backwards before it are done. Take the first forward up to it that is not done on all
//! ranks. Its inputs are there, because everything before it is done. The rank has room: it holds no more than the least room
//! less this forward, because it has run no later forward, and each W that is left can run first. If there is no such forward,
//! the backward itself has all that it needs, from the last stage on; it needs no room. And a rank that waits by choice waits
//! only for something that is already under way.

use crate::lists::turns::{Turn, Turns};
use dflop_sim::StepInput;
use dflop_sim::wiring::{Feeds, Source, WiredRow};
use dflop_types::ActionKind;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// The rows of one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RankRows {
    /// Row of its first chunk.
    pub(crate) first: usize,
    /// Rows from one of its chunks to the next.
    pub(crate) stride: usize,
    /// 0 for an encoder rank, 1 for a rank of the LLM backbone.
    pub(crate) component: usize,
}

/// A step as a pass sees it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Work<'a> {
    pub(crate) step: &'a StepInput,
    pub(crate) rows: &'a [WiredRow],
    pub(crate) ranks: &'a [RankRows],
    pub(crate) feeds: &'a Feeds,
    /// What `[row][microbatch]` holds from its F to the end of its B or W, in the unit of `Holding`.
    pub(crate) held: &'a [Vec<u64>],
    /// The most that each rank may hold, in the same unit.
    pub(crate) cap: &'a [u64],
    /// Whether the backward is split.
    pub(crate) is_split: bool,
}

impl<'a> Work<'a> {
    pub(crate) const fn num_microbatches(&self) -> usize {
        self.step.num_microbatches as usize
    }

    /// When each rank may begin, in nanoseconds.
    pub(crate) fn ready_ns(&self) -> Vec<u64> {
        let of = |rank| self.step.ready_ns.get(rank).filter(|_| self.num_microbatches() > 0);
        (0..self.ranks.len()).map(|rank| of(rank).map_or(0, |&ns| ns)).collect()
    }

    /// The row and the microbatch of a turn of `rank`.
    const fn place(&self, rank: usize, turn: Turn) -> (usize, usize) {
        let rows = self.ranks[rank];
        (rows.first + turn.chunk as usize * rows.stride, turn.microbatch as usize)
    }

    /// Whether each rank has the least room that `turns`, by component, ask for.
    pub(crate) fn has_room(&self, turns: &[Turns; 2]) -> bool {
        let held = |rank, turn| {
            let (row, j) = self.place(rank, turn);
            self.held[row][j]
        };
        let least = |rank: usize| turns[self.ranks[rank].component].least_room(|turn| held(rank, turn));
        (0..self.ranks.len()).all(|rank| least(rank) <= self.cap[rank])
    }

    /// By microbatch: whether it leaves no room for the first chunk of another one on some rank with several chunks. Such a
    /// microbatch needs a round of its own.
    pub(crate) fn alone(&self) -> Vec<bool> {
        let mut alone = vec![false; self.num_microbatches()];
        for (of, &cap) in self.ranks.iter().zip(self.cap).filter(|(of, _)| of.stride > 0) {
            let chunks = self.step.layout.llm_interleave as usize;
            let first = &self.held[of.first];
            for (j, is_alone) in alone.iter_mut().enumerate() {
                let own = (0..chunks).map(|chunk| self.held[of.first + chunk * of.stride][j]);
                let own = own.fold(0_u64, u64::saturating_add);
                let others = first.iter().enumerate().filter(|&(other, &held)| other != j && held > 0);
                let least = others.map(|(_, &held)| held).min();
                *is_alone |= least.is_some_and(|least| own.saturating_add(least) > cap);
            }
        }
        alone
    }

    /// Rows that a forward of `row` waits for. The output of its backward is sent to them.
    pub(crate) fn before(&self, row: usize, microbatch: usize) -> Others<'a> {
        match self.rows[row].forward {
            Source::Nothing => Others::None,
            Source::Row(row) => Others::One(row),
            Source::Boundary { replica } => Others::Some(self.feeds.forward.row(microbatch, replica)),
        }
    }

    /// Rows that a backward of `row` waits for. The output of its forward is sent to them.
    fn after(&self, row: usize, microbatch: usize) -> Others<'a> {
        match self.rows[row].backward {
            Source::Nothing => Others::None,
            Source::Row(row) => Others::One(row),
            Source::Boundary { replica } => Others::Some(self.feeds.backward.row(microbatch, replica)),
        }
    }
}

/// None, one or several rows, without an allocation.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Others<'a> {
    None,
    One(u32),
    Some(&'a [u32]),
}

impl Others<'_> {
    fn len(self) -> usize {
        match self {
            Self::None => 0,
            Self::One(_) => 1,
            Self::Some(rows) => rows.len(),
        }
    }

    pub(crate) fn for_each(self, mut see: impl FnMut(usize)) {
        match self {
            Self::None => {}
            Self::One(row) => see(row as usize),
            Self::Some(rows) => rows.iter().for_each(|&row| see(row as usize)),
        }
    }
}

/// How a free rank chooses among its actions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rule {
    /// If a forward and a backward are both ready, the forward goes first.
    pub(crate) is_forward_first: bool,
    /// If the rank is full and its next forward is ready, it runs a W before anything else, to make room.
    pub(crate) makes_room: bool,
    /// If a backward is under way, the rank waits for it and starts no forward. It does so only if the wait is at most this
    /// fraction of the forward's time, in thousandths.
    pub(crate) wait_permille: u64,
    /// A W may delay the next forward or backward that arrives by at most this fraction of the W's time, in thousandths.
    pub(crate) delay_permille: u64,
}

/// State of one rank.
#[derive(Debug, Clone, Copy, Default)]
struct RankState {
    free_ns: u64,
    /// How long it may still be idle in a pass that is not too long.
    spare_ns: u64,
    /// Positions in the turns: of the next F, of the next B or I, of the next W.
    forward: usize,
    backward: usize,
    weight: usize,
    held: u64,
}

/// When the inputs of an action arrive, and how many of them are not yet under way.
#[derive(Debug, Clone, Copy, Default)]
struct Arrival {
    ns: u64,
    missing: u32,
}

impl Arrival {
    /// When all inputs are there, in nanoseconds; `None` while one is not yet under way.
    fn known_ns(self) -> Option<u64> {
        (self.missing == 0).then_some(self.ns)
    }
}

/// Kind and turn of each action of a rank.
pub(crate) type Listed = Vec<(ActionKind, Turn)>;

/// The lists that a pass made, and its scratch space, so that the next pass allocates nothing.
#[derive(Debug, Clone)]
pub(crate) struct Pass {
    /// By rank.
    pub(crate) lists: Vec<Listed>,
    /// When each rank may begin.
    ready_ns: Vec<u64>,
    /// The makespan of a step in which a rank is never idle once it may begin, by rank, in nanoseconds.
    never_idle_ns: Vec<u64>,
    /// The arrivals of forwards and of backwards before anything has run.
    first: [Vec<Arrival>; 2],
    ranks: Vec<RankState>,
    forward: Vec<Arrival>,
    backward: Vec<Arrival>,
    events: BinaryHeap<Reverse<(u64, u32)>>,
}

impl Pass {
    /// `never_idle_ns`: [`Least`](crate::lists::least::Least) has it.
    pub(crate) fn new(work: &Work, never_idle_ns: Vec<u64>) -> Self {
        let m = work.num_microbatches();
        let ready_ns = work.ready_ns();
        let mut first = [Vec::new(), Vec::new()];
        for row in 0..work.rows.len() {
            for j in 0..m {
                let missing = [work.before(row, j), work.after(row, j)].map(|others| others.len() as u32);
                for (first, missing) in first.iter_mut().zip(missing) {
                    first.push(Arrival { ns: 0, missing });
                }
            }
        }
        Self {
            lists: vec![Vec::new(); work.ranks.len()],
            ready_ns,
            never_idle_ns,
            first,
            ranks: Vec::new(),
            forward: Vec::new(),
            backward: Vec::new(),
            events: BinaryHeap::new(),
        }
    }

    /// Makes the lists of `work` with the `turns` of each component; their makespan in nanoseconds, tails included.
    ///
    /// `None` if the makespan is above `most_ns`. The pass ends as soon as that is certain, because a rank has been idle for too
    /// long: most orders that a search tries are longer than the best one, and half of such a pass need not be run.
    ///
    /// ```text
    /// makespan >= when a rank may begin + its work + its idle time so far + what comes after its last action
    /// ```
    ///
    /// *Complexity*: O(n log n) for n actions.
    pub(crate) fn run(&mut self, work: &Work, turns: &[Turns; 2], rule: Rule, most_ns: u64) -> Option<u64> {
        self.reset(most_ns)?;
        while let Some(Reverse((now_ns, rank))) = self.events.pop() {
            let rank = rank as usize;
            let of_rank = &turns[work.ranks[rank].component];
            if self.ranks[rank].free_ns <= now_ns
                && let Some(kind) = self.choose(work, of_rank, rule, rank, now_ns)
            {
                let state = &mut self.ranks[rank];
                state.spare_ns = state.spare_ns.checked_sub(now_ns - state.free_ns)?;
                self.start(work, of_rank, rank, kind, now_ns);
            }
        }
        let mut meet_ns = [0; 2];
        for (of, rank) in work.ranks.iter().zip(&self.ranks) {
            meet_ns[of.component] = rank.free_ns.max(meet_ns[of.component]);
        }
        let ends =
            work.ranks.iter().zip(&work.step.tail_ns).map(|(of, tail_ns)| meet_ns[of.component] + tail_ns);
        ends.max().or(Some(0)).filter(|&makespan_ns| makespan_ns <= most_ns)
    }

    /// Nothing has run. `None` if some rank has too much work for a makespan of `most_ns`.
    fn reset(&mut self, most_ns: u64) -> Option<()> {
        self.lists.iter_mut().for_each(Vec::clear);
        self.ranks.clear();
        self.events.clear();
        for (rank, (&free_ns, &least_ns)) in (0..).zip(self.ready_ns.iter().zip(&self.never_idle_ns)) {
            let spare_ns = most_ns.checked_sub(least_ns)?;
            self.ranks.push(RankState { free_ns, spare_ns, ..RankState::default() });
            self.events.push(Reverse((free_ns, rank)));
        }
        let [forward, backward] = &self.first;
        self.forward.clone_from(forward);
        self.backward.clone_from(backward);
        Some(())
    }

    /// The action that a free rank starts now; `None` if it must wait, or chooses to.
    fn choose(&self, work: &Work, turns: &Turns, rule: Rule, rank: usize, now_ns: u64) -> Option<ActionKind> {
        let (state, m) = (&self.ranks[rank], work.num_microbatches());
        let backward_kind = if work.is_split { ActionKind::I } else { ActionKind::B };
        let place = |&turn: &Turn| work.place(rank, turn);
        let next_forward = turns.forwards.get(state.forward).map(place);
        let has_run = turns.needs.get(state.backward).is_some_and(|&needs| needs as usize <= state.forward);
        let next_backward = if has_run { turns.backwards.get(state.backward).map(place) } else { None };
        let is_left = work.is_split && state.weight < state.backward;
        let next_weight = if is_left { turns.backwards.get(state.weight).map(place) } else { None };
        let fits = next_forward.is_some_and(|(row, j)| work.held[row][j] <= work.cap[rank] - state.held);
        let forward_ns = next_forward.and_then(|(row, j)| self.forward[row * m + j].known_ns());
        let backward_ns = next_backward.and_then(|(row, j)| self.backward[row * m + j].known_ns());
        let is_there = |ns: Option<u64>| ns.is_some_and(|ns| ns <= now_ns);
        let (has_forward, has_backward) = (is_there(forward_ns), is_there(backward_ns));
        if has_forward && !fits && next_weight.is_some() && (rule.makes_room || !has_backward) {
            return Some(ActionKind::W);
        }
        let can_forward = has_forward && fits;
        if has_backward && !(rule.is_forward_first && can_forward) {
            return Some(backward_kind);
        }
        if can_forward {
            let wait_ns = backward_ns.filter(|&ns| ns > now_ns).map(|ns| ns - now_ns);
            let forward_ns = next_forward.map_or(0, |(row, j)| work.step.forward_ns[row][j]);
            let is_worth = |ns: u64| share(forward_ns, rule.wait_permille) >= u128::from(ns);
            if !wait_ns.is_some_and(is_worth) {
                return Some(ActionKind::F);
            }
        }
        let (row, weight) = next_weight?;
        // The next input that is under way arrives at this time. A W that would delay it too long is put off.
        let next_ns =
            backward_ns.into_iter().chain(forward_ns.filter(|_| fits)).filter(|&ns| ns > now_ns).min();
        let weight_ns = work.step.weight_ns[row][weight];
        let fills = |ns: u64| {
            u128::from(now_ns) + u128::from(weight_ns)
                <= u128::from(ns) + share(weight_ns, rule.delay_permille)
        };
        next_ns.is_none_or(fills).then_some(ActionKind::W)
    }

    fn start(&mut self, work: &Work, turns: &Turns, rank: usize, kind: ActionKind, now_ns: u64) {
        let m = work.num_microbatches();
        let state = &mut self.ranks[rank];
        let (turns, at, rows) = match kind {
            ActionKind::F => (&turns.forwards, &mut state.forward, &work.step.forward_ns),
            ActionKind::B => (&turns.backwards, &mut state.backward, &work.step.backward_ns),
            ActionKind::I => (&turns.backwards, &mut state.backward, &work.step.input_ns),
            ActionKind::W => (&turns.backwards, &mut state.weight, &work.step.weight_ns),
        };
        let turn = turns[*at];
        let (row, microbatch) = work.place(rank, turn);
        *at += 1;
        match kind {
            ActionKind::F => state.held += work.held[row][microbatch],
            ActionKind::I => {}
            ActionKind::B | ActionKind::W => state.held -= work.held[row][microbatch],
        }
        let end_ns = now_ns + rows[row][microbatch];
        state.free_ns = end_ns;
        self.lists[rank].push((kind, turn));
        self.events.push(Reverse((end_ns, rank as u32)));
        let (receivers, arrivals) = match kind {
            ActionKind::F => (work.after(row, microbatch), &mut self.forward),
            ActionKind::B | ActionKind::I => (work.before(row, microbatch), &mut self.backward),
            ActionKind::W => return,
        };
        receivers.for_each(|receiver| {
            // Without a sample nothing is sent.
            let has_sample = work.step.forward_ns[receiver][microbatch] > 0;
            let there_ns = end_ns + if has_sample { work.step.transfer_ns } else { 0 };
            let arrival = &mut arrivals[receiver * m + microbatch];
            arrival.ns = arrival.ns.max(there_ns);
            arrival.missing -= 1;
            // If the receiver is still busy at that time, it looks for its next action when it becomes free.
            let rank = work.rows[receiver].rank;
            if arrival.missing == 0 && self.ranks[rank as usize].free_ns <= arrival.ns {
                self.events.push(Reverse((arrival.ns, rank)));
            }
        });
    }
}

fn share(ns: u64, permille: u64) -> u128 {
    u128::from(ns) * u128::from(permille) / 1000
}
