//! The order of filled microbatches: a search that knows nothing of pipelines but what the caller's makespan says.

use crate::random::{below, generator};
use rand_chacha::ChaCha8Rng;

/// Failures in a row, per microbatch, after which the search leaves an order and starts near the best one.
const PATIENCE: u64 = 12;

/// The best order of `num` microbatches found, as positions in the given order `0..num`; never one with a larger
/// makespan than the given order.
///
/// `makespan` is called at most `max_evaluations` times, each time with a permutation of `0..num`. Where the
/// loads of the microbatches are known, [`order_microbatches_from`] with [`small_ends`] begins nearer to the goal.
///
/// *Complexity*: `max_evaluations` calls of `makespan`, O(num) beside each.
///
/// # Examples
/// ```
/// // What the first and the last microbatch cost is paid in full; the rest is hidden.
/// let cost = [9_u64, 1, 5, 2];
/// let ends = |order: &[usize]| cost[order[0]] + cost[order[3]];
/// let order = dflop_schedule::order_microbatches(4, 0, 200, ends);
/// assert_eq!(ends(&order), 3);
/// ```
pub fn order_microbatches(
    num: usize,
    seed: u64,
    max_evaluations: u64,
    makespan: impl FnMut(&[usize]) -> u64,
) -> Vec<usize> {
    order_microbatches_from(&[(0..num).collect()], seed, max_evaluations, makespan)
}

/// The best order found when the search may begin from any of `starts`; never worse than the first of them.
///
/// Every start is judged, in turn; the search begins from the best (the first of equals). Random exchanges and
/// insertions are kept if the makespan does not grow; after many failures the search goes back to the
/// best order and shakes it. Returns an empty order if there are no starts.
///
/// *Complexity*: at most `max_evaluations` calls of `makespan`, O(num) beside each.
///
/// # Examples
/// ```
/// use dflop_schedule::{order_microbatches_from, small_ends};
/// let load = [4_u64, 9, 1, 3];
/// let starts = [vec![0, 1, 2, 3], small_ends(&load)];
/// let order = order_microbatches_from(&starts, 0, 2, |order| load[order[0]] + load[order[3]]);
/// assert_eq!(order, [2, 0, 1, 3]);
/// ```
pub fn order_microbatches_from(
    starts: &[Vec<usize>],
    seed: u64,
    max_evaluations: u64,
    mut makespan: impl FnMut(&[usize]) -> u64,
) -> Vec<usize> {
    let Some(given) = starts.first() else { return Vec::new() };
    let num = given.len();
    if num < 2 || max_evaluations < 2 {
        return given.clone();
    }
    let mut best = given.clone();
    let mut least = makespan(&best);
    let mut evaluations = 1;
    for start in starts.iter().skip(1) {
        if evaluations == max_evaluations {
            break;
        }
        evaluations += 1;
        let found = makespan(start);
        if found < least {
            (least, best) = (found, start.clone());
        }
    }
    let mut random = generator(seed);
    let (mut current, mut current_makespan) = (best.clone(), least);
    let mut failures = 0;
    while evaluations < max_evaluations {
        let mut next = current.clone();
        change(&mut next, &mut random);
        let is_shaken = failures >= PATIENCE * num as u64;
        if is_shaken {
            next.clone_from(&best);
            for _ in 0..2 + below(&mut random, 2) {
                change(&mut next, &mut random);
            }
        }
        evaluations += 1;
        let found = makespan(&next);
        // Of equals the newer one, so that the search walks along plateaus: most orders share a makespan.
        if is_shaken || found <= current_makespan {
            failures = if found < current_makespan || is_shaken { 0 } else { failures + 1 };
            (current, current_makespan) = (next, found);
        } else {
            failures += 1;
        }
        if current_makespan < least {
            least = current_makespan;
            best.clone_from(&current);
        }
    }
    best
}

/// The order with small loads at both ends and the largest in the middle, as positions in `load_ns`.
///
/// A pipeline fills with its first microbatches and drains with its last: while it does, all other stages wait.
/// Of the samples in ascending order the even ones go to the front, the odd ones to the back.
///
/// *Complexity*: O(n log n).
///
/// # Examples
/// ```
/// assert_eq!(dflop_schedule::small_ends(&[30, 10, 50, 20, 40]), [1, 0, 2, 4, 3]);
/// ```
pub fn small_ends(load_ns: &[u64]) -> Vec<usize> {
    let mut ascending: Vec<usize> = (0..load_ns.len()).collect();
    ascending.sort_by_key(|&i| (load_ns[i], i));
    let front = ascending.iter().step_by(2);
    let back = ascending.iter().skip(1).step_by(2).rev();
    front.chain(back).copied().collect()
}

/// Exchanges two places, or takes one out and inserts it elsewhere. `order` has at least two places.
fn change(order: &mut [usize], random: &mut ChaCha8Rng) {
    let from = below(random, order.len());
    // A shift by 1 to len - 1, around the end: never the same place.
    let to = (from + 1 + below(random, order.len() - 1)) % order.len();
    if below(random, 2) == 0 {
        order.swap(from, to);
    } else if from < to {
        order[from..=to].rotate_left(1);
    } else {
        order[to..=from].rotate_right(1);
    }
}
