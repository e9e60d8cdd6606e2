//! Batches worked out by hand, edges, and input that must be refused in words.

use dflop_schedule::{
    Assignment, BUCKETS_MAX, BalanceError, Costs, EXACT_WORK, Limits, TOTAL_MAX, order_microbatches,
    order_microbatches_from, schedule, schedule_until, small_ends,
};
use dflop_types::Hint;

fn costs(encoder_ns: &[u64], llm_ns: &[u64]) -> Costs {
    Costs { encoder_ns: encoder_ns.to_vec(), llm_ns: llm_ns.to_vec(), bytes: None, tokens: None }
}

fn limits(num_buckets: u32) -> Limits {
    Limits { max_moves: 10_000, ..Limits::new(0, num_buckets) }
}

fn values(found: &Assignment) -> Vec<u64> {
    let mut values: Vec<u64> =
        found.encoder_load_ns.iter().zip(&found.llm_load_ns).map(|(e, l)| *e.max(l)).collect();
    values.sort_unstable_by(|a, b| b.cmp(a));
    values
}

#[test]
fn two_resources_need_what_one_does_not_see() {
    // By the sum all samples are alike (10); by encoder and LLM the even answer pairs (9, 1) with (1, 9).
    let found = schedule(&costs(&[9, 9, 1, 1], &[1, 1, 9, 9]), &limits(2)).unwrap();
    assert_eq!((found.encoder_load_ns, found.llm_load_ns), (vec![10, 10], vec![10, 10]));
    assert!(found.proven_optimal);
}

#[test]
fn a_giant_does_not_excuse_the_others() {
    // 100 fixes the worst bucket; the six others still go {11, 6, 4} and {9, 7, 5}, not anywhere below 100.
    let found = schedule(&costs(&[0; 7], &[100, 11, 9, 7, 6, 5, 4]), &limits(3)).unwrap();
    assert_eq!(values(&found), [100, 21, 21]);
    assert!(found.proven_optimal);
    // Two giants on different components share a bucket at no cost to the worst.
    let found = schedule(&costs(&[50, 0, 4, 3], &[0, 50, 4, 3]), &limits(2)).unwrap();
    assert_eq!(values(&found), [50, 7]);
}

#[test]
fn edges_are_answers() {
    // No samples.
    let none = schedule(&costs(&[], &[]), &limits(3)).unwrap();
    assert_eq!((none.bucket.len(), &none.llm_load_ns[..], none.max_load_ns), (0, &[0, 0, 0][..], 0));
    assert!(none.proven_optimal && none.gap() == 0.0);
    // Fewer samples than buckets: one each, the rest empty.
    let few = schedule(&costs(&[4, 5], &[6, 7]), &limits(4)).unwrap();
    assert_eq!(values(&few), [7, 6, 0, 0]);
    // One bucket.
    assert_eq!(schedule(&costs(&[4, 5], &[6, 7]), &limits(1)).unwrap().bucket, [0, 0]);
    // All equal: counts differ by at most one.
    let equal = schedule(&costs(&[5; 10], &[5; 10]), &limits(4)).unwrap();
    assert_eq!(values(&equal), [15, 15, 10, 10]);
    assert!(equal.proven_optimal);
    // Nothing costs anything: spread all the same.
    let zero = schedule(&costs(&[0; 8], &[0; 8]), &limits(4)).unwrap();
    assert!(zero.proven_optimal && zero.gap() == 0.0);
    let counts: Vec<usize> = (0..4).map(|j| zero.bucket.iter().filter(|&&b| b == j).count()).collect();
    assert_eq!(counts, [2, 2, 2, 2]);
    // All text.
    let text = schedule(&costs(&[0; 6], &[7, 5, 4, 4, 3, 1]), &limits(2)).unwrap();
    assert_eq!((values(&text), text.encoder_load_ns), (vec![12, 12], vec![0, 0]));
    // No moves at all.
    let greedy = schedule(&costs(&[3, 1, 2], &[1, 3, 2]), &Limits { max_moves: 0, ..limits(2) }).unwrap();
    assert_eq!((greedy.num_moves, greedy.max_load_ns), (0, 4));
    // Many samples in few buckets: 100,000 in one took 6 s where a bound added up anew what it had added before.
    let many = schedule(&costs(&vec![0; 100_000], &vec![1; 100_000]), &limits(1)).unwrap();
    assert_eq!((many.max_load_ns, many.proven_optimal), (100_000, true));
    // More buckets than anyone has samples for.
    assert_eq!(schedule(&costs(&[1], &[1]), &limits(BUCKETS_MAX)).unwrap().max_load_ns, 1);
}

#[test]
fn the_largest_sums_that_fit_are_balanced() {
    let half = TOTAL_MAX / 2;
    let found = schedule(&costs(&[half, half], &[half, half]), &limits(2)).unwrap();
    assert_eq!((found.max_load_ns, found.proven_optimal), (half, true));
    let one = schedule(&costs(&[TOTAL_MAX, 0], &[0, TOTAL_MAX]), &limits(2)).unwrap();
    assert_eq!((one.max_load_ns, one.proven_optimal), (TOTAL_MAX, true));
}

#[test]
fn unsound_input_is_refused_with_value_and_rule() {
    let message = |costs: &Costs, limits: &Limits| {
        let error = schedule(costs, limits).unwrap_err();
        assert!(error.hint().is_some_and(|hint| !hint.is_empty()), "{error:?} has no hint");
        error.to_string()
    };
    let sound = costs(&[1, 2], &[3, 4]);
    assert_eq!(
        message(&sound, &limits(0)),
        "cannot schedule 2 samples: `num_buckets` is 0, at least 1 is needed"
    );
    assert_eq!(
        message(&costs(&[1, 2], &[3]), &limits(2)),
        "costs disagree: `encoder_ns` has 2 samples, `llm_ns` has 1, they must be equal"
    );
    let bytes = |bytes: &[u64]| Costs { bytes: Some(bytes.to_vec()), ..sound.clone() };
    assert_eq!(
        message(&bytes(&[1]), &limits(2)),
        "costs disagree: `encoder_ns` has 2 samples, `bytes` has 1, they must be equal"
    );
    let capped = Limits { bucket_bytes_max: Some(10), ..limits(2) };
    assert_eq!(
        message(&sound, &capped),
        "cannot keep `bucket_bytes_max` 10: `bytes` is missing, each sample needs its bytes"
    );
    assert_eq!(message(&bytes(&[1, 11]), &capped), "sample 1 needs 11 bytes, a bucket holds at most 10");
    let tokens = |tokens: &[u64]| Costs { tokens: Some(tokens.to_vec()), ..sound.clone() };
    let few = Limits { bucket_tokens_max: Some(10), ..limits(2) };
    assert_eq!(
        message(&sound, &few),
        "cannot keep `bucket_tokens_max` 10: `tokens` is missing, each sample needs its tokens"
    );
    assert_eq!(message(&tokens(&[12, 1]), &few), "sample 0 needs 12 tokens, a bucket holds at most 10");
    assert_eq!(
        message(&tokens(&[1]), &few),
        "costs disagree: `encoder_ns` has 2 samples, `tokens` has 1, they must be equal"
    );
    assert!(matches!(
        schedule(&tokens(&[TOTAL_MAX, 1]), &limits(2)),
        Err(BalanceError::Overflow { column: "tokens", sample: 1, .. })
    ));
    assert_eq!(
        message(&costs(&[1, u64::MAX], &[3, 4]), &limits(2)),
        "sum of `encoder_ns` is too large: over 1152921504606846976 at sample 1, the sum must not pass it"
    );
    for column in [[u64::MAX, u64::MAX], [TOTAL_MAX, 1], [u64::MAX - 1, 2]] {
        let error = schedule(&costs(&[0, 0], &column), &limits(2)).unwrap_err();
        assert!(matches!(error, BalanceError::Overflow { column: "llm_ns", .. }), "{error}");
        let error = schedule(&bytes(&column), &capped).unwrap_err();
        assert!(matches!(error, BalanceError::Overflow { column: "bytes", .. }), "{error}");
    }
    assert_eq!(
        message(&sound, &limits(u32::MAX)),
        "too many buckets: 4294967295, at most 1048576 are supported"
    );
}

#[test]
fn caps_decide_before_loads_do() {
    // By load {6, 1} against {4, 3} would be even; by bytes the two of 6 may not meet, nor 6 with both of 4.
    let costs = Costs {
        encoder_ns: vec![0; 4],
        llm_ns: vec![6, 1, 4, 3],
        bytes: Some(vec![6, 6, 4, 4]),
        tokens: None,
    };
    let capped = |cap| schedule(&costs, &Limits { bucket_bytes_max: Some(cap), ..limits(2) });
    assert_eq!(values(&schedule(&costs, &limits(2)).unwrap()), [7, 7]);
    assert_eq!(values(&capped(20).unwrap()), [7, 7]);
    let found = capped(10).unwrap();
    // {6, 3}, {1, 4}: each a 6 and a 4 in bytes.
    assert_eq!(values(&found), [9, 5]);
    assert!(!found.proven_optimal, "the plain bound does not see caps");
    let exact = Limits { bucket_bytes_max: Some(10), max_exact_work: EXACT_WORK, ..limits(2) };
    assert!(schedule(&costs, &exact).unwrap().proven_optimal, "the exact search does");
    // 20 bytes in two buckets of 9: certain.
    assert_eq!(
        capped(9).unwrap_err().to_string(),
        "4 samples need at least 10 bytes in the fullest of 2 buckets, a bucket holds at most 9"
    );
    // A packing that first fit by load misses: it exists, so it must be found, even with no moves to spend.
    let tight = Costs {
        encoder_ns: vec![0; 6],
        llm_ns: vec![9, 8, 7, 3, 2, 1],
        bytes: Some(vec![4, 5, 6, 6, 7, 8]),
        tokens: None,
    };
    let found = schedule(&tight, &Limits { bucket_bytes_max: Some(12), max_moves: 0, ..limits(3) }).unwrap();
    let bytes = |j: u32| {
        let sizes = tight.bytes.as_ref().unwrap();
        sizes.iter().zip(&found.bucket).filter(|&(_, &b)| b == j).map(|(size, _)| size).sum::<u64>()
    };
    assert_eq!([bytes(0), bytes(1), bytes(2)], [12, 12, 12]);
}

#[test]
fn both_caps_hold_at_once() {
    // By bytes alone the 5 may lie with a 1, by tokens alone with the other 5; both leave one pairing only.
    let costs = Costs {
        encoder_ns: vec![0; 4],
        llm_ns: vec![9, 9, 1, 1],
        bytes: Some(vec![5, 5, 1, 1]),
        tokens: Some(vec![1, 2, 9, 8]),
    };
    let found = |bytes, tokens| {
        schedule(&costs, &Limits { bucket_bytes_max: bytes, bucket_tokens_max: tokens, ..limits(2) })
    };
    assert_eq!(values(&found(Some(6), Some(10)).unwrap()), [10, 10]);
    // 20 tokens in two buckets, 12 bytes: each cap is named where it is the one that fails.
    assert_eq!(
        found(Some(6), Some(9)).unwrap_err().to_string(),
        "4 samples need at least 10 tokens in the fullest of 2 buckets, a bucket holds at most 9"
    );
    assert_eq!(
        found(Some(5), Some(10)).unwrap_err().to_string(),
        "4 samples need at least 6 bytes in the fullest of 2 buckets, a bucket holds at most 5"
    );
    // Each cap alone can be kept, both together cannot: 5 + 1 bytes and 10 tokens at most need {1, 9}, {2, 8}.
    let mixed = Costs { bytes: Some(vec![5, 1, 5, 1]), tokens: Some(vec![6, 6, 4, 4]), ..costs.clone() };
    let limits = Limits { bucket_bytes_max: Some(6), bucket_tokens_max: Some(10), ..limits(2) };
    let found = schedule(&mixed, &limits).unwrap();
    assert_eq!(found.bucket[0], found.bucket[3]);
    let apart = Costs { tokens: Some(vec![6, 4, 6, 4]), bytes: Some(vec![5, 4, 1, 2]), ..costs };
    let error = schedule(&apart, &limits).unwrap_err();
    assert!(matches!(error, BalanceError::NoPacking { unit: "bytes" | "tokens", .. }), "{error}");
    assert!(error.hint().unwrap().contains("_max`"));
    let error = Assignment::judge(&mixed, &limits, vec![0, 1, 1, 0]).map(|judged| judged.max_load_ns);
    assert_eq!(error, Ok(10));
    let error = Assignment::judge(&mixed, &limits, vec![0, 0, 1, 1]).unwrap_err();
    assert_eq!(error.to_string(), "bucket 0 has 12 tokens, a bucket holds at most 10");
}

#[test]
fn caps_of_any_scale_are_packed_together() {
    // Bytes near 2^36 and tokens near 2^12; the caps leave no room at all.
    let gib = 1_u64 << 30;
    let costs = Costs {
        encoder_ns: vec![0; 6],
        llm_ns: vec![9, 8, 7, 3, 2, 1],
        bytes: Some(vec![40 * gib, 30 * gib, 20 * gib, 20 * gib, 30 * gib, 40 * gib]),
        tokens: Some(vec![1_000, 2_000, 3_000, 3_001, 2_001, 1_001]),
    };
    // {40, 20}, {40, 20}, {30, 30} by bytes, and by tokens no two of 3,000 and 2,000.
    let limits = |bytes, tokens| Limits {
        bucket_bytes_max: Some(bytes),
        bucket_tokens_max: Some(tokens),
        max_moves: 0,
        ..limits(3)
    };
    assert!(schedule(&costs, &limits(60 * gib, 4_001)).is_ok());
    // 12,003 tokens in three buckets of 4,001, and no pair of 3,000 with 1,001 has 60 GiB but these.
    assert!(schedule(&costs, &limits(60 * gib, 4_000)).is_err());
    let none = Costs { bytes: Some(vec![0; 6]), ..costs.clone() };
    assert!(schedule(&none, &limits(0, 4_001)).is_ok());
    assert!(schedule(&none, &limits(0, 4_000)).is_err());
}

#[test]
fn a_cap_that_nothing_can_pass_is_none() {
    // By tokens the two of 1 must share a bucket; bytes made even would part them.
    let costs =
        Costs { bytes: Some(vec![0, 100, 100]), tokens: Some(vec![53, 1, 1]), ..costs(&[0; 3], &[0; 3]) };
    for bytes in [None, Some(TOTAL_MAX), Some(u64::MAX)] {
        let limits = Limits { bucket_bytes_max: bytes, bucket_tokens_max: Some(53), ..limits(2) };
        let found = schedule(&costs, &limits).unwrap();
        assert_eq!(found.bucket[1], found.bucket[2]);
    }
}

#[test]
fn the_exact_search_proves_what_exchanges_and_simple_bounds_cannot() {
    // Five of 6 and five of 5 in four buckets: the mean is 13.75, three of 5 make 15, no two or three make 14.
    let costs = costs(&[6, 6, 6, 6, 6, 5, 5, 5, 5, 5], &[0; 10]);
    let exact = Limits { max_exact_work: EXACT_WORK, ..limits(4) };
    let (plain, proven) = (schedule(&costs, &limits(4)).unwrap(), schedule(&costs, &exact).unwrap());
    assert_eq!((plain.max_load_ns, plain.lower_bound_ns), (16, 15));
    assert_eq!((proven.max_load_ns, proven.proven_optimal), (16, true));
    // Too large and too loose a batch is left to the search, at no cost.
    let many = Costs { encoder_ns: (1..400).collect(), llm_ns: (1..400).rev().collect(), ..Costs::default() };
    let limits = Limits { max_moves: 100, ..limits(7) };
    let exact = Limits { max_exact_work: EXACT_WORK, ..limits };
    let (one, two) = (schedule(&many, &limits).unwrap(), schedule(&many, &exact).unwrap());
    assert_eq!(one.lower_bound_ns, two.lower_bound_ns);
}

#[test]
fn the_exact_search_proves_a_hundred_samples_whose_optimum_is_known() {
    // Fifty samples cost 5 on both, fifty 6 on one and 5 on the other. At 15 a bucket holds three of the first, or
    // two: 50 / 3 + 50 / 2 buckets are more than 40. At 16 thirty hold 6 + 5 + 5, ten 6 + 6. The mean is 13.125.
    let column = |r: usize| (0..100).map(|i| 5 + u64::from(i < 50 && i % 2 == r)).collect::<Vec<u64>>();
    let costs_of_both = costs(&column(0), &column(1));
    let exact = Limits { max_exact_work: EXACT_WORK, ..limits(40) };
    assert!(schedule(&costs_of_both, &limits(40)).unwrap().lower_bound_ns < 16);
    let found = schedule(&costs_of_both, &exact).unwrap();
    assert_eq!((found.max_load_ns, found.lower_bound_ns), (16, 16));
    // Two a bucket by their tokens: the costliest goes with the cheapest, and so on.
    let encoder: Vec<u64> = (0..120_u64).map(|i| 1_000 + i * i * 7_919 % 4_001).collect();
    let mut sorted = encoder.clone();
    sorted.sort_unstable();
    let most = (0..60).map(|i| sorted[i] + sorted[119 - i]).max().unwrap();
    let capped = Costs { tokens: Some(vec![1; 120]), ..costs(&encoder, &[0; 120]) };
    let exact = Limits { bucket_tokens_max: Some(2), max_exact_work: EXACT_WORK, ..limits(60) };
    let found = schedule(&capped, &exact).unwrap();
    assert_eq!((found.max_load_ns, found.lower_bound_ns), (most, most));
}

#[test]
fn a_stop_gives_the_best_so_far_and_says_so() {
    let costs = Costs {
        encoder_ns: (0..48).map(|i| 1_000 + i * 7_919 % 997).collect(),
        llm_ns: (0..48).map(|i| 1_000 + i * 6_101 % 991).collect(),
        ..Costs::default()
    };
    let limits = Limits { max_exact_work: EXACT_WORK, max_moves: 200_000, ..limits(16) };
    let whole = schedule(&costs, &limits).unwrap();
    assert!(!whole.was_stopped);
    let questions = std::cell::Cell::new(0_u32);
    let unstopped = schedule_until(&costs, &limits, &|| {
        questions.set(questions.get() + 1);
        false
    });
    assert_eq!(unstopped.unwrap(), whole);
    let arrival =
        Assignment::judge(&costs, &limits, dflop_schedule::baseline::arrival_order(48, 16)).unwrap();
    for strikes_at in [0, 1, 2, 3, 5, questions.get() / 2, questions.get() - 1] {
        let asked = std::cell::Cell::new(0);
        let found = schedule_until(&costs, &limits, &|| {
            asked.set(asked.get() + 1);
            asked.get() > strikes_at
        })
        .unwrap();
        // Once it has said yes it is not asked again.
        assert!(found.was_stopped && asked.get() == strikes_at + 1);
        assert!(found.lower_bound_ns <= whole.max_load_ns);
        assert!(found.max_load_ns >= whole.max_load_ns && found.max_load_ns <= arrival.max_load_ns);
    }
}

#[test]
fn other_peoples_assignments_are_judged_by_the_same_rules() {
    let costs = Costs { bytes: Some(vec![3, 3, 3]), ..costs(&[1, 2, 3], &[3, 2, 1]) };
    let judged = Assignment::judge(&costs, &limits(2), vec![0, 0, 1]).unwrap();
    assert_eq!((judged.max_load_ns, judged.lower_bound_ns, judged.num_moves), (5, 4, 0));
    assert!((judged.gap() - 0.25).abs() < 1e-12);
    let error = Assignment::judge(&costs, &limits(2), vec![0, 2, 1]).unwrap_err();
    assert_eq!(error.to_string(), "sample 1 is put into bucket 2, there are 2 buckets, counted from 0");
    let capped = Limits { bucket_bytes_max: Some(5), ..limits(2) };
    let error = Assignment::judge(&costs, &capped, vec![0, 0, 1]).unwrap_err();
    assert_eq!(error.to_string(), "bucket 0 has 6 bytes, a bucket holds at most 5");
    let error = Assignment::judge(&costs, &limits(2), vec![0]).unwrap_err();
    assert!(matches!(error, BalanceError::Lengths { other: "bucket", found: 1, .. }));
}

/// A pipeline of three stages without overlap of its own: stage s starts microbatch j after stage s - 1 and
/// after its own microbatch j - 1.
fn flow_shop(load: &[[u64; 3]], order: &[usize]) -> u64 {
    let mut free = [0_u64; 3];
    for &j in order {
        let mut ready = 0;
        for (free, cost) in free.iter_mut().zip(load[j]) {
            *free = ready.max(*free) + cost;
            ready = *free;
        }
    }
    free[2]
}

#[test]
fn an_order_is_a_permutation_never_worse_and_best_where_all_can_be_tried() {
    let load = [[9, 2, 7], [1, 8, 3], [6, 6, 1], [2, 1, 9], [5, 4, 4], [3, 9, 2]];
    let mut given: Vec<usize> = (0..6).collect();
    let mut best = u64::MAX;
    permutations(&mut given.clone(), 0, &mut |order| best = best.min(flow_shop(&load, order)));
    for seed in 0..20 {
        let mut calls = 0;
        let order = order_microbatches(6, seed, 1_500, |order| {
            calls += 1;
            flow_shop(&load, order)
        });
        assert!(calls <= 1_500);
        assert_eq!(flow_shop(&load, &order), best, "seed {seed}: {order:?}");
        for budget in [0, 1, 2, 5] {
            let order = order_microbatches(6, seed, budget, |order| flow_shop(&load, order));
            let mut sorted = order.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, given);
            assert!(flow_shop(&load, &order) <= flow_shop(&load, &given));
        }
    }
    given.rotate_left(2);
    let same = |_: &[usize]| 7;
    assert_eq!(order_microbatches_from(&[given.clone()], 0, 1, same), given);
    assert!(order_microbatches(0, 0, 100, same).is_empty());
    assert_eq!(order_microbatches(1, 0, 100, same), [0]);
    assert!(order_microbatches_from(&[], 0, 100, same).is_empty());
}

fn permutations(order: &mut [usize], from: usize, visit: &mut impl FnMut(&[usize])) {
    if from == order.len() {
        visit(order);
    }
    for other in from..order.len() {
        order.swap(from, other);
        permutations(order, from + 1, visit);
        order.swap(from, other);
    }
}

#[test]
fn small_ends_help_a_pipeline_and_are_taken_as_a_start() {
    // While the first fills and the last drains, four stages wait for one; the others overlap.
    let load: Vec<u64> = (0..12).map(|j| 20 - j).collect();
    let makespan = |order: &[usize]| load.iter().sum::<u64>() + 4 * (load[order[0]] + load[order[11]]);
    let ends = small_ends(&load);
    assert_eq!(ends, [11, 9, 7, 5, 3, 1, 0, 2, 4, 6, 8, 10]);
    let given: Vec<usize> = (0..12).collect();
    assert_eq!((makespan(&given), makespan(&ends)), (174 + 4 * 29, 174 + 4 * 19));
    let found = order_microbatches_from(&[given, ends.clone()], 0, 2, makespan);
    assert_eq!(found, ends);
}
