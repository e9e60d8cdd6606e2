//! The shape rule of `LightOnOCR`: pictures at their own resolution, without marks between rows.
//!
//! ```text
//! (height, width) -> scaled down until both sides are at most `size` -> each side up to a multiple of the processor's patch
//! encoder: one segment of (height / patch) x (width / patch) tokens
//! LLM: merge x merge patches a feature; a last row or column that fills no feature is encoded and then left out
//! ```
//!
//! The arithmetic is that of `LightOnOcrProcessor` of Hugging Face transformers 5.23.0. Unlike `PixtralProcessor` it rounds sizes
//! by the image processor's own `patch_size`, so a picture may have an odd number of rows.

use super::fields::{CONFIG, Fields, SIDE_MAX, image_fields};
use super::mistral3::{longest_edge_of, patch_and_merge, scaled};
use super::{
    Clip, Family, FamilyFiles, Marks, MediaShape, Piece, Size, Sound, VideoSampling, image_words, refused,
    unread,
};
use crate::DataError;
use crate::media::MediaKind;
use dflop_types::EncoderSegments;

const FAMILY: &str = "lighton_ocr";
const PLACEHOLDER: &str = "<|image_pad|>";
/// Pixels that sides are rounded up to, where the image processor's file names none.
const DEFAULT_SIDE: u32 = 16;

/// The shape rule of a `LightOnOCR` model.
///
/// *Invariants* (checked by [`LightonOcr::from_files`]): each field is at least 1 and at most 2^15.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LightonOcr {
    /// Side of a patch, in pixels.
    patch: u32,
    /// Patches a feature, each way.
    merge: u32,
    /// Sides of a resized picture are multiples of it: one patch or several, in pixels.
    unit: u32,
    /// No side of a resized picture is above it, before it is rounded up, in pixels.
    longest_edge: u32,
}

impl Family for LightonOcr {
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

    fn image(&self, size: Size, _num_images: usize) -> Result<MediaShape, DataError> {
        let refuse = |rule: &str| refused(FAMILY, image_words(size.height, size.width), rule);
        if size.height == 0 || size.width == 0 {
            return Err(refuse("both sides must be at least 1"));
        }
        let (height, width) = scaled(size, self.longest_edge).map_err(|rule| refuse(&rule))?;
        let patches = |side: u32| side.div_ceil(self.unit) * (self.unit / self.patch);
        let (rows, columns) = (patches(height), patches(width));
        let features = (rows / self.merge) * (columns / self.merge);
        if features == 0 {
            let rule = format!("it has {rows} x {columns} patches, {0} x {0} make a feature", self.merge);
            return Err(refuse(&rule));
        }
        Ok(MediaShape {
            num_tiles: 1,
            segments: vec![EncoderSegments::of(1, rows * columns)],
            pieces: vec![Piece::Features(features)],
            frame_indices: Vec::new(),
            parts: Vec::new(),
            patches: Some((rows, columns)),
            first_patches: None,
            last_patches: None,
        })
    }

    fn video(&self, _: &Clip, _: VideoSampling) -> Result<MediaShape, DataError> {
        Err(unread(FAMILY, "a video"))
    }

    fn audio(&self, _: &Sound) -> Result<MediaShape, DataError> {
        Err(unread(FAMILY, "a sound"))
    }
}

impl LightonOcr {
    /// The rule for a model's files: `config.json` and `preprocessor_config.json` (or a `processor_config.json` that holds
    /// the image processor's fields under `image_processor`).
    ///
    /// Fields that are missing have the values transformers gives them.
    ///
    /// # Errors
    /// [`DataError::Config`] at the first field for which the processor and the model would disagree, or that this rule
    /// does not cover.
    ///
    /// # Examples
    /// ```
    /// use dflop_data::family::{Family as _, FamilyFiles, LightonOcr, Size};
    /// let config = serde_json::json!({"model_type": "lighton_ocr"});
    /// let preprocessor = serde_json::json!({"patch_size": 14, "size": {"longest_edge": 1540}});
    /// let rule = LightonOcr::from_files(&FamilyFiles { config, preprocessor, ..FamilyFiles::default() })?;
    /// let shape = rule.image(Size { height: 490, width: 640 }, 1)?;
    /// assert_eq!((shape.segments[0].tokens, shape.feature_tokens()), (35 * 46, 17 * 23));
    /// # Ok::<(), dflop_data::DataError>(())
    /// ```
    pub fn from_files(files: &FamilyFiles) -> Result<Self, DataError> {
        let config = Fields { file: CONFIG, object: &files.config };
        config.must_be("model_type", &[FAMILY], false)?;
        let (patch, merge) = patch_and_merge(files, [14, 2])?;
        let preprocessor = image_fields(&files.preprocessor);
        let longest_edge = longest_edge_of(&preprocessor)?;
        let field = "patch_size";
        let unit = match preprocessor.get("patch_size.height") {
            Some(height) if preprocessor.get("patch_size.width") != Some(height) => {
                return Err(preprocessor.error(field, "height and width must be equal".to_owned()));
            }
            Some(_) => preprocessor.side("patch_size.height")?,
            None => preprocessor.side(field)?,
        }
        .unwrap_or(DEFAULT_SIDE);
        if unit % patch != 0 {
            return Err(
                preprocessor.error(field, format!("must be a multiple of {patch}, the model's patch"))
            );
        }
        if patch.saturating_mul(merge) > SIDE_MAX {
            let rule = format!("a feature must be at most {SIDE_MAX} pixels wide");
            return Err(config.error("spatial_merge_size", rule));
        }
        Ok(Self { patch, merge, unit, longest_edge })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn made(config: &Value, preprocessor: Value) -> Result<LightonOcr, DataError> {
        let mut all = json!({"model_type": "lighton_ocr"});
        all.as_object_mut().unwrap().extend(config.as_object().unwrap().clone());
        LightonOcr::from_files(&FamilyFiles { config: all, preprocessor, ..FamilyFiles::default() })
    }

    /// 1540 = 110 x 14: 3080 x 1540 is halved. Of 35 rows the last fills no feature.
    #[test]
    fn grids_by_hand() {
        let rule = made(&json!({}), json!({"patch_size": 14, "size": {"longest_edge": 1540}})).unwrap();
        let shape = |height, width| {
            let shape = rule.image(Size { height, width }, 1)?;
            Ok::<_, DataError>((shape.patches.unwrap(), shape.feature_tokens()))
        };
        assert_eq!(shape(3080, 1540).unwrap(), ((110, 55), 55 * 27));
        assert_eq!(shape(490, 640).unwrap(), ((35, 46), 17 * 23));
        let error = |height, width| shape(height, width).unwrap_err().to_string();
        assert!(error(14, 640).contains("it has 1 x 46 patches, 2 x 2 make a feature"), "{}", error(14, 640));
        assert!(error(1, 6000).contains("its shorter side is nothing where the longer one is 1540 pixels"));
        assert!(error(0, 5).contains("both sides must be at least 1"));
    }

    #[test]
    fn fields_that_disagree_are_named() {
        let cases = [
            (json!({"vision_config": {"model_type": "clip"}}), json!({}), "`vision_config.model_type`"),
            (json!({}), json!({"patch_size": 14, "size": {"height": 9}}), "`size.longest_edge` is missing"),
            (json!({}), json!({}), "`patch_size` is missing, must be a multiple of 14"),
            (json!({}), json!({"patch_size": {"height": 14, "width": 28}}), "height and width must be equal"),
            (
                json!({}),
                json!({"image_processor": {"patch_size": 14}, "patch_size": 16, "spatial_merge_size": 2}),
                "`patch_size` is 16, must be 14",
            ),
        ];
        for (config, preprocessor, expected) in cases {
            let error = made(&config, preprocessor).unwrap_err().to_string();
            assert!(error.contains(expected), "{expected}: {error}");
        }
    }
}
