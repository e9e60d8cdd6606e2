//! Balancing by phase: ranks that gather layers wait for each other in each component of each microbatch.

use crate::colocated::memory;
use crate::error::StepError;
use crate::scheduler::{StepScheduler, Stop};
use dflop_types::{SampleIndex, Schedule};

/// With more samples than this in a batch, the search for buckets whose samples each rank encodes itself takes most of the time.
/// It is then left out where [`WELL_AHEAD`] says that it would lose. With fewer samples it takes some tens of milliseconds.
const LARGE: usize = 1_024;

/// How far ahead of greedy buckets a step must be whose encoder work is shared out, for the search for better buckets to be left
/// out: one part in so many of its time. In the 16 steps tried that were so far ahead (1,024 samples and more, 256 to 1,024
/// ranks) that search made the greedy buckets 11 % shorter at most, and stayed 2 % and more behind.
const WELL_AHEAD: u64 = 10;

impl StepScheduler {
    /// Balances encoder loads and LLM loads within each microbatch, with the fewest microbatches that fit, or shares the
    /// encoder's work out. Where a rank has no room to encode its own samples, only the latter is left. If more microbatches make the step shorter, these are taken: a large sample is then in a smaller
    /// microbatch, where less waits for it.
    pub(super) fn balanced_by_phase(
        &self,
        step: u64,
        batch: &[SampleIndex],
        halt: Stop,
    ) -> Result<Schedule, StepError> {
        if self.is_too_large_to_encode(batch)
            && let Some(shared) = self.shared_in_fewest(step, batch, halt)?
        {
            return Ok(shared);
        }
        let own = match self.in_fewest_capped(step, batch, &|| true) {
            // Only the whole search can say whether anything fits.
            Err(error) if lacks_room(&error) && !halt() => self.balanced_whole(step, batch, halt),
            quick => quick,
        };
        let quick = match own {
            Err(error) if lacks_room(&error) => {
                return self.shared_in_fewest(step, batch, halt)?.ok_or(error);
            }
            own => own?,
        };
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
            let own = match self.balanced_whole(step, batch, halt) {
                Err(error) if lacks_room(&error) => quick,
                Ok(own) if used(&own) == used(&quick) => own,
                own => {
                    let own = own?;
                    let again = self.shared_out(step, batch, used(&own), halt)?;
                    shorter(own, again)
                }
            };
            shorter(own, shared)
        };
        best.was_stopped = halt();
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

    /// Whether a sample fits no rank that encodes all of it itself.
    fn is_too_large_to_encode(&self, batch: &[SampleIndex]) -> bool {
        let is_over =
            |budget| move |&sample: &SampleIndex| memory::own_alone(self, self.shape(sample)) > budget;
        self.settings.memory_budget_bytes.is_some_and(|budget| batch.iter().any(is_over(budget)))
    }

    /// The schedule that shares the encoder's work out, with the fewest microbatches that fit, or more if the step is then
    /// shorter. `None` if none fits.
    fn shared_in_fewest(
        &self,
        step: u64,
        batch: &[SampleIndex],
        halt: Stop,
    ) -> Result<Option<Schedule>, StepError> {
        let most = self.settings.num_microbatches;
        let mut count = self.fewest_by_bytes(batch)?.min(most);
        loop {
            if let Some(quick) = self.shared_out(step, batch, count, &|| true)? {
                let whole = if halt() { None } else { self.shared_out(step, batch, count, halt)? };
                let best = self.shared_in_more(step, batch, shorter(quick, whole), halt)?;
                return Ok(Some(Schedule { was_stopped: halt(), ..best }));
            }
            if count >= most {
                return Ok(None);
            }
            count = (count + count.div_ceil(4)).min(most);
        }
    }

    /// As [`StepScheduler::capped`], with the fewest microbatches that fit.
    fn in_fewest_capped(&self, step: u64, batch: &[SampleIndex], halt: Stop) -> Result<Schedule, StepError> {
        let most = self.settings.num_microbatches;
        let mut count = self.fewest_by_bytes(batch)?.min(most);
        loop {
            match self.capped(step, batch, count, halt) {
                Err(error) if lacks_room(&error) && count < most => {
                    count = (count + count.div_ceil(4)).min(most);
                }
                found => return found,
            }
        }
    }
}

/// Whether the samples did not fit, so that other buckets may.
const fn lacks_room(error: &StepError) -> bool {
    matches!(error, StepError::Memory { .. } | StepError::Tokens { .. } | StepError::Balance(_))
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
