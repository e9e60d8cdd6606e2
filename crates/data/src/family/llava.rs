//! The shape rule of LLaVA 1.5: one square of one size, whatever the image.
//!
//! ```text
//! (height, width) -> resized and cut to S x S -> (S / p)^2 encoder tokens, and a CLS -> as many features
//! ```
//!
//! CLIP reads a CLS token, SigLIP has none. Strategy `default` drops the first token: the CLS of CLIP, and of SigLIP the first
//! patch. `full` keeps all.
//!
//! The arithmetic is that of Hugging Face transformers 5.23.0 (`LlavaProcessor`, `LlavaModel`).

use super::clip::{ENCODERS, counts_must_be, encoder_sides, image_marks, is_siglip};
use super::fields::{CONFIG, Fields, image_fields, processor_fields};
use super::{
    Clip, Family, Marks, MediaShape, Piece, Size, Sound, VideoSampling, image_words, refused, unread,
};
use crate::DataError;
use crate::media::MediaKind;
use dflop_types::EncoderSegments;
use serde_json::Value;

const FAMILY: &str = "llava";
/// Side of an image where the image processor does not say otherwise.
const DEFAULT_SIDE: u32 = 224;

/// The shape rule of a LLaVA 1.5 model.
///
/// *Invariants* (checked by [`Llava::from_config`]): `1 <= num_features <= num_tokens`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Llava {
    /// Encoder tokens of an image.
    num_tokens: u32,
    /// LLM tokens of an image.
    num_features: u32,
}

impl Family for Llava {
    fn name(&self) -> &str {
        FAMILY
    }

    fn marks(&self, kind: MediaKind) -> Option<Marks> {
        image_marks(kind)
    }

    fn image(&self, size: Size, _num_images: usize) -> Result<MediaShape, DataError> {
        let (height, width) = (size.height, size.width);
        if height == 0 || width == 0 {
            return Err(refused(FAMILY, image_words(height, width), "both sides must be at least 1"));
        }
        Ok(MediaShape {
            num_tiles: 1,
            segments: vec![EncoderSegments::of(1, self.num_tokens)],
            pieces: vec![Piece::Features(self.num_features)],
            frame_indices: Vec::new(),
            parts: Vec::new(),
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

impl Llava {
    /// The rule for a model directory's `config.json` and `preprocessor_config.json`; a `processor_config.json`
    /// that holds the image processor's fields under `image_processor` serves as well.
    ///
    /// Fields that are missing have the values transformers gives them.
    ///
    /// # Errors
    /// [`DataError::Config`] at the first field for which the processor and the model would disagree, or that this
    /// rule does not cover.
    ///
    /// # Examples
    /// ```
    /// use dflop_data::family::{Family as _, Llava, Size};
    /// let config = serde_json::json!({"model_type": "llava"});
    /// let preprocessor = serde_json::json!({"size": {"shortest_edge": 336}, "crop_size": 336});
    /// let rule = Llava::from_config(&config, &preprocessor)?;
    /// let shape = rule.image(Size { height: 480, width: 640 }, 1)?;
    /// assert_eq!((shape.num_tiles, shape.segments[0].tokens, shape.feature_tokens()), (1, 577, 576));
    /// # Ok::<(), dflop_data::DataError>(())
    /// ```
    pub fn from_config(config_json: &Value, preprocessor_json: &Value) -> Result<Self, DataError> {
        let config = Fields { file: CONFIG, object: config_json };
        config.must_be("model_type", &[FAMILY], false)?;
        config.must_be("vision_config.model_type", &ENCODERS, true)?;
        let (image_size, patch_size) = encoder_sides(&config)?;
        let num_class_tokens = u32::from(!is_siglip(&config));
        config.must_be("vision_feature_select_strategy", &["default", "full"], true)?;
        // What is missing is `default`.
        let is_full = config.get("vision_feature_select_strategy").is_some_and(|name| name == "full");
        let side = image_size / patch_size;
        let num_tokens = side * side + num_class_tokens;
        let num_features = num_tokens - u32::from(!is_full);
        if num_features == 0 {
            let rule = "must be `full`: `default` drops the only token".to_owned();
            return Err(config.error("vision_feature_select_strategy", rule));
        }
        if let Some(processor) = processor_fields(preprocessor_json) {
            let strategies: &[&str] = if is_full { &["full"] } else { &["default"] };
            processor.must_be("vision_feature_select_strategy", strategies, is_full)?;
            counts_must_be(&processor, patch_size, None, num_class_tokens)?;
        }
        side_must_be(&image_fields(preprocessor_json), image_size)?;
        Ok(Self { num_tokens, num_features })
    }
}

/// `Ok` if every image leaves the processor as a square of `image_size`: because it is cut to that, or resized to that.
fn side_must_be(preprocessor: &Fields<'_>, image_size: u32) -> Result<(), DataError> {
    let field = "image_processor_type";
    // Where the file names none, transformers takes the first.
    let known = ["LlavaImageProcessor", "CLIPImageProcessor", "SiglipImageProcessor"];
    let name = preprocessor.get(field).and_then(Value::as_str).unwrap_or(known[0]);
    let plain = name.strip_suffix("Fast").or_else(|| name.strip_suffix("Pil")).unwrap_or(name);
    if !known.contains(&plain) {
        return Err(preprocessor.error(field, format!("known are {}", known.join(", "))));
    }
    let flag = |field: &str, default: bool| preprocessor.flag(field).map(|flag| flag.unwrap_or(default));
    if flag("do_pad", false)? && preprocessor.get("pad_size").is_some() {
        return Err(
            preprocessor.error("pad_size", "must be absent: images would leave in that size".to_owned())
        );
    }
    let cuts = flag("do_center_crop", plain != "SiglipImageProcessor")?;
    let name = if cuts { "crop_size" } else { "size" };
    if !cuts && !flag("do_resize", true)? {
        return Err(preprocessor.error("do_resize", "must be true where `do_center_crop` is not".to_owned()));
    }
    let rule = || format!("the encoder reads images of {image_size} pixels");
    match preprocessor.get(name) {
        None if image_size == DEFAULT_SIDE && (cuts || plain == "SiglipImageProcessor") => Ok(()),
        Some(Value::Object(_)) => {
            for side in ["height", "width"] {
                let field = format!("{name}.{side}");
                if preprocessor.side(&field)? != Some(image_size) {
                    return Err(preprocessor.error(&field, rule()));
                }
            }
            Ok(())
        }
        // A number is the side of the square that is cut. As a size most processors take it for the shorter side.
        Some(value) if cuts && value.as_u64() == Some(u64::from(image_size)) => Ok(()),
        _ => Err(preprocessor.error(name, rule())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const PHOTOGRAPH: Size = Size { height: 480, width: 640 };

    fn cut(side: u32) -> Value {
        json!({"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}})
    }

    fn siglip(strategy: &str) -> Value {
        json!({
            "model_type": "llava",
            "vision_config": {"model_type": "siglip_vision_model", "image_size": 384, "patch_size": 14},
            "vision_feature_select_strategy": strategy,
        })
    }

    fn counts(config: &Value, preprocessor: &Value) -> (u32, u32) {
        let shape = Llava::from_config(config, preprocessor).unwrap().image(PHOTOGRAPH, 1).unwrap();
        (shape.segments[0].tokens, shape.feature_tokens())
    }

    #[test]
    fn tokens_by_hand() {
        let clip = json!({"model_type": "llava"});
        assert_eq!(counts(&clip, &cut(336)), (577, 576));
        let full = json!({"model_type": "llava", "vision_feature_select_strategy": "full"});
        assert_eq!(counts(&full, &cut(336)), (577, 577));
        let resized =
            json!({"image_processor_type": "SiglipImageProcessor", "size": {"height": 384, "width": 384}});
        assert_eq!(counts(&siglip("full"), &resized), (729, 729));
        assert_eq!(counts(&siglip("default"), &resized), (729, 728));
    }

    #[test]
    fn videos_sounds_and_empty_images_are_refused() {
        let rule = Llava::from_config(&json!({"model_type": "llava"}), &cut(336)).unwrap();
        let clip =
            Clip { size: Size { height: 9, width: 9 }, num_frames: 3, fps: Some(1.0), duration_s: Some(3.0) };
        let error = rule.video(&clip, VideoSampling::default()).unwrap_err().to_string();
        assert_eq!(error, "no llava shape for a video: the family's processor does not read it");
        assert!(rule.audio(&Sound { duration_s: 1.0, sample_rate: 16_000 }).is_err());
        assert!(rule.image(Size { height: 0, width: 5 }, 1).is_err());
        assert_eq!(rule.marks(MediaKind::Video), None);
    }

    #[test]
    fn fields_that_disagree_are_named() {
        let clip = |more: Value| {
            let mut config =
                json!({"model_type": "llava", "vision_config": {"image_size": 336, "patch_size": 14}});
            config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            config
        };
        let combined = |more: Value| {
            let mut fields = json!({
                "image_processor": cut(336), "patch_size": 14, "num_additional_image_tokens": 1,
                "vision_feature_select_strategy": "default",
            });
            fields.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            fields
        };
        let none = json!({});
        Llava::from_config(&clip(none.clone()), &combined(none.clone())).unwrap();
        let sigs = |more: Value| {
            let mut fields = json!({"image_processor_type": "SiglipImageProcessor", "size": {"height": 384, "width": 384}});
            fields.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            fields
        };
        let cases = [
            (
                clip(json!({"vision_feature_select_strategy": "cls"})),
                cut(336),
                "`vision_feature_select_strategy` is \"cls\"",
            ),
            (
                clip(json!({"vision_config": {"model_type": "pixtral"}})),
                cut(336),
                "`vision_config.model_type` is \"pixtral\"",
            ),
            (clip(none.clone()), cut(224), "`crop_size.height` is 224"),
            (clip(none.clone()), none.clone(), "`crop_size` is missing"),
            (
                clip(none.clone()),
                json!({"crop_size": 336, "do_center_crop": false, "size": 336}),
                "`size` is 336",
            ),
            (
                clip(none.clone()),
                json!({"image_processor_type": "ViTImageProcessor"}),
                "`image_processor_type` is \"ViTImageProcessor\"",
            ),
            (clip(none.clone()), combined(json!({"patch_size": 16})), "`patch_size` is 16, must be 14"),
            (
                clip(none.clone()),
                combined(json!({"num_additional_image_tokens": 0})),
                "`num_additional_image_tokens` is 0, must be 1",
            ),
            (
                clip(none.clone()),
                combined(json!({"vision_feature_select_strategy": "full"})),
                "`vision_feature_select_strategy` is \"full\"",
            ),
            (siglip("full"), sigs(json!({"size": {"height": 384, "width": 378}})), "`size.width` is 378"),
            (
                clip(none.clone()),
                json!({"crop_size": 336, "do_pad": true, "pad_size": {"height": 400, "width": 400}}),
                "`pad_size` is",
            ),
            (siglip("full"), sigs(json!({"do_resize": false})), "`do_resize` is false"),
            (siglip("full"), sigs(json!({"size": {"shortest_edge": 384}})), "`size.height` is missing"),
        ];
        for (config, preprocessor, expected) in cases {
            let error = Llava::from_config(&config, &preprocessor).unwrap_err().to_string();
            assert!(error.contains(expected), "{expected}: {error}");
        }
    }
}
