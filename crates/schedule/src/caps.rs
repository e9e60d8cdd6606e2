//! A first assignment that keeps a cap on bytes, where loads alone led to none.

use crate::bounds::lower_bound;
use crate::buckets::Buckets;
use crate::costs::{Costs, Limits};
use crate::error::BalanceError;
use crate::greedy::greedy;
use crate::problem::Problem;
use crate::refine::refine;

/// Bucket of each sample such that each bucket keeps the cap, and the moves it took.
///
/// Bytes are balanced as if they were the only load, by the very search that balances loads: if the fullest
/// bucket can be brought under the cap, the cap is kept.
///
/// # Errors
/// [`BalanceError::CapsInfeasible`] if the lower bound of the fullest bucket is over the cap;
/// [`BalanceError::NoPacking`] if the search did not get under it.
pub(crate) fn pack(problem: &Problem, limits: &Limits) -> Result<(Vec<u32>, u64), BalanceError> {
    let costs =
        Costs { encoder_ns: problem.bytes.clone(), llm_ns: vec![0; problem.num_samples()], bytes: None };
    let bytes = Problem::new(&costs, &Limits { bucket_bytes_max: None, ..*limits });
    let (num_samples, num_buckets, cap) = (problem.num_samples(), limits.num_buckets, problem.cap);
    let start = greedy(&bytes).expect("without a cap every sample finds a bucket");
    let mut buckets = Buckets::new(&bytes, start);
    let needed = lower_bound(&bytes, buckets.worst()) as u64;
    if needed > cap {
        return Err(BalanceError::CapsInfeasible { num_samples, needed, num_buckets, cap });
    }
    // Fewer moves than this could miss a packing that a caller who asks for no search still needs.
    let max_moves = limits.max_moves.max(Limits::default_moves(num_samples));
    // As the bound, the cap ends the search where it is kept.
    let bound = i64::try_from(cap).unwrap_or(i64::MAX);
    let num_moves = refine(&mut buckets, bound, max_moves, limits.seed);
    let best = buckets.worst() as u64;
    if best > cap {
        return Err(BalanceError::NoPacking { num_samples, num_buckets, cap, best });
    }
    Ok((bytes.by_caller_order(&buckets.bucket), num_moves))
}
