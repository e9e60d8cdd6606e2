//! The step scheduler: the samples of one global batch become microbatches, in the planner and in training
//! alike.

use crate::columns::{self, Columns};
use crate::error::PlanError;
use crate::memory::{SHARE_ONE, least};
use crate::predict::{self, Coverage, Placement, Predicted};
use crate::settings::StepSettings;
use dflop_cost::{CostModel, RankMemory, StageLayers, Typical};
use dflop_schedule::{Assignment, Costs, Limits, baseline, divide, order_microbatches_from, small_ends};
use dflop_sim::{Simulator, StepInput, durations_of, measured_timeline, simulate_step};
use dflop_types::{DataProfile, ModelProfile, Plan, SampleIndex, SampleShape, Schedule, Span, Timeline};
use std::sync::Arc;

/// Who decides which samples form a microbatch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Arm {
    /// Predicted costs: balanced buckets, ordered and refined with the simulator. Never predicted slower than
    /// [`Arm::Blind`] on the same batch.
    Aware,
    /// Arrival order and equal counts, on both sides of the boundary: what a trainer does that does not look
    /// at the data.
    Blind,
}

/// Actions that the search for an order of microbatches may time: some 5 ms on one core.
const ORDER_ACTIONS_MAX: u64 = 1_000_000;

/// Turns the samples of a global batch into a [`Schedule`] for one layout.
///
/// Everything it holds is shared and read only: it is `Send` and `Sync`, and one runs in a thread beside the
/// training. The same seed, step and batch give the same schedule on any machine.
///
/// *Not modelled*: segments of one sample on several encoder replicas (a sample is encoded whole).
#[derive(Debug, Clone)]
pub struct StepScheduler {
    pub(crate) settings: StepSettings,
    pub(crate) model: Arc<CostModel>,
    pub(crate) shapes: Arc<[SampleShape]>,
    pub(crate) stages: Vec<StageLayers>,
    seed: u64,
}

/// The same global batch under both arms; `aware` fits the memory budget, `blind` may not.
#[derive(Debug, Clone)]
pub(crate) struct Pair {
    pub(crate) aware: Schedule,
    pub(crate) blind: Schedule,
}

/// What one batch costs, sample by sample, in comparable time.
pub(crate) struct BatchCosts {
    pub(crate) costs: Costs,
    /// Time of each sample on an encoder replica, in nanoseconds, to share a microbatch out by.
    pub(crate) encoder_ns: Vec<u64>,
    typical: Typical,
}

impl StepScheduler {
    /// A scheduler for `settings`; `shapes` are those of the data profile, by sample index.
    ///
    /// # Errors
    /// [`PlanError::Unsupported`], [`PlanError::Zero`], [`PlanError::StagesExceedLayers`].
    pub fn new(
        settings: StepSettings,
        model: impl Into<Arc<CostModel>>,
        shapes: impl Into<Arc<[SampleShape]>>,
        seed: u64,
    ) -> Result<Self, PlanError> {
        let (model, shapes) = (model.into(), shapes.into());
        let stages = settings.stages(&model)?;
        Ok(Self { settings, model, shapes, stages, seed })
    }

    /// A scheduler for the best plan of `plan`, under the memory budget of the cluster: a plan does not carry one.
    ///
    /// # Errors
    /// As [`StepScheduler::new`], and [`PlanError::Cost`].
    pub fn of_plan(
        plan: &Plan,
        data: &DataProfile,
        model: &ModelProfile,
        memory_budget_bytes: Option<u64>,
        seed: u64,
    ) -> Result<Self, PlanError> {
        let settings = StepSettings { memory_budget_bytes, ..StepSettings::from(&plan.best) };
        let shapes: Vec<SampleShape> = data.samples.iter().map(|sample| sample.shape.clone()).collect();
        Self::new(settings, CostModel::new(model)?, shapes, seed)
    }

    /// The settings it was made with.
    pub const fn settings(&self) -> &StepSettings {
        &self.settings
    }

    /// The schedule of `batch`, whose samples stand in arrival order, as step `step`.
    ///
    /// Balanced buckets ([`dflop_schedule::schedule`]), microbatches of them in the best order found, then
    /// single samples moved as long as the simulated step shortens; at last the better of that and the blind
    /// schedule.
    ///
    /// *Complexity*: [`Limits::default_moves`] moves on buckets, and at most 1,400,000 actions timed (or 16
    /// orders, where a step has more than 62,500 actions).
    ///
    /// # Errors
    /// [`PlanError::UnknownSample`]; under a memory budget [`PlanError::SampleTooLarge`] and
    /// [`PlanError::Memory`] where no schedule that fits was found; [`PlanError::Balance`] and
    /// [`PlanError::Sim`] where times overflow.
    pub fn schedule(&self, step: u64, batch: &[SampleIndex], arm: Arm) -> Result<Schedule, PlanError> {
        match arm {
            Arm::Aware => self.pair(step, batch).map(|pair| pair.aware),
            Arm::Blind => {
                let costs = self.costs(batch)?;
                let schedule = self.blind(step, batch, &costs)?;
                self.check_memory(&schedule).map(|()| schedule)
            }
        }
    }

    /// The durations of a schedule as the simulator takes them.
    ///
    /// # Errors
    /// [`PlanError::UnknownSample`] and [`PlanError::ForeignSchedule`] for a schedule that is not of this
    /// plan and data.
    pub fn step_input(&self, schedule: &Schedule) -> Result<StepInput, PlanError> {
        Ok(self.predicted(schedule)?.input)
    }

    /// How much of what is predicted for a schedule was measured.
    ///
    /// # Errors
    /// As [`StepScheduler::step_input`].
    pub fn coverage(&self, schedule: &Schedule) -> Result<Coverage, PlanError> {
        Ok(self.predicted(schedule)?.coverage)
    }

    /// The predicted timeline of a schedule.
    ///
    /// # Errors
    /// As [`StepScheduler::step_input`], and [`PlanError::Sim`] where times overflow.
    pub fn simulate(&self, schedule: &Schedule) -> Result<Timeline, PlanError> {
        Ok(simulate_step(&self.step_input(schedule)?)?)
    }

    /// The timeline of a measured step, with its idle time by cause. `makespan_ns` is that of the whole step,
    /// reduction and optimizer included, which spans do not show; the idle time is that before the last
    /// action ends.
    ///
    /// # Errors
    /// As [`StepScheduler::step_input`], and [`PlanError::Sim`] if `spans` are not one for each action.
    pub fn measured(
        &self,
        schedule: &Schedule,
        spans: &[Span],
        makespan_ns: u64,
    ) -> Result<Timeline, PlanError> {
        let timeline = measured_timeline(&self.step_input(schedule)?, spans)?;
        Ok(Timeline { makespan_ns: timeline.makespan_ns.max(makespan_ns), ..timeline })
    }

    /// The timeline that the simulator gives for the measured durations of a step: its own error, apart from
    /// that of the cost model. Transfers, reduction and optimizer are predicted.
    ///
    /// # Errors
    /// As [`StepScheduler::measured`].
    pub fn simulate_measured(&self, schedule: &Schedule, spans: &[Span]) -> Result<Timeline, PlanError> {
        Ok(simulate_step(&durations_of(spans, &self.step_input(schedule)?)?)?)
    }

    /// Predicted peak memory of every rank under a schedule.
    ///
    /// # Errors
    /// As [`StepScheduler::step_input`].
    pub fn memory(&self, schedule: &Schedule) -> Result<Vec<RankMemory>, PlanError> {
        self.check_is_ours(schedule)?;
        Ok(predict::memory(self, &schedule.llm, &schedule.encoder))
    }

    pub(crate) fn predicted(&self, schedule: &Schedule) -> Result<Predicted, PlanError> {
        self.check_is_ours(schedule)?;
        Ok(predict::predict(self, &schedule.llm, &schedule.encoder))
    }

    pub(crate) fn shape(&self, sample: SampleIndex) -> &SampleShape {
        &self.shapes[sample.index()]
    }

    /// Both arms on one batch. The aware one is the better of the two that fits.
    pub(crate) fn pair(&self, step: u64, batch: &[SampleIndex]) -> Result<Pair, PlanError> {
        let costs = self.costs(batch)?;
        let blind = self.blind(step, batch, &costs)?;
        let mut worst = match self.aware(step, batch, &costs, None).and_then(|s| self.fitting(s)) {
            Ok(aware) => return Ok(self.better(aware, blind)),
            Err(error @ PlanError::Memory { .. }) => error,
            Err(error) => return Err(error),
        };
        // Only now are buckets capped: a cap costs balance, and it speaks of one sample's share where the
        // memory model speaks of whole microbatches. Hence the reserve, and the check of what came out.
        for reserve_percent in [0, 15, 30] {
            let Some(shares) = self.shares(batch, costs.typical, reserve_percent) else { break };
            match self.aware(step, batch, &costs, Some(&shares)).and_then(|s| self.fitting(s)) {
                Ok(aware) => return Ok(self.better(aware, blind)),
                Err(error @ PlanError::Memory { .. }) => worst = least(worst, error),
                Err(PlanError::Balance(_)) => {}
                Err(error) => return Err(error),
            }
        }
        match self.check_memory(&blind) {
            Ok(()) => Ok(Pair { aware: blind.clone(), blind }),
            Err(error) => Err(self.too_large(batch).unwrap_or_else(|| least(worst, error))),
        }
    }

    /// The aware schedule, or the blind one's places where those are predicted faster and fit.
    fn better(&self, aware: Schedule, blind: Schedule) -> Pair {
        if blind.predicted_makespan_ns < aware.predicted_makespan_ns && self.check_memory(&blind).is_ok() {
            let aware = Schedule { lower_bound_ns: aware.lower_bound_ns, ..blind.clone() };
            return Pair { aware, blind };
        }
        Pair { aware, blind }
    }

    /// Consecutive samples in equal counts, on both sides.
    fn blind(&self, step: u64, batch: &[SampleIndex], costs: &BatchCosts) -> Result<Schedule, PlanError> {
        let num_buckets = self.settings.num_buckets();
        let bucket = baseline::arrival_order(batch.len(), num_buckets);
        let (encoder_load, llm_load) = loads(&costs.costs, &bucket, num_buckets);
        let encoder_dp = self.settings.layout.encoder.dp;
        let share = |column: &[usize]| baseline::arrival_order(column.len(), encoder_dp);
        let placement = self.place(batch, &bucket, share);
        let mut schedule = self.as_schedule(step, batch, placement);
        schedule.max_load_ns = encoder_load.iter().chain(&llm_load).copied().max().unwrap_or(0);
        schedule.lower_bound_ns = simple_bound(&costs.costs, num_buckets);
        let input = predict::predict(self, &schedule.llm, &schedule.encoder).input;
        schedule.predicted_makespan_ns = Simulator::new(&input)?.makespan_ns();
        Ok(schedule)
    }

    /// Balanced buckets, the best of the ways to form microbatches of them, in the best order found.
    fn aware(
        &self,
        step: u64,
        batch: &[SampleIndex],
        costs: &BatchCosts,
        shares: Option<&[u64]>,
    ) -> Result<Schedule, PlanError> {
        let num_buckets = self.settings.num_buckets();
        let seed = mix(self.seed, step);
        let limits = Limits {
            bucket_bytes_max: shares.map(|_| SHARE_ONE),
            seed,
            ..Limits::new(batch.len(), num_buckets)
        };
        let balanced = Costs { bytes: shares.map(<[u64]>::to_vec), ..costs.costs.clone() };
        let assignment = dflop_schedule::schedule(&balanced, &limits)?;
        let bucket = self.in_best_order(batch, costs, &assignment, seed)?;
        let bucket = self.refine(batch, costs, shares, bucket, seed)?;
        let (encoder_load, llm_load) = loads(&costs.costs, &bucket, num_buckets);
        let mut schedule = self.as_schedule(step, batch, self.place_quickly(batch, costs, &bucket));
        schedule.predicted_makespan_ns = self.simulator(&schedule.llm, &schedule.encoder)?.makespan_ns();
        let shared_well = self.place(batch, &bucket, |column| {
            let cost_ns: Vec<u64> = column.iter().map(|&position| costs.encoder_ns[position]).collect();
            divide(&cost_ns, self.settings.layout.encoder.dp)
        });
        let makespan_ns = self.simulator(&shared_well.llm, &shared_well.encoder)?.makespan_ns();
        if makespan_ns < schedule.predicted_makespan_ns {
            schedule.encoder = shared_well.encoder;
            schedule.predicted_makespan_ns = makespan_ns;
        }
        schedule.max_load_ns = encoder_load.iter().chain(&llm_load).copied().max().unwrap_or(0);
        schedule.lower_bound_ns = assignment.lower_bound_ns;
        Ok(schedule)
    }

    /// The buckets of an assignment as places, microbatch * replicas + replica: the best of the ways to form
    /// microbatches of them, in the best order found.
    fn in_best_order(
        &self,
        batch: &[SampleIndex],
        costs: &BatchCosts,
        assignment: &Assignment,
        seed: u64,
    ) -> Result<Vec<u32>, PlanError> {
        let in_places = |columns: &mut dyn Iterator<Item = &Vec<usize>>| -> Vec<u32> {
            let mut place = vec![0u32; assignment.llm_load_ns.len()];
            for (at, &bucket) in (0..).zip(columns.flatten()) {
                place[bucket] = at;
            }
            assignment.bucket.iter().map(|&bucket| place[bucket as usize]).collect()
        };
        let mut best: Option<(u64, Columns, Simulator)> = None;
        for columns in self.columns(assignment) {
            let placement = self.place_quickly(batch, costs, &in_places(&mut columns.iter()));
            let mut simulator = self.simulator(&placement.llm, &placement.encoder)?;
            let makespan_ns = simulator.makespan_ns();
            if best.as_ref().is_none_or(|b| makespan_ns < b.0) {
                best = Some((makespan_ns, columns, simulator));
            }
        }
        let (_, columns, mut simulator) = best.expect("there is at least one way to form microbatches");
        let max_evaluations = (ORDER_ACTIONS_MAX / self.num_actions()).clamp(16, 4_096);
        let load_ns = |bucket_ns: &[u64]| -> Vec<u64> {
            columns.iter().map(|column| column.iter().map(|&bucket| bucket_ns[bucket]).sum()).collect()
        };
        let starts = [
            (0..columns.len()).collect(),
            small_ends(&load_ns(&assignment.llm_load_ns)),
            small_ends(&load_ns(&assignment.encoder_load_ns)),
        ];
        let order = order_microbatches_from(&starts, seed, max_evaluations, |order| {
            simulator.makespan_in_order(order)
        });
        Ok(in_places(&mut order.iter().map(|&column| &columns[column])))
    }

    /// Actions of a step over all ranks, at least 1.
    pub(crate) fn num_actions(&self) -> u64 {
        2 * u64::from(self.settings.layout.num_ranks()) * u64::from(self.settings.num_microbatches)
    }

    fn simulator(&self, llm: &predict::Side, encoder: &predict::Side) -> Result<Simulator, PlanError> {
        Ok(Simulator::new(&predict::predict(self, llm, encoder).input)?)
    }

    /// Samples in their places, the encoder's part of each microbatch shared out by LPT: what a search can
    /// afford.
    fn place_quickly(&self, batch: &[SampleIndex], costs: &BatchCosts, bucket: &[u32]) -> Placement {
        self.place(batch, bucket, |column| self.share_quickly(costs, column))
    }

    /// Encoder replica of each sample of a microbatch, by LPT.
    pub(crate) fn share_quickly(&self, costs: &BatchCosts, column: &[usize]) -> Vec<u32> {
        let cost_ns: Vec<u64> = column.iter().map(|&position| costs.encoder_ns[position]).collect();
        baseline::single_cost_lpt(&cost_ns, self.settings.layout.encoder.dp)
    }

    /// Ways to form microbatches of buckets; one where there is one LLM replica.
    fn columns(&self, assignment: &Assignment) -> Vec<Columns> {
        let replicas = self.settings.layout.llm.dp as usize;
        let (encoder_ns, llm_ns) = (&assignment.encoder_load_ns, &assignment.llm_load_ns);
        if replicas == 1 {
            return vec![columns::as_given(llm_ns.len(), 1)];
        }
        vec![columns::by_llm_load(llm_ns, replicas), columns::by_encoder_load(encoder_ns, llm_ns, replicas)]
    }

    /// Samples in the places that `bucket` names, microbatch * replicas + replica.
    fn place(
        &self,
        batch: &[SampleIndex],
        bucket: &[u32],
        share: impl Fn(&[usize]) -> Vec<u32>,
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
    /// `share` gives the encoder replica of those that have segments.
    pub(crate) fn place_column(
        &self,
        batch: &[SampleIndex],
        bucket: &[u32],
        positions: &[usize],
        share: impl Fn(&[usize]) -> Vec<u32>,
    ) -> (Vec<Vec<SampleIndex>>, Vec<Vec<SampleIndex>>) {
        let layout = self.settings.layout;
        let mut llm = vec![Vec::new(); layout.llm.dp as usize];
        let mut encoder = vec![Vec::new(); layout.encoder.dp as usize];
        let mut with_segments = Vec::with_capacity(positions.len());
        for &position in positions {
            llm[(bucket[position] % layout.llm.dp) as usize].push(batch[position]);
            if !self.shape(batch[position]).encoder_segments.is_empty() {
                with_segments.push(position);
            }
        }
        for (&position, replica) in with_segments.iter().zip(share(&with_segments)) {
            encoder[replica as usize].push(batch[position]);
        }
        (llm, encoder)
    }

    fn as_schedule(&self, step: u64, batch: &[SampleIndex], placement: Placement) -> Schedule {
        Schedule {
            step,
            llm: placement.llm,
            encoder: placement.encoder,
            label_tokens: batch.iter().map(|&s| u64::from(self.shape(s).label_tokens)).sum(),
            predicted_makespan_ns: 0,
            max_load_ns: 0,
            lower_bound_ns: 0,
        }
    }

    /// Costs of a batch's samples in comparable time: what a bucket takes on the busiest stage of its LLM
    /// replica, and its part of what its microbatch takes on an encoder replica.
    ///
    /// ```text
    /// llm_i     = F + B of sample i on the stage with the most work
    /// encoder_i = (F + B of sample i) * llm replicas / encoder replicas
    /// ```
    fn costs(&self, batch: &[SampleIndex]) -> Result<BatchCosts, PlanError> {
        let num_samples = self.shapes.len();
        if let Some(&sample) = batch.iter().find(|s| s.index() >= num_samples) {
            return Err(PlanError::UnknownSample { sample, num_samples });
        }
        let (llm_dp, encoder_dp) =
            (u64::from(self.settings.layout.llm.dp), u64::from(self.settings.layout.encoder.dp));
        let filled = |replicas: u64| {
            (u64::from(self.settings.num_microbatches) * replicas).min(batch.len() as u64).max(1)
        };
        let sum = |of: fn(&SampleShape) -> u64| batch.iter().map(|&s| of(self.shape(s))).sum::<u64>();
        let typical = Typical {
            encoder_tokens: sum(SampleShape::encoder_tokens) / filled(encoder_dp),
            llm_tokens: sum(|s| u64::from(s.llm_tokens)) / filled(llm_dp),
            label_tokens: sum(|s| u64::from(s.label_tokens)) / filled(llm_dp),
        };
        let stage_ns = |stage: &StageLayers| -> Vec<u64> {
            batch.iter().map(|&s| self.model.sample_stage_ns(self.shape(s), typical, *stage)).collect()
        };
        // Stages between the first and the last hold no more layers than the first: they are never the
        // busiest alone.
        let ends = [self.stages.first(), self.stages.last()];
        let llm_ns = ends
            .into_iter()
            .flatten()
            .map(stage_ns)
            .max_by_key(|costs| costs.iter().map(|&ns| u128::from(ns)).sum::<u128>())
            .unwrap_or_default();
        let encoder_ns: Vec<u64> =
            batch.iter().map(|&s| self.model.sample_encoder_ns(self.shape(s), typical)).collect();
        let scaled = encoder_ns.iter().map(|&ns| ns.saturating_mul(llm_dp) / encoder_dp).collect();
        Ok(BatchCosts { costs: Costs { encoder_ns: scaled, llm_ns, bytes: None }, encoder_ns, typical })
    }

    fn check_is_ours(&self, schedule: &Schedule) -> Result<(), PlanError> {
        let num_microbatches = self.settings.num_microbatches as usize;
        let foreign = |what, microbatch, found, expected| {
            Err(PlanError::ForeignSchedule { step: schedule.step, what, microbatch, found, expected })
        };
        for (side, what, replicas) in [
            (&schedule.llm, "llm replicas", self.settings.layout.llm.dp as usize),
            (&schedule.encoder, "encoder replicas", self.settings.layout.encoder.dp as usize),
        ] {
            if side.len() != num_microbatches {
                return foreign("microbatches", 0, side.len(), num_microbatches);
            }
            for (microbatch, column) in side.iter().enumerate() {
                if column.len() != replicas {
                    return foreign(what, microbatch, column.len(), replicas);
                }
            }
            let num_samples = self.shapes.len();
            let unknown = side.iter().flatten().flatten().find(|s| s.index() >= num_samples);
            if let Some(&sample) = unknown {
                return Err(PlanError::UnknownSample { sample, num_samples });
            }
        }
        Ok(())
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

/// No assignment has a smaller largest load: the mean load, and the largest sample, on either resource.
fn simple_bound(costs: &Costs, num_buckets: u32) -> u64 {
    let bound = |cost_ns: &[u64]| {
        let total: u128 = cost_ns.iter().map(|&ns| u128::from(ns)).sum();
        let mean = u64::try_from(total.div_ceil(u128::from(num_buckets.max(1)))).unwrap_or(u64::MAX);
        mean.max(cost_ns.iter().copied().max().unwrap_or(0))
    };
    bound(&costs.encoder_ns).max(bound(&costs.llm_ns))
}

/// A seed for one step: the finaliser of `SplitMix64`, so that neighbouring steps share no stream.
fn mix(seed: u64, step: u64) -> u64 {
    let mut z = seed ^ step.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
