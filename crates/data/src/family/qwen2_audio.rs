//! The shape rule of Qwen2-Audio: mel frames of a sound, padded to one window of 30 seconds.
//!
//! ```text
//! samples -> frames = ceil(samples / hop)                                     160 samples, 10 ms
//!         -> conv of stride 2 = (frames - 1) div 2 + 1 -> pool of 2 = (conv - 2) div 2 + 1   LLM tokens
//! ```
//!
//! The encoder reads the whole window, silence included, whatever the sound's length: one segment of
//! `max_source_positions` (1,500) tokens; that is what it costs. `<|AUDIO|>` is repeated in place; `<|audio_bos|>` and
//! `<|audio_eos|>` around it come from the chat template. The arithmetic is that of `WhisperFeatureExtractor` and
//! `Qwen2AudioProcessor` of Hugging Face transformers 5.23.0. `fixtures/shapes` holds what those return.
//!
//! Two kinds of sounds that transformers accepts are refused here. Of a sound longer than the window transformers would read
//! the first 30 seconds and say nothing. A sound of at most two frames (20 ms) would fill no token.
//!
//! A file gives seconds, but the extractor needs samples at its own rate. The file has `n = round(seconds x rate)` samples,
//! which is exact where the file counts samples. After resampling there are `ceil(n x 16,000 / rate)`, as librosa and soxr
//! count. Other resamplers may give one sample more or less; that changes the tokens only where it begins a frame.

use super::fields::{CONFIG, Fields, PREPROCESSOR};
use super::{Clip, Family, FamilyFiles, Marks, MediaShape, Piece, Size, Sound, VideoSampling, unread};
use crate::DataError;
use crate::media::MediaKind;
use dflop_types::EncoderSegments;

const FAMILY: &str = "qwen2_audio";
const TOKEN: &str = "<|AUDIO|>";
/// Mel frames a position of the encoder: the stride of its second convolution.
const CONV_STRIDE: u64 = 2;
/// The largest rate and window we take.
const SAMPLES_MAX: u64 = 1 << 32;

/// The shape rule of a Qwen2-Audio model.
///
/// *Invariant* (checked by [`Qwen2Audio::from_files`]): the window is `2 x positions` hops long.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Qwen2Audio {
    /// Samples a second that the extractor wants.
    sample_rate: u64,
    /// Samples a mel frame.
    hop: u64,
    /// Samples of the window.
    window: u64,
    /// Encoder tokens of the window.
    positions: u32,
}

impl Qwen2Audio {
    /// The rule for a model's files. Fields that are missing have the values transformers gives them.
    ///
    /// # Errors
    /// [`DataError::Config`] at the first field for which extractor and model would disagree, or that this rule does not
    /// cover.
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
        let object = files.preprocessor.get("feature_extractor").unwrap_or(&files.preprocessor);
        let extractor = Fields { file: PREPROCESSOR, object };
        config.must_be("model_type", &[FAMILY], false)?;
        config.must_be("audio_config.model_type", &["qwen2_audio_encoder"], true)?;
        extractor.must_be("feature_extractor_type", &["WhisperFeatureExtractor"], true)?;
        extractor.must_be("padding_side", &["right"], true)?;
        let bins = config.side("audio_config.num_mel_bins")?.unwrap_or(128);
        let size = extractor.side("feature_size")?.unwrap_or(80);
        if size != bins {
            let rule = format!("the encoder reads {bins} mel bins, the extractor would make {size}");
            return Err(extractor.error("feature_size", rule));
        }
        let sample_rate = extractor.whole("sampling_rate", SAMPLES_MAX)?.unwrap_or(16_000);
        let seconds = extractor.whole("chunk_length", 1 << 15)?.unwrap_or(30);
        let hop = extractor.whole("hop_length", SAMPLES_MAX)?.unwrap_or(160);
        let positions = config.side("audio_config.max_source_positions")?.unwrap_or(1_500);
        let window = seconds * sample_rate;
        if window / hop != CONV_STRIDE * u64::from(positions) {
            let rule = format!(
                "a window of {seconds} s has {} mel frames, the encoder reads {}",
                window / hop,
                CONV_STRIDE * u64::from(positions)
            );
            return Err(extractor.error("chunk_length", rule));
        }
        Ok(Self { sample_rate, hop, window, positions })
    }

    /// Samples of a sound at the extractor's rate.
    fn samples(&self, sound: &Sound) -> Result<u64, String> {
        if sound.sample_rate == 0 || !sound.duration_s.is_finite() || sound.duration_s < 0.0 {
            return Err("its duration must be finite, its rate above 0".to_owned());
        }
        let at_source = (sound.duration_s * f64::from(sound.sample_rate)).round();
        Ok(if u64::from(sound.sample_rate) == self.sample_rate {
            at_source as u64
        } else {
            (at_source * (self.sample_rate as f64 / f64::from(sound.sample_rate))).ceil() as u64
        })
    }

    /// LLM tokens of so many samples.
    fn features(&self, samples: u64) -> Result<u32, String> {
        if samples > self.window {
            return Err(format!(
                "its {samples} samples at {} a second are more than the window's {}; the processor would cut it off",
                self.sample_rate, self.window
            ));
        }
        // The last frame that the transform begins and does not fill is left out.
        let frames = samples.div_ceil(self.hop).min(self.window / self.hop);
        let pooled = (frames.saturating_sub(1) / 2 + 1).saturating_sub(2) / 2 + 1;
        if frames <= 2 {
            return Err(format!("its {samples} samples fill no token, at least {} do", 2 * self.hop + 1));
        }
        // Fewer than `positions`.
        Ok(pooled as u32)
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
        })
    }

    fn image(&self, _: Size, _: usize) -> Result<MediaShape, DataError> {
        Err(unread(FAMILY, "an image"))
    }

    fn video(&self, _: &Clip, _: VideoSampling) -> Result<MediaShape, DataError> {
        Err(unread(FAMILY, "a video"))
    }

    fn audio(&self, sound: &Sound) -> Result<MediaShape, DataError> {
        self.samples(sound)
            .and_then(|samples| self.features(samples))
            .map(|features| MediaShape {
                num_tiles: 1,
                segments: vec![EncoderSegments { count: 1, tokens: self.positions }],
                pieces: vec![Piece::Features(features)],
                frame_indices: Vec::new(),
                parts: Vec::new(),
                patches: None,
            })
            .map_err(|rule| DataError::Shape {
                family: FAMILY,
                media: format!("a sound of {} s at {} samples a second", sound.duration_s, sound.sample_rate),
                rule,
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn rule() -> Qwen2Audio {
        let config = json!({"model_type": "qwen2_audio"});
        let preprocessor = json!({"feature_extractor": {"feature_size": 128}});
        Qwen2Audio::from_files(&FamilyFiles { config, preprocessor, video_preprocessor: json!({}) }).unwrap()
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
        assert_eq!(shape.segments, [EncoderSegments { count: 1, tokens: 1_500 }]);
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
