//! The search where the model profile has times of recomputation: each component may recompute by itself.

use crate::{asked, fixture, mixes};
use dflop_analytic::{EstimateSettings, Hardware, catalogue_model, estimate};
use dflop_plan::{Outcome, SearchEffort, SearchInput, search};
use dflop_step::batches::GlobalBatches;
use dflop_types::{MadeFrom, ModelProfile, RankedPlan, Recomputation, Recompute};

fn searched(
    model_profile: &ModelProfile,
    (num_ranks, seed, budget): (u32, u64, Option<u64>),
    only: &str,
    effort: SearchEffort,
) -> Outcome {
    let shapes = fixture::shapes(64, seed);
    let cluster = fixture::cluster(num_ranks, budget);
    let input = asked::input(&shapes, model_profile, num_ranks);
    let only = only.parse().unwrap();
    let compares = only == "colocated=true".parse().unwrap();
    search(&SearchInput { effort, cluster, only, compares, num_sampled_batches: 2, ..input }).unwrap()
}

fn best(outcome: &Outcome) -> Option<RankedPlan> {
    outcome.ranked.first().copied()
}

/// Tests that take as long as all others here.
mod more {
    use super::*;

    /// With less memory than the best plan would take, the quick search loses at most 1 % of judging every pair of modes. No
    /// mode of both components is faster, and among pipelines unequal modes are the fastest somewhere.
    #[test]
    #[ignore = "`make test-more` runs it"]
    fn each_component_recomputes_what_its_memory_asks_for() {
        let profile = fixture::recomputing();
        let mut has_unequal = false;
        // Five ranks in pipelines have many more layouts, each with all pairs of modes: ten seconds.
        for (num_ranks, seed, placements) in [
            (2, 21, &["colocated=true", "colocated=false"][..]),
            (4, 24, &["colocated=true", "colocated=false"]),
            (5, 23, &["colocated=true"]),
        ] {
            for &only in placements {
                let free = searched(&profile, (num_ranks, seed, None), only, SearchEffort::Quick);
                let prediction = best(&free).unwrap().prediction;
                let peak = prediction.encoder_memory_bytes_peak.max(prediction.llm_memory_bytes_peak);
                for percent in [90, 75, 60].into_iter().filter(|percent| num_ranks == 2 || *percent != 75) {
                    let asked = (num_ranks, seed, Some(peak * percent / 100));
                    let quick = searched(&profile, asked, only, SearchEffort::Quick);
                    let fallen: u64 = quick.rejections.iter().map(|r| r.count).sum();
                    assert_eq!(fallen + quick.num_judged, quick.num_candidates);
                    let whole = searched(&profile, asked, only, SearchEffort::Whole);
                    let Some(own) = best(&quick) else {
                        assert!(best(&whole).is_none(), "{asked:?} {only}: {whole:?}");
                        continue;
                    };
                    let least = best(&whole).unwrap();
                    let ns = |plan: &RankedPlan| plan.prediction.step_ns_mean;
                    assert!(
                        ns(&own) <= ns(&least) + ns(&least) / 100,
                        "{asked:?}: {} {}",
                        own.in_words(),
                        least.in_words()
                    );
                    has_unequal |= own.recompute.of_both().is_none();
                    // The whole search has judged these too: once is enough to see that they are what was asked for.
                    for mode in Recompute::ALL.into_iter().filter(|_| percent == 75 && num_ranks == 2) {
                        let both = format!("{only},recompute={mode}");
                        let equal = searched(&profile, asked, &both, SearchEffort::Whole);
                        assert!(best(&equal).is_none_or(|plan| ns(&plan) >= ns(&least)), "{asked:?} {both}");
                        assert!(equal.ranked.iter().all(|plan| plan.recompute == Recomputation::both(mode)));
                    }
                }
            }
        }
        assert!(has_unequal);
    }
}

/// The modes that are asked for are the only ones; the words and the rivals say which component has which.
#[test]
fn modes_of_one_component_may_be_asked_for() {
    let profile = fixture::recomputing();
    for only in ["colocated=true", "colocated=false"] {
        let of = |modes: &str| {
            let only = format!("{only},{modes}");
            searched(&profile, (4, 24, Some(1 << 40)), &only, SearchEffort::Quick).ranked
        };
        let unequal = Recomputation { encoder: Recompute::Selective, llm: Recompute::Full };
        let asked = of("encoder.recompute=selective,llm.recompute=full");
        assert!(!asked.is_empty());
        assert!(asked.iter().all(|plan| plan.recompute == unequal));
        assert!(
            asked[0].in_words().ends_with(", recompute encoder selective and llm full"),
            "{}",
            asked[0].in_words()
        );
        assert!(of("llm.recompute=full").iter().all(|plan| plan.recompute.llm == Recompute::Full));
    }
}

/// Where memory is tight, rivals recompute by component like our own plans.
#[test]
fn rivals_may_recompute_by_component_too() {
    let profile = fixture::recomputing();
    let free = searched(&profile, (4, 24, None), "colocated=true", SearchEffort::Quick);
    let peak = best(&free).unwrap().prediction.llm_memory_bytes_peak;
    let is_unequal = |budget: u64| {
        let outcome = searched(&profile, (4, 24, Some(budget)), "colocated=true", SearchEffort::Quick);
        outcome.rivals.iter().any(|rival| {
            rival.is_of_others
                && ["encoder ", "llm "].iter().any(|of| rival.layout.contains(&format!(", {of}")))
        })
    };
    assert!((5..10).any(|tenth| is_unequal(peak * tenth / 10)));
}

/// Other people's ways must have room for the whole run, as the plan has: a sample of the run that is far larger than those of
/// the sampled batches asks for recomputation of all, so none of them is faster for lack of it.
#[test]
fn rivals_have_room_for_the_fullest_batch_of_the_run() {
    let profile = fixture::recomputing();
    let mut shapes = vec![fixture::video(4, 2, 40); 40];
    let batches = GlobalBatches::new(40, 1, 11).unwrap();
    for sample in batches.batch(20) {
        shapes[sample.index()] = fixture::video(64, 2, 40);
    }
    let of = |only: &str, budget, num_sampled_batches| {
        let input = SearchInput {
            global_batch_size: 1,
            num_sampled_batches,
            only: only.parse().unwrap(),
            compares: true,
            cluster: fixture::cluster(1, budget),
            effort: SearchEffort::Quick,
            ..asked::input(&shapes, &profile, 1)
        };
        search(&input).unwrap()
    };
    let free = best(&of("colocated=true,recompute=full", Some(1 << 45), 40)).unwrap().prediction;
    let peak = free.encoder_memory_bytes_peak.max(free.llm_memory_bytes_peak);
    let tight = of("colocated=true", Some(peak + peak / 50), 4);
    let plan = best(&tight).unwrap();
    assert!(!plan.recompute.is_none(), "else the test shows nothing");
    let steps: Vec<_> = tight.rivals.iter().map(|rival| (rival.name, rival.step_ns_mean)).collect();
    assert!(steps.iter().filter(|(_, ns)| ns.is_some()).count() >= 3, "{steps:?}");
    assert!(steps.iter().all(|(_, ns)| ns.is_none_or(|ns| ns >= plan.prediction.step_ns_mean)), "{steps:?}");
}

/// With room for everything no microbatch recomputes anything, so a plan stands once in the list, without recomputation.
#[test]
fn a_plan_that_never_recomputes_stands_once() {
    let profile = fixture::recomputing();
    let ample = searched(&profile, (4, 24, Some(1 << 45)), "colocated=true", SearchEffort::Whole);
    let plans: Vec<_> = ample.ranked.iter().map(|plan| (plan.layout, plan.num_microbatches)).collect();
    assert!(plans.len() > 1, "{plans:?}");
    assert!((1..plans.len()).all(|at| !plans[..at].contains(&plans[at])), "{plans:?}");
    assert!(ample.ranked.iter().all(|plan| plan.recompute.is_none()));
}

/// Seven LLM stages behind one encoder. By the estimate a part of the encoder's recomputation leaves room enough; with all of it
/// the step is shorter, since more microbatches are held at a time. The search finds this mode without being asked for it.
#[test]
fn a_mode_of_one_component_is_found_without_being_asked_for() {
    let model = catalogue_model("llava-onevision-qwen2-7b").unwrap();
    let settings = EstimateSettings {
        model: model.name.clone(),
        dtype: "bfloat16".to_owned(),
        made_from: MadeFrom::new(),
        lora_rank: 0,
    };
    let profile =
        estimate(&model.architecture().unwrap(), Hardware::named("h100").unwrap(), &settings).unwrap();
    let shapes = mixes::shapes(include_str!("../../../fixtures/mixes/llava_onevision.csv")).unwrap();
    let of = |modes: &str| {
        let only = format!("colocated=false,encoder.dp=1,llm.pp=7{modes}").parse().unwrap();
        let input = SearchInput {
            cluster: fixture::cluster(8, Some(76_000_000_000)),
            global_batch_size: 32,
            num_microbatches: Some(32),
            num_sampled_batches: 4,
            seed: 0,
            effort: SearchEffort::Quick,
            only,
            ..asked::input(&shapes, &profile, 8)
        };
        best(&search(&input).unwrap()).unwrap()
    };
    let (free, named) = (of(""), of(",encoder.recompute=full,llm.recompute=none"));
    let ns = |plan: &RankedPlan| plan.prediction.step_ns_mean;
    assert!(ns(&free) <= ns(&named) + ns(&named) / 100, "{} {}", free.in_words(), named.in_words());
}
