//! Balancing by phase: ranks that gather layers wait for each other in each component of each microbatch.

use crate::error::StepError;
use crate::scheduler::{StepScheduler, Stop};
use dflop_types::{SampleIndex, Schedule};

/// Samples of a batch beyond which buckets of samples that each rank encodes itself are not searched for, if the encoder's work
/// shared out is [`WELL_AHEAD`] of greedy ones: their search takes most of the time. Up to here it takes some tens of milliseconds,
/// and with few ranks it wins back more.
const LARGE: usize = 1_024;

/// One part of so many. Seen in 16 steps of 1,024 and more samples, on 256 to 1,024 ranks, that were so far ahead: the search
/// made the greedy ones 11 % shorter at most, and stayed 2 % and more behind.
const WELL_AHEAD: u64 = 10;

impl StepScheduler {
    /// Balances encoder loads and LLM loads within each microbatch, with the fewest microbatches that fit, or shares the
    /// encoder's work out. If more microbatches make the step shorter, these are taken: a large sample is then in a smaller
    /// microbatch, where less waits for it.
    pub(super) fn balanced_by_phase(
        &self,
        step: u64,
        batch: &[SampleIndex],
        halt: Stop,
    ) -> Result<Schedule, StepError> {
        let quick = self.in_fewest_capped(step, batch, &|| true)?;
        let shared = self.shared_out(step, batch, used(&quick), halt)?;
        let quick_ns = quick.predicted_makespan_ns;
        let is_ahead = |shared: &Schedule| {
            let ns = shared.predicted_makespan_ns;
            batch.len() > LARGE && ns.saturating_add(ns / WELL_AHEAD) < quick_ns
        };
        let mut best = if halt() {
            shorter(quick, shared)
        } else if let Some(shared) = shared.as_ref().filter(|shared| is_ahead(shared)) {
            self.shared_in_more(step, batch, shared.clone(), halt)?
        } else {
            let own = self.balanced_whole(step, batch, halt)?;
            let again = if used(&own) == used(&quick) {
                None
            } else {
                self.shared_out(step, batch, used(&own), halt)?
            };
            shorter(shorter(own, shared), again)
        };
        best.was_stopped |= halt();
        Ok(best)
    }

    /// The best of the whole search in which every rank encodes its own samples.
    fn balanced_whole(&self, step: u64, batch: &[SampleIndex], halt: Stop) -> Result<Schedule, StepError> {
        let most = self.settings.num_microbatches;
        let mut best = self.in_fewest_capped(step, batch, halt)?;
        let count = used(&best);
        let twice = 2 * count;
        let gap = best.max_load_ns.saturating_sub(best.lower_bound_ns);
        let may_help = twice <= most && gap > best.lower_bound_ns / 100 && !best.was_stopped;
        let other = if may_help { self.capped(step, batch, twice, halt).ok() } else { None };
        best = shorter(best, other);
        for easier in self.easier_counts(batch, count)? {
            let other = if best.was_stopped { None } else { self.capped(step, batch, easier, halt).ok() };
            best = shorter(best, other);
        }
        Ok(best)
    }

    /// `shared`, or the same with more microbatches, which then recompute less, if that is shorter.
    fn shared_in_more(
        &self,
        step: u64,
        batch: &[SampleIndex],
        shared: Schedule,
        halt: Stop,
    ) -> Result<Schedule, StepError> {
        let mut best = shared;
        for easier in self.easier_counts(batch, used(&best))? {
            if halt() {
                break;
            }
            best = shorter(best, self.shared_out(step, batch, easier, &|| true)?);
        }
        Ok(best)
    }

    /// As [`StepScheduler::capped`], with the fewest microbatches that fit.
    fn in_fewest_capped(&self, step: u64, batch: &[SampleIndex], halt: Stop) -> Result<Schedule, StepError> {
        let most = self.settings.num_microbatches;
        let mut count = self.fewest_by_bytes(batch)?.min(most);
        loop {
            match self.capped(step, batch, count, halt) {
                Err(StepError::Memory { .. } | StepError::Tokens { .. } | StepError::Balance(_))
                    if count < most =>
                {
                    count = (count + count.div_ceil(4)).min(most);
                }
                found => return found,
            }
        }
    }
}

/// The shorter of two schedules; of equals the first.
fn shorter(one: Schedule, other: Option<Schedule>) -> Schedule {
    match other {
        Some(other) if other.predicted_makespan_ns < one.predicted_makespan_ns => other,
        _ => one,
    }
}

/// How many microbatches of a schedule have samples.
fn used(schedule: &Schedule) -> u32 {
    let last = schedule.llm.iter().rposition(|column| column.iter().any(|samples| !samples.is_empty()));
    last.map_or(1, |last| last as u32 + 1)
}
