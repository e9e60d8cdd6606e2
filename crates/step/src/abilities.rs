//! What training can run. The planner makes its candidates from this list, so it never proposes what training cannot run.
//!
//! [`crate::StepSettings::stages`] and [`crate::StepSettings::encoder_stages`] refuse layouts for which no schedule can be
//! made. This file has the limits that depend on the model and its recipe.

use dflop_types::{ModelProfile, Trained, Zero};

/// The shardings that a pipeline can have: what the replicas of a component keep only a part of. In a pipeline ZeRO-2 is
/// the same as ZeRO-1, because gradients are reduced once a step.
pub const PIPELINE_SHARDINGS: [Zero; 3] = [Zero::Nothing, Zero::States, Zero::Gradients];

/// Expert parallel degrees that colocated ranks can have, ascending; none for a model without experts, and where the profile
/// does not say how many parameters they have. They are the powers of two that divide the ranks of a node, all ranks and the
/// experts of a layer.
///
/// # Examples
/// ```
/// use dflop_types::{ExpertsProfile, ModelProfile, ModuleProfile};
/// let experts = ExpertsProfile { count: 12, per_token: 2, num_parameters: 1_200, parameter_bytes: 2_400 };
/// let layer = ModuleProfile { experts: Some(experts), ..ModuleProfile::default() };
/// let modules = [("llm_layer".to_owned(), layer)].into();
/// let profile = ModelProfile { modules, ..ModelProfile::default() };
/// assert_eq!(dflop_step::expert_degrees(&profile, 64, 8), [2, 4]);
/// assert!(dflop_step::expert_degrees(&ModelProfile::default(), 64, 8).is_empty());
/// ```
pub fn expert_degrees(profile: &ModelProfile, num_ranks: u32, ranks_per_node: u32) -> Vec<u32> {
    let Some(experts) = profile.modules.get("llm_layer").and_then(|layer| layer.experts) else {
        return Vec::new();
    };
    let ranks = ranks_per_node.min(num_ranks);
    let degrees = std::iter::successors(Some(2_u32), |degree| degree.checked_mul(2));
    let divides = |degree: &u32| {
        [ranks_per_node, num_ranks, experts.count].into_iter().all(|number| number.is_multiple_of(*degree))
    };
    degrees.take_while(|&degree| degree <= ranks).filter(divides).collect()
}

/// Tensor parallel degrees that encoder and LLM backbone can have, ascending from 1. These are the degrees with which the
/// profile was measured (they divide heads and widths), up to the number of ranks of a node.
///
/// # Examples
/// ```
/// use dflop_types::{ModelProfile, Trained};
/// let degrees = dflop_step::tensor_degrees(&ModelProfile::default(), Trained::default(), 8);
/// assert_eq!(degrees, [vec![1], vec![1]]);
/// ```
pub fn tensor_degrees(profile: &ModelProfile, trained: Trained, ranks_per_node: u32) -> [Vec<u32>; 2] {
    let of = |layer: &str, lora_rank: u32| {
        let cut = profile.variants.iter().filter(|variant| {
            // A degree that does not divide the heads was not measured: its variant lacks this layer.
            variant.lora_rank == lora_rank && variant.modules.contains_key(layer)
        });
        let cut = cut.map(|variant| variant.tensor_parallel_degree).filter(|&degree| degree > 1);
        let mut degrees: Vec<u32> = cut.filter(|&degree| degree <= ranks_per_node).collect();
        degrees.push(1);
        degrees.sort_unstable();
        degrees.dedup();
        degrees
    };
    // Adapters are on the LLM backbone alone.
    [of("encoder_layer", 0), of("llm_layer", trained.lora_rank)]
}

/// Families whose encoder layers take unequal time in a known order, of which a model profile has the mean alone: a merger
/// stands between them. Nobody can predict how long a stage of them takes, so the planner gives such an encoder one stage.
const ENCODERS_OF_ONE_STAGE: [&str; 1] = ["minicpmv4_6"];

/// Pipeline stages that the encoder can have in a plan, at most; it has `num_layers`.
///
/// # Examples
/// ```
/// use dflop_types::ModelProfile;
/// let of = |family: &str| ModelProfile { family: family.to_owned(), ..ModelProfile::default() };
/// assert_eq!(dflop_step::encoder_stages_max(&of("qwen2_5_vl"), 32), 32);
/// assert_eq!(dflop_step::encoder_stages_max(&of("minicpmv4_6"), 27), 1);
/// ```
pub fn encoder_stages_max(profile: &ModelProfile, num_layers: u32) -> u32 {
    if ENCODERS_OF_ONE_STAGE.contains(&profile.family.as_str()) { num_layers.min(1) } else { num_layers }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;
    use dflop_types::Variant;

    #[test]
    fn degrees_are_those_with_cut_layers_inside_a_node() {
        let mut profile = fixture::model_profile();
        let layer = profile.modules["llm_layer"].clone();
        for degree in [2, 4, 16] {
            let mut variant = Variant { tensor_parallel_degree: degree, ..Variant::default() };
            variant.modules.insert("llm_layer".to_owned(), layer.clone());
            if degree == 2 {
                variant.modules.insert("encoder_layer".to_owned(), layer.clone());
            }
            profile.variants.push(variant);
        }
        let all = Trained::default();
        assert_eq!(tensor_degrees(&profile, all, 8), [vec![1, 2], vec![1, 2, 4]]);
        assert_eq!(tensor_degrees(&profile, all, 2), [vec![1, 2], vec![1, 2]]);
        // Nothing was measured for adapters on cut layers.
        assert_eq!(tensor_degrees(&profile, Trained { lora_rank: 8, ..all }, 8), [vec![1, 2], vec![1]]);
    }
}
