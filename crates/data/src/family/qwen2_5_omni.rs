//! The shape rule of Qwen2.5-Omni's thinker: pictures and videos as in Qwen2.5-VL, sounds in windows of two seconds.
//!
//! ```text
//! sound -> mel frames, 100 a second -> windows of 2 n_window frames (200) -> conv of stride 2: a segment of 100 tokens
//!                                                                         -> means of two: 50 LLM tokens
//! ```
//!
//! The windows do not attend to each other, so each is a part. The last is as long as the sound: nothing is padded. Of
//! an odd number of its tokens the last gives no feature; up to two frames behind the last whole window give none at all,
//! and make one part with the window before.
//!
//! `<|IMAGE|>`, `<|VIDEO|>` and `<|AUDIO|>` are repeated in place; what stands around them comes from the chat template.
//! The arithmetic is that of `WhisperFeatureExtractor`, `Qwen2VLImageProcessor`, `Qwen2VLVideoProcessor` and
//! `Qwen2_5OmniProcessor` of Hugging Face transformers 5.23.0. The last gives the video processor its own range of
//! pixels, whatever the model's files say.
//!
//! Sound inside videos is not read (`load_audio_from_video` and `use_audio_in_video` are false in the processor too). A
//! sound longer than `chunk_length` (300 s) is refused: transformers would read its beginning and say nothing.

use super::fields::{CONFIG, Fields, PROCESSOR};
use super::patches::PixelRange;
use super::qwen_vl::{Generation, Settings};
use super::qwen2_vl::{GENERATION, Qwen2Vl};
use super::whisper::{self, Extractor};
use super::{Clip, Family, FamilyFiles, Marks, MediaShape, Piece, Size, Sound, VideoSampling};
use crate::DataError;
use crate::media::MediaKind;
use dflop_types::{EncoderParts, EncoderSegments, Tower};
use serde_json::Value;

const FAMILY: &str = "qwen2_5_omni";
/// The section of `config.json` that describes the model that trains.
const THINKER: &str = "thinker_config";
/// Of each frame of a video, by the processor.
const VIDEO_PIXELS: PixelRange = PixelRange { min: 128 * 28 * 28, max: 768 * 28 * 28 };
/// Fields of the processor that would change what it reads.
const OF_PROCESSOR: [&str; 3] = ["images_kwargs", "videos_kwargs", "audio_kwargs"];
/// Fields that ask for the sound of videos.
const SOUND_OF_VIDEOS: [&str; 2] = ["load_audio_from_video", "use_audio_in_video"];

/// The shape rule of a Qwen2.5-Omni model.
///
/// *Invariant* (checked by [`Qwen25Omni::from_files`]): a window has an even number of tokens, so that no feature is the
/// mean of tokens of two windows.
#[derive(Debug, Clone, PartialEq)]
pub struct Qwen25Omni {
    pictures: Qwen2Vl,
    extractor: Extractor,
    /// Encoder tokens of a window, half as many as its mel frames.
    window_tokens: u32,
}

impl Qwen25Omni {
    /// The rule for a model's files. Fields that are missing have the values transformers gives them.
    ///
    /// # Errors
    /// [`DataError::Config`] at the first field for which processor and model would disagree, or that this rule does
    /// not cover.
    ///
    /// # Examples
    /// ```
    /// use dflop_data::family::{Family as _, FamilyFiles, Qwen25Omni, Sound};
    /// let config = serde_json::json!({"model_type": "qwen2_5_omni", "thinker_config": {}});
    /// let preprocessor = serde_json::json!({"feature_size": 128, "chunk_length": 300});
    /// let rule = Qwen25Omni::from_files(&FamilyFiles { config, preprocessor, ..FamilyFiles::default() })?;
    /// let shape = rule.audio(&Sound { duration_s: 5.0, sample_rate: 16_000 })?;
    /// assert_eq!((shape.num_tiles, shape.encoder_tokens(), shape.feature_tokens()), (3, 250, 125));
    /// # Ok::<(), dflop_data::DataError>(())
    /// ```
    pub fn from_files(files: &FamilyFiles) -> Result<Self, DataError> {
        let thinker = thinker_alone(files, FAMILY)?;
        refuse_other_ways(&files.processor)?;
        refuse_other_ways(&files.preprocessor)?;
        Self::of_thinker(&thinker).map_err(named_in_thinker)
    }

    /// The rule for files of which `config.json` has the thinker's fields at its top.
    fn of_thinker(files: &FamilyFiles) -> Result<Self, DataError> {
        let thinker = Fields { file: CONFIG, object: &files.config };
        let mut settings = Settings::read(files, &Generation { families: &[FAMILY], ..GENERATION })?;
        settings.video.pixels = VIDEO_PIXELS;
        let extractor = Extractor::read(files, &thinker, "qwen2_5_omni_audio_encoder")?;
        let window_tokens = thinker.side("audio_config.n_window")?.unwrap_or(100);
        if window_tokens % 2 != 0 {
            let rule = "must be even: two tokens of a window are one token of the LLM";
            return Err(thinker.error("audio_config.n_window", rule.to_owned()));
        }
        let positions = thinker.side("audio_config.max_source_positions")?.unwrap_or(1_500);
        if positions < window_tokens {
            let rule = format!("must be at least `n_window`, {window_tokens}");
            return Err(thinker.error("audio_config.max_source_positions", rule));
        }
        Ok(Self { pictures: Qwen2Vl::of(settings), extractor, window_tokens })
    }

    /// The shape of a sound; the rule that it breaks.
    fn sound(&self, sound: &Sound) -> Result<MediaShape, String> {
        let samples = self.extractor.samples(sound)?;
        let frames = self.extractor.checked_frames(samples, 1, "`chunk_length`'s")?;
        let each = self.window_tokens;
        let window_frames = 2 * u64::from(each);
        let whole = u32::try_from((frames - 1) / window_frames).unwrap_or(u32::MAX);
        // At most `window_tokens`.
        let last = ((frames - u64::from(whole) * window_frames).div_ceil(2)) as u32;
        let segment = |count, tokens| EncoderSegments { count, tokens, tower: Tower::Second };
        let segments = if last == each {
            vec![segment(whole + 1, each)]
        } else {
            [segment(whole, each), segment(1, last)].into_iter().filter(|group| group.count > 0).collect()
        };
        let part = |count, segments, feature_tokens| EncoderParts { count, segments, feature_tokens };
        let parts = match last / 2 {
            // At least one is whole, or the sound would fill no token.
            0 => [part(whole - 1, 1, each / 2), part(1, 2, each / 2)],
            features => [part(whole, 1, each / 2), part(1, 1, features)],
        };
        Ok(MediaShape {
            num_tiles: whole + 1,
            segments,
            pieces: vec![Piece::Features(whole * (each / 2) + last / 2)],
            frame_indices: Vec::new(),
            parts: EncoderParts::joined(parts.into_iter().filter(|part| part.count > 0)),
            // What the encoder reads of a window: a row of two mel frames for each token, the last window filled up.
            patches: Some((each, 1)),
            first_patches: None,
            last_patches: None,
        })
    }
}

/// The files with the fields of the thinker at the top of `config.json`, and the `model_type` of `family`, which the files
/// must be of.
///
/// # Errors
/// [`DataError::Config`].
pub(super) fn thinker_alone(files: &FamilyFiles, family: &str) -> Result<FamilyFiles, DataError> {
    let whole = Fields { file: CONFIG, object: &files.config };
    whole.must_be("model_type", &[family], false)?;
    if !files.config[THINKER].is_object() {
        return Err(whole.error(THINKER, "must be a section".to_owned()));
    }
    let mut config = files.config[THINKER].clone();
    config["model_type"] = Value::from(family);
    Ok(FamilyFiles { config, ..files.clone() })
}

/// The error with the section of the thinker before its field.
pub(super) fn named_in_thinker(error: DataError) -> DataError {
    match error {
        DataError::Config { file: CONFIG, field, value, rule } => {
            DataError::Config { file: CONFIG, field: format!("{THINKER}.{field}"), value, rule }
        }
        other => other,
    }
}

/// Refuses fields of a processor's file that ask for another way of reading.
pub(super) fn refuse_other_ways(object: &Value) -> Result<(), DataError> {
    let processor = Fields { file: PROCESSOR, object };
    for field in OF_PROCESSOR {
        if processor.get(field).is_some() {
            return Err(
                processor.error(field, "must be absent: settings stand in the files of each part".to_owned())
            );
        }
    }
    for field in SOUND_OF_VIDEOS {
        if processor.flag(field)? == Some(true) {
            return Err(processor.error(field, "must be false: the sound of videos is not read".to_owned()));
        }
    }
    Ok(())
}

impl Family for Qwen25Omni {
    fn name(&self) -> &str {
        FAMILY
    }

    fn marks(&self, kind: MediaKind) -> Option<Marks> {
        let (token, id_fields): (&str, &'static [&'static str]) = match kind {
            MediaKind::Image => ("<|IMAGE|>", &["image_token_id", "image_token_index"]),
            MediaKind::Video => ("<|VIDEO|>", &["video_token_id", "video_token_index"]),
            MediaKind::Audio => ("<|AUDIO|>", &["audio_token_id", "audio_token_index"]),
        };
        Some(Marks {
            placeholder: token.to_owned(),
            feature_token: token.to_owned(),
            id_fields,
            number: None,
        })
    }

    fn around(&self, kind: MediaKind) -> Option<[&'static str; 2]> {
        Some(match kind {
            MediaKind::Audio => ["<|audio_bos|>", "<|audio_eos|>"],
            MediaKind::Image | MediaKind::Video => ["<|vision_bos|>", "<|vision_eos|>"],
        })
    }

    fn image(&self, size: Size, num_images: usize) -> Result<MediaShape, DataError> {
        self.pictures.image(size, num_images)
    }

    fn video(&self, clip: &Clip, sampling: VideoSampling) -> Result<MediaShape, DataError> {
        self.pictures.video(clip, sampling)
    }

    fn audio(&self, sound: &Sound) -> Result<MediaShape, DataError> {
        self.sound(sound).map_err(|rule| whisper::refused(FAMILY, sound, rule))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn rule_of(thinker: &Value, preprocessor: Value, processor: Value) -> Result<Qwen25Omni, String> {
        let config = json!({"model_type": "qwen2_5_omni", "thinker_config": thinker});
        let files = FamilyFiles { config, preprocessor, processor, ..FamilyFiles::default() };
        Qwen25Omni::from_files(&files).map_err(|error| error.to_string())
    }

    fn published() -> Value {
        json!({"feature_size": 128, "chunk_length": 300, "min_pixels": 3_136, "max_pixels": 12_845_056})
    }

    fn rule() -> Qwen25Omni {
        rule_of(&json!({}), published(), json!({})).unwrap()
    }

    fn shape(samples: u64) -> Result<MediaShape, String> {
        let sound = Sound { duration_s: samples as f64 / 16_000.0, sample_rate: 16_000 };
        rule().audio(&sound).map_err(|error| error.to_string())
    }

    fn group(count: u32, tokens: u32) -> EncoderSegments {
        EncoderSegments { count, tokens, tower: Tower::Second }
    }

    fn part(count: u32, segments: u32, feature_tokens: u32) -> EncoderParts {
        EncoderParts { count, segments, feature_tokens }
    }

    /// 160 samples a frame, 200 frames a window, 100 tokens, 50 features.
    #[test]
    fn sounds_by_hand() {
        for (samples, features, segments, parts) in [
            (321, 1, vec![group(1, 2)], vec![part(1, 1, 1)]),
            // 5 frames are 3 tokens, of which the last gives no feature.
            (800, 1, vec![group(1, 3)], vec![part(1, 1, 1)]),
            (32_000, 50, vec![group(1, 100)], vec![part(1, 1, 50)]),
            (32_001, 50, vec![group(1, 100), group(1, 1)], vec![part(1, 2, 50)]),
            (32_321, 51, vec![group(1, 100), group(1, 2)], vec![part(1, 1, 50), part(1, 1, 1)]),
            (64_320, 100, vec![group(2, 100), group(1, 1)], vec![part(1, 1, 50), part(1, 2, 50)]),
            (4_800_000, 7_500, vec![group(150, 100)], vec![part(150, 1, 50)]),
        ] {
            let found = shape(samples).unwrap();
            assert_eq!(found.feature_tokens(), features, "{samples}");
            assert_eq!((&found.segments, &found.parts), (&segments, &parts), "{samples}");
            assert_eq!(u64::from(found.num_tiles), segments.iter().map(|s| u64::from(s.count)).sum::<u64>());
        }
    }

    /// The processor reads frames of videos within its own range of pixels: 56 x 84 pixels become 280 x 392.
    #[test]
    fn the_pixels_of_videos_are_the_processors() {
        let size = Size { height: 56, width: 84 };
        let clip = Clip { size, num_frames: 4, fps: Some(2.0), duration_s: None };
        let video = rule().video(&clip, VideoSampling::default()).unwrap();
        assert_eq!((video.num_tiles, video.patches), (2, Some((20, 28))));
        assert_eq!(rule().image(size, 1).unwrap().patches, Some((4, 6)));
    }

    #[test]
    fn what_would_be_cut_or_lost_is_refused() {
        let errors = [shape(4_800_001).unwrap_err(), shape(320).unwrap_err()];
        insta::assert_snapshot!(errors.join("\n"), @r#"
        no qwen2_5_omni shape for a sound of 300.0000625 s at 16000 samples a second: its 4800001 samples at 16000 a second are more than `chunk_length`'s 4800000; the processor would cut it off
        no qwen2_5_omni shape for a sound of 0.02 s at 16000 samples a second: its 320 samples fill no token, at least 321 do
        "#);
    }

    #[test]
    fn settings_that_would_be_read_wrongly_are_refused() {
        let audio = |fields: Value| rule_of(&json!({"audio_config": fields}), published(), json!({}));
        let whole = json!({"model_type": "qwen2_5_omni", "text_config": {}});
        let files = FamilyFiles { config: whole, preprocessor: published(), ..FamilyFiles::default() };
        let errors = [
            Qwen25Omni::from_files(&files).map_err(|error| error.to_string()),
            audio(json!({"n_window": 25})),
            audio(json!({"n_window": 100, "max_source_positions": 50})),
            audio(json!({"num_mel_bins": 80})),
            audio(json!({"model_type": "qwen3_omni_moe_audio_encoder"})),
            rule_of(&json!({"vision_config": {"patch_size": 16}}), published(), json!({})),
            rule_of(&json!({}), published(), json!({"use_audio_in_video": true})),
            rule_of(&json!({}), published(), json!({"load_audio_from_video": true})),
            rule_of(&json!({}), published(), json!({"videos_kwargs": {"fps": 1}})),
        ];
        let errors: Vec<String> = errors.into_iter().map(Result::unwrap_err).collect();
        insta::assert_snapshot!(errors.join("\n"), @r#"
        `config.json`: `thinker_config` is missing, must be a section
        `config.json`: `thinker_config.audio_config.n_window` is 25, must be even: two tokens of a window are one token of the LLM
        `config.json`: `thinker_config.audio_config.max_source_positions` is 50, must be at least `n_window`, 100
        `the feature extractor's file`: `feature_size` is 128, the encoder reads 80 mel bins, the extractor would make 128
        `config.json`: `thinker_config.audio_config.model_type` is "qwen3_omni_moe_audio_encoder", must be "qwen2_5_omni_audio_encoder"
        `preprocessor_config.json`: `patch_size` is missing, `config.json` says 16 under `vision_config`, so 14
        `processor_config.json`: `use_audio_in_video` is true, must be false: the sound of videos is not read
        `processor_config.json`: `load_audio_from_video` is true, must be false: the sound of videos is not read
        `processor_config.json`: `videos_kwargs` is {"fps":1}, must be absent: settings stand in the files of each part
        "#);
    }

    proptest! {
        #[test]
        fn parts_are_the_sound(samples in 321_u64..=4_800_000) {
            let found = shape(samples).unwrap();
            let sum = |of: fn(&EncoderParts) -> u32| found.parts.iter().map(|part| part.count * of(part)).sum::<u32>();
            prop_assert_eq!(sum(|part| part.segments), found.num_tiles);
            prop_assert_eq!(sum(|part| part.feature_tokens), found.feature_tokens());
            prop_assert!(found.parts.iter().all(|part| part.count > 0 && part.feature_tokens > 0));
            prop_assert!(found.segments.iter().all(|group| group.count > 0 && group.tokens > 0));
        }

        #[test]
        fn no_sound_panics(
            duration_s in any::<f64>(),
            sample_rate in any::<u32>(),
            n_window in prop::sample::select(vec![2, 4, 100, 32_768]),
            chunk_length in prop::sample::select(vec![1, 300, 32_768]),
        ) {
            let thinker = json!({"audio_config": {"n_window": n_window, "max_source_positions": 32_768}});
            let preprocessor = json!({"feature_size": 128, "chunk_length": chunk_length, "hop_length": 1,
                                      "sampling_rate": 48_000});
            let rule = rule_of(&thinker, preprocessor, json!({})).unwrap();
            if let Ok(found) = rule.audio(&Sound { duration_s, sample_rate }) {
                prop_assert!(found.feature_tokens() > 0);
            }
        }
    }
}
