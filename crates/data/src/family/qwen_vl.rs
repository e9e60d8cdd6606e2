//! What the Qwen-VL families share: one image processor, the files that settings come from, the marks of media.

use super::fields::{CONFIG, Fields, VIDEO_PREPROCESSOR, image_fields};
use super::patches::{Depth, Patches, PixelRange, TOO_MANY_TOKENS, fit};
use super::video_settings::VideoSettings;
use super::{Clip, Family, FamilyFiles, Marks, MediaShape, Size, Sound, VideoSampling, unread};
use crate::DataError;
use crate::media::MediaKind;
use std::fmt::Debug;

/// Back ends of the image processor.
const IMAGE_PROCESSORS: [&str; 3] =
    ["Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil"];
/// Of the image processor where its file does not say.
const IMAGE_PIXELS: PixelRange = PixelRange { min: 56 * 56, max: 28 * 28 * 1280 };

/// What transformers knows of a generation of Qwen-VL models where their files do not say.
pub(super) struct Generation {
    /// Values of `model_type`.
    pub(super) families: &'static [&'static str],
    /// Class of the video processor.
    pub(super) video_processor: &'static str,
    /// Of the configuration.
    pub(super) patches: Patches,
    /// Of the image processor.
    pub(super) image_patches: Patches,
    /// Of the video processor.
    pub(super) video_patches: Patches,
    /// Of the video processor.
    pub(super) video: VideoSettings,
    /// Whether `min_pixels` and `max_pixels` count in the video processor's fields.
    pub(super) video_has_old_names: bool,
}

/// The settings of a model.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Settings {
    /// The `model_type`.
    pub(super) family: &'static str,
    /// Of images and videos alike.
    pub(super) patches: Patches,
    pub(super) image_pixels: PixelRange,
    pub(super) video: VideoSettings,
}

impl Settings {
    /// The settings in a model's files; those of `generation` where a field is missing.
    ///
    /// # Errors
    /// [`DataError::Config`] at the first field for which processor and model would disagree, or that the families'
    /// rules do not cover.
    pub(super) fn read(files: &FamilyFiles, generation: &Generation) -> Result<Self, DataError> {
        let config = Fields { file: CONFIG, object: &files.config };
        let families = generation.families;
        config.must_be("model_type", families, false)?;
        let family = families.iter().find(|family| files.config["model_type"] == **family);
        let family = family.copied().unwrap_or(families[0]);
        let (image, video) = (image_fields(&files.preprocessor), video_fields(files));
        must_be_of(&image, "image_processor_type", &IMAGE_PROCESSORS)?;
        must_be_of(&video, "video_processor_type", &[generation.video_processor])?;
        let model = Patches::of_model(&config, generation.patches)?;
        Patches::read(&video, model, generation.video_patches)?;
        Ok(Self {
            family,
            patches: Patches::read(&image, model, generation.image_patches)?,
            image_pixels: PixelRange::read(&image, IMAGE_PIXELS, true)?,
            video: VideoSettings::read(&video, generation.video, generation.video_has_old_names)?,
        })
    }

    /// The shape of an image: one segment, one run of features.
    ///
    /// # Errors
    /// [`DataError::Shape`] where `smart_resize` refuses it too, and from 2^32 tokens.
    pub(super) fn image(&self, size: Size) -> Result<MediaShape, DataError> {
        let sides = (u64::from(size.height), u64::from(size.width));
        fit(sides, Depth::PICTURE, self.patches.factor(), self.image_pixels)
            .and_then(|resized| self.patches.grid(resized, 1).ok_or_else(|| TOO_MANY_TOKENS.to_owned()))
            .map(|grid| grid.shape(vec![grid.features()], Vec::new()))
            .map_err(|rule| DataError::Shape { family: self.family, media: image_words(size), rule })
    }

    /// The error of a clip that breaks `rule`.
    pub(super) fn refused(&self, clip: &Clip, rule: String) -> DataError {
        DataError::Shape { family: self.family, media: clip_words(clip), rule }
    }
}

/// The fields of the video processor, found as transformers finds them: those nested in the processor's own file, then
/// `video_preprocessor_config.json`, then the image processor's.
pub(super) fn video_fields(files: &FamilyFiles) -> Fields<'_> {
    if let Some(object) = files.preprocessor.get("video_processor") {
        return Fields { file: VIDEO_PREPROCESSOR, object };
    }
    if files.video_preprocessor.as_object().is_some_and(|fields| !fields.is_empty()) {
        return Fields { file: VIDEO_PREPROCESSOR, object: &files.video_preprocessor };
    }
    image_fields(&files.preprocessor)
}

/// Refuses processors of a kind that is not among `known`, and such as do not resize.
pub(super) fn must_be_of(processor: &Fields, field: &str, known: &[&str]) -> Result<(), DataError> {
    processor.must_be(field, known, true)?;
    if processor.flag("do_resize")? == Some(false) {
        let rule = "sides must be resized to whole patches".to_owned();
        return Err(processor.error("do_resize", rule));
    }
    Ok(())
}

/// A clip in an error.
pub(super) fn clip_words(clip: &Clip) -> String {
    let Size { height, width } = clip.size;
    format!("a video of {} frames of {height} x {width} pixels (height x width)", clip.num_frames)
}

/// An image in an error.
fn image_words(size: Size) -> String {
    format!("an image of {} x {} pixels (height x width)", size.height, size.width)
}

/// How the Qwen-VL families write media; what stands around the placeholder comes from the chat template.
fn marks(kind: MediaKind) -> Option<Marks> {
    let (token, id_fields): (&str, &'static [&'static str]) = match kind {
        MediaKind::Image => ("<|image_pad|>", &["image_token_id"]),
        MediaKind::Video => ("<|video_pad|>", &["video_token_id"]),
        MediaKind::Audio => return None,
    };
    Some(Marks { placeholder: token.to_owned(), feature_token: token.to_owned(), id_fields, number: None })
}

/// What a generation of Qwen-VL does in its own way: which frames of a video it reads, and at which size.
pub(super) trait VideoRule: Send + Sync + Debug {
    /// What all generations read of the model's files.
    fn settings(&self) -> &Settings;

    /// The shape of a video; the rule in words that refuses it.
    fn video_shape(&self, clip: &Clip, asked: VideoSampling) -> Result<MediaShape, String>;
}

impl<R: VideoRule> Family for R {
    fn name(&self) -> &str {
        self.settings().family
    }

    fn marks(&self, kind: MediaKind) -> Option<Marks> {
        marks(kind)
    }

    fn image(&self, size: Size, _: usize) -> Result<MediaShape, DataError> {
        self.settings().image(size)
    }

    fn video(&self, clip: &Clip, sampling: VideoSampling) -> Result<MediaShape, DataError> {
        self.video_shape(clip, sampling).map_err(|rule| self.settings().refused(clip, rule))
    }

    fn audio(&self, _: &Sound) -> Result<MediaShape, DataError> {
        Err(unread(self.settings().family, "a sound"))
    }
}

#[cfg(test)]
mod tests {
    use super::super::VideoSampling;
    use super::super::video_settings::FRAMES_MAX;
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    #[test]
    fn video_settings_are_found_as_transformers_finds_them() {
        let of = |preprocessor: Value, video_preprocessor: Value| {
            let files = FamilyFiles { preprocessor, video_preprocessor, ..FamilyFiles::default() };
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
            ..FamilyFiles::default()
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
