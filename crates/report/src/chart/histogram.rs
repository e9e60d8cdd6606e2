//! Histograms: how many samples have how many tokens, stacked by kind. The axis is logarithmic if a few samples are much
//! larger than the others.

use super::{Frame, Scale, axis_x, axis_y, px, svg};
use dflop_types::{number, statistics};
use maud::{Markup, html};

/// The most bins that are drawn, not counting that of 0.
const MOST_BINS: usize = 26;

/// Counts of values in bins, for each of several series.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Bins {
    /// Bin i holds the values from `edges[i]` to before `edges[i + 1]`.
    pub(crate) edges: Vec<u64>,
    /// Counts of `[bin][series]`.
    pub(crate) counts: Vec<Vec<u64>>,
    /// Counts of zeros for each series; only if the bins are logarithmic, because then no bin holds 0.
    pub(crate) zeros: Option<Vec<u64>>,
    /// Whether the bins are logarithmic: their edges grow by a factor.
    pub(crate) is_log: bool,
}

impl Bins {
    /// Bins over all series. Logarithmic if the largest value is over 8 times the median of those above 0.
    ///
    /// *Complexity*: O(n log n).
    pub(crate) fn new(series: &[Vec<u64>]) -> Self {
        let mut positive: Vec<u64> = series.iter().flatten().copied().filter(|&v| v > 0).collect();
        positive.sort_unstable();
        let (low, high) = match (positive.first(), positive.last()) {
            (Some(&low), Some(&high)) => (low, high),
            _ => (1, 1),
        };
        let median = statistics::occurring(&positive, 0.5).unwrap_or(1);
        let is_log = high / 8 > median;
        let edges = if is_log { log_edges(low, high) } else { linear_edges(high) };
        let mut counts = vec![vec![0; series.len()]; edges.len() - 1];
        let mut zeros = vec![0; series.len()];
        for (index, values) in series.iter().enumerate() {
            for &value in values {
                if is_log && value == 0 {
                    zeros[index] += 1;
                } else {
                    let bin = edges.partition_point(|&edge| edge <= value).saturating_sub(1);
                    counts[bin.min(edges.len() - 2)][index] += 1;
                }
            }
        }
        let zeros = (is_log && zeros.iter().any(|&c| c > 0)).then_some(zeros);
        Self { edges, counts, zeros, is_log }
    }

    /// Rows of the table beside the drawing: the values of a bin, then its count for each series. Empty bins are left out.
    pub(crate) fn rows(&self) -> Vec<Vec<String>> {
        let row = |name: String, counts: &[u64]| {
            let mut row = vec![name];
            row.extend(counts.iter().map(|&c| number::thousands(c)));
            row
        };
        let zeros = self.zeros.iter().map(|counts| row("0".to_owned(), counts));
        let bins = self.edges.windows(2).zip(&self.counts).filter(|(_, c)| c.iter().any(|&n| n > 0));
        let bins = bins.map(|(edge, counts)| {
            let last = edge[1] - 1;
            let name = if edge[0] == last {
                number::thousands(last)
            } else {
                format!("{} to {}", number::thousands(edge[0]), number::thousands(last))
            };
            row(name, counts)
        });
        zeros.chain(bins).collect()
    }
}

/// Edges that grow by about the same factor. They are whole numbers, and all different.
fn log_edges(low: u64, high: u64) -> Vec<u64> {
    let factor = ((high as f64 + 1.0) / low as f64).powf(1.0 / MOST_BINS as f64);
    let mut edges: Vec<u64> =
        (0..MOST_BINS).map(|i| (low as f64 * factor.powf(i as f64)).round() as u64).collect();
    edges[0] = low;
    edges.retain(|&edge| edge <= high);
    edges.push(high.saturating_add(1));
    edges.dedup();
    edges
}

/// Edges from 0 on, all the same round step apart.
fn linear_edges(high: u64) -> Vec<u64> {
    let raw = (high as f64 + 1.0) / MOST_BINS as f64;
    let power = 10f64.powf(raw.log10().floor());
    let step = [1.0, 2.0, 2.5, 5.0, 10.0].map(|m| m * power).into_iter().find(|&s| s >= raw).unwrap_or(raw);
    let step = step.ceil().max(1.0) as u64;
    let mut edges: Vec<u64> = (0..=high / step).map(|i| i * step).collect();
    edges.push(edges[edges.len() - 1].saturating_add(step));
    edges
}

/// The drawing; `classes` are the colours of the series.
pub(crate) fn histogram(label: &str, bins: &Bins, classes: &[&str], names: &[&str], unit: &str) -> Markup {
    let frame = Frame::third();
    let edge = |i: usize| bins.edges[i] as f64;
    let last = bins.edges.len() - 1;
    let has_zero = bins.zeros.is_some();
    let x = if bins.is_log {
        Scale::log((edge(0), edge(last)), frame.x(), has_zero)
    } else {
        Scale::linear((edge(0), edge(last)), frame.x())
    };
    let zeros = bins.zeros.iter().map(|counts| (x.at(0.0) - 9.0, x.at(0.0) + 9.0, counts));
    let columns: Vec<(f64, f64, &Vec<u64>)> = zeros
        .chain(bins.counts.iter().enumerate().map(|(i, counts)| (x.at(edge(i)), x.at(edge(i + 1)), counts)))
        .collect();
    let most = columns.iter().map(|(_, _, counts)| counts.iter().sum::<u64>()).max().unwrap_or(0);
    let y = Scale::linear((0.0, most.max(1) as f64), frame.y());
    let names_of_bins = bins.rows();
    let mut tips = names_of_bins.iter().map(|row| row[0].as_str());
    let body = html! {
        (axis_y(&frame, &y, number::compact, "samples"))
        (axis_x(&frame, &x, number::compact, &if bins.is_log { format!("{unit}, log scale") } else { unit.to_owned() }))
        @for (from, to, counts) in &columns {
            @if counts.iter().any(|&c| c > 0) {
                @let tip = tips.next().unwrap_or_default();
                @for (index, &count) in counts.iter().enumerate().filter(|(_, c)| **c > 0) {
                    @let below: u64 = counts[..index].iter().sum();
                    @let (foot, head) = (y.at(below as f64), y.at((below + count) as f64));
                    rect class=(classes[index]) x=(px(from + 0.5)) y=(px(head)) width=(px((to - from - 1.0).max(1.0))) height=(px(foot - head)) {
                        title { (names[index]) ", " (tip) " " (unit) ": " (number::counted(count, "sample")) }
                    }
                }
            }
        }
    };
    svg(&frame, "", label, &body)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn even_values_get_even_bins_and_heavy_tails_logarithmic_ones() {
        let even = Bins::new(&[(0..50).collect()]);
        assert!(!even.is_log);
        assert_eq!(even.edges[..3], [0, 2, 4]);
        assert_eq!(even.zeros, None);
        let heavy = Bins::new(&[vec![0, 10, 10, 12, 5_000]]);
        assert!(heavy.is_log);
        assert_eq!(heavy.zeros, Some(vec![1]));
        assert_eq!(heavy.rows()[0], ["0", "1"]);
    }

    proptest! {
        #[test]
        fn every_value_is_counted_once(
            series in prop::collection::vec(prop::collection::vec(prop_oneof![0u64..40, 0u64..100_000, Just(u64::MAX)], 0..60), 1..4)
        ) {
            let bins = Bins::new(&series);
            prop_assert!(bins.edges.windows(2).all(|e| e[0] < e[1] || e[1] == u64::MAX));
            prop_assert!(bins.counts.len() <= 2 * MOST_BINS);
            for (index, values) in series.iter().enumerate() {
                let zeros = bins.zeros.as_ref().map_or(0, |z| z[index]);
                let counted: u64 = bins.counts.iter().map(|c| c[index]).sum();
                prop_assert_eq!(counted + zeros, values.len() as u64);
            }
        }
    }
}
