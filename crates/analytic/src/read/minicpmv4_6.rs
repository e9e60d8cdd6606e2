//! MiniCPM-V 4.6: an encoder like `SigLIP` over pictures and slices of their own size, with a merger between its layers; the backbone
//! of Qwen3.5.

use super::{kept_activations, qwen3_5, section};
use crate::architecture::{Architecture, Encoder, MlpKind, NormKind, Patches, Projector, WindowMerger};
use crate::defaults::MINICPMV4_6_VISION;
use crate::error::AnalyticError;
use crate::fields::Section;
use serde_json::{Value, json};

/// Patches of a window, and rows that become a feature.
const WINDOW: u64 = 4;

/// What the configuration describes.
///
/// Not counted: sorting patches by feature.
pub(super) fn read(config: &Value) -> Result<Architecture, AnalyticError> {
    let vision = section(config, "vision_config", MINICPMV4_6_VISION)?;
    vision.must_be("model_type", &["minicpmv4_6_vision"])?;
    let whole =
        Section { path: "", object: config, defaults: &[("insert_layer_id", 6), ("merger_times", 1)] };
    for (of, field) in [(&vision, "window_kernel_size"), (&whole, "merge_kernel_size")] {
        if of.get(field).is_some_and(|value| *value != json!([2, 2])) {
            return Err(of.error(field, "must be [2, 2]"));
        }
    }
    if whole.count("merger_times")? != 1 {
        return Err(whole.error("merger_times", "must be 1"));
    }
    whole.must_be("downsample_mode", &["4x", "16x"])?;
    let is_merged = whole.get("downsample_mode").is_none_or(|mode| mode == "16x");
    let text = section(config, "text_config", &[])?;
    text.must_be("model_type", &["qwen3_5_text"])?;
    let (width, side) = (vision.count("hidden_size")?, vision.side("patch_size")?);
    let (num_heads, num_layers) = (vision.count("num_attention_heads")?, vision.count("num_hidden_layers")?);
    vision.divides("num_attention_heads", num_heads, width)?;
    let mlp_width = vision.count("intermediate_size")?;
    let inner_width = WINDOW * mlp_width;
    let place = match whole.get("insert_layer_id") {
        Some(value) => value.as_u64(),
        None => Some(6),
    };
    let place = place.filter(|place| !is_merged || *place < num_layers);
    let place =
        place.ok_or_else(|| whole.error("insert_layer_id", "must be the number of a layer, from 0"))?;
    let merger = is_merged.then(|| WindowMerger {
        num_layers: num_layers - place - 1,
        window_tokens: WINDOW,
        inner_width,
    });
    let patches_a_side = vision.side("image_size")? / side;
    // Two norms, attention, and an MLP over four patches side by side; with \"4x\" no forward reads them.
    let of_merger = 2 * width
        + 4 * (width + 1) * width
        + 2 * WINDOW * width
        + (WINDOW * width + 1) * inner_width
        + (inner_width + 1) * width;
    let encoder = Encoder {
        num_layers,
        num_window_layers: 0,
        num_unread_layers: 0,
        width,
        num_heads,
        mlp_width,
        mlp: MlpKind::Plain,
        num_kept_activations: kept_activations(&vision, "hidden_act", "gelu_pytorch_tanh"),
        norm: NormKind::Layer,
        num_qkv_biases: 3,
        has_other_biases: true,
        has_one_qkv_product: false,
        num_kept_copies: 0,
        // Positions are looked up before the merger, whose last product recomputation leaves out.
        has_position_lookup: !is_merged,
        has_qk_norm: false,
        has_head_norm: false,
        has_more_norms: false,
        has_layer_scale: false,
        has_rotation: false,
        patches: Patches::Pixels { values: vision.count("num_channels")? * side * side, has_bias: true },
        segment_tokens: None,
        num_class_tokens: 0,
        window_tokens: None,
        unit_tokens: if is_merged { WINDOW * WINDOW } else { WINDOW },
        num_table_parameters: patches_a_side * patches_a_side * width + if is_merged { 0 } else { of_merger },
        has_norm_before: false,
        num_unread_parameters: 0,
        merger,
    };
    let projector = Projector {
        norm: Some((NormKind::Layer, false)),
        has_second_norm: false,
        has_merged_norm: true,
        merged_tokens: WINDOW,
        pooled_tokens: if is_merged { WINDOW } else { 1 },
        pooled_norm: None,
        num_dropped_tokens: 0,
        reduced_width: None,
        inner_width: Some(WINDOW * width),
        gated_width: None,
        has_bias: true,
        num_table_parameters: 0,
        num_deep_layers: 0,
    };
    let llm = qwen3_5::backbone(config, false)?;
    Ok(Architecture { family: "minicpmv4_6".to_owned(), encoder, projector, sound: None, llm })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tiny(change: &Value) -> Result<Architecture, AnalyticError> {
        let mut config = json!({
            "model_type": "minicpmv4_6",
            "vision_config": {
                "hidden_size": 4, "num_attention_heads": 2, "intermediate_size": 6, "patch_size": 2, "image_size": 6,
                "num_hidden_layers": 5,
            },
            "text_config": {"model_type": "qwen3_5_text"},
            "insert_layer_id": 1,
        });
        config.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        Architecture::from_config(&config)
    }

    /// Three of five layers read a quarter of the tokens: an eighth of what they cost before is attention of a 16th.
    #[test]
    fn layers_behind_the_merger_read_a_quarter() {
        let modules = tiny(&json!({})).unwrap().modules();
        let named = |name: &str| modules.iter().find(|module| module.name == name).unwrap();
        let (first, merged) = (named("encoder_layer"), named(crate::MERGED_LAYER));
        assert_eq!((first.count, merged.count), (2, 3));
        assert_eq!(first.num_parameters(), merged.num_parameters());
        assert_eq!(merged.flops(&[64, 32]).forward, first.flops(&[16, 8]).forward);
        assert_eq!(merged.flops(&[64]).input, first.flops(&[16]).input);
        let fine = tiny(&json!({"downsample_mode": "4x"})).unwrap();
        assert_eq!(fine.modules().iter().find(|one| one.name == "encoder_layer").unwrap().count, 5);
        let whole = tiny(&json!({})).unwrap();
        assert_eq!(fine.num_parameters(), whole.num_parameters());
    }

    #[test]
    fn what_the_class_would_not_build_is_refused_by_name() {
        for (field, value) in [
            ("insert_layer_id", json!(5)),
            ("insert_layer_id", json!(-1)),
            ("downsample_mode", json!("8x")),
            ("merger_times", json!(2)),
            ("merge_kernel_size", json!([4, 4])),
            ("text_config", json!({"model_type": "qwen3"})),
        ] {
            let error = tiny(&json!({field: value})).unwrap_err().to_string();
            assert!(error.contains(field), "{error}");
        }
    }
}
