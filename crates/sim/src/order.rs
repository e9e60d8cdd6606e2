//! Pipeline orders: the action list of each stage, which the simulator times and the runtime runs.

use dflop_types::{Action, ActionKind, PipelineOrder, StageIndex};

/// The actions of `stage` (of `num_stages`) for `num_microbatches`, in the order in which its rank runs them.
///
/// *GPipe*: all forwards, then all backwards, both from microbatch 0. *1F1B*: stage s of p does
/// min(m, p - 1 - s) forwards to warm up, then one forward and one backward in turn, then the backwards that
/// are left; at most p - s microbatches are in flight. Every replica of a stage runs the same list.
///
/// *Complexity*: O(m).
///
/// # Panics
/// If `stage` is not below `num_stages`, or 2 x `num_microbatches` actions exceed memory.
///
/// # Examples
/// ```
/// use dflop_types::{PipelineOrder, StageIndex};
/// let list = dflop_sim::order::actions(PipelineOrder::OneFOneB, StageIndex(1), 3, 4);
/// let list: Vec<_> = list.iter().map(ToString::to_string).collect();
/// assert_eq!(list.join(" "), "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3");
/// ```
///
/// # References
/// GPipe: Huang et al., 2019, arXiv 1811.06965. 1F1B without flushes inside the step ("`PipeDream`-Flush"):
/// Narayanan et al., 2021, arXiv 2006.09503, section 2.
pub fn actions(
    order: PipelineOrder,
    stage: StageIndex,
    num_stages: u32,
    num_microbatches: u32,
) -> Vec<Action> {
    let mut list = Vec::with_capacity(2 * num_microbatches as usize);
    visit(order, stage, num_stages, num_microbatches, |kind, microbatch| {
        list.push(Action { stage, kind, microbatch });
    });
    list
}

/// Calls `see` for each action of the list, in its order; allocates nothing.
pub(crate) fn visit(
    order: PipelineOrder,
    stage: StageIndex,
    num_stages: u32,
    num_microbatches: u32,
    mut see: impl FnMut(ActionKind, u32),
) {
    assert!(stage.0 < num_stages, "stage {stage} is not one of {num_stages}");
    let warm_up = match order {
        PipelineOrder::GPipe => num_microbatches,
        PipelineOrder::OneFOneB => num_microbatches.min(num_stages - 1 - stage.0),
    };
    let steady = num_microbatches - warm_up;
    for microbatch in 0..warm_up {
        see(ActionKind::F, microbatch);
    }
    for microbatch in 0..steady {
        see(ActionKind::F, warm_up + microbatch);
        see(ActionKind::B, microbatch);
    }
    for microbatch in steady..num_microbatches {
        see(ActionKind::B, microbatch);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn text(order: PipelineOrder, stage: u32, num_stages: u32, num_microbatches: u32) -> String {
        let list = actions(order, StageIndex(stage), num_stages, num_microbatches);
        list.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
    }

    /// The lists of small pipelines, worked out by hand.
    #[test]
    fn small_lists() {
        let one_f_one_b = |stage, p, m| text(PipelineOrder::OneFOneB, stage, p, m);
        assert_eq!(one_f_one_b(0, 3, 4), "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3");
        assert_eq!(one_f_one_b(1, 3, 4), "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3");
        assert_eq!(one_f_one_b(2, 3, 4), "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3");
        assert_eq!(one_f_one_b(0, 1, 2), "0F0 0B0 0F1 0B1");
        assert_eq!(one_f_one_b(0, 8, 2), "0F0 0F1 0B0 0B1", "warm-up is capped by the microbatches");
        assert_eq!(one_f_one_b(0, 8, 0), "");
        assert_eq!(text(PipelineOrder::GPipe, 1, 2, 3), "1F0 1F1 1F2 1B0 1B1 1B2");
    }

    proptest! {
        /// Each action stands once, a backward after its forward, and 1F1B holds no more than p - s in
        /// flight.
        #[test]
        fn lists_are_whole_and_bounded(p in 1u32..12, at in 0u32..12, m in 0u32..40, is_gpipe: bool) {
            let stage = at % p;
            let order = if is_gpipe { PipelineOrder::GPipe } else { PipelineOrder::OneFOneB };
            let list = actions(order, StageIndex(stage), p, m);
            prop_assert_eq!(list.len(), 2 * m as usize);
            let (mut forwards, mut backwards) = (0, 0);
            for action in list {
                let next = if action.kind == ActionKind::F { &mut forwards } else { &mut backwards };
                prop_assert_eq!(action.microbatch, *next, "microbatches of a kind come in turn");
                *next += 1;
                prop_assert!(backwards <= forwards);
                let in_flight_max = if is_gpipe { m } else { p - stage };
                prop_assert!(forwards - backwards <= in_flight_max);
            }
        }
    }
}
