//! Our lists are the lists that PyTorch's own schedules run; `torch_orders.py` recorded them.

use dflop_sim::order;
use dflop_types::{Action, PipelineOrder, Rank};

/// Each recorded list, action for action.
#[test]
fn the_lists_are_pytorchs() {
    let recorded = include_str!("torch_orders.txt").lines().filter(|line| !line.starts_with('#'));
    let mut num_lists = 0;
    for line in recorded {
        let (size, list) = line.split_once(": ").unwrap();
        let [name, num_stages, num_microbatches] = size.split(' ').collect::<Vec<_>>()[..] else {
            panic!("{line}");
        };
        let expected: Vec<Action> = list.split(' ').map(|action| action.parse().unwrap()).collect();
        let m = num_microbatches.parse().unwrap();
        num_lists += 1;
        let order = match name {
            "gpipe" => PipelineOrder::GPipe,
            "1f1b" => PipelineOrder::OneFOneB,
            "zero-bubble" => PipelineOrder::ZeroBubble,
            "interleaved-1f1b" => {
                let (ranks, local) = num_stages.split_once('x').unwrap();
                let (ranks, local): (u32, u32) = (ranks.parse().unwrap(), local.parse().unwrap());
                let rank = Rank(expected[0].stage.0 % ranks);
                assert_eq!(order::interleaved(rank, ranks, ranks * local, m).unwrap(), expected, "{size}");
                continue;
            }
            _ => panic!("{line}"),
        };
        let p = num_stages.parse().unwrap();
        assert_eq!(order::actions(order, expected[0].stage, p, m), expected, "{size}");
    }
    assert_eq!(
        num_lists,
        (1 + 1 + 2 + 2 + 3 + 4 + 4 + 4 + 8 + 8)
            + (1 + 1 + 2 + 3 + 4 + 4 + 8)
            + (1 + 1 + 2 + 3 + 4 + 4 + 4 + 8 + 8)
            + (1 + 2 + 2 + 3 + 3 + 4 + 4 + 4 + 8),
        "the file is whole"
    );
}
