//! One pipeline: closed forms, and small steps worked out by hand.

use dflop_sim::{Durations, SimError, simulate, simulate_interleaved};
use dflop_types::{Hint, Idle, PipelineOrder, Timeline};
use proptest::prelude::*;

const ORDERS: [PipelineOrder; 2] = [PipelineOrder::GPipe, PipelineOrder::OneFOneB];

fn equal(p: usize, m: usize, forward_ns: u64, backward_ns: u64, transfer_ns: u64) -> Durations {
    Durations {
        forward_ns: vec![vec![forward_ns; m]; p],
        backward_ns: vec![vec![backward_ns; m]; p],
        transfer_ns,
        ..Durations::default()
    }
}

/// `0F0 0..2, ...` of one rank.
fn written(timeline: &Timeline, rank: u32) -> String {
    let spans = timeline.spans.iter().filter(|span| span.rank.0 == rank);
    let spans: Vec<_> = spans.map(|s| format!("{} {}..{}", s.action, s.start_ns, s.end_ns)).collect();
    spans.join(", ")
}

proptest! {
    /// Equal stages: makespan (m + p - 1)(f + b), idle p(p - 1)(f + b), all of it ramp.
    #[test]
    fn equal_stages(p in 1usize..9, m in 1usize..33, f in 0u64..1_000, b in 0u64..1_000) {
        for order in ORDERS {
            let timeline = simulate(&equal(p, m, f, b, 0), order).unwrap();
            prop_assert_eq!(timeline.makespan_ns, (m + p - 1) as u64 * (f + b));
            let ramp = (p * (p - 1)) as u64 * (f + b);
            prop_assert_eq!(timeline.idle_ns, Idle { ramp, imbalance: 0, transfer: 0, data_wait: 0 });
        }
    }

    /// One stage: the sum of all times, never idle, whatever a transfer would cost.
    #[test]
    fn one_stage(times in prop::collection::vec((0u64..1_000, 0u64..1_000), 1..20), transfer_ns in 0u64..99) {
        let (forward, backward): (Vec<u64>, Vec<u64>) = times.into_iter().unzip();
        let sum = forward.iter().chain(&backward).sum::<u64>();
        let durations = Durations { forward_ns: vec![forward], backward_ns: vec![backward], transfer_ns, ..Durations::default() };
        for order in ORDERS {
            let timeline = simulate(&durations, order).unwrap();
            prop_assert_eq!(timeline.makespan_ns, sum);
            prop_assert_eq!(timeline.idle_ns, Idle::default());
        }
    }

    /// One microbatch: the sum over stages, and a transfer at each of 2(p - 1) hand-overs.
    #[test]
    fn one_microbatch(times in prop::collection::vec((1u64..1_000, 0u64..1_000), 1..9), transfer_ns in 0u64..9) {
        let sum = times.iter().map(|(f, b)| f + b).sum::<u64>();
        let hand_overs = 2 * (times.len() as u64 - 1);
        let (forward, backward): (Vec<u64>, Vec<u64>) = times.into_iter().unzip();
        let column = |times: Vec<u64>| times.into_iter().map(|ns| vec![ns]).collect();
        let durations = Durations { forward_ns: column(forward), backward_ns: column(backward), transfer_ns, ..Durations::default() };
        for order in ORDERS {
            let timeline = simulate(&durations, order).unwrap();
            prop_assert_eq!(timeline.makespan_ns, sum + hand_overs * transfer_ns);
        }
    }

    /// Equal stages under GPipe with transfers: each of the 2(p - 1) hand-overs is on the only longest path
    /// once.
    #[test]
    fn equal_stages_with_transfers(p in 1usize..9, m in 1usize..20, f in 1u64..9, b in 1u64..9, x in 0u64..5) {
        let timeline = simulate(&equal(p, m, f, b, x), PipelineOrder::GPipe).unwrap();
        prop_assert_eq!(timeline.makespan_ns, (m + p - 1) as u64 * (f + b) + 2 * (p as u64 - 1) * x);
        let transfer = (p * 2 * (p - 1)) as u64 * x;
        prop_assert_eq!(timeline.idle_ns.transfer, transfer);
        prop_assert_eq!(timeline.idle_ns.imbalance, 0);
    }
}

proptest! {
    /// Zero-bubble with F, I and W of one length: only the fill is left, (3m + p - 1) t, once m >= p.
    #[test]
    fn zero_bubble_fills_the_drain(p in 1usize..9, more in 0usize..25, t in 0u64..1_000) {
        let m = p + more;
        let durations = Durations {
            input_ns: vec![vec![t; m]; p],
            weight_ns: vec![vec![t; m]; p],
            ..equal(p, m, t, 2 * t, 0)
        };
        let makespan_ns = |order| simulate(&durations, order).unwrap().makespan_ns;
        prop_assert_eq!(makespan_ns(PipelineOrder::ZeroBubble), (3 * m + p - 1) as u64 * t);
    }

    /// v stages a rank, equal: the idle time of a rank is (p - 1)(f + b), where 1F1B over the same ranks has v times
    /// that, once the microbatches fill whole rounds.
    #[test]
    fn interleaving_divides_the_ramp(p in 1usize..7, v in 1usize..5, rounds in 1usize..5, f in 0u64..99, b in 0u64..99) {
        let m = p * rounds;
        let timeline = simulate_interleaved(&equal(p * v, m, f, b, 0), p as u32).unwrap();
        prop_assert_eq!(timeline.makespan_ns, (m * v + p - 1) as u64 * (f + b));
        prop_assert_eq!((timeline.num_ranks, timeline.spans.len()), (p as u32, 2 * p * v * m));
        let ramp = (p * (p - 1)) as u64 * (f + b);
        prop_assert_eq!(timeline.idle_ns, Idle { ramp, ..Idle::default() });
    }

    /// No rounds, of whatever sizes, deadlock; times and transfers are any.
    #[test]
    fn interleaved_stages_never_deadlock(
        p in 1usize..7, v in 1usize..5, m in 0usize..25, times in prop::collection::vec(0u64..50, 99), transfer_ns in 0u64..9,
    ) {
        let time = |salt: usize| -> Vec<Vec<u64>> {
            (0..p * v).map(|s| (0..m).map(|j| times[(31 * s + 7 * j + salt) % 99]).collect()).collect()
        };
        let durations =
            Durations { forward_ns: time(0), backward_ns: time(50), transfer_ns, ..Durations::default() };
        let timeline = simulate_interleaved(&durations, p as u32).unwrap();
        let loads = timeline.spans.iter().fold(vec![0; p], |mut loads, s| {
            loads[s.rank.index()] += s.duration_ns();
            loads
        });
        prop_assert!(timeline.makespan_ns >= loads.into_iter().max().unwrap());
        prop_assert_eq!(timeline.idle_ns.total_ns() + timeline.busy_ns(), p as u64 * timeline.makespan_ns);
        for span in &timeline.spans {
            prop_assert_eq!(span.action.stage.index() % p, span.rank.index());
        }
    }
}

/// An uneven stage by hand, without and with transfers.
#[test]
fn an_uneven_stage() {
    let mut durations = Durations {
        forward_ns: vec![vec![2, 2], vec![2, 6]],
        backward_ns: vec![vec![2, 2], vec![2, 2]],
        transfer_ns: 0,
        ..Durations::default()
    };
    let timeline = simulate(&durations, PipelineOrder::OneFOneB).unwrap();
    assert_eq!(written(&timeline, 0), "0F0 0..2, 0F1 2..4, 0B0 6..8, 0B1 14..16");
    assert_eq!(written(&timeline, 1), "1F0 2..4, 1B0 4..6, 1F1 6..12, 1B1 12..14");
    // Idle is 2 x 16 - 20 = 12; with mean F 3 and mean B 2 it is 2 x 1 x 5 = 10.
    assert_eq!((timeline.makespan_ns, timeline.num_ranks), (16, 2));
    assert_eq!(timeline.idle_ns, Idle { ramp: 10, imbalance: 2, transfer: 0, data_wait: 0 });
    durations.transfer_ns = 1;
    let timeline = simulate(&durations, PipelineOrder::OneFOneB).unwrap();
    assert_eq!(written(&timeline, 0), "0F0 0..2, 0F1 2..4, 0B0 8..10, 0B1 16..18");
    assert_eq!(written(&timeline, 1), "1F0 3..5, 1B0 5..7, 1F1 7..13, 1B1 13..15");
    assert_eq!(timeline.idle_ns, Idle { ramp: 10, imbalance: 2, transfer: 4, data_wait: 0 });
}

/// Uneven work that fills faster than even work would: ramp is no more than the idle time there is.
#[test]
fn ramp_is_capped() {
    let durations = Durations {
        forward_ns: vec![vec![1, 3], vec![1, 1]],
        backward_ns: vec![vec![2, 2], vec![2, 2]],
        transfer_ns: 0,
        ..Durations::default()
    };
    let timeline = simulate(&durations, PipelineOrder::OneFOneB).unwrap();
    assert_eq!(written(&timeline, 0), "0F0 0..1, 0F1 1..4, 0B0 4..6, 0B1 7..9");
    assert_eq!(written(&timeline, 1), "1F0 1..2, 1B0 2..4, 1F1 4..5, 1B1 5..7");
    // Idle is 2 x 9 - 14 = 4; with mean F 1 (1.5 rounded down) and B 2 it would be 2 x 1 x 3 = 6.
    assert_eq!(timeline.idle_ns, Idle { ramp: 4, imbalance: 0, transfer: 0, data_wait: 0 });
}

/// 0 microbatches are an empty timeline.
#[test]
fn an_empty_step() {
    for order in ORDERS {
        let timeline = simulate(&equal(3, 0, 1, 1, 5), order).unwrap();
        assert_eq!(timeline, Timeline { num_ranks: 3, ..Timeline::default() });
    }
}

/// What cannot be simulated is refused with the reason.
#[test]
fn refusals() {
    let message = |durations: &Durations| simulate(durations, PipelineOrder::GPipe).unwrap_err().to_string();
    assert_eq!(
        message(&Durations::default()),
        "the durations cannot be simulated\n  forward_ns: 0 stages, at least 1 is needed"
    );
    let mut ragged = equal(2, 4, 1, 1, 0);
    ragged.forward_ns[1].pop();
    assert_eq!(
        message(&ragged),
        "the durations cannot be simulated\n  forward_ns[1]: 3 microbatches, stage 0 has 4"
    );
    let equal_stages = equal(4, 10, 1, 1, 0);
    let refused = |order| simulate(&equal_stages, order).unwrap_err().to_string();
    assert_eq!(
        refused(PipelineOrder::Interleaved),
        "the durations cannot be simulated\n  \
         ranks: `interleaved-1f1b` needs several stages a rank, so fewer ranks than stages"
    );
    assert_eq!(
        refused(PipelineOrder::ZeroBubble),
        "the durations cannot be simulated\n  order: `zero-bubble` needs `input_ns` and `weight_ns`"
    );
    let dealt = |ranks| simulate_interleaved(&equal_stages, ranks).unwrap_err().to_string();
    assert_eq!(
        dealt(3),
        "the interleaved stages cannot be simulated\n  stages: 4, expected a multiple of 3 (ranks)"
    );
    assert_eq!(
        dealt(0),
        "the interleaved stages cannot be simulated\n  ranks: 0 ranks, at least 1 is needed"
    );
    assert!(simulate_interleaved(&equal_stages, 2).is_ok());
    let half = Durations { input_ns: vec![vec![1; 10]; 4], ..equal_stages.clone() };
    assert_eq!(message(&half), "the durations cannot be simulated\n  weight_ns: 0 stages, forward_ns has 4");
    let overflow = "the times of 2 ranks add up to more than 18446744073709551615 ns";
    assert_eq!(message(&equal(2, 2, u64::MAX / 2, 1, 0)), overflow);
    assert_eq!(message(&equal(2, 2, 1, 1, u64::MAX / 2)), overflow);
    // Each sum fits, but not makespan x ranks.
    let long = Durations {
        forward_ns: vec![vec![u64::MAX / 4 * 3], vec![0]],
        backward_ns: vec![vec![0], vec![0]],
        transfer_ns: 0,
        ..Durations::default()
    };
    assert_eq!(message(&long), overflow);
    assert_eq!(SimError::Overflow { num_ranks: 2 }.hint().unwrap(), "give times in nanoseconds");
}

/// Times just below the limit are exact.
#[test]
fn the_largest_times() {
    let durations = equal(1, 1, u64::MAX - 7, 7, 0);
    assert_eq!(simulate(&durations, PipelineOrder::OneFOneB).unwrap().makespan_ns, u64::MAX);
}
