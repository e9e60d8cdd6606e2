//! Shape bins: samples of like size, which a machine may treat alike.

use dflop_types::SampleShape;

/// Bins of a component, at most: sizes of which one in a hundred samples is are to have bins of their own.
pub(crate) const BINS_MAX: usize = 128;

/// Samples that are looked at to find the ends of bins: evenly spread over larger data.
const LOOKED_AT: usize = 1 << 17;

/// The two components, as the tables of this room number them.
pub(crate) const ENCODER: usize = 0;
pub(crate) const LLM: usize = 1;

/// Tokens of a sample in a component.
pub(crate) fn tokens(shape: &SampleShape, component: usize) -> u64 {
    if component == ENCODER { shape.encoder_tokens() } else { u64::from(shape.llm_tokens) }
}

/// Bins of samples by their tokens, for the encoder and for the LLM backbone.
///
/// Where the data has few sizes, as tiled images do, each is a bin of its own. Else half of the ends divide the samples into
/// equal counts and half divide the tokens into equal sums: neither many small nor few large samples share one bin.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ShapeBins {
    /// The most tokens of each bin, ascending; the last bin has no end.
    ends: [Vec<u64>; 2],
}

impl ShapeBins {
    /// The bins of a data profile. *Complexity*: O(n log n) for the samples that are looked at.
    pub fn of(shapes: &[SampleShape]) -> Self {
        let step = shapes.len().div_ceil(LOOKED_AT).max(1);
        let ends = [ENCODER, LLM].map(|component| {
            let looked_at = shapes.iter().step_by(step).map(|shape| tokens(shape, component));
            let mut sizes: Vec<u64> = looked_at.filter(|&tokens| tokens > 0).collect();
            sizes.sort_unstable();
            ends(&sizes)
        });
        Self { ends }
    }

    /// Bins of a component, at least 1.
    pub(crate) fn count(&self, component: usize) -> usize {
        self.ends[component].len().max(1)
    }

    /// The bin of a sample with so many tokens.
    pub(crate) fn bin(&self, component: usize, tokens: u64) -> usize {
        let ends = &self.ends[component];
        ends.partition_point(|&end| end < tokens).min(ends.len().saturating_sub(1))
    }

    /// The fewest and the most tokens of a bin.
    pub(crate) fn range(&self, component: usize, bin: usize) -> (u64, u64) {
        let ends = &self.ends[component];
        let first = if bin == 0 { 0 } else { ends[bin - 1] + 1 };
        (first, if bin + 1 < ends.len() { ends[bin] } else { u64::MAX })
    }
}

/// The ends of the bins of ascending sizes.
fn ends(sizes: &[u64]) -> Vec<u64> {
    let mut distinct = sizes.to_vec();
    distinct.dedup();
    if distinct.len() <= BINS_MAX {
        return distinct;
    }
    let half = BINS_MAX / 2;
    let mut ends: Vec<u64> = (1..=half).map(|part| sizes[(sizes.len() * part / half) - 1]).collect();
    let total: u128 = sizes.iter().map(|&size| u128::from(size)).sum();
    let (mut sum, mut part) = (0u128, 1u128);
    for &size in sizes {
        sum += u128::from(size);
        if sum * half as u128 >= total * part {
            ends.push(size);
            part = sum * half as u128 / total + 1;
        }
    }
    ends.sort_unstable();
    ends.dedup();
    ends
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::sample;

    #[test]
    fn few_sizes_are_bins_of_their_own() {
        let shapes: Vec<SampleShape> =
            [3, 1, 3, 0, 7].iter().map(|&tiles| sample(tiles, tiles, 10)).collect();
        let bins = ShapeBins::of(&shapes);
        assert_eq!(bins.count(ENCODER), 3);
        let bin = |tiles: u64| bins.bin(ENCODER, 729 * tiles);
        assert_eq!([1, 2, 3, 7, 9].map(bin), [0, 1, 1, 2, 2]);
        assert_eq!(bins.range(ENCODER, 1), (730, 2_187));
        assert_eq!(bins.range(ENCODER, 2), (2_188, u64::MAX));
        assert_eq!((ShapeBins::default().count(LLM), ShapeBins::default().bin(LLM, 5)), (1, 0));
    }

    /// Sizes 1 to 10,000: no bin has more than a tenth of the samples or of the tokens.
    #[test]
    fn many_sizes_are_divided_by_count_and_by_work() {
        let sizes: Vec<u64> = (1..=10_000).collect();
        let ends = ends(&sizes);
        assert!(
            ends.len() > BINS_MAX / 2 && ends.len() <= BINS_MAX && ends.last() == Some(&10_000),
            "{ends:?}"
        );
        let mut first = 0;
        for &end in &ends {
            assert!(end - first <= 1_000, "{first} {end}");
            let tokens = (end * (end + 1) - first * (first + 1)) / 2;
            assert!(tokens <= 5_005_000, "{first} {end}: {tokens}");
            first = end;
        }
    }
}
