//! The model profile: measured time and memory of each module over a grid of sizes.

use crate::artifact::{Artifact, MadeFrom};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// One measured size: medians over `repeats` runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MeasuredPoint {
    /// The size, in the unit of its curve.
    pub size: u64,
    /// Median forward time, in nanoseconds.
    pub forward_ns: u64,
    /// Median backward time (inputs and weights), in nanoseconds.
    pub backward_ns: u64,
    /// Third minus first quartile of forward plus backward, in nanoseconds.
    pub spread_ns: u64,
    /// Bytes the forward keeps for the backward; parameters are not counted.
    pub activation_bytes: u64,
    /// Timed runs after the warm-up.
    pub repeats: u32,
}

/// Times over sizes, by ascending size, at least one point.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MeasuredCurve {
    /// The points, by strictly ascending size.
    pub points: Vec<MeasuredPoint>,
}

/// One module: the part linear in tokens, and the attention over one segment.
///
/// Its time for packed segments is `linear(total tokens) + sum over segments of attention(segment tokens)`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModuleProfile {
    /// Everything but attention, over total tokens (encoder tokens, LLM tokens, or label tokens for the head).
    pub linear: MeasuredCurve,
    /// Attention of one segment over its tokens; no points where the module has none, or where all segments
    /// are of one size and `linear` holds it.
    pub attention: MeasuredCurve,
    /// Number of parameters.
    pub num_parameters: u64,
    /// Bytes of the parameters in the dtype of the profile.
    pub parameter_bytes: u64,
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
    /// Version of PyTorch.
    pub torch: String,
}

/// Links between ranks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Network {
    /// Time of an empty point-to-point message, in nanoseconds.
    pub latency_ns: u64,
    /// Point-to-point bandwidth, in bytes a second; 0: not measured, transfers are taken as free and marked.
    pub bandwidth_bytes_per_s: u64,
}

/// Measured time and memory of a model on a device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelProfile {
    /// Hashes of what it was made from: `model_config`.
    pub made_from: MadeFrom,
    /// Model family, as in `llava_onevision`.
    pub family: String,
    /// What was measured on.
    pub device: Device,
    /// Layers of the LLM backbone.
    pub num_llm_layers: u32,
    /// Layers of the encoder.
    pub num_encoder_layers: u32,
    /// Bytes of one feature token (and of one hidden state) as they pass between ranks.
    pub hidden_bytes: u64,
    /// Links between ranks.
    pub network: Network,
    /// `encoder` (whole, projector included, over encoder tokens), `llm_embedding`, `llm_layer` (one layer),
    /// `llm_head` (final norm, logits and loss, over label tokens).
    pub modules: BTreeMap<String, ModuleProfile>,
    /// Time of the optimizer and gradient reduction, in nanoseconds for each 1,000,000 parameters of a rank.
    pub optimizer_ns_per_million: u64,
}

impl ModelProfile {
    /// Names of the modules a profile must hold.
    pub const MODULES: [&'static str; 4] = ["encoder", "llm_embedding", "llm_layer", "llm_head"];
}

impl Artifact for ModelProfile {
    const KIND: &'static str = "model_profile";
    const FORMAT_VERSION: u32 = 1;
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
        for (name, module) in &self.modules {
            for (part, curve) in [("linear", &module.linear), ("attention", &module.attention)] {
                for (index, pair) in curve.points.windows(2).enumerate() {
                    if pair[1].size <= pair[0].size {
                        problems.push(format!(
                            "modules.{name}.{part}.points[{}].size: {} does not exceed {}",
                            index + 1,
                            pair[1].size,
                            pair[0].size
                        ));
                    }
                }
                for (index, point) in curve.points.iter().enumerate() {
                    if point.forward_ns == 0 && part == "linear" {
                        problems
                            .push(format!("modules.{name}.{part}.points[{index}].forward_ns: must not be 0"));
                    }
                }
            }
        }
        if self.num_llm_layers == 0 {
            problems.push("num_llm_layers: must not be 0".to_owned());
        }
        problems
    }
}
