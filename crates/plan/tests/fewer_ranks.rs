//! Fewer ranks are named where they do nearly the same.

use crate::asked::input;
use crate::fixture;
use dflop_plan::{Objective, SearchEffort, SearchInput, fewer_ranks, search};
use dflop_types::{Cluster, LinkProfile, LinkSpan, SampleShape};

/// Four samples a step, one of them a text much longer than the others: eight ranks wait for it as two do.
#[test]
fn the_fewest_whole_nodes_that_are_nearly_as_fast_are_named() {
    // Without links, more ranks cost nothing, so that the plan itself leaves none free.
    let mut profile = fixture::model_profile();
    profile.network.links.clear();
    let long = fixture::sample(0, 0, 4_000);
    let shapes: Vec<SampleShape> = std::iter::once(long).chain(fixture::shapes(3, 1)).collect();
    let cluster = |num_ranks| Cluster { ranks_per_node: 2, ..fixture::cluster(num_ranks, None) };
    let asked = |num_ranks| SearchInput {
        cluster: cluster(num_ranks),
        global_batch_size: 4,
        num_sampled_batches: 1,
        only: "colocated=true".parse().unwrap(),
        ..input(&shapes, &profile, num_ranks)
    };
    let step_ns = |num_ranks| search(&asked(num_ranks)).unwrap().ranked[0].prediction.step_ns_mean;
    let all = asked(8);
    let outcome = search(&all).unwrap();
    let found = fewer_ranks(&all, &outcome).unwrap().expect("one sample decides the step");
    let is_enough = |num_ranks| step_ns(num_ranks) * 95 <= step_ns(8) * 100;
    let expected = [2, 4, 6].into_iter().find(|&num_ranks| is_enough(num_ranks)).unwrap();
    assert_eq!((found.num_ranks, found.of_ranks), (expected, 8));
    assert_eq!(found.plan.prediction.step_ns_mean, step_ns(expected));
    assert!(found.speed_ratio >= 0.95, "{found:?}");
    assert!(found.words().starts_with(&format!("fewer ranks: {expected} of 8 give ")), "{}", found.words());

    // In one node there are no fewer nodes.
    let node = SearchInput { cluster: Cluster { ranks_per_node: 8, ..cluster(8) }, ..all };
    assert_eq!(fewer_ranks(&node, &search(&node).unwrap()).unwrap(), None);
}

/// Five ranks on nodes of four, slow links between the nodes: the plan is that of four ranks, and says so in words and in its file.
#[test]
fn a_plan_may_leave_ranks_free_and_says_so() {
    let mut profile = fixture::model_profile();
    let near = profile.network.links.clone();
    let far = near.iter().map(|link| LinkProfile {
        span: LinkSpan::Cluster,
        bandwidth_bytes_per_s: link.bandwidth_bytes_per_s / 100,
        points: Vec::new(),
        ..link.clone()
    });
    profile.network.links = near.iter().cloned().chain(far).collect();
    let shapes = fixture::shapes(96, 9);
    for effort in [SearchEffort::Quick, SearchEffort::Whole] {
        let of = |num_ranks, ranks_per_node| {
            let cluster = Cluster { ranks_per_node, ..fixture::cluster(num_ranks, None) };
            let only = "colocated=true".parse().unwrap();
            search(&SearchInput { cluster, only, effort, ..input(&shapes, &profile, num_ranks) }).unwrap()
        };
        let (four, five) = (of(4, 4), of(5, 4));
        assert_eq!((five.ranked[0].layout, five.num_free_ranks()), (four.ranked[0].layout, 1), "{effort:?}");
        assert_eq!(five.ranked[0].prediction.step_ns_mean, four.ranked[0].prediction.step_ns_mean);
        let plan = five.plan().unwrap();
        assert_eq!(plan.searched.unwrap().num_free_ranks, 1);
        let says =
            "\n  ranks   4 of 5: the last is left free, as no plan of all ranks that was judged is faster; ";
        for text in [dflop_plan::explain(&five), dflop_plan::describe(&plan)] {
            assert!(text.contains(says), "{text}");
        }
        // Where all are used nothing is said, and the file has no such field.
        assert!(!dflop_plan::explain(&four).contains("ranks   "));
        assert_eq!(four.plan().unwrap().searched.unwrap().num_free_ranks, 0);
    }
}

/// Many samples that are alike keep all ranks busy.
#[test]
fn ranks_that_are_all_needed_are_all_kept() {
    let profile = fixture::model_profile();
    let shapes = vec![fixture::shapes(1, 3)[0].clone(); 128];
    let only = "colocated=true".parse().unwrap();
    let cluster = Cluster { ranks_per_node: 1, ..fixture::cluster(4, None) };
    let all = SearchInput { global_batch_size: 64, cluster, only, ..input(&shapes, &profile, 4) };
    assert_eq!(fewer_ranks(&all, &search(&all).unwrap()).unwrap(), None);
}

/// Under the 95th percentile the plan's slowest batch is shorter than that of every other plan.
#[test]
fn the_percentile_ranks_plans_by_their_slow_batches() {
    let profile = fixture::model_profile();
    let shapes = fixture::shapes(200, 9);
    let of = |objective| search(&SearchInput { objective, ..input(&shapes, &profile, 4) }).unwrap();
    let slow = of(Objective::P95);
    let p95: Vec<u64> = slow.ranked.iter().map(|plan| slow.step_ns_p95(plan).unwrap()).collect();
    assert!(p95.is_sorted(), "{p95:?}");
    let mean = of(Objective::Mean);
    let means: Vec<u64> = mean.ranked.iter().map(|plan| plan.prediction.step_ns_mean).collect();
    assert!(means.is_sorted(), "{means:?}");
    // Both searches judge all candidates that may be best, so the percentile's best is nowhere above the mean's best.
    assert!(p95[0] <= mean.step_ns_p95(&mean.ranked[0]).unwrap());
    assert!(means[0] <= slow.ranked[0].prediction.step_ns_mean);
    assert!(dflop_plan::explain(&slow).contains("which plans are ranked by: the slowest of these batches"));
    assert!(!dflop_plan::explain(&mean).contains("p95"));
}
