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

/// Where a size lies among the sizes of a curve; the same for all curves over the same sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Position {
    /// On the point of this position.
    At(usize),
    /// `part` of `run` behind the point before `next`.
    Between { next: usize, part: u64, run: u64 },
    /// Below the first point.
    Below(u64),
    /// Above the last point.
    Above(u64),
}

impl Position {
    /// Whether the size lies outside the measured range.
    pub(crate) const fn is_outside(self) -> bool {
        matches!(self, Self::Below(_) | Self::Above(_))
    }
}

/// How a curve goes on above its last point.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Growth {
    /// By the slope of its end: the work of what is linear in tokens.
    #[default]
    Linear,
    /// By a slope that grows with the size: the work of attention, which is a square of it.
    Square,
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
/// above:  y = y_n + (x - x_n) * slope                             Growth::Linear
///         y = y_n + (x - x_n) * slope * (x + x_n) / (x_n + x_k)   Growth::Square: exact for y = a + c x^2
///         slope = (y_n - y_k) / (x_n - x_k), x_k the nearest size up to x_n / 2 with a lower value, else the
///         nearest size with one
/// below:  y = floor + (y_1 - floor) * x / x_1
///         floor = line through the first two points at x = 0, held within 0..=y_1
/// ```
///
/// The slope is taken over half the range, because the slope between two neighbours follows their noise. One point
/// alone says nothing about a slope. Then the curve is constant below the point (all floor) and proportional above
/// it, which predicts too much rather than too little on both sides.
///
/// *Invariants*: sizes ascend strictly, values do not descend.
///
/// *References*: Barlow et al., "Statistical Inference under Order Restrictions", 1972 (pool adjacent
/// violators).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Curve {
    points: Vec<(u64, u64)>,
    /// Slope of the piece that ends at each point, in parts of 2^[`SLOPE_BITS`], rounded up; 0 where no such slope
    /// gives exactly the same quotients as a division.
    slopes: Vec<u64>,
    /// For each power of two, from that of the first size on: how many points are smaller ([`power`]). With it a size is sought
    /// only among the points of its own power.
    starts: Vec<usize>,
    floor: u64,
    /// Rise and run of the slope above the last point.
    end: (u64, u64),
    growth: Growth,
    num_repaired: u32,
}

/// Bits behind the point of a slope. A product with it, cut off, equals the quotient rounded down as long as a piece is
/// shorter than 2^22: the slope is too large by less than 2^-44, over the piece by less than 2^-22, and what is cut off
/// is at least 1/run short of the next integer.
const SLOPE_BITS: u32 = 44;

/// The slope of a piece in that form; 0 if it does not fit.
fn slope(rise: u64, run: u64) -> u64 {
    if run >= 1 << (SLOPE_BITS / 2) {
        return 0;
    }
    u64::try_from((u128::from(rise) << SLOPE_BITS).div_ceil(u128::from(run))).unwrap_or(0)
}

/// Number of bits of a size: sizes of one power are those from a power of two to below the next.
const fn power(size: u64) -> usize {
    (u64::BITS - size.leading_zeros()) as usize
}

/// [`Curve::starts`] of these points.
fn starts(points: &[(u64, u64)]) -> Vec<usize> {
    let (first, last) = (power(points[0].0), power(points[points.len() - 1].0));
    (first..=last + 1).map(|bits| points.partition_point(|point| power(point.0) < bits)).collect()
}

/// Quotient of a product, rounded down, held at `u64::MAX`; `divisor` is not 0.
pub(crate) fn scale(value: u64, factor: u64, divisor: u64) -> u64 {
    // Nearly all products fit 64 bits, whose division takes a fraction of the time.
    if let Some(product) = value.checked_mul(factor) {
        return product / divisor;
    }
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
        let end = end_slope(&points);
        let pieces = points.windows(2).map(|pair| slope(pair[1].1 - pair[0].1, pair[1].0 - pair[0].0));
        let slopes = std::iter::once(0).chain(pieces).collect();
        let starts = starts(&points);
        Ok(Self { points, slopes, starts, floor, end, growth: Growth::Linear, num_repaired })
    }

    /// The same curve, going on above its last point by `growth`.
    #[must_use]
    pub fn growing(self, growth: Growth) -> Self {
        Self { growth, ..self }
    }

    /// The sum of this curve and one over the same sizes.
    ///
    /// # Panics
    /// If the sizes differ.
    pub(crate) fn plus(&self, other: &Self) -> Self {
        assert!(self.points.len() == other.points.len(), "curves of one grid are added");
        let sum = self.points.iter().zip(&other.points).map(|(a, b)| {
            assert!(a.0 == b.0, "curves of one grid are added");
            (a.0, a.1.saturating_add(b.1))
        });
        let sum = Self::new(sum).expect("a curve has points by ascending size");
        sum.growing(self.growth)
    }

    /// Points whose measured value fell below that of a smaller size and was replaced.
    pub const fn num_repaired(&self) -> u32 {
        self.num_repaired
    }

    /// Smallest and largest measured size.
    pub fn range(&self) -> (u64, u64) {
        (self.points[0].0, self.points[self.points.len() - 1].0)
    }

    /// Whether it is 0 everywhere: a quantity that was not measured, or does not arise.
    pub fn is_zero(&self) -> bool {
        self.points.iter().all(|point| point.1 == 0)
    }

    /// The value at `size`: exact at points that needed no repair, linear between them, never decreasing in
    /// `size`.
    ///
    /// *Complexity*: O(log n).
    pub fn at(&self, size: u64) -> Reading {
        let position = self.position(size);
        Reading { value: self.read(position), extrapolated: position.is_outside() }
    }

    /// Where `size` lies among the points.
    ///
    /// *Complexity*: O(log n) for n points of the size's power of two.
    pub(crate) fn position(&self, size: u64) -> Position {
        let (first, last) = self.range();
        if size < first {
            return Position::Below(size);
        }
        if size > last {
            return Position::Above(size);
        }
        let at = power(size) - power(first);
        let (low, high) = (self.starts[at], self.starts[at + 1]);
        let next = low + self.points[low..high].partition_point(|point| point.0 < size);
        let x1 = self.points[next].0;
        if x1 == size {
            return Position::At(next);
        }
        let x0 = self.points[next - 1].0;
        Position::Between { next, part: size - x0, run: x1 - x0 }
    }

    /// The value at a position of these sizes.
    ///
    /// *Complexity*: O(1).
    pub(crate) fn read(&self, position: Position) -> u64 {
        match position {
            Position::At(index) => self.points[index].1,
            Position::Between { next, part, run } => {
                let (y0, slope) = (self.points[next - 1].1, self.slopes[next]);
                // A product instead of a division, which takes several times as long.
                if slope == 0 {
                    return y0 + scale(self.points[next].1 - y0, part, run);
                }
                y0 + along(slope, part)
            }
            Position::Below(size) => {
                let (x1, y1) = self.points[0];
                self.floor + scale(y1 - self.floor, size, x1)
            }
            Position::Above(size) => {
                let (x, y) = self.points[self.points.len() - 1];
                let (rise, run) = self.end;
                let line = scale(size - x, rise, run);
                y.saturating_add(match self.growth {
                    Growth::Linear => line,
                    Growth::Square => {
                        let middle = x.saturating_add(x - run.min(x)).max(1);
                        scale(line, size.saturating_add(x), middle)
                    }
                })
            }
        }
    }

    /// Smallest value a unit over the sizes `1..=up_to`: no way to cut `up_to` units into parts costs less a
    /// unit, but for rounding (less than 1 a part). For a curve of linear growth.
    ///
    /// `y / x` is monotone on each linear piece, so that its minimum stands at a point or at `up_to`.
    pub fn rate_min(&self, up_to: u64) -> f64 {
        let up_to = up_to.max(1);
        let ends = [(up_to, self.at(up_to).value)];
        let inside = self.points.iter().filter(|p| p.0 > 0 && p.0 <= up_to);
        inside.chain(&ends).map(|&(x, y)| y as f64 / x as f64).fold(f64::INFINITY, f64::min)
    }
}

impl Curve {
    /// Values and slopes by point, as [`Curve::read`] takes them.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.points.iter().zip(&self.slopes).map(|(point, &slope)| (point.1, slope))
    }

    /// Whether the product with a slope gives the very quotient, on each piece.
    pub(crate) fn has_slopes(&self) -> bool {
        let flat = |index: usize| self.points[index].1 == self.points[index - 1].1;
        (1..self.slopes.len()).all(|index| self.slopes[index] > 0 || flat(index))
    }
}

/// What a piece adds after `part` of it.
pub(crate) fn along(slope: u64, part: u64) -> u64 {
    ((u128::from(slope) * u128::from(part)) >> SLOPE_BITS) as u64
}

/// Value that `size` more units add to a total of about `typical` units, rounded down: by the chord of `at` from
/// half to one and a half of `typical`, as the slope at one place follows the noise of two neighbouring points.
pub(crate) fn marginal(size: u64, typical: u64, at: impl Fn(u64) -> u64) -> u64 {
    if size == 0 {
        return 0;
    }
    let typical = typical.max(2);
    let (low, high) = (typical / 2, typical.saturating_add(typical / 2));
    scale(size, at(high).saturating_sub(at(low)), high - low)
}

/// Rise and run of the slope above the last point. A flat (repaired) end does not promise free work: proportional
/// where no point is lower.
fn end_slope(points: &[(u64, u64)]) -> (u64, u64) {
    let (x, y) = points[points.len() - 1];
    let mut lower = points.iter().rev().filter(|p| p.1 < y);
    let nearest = lower.clone().next();
    match lower.find(|p| p.0 <= x / 2).or(nearest) {
        Some(&(x0, y0)) => (y - y0, x - x0),
        None => (y, x.max(1)),
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
        assert_eq!(curve.growing(Growth::Square).at(u64::MAX).value, u64::MAX);
    }

    #[test]
    fn the_end_is_read_over_half_the_range() {
        // From 50 (half of 100) and not from the noisy neighbour at 99: (200 - 100) / 50 = 2.
        let curve = curve(&[(10, 20), (50, 100), (99, 199), (100, 200)]);
        assert_eq!(curve.at(150).value, 300);
    }

    #[test]
    fn a_square_goes_on_as_one() {
        let square = curve(&[(10, 107), (20, 407), (40, 1_607)]).growing(Growth::Square);
        // 7 + x^2 above 40; the floor below: 107 - 10 * 30 < 0, so 0.
        assert_eq!(square.at(80), Reading { value: 7 + 6_400, extrapolated: true });
        assert_eq!(square.at(50).value, 7 + 2_500);
        assert_eq!(square.at(5).value, 53);
        // One point alone: y_1 * (x / x_1)^2.
        assert_eq!(curve(&[(10, 100)]).growing(Growth::Square).at(30).value, 900);
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
        /// A size is found where a look at every point finds it.
        #[test]
        fn a_size_lies_behind_all_smaller_points(
            steps in prop::collection::vec((0u32..60, 0u64..9), 1..20), asked in 0u32..64, more in 0u64..9,
        ) {
            let mut sizes: Vec<u64> = steps.iter().map(|&(power, more)| (1 << power) + more).collect();
            sizes.sort_unstable();
            sizes.dedup();
            let curve = Curve::new(sizes.iter().map(|&size| (size, size))).unwrap();
            for size in sizes.iter().copied().chain([0, (1 << asked) + more, (1 << asked) - 1, u64::MAX]) {
                let next = sizes.iter().filter(|&&point| point < size).count();
                prop_assert_eq!(curve.position(size), match sizes.get(next) {
                    None => Position::Above(size),
                    Some(&found) if found == size => Position::At(next),
                    Some(_) if next == 0 => Position::Below(size),
                    Some(&x1) => Position::Between { next, part: size - sizes[next - 1], run: x1 - sizes[next - 1] },
                });
            }
        }

        #[test]
        fn never_decreasing(points in points(), a in 0u64..4_000, b in 0u64..4_000) {
            let curve = curve(&points);
            prop_assert!(curve.at(a.min(b)).value <= curve.at(a.max(b)).value);
            let square = curve.growing(Growth::Square);
            prop_assert!(square.at(a.min(b)).value <= square.at(a.max(b)).value);
        }

        #[test]
        fn between_points_stands_the_quotient_rounded_down(
            x in 0u64..1 << 30, run in 2u64..1 << 23, y in 0u64..1 << 50, rise in 0u64..1 << 40, part: u64
        ) {
            let part = 1 + part % (run - 1);
            let curve = curve(&[(x, y), (x + run, y + rise)]);
            let exact = u128::from(y) + u128::from(rise) * u128::from(part) / u128::from(run);
            prop_assert_eq!(u128::from(curve.at(x + part).value), exact);
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
