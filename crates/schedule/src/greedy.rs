//! A first assignment: longest processing time first, on two resources.

use crate::leaning::Leaning;
use crate::sorted_batch::{Pair, SortedBatch, plus, worse};
use crate::stop::Stop;
use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};

/// Buckets to choose among between two questions whether to stop: some hundredths of a millisecond.
const ASKED_EVERY: usize = 1 << 16;

/// Samples times buckets that are all compared: some two seconds.
const COMPARED_MAX: usize = 1 << 31;

/// Buckets of the least load that a sample chooses among beyond that: by the encoder's, the LLM's and the worse one each.
const LEAST_LOOKED_AT: usize = 24;

/// Bucket of each sample: costliest first (by its worse resource), each into the bucket whose worse load stays
/// the least.
///
/// Ties go to the smaller sum of both resources, then to fewer samples, then to the lower bucket, so that
/// samples that cost nothing are spread. `None` if a sample finds no bucket with room for it,
/// or if `stop` strikes.
///
/// Beyond [`COMPARED_MAX`] comparisons only those buckets are looked at that have the least load of either resource, or
/// the least worse load: a sample that finds no room in them has the choice of all.
///
/// *Complexity*: O(n log m) where one resource has no costs and nothing is capped, else O(n sqrt m) up to [`COMPARED_MAX`],
/// or O(n m) where the least loaded buckets have no room, and O(n log m) beyond.
///
/// *References*: Graham, "Bounds on multiprocessing timing anomalies", 1969, for one resource.
pub(crate) fn greedy(batch: &SortedBatch, stop: &Stop) -> Option<Vec<u32>> {
    if batch.sizes.is_empty() && batch.total.contains(&0) {
        return greedy_alone(batch, stop);
    }
    if batch.num_samples().saturating_mul(batch.num_buckets) > COMPARED_MAX {
        return greedy_among_least(batch, stop);
    }
    greedy_among_all(batch, stop)
}

/// Greedy that has the choice of every bucket for every sample, as long as none is empty. The first empty bucket is as good as
/// any other bucket or better: its worse load and its sum become the least, it has no samples, and it has room, since no sample
/// is over a cap alone.
fn greedy_among_all(batch: &SortedBatch, stop: &Stop) -> Option<Vec<u32>> {
    let mut until_asked = 0;
    let num_first = batch.num_samples().min(batch.num_buckets);
    let mut bucket: Vec<u32> = (0..num_first as u32).collect();
    if num_first == batch.num_samples() {
        return Some(bucket);
    }
    let held = bucket.iter().map(|&sample| batch.size(sample)).collect();
    let mut buckets = Leaning::new(batch.cost[..num_first].to_vec(), vec![1; num_first], held);
    for (sample, &cost) in (num_first as u32..).zip(&batch.cost[num_first..]) {
        if until_asked < batch.num_buckets {
            if stop.strikes() {
                return None;
            }
            until_asked = ASKED_EVERY;
        }
        until_asked = until_asked.saturating_sub(batch.num_buckets);
        let size = batch.size(sample);
        let b = buckets.least(cost, size, batch.caps)?;
        buckets.add(b, cost, size);
        bucket.push(b);
    }
    Some(bucket)
}

/// The same answer where only one resource has costs: the least loaded bucket is on top of a heap.
fn greedy_alone(batch: &SortedBatch, stop: &Stop) -> Option<Vec<u32>> {
    let mut least: BinaryHeap<Reverse<(i64, usize, u32)>> =
        (0..batch.num_buckets as u32).map(|b| Reverse((0, 0, b))).collect();
    let mut bucket = Vec::with_capacity(batch.num_samples());
    for (sample, &cost) in batch.cost.iter().enumerate() {
        if sample.is_multiple_of(ASKED_EVERY / 16) && stop.strikes() {
            return None;
        }
        let mut top = least.peek_mut()?;
        let Reverse((load, count, b)) = &mut *top;
        bucket.push(*b);
        (*load, *count) = (*load + worse(cost), *count + 1);
    }
    Some(bucket)
}

/// Loads that a bucket is sought by, then samples in it, then its number.
type Key = (i64, i64, usize, u32);

/// Greedy among the least loaded buckets alone.
pub(crate) fn greedy_among_least(batch: &SortedBatch, stop: &Stop) -> Option<Vec<u32>> {
    let m = batch.num_buckets;
    let (mut load, mut count, mut held) = (vec![[0, 0]; m], vec![0_usize; m], vec![[0_u64; 2]; m]);
    let keys = |load: Pair, count: usize, b: u32| -> [Key; 3] {
        let sum = load[0] + load[1];
        [worse(load), load[0], load[1]].map(|first| (first, sum, count, b))
    };
    let mut sought: [BTreeSet<Key>; 3] = Default::default();
    for b in 0..m as u32 {
        for (set, key) in sought.iter_mut().zip(keys([0, 0], 0, b)) {
            set.insert(key);
        }
    }
    let mut bucket = Vec::with_capacity(batch.num_samples());
    for (sample, &cost) in batch.cost.iter().enumerate() {
        if sample.is_multiple_of(ASKED_EVERY / 256) && stop.strikes() {
            return None;
        }
        let size = batch.size(sample as u32);
        let has_room = |&b: &usize| (0..2).all(|c| size[c] <= batch.caps[c] - held[b][c]);
        let key = |&b: &usize| {
            let after = plus(load[b], cost);
            (worse(after), after[0] + after[1], count[b], b)
        };
        let least = sought.iter().flat_map(|set| set.iter().take(LEAST_LOOKED_AT)).map(|key| key.3 as usize);
        let found = least.filter(has_room).min_by_key(key);
        let b = found.or_else(|| (0..m).filter(has_room).min_by_key(key))?;
        for (set, key) in sought.iter_mut().zip(keys(load[b], count[b], b as u32)) {
            set.remove(&key);
        }
        load[b] = plus(load[b], cost);
        count[b] += 1;
        held[b] = [held[b][0] + size[0], held[b][1] + size[1]];
        for (set, key) in sought.iter_mut().zip(keys(load[b], count[b], b as u32)) {
            set.insert(key);
        }
        bucket.push(b as u32);
    }
    Some(bucket)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buckets::Buckets;
    use crate::costs::Costs;
    use crate::limits::Limits;
    use crate::random::{below, generator};

    fn costs(num_samples: usize, end: usize, has_encoder: bool) -> Costs {
        let mut random = generator(5);
        let mut column = |end| (0..num_samples).map(|_| below(&mut random, end) as u64).collect::<Vec<u64>>();
        let encoder_ns = if has_encoder { column(end) } else { vec![0; num_samples] };
        let tokens = Some(column(50));
        Costs { encoder_ns, llm_ns: column(end), tokens, bytes: None }
    }

    #[test]
    fn on_one_resource_the_heap_gives_the_same_answer() {
        for (num_samples, end, num_buckets) in [(500, 1_000, 7), (500, 3, 40), (30, 9, 60), (0, 9, 3)] {
            let costs = costs(num_samples, end, false);
            let batch = SortedBatch::new(&costs, &Limits::new(num_samples, num_buckets));
            let never = Stop::never();
            assert_eq!(greedy_alone(&batch, &never), greedy_among_all(&batch, &never));
            assert!(greedy_alone(&batch, &Stop::when(&|| true)).is_none() || num_samples == 0);
        }
    }

    /// Greedy in the words of its doc: no empty bucket is taken for granted.
    fn by_the_rule(batch: &SortedBatch) -> Option<Vec<u32>> {
        let m = batch.num_buckets;
        let (mut load, mut count, mut held) = (vec![[0, 0]; m], vec![0_usize; m], vec![[0_u64; 2]; m]);
        let place = |(sample, &cost): (usize, &Pair)| {
            let size = batch.size(sample as u32);
            let has_room = |b: &usize| (0..2).all(|c| size[c] <= batch.caps[c] - held[*b][c]);
            let key = |&b: &usize| {
                let after = plus(load[b], cost);
                (worse(after), after[0] + after[1], count[b], b)
            };
            let b = (0..m).filter(has_room).min_by_key(key)?;
            (load[b], count[b]) = (plus(load[b], cost), count[b] + 1);
            held[b] = [held[b][0] + size[0], held[b][1] + size[1]];
            Some(b as u32)
        };
        batch.cost.iter().enumerate().map(place).collect()
    }

    #[test]
    fn the_first_samples_go_to_empty_buckets_as_the_rule_says() {
        let cases = [
            (300, 1_000, 40),
            (300, 3, 40),
            (300, 1, 40),
            (30, 9, 60),
            (900, 50, 150),
            (700, 1_000, 128),
            (4_000, 1_000, 700),
        ];
        for (num_samples, end, num_buckets) in cases {
            for cap in [None, Some(60), Some(130)] {
                let costs = costs(num_samples, end, true);
                let limits = Limits { bucket_tokens_max: cap, ..Limits::new(num_samples, num_buckets) };
                let batch = SortedBatch::new(&costs, &limits);
                assert_eq!(greedy_among_all(&batch, &Stop::never()), by_the_rule(&batch));
            }
        }
    }

    #[test]
    fn among_the_least_loaded_it_is_nearly_as_even_and_keeps_caps() {
        let costs = costs(4_000, 1_000, true);
        for cap in [None, Some(1_150)] {
            let limits = Limits { bucket_tokens_max: cap, ..Limits::new(4_000, 100) };
            let batch = SortedBatch::new(&costs, &limits);
            let worst = |way: fn(&SortedBatch, &Stop) -> Option<Vec<u32>>| {
                let buckets = Buckets::new(&batch, way(&batch, &Stop::never()).unwrap());
                assert!(buckets.keeps_caps());
                buckets.worst()
            };
            let (all, least) = (worst(greedy_among_all), worst(greedy_among_least));
            assert!(least <= all + all / 50, "{least} against {all}");
        }
        // Buckets are nearly full: only some that are far from the least load have room, and later none has.
        let tight = Limits { bucket_tokens_max: Some(900), ..Limits::new(4_000, 100) };
        let batch = SortedBatch::new(&costs, &tight);
        assert!(greedy_among_least(&batch, &Stop::never()).is_none());
        assert!(
            greedy_among_least(&SortedBatch::new(&costs, &Limits::new(4_000, 9)), &Stop::when(&|| true))
                .is_none()
        );
    }
}
