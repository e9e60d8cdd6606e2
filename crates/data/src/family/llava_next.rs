//! The shape rule of LLaVA-NeXT: anyres tiles, unpadded and broken into rows, for each image of a sample.
//!
//! ```text
//! (height, width) -> best pinpoint -> base tile + grid of tiles (each (S / p)^2 encoder tokens, and a CLS)
//!                                  -> grid of features, padding cut off -> one newline a row
//!                                  -> + the features of the base tile
//! ```
//!
//! LLaVA-OneVision shrinks the grid, and gives each of several images one tile; LLaVA-NeXT does neither. Its encoder is
//! CLIP or SigLIP. CLIP reads a CLS token for each tile, which is then dropped (`vision_feature_select_strategy: default`).
//! SigLIP has no CLS token (`full`). With the other strategy the model could not lay the features out as a grid.
//!
//! The arithmetic is that of Hugging Face transformers 5.23.0 (`LlavaNextProcessor`, `LlavaNextModel`).

use super::anyres::{Pinpoints, unpadded};
use super::clip::{ENCODERS, counts_must_be, encoder_sides, image_marks, is_siglip};
use super::fields::{CONFIG, Fields, image_fields, processor_fields};
use super::{
    Clip, Family, Marks, MediaShape, Piece, Size, Sound, VideoSampling, image_words, refused, unread,
};
use crate::DataError;
use crate::media::MediaKind;
use dflop_types::EncoderSegments;
use serde_json::Value;

const FAMILY: &str = "llava_next";
/// Pinpoints where nothing says otherwise, as (height, width) in pixels.
const DEFAULT_PINPOINTS: [(u32, u32); 5] = [(336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008)];
/// Side of a tile where neither `size` nor `crop_size` of the image processor says otherwise.
const DEFAULT_TILE: u32 = 224;

/// The shape rule of a LLaVA-NeXT model.
///
/// *Invariants* (checked by [`LlavaNext::from_config`]): `1 <= patch_size <= image_size`; at least one pinpoint;
/// each side of a pinpoint is a multiple of `image_size`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LlavaNext {
    image_size: u32,
    patch_size: u32,
    /// Tokens of a tile that are read and dropped: 1 where the encoder has a CLS.
    dropped_tokens: u32,
    pinpoints: Pinpoints,
}

impl Family for LlavaNext {
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
        let (best_height, best_width) = self.pinpoints.best(height, width);
        let grid = (best_height / self.image_size, best_width / self.image_size);
        let (rows, columns) = unpadded(height, width, grid, self.image_size / self.patch_size);
        let num_tiles = grid.0 * grid.1 + 1;
        // A newline ends each row of the grid; the base tile has none.
        let features = rows * columns + rows + self.tile_features();
        let segments = EncoderSegments::of(num_tiles, self.tile_features() + self.dropped_tokens);
        Ok(MediaShape {
            num_tiles,
            segments: vec![segments],
            pieces: vec![Piece::Features(features)],
            frame_indices: Vec::new(),
            // Its tiles are put together before newlines end their rows.
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

impl LlavaNext {
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
    /// use dflop_data::family::{Family as _, LlavaNext, Size};
    /// let config = serde_json::json!({"model_type": "llava_next"});
    /// let preprocessor = serde_json::json!({"size": {"shortest_edge": 336}, "crop_size": 336});
    /// let rule = LlavaNext::from_config(&config, &preprocessor)?;
    /// let shape = rule.image(Size { height: 480, width: 640 }, 1)?;
    /// assert_eq!((shape.num_tiles, shape.segments[0].tokens, shape.feature_tokens()), (5, 577, 2_340));
    /// # Ok::<(), dflop_data::DataError>(())
    /// ```
    pub fn from_config(config_json: &Value, preprocessor_json: &Value) -> Result<Self, DataError> {
        let config = Fields { file: CONFIG, object: config_json };
        config.must_be("model_type", &[FAMILY], false)?;
        let (image_size, patch_size) = encoder_sides(&config)?;
        let has_cls = encoder_has_cls(&config)?;

        if let Some(processor) = processor_fields(preprocessor_json) {
            let strategy = if has_cls { "default" } else { "full" };
            processor.must_be("vision_feature_select_strategy", &[strategy], false)?;
            counts_must_be(&processor, patch_size, Some(0), u32::from(has_cls))?;
        }
        let preprocessor = image_fields(preprocessor_json);
        preprocessor.must_be(
            "image_processor_type",
            &["LlavaNextImageProcessor", "LlavaNextImageProcessorFast", "LlavaNextImageProcessorPil"],
            true,
        )?;
        tiles_must_be(&preprocessor, image_size)?;
        let pinpoints = Pinpoints::read(&config, image_size, &DEFAULT_PINPOINTS)?;
        if Pinpoints::read(&preprocessor, image_size, &DEFAULT_PINPOINTS)? != pinpoints {
            let rule = format!("`{CONFIG}` has other pinpoints, the model would misread the tiles");
            return Err(preprocessor.error("image_grid_pinpoints", rule));
        }
        Ok(Self { image_size, patch_size, dropped_tokens: u32::from(has_cls), pinpoints })
    }

    /// LLM tokens of the base tile.
    const fn tile_features(&self) -> u32 {
        let side = self.image_size / self.patch_size;
        side * side
    }
}

/// Whether the encoder has a CLS, which the strategy must then drop.
fn encoder_has_cls(config: &Fields<'_>) -> Result<bool, DataError> {
    config.must_be("vision_config.model_type", &ENCODERS, true)?;
    let has_cls = !is_siglip(config);
    let strategy = if has_cls { "default" } else { "full" };
    // What is missing is `default`.
    config.must_be("vision_feature_select_strategy", &[strategy], has_cls)?;
    Ok(has_cls)
}

/// `Ok` if `size` and `crop_size` are both `image_size`: a tile is cut by one and counted by the other.
fn tiles_must_be(preprocessor: &Fields<'_>, image_size: u32) -> Result<(), DataError> {
    let rule = || format!("the encoder reads tiles of {image_size} pixels");
    for name in ["size", "crop_size"] {
        match preprocessor.get(name) {
            None if image_size == DEFAULT_TILE => {}
            Some(Value::Object(sides)) if !sides.is_empty() => {
                for side in sides.iter().filter(|(_, side)| !side.is_null()).map(|(side, _)| side) {
                    let field = format!("{name}.{side}");
                    if preprocessor.side(&field)? != Some(image_size) {
                        return Err(preprocessor.error(&field, rule()));
                    }
                }
            }
            Some(value) if value.as_u64() == Some(u64::from(image_size)) => {}
            _ => return Err(preprocessor.error(name, rule())),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn preprocessor(side: u32) -> Value {
        json!({"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}})
    }

    fn real() -> LlavaNext {
        LlavaNext::from_config(&json!({"model_type": "llava_next"}), &preprocessor(336)).unwrap()
    }

    fn shape(height: u32, width: u32) -> MediaShape {
        real().image(Size { height, width }, 1).unwrap()
    }

    /// 672 x 672: four tiles and the base tile; 48 rows of 48 with a newline each, and 576; CLIP reads 577 a tile.
    #[test]
    fn a_square_of_four_tiles_by_hand() {
        let shape = shape(672, 672);
        assert_eq!(shape.num_tiles, 5);
        assert_eq!(shape.segments, [EncoderSegments::of(5, 577)]);
        assert_eq!(shape.feature_tokens(), 48 * 49 + 576);
    }

    /// 480 x 640 fits 672 x 672 at scale 1.05: 36 of 48 rows are image.
    #[test]
    fn padding_is_cut_off_by_hand() {
        assert_eq!(shape(480, 640).feature_tokens(), 36 * 49 + 576);
    }

    /// No pinpoint keeps a pixel of 5000 x 1; the first of the smallest is taken, 336 x 672, and of its 24 rows no
    /// column stays, but the newline of each does.
    #[test]
    fn a_line_of_pixels_by_hand() {
        let shape = shape(5000, 1);
        assert_eq!((shape.num_tiles, shape.feature_tokens()), (3, 24 + 576));
    }

    #[test]
    fn each_of_several_images_is_tiled() {
        let size = Size { height: 672, width: 672 };
        assert_eq!(real().image(size, 3).unwrap(), real().image(size, 1).unwrap());
    }

    #[test]
    fn videos_sounds_and_empty_images_are_refused() {
        let clip =
            Clip { size: Size { height: 9, width: 9 }, num_frames: 3, fps: Some(1.0), duration_s: Some(3.0) };
        let error = real().video(&clip, VideoSampling::default()).unwrap_err().to_string();
        assert_eq!(error, "no llava_next shape for a video: the family's processor does not read it");
        assert!(real().audio(&Sound { duration_s: 1.0, sample_rate: 16_000 }).is_err());
        assert!(real().image(Size { height: 0, width: 5 }, 1).is_err());
        assert_eq!(real().marks(MediaKind::Video), None);
    }

    #[test]
    fn fields_that_disagree_are_named() {
        let config = |more: Value| {
            let mut config =
                json!({"model_type": "llava_next", "vision_config": {"image_size": 336, "patch_size": 14}});
            config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            config
        };
        let siglip = json!({"vision_config": {"model_type": "siglip_vision_model", "image_size": 336}});
        let combined = |strategy: &str, additional: u32| {
            json!({
                "image_processor": preprocessor(336),
                "patch_size": 14,
                "vision_feature_select_strategy": strategy,
                "num_additional_image_tokens": additional,
            })
        };
        LlavaNext::from_config(&config(json!({})), &combined("default", 1)).unwrap();
        let cases = [
            (
                config(json!({"vision_feature_select_strategy": "full"})),
                preprocessor(336),
                "`vision_feature_select_strategy` is \"full\"",
            ),
            (config(siglip), preprocessor(336), "`vision_feature_select_strategy` is missing"),
            (config(json!({})), preprocessor(224), "`size.shortest_edge` is 224"),
            (config(json!({})), json!({}), "`size` is missing"),
            (config(json!({})), json!({"size": 336}), "`crop_size` is missing"),
            (config(json!({})), combined("default", 0), "`num_additional_image_tokens` is 0, must be 1"),
            (
                config(json!({})),
                combined("full", 1),
                "`processor_config.json`: `vision_feature_select_strategy`",
            ),
            (
                config(json!({"image_grid_pinpoints": [[336, 336]]})),
                preprocessor(336),
                "`preprocessor_config.json`: `image_grid_pinpoints`",
            ),
        ];
        for (config, preprocessor, expected) in cases {
            let error = LlavaNext::from_config(&config, &preprocessor).unwrap_err().to_string();
            assert!(error.contains(expected), "{expected}: {error}");
        }
    }
}
