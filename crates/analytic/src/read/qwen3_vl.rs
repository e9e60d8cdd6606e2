//! Qwen3-VL: patches with learnt positions, features of several layers of the encoder, and a norm over each head of the
//! backbone's queries and keys. Some models have experts in place of the backbone's MLP.

use super::{TIED, kept_activations, qwen3, section};
use crate::architecture::{Architecture, Encoder, Llm, MlpKind, NormKind, Patches, Projector};
use crate::defaults::{QWEN3_VL_MOE_TEXT, QWEN3_VL_TEXT, QWEN3_VL_VISION};
use crate::error::AnalyticError;
use crate::fields::Section;
use serde_json::Value;

/// What the configuration describes; `has_experts` by the family.
pub(super) fn read(config: &Value, has_experts: bool) -> Result<Architecture, AnalyticError> {
    let vision = section(config, "vision_config", QWEN3_VL_VISION)?;
    let defaults = if has_experts { QWEN3_VL_MOE_TEXT } else { QWEN3_VL_TEXT };
    let text = section(config, "text_config", defaults)?;
    let whole = Section { path: "", object: config, defaults: &[] };
    // Hugging Face's class asks only the whole configuration.
    let is_tied = whole.flag(TIED, false)?;
    let llm = Llm { is_tied, ..qwen3::backbone(config, &text, has_experts)? };
    let num_deep_layers = deep_layers(&vision, vision.count("depth")?, llm.num_layers)?;
    let (encoder, projector) = tower(&vision, &llm, num_deep_layers)?;
    let family = if has_experts { "qwen3_vl_moe" } else { "qwen3_vl" };
    Ok(Architecture { family: family.to_owned(), encoder, projector, sound: None, llm })
}

/// Encoder and projector of a model of this kind. `num_deep_layers` of its layers give features beside the last layer.
pub(super) fn tower(
    vision: &Section,
    llm: &Llm,
    num_deep_layers: u64,
) -> Result<(Encoder, Projector), AnalyticError> {
    let width = vision.count("hidden_size")?;
    let num_heads = vision.count("num_heads")?;
    vision.divides("num_heads", num_heads, width)?;
    let (merge, side) = (vision.count("spatial_merge_size")?, vision.side("patch_size")?);
    let num_layers = vision.count("depth")?;
    let values = vision.count("in_channels")? * vision.side("temporal_patch_size")? * side * side;
    if vision.count("out_hidden_size")? != llm.width {
        return Err(vision.error("out_hidden_size", &format!("must be the backbone's width, {}", llm.width)));
    }
    let encoder = Encoder {
        num_layers,
        num_window_layers: 0,
        num_unread_layers: 0,
        width,
        num_heads,
        mlp_width: vision.count("intermediate_size")?,
        mlp: MlpKind::Plain,
        num_kept_activations: kept_activations(vision, "hidden_act", "gelu_pytorch_tanh"),
        norm: NormKind::Layer,
        num_qkv_biases: 3,
        has_other_biases: true,
        has_one_qkv_product: true,
        num_kept_copies: 2,
        has_position_lookup: true,
        has_qk_norm: false,
        has_head_norm: false,
        has_more_norms: false,
        has_layer_scale: false,
        has_rotation: true,
        patches: Patches::Pixels { values, has_bias: true },
        segment_tokens: None,
        num_class_tokens: 0,
        window_tokens: None,
        unit_tokens: merge * merge,
        num_table_parameters: vision.count("num_position_embeddings")? * width,
        has_norm_before: false,
        num_unread_parameters: 0,
        merger: None,
    };
    let projector = Projector {
        norm: Some((NormKind::Layer, false)),
        has_second_norm: false,
        has_merged_norm: false,
        merged_tokens: merge * merge,
        pooled_tokens: 1,
        pooled_norm: None,
        num_dropped_tokens: 0,
        reduced_width: None,
        inner_width: Some(merge * merge * width),
        gated_width: None,
        has_bias: true,
        num_table_parameters: 0,
        num_deep_layers,
    };
    Ok((encoder, projector))
}

/// How many layers of the encoder give features beside the last.
pub(super) fn deep_layers(
    vision: &Section,
    num_layers: u64,
    num_llm_layers: u64,
) -> Result<u64, AnalyticError> {
    let name = "deepstack_visual_indexes";
    let Some(list) = vision.get(name) else {
        // Of the class: 8, 16 and 24.
        return if num_layers > 24 { Ok(3) } else { Err(vision.error(name, "must be given for few layers")) };
    };
    let indices: Option<Vec<u64>> = list.as_array().and_then(|list| list.iter().map(Value::as_u64).collect());
    let is_ascending = |list: &Vec<u64>| list.is_sorted_by(|a, b| a < b);
    let fits = |list: &Vec<u64>| list.last().is_none_or(|last| *last < num_layers);
    let found =
        indices.filter(|list| is_ascending(list) && fits(list) && list.len() as u64 <= num_llm_layers);
    found.map(|list| list.len() as u64).ok_or_else(|| {
        vision.error(name, &format!("must be ascending layers below {num_layers}, at most {num_llm_layers}"))
    })
}
