//! Which samples form the global batch of each step: a seeded permutation an epoch, cut into consecutive
//! batches.

use crate::error::PlanError;
use dflop_types::SampleIndex;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// The global batch of every step, the same on every rank that has the same seed.
///
/// Each sample stands in exactly one batch of an epoch; the last batch of an epoch is smaller rather than
/// dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GlobalBatches {
    num_samples: u32,
    global_batch_size: u32,
    seed: u64,
}

impl GlobalBatches {
    /// Batches of `global_batch_size` out of `num_samples` samples, permuted by `seed`.
    ///
    /// # Errors
    /// [`PlanError::NoSamples`] or [`PlanError::Zero`].
    pub const fn new(num_samples: u32, global_batch_size: u32, seed: u64) -> Result<Self, PlanError> {
        if num_samples == 0 {
            return Err(PlanError::NoSamples);
        }
        if global_batch_size == 0 {
            return Err(PlanError::Zero { field: "global_batch_size" });
        }
        Ok(Self { num_samples, global_batch_size, seed })
    }

    /// Steps that read every sample once.
    pub const fn steps_per_epoch(&self) -> u64 {
        self.num_samples.div_ceil(self.global_batch_size) as u64
    }

    /// The epoch of `step`, from 0.
    pub const fn epoch(&self, step: u64) -> u64 {
        step / self.steps_per_epoch()
    }

    /// The samples of `step`, in arrival order.
    ///
    /// *Complexity*: O(number of samples), as the epoch's permutation is drawn anew.
    pub fn batch(&self, step: u64) -> Vec<SampleIndex> {
        let start = (step % self.steps_per_epoch()) as usize * self.global_batch_size as usize;
        let end = (start + self.global_batch_size as usize).min(self.num_samples as usize);
        self.permutation(self.epoch(step))[start..end].to_vec()
    }

    /// All samples in the order of `epoch`.
    ///
    /// Fisher and Yates on a generator whose stream is the epoch: the order depends on nothing but seed and
    /// epoch, on any machine.
    pub fn permutation(&self, epoch: u64) -> Vec<SampleIndex> {
        let mut order: Vec<SampleIndex> = (0..self.num_samples).map(SampleIndex).collect();
        let mut random = ChaCha8Rng::seed_from_u64(self.seed);
        random.set_stream(epoch);
        for last in (1..order.len()).rev() {
            order.swap(last, below(&mut random, last as u64 + 1) as usize);
        }
        order
    }
}

/// A number below `end`, each as likely as the other: high half of a product, rejecting the few values that
/// would favour some (Lemire, "Fast Random Integer Generation in an Interval", 2019).
pub(crate) fn below(random: &mut ChaCha8Rng, end: u64) -> u64 {
    let threshold = end.wrapping_neg() % end;
    loop {
        let product = u128::from(random.next_u64()) * u128::from(end);
        if product as u64 >= threshold {
            return (product >> 64) as u64;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Every epoch reads each sample once, whatever is left for its last batch.
        #[test]
        fn each_sample_once_an_epoch(n in 1u32..300, size in 1u32..80, seed: u64, epoch in 0u64..4) {
            let batches = GlobalBatches::new(n, size, seed).unwrap();
            let steps = batches.steps_per_epoch();
            let mut seen = Vec::new();
            for step in epoch * steps..(epoch + 1) * steps {
                prop_assert_eq!(batches.epoch(step), epoch);
                let batch = batches.batch(step);
                let is_last = step + 1 == (epoch + 1) * steps;
                prop_assert!(batch.len() == size as usize || (is_last && !batch.is_empty()));
                seen.extend(batch);
            }
            seen.sort_unstable();
            prop_assert_eq!(seen, (0..n).map(SampleIndex).collect::<Vec<_>>());
        }
    }

    #[test]
    fn the_seed_and_the_epoch_decide_the_order() {
        let batches = |seed| GlobalBatches::new(500, 32, seed).unwrap();
        assert_eq!(batches(3).batch(40), batches(3).batch(40));
        assert_ne!(batches(3).batch(0), batches(4).batch(0));
        assert_ne!(batches(3).permutation(0), batches(3).permutation(1));
    }

    #[test]
    fn a_number_below_is_even_and_below() {
        let mut random = ChaCha8Rng::seed_from_u64(1);
        let mut counts = [0u32; 7];
        for _ in 0..70_000 {
            counts[below(&mut random, 7) as usize] += 1;
        }
        assert!(counts.iter().all(|c| (9_500..10_500).contains(c)), "{counts:?}");
    }

    #[test]
    fn nothing_to_batch_is_an_error() {
        assert_eq!(GlobalBatches::new(0, 4, 0), Err(PlanError::NoSamples));
        assert_eq!(GlobalBatches::new(4, 0, 0), Err(PlanError::Zero { field: "global_batch_size" }));
    }
}
