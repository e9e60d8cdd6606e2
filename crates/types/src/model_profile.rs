//! The model profile: measured time and memory of each module over a grid of sizes.

use crate::artifact::MadeFrom;
use crate::recomputation::Recompute;
use crate::renewal::Renewal;
use crate::shape::Tower;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

mod experts;
mod problems;

pub use experts::ExpertsProfile;

/// Bytes of a backward in two parts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SplitBytes {
    /// Held from I to W, and nothing else is: of each linear map its input and the gradient of its output, of each
    /// embedding its ids and that gradient; each storage once.
    pub queued_bytes: u64,
    /// Bytes that I of one layer holds for a while beyond what its forward kept, what it queues included.
    pub input_workspace_bytes: u64,
    /// Bytes that W holds for a while beyond what was queued.
    pub weight_workspace_bytes: u64,
}

/// One measured size: medians over `repeats` runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MeasuredPoint {
    /// The size, in the unit of its curve.
    pub size: u64,
    /// Median forward time (F), in nanoseconds.
    pub forward_ns: u64,
    /// Median backward time, gradients of inputs and weights in one pass (B), in nanoseconds.
    pub backward_ns: u64,
    /// Median time of the gradient of the inputs alone (I), in nanoseconds; 0 where the inputs need no gradient.
    pub input_ns: u64,
    /// Median time of the gradients of the weights alone, after I (W), in nanoseconds; 0 where there are none.
    pub weight_ns: u64,
    /// Third minus first quartile of forward plus backward, in nanoseconds.
    pub spread_ns: u64,
    /// Bytes the forward keeps for the backward; parameters are not counted.
    pub activation_bytes: u64,
    /// Bytes that forward or backward hold for a while beyond what stays: the higher of the two peaks.
    pub workspace_bytes: u64,
    /// Bytes of I and W; `None` in profiles made before they were counted, and of attention, which has no weights.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub split: Option<SplitBytes>,
    /// Timed runs after the warm-up; 0 where the number is estimated.
    pub repeats: u32,
}

/// Times over sizes, by ascending size, at least one point.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MeasuredCurve {
    /// The points, by strictly ascending size.
    pub points: Vec<MeasuredPoint>,
    /// The size that did not fit the device's memory, where the grid ended for that reason.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub out_of_memory_at: Option<u64>,
}

/// What recomputation changes at one size.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecomputePoint {
    /// The size, in the unit of the module's linear curve.
    pub size: u64,
    /// Median time that forward and backward together take longer, in nanoseconds; it is added to the backward. The
    /// attention that `full` computes again is not in it: it takes as long as its forward.
    pub extra_ns: u64,
    /// Bytes the forward keeps. With `selective` without the bytes of attention, which are kept as without
    /// recomputation; with `full` for the whole layer.
    pub activation_bytes: u64,
}

/// One module: the part linear in tokens, and the attention over one segment.
///
/// Its time for packed segments is `linear(total tokens) + sum over segments of attention(segment tokens)`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModuleProfile {
    /// How many such modules the model has: the number of layers of a stack; 1 for every other module.
    pub count: u32,
    /// Everything but attention, over total tokens (encoder tokens, LLM tokens, or label tokens for the head).
    pub linear: MeasuredCurve,
    /// Attention of one segment over its tokens; no points where the module has none, or where `linear` holds it.
    pub attention: MeasuredCurve,
    /// Tokens of the segments that `linear` was measured with, where it holds their attention.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub segment_tokens: Option<u32>,
    /// With recomputation, by mode; empty where it was not measured.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub recompute: BTreeMap<Recompute, Vec<RecomputePoint>>,
    /// Number of parameters of one such module.
    pub num_parameters: u64,
    /// Bytes of the parameters of one such module, in the dtype of the profile.
    pub parameter_bytes: u64,
    /// Experts among which one such module deals out its rows; `None` where it has none, and in profiles made before they were
    /// counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experts: Option<ExpertsProfile>,
}

/// Modules measured otherwise than alone and whole: cut by tensor parallelism, or frozen with `LoRA` adapters.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Variant {
    /// Ranks that one layer is cut over.
    pub tensor_parallel_degree: u32,
    /// Rank of the `LoRA` adapters on the frozen weights; 0: none, all weights train.
    pub lora_rank: u32,
    /// Whether the times include the collectives (measured on as many ranks). If not, one device ran the part of one
    /// rank alone.
    pub has_collectives: bool,
    /// Modules by name, as in [`ModelProfile::modules`]. Modules that the variant does not change may be left out.
    pub modules: BTreeMap<String, ModuleProfile>,
}

/// What was measured on.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// `cpu` or `cuda`.
    pub kind: String,
    /// The device's own name.
    pub name: String,
    /// Threads of a rank on a CPU; 0 on a GPU.
    pub num_threads: u32,
    /// Ranks that worked beside the measured one, as in training; 0 on a GPU.
    pub num_neighbours: u32,
    /// `float32` or `bfloat16`.
    pub dtype: String,
    /// Whether the layers were compiled (`train.compile: layers`); false where the profile is estimated.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub compiles_layers: bool,
    /// Version of PyTorch; empty where the profile is estimated.
    pub torch: String,
    /// Version of the device's driver; empty on a CPU.
    #[serde(default)]
    pub driver: String,
    /// Memory of the device, in bytes; 0 where it is not known.
    #[serde(default)]
    pub memory_bytes: u64,
}

/// What ranks do together on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Collective {
    /// One rank to one other.
    PointToPoint,
    /// Every rank has the sum.
    AllReduce,
    /// Every rank has the parts of all.
    AllGather,
    /// Every rank has its part of the sum.
    ReduceScatter,
    /// Every rank sends a part of its own to each other.
    AllToAll,
}

/// How far apart ranks are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LinkSpan {
    /// Within one node.
    Node,
    /// On several nodes.
    Cluster,
}

/// One measured message size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MessagePoint {
    /// Bytes of the whole tensor that each rank has (of the sum, of what all parts together make, of all that it sends).
    pub bytes: u64,
    /// Median time, in nanoseconds.
    pub ns: u64,
}

/// Measured times of one kind of communication over one group of ranks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkProfile {
    /// What the ranks do.
    pub collective: Collective,
    /// How far apart they are.
    pub span: LinkSpan,
    /// Ranks that take part; 2 for point to point.
    pub num_ranks: u32,
    /// Time of an empty message (alpha), in nanoseconds.
    pub latency_ns: u64,
    /// Bytes that cross each rank's link a second: for a ring of n ranks `2 (n - 1) / n` of an all-reduce's bytes do,
    /// `(n - 1) / n` of an all-gather's, reduce-scatter's and all-to-all's, all of a point-to-point message's.
    pub bandwidth_bytes_per_s: u64,
    /// What was measured, by ascending size; empty where the numbers are from a table.
    pub points: Vec<MessagePoint>,
}

/// Links between ranks.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Network {
    /// `gloo` or `nccl`; empty where nothing was measured.
    pub backend: String,
    /// Whether the numbers come from a table of hardware and were not measured.
    pub is_assumed: bool,
    /// What is known; where nothing is, transfers are taken as free and marked.
    pub links: Vec<LinkProfile>,
}

impl Network {
    /// The link between two ranks, the nearest pair that is known.
    pub fn point_to_point(&self) -> Option<&LinkProfile> {
        let pairs = self.links.iter().filter(|link| link.collective == Collective::PointToPoint);
        pairs.min_by_key(|link| link.span)
    }

    /// A network of one measured pair of ranks, of which only latency and bandwidth are known.
    pub fn of_pair(latency_ns: u64, bandwidth_bytes_per_s: u64) -> Self {
        let link = LinkProfile {
            collective: Collective::PointToPoint,
            span: LinkSpan::Node,
            num_ranks: 2,
            latency_ns,
            bandwidth_bytes_per_s,
            points: Vec::new(),
        };
        Self { links: vec![link], ..Self::default() }
    }
}

/// Memory that no module accounts for, per rank.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryReserve {
    /// Held beside tensors by the device's context, kernels and libraries, in bytes.
    pub context_bytes: u64,
    /// What the allocator holds above what tensors take, in thousandths of the latter.
    pub allocator_overhead_permille: u32,
}

/// Measured (or estimated) time and memory of a model on a device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelProfile {
    /// Hashes of what it was made from: `model_config`.
    pub made_from: MadeFrom,
    /// Model family, for example `llava_onevision`.
    pub family: String,
    /// Name for people: the model's folder, or its name in the catalogue.
    #[serde(default)]
    pub model: String,
    /// Whether the numbers come from the analytic model: to be marked wherever they are shown.
    pub is_estimated: bool,
    /// What was measured on.
    pub device: Device,
    /// Bytes of one feature token (and of one hidden state) as they pass between ranks.
    pub hidden_bytes: u64,
    /// Bytes of one feature token as it passes from encoder to LLM backbone, where it is wider than a hidden state (`DeepStack`);
    /// 0: as wide.
    #[serde(default, skip_serializing_if = "crate::layout::is_default")]
    pub feature_bytes: u64,
    /// Whether the head's matrix is that of the embedding (`tie_word_embeddings`). Either module counts it among its
    /// parameters; a rank that holds both has it once.
    #[serde(default)]
    pub is_tied: bool,
    /// Links between ranks.
    pub network: Network,
    /// By name ([`ModelProfile::MODULES`], and [`ModelProfile::WINDOW_LAYER`] where the encoder has such layers); whole and
    /// trained, on one rank.
    pub modules: BTreeMap<String, ModuleProfile>,
    /// The modules measured otherwise.
    #[serde(default)]
    pub variants: Vec<Variant>,
    /// Time of the optimizer and gradient reduction, in nanoseconds for each 1,000,000 parameters of a rank.
    pub optimizer_ns_per_million: u64,
    /// Memory beside the modules'.
    #[serde(default)]
    pub memory: MemoryReserve,
    /// The run that brought its times up to date; `None`: they are as measured or estimated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub renewed: Option<Renewal>,
}

impl ModelProfile {
    /// Names of the modules a profile must hold: pixels (or sound) to encoder tokens, one encoder layer, projector (these
    /// three over encoder tokens); ids and features to hidden states, one LLM layer (over LLM tokens), final norm, logits
    /// and loss (over label tokens).
    pub const MODULES: [&'static str; 6] =
        ["encoder_embedding", "encoder_layer", "projector", "llm_embedding", "llm_layer", "llm_head"];
    /// Names of the modules of a second encoder, which reads sounds beside one that reads pictures: mel frames to its tokens,
    /// one of its layers, and what makes features of them, all three over its tokens. A profile has all of them or none.
    pub const SECOND_TOWER: [&'static str; 3] = ["sound_embedding", "sound_layer", "sound_projector"];
    /// An encoder layer whose attention stays within windows, which its `linear` holds: their size is the model's.
    pub const WINDOW_LAYER: &'static str = "encoder_window_layer";

    /// Thousandths of a device's memory that a rank may use where nobody says how much: the rest is for what no
    /// prediction holds (fragmentation, buffers of the communication library).
    pub const MEMORY_PERMILLE: u64 = 950;

    /// Bytes that a rank may use: those `given`, else most of the device's memory; `None` where that is not known.
    pub fn memory_budget_bytes(&self, given: Option<u64>) -> Option<u64> {
        let known = Some(self.device.memory_bytes).filter(|&bytes| bytes > 0);
        given.or_else(|| known.map(|bytes| bytes / 1_000 * Self::MEMORY_PERMILLE))
    }

    /// How many of this module the model has; 0 if the profile lacks it.
    pub fn count(&self, module: &str) -> u32 {
        self.modules.get(module).map_or(0, |module| module.count)
    }

    /// Layers of the LLM backbone.
    pub fn num_llm_layers(&self) -> u32 {
        self.count("llm_layer")
    }

    /// Elements of a hidden state; `None` where the profile's dtype is not known.
    pub fn hidden_size(&self) -> Option<u64> {
        match self.device.dtype.as_str() {
            "bfloat16" | "float16" => Some(self.hidden_bytes / 2),
            "float32" => Some(self.hidden_bytes / 4),
            _ => None,
        }
    }

    /// Layers of the encoder, of all kinds; of two encoders, those of both.
    pub fn num_encoder_layers(&self) -> u32 {
        self.count("encoder_layer") + self.count(Self::WINDOW_LAYER) + self.count(Self::SECOND_TOWER[1])
    }

    /// The encoder to which the module of this name belongs; the first, if it belongs to none.
    pub fn tower_of(module: &str) -> Tower {
        if Self::SECOND_TOWER.contains(&module) { Tower::Second } else { Tower::First }
    }

    /// Whether the module of this name belongs to an encoder or makes its tokens features.
    pub fn is_of_encoder(module: &str) -> bool {
        module.starts_with("encoder") || Self::is_projector(module) || Self::SECOND_TOWER.contains(&module)
    }

    /// Whether the module of this name makes features of an encoder's tokens.
    pub fn is_projector(module: &str) -> bool {
        module == "projector" || module == Self::SECOND_TOWER[2]
    }
}
