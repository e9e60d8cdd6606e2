//! A first assignment that keeps the caps on bytes and tokens, where loads alone led to none.

use crate::best_fit::best_fit;
use crate::bounds::lower_bound;
use crate::buckets::Buckets;
use crate::costs::{Costs, TOTAL_MAX};
use crate::error::BalanceError;
use crate::greedy::greedy;
use crate::limits::Limits;
use crate::refine::refine;
use crate::sorted_batch::{Size, SortedBatch};
use crate::stop::Stop;

/// Bucket of each sample such that each bucket keeps its caps, and the moves it took.
///
/// Sizes are balanced as if they were the only loads, by the very search that balances loads: if the fullest bucket
/// can be brought under the cap, the cap is kept. Bytes and tokens are the two resources of that search, each
/// multiplied by the other's cap (divided by what both caps share), so that both caps are the same number. Where such
/// products pass [`TOTAL_MAX`], their low bits are dropped and the rest is rounded up. A packing that is full to
/// those bits may then be missed, but a packing that is found is always valid.
///
/// A stop takes effect only after this is done, because before that there is no assignment to return.
///
/// # Errors
/// [`BalanceError::CapsInfeasible`] if the lower bound of the fullest bucket is over the cap;
/// [`BalanceError::NoPacking`] if the search did not get under it.
pub(crate) fn pack(batch: &SortedBatch, limits: &Limits) -> Result<(Vec<u32>, u64), BalanceError> {
    let (num_samples, num_buckets) = (batch.num_samples(), limits.num_buckets);
    for (unit, column, cap) in units(batch) {
        let sizes = batch.sizes.iter().map(|size| size[column]).collect();
        let alone = as_costs(sizes, vec![0; num_samples], limits);
        let needed = lower_bound(&alone, worst_of(&alone, &in_greedy_order(&alone))) as u64;
        if needed > cap {
            return Err(BalanceError::CapsInfeasible { num_samples, unit, needed, num_buckets, cap });
        }
    }
    let (sizes, cap) = commensurate(batch);
    let column = |column: usize| sizes.iter().map(|size| size[column]).collect();
    let both = as_costs(column(0), column(1), limits);
    let mut buckets = Buckets::new(&both, in_greedy_order(&both));
    // With fewer moves a packing could be missed, which even a caller who asks for no search needs.
    let max_moves = limits.max_moves.max(Limits::default_moves(num_samples));
    // As the bound, the cap ends the search where it is kept.
    let num_moves = refine(&mut buckets, cap, max_moves, limits.seed, &Stop::never());
    let bucket = both.by_caller_order(&buckets.bucket);
    let packed = Buckets::new(batch, bucket);
    if packed.keeps_caps() {
        return Ok((packed.bucket, num_moves));
    }
    // Exchanges make sizes even, and even sizes may still not fit. Where room is scarce, packing the largest first may fit.
    if let Some(bucket) = best_fit(&batch.sizes, batch.caps, batch.num_buckets) {
        return Ok((bucket, num_moves));
    }
    let fullest = |column: usize| packed.size.iter().map(|size| size[column]).max().unwrap_or(0);
    let broken = units(batch).max_by(|a, b| {
        let excess = |&(_, column, cap): &(_, usize, u64)| fullest(column) as f64 / cap.max(1) as f64;
        excess(a).total_cmp(&excess(b))
    });
    let (unit, column, cap) = broken.expect("a batch without caps needs no packing");
    Err(BalanceError::NoPacking { num_samples, num_buckets, unit, cap, best: fullest(column) })
}

/// Unit, column and cap of the sizes that are capped.
fn units(batch: &SortedBatch) -> impl Iterator<Item = (&'static str, usize, u64)> {
    let caps = batch.caps;
    ["bytes", "tokens"]
        .into_iter()
        .enumerate()
        .map(move |(column, unit)| (unit, column, caps[column]))
        .filter(|cap| cap.2 < u64::MAX)
}

/// Sizes in units such that both caps are the returned one.
fn commensurate(batch: &SortedBatch) -> (Vec<Size>, i64) {
    let [bytes, tokens] = batch.caps;
    // A cap of 0 leaves only samples of size 0, which no factor changes.
    let is_open = |cap: u64| cap == 0 || cap == u64::MAX;
    if is_open(bytes) || is_open(tokens) {
        let cap = if is_open(bytes) { tokens } else { bytes };
        return (batch.sizes.clone(), i64::try_from(cap).unwrap_or(i64::MAX));
    }
    let shared = gcd(bytes, tokens);
    let factor = [u128::from(tokens / shared), u128::from(bytes / shared)];
    let wide: Vec<[u128; 2]> =
        batch.sizes.iter().map(|size| [0, 1].map(|c: usize| u128::from(size[c]) * factor[c])).collect();
    let cap = u128::from(bytes) * factor[0];
    let total = wide.iter().fold(cap, |sum, size| sum.saturating_add(size[0].max(size[1])));
    // Rounding up adds at most 1 a sample, and there are less than 2^32 of them.
    let shift = (total / u128::from(TOTAL_MAX / 2)).checked_ilog2().map_or(0, |bits| bits + 1);
    let narrow = |size: &[u128; 2]| size.map(|size| size.div_ceil(1 << shift) as u64);
    (wide.iter().map(narrow).collect(), (cap >> shift) as i64)
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// A batch without caps, whose loads are the sizes.
fn as_costs(encoder_ns: Vec<u64>, llm_ns: Vec<u64>, limits: &Limits) -> SortedBatch {
    let costs = Costs { encoder_ns, llm_ns, bytes: None, tokens: None };
    SortedBatch::new(&costs, &Limits { bucket_bytes_max: None, bucket_tokens_max: None, ..*limits })
}

fn in_greedy_order(batch: &SortedBatch) -> Vec<u32> {
    greedy(batch, &Stop::never()).expect("without a cap every sample finds a bucket")
}

fn worst_of(batch: &SortedBatch, bucket: &[u32]) -> i64 {
    Buckets::new(batch, bucket.to_vec()).worst()
}
