//! Mistral3 and `LightOnOCR`: Pixtral's patches of the picture's own size, without any bias, merged four to one; backbones of Mistral
//! or Qwen3.

use super::{TIED, kept_activations, llm, section, text};
use crate::architecture::{Architecture, Encoder, Llm, MlpKind, NormKind, Patches, Projector};
use crate::defaults::PIXTRAL;
use crate::error::AnalyticError;
use crate::fields::Section;
use serde_json::Value;

/// The backbone that `text` describes: a Llama without biases. Where the class has windows unless told otherwise
/// (`has_windows`), the file must say that there are none.
///
/// Ministral 3 scales its queries by their positions. That is not counted: a pass over the queries, and two bytes of a
/// token that are kept.
pub(super) fn backbone(config: &Value, text: &Section, has_windows: bool) -> Result<Llm, AnalyticError> {
    let field = "sliding_window";
    let is_given = text.object.get(field).is_some();
    if text.get(field).is_some() || has_windows && !is_given {
        return Err(text.error(field, "must be null: attention within windows is not modelled"));
    }
    let llm = llm(config, text, false)?;
    Ok(Llm { has_qkv_bias: false, has_out_bias: false, has_mlp_bias: false, ..llm })
}

/// What the configuration describes; `family` is `mistral3` or `lighton_ocr`.
pub(super) fn read(config: &Value, family: &str) -> Result<Architecture, AnalyticError> {
    let is_mistral = family == "mistral3";
    let vision = section(config, "vision_config", PIXTRAL)?;
    vision.must_be("model_type", &["pixtral"])?;
    let (width, side) = (vision.count("hidden_size")?, vision.side("patch_size")?);
    let num_heads = vision.count("num_attention_heads")?;
    vision.divides("num_attention_heads", num_heads, width)?;
    let defaults = &[("spatial_merge_size", 2)];
    let whole = Section { path: "", object: config, defaults };
    let read_layer = "vision_feature_layer";
    // LightOnOCR always reads the last layer, and its projector has no bias, whatever its file says.
    if is_mistral && config.get(read_layer).is_some_and(|layer| *layer != -1) {
        return Err(
            whole.error(read_layer, "must be -1, the last: encoders of which less is read are not modelled")
        );
    }
    let merge = whole.count("spatial_merge_size")?;
    let encoder = Encoder {
        num_layers: vision.count("num_hidden_layers")?,
        num_window_layers: 0,
        num_unread_layers: 0,
        width,
        num_heads,
        mlp_width: vision.count("intermediate_size")?,
        mlp: MlpKind::Gated,
        num_kept_activations: kept_activations(&vision, "hidden_act", "gelu"),
        norm: NormKind::Rms,
        num_qkv_biases: 0,
        has_other_biases: false,
        has_one_qkv_product: false,
        num_kept_copies: 0,
        has_position_lookup: false,
        has_qk_norm: false,
        has_head_norm: false,
        has_more_norms: false,
        has_layer_scale: false,
        has_rotation: true,
        patches: Patches::Pixels { values: vision.count("num_channels")? * side * side, has_bias: false },
        segment_tokens: None,
        num_class_tokens: 0,
        window_tokens: None,
        unit_tokens: merge * merge,
        num_table_parameters: 0,
        has_norm_before: true,
        num_unread_parameters: 0,
        merger: None,
    };
    let backbone = if is_mistral { "mistral" } else { "qwen3" };
    // Not asked of the backbone here, and true where it is absent.
    let llm = Llm { is_tied: whole.flag(TIED, true)?, ..text(config, "text_config", backbone)? };
    let projector = Projector {
        norm: Some((NormKind::Rms, false)),
        has_second_norm: false,
        has_merged_norm: false,
        merged_tokens: merge * merge,
        pooled_tokens: 1,
        pooled_norm: None,
        num_dropped_tokens: 0,
        reduced_width: Some(width),
        inner_width: Some(llm.width),
        gated_width: None,
        has_bias: is_mistral && whole.flag("multimodal_projector_bias", false)?,
        num_table_parameters: 0,
        num_deep_layers: 0,
    };
    Ok(Architecture { family: family.to_owned(), encoder, projector, sound: None, llm })
}
