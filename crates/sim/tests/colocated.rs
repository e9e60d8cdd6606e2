//! Colocated ranks by sums worked out by hand and by a walk that knows no graph: once a step, or in each action.

use dflop_sim::{Simulator, StepInput, durations_of, measured_timeline, simulate_lists, simulate_step};
use dflop_types::{Layout, PipelineOrder, Rank, Zero};
use proptest::prelude::*;

/// Both components of each rank: `forward[row][microbatch]`, twice as long backward; each rank encodes its own samples.
fn step(layout: Layout, forward_ns: &[Vec<u64>], tail_ns: u64) -> StepInput {
    let (ranks, m) = (layout.num_ranks() as usize, forward_ns[0].len());
    let own: Vec<Vec<u32>> = (0..ranks as u32).map(|rank| vec![rank]).collect();
    StepInput {
        layout,
        // Whatever the plan says, there is no pipeline.
        order: PipelineOrder::Interleaved,
        num_microbatches: m as u32,
        forward_ns: forward_ns.to_vec(),
        backward_ns: forward_ns.iter().map(|row| row.iter().map(|ns| 2 * ns).collect()).collect(),
        input_ns: Vec::new(),
        weight_ns: Vec::new(),
        feeds: vec![own; m],
        transfer_ns: 7,
        tail_ns: vec![tail_ns; ranks],
        ready_ns: Vec::new(),
    }
}

/// When a step ends: each rank one action after another, from when all of its group have ended the one before.
fn walked(input: &StepInput, group: usize) -> u64 {
    let ranks = input.layout.num_ranks() as usize;
    let mut end_ns = vec![0; ranks];
    for microbatch in 0..input.num_microbatches as usize {
        let is_exchanged = (0..).zip(&input.feeds[microbatch]).any(|(e, fed)| fed.iter().any(|&r| r != e));
        for (stage, is_forward) in [(0, true), (1, true), (1, false), (0, false)] {
            let rows = if is_forward { &input.forward_ns } else { &input.backward_ns };
            let before = end_ns.clone();
            for (rank, end_ns) in end_ns.iter_mut().enumerate() {
                let first = rank / group * group;
                let met_ns = before[first..(first + group).min(ranks)].iter().max().unwrap();
                let is_over = is_exchanged && group > 1 && (stage == 1) == is_forward;
                let sent_ns = if is_over { input.transfer_ns } else { 0 };
                *end_ns = met_ns + sent_ns + rows[stage * ranks + rank][microbatch];
            }
        }
    }
    end_ns.iter().max().unwrap() + input.tail_ns[0]
}

fn rows(ranks: usize, m: usize) -> impl Strategy<Value = Vec<Vec<u64>>> {
    prop::collection::vec(prop::collection::vec(0_u64..50, m), 2 * ranks)
}

proptest! {
    #[test]
    fn ranks_meet_once_a_step_or_in_each_action(
        (shards, forward_ns) in (1usize..4, 1usize..3, 1usize..5)
            .prop_flat_map(|(shards, groups, m)| (Just(shards), rows(shards * groups, m))),
        tail_ns in 0u64..9, shared in any::<bool>()
    ) {
        let ranks = forward_ns.len() / 2;
        for zero in Zero::ALL {
            let whole = Layout::colocated(ranks as u32, zero);
            let shard_ranks = (zero > Zero::Nothing).then_some(shards as u32);
            let mut input = step(Layout { shard_ranks, ..whole }, &forward_ns, tail_ns);
            let group = if zero == Zero::Parameters && shards > 1 { ranks } else { 1 };
            if shared {
                // Rank 0 encodes for the last one, too.
                input.feeds[0][0] = if ranks > 1 { vec![0, ranks as u32 - 1] } else { vec![0] };
            }
            let timeline = simulate_step(&input).unwrap();
            prop_assert_eq!(timeline.makespan_ns, walked(&input, group));
            prop_assert_eq!(Simulator::new(&input).unwrap().makespan_ns(), timeline.makespan_ns);
            // Idle and busy time of all ranks; an even step idles nowhere, so nothing is ramp.
            let busy: u64 = timeline.spans.iter().map(dflop_types::Span::duration_ns).sum::<u64>() + tail_ns * ranks as u64;
            prop_assert_eq!(timeline.idle_ns.total_ns() + busy, timeline.makespan_ns * ranks as u64);
            prop_assert_eq!(timeline.idle_ns.ramp, 0);
            if !shared || group == 1 {
                prop_assert_eq!(timeline.idle_ns.transfer, 0);
            }
            for rank in 0..ranks {
                let actions: Vec<String> =
                    timeline.spans.iter().filter(|s| s.rank == Rank(rank as u32)).map(|s| s.action.to_string()).collect();
                prop_assert_eq!(&actions[..4], &["0F0", "1F0", "1B0", "0B0"]);
                prop_assert_eq!(actions.len(), 4 * forward_ns[0].len());
            }
            // The lists written out, and the step measured, are the same step.
            let lists: Vec<_> = (0..ranks as u32).map(|rank| input.actions(Rank(rank)).unwrap()).collect();
            prop_assert_eq!(&simulate_lists(&input, &lists).unwrap(), &timeline);
            prop_assert_eq!(&durations_of(&timeline.spans, &input).unwrap(), &input);
            let measured = measured_timeline(&input, &timeline.spans).unwrap();
            let last_ns = timeline.spans.iter().map(|s| s.end_ns).max().unwrap();
            let first_ns = timeline.spans.iter().map(|s| s.start_ns).min().unwrap();
            prop_assert_eq!(measured.makespan_ns, last_ns - first_ns);
        }
    }
}

/// By hand: 2 ranks, 2 microbatches; encoder 1 and 5, 3 and 0; LLM 4 and 2, 1 and 1.
#[test]
fn a_step_by_hand() {
    let forward = [vec![1, 3], vec![5, 0], vec![4, 1], vec![2, 1]];
    // A rank's sum: 3 x 9 and 3 x 8.
    let once = simulate_step(&step(Layout::colocated(2, Zero::States), &forward, 10)).unwrap();
    assert_eq!(once.makespan_ns, 27 + 10);
    assert_eq!((once.idle_ns.imbalance, once.idle_ns.total_ns()), (3, 3));
    // The longest of each action: 3 x (5 + 4 + 3 + 1).
    let layers = simulate_step(&step(Layout::colocated(2, Zero::Parameters), &forward, 10)).unwrap();
    assert_eq!(layers.makespan_ns, 39 + 10);
    assert_eq!((layers.idle_ns.imbalance, layers.idle_ns.total_ns()), (12 + 15, 12 + 15));
}

#[test]
fn lists_that_colocated_ranks_cannot_run_are_refused() {
    let forward = vec![vec![1, 1]; 4];
    let input = step(Layout::colocated(2, Zero::Nothing), &forward, 0);
    let list = |text: &str| text.split(' ').map(|action| action.parse().unwrap()).collect::<Vec<_>>();
    let usual = list("0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1");
    // Both encoded first: as good where ranks meet once a step.
    let ahead = list("0F0 0F1 1F0 1B0 0B0 1F1 1B1 0B1");
    assert_eq!(simulate_lists(&input, &[usual.clone(), ahead.clone()]).unwrap().makespan_ns, 12);
    let met = step(Layout::colocated(2, Zero::Parameters), &forward, 0);
    assert_eq!(
        simulate_lists(&met, &[usual.clone(), ahead]).unwrap_err().to_string(),
        "the action lists cannot be simulated\n  lists[1]: not lists[0], ranks that gather layers together run the same \
         actions in the same order"
    );
    // The LLM before its encoder waits for itself.
    let wrong = list("1F0 0F0 1B0 0B0 0F1 1F1 1B1 0B1");
    assert!(simulate_lists(&input, &[usual.clone(), wrong]).is_err());
    let half = list("0F0 1F0 1B0 0B0");
    let error = simulate_lists(&input, &[usual, half]).unwrap_err().to_string();
    assert!(error.contains("lists[1]: `1F1` stands 0 times"), "{error}");
    let mut uneven = step(Layout::colocated(2, Zero::Nothing), &forward, 0);
    uneven.layout.llm.pp = 2;
    let error = simulate_step(&uneven).unwrap_err().to_string();
    assert!(error.contains("colocated components have equal degrees and one stage each"), "{error}");
}
