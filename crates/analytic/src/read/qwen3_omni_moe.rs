//! Qwen3-Omni's thinker: the encoder of pictures and the backbone with experts are Qwen3-VL's; beside that encoder one of
//! sounds, with convolutions over chunks of a spectrogram.

use super::qwen2_5_omni::{check_types, of_thinker, sounds as whisper};
use super::{TIED, qwen3, qwen3_vl, section};
use crate::architecture::{Architecture, Encoder, Llm, Patches, Projector};
use crate::defaults::{QWEN3_OMNI_AUDIO, QWEN3_OMNI_TEXT, QWEN3_VL_VISION};
use crate::error::AnalyticError;
use crate::fields::Section;
use serde_json::Value;

/// Half the mel frames of a chunk, for which Hugging Face's class has the number of tokens as a constant.
const HALF_CHUNK: u64 = 50;

/// What the file of the whole model says of the thinker.
pub(super) fn read(config: &Value) -> Result<Architecture, AnalyticError> {
    of_thinker(config, thinker_alone)
}

fn thinker_alone(thinker: &Value) -> Result<Architecture, AnalyticError> {
    check_types(
        thinker,
        [
            ("text_config", "qwen3_omni_moe_text"),
            ("vision_config", "qwen3_omni_moe_vision_encoder"),
            ("audio_config", "qwen3_omni_moe_audio_encoder"),
        ],
    )?;
    let vision = section(thinker, "vision_config", QWEN3_VL_VISION)?;
    let text = section(thinker, "text_config", QWEN3_OMNI_TEXT)?;
    // Hugging Face's class asks the thinker alone.
    let is_tied = Section { path: "", object: thinker, defaults: &[] }.flag(TIED, false)?;
    let llm = Llm { is_tied, ..qwen3::backbone(thinker, &text, true)? };
    let num_deep_layers = qwen3_vl::deep_layers(&vision, vision.count("depth")?, llm.num_layers)?;
    let (encoder, projector) = qwen3_vl::tower(&vision, &llm, num_deep_layers)?;
    let sound = sounds(&section(thinker, "audio_config", QWEN3_OMNI_AUDIO)?, llm.width)?;
    Ok(Architecture { family: "qwen3_omni_moe".to_owned(), encoder, projector, sound: Some(sound), llm })
}

/// The encoder of sounds: its layers are Whisper's, with all biases; after them a norm and two products.
fn sounds(audio: &Section, llm_width: u64) -> Result<(Encoder, Projector), AnalyticError> {
    let (encoder, projector) = whisper(audio, llm_width)?;
    let half = audio.count("n_window")?;
    if half != HALF_CHUNK {
        return Err(audio.error("n_window", &format!("must be {HALF_CHUNK}")));
    }
    let frames = 2 * half;
    let patches = Patches::Chunks {
        mel_bins: audio.count("num_mel_bins")?,
        frames,
        channels: audio.count("downsample_hidden_size")?,
    };
    let encoder = Encoder {
        num_qkv_biases: 3,
        patches,
        // Tokens of a chunk.
        unit_tokens: frames.div_ceil(8),
        num_unread_parameters: 0,
        merger: None,
        ..encoder
    };
    let projector = Projector { pooled_tokens: 1, inner_width: Some(encoder.width), ..projector };
    Ok((encoder, projector))
}
