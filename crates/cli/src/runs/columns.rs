//! The columns of a table of runs, each with its rule, and what a row asks.

use dflop_analytic::{Gpt, Hardware, Software};
use dflop_types::{PipelineOrder, Recompute};

/// A column that is read.
pub(super) struct Column {
    pub(super) name: &'static str,
    /// Whether every table must have it.
    pub(super) is_needed: bool,
    /// What it holds, for people.
    pub(super) what: &'static str,
}

const fn needed(name: &'static str, what: &'static str) -> Column {
    Column { name, is_needed: true, what }
}

const fn optional(name: &'static str, what: &'static str) -> Column {
    Column { name, is_needed: false, what }
}

/// All columns that are read.
pub(super) const COLUMNS: [Column; 40] = [
    needed("gpu", "the device, as in A100, where no `--device` names it"),
    needed("gpus", "devices of the run"),
    needed("global_batch_sequences", "sequences of one step"),
    needed("micro_batch_sequences", "sequences of one microbatch"),
    needed("hidden_size", "width of a token"),
    needed("attention_heads", "heads of the queries"),
    needed("layers", "layers of the model"),
    needed("sequence_tokens", "tokens of a sequence"),
    needed("tensor_parallel", "ranks that each layer is cut over"),
    needed("data_parallel", "replicas"),
    needed("pipeline_parallel", "ranks that the layers are dealt to"),
    optional("microbatches_per_step", "microbatches of a replica; checked"),
    optional("virtual_stages_per_rank", "runs of layers of a rank, interleaved"),
    optional("gpus_per_node", "devices of a node"),
    optional("activation_recompute", "0, none, selective, full or 1"),
    optional("pipeline_schedule", "1f1b, interleaved or gpipe"),
    optional("gradient_bucketing", "1: gradients are reduced while the backward runs"),
    optional("kv_heads", "heads of keys and values"),
    optional("head_size", "width of a head"),
    optional("ffn_hidden_size", "inner width of the MLP"),
    optional("gated_mlp", "0 or 1"),
    optional("linear_bias", "0 or 1"),
    optional("normalization", "LayerNorm or RMSNorm"),
    optional("position_embedding", "learned_absolute, rope or none"),
    optional("vocab_size", "tokens of the vocabulary"),
    optional("vocab_size_padded", "rows of embedding and head"),
    optional("tied_embeddings", "0 or 1"),
    optional("context_parallel", "1: sequences are not cut"),
    optional("sequence_parallel", "0 or 1"),
    optional("dtype", "bf16, fp16 or fp32"),
    optional("gradient_dtype", "bf16, fp16 or fp32"),
    optional("optimizer", "adam or adamw"),
    optional("distributed_optimizer", "1: its states are cut over the replicas"),
    optional("overlap_grad_reduce", "0 or 1"),
    optional("overlap_param_gather", "0 or 1"),
    optional("attention_backend", "auto, flash, fused, unfused or local"),
    optional("dropout", "0 to 1"),
    optional("cross_entropy_fusion", "0 or 1"),
    optional("deterministic", "0 or 1"),
    optional("memory_rank_stage", "rank that memory is asked of: first, last, or its number from 0"),
];

/// The vocabulary of GPT-2, where a table names none.
const GPT2_VOCABULARY: u64 = 50_257;
/// Megatron pads the vocabulary to multiples of this, times the tensor-parallel degree.
const VOCABULARY_MULTIPLE: u64 = 128;
/// Largest number that a cell may hold: sums over a step then fit their integers.
const NUMBER_MAX: u64 = 1 << 32;
/// The longest sequence, in tokens, and the largest width: bytes of a microbatch then fit their integers.
const SEQUENCE_MAX: u64 = 1 << 24;
const WIDTH_MAX: u64 = 1 << 20;
/// Most tokens of a microbatch, for the same reason.
const MICROBATCH_MAX: u64 = 1 << 30;
/// Most layers, pipeline ranks and microbatches: a step is simulated action by action.
const ACTIONS_MAX: u64 = 4_000_000;

/// The rank that memory is asked of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MemoryRank {
    /// The fullest.
    Fullest,
    /// The one of this number in its pipeline.
    One(u32),
}

/// What a row asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Row {
    pub(super) hardware: &'static Hardware,
    pub(super) gpt: Gpt,
    pub(super) dtype: &'static str,
    pub(super) gradient_bytes: u64,
    pub(super) micro_batch: u32,
    pub(super) num_microbatches: u32,
    pub(super) tp: u32,
    pub(super) dp: u32,
    pub(super) pp: u32,
    /// Runs of layers of a rank.
    pub(super) chunks: u32,
    pub(super) gpus_per_node: u32,
    pub(super) recompute: Recompute,
    pub(super) order: PipelineOrder,
    pub(super) sharding_degree: u32,
    /// Whether gradients are reduced while the backward runs.
    pub(super) has_overlap: bool,
    pub(super) memory_rank: MemoryRank,
}

/// The cells of a row by name, and what is wrong with them.
struct Cells<'a> {
    header: &'a [String],
    row: &'a [String],
    problems: Vec<String>,
}

impl<'a> Cells<'a> {
    fn text(&self, name: &str) -> Option<&'a str> {
        let at = self.header.iter().position(|column| column == name)?;
        self.row.get(at).map(String::as_str).filter(|text| !text.is_empty())
    }

    fn problem(&mut self, name: &str, found: &str, rule: &str) {
        self.problems.push(format!("column `{name}`: {found}, {rule}"));
    }

    /// A whole number of at least 1; 1 where there is a problem, so that reading goes on.
    fn count(&mut self, name: &'static str) -> u64 {
        match self.text(name) {
            None => {
                self.problem(name, "is empty", "must be a whole number of at least 1");
                1
            }
            Some(_) => self.count_or(name, 1),
        }
    }

    /// A whole number of at least 1; `default` where the table has none.
    fn count_or(&mut self, name: &'static str, default: u64) -> u64 {
        let Some(text) = self.text(name) else { return default };
        // Tables that passed through other programs have `8.0` for 8.
        let number = text.parse::<f64>().ok().filter(|one| one.fract() == 0.0);
        match number {
            Some(one) if (1.0..=NUMBER_MAX as f64).contains(&one) => one as u64,
            Some(one) if one > NUMBER_MAX as f64 => {
                self.problem(name, &shown(text), &format!("must be at most {NUMBER_MAX}"));
                1
            }
            _ => {
                self.problem(name, &shown(text), "must be a whole number of at least 1");
                1
            }
        }
    }

    /// As `count`, and at most `max`.
    fn count_to(&mut self, name: &'static str, max: u64) -> u64 {
        let count = self.count(name);
        if count > max {
            self.problem(name, &count.to_string(), &format!("must be at most {max}"));
            return 1;
        }
        count
    }

    fn degree(&mut self, name: &'static str) -> u32 {
        let count = self.count(name);
        u32::try_from(count).unwrap_or(u32::MAX)
    }

    /// 0 or 1.
    fn flag(&mut self, name: &'static str, default: bool) -> bool {
        match self.text(name) {
            None => default,
            Some("0" | "0.0" | "false" | "False") => false,
            Some("1" | "1.0" | "true" | "True") => true,
            Some(text) => {
                self.problem(name, &shown(text), "must be 0 or 1");
                default
            }
        }
    }

    /// One of some words, each with what it means; the first of them where the table has none.
    fn word<T: Copy>(&mut self, name: &'static str, words: &[(&str, T)]) -> T {
        let Some(text) = self.text(name) else { return words[0].1 };
        let lower = text.to_ascii_lowercase();
        if let Some((_, meant)) = words.iter().find(|(word, _)| *word == lower) {
            return *meant;
        }
        let known: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
        self.problem(name, &shown(text), &format!("must be one of {}", known.join(", ")));
        words[0].1
    }

    fn hardware(&mut self, device: Option<&str>) -> &'static Hardware {
        let name = self.text("gpu").or(device);
        let first = &dflop_analytic::HARDWARE[0];
        let Some(name) = name else {
            self.problem("gpu", "is empty", "must name a device; or give `--device`");
            return first;
        };
        Hardware::named(name).unwrap_or_else(|error| {
            self.problem("gpu", &shown(name), &format!("{error}"));
            first
        })
    }
}

impl Row {
    /// What a row asks; `device` where it names none.
    ///
    /// # Errors
    /// Every cell at fault, with its column.
    pub(super) fn read(header: &[String], row: &[String], device: Option<&str>) -> Result<Self, Vec<String>> {
        let mut cells = Cells { header, row, problems: Vec::new() };
        let hardware = cells.hardware(device);
        let gpus = cells.count("gpus");
        let (tp, dp, pp) = (
            cells.degree("tensor_parallel"),
            cells.degree("data_parallel"),
            cells.degree("pipeline_parallel"),
        );
        let chunks = cells.count_or("virtual_stages_per_rank", 1);
        let micro_batch = cells.count("micro_batch_sequences");
        let global_batch = cells.count("global_batch_sequences");
        let software = software_of(&cells);
        let gpt = gpt_of(&mut cells, u64::from(tp), software);
        let dtype = cells.word("dtype", &[("bf16", "bfloat16"), ("fp16", "bfloat16"), ("fp32", "float32")]);
        let size = if dtype == "float32" { 4 } else { 2 };
        let gradient_bytes =
            cells.word("gradient_dtype", &[("same", size), ("bf16", 2), ("fp16", 2), ("fp32", 4)]);
        cells.word("optimizer", &[("adam", ()), ("adamw", ())]);
        let recompute = recompute_of(&mut cells);
        let is_sharded = cells.flag("distributed_optimizer", false);
        let has_overlap = cells.flag("overlap_grad_reduce", false) | cells.flag("gradient_bucketing", false);
        for name in ["overlap_param_gather", "cross_entropy_fusion", "deterministic"] {
            cells.flag(name, false);
        }
        if cells.count_or("context_parallel", 1) != 1 {
            cells.problem("context_parallel", "is above 1", "sequences that are cut are not estimated");
        }
        let gpus_per_node = cells.count_or("gpus_per_node", 8);
        let order = cells.word(
            "pipeline_schedule",
            &[
                ("1f1b", PipelineOrder::OneFOneB),
                ("interleaved", PipelineOrder::OneFOneB),
                ("gpipe", PipelineOrder::GPipe),
            ],
        );
        let memory_rank = memory_rank_of(&mut cells, pp);
        let num_microbatches = check_degrees(&mut cells, gpus, [tp, dp, pp], global_batch, micro_batch);
        let actions = num_microbatches.saturating_mul(u64::from(pp)).saturating_mul(chunks);
        if actions > ACTIONS_MAX {
            let found = format!("{num_microbatches} microbatches on {pp} x {chunks} stages");
            cells.problem(
                "global_batch_sequences",
                &found,
                &format!("their product must be at most {ACTIONS_MAX}"),
            );
        }
        if micro_batch.saturating_mul(gpt.sequence_tokens) > MICROBATCH_MAX {
            let found = format!("{micro_batch} sequences of {} tokens", gpt.sequence_tokens);
            cells.problem(
                "micro_batch_sequences",
                &found,
                &format!("their product must be at most {MICROBATCH_MAX}"),
            );
        }
        if !cells.problems.is_empty() {
            return Err(cells.problems);
        }
        Ok(Self {
            hardware,
            gpt,
            dtype,
            gradient_bytes,
            micro_batch: micro_batch as u32,
            num_microbatches: num_microbatches as u32,
            tp,
            dp,
            pp,
            chunks: chunks as u32,
            gpus_per_node: gpus_per_node as u32,
            recompute,
            order,
            sharding_degree: if is_sharded { dp } else { 1 },
            has_overlap,
            memory_rank,
        })
    }
}

/// Tables that name a backend of attention are of Megatron-Core, others of the time before it.
fn software_of(cells: &Cells<'_>) -> Software {
    if cells.text("attention_backend").is_some() {
        Software::MEGATRON_CORE
    } else {
        Software::MEGATRON_DEEPSPEED
    }
}

fn gpt_of(cells: &mut Cells<'_>, tp: u64, software: Software) -> Gpt {
    let num_before = cells.problems.len();
    let (width, num_heads) = (cells.count_to("hidden_size", WIDTH_MAX), cells.count("attention_heads"));
    let are_read = cells.problems.len() == num_before;
    if are_read && cells.text("head_size").is_none() && !width.is_multiple_of(num_heads) {
        cells.problem(
            "attention_heads",
            &num_heads.to_string(),
            &format!("must divide `hidden_size` {width}"),
        );
    }
    let sequence_tokens = cells.count_to("sequence_tokens", SEQUENCE_MAX);
    let unpadded = cells.count_or("vocab_size", GPT2_VOCABULARY);
    // In the published runs the head of one whole rank is slow as one of 50,257 columns is; those cut over ranks are not.
    let is_unpadded = tp == 1 && cells.text("vocab_size").is_none();
    let padded = if is_unpadded { unpadded } else { unpadded.next_multiple_of(VOCABULARY_MULTIPLE * tp) };
    let has_positions = cells.word(
        "position_embedding",
        &[("learned_absolute", true), ("learned", true), ("rope", false), ("none", false)],
    );
    let dropout = cells.text("dropout").unwrap_or("0.1");
    let has_dropout = match dropout.parse::<f64>() {
        Ok(share) if (0.0..1.0).contains(&share) => share > 0.0,
        _ => {
            cells.problem("dropout", &shown(dropout), "must be at least 0 and below 1");
            false
        }
    };
    let is_fused = [("unfused", false), ("local", false), ("auto", true), ("flash", true), ("fused", true)];
    Gpt {
        num_layers: cells.count("layers"),
        width,
        num_heads,
        num_key_value_heads: cells.count_or("kv_heads", num_heads),
        head_size: cells.count_or("head_size", (width / num_heads).max(1)),
        mlp_width: cells.count_or("ffn_hidden_size", 4 * width),
        has_gate: cells.flag("gated_mlp", false),
        has_bias: cells.flag("linear_bias", true),
        has_rms_norm: cells.word("normalization", &[("layernorm", false), ("rmsnorm", true)]),
        vocabulary: cells.count_or("vocab_size_padded", padded),
        is_tied: cells.flag("tied_embeddings", true),
        num_positions: if has_positions { sequence_tokens } else { 0 },
        sequence_tokens,
        has_fused_attention: cells.word("attention_backend", &is_fused),
        recomputes_attention: cells.text("activation_recompute") == Some("selective"),
        has_dropout,
        has_sequence_parallel: cells.flag("sequence_parallel", false),
        software,
    }
}

/// Selective recomputation is Megatron's, of attention alone: the model's own.
fn recompute_of(cells: &mut Cells<'_>) -> Recompute {
    let (none, full) = (Recompute::None, Recompute::Full);
    cells.word(
        "activation_recompute",
        &[
            ("none", none),
            ("0", none),
            ("selective", none),
            ("full", full),
            ("1", full),
            ("uniform", full),
            ("block", full),
        ],
    )
}

fn memory_rank_of(cells: &mut Cells<'_>, pp: u32) -> MemoryRank {
    match cells.text("memory_rank_stage") {
        None => MemoryRank::Fullest,
        Some("first") => MemoryRank::One(0),
        Some("last") => MemoryRank::One(pp.saturating_sub(1)),
        Some(text) => match text.parse() {
            Ok(number) if number < pp => MemoryRank::One(number),
            _ => {
                let rule = format!("must be first, last or a number below `pipeline_parallel` {pp}");
                cells.problem("memory_rank_stage", &shown(text), &rule);
                MemoryRank::Fullest
            }
        },
    }
}

/// Microbatches of a replica, if the degrees make up the devices and the replicas share out the batch evenly.
fn check_degrees(
    cells: &mut Cells<'_>,
    gpus: u64,
    [tp, dp, pp]: [u32; 3],
    global_batch: u64,
    micro_batch: u64,
) -> u64 {
    let product = u128::from(tp) * u128::from(dp) * u128::from(pp);
    if product != u128::from(gpus) && cells.problems.is_empty() {
        let rule = format!(
            "`tensor_parallel` {tp} x `data_parallel` {dp} x `pipeline_parallel` {pp} is {product}; they must be equal"
        );
        cells.problem("gpus", &gpus.to_string(), &rule);
    }
    let at_once = u64::from(dp).saturating_mul(micro_batch);
    if !global_batch.is_multiple_of(at_once) && cells.problems.is_empty() {
        let rule =
            format!("must be a multiple of `data_parallel` {dp} x `micro_batch_sequences` {micro_batch}");
        cells.problem("global_batch_sequences", &global_batch.to_string(), &rule);
    }
    let num_microbatches = (global_batch / at_once).max(1);
    let given = cells.count_or("microbatches_per_step", num_microbatches);
    if given != num_microbatches && cells.problems.is_empty() {
        let rule = format!(
            "must be `global_batch_sequences` / (`data_parallel` x `micro_batch_sequences`), which is {num_microbatches}"
        );
        cells.problem("microbatches_per_step", &given.to_string(), &rule);
    }
    num_microbatches
}

/// A cell for people: cut where it is long.
fn shown(text: &str) -> String {
    let mut short: String = text.chars().take(40).collect();
    if short.len() < text.len() {
        short.push_str("...");
    }
    format!("`{short}`")
}
