//! Simulated makespan over ideal by stages, microbatches and arm, on the mixed set of `fixtures/mixes`; writes
//! JSON to the path given, and a table to stdout.
//!
//! Ideal is the work of the busiest component over its ranks: no schedule is shorter. Durations are those of
//! LLaVA-OneVision 7B on an H100, estimated and not measured; transfers, reduction and optimizer are left out of both
//! sides of the ratio, since no order changes them much and the estimate assumes them.
//!
//! `cargo run --release -p dflop-step --example makespan -- bench/out/makespan.json`

#![allow(clippy::print_stdout, reason = "an example prints")]

use dflop_analytic::{EstimateSettings, Hardware, catalogue_model, estimate};
use dflop_cost::CostModel;
use dflop_step::{Arm, StepScheduler, StepSettings};
use dflop_types::{
    ComponentLayout, EncoderParts, EncoderSegments, Layout, MadeFrom, PipelineOrder, SampleIndex, SampleShape,
};
use std::error::Error;
use std::time::Instant;

const SAMPLES_PER_MICROBATCH: u32 = 8;
const NUM_STEPS: u32 = 4;
/// Stages with the encoder's replicas and the LLM backbone's stages: the encoder takes about its share of the ranks.
const STAGES: [(u32, u32); 3] = [(8, 7), (4, 3), (16, 14)];
const ARMS: [&str; 8] =
    ["blind", "tokens", "balanced", "ordered", "shaped", "aware", "shaped-ahead", "aware-ahead"];

fn main() -> Result<(), Box<dyn Error>> {
    let shapes = shapes(include_str!("../../../fixtures/mixes/llava_onevision.csv"))?;
    let model = catalogue_model("llava-onevision-qwen2-7b")?;
    let settings = EstimateSettings {
        model: model.name.clone(),
        dtype: "bfloat16".to_owned(),
        made_from: MadeFrom::new(),
    };
    let mut profile = estimate(&model.architecture()?, Hardware::named("h100")?, &settings)?;
    profile.optimizer_ns_per_million = 0;
    profile.network = dflop_types::Network::default();
    let mut rows = Vec::new();
    println!(
        "{:>6} {:>12} {:<16} {:>10} {:>8} {:>12}",
        "stages", "microbatches", "arm", "over ideal", "idle", "time"
    );
    for (num_stages, llm_stages) in STAGES {
        for num_microbatches in [8, 16, 32] {
            for arm in ARMS {
                let layout = Layout {
                    encoder: ComponentLayout { tp: 1, pp: 1, dp: num_stages - llm_stages },
                    llm: ComponentLayout { tp: 1, pp: llm_stages, dp: 1 },
                };
                let settings = StepSettings {
                    layout,
                    num_microbatches,
                    pipeline_order: PipelineOrder::DataAware,
                    memory_budget_bytes: None,
                };
                let scheduler = StepScheduler::new(settings, CostModel::new(&profile)?, shapes.clone(), 1)?;
                let arm: Arm = arm.parse()?;
                let (mut over, mut idle, mut seconds) = (0.0, 0.0, 0.0);
                for step in 0..NUM_STEPS {
                    let size = num_microbatches * SAMPLES_PER_MICROBATCH;
                    let batch: Vec<SampleIndex> = (step * size..(step + 1) * size).map(SampleIndex).collect();
                    let start = Instant::now();
                    let schedule = scheduler.schedule(u64::from(step), &batch, arm)?;
                    seconds += start.elapsed().as_secs_f64();
                    let timeline = scheduler.simulate(&schedule)?;
                    let mut busy = vec![0_u64; layout.num_ranks() as usize];
                    for span in &timeline.spans {
                        busy[span.rank.index()] += span.duration_ns();
                    }
                    let encoders = layout.encoder.num_ranks() as usize;
                    let encoder = busy[..encoders].iter().sum::<u64>() as f64 / encoders as f64;
                    let llm = busy[encoders..].iter().copied().max().unwrap_or(0) as f64;
                    over += timeline.makespan_ns as f64 / encoder.max(llm);
                    idle += timeline.bubble_ratio();
                }
                let mean = |sum: f64| sum / f64::from(NUM_STEPS);
                println!(
                    "{num_stages:>6} {num_microbatches:>12} {:<16} {:>10.3} {:>7.1}% {:>9.1} ms",
                    arm.to_string(),
                    mean(over),
                    100.0 * mean(idle),
                    1e3 * mean(seconds),
                );
                rows.push(serde_json::json!({
                    "num_stages": num_stages, "num_microbatches": num_microbatches, "arm": arm.to_string(),
                    "makespan_over_ideal": mean(over), "bubble_ratio": mean(idle), "schedule_seconds": mean(seconds),
                }));
            }
        }
    }
    if let Some(path) = std::env::args().nth(1) {
        std::fs::write(path, serde_json::to_string_pretty(&rows)?)?;
    }
    Ok(())
}

fn shapes(csv: &str) -> Result<Vec<SampleShape>, Box<dyn Error>> {
    csv.lines()
        .skip(1)
        .map(|line| {
            let number: Vec<u32> = line.split(',').skip(1).map(str::parse).collect::<Result<_, _>>()?;
            let [tiles, tokens, feature_tokens, llm_tokens, label_tokens] = number[..] else {
                return Err("a row of the mix has six fields".into());
            };
            let encoder_segments =
                if tiles == 0 { Vec::new() } else { vec![EncoderSegments { count: tiles, tokens }] };
            // A video is encoded frame by frame; its newline belongs to the last frame.
            let frame = |count, feature_tokens| EncoderParts { count, segments: 1, feature_tokens };
            let each = feature_tokens / tiles.max(1);
            let encoder_parts = if line.starts_with("video") && tiles > 1 {
                vec![frame(tiles - 1, each), frame(1, feature_tokens - (tiles - 1) * each)]
            } else {
                Vec::new()
            };
            Ok(SampleShape { encoder_segments, encoder_parts, feature_tokens, llm_tokens, label_tokens })
        })
        .collect()
}
