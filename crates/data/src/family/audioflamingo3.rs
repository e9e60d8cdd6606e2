//! The shape rule of Audio Flamingo 3: a sound is cut into windows of 30 seconds (`whisper.rs`), of which the last is
//! padded.
//!
//! ```text
//! 75 s -> 30 s | 30 s | 15 s and silence -> 3 x 1,500 encoder tokens -> 750 + 750 + 375 LLM tokens
//! ```
//!
//! Each window has a spectrum of its own and is encoded alone, so a window is a part. The arithmetic is that of
//! `WhisperFeatureExtractor` and `AudioFlamingo3Processor` of Hugging Face transformers 5.23.0. `fixtures/shapes`
//! holds what those return.
//!
//! Two kinds of sounds that transformers accepts are refused here. Of a sound longer than `max_audio_len` (600
//! seconds, in whole windows) transformers would read the first windows and warn. A sound of at most two frames (20
//! ms) would fill no token; the same at the end of a longer sound is read, as transformers reads it.

use super::fields::{CONFIG, Fields, PROCESSOR};
use super::whisper::{self, WINDOWS_MAX, Windows};
use super::{Clip, Family, FamilyFiles, Marks, MediaShape, Size, Sound, VideoSampling, unread};
use crate::DataError;
use crate::media::MediaKind;

const FAMILY: &str = "audioflamingo3";
const TOKEN: &str = "<sound>";
/// Of the processor's class.
const MAX_AUDIO_LEN: u64 = 600;

/// The shape rule of an Audio Flamingo 3 model.
///
/// *Invariant* (checked by [`AudioFlamingo3::from_files`]): a window has an even number of encoder tokens. With an
/// odd one processor and model would count the tokens of several windows differently.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AudioFlamingo3 {
    windows: Windows,
    /// Windows of a sound, at most.
    max_windows: u32,
}

impl AudioFlamingo3 {
    /// The rule for a model's files. Fields that are missing have the values transformers gives them.
    ///
    /// # Errors
    /// [`DataError::Config`] at the first field for which processor and model would disagree, or that this rule does
    /// not cover.
    ///
    /// # Examples
    /// ```
    /// use dflop_data::family::{AudioFlamingo3, Family as _, FamilyFiles, Sound};
    /// let config = serde_json::json!({"model_type": "audioflamingo3"});
    /// let preprocessor = serde_json::json!({"feature_extractor": {"feature_size": 128}, "max_audio_len": 300});
    /// let rule = AudioFlamingo3::from_files(&FamilyFiles { config, preprocessor, ..FamilyFiles::default() })?;
    /// let shape = rule.audio(&Sound { duration_s: 75.0, sample_rate: 16_000 })?;
    /// assert_eq!((shape.num_tiles, shape.encoder_tokens(), shape.feature_tokens()), (3, 4_500, 1_875));
    /// # Ok::<(), dflop_data::DataError>(())
    /// ```
    pub fn from_files(files: &FamilyFiles) -> Result<Self, DataError> {
        let config = Fields { file: CONFIG, object: &files.config };
        config.must_be("model_type", &[FAMILY], false)?;
        let windows = Windows::from_files(files, "audioflamingo3_encoder")?;
        if windows.positions % 2 != 0 {
            let rule = "must be even: two encoder tokens are one token of the LLM";
            return Err(config.error("audio_config.max_source_positions", rule.to_owned()));
        }
        // The processor's own fields stand beside those of its extractor, or in a file of their own.
        let nests = files.preprocessor.get("feature_extractor").is_some();
        let object = if nests { &files.preprocessor } else { &files.processor };
        let processor = Fields { file: PROCESSOR, object };
        processor.must_be("audio_token", &[TOKEN], true)?;
        let most = u64::from(WINDOWS_MAX);
        let seconds = processor.whole("max_audio_len", most)?.unwrap_or(MAX_AUDIO_LEN);
        // At most `seconds`.
        let max_windows = (seconds / windows.extractor.seconds) as u32;
        if max_windows == 0 {
            let rule = format!("must be at least a window, {} s", windows.extractor.seconds);
            return Err(processor.error("max_audio_len", rule));
        }
        Ok(Self { windows, max_windows })
    }
}

impl Family for AudioFlamingo3 {
    fn name(&self) -> &str {
        FAMILY
    }

    fn marks(&self, kind: MediaKind) -> Option<Marks> {
        (kind == MediaKind::Audio).then(|| Marks {
            placeholder: TOKEN.to_owned(),
            feature_token: TOKEN.to_owned(),
            id_fields: &["audio_token_id"],
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
            .and_then(|samples| self.windows.shape(samples, self.max_windows, "`max_audio_len`'s"))
            .map_err(|rule| whisper::refused(FAMILY, sound, rule))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflop_types::{EncoderParts, EncoderSegments};
    use proptest::prelude::*;
    use serde_json::{Value, json};

    fn rule_of(config: &Value, preprocessor: Value, processor: Value) -> Result<AudioFlamingo3, String> {
        let config = json!({"model_type": "audioflamingo3", "audio_config": config});
        let files = FamilyFiles { config, preprocessor, processor, ..FamilyFiles::default() };
        AudioFlamingo3::from_files(&files).map_err(|error| error.to_string())
    }

    fn shape(samples: u64) -> Result<MediaShape, String> {
        let rule = rule_of(&json!({}), json!({"feature_size": 128}), json!({})).unwrap();
        let sound = Sound { duration_s: samples as f64 / 16_000.0, sample_rate: 16_000 };
        rule.audio(&sound).map_err(|error| error.to_string())
    }

    fn part(count: u32, segments: u32, feature_tokens: u32) -> EncoderParts {
        EncoderParts { count, segments, feature_tokens }
    }

    /// A whole window of 480,000 samples fills 750 tokens; 321 samples are 3 frames, 2 positions, 1 token.
    #[test]
    fn sounds_by_hand() {
        for (samples, windows, features, parts) in [
            (321, 1, 1, vec![part(1, 1, 1)]),
            (480_000, 1, 750, vec![part(1, 1, 750)]),
            (480_001, 2, 750, vec![part(1, 2, 750)]),
            (480_320, 2, 750, vec![part(1, 2, 750)]),
            (480_321, 2, 751, vec![part(1, 1, 750), part(1, 1, 1)]),
            (960_000, 2, 1_500, vec![part(2, 1, 750)]),
            (960_001, 3, 1_500, vec![part(1, 1, 750), part(1, 2, 750)]),
            (1_200_000, 3, 1_875, vec![part(2, 1, 750), part(1, 1, 375)]),
            (9_600_000, 20, 15_000, vec![part(20, 1, 750)]),
        ] {
            let found = shape(samples).unwrap();
            assert_eq!((found.num_tiles, found.feature_tokens()), (windows, features), "{samples}");
            assert_eq!(found.segments, [EncoderSegments::of(windows, 1_500)]);
            assert_eq!(found.parts, parts, "{samples}");
        }
    }

    #[test]
    fn what_would_be_cut_or_lost_is_refused() {
        let errors = [shape(9_600_001).unwrap_err(), shape(320).unwrap_err(), shape(0).unwrap_err()];
        insta::assert_snapshot!(errors.join("\n"), @r#"
        no audioflamingo3 shape for a sound of 600.0000625 s at 16000 samples a second: its 9600001 samples at 16000 a second are more than `max_audio_len`'s 9600000; the processor would cut it off
        no audioflamingo3 shape for a sound of 0.02 s at 16000 samples a second: its 320 samples fill no token, at least 321 do
        no audioflamingo3 shape for a sound of 0 s at 16000 samples a second: its 0 samples fill no token, at least 321 do
        "#);
    }

    /// Beside the extractor in the processor's file, or in that file where the extractor has its own.
    #[test]
    fn the_limit_is_that_of_the_processor() {
        let sound = Sound { duration_s: 61.0, sample_rate: 16_000 };
        let extractor = json!({"feature_size": 128});
        let limit = json!({"max_audio_len": 89});
        let nested = json!({"feature_extractor": extractor, "max_audio_len": 89});
        for rule in [rule_of(&json!({}), extractor, limit), rule_of(&json!({}), nested, json!({}))] {
            let error = rule.unwrap().audio(&sound).unwrap_err().to_string();
            assert!(error.contains("more than `max_audio_len`'s 960000"), "{error}");
        }
    }

    #[test]
    fn settings_that_would_be_read_wrongly_are_refused() {
        let own = |name: &str, value: Value| json!({"feature_extractor": {"feature_size": 128}, name: value});
        let odd = json!({"max_source_positions": 75, "num_mel_bins": 80});
        let other = json!({"model_type": "qwen2_audio_encoder"});
        let errors = [
            rule_of(&json!({}), own("max_audio_len", json!(29)), json!({})),
            rule_of(&json!({}), own("max_audio_len", json!(600.5)), json!({})),
            rule_of(&json!({}), own("audio_token", json!("<audio>")), json!({})),
            rule_of(&odd, json!({"chunk_length": 3, "hop_length": 320}), json!({})),
            rule_of(&other, own("feature_size", json!(128)), json!({})),
        ];
        let errors: Vec<String> = errors.into_iter().map(Result::unwrap_err).collect();
        insta::assert_snapshot!(errors.join("\n"), @r#"
        `processor_config.json`: `max_audio_len` is 29, must be at least a window, 30 s
        `processor_config.json`: `max_audio_len` is 600.5, must be a whole number from 1 to 65536
        `processor_config.json`: `audio_token` is "<audio>", must be "<sound>"
        `config.json`: `audio_config.max_source_positions` is 75, must be even: two encoder tokens are one token of the LLM
        `config.json`: `audio_config.model_type` is "qwen2_audio_encoder", must be "audioflamingo3_encoder"
        "#);
    }

    proptest! {
        #[test]
        fn parts_are_the_sound(samples in 321_u64..=9_600_000) {
            let found = shape(samples).unwrap();
            let sum = |of: fn(&EncoderParts) -> u32| found.parts.iter().map(|part| part.count * of(part)).sum::<u32>();
            prop_assert_eq!(sum(|part| part.segments), found.num_tiles);
            prop_assert_eq!(sum(|part| part.feature_tokens), found.feature_tokens());
            prop_assert!(found.parts.iter().all(|part| part.count > 0 && part.feature_tokens > 0));
        }

        #[test]
        fn no_sound_panics(duration_s in any::<f64>(), sample_rate in any::<u32>()) {
            let rule = rule_of(&json!({}), json!({"feature_size": 128}), json!({})).unwrap();
            if let Ok(found) = rule.audio(&Sound { duration_s, sample_rate }) {
                prop_assert!((1..=15_000).contains(&found.feature_tokens()));
            }
        }
    }
}
