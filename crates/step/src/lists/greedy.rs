//! Greedy list scheduling: one pass over all ranks makes their action lists, by one rule, within what each rank may hold.
//!
//! Time runs forward over the moments at which a rank becomes free or something arrives. At each moment a free rank takes
//! one of at most three actions: its next forward, its next backward (B, or I if the backward is split), or its next W.
//! All ranks run forwards and backwards through the microbatches in one order. So messages between two ranks arrive in the
//! order in which the receiver waits for them.
//!
//! A pass cannot get stuck as long as each microbatch alone fits each rank. Proof: take the first microbatch, in that order,
//! that is not done on all ranks. The inputs of its next forward are there, because everything before it is done. The
//! rank has room, because it holds nothing: later microbatches come later. Once all its forwards are done, the same holds
//! for its backwards, from the last stage on; these need no room. And a rank that waits by choice waits only for something
//! that is already under way.

use dflop_sim::StepInput;
use dflop_sim::wiring::{Feeds, Source, WiredRow};
use dflop_types::ActionKind;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// A step as a pass sees it. Each rank has one row.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Work<'a> {
    pub(crate) step: &'a StepInput,
    pub(crate) rows: &'a [WiredRow],
    pub(crate) feeds: &'a Feeds,
    /// What `[rank][microbatch]` holds from its F to the end of its B or W, in the unit of `Holding`.
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

    /// Ranks that a forward of `rank` waits for. The output of its backward is sent to them.
    fn before(&self, rank: usize, microbatch: usize) -> Ranks<'a> {
        match self.rows[rank].forward {
            Source::Nothing => Ranks::None,
            Source::Row(row) => Ranks::One(row),
            Source::Boundary { replica } => Ranks::Some(self.feeds.forward.row(microbatch, replica)),
        }
    }

    /// Ranks that a backward of `rank` waits for. The output of its forward is sent to them.
    fn after(&self, rank: usize, microbatch: usize) -> Ranks<'a> {
        match self.rows[rank].backward {
            Source::Nothing => Ranks::None,
            Source::Row(row) => Ranks::One(row),
            Source::Boundary { replica } => Ranks::Some(self.feeds.backward.row(microbatch, replica)),
        }
    }
}

/// None, one or several ranks, without an allocation.
#[derive(Debug, Clone, Copy)]
enum Ranks<'a> {
    None,
    One(u32),
    Some(&'a [u32]),
}

impl Ranks<'_> {
    fn len(self) -> usize {
        match self {
            Self::None => 0,
            Self::One(_) => 1,
            Self::Some(ranks) => ranks.len(),
        }
    }

    fn for_each(self, mut see: impl FnMut(usize)) {
        match self {
            Self::None => {}
            Self::One(rank) => see(rank as usize),
            Self::Some(ranks) => ranks.iter().for_each(|&rank| see(rank as usize)),
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
    /// Positions in the order of microbatches: of the next F, of the next B or I, of the next W.
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

/// Kind and microbatch of each action of a rank.
pub(crate) type Listed = Vec<(ActionKind, u32)>;

/// The lists that a pass made, and its scratch space, so that the next pass allocates nothing.
#[derive(Debug, Clone, Default)]
pub(crate) struct Pass {
    /// By rank.
    pub(crate) lists: Vec<Listed>,
    ranks: Vec<RankState>,
    forward: Vec<Arrival>,
    backward: Vec<Arrival>,
    events: BinaryHeap<Reverse<(u64, u32)>>,
}

impl Pass {
    /// Makes the lists of `work` with the microbatches in `order`; their makespan in nanoseconds, tails included.
    ///
    /// *Complexity*: O(n log n) for n actions.
    pub(crate) fn run(&mut self, work: &Work, order: &[u32], rule: Rule) -> u64 {
        self.reset(work);
        while let Some(Reverse((now_ns, rank))) = self.events.pop() {
            let rank = rank as usize;
            if self.ranks[rank].free_ns <= now_ns
                && let Some(kind) = self.choose(work, order, rule, rank, now_ns)
            {
                self.start(work, order, rank, kind, now_ns);
            }
        }
        let mut meet_ns = [0; 2];
        for (row, rank) in work.rows.iter().zip(&self.ranks) {
            meet_ns[row.component] = rank.free_ns.max(meet_ns[row.component]);
        }
        let ends =
            work.rows.iter().zip(&work.step.tail_ns).map(|(row, tail_ns)| meet_ns[row.component] + tail_ns);
        ends.max().unwrap_or(0)
    }

    fn reset(&mut self, work: &Work) {
        let (num_ranks, m) = (work.rows.len(), work.num_microbatches());
        self.lists.resize(num_ranks, Vec::new());
        self.lists.iter_mut().for_each(Vec::clear);
        self.ranks.clear();
        self.forward.clear();
        self.backward.clear();
        self.events.clear();
        for rank in 0..num_ranks {
            let free_ns = if m == 0 { 0 } else { work.step.ready_ns.get(rank).map_or(0, |&ns| ns) };
            self.ranks.push(RankState { free_ns, ..RankState::default() });
            self.events.push(Reverse((free_ns, rank as u32)));
            for j in 0..m {
                let missing = work.before(rank, j).len() as u32;
                self.forward.push(Arrival { ns: 0, missing });
                let missing = work.after(rank, j).len() as u32;
                self.backward.push(Arrival { ns: 0, missing });
            }
        }
    }

    /// The action that a free rank starts now; `None` if it must wait, or chooses to.
    fn choose(&self, work: &Work, order: &[u32], rule: Rule, rank: usize, now_ns: u64) -> Option<ActionKind> {
        let (state, m) = (&self.ranks[rank], work.num_microbatches());
        let backward_kind = if work.is_split { ActionKind::I } else { ActionKind::B };
        let next_forward = order.get(state.forward).map(|&j| j as usize);
        let next_backward = order[..state.forward].get(state.backward).map(|&j| j as usize);
        let next_weight = if work.is_split { order[..state.backward].get(state.weight) } else { None };
        let fits = next_forward.is_some_and(|j| work.held[rank][j] <= work.cap[rank] - state.held);
        let forward_ns = next_forward.and_then(|j| self.forward[rank * m + j].known_ns());
        let backward_ns = next_backward.and_then(|j| self.backward[rank * m + j].known_ns());
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
            let forward_ns = next_forward.map_or(0, |j| work.step.forward_ns[rank][j]);
            let is_worth = |ns: u64| share(forward_ns, rule.wait_permille) >= u128::from(ns);
            if !wait_ns.is_some_and(is_worth) {
                return Some(ActionKind::F);
            }
        }
        let weight = *next_weight?;
        // The next input that is under way arrives at this time. A W that would delay it too long is put off.
        let next_ns =
            backward_ns.into_iter().chain(forward_ns.filter(|_| fits)).filter(|&ns| ns > now_ns).min();
        let weight_ns = work.step.weight_ns[rank][weight as usize];
        let fills = |ns: u64| {
            u128::from(now_ns) + u128::from(weight_ns)
                <= u128::from(ns) + share(weight_ns, rule.delay_permille)
        };
        next_ns.is_none_or(fills).then_some(ActionKind::W)
    }

    fn start(&mut self, work: &Work, order: &[u32], rank: usize, kind: ActionKind, now_ns: u64) {
        let m = work.num_microbatches();
        let state = &mut self.ranks[rank];
        let (place, rows) = match kind {
            ActionKind::F => (&mut state.forward, &work.step.forward_ns),
            ActionKind::B => (&mut state.backward, &work.step.backward_ns),
            ActionKind::I => (&mut state.backward, &work.step.input_ns),
            ActionKind::W => (&mut state.weight, &work.step.weight_ns),
        };
        let microbatch = order[*place] as usize;
        *place += 1;
        match kind {
            ActionKind::F => state.held += work.held[rank][microbatch],
            ActionKind::I => {}
            ActionKind::B | ActionKind::W => state.held -= work.held[rank][microbatch],
        }
        let end_ns = now_ns + rows[rank][microbatch];
        state.free_ns = end_ns;
        self.lists[rank].push((kind, microbatch as u32));
        self.events.push(Reverse((end_ns, rank as u32)));
        let (receivers, arrivals) = match kind {
            ActionKind::F => (work.after(rank, microbatch), &mut self.forward),
            ActionKind::B | ActionKind::I => (work.before(rank, microbatch), &mut self.backward),
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
            if arrival.missing == 0 && self.ranks[receiver].free_ns <= arrival.ns {
                self.events.push(Reverse((arrival.ns, receiver as u32)));
            }
        });
    }
}

fn share(ns: u64, permille: u64) -> u128 {
    u128::from(ns) * u128::from(permille) / 1000
}
