//! The cap on LLM tokens: no bucket passes it whatever is returned, a cap that nobody reaches changes nothing, and what
//! cannot keep it is refused by name.

use crate::fixture;
use crate::scheduling;
use crate::scheduling::{Sizes, all_arms, batch};
use dflop_step::{Arm, Method, StepError, StepScheduler};
use dflop_types::{Hint, SampleIndex, SampleShape, Schedule};
use proptest::prelude::*;

fn scheduler(sizes: Sizes, shapes: &[SampleShape], memory_budget_bytes: Option<u64>) -> StepScheduler {
    scheduling::scheduler(&fixture::model_profile(), sizes, shapes, memory_budget_bytes)
}

fn tokens(shapes: &[SampleShape]) -> u64 {
    shapes.iter().map(|shape| u64::from(shape.llm_tokens)).sum()
}

fn longest(shapes: &[SampleShape]) -> u64 {
    shapes.iter().map(|shape| u64::from(shape.llm_tokens)).max().unwrap_or(0)
}

/// LLM tokens of the fullest bucket, counted apart from the crate.
fn fullest(schedule: &Schedule, shapes: &[SampleShape]) -> u64 {
    let buckets = schedule.llm.iter().flatten();
    buckets.map(|b| b.iter().map(|s| u64::from(shapes[s.index()].llm_tokens)).sum()).max().unwrap_or(0)
}

/// A cap so many per mille above what an even packing would need, or above the longest sample.
fn cap_of(shapes: &[SampleShape], sizes: Sizes, room_permille: u64) -> u64 {
    let even = tokens(shapes).div_ceil(u64::from(sizes.2 * sizes.3));
    (even + even * room_permille / 1_000).max(longest(shapes)).max(1)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Whatever an arm returns keeps the cap. Methods that know it say that they found no packing; the others are
    /// refused exactly where their schedule without the cap passes it.
    #[test]
    fn no_bucket_passes_the_cap(
        seed: u64, count in 1usize..60, encoder_dp in 1u32..3, llm_pp in 1u32..4, replicas in 1u32..3, m in 1u32..9,
        room_permille in 0u64..400
    ) {
        let (shapes, sizes) = (fixture::shapes(count, seed), (encoder_dp, llm_pp, replicas, m));
        let (batch, cap) = (batch(&shapes), cap_of(&shapes, sizes, room_permille));
        let free = scheduler(sizes, &shapes, None);
        let capped = free.clone().with_bucket_tokens_max(Some(cap)).unwrap();
        for arm in all_arms() {
            let found = capped.schedule(1, &batch, arm);
            match found {
                Ok(schedule) => {
                    schedule.check(&batch, |s| shapes[s.index()].num_parts()).unwrap();
                    prop_assert!(fullest(&schedule, &shapes) <= cap, "{}", arm);
                    prop_assert_eq!(capped.check_tokens(&schedule), Ok(()));
                    let makespan_ns = capped.simulate(&schedule).unwrap().makespan_ns;
                    prop_assert_eq!(makespan_ns, schedule.predicted_makespan_ns);
                }
                Err(StepError::Tokens { needed_tokens, bucket_tokens_max, is_balanced, .. }) => {
                    prop_assert!(needed_tokens > cap && bucket_tokens_max == cap);
                    prop_assert_eq!(is_balanced, arm.method >= Method::Balanced);
                    if !is_balanced {
                        let free = free.schedule(1, &batch, arm).unwrap();
                        prop_assert_eq!(fullest(&free, &shapes), needed_tokens);
                    }
                }
                Err(error) => prop_assert!(false, "{}: {}", arm, error),
            }
        }
    }

    /// A cap that nobody can reach changes no schedule of any arm.
    #[test]
    fn a_cap_beyond_reach_changes_nothing(
        seed: u64, count in 0usize..40, llm_pp in 1u32..4, replicas in 1u32..3, m in 1u32..9
    ) {
        let shapes = fixture::shapes(count, seed);
        let batch = batch(&shapes);
        let free = scheduler((1, llm_pp, replicas, m), &shapes, None);
        let capped = free.clone().with_bucket_tokens_max(Some(tokens(&shapes).max(1))).unwrap();
        for arm in all_arms() {
            prop_assert_eq!(free.schedule(4, &batch, arm), capped.schedule(4, &batch, arm), "{}", arm);
        }
    }

    /// With a memory budget beside it, what is returned keeps both.
    #[test]
    fn tokens_and_memory_are_kept_together(
        seed: u64, count in 8usize..40, m in 2u32..9, room_permille in 50u64..400, budget_percent in 60u64..110
    ) {
        let (shapes, sizes) = (fixture::shapes(count, seed), (1, 2, 1, m));
        let (batch, cap) = (batch(&shapes), cap_of(&shapes, sizes, room_permille));
        let peak = |scheduler: &StepScheduler, schedule: &Schedule| {
            let ranks = scheduler.memory(schedule).unwrap();
            ranks.iter().map(dflop_cost::RankMemory::total_bytes).max().unwrap()
        };
        let free = scheduler(sizes, &shapes, None);
        let budget = peak(&free, &free.schedule(0, &batch, Arm::AWARE).unwrap()) * budget_percent / 100;
        let limited = scheduler(sizes, &shapes, Some(budget)).with_bucket_tokens_max(Some(cap)).unwrap();
        match limited.schedule(0, &batch, Arm::AWARE) {
            Ok(schedule) => {
                prop_assert!(fullest(&schedule, &shapes) <= cap);
                prop_assert!(peak(&limited, &schedule) <= budget);
            }
            Err(StepError::Tokens { .. } | StepError::Memory { .. } | StepError::SampleTooLarge { .. }) => {}
            Err(error) => prop_assert!(false, "{}", error),
        }
    }
}

/// The cap decides: a schedule without it has more in its fullest bucket, and arms that know it make room all the same.
#[test]
fn a_tight_cap_is_kept_where_arrival_order_passes_it() {
    let (mut num_bound, mut num_kept) = (0, 0);
    for seed in 0..12 {
        let (shapes, sizes) = (fixture::shapes(64, seed), (1, 3, 1, 8));
        let (batch, cap) = (batch(&shapes), cap_of(&shapes, sizes, 60));
        let free = scheduler(sizes, &shapes, None);
        let capped = free.clone().with_bucket_tokens_max(Some(cap)).unwrap();
        num_bound += u32::from(fullest(&free.schedule(0, &batch, Arm::AWARE).unwrap(), &shapes) > cap);
        let error = capped.schedule(0, &batch, Arm::BLIND).unwrap_err();
        assert!(matches!(error, StepError::Tokens { is_balanced: false, .. }), "{error}");
        num_kept += u32::from(capped.schedule(0, &batch, Arm::AWARE).is_ok());
    }
    assert!(num_bound >= 6, "the cap binds in {num_bound} of 12 batches");
    assert_eq!(num_kept, 12);
}

#[test]
fn what_cannot_keep_the_cap_is_named() {
    // All samples are over a cap of 99: the longest is named, as a cap that holds it holds all.
    let mut shapes = vec![fixture::sample(0, 0, 100); 7];
    shapes.insert(3, fixture::sample(2, 400, 500));
    let free = scheduler((1, 1, 1, 4), &shapes, None);
    let said = |error: StepError| format!("{error}; {}", error.hint().expect("an act mends it"));
    assert_eq!(
        said(free.clone().with_bucket_tokens_max(Some(899)).unwrap_err()),
        "sample 3 has 900 LLM tokens, `bucket_tokens_max` is 899 for a bucket (microbatch x LLM replica); \
         raise `train.bucket_tokens_max` to 900 or more, or leave the sample out of the dataset"
    );
    let error = free.clone().with_bucket_tokens_max(Some(99)).unwrap_err();
    assert!(matches!(error, StepError::SampleOverTokens { sample: SampleIndex(3), .. }), "{error}");
    // Arrival order: two samples a bucket, one of them the long one. The others find room: it has a bucket alone.
    let capped = free.with_bucket_tokens_max(Some(900)).unwrap();
    assert_eq!(
        said(capped.schedule(2, &batch(&shapes), Arm::BLIND).unwrap_err()),
        "step 2 does not fit: the fullest of 4 buckets (microbatches x LLM replicas) has 1000 LLM tokens, \
         `bucket_tokens_max` is 900; take an arm that keeps to the cap (balanced, ordered, shaped, aware), or raise \
         `train.bucket_tokens_max`"
    );
    assert_eq!(fullest(&capped.schedule(2, &batch(&shapes), Arm::AWARE).unwrap(), &shapes), 900);
    // 700 tokens beside the long one in one bucket of 1,000: certainly none keeps it.
    let tight = scheduler((1, 1, 1, 1), &shapes, None).with_bucket_tokens_max(Some(1_000)).unwrap();
    assert_eq!(
        said(tight.schedule(5, &batch(&shapes), Arm::AWARE).unwrap_err()),
        "step 5 does not fit: the fullest of 1 buckets (microbatches x LLM replicas) has 1600 LLM tokens, \
         `bucket_tokens_max` is 1000; raise `train.bucket_tokens_max` or `train.num_microbatches`, or take fewer \
         samples a step"
    );
}
