//! A first assignment by differences: Karmarkar and Karp's method for many buckets, on two resources.

use crate::sorted_batch::{Pair, SortedBatch, plus, worse};
use crate::stop::Stop;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Samples that lie together: their load, and the first and last of a chain through all of them.
#[derive(Clone, Copy)]
struct Subset {
    load: Pair,
    first: u32,
    last: u32,
}

/// Bucket of each sample. The two partial assignments whose buckets differ most are merged, the fullest bucket of one with
/// the emptiest bucket of the other, and so on, until one assignment is left.
///
/// Buckets are compared by their worse resource. Caps play no part: the caller looks whether they hold. `None` if
/// `stop` strikes.
///
/// *Complexity*: O(n m log m) at worst; a partial assignment takes no more room than it has samples.
///
/// *References*: Karmarkar and Karp, "The differencing method of set partitioning", 1982.
pub(crate) fn differencing(batch: &SortedBatch, stop: &Stop) -> Option<Vec<u32>> {
    let (n, m) = (batch.num_samples(), batch.num_buckets);
    // The next sample of each chain, and assignments with their buckets fullest first; the empty ones are left out.
    let mut next: Vec<u32> = (0..n as u32).collect();
    let alone = |i: usize| vec![Subset { load: batch.cost[i], first: i as u32, last: i as u32 }];
    let mut partial: Vec<Vec<Subset>> = (0..n).map(alone).collect();
    let difference = |subsets: &[Subset]| {
        let least = if subsets.len() == m { worse(subsets[m - 1].load) } else { 0 };
        subsets.first().map_or(0, |subset| worse(subset.load)) - least
    };
    let mut queue: BinaryHeap<(i64, Reverse<usize>)> =
        partial.iter().enumerate().map(|(at, subsets)| (difference(subsets), Reverse(at))).collect();
    while queue.len() > 1 {
        if queue.len().is_multiple_of(64) && stop.strikes() {
            return None;
        }
        let (Some((_, Reverse(a))), Some((_, Reverse(b)))) = (queue.pop(), queue.pop()) else { break };
        let mut subsets = std::mem::take(&mut partial[a]);
        // What lies under none of b stays in its order.
        let num_sorted = subsets.len().min(m - partial[b].len());
        // The fullest of b lie on the emptiest of a, of which the first m - len(a) are not even written down.
        for (place, subset) in (0..m).rev().zip(std::mem::take(&mut partial[b])) {
            let Some(under) = subsets.get_mut(place) else {
                subsets.push(subset);
                continue;
            };
            next[under.last as usize] = subset.first;
            *under = Subset { load: plus(under.load, subset.load), first: under.first, last: subset.last };
        }
        sort_behind(&mut subsets, num_sorted);
        queue.push((difference(&subsets), Reverse(a)));
        partial[a] = subsets;
    }
    let mut bucket = vec![0; n];
    for (b, subset) in partial.iter().flatten().enumerate() {
        let mut at = subset.first;
        bucket[at as usize] = b as u32;
        while at != subset.last {
            at = next[at as usize];
            bucket[at as usize] = b as u32;
        }
    }
    Some(bucket)
}

/// Subsets that are put in their place one by one; more are sorted together with all others.
const FEW: usize = 16;

/// Sorts subsets, fullest first, of which all but those behind the first `num_sorted` are in order. Most often one is not.
fn sort_behind(subsets: &mut [Subset], num_sorted: usize) {
    let key = |subset: &Subset| (Reverse(worse(subset.load)), subset.first);
    if subsets.len() - num_sorted > FEW {
        subsets.sort_unstable_by_key(key);
        return;
    }
    for end in num_sorted..subsets.len() {
        let own = key(&subsets[end]);
        let at = subsets[..end].partition_point(|before| key(before) < own);
        subsets[at..=end].rotate_right(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::costs::Costs;
    use crate::limits::Limits;

    fn worst(costs: &[u64], m: u32) -> u64 {
        let costs =
            Costs { encoder_ns: vec![0; costs.len()], llm_ns: costs.to_vec(), bytes: None, tokens: None };
        let batch = SortedBatch::new(&costs, &Limits::new(costs.num_samples(), m));
        let bucket = differencing(&batch, &Stop::never()).unwrap();
        let mut load = vec![0; m as usize];
        for (&cost, &bucket) in batch.cost.iter().zip(&bucket) {
            load[bucket as usize] += worse(cost).cast_unsigned();
        }
        load.into_iter().max().unwrap()
    }

    #[test]
    fn differences_give_their_textbook_answer() {
        // 8 - 7 = 1, 6 - 5 = 1, 4 - 1 = 3, 3 - 1 = 2: 16 and 14, where LPT has 8 5 4 against 7 6: 17.
        assert_eq!(worst(&[4, 5, 6, 7, 8], 2), 16);
        // Three buckets: (8), (7), (6) over (5, 4) and so on: 8, 7 + 4, 6 + 5.
        assert_eq!(worst(&[8, 7, 6, 5, 4], 3), 11);
        assert_eq!(worst(&[3, 3, 3, 3, 3, 3], 3), 6);
        assert_eq!(worst(&[7], 4), 7);
        assert_eq!(worst(&[1, 2, 3], 1), 6);
    }

    #[test]
    fn a_stop_leaves_no_answer() {
        let costs = Costs { encoder_ns: vec![1; 200], llm_ns: vec![1; 200], bytes: None, tokens: None };
        let batch = SortedBatch::new(&costs, &Limits::new(200, 4));
        assert!(differencing(&batch, &Stop::when(&|| true)).is_none());
    }

    #[test]
    fn subsets_behind_those_in_order_find_their_places() {
        use crate::random::{below, generator};
        let mut random = generator(7);
        for (count, num_sorted) in [(1, 0), (9, 8), (40, 39), (40, 25), (40, 3), (5, 5)] {
            let mut subset = |at: u32| {
                let load = [0; 2].map(|_| below(&mut random, 9) as u32).map(i64::from);
                Subset { load, first: at, last: at }
            };
            let mut subsets: Vec<Subset> = (0..count).map(&mut subset).collect();
            let key = |subset: &Subset| (Reverse(worse(subset.load)), subset.first);
            subsets[..num_sorted].sort_by_key(key);
            let mut expected: Vec<_> = subsets.iter().map(key).collect();
            expected.sort_unstable();
            sort_behind(&mut subsets, num_sorted);
            assert_eq!(subsets.iter().map(key).collect::<Vec<_>>(), expected);
        }
    }
}
