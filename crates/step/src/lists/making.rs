//! Makes action lists for the durations of one step, by list scheduling within a memory cap.
//!
//! A pipeline order is made for even work. Here a pass over all ranks ([`crate::lists::greedy`]) makes the lists for
//! the predicted durations. Forwards run as far ahead as the cap allows, and a W runs where a rank would wait. Which rule
//! and which order of microbatches is best depends on the durations. So several are tried, and then orders with
//! microbatches moved. The best lists are taken; the lists of the pipeline orders are compared too.

use crate::lists::greedy::{Listed, Pass, Rule, Work};
use dflop_sim::wiring::{Source, WiredRow};
use dflop_sim::{Durations, SimError, Simulator, StepInput, Violation, simulate, simulate_lists};
use dflop_types::{Action, ActionKind, ComponentLayout, Layout, PipelineOrder, Rank, Timeline};

/// What each rank may hold between the forward of a microbatch and the end of its backward.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holding {
    /// What `[rank][microbatch]` takes, in any unit: for example in bytes, or 1 for each microbatch.
    pub held: Vec<Vec<u64>>,
    /// The most that each rank may hold at a time, in the same unit; at least its largest microbatch.
    pub cap: Vec<u64>,
}

impl Holding {
    /// Every rank may hold `depth` times as many microbatches as it has in flight under 1F1B.
    pub fn of_one_f_one_b(input: &StepInput, depth: u64) -> Self {
        let num_stages = u64::from(input.layout.num_stages());
        let ranks = (0..input.layout.num_ranks()).filter_map(|rank| input.layout.coordinates(Rank(rank)));
        let cap: Vec<u64> = ranks.map(|at| depth * (num_stages - u64::from(at.stage.0))).collect();
        Self { held: vec![vec![1; input.num_microbatches as usize]; cap.len()], cap }
    }

    fn violations(&self, input: &StepInput) -> Vec<Violation> {
        let (ranks, m) = (input.layout.num_ranks() as usize, input.num_microbatches as usize);
        let mut violations = Vec::new();
        if input.layout.is_interleaved() {
            let needs = "one stage a rank, the layout has several";
            violations.push(Violation::Order { path: "order", order: PipelineOrder::DataAware, needs });
        }
        let mut compare = |path: String, found, what, other, expected| {
            if found != expected {
                violations.push(Violation::Count { path, found, what, other, expected });
            }
        };
        compare("holding.cap".to_owned(), self.cap.len(), "rank", "the layout", ranks);
        compare("holding.held".to_owned(), self.held.len(), "rank", "the layout", ranks);
        for (rank, row) in self.held.iter().enumerate() {
            compare(format!("holding.held[{rank}]"), row.len(), "microbatch", "the step", m);
        }
        for (rank, (row, &cap)) in self.held.iter().zip(&self.cap).enumerate() {
            for (j, &held) in row.iter().enumerate().filter(|&(_, &held)| held > cap) {
                violations.push(Violation::TooLarge {
                    path: format!("holding.held[{rank}][{j}]"),
                    held,
                    cap,
                });
            }
        }
        violations
    }

    /// Whether no rank that runs these lists ever holds more than it may.
    pub fn allows(&self, lists: &[Vec<Action>]) -> bool {
        lists.iter().enumerate().all(|(rank, list)| {
            let mut held = 0_u64;
            list.iter().all(|action| {
                let of_microbatch = self.held[rank][action.microbatch as usize];
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
/// assert!(holding.allows(&lists) && makespan_ns <= dflop_sim::simulate_step(&input)?.makespan_ns);
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
/// All ranks run forwards and backwards through the microbatches in one order, which may differ from that of `input`.
/// With `is_split` and times of I and W, backwards are split if that does not make the step slower. The lists never
/// deadlock. If `holding` allows the lists of 1F1B, the answer is never slower than these; if backwards are split, the same
/// holds for zero-bubble. The same arguments give the same lists on any machine.
///
/// *Complexity*: O(`effort` x log) and at least one pass of O(n log n) for n actions. `effort` is the number of actions that
/// may be placed over all passes; some ten million are placed in a second.
///
/// # Errors
/// [`SimError::Unsound`] with every violation of `input` and `holding`, for example a microbatch that takes more on a rank
/// than the rank may hold, or interleaved stages. [`SimError::Overflow`].
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
    let (wired, feeds) = (input.wired_rows(), input.boundary());
    let work =
        Work { step: input, rows: &wired, feeds: &feeds, held: &holding.held, cap: &holding.cap, is_split };
    let useful_all = |lists: Vec<Vec<Action>>| -> Vec<Vec<Action>> {
        lists.into_iter().enumerate().map(|(rank, list)| useful(list, rank, input, &wired[rank])).collect()
    };
    // If the times of the step overflow when they are added up, the simulator refuses the step here, before any pass.
    let mut ordered = Vec::new();
    let orders = [PipelineOrder::OneFOneB, PipelineOrder::ZeroBubble];
    for order in orders.into_iter().take(if is_split { 2 } else { 1 }) {
        let step = StepInput { order, ..input.clone() };
        let mut simulator = Simulator::new(&step)?;
        let lists: Vec<Vec<Action>> =
            (0..step.layout.num_ranks()).filter_map(|rank| step.actions(Rank(rank))).collect();
        if holding.allows(&lists) {
            let lists = if is_split { useful_all(lists) } else { lists };
            ordered.push((simulator.makespan_ns(), lists));
        }
    }
    let made = search(&work, effort);
    let mut written: Vec<Vec<Action>> = made.iter().zip(&wired).map(|(list, row)| write(list, row)).collect();
    let mut others = ordered;
    if is_split {
        written = useful_all(written);
        let join = |(rank, list): (usize, &Vec<Action>)| join(list, rank, input);
        let whole: Vec<Vec<Action>> = written.iter().enumerate().map(join).collect();
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

fn write(list: &[(ActionKind, u32)], row: &WiredRow) -> Vec<Action> {
    list.iter().map(|&(kind, microbatch)| Action { stage: row.stage, kind, microbatch }).collect()
}

/// The list without I and W that take no time. The other half of such a backward becomes one B. No action ends later by
/// that.
///
/// ```text
/// W takes no time: its weights are frozen, or it has no sample                  B takes the place of I
/// I takes no time in all microbatches, and no rank waits for its output         B takes the place of W
/// ```
///
/// If I takes time in some microbatch of a rank, all its I stay. Otherwise the B of some microbatches would come where their
/// W was, and this rank would run backwards in another order than the rank after it.
fn useful(list: Vec<Action>, rank: usize, step: &StepInput, row: &WiredRow) -> Vec<Action> {
    let (backward_ns, input_ns, weight_ns) =
        (&step.backward_ns[rank], &step.input_ns[rank], &step.weight_ns[rank]);
    let has_no_input = row.forward == Source::Nothing
        && input_ns.iter().all(|&ns| ns == 0)
        && backward_ns.iter().zip(weight_ns).all(|(backward_ns, weight_ns)| backward_ns <= weight_ns);
    let mut left = Vec::with_capacity(list.len());
    for action in list {
        let j = action.microbatch as usize;
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
fn join(list: &[Action], rank: usize, step: &StepInput) -> Vec<Action> {
    let mut joined: Vec<Action> = Vec::with_capacity(list.len());
    for &action in list {
        let j = action.microbatch as usize;
        let is_own = |half: &&mut Action| {
            let halves_ns = step.input_ns[rank][j].saturating_add(step.weight_ns[rank][j]);
            half.kind == ActionKind::I
                && half.microbatch as usize == j
                && step.backward_ns[rank][j] <= halves_ns
        };
        match joined.last_mut().filter(|_| action.kind == ActionKind::W).filter(is_own) {
            Some(half) => half.kind = ActionKind::B,
            None => joined.push(action),
        }
    }
    joined
}

/// Rules in the order in which they are tried.
///
/// They were chosen out of 72 combinations, with 4 to 16 stages and 8 to 64 microbatches (`examples/ratios.rs`): one of
/// these always gave the best list, or one within 0.1 % of it. Mostly it was the first rule.
fn rules(is_split: bool) -> Vec<Rule> {
    let rule = |is_forward_first, makes_room, wait_permille, delay_permille| Rule {
        is_forward_first,
        makes_room,
        wait_permille,
        delay_permille,
    };
    if is_split {
        vec![
            rule(true, false, 0, 1000),
            rule(true, true, 0, 1000),
            rule(true, false, 0, 300),
            rule(false, false, 0, 300),
            rule(true, true, 0, 0),
            rule(true, true, 300, 0),
        ]
    } else {
        vec![rule(true, false, 0, 0), rule(false, false, 0, 0), rule(true, false, 300, 0)]
    }
}

/// The best that a search has found.
struct Found {
    makespan_ns: u64,
    rule: Rule,
    order: Vec<u32>,
    lists: Vec<Listed>,
}

/// The best lists that were found: every rule is tried on some orders, then the best rule on orders with microbatches
/// moved.
fn search(work: &Work, effort: usize) -> Vec<Listed> {
    let m = work.num_microbatches();
    let of_pass = (work.rows.len() * m * if work.is_split { 3 } else { 2 }).max(1);
    let num_passes = (effort / of_pass).max(1);
    let mut pass = Pass::default();
    let mut best: Option<Found> = None;
    let mut attempt = |rule: Rule, order: &[u32], best: &mut Option<Found>| {
        let makespan_ns = pass.run(work, order, rule);
        if best.as_ref().is_none_or(|best| makespan_ns < best.makespan_ns) {
            *best = Some(Found { makespan_ns, rule, order: order.to_vec(), lists: pass.lists.clone() });
        }
        makespan_ns
    };
    let (rules, orders) = (rules(work.is_split), orders(work));
    let combined = orders.iter().flat_map(|order| rules.iter().map(move |&rule| (rule, order)));
    for (rule, order) in combined.take(num_passes) {
        attempt(rule, order, &mut best);
    }
    let num_left = num_passes.saturating_sub(rules.len() * orders.len());
    if let Some((rule, mut order, mut standing_ns)) =
        best.as_ref().filter(|_| m > 1).map(|best| (best.rule, best.order.clone(), best.makespan_ns))
    {
        let mut random = SplitMix64(0);
        let mut tried = Vec::with_capacity(m);
        for _ in 0..num_left {
            let (a, b) = (random.below(m), random.below(m));
            tried.clone_from(&order);
            if random.below(2) == 0 {
                tried.swap(a, b);
            } else {
                let moved = tried.remove(a);
                tried.insert(b, moved);
            }
            let makespan_ns = attempt(rule, &tried, &mut best);
            // An equally good order is taken too: the search can so leave a plateau.
            if makespan_ns <= standing_ns {
                standing_ns = makespan_ns;
                std::mem::swap(&mut order, &mut tried);
            }
        }
    }
    best.map(|best| best.lists).unwrap_or_default()
}

/// Numbers that are the same on every machine: Steele, Lea and Flood, 2014, DOI 10.1145/2660193.2660195.
struct SplitMix64(u64);

impl SplitMix64 {
    /// A number below `end`.
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % end as u64) as usize
    }
}

/// Orders of the microbatches with which the search begins: the given one, and orders with short microbatches at both ends,
/// where the pipeline fills and drains.
fn orders(work: &Work) -> Vec<Vec<u32>> {
    let given: Vec<u32> = (0..work.step.num_microbatches).collect();
    let load = |j: &u32| -> u128 {
        let rows = work.step.forward_ns.iter().chain(&work.step.backward_ns);
        rows.map(|row| u128::from(row[*j as usize])).sum()
    };
    let mut ascending = given.clone();
    ascending.sort_by_cached_key(load);
    let (mut front, mut back) = (Vec::new(), Vec::new());
    for (at, &j) in ascending.iter().enumerate() {
        if at % 2 == 0 { front.push(j) } else { back.push(j) }
    }
    front.extend(back.into_iter().rev());
    vec![given, front]
}
