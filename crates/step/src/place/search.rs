//! The search for places of the samples: it balances buckets, and finds with the simulator the shape and the order of the
//! microbatches that make the step shortest.

use crate::costs::{BatchCosts, loads};
use crate::error::StepError;
use crate::judge::memory::FRACTION_ONE;
use crate::judge::predict;
use crate::methods::with_bound;
use crate::place::columns::{self, Columns};
use crate::place::ramp::Ramp;
use crate::scheduler::{StepScheduler, Stop};
use crate::tokens;
use dflop_schedule::{Assignment, Costs, Limits, Meets, Slowness, order_microbatches_from, small_ends};
use dflop_sim::Simulator;
use dflop_types::{PipelineOrder, SampleIndex, Schedule};

/// The most actions that the search for an order of microbatches times for a step of one second: some 3 ms on one core.
const ORDER_ACTIONS: u64 = 1_000_000;

/// Orders that are timed for every shape, to choose the shapes that are searched further: the orders with which each search
/// begins.
const QUICK_EVALUATIONS: u64 = 5;

/// Balancing the buckets of a ramp gets only one in this many of the moves, because single samples are moved later anyway.
const RAMP_SHARE: u64 = 8;

/// The number of shapes whose order is searched further.
const NUM_ORDERED: usize = 2;

/// The bucket of each sample (microbatch * replicas + replica), and the simulated makespan with these.
struct Candidate {
    makespan_ns: u64,
    bucket: Vec<u32>,
}

/// One search for places: its input, and how long it may search.
pub(crate) struct Search<'a> {
    pub(crate) scheduler: &'a StepScheduler,
    pub(crate) step: u64,
    pub(crate) batch: &'a [SampleIndex],
    pub(crate) costs: &'a BatchCosts,
    /// The fraction of a bucket's memory that each sample takes; `None` if memory is not looked at.
    pub(crate) fractions: Option<&'a [u64]>,
    /// The pipeline order under which places are compared.
    pub(crate) order: PipelineOrder,
    pub(crate) effort: Effort,
    pub(crate) halt: Stop<'a>,
}

/// How long a search may be, in thousandths of what suits a step of one second.
///
/// Schedules are computed while the step before them trains: a long step hides a long search, and a short one does not. The
/// predicted length of the step decides, so that the search is the same on any machine.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Effort(u64);

impl Effort {
    /// The effort for a step that takes `makespan_ns` in arrival order.
    pub(crate) fn of_step(makespan_ns: u64) -> Self {
        Self((makespan_ns / 1_000_000).clamp(250, 8_000))
    }

    /// The effort for lists of a first answer: a quarter. Most of what a whole search for lists gains it gains at its beginning.
    pub(crate) const fn of_first_answer(self) -> Self {
        Self(self.0 / 4)
    }

    /// `amount`, which suits a step of one second, scaled by this effort.
    pub(crate) fn of(self, amount: u64) -> u64 {
        amount / 1_000 * self.0
    }
}

impl Search<'_> {
    /// Balanced buckets in the best order found.
    pub(crate) fn ordered(&self) -> Result<Schedule, StepError> {
        let assignment = self.even()?;
        let bucket = self.by_speed(self.in_best_order(&assignment, self.max_evaluations())?)?;
        Ok(with_bound(self.shared(&bucket)?, &assignment))
    }

    /// The schedule of these places. Of the ways to share out the encoder's work, the one with the shortest step is taken.
    fn shared(&self, bucket: &[u32]) -> Result<Schedule, StepError> {
        let sides = self.scheduler.place_best(self.batch, self.costs, bucket, self.order)?;
        self.scheduler.judge_sides(self.step, self.batch, self.costs, bucket, sides)
    }

    /// Balanced buckets of the best shape, in the best order found, refined.
    pub(crate) fn best(&self) -> Result<Schedule, StepError> {
        let even = self.even()?;
        let mut tried = vec![self.in_best_order(&even, QUICK_EVALUATIONS)?];
        let mut assignments = vec![even];
        for ramp in Ramp::candidates(&self.scheduler.settings, self.batch.len()) {
            if (self.halt)() {
                break;
            }
            // Under a cap there may be no buckets with this ramp, because it makes the other buckets larger.
            let assignment = match self.shaped(&ramp) {
                Err(StepError::Balance(_)) => continue,
                found => found?,
            };
            tried.push(self.in_best_order(&assignment, QUICK_EVALUATIONS)?);
            assignments.push(assignment);
        }
        let mut ranked: Vec<usize> = (0..tried.len()).collect();
        ranked.sort_by_key(|&at| (tried[at].makespan_ns, at));
        let max_evaluations = self.max_evaluations() / NUM_ORDERED as u64;
        let mut best: Option<Candidate> = None;
        for &at in ranked.iter().take(NUM_ORDERED) {
            let candidate = self.in_best_order(&assignments[at], max_evaluations)?;
            if best.as_ref().is_none_or(|best| candidate.makespan_ns < best.makespan_ns) {
                best = Some(candidate);
            }
        }
        let best = best.expect("even buckets are a shape");
        let bucket = self.refine(self.by_speed(best)?)?;
        Ok(with_bound(self.shared(&bucket)?, &assignments[0]))
    }

    /// The places of a candidate. If some LLM replicas are slow, places with less work on these, if the step is then shorter.
    fn by_speed(&self, found: Candidate) -> Result<Vec<u32>, StepError> {
        let settings = &self.scheduler.settings;
        let num_buckets = settings.num_buckets();
        let costs = Costs { bytes: self.fractions.map(<[u64]>::to_vec), ..self.costs.costs.clone() };
        let limits = Limits {
            bucket_bytes_max: self.fractions.map(|_| FRACTION_ONE),
            bucket_tokens_max: self.scheduler.bucket_tokens_max,
            ..Limits::new(self.batch.len(), num_buckets)
        };
        let mut bucket = found.bucket.clone();
        if !self.scheduler.slow_replicas(&costs, &limits, Meets::Pipeline, &mut bucket) {
            return Ok(found.bucket);
        }
        let sides = self.scheduler.place_quickly(self.batch, self.costs, &bucket);
        let input = predict::predict(self.scheduler, &sides.llm, &sides.encoder, self.order).input;
        let makespan_ns = Simulator::new(&input)?.makespan_ns();
        Ok(if makespan_ns < found.makespan_ns { bucket } else { found.bucket })
    }

    /// Balanced buckets; buckets of similar LLM load form one microbatch.
    pub(crate) fn of_like_load(&self) -> Result<Schedule, StepError> {
        let assignment = self.shaped(&Ramp::EVEN)?;
        let replicas = self.scheduler.settings.layout.llm.dp as usize;
        let columns = columns::by_llm_load(&assignment.llm_load_ns, replicas);
        let bucket = columns::renumbered(&assignment.bucket, columns.iter());
        Ok(with_bound(self.shared(&bucket)?, &assignment))
    }

    /// The number of orders that one search may time.
    fn max_evaluations(&self) -> u64 {
        (self.effort.of(ORDER_ACTIONS) / self.scheduler.num_actions()).clamp(16, 8_192)
    }

    /// Even buckets.
    ///
    /// The balancer fails if no assignment keeps the caps. Without fractions of memory only the cap on tokens can be
    /// the cause, so the error becomes one of the step that names this cap. With fractions the balancer's own error is
    /// returned: fractions overstate what a sample needs, so they may be the cause although a schedule exists.
    fn even(&self) -> Result<Assignment, StepError> {
        self.shaped(&Ramp::EVEN).map_err(|error| match self.fractions {
            None => tokens::of_step(self.step, error),
            Some(_) => error,
        })
    }

    /// Buckets of the shape `ramp`, balanced.
    fn shaped(&self, ramp: &Ramp) -> Result<Assignment, StepError> {
        let (settings, costs) = (&self.scheduler.settings, &self.costs.costs);
        let (num_buckets, num_samples) = (settings.num_buckets(), costs.num_samples());
        let balanced = Costs { bytes: self.fractions.map(<[u64]>::to_vec), ..costs.clone() };
        let balanced = ramp.with_phantoms(balanced, settings);
        let limits = Limits::new(num_samples, num_buckets);
        let limits = Limits {
            bucket_bytes_max: self.fractions.map(|_| FRACTION_ONE),
            bucket_tokens_max: self.scheduler.bucket_tokens_max,
            seed: self.seed(),
            max_moves: if *ramp == Ramp::EVEN { limits.max_moves } else { limits.max_moves / RAMP_SHARE },
            ..limits
        };
        let mut assignment = dflop_schedule::schedule(&balanced, &limits)?;
        assignment.bucket.truncate(num_samples);
        (assignment.encoder_load_ns, assignment.llm_load_ns) = loads(costs, &assignment.bucket, num_buckets);
        Ok(assignment)
    }

    /// The buckets of an assignment as places: of the ways to form microbatches from them the best one, in the best order that
    /// was found. At most `max_evaluations` orders are simulated.
    fn in_best_order(&self, assignment: &Assignment, max_evaluations: u64) -> Result<Candidate, StepError> {
        let scheduler = self.scheduler;
        let mut best: Option<(u64, Columns, Simulator)> = None;
        for columns in scheduler.columns(assignment) {
            let bucket = columns::renumbered(&assignment.bucket, columns.iter());
            let sides = scheduler.place_quickly(self.batch, self.costs, &bucket);
            let input = predict::predict(scheduler, &sides.llm, &sides.encoder, self.order).input;
            let mut simulator = Simulator::new(&input)?;
            let makespan_ns = simulator.makespan_ns();
            if best.as_ref().is_none_or(|b| makespan_ns < b.0) {
                best = Some((makespan_ns, columns, simulator));
            }
        }
        let (_, columns, mut simulator) = best.expect("there is at least one way to form microbatches");
        let load_ns = |bucket_ns: &[u64]| -> Vec<u64> {
            columns.iter().map(|column| column.iter().map(|&bucket| bucket_ns[bucket]).sum()).collect()
        };
        let (encoder_ns, llm_ns) = (load_ns(&assignment.encoder_load_ns), load_ns(&assignment.llm_load_ns));
        let ascending = |load_ns: &[u64]| {
            let mut order: Vec<usize> = (0..load_ns.len()).collect();
            order.sort_by_key(|&at| (load_ns[at], at));
            order
        };
        let descending = |load_ns: &[u64]| ascending(load_ns).into_iter().rev().collect();
        let starts = [
            (0..columns.len()).collect(),
            small_ends(&llm_ns),
            small_ends(&encoder_ns),
            ascending(&llm_ns),
            descending(&llm_ns),
        ];
        let order = order_microbatches_from(&starts, self.seed(), max_evaluations, |order| {
            simulator.makespan_in_order(order)
        });
        Ok(Candidate {
            makespan_ns: simulator.makespan_in_order(&order),
            bucket: columns::renumbered(&assignment.bucket, order.iter().map(|&column| &columns[column])),
        })
    }

    /// The seed of all random numbers of this search.
    pub(crate) fn seed(&self) -> u64 {
        self.scheduler.seed_of(self.step)
    }
}

impl StepScheduler {
    /// Moves samples away from slow LLM replicas. `false`, and nothing is moved, if no replica is known to be slow.
    ///
    /// A colocated rank runs both components, so both count. Otherwise the encoder runs on other ranks; its shares are
    /// balanced later, by the speed of the encoder replicas.
    pub(crate) fn slow_replicas(
        &self,
        costs: &Costs,
        limits: &Limits,
        meets: Meets,
        bucket: &mut [u32],
    ) -> bool {
        let Some(slowness) = self.adjusted.as_ref().and_then(|adjusted| adjusted.slowness.as_ref()) else {
            return false;
        };
        let replicas = self.settings.layout.llm.dp as usize;
        let of_buckets = |of: &[u32]| (0..limits.num_buckets as usize).map(|at| of[at % replicas]).collect();
        let encoder = if self.settings.layout.is_colocated() {
            of_buckets(&slowness.encoder)
        } else {
            vec![1_000; limits.num_buckets as usize]
        };
        dflop_schedule::uneven(
            costs,
            limits,
            meets,
            &Slowness { encoder, llm: of_buckets(&slowness.llm) },
            bucket,
        );
        true
    }

    /// The ways to form microbatches from buckets. With one LLM replica there is only one.
    fn columns(&self, assignment: &Assignment) -> Vec<Columns> {
        let replicas = self.settings.layout.llm.dp as usize;
        let (encoder_ns, llm_ns) = (&assignment.encoder_load_ns, &assignment.llm_load_ns);
        if replicas == 1 {
            return vec![columns::as_given(llm_ns.len(), 1)];
        }
        vec![columns::by_llm_load(llm_ns, replicas), columns::by_encoder_load(encoder_ns, llm_ns, replicas)]
    }
}
