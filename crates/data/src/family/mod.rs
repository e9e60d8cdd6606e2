//! One shape rule a model family: sizes in, encoder segments and feature tokens out.
//!
//! A rule equals, integer for integer, what the family's Hugging Face processor and model produce.

mod anyres;
mod audioflamingo3;
mod callable;
mod clip;
mod fields;
mod gemma3;
mod gemma4;
mod gemma4_sounds;
mod glm4v;
mod glm4v_video;
mod idefics3;
mod internvl;
mod internvl_video;
mod lfm2_vl;
mod lighton_ocr;
mod llava;
mod llava_next;
mod llava_onevision;
mod llava_onevision_video;
mod minicpmv4_6;
mod mistral3;
pub(crate) mod model_files;
mod named;
mod paddleocr_vl;
mod parts;
mod patches;
mod qwen2_5_omni;
mod qwen2_audio;
mod qwen2_vl;
mod qwen3_omni_moe;
mod qwen3_vl;
mod qwen_vl;
mod smolvlm_video;
mod video_settings;
mod voxtral;
mod whisper;

pub use audioflamingo3::AudioFlamingo3;
pub use callable::{Callable, GivenFamily, Question};
pub use gemma3::Gemma3;
pub use gemma4::Gemma4;
pub use glm4v::Glm4v;
pub use idefics3::Idefics3;
pub use internvl::InternVl;
pub use lfm2_vl::Lfm2Vl;
pub use lighton_ocr::LightonOcr;
pub use llava::Llava;
pub use llava_next::LlavaNext;
pub use llava_onevision::LlavaOnevision;
pub use minicpmv4_6::MiniCpmV46;
pub use mistral3::Mistral3;
pub use named::NamedModel;
pub use paddleocr_vl::PaddleOcrVl;
pub use parts::PartNames;
pub use qwen2_5_omni::Qwen25Omni;
pub use qwen2_audio::Qwen2Audio;
pub use qwen2_vl::Qwen2Vl;
pub use qwen3_omni_moe::Qwen3OmniMoe;
pub use qwen3_vl::Qwen3Vl;
pub use voxtral::Voxtral;

use crate::error::DataError;
use crate::media::MediaKind;
use dflop_types::{EncoderParts, EncoderSegments};
use serde_json::Value;
use std::fmt;

/// Sides of a picture as displayed, in pixels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Size {
    /// Height, at least 1.
    pub height: u32,
    /// Width, at least 1.
    pub width: u32,
}

/// A video before frames are chosen of it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Clip {
    /// Of each frame.
    pub size: Size,
    /// Frames in the file, at least 1.
    pub num_frames: u64,
    /// Mean frames a second, where the file tells.
    pub fps: Option<f64>,
    /// In seconds, where the file tells.
    pub duration_s: Option<f64>,
}

/// A sound before it is resampled.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sound {
    /// In seconds.
    pub duration_s: f64,
    /// In samples a second.
    pub sample_rate: u32,
}

/// Frames read of one video, at most: lists of frames stay small whatever a file claims.
pub const FRAMES_MAX: u32 = 1 << 16;

/// What the user asks of videos; the family's own settings hold where nothing is asked.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct VideoSampling {
    /// Frames read of a video, at most; up to [`FRAMES_MAX`].
    pub max_frames: Option<u32>,
    /// Frames read a second of video.
    pub fps: Option<f64>,
}

/// A piece of what takes the place of a medium in the text.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Piece {
    /// Text that the processor writes, as `<img>` or a time stamp.
    Text(String),
    /// So many feature tokens, at least 1.
    Features(u32),
}

/// What one medium costs: what the encoder reads of it, and the LLM positions it fills.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct MediaShape {
    /// What the family's adapter calls one: tiles of `pixel_values` (base tile included), frames of a video, mel
    /// windows. Where pictures keep their own resolution: 1 an image, and the frame pairs of a video.
    pub num_tiles: u32,
    /// What the encoder reads: groups of pieces that do not attend to each other.
    pub segments: Vec<EncoderSegments>,
    /// What takes the place of the placeholder in the text, in order.
    pub pieces: Vec<Piece>,
    /// Frames that are read of a video, ascending from 0; empty for images and sounds.
    pub frame_indices: Vec<u32>,
    /// How the segments form parts that can be encoded separately; empty: they are one part.
    pub parts: Vec<EncoderParts>,
    /// Rows and columns of patches of a tile, where pictures keep their own resolution. Beside such pictures: of a window of
    /// sound, how many rows it is to the encoder, and 1.
    pub patches: Option<(u32, u32)>,
    /// The same of the first tile, where it may differ: the whole before slices of one size.
    pub first_patches: Option<(u32, u32)>,
    /// Rows and columns of patches of the last tile, where it may differ: a thumbnail behind tiles of one size.
    pub last_patches: Option<(u32, u32)>,
}

impl MediaShape {
    /// LLM tokens that the encoder fills.
    pub fn feature_tokens(&self) -> u32 {
        self.pieces
            .iter()
            .map(|piece| match piece {
                Piece::Features(n) => *n,
                Piece::Text(_) => 0,
            })
            .sum()
    }

    /// The parts in order, as groups of equal ones; a single one where the medium is encoded whole.
    pub fn encoder_parts(&self) -> Vec<EncoderParts> {
        if !self.parts.is_empty() {
            return self.parts.clone();
        }
        let segments = self.segments.iter().fold(0, |sum: u32, s| sum.saturating_add(s.count));
        vec![EncoderParts { count: 1, segments, feature_tokens: self.feature_tokens() }]
    }

    /// Encoder tokens over all segments.
    pub fn encoder_tokens(&self) -> u64 {
        self.segments.iter().map(|s| u64::from(s.count) * u64::from(s.tokens)).sum()
    }
}

/// How a medium is written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Marks {
    /// What the chat template writes where the medium stands; the processor puts [`MediaShape::pieces`] there.
    pub placeholder: String,
    /// The token that stands for one feature in the input ids.
    pub feature_token: String,
    /// Field of `config.json` that holds the id of `feature_token`, the first that is there; none of them: the
    /// tokenizer's own id.
    pub id_fields: &'static [&'static str],
    /// Texts around the medium's number among those of its kind in the sample, from 0, which stands before its pieces;
    /// `None`: no number does.
    pub number: Option<[&'static str; 2]>,
}

/// The shape rule of a model family with the settings of one model.
pub trait Family: Send + Sync + fmt::Debug {
    /// Its `model_type`, for example `llava_onevision`.
    fn name(&self) -> &str;

    /// How media of this kind are written; `None` where the family does not read them.
    fn marks(&self, kind: MediaKind) -> Option<Marks>;

    /// Texts among its pieces, and in a chat template that dflop has for it, that its tokenizer has as one token each,
    /// besides `marks`.
    fn special_texts(&self) -> Vec<String> {
        Vec::new()
    }

    /// The tokens between which its chat template writes a medium of this kind, where they are not those of other models.
    fn around(&self, _: MediaKind) -> Option<[&'static str; 2]> {
        None
    }

    /// The shape of one of the `num_images` images of a sample.
    ///
    /// # Errors
    /// [`DataError::Shape`] where the family's processor refuses it too.
    fn image(&self, size: Size, num_images: usize) -> Result<MediaShape, DataError>;

    /// The shape of a video.
    ///
    /// # Errors
    /// [`DataError::Shape`] where the family's processor refuses it too, or does not read videos.
    fn video(&self, clip: &Clip, sampling: VideoSampling) -> Result<MediaShape, DataError>;

    /// The shape of a sound.
    ///
    /// # Errors
    /// [`DataError::Shape`] where the family's processor refuses it too, or does not read sounds.
    fn audio(&self, sound: &Sound) -> Result<MediaShape, DataError>;
}

/// The files of a model directory that a family's settings come from, parsed; an empty object for one not there.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct FamilyFiles {
    /// `config.json`.
    pub config: Value,
    /// `preprocessor_config.json`, or where there is a `processor_config.json` its fields, with the parts that it does not hold.
    pub preprocessor: Value,
    /// `video_preprocessor_config.json`, or what transformers takes for it.
    pub video_preprocessor: Value,
    /// `processor_config.json`.
    pub processor: Value,
    /// Where the parts of the processor stand.
    pub names: PartNames,
}

/// How a family is made of a model's files.
type Maker = fn(&FamilyFiles) -> Result<Box<dyn Family>, DataError>;

/// Every family with a rule: its `model_type`, and who makes it.
const FAMILIES: [(&str, Maker); 28] = [
    ("gemma3", |files| Gemma3::from_files(files).map(|f| Box::new(f) as _)),
    ("gemma4", |files| Gemma4::from_files(files).map(|f| Box::new(f) as _)),
    ("glm4v", |files| Glm4v::from_files(files).map(|f| Box::new(f) as _)),
    ("glm4v_moe", |files| Glm4v::from_files(files).map(|f| Box::new(f) as _)),
    ("glm46v", |files| Glm4v::from_files(files).map(|f| Box::new(f) as _)),
    ("glm_ocr", |files| Glm4v::from_files(files).map(|f| Box::new(f) as _)),
    ("idefics3", |files| Idefics3::from_files(files).map(|f| Box::new(f) as _)),
    ("internvl", |files| InternVl::from_files(files).map(|f| Box::new(f) as _)),
    ("lfm2_vl", |files| Lfm2Vl::from_files(files).map(|f| Box::new(f) as _)),
    ("lighton_ocr", |files| LightonOcr::from_files(files).map(|f| Box::new(f) as _)),
    ("llava", |files| Llava::from_config(&files.config, &files.preprocessor).map(|f| Box::new(f) as _)),
    ("llava_next", |files| {
        LlavaNext::from_config(&files.config, &files.preprocessor).map(|f| Box::new(f) as _)
    }),
    ("llava_onevision", |files| LlavaOnevision::from_files(files).map(|f| Box::new(f) as _)),
    ("minicpmv4_6", |files| MiniCpmV46::from_files(files).map(|f| Box::new(f) as _)),
    ("mistral3", |files| Mistral3::from_files(files).map(|f| Box::new(f) as _)),
    ("paddleocr_vl", |files| PaddleOcrVl::from_files(files).map(|f| Box::new(f) as _)),
    ("qwen2_vl", |files| Qwen2Vl::from_files(files).map(|f| Box::new(f) as _)),
    ("qwen2_5_vl", |files| Qwen2Vl::from_files(files).map(|f| Box::new(f) as _)),
    ("qwen3_vl", |files| Qwen3Vl::from_files(files).map(|f| Box::new(f) as _)),
    ("qwen3_vl_moe", |files| Qwen3Vl::from_files(files).map(|f| Box::new(f) as _)),
    ("qwen3_5", |files| Qwen3Vl::from_files(files).map(|f| Box::new(f) as _)),
    ("qwen3_5_moe", |files| Qwen3Vl::from_files(files).map(|f| Box::new(f) as _)),
    ("smolvlm", |files| Idefics3::from_files(files).map(|f| Box::new(f) as _)),
    ("audioflamingo3", |files| AudioFlamingo3::from_files(files).map(|f| Box::new(f) as _)),
    ("qwen2_5_omni", |files| Qwen25Omni::from_files(files).map(|f| Box::new(f) as _)),
    ("qwen3_omni_moe", |files| Qwen3OmniMoe::from_files(files).map(|f| Box::new(f) as _)),
    ("qwen2_audio", |files| Qwen2Audio::from_files(files).map(|f| Box::new(f) as _)),
    ("voxtral", |files| Voxtral::from_files(files).map(|f| Box::new(f) as _)),
];

/// The `model_type`s with a rule.
pub fn known() -> Vec<&'static str> {
    FAMILIES.iter().map(|(name, _)| *name).collect()
}

/// The rule for the model whose files these are; `None` where its `model_type` has none.
///
/// # Errors
/// [`DataError::Config`] at the first setting that the rule does not cover.
pub fn open(files: &FamilyFiles) -> Result<Option<Box<dyn Family>>, DataError> {
    let model_type = files.config["model_type"].as_str().unwrap_or_default();
    let made = FAMILIES.iter().find(|(name, _)| *name == model_type).map(|(_, make)| make(files)).transpose();
    made.map_err(|error| files.names.in_own_file(error))
}

/// An error for a medium that the family's processor refuses, or that its rule does not cover.
pub(crate) fn refused(family: &'static str, media: String, rule: &str) -> DataError {
    DataError::Shape { family, media, rule: rule.to_owned() }
}

/// An image in the words of an error.
pub(crate) fn image_words(height: u32, width: u32) -> String {
    format!("an image of {height} x {width} pixels (height x width)")
}

/// An error for a medium that the family does not read.
pub(crate) fn unread(family: &'static str, media: &str) -> DataError {
    DataError::Shape {
        family,
        media: media.to_owned(),
        rule: "the family's processor does not read it".to_owned(),
    }
}

/// Positions of the frames that are read, ascending.
///
/// ```text
/// n = min(total, max, round(duration x fps) or at least 1)      without `fps_and_duration_s`: min(total, max)
/// index_k = floor(k (total - 1) / (n - 1)),  k = 0 .. n - 1     n = 1: frame 0
/// ```
///
/// Both ends of the clip are read, as by LLaVA-NeXT's `linspace(0, total - 1, n, dtype=int)`.
pub(crate) fn uniform_frames(total: u64, max: u32, fps_and_duration_s: Option<(f64, f64)>) -> Vec<u32> {
    let wanted =
        fps_and_duration_s.map_or(u64::MAX, |(fps, seconds)| ((seconds * fps).round() as u64).max(1));
    // Positions have 32 bits, which last for two years at 60 frames a second; a damaged file may claim more.
    let total = total.min(1 << 32);
    let n = total.min(u64::from(max)).min(wanted).max(1);
    (0..n).map(|k| (k * (total - 1)).checked_div(n - 1).unwrap_or(0) as u32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn frames_hold_both_ends() {
        assert_eq!(uniform_frames(10, 4, None), [0, 3, 6, 9]);
        assert_eq!(uniform_frames(10, 32, None), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
        assert_eq!(uniform_frames(1, 32, None), [0]);
        assert_eq!(uniform_frames(10, 1, None), [0]);
        // 2.6 s at 1 frame a second are 3 frames of 78; 0.2 s are 1.
        assert_eq!(uniform_frames(78, 32, Some((1.0, 2.6))), [0, 38, 77]);
        assert_eq!(uniform_frames(6, 32, Some((1.0, 0.2))), [0]);
        assert_eq!(uniform_frames(u64::MAX, 3, None), [0, u32::MAX / 2, u32::MAX]);
    }

    proptest! {
        #[test]
        fn frames_ascend_within_the_clip(total in 1_u64..100_000, max in 1_u32..64) {
            let chosen = uniform_frames(total, max, None);
            prop_assert_eq!(chosen.len() as u64, total.min(u64::from(max)));
            prop_assert!(chosen.windows(2).all(|pair| pair[0] < pair[1]));
            prop_assert_eq!(chosen[0], 0);
            prop_assert!(chosen.len() == 1 || u64::from(*chosen.last().unwrap()) == total - 1);
        }
    }
}
