//! The shape rule of LLaVA-OneVision: anyres tiles of a `SigLIP` encoder, unpadded, shrunk and broken into rows.
//!
//! One image alone:
//!
//! ```text
//! (height, width) -> best pinpoint -> base tile + grid of tiles (each (S / p)^2 encoder tokens)
//!                                  -> grid of features, padding cut off -> shrunk to anyres_max_N tiles
//!                                  -> one newline a row                 -> + the features of the base tile
//! ```
//!
//! An image among several is one tile and one newline; a video is one tile a frame, pooled 2 x 2, and one newline
//! at its end. The arithmetic, floats and their rounding included, is that of Hugging Face transformers 5.23.0:
//! `select_best_resolution`, `LlavaOnevisionProcessor._get_unpadded_features` and
//! `LlavaOnevisionModel.pack_image_features`. `fixtures/shapes` holds what those return.
//!
//! The newline after a video is the same in every version: 5.17 adds it in the model's `forward`, 5.23 already in
//! `get_video_features`, and the processors of both versions count it.

use super::anyres::{Pinpoints, floor_divide, unpadded};
use super::fields::{CONFIG, Fields, PREPROCESSOR, SIDE_MAX, processor_fields};
use super::llava_onevision_video::VideoRefusal;
use super::{
    Clip, FRAMES_MAX, Family, FamilyFiles, Marks, MediaShape, Piece, Size, Sound, VideoSampling, image_words,
    refused, uniform_frames, unread,
};
use crate::DataError;
use crate::media::MediaKind;
use dflop_types::{EncoderParts, EncoderSegments};
use serde_json::Value;

const FAMILY: &str = "llava_onevision";
/// Frames are pooled by this many features each way (`apply_pooling`); no field of the configuration sets it.
const VIDEO_POOL_STRIDE: u32 = 2;
/// The side of a tile where nothing says otherwise (SigLIP-SO400M 384/14).
const DEFAULT_IMAGE_SIZE: u32 = 384;
/// The default pinpoints are all pairs of 1 to this many tiles.
const DEFAULT_PINPOINT_TILES: u32 = 6;

/// The shape rule of a LLaVA-OneVision model.
///
/// *Invariants* (checked by [`LlavaOnevision::from_config`]): `1 <= patch_size <= image_size`; at least one
/// pinpoint; each side of a pinpoint is a multiple of `image_size`; `max_tiles >= 1`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LlavaOnevision {
    image_size: u32,
    patch_size: u32,
    grid_pinpoints: Pinpoints,
    max_tiles: u32,
    video_refusal: VideoRefusal,
}

/// What one image or video costs, in tiles of one size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TileShape {
    /// Tiles of `pixel_values`, base tile included; frames of a video.
    pub num_tiles: u32,
    /// What the encoder reads: one segment a tile.
    pub segments: EncoderSegments,
    /// LLM tokens it fills, newline tokens included.
    pub feature_tokens: u32,
}

impl From<TileShape> for MediaShape {
    fn from(tiles: TileShape) -> Self {
        Self {
            num_tiles: tiles.num_tiles,
            segments: vec![tiles.segments],
            pieces: vec![Piece::Features(tiles.feature_tokens)],
            frame_indices: Vec::new(),
            parts: Vec::new(),
            patches: None,
            first_patches: None,
            last_patches: None,
        }
    }
}

/// Frames read of a video where nothing is asked: those of LLaVA-OneVision's training.
const DEFAULT_MAX_FRAMES: u32 = 32;

impl Family for LlavaOnevision {
    fn name(&self) -> &str {
        FAMILY
    }

    fn marks(&self, kind: MediaKind) -> Option<Marks> {
        let (token, id_fields): (&str, &'static [&'static str]) = match kind {
            MediaKind::Image => ("<image>", &["image_token_index", "image_token_id"]),
            MediaKind::Video => ("<video>", &["video_token_index", "video_token_id"]),
            MediaKind::Audio => return None,
        };
        Some(Marks {
            placeholder: token.to_owned(),
            feature_token: token.to_owned(),
            id_fields,
            number: None,
        })
    }

    fn image(&self, size: Size, num_images: usize) -> Result<MediaShape, DataError> {
        let shape = match num_images {
            1 => self.image(size.height, size.width),
            _ => self.image_among_several(size.height, size.width),
        };
        shape.map(MediaShape::from)
    }

    fn video(&self, clip: &Clip, sampling: VideoSampling) -> Result<MediaShape, DataError> {
        if let Some(rule) = self.video_refusal.of(sampling) {
            return Err(refused(FAMILY, format!("a video of {} frames", clip.num_frames), rule));
        }
        let max = sampling.max_frames.unwrap_or(DEFAULT_MAX_FRAMES);
        if max > FRAMES_MAX {
            let media = format!("a video of which {max} frames are asked");
            return Err(refused(FAMILY, media, &format!("at most {FRAMES_MAX} frames are read of one")));
        }
        let frame_indices = uniform_frames(clip.num_frames, max, sampling.fps.zip(clip.duration_s));
        let shape = self.video(frame_indices.len() as u32)?;
        // A frame is a part; the newline after the video goes with its last frame.
        let frame = |count, newlines| EncoderParts {
            count,
            segments: 1,
            feature_tokens: self.frame_tokens() + newlines,
        };
        let parts = match shape.num_tiles {
            1 => vec![frame(1, 1)],
            frames => vec![frame(frames - 1, 0), frame(1, 1)],
        };
        Ok(MediaShape { frame_indices, parts, ..shape.into() })
    }

    fn audio(&self, _: &Sound) -> Result<MediaShape, DataError> {
        Err(unread(FAMILY, "a sound"))
    }
}

impl LlavaOnevision {
    /// [`LlavaOnevision::from_config`], with what the video processor's fields say of videos.
    ///
    /// # Errors
    /// As there, and for a field of the video processor of another kind than transformers takes.
    pub fn from_files(files: &FamilyFiles) -> Result<Self, DataError> {
        let rule = Self::from_config(&files.config, &files.preprocessor)?;
        Ok(Self { video_refusal: VideoRefusal::read(files, rule.image_size)?, ..rule })
    }

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
    /// use dflop_data::family::LlavaOnevision;
    /// let config = serde_json::json!({"model_type": "llava_onevision"});
    /// let rule = LlavaOnevision::from_config(&config, &serde_json::json!({}))?;
    /// let shape = rule.image(480, 640)?;
    /// assert_eq!((shape.num_tiles, shape.segments.tokens, shape.feature_tokens), (5, 729, 2_929));
    /// # Ok::<(), dflop_data::DataError>(())
    /// ```
    pub fn from_config(config_json: &Value, preprocessor_json: &Value) -> Result<Self, DataError> {
        let config = Fields { file: CONFIG, object: config_json };
        let preprocessor = Fields {
            file: PREPROCESSOR,
            object: preprocessor_json.get("image_processor").unwrap_or(preprocessor_json),
        };
        config.must_be("model_type", &[FAMILY], false)?;
        config.must_be("vision_config.model_type", &["siglip_vision_model"], true)?;
        config.must_be("vision_feature_select_strategy", &["full"], true)?;
        preprocessor.must_be(
            "image_processor_type",
            &[
                "LlavaOnevisionImageProcessor",
                "LlavaOnevisionImageProcessorFast",
                "LlavaOnevisionImageProcessorPil",
            ],
            true,
        )?;

        // A vision configuration without sizes has those of SigLIP base; none at all is SigLIP-SO400M 384/14.
        let base = if config.get("vision_config").is_some() { (224, 16) } else { (DEFAULT_IMAGE_SIZE, 14) };
        let image_size = config.side("vision_config.image_size")?.unwrap_or(base.0);
        let patch_size = config.side("vision_config.patch_size")?.unwrap_or(base.1);
        if patch_size > image_size {
            return Err(
                config.error("vision_config.patch_size", format!("larger than the image size {image_size}"))
            );
        }
        for field in
            ["size.height", "size.width", "size.shortest_edge", "crop_size.height", "crop_size.width"]
        {
            if preprocessor.side(field)?.is_some_and(|side| side != image_size) {
                return Err(
                    preprocessor.error(field, format!("the encoder reads tiles of {image_size} pixels"))
                );
            }
        }
        if preprocessor.get("size").is_none() && image_size != DEFAULT_IMAGE_SIZE {
            return Err(preprocessor.error("size", format!("the encoder reads tiles of {image_size} pixels")));
        }

        let default = default_pinpoints();
        let grid_pinpoints = Pinpoints::read(&config, image_size, &default)?;
        if Pinpoints::read(&preprocessor, image_size, &default)? != grid_pinpoints {
            let rule = format!("`{CONFIG}` has other pinpoints, the model would misread the tiles");
            return Err(preprocessor.error("image_grid_pinpoints", rule));
        }
        let aspect_ratio = match config.get("vision_aspect_ratio") {
            None => "anyres_max_9",
            Some(value) => value.as_str().unwrap_or_default(),
        };
        let max_tiles = aspect_ratio
            .strip_prefix("anyres_max_")
            .filter(|digits| digits.bytes().all(|b| b.is_ascii_digit()))
            .and_then(|digits| digits.parse().ok())
            .filter(|tiles| (1..=SIDE_MAX).contains(tiles))
            .ok_or_else(|| {
                config.error("vision_aspect_ratio", "must be `anyres_max_N`, N at least 1".to_owned())
            })?;
        let video_refusal = VideoRefusal::default();
        let rule = Self { image_size, patch_size, grid_pinpoints, max_tiles, video_refusal };
        match processor_fields(preprocessor_json) {
            Some(processor) => rule.must_be_of(&processor).map(|()| rule),
            None => Ok(rule),
        }
    }

    /// `Ok` if the processor counts tokens as the model has them.
    fn must_be_of(&self, processor: &Fields<'_>) -> Result<(), DataError> {
        processor.must_be("vision_feature_select_strategy", &["full"], true)?;
        let (field, side) = ("num_image_tokens", u64::from(self.image_size / self.patch_size));
        if processor.get(field).and_then(Value::as_u64) != Some(side * side) {
            return Err(processor.error(field, format!("must be {}, the patches of a tile", side * side)));
        }
        let (field, wanted) = ("vision_aspect_ratio", format!("anyres_max_{}", self.max_tiles));
        if processor.get(field).map_or(Some("anyres_max_9"), Value::as_str) != Some(wanted.as_str()) {
            return Err(processor.error(field, format!("must be \"{wanted}\", as the model has it")));
        }
        Ok(())
    }

    /// Side of a tile, in pixels.
    pub const fn image_size(&self) -> u32 {
        self.image_size
    }

    /// Side of a patch, in pixels.
    pub const fn patch_size(&self) -> u32 {
        self.patch_size
    }

    /// Sizes a single image may be fitted into, as (height, width) in pixels, in the order of the configuration.
    pub fn grid_pinpoints(&self) -> &[(u32, u32)] {
        self.grid_pinpoints.as_slice()
    }

    /// N of `anyres_max_N`: features beyond those of about N tiles are shrunk away.
    pub const fn max_tiles(&self) -> u32 {
        self.max_tiles
    }

    /// Encoder tokens of one tile, in patches.
    pub const fn tile_tokens(&self) -> u32 {
        self.tile_side() * self.tile_side()
    }

    /// LLM tokens of one video frame, without the newline at the end of the video.
    pub const fn frame_tokens(&self) -> u32 {
        let side = self.tile_side().div_ceil(VIDEO_POOL_STRIDE);
        side * side
    }

    /// The shape of an image that is alone in its sample; sizes in pixels, as displayed.
    ///
    /// *Complexity*: O(pinpoints).
    ///
    /// # Errors
    /// [`DataError::Shape`] for a side of 0, and where shrinking to `max_tiles` leaves no feature.
    pub fn image(&self, height: u32, width: u32) -> Result<TileShape, DataError> {
        let refuse = |rule: &str| refused(FAMILY, image_words(height, width), rule);
        if height == 0 || width == 0 {
            return Err(refuse("both sides must be at least 1"));
        }
        let (best_height, best_width) = self.grid_pinpoints.best(height, width);
        let grid = (best_height / self.image_size, best_width / self.image_size);
        let (rows, columns) = self.kept(height, width, grid);
        // A newline ends each row of the grid; the base tile has none.
        let feature_tokens = rows * columns + rows + self.tile_tokens();
        if rows == 0 || columns == 0 {
            return Err(refuse("no feature is left of it; the model refuses it too"));
        }
        Ok(self.shape(grid.0 * grid.1 + 1, feature_tokens))
    }

    /// The shape of one of several images of a sample: one tile, padded to a square, and one newline token.
    ///
    /// # Errors
    /// [`DataError::Shape`] for a side of 0.
    pub fn image_among_several(&self, height: u32, width: u32) -> Result<TileShape, DataError> {
        if height == 0 || width == 0 {
            return Err(refused(FAMILY, image_words(height, width), "both sides must be at least 1"));
        }
        Ok(self.shape(1, self.tile_tokens() + 1))
    }

    /// The shape of a video of which `num_frames` frames are read: one tile a frame, pooled, and one newline token.
    ///
    /// # Errors
    /// [`DataError::Shape`] for no frame, and for so many that tokens do not fit in 32 bits.
    pub fn video(&self, num_frames: u32) -> Result<TileShape, DataError> {
        let refuse = |rule: &str| refused(FAMILY, format!("a video of {num_frames} frames"), rule);
        if num_frames == 0 {
            return Err(refuse("at least 1 frame must be read"));
        }
        let feature_tokens = num_frames
            .checked_mul(self.frame_tokens())
            .and_then(|tokens| tokens.checked_add(1))
            .ok_or_else(|| refuse("its LLM tokens must be fewer than 2^32"))?;
        Ok(self.shape(num_frames, feature_tokens))
    }

    const fn shape(&self, num_tiles: u32, feature_tokens: u32) -> TileShape {
        let segments = EncoderSegments::of(num_tiles, self.tile_tokens());
        TileShape { num_tiles, segments, feature_tokens }
    }

    const fn tile_side(&self) -> u32 {
        self.image_size / self.patch_size
    }

    /// Rows and columns of features that an image keeps of its grid of tiles (`_get_unpadded_features`).
    fn kept(&self, height: u32, width: u32, grid: (u32, u32)) -> (u32, u32) {
        let (rows, columns) = unpadded(height, width, grid, self.tile_side());
        let features_max = u64::from(self.max_tiles) * u64::from(self.tile_tokens());
        let ratio = ((u64::from(rows) * u64::from(columns)) as f64 / features_max as f64).sqrt();
        if ratio > 1.1 {
            (floor_divide(f64::from(rows), ratio), floor_divide(f64::from(columns), ratio))
        } else {
            (rows, columns)
        }
    }
}

/// The 36 pinpoints of transformers.
fn default_pinpoints() -> Vec<(u32, u32)> {
    let sides = || (1..=DEFAULT_PINPOINT_TILES).map(|tiles| tiles * DEFAULT_IMAGE_SIZE);
    sides().flat_map(|height| sides().map(move |width| (height, width))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn real() -> LlavaOnevision {
        LlavaOnevision::from_config(&json!({"model_type": "llava_onevision"}), &json!({})).unwrap()
    }

    /// 384 x 384: one tile and the base tile; 27 rows of 27 with a newline each, and 729.
    #[test]
    fn a_square_of_one_tile_by_hand() {
        let shape = real().image(384, 384).unwrap();
        assert_eq!(shape.num_tiles, 2);
        assert_eq!(shape.segments, EncoderSegments::of(2, 729));
        assert_eq!(shape.feature_tokens, 27 * 28 + 729);
    }

    /// 480 x 640 fits 768 x 768 at scale 1.2: 40.5 of 54 rows are image; 54 - 2 * ((54 - 40) / 2) = 40 stay.
    #[test]
    fn padding_is_cut_off_by_hand() {
        let shape = real().image(480, 640).unwrap();
        assert_eq!((shape.num_tiles, shape.feature_tokens), (5, 40 * 55 + 729));
    }

    /// 2304 x 2304: 162 x 162 features are shrunk by sqrt(36 / 9) = 2 to 81 x 81.
    #[test]
    fn many_tiles_are_shrunk_by_hand() {
        let shape = real().image(2304, 2304).unwrap();
        assert_eq!((shape.num_tiles, shape.feature_tokens), (37, 81 * 82 + 729));
    }

    #[test]
    fn several_images_and_video_by_hand() {
        let several = real().image_among_several(100, 3000).unwrap();
        assert_eq!((several.num_tiles, several.feature_tokens), (1, 730));
        let video = real().video(32).unwrap();
        assert_eq!((video.num_tiles, video.feature_tokens), (32, 32 * 196 + 1));
        assert_eq!(video.segments.count * video.segments.tokens, 32 * 729);
    }

    /// No pinpoint keeps a pixel of 1 x 100000; the smallest is taken, and one row of its 27 stays.
    #[test]
    fn a_line_of_pixels_by_hand() {
        let shape = real().image(1, 100_000).unwrap();
        assert_eq!((shape.num_tiles, shape.feature_tokens), (2, 27 + 1 + 729));
    }

    #[test]
    fn what_the_processor_refuses_is_refused() {
        let rule = real();
        let error = rule.image(0, 100).unwrap_err().to_string();
        assert_eq!(
            error,
            "no llava_onevision shape for an image of 0 x 100 pixels (height x width): both sides must be at least 1"
        );
        assert!(rule.image(0, 5).is_err() && rule.image_among_several(5, 0).is_err());
        assert!(rule.video(0).is_err() && rule.video(u32::MAX).is_err());
    }

    #[test]
    fn what_processor_and_model_would_read_differently_is_refused() {
        let config = json!({
            "model_type": "llava_onevision",
            "vision_config": {"model_type": "siglip_vision_model", "image_size": 126, "patch_size": 14},
            "image_grid_pinpoints": [[126, 126], [126, 252], [252, 126]],
        });
        let preprocessor = json!({
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "size": {"height": 126, "width": 126},
            "image_grid_pinpoints": [[126, 126], [126, 252], [252, 126]],
        });
        let rule = LlavaOnevision::from_config(&config, &preprocessor).unwrap();
        assert_eq!((rule.image_size(), rule.patch_size(), rule.max_tiles()), (126, 14, 9));
        assert_eq!(rule.grid_pinpoints(), [(126, 126), (126, 252), (252, 126)]);
        let nested = json!({"image_processor": preprocessor, "num_image_tokens": 81});
        assert_eq!(LlavaOnevision::from_config(&config, &nested).unwrap(), rule);

        let with = |file: &Value, field: &str, value: Value| {
            let mut file = file.clone();
            file[field] = value;
            file
        };
        let cases = [
            (
                with(&config, "model_type", json!("llava_next")),
                preprocessor.clone(),
                "`model_type` is \"llava_next\"",
            ),
            (
                with(&config, "vision_aspect_ratio", json!("anyres")),
                preprocessor.clone(),
                "`vision_aspect_ratio`",
            ),
            (
                with(&config, "vision_feature_select_strategy", json!("default")),
                preprocessor.clone(),
                "\"full\"",
            ),
            (
                with(&config, "image_grid_pinpoints", json!([[126, 126]])),
                preprocessor.clone(),
                "other pinpoints",
            ),
            (with(&config, "image_grid_pinpoints", json!([[126, 100]])), preprocessor.clone(), "multiple"),
            (
                with(&config, "vision_config", json!({"image_size": -3})),
                preprocessor.clone(),
                "from 1 to 32768",
            ),
            (
                config.clone(),
                with(&preprocessor, "size", json!({"height": 384, "width": 384})),
                "`size.height` is 384",
            ),
            (config.clone(), with(&preprocessor, "size", Value::Null), "`size` is null"),
            (
                config.clone(),
                with(&preprocessor, "image_processor_type", json!("CLIPImageProcessor")),
                "`image_processor_type`",
            ),
        ];
        // Fields of the processor that holds the image processor.
        let processors = [
            (with(&config, "vision_aspect_ratio", json!("anyres_max_4")), nested.clone(), "\"anyres_max_4\""),
            (config.clone(), with(&nested, "num_image_tokens", json!(729)), "must be 81"),
            (config, with(&nested, "vision_feature_select_strategy", json!("default")), "\"full\""),
        ];
        for (config, preprocessor, expected) in cases.into_iter().chain(processors) {
            let error = LlavaOnevision::from_config(&config, &preprocessor).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
