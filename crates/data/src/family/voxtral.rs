//! The shape rule of Voxtral: a sound is padded to whole windows of 30 seconds, and every token of them is read.
//!
//! ```text
//! 75 s -> 90 s -> 3 x 1,500 encoder tokens -> [BEGIN_AUDIO] and 3 x 375 LLM tokens
//! ```
//!
//! Silence of the padding is not hidden and fills LLM tokens like sound: one second costs what thirty do. A feature is four
//! encoder tokens side by side (`intermediate_size / hidden_size` of `audio_config`). The windows have one spectrum, whose
//! quiet parts are raised by the loudest of the whole sound, but each is encoded alone: a window is a part.
//!
//! The arithmetic is that of `VoxtralProcessor` of Hugging Face transformers 5.23.0 and of mistral-common 1.13.1, which it asks
//! for tokens. Both pad to 30 s; here the window is that of the extractor's file. `fixtures/text` holds what mistral-common
//! writes.

use super::fields::{CONFIG, Fields};
use super::whisper::{self, WINDOWS_MAX, Windows};
use super::{Clip, Family, FamilyFiles, Marks, MediaShape, Piece, Size, Sound, VideoSampling, unread};
use crate::DataError;
use crate::media::MediaKind;
use dflop_types::{EncoderParts, EncoderSegments};

const FAMILY: &str = "voxtral";
const TOKEN: &str = "[AUDIO]";
const BEGIN: &str = "[BEGIN_AUDIO]";
/// Widths of the class.
const WIDTH: u32 = 1_280;
const MLP_WIDTH: u32 = 5_120;

/// The shape rule of a Voxtral model.
///
/// *Invariant* (checked by [`Voxtral::from_files`]): a window has a whole number of features and of mel frames.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Voxtral {
    windows: Windows,
    /// LLM tokens of a window.
    features: u32,
}

impl Voxtral {
    /// The rule for a model's files. Fields that are missing have the values transformers gives them.
    ///
    /// # Errors
    /// [`DataError::Config`] at the first field for which processor and model would disagree, or that this rule does
    /// not cover.
    ///
    /// # Examples
    /// ```
    /// use dflop_data::family::{Family as _, FamilyFiles, Sound, Voxtral};
    /// let config = serde_json::json!({"model_type": "voxtral"});
    /// let preprocessor = serde_json::json!({"feature_size": 128});
    /// let rule = Voxtral::from_files(&FamilyFiles { config, preprocessor, ..FamilyFiles::default() })?;
    /// let shape = rule.audio(&Sound { duration_s: 75.0, sample_rate: 16_000 })?;
    /// assert_eq!((shape.num_tiles, shape.encoder_tokens(), shape.feature_tokens()), (3, 4_500, 1_125));
    /// # Ok::<(), dflop_data::DataError>(())
    /// ```
    pub fn from_files(files: &FamilyFiles) -> Result<Self, DataError> {
        let config = Fields { file: CONFIG, object: &files.config };
        config.must_be("model_type", &[FAMILY], false)?;
        let windows = Windows::from_files(files, "voxtral_encoder")?;
        windows.extractor.whole_frames(files)?;
        // A size under its Whisper name goes before the other, as transformers reads files.
        let size = |names: [&'static str; 2], absent: u32| -> Result<(&'static str, u32), DataError> {
            for name in names {
                if let Some(size) = config.side(name)? {
                    return Ok((name, size));
                }
            }
            Ok((names[1], absent))
        };
        let (_, width) = size(["audio_config.d_model", "audio_config.hidden_size"], WIDTH)?;
        let (field, mlp_width) =
            size(["audio_config.encoder_ffn_dim", "audio_config.intermediate_size"], MLP_WIDTH)?;
        let merged = mlp_width / width;
        if mlp_width % width != 0 {
            let rule =
                format!("must be a multiple of the width, {width}: so many encoder tokens are a feature");
            return Err(config.error(field, rule));
        }
        if windows.positions % merged != 0 {
            let rule = format!("must be a multiple of {merged}: so many encoder tokens are a feature");
            return Err(config.error("audio_config.max_source_positions", rule));
        }
        Ok(Self { features: windows.positions / merged, windows })
    }

    /// The shape of a sound of so many samples; a rule that they break.
    fn shape(&self, samples: u64) -> Result<MediaShape, String> {
        if samples == 0 {
            return Err("it has no samples, at least 1 is needed".to_owned());
        }
        let each = self.windows.extractor.samples_each();
        let count = u32::try_from(samples.div_ceil(each)).ok().filter(|count| *count <= WINDOWS_MAX);
        let count = count
            .ok_or_else(|| format!("its {samples} samples are more than {WINDOWS_MAX} windows of {each}"))?;
        let pieces = vec![Piece::Text(BEGIN.to_owned()), Piece::Features(count * self.features)];
        let part = EncoderParts { count, segments: 1, feature_tokens: self.features };
        Ok(MediaShape {
            num_tiles: count,
            segments: vec![EncoderSegments::of(count, self.windows.positions)],
            pieces,
            frame_indices: Vec::new(),
            parts: vec![part],
            patches: None,
            first_patches: None,
            last_patches: None,
        })
    }
}

impl Family for Voxtral {
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

    fn special_texts(&self) -> Vec<String> {
        let template = ["<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"];
        [BEGIN].into_iter().chain(template).map(str::to_owned).collect()
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
            .and_then(|samples| self.shape(samples))
            .map_err(|rule| whisper::refused(FAMILY, sound, rule))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    fn rule_of(audio: &Value, preprocessor: Value) -> Result<Voxtral, String> {
        let config = json!({"model_type": "voxtral", "audio_config": audio});
        let files = FamilyFiles { config, preprocessor, ..FamilyFiles::default() };
        Voxtral::from_files(&files).map_err(|error| error.to_string())
    }

    fn shape(duration_s: f64, sample_rate: u32) -> Result<MediaShape, String> {
        let rule = rule_of(&json!({}), json!({"feature_size": 128})).unwrap();
        rule.audio(&Sound { duration_s, sample_rate }).map_err(|error| error.to_string())
    }

    /// Every window begun is 375 tokens, behind one that begins the sound.
    #[test]
    fn sounds_by_hand() {
        for (samples, windows) in
            [(1, 1), (480_000, 1), (480_001, 2), (960_000, 2), (960_001, 3), (28_800_000, 60)]
        {
            let found = shape(f64::from(samples) / 16_000.0, 16_000).unwrap();
            assert_eq!(found.segments, [EncoderSegments::of(windows, 1_500)], "{samples}");
            assert_eq!(found.parts, [EncoderParts { count: windows, segments: 1, feature_tokens: 375 }]);
            assert_eq!(
                found.pieces,
                [Piece::Text("[BEGIN_AUDIO]".to_owned()), Piece::Features(375 * windows)]
            );
        }
        // 1,323,000 samples at 44.1 kHz are 30 s, one more begins another window.
        assert_eq!(shape(30.0, 44_100).unwrap().num_tiles, 1);
        assert_eq!(shape(1_323_001.0 / 44_100.0, 44_100).unwrap().num_tiles, 2);
    }

    #[test]
    fn what_has_no_shape_is_refused() {
        let errors =
            [shape(0.0, 16_000), shape(f64::NAN, 16_000), shape(2e6, 16_000)].map(Result::unwrap_err);
        insta::assert_snapshot!(errors.join("\n"), @r"
        no voxtral shape for a sound of 0 s at 16000 samples a second: it has no samples, at least 1 is needed
        no voxtral shape for a sound of NaN s at 16000 samples a second: its duration must be finite, its rate above 0
        no voxtral shape for a sound of 2000000 s at 16000 samples a second: its 32000000000 samples are more than 65536 windows of 480000
        ");
    }

    #[test]
    fn settings_that_would_be_read_wrongly_are_refused() {
        let extractor = json!({"feature_size": 128});
        let small = json!({"max_source_positions": 50});
        let errors = [
            rule_of(&json!({"intermediate_size": 5_000}), extractor.clone()),
            rule_of(&json!({"encoder_ffn_dim": 1_280, "d_model": 1_000}), extractor.clone()),
            rule_of(&small, json!({"feature_size": 128, "chunk_length": 1})),
            rule_of(
                &json!({"max_source_positions": 52}),
                json!({"feature_size": 128, "chunk_length": 1, "hop_length": 153}),
            ),
            rule_of(&json!({"model_type": "whisper"}), extractor.clone()),
            rule_of(&json!({}), json!({})),
        ];
        let errors: Vec<String> = errors.into_iter().map(Result::unwrap_err).collect();
        insta::assert_snapshot!(errors.join("\n"), @r#"
        `config.json`: `audio_config.intermediate_size` is 5000, must be a multiple of the width, 1280: so many encoder tokens are a feature
        `config.json`: `audio_config.encoder_ffn_dim` is 1280, must be a multiple of the width, 1000: so many encoder tokens are a feature
        `config.json`: `audio_config.max_source_positions` is 50, must be a multiple of 4: so many encoder tokens are a feature
        `the feature extractor's file`: `hop_length` is 153, must divide a window of 16000 samples
        `config.json`: `audio_config.model_type` is "whisper", must be "voxtral_encoder"
        `the feature extractor's file`: `feature_size` is missing, the encoder reads 128 mel bins, the extractor would make 80
        "#);
    }

    proptest! {
        #[test]
        fn no_sound_panics(duration_s in any::<f64>(), sample_rate in any::<u32>()) {
            if let Ok(found) = shape(duration_s, sample_rate) {
                prop_assert_eq!(found.feature_tokens(), 375 * found.num_tiles);
                prop_assert_eq!(found.encoder_tokens(), 1_500 * u64::from(found.num_tiles));
            }
        }
    }
}
