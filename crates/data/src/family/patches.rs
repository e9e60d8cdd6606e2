//! Pictures at their own resolution, cut into patches: what the Qwen-VL families share.
//!
//! ```text
//! (frames, height, width) -> sides rounded to multiples of patch x merge, scaled where the pixels leave their range
//!                         -> grid of t x h x w patches          encoder: t segments of h x w tokens
//!                         -> merge x merge patches a feature    LLM: t x h x w / merge^2 tokens
//! ```
//!
//! The arithmetic, floats and their rounding included, is that of `smart_resize` of Hugging Face transformers 5.23.0
//! (`qwen2_vl/image_processing_qwen2_vl.py`, `qwen3_vl/video_processing_qwen3_vl.py`).

use super::fields::{CONFIG, Fields, PREPROCESSOR};
use super::{Clip, FamilyFiles, Marks, MediaShape, Piece, Size, VideoSampling};
use crate::DataError;
use crate::probe::MediaKind;
use dflop_types::EncoderSegments;
use serde_json::Value;

/// Whole numbers to here are exact as floats, and their quotients are those of Python.
pub(super) const EXACT_MAX: u64 = 1 << 53;
/// The most frames we read of one video: lists of frames stay small whatever a file claims.
pub(super) const FRAMES_MAX: u64 = 1 << 16;
/// Longer pictures than this many times their width are refused by the processor.
const ASPECT_RATIO_MAX: f64 = 200.0;
/// Name of the video processor's own file in errors.
const VIDEO_PREPROCESSOR: &str = "video_preprocessor_config.json";

/// How pictures are cut.
///
/// *Invariants*: each at least 1, at most 2^15.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Patches {
    /// Side of a patch, in pixels.
    pub(super) side: u32,
    /// Patches a feature, each way.
    pub(super) merge: u32,
    /// Frames of a video in a patch.
    pub(super) frames: u32,
}

impl Patches {
    /// The processor's, which must be those of the vision configuration `model`; `default` stands for what the
    /// processor leaves out.
    pub(super) fn read(processor: &Fields, model: Self, default: Self) -> Result<Self, DataError> {
        let of = |field: &str, default: u32, model: u32| -> Result<u32, DataError> {
            let value = processor.side(field)?.unwrap_or(default);
            if value == model {
                return Ok(value);
            }
            let missing =
                if processor.get(field).is_none() { format!(", so {value}") } else { String::new() };
            Err(processor.error(field, format!("`{CONFIG}` says {model} under `vision_config`{missing}")))
        };
        Ok(Self {
            side: of("patch_size", default.side, model.side)?,
            merge: of("merge_size", default.merge, model.merge)?,
            frames: of("temporal_patch_size", default.frames, model.frames)?,
        })
    }

    /// What the vision tower of `config.json` reads.
    pub(super) fn of_model(config: &Fields, default: Self) -> Result<Self, DataError> {
        Ok(Self {
            side: config.side("vision_config.patch_size")?.unwrap_or(default.side),
            merge: config.side("vision_config.spatial_merge_size")?.unwrap_or(default.merge),
            frames: config.side("vision_config.temporal_patch_size")?.unwrap_or(default.frames),
        })
    }

    /// Both sides of a resized picture are multiples of this, in pixels.
    pub(super) const fn factor(self) -> u64 {
        self.side as u64 * self.merge as u64
    }

    /// The grid of a picture of this size, resized (both sides multiples of [`Patches::factor`]), and of so many
    /// frames; `None` from 2^32 tokens.
    pub(super) fn grid(self, (height, width): (u64, u64), num_frames: u64) -> Option<Grid> {
        let side = u64::from(self.side);
        let frame = u32::try_from((height / side).checked_mul(width / side)?).ok()?;
        let pairs = u32::try_from(num_frames.div_ceil(u64::from(self.frames))).ok()?;
        frame.checked_mul(pairs)?;
        Some(Grid { pairs, frame_patches: frame, frame_features: frame / self.merge / self.merge })
    }
}

/// A picture or clip in patches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Grid {
    /// Groups of frames that share their patches; 1 for an image.
    pub(super) pairs: u32,
    /// Encoder tokens of each.
    pub(super) frame_patches: u32,
    /// LLM tokens of each.
    pub(super) frame_features: u32,
}

impl Grid {
    /// The shape, with `pieces` in the place of the placeholder.
    pub(super) fn shape(self, pieces: Vec<Piece>, frame_indices: Vec<u32>) -> MediaShape {
        MediaShape {
            num_tiles: self.pairs,
            segments: vec![EncoderSegments { count: self.pairs, tokens: self.frame_patches }],
            pieces,
            frame_indices,
        }
    }

    /// All features in one run.
    pub(super) fn features(self) -> Piece {
        Piece::Features(self.pairs * self.frame_features)
    }
}

/// Pixels of a resized picture, over all its frames where the family counts so.
///
/// *Invariants*: `1 <= min`, `max <= 2^53`; `min` may be above `max`, then `max` rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PixelRange {
    pub(super) min: u64,
    pub(super) max: u64,
}

impl PixelRange {
    /// `size.shortest_edge` and `size.longest_edge` of a processor, which hold pixels whatever their names say.
    ///
    /// `min_pixels` and `max_pixels`, where `old_names` count, come first, as in the processor's constructor.
    pub(super) fn read(processor: &Fields, default: Self, old_names: bool) -> Result<Self, DataError> {
        let size = processor.get("size");
        let edge = |field: &str, old: &str, default: u64| -> Result<(u64, bool), DataError> {
            if old_names && let Some(pixels) = processor.whole(old, EXACT_MAX)? {
                return Ok((pixels, true));
            }
            match size {
                None => Ok((default, false)),
                Some(_) => match processor.whole(&format!("size.{field}"), EXACT_MAX)? {
                    Some(pixels) => Ok((pixels, false)),
                    None => Err(processor.error("size", format!("must hold `{field}`, in pixels"))),
                },
            }
        };
        let (min, min_is_old) = edge("shortest_edge", "min_pixels", default.min)?;
        let (max, max_is_old) = edge("longest_edge", "max_pixels", default.max)?;
        let known = |key: &str| match key {
            "shortest_edge" | "longest_edge" => true,
            "min_pixels" => min_is_old,
            "max_pixels" => max_is_old,
            _ => false,
        };
        if let Some(other) = size.and_then(Value::as_object).and_then(|s| s.keys().find(|key| !known(key))) {
            return Err(processor.error(
                &format!("size.{other}"),
                "`size` must hold `shortest_edge` and `longest_edge` alone".to_owned(),
            ));
        }
        Ok(Self { min, max })
    }
}

/// Frames that count towards a [`PixelRange`]: 1 and 1 where only the picture does.
#[derive(Debug, Clone, Copy)]
pub(super) struct Depth {
    pub(super) frames: u64,
    /// Rounded to the frames of a patch.
    pub(super) rounded: u64,
}

impl Depth {
    pub(super) const PICTURE: Self = Self { frames: 1, rounded: 1 };
}

/// (height, width) to which a picture is resized: `smart_resize`.
///
/// # Errors
/// The rule that is broken.
pub(super) fn fit(
    (height, width): (u64, u64),
    depth: Depth,
    factor: u64,
    pixels: PixelRange,
) -> Result<(u64, u64), String> {
    if height == 0 || width == 0 {
        return Err("both sides must be at least 1".to_owned());
    }
    let ratio = height.max(width) as f64 / height.min(width) as f64;
    if ratio > ASPECT_RATIO_MAX {
        return Err(format!(
            "its longer side is {ratio:.1} times the shorter one, must be at most 200 times"
        ));
    }
    let volume = height.checked_mul(width).and_then(|area| area.checked_mul(depth.frames));
    let volume = volume
        .filter(|&volume| volume <= EXACT_MAX)
        .ok_or_else(|| format!("its pixels over all frames must be at most {EXACT_MAX}"))?;
    // Python rounds halves to even.
    let round = |side: u64| (side as f64 / factor as f64).round_ties_even() as u64 * factor;
    let (rounded_height, rounded_width) = (round(height), round(width));
    let rounded = u128::from(depth.rounded) * u128::from(rounded_height) * u128::from(rounded_width);
    if rounded > u128::from(pixels.max) {
        let beta = (volume as f64 / pixels.max as f64).sqrt();
        let shrink = |side: u64| factor.max((side as f64 / beta / factor as f64).floor() as u64 * factor);
        Ok((shrink(height), shrink(width)))
    } else if rounded < u128::from(pixels.min) {
        let beta = (pixels.min as f64 / volume as f64).sqrt();
        let grow = |side: u64| (side as f64 * beta / factor as f64).ceil() as u64 * factor;
        Ok((grow(height), grow(width)))
    } else {
        Ok((rounded_height, rounded_width))
    }
}

/// What is common to the processors' video settings.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct VideoSettings {
    pub(super) pixels: PixelRange,
    /// Whether frames are chosen; otherwise all are read.
    pub(super) samples_frames: bool,
    pub(super) fps: Option<f64>,
    pub(super) num_frames: Option<u64>,
    pub(super) min_frames: u64,
    pub(super) max_frames: u64,
    /// Tokens that `cap_pixels_per_frame` allows, where it is set.
    pub(super) token_cap: Option<u64>,
}

impl VideoSettings {
    /// The settings in the processor's fields; `default` for those it leaves out, its `token_cap` being
    /// `max_video_tokens`.
    pub(super) fn read(processor: &Fields, default: Self, old_names: bool) -> Result<Self, DataError> {
        let fps = processor.get("fps").map(|value| {
            let fps = value.as_f64().filter(|fps| *fps > 0.0 && fps.is_finite());
            fps.ok_or_else(|| processor.error("fps", "must be a number above 0".to_owned()))
        });
        let caps = processor.flag("cap_pixels_per_frame")?.unwrap_or(false);
        let cap = processor.whole("max_video_tokens", 1 << 20)?.or(default.token_cap);
        let settings = Self {
            pixels: PixelRange::read(processor, default.pixels, old_names)?,
            samples_frames: processor.flag("do_sample_frames")?.unwrap_or(default.samples_frames),
            fps: fps.transpose()?.or(default.fps),
            num_frames: processor.whole("num_frames", FRAMES_MAX)?,
            min_frames: processor.whole("min_frames", FRAMES_MAX)?.unwrap_or(default.min_frames),
            max_frames: processor.whole("max_frames", FRAMES_MAX)?.unwrap_or(default.max_frames),
            token_cap: cap.filter(|_| caps),
        };
        if let (true, Some(fps), Some(_)) = (settings.samples_frames, settings.fps, settings.num_frames) {
            let rule = format!("`fps` is {fps}, the processor takes one of the two");
            return Err(processor.error("num_frames", rule));
        }
        Ok(settings)
    }
}

/// The fields of the image processor.
pub(super) fn image_fields(files: &FamilyFiles) -> Fields<'_> {
    let object = files.preprocessor.get("image_processor").unwrap_or(&files.preprocessor);
    Fields { file: PREPROCESSOR, object }
}

/// The fields of the video processor, found as transformers finds them: those nested in the processor's own file, then
/// `video_preprocessor_config.json`, then the image processor's.
pub(super) fn video_fields(files: &FamilyFiles) -> Fields<'_> {
    if let Some(object) = files.preprocessor.get("video_processor") {
        return Fields { file: PREPROCESSOR, object };
    }
    if files.video_preprocessor.as_object().is_some_and(|fields| !fields.is_empty()) {
        return Fields { file: VIDEO_PREPROCESSOR, object: &files.video_preprocessor };
    }
    image_fields(files)
}

/// Back ends of the image processor.
pub(super) const IMAGE_PROCESSORS: [&str; 3] =
    ["Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil"];

/// Refuses processors of a kind that is not among `known`, and such as do not resize.
pub(super) fn must_be_of(processor: &Fields, field: &str, known: &[&str]) -> Result<(), DataError> {
    processor.must_be(field, known, true)?;
    if processor.flag("do_resize")? == Some(false) {
        let rule = "sides must be resized to whole patches".to_owned();
        return Err(processor.error("do_resize", rule));
    }
    Ok(())
}

/// Frames a second of the clip: as the file tells, or frames over duration.
///
/// # Errors
/// Where it tells neither.
pub(super) fn frame_rate(clip: &Clip) -> Result<f64, String> {
    let mean = clip.duration_s.filter(|seconds| *seconds > 0.0).map(|s| clip.num_frames as f64 / s);
    let fps = clip.fps.filter(|fps| *fps > 0.0).or(mean).filter(|fps| fps.is_finite() && *fps > 0.0);
    fps.ok_or_else(|| {
        "the file does not tell its frames a second, which the choice of frames needs".to_owned()
    })
}

/// Every frame of a clip.
///
/// # Errors
/// The rule that a clip breaks that is too long to be read as a whole.
pub(super) fn all_frames(clip: &Clip) -> Result<Vec<u32>, String> {
    if clip.num_frames > FRAMES_MAX {
        return Err(format!(
            "all its frames would be read, must be at most {FRAMES_MAX}: ask for frames a second or at most so many"
        ));
    }
    Ok((0..clip.num_frames as u32).collect())
}

/// Refuses a clip without frames, one of more than fit in 32 bits, and a rate that cannot be asked.
pub(super) fn check_clip(clip: &Clip, asked: VideoSampling) -> Result<(), String> {
    match (clip.num_frames, asked.fps) {
        (0, _) => Err("at least 1 frame is needed".to_owned()),
        (n, _) if u32::try_from(n).is_err() => Err("its frames must be fewer than 2^32".to_owned()),
        (_, Some(fps)) if !(fps.is_finite() && fps > 0.0) => {
            Err(format!("{fps} frames a second are asked, must be above 0"))
        }
        _ => Ok(()),
    }
}

/// A clip in an error.
pub(super) fn clip_words(clip: &Clip) -> String {
    let Size { height, width } = clip.size;
    format!("a video of {} frames of {height} x {width} pixels (height x width)", clip.num_frames)
}

/// An image in an error.
pub(super) fn image_words(size: Size) -> String {
    format!("an image of {} x {} pixels (height x width)", size.height, size.width)
}

/// Why a grid is refused.
pub(super) const TOO_MANY_TOKENS: &str = "its encoder tokens must be fewer than 2^32";

/// How the Qwen-VL families write media; what stands around the placeholder comes from the chat template.
pub(super) fn marks(kind: MediaKind) -> Option<Marks> {
    let (token, id_fields): (&str, &'static [&'static str]) = match kind {
        MediaKind::Image => ("<|image_pad|>", &["image_token_id"]),
        MediaKind::Video => ("<|video_pad|>", &["video_token_id"]),
        MediaKind::Audio => return None,
    };
    Some(Marks { placeholder: token.to_owned(), feature_token: token.to_owned(), id_fields })
}

/// The shape of an image: one segment, one run of features.
///
/// # Errors
/// [`DataError::Shape`] where `smart_resize` refuses it too, and from 2^32 tokens.
pub(super) fn image(
    family: &'static str,
    patches: Patches,
    pixels: PixelRange,
    size: Size,
) -> Result<MediaShape, DataError> {
    let sides = (u64::from(size.height), u64::from(size.width));
    fit(sides, Depth::PICTURE, patches.factor(), pixels)
        .and_then(|resized| patches.grid(resized, 1).ok_or_else(|| TOO_MANY_TOKENS.to_owned()))
        .map(|grid| grid.shape(vec![grid.features()], Vec::new()))
        .map_err(|rule| DataError::Shape { family, media: image_words(size), rule })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    const PIXELS: PixelRange = PixelRange { min: 3_136, max: 1_003_520 };

    /// 42 / 28 = 1.5 and 70 / 28 = 2.5 both round to 2, as Python rounds.
    #[test]
    fn halves_round_to_even() {
        assert_eq!(fit((42, 70), Depth::PICTURE, 28, PIXELS), Ok((56, 56)));
    }

    /// 1,000 x 2,000 is too much by sqrt(2e6 / 1,003,520) = 1.4117: 708.3 x 1,416.7 are 25 x 50 factors. 10 x 30 is
    /// too little by sqrt(3,136 / 300) = 3.233: 32.3 x 97.0 fill 2 x 4.
    #[test]
    fn pixels_are_kept_in_their_range_by_hand() {
        assert_eq!(fit((1_000, 2_000), Depth::PICTURE, 28, PIXELS), Ok((700, 1_400)));
        assert_eq!(fit((10, 30), Depth::PICTURE, 28, PIXELS), Ok((56, 112)));
    }

    #[test]
    fn what_smart_resize_refuses_is_refused() {
        let refused = |height, width| fit((height, width), Depth::PICTURE, 28, PIXELS).unwrap_err();
        assert_eq!(refused(0, 7), "both sides must be at least 1");
        assert_eq!(
            refused(1_001, 5),
            "its longer side is 200.2 times the shorter one, must be at most 200 times"
        );
        assert!(fit((1_000, 5), Depth::PICTURE, 28, PIXELS).is_ok());
        assert!(
            refused(u64::from(u32::MAX), u64::from(u32::MAX)).contains("must be at most 9007199254740992")
        );
    }

    #[test]
    fn settings_of_pixels_are_those_of_the_constructor() {
        let read = |object: Value, old_names| {
            let fields = Fields { file: PREPROCESSOR, object: &object };
            PixelRange::read(&fields, PIXELS, old_names).map_err(|error| error.to_string())
        };
        let size = json!({"shortest_edge": 5, "longest_edge": 9});
        assert_eq!(read(json!({}), true), Ok(PIXELS));
        assert_eq!(read(json!({"size": size}), true), Ok(PixelRange { min: 5, max: 9 }));
        assert_eq!(read(json!({"size": size, "max_pixels": 8}), true), Ok(PixelRange { min: 5, max: 8 }));
        assert_eq!(read(json!({"size": size, "max_pixels": 8}), false), Ok(PixelRange { min: 5, max: 9 }));
        let old = json!({"size": {"min_pixels": 1, "max_pixels": 2}, "min_pixels": 3, "max_pixels": 4});
        assert_eq!(read(old, true), Ok(PixelRange { min: 3, max: 4 }));
        let mut errors = vec![read(json!({"size": {"longest_edge": 9}}), true).unwrap_err()];
        errors.push(read(json!({"size": {"min_pixels": 1, "max_pixels": 2}}), true).unwrap_err());
        errors.push(
            read(json!({"size": {"shortest_edge": 5, "longest_edge": 9, "height": 3}}), true).unwrap_err(),
        );
        errors.push(read(json!({"size": 448}), true).unwrap_err());
        errors.push(read(json!({"min_pixels": 0}), true).unwrap_err());
        errors.push(read(json!({"max_pixels": 1e6}), true).unwrap_err());
        insta::assert_snapshot!(errors.join("\n"), @r#"
        `preprocessor_config.json`: `size` is {"longest_edge":9}, must hold `shortest_edge`, in pixels
        `preprocessor_config.json`: `size` is {"min_pixels":1,"max_pixels":2}, must hold `shortest_edge`, in pixels
        `preprocessor_config.json`: `size.height` is 3, `size` must hold `shortest_edge` and `longest_edge` alone
        `preprocessor_config.json`: `size` is 448, must hold `shortest_edge`, in pixels
        `preprocessor_config.json`: `min_pixels` is 0, must be a whole number from 1 to 9007199254740992
        `preprocessor_config.json`: `max_pixels` is 1000000.0, must be a whole number from 1 to 9007199254740992
        "#);
    }

    #[test]
    fn video_settings_are_found_as_transformers_finds_them() {
        let of = |preprocessor: Value, video_preprocessor: Value| {
            let files = FamilyFiles { config: json!({}), preprocessor, video_preprocessor };
            video_fields(&files).get("fps").cloned()
        };
        assert_eq!(of(json!({"fps": 1}), json!({})), Some(json!(1)));
        assert_eq!(of(json!({"fps": 1}), json!({"fps": 2})), Some(json!(2)));
        assert_eq!(of(json!({"video_processor": {"fps": 3}}), json!({"fps": 2})), Some(json!(3)));
        assert_eq!(of(json!({"image_processor": {"fps": 4}}), Value::Null), Some(json!(4)));
    }

    fn files(model_type: &str, video_preprocessor: Value) -> FamilyFiles {
        let patch_size = if model_type.starts_with("qwen3") { 16 } else { 14 };
        FamilyFiles {
            config: json!({"model_type": model_type}),
            preprocessor: json!({"patch_size": patch_size}),
            video_preprocessor,
        }
    }

    #[test]
    fn settings_that_model_and_processor_read_differently_are_refused() {
        let error = |model_type: &str, video: Value| {
            super::super::open(&files(model_type, video)).unwrap_err().to_string()
        };
        let errors = [
            error("qwen2_vl", json!({"patch_size": 16})),
            error("qwen2_vl", json!({"video_processor_type": "Qwen3VLVideoProcessor"})),
            error("qwen2_5_vl", json!({"do_resize": false})),
            error("qwen2_5_vl", json!({"do_sample_frames": true, "fps": 2, "num_frames": 8})),
            error("qwen2_5_vl", json!({"fps": -1})),
            error("qwen3_vl", json!({"max_frames": 1_000_000})),
            error("qwen3_vl", json!({"merge_size": 3})),
            error("qwen3_vl_moe", json!({"do_sample_frames": 1})),
        ];
        insta::assert_snapshot!(errors.join("\n"), @r#"
        `video_preprocessor_config.json`: `patch_size` is 16, `config.json` says 14 under `vision_config`
        `video_preprocessor_config.json`: `video_processor_type` is "Qwen3VLVideoProcessor", must be "Qwen2VLVideoProcessor"
        `video_preprocessor_config.json`: `do_resize` is false, sides must be resized to whole patches
        `video_preprocessor_config.json`: `num_frames` is 8, `fps` is 2, the processor takes one of the two
        `video_preprocessor_config.json`: `fps` is -1, must be a number above 0
        `video_preprocessor_config.json`: `max_frames` is 1000000, must be a whole number from 1 to 65536
        `video_preprocessor_config.json`: `merge_size` is 3, `config.json` says 2 under `vision_config`
        `video_preprocessor_config.json`: `do_sample_frames` is 1, must be true or false
        "#);
    }

    proptest! {
        /// Whatever a file claims: an answer or an error, and no list longer than what we read at most.
        #[test]
        fn no_clip_panics_or_floods(
            model_type in prop::sample::select(vec!["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]),
            height in prop::sample::select(vec![0, 1, 27, 480, 65_535, u32::MAX]),
            width in prop::sample::select(vec![0, 1, 33, 640, 65_536, u32::MAX]),
            num_frames in prop::sample::select(vec![0, 1, 2, 3, 500, FRAMES_MAX, FRAMES_MAX + 1, 1 << 32, u64::MAX]),
            fps in prop::option::of(prop::sample::select(vec![f64::NAN, -1.0, 0.0, 1e-300, 24.0, f64::INFINITY])),
            duration_s in prop::option::of(prop::sample::select(vec![0.0, f64::NAN, 1e-300, 20.0])),
            max_frames in prop::option::of(prop::sample::select(vec![0, 1, 2, 7, 64, u32::MAX])),
            asked_fps in prop::option::of(prop::sample::select(vec![f64::NAN, -1.0, 0.0, 2.0, 1e300])),
            video in prop::sample::select(vec![
                json!({}),
                json!({"do_sample_frames": true}),
                json!({"do_sample_frames": false, "cap_pixels_per_frame": true}),
                json!({"cap_pixels_per_frame": true, "max_pixels": 1_u64 << 53, "max_video_tokens": 1 << 20}),
                json!({"size": {"shortest_edge": 1_u64 << 53, "longest_edge": 1_u64 << 53}}),
                json!({"patch_size": null, "temporal_patch_size": 2}),
            ]),
        ) {
            let rule = super::super::open(&files(model_type, video)).unwrap().unwrap();
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
