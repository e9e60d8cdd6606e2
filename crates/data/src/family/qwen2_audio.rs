//! The shape rule of Qwen2-Audio: mel frames of a sound, padded to one window of 30 seconds (`whisper.rs`).
//!
//! `<|AUDIO|>` is repeated in place; `<|audio_bos|>` and `<|audio_eos|>` around it come from the chat template. The
//! arithmetic is that of `WhisperFeatureExtractor` and `Qwen2AudioProcessor` of Hugging Face transformers 5.23.0.
//! `fixtures/shapes` holds what those return.
//!
//! Two kinds of sounds that transformers accepts are refused here. Of a sound longer than the window transformers
//! would read the first 30 seconds and say nothing. A sound of at most two frames (20 ms) would fill no token.

use super::fields::{CONFIG, Fields};
use super::whisper::{self, Windows};
use super::{Clip, Family, FamilyFiles, Marks, MediaShape, Size, Sound, VideoSampling, unread};
use crate::DataError;
use crate::media::MediaKind;

const FAMILY: &str = "qwen2_audio";
const TOKEN: &str = "<|AUDIO|>";

/// The shape rule of a Qwen2-Audio model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Qwen2Audio {
    windows: Windows,
}

impl Qwen2Audio {
    /// The rule for a model's files. Fields that are missing have the values transformers gives them.
    ///
    /// # Errors
    /// [`DataError::Config`] at the first field for which extractor and model would disagree, or that this rule does
    /// not cover.
    ///
    /// # Examples
    /// ```
    /// use dflop_data::family::{Family as _, FamilyFiles, Qwen2Audio, Sound};
    /// let config = serde_json::json!({"model_type": "qwen2_audio"});
    /// let preprocessor = serde_json::json!({"feature_size": 128});
    /// let rule = Qwen2Audio::from_files(&FamilyFiles { config, preprocessor, ..FamilyFiles::default() })?;
    /// let shape = rule.audio(&Sound { duration_s: 10.0, sample_rate: 16_000 })?;
    /// assert_eq!((shape.encoder_tokens(), shape.feature_tokens()), (1_500, 250));
    /// # Ok::<(), dflop_data::DataError>(())
    /// ```
    pub fn from_files(files: &FamilyFiles) -> Result<Self, DataError> {
        let config = Fields { file: CONFIG, object: &files.config };
        config.must_be("model_type", &[FAMILY], false)?;
        Ok(Self { windows: Windows::from_files(files, "qwen2_audio_encoder")? })
    }
}

impl Family for Qwen2Audio {
    fn name(&self) -> &str {
        FAMILY
    }

    fn marks(&self, kind: MediaKind) -> Option<Marks> {
        (kind == MediaKind::Audio).then(|| Marks {
            placeholder: TOKEN.to_owned(),
            feature_token: TOKEN.to_owned(),
            id_fields: &["audio_token_index", "audio_token_id"],
            number: None,
        })
    }

    fn image(&self, _: Size, _: usize) -> Result<MediaShape, DataError> {
        Err(unread(FAMILY, "an image"))
    }

    fn video(&self, _: &Clip, _: VideoSampling) -> Result<MediaShape, DataError> {
        Err(unread(FAMILY, "a video"))
    }

    fn audio(&self, sound: &Sound) -> Result<MediaShape, DataError> {
        self.windows
            .extractor
            .samples(sound)
            .and_then(|samples| self.windows.shape(samples, 1, "the window's"))
            .map_err(|rule| whisper::refused(FAMILY, sound, rule))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflop_types::EncoderSegments;
    use proptest::prelude::*;
    use serde_json::json;

    fn rule() -> Qwen2Audio {
        let config = json!({"model_type": "qwen2_audio"});
        let preprocessor = json!({"feature_extractor": {"feature_size": 128}});
        Qwen2Audio::from_files(&FamilyFiles { config, preprocessor, ..FamilyFiles::default() }).unwrap()
    }

    fn tokens(duration_s: f64, sample_rate: u32) -> Result<u32, String> {
        let sound = rule().audio(&Sound { duration_s, sample_rate });
        sound.map(|shape| shape.feature_tokens()).map_err(|error| error.to_string())
    }

    /// 30 s are 3,000 frames, 1,500 positions, 750 tokens; 321 samples are 3 frames, 2 positions, 1 token.
    #[test]
    fn sounds_by_hand() {
        assert_eq!(tokens(30.0, 16_000), Ok(750));
        assert_eq!(tokens(321.0 / 16_000.0, 16_000), Ok(1));
        // 7 frames: (7 - 1) / 2 + 1 = 4 positions, (4 - 2) / 2 + 1 = 2 tokens. 2,778 samples of 44.1 kHz are 1,007.9.
        assert_eq!(tokens(2_778.0 / 44_100.0, 44_100), Ok(2));
        let shape = rule().audio(&Sound { duration_s: 1.0, sample_rate: 48_000 }).unwrap();
        assert_eq!(shape.segments, [EncoderSegments::of(1, 1_500)]);
    }

    #[test]
    fn what_would_be_cut_or_lost_is_refused() {
        let errors = [
            tokens(31.0, 16_000).unwrap_err(),
            tokens(0.02, 16_000).unwrap_err(),
            tokens(f64::NAN, 16_000).unwrap_err(),
            tokens(1.0, 0).unwrap_err(),
            rule().image(Size { height: 1, width: 1 }, 1).unwrap_err().to_string(),
        ];
        insta::assert_snapshot!(errors.join("\n"), @r"
        no qwen2_audio shape for a sound of 31 s at 16000 samples a second: its 496000 samples at 16000 a second are more than the window's 480000; the processor would cut it off
        no qwen2_audio shape for a sound of 0.02 s at 16000 samples a second: its 320 samples fill no token, at least 321 do
        no qwen2_audio shape for a sound of NaN s at 16000 samples a second: its duration must be finite, its rate above 0
        no qwen2_audio shape for a sound of 1 s at 0 samples a second: its duration must be finite, its rate above 0
        no qwen2_audio shape for an image: the family's processor does not read it
        ");
    }

    proptest! {
        #[test]
        fn no_sound_panics(duration_s in any::<f64>(), sample_rate in any::<u32>()) {
            if let Ok(features) = tokens(duration_s, sample_rate) {
                prop_assert!((1..=750).contains(&features));
            }
        }
    }
}
