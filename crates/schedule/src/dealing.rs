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
    let tops_of =
        |order: &[usize], microbatch: usize| Top::of(loads, &order[microbatch * num_ranks..][..num_ranks]);
    let mut tops: Vec<[Top; 2]> = (0..order.len() / num_ranks).map(|at| tops_of(&order, at)).collect();
    let wait = |tops: &[Top; 2]| tops[0].most + tops[1].most;
    let mut is_better = true;
    while is_better {
        is_better = false;
        for a in 0..order.len() {
            for b in (a / num_ranks + 1) * num_ranks..order.len() {
                let [of_a, of_b] = [a / num_ranks, b / num_ranks];
                let (out, into) = (order[a], order[b]);
                let after = |tops: &[Top; 2], out: usize, into: usize| -> u64 {
                    (0..2).map(|c| tops[c].without(out).max(loads[into][c])).sum()
                };
                let before = wait(&tops[of_a]) + wait(&tops[of_b]);
                if after(&tops[of_a], out, into) + after(&tops[of_b], into, out) < before {
                    is_better = true;
                    order.swap(a, b);
                    (tops[of_a], tops[of_b]) = (tops_of(&order, of_a), tops_of(&order, of_b));
                }
            }
        }
    }
    order
}

/// The largest load of a microbatch on one component, and what is the largest without the bucket that has it.
#[derive(Debug, Clone, Copy, Default)]
struct Top {
    most: u64,
    bucket: usize,
    second: u64,
}

impl Top {
    /// Of these buckets, for the encoder and for the LLM backbone.
    fn of(loads: &[[u64; 2]], buckets: &[usize]) -> [Self; 2] {
        let mut tops = [Self::default(); 2];
        for (c, top) in tops.iter_mut().enumerate() {
            for &bucket in buckets {
                let load = loads[bucket][c];
                if load >= top.most {
                    *top = Self { most: load, bucket, second: top.most };
                } else {
                    top.second = top.second.max(load);
                }
            }
        }
        tops
    }

    const fn without(&self, bucket: usize) -> u64 {
        if bucket == self.bucket { self.second } else { self.most }
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::{below, generator};

    /// The exchanges in the words of the doc: what two microbatches wait is added up anew for each pair.
    fn by_the_rule(loads: &[[u64; 2]], num_ranks: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..loads.len()).collect();
        order.sort_by_key(|&bucket| Reverse(loads[bucket][0] + loads[bucket][1]));
        let wait = |order: &[usize], at: usize| -> u64 {
            let own = &order[at / num_ranks * num_ranks..][..num_ranks];
            (0..2).map(|c| own.iter().map(|&bucket| loads[bucket][c]).max().unwrap_or(0)).sum()
        };
        let mut is_better = true;
        while is_better {
            is_better = false;
            for a in 0..order.len() {
                for b in (a / num_ranks + 1) * num_ranks..order.len() {
                    let before = wait(&order, a) + wait(&order, b);
                    order.swap(a, b);
                    if wait(&order, a) + wait(&order, b) < before {
                        is_better = true;
                    } else {
                        order.swap(a, b);
                    }
                }
            }
        }
        order
    }

    #[test]
    fn pairs_are_exchanged_as_the_rule_says() {
        let mut random = generator(3);
        for (num_ranks, count, end) in [(1, 5, 9), (2, 6, 4), (3, 4, 100), (5, 3, 3), (4, 8, 1_000)] {
            let mut load = || below(&mut random, end) as u64;
            let loads: Vec<[u64; 2]> = (0..num_ranks * count).map(|_| [load(), load()]).collect();
            assert_eq!(microbatches(&loads, num_ranks), by_the_rule(&loads, num_ranks));
        }
    }
}
