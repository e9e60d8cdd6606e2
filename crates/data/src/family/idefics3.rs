//! The shape rule of Idefics3 and SmolVLM: an image enlarged, cut into a grid of tiles, and seen once as a whole.
//!
//! ```text
//! (height, width) -> longest edge = `size` -> each side up to a multiple of S -> rows x columns tiles, and the whole
//! each tile or frame: (S / p)^2 encoder tokens -> (S / p / scale_factor)^2 features
//! image: <fake_token_around_image><row_1_col_1> features ... \n ... \n<fake_token_around_image><global-img> features ...
//! ```
//!
//! If the image is then no larger than a tile, it is one tile. With `do_image_splitting: false` every image is one tile.
//! SmolVLM reads videos too ([`super::smolvlm_video`]). The arithmetic is that of Hugging Face transformers 5.23.0, with its
//! floats and their rounding: `Idefics3ImageProcessor`, `SmolVLMImageProcessor` and their processors.

use super::fields::{CONFIG, Fields, VIDEO_PREPROCESSOR, image_fields, processor_fields};
use super::smolvlm_video::FrameRule;
use super::{
    Clip, Family, FamilyFiles, Marks, MediaShape, Piece, Size, Sound, VideoSampling, image_words, refused,
    unread,
};
use crate::DataError;
use crate::media::MediaKind;
use dflop_types::{EncoderParts, EncoderSegments};
use serde_json::Value;

/// The family that reads images alone, and the one that reads videos too.
const FAMILIES: [&str; 2] = ["idefics3", "smolvlm"];
/// No image is enlarged beyond it, in pixels.
const EDGE_MAX: u32 = 4096;
/// Side of a tile where the image processor names none, in pixels, and tiles along the longest edge.
const DEFAULT_TILE: u32 = 364;
const DEFAULT_TILES: u32 = 4;
/// What stands before each tile and after the last.
const FAKE: &str = "<fake_token_around_image>";
/// The published tokenizers know the places of a grid of as many rows and columns.
const PLACES_MAX: u32 = 6;
/// What stands before the tile that shows the whole.
const GLOBAL: &str = "<global-img>";

/// The shape rule of an Idefics3 or SmolVLM model.
///
/// *Invariants* (checked by [`Idefics3::from_files`]): `tile_features >= 1`, `tile >= 1`.
#[derive(Debug, Clone, PartialEq)]
pub struct Idefics3 {
    family: &'static str,
    tile: u32,
    tile_tokens: u32,
    tile_features: u32,
    /// What the longest edge of an image is scaled to; `None`: it keeps its size.
    longest_edge: Option<u32>,
    is_split: bool,
    /// `None` where the family reads no videos.
    frames: Option<FrameRule>,
}

impl Family for Idefics3 {
    fn name(&self) -> &str {
        self.family
    }

    fn marks(&self, kind: MediaKind) -> Option<Marks> {
        let placeholder = match kind {
            MediaKind::Image => "<image>",
            MediaKind::Video if self.frames.is_some() => "<video>",
            _ => return None,
        };
        Some(Marks {
            placeholder: placeholder.to_owned(),
            feature_token: "<image>".to_owned(),
            id_fields: &["image_token_id"],
            number: None,
        })
    }

    fn special_texts(&self) -> Vec<String> {
        let places = (1..=PLACES_MAX)
            .flat_map(|row| (1..=PLACES_MAX).map(move |column| format!("<row_{row}_col_{column}>")));
        [FAKE, GLOBAL].map(str::to_owned).into_iter().chain(places).collect()
    }

    fn image(&self, size: Size, _num_images: usize) -> Result<MediaShape, DataError> {
        if size.height == 0 || size.width == 0 {
            let media = image_words(size.height, size.width);
            return Err(refused(self.family, media, "both sides must be at least 1"));
        }
        let (rows, columns) = self.grid(size);
        let mut pieces = Vec::with_capacity(2 * (rows * columns) as usize + 3);
        let mut before = String::new();
        for row in 1..=rows {
            for column in 1..=columns {
                pieces.push(Piece::Text(format!("{before}{FAKE}<row_{row}_col_{column}>")));
                pieces.push(Piece::Features(self.tile_features));
                before.clear();
            }
            before.push('\n');
        }
        let before = if rows == 0 { "" } else { "\n\n" };
        pieces.push(Piece::Text(format!("{before}{FAKE}{GLOBAL}")));
        pieces.push(Piece::Features(self.tile_features));
        pieces.push(Piece::Text(FAKE.to_owned()));
        Ok(self.shape(rows * columns + 1, pieces, Vec::new()))
    }

    fn video(&self, clip: &Clip, sampling: VideoSampling) -> Result<MediaShape, DataError> {
        let Some(frames) = &self.frames else { return Err(unread(self.family, "a video")) };
        let chosen = frames
            .choose(clip, sampling)
            .map_err(|rule| refused(self.family, format!("a video of {} frames", clip.num_frames), &rule))?;
        let mut pieces = Vec::with_capacity(2 * chosen.stamps.len() + 1);
        let mut before = chosen.intro;
        for stamp in chosen.stamps {
            pieces.push(Piece::Text(format!("{before}\nFrame from {stamp}:{FAKE}{GLOBAL}")));
            pieces.push(Piece::Features(self.tile_features));
            FAKE.clone_into(&mut before);
        }
        pieces.push(Piece::Text(format!("{FAKE}\n\n")));
        Ok(self.shape(chosen.indices.len() as u32, pieces, chosen.indices))
    }

    fn audio(&self, _: &Sound) -> Result<MediaShape, DataError> {
        Err(unread(self.family, "a sound"))
    }
}

impl Idefics3 {
    /// The rule for a model's files: `config.json`, `preprocessor_config.json` (or a `processor_config.json` that holds
    /// the image processor's fields under `image_processor`), and those of the video processor.
    ///
    /// A missing field has the value that transformers gives it. If there are no settings for videos, the settings for images
    /// count, as in transformers.
    ///
    /// # Errors
    /// [`DataError::Config`] at the first field for which the processor and the model would disagree, or that this rule
    /// does not cover.
    ///
    /// # Examples
    /// ```
    /// use dflop_data::family::{Family as _, FamilyFiles, Idefics3, Size};
    /// let config = serde_json::json!({
    ///     "model_type": "idefics3", "vision_config": {"image_size": 364, "patch_size": 14}, "scale_factor": 2,
    /// });
    /// let preprocessor = serde_json::json!({"size": {"longest_edge": 1456}, "max_image_size": {"longest_edge": 364}});
    /// let rule = Idefics3::from_files(&FamilyFiles { config, preprocessor, ..FamilyFiles::default() })?;
    /// let shape = rule.image(Size { height: 480, width: 640 }, 1)?;
    /// assert_eq!((shape.num_tiles, shape.segments[0].tokens, shape.feature_tokens()), (13, 676, 13 * 169));
    /// # Ok::<(), dflop_data::DataError>(())
    /// ```
    pub fn from_files(files: &FamilyFiles) -> Result<Self, DataError> {
        let config = Fields { file: CONFIG, object: &files.config };
        config.must_be("model_type", &FAMILIES, false)?;
        let family = if files.config["model_type"] == FAMILIES[1] { FAMILIES[1] } else { FAMILIES[0] };
        let tile = config.side("vision_config.image_size")?.unwrap_or(224);
        let patch = config.side("vision_config.patch_size")?.unwrap_or(32);
        if patch > tile {
            return Err(
                config.error("vision_config.patch_size", format!("larger than the image size {tile}"))
            );
        }
        let side = tile / patch;
        let scale = config.side("scale_factor")?.unwrap_or(2);
        if !side.is_multiple_of(scale) {
            let rule = format!("must divide a tile of {side} patches a side");
            return Err(config.error("scale_factor", rule));
        }
        let tile_features = (side / scale) * (side / scale);
        if let Some(processor) = processor_fields(&files.preprocessor) {
            let field = "image_seq_len";
            let found = processor.get(field).map_or(Some(169), Value::as_u64);
            if found != Some(u64::from(tile_features)) {
                let rule = format!("must be {tile_features}, the features that the model makes of a tile");
                return Err(processor.error(field, rule));
            }
        }
        let preprocessor = image_fields(&files.preprocessor);
        let of_videos = [
            files
                .preprocessor
                .get("video_processor")
                .map(|object| Fields { file: VIDEO_PREPROCESSOR, object }),
            Some(Fields { file: VIDEO_PREPROCESSOR, object: &files.video_preprocessor }),
        ];
        let is_told =
            |fields: &Fields<'_>| fields.object.as_object().is_some_and(|object| !object.is_empty());
        let of_videos = of_videos.into_iter().flatten().find(is_told);
        let of_videos = of_videos.as_ref().unwrap_or(&preprocessor);
        let file = files.names.of(of_videos.file);
        let frames = (family == FAMILIES[1]).then(|| FrameRule::read(of_videos, file, tile)).transpose()?;
        Self {
            family,
            tile,
            tile_tokens: side * side,
            tile_features,
            longest_edge: None,
            is_split: true,
            frames,
        }
        .with_images(&preprocessor)
    }

    /// What the image processor's fields say of images.
    fn with_images(self, preprocessor: &Fields<'_>) -> Result<Self, DataError> {
        let names = ["Idefics3", "SmolVLM"]
            .map(|family| ["", "Fast", "Pil"].map(|backend| format!("{family}ImageProcessor{backend}")));
        let names: Vec<&str> = names.iter().flatten().map(String::as_str).collect();
        preprocessor.must_be("image_processor_type", &names, true)?;
        let field = "max_image_size.longest_edge";
        if preprocessor.side(field)?.unwrap_or(DEFAULT_TILE) != self.tile {
            return Err(preprocessor.error(field, format!("the encoder reads tiles of {} pixels", self.tile)));
        }
        let longest_edge = if preprocessor.flag("do_resize")?.unwrap_or(true) {
            let field = "size.longest_edge";
            if preprocessor.get("size").is_some() && preprocessor.get(field).is_none() {
                return Err(preprocessor.error(field, "images are scaled by their longest edge".to_owned()));
            }
            Some(preprocessor.side(field)?.unwrap_or(DEFAULT_TILES * DEFAULT_TILE))
        } else {
            None
        };
        let is_split = preprocessor.flag("do_image_splitting")?.unwrap_or(true);
        Ok(Self { longest_edge, is_split, ..self })
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

    /// Rows and columns of tiles beside the whole; none where the whole is all.
    fn grid(&self, size: Size) -> (u32, u32) {
        if !self.is_split {
            return (0, 0);
        }
        let (height, width) =
            self.longest_edge.map_or((size.height, size.width), |edge| enlarged(size, edge));
        let up = |side: u32| side.div_ceil(self.tile);
        let aspect_ratio = f64::from(width) / f64::from(height);
        let (rows, columns) = if width >= height {
            let columns = up(width);
            (up((f64::from(columns * self.tile) / aspect_ratio) as u32), columns)
        } else {
            let rows = up(height);
            (rows, up((f64::from(rows * self.tile) * aspect_ratio) as u32))
        };
        if rows > 1 || columns > 1 { (rows, columns) } else { (0, 0) }
    }
}

/// Sides with the longest scaled to `edge`, the other made even, and both at most [`EDGE_MAX`]
/// (`get_resize_output_image_size`).
fn enlarged(size: Size, edge: u32) -> (u32, u32) {
    let (height, width) = (f64::from(size.height), f64::from(size.width));
    let even = |scaled: f64| {
        let whole = scaled as u32;
        (whole + whole % 2).max(1)
    };
    let aspect_ratio = width / height;
    let (height, width) = if width >= height {
        (even(f64::from(edge) / aspect_ratio), edge)
    } else {
        (edge, even(f64::from(edge) * aspect_ratio))
    };
    let aspect_ratio = f64::from(width) / f64::from(height);
    let most = f64::from(EDGE_MAX);
    if width >= height && width > EDGE_MAX {
        (((most / aspect_ratio) as u32).max(1), EDGE_MAX)
    } else if height > width && height > EDGE_MAX {
        (EDGE_MAX, ((most * aspect_ratio) as u32).max(1))
    } else {
        (height, width)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn made(family: &str, more: &Value) -> Result<Idefics3, DataError> {
        let mut preprocessor =
            json!({"size": {"longest_edge": 1456}, "max_image_size": {"longest_edge": 364}});
        preprocessor.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let config = json!({"model_type": family, "vision_config": {"image_size": 364, "patch_size": 14}});
        Idefics3::from_files(&FamilyFiles { config, preprocessor, ..FamilyFiles::default() })
    }

    fn grid(rule: &Idefics3, height: u32, width: u32) -> (u32, u32) {
        rule.grid(Size { height, width })
    }

    /// 1456 / 364 = 4 tiles along the longest edge; a square has 4 x 4, 1 : 2 has 2 x 4, a line of pixels 1 x 4.
    #[test]
    fn grids_by_hand() {
        let rule = made("idefics3", &json!({})).unwrap();
        assert_eq!(grid(&rule, 10, 10), (4, 4));
        assert_eq!(grid(&rule, 500, 1000), (2, 4));
        assert_eq!(grid(&rule, 1, 5000), (1, 4));
        assert_eq!(grid(&rule, 5000, 1), (4, 1));
        // 4096 / 364 = 11.3 tiles.
        let huge = made("idefics3", &json!({"size": {"longest_edge": 30_000}})).unwrap();
        assert_eq!(grid(&huge, 10, 10), (12, 12));
        let kept = made("idefics3", &json!({"do_resize": false})).unwrap();
        assert_eq!((grid(&kept, 364, 364), grid(&kept, 365, 300)), ((0, 0), (2, 2)));
        let whole = made("idefics3", &json!({"do_image_splitting": false})).unwrap();
        assert_eq!(grid(&whole, 5000, 5000), (0, 0));
    }

    #[test]
    fn tiles_are_named_by_row_and_column() {
        let rule = made("idefics3", &json!({"size": {"longest_edge": 728}})).unwrap();
        let shape = rule.image(Size { height: 1, width: 2 }, 1).unwrap();
        assert_eq!(shape.segments, [EncoderSegments::of(3, 676)]);
        let text = |text: &str| Piece::Text(text.to_owned());
        let features = Piece::Features(169);
        assert_eq!(
            shape.pieces,
            [
                text("<fake_token_around_image><row_1_col_1>"),
                features.clone(),
                text("<fake_token_around_image><row_1_col_2>"),
                features.clone(),
                text("\n\n<fake_token_around_image><global-img>"),
                features,
                text("<fake_token_around_image>"),
            ]
        );
        let two_rows = rule.image(Size { height: 2, width: 2 }, 1).unwrap();
        assert_eq!(two_rows.pieces[4], text("\n<fake_token_around_image><row_2_col_1>"));
    }

    #[test]
    fn only_one_of_the_two_reads_videos_and_none_sounds() {
        let clip =
            Clip { size: Size { height: 9, width: 9 }, num_frames: 3, fps: Some(1.0), duration_s: Some(3.0) };
        let images = made("idefics3", &json!({})).unwrap();
        assert_eq!(images.marks(MediaKind::Video), None);
        assert!(images.video(&clip, VideoSampling::default()).is_err());
        let videos = made("smolvlm", &json!({})).unwrap();
        assert_eq!(videos.video(&clip, VideoSampling::default()).unwrap().num_tiles, 3);
        assert!(videos.audio(&Sound { duration_s: 1.0, sample_rate: 16_000 }).is_err());
        assert!(videos.image(Size { height: 0, width: 5 }, 1).is_err());
    }

    #[test]
    fn fields_that_disagree_are_named() {
        let cases = [
            (json!({"max_image_size": {"longest_edge": 512}}), "`max_image_size.longest_edge` is 512"),
            (json!({"size": {"height": 364, "width": 364}}), "`size.longest_edge` is missing"),
            (json!({"image_processor_type": "ViTImageProcessor"}), "`image_processor_type`"),
            (json!({"do_image_splitting": 1}), "`do_image_splitting` is 1"),
            (json!({"image_processor": {}, "image_seq_len": 64}), "`image_seq_len` is 64, must be 169"),
        ];
        for (more, expected) in cases {
            let error = made("idefics3", &more).unwrap_err().to_string();
            assert!(error.contains(expected), "{expected}: {error}");
        }
        let config = json!({"model_type": "smolvlm", "vision_config": {"image_size": 364, "patch_size": 14},
            "scale_factor": 3});
        let files = FamilyFiles { config, ..FamilyFiles::default() };
        let error = Idefics3::from_files(&files).unwrap_err().to_string();
        assert!(error.contains("`scale_factor` is 3, must divide a tile of 26 patches a side"), "{error}");
    }
}
