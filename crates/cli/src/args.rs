//! What can be asked on the command line; the help texts are the manual's first page.

// These comments are shown in a terminal as they stand, where backticks are noise.
#![allow(clippy::doc_markdown)]

mod answers;
mod check;
mod profile;
mod rehearse;
mod shell;

pub(crate) use answers::{
    Advise, CostSource, Costs, EstimateRuns, Order, Probe, RanksMeet, Schedule, Show, Simulate,
};
pub(crate) use check::Check;
use clap::{Args, Parser, Subcommand, ValueEnum};
use dflop_plan::{Objective, Only};
use dflop_step::Arm;
pub(crate) use profile::{Profile, ProfileData, ProfileDiff, ProfileMerge, ProfileModel};
pub(crate) use rehearse::Rehearse;
pub(crate) use shell::{Completions, Man};
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::PathBuf;

/// Makes multimodal-LLM training faster by looking at the data.
///
/// A sample may be a line of text or a 32-frame video. dflop measures what each costs, chooses a parallel
/// layout for the encoder and one for the LLM, and packs every global batch into balanced microbatches.
#[derive(Debug, Parser)]
#[command(
    name = "dflop",
    version,
    after_help = "The usual order:\n  dflop demo-data demo && cd demo     data, a tiny model and a dflop.yaml to start from\n  dflop profile data                  what each sample costs, no pixel decoded\n  dflop check                         losses and gradients as transformers has them, on your samples\n  dflop profile model                 how fast this machine runs the model\n  dflop plan                          which layout, how many microbatches, and why\n  dflop train                         train it\n  dflop export run --out trained      its weights, for from_pretrained\n  dflop report .                      look at it\n\nExit status: 0 done; 1 the inputs are valid but the answer is no; 2 wrong arguments or files, or an internal error."
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) verb: Verb,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    DemoData(DemoData),
    /// Measure the data or the model
    #[command(subcommand)]
    Profile(Profile),
    Plan(Plan),
    Simulate(Simulate),
    Schedule(Schedule),
    Costs(Costs),
    Advise(Advise),
    Check(Check),
    Estimate(EstimateRuns),
    Train(Train),
    Rehearse(Rehearse),
    Export(Export),
    Report(Report),
    Models(Models),
    Show(Show),
    Probe(Probe),
    Completions(Completions),
    Man(Man),
}

#[derive(Debug, Args)]
pub(crate) struct ConfigArgument {
    /// The configuration
    #[arg(short, long, value_name = "FILE", default_value = "dflop.yaml")]
    pub(crate) config: PathBuf,
}

/// Make a small multimodal dataset, a tiny model and a dflop.yaml to try everything on.
///
/// The samples are text, images, several images and video clips, as real encoded files. Sizes, durations and text lengths
/// are drawn from percentiles of public datasets. The same seed gives the same bytes.
#[derive(Debug, Args)]
pub(crate) struct DemoData {
    /// Where to write; made if missing
    pub(crate) dir: PathBuf,
    /// Samples to make
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(crate) samples: u32,
    /// Seed of everything that is drawn
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// Overwrite files of the same names, such as those of an earlier demo
    ///
    /// Files named demo_* in data/media are removed first, so that no file is left that no sample refers to. All other
    /// files stay, also profiles and plans.
    #[arg(long)]
    pub(crate) force: bool,
}

/// List the families and what can be done with each, and the models and devices that times can be estimated for.
///
/// Each number has its source. `--write` writes the configuration files of one model, which can serve as `model.dir` for
/// planning. It writes no weights and no tokenizer.
///
/// Data of any other family of transformers is measured with `family: transformers` below `model:` in dflop.yaml. Such a model
/// trains in a trainer of your own, by the sampler lines of `dflop.integrations` with `measure_cost` or
/// `cost_of_parameters`.
#[derive(Debug, Args)]
pub(crate) struct Models {
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Write config.json and preprocessor_config.json of the model NAME into the directory DIR, which is made if missing
    #[arg(long, num_args = 2, value_names = ["NAME", "DIR"], conflicts_with = "json")]
    pub(crate) write: Option<Vec<String>>,
}

// No comment that `--help` would show: it would take the place of the command's own.
#[derive(Debug, Args)]
pub(crate) struct InputFiles {
    #[command(flatten)]
    pub(crate) config: ConfigArgument,
    /// Data profile [default: data_profile.parquet beside the configuration]
    #[arg(long, value_name = "FILE")]
    pub(crate) data_profile: Option<PathBuf>,
    /// Model profile [default: model_profile.json beside the configuration]
    #[arg(long, value_name = "FILE")]
    pub(crate) model_profile: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct PlanFiles {
    #[command(flatten)]
    pub(crate) inputs: InputFiles,
    /// Plan [default: plan.json beside the configuration]
    #[arg(long, value_name = "FILE")]
    pub(crate) plan: Option<PathBuf>,
}

/// Choose the layout and the microbatches, and say why.
///
/// A rough estimate orders all candidates. The best of them are judged by the scheduler that training uses, on global
/// batches drawn from the data profile, and by the simulator. Candidates that do not fit are counted by cause.
#[derive(Debug, Args)]
pub(crate) struct Plan {
    #[command(flatten)]
    pub(crate) files: InputFiles,
    /// Where to write [default: plan.json beside the configuration, with --from-run plan.live.json]; a missing directory is made
    #[arg(short, long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
    /// Global batches to judge each candidate on [default: as many as hold 2,048 samples together, from 2 to 8]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) sampled_batches: Option<u32>,
    /// Rank plans by the mean step over the sampled batches, or by the 95th percentile: of fewer than 20 batches the slowest
    /// [default: `plan.objective` of the configuration, mean]
    #[arg(long, value_name = "mean|p95")]
    pub(crate) objective: Option<Objective>,
    /// Look at a part of the candidates only, for example `--only encoder.dp=2,llm.pp=4` or `--only colocated=true,zero=3`
    ///
    /// Fields: encoder.tp, encoder.pp, encoder.dp, llm.tp, llm.pp, llm.dp, llm.interleave (chunks of layers on each pipeline rank), llm.ep (ranks among which experts are dealt out), colocated
    /// (true, false), zero (0 to 3), recompute (none, selective, full, full:K: K layers of each stage) of both components, encoder.recompute, llm.recompute, cut (even, uneven), rank_order (tp-pp-dp: stages of a replica are neighbours; tp-dp-pp: replicas of a stage), shard_ranks
    /// (replicas over which ZeRO cuts: fewer than all of them hold copies beside each other).
    #[arg(long, value_name = "FIELD=VALUE,...", value_parser = only)]
    pub(crate) only: Option<Only>,
    /// Plan with the times that a run's steps took, and say what a change to the best plan gains, less the restart
    ///
    /// DIR is the run. The plan that it ran last is read from beside the configuration, or where that was changed or moved since, from
    /// the run's own copy. The run's spans renew the model profile (a factor for each component and
    /// kind of action); slow ranks and sizes of samples count too. The plan and the renewed profile are written to
    /// plan.live.json and model_profile.live.json, so that the run can go on as it is.
    #[arg(long, value_name = "DIR")]
    pub(crate) from_run: Option<PathBuf>,
    /// With --from-run: what it takes to start the ranks again and load the checkpoint [default: 60, assumed]
    #[arg(long, value_name = "SECONDS", requires = "from_run", value_parser = seconds)]
    pub(crate) restart_seconds: Option<f64>,
    /// Also search what people run today, on the same ranks and memory: Megatron, FSDP and the paper's system; and fewer ranks
    #[arg(long)]
    pub(crate) compare: bool,
    /// Explain one of the plans: where its time and memory go, and what the scheduler adds to the layout
    ///
    /// Give the plan's number in the printed list (1 is the plan that is written), or fields as for --only, for example
    /// zero=3,recompute=none: the best plan that has them is explained.
    #[arg(long, value_name = "NUMBER|FIELD=VALUE,...")]
    pub(crate) explain: Option<String>,
    /// Price of one device for one hour; prints what a run of --samples costs, and what the plan saves
    #[arg(long, value_name = "PRICE", requires = "samples", value_parser = price)]
    pub(crate) price_per_gpu_hour: Option<f64>,
    /// Number of samples of a run; prints how many hours it takes with the plan and with each baseline
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1_000_000_000_000))]
    pub(crate) samples: Option<u64>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Print what starts the training on the cluster, instead of the reasons for the plan
    #[arg(long, value_enum, value_name = "LAUNCHER", conflicts_with = "json")]
    pub(crate) emit: Option<Launcher>,
    /// Stop after this many seconds and take the best plan found
    ///
    /// Without a limit the search gives the same answer on any machine.
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub(crate) time_limit: Option<f64>,
    /// Judge every candidate that no certified bound rules out; takes minutes for 64 ranks
    #[arg(long)]
    pub(crate) exhaustive: bool,
}

/// What starts a training.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Launcher {
    /// The command for each node
    Torchrun,
    /// A job script
    Slurm,
    /// A manifest: a Job whose pods are the nodes
    Kubernetes,
    /// The nearest arguments of Megatron-LM, and what it cannot express
    Megatron,
    /// The nearest arguments of torchtitan, and what it cannot express
    Torchtitan,
}

/// The highest price of a device and hour, in any currency: what a run costs then still is a number that people read.
const PRICE_MAX: f64 = 1e6;

/// A price, more than 0.
fn price(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok().filter(|number| *number > 0.0 && *number <= PRICE_MAX);
    number.ok_or_else(|| format!("must be a number above 0, at most {PRICE_MAX}"))
}

/// A number of seconds, more than 0.
fn seconds(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok().filter(|number| number.is_finite() && *number > 0.0);
    number.ok_or_else(|| "must be a number of seconds above 0".to_owned())
}

/// Steps from the first to the last, both included; or one step.
fn steps(text: &str) -> Result<RangeInclusive<u64>, String> {
    let (first, last) = text.split_once("..").unwrap_or((text, text));
    let (first, last) = (first.parse::<u64>().ok(), last.parse::<u64>().ok());
    let steps = first.zip(last).filter(|(first, last)| first <= last);
    steps
        .map(|(first, last)| first..=last)
        .ok_or_else(|| "must be FIRST..LAST, as in 400..420, or one step".to_owned())
}

/// Train as planned (starts torchrun itself, or runs under one).
///
/// On one machine the command starts torchrun itself. Under an external torchrun (RANK and WORLD_SIZE are set) it runs as
/// that rank.
///
/// Ctrl-C, SIGTERM and SIGHUP end the run after the step that is running. A signal that was ignored when the command
/// started stays ignored (SIGHUP under nohup, Ctrl-C for a background job of a script); end such a run with SIGTERM. A run
/// that ends in one of these ways leaves a checkpoint in OUT/checkpoints, from which --resume goes on.
///
/// The schedule of the next step is computed while the current step trains. Metrics go to OUT/metrics.jsonl and
/// TensorBoard, spans to OUT/trace.jsonl, and the samples of every microbatch to OUT/schedules.jsonl. With --replay the
/// same schedules are trained again.
#[derive(Debug, Args)]
#[expect(clippy::struct_excessive_bools, reason = "a flag of the command line is a bool")]
pub(crate) struct Train {
    #[command(flatten)]
    pub(crate) files: PlanFiles,
    /// Directory of metrics and traces [default: run beside the configuration]
    #[arg(short, long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
    /// Data profile of `evaluation.mixture` [default: evaluation_profile.parquet beside the configuration]
    #[arg(long, value_name = "FILE")]
    pub(crate) evaluation_profile: Option<PathBuf>,
    /// Global batches to train [default: train.steps]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) steps: Option<u64>,
    /// Benchmark: train every global batch with each of --arms, interleaved
    ///
    /// Each batch is then trained several times. The order of the arms changes from batch to batch, so that no arm always
    /// comes after the same other arm.
    #[arg(long)]
    pub(crate) compare: bool,
    /// Ways to schedule, with --compare: blind, tokens, balanced, ordered, shaped, aware; each also with -ahead
    ///
    /// blind takes arrival order in equal counts; tokens balances LLM tokens; balanced balances the predicted times of
    /// encoder and LLM; ordered also searches the order of the microbatches, shaped also their sizes; aware also makes
    /// action lists for the step. With -ahead, forwards run ahead as far as memory allows. `dflop report` compares the
    /// faster of aware and aware-ahead with the fastest of blind, tokens, blind-ahead and tokens-ahead.
    #[arg(
        long,
        value_name = "ARMS",
        value_delimiter = ',',
        default_value = "blind,blind-ahead,tokens-ahead,aware,aware-ahead",
        requires = "compare"
    )]
    pub(crate) arms: Vec<Arm>,
    /// Rounds to train before measuring, with --compare; a round trains one global batch with every arm
    #[arg(long, value_name = "N", default_value_t = 2, requires = "compare")]
    pub(crate) warmup_pairs: u32,
    /// Train with the schedules of an earlier run, from its schedules.jsonl, instead of computing them
    ///
    /// Samples, microbatches and actions of every step are those of the log; if that run compared arms, this one does, too.
    /// The plan and the data must be those of that run. With the same configuration, losses on a CPU are equal bit by bit.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["compare", "steps"])]
    pub(crate) replay: Option<PathBuf>,
    /// Go on from a checkpoint: `auto` is the newest one in OUT (or the first step if there is none); or name a directory
    ///
    /// Training continues with the samples that would have come next, on any layout: each sample stands in schedules.jsonl
    /// exactly once an epoch. Steps that were trained after the checkpoint are trained again; their lines move to
    /// OUT/*.undone.jsonl. Data, seed and global batch size must be those of the checkpoint; the plan may be another.
    #[arg(long, value_name = "auto|DIR", conflicts_with_all = ["compare", "replay"])]
    pub(crate) resume: Option<PathBuf>,
    /// If a rank dies or hangs, start all ranks again from the newest checkpoint, at most N times in a row
    ///
    /// [default: 3 where checkpoint.every is set, else 0]. After a new checkpoint the count begins again at 0. Failures that
    /// would only repeat themselves (a damaged checkpoint, a full disk, gradients that are not finite, a bad sample) are not
    /// tried again. Under an external torchrun use torchrun's own --max-restarts, and `--resume auto` here.
    #[arg(long, value_name = "N", conflicts_with_all = ["compare", "replay"])]
    pub(crate) max_restarts: Option<u32>,
    /// Count the memory of each rank in this step and compare it with the prediction
    ///
    /// Steps count from 0, those of a warm-up included. The step must be at least 1, because the first update makes the
    /// optimizer's states. Slow on a CPU.
    #[arg(long, value_name = "STEP", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) measure_memory_step: Option<u64>,
    /// Allow more ranks than cores on a CPU; the measured times then mean nothing
    #[arg(long)]
    pub(crate) oversubscribe: bool,
    /// Allow a model profile of another processor or GPU; predicted times are then times of that device
    #[arg(long)]
    pub(crate) other_device: bool,
    /// Overwrite an earlier run in the same directory, its checkpoints too; what has another name than dflop gives stays
    #[arg(long)]
    pub(crate) force: bool,
}

/// Write the weights of a training run as a model directory that `from_pretrained` reads.
///
/// The command reads a checkpoint of the run, on any machine and without ranks, and writes safetensors files. Configuration,
/// tokenizer, processor and chat template are copied from the model that the run started from. The directory can be the
/// model.dir of the next run, to train in several stages: dflop export run --out model-2.
///
/// With train.recipe lora, the adapters are merged into the weights. --adapter writes only the adapters, as peft does.
#[derive(Debug, Args)]
pub(crate) struct Export {
    /// Directory of the run, for example `run`
    pub(crate) run: PathBuf,
    /// Where to write; made if missing
    #[arg(short, long, value_name = "DIR")]
    pub(crate) out: PathBuf,
    /// Export checkpoints/step-N, the weights after N steps [default: the last checkpoint]
    #[arg(long, value_name = "N")]
    pub(crate) step: Option<u64>,
    /// Dtype of the weights [default: that of the run: model.dtype]
    #[arg(long, value_name = "DTYPE", value_parser = ["float32", "bfloat16", "float16"])]
    pub(crate) dtype: Option<String>,
    /// The most bytes of one file (a larger tensor has a file of its own)
    #[arg(long, value_name = "BYTES", default_value_t = 5_000_000_000, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) shard_bytes_max: u64,
    /// Write only the LoRA adapters, as peft does, instead of merging them
    #[arg(long)]
    pub(crate) adapter: bool,
    /// Write into a directory that holds other files; files of the same names are overwritten
    #[arg(long)]
    pub(crate) force: bool,
}

/// Draw what is in a directory as one HTML page.
///
/// The page shows whatever the directory has of data_profile.parquet, model_profile.json, plan.json and run/ (or
/// rehearsal/). It is one file and works offline. After `dflop train --compare` the command also writes summary.json.
#[derive(Debug, Args)]
pub(crate) struct Report {
    /// The directory
    #[arg(default_value = ".")]
    pub(crate) dir: PathBuf,
    /// Directory of the run to show [default: DIR/run, or DIR/rehearsal if nothing was trained]
    #[arg(long, value_name = "DIR")]
    pub(crate) run: Option<PathBuf>,
    /// Hold the run against another one: numbers with differences and intervals, and the steps both trained, side by side
    ///
    /// DIR is another directory, or the directory of another run, for example run.before. Where layouts, data or steps differ, the
    /// report says so.
    #[arg(long, value_name = "DIR")]
    pub(crate) against: Option<PathBuf>,
    /// Where to write the page [default: DIR/report.html]; a missing directory is made
    #[arg(short, long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
    /// Also write a trace for ui.perfetto.dev
    ///
    /// The trace has the measured and the predicted spans of all steps. For a long run on many ranks it has the slowest and the last
    /// steps alone, some 60 MB, and a note says so.
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    /// With --trace: only these steps, as in 400..420
    #[arg(long, value_name = "FIRST..LAST", requires = "trace", value_parser = steps)]
    pub(crate) trace_steps: Option<RangeInclusive<u64>>,
    /// Also draw one global batch as the baselines and as dflop train it, as SVG
    #[arg(long, value_name = "FILE")]
    pub(crate) figure: Option<PathBuf>,
    /// Serve the page of a job that runs instead of writing it: it follows the run until Ctrl-C
    ///
    /// Nothing is written, and nothing but the page and its numbers (/metrics, for Prometheus) is served. Only this machine reaches
    /// it, unless --listen says otherwise; from elsewhere a tunnel does: ssh -L 8765:127.0.0.1:8765 HOST
    #[arg(long, conflicts_with_all = ["out", "trace", "figure"])]
    pub(crate) watch: bool,
    /// With --watch: address and port; port 0 takes a free one
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:8765", requires = "watch")]
    pub(crate) listen: SocketAddr,
}

/// Parts of a plan that are asked for, at least one.
fn only(text: &str) -> Result<Only, String> {
    if let Some(part) = text.split(',').find(|part| !part.trim().is_empty() && !part.contains('=')) {
        return Err(format!("`{}` has no value, must be FIELD=VALUE, as in `llm.pp=4`", part.trim()));
    }
    let only: Only = text.parse().map_err(|error: dflop_plan::ParseOnlyError| error.to_string())?;
    if only == Only::default() {
        Err("names no part of a plan, as in `llm.pp=4`".to_owned())
    } else {
        Ok(only)
    }
}
