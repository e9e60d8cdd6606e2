//! A monotone piecewise-linear curve through measured points: what one grid says between, below and above its
//! points.

use thiserror::Error;

/// A rule that the points of a curve break.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum GridError {
    /// There is nothing to interpolate.
    #[error("it has no points, at least 1 is needed")]
    Empty,
    /// Sizes must ascend strictly.
    #[error("size {size} at point {index} does not exceed {previous}")]
    Order {
        /// Position of the point, from 0.
        index: usize,
        /// Its size.
        size: u64,
        /// The size before it.
        previous: u64,
    },
}

/// What a curve says for one size.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Reading {
    /// The value, in the unit of the curve (nanoseconds or bytes).
    pub value: u64,
    /// Whether the size lies outside the measured range.
    pub extrapolated: bool,
}

/// A non-decreasing piecewise-linear curve over sizes, in integers.
///
/// Measured medians that fall with the size are noise, as more tokens are never less work: they are replaced
/// by the nearest non-decreasing values (least squares, pool adjacent violators) and counted. Points that
/// were in order stay exact.
///
/// Outside the measured range, both marked in the [`Reading`]:
///
/// ```text
/// above:  y = y_n + (x - x_n) * slope of the last two points that differ
/// below:  y = floor + (y_1 - floor) * x / x_1
///         floor = line through the first two points at x = 0, held within 0..=y_1
/// ```
///
/// One point alone says nothing of a slope: below it the curve is constant (all floor), above it
/// proportional, which errs towards too much on both sides.
///
/// *Invariants*: sizes ascend strictly, values do not descend.
///
/// *References*: Barlow et al., "Statistical Inference under Order Restrictions", 1972 (pool adjacent
/// violators).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Curve {
    points: Vec<(u64, u64)>,
    floor: u64,
    num_repaired: u32,
}

/// Quotient of a product, rounded down, held at `u64::MAX`; `divisor` is not 0.
pub(crate) fn scale(value: u64, factor: u64, divisor: u64) -> u64 {
    u64::try_from(u128::from(value) * u128::from(factor) / u128::from(divisor)).unwrap_or(u64::MAX)
}

impl Curve {
    /// The curve through `points` (size, value), repaired where a value falls.
    ///
    /// *Complexity*: O(n).
    ///
    /// # Errors
    /// [`GridError::Empty`] without points, [`GridError::Order`] if a size does not exceed the one before it.
    pub fn new(points: impl IntoIterator<Item = (u64, u64)>) -> Result<Self, GridError> {
        let measured: Vec<(u64, u64)> = points.into_iter().collect();
        if measured.is_empty() {
            return Err(GridError::Empty);
        }
        for (index, pair) in measured.windows(2).enumerate() {
            if pair[1].0 <= pair[0].0 {
                return Err(GridError::Order { index: index + 1, size: pair[1].0, previous: pair[0].0 });
            }
        }
        let values = non_decreasing(&measured);
        let num_repaired = measured.iter().zip(&values).filter(|(m, v)| m.1 != **v).count() as u32;
        let points: Vec<(u64, u64)> = measured.iter().zip(values).map(|(m, value)| (m.0, value)).collect();
        let floor = match *points.as_slice() {
            [(x1, y1), (x2, y2), ..] => y1 - y1.min(scale(y2 - y1, x1, x2 - x1)),
            _ => points[0].1,
        };
        Ok(Self { points, floor, num_repaired })
    }

    /// Points whose measured value fell below that of a smaller size and was replaced.
    pub const fn num_repaired(&self) -> u32 {
        self.num_repaired
    }

    /// Smallest and largest measured size.
    pub fn range(&self) -> (u64, u64) {
        (self.points[0].0, self.points[self.points.len() - 1].0)
    }

    /// The value at `size`: exact at points that needed no repair, linear between them, never decreasing in
    /// `size`.
    ///
    /// *Complexity*: O(log n).
    pub fn at(&self, size: u64) -> Reading {
        let (first, last) = (self.points[0], self.points[self.points.len() - 1]);
        let (value, extrapolated) = if size < first.0 {
            (self.floor + scale(first.1 - self.floor, size, first.0), true)
        } else if size > last.0 {
            let (rise, run) = self.end_slope();
            (last.1.saturating_add(scale(size - last.0, rise, run)), true)
        } else {
            let next = self.points.partition_point(|p| p.0 < size);
            let (x1, y1) = self.points[next];
            if x1 == size {
                (y1, false)
            } else {
                let (x0, y0) = self.points[next - 1];
                (y0 + scale(y1 - y0, size - x0, x1 - x0), false)
            }
        };
        Reading { value, extrapolated }
    }

    /// Rise and run of the slope above the last point: to the nearest lower point, so that a flat (repaired)
    /// end does not promise free work; proportional where no point is lower.
    fn end_slope(&self) -> (u64, u64) {
        let (x, y) = self.points[self.points.len() - 1];
        match self.points.iter().rev().find(|p| p.1 < y) {
            Some(&(x0, y0)) => (y - y0, x - x0),
            None => (y, x.max(1)),
        }
    }

    /// Value that `size` more units add to a total of about `typical` units, rounded down: by the chord from
    /// half to one and a half of `typical`, as the slope at one place follows the noise of two neighbouring
    /// points.
    pub fn marginal(&self, size: u64, typical: u64) -> u64 {
        let typical = typical.max(2);
        let (low, high) = (typical / 2, typical + typical / 2);
        scale(size, self.at(high).value - self.at(low).value, high - low)
    }

    /// Smallest value a unit over the sizes `1..=up_to`: no way to cut `up_to` units into parts costs less a
    /// unit, but for rounding (less than 1 a part).
    ///
    /// `y / x` is monotone on each linear piece, so that its minimum stands at a point or at `up_to`.
    pub fn rate_min(&self, up_to: u64) -> f64 {
        let up_to = up_to.max(1);
        let ends = [(up_to, self.at(up_to).value)];
        let inside = self.points.iter().filter(|p| p.0 > 0 && p.0 <= up_to);
        inside.chain(&ends).map(|&(x, y)| y as f64 / x as f64).fold(f64::INFINITY, f64::min)
    }
}

/// The values nearest to the measured ones (least squares) that do not descend; block means are rounded down.
fn non_decreasing(measured: &[(u64, u64)]) -> Vec<u64> {
    // Blocks of (sum, count); a block merges with the one before it while its mean is lower.
    let mut blocks: Vec<(u128, u128)> = Vec::with_capacity(measured.len());
    for &(_, value) in measured {
        let mut block = (u128::from(value), 1);
        while let Some(&(sum, count)) = blocks.last() {
            if sum * block.1 <= block.0 * count {
                break;
            }
            blocks.pop();
            block = (block.0 + sum, block.1 + count);
        }
        blocks.push(block);
    }
    blocks.iter().flat_map(|&(sum, count)| (0..count).map(move |_| (sum / count) as u64)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn curve(points: &[(u64, u64)]) -> Curve {
        Curve::new(points.iter().copied()).unwrap()
    }

    #[test]
    fn points_come_back_and_lines_join_them() {
        let curve = curve(&[(10, 100), (20, 300), (40, 400)]);
        assert_eq!(curve.num_repaired(), 0);
        for (size, value) in [(10, 100), (20, 300), (40, 400), (15, 200), (30, 350)] {
            assert_eq!(curve.at(size), Reading { value, extrapolated: false }, "{size}");
        }
        assert_eq!(curve.range(), (10, 40));
    }

    #[test]
    fn outside_the_range_the_answer_is_marked() {
        // Slope of the last two points: 100 / 20 = 5. Floor: 100 - 20 * 10 < 0, so 0.
        let steep = curve(&[(10, 100), (20, 300), (40, 400)]);
        assert_eq!(steep.at(60), Reading { value: 500, extrapolated: true });
        assert_eq!(steep.at(5), Reading { value: 50, extrapolated: true });
        // Floor: 100 - 10 * 2 = 80; halfway to the first point: 90.
        let flat = curve(&[(10, 100), (20, 120)]);
        assert_eq!(flat.at(0), Reading { value: 80, extrapolated: true });
        assert_eq!(flat.at(5), Reading { value: 90, extrapolated: true });
    }

    #[test]
    fn one_point_is_constant_below_and_proportional_above() {
        let one = curve(&[(10, 100)]);
        assert_eq!(one.at(1).value, 100);
        assert_eq!(one.at(10), Reading { value: 100, extrapolated: false });
        assert_eq!(one.at(30), Reading { value: 300, extrapolated: true });
    }

    #[test]
    fn falling_medians_are_pooled_and_counted() {
        // 300 then 200 become their mean, 250; the others keep their values.
        let repaired = curve(&[(10, 100), (20, 300), (30, 200), (40, 400)]);
        assert_eq!(repaired.num_repaired(), 2);
        assert_eq!([10, 20, 30, 40].map(|x| repaired.at(x).value), [100, 250, 250, 400]);
    }

    #[test]
    fn a_flat_end_does_not_promise_free_work() {
        // The last two points are equal after the repair; the slope is taken to the first: 150 / 20.
        let repaired = curve(&[(10, 100), (20, 300), (30, 200)]);
        assert_eq!(repaired.at(50).value, 250 + 150);
    }

    #[test]
    fn broken_points_are_named() {
        assert_eq!(Curve::new([]), Err(GridError::Empty));
        assert_eq!(Curve::new([(4, 1), (4, 2)]), Err(GridError::Order { index: 1, size: 4, previous: 4 }));
    }

    #[test]
    fn sizes_near_the_limit_do_not_overflow() {
        let curve = curve(&[(1, 1), (2, u64::MAX)]);
        assert_eq!(curve.at(u64::MAX).value, u64::MAX);
    }

    fn points() -> impl Strategy<Value = Vec<(u64, u64)>> {
        prop::collection::vec((1u64..200, 0u64..100_000), 1..12).prop_map(|steps| {
            let mut size = 0;
            steps
                .into_iter()
                .map(|(step, value)| {
                    size += step;
                    (size, value)
                })
                .collect()
        })
    }

    proptest! {
        #[test]
        fn never_decreasing(points in points(), a in 0u64..4_000, b in 0u64..4_000) {
            let curve = curve(&points);
            prop_assert!(curve.at(a.min(b)).value <= curve.at(a.max(b)).value);
        }

        #[test]
        fn exact_where_in_order(points in points()) {
            let mut ordered = points.clone();
            ordered.sort_by_key(|p| p.1);
            let ordered: Vec<_> = points.iter().zip(ordered).map(|(p, o)| (p.0, o.1)).collect();
            let curve = curve(&ordered);
            prop_assert_eq!(curve.num_repaired(), 0);
            for (size, value) in ordered {
                prop_assert_eq!(curve.at(size), Reading { value, extrapolated: false });
            }
        }

        #[test]
        fn no_cut_beats_the_smallest_rate(points in points(), parts in prop::collection::vec(0u64..700, 1..8)) {
            let curve = curve(&points);
            let total: u64 = parts.iter().sum();
            let cost: u64 = parts.iter().filter(|&&p| p > 0).map(|&p| curve.at(p).value).sum();
            let bound = curve.rate_min(total) * total as f64 - parts.len() as f64;
            prop_assert!(cost as f64 >= bound - 1e-6 * bound.abs(), "{} < {}", cost, bound);
        }
    }
}
