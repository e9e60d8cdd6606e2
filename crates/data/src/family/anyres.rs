//! Tiling by pinpoints ("anyres"), which LLaVA-NeXT brought and LLaVA-OneVision took over.
//!
//! The arithmetic, floats and their rounding included, is that of Hugging Face transformers 5.23.0:
//! `select_best_resolution`, `unpad_image` and `_get_unpadded_features`.

use super::fields::{Fields, SIDE_MAX, side};
use crate::DataError;
use serde_json::Value;

/// Sizes that an image may be fitted into, as (height, width) in pixels, in the order of the configuration.
///
/// *Invariants*: at least one; each side is a multiple of the side of a tile.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Pinpoints(Vec<(u32, u32)>);

impl Pinpoints {
    /// `image_grid_pinpoints` of `fields`, or `default`, for tiles of `image_size` pixels a side.
    ///
    /// # Errors
    /// [`DataError::Config`] where they break the invariants.
    pub(super) fn read(
        fields: &Fields<'_>,
        image_size: u32,
        default: &[(u32, u32)],
    ) -> Result<Self, DataError> {
        let field = "image_grid_pinpoints";
        let pinpoints: Vec<(u32, u32)> = match fields.get(field) {
            None => default.to_vec(),
            Some(value) => {
                value.as_array().and_then(|list| list.iter().map(pinpoint).collect()).ok_or_else(|| {
                    fields
                        .error(field, format!("must be a list of [height, width], each from 1 to {SIDE_MAX}"))
                })?
            }
        };
        let fits = |side: u32| side.is_multiple_of(image_size);
        if pinpoints.is_empty() || pinpoints.iter().any(|&(height, width)| !fits(height) || !fits(width)) {
            let rule =
                format!("needs at least one pinpoint, and each side a multiple of the tile's {image_size}");
            return Err(fields.error(field, rule));
        }
        Ok(Self(pinpoints))
    }

    pub(super) fn as_slice(&self) -> &[(u32, u32)] {
        &self.0
    }

    /// The pinpoint that keeps most pixels, and of those the one that wastes fewest, the first of equals
    /// (`select_best_resolution`). Where none keeps a pixel that is the smallest.
    pub(super) fn best(&self, height: u32, width: u32) -> (u32, u32) {
        let pixels = u64::from(height) * u64::from(width);
        let mut best = (0, 0);
        let mut most_kept = 0;
        let mut least_wasted = u64::MAX;
        for &(pinpoint_height, pinpoint_width) in &self.0 {
            let scale = (f64::from(pinpoint_width) / f64::from(width))
                .min(f64::from(pinpoint_height) / f64::from(height));
            let scaled = |side: u32| (f64::from(side) * scale) as u64;
            let kept = (scaled(width) * scaled(height)).min(pixels);
            let wasted = u64::from(pinpoint_height) * u64::from(pinpoint_width) - kept;
            if kept > most_kept || (kept == most_kept && wasted < least_wasted) {
                (most_kept, least_wasted) = (kept, wasted);
                best = (pinpoint_height, pinpoint_width);
            }
        }
        best
    }
}

fn pinpoint(value: &Value) -> Option<(u32, u32)> {
    match value.as_array()?.as_slice() {
        [height, width] => Some((side(height)?, side(width)?)),
        _ => None,
    }
}

/// Rows and columns of features that an image of `height` x `width` pixels keeps of `grid` (rows, columns) tiles of
/// `side` x `side` features: what is padding on either side is cut off (`unpad_image`).
pub(super) fn unpadded(height: u32, width: u32, grid: (u32, u32), side: u32) -> (u32, u32) {
    let (mut rows, mut columns) = (side * grid.0, side * grid.1);
    let (h, w) = (f64::from(height), f64::from(width));
    if w / h > f64::from(columns) / f64::from(rows) {
        let kept = truncate_rounded(h * (f64::from(columns) / w));
        rows -= rows.saturating_sub(kept) / 2 * 2;
    } else {
        let kept = truncate_rounded(w * (f64::from(rows) / h));
        columns -= columns.saturating_sub(kept) / 2 * 2;
    }
    (rows, columns)
}

/// `int(round(x, 7))` of Python, for x >= 0 below 2^32.
///
/// Rounding to 7 digits changes the integer part only within 5e-8 below an integer. Ties do not matter: a tie
/// there would be an integer less 5e-8, which is no binary fraction.
fn truncate_rounded(x: f64) -> u32 {
    let nearest = x.round();
    (if nearest > x && nearest - x < 5e-8 { nearest } else { x.floor() }) as u32
}

/// `int(a // b)` of Python, for a >= 0 and b > 0: by the remainder, which may differ from `floor(a / b)`.
pub(super) fn floor_divide(a: f64, b: f64) -> u32 {
    let quotient = (a - a % b) / b;
    let floor = quotient.floor();
    (if quotient - floor > 0.5 { floor + 1.0 } else { floor }) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Python: `int(round(13.99999996, 7)) == 14`, `int(round(13.99999994, 7)) == 13`.
    #[test]
    fn the_arithmetic_is_that_of_python() {
        assert_eq!(truncate_rounded(13.999_999_96), 14);
        assert_eq!(truncate_rounded(13.999_999_94), 13);
        assert_eq!(truncate_rounded(14.0), 14);
        assert_eq!(truncate_rounded(0.03), 0);
    }

    /// Two tiles side by side of 24 features: a picture of 1 : 4 keeps 12 of 24 rows; one of 1 : 2 keeps all.
    #[test]
    fn padding_is_cut_off_on_both_sides() {
        assert_eq!(unpadded(100, 400, (1, 2), 24), (12, 48));
        assert_eq!(unpadded(100, 200, (1, 2), 24), (24, 48));
        assert_eq!(unpadded(400, 100, (2, 1), 24), (48, 12));
        // One line of pixels is thinner than a feature, so no feature of an even side remains.
        assert_eq!(unpadded(5000, 1, (3, 1), 24), (72, 0));
    }

    /// Python: `1.0 // 0.1 == 9.0`.
    #[test]
    fn division_is_that_of_python() {
        assert_eq!(floor_divide(1.0, 0.1), 9);
        assert_eq!(floor_divide(162.0, 2.0), 81);
    }
}
