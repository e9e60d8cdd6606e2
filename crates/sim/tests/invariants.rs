//! What must hold of every step: against an oracle, against each other, and by themselves.

use crate::common::{ORDERS, duration_ns, fed, inputs, lists, mixed, relax, sent_ns, steps, steps_of};
use dflop_sim::{
    Durations, MicrobatchDurations, Simulator, StepInput, durations_of, idle_of, measured_lists,
    measured_timeline, simulate, simulate_lists, simulate_step,
};
use dflop_types::{Action, Rank, Span, Timeline};
use proptest::prelude::*;
use std::collections::{HashMap, HashSet};

/// When each rank could take its tail, and the end of the last tail, from the spans alone.
fn end_with_tails(step: &StepInput, spans: &[Span]) -> u64 {
    let component = |rank: Rank| step.layout.coordinates(rank).unwrap().component;
    let ends = (0..step.layout.num_ranks()).map(Rank).map(|rank| {
        let of_component = spans.iter().filter(|span| component(span.rank) == component(rank));
        of_component.map(|span| span.end_ns).max().unwrap_or(0) + step.tail_ns[rank.index()]
    });
    ends.max().unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]

    /// The engine gives, span by span, what relaxation to a fixed point gives.
    #[test]
    fn the_oracle_agrees(step in steps_of(3)) {
        let timeline = simulate_step(&step).unwrap();
        let expected = relax(&step, &lists(&step));
        prop_assert_eq!(timeline.makespan_ns, end_with_tails(&step, &expected));
        prop_assert_eq!(timeline.spans, expected);
    }

    /// So it does for lists that mix B with I and W, while ranks wait for their data; and such a step measured is
    /// split as it was simulated.
    #[test]
    fn the_oracle_agrees_on_mixed_lists(
        step in steps_of(3),
        draws in prop::collection::vec((any::<bool>(), 0usize..9), 1..40),
        ready in prop::collection::vec(0u64..40, 18),
    ) {
        let mut step = step;
        step.ready_ns = ready[..step.layout.num_ranks() as usize].to_vec();
        let lists = mixed(&step, &draws);
        let timeline = simulate_lists(&step, &lists).unwrap();
        let expected = relax(&step, &lists);
        // A step of no microbatches waits for no data.
        prop_assert_eq!(timeline.makespan_ns, end_with_tails(&step, &expected));
        prop_assert_eq!(&timeline.spans, &expected);
        let tails: u64 = step.tail_ns.iter().sum();
        let whole = u64::from(timeline.num_ranks) * timeline.makespan_ns;
        prop_assert_eq!(timeline.idle_ns.total_ns() + timeline.busy_ns() + tails, whole);
        let at_once = StepInput { ready_ns: Vec::new(), ..step.clone() };
        let at_once = simulate_lists(&at_once, &lists).unwrap();
        prop_assert_eq!(at_once.idle_ns.data_wait, 0);
        let longer_ns = u64::from(timeline.num_ranks) * (timeline.makespan_ns - at_once.makespan_ns);
        prop_assert_eq!(timeline.idle_ns.data_wait, longer_ns);
        prop_assert_eq!(timeline.idle_ns.transfer, at_once.idle_ns.transfer);

        step.tail_ns.fill(0);
        let simulated = simulate_lists(&step, &lists).unwrap();
        let measured = measured_lists(&step, &lists, &simulated.spans).unwrap();
        prop_assert_eq!(measured.idle_ns.total_ns() + measured.busy_ns(),
            u64::from(measured.num_ranks) * measured.makespan_ns);
        let from_start = simulated.spans.iter().all(|s| s.start_ns > 0);
        if !from_start {
            prop_assert_eq!(measured.idle_ns, simulated.idle_ns);
        }
        prop_assert_eq!(durations_of(&simulated.spans, &step).unwrap(), step);
    }

    /// A microbatch that is replaced, times and feeds: as if the step had been made with it.
    #[test]
    fn a_replaced_microbatch_is_as_if_made_so(
        step in steps_of(3),
        at: prop::sample::Index,
        times in prop::collection::vec(0u64..40, 4 * 36),
        feeding in prop::collection::vec(any::<bool>(), 9),
    ) {
        let m = step.num_microbatches as usize;
        if m > 0 {
            let (at, rows) = (at.index(m), step.layout.num_rows() as usize);
            let mut simulator = Simulator::new(&step).unwrap();
            simulator.makespan_ns();
            let by_row = |kind: usize| times[36 * kind..36 * kind + rows].to_vec();
            let replicas = step.layout.llm.dp as usize;
            let column = MicrobatchDurations {
                forward_ns: by_row(0),
                backward_ns: by_row(1),
                input_ns: by_row(2),
                weight_ns: by_row(3),
                feeds: feeding.chunks(3).take(step.layout.encoder.dp as usize)
                    .map(|row| fed(&row[..replicas])).collect(),
            };
            simulator.set_microbatch(at, step.layout, &column);
            let mut made = step;
            made.feeds[at].clone_from(&column.feeds);
            for row in 0..rows {
                made.forward_ns[row][at] = column.forward_ns[row];
                made.backward_ns[row][at] = column.backward_ns[row];
                made.input_ns[row][at] = column.input_ns[row];
                made.weight_ns[row][at] = column.weight_ns[row];
            }
            prop_assert_eq!(simulator.timeline(), Simulator::new(&made).unwrap().timeline());
        }
    }

    /// Two microbatches that swap: what is timed anew equals the whole, and is taken back.
    #[test]
    fn a_swap_is_an_order(
        step in steps_of(3),
        places in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>(), any::<bool>(), any::<bool>()), 1..12),
        ready in prop::collection::vec(0u64..40, 18),
    ) {
        let mut step = step;
        step.ready_ns = ready[..step.layout.num_ranks() as usize].to_vec();
        let m = step.num_microbatches as usize;
        let mut simulator = Simulator::new(&step).unwrap();
        let mut whole = Simulator::new(&step).unwrap();
        let mut order: Vec<usize> = (0..m).collect();
        for (a, b, is_kept, looks) in places {
            if m == 0 {
                break;
            }
            let (a, b) = (a.index(m), b.index(m));
            order.swap(a, b);
            prop_assert_eq!(simulator.swap(a, b), whole.makespan_in_order(&order));
            if looks {
                // Other questions in between change nothing.
                let reversed: Vec<usize> = (0..m).rev().collect();
                simulator.makespan_in_order(&reversed);
                simulator.timeline();
            }
            if !is_kept {
                simulator.undo();
                order.swap(a, b);
            }
            let standing: Vec<usize> = simulator.standing().iter().map(|&j| j as usize).collect();
            prop_assert_eq!(&standing, &order);
            prop_assert_eq!(simulator.makespan_ns(), whole.makespan_in_order(&order));
        }
        let reversed: Vec<usize> = (0..m).rev().collect();
        let composed: Vec<usize> = reversed.iter().map(|&at| order[at]).collect();
        prop_assert_eq!(simulator.makespan_in_order(&reversed), whole.makespan_in_order(&composed));
    }

    /// Per rank no overlap; every input earlier than its use; makespan at least every load and every path of
    /// a microbatch; idle + busy + tails = ranks x makespan.
    #[test]
    fn a_timeline_is_sound(step in steps_of(3)) {
        let timeline = simulate_step(&step).unwrap();
        let end: HashMap<_, _> = timeline.spans.iter().map(|s| ((s.rank, s.action), s.end_ns)).collect();
        prop_assert_eq!(end.len(), timeline.spans.len(), "each action once");
        for pair in timeline.spans.windows(2).filter(|pair| pair[0].rank == pair[1].rank) {
            prop_assert!(pair[0].end_ns <= pair[1].start_ns);
        }
        for span in &timeline.spans {
            prop_assert_eq!(span.duration_ns(), duration_ns(&step, span.rank, span.action));
            for input in inputs(&step, &lists(&step), span.rank, span.action) {
                let sent_ns = sent_ns(&step, input.0, span.rank, span.action);
                prop_assert!(end[&input] + sent_ns <= span.start_ns);
            }
        }
        for (rank, tail_ns) in step.tail_ns.iter().enumerate() {
            let of_rank = timeline.spans.iter().filter(|span| span.rank.index() == rank);
            let load: u64 = of_rank.map(Span::duration_ns).sum();
            prop_assert!(timeline.makespan_ns >= load + tail_ns);
        }
        let tails: u64 = step.tail_ns.iter().sum();
        let whole = u64::from(timeline.num_ranks) * timeline.makespan_ns;
        prop_assert_eq!(timeline.num_ranks, step.layout.num_ranks());
        prop_assert_eq!(timeline.idle_ns.total_ns() + timeline.busy_ns() + tails, whole);
    }

    /// More time for one action, tail or transfer never shortens the step.
    #[test]
    fn longer_is_never_shorter(step in steps_of(3), at in any::<prop::sample::Index>(), more_ns in 1u64..50) {
        let before = simulate_step(&step).unwrap().makespan_ns;
        let mut longer = step.clone();
        let StepInput { forward_ns, backward_ns, input_ns, weight_ns, tail_ns, transfer_ns, .. } = &mut longer;
        let rows = forward_ns.iter_mut().chain(backward_ns).chain(input_ns).chain(weight_ns);
        let mut times: Vec<&mut u64> = rows.flatten().collect();
        times.extend(tail_ns);
        times.push(transfer_ns);
        let place = at.index(times.len());
        *times[place] += more_ns;
        let after = simulate_step(&longer).unwrap().makespan_ns;
        // What takes time from now on has a sample from now on, which is sent to it, and back to it.
        let most_ns = more_ns * 2 * times_transferred(&step) + 2 * step.transfer_ns;
        prop_assert!(before <= after && after <= before + most_ns);
    }

    /// Transfers cost what they add: without them, none of the idle time is theirs and the rest stays.
    #[test]
    fn transfer_is_what_transfers_add(step in steps_of(3)) {
        let with = simulate_step(&step).unwrap();
        let free = simulate_step(&StepInput { transfer_ns: 0, ..step }).unwrap();
        prop_assert_eq!(free.idle_ns.transfer, 0);
        prop_assert_eq!(free.idle_ns.ramp, with.idle_ns.ramp);
        prop_assert_eq!(free.idle_ns.imbalance, with.idle_ns.imbalance);
        let longer_ns = u64::from(with.num_ranks) * (with.makespan_ns - free.makespan_ns);
        prop_assert_eq!(with.idle_ns.transfer, longer_ns);
    }

    /// Even work idles by ramp alone, whatever feeds whom.
    #[test]
    fn even_work_has_no_imbalance(step in steps_of(3), f in 0u64..20, b in 0u64..20) {
        let mut even = StepInput { transfer_ns: 0, ..step };
        even.forward_ns.iter_mut().flatten().for_each(|ns| *ns = f);
        even.backward_ns.iter_mut().flatten().for_each(|ns| *ns = b);
        even.input_ns.iter_mut().flatten().for_each(|ns| *ns = b / 2);
        even.weight_ns.iter_mut().flatten().for_each(|ns| *ns = b - b / 2);
        even.tail_ns.fill(0);
        let idle = simulate_step(&even).unwrap().idle_ns;
        prop_assert_eq!((idle.imbalance, idle.transfer), (0, 0));
    }

    /// Even if before every action a rank waited for all messages under way, all lists would end; and no receive opens after its
    /// action.
    #[test]
    fn messages_under_way_make_no_circle(
        step in steps_of(3),
        draws in prop::collection::vec((any::<bool>(), 0usize..4), 1..20),
        is_mixed: bool,
    ) {
        let rows = |ns: u64| vec![vec![ns; step.num_microbatches as usize]; step.layout.num_rows() as usize];
        let step = StepInput {
            forward_ns: rows(1),
            backward_ns: rows(2),
            input_ns: rows(1),
            weight_ns: rows(1),
            transfer_ns: 0,
            ..step.clone()
        };
        let is_mixed = is_mixed && !step.layout.is_interleaved();
        let lists = if is_mixed { mixed(&step, &draws) } else { lists(&step) };
        let mut simulator = Simulator::with_lists(&step, &lists).unwrap();
        // By rank, place in its list, and giver: before which action the receive opens.
        let openings: Vec<Vec<HashMap<Rank, u32>>> = (0..lists.len() as u32)
            .map(|rank| simulator.openings(Rank(rank)))
            .map(|of_rank| of_rank.iter().map(|all| all.iter().map(|o| (o.giver, o.num_before)).collect()).collect())
            .collect();
        // Each message: giver and its action, taker and the place of its action.
        let mut messages: Vec<(Rank, Action, usize, usize)> = Vec::new();
        for (at, list) in lists.iter().enumerate() {
            for (position, &action) in list.iter().enumerate() {
                let given = inputs(&step, &lists, Rank(at as u32), action);
                let others = given.into_iter().filter(|(of, _)| of.index() != at);
                messages.extend(others.map(|(of, input)| (of, input, at, position)));
            }
        }
        let opens = |&(of, _, taker, position): &(Rank, Action, usize, usize)| openings[taker][position][&of] as usize;
        for message in &messages {
            prop_assert!(opens(message) <= message.3);
        }
        let (mut done, mut cursor) = (HashSet::new(), vec![0; lists.len()]);
        while done.len() < lists.iter().map(Vec::len).sum() {
            let before = done.len();
            for (at, list) in lists.iter().enumerate() {
                while cursor[at] < list.len() {
                    let is_over = |message: &(Rank, Action, usize, usize)| {
                        let (of, input, taker, _) = *message;
                        let (is_sent, is_open) = (done.contains(&(of, input)), opens(message) <= cursor[taker]);
                        let is_under_way = taker == at && is_open || of.index() == at && is_sent;
                        !is_under_way || is_sent && is_open
                    };
                    if !messages.iter().all(is_over) {
                        break;
                    }
                    done.insert((Rank(at as u32), list[cursor[at]]));
                    cursor[at] += 1;
                }
            }
            prop_assert!(done.len() > before, "circle: {:?} of {:?}", cursor, lists);
        }
    }

    /// The lists of a pipeline order never deadlock, and given as lists they are timed alike.
    #[test]
    fn orders_never_deadlock(step in steps_of(3)) {
        prop_assert_eq!(simulate_lists(&step, &lists(&step)), simulate_step(&step));
    }

    /// Timing an order of microbatches equals timing the step with its microbatches moved.
    #[test]
    fn an_order_is_a_moved_step(step in steps_of(3), seed in any::<prop::sample::Index>()) {
        let m = step.num_microbatches as usize;
        let mut order: Vec<usize> = (0..m).collect();
        for i in (1..m).rev() {
            // Any mixing does: a shuffle from one drawn number.
            order.swap(i, seed.index(97 * i + 1) % (i + 1));
        }
        let moved = |rows: &[Vec<u64>]| -> Vec<Vec<u64>> {
            rows.iter().map(|row| order.iter().map(|&j| row[j]).collect()).collect()
        };
        let step_moved = StepInput {
            forward_ns: moved(&step.forward_ns),
            backward_ns: moved(&step.backward_ns),
            input_ns: moved(&step.input_ns),
            weight_ns: moved(&step.weight_ns),
            feeds: order.iter().map(|&j| step.feeds[j].clone()).collect(),
            ..step.clone()
        };
        let mut simulator = Simulator::new(&step).unwrap();
        let before = simulator.timeline();
        prop_assert_eq!(simulator.makespan_in_order(&order), simulate_step(&step_moved).unwrap().makespan_ns);
        prop_assert_eq!(simulator.makespan_ns(), before.makespan_ns, "trying an order leaves no trace");
        prop_assert_eq!(simulator.timeline(), before);
    }

    /// A simulated step taken for a measured one: same durations, same idle time by cause, at any time of
    /// day.
    #[test]
    fn a_simulation_measured_is_itself(step in steps_of(3), midnight in 0u64..1_000_000) {
        let mut step = step;
        step.tail_ns.fill(0);
        let simulated = simulate_step(&step).unwrap();
        let mut spans = simulated.spans.clone();
        for span in &mut spans {
            (span.start_ns, span.end_ns) = (span.start_ns + midnight, span.end_ns + midnight);
        }
        spans.reverse();
        let other = StepInput {
            forward_ns: step.forward_ns.iter().map(|row| vec![7; row.len()]).collect(),
            ..step.clone()
        };
        prop_assert_eq!(durations_of(&spans, &other).unwrap(), step.clone());
        let measured = measured_timeline(&other, &spans).unwrap();
        prop_assert_eq!(measured.makespan_ns, simulated.makespan_ns);
        prop_assert_eq!(measured.idle_ns, simulated.idle_ns);
        prop_assert_eq!(idle_of(&other, &spans).unwrap(), simulated.idle_ns);
    }

    /// A measured step that dawdles: the causes still add up, and what the durations do not explain is
    /// transfer.
    #[test]
    fn dawdling_is_transfer(step in steps_of(3), dawdle_ns in 0u64..50) {
        let mut step = step;
        step.tail_ns.fill(0);
        let simulated = simulate_step(&step).unwrap();
        let mut spans = simulated.spans.clone();
        for span in &mut spans {
            let start_ns = 2 * span.start_ns + dawdle_ns;
            (span.start_ns, span.end_ns) = (start_ns, start_ns + span.duration_ns());
        }
        let measured = measured_timeline(&step, &spans).unwrap();
        let whole = u64::from(measured.num_ranks) * measured.makespan_ns;
        prop_assert_eq!(measured.idle_ns.total_ns() + measured.busy_ns(), whole);
        prop_assert_eq!(measured.idle_ns.ramp, simulated.idle_ns.ramp);
        prop_assert_eq!(measured.idle_ns.imbalance, simulated.idle_ns.imbalance);
    }

    /// One encoder and one LLM replica that always feed each other are one pipeline.
    #[test]
    fn one_replica_is_a_pipeline(step in steps()) {
        let mut step = step;
        (step.layout.encoder.dp, step.layout.llm.dp) = (1, 1);
        let ranks = step.layout.num_ranks() as usize;
        step.forward_ns.truncate(ranks);
        step.backward_ns.truncate(ranks);
        step.input_ns.truncate(ranks);
        step.weight_ns.truncate(ranks);
        step.tail_ns = vec![0; ranks];
        step.feeds = vec![vec![vec![0]]; step.num_microbatches as usize];
        let durations = Durations {
            forward_ns: step.forward_ns.clone(),
            backward_ns: step.backward_ns.clone(),
            input_ns: step.input_ns.clone(),
            weight_ns: step.weight_ns.clone(),
            transfer_ns: step.transfer_ns,
        };
        for order in ORDERS {
            let timeline: Timeline = simulate_step(&StepInput { order, ..step.clone() }).unwrap();
            prop_assert_eq!(timeline, simulate(&durations, order).unwrap());
        }
    }
}

/// No path has more hand-overs than there are actions.
fn times_transferred(step: &StepInput) -> u64 {
    u64::from(step.layout.num_rows() * step.num_microbatches).max(1)
}
