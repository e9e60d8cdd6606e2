//! What ranks wait for: each objective is the best of the three for its layout, its bound is one, and caps come first.

use dflop_schedule::{Assignment, BalanceError, Costs, Limits, Meets, NEAR, schedule, schedule_for};
use proptest::prelude::*;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

const ALL: [Meets; 3] = [Meets::Step, Meets::Phase, Meets::Pipeline];

fn found(costs: &Costs, limits: &Limits, meets: Meets, num_microbatches: u32) -> Assignment {
    schedule_for(costs, limits, meets, num_microbatches, 0, &|| false).expect("sound costs")
}

/// What ranks wait for, by the definition of each layout and no code of the crate.
fn waits(costs: &Costs, bucket: &[u32], num_buckets: u32, meets: Meets, num_microbatches: u32) -> u64 {
    let num_ranks = num_buckets / num_microbatches;
    let load = |column: &[u64], microbatch: u32, rank: u32| -> u64 {
        let is_in = |b: u32| b == microbatch * num_ranks + rank;
        column.iter().zip(bucket).filter(|&(_, &b)| is_in(b)).map(|(cost, _)| cost).sum()
    };
    let (ranks, microbatches) = (|| 0..num_ranks, || 0..num_microbatches);
    let largest =
        |column: &[u64], microbatch| ranks().map(|rank| load(column, microbatch, rank)).max().unwrap_or(0);
    let [encoder, llm] = [&costs.encoder_ns, &costs.llm_ns];
    match meets {
        Meets::Step => {
            let of_rank = |rank| microbatches().map(|k| load(encoder, k, rank) + load(llm, k, rank)).sum();
            ranks().map(of_rank).max().unwrap_or(0)
        }
        Meets::Phase => microbatches().map(|k| largest(encoder, k) + largest(llm, k)).sum(),
        Meets::Pipeline => {
            microbatches().map(|k| largest(encoder, k).max(largest(llm, k))).max().unwrap_or(0)
        }
    }
}

/// A number from a normal distribution: the sum of twelve even ones.
fn normal(random: &mut ChaCha8Rng) -> f64 {
    (0..12).map(|_| f64::from(random.next_u32()) / f64::from(u32::MAX)).sum::<f64>() - 6.0
}

/// Lognormal costs, a third text alone; the encoder has `share` of the work, about.
fn lognormal(num_samples: usize, share: f64, sigma: f64, seed: u64) -> Costs {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut draw = |mean: f64| (mean * 1e6 * (sigma * normal(&mut random)).exp()) as u64;
    let encoder = |i: usize, cost: u64| if i.is_multiple_of(3) { 0 } else { cost };
    let encoder_ns = (0..num_samples).map(|i| encoder(i, draw(share * 1.5))).collect();
    let llm_ns = (0..num_samples).map(|_| draw(1.0 - share)).collect();
    Costs { encoder_ns, llm_ns, ..Costs::default() }
}

/// For each layout, what the three objectives make its ranks wait, over all work shared out evenly; and the lower bound of
/// that where ranks meet once a step. Means of five batches.
fn table(num_ranks: u32, num_microbatches: u32, each: usize, share: f64, sigma: f64) -> ([[f64; 3]; 3], f64) {
    let num_buckets = num_ranks * num_microbatches;
    let (mut table, mut bound) = ([[0.0; 3]; 3], 0.0);
    for seed in 0..5 {
        let costs = lognormal(num_buckets as usize * each, share, sigma, seed);
        let limits = Limits::new(costs.num_samples(), num_buckets);
        let work: u64 = costs.encoder_ns.iter().chain(&costs.llm_ns).sum();
        let mean = work as f64 / f64::from(num_ranks);
        for (by, objective) in ALL.into_iter().enumerate() {
            let found = found(&costs, &limits, objective, num_microbatches);
            if objective == Meets::Step {
                bound += found.lower_bound_ns as f64 / mean / 5.0;
            }
            let bucket = found.bucket;
            for (of, layout) in ALL.into_iter().enumerate() {
                let waited = waits(&costs, &bucket, num_buckets, layout, num_microbatches);
                table[of][by] += waited as f64 / mean / 5.0;
            }
        }
    }
    (table, bound)
}

#[test]
fn each_objective_is_the_best_of_the_three_for_its_layout() {
    for (num_ranks, num_microbatches, each, sigma) in
        [(64, 1, 4, 0.5), (16, 1, 16, 0.5), (8, 4, 4, 0.5), (4, 4, 4, 1.0), (4, 4, 4, 1.4), (8, 1, 8, 1.0)]
    {
        for share in [0.15, 0.3, 0.5] {
            let (table, bound) = table(num_ranks, num_microbatches, each, share, sigma);
            for (layout, waits) in table.iter().enumerate() {
                let least = waits.iter().copied().fold(f64::INFINITY, f64::min);
                assert!(waits[layout] <= least * 1.0005, "{num_ranks} ranks, share {share}: {table:?}");
            }
            // Once a step only the sum counts: no rank waits for more than the work itself, or the largest sample.
            let [step, phase, _] = table;
            assert!(step[0] < bound * 1.002, "{num_ranks} ranks, share {share}: {table:?}");
            assert!(step[2] > step[0] * 1.01 && phase[0] > phase[1] * 1.002, "{table:?}");
        }
    }
}

#[test]
fn microbatches_of_a_rank_count_together_where_they_do() {
    // One sample of 9 and nine of 1 on two ranks of two microbatches: no bucket of four can be below 9, and yet
    // both ranks have 9 a step. In phases the 9 is waited for once, and what else stands in its microbatch with it.
    let costs =
        Costs { encoder_ns: vec![0; 10], llm_ns: vec![9, 1, 1, 1, 1, 1, 1, 1, 1, 1], ..Costs::default() };
    let limits = Limits::new(10, 4);
    let step = found(&costs, &limits, Meets::Step, 2);
    assert_eq!((step.max_load_ns, step.lower_bound_ns, step.proven_optimal), (9, 9, true));
    // As many buckets that each run alone are another matter: one rank has the 9, three share the rest.
    assert_eq!(found(&costs, &limits, Meets::Step, 1).max_load_ns, 9);
    let even = Costs { encoder_ns: vec![3, 3, 1, 1], llm_ns: vec![0, 0, 2, 2], ..Costs::default() };
    let limits = Limits::new(4, 4);
    assert_eq!(found(&even, &limits, Meets::Step, 2).max_load_ns, 6);
    assert_eq!(found(&even, &limits, Meets::Pipeline, 2).max_load_ns, 3);
    // Alike together: 3 + 0 and 1 + 2.
    assert_eq!(found(&even, &limits, Meets::Phase, 2).max_load_ns, 6);
}

#[test]
fn the_objective_of_a_pipeline_is_the_search_as_it_was() {
    for seed in 0..4 {
        let costs = lognormal(120, 0.4, 0.5, seed);
        let limits = Limits::new(120, 12);
        assert_eq!(found(&costs, &limits, Meets::Pipeline, 3), schedule(&costs, &limits).unwrap());
    }
}

#[test]
fn near_the_bound_is_near_enough_where_that_is_asked_for() {
    let costs = lognormal(4_096, 0.3, 0.5, 1);
    let limits = Limits::new(4_096, 64);
    let near = schedule_for(&costs, &limits, Meets::Step, 1, NEAR, &|| false).unwrap();
    assert!(near.gap() <= 1.0 / 4_096.0, "{}", near.gap());
    assert!(near.num_moves < found(&costs, &limits, Meets::Step, 1).num_moves);
}

#[test]
fn many_samples_in_many_buckets_are_one_batch_too() {
    // Every sample against every bucket would be 5 x 10^9 comparisons, before any exchange.
    let costs = lognormal(100_000, 0.4, 0.5, 1);
    let limits = Limits { max_moves: 100_000, ..Limits::new(100_000, 50_000) };
    for meets in ALL {
        let found = found(&costs, &limits, meets, 1);
        assert!(found.gap() < 0.5, "{meets}: {}", found.gap());
    }
}

#[test]
fn caps_come_before_even_work() {
    // Two ranks of two microbatches, each of at most 10 tokens. By work alone the two of 10 tokens could share a rank
    // with anything; by tokens each needs a microbatch of its own, and what is left fills the others.
    let costs = Costs {
        encoder_ns: vec![0; 6],
        llm_ns: vec![50, 50, 1, 1, 1, 1],
        tokens: Some(vec![10, 10, 5, 5, 5, 5]),
        bytes: None,
    };
    let limits = Limits { bucket_tokens_max: Some(10), ..Limits::new(6, 4) };
    for meets in ALL {
        let found = found(&costs, &limits, meets, 2);
        let mut held = [0; 4];
        for (&bucket, tokens) in found.bucket.iter().zip(costs.tokens.as_ref().unwrap()) {
            held[bucket as usize] += tokens;
        }
        assert_eq!(held, [10; 4], "{meets}");
    }
    // 6 + 6 tokens of a rank are under two caps of 8, and no microbatch holds both halves of a third 6.
    let wide =
        Costs { encoder_ns: vec![0; 3], llm_ns: vec![4, 2, 2], tokens: Some(vec![6, 6, 6]), bytes: None };
    let limits = Limits { bucket_tokens_max: Some(8), ..Limits::new(3, 4) };
    assert_eq!(found(&wide, &limits, Meets::Step, 2).max_load_ns, 4);
    let four =
        Costs { encoder_ns: vec![0; 4], llm_ns: vec![9, 1, 1, 1], tokens: Some(vec![6; 4]), bytes: None };
    // Even work is 9 against 1 + 1 + 1, three samples of which fit no two microbatches.
    let kept = found(&four, &Limits { bucket_tokens_max: Some(8), ..Limits::new(4, 4) }, Meets::Step, 2);
    assert_eq!((kept.max_load_ns, kept.lower_bound_ns), (10, 9));
    let none = schedule_for(
        &four,
        &Limits { bucket_tokens_max: Some(8), ..Limits::new(4, 2) },
        Meets::Step,
        2,
        0,
        &|| false,
    );
    assert!(matches!(none, Err(BalanceError::CapsInfeasible { num_buckets: 2, cap: 8, .. })), "{none:?}");
}

/// A sample larger than a mean bucket makes one microbatch long for all ranks, which then do more of the work in it: under
/// caps that allow it too.
#[test]
fn microbatches_differ_in_size_within_caps() {
    let llm_ns = vec![100, 50, 50, 30, 30];
    let costs =
        Costs { encoder_ns: vec![0; 5], bytes: Some(llm_ns.clone()), tokens: Some(llm_ns.clone()), llm_ns };
    let limits =
        |cap| Limits { bucket_bytes_max: Some(cap), bucket_tokens_max: Some(cap), ..Limits::new(5, 4) };
    // {100} {50 50} | {30} {30}: all work over both ranks.
    assert_eq!(found(&costs, &limits(100), Meets::Phase, 2).max_load_ns, 130);
    // A sample of 100 under a cap of 99: nothing fits.
    assert!(schedule_for(&costs, &limits(99), Meets::Phase, 2, 0, &|| false).is_err());
}

#[test]
fn unsound_input_is_an_error() {
    let costs = Costs { encoder_ns: vec![1; 4], llm_ns: vec![1; 4], ..Costs::default() };
    let undivided = schedule_for(&costs, &Limits::new(4, 4), Meets::Step, 3, 0, &|| false).unwrap_err();
    assert_eq!(undivided, BalanceError::Undivided { num_buckets: 4, num_microbatches: 3 });
    let none = schedule_for(&costs, &Limits::new(4, 4), Meets::Phase, 0, 0, &|| false).unwrap_err();
    assert_eq!(none, BalanceError::Undivided { num_buckets: 4, num_microbatches: 0 });
    // Each column fits, their sum does not.
    let large = Costs { encoder_ns: vec![1 << 59; 2], llm_ns: vec![1 << 58; 2], ..Costs::default() };
    let over = schedule_for(&large, &Limits::new(2, 2), Meets::Step, 1, 0, &|| false).unwrap_err();
    assert_eq!(over, BalanceError::Overflow { column: "encoder_ns + llm_ns", sample: 1, limit: 1 << 60 });
    assert_eq!(found(&large, &Limits::new(2, 2), Meets::Pipeline, 1).max_load_ns, 1 << 59);
    assert_eq!(
        "often".parse::<Meets>().unwrap_err().to_string(),
        "`meets` is `often`, must be one of: step, phase, pipeline"
    );
    for meets in ALL {
        assert_eq!(meets.to_string().parse(), Ok(meets));
    }
}

/// The least that ranks wait for, over all assignments.
fn best_of_all(costs: &Costs, num_buckets: u32, meets: Meets, num_microbatches: u32) -> u64 {
    let n = costs.num_samples() as u32;
    let all = (0..num_buckets.pow(n)).map(|code| -> Vec<u32> {
        (0..n).map(|sample| code / num_buckets.pow(sample) % num_buckets).collect()
    });
    all.map(|bucket| waits(costs, &bucket, num_buckets, meets, num_microbatches))
        .min()
        .expect("one assignment at least")
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn bound_optimum_and_answer_stand_in_this_order(
        samples in prop::collection::vec((0_u64..12, 0_u64..12), 1..6), (ranks, microbatches) in (1_u32..4, 1_u32..3)
    ) {
        let costs = Costs {
            encoder_ns: samples.iter().map(|s| s.0).collect(),
            llm_ns: samples.iter().map(|s| s.1).collect(),
            ..Costs::default()
        };
        let limits = Limits::new(costs.num_samples(), ranks * microbatches);
        for meets in ALL {
            let found = found(&costs, &limits, meets, microbatches);
            let best = best_of_all(&costs, ranks * microbatches, meets, microbatches);
            let waited = waits(&costs, &found.bucket, ranks * microbatches, meets, microbatches);
            prop_assert_eq!(waited, found.max_load_ns);
            prop_assert_eq!(
                waited, meets.wait_ns(&found.encoder_load_ns, &found.llm_load_ns, microbatches)
            );
            prop_assert!(found.lower_bound_ns <= best && best <= waited, "{:?}: {:?}, best {}", meets, &found, best);
            prop_assert_eq!(found.proven_optimal, found.lower_bound_ns == waited);
            // A handful of samples: the sum is found at its best.
            prop_assert!(meets != Meets::Step || waited == best, "{:?}, best {}", &found, best);
            let judged = Assignment::judge_for(&costs, &limits, meets, microbatches, found.bucket.clone()).unwrap();
            prop_assert_eq!(judged.max_load_ns, waited);
            prop_assert!(judged.lower_bound_ns <= best);
        }
    }
}
