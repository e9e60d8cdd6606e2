//! Puts the samples of one global batch into microbatches of even work, on two components at once.
//!
//! A step lasts as long as its slowest microbatch makes everyone wait, and a sample costs the encoder and the
//! LLM backbone differently: a text costs the encoder nothing, a video both a lot. [`schedule`] takes the two
//! costs of each sample and fills `m` buckets (microbatches times LLM replicas) so that the worst bucket, on its
//! worse component, is as light as possible; then the next worst, and so on. The answer, an [`Assignment`],
//! says how far from the best possible it can be at most. [`divide`] shares one bucket's encoder work over
//! encoder replicas, and [`order_microbatches`] puts filled microbatches into an order that suits the pipeline.
//!
//! ```
//! use dflop_schedule::{Costs, Limits, baseline, schedule, Assignment};
//!
//! // Two videos, four texts, two buckets.
//! let costs = Costs { encoder_ns: vec![9, 7, 0, 0, 0, 0], llm_ns: vec![8, 6, 3, 2, 4, 1], bytes: None };
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
//! Everything is integer nanoseconds and counted moves: the same costs, limits and seed give the same answer on
//! any machine. A batch of 2,048 samples and 128 buckets takes some 20 ms on one core.
//!
//! Not modelled: the pipeline itself (the caller judges orders by its simulator), what a microbatch costs beyond
//! the sum of its samples, and samples that could be cut. There is no exact solver: what is not proven by the
//! bound is not proven. `docs/scheduler.md` has the algorithm, the proofs of the bounds, and the numbers.
//!
//! *References*: "DFLOP: A Data-driven Framework for Multimodal LLM Training Pipeline Optimization",
//! arXiv 2603.25120, for the problem; Graham 1969 for LPT; Lourenco, Martin and Stutzle 2003 for iterated local
//! search; Martello and Toth 1990 for the packing bound.

mod assignment;
pub mod baseline;
mod bounds;
mod buckets;
mod caps;
mod costs;
mod divide;
mod error;
mod exchange;
mod greedy;
mod ordering;
mod problem;
mod random;
mod refine;

pub use assignment::Assignment;
pub use costs::{BUCKETS_MAX, Costs, Limits, TOTAL_MAX};
pub use divide::divide;
pub use error::BalanceError;
pub use ordering::{order_microbatches, order_microbatches_from, small_ends};

use buckets::Buckets;
use problem::Problem;

/// The assignment of samples to buckets whose worst bucket is lightest, as far as the moves reach.
///
/// Starts from the better of greedy (longest first) and arrival order, so it is never worse than arrival order
/// where that keeps the cap, and improves it by exchanges until the bound is met or `max_moves` are weighed.
/// Samples may come in any order: only a batch whose arrival order beats greedy is treated by that order.
///
/// *Complexity*: O(n m + n log n) before the search, O(`max_moves`) for it; memory O(n + m).
///
/// # Errors
/// [`BalanceError::ZeroBuckets`]; [`BalanceError::Lengths`], [`BalanceError::NoBytes`],
/// [`BalanceError::TooMany`] and [`BalanceError::Overflow`] for unsound input; [`BalanceError::SampleOverCap`] and
/// [`BalanceError::CapsInfeasible`] where no assignment keeps the cap; [`BalanceError::NoPacking`] where none was
/// found.
pub fn schedule(costs: &Costs, limits: &Limits) -> Result<Assignment, BalanceError> {
    costs.check()?;
    limits.check(costs)?;
    let problem = Problem::new(costs, limits);
    let (start, packing_moves) = start(&problem, limits)?;
    let mut buckets = Buckets::new(&problem, start);
    let bound = bounds::lower_bound(&problem, buckets.worst());
    let num_moves = refine::refine(&mut buckets, bound, limits.max_moves, limits.seed);
    let bucket = problem.by_caller_order(&buckets.bucket);
    Ok(Assignment::new(costs, limits, bucket, bound, num_moves + packing_moves))
}

/// The best of the first assignments that keep the cap, and the moves it took to find one.
fn start(problem: &Problem, limits: &Limits) -> Result<(Vec<u32>, u64), BalanceError> {
    let arrival = problem.by_own_order(&baseline::arrival_order(problem.num_samples(), limits.num_buckets));
    let candidates = [greedy::greedy(problem), Some(arrival)];
    let sound = candidates.into_iter().flatten().map(|bucket| Buckets::new(problem, bucket));
    let best = sound.filter(Buckets::keeps_cap).reduce(|a, b| if b.values().lt(a.values()) { b } else { a });
    match best {
        Some(best) => Ok((best.bucket, 0)),
        None => caps::pack(problem, limits),
    }
}
