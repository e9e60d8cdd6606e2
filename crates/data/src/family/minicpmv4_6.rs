//! The shape rule of MiniCPM-V 4.6: a picture scaled to about `scale_resolution`, and of a large one slices of nearly that size.
//!
//! ```text
//! f = patch x 2 pixels a side of what one merger makes of 2 x 2 patches ("4x"), patch x 4 of what two make ("16x")
//! (height, width) -> scaled to about scale_resolution^2 pixels, sides to multiples of f: the whole
//! more pixels than that: also a grid of rows x columns slices, as many as the picture holds such areas, each scaled so
//! encoder: a segment for the whole and one for each slice; LLM: 4 ("4x") or 16 ("16x") patches a feature
//! text: <image_id>n</image_id><image> features </image><slice> features </slice><slice> ... \n<slice> ...
//! ```
//!
//! The arithmetic, floats and their rounding included, is that of Hugging Face transformers 5.23.0
//! (`MiniCPMV4_6ImageProcessor`, `MiniCPMV4_6Processor`).

use super::fields::{CONFIG, Fields, PROCESSOR, SIDE_MAX, image_fields};
use super::{
    Clip, Family, FamilyFiles, Marks, MediaShape, Piece, Size, Sound, VideoSampling, image_words, refused,
    unread,
};
use crate::DataError;
use crate::media::MediaKind;
use dflop_types::{EncoderParts, EncoderSegments};
use serde_json::json;

const FAMILY: &str = "minicpmv4_6";
const PLACEHOLDER: &str = "<|image_pad|>";
/// Around the number of a picture in its sample.
const NUMBER: [&str; 2] = ["<image_id>", "</image_id>"];
/// Around the features of the whole, and of a slice.
const WHOLE: [&str; 2] = ["<image>", "</image>"];
const SLICE: [&str; 2] = ["<slice>", "</slice>"];
/// Slices of a picture, at most: what we take of a file.
const SLICES_MAX: u64 = 1 << 10;
/// Patches of a picture, at most: every count then fits in 32 bits.
const PATCHES_MAX: u64 = 1 << 28;

/// The shape rule of a MiniCPM-V 4.6 model.
///
/// *Invariants* (checked by [`MiniCpmV46::from_files`]): all numbers are at least 1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MiniCpmV46 {
    /// Side of a patch, in pixels.
    patch: u32,
    /// Patches a feature, each way: 2 or 4.
    factor: u32,
    /// Side of the square that a picture is scaled to, in pixels.
    resolution: u32,
    /// Slices of a picture, at most; `None`: none is cut.
    max_slices: Option<u32>,
    /// Whether a picture's number in its sample is written before it.
    is_numbered: bool,
}

impl Family for MiniCpmV46 {
    fn name(&self) -> &str {
        FAMILY
    }

    fn marks(&self, kind: MediaKind) -> Option<Marks> {
        (kind == MediaKind::Image).then(|| Marks {
            placeholder: PLACEHOLDER.to_owned(),
            feature_token: PLACEHOLDER.to_owned(),
            id_fields: &["image_token_id"],
            number: self.is_numbered.then_some(NUMBER),
        })
    }

    fn special_texts(&self) -> Vec<String> {
        [NUMBER, WHOLE, SLICE].concat().into_iter().map(str::to_owned).collect()
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

impl MiniCpmV46 {
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
    /// use dflop_data::family::{Family as _, FamilyFiles, MiniCpmV46, Size};
    /// let config = serde_json::json!({"model_type": "minicpmv4_6", "vision_config": {"patch_size": 14}});
    /// let rule = MiniCpmV46::from_files(&FamilyFiles { config, ..FamilyFiles::default() })?;
    /// // 400 x 400 pixels are scaled to 448 x 448: 32 x 32 patches, 16 of which become a feature.
    /// let shape = rule.image(Size { height: 400, width: 400 }, 1)?;
    /// assert_eq!((shape.num_tiles, shape.encoder_tokens(), shape.feature_tokens()), (1, 1024, 64));
    /// // 1.5 such areas: the whole in 28 x 36 patches, and 1 x 2 slices of 40 x 28.
    /// let shape = rule.image(Size { height: 480, width: 640 }, 1)?;
    /// assert_eq!((shape.num_tiles, shape.feature_tokens()), (3, 7 * 9 + 2 * 10 * 7));
    /// # Ok::<(), dflop_data::DataError>(())
    /// ```
    pub fn from_files(files: &FamilyFiles) -> Result<Self, DataError> {
        let config = Fields { file: CONFIG, object: &files.config };
        config.must_be("model_type", &[FAMILY], false)?;
        config.must_be("vision_config.model_type", &["minicpmv4_6_vision"], true)?;
        let patch = config.side("vision_config.patch_size")?.unwrap_or(16);
        for field in ["merge_kernel_size", "vision_config.window_kernel_size"] {
            if config.get(field).is_some_and(|value| *value != json!([2, 2])) {
                let rule = "must be [2, 2]: the processor counts 2 x 2 patches a merger".to_owned();
                return Err(config.error(field, rule));
            }
        }
        if config.whole("merger_times", SLICES_MAX)?.unwrap_or(1) != 1 {
            let rule = "must be 1: the processor counts one merger behind the encoder".to_owned();
            return Err(config.error("merger_times", rule));
        }
        let modes = ["4x", "16x"];
        let mode_of = |fields: &Fields<'_>| -> Result<usize, DataError> {
            fields.must_be("downsample_mode", &modes, true)?;
            Ok(usize::from(fields.get("downsample_mode").is_none_or(|mode| mode == modes[1])))
        };
        let mode = mode_of(&config)?;
        let factor = [2, 4][mode];
        if patch > SIDE_MAX / 4 {
            let rule = format!("a feature of 4 x {patch} pixels a side is above {SIDE_MAX}");
            return Err(config.error("vision_config.patch_size", rule));
        }
        let image = image_fields(&files.preprocessor);
        let names = ["", "Fast", "Pil"].map(|backend| format!("MiniCPMV4_6ImageProcessor{backend}"));
        image.must_be("image_processor_type", &names.each_ref().map(String::as_str), true)?;
        if mode_of(&image)? != mode {
            let rule = format!("must be \"{}\", as the model has it", modes[mode]);
            return Err(image.error("downsample_mode", rule));
        }
        if image.side("patch_size")?.unwrap_or(14) != patch {
            return Err(image.error("patch_size", format!("must be {patch}, as the model has it")));
        }
        if image.flag("do_resize")? == Some(false) {
            return Err(image.error("do_resize", "must be true: sides are multiples of a feature".to_owned()));
        }
        let resolution = image.side("scale_resolution")?.unwrap_or(448);
        let most = image.whole("max_slice_nums", SLICES_MAX)?.unwrap_or(9);
        let is_cut = image.flag("slice_mode")?.unwrap_or(true);
        let is_numbered = image.flag("use_image_id")?.unwrap_or(true);
        let whole = Fields { file: PROCESSOR, object: &files.processor };
        // Null there leaves it to the image processor.
        if whole.get("use_image_id").is_some() && whole.flag("use_image_id")? != Some(is_numbered) {
            let rule = format!("must be {is_numbered}, as the image processor has it");
            return Err(whole.error("use_image_id", rule));
        }
        Ok(Self { patch, factor, resolution, max_slices: is_cut.then_some(most as u32), is_numbered })
    }

    /// Rows and columns of patches of a picture, or of a slice of these sides, scaled to about the resolution
    /// (`find_best_resize`, which scales in every case that comes up).
    fn scaled(&self, height: f64, width: f64) -> (u32, u32) {
        let aspect_ratio = width / height;
        let height = (f64::from(self.resolution) / aspect_ratio.sqrt()).trunc();
        let width = (height * aspect_ratio).trunc();
        // Python rounds halves to even.
        let unit = f64::from(self.patch * self.factor);
        let near = |side: f64| ((side / unit).round_ties_even() as u32).max(1) * self.factor;
        (near(height), near(width))
    }

    /// Rows and columns of slices; `None` where a picture is not cut (`get_sliced_grid`).
    fn grid(&self, size: Size) -> Option<(u32, u32)> {
        let most = self.max_slices?;
        let (height, width) = (f64::from(size.height), f64::from(size.width));
        let area = f64::from(self.resolution).powi(2);
        let multiple = ((width * height / area).ceil() as u32).min(most);
        if multiple <= 1 {
            return None;
        }
        let log_ratio = (width / height).ln();
        let (mut best, mut least_off) = ((1, 1), f64::INFINITY);
        for count in multiple - 1..=multiple + 1 {
            if count == 1 || count > most {
                continue;
            }
            for rows in (1..=count).filter(|rows| count.is_multiple_of(*rows)) {
                let columns = count / rows;
                let off = (log_ratio - (f64::from(columns) / f64::from(rows)).ln()).abs();
                // Equal floats are meant.
                if off < least_off || off.total_cmp(&least_off).is_eq() && rows > best.0 {
                    (best, least_off) = ((rows, columns), off);
                }
            }
        }
        Some(best)
    }

    fn shape(&self, size: Size) -> Result<MediaShape, String> {
        if size.height == 0 || size.width == 0 {
            return Err("both sides must be at least 1".to_owned());
        }
        let (height, width) = (f64::from(size.height), f64::from(size.width));
        let whole = self.scaled(height, width);
        let grid = self.grid(size);
        // (count, rows and columns of patches) of the whole, and of slices.
        let mut groups = vec![(1, whole)];
        if let Some((rows, columns)) = grid {
            // Sides that the slices divide, then those of a slice (`get_refine_size`).
            let near = |side: f64, count: u32| (side / f64::from(count)).round_ties_even().max(1.0);
            groups.push((rows * columns, self.scaled(near(height, rows), near(width, columns))));
        }
        for &(count, (rows, columns)) in &groups {
            let patches = u64::from(rows) * u64::from(columns);
            if patches * u64::from(count) > PATCHES_MAX {
                return Err(format!(
                    "it is read in {rows} x {columns} patches, must be at most {PATCHES_MAX}"
                ));
            }
        }
        let features_of = |(rows, columns): (u32, u32)| (rows / self.factor) * (columns / self.factor);
        let mut pieces = vec![
            Piece::Text(WHOLE[0].to_owned()),
            Piece::Features(features_of(whole)),
            Piece::Text(WHOLE[1].to_owned()),
        ];
        if let Some((rows, columns)) = grid {
            let slice = Piece::Features(features_of(groups[1].1));
            for row in 0..rows {
                for column in 0..columns {
                    let is_new_row = row > 0 && column == 0;
                    append(&mut pieces, &format!("{}{}", if is_new_row { "\n" } else { "" }, SLICE[0]));
                    pieces.push(slice.clone());
                    pieces.push(Piece::Text(SLICE[1].to_owned()));
                }
            }
        }
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
            patches: Some(groups[groups.len() - 1].1),
            first_patches: grid.map(|_| whole),
            last_patches: None,
        })
    }
}

/// Adds `text` to the text before.
fn append(pieces: &mut [Piece], text: &str) {
    if let Some(Piece::Text(before)) = pieces.last_mut() {
        before.push_str(text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    fn made(config: &Value, preprocessor: Value) -> Result<MiniCpmV46, DataError> {
        let mut fields = json!({"model_type": FAMILY, "vision_config": {"patch_size": 14}});
        fields.as_object_mut().unwrap().extend(config.as_object().unwrap().clone());
        MiniCpmV46::from_files(&FamilyFiles { config: fields, preprocessor, ..FamilyFiles::default() })
    }

    fn shape(rule: &MiniCpmV46, height: u32, width: u32) -> MediaShape {
        rule.shape(Size { height, width }).unwrap()
    }

    /// 900 x 700 pixels are 3.1 areas of 448 x 448: of 3, 4 and 5 slices 2 x 2 are nearest to 7 : 9. A slice is 450 x 350 pixels,
    /// scaled to 507 x 394, 9 x 7 units of 56 pixels; so is the whole.
    #[test]
    fn slices_by_hand() {
        let rule = made(&json!({}), json!({})).unwrap();
        let found = shape(&rule, 900, 700);
        assert_eq!(
            (found.first_patches, found.patches, found.num_tiles),
            (Some((36, 28)), Some((36, 28)), 5)
        );
        let text = |text: &str| Piece::Text(text.to_owned());
        let features = || Piece::Features(63);
        assert_eq!(
            found.pieces,
            [
                text("<image>"),
                features(),
                text("</image><slice>"),
                features(),
                text("</slice><slice>"),
                features(),
                text("</slice>\n<slice>"),
                features(),
                text("</slice><slice>"),
                features(),
                text("</slice>"),
            ]
        );
        let part = |count| EncoderParts { count, segments: 1, feature_tokens: 63 };
        assert_eq!(found.parts, [part(1), part(4)]);
        let fine = made(&json!({"downsample_mode": "4x"}), json!({"downsample_mode": "4x"})).unwrap();
        // 507 x 394 pixels are 18 x 14 units of 28 pixels.
        assert_eq!(shape(&fine, 450, 350).pieces[1], Piece::Features(18 * 14));
    }

    /// A picture of exactly an area is not cut; a line of pixels is at least a feature wide.
    #[test]
    fn edges_of_sizes() {
        let rule = made(&json!({}), json!({})).unwrap();
        assert_eq!(shape(&rule, 448, 448).num_tiles, 1);
        assert_eq!(shape(&rule, 448, 449).num_tiles, 3);
        // 448 / sqrt(1 / 400) = 8960 pixels, 160 features; 22 pixels wide.
        assert_eq!(shape(&rule, 400, 1).patches, Some((640, 4)));
        let whole = made(&json!({}), json!({"slice_mode": false})).unwrap();
        assert_eq!(shape(&whole, 5000, 5000).num_tiles, 1);
        assert!(rule.image(Size { height: 0, width: 1 }, 1).unwrap_err().to_string().contains("at least 1"));
        assert!(rule.marks(MediaKind::Video).is_none());
    }

    #[test]
    fn what_the_processor_and_the_model_would_not_do_is_refused() {
        for (field, config) in [
            ("merger_times", json!({"merger_times": 2})),
            ("merge_kernel_size", json!({"merge_kernel_size": [2, 4]})),
            ("downsample_mode", json!({"downsample_mode": "8x"})),
            ("downsample_mode", json!({"downsample_mode": "4x"})),
        ] {
            let error = made(&config, json!({})).unwrap_err().to_string();
            assert!(error.contains(&format!("`{field}`")), "{error}");
        }
        for (field, value) in [
            ("patch_size", json!(16)),
            ("do_resize", json!(false)),
            ("max_slice_nums", json!(0)),
            ("image_processor_type", json!("MiniCPMVImageProcessor")),
        ] {
            let error = made(&json!({}), json!({field: value})).unwrap_err().to_string();
            assert!(error.contains(&format!("`{field}`")), "{error}");
        }
        let processor = json!({"use_image_id": false});
        let config = json!({"model_type": FAMILY, "vision_config": {"patch_size": 14}});
        let files = FamilyFiles { config, processor, ..FamilyFiles::default() };
        let error = MiniCpmV46::from_files(&files).unwrap_err().to_string();
        assert!(error.contains("processor_config.json") && error.contains("`use_image_id`"), "{error}");
    }
}
