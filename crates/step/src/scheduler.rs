//! The step scheduler: the samples of one global batch become microbatches, in the planner and in training
//! alike.

use crate::adapt::adjustment::{Adjusted, Adjustment};
use crate::arm::{Arm, Method};
use crate::colocated::easing::{Eased, Easing};
use crate::error::StepError;
use crate::giants::{GiantPolicy, GiantRule};
use crate::settings::StepSettings;
use dflop_cost::{CostModel, CostSettings, EncoderLayers, StageLayers};
use dflop_types::{
    Component, DataProfile, ModelProfile, Plan, Recomputation, SampleIndex, SampleShape, Schedule,
};
use std::collections::HashSet;
use std::sync::Arc;

/// Asked now and then whether to end the search with the best so far. The caller decides, by a clock or by a signal.
pub type Stop<'a> = &'a dyn Fn() -> bool;

/// Turns the samples of a global batch into a [`Schedule`] for one layout.
///
/// Everything it holds is shared and read only: it is `Send` and `Sync`, and one runs in a thread beside the
/// training. The same seed, step and batch give the same schedule on any machine.
#[derive(Debug, Clone)]
pub struct StepScheduler {
    /// The settings as they were asked for, with tensor groups.
    asked: StepSettings,
    /// The same settings with each tensor group as one rank. The rest of the crate schedules these ranks.
    pub(crate) settings: StepSettings,
    pub(crate) model: Arc<CostModel>,
    /// Models that recompute less, which the microbatches of colocated ranks take where memory allows it.
    pub(crate) eased: Eased,
    pub(crate) shapes: Arc<[SampleShape]>,
    pub(crate) encoder_stages: Vec<EncoderLayers>,
    pub(crate) stages: Vec<StageLayers>,
    /// Ranks of a node; `None`: not known, and placement takes no account of nodes.
    pub(crate) ranks_per_node: Option<u32>,
    /// Whether samples that fit a rank alone, but not beside others, are an error.
    pub(crate) refuses_giants: bool,
    /// The most LLM tokens of a bucket; `None`: no cap.
    pub(crate) bucket_tokens_max: Option<u64>,
    /// Corrections of the predictions by measured steps; `None`: there are none.
    pub(crate) adjusted: Option<Arc<Adjusted>>,
    seed: u64,
}

/// The same global batch under an aware arm and under the blind one.
#[derive(Debug, Clone)]
pub struct Pair {
    /// The schedule of the method asked for; it fits the memory budget.
    pub aware: Schedule,
    /// The schedule of [`Arm::BLIND`]; it may not fit.
    pub blind: Schedule,
}

impl StepScheduler {
    /// A scheduler for `settings`. `shapes` are the shapes of all samples of the data profile, by sample index.
    ///
    /// # Errors
    /// As [`StepSettings::stages`] and [`StepSettings::encoder_stages`]; [`StepError::RecomputeExceedsStage`].
    pub fn new(
        settings: StepSettings,
        model: impl Into<Arc<CostModel>>,
        shapes: impl Into<Arc<[SampleShape]>>,
        seed: u64,
    ) -> Result<Self, StepError> {
        let (model, shapes) = (model.into(), shapes.into());
        let stages = settings.stages(&model)?;
        let encoder_stages = settings.encoder_stages(&model)?;
        let largest = [
            (Component::Encoder, encoder_stages.iter().map(|stage| stage.num_layers).max()),
            (Component::Llm, stages.iter().map(|stage| stage.num_layers).max()),
        ];
        for (component, layers) in largest {
            let of =
                if component == Component::Llm { model.settings().llm } else { model.settings().encoder };
            let (mode, layers) = (of.recompute, layers.unwrap_or(0));
            if mode.first_layers_wanted() > layers {
                return Err(StepError::RecomputeExceedsStage { component, mode, layers });
            }
        }
        Ok(Self {
            asked: settings,
            settings: settings.by_group(),
            model,
            eased: Eased::default(),
            shapes,
            encoder_stages,
            stages,
            ranks_per_node: None,
            refuses_giants: false,
            bucket_tokens_max: None,
            adjusted: None,
            seed,
        })
    }

    /// A scheduler for the best plan of `plan`. The memory budget is that of the cluster, because a plan does not carry one.
    /// Without a cluster it is that of the profile's device ([`ModelProfile::memory_budget_bytes`]).
    ///
    /// # Errors
    /// As [`StepScheduler::new`], and [`StepError::Cost`].
    pub fn of_plan(
        plan: &Plan,
        data: &DataProfile,
        model: &ModelProfile,
        memory_budget_bytes: Option<u64>,
        seed: u64,
    ) -> Result<Self, StepError> {
        let memory_budget_bytes = model.memory_budget_bytes(memory_budget_bytes);
        let settings = StepSettings { memory_budget_bytes, ..StepSettings::from(&plan.best) };
        let shapes: Vec<SampleShape> = data.samples.iter().map(|sample| sample.shape.clone()).collect();
        let cost = CostSettings { trained: plan.trained, ..CostSettings::default() };
        let cost = cost.recomputing(plan.best.recompute).in_layout(&plan.best.layout);
        let scheduler = Self::new(settings, CostModel::with(model, &cost)?, shapes, seed)?;
        if !plan.best.is_eased {
            return Ok(scheduler);
        }
        Ok(scheduler.with_eased(&Easing::of(model, &cost, [plan.best.recompute])))
    }

    /// The same scheduler, of whose microbatches each recomputes only as much as its memory asks for, and at most what the model
    /// of the scheduler recomputes. That is so on colocated ranks under a memory budget; elsewhere nothing changes.
    #[must_use]
    pub fn with_eased(mut self, easing: &Easing) -> Self {
        if self.settings.layout.is_colocated() && self.settings.memory_budget_bytes.is_some() {
            let of = self.model.settings();
            self.eased = easing.below(Recomputation { encoder: of.encoder.recompute, llm: of.llm.recompute });
        }
        self
    }

    /// The same scheduler, of which every microbatch recomputes what its model does.
    pub(crate) fn uneased(&self) -> Self {
        Self { eased: Eased::default(), ..self.clone() }
    }

    /// The model by whose times samples are balanced: that which recomputes least.
    pub(crate) fn balanced_model(&self) -> &CostModel {
        self.eased.least().unwrap_or(&self.model)
    }

    /// The same scheduler under a rule for giants. Global batches need the rule too
    /// ([`crate::batches::GlobalBatches::with_giants`]).
    #[must_use]
    pub fn with_giants(mut self, rule: GiantRule) -> Self {
        self.refuses_giants = rule.policy == GiantPolicy::Refuse;
        self
    }

    /// The same scheduler for another number of microbatches.
    ///
    /// # Errors
    /// As [`StepSettings::stages`].
    pub fn with_num_microbatches(&self, num_microbatches: u32) -> Result<Self, StepError> {
        let asked = StepSettings { num_microbatches, ..self.asked };
        asked.stages(&self.model)?;
        Ok(Self { asked, settings: asked.by_group(), ..self.clone() })
    }

    /// The same scheduler with corrected times. It uses them for its predictions, its balance and its lists.
    ///
    /// # Errors
    /// [`StepError::Adjustment`] if the adjustment is for another layout, or if a factor is not a positive number.
    pub fn adjusted(&self, adjustment: Adjustment) -> Result<Self, StepError> {
        if let Some(problem) = adjustment.problem(&self.settings.layout) {
            return Err(StepError::Adjustment { problem });
        }
        let is_nothing = adjustment.is_nothing();
        let adjusted = (!is_nothing).then(|| Arc::new(Adjusted::new(adjustment, &self.settings.layout)));
        Ok(Self { adjusted, ..self.clone() })
    }

    /// The settings with which it was made.
    #[expect(
        clippy::misnamed_getters,
        reason = "the field of this name counts each tensor group as one rank"
    )]
    pub const fn settings(&self) -> &StepSettings {
        &self.asked
    }

    /// Encoder replicas, each of which has shares of its own in a schedule.
    pub(crate) const fn num_encoders(&self) -> u32 {
        self.asked.layout.encoder.dp
    }

    /// Encoder replicas in each tensor group ([`dflop_types::Layout::encoders_per_group`]).
    pub(crate) const fn encoders_per_group(&self) -> u32 {
        self.asked.layout.encoders_per_group()
    }

    /// The cost model with which it predicts.
    pub fn model(&self) -> &CostModel {
        &self.model
    }

    /// Layers of each stage of the LLM backbone. If stages are interleaved, each chunk is a stage.
    pub fn stages(&self) -> &[StageLayers] {
        &self.stages
    }

    /// Layers of each pipeline rank of the LLM backbone: its stage, or all its chunks as one.
    pub(crate) fn rank_layers(&self) -> Vec<StageLayers> {
        self.settings.by_rank(&self.stages)
    }

    /// Layers of each stage of the encoder.
    pub fn encoder_stages(&self) -> &[EncoderLayers] {
        &self.encoder_stages
    }

    /// Shapes of the data profile, by sample index.
    pub fn shapes(&self) -> &[SampleShape] {
        &self.shapes
    }

    /// The schedule of `batch`, whose samples are in arrival order, as step `step`.
    ///
    /// The arm's [`Method`] decides how. For [`Arm::AWARE`]: buckets of the best shape are balanced
    /// ([`dflop_schedule::schedule`]), and put as microbatches into the best order found. Single samples are moved as long
    /// as that makes the simulated step shorter. If the pipeline order is `data-aware`, action lists are made. The answer is
    /// the better of this schedule and the blind one.
    ///
    /// *Complexity*: the number of moves and of simulated actions is limited; the limit is higher for a longer step. A step
    /// of one second takes some 40 ms on one core (`docs/step.md`).
    ///
    /// # Errors
    /// [`StepError::UnknownSample`], [`StepError::RepeatedSample`]. Under a memory budget [`StepError::SampleTooLarge`] and
    /// [`StepError::Memory`] if no schedule that fits was found; likewise [`StepError::Tokens`] under a cap on tokens.
    /// [`StepError::Balance`] and [`StepError::Sim`] if times overflow.
    pub fn schedule(&self, step: u64, batch: &[SampleIndex], arm: Arm) -> Result<Schedule, StepError> {
        self.schedule_until(step, batch, arm, &|| false)
    }

    /// As [`StepScheduler::schedule`], but the search ends with the best schedule so far when `halt` says so.
    /// [`Schedule::was_stopped`] tells whether that happened. Such a schedule may differ from machine to machine.
    ///
    /// # Errors
    /// As [`StepScheduler::schedule`].
    pub fn schedule_until(
        &self,
        step: u64,
        batch: &[SampleIndex],
        arm: Arm,
        halt: Stop,
    ) -> Result<Schedule, StepError> {
        let mut seen = HashSet::with_capacity(batch.len());
        if let Some(&sample) = batch.iter().find(|&&sample| !seen.insert(sample)) {
            return Err(StepError::RepeatedSample { sample, step });
        }
        if self.settings.layout.is_colocated() {
            // A colocated rank has one microbatch in flight, so no arm can run ahead.
            return self.colocated(step, batch, arm.method, halt);
        }
        let costs = || self.costs(batch);
        let placed = match arm.method {
            Method::Blind => self.blind(step, batch, &costs()?).and_then(|s| self.fitting(s))?,
            Method::Tokens => self.tokens(step, batch, &costs()?).and_then(|s| self.fitting(s))?,
            Method::Balanced => {
                self.balanced(step, batch, &costs()?, self.seed_of(step)).and_then(|s| self.fitting(s))?
            }
            Method::Ordered => self.ordered(step, batch, &costs()?, halt).and_then(|s| self.fitting(s))?,
            method => self.pair(step, batch, method, halt)?.aware,
        };
        if arm.is_ahead { self.listed(placed, arm) } else { Ok(placed) }
    }

    pub(crate) fn shape(&self, sample: SampleIndex) -> &SampleShape {
        &self.shapes[sample.index()]
    }

    /// Actions of a step over all ranks, at least 1.
    pub(crate) fn num_actions(&self) -> u64 {
        2 * u64::from(self.settings.layout.num_rows()) * u64::from(self.settings.num_microbatches)
    }

    /// The seed of a step's searches.
    pub(crate) fn seed_of(&self, step: u64) -> u64 {
        mix(self.seed, step)
    }
}

/// A seed for one step, mixed by the finaliser of `SplitMix64`, so that the random numbers of neighbouring steps have
/// nothing in common.
fn mix(seed: u64, step: u64) -> u64 {
    let mut z = seed ^ step.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
