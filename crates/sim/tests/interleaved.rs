//! Layouts whose LLM ranks hold several chunks: closed forms, and the lists themselves.

use crate::common::{layout, lists};
use dflop_sim::{Simulator, StepInput, simulate_step};
use dflop_types::{ActionKind, Layout, PipelineOrder, Rank};
use proptest::prelude::*;

/// A step of equal stages: `f` and `b` on each LLM stage, nothing on the encoder's.
fn equal(layout: Layout, m: usize, f: u64, b: u64) -> StepInput {
    let rows = |ns: u64| {
        let of_encoder = (layout.encoder.pp * layout.encoder.dp) as usize;
        (0..layout.num_rows() as usize).map(|row| vec![if row < of_encoder { 0 } else { ns }; m]).collect()
    };
    StepInput {
        layout,
        order: PipelineOrder::OneFOneB,
        num_microbatches: m as u32,
        forward_ns: rows(f),
        backward_ns: rows(b),
        input_ns: Vec::new(),
        weight_ns: Vec::new(),
        feeds: vec![vec![(0..layout.llm.dp).collect(); layout.encoder.dp as usize]; m],
        transfer_ns: 0,
        tail_ns: vec![0; layout.num_ranks() as usize],
        ready_ns: Vec::new(),
    }
}

proptest! {
    /// t for a microbatch on a rank, in v equal chunks, m a multiple of pp: m t + (pp - 1) t / v, behind an encoder that
    /// takes no time, whatever its stages and the replicas of both.
    #[test]
    fn chunks_divide_the_ramp(
        e in (1u32..4, 1u32..3), pp in 2u32..6, dp in 1u32..3, v in 1u32..5, rounds in 1usize..4,
        f in 0u64..99, b in 0u64..99,
    ) {
        let layout = Layout { llm_interleave: v, ..layout(e, (pp, dp)) };
        let m = pp as usize * rounds;
        let timeline = simulate_step(&equal(layout, m, f, b)).unwrap();
        let t = u64::from(v) * (f + b);
        prop_assert_eq!(timeline.makespan_ns, m as u64 * t + u64::from(pp - 1) * t / u64::from(v));
        prop_assert_eq!(timeline.num_ranks, layout.num_ranks());
    }

    /// No rank waits in a circle, and each microbatch passes every stage of each replica once forward and once back, a
    /// backward after its forward; GPipe's forwards all come first.
    #[test]
    fn every_microbatch_passes_every_chunk_once(
        e in (1u32..4, 1u32..3), pp in 2u32..7, v in 2u32..5, m in 0usize..20, is_gpipe: bool,
    ) {
        let layout = Layout { llm_interleave: v, ..layout(e, (pp, 2)) };
        let order = if is_gpipe { PipelineOrder::GPipe } else { PipelineOrder::OneFOneB };
        let step = StepInput { order, ..equal(layout, m, 1, 1) };
        prop_assert!(Simulator::new(&step).is_ok());
        for (rank, list) in (0..).map(Rank).zip(lists(&step)) {
            let stages: Vec<_> = layout.stages(rank).collect();
            prop_assert_eq!(list.len(), 2 * m * stages.len());
            for stage in stages {
                for j in 0..m as u32 {
                    let of = |kind| list.iter().position(|a| (a.stage, a.kind, a.microbatch) == (stage, kind, j));
                    let (there, back) = (of(ActionKind::F), of(ActionKind::B));
                    prop_assert!(there.is_some() && there < back);
                    prop_assert!(!is_gpipe || there.unwrap() < m * layout.stages(rank).count());
                }
            }
        }
    }
}

/// The lists of two LLM ranks of two chunks behind one encoder rank, by hand: the encoder runs one forward further ahead of
/// each backward than the stage that it feeds.
#[test]
fn the_encoder_keeps_ahead_of_the_chunk_that_it_feeds() {
    let layout = Layout { llm_interleave: 2, ..layout((1, 1), (2, 1)) };
    let text = |rank: usize| {
        let list = &lists(&equal(layout, 4, 1, 1))[rank];
        list.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(text(0), "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3");
    assert_eq!(text(1), "1F0 1F1 3F0 3F1 1F2 3B0 1F3 3B1 3F2 1B0 3F3 1B1 3B2 3B3 1B2 1B3");
    assert_eq!(text(2), "2F0 2F1 4F0 4B0 4F1 4B1 2F2 2B0 2F3 2B1 4F2 4B2 4F3 4B3 2B2 2B3");
}

/// What such a layout cannot run is refused by name.
#[test]
fn orders_that_split_the_backward_are_refused() {
    let layout = Layout { llm_interleave: 2, ..layout((1, 1), (2, 1)) };
    let of = |order| simulate_step(&StepInput { order, ..equal(layout, 2, 1, 1) });
    assert_eq!(
        of(PipelineOrder::ZeroBubble).unwrap_err().to_string(),
        "the step cannot be simulated\n  order: `zero-bubble` needs one stage a rank, the layout has several"
    );
    assert_eq!(of(PipelineOrder::Interleaved), of(PipelineOrder::OneFOneB));
    let none = Layout { llm_interleave: 0, ..layout };
    assert_eq!(
        simulate_step(&StepInput { layout: none, ..equal(layout, 2, 1, 1) }).unwrap_err().to_string(),
        "the step cannot be simulated\n  layout.llm_interleave: 0 chunks, at least 1 is needed"
    );
}
