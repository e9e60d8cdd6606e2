//! The answer: which bucket each sample goes to, what that loads, and how far from perfect it can be.

use crate::bounds::lower_bound;
use crate::buckets::Buckets;
use crate::costs::Costs;
use crate::error::BalanceError;
use crate::limits::Limits;
use crate::sorted_batch::SortedBatch;

/// Each sample's bucket, the loads, and a certificate of how good they are.
///
/// *Invariants*: each sample stands in one bucket below `num_buckets`; loads are the sums of the samples' costs;
/// `lower_bound_ns` <= the best possible largest load <= `max_load_ns`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Assignment {
    /// Bucket of each sample, in the order of the costs.
    pub bucket: Vec<u32>,
    /// Encoder load of each bucket, in nanoseconds; 0 for an empty bucket.
    pub encoder_load_ns: Vec<u64>,
    /// LLM load of each bucket, in nanoseconds; 0 for an empty bucket.
    pub llm_load_ns: Vec<u64>,
    /// Largest load of a bucket in either resource, in nanoseconds.
    pub max_load_ns: u64,
    /// No assignment has a smaller largest load than this, in nanoseconds. Only the exact search sees the caps.
    pub lower_bound_ns: u64,
    /// Whether `max_load_ns` equals the bound: no assignment has a smaller largest load.
    pub proven_optimal: bool,
    /// Exchanges the search weighed; 0 for an assignment that was only judged.
    pub num_moves: u64,
    /// Whether the caller's closure ended the search: what more time would have given is not known.
    pub was_stopped: bool,
}

impl Assignment {
    /// The judgement of an assignment made elsewhere, by the same loads and bound as our own.
    ///
    /// *Complexity*: O(n log n).
    ///
    /// # Errors
    /// As [`crate::schedule`]; and [`BalanceError::NoSuchBucket`] or [`BalanceError::BucketOverCap`] where
    /// `bucket` breaks the limits.
    pub fn judge(costs: &Costs, limits: &Limits, bucket: Vec<u32>) -> Result<Self, BalanceError> {
        costs.check()?;
        limits.check(costs)?;
        if bucket.len() != costs.num_samples() {
            let (encoder, found) = (costs.num_samples(), bucket.len());
            return Err(BalanceError::Lengths { encoder, other: "bucket", found });
        }
        for (sample, &bucket) in bucket.iter().enumerate() {
            if bucket >= limits.num_buckets {
                return Err(BalanceError::NoSuchBucket { sample, bucket, num_buckets: limits.num_buckets });
            }
        }
        for (unit, sizes, cap) in limits.caps(costs) {
            let held = sums(sizes.unwrap_or_default(), &bucket, limits.num_buckets);
            if let Some((bucket, &size)) = held.iter().enumerate().find(|&(_, &size)| size > cap) {
                return Err(BalanceError::BucketOverCap { bucket, unit, size, cap });
            }
        }
        let batch = SortedBatch::new(costs, limits);
        let buckets = Buckets::new(&batch, batch.by_own_order(&bucket));
        let bound = lower_bound(&batch, buckets.worst());
        Ok(Self::new(costs, limits, bucket, bound, 0, false))
    }

    /// How far the largest load is above the bound, as a ratio of the bound; 0 if both are 0.
    pub fn gap(&self) -> f64 {
        let over = self.max_load_ns - self.lower_bound_ns;
        if over == 0 { 0.0 } else { over as f64 / self.lower_bound_ns as f64 }
    }

    /// The assignment `bucket`, which keeps the limits, with a bound found before.
    pub(crate) fn new(
        costs: &Costs,
        limits: &Limits,
        bucket: Vec<u32>,
        bound: i64,
        num_moves: u64,
        was_stopped: bool,
    ) -> Self {
        let encoder_load_ns = sums(&costs.encoder_ns, &bucket, limits.num_buckets);
        let llm_load_ns = sums(&costs.llm_ns, &bucket, limits.num_buckets);
        let max_load_ns = encoder_load_ns.iter().chain(&llm_load_ns).copied().max().unwrap_or(0);
        let lower_bound_ns = bound as u64;
        assert!(
            lower_bound_ns <= max_load_ns,
            "bound {lower_bound_ns} over a load that was reached, {max_load_ns}"
        );
        let proven_optimal = lower_bound_ns == max_load_ns;
        Self {
            bucket,
            encoder_load_ns,
            llm_load_ns,
            max_load_ns,
            lower_bound_ns,
            proven_optimal,
            num_moves,
            was_stopped,
        }
    }
}

/// The sum of `values` in each bucket.
pub(crate) fn sums(values: &[u64], bucket: &[u32], num_buckets: u32) -> Vec<u64> {
    let mut sums = vec![0; num_buckets as usize];
    for (&value, &bucket) in values.iter().zip(bucket) {
        sums[bucket as usize] += value;
    }
    sums
}
