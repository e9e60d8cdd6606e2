//! `InternVL`: tiles of `InternViT`, in the form of transformers and in that of the public files (`internvl_chat`).

use super::{TIED, layers_read, section, text, tiles};
use crate::architecture::{Architecture, Encoder, NormKind, Projector};
use crate::defaults::INTERNVIT;
use crate::error::AnalyticError;
use crate::fields::Section;
use serde_json::Value;

/// InternVL, in the form of transformers or in that of the public `internvl_chat` checkpoints.
pub(super) fn read(config: &Value, is_chat: bool) -> Result<Architecture, AnalyticError> {
    let vision = section(config, "vision_config", INTERNVIT)?;
    let (qkv, qk, norm) = if is_chat {
        ("qkv_bias", "qk_normalization", "norm_type")
    } else {
        ("attention_bias", "use_qk_norm", "norm_type")
    };
    vision.must_be(norm, &["layer_norm", "rms_norm"])?;
    let base = tiles(&vision, 1, true)?;
    let (width, has_positions) = (base.width, vision.flag("use_absolute_position_embeddings", true)?);
    let positions = if has_positions { base.unit_tokens * width } else { 0 };
    let mask_token = if vision.flag("use_mask_token", false)? { width } else { 0 };
    // The remote code of `internvl_chat` has no norm after the layers; that of transformers has one without mean pooling.
    let has_last_norm = !is_chat && !vision.flag("use_mean_pooling", true)?;
    let num_layers = match (is_chat, config.get("select_layer").and_then(Value::as_i64)) {
        (true, Some(index)) if index != -1 => {
            let whole = Section { path: "", object: config, defaults: &[] };
            return Err(whole.error("select_layer", "must be -1"));
        }
        (true, _) => (base.num_layers, 0),
        (false, _) => layers_read(config, base.num_layers, -1)?,
    };
    let encoder = Encoder {
        num_layers: num_layers.0,
        num_unread_layers: num_layers.1,
        norm: if vision.get(norm).is_some_and(|norm| norm == "rms_norm") {
            NormKind::Rms
        } else {
            NormKind::Layer
        },
        num_qkv_biases: if vision.flag(qkv, false)? { 3 } else { 0 },
        has_other_biases: true,
        has_one_qkv_product: is_chat,
        num_kept_copies: if is_chat && vision.flag(qk, false)? { 2 } else { 0 },
        has_position_lookup: false,
        has_qk_norm: vision.flag(qk, false)?,
        has_head_norm: false,
        has_layer_scale: true,
        num_table_parameters: positions + width + mask_token,
        num_unread_parameters: if has_last_norm { 2 * width } else { 0 },
        ..base
    };
    let whole = Section { path: "", object: config, defaults: &[] };
    let ratio = whole.get("downsample_ratio").map_or(Some(0.5), Value::as_f64);
    let side = ratio.filter(|ratio| *ratio > 0.0 && *ratio <= 1.0).map(|ratio| (1.0 / ratio) as u64);
    let side = side.ok_or_else(|| whole.error("downsample_ratio", "must be above 0 and at most 1"))?;
    let mut llm = text(config, if is_chat { "llm_config" } else { "text_config" }, "qwen2")?;
    if !is_chat {
        // Not asked of the backbone here, and true where it is absent.
        llm.is_tied = whole.flag(TIED, true)?;
    }
    let projector = Projector {
        norm: Some((NormKind::Layer, true)),
        has_second_norm: false,
        has_merged_norm: false,
        merged_tokens: side * side,
        pooled_tokens: 1,
        pooled_norm: None,
        num_dropped_tokens: 1,
        reduced_width: None,
        inner_width: Some(llm.width),
        gated_width: None,
        has_bias: true,
        num_table_parameters: 0,
        num_deep_layers: 0,
    };
    Ok(Architecture { family: "internvl".to_owned(), encoder, projector, sound: None, llm })
}
