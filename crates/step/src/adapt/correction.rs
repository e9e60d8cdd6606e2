//! Correction: measured steps correct the predictions of the next ones, and the costs that they are scheduled with.

use crate::adapt::adjustment::{Adjustment, RowFactor, rows_of, share_tokens};
use crate::adapt::bins::{ENCODER, LLM, ShapeBins, tokens};
use crate::adapt::fit::BinExcess;
use crate::adapt::learned::Learned;
use crate::adapt::packs::{Pack, Packs};
use crate::adapt::rows::{RowStep, Rows, Sum, median};
use crate::adapt::tail::{self, Tail};
use crate::adapt::watch::{Alarm, Watch};
use crate::error::StepError;
use crate::groups::by_group;
use crate::judge::timeline::{play, play_measured};
use crate::scheduler::StepScheduler;
use dflop_types::{ActionKind, Layout, Schedule, Span, Timeline};
use std::collections::BTreeMap;

/// Actions whose samples take as predicted say what a rank takes, where they are this part of its predicted time.
const USUAL_ENOUGH: f64 = 0.5;

/// Actions of a row and kind from which their own median tells what the rank takes; with fewer, earlier steps help.
const ACTIONS_ENOUGH: usize = 4;

/// How much longer than predicted actions took: by component and shape bin, and by rank and kind of action.
///
/// A profile is measured at one time; later the machine may be slower or faster, or treat some shapes otherwise. What a rank
/// takes is the median of its actions, so a few slow shapes do not make it slow; what is left of an action is laid to the
/// shapes of its samples. A rank's factor is of the last eight steps; a shape's evidence halves in 34 steps. For reduction
/// and optimizer the median of their times is taken.
///
/// Not told apart: ranks that meet inside an action (ZeRO-3) all take what the slowest takes.
#[derive(Debug, Clone, Default)]
pub struct Correction {
    rows: Rows,
    bins: ShapeBins,
    packs: [Packs; 2],
    /// What follows from the packs.
    learned: [Learned; 2],
}

/// All there is to a correction beside the data: a checkpoint keeps it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct CorrectionState {
    /// Sums of the last steps, the oldest first, with what came after the actions.
    pub steps: Vec<(Vec<Sum>, Tail)>,
    /// Packs of the last steps, the oldest step first, of the encoder and of the LLM backbone.
    pub packs: [Vec<Vec<Pack>>; 2],
}

impl Correction {
    /// Nothing observed yet of samples of this data.
    pub fn new(scheduler: &StepScheduler) -> Self {
        let bins = ShapeBins::of(scheduler.shapes());
        Self::of(Rows::default(), bins, [Packs::default(), Packs::default()])
    }

    fn of(rows: Rows, bins: ShapeBins, packs: [Packs; 2]) -> Self {
        let learned = [ENCODER, LLM].map(|component| Learned::new(&packs[component], &bins, component));
        Self { rows, bins, packs, learned }
    }

    /// What is remembered.
    pub fn state(&self) -> CorrectionState {
        CorrectionState { steps: self.rows.steps(), packs: self.packs.each_ref().map(Packs::steps) }
    }

    /// The correction with another memory; packs whose numbers are none are left out.
    #[must_use]
    pub fn with_state(self, state: CorrectionState) -> Self {
        let packs = state.packs.map(|steps| Packs::of_steps(steps).unwrap_or_default());
        Self::of(Rows::of_steps(state.steps), self.bins, packs)
    }

    pub(crate) const fn bins(&self) -> &ShapeBins {
        &self.bins
    }

    /// What each bin takes beyond its prediction, used or not.
    pub fn shapes(&self) -> Vec<BinExcess> {
        let of = |component: usize| {
            self.learned[component].of_bins.iter().enumerate().map(move |(bin, &excess)| {
                let (tokens_min, tokens_max) = self.bins.range(component, bin);
                BinExcess { is_encoder: component == ENCODER, tokens_min, tokens_max, excess }
            })
        };
        of(ENCODER).chain(of(LLM)).collect()
    }

    /// What has become sure with the last step that was observed; `waits` are what ranks waited on the mean for samples and
    /// for messages, as parts of the step.
    pub fn alarms(&self, watch: &mut Watch, layout: &Layout, waits: (f64, f64)) -> Vec<Alarm> {
        watch.step(layout, &self.rows.last(), waits, &self.shapes())
    }

    /// What the next schedules are made with: bounded, shrunk, and nothing where it may be chance.
    pub fn adjustment(&self, scheduler: &StepScheduler) -> Adjustment {
        self.with_rows(scheduler, Rows::used)
    }

    /// What rows took in the last steps, by the median: no sum that one accident moves, nothing shrunk.
    pub(crate) fn typical(&self, scheduler: &StepScheduler) -> Vec<RowFactor> {
        self.with_rows(scheduler, Rows::median).rows
    }

    /// What the next step is predicted with: ranks as they were in the last steps, however uncertain.
    fn of_prediction(&self, scheduler: &StepScheduler) -> Adjustment {
        self.with_rows(scheduler, Rows::middle)
    }

    fn with_rows(
        &self,
        scheduler: &StepScheduler,
        of: fn(&Rows, usize, ActionKind) -> Option<f64>,
    ) -> Adjustment {
        let rows = (0..scheduler.settings.layout.num_rows() as usize).map(|row| {
            let factor = |kind| of(&self.rows, row, kind);
            // Where backwards ran whole, their halves take as much of their times, and the other way round.
            let halves = match (factor(ActionKind::I), factor(ActionKind::W)) {
                (Some(i), Some(w)) => Some(i.midpoint(w)),
                (i, w) => i.or(w),
            };
            let backward = factor(ActionKind::B).or(halves).unwrap_or(1.0);
            RowFactor {
                forward: factor(ActionKind::F).unwrap_or(1.0),
                backward,
                input: factor(ActionKind::I).unwrap_or(backward),
                weight: factor(ActionKind::W).unwrap_or(backward),
            }
        });
        let mut rows: Vec<RowFactor> = rows.collect();
        if rows.iter().all(|row| *row == RowFactor::ONE) {
            rows.clear();
        }
        let [encoder, llm] = self.learned.each_ref().map(|learned| learned.factors.clone());
        Adjustment { encoder, llm, rows }
    }
}

/// Bins with their parts of the tokens of an action.
pub(crate) type Fractions = Vec<(usize, f64)>;

/// One action as it was predicted and measured.
pub(crate) struct Action {
    row: usize,
    pub(crate) component: usize,
    kind: ActionKind,
    /// Microbatch and replica: the actions of one pack have them in common.
    place: (usize, usize),
    pub(crate) predicted_ns: u64,
    pub(crate) measured_ns: u64,
    /// Bins of its samples, with their parts of the tokens.
    pub(crate) fractions: Fractions,
    /// What its samples are taken to take of their predicted time so far.
    factor: f64,
}

impl Action {
    /// Whether its samples are taken to take what was predicted.
    const fn is_usual(&self) -> bool {
        self.factor.to_bits() == 1.0_f64.to_bits()
    }
}

impl StepScheduler {
    /// Adds a measured step to `correction`; `makespan_ns` is that of the whole step, as in
    /// [`StepScheduler::measured`]. Unless `is_fitted` only ranks are looked at, not shapes.
    ///
    /// *Complexity*: O(actions x samples of a pack + bins^3), and of what is remembered O(samples x (log + 30 a range)).
    ///
    /// # Errors
    /// As [`StepScheduler::measured`].
    pub fn observe(
        &self,
        correction: &mut Correction,
        schedule: &Schedule,
        spans: &[Span],
        makespan_ns: u64,
        is_fitted: bool,
    ) -> Result<(), StepError> {
        let actions = self.observed(correction, schedule, spans)?;
        let tail = Tail::new(&self.step_input(schedule)?, spans, makespan_ns);
        let mut sums: BTreeMap<(usize, ActionKind), (u64, u64, f64)> = BTreeMap::new();
        let mut ratios: BTreeMap<(usize, ActionKind), Vec<f64>> = BTreeMap::new();
        // What samples are wrongly taken to take shall not be laid to their rank.
        let mut predicted: BTreeMap<(usize, ActionKind), (f64, f64)> = BTreeMap::new();
        for action in &actions {
            let (all, usual) = predicted.entry((action.row, action.kind)).or_default();
            *all += action.predicted_ns as f64;
            *usual += if action.is_usual() { action.predicted_ns as f64 } else { 0.0 };
        }
        let counts = |action: &Action| {
            let (all, usual) = predicted[&(action.row, action.kind)];
            action.is_usual() || usual < USUAL_ENOUGH * all
        };
        for action in actions.iter().filter(|action| counts(action)) {
            let sum = sums.entry((action.row, action.kind)).or_insert((0, 0, 1.0));
            let predicted_ns = (action.predicted_ns as f64 * action.factor).round();
            *sum =
                (sum.0.saturating_add(predicted_ns as u64), sum.1.saturating_add(action.measured_ns), sum.2);
            if predicted_ns > 0.0 {
                let ratio = action.measured_ns as f64 / predicted_ns;
                ratios.entry((action.row, action.kind)).or_default().push(ratio);
            }
        }
        for (key, sum) in &mut sums {
            sum.2 = ratios.get_mut(key).and_then(|ratios| median(ratios)).unwrap_or(1.0);
        }
        let own: BTreeMap<(usize, ActionKind), f64> = sums.iter().map(|(&key, sum)| (key, sum.2)).collect();
        correction.rows.remember(RowStep { sums, tail });
        if !is_fitted {
            return Ok(());
        }
        let row_factor = |action: &Action| {
            let key = (action.row, action.kind);
            let is_enough = ratios.get(&key).is_some_and(|ratios| ratios.len() >= ACTIONS_ENOUGH);
            let of_steps = || correction.rows.median(action.row, action.kind);
            if is_enough { own.get(&key).copied() } else { of_steps() }.unwrap_or(1.0)
        };
        for component in [ENCODER, LLM] {
            let mut packs: BTreeMap<(usize, usize), (f64, f64)> = BTreeMap::new();
            for action in actions.iter().filter(|action| action.component == component) {
                let usual = row_factor(action);
                if action.predicted_ns > 0 && !action.fractions.is_empty() && usual > 0.0 {
                    let (predicted_ns, measured_ns) = packs.entry(action.place).or_default();
                    *predicted_ns += action.predicted_ns as f64;
                    *measured_ns += action.measured_ns as f64 / usual;
                }
            }
            let mean_ns = packs.values().map(|pack| pack.0).sum::<f64>() / packs.len().max(1) as f64;
            let pack = |(&(microbatch, replica), &(predicted_ns, measured_ns)): (&_, &(f64, f64))| {
                let parts = self.parts(schedule, component, microbatch, replica);
                Pack::new(measured_ns / predicted_ns - 1.0, predicted_ns / mean_ns, parts)
            };
            let packs = packs.iter().map(pack).collect();
            correction.packs[component].remember(packs);
            correction.learned[component] =
                Learned::new(&correction.packs[component], &correction.bins, component);
        }
        Ok(())
    }

    /// The actions of a measured step, each with what is known of its samples.
    pub(crate) fn observed(
        &self,
        correction: &Correction,
        schedule: &Schedule,
        spans: &[Span],
    ) -> Result<Vec<Action>, StepError> {
        let input = self.step_input(schedule)?;
        // Spans that are not of this step's actions are refused, not counted.
        let measured = play_measured(&input, schedule, spans)?;
        let layout = self.settings.layout;
        let mut of_row = vec![(ENCODER, 0); layout.num_rows() as usize];
        for component in [ENCODER, LLM] {
            for stage in rows_of(&layout, component) {
                for (replica, row) in stage.into_iter().enumerate() {
                    of_row[row] = (component, replica);
                }
            }
        }
        let mut packs: BTreeMap<(usize, usize, usize), (Fractions, f64)> = BTreeMap::new();
        let mut actions = Vec::with_capacity(measured.spans.len());
        for span in &measured.spans {
            let (kind, microbatch) = (span.action.kind, span.action.microbatch as usize);
            let rows = match kind {
                ActionKind::F => &input.forward_ns,
                ActionKind::B => &input.backward_ns,
                ActionKind::I => &input.input_ns,
                ActionKind::W => &input.weight_ns,
            };
            let row = input.row(span.rank, span.action.stage);
            let (component, replica) = of_row[row];
            let (fractions, factor) = packs.entry((component, microbatch, replica)).or_insert_with(|| {
                let parts = self.parts(schedule, component, microbatch, replica);
                let total = parts.iter().map(|part| part.1).sum::<u64>() as f64;
                let (bins, learned) = (&correction.bins, &correction.learned[component]);
                let mut of_bins: BTreeMap<usize, f64> = BTreeMap::new();
                for &(size, tokens) in &parts {
                    *of_bins.entry(bins.bin(component, size)).or_default() += tokens as f64 / total;
                }
                let taken = |&(size, tokens): &(u64, u64)| tokens as f64 * learned.factor(size);
                let factor = if parts.is_empty() || learned.factors.is_empty() {
                    1.0
                } else {
                    parts.iter().map(taken).sum::<f64>() / total
                };
                (of_bins.into_iter().collect(), factor)
            });
            actions.push(Action {
                row,
                component,
                kind,
                place: (microbatch, replica),
                predicted_ns: rows[row][microbatch],
                measured_ns: span.duration_ns(),
                fractions: fractions.clone(),
                factor: *factor,
            });
        }
        Ok(actions)
    }

    /// Sizes of what a replica does in a microbatch, ascending, with the tokens of each; none without tokens.
    fn parts(
        &self,
        schedule: &Schedule,
        component: usize,
        microbatch: usize,
        replica: usize,
    ) -> Vec<(u64, u64)> {
        let mut parts: BTreeMap<u64, u64> = BTreeMap::new();
        if component == ENCODER {
            let groups = self.settings.layout.encoder.dp;
            let of_group = by_group(&schedule.encoder[microbatch], groups).nth(replica).unwrap_or_default();
            for share in of_group.iter().flatten() {
                let size = tokens(self.shape(share.sample), component);
                *parts.entry(size).or_default() += share_tokens(self.shapes(), share);
            }
        } else {
            for &sample in &schedule.llm[microbatch][replica] {
                let tokens = tokens(self.shape(sample), component);
                *parts.entry(tokens).or_default() += tokens;
            }
        }
        parts.into_iter().filter(|part| part.1 > 0).collect()
    }

    /// The predicted timeline of a schedule, corrected by what measured steps took; that of
    /// [`StepScheduler::simulate`] before the first one.
    ///
    /// # Errors
    /// As [`StepScheduler::simulate`].
    pub fn simulate_corrected(
        &self,
        schedule: &Schedule,
        correction: &Correction,
    ) -> Result<Timeline, StepError> {
        let mut input = self.adjusted(correction.of_prediction(self))?.step_input(schedule)?;
        tail::apply(&correction.rows.tails(), &mut input.tail_ns);
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
        let mut correction = Correction::new(&scheduler);
        let first = schedule_of(0);
        assert_eq!(
            scheduler.simulate_corrected(&first, &correction).unwrap(),
            scheduler.simulate(&first).unwrap()
        );
        let mut run = |step: u64, numerator: u64| -> (u64, u64, u64) {
            let schedule = schedule_of(step);
            let measured = on_machine(&scheduler, &schedule, numerator, 5_000);
            let corrected = scheduler.simulate_corrected(&schedule, &correction).unwrap().makespan_ns;
            scheduler
                .observe(&mut correction, &schedule, &measured.spans, measured.makespan_ns, true)
                .unwrap();
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
        let (kept, next) = (Correction::new(&scheduler).with_state(correction.state()), schedule_of(11));
        let predicted = |correction| scheduler.simulate_corrected(&next, correction).unwrap().makespan_ns;
        assert_eq!((kept.state().steps.len(), predicted(&kept)), (8, predicted(&correction)));
        assert_eq!(kept.adjustment(&scheduler), correction.adjustment(&scheduler));
        assert_ne!(predicted(&kept), predicted(&Correction::new(&scheduler)));
    }

    #[test]
    fn spans_of_another_step_are_refused() {
        let scheduler = scheduler();
        let schedule = scheduler.schedule(0, &[SampleIndex(1), SampleIndex(2)], Arm::AWARE).unwrap();
        let spans = scheduler.simulate(&schedule).unwrap().spans;
        let mut correction = Correction::new(&scheduler);
        assert!(scheduler.observe(&mut correction, &schedule, &spans[1..], 1, true).is_err());
        assert!(correction.state().steps.is_empty());
    }
}
