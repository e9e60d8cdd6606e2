//! Packs: the samples that ran together in the last steps, and how much longer than predicted each pack took.

use crate::adapt::fit::Observed;
use std::collections::VecDeque;

/// Samples that are remembered of a component, at most: what a checkpoint keeps is bounded.
const SAMPLES_MAX: usize = 8_192;
/// Samples of one step, at most: at least sixteen steps are remembered. Of a larger step packs are taken evenly.
const SAMPLES_OF_STEP_MAX: usize = SAMPLES_MAX / 16;
/// Steps that are remembered: what an older one says counts less than a fiftieth.
const STEPS_MAX: usize = 192;
/// What is left of the weight of a step after the next one: half after 34 steps.
const KEPT: f64 = 0.98;
/// A pack that is this many mean packs counts as much as a larger one.
const WORK_MAX: f64 = 4.0;

/// The samples of one component that a replica ran together.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Pack {
    /// Measured over predicted time, less 1, what its ranks take taken off.
    pub excess: f64,
    /// Its predicted time over that of the mean pack of its step.
    pub work: f64,
    /// Sizes of its samples, ascending, each with the tokens that the pack has of it: of a share fewer than the sample has.
    pub parts: Vec<(u64, u64)>,
}

impl Pack {
    pub(crate) fn new(excess: f64, work: f64, parts: Vec<(u64, u64)>) -> Self {
        // A millionth is far below any noise, and a checkpoint keeps fewer digits.
        let rounded = |number: f64| (number * 1e6).round() / 1e6;
        Self { excess: rounded(excess), work: rounded(work.min(WORK_MAX)), parts }
    }

    /// Tokens of all parts.
    pub(crate) fn num_tokens(&self) -> u64 {
        self.parts.iter().map(|part| part.1).sum()
    }

    /// Whether it can be learned from: what a checkpoint may hold.
    fn is_sound(&self) -> bool {
        let is_number = self.excess.is_finite() && self.work.is_finite() && self.work >= 0.0;
        is_number && self.parts.is_sorted_by_key(|part| part.0) && self.num_tokens() > 0
    }
}

/// The packs of a component in the last steps, the oldest first.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Packs {
    steps: VecDeque<Vec<Pack>>,
    num_samples: usize,
}

impl Packs {
    /// Adds a step, and forgets the oldest ones beyond the bounds.
    pub(crate) fn remember(&mut self, packs: Vec<Pack>) {
        let samples: usize = packs.iter().map(|pack| pack.parts.len()).sum();
        let every = samples.div_ceil(SAMPLES_OF_STEP_MAX).max(1);
        let packs: Vec<Pack> = packs.into_iter().step_by(every).collect();
        self.num_samples += packs.iter().map(|pack| pack.parts.len()).sum::<usize>();
        self.steps.push_back(packs);
        while self.steps.len() > STEPS_MAX || (self.num_samples > SAMPLES_MAX && self.steps.len() > 1) {
            let oldest = self.steps.pop_front().unwrap_or_default();
            self.num_samples -= oldest.iter().map(|pack| pack.parts.len()).sum::<usize>();
        }
    }

    /// Those of a checkpoint; `None` where a number of theirs is none.
    pub(crate) fn of_steps(steps: Vec<Vec<Pack>>) -> Option<Self> {
        if !steps.iter().flatten().all(Pack::is_sound) {
            return None;
        }
        let mut packs = Self::default();
        for step in steps {
            packs.remember(step);
        }
        Some(packs)
    }

    pub(crate) fn steps(&self) -> Vec<Vec<Pack>> {
        self.steps.iter().cloned().collect()
    }

    /// All packs, the newest first, and the sizes that are their cells, ascending.
    pub(crate) fn observed(&self) -> (Vec<Observed>, Vec<u64>) {
        let sizes = self.sizes();
        let mut observed = Vec::new();
        let mut of_age = 1.0;
        for (step, packs) in self.steps.iter().enumerate().rev() {
            observed.extend(packs.iter().map(|pack| {
                let total = pack.num_tokens() as f64;
                let cell = |size: u64| sizes.binary_search(&size).unwrap_or_default();
                let part = |&(size, tokens): &(u64, u64)| (cell(size), tokens as f64 / total);
                let fractions = pack.parts.iter().map(part).collect();
                Observed { fractions, excess: pack.excess, weight: of_age * pack.work, step }
            }));
            of_age *= KEPT;
        }
        (observed, sizes)
    }

    /// Sizes that were seen, ascending.
    fn sizes(&self) -> Vec<u64> {
        let parts = self.steps.iter().flatten().flat_map(|pack| &pack.parts);
        let mut sizes: Vec<u64> = parts.map(|part| part.0).collect();
        sizes.sort_unstable();
        sizes.dedup();
        sizes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(num_packs: usize, samples: u64) -> Vec<Pack> {
        let pack = |at: usize| Pack::new(0.1, 1.0, (0..samples).map(|size| (size + at as u64, 10)).collect());
        (0..num_packs).map(pack).collect()
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let mut small = Packs::default();
        (0..300).for_each(|_| small.remember(step(2, 2)));
        assert_eq!(small.steps().len(), STEPS_MAX);
        // 4,096 samples a step: every eighth pack of it, and sixteen steps.
        let mut large = Packs::default();
        (0..40).for_each(|_| large.remember(step(1_024, 4)));
        let steps = large.steps();
        assert_eq!((steps.len(), steps[0].len()), (16, 128));
        assert_eq!(large.steps.iter().flatten().map(|pack| pack.parts.len()).sum::<usize>(), SAMPLES_MAX);
        assert_eq!(Packs::of_steps(steps), Some(large));
        // A checkpoint may hold anything.
        assert_eq!(
            Packs::of_steps(vec![vec![Pack { excess: f64::NAN, work: 1.0, parts: vec![(1, 1)] }]]),
            None
        );
        assert_eq!(Packs::of_steps(vec![vec![Pack::new(0.0, 1.0, Vec::new())]]), None);
    }

    #[test]
    fn older_steps_count_less_and_sizes_of_a_cell_are_one() {
        let mut packs = Packs::default();
        packs.remember(vec![Pack::new(0.5, 2.0, vec![(10, 10), (11, 10), (30, 20)])]);
        packs.remember(vec![Pack::new(0.25, 9.0, vec![(30, 30)])]);
        let (observed, sizes) = packs.observed();
        assert_eq!(sizes, [10, 11, 30]);
        assert_eq!((observed[0].weight, observed[0].excess, observed[0].step), (WORK_MAX, 0.25, 1));
        assert_eq!((observed[1].weight, observed[1].step), (2.0 * KEPT, 0));
        assert_eq!(observed[1].fractions, [(0, 0.25), (1, 0.25), (2, 0.5)]);
        assert_eq!(observed[1].joined(&[0, 0, 1]).fractions, [(0, 0.5), (1, 0.5)]);
    }
}
