//! Random steps, and an oracle that times them in another way than the engine does.

#![allow(dead_code, reason = "each test file uses a part")]

use dflop_sim::StepInput;
use dflop_types::{Action, ActionKind, ComponentLayout, Layout, PipelineOrder, Rank, Span, StageIndex};
use proptest::prelude::*;
use std::collections::HashMap;

pub(crate) const ORDERS: [PipelineOrder; 2] = [PipelineOrder::GPipe, PipelineOrder::OneFOneB];

pub(crate) fn layout(encoder: (u32, u32), llm: (u32, u32)) -> Layout {
    let component = |(pp, dp)| ComponentLayout { tp: 1, pp, dp };
    Layout { encoder: component(encoder), llm: component(llm) }
}

pub(crate) fn rows(ranks: usize, m: usize, ns_max: u64) -> impl Strategy<Value = Vec<Vec<u64>>> {
    prop::collection::vec(prop::collection::vec(0..=ns_max, m), ranks)
}

/// Steps with 1 to 3 replicas and stages of each component, 0 to 7 microbatches, short times (so that ties
/// and zeros are common).
pub(crate) fn steps() -> impl Strategy<Value = StepInput> {
    ((1u32..=3, 1u32..=3), (1u32..=3, 1u32..=3), 0u32..=7, 0usize..2).prop_flat_map(|(e, l, m, order)| {
        let layout = layout(e, l);
        let (ranks, m) = (layout.num_ranks() as usize, m as usize);
        let feeds = prop::collection::vec(any::<bool>(), m * (e.1 * l.1) as usize);
        (rows(ranks, m, 20), rows(ranks, m, 40), feeds, 0u64..6, prop::collection::vec(0u64..30, ranks))
            .prop_map(move |(forward_ns, backward_ns, feeds, transfer_ns, tail_ns)| {
                let column = |c: &[bool]| c.chunks(l.1 as usize).map(<[bool]>::to_vec).collect::<Vec<_>>();
                StepInput {
                    layout,
                    order: ORDERS[order],
                    num_microbatches: m as u32,
                    forward_ns,
                    backward_ns,
                    feeds: feeds.chunks((e.1 * l.1) as usize).map(column).collect(),
                    transfer_ns,
                    tail_ns,
                }
            })
    })
}

/// What an action waits for, as (rank, action): written down from the definition, one action at a time.
pub(crate) fn inputs(step: &StepInput, rank: Rank, action: Action) -> Vec<(Rank, Action)> {
    let layout = step.layout;
    let at = layout.coordinates(rank).unwrap();
    let (first_llm, last) = (layout.encoder.pp, layout.num_stages() - 1);
    let feeds = &step.feeds[action.microbatch as usize];
    let on = |stage: u32, replicas: Vec<u32>| -> Vec<(Rank, Action)> {
        let stage = StageIndex(stage);
        replicas
            .into_iter()
            .map(|replica| (layout.rank(replica, stage), Action { stage, ..action }))
            .collect()
    };
    match (action.kind, action.stage.0) {
        (ActionKind::F, 0) => vec![],
        (ActionKind::F, s) if s == first_llm => {
            let feeders = (0..layout.encoder.dp).filter(|&e| feeds[e as usize][at.replica as usize]);
            on(s - 1, feeders.collect())
        }
        (ActionKind::F, s) => on(s - 1, vec![at.replica]),
        (_, s) if s == last => vec![],
        (_, s) if s + 1 == first_llm => {
            let fed = (0..layout.llm.dp).filter(|&r| feeds[at.replica as usize][r as usize]);
            on(s + 1, fed.collect())
        }
        (_, s) => on(s + 1, vec![at.replica]),
    }
}

pub(crate) fn duration_ns(step: &StepInput, rank: Rank, action: Action) -> u64 {
    let list = if action.kind == ActionKind::F { &step.forward_ns } else { &step.backward_ns };
    list[rank.index()][action.microbatch as usize]
}

/// All spans by relaxation: every start at 0, pushed later by each edge until nothing moves. Neither worklist
/// nor topological order; O(actions x edges) at worst.
pub(crate) fn relax(step: &StepInput) -> Vec<Span> {
    let mut nodes = Vec::new();
    let mut edges = Vec::new();
    for rank in (0..step.layout.num_ranks()).map(Rank) {
        let list = step.actions(rank).unwrap();
        edges.extend(list.windows(2).map(|pair| ((rank, pair[0]), (rank, pair[1]), 0)));
        for action in list {
            nodes.push((rank, action));
            let inputs = inputs(step, rank, action);
            edges.extend(inputs.into_iter().map(|input| (input, (rank, action), step.transfer_ns)));
        }
    }
    let mut start: HashMap<(Rank, Action), u64> = nodes.iter().map(|&node| (node, 0)).collect();
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
