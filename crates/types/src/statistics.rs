//! What a list of numbers says in one: quantiles, means, and how sure they are.
//!
//! The planner, the command line, the report and the data statistics share these, so that one run has one median and one
//! interval wherever it is told.

/// The value below which `part` (0 to 1) of `sorted` lie, by linear interpolation between the two nearest; `None` if
/// there are none. For what was measured: the report and the command line say the same of the same run.
pub fn quantile(sorted: &[f64], part: f64) -> Option<f64> {
    let position = part * sorted.len().checked_sub(1)? as f64;
    let (below, above) = (sorted[position.floor() as usize], sorted[position.ceil() as usize]);
    Some(below + (above - below) * position.fract())
}

/// The [`quantile`] of numbers in any order.
pub fn quantile_of(mut values: Vec<f64>, part: f64) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    quantile(&values, part)
}

/// The value below which `part` (0 to 1) of `sorted` lie, by nearest rank; `None` if there are none. For sizes of samples:
/// it is the size of one that occurs.
pub fn occurring<T: Copy>(sorted: &[T], part: f64) -> Option<T> {
    let rank = (part * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1).min(sorted.len().saturating_sub(1))).copied()
}

/// A mean with its 95 % confidence interval.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Interval {
    /// The mean.
    pub mean: f64,
    /// The lower end.
    pub low: f64,
    /// The upper end.
    pub high: f64,
}

impl Interval {
    /// The arithmetic mean, by Student's t; `None` for fewer than two values, which do not say how much they differ.
    ///
    /// ```text
    /// half width = t(n - 1) * s / sqrt(n),    s = sample standard deviation
    /// ```
    pub fn of(values: &[f64]) -> Option<Self> {
        let n = values.len() as f64;
        if values.len() < 2 {
            return None;
        }
        let mean = values.iter().sum::<f64>() / n;
        let variance = values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (n - 1.0);
        let half_width = student_t_975(values.len() - 1) * (variance / n).sqrt();
        Some(Self { mean, low: mean - half_width, high: mean + half_width })
    }

    /// The geometric mean of ratios: the interval of their logarithms. Two arms whose step times are told as geometric
    /// means divide to exactly this mean. `None` for fewer than two.
    pub fn of_ratios(ratios: impl IntoIterator<Item = f64>) -> Option<Self> {
        let logarithms: Vec<f64> = ratios.into_iter().map(f64::ln).collect();
        let Self { mean, low, high } = Self::of(&logarithms)?;
        Some(Self { mean: mean.exp(), low: low.exp(), high: high.exp() })
    }
}

impl Interval {
    /// The mean of `ours` less that of `theirs`, which are no pairs, by Welch's t; `None` for fewer than two of either.
    ///
    /// ```text
    /// half width = t(degrees) * sqrt(a + b),    a = variance of ours / their number, b likewise
    /// degrees    = (a + b)^2 / (a^2 / (n - 1) + b^2 / (m - 1)), rounded down
    /// ```
    pub fn of_difference(ours: &[f64], theirs: &[f64]) -> Option<Self> {
        let parts = |values: &[f64]| {
            let n = values.len() as f64;
            let mean = values.iter().sum::<f64>() / n;
            let variance = values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (n - 1.0);
            (values.len() >= 2).then_some((mean, variance / n, n - 1.0))
        };
        let ((mean, a, n), (other, b, m)) = (parts(ours)?, parts(theirs)?);
        let degrees = (a + b).powi(2) / (a * a / n + b * b / m);
        // Without any scatter there are no degrees to count, and no width either.
        let half_width =
            if a + b > 0.0 { student_t_975(degrees.floor().max(1.0) as usize) * (a + b).sqrt() } else { 0.0 };
        Some(Self { mean: mean - other, low: mean - other - half_width, high: mean - other + half_width })
    }

    /// The geometric mean of `ours` over that of `theirs`, which are no pairs: [`Interval::of_difference`] of the
    /// logarithms.
    pub fn of_ratio(ours: &[f64], theirs: &[f64]) -> Option<Self> {
        let logarithms = |values: &[f64]| values.iter().map(|x| x.ln()).collect::<Vec<f64>>();
        let Self { mean, low, high } = Self::of_difference(&logarithms(ours), &logarithms(theirs))?;
        Some(Self { mean: mean.exp(), low: low.exp(), high: high.exp() })
    }
}

/// The geometric mean; `None` if there are none.
pub fn geometric_mean(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let (sum, count) = values.into_iter().fold((0.0, 0u64), |(sum, count), x| (sum + x.ln(), count + 1));
    (count > 0).then(|| (sum / count as f64).exp())
}

/// The 97.5 % point of Student's t with `degrees` degrees of freedom; infinite with none. Half a 95 % interval.
///
/// The table's own values up to 30 degrees. Beyond them the Cornish-Fisher expansion about the normal quantile
/// (Abramowitz and Stegun 26.7.5), which is right to four digits there.
pub fn student_t_975(degrees: usize) -> f64 {
    const TABLE: [f64; 31] = [
        f64::INFINITY,
        12.706,
        4.303,
        3.182,
        2.776,
        2.571,
        2.447,
        2.365,
        2.306,
        2.262,
        2.228,
        2.201,
        2.179,
        2.160,
        2.145,
        2.131,
        2.120,
        2.110,
        2.101,
        2.093,
        2.086,
        2.080,
        2.074,
        2.069,
        2.064,
        2.060,
        2.056,
        2.052,
        2.048,
        2.045,
        2.042,
    ];
    if let Some(&value) = TABLE.get(degrees) {
        return value;
    }
    let z: f64 = 1.959_963_985;
    let d = degrees as f64;
    let g1 = (z.powi(3) + z) / 4.0;
    let g2 = (5.0 * z.powi(5) + 16.0 * z.powi(3) + 3.0 * z) / 96.0;
    let g3 = (3.0 * z.powi(7) + 19.0 * z.powi(5) + 17.0 * z.powi(3) - 15.0 * z) / 384.0;
    z + g1 / d + g2 / (d * d) + g3 / (d * d * d)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_near(a: f64, b: f64) -> bool {
        (a - b).abs() <= 1e-9 * b.abs().max(1.0)
    }

    #[test]
    fn quantiles_of_sizes_occur() {
        assert_eq!(occurring::<u64>(&[], 0.5), None);
        assert_eq!(occurring(&[7], 0.95), Some(7));
        assert_eq!(occurring(&[1, 2, 3, 4], 0.5), Some(2));
        assert_eq!(occurring(&[1, 2, 3, 4], 1.0), Some(4));
        assert_eq!(occurring(&[1, 2, 3, 4], 0.0), Some(1));
    }

    #[test]
    fn quantiles_of_measurements_lie_between_them() {
        assert_eq!(quantile(&[], 0.5), None);
        assert_eq!(quantile(&[7.0], 0.95), Some(7.0));
        let four = [1.0, 2.0, 3.0, 5.0];
        assert_eq!([0.0, 0.5, 0.75, 1.0].map(|part| quantile(&four, part)), [1.0, 2.5, 3.5, 5.0].map(Some));
        assert_eq!(quantile_of(vec![5.0, 1.0, 3.0, 2.0], 0.5), Some(2.5));
    }

    #[test]
    fn student_t_meets_the_table() {
        for (degrees, expected) in
            [(1, 12.706), (5, 2.571), (30, 2.042), (40, 2.021), (60, 2.000), (120, 1.980)]
        {
            let found = student_t_975(degrees);
            assert!((found - expected).abs() < 0.001, "{degrees}: {found}, {expected}");
        }
        assert!(student_t_975(0).is_infinite());
        let falls = (1..200).all(|degrees| student_t_975(degrees + 1) <= student_t_975(degrees));
        assert!(falls, "more degrees of freedom never widen an interval");
    }

    #[test]
    fn an_interval_by_hand() {
        // Mean 20, s = 10, n = 3: t(2) x 10 / sqrt 3 = 24.843.
        let found = Interval::of(&[10.0, 20.0, 30.0]).unwrap();
        assert!(is_near(found.mean, 20.0) && is_near(found.high - found.mean, 4.303 * 10.0 / 3_f64.sqrt()));
        assert!(is_near(found.mean - found.low, found.high - found.mean));
        assert_eq!(Interval::of(&[7.0]), None);
        assert_eq!(Interval::of(&[]), None);
    }

    #[test]
    fn a_difference_of_what_are_no_pairs_by_hand() {
        // Means 20 and 5; variances 100 / 3 and 2 / 2; degrees (34.33)^2 / (33.33^2 / 2 + 1) = 2.117.
        let found = Interval::of_difference(&[10.0, 20.0, 30.0], &[4.0, 6.0]).unwrap();
        assert!(is_near(found.mean, 15.0), "{found:?}");
        assert!(is_near(found.high - 15.0, 4.303 * (103.0_f64 / 3.0).sqrt()), "{found:?}");
        assert!(is_near(found.high - 15.0, 15.0 - found.low));
        assert_eq!(
            Interval::of_difference(&[2.0, 2.0], &[1.0, 1.0]),
            Some(Interval { mean: 1.0, low: 1.0, high: 1.0 })
        );
        assert_eq!(Interval::of_difference(&[2.0], &[1.0, 1.0]), None);
        assert!(is_near(Interval::of_ratio(&[1.0, 100.0], &[5.0, 5.0]).unwrap().mean, 2.0));
    }

    #[test]
    fn ratios_have_a_geometric_mean() {
        let found = Interval::of_ratios([2.0, 0.5]).unwrap();
        assert!(is_near(found.mean, 1.0) && is_near(found.low * found.high, 1.0), "{found:?}");
        assert!(is_near(geometric_mean([1.0, 100.0]).unwrap(), 10.0));
        assert_eq!(geometric_mean([]), None);
    }
}
