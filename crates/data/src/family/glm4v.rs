//! The shape rule of GLM-4.1V, GLM-4.5V, GLM-4.6V and GLM-OCR: pictures in patches of 14, videos with a time after each frame pair.
//!
//! An image is as in Qwen2-VL, but sides shorter than a feature are scaled up first, and its pixels count twice, as those of
//! a frame pair. The pixels of a video count over all its frames. Each frame pair is one encoder segment, and an image to the
//! text:
//!
//! ```text
//! Glm4vProcessor     <|begin_of_image|> features <|end_of_image|>T             T whole seconds, rounded down
//! Glm46VProcessor    <|begin_of_image|> features <|end_of_image|>T seconds     T with one digit after the point
//! ```
//!
//! once a pair, T the time of its first frame. That takes the place of `<|video|>` alone; `<|begin_of_video|>` and
//! `<|end_of_video|>` around it come from the chat template. Features of images and of videos have the same token,
//! `<|image|>`. Which frames are read: [`super::glm4v_video`]. The arithmetic is that of Hugging Face transformers 5.23.0:
//! `Glm4vImageProcessor`, `Glm4vVideoProcessor`, `Glm4vProcessor`, and those of `Glm46V`.
//!
//! The processors' files name their classes (`video_processor_type`, `processor_class`), and those decide, as a GLM-4.6V may
//! be a model of type `glm4v` or `glm4v_moe`. Where they name none, the class is inferred from `image_processor_type`, then from the
//! `model_type`, as transformers has it. `processor_class` of `tokenizer_config.json`, which transformers reads last, is not
//! looked at.
//!
//! If a file gives no rate, transformers assumes 24 frames a second; we take frames over duration, and refuse a clip that gives
//! neither.

use super::fields::{CONFIG, Fields, PREPROCESSOR, PROCESSOR, VIDEO_PREPROCESSOR, image_fields};
use super::glm4v_video::{FrameRule, Generation};
use super::patches::{Depth, Grid, Patches, PixelRange, TOO_MANY_TOKENS, enlarged, fit};
use super::qwen_vl::{clip_words, must_be_of, video_fields};
use super::video_settings::{check_clip, frame_rate};
use super::{
    Clip, Family, FamilyFiles, Marks, MediaShape, Piece, Size, Sound, VideoSampling, image_words, unread,
};
use crate::DataError;
use crate::media::MediaKind;
use serde_json::Value;

/// Values of `model_type`, with the processors that a model has whose files name none.
const FAMILIES: [(&str, Generation); 4] = [
    ("glm4v", Generation::First),
    ("glm4v_moe", Generation::First),
    ("glm46v", Generation::Second),
    ("glm_ocr", Generation::Second),
];
/// Configuration, image processor and video processor alike.
const PATCHES: Patches = Patches { side: 14, merge: 2, frames: 2 };
/// Of the image processor where its file does not say; over the two frames that an image counts as.
const IMAGE_PIXELS: PixelRange = PixelRange { min: 112 * 112, max: 28 * 28 * 15_000 };
/// Of the video processor where its file does not say, over all frames.
const VIDEO_PIXELS: PixelRange = PixelRange { min: 112 * 112, max: 28 * 28 * 2 * 30_000 };
/// Both generations read images alike, so either's processor will do.
const IMAGE_PROCESSORS: [&str; 6] = [
    "Glm4vImageProcessor",
    "Glm4vImageProcessorFast",
    "Glm4vImageProcessorPil",
    "Glm46VImageProcessor",
    "Glm46VImageProcessorFast",
    "Glm46VImageProcessorPil",
];
/// What stands around the features of an image, or of a frame pair.
const BEGIN: &str = "<|begin_of_image|>";
const END: &str = "<|end_of_image|>";

/// The shape rule of a GLM-4.1V, GLM-4.5V, GLM-4.6V or GLM-OCR model.
#[derive(Debug, Clone, PartialEq)]
pub struct Glm4v {
    /// The `model_type`.
    family: &'static str,
    /// Who writes the times.
    words: Generation,
    /// Of images and videos alike.
    patches: Patches,
    image_pixels: PixelRange,
    video_pixels: PixelRange,
    frames: FrameRule,
}

impl Glm4v {
    /// The rule for a model's files.
    ///
    /// Fields that are missing have the values transformers gives them; without `video_preprocessor_config.json` the
    /// image processor's settings hold for videos too, as transformers has it.
    ///
    /// # Errors
    /// [`DataError::Config`] at the first field for which processor and model would disagree, or that this rule does not
    /// cover.
    ///
    /// # Examples
    /// ```
    /// use dflop_data::family::{Family as _, FamilyFiles, Glm4v, Size};
    /// let config = serde_json::json!({"model_type": "glm4v"});
    /// let rule = Glm4v::from_files(&FamilyFiles { config, ..FamilyFiles::default() })?;
    /// let shape = rule.image(Size { height: 480, width: 640 }, 1)?;
    /// // 476 x 644 pixels are 34 x 46 patches, four a feature.
    /// assert_eq!((shape.encoder_tokens(), shape.feature_tokens()), (34 * 46, 391));
    /// # Ok::<(), dflop_data::DataError>(())
    /// ```
    pub fn from_files(files: &FamilyFiles) -> Result<Self, DataError> {
        let config = Fields { file: CONFIG, object: &files.config };
        config.must_be("model_type", &FAMILIES.map(|(name, _)| name), false)?;
        let is_named = |(name, _): &&(&str, _)| files.config["model_type"] == **name;
        let (family, of_family) = *FAMILIES.iter().find(is_named).unwrap_or(&FAMILIES[0]);
        let (image, video) = (image_fields(&files.preprocessor), video_fields(files));
        must_be_of(&image, "image_processor_type", &IMAGE_PROCESSORS)?;
        must_be_of(&video, "video_processor_type", &["Glm4vVideoProcessor", "Glm46VVideoProcessor"])?;
        // The image processor's file may stand for the video processor's.
        let of_image = match video.get("image_processor_type").and_then(Value::as_str) {
            Some("Glm4vImageProcessor") => Generation::First,
            Some("Glm46VImageProcessor") => Generation::Second,
            _ => of_family,
        };
        let of_videos = Generation::named(&video, "video_processor_type", "VideoProcessor", of_image)?;
        let whole = |file, object| Fields { file, object };
        let of_file = whole(VIDEO_PREPROCESSOR, &files.video_preprocessor);
        let absent = Generation::named(&of_file, "processor_class", "Processor", of_family)?;
        let is_newer = files.processor.get("processor_class").is_some();
        let of_file = whole(if is_newer { PROCESSOR } else { PREPROCESSOR }, &files.preprocessor);
        let words = Generation::named(&of_file, "processor_class", "Processor", absent)?;
        let model = Patches::of_model(&config, PATCHES)?;
        if model.frames != PATCHES.frames {
            let rule = "must be 2: the processor writes the time of every other frame".to_owned();
            return Err(config.error("vision_config.temporal_patch_size", rule));
        }
        Patches::read(&video, model, PATCHES)?;
        Ok(Self {
            family,
            words,
            patches: Patches::read(&image, model, PATCHES)?,
            image_pixels: PixelRange::read(&image, IMAGE_PIXELS, false)?,
            video_pixels: PixelRange::read(&video, VIDEO_PIXELS, false)?,
            frames: FrameRule::read(&video, of_videos)?,
        })
    }

    /// The grid of a picture, or of a clip of so many frames.
    fn grid(&self, size: Size, depth: Depth, pixels: PixelRange, num_frames: u64) -> Result<Grid, String> {
        let factor = self.patches.factor();
        let sides = enlarged((u64::from(size.height), u64::from(size.width)), factor)?;
        let resized = fit(sides, depth, factor, pixels)?;
        self.patches.grid(resized, num_frames).ok_or_else(|| TOO_MANY_TOKENS.to_owned())
    }

    fn image_shape(&self, size: Size) -> Result<MediaShape, String> {
        let pair = u64::from(self.patches.frames);
        let grid = self.grid(size, Depth { frames: pair, rounded: pair }, self.image_pixels, 1)?;
        Ok(grid.shape(vec![grid.features()], Vec::new()))
    }

    fn video_shape(&self, clip: &Clip, asked: VideoSampling) -> Result<MediaShape, String> {
        check_clip(clip, asked)?;
        let source_fps = frame_rate(clip)?;
        let frame_indices = self.frames.choose(clip, source_fps, asked)?;
        let (frames, pair) = (frame_indices.len() as u64, u64::from(self.patches.frames));
        if frames < pair {
            return Err(format!("{frames} frames of it are read, must be at least {pair}"));
        }
        let rounded = (frames as f64 / pair as f64).round_ties_even() as u64 * pair;
        let grid = self.grid(clip.size, Depth { frames, rounded }, self.video_pixels, frames)?;
        let mut pieces = Vec::with_capacity(2 * grid.pairs as usize + 1);
        let mut before = String::new();
        for group in frame_indices.chunks(self.patches.frames as usize) {
            pieces.push(Piece::Text(format!("{before}{BEGIN}")));
            pieces.push(Piece::Features(grid.frame_features));
            before = format!("{END}{}", self.words.stamp(f64::from(group[0]) / source_fps));
        }
        pieces.push(Piece::Text(before));
        Ok(grid.shape(pieces, frame_indices))
    }

    fn refused(&self, media: String, rule: String) -> DataError {
        DataError::Shape { family: self.family, media, rule }
    }
}

impl Family for Glm4v {
    fn name(&self) -> &str {
        self.family
    }

    fn marks(&self, kind: MediaKind) -> Option<Marks> {
        let placeholder = match kind {
            MediaKind::Image => "<|image|>",
            MediaKind::Video => "<|video|>",
            MediaKind::Audio => return None,
        };
        Some(Marks {
            placeholder: placeholder.to_owned(),
            feature_token: "<|image|>".to_owned(),
            id_fields: &["image_token_id"],
            number: None,
        })
    }

    fn special_texts(&self) -> Vec<String> {
        [BEGIN, END].map(str::to_owned).to_vec()
    }

    fn image(&self, size: Size, _num_images: usize) -> Result<MediaShape, DataError> {
        self.image_shape(size).map_err(|rule| self.refused(image_words(size.height, size.width), rule))
    }

    fn video(&self, clip: &Clip, sampling: VideoSampling) -> Result<MediaShape, DataError> {
        self.video_shape(clip, sampling).map_err(|rule| self.refused(clip_words(clip), rule))
    }

    fn audio(&self, _: &Sound) -> Result<MediaShape, DataError> {
        Err(unread(self.family, "a sound"))
    }
}

#[cfg(test)]
mod tests {
    use super::super::video_settings::FRAMES_MAX;
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn rule(model_type: &str, video_preprocessor: Value) -> Glm4v {
        let config = json!({"model_type": model_type});
        Glm4v::from_files(&FamilyFiles {
            config,
            preprocessor: json!({}),
            video_preprocessor,
            ..FamilyFiles::default()
        })
        .unwrap()
    }

    fn text(text: &str) -> Piece {
        Piece::Text(text.to_owned())
    }

    /// Three seconds at two frames a second are frames 0, 15, ..., 75; 84 x 140 pixels are 6 x 10 patches.
    #[test]
    fn a_clip_by_hand() {
        let size = Size { height: 84, width: 140 };
        let clip = Clip { size, num_frames: 90, fps: Some(30.0), duration_s: Some(3.0) };
        let shape = rule("glm4v", json!({})).video(&clip, VideoSampling::default()).unwrap();
        assert_eq!(shape.frame_indices, [0, 15, 30, 45, 60, 75]);
        let (begin, end) = ("<|begin_of_image|>", "<|end_of_image|>");
        assert_eq!(
            shape.pieces,
            [
                text(begin),
                Piece::Features(15),
                text(&format!("{end}0{begin}")),
                Piece::Features(15),
                text(&format!("{end}1{begin}")),
                Piece::Features(15),
                text(&format!("{end}2")),
            ]
        );
        assert_eq!((shape.num_tiles, shape.encoder_tokens()), (3, 3 * 60));
        // Six a second are read of it, and the last words have a digit after the point.
        let shape = rule("glm46v", json!({})).video(&clip, VideoSampling::default()).unwrap();
        assert_eq!(shape.frame_indices.len(), 18);
        assert_eq!(shape.frame_indices[..4], [0, 5, 10, 15]);
        assert_eq!(shape.pieces.last(), Some(&text("<|end_of_image|>2.7 seconds")));
    }

    /// GLM-4.6V-Flash is a `glm4v` with the newer processors. What names no class goes by the image processor, then by the
    /// model.
    #[test]
    fn the_processors_files_decide_how_videos_are_read() {
        let read = |model_type: &str, preprocessor: Value, video_preprocessor: Value| {
            let config = json!({"model_type": model_type});
            let rule = Glm4v::from_files(&FamilyFiles {
                config,
                preprocessor,
                video_preprocessor,
                ..FamilyFiles::default()
            })
            .unwrap();
            let size = Size { height: 84, width: 140 };
            let clip = Clip { size, num_frames: 90, fps: Some(30.0), duration_s: Some(3.0) };
            let shape = rule.video(&clip, VideoSampling::default()).unwrap();
            let Some(Piece::Text(last)) = shape.pieces.last() else { panic!() };
            (shape.frame_indices.len(), last.ends_with("seconds"))
        };
        let (image, class) = ("image_processor_type", "processor_class");
        let newer = json!({image: "Glm46VImageProcessor", class: "Glm46VProcessor"});
        let video = json!({"video_processor_type": "Glm46VVideoProcessor", class: "Glm46VProcessor"});
        assert_eq!(read("glm4v", newer.clone(), video.clone()), (18, true));
        assert_eq!(read("glm4v", newer, json!({})), (18, true));
        assert_eq!(read("glm4v", json!({}), video), (18, true));
        assert_eq!(read("glm46v", json!({class: "Glm4vProcessor"}), json!({"fps": 2})), (18, false));
        assert_eq!(read("glm46v", json!({image: "Glm4vImageProcessor"}), json!({})), (6, true));
        assert_eq!(read("glm46v", json!({image: "Glm4vImageProcessorFast"}), json!({})), (18, true));
    }

    /// A picture counts twice: 1,000 x 1,000 are 36 x 36 factors, so 2 x 1,008^2 pixels, more than the million allowed.
    #[test]
    fn the_pixels_of_an_image_count_as_those_of_a_pair() {
        let files = FamilyFiles {
            config: json!({"model_type": "glm4v"}),
            preprocessor: json!({"size": {"shortest_edge": 12_544, "longest_edge": 1_000_000}}),
            video_preprocessor: json!({}),
            ..FamilyFiles::default()
        };
        let shape =
            Glm4v::from_files(&files).unwrap().image(Size { height: 1_000, width: 1_000 }, 1).unwrap();
        // 1,000 / sqrt(2) = 707.1 pixels: 25 factors.
        assert_eq!(shape.patches, Some((50, 50)));
        assert_eq!(shape.feature_tokens(), 625);
    }

    #[test]
    fn settings_that_model_and_processor_read_differently_are_refused() {
        let error = |model_type: &str, vision: Value, video: Value| {
            let config = json!({"model_type": model_type, "vision_config": vision});
            let files = FamilyFiles {
                config,
                preprocessor: json!({}),
                video_preprocessor: video,
                ..FamilyFiles::default()
            };
            super::super::open(&files).unwrap_err().to_string()
        };
        let none = || json!({});
        let errors = [
            error("glm4v", none(), json!({"patch_size": 16})),
            error("glm4v", json!({"temporal_patch_size": 4}), none()),
            error("glm4v", none(), json!({"video_processor_type": "Qwen3VLVideoProcessor"})),
            error("glm46v", none(), json!({"processor_class": "Qwen3VLProcessor"})),
            error("glm46v", none(), json!({"do_resize": false})),
            error("glm4v", none(), json!({"fps": -1})),
            error("glm4v", none(), json!({"max_duration": 0})),
            error("glm4v", none(), json!({"size": {"longest_edge": 5}})),
        ];
        insta::assert_snapshot!(errors.join("\n"), @r#"
        `video_preprocessor_config.json`: `patch_size` is 16, `config.json` says 14 under `vision_config`
        `config.json`: `vision_config.temporal_patch_size` is 4, must be 2: the processor writes the time of every other frame
        `video_preprocessor_config.json`: `video_processor_type` is "Qwen3VLVideoProcessor", must be "Glm4vVideoProcessor" or "Glm46VVideoProcessor"
        `video_preprocessor_config.json`: `processor_class` is "Qwen3VLProcessor", must be "Glm4vProcessor" or "Glm46VProcessor"
        `video_preprocessor_config.json`: `do_resize` is false, sides must be resized to whole patches
        `video_preprocessor_config.json`: `fps` is -1, must be a number above 0
        `video_preprocessor_config.json`: `max_duration` is 0, must be a whole number from 1 to 4294967296
        `video_preprocessor_config.json`: `size` is {"longest_edge":5}, must hold `shortest_edge`, in pixels
        "#);
    }

    proptest! {
        /// Whatever a file claims: an answer or an error, and no list longer than what we read at most.
        #[test]
        fn no_clip_panics_or_floods(
            model_type in prop::sample::select(vec!["glm4v", "glm46v", "glm_ocr"]),
            height in prop::sample::select(vec![0, 1, 27, 480, 65_535, u32::MAX]),
            width in prop::sample::select(vec![0, 1, 33, 640, 65_536, u32::MAX]),
            num_frames in prop::sample::select(vec![0, 1, 2, 3, 500, FRAMES_MAX, FRAMES_MAX + 1, 1 << 32, u64::MAX]),
            fps in prop::option::of(prop::sample::select(vec![f64::NAN, -1.0, 0.0, 1e-310, 24.0, 1e300, f64::INFINITY])),
            duration_s in prop::option::of(prop::sample::select(vec![0.0, f64::NAN, 1e-300, 20.0, 299.9, 1e300])),
            max_frames in prop::option::of(prop::sample::select(vec![0, 1, 2, 7, 64, u32::MAX])),
            asked_fps in prop::option::of(prop::sample::select(vec![f64::NAN, -1.0, 0.0, 2.0, 1e300])),
            video in prop::sample::select(vec![
                json!({}),
                json!({"do_sample_frames": false}),
                json!({"max_duration": 1_u64 << 32, "fps": 1e300}),
                json!({"size": {"shortest_edge": 1_u64 << 53, "longest_edge": 1_u64 << 53}}),
            ]),
        ) {
            let rule = rule(model_type, video);
            let size = Size { height, width };
            let _ = rule.image(size, 1);
            let clip = Clip { size, num_frames, fps, duration_s };
            if let Ok(shape) = rule.video(&clip, VideoSampling { max_frames, fps: asked_fps }) {
                prop_assert!(shape.frame_indices.len() as u64 <= FRAMES_MAX);
                prop_assert!(!shape.frame_indices.is_empty() && shape.feature_tokens() > 0);
                prop_assert!(shape.frame_indices.iter().all(|&index| u64::from(index) < num_frames));
                prop_assert!(shape.frame_indices.is_sorted());
                prop_assert!(shape.frame_indices.len() as u64 <= u64::from(max_frames.unwrap_or(u32::MAX)));
            }
        }
    }
}
