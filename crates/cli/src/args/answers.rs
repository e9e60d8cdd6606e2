//! What is answered without a plan or beside one: times, costs, predictions, balanced buckets, what files hold.

// These comments are shown in a terminal as they stand, where backticks are noise.
#![allow(clippy::doc_markdown)]

use super::{ConfigArgument, PlanFiles};
use crate::advice::code::Trainer;
use crate::commands::what_if::{Setting, setting};
use clap::{ArgGroup, Args, ValueEnum};
use dflop_types::Recipe;
use std::path::PathBuf;

const SIMULATE_EXAMPLE: &str = r#"Example, with times of I and W for the orders that split the backward:
  echo '{"forward_ns": [[10, 12], [11, 10]], "backward_ns": [[20, 24], [22, 20]], "transfer_ns": 1,
    "input_ns": [[10, 12], [11, 10]], "weight_ns": [[10, 12], [11, 10]]}' > durations.json
  dflop simulate --durations durations.json --order zero-bubble --trace trace.json"#;

/// A number of ranks that clusters are simulated with.
fn number_of_ranks(text: &str) -> Result<u32, String> {
    let known = text.parse().ok().filter(|ranks| (2..=4096).contains(ranks));
    known.ok_or_else(|| "must be whole numbers from 2 to 4096, as in 8,16,32".to_owned())
}

/// Time a step without running it: a plan on its data, or durations from a file.
///
/// Without `--durations` the command simulates the plan beside the configuration, on global batches of its data, scheduled
/// by dflop and by the baselines. With `--durations` it simulates one pipeline whose durations a file gives. That pipeline
/// has one rank for each stage; an interleaved one has `--ranks` ranks.
///
/// Idle time has these causes. Ramp is filling and draining the pipeline: the idle time that the same order has if every
/// action of a kind takes its mean time. Imbalance is what the real durations add. Transfer is waiting for data that is
/// under way between ranks. `ideal` is the work of the busiest rank: no order of the same actions is faster.
#[derive(Debug, Args)]
#[command(after_long_help = SIMULATE_EXAMPLE)]
pub(crate) struct Simulate {
    #[command(flatten)]
    pub(crate) files: PlanFiles,
    /// JSON file {"forward_ns": [[one time for each microbatch] for each stage], "backward_ns": same, "transfer_ns": n};
    /// also "input_ns" and "weight_ns" where the backward can be split
    #[arg(long, value_name = "FILE", conflicts_with_all = ["config", "data_profile", "model_profile", "plan", "steps"])]
    pub(crate) durations: Option<PathBuf>,
    /// Pipeline order, with --durations
    #[arg(long, value_enum, default_value_t = Order::OneFOneB, requires = "durations")]
    pub(crate) order: Order,
    /// Number of ranks, with --order interleaved-1f1b: stage s is on rank s modulo N
    #[arg(long, value_name = "N", requires = "durations", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) ranks: Option<u32>,
    /// Global batches to simulate, without --durations
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(crate) steps: u32,
    /// Simulate clusters with these numbers of ranks instead, for example 8,16,32; samples for each rank stay as in the plan
    ///
    /// For each number a quick search chooses the layout, with the plan's number of microbatches. Links between ranks are
    /// those of the model profile.
    #[arg(
        long,
        value_name = "RANKS",
        value_delimiter = ',',
        conflicts_with_all = ["durations", "steps", "trace"],
        value_parser = number_of_ranks
    )]
    pub(crate) num_ranks: Vec<u32>,
    /// Plan under other conditions, for example --set cluster.num_ranks=64,128 --set data.weights.video=0.4
    ///
    /// A new plan is searched for each combination of the values; plan.json is not needed. Fields: cluster.num_ranks,
    /// cluster.ranks_per_node, cluster.device (a device that dflop models lists), cluster.memory_budget_bytes,
    /// network.cluster_bytes_per_s, network.node_bytes_per_s, train.global_batch_size (without it, the number of samples
    /// for each rank stays), train.num_microbatches, train.bucket_tokens_max, train.recipe, data.llm_tokens_max (samples with
    /// more LLM tokens are left out and counted; none is cut), data.weights.KIND (which fraction of the samples is text, image,
    /// multi_image, video or audio). A row is judged on the global batches that dflop plan takes. Values have the limits that dflop.yaml has for the field;
    /// a step may have 16,384 samples, or as many as the data has. If no combination has a plan, the exit status is 1.
    #[arg(long, value_name = "FIELD=VALUES", value_parser = setting, conflicts_with_all = ["durations", "num_ranks", "trace"])]
    pub(crate) set: Vec<Setting>,
    /// Write the rows of --set as CSV; a missing directory is made
    #[arg(long, value_name = "FILE", requires = "set")]
    pub(crate) csv: Option<PathBuf>,
    /// Draw the rows of --set as an SVG: samples a second over the first field, a line for each combination of the others; a
    /// missing directory is made
    #[arg(long, value_name = "FILE", requires = "set")]
    pub(crate) plot: Option<PathBuf>,
    /// Also write a trace for ui.perfetto.dev
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum Order {
    /// All forwards, then all backwards
    #[value(name = "gpipe")]
    GPipe,
    /// One forward, one backward
    #[value(name = "1f1b")]
    OneFOneB,
    /// 1F1B with several stages on each rank; needs --ranks
    #[value(name = "interleaved-1f1b")]
    Interleaved,
    /// 1F1B with the backward in two halves, whose second half (W) fills idle time; needs "input_ns" and "weight_ns"
    #[value(name = "zero-bubble")]
    ZeroBubble,
    /// Lists made for these durations, with at most as many microbatches in flight as 1F1B; splits the backward if the file
    /// has "input_ns" and "weight_ns"
    #[value(name = "data-aware")]
    DataAware,
}

/// Print what each sample costs on the encoder and on the LLM, as CSV.
///
/// The costs come from a data profile and the model profile beside it, or from a model of the catalogue and a device
/// (dflop models lists both). The columns are those that dflop schedule --costs reads, and the position of each sample in
/// the dataset. A time is what the sample adds to forward and backward of a microbatch of mean samples, in nanoseconds.
/// Bytes are the activations that the sample adds to a rank with both components.
#[derive(Debug, Args)]
pub(crate) struct Costs {
    /// The data profile
    #[arg(value_name = "DATA_PROFILE", default_value = "data_profile.parquet")]
    pub(crate) data_profile: PathBuf,
    #[command(flatten)]
    pub(crate) source: CostSource,
    /// About how many samples a microbatch has; the cost of a sample is what it adds to a microbatch of that size
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) batch_size: u32,
}

// No comment that `--help` would show: it would take the place of the command's own.
#[derive(Debug, Args)]
pub(crate) struct CostSource {
    /// The model profile [default: model_profile.json beside the data profile]
    #[arg(long, value_name = "FILE", conflicts_with = "model")]
    pub(crate) model_profile: Option<PathBuf>,
    /// A model of the catalogue, for example qwen2.5-vl-7b, instead of a model profile
    #[arg(long, value_name = "NAME", requires = "hardware")]
    pub(crate) model: Option<String>,
    /// The device to estimate, for example h100
    #[arg(long, visible_alias = "device", value_name = "NAME", requires = "model")]
    pub(crate) hardware: Option<String>,
    /// Dtype of parameters and activations, with --model
    #[arg(long, value_name = "DTYPE", default_value = "bfloat16", value_parser = ["bfloat16", "float32"])]
    pub(crate) dtype: String,
    /// What trains: full, projector, frozen-encoder, frozen-llm or lora [default: that of a dflop.yaml, else full]
    #[arg(long, value_name = "RECIPE", value_parser = |text: &str| text.parse::<Recipe>())]
    pub(crate) recipe: Option<Recipe>,
    /// Rank of the adapters, with --recipe lora
    #[arg(long, value_name = "N", default_value_t = Recipe::LORA_RANK, requires = "recipe", value_parser = clap::value_parser!(u32).range(1..=1 << 16))]
    pub(crate) lora_rank: u32,
}

const ESTIMATE_EXAMPLE: &str = r"Example: three ways to run one model on 8 GPUs
  cat > runs.csv <<'END'
  gpu,gpus,global_batch_sequences,micro_batch_sequences,hidden_size,attention_heads,layers,sequence_tokens,tensor_parallel,data_parallel,pipeline_parallel
  A100,8,64,1,2048,16,24,1024,1,8,1
  A100,8,64,1,2048,16,24,1024,2,4,1
  A100,8,64,1,2048,16,24,1024,1,4,2
  END
  dflop estimate --runs runs.csv --out predicted.csv

Columns that every table has: gpu (or --device), gpus, global_batch_sequences, micro_batch_sequences, hidden_size,
attention_heads, layers, sequence_tokens, tensor_parallel, data_parallel, pipeline_parallel.
Columns that it may have [what holds without them]: microbatches_per_step, virtual_stages_per_rank [1], gpus_per_node [8],
activation_recompute [none], pipeline_schedule [1f1b], gradient_bucketing [0], kv_heads [attention_heads], head_size
[hidden_size / attention_heads], ffn_hidden_size [4 x hidden_size], gated_mlp [0], linear_bias [1], normalization
[LayerNorm], position_embedding [learned_absolute], vocab_size [50257], vocab_size_padded [to 128 x tensor_parallel; 50257 as
it is on one rank], tied_embeddings [1], sequence_parallel [0], dtype [16 bit], gradient_dtype [that of the parameters],
optimizer [adam], distributed_optimizer [0], overlap_grad_reduce [0], attention_backend [unfused], dropout [0.1],
memory_rank_stage [the fullest rank].
A table with attention_backend is taken as one of Megatron-Core, else as one of Megatron-DeepSpeed of 2022, whose host starts
kernels more slowly.";

/// Predict step time and memory of runs of text-only GPT models: read a CSV, write it with predictions.
///
/// Each row is one run: a model, a number of GPUs, and how Megatron cuts the model over them. dflop estimates the modules
/// (dflop models has the sources) and simulates the pipeline. It fills in predicted_ms, predicted_peak_bytes (as PyTorch's
/// allocator counts: without context and fragmentation) and predicted_basis, which says `estimated`. If the table also
/// holds measurements (iteration_ms or step_ms_median, peak_allocated_bytes), the error is printed. A run that
/// Megatron cannot do (layers or heads that cannot be divided evenly) is left blank and counted.
#[derive(Debug, Args)]
#[command(after_long_help = ESTIMATE_EXAMPLE)]
pub(crate) struct EstimateRuns {
    /// The table of runs
    #[arg(long, value_name = "FILE", required_unless_present = "device")]
    pub(crate) runs: Option<PathBuf>,
    /// Where to write the table with predictions
    #[arg(short, long, value_name = "FILE", requires = "runs")]
    pub(crate) out: Option<PathBuf>,
    /// Device for rows that name none, for example A100 or H100; `list` prints the known devices
    #[arg(long, visible_alias = "hardware", value_name = "NAME")]
    pub(crate) device: Option<String>,
}

const ADVISE_EXAMPLE: &str = r#"Examples:
  dflop advise --model qwen2.5-vl-7b --hardware h100 --num-ranks 64 --batch-size 4
  dflop advise dflop.yaml --trainer fsdp2
  dflop advise dflop.yaml --trainer axolotl
  python -c 'import dflop; dflop.costs("data_profile.parquet").write_csv("costs.csv")'
  dflop advise data_profile.parquet --costs costs.csv --num-ranks 64
  printf 'step,rank,ms\n0,0,310\n0,1,455\n1,0,390\n1,1,402\n' > log.csv
  dflop advise --step-times log.csv"#;

/// Say what balanced batches would give your data-parallel trainer, before you change it.
///
/// The command needs a data profile and the costs of its samples (from a model profile or a model of the catalogue, see
/// dflop costs). It simulates the steps of your ranks with each way to distribute samples: in arrival order, grouped by
/// length, packed by tokens, by dflop's first line (balanced batches), and by both lines (the encoder's work shared out as
/// well). It prints each step over the work bound, the gain over the best of the first three ways, and the lines of code to
/// add.
///
/// From a log of step times alone (--step-times) it only says how long the ranks wait for the slowest one.
#[derive(Debug, Args)]
#[command(after_long_help = ADVISE_EXAMPLE)]
pub(crate) struct Advise {
    /// The data profile, or a dflop.yaml with the profiles beside it [default: data_profile.parquet]
    #[arg(value_name = "DATA")]
    pub(crate) data: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) source: CostSource,
    /// Data-parallel ranks [default: cluster.num_ranks of a dflop.yaml, else 8]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=100_000))]
    pub(crate) num_ranks: Option<u32>,
    /// Samples of a microbatch on a rank [default: by train.global_batch_size of a dflop.yaml, else 4]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) batch_size: Option<u32>,
    /// Microbatches of a rank in a step (gradient accumulation)
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) accumulation: u32,
    /// Where your ranks wait for each other [default: phase with --trainer fsdp2 and nemo, else step]
    #[arg(long, value_enum)]
    pub(crate) meets: Option<RanksMeet>,
    /// Your collation pads the rows of a microbatch to its longest, and the model computes the padding: each way is simulated so,
    /// and the first line is told of it, or padding is removed [default: true for swift, llamafactory, axolotl and nemo, which
    /// pad; --padded=false: with --padding_free of ms-swift or batch_flattening of Axolotl]
    #[arg(long, value_name = "true|false", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(crate) padded: Option<bool>,
    /// The trainer to write the lines for
    #[arg(long, value_enum, default_value_t = Trainer::Ddp)]
    pub(crate) trainer: Trainer,
    /// Global batches to simulate, drawn as training draws them
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) sampled_batches: u32,
    /// Seed of the order of the samples
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// Costs of your own instead of a model's: CSV with a header and the columns encoder_ns,llm_ns, one line for each sample of
    /// the data profile (Costs.write_csv of Python writes it)
    #[arg(long, value_name = "FILE", conflicts_with_all = ["model_profile", "model", "hardware", "dtype", "recipe", "lora_rank"])]
    pub(crate) costs: Option<PathBuf>,
    /// CSV with a header and the columns step,rank,ms: each rank's own time, without waiting for others
    #[arg(long, value_name = "FILE", conflicts_with_all = ["data", "costs", "model_profile", "model", "hardware", "dtype", "num_ranks",
        "recipe", "lora_rank", "batch_size", "accumulation", "meets", "padded", "trainer", "sampled_batches", "seed"])]
    pub(crate) step_times: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum RanksMeet {
    /// Once a step: DDP, ZeRO-1, ZeRO-2
    Step,
    /// In each layer: FSDP, ZeRO-3
    Phase,
}

const SCHEDULE_EXAMPLE: &str = r"Example, two buckets of 32,768 tokens at most:
  printf 'encoder_ns,llm_ns,tokens\n90,80,20000\n70,60,15000\n0,30,9000\n' > costs.csv
  dflop schedule --costs costs.csv --buckets 2 --bucket-tokens-max 32768 --exact";

/// Balance samples with given costs into buckets.
///
/// The largest load of any bucket, on the encoder or on the LLM, is made as small as possible. The answer comes
/// with a lower bound that no assignment can beat. If the caps cannot be kept, the exit status is 1.
#[derive(Debug, Args)]
#[command(after_long_help = SCHEDULE_EXAMPLE)]
pub(crate) struct Schedule {
    /// CSV with a header and the columns encoder_ns,llm_ns[,bytes][,tokens], one sample a row
    #[arg(long, value_name = "FILE")]
    pub(crate) costs: PathBuf,
    /// Number of buckets: microbatches x LLM replicas
    #[arg(long, value_name = "M", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) buckets: u32,
    /// The most bytes in a bucket; needs the column `bytes` [default: no cap]
    #[arg(long, value_name = "BYTES")]
    pub(crate) bucket_bytes_max: Option<u64>,
    /// The most LLM tokens in a bucket, for example 32768; needs the column `tokens` [default: no cap]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1_000_000_000_000))]
    pub(crate) bucket_tokens_max: Option<u64>,
    /// If a gap is left, search on to prove the answer optimal: about a second at most on one core
    ///
    /// This is for small batches: up to 160 samples, and up to six in a bucket. (Most batches of up to 48 samples are proven
    /// without it.) For larger batches the same work goes to further exchanges, which prove nothing but may lower the load.
    /// Work is counted, not timed: the same seed gives the same answer.
    #[arg(long)]
    pub(crate) exact: bool,
    /// Seed of the search; the same seed gives the same answer
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Say what an artifact holds, for people.
///
/// For a model profile it prints the device, recomputation, variants, links between ranks, and whether the profile was
/// measured or estimated; and for each module the time for each token, its spread and the memory. Times are those of the
/// forward (F), the backward (B), and the two halves of the backward, for inputs (I) and for weights (W). For a plan and a
/// data profile it prints what `dflop plan` and `dflop profile data` print.
#[derive(Debug, Args)]
pub(crate) struct Show {
    /// The file; or one of the words model_profile, data_profile and plan, for the file beside the configuration
    pub(crate) artifact: PathBuf,
    #[command(flatten)]
    pub(crate) config: ConfigArgument,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Read the sizes of media files from their headers; nothing is decoded.
///
/// Exit status 0 when all files were read, 1 when some were not.
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("rule").args(["model", "family"])))]
pub(crate) struct Probe {
    /// The files
    #[arg(required = true, value_name = "FILE")]
    pub(crate) files: Vec<PathBuf>,
    /// Print one line of JSON for each file
    #[arg(long)]
    pub(crate) json: bool,
    /// Also print the shape that the file has for the model in this directory
    #[arg(long, value_name = "DIR")]
    pub(crate) model: Option<PathBuf>,
    /// Also print the shape that the file has for a model family with its default settings: gemma4, glm4v,
    /// glm4v_moe, glm46v, glm_ocr, lfm2_vl, llava_onevision, mistral3, paddleocr_vl, qwen2_vl or qwen2_5_vl (other
    /// families have no default settings: use --model)
    #[arg(long, value_name = "MODEL_TYPE")]
    pub(crate) family: Option<String>,
    /// The most frames taken of a video, with --model or --family [default: the family's rule]
    #[arg(long, value_name = "N", requires = "rule",
        value_parser = clap::value_parser!(u32).range(1..=i64::from(dflop_data::family::FRAMES_MAX)))]
    pub(crate) video_max_frames: Option<u32>,
}
