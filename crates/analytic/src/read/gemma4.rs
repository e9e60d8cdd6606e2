//! Gemma 4, the dense model (31B) and the one with experts beside the MLP (26B-A4B): patches of the picture's own shape with positions for either axis, the mean of each square a
//! feature; a backbone whose layers that see all tokens have other heads than those that see a window, and no values of their
//! own.

use super::{TIED, llm, section};
use crate::architecture::{
    Architecture, Encoder, Experts, FullHeads, Llm, MlpKind, NormKind, Patches, Projector, Router,
    SlidingAttention,
};
use crate::defaults::{GEMMA4_TEXT, GEMMA4_VISION};
use crate::error::AnalyticError;
use crate::fields::Section;
use serde_json::Value;

const SLIDING: &str = "sliding_attention";
const FULL: &str = "full_attention";

/// What the configuration describes.
///
/// Not counted: the means of the patches, and that in layers with a window the tokens of a picture see the rest of it too.
pub(super) fn read(config: &Value) -> Result<Architecture, AnalyticError> {
    let whole = Section { path: "", object: config, defaults: &[] };
    if whole.get("audio_config").is_some() {
        return Err(whole.error("audio_config", "must be null: the encoder of sounds is not modelled"));
    }
    let vision = section(config, "vision_config", GEMMA4_VISION)?;
    vision.must_be("model_type", &["gemma4_vision"])?;
    vision.must_be("hidden_activation", &["gelu_pytorch_tanh"])?;
    if vision.flag("use_clipped_linears", false)? {
        return Err(vision.error("use_clipped_linears", "must be false: clipped products are not modelled"));
    }
    let width = vision.count("hidden_size")?;
    let num_heads = vision.count("num_attention_heads")?;
    if vision.count("num_key_value_heads")? != num_heads {
        return Err(vision.error("num_key_value_heads", &format!("must be {num_heads}, as of queries")));
    }
    if vision.count("head_dim")? * num_heads != width {
        return Err(vision.error("head_dim", "must be `hidden_size` over `num_attention_heads`"));
    }
    let (side, pool) = (vision.count("patch_size")?, vision.count("pooling_kernel_size")?);
    let encoder = Encoder {
        num_layers: vision.count("num_hidden_layers")?,
        num_window_layers: 0,
        num_unread_layers: 0,
        width,
        num_heads,
        mlp_width: vision.count("intermediate_size")?,
        mlp: MlpKind::Gated,
        num_kept_activations: 1,
        norm: NormKind::RmsWide,
        num_qkv_biases: 0,
        has_other_biases: false,
        has_one_qkv_product: false,
        num_kept_copies: 0,
        has_position_lookup: true,
        has_qk_norm: false,
        has_head_norm: false,
        has_more_norms: true,
        has_layer_scale: false,
        has_rotation: true,
        patches: Patches::Pixels { values: 3 * side * side, has_bias: false },
        segment_tokens: None,
        num_class_tokens: 0,
        window_tokens: None,
        unit_tokens: pool * pool,
        num_table_parameters: 2 * vision.count("position_embedding_size")? * width,
        has_norm_before: false,
        num_unread_parameters: 0,
        merger: None,
    };
    let projector = Projector {
        norm: Some((NormKind::RmsUnscaled, false)),
        has_second_norm: false,
        has_merged_norm: false,
        merged_tokens: 1,
        pooled_tokens: pool * pool,
        pooled_norm: None,
        num_dropped_tokens: 0,
        reduced_width: None,
        inner_width: None,
        gated_width: None,
        has_bias: false,
        num_table_parameters: 0,
        num_deep_layers: 0,
    };
    let llm = backbone(config)?;
    Ok(Architecture { family: "gemma4".to_owned(), encoder, sound: None, projector, llm })
}

fn backbone(config: &Value) -> Result<Llm, AnalyticError> {
    let whole = Section { path: "", object: config, defaults: &[] };
    let text = section(config, "text_config", GEMMA4_TEXT)?;
    text.must_be("model_type", &["gemma4_text"])?;
    text.must_be("hidden_activation", &["gelu_pytorch_tanh"])?;
    text.must_be("use_bidirectional_attention", &["vision"])?;
    let number = |field: &str, absent: u64| text.get(field).map_or(Some(absent), Value::as_u64);
    if number("hidden_size_per_layer_input", 256) != Some(0) {
        let rule = "must be 0: embeddings of single layers are not modelled";
        return Err(text.error("hidden_size_per_layer_input", rule));
    }
    if number("num_kv_shared_layers", 0) != Some(0) {
        let rule = "must be 0: keys and values of another layer are not modelled";
        return Err(text.error("num_kv_shared_layers", rule));
    }
    let cap = text.get("final_logit_softcapping");
    if cap.is_some_and(|cap| !cap.as_f64().is_some_and(|cap| cap > 0.0)) {
        return Err(text.error("final_logit_softcapping", "must be a number above 0, or null"));
    }
    let plain = llm(config, &text, false)?;
    let kinds = kinds(&text, plain.num_layers)?;
    let num_sliding = kinds.iter().filter(|kind| *kind == SLIDING).count() as u64;
    let sliding = if num_sliding > 0 {
        Some(SlidingAttention { num_layers: num_sliding, window: text.count("sliding_window")? })
    } else {
        None
    };
    Ok(Llm {
        is_tied: whole.flag(TIED, true)?,
        experts: experts(&text)?,
        has_mlp_bias: false,
        has_head_norm: true,
        norm: NormKind::RmsWide,
        has_norm_after: true,
        has_scaled_embedding: true,
        full_heads: Some(full_heads(&text, &plain, &kinds)?),
        has_value_norm: true,
        has_layer_scalar: true,
        has_logit_cap: cap.is_some(),
        sliding,
        ..plain
    })
}

/// Those of all layers, where `enable_moe_block` says so.
fn experts(text: &Section) -> Result<Option<Experts>, AnalyticError> {
    if !text.flag("enable_moe_block", false)? {
        return Ok(None);
    }
    let (count, per_token) = (text.count("num_experts")?, text.count("top_k_experts")?);
    if per_token > count {
        return Err(text.error("top_k_experts", &format!("must be at most the {count} experts")));
    }
    Ok(Some(Experts {
        count,
        per_token,
        width: text.count("moe_intermediate_size")?,
        shared_width: 0,
        has_shared_gate: false,
        router: Router::Scaled,
        num_dense_layers: 0,
    }))
}

/// The kind of each layer: as `layer_types` says; if that is absent, every sixth and the last sees all tokens.
fn kinds(text: &Section, num_layers: u64) -> Result<Vec<String>, AnalyticError> {
    let name = "layer_types";
    let Some(value) = text.get(name) else {
        let is_full = |layer: u64| layer.is_multiple_of(6) || layer == num_layers;
        return Ok((1..=num_layers).map(|n| if is_full(n) { FULL } else { SLIDING }.to_owned()).collect());
    };
    let listed = value.as_array().filter(|kinds| kinds.len() as u64 == num_layers);
    let listed = listed.ok_or_else(|| text.error(name, "must name a kind for each layer"))?;
    let kinds: Vec<String> = listed.iter().filter_map(Value::as_str).map(ToOwned::to_owned).collect();
    if kinds.len() != listed.len() || kinds.iter().any(|kind| kind != SLIDING && kind != FULL) {
        return Err(text.error(name, "must be of \"sliding_attention\" and \"full_attention\""));
    }
    if kinds.last().is_some_and(|kind| kind != FULL) {
        return Err(text.error(name, "must end with \"full_attention\""));
    }
    Ok(kinds)
}

/// Heads of the layers that see all tokens: by fields of their own, or by `per_layer_config`, as transformers saves them.
fn full_heads(text: &Section, plain: &Llm, kinds: &[String]) -> Result<FullHeads, AnalyticError> {
    let shares_keys = text.flag("attention_k_eq_v", false)?;
    let heads = match text.get("per_layer_config") {
        None => {
            let field = "num_global_key_value_heads";
            let own = if shares_keys { text.given(field)? } else { None };
            let num_key_value_heads = own.unwrap_or(plain.num_key_value_heads);
            if !plain.num_heads.is_multiple_of(num_key_value_heads) {
                return Err(text.error(field, &format!("must divide {}", plain.num_heads)));
            }
            FullHeads { num_key_value_heads, head_size: text.count("global_head_dim")?, has_values: true }
        }
        Some(layers) => {
            let name = "per_layer_config";
            let refuse = || {
                text.error(
                    name,
                    "must say `head_dim` and `num_key_value_heads` alike of each full layer alone",
                )
            };
            let layers = layers.as_object().ok_or_else(refuse)?;
            let full = kinds.iter().enumerate().filter(|(_, kind)| *kind == FULL).map(|(layer, _)| layer);
            let own = full.map(|layer| layers.get(&layer.to_string())).collect::<Option<Vec<_>>>();
            let own =
                own.filter(|own| own.len() == layers.len() && own.windows(2).all(|pair| pair[0] == pair[1]));
            let first = own.as_ref().and_then(|own| own.first()).ok_or_else(refuse)?;
            let said = |field: &str, absent: u64| match first.get(field) {
                None => Some(absent),
                Some(value) => value.as_u64().filter(|number| (1..=1 << 24).contains(number)),
            };
            let is_known = |field: &String| field == "head_dim" || field == "num_key_value_heads";
            let num_key_value_heads = said("num_key_value_heads", plain.num_key_value_heads)
                .filter(|heads| plain.num_heads.is_multiple_of(*heads))
                .filter(|_| first.as_object().is_some_and(|fields| fields.keys().all(is_known)))
                .ok_or_else(refuse)?;
            let head_size = said("head_dim", plain.head_size).ok_or_else(refuse)?;
            FullHeads { num_key_value_heads, head_size, has_values: true }
        }
    };
    Ok(FullHeads { has_values: !shares_keys, ..heads })
}
