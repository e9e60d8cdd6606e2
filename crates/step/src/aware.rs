//! The aware arm: it searches for places of the samples and for action lists within the memory budget. If arrival order is
//! predicted faster and fits, it takes that.

use crate::arm::{Arm, Method};
use crate::costs::BatchCosts;
use crate::error::StepError;
use crate::judge::memory::{FRACTION_ONE, least};
use crate::lists::within::Making;
use crate::place::search::{Effort, Search};
use crate::scheduler::{Pair, StepScheduler, Stop};
use dflop_types::{PipelineOrder, SampleIndex, Schedule};
use std::cell::Cell;

/// Turns the error of a step that lacks memory into the error of a giant that the rule refuses.
fn giant_error(error: StepError, step: u64, sample: SampleIndex) -> StepError {
    match error {
        StepError::Memory { component, needed_bytes, budget_bytes, .. } => {
            StepError::GiantMemory { step, sample, component, needed_bytes, budget_bytes }
        }
        other => other,
    }
}

impl StepScheduler {
    /// The schedule of `method`, which is [`Method::Shaped`] or [`Method::Aware`], and the blind schedule of the same batch.
    ///
    /// The aware schedule fits the memory budget. If the blind one is faster and fits, the aware one has the same places.
    /// Its `was_stopped` says in any case whether `halt` cut the search short.
    ///
    /// # Errors
    /// As [`StepScheduler::schedule`].
    pub fn pair(
        &self,
        step: u64,
        batch: &[SampleIndex],
        method: Method,
        halt: Stop,
    ) -> Result<Pair, StepError> {
        if self.settings.layout.is_colocated() {
            return self.colocated_pair(step, batch, method, halt);
        }
        let was_stopped = Cell::new(false);
        let halt = || {
            was_stopped.set(was_stopped.get() || halt());
            was_stopped.get()
        };
        let is_first_answer = halt();
        let (Pair { mut aware, blind }, is_tight) = match self.searched(step, batch, method, &halt) {
            // The planner judges candidates by the first answer. What fits by that must also fit here: so if the whole search
            // finds nothing that fits, the first answer is taken.
            Err(error @ StepError::Memory { .. }) if !is_first_answer => {
                let (pair, _) = self.searched(step, batch, method, &|| true).map_err(|_| error)?;
                (pair, false)
            }
            found => found?,
        };
        if is_tight && !was_stopped.get() {
            // A longer search may find places that fit only under a cap, while those of the first answer fit without one.
            // Then the first answer may be the faster of the two.
            if let Ok((Pair { aware: first, .. }, _)) = self.searched(step, batch, method, &|| true)
                && first.predicted_makespan_ns < aware.predicted_makespan_ns
            {
                aware = first;
            }
        }
        Ok(Pair { aware: Schedule { was_stopped: was_stopped.get(), ..aware }, blind })
    }

    /// Both schedules, and whether memory is tight: the best places that a search without regard to memory finds do not fit.
    fn searched(
        &self,
        step: u64,
        batch: &[SampleIndex],
        method: Method,
        halt: Stop,
    ) -> Result<(Pair, bool), StepError> {
        let costs = self.costs(batch)?;
        let blind = self.blind(step, batch, &costs)?;
        let order = self.search_order(method);
        let effort = Effort::of_step(blind.predicted_makespan_ns);
        let search =
            Search { scheduler: self, step, batch, costs: &costs, fractions: None, order, effort, halt };
        let arm = Arm { method, is_ahead: false };
        let found = |search: &Search| {
            let placed = search.best().and_then(|schedule| self.fitting(schedule))?;
            self.listed(placed, arm)
        };
        let mut worst = match found(&search) {
            Ok(aware) => return Ok((self.better(aware, blind), false)),
            Err(error @ StepError::Memory { .. }) => error,
            Err(error) => return Err(error),
        };
        // Buckets are capped only now, because a cap makes them less even. The cap adds up the fractions of single samples,
        // while the memory model takes a whole microbatch at once. So a reserve is kept, and each result is checked.
        for reserve_percent in [0, 15, 30] {
            let Some(fractions) = self.memory_fractions(batch, costs.typical, reserve_percent) else { break };
            match found(&Search { fractions: Some(&fractions), ..search }) {
                Ok(aware) => return Ok((self.better(aware, blind), true)),
                Err(error @ StepError::Memory { .. }) => worst = least(worst, error),
                Err(StepError::Balance(_)) => {}
                Err(error) => return Err(error),
            }
        }
        let drained = self.drained(&search)?;
        let giant = drained.as_ref().and_then(|aware| aware.giants.first().copied());
        match (drained, self.check_limits(&blind), giant.filter(|_| self.refuses_giants)) {
            (_, Err(_), Some(giant)) => Err(giant_error(worst, step, giant)),
            (Some(aware), _, None) => Ok((self.better(aware, blind), true)),
            (_, Ok(()), _) => Ok((Pair { aware: blind.clone(), blind }, true)),
            (_, Err(error), _) => Err(self.too_large(batch).unwrap_or_else(|| least(worst, error))),
        }
    }

    /// A schedule with fewer microbatches in flight than the pipeline order has: its action lists let the pipeline run empty where
    /// memory asks for it. Samples that fit a rank alone but not beside others are giants, and each has a bucket of its own. There
    /// may be none of them: then the buckets are too few for all samples to fit beside as many others as the order has in flight.
    /// `None` if even that does not fit; and without giants if `halt` has struck, as this takes as long as all before it.
    fn drained(&self, search: &Search) -> Result<Option<Schedule>, StepError> {
        let (batch, typical) = (search.batch, search.costs.typical);
        let Some(fractions) = self.memory_fractions(batch, typical, 0) else { return Ok(None) };
        let held = batch.iter().zip(&fractions);
        let giants: Vec<SampleIndex> =
            held.filter(|&(_, &fraction)| fraction > FRACTION_ONE).map(|(&sample, _)| sample).collect();
        if giants.is_empty() && (search.halt)() || self.too_large(batch).is_some() {
            return Ok(None);
        }
        // A giant fills its bucket. So there may be too few buckets for the other samples, if each bucket must fit beside as many
        // as the pipeline order has in flight. Lists made by bytes need no such number: then it is enough that each fits alone,
        // with a reserve, because fractions of single samples are added up.
        for (in_flight_max, reserve_percent) in [(u32::MAX, 0), (1, 15)] {
            let beside = self.memory_fractions_beside(batch, typical, reserve_percent, in_flight_max);
            let Some(mut beside) = beside else { break };
            for (beside, &fraction) in beside.iter_mut().zip(&fractions) {
                *beside = if fraction > FRACTION_ONE { FRACTION_ONE } else { *beside };
            }
            let capped = Search { fractions: Some(&beside), ..*search };
            if let Some(schedule) = self.emptied(&capped)? {
                return Ok(Some(Schedule { giants, ..schedule }));
            }
        }
        Ok(None)
    }

    /// Places under the fractions of `capped`, with action lists made by bytes. `None` if no such places or lists fit.
    fn emptied(&self, capped: &Search) -> Result<Option<Schedule>, StepError> {
        let mut best: Option<Schedule> = None;
        let effort = if (capped.halt)() { capped.effort.of_first_answer() } else { capped.effort };
        // The search for the shortest step ignores memory and puts giants into different microbatches. In one
        // microbatch, side by side, they empty the pipeline only once.
        for placed in [capped.best(), capped.of_like_load()] {
            let placed = match placed {
                Err(StepError::Balance(_)) => return Ok(None),
                placed => placed?,
            };
            // A split backward holds some of a microbatch until its W. A giant leaves no room for that.
            let making = Making { input: &self.input_of(&placed), is_split: false, effort };
            let is_shorter = |found: &Schedule, best: &Option<Schedule>| {
                best.as_ref().is_none_or(|best| found.predicted_makespan_ns < best.predicted_makespan_ns)
            };
            best = match self.filling(&placed, &making)? {
                Some(found) if is_shorter(&found, &best) => Some(found),
                _ => best,
            };
        }
        Ok(best)
    }

    /// The pair of schedules. If the blind one is predicted faster and fits, the aware one takes its places.
    fn better(&self, aware: Schedule, blind: Schedule) -> Pair {
        if blind.predicted_makespan_ns < aware.predicted_makespan_ns && self.check_limits(&blind).is_ok() {
            let aware = Schedule { lower_bound_ns: aware.lower_bound_ns, ..blind.clone() };
            return Pair { aware, blind };
        }
        Pair { aware, blind }
    }

    /// The pipeline order under which a method compares places. It is the plan's, or, if action lists are made at the end,
    /// the order nearest to those lists. Zero-bubble is not for interleaved stages.
    pub(crate) fn search_order(&self, method: Method) -> PipelineOrder {
        let is_split = self.model.has_split() && !self.settings.layout.is_interleaved();
        match (method, self.settings.pipeline_order) {
            (Method::Aware, PipelineOrder::DataAware) if is_split => PipelineOrder::ZeroBubble,
            (_, order) => order,
        }
    }

    /// Balanced buckets in the best order found.
    pub(crate) fn ordered(
        &self,
        step: u64,
        batch: &[SampleIndex],
        costs: &BatchCosts,
        halt: Stop,
    ) -> Result<Schedule, StepError> {
        let effort = Effort::of_step(self.blind(step, batch, costs)?.predicted_makespan_ns);
        let order = self.search_order(Method::Ordered);
        Search { scheduler: self, step, batch, costs, fractions: None, order, effort, halt }.ordered()
    }
}
