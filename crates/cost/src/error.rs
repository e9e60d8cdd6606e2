//! Why no cost model can be made of a profile.

use crate::grid::GridError;
use dflop_types::Hint;
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
    /// The LLM backbone has no layers.
    #[error("model profile: `llm_layer.count` is 0, must be at least 1")]
    NoLayers,
    /// The settings recompute what was measured without.
    #[error("model profile, module `{module}`: recomputation `{mode}` was not measured")]
    RecomputeNotMeasured {
        /// The module.
        module: &'static str,
        /// The mode asked for.
        mode: &'static str,
    },
    /// The settings train adapters that nobody measured.
    #[error("model profile: LoRA adapters of rank {lora_rank} were not measured")]
    AdaptersNotMeasured {
        /// Their rank.
        lora_rank: u32,
    },
    /// A dtype whose optimizer states we do not know.
    #[error("model profile: `device.dtype` is `{dtype}`, must be `float32` or `bfloat16`")]
    Dtype {
        /// What the profile says.
        dtype: String,
    },
}

impl Hint for CostError {
    fn hint(&self) -> Option<String> {
        Some("measure again with `dflop profile model`".to_owned())
    }
}
