//! Placing: which sample goes to which colocated rank and into which of its microbatches.

use crate::arm::Method;
use crate::colocated::effort::{Effort, FEW_MOVES};
use crate::colocated::predict;
use crate::costs::{BatchCosts, loads};
use crate::error::StepError;
use crate::judge::memory::{FRACTION_ONE, least};
use crate::place::columns;
use crate::place::shares;
use crate::scheduler::{Pair, StepScheduler, Stop};
use crate::tokens;
use dflop_cost::CostModel;
use dflop_schedule::{Assignment, Costs, Limits, Meets, NEAR, baseline, schedule_for};
use dflop_types::{SampleIndex, Schedule};

/// Percentages of the memory budget that are kept free, tried one after the other. A reserve is needed because the bytes of
/// a microbatch are not exactly the sum of the bytes of its samples.
const RESERVES_PERCENT: [u64; 4] = [0, 5, 15, 30];

impl StepScheduler {
    /// The schedule of `batch` on colocated ranks that fits the memory budget and the cap on tokens.
    ///
    /// The method decides which samples go to which rank. Each rank takes as few microbatches as fit, because each
    /// microbatch pays for its kernel launches and, if layers are gathered, for its collectives.
    pub(crate) fn colocated(
        &self,
        step: u64,
        batch: &[SampleIndex],
        method: Method,
        halt: Stop,
    ) -> Result<Schedule, StepError> {
        let bare = |way: &dyn Fn(u32) -> Vec<u32>| {
            let (bucket, schedule) = self.in_fewest(step, batch, way)?;
            self.priced(batch, &bucket, schedule, None)
        };
        let of_tokens = |count| self.buckets_by_tokens(batch, count);
        let of_arrival = |count| self.buckets_by_arrival(batch, count);
        match method {
            Method::Blind => return bare(&of_arrival),
            Method::Tokens => return bare(&of_tokens),
            _ => {}
        }
        let balanced = match self.meets() {
            Meets::Step => self.balanced_once(step, batch, halt),
            _ => self.balanced_by_phase(step, batch, halt),
        };
        if method == Method::Balanced {
            return balanced;
        }
        // A simpler method may be faster by chance, because a sample does not add exactly its own cost to a microbatch.
        let limit_ns = balanced.as_ref().map_or(u64::MAX, |balanced| balanced.predicted_makespan_ns);
        let other = |way: &dyn Fn(u32) -> Vec<u32>| {
            let (bucket, schedule) = self.in_fewest(step, batch, way).ok()?;
            let may_help = limit_ns == u64::MAX || predict::least_ns(self, &schedule) <= limit_ns;
            may_help.then(|| self.priced(batch, &bucket, schedule, None).ok()).flatten()
        };
        let others = [other(&of_tokens), other(&of_arrival)].into_iter().flatten();
        let best = others.chain(balanced.as_ref().ok().cloned()).min_by_key(|s| s.predicted_makespan_ns);
        match (best, balanced) {
            (None, Err(error)) => Err(error),
            (Some(best), Ok(balanced)) => Ok(Schedule { was_stopped: balanced.was_stopped, ..best }),
            (best, balanced) => best.map_or(balanced, Ok),
        }
    }

    /// As [`StepScheduler::pair`].
    pub(crate) fn colocated_pair(
        &self,
        step: u64,
        batch: &[SampleIndex],
        method: Method,
        halt: Stop,
    ) -> Result<Pair, StepError> {
        let aware = self.colocated(step, batch, method, halt)?;
        let blind = match self.colocated(step, batch, Method::Blind, halt) {
            Err(StepError::Memory { .. } | StepError::SampleTooLarge { .. } | StepError::Tokens { .. }) => {
                let most = self.settings.num_microbatches;
                self.placed(step, batch, &self.buckets_by_arrival(batch, most))?
            }
            blind => blind?,
        };
        Ok(Pair { aware, blind })
    }

    /// When the ranks of this layout wait for each other: once a step, or in each component of each microbatch.
    pub(crate) fn meets(&self) -> Meets {
        if self.settings.layout.meets_in_layers() { Meets::Phase } else { Meets::Step }
    }

    /// The buckets that `way` makes with the fewest microbatches that fit, and their schedule, which is not priced yet. `way`
    /// gets a number of microbatches of each rank and gives the bucket of each sample.
    ///
    /// The numbers tried are 1, 2, 4 and so on. If ranks wait for each other in each microbatch, each number is only a
    /// quarter more than the one before it, as for balanced buckets.
    fn in_fewest(
        &self,
        step: u64,
        batch: &[SampleIndex],
        way: &dyn Fn(u32) -> Vec<u32>,
    ) -> Result<(Vec<u32>, Schedule), StepError> {
        let most = self.settings.num_microbatches;
        let mut count = 1;
        while count < most {
            let bucket = way(count);
            let schedule = self.unpriced(step, batch, &bucket)?;
            if self.is_within_limits(&schedule) {
                return Ok((bucket, schedule));
            }
            let more = if self.meets() == Meets::Phase { count.div_ceil(4) } else { count };
            count = (count + more).min(most);
        }
        let bucket = way(count);
        let schedule = self.unpriced(step, batch, &bucket)?;
        match self.check_limits(&schedule) {
            Err(error @ StepError::Memory { .. }) => Err(self.too_large(batch).unwrap_or(error)),
            Err(error) => Err(error),
            Ok(()) => Ok((bucket, schedule)),
        }
    }

    /// Consecutive samples in equal counts: rank by rank, then microbatch by microbatch.
    fn buckets_by_arrival(&self, batch: &[SampleIndex], count: u32) -> Vec<u32> {
        baseline::arrival_order(batch.len(), count * self.settings.layout.llm.dp)
    }

    /// Buckets by LLM tokens, longest first (LPT). If ranks wait for each other once a step: over the ranks, and then over
    /// the microbatches of each rank. If they wait in each microbatch: over all buckets, and those with like loads form one
    /// microbatch.
    fn buckets_by_tokens(&self, batch: &[SampleIndex], count: u32) -> Vec<u32> {
        let ranks = self.settings.layout.llm.dp;
        let tokens: Vec<u64> = batch.iter().map(|&s| u64::from(self.shape(s).llm_tokens)).collect();
        if self.meets() == Meets::Phase {
            let bucket = baseline::single_cost_lpt(&tokens, count * ranks);
            let mut load = vec![0; (count * ranks) as usize];
            for (&bucket, &tokens) in bucket.iter().zip(&tokens) {
                load[bucket as usize] += tokens;
            }
            return columns::renumbered(&bucket, columns::by_llm_load(&load, ranks as usize).iter());
        }
        let rank_of = baseline::single_cost_lpt(&tokens, ranks);
        let mut bucket = rank_of.clone();
        let mut of_rank = vec![Vec::new(); ranks as usize];
        for (at, &rank) in rank_of.iter().enumerate() {
            of_rank[rank as usize].push(at);
        }
        for (rank, own) in (0..ranks).zip(&of_rank) {
            let own_tokens: Vec<u64> = own.iter().map(|&at| tokens[at]).collect();
            for (&at, microbatch) in own.iter().zip(baseline::single_cost_lpt(&own_tokens, count)) {
                bucket[at] = microbatch * ranks + rank;
            }
        }
        bucket
    }

    /// Balances the sum of both components over the ranks. Each rank then cuts its samples into as few microbatches as fit.
    fn balanced_once(&self, step: u64, batch: &[SampleIndex], halt: Stop) -> Result<Schedule, StepError> {
        let ranks = self.settings.layout.llm.dp;
        let costs = self.costs_in(batch, self.fewest_by_bytes(batch)?)?;
        let even = self.assigned(step, batch, &costs.costs, 1, None, Effort::Until(halt))?;
        let cut = self.cut(batch, &costs, &even.bucket, ranks);
        let (bucket, assignment) = match cut {
            Some(bucket) => (bucket, even),
            // The samples of some rank do not fit its microbatches: fill all microbatches anew, each within its cap.
            None => return self.capped(step, batch, self.settings.num_microbatches, halt),
        };
        let schedule = self.placed_within(step, batch, &bucket)?;
        Ok(bounded(schedule, &assignment))
    }

    /// A lower limit for the number of microbatches: the bytes of all samples, divided by what all ranks may hold at once.
    /// 1 without a memory budget.
    pub(super) fn fewest_by_bytes(&self, batch: &[SampleIndex]) -> Result<u32, StepError> {
        self.fewest_by_bytes_of(&self.model, batch)
    }

    /// Numbers of microbatches above `count`, ascending, with which the bytes of all samples leave room to recompute less.
    pub(super) fn easier_counts(&self, batch: &[SampleIndex], count: u32) -> Result<Vec<u32>, StepError> {
        let counts: Result<Vec<u32>, StepError> =
            self.eased.even().map(|model| self.fewest_by_bytes_of(model, batch)).collect();
        let mut counts = counts?;
        counts.retain(|&easier| easier > count);
        counts.sort_unstable();
        counts.dedup();
        Ok(counts)
    }

    /// As [`StepScheduler::fewest_by_bytes`], of a model that may recompute less.
    fn fewest_by_bytes_of(&self, model: &CostModel, batch: &[SampleIndex]) -> Result<u32, StepError> {
        let typical = self.typical_in(batch, 1)?;
        let Some(fractions) = self.colocated_fractions(model, batch, typical, 0) else { return Ok(1) };
        let sum: u128 = fractions.iter().map(|&fraction| u128::from(fraction)).sum();
        let ranks = u128::from(self.settings.layout.llm.dp);
        let count = sum.div_ceil(ranks * u128::from(FRACTION_ONE));
        Ok(u32::try_from(count).unwrap_or(u32::MAX).clamp(1, self.settings.num_microbatches))
    }

    /// The best schedule with `count` microbatches on each rank that fits. The buckets are first balanced without a cap on
    /// bytes, and then under smaller and smaller caps.
    pub(super) fn capped(
        &self,
        step: u64,
        batch: &[SampleIndex],
        count: u32,
        halt: Stop,
    ) -> Result<Schedule, StepError> {
        let (costs, typical) = self.sample_costs_in(batch, count)?;
        let found = |fractions: Option<Vec<u64>>| {
            let assignment = self.assigned(step, batch, &costs, count, fractions, Effort::Until(halt))?;
            let schedule = self.unpriced(step, batch, &assignment.bucket)?;
            self.check_limits(&schedule)?;
            let schedule = self.priced(batch, &assignment.bucket, schedule, Some((count, &costs)))?;
            Ok(bounded(schedule, &assignment))
        };
        let mut worst = match found(None) {
            Err(error @ StepError::Memory { .. }) => error,
            found => return found,
        };
        for reserve_percent in RESERVES_PERCENT {
            match found(self.memory_fractions(batch, typical, reserve_percent)) {
                Err(error @ StepError::Memory { .. }) => worst = least(worst, error),
                Err(StepError::Balance(_)) => {}
                found => return found,
            }
        }
        Err(self.too_large(batch).unwrap_or(worst))
    }

    /// Balances the batch over `count` microbatches of each rank, by what the ranks wait for. `fractions` are the parts of a
    /// bucket's memory that the samples take; their sum in a bucket is kept within that memory.
    pub(super) fn assigned(
        &self,
        step: u64,
        batch: &[SampleIndex],
        costs: &Costs,
        count: u32,
        fractions: Option<Vec<u64>>,
        effort: Effort<'_>,
    ) -> Result<Assignment, StepError> {
        let meets = self.meets();
        // If ranks wait once a step and one microbatch is asked for, the ranks are cut into microbatches later. The cap on
        // tokens is one of a microbatch, so it is not applied yet.
        let is_cut_later = meets == Meets::Step && count == 1;
        let cap = self.bucket_tokens_max.filter(|_| !is_cut_later);
        let tokens = costs.tokens.clone().filter(|_| cap.is_some());
        let limits = Limits {
            seed: self.seed_of(step),
            bucket_tokens_max: cap,
            bucket_bytes_max: fractions.as_ref().map(|_| FRACTION_ONE),
            ..Limits::new(batch.len(), count * self.settings.layout.llm.dp)
        };
        let (limits, halt): (Limits, Stop) = match effort {
            Effort::Until(halt) => (limits, halt),
            Effort::Few => {
                let max_moves = FEW_MOVES * batch.len() as u64;
                (Limits { max_moves, max_exact_work: 0, ..limits }, &|| false)
            }
        };
        let costs = Costs {
            bytes: fractions,
            tokens,
            encoder_ns: costs.encoder_ns.clone(),
            llm_ns: costs.llm_ns.clone(),
        };
        let mut assignment = schedule_for(&costs, &limits, meets, count, NEAR, halt)
            .map_err(|e| tokens::of_step(step, e.into()))?;
        assignment.was_stopped |= matches!(effort, Effort::Few);
        self.slow_ranks(&costs, &limits, meets, &mut assignment.bucket);
        Ok(assignment)
    }

    /// Gives slow ranks less work: over the whole step if ranks wait for each other once, else in each microbatch.
    fn slow_ranks(&self, costs: &Costs, limits: &Limits, meets: Meets, bucket: &mut [u32]) {
        let ranks = self.settings.layout.llm.dp;
        let count = limits.num_buckets / ranks;
        if meets == Meets::Step && count > 1 {
            // Only a rank's sum over its microbatches counts here. Balancing each microbatch by itself would not help.
            return;
        }
        for microbatch in 0..count {
            let own: Vec<usize> = (0..bucket.len()).filter(|&at| bucket[at] / ranks == microbatch).collect();
            let pick = |column: &[u64]| own.iter().map(|&at| column[at]).collect::<Vec<u64>>();
            let costs = Costs {
                encoder_ns: pick(&costs.encoder_ns),
                llm_ns: pick(&costs.llm_ns),
                bytes: costs.bytes.as_deref().map(pick),
                tokens: costs.tokens.as_deref().map(pick),
            };
            let limits = Limits { num_buckets: ranks, ..*limits };
            let mut rank_of: Vec<u32> = own.iter().map(|&at| bucket[at] % ranks).collect();
            if !self.slow_replicas(&costs, &limits, meets, &mut rank_of) {
                return;
            }
            for (&at, rank) in own.iter().zip(rank_of) {
                bucket[at] = microbatch * ranks + rank;
            }
        }
    }

    /// The shares of a microbatch of which each tensor group encodes what it reads. Without `costs` a group has one encoder
    /// replica.
    fn own_shares(&self, costs: Option<&BatchCosts>, bucket: &[u32], positions: &[usize]) -> shares::Shares {
        let ranks = self.settings.layout.llm.dp;
        let rank_of: Vec<u32> = positions.iter().map(|&at| bucket[at] % ranks).collect();
        let Some(costs) = costs else { return shares::whole(&rank_of, ranks) };
        let mut of_group = vec![Vec::new(); ranks as usize];
        for (at, &rank) in rank_of.iter().enumerate() {
            of_group[rank as usize].push(at);
        }
        let of_one = |own: Vec<usize>| {
            let at_batch: Vec<usize> = own.iter().map(|&at| positions[at]).collect();
            let shares = self.divide(costs, &at_batch);
            shares
                .into_iter()
                .map(move |share| share.into_iter().map(|(at, parts)| (own[at], parts)).collect())
        };
        of_group.into_iter().flat_map(of_one).collect()
    }

    /// The schedule of samples in these buckets (microbatch x ranks + rank), with its makespan. Each rank encodes the samples
    /// that it reads.
    fn placed(&self, step: u64, batch: &[SampleIndex], bucket: &[u32]) -> Result<Schedule, StepError> {
        self.priced(batch, bucket, self.unpriced(step, batch, bucket)?, None)
    }

    /// As [`StepScheduler::placed`], where the schedule keeps the cap on tokens and the memory budget. What does not is not
    /// priced: that takes longer than to find it out.
    fn placed_within(&self, step: u64, batch: &[SampleIndex], bucket: &[u32]) -> Result<Schedule, StepError> {
        let schedule = self.unpriced(step, batch, bucket)?;
        self.check_limits(&schedule)?;
        self.priced(batch, bucket, schedule, None)
    }

    /// As [`StepScheduler::placed`], without loads, bound and makespan.
    fn unpriced(&self, step: u64, batch: &[SampleIndex], bucket: &[u32]) -> Result<Schedule, StepError> {
        // Only a group of several encoder replicas divides what it encodes by cost.
        let per_group = self.encoders_per_group();
        let costs = (per_group > 1).then(|| self.costs_in(batch, self.count_of(bucket))).transpose()?;
        let own = |positions: &[usize]| self.own_shares(costs.as_ref(), bucket, positions);
        Ok(self.as_schedule(step, batch, self.place(batch, bucket, own)))
    }

    /// The schedule with its loads, its bound and its makespan. `known` are the costs of the batch for a number of microbatches.
    fn priced(
        &self,
        batch: &[SampleIndex],
        bucket: &[u32],
        mut schedule: Schedule,
        known: Option<(u32, &Costs)>,
    ) -> Result<Schedule, StepError> {
        let (ranks, count) = (self.settings.layout.llm.dp, self.count_of(bucket));
        let (encoder_ns, llm_ns) = match known {
            Some((of, costs)) if of == count => loads(costs, bucket, count * ranks),
            _ => loads(&self.sample_costs_in(batch, count)?.0, bucket, count * ranks),
        };
        schedule.max_load_ns = self.meets().wait_ns(&encoder_ns, &llm_ns, count);
        self.time(&mut schedule)?;
        schedule.lower_bound_ns = mean(&encoder_ns, ranks).saturating_add(mean(&llm_ns, ranks));
        Ok(schedule)
    }

    /// Microbatches of a rank up to the last one that has samples in these buckets.
    fn count_of(&self, bucket: &[u32]) -> u32 {
        let ranks = self.settings.layout.llm.dp;
        bucket.iter().map(|&bucket| bucket / ranks + 1).max().unwrap_or(1)
    }
}

/// The mean load of a rank, rounded down. No assignment makes the fullest rank lighter than this.
pub(super) fn mean(load_ns: &[u64], ranks: u32) -> u64 {
    let sum: u128 = load_ns.iter().map(|&ns| u128::from(ns)).sum();
    u64::try_from(sum / u128::from(ranks.max(1))).unwrap_or(u64::MAX)
}

/// The schedule with the bound of the search that found it.
fn bounded(schedule: Schedule, assignment: &Assignment) -> Schedule {
    let lower_bound_ns = assignment.lower_bound_ns.min(schedule.max_load_ns).max(schedule.lower_bound_ns);
    Schedule { lower_bound_ns, was_stopped: assignment.was_stopped, ..schedule }
}
