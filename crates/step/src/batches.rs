//! Which samples form the global batch of each step. Each epoch has a seeded permutation of the samples, which is cut into
//! consecutive batches. Giants may be gathered in some of them.

use crate::error::StepError;
use dflop_types::SampleIndex;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// The samples of an epoch in the order in which they are trained: four bytes each, as a dataset may have ten million.
#[derive(Debug)]
struct EpochOrder {
    samples: Vec<SampleIndex>,
    /// For each position in `samples`: the position of that sample in arrival order. Empty if nothing is deferred, because
    /// then the two are equal.
    arrivals: Vec<u32>,
}

/// Epochs whose order is kept in memory. Two, because at the end of an epoch schedules of the next one are already computed,
/// so that steps of both are asked for in turn.
const EPOCHS_KEPT: usize = 2;

/// The global batch of every step, the same on every rank that has the same seed and giants.
///
/// Each sample is in exactly one batch of an epoch. If samples are left over, the last batch of the epoch is smaller; it is
/// left out only if asked for ([`GlobalBatches::whole_only`]).
#[derive(Debug, Clone)]
pub struct GlobalBatches {
    num_samples: u32,
    global_batch_size: u32,
    seed: u64,
    is_shuffled: bool,
    is_whole_only: bool,
    deferral: Option<Deferral>,
    /// Epochs with their orders, the one drawn last at the back.
    drawn: Arc<Mutex<VecDeque<DrawnEpoch>>>,
}

/// An epoch, and the order of its samples.
type DrawnEpoch = (u64, Arc<EpochOrder>);

/// Samples that wait for a later global batch.
#[derive(Debug, Clone)]
struct Deferral {
    is_giant: Arc<[bool]>,
    steps_max: u32,
}

impl GlobalBatches {
    /// Batches of `global_batch_size` out of `num_samples` samples, permuted by `seed`.
    ///
    /// # Errors
    /// [`StepError::NoSamples`] or [`StepError::Zero`].
    pub fn new(num_samples: u32, global_batch_size: u32, seed: u64) -> Result<Self, StepError> {
        if num_samples == 0 {
            return Err(StepError::NoSamples);
        }
        if global_batch_size == 0 {
            return Err(StepError::Zero { field: "global_batch_size" });
        }
        Ok(Self {
            num_samples,
            global_batch_size,
            seed,
            is_shuffled: true,
            is_whole_only: false,
            deferral: None,
            drawn: Arc::default(),
        })
    }

    /// The same, with the samples in the order of the data in every epoch.
    #[must_use]
    pub fn unshuffled(self) -> Self {
        Self { is_shuffled: false, drawn: Arc::default(), ..self }
    }

    /// The same, without the smaller last batch of an epoch. Its samples are left out; in each epoch these are others.
    ///
    /// The samples left out are the ones that arrive last. Deferral gathers giants among the other samples only, so
    /// that no giant is left out for its size.
    ///
    /// # Errors
    /// [`StepError::NoWholeBatch`] if nothing would be left.
    pub fn whole_only(self) -> Result<Self, StepError> {
        let Self { num_samples, global_batch_size, .. } = self;
        if num_samples < global_batch_size {
            return Err(StepError::NoWholeBatch { num_samples, global_batch_size });
        }
        Ok(Self { is_whole_only: true, drawn: Arc::default(), ..self })
    }

    /// The same samples, with `giants` gathered. In each window of `steps_max + 1` global batches the giants move to
    /// the end, and the other samples move up. So many giants are in one step, and none is trained more than
    /// `steps_max` steps later than without this rule.
    ///
    /// One giant in a step makes all replicas but one wait, and the pipeline runs empty. If as many giants as there are
    /// replicas are together in one step, that happens only once. Which samples form a global batch is still decided
    /// before any of them is scheduled. It depends on seed, giants and `steps_max` only, not on layout, ranks or arm.
    ///
    /// # Errors
    /// [`StepError::UnknownSample`].
    ///
    /// *References*: the idea is the outlier queue of WLB-LLM, arXiv 2503.17924. There the length of the queue decides when
    /// it is emptied. Here the number of the step decides, so that it is known in advance.
    pub fn with_deferred(self, giants: &[SampleIndex], steps_max: u32) -> Result<Self, StepError> {
        let num_samples = self.num_samples as usize;
        let mut is_giant = vec![false; num_samples];
        for &sample in giants {
            *is_giant.get_mut(sample.index()).ok_or(StepError::UnknownSample { sample, num_samples })? = true;
        }
        let deferral = (!giants.is_empty()).then(|| Deferral { is_giant: is_giant.into(), steps_max });
        Ok(Self { deferral, drawn: Arc::default(), ..self })
    }

    /// Steps that read every sample once.
    pub const fn steps_per_epoch(&self) -> u64 {
        let steps = if self.is_whole_only {
            self.num_samples / self.global_batch_size
        } else {
            self.num_samples.div_ceil(self.global_batch_size)
        };
        steps as u64
    }

    /// The epoch of `step`, from 0.
    pub const fn epoch(&self, step: u64) -> u64 {
        step / self.steps_per_epoch()
    }

    /// The samples of `step`, in arrival order. If giants are deferred, the giants of a window come behind its other samples.
    ///
    /// *Complexity*: O(number of samples) at the first step asked of an epoch, where its order is drawn; then as many
    /// as a global batch has.
    pub fn batch(&self, step: u64) -> Vec<SampleIndex> {
        let order = self.order(self.epoch(step));
        order.samples[self.range(step, &order)].to_vec()
    }

    /// At most `count` samples of `epoch`, from position `first` of its order on. The order is that of the global batches,
    /// one after another. Fewer samples at the end of the epoch, none behind it.
    ///
    /// *Complexity*: as [`GlobalBatches::batch`].
    pub fn samples(&self, epoch: u64, first: usize, count: usize) -> Vec<SampleIndex> {
        let order = self.order(epoch);
        let first = first.min(order.samples.len());
        order.samples[first..first.saturating_add(count).min(order.samples.len())].to_vec()
    }

    /// The samples of `step` that were deferred, each with the number of steps by which it is late.
    pub fn deferred(&self, step: u64) -> Vec<(SampleIndex, u64)> {
        let at = step % self.steps_per_epoch();
        let waited = |arrival: u32| at.saturating_sub(u64::from(arrival / self.global_batch_size));
        let order = self.order(self.epoch(step));
        if order.arrivals.is_empty() {
            return Vec::new();
        }
        let range = self.range(step, &order);
        let placed = order.arrivals[range.clone()].iter().zip(&order.samples[range]);
        let placed = placed.map(|(&arrival, &sample)| (sample, waited(arrival)));
        placed.filter(|&(_, steps)| steps > 0).collect()
    }

    /// The positions of the samples of `step` in the order of their epoch.
    fn range(&self, step: u64, order: &EpochOrder) -> Range<usize> {
        let size = self.global_batch_size as usize;
        let first = (step % self.steps_per_epoch()) as usize * size;
        first..(first + size).min(order.samples.len())
    }

    /// The order of `epoch`: the one that is kept, or else a newly drawn one.
    fn order(&self, epoch: u64) -> Arc<EpochOrder> {
        // A lock that was poisoned by a panic can be used: an order is put in only when it is complete.
        let mut drawn = self.drawn.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, order)) = drawn.iter().find(|(of, _)| *of == epoch) {
            return Arc::clone(order);
        }
        let order = Arc::new(self.draw(epoch));
        if drawn.len() == EPOCHS_KEPT {
            drawn.pop_front();
        }
        drawn.push_back((epoch, Arc::clone(&order)));
        order
    }

    /// Draws the order of an epoch: arrival order, and then giants moved to the ends of their windows.
    fn draw(&self, epoch: u64) -> EpochOrder {
        let mut samples = if self.is_shuffled {
            self.permutation(epoch)
        } else {
            (0..self.num_samples).map(SampleIndex).collect()
        };
        let size = self.global_batch_size as usize;
        if self.is_whole_only {
            samples.truncate(samples.len() / size * size);
        }
        let Some(Deferral { is_giant, steps_max }) = &self.deferral else {
            return EpochOrder { samples, arrivals: Vec::new() };
        };
        let mut order: Vec<(u32, SampleIndex)> = (0..).zip(samples).collect();
        let window = (*steps_max as usize).saturating_add(1).saturating_mul(size);
        let mut giants = Vec::new();
        for run in order.chunks_mut(window) {
            // Giants keep their order, and so do the others.
            let mut num_others = 0;
            for at in 0..run.len() {
                if is_giant[run[at].1.index()] {
                    giants.push(run[at]);
                } else {
                    run[num_others] = run[at];
                    num_others += 1;
                }
            }
            run[num_others..].copy_from_slice(&giants);
            giants.clear();
        }
        let (arrivals, samples) = order.into_iter().unzip();
        EpochOrder { samples, arrivals }
    }

    /// A random order of all samples, by the shuffle of Fisher and Yates. The epoch chooses the stream of the random
    /// generator. So the order depends only on seed and epoch, and is the same on any machine.
    fn permutation(&self, epoch: u64) -> Vec<SampleIndex> {
        let mut order: Vec<SampleIndex> = (0..self.num_samples).map(SampleIndex).collect();
        let mut random = ChaCha8Rng::seed_from_u64(self.seed);
        random.set_stream(epoch);
        for last in (1..order.len()).rev() {
            order.swap(last, below(&mut random, last as u64 + 1) as usize);
        }
        order
    }
}

/// A random number below `end`; all are equally likely. It is the high half of a product. The few values that would favour
/// some numbers are rejected (Lemire, "Fast Random Integer Generation in an Interval", 2019).
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

        /// Deferral: every sample once in batches of the same sizes, no giant later than promised and none earlier;
        /// the others keep their order.
        #[test]
        fn deferred_giants_wait_no_longer_than_promised(
            n in 1u32..300, size in 1u32..40, seed: u64, every in 1u32..20, steps_max in 0u32..6
        ) {
            let plain = GlobalBatches::new(n, size, seed).unwrap();
            let giants: Vec<SampleIndex> = (0..n).step_by(every as usize).map(SampleIndex).collect();
            let deferring = plain.clone().with_deferred(&giants, steps_max).unwrap();
            let is_giant = |s: &SampleIndex| s.0.is_multiple_of(every);
            let step_of = |batches: &GlobalBatches| -> Vec<(SampleIndex, u64)> {
                let all = (0..plain.steps_per_epoch()).map(|step| (step, batches.batch(step)));
                all.flat_map(|(step, batch)| batch.into_iter().map(move |sample| (sample, step))).collect()
            };
            let (before, after) = (step_of(&plain), step_of(&deferring));
            let others = |placed: &[(SampleIndex, u64)]| -> Vec<SampleIndex> {
                placed.iter().map(|p| p.0).filter(|s| !is_giant(s)).collect()
            };
            prop_assert_eq!(others(&before), others(&after));
            let mut waits = Vec::new();
            for &(sample, step) in &after {
                let arrived = before.iter().find(|p| p.0 == sample).expect("each sample once").1;
                let waited = step.saturating_sub(arrived);
                let waited_max = if is_giant(&sample) { steps_max } else { 0 };
                prop_assert!(waited <= u64::from(waited_max));
                prop_assert!(!is_giant(&sample) || step >= arrived);
                prop_assert_eq!(step / u64::from(steps_max + 1), arrived / u64::from(steps_max + 1));
                if waited > 0 {
                    waits.push((sample, waited));
                }
            }
            let told: Vec<(SampleIndex, u64)> =
                (0..plain.steps_per_epoch()).flat_map(|step| deferring.deferred(step)).collect();
            prop_assert_eq!(waits, told);
            for step in 0..plain.steps_per_epoch() {
                prop_assert_eq!(plain.batch(step).len(), deferring.batch(step).len());
            }
            if steps_max == 0 {
                // Giants only move to the end of their own batch.
                let sorted = |batch: Vec<SampleIndex>| { let mut batch = batch; batch.sort_unstable(); batch };
                for step in 0..plain.steps_per_epoch() {
                    prop_assert_eq!(sorted(plain.batch(step)), sorted(deferring.batch(step)));
                }
            }
        }
    }

    /// Two giants in eight samples of batches of two, at most one step late: each goes to the end of its four samples.
    #[test]
    fn giants_gather_at_the_end_of_their_window() {
        let plain = GlobalBatches::new(8, 2, 5).unwrap();
        let order = plain.permutation(0);
        let batches = plain.with_deferred(&[order[0], order[5]], 1).unwrap();
        let expected =
            [[1, 2], [3, 0], [4, 6], [7, 5]].map(|places| places.map(|p: usize| order[p]).to_vec());
        assert_eq!([0, 1, 2, 3].map(|step| batches.batch(step)), expected);
        assert_eq!(batches.deferred(1), [(order[0], 1)]);
        assert_eq!(batches.deferred(3), [(order[5], 1)]);
    }

    /// Without the smaller last batch, an epoch has that many samples fewer, and its other batches are the same. Giants are in
    /// the batches that are left, so no giant is left out more often than any other sample.
    #[test]
    fn what_is_left_out_is_not_chosen_by_size() {
        let plain = GlobalBatches::new(11, 4, 3).unwrap();
        let whole = plain.clone().whole_only().unwrap();
        assert_eq!((plain.steps_per_epoch(), whole.steps_per_epoch()), (3, 2));
        for (step, of_plain) in [(0, 0), (1, 1), (2, 3), (5, 7)] {
            assert_eq!(
                (whole.batch(step), whole.epoch(step)),
                (plain.batch(of_plain), plain.epoch(of_plain))
            );
        }
        let giants: Vec<SampleIndex> = plain.batch(0)[..2].to_vec();
        let deferring = whole.with_deferred(&giants, 9).unwrap();
        assert_eq!(deferring.batch(1)[2..], giants);
        assert_eq!(deferring.deferred(1), [(giants[0], 1), (giants[1], 1)]);
        let mut trained = [deferring.batch(0), deferring.batch(1)].concat();
        let mut before = [plain.batch(0), plain.batch(1)].concat();
        trained.sort_unstable();
        before.sort_unstable();
        assert_eq!(trained, before);
        let few = GlobalBatches::new(3, 4, 0).unwrap().whole_only().unwrap_err();
        assert_eq!(few, StepError::NoWholeBatch { num_samples: 3, global_batch_size: 4 });
    }

    #[test]
    fn unshuffled_samples_come_as_in_the_data_in_every_epoch() {
        let batches = GlobalBatches::new(5, 2, 9).unwrap().unshuffled();
        let of = |batches: &GlobalBatches, step| -> Vec<u32> {
            batches.batch(step).iter().map(|sample| sample.0).collect()
        };
        assert_eq!(
            [0, 1, 2, 3, 5].map(|step| of(&batches, step)),
            [vec![0, 1], vec![2, 3], vec![4], vec![0, 1], vec![4]]
        );
        let deferring = batches.with_deferred(&[SampleIndex(0)], 1).unwrap();
        assert_eq!([0, 1, 2].map(|step| of(&deferring, step)), [vec![1, 2], vec![3, 0], vec![4]]);
    }

    #[test]
    fn the_order_of_an_epoch_can_be_read_from_any_place() {
        let batches = GlobalBatches::new(500, 32, 3).unwrap();
        let order: Vec<SampleIndex> = (16..32).flat_map(|step| batches.batch(step)).collect();
        assert_eq!(batches.samples(1, 0, 1_000), order);
        assert_eq!(batches.samples(1, 70, 9), order[70..79]);
        assert_eq!(batches.samples(1, 499, 9), order[499..]);
        assert_eq!(batches.samples(1, 600, 9), []);
    }

    #[test]
    fn the_seed_and_the_epoch_decide_the_order() {
        let batches = |seed| GlobalBatches::new(500, 32, seed).unwrap();
        assert_eq!(batches(3).batch(40), batches(3).batch(40));
        assert_ne!(batches(3).batch(0), batches(4).batch(0));
        assert_ne!(batches(3).permutation(0), batches(3).permutation(1));
        // The answer does not depend on which epochs were asked for before.
        let both = batches(3);
        let steps = [20, 0, 20, 40, 0, 20];
        assert_eq!(steps.map(|step| both.batch(step)), steps.map(|step| batches(3).batch(step)));
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
        assert_eq!(GlobalBatches::new(0, 4, 0).unwrap_err(), StepError::NoSamples);
        assert_eq!(GlobalBatches::new(4, 0, 0).unwrap_err(), StepError::Zero { field: "global_batch_size" });
        let unknown = GlobalBatches::new(4, 2, 0).unwrap().with_deferred(&[SampleIndex(4)], 1).unwrap_err();
        assert_eq!(unknown, StepError::UnknownSample { sample: SampleIndex(4), num_samples: 4 });
    }
}
