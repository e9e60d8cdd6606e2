//! The shape rule of `PaddleOCR-VL`: pages at their own resolution, in patches of 14.
//!
//! ```text
//! (height, width) -> a side shorter than a feature becomes one, and the other grows with it
//!                 -> sides rounded to multiples of patch x merge, scaled where the pixels leave their range
//! encoder: one segment of (height / patch) x (width / patch) tokens
//! LLM: merge x merge patches a feature
//! ```
//!
//! The arithmetic is that of `PaddleOCRVLImageProcessor` of Hugging Face transformers 5.23.0. Its first step rounds the
//! longer side to the nearest pixel, unlike GLM's. The model reads single pictures; its class has no videos.

use super::fields::{CONFIG, Fields, image_fields};
use super::patches::{Depth, Patches, PixelRange, TOO_MANY_TOKENS, fit};
use super::qwen_vl::must_be_of;
use super::{
    Clip, Family, FamilyFiles, Marks, MediaShape, Size, Sound, VideoSampling, image_words, refused, unread,
};
use crate::DataError;
use crate::media::MediaKind;

const FAMILY: &str = "paddleocr_vl";
const PLACEHOLDER: &str = "<|IMAGE_PLACEHOLDER|>";
/// Configuration and image processor alike.
const PATCHES: Patches = Patches { side: 14, merge: 2, frames: 1 };
/// Of the image processor where its file does not say.
const PIXELS: PixelRange = PixelRange { min: 384 * 384, max: 1_536 * 1_536 };
/// Back ends of the image processor.
const IMAGE_PROCESSORS: [&str; 3] =
    ["PaddleOCRVLImageProcessor", "PaddleOCRVLImageProcessorFast", "PaddleOCRVLImageProcessorPil"];

/// The shape rule of a `PaddleOCR-VL` model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PaddleOcrVl {
    patches: Patches,
    pixels: PixelRange,
}

impl PaddleOcrVl {
    /// The rule for a model's files: `config.json` and `preprocessor_config.json` (or a `processor_config.json` that holds
    /// the image processor's fields under `image_processor`).
    ///
    /// Fields that are missing have the values transformers gives them.
    ///
    /// # Errors
    /// [`DataError::Config`] at the first field for which processor and model would disagree, or that this rule does not
    /// cover.
    ///
    /// # Examples
    /// ```
    /// use dflop_data::family::{Family as _, FamilyFiles, PaddleOcrVl, Size};
    /// let config = serde_json::json!({"model_type": "paddleocr_vl"});
    /// let rule = PaddleOcrVl::from_files(&FamilyFiles { config, ..FamilyFiles::default() })?;
    /// let shape = rule.image(Size { height: 480, width: 640 }, 1)?;
    /// // 476 x 644 pixels are 34 x 46 patches, four a feature.
    /// assert_eq!((shape.encoder_tokens(), shape.feature_tokens()), (34 * 46, 391));
    /// # Ok::<(), dflop_data::DataError>(())
    /// ```
    pub fn from_files(files: &FamilyFiles) -> Result<Self, DataError> {
        let config = Fields { file: CONFIG, object: &files.config };
        config.must_be("model_type", &[FAMILY], false)?;
        let image = image_fields(&files.preprocessor);
        must_be_of(&image, "image_processor_type", &IMAGE_PROCESSORS)?;
        let frames = "temporal_patch_size";
        if image.side(frames)?.is_some_and(|count| count != PATCHES.frames) {
            return Err(image.error(frames, "must be 1: the model reads single pictures".to_owned()));
        }
        // What files of the hub say of frames under `vision_config`, the class does not read.
        let model = Patches { frames: PATCHES.frames, ..Patches::of_model(&config, PATCHES)? };
        Ok(Self {
            patches: Patches::read(&image, model, PATCHES)?,
            pixels: PixelRange::read(&image, PIXELS, true)?,
        })
    }

    fn shape(&self, size: Size) -> Result<MediaShape, String> {
        let factor = self.patches.factor();
        let sides = widened((u64::from(size.height), u64::from(size.width)), factor)?;
        let resized = fit(sides, Depth::PICTURE, factor, self.pixels)?;
        let grid = self.patches.grid(resized, 1).ok_or_else(|| TOO_MANY_TOKENS.to_owned())?;
        Ok(grid.shape(vec![grid.features()], Vec::new()))
    }
}

/// Sides of which none is shorter than `factor`: first the height, then the width.
fn widened((height, width): (u64, u64), factor: u64) -> Result<(u64, u64), String> {
    if height == 0 || width == 0 {
        return Err("both sides must be at least 1".to_owned());
    }
    // Python rounds halves to even. Both numbers are exact as floats: sides are below 2^32, a feature is at most 2^15.
    let scaled = |side: u64, short: u64| ((side * factor) as f64 / short as f64).round_ties_even() as u64;
    let (height, width) = if height < factor { (factor, scaled(width, height)) } else { (height, width) };
    Ok(if width < factor { (scaled(height, width), factor) } else { (height, width) })
}

impl Family for PaddleOcrVl {
    fn name(&self) -> &str {
        FAMILY
    }

    fn marks(&self, kind: MediaKind) -> Option<Marks> {
        (kind == MediaKind::Image).then(|| Marks {
            placeholder: PLACEHOLDER.to_owned(),
            feature_token: PLACEHOLDER.to_owned(),
            id_fields: &["image_token_id"],
            number: None,
        })
    }

    fn around(&self, kind: MediaKind) -> Option<[&'static str; 2]> {
        (kind == MediaKind::Image).then_some(["<|IMAGE_START|>", "<|IMAGE_END|>"])
    }

    fn image(&self, size: Size, _num_images: usize) -> Result<MediaShape, DataError> {
        self.shape(size).map_err(|rule| refused(FAMILY, image_words(size.height, size.width), &rule))
    }

    fn video(&self, _: &Clip, _: VideoSampling) -> Result<MediaShape, DataError> {
        Err(unread(FAMILY, "a video"))
    }

    fn audio(&self, _: &Sound) -> Result<MediaShape, DataError> {
        Err(unread(FAMILY, "a sound"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn made(config: &Value, preprocessor: Value) -> Result<PaddleOcrVl, DataError> {
        let mut all = json!({"model_type": "paddleocr_vl"});
        all.as_object_mut().unwrap().extend(config.as_object().unwrap().clone());
        PaddleOcrVl::from_files(&FamilyFiles { config: all, preprocessor, ..FamilyFiles::default() })
    }

    /// 5 x 9 becomes 28 x 50.4, so 28 x 50; 28 x 56 pixels are fewer than allowed, and scaled by sqrt(384^2 / 1400).
    #[test]
    fn grids_by_hand() {
        let rule = made(&json!({}), json!({})).unwrap();
        let shape = |height, width| {
            let shape = rule.image(Size { height, width }, 1)?;
            Ok::<_, DataError>((shape.patches.unwrap(), shape.feature_tokens()))
        };
        // 28 x 10.26 = 287.4 and 50 x 10.26 = 513.1 pixels, up to whole features.
        assert_eq!(shape(5, 9).unwrap(), ((22, 38), 11 * 19));
        assert_eq!(shape(1_000, 1_000).unwrap(), ((72, 72), 36 * 36));
        // Above 1536^2: 3000 / (3000 / 1536) = 1536 = 54.9 features.
        assert_eq!(shape(3_000, 3_000).unwrap(), ((108, 108), 54 * 54));
        let error = |height, width| shape(height, width).unwrap_err().to_string();
        assert!(error(0, 5).contains("both sides must be at least 1"));
        assert!(error(1, 201).contains("must be at most 200 times"), "{}", error(1, 201));
    }

    #[test]
    fn a_side_that_is_short_of_a_feature_becomes_one() {
        assert_eq!(widened((5, 9), 28), Ok((28, 50)));
        // 28 x 5 / 9 = 15.6, rounded before the other side follows: 28 x 28 / 16.
        assert_eq!(widened((9, 5), 28), Ok((49, 28)));
        // Halves to even: 28 x 3 / 8 = 10.5; then 28 x 28 / 10 = 78.4.
        assert_eq!(widened((8, 3), 28), Ok((78, 28)));
        assert_eq!(widened((28, 1), 28), Ok((784, 28)));
    }

    #[test]
    fn fields_that_disagree_are_named() {
        let cases = [
            (json!({}), json!({"image_processor_type": "Qwen2VLImageProcessor"}), "`image_processor_type`"),
            (json!({}), json!({"temporal_patch_size": 2}), "`temporal_patch_size` is 2, must be 1"),
            (json!({"vision_config": {"patch_size": 16}}), json!({}), "`patch_size` is missing"),
            (json!({}), json!({"do_resize": false}), "`do_resize` is false"),
            (json!({}), json!({"merge_size": 4}), "`merge_size` is 4"),
        ];
        for (config, preprocessor, expected) in cases {
            let error = made(&config, preprocessor).unwrap_err().to_string();
            assert!(error.contains(expected), "{expected}: {error}");
        }
        // As on the hub: of frames the configuration may say what it likes, and pixels have their old names.
        let hub = json!({"min_pixels": 147_384, "max_pixels": 2_822_400, "temporal_patch_size": 1});
        let rule = made(&json!({"vision_config": {"temporal_patch_size": 2}}), hub).unwrap();
        assert_eq!((rule.pixels.min, rule.pixels.max), (147_384, 2_822_400));
    }
}
