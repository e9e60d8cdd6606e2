//! A ratio of two sums over steps, and how sure it is.

use dflop_types::number;
use dflop_types::statistics::student_t_975;

/// A number, and half the width of its 95 % interval.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Estimate {
    pub(crate) mean: f64,
    /// `None` of a single step, which does not say how much steps differ.
    pub(crate) half: Option<f64>,
}

impl Estimate {
    /// The sum of `above` over that of `below`, a number of each a step; `below` sums to more than 0.
    ///
    /// The interval is that of a ratio estimator: with r the ratio, it is Student's over the steps' above - r below.
    pub(crate) fn of_ratio(above: &[f64], below: &[f64]) -> Self {
        let count = above.len() as f64;
        let total = below.iter().sum::<f64>();
        let mean = above.iter().sum::<f64>() / total;
        let half = (above.len() > 1).then(|| {
            let squares: f64 = above.iter().zip(below).map(|(a, b)| (a - mean * b).powi(2)).sum();
            let deviation = (squares / (count - 1.0) / count).sqrt();
            student_t_975(above.len() - 1) * deviation / (total / count)
        });
        Self { mean, half }
    }

    /// This over another, as if they varied apart: where they vary together the true interval is narrower.
    pub(crate) fn over(self, other: Self) -> Self {
        let mean = self.mean / other.mean;
        let half = self.half.zip(other.half);
        Self { mean, half: half.map(|(a, b)| mean * (a / self.mean).hypot(b / other.mean)) }
    }

    /// The lower end of the interval; the number itself where there is none.
    pub(crate) fn low(self) -> f64 {
        self.mean - self.half.unwrap_or(0.0)
    }

    /// The upper end, likewise.
    pub(crate) fn high(self) -> f64 {
        self.mean + self.half.unwrap_or(0.0)
    }

    /// As people read it: `1.800 (1.750 to 1.850)`.
    pub(crate) fn text(self) -> String {
        self.with_unit("")
    }

    /// As a speed: `1.800x (1.750 to 1.850)`.
    pub(crate) fn times(self) -> String {
        self.with_unit("x")
    }

    fn with_unit(self, unit: &str) -> String {
        let interval = self.half.map(|_| format!(" ({})", number::ratios(self.low(), self.high())));
        let mean = number::times(self.mean);
        format!("{}{unit}{}", mean.trim_end_matches('x'), interval.unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ratio_of_sums_with_its_interval() {
        // 6 over 4; residuals 1 - 1.5 and 5 - 4.5: squares 0.5, deviation 0.5, t of one degree 12.706, mean below 2.
        let found = Estimate::of_ratio(&[1.0, 5.0], &[1.0, 3.0]);
        assert!((found.mean - 1.5).abs() < 1e-12);
        assert!((found.half.unwrap() - 12.706 * 0.5 / 2.0).abs() < 1e-3, "{found:?}");
        assert_eq!(Estimate::of_ratio(&[3.0], &[2.0]), Estimate { mean: 1.5, half: None });
        assert_eq!(Estimate::of_ratio(&[3.0, 6.0], &[2.0, 4.0]).half, Some(0.0));
    }

    #[test]
    fn a_ratio_of_ratios_is_as_unsure_as_both() {
        let [three, four] = [3.0, 4.0].map(|percent| Estimate { mean: 2.0, half: Some(percent / 50.0) });
        let found = three.over(Estimate { mean: 1.0, half: four.half.map(|half| half / 2.0) });
        assert!((found.mean - 2.0).abs() < 1e-12 && (found.half.unwrap() - 0.1).abs() < 1e-12, "{found:?}");
        assert_eq!(found.text(), "2.000 (1.900 to 2.100)");
        assert_eq!(Estimate { mean: 1.5, half: None }.times(), "1.500x");
    }
}
