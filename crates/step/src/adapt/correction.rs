//! Correction: measured steps correct the predictions of the next ones, and the costs that they are scheduled with.

use crate::adapt::adjustment::{Adjustment, RowFactor, ShapeFactor, rows_of, share_tokens};
use crate::adapt::bins::{ENCODER, LLM, ShapeBins, tokens};
use crate::adapt::fit::{BinExcess, Excess, Fit, Observed};
use crate::adapt::rows::{RowStep, Rows, Sum, median};
use crate::adapt::watch::{Alarm, Watch};
use crate::error::StepError;
use crate::judge::timeline::{play, play_measured};
use crate::scheduler::StepScheduler;
use dflop_types::{ActionKind, Layout, Schedule, Span, Timeline};
use std::collections::BTreeMap;

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
    fits: [Fit; 2],
    /// What follows from the fits.
    solved: [Vec<Excess>; 2],
}

/// All there is to a correction beside the data: a checkpoint keeps it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct CorrectionState {
    /// Sums of the last steps, the oldest first, with the nanoseconds from the last action to the end of the step.
    pub steps: Vec<(Vec<Sum>, u64)>,
    /// Evidence on shapes, of the encoder and of the LLM backbone.
    pub fits: [Fit; 2],
}

impl Correction {
    /// Nothing observed yet of samples of this data.
    pub fn new(scheduler: &StepScheduler) -> Self {
        let bins = ShapeBins::of(scheduler.shapes());
        let fits = [ENCODER, LLM].map(|component| Fit::of_bins(bins.count(component)));
        let solved = [&fits[ENCODER], &fits[LLM]].map(Fit::solved);
        Self { rows: Rows::default(), bins, fits, solved }
    }

    /// What is remembered.
    pub fn state(&self) -> CorrectionState {
        CorrectionState { steps: self.rows.steps(), fits: self.fits.clone() }
    }

    /// The correction with another memory, of the same data; evidence on shapes of other data is left out.
    #[must_use]
    pub fn with_state(self, state: CorrectionState) -> Self {
        let [encoder, llm] = &state.fits;
        let is_of_data = encoder.is_of(self.bins.count(ENCODER)) && llm.is_of(self.bins.count(LLM));
        let fits = if is_of_data { state.fits } else { self.fits };
        let solved = [&fits[ENCODER], &fits[LLM]].map(Fit::solved);
        Self { rows: Rows::of_steps(state.steps), bins: self.bins, fits, solved }
    }

    pub(crate) const fn bins(&self) -> &ShapeBins {
        &self.bins
    }

    /// What each bin takes beyond its prediction, used or not.
    pub fn shapes(&self) -> Vec<BinExcess> {
        let of = |component: usize| {
            self.solved[component].iter().enumerate().map(move |(bin, &excess)| {
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
        self.with_rows(scheduler, Rows::factor)
    }

    fn with_rows(
        &self,
        scheduler: &StepScheduler,
        of: fn(&Rows, usize, ActionKind) -> Option<f64>,
    ) -> Adjustment {
        let mut shapes = [Vec::new(), Vec::new()];
        for BinExcess { is_encoder, tokens_min, tokens_max, excess } in self.shapes() {
            let used = excess.used();
            if used != 0.0 {
                let factor = ShapeFactor { tokens_min, tokens_max, factor: 1.0 + used };
                shapes[if is_encoder { ENCODER } else { LLM }].push(factor);
            }
        }
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
        let [encoder, llm] = shapes;
        Adjustment { encoder, llm, rows }
    }

    /// What each bin is taken to take of its predicted time.
    fn factors(&self, component: usize) -> Vec<f64> {
        self.solved[component].iter().map(|excess| 1.0 + excess.used()).collect()
    }
}

/// Bins with their parts of the tokens of an action.
pub(crate) type Fractions = Vec<(usize, f64)>;

/// One action as it was predicted and measured.
pub(crate) struct Action {
    row: usize,
    pub(crate) component: usize,
    kind: ActionKind,
    pub(crate) predicted_ns: u64,
    pub(crate) measured_ns: u64,
    /// Bins of its samples, with their parts of the tokens.
    pub(crate) fractions: Fractions,
    /// What these bins are taken to take of their predicted time so far.
    factor: f64,
}

impl StepScheduler {
    /// Adds a measured step to `correction`; `makespan_ns` is that of the whole step, as in
    /// [`StepScheduler::measured`]. Unless `is_fitted` only ranks are looked at, not shapes.
    ///
    /// *Complexity*: O(actions x bins of a microbatch^2 + bins^3).
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
        let mut sums: BTreeMap<(usize, ActionKind), (u64, u64, f64)> = BTreeMap::new();
        let mut ratios: BTreeMap<(usize, ActionKind), Vec<f64>> = BTreeMap::new();
        for action in &actions {
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
        let end_ns = spans.iter().map(|span| span.end_ns).max().unwrap_or(0);
        let own: BTreeMap<(usize, ActionKind), f64> = sums.iter().map(|(&key, sum)| (key, sum.2)).collect();
        correction.rows.remember(RowStep { sums, tail_ns: makespan_ns.saturating_sub(end_ns) });
        if !is_fitted {
            return Ok(());
        }
        let row_factor = |action: &Action| {
            let key = (action.row, action.kind);
            let is_enough = ratios.get(&key).is_some_and(|ratios| ratios.len() >= ACTIONS_ENOUGH);
            let of_steps = || correction.rows.median(action.row, action.kind);
            if is_enough { own.get(&key).copied() } else { of_steps() }.unwrap_or(1.0)
        };
        let is_data = |action: &&Action| action.predicted_ns > 0 && !action.fractions.is_empty();
        let mut excesses = [Vec::new(), Vec::new()];
        for component in [ENCODER, LLM] {
            let of: Vec<&Action> =
                actions.iter().filter(is_data).filter(|a| a.component == component).collect();
            let mean_ns = of.iter().map(|a| a.predicted_ns as f64).sum::<f64>() / of.len().max(1) as f64;
            for action in of {
                let usual_ns = action.predicted_ns as f64 * row_factor(action);
                excesses[component].push(Observed {
                    fractions: action.fractions.clone(),
                    excess: if usual_ns > 0.0 { action.measured_ns as f64 / usual_ns - 1.0 } else { 0.0 },
                    work: action.predicted_ns as f64 / mean_ns,
                });
            }
        }
        for ((fit, solved), excesses) in correction.fits.iter_mut().zip(&mut correction.solved).zip(&excesses)
        {
            fit.add(excesses, solved);
            *solved = fit.solved();
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
        let factors = [correction.factors(ENCODER), correction.factors(LLM)];
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
                let fractions =
                    self.fractions_of_bins(&correction.bins, schedule, component, microbatch, replica);
                let sum: f64 =
                    fractions.iter().map(|&(bin, fraction)| fraction * factors[component][bin]).sum();
                let factor = if fractions.is_empty() { 1.0 } else { sum };
                (fractions, factor)
            });
            actions.push(Action {
                row,
                component,
                kind,
                predicted_ns: rows[row][microbatch],
                measured_ns: span.duration_ns(),
                fractions: fractions.clone(),
                factor: *factor,
            });
        }
        Ok(actions)
    }

    /// Bins of what a replica does in a microbatch, with their parts of its tokens; none without tokens.
    fn fractions_of_bins(
        &self,
        bins: &ShapeBins,
        schedule: &Schedule,
        component: usize,
        microbatch: usize,
        replica: usize,
    ) -> Fractions {
        let mut of_bins: BTreeMap<usize, u64> = BTreeMap::new();
        if component == ENCODER {
            for share in &schedule.encoder[microbatch][replica] {
                let bin = bins.bin(component, tokens(self.shape(share.sample), component));
                *of_bins.entry(bin).or_default() += share_tokens(self.shapes(), share);
            }
        } else {
            for &sample in &schedule.llm[microbatch][replica] {
                let tokens = tokens(self.shape(sample), component);
                *of_bins.entry(bins.bin(component, tokens)).or_default() += tokens;
            }
        }
        let total: u64 = of_bins.values().sum();
        let fraction = |(bin, tokens): (usize, u64)| (bin, tokens as f64 / total as f64);
        if total == 0 { Vec::new() } else { of_bins.into_iter().map(fraction).collect() }
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
        if let Some(ns) = correction.rows.tail_ns() {
            input.tail_ns.fill(ns);
        }
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
