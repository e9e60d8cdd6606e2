//! The simpler methods of an arm: arrival order, LPT by tokens, and balanced buckets in no particular order.

use crate::costs::{BatchCosts, loads};
use crate::error::StepError;
use crate::place::columns;
use crate::place::shares::{self, Shares};
use crate::place::sides::Sides;
use crate::scheduler::StepScheduler;
use crate::tokens;
use dflop_schedule::{Assignment, Costs, Limits, baseline};
use dflop_types::{SampleIndex, Schedule};

impl StepScheduler {
    /// Consecutive samples in equal counts, on both sides.
    pub(crate) fn blind(
        &self,
        step: u64,
        batch: &[SampleIndex],
        costs: &BatchCosts,
    ) -> Result<Schedule, StepError> {
        let bucket = baseline::arrival_order(batch.len(), self.settings.num_buckets());
        let encoder_dp = self.settings.layout.encoder.dp;
        let share =
            |column: &[usize]| shares::whole(&baseline::arrival_order(column.len(), encoder_dp), encoder_dp);
        self.judged(step, batch, costs, &bucket, share)
    }

    /// LPT by LLM tokens into buckets, and by encoder tokens over the encoder replicas. It uses no predicted times.
    pub(crate) fn tokens(
        &self,
        step: u64,
        batch: &[SampleIndex],
        costs: &BatchCosts,
    ) -> Result<Schedule, StepError> {
        let llm_tokens: Vec<u64> = batch.iter().map(|&s| u64::from(self.shape(s).llm_tokens)).collect();
        let bucket = baseline::single_cost_lpt(&llm_tokens, self.settings.num_buckets());
        let share = |column: &[usize]| {
            let tokens: Vec<u64> =
                column.iter().map(|&position| self.shape(batch[position]).encoder_tokens()).collect();
            let replicas = self.settings.layout.encoder.dp;
            shares::whole(&baseline::single_cost_lpt(&tokens, replicas), replicas)
        };
        self.judged(step, batch, costs, &bucket, share)
    }

    /// Balanced buckets in no particular order; buckets of similar LLM load form one microbatch.
    pub(crate) fn balanced(
        &self,
        step: u64,
        batch: &[SampleIndex],
        costs: &BatchCosts,
        seed: u64,
    ) -> Result<Schedule, StepError> {
        let bucket_tokens_max = self.bucket_tokens_max;
        let limits =
            Limits { seed, bucket_tokens_max, ..Limits::new(batch.len(), self.settings.num_buckets()) };
        let assignment =
            dflop_schedule::schedule(&costs.costs, &limits).map_err(|e| tokens::of_step(step, e.into()))?;
        let columns = columns::by_llm_load(&assignment.llm_load_ns, self.settings.layout.llm.dp as usize);
        let bucket = columns::renumbered(&assignment.bucket, columns.iter());
        let share = |column: &[usize]| self.share_quickly(costs, column);
        Ok(with_bound(self.judged(step, batch, costs, &bucket, share)?, &assignment))
    }

    /// The schedule of samples in the buckets `bucket`, with its loads and its makespan under the pipeline order.
    pub(crate) fn judged(
        &self,
        step: u64,
        batch: &[SampleIndex],
        costs: &BatchCosts,
        bucket: &[u32],
        share: impl Fn(&[usize]) -> Shares,
    ) -> Result<Schedule, StepError> {
        self.judge_sides(step, batch, costs, bucket, self.place(batch, bucket, share))
    }

    /// As [`StepScheduler::judged`], if the encoder shares have been decided already.
    pub(crate) fn judge_sides(
        &self,
        step: u64,
        batch: &[SampleIndex],
        costs: &BatchCosts,
        bucket: &[u32],
        sides: Sides,
    ) -> Result<Schedule, StepError> {
        let num_buckets = self.settings.num_buckets();
        let (encoder_load, llm_load) = loads(&costs.costs, bucket, num_buckets);
        let mut schedule = self.as_schedule(step, batch, sides);
        schedule.max_load_ns = encoder_load.iter().chain(&llm_load).copied().max().unwrap_or(0);
        schedule.lower_bound_ns = simple_bound(&costs.costs, num_buckets);
        schedule.predicted_makespan_ns = self.makespan_ns(&schedule)?;
        Ok(schedule)
    }
}

/// The schedule with the lower bound that `assignment` has for its largest load.
pub(crate) fn with_bound(schedule: Schedule, assignment: &Assignment) -> Schedule {
    Schedule { lower_bound_ns: assignment.lower_bound_ns, ..schedule }
}

/// A lower bound for the largest load of a bucket: the largest of the mean load and the largest sample, on either component.
fn simple_bound(costs: &Costs, num_buckets: u32) -> u64 {
    let bound = |cost_ns: &[u64]| {
        let total: u128 = cost_ns.iter().map(|&ns| u128::from(ns)).sum();
        let mean = u64::try_from(total.div_ceil(u128::from(num_buckets.max(1)))).unwrap_or(u64::MAX);
        mean.max(cost_ns.iter().copied().max().unwrap_or(0))
    };
    bound(&costs.encoder_ns).max(bound(&costs.llm_ns))
}
