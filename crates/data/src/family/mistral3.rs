//! The shape rule of Mistral3 (Mistral Small 3.1 and later, Ministral 3): pictures at their own resolution, row by row.
//!
//! ```text
//! (height, width) -> scaled down until both sides are at most `size` -> each side up to a multiple of patch x merge
//! encoder: one segment of (height / patch) x (width / patch) tokens
//! LLM: merge x merge patches a feature; a row of features ends with [IMG_BREAK], the last one with [IMG_END]
//! ```
//!
//! The arithmetic is that of `PixtralProcessor` of Hugging Face transformers 5.23.0, with its floats and their rounding. That
//! processor rounds sizes to patch times merge, whatever `patch_size` the image processor's own file says.

use super::fields::{CONFIG, Fields, SIDE_MAX, image_fields, processor_fields};
use super::{
    Clip, Family, FamilyFiles, Marks, MediaShape, Piece, Size, Sound, VideoSampling, image_words, refused,
    unread,
};
use crate::DataError;
use crate::media::MediaKind;
use dflop_types::EncoderSegments;

const FAMILY: &str = "mistral3";
/// Pixels that no side is above, where the image processor names none.
const DEFAULT_EDGE: u32 = 1024;
/// What ends a row of features, and the last row.
const BREAK: &str = "[IMG_BREAK]";
const END: &str = "[IMG_END]";

/// The shape rule of a Mistral3 model.
///
/// *Invariants* (checked by [`Mistral3::from_files`]): each field is at least 1 and at most 2^15.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mistral3 {
    /// Side of a patch, in pixels.
    patch: u32,
    /// Patches a feature, each way.
    merge: u32,
    /// No side of a resized picture is above it, in pixels.
    longest_edge: u32,
}

impl Family for Mistral3 {
    fn name(&self) -> &str {
        FAMILY
    }

    fn marks(&self, kind: MediaKind) -> Option<Marks> {
        (kind == MediaKind::Image).then(|| Marks {
            placeholder: "[IMG]".to_owned(),
            feature_token: "[IMG]".to_owned(),
            id_fields: &["image_token_index", "image_token_id"],
            number: None,
        })
    }

    fn special_texts(&self) -> Vec<String> {
        [BREAK, END].map(str::to_owned).to_vec()
    }

    fn image(&self, size: Size, _num_images: usize) -> Result<MediaShape, DataError> {
        let refuse = |rule: &str| refused(FAMILY, image_words(size.height, size.width), rule);
        if size.height == 0 || size.width == 0 {
            return Err(refuse("both sides must be at least 1"));
        }
        let (height, width) = scaled(size, self.longest_edge).map_err(|rule| refuse(&rule))?;
        let pixels = self.patch * self.merge;
        let (rows, columns) = (height.div_ceil(pixels), width.div_ceil(pixels));
        let mut pieces = Vec::with_capacity(2 * rows as usize);
        for row in 1..=rows {
            pieces.push(Piece::Features(columns));
            pieces.push(Piece::Text(if row == rows { END } else { BREAK }.to_owned()));
        }
        let sides = (rows * self.merge, columns * self.merge);
        Ok(MediaShape {
            num_tiles: 1,
            segments: vec![EncoderSegments::of(1, sides.0 * sides.1)],
            pieces,
            frame_indices: Vec::new(),
            parts: Vec::new(),
            patches: Some(sides),
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

impl Mistral3 {
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
    /// use dflop_data::family::{Family as _, FamilyFiles, Mistral3, Size};
    /// let config = serde_json::json!({"model_type": "mistral3"});
    /// let preprocessor = serde_json::json!({"size": {"longest_edge": 1540}});
    /// let rule = Mistral3::from_files(&FamilyFiles { config, preprocessor, ..FamilyFiles::default() })?;
    /// let shape = rule.image(Size { height: 480, width: 640 }, 1)?;
    /// assert_eq!((shape.segments[0].tokens, shape.feature_tokens()), (36 * 46, 18 * 23));
    /// # Ok::<(), dflop_data::DataError>(())
    /// ```
    pub fn from_files(files: &FamilyFiles) -> Result<Self, DataError> {
        let config = Fields { file: CONFIG, object: &files.config };
        config.must_be("model_type", &[FAMILY], false)?;
        let (patch, merge) = patch_and_merge(files, [16, 1])?;
        let longest_edge = longest_edge_of(&image_fields(&files.preprocessor))?;
        if patch.saturating_mul(merge) > SIDE_MAX {
            let rule = format!("a feature must be at most {SIDE_MAX} pixels wide");
            return Err(config.error("spatial_merge_size", rule));
        }
        Ok(Self { patch, merge, longest_edge })
    }
}

/// Side of a patch in pixels, and patches a feature each way, of a model with Pixtral's encoder. A processor's file that has
/// both must agree; where it leaves one out, the processor takes that of `absent`.
///
/// # Errors
/// [`DataError::Config`] at the first field that is of another encoder, or not the model's.
pub(super) fn patch_and_merge(files: &FamilyFiles, absent: [u32; 2]) -> Result<(u32, u32), DataError> {
    let config = Fields { file: CONFIG, object: &files.config };
    config.must_be("vision_config.model_type", &["pixtral"], true)?;
    // Without a vision configuration transformers takes that of the family's first model, with patches of 14. A vision
    // configuration that names no patch size has the default of its class, 16.
    let default = if config.get("vision_config").is_none() { 14 } else { 16 };
    let patch = config.side("vision_config.patch_size")?.unwrap_or(default);
    let merge = config.side("spatial_merge_size")?.unwrap_or(2);
    if let Some(processor) = processor_fields(&files.preprocessor) {
        let fields = [("patch_size", absent[0], patch), ("spatial_merge_size", absent[1], merge)];
        for (field, default, model) in fields {
            if processor.side(field)?.unwrap_or(default) != model {
                return Err(processor.error(field, format!("must be {model}, as the model has it")));
            }
        }
    }
    Ok((patch, merge))
}

/// Height and width scaled down until both are at most `longest_edge`; neither is 0.
///
/// # Errors
/// The rule that a picture breaks whose shorter side vanishes.
pub(super) fn scaled(size: Size, longest_edge: u32) -> Result<(u32, u32), String> {
    let (height, width, edge) = (f64::from(size.height), f64::from(size.width), f64::from(longest_edge));
    let ratio = (height / edge).max(width / edge);
    let shrunk = |pixels: u32| if ratio > 1.0 { (f64::from(pixels) / ratio) as u32 } else { pixels };
    let (height, width) = (shrunk(size.height), shrunk(size.width));
    if height == 0 || width == 0 {
        return Err(format!("its shorter side is nothing where the longer one is {longest_edge} pixels"));
    }
    Ok((height, width))
}

/// The longest edge that the image processor's file names.
///
/// # Errors
/// [`DataError::Config`] at a field that the rule does not cover.
pub(super) fn longest_edge_of(preprocessor: &Fields<'_>) -> Result<u32, DataError> {
    preprocessor.must_be(
        "image_processor_type",
        &["PixtralImageProcessor", "PixtralImageProcessorFast", "PixtralImageProcessorPil"],
        true,
    )?;
    for (field, wanted) in [("do_resize", true), ("do_center_crop", false)] {
        if preprocessor.flag(field)?.is_some_and(|flag| flag != wanted) {
            return Err(preprocessor.error(field, format!("must be {wanted}")));
        }
    }
    let field = "size.longest_edge";
    if preprocessor.get("size").is_some() && preprocessor.get(field).is_none() {
        return Err(preprocessor.error(field, "pictures are scaled by their longest edge".to_owned()));
    }
    Ok(preprocessor.side(field)?.unwrap_or(DEFAULT_EDGE))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn made(config: &Value, preprocessor: Value) -> Result<Mistral3, DataError> {
        let mut all = json!({"model_type": "mistral3"});
        all.as_object_mut().unwrap().extend(config.as_object().unwrap().clone());
        Mistral3::from_files(&FamilyFiles { config: all, preprocessor, ..FamilyFiles::default() })
    }

    /// 1540 = 55 x 28: 3080 x 1540 is halved; a line of pixels vanishes.
    #[test]
    fn grids_by_hand() {
        let rule = made(&json!({}), json!({"size": {"longest_edge": 1540}})).unwrap();
        let grid = |height, width| rule.image(Size { height, width }, 1).unwrap().patches;
        assert_eq!(grid(3080, 1540), Some((110, 56)));
        assert_eq!(grid(28, 29), Some((2, 4)));
        assert_eq!(grid(1, 1), Some((2, 2)));
        let error = rule.image(Size { height: 1, width: 6000 }, 1).unwrap_err().to_string();
        assert!(error.contains("its shorter side is nothing where the longer one is 1540 pixels"), "{error}");
        assert!(rule.image(Size { height: 0, width: 5 }, 1).is_err());
    }

    #[test]
    fn each_row_ends() {
        let rule = made(&json!({}), json!({})).unwrap();
        let shape = rule.image(Size { height: 56, width: 84 }, 1).unwrap();
        let text = |text: &str| Piece::Text(text.to_owned());
        assert_eq!(
            shape.pieces,
            [Piece::Features(3), text("[IMG_BREAK]"), Piece::Features(3), text("[IMG_END]")]
        );
        assert_eq!(shape.segments, [EncoderSegments::of(1, 24)]);
        assert_eq!(rule.marks(MediaKind::Video), None);
        assert!(rule.audio(&Sound { duration_s: 1.0, sample_rate: 16_000 }).is_err());
    }

    #[test]
    fn fields_that_disagree_are_named() {
        let cases = [
            (json!({"vision_config": {"model_type": "clip"}}), json!({}), "`vision_config.model_type`"),
            (json!({}), json!({"size": {"height": 9, "width": 9}}), "`size.longest_edge` is missing"),
            (json!({}), json!({"do_center_crop": true}), "`do_center_crop` is true, must be false"),
            (
                json!({}),
                json!({"image_processor": {}, "patch_size": 16, "spatial_merge_size": 2}),
                "`patch_size` is 16, must be 14",
            ),
            (
                json!({}),
                json!({"image_processor": {}, "patch_size": 14}),
                "`spatial_merge_size` is missing, must be 2",
            ),
        ];
        for (config, preprocessor, expected) in cases {
            let error = made(&config, preprocessor).unwrap_err().to_string();
            assert!(error.contains(expected), "{expected}: {error}");
        }
    }
}
