//! The shape rule of InternVL: a grid of tiles near the picture's aspect ratio, and a thumbnail beside it.
//!
//! ```text
//! (height, width) -> grid of min_patches to max_patches tiles -> + a thumbnail where there are two or more
//! each tile or frame: (S / p)^2 encoder tokens and a CLS      -> (S / p x downsample_ratio)^2 features
//! image: <img> features of all its tiles </img>
//! video: Frame1: <img> features </img>\nFrame2: <img> features </img>
//! ```
//!
//! The arithmetic, floats and their rounding included, is that of Hugging Face transformers 5.23.0:
//! `InternVLProcessor`, which has `GotOcr2ImageProcessor` crop every image whatever `crop_to_patches` of
//! `preprocessor_config.json` says, and `InternVLVideoProcessor`.

use super::fields::{CONFIG, Fields, image_fields, processor_fields, side};
use super::internvl_video::{FAMILY, FrameRule};
use super::{
    Clip, Family, FamilyFiles, Marks, MediaShape, Piece, Size, Sound, VideoSampling, image_words, refused,
    unread,
};
use crate::DataError;
use crate::media::MediaKind;
use dflop_types::{EncoderParts, EncoderSegments};
use serde_json::Value;

/// Tiles of a grid that we take at most; transformers has 12 where nothing says otherwise.
const TILES_MAX: u32 = 4096;
/// Side of a tile where the image processor has no `size`, in pixels.
const DEFAULT_TILE: u32 = 384;

/// The shape rule of an InternVL model.
///
/// *Invariants* (checked by [`InternVl::from_files`]): `tile_features >= 1`; `grids` are in ascending order of their
/// tiles.
#[derive(Debug, Clone, PartialEq)]
pub struct InternVl {
    image_size: u32,
    tile_tokens: u32,
    tile_features: u32,
    /// (columns, rows) that a picture may be cut into.
    grids: Vec<(u32, u32)>,
    frames: FrameRule,
}

impl Family for InternVl {
    fn name(&self) -> &str {
        FAMILY
    }

    fn marks(&self, kind: MediaKind) -> Option<Marks> {
        let placeholder = match kind {
            MediaKind::Image => "<IMG_CONTEXT>",
            MediaKind::Video => "<video>",
            MediaKind::Audio => return None,
        };
        Some(Marks {
            placeholder: placeholder.to_owned(),
            feature_token: "<IMG_CONTEXT>".to_owned(),
            id_fields: &["image_token_id"],
            number: None,
        })
    }

    fn image(&self, size: Size, _num_images: usize) -> Result<MediaShape, DataError> {
        if size.height == 0 || size.width == 0 {
            let media = image_words(size.height, size.width);
            return Err(refused(FAMILY, media, "both sides must be at least 1"));
        }
        let (columns, rows) = self.best_grid(size);
        let num_tiles = match columns * rows {
            1 => 1,
            tiles => tiles + 1,
        };
        let features = Piece::Features(num_tiles * self.tile_features);
        let pieces = vec![Piece::Text("<img>".to_owned()), features, Piece::Text("</img>".to_owned())];
        Ok(self.shape(num_tiles, pieces, Vec::new()))
    }

    fn video(&self, clip: &Clip, sampling: VideoSampling) -> Result<MediaShape, DataError> {
        let frame_indices = self.frames.choose(clip, sampling)?;
        let num_frames = frame_indices.len() as u32;
        let mut pieces = Vec::with_capacity(2 * frame_indices.len() + 1);
        let mut before = String::new();
        for number in 1..=num_frames {
            pieces.push(Piece::Text(format!("{before}Frame{number}: <img>")));
            pieces.push(Piece::Features(self.tile_features));
            "</img>\n".clone_into(&mut before);
        }
        pieces.push(Piece::Text("</img>".to_owned()));
        Ok(self.shape(num_frames, pieces, frame_indices))
    }

    fn audio(&self, _: &Sound) -> Result<MediaShape, DataError> {
        Err(unread(FAMILY, "a sound"))
    }
}

impl InternVl {
    /// The rule for a model directory's `config.json`, `preprocessor_config.json` (or a `processor_config.json` that
    /// holds the image processor's fields under `image_processor`) and `video_preprocessor_config.json`.
    ///
    /// Fields that are missing have the values transformers gives them. Without settings for videos those of images
    /// serve, as in transformers.
    ///
    /// # Errors
    /// [`DataError::Config`] at the first field for which the processor and the model would disagree, or that this
    /// rule does not cover.
    ///
    /// # Examples
    /// ```
    /// use dflop_data::family::{Family as _, FamilyFiles, InternVl, Size};
    /// let config = serde_json::json!({"model_type": "internvl"});
    /// let preprocessor = serde_json::json!({"size": {"height": 448, "width": 448}});
    /// let rule = InternVl::from_files(&FamilyFiles { config, preprocessor, ..FamilyFiles::default() })?;
    /// let shape = rule.image(Size { height: 480, width: 640 }, 1)?;
    /// assert_eq!((shape.num_tiles, shape.segments[0].tokens, shape.feature_tokens()), (13, 1_025, 3_328));
    /// # Ok::<(), dflop_data::DataError>(())
    /// ```
    pub fn from_files(files: &FamilyFiles) -> Result<Self, DataError> {
        let config = Fields { file: CONFIG, object: &files.config };
        config.must_be("model_type", &[FAMILY], false)?;
        config.must_be("vision_config.model_type", &["internvl_vision"], true)?;
        // `full` would keep the CLS, and 1 more than a square cannot be laid out as a grid.
        config.must_be("vision_feature_select_strategy", &["default"], true)?;
        let image_size = square(&config, "vision_config.image_size", 448)?;
        let patch_size = square(&config, "vision_config.patch_size", 14)?;
        if patch_size > image_size {
            let rule = format!("larger than the image size {image_size}");
            return Err(config.error("vision_config.patch_size", rule));
        }
        let tile_side = image_size / patch_size;
        let tile_features = downsampled(&config, tile_side)?;

        seq_length_must_be(&config, tile_features, tile_features)?;
        if let Some(processor) = processor_fields(&files.preprocessor) {
            seq_length_must_be(&processor, tile_features, 256)?;
        }
        let grids = grids(&image_fields(&files.preprocessor), image_size)?;
        let frames = FrameRule::read(files, image_size)?;
        Ok(Self { image_size, tile_tokens: tile_side * tile_side + 1, tile_features, grids, frames })
    }

    fn shape(&self, num_tiles: u32, pieces: Vec<Piece>, frame_indices: Vec<u32>) -> MediaShape {
        let segments = vec![EncoderSegments::of(num_tiles, self.tile_tokens)];
        let tile = EncoderParts { count: num_tiles, segments: 1, feature_tokens: self.tile_features };
        MediaShape {
            num_tiles,
            segments,
            pieces,
            frame_indices,
            parts: vec![tile],
            patches: None,
            first_patches: None,
            last_patches: None,
        }
    }

    /// Columns and rows of the grid whose aspect ratio is nearest (`get_optimal_tiled_canvas`); of equally near ones
    /// the last that the picture fills by half.
    ///
    /// *Complexity*: O(grids).
    fn best_grid(&self, size: Size) -> (u32, u32) {
        let aspect_ratio = f64::from(size.width) / f64::from(size.height);
        let area = u128::from(size.height) * u128::from(size.width);
        let tile_area = u128::from(self.image_size) * u128::from(self.image_size);
        let mut best = (1, 1);
        let mut least_off = f64::INFINITY;
        for &(columns, rows) in &self.grids {
            let off = (aspect_ratio - f64::from(columns) / f64::from(rows)).abs();
            // Equal floats are meant: the mirrored halves of a tie are computed alike.
            let is_tie = off.total_cmp(&least_off).is_eq();
            if off < least_off || (is_tie && 2 * area > tile_area * u128::from(columns * rows)) {
                (least_off, best) = (off, (columns, rows));
            }
        }
        best
    }
}

/// A side that may also be written as a list of two; `default` where it is missing.
fn square(config: &Fields<'_>, field: &str, default: u32) -> Result<u32, DataError> {
    match config.get(field) {
        None => Ok(default),
        Some(Value::Array(sides)) => match sides.as_slice() {
            [height, width] if height == width => side(height),
            _ => None,
        }
        .ok_or_else(|| config.error(field, "must be one whole number, or the same one twice".to_owned())),
        Some(_) => config.side(field).map(|side| side.unwrap_or(default)),
    }
}

/// Features of a tile of `tile_side` x `tile_side` patches after the pixel shuffle.
fn downsampled(config: &Fields<'_>, tile_side: u32) -> Result<u32, DataError> {
    let ratio = match config.get("downsample_ratio") {
        None => Some(0.5),
        Some(value) => value.as_f64(),
    };
    ratio
        .filter(|ratio| *ratio > 0.0 && *ratio <= 1.0 && f64::from(tile_side) % ratio == 0.0)
        .map(|ratio| f64::from(tile_side) * ratio)
        .filter(|side| *side >= 1.0 && side.fract() == 0.0)
        .map(|side| (side as u32) * (side as u32))
        .ok_or_else(|| {
            let rule = format!("must be from 0 to 1 and divide a tile of {tile_side} patches a side evenly");
            config.error("downsample_ratio", rule)
        })
}

/// `Ok` if `image_seq_length`, `default` where it is missing, is the model's own number of features.
fn seq_length_must_be(fields: &Fields<'_>, tile_features: u32, default: u32) -> Result<(), DataError> {
    let field = "image_seq_length";
    if fields.get(field).map_or(Some(u64::from(default)), Value::as_u64) == Some(u64::from(tile_features)) {
        return Ok(());
    }
    Err(fields.error(field, format!("must be {tile_features}, the features that the model makes of a tile")))
}

/// Every grid as (columns, rows), by number of tiles and then by columns (`get_all_supported_aspect_ratios`).
fn grids(preprocessor: &Fields<'_>, image_size: u32) -> Result<Vec<(u32, u32)>, DataError> {
    preprocessor.must_be(
        "image_processor_type",
        &["GotOcr2ImageProcessor", "GotOcr2ImageProcessorFast", "GotOcr2ImageProcessorPil"],
        true,
    )?;
    for field in ["size.height", "size.width"] {
        if preprocessor.side(field)?.unwrap_or(DEFAULT_TILE) != image_size {
            let rule = format!("the encoder reads tiles of {image_size} pixels");
            return Err(preprocessor.error(field, rule));
        }
    }
    if preprocessor.flag("do_resize")? == Some(false) {
        return Err(preprocessor.error("do_resize", "tiles must be resized to the encoder's size".to_owned()));
    }
    let count = |field: &str, default: u64| match preprocessor.get(field) {
        None => Ok(default),
        Some(value) => value.as_u64().filter(|count| *count <= u64::from(TILES_MAX)).ok_or_else(|| {
            preprocessor.error(field, format!("must be a whole number from 0 to {TILES_MAX}"))
        }),
    };
    let (min, max) = (count("min_patches", 1)? as u32, count("max_patches", 12)? as u32);
    let mut grids: Vec<(u32, u32)> = (1..=max)
        .flat_map(|columns| (1..=max / columns).map(move |rows| (columns, rows)))
        .filter(|(columns, rows)| columns * rows >= min)
        .collect();
    grids.sort_by_key(|(columns, rows)| columns * rows);
    Ok(grids)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn made(preprocessor: &Value) -> Result<InternVl, DataError> {
        let mut all = json!({"size": {"height": 448, "width": 448}});
        all.as_object_mut().unwrap().extend(preprocessor.as_object().unwrap().clone());
        of(json!({"model_type": "internvl"}), all)
    }

    fn of(config: Value, preprocessor: Value) -> Result<InternVl, DataError> {
        InternVl::from_files(&FamilyFiles { config, preprocessor, ..FamilyFiles::default() })
    }

    fn tiles(rule: &InternVl, height: u32, width: u32) -> u32 {
        rule.image(Size { height, width }, 1).unwrap().num_tiles
    }

    /// 1 x 1 to 3 x 4 by hand: a square smaller than half of 2 x 2 tiles stays one; 900 > sqrt(0.5) x 896 becomes 4,
    /// and 1,000 > sqrt(0.5) x 1,344 becomes 9; 1 : 3 becomes 3. A thumbnail comes on top of any but one.
    #[test]
    fn grids_by_hand() {
        let rule = made(&json!({})).unwrap();
        assert_eq!(tiles(&rule, 448, 448), 1);
        assert_eq!(tiles(&rule, 900, 900), 5);
        assert_eq!(tiles(&rule, 1000, 1000), 10);
        assert_eq!(tiles(&rule, 100, 300), 4);
        assert_eq!(tiles(&rule, 1, 5000), 13);
        let few = made(&json!({"max_patches": 1, "crop_to_patches": false})).unwrap();
        assert_eq!(tiles(&few, 1, 5000), 1);
        let none = made(&json!({"min_patches": 5, "max_patches": 4})).unwrap();
        assert_eq!(tiles(&none, 1, 5000), 1);
    }

    #[test]
    fn an_image_is_written_between_marks() {
        let shape = made(&json!({})).unwrap().image(Size { height: 100, width: 300 }, 2).unwrap();
        assert_eq!(shape.segments, [EncoderSegments::of(4, 1025)]);
        let text = |text: &str| Piece::Text(text.to_owned());
        assert_eq!(shape.pieces, [text("<img>"), Piece::Features(4 * 256), text("</img>")]);
    }

    #[test]
    fn each_frame_of_a_video_is_named() {
        let clip =
            Clip { size: Size { height: 9, width: 9 }, num_frames: 8, fps: Some(4.0), duration_s: Some(2.0) };
        let sampling = VideoSampling { max_frames: Some(2), fps: None };
        let shape = made(&json!({})).unwrap().video(&clip, sampling).unwrap();
        // Two halves of 4 frames, the middle of each.
        assert_eq!(shape.frame_indices, [2, 6]);
        assert_eq!(shape.num_tiles, 2);
        let text = |text: &str| Piece::Text(text.to_owned());
        assert_eq!(
            shape.pieces,
            [
                text("Frame1: <img>"),
                Piece::Features(256),
                text("</img>\nFrame2: <img>"),
                Piece::Features(256),
                text("</img>")
            ]
        );
    }

    #[test]
    fn fields_that_disagree_are_named() {
        let with = |more: Value| {
            let mut config = json!({"model_type": "internvl"});
            config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            config
        };
        let sound = json!({"size": {"height": 448, "width": 448}});
        let cases = [
            (with(json!({"vision_feature_select_strategy": "full"})), sound.clone(), "must be \"default\""),
            (with(json!({"vision_config": {"image_size": [448, 224]}})), sound.clone(), "the same one twice"),
            (
                with(json!({"vision_config": {"image_size": 14}})),
                sound.clone(),
                "`downsample_ratio` is missing",
            ),
            (with(json!({"downsample_ratio": 0.0})), sound.clone(), "`downsample_ratio` is 0.0"),
            (with(json!({"image_seq_length": 255})), sound.clone(), "`image_seq_length` is 255, must be 256"),
            (with(json!({})), json!({}), "`size.height` is missing"),
            (
                with(json!({})),
                json!({"image_processor": sound, "image_seq_length": 64}),
                "`processor_config.json`: `image_seq_length` is 64",
            ),
            (
                with(json!({})),
                json!({"size": {"height": 448, "width": 448}, "max_patches": 5000}),
                "`max_patches` is 5000",
            ),
        ];
        for (config, preprocessor, expected) in cases {
            let error = of(config, preprocessor).unwrap_err().to_string();
            assert!(error.contains(expected), "{expected}: {error}");
        }
    }

    #[test]
    fn a_downsample_ratio_other_than_a_half_is_taken() {
        let config = json!({"model_type": "internvl", "downsample_ratio": 0.25});
        let preprocessor = json!({"size": {"height": 448, "width": 448}});
        let rule = of(config, preprocessor).unwrap();
        assert_eq!(rule.image(Size { height: 9, width: 9 }, 1).unwrap().feature_tokens(), 64);
    }
}
