//! The assignments others make, to compare with: each knows less than [`crate::schedule`].

use crate::random::{below, generator};

/// Bucket of each sample in arrival order: consecutive samples, equal counts (they differ by at most one).
///
/// All zeros if there are no buckets.
pub fn arrival_order(num_samples: usize, num_buckets: u32) -> Vec<u32> {
    // Bucket j takes the positions i with floor(i * m / n) = j: consecutive, floor or ceil of n / m of them.
    let n = (num_samples as u128).max(1);
    (0..num_samples).map(|i| (i as u128 * u128::from(num_buckets) / n) as u32).collect()
}

/// Bucket of each sample after a shuffle: equal counts, as a shuffling sampler gives them.
pub fn random(num_samples: usize, num_buckets: u32, seed: u64) -> Vec<u32> {
    let mut bucket = arrival_order(num_samples, num_buckets);
    let mut random = generator(seed);
    for last in (1..bucket.len()).rev() {
        bucket.swap(last, below(&mut random, last + 1));
    }
    bucket
}

/// Bucket of each sample when samples of like length stand together: sorted by `length`, cut into equal counts.
pub fn sorted_by_length(length: &[u64], num_buckets: u32) -> Vec<u32> {
    let mut order: Vec<usize> = (0..length.len()).collect();
    order.sort_by_key(|&i| (length[i], i));
    let mut bucket = vec![0; length.len()];
    for (place, cut) in order.into_iter().zip(arrival_order(length.len(), num_buckets)) {
        bucket[place] = cut;
    }
    bucket
}

/// Bucket of each sample by LPT on one cost: descending, each into the least loaded bucket.
///
/// With tokens as `cost` it is the balancing most trainers have; with `encoder_ns + llm_ns`, sum LPT.
/// All zeros if there are no buckets.
///
/// *Complexity*: O(n log n + n log m).
pub fn single_cost_lpt(cost: &[u64], num_buckets: u32) -> Vec<u32> {
    use std::{cmp::Reverse, collections::BinaryHeap};
    let mut order: Vec<usize> = (0..cost.len()).collect();
    order.sort_by_key(|&i| (Reverse(cost[i]), i));
    // (load, count, bucket): the count spreads samples that cost nothing.
    let mut least: BinaryHeap<Reverse<(u128, usize, u32)>> =
        (0..num_buckets).map(|j| Reverse((0, 0, j))).collect();
    let mut bucket = vec![0; cost.len()];
    for i in order {
        let Some(mut top) = least.peek_mut() else { break };
        let Reverse((load, count, j)) = &mut *top;
        bucket[i] = *j;
        *load += u128::from(cost[i]);
        *count += 1;
    }
    bucket
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrival_order_is_consecutive_with_even_counts() {
        assert_eq!(arrival_order(7, 3), [0, 0, 0, 1, 1, 2, 2]);
        assert_eq!(arrival_order(2, 4), [0, 2]);
        assert!(arrival_order(0, 3).is_empty());
        assert_eq!(arrival_order(2, 0), [0, 0]);
        for (n, m) in [(1, 1), (10, 3), (64, 16), (65, 16), (5, 9), (1000, 7)] {
            let bucket = arrival_order(n, m);
            let counts: Vec<usize> = (0..m).map(|j| bucket.iter().filter(|&&b| b == j).count()).collect();
            let spread = counts.iter().max().unwrap() - counts.iter().min().unwrap();
            assert!(bucket.is_sorted() && spread <= 1, "{n} x {m}: {counts:?}");
        }
    }

    #[test]
    fn a_shuffle_keeps_the_counts_and_follows_the_seed() {
        let mut sorted = random(50, 4, 9);
        assert_eq!(sorted, random(50, 4, 9));
        assert_ne!(sorted, random(50, 4, 10));
        sorted.sort_unstable();
        assert_eq!(sorted, arrival_order(50, 4));
    }

    #[test]
    fn like_lengths_stand_together() {
        assert_eq!(sorted_by_length(&[9, 1, 8, 2], 2), [1, 0, 1, 0]);
    }

    #[test]
    fn lpt_gives_its_textbook_answer() {
        // 7 6 | 5 with 7+3, 6+4: buckets {7, 3}, {6, 4}, {5, 5} after 7, 6, 5, 5, 4, 3.
        assert_eq!(single_cost_lpt(&[7, 6, 5, 5, 4, 3], 3), [0, 1, 2, 2, 1, 0]);
        assert_eq!(single_cost_lpt(&[0, 0, 0], 3), [0, 1, 2]);
        assert_eq!(single_cost_lpt(&[1, 1], 0), [0, 0]);
        assert_eq!(single_cost_lpt(&[u64::MAX, u64::MAX, u64::MAX], 1), [0, 0, 0]);
    }
}
