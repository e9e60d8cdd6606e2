//! What an assignment must keep, and how long to look for it.

use crate::costs::Costs;
use crate::error::BalanceError;
use dflop_types::BUCKETS_MAX;

/// Work of an exact search that may take about a second on one core; twice that where others share its caches.
///
/// Most batches of some four samples a bucket are proven within a tenth of it (`docs/scheduler.md`).
pub const EXACT_WORK: u64 = 40_000_000;

/// Moves of [`Limits::patient`] for each sample, and at most: up to 8 ms. More found little more where a solver proves the
/// optimum in a second or two.
const PATIENT_MOVES_PER_SAMPLE: u64 = 12_000;
const PATIENT_MOVES_MAX: u64 = 700_000;

/// The same where few samples share a bucket, which leaves the widest gaps: up to 20 ms.
const FEW_PATIENT_MOVES_PER_SAMPLE: u64 = 20_000;
const FEW_PATIENT_MOVES_MAX: u64 = 1_300_000;

/// Exact work of [`Limits::patient`] for the smallest of these: it ends within some 20 ms, mostly with a proof.
const PATIENT_EXACT_WORK: u64 = 2_000_000;

/// Samples beyond which each brings fewer moves: many small ones fill any gap.
const MANY_SAMPLES: u64 = 2_048;

/// Samples up to which an exact search mostly ends within some 10 ms, with a proof.
pub(crate) const QUICK_SAMPLES_MAX: usize = 48;

/// Samples a bucket up to which they are few: sets can be listed, and mixtures matter more than exchanges.
const FEW_PER_BUCKET: usize = 6;

/// Whether few samples share a bucket, for this many samples and buckets.
pub(crate) fn are_few(num_samples: usize, num_buckets: usize) -> bool {
    num_samples <= FEW_PER_BUCKET * num_buckets
}

/// What an assignment must keep, and how long to look for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Buckets to fill: microbatches times LLM replicas. At least 1; some stay empty if there are fewer samples.
    pub num_buckets: u32,
    /// The most bytes a bucket may hold; `None` for no cap.
    pub bucket_bytes_max: Option<u64>,
    /// The most tokens a bucket may hold; `None` for no cap.
    pub bucket_tokens_max: Option<u64>,
    /// Exchanges the search may weigh, beside those that a packing takes where the first assignments break a cap. 0 gives the
    /// better of arrival order and greedy.
    pub max_moves: u64,
    /// Seed of the search's kicks.
    pub seed: u64,
    /// Work beyond `max_moves`, some 10 ns each, where a gap is left: nodes of the exact search where few samples share a
    /// bucket, else half as many further exchanges. 0 for none, [`EXACT_WORK`] for about a second.
    pub max_exact_work: u64,
}

impl Limits {
    /// Limits without a cap, with [`Limits::default_moves`], seed 0 and no exact search.
    pub fn new(num_samples: usize, num_buckets: u32) -> Self {
        let max_moves = Self::default_moves(num_samples);
        Self {
            num_buckets,
            bucket_bytes_max: None,
            bucket_tokens_max: None,
            max_moves,
            seed: 0,
            max_exact_work: 0,
        }
    }

    /// `Ok` if there is a bucket, and each cap can be kept by each sample alone.
    ///
    /// # Errors
    /// [`BalanceError::ZeroBuckets`], [`BalanceError::TooMany`], [`BalanceError::NoSizes`],
    /// [`BalanceError::SampleOverCap`].
    pub fn check(&self, costs: &Costs) -> Result<(), BalanceError> {
        if self.num_buckets == 0 {
            return Err(BalanceError::ZeroBuckets { num_samples: costs.num_samples() });
        }
        if self.num_buckets > BUCKETS_MAX {
            let (found, limit) = (self.num_buckets.into(), BUCKETS_MAX.into());
            return Err(BalanceError::TooMany { what: "buckets", found, limit });
        }
        for (unit, sizes, cap) in self.caps(costs) {
            let sizes = sizes.ok_or(BalanceError::NoSizes { unit, cap })?;
            if let Some((sample, &size)) = sizes.iter().enumerate().find(|&(_, &size)| size > cap) {
                return Err(BalanceError::SampleOverCap { sample, unit, size, cap });
            }
        }
        Ok(())
    }

    /// The caps that are set: unit, size of each sample in it, the most of it that a bucket holds.
    pub(crate) fn caps<'a>(
        &self,
        costs: &'a Costs,
    ) -> impl Iterator<Item = (&'static str, Option<&'a [u64]>, u64)> + use<'a> {
        let bytes = self.bucket_bytes_max.map(|cap| ("bytes", costs.bytes.as_deref(), cap));
        let tokens = self.bucket_tokens_max.map(|cap| ("tokens", costs.tokens.as_deref(), cap));
        bytes.into_iter().chain(tokens)
    }

    /// Limits for one batch that may take some 8 ms though it be small, or 20 ms where few samples share a bucket; the
    /// smallest of these are searched exactly as well. Without a cap, with seed 0.
    pub fn patient(num_samples: usize, num_buckets: u32) -> Self {
        let are_few = are_few(num_samples, num_buckets as usize);
        let (each, most) = if are_few {
            (FEW_PATIENT_MOVES_PER_SAMPLE, FEW_PATIENT_MOVES_MAX)
        } else {
            (PATIENT_MOVES_PER_SAMPLE, PATIENT_MOVES_MAX)
        };
        let moves = (num_samples as u64).saturating_mul(each).min(most);
        let max_moves = Self::default_moves(num_samples).max(moves);
        let is_proven = are_few && num_samples <= QUICK_SAMPLES_MAX;
        let max_exact_work = if is_proven { PATIENT_EXACT_WORK } else { 0 };
        Self { max_moves, max_exact_work, ..Self::new(num_samples, num_buckets) }
    }

    /// Moves for a batch of this size: 30,000, 750 for each of the first 2,048 samples and 400 for each further one, at most
    /// 16 million.
    ///
    /// A move takes some 10 ns: 1 ms for 64 samples, 10 to 20 ms for 2,048 (`docs/scheduler.md` has the measurements).
    /// More moves help small batches little, and batches whose two components are equally busy the most.
    pub fn default_moves(num_samples: usize) -> u64 {
        let samples = num_samples as u64;
        let many = samples.saturating_sub(MANY_SAMPLES);
        let moves = samples.min(MANY_SAMPLES) * 750 + many.saturating_mul(400);
        moves.saturating_add(30_000).min(16_000_000)
    }
}
