//! Padded rows: caps, counts and the best there is, by trying every assignment.

use dflop_schedule::{
    BalanceError, Costs, Cut, DatasetCosts, Limits, Meets, NEAR, fitting_padded, padded, padded_loads,
    schedule_for,
};
use proptest::prelude::*;

const ALL: [Meets; 3] = [Meets::Step, Meets::Phase, Meets::Pipeline];

fn llm_alone(llm_ns: &[u64]) -> Costs {
    Costs { encoder_ns: vec![0; llm_ns.len()], llm_ns: llm_ns.to_vec(), ..Costs::default() }
}

/// What ranks wait for, padded, by the definition.
fn wait(costs: &Costs, bucket: &[u32], num_buckets: u32, meets: Meets, num_microbatches: u32) -> u64 {
    let members = |b: u32| (0..bucket.len()).filter(move |&i| bucket[i] == b);
    let llm = |b| members(b).count() as u64 * members(b).map(|i| costs.llm_ns[i]).max().unwrap_or(0);
    let encoder = |b| members(b).map(|i| costs.encoder_ns[i]).sum::<u64>();
    let (encoder, llm): (Vec<u64>, Vec<u64>) = (0..num_buckets).map(|b| (encoder(b), llm(b))).unzip();
    assert_eq!((encoder.clone(), llm.clone()), padded_loads(costs, bucket, num_buckets));
    meets.wait_ns(&encoder, &llm, num_microbatches)
}

/// The least wait of all assignments.
fn least(costs: &Costs, num_buckets: u32, meets: Meets, num_microbatches: u32) -> u64 {
    let num_samples = costs.num_samples() as u32;
    let assignments = (0..num_buckets.pow(num_samples)).map(|mut code| {
        let mut digit = || {
            let digit = code % num_buckets;
            code /= num_buckets;
            digit
        };
        (0..num_samples).map(|_| digit()).collect::<Vec<u32>>()
    });
    assignments.map(|bucket| wait(costs, &bucket, num_buckets, meets, num_microbatches)).min().unwrap()
}

#[test]
fn like_lengths_stand_together() {
    // Long and short mixed would take 2 x 9 + 2 x 9.
    let costs = llm_alone(&[9, 1, 1, 1, 1, 1, 1, 9]);
    let bucket = padded(&costs, &Limits::new(8, 2), Meets::Step, 1).unwrap();
    assert_eq!(padded_loads(&costs, &bucket, 2).1.iter().max(), Some(&18));
    let short: Vec<u32> = bucket[1..7].to_vec();
    assert!(short.iter().all(|b| *b == short[0]) && bucket[0] == bucket[7], "{bucket:?}");
    // A giant alone, and as many of the others beside each other as there are buckets for.
    let costs = llm_alone(&[100, 3, 3, 2, 2, 1, 1]);
    let bucket = padded(&costs, &Limits::new(7, 4), Meets::Step, 1).unwrap();
    assert_eq!(padded_loads(&costs, &bucket, 4).1.iter().sum::<u64>(), 100 + 6 + 4 + 2);
}

#[test]
fn what_cannot_be_kept_is_refused() {
    let costs = Costs { tokens: Some(vec![9, 1, 1, 1]), ..llm_alone(&[9, 1, 1, 1]) };
    let capped = |cap| Limits { bucket_tokens_max: Some(cap), ..Limits::new(4, 2) };
    assert!(padded(&costs, &capped(9), Meets::Step, 1).is_ok());
    let alone = BalanceError::SampleOverCap { sample: 0, unit: "tokens", size: 9, cap: 8 };
    assert_eq!(padded(&costs, &capped(8), Meets::Step, 1), Err(alone));
    let even = Costs { tokens: Some(vec![3; 4]), ..llm_alone(&[3; 4]) };
    let found = padded(&even, &capped(5), Meets::Step, 1);
    assert!(
        matches!(found, Err(BalanceError::NoPacking { unit: "tokens", cap: 5, best: 6, .. })),
        "{found:?}"
    );
    // The cap that binds is named, with the least that would do.
    let both = Costs { bytes: Some(vec![3; 4]), ..even.clone() };
    let limits = Limits { bucket_bytes_max: Some(5), bucket_tokens_max: Some(1_000), ..Limits::new(4, 2) };
    let found = padded(&both, &limits, Meets::Step, 1);
    assert!(
        matches!(found, Err(BalanceError::NoPacking { unit: "bytes", cap: 5, best: 6, .. })),
        "{found:?}"
    );
    let mut bytes = vec![1; 8_192];
    bytes[0] = 1 << 52;
    let wide = Costs { bytes: Some(bytes), ..llm_alone(&vec![1; 8_192]) };
    let limits = Limits { bucket_bytes_max: Some(1 << 52), ..Limits::new(8_192, 1) };
    assert!(matches!(
        padded(&wide, &limits, Meets::Step, 1),
        Err(BalanceError::NoPacking { unit: "bytes", .. })
    ));
    let huge = llm_alone(&[1 << 58; 4]);
    assert!(padded(&huge, &Limits::new(4, 2), Meets::Step, 1).is_ok());
    let huge = llm_alone(&[1 << 59, 1, 1, 1]);
    assert!(matches!(
        padded(&huge, &Limits::new(4, 2), Meets::Step, 1),
        Err(BalanceError::Overflow { column: "samples * longest llm_ns", sample: 0, .. })
    ));
    let undivided = BalanceError::Undivided { num_buckets: 2, num_microbatches: 3 };
    assert_eq!(padded(&costs, &Limits::new(4, 2), Meets::Step, 3), Err(undivided));
    assert_eq!(padded(&llm_alone(&[]), &Limits::new(0, 2), Meets::Step, 1), Ok(vec![]));
}

/// Too many samples and buckets for a table: the worst bucket is as light, and none is empty.
#[test]
fn large_batches_need_no_table() {
    let llm_ns: Vec<u64> = (0..20_000).map(|i| 1 + i % 977).collect();
    let costs = llm_alone(&llm_ns);
    let bucket = padded(&costs, &Limits::new(20_000, 4_000), Meets::Step, 1).unwrap();
    let (_, loads) = padded_loads(&costs, &bucket, 4_000);
    let even = llm_ns.iter().sum::<u64>() / 4_000;
    assert!(loads.iter().all(|load| *load > 0) && *loads.iter().max().unwrap() < 2 * even, "{even}");
}

proptest! {
    /// A rank with one bucket waits least of all assignments; with all buckets, it has the least padding of all.
    #[test]
    fn no_assignment_pads_less(llm_ns in prop::collection::vec(0_u64..40, 1..8), num_buckets in 1_u32..4) {
        let costs = llm_alone(&llm_ns);
        let limits = Limits::new(llm_ns.len(), num_buckets);
        for (meets, num_microbatches) in
            [(Meets::Step, 1), (Meets::Phase, 1), (Meets::Pipeline, 1), (Meets::Step, num_buckets)]
        {
            let bucket = padded(&costs, &limits, meets, num_microbatches).unwrap();
            prop_assert_eq!(
                wait(&costs, &bucket, num_buckets, meets, num_microbatches),
                least(&costs, num_buckets, meets, num_microbatches)
            );
        }
    }

    /// With an encoder and several microbatches: every sample once, no bucket empty, caps kept, equal answers, and no longer
    /// than without knowledge of padding.
    #[test]
    fn padded_buckets_are_sound(
        samples in prop::collection::vec((0_u64..300, 1_u64..1000), 1..60),
        num_ranks in 1_u32..5,
        num_microbatches in 1_u32..4,
        room in 1_u64..4,
    ) {
        let num_buckets = num_ranks * num_microbatches;
        prop_assume!(samples.len() >= num_buckets as usize);
        let (encoder_ns, llm_ns): (Vec<u64>, Vec<u64>) = samples.into_iter().unzip();
        let tokens: Vec<u64> = llm_ns.iter().map(|ns| ns.div_ceil(2)).collect();
        let costs = Costs { encoder_ns, llm_ns, tokens: Some(tokens.clone()), bytes: None };
        let most = tokens.iter().max().unwrap() * room * costs.num_samples() as u64 / u64::from(num_buckets);
        let uncapped = Limits::new(costs.num_samples(), num_buckets);
        for meets in ALL {
            for limits in [uncapped, Limits { bucket_tokens_max: Some(most), ..uncapped }] {
                let bucket = match padded(&costs, &limits, meets, num_microbatches) {
                    Err(BalanceError::NoPacking { .. } | BalanceError::SampleOverCap { .. }) => {
                        prop_assert!(limits.bucket_tokens_max.is_some());
                        continue;
                    }
                    found => found.unwrap(),
                };
                prop_assert_eq!(&bucket, &padded(&costs, &limits, meets, num_microbatches).unwrap());
                prop_assert_eq!(bucket.len(), costs.num_samples());
                if limits.bucket_tokens_max.is_none() {
                    let plain = schedule_for(&costs, &limits, meets, num_microbatches, NEAR, &|| false).unwrap();
                    let wait = |bucket: &[u32]| wait(&costs, bucket, num_buckets, meets, num_microbatches);
                    let is_full = (0..num_buckets).all(|b| plain.bucket.contains(&b));
                    prop_assert!(!is_full || wait(&bucket) <= wait(&plain.bucket));
                }
                for b in 0..num_buckets {
                    let of_bucket: Vec<u64> =
                        tokens.iter().zip(&bucket).filter(|(_, at)| **at == b).map(|(tokens, _)| *tokens).collect();
                    prop_assert!(!of_bucket.is_empty());
                    let padded = of_bucket.len() as u64 * of_bucket.iter().max().unwrap();
                    prop_assert!(limits.bucket_tokens_max.is_none_or(|most| padded <= most));
                }
            }
        }
        // How many fit is how many can be cut.
        let limits = Limits { bucket_tokens_max: Some(most), ..uncapped };
        let Ok(count) = fitting_padded(&costs, &limits) else { return Ok(()) };
        let first = |count: usize| Costs {
            encoder_ns: costs.encoder_ns[..count].to_vec(),
            llm_ns: costs.llm_ns[..count].to_vec(),
            tokens: Some(tokens[..count].to_vec()),
            bytes: None,
        };
        prop_assert!(padded(&first(count), &limits, Meets::Step, num_microbatches).is_ok());
        if count < costs.num_samples() {
            prop_assert!(padded(&first(count + 1), &limits, Meets::Step, num_microbatches).is_err());
        }
    }
}

#[test]
fn a_dataset_is_cut_by_it_where_asked() {
    let dataset = DatasetCosts::new(llm_alone(&[9, 1, 1, 1, 1, 1, 1, 9])).unwrap();
    let cut = |is_padded| Cut {
        num_buckets: 2,
        meets: Meets::Step,
        num_microbatches: 1,
        bucket_bytes_max: None,
        bucket_tokens_max: None,
        seed: 0,
        is_padded,
    };
    let lengths = |is_padded| {
        let mut lengths: Vec<usize> = dataset
            .buckets(&[0, 1, 2, 3, 4, 5, 6, 7], &cut(is_padded))
            .unwrap()
            .iter()
            .map(Vec::len)
            .collect();
        lengths.sort_unstable();
        lengths
    };
    assert_eq!((lengths(true), lengths(false)), (vec![2, 6], vec![4, 4]));
    assert_eq!(dataset.check(&cut(true), 8), Ok(()));
}
