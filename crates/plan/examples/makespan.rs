//! Simulated makespan over the work bound, by cluster, layout, microbatches, recomputation and way, within the memory of a
//! real device, on the mixed set of `fixtures/mixes`; writes JSON to the path given, and a line for each row to stdout.
//!
//! `cargo run --release -p dflop-plan --example makespan -- bench/out/makespan.json [SEEDS [RANKS,RANKS]]`
//!
//! The work bound is one number for a global batch and a number of ranks, whatever the way and the layout: all work of the
//! batch, forward and backward of encoder and LLM without recomputation, over all ranks. No way is shorter. Recomputation,
//! transfers, the reduction of the gradients and the optimizer are in the makespans and not in the bound.
//!
//! Each row has its memory budget. A way that does not fit is refused, with what its fullest rank needs. Every row is run
//! with SEEDS global batches (10 unless given), each drawn by its own seed. Durations and bytes are those of
//! LLaVA-OneVision 7B on an H100, estimated and not measured.

#![allow(clippy::print_stdout, reason = "an example prints")]

mod mixes;

use dflop_analytic::{EstimateSettings, Hardware, catalogue_model, estimate};
use dflop_cost::{ComponentSettings, CostModel, CostSettings};
use dflop_plan::compare;
use dflop_step::batches::GlobalBatches;
use dflop_step::{StepScheduler, StepSettings};
use dflop_types::{
    ComponentLayout, Layout, MadeFrom, MicrobatchShape, PipelineOrder, Recompute, Refusal, SampleIndex,
    SampleShape, WayPrediction,
};
use serde_json::{Value, json};
use std::error::Error;
use std::sync::Arc;

/// Bytes that a rank may use of 80 GB.
const MEMORY_BUDGET_BYTES: u64 = 76_000_000_000;
const SAMPLES_PER_MICROBATCH: u32 = 4;
/// Encoder replicas, LLM stages, LLM replicas: the encoder has about its share of the work in ranks.
const LAYOUTS: [(u32, u32, u32); 6] = [(1, 7, 1), (2, 7, 2), (8, 6, 4), (4, 7, 4), (8, 14, 4), (8, 7, 8)];
const MICROBATCHES: [u32; 2] = [16, 32];
const RECOMPUTE: [(Recompute, &str); 3] =
    [(Recompute::None, "none"), (Recompute::Selective, "selective"), (Recompute::Full, "full")];

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let num_seeds: u64 = arguments.get(1).map_or(Ok(10), |text| text.parse())?;
    let only: Option<Vec<u32>> =
        arguments.get(2).map(|text| text.split(',').map(str::parse).collect()).transpose()?;
    let shapes: Arc<[SampleShape]> =
        mixes::shapes(include_str!("../../../fixtures/mixes/llava_onevision.csv"))?.into();
    let model = catalogue_model("llava-onevision-qwen2-7b")?;
    let settings = EstimateSettings {
        model: model.name.clone(),
        dtype: "bfloat16".to_owned(),
        made_from: MadeFrom::new(),
        lora_rank: 0,
    };
    let profile = estimate(&model.architecture()?, Hardware::named("h100")?, &settings)?;
    let plain = CostModel::new(&profile)?;
    let mut rows = Vec::new();
    for (encoder_dp, llm_pp, llm_dp) in LAYOUTS {
        let layout = Layout::disaggregated(
            ComponentLayout { tp: 1, pp: 1, dp: encoder_dp },
            ComponentLayout { tp: 1, pp: llm_pp, dp: llm_dp },
        );
        if only.as_ref().is_some_and(|only| !only.contains(&layout.num_ranks())) {
            continue;
        }
        for num_microbatches in MICROBATCHES {
            let size = num_microbatches * llm_dp * SAMPLES_PER_MICROBATCH;
            let batches: Vec<Vec<SampleIndex>> = (1..=num_seeds)
                .map(|seed| Ok(GlobalBatches::new(shapes.len() as u32, size, seed)?.batch(0)))
                .collect::<Result<_, dflop_step::StepError>>()?;
            let bounds_ns: Vec<f64> = batches
                .iter()
                .map(|batch| work_ns(&plain, &shapes, batch) / f64::from(layout.num_ranks()))
                .collect();
            for (recompute, name) in RECOMPUTE {
                let component = ComponentSettings { recompute, ..ComponentSettings::default() };
                let settings = CostSettings { encoder: component, llm: component, ..CostSettings::default() };
                let model = CostModel::with(&profile, &settings)?;
                let settings = StepSettings {
                    layout,
                    num_microbatches,
                    pipeline_order: PipelineOrder::DataAware,
                    memory_budget_bytes: Some(MEMORY_BUDGET_BYTES),
                };
                let scheduler = StepScheduler::new(settings, model, Arc::clone(&shapes), 1)?;
                let of_seed =
                    |batch: &Vec<SampleIndex>| compare(&scheduler, std::slice::from_ref(batch), false);
                let by_seed: Vec<Vec<WayPrediction>> =
                    batches.iter().map(of_seed).collect::<Result<_, _>>()?;
                for at in 0..by_seed[0].len() {
                    let way = &by_seed[0][at];
                    let row = json!({
                        "num_ranks": layout.num_ranks(),
                        "layout": format!("encoder dp {encoder_dp}, llm pp {llm_pp} dp {llm_dp}"),
                        "num_microbatches": num_microbatches,
                        "global_batch_size": size,
                        "memory_budget_bytes": MEMORY_BUDGET_BYTES,
                        "recompute": name,
                        "way": way.way,
                        "is_baseline": way.is_baseline,
                        "seeds": by_seed.iter().zip(&bounds_ns).map(|(ways, bound)| seed(&ways[at], *bound)).collect::<Vec<Value>>(),
                    });
                    println!("{}", line(&row));
                    rows.push(row);
                }
            }
        }
    }
    if let Some(path) = arguments.first() {
        std::fs::write(path, serde_json::to_string_pretty(&rows)?)?;
    }
    Ok(())
}

/// What a way takes for the global batch of one seed, beside its work bound; or what it needs more than it may.
fn seed(way: &WayPrediction, bound_ns: f64) -> Value {
    let needed_bytes = way.refusal.map(|refusal| match refusal {
        Refusal::Memory { needed_bytes, .. } => needed_bytes,
        Refusal::BucketTokens { .. } => unreachable!("there is no cap on tokens"),
    });
    json!({
        "work_bound_ns": bound_ns as u64,
        "makespan_ns": way.step_ns_mean,
        "over_bound": way.step_ns_mean.map(|ns| ns as f64 / bound_ns),
        "needed_bytes": needed_bytes,
    })
}

/// Forward and backward of all samples, each component's attention and linear parts at the rate of the whole batch, in
/// nanoseconds.
fn work_ns(model: &CostModel, shapes: &[SampleShape], batch: &[SampleIndex]) -> f64 {
    let whole = MicrobatchShape::pack(batch.iter().map(|&sample| &shapes[sample.index()]));
    let llm = model.llm_stage(&whole, model.num_llm_layers(), true, true);
    model.encoder(&whole).total_ns() as f64 + llm.total_ns() as f64
}

/// A row for people: median and worst over the seeds, or the bytes of the seed that needs most.
fn line(row: &Value) -> String {
    let seeds = row["seeds"].as_array().map_or(&[][..], Vec::as_slice);
    let mut ratios: Vec<f64> = seeds.iter().filter_map(|seed| seed["over_bound"].as_f64()).collect();
    ratios.sort_by(f64::total_cmp);
    let result = if ratios.len() == seeds.len() && !ratios.is_empty() {
        format!("{:.3} median, {:.3} worst", ratios[ratios.len() / 2], ratios[ratios.len() - 1])
    } else {
        let needed = seeds.iter().filter_map(|seed| seed["needed_bytes"].as_u64()).max().unwrap_or(0);
        format!(
            "refused in {} of {} seeds: needs {:.0} GB",
            seeds.len() - ratios.len(),
            seeds.len(),
            needed as f64 / 1e9
        )
    };
    let text = |name: &str| row[name].as_str().unwrap_or_default().to_owned();
    format!(
        "{:>3} ranks, {:<28} {:>2} microbatches, recompute {:<9} {:<22} {result}",
        row["num_ranks"],
        text("layout"),
        row["num_microbatches"],
        text("recompute"),
        text("way")
    )
}
