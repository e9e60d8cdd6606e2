//! The step scheduler: the samples of one global batch become microbatches, in the planner and in training
//! alike.

use crate::adapt::adjustment::{Adjusted, Adjustment};
use crate::adapt::bins::{ENCODER, LLM};
use crate::arm::{Arm, Method};
use crate::error::StepError;
use crate::giants::{GiantPolicy, GiantRule};
use crate::judge::predict::{self, Coverage, Placement, Predicted};
use crate::place::shares::{PartCosts, Shares};
use crate::settings::StepSettings;
use dflop_cost::{CostModel, CostSettings, EncoderLayers, RankMemory, StageLayers, Typical};
use dflop_schedule::Costs;
use dflop_sim::{
    SimError, Simulator, StepInput, durations_of, measured_lists, measured_timeline, simulate_lists,
    simulate_step,
};
use dflop_types::{
    DataProfile, EncoderShare, ModelProfile, PartRange, Plan, SampleIndex, SampleShape, Schedule, Span,
    Timeline,
};
use std::collections::HashSet;
use std::sync::Arc;

/// Asked now and then whether to make do with what there is: the caller's clock, or its wish to end.
pub type Stop<'a> = &'a dyn Fn() -> bool;

/// Turns the samples of a global batch into a [`Schedule`] for one layout.
///
/// Everything it holds is shared and read only: it is `Send` and `Sync`, and one runs in a thread beside the
/// training. The same seed, step and batch give the same schedule on any machine.
#[derive(Debug, Clone)]
pub struct StepScheduler {
    /// As it was asked for: with its tensor groups.
    asked: StepSettings,
    /// Each tensor group as one rank: what the rest of the crate schedules.
    pub(crate) settings: StepSettings,
    pub(crate) model: Arc<CostModel>,
    pub(crate) shapes: Arc<[SampleShape]>,
    pub(crate) encoder_stages: Vec<EncoderLayers>,
    pub(crate) stages: Vec<StageLayers>,
    /// `None`: not known, or of no matter.
    pub(crate) ranks_per_node: Option<u32>,
    /// Whether samples that fit a rank alone, but not beside others, are an error.
    pub(crate) refuses_giants: bool,
    /// The most LLM tokens of a bucket; `None`: no cap.
    pub(crate) bucket_tokens_max: Option<u64>,
    /// What measured steps say of the predictions; `None`: nothing.
    pub(crate) adjusted: Option<Arc<Adjusted>>,
    seed: u64,
}

/// The same global batch under both arms.
#[derive(Debug, Clone)]
pub struct Pair {
    /// The schedule of the method asked for; it fits the memory budget.
    pub aware: Schedule,
    /// The schedule of [`Arm::BLIND`]; it may not fit.
    pub blind: Schedule,
}

/// What one batch costs, sample by sample, in comparable time.
pub(crate) struct BatchCosts {
    pub(crate) costs: Costs,
    /// Time of each sample on an encoder replica, in nanoseconds, to share a microbatch out by.
    pub(crate) encoder_ns: Vec<u64>,
    /// The same, part by part.
    pub(crate) part_ns: Vec<PartCosts>,
    pub(crate) typical: Typical,
}

impl StepScheduler {
    /// A scheduler for `settings`. `shapes` are the shapes of all samples of the data profile, by sample index.
    ///
    /// # Errors
    /// As [`StepSettings::stages`] and [`StepSettings::encoder_stages`].
    pub fn new(
        settings: StepSettings,
        model: impl Into<Arc<CostModel>>,
        shapes: impl Into<Arc<[SampleShape]>>,
        seed: u64,
    ) -> Result<Self, StepError> {
        let (model, shapes) = (model.into(), shapes.into());
        let stages = settings.stages(&model)?;
        let encoder_stages = settings.encoder_stages(&model)?;
        Ok(Self {
            asked: settings,
            settings: settings.by_group(),
            model,
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

    /// A scheduler for the best plan of `plan`, under the memory budget of the cluster, which a plan does not carry;
    /// without one under that of the profile's device ([`ModelProfile::memory_budget_bytes`]).
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
        Self::new(settings, CostModel::with(model, &cost)?, shapes, seed)
    }

    /// The same scheduler under a rule for giants; global batches have one of their own
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

    /// The same scheduler with corrected times: its predictions, its balance and its lists take them for true.
    ///
    /// # Errors
    /// [`StepError::Adjustment`] where it is of another layout, or a factor is no positive number.
    pub fn adjusted(&self, adjustment: Adjustment) -> Result<Self, StepError> {
        if let Some(problem) = adjustment.problem(&self.settings.layout) {
            return Err(StepError::Adjustment { problem });
        }
        let is_nothing = adjustment.is_nothing();
        let adjusted = (!is_nothing).then(|| Arc::new(Adjusted::new(adjustment, &self.settings.layout)));
        Ok(Self { adjusted, ..self.clone() })
    }

    /// The settings it was made with.
    #[expect(
        clippy::misnamed_getters,
        reason = "the field of this name counts each tensor group as one rank"
    )]
    pub const fn settings(&self) -> &StepSettings {
        &self.asked
    }

    /// The cost model it predicts with.
    pub fn model(&self) -> &CostModel {
        &self.model
    }

    /// Layers of each stage of the LLM backbone.
    pub fn stages(&self) -> &[StageLayers] {
        &self.stages
    }

    /// Layers of each stage of the encoder.
    pub fn encoder_stages(&self) -> &[EncoderLayers] {
        &self.encoder_stages
    }

    /// Shapes of the data profile, by sample index.
    pub fn shapes(&self) -> &[SampleShape] {
        &self.shapes
    }

    /// The schedule of `batch`, whose samples stand in arrival order, as step `step`.
    ///
    /// What the arm's method does ([`Method`]): for [`Arm::AWARE`] balanced buckets ([`dflop_schedule::schedule`]) of
    /// the best shape, microbatches of them in the best order found, single samples moved as long as the simulated
    /// step shortens, action lists under `data-aware`; at last the better of that and the blind schedule.
    ///
    /// *Complexity*: counted moves and actions, more for a longer step: some 40 ms on one core for a step of a second
    /// (`docs/step.md`).
    ///
    /// # Errors
    /// [`StepError::UnknownSample`], [`StepError::RepeatedSample`]; under a memory budget [`StepError::SampleTooLarge`] and
    /// [`StepError::Memory`] where no schedule that fits was found, likewise [`StepError::Tokens`] under a cap on tokens;
    /// [`StepError::Balance`] and [`StepError::Sim`] where times overflow.
    pub fn schedule(&self, step: u64, batch: &[SampleIndex], arm: Arm) -> Result<Schedule, StepError> {
        self.schedule_until(step, batch, arm, &|| false)
    }

    /// As [`StepScheduler::schedule`], with the best found when `halt` says so; that it did is in
    /// [`Schedule::was_stopped`]. Such a schedule may differ from machine to machine.
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
            // A rank has one microbatch in flight: no arm runs ahead.
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
        Ok(play(&self.step_input(schedule)?, schedule)?)
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

    /// The timeline of a measured step, with its idle time by cause. `makespan_ns` is that of the whole step,
    /// reduction and optimizer included, which spans do not show; the idle time is that before the last
    /// action ends.
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

    /// The timeline that the simulator gives for the measured durations of a step: its own error, apart from
    /// that of the cost model. Transfers are predicted, and so is what comes after the last action (reduction and
    /// optimizer) unless `tail_ns` says how long it took on every rank.
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
            // Lists out of a file may be no lists of this step.
            Simulator::with_lists(&self.step_input(schedule)?, &schedule.actions)?;
        }
        Ok(predict::memory(self, schedule))
    }

    pub(crate) fn predicted(&self, schedule: &Schedule) -> Result<Predicted, StepError> {
        self.check_is_ours(schedule)?;
        Ok(predict::predict(self, &schedule.llm, &schedule.encoder, self.settings.pipeline_order))
    }

    pub(crate) fn shape(&self, sample: SampleIndex) -> &SampleShape {
        &self.shapes[sample.index()]
    }

    /// Actions of a step over all ranks, at least 1.
    pub(crate) fn num_actions(&self) -> u64 {
        2 * u64::from(self.settings.layout.num_ranks()) * u64::from(self.settings.num_microbatches)
    }

    /// The seed of a step's searches.
    pub(crate) fn seed_of(&self, step: u64) -> u64 {
        mix(self.seed, step)
    }

    /// Samples in their places, the encoder's part of each microbatch shared out as a search can afford it.
    pub(crate) fn place_quickly(
        &self,
        batch: &[SampleIndex],
        costs: &BatchCosts,
        bucket: &[u32],
    ) -> Placement {
        self.place(batch, bucket, |column| self.share_quickly(costs, column))
    }

    /// Samples in the places that `bucket` names, microbatch * replicas + replica.
    pub(crate) fn place(
        &self,
        batch: &[SampleIndex],
        bucket: &[u32],
        share: impl Fn(&[usize]) -> Shares,
    ) -> Placement {
        let mut positions = vec![Vec::new(); self.settings.num_microbatches as usize];
        for (position, &bucket) in bucket.iter().enumerate() {
            positions[(bucket / self.settings.layout.llm.dp) as usize].push(position);
        }
        let mut placement = Placement::default();
        for positions in positions {
            let (llm, encoder) = self.place_column(batch, bucket, &positions, &share);
            placement.llm.push(llm);
            placement.encoder.push(encoder);
        }
        placement
    }

    /// The samples of one microbatch, at `positions` of the batch, on each LLM and each encoder replica:
    /// `share` gives the encoder replicas their parts of those that have segments.
    pub(crate) fn place_column(
        &self,
        batch: &[SampleIndex],
        bucket: &[u32],
        positions: &[usize],
        share: impl Fn(&[usize]) -> Shares,
    ) -> (Vec<Vec<SampleIndex>>, Vec<Vec<EncoderShare>>) {
        let layout = self.settings.layout;
        let mut llm = vec![Vec::new(); layout.llm.dp as usize];
        let mut with_segments = Vec::with_capacity(positions.len());
        for &position in positions {
            llm[(bucket[position] % layout.llm.dp) as usize].push(batch[position]);
            if !self.shape(batch[position]).encoder_segments.is_empty() {
                with_segments.push(position);
            }
        }
        let of_replica = |shares: Vec<(usize, Option<PartRange>)>| -> Vec<EncoderShare> {
            let share = |(at, parts)| EncoderShare { sample: batch[with_segments[at]], parts };
            shares.into_iter().map(share).collect()
        };
        let encoder = share(&with_segments).into_iter().map(of_replica).collect();
        let encoder = self.near(&llm, encoder);
        (llm, encoder)
    }

    pub(crate) fn as_schedule(&self, step: u64, batch: &[SampleIndex], placement: Placement) -> Schedule {
        Schedule {
            step,
            llm: placement.llm,
            encoder: placement.encoder,
            label_tokens: batch.iter().map(|&s| u64::from(self.shape(s).label_tokens)).sum(),
            actions: Vec::new(),
            giants: Vec::new(),
            was_stopped: false,
            predicted_makespan_ns: 0,
            max_load_ns: 0,
            lower_bound_ns: 0,
        }
    }

    /// Costs of a batch's samples in comparable time: what a bucket takes on the busiest stage of its LLM
    /// replica, and its part of what its microbatch takes on the busiest stage of an encoder replica.
    ///
    /// ```text
    /// llm_i     = F + B of sample i on the stage with the most work
    /// encoder_i = (F + B of sample i on that with the most work) * llm replicas / encoder replicas
    /// ```
    pub(crate) fn costs(&self, batch: &[SampleIndex]) -> Result<BatchCosts, StepError> {
        self.costs_in(batch, self.settings.num_microbatches)
    }

    /// As [`StepScheduler::costs`], around the size of microbatches of which a replica has so many.
    pub(crate) fn costs_in(
        &self,
        batch: &[SampleIndex],
        num_microbatches: u32,
    ) -> Result<BatchCosts, StepError> {
        let num_samples = self.shapes.len();
        if let Some(&sample) = batch.iter().find(|s| s.index() >= num_samples) {
            return Err(StepError::UnknownSample { sample, num_samples });
        }
        let (llm_dp, encoder_dp) =
            (u64::from(self.settings.layout.llm.dp), u64::from(self.settings.layout.encoder.dp));
        let filled = |replicas: u64| (u64::from(num_microbatches) * replicas).min(batch.len() as u64).max(1);
        let sum = |of: fn(&SampleShape) -> u64| batch.iter().map(|&s| of(self.shape(s))).sum::<u64>();
        let typical = Typical {
            encoder_tokens: sum(SampleShape::encoder_tokens) / filled(encoder_dp),
            llm_tokens: sum(|s| u64::from(s.llm_tokens)) / filled(llm_dp),
            label_tokens: sum(|s| u64::from(s.label_tokens)) / filled(llm_dp),
        };
        let stage_ns = |stage: &StageLayers| -> Vec<u64> {
            let of_sample = |&s: &SampleIndex| {
                let ns = self.model.sample_stage_ns(self.shape(s), typical, *stage);
                self.corrected(LLM, s, ns)
            };
            batch.iter().map(of_sample).collect()
        };
        // Of stages with equal layers one is enough.
        let mut different: Vec<&StageLayers> = Vec::new();
        for stage in &self.stages {
            if !different.contains(&stage) {
                different.push(stage);
            }
        }
        let llm_ns = different
            .into_iter()
            .map(stage_ns)
            .max_by_key(|costs| costs.iter().map(|&ns| u128::from(ns)).sum::<u128>())
            .unwrap_or_default();
        let busiest = self.busiest_encoder_stage(batch, typical);
        let encoder_ns: Vec<u64> = batch
            .iter()
            .map(|&s| self.model.sample_encoder_stage_ns(self.shape(s), typical, busiest))
            .collect();
        let part_ns = batch
            .iter()
            .zip(&encoder_ns)
            .map(|(&s, &sample_ns)| {
                let parts = self.part_costs(self.shape(s), sample_ns, typical, busiest).into_iter();
                parts.map(|(count, ns)| (count, self.corrected(ENCODER, s, ns))).collect()
            })
            .collect();
        let encoder_ns: Vec<u64> =
            batch.iter().zip(encoder_ns).map(|(&s, ns)| self.corrected(ENCODER, s, ns)).collect();
        let scaled = encoder_ns.iter().map(|&ns| ns.saturating_mul(llm_dp) / encoder_dp).collect();
        let costs = Costs { encoder_ns: scaled, llm_ns, bytes: None, tokens: self.capped_tokens(batch) };
        Ok(BatchCosts { costs, encoder_ns, part_ns, typical })
    }

    /// What a sample costs a component, as measured steps have corrected it.
    fn corrected(&self, component: usize, sample: SampleIndex, ns: u64) -> u64 {
        match &self.adjusted {
            None => ns,
            Some(adjusted) => adjusted.sample_ns(component, self.shape(sample), ns),
        }
    }

    /// The stage of the encoder on which the samples of a batch take longest together.
    fn busiest_encoder_stage(&self, batch: &[SampleIndex], typical: Typical) -> EncoderLayers {
        let sum_ns = |stage: &EncoderLayers| -> u128 {
            let ns = |&s| u128::from(self.model.sample_encoder_stage_ns(self.shape(s), typical, *stage));
            batch.iter().map(ns).sum()
        };
        match self.encoder_stages[..] {
            [stage] => stage,
            ref stages => *stages.iter().max_by_key(|stage| sum_ns(stage)).expect("at least one stage"),
        }
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
            (encoder_replicas, "encoder replicas", self.settings.layout.encoder.dp as usize),
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

/// The timeline of durations under the lists of `schedule`, or the pipeline order where it has none.
pub(crate) fn play(input: &StepInput, schedule: &Schedule) -> Result<Timeline, SimError> {
    if schedule.actions.is_empty() { simulate_step(input) } else { simulate_lists(input, &schedule.actions) }
}

/// The timeline of measured spans under the same.
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

/// Load of each bucket on both resources, in nanoseconds.
pub(crate) fn loads(costs: &Costs, bucket: &[u32], num_buckets: u32) -> (Vec<u64>, Vec<u64>) {
    let sum = |cost_ns: &[u64]| {
        let mut load_ns = vec![0u64; num_buckets as usize];
        for (&bucket, &ns) in bucket.iter().zip(cost_ns) {
            load_ns[bucket as usize] = load_ns[bucket as usize].saturating_add(ns);
        }
        load_ns
    };
    (sum(&costs.encoder_ns), sum(&costs.llm_ns))
}

/// A seed for one step: the finaliser of `SplitMix64`, so that neighbouring steps share no stream.
fn mix(seed: u64, step: u64) -> u64 {
    let mut z = seed ^ step.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
