//! GLM-4.1V and GLM-4.6V: patches of the picture's own size with learnt positions, merged four to one by a convolution; a
//! backbone with a norm before and after attention and MLP. GLM-4.5V has the backbone of GLM-4.5, whose layers have experts,
//! all but the first. GLM-OCR has no learnt positions, and norms over the heads of its encoder.

use super::{TIED, kept_activations, llm, rotated_size, section};
use crate::architecture::{
    Architecture, Encoder, Experts, Llm, MlpKind, NormKind, Patches, Projector, Router,
};
use crate::defaults::{GLM_OCR_TEXT, GLM_OCR_VISION, GLM4V_MOE_TEXT, GLM4V_TEXT, GLM4V_VISION};
use crate::error::AnalyticError;
use crate::fields::Section;
use serde_json::Value;

/// What the configuration describes.
///
/// Not counted: the sum of sixteen rows of the table that is the position of a patch.
pub(super) fn read(config: &Value, family: &str) -> Result<Architecture, AnalyticError> {
    let (has_experts, is_ocr) = (family == "glm4v_moe", family == "glm_ocr");
    let [of_vision, of_text] = match family {
        "glm4v_moe" => [GLM4V_VISION, GLM4V_MOE_TEXT],
        "glm_ocr" => [GLM_OCR_VISION, GLM_OCR_TEXT],
        _ => [GLM4V_VISION, GLM4V_TEXT],
    };
    // GLM-4.6V has the parts of GLM-4.1V.
    let stem = if family == "glm46v" { "glm4v" } else { family };
    let vision = section(config, "vision_config", of_vision)?;
    // Files of the hub name the whole model there.
    vision.must_be("model_type", &[&format!("{stem}_vision"), stem])?;
    let text = section(config, "text_config", of_text)?;
    text.must_be("model_type", &[&format!("{stem}_text")])?;
    let llm = if has_experts { sparse(config, &text)? } else { backbone(config, &text, family)? };
    let width = vision.count("hidden_size")?;
    let num_heads = vision.count("num_heads")?;
    vision.divides("num_heads", num_heads, width)?;
    let out = vision.count("out_hidden_size")?;
    if out != llm.width {
        return Err(vision.error("out_hidden_size", &format!("must be the backbone's width, {}", llm.width)));
    }
    let (merge, side) = (vision.count("spatial_merge_size")?, vision.count("patch_size")?);
    let per_side = vision.count("image_size")? / side;
    if per_side == 0 {
        return Err(vision.error("image_size", "must be at least `patch_size`"));
    }
    let values = vision.count("in_channels")? * vision.count("temporal_patch_size")? * side * side;
    let has_biases = vision.flag("attention_bias", is_ocr)?;
    let encoder = Encoder {
        num_layers: vision.count("depth")?,
        num_window_layers: 0,
        num_unread_layers: 0,
        width,
        num_heads,
        // For GLM-OCR `intermediate_size` is the width in a layer; for the other models it is that of the MLP behind all layers.
        mlp_width: if is_ocr { vision.count("intermediate_size")? } else { out },
        mlp: MlpKind::Gated,
        num_kept_activations: kept_activations(&vision, "hidden_act", "silu"),
        norm: NormKind::Rms,
        num_qkv_biases: if has_biases { 3 } else { 0 },
        has_other_biases: is_ocr && has_biases,
        has_one_qkv_product: true,
        num_kept_copies: 2,
        has_position_lookup: !is_ocr,
        has_qk_norm: false,
        has_head_norm: is_ocr,
        has_more_norms: false,
        has_layer_scale: false,
        has_rotation: true,
        patches: Patches::Pixels { values, has_bias: true },
        segment_tokens: None,
        num_class_tokens: 0,
        window_tokens: None,
        unit_tokens: merge * merge,
        num_table_parameters: if is_ocr { 0 } else { per_side * per_side * width },
        has_norm_before: !is_ocr,
        num_unread_parameters: 0,
        merger: None,
    };
    let projector = Projector {
        norm: Some((NormKind::Rms, false)),
        has_second_norm: false,
        has_merged_norm: false,
        merged_tokens: merge * merge,
        pooled_tokens: 1,
        pooled_norm: None,
        num_dropped_tokens: 0,
        reduced_width: None,
        inner_width: None,
        gated_width: Some(if is_ocr {
            // As its class has it: three times the backbone's width, of three channels.
            out * vision.count("in_channels")?
        } else {
            vision.count("intermediate_size")?
        }),
        has_bias: false,
        num_table_parameters: 0,
        num_deep_layers: 0,
    };
    Ok(Architecture { family: family.to_owned(), encoder, projector, sound: None, llm })
}

/// The backbone. Its products of queries, keys and values have biases, whatever the file says. GLM-OCR's have none.
fn backbone(config: &Value, text: &Section, family: &str) -> Result<Llm, AnalyticError> {
    let whole = Section { path: "", object: config, defaults: &[] };
    let is_ocr = family == "glm_ocr";
    let llm = llm(config, text, true)?;
    if !is_ocr && llm.head_size * llm.num_heads != llm.width {
        return Err(text.error("head_dim", "must be `hidden_size` over `num_attention_heads`"));
    }
    // GLM-4.6V does not ask the backbone.
    let is_tied = if family == "glm46v" { whole.flag(TIED, false)? } else { llm.is_tied };
    let rotated_size = rotated_size(text, llm.head_size, 1.0)?;
    Ok(Llm {
        is_tied,
        has_qkv_bias: !is_ocr,
        rotated_size,
        has_one_gate_product: true,
        has_norm_after: true,
        ..llm
    })
}

/// The backbone of GLM-4.5V. What its file says of a norm over heads (`use_qk_norm`) its class does not read.
///
/// The correction biases of the routers are no parameters. Not counted: that the product of the router is in float32, which a
/// device computes slower; it is 0.2% of a layer's operations in GLM-4.5V.
fn sparse(config: &Value, text: &Section) -> Result<Llm, AnalyticError> {
    let has_qkv_bias = text.flag("attention_bias", true)?;
    let plain = llm(config, text, true)?;
    Ok(Llm {
        has_qkv_bias,
        rotated_size: rotated_size(text, plain.head_size, 0.5)?,
        experts: experts(text, plain.num_layers)?,
        ..plain
    })
}

/// What the layers from `first_k_dense_replace` on have in place of the MLP; `None` where that leaves no layer.
fn experts(text: &Section, num_layers: u64) -> Result<Option<Experts>, AnalyticError> {
    let name = "first_k_dense_replace";
    let num_dense_layers = match text.get(name) {
        None => 1,
        Some(value) => value.as_u64().ok_or_else(|| text.error(name, "must be a number of layers"))?,
    };
    if num_dense_layers >= num_layers {
        return Ok(None);
    }
    // Either name is the other's in the class.
    let other = "num_local_experts";
    let count = text.count(if text.get(other).is_some() { other } else { "n_routed_experts" })?;
    let width = text.count("moe_intermediate_size")?;
    let per_token = text.count("num_experts_per_tok")?;
    if per_token > count {
        return Err(text.error("num_experts_per_tok", &format!("must be at most the {count} experts")));
    }
    Ok(Some(Experts {
        count,
        per_token,
        width,
        shared_width: text.count("n_shared_experts")? * width,
        has_shared_gate: false,
        router: Router::Sigmoid,
        num_dense_layers,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_the_class_would_not_build_is_refused_by_name() {
        let error = |vision: Value, text: Value| {
            let config = json!({"model_type": "glm4v", "vision_config": vision, "text_config": text});
            Architecture::from_config(&config).unwrap_err().to_string()
        };
        let none = || json!({});
        let sparse = |mut text: Value| {
            text["head_dim"] = json!(128);
            let config = json!({"model_type": "glm4v_moe", "vision_config": {}, "text_config": text});
            Architecture::from_config(&config).unwrap_err().to_string()
        };
        assert!(
            Architecture::from_config(
                &json!({"model_type": "glm46v", "vision_config": {}, "text_config": {}})
            )
            .is_ok()
        );
        let errors = [
            error(json!({"out_hidden_size": 2_048}), none()),
            error(json!({"model_type": "clip_vision_model"}), none()),
            error(json!({"image_size": 13}), none()),
            error(json!({"num_heads": 7}), none()),
            error(none(), json!({"head_dim": 64})),
            error(none(), json!({"model_type": "glm4v_moe_text"})),
            sparse(json!({"num_experts_per_tok": 129})),
            sparse(json!({"first_k_dense_replace": -1})),
            sparse(json!({"model_type": "glm4v_text"})),
        ];
        for (error, (field, rule)) in errors.iter().zip([
            ("`vision_config.out_hidden_size` is 2048", "must be the backbone's width, 4096"),
            ("`vision_config.model_type`", "must be \"glm4v_vision\""),
            ("`vision_config.image_size` is 13", "must be at least `patch_size`"),
            ("`vision_config.num_heads` is 7", "must divide 1536"),
            ("`text_config.head_dim` is 64", "must be `hidden_size` over"),
            ("`text_config.model_type`", "must be \"glm4v_text\""),
            ("`text_config.num_experts_per_tok` is 129", "must be at most the 128 experts"),
            ("`text_config.first_k_dense_replace` is -1", "must be a number of layers"),
            ("`text_config.model_type`", "must be \"glm4v_moe_text\""),
        ]) {
            assert!(error.contains(field) && error.contains(rule), "{error}");
        }
    }

    /// A flat file, as the oldest of the hub are, names no section: what its class would take in its place is not guessed.
    #[test]
    fn a_file_without_sections_is_refused() {
        let error =
            Architecture::from_config(&json!({"model_type": "glm4v", "hidden_size": 4_096})).unwrap_err();
        assert!(error.to_string().contains("`vision_config` is missing, must be a section"), "{error}");
    }
}
