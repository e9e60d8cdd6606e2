//! Sharing work that counts on one component only: the encoder samples of a microbatch over encoder replicas.

use crate::bounds::lower_bound;
use crate::buckets::Buckets;
use crate::costs::{Costs, TOTAL_MAX};
use crate::greedy::greedy;
use crate::limits::Limits;
use crate::refine::refine;
use crate::sorted_batch::SortedBatch;
use crate::stop::Stop;

/// Exchanges weighed for each sample divided; more do not pay on the dozens of samples a microbatch has.
const MOVES_PER_SAMPLE: u64 = 400;

/// Part of each of the `cost_ns` such that the largest sum of a part is small: LPT, then exchanges.
///
/// 0 parts count as 1. Costs whose sum passes [`TOTAL_MAX`] are compared without their lowest bits.
/// The same costs give the same parts, always; the part with the costliest sample is the first, and so on.
///
/// *Complexity*: O(n log n + n p), with a bounded search after it.
///
/// # Examples
/// ```
/// // 7 and 5 against three times 4; longest first alone would put 7 and 4 together.
/// assert_eq!(dflop_schedule::divide(&[7, 5, 4, 4, 4], 2), [0, 0, 1, 1, 1]);
/// ```
pub fn divide(cost_ns: &[u64], parts: u32) -> Vec<u32> {
    let total: u128 = cost_ns.iter().map(|&cost| u128::from(cost)).sum();
    let excess = (total / u128::from(TOTAL_MAX)).checked_ilog2().map_or(0, |bits| bits + 1);
    let encoder_ns: Vec<u64> = cost_ns.iter().map(|&cost| cost >> excess).collect();
    let costs = Costs { llm_ns: vec![0; encoder_ns.len()], encoder_ns, bytes: None, tokens: None };
    let max_moves = MOVES_PER_SAMPLE * cost_ns.len() as u64;
    let limits = Limits { max_moves, ..Limits::new(cost_ns.len(), parts.max(1)) };
    let batch = SortedBatch::new(&costs, &limits);
    // Without a cap every sample finds a part.
    let start = greedy(&batch, &Stop::never()).unwrap_or_else(|| vec![0; cost_ns.len()]);
    let mut buckets = Buckets::new(&batch, start);
    let bound = lower_bound(&batch, buckets.worst());
    refine(&mut buckets, bound, max_moves, limits.seed, &Stop::never());
    number_parts(&mut buckets.bucket, limits.num_buckets);
    batch.by_caller_order(&buckets.bucket)
}

/// Numbers the parts by their first sample, so that the way the search took does not show.
fn number_parts(bucket: &mut [u32], parts: u32) {
    let mut number = vec![None; parts as usize];
    let mut next = 0;
    for part in bucket {
        *part = *number[*part as usize].get_or_insert_with(|| {
            next += 1;
            next - 1
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::assignment::sums;

    #[test]
    fn the_optimum_that_lpt_misses_is_found() {
        // LPT gives {7, 4}, {5, 4, 4} = 13; {7, 5}, {4, 4, 4} is even.
        let costs = [7, 5, 4, 4, 4];
        assert_eq!(sums(&costs, &divide(&costs, 2), 2), [12, 12]);
        // LPT gives 7 + 3 + ..; three parts of 12 exist: {8, 4}, {7, 5}, {6, 6}.
        let costs = [8, 7, 6, 6, 5, 4];
        assert_eq!(sums(&costs, &divide(&costs, 3), 3), [12, 12, 12]);
    }

    #[test]
    fn edges_are_answers() {
        assert!(divide(&[], 3).is_empty());
        assert_eq!(divide(&[1, 2], 0), [0, 0]);
        assert_eq!(divide(&[5, 5, 5], 1), [0, 0, 0]);
        let spread = divide(&[0, 0, 0, 0], 4);
        assert_eq!(sums(&[1, 1, 1, 1], &spread, 4), [1, 1, 1, 1]);
        let large = divide(&[u64::MAX, u64::MAX, u64::MAX], 3);
        assert_eq!(sums(&[1, 1, 1], &large, 3), [1, 1, 1]);
        assert_eq!(divide(&[9, 1], 5).len(), 2);
    }
}
