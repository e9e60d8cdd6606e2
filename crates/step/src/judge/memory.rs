//! The memory budget in the scheduler: what fraction of a bucket's memory each sample takes, whether a schedule keeps the
//! budget, and the errors if it does not.

use crate::error::StepError;
use crate::judge::{peaks, predict};
use crate::scheduler::StepScheduler;
use dflop_cost::{RankRole, Sharding, Typical};
use dflop_types::{Component, Rank, SampleIndex, Schedule};

/// The capacity of a bucket, in the unit in which [`StepScheduler::memory_fractions`] measures samples.
pub(crate) const FRACTION_ONE: u64 = 1 << 30;

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
        let budget = self.settings.memory_budget_bytes?;
        let free_beside = |static_bytes: u64| {
            let free = budget.saturating_sub(static_bytes);
            let kept = u128::from(free) * u128::from(100 - reserve_percent) / 100;
            // It is no more than `free`, so it fits 64 bits.
            kept as u64
        };
        let fraction = |bytes: u64, usable: u64| {
            let fraction = u128::from(bytes) * u128::from(FRACTION_ONE) / u128::from(usable.max(1));
            u64::try_from(fraction).unwrap_or(u64::MAX).min(FRACTION_ONE * 1_000)
        };
        if self.settings.layout.is_colocated() {
            let sharding = Sharding::of(&self.settings.layout, Component::Both);
            let usable = free_beside(self.model.colocated_static_bytes(sharding));
            let whole = self.model.whole_stage();
            let bytes = |&sample: &SampleIndex| {
                let encoder = self.model.sample_encoder_bytes(self.shape(sample), typical);
                encoder.saturating_add(self.model.sample_stage_bytes(self.shape(sample), typical, whole))
            };
            return Some(batch.iter().map(|sample| fraction(bytes(sample), usable)).collect());
        }
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

    pub(crate) fn fitting(&self, schedule: Schedule) -> Result<Schedule, StepError> {
        self.check_limits(&schedule).map(|()| schedule)
    }

    /// Nothing if the schedule keeps the cap on tokens and the memory budget, or there are none.
    pub(crate) fn check_limits(&self, schedule: &Schedule) -> Result<(), StepError> {
        self.check_tokens(schedule)?;
        self.check_memory(schedule)
    }

    /// Nothing if every rank stays within the memory budget, or if there is none.
    pub(crate) fn check_memory(&self, schedule: &Schedule) -> Result<(), StepError> {
        let Some(budget_bytes) = self.settings.memory_budget_bytes else { return Ok(()) };
        let (component, needed_bytes) = self.fullest(schedule);
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
