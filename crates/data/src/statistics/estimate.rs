//! What a stratified random sample says of the whole: percentiles and means with 95 % confidence intervals.
//!
//! ```text
//! strata h:  N_h samples, n_h drawn of them without replacement, m_h of these read;  w_h = N_h / n_h
//! mean       = sum_h W_h mean_h / W,  W_h = w_h m_h,  W = sum_h W_h
//! variance   = sum_h (W_h / W)^2 (1 - n_h / N_h) s_h^2 / m_h     s_h^2 of one sample: that of all samples
//! percentile = smallest x whose samples up to x weigh p W
//! ```
//!
//! The interval of a percentile has order statistics at its ends: with m samples of W, of which K = ceil(p W) are not
//! above the percentile, B ~ Hypergeometric(W, K, m) samples are not above it; the lower rank l is the largest with
//! P(B < l) <= 2.5 %, the upper one the smallest with P(B >= u) <= 2.5 % at K - 1. The finite population is in the
//! distribution: a sample of all has an interval of no width. Shares in proportion to the strata make the true
//! coverage higher. Where weights differ, m is Kish's effective size (sum w)^2 / sum w^2.

use dflop_types::statistics::student_t_975;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Probability outside either end of an interval.
const TAIL: f64 = 0.025;

/// How often each value occurs, by value. *Memory*: O(different values), at most the largest value.
pub type ValueCounts = BTreeMap<u64, u64>;

/// Ends of a 95 % confidence interval of a percentile; `None` where the sample is too small to bound it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bounds {
    /// Lower end.
    pub low: Option<u64>,
    /// Upper end.
    pub high: Option<u64>,
}

/// 95 % confidence intervals of a distribution of which a sample is known.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Intervals {
    /// Half the width of the mean's; `None` of a single sample.
    pub mean_half_width: Option<f64>,
    /// Of the 5th percentile.
    pub p5: Bounds,
    /// Of the median.
    pub p50: Bounds,
    /// Of the 95th percentile.
    pub p95: Bounds,
    /// Of the 99th percentile.
    pub p99: Bounds,
}

/// The samples of one stratum.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StratumValues<'a> {
    /// Samples there are.
    pub(crate) population: u64,
    /// Samples drawn.
    pub(crate) drawn: u64,
    /// Those that were read.
    pub(crate) counts: &'a ValueCounts,
}

impl StratumValues<'_> {
    fn num_read(&self) -> u64 {
        self.counts.values().sum()
    }

    /// Samples that each one read stands for.
    fn weight(&self) -> f64 {
        self.population as f64 / self.drawn.max(1) as f64
    }
}

/// A stratified sample of one size.
#[derive(Debug)]
pub(crate) struct Estimate {
    /// (value, weight of all samples up to it), ascending.
    cumulative: Vec<(u64, f64)>,
    /// Weight of all samples: the size of the whole.
    whole: f64,
    /// Effective number of samples.
    effective: u64,
    /// Of a sample of the whole.
    pub(crate) mean: f64,
    /// Half the width of the mean's interval.
    mean_half_width: Option<f64>,
}

impl Estimate {
    /// The estimate from `strata`; `None` where no sample was read.
    pub(crate) fn new(strata: &[StratumValues<'_>]) -> Option<Self> {
        let mut weights: BTreeMap<u64, f64> = BTreeMap::new();
        let (mut whole, mut squares) = (0.0, 0.0);
        for stratum in strata {
            for (&value, &count) in stratum.counts {
                *weights.entry(value).or_default() += count as f64 * stratum.weight();
            }
            whole += stratum.num_read() as f64 * stratum.weight();
            squares += stratum.num_read() as f64 * stratum.weight().powi(2);
        }
        if weights.is_empty() {
            return None;
        }
        let mut sum = 0.0;
        let cumulative = weights.into_iter().map(|(value, weight)| {
            sum += weight;
            (value, sum)
        });
        let (mean, mean_half_width) = mean(strata, whole);
        Some(Self {
            cumulative: cumulative.collect(),
            whole,
            effective: (whole * whole / squares + 1e-9) as u64,
            mean,
            mean_half_width,
        })
    }

    /// The smallest value up to which a part `share` of the whole lies.
    pub(crate) fn percentile(&self, share: f64) -> u64 {
        // Sums of weights are off by roundings; a rank is not.
        let wanted = self.whole * (share - 1e-9);
        let at = self.cumulative.partition_point(|&(_, weight)| weight < wanted);
        self.cumulative[at.min(self.cumulative.len() - 1)].0
    }

    fn bounds(&self, percent: u64) -> Bounds {
        let population = self.whole.round() as u64;
        let drawn = self.effective.min(population);
        let (low, high) = ranks(population, drawn, percent);
        let value = |rank: u64| self.percentile(rank as f64 / drawn as f64);
        Bounds { low: low.map(value), high: high.map(value) }
    }

    /// The intervals.
    pub(crate) fn intervals(&self) -> Intervals {
        Intervals {
            mean_half_width: self.mean_half_width,
            p5: self.bounds(5),
            p50: self.bounds(50),
            p95: self.bounds(95),
            p99: self.bounds(99),
        }
    }
}

/// (mean, half the width of its interval).
fn mean(strata: &[StratumValues<'_>], whole: f64) -> (f64, Option<f64>) {
    let moments = |counts: &mut dyn Iterator<Item = (u64, u64)>| {
        let (mut n, mut mean, mut m2) = (0.0, 0.0, 0.0);
        for (value, count) in counts {
            // Welford's update by a group of equal values.
            let (value, count) = (value as f64, count as f64);
            let step = value - mean;
            n += count;
            mean += step * count / n;
            m2 += step * (value - mean) * count;
        }
        (n, mean, if n > 1.0 { Some(m2 / (n - 1.0)) } else { None })
    };
    let mut all = strata.iter().flat_map(|s| s.counts).map(|(&value, &count)| (value, count));
    let (total, _, of_all) = moments(&mut all);
    let (mut mean, mut variance, mut degrees) = (0.0, 0.0, 0.0);
    for stratum in strata.iter().filter(|s| !s.counts.is_empty()) {
        let (n, mean_here, of_stratum) = moments(&mut stratum.counts.iter().map(|(&v, &c)| (v, c)));
        let share = n * stratum.weight() / whole;
        mean += share * mean_here;
        let rest = (1.0 - stratum.drawn as f64 / stratum.population.max(1) as f64).max(0.0);
        variance += share * share * rest * of_stratum.or(of_all).unwrap_or(0.0) / n;
        degrees += n - 1.0;
    }
    let is_known = total > 1.0 || variance == 0.0 && strata.iter().all(|s| s.drawn == s.population);
    (mean, is_known.then(|| student_t_975(degrees.max(1.0) as usize) * variance.sqrt()))
}

/// Ranks, from 1, of the samples at the ends of the interval of a percentile.
fn ranks(population: u64, drawn: u64, percent: u64) -> (Option<u64>, Option<u64>) {
    let marked = (u128::from(population) * u128::from(percent)).div_ceil(100).max(1) as u64;
    let (first, weights) = hypergeometric(population, marked, drawn);
    let mut low = first;
    let mut below = 0.0;
    for weight in &weights {
        below += weight;
        if below > TAIL {
            break;
        }
        low += 1;
    }
    let (first, weights) = hypergeometric(population, marked - 1, drawn);
    let mut high = first + weights.len() as u64;
    let mut above = 0.0;
    for weight in weights.iter().rev() {
        above += weight;
        if above > TAIL {
            break;
        }
        high -= 1;
    }
    ((low > 0).then_some(low), (high <= drawn).then_some(high.max(1)))
}

/// Probabilities of 0, 1, ... marked ones among `drawn` of `population`, `marked` of which are: the first count that
/// is not negligible, and the probabilities from there on.
///
/// Terms are taken from the mode outwards by their ratios and scaled to a sum of 1, so that no factorial is needed.
fn hypergeometric(population: u64, marked: u64, drawn: u64) -> (u64, Vec<f64>) {
    const NEGLIGIBLE: f64 = 1e-18;
    let least = (drawn + marked).saturating_sub(population);
    let most = drawn.min(marked);
    let mode = ((u128::from(drawn) + 1) * (u128::from(marked) + 1) / (u128::from(population) + 2)) as u64;
    let mode = mode.clamp(least, most);
    // P(k + 1) / P(k)
    let ratio = |k: u64| {
        let up = (marked - k) as f64 * (drawn - k) as f64;
        up / ((k + 1) as f64 * (population + k + 1 - marked - drawn) as f64)
    };
    let mut down = Vec::new();
    let (mut k, mut term) = (mode, 1.0);
    while k > least {
        term /= ratio(k - 1);
        if term < NEGLIGIBLE {
            break;
        }
        down.push(term);
        k -= 1;
    }
    let first = k;
    let mut terms: Vec<f64> = down.into_iter().rev().collect();
    terms.push(1.0);
    let (mut k, mut term) = (mode, 1.0);
    while k < most {
        term *= ratio(k);
        if term < NEGLIGIBLE {
            break;
        }
        terms.push(term);
        k += 1;
    }
    let sum: f64 = terms.iter().sum();
    for term in &mut terms {
        *term /= sum;
    }
    (first, terms)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::RngExt;
    use rand_chacha::ChaCha8Rng;
    use rand_chacha::rand_core::SeedableRng;

    fn counts(values: impl IntoIterator<Item = u64>) -> ValueCounts {
        values.into_iter().fold(ValueCounts::new(), |mut counts, value| {
            *counts.entry(value).or_default() += 1;
            counts
        })
    }

    #[test]
    fn the_distribution_is_that_of_an_urn() {
        // 5 of 10 marked, 4 drawn: C(5,k) C(5,4-k) / 210 = 5, 50, 100, 50, 5 in 210.
        let (first, found) = hypergeometric(10, 5, 4);
        assert_eq!(first, 0);
        for (found, expected) in found.iter().zip([5.0, 50.0, 100.0, 50.0, 5.0]) {
            assert!((found - expected / 210.0).abs() < 1e-12, "{found}");
        }
        assert_eq!(hypergeometric(10, 4, 10), (4, vec![1.0]));
        assert_eq!(hypergeometric(10, 0, 3), (0, vec![1.0]));
    }

    #[test]
    fn ranks_are_those_of_the_binomial_in_a_large_population() {
        // Tables of distribution-free intervals: the median of 100 lies between the 40th and the 61st.
        assert_eq!(ranks(1_000_000_000, 100, 50), (Some(40), Some(61)));
        // Of 20 samples none bounds the 5th percentile from below, nor 100 the 99th from above.
        assert_eq!(ranks(1_000_000_000, 20, 5).0, None);
        assert_eq!(ranks(1_000_000_000, 100, 99).1, None);
        // All are known.
        assert_eq!(ranks(100, 100, 95), (Some(95), Some(95)));
    }

    #[test]
    fn a_sample_of_all_is_certain() {
        let (a, b) = (counts(1..=60), counts(61..=100));
        let strata =
            [(60, &a), (40, &b)].map(|(n, counts)| StratumValues { population: n, drawn: n, counts });
        let estimate = Estimate::new(&strata).unwrap();
        assert!((estimate.mean - 50.5).abs() < 1e-9);
        assert_eq!([0.05, 0.5, 0.95, 0.99].map(|p| estimate.percentile(p)), [5, 50, 95, 99]);
        let intervals = estimate.intervals();
        assert_eq!(intervals.p95, Bounds { low: Some(95), high: Some(95) });
        assert_eq!(intervals.mean_half_width, Some(0.0));
        assert!(Estimate::new(&[]).is_none());
    }

    #[test]
    fn weights_stand_for_their_populations() {
        // 900 samples of size 1, of which 1 was drawn, and 100 of size 9, of which 1 was.
        let (a, b) = (counts([1]), counts([9]));
        let strata =
            [(900, &a), (100, &b)].map(|(n, counts)| StratumValues { population: n, drawn: 1, counts });
        let estimate = Estimate::new(&strata).unwrap();
        assert!((estimate.mean - 1.8).abs() < 1e-9);
        assert_eq!(
            (estimate.percentile(0.5), estimate.percentile(0.9), estimate.percentile(0.95)),
            (1, 1, 9)
        );
    }

    /// In 400 seeded samples of a skewed population, intervals hold the truth at least as often as they say.
    #[test]
    fn intervals_cover_the_truth() {
        let mut random = ChaCha8Rng::seed_from_u64(7);
        let mut source = |n: u64, base: u64| -> Vec<u64> {
            (0..n).map(|_| base + (-random.random::<f64>().ln() * 300.0) as u64).collect()
        };
        let population = [source(6000, 20), source(3000, 200), source(1000, 900)];
        let all: Vec<u64> = population.iter().flatten().copied().collect();
        let total = all.len() as u64;
        let mut sorted = all.clone();
        sorted.sort_unstable();
        let truth = [5, 50, 95, 99].map(|p| sorted[(total * p / 100 - 1) as usize]);
        let mean = all.iter().sum::<u64>() as f64 / total as f64;
        let mut held = [0; 5];
        let rounds = 400;
        for _ in 0..rounds {
            let drawn = population.each_ref().map(|values| {
                let wanted = values.len() / 20;
                let mut pool = values.clone();
                let picked = (0..wanted).map(|k| {
                    let other = random.random_range(k..pool.len());
                    pool.swap(k, other);
                    pool[k]
                });
                counts(picked.collect::<Vec<_>>())
            });
            let strata: Vec<_> = population
                .iter()
                .zip(&drawn)
                .map(|(values, counts)| {
                    let population = values.len() as u64;
                    StratumValues { population, drawn: population / 20, counts }
                })
                .collect();
            let estimate = Estimate::new(&strata).unwrap();
            let intervals = estimate.intervals();
            for (slot, (bounds, truth)) in
                [intervals.p5, intervals.p50, intervals.p95, intervals.p99].iter().zip(truth).enumerate()
            {
                let holds =
                    bounds.low.is_none_or(|low| low <= truth) && bounds.high.is_none_or(|high| truth <= high);
                held[slot] += u32::from(holds);
            }
            let half = intervals.mean_half_width.unwrap();
            held[4] += u32::from((estimate.mean - mean).abs() <= half);
        }
        // 95 % less three standard deviations of 400 rounds; a mean's interval is not far wider than it says.
        assert!(held.iter().all(|&held| f64::from(held) >= 0.917 * f64::from(rounds)), "{held:?}");
        assert!(held[4] < 396, "{held:?}");
    }
}
