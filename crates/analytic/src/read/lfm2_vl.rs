//! LFM2-VL: `SigLIP` 2 over pictures, tiles and thumbnails of their own size; a backbone most of whose layers have a short
//! convolution in place of attention.

use super::{TIED, kept_activations, llm, section};
use crate::architecture::{Architecture, Encoder, Llm, MlpKind, NormKind, Patches, Projector, ShortConv};
use crate::defaults::{LFM2, SIGLIP2};
use crate::error::AnalyticError;
use crate::fields::Section;
use serde_json::Value;

/// What the configuration describes.
///
/// Not counted: scaling the table of positions to the size of each picture, and sorting patches by feature.
pub(super) fn read(config: &Value) -> Result<Architecture, AnalyticError> {
    let vision = section(config, "vision_config", SIGLIP2)?;
    vision.must_be("model_type", &["siglip2_vision_model"])?;
    if vision.flag("vision_use_head", true)? {
        return Err(vision.error("vision_use_head", "must be false: nothing reads the head"));
    }
    let (width, side) = (vision.count("hidden_size")?, vision.side("patch_size")?);
    let num_heads = vision.count("num_attention_heads")?;
    vision.divides("num_attention_heads", num_heads, width)?;
    let defaults = &[("downsample_factor", 2), ("projector_hidden_size", 2_560)];
    let whole = Section { path: "", object: config, defaults };
    let factor = whole.count("downsample_factor")?;
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
        has_position_lookup: false,
        has_qk_norm: false,
        has_head_norm: false,
        has_more_norms: false,
        has_layer_scale: false,
        has_rotation: false,
        patches: Patches::Pixels { values: vision.count("num_channels")? * side * side, has_bias: true },
        segment_tokens: None,
        num_class_tokens: 0,
        window_tokens: None,
        unit_tokens: factor * factor,
        num_table_parameters: vision.count("num_patches")? * width,
        has_norm_before: false,
        num_unread_parameters: 0,
        merger: None,
    };
    let projector = Projector {
        norm: Some((NormKind::Layer, false)),
        has_second_norm: false,
        has_merged_norm: whole.flag("projector_use_layernorm", true)?,
        merged_tokens: factor * factor,
        pooled_tokens: 1,
        pooled_norm: None,
        num_dropped_tokens: 0,
        reduced_width: None,
        inner_width: Some(whole.count("projector_hidden_size")?),
        gated_width: None,
        has_bias: whole.flag("projector_bias", true)?,
        num_table_parameters: 0,
        num_deep_layers: 0,
    };
    // The older name of the field counts where it is there; what stands in the backbone's section does not.
    let tied = if whole.get("tie_embedding").is_some() { "tie_embedding" } else { TIED };
    let llm = Llm { is_tied: whole.flag(tied, true)?, ..backbone(config)? };
    Ok(Architecture { family: "lfm2_vl".to_owned(), encoder, projector, sound: None, llm })
}

fn backbone(config: &Value) -> Result<Llm, AnalyticError> {
    let text = section(config, "text_config", LFM2)?;
    text.must_be("model_type", &["lfm2"])?;
    if text.flag("conv_bias", false)? {
        return Err(text.error("conv_bias", "must be false: no published model has biases"));
    }
    let plain = llm(config, &text, false)?;
    Ok(Llm {
        mlp_width: mlp_width(&text)?,
        has_qkv_bias: false,
        has_out_bias: false,
        has_mlp_bias: false,
        has_head_norm: true,
        conv: conv(&text, plain.num_layers)?,
        ..plain
    })
}

/// As `Lfm2MLP` computes it: two thirds, times a factor, up to a multiple, unless `block_auto_adjust_ff_dim` is false.
fn mlp_width(text: &Section) -> Result<u64, AnalyticError> {
    let width = match text.given("block_ff_dim")? {
        Some(width) => width,
        None => text.count("intermediate_size")?,
    };
    if !text.flag("block_auto_adjust_ff_dim", true)? {
        return Ok(width);
    }
    let name = "block_ffn_dim_multiplier";
    let factor = match text.object.get(name) {
        None => Some(1.0),
        Some(value) => value.as_f64().filter(|factor| *factor > 0.0),
    };
    let factor = factor.ok_or_else(|| text.error(name, "must be a number above 0"))?;
    let multiple = text.count("block_multiple_of")?;
    let two_thirds = (2.0 * width as f64 / 3.0) as u64;
    let wanted = (factor * two_thirds as f64) as u64;
    Ok(wanted.div_ceil(multiple) * multiple)
}

/// The layers that have a convolution. `layer_types` names the kind of each layer; where it is absent, `full_attn_idxs` names those
/// without a convolution. `None`: no layer has one.
fn conv(text: &Section, num_layers: u64) -> Result<Option<ShortConv>, AnalyticError> {
    let name = "layer_types";
    let count = if let Some(kinds) = text.get(name) {
        let kinds = kinds.as_array().filter(|kinds| kinds.len() as u64 == num_layers);
        let kinds = kinds.ok_or_else(|| text.error(name, "must name a kind for each layer"))?;
        if kinds.iter().any(|kind| kind != "conv" && kind != "full_attention") {
            return Err(text.error(name, "must be of \"conv\" and \"full_attention\""));
        }
        kinds.iter().filter(|kind| *kind == "conv").count() as u64
    } else if let Some(named) = text.get("full_attn_idxs") {
        let rule = "must name layers";
        let named = named.as_array().ok_or_else(|| text.error("full_attn_idxs", rule))?;
        let is_named = |layer: &u64| named.iter().any(|index| index.as_u64() == Some(*layer));
        (0..num_layers).filter(|layer| !is_named(layer)).count() as u64
    } else {
        0
    };
    if count == num_layers {
        let field = if text.get(name).is_some() { name } else { "full_attn_idxs" };
        return Err(text.error(field, "must leave at least one layer with full attention"));
    }
    let kernel = text.count("conv_L_cache")?;
    Ok((count > 0).then_some(ShortConv { num_layers: count, kernel }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read_text(text: &Value) -> Result<Architecture, AnalyticError> {
        let mut fields = json!({"hidden_size": 64, "num_hidden_layers": 3, "full_attn_idxs": [1]});
        fields.as_object_mut().unwrap().extend(text.as_object().unwrap().clone());
        let vision = json!({"vision_use_head": false});
        Architecture::from_config(
            &json!({"model_type": "lfm2_vl", "vision_config": vision, "text_config": fields}),
        )
    }

    /// 2/3 of 6,656 is 4,437, which is rounded up to 18 x 256; a tenth more is 20 x 256; as it is where it is not adjusted.
    #[test]
    fn the_width_of_the_mlp_by_hand() {
        let width = |text: Value| read_text(&text).unwrap().llm.mlp_width;
        assert_eq!(width(json!({"intermediate_size": 6656})), 4_608);
        assert_eq!(width(json!({"intermediate_size": 1, "block_ff_dim": 6656})), 4_608);
        assert_eq!(width(json!({"intermediate_size": 6656, "block_ffn_dim_multiplier": 1.1})), 5_120);
        assert_eq!(width(json!({"intermediate_size": 6656, "block_auto_adjust_ff_dim": false})), 6_656);
    }

    #[test]
    fn layers_and_ties() {
        let found = read_text(&json!({"tie_word_embeddings": false})).unwrap();
        assert_eq!(found.llm.conv, Some(ShortConv { num_layers: 2, kernel: 3 }));
        assert!(found.llm.is_tied);
        let all = read_text(&json!({"layer_types": ["full_attention", "full_attention", "full_attention"]}));
        assert_eq!(all.unwrap().llm.conv, None);
    }

    #[test]
    fn what_the_class_would_not_build_is_refused_by_name() {
        for (field, value) in [
            ("layer_types", json!(["conv", "full_attention"])),
            ("layer_types", json!(["conv", "conv", "conv"])),
            ("layer_types", json!(["conv", "linear_attention", "full_attention"])),
            ("full_attn_idxs", json!([])),
            ("conv_bias", json!(true)),
            ("block_ffn_dim_multiplier", json!(0)),
            ("block_ffn_dim_multiplier", json!(null)),
            ("model_type", json!("lfm2_moe")),
        ] {
            let error = read_text(&json!({field: value})).unwrap_err().to_string();
            assert!(error.contains(&format!("text_config.{field}`")), "{error}");
        }
        let headed = json!({"model_type": "lfm2_vl", "vision_config": {}, "text_config": {}});
        assert!(Architecture::from_config(&headed).unwrap_err().to_string().contains("vision_use_head"));
    }
}
