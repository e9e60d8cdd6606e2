//! Buckets dealt to ranks and microbatches: their numbers, once it is decided what is in them.

use std::cmp::Reverse;

/// Buckets up to which pairs of them are exchanged between microbatches: a millisecond.
const EXCHANGED_MAX: usize = 128;

/// The order of the buckets in which `num_ranks` in a row are a microbatch, such that the sum over the microbatches of their
/// largest encoder and largest LLM load is small: heaviest first, then exchanged by pairs while that helps.
pub(crate) fn microbatches(loads: &[[u64; 2]], num_ranks: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..loads.len()).collect();
    order.sort_by_key(|&bucket| Reverse(loads[bucket][0] + loads[bucket][1]));
    if loads.len() > EXCHANGED_MAX {
        return order;
    }
    let wait = |buckets: &[usize]| -> u64 {
        (0..2).map(|c| buckets.iter().map(|&bucket| loads[bucket][c]).max().unwrap_or(0)).sum()
    };
    let wait_of = |order: &[usize], microbatch: usize| wait(&order[microbatch * num_ranks..][..num_ranks]);
    let mut is_better = true;
    while is_better {
        is_better = false;
        for a in 0..order.len() {
            for b in (a / num_ranks + 1) * num_ranks..order.len() {
                let both = |order: &[usize]| wait_of(order, a / num_ranks) + wait_of(order, b / num_ranks);
                let before = both(&order);
                order.swap(a, b);
                if both(&order) < before {
                    is_better = true;
                } else {
                    order.swap(a, b);
                }
            }
        }
    }
    order
}

/// The same buckets, where bucket `order[b]` has become b.
pub(crate) fn renumbered(bucket: &[u32], order: &[usize]) -> Vec<u32> {
    let mut number = vec![0; order.len()];
    for (new, &old) in (0..).zip(order) {
        number[old] = new;
    }
    bucket.iter().map(|&bucket| number[bucket as usize]).collect()
}

/// The same buckets, as many for each rank, numbered so that the ranks' sums are even: heaviest first, each to the rank
/// with the least load that still takes one.
pub(crate) fn dealt(bucket: &[u32], load: &[u64], num_ranks: u32) -> Vec<u32> {
    let (num_ranks, num_each) = (num_ranks as usize, load.len() / num_ranks as usize);
    let mut heaviest: Vec<usize> = (0..load.len()).collect();
    heaviest.sort_by_key(|&bucket| Reverse(load[bucket]));
    let mut ranks = vec![(0_u64, Vec::with_capacity(num_each)); num_ranks];
    let mut order = vec![0; load.len()];
    for bucket in heaviest {
        let open = ranks.iter_mut().enumerate().filter(|(_, (_, taken))| taken.len() < num_each);
        let (rank, (sum, taken)) = open.min_by_key(|(_, (sum, _))| *sum).expect("as many places as buckets");
        order[taken.len() * num_ranks + rank] = bucket;
        *sum += load[bucket];
        taken.push(bucket);
    }
    renumbered(bucket, &order)
}
