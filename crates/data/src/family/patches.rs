//! Pictures at their own resolution, cut into patches, as the Qwen-VL families do.
//!
//! ```text
//! (frames, height, width) -> sides rounded to multiples of patch x merge, scaled where the pixels leave their range
//!                         -> grid of t x h x w patches          encoder: t segments of h x w tokens
//!                         -> merge x merge patches a feature    LLM: t x h x w / merge^2 tokens
//! ```
//!
//! The arithmetic, floats and their rounding included, is that of `smart_resize` of Hugging Face transformers 5.23.0
//! (`qwen2_vl/image_processing_qwen2_vl.py`, `qwen3_vl/video_processing_qwen3_vl.py`).

use super::fields::{CONFIG, Fields};
use super::{MediaShape, Piece};
use crate::DataError;
use dflop_types::{EncoderParts, EncoderSegments};
use serde_json::Value;

/// Whole numbers to here are exact as floats, and their quotients are those of Python.
pub(super) const EXACT_MAX: u64 = 1 << 53;
/// Longer pictures than this many times their width are refused by the processor.
const ASPECT_RATIO_MAX: f64 = 200.0;
/// Why a grid is refused.
pub(super) const TOO_MANY_TOKENS: &str = "its encoder tokens must be fewer than 2^32";

/// How pictures are cut.
///
/// *Invariants*: each at least 1, at most 2^15.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Patches {
    /// Side of a patch, in pixels.
    pub(super) side: u32,
    /// Patches a feature, each way.
    pub(super) merge: u32,
    /// Frames of a video in a patch.
    pub(super) frames: u32,
}

impl Patches {
    /// The processor's, which must be those of the vision configuration `model`; `default` stands for what the
    /// processor leaves out.
    pub(super) fn read(processor: &Fields, model: Self, default: Self) -> Result<Self, DataError> {
        let of = |field: &str, default: u32, model: u32| -> Result<u32, DataError> {
            let value = processor.side(field)?.unwrap_or(default);
            if value == model {
                return Ok(value);
            }
            let missing =
                if processor.get(field).is_none() { format!(", so {value}") } else { String::new() };
            Err(processor.error(field, format!("`{CONFIG}` says {model} under `vision_config`{missing}")))
        };
        Ok(Self {
            side: of("patch_size", default.side, model.side)?,
            merge: of("merge_size", default.merge, model.merge)?,
            frames: of("temporal_patch_size", default.frames, model.frames)?,
        })
    }

    /// What the vision tower of `config.json` reads.
    pub(super) fn of_model(config: &Fields, default: Self) -> Result<Self, DataError> {
        Ok(Self {
            side: config.side("vision_config.patch_size")?.unwrap_or(default.side),
            merge: config.side("vision_config.spatial_merge_size")?.unwrap_or(default.merge),
            frames: config.side("vision_config.temporal_patch_size")?.unwrap_or(default.frames),
        })
    }

    /// Both sides of a resized picture are multiples of this, in pixels.
    pub(super) const fn factor(self) -> u64 {
        self.side as u64 * self.merge as u64
    }

    /// The grid of a picture of this size, resized (both sides multiples of [`Patches::factor`]), and of so many
    /// frames; `None` from 2^32 tokens.
    pub(super) fn grid(self, (height, width): (u64, u64), num_frames: u64) -> Option<Grid> {
        let side = u64::from(self.side);
        let frame = u32::try_from((height / side).checked_mul(width / side)?).ok()?;
        let pairs = u32::try_from(num_frames.div_ceil(u64::from(self.frames))).ok()?;
        frame.checked_mul(pairs)?;
        // Both are at most their product.
        let sides = ((height / side) as u32, (width / side) as u32);
        Some(Grid { pairs, sides, frame_patches: frame, frame_features: frame / self.merge / self.merge })
    }
}

/// A picture or clip in patches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Grid {
    /// Groups of frames that share their patches; 1 for an image.
    pub(super) pairs: u32,
    /// Rows and columns of patches of each.
    pub(super) sides: (u32, u32),
    /// Encoder tokens of each.
    pub(super) frame_patches: u32,
    /// LLM tokens of each.
    pub(super) frame_features: u32,
}

impl Grid {
    /// The shape, with `pieces` in the place of the placeholder.
    pub(super) fn shape(self, pieces: Vec<Piece>, frame_indices: Vec<u32>) -> MediaShape {
        MediaShape {
            num_tiles: self.pairs,
            segments: vec![EncoderSegments::of(self.pairs, self.frame_patches)],
            pieces,
            frame_indices,
            // Patches attend within their pair of frames, and merge there.
            parts: vec![EncoderParts { count: self.pairs, segments: 1, feature_tokens: self.frame_features }],
            patches: Some(self.sides),
            first_patches: None,
            last_patches: None,
        }
    }

    /// All features in one run.
    pub(super) fn features(self) -> Piece {
        Piece::Features(self.pairs * self.frame_features)
    }
}

/// Pixels of a resized picture, over all its frames where the family counts so.
///
/// *Invariants*: `1 <= min`, `max <= 2^53`; `min` may be above `max`, then `max` rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PixelRange {
    pub(super) min: u64,
    pub(super) max: u64,
}

impl PixelRange {
    /// `size.shortest_edge` and `size.longest_edge` of a processor, which hold pixels whatever their names say.
    ///
    /// `min_pixels` and `max_pixels`, where `old_names` count, come first, as in the processor's constructor.
    pub(super) fn read(processor: &Fields, default: Self, old_names: bool) -> Result<Self, DataError> {
        let size = processor.get("size");
        let edge = |field: &str, old: &str, default: u64| -> Result<(u64, bool), DataError> {
            if old_names && let Some(pixels) = processor.whole(old, EXACT_MAX)? {
                return Ok((pixels, true));
            }
            match size {
                None => Ok((default, false)),
                Some(_) => match processor.whole(&format!("size.{field}"), EXACT_MAX)? {
                    Some(pixels) => Ok((pixels, false)),
                    None => Err(processor.error("size", format!("must hold `{field}`, in pixels"))),
                },
            }
        };
        let (min, min_is_old) = edge("shortest_edge", "min_pixels", default.min)?;
        let (max, max_is_old) = edge("longest_edge", "max_pixels", default.max)?;
        let known = |key: &str| match key {
            "shortest_edge" | "longest_edge" => true,
            "min_pixels" => min_is_old,
            "max_pixels" => max_is_old,
            _ => false,
        };
        if let Some(other) = size.and_then(Value::as_object).and_then(|s| s.keys().find(|key| !known(key))) {
            return Err(processor.error(
                &format!("size.{other}"),
                "`size` must hold `shortest_edge` and `longest_edge` alone".to_owned(),
            ));
        }
        Ok(Self { min, max })
    }
}

/// Frames that count towards a [`PixelRange`]: 1 and 1 where only the picture does.
#[derive(Debug, Clone, Copy)]
pub(super) struct Depth {
    pub(super) frames: u64,
    /// Rounded to the frames of a patch.
    pub(super) rounded: u64,
}

impl Depth {
    pub(super) const PICTURE: Self = Self { frames: 1, rounded: 1 };
}

/// Sides scaled up, where one is shorter than `factor`, until neither is.
pub(super) fn enlarged((height, width): (u64, u64), factor: u64) -> Result<(u64, u64), String> {
    if height == 0 || width == 0 {
        return Err("both sides must be at least 1".to_owned());
    }
    if height >= factor && width >= factor {
        return Ok((height, width));
    }
    let scale = (factor as f64 / height as f64).max(factor as f64 / width as f64);
    let scaled = |side: u64| (side as f64 * scale) as u64;
    Ok((scaled(height), scaled(width)))
}

/// (height, width) to which a picture is resized: `smart_resize`.
///
/// # Errors
/// The rule that is broken.
pub(super) fn fit(
    (height, width): (u64, u64),
    depth: Depth,
    factor: u64,
    pixels: PixelRange,
) -> Result<(u64, u64), String> {
    if height == 0 || width == 0 {
        return Err("both sides must be at least 1".to_owned());
    }
    let ratio = height.max(width) as f64 / height.min(width) as f64;
    if ratio > ASPECT_RATIO_MAX {
        return Err(format!(
            "its longer side is {ratio:.1} times the shorter one, must be at most 200 times"
        ));
    }
    let volume = height.checked_mul(width).and_then(|area| area.checked_mul(depth.frames));
    let volume = volume
        .filter(|&volume| volume <= EXACT_MAX)
        .ok_or_else(|| format!("its pixels over all frames must be at most {EXACT_MAX}"))?;
    // Python rounds halves to even.
    let round = |side: u64| (side as f64 / factor as f64).round_ties_even() as u64 * factor;
    let (rounded_height, rounded_width) = (round(height), round(width));
    let rounded = u128::from(depth.rounded) * u128::from(rounded_height) * u128::from(rounded_width);
    if rounded > u128::from(pixels.max) {
        let beta = (volume as f64 / pixels.max as f64).sqrt();
        let shrink = |side: u64| factor.max((side as f64 / beta / factor as f64).floor() as u64 * factor);
        Ok((shrink(height), shrink(width)))
    } else if rounded < u128::from(pixels.min) {
        let beta = (pixels.min as f64 / volume as f64).sqrt();
        let grow = |side: u64| (side as f64 * beta / factor as f64).ceil() as u64 * factor;
        Ok((grow(height), grow(width)))
    } else {
        Ok((rounded_height, rounded_width))
    }
}

#[cfg(test)]
mod tests {
    use super::super::fields::PREPROCESSOR;
    use super::*;
    use serde_json::json;

    const PIXELS: PixelRange = PixelRange { min: 3_136, max: 1_003_520 };

    /// 42 / 28 = 1.5 and 70 / 28 = 2.5 both round to 2, as Python rounds.
    #[test]
    fn halves_round_to_even() {
        assert_eq!(fit((42, 70), Depth::PICTURE, 28, PIXELS), Ok((56, 56)));
    }

    /// 1,000 x 2,000 is too much by sqrt(2e6 / 1,003,520) = 1.4117: 708.3 x 1,416.7 are 25 x 50 factors. 10 x 30 is
    /// too little by sqrt(3,136 / 300) = 3.233: 32.3 x 97.0 fill 2 x 4.
    #[test]
    fn pixels_are_kept_in_their_range_by_hand() {
        assert_eq!(fit((1_000, 2_000), Depth::PICTURE, 28, PIXELS), Ok((700, 1_400)));
        assert_eq!(fit((10, 30), Depth::PICTURE, 28, PIXELS), Ok((56, 112)));
    }

    #[test]
    fn what_smart_resize_refuses_is_refused() {
        let refused = |height, width| fit((height, width), Depth::PICTURE, 28, PIXELS).unwrap_err();
        assert_eq!(refused(0, 7), "both sides must be at least 1");
        assert_eq!(
            refused(1_001, 5),
            "its longer side is 200.2 times the shorter one, must be at most 200 times"
        );
        assert!(fit((1_000, 5), Depth::PICTURE, 28, PIXELS).is_ok());
        assert!(
            refused(u64::from(u32::MAX), u64::from(u32::MAX)).contains("must be at most 9007199254740992")
        );
    }

    #[test]
    fn settings_of_pixels_are_those_of_the_constructor() {
        let read = |object: Value, old_names| {
            let fields = Fields { file: PREPROCESSOR, object: &object };
            PixelRange::read(&fields, PIXELS, old_names).map_err(|error| error.to_string())
        };
        let size = json!({"shortest_edge": 5, "longest_edge": 9});
        assert_eq!(read(json!({}), true), Ok(PIXELS));
        assert_eq!(read(json!({"size": size}), true), Ok(PixelRange { min: 5, max: 9 }));
        assert_eq!(read(json!({"size": size, "max_pixels": 8}), true), Ok(PixelRange { min: 5, max: 8 }));
        assert_eq!(read(json!({"size": size, "max_pixels": 8}), false), Ok(PixelRange { min: 5, max: 9 }));
        let old = json!({"size": {"min_pixels": 1, "max_pixels": 2}, "min_pixels": 3, "max_pixels": 4});
        assert_eq!(read(old, true), Ok(PixelRange { min: 3, max: 4 }));
        let mut errors = vec![read(json!({"size": {"longest_edge": 9}}), true).unwrap_err()];
        errors.push(read(json!({"size": {"min_pixels": 1, "max_pixels": 2}}), true).unwrap_err());
        errors.push(
            read(json!({"size": {"shortest_edge": 5, "longest_edge": 9, "height": 3}}), true).unwrap_err(),
        );
        errors.push(read(json!({"size": 448}), true).unwrap_err());
        errors.push(read(json!({"min_pixels": 0}), true).unwrap_err());
        errors.push(read(json!({"max_pixels": 1e6}), true).unwrap_err());
        insta::assert_snapshot!(errors.join("\n"), @r#"
        `preprocessor_config.json`: `size` is {"longest_edge":9}, must hold `shortest_edge`, in pixels
        `preprocessor_config.json`: `size` is {"min_pixels":1,"max_pixels":2}, must hold `shortest_edge`, in pixels
        `preprocessor_config.json`: `size.height` is 3, `size` must hold `shortest_edge` and `longest_edge` alone
        `preprocessor_config.json`: `size` is 448, must hold `shortest_edge`, in pixels
        `preprocessor_config.json`: `min_pixels` is 0, must be a whole number from 1 to 9007199254740992
        `preprocessor_config.json`: `max_pixels` is 1000000.0, must be a whole number from 1 to 9007199254740992
        "#);
    }
}
