//! Sounds of Gemma 4 E2B and E4B: mel frames of the extractor, of which the encoder makes a quarter as many tokens.
//!
//! ```text
//! samples -> half a frame of silence before -> frames = floor((samples - frame div 2 - 1) / hop) + 1   16,000: 99
//!         -> two convolutions of stride 2 = ceil(ceil(frames / 2) / 2) encoder tokens, as many features  16,000: 25
//! ```
//!
//! A frame counts where its last sample is sound (320 samples, one every 160, and one more that the extractor looks at).
//! The encoder's layers see some tokens before each: a sound is one segment and one part. Padding, to 128 samples or to the
//! longest sound of a call, changes no count. A sound of more than 480,000 samples would be cut off: it is refused.
//!
//! The arithmetic is that of `Gemma4AudioFeatureExtractor` and `Gemma4Processor` of Hugging Face transformers 5.23.0.

use super::fields::{CONFIG, EXTRACTOR, Fields};
use super::whisper::samples_at;
use super::{FamilyFiles, MediaShape, Piece, Sound};
use crate::DataError;
use dflop_types::{EncoderParts, EncoderSegments, Tower};

/// What stands before the features of a sound.
pub(super) const BEGIN: &str = "<|audio>";
/// What stands behind them.
pub(super) const END: &str = "<audio|>";
/// Samples of a sound that the extractor reads, at most, whatever its file says.
const SAMPLES_MAX: u64 = 480_000;
/// The largest rate that we take.
const RATE_MAX: u64 = 1 << 32;

/// What extractor and encoder make of sounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sounds {
    /// Samples a second that the extractor wants.
    sample_rate: u64,
    /// Samples of a mel frame.
    frame: u64,
    /// Samples from one frame to the next.
    hop: u64,
}

impl Sounds {
    /// Those of a model's files; `None` where the model does not hear (no `audio_config`, as the large ones).
    ///
    /// # Errors
    /// [`DataError::Config`] at the first field for which extractor and model would disagree, or that this rule does not
    /// cover.
    pub(super) fn from_files(files: &FamilyFiles) -> Result<Option<Self>, DataError> {
        let config = Fields { file: CONFIG, object: &files.config };
        if config.get("audio_config").is_none() {
            return Ok(None);
        }
        config.must_be("audio_config.model_type", &["gemma4_audio"], true)?;
        let nested = [&files.processor, &files.preprocessor].map(|object| object.get("feature_extractor"));
        let object = nested.into_iter().flatten().next().unwrap_or(&files.preprocessor);
        let fields = Fields { file: EXTRACTOR, object };
        fields.must_be("feature_extractor_type", &["Gemma4AudioFeatureExtractor"], true)?;
        fields.must_be("padding_side", &["right"], true)?;
        let bins = fields.side("feature_size")?.unwrap_or(128);
        let name = "audio_config.subsampling_conv_channels";
        let channels = match config.get(name) {
            None => 128,
            Some(value) => value
                .as_array()
                .filter(|channels| channels.len() == 2)
                .and_then(|channels| channels[0].as_u64())
                .ok_or_else(|| config.error(name, "must be two whole numbers".to_owned()))?,
        };
        if u64::from(bins.div_ceil(4)) != channels / 4 {
            let rule = format!("the encoder reads {channels} mel bins (`{name}`)");
            return Err(fields.error("feature_size", rule));
        }
        let sample_rate = fields.whole("sampling_rate", RATE_MAX)?.unwrap_or(16_000);
        let samples = |field: &str, absent_ms: f64| -> Result<u64, DataError> {
            let value = fields.get(field);
            let found = value.map_or(Some(absent_ms), serde_json::Value::as_f64);
            // Python rounds halves to even.
            let samples = found.map(|ms| (sample_rate as f64 * ms / 1_000.0).round_ties_even());
            samples
                .filter(|samples| (1.0..=SAMPLES_MAX as f64).contains(samples))
                .map(|samples| samples as u64)
                .ok_or_else(|| {
                    fields.error(
                        field,
                        format!(
                            "must be milliseconds of 1 to {SAMPLES_MAX} samples at {sample_rate} a second"
                        ),
                    )
                })
        };
        let (frame, hop) = (samples("frame_length_ms", 20.0)?, samples("hop_length_ms", 10.0)?);
        Ok(Some(Self { sample_rate, frame, hop }))
    }

    /// The shape of a sound; the rule that it breaks.
    pub(super) fn shape(&self, sound: &Sound) -> Result<MediaShape, String> {
        let samples = samples_at(sound, self.sample_rate)?;
        if samples > SAMPLES_MAX {
            return Err(format!(
                "its {samples} samples at {} a second are more than {SAMPLES_MAX}; the processor would cut it off",
                self.sample_rate
            ));
        }
        let least = self.frame + 1 - self.frame / 2;
        let Some(behind) = samples.checked_sub(least) else {
            return Err(format!("its {samples} samples fill no token, at least {least} do"));
        };
        // At most 480,000.
        let tokens = ((behind / self.hop + 1) as u32).div_ceil(2).div_ceil(2);
        Ok(MediaShape {
            num_tiles: 1,
            segments: vec![EncoderSegments { count: 1, tokens, tower: Tower::Second }],
            pieces: vec![Piece::Text(BEGIN.to_owned()), Piece::Features(tokens), Piece::Text(END.to_owned())],
            frame_indices: Vec::new(),
            parts: vec![EncoderParts { count: 1, segments: 1, feature_tokens: tokens }],
            patches: None,
            first_patches: None,
            last_patches: None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn made(audio: &Value, extractor: &Value) -> Result<Option<Sounds>, DataError> {
        let config = json!({"model_type": "gemma4", "audio_config": audio});
        let preprocessor = json!({"feature_extractor": extractor});
        Sounds::from_files(&FamilyFiles { config, preprocessor, ..FamilyFiles::default() })
    }

    /// A second: a frame ends at 320 - 160 + 1 samples, and one every 160 behind; 30 s are 750 tokens.
    #[test]
    fn sounds_by_hand() {
        let rule = made(&json!({}), &json!({})).unwrap().unwrap();
        let tokens = |samples: u32| {
            let sound = Sound { duration_s: f64::from(samples) / 16_000.0, sample_rate: 16_000 };
            rule.shape(&sound).map(|shape| shape.feature_tokens())
        };
        assert_eq!(
            [161, 800, 801, 16_000, 480_000].map(|samples| tokens(samples).unwrap()),
            [1, 1, 2, 25, 750]
        );
        for (samples, expected) in [
            (160, "its 160 samples fill no token, at least 161 do"),
            (480_001, "its 480001 samples at 16000 a second are more than 480000"),
        ] {
            let error = tokens(samples).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
        let shape = rule.shape(&Sound { duration_s: 1.0, sample_rate: 8_000 }).unwrap();
        assert_eq!((shape.num_tiles, shape.encoder_tokens()), (1, 25));
        assert_eq!(shape.segments[0].tower, Tower::Second);
    }

    #[test]
    fn fields_that_disagree_are_named() {
        assert_eq!(made(&Value::Null, &json!({"feature_size": 3})).unwrap(), None);
        let small = json!({"subsampling_conv_channels": [8, 4]});
        assert!(made(&small, &json!({"feature_size": 8})).unwrap().is_some());
        for (audio, extractor, expected) in [
            (json!({"model_type": "whisper"}), json!({}), "`audio_config.model_type`"),
            (small, json!({}), "`feature_size` is missing, the encoder reads 8 mel bins"),
            (
                json!({"subsampling_conv_channels": [128]}),
                json!({}),
                "`audio_config.subsampling_conv_channels`",
            ),
            (json!({}), json!({"padding_side": "left"}), "`padding_side`"),
            (json!({}), json!({"frame_length_ms": 0}), "`frame_length_ms` is 0, must be milliseconds of"),
            (
                json!({}),
                json!({"feature_extractor_type": "WhisperFeatureExtractor"}),
                "`feature_extractor_type`",
            ),
        ] {
            let error = made(&audio, &extractor).unwrap_err().to_string();
            assert!(error.contains(expected), "{expected}: {error}");
        }
    }
}
