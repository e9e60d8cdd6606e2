//! The schedule of one global batch: which samples form which microbatch on which replica, in order.

use crate::index::SampleIndex;
use crate::recomputation::Recomputation;
use crate::shape::PartRange;
use crate::timeline::Action;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::{HashMap, HashSet};
use thiserror::Error;

/// What one encoder replica encodes of a sample. Written as the number of the sample, or as `[sample, first, count]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(from = "WrittenShare", into = "WrittenShare")]
pub struct EncoderShare {
    /// The sample.
    pub sample: SampleIndex,
    /// Its parts; `None`: all of them.
    pub parts: Option<PartRange>,
}

impl EncoderShare {
    /// All parts of `sample`.
    pub const fn whole(sample: SampleIndex) -> Self {
        Self { sample, parts: None }
    }
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum WrittenShare {
    Whole(SampleIndex),
    Parts(SampleIndex, u32, u32),
}

impl From<WrittenShare> for EncoderShare {
    fn from(written: WrittenShare) -> Self {
        match written {
            WrittenShare::Whole(sample) => Self::whole(sample),
            WrittenShare::Parts(sample, first, count) => {
                Self { sample, parts: Some(PartRange { first, count }) }
            }
        }
    }
}

impl From<EncoderShare> for WrittenShare {
    fn from(share: EncoderShare) -> Self {
        match share.parts {
            None => Self::Whole(share.sample),
            Some(parts) => Self::Parts(share.sample, parts.first, parts.count),
        }
    }
}

/// Which samples form which microbatch on which replica, for one global batch.
///
/// *Invariants* (checked by [`Schedule::check`]): both sides hold the same microbatches; in each microbatch the
/// shares over all encoder replicas are, each part once, the samples over all LLM replicas that have encoder segments
/// (the encoder side leaves out text-only samples); each sample of the batch stands once on the LLM side. A microbatch
/// may be empty on any replica: its actions then take part with no work.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Schedule {
    /// The optimizer step, from 0.
    pub step: u64,
    /// Samples of `[microbatch][llm replica]`, in packing order.
    pub llm: Vec<Vec<Vec<SampleIndex>>>,
    /// Shares of samples with encoder segments of `[microbatch][encoder replica]`, in packing order.
    pub encoder: Vec<Vec<Vec<EncoderShare>>>,
    /// Actions of each rank, in the order in which it runs them; empty where all ranks follow the pipeline order of
    /// the plan.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub actions: Vec<Vec<Action>>,
    /// What the rank of each replica recomputes in `[microbatch][replica]` of a colocated layout; empty where every microbatch
    /// recomputes what the plan says.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub recompute: Vec<Vec<Recomputation>>,
    /// Samples that take more memory than a microbatch may take while others are in flight. `actions` lets the
    /// pipeline run empty around them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub giants: Vec<SampleIndex>,
    /// Whether the search was stopped by a wall limit before it had spent its moves: another machine may then find
    /// another schedule.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub was_stopped: bool,
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
    /// The parts of a sample are not encoded once each.
    #[error(
        "sample {sample} in microbatch {microbatch} of step {step}: part {part} of {num_parts} is not encoded exactly once"
    )]
    Parts {
        /// The step.
        step: u64,
        /// The microbatch.
        microbatch: usize,
        /// The sample.
        sample: SampleIndex,
        /// The first part, from 0, that is encoded never or twice, or is not there.
        part: u32,
        /// Parts of the sample.
        num_parts: u32,
    },
}

impl Schedule {
    /// The same microbatches and actions with other samples: `instead` names what is taken out, and what comes into its
    /// place, if anything does. What comes is encoded whole if it `has_media`, where the first part of the other was to
    /// be encoded. `label_tokens` are those of the batch after that.
    #[must_use]
    pub fn replaced(
        &self,
        instead: &HashMap<SampleIndex, Option<SampleIndex>>,
        has_media: impl Fn(SampleIndex) -> bool,
        label_tokens: u64,
    ) -> Self {
        let mut changed = self.clone();
        for samples in changed.llm.iter_mut().flatten() {
            *samples = samples
                .iter()
                .filter_map(|sample| instead.get(sample).map_or(Some(*sample), |other| *other))
                .collect();
        }
        let mut done = HashSet::new();
        for shares in changed.encoder.iter_mut().flatten() {
            *shares = shares
                .iter()
                .filter_map(|share| match instead.get(&share.sample) {
                    None => Some(*share),
                    Some(_) if !done.insert(share.sample) => None,
                    Some(other) => other.filter(|&other| has_media(other)).map(EncoderShare::whole),
                })
                .collect();
        }
        changed.giants.retain(|sample| !instead.contains_key(sample));
        // What comes may need more memory than what is taken out. What the plan recomputes is enough for any sample.
        changed.recompute.clear();
        Self { label_tokens, ..changed }
    }

    /// Microbatches of the step.
    pub fn num_microbatches(&self) -> u32 {
        self.llm.len() as u32
    }

    /// `Ok` if each sample of `batch` stands once, on both sides of its microbatch where it has encoder
    /// segments, on the LLM side alone where it has none, and if each of its parts (`num_parts`, 0 without segments) is
    /// encoded once.
    ///
    /// *Complexity*: O(n log n) in the samples and shares.
    ///
    /// # Errors
    /// [`ScheduleError::Count`], [`ScheduleError::Sides`] and [`ScheduleError::Parts`], the first found.
    pub fn check(
        &self,
        batch: &[SampleIndex],
        num_parts: impl Fn(SampleIndex) -> u32,
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
            let llm = sorted(&mut llm.iter().flatten().copied().filter(|&s| num_parts(s) > 0));
            let mut shares: Vec<EncoderShare> = encoder.iter().flatten().copied().collect();
            shares.sort_unstable();
            let mut encoded = Vec::with_capacity(llm.len());
            for of_sample in shares.chunk_by(|a, b| a.sample == b.sample) {
                let sample = of_sample[0].sample;
                encoded.push(sample);
                let num_parts = num_parts(sample);
                if let Some(part) = miscounted(of_sample, num_parts) {
                    return Err(ScheduleError::Parts {
                        step: self.step,
                        microbatch,
                        sample,
                        part,
                        num_parts,
                    });
                }
            }
            if llm != encoded {
                return Err(ScheduleError::Sides { step: self.step, microbatch });
            }
        }
        Ok(())
    }

    /// SHA-256 of step, samples, their places, what is recomputed and the actions of every rank, in lower-case hexadecimal: equal on all ranks, or training
    /// stops. Predictions take no part.
    pub fn digest(&self) -> String {
        let mut hash = Sha256::new();
        hash.update(self.step.to_le_bytes());
        hash.update(self.label_tokens.to_le_bytes());
        put_side(&mut hash, &self.llm, |hash, sample| hash.update(sample.0.to_le_bytes()));
        put_side(&mut hash, &self.encoder, |hash, share| {
            hash.update(share.sample.0.to_le_bytes());
            // No share of a whole sample has 0 parts: the two kinds never give the same bytes.
            let PartRange { first, count } = share.parts.unwrap_or(PartRange { first: 0, count: 0 });
            hash.update(first.to_le_bytes());
            hash.update(count.to_le_bytes());
        });
        for list in &self.actions {
            hash.update((list.len() as u64).to_le_bytes());
            for action in list {
                hash.update(action.stage.0.to_le_bytes());
                hash.update([action.kind as u8]);
                hash.update(action.microbatch.to_le_bytes());
            }
        }
        for of_replica in &self.recompute {
            for mode in of_replica {
                hash.update(mode.encoder.to_string());
                hash.update(mode.llm.to_string());
            }
        }
        crate::artifact::hex(&hash.finalize())
    }
}

fn put_side<T>(hash: &mut Sha256, side: &[Vec<Vec<T>>], put: impl Fn(&mut Sha256, &T)) {
    hash.update((side.len() as u64).to_le_bytes());
    for replicas in side {
        hash.update((replicas.len() as u64).to_le_bytes());
        for items in replicas {
            hash.update((items.len() as u64).to_le_bytes());
            for item in items {
                put(hash, item);
            }
        }
    }
}

/// The first part of a sample of `num_parts` that its `shares`, in ascending order, do not hold exactly once. A share of
/// the whole sample stands alone.
fn miscounted(shares: &[EncoderShare], num_parts: u32) -> Option<u32> {
    let mut next = 0_u64;
    for share in shares {
        let parts = share.parts.unwrap_or(PartRange { first: 0, count: num_parts });
        let is_next = u64::from(parts.first) == next && (parts.count > 0 || share.parts.is_none());
        if !is_next {
            return Some(u32::try_from(next).unwrap_or(u32::MAX).min(parts.first));
        }
        next += u64::from(parts.count);
    }
    (next != u64::from(num_parts)).then(|| u32::try_from(next).unwrap_or(u32::MAX).min(num_parts))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(sample: u32, first: u32, count: u32) -> EncoderShare {
        EncoderShare { sample: SampleIndex(sample), parts: Some(PartRange { first, count }) }
    }

    fn schedule() -> Schedule {
        let s = SampleIndex;
        Schedule {
            step: 3,
            llm: vec![vec![vec![s(4), s(0)]], vec![vec![s(2)]]],
            encoder: vec![vec![vec![EncoderShare::whole(s(4))]], vec![vec![]]],
            actions: Vec::new(),
            recompute: Vec::new(),
            giants: Vec::new(),
            was_stopped: false,
            label_tokens: 9,
            predicted_makespan_ns: 0,
            max_load_ns: 0,
            lower_bound_ns: 0,
        }
    }

    #[test]
    fn a_lost_or_doubled_sample_is_named() {
        let s = SampleIndex;
        let is_image = |i: SampleIndex| u32::from(i == s(4));
        assert_eq!(schedule().check(&[s(0), s(2), s(4)], is_image), Ok(()));
        let lost = schedule().check(&[s(0), s(2), s(4), s(7)], is_image).unwrap_err();
        assert_eq!(lost, ScheduleError::Count { step: 3, sample: s(7), count: 0 });
        let sides = schedule().check(&[s(0), s(2), s(4)], |i| u32::from(i == s(2))).unwrap_err();
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
        let mut listed = one.clone();
        listed.actions = vec![vec!["0F1".parse().unwrap()], vec![]];
        assert_ne!(one.digest(), listed.digest());
        let mut split = listed.clone();
        split.actions[0][0] = "0I1".parse().unwrap();
        assert_ne!(split.digest(), listed.digest());
    }

    #[test]
    fn each_part_is_encoded_once() {
        let s = SampleIndex;
        let of = |replicas: Vec<Vec<EncoderShare>>| {
            let schedule = Schedule { encoder: vec![replicas, vec![vec![], vec![]]], ..schedule() };
            schedule.check(&[s(0), s(2), s(4)], |i| if i == s(4) { 6 } else { 0 })
        };
        assert_eq!(of(vec![vec![share(4, 4, 2)], vec![share(4, 0, 4)]]), Ok(()));
        assert_eq!(of(vec![vec![], vec![EncoderShare::whole(s(4))]]), Ok(()));
        let part_of = |replicas| match of(replicas) {
            Err(ScheduleError::Parts { part, num_parts: 6, microbatch: 0, .. }) => Some(part),
            _ => None,
        };
        // A gap, an overlap, a missing end, parts past the end, a share of nothing, the whole beside a part.
        assert_eq!(part_of(vec![vec![share(4, 0, 2)], vec![share(4, 3, 3)]]), Some(2));
        assert_eq!(part_of(vec![vec![share(4, 0, 3)], vec![share(4, 2, 4)]]), Some(2));
        assert_eq!(part_of(vec![vec![share(4, 0, 3)], vec![share(4, 3, 2)]]), Some(5));
        assert_eq!(part_of(vec![vec![share(4, 0, 9)], vec![]]), Some(6));
        assert_eq!(part_of(vec![vec![share(4, 0, 6)], vec![share(4, 6, 0)]]), Some(6));
        assert_eq!(part_of(vec![vec![EncoderShare::whole(s(4))], vec![share(4, 0, 1)]]), Some(0));
        // A sample of the other microbatch.
        let other = of(vec![vec![EncoderShare::whole(s(4)), EncoderShare::whole(s(2))], vec![]]);
        assert_eq!(other, Err(ScheduleError::Sides { step: 3, microbatch: 0 }));
    }

    #[test]
    fn shares_are_written_shortly_and_old_schedules_are_read() {
        let one = Schedule {
            encoder: vec![vec![vec![EncoderShare::whole(SampleIndex(4)), share(7, 0, 3)]]],
            ..schedule()
        };
        let text = serde_json::to_string(&one).unwrap();
        assert!(text.contains(r#""encoder":[[[4,[7,0,3]]]]"#), "{text}");
        assert_eq!(serde_json::from_str::<Schedule>(&text).unwrap(), one);
        let mut cut = one.clone();
        cut.encoder[0][0][1] = share(7, 0, 2);
        assert_ne!(one.digest(), cut.digest());
        cut.encoder[0][0][1] = EncoderShare::whole(SampleIndex(7));
        assert_ne!(one.digest(), cut.digest());
    }
}
