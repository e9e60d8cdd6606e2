//! The simulator: an input made ready once, timed as often as one likes.

use crate::bubble;
use crate::durations::Durations;
use crate::engine::{Clock, Feeds, Graph, Place, SLOTS_MAX, Source};
use crate::error::{Problem, SimError};
use crate::order;
use crate::step::StepInput;
use dflop_types::{Action, ActionKind, PipelineOrder, Span, StageIndex, Timeline};

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
///     layout: Layout { encoder: one, llm: one },
///     order: PipelineOrder::OneFOneB,
///     num_microbatches: 2,
///     forward_ns: vec![vec![1, 9], vec![4, 4]],
///     backward_ns: vec![vec![2, 2], vec![4, 4]],
///     feeds: vec![vec![vec![true]]; 2],
///     transfer_ns: 0,
///     tail_ns: vec![0, 0],
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
    pub(crate) transfer_ns: u64,
    /// 0, 1, ... m - 1: the microbatches as they stand.
    pub(crate) as_given: Vec<u32>,
    pub(crate) clock: Clock,
    /// Whether the lists are a pipeline order's, which no order of microbatches can deadlock.
    is_ordered: bool,
    /// Scratch: durations and feed rows of the order that is being tried; durations of even work.
    pub(crate) tried: (Vec<u64>, Vec<u32>),
}

impl Simulator {
    /// The simulator of `input` under its pipeline order.
    ///
    /// # Errors
    /// [`SimError::Unsound`] with every problem of the input, [`SimError::Overflow`].
    pub fn new(input: &StepInput) -> Result<Self, SimError> {
        input.check()?;
        let (p, m) = (input.layout.num_stages(), input.num_microbatches);
        let pipeline = Graph::new(chain(p), slots(input.order, p, m), m as usize, &Feeds::default())?;
        let graph = pipeline.replicate(input.places(), |stage| input.ranks_of(stage));
        let mut simulator = Self::of_graph(graph, input)?;
        simulator.is_ordered = true;
        Ok(simulator)
    }

    /// The simulator of `input` with the action list of each rank in place of its pipeline order.
    ///
    /// # Errors
    /// [`SimError::Unsound`] with every problem of the input or, if it has none, of the lists: each rank must
    /// run `F` and `B` of each microbatch of its stage once. [`SimError::Deadlock`], [`SimError::Overflow`].
    pub fn with_lists(input: &StepInput, lists: &[Vec<Action>]) -> Result<Self, SimError> {
        input.check()?;
        let slots = input.slots(lists)?;
        let graph = Graph::new(input.places(), slots, input.num_microbatches as usize, &input.boundary())?;
        Self::of_graph(graph, input)
    }

    fn of_graph(graph: Graph, input: &StepInput) -> Result<Self, SimError> {
        Self::ready(
            graph,
            input.boundary(),
            flat(&input.forward_ns, &input.backward_ns),
            input.tail_ns.clone(),
            input.transfer_ns,
        )
    }

    /// The simulator of one pipeline, one rank a stage.
    pub(crate) fn of_pipeline(durations: &Durations, order: PipelineOrder) -> Result<Self, SimError> {
        durations.check()?;
        let (p, m) = (durations.forward_ns.len(), durations.num_microbatches());
        let actions = 2 * p as u128 * m as u128;
        if actions > u128::from(SLOTS_MAX) || u32::try_from(p).is_err() || u32::try_from(m).is_err() {
            return Err(SimError::Unsound {
                subject: "the durations",
                problems: vec![Problem::TooMany { actions }],
            });
        }
        let graph = Graph::new(chain(p as u32), slots(order, p as u32, m as u32), m, &Feeds::default())?;
        let durations_ns = flat(&durations.forward_ns, &durations.backward_ns);
        Self::ready(graph, Feeds::default(), durations_ns, vec![0; p], durations.transfer_ns)
    }

    fn ready(
        graph: Graph,
        feeds: Feeds,
        durations_ns: Vec<u64>,
        tails_ns: Vec<u64>,
        transfer_ns: u64,
    ) -> Result<Self, SimError> {
        // No path is longer than all actions, tails and as many transfers as actions. Where that fits,
        // no pass can overflow.
        let work = durations_ns.iter().chain(&tails_ns).try_fold(0_u64, |sum, &ns| sum.checked_add(ns));
        let transfers = transfer_ns.checked_mul(durations_ns.len() as u64);
        let bound = work.zip(transfers).and_then(|(work, transfers)| work.checked_add(transfers));
        let overflow = SimError::Overflow { num_ranks: graph.places.len() };
        if bound.is_none() {
            return Err(overflow);
        }
        let as_given = (0..graph.num_microbatches as u32).collect();
        let mut simulator = Self {
            graph,
            feeds,
            durations_ns,
            tails_ns,
            transfer_ns,
            as_given,
            clock: Clock::default(),
            is_ordered: false,
            tried: (Vec::new(), Vec::new()),
        };
        // Idle time is counted over all ranks.
        let whole = simulator.makespan_ns().checked_mul(simulator.graph.places.len() as u64);
        whole.map(|_| simulator).ok_or(overflow)
    }

    /// Makespan of the step as given, in nanoseconds, tails included.
    ///
    /// *Complexity*: O(actions + boundary edges).
    pub fn makespan_ns(&mut self) -> u64 {
        self.graph.run(&self.durations_ns, &self.feeds, &self.as_given, self.transfer_ns, &mut self.clock);
        self.end_ns(true)
    }

    /// Makespan in nanoseconds if `order[j]` were microbatch j, tails included.
    ///
    /// *Complexity*: O(actions + boundary edges); allocates nothing after the first call.
    ///
    /// # Panics
    /// If `order` is no permutation of the microbatches, or the simulator was made from lists, whose deadlock
    /// freedom holds for the order given alone.
    pub fn makespan_in_order(&mut self, order: &[usize]) -> u64 {
        let m = self.graph.num_microbatches;
        assert!(self.is_ordered, "microbatches are ordered under a pipeline order, not under lists");
        let (durations_ns, rows) = &mut self.tried;
        rows.clear();
        rows.extend(order.iter().map(|&microbatch| microbatch as u32));
        rows.sort_unstable();
        assert!(*rows == self.as_given, "the order is no permutation of {m} microbatches: {order:?}");
        rows.clear();
        rows.extend(order.iter().map(|&microbatch| microbatch as u32));
        durations_ns.clear();
        if m > 0 {
            for given in self.durations_ns.chunks_exact(m) {
                durations_ns.extend(order.iter().map(|&microbatch| given[microbatch]));
            }
        }
        self.graph.run(durations_ns, &self.feeds, rows, self.transfer_ns, &mut self.clock);
        self.end_ns(true)
    }

    /// The timeline of the step as given, with its idle time by cause.
    ///
    /// *Complexity*: three passes of O(actions + boundary edges).
    pub fn timeline(&mut self) -> Timeline {
        let makespan_ns = self.makespan_ns();
        let mut spans = Vec::with_capacity(self.graph.num_slots());
        for (rank, list) in self.graph.lists() {
            spans.extend(list.iter().map(|&slot| {
                let end_ns = self.clock.end_ns[slot as usize];
                let start_ns = end_ns - self.durations_ns[slot as usize];
                Span { rank, action: self.graph.action(slot), start_ns, end_ns }
            }));
        }
        let idle_ns = bubble::split(self, makespan_ns);
        Timeline { num_ranks: self.graph.places.len() as u32, makespan_ns, idle_ns, spans }
    }

    /// When the last pass ends, in nanoseconds. With tails, the ranks of a component meet after their last
    /// actions and then take their tails.
    pub(crate) fn end_ns(&self, has_tails: bool) -> u64 {
        let mut meet_ns = [0; 2];
        for (place, &end_ns) in self.graph.places.iter().zip(&self.clock.last_end_ns) {
            meet_ns[place.component] = end_ns.max(meet_ns[place.component]);
        }
        if !has_tails {
            return meet_ns[0].max(meet_ns[1]);
        }
        let ends = self.graph.places.iter().zip(&self.tails_ns);
        ends.map(|(place, &tail_ns)| meet_ns[place.component] + tail_ns).max().unwrap_or(0)
    }
}

/// Durations by slot.
fn flat(forward_ns: &[Vec<u64>], backward_ns: &[Vec<u64>]) -> Vec<u64> {
    let mut flat = Vec::with_capacity(2 * forward_ns.iter().map(Vec::len).sum::<usize>());
    for (forward, backward) in forward_ns.iter().zip(backward_ns) {
        flat.extend_from_slice(forward);
        flat.extend_from_slice(backward);
    }
    flat
}

/// Places of a pipeline with one rank a stage.
fn chain(num_stages: u32) -> Vec<Place> {
    let place = |stage| Place {
        stage: StageIndex(stage),
        forward: if stage == 0 { Source::Nothing } else { Source::Rank(stage - 1) },
        backward: if stage + 1 == num_stages { Source::Nothing } else { Source::Rank(stage + 1) },
        component: 0,
    };
    (0..num_stages).map(place).collect()
}

/// Slots of the lists of a pipeline with one rank a stage.
fn slots(order: PipelineOrder, num_stages: u32, num_microbatches: u32) -> Vec<u32> {
    let mut slots = Vec::with_capacity(2 * num_stages as usize * num_microbatches as usize);
    for stage in 0..num_stages {
        let forward = stage * 2 * num_microbatches;
        order::visit(order, StageIndex(stage), num_stages, num_microbatches, |kind, microbatch| {
            let is_backward = kind == ActionKind::B;
            slots.push(forward + microbatch + if is_backward { num_microbatches } else { 0 });
        });
    }
    slots
}
