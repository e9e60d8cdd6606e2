//! What is compared with Hugging Face.

// These comments are shown in a terminal as they stand, where backticks are noise.
#![allow(clippy::doc_markdown)]

use super::ConfigArgument;
use clap::Args;
use std::path::PathBuf;

const EXAMPLE: &str = "Examples:
  dflop check                      the whole model with its weights, four samples
  dflop check --layers 2           two layers of the LLM with random weights: large models on a laptop
  dflop check --sample coco-1177   a sample that you have doubts about";

/// Compare dflop with Hugging Face, on your model and samples: tokens, losses and gradients.
///
/// A few samples of the data profile go through transformers' own model and processors, each alone. Then dflop packs them into one
/// microbatch, as in training. Tokens, losses and gradients must be equal, module by module: then media are processed
/// alike, no packed sample sees another, and no loss is forgotten. Pictures, frames and sounds are decoded by dflop for both, and dflop
/// says for both which tokens have a loss. Everything runs in float32 on the CPU.
///
/// The command reads data_profile.parquet and needs neither a model profile nor a plan. It takes the memory of the parameters three times, in
/// float32. Exit status 0: all is equal; 1: something is not.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLE)]
pub(crate) struct Check {
    #[command(flatten)]
    pub(crate) config: ConfigArgument,
    /// Data profile [default: data_profile.parquet beside the configuration]
    #[arg(long, value_name = "FILE")]
    pub(crate) data_profile: Option<PathBuf>,
    /// Samples to check: of each kind of media those with the fewest tokens
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    pub(crate) samples: u32,
    /// A sample to check, by its id, instead of the smallest ones; may be given several times
    #[arg(long, value_name = "ID", conflicts_with = "samples")]
    pub(crate) sample: Vec<String>,
    /// Take only the first N layers of the LLM, with random weights [default: all, with the weights that training starts from]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(crate) layers: Option<u32>,
    /// How far a loss or gradient may be from its expected value, of its own size
    #[arg(long, value_name = "SHARE", default_value_t = 1e-4)]
    pub(crate) tolerance: f64,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}
