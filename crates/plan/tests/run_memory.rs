//! A plan fits every global batch of the run, not the sampled ones alone.

use crate::{asked, fixture};
use dflop_cost::{CostModel, RankMemory};
use dflop_plan::{SearchEffort, SearchInput, explain, search};
use dflop_step::batches::GlobalBatches;
use dflop_step::{Arm, StepScheduler, StepSettings};
use dflop_types::{RankedPlan, SampleShape};

const NUM_SAMPLES: u32 = 320;
const SEED: u64 = 11;

/// The largest peak of any rank over the first steps of a run, in bytes.
fn peak(plan: &RankedPlan, shapes: &[SampleShape], steps: u64, budget: Option<u64>) -> Result<u64, String> {
    let settings = StepSettings { memory_budget_bytes: budget, ..StepSettings::from(plan) };
    let model = CostModel::new(&fixture::model_profile()).unwrap();
    let scheduler = StepScheduler::new(settings, model, shapes.to_vec(), SEED).unwrap();
    let batches = GlobalBatches::new(NUM_SAMPLES, 32, SEED).unwrap();
    let mut most = 0;
    for step in 0..steps {
        let schedule =
            scheduler.schedule(step, &batches.batch(step), Arm::AWARE).map_err(|e| e.to_string())?;
        let memory = scheduler.memory(&schedule).unwrap();
        most = memory.iter().map(RankMemory::total_bytes).max().unwrap().max(most);
    }
    Ok(most)
}

/// What a rank holds whatever the samples is that of all of its chunks: of equal samples no batch comes near a budget that
/// has room for a fifth more of them.
#[test]
fn chunks_of_a_rank_are_held_together() {
    let mut model_profile = fixture::model_profile();
    // Wide layers, so that most of what a rank holds is its parameters.
    let layer = model_profile.modules.get_mut("llm_layer").unwrap();
    layer.count = 4;
    layer.num_parameters *= 8;
    layer.parameter_bytes *= 8;
    let text = fixture::shapes(64, 3).into_iter().find(|shape| shape.num_parts() == 0).unwrap();
    let shapes = vec![text; NUM_SAMPLES as usize];
    let of = |budget| {
        let only =
            "colocated=false,llm.pp=2,llm.interleave=2,recompute=none,zero=0,cut=even".parse().unwrap();
        let cluster = fixture::cluster(3, budget);
        search(&SearchInput { only, cluster, ..asked::input(&shapes, &model_profile, 3) }).unwrap()
    };
    let plan = of(None).ranked[0];
    assert_eq!(plan.layout.llm_interleave, 2);
    let model = CostModel::new(&model_profile).unwrap();
    let scheduler = StepScheduler::new(StepSettings::from(&plan), model, shapes.clone(), SEED).unwrap();
    let batches = GlobalBatches::new(NUM_SAMPLES, 32, SEED).unwrap();
    let schedule = scheduler.schedule(0, &batches.batch(0), Arm::AWARE).unwrap();
    let peaks = scheduler.memory(&schedule).unwrap();
    let fullest = peaks.iter().max_by_key(|peak| peak.total_bytes()).unwrap();
    let held = fullest.total_bytes() - fullest.static_bytes();
    assert!(fullest.static_bytes() > held, "else the test shows nothing: {fullest:?}");
    let tight = of(Some(fullest.total_bytes() + held / 5));
    let found = tight.run_memory.unwrap_or_default();
    assert_eq!((tight.ranked[0].layout, found.num_near), (plan.layout, 0), "{found:?}");
}

/// Tests that search many times.
mod more {
    use super::*;

    /// One global batch of large samples, which is not among the sampled ones: a plan that has no room for it is no plan. The
    /// batch is in the first epoch, or in the second where the run has one.
    #[test]
    #[ignore = "`make test-more` runs it"]
    fn a_rare_heavy_batch_is_looked_at() {
        let model_profile = fixture::model_profile();
        let even: Vec<SampleShape> = (0..NUM_SAMPLES).map(|at| fixture::video(4, 2, 40 + at % 7)).collect();
        let batches = GlobalBatches::new(NUM_SAMPLES, 32, SEED).unwrap();
        for (heavy_step, num_steps) in [(7, 0), (13, 20)] {
            let mut shapes = even.clone();
            for sample in batches.batch(heavy_step) {
                shapes[sample.index()] = fixture::video(24, 2, 40);
            }
            // The whole search looks at the run as the quick one does: once is enough.
            let whole = (num_steps == 0).then_some(SearchEffort::Whole);
            for effort in whole.into_iter().chain([SearchEffort::Quick]) {
                let of = |shapes: &[SampleShape], num_steps, budget| {
                    search(&SearchInput {
                        num_sampled_batches: 2,
                        num_steps,
                        effort,
                        cluster: fixture::cluster(4, budget),
                        ..asked::input(shapes, &model_profile, 4)
                    })
                    .unwrap()
                };
                // A little more than the fastest plan needs for the even batches.
                let fastest = of(&even, 0, None).ranked[0];
                let most_bytes = peak(&fastest, &even, 10, None).unwrap() * 11 / 10;
                let budget = Some(most_bytes);
                assert_eq!(of(&even, num_steps, budget).ranked[0].layout, fastest.layout);
                let steps = num_steps.max(10);
                let error = peak(&fastest, &shapes, steps, budget).unwrap_err();
                assert!(error.contains("memory budget"), "{error}");
                let outcome = of(&shapes, num_steps, budget);
                assert!(!outcome.ranked.is_empty());
                for plan in &outcome.ranked {
                    let most = peak(plan, &shapes, steps, budget).unwrap();
                    let prediction = plan.prediction;
                    let said = prediction.encoder_memory_bytes_peak.max(prediction.llm_memory_bytes_peak);
                    assert!(most <= most_bytes, "{}", plan.layout);
                    // The planner takes the first answer, the run has a longer search: within the budget they may differ.
                    assert!(said <= most_bytes && said >= most / 2, "{}: {said} {most}", plan.layout);
                }
                let run = outcome.run_memory.unwrap();
                assert_eq!(run.num_batches, steps);
                assert!(run.num_near >= 1 && run.num_scheduled >= 1, "{run:?}");
                assert!(explain(&outcome).contains("near the budget"), "{}", explain(&outcome));
                // An epoch earlier nothing is there to be seen.
                if num_steps > 0 {
                    assert_eq!(of(&shapes, 0, budget).run_memory.unwrap().num_batches, 10);
                }
            }
        }
    }
}
