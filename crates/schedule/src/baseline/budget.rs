//! Token budgets: a microbatch takes samples until its budget of tokens is spent. Most trainers fill microbatches
//! this way.
//!
//! A trainer sets the budget, and the number of microbatches follows from it. Here the number is given, because all
//! baselines must have the same number. So the budget is the smallest at which the samples fit that many buckets.

/// Bucket of each sample when consecutive samples share a bucket up to a token budget.
///
/// The budget is the smallest that gives at most `num_buckets`: more budget never takes more buckets, so
/// bisection finds it, and no cut into consecutive parts has a smaller largest part. Buckets that are not
/// needed stay empty. All zeros if there are no buckets.
///
/// *Complexity*: O(n log total).
///
/// *References*: `max_tokens` of fairseq, and the dynamic batch sizes of most trainers since.
pub fn token_budget(tokens: &[u64], num_buckets: u32) -> Vec<u32> {
    smallest(tokens, num_buckets, |budget| {
        let (mut current, mut filled) = (0, 0);
        let mut bucket = Vec::with_capacity(tokens.len());
        for &sample in tokens {
            if filled + u128::from(sample) > budget {
                (current, filled) = (current + 1, 0);
            }
            filled += u128::from(sample);
            bucket.push(current);
        }
        (current < num_buckets).then_some(bucket)
    })
}

/// Bucket of each sample when every sample goes into the first bucket whose token budget has room for it.
///
/// The budget is one at which `num_buckets` suffice, found by bisection. First fit has anomalies (a larger
/// budget may take more buckets), so a smaller one may exist. All zeros if there are no buckets.
///
/// *Complexity*: O(n m log total).
///
/// *References*: Johnson 1973 for first fit; slime and other trainers that pack samples as they arrive.
pub fn token_first_fit(tokens: &[u64], num_buckets: u32) -> Vec<u32> {
    smallest(tokens, num_buckets, |budget| {
        let mut filled = vec![0; num_buckets as usize];
        let mut bucket = Vec::with_capacity(tokens.len());
        for &sample in tokens {
            let first = filled.iter().position(|before| before + u128::from(sample) <= budget)?;
            filled[first] += u128::from(sample);
            bucket.push(first as u32);
        }
        Some(bucket)
    })
}

/// What `fill` gives at the smallest budget that bisection finds, from the largest sample to all of them.
fn smallest(tokens: &[u64], num_buckets: u32, fill: impl Fn(u128) -> Option<Vec<u32>>) -> Vec<u32> {
    // All samples fit into one bucket of their total.
    let mut best = vec![0; tokens.len()];
    if num_buckets == 0 {
        return best;
    }
    let samples = tokens.iter().copied().map(u128::from);
    let (mut low, mut high) = (samples.clone().max().unwrap_or(0), samples.sum::<u128>());
    while low < high {
        let middle = low + (high - low) / 2;
        match fill(middle) {
            Some(bucket) => (best, high) = (bucket, middle),
            None => low = middle + 1,
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fullest(tokens: &[u64], bucket: &[u32]) -> u64 {
        let sum = |j| tokens.iter().zip(bucket).filter(|&(_, &b)| b == j).map(|(t, _)| t).sum();
        bucket.iter().map(|&j| sum(j)).max().unwrap_or(0)
    }

    #[test]
    fn consecutive_samples_share_the_smallest_budget_that_suffices() {
        // 4 2 | 5 1 | 3 3 at 6. At 5 the cuts are 4 | 2 | 5 | 1 3 | 3: five.
        assert_eq!(token_budget(&[4, 2, 5, 1, 3, 3], 3), [0, 0, 1, 1, 2, 2]);
        // 4 2 5 | 1 3 3 at 11; at 10 it is 4 2 | 5 1 3 | 3.
        assert_eq!(token_budget(&[4, 2, 5, 1, 3, 3], 2), [0, 0, 0, 1, 1, 1]);
        // A giant sets the budget, and the others fill buckets up to it: two of four stay empty.
        assert_eq!(token_budget(&[1, 1, 9, 1], 4), [0, 0, 1, 2]);
    }

    #[test]
    fn consecutive_cuts_are_the_best_there_are() {
        let tokens = [7, 3, 9, 2, 8, 1, 6, 4, 5];
        for num_buckets in 1..=9_u32 {
            // All ways to cut behind some of the first eight samples.
            let cuts = (0_u32..1 << 8).filter(|cuts| cuts.count_ones() < num_buckets);
            let best = cuts
                .map(|cuts| {
                    let bucket: Vec<u32> = (0..9).map(|i| (cuts & ((1 << i) - 1)).count_ones()).collect();
                    fullest(&tokens, &bucket)
                })
                .min()
                .unwrap();
            assert_eq!(fullest(&tokens, &token_budget(&tokens, num_buckets)), best, "{num_buckets}");
        }
    }

    #[test]
    fn first_fit_goes_back_to_earlier_buckets() {
        // At 6: 4 with 2, 5 with 1, 3 with 3. In a row they need 8: 4 | 5 3 | 2 1 3.
        assert_eq!(token_first_fit(&[4, 5, 3, 2, 1, 3], 3), [0, 1, 2, 0, 1, 2]);
        assert_eq!(fullest(&[4, 5, 3, 2, 1, 3], &token_budget(&[4, 5, 3, 2, 1, 3], 3)), 8);
    }

    #[test]
    fn edges_have_answers() {
        for pack in [token_budget, token_first_fit] {
            assert!(pack(&[], 3).is_empty());
            assert_eq!(pack(&[2, 3], 0), [0, 0]);
            assert_eq!(pack(&[2, 3], 1), [0, 0]);
            assert_eq!(pack(&[0, 0, 0], 2), [0, 0, 0]);
            assert_eq!(pack(&[u64::MAX, u64::MAX], 2), [0, 1]);
            assert_eq!(pack(&[u64::MAX, u64::MAX, 0], 1), [0, 0, 0]);
        }
    }
}
