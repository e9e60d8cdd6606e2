//! The shape rule of Gemma 4: pictures scaled until their patches fill a budget, the mean of each square of patches a feature.
//!
//! ```text
//! (height, width) -> x sqrt(budget pixels / pixels), each side down to a multiple of patch x pool  (a side of nothing: one)
//! encoder: one segment of (height / patch) x (width / patch) tokens;  LLM: pool x pool patches a feature
//! image      <|image> features <image|>
//! video      mm:ss <|image> features <image|>, once a frame, with a space between
//! index_k  = floor(k total / n),  k = 0 .. n - 1;  n is `num_frames` (32), or floor(total / fps of the file x fps)
//! ```
//!
//! The budgets are `max_soft_tokens` features of the image processor (280) and of the video processor (70, for each frame).
//! The arithmetic is that of Hugging Face transformers 5.23.0, with its floats: `Gemma4ImageProcessor`,
//! `Gemma4VideoProcessor`, `Gemma4Processor`.
//!
//! Where the processor would fail, as for fewer frames than `num_frames`, what the user asks for ([`VideoSampling`]) helps:
//! of it dflop reads at least one frame and at most all. If a file gives no rate, transformers writes times of 24 frames a
//! second; we take frames over duration, and refuse a clip that gives neither. Sounds, which E2B and E4B read too, are in
//! `gemma4_sounds.rs`.

use super::fields::{CONFIG, Fields, SIDE_MAX, image_fields};
use super::gemma4_sounds::{self, Sounds};
use super::patches::EXACT_MAX;
use super::qwen_vl::{clip_words, must_be_of, video_fields};
use super::video_settings::{FRAMES_MAX, all_frames, check_clip, frame_rate};
use super::{
    Clip, Family, FamilyFiles, Marks, MediaShape, Piece, Size, Sound, VideoSampling, image_words, refused,
    whisper,
};
use crate::DataError;
use crate::media::MediaKind;
use dflop_types::{EncoderParts, EncoderSegments};

const FAMILY: &str = "gemma4";
/// Budgets that the processors take, in features.
const BUDGETS: [u32; 5] = [70, 140, 280, 560, 1_120];
/// Frames that are read of a video where its processor names no number.
const DEFAULT_FRAMES: u64 = 32;
const BEGIN: &str = "<|image>";
const END: &str = "<image|>";

/// How a picture is cut into patches.
///
/// *Invariants* (checked by [`Gemma4::from_files`]): each field is at least 1, and `patch * pool` at most 2^15.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Geometry {
    /// Side of a patch, in pixels.
    patch: u32,
    /// Patches a feature, each way.
    pool: u32,
}

impl Geometry {
    /// Rows and columns of features of a picture, of which there are at most `budget`.
    ///
    /// # Errors
    /// The rule that the picture breaks.
    fn features(self, size: Size, budget: u32) -> Result<(u32, u32), String> {
        let pixels = u64::from(size.height) * u64::from(size.width);
        if pixels == 0 {
            return Err("both sides must be at least 1".to_owned());
        }
        if pixels > EXACT_MAX {
            return Err(format!("its pixels must be at most {EXACT_MAX}"));
        }
        let unit = f64::from(self.patch * self.pool);
        let wanted =
            f64::from(budget * self.pool * self.pool) * (f64::from(self.patch) * f64::from(self.patch));
        let factor = (wanted / pixels as f64).sqrt();
        let (height, width) = (f64::from(size.height), f64::from(size.width));
        let [rows, columns] = [height, width].map(|length| (factor * length / unit).floor() as u32);
        // A line becomes one row of as many features as it is times as long as wide.
        let line = |longer: f64, shorter: f64| ((longer / shorter).floor() as u32).min(budget);
        let (rows, columns) = match (rows, columns) {
            (0, 0) => return Err(format!("it would be resized to nothing: a feature is {unit} pixels wide")),
            (0, _) => (1, line(width, height)),
            (_, 0) => (line(height, width), 1),
            sides => sides,
        };
        if u64::from(rows) * u64::from(columns) > u64::from(budget) {
            return Err(format!("it would have {rows} x {columns} features, must be at most {budget}"));
        }
        Ok((rows, columns))
    }

    /// The shape of a picture or of so many frames, with `pieces` in the place of the placeholder.
    fn shape(
        self,
        (rows, columns): (u32, u32),
        count: u32,
        pieces: Vec<Piece>,
        frames: Vec<u32>,
    ) -> MediaShape {
        let sides = (rows * self.pool, columns * self.pool);
        MediaShape {
            num_tiles: count,
            segments: vec![EncoderSegments::of(count, sides.0 * sides.1)],
            pieces,
            frame_indices: frames,
            parts: vec![EncoderParts { count, segments: 1, feature_tokens: rows * columns }],
            patches: Some(sides),
            first_patches: None,
            last_patches: None,
        }
    }
}

/// What the video processor's fields say.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Videos {
    /// Features of a frame, at most.
    budget: u32,
    /// Whether frames are chosen; otherwise all are read.
    samples_frames: bool,
    num_frames: Option<u64>,
    fps: Option<f64>,
}

impl Videos {
    fn read(fields: &Fields<'_>, budget: u32) -> Result<Self, DataError> {
        let fps = match fields.get("fps") {
            None => None,
            Some(value) => Some(
                value
                    .as_f64()
                    .filter(|fps| *fps > 0.0 && fps.is_finite())
                    .ok_or_else(|| fields.error("fps", "must be a number above 0".to_owned()))?,
            ),
        };
        // The class has a number, a null in the file takes it away.
        let is_given = fields.object.get("num_frames").is_some();
        let num_frames = fields.whole("num_frames", FRAMES_MAX)?;
        Ok(Self {
            budget,
            samples_frames: fields.flag("do_sample_frames")?.unwrap_or(true),
            num_frames: if is_given { num_frames } else { Some(DEFAULT_FRAMES) },
            fps,
        })
    }

    /// Positions of the frames that are read, ascending.
    fn choose(&self, clip: &Clip, source_fps: f64, asked: VideoSampling) -> Result<Vec<u32>, String> {
        let total = clip.num_frames;
        // A product that does not fit 64 bits becomes the largest number that does, and then the limit.
        let of_rate = |fps: f64| ((total as f64 / source_fps * fps) as u64).max(1);
        let most = asked.max_frames.map_or(u64::MAX, u64::from);
        let count = match (asked.fps, asked.max_frames) {
            (Some(fps), _) => of_rate(fps).min(most).clamp(1, total),
            (None, Some(_)) => most.clamp(1, total),
            (None, None) => match (self.samples_frames, self.num_frames, self.fps) {
                (false, ..) | (true, None, None) => return all_frames(clip),
                (true, Some(_), Some(_)) => {
                    let rule = "its frames are chosen by `num_frames` or by `fps`, and the video processor has both: \
                                set `num_frames` to null, or ask for frames";
                    return Err(rule.to_owned());
                }
                (true, Some(count), None) => count,
                (true, None, Some(fps)) => of_rate(fps),
            },
        };
        if count > total {
            return Err(format!("{count} frames are asked for, must be at most all of them: ask for fewer"));
        }
        if count > FRAMES_MAX {
            return Err(format!("{count} frames of it would be read, must be at most {FRAMES_MAX}"));
        }
        // Fits: frames are fewer than 2^32 and at most 2^16 are read.
        Ok((0..count).map(|k| (k * total / count) as u32).collect())
    }
}

/// A time as `mm:ss`, by Python's `//` and `%` of floats.
fn stamp(seconds: f64) -> String {
    let rest = seconds % 60.0;
    let minutes = ((seconds - rest) / 60.0).round();
    format!("{:02}:{:02}", minutes as u64, rest as u64)
}

/// The shape rule of a Gemma 4 model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Gemma4 {
    geometry: Geometry,
    /// Features of an image, at most.
    image_budget: u32,
    videos: Videos,
    /// `None`: the model does not hear.
    sounds: Option<Sounds>,
}

impl Family for Gemma4 {
    fn name(&self) -> &str {
        FAMILY
    }

    fn marks(&self, kind: MediaKind) -> Option<Marks> {
        let (token, id_fields): (&str, &'static [&'static str]) = match kind {
            MediaKind::Image => ("<|image|>", &["image_token_id"]),
            MediaKind::Video => ("<|video|>", &["video_token_id"]),
            MediaKind::Audio if self.sounds.is_none() => return None,
            MediaKind::Audio => ("<|audio|>", &["audio_token_id"]),
        };
        Some(Marks {
            placeholder: token.to_owned(),
            feature_token: token.to_owned(),
            id_fields,
            number: None,
        })
    }

    fn special_texts(&self) -> Vec<String> {
        let heard: &[&str] =
            if self.sounds.is_some() { &[gemma4_sounds::BEGIN, gemma4_sounds::END] } else { &[] };
        [BEGIN, END].iter().chain(heard).map(|text| (*text).to_owned()).collect()
    }

    fn image(&self, size: Size, _num_images: usize) -> Result<MediaShape, DataError> {
        let sides = self
            .geometry
            .features(size, self.image_budget)
            .map_err(|rule| refused(FAMILY, image_words(size.height, size.width), &rule))?;
        let pieces = vec![
            Piece::Text(BEGIN.to_owned()),
            Piece::Features(sides.0 * sides.1),
            Piece::Text(END.to_owned()),
        ];
        Ok(self.geometry.shape(sides, 1, pieces, Vec::new()))
    }

    fn video(&self, clip: &Clip, sampling: VideoSampling) -> Result<MediaShape, DataError> {
        self.video_shape(clip, sampling).map_err(|rule| refused(FAMILY, clip_words(clip), &rule))
    }

    fn audio(&self, sound: &Sound) -> Result<MediaShape, DataError> {
        let Some(sounds) = &self.sounds else {
            let rule =
                "the model does not hear: its configuration has no `audio_config`, as E2B and E4B have";
            return Err(refused(FAMILY, "a sound".to_owned(), rule));
        };
        sounds.shape(sound).map_err(|rule| whisper::refused(FAMILY, sound, rule))
    }
}

impl Gemma4 {
    /// The rule for a model's files: `config.json`, `preprocessor_config.json` (or a `processor_config.json` that holds the
    /// processors' fields under `image_processor` and `video_processor`) and `video_preprocessor_config.json`.
    ///
    /// Fields that are missing have the values transformers gives them; without a file of the video processor the image
    /// processor's own file holds for videos too, as transformers has it.
    ///
    /// # Errors
    /// [`DataError::Config`] at the first field for which a processor and the model would disagree, or that this rule does
    /// not cover.
    ///
    /// # Examples
    /// ```
    /// use dflop_data::family::{Family as _, FamilyFiles, Gemma4, Size};
    /// let config = serde_json::json!({"model_type": "gemma4"});
    /// let preprocessor = serde_json::json!({"max_soft_tokens": 280});
    /// let rule = Gemma4::from_files(&FamilyFiles { config, preprocessor, ..FamilyFiles::default() })?;
    /// let shape = rule.image(Size { height: 480, width: 640 }, 1)?;
    /// assert_eq!((shape.segments[0].tokens, shape.feature_tokens()), (42 * 57, 14 * 19));
    /// # Ok::<(), dflop_data::DataError>(())
    /// ```
    pub fn from_files(files: &FamilyFiles) -> Result<Self, DataError> {
        let config = Fields { file: CONFIG, object: &files.config };
        config.must_be("model_type", &[FAMILY], false)?;
        if config.get("vision_config").is_none() && files.config.get("vision_config").is_some() {
            return Err(config.error("vision_config", "the model reads text alone".to_owned()));
        }
        config.must_be("vision_config.model_type", &["gemma4_vision"], true)?;
        let patch = config.side("vision_config.patch_size")?.unwrap_or(16);
        let pool = config.side("vision_config.pooling_kernel_size")?.unwrap_or(3);
        let places = config.side("vision_config.position_embedding_size")?.unwrap_or(10_240);
        if patch.saturating_mul(pool) > SIDE_MAX {
            let rule = format!("a feature must be at most {SIDE_MAX} pixels wide");
            return Err(config.error("vision_config.pooling_kernel_size", rule));
        }
        let image = image_fields(&files.preprocessor);
        let video = video_fields(files);
        must_be_of(
            &image,
            "image_processor_type",
            &["Gemma4ImageProcessor", "Gemma4ImageProcessorFast", "Gemma4ImageProcessorPil"],
        )?;
        must_be_of(&video, "video_processor_type", &["Gemma4VideoProcessor"])?;
        let budget = |fields: &Fields<'_>, default: u32| -> Result<u32, DataError> {
            for (field, default, model) in [("patch_size", 16, patch), ("pooling_kernel_size", 3, pool)] {
                if fields.side(field)?.unwrap_or(default) != model {
                    return Err(fields.error(field, format!("must be {model}, as the model has it")));
                }
            }
            let field = "max_soft_tokens";
            let budget = fields.side(field)?.unwrap_or(default);
            if !BUDGETS.contains(&budget) {
                return Err(fields.error(field, format!("must be one of {BUDGETS:?}")));
            }
            // A line is one row of as many features.
            if u64::from(budget) * u64::from(pool) > u64::from(places) {
                let rule = format!("must be at least {}, the patches of the longest line", budget * pool);
                return Err(config.error("vision_config.position_embedding_size", rule));
            }
            Ok(budget)
        };
        let image_budget = budget(&image, 280)?;
        let videos = Videos::read(&video, budget(&video, 70)?)?;
        let sounds = Sounds::from_files(files)?;
        Ok(Self { geometry: Geometry { patch, pool }, image_budget, videos, sounds })
    }

    fn video_shape(&self, clip: &Clip, asked: VideoSampling) -> Result<MediaShape, String> {
        check_clip(clip, asked)?;
        let source_fps = frame_rate(clip)?;
        let frames = self.videos.choose(clip, source_fps, asked)?;
        let sides = self.geometry.features(clip.size, self.videos.budget)?;
        let mut pieces = Vec::with_capacity(2 * frames.len() + 1);
        let mut before = String::new();
        for index in &frames {
            let time = stamp(f64::from(*index) / source_fps);
            pieces.push(Piece::Text(format!("{before}{time} {BEGIN}")));
            pieces.push(Piece::Features(sides.0 * sides.1));
            before = format!("{END} ");
        }
        pieces.push(Piece::Text(END.to_owned()));
        Ok(self.geometry.shape(sides, frames.len() as u32, pieces, frames))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn made(config: &Value, preprocessor: Value, video_preprocessor: Value) -> Result<Gemma4, DataError> {
        let mut all = json!({"model_type": "gemma4"});
        all.as_object_mut().unwrap().extend(config.as_object().unwrap().clone());
        let files = FamilyFiles { config: all, preprocessor, video_preprocessor, ..FamilyFiles::default() };
        Gemma4::from_files(&files)
    }

    fn clip(num_frames: u64, fps: f64) -> Clip {
        Clip { size: Size { height: 480, width: 640 }, num_frames, fps: Some(fps), duration_s: None }
    }

    /// 280 features of 48 x 48 pixels: a square is 803.2 pixels wide, 16 features; a line keeps its ratio, up to 280.
    #[test]
    fn pictures_by_hand() {
        let rule = made(&json!({}), json!({}), Value::Null).unwrap();
        let patches = |height, width| rule.image(Size { height, width }, 1).unwrap().patches;
        assert_eq!(patches(1, 1), Some((48, 48)));
        assert_eq!(patches(5_000, 5_000), Some((48, 48)));
        assert_eq!(patches(1, 100), Some((3, 3 * 167)));
        assert_eq!(patches(1, 279), Some((3, 3 * 279)));
        assert_eq!(patches(1_000, 1), Some((3 * 280, 3)));
        assert!(rule.image(Size { height: 0, width: 5 }, 1).is_err());
        assert!(rule.image(Size { height: u32::MAX, width: u32::MAX }, 1).is_err());
        let shape = rule.image(Size { height: 9, width: 9 }, 1).unwrap();
        let text = |text: &str| Piece::Text(text.to_owned());
        assert_eq!(shape.pieces, [text("<|image>"), Piece::Features(256), text("<image|>")]);
        let error = rule.audio(&Sound { duration_s: 1.0, sample_rate: 16_000 }).unwrap_err().to_string();
        assert!(error.contains("the model does not hear"), "{error}");
        assert!(rule.marks(MediaKind::Audio).is_none());
    }

    /// 70 features: 480 x 640 pixels become 347.8 x 463.7, 7 x 9 features.
    #[test]
    fn a_video_by_hand() {
        let rule = made(&json!({}), json!({}), json!({"num_frames": 3})).unwrap();
        let shape = rule.video(&clip(3_000, 24.0), VideoSampling::default()).unwrap();
        let text = |text: &str| Piece::Text(text.to_owned());
        assert_eq!(shape.frame_indices, [0, 1_000, 2_000]);
        assert_eq!(
            shape.pieces,
            [
                text("00:00 <|image>"),
                Piece::Features(63),
                text("<image|> 00:41 <|image>"),
                Piece::Features(63),
                text("<image|> 01:23 <|image>"),
                Piece::Features(63),
                text("<image|>"),
            ]
        );
        assert_eq!((shape.num_tiles, shape.encoder_tokens()), (3, 3 * 63 * 9));
        assert_eq!(stamp(7_322.9), "122:02");
    }

    #[test]
    fn frames_are_those_that_are_asked_for() {
        let frames = |video: Value, clip: Clip, asked: VideoSampling| {
            made(&json!({}), json!({}), video).unwrap().video(&clip, asked).map(|shape| shape.frame_indices)
        };
        let none = VideoSampling::default();
        assert_eq!(frames(json!({"num_frames": null}), clip(2, 1.0), none).unwrap(), [0, 1]);
        assert_eq!(
            frames(json!({"num_frames": null, "fps": 2}), clip(10, 4.0), none).unwrap(),
            [0, 2, 4, 6, 8]
        );
        let few = VideoSampling { max_frames: Some(9), fps: None };
        assert_eq!(frames(json!({}), clip(3, 1.0), few).unwrap(), [0, 1, 2]);
        let slow = VideoSampling { max_frames: Some(3), fps: Some(1.0) };
        assert_eq!(frames(json!({}), clip(20, 2.0), slow).unwrap(), [0, 6, 13]);
        for (video, expected) in [
            (json!({}), "32 frames are asked for, must be at most all of them"),
            (json!({"fps": 2}), "and the video processor has both"),
        ] {
            let error = frames(video, clip(3, 1.0), none).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn fields_that_disagree_are_named() {
        let vision = |fields: Value| json!({"vision_config": fields});
        let cases = [
            (json!({"vision_config": null}), json!({}), "`vision_config`"),
            (vision(json!({"model_type": "siglip"})), json!({}), "`vision_config.model_type`"),
            (vision(json!({"patch_size": 14})), json!({}), "`patch_size` is missing, must be 14"),
            (json!({}), json!({"pooling_kernel_size": 2}), "`pooling_kernel_size` is 2, must be 3"),
            (json!({}), json!({"max_soft_tokens": 100}), "`max_soft_tokens` is 100, must be one of"),
            (json!({}), json!({"do_resize": false}), "`do_resize` is false"),
            (
                vision(json!({"position_embedding_size": 800})),
                json!({}),
                "`vision_config.position_embedding_size` is 800, must be at least 840",
            ),
        ];
        for (config, preprocessor, expected) in cases {
            let error = made(&config, preprocessor, Value::Null).unwrap_err().to_string();
            assert!(error.contains(expected), "{expected}: {error}");
        }
    }
}
