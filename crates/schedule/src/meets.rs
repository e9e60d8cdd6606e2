//! What ranks wait for, and the assignment that makes them wait least.
//!
//! Data-parallel ranks that meet once a step wait for the rank with the most work, whichever component the work
//! belongs to. Ranks that meet in each layer wait for the slowest encoder and then for the slowest LLM of each
//! microbatch. In a pipeline the encoder's stage and the LLM's stages work at the same time. So each layout has an
//! objective of its own, and an assignment that is even by one of them may be far from even by another.

use crate::assignment::{Assignment, sums};
use crate::bounds::lower_bound;
use crate::buckets::Buckets;
use crate::costs::{Costs, TOTAL_MAX};
use crate::dealing::{dealt, microbatches, renumbered};
use crate::error::BalanceError;
use crate::greedy::greedy;
use crate::limits::Limits;
use crate::sorted_batch::SortedBatch;
use crate::stop::Stop;
use crate::{Precision, schedule_to};
use std::cmp::Reverse;
use std::fmt;
use std::str::FromStr;
use thiserror::Error;

/// Where the ranks of a layout meet, which decides what an assignment must make even.
///
/// A rank takes the same number of buckets in a step, one after another: bucket `b` is the microbatch
/// `b / num_ranks` of rank `b % num_ranks`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Meets {
    /// Once a step (DDP, ZeRO-1, ZeRO-2): the largest sum, over a rank's buckets, of encoder and LLM work.
    #[default]
    Step,
    /// In each component of each microbatch (ZeRO-3, FSDP): over the microbatches, the sum of the largest encoder
    /// load and the largest LLM load of a rank.
    Phase,
    /// In a pipeline: the largest load of a bucket on either component.
    Pipeline,
}

const NAMES: [(Meets, &str); 3] =
    [(Meets::Step, "step"), (Meets::Phase, "phase"), (Meets::Pipeline, "pipeline")];

impl fmt::Display for Meets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(NAMES.iter().find(|(meets, _)| meets == self).map_or("", |(_, name)| name))
    }
}

/// A text that names no objective.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("`meets` is `{0}`, must be one of: step, phase, pipeline")]
pub struct ParseMeetsError(pub String);

impl FromStr for Meets {
    type Err = ParseMeetsError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let found = NAMES.iter().find(|(_, name)| *name == text);
        found.map(|&(meets, _)| meets).ok_or_else(|| ParseMeetsError(text.to_owned()))
    }
}

impl Meets {
    /// What the ranks wait for under these loads of the buckets, in nanoseconds; 0 without buckets.
    ///
    /// `num_microbatches` is the number of buckets that a rank takes in a step; it must divide the number of buckets.
    pub fn wait_ns(self, encoder_load_ns: &[u64], llm_load_ns: &[u64], num_microbatches: u32) -> u64 {
        let largest = |loads: &[u64]| loads.iter().copied().max().unwrap_or(0);
        let num_ranks = (encoder_load_ns.len() / num_microbatches.max(1) as usize).max(1);
        let buckets = || encoder_load_ns.iter().zip(llm_load_ns);
        match self {
            Self::Step => {
                let of = |rank| buckets().skip(rank).step_by(num_ranks).map(|(encoder, llm)| encoder + llm);
                (0..num_ranks).map(|rank| of(rank).sum()).max().unwrap_or(0)
            }
            Self::Phase => {
                let together = encoder_load_ns.chunks(num_ranks).zip(llm_load_ns.chunks(num_ranks));
                together.map(|(encoder, llm)| largest(encoder) + largest(llm)).sum()
            }
            Self::Pipeline => largest(encoder_load_ns).max(largest(llm_load_ns)),
        }
    }
}

/// How near to its bound an assignment that a sampler makes step by step must come: 1 part in 4,096.
pub const NEAR: u32 = 12;

/// As [`crate::schedule_until`], for ranks that meet as `meets` says and take `num_microbatches` buckets each in a step.
///
/// `limits.num_buckets` counts the buckets of all ranks. The answer's `max_load_ns` is [`Meets::wait_ns`], and its
/// bound is a lower bound of the same quantity. With [`Meets::Pipeline`] it is the answer of
/// [`crate::schedule_until`], bit by bit, whatever `num_microbatches` is. `near` ends the search once the worst load
/// is within bound / 2^`near` of the bound ([`NEAR`]); 0: only at the bound.
///
/// - `Step`: ranks are filled by the sum of both costs, and what each holds is then divided into its microbatches. Where
///   that leaves a microbatch over a cap, all buckets are filled under the caps and shared out to ranks.
///
/// # Errors
/// As [`crate::schedule`]; [`BalanceError::Undivided`] where the microbatches do not divide the buckets.
pub fn schedule_for(
    costs: &Costs,
    limits: &Limits,
    meets: Meets,
    num_microbatches: u32,
    near: u32,
    stop: &dyn Fn() -> bool,
) -> Result<Assignment, BalanceError> {
    check(costs, limits, meets, num_microbatches)?;
    let search = Search {
        costs,
        limits,
        meets,
        num_microbatches,
        precision: Precision { near },
        stop: Stop::when(stop),
    };
    match meets {
        Meets::Step => search.step(),
        Meets::Phase => search.phase(),
        Meets::Pipeline => schedule_to(costs, limits, search.precision, &search.stop),
    }
}

fn check(costs: &Costs, limits: &Limits, meets: Meets, num_microbatches: u32) -> Result<(), BalanceError> {
    costs.check()?;
    limits.check(costs)?;
    let num_buckets = limits.num_buckets;
    if num_microbatches == 0 || !num_buckets.is_multiple_of(num_microbatches) {
        return Err(BalanceError::Undivided { num_buckets, num_microbatches });
    }
    if meets == Meets::Step {
        let mut total = 0;
        for (sample, (encoder, llm)) in costs.encoder_ns.iter().zip(&costs.llm_ns).enumerate() {
            total += encoder + llm;
            if total > TOTAL_MAX {
                let column = "encoder_ns + llm_ns";
                return Err(BalanceError::Overflow { column, sample, limit: TOTAL_MAX });
            }
        }
    }
    Ok(())
}

impl Assignment {
    /// The judgement of an assignment made elsewhere, as [`Assignment::judge`], by what ranks wait for under `meets`.
    ///
    /// # Errors
    /// As [`Assignment::judge`]; [`BalanceError::Undivided`].
    pub fn judge_for(
        costs: &Costs,
        limits: &Limits,
        meets: Meets,
        num_microbatches: u32,
        bucket: Vec<u32>,
    ) -> Result<Self, BalanceError> {
        check(costs, limits, meets, num_microbatches)?;
        let judged = Self::judge(costs, limits, bucket)?;
        let never = Stop::never();
        let search =
            Search { costs, limits, meets, num_microbatches, precision: Precision::default(), stop: never };
        let bound = match meets {
            Meets::Step => bound_of(&both(costs), search.num_ranks()),
            Meets::Phase => search.bounds().into_iter().sum(),
            Meets::Pipeline => return Ok(judged),
        };
        Ok(search.answer(judged.bucket, bound, 0, false))
    }
}

/// Encoder and LLM work of each sample together.
fn both(costs: &Costs) -> Vec<u64> {
    costs.encoder_ns.iter().zip(&costs.llm_ns).map(|(encoder, llm)| encoder + llm).collect()
}

/// Costs that count on one resource alone.
fn alone(values: Vec<u64>) -> Costs {
    Costs { encoder_ns: vec![0; values.len()], llm_ns: values, bytes: None, tokens: None }
}

/// A load that the fullest of `num_buckets` reaches for certain, of one column of costs.
fn bound_of(values: &[u64], num_buckets: u32) -> u64 {
    let (costs, limits) = (alone(values.to_vec()), Limits::new(values.len(), num_buckets));
    let batch = SortedBatch::new(&costs, &limits);
    // Without a cap every sample finds a bucket.
    let start = greedy(&batch, &Stop::never()).unwrap_or_else(|| vec![0; values.len()]);
    lower_bound(&batch, Buckets::new(&batch, start).worst()).cast_unsigned()
}

/// The largest load of a weighted column is this: sums of as many as there may be buckets stay below [`TOTAL_MAX`].
const WEIGHTED_MAX: u64 = 1 << 38;

/// Weights of the encoder's load tried where the first answer of [`Meets::Phase`] leaves a gap, in parts of 16.
const PHASE_WEIGHTS: [u64; 2] = [20, 13];

struct Search<'a> {
    costs: &'a Costs,
    limits: &'a Limits,
    meets: Meets,
    num_microbatches: u32,
    precision: Precision,
    stop: Stop<'a>,
}

impl Search<'_> {
    fn num_ranks(&self) -> u32 {
        self.limits.num_buckets / self.num_microbatches
    }

    /// Lower bounds of the largest encoder load and the largest LLM load that a rank has in a step.
    fn bounds(&self) -> [u64; 2] {
        [&self.costs.encoder_ns, &self.costs.llm_ns].map(|column| bound_of(column, self.num_ranks()))
    }

    fn answer(&self, bucket: Vec<u32>, bound: u64, num_moves: u64, was_stopped: bool) -> Assignment {
        let load_of = |column: &[u64]| sums(column, &bucket, self.limits.num_buckets);
        let (encoder_load_ns, llm_load_ns) = (load_of(&self.costs.encoder_ns), load_of(&self.costs.llm_ns));
        let max_load_ns = self.meets.wait_ns(&encoder_load_ns, &llm_load_ns, self.num_microbatches);
        assert!(bound <= max_load_ns, "bound {bound} over a wait that was reached, {max_load_ns}");
        Assignment {
            bucket,
            encoder_load_ns,
            llm_load_ns,
            max_load_ns,
            lower_bound_ns: bound,
            proven_optimal: bound == max_load_ns,
            num_moves,
            was_stopped,
        }
    }

    fn step(&self) -> Result<Assignment, BalanceError> {
        let Self { costs, limits, num_microbatches, .. } = *self;
        let sums = Costs { bytes: costs.bytes.clone(), tokens: costs.tokens.clone(), ..alone(both(costs)) };
        // What a rank's microbatches hold together.
        let of_rank = |cap: Option<u64>| cap.map(|cap| cap.saturating_mul(num_microbatches.into()));
        let of_ranks = Limits {
            num_buckets: self.num_ranks(),
            bucket_bytes_max: of_rank(limits.bucket_bytes_max),
            bucket_tokens_max: of_rank(limits.bucket_tokens_max),
            ..*limits
        };
        // The caps come first: where a rank's samples do not fit its microbatches, all buckets are filled and then dealt.
        let is_capped = |error: &BalanceError| {
            num_microbatches > 1
                && matches!(error, BalanceError::CapsInfeasible { .. } | BalanceError::NoPacking { .. })
        };
        let (bucket, bound, num_moves) = match schedule_to(&sums, &of_ranks, self.precision, &self.stop) {
            Ok(ranks) if num_microbatches == 1 => (ranks.bucket, ranks.lower_bound_ns, ranks.num_moves),
            Ok(ranks) => match self.divided(&sums, &ranks.bucket) {
                Ok(bucket) => (bucket, ranks.lower_bound_ns, ranks.num_moves),
                Err(error) if is_capped(&error) => self.filled_and_dealt(&sums)?,
                Err(error) => return Err(error),
            },
            Err(error) if is_capped(&error) => self.filled_and_dealt(&sums)?,
            Err(error) => return Err(error),
        };
        Ok(self.answer(bucket, bound, num_moves, self.stop.has_struck()))
    }

    /// Buckets under their caps, dealt to ranks; a bound of what ranks wait for, and the moves it took.
    fn filled_and_dealt(&self, sums: &Costs) -> Result<(Vec<u32>, u64, u64), BalanceError> {
        let all = schedule_to(sums, self.limits, self.precision, &self.stop)?;
        let bucket = dealt(&all.bucket, &all.llm_load_ns, self.num_ranks());
        Ok((bucket, bound_of(&sums.llm_ns, self.num_ranks()), all.num_moves))
    }

    /// The samples of each rank divided into its microbatches.
    fn divided(&self, sums: &Costs, rank_of: &[u32]) -> Result<Vec<u32>, BalanceError> {
        let num_ranks = self.num_ranks();
        let mut members = vec![Vec::new(); num_ranks as usize];
        for (sample, &rank) in rank_of.iter().enumerate() {
            members[rank as usize].push(sample);
        }
        let mut bucket = vec![0; rank_of.len()];
        for (rank, members) in (0..num_ranks).zip(members) {
            let column =
                |values: &Vec<u64>| members.iter().map(|&sample| values[sample]).collect::<Vec<u64>>();
            let own = Costs {
                bytes: sums.bytes.as_ref().map(column),
                tokens: sums.tokens.as_ref().map(column),
                ..alone(column(&sums.llm_ns))
            };
            // How a rank's work is cut into microbatches changes no wait: few moves, for even memory.
            let max_moves = 100 * members.len() as u64;
            let limits =
                Limits { num_buckets: self.num_microbatches, max_moves, max_exact_work: 0, ..*self.limits };
            let found = schedule_to(&own, &limits, self.precision, &Stop::never())?;
            for (&sample, microbatch) in members.iter().zip(found.bucket) {
                bucket[sample] = microbatch * num_ranks + rank;
            }
        }
        Ok(bucket)
    }

    fn phase(&self) -> Result<Assignment, BalanceError> {
        let bounds = self.bounds();
        let bound = bounds.into_iter().sum();
        let mut best = self.weighted(bounds, 16)?;
        best.lower_bound_ns = bound;
        // Within 1 % none of these found anything better.
        let ways: [&dyn Fn() -> Result<Option<Assignment>, BalanceError>; 4] = [
            &|| self.by_microbatches(bounds),
            &|| self.grouped(self.costs).map(Some),
            &|| self.weighted(bounds, PHASE_WEIGHTS[0]).map(Some),
            &|| self.weighted(bounds, PHASE_WEIGHTS[1]).map(Some),
        ];
        for way in ways {
            if best.max_load_ns - bound <= bound / 100 || self.stop.has_struck() {
                break;
            }
            let Some(other) = way()? else { continue };
            best.num_moves += other.num_moves;
            if other.max_load_ns < best.max_load_ns {
                let num_moves = best.num_moves;
                best = Assignment { lower_bound_ns: bound, num_moves, ..other };
            }
        }
        best.proven_optimal = best.max_load_ns == bound;
        best.was_stopped = self.stop.has_struck();
        Ok(best)
    }

    /// Microbatches of different size, each as even over the ranks as possible; `None` for a single microbatch, and where
    /// that does not keep the caps.
    ///
    /// A sample larger than a mean bucket makes its microbatch long for all ranks. So the other ranks get as much
    /// work in that microbatch, and all later microbatches become shorter. Microbatch by microbatch, the samples that
    /// are left go, costliest first, to the rank with the least load, as long as no load passes the mean of what is
    /// left or the costliest sample; the last microbatch takes the rest.
    fn by_microbatches(&self, bounds: [u64; 2]) -> Result<Option<Assignment>, BalanceError> {
        if self.num_microbatches == 1 {
            return Ok(None);
        }
        let costs = self.divided_by(bounds, 16);
        let pair = |sample: usize| [costs.encoder_ns[sample], costs.llm_ns[sample]];
        let of =
            |values: &Option<Vec<u64>>, sample: usize| values.as_ref().map_or(0, |values| values[sample]);
        let held = |sample: usize| [of(&costs.bytes, sample), of(&costs.tokens, sample)];
        let caps =
            [self.limits.bucket_bytes_max, self.limits.bucket_tokens_max].map(|cap| cap.unwrap_or(u64::MAX));
        let mut left: Vec<usize> = (0..costs.num_samples()).collect();
        left.sort_by_key(|&sample| Reverse(pair(sample).into_iter().max()));
        let (num_ranks, mut bucket, mut num_moves) = (self.num_ranks(), vec![0; left.len()], 0);
        for microbatch in 0..self.num_microbatches {
            let taken = if microbatch + 1 == self.num_microbatches {
                std::mem::take(&mut left)
            } else {
                let places = u64::from(num_ranks * (self.num_microbatches - microbatch));
                let (taken, rest) = first_microbatch(&left, pair, (&held, caps), num_ranks, places);
                left = rest;
                taken
            };
            let own = costs.gather(&taken.iter().copied());
            let max_moves = self.limits.max_moves / u64::from(self.num_microbatches);
            let limits = Limits { num_buckets: num_ranks, max_moves, max_exact_work: 0, ..*self.limits };
            let found = match schedule_to(&own, &limits, self.precision, &self.stop) {
                // What is left for a microbatch may be more than it may hold.
                Err(BalanceError::CapsInfeasible { .. } | BalanceError::NoPacking { .. }) => return Ok(None),
                found => found?,
            };
            num_moves += found.num_moves;
            for (&sample, rank) in taken.iter().zip(found.bucket) {
                bucket[sample] = microbatch * num_ranks + rank;
            }
        }
        Ok(Some(self.answer(bucket, 0, num_moves, self.stop.has_struck())))
    }

    /// The assignment whose largest load, each in parts of its bound, is least; the encoder's counts `weight` / 16 of that.
    fn weighted(&self, bounds: [u64; 2], weight: u64) -> Result<Assignment, BalanceError> {
        self.grouped(&self.divided_by(bounds, weight))
    }

    /// The buckets found for `costs` (the costs of the batch in another unit), put into microbatches.
    fn grouped(&self, costs: &Costs) -> Result<Assignment, BalanceError> {
        let found = schedule_to(costs, self.limits, self.precision, &self.stop)?;
        let load = |column: &[u64]| sums(column, &found.bucket, self.limits.num_buckets);
        let loads: Vec<[u64; 2]> = load(&self.costs.encoder_ns)
            .into_iter()
            .zip(load(&self.costs.llm_ns))
            .map(|(e, l)| [e, l])
            .collect();
        let order = microbatches(&loads, self.num_ranks() as usize);
        Ok(self.answer(renumbered(&found.bucket, &order), 0, found.num_moves, found.was_stopped))
    }

    /// The costs in parts of their bounds; the encoder's count `weight` / 16 of that.
    fn divided_by(&self, bounds: [u64; 2], weight: u64) -> Costs {
        let weights = [WEIGHTED_MAX / 16 * weight / 2, WEIGHTED_MAX / 2];
        let column = |at: usize, values: &[u64]| -> Vec<u64> {
            let (weight, bound) = (u128::from(weights[at]), u128::from(bounds[at].max(1)));
            values.iter().map(|&value| (u128::from(value) * weight / bound) as u64).collect()
        };
        Costs {
            encoder_ns: column(0, &self.costs.encoder_ns),
            llm_ns: column(1, &self.costs.llm_ns),
            bytes: self.costs.bytes.clone(),
            tokens: self.costs.tokens.clone(),
        }
    }
}

/// The samples of the first microbatch, and the samples that are left. Both lists are costliest first, as `samples`
/// is.
///
/// `places` are the buckets that all of `samples` must fill; a bucket holds no more of what `held` says than `caps`.
fn first_microbatch(
    samples: &[usize],
    pair: impl Fn(usize) -> [u64; 2],
    (held, caps): (&dyn Fn(usize) -> [u64; 2], [u64; 2]),
    num_ranks: u32,
    places: u64,
) -> (Vec<usize>, Vec<usize>) {
    let total = samples.iter().fold([0, 0], |sum, &sample| add(sum, pair(sample)));
    let largest = samples.first().map_or([0, 0], |&sample| pair(sample));
    let most = [0, 1].map(|c: usize| total[c].div_ceil(places).max(largest[c]));
    let mut load = vec![([0_u64; 2], [0_u64; 2]); num_ranks as usize];
    let (mut taken, mut rest) = (Vec::new(), Vec::new());
    let is_within = |of: [u64; 2], most: [u64; 2]| of[0] <= most[0] && of[1] <= most[1];
    for &sample in samples {
        let has_room = |load: &&mut ([u64; 2], [u64; 2])| is_within(add(load.1, held(sample)), caps);
        let least = load.iter_mut().filter(has_room);
        let least = least.min_by_key(|load| add(load.0, pair(sample)).into_iter().max());
        match least {
            Some(load) if is_within(add(load.0, pair(sample)), most) => {
                *load = (add(load.0, pair(sample)), add(load.1, held(sample)));
                taken.push(sample);
            }
            _ => rest.push(sample),
        }
    }
    (taken, rest)
}

fn add(a: [u64; 2], b: [u64; 2]) -> [u64; 2] {
    [a[0] + b[0], a[1] + b[1]]
}
