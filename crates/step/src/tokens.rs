//! The cap on LLM tokens in the scheduler: which methods keep it, and the errors if it is not kept.
//!
//! Unlike bytes, which are predicted, tokens are exact: a bucket (microbatch x LLM replica) has the sum of its samples'
//! tokens. So the balancer gets the cap as it is. Only schedules of methods that do not look at the cap must be checked
//! afterwards.

use crate::error::StepError;
use crate::scheduler::StepScheduler;
use dflop_schedule::BalanceError;
use dflop_types::{SampleIndex, SampleShape, Schedule};
use std::cmp::Reverse;

/// Checks that the cap is above 0 and that each sample alone keeps it. The error names the longest sample: if the cap is
/// raised enough for this one, it is enough for all.
///
/// # Errors
/// [`StepError::Zero`], [`StepError::SampleOverTokens`].
pub fn check_samples(shapes: &[SampleShape], bucket_tokens_max: Option<u64>) -> Result<(), StepError> {
    let Some(cap) = bucket_tokens_max else { return Ok(()) };
    if cap == 0 {
        return Err(StepError::Zero { field: "train.bucket_tokens_max" });
    }
    let longest = (0..).zip(shapes).max_by_key(|&(index, shape)| (shape.llm_tokens, Reverse(index)));
    match longest {
        Some((index, shape)) if u64::from(shape.llm_tokens) > cap => Err(StepError::SampleOverTokens {
            sample: SampleIndex(index),
            tokens: u64::from(shape.llm_tokens),
            bucket_tokens_max: cap,
        }),
        _ => Ok(()),
    }
}

/// Turns the balancer's error that the cap on tokens cannot be kept into an error of the step. Other errors stay as they are.
pub(crate) fn of_step(step: u64, error: StepError) -> StepError {
    match error {
        StepError::Balance(
            BalanceError::CapsInfeasible { unit: "tokens", needed: needed_tokens, num_buckets, cap, .. }
            | BalanceError::NoPacking { unit: "tokens", best: needed_tokens, num_buckets, cap, .. },
        ) => {
            StepError::Tokens { step, num_buckets, needed_tokens, bucket_tokens_max: cap, is_balanced: true }
        }
        other => other,
    }
}

impl StepScheduler {
    /// The same scheduler with a hard cap on the LLM tokens of a bucket, which is a microbatch on one LLM replica.
    /// Methods from [`crate::Method::Balanced`] on keep the cap. If a schedule of another method is over it, it is refused.
    ///
    /// # Errors
    /// [`StepError::Zero`]; [`StepError::SampleOverTokens`] if a sample of the data profile alone is over the cap.
    pub fn with_bucket_tokens_max(mut self, bucket_tokens_max: Option<u64>) -> Result<Self, StepError> {
        check_samples(&self.shapes, bucket_tokens_max)?;
        self.bucket_tokens_max = bucket_tokens_max;
        Ok(self)
    }

    /// As [`StepScheduler::with_bucket_tokens_max`], for a cap that [`check_samples`] has already checked for the same
    /// samples. A search makes many schedulers of one dataset, and so checks the samples only once.
    #[must_use]
    pub const fn with_checked_tokens_max(mut self, bucket_tokens_max: Option<u64>) -> Self {
        self.bucket_tokens_max = bucket_tokens_max;
        self
    }

    /// The cap on the LLM tokens of a bucket; `None`: there is none.
    pub const fn bucket_tokens_max(&self) -> Option<u64> {
        self.bucket_tokens_max
    }

    /// LLM tokens of each sample of a batch; `None` without a cap.
    pub(crate) fn capped_tokens(&self, batch: &[SampleIndex]) -> Option<Vec<u64>> {
        self.bucket_tokens_max?;
        Some(batch.iter().map(|&sample| u64::from(self.shape(sample).llm_tokens)).collect())
    }

    /// Nothing if no bucket of a schedule is over the cap on tokens, or if there is no cap.
    ///
    /// # Errors
    /// [`StepError::Tokens`]; [`StepError::UnknownSample`] and [`StepError::ForeignSchedule`] for a schedule that is
    /// not of this plan and data.
    pub fn check_tokens(&self, schedule: &Schedule) -> Result<(), StepError> {
        self.check_is_ours(schedule)?;
        let Some(bucket_tokens_max) = self.bucket_tokens_max else { return Ok(()) };
        let tokens = |bucket: &Vec<SampleIndex>| -> u64 {
            bucket.iter().map(|&sample| u64::from(self.shape(sample).llm_tokens)).sum()
        };
        let needed_tokens = schedule.llm.iter().flatten().map(tokens).max().unwrap_or(0);
        if needed_tokens <= bucket_tokens_max {
            return Ok(());
        }
        Err(StepError::Tokens {
            step: schedule.step,
            num_buckets: self.settings.num_buckets(),
            needed_tokens,
            bucket_tokens_max,
            is_balanced: false,
        })
    }
}
