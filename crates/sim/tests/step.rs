//! Steps with replicas: by hand, and what is refused.

use crate::common::layout;
use dflop_sim::{
    SimError, Simulator, StepInput, durations_of, idle_of, measured_timeline, perfetto, simulate_lists,
    simulate_step,
};
use dflop_types::{Action, Hint, Idle, PipelineOrder, Rank, Span, Timeline};

/// Two encoder replicas, one LLM rank, two microbatches; replica 1 has nothing in microbatch 1.
fn step() -> StepInput {
    StepInput {
        layout: layout((1, 2), (1, 1)),
        order: PipelineOrder::OneFOneB,
        num_microbatches: 2,
        forward_ns: vec![vec![3, 1], vec![5, 0], vec![2, 2]],
        backward_ns: vec![vec![2, 2], vec![1, 0], vec![3, 3]],
        input_ns: Vec::new(),
        weight_ns: Vec::new(),
        feeds: vec![vec![vec![0], vec![0]], vec![vec![0], vec![]]],
        transfer_ns: 0,
        tail_ns: vec![0, 0, 0],
        ready_ns: Vec::new(),
    }
}

fn written(timeline: &Timeline, rank: u32) -> String {
    let spans = timeline.spans.iter().filter(|span| span.rank == Rank(rank));
    let spans: Vec<_> = spans.map(|s| format!("{} {}..{}", s.action, s.start_ns, s.end_ns)).collect();
    spans.join(", ")
}

fn list(text: &str) -> Vec<Action> {
    text.split_whitespace().map(|action| action.parse().unwrap()).collect()
}

fn violations(error: SimError) -> Vec<String> {
    match error {
        SimError::Unsound { violations, .. } => violations.iter().map(ToString::to_string).collect(),
        other => panic!("{other}"),
    }
}

/// Replicas meet over the boundary only where they share samples.
#[test]
fn two_encoders_feed_one_llm() {
    let timeline = simulate_step(&step()).unwrap();
    assert_eq!(written(&timeline, 0), "0F0 0..3, 0F1 3..4, 0B0 10..12, 0B1 15..17");
    assert_eq!(written(&timeline, 1), "0F0 0..5, 0F1 5..5, 0B0 10..11, 0B1 11..11");
    assert_eq!(written(&timeline, 2), "1F0 5..7, 1B0 7..10, 1F1 10..12, 1B1 12..15");
    assert_eq!((timeline.num_ranks, timeline.makespan_ns), (3, 17));
    // Idle is 3 x 17 - 24 = 27. With mean F 13/6 -> 2 and B 11/6 -> 1 and these feeds, encoder 0 runs 0..2,
    // 2..4, 5..6, 8..9, so that 3 x 9 - 18 = 9 are ramp.
    assert_eq!(timeline.idle_ns, Idle { ramp: 9, imbalance: 18, transfer: 0, data_wait: 0 });
}

/// A component meets before its tails, the other does not wait for it; tails are neither idle nor spans.
#[test]
fn tails() {
    let timeline = simulate_step(&StepInput { tail_ns: vec![4, 4, 1], ..step() }).unwrap();
    // The encoders meet at 17 and end at 21, the LLM ends at 16. 3 x 21 - 24 - 9 = 30 are idle.
    assert_eq!(timeline.makespan_ns, 21);
    assert_eq!(timeline.idle_ns, Idle { ramp: 9, imbalance: 21, transfer: 0, data_wait: 0 });
    assert_eq!(timeline.spans, simulate_step(&step()).unwrap().spans);
    let empty = StepInput {
        num_microbatches: 0,
        forward_ns: vec![vec![]; 3],
        backward_ns: vec![vec![]; 3],
        feeds: vec![],
        tail_ns: vec![4, 4, 1],
        ..step()
    };
    let timeline = simulate_step(&empty).unwrap();
    assert_eq!((timeline.makespan_ns, timeline.spans.len()), (4, 0));
    assert_eq!(timeline.idle_ns, Idle { ramp: 0, imbalance: 3, transfer: 0, data_wait: 0 });
}

/// A text-only microbatch waits for no encoder.
#[test]
fn nothing_fed_is_nothing_waited_for() {
    let apart = StepInput { feeds: vec![vec![vec![]; 2]; 2], ..step() };
    let timeline = simulate_step(&apart).unwrap();
    assert_eq!(written(&timeline, 0), "0F0 0..3, 0F1 3..4, 0B0 4..6, 0B1 6..8");
    assert_eq!(written(&timeline, 2), "1F0 0..2, 1B0 2..5, 1F1 5..7, 1B1 7..10");
}

/// Every violation of a step is listed with its place.
#[test]
fn every_problem_is_listed() {
    let mut ragged = step();
    ragged.forward_ns[1].push(4);
    ragged.backward_ns.pop();
    ragged.tail_ns.push(0);
    ragged.feeds[0].pop();
    ragged.feeds[1][0] = vec![0, 0];
    ragged.feeds[1][1] = vec![1];
    assert_eq!(
        violations(simulate_step(&ragged).unwrap_err()),
        [
            "forward_ns[1]: 3 microbatches, the step has 2",
            "backward_ns: 2 ranks, the layout has 3",
            "tail_ns: 4 ranks, the layout has 3",
            "feeds[0]: 1 encoder replica, the layout has 2",
            "feeds[1][0] must name LLM replicas in ascending order, below 1",
            "feeds[1][1] must name LLM replicas in ascending order, below 1",
        ]
    );
    let mut degrees = step();
    degrees.layout.encoder.dp = 0;
    degrees.layout.llm.pp = 0;
    degrees.layout.llm.tp = 2;
    assert_eq!(
        violations(simulate_step(&degrees).unwrap_err()),
        [
            "layout.encoder.data_parallel_degree: 0 replicas, at least 1 is needed",
            "layout.llm.pipeline_parallel_degree: 0 stages, at least 1 is needed",
            "layout.llm.tensor_parallel_degree: 2, only 1 can be simulated",
        ]
    );
    let mut huge = step();
    (huge.layout.llm.dp, huge.layout.llm.pp) = (u32::MAX, u32::MAX);
    for num_microbatches in [2, 0] {
        huge.num_microbatches = num_microbatches;
        let found = violations(simulate_step(&huge).unwrap_err());
        assert_eq!(found.len(), 1, "no overflow on the way to the refusal: {found:?}");
    }
}

/// Lists that cross are named by their first pair; a list must be whole.
#[test]
fn lists_that_never_end() {
    let crossed = ["0F0 0B0 0F1 0B1", "0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"].map(list);
    let error = simulate_lists(&step(), &crossed).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the action lists never end: rank 0 waits at `0B0` for `1B0` of rank 2, which waits at `1F1`"
    );
    assert_eq!(error.hint().unwrap(), "take the lists of `order::actions`, or move a backward ahead");
    // The feeds decide: where microbatch 1 comes from nowhere, the same lists end.
    let mut apart = step();
    apart.feeds[1][0].clear();
    assert!(simulate_lists(&apart, &crossed).is_ok());
    let turned = ["0B0 0F0 0F1 0B1", "0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"].map(list);
    assert_eq!(
        simulate_lists(&step(), &turned).unwrap_err().to_string(),
        "the action lists never end: rank 0 waits at `0B0` for `0F0` of rank 0, which waits at `0B0`"
    );
    let broken = ["0F0 0F0 0F1 0B1", "0F0 0F1 0B0 0B1 0I1 0F2", "1F0 1B0 1F1 1B1"].map(list);
    assert_eq!(
        violations(simulate_lists(&step(), &broken).unwrap_err()),
        [
            "lists[0]: `0F0` stands 2 times, each action of the rank must stand once",
            "lists[0]: `0B0` stands 0 times, each action of the rank must stand once",
            "lists[1]: `0I1` is not an action of rank 1",
            "lists[1]: `0F2` is not an action of rank 1",
        ]
    );
    assert_eq!(
        violations(simulate_lists(&step(), &crossed[..2]).unwrap_err()),
        ["lists: 2 ranks, the layout has 3"]
    );
}

/// Where a replica has no sample of a microbatch, nothing is sent from stage to stage: its ranks take no time for it.
#[test]
fn nothing_is_sent_without_a_sample() {
    let none = StepInput {
        layout: layout((1, 1), (3, 2)),
        order: PipelineOrder::OneFOneB,
        num_microbatches: 1,
        // The second replica of the LLM is without a sample.
        forward_ns: [1, 1, 1, 1, 0, 0, 0].map(|ns| vec![ns]).to_vec(),
        backward_ns: [1, 1, 1, 1, 0, 0, 0].map(|ns| vec![ns]).to_vec(),
        input_ns: Vec::new(),
        weight_ns: Vec::new(),
        feeds: vec![vec![vec![0]]],
        transfer_ns: 10,
        tail_ns: vec![0; 7],
        ready_ns: Vec::new(),
    };
    let timeline = simulate_step(&none).unwrap();
    assert_eq!(timeline.makespan_ns, 8 + 6 * 10, "there and back over three borders");
    assert!(timeline.spans.iter().filter(|span| span.rank.0 >= 4).all(|span| span.end_ns == 0));
}

/// One encoder rank and one LLM rank, two microbatches, all with times of I and W.
fn split_step() -> StepInput {
    StepInput {
        layout: layout((1, 1), (1, 1)),
        forward_ns: vec![vec![2, 2]; 2],
        backward_ns: vec![vec![4, 4]; 2],
        input_ns: vec![vec![1, 1], vec![2, 2]],
        weight_ns: vec![vec![3, 3], vec![2, 2]],
        feeds: vec![vec![vec![0]]; 2],
        tail_ns: vec![0, 0],
        ..step()
    }
}

/// The gradient leaves after I, W waits for nobody, and lists may mix B with I and W.
#[test]
fn split_backwards() {
    let lists = ["0F0 0F1 0I0 0I1 0W0 0W1", "1F0 1I0 1F1 1W0 1B1"].map(list);
    let timeline = simulate_lists(&split_step(), &lists).unwrap();
    assert_eq!(written(&timeline, 1), "1F0 2..4, 1I0 4..6, 1F1 6..8, 1W0 8..10, 1B1 10..14");
    assert_eq!(written(&timeline, 0), "0F0 0..2, 0F1 2..4, 0I0 6..7, 0I1 14..15, 0W0 15..18, 0W1 18..21");
    // Idle is 2 x 21 - 24 = 18, the work of these lists. With F 2, B 4, I (1 + 1 + 2) / 3 = 1 and
    // W (3 + 3 + 2) / 3 = 2 rank 1 ends at 2 + 2 + 1 + 2 + 2 + 4 = 13 and rank 0 at 13 + 1 + 2 + 2 = 18:
    // 2 x 18 - (4 + 2 + 4) - (4 + 1 + 2 + 4) = 15 are ramp.
    assert_eq!(timeline.makespan_ns, 21);
    assert_eq!(timeline.idle_ns, Idle { ramp: 15, imbalance: 3, transfer: 0, data_wait: 0 });
    assert!(perfetto(&[("split", &timeline)]).contains(r#""name":"1W0","cat":"weight gradient""#));
}

/// What is wrong with I and W in a list is said.
#[test]
fn split_backwards_are_checked() {
    let refused =
        |zero: &str, one: &str| simulate_lists(&split_step(), &[list(zero), list(one)]).unwrap_err();
    let whole = "0F0 0F1 0B0 0B1";
    assert_eq!(
        violations(refused(whole, "1F0 1I0 1F1 1B1 1I1 1W1")),
        [
            "lists[1]: `1W0` stands 0 times, each action of the rank must stand once",
            "lists[1]: `1B1` stands beside an `I` or `W` of its microbatch",
        ]
    );
    assert_eq!(
        violations(refused(whole, "1F0 1B0 1F1 1I1 1W1 1W1")),
        ["lists[1]: `1W1` stands 2 times, each action of the rank must stand once"]
    );
    assert_eq!(
        refused(whole, "1F0 1W0 1I0 1F1 1B1").to_string(),
        "the action lists never end: rank 1 waits at `1W0` for `1I0` of rank 1, which waits at `1W0`"
    );
    let spans = simulate_lists(&split_step(), &[list(whole), list("1F0 1I0 1F1 1W0 1B1")]).unwrap().spans;
    assert_eq!(
        violations(measured_timeline(&split_step(), &spans).unwrap_err()),
        ["spans: `1I0` is not an action of rank 1", "spans: `1W0` is not an action of rank 1"]
    );
    let ragged = StepInput { weight_ns: vec![vec![3, 3], vec![2]], ..split_step() };
    assert_eq!(
        violations(simulate_step(&ragged).unwrap_err()),
        ["weight_ns[1]: 1 microbatch, the step has 2"]
    );
}

/// An order that a layout cannot run is refused by its name.
#[test]
fn orders_that_a_layout_cannot_run() {
    let refused = |order| violations(simulate_step(&StepInput { order, ..step() }).unwrap_err());
    assert_eq!(
        refused(PipelineOrder::Interleaved),
        ["order: `interleaved-1f1b` needs several stages a rank, the layout has one"]
    );
    assert_eq!(refused(PipelineOrder::ZeroBubble), ["order: `zero-bubble` needs `input_ns` and `weight_ns`"]);
}

/// A rank starts when its data is there, and what that costs is a cause of its own.
#[test]
fn waiting_for_data() {
    let late = StepInput { ready_ns: vec![0, 4, 1], ..step() };
    let timeline = simulate_step(&late).unwrap();
    // Encoder 1 runs F0 from 4 to 9 in place of 0 to 5: all after it is 4 later, on 3 ranks.
    assert_eq!(written(&timeline, 1), "0F0 4..9, 0F1 9..9, 0B0 14..15, 0B1 15..15");
    assert_eq!(timeline.makespan_ns, 21);
    assert_eq!(timeline.idle_ns, Idle { ramp: 9, imbalance: 18, transfer: 0, data_wait: 12 });
    let measured = measured_timeline(&late, &timeline.spans).unwrap();
    assert_eq!(measured.idle_ns, timeline.idle_ns);
    let ragged = StepInput { ready_ns: vec![0, 4], ..step() };
    assert_eq!(violations(simulate_step(&ragged).unwrap_err()), ["ready_ns: 2 ranks, the layout has 3"]);
}

/// A rank that only waits behind a circle is not blamed for it.
#[test]
fn the_circle_is_named_and_not_its_victims() {
    let mut step = step();
    step.layout = layout((1, 2), (2, 1));
    step.forward_ns.push(vec![1, 1]);
    step.backward_ns.push(vec![1, 1]);
    step.tail_ns.push(0);
    let lists = ["0F0 0F1 0B0 0B1", "0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", "2F0 2F1 2B0 2B1"].map(list);
    let error = simulate_lists(&step, &lists).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the action lists never end: rank 2 waits at `1B0` for `2B0` of rank 3, which waits at `2F1`"
    );
}

/// Nor is the rank through which the circle was found: the lowest in it is named.
#[test]
fn the_lowest_rank_of_the_circle_is_named() {
    let mut step = step();
    step.layout = layout((1, 2), (1, 2));
    step.forward_ns.push(vec![1, 1]);
    step.backward_ns.push(vec![1, 1]);
    step.tail_ns.push(0);
    // Rank 3 is fed by both encoders in microbatch 0, by rank 1 alone in microbatch 1; rank 2 by none.
    step.feeds = vec![vec![vec![1]; 2], vec![vec![], vec![1]]];
    let lists = ["0F0 0F1 0B0 0B1", "0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1", "1F0 1F1 1B0 1B1"].map(list);
    assert_eq!(
        simulate_lists(&step, &lists).unwrap_err().to_string(),
        "the action lists never end: rank 1 waits at `0B0` for `1B0` of rank 3, which waits at `1F1`"
    );
}

/// The tails of the input take no part in a measured step, which does not show them.
#[test]
fn a_measured_step_has_no_tails() {
    let timeline = simulate_step(&step()).unwrap();
    // All that starts from 10 ns on starts 5 ns late: 3 x 5 ns of idle time that no duration explains.
    let mut spans = timeline.spans.clone();
    for span in spans.iter_mut().filter(|span| span.start_ns >= 10) {
        (span.start_ns, span.end_ns) = (span.start_ns + 5, span.end_ns + 5);
    }
    let measured = measured_timeline(&StepInput { tail_ns: vec![4, 4, 1], ..step() }, &spans).unwrap();
    assert_eq!(measured.makespan_ns, timeline.makespan_ns + 5);
    assert_eq!(measured.idle_ns, Idle { transfer: 15, ..timeline.idle_ns });
}

/// A measured step is taken only whole.
#[test]
fn measured_steps_are_checked() {
    let whole = simulate_step(&step()).unwrap().spans;
    assert!(measured_timeline(&step(), &whole).is_ok());
    let mut lost = whole.clone();
    lost.remove(6);
    lost.remove(0);
    assert_eq!(
        violations(idle_of(&step(), &lost).unwrap_err()),
        ["spans: 2 of 12 actions were not measured, the first is `0F0` of rank 0"]
    );
    let mut broken = whole.clone();
    broken[1] = Span { start_ns: 9, end_ns: 2, ..broken[1] };
    broken.push(whole[0]);
    broken.push(Span { rank: Rank(3), ..whole[0] });
    broken.push(Span { rank: Rank(2), ..whole[0] });
    assert_eq!(
        violations(durations_of(&broken, &step()).unwrap_err()),
        [
            "spans: `0F1` of rank 0 ends before it starts",
            "spans: `0F0` is not an action of rank 3",
            "spans: `0F0` is not an action of rank 2",
            "spans of rank 0: `0F0` stands 2 times, each action of the rank must stand once",
        ]
    );
    let mut overlapping = whole;
    overlapping[1].start_ns = 2;
    assert_eq!(
        violations(measured_timeline(&step(), &overlapping).unwrap_err()),
        ["spans: `0F1` of rank 0 starts before `0F0` ends"]
    );
}

/// Clocks that disagree can make a measured step shorter than its durations allow: the sum rule holds all the
/// same.
#[test]
fn an_impossible_measurement_still_adds_up() {
    let mut spans = simulate_step(&step()).unwrap().spans;
    for span in spans.iter_mut().filter(|span| span.rank == Rank(2)) {
        (span.start_ns, span.end_ns) = (span.start_ns - 4, span.end_ns - 4);
    }
    for span in &mut spans[2..4] {
        (span.start_ns, span.end_ns) = (span.start_ns - 6, span.end_ns - 6);
    }
    let timeline = measured_timeline(&step(), &spans).unwrap();
    assert_eq!(timeline.makespan_ns, 11);
    assert_eq!(timeline.idle_ns, Idle { ramp: 9, imbalance: 0, transfer: 0, data_wait: 0 });
}

/// An input survives its JSON.
#[test]
fn json_round_trip() {
    let text = serde_json::to_string(&step()).unwrap();
    assert_eq!(serde_json::from_str::<StepInput>(&text).unwrap(), step());
    assert!(serde_json::from_str::<StepInput>(&text.replace("\"feeds\"", "\"feed\"")).is_err());
}

/// 1F1B of three stages, each on a rank, forwards of 1 and backwards of 2. Worked out by hand: the last stage starts 2B1 at 6,
/// and by then the middle one has started three actions, 1F0 at 1, 1F1 at 2 and 1B0 at 5. So the receive of its gradient is
/// open while 1F2 runs, just before 1B1. The first stage starts 0F1 at 1 with 1F0, and has the lower rank.
#[test]
fn receives_open_when_their_sender_starts() {
    let m = 5;
    let step = StepInput {
        layout: layout((1, 1), (2, 1)),
        order: PipelineOrder::OneFOneB,
        num_microbatches: m as u32,
        forward_ns: vec![vec![1; m]; 3],
        backward_ns: vec![vec![2; m]; 3],
        input_ns: Vec::new(),
        weight_ns: Vec::new(),
        feeds: vec![vec![vec![0]]; m],
        transfer_ns: 0,
        tail_ns: vec![0; 3],
        ready_ns: Vec::new(),
    };
    let list = |rank| {
        step.actions(Rank(rank)).unwrap().iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
    };
    let mut simulator = Simulator::new(&step).unwrap();
    assert_eq!(list(1), "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1F4 1B3 1B4");
    let openings = simulator.openings(Rank(1));
    let found: Vec<_> =
        openings.iter().map(|of_action| (of_action[0].giver.0, of_action[0].num_before)).collect();
    let (below, above) = ([0, 0, 1, 5, 7].into_iter(), [2, 3, 5, 7, 9].into_iter());
    let (mut rows, mut gradients) = (below.map(|before| (0, before)), above.map(|before| (2, before)));
    let expected: Vec<_> =
        list(1).split(' ').map(|a| if a.contains('F') { rows.next() } else { gradients.next() }).collect();
    assert_eq!(found.into_iter().map(Some).collect::<Vec<_>>(), expected);
    assert_eq!(simulator.first_openings()[1], [0, 0, 2, 1, 3, 5, 5, 7, 7, 9]);
}
