//! `train:` of `dflop.yaml`.

use super::section::Section;
use dflop_step::{Arm, GiantPolicy};
use dflop_types::{PipelineOrder, Recipe};
use serde::Serialize;
use std::ops::RangeInclusive;

/// The name of an order that the plan chooses.
const AUTO: &str = "auto";

/// `train:`
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TrainSection {
    /// Samples of a global batch.
    pub global_batch_size: u32,
    /// Microbatches of a step on each LLM replica; `null`: the planner chooses.
    pub num_microbatches: Option<u32>,
    /// `alone`, `defer` or `refuse`: what becomes of giants, see [`dflop_step::GiantRule`].
    pub giants: String,
    /// Samples with more LLM tokens are giants; `null`: none is.
    pub giant_llm_tokens: Option<u64>,
    /// The most steps that a giant may be late under `defer`.
    pub giant_steps_max: u32,
    /// The most LLM tokens of a bucket (microbatch x LLM replica); `null`: no cap.
    pub bucket_tokens_max: Option<u64>,
    /// Optimizer steps (global batches).
    pub steps: u64,
    /// `bf16` or `fp32`: what forward and backward compute in; weights and states are kept in float32.
    pub precision: String,
    /// `none` or `layers`: what `torch.compile` compiles.
    pub compile: String,
    /// `AdamW`'s learning rate.
    pub learning_rate: f64,
    /// That of the encoder; `null`: `learning_rate`.
    pub encoder_learning_rate: Option<f64>,
    /// That of the projector; `null`: `learning_rate`.
    pub projector_learning_rate: Option<f64>,
    /// That of the LLM backbone; `null`: `learning_rate`.
    pub llm_learning_rate: Option<f64>,
    /// `constant`, `cosine`, `linear` or `constant-then-decay`: how the rates go after the warm-up.
    pub learning_rate_schedule: String,
    /// First steps, over which the rates rise to what they are.
    pub warmup_steps: u64,
    /// Last steps, over which the rates fall under `constant-then-decay`; `null`: a tenth of all.
    pub decay_steps: Option<u64>,
    /// `AdamW`'s weight decay, of all but norms and biases.
    pub weight_decay: f64,
    /// Steps in a row that may be skipped because their gradient is no finite number.
    pub skipped_steps_max: u64,
    /// A rank that waits longer than this for another gives up, in seconds; from the second step on.
    pub timeout_seconds: f64,
    /// The same until the first step has ended; `null`: 1800, or `timeout_seconds` where that is longer.
    pub first_timeout_seconds: Option<f64>,
    /// Global gradient norm is clipped to this; `null`: not clipped.
    pub max_grad_norm: Option<f64>,
    /// Name of a [`Recipe`]: what trains.
    pub recipe: String,
    /// Rank of the adapters under `lora`.
    pub lora_rank: u32,
    /// Scale of the adapters under `lora`: their product is multiplied by it over their rank.
    pub lora_alpha: f64,
    /// `pretrained`: parameters are read from the model's directory; `random`: drawn with the seed.
    pub init: String,
    /// Seed of random parameters, order of samples and schedules.
    pub seed: u64,
    /// Name of an [`Arm`]: how a run that is no comparison schedules.
    pub schedule: String,
    /// Schedules computed ahead, that of the step to come included.
    pub prefetch_depth: u32,
    /// `auto`, `on` or `off`: whether measured times correct the costs that schedules are made with.
    pub correction: String,
    /// Processes of a rank that decode media ahead of need; 0: threads of the rank decode.
    pub workers: u32,
    /// Project of Weights & Biases that metrics are sent to; `null`: none.
    pub wandb_project: Option<String>,
    /// `auto`, or the name of a [`PipelineOrder`].
    pub pipeline_order: String,
}

impl TrainSection {
    /// Limits of `global_batch_size`.
    pub(crate) const GLOBAL_BATCH_SIZE: RangeInclusive<u64> = 1..=1 << 24;
    /// Limits of `num_microbatches`.
    pub(crate) const NUM_MICROBATCHES: RangeInclusive<u64> = 1..=1 << 16;
    /// Limits of `bucket_tokens_max`.
    pub(crate) const BUCKET_TOKENS_MAX: RangeInclusive<u64> = 1..=1 << 40;
}

impl TrainSection {
    /// Whether layers are compiled, in training and in the profile.
    pub fn compiles_layers(&self) -> bool {
        self.compile == "layers"
    }

    /// The order of a pipeline's actions that is asked for; `None`: the plan chooses.
    pub fn order(&self) -> Option<PipelineOrder> {
        // The name was checked when the file was read.
        match self.pipeline_order.as_str() {
            "1f1b" => Some(PipelineOrder::OneFOneB),
            "gpipe" => Some(PipelineOrder::GPipe),
            "zero-bubble" => Some(PipelineOrder::ZeroBubble),
            "data-aware" => Some(PipelineOrder::DataAware),
            _ => None,
        }
    }
}

/// The fields of `train:`.
pub(super) fn train_section(section: &mut Section<'_, '_>) -> TrainSection {
    let train = TrainSection {
        global_batch_size: section.count("global_batch_size", TrainSection::GLOBAL_BATCH_SIZE, None) as u32,
        num_microbatches: section
            .optional_count("num_microbatches", TrainSection::NUM_MICROBATCHES)
            .map(|m| m as u32),
        giants: section.parsed("giants", GiantPolicy::Alone).to_string(),
        giant_llm_tokens: section.optional_count("giant_llm_tokens", 1..=1 << 40),
        giant_steps_max: section.count("giant_steps_max", 1..=1_000_000, Some(7)) as u32,
        bucket_tokens_max: section.optional_count("bucket_tokens_max", TrainSection::BUCKET_TOKENS_MAX),
        steps: section.count("steps", 1..=1 << 40, None),
        precision: section.choice("precision", &["bf16", "fp32"], ""),
        compile: section.choice("compile", &["none", "layers"], "none"),
        learning_rate: section.number("learning_rate", 0.0..=1e3, 1e-4),
        encoder_learning_rate: section.optional_number("encoder_learning_rate", 0.0..=1e3),
        projector_learning_rate: section.optional_number("projector_learning_rate", 0.0..=1e3),
        llm_learning_rate: section.optional_number("llm_learning_rate", 0.0..=1e3),
        learning_rate_schedule: section.choice(
            "learning_rate_schedule",
            &["constant", "cosine", "linear", "constant-then-decay"],
            "constant",
        ),
        warmup_steps: section.count("warmup_steps", 0..=1 << 40, Some(0)),
        decay_steps: section.optional_count("decay_steps", 1..=1 << 40),
        weight_decay: section.number("weight_decay", 0.0..=1e3, 0.0),
        max_grad_norm: section.optional_number("max_grad_norm", f64::MIN_POSITIVE..=1e12),
        recipe: section.parsed("recipe", Recipe::Full).to_string(),
        lora_rank: section.count("lora_rank", 1..=1 << 16, Some(Recipe::LORA_RANK.into())) as u32,
        lora_alpha: section.number("lora_alpha", f64::MIN_POSITIVE..=1e6, 32.0),
        init: section.choice("init", &["pretrained", "random"], "pretrained"),
        skipped_steps_max: section.count("skipped_steps_max", 0..=1 << 40, Some(2)),
        timeout_seconds: section.number("timeout_seconds", 1.0..=1e6, 600.0),
        first_timeout_seconds: section.optional_number("first_timeout_seconds", 1.0..=1e6),
        seed: section.count("seed", 0..=1 << 53, Some(0)),
        schedule: section.parsed("schedule", Arm::AWARE).to_string(),
        prefetch_depth: section.count("prefetch_depth", 1..=1_000, Some(2)) as u32,
        correction: section.choice("correction", &["auto", "on", "off"], "auto"),
        workers: section.count("workers", 0..=256, Some(2)) as u32,
        wandb_project: section.optional_text("wandb_project"),
        pipeline_order: section.choice(
            "pipeline_order",
            &[AUTO, "1f1b", "gpipe", "zero-bubble", "data-aware"],
            AUTO,
        ),
    };
    if train.giants == GiantPolicy::Defer.to_string() && train.giant_llm_tokens.is_none() {
        section.problem_at("giants", "`defer` needs `train.giant_llm_tokens`: which samples wait".to_owned());
    }
    if train.compiles_layers() && train.order() == Some(PipelineOrder::ZeroBubble) {
        section.problem_at(
            "compile",
            "`layers`, must be `none` beside `train.pipeline_order: zero-bubble`: compiled layers run their backward \
             in one piece"
                .to_owned(),
        );
    }
    if let Some(first) = train.first_timeout_seconds.filter(|first| *first < train.timeout_seconds) {
        let later = train.timeout_seconds;
        let message = format!("{first}, must be at least `train.timeout_seconds`, which is {later}");
        section.problem_at("first_timeout_seconds", message);
    }
    train
}

/// Fills in `model.dtype` and `train.precision`, each from the other or from the device: profiles are measured in the
/// type that training computes in. Else the rule that both together break.
pub(super) fn settle_precision(
    dtype: &mut String,
    precision: &mut String,
    device: &str,
) -> Result<(), String> {
    const NAMES: [(&str, &str); 2] = [("bfloat16", "bf16"), ("float32", "fp32")];
    if dtype.is_empty() {
        let of_precision = NAMES.iter().find(|(_, short)| short == precision).map(|(long, _)| *long);
        let of_device = if device == "cuda" { "bfloat16" } else { "float32" };
        of_precision.unwrap_or(of_device).clone_into(dtype);
    }
    // What is no type is a problem of its own.
    let Some((_, short)) = NAMES.iter().find(|(long, _)| long == dtype) else { return Ok(()) };
    if precision.is_empty() {
        (*short).clone_into(precision);
    }
    match NAMES.iter().find(|(_, known)| known == precision) {
        Some((_, known)) if known != short => Err(format!(
            "`{precision}`, must be `{short}`: `model.dtype` is `{dtype}`, in which profiles are measured"
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::parse;
    use super::super::tests::GOOD;
    use std::path::Path;

    #[test]
    fn compiled_layers_do_not_split_backwards() {
        let of = |train: &str| {
            let text = GOOD.replace("steps: 4", &format!("steps: 4, {train}"));
            parse(Path::new("dflop.yaml"), &text)
                .map(|config| config.train.compile)
                .map_err(|error| error.to_string())
        };
        assert_eq!(of("seed: 0"), Ok("none".to_owned()));
        assert_eq!(of("compile: layers, pipeline_order: data-aware"), Ok("layers".to_owned()));
        let text = of("compile: layers, pipeline_order: zero-bubble").unwrap_err();
        assert!(text.contains("line 4: train.compile: `layers`, must be `none` beside"), "{text}");
        let text = of("compile: all").unwrap_err();
        assert!(text.contains("train.compile: `all`, must be one of: none, layers"), "{text}");
    }
}
