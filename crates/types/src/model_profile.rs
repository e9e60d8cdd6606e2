//! The model profile: measured time and memory of each module over a grid of sizes.

use crate::artifact::{Artifact, MadeFrom};
use crate::recomputation::Recompute;
use crate::renewal::Renewal;
use crate::shape::Tower;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

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
    /// Bytes of the whole tensor that each rank has (of the sum, of what all parts together make).
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
    /// `(n - 1) / n` of an all-gather's and reduce-scatter's, all of a point-to-point message's.
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

impl Artifact for ModelProfile {
    const KIND: &'static str = "model_profile";
    const FORMAT_VERSION: u32 = 2;
    const MEND: &'static str = "dflop profile model";

    fn made_from(&self) -> &MadeFrom {
        &self.made_from
    }

    fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        for name in Self::MODULES {
            match self.modules.get(name) {
                None => problems.push(format!("modules.{name}: is missing")),
                Some(module) if module.linear.points.is_empty() => {
                    problems.push(format!("modules.{name}.linear: has no points"));
                }
                Some(_) => {}
            }
        }
        let second = Self::SECOND_TOWER.map(|name| self.modules.contains_key(name));
        if second.contains(&true) && second.contains(&false) {
            problems.push(format!("modules: must have all of {} or none", Self::SECOND_TOWER.join(", ")));
        }
        for (name, module) in &self.modules {
            module_problems(&format!("modules.{name}"), module, &mut problems);
        }
        for (index, variant) in self.variants.iter().enumerate() {
            if variant.tensor_parallel_degree == 0 {
                problems.push(format!("variants[{index}].tensor_parallel_degree: must not be 0"));
            }
            for (name, module) in &variant.modules {
                module_problems(&format!("variants[{index}].modules.{name}"), module, &mut problems);
            }
        }
        for (index, link) in self.network.links.iter().enumerate() {
            if link.bandwidth_bytes_per_s == 0 {
                problems.push(format!("network.links[{index}].bandwidth_bytes_per_s: must not be 0"));
            }
            if link.num_ranks < 2 {
                problems.push(format!("network.links[{index}].num_ranks: {} is below 2", link.num_ranks));
            }
            let place = format!("network.links[{index}]");
            within(&place, &[("latency_ns", link.latency_ns)], limits::NS, &mut problems);
            let speed = [("bandwidth_bytes_per_s", link.bandwidth_bytes_per_s)];
            within(&place, &speed, limits::BYTES, &mut problems);
            for (number, point) in link.points.iter().enumerate() {
                let place = format!("{place}.points[{number}]");
                within(&place, &[("ns", point.ns)], limits::NS, &mut problems);
                within(&place, &[("bytes", point.bytes)], limits::BYTES, &mut problems);
            }
        }
        let optimizer = [("optimizer_ns_per_million", self.optimizer_ns_per_million)];
        within("", &optimizer, limits::NS, &mut problems);
        let bytes = [
            ("hidden_bytes", self.hidden_bytes),
            ("feature_bytes", self.feature_bytes),
            ("device.memory_bytes", self.device.memory_bytes),
            ("memory.context_bytes", self.memory.context_bytes),
        ];
        within("", &bytes, limits::BYTES, &mut problems);
        let overhead =
            [("memory.allocator_overhead_permille", self.memory.allocator_overhead_permille.into())];
        within("", &overhead, limits::PERMILLE, &mut problems);
        problems
    }
}

/// The largest numbers that a model profile may hold: far above every machine, and small enough that sums over a cluster
/// and a training run fit their integers.
mod limits {
    /// One run of one module, in nanoseconds: 2 h 46 min.
    pub(super) const NS: u64 = 10_000_000_000_000;
    /// Bytes, or bytes a second: 1 PiB.
    pub(super) const BYTES: u64 = 1 << 50;
    /// Tokens of one microbatch.
    pub(super) const TOKENS: u64 = 1 << 40;
    /// Layers of one kind.
    pub(super) const COUNT: u64 = 1 << 16;
    /// Parameters of one module.
    pub(super) const PARAMETERS: u64 = 1 << 50;
    /// What the allocator holds above the tensors: a hundred times as much.
    pub(super) const PERMILLE: u64 = 100_000;
}

/// Adds each of the numbers that is above `limit`, by its name behind `place`.
fn within(place: &str, numbers: &[(&str, u64)], limit: u64, problems: &mut Vec<String>) {
    let dot = if place.is_empty() { "" } else { "." };
    let above = numbers.iter().filter(|(_, number)| *number > limit);
    problems
        .extend(above.map(|(name, number)| format!("{place}{dot}{name}: {number}, must be at most {limit}")));
}

/// What is wrong with one module's numbers, each with its place.
fn module_problems(place: &str, module: &ModuleProfile, problems: &mut Vec<String>) {
    if module.count == 0 {
        problems.push(format!("{place}.count: must not be 0"));
    }
    let mut ascend = |place: String, sizes: Vec<u64>| {
        for (index, pair) in sizes.windows(2).enumerate() {
            if pair[1] <= pair[0] {
                problems.push(format!(
                    "{place}[{}].size: {} does not exceed {}",
                    index + 1,
                    pair[1],
                    pair[0]
                ));
            }
        }
    };
    for (part, curve) in [("linear", &module.linear), ("attention", &module.attention)] {
        ascend(format!("{place}.{part}.points"), curve.points.iter().map(|point| point.size).collect());
    }
    for (mode, points) in &module.recompute {
        ascend(format!("{place}.recompute.{mode}"), points.iter().map(|point| point.size).collect());
    }
    for mode in module.recompute.keys().filter(|mode| !Recompute::ALL.contains(mode)) {
        problems.push(format!("{place}.recompute.{mode}: must be of one layer, `selective` or `full`"));
    }
    for (part, curve) in [("linear", &module.linear), ("attention", &module.attention)] {
        for (index, point) in curve.points.iter().enumerate() {
            if point.forward_ns == 0 {
                problems.push(format!("{place}.{part}.points[{index}].forward_ns: must not be 0"));
            }
        }
    }
    range_problems(place, module, problems);
}

/// The numbers of one module that are too large to be true.
fn range_problems(place: &str, module: &ModuleProfile, problems: &mut Vec<String>) {
    within(place, &[("count", module.count.into())], limits::COUNT, problems);
    within(place, &[("num_parameters", module.num_parameters)], limits::PARAMETERS, problems);
    within(place, &[("parameter_bytes", module.parameter_bytes)], limits::BYTES, problems);
    for (part, curve) in [("linear", &module.linear), ("attention", &module.attention)] {
        if let Some(size) = curve.out_of_memory_at {
            within(&format!("{place}.{part}"), &[("out_of_memory_at", size)], limits::TOKENS, problems);
        }
        for (index, point) in curve.points.iter().enumerate() {
            let place = format!("{place}.{part}.points[{index}]");
            within(&place, &[("size", point.size)], limits::TOKENS, problems);
            let times = [
                ("forward_ns", point.forward_ns),
                ("backward_ns", point.backward_ns),
                ("input_ns", point.input_ns),
                ("weight_ns", point.weight_ns),
                ("spread_ns", point.spread_ns),
            ];
            within(&place, &times, limits::NS, problems);
            let split = point.split.unwrap_or_default();
            let bytes = [
                ("activation_bytes", point.activation_bytes),
                ("workspace_bytes", point.workspace_bytes),
                ("split.queued_bytes", split.queued_bytes),
                ("split.input_workspace_bytes", split.input_workspace_bytes),
                ("split.weight_workspace_bytes", split.weight_workspace_bytes),
            ];
            within(&place, &bytes, limits::BYTES, problems);
        }
    }
    for (mode, points) in &module.recompute {
        for (index, point) in points.iter().enumerate() {
            let place = format!("{place}.recompute.{mode}[{index}]");
            within(&place, &[("size", point.size)], limits::TOKENS, problems);
            within(&place, &[("extra_ns", point.extra_ns)], limits::NS, problems);
            within(&place, &[("activation_bytes", point.activation_bytes)], limits::BYTES, problems);
        }
    }
}
