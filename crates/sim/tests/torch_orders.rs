//! Our lists are the lists that PyTorch's own schedules run; `torch_orders.py` recorded them.

#![allow(clippy::unwrap_used, reason = "tests may give up, their helpers too")]

use dflop_sim::order;
use dflop_types::{Action, PipelineOrder};

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
        let order = match name {
            "gpipe" => PipelineOrder::GPipe,
            "1f1b" => PipelineOrder::OneFOneB,
            _ => panic!("{line}"),
        };
        let expected: Vec<Action> = list.split(' ').map(|action| action.parse().unwrap()).collect();
        let (p, m) = (num_stages.parse().unwrap(), num_microbatches.parse().unwrap());
        assert_eq!(order::actions(order, expected[0].stage, p, m), expected, "{size}");
        num_lists += 1;
    }
    assert_eq!(
        num_lists,
        (1 + 1 + 2 + 2 + 3 + 4 + 4 + 4 + 8 + 8) + (1 + 1 + 2 + 3 + 4 + 4 + 8),
        "the file is whole"
    );
}
