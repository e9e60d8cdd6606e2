//! The search through its verb: agreement with brute force, memory, pruning, determinism and errors.

use crate::asked::input;
use crate::fixture;
use dflop_cost::{CostModel, RankMemory};
use dflop_plan::{Only, Outcome, PlanError, SearchEffort, SearchInput, StopReason, explain, layouts, search};
use dflop_step::batches::GlobalBatches;
use dflop_step::{Arm, GiantPolicy, GiantRule, StepScheduler, StepSettings};
use dflop_types::{Artifact, Component, Hint, PlanPrediction, Recipe, Rejection};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

fn settings(outcome: &Outcome, position: usize) -> StepSettings {
    StepSettings {
        memory_budget_bytes: outcome.memory_budget_bytes,
        ..StepSettings::from(&outcome.ranked[position])
    }
}

/// Judging every candidate without bounds, by the public parts alone, gives the same best plan and the same
/// mean.
#[test]
fn agrees_with_brute_force() {
    let model_profile = fixture::model_profile();
    for (num_ranks, seed) in [(2, 1), (3, 2), (4, 3)] {
        let shapes = fixture::shapes(100, seed);
        // The layouts that `layouts` gives.
        let only = "colocated=false,zero=0,cut=even".parse().unwrap();
        let input = SearchInput { only, ..input(&shapes, &model_profile, num_ranks) };
        let outcome = search(&input).unwrap();
        let batches = GlobalBatches::new(100, 32, input.seed).unwrap();
        // Three whole batches an epoch; the fourth step of each epoch is the smaller one.
        let steps = [0, 1, 2, 4];
        let mut means = Vec::new();
        for layout in layouts(num_ranks) {
            for num_microbatches in (1..=32u32).filter(|m| m.is_power_of_two() || *m == 32 / layout.llm.dp) {
                if num_microbatches * layout.llm.dp > 32 {
                    continue;
                }
                let settings = StepSettings {
                    layout,
                    num_microbatches,
                    pipeline_order: input.order.expect("one is asked for"),
                    memory_budget_bytes: None,
                };
                let model = CostModel::new(&model_profile).unwrap();
                let scheduler = StepScheduler::new(settings, model, shapes.clone(), input.seed).unwrap();
                let makespans = (0..).zip(steps).map(|(step, at)| {
                    let schedule = scheduler.schedule(step, &batches.batch(at), Arm::AWARE).unwrap();
                    scheduler.simulate(&schedule).unwrap().makespan_ns
                });
                means.push((makespans.sum::<u64>() as f64 / 4.0).round() as u64);
            }
        }
        means.sort_unstable();
        let ranked: Vec<u64> = outcome.ranked.iter().map(|p| p.prediction.step_ns_mean).collect();
        assert_eq!(means.len() as u64, outcome.num_candidates);
        assert_eq!(ranked, means[..ranked.len()], "{num_ranks} ranks");
        assert_eq!(outcome.stop, StopReason::Done);
    }
}

/// Tests that take as long as all others here.
mod more {
    use super::*;

    /// The quick search judges a few candidates, and its plan is within 1 % of the best of all, under tight memory too.
    #[test]
    #[ignore = "`make test-more` runs it"]
    fn the_quick_search_is_within_one_percent_of_judging_everything() {
        let model_profile = fixture::model_profile();
        for (num_ranks, seed, memory_percent) in
            [(2, 21, None), (5, 23, None), (6, 24, Some(70)), (8, 26, Some(70)), (16, 28, None)]
        {
            let shapes = fixture::shapes(128, seed);
            let search = |effort, budget| {
                let cluster = fixture::cluster(num_ranks, budget);
                let input = input(&shapes, &model_profile, num_ranks);
                search(&SearchInput { effort, cluster, num_sampled_batches: 2, ..input }).unwrap()
            };
            // A part of what the best plan takes where memory is free.
            let budget = memory_percent.map(|percent| {
                let prediction = search(SearchEffort::Quick, None).ranked[0].prediction;
                prediction.encoder_memory_bytes_peak.max(prediction.llm_memory_bytes_peak) * percent / 100
            });
            let of = |effort| search(effort, budget);
            let (quick, whole) = (of(SearchEffort::Quick), of(SearchEffort::Whole));
            let ns = |outcome: &Outcome| outcome.ranked.first().map(|plan| plan.prediction.step_ns_mean);
            match (ns(&quick), ns(&whole)) {
                (Some(quick), Some(whole)) => {
                    assert!(quick <= whole + whole / 100, "{num_ranks}: {quick} {whole}");
                }
                (None, None) => panic!("{num_ranks} ranks: no plan to compare"),
                (quick, whole) => panic!("{num_ranks} ranks: {quick:?} {whole:?}"),
            }
            let fallen: u64 = quick.rejections.iter().map(|r| r.count).sum();
            assert_eq!(fallen + quick.num_judged, quick.num_candidates, "{num_ranks} ranks");
            assert_eq!(quick, of(SearchEffort::Quick));
        }
    }
}

/// Colocated ranks and pipelines compete: where memory allows, all work over all ranks is reached, and the best pipeline
/// stands among the runners-up. The parts of the candidates that are asked for alone give the same plans.
#[test]
fn colocated_layouts_compete_with_pipelines() {
    let model_profile = fixture::model_profile();
    let shapes = fixture::shapes(128, 41);
    let of = |only: &str, budget, effort| {
        let (only, cluster) = (only.parse().unwrap(), fixture::cluster(8, budget));
        search(&SearchInput { only, cluster, effort, ..input(&shapes, &model_profile, 8) }).unwrap()
    };
    let [quick, whole] = [SearchEffort::Quick, SearchEffort::Whole].map(|effort| of("", None, effort));
    let best = quick.ranked[0];
    assert!(best.layout.is_colocated());
    assert_eq!(best.layout, whole.ranked[0].layout);
    assert!(best.prediction.step_ns_mean >= quick.work_bound_ns);
    assert!(quick.ranked.iter().any(|plan| !plan.layout.is_colocated()));
    assert_eq!(best.prediction.encoder_memory_bytes_peak, best.prediction.llm_memory_bytes_peak);
    assert_eq!(of("colocated=true", None, SearchEffort::Quick).ranked[0], best);
    for zero in 0..4 {
        let outcome = of(&format!("zero={zero}"), None, SearchEffort::Quick);
        assert!(outcome.ranked.iter().all(|plan| u8::from(plan.layout.zero) == zero));
    }
    // With less memory than a whole model takes on one rank, only what is sharded or a pipeline is left.
    let whole_rank = of("zero=0,colocated=true", None, SearchEffort::Quick).ranked[0].prediction;
    let tight = of("", Some(whole_rank.llm_memory_bytes_peak / 2), SearchEffort::Quick);
    for plan in &tight.ranked {
        assert!(plan.prediction.llm_memory_bytes_peak <= whole_rank.llm_memory_bytes_peak / 2);
    }
    assert!(!tight.ranked.is_empty());
}

/// What is frozen has no W, no gradient and no optimizer: every step is shorter and needs less memory, and the plan says
/// what it was made for.
#[test]
fn a_recipe_shortens_the_step() {
    let mut model_profile = fixture::model_profile();
    // Without the two parts of a backward nobody knows what a frozen module takes.
    for module in model_profile.modules.values_mut() {
        for point in module.linear.points.iter_mut().chain(&mut module.attention.points) {
            point.input_ns = point.backward_ns / 2;
            point.weight_ns = point.backward_ns - point.input_ns;
        }
    }
    let shapes = fixture::shapes(64, 7);
    let best = |recipe: Recipe| {
        let trained = recipe.trained(0);
        // One layout: another recipe may choose another one, which needs other memory.
        let only = "colocated=false".parse().unwrap();
        let input =
            SearchInput { trained, only, num_microbatches: Some(4), ..input(&shapes, &model_profile, 2) };
        let plan = search(&input).unwrap().plan().unwrap();
        assert_eq!(plan.trained, trained);
        plan.best.prediction
    };
    let full = best(Recipe::Full);
    let encoder = |of: PlanPrediction| of.encoder_memory_bytes_peak;
    let llm = |of: PlanPrediction| of.llm_memory_bytes_peak;
    for recipe in [Recipe::Projector, Recipe::FrozenEncoder, Recipe::FrozenLlm] {
        let frozen = best(recipe);
        assert!(frozen.step_ns_mean < full.step_ns_mean, "{recipe}");
        // The other component may hold more: the samples of its microbatches are others.
        let is_less = [
            recipe == Recipe::FrozenLlm || encoder(frozen) < encoder(full),
            recipe == Recipe::FrozenEncoder || llm(frozen) < llm(full),
        ];
        assert_eq!(is_less, [true; 2], "{recipe}: {frozen:?} {full:?}");
    }
}

/// What people run today is within the memory too, and nothing of it beats the best of its kind of ours.
#[test]
fn rivals_get_the_best_of_their_own_search() {
    let model_profile = fixture::model_profile();
    let shapes = fixture::shapes(128, 42);
    let outcome = search(&SearchInput {
        only: Only::default(),
        compares: true,
        effort: SearchEffort::Quick,
        ..input(&shapes, &model_profile, 8)
    })
    .unwrap();
    let ns =
        |name: &str| outcome.rivals.iter().find(|rival| rival.name == name).unwrap().step_ns_mean.unwrap();
    let names: Vec<&str> = outcome.rivals.iter().map(|rival| rival.name).collect();
    assert_eq!(names, ["megatron", "megatron-balanced", "fsdp", "fsdp-tokens", "fsdp-dflop", "paper"]);
    assert!(ns("fsdp-dflop") <= ns("fsdp-tokens") && ns("fsdp-tokens") < ns("fsdp"));
    assert!(ns("megatron-balanced") < ns("megatron"));
    let best = outcome.ranked[0].prediction.step_ns_mean;
    assert!(best <= ns("fsdp-dflop"));
    assert!(names.iter().all(|name| ns(name) >= outcome.work_bound_ns));
    let text = explain(&outcome);
    assert!(text.contains("over the best of other people's"), "{text}");
}

/// A search that is told to stop at once still has a plan, and says how many candidates it did not look at.
#[test]
fn a_halted_search_gives_the_best_so_far() {
    let model_profile = fixture::model_profile();
    let shapes = fixture::shapes(96, 31);
    for effort in [SearchEffort::Quick, SearchEffort::Whole] {
        let outcome =
            search(&SearchInput { effort, halt: &|| true, ..input(&shapes, &model_profile, 12) }).unwrap();
        assert!(!outcome.ranked.is_empty());
        let StopReason::Halted { num_left, .. } = outcome.stop else { panic!("{:?}", outcome.stop) };
        let fallen: u64 = outcome.rejections.iter().map(|r| r.count).sum();
        assert_eq!(fallen + outcome.num_judged + num_left, outcome.num_candidates);
        assert!(num_left > 10, "{num_left}");
        assert!(explain(&outcome).contains(&format!("{num_left}  not judged: the time limit struck")));
    }
}

/// Whenever the search is halted, there is a plan, all candidates are accounted for, and of rivals that were cut short it says so.
#[test]
fn a_search_may_be_halted_at_any_moment() {
    let model_profile = fixture::model_profile();
    let shapes = fixture::shapes(96, 31);
    let plans_asked = [0, 1, 4, 16, 64, 256].map(|num_asked| {
        let left = AtomicU64::new(num_asked);
        let halt = || left.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1)).is_err();
        let asked = SearchInput {
            only: Only::default(),
            effort: SearchEffort::Quick,
            compares: true,
            halt: &halt,
            ..input(&shapes, &model_profile, 12)
        };
        let outcome = search(&asked).unwrap();
        assert!(!outcome.ranked.is_empty(), "{num_asked}");
        let fallen: u64 = outcome.rejections.iter().map(|r| r.count).sum();
        let num_left = if let StopReason::Halted { num_left, .. } = outcome.stop { num_left } else { 0 };
        assert_eq!(fallen + outcome.num_judged + num_left, outcome.num_candidates, "{num_asked}");
        let are_cut = outcome.rivals.iter().any(|rival| rival.is_cut);
        assert_eq!(explain(&outcome).contains("configurations were looked at of "), are_cut);
        (outcome.num_candidates, are_cut)
    });
    assert!(plans_asked[0].1 && plans_asked[0].0 < plans_asked[5].0, "{plans_asked:?}");
}

#[test]
fn only_what_is_asked_for_is_judged() {
    let model_profile = fixture::model_profile();
    let shapes = fixture::shapes(64, 9);
    let of = |only: &str| {
        let only = only.parse().unwrap();
        search(&SearchInput { only, ..input(&shapes, &model_profile, 6) }).unwrap()
    };
    let outcome = of("encoder.dp=2,llm.pp=2");
    assert!(!outcome.ranked.is_empty());
    for plan in &outcome.ranked {
        assert_eq!((plan.layout.encoder.dp, plan.layout.llm.pp), (2, 2));
    }
    // A plan that leaves ranks free may come behind.
    assert_eq!(outcome.ranked[0].layout.llm.dp, 2);
    // Six ranks are no two encoder replicas and three stages.
    let none = of("encoder.dp=2,llm.pp=3");
    assert_eq!((none.ranked.len(), none.num_candidates), (0, 0));
}

#[test]
fn what_is_pruned_and_what_is_judged_add_up() {
    let model_profile = fixture::model_profile();
    let shapes = fixture::shapes(64, 4);
    let calls = Mutex::new((0, 0, 0));
    let progress = |done, total| {
        let mut calls = calls.lock().unwrap();
        let (count, last, _) = *calls;
        assert!(done >= last && done <= total);
        *calls = (count + 1, done, total);
    };
    let outcome = search(&SearchInput { progress: &progress, ..input(&shapes, &model_profile, 6) }).unwrap();
    let fallen: u64 = outcome.rejections.iter().map(|r| r.count).sum();
    assert_eq!(fallen + outcome.num_judged, outcome.num_candidates);
    // Four layers: no fifth LLM stage; 6 ranks leave that one only.
    assert!(outcome.rejections.iter().any(|r| {
        r.rejection == Rejection::StagesExceedLayers { component: Component::Llm, stages: 5, layers: 4 }
            && r.count == 1
    }));
    assert!(outcome.rejections.iter().any(|r| r.rejection == Rejection::Bound && r.count > 0));
    let (count, done, total) = *calls.lock().unwrap();
    assert!(count > 1);
    assert_eq!((done, total), (outcome.num_candidates, outcome.num_candidates));
}

#[test]
fn equal_inputs_give_equal_outcomes() {
    let model_profile = fixture::model_profile();
    let shapes = fixture::shapes(64, 5);
    let of = |seed| search(&SearchInput { seed, ..input(&shapes, &model_profile, 3) }).unwrap();
    assert_eq!(of(1), of(1));
    let ns = |seed| of(seed).ranked[0].prediction.step_ns_mean;
    assert_ne!(ns(1), ns(2));
}

#[test]
fn the_prediction_tells_of_both_arms() {
    let model_profile = fixture::model_profile();
    let outcome = search(&input(&fixture::shapes(64, 6), &model_profile, 3)).unwrap();
    for plan in &outcome.ranked {
        let prediction = plan.prediction;
        assert!(prediction.step_ns_half_width > 0);
        assert!((0.0..1.0).contains(&prediction.bubble_ratio));
        assert!((0.0..=1.0).contains(&prediction.extrapolated_ratio));
        assert_eq!(plan.layout.num_ranks(), 3);
    }
    let plan = outcome.plan().unwrap();
    assert!(plan.problems().is_empty());
    assert_eq!(plan.best, outcome.ranked[0]);
    assert_eq!(plan.runners_up, outcome.ranked[1..]);
    assert_eq!(plan.made_from["data_profile"], "sha256:0");
}

#[test]
fn no_returned_plan_exceeds_the_memory_budget() {
    let model_profile = fixture::model_profile();
    let shapes = fixture::shapes(64, 7);
    let free = search(&input(&shapes, &model_profile, 4)).unwrap();
    let peaks = free
        .ranked
        .iter()
        .map(|p| p.prediction.encoder_memory_bytes_peak.max(p.prediction.llm_memory_bytes_peak));
    let most = peaks.max().unwrap();
    let mut num_plans = 0;
    for percent in [30, 45, 60, 75, 90] {
        let budget = most * percent / 100;
        let limited =
            SearchInput { cluster: fixture::cluster(4, Some(budget)), ..input(&shapes, &model_profile, 4) };
        let outcome = search(&limited).unwrap();
        num_plans += outcome.ranked.len();
        for (position, plan) in outcome.ranked.iter().enumerate() {
            let prediction = plan.prediction;
            assert!(prediction.encoder_memory_bytes_peak <= budget, "{percent} %");
            assert!(prediction.llm_memory_bytes_peak <= budget, "{percent} %");
            let model = CostModel::new(&model_profile).unwrap();
            let scheduler =
                StepScheduler::new(settings(&outcome, position), model, shapes.clone(), 11).unwrap();
            let batch = GlobalBatches::new(64, 32, 11).unwrap().batch(1);
            let schedule = scheduler.schedule(1, &batch, Arm::AWARE).unwrap();
            let memory = scheduler.memory(&schedule).unwrap();
            assert!(memory.iter().map(RankMemory::total_bytes).max().unwrap() <= budget);
        }
        if percent == 30 {
            assert!(outcome.rejections.iter().any(|r| matches!(r.rejection, Rejection::Memory { .. })));
        }
    }
    assert!(num_plans > 6, "{num_plans}");
}

#[test]
fn a_given_microbatch_count_is_kept_or_refused() {
    let model_profile = fixture::model_profile();
    let shapes = fixture::shapes(64, 8);
    let of = |num_microbatches| {
        search(&SearchInput { num_microbatches: Some(num_microbatches), ..input(&shapes, &model_profile, 3) })
    };
    assert!(of(16).unwrap().ranked.iter().all(|p| p.num_microbatches == 16));
    let too_many = of(17).unwrap();
    assert!(too_many.ranked.iter().all(|p| p.layout.llm.dp == 1));
    assert_eq!(
        too_many.rejections[0].rejection,
        Rejection::TooFewSamples { global_batch_size: 32, buckets: 34 }
    );
    assert_eq!(of(0).unwrap_err(), PlanError::Zero { field: "num_microbatches" });
}

#[test]
fn a_dataset_smaller_than_the_global_batch_is_planned_for() {
    let model_profile = fixture::model_profile();
    let outcome = search(&input(&fixture::shapes(5, 1), &model_profile, 2)).unwrap();
    assert!(!outcome.ranked.is_empty());
}

/// Two giants a global batch of which one alone fits a rank: gathered over more steps than are sampled, they stand in
/// steps that the search must see, or it would plan for a dataset without them.
#[test]
fn deferred_giants_are_planned_for() {
    let model_profile = fixture::model_profile();
    let mut shapes = fixture::shapes(640, 9);
    for at in (0..640).step_by(16) {
        shapes[at] = fixture::sample(4, 4_000, 400);
    }
    let planned = |steps_max| {
        let giants = GiantRule { policy: GiantPolicy::Defer, llm_tokens_max: Some(2_000), steps_max };
        let input = SearchInput { giants, num_microbatches: Some(8), ..input(&shapes, &model_profile, 2) };
        search(&input).unwrap().ranked[0].prediction
    };
    // All 32 samples of the last of 20 steps are giants, and a few of the one before.
    let (spread, gathered) = (planned(0), planned(19));
    assert!(gathered.step_ns_half_width > 2 * spread.step_ns_half_width, "{spread:?} {gathered:?}");
}

#[test]
fn inputs_without_an_answer_are_errors_with_a_hint() {
    let model_profile = fixture::model_profile();
    let shapes = fixture::shapes(8, 1);
    let message = |input: SearchInput<'_>| {
        let error = search(&input).unwrap_err();
        format!("{error}; {}", error.hint().unwrap())
    };
    assert_eq!(
        message(input(&shapes, &model_profile, 0)),
        "`num_ranks` is 0, at least 1 is needed; set `cluster.num_ranks` to 1 or more"
    );
    assert!(message(input(&[], &model_profile, 2)).starts_with("the data profile has 0 samples"));
    assert!(
        message(SearchInput { global_batch_size: 0, ..input(&shapes, &model_profile, 2) })
            .starts_with("`global_batch_size` is 0")
    );
    assert!(
        message(SearchInput { num_sampled_batches: 0, ..input(&shapes, &model_profile, 2) })
            .starts_with("`num_sampled_batches` is 0")
    );
    let mut broken = fixture::model_profile();
    broken.modules.remove("llm_layer");
    assert!(message(input(&shapes, &broken, 2)).starts_with("model profile has no module `llm_layer`"));
}

/// A GPU's memory is known: without a budget most of it is one, for the search and for who trains the plan.
#[test]
fn without_a_budget_the_devices_memory_is_held_against_a_plan() {
    let shapes = fixture::shapes(64, 12);
    let free = fixture::model_profile();
    let of = |memory_bytes, given| {
        let mut profile = free.clone();
        profile.device.memory_bytes = memory_bytes;
        search(&SearchInput { cluster: fixture::cluster(3, given), ..input(&shapes, &profile, 3) }).unwrap()
    };
    let unlimited = of(0, None);
    assert_eq!((unlimited.memory_budget_bytes, unlimited.is_budget_given), (None, false));
    let peak = |outcome: &Outcome| {
        let prediction = outcome.ranked[0].prediction;
        prediction.encoder_memory_bytes_peak.max(prediction.llm_memory_bytes_peak)
    };
    // Less than the best plan takes: another one, or none, and the reason says the budget.
    let device = peak(&unlimited) - 1;
    let limited = of(device, None);
    assert_eq!(limited.memory_budget_bytes, Some(device / 1_000 * 950));
    assert!(limited.ranked.iter().all(|plan| plan.prediction.llm_memory_bytes_peak <= device / 1_000 * 950));
    assert_ne!(limited.ranked, unlimited.ranked);
    let told = explain(&limited);
    assert!(
        limited.ranked.is_empty() || told.contains(": 95.0 % of the device's memory, as none is set\n"),
        "{told}"
    );
    // What is given counts, above the device's as well.
    let given = of(device, Some(1 << 40));
    assert_eq!((given.memory_budget_bytes, given.is_budget_given), (Some(1 << 40), true));
    assert_eq!(given.ranked, unlimited.ranked);
}
