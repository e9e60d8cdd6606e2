//! The shape rule of Qwen3-Omni's thinker: pictures and videos in patches of 16, sounds in windows of eight seconds.
//!
//! ```text
//! sound -> mel frames, 100 a second -> chunks of 100 -> three conv of stride 2: 13 tokens, each an LLM token
//!                                   -> windows of n_window_infer frames (800): a segment of 104 tokens
//! ```
//!
//! The windows do not attend to each other, so each is a part. The last chunk is as long as the sound: nothing is padded,
//! and every frame that is there fills a token.
//!
//! `<|image_pad|>`, `<|video_pad|>` and `<|audio_pad|>` are repeated in place; what stands around them comes from the chat
//! template. Frame pairs of a video stand side by side, without the time stamps of Qwen3-VL. The arithmetic is that of
//! `WhisperFeatureExtractor`, `Qwen2VLImageProcessor`, `Qwen2VLVideoProcessor` and `Qwen3OmniMoeProcessor` of Hugging Face
//! transformers 5.23.0. The last gives the video processor its own range of pixels, whatever the model's files say.
//!
//! A sound is read as the processor reads it alone: `floor(samples / hop)` frames. Where a call has several sounds, the
//! processor pads them to the longest, and a frame that a shorter one begins and does not fill counts too.
//!
//! Sound inside videos is not read (`load_audio_from_video` and `use_audio_in_video` are false in the processor too).

use super::fields::{CONFIG, Fields, PROCESSOR};
use super::patches::{Patches, PixelRange};
use super::qwen_vl::{Generation, Settings};
use super::qwen2_5_omni::{named_in_thinker, refuse_other_ways, thinker_alone};
use super::qwen2_vl::{GENERATION, Qwen2Vl};
use super::whisper::{self, Extractor};
use super::{Clip, Family, FamilyFiles, Marks, MediaShape, Piece, Size, Sound, VideoSampling};
use crate::DataError;
use crate::media::MediaKind;
use dflop_types::{EncoderParts, EncoderSegments, Tower};

const FAMILY: &str = "qwen3_omni_moe";
/// Of each frame of a video, by the processor.
const VIDEO_PIXELS: PixelRange = PixelRange { min: 128 * 32 * 32, max: 768 * 32 * 32 };
/// Half the mel frames of a chunk: processor and model have the tokens of a whole chunk as a number.
const HALF_CHUNK: u32 = 50;
/// Mel frames of a chunk.
const CHUNK_FRAMES: u64 = 2 * HALF_CHUNK as u64;
/// Tokens of a chunk: a hundred frames, halved three times.
const CHUNK_TOKENS: u32 = 13;

/// The shape rule of a Qwen3-Omni model.
#[derive(Debug, Clone, PartialEq)]
pub struct Qwen3OmniMoe {
    pictures: Qwen2Vl,
    extractor: Extractor,
    /// Encoder tokens of a window, and as many features.
    window_tokens: u32,
}

impl Qwen3OmniMoe {
    /// The rule for a model's files. Fields that are missing have the values transformers gives them.
    ///
    /// # Errors
    /// [`DataError::Config`] at the first field for which processor and model would disagree, or that this rule does
    /// not cover.
    ///
    /// # Examples
    /// ```
    /// use dflop_data::family::{Family as _, FamilyFiles, Qwen3OmniMoe, Sound};
    /// let config = serde_json::json!({"model_type": "qwen3_omni_moe", "thinker_config": {}});
    /// let preprocessor = serde_json::json!({"feature_size": 128, "patch_size": 16});
    /// let rule = Qwen3OmniMoe::from_files(&FamilyFiles { config, preprocessor, ..FamilyFiles::default() })?;
    /// let shape = rule.audio(&Sound { duration_s: 10.0, sample_rate: 16_000 })?;
    /// assert_eq!((shape.num_tiles, shape.encoder_tokens(), shape.feature_tokens()), (2, 130, 130));
    /// # Ok::<(), dflop_data::DataError>(())
    /// ```
    pub fn from_files(files: &FamilyFiles) -> Result<Self, DataError> {
        let thinker = thinker_alone(files, FAMILY)?;
        for object in [&files.processor, &files.preprocessor] {
            refuse_other_ways(object)?;
            let processor = Fields { file: PROCESSOR, object };
            must_be_half_chunk(&processor, "n_window")?;
        }
        Self::of_thinker(&thinker).map_err(named_in_thinker)
    }

    /// The rule for files of which `config.json` has the thinker's fields at its top.
    fn of_thinker(files: &FamilyFiles) -> Result<Self, DataError> {
        let thinker = Fields { file: CONFIG, object: &files.config };
        let own = Patches { side: 16, merge: 2, frames: 2 };
        let generation = Generation { families: &[FAMILY], patches: own, ..GENERATION };
        let mut settings = Settings::read(files, &generation)?;
        settings.video.pixels = VIDEO_PIXELS;
        let extractor = Extractor::read(files, &thinker, "qwen3_omni_moe_audio_encoder")?;
        must_be_half_chunk(&thinker, "audio_config.n_window")?;
        let name = "audio_config.n_window_infer";
        let chunks = thinker.side(name)?.unwrap_or(800) / (2 * HALF_CHUNK);
        if chunks == 0 {
            let rule = format!("must be at least a chunk of {CHUNK_FRAMES} frames");
            return Err(thinker.error(name, rule));
        }
        let positions = thinker.side("audio_config.max_source_positions")?.unwrap_or(1_500);
        if positions < CHUNK_TOKENS {
            let rule = format!("must be at least the {CHUNK_TOKENS} tokens of a chunk");
            return Err(thinker.error("audio_config.max_source_positions", rule));
        }
        // At most 2^16 / 100 chunks.
        Ok(Self { pictures: Qwen2Vl::of(settings), extractor, window_tokens: chunks * CHUNK_TOKENS })
    }

    /// The shape of a sound; the rule that it breaks.
    fn sound(&self, sound: &Sound) -> Result<MediaShape, String> {
        let frames = self.extractor.unpadded_frames(self.extractor.samples(sound)?)?;
        let each = self.window_tokens;
        let tokens = tokens_of(frames);
        let whole = (tokens - 1) / u64::from(each);
        let whole = u32::try_from(whole)
            .ok()
            .filter(|whole| *whole < whisper::WINDOWS_MAX)
            .ok_or_else(|| format!("it has more than {} windows of {each} tokens", whisper::WINDOWS_MAX))?;
        // At most `each`.
        let last = (tokens - u64::from(whole) * u64::from(each)) as u32;
        let segment = |count, tokens| EncoderSegments { count, tokens, tower: Tower::Second };
        let segments = if last == each {
            vec![segment(whole + 1, each)]
        } else {
            [segment(whole, each), segment(1, last)].into_iter().filter(|group| group.count > 0).collect()
        };
        let part = |count, feature_tokens| EncoderParts { count, segments: 1, feature_tokens };
        Ok(MediaShape {
            num_tiles: whole + 1,
            segments,
            pieces: vec![Piece::Features(whole * each + last)],
            frame_indices: Vec::new(),
            parts: EncoderParts::joined(
                [part(whole, each), part(1, last)].into_iter().filter(|part| part.count > 0),
            ),
            // What the encoder reads of a window: a row of eight mel frames for each token, the last window filled up.
            patches: Some((each, 1)),
            first_patches: None,
            last_patches: None,
        })
    }
}

/// Encoder tokens of `frames` mel frames. Each of the three convolutions halves a chunk, and rounds up.
const fn tokens_of(frames: u64) -> u64 {
    frames / CHUNK_FRAMES * CHUNK_TOKENS as u64 + (frames % CHUNK_FRAMES).div_ceil(8)
}

/// Refuses chunks of another length than processor and model have for a whole one.
fn must_be_half_chunk(fields: &Fields, field: &str) -> Result<(), DataError> {
    match fields.side(field)? {
        Some(found) if found != HALF_CHUNK => {
            let rule =
                format!("must be {HALF_CHUNK}: transformers counts {CHUNK_TOKENS} tokens for a whole chunk");
            Err(fields.error(field, rule))
        }
        _ => Ok(()),
    }
}

impl Family for Qwen3OmniMoe {
    fn name(&self) -> &str {
        FAMILY
    }

    fn marks(&self, kind: MediaKind) -> Option<Marks> {
        let (token, id_fields): (&str, &'static [&'static str]) = match kind {
            MediaKind::Image => ("<|image_pad|>", &["image_token_id"]),
            MediaKind::Video => ("<|video_pad|>", &["video_token_id"]),
            MediaKind::Audio => ("<|audio_pad|>", &["audio_token_id"]),
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
            MediaKind::Audio => ["<|audio_start|>", "<|audio_end|>"],
            MediaKind::Image | MediaKind::Video => ["<|vision_start|>", "<|vision_end|>"],
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
    use serde_json::{Value, json};

    fn rule_of(thinker: &Value, preprocessor: Value, processor: Value) -> Result<Qwen3OmniMoe, String> {
        let config = json!({"model_type": "qwen3_omni_moe", "thinker_config": thinker});
        let files = FamilyFiles { config, preprocessor, processor, ..FamilyFiles::default() };
        Qwen3OmniMoe::from_files(&files).map_err(|error| error.to_string())
    }

    fn published() -> Value {
        json!({"feature_size": 128, "patch_size": 16, "min_pixels": 3_136, "max_pixels": 12_845_056})
    }

    fn rule() -> Qwen3OmniMoe {
        rule_of(&json!({}), published(), json!({})).unwrap()
    }

    fn shape(samples: u64) -> Result<MediaShape, String> {
        let sound = Sound { duration_s: samples as f64 / 16_000.0, sample_rate: 16_000 };
        rule().audio(&sound).map_err(|error| error.to_string())
    }

    fn group(count: u32, tokens: u32) -> EncoderSegments {
        EncoderSegments { count, tokens, tower: Tower::Second }
    }

    fn part(count: u32, feature_tokens: u32) -> EncoderParts {
        EncoderParts { count, segments: 1, feature_tokens }
    }

    /// 160 samples a frame, 8 frames a token, 13 tokens a second, 104 a window.
    #[test]
    fn sounds_by_hand() {
        for (samples, segments, parts) in [
            (201, vec![group(1, 1)], vec![part(1, 1)]),
            // The frame that is begun does not count.
            (9 * 160 - 1, vec![group(1, 1)], vec![part(1, 1)]),
            (9 * 160, vec![group(1, 2)], vec![part(1, 2)]),
            (16_000, vec![group(1, 13)], vec![part(1, 13)]),
            (16_160, vec![group(1, 14)], vec![part(1, 14)]),
            (128_159, vec![group(1, 104)], vec![part(1, 104)]),
            (128_160, vec![group(1, 104), group(1, 1)], vec![part(1, 104), part(1, 1)]),
            (256_000, vec![group(2, 104)], vec![part(2, 104)]),
            // Five minutes and a second: nothing is cut off.
            (4_816_000, vec![group(37, 104), group(1, 65)], vec![part(37, 104), part(1, 65)]),
        ] {
            let found = shape(samples).unwrap();
            assert_eq!((&found.segments, &found.parts), (&segments, &parts), "{samples}");
            assert_eq!(u64::from(found.feature_tokens()), found.encoder_tokens(), "{samples}");
            assert_eq!(u64::from(found.num_tiles), segments.iter().map(|s| u64::from(s.count)).sum::<u64>());
        }
    }

    /// The processor reads frames of videos within its own range of pixels: 56 x 84 pixels become 320 x 448.
    #[test]
    fn the_pixels_of_videos_are_the_processors() {
        let size = Size { height: 56, width: 84 };
        let clip = Clip { size, num_frames: 4, fps: Some(2.0), duration_s: None };
        let video = rule().video(&clip, VideoSampling::default()).unwrap();
        assert_eq!((video.num_tiles, video.patches), (2, Some((20, 28))));
        assert_eq!(video.pieces, [Piece::Features(2 * 10 * 14)]);
        assert_eq!(rule().image(size, 1).unwrap().patches, Some((4, 6)));
    }

    #[test]
    fn what_would_be_lost_is_refused() {
        let errors = [shape(200).unwrap_err(), shape(1 << 40).unwrap_err()];
        insta::assert_snapshot!(errors.join("\n"), @r#"
        no qwen3_omni_moe shape for a sound of 0.0125 s at 16000 samples a second: its 200 samples are too few for the transform, which reads 201 or more
        no qwen3_omni_moe shape for a sound of 68719476.736 s at 16000 samples a second: it has more than 65536 windows of 104 tokens
        "#);
    }

    #[test]
    fn settings_that_would_be_read_wrongly_are_refused() {
        let audio = |fields: Value| rule_of(&json!({"audio_config": fields}), published(), json!({}));
        let whole = json!({"model_type": "qwen3_omni_moe", "text_config": {}});
        let files = FamilyFiles { config: whole, preprocessor: published(), ..FamilyFiles::default() };
        let errors = [
            Qwen3OmniMoe::from_files(&files).map_err(|error| error.to_string()),
            audio(json!({"n_window": 100})),
            audio(json!({"n_window_infer": 99})),
            audio(json!({"max_source_positions": 12})),
            audio(json!({"num_mel_bins": 80})),
            audio(json!({"model_type": "qwen2_5_omni_audio_encoder"})),
            rule_of(&json!({}), json!({"feature_size": 128}), json!({})),
            rule_of(&json!({}), published(), json!({"use_audio_in_video": true})),
            rule_of(&json!({}), published(), json!({"load_audio_from_video": true})),
            rule_of(&json!({}), published(), json!({"n_window": 25})),
            rule_of(&json!({}), published(), json!({"videos_kwargs": {"fps": 1}})),
        ];
        let errors: Vec<String> = errors.into_iter().map(Result::unwrap_err).collect();
        insta::assert_snapshot!(errors.join("\n"), @r#"
        `config.json`: `thinker_config` is missing, must be a section
        `config.json`: `thinker_config.audio_config.n_window` is 100, must be 50: transformers counts 13 tokens for a whole chunk
        `config.json`: `thinker_config.audio_config.n_window_infer` is 99, must be at least a chunk of 100 frames
        `config.json`: `thinker_config.audio_config.max_source_positions` is 12, must be at least the 13 tokens of a chunk
        `the feature extractor's file`: `feature_size` is 128, the encoder reads 80 mel bins, the extractor would make 128
        `config.json`: `thinker_config.audio_config.model_type` is "qwen2_5_omni_audio_encoder", must be "qwen3_omni_moe_audio_encoder"
        `preprocessor_config.json`: `patch_size` is missing, `config.json` says 16 under `vision_config`, so 14
        `processor_config.json`: `use_audio_in_video` is true, must be false: the sound of videos is not read
        `processor_config.json`: `load_audio_from_video` is true, must be false: the sound of videos is not read
        `processor_config.json`: `n_window` is 25, must be 50: transformers counts 13 tokens for a whole chunk
        `processor_config.json`: `videos_kwargs` is {"fps":1}, must be absent: settings stand in the files of each part
        "#);
    }

    proptest! {
        /// The parts of a sound are its windows, and their features all it has.
        #[test]
        fn parts_add_up(samples in 201_u64..20_000_000) {
            let found = shape(samples).unwrap();
            let features: u32 = found.parts.iter().map(|part| part.count * part.feature_tokens).sum();
            let windows: u32 = found.parts.iter().map(|part| part.count * part.segments).sum();
            prop_assert_eq!((features, windows), (found.feature_tokens(), found.num_tiles));
            prop_assert_eq!(u64::from(features), tokens_of(samples / 160));
        }
    }
}
