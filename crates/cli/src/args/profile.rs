//! What `dflop profile` can be asked.

use super::ConfigArgument;
use clap::{Args, Subcommand};
use dflop_types::ProfilePart;
use std::path::PathBuf;

#[derive(Debug, Subcommand)]
pub(crate) enum Profile {
    Data(ProfileData),
    Model(ProfileModel),
    Merge(ProfileMerge),
    Diff(ProfileDiff),
}

/// Join the parts of a data profile that several processes made.
///
/// Every part must be given, in any order. The result is the profile that one process would have written. What happens to
/// samples that cannot be read (data.on_bad_sample) is decided here.
#[derive(Debug, Args)]
pub(crate) struct ProfileMerge {
    /// The parts
    #[arg(required = true, value_name = "PART")]
    pub(crate) parts: Vec<PathBuf>,
    /// Where to write, for example data_profile.parquet
    #[arg(short, long, value_name = "FILE")]
    pub(crate) out: PathBuf,
}

/// Say what changed between two data profiles, and whether a new plan is advised.
///
/// A new plan is advised if the distribution of a size changed (Kolmogorov-Smirnov distance above 0.10), a mean moved by
/// more than 10 %, or the share of a kind moved by more than 5 points; each only if the change is larger than what chance
/// causes in 19 of 20 draws. It is also advised if family, tokenizer or processor differ. The exit status is 0 if the
/// profiles are alike, and 1 if not. Where they are alike but samples differ, the layout of the old plan still suits;
/// `dflop train` asks for a plan of the new samples all the same.
#[derive(Debug, Args)]
pub(crate) struct ProfileDiff {
    /// The profile before
    pub(crate) before: PathBuf,
    /// The profile after
    pub(crate) after: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Read each sample's sizes from file headers and count its tokens; no pixel is decoded.
///
/// The command reads the sources of `data.mixture` (JSON, JSONL, Parquet, Arrow, tar shards) and applies the model family's
/// shape rule and tokenizer. It prints kinds, percentiles, histograms, the heaviest samples, and what could not be read.
///
/// A second run measures only what changed: a sample is taken over from the previous profile if its record is the same and
/// its media have the same sizes and times of change.
#[derive(Debug, Args)]
pub(crate) struct ProfileData {
    #[command(flatten)]
    pub(crate) config: ConfigArgument,
    /// Where to write [default: data_profile.parquet beside the configuration; with --shard data_profile-I-of-N.parquet]
    #[arg(short, long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
    /// Read the samples of `evaluation.mixture` instead; writes evaluation_profile.parquet unless --out is given
    #[arg(long)]
    pub(crate) evaluation: bool,
    /// Measure every sample again, also those that the previous profile has
    #[arg(long)]
    pub(crate) fresh: bool,
    /// Profile only N samples, drawn at random (train.seed) and in proportion from each file
    ///
    /// At least 1 sample of each file is drawn. Percentiles and means are printed with 95 % confidence intervals. `dflop plan`
    /// takes such a profile, `dflop train` does not.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), conflicts_with = "shard")]
    pub(crate) sample: Option<u64>,
    /// Profile only part I of N; I counts from 0, so 0/8 is the first of eight
    ///
    /// A part is a contiguous block of each file. The parts of all processes are joined by `dflop profile merge`.
    #[arg(long, value_name = "I/N", value_parser = part)]
    pub(crate) shard: Option<ProfilePart>,
}

/// The part that `text` names, for example `0/8`.
fn part(text: &str) -> Result<ProfilePart, String> {
    let rule = "must be I/N with I from 0 to N - 1, as in 0/8";
    let (index, num_parts) = text.split_once('/').ok_or(rule)?;
    let number = |text: &str| text.parse::<u32>().map_err(|_| rule.to_owned());
    let part = ProfilePart { index: number(index)?, num_parts: number(num_parts)? };
    if part.index < part.num_parts { Ok(part) } else { Err(rule.to_owned()) }
}

/// Time the model's parts on this machine over a grid of sizes.
///
/// The command builds real modules from the model's configuration and measures forward, backward and memory of each.
/// Points already measured are kept: after Ctrl-C the same command goes on where it stopped.
#[derive(Debug, Args)]
pub(crate) struct ProfileModel {
    #[command(flatten)]
    pub(crate) config: ConfigArgument,
    #[command(flatten)]
    pub(crate) estimate: Estimate,
    /// Where to write [default: model_profile.json beside the configuration]
    #[arg(short, long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
    /// Data profile that says up to which sizes to measure [default: data_profile.parquet beside the configuration]
    #[arg(long, value_name = "FILE")]
    pub(crate) data_profile: Option<PathBuf>,
    /// Renew the profile by the steps of a run instead of measuring [writes model_profile.live.json unless --out says otherwise]
    ///
    /// DIR is the run of the plan beside the configuration, or of the copies of plan and profile that it keeps. Each module takes what its component took in the last steps, by kind
    /// of action; memory, links and optimizer stay. The profile says so, wherever it is shown.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["estimate", "fresh", "network"])]
    pub(crate) from_run: Option<PathBuf>,
    /// Time to spend on measuring layers
    ///
    /// A few sizes are measured first, then more where a straight line between them is most likely wrong. If you stop
    /// early (Ctrl-C), what was measured is kept. A least number of runs of each size is made even if they take longer.
    /// The time does not count PyTorch's start, the building of the modules, the first run of each size, the links between
    /// ranks, the optimizer and memory: the command says what it took in all. On a CPU the neighbours of the rank that
    /// measures are kept busy meanwhile, so CPU time is up to ranks of a node times as much.
    #[arg(long, value_name = "MINUTES", default_value_t = 10.0)]
    pub(crate) budget_minutes: f64,
    /// Time to spend on measuring layers, in seconds; see --budget-minutes for what it does not count
    #[arg(long, value_name = "SECONDS", conflicts_with = "budget_minutes")]
    pub(crate) budget_seconds: Option<f64>,
    /// Modes of recomputation to measure: what layers compute again in the backward
    ///
    /// `selective` and `full` take time from the other measurements. A plan can use only modes that were measured.
    #[arg(long, value_name = "MODES", value_delimiter = ',', default_value = "none",
        value_parser = ["none", "selective", "full"])]
    pub(crate) recompute: Vec<String>,
    /// Tensor parallel degrees to measure
    ///
    /// Under torchrun with as many ranks on a node, a degree is measured together with the sums over its ranks (torchrun
    /// --nproc-per-node 2 --no-python dflop profile model --tensor-parallel 2). Else only one rank's part is measured, and
    /// predictions add the sums from the measured network.
    #[arg(long, value_name = "DEGREES", value_delimiter = ',', default_value = "1",
        value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) tensor_parallel: Vec<u32>,
    /// Also measure with LoRA adapters of this rank on frozen weights; 0: do not
    ///
    /// With --estimate, 0 is train.lora_rank where train.recipe is lora.
    #[arg(long, value_name = "RANK", default_value_t = 0)]
    pub(crate) lora_rank: u32,
    /// Measure everything again
    #[arg(long)]
    pub(crate) fresh: bool,
    /// Measure the links between ranks: point to point, all-reduce, all-gather, reduce-scatter, by message size
    ///
    /// If there is already a profile of this model, only its links are measured and replaced; else everything is measured.
    /// Without torchrun the ranks are processes on this machine: on a CPU forked ones, with GPUs one for each GPU. Under
    /// torchrun its ranks are used, over all nodes: torchrun ... --no-python dflop profile model --network
    #[arg(long)]
    pub(crate) network: bool,
}

/// What `profile model --estimate` asks.
#[derive(Debug, Args)]
pub(crate) struct Estimate {
    /// Estimate instead of measuring; needs no device, no PyTorch and no weights. Every number is marked as estimated
    #[arg(long = "estimate", id = "estimate")]
    pub(crate) is_wanted: bool,
    /// Device to estimate for, for example h100 (see dflop models)
    #[arg(long, value_name = "NAME", requires = "estimate")]
    pub(crate) hardware: Option<String>,
    /// Model of the catalogue, for example qwen2.5-vl-7b [default: config.json of model.dir]
    #[arg(long, value_name = "NAME", requires = "estimate")]
    pub(crate) model: Option<String>,
    /// Dtype of parameters and activations [default: model.dtype, else bfloat16]
    #[arg(long, value_name = "DTYPE", requires = "estimate", value_parser = ["bfloat16", "float32"])]
    pub(crate) dtype: Option<String>,
}
