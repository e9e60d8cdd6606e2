//! Orders of actions: the plan has the best of those that nobody ruled out.

use crate::asked::input;
use crate::fixture;
use dflop_plan::{SearchEffort, SearchInput, explain, search};
use dflop_types::PipelineOrder;

/// Where no order is asked for, the best pipelines are judged under others too. What is said of one is what a search says that is
/// asked for this order alone.
#[test]
fn the_plan_chooses_the_order() {
    let model_profile = fixture::model_profile();
    let mut chosen = Vec::new();
    for (num_ranks, seed) in [(4, 5), (6, 31), (8, 17)] {
        let shapes = fixture::shapes(96, seed);
        let of = |order| {
            let asked = input(&shapes, &model_profile, num_ranks);
            search(&SearchInput { order, effort: SearchEffort::Quick, ..asked }).unwrap()
        };
        let first = of(Some(PipelineOrder::OneFOneB)).ranked[0];
        let outcome = of(None);
        let best = outcome.ranked[0];
        assert!(best.prediction.step_ns_mean <= first.prediction.step_ns_mean);
        // Every candidate is a plan, was judged and slower, or has a cause; and no layout is listed twice.
        let fallen: u64 = outcome.rejections.iter().map(|r| r.count).sum();
        assert_eq!(fallen + outcome.num_judged, outcome.num_candidates);
        let layouts: Vec<_> =
            outcome.ranked.iter().map(|p| (p.layout, p.num_microbatches, p.recompute)).collect();
        assert!(layouts.iter().enumerate().all(|(at, one)| !layouts[..at].contains(one)));
        let same = of(Some(best.pipeline_order)).ranked;
        let same = same
            .iter()
            .find(|plan| (plan.layout, plan.num_microbatches) == (best.layout, best.num_microbatches));
        assert_eq!(same.map(|plan| plan.prediction.step_ns_mean), Some(best.prediction.step_ns_mean));
        if best.pipeline_order != PipelineOrder::OneFOneB {
            assert!(best.prediction.step_ns_mean < first.prediction.step_ns_mean);
            assert!(explain(&outcome).contains(&best.pipeline_order.to_string()));
        }
        chosen.push(best.pipeline_order);
    }
    assert!(chosen.iter().any(|order| *order != PipelineOrder::OneFOneB), "{chosen:?}");
}
