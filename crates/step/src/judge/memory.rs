//! The memory budget in the scheduler: what fraction of a bucket's memory each sample takes, whether a schedule keeps the
//! budget, and the errors if it does not.

use crate::error::StepError;
use crate::judge::{peaks, predict};
use crate::scheduler::StepScheduler;
use dflop_cost::{ColocatedSharding, CostModel, RankRole, Typical};
use dflop_types::{Component, Rank, SampleIndex, Schedule};

/// The capacity of a bucket, in the unit in which [`StepScheduler::memory_fractions`] measures samples.
pub(crate) const FRACTION_ONE: u64 = 1 << 30;

/// What is left of a budget beside bytes that are held in any case, without the part of it that is kept free.
fn free_beside(budget_bytes: u64, static_bytes: u64, reserve_percent: u64) -> u64 {
    let free = budget_bytes.saturating_sub(static_bytes);
    // It is no more than `free`, so it fits 64 bits.
    (u128::from(free) * u128::from(100 - reserve_percent) / 100) as u64
}

/// A sample's bytes in parts of a bucket's, in the unit of [`FRACTION_ONE`].
fn fraction(bytes: u64, usable: u64) -> u64 {
    let fraction = u128::from(bytes) * u128::from(FRACTION_ONE) / u128::from(usable.max(1));
    u64::try_from(fraction).unwrap_or(u64::MAX).min(FRACTION_ONE * 1_000)
}

/// Of two errors the memory error that needs fewer bytes, and so is nearer to fitting.
pub(crate) fn least(a: StepError, b: StepError) -> StepError {
    let needed = |error: &StepError| match error {
        StepError::Memory { needed_bytes, .. } => *needed_bytes,
        _ => u64::MAX,
    };
    if needed(&b) < needed(&a) { b } else { a }
}

impl StepScheduler {
    /// The fraction that each sample takes of the memory a bucket may use, in parts of [`FRACTION_ONE`]. `reserve_percent`
    /// of that memory is kept free. `None` without a budget.
    ///
    /// It is the largest fraction over all ranks. So if the fractions of a bucket add up to at most [`FRACTION_ONE`], the
    /// bucket fits on every rank, beside as many others as the pipeline order has in flight.
    pub(crate) fn memory_fractions(
        &self,
        batch: &[SampleIndex],
        typical: Typical,
        reserve_percent: u64,
    ) -> Option<Vec<u64>> {
        self.memory_fractions_beside(batch, typical, reserve_percent, u32::MAX)
    }

    /// As [`StepScheduler::memory_fractions`], where no more than `in_flight_max` microbatches are in flight.
    pub(crate) fn memory_fractions_beside(
        &self,
        batch: &[SampleIndex],
        typical: Typical,
        reserve_percent: u64,
        in_flight_max: u32,
    ) -> Option<Vec<u64>> {
        if self.settings.layout.is_colocated() {
            return self.colocated_fractions(&self.model, batch, typical, reserve_percent);
        }
        let budget = self.settings.memory_budget_bytes?;
        let free_beside = |static_bytes: u64| free_beside(budget, static_bytes, reserve_percent);
        let usable = |role: RankRole, in_flight: u32| {
            let fixed = self.model.sharded_memory(role, peaks::sharding(self, role));
            free_beside(fixed.static_bytes()) / u64::from(in_flight.clamp(1, in_flight_max.max(1)))
        };
        let (llm_dp, encoder_dp) =
            (u64::from(self.settings.layout.llm.dp), u64::from(self.settings.layout.encoder.dp));
        let mut fractions = vec![0; batch.len()];
        for (stage, layers) in (0..).zip(&self.encoder_stages) {
            let in_flight = predict::in_flight(&self.settings, stage);
            let role = RankRole::EncoderStage(*layers);
            // A microbatch has `llm_dp` buckets, and `encoder_dp` encoder replicas share its samples.
            let usable = usable(role, in_flight).saturating_mul(encoder_dp) / llm_dp;
            for (most, &s) in fractions.iter_mut().zip(batch) {
                let bytes = self.model.sample_encoder_stage_bytes(self.shape(s), typical, *layers);
                *most = fraction(bytes, usable).max(*most);
            }
        }
        for (stage, held) in (self.settings.layout.encoder.pp..).zip(self.rank_layers()) {
            let in_flight = predict::in_flight(&self.settings, stage);
            let usable = usable(RankRole::Stage(held), in_flight);
            for (most, &s) in fractions.iter_mut().zip(batch) {
                *most =
                    fraction(self.model.sample_stage_bytes(self.shape(s), typical, held), usable).max(*most);
            }
        }
        Some(fractions)
    }

    /// As [`StepScheduler::memory_fractions`], on colocated ranks that recompute as `model` does.
    pub(crate) fn colocated_fractions(
        &self,
        model: &CostModel,
        batch: &[SampleIndex],
        typical: Typical,
        reserve_percent: u64,
    ) -> Option<Vec<u64>> {
        let budget = self.settings.memory_budget_bytes?;
        let sharding = ColocatedSharding::of(&self.settings().layout);
        let usable = free_beside(budget, model.colocated_static_bytes(sharding), reserve_percent);
        let (whole, encoders) = (model.whole_stage(), u64::from(self.encoders_per_group()));
        let bytes = |&sample: &SampleIndex| {
            let encoder = model.sample_encoder_bytes(self.shape(sample), typical) / encoders;
            encoder.saturating_add(model.sample_stage_bytes(self.shape(sample), typical, whole))
        };
        Some(batch.iter().map(|sample| fraction(bytes(sample), usable)).collect())
    }

    /// As [`StepScheduler::memory_fractions`], on colocated ranks that read `count` microbatches each and share the encoder's work
    /// out: each rank encodes as many bytes in each microbatch, so only what it reads is balanced.
    pub(crate) fn reading_fractions(
        &self,
        batch: &[SampleIndex],
        typical: Typical,
        count: u32,
        reserve_percent: u64,
    ) -> Option<Vec<u64>> {
        let budget = self.settings.memory_budget_bytes?;
        let sharding = ColocatedSharding::of(&self.settings().layout);
        let encoded = |&s: &SampleIndex| self.model.sample_encoder_bytes(self.shape(s), typical);
        let sum: u128 = batch.iter().map(|s| u128::from(encoded(s))).sum();
        let buckets = u128::from(count) * u128::from(self.num_encoders());
        let mean = u64::try_from(sum / buckets.max(1)).unwrap_or(u64::MAX);
        let fixed = self.model.colocated_static_bytes(sharding).saturating_add(mean);
        let (usable, whole) = (free_beside(budget, fixed, reserve_percent), self.model.whole_stage());
        let read = |&s: &SampleIndex| self.model.sample_stage_bytes(self.shape(s), typical, whole);
        Some(batch.iter().map(|sample| fraction(read(sample), usable)).collect())
    }

    pub(crate) fn fitting(&self, schedule: Schedule) -> Result<Schedule, StepError> {
        self.check_limits(&schedule).map(|()| schedule)
    }

    /// Nothing if the schedule keeps the cap on tokens and the memory budget, or there are none.
    pub(crate) fn check_limits(&self, schedule: &Schedule) -> Result<(), StepError> {
        self.check_tokens(schedule)?;
        self.check_memory(schedule)
    }

    /// Whether a schedule without action lists keeps the cap on tokens and the memory budget: it does not say by how much.
    pub(crate) fn is_within_limits(&self, schedule: &Schedule) -> bool {
        let Some(budget_bytes) = self.settings.memory_budget_bytes else {
            return self.check_tokens(schedule).is_ok();
        };
        let most = (!self.eased.is_empty()).then(|| self.uneased());
        let scheduler = most.as_ref().unwrap_or(self);
        self.check_tokens(schedule).is_ok() && peaks::are_within(scheduler, schedule, budget_bytes)
    }

    /// Nothing if every rank stays within the memory budget, or if there is none.
    pub(crate) fn check_memory(&self, schedule: &Schedule) -> Result<(), StepError> {
        let Some(budget_bytes) = self.settings.memory_budget_bytes else { return Ok(()) };
        // Whether it fits is asked of the plan's own recomputation alone: how little is enough takes longer to find out.
        let most = (!self.eased.is_empty()).then(|| self.uneased());
        let (component, needed_bytes) = most.as_ref().unwrap_or(self).fullest(schedule);
        if needed_bytes <= budget_bytes {
            return Ok(());
        }
        Err(StepError::Memory { step: schedule.step, component, needed_bytes, budget_bytes })
    }

    /// The component of the fullest rank and its predicted peak, in bytes.
    fn fullest(&self, schedule: &Schedule) -> (Component, u64) {
        let peaks = peaks::memory(self, schedule);
        let fullest = (0..).zip(&peaks).max_by_key(|(_, memory)| memory.total_bytes());
        fullest.map_or((Component::Encoder, 0), |(rank, memory)| {
            let at = self.settings.layout.coordinates(Rank(rank));
            (at.map_or(Component::Llm, |at| at.component), memory.total_bytes())
        })
    }

    /// The error of a sample that is over the budget alone, if there is one.
    pub(crate) fn too_large(&self, batch: &[SampleIndex]) -> Option<StepError> {
        let budget_bytes = self.settings.memory_budget_bytes?;
        batch.iter().find_map(|&sample| {
            let (component, needed_bytes) = self.alone(self.shape(sample));
            (needed_bytes > budget_bytes).then_some(StepError::SampleTooLarge {
                sample,
                component,
                needed_bytes,
                budget_bytes,
            })
        })
    }
}
