//! The shape rule of Gemma 3: each picture becomes one square, and where the processor crops long ones, some more.
//!
//! ```text
//! (height, width) -> S x S -> (S / p)^2 encoder tokens -> mean of squares -> mm_tokens_per_image features
//! pan and scan, on request: a picture whose longer side is `min_ratio` times the shorter one or more is cut along it
//!   n = clamp(min(round(longer / shorter), longer / min_size), 2, max_crops) crops, none if a crop is too small
//! text: two newlines, <start_of_image>, features, <end_of_image>, two newlines; of crops the same, behind words of their own
//! ```
//!
//! The arithmetic is that of Hugging Face transformers 5.23.0 (`Gemma3Processor`, `Gemma3ImageProcessor`), halves rounded up.

use super::fields::{CONFIG, Fields, PROCESSOR, image_fields, processor_fields};
use super::{
    Clip, Family, FamilyFiles, Marks, MediaShape, Piece, Size, Sound, VideoSampling, image_words, refused,
    unread,
};
use crate::DataError;
use crate::media::MediaKind;
use dflop_types::{EncoderParts, EncoderSegments};

const FAMILY: &str = "gemma3";
/// Side of a picture where configuration and processor do not say otherwise.
const DEFAULT_SIDE: u32 = 224;
/// Features of a square, likewise.
const DEFAULT_FEATURES: u32 = 256;
const BEGIN: &str = "<start_of_image>";
const END: &str = "<end_of_image>";

/// How long pictures are cut into crops.
#[derive(Debug, Clone, Copy, PartialEq)]
struct PanAndScan {
    /// The least side of a crop, in pixels.
    min_size: u32,
    /// Crops of a picture, at most.
    max_crops: u32,
    /// The least ratio of its sides at which a picture is cut.
    min_ratio: f64,
}

impl PanAndScan {
    /// Crops of a picture, beside the whole of it.
    fn crops(self, size: Size) -> u32 {
        let (longer, shorter) = (size.height.max(size.width), size.height.min(size.width));
        let ratio = f64::from(longer) / f64::from(shorter);
        if ratio < self.min_ratio {
            return 0;
        }
        let wanted = (ratio + 0.5).floor().min((f64::from(longer) / f64::from(self.min_size)).floor());
        let crops = (wanted as u32).max(2).min(self.max_crops);
        if longer.div_ceil(crops).min(shorter) < self.min_size { 0 } else { crops }
    }
}

/// The shape rule of a Gemma 3 model.
///
/// *Invariants* (checked by [`Gemma3::from_files`]): `1 <= num_features <= num_tokens`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Gemma3 {
    /// Encoder tokens of a square.
    num_tokens: u32,
    /// LLM tokens of a square.
    num_features: u32,
    pan_and_scan: Option<PanAndScan>,
}

impl Family for Gemma3 {
    fn name(&self) -> &str {
        FAMILY
    }

    fn marks(&self, kind: MediaKind) -> Option<Marks> {
        (kind == MediaKind::Image).then(|| Marks {
            placeholder: BEGIN.to_owned(),
            feature_token: "<image_soft_token>".to_owned(),
            id_fields: &["image_token_index", "image_token_id"],
            number: None,
        })
    }

    fn special_texts(&self) -> Vec<String> {
        [BEGIN, END].map(str::to_owned).to_vec()
    }

    fn image(&self, size: Size, _num_images: usize) -> Result<MediaShape, DataError> {
        if size.height == 0 || size.width == 0 {
            let rule = "both sides must be at least 1";
            return Err(refused(FAMILY, image_words(size.height, size.width), rule));
        }
        let crops = self.pan_and_scan.map_or(0, |how| how.crops(size));
        let squares = 1 + crops;
        let mut pieces = Vec::with_capacity(2 * squares as usize + 1);
        for square in 0..squares {
            let before = match square {
                0 if crops > 0 => "Here is the original image \n\n",
                0 => "\n\n",
                1 => "\n\n and here are some crops to help you see better \n\n",
                _ => "\n\n \n\n",
            };
            let end = if square == 0 { "" } else { END };
            pieces.push(Piece::Text(format!("{end}{before}{BEGIN}")));
            pieces.push(Piece::Features(self.num_features));
        }
        pieces.push(Piece::Text(format!("{END}\n\n")));
        Ok(MediaShape {
            num_tiles: squares,
            segments: vec![EncoderSegments::of(squares, self.num_tokens)],
            pieces,
            frame_indices: Vec::new(),
            parts: vec![EncoderParts { count: squares, segments: 1, feature_tokens: self.num_features }],
            patches: None,
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

impl Gemma3 {
    /// The rule for a model's files: `config.json`, `preprocessor_config.json` and `processor_config.json`.
    ///
    /// Fields that are missing have the values transformers gives them.
    ///
    /// # Errors
    /// [`DataError::Config`] at the first field for which the processor and the model would disagree, or that this rule
    /// does not cover.
    ///
    /// # Examples
    /// ```
    /// use dflop_data::family::{Family as _, FamilyFiles, Gemma3, Size};
    /// let config = serde_json::json!({"model_type": "gemma3", "vision_config": {"image_size": 896, "patch_size": 14}});
    /// let preprocessor = serde_json::json!({"size": {"height": 896, "width": 896}});
    /// let rule = Gemma3::from_files(&FamilyFiles { config, preprocessor, ..FamilyFiles::default() })?;
    /// let shape = rule.image(Size { height: 480, width: 640 }, 1)?;
    /// assert_eq!((shape.num_tiles, shape.segments[0].tokens, shape.feature_tokens()), (1, 4_096, 256));
    /// # Ok::<(), dflop_data::DataError>(())
    /// ```
    pub fn from_files(files: &FamilyFiles) -> Result<Self, DataError> {
        let config = Fields { file: CONFIG, object: &files.config };
        config.must_be("model_type", &[FAMILY], false)?;
        config.must_be("vision_config.model_type", &["siglip_vision_model"], true)?;
        let image_size = config.side("vision_config.image_size")?.unwrap_or(DEFAULT_SIDE);
        let patch = config.side("vision_config.patch_size")?.unwrap_or(16);
        let num_features = config.side("mm_tokens_per_image")?.unwrap_or(DEFAULT_FEATURES);
        let (per_side, pooled) = (image_size / patch, num_features.isqrt());
        if pooled == 0 || pooled * pooled != num_features || per_side % pooled != 0 || per_side < pooled {
            let rule = format!("must be the square of a number that divides {per_side} patches of a side");
            return Err(config.error("mm_tokens_per_image", rule));
        }
        let of_file = Fields { file: PROCESSOR, object: &files.processor };
        let processor = processor_fields(&files.preprocessor).unwrap_or(of_file);
        let field = "image_seq_length";
        if processor.side(field)?.unwrap_or(DEFAULT_FEATURES) != num_features {
            return Err(processor.error(field, format!("must be {num_features}, as the model has it")));
        }
        let preprocessor = image_fields(&files.preprocessor);
        preprocessor.must_be(
            "image_processor_type",
            &["Gemma3ImageProcessor", "Gemma3ImageProcessorFast", "Gemma3ImageProcessorPil"],
            true,
        )?;
        if preprocessor.flag("do_resize")? == Some(false) {
            return Err(preprocessor.error("do_resize", "must be true".to_owned()));
        }
        for side in ["height", "width"] {
            let field = format!("size.{side}");
            if preprocessor.side(&field)?.unwrap_or(DEFAULT_SIDE) != image_size {
                let rule = format!("the encoder reads images of {image_size} pixels");
                return Err(preprocessor.error(&field, rule));
            }
        }
        Ok(Self { num_tokens: per_side * per_side, num_features, pan_and_scan: pan_and_scan(&preprocessor)? })
    }
}

/// How long pictures are cut; `None` where they are not, as in the published models.
fn pan_and_scan(preprocessor: &Fields<'_>) -> Result<Option<PanAndScan>, DataError> {
    if preprocessor.flag("do_pan_and_scan")? != Some(true) {
        return Ok(None);
    }
    let field = "pan_and_scan_min_ratio_to_activate";
    let min_ratio = match preprocessor.get(field) {
        None => 1.2,
        Some(value) => value
            .as_f64()
            .filter(|ratio| ratio.is_finite())
            .ok_or_else(|| preprocessor.error(field, "must be a number".to_owned()))?,
    };
    let min_size = preprocessor.side("pan_and_scan_min_crop_size")?.unwrap_or(256);
    let max_crops = preprocessor.side("pan_and_scan_max_num_crops")?.unwrap_or(4);
    Ok(Some(PanAndScan { min_size, max_crops, min_ratio }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn made(config: &Value, preprocessor: Value, processor: Value) -> Result<Gemma3, DataError> {
        let mut all = json!({"model_type": "gemma3", "vision_config": {"image_size": 896, "patch_size": 14}});
        all.as_object_mut().unwrap().extend(config.as_object().unwrap().clone());
        let files = FamilyFiles { config: all, preprocessor, processor, ..FamilyFiles::default() };
        Gemma3::from_files(&files)
    }

    fn sized(more: &Value) -> Value {
        let mut all = json!({"size": {"height": 896, "width": 896}});
        all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        all
    }

    #[test]
    fn a_picture_and_its_crops_by_hand() {
        let plain = made(&json!({}), sized(&json!({})), Value::Null).unwrap();
        let text = |text: &str| Piece::Text(text.to_owned());
        let shape = plain.image(Size { height: 100, width: 2_000 }, 1).unwrap();
        assert_eq!(
            shape.pieces,
            [text("\n\n<start_of_image>"), Piece::Features(256), text("<end_of_image>\n\n")]
        );
        let scan = made(&json!({}), sized(&json!({"do_pan_and_scan": true})), Value::Null).unwrap();
        let crops = |height, width| scan.image(Size { height, width }, 1).unwrap().num_tiles - 1;
        // A ratio of 1.2 or more: two, of which none may be below 256 pixels; 2.5 rounds to 3; at most four.
        assert_eq!(crops(599, 500), 0);
        assert_eq!(crops(600, 500), 2);
        assert_eq!(crops(500, 510), 0);
        assert_eq!(crops(400, 1_000), 3);
        assert_eq!(crops(3_000, 300), 4);
        assert_eq!(crops(255, 2_000), 0);
        let shape = scan.image(Size { height: 600, width: 500 }, 1).unwrap();
        assert_eq!(
            shape.pieces,
            [
                text("Here is the original image \n\n<start_of_image>"),
                Piece::Features(256),
                text(
                    "<end_of_image>\n\n and here are some crops to help you see better \n\n<start_of_image>"
                ),
                Piece::Features(256),
                text("<end_of_image>\n\n \n\n<start_of_image>"),
                Piece::Features(256),
                text("<end_of_image>\n\n"),
            ]
        );
        assert_eq!(shape.segments, [EncoderSegments::of(3, 4_096)]);
        assert!(plain.image(Size { height: 0, width: 5 }, 1).is_err());
        assert_eq!(plain.marks(MediaKind::Video), None);
        assert!(plain.audio(&Sound { duration_s: 1.0, sample_rate: 16_000 }).is_err());
    }

    #[test]
    fn fields_that_disagree_are_named() {
        let cases = [
            (
                json!({"mm_tokens_per_image": 255}),
                sized(&json!({})),
                Value::Null,
                "`mm_tokens_per_image` is 255",
            ),
            (json!({"mm_tokens_per_image": 25}), sized(&json!({})), Value::Null, "divides 64 patches"),
            (json!({}), json!({}), Value::Null, "`size.height` is missing"),
            (json!({}), sized(&json!({"do_resize": false})), Value::Null, "`do_resize` is false"),
            (
                json!({}),
                sized(&json!({"do_pan_and_scan": true, "pan_and_scan_max_num_crops": 0})),
                Value::Null,
                "`pan_and_scan_max_num_crops` is 0",
            ),
            (
                json!({}),
                sized(&json!({})),
                json!({"processor_class": "Gemma3Processor", "image_seq_length": 64}),
                "`image_seq_length` is 64, must be 256",
            ),
        ];
        for (config, preprocessor, processor, expected) in cases {
            let error = made(&config, preprocessor, processor).unwrap_err().to_string();
            assert!(error.contains(expected), "{expected}: {error}");
        }
    }
}
