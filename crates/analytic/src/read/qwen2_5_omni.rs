//! Qwen2.5-Omni's thinker: Qwen2.5-VL with queries, keys and values of its vision tower apart, and beside that tower
//! Whisper's encoder over windows of two seconds.

use super::{TIED, kept_activations, qwen_vl, section};
use crate::architecture::{Architecture, Encoder, Llm, MlpKind, NormKind, Patches, Projector};
use crate::defaults::{QWEN2_5_OMNI_AUDIO, QWEN2_5_OMNI_TEXT};
use crate::error::AnalyticError;
use crate::fields::Section;
use serde_json::Value;

const THINKER: &str = "thinker_config";

/// What the file of the whole model says of the thinker.
pub(super) fn read(config: &Value) -> Result<Architecture, AnalyticError> {
    of_thinker(config, thinker_alone)
}

/// What `read` makes of the section of the thinker. Errors name fields with the section.
pub(super) fn of_thinker(
    config: &Value,
    read: fn(&Value) -> Result<Architecture, AnalyticError>,
) -> Result<Architecture, AnalyticError> {
    let thinker = section(config, THINKER, &[])?.object;
    read(thinker).map_err(|error| match error {
        AnalyticError::Config { field, value, rule } => {
            AnalyticError::Config { field: format!("{THINKER}.{field}"), value, rule }
        }
        other => other,
    })
}

fn thinker_alone(thinker: &Value) -> Result<Architecture, AnalyticError> {
    check_types(
        thinker,
        [
            ("text_config", "qwen2_5_omni_text"),
            ("vision_config", "qwen2_5_omni_vision_encoder"),
            ("audio_config", "qwen2_5_omni_audio_encoder"),
        ],
    )?;
    let pictures = qwen_vl(thinker, true, QWEN2_5_OMNI_TEXT)?;
    // Hugging Face's class asks the thinker alone.
    let is_tied = Section { path: "", object: thinker, defaults: &[] }.flag(TIED, false)?;
    let llm = Llm { is_tied, ..pictures.llm };
    let encoder = Encoder { has_one_qkv_product: false, num_kept_copies: 0, ..pictures.encoder };
    let sound = sounds(&section(thinker, "audio_config", QWEN2_5_OMNI_AUDIO)?, llm.width)?;
    Ok(Architecture {
        family: "qwen2_5_omni".to_owned(),
        encoder,
        projector: pictures.projector,
        sound: Some(sound),
        llm,
    })
}

/// Refuses a thinker whose sections are of other types than these.
pub(super) fn check_types(thinker: &Value, types: [(&'static str, &str); 3]) -> Result<(), AnalyticError> {
    for (path, model_type) in types {
        section(thinker, path, &[])?.must_be("model_type", &[model_type])?;
    }
    Ok(())
}

/// The encoder of sounds: two convolutions, layers, a mean of every two tokens, a norm, one product.
pub(super) fn sounds(audio: &Section, llm_width: u64) -> Result<(Encoder, Projector), AnalyticError> {
    for field in ["dropout", "attention_dropout", "activation_dropout"] {
        if audio.get(field).and_then(Value::as_f64).is_some_and(|share| share > 0.0) {
            return Err(audio.error(field, "must be 0"));
        }
    }
    let width = audio.count("d_model")?;
    let num_heads = audio.count("encoder_attention_heads")?;
    audio.divides("encoder_attention_heads", num_heads, width)?;
    let features = audio.count("output_dim")?;
    if features != llm_width {
        return Err(audio.error("output_dim", &format!("must be the backbone's width, {llm_width}")));
    }
    let encoder = Encoder {
        num_layers: audio.count("encoder_layers")?,
        num_window_layers: 0,
        num_unread_layers: 0,
        width,
        num_heads,
        mlp_width: audio.count("encoder_ffn_dim")?,
        mlp: MlpKind::Plain,
        num_kept_activations: kept_activations(audio, "activation_function", "gelu"),
        norm: NormKind::Layer,
        // All but that of the keys.
        num_qkv_biases: 2,
        has_other_biases: true,
        has_one_qkv_product: false,
        num_kept_copies: 0,
        has_position_lookup: false,
        has_qk_norm: false,
        has_head_norm: false,
        has_more_norms: false,
        has_layer_scale: false,
        has_rotation: false,
        patches: Patches::Sound { mel_bins: audio.count("num_mel_bins")? },
        // The last window of a sound is as long as the sound.
        segment_tokens: None,
        num_class_tokens: 0,
        window_tokens: None,
        unit_tokens: 2,
        num_table_parameters: 0,
        has_norm_before: false,
        // The embeddings of a sound's begin and end, which the thinker does not look up.
        num_unread_parameters: 2 * features,
        merger: None,
    };
    let projector = Projector {
        norm: Some((NormKind::Layer, false)),
        has_second_norm: false,
        has_merged_norm: false,
        merged_tokens: 1,
        pooled_tokens: 2,
        num_dropped_tokens: 0,
        pooled_norm: None,
        reduced_width: None,
        inner_width: None,
        gated_width: None,
        has_bias: true,
        num_table_parameters: 0,
        num_deep_layers: 0,
    };
    Ok((encoder, projector))
}
