//! Qwen2-Audio, Audio Flamingo 3 and Voxtral: Whisper's encoder over windows of 30 s. The first two take a mean of every two
//! positions, a norm, and one product or two; Voxtral a norm, four positions side by side, and two products.

use super::{kept_activations, section, text};
use crate::architecture::{Architecture, Encoder, Llm, MlpKind, NormKind, Patches, Projector};
use crate::defaults::{AUDIOFLAMINGO3, QWEN2_AUDIO, VOXTRAL_TEXT};
use crate::error::AnalyticError;
use crate::fields::Section;
use serde_json::Value;

/// Names of the encoder's sizes: its width, layers, heads, and the width of its MLP.
type Names = [&'static str; 4];

const WHISPER: Names = ["d_model", "encoder_layers", "encoder_attention_heads", "encoder_ffn_dim"];
const USUAL: Names = ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"];

/// Qwen2-Audio: one product.
pub(super) fn qwen2_audio(config: &Value) -> Result<Architecture, AnalyticError> {
    let audio = section(config, "audio_config", QWEN2_AUDIO)?;
    audio.must_be("model_type", &["qwen2_audio_encoder"])?;
    let projector = Projector { inner_width: None, has_bias: true, ..POOLING };
    let llm = text(config, "text_config", "qwen2")?;
    whole("qwen2_audio", &audio, (WHISPER, USUAL), projector, llm)
}

/// Audio Flamingo 3: two products.
pub(super) fn audioflamingo3(config: &Value) -> Result<Architecture, AnalyticError> {
    let audio = section(config, "audio_config", AUDIOFLAMINGO3)?;
    audio.must_be("model_type", &["audioflamingo3_encoder"])?;
    let top = Section { path: "", object: config, defaults: &[] };
    let llm = text(config, "text_config", "qwen2")?;
    let has_bias = top.flag("projector_bias", true)?;
    let projector = Projector { inner_width: Some(llm.width), has_bias, ..POOLING };
    whole("audioflamingo3", &audio, (USUAL, WHISPER), projector, llm)
}

/// Voxtral: as many positions side by side as the MLP is wider than the encoder, two products without biases.
pub(super) fn voxtral(config: &Value) -> Result<Architecture, AnalyticError> {
    // Its encoder's class has the defaults of Audio Flamingo 3's.
    let audio = section(config, "audio_config", AUDIOFLAMINGO3)?;
    audio.must_be("model_type", &["voxtral_encoder"])?;
    let (width, mlp_width) = (audio.count(size_name(&audio, 0))?, audio.count(size_name(&audio, 3))?);
    if !mlp_width.is_multiple_of(width) {
        return Err(audio.error(size_name(&audio, 3), &format!("must be a multiple of the width, {width}")));
    }
    let merged_tokens = mlp_width / width;
    let positions = audio.count("max_source_positions")?;
    if !positions.is_multiple_of(merged_tokens) {
        return Err(audio.error("max_source_positions", &format!("must be a multiple of {merged_tokens}")));
    }
    // Where `config.json` leaves out a size of the backbone, transformers takes the size of Voxtral Mini.
    let mut filled = config.clone();
    if let Some(filled) = filled.as_object_mut() {
        let text = filled.entry("text_config").or_insert_with(|| Value::Object(serde_json::Map::new()));
        if let Some(text) = text.as_object_mut() {
            for (field, size) in VOXTRAL_TEXT {
                text.entry(*field).or_insert_with(|| Value::from(*size));
            }
        }
    }
    let llm = text(&filled, "text_config", "llama")?;
    let inner_width = Some(llm.width);
    let projector = Projector { merged_tokens, pooled_tokens: 1, inner_width, has_bias: false, ..POOLING };
    whole("voxtral", &audio, (USUAL, WHISPER), projector, llm)
}

/// The name under which a file has a size: the second of `USUAL` and `WHISPER`, which goes before, where it is there.
fn size_name(audio: &Section, index: usize) -> &'static str {
    if audio.get(WHISPER[index]).is_some() { WHISPER[index] } else { USUAL[index] }
}

/// A mean of every two positions, then a norm.
const POOLING: Projector = Projector {
    norm: Some((NormKind::Layer, false)),
    has_second_norm: false,
    has_merged_norm: false,
    merged_tokens: 1,
    pooled_tokens: 2,
    pooled_norm: None,
    num_dropped_tokens: 0,
    reduced_width: None,
    inner_width: None,
    gated_width: None,
    has_bias: true,
    num_table_parameters: 0,
    num_deep_layers: 0,
};

/// A model with this encoder. A size has the first of its names, or the second, which goes before it, as transformers
/// reads files.
fn whole(
    family: &str,
    audio: &Section,
    names: (Names, Names),
    projector: Projector,
    llm: Llm,
) -> Result<Architecture, AnalyticError> {
    let name = |index: usize| {
        let other = names.1[index];
        if audio.get(other).is_some() { other } else { names.0[index] }
    };
    let (width, positions) = (audio.count(name(0))?, audio.count("max_source_positions")?);
    let num_heads = audio.count(name(2))?;
    audio.divides(name(2), num_heads, width)?;
    let encoder = Encoder {
        num_layers: audio.count(name(1))?,
        num_window_layers: 0,
        num_unread_layers: 0,
        width,
        num_heads,
        mlp_width: audio.count(name(3))?,
        mlp: MlpKind::Plain,
        num_kept_activations: kept_activations(audio, "activation_function", "gelu"),
        norm: NormKind::Layer,
        // All but that of the keys.
        num_qkv_biases: 2,
        has_other_biases: true,
        has_one_qkv_product: false,
        num_kept_copies: 1,
        has_position_lookup: false,
        has_qk_norm: false,
        has_head_norm: false,
        has_more_norms: false,
        has_layer_scale: false,
        has_rotation: false,
        patches: Patches::Sound { mel_bins: audio.count("num_mel_bins")? },
        segment_tokens: Some(positions),
        num_class_tokens: 0,
        window_tokens: None,
        unit_tokens: positions,
        num_table_parameters: positions * width,
        has_norm_before: false,
        num_unread_parameters: 0,
        merger: None,
    };
    // Whatever the configuration says, Hugging Face's classes tie nothing.
    let llm = Llm { is_tied: false, ..llm };
    Ok(Architecture { family: family.to_owned(), encoder, projector, sound: None, llm })
}
