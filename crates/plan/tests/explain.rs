//! The words of an outcome: snapshots of a plan and of no plan, and the numbers that they name.

use crate::asked::input;
use crate::fixture;
use dflop_plan::{Caveats, Objective, Outcome, SearchInput, StopReason, explain, search};
use dflop_types::{
    Component, ComponentLayout, Layout, MadeFrom, PipelineOrder, PlanPrediction, RankedPlan, Recomputation,
    Refusal, Rejection, RejectionCount, Trained, WayPrediction,
};
use std::collections::BTreeMap;

/// An outcome by hand, so that no search decides what the words look like.
fn outcome(ranked: Vec<RankedPlan>, rejections: Vec<(Rejection, u64)>) -> Outcome {
    let num_rejected: u64 = rejections.iter().map(|r| r.1).sum();
    Outcome {
        num_candidates: num_rejected + ranked.len() as u64 + 3,
        num_judged: ranked.len() as u64 + 3,
        ranked,
        num_microbatches: None,
        fitting_num_microbatches: None,
        rivals: Vec::new(),
        mends: Vec::new(),
        work_bound_ns: 0,
        ways: vec![
            way("blind", true, Ok(1_050_000_000)),
            way("blind-ahead", true, Ok(830_000_000)),
            way("data-parallel", true, Err(131 << 30)),
            way("aware", false, Ok(812_400_000)),
            way("aware-ahead", false, Ok(790_000_000)),
        ],
        rejections: rejections
            .into_iter()
            .map(|(rejection, count)| RejectionCount { rejection, count })
            .collect(),
        objective: Objective::Mean,
        p95_ns: BTreeMap::new(),
        stop: StopReason::Done,
        ranks_per_node: 8,
        num_ranks: 6,
        global_batch_size: 64,
        num_samples: 64,
        seed: 11,
        num_sampled_batches: 8,
        trained: Trained::default(),
        memory_budget_bytes: Some(3 << 30),
        run_memory: None,
        is_budget_given: true,
        caveats: Caveats {
            is_estimated: false,
            needs_kernels: false,
            is_network_measured: false,
            is_reduction_measured: false,
            has_experts: false,
            deals_out_experts: false,
            num_repaired_points: 2,
        },
        made_from: MadeFrom::new(),
    }
}

fn way(name: &str, is_baseline: bool, step: Result<u64, u64>) -> WayPrediction {
    WayPrediction {
        way: name.to_owned(),
        is_baseline,
        num_microbatches: 16,
        step_ns_mean: step.ok(),
        refusal: step.err().map(|needed_bytes| Refusal::Memory { needed_bytes, budget_bytes: 3 << 30 }),
    }
}

fn ranked(dp: u32, step_ns_mean: u64) -> RankedPlan {
    let component = |pp, dp| ComponentLayout { tp: 1, pp, dp };
    RankedPlan {
        layout: Layout::disaggregated(component(1, 6 - dp), component(1, dp)),
        num_microbatches: 16,
        pipeline_order: PipelineOrder::OneFOneB,
        recompute: Recomputation::NONE,
        is_eased: false,
        prediction: PlanPrediction {
            step_ns_mean,
            step_ns_half_width: step_ns_mean / 20,
            bubble_ratio: 0.125,
            encoder_memory_bytes_peak: 700 << 20,
            llm_memory_bytes_peak: 5 << 29,
            extrapolated_ratio: 0.0213,
            num_predictions: 2_000,
            num_extrapolated: 43,
        },
    }
}

#[test]
fn the_explanation_of_a_plan() {
    let outcome = outcome(
        vec![ranked(3, 812_400_000), ranked(4, 903_000_000), ranked(2, 1_204_500_000)],
        vec![
            (Rejection::Bound, 29_462),
            (Rejection::StagesExceedLayers { component: Component::Llm, stages: 5, layers: 4 }, 1),
            (
                Rejection::Memory { component: Component::Llm, needed_bytes: 4 << 30, budget_bytes: 3 << 30 },
                1,
            ),
        ],
    );
    assert_eq!(outcome.hint(), None);
    insta::assert_snapshot!("feasible", explain(&outcome));
    let cut_short = Outcome { stop: StopReason::Halted { num_left: 7, is_cut: false }, ..outcome };
    assert!(explain(&cut_short).contains("         7  not judged: the time limit struck\n"));
}

#[test]
fn the_explanation_of_no_plan() {
    let model_profile = fixture::model_profile();
    let shapes = fixture::shapes(100, 12);
    let limited =
        SearchInput { cluster: fixture::cluster(6, Some(24 << 20)), ..input(&shapes, &model_profile, 6) };
    // The heaviest sample alone overfills a rank of every layout, so that no schedule plays a part.
    let outcome = search(&limited).unwrap();
    assert_eq!(outcome.plan(), None);
    insta::assert_snapshot!(
        "infeasible",
        format!("{}\nhint: {}\n", explain(&outcome), outcome.hint().unwrap())
    );
}

/// A step cannot take more samples than the data has. The answer names those it was judged on, not those asked for.
#[test]
fn the_answer_names_the_samples_that_were_judged() {
    let (shapes, profile) = (fixture::shapes(20, 1), fixture::model_profile());
    let outcome = search(&SearchInput { num_sampled_batches: 1, ..input(&shapes, &profile, 2) }).unwrap();
    assert_eq!((outcome.global_batch_size, outcome.num_samples), (32, 20));
    assert!(explain(&outcome).contains("over 1 sampled global batch of 20 samples"), "{}", explain(&outcome));
}
