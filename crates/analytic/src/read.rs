//! From `config.json` to integers: one function a family, with the defaults of its classes in transformers 5.23.

use crate::architecture::{Architecture, Encoder, Llm, MlpKind, NormKind, Patches, Projector};
use crate::defaults::{
    CLIP, LLAMA, MINISTRAL3, MISTRAL, QWEN2, QWEN2_5_VL_VISION, QWEN2_VL_TEXT, QWEN2_VL_VISION, QWEN3,
    QWEN3_MOE, SIGLIP,
};
use crate::error::AnalyticError;
use crate::fields::Section;
use serde_json::Value;

mod gemma3;
mod gemma4;
mod glm4v;
mod idefics3;
mod internvl;
mod lfm2_vl;
mod minicpmv4_6;
mod mistral3;
mod paddleocr_vl;
mod qwen2_5_omni;
mod qwen3;
mod qwen3_5;
mod qwen3_omni_moe;
mod qwen3_vl;
mod sound;

/// Families whose configuration we read.
pub const FAMILIES: [&str; 29] = [
    "gemma3",
    "gemma4",
    "glm4v",
    "glm4v_moe",
    "glm46v",
    "glm_ocr",
    "idefics3",
    "smolvlm",
    "lfm2_vl",
    "lighton_ocr",
    "llava_onevision",
    "llava",
    "llava_next",
    "internvl",
    "internvl_chat",
    "minicpmv4_6",
    "mistral3",
    "paddleocr_vl",
    "qwen2_vl",
    "qwen2_5_omni",
    "qwen2_5_vl",
    "qwen3_omni_moe",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen2_audio",
    "audioflamingo3",
    "voxtral",
];

impl Architecture {
    /// What `config.json` describes.
    ///
    /// # Errors
    /// [`AnalyticError::UnknownFamily`]; [`AnalyticError::Config`] for a field that decides the size and is missing
    /// without a default, or has a value that we do not know.
    pub fn from_config(config: &Value) -> Result<Self, AnalyticError> {
        let found = config["model_type"].as_str().unwrap_or("missing");
        let whole = Section { path: "", object: config, defaults: &[] };
        if whole.get("quantization_config").is_some() {
            return Err(whole.error("quantization_config", "must be absent: quantized weights do not train"));
        }
        match found {
            "llava_onevision" => llava(config, "llava_onevision"),
            "llava" | "llava_next" => llava(config, found),
            "gemma3" => gemma3::read(config),
            "gemma4" => gemma4::read(config),
            "glm4v" | "glm4v_moe" | "glm46v" | "glm_ocr" => glm4v::read(config, found),
            "idefics3" | "smolvlm" => idefics3::read(config, found),
            "internvl" => internvl::read(config, false),
            "internvl_chat" => internvl::read(config, true),
            "lfm2_vl" => lfm2_vl::read(config),
            "lighton_ocr" | "mistral3" => mistral3::read(config, found),
            "minicpmv4_6" => minicpmv4_6::read(config),
            "paddleocr_vl" => paddleocr_vl::read(config),
            "qwen2_vl" => qwen_vl(config, false, QWEN2_VL_TEXT),
            "qwen2_5_vl" => qwen_vl(config, true, QWEN2_VL_TEXT),
            "qwen2_5_omni" => qwen2_5_omni::read(config),
            "qwen3_omni_moe" => qwen3_omni_moe::read(config),
            "qwen3_vl" => qwen3_vl::read(config, false),
            "qwen3_vl_moe" => qwen3_vl::read(config, true),
            "qwen3_5" => qwen3_5::read(config, false),
            "qwen3_5_moe" => qwen3_5::read(config, true),
            "qwen2_audio" => sound::qwen2_audio(config),
            "audioflamingo3" => sound::audioflamingo3(config),
            "voxtral" => sound::voxtral(config),
            _ => Err(AnalyticError::UnknownFamily { found: found.to_owned(), known: FAMILIES.join(", ") }),
        }
    }
}

/// Whether the head's matrix is that of the embedding. Most families ask either configuration; Hugging Face's classes
/// decide (`test_flops.py` holds each against them).
const TIED: &str = "tie_word_embeddings";

/// A section that must be there.
fn section<'a>(
    config: &'a Value,
    path: &'static str,
    defaults: &'static [(&'static str, u64)],
) -> Result<Section<'a>, AnalyticError> {
    match config.get(path) {
        Some(object) if object.is_object() => Ok(Section { path, object, defaults }),
        _ => Err(Section { path: "", object: config, defaults }.error(path, "must be a section")),
    }
}

/// The backbone that `path` describes: Qwen2, Qwen3, Llama, Mistral or Ministral 3; `absent` is its type where it names none.
fn text(config: &Value, path: &'static str, absent: &str) -> Result<Llm, AnalyticError> {
    let named = section(config, path, &[])?;
    named.must_be("model_type", &["qwen2", "qwen3", "qwen3_moe", "llama", "mistral", "ministral3"])?;
    match named.get("model_type").and_then(Value::as_str).unwrap_or(absent) {
        "llama" => llm(config, &Section { defaults: LLAMA, ..named }, false),
        "mistral" => mistral3::backbone(config, &Section { defaults: MISTRAL, ..named }, true),
        "ministral3" => mistral3::backbone(config, &Section { defaults: MINISTRAL3, ..named }, false),
        "qwen3" => qwen3::backbone(config, &Section { defaults: QWEN3, ..named }, false),
        "qwen3_moe" => qwen3::backbone(config, &Section { defaults: QWEN3_MOE, ..named }, true),
        _ => llm(config, &Section { defaults: QWEN2, ..named }, true),
    }
}

fn llm(config: &Value, text: &Section, is_qwen: bool) -> Result<Llm, AnalyticError> {
    if text.flag("use_sliding_window", false)? {
        return Err(
            text.error("use_sliding_window", "must be false: attention within windows is not modelled")
        );
    }
    let width = text.count("hidden_size")?;
    let num_heads = text.count("num_attention_heads")?;
    let num_key_value_heads = match text.count("num_key_value_heads") {
        // Absent in a Llama: as many as heads.
        Err(_) if text.get("num_key_value_heads").is_none() => num_heads,
        other => other?,
    };
    text.divides("num_key_value_heads", num_key_value_heads, num_heads)?;
    let head_size = match text.given("head_dim")? {
        Some(head_size) => head_size,
        None => match text.count("head_dim") {
            // Of the class.
            Ok(head_size) => head_size,
            Err(_) => text.divides("num_attention_heads", num_heads, width)?,
        },
    };
    let whole = Section { path: "", object: config, defaults: &[] };
    let is_tied = whole.flag(TIED, false)? || text.flag(TIED, false)?;
    let has_bias = text.flag("attention_bias", false)?;
    Ok(Llm {
        num_layers: text.count("num_hidden_layers")?,
        width,
        num_heads,
        num_key_value_heads,
        head_size,
        mlp_width: text.count("intermediate_size")?,
        experts: None,
        vocabulary: text.count("vocab_size")?,
        is_tied,
        has_qkv_bias: is_qwen || has_bias,
        has_out_bias: !is_qwen && has_bias,
        has_mlp_bias: !is_qwen && text.flag("mlp_bias", false)?,
        has_head_norm: false,
        norm: NormKind::Rms,
        rotated_size: head_size,
        has_output_gate: false,
        linear: None,
        conv: None,
        sliding: None,
        full_heads: None,
        has_value_norm: false,
        has_layer_scalar: false,
        has_logit_cap: false,
        has_scaled_embedding: false,
        has_one_gate_product: false,
        has_norm_after: false,
    })
}

/// Values of a head that are rotated, where `partial_rotary_factor` says which share; `absent` is the class's.
fn rotated_size(text: &Section, head_size: u64, absent: f64) -> Result<u64, AnalyticError> {
    let name = "partial_rotary_factor";
    let nested = text.get("rope_parameters").and_then(|rope| rope.get(name)).or_else(|| text.get(name));
    let factor = nested.map_or(Some(absent), Value::as_f64).filter(|factor| *factor > 0.0 && *factor <= 1.0);
    let factor = factor.ok_or_else(|| text.error(name, "must be above 0 and at most 1"))?;
    Ok((head_size as f64 * factor) as u64)
}

/// Layers run up to the one that features are taken from, of `num_layers`; those after it are not read.
fn layers_read(config: &Value, num_layers: u64, absent: i64) -> Result<(u64, u64), AnalyticError> {
    let whole = Section { path: "", object: config, defaults: &[] };
    let name = "vision_feature_layer";
    let index = match whole.get(name) {
        None => Some(absent),
        Some(value) => value.as_i64(),
    };
    let last = num_layers.cast_signed();
    let read = index.map(|index| if index < 0 { last + 1 + index } else { index });
    match read.filter(|read| (1..=last).contains(read)) {
        Some(read) => Ok((read.cast_unsigned(), (last - read).cast_unsigned())),
        None => Err(whole.error(name, "must be one layer of the encoder")),
    }
}

/// Values kept for each that goes through the activation function in `field`; `absent` is the class's.
fn kept_activations(section: &Section, field: &str, absent: &str) -> u64 {
    let name = section.get(field).and_then(Value::as_str).unwrap_or(absent);
    if name == "quick_gelu" { 2 } else { 1 }
}

/// A tower of tiles of one size, whose layers are SigLIP's and CLIP's.
fn tiles(vision: &Section, num_class_tokens: u64, has_patch_bias: bool) -> Result<Encoder, AnalyticError> {
    let (width, side) = (vision.count("hidden_size")?, vision.side("patch_size")?);
    let num_heads = vision.count("num_attention_heads")?;
    vision.divides("num_attention_heads", num_heads, width)?;
    // A convolution leaves out what does not fill a patch.
    let per_side = vision.side("image_size")? / side;
    if per_side == 0 {
        return Err(vision.error("image_size", "must be at least `patch_size`"));
    }
    let tokens = per_side * per_side + num_class_tokens;
    Ok(Encoder {
        num_layers: vision.count("num_hidden_layers")?,
        num_window_layers: 0,
        num_unread_layers: 0,
        width,
        num_heads,
        mlp_width: vision.count("intermediate_size")?,
        mlp: MlpKind::Plain,
        num_kept_activations: kept_activations(vision, "hidden_act", "gelu"),
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
        has_rotation: false,
        patches: Patches::Pixels {
            values: vision.count("num_channels")? * side * side,
            has_bias: has_patch_bias,
        },
        segment_tokens: Some(tokens),
        num_class_tokens,
        window_tokens: None,
        unit_tokens: tokens,
        num_table_parameters: (tokens + num_class_tokens) * width,
        has_norm_before: false,
        num_unread_parameters: 0,
        merger: None,
    })
}

/// Parameters of the pooling head of SigLIP, where the configuration has it: a probe, attention, norm, MLP.
fn siglip_head(config: &Value, siglip: &Encoder) -> Result<u64, AnalyticError> {
    let vision = section(config, "vision_config", SIGLIP)?;
    let (w, f) = (siglip.width, siglip.mlp_width);
    let head = w + 4 * w * w + 4 * w + 2 * w + 2 * w * f + f + w;
    Ok(if vision.flag("vision_use_head", true)? { head } else { 0 })
}

/// LLaVA 1.5, LLaVA-NeXT and LLaVA-OneVision: SigLIP or CLIP, two products; the last two have a newline.
fn llava(config: &Value, family: &str) -> Result<Architecture, AnalyticError> {
    let (is_one_vision, is_next) = (family == "llava_onevision", family == "llava_next");
    let named = section(config, "vision_config", &[])?;
    named.must_be("model_type", &["siglip_vision_model", "clip_vision_model"])?;
    let absent = if is_one_vision { "siglip_vision_model" } else { "clip_vision_model" };
    let is_clip = named.get("model_type").and_then(Value::as_str).unwrap_or(absent) == "clip_vision_model";
    let mut encoder = if is_clip {
        let clip = tiles(&Section { defaults: CLIP, ..named }, 1, false)?;
        let vision = section(config, "vision_config", CLIP)?;
        Encoder {
            has_norm_before: true,
            num_unread_parameters: 2 * clip.width,
            // Of the class.
            num_kept_activations: kept_activations(&vision, "hidden_act", "quick_gelu"),
            ..clip
        }
    } else {
        let siglip = tiles(&Section { defaults: SIGLIP, ..named }, 0, true)?;
        // The last norm, and the head.
        Encoder { num_unread_parameters: 2 * siglip.width + siglip_head(config, &siglip)?, ..siglip }
    };
    let absent_layer = if is_one_vision { -1 } else { -2 };
    (encoder.num_layers, encoder.num_unread_layers) = layers_read(config, encoder.num_layers, absent_layer)?;
    let whole = Section { path: "", object: config, defaults: &[] };
    whole.must_be("vision_feature_select_strategy", &["default", "full"])?;
    let strategy = whole.get("vision_feature_select_strategy").and_then(Value::as_str);
    let drops_class = strategy.unwrap_or(if is_one_vision { "full" } else { "default" }) == "default";
    let mut llm = text(config, "text_config", if is_one_vision { "qwen2" } else { "llama" })?;
    if is_next {
        // Not asked of the backbone here.
        llm.is_tied = whole.flag(TIED, false)?;
    }
    let projector = Projector {
        norm: None,
        has_second_norm: false,
        has_merged_norm: false,
        merged_tokens: 1,
        pooled_tokens: 1,
        pooled_norm: None,
        num_dropped_tokens: u64::from(drops_class),
        reduced_width: None,
        inner_width: Some(llm.width),
        gated_width: None,
        has_bias: whole.flag("multimodal_projector_bias", true)?,
        num_table_parameters: if is_one_vision || is_next { llm.width } else { 0 },
        num_deep_layers: 0,
    };
    Ok(Architecture { family: family.to_owned(), encoder, projector, sound: None, llm })
}

/// Qwen2-VL and Qwen2.5-VL: patches of the picture's own size, merged four to one. `text_defaults` are those of the
/// backbone.
fn qwen_vl(
    config: &Value,
    is_2_5: bool,
    text_defaults: &'static [(&'static str, u64)],
) -> Result<Architecture, AnalyticError> {
    let defaults = if is_2_5 { QWEN2_5_VL_VISION } else { QWEN2_VL_VISION };
    let vision = section(config, "vision_config", defaults)?;
    let width = vision.count(if is_2_5 { "hidden_size" } else { "embed_dim" })?;
    let num_heads = vision.count("num_heads")?;
    vision.divides("num_heads", num_heads, width)?;
    let (merge, side) = (vision.count("spatial_merge_size")?, vision.side("patch_size")?);
    let num_layers = vision.count("depth")?;
    // Older files name the channels as their processor does, which the class does not read.
    let values = vision.count("in_channels")? * vision.count("temporal_patch_size")? * side * side;
    let (num_window_layers, window_tokens) =
        if is_2_5 { windows(&vision, num_layers, merge, side)? } else { (0, None) };
    let encoder = Encoder {
        num_layers,
        num_window_layers,
        num_unread_layers: 0,
        width,
        num_heads,
        mlp_width: if is_2_5 {
            vision.count("intermediate_size")?
        } else {
            vision.count("mlp_ratio")? * width
        },
        mlp: if is_2_5 { MlpKind::Gated } else { MlpKind::Plain },
        num_kept_activations: kept_activations(
            &vision,
            "hidden_act",
            if is_2_5 { "silu" } else { "quick_gelu" },
        ),
        norm: if is_2_5 { NormKind::Rms } else { NormKind::Layer },
        num_qkv_biases: 3,
        has_other_biases: true,
        has_one_qkv_product: true,
        num_kept_copies: 2,
        has_position_lookup: false,
        has_qk_norm: false,
        has_head_norm: false,
        has_more_norms: false,
        has_layer_scale: false,
        has_rotation: true,
        patches: Patches::Pixels { values, has_bias: false },
        segment_tokens: None,
        num_class_tokens: 0,
        window_tokens,
        unit_tokens: merge * merge,
        num_table_parameters: 0,
        has_norm_before: false,
        num_unread_parameters: 0,
        merger: None,
    };
    // Files of the hub carry the backbone's fields at the top; newer ones in a section.
    let nested = config.get("text_config").filter(|section| section.is_object());
    let path = if nested.is_some() { "text_config" } else { "" };
    let text = Section { path, object: nested.unwrap_or(config), defaults: text_defaults };
    let llm = llm(config, &text, true)?;
    let projector = Projector {
        norm: Some((encoder.norm, false)),
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
        num_deep_layers: 0,
    };
    let out = if is_2_5 { vision.given("out_hidden_size")?.unwrap_or(3_584) } else { llm.width };
    if out != llm.width {
        return Err(vision.error("out_hidden_size", &format!("must be the backbone's width, {}", llm.width)));
    }
    let family = if is_2_5 { "qwen2_5_vl" } else { "qwen2_vl" };
    Ok(Architecture { family: family.to_owned(), encoder, projector, sound: None, llm })
}

/// Layers with windows, and patches of a window.
fn windows(
    vision: &Section,
    num_layers: u64,
    merge: u64,
    side: u64,
) -> Result<(u64, Option<u64>), AnalyticError> {
    let name = "fullatt_block_indexes";
    let full = match vision.get(name) {
        // Of the class.
        None => vec![7, 15, 23, 31],
        Some(list) => {
            let indices = list.as_array().map(|list| list.iter().filter_map(Value::as_u64).collect());
            indices.ok_or_else(|| vision.error(name, "must be a list of layers"))?
        }
    };
    let num_full = (0..num_layers).filter(|layer| full.contains(layer)).count() as u64;
    let merged = vision.count("window_size")? / merge / side;
    if merged == 0 {
        return Err(vision.error("window_size", "must hold at least one merged patch"));
    }
    let num_window_layers = num_layers - num_full;
    if num_full == 0 {
        return Err(vision.error(name, "must name at least one layer"));
    }
    Ok((num_window_layers, (num_window_layers > 0).then_some(merged * merged * merge * merge)))
}
