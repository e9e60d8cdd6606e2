//! What holds for every baseline, whatever the samples.

use dflop_schedule::baseline::{Baseline, SolverEnd, karmarkar_karp, paper, token_budget, token_first_fit};
use dflop_schedule::{Assignment, Costs, Limits};
use proptest::prelude::*;

fn cost() -> impl Strategy<Value = u64> {
    prop_oneof![4 => 1_u64..1_000, 1 => Just(0_u64), 1 => Just(7_u64), 1 => (0_u32..40).prop_map(|p| 1 << p)]
}

/// (encoder, llm, tokens) of each sample.
fn samples(most: usize) -> impl Strategy<Value = Vec<(u64, u64, u64)>> {
    prop::collection::vec((cost(), cost(), cost()), 0..most)
}

fn columns(samples: &[(u64, u64, u64)]) -> (Costs, Vec<u64>) {
    let costs = Costs {
        encoder_ns: samples.iter().map(|s| s.0).collect(),
        llm_ns: samples.iter().map(|s| s.1).collect(),
        ..Costs::default()
    };
    (costs, samples.iter().map(|s| s.2).collect())
}

fn loads(values: &[u64], bucket: &[u32], num_buckets: u32) -> Vec<u64> {
    (0..num_buckets)
        .map(|j| values.iter().zip(bucket).filter(|&(_, &b)| b == j).map(|(value, _)| value).sum())
        .collect()
}

fn fullest(values: &[u64], bucket: &[u32], num_buckets: u32) -> u64 {
    loads(values, bucket, num_buckets).into_iter().max().unwrap_or(0)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_sample_stands_once_and_no_baseline_beats_the_bound(
        samples in samples(50), num_buckets in 1_u32..20, seed in 0_u64..4
    ) {
        let (costs, tokens) = columns(&samples);
        let limits = Limits { seed, ..Limits::new(samples.len(), num_buckets) };
        for baseline in Baseline::ALL {
            // Without time for its solver, the paper's is a fast one too.
            let (bucket, end) = baseline.fill(&costs, &tokens, &limits, 0).unwrap();
            prop_assert_eq!(bucket.len(), samples.len());
            prop_assert_eq!(end.is_some(), baseline == Baseline::Paper);
            prop_assert_eq!(&bucket, &baseline.fill(&costs, &tokens, &limits, 0).unwrap().0);
            let counts = loads(&vec![1; samples.len()], &bucket, num_buckets);
            let judged = Assignment::judge(&costs, &limits, bucket).unwrap();
            prop_assert!(judged.lower_bound_ns <= judged.max_load_ns);
            if matches!(baseline, Baseline::Arrival | Baseline::Random | Baseline::Sorted) {
                let (most, fewest) = (counts.iter().max().unwrap(), counts.iter().min().unwrap());
                prop_assert!(most - fewest <= 1, "{baseline:?}: {counts:?}");
            }
        }
    }

    #[test]
    fn token_budgets_waste_less_than_a_sample_a_bucket(
        tokens in prop::collection::vec(cost(), 1..50), num_buckets in 1_u32..20
    ) {
        let (largest, total) = (*tokens.iter().max().unwrap(), tokens.iter().sum::<u64>());
        for (consecutive, bucket) in
            [(true, token_budget(&tokens, num_buckets)), (false, token_first_fit(&tokens, num_buckets))]
        {
            // With a budget of mean + largest, every bucket but the last is over the mean before it is left.
            let full = fullest(&tokens, &bucket, num_buckets);
            prop_assert!(full <= total.div_ceil(u64::from(num_buckets)) + largest, "{full} by {bucket:?}");
            prop_assert!(!consecutive || bucket.is_sorted());
        }
    }

    #[test]
    fn differencing_fills_all_buckets_and_puts_small_ones_at_the_ends(
        cost in prop::collection::vec(cost(), 0..50), num_buckets in 1_u32..20
    ) {
        let bucket = karmarkar_karp(&cost, num_buckets);
        let counts = loads(&vec![1; cost.len()], &bucket, num_buckets);
        prop_assert_eq!(counts.iter().filter(|&&c| c > 0).count(), cost.len().min(num_buckets as usize));
        // Up to the largest, then down.
        let load = loads(&cost, &bucket, num_buckets);
        let top = (0..load.len()).max_by_key(|&j| load[j]).unwrap_or(0);
        prop_assert!(load[..=top].is_sorted() && load[top..].iter().rev().is_sorted(), "{load:?}");
        // The difference of the parts never grows beyond the largest sample.
        let spread = load.iter().max().unwrap() - load.iter().min().unwrap();
        prop_assert!(spread <= cost.iter().copied().max().unwrap_or(0), "{load:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn where_the_papers_program_converges_it_is_the_best_of_all(
        samples in prop::collection::vec((1_u64..1_000, 0_u64..1_000), 0..=7), num_buckets in 1_u32..=3
    ) {
        let costs = Costs {
            encoder_ns: samples.iter().map(|s| s.0).collect(),
            llm_ns: samples.iter().map(|s| s.1).collect(),
            ..Costs::default()
        };
        let worst = |bucket: &[u32]| {
            fullest(&costs.encoder_ns, bucket, num_buckets).max(fullest(&costs.llm_ns, bucket, num_buckets))
        };
        let best = (0..u64::from(num_buckets).pow(samples.len() as u32))
            .map(|mut code| {
                let mut digit = || {
                    let digit = code % u64::from(num_buckets);
                    code /= u64::from(num_buckets);
                    digit as u32
                };
                worst(&samples.iter().map(|_| digit()).collect::<Vec<_>>())
            })
            .min()
            .unwrap();
        let (bucket, end) = paper(&costs, num_buckets, 60_000);
        prop_assert_eq!(end, SolverEnd::Converged);
        prop_assert!(worst(&bucket) as f64 <= best as f64 * 1.000_11, "{} over {best}", worst(&bucket));
    }
}
