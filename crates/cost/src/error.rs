//! Why no cost model can be made of a profile.

use crate::grid::GridError;
use dflop_types::{Hint, Recompute};
use thiserror::Error;

/// Why no cost model can be made of a profile.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum CostError {
    /// A module that every model has is not in the profile.
    #[error("model profile has no module `{module}`")]
    MissingModule {
        /// Its name.
        module: &'static str,
    },
    /// The points of a curve break a rule.
    #[error("model profile, module `{module}`, curve `{part}`: {source}")]
    Curve {
        /// The module.
        module: &'static str,
        /// `linear` or `attention`.
        part: &'static str,
        /// The rule.
        source: GridError,
    },
    /// A measured time is 0: a clock too coarse, or a run that did nothing.
    #[error(
        "model profile, module `{module}`, curve `{part}`: forward time at size {size} is 0 ns, must be more"
    )]
    ZeroTime {
        /// The module.
        module: &'static str,
        /// `linear` or `attention`.
        part: &'static str,
        /// Size of the point.
        size: u64,
    },
    /// The model has none of a module that every model has.
    #[error("model profile: `{module}.count` is 0, must be at least 1")]
    ZeroCount {
        /// Its name.
        module: &'static str,
    },
    /// The settings recompute what was measured without.
    #[error(
        "model profile, module `{module}`: recomputation `{mode}` was not measured{}",
        listed("; measured: ", .measured.iter().map(|mode| format!("`{mode}`")))
    )]
    RecomputeNotMeasured {
        /// The module.
        module: &'static str,
        /// The mode asked for.
        mode: Recompute,
        /// Those that were measured.
        measured: Vec<Recompute>,
    },
    /// The settings cut layers, or train adapters, in a way that was not measured.
    #[error(
        "model profile: {} was not {}{}",
        variant((*.degree, *.lora_rank)),
        made(*.is_estimated),
        listed(&format!("; {}: ", made(*.is_estimated)), .measured.iter().copied().map(variant))
    )]
    VariantNotMeasured {
        /// Tensor parallel degree asked for.
        degree: u32,
        /// LoRA rank asked for; 0: no adapters.
        lora_rank: u32,
        /// Degrees and LoRA ranks that were measured.
        measured: Vec<(u32, u32)>,
        /// Whether the profile is estimated: then nothing can be measured.
        is_estimated: bool,
    },
    /// The settings cut layers that cannot be cut: the profile has other modules of that degree, but not them.
    #[error(
        "model profile: `{module}` cannot be cut over {degree} ranks, only over {}",
        or(.degrees)
    )]
    LayersNotCut {
        /// The layers.
        module: &'static str,
        /// Tensor parallel degree asked for.
        degree: u32,
        /// Those that the profile has of the layers, ascending.
        degrees: Vec<u32>,
    },
    /// The settings deal out experts that the model has not, or of which the profile says nothing.
    #[error("model profile says of no experts in `{module}`, which shall be dealt out over {degree} ranks")]
    NoExperts {
        /// The layers.
        module: &'static str,
        /// Ranks among which they shall be dealt out.
        degree: u32,
    },
    /// The settings deal out experts unevenly.
    #[error(
        "the {count} experts of `{module}` shall be dealt out over {degree} ranks, must be a multiple of that"
    )]
    ExpertsNotDivided {
        /// The layers.
        module: &'static str,
        /// Experts of a layer.
        count: u32,
        /// Ranks among which they shall be dealt out.
        degree: u32,
    },
    /// The settings ask for adapters of what does not train.
    #[error("`trained.lora_rank` is {lora_rank} but `trained.llm` is false, must be 0 then")]
    AdaptersFrozen {
        /// LoRA rank asked for.
        lora_rank: u32,
    },
    /// The settings freeze a module whose gradient of the input was not measured separately.
    #[error(
        "model profile, module `{module}`, curve `{part}`: the gradient of the input was not measured separately, \
         must be to freeze it"
    )]
    NoInputGradient {
        /// The module.
        module: &'static str,
        /// `linear` or `attention`.
        part: &'static str,
    },
    /// The points of a link break a rule.
    #[error("model profile, network, `{collective}` over {num_ranks} ranks: {source}")]
    Link {
        /// The collective, for example `all_reduce`.
        collective: &'static str,
        /// Ranks that take part.
        num_ranks: u32,
        /// The rule.
        source: GridError,
    },
    /// A link on which nothing ever arrives.
    #[error(
        "model profile, network, `{collective}` over {num_ranks} ranks: bandwidth is 0 bytes/s, must be more"
    )]
    Bandwidth {
        /// The collective, for example `all_reduce`.
        collective: &'static str,
        /// Ranks that take part.
        num_ranks: u32,
    },
    /// A dtype whose optimizer states we do not know.
    #[error("model profile: `device.dtype` is `{dtype}`, must be `float32` or `bfloat16`")]
    Dtype {
        /// What the profile says.
        dtype: String,
    },
}

/// How a profile came by its times.
const fn made(is_estimated: bool) -> &'static str {
    if is_estimated { "estimated" } else { "measured" }
}

/// The command that measures a variant beside those that were measured.
fn measures(degree: u32, lora_rank: u32, measured: &[(u32, u32)]) -> String {
    let mut degrees: Vec<u32> = measured.iter().map(|(degree, _)| *degree).chain([degree]).collect();
    degrees.sort_unstable();
    degrees.dedup();
    let degrees: Vec<String> = degrees.iter().map(u32::to_string).collect();
    let lora = if lora_rank == 0 { String::new() } else { format!(" --lora-rank {lora_rank}") };
    let cuts =
        if degrees.len() == 1 { String::new() } else { format!(" --tensor-parallel {}", degrees.join(",")) };
    format!("measure it with `dflop profile model{cuts}{lora}`")
}

/// Degree and LoRA rank in words.
fn variant((degree, lora_rank): (u32, u32)) -> String {
    let cut = format!("tensor parallel degree {degree}");
    if lora_rank == 0 { cut } else { format!("{cut} with LoRA rank {lora_rank}") }
}

/// `intro` and the parts with commas between; nothing without parts.
fn listed(intro: &str, parts: impl Iterator<Item = String>) -> String {
    let parts: Vec<String> = parts.collect();
    if parts.is_empty() { String::new() } else { format!("{intro}{}", parts.join(", ")) }
}

impl Hint for CostError {
    fn hint(&self) -> Option<String> {
        Some(match self {
            Self::RecomputeNotMeasured { .. } => {
                "measure it with `dflop profile model --recompute`".to_owned()
            }
            Self::VariantNotMeasured { degree, lora_rank, measured, is_estimated: false } => {
                measures(*degree, *lora_rank, measured)
            }
            Self::VariantNotMeasured { lora_rank, measured, .. }
                if measured.iter().all(|(_, rank)| rank != lora_rank) =>
            {
                format!("estimate it with `dflop profile model --estimate --lora-rank {lora_rank}`")
            }
            Self::VariantNotMeasured { .. } => {
                "take one of those, or measure on the device itself: `dflop profile model`".to_owned()
            }
            Self::AdaptersFrozen { .. } => "train the LLM, or leave the adapters out".to_owned(),
            Self::NoExperts { .. } => {
                "measure again with `dflop profile model`; a model without experts is not dealt out"
                    .to_owned()
            }
            Self::ExpertsNotDivided { .. } => "take another expert parallel degree".to_owned(),
            Self::LayersNotCut { module, .. } => {
                let part = if *module == "llm_layer" { "LLM" } else { "encoder" };
                format!(
                    "take another tensor parallel degree of the {part}, such as 1: it must divide the heads of queries, \
                     those of keys in linear attention, and the widths"
                )
            }
            _ => "measure again with `dflop profile model`".to_owned(),
        })
    }
}

/// Numbers in words: `1, 2 or 4`.
fn or(numbers: &[u32]) -> String {
    let words: Vec<String> = numbers.iter().map(u32::to_string).collect();
    match words.split_last() {
        Some((last, [])) => last.clone(),
        Some((last, others)) => format!("{} or {last}", others.join(", ")),
        None => "one rank".to_owned(),
    }
}
