//! The cap on LLM tokens in a search: what cannot keep it falls by name, and what is ranked keeps it in training.

use crate::{asked, fixture};
use dflop_plan::{PlanError, SearchInput, search};
use dflop_step::StepError;
use dflop_types::{MadeFrom, Rejection, SampleShape};

fn tokens(shapes: &[SampleShape]) -> u64 {
    shapes.iter().map(|shape| u64::from(shape.llm_tokens)).sum()
}

fn longest(shapes: &[SampleShape]) -> u64 {
    shapes.iter().map(|shape| u64::from(shape.llm_tokens)).max().unwrap_or(0)
}

/// The planner counts what has too few buckets, and what it ranks keeps the cap in training.
#[test]
fn the_planner_plans_within_the_cap() {
    let shapes = fixture::shapes(96, 4);
    let model_profile = fixture::model_profile();
    let input = |bucket_tokens_max| SearchInput {
        bucket_tokens_max,
        num_sampled_batches: 3,
        seed: 1,
        made_from: MadeFrom::new(),
        ..asked::input(&shapes, &model_profile, 3)
    };
    let cap = longest(&shapes) + 400;
    let outcome = search(&input(Some(cap))).unwrap();
    let fell = outcome.rejections.iter().find(|r| matches!(r.rejection, Rejection::BucketTokens { .. }));
    let Some(Rejection::BucketTokens { needed_tokens, bucket_tokens_max }) = fell.map(|r| &r.rejection)
    else {
        panic!("{:?}", outcome.rejections);
    };
    assert!(*needed_tokens > cap && *bucket_tokens_max == cap);
    assert!(!outcome.ranked.is_empty());
    for plan in &outcome.ranked {
        // 32 samples of the mean length must at least fit.
        let buckets = u64::from(plan.num_microbatches * plan.layout.llm.dp);
        assert!(buckets * cap * 96 >= tokens(&shapes) * 24, "{plan:?}");
    }
    let error = search(&input(Some(longest(&shapes) - 1))).unwrap_err();
    assert!(matches!(error, PlanError::Step(StepError::SampleOverTokens { .. })), "{error}");
    let few = search(&SearchInput { num_microbatches: Some(1), ..input(Some(cap)) }).unwrap();
    // One microbatch is what was asked for, and what binds: with more of them the cap is kept.
    let hint = few.hint().unwrap();
    assert!(
        few.ranked.is_empty()
            && hint.starts_with("`train.num_microbatches` of 1 and `train.bucket_tokens_max` of "),
        "{hint}"
    );
}
