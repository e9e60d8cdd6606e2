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
/// Every part must be given, in any order. The answer is the profile that one process would have written: what is
/// done about samples that cannot be read (data.on_bad_sample) is decided here.
#[derive(Debug, Args)]
pub(crate) struct ProfileMerge {
    /// The parts
    #[arg(required = true, value_name = "PART")]
    pub(crate) parts: Vec<PathBuf>,
    /// Where to write, as in data_profile.parquet
    #[arg(short, long, value_name = "FILE")]
    pub(crate) out: PathBuf,
}

/// Say what changed between two data profiles, and whether a new plan is advised.
///
/// It is where the sizes of the samples are spread otherwise (Kolmogorov-Smirnov distance above 0.10), a mean moved
/// by more than 10 % or the share of a kind by more than 5 points, each beyond what chance does in 19 of 20 draws;
/// and where family, tokenizer or processor is another one. Exit status 0 when the profiles are alike, 1 when not.
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
/// Reads the sources of `data.mixture` (JSON, JSONL, Parquet, Arrow, tar shards), applies the model family's shape
/// rule and tokenizer, and prints what a person wants to know: kinds, percentiles, histograms, the heaviest samples,
/// what could not be read.
///
/// A second run reads only what changed: samples whose record is the same and whose media have the same sizes and
/// times of change are taken over from the profile that it replaces.
#[derive(Debug, Args)]
pub(crate) struct ProfileData {
    #[command(flatten)]
    pub(crate) config: ConfigArgument,
    /// Where to write [default: data_profile.parquet beside the configuration; of a shard data_profile-I-of-N.parquet]
    #[arg(short, long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
    /// Read the samples of `evaluation.mixture` instead [writes evaluation_profile.parquet unless --out says otherwise]
    #[arg(long)]
    pub(crate) evaluation: bool,
    /// Measure every sample, also those that the profile to be replaced has
    #[arg(long)]
    pub(crate) fresh: bool,
    /// Profile only N samples, drawn at random (train.seed) and in proportion from each file
    ///
    /// At least 1 of each file. Percentiles and means are printed with 95 % confidence intervals; `dflop plan` takes
    /// such a profile, `dflop train` does not.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), conflicts_with = "shard")]
    pub(crate) sample: Option<u64>,
    /// Profile only part I of N, I from 0: as in 0/8, the first of eight
    ///
    /// A part is a contiguous block of each file. The parts of all processes are joined by `dflop profile merge`.
    #[arg(long, value_name = "I/N", value_parser = part)]
    pub(crate) shard: Option<ProfilePart>,
}

/// The part that `text`, as in `0/8`, names.
fn part(text: &str) -> Result<ProfilePart, String> {
    let rule = "must be I/N with I from 0 to N - 1, as in 0/8";
    let (index, num_parts) = text.split_once('/').ok_or(rule)?;
    let number = |text: &str| text.parse::<u32>().map_err(|_| rule.to_owned());
    let part = ProfilePart { index: number(index)?, num_parts: number(num_parts)? };
    if part.index < part.num_parts { Ok(part) } else { Err(rule.to_owned()) }
}

/// Time the model's parts on this machine over a grid of sizes.
///
/// Real modules are built from the model's configuration; forward, backward and memory of each are measured.
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
    /// Data profile whose largest sizes end the grid [default: data_profile.parquet beside the configuration]
    #[arg(long, value_name = "FILE")]
    pub(crate) data_profile: Option<PathBuf>,
    /// Time to spend on measuring
    ///
    /// Few sizes are measured first, then more where a straight line between them is most likely wrong. Stopping
    /// early (Ctrl-C) keeps what there is.
    #[arg(long, value_name = "MINUTES", default_value_t = 10.0)]
    pub(crate) budget_minutes: f64,
    /// Likewise, in seconds
    #[arg(long, value_name = "SECONDS", conflicts_with = "budget_minutes")]
    pub(crate) budget_seconds: Option<f64>,
    /// What layers recompute in the backward: measured for each
    ///
    /// `selective` and `full` take more of the time; a plan uses what was measured.
    #[arg(long, value_name = "MODES", value_delimiter = ',', default_value = "none",
        value_parser = ["none", "selective", "full"])]
    pub(crate) recompute: Vec<String>,
    /// Tensor parallel degrees to measure, too
    ///
    /// Under torchrun with as many ranks on a node they are measured with what the ranks sum up (torchrun
    /// --nproc-per-node 2 --no-python dflop profile model --tensor-parallel 2); else one rank's part alone, and the sums
    /// are added from the network.
    #[arg(long, value_name = "DEGREES", value_delimiter = ',', default_value = "1",
        value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) tensor_parallel: Vec<u32>,
    /// Also measure with LoRA adapters of this rank on frozen weights; 0: not
    #[arg(long, value_name = "RANK", default_value_t = 0)]
    pub(crate) lora_rank: u32,
    /// Measure everything anew
    #[arg(long)]
    pub(crate) fresh: bool,
    /// Measure the links between ranks: point to point, all-reduce, all-gather, reduce-scatter, by message size
    ///
    /// Where there is a profile of this model, only its links are measured and replaced; else all of it is. Ranks are
    /// forked on a CPU, one each on the GPUs of this machine; under torchrun its own are taken, over all nodes:
    /// torchrun ... --no-python dflop profile model --network
    #[arg(long)]
    pub(crate) network: bool,
}

/// What `profile model --estimate` asks.
#[derive(Debug, Args)]
pub(crate) struct Estimate {
    /// Estimate instead of measuring: no device, no PyTorch, no weights; every number is marked as estimated
    #[arg(long = "estimate", id = "estimate")]
    pub(crate) is_wanted: bool,
    /// Device to estimate for, as in h100 (see dflop models)
    #[arg(long, value_name = "NAME", requires = "estimate")]
    pub(crate) hardware: Option<String>,
    /// Model of the catalogue, as in qwen2.5-vl-7b [default: config.json of model.dir]
    #[arg(long, value_name = "NAME", requires = "estimate")]
    pub(crate) model: Option<String>,
    /// Dtype of parameters and activations [default: model.dtype, else bfloat16]
    #[arg(long, value_name = "DTYPE", requires = "estimate", value_parser = ["bfloat16", "float32"])]
    pub(crate) dtype: Option<String>,
}
