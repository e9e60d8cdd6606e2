use super::*;
use crate::rough::Rough;
use dflop_types::{ComponentLayout, Layout, PipelineOrder, Recompute};

/// A pipeline with `pp` stages whose step is estimated to take so many milliseconds.
fn contender(pp: u32, recompute: Recomputation, step_ms: u64, is_over: bool) -> Contender {
    let degrees = |pp| ComponentLayout { tp: 1, pp, dp: 1 };
    let layout = Layout::disaggregated(degrees(1), degrees(pp));
    let rough = Rough { is_over, step_ns: step_ms * 1_000_000, at_mean_ns: 0, is_tight: true };
    Contender {
        candidate: Candidate { layout, num_microbatches: 4, recompute, order: PipelineOrder::OneFOneB },
        rough,
        bounds_ns: vec![0],
    }
}

/// Qwen3-VL 235B on 256 H100: what was estimated to be fastest, 3.8 s without recomputation, took 9.1 s, and 36,000
/// candidates with recomputation were not judged because 3.8 to 4.2 s seemed slower.
#[test]
fn modes_behind_estimates_that_were_far_off_are_judged() {
    let [none, full] = [Recomputation::NONE, Recomputation::both(Recompute::Full)];
    let mut left = vec![
        contender(2, none, 3_780, false),
        contender(3, full, 4_140, false),
        contender(4, full, 4_150, true),
        contender(5, full, 4_160, false),
        contender(6, full, 7_300, false),
    ];
    let best_ns = 9_074_000_000;
    assert!(is_missed(&left[0], none, best_ns) && !is_missed(&left[0], full, best_ns));
    // Not what lacks memory, and not what is hardly faster than what was judged.
    let mut missed = taken(&mut left, OF_MODE, |one| is_missed(one, full, best_ns));
    missed.sort_by_key(|one| one.rough);
    assert_eq!(missed.iter().map(|one| one.candidate.layout.llm.pp).collect::<Vec<_>>(), [3, 5]);
    assert_eq!(left.len(), 3);
    // Where estimates are about right, no mode is looked at again.
    assert!(!is_missed(&contender(3, full, 4_140, false), full, 5_100_000_000));
}
