//! A schedule as a step: its durations, its timeline and its memory. A schedule of another plan or other data is refused.

use crate::colocated::memory as colocated;
use crate::colocated::predict as colocated_times;
use crate::error::StepError;
use crate::judge::peaks;
use crate::judge::predict::{self, Coverage, Predicted};
use crate::judge::work::Column;
use crate::scheduler::StepScheduler;
use dflop_cost::RankMemory;
use dflop_sim::{
    SimError, Simulator, StepInput, durations_of, measured_lists, measured_timeline, simulate_lists,
    simulate_step,
};
use dflop_types::{Schedule, Span, Timeline};

/// A schedule as the planner judges it.
#[derive(Debug, Clone)]
pub struct Judgement {
    /// Its simulated timeline.
    pub timeline: Timeline,
    /// How much of its prediction was measured.
    pub coverage: Coverage,
    /// Predicted peak of every rank, in bytes.
    pub peak_bytes: Vec<u64>,
}

impl StepScheduler {
    /// The durations of a schedule as the simulator takes them.
    ///
    /// # Errors
    /// [`StepError::UnknownSample`] and [`StepError::ForeignSchedule`] for a schedule that is not of this
    /// plan and data.
    pub fn step_input(&self, schedule: &Schedule) -> Result<StepInput, StepError> {
        Ok(self.predicted(schedule)?.input)
    }

    /// How much of what is predicted for a schedule was measured.
    ///
    /// # Errors
    /// As [`StepScheduler::step_input`].
    pub fn coverage(&self, schedule: &Schedule) -> Result<Coverage, StepError> {
        Ok(self.predicted(schedule)?.coverage)
    }

    /// The predicted timeline of a schedule.
    ///
    /// # Errors
    /// As [`StepScheduler::step_input`], and [`StepError::Sim`] where times overflow.
    pub fn simulate(&self, schedule: &Schedule) -> Result<Timeline, StepError> {
        Ok(play(&self.predicted(schedule)?.input, schedule)?)
    }

    /// Makespan of a schedule whose degrees and samples have been checked, in nanoseconds.
    pub(crate) fn makespan_ns(&self, schedule: &Schedule) -> Result<u64, StepError> {
        let input =
            predict::predict(self, &schedule.llm, &schedule.encoder, self.settings.pipeline_order).input;
        let simulator = if schedule.actions.is_empty() {
            Simulator::new(&input)
        } else {
            Simulator::with_lists(&input, &schedule.actions)
        };
        Ok(simulator?.makespan_ns())
    }

    /// Fills in what the prediction of a colocated schedule says: its makespan, and what each microbatch recomputes.
    pub(crate) fn time(&self, schedule: &mut Schedule) -> Result<(), StepError> {
        let columns = predict::columns(self, &schedule.llm, &schedule.encoder);
        if !self.eased.is_empty() {
            let recompute = |column: &Column| column.runs.iter().map(|run| run.recompute).collect();
            schedule.recompute = columns.iter().map(recompute).collect();
        }
        let transfer_ns = predict::transfer_ns(self, &columns);
        let met_ns = colocated_times::makespan_ns(self, &columns, transfer_ns);
        schedule.predicted_makespan_ns = if let Some(ns) = met_ns {
            ns
        } else {
            let input = predict::assemble(self, &columns, self.settings.pipeline_order).input;
            drop(columns);
            Simulator::new(&input)?.makespan_ns()
        };
        Ok(())
    }

    /// What the planner wants to know of a schedule that it has just made, in one look.
    ///
    /// # Errors
    /// As [`StepScheduler::simulate`].
    pub fn judge(&self, schedule: &Schedule) -> Result<Judgement, StepError> {
        self.check_is_ours(schedule)?;
        let columns = predict::columns(self, &schedule.llm, &schedule.encoder);
        let Predicted { input, coverage } = predict::assemble(self, &columns, self.settings.pipeline_order);
        let peak_bytes = if self.eased.is_empty() {
            peaks::memory(self, schedule).iter().map(RankMemory::total_bytes).collect()
        } else {
            colocated::peak_bytes(self, &columns)
        };
        // They take as much room as what is simulated.
        drop(columns);
        let timeline = play(&input, schedule)?;
        Ok(Judgement { timeline, coverage, peak_bytes })
    }

    /// The timeline of a measured step, with its idle time by cause. `makespan_ns` is that of the whole step, with reduction
    /// and optimizer, which spans do not show. The idle time counts only until the last action ends.
    ///
    /// # Errors
    /// As [`StepScheduler::step_input`], and [`StepError::Sim`] if `spans` are not one for each action.
    pub fn measured(
        &self,
        schedule: &Schedule,
        spans: &[Span],
        makespan_ns: u64,
    ) -> Result<Timeline, StepError> {
        let timeline = play_measured(&self.step_input(schedule)?, schedule, spans)?;
        Ok(Timeline { makespan_ns: timeline.makespan_ns.max(makespan_ns), ..timeline })
    }

    /// The timeline that the simulator gives for the measured durations of a step. Compared with the measured timeline it
    /// shows the simulator's own error, apart from that of the cost model. Transfers are predicted. So is what comes after
    /// the last action (reduction and optimizer), unless `tail_ns` says how long that took on every rank.
    ///
    /// # Errors
    /// As [`StepScheduler::measured`].
    pub fn simulate_measured(
        &self,
        schedule: &Schedule,
        spans: &[Span],
        tail_ns: Option<u64>,
    ) -> Result<Timeline, StepError> {
        let mut input = durations_of(spans, &self.step_input(schedule)?)?;
        if let Some(ns) = tail_ns {
            input.tail_ns.fill(ns);
        }
        Ok(play(&input, schedule)?)
    }

    /// Predicted peak memory of every rank under a schedule.
    ///
    /// # Errors
    /// As [`StepScheduler::step_input`].
    pub fn memory(&self, schedule: &Schedule) -> Result<Vec<RankMemory>, StepError> {
        if schedule.actions.is_empty() {
            self.check_is_ours(schedule)?;
        } else {
            // Lists that were read from a file may belong to another step, so they are checked.
            Simulator::with_lists(&self.step_input(schedule)?, &schedule.actions)?;
        }
        Ok(peaks::memory(self, schedule))
    }

    pub(crate) fn predicted(&self, schedule: &Schedule) -> Result<Predicted, StepError> {
        self.check_is_ours(schedule)?;
        Ok(predict::predict(self, &schedule.llm, &schedule.encoder, self.settings.pipeline_order))
    }

    pub(crate) fn check_is_ours(&self, schedule: &Schedule) -> Result<(), StepError> {
        if self.settings.layout.is_colocated() && !schedule.actions.is_empty() {
            let layout = self.settings.layout;
            return Err(StepError::ColocatedLists { step: schedule.step, layout: Box::new(layout) });
        }
        let num_microbatches = self.settings.num_microbatches as usize;
        let foreign = |what, microbatch, found, expected| {
            Err(StepError::ForeignSchedule { step: schedule.step, what, microbatch, found, expected })
        };
        let llm_replicas: Vec<usize> = schedule.llm.iter().map(Vec::len).collect();
        let encoder_replicas: Vec<usize> = schedule.encoder.iter().map(Vec::len).collect();
        for (columns, what, replicas) in [
            (llm_replicas, "llm replicas", self.settings.layout.llm.dp as usize),
            (encoder_replicas, "encoder replicas", self.num_encoders() as usize),
        ] {
            if columns.len() != num_microbatches {
                return foreign("microbatches", 0, columns.len(), num_microbatches);
            }
            let wrong = columns.iter().enumerate().find(|(_, found)| **found != replicas);
            if let Some((microbatch, &found)) = wrong {
                return foreign(what, microbatch, found, replicas);
            }
        }
        let shares = schedule.encoder.iter().flatten().flatten();
        let mut samples =
            schedule.llm.iter().flatten().flatten().copied().chain(shares.map(|share| share.sample));
        let num_samples = self.shapes.len();
        if let Some(sample) = samples.find(|s| s.index() >= num_samples) {
            return Err(StepError::UnknownSample { sample, num_samples });
        }
        for (microbatch, column) in schedule.encoder.iter().enumerate() {
            for share in column.iter().flatten() {
                let num_parts = self.shape(share.sample).num_parts();
                let end = share.parts.map_or(0, |parts| parts.first.saturating_add(parts.count));
                if end > num_parts {
                    return foreign("parts of a sample", microbatch, end as usize, num_parts as usize);
                }
            }
        }
        Ok(())
    }
}

/// The simulated timeline under the lists of `schedule`, or the pipeline order if it has none.
pub(crate) fn play(input: &StepInput, schedule: &Schedule) -> Result<Timeline, SimError> {
    if schedule.actions.is_empty() { simulate_step(input) } else { simulate_lists(input, &schedule.actions) }
}

/// The timeline of measured spans under the lists of `schedule`, or the pipeline order if it has none.
pub(crate) fn play_measured(
    input: &StepInput,
    schedule: &Schedule,
    spans: &[Span],
) -> Result<Timeline, SimError> {
    if schedule.actions.is_empty() {
        measured_timeline(input, spans)
    } else {
        measured_lists(input, &schedule.actions, spans)
    }
}
