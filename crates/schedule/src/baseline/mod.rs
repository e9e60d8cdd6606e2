//! The assignments others make, to compare with: each knows less than [`crate::schedule`].
//!
//! [`Baseline`] names all of them and calls each with what it knows of the samples; the functions stand alone too.

mod budget;
mod differencing;
mod paper;

pub use budget::{token_budget, token_first_fit};
pub use differencing::karmarkar_karp;
pub use paper::{BINARIES_MAX, SolverEnd, paper};

use crate::costs::Costs;
use crate::error::BalanceError;
use crate::greedy::greedy;
use crate::limits::Limits;
use crate::random::{below, generator};
use crate::sorted_batch::SortedBatch;
use crate::stop::Stop;

/// A way to fill buckets that others use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Baseline {
    /// [`arrival_order`]: what a plain sampler gives.
    Arrival,
    /// [`random`]: what a shuffling sampler gives.
    Random,
    /// [`sorted_by_length`] on tokens: length grouping.
    Sorted,
    /// [`token_budget`]: consecutive samples up to a token budget.
    TokenBudget,
    /// [`token_first_fit`]: packing into the first microbatch with room.
    TokenFirstFit,
    /// [`single_cost_lpt`] on tokens.
    TokenLpt,
    /// [`single_cost_lpt`] on encoder and LLM time together.
    SumLpt,
    /// [`karmarkar_karp`] on [`quadratic_workload`] of tokens: verl's.
    Verl,
    /// [`karmarkar_karp`] on encoder and LLM time together: verl's method with our costs.
    SumKarmarkarKarp,
    /// `two_resource_lpt` on encoder and LLM time apart: the assignment that [`crate::schedule`] begins with.
    Greedy,
    /// [`paper()`]: integer program, else LPT.
    Paper,
}

impl Baseline {
    /// All baselines, from those that know least.
    pub const ALL: [Self; 11] = [
        Self::Arrival,
        Self::Random,
        Self::Sorted,
        Self::TokenBudget,
        Self::TokenFirstFit,
        Self::TokenLpt,
        Self::SumLpt,
        Self::Verl,
        Self::SumKarmarkarKarp,
        Self::Greedy,
        Self::Paper,
    ];

    /// Its name in commands, files and tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Arrival => "arrival",
            Self::Random => "random",
            Self::Sorted => "sorted",
            Self::TokenBudget => "token-budget",
            Self::TokenFirstFit => "token-first-fit",
            Self::TokenLpt => "token-lpt",
            Self::SumLpt => "sum-lpt",
            Self::Verl => "verl",
            Self::SumKarmarkarKarp => "sum-karmarkar-karp",
            Self::Greedy => "greedy",
            Self::Paper => "paper",
        }
    }

    /// The baseline of that name, if there is one.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|baseline| baseline.name() == name)
    }

    /// Bucket of each sample, and of [`Baseline::Paper`] what became of its integer program.
    ///
    /// `tokens` are the LLM tokens of each sample, all that most of them know. Of `limits` only the number of
    /// buckets and the seed count: none of these keeps a cap. `solver_ms` is the time of the paper's solver.
    ///
    /// # Errors
    /// [`BalanceError::ZeroBuckets`], [`BalanceError::Lengths`], [`BalanceError::TooMany`] and
    /// [`BalanceError::Overflow`] for unsound input.
    pub fn fill(
        self,
        costs: &Costs,
        tokens: &[u64],
        limits: &Limits,
        solver_ms: u32,
    ) -> Result<(Vec<u32>, Option<SolverEnd>), BalanceError> {
        costs.check()?;
        Limits::new(costs.num_samples(), limits.num_buckets).check(costs)?;
        if tokens.len() != costs.num_samples() {
            let (encoder, found) = (costs.num_samples(), tokens.len());
            return Err(BalanceError::Lengths { encoder, other: "tokens", found });
        }
        let m = limits.num_buckets;
        // Neither sum passes `TOTAL_MAX`, so no sum of both wraps.
        let both =
            || -> Vec<u64> { costs.encoder_ns.iter().zip(&costs.llm_ns).map(|(e, l)| e + l).collect() };
        let bucket = match self {
            Self::Arrival => arrival_order(tokens.len(), m),
            Self::Random => random(tokens.len(), m, limits.seed),
            Self::Sorted => sorted_by_length(tokens, m),
            Self::TokenBudget => token_budget(tokens, m),
            Self::TokenFirstFit => token_first_fit(tokens, m),
            Self::TokenLpt => single_cost_lpt(tokens, m),
            Self::SumLpt => single_cost_lpt(&both(), m),
            Self::Verl => karmarkar_karp(&quadratic_workload(tokens), m),
            Self::SumKarmarkarKarp => karmarkar_karp(&both(), m),
            Self::Greedy => two_resource_lpt(costs, m),
            Self::Paper => {
                let (bucket, end) = paper(costs, m, solver_ms);
                return Ok((bucket, Some(end)));
            }
        };
        Ok((bucket, None))
    }
}

/// The work of samples of these tokens in a decoder of width 4,096, in no unit: 24,576 l + l^2.
///
/// Linear parts of a layer are 12 h^2 l multiply-adds, attention 2 h l^2; both divided by 2 h.
///
/// *References*: verl, `verl/utils/seqlen_balancing.py`, which takes the width of a 7B model for all.
pub fn quadratic_workload(tokens: &[u64]) -> Vec<u64> {
    tokens.iter().map(|&l| l.saturating_mul(l.saturating_add(24_576))).collect()
}

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

/// Bucket of each sample by LPT on two costs: costliest first (by the larger of encoder and LLM time), each into the
/// bucket whose larger load stays the least. No cap is kept. `num_buckets` must not be 0, and `costs` must have been
/// checked.
///
/// *Complexity*: O(n m).
fn two_resource_lpt(costs: &Costs, num_buckets: u32) -> Vec<u32> {
    let batch = SortedBatch::new(costs, &Limits::new(costs.num_samples(), num_buckets));
    let bucket = greedy(&batch, &Stop::never()).expect("without a cap every sample finds a bucket");
    batch.by_caller_order(&bucket)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_that_of_one_baseline() {
        for baseline in Baseline::ALL {
            assert_eq!(Baseline::from_name(baseline.name()), Some(baseline));
        }
        assert_eq!(Baseline::from_name("best"), None);
    }

    #[test]
    fn each_baseline_looks_at_what_it_knows() {
        // Tokens say 6 6 1 1, time 1 1 9 9, of which 8 are the encoder's: who knows tokens parts the first two.
        let costs = Costs { encoder_ns: vec![0, 0, 8, 8], llm_ns: vec![1; 4], ..Costs::default() };
        let fill =
            |baseline: Baseline| baseline.fill(&costs, &[6, 6, 1, 1], &Limits::new(4, 2), 10_000).unwrap();
        for (baseline, expected) in [
            (Baseline::Arrival, vec![0, 0, 1, 1]),
            (Baseline::Sorted, vec![1, 1, 0, 0]),
            // 6 | 6 1 1 at a budget of 8, which first fit undercuts.
            (Baseline::TokenBudget, vec![0, 1, 1, 1]),
            (Baseline::TokenFirstFit, vec![0, 1, 0, 1]),
            (Baseline::TokenLpt, vec![0, 1, 0, 1]),
            (Baseline::SumLpt, vec![0, 1, 0, 1]),
            (Baseline::Greedy, vec![0, 1, 0, 1]),
        ] {
            assert_eq!(fill(baseline), (expected, None), "{baseline:?}");
        }
        for baseline in [Baseline::Verl, Baseline::SumKarmarkarKarp, Baseline::Paper] {
            let (bucket, end) = fill(baseline);
            assert!(bucket[0] != bucket[1] || baseline != Baseline::Verl, "{bucket:?}");
            assert!(bucket[2] != bucket[3] || baseline == Baseline::Verl, "{bucket:?}");
            assert_eq!(end, (baseline == Baseline::Paper).then_some(SolverEnd::Converged));
        }
        let short = Baseline::Verl.fill(&costs, &[6], &Limits::new(4, 2), 0).unwrap_err();
        assert_eq!(
            short.to_string(),
            "costs disagree: `encoder_ns` has 4 samples, `tokens` has 1, they must be equal"
        );
        let none = Baseline::Verl.fill(&costs, &[6; 4], &Limits::new(4, 0), 0).unwrap_err();
        assert_eq!(none, BalanceError::ZeroBuckets { num_samples: 4 });
    }

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
