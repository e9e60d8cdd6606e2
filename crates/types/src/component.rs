//! The two components of a model: how many ways one is split, and how its replicas hold their states.

use serde::{Deserialize, Serialize};
use std::fmt;

/// What a rank holds of a multimodal model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Component {
    /// Turns pixels or sound into features; the projector belongs to it.
    Encoder,
    /// The LLM backbone.
    Llm,
    /// Both of them, in a colocated layout.
    Both,
}

impl Component {
    /// The LLM backbone.
    pub(crate) const fn llm() -> Self {
        Self::Llm
    }

    /// Whether it is the LLM backbone alone.
    #[allow(clippy::trivially_copy_pass_by_ref)] // As serde calls it.
    pub(crate) const fn is_llm(&self) -> bool {
        matches!(self, Self::Llm)
    }
}

impl fmt::Display for Component {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Encoder => "encoder",
            Self::Llm => "llm",
            Self::Both => "colocated",
        })
    }
}

/// The degrees of one component, each at least 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ComponentLayout {
    /// Tensor-parallel degree: ranks that share each layer.
    #[serde(rename = "tensor_parallel_degree")]
    pub tp: u32,
    /// Pipeline-parallel degree: stages of the component.
    #[serde(rename = "pipeline_parallel_degree")]
    pub pp: u32,
    /// Data-parallel degree: replicas of the component.
    #[serde(rename = "data_parallel_degree")]
    pub dp: u32,
}

impl ComponentLayout {
    /// Ranks the component takes: `tp * pp * dp`.
    pub const fn num_ranks(&self) -> u32 {
        self.tp * self.pp * self.dp
    }
}

impl fmt::Display for ComponentLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tp {} pp {} dp {}", self.tp, self.pp, self.dp)
    }
}

/// Where the two components sit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Placement {
    /// Encoder ranks and LLM ranks apart: a pipeline.
    #[default]
    Disaggregated,
    /// Every rank holds both components: data parallelism.
    Colocated,
}

/// Which of a component's tensor groups stand next to each other: the first of its degrees changes fastest from rank to
/// rank. Neighbours share a node, so this decides whose messages stay inside it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RankOrder {
    /// The stages of a replica: what a stage hands to the next stays near, gradients are reduced far.
    #[default]
    TpPpDp,
    /// The replicas of a stage, as Megatron-LM and torchtitan number their ranks: gradients are reduced near.
    TpDpPp,
}

impl RankOrder {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::TpPpDp, Self::TpDpPp];
}

impl fmt::Display for RankOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::TpPpDp => "tp-pp-dp",
            Self::TpDpPp => "tp-dp-pp",
        })
    }
}

/// What the replicas of a component keep only a part of, as the ZeRO optimizer numbers it. Files hold the number.
///
/// *References*: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "u8", into = "u8")]
pub enum Zero {
    /// 0: nothing; every replica keeps all (DDP).
    #[default]
    Nothing,
    /// 1: the optimizer's states.
    States,
    /// 2: the states and the gradients.
    Gradients,
    /// 3: the states, the gradients and the parameters (FSDP); layers are gathered where they run.
    Parameters,
}

impl Zero {
    /// All of them, by their number.
    pub const ALL: [Self; 4] = [Self::Nothing, Self::States, Self::Gradients, Self::Parameters];
}

impl fmt::Display for Zero {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nothing => "nothing sharded",
            Self::States => "optimizer states sharded",
            Self::Gradients => "optimizer states and gradients sharded",
            Self::Parameters => "optimizer states, gradients and parameters sharded",
        })
    }
}

impl From<Zero> for u8 {
    fn from(zero: Zero) -> Self {
        zero as Self
    }
}

impl TryFrom<u8> for Zero {
    type Error = String;

    fn try_from(number: u8) -> Result<Self, String> {
        Self::ALL.get(usize::from(number)).copied().ok_or_else(|| format!("{number}, must be 0, 1, 2 or 3"))
    }
}
