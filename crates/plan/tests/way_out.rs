//! What is said where no plan fits: the nearest change with which one does, and both limits where two contradict each other.

use crate::asked::input;
use crate::fixture;
use dflop_plan::{
    Change, Only, Outcome, SearchEffort, SearchInput, explain, search, way_out, why_no_candidate,
};
use dflop_types::{Cluster, ModelProfile, Rejection, SampleShape};

/// The outcome of a search without a plan, its way out, and what is told.
fn told(input: &SearchInput<'_>) -> (Outcome, Option<Change>, String) {
    let outcome = search(input).unwrap();
    assert!(outcome.ranked.is_empty(), "{:?}", outcome.ranked);
    let way = way_out(input, &outcome).unwrap();
    let hint = way.as_ref().map(|way| way.hint(input, &outcome)).or_else(|| outcome.hint());
    (outcome, way.map(|way| way.change), hint.unwrap())
}

/// The fewest bytes that a rank of any of these candidates needs for the largest sample alone.
fn least_bytes(shapes: &[SampleShape], profile: &ModelProfile, num_ranks: u32, only: &str) -> u64 {
    let (only, cluster) = (only.parse().unwrap(), fixture::cluster(num_ranks, Some(1)));
    let outcome = search(&SearchInput { only, cluster, ..input(shapes, profile, num_ranks) }).unwrap();
    let bytes = outcome.rejections.iter().filter_map(|r| match r.rejection {
        Rejection::Memory { needed_bytes, .. } => Some(needed_bytes),
        _ => None,
    });
    bytes.min().unwrap()
}

#[test]
fn parts_of_only_that_leave_too_little_memory_are_named_with_the_budget() {
    let (shapes, profile) = (fixture::shapes(64, 7), fixture::model_profile());
    let budget = least_bytes(&shapes, &profile, 4, "colocated=true,zero=0") - 1;
    let only: Only = "colocated=true,zero=0".parse().unwrap();
    let asked =
        SearchInput { only, cluster: fixture::cluster(4, Some(budget)), ..input(&shapes, &profile, 4) };
    let (_, change, hint) = told(&asked);
    assert_eq!(change, Some(Change::WithoutParts("zero=0".to_owned())));
    let both = format!(
        "`--only colocated=true,zero=0` and the memory budget of {} contradict each other: leave out `zero=0`, and this plan fits, about ",
        dflop_types::memory_size(budget)
    );
    assert!(hint.starts_with(&both) && hint.contains(" ms a step: colocated tp 1 dp 4, zero "), "{hint}");
}

#[test]
fn parts_of_only_that_no_layout_has_are_named_with_the_ranks() {
    let (shapes, profile) = (fixture::shapes(64, 7), fixture::model_profile());
    let only: Only = "encoder.dp=2,llm.pp=3".parse().unwrap();
    let (outcome, change, hint) = told(&SearchInput { only, ..input(&shapes, &profile, 6) });
    assert_eq!(outcome.num_candidates, 0);
    assert!(matches!(change, Some(Change::WithoutParts(_))), "{change:?}");
    assert!(
        hint.starts_with("no layout of 6 ranks has `--only encoder.dp=2,llm.pp=3`: leave out `"),
        "{hint}"
    );
    assert_eq!(explain(&outcome).lines().nth(1), Some("  no layout is a candidate"));
}

/// Pipelines gather no parameters: that is said, and not what else is wrong with some of them. Where no part of what is asked
/// can be left out, the reason stays.
#[test]
fn pipelines_with_zero_3_are_no_candidates_whatever_their_layers() {
    let (shapes, profile) = (fixture::shapes(64, 7), fixture::model_profile());
    // A rank for more stages than the model has layers.
    let num_ranks = profile.num_llm_layers() + 3;
    let only: Only = "colocated=false,zero=3".parse().unwrap();
    let asked = SearchInput { only, ..input(&shapes, &profile, num_ranks) };
    let (outcome, _, hint) = told(&asked);
    assert_eq!((outcome.num_candidates, outcome.rejections.len()), (0, 0));
    let why =
        "`--only colocated=false,zero=3`, and the ranks of a pipeline do not gather parameters (`zero=3`)";
    let no_layout = format!("no layout of {num_ranks} ranks has {why}");
    assert!(hint.starts_with(&format!("{no_layout}: leave out `")), "{hint}");
    assert_eq!(why_no_candidate(&asked, &outcome), Some(no_layout));
}

/// Colocated components have one tensor degree: whoever asks for that of one is told what the other's layers are.
#[test]
fn a_degree_of_colocated_ranks_is_one_of_both_components() {
    let profile = fixture::cuttable();
    let shapes = fixture::shapes(64, 7);
    let mut uncut = profile.clone();
    for variant in &mut uncut.variants {
        variant.modules.remove("encoder_layer");
    }
    let found = |profile, only: &str| {
        let input = SearchInput { only: only.parse().unwrap(), ..input(&shapes, profile, 4) };
        search(&input).map(|outcome| outcome.num_candidates > 0).map_err(|error| error.to_string())
    };
    assert_eq!(found(&profile, "colocated=true,llm.tp=2"), Ok(true));
    let cannot = "model profile: `encoder_layer` cannot be cut over 2 ranks, only over 1";
    assert_eq!(found(&uncut, "colocated=true,llm.tp=2"), Err(cannot.to_owned()));
    assert_eq!(found(&uncut, "llm.tp=2"), Ok(true));
}

/// Eight LLM replicas and four samples a step.
#[test]
fn replicas_without_samples_are_named_with_the_batch() {
    let (shapes, profile) = (fixture::shapes(64, 7), fixture::model_profile());
    let only: Only = "encoder.dp=2,llm.dp=8".parse().unwrap();
    let (_, change, hint) = told(&SearchInput { only, global_batch_size: 4, ..input(&shapes, &profile, 10) });
    assert!(matches!(change, Some(Change::WithoutParts(_))), "{change:?}");
    let both = "`--only encoder.dp=2,llm.dp=8` and `train.global_batch_size` of 4 contradict each other: leave out `";
    assert!(hint.starts_with(both), "{hint}");
}

#[test]
fn more_microbatches_than_samples_are_named_with_the_batch() {
    let (shapes, profile) = (fixture::shapes(64, 7), fixture::model_profile());
    let asked = SearchInput { num_microbatches: Some(64), ..input(&shapes, &profile, 3) };
    let (_, change, hint) = told(&asked);
    assert_eq!(change, None);
    let both =
        "`train.num_microbatches` of 64 and `train.global_batch_size` of 32 contradict each other: with ";
    assert!(hint.starts_with(both), "{hint}");
}

/// One device, and all of a cluster: what a rank needs at least is told in few digits, and how many ranks would do.
#[test]
fn a_model_too_large_for_the_cluster_is_told_how_many_ranks_would_do() {
    let (shapes, profile) = (fixture::shapes(64, 7), fixture::model_profile());
    for num_ranks in [1, 2] {
        let least = least_bytes(&shapes, &profile, num_ranks, "");
        let cluster = Cluster { ranks_per_node: num_ranks, ..fixture::cluster(num_ranks, Some(least - 1)) };
        let only = Only::default();
        let (_, change, hint) = told(&SearchInput { cluster, only, ..input(&shapes, &profile, num_ranks) });
        let Some(Change::Ranks(enough, 2..=8)) = change else { panic!("{change:?} {hint}") };
        assert!(enough > num_ranks && enough <= 8, "{hint}");
        assert!(hint.starts_with(&format!("give the cluster {enough} ranks on nodes of ")), "{hint}");
        // The fewest bytes of all rejections, and not those of the most frequent.
        let least = dflop_types::memory_size(least);
        assert!(
            hint.contains(&format!(
                " ({least}) or more; on those ranks, with {} samples a step, this plan fits, about ",
                input(&shapes, &profile, num_ranks).global_batch_size
            )),
            "{hint} {least}"
        );
    }
    // No number of ranks is enough for a single sample that a rank cannot hold.
    let cluster = fixture::cluster(2, Some(1 << 20));
    let (_, change, hint) = told(&SearchInput { cluster, ..input(&shapes, &profile, 2) });
    assert_eq!(change, None);
    assert!(hint.starts_with("raise `cluster.memory_budget_bytes` to ") && !hint.contains("ranks"), "{hint}");
}

/// More devices than samples: a plan, and a note that says so.
#[test]
fn more_ranks_than_samples_are_told() {
    let (shapes, profile) = (fixture::shapes(64, 7), fixture::model_profile());
    let asked = SearchInput { global_batch_size: 3, ..input(&shapes, &profile, 6) };
    let outcome = search(&asked).unwrap();
    let text = dflop_plan::explain(&outcome);
    let note = "note: a step has 3 samples, fewer than the 6 ranks: a larger `train.global_batch_size` uses them better\n";
    assert!(!outcome.ranked.is_empty() && text.contains(note), "{text}");
    let whole = search(&input(&shapes, &profile, 6)).unwrap();
    assert!(!dflop_plan::explain(&whole).contains("fewer than"));
}

/// Tests that search many times.
mod more {
    use super::*;

    /// Where three ranks are enough it is not said that four are: fewer have no plan, on nodes of as many ranks.
    #[test]
    #[ignore = "`make test-more` runs it"]
    fn no_more_ranks_are_asked_for_than_are_needed() {
        let (shapes, profile) = (fixture::shapes(64, 7), fixture::model_profile());
        let on = |num_ranks: u32, budget| SearchInput {
            cluster: Cluster { ranks_per_node: num_ranks, ..fixture::cluster(num_ranks, Some(budget)) },
            only: Only::default(),
            // As the way out is searched.
            effort: SearchEffort::Quick,
            num_sampled_batches: 2,
            ..input(&shapes, &profile, num_ranks)
        };
        let mut told_ranks = Vec::new();
        for of in [3, 5] {
            let budget = least_bytes(&shapes, &profile, of, "") + (1 << 20);
            let asked = on(1, budget);
            if !search(&asked).unwrap().ranked.is_empty() {
                continue;
            }
            let (_, change, hint) = told(&asked);
            let Some(Change::Ranks(enough, _)) = change else { panic!("{change:?} {hint}") };
            assert!(!search(&on(enough, budget)).unwrap().ranked.is_empty(), "{enough} ranks are enough");
            // Beyond a node, whole nodes alone are named.
            for fewer in 1..enough.min(9) {
                assert!(search(&on(fewer, budget)).unwrap().ranked.is_empty(), "{fewer} of {enough} ranks");
            }
            told_ranks.push(enough);
        }
        assert!(told_ranks.iter().any(|ranks| !ranks.is_power_of_two()), "{told_ranks:?}");
    }
}
