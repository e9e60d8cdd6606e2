//! Learned: what samples of each size take beyond their prediction, from the packs of the last steps.

use crate::adapt::adjustment::ShapeFactor;
use crate::adapt::bins::ShapeBins;
use crate::adapt::fit::{Excess, Fit, Observed, groups};
use crate::adapt::packs::Packs;
use crate::adapt::ranges::ranges;

/// What is known of a component.
#[derive(Debug, Clone, Default)]
pub(crate) struct Learned {
    /// Of each shape bin: for people and alarms, as these bins stay.
    pub(crate) of_bins: Vec<Excess>,
    /// What schedules use: bins and ranges that differ from their prediction, ascending.
    pub(crate) factors: Vec<ShapeFactor>,
}

impl Learned {
    pub(crate) fn new(packs: &Packs, bins: &ShapeBins, component: usize) -> Self {
        let count = bins.count(component);
        let (of_sizes, sizes) = packs.observed();
        let ranges = ranges(&of_sizes, sizes.len());
        let expected: Vec<f64> = of_sizes.iter().map(|pack| pack.of(&ranges.levels)).collect();
        let solved = |ends: &[u64], groups: Vec<usize>| -> Vec<Excess> {
            let last = ends.len().saturating_sub(1);
            let part = |&size: &u64| ends.partition_point(|&end| end < size).min(last);
            let parts: Vec<usize> = sizes.iter().map(part).collect();
            let packs: Vec<Observed> = of_sizes.iter().map(|pack| pack.joined(&parts)).collect();
            Fit::new(&packs, &expected, ranges.noise, groups).solved()
        };
        let ends: Vec<u64> = (0..count).map(|bin| bins.range(component, bin).1).collect();
        let of_bins = solved(&ends, groups(&[(count, false)]));
        if ranges.found.is_empty() {
            let factors = factors(&ends, &of_bins);
            return Self { of_bins, factors };
        }
        let mut cuts: Vec<u64> = Vec::new();
        for &(first, last) in &ranges.found {
            // A size between two that were seen is taken to be as the nearer one.
            let between = |at: usize| sizes.get(at + 1).map(|next| sizes[at].midpoint(*next - 1));
            cuts.extend(first.checked_sub(1).and_then(between));
            cuts.extend(between(last));
        }
        cuts.sort_unstable();
        cuts.dedup();
        let mut parts: Vec<u64> = ends.iter().chain(&cuts).copied().collect();
        parts.sort_unstable();
        parts.dedup();
        let between_cuts = |size: u64| cuts.partition_point(|&cut| cut < size);
        // A range is sure as a whole: sizes at its ends, of which few were seen, are taken to be as the others.
        let mut regions = vec![(0, false); cuts.len() + 1];
        for &end in &parts {
            regions[between_cuts(end)].0 += 1;
        }
        for &(first, _) in &ranges.found {
            regions[between_cuts(sizes[first])].1 = true;
        }
        let of_parts = solved(&parts, groups(&regions));
        let factors = factors(&parts, &of_parts);
        Self { of_bins, factors }
    }

    /// What samples of so many tokens are taken to take of their predicted time.
    pub(crate) fn factor(&self, tokens: u64) -> f64 {
        let at = self.factors.partition_point(|factor| factor.tokens_max < tokens);
        self.factors.get(at).filter(|factor| factor.tokens_min <= tokens).map_or(1.0, |factor| factor.factor)
    }
}

/// What is used of each part, by its most tokens; parts that take as predicted are left out.
fn factors(ends: &[u64], excesses: &[Excess]) -> Vec<ShapeFactor> {
    let mut first = 0;
    let mut factors = Vec::new();
    for (&end, excess) in ends.iter().zip(excesses) {
        let used = excess.used();
        if used != 0.0 {
            factors.push(ShapeFactor { tokens_min: first, tokens_max: end, factor: 1.0 + used });
        }
        first = end.saturating_add(1);
    }
    factors
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adapt::bins::LLM;
    use crate::adapt::packs::Pack;
    use crate::batches::below;
    use crate::fixture::sample;
    use rand_chacha::ChaCha8Rng;
    use rand_chacha::rand_core::SeedableRng;

    /// Sizes 60 to 159 are bins of their own, 100 to 120 take twice as long, and 120 was seen once.
    #[test]
    fn the_last_size_of_a_range_is_as_the_others_of_it() {
        let shapes: Vec<_> = (60..160).map(|size| sample(0, 0, size)).collect();
        let bins = ShapeBins::of(&shapes);
        let mut random = ChaCha8Rng::seed_from_u64(0);
        let mut packs = Packs::default();
        for step in 0..40 {
            let pack = |at: usize| {
                let mut draw = || 60 + below(&mut random, 100);
                let mut sizes: Vec<u64> = (0..3).map(|_| draw()).filter(|&size| size != 120).collect();
                if (step, at) == (5, 0) {
                    sizes.push(120);
                }
                sizes.sort_unstable();
                let slow: u64 = sizes.iter().filter(|size| (100..=120).contains(*size)).sum();
                let excess = slow as f64 / sizes.iter().sum::<u64>() as f64;
                Pack::new(excess, 1.0, sizes.iter().map(|&size| (size, size)).collect())
            };
            packs.remember((0..16).map(pack).collect());
        }
        let learned = Learned::new(&packs, &bins, LLM);
        for (size, expected) in [(99, 1.0), (100, 2.0), (110, 2.0), (119, 2.0), (120, 2.0), (121, 1.0)] {
            let found = learned.factor(size);
            assert!((found - expected).abs() < 0.05, "{size}: {found}, is {expected}");
        }
    }
}
