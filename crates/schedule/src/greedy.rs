//! A first assignment: longest processing time first, on two resources.

use crate::problem::{Problem, plus, worse};
use crate::stop::Stop;

/// Buckets looked at between two questions whether to stop: some tenths of a millisecond.
const ASKED_EVERY: usize = 1 << 16;

/// Bucket of each sample: costliest first (by its worse resource), each into the bucket whose worse load stays
/// the least.
///
/// Ties go to the smaller sum of both resources, then to fewer samples, then to the lower bucket, so that
/// samples that cost nothing are spread. `None` if a sample finds no bucket with room for it,
/// or if `stop` strikes.
///
/// *Complexity*: O(n m).
///
/// *References*: Graham, "Bounds on multiprocessing timing anomalies", 1969, for one resource.
pub(crate) fn greedy(problem: &Problem, stop: &Stop) -> Option<Vec<u32>> {
    let mut until_asked = 0;
    let mut load = vec![[0, 0]; problem.num_buckets];
    let mut count = vec![0_usize; problem.num_buckets];
    let mut held = vec![[0_u64; 2]; problem.num_buckets];
    let mut bucket = Vec::with_capacity(problem.num_samples());
    for (sample, &cost) in problem.cost.iter().enumerate() {
        if until_asked < problem.num_buckets {
            if stop.strikes() {
                return None;
            }
            until_asked = ASKED_EVERY;
        }
        until_asked = until_asked.saturating_sub(problem.num_buckets);
        let size = problem.size(sample as u32);
        let room = [problem.caps[0] - size[0], problem.caps[1] - size[1]];
        let (mut least, mut best) = (i64::MAX, None);
        for (b, &before) in load.iter().enumerate() {
            let after = plus(before, cost);
            // Nearly all buckets end here.
            if worse(after) > least || held[b][0] > room[0] || held[b][1] > room[1] {
                continue;
            }
            let key = (worse(after), after[0] + after[1], count[b]);
            if best.is_none_or(|(least, _)| key < least) {
                (least, best) = (key.0, Some((key, b)));
            }
        }
        let (_, b) = best?;
        load[b] = plus(load[b], cost);
        count[b] += 1;
        held[b] = [held[b][0] + size[0], held[b][1] + size[1]];
        bucket.push(b as u32);
    }
    Some(bucket)
}
