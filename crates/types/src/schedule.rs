//! The schedule of one global batch: which samples form which microbatch on which replica, in order.

use crate::index::SampleIndex;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use thiserror::Error;

/// Which samples form which microbatch on which replica, for one global batch.
///
/// *Invariants* (checked by [`Schedule::check`]): both sides hold the same microbatches; in each microbatch the
/// samples over all encoder replicas are those over all LLM replicas that have encoder segments (the encoder
/// side leaves out text-only samples); each sample of the batch stands once on the LLM side. A microbatch may
/// be empty on any replica: its actions then take part with no work.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Schedule {
    /// The optimizer step, from 0.
    pub step: u64,
    /// Samples of `[microbatch][llm replica]`, in packing order.
    pub llm: Vec<Vec<Vec<SampleIndex>>>,
    /// Samples with encoder segments of `[microbatch][encoder replica]`, in packing order.
    pub encoder: Vec<Vec<Vec<SampleIndex>>>,
    /// Label tokens of the whole global batch: what the summed loss is divided by.
    pub label_tokens: u64,
    /// Predicted makespan, in nanoseconds; 0 where nothing was predicted.
    pub predicted_makespan_ns: u64,
    /// Largest load of a bucket, on either component, in nanoseconds.
    pub max_load_ns: u64,
    /// No assignment can have a smaller largest load than this, in nanoseconds.
    pub lower_bound_ns: u64,
}

/// A schedule that breaks one of its invariants.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ScheduleError {
    /// A sample of the batch stands nowhere, or twice, or does not belong.
    #[error(
        "sample {sample} stands {count} times in the schedule of step {step}, each sample of the batch must stand once"
    )]
    Count {
        /// The step.
        step: u64,
        /// The sample.
        sample: SampleIndex,
        /// How often it stands on the LLM side.
        count: usize,
    },
    /// The two sides disagree.
    #[error(
        "microbatch {microbatch} of step {step} holds other samples on the encoder side than on the LLM side"
    )]
    Sides {
        /// The step.
        step: u64,
        /// The microbatch.
        microbatch: usize,
    },
}

impl Schedule {
    /// Microbatches of the step.
    pub fn num_microbatches(&self) -> u32 {
        self.llm.len() as u32
    }

    /// Nothing if each sample of `batch` stands once, on both sides of its microbatch where it has encoder
    /// segments (`has_segments`), on the LLM side alone where it has none.
    ///
    /// *Complexity*: O(n log n) in the samples.
    ///
    /// # Errors
    /// [`ScheduleError::Count`] and [`ScheduleError::Sides`], the first found.
    pub fn check(
        &self,
        batch: &[SampleIndex],
        has_segments: impl Fn(SampleIndex) -> bool,
    ) -> Result<(), ScheduleError> {
        let sorted = |samples: &mut dyn Iterator<Item = SampleIndex>| {
            let mut samples: Vec<_> = samples.collect();
            samples.sort_unstable();
            samples
        };
        let expected = sorted(&mut batch.iter().copied());
        let found = sorted(&mut self.llm.iter().flatten().flatten().copied());
        if expected != found {
            let count = |list: &[SampleIndex], s: SampleIndex| list.iter().filter(|&&x| x == s).count();
            let sample = expected
                .iter()
                .chain(&found)
                .copied()
                .find(|&s| count(&found, s) != 1 || count(&expected, s) != 1)
                .unwrap_or(SampleIndex(0));
            return Err(ScheduleError::Count { step: self.step, sample, count: count(&found, sample) });
        }
        if self.llm.len() != self.encoder.len() {
            return Err(ScheduleError::Sides {
                step: self.step,
                microbatch: self.llm.len().min(self.encoder.len()),
            });
        }
        for (microbatch, (llm, encoder)) in self.llm.iter().zip(&self.encoder).enumerate() {
            let llm = sorted(&mut llm.iter().flatten().copied().filter(|&s| has_segments(s)));
            let encoder = sorted(&mut encoder.iter().flatten().copied());
            if llm != encoder {
                return Err(ScheduleError::Sides { step: self.step, microbatch });
            }
        }
        Ok(())
    }

    /// SHA-256 of step, samples and their places, in lower-case hexadecimal: equal on all ranks, or training
    /// stops. Predictions take no part.
    pub fn digest(&self) -> String {
        let mut hash = Sha256::new();
        hash.update(self.step.to_le_bytes());
        hash.update(self.label_tokens.to_le_bytes());
        for side in [&self.llm, &self.encoder] {
            hash.update((side.len() as u64).to_le_bytes());
            for replicas in side {
                hash.update((replicas.len() as u64).to_le_bytes());
                for samples in replicas {
                    hash.update((samples.len() as u64).to_le_bytes());
                    for sample in samples {
                        hash.update(sample.0.to_le_bytes());
                    }
                }
            }
        }
        crate::artifact::hex(&hash.finalize())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule() -> Schedule {
        let s = SampleIndex;
        Schedule {
            step: 3,
            llm: vec![vec![vec![s(4), s(0)]], vec![vec![s(2)]]],
            encoder: vec![vec![vec![s(4)]], vec![vec![]]],
            label_tokens: 9,
            predicted_makespan_ns: 0,
            max_load_ns: 0,
            lower_bound_ns: 0,
        }
    }

    #[test]
    fn a_lost_or_doubled_sample_is_named() {
        let s = SampleIndex;
        let is_image = |i: SampleIndex| i == s(4);
        assert_eq!(schedule().check(&[s(0), s(2), s(4)], is_image), Ok(()));
        let lost = schedule().check(&[s(0), s(2), s(4), s(7)], is_image).unwrap_err();
        assert_eq!(lost, ScheduleError::Count { step: 3, sample: s(7), count: 0 });
        let sides = schedule().check(&[s(0), s(2), s(4)], |i| i == s(2)).unwrap_err();
        assert_eq!(sides, ScheduleError::Sides { step: 3, microbatch: 0 });
    }

    #[test]
    fn the_digest_sees_places_and_not_predictions() {
        let one = schedule();
        let mut predicted = one.clone();
        predicted.predicted_makespan_ns = 5;
        assert_eq!(one.digest(), predicted.digest());
        let mut moved = one.clone();
        moved.llm[0][0].swap(0, 1);
        assert_ne!(one.digest(), moved.digest());
    }
}
