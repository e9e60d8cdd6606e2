//! Lists made for the durations: whole, within the cap, without deadlock, never slower than the pipeline orders.

use crate::common;
use crate::common::{layout, relax, steps_of};
use dflop_sim::{Durations, SimError, StepInput, simulate, simulate_lists, simulate_step};
use dflop_step::lists::{Holding, data_aware, data_aware_within, makespan_min_ns, simulate_pipeline};
use dflop_types::{Action, ActionKind, Layout, PipelineOrder, Rank, StageIndex};
use proptest::prelude::*;

/// What each rank holds at most, counted action by action.
fn peaks(step: &StepInput, holding: &Holding, lists: &[Vec<Action>]) -> Vec<u64> {
    let peak = |(rank, list): (usize, &Vec<Action>)| {
        let (mut held, mut peak) = (0, 0);
        for action in list {
            let row = step.row(Rank(rank as u32), action.stage);
            let of_microbatch = holding.held[row][action.microbatch as usize];
            match action.kind {
                ActionKind::F => held += of_microbatch,
                ActionKind::I => {}
                ActionKind::B | ActionKind::W => held -= of_microbatch,
            }
            peak = peak.max(held);
        }
        peak
    };
    lists.iter().enumerate().map(peak).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]

    /// Whatever feeds whom, however many chunks a rank has, whatever the cap down to the largest microbatch alone: the lists
    /// end (the engine times them), their times are those of the oracle, no rank holds more than it may, and forwards as
    /// well as backwards go through the microbatches of a chunk in one order on all ranks.
    #[test]
    fn lists_end_within_the_cap(
        step in steps_of(3),
        held in prop::collection::vec(0u64..30, 36 * 7),
        room in prop::collection::vec(0u64..60, 18),
        ready in prop::collection::vec(0u64..40, 18),
        is_split: bool,
        effort in 0usize..3_000,
    ) {
        let (ranks, m) = (step.layout.num_ranks() as usize, step.num_microbatches as usize);
        let step = StepInput { ready_ns: ready[..ranks].to_vec(), ..step };
        let rows = step.layout.num_rows() as usize;
        let held: Vec<Vec<u64>> = (0..rows).map(|row| held[row * 7..row * 7 + m].to_vec()).collect();
        let most = |rank: usize| -> u64 {
            let rank = Rank(rank as u32);
            let rows = || step.layout.stages(rank).map(|stage| step.row(rank, stage));
            (0..m).map(|j| rows().map(|row| held[row][j]).sum()).max().unwrap_or(0)
        };
        let cap = (0..ranks).map(|rank| most(rank) + room[rank]).collect();
        let holding = Holding { held, cap };
        let lists = data_aware_within(&step, &holding, is_split, effort).unwrap();
        let timeline = simulate_lists(&step, &lists).unwrap();
        prop_assert_eq!(&timeline.spans, &relax(&step, &lists));
        for (peak, cap) in peaks(&step, &holding, &lists).into_iter().zip(&holding.cap) {
            prop_assert!(peak <= *cap);
        }
        prop_assert!(holding.allows(&step, &lists));
        if !is_split {
            prop_assert!(lists.iter().flatten().all(|a| matches!(a.kind, ActionKind::F | ActionKind::B)));
            prop_assert!(makespan_min_ns(&step).unwrap() <= timeline.makespan_ns);
        }
        // Microbatches by stage, and chunks and microbatches by rank: messages between two ranks are in one order.
        let (first_llm, pp) = (step.layout.encoder.pp, step.layout.llm.pp);
        for is_forward in [true, false] {
            let of_kind = |list: &[Action]| -> Vec<Action> {
                let of_kind = list.iter().filter(|a| a.kind != ActionKind::W && (a.kind == ActionKind::F) == is_forward);
                of_kind.copied().collect()
            };
            let orders: Vec<Vec<Action>> = lists.iter().map(|list| of_kind(list)).collect();
            let microbatches = |rank: usize, stage: StageIndex| -> Vec<u32> {
                orders[rank].iter().filter(|a| a.stage == stage).map(|a| a.microbatch).collect()
            };
            let first = microbatches(0, StageIndex(0));
            for (rank, order) in orders.iter().enumerate() {
                for stage in step.layout.stages(Rank(rank as u32)) {
                    prop_assert_eq!(&microbatches(rank, stage), &first);
                }
                let chunks = |order: &[Action]| -> Vec<(u32, u32)> {
                    order.iter().map(|a| ((a.stage.0 - first_llm) / pp, a.microbatch)).collect()
                };
                if order.first().is_some_and(|a| a.stage.0 >= first_llm) {
                    prop_assert_eq!(chunks(order), chunks(orders.last().unwrap()));
                }
            }
        }
        // The pipeline orders, where they keep the cap too.
        let has_zero_bubble = is_split && !step.layout.is_interleaved();
        for order in [PipelineOrder::OneFOneB, PipelineOrder::ZeroBubble] {
            if order == PipelineOrder::ZeroBubble && !has_zero_bubble {
                continue;
            }
            let ordered = StepInput { order, ..step.clone() };
            if holding.allows(&ordered, &common::lists(&ordered)) {
                prop_assert!(timeline.makespan_ns <= simulate_step(&ordered).unwrap().makespan_ns);
            }
        }
        prop_assert_eq!(data_aware_within(&step, &holding, is_split, effort).unwrap(), lists, "again the same");
    }

    /// With whole backwards more effort is never worse: what was found is kept. No list beats its busiest rank, and none the least
    /// makespan, which knows more.
    #[test]
    fn effort_is_never_worse(step in steps_of(3), depth in 1u64..3) {
        let holding = Holding::of_one_f_one_b(&step, depth);
        let made = |effort| {
            let lists = data_aware_within(&step, &holding, false, effort).unwrap();
            simulate_lists(&step, &lists).unwrap()
        };
        let (little, more) = (made(0), made(20_000));
        prop_assert!(more.makespan_ns <= little.makespan_ns);
        let of_row = |row: usize| step.forward_ns[row].iter().chain(&step.backward_ns[row]).sum::<u64>();
        let load = |rank: u32| -> u64 {
            step.layout.stages(Rank(rank)).map(|stage| of_row(step.row(Rank(rank), stage))).sum()
        };
        let busiest_ns = (0..step.layout.num_ranks()).map(load).max().unwrap();
        let least_ns = makespan_min_ns(&step).unwrap();
        prop_assert!(busiest_ns <= least_ns && least_ns <= more.makespan_ns);
    }
}

/// Two ranks, two microbatches: forwards of 1 and 3 on the first rank, of 2 and 2 on the second, backwards twice as long, a message
/// takes 1, the tails 5 and 7. Counted by hand:
///
/// ```text
/// first rank   1 + 3 + 2 + 6            its backwards are last, then 5         12 + 5     = 17
/// second rank  1 + 1, then 2 + 2 + 4 + 4, then 1 + 2 back and 5, or 7          2 + 12 + 8 = 22
/// ```
#[test]
fn the_least_makespan_is_that_of_a_hand() {
    let step = StepInput {
        layout: layout((1, 1), (1, 1)),
        order: PipelineOrder::OneFOneB,
        num_microbatches: 2,
        forward_ns: vec![vec![1, 3], vec![2, 2]],
        backward_ns: vec![vec![2, 6], vec![4, 4]],
        input_ns: Vec::new(),
        weight_ns: Vec::new(),
        feeds: vec![vec![vec![0]]; 2],
        transfer_ns: 1,
        tail_ns: vec![5, 7],
        ready_ns: Vec::new(),
    };
    assert_eq!(makespan_min_ns(&step), Ok(22));
    // The second rank reads nothing of the encoder in the last microbatch, so nothing needs to come behind it but its own tail. And no
    // microbatch needs to come before it.
    let alone = StepInput { feeds: vec![vec![vec![0]], vec![vec![]]], ..step.clone() };
    assert_eq!(makespan_min_ns(&alone), Ok(19));
    let late = StepInput { ready_ns: vec![10, 0], ..step };
    assert_eq!(makespan_min_ns(&late), Ok(32));
    let colocated = StepInput { layout: Layout::colocated(2, dflop_types::Zero::Nothing), ..late };
    assert!(matches!(makespan_min_ns(&colocated), Err(SimError::Unsound { .. })));
}

/// Uneven microbatches on a line of ranks, 1F1B's order for them, and I and W of about half the backward.
fn uneven(p: u32, m: usize) -> StepInput {
    // A walk without a generator: from 60 to 160.
    let load = |j: usize| 60 + (j as u64 * 7_919 + 13) % 101;
    let rows = |parts: u64| -> Vec<Vec<u64>> {
        (0..u64::from(p)).map(|s| (0..m).map(|j| parts * (load(j) + 7 * (s % 3))).collect()).collect()
    };
    StepInput {
        layout: layout((1, 1), (p - 1, 1)),
        order: PipelineOrder::OneFOneB,
        num_microbatches: m as u32,
        forward_ns: rows(1),
        backward_ns: rows(2),
        input_ns: rows(1),
        weight_ns: rows(1),
        feeds: vec![vec![vec![0]]; m],
        transfer_ns: 0,
        tail_ns: vec![0; p as usize],
        ready_ns: Vec::new(),
    }
}

/// What lists are for: on uneven work they beat the pipeline order of the same memory by far, W fills bubbles, and
/// more memory is never worse.
#[test]
fn lists_beat_the_order() {
    let step = uneven(8, 32);
    let made_ns = |depth, is_split| {
        let holding = Holding::of_one_f_one_b(&step, depth);
        let lists = data_aware(&step, &holding, is_split).unwrap();
        simulate_lists(&step, &lists).unwrap().makespan_ns
    };
    let ideal_ns: u64 = step.forward_ns[2].iter().chain(&step.backward_ns[2]).sum();
    let ratio = |ns: u64| ns as f64 / ideal_ns as f64;
    let ordered = ratio(simulate_step(&step).unwrap().makespan_ns);
    let (whole, split, roomy) = (ratio(made_ns(1, false)), ratio(made_ns(1, true)), ratio(made_ns(2, true)));
    assert!(1.2 < ordered, "{ordered}");
    assert!(whole < ordered && split < whole - 0.05 && roomy <= split, "{ordered} {whole} {split} {roomy}");
    // Fill and drain alone are 14 of 110 places where all is even.
    assert!(split < 1.14, "{split}");
}

/// And on ranks with chunks they beat the interleaved order of the same memory. Chunks shorten the ramps that lists leave.
#[test]
fn lists_beat_the_interleaved_order() {
    let chunked = |chunks: u32| {
        let parts = u64::from(chunks);
        let mut step = uneven(4 * chunks + 1, 24);
        // Four ranks behind an encoder that keeps nobody waiting; a rank does the same work with any number of chunks.
        step.layout = Layout { llm_interleave: chunks, ..layout((1, 1), (4, 1)) };
        step.tail_ns = vec![0; 5];
        let times = [&mut step.forward_ns, &mut step.backward_ns, &mut step.input_ns, &mut step.weight_ns];
        for rows in times {
            rows[0].fill(1);
            rows[1..].iter_mut().flatten().for_each(|ns| *ns = *ns * 12 / parts);
        }
        step
    };
    let made_ns = |step: &StepInput, depth, is_split| {
        let holding = Holding::of_one_f_one_b(step, depth);
        let lists = data_aware(step, &holding, is_split).unwrap();
        assert!(holding.allows(step, &lists));
        simulate_lists(step, &lists).unwrap().makespan_ns as f64
    };
    let step = chunked(2);
    let ordered = simulate_step(&step).unwrap().makespan_ns as f64;
    let (whole, split, roomy) = (made_ns(&step, 1, false), made_ns(&step, 1, true), made_ns(&step, 2, true));
    assert!(
        whole < 0.97 * ordered && split < 0.99 * whole && roomy <= split,
        "{ordered} {whole} {split} {roomy}"
    );
    let plain = made_ns(&chunked(1), 1, false);
    assert!(whole < plain, "{whole} {plain}");
}

/// Halves that take longer than the whole backward are joined where nothing comes between them.
#[test]
fn halves_that_pay_nothing_are_joined() {
    let mut step = uneven(2, 4);
    for (input, weight) in step.input_ns.iter_mut().zip(&mut step.weight_ns) {
        (*input, *weight) = (vec![1_000; 4], vec![1_000; 4]);
    }
    let lists = data_aware(&step, &Holding::of_one_f_one_b(&step, 1), true).unwrap();
    assert!(lists[1].iter().all(|action| action.kind != ActionKind::I), "{lists:?}");
}

/// Where weights are frozen there is no W, and where nothing before a rank trains no I: what is left of a backward is one
/// B, also in a microbatch that is empty on a rank. No list is slower for that.
#[test]
fn halves_that_nothing_needs_are_not_listed() {
    let letters = |lists: &[Vec<Action>], rank: usize| -> String {
        let mut letters: Vec<String> =
            lists[rank].iter().map(|action| action.to_string()[1..2].to_owned()).collect();
        letters.sort_unstable();
        letters.dedup();
        letters.concat()
    };
    // A projector on the first rank: W alone. Then a frozen LLM: I alone.
    let mut frozen = uneven(4, 8);
    let split = {
        let lists = data_aware(&frozen, &Holding::of_one_f_one_b(&frozen, 1), true).unwrap();
        assert!((0..4).any(|rank| letters(&lists, rank).contains('W')), "{lists:?}");
        simulate_lists(&frozen, &lists).unwrap().makespan_ns
    };
    frozen.input_ns[0].fill(0);
    frozen.backward_ns[0].clone_from(&frozen.weight_ns[0]);
    for rank in 1..4 {
        frozen.weight_ns[rank].fill(0);
        frozen.backward_ns[rank].clone_from(&frozen.input_ns[rank]);
    }
    for depth in [1, 2] {
        let lists = data_aware(&frozen, &Holding::of_one_f_one_b(&frozen, depth), true).unwrap();
        for rank in 0..4 {
            assert_eq!(letters(&lists, rank), "BF", "{lists:?}");
            assert_eq!(lists[rank].len(), 16);
        }
        assert!(simulate_lists(&frozen, &lists).unwrap().makespan_ns < split);
    }
    // A rank with one microbatch of no sample: of that one there is one backward.
    let mut step = uneven(4, 8);
    for times in [&mut step.forward_ns, &mut step.backward_ns, &mut step.input_ns, &mut step.weight_ns] {
        times[2][3] = 0;
    }
    let lists = data_aware(&step, &Holding::of_one_f_one_b(&step, 2), true).unwrap();
    let own = lists[2].iter().filter(|action| action.microbatch == 3).map(|action| action.kind);
    assert_eq!(own.collect::<Vec<_>>(), [ActionKind::F, ActionKind::B]);
    // Even work of 2 stages, forward 1, I 1: a frozen pipeline takes (m + p - 1)(f + i).
    let even = |ns: u64| vec![vec![ns; 6]; 2];
    let even = StepInput {
        forward_ns: even(1),
        backward_ns: even(1),
        input_ns: even(1),
        weight_ns: even(0),
        ..uneven(2, 6)
    };
    let lists = data_aware(&even, &Holding::of_one_f_one_b(&even, 1), true).unwrap();
    assert_eq!(simulate_lists(&even, &lists).unwrap().makespan_ns, (6 + 2 - 1) * 2);
}

/// A microbatch that never fits is named; so are lists of the wrong length.
#[test]
fn what_cannot_be_held_is_refused() {
    let step = uneven(2, 2);
    let refused = |holding: Holding| match data_aware(&step, &holding, true) {
        Err(SimError::Unsound { violations, .. }) => {
            violations.iter().map(ToString::to_string).collect::<Vec<_>>()
        }
        other => panic!("{other:?}"),
    };
    assert_eq!(
        refused(Holding { held: vec![vec![3, 9], vec![1, 1]], cap: vec![8, 1] }),
        ["holding.held[0][1]: 9, the rank may hold 8"]
    );
    assert_eq!(
        refused(Holding { held: vec![vec![3], vec![1, 1]], cap: vec![8] }),
        ["holding.cap: 1 rank, the layout has 2", "holding.held[0]: 1 microbatch, the step has 2"]
    );
    let chunked = StepInput {
        layout: Layout { llm_interleave: 2, ..layout((1, 1), (2, 1)) },
        tail_ns: vec![0; 3],
        ..uneven(5, 2)
    };
    let holding = Holding { held: vec![vec![3; 2]; 5], cap: vec![3, 5, 6] };
    assert_eq!(
        data_aware(&chunked, &holding, true).unwrap_err().to_string(),
        "the step cannot be simulated\n  holding.held[all stages of rank 1][0]: 6, the rank may hold 5\n  \
         holding.held[all stages of rank 1][1]: 6, the rank may hold 5"
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// One pipeline given by its durations: every action once, on its stage's rank, and never slower than 1F1B.
    #[test]
    fn a_pipeline_is_never_slower_than_1f1b(
        p in 1usize..6, m in 0usize..9, times in prop::collection::vec(0u64..100, 6 * 9), transfer_ns in 0u64..9,
        has_split: bool
    ) {
        let rows = |parts: u64| -> Vec<Vec<u64>> {
            (0..p).map(|s| (0..m).map(|j| parts * times[s * 9 + j]).collect()).collect()
        };
        let halves = || if has_split { rows(1) } else { Vec::new() };
        let durations = Durations {
            forward_ns: rows(1),
            backward_ns: rows(2),
            input_ns: halves(),
            weight_ns: halves(),
            transfer_ns,
        };
        let listed = simulate_pipeline(&durations).unwrap();
        let ordered = simulate(&durations, PipelineOrder::OneFOneB).unwrap();
        prop_assert!(listed.makespan_ns <= ordered.makespan_ns);
        prop_assert!(listed.spans.iter().all(|span| span.rank.0 == span.action.stage.0));
        let busy = |timeline: &dflop_types::Timeline| -> u64 {
            timeline.spans.iter().map(|span| span.end_ns - span.start_ns).sum()
        };
        prop_assert_eq!(busy(&listed), busy(&ordered));
    }
}
