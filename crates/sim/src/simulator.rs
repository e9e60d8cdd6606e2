//! The simulator: a step is checked and made ready once, and can then be timed many times.

use crate::durations::Durations;
use crate::engine::{Clock, Graph, Opening, Times};
use crate::error::SimError;
use crate::lists::Lists;
use crate::order;
use crate::step::StepInput;
use crate::wiring::{Feeds, Source, WiredRow};
use dflop_types::{Action, PipelineOrder, Rank, StageIndex};

/// A step made ready for timing: checked, with its graph sorted and its durations in one flat list.
///
/// [`crate::simulate_step`] is enough for one timeline. This is for a search over one step: once made, timing
/// an order of microbatches allocates nothing.
///
/// # Examples
/// ```
/// # use dflop_types::{ComponentLayout, Layout, PipelineOrder};
/// # let one = ComponentLayout { tp: 1, pp: 1, dp: 1 };
/// let input = dflop_sim::StepInput {
///     layout: Layout::disaggregated(one, one),
///     order: PipelineOrder::OneFOneB,
///     num_microbatches: 2,
///     forward_ns: vec![vec![1, 9], vec![4, 4]],
///     backward_ns: vec![vec![2, 2], vec![4, 4]],
///     input_ns: Vec::new(),
///     weight_ns: Vec::new(),
///     feeds: vec![vec![vec![0]]; 2],
///     transfer_ns: 0,
///     tail_ns: vec![0, 0],
///     ready_ns: Vec::new(),
/// };
/// let mut simulator = dflop_sim::Simulator::new(&input)?;
/// assert_eq!(simulator.makespan_ns(), 20);
/// // The cheap encoder microbatch last: the pipeline fills more slowly.
/// assert_eq!(simulator.makespan_in_order(&[1, 0]), 27);
/// # Ok::<(), dflop_sim::SimError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Simulator {
    pub(crate) graph: Graph,
    pub(crate) feeds: Feeds,
    /// Duration of each slot.
    pub(crate) durations_ns: Vec<u64>,
    /// Tail of each rank.
    pub(crate) tails_ns: Vec<u64>,
    /// When each rank has its data; empty if all ranks have it from the start.
    pub(crate) ready_ns: Vec<u64>,
    pub(crate) transfer_ns: u64,
    /// The order of the microbatches now: `standing[j]` is the microbatch of the input that is the j-th one. It is 0, 1,
    /// ... m - 1 until two of them swap.
    pub(crate) standing: Vec<u32>,
    pub(crate) clock: Clock,
    /// Whether the lists are those of a pipeline order. Then no order of microbatches can deadlock.
    pub(crate) is_ordered: bool,
    /// Scratch space: durations and feed rows of the order that is being tried, or durations of uniform work.
    pub(crate) tried: (Vec<u64>, Vec<u32>),
    pub(crate) swaps: Swaps,
}

/// What swaps need in addition to the simulator's own lists. It is made at the first swap.
#[derive(Debug, Clone, Default)]
pub(crate) struct Swaps {
    /// Whether the clock holds the times of the step in its present order.
    pub(crate) is_timed: bool,
    /// The position of the first action of each microbatch in the topological order.
    pub(crate) first: Vec<usize>,
    /// `[microbatch][rank]`: how many actions the rank has run before that position.
    pub(crate) before: Vec<u32>,
    /// The last swap, which can be undone; `None` if there is none.
    pub(crate) last: Option<(usize, usize)>,
    /// The clock before the last swap. Copying all of it is faster than finding what changes.
    pub(crate) before_it: Clock,
}

impl Swaps {
    /// Notes that the clock no longer holds the times of the step in its present order.
    pub(crate) fn forget(&mut self) {
        self.is_timed = false;
        self.last = None;
    }
}

impl Simulator {
    /// The simulator of `input` under its pipeline order.
    ///
    /// # Errors
    /// [`SimError::Unsound`] with every violation of the input, [`SimError::Overflow`].
    pub fn new(input: &StepInput) -> Result<Self, SimError> {
        input.check()?;
        input.check_order()?;
        let (p, m) = (input.layout.num_stages(), input.num_microbatches);
        let lists_of = |input: &StepInput| -> Vec<Vec<Action>> {
            (0..input.layout.num_ranks()).filter_map(|rank| input.actions(Rank(rank))).collect()
        };
        if input.layout.is_colocated() {
            return Self::with_lists(input, &lists_of(input));
        }
        let pipeline = if input.layout.is_interleaved() {
            let one = input.pipeline();
            Graph::new(one.wired_rows(), one.lists(&lists_of(&one))?, &one.boundary())?
        } else {
            Graph::new(chain(p, p), ordered(input.order, p, m), &Feeds::default())?
        };
        let graph = pipeline.replicate(
            input.wired_rows(),
            input.layout.num_ranks(),
            // The number of a rank's first stage is also the rank's position in the pipeline.
            |rank| input.layout.coordinates(rank).map_or(0, |at| at.stage.index()),
            |rank, stage| input.row(rank, stage),
            |stage| input.rows_of(stage),
        );
        let mut simulator = Self::of_graph(graph, input)?;
        simulator.is_ordered = true;
        Ok(simulator)
    }

    /// The simulator of `input` with the action list of each rank in place of its pipeline order.
    ///
    /// # Errors
    /// [`SimError::Unsound`] with every violation of the input or, if it has none, of the lists: each rank must
    /// run `F`, and `B` or `I` and `W`, of each microbatch of its stage once; `I` and `W` need times in the input.
    /// [`SimError::Deadlock`], [`SimError::Overflow`].
    pub fn with_lists(input: &StepInput, lists: &[Vec<Action>]) -> Result<Self, SimError> {
        input.check()?;
        let lists = input.lists(lists)?;
        let graph = Graph::new(input.wired_rows(), lists, &input.boundary())?;
        Self::of_graph(if input.meets() { graph.meeting() } else { graph }, input)
    }

    fn of_graph(graph: Graph, input: &StepInput) -> Result<Self, SimError> {
        let durations_ns = input.rows().by_slot(&graph.lists);
        let mut simulator =
            Self::ready(graph, input.boundary(), durations_ns, input.tail_ns.clone(), input.transfer_ns);
        // A step without actions waits for no data.
        if input.num_microbatches > 0 {
            simulator.ready_ns.clone_from(&input.ready_ns);
        }
        simulator.checked()
    }

    /// The simulator of one pipeline, one rank a stage.
    pub(crate) fn of_pipeline(durations: &Durations, order: PipelineOrder) -> Result<Self, SimError> {
        let (p, m) = durations.sizes()?;
        durations.check_order(order)?;
        let mut simulator = Self::of_lists(durations, chain(p, p), ordered(order, p, m))?;
        simulator.is_ordered = true;
        Ok(simulator)
    }

    /// The simulator of one pipeline whose stages are dealt round over `num_ranks`.
    pub(crate) fn interleaved(durations: &Durations, num_ranks: u32) -> Result<Self, SimError> {
        let (p, m) = durations.sizes()?;
        let mut lists = Lists::new(p as usize, m as usize, false);
        for rank in 0..num_ranks.max(1) {
            for action in order::interleaved(Rank(rank), num_ranks, p, m)? {
                lists.push(action.stage.index(), action.kind, action.microbatch as usize);
            }
            lists.end_rank();
        }
        let mut simulator = Self::of_lists(durations, chain(p, num_ranks), lists)?;
        if num_ranks == 1 {
            // With one rank nothing is sent.
            simulator.transfer_ns = 0;
        }
        Ok(simulator)
    }

    fn of_lists(durations: &Durations, rows: Vec<WiredRow>, lists: Lists) -> Result<Self, SimError> {
        let durations_ns = durations.rows().by_slot(&lists);
        let tails_ns = vec![0; lists.num_ranks()];
        let graph = Graph::new(rows, lists, &Feeds::default())?;
        Self::ready(graph, Feeds::default(), durations_ns, tails_ns, durations.transfer_ns).checked()
    }

    fn ready(
        graph: Graph,
        feeds: Feeds,
        durations_ns: Vec<u64>,
        tails_ns: Vec<u64>,
        transfer_ns: u64,
    ) -> Self {
        let standing = (0..graph.lists.num_microbatches as u32).collect();
        Self {
            graph,
            feeds,
            durations_ns,
            tails_ns,
            ready_ns: Vec::new(),
            transfer_ns,
            standing,
            clock: Clock::default(),
            is_ordered: false,
            tried: (Vec::new(), Vec::new()),
            swaps: Swaps::default(),
        }
    }

    /// The simulator, if no sum of its times overflows.
    fn checked(mut self) -> Result<Self, SimError> {
        // An upper bound for every path: when the last rank has its data, then all actions, all tails, and as many
        // transfers as actions. If this sum fits 64 bits, no pass can overflow.
        let mut times = self.durations_ns.iter().chain(&self.tails_ns).chain(self.ready_ns.iter().max());
        let work = times.try_fold(0_u64, |sum, &ns| sum.checked_add(ns));
        let transfers = self.transfer_ns.checked_mul(self.durations_ns.len() as u64);
        let bound = work.zip(transfers).and_then(|(work, transfers)| work.checked_add(transfers));
        let num_ranks = self.graph.num_ranks();
        // Idle time is counted over all ranks.
        let whole = bound.and_then(|_| self.makespan_ns().checked_mul(num_ranks as u64));
        whole.map(|_| self).ok_or(SimError::Overflow { num_ranks })
    }

    /// Makespan of the step with its microbatches in their present order, in nanoseconds, tails included.
    ///
    /// *Complexity*: O(actions + boundary edges).
    pub fn makespan_ns(&mut self) -> u64 {
        let times = Times {
            durations_ns: &self.durations_ns,
            feeds: &self.feeds,
            order: &self.standing,
            transfer_ns: self.transfer_ns,
        };
        self.graph.run(&times, &self.ready_ns, &mut self.clock);
        self.swaps.is_timed = true;
        self.end_ns(true)
    }

    /// For each action of `rank`, in the order of its list, the messages that it takes from other ranks: a message's receive may
    /// open after those of the rank's own actions that start before the action that gives the message. Of two that start
    /// together, the one of the lower rank is the first. Every action must take time. What colocated ranks exchange is not among
    /// the messages.
    ///
    /// Suppose that every rank opens each receive then, and that before each action it waits for all messages under way, those
    /// that it sends too. The ranks still never wait in a circle: what an open receive waits for starts before that action, and
    /// so does what comes before the receive of a message that was sent.
    /// *Complexity*: O(actions + messages of the rank x log actions).
    pub fn openings(&mut self, rank: Rank) -> Vec<Vec<Opening>> {
        let num_actions = self.graph.lists.of(rank.0 as usize).len();
        let mut openings = vec![Vec::new(); num_actions];
        self.each_opening(Some(rank.0), |_, place, opening| openings[place].push(opening));
        openings
    }

    /// `[rank][action]`: how many actions of the rank come before the first receive of this action opens, by
    /// [`Simulator::openings`]. If it takes nothing from other ranks, all before it.
    /// *Complexity*: O(actions + messages x log actions).
    pub fn first_openings(&mut self) -> Vec<Vec<u32>> {
        let num_ranks = self.graph.num_ranks();
        let mut first: Vec<Vec<u32>> =
            (0..num_ranks).map(|rank| (0..self.graph.lists.of(rank).len() as u32).collect()).collect();
        self.each_opening(None, |rank, place, opening| {
            let first = &mut first[rank as usize][place];
            *first = opening.num_before.min(*first);
        });
        first
    }

    fn each_opening(&mut self, of_rank: Option<u32>, found: impl FnMut(u32, usize, Opening)) {
        self.makespan_ns();
        let times = Times {
            durations_ns: &self.durations_ns,
            feeds: &self.feeds,
            order: &self.standing,
            transfer_ns: self.transfer_ns,
        };
        self.graph.openings(of_rank, &times, &self.clock, found);
    }

    /// Makespan in nanoseconds if `order[j]` were microbatch j, tails included.
    ///
    /// *Complexity*: O(actions + boundary edges); allocates nothing after the first call.
    ///
    /// # Panics
    /// If `order` is no permutation of the microbatches, or if the simulator was made from lists: those are known to be
    /// free of deadlock in the given order only.
    pub fn makespan_in_order(&mut self, order: &[usize]) -> u64 {
        let m = self.graph.lists.num_microbatches;
        assert!(self.is_ordered, "microbatches are ordered under a pipeline order, not under lists");
        let (durations_ns, rows) = &mut self.tried;
        rows.clear();
        rows.extend(order.iter().map(|&microbatch| microbatch as u32));
        rows.sort_unstable();
        assert!(
            rows.len() == m && (0..).zip(rows.iter()).all(|(at, &row)| at == row),
            "the order is no permutation of {m} microbatches: {order:?}"
        );
        rows.clear();
        rows.extend(order.iter().map(|&microbatch| self.standing[microbatch]));
        durations_ns.clear();
        if m > 0 {
            for given in self.durations_ns.chunks_exact(m) {
                durations_ns.extend(order.iter().map(|&microbatch| given[microbatch]));
            }
        }
        let times = Times { durations_ns, feeds: &self.feeds, order: rows, transfer_ns: self.transfer_ns };
        self.graph.run(&times, &self.ready_ns, &mut self.clock);
        self.swaps.is_timed = false;
        self.end_ns(true)
    }

    /// When the last pass ends, in nanoseconds. With tails, the ranks of a component meet after their last
    /// actions and then take their tails.
    pub(crate) fn end_ns(&self, has_tails: bool) -> u64 {
        // This takes row r for rank r, although there may be more rows than ranks. It only asks for the component, and
        // there the two agree: the encoder's rows come first, one for each of its ranks, or all rows are of one component.
        let mut meet_ns = [0; 2];
        for (row, &end_ns) in self.graph.rows.iter().zip(&self.clock.last_end_ns) {
            meet_ns[row.component] = end_ns.max(meet_ns[row.component]);
        }
        if !has_tails {
            return meet_ns[0].max(meet_ns[1]);
        }
        let ends = self.graph.rows.iter().zip(&self.tails_ns);
        ends.map(|(row, &tail_ns)| meet_ns[row.component] + tail_ns).max().unwrap_or(0)
    }
}

/// Rows of a pipeline whose stages are dealt round over `num_ranks`.
fn chain(num_stages: u32, num_ranks: u32) -> Vec<WiredRow> {
    let row = |stage| WiredRow {
        stage: StageIndex(stage),
        rank: stage % num_ranks,
        forward: if stage == 0 { Source::Nothing } else { Source::Row(stage - 1) },
        backward: if stage + 1 == num_stages { Source::Nothing } else { Source::Row(stage + 1) },
        component: 0,
    };
    (0..num_stages).map(row).collect()
}

/// The lists of a pipeline with one rank a stage.
fn ordered(order: PipelineOrder, num_stages: u32, num_microbatches: u32) -> Lists {
    let mut lists = Lists::new(num_stages as usize, num_microbatches as usize, order::is_split(order));
    for stage in 0..num_stages {
        order::visit(order, StageIndex(stage), num_stages, num_microbatches, |kind, microbatch| {
            lists.push(stage as usize, kind, microbatch as usize);
        });
        lists.end_rank();
    }
    lists
}
