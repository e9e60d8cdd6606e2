//! Correction: the last measured steps correct the prediction of the next one.

use crate::error::StepError;
use crate::scheduler::{StepScheduler, play, play_measured};
use dflop_sim::StepInput;
use dflop_types::{ActionKind, Schedule, Span, Timeline};
use std::collections::{BTreeMap, VecDeque};

/// Steps that are remembered: few, as the speed of a machine moves; more than one, as each step has its noise.
const NUM_STEPS: usize = 8;

/// How much longer than predicted the actions of the last eight steps took, by rank and kind of action.
///
/// A profile is measured at one time; later the machine may be slower or faster, or run other work. Each rank and
/// kind of action has its own factor, so that slow hardware is told from a slow kind of action. For reduction and
/// optimizer the median of their times is taken. Schedules do not depend on the correction, so they stay the same on
/// any machine.
#[derive(Debug, Clone, Default)]
pub struct Correction {
    steps: VecDeque<Observed>,
}

/// One measured step.
#[derive(Debug, Clone)]
struct Observed {
    /// Predicted and measured nanoseconds of all actions of a row and kind. A row is a rank, or one of its components
    /// where it holds both.
    sums_ns: BTreeMap<(usize, ActionKind), (u64, u64)>,
    /// From the end of the last action to the end of the step.
    tail_ns: u64,
}

/// Sums of a row's actions of a kind in one step: row, kind, predicted and measured nanoseconds.
pub type Sum = (usize, ActionKind, u64, u64);

impl Correction {
    /// What is remembered, the oldest step first: its sums, and the nanoseconds from its last action to its end. A
    /// checkpoint keeps it.
    pub fn steps(&self) -> Vec<(Vec<Sum>, u64)> {
        let sums =
            |step: &Observed| step.sums_ns.iter().map(|(&(row, kind), &(p, m))| (row, kind, p, m)).collect();
        self.steps.iter().map(|step| (sums(step), step.tail_ns)).collect()
    }

    /// The correction by such steps, of which the last eight are remembered.
    pub fn of_steps(steps: impl IntoIterator<Item = (Vec<Sum>, u64)>) -> Self {
        let mut correction = Self::default();
        for (sums, tail_ns) in steps {
            let sums_ns = sums.into_iter().map(|(row, kind, p, m)| ((row, kind), (p, m))).collect();
            correction.remember(Observed { sums_ns, tail_ns });
        }
        correction
    }

    fn remember(&mut self, step: Observed) {
        if self.steps.len() == NUM_STEPS {
            self.steps.pop_front();
        }
        self.steps.push_back(step);
    }

    /// Measured over predicted time of a row's actions of a kind; 1 where none was seen.
    fn factor(&self, row: usize, kind: ActionKind) -> f64 {
        let seen = self.steps.iter().filter_map(|step| step.sums_ns.get(&(row, kind)));
        let (predicted, measured) = seen.fold((0.0, 0.0), |sum, &(predicted, measured)| {
            (sum.0 + predicted as f64, sum.1 + measured as f64)
        });
        if predicted > 0.0 { measured / predicted } else { 1.0 }
    }

    /// Median time of reduction and optimizer; `None` before the first step.
    fn tail_ns(&self) -> Option<u64> {
        let mut tails: Vec<u64> = self.steps.iter().map(|step| step.tail_ns).collect();
        tails.sort_unstable();
        tails.get(tails.len() / 2).copied()
    }

    fn apply(&self, input: &mut StepInput) {
        for (kind, rows) in [
            (ActionKind::F, &mut input.forward_ns),
            (ActionKind::B, &mut input.backward_ns),
            (ActionKind::I, &mut input.input_ns),
            (ActionKind::W, &mut input.weight_ns),
        ] {
            for (row, times) in rows.iter_mut().enumerate() {
                let factor = self.factor(row, kind);
                for ns in times {
                    *ns = (*ns as f64 * factor).round() as u64;
                }
            }
        }
        if let Some(ns) = self.tail_ns() {
            input.tail_ns.fill(ns);
        }
    }
}

impl StepScheduler {
    /// Adds a measured step to `correction`; `makespan_ns` is that of the whole step, as in
    /// [`StepScheduler::measured`].
    ///
    /// # Errors
    /// As [`StepScheduler::measured`].
    pub fn observe(
        &self,
        correction: &mut Correction,
        schedule: &Schedule,
        spans: &[Span],
        makespan_ns: u64,
    ) -> Result<(), StepError> {
        let input = self.step_input(schedule)?;
        // Spans that are not of this step's actions are refused, not counted.
        let measured = play_measured(&input, schedule, spans)?;
        let mut sums_ns: BTreeMap<(usize, ActionKind), (u64, u64)> = BTreeMap::new();
        for span in &measured.spans {
            let rows = match span.action.kind {
                ActionKind::F => &input.forward_ns,
                ActionKind::B => &input.backward_ns,
                ActionKind::I => &input.input_ns,
                ActionKind::W => &input.weight_ns,
            };
            let row = input.row(span.rank, span.action.stage);
            let predicted_ns = rows[row][span.action.microbatch as usize];
            let sum = sums_ns.entry((row, span.action.kind)).or_default();
            *sum = (sum.0.saturating_add(predicted_ns), sum.1.saturating_add(span.duration_ns()));
        }
        let end_ns = measured.spans.iter().map(|span| span.end_ns).max().unwrap_or(0);
        correction.remember(Observed { sums_ns, tail_ns: makespan_ns.saturating_sub(end_ns) });
        Ok(())
    }

    /// The predicted timeline of a schedule, corrected by what the last steps took; that of
    /// [`StepScheduler::simulate`] before the first one.
    ///
    /// # Errors
    /// As [`StepScheduler::simulate`].
    pub fn simulate_corrected(
        &self,
        schedule: &Schedule,
        correction: &Correction,
    ) -> Result<Timeline, StepError> {
        let mut input = self.step_input(schedule)?;
        correction.apply(&mut input);
        Ok(play(&input, schedule)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arm::Arm;
    use crate::fixture;
    use crate::settings::StepSettings;
    use dflop_cost::CostModel;
    use dflop_sim::simulate_step;
    use dflop_types::{ComponentLayout, Layout, PipelineOrder, SampleIndex};

    fn scheduler() -> StepScheduler {
        let settings = StepSettings {
            layout: Layout::disaggregated(
                ComponentLayout { tp: 1, pp: 1, dp: 1 },
                ComponentLayout { tp: 1, pp: 2, dp: 1 },
            ),
            num_microbatches: 4,
            pipeline_order: PipelineOrder::OneFOneB,
            memory_budget_bytes: None,
        };
        let model = CostModel::new(&fixture::model_profile()).unwrap();
        StepScheduler::new(settings, model, fixture::shapes(24, 5), 0).unwrap()
    }

    /// A machine whose forwards on rank 0 take `numerator / 8` of what was predicted, and its tail `tail_ns`.
    fn on_machine(scheduler: &StepScheduler, schedule: &Schedule, numerator: u64, tail_ns: u64) -> Timeline {
        let mut input = scheduler.step_input(schedule).unwrap();
        for ns in &mut input.forward_ns[0] {
            *ns = *ns * numerator / 8;
        }
        input.tail_ns.fill(tail_ns);
        simulate_step(&input).unwrap()
    }

    #[test]
    fn a_machine_that_stays_slow_is_predicted_by_the_next_step() {
        let scheduler = scheduler();
        let schedule_of = |step: u64| {
            let samples: Vec<SampleIndex> = (0..12).map(|at| SampleIndex((at + step as u32) % 24)).collect();
            scheduler.schedule(step, &samples, Arm::AWARE).unwrap()
        };
        let mut correction = Correction::default();
        let first = schedule_of(0);
        assert_eq!(
            scheduler.simulate_corrected(&first, &correction).unwrap(),
            scheduler.simulate(&first).unwrap()
        );
        let mut run = |step: u64, numerator: u64| -> (u64, u64, u64) {
            let schedule = schedule_of(step);
            let measured = on_machine(&scheduler, &schedule, numerator, 5_000);
            let corrected = scheduler.simulate_corrected(&schedule, &correction).unwrap().makespan_ns;
            scheduler.observe(&mut correction, &schedule, &measured.spans, measured.makespan_ns).unwrap();
            (scheduler.simulate(&schedule).unwrap().makespan_ns, corrected, measured.makespan_ns)
        };
        let (plain, corrected, measured) = run(0, 12);
        assert!(corrected == plain && measured > plain + plain / 50, "{plain} {corrected} {measured}");
        let (plain, corrected, measured) = run(1, 12);
        assert!(measured > plain + plain / 50, "{plain} {measured}");
        // Each factor is a quotient of sums of whole nanoseconds.
        assert!(corrected.abs_diff(measured) < 50, "{corrected} {measured}");
        // Eight steps at the predicted speed, and nothing is left of the slow ones.
        for step in 2..10 {
            run(step, 8);
        }
        let (_, corrected, measured) = run(10, 8);
        assert!(corrected.abs_diff(measured) < 50, "{corrected} {measured}");
        // What a checkpoint keeps is all there is.
        let (kept, next) = (Correction::of_steps(correction.steps()), schedule_of(11));
        let predicted = |correction| scheduler.simulate_corrected(&next, correction).unwrap().makespan_ns;
        assert_eq!((kept.steps().len(), predicted(&kept)), (8, predicted(&correction)));
        assert_ne!(predicted(&kept), predicted(&Correction::default()));
    }

    #[test]
    fn spans_of_another_step_are_refused() {
        let scheduler = scheduler();
        let schedule = scheduler.schedule(0, &[SampleIndex(1), SampleIndex(2)], Arm::AWARE).unwrap();
        let spans = scheduler.simulate(&schedule).unwrap().spans;
        let mut correction = Correction::default();
        assert!(scheduler.observe(&mut correction, &schedule, &spans[1..], 1).is_err());
        assert!(correction.steps.is_empty());
    }
}
