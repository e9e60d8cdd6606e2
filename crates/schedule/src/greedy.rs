//! A first assignment: longest processing time first, on two resources.

use crate::problem::{Problem, plus, worse};

/// Bucket of each sample: costliest first (by its worse resource), each into the bucket whose worse load stays
/// the least.
///
/// Ties go to the smaller sum of both resources, then to fewer samples, then to the lower bucket, so that
/// samples that cost nothing are spread. `None` if a sample finds no bucket with room for its bytes.
///
/// *Complexity*: O(n m).
///
/// *References*: Graham, "Bounds on multiprocessing timing anomalies", 1969, for one resource.
pub(crate) fn greedy(problem: &Problem) -> Option<Vec<u32>> {
    let mut load = vec![[0, 0]; problem.num_buckets];
    let mut count = vec![0_usize; problem.num_buckets];
    let mut bytes = vec![0_u64; problem.num_buckets];
    let mut bucket = Vec::with_capacity(problem.num_samples());
    for (sample, &cost) in problem.cost.iter().enumerate() {
        let size = problem.bytes(sample as u32);
        let mut best = None;
        for (b, &before) in load.iter().enumerate() {
            if bytes[b] > problem.cap - size {
                continue;
            }
            let after = plus(before, cost);
            let key = (worse(after), after[0] + after[1], count[b]);
            if best.is_none_or(|(least, _)| key < least) {
                best = Some((key, b));
            }
        }
        let (_, b) = best?;
        load[b] = plus(load[b], cost);
        count[b] += 1;
        bytes[b] += size;
        bucket.push(b as u32);
    }
    Some(bucket)
}
