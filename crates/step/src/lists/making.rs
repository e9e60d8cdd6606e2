//! Makes action lists for the durations of one step, by list scheduling within a memory cap.
//!
//! A pipeline order is made for even work. Here a pass over all ranks ([`crate::lists::greedy`]) makes the lists for
//! the predicted durations. Forwards run as far ahead as the cap allows, and a W runs where a rank would wait. Which rule
//! and which order of microbatches is best depends on the durations. So several are tried, and then orders with
//! microbatches moved. The best lists are taken; the lists of the pipeline orders are compared too.

use crate::lists::greedy::{Listed, RankRows, Work};
use crate::lists::least::Least;
use crate::lists::search::search;
use dflop_sim::wiring::{Source, WiredRow};
use dflop_sim::{Durations, SimError, Simulator, StepInput, Violation, order, simulate, simulate_lists};
use dflop_types::{Action, ActionKind, ComponentLayout, Layout, PipelineOrder, Rank, Timeline};

/// What each rank may hold between the forward of a microbatch and the end of its backward.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holding {
    /// What `[row][microbatch]` takes, in any unit: for example in bytes, or 1 for each microbatch. A row is a stage of a
    /// replica, as in [`StepInput::forward_ns`]. If each rank holds one stage, row r is rank r.
    pub held: Vec<Vec<u64>>,
    /// The most that each rank may hold at a time, in the same unit; at least its largest microbatch, over all its stages.
    pub cap: Vec<u64>,
}

impl Holding {
    /// Every rank may hold `depth` times as many microbatches as it has in flight under 1F1B with many microbatches. A rank
    /// with several chunks may hold `depth` times as many microbatches of chunks as under interleaved 1F1B.
    pub fn of_one_f_one_b(input: &StepInput, depth: u64) -> Self {
        let (layout, m) = (input.layout, input.num_microbatches);
        let num_stages = u64::from(layout.num_stages());
        let most = |rank| {
            let at = layout.coordinates(rank)?;
            if layout.is_interleaved() {
                return in_flight(&layout, PipelineOrder::OneFOneB, rank, m);
            }
            Some(num_stages - u64::from(at.stage.0))
        };
        let cap = (0..layout.num_ranks()).filter_map(|rank| Some(depth * most(Rank(rank))?)).collect();
        Self { held: vec![vec![1; m as usize]; layout.num_rows() as usize], cap }
    }

    fn violations(&self, input: &StepInput) -> Vec<Violation> {
        let (layout, m) = (input.layout, input.num_microbatches as usize);
        let (ranks, rows) = (layout.num_ranks() as usize, layout.num_rows() as usize);
        let mut violations = Vec::new();
        if layout.is_colocated() {
            let needs = "components on ranks of their own, the layout is colocated";
            violations.push(Violation::Order { path: "order", order: PipelineOrder::DataAware, needs });
            return violations;
        }
        let of_rows = if layout.is_interleaved() { "stage of a replica" } else { "rank" };
        let mut compare = |path: String, found, what, other, expected| {
            if found != expected {
                violations.push(Violation::Count { path, found, what, other, expected });
            }
        };
        compare("holding.cap".to_owned(), self.cap.len(), "rank", "the layout", ranks);
        compare("holding.held".to_owned(), self.held.len(), of_rows, "the layout", rows);
        for (row, held) in self.held.iter().enumerate() {
            compare(format!("holding.held[{row}]"), held.len(), "microbatch", "the step", m);
        }
        if !violations.is_empty() {
            return violations;
        }
        for (rank, &cap) in self.cap.iter().enumerate() {
            let rows = || layout.stages(Rank(rank as u32)).map(|stage| input.row(Rank(rank as u32), stage));
            for j in 0..m {
                let held = rows().fold(0_u64, |sum, row| sum.saturating_add(self.held[row][j]));
                if held > cap {
                    let path = match rows().next().filter(|_| rows().count() == 1) {
                        Some(row) => format!("holding.held[{row}][{j}]"),
                        None => format!("holding.held[all stages of rank {rank}][{j}]"),
                    };
                    violations.push(Violation::TooLarge { path, held, cap });
                }
            }
        }
        violations
    }

    /// Whether no rank that runs these lists ever holds more than it may.
    pub fn allows(&self, input: &StepInput, lists: &[Vec<Action>]) -> bool {
        lists.iter().enumerate().all(|(rank, list)| {
            let mut held = 0_u64;
            list.iter().all(|action| {
                let row = input.row(Rank(rank as u32), action.stage);
                let of_microbatch = self.held[row][action.microbatch as usize];
                held = match action.kind {
                    ActionKind::F => held.saturating_add(of_microbatch),
                    ActionKind::I => held,
                    ActionKind::B | ActionKind::W => held.saturating_sub(of_microbatch),
                };
                held <= self.cap[rank]
            })
        })
    }
}

/// The most microbatches that `rank` has in flight under a pipeline order; if it holds several chunks, microbatches of
/// chunks. `None` past the last rank.
pub(crate) fn in_flight(
    layout: &Layout,
    order: PipelineOrder,
    rank: Rank,
    num_microbatches: u32,
) -> Option<u64> {
    let (mut held, mut most) = (0_u64, 0);
    for action in order::of_rank(layout, order, rank, num_microbatches)? {
        match action.kind {
            ActionKind::F => held += 1,
            ActionKind::I => {}
            ActionKind::B | ActionKind::W => held -= 1,
        }
        most = most.max(held);
    }
    Some(most)
}

/// The most actions that [`data_aware`] places, over all its passes.
pub const EFFORT: usize = 200_000;

/// The action list of every rank, made for the durations of `input`: [`data_aware_within`] with [`EFFORT`].
///
/// # Errors
/// As [`data_aware_within`].
///
/// # Examples
/// ```
/// # use dflop_types::{ComponentLayout, Layout, PipelineOrder};
/// use dflop_step::lists::{Holding, data_aware};
/// # let component = |pp| ComponentLayout { tp: 1, pp, dp: 1 };
/// # let input = dflop_sim::StepInput {
/// #     layout: Layout::disaggregated(component(1), component(1)),
/// #     order: PipelineOrder::OneFOneB,
/// #     num_microbatches: 3,
/// #     forward_ns: vec![vec![9, 1, 1], vec![2, 2, 2]],
/// #     backward_ns: vec![vec![9, 1, 1], vec![4, 4, 4]],
/// #     input_ns: Vec::new(),
/// #     weight_ns: Vec::new(),
/// #     feeds: vec![vec![vec![0]]; 3],
/// #     transfer_ns: 0,
/// #     tail_ns: vec![0, 0],
/// #     ready_ns: Vec::new(),
/// # };
/// let holding = Holding::of_one_f_one_b(&input, 1);
/// let lists = data_aware(&input, &holding, false)?;
/// let makespan_ns = dflop_sim::simulate_lists(&input, &lists)?.makespan_ns;
/// assert!(holding.allows(&input, &lists) && makespan_ns <= dflop_sim::simulate_step(&input)?.makespan_ns);
/// # Ok::<(), dflop_sim::SimError>(())
/// ```
pub fn data_aware(
    input: &StepInput,
    holding: &Holding,
    is_split: bool,
) -> Result<Vec<Vec<Action>>, SimError> {
    data_aware_within(input, holding, is_split, EFFORT)
}

/// The action list of every rank, made for the durations of `input` within what `holding` allows.
///
/// All ranks run forwards and backwards through the microbatches in one order, which may differ from that of `input`. Ranks
/// with several chunks take the microbatches in rounds, each round chunk by chunk; all of them have the same rounds.
/// With `is_split` and times of I and W, backwards are split if that does not make the step slower. The lists never
/// deadlock. If `holding` allows the lists of 1F1B (interleaved, where ranks have several chunks), the answer is never slower
/// than these; if backwards are split, the same holds for zero-bubble, which is for one stage a rank. The same arguments give the same lists on any machine.
///
/// *Complexity*: O(`effort` x log) and at least one pass of O(n log n) for n actions. `effort` is the number of actions that
/// may be placed over all passes; some ten million are placed in a second.
///
/// # Errors
/// [`SimError::Unsound`] with every violation of `input` and `holding`, for example a microbatch that takes more on a rank
/// than the rank may hold, or a colocated layout. [`SimError::Overflow`].
///
/// # References
/// Serial schedule generation with priority rules: Kolisch, 1996, DOI 10.1016/0377-2217(95)00357-6.
pub fn data_aware_within(
    input: &StepInput,
    holding: &Holding,
    is_split: bool,
    effort: usize,
) -> Result<Vec<Vec<Action>>, SimError> {
    input.check()?;
    let violations = holding.violations(input);
    if !violations.is_empty() {
        return Err(SimError::Unsound { subject: "the step", violations });
    }
    let is_split = is_split && input.has_split();
    let (wired, feeds, ranks) = (input.wired_rows(), input.boundary(), rank_rows(input));
    let (held, cap) = (&holding.held, &holding.cap);
    let work = Work { step: input, rows: &wired, ranks: &ranks, feeds: &feeds, held, cap, is_split };
    let useful_all = |lists: Vec<Vec<Action>>| -> Vec<Vec<Action>> {
        (0..).map(Rank).zip(lists).map(|(rank, list)| useful(list, rank, input, &wired)).collect()
    };
    // If the times of the step overflow when they are added up, the simulator refuses the step here, before any pass.
    let mut ordered = Vec::new();
    let orders = [PipelineOrder::OneFOneB, PipelineOrder::ZeroBubble];
    let has_zero_bubble = is_split && !input.layout.is_interleaved();
    for order in orders.into_iter().take(if has_zero_bubble { 2 } else { 1 }) {
        let step = StepInput { order, ..input.clone() };
        let mut simulator = Simulator::new(&step)?;
        let lists: Vec<Vec<Action>> =
            (0..step.layout.num_ranks()).filter_map(|rank| step.actions(Rank(rank))).collect();
        if holding.allows(input, &lists) {
            let lists = if is_split { useful_all(lists) } else { lists };
            ordered.push((simulator.makespan_ns(), lists));
        }
    }
    let made = search(&work, effort);
    let mut written: Vec<Vec<Action>> =
        made.iter().zip(&ranks).map(|(list, of)| write(list, *of, &wired)).collect();
    let mut others = ordered;
    if is_split {
        written = useful_all(written);
        let join = |(rank, list): (Rank, &Vec<Action>)| join(list, rank, input);
        let whole: Vec<Vec<Action>> = (0..).map(Rank).zip(&written).map(join).collect();
        others.push((Simulator::with_lists(input, &whole)?.makespan_ns(), whole));
    }
    let mut best = (Simulator::with_lists(input, &written)?.makespan_ns(), written);
    for (makespan_ns, lists) in others.into_iter().rev() {
        // Of lists that take equally long the simplest are taken: those of 1F1B, then of zero-bubble, then joined ones.
        if makespan_ns <= best.0 {
            best = (makespan_ns, lists);
        }
    }
    Ok(best.1)
}

/// No action lists whose backwards are whole have a shorter makespan than this, in nanoseconds, whatever ranks may hold.
///
/// *Complexity*: O(rows x microbatches + messages).
///
/// # Errors
/// [`SimError::Unsound`] with every violation of `input`, and for a colocated layout; [`SimError::Overflow`] where times overflow.
pub fn makespan_min_ns(input: &StepInput) -> Result<u64, SimError> {
    // Where its sums overflow, the simulator refuses the step.
    Simulator::new(&StepInput { order: PipelineOrder::OneFOneB, ..input.clone() })?;
    if input.layout.is_colocated() {
        let needs = "components on ranks of their own, the layout is colocated";
        let violations = vec![Violation::Order { path: "order", order: input.order, needs }];
        return Err(SimError::Unsound { subject: "the step", violations });
    }
    let (wired, feeds, ranks) = (input.wired_rows(), input.boundary(), rank_rows(input));
    let (held, cap) = (&[][..], &[][..]);
    let work = Work { step: input, rows: &wired, ranks: &ranks, feeds: &feeds, held, cap, is_split: false };
    Ok(Least::new(&work, &work.ready_ns()).makespan_ns)
}

/// The timeline of one pipeline under action lists made for its durations. No more microbatches are in flight than under
/// 1F1B, and backwards may be split if there are times of I and W. It is never slower than under 1F1B.
///
/// *Complexity*: as [`data_aware_within`] with [`EFFORT`].
///
/// # Errors
/// As [`dflop_sim::simulate`].
pub fn simulate_pipeline(durations: &Durations) -> Result<Timeline, SimError> {
    let in_order = simulate(durations, PipelineOrder::OneFOneB)?;
    let (p, m) = (durations.forward_ns.len(), durations.forward_ns[0].len());
    if p == 1 {
        // One rank waits for nobody, so no list is faster than another.
        return Ok(in_order);
    }
    let component = |pp| ComponentLayout { tp: 1, pp, dp: 1 };
    let step = StepInput {
        layout: Layout::disaggregated(component(1), component(p as u32 - 1)),
        order: PipelineOrder::OneFOneB,
        num_microbatches: m as u32,
        forward_ns: durations.forward_ns.clone(),
        backward_ns: durations.backward_ns.clone(),
        input_ns: durations.input_ns.clone(),
        weight_ns: durations.weight_ns.clone(),
        feeds: vec![vec![vec![0]]; m],
        transfer_ns: durations.transfer_ns,
        tail_ns: vec![0; p],
        ready_ns: Vec::new(),
    };
    let lists = data_aware(&step, &Holding::of_one_f_one_b(&step, 1), true)?;
    let listed = simulate_lists(&step, &lists)?;
    Ok(if in_order.makespan_ns <= listed.makespan_ns { in_order } else { listed })
}

/// The rows of each rank. The input has been checked and is not colocated.
fn rank_rows(input: &StepInput) -> Vec<RankRows> {
    let layout = &input.layout;
    let of = |rank| {
        let mut rows = layout.stages(rank).map(|stage| input.row(rank, stage));
        let first = rows.next().unwrap_or(0);
        let at = layout.coordinates(rank).map_or(0, |at| at.stage.0);
        let component = usize::from(at >= layout.encoder.pp);
        RankRows { first, stride: rows.next().map_or(0, |next| next - first), component }
    };
    (0..layout.num_ranks()).map(Rank).map(of).collect()
}

fn write(list: &Listed, of: RankRows, rows: &[WiredRow]) -> Vec<Action> {
    let stage = |chunk: u32| rows[of.first + chunk as usize * of.stride].stage;
    list.iter()
        .map(|&(kind, turn)| Action { stage: stage(turn.chunk), kind, microbatch: turn.microbatch })
        .collect()
}

/// The list without I and W that take no time. The other half of such a backward becomes one B. No action ends later by
/// that.
///
/// ```text
/// W takes no time: its weights are frozen, or it has no sample                  B takes the place of I
/// I takes no time in all microbatches, and no rank waits for its output         B takes the place of W
/// ```
///
/// If I takes time in some microbatch of a stage, all its I stay. Otherwise the B of some microbatches would come where their
/// W was, and this rank would run backwards in another order than the rank after it.
fn useful(list: Vec<Action>, rank: Rank, step: &StepInput, rows: &[WiredRow]) -> Vec<Action> {
    let mut left = Vec::with_capacity(list.len());
    // Only a first stage has no input, and its rank has no other stage: chunks are of the LLM backbone.
    let first = list.first().map_or(0, |action| step.row(rank, action.stage));
    let has_no_input = rows.get(first).is_some_and(|row| row.forward == Source::Nothing)
        && step.input_ns[first].iter().all(|&ns| ns == 0)
        && step.backward_ns[first].iter().zip(&step.weight_ns[first]).all(|(whole, weight)| whole <= weight);
    for action in list {
        let (row, j) = (step.row(rank, action.stage), action.microbatch as usize);
        let (backward_ns, input_ns, weight_ns) =
            (&step.backward_ns[row], &step.input_ns[row], &step.weight_ns[row]);
        let has_no_weight = !has_no_input && weight_ns[j] == 0 && backward_ns[j] <= input_ns[j];
        let whole = Action { kind: ActionKind::B, ..action };
        match action.kind {
            ActionKind::I if has_no_input => {}
            ActionKind::W if has_no_weight => {}
            ActionKind::W if has_no_input => left.push(whole),
            ActionKind::I if has_no_weight => left.push(whole),
            _ => left.push(action),
        }
    }
    left
}

/// The list in which an I directly followed by its own W becomes one B, if B takes no longer than the two.
fn join(list: &[Action], rank: Rank, step: &StepInput) -> Vec<Action> {
    let mut joined: Vec<Action> = Vec::with_capacity(list.len());
    for &action in list {
        let (row, j) = (step.row(rank, action.stage), action.microbatch as usize);
        let is_own = |half: &&mut Action| {
            let halves_ns = step.input_ns[row][j].saturating_add(step.weight_ns[row][j]);
            half.kind == ActionKind::I
                && (half.stage, half.microbatch) == (action.stage, action.microbatch)
                && step.backward_ns[row][j] <= halves_ns
        };
        match joined.last_mut().filter(|_| action.kind == ActionKind::W).filter(is_own) {
            Some(half) => half.kind = ActionKind::B,
            None => joined.push(action),
        }
    }
    joined
}
