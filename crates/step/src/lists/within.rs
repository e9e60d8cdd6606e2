//! Makes the action lists of a schedule for its predicted durations, within the memory that each rank may hold.

use crate::arm::{Arm, Method};
use crate::error::StepError;
use crate::judge::{peaks, predict};
use crate::lists::making::in_flight;
use crate::lists::{Holding, data_aware_within};
use crate::place::search::Effort;
use crate::scheduler::StepScheduler;
use dflop_sim::{Simulator, StepInput};
use dflop_types::{PipelineOrder, Rank, Schedule};

/// The most actions that all passes together place for a step of one second. That takes some 5 ms on one core.
const ACTIONS: u64 = 50_000;

/// Fractions of the memory budget, in eighths, for which lists are made one after the other. Adding up the bytes of single
/// microbatches gives too little or too much for a step with many in flight. So the memory model judges each finished list,
/// and if that does not fit, a list for the next smaller fraction is made.
const FILLED_EIGHTHS: [u64; 6] = [8, 7, 6, 5, 4, 2];

/// Fractions for which lists are made after those, where no list fits beside the largest microbatch: for the others alone.
const EIGHTHS_OF_OTHERS: [u64; 3] = [7, 5, 3];

impl StepScheduler {
    /// The schedule with the action lists of `arm`. If these are predicted slower or do not fit the memory budget, the
    /// schedule stays as it is.
    ///
    /// An arm that runs ahead fills the memory budget; without a budget nothing limits its forwards. Any other arm
    /// has no more microbatches in flight than 1F1B, interleaved where ranks hold several chunks. Only [`Method::Aware`] splits
    /// the backward.
    pub(crate) fn listed(&self, schedule: Schedule, arm: Arm) -> Result<Schedule, StepError> {
        let is_free = arm.method == Method::Aware && self.settings.pipeline_order == PipelineOrder::DataAware;
        if !is_free && !arm.is_ahead {
            return Ok(schedule);
        }
        let is_split = is_free && self.model.has_split();
        let input = self.input_of(&schedule);
        let making =
            Making { input: &input, is_split, effort: Effort::of_step(schedule.predicted_makespan_ns) };
        let mut holdings = vec![self.counted(|rank| self.in_flight(rank))];
        if arm.is_ahead && self.settings.memory_budget_bytes.is_none() {
            holdings.push(self.counted(|_| u64::MAX));
        }
        let mut best = schedule;
        for holding in &holdings {
            let listed = making.lists(&best, holding)?;
            if listed.predicted_makespan_ns <= best.predicted_makespan_ns
                && self.check_memory(&listed).is_ok()
            {
                best = listed;
            }
        }
        if arm.is_ahead {
            let filled = self.filling(&best, &making)?;
            best = filled.filter(|f| f.predicted_makespan_ns <= best.predicted_makespan_ns).unwrap_or(best);
        }
        Ok(best)
    }

    /// The schedule with lists that fill as much of the memory budget as they can. `None` without a budget, or if no list
    /// fits.
    pub(crate) fn filling(
        &self,
        schedule: &Schedule,
        making: &Making,
    ) -> Result<Option<Schedule>, StepError> {
        let Some(budget) = self.settings.memory_budget_bytes else { return Ok(None) };
        let (held, fixed) = peaks::alone_bytes(self, schedule, making.is_split);
        let (layout, m) = (self.settings.layout, self.settings.num_microbatches as usize);
        let ranks = || (0..layout.num_ranks()).map(Rank);
        let rows = |rank: Rank| layout.stages(rank).map(move |stage| making.input.row(rank, stage));
        // What a microbatch takes on a rank, over all its chunks.
        let of_rank =
            |rank: Rank, j: usize| rows(rank).fold(0_u64, |sum, row| sum.saturating_add(held[row][j]));
        let most: Vec<u64> =
            ranks().map(|rank| (0..m).map(|j| of_rank(rank, j)).max().unwrap_or(0)).collect();
        let shares = |eighths: u64| -> Vec<u64> {
            fixed.iter().map(|&fixed| budget.saturating_sub(fixed) / 8 * eighths).collect()
        };
        let fitting = |holding: &Holding| -> Result<Option<Schedule>, StepError> {
            let listed = making.lists(schedule, holding)?;
            Ok(self.check_memory(&listed).is_ok().then_some(listed))
        };
        for eighths in FILLED_EIGHTHS {
            let cap = shares(eighths).iter().zip(&most).map(|(&share, &most)| share.max(most)).collect();
            if let Some(listed) = fitting(&Holding { held: held.clone(), cap })? {
                return Ok(Some(listed));
            }
        }
        // Up to here each rank may hold as much as its largest microbatch takes, of any microbatches. Now a microbatch
        // that takes more than a share counts as the whole share, and the others must share it.
        for eighths in EIGHTHS_OF_OTHERS {
            let cap = shares(eighths);
            if cap.iter().zip(&most).all(|(cap, most)| cap >= most) {
                continue;
            }
            let mut held = held.clone();
            for rank in ranks() {
                let cap = cap[rank.index()];
                for (j, whole) in (0..m).map(|j| (j, of_rank(rank, j))).filter(|&(_, whole)| whole > cap) {
                    for row in rows(rank) {
                        let part = u128::from(held[row][j]) * u128::from(cap) / u128::from(whole);
                        // It is no more than `cap`, so it fits 64 bits.
                        held[row][j] = part as u64;
                    }
                }
            }
            if let Some(listed) = fitting(&Holding { held, cap })? {
                return Ok(Some(listed));
            }
        }
        Ok(None)
    }

    /// Durations of a schedule whose degrees and samples have been checked.
    pub(crate) fn input_of(&self, schedule: &Schedule) -> StepInput {
        predict::predict(self, &schedule.llm, &schedule.encoder, self.settings.pipeline_order).input
    }

    /// A limit on the number of microbatches in flight: `most` gives it for each rank. Each chunk of a rank counts.
    fn counted(&self, most: impl Fn(Rank) -> u64) -> Holding {
        let (layout, m) = (self.settings.layout, self.settings.num_microbatches);
        let cap = |rank| {
            let chunks = layout.stages(rank).count() as u64;
            most(rank).clamp(chunks, chunks * u64::from(m))
        };
        let cap = (0..layout.num_ranks()).map(|rank| cap(Rank(rank))).collect();
        Holding { held: vec![vec![1; m as usize]; layout.num_rows() as usize], cap }
    }

    /// The most microbatches that a rank has in flight under 1F1B; if it holds several chunks, microbatches of chunks under
    /// interleaved 1F1B.
    fn in_flight(&self, rank: Rank) -> u64 {
        let (layout, m) = (self.settings.layout, self.settings.num_microbatches);
        if layout.is_interleaved() {
            return in_flight(&layout, PipelineOrder::OneFOneB, rank, m).unwrap_or(1);
        }
        u64::from(layout.num_stages() - layout.coordinates(rank).map_or(0, |at| at.stage.0))
    }
}

/// The durations for which lists are made, and how.
pub(crate) struct Making<'a> {
    pub(crate) input: &'a StepInput,
    /// Whether backwards may be split.
    pub(crate) is_split: bool,
    pub(crate) effort: Effort,
}

impl Making<'_> {
    /// The schedule with lists for `holding`, and with the makespan that the simulator gives for them.
    fn lists(&self, schedule: &Schedule, holding: &Holding) -> Result<Schedule, StepError> {
        let num_actions = self.effort.of(ACTIONS) as usize;
        let actions = data_aware_within(self.input, holding, self.is_split, num_actions)?;
        let predicted_makespan_ns = Simulator::with_lists(self.input, &actions)?.makespan_ns();
        Ok(Schedule { actions, predicted_makespan_ns, ..schedule.clone() })
    }
}
