//! Puts the samples of one global batch into microbatches of even work, on two components at once.
//!
//! A step lasts as long as its slowest microbatch makes everyone wait, and a sample costs the encoder and the LLM
//! backbone differently: a text costs the encoder nothing, a video both a lot. [`schedule`] takes the two costs of
//! each sample and fills `m` buckets (microbatches times LLM replicas) so that the worst bucket, on its worse
//! component, is as light as possible; then the next worst, and so on. The answer, an [`Assignment`], says how far
//! from the best possible it can be at most. [`divide`] shares one bucket's encoder work over encoder replicas, and
//! [`order_microbatches`] puts filled microbatches into an order that suits the pipeline. Ranks that hold both
//! components wait for other sums of work, so they need another objective. [`schedule_for`] takes the objective as an
//! argument; [`DatasetCosts`] cuts any global batch of a dataset into buckets by it.
//!
//! ```
//! use dflop_schedule::{Costs, Limits, baseline, schedule, Assignment};
//!
//! // Two videos, four texts, two buckets.
//! let costs = Costs { encoder_ns: vec![9, 7, 0, 0, 0, 0], llm_ns: vec![8, 6, 3, 2, 4, 1], ..Costs::default() };
//! let limits = Limits::new(6, 2);
//! let balanced = schedule(&costs, &limits)?;
//! assert_eq!((balanced.max_load_ns, balanced.lower_bound_ns), (12, 12));
//! assert!(balanced.proven_optimal);
//!
//! let arrival = Assignment::judge(&costs, &limits, baseline::arrival_order(6, 2))?;
//! assert_eq!(arrival.max_load_ns, 17);
//! # Ok::<(), dflop_schedule::BalanceError>(())
//! ```
//!
//! Where few samples share a bucket, [`Limits::max_exact_work`] lets an exact search close the gap: it proves the
//! optimum of 48 samples in 16 buckets in some 20 ms. [`schedule_until`] ends when the caller says so and returns the
//! best assignment so far.
//!
//! Everything is integer nanoseconds and counted moves: the same costs, limits and seed give the same answer on
//! any machine. A batch of 2,048 samples and 128 buckets takes 10 to 20 ms on one core.
//!
//! Not modelled: the pipeline itself (the caller judges orders by its simulator), what a microbatch costs beyond
//! the sum of its samples, and samples that could be cut. `docs/scheduler.md` has the algorithm, the proofs of the
//! bounds, and the numbers.
//!
//! *References*: "DFLOP: A Data-driven Framework for Multimodal LLM Training Pipeline Optimization",
//! arXiv 2603.25120, for the problem; Graham 1969 for LPT; Lourenco, Martin and Stutzle 2003 for iterated local
//! search; Martello and Toth 1990 for the packing bound; Gilmore and Gomory 1961 for the exact one.

mod assignment;
pub mod baseline;
mod best_fit;
mod bisection;
mod bounds;
mod buckets;
mod caps;
mod costs;
mod dataset;
mod dealing;
mod differencing;
mod divide;
mod error;
mod exact;
mod exchange;
mod greedy;
mod ladder;
mod leaning;
mod limits;
mod meets;
mod ordering;
mod packing;
mod padded;
mod random;
mod refine;
mod sorted_batch;
mod stop;
mod uneven;
mod units;

pub use assignment::Assignment;
pub use costs::{Costs, TOTAL_MAX};
pub use dataset::{Cut, DatasetCosts, of_tokens, scaled};
pub use dflop_types::BUCKETS_MAX;
pub use divide::divide;
pub use error::BalanceError;
pub use limits::{EXACT_WORK, Limits};
pub use meets::{Meets, NEAR, ParseMeetsError, schedule_for};
pub use ordering::{order_microbatches, order_microbatches_from, small_ends};
pub use packing::{fewest_buckets, filled, fitting};
pub use padded::{fitting_padded, padded, padded_loads};
pub use uneven::{Slowness, uneven};

use buckets::Buckets;
use sorted_batch::{Pair, SortedBatch};
use stop::Stop;

/// The assignment of samples to buckets whose worst bucket is lightest, as far as the moves reach.
///
/// Starts from the better of greedy (longest first) and arrival order, so it is never worse than arrival order
/// where that keeps the caps, and improves it by exchanges until the bound is met or `max_moves` are weighed; then,
/// for small batches and with `max_exact_work`, by the exact search.
/// Samples may come in any order: only a batch whose arrival order beats greedy is treated by that order.
///
/// *Complexity*: O(n m + n log n) before the search, O(`max_moves`) for it; memory O(n + m).
///
/// # Errors
/// [`BalanceError::ZeroBuckets`]; [`BalanceError::Lengths`], [`BalanceError::NoSizes`],
/// [`BalanceError::TooMany`] and [`BalanceError::Overflow`] for unsound input; [`BalanceError::SampleOverCap`] and
/// [`BalanceError::CapsInfeasible`] where no assignment keeps the caps; [`BalanceError::NoPacking`] where none was
/// found.
pub fn schedule(costs: &Costs, limits: &Limits) -> Result<Assignment, BalanceError> {
    schedule_until(costs, limits, &|| false)
}

/// As [`schedule`], ended early once `stop` says so: then the best assignment so far, with
/// [`Assignment::was_stopped`].
///
/// `stop` is asked every few tenths of a millisecond (every few tens of milliseconds while the exact search lists
/// sets). So it may read a clock; this crate reads none. An answer that such a `stop` cut short is the only one that
/// may differ from run to run. Where the first assignments break a cap, `stop` is not asked before an assignment is
/// found that keeps it.
///
/// # Errors
/// As [`schedule`]; a stop is no error.
///
/// # Examples
/// ```
/// use dflop_schedule::{Costs, Limits, schedule_until};
/// use std::time::{Duration, Instant};
///
/// let costs = Costs { encoder_ns: vec![9, 7, 0, 0], llm_ns: vec![8, 6, 3, 2], ..Costs::default() };
/// let start = Instant::now();
/// let found = schedule_until(&costs, &Limits::new(4, 2), &|| start.elapsed() > Duration::from_millis(5))?;
/// assert_eq!(found.max_load_ns, 10);
/// # Ok::<(), dflop_schedule::BalanceError>(())
/// ```
pub fn schedule_until(
    costs: &Costs,
    limits: &Limits,
    stop: &dyn Fn() -> bool,
) -> Result<Assignment, BalanceError> {
    schedule_to(costs, limits, Precision::default(), &Stop::when(stop))
}

/// How near to the bound a search goes on.
#[derive(Debug, Clone, Copy, Default)]
struct Precision {
    /// The search ends where the worst load is within this many powers of two of the bound; 0: only at the bound.
    near: u32,
}

impl Precision {
    /// The load at which the search ends.
    fn target(self, bound: i64) -> i64 {
        if self.near == 0 { bound } else { bound + (bound >> self.near) }
    }
}

/// As [`schedule_until`], ended within `precision` of the bound.
fn schedule_to(
    costs: &Costs,
    limits: &Limits,
    precision: Precision,
    stop: &Stop,
) -> Result<Assignment, BalanceError> {
    costs.check()?;
    limits.check(costs)?;
    let batch = SortedBatch::new(costs, limits);
    let (start, packing_moves) = start(&batch, limits, stop)?;
    let mut buckets = Buckets::new(&batch, start);
    let mut bound = bounds::lower_bound(&batch, buckets.worst());
    let target = precision.target(bound);
    let is_exact = limits.max_exact_work > 0 && exact::can_take(&batch);
    let before = if is_exact { exact_after(&batch, limits.max_moves) } else { limits.max_moves };
    let mut num_moves = refine::refine(&mut buckets, target, before, limits.seed, stop);
    if is_exact && exact::is_open(target, buckets.worst()) {
        let left = limits.max_moves - num_moves;
        let first = exact::moves_before(&batch, limits.max_exact_work);
        num_moves += refine::refine(&mut buckets, target, first, limits.seed.wrapping_add(1), stop);
        let found = exact::improve(&buckets, bound, limits.max_exact_work - first, stop);
        bound = found.bound;
        if let Some(bucket) = found.bucket {
            buckets = Buckets::new(&batch, bucket);
        }
        // The exact search looks at the worst bucket alone.
        num_moves +=
            refine::refine(&mut buckets, precision.target(bound), left, limits.seed.wrapping_add(2), stop);
    } else if exact::is_open(target, buckets.worst()) {
        // More samples than the exact search takes: its work goes to exchanges, some 10 ns each.
        let seed = limits.seed.wrapping_add(1);
        num_moves += refine::refine(&mut buckets, target, limits.max_exact_work / 2, seed, stop);
    }
    let bucket = batch.by_caller_order(&buckets.bucket);
    Ok(Assignment::new(costs, limits, bucket, bound, num_moves + packing_moves, stop.has_struck()))
}

/// Moves before an exact search that is quick, 1 ms: the other exchanges wait for it.
const EXACT_FIRST_MOVES: u64 = 100_000;

/// Moves before the exact search. The rest, at least a quarter of all, is spent after it: on the buckets that an
/// exact answer leaves uneven, or on the worst bucket where the exact search found no answer.
fn exact_after(batch: &SortedBatch, max_moves: u64) -> u64 {
    let most = max_moves - max_moves / 4;
    if batch.num_samples() <= limits::QUICK_SAMPLES_MAX { most.min(EXACT_FIRST_MOVES) } else { most }
}

/// Differencing gives a better first assignment than greedy where one component has nearly all the work: this many
/// times the work of the other.
///
/// With two busy components it was never better than greedy (1,116 lognormal batches), and took a tenth of the time.
const DIFFERENCING_RATIO: i64 = 16;

/// Samples times buckets beyond which no differences are taken: some second. Many samples of one cost are even without.
const DIFFERENCING_MAX: usize = 1 << 24;

fn minmax([a, b]: Pair) -> Pair {
    [a.min(b), a.max(b)]
}

/// The best of the first assignments that keep the caps, and the moves it took to find one.
fn start(batch: &SortedBatch, limits: &Limits, stop: &Stop) -> Result<(Vec<u32>, u64), BalanceError> {
    let arrival = batch.by_own_order(&baseline::arrival_order(batch.num_samples(), limits.num_buckets));
    let keeping = |bucket| Some(Buckets::new(batch, bucket)).filter(Buckets::keeps_caps);
    let mut best: Option<Buckets> = None;
    let [least, most] = minmax(batch.total);
    let is_small = batch.num_samples().saturating_mul(batch.num_buckets) <= DIFFERENCING_MAX;
    let mut take = |found: Option<Vec<u32>>| {
        let found = found.and_then(keeping);
        if found.as_ref().is_some_and(|found| best.as_ref().is_none_or(|best| found.values < best.values)) {
            best = found;
        }
        best.is_some()
    };
    // A stop must not lose the last assignment that keeps the caps. Nor does it give arrival order where greedy takes
    // milliseconds, since greedy is mostly near the answer of the whole search.
    let never = Stop::never();
    let has_one = take(Some(arrival));
    let found = greedy::greedy(batch, if has_one && !is_small { stop } else { &never });
    let is_cut = found.is_none() && stop.has_struck();
    let has_one = take(if is_cut { greedy::greedy_among_least(batch, &never) } else { found });
    if is_small && least <= most / DIFFERENCING_RATIO {
        take(differencing::differencing(batch, if has_one { stop } else { &never }));
    }
    match best {
        Some(best) => Ok((best.bucket, 0)),
        None => caps::pack(batch, limits),
    }
}
