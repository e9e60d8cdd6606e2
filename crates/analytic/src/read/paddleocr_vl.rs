//! `PaddleOCR-VL`: patches of the page's own size with learnt positions and rotations, two norms before they are merged four to
//! one; the backbone is that of ERNIE 4.5.

use super::{TIED, kept_activations, llm, section};
use crate::architecture::{Architecture, Encoder, Llm, MlpKind, NormKind, Patches, Projector};
use crate::defaults::{PADDLEOCR_TEXT, PADDLEOCR_VISION};
use crate::error::AnalyticError;
use crate::fields::Section;
use serde_json::Value;

/// What the configuration describes.
pub(super) fn read(config: &Value) -> Result<Architecture, AnalyticError> {
    let vision = section(config, "vision_config", PADDLEOCR_VISION)?;
    // Files of the hub name the whole model there.
    vision.must_be("model_type", &["paddleocr_vl_vision", "paddleocr_vl"])?;
    let (width, side) = (vision.count("hidden_size")?, vision.side("patch_size")?);
    let num_heads = vision.count("num_attention_heads")?;
    vision.divides("num_attention_heads", num_heads, width)?;
    let merge = vision.count("spatial_merge_size")?;
    let per_side = vision.count("image_size")? / side;
    if per_side == 0 {
        return Err(vision.error("image_size", "must be at least `patch_size`"));
    }
    let encoder = Encoder {
        num_layers: vision.count("num_hidden_layers")?,
        num_window_layers: 0,
        num_unread_layers: 0,
        width,
        num_heads,
        mlp_width: vision.count("intermediate_size")?,
        mlp: MlpKind::Plain,
        num_kept_activations: kept_activations(&vision, "hidden_act", "gelu_pytorch_tanh"),
        norm: NormKind::Layer,
        num_qkv_biases: 3,
        has_other_biases: true,
        has_one_qkv_product: false,
        num_kept_copies: 0,
        has_position_lookup: true,
        has_qk_norm: false,
        has_head_norm: false,
        has_more_norms: false,
        has_layer_scale: false,
        has_rotation: true,
        patches: Patches::Pixels { values: vision.count("num_channels")? * side * side, has_bias: true },
        segment_tokens: None,
        num_class_tokens: 0,
        window_tokens: None,
        unit_tokens: merge * merge,
        num_table_parameters: per_side * per_side * width,
        has_norm_before: false,
        num_unread_parameters: 0,
        merger: None,
    };
    let llm = backbone(config)?;
    let projector = Projector {
        norm: Some((NormKind::Layer, false)),
        has_second_norm: true,
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
        num_deep_layers: 0,
    };
    Ok(Architecture { family: "paddleocr_vl".to_owned(), encoder, projector, sound: None, llm })
}

/// The backbone: its fields stand at the top of the hub's files, and in a section where transformers wrote them.
fn backbone(config: &Value) -> Result<Llm, AnalyticError> {
    let nested = config.get("text_config").filter(|section| section.is_object());
    let path = if nested.is_some() { "text_config" } else { "" };
    let text = Section { path, object: nested.unwrap_or(config), defaults: PADDLEOCR_TEXT };
    if nested.is_some() {
        text.must_be("model_type", &["paddleocr_vl_text"])?;
    }
    if text.flag("use_bias", false)? {
        return Err(text.error("use_bias", "must be false: no published model has biases"));
    }
    if text.object.get("head_dim").is_some_and(Value::is_null) {
        return Err(text.error("head_dim", "must be a number, or absent"));
    }
    let whole = Section { path: "", object: config, defaults: &[] };
    // The class asks either, and both are true where they are absent; what stands at the top is not the backbone's.
    let is_tied = nested.is_none() || whole.flag(TIED, true)? || text.flag(TIED, true)?;
    Ok(Llm { is_tied, has_qkv_bias: false, ..llm(config, &text, true)? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_the_class_would_not_build_is_refused_by_name() {
        let error = |vision: Value, text: Value| {
            let config = json!({"model_type": "paddleocr_vl", "vision_config": vision, "text_config": text});
            Architecture::from_config(&config).unwrap_err().to_string()
        };
        let none = || json!({});
        let errors = [
            error(json!({"num_attention_heads": 7}), none()),
            error(json!({"image_size": 7}), none()),
            error(json!({"model_type": "siglip_vision_model"}), none()),
            error(none(), json!({"use_bias": true})),
            error(none(), json!({"head_dim": null})),
            error(none(), json!({"model_type": "ernie4_5"})),
        ];
        let fields =
            ["num_attention_heads", "image_size", "model_type", "use_bias", "head_dim", "model_type"];
        for (error, field) in errors.iter().zip(fields) {
            assert!(error.contains(&format!("_config.{field}`")), "{field}: {error}");
        }
    }

    /// Of a file without a section transformers does not take it for the backbone, whose own default is true.
    #[test]
    fn embedding_and_head_are_one_unless_both_parts_say_otherwise() {
        let is_tied = |config: Value| Architecture::from_config(&config).unwrap().llm.is_tied;
        let model = |whole: bool, text: Option<bool>| {
            let text = text.map_or_else(|| json!({}), |tied| json!({TIED: tied}));
            json!({"model_type": "paddleocr_vl", "vision_config": {}, "text_config": text, TIED: whole})
        };
        assert!(is_tied(json!({"model_type": "paddleocr_vl", "vision_config": {}, TIED: false})));
        assert!(is_tied(model(false, None)));
        assert!(is_tied(model(true, Some(false))));
        assert!(!is_tied(model(false, Some(false))));
    }
}
