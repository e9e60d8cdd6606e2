//! Random steps, and an oracle that times them in another way than the engine does.

#![allow(dead_code, reason = "each test file uses a part")]

use dflop_sim::StepInput;
use dflop_types::{Action, ActionKind, ComponentLayout, Layout, PipelineOrder, Rank, Span, StageIndex};
use proptest::prelude::*;
use std::collections::HashMap;

pub(crate) const ORDERS: [PipelineOrder; 3] =
    [PipelineOrder::GPipe, PipelineOrder::OneFOneB, PipelineOrder::ZeroBubble];

pub(crate) fn layout(encoder: (u32, u32), llm: (u32, u32)) -> Layout {
    let component = |(pp, dp)| ComponentLayout { tp: 1, pp, dp };
    Layout::disaggregated(component(encoder), component(llm))
}

pub(crate) fn rows(ranks: usize, m: usize, ns_max: u64) -> impl Strategy<Value = Vec<Vec<u64>>> {
    prop::collection::vec(prop::collection::vec(0..=ns_max, m), ranks)
}

/// The replicas that are fed.
pub(crate) fn fed(row: &[bool]) -> Vec<u32> {
    (0..).zip(row).filter(|&(_, &is_fed)| is_fed).map(|(replica, _)| replica).collect()
}

/// Steps with 1 to 3 replicas and stages of each component, 0 to 7 microbatches, short times (so that ties
/// and zeros are common), times of I and W.
pub(crate) fn steps() -> impl Strategy<Value = StepInput> {
    steps_of(1)
}

/// As `steps`, with 1 to `chunks_max` chunks on each rank of the LLM backbone.
pub(crate) fn steps_of(chunks_max: u32) -> impl Strategy<Value = StepInput> {
    let sizes = ((1u32..=3, 1u32..=3), (1u32..=3, 1u32..=3), 1..=chunks_max, 0u32..=7, 0usize..3);
    sizes.prop_flat_map(|(e, l, chunks, m, order)| {
        // Zero-bubble has no interleaved stages.
        let llm_interleave = if l.0 == 1 || order == 2 { 1 } else { chunks };
        let layout = Layout { llm_interleave, ..layout(e, l) };
        let (ranks, num_rows, m) = (layout.num_ranks() as usize, layout.num_rows() as usize, m as usize);
        let feeds = prop::collection::vec(any::<bool>(), m * (e.1 * l.1) as usize);
        let split = (rows(num_rows, m, 20), rows(num_rows, m, 20));
        let tails = prop::collection::vec(0u64..30, ranks);
        (rows(num_rows, m, 20), rows(num_rows, m, 40), split, feeds, 0u64..6, tails).prop_map(
            move |(forward_ns, backward_ns, (input_ns, weight_ns), feeds, transfer_ns, tail_ns)| {
                let column = |c: &[bool]| c.chunks(l.1 as usize).map(fed).collect::<Vec<_>>();
                StepInput {
                    layout,
                    order: ORDERS[order],
                    num_microbatches: m as u32,
                    forward_ns,
                    backward_ns,
                    input_ns,
                    weight_ns,
                    feeds: feeds.chunks((e.1 * l.1) as usize).map(column).collect(),
                    transfer_ns,
                    tail_ns,
                    ready_ns: Vec::new(),
                }
            },
        )
    })
}

/// The lists of the step's pipeline order.
pub(crate) fn lists(step: &StepInput) -> Vec<Vec<Action>> {
    (0..step.layout.num_ranks()).map(|rank| step.actions(Rank(rank)).unwrap()).collect()
}

/// The lists of the step's pipeline order with some backwards split, by draws of `(is split, W after so many
/// actions)`: lists that mix B with I and W.
pub(crate) fn mixed(step: &StepInput, draws: &[(bool, usize)]) -> Vec<Vec<Action>> {
    let mut draws = draws.iter().cycle();
    let mut mixed = Vec::new();
    for list in lists(&StepInput { order: PipelineOrder::OneFOneB, ..step.clone() }) {
        // Each W is owed to the place at which it stands at the earliest.
        let (mut out, mut owed): (Vec<Action>, Vec<(usize, Action)>) = (Vec::new(), Vec::new());
        for (place, action) in list.into_iter().enumerate() {
            let due: Vec<_> = owed.iter().filter(|(at, _)| *at <= place).map(|&(_, w)| w).collect();
            owed.retain(|(at, _)| *at > place);
            out.extend(due);
            match draws.next() {
                Some(&(true, later)) if action.kind == ActionKind::B => {
                    out.push(Action { kind: ActionKind::I, ..action });
                    owed.push((place + 1 + later, Action { kind: ActionKind::W, ..action }));
                }
                _ => out.push(action),
            }
        }
        out.extend(owed.into_iter().map(|(_, w)| w));
        mixed.push(out);
    }
    mixed
}

/// What an action waits for, as (rank, action): written down from the definition, one action at a time. A backward
/// waits for the B or I that the other rank's list has.
pub(crate) fn inputs(
    step: &StepInput,
    lists: &[Vec<Action>],
    rank: Rank,
    action: Action,
) -> Vec<(Rank, Action)> {
    let layout = step.layout;
    let at = layout.coordinates(rank).unwrap();
    let (first_llm, last) = (layout.encoder.pp, layout.num_stages() - 1);
    let feeds = &step.feeds[action.microbatch as usize];
    let on = |stage: u32, replicas: Vec<u32>| -> Vec<(Rank, Action)> {
        let stage = StageIndex(stage);
        let on_replica = |replica| {
            let rank = layout.rank(replica, stage);
            let whole = Action { stage, ..action };
            let other = Action { kind: ActionKind::I, ..whole };
            let is_there = |action: &Action| lists[rank.index()].contains(action);
            let kinds = [whole, Action { kind: ActionKind::B, ..whole }, other];
            let kinds = if action.kind == ActionKind::F { &kinds[..1] } else { &kinds[1..] };
            (rank, *kinds.iter().find(|action| is_there(action)).unwrap())
        };
        replicas.into_iter().map(on_replica).collect()
    };
    match (action.kind, action.stage.0) {
        (ActionKind::W, _) => vec![(rank, Action { kind: ActionKind::I, ..action })],
        (ActionKind::F, 0) => vec![],
        (ActionKind::F, s) if s == first_llm => {
            let feeders = (0..layout.encoder.dp).filter(|&e| feeds[e as usize].contains(&at.replica));
            on(s - 1, feeders.collect())
        }
        (ActionKind::F, s) => on(s - 1, vec![at.replica]),
        (_, s) if s == last => vec![],
        (_, s) if s + 1 == first_llm => {
            let fed = (0..layout.llm.dp).filter(|&r| feeds[at.replica as usize].contains(&r));
            on(s + 1, fed.collect())
        }
        (_, s) => on(s + 1, vec![at.replica]),
    }
}

/// How long an input of an action of `rank` is under way from the rank `from`: not at all on the same rank, nor where the
/// action has no sample, so that its forward takes no time.
pub(crate) fn sent_ns(step: &StepInput, from: Rank, rank: Rank, action: Action) -> u64 {
    let forward = Action { kind: ActionKind::F, ..action };
    if from == rank || duration_ns(step, rank, forward) == 0 { 0 } else { step.transfer_ns }
}

pub(crate) fn duration_ns(step: &StepInput, rank: Rank, action: Action) -> u64 {
    let list = match action.kind {
        ActionKind::F => &step.forward_ns,
        ActionKind::B => &step.backward_ns,
        ActionKind::I => &step.input_ns,
        ActionKind::W => &step.weight_ns,
    };
    list[step.row(rank, action.stage)][action.microbatch as usize]
}

/// All spans by relaxation: every start at the time its rank has its data, pushed later by each edge until nothing
/// moves. Neither worklist nor topological order; O(actions x edges) at worst.
pub(crate) fn relax(step: &StepInput, lists: &[Vec<Action>]) -> Vec<Span> {
    let mut nodes = Vec::new();
    let mut edges = Vec::new();
    for (rank, list) in (0..).map(Rank).zip(lists) {
        edges.extend(list.windows(2).map(|pair| ((rank, pair[0]), (rank, pair[1]), 0)));
        for &action in list {
            nodes.push((rank, action));
            for input in inputs(step, lists, rank, action) {
                edges.push((input, (rank, action), sent_ns(step, input.0, rank, action)));
            }
        }
    }
    let ready_ns = |rank: Rank| step.ready_ns.get(rank.index()).map_or(0, |&ns| ns);
    let mut start: HashMap<(Rank, Action), u64> =
        nodes.iter().map(|&node| (node, ready_ns(node.0))).collect();
    let mut is_moving = true;
    while is_moving {
        is_moving = false;
        for &(from, to, delay_ns) in &edges {
            let earliest = start[&from] + duration_ns(step, from.0, from.1) + delay_ns;
            if start[&to] < earliest {
                start.insert(to, earliest);
                is_moving = true;
            }
        }
    }
    let span = |&(rank, action): &(Rank, Action)| {
        let start_ns = start[&(rank, action)];
        Span { rank, action, start_ns, end_ns: start_ns + duration_ns(step, rank, action) }
    };
    nodes.iter().map(span).collect()
}
