//! One batch as the search sees it: samples in an order of their own, sums known to fit, resources sorted.

use crate::costs::{Costs, TOTAL_MAX};
use crate::limits::{Limits, are_few};
use std::cmp::Reverse;

/// Encoder and LLM time of a sample or a bucket, in nanoseconds. Sums stay below 2^61 ([`crate::TOTAL_MAX`]).
pub(crate) type Pair = [i64; 2];

/// Bytes and tokens of a sample or a bucket: what is capped, not balanced.
pub(crate) type Size = [u64; 2];

/// Sum of two loads. The wrapping form is free of the overflow checks of a release build; it cannot wrap.
pub(crate) fn plus(a: Pair, b: Pair) -> Pair {
    [a[0].wrapping_add(b[0]), a[1].wrapping_add(b[1])]
}

/// Difference of two loads.
pub(crate) fn minus(a: Pair, b: Pair) -> Pair {
    [a[0].wrapping_sub(b[0]), a[1].wrapping_sub(b[1])]
}

/// The worse of the two resources.
pub(crate) fn worse(a: Pair) -> i64 {
    a[0].max(a[1])
}

/// The samples of one batch, costliest first.
///
/// The order depends on the costs alone, so that what the search finds does not depend on the order of arrival.
pub(crate) struct SortedBatch {
    /// Buckets to fill, at least 1.
    pub(crate) num_buckets: usize,
    /// Sum of the costs.
    pub(crate) total: Pair,
    /// Costs, descending by the worse resource.
    pub(crate) cost: Vec<Pair>,
    /// Bytes and tokens of each sample, 0 where there is no cap on them; empty where there is none on either.
    pub(crate) sizes: Vec<Size>,
    /// Most bytes and tokens of a bucket; `u64::MAX` for no cap.
    pub(crate) caps: Size,
    /// Position of each sample in the caller's costs.
    pub(crate) origin: Vec<u32>,
    /// Per resource, (cost, sample) ascending in that resource.
    pub(crate) sorted: [Vec<(Pair, u32)>; 2],
    /// Per resource, the place of each sample in `sorted`.
    pub(crate) rank: [Vec<u32>; 2],
}

impl SortedBatch {
    /// The batch of checked `costs`. *Complexity*: O(n log n).
    pub(crate) fn new(costs: &Costs, limits: &Limits) -> Self {
        // A cap that no sum can pass counts as no cap. Without a cap a size plays no part, not even as a tie-break.
        let caps =
            [limits.bucket_bytes_max, limits.bucket_tokens_max].map(|cap| cap.filter(|&cap| cap < TOTAL_MAX));
        let columns = [
            costs.bytes.as_deref().filter(|_| caps[0].is_some()),
            costs.tokens.as_deref().filter(|_| caps[1].is_some()),
        ];
        let size_of = |i: usize| columns.map(|column| column.map_or(0, |column| column[i]));
        let pair = |i: usize| [costs.encoder_ns[i].cast_signed(), costs.llm_ns[i].cast_signed()];
        let mut origin: Vec<u32> = (0..costs.num_samples() as u32).collect();
        origin.sort_unstable_by_key(|&i| {
            let at = i as usize;
            Reverse((worse(pair(at)), pair(at), size_of(at), Reverse(i)))
        });
        let cost: Vec<Pair> = origin.iter().map(|&i| pair(i as usize)).collect();
        let is_capped = columns.iter().any(Option::is_some);
        let sizes =
            if is_capped { origin.iter().map(|&i| size_of(i as usize)).collect() } else { Vec::new() };
        let sorted = [0, 1].map(|resource| {
            let mut sorted: Vec<(Pair, u32)> = cost.iter().copied().zip(0..).collect();
            sorted.sort_unstable_by_key(|&(cost, sample)| (cost[resource], sample));
            sorted
        });
        let rank = [0, 1].map(|resource: usize| {
            let mut rank = vec![0; cost.len()];
            for (place, &(_, sample)) in sorted[resource].iter().enumerate() {
                rank[sample as usize] = place as u32;
            }
            rank
        });
        let total = cost.iter().fold([0, 0], |sum, &cost| plus(sum, cost));
        let caps = caps.map(|cap| cap.unwrap_or(u64::MAX));
        Self { num_buckets: limits.num_buckets as usize, total, cost, sizes, caps, origin, sorted, rank }
    }

    /// Whether few samples share a bucket.
    pub(crate) fn are_few(&self) -> bool {
        are_few(self.num_samples(), self.num_buckets)
    }

    /// Samples of the batch.
    pub(crate) fn num_samples(&self) -> usize {
        self.cost.len()
    }

    /// Bytes and tokens of a sample; 0 where there is no cap.
    pub(crate) fn size(&self, sample: u32) -> Size {
        self.sizes.get(sample as usize).copied().unwrap_or([0, 0])
    }

    /// Buckets by the caller's samples, from buckets by the search's.
    pub(crate) fn by_caller_order(&self, bucket: &[u32]) -> Vec<u32> {
        let mut out = vec![0; bucket.len()];
        for (&origin, &bucket) in self.origin.iter().zip(bucket) {
            out[origin as usize] = bucket;
        }
        out
    }

    /// Buckets by the search's samples, from buckets by the caller's.
    pub(crate) fn by_own_order(&self, bucket: &[u32]) -> Vec<u32> {
        self.origin.iter().map(|&origin| bucket[origin as usize]).collect()
    }
}
