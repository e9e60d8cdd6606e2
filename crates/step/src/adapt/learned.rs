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
        let of_bins = solved(&ends, groups(&[count]));
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
        let mut counts = vec![0; cuts.len() + 1];
        for &end in &parts {
            counts[cuts.partition_point(|&cut| cut < end)] += 1;
        }
        let of_parts = solved(&parts, groups(&counts));
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
