//! What a search takes and what it gives away, by the number of ranks; a line of JSON to stdout.
//!
//! `cargo run --release -p dflop-plan --example search -- RANKS [whole] [BUDGET_GB] [SAMPLES_PER_RANK] [PART=VALUE,...]`
//!
//! The data is the mixed set of `fixtures/mixes`, the model LLaVA-OneVision 7B on an H100, estimated and not measured.
//! With `whole` all candidates are judged, and the plan of the quick search is judged in the same way: `regret` is what it
//! takes more, as a part of the best step.

#![allow(clippy::print_stdout, reason = "an example prints")]

mod mixes;

use dflop_analytic::{EstimateSettings, Hardware, catalogue_model, estimate};
use dflop_plan::{Objective, Only, Outcome, SearchEffort, SearchInput, search};
use dflop_step::GiantRule;
use dflop_types::{Cluster, MadeFrom, ModelProfile, PipelineOrder, SampleShape};
use serde_json::json;
use std::error::Error;
use std::time::Instant;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let is_whole = arguments.iter().any(|argument| argument == "whole");
    let numbers: Vec<u32> = arguments.iter().filter_map(|argument| argument.parse().ok()).collect();
    let num_ranks = *numbers.first().ok_or("give the number of ranks")?;
    let budget_gb = numbers.get(1).copied().unwrap_or(76);
    let global_batch_size = num_ranks * numbers.get(2).copied().unwrap_or(4);
    let only: Only = match arguments.iter().find(|argument| argument.contains('=')) {
        Some(only) => only.parse()?,
        None => Only::default(),
    };
    let model = catalogue_model("llava-onevision-qwen2-7b")?;
    let settings = EstimateSettings {
        model: model.name.clone(),
        dtype: "bfloat16".to_owned(),
        made_from: MadeFrom::new(),
        lora_rank: 0,
    };
    let profile = estimate(&model.architecture()?, Hardware::named("h100")?, &settings)?;
    let mix = mixes::shapes(include_str!("../../../fixtures/mixes/llava_onevision.csv"))?;
    // Two global batches of a large cluster take more samples than the set has: then each comes more than once.
    let copies = (2 * global_batch_size as usize).div_ceil(mix.len()).max(1);
    let shapes: Vec<SampleShape> = std::iter::repeat_n(&mix, copies).flatten().cloned().collect();
    let run = |effort| -> Result<(Outcome, f64), Box<dyn Error>> {
        let start = Instant::now();
        let outcome =
            search(&input(&profile, &shapes, num_ranks, global_batch_size, budget_gb, effort, &only))?;
        Ok((outcome, start.elapsed().as_secs_f64()))
    };
    let (quick, seconds) = run(SearchEffort::Quick)?;
    let step_ns = |outcome: &Outcome| outcome.ranked.first().map(|plan| plan.prediction.step_ns_mean);
    let mut row = json!({
        "num_ranks": num_ranks,
        "global_batch_size": global_batch_size,
        "num_candidates": quick.num_candidates,
        "num_judged": quick.num_judged,
        "seconds": seconds,
        "plan": quick.ranked.first().map(|plan| format!("{}, {}, {} microbatches", plan.layout, plan.recompute, plan.num_microbatches)),
        "step_ns": step_ns(&quick),
        "work_bound_ns": quick.work_bound_ns,
    });
    if is_whole {
        let (whole, seconds) = run(SearchEffort::Whole)?;
        let regret = step_ns(&quick).zip(step_ns(&whole)).map(|(own, best)| own as f64 / best as f64 - 1.0);
        row["whole"] = json!({
            "num_judged": whole.num_judged,
            "seconds": seconds,
            "plan": whole.ranked.first().map(|plan| format!("{}, {}, {} microbatches", plan.layout, plan.recompute, plan.num_microbatches)),
            "step_ns": step_ns(&whole),
        });
        row["regret"] = json!(regret);
    }
    println!("{row}");
    Ok(())
}

fn input<'a>(
    profile: &'a ModelProfile,
    shapes: &[SampleShape],
    num_ranks: u32,
    global_batch_size: u32,
    budget_gb: u32,
    effort: SearchEffort,
    only: &Only,
) -> SearchInput<'a> {
    SearchInput {
        shapes: shapes.into(),
        model_profile: profile,
        cluster: Cluster {
            num_ranks,
            ranks_per_node: 8,
            memory_budget_bytes: Some(u64::from(budget_gb) * 1_000_000_000),
        },
        global_batch_size,
        num_microbatches: None,
        giants: GiantRule::default(),
        bucket_tokens_max: None,
        order: Some(PipelineOrder::OneFOneB),
        objective: Objective::Mean,
        num_steps: 0,
        num_sampled_batches: (2_048 / global_batch_size).clamp(2, 4),
        trained: dflop_types::Trained::default(),
        only: only.clone(),
        compares: false,
        effort,
        halt: &|| false,
        seed: 0,
        made_from: MadeFrom::new(),
        progress: &|_, _| {},
    }
}
