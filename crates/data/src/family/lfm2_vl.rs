//! The shape rule of LFM2-VL: a picture at its own resolution, and a large one as a grid of tiles with a thumbnail.
//!
//! ```text
//! f = patch x downsample_factor pixels a feature each way
//! (height, width) -> sides to multiples of f, scaled where features leave `min_image_tokens` to `max_image_tokens`
//! more than `max_image_tokens` x `max_pixels_tolerance` features: rows x columns tiles of `tile_size`, and the above as thumbnail
//! encoder: a segment for each tile and one for the thumbnail; LLM: downsample_factor^2 patches a feature
//! text: <|image_start|><|img_row_1_col_1|> features ... <|img_thumbnail|> features <|image_end|>
//! ```
//!
//! The arithmetic, floats and their rounding included, is that of Hugging Face transformers 5.23.0 (`Lfm2VlImageProcessor`,
//! `Lfm2VlProcessor`).

use super::fields::{CONFIG, Fields, PROCESSOR, SIDE_MAX, image_fields};
use super::{
    Clip, Family, FamilyFiles, Marks, MediaShape, Piece, Size, Sound, VideoSampling, image_words, refused,
    unread,
};
use crate::DataError;
use crate::media::MediaKind;
use dflop_types::{EncoderParts, EncoderSegments};

const FAMILY: &str = "lfm2_vl";
const PLACEHOLDER: &str = "<image>";
const START: &str = "<|image_start|>";
const END: &str = "<|image_end|>";
const THUMBNAIL: &str = "<|img_thumbnail|>";
/// The published tokenizers know the places of a grid of as many rows and columns.
const PLACES_MAX: u32 = 10;
/// Tiles and features of a picture, at most: what we take of a file.
const TILES_MAX: u64 = 1 << 10;
const FEATURES_MAX: u64 = 1 << 20;

/// The grids of tiles that a large picture may be cut into.
#[derive(Debug, Clone, PartialEq)]
struct Tiles {
    /// Side of a tile, in pixels.
    side: u32,
    /// (columns, rows), by number of tiles.
    grids: Vec<(u32, u32)>,
    has_thumbnail: bool,
}

impl Tiles {
    /// Columns and rows of the grid whose shape is closest to the picture's (`find_closest_aspect_ratio`).
    ///
    /// # Errors
    /// The rule, where two grids of as many tiles are equally close: transformers keeps grids in a set, and so takes the one
    /// that Python's hashes put first.
    fn closest(&self, size: Size) -> Result<(u32, u32), &'static str> {
        let ratio = f64::from(size.width) / f64::from(size.height);
        let area = f64::from(size.width) * f64::from(size.height);
        let (mut best, mut least_off, mut is_open) = ((1, 1), f64::INFINITY, false);
        for &(columns, rows) in &self.grids {
            let off = (ratio - f64::from(columns) / f64::from(rows)).abs();
            let target = (f64::from(self.side).powi(2)) * f64::from(columns * rows);
            // Equal floats are meant: the mirrored halves of a tie are computed alike.
            let is_tie = off.total_cmp(&least_off).is_eq();
            if off < least_off {
                (best, least_off, is_open) = ((columns, rows), off, false);
            } else if is_tie && best.0 * best.1 == columns * rows {
                is_open = true;
            } else if is_tie && area > 0.5 * target {
                (best, is_open) = ((columns, rows), false);
            }
        }
        if is_open { Err("two grids of as many tiles are equally close to its shape") } else { Ok(best) }
    }
}

/// The shape rule of an LFM2-VL model.
///
/// *Invariants* (checked by [`Lfm2Vl::from_files`]): all numbers are at least 1, the least number of features is at most the
/// most, and the side of a tile is a multiple of that of a feature.
#[derive(Debug, Clone, PartialEq)]
pub struct Lfm2Vl {
    /// Side of a patch, in pixels.
    patch: u32,
    /// Patches a feature, each way.
    factor: u32,
    /// Features of a picture that is not cut, or of a thumbnail.
    min_features: u64,
    max_features: u64,
    /// A picture of more pixels is cut into tiles; `None`: none is.
    tiles: Option<Tiles>,
    /// Pixels of a picture that is not cut, at most.
    max_pixels_whole: f64,
}

impl Family for Lfm2Vl {
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

    fn special_texts(&self) -> Vec<String> {
        let places = (1..=PLACES_MAX).flat_map(|row| (1..=PLACES_MAX).map(move |column| place(row, column)));
        [START, END, THUMBNAIL].map(str::to_owned).into_iter().chain(places).collect()
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

/// What stands before a tile.
fn place(row: u32, column: u32) -> String {
    format!("<|img_row_{row}_col_{column}|>")
}

impl Lfm2Vl {
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
    /// use dflop_data::family::{Family as _, FamilyFiles, Lfm2Vl, Size};
    /// let config = serde_json::json!({"model_type": "lfm2_vl"});
    /// let rule = Lfm2Vl::from_files(&FamilyFiles { config, ..FamilyFiles::default() })?;
    /// // 15 x 20 features of 32 x 32 pixels are more than 256, and less than 512: the picture is scaled down to 13 x 18.
    /// let shape = rule.image(Size { height: 480, width: 640 }, 1)?;
    /// assert_eq!((shape.num_tiles, shape.encoder_tokens(), shape.feature_tokens()), (1, 4 * 13 * 18, 13 * 18));
    /// // 2 x 3 tiles of 512 x 512 pixels, each 256 features, and the thumbnail.
    /// let shape = rule.image(Size { height: 1000, width: 1500 }, 1)?;
    /// assert_eq!((shape.num_tiles, shape.feature_tokens()), (7, 6 * 256 + 13 * 19));
    /// # Ok::<(), dflop_data::DataError>(())
    /// ```
    pub fn from_files(files: &FamilyFiles) -> Result<Self, DataError> {
        let config = Fields { file: CONFIG, object: &files.config };
        config.must_be("model_type", &[FAMILY], false)?;
        config.must_be("vision_config.model_type", &["siglip2_vision_model"], true)?;
        let patch = config.side("vision_config.patch_size")?.unwrap_or(16);
        let factor = config.side("downsample_factor")?.unwrap_or(2);
        let unit = patch.saturating_mul(factor);
        if unit > SIDE_MAX {
            let rule = format!("a feature of {patch} x {factor} pixels a side is above {SIDE_MAX}");
            return Err(config.error("downsample_factor", rule));
        }
        let image = image_fields(&files.preprocessor);
        image.must_be("image_processor_type", &["Lfm2VlImageProcessor", "Lfm2VlImageProcessorFast"], true)?;
        for (field, default, wanted) in [("encoder_patch_size", 16, patch), ("downsample_factor", 2, factor)]
        {
            if image.side(field)?.unwrap_or(default) != wanted {
                return Err(image.error(field, format!("must be {wanted}, as the model has it")));
            }
        }
        let marks = "use_image_special_tokens";
        for fields in [&image, &Fields { file: PROCESSOR, object: &files.processor }] {
            if fields.get(marks).is_some() && fields.flag(marks)? == Some(false) {
                return Err(fields.error(marks, "must be true: a picture has marks around it".to_owned()));
            }
        }
        if image.flag("do_pad")? == Some(false) {
            let rule = "must be true: without it the processor does not tell sizes".to_owned();
            return Err(image.error("do_pad", rule));
        }
        let min_features = image.whole("min_image_tokens", FEATURES_MAX)?.unwrap_or(64);
        let max_features = image.whole("max_image_tokens", FEATURES_MAX)?.unwrap_or(256);
        if min_features > max_features {
            return Err(image.error("min_image_tokens", format!("must be at most {max_features}")));
        }
        let field = "max_pixels_tolerance";
        let tolerance = match image.get(field) {
            None => 2.0,
            Some(value) => value
                .as_f64()
                .filter(|tolerance| tolerance.is_finite() && *tolerance > 0.0)
                .ok_or_else(|| image.error(field, "must be a number above 0".to_owned()))?,
        };
        let max_pixels_whole = (max_features * u64::from(unit).pow(2)) as f64 * tolerance;
        let tiles = tiles_of(&image, unit)?;
        Ok(Self { patch, factor, min_features, max_features, tiles, max_pixels_whole })
    }

    /// Side of a feature, in pixels.
    const fn unit(&self) -> u32 {
        self.patch * self.factor
    }

    /// Rows and columns of features of a picture that is not cut, or of a thumbnail (`smart_resize`).
    fn whole(&self, size: Size) -> (u64, u64) {
        let unit = f64::from(self.unit());
        let (height, width) = (f64::from(size.height), f64::from(size.width));
        // Python rounds halves to even.
        let near = |side: f64| ((side / unit).round_ties_even() as u64).max(1);
        let (rows, columns) = (near(height), near(width));
        let pixels = |features: u64| features as f64 * unit * unit;
        if rows * columns > self.max_features {
            let beta = ((height * width) / pixels(self.max_features)).sqrt();
            let down = |side: f64| ((side / beta / unit).floor() as u64).max(1);
            (down(height), down(width))
        } else if rows * columns < self.min_features {
            let beta = (pixels(self.min_features) / (height * width)).sqrt();
            let up = |side: f64| (side * beta / unit).ceil() as u64;
            (up(height), up(width))
        } else {
            (rows, columns)
        }
    }

    /// Columns and rows of tiles; `None` where a picture is not cut.
    fn grid(&self, size: Size) -> Result<Option<(&Tiles, u32, u32)>, &'static str> {
        let Some(tiles) = &self.tiles else { return Ok(None) };
        let unit = u64::from(self.unit());
        // A side of nearly nothing counts as a patch here, not as a feature.
        let near = |side: u32| {
            let features = (f64::from(side) / unit as f64).round_ties_even() as u64;
            (features * unit).max(u64::from(self.patch))
        };
        if (near(size.height) * near(size.width)) as f64 <= self.max_pixels_whole {
            return Ok(None);
        }
        let (columns, rows) = tiles.closest(size)?;
        Ok(Some((tiles, columns, rows)))
    }

    fn shape(&self, size: Size) -> Result<MediaShape, String> {
        if size.height == 0 || size.width == 0 {
            return Err("both sides must be at least 1".to_owned());
        }
        let (rows, columns) = self.whole(size);
        let per_tile = |tiles: &Tiles| u64::from(tiles.side / self.unit()).pow(2);
        let most = self.max_features.max(self.tiles.as_ref().map_or(0, per_tile));
        let grid = self.grid(size)?;
        let is_cut = grid.is_some_and(|(_, columns, rows)| columns * rows > 1);
        let reads_whole = grid.is_none_or(|(tiles, ..)| is_cut && tiles.has_thumbnail);
        if reads_whole && rows * columns > most {
            return Err(format!("it has {rows} x {columns} features, the processor has room for {most}"));
        }
        if let Some((tiles, 1, 1)) = grid
            && rows * columns != per_tile(tiles)
        {
            let (written, read) = (rows * columns, per_tile(tiles));
            return Err(format!("its only tile has {read} features, the processor writes {written}"));
        }
        // (count, rows and columns of patches) of tiles, and of the whole.
        let mut groups: Vec<(u32, (u32, u32))> = Vec::new();
        let features_of = |(rows, columns): (u32, u32)| (rows / self.factor) * (columns / self.factor);
        let mut pieces = vec![Piece::Text(START.to_owned())];
        if let Some((tiles, columns, rows)) = grid {
            let sides = (tiles.side / self.patch, tiles.side / self.patch);
            groups.push((columns * rows, sides));
            for row in 1..=rows {
                for column in 1..=columns {
                    let text = if is_cut { place(row, column) } else { String::new() };
                    append(&mut pieces, &text);
                    pieces.push(Piece::Features(features_of(sides)));
                }
            }
        }
        if reads_whole {
            append(&mut pieces, if is_cut { THUMBNAIL } else { "" });
            // Both fit: together they are at most `most`.
            let sides = (rows as u32 * self.factor, columns as u32 * self.factor);
            pieces.push(Piece::Features(features_of(sides)));
            groups.push((1, sides));
        }
        pieces.push(Piece::Text(END.to_owned()));
        let segments =
            groups.iter().map(|&(count, (rows, columns))| EncoderSegments::of(count, rows * columns));
        let parts = groups.iter().map(|&(count, sides)| EncoderParts {
            count,
            segments: 1,
            feature_tokens: features_of(sides),
        });
        Ok(MediaShape {
            num_tiles: groups.iter().map(|(count, _)| count).sum(),
            segments: segments.collect(),
            pieces,
            frame_indices: Vec::new(),
            parts: parts.collect(),
            patches: Some(groups[0].1),
            first_patches: None,
            last_patches: groups.get(1).map(|(_, sides)| *sides),
        })
    }
}

/// Adds `text` to the text before, where there is one.
fn append(pieces: &mut Vec<Piece>, text: &str) {
    match pieces.last_mut() {
        Some(Piece::Text(before)) => before.push_str(text),
        _ => pieces.push(Piece::Text(text.to_owned())),
    }
}

/// How large pictures are cut; `None` where the processor cuts none.
fn tiles_of(image: &Fields<'_>, unit: u32) -> Result<Option<Tiles>, DataError> {
    let min = image.whole("min_tiles", TILES_MAX)?.unwrap_or(2);
    let max = image.whole("max_tiles", TILES_MAX)?.unwrap_or(10);
    if !image.flag("do_image_splitting")?.unwrap_or(true) || (min, max) == (1, 1) {
        return Ok(None);
    }
    if min > max {
        return Err(image.error("min_tiles", format!("must be at most `max_tiles`, {max}")));
    }
    let side = image.side("tile_size")?.unwrap_or(512);
    if !side.is_multiple_of(unit) {
        return Err(image.error("tile_size", format!("must be a multiple of {unit}, the side of a feature")));
    }
    let (min, max) = (min as u32, max as u32);
    let mut grids: Vec<(u32, u32)> = (1..=max)
        .flat_map(|columns| (1..=max / columns).map(move |rows| (columns, rows)))
        .filter(|(columns, rows)| columns * rows >= min)
        .collect();
    grids.sort_by_key(|(columns, rows)| columns * rows);
    let has_thumbnail = image.flag("use_thumbnail")?.unwrap_or(true);
    Ok(Some(Tiles { side, grids, has_thumbnail }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn made(preprocessor: Value) -> Result<Lfm2Vl, DataError> {
        let config = json!({"model_type": "lfm2_vl"});
        Lfm2Vl::from_files(&FamilyFiles { config, preprocessor, ..FamilyFiles::default() })
    }

    fn shape(rule: &Lfm2Vl, height: u32, width: u32) -> Result<MediaShape, String> {
        rule.shape(Size { height, width })
    }

    /// 100 x 100 pixels are 3 x 3 features, scaled up to 8 x 8; 1024 x 512 pixels are as many as are not cut.
    #[test]
    fn sizes_by_hand() {
        let rule = made(json!({})).unwrap();
        let small = shape(&rule, 100, 100).unwrap();
        assert_eq!(small.patches, Some((16, 16)));
        let text = |text: &str| Piece::Text(text.to_owned());
        assert_eq!(small.pieces, [text(START), Piece::Features(64), text(END)]);
        assert_eq!(shape(&rule, 1024, 512).unwrap().num_tiles, 1);
        let cut = shape(&rule, 1056, 512).unwrap();
        // 2 x 1 tiles; the whole scaled to 22 x 11 features.
        assert_eq!((cut.patches, cut.last_patches), (Some((32, 32)), Some((44, 22))));
        assert_eq!(
            cut.pieces,
            [
                text("<|image_start|><|img_row_1_col_1|>"),
                Piece::Features(256),
                text("<|img_row_2_col_1|>"),
                Piece::Features(256),
                text("<|img_thumbnail|>"),
                Piece::Features(242),
                text(END),
            ]
        );
        let part = |count, feature_tokens| EncoderParts { count, segments: 1, feature_tokens };
        assert_eq!(cut.parts, [part(2, 256), part(1, 242)]);
    }

    #[test]
    fn what_the_processor_and_the_model_would_not_do_is_refused() {
        let rule = made(json!({})).unwrap();
        assert!(shape(&rule, 0, 9).unwrap_err().contains("at least 1"));
        let line = shape(&rule, 1, 20_000).unwrap_err();
        assert!(line.contains("1 x 2262 features, the processor has room for 256"), "{line}");
        // Of 2 and 3 tiles, 2 : 1 and 1 : 2 are equally far from 5 : 4, and 1 : 1 is none of them.
        let few = made(json!({"max_tiles": 3})).unwrap();
        assert!(shape(&few, 1024, 1280).unwrap_err().contains("equally close"));
        // A grid of one tile, which the text counts as the whole.
        let one = made(json!({"min_tiles": 1, "max_pixels_tolerance": 1.1})).unwrap();
        assert_eq!(shape(&one, 600, 600).unwrap().num_tiles, 1);
        let odd = shape(&one, 600, 660).unwrap_err();
        assert!(odd.contains("256 features, the processor writes 240"), "{odd}");
        for (field, value) in [
            ("encoder_patch_size", json!(14)),
            ("downsample_factor", json!(3)),
            ("tile_size", json!(500)),
            ("min_tiles", json!(11)),
            ("min_image_tokens", json!(257)),
            ("max_pixels_tolerance", json!(0)),
            ("do_pad", json!(false)),
            ("use_image_special_tokens", json!(false)),
            ("image_processor_type", json!("Siglip2ImageProcessor")),
        ] {
            let error = made(json!({field: value})).unwrap_err().to_string();
            assert!(error.contains(&format!("`{field}`")), "{error}");
        }
    }
}
