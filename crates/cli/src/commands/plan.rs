//! `dflop plan`: profiles and cluster in, the plan and its reasons out.

use super::{Inputs, out_path, progress_bar, write};
use crate::Failure;
use crate::args;
use dflop_plan::{SearchEffort, SearchInput, explain, search};
use dflop_types::{PipelineOrder, Plan, artifact, thousands};
use std::time::Instant;

/// Samples of the global batches that candidates are judged on, unless told.
const SAMPLES: u32 = 2_048;

pub(super) fn run(arguments: &args::Plan) -> Result<(), Failure> {
    let start = Instant::now();
    let inputs = Inputs::read(&arguments.files)?;
    inputs.note_device();
    let config = &inputs.config;
    let out = out_path::<Plan>(config, arguments.out.as_ref(), "plan.json")?;
    if !inputs.data_profile.strata.is_empty() {
        let population: u64 = inputs.data_profile.strata.iter().map(|stratum| stratum.population).sum();
        talk!(
            "note: planned with a random sample: {} of {} samples; training needs the profile of all",
            thousands(inputs.data_profile.samples.len() as u64),
            thousands(population)
        );
    }
    let (num_samples, asked) = (inputs.data_profile.samples.len() as u64, config.train.global_batch_size);
    if inputs.data_profile.strata.is_empty() && num_samples < u64::from(asked) {
        talk!(
            "note: the data has {} samples, fewer than `train.global_batch_size` {}: every step takes all of them",
            thousands(num_samples),
            thousands(u64::from(asked))
        );
    }
    let made_from = [
        ("data_profile", inputs.data_profile.content_hash()),
        ("model_profile", artifact::hash_of(&inputs.model_profile)),
    ];
    let bar = progress_bar(0, "judging candidates");
    let outcome = search(&SearchInput {
        shapes: inputs.data_profile.samples.iter().map(|s| s.shape.clone()).collect(),
        model_profile: &inputs.model_profile,
        cluster: config.cluster(),
        global_batch_size: config.train.global_batch_size,
        num_microbatches: config.train.num_microbatches,
        giants: config.giants(),
        bucket_tokens_max: config.train.bucket_tokens_max,
        trained: config.trained(),
        order: match config.train.pipeline_order.as_str() {
            "gpipe" => PipelineOrder::GPipe,
            "zero-bubble" => PipelineOrder::ZeroBubble,
            "data-aware" => PipelineOrder::DataAware,
            _ => PipelineOrder::OneFOneB,
        },
        num_sampled_batches: arguments
            .sampled_batches
            .unwrap_or_else(|| (SAMPLES / config.train.global_batch_size.max(1)).clamp(2, 8)),
        only: arguments.only.clone().unwrap_or_default(),
        effort: if arguments.exhaustive { SearchEffort::Whole } else { SearchEffort::Quick },
        halt: &|| arguments.time_limit.is_some_and(|seconds| start.elapsed().as_secs_f64() > seconds),
        seed: config.train.seed,
        made_from: made_from.into_iter().map(|(name, hash)| (name.to_owned(), hash)).collect(),
        progress: &|done, total| {
            bar.set_length(total);
            bar.set_position(done);
        },
    })?;
    bar.finish_and_clear();
    let text = explain(&outcome);
    let Some(plan) = outcome.plan() else {
        return Err(Failure::answer(text, outcome.hint()));
    };
    out!("{text}");
    write(&out, &plan)
}
