//! Buckets of unequal speed: samples move from the buckets of slow ranks to those of others.

use crate::assignment::sums;
use crate::costs::Costs;
use crate::limits::Limits;
use crate::meets::Meets;

/// How slow each bucket is, in thousandths: 1,300 takes 1.3 times as long as 1,000.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slowness {
    /// For the encoder's work.
    pub encoder: Vec<u32>,
    /// For the LLM backbone's.
    pub llm: Vec<u32>,
}

/// Sums of both costs in a bucket, and its sizes.
type Load = ([u64; 2], [u64; 2]);

/// Moves and exchanges weighed, at most: some 20 ms on one core.
const WEIGHED_MAX: u64 = 4_000_000;

/// Improves `bucket` where buckets are not equally fast: single samples move or change places as long as that makes the
/// worse of the two buckets lighter, the heaviest bucket first. Never worse than what it began with, and no bucket passes
/// a cap that it kept.
///
/// A bucket weighs what it takes: with [`Meets::Step`] its sum of both costs, else the larger of them, each times its
/// slowness. Buckets that a rank takes one after the other are made even one by one.
///
/// *Complexity*: O(samples x samples of a bucket) for each step of the search, within a fixed number of steps.
pub fn uneven(costs: &Costs, limits: &Limits, meets: Meets, slowness: &Slowness, bucket: &mut [u32]) {
    let num_buckets = limits.num_buckets as usize;
    let is_of = |list: &[u32]| list.len() == num_buckets;
    if !is_of(&slowness.encoder) || !is_of(&slowness.llm) || costs.num_samples() != bucket.len() {
        return;
    }
    let cost = |at: usize| [costs.encoder_ns[at], costs.llm_ns[at]];
    let of = |column: &Option<Vec<u64>>, at: usize| column.as_ref().map_or(0, |column| column[at]);
    let size = |at: usize| [of(&costs.bytes, at), of(&costs.tokens, at)];
    let caps = [limits.bucket_bytes_max.unwrap_or(u64::MAX), limits.bucket_tokens_max.unwrap_or(u64::MAX)];
    let weigh = |place: usize, load: [u64; 2]| -> u128 {
        let encoder = u128::from(load[0]) * u128::from(slowness.encoder[place]);
        let llm = u128::from(load[1]) * u128::from(slowness.llm[place]);
        if meets == Meets::Step { encoder + llm } else { encoder.max(llm) }
    };
    let mut members = vec![Vec::new(); num_buckets];
    for (at, &place) in bucket.iter().enumerate() {
        members[place as usize].push(at);
    }
    let column = |column: &Option<Vec<u64>>| {
        column.as_ref().map_or_else(|| vec![0; num_buckets], |c| sums(c, bucket, limits.num_buckets))
    };
    let (encoder, llm) = (
        sums(&costs.encoder_ns, bucket, limits.num_buckets),
        sums(&costs.llm_ns, bucket, limits.num_buckets),
    );
    let (bytes, tokens) = (column(&costs.bytes), column(&costs.tokens));
    let mut loads: Vec<Load> =
        (0..num_buckets).map(|at| ([encoder[at], llm[at]], [bytes[at], tokens[at]])).collect();
    let mut weighed = 0;
    let mut is_stuck = vec![false; num_buckets];
    while weighed < WEIGHED_MAX {
        let heaviest = (0..num_buckets).filter(|&b| !is_stuck[b]).max_by_key(|&b| (weigh(b, loads[b].0), b));
        let Some(from) = heaviest else { break };
        let worst = weigh(from, loads[from].0);
        let mut best: Option<(u128, usize, usize, Option<usize>)> = None;
        for &own in &members[from] {
            for to in (0..num_buckets).filter(|&to| to != from) {
                for other in std::iter::once(None).chain(members[to].iter().copied().map(Some)) {
                    weighed += 1;
                    let after = exchanged(
                        loads[from],
                        loads[to],
                        (cost(own), size(own)),
                        other.map(|o| (cost(o), size(o))),
                    );
                    let [a, b] = after;
                    if !within(a.1, loads[from].1, caps) || !within(b.1, loads[to].1, caps) {
                        continue;
                    }
                    let value = weigh(from, a.0).max(weigh(to, b.0));
                    if value < worst && best.is_none_or(|best| value < best.0) {
                        best = Some((value, own, to, other));
                    }
                }
            }
        }
        let Some((_, own, to, other)) = best else {
            is_stuck[from] = true;
            continue;
        };
        let [a, b] =
            exchanged(loads[from], loads[to], (cost(own), size(own)), other.map(|o| (cost(o), size(o))));
        (loads[from], loads[to]) = (a, b);
        members[from].retain(|&at| at != own);
        members[to].push(own);
        bucket[own] = to as u32;
        if let Some(other) = other {
            members[to].retain(|&at| at != other);
            members[from].push(other);
            bucket[other] = from as u32;
        }
        // What did not help against these two may help now.
        is_stuck.fill(false);
    }
}

/// Both buckets after `own` went to the second one, and `other` came back for it.
fn exchanged(from: Load, to: Load, own: Load, other: Option<Load>) -> [Load; 2] {
    let other = other.unwrap_or_default();
    let shift =
        |a: [u64; 2], minus: [u64; 2], plus: [u64; 2]| [a[0] - minus[0] + plus[0], a[1] - minus[1] + plus[1]];
    [
        (shift(from.0, own.0, other.0), shift(from.1, own.1, other.1)),
        (shift(to.0, other.0, own.0), shift(to.1, other.1, own.1)),
    ]
}

/// Whether a bucket keeps its caps, or breaks none more than it did.
fn within(after: [u64; 2], before: [u64; 2], caps: [u64; 2]) -> bool {
    (0..2).all(|c| after[c] <= caps[c].max(before[c]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn weights(costs: &Costs, meets: Meets, slowness: &Slowness, bucket: &[u32]) -> Vec<u64> {
        let count = slowness.llm.len() as u32;
        let (encoder, llm) = (sums(&costs.encoder_ns, bucket, count), sums(&costs.llm_ns, bucket, count));
        let weigh = |b: usize| {
            let (e, l) = (encoder[b] * u64::from(slowness.encoder[b]), llm[b] * u64::from(slowness.llm[b]));
            if meets == Meets::Step { e + l } else { e.max(l) }
        };
        (0..count as usize).map(weigh).collect()
    }

    /// By hand: 11 equal samples on a bucket that takes 1.5 times as long and two others: work in proportion to 2 : 3 : 3
    /// is 2.75 : 4.1 : 4.1, so 3 x 1.5 = 4.5 against 4.
    #[test]
    fn a_slow_bucket_gets_less() {
        let costs = Costs { encoder_ns: vec![0; 11], llm_ns: vec![10; 11], ..Costs::default() };
        let slowness = Slowness { encoder: vec![1_000; 3], llm: vec![1_500, 1_000, 1_000] };
        let mut bucket = vec![0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1];
        uneven(&costs, &Limits::new(11, 3), Meets::Pipeline, &slowness, &mut bucket);
        let count = |of: u32| bucket.iter().filter(|&&b| b == of).count();
        assert_eq!([count(0), count(1), count(2)], [3, 4, 4]);
    }

    proptest! {
        /// Never worse, never over a cap that was kept, and each sample in one bucket; with many small samples near the
        /// even answer.
        #[test]
        fn it_is_sound(
            samples in prop::collection::vec((0u64..60, 1u64..90, 1u64..9), 2..60),
            slowness in prop::collection::vec((1_000u32..2_500, 1_000u32..2_500), 2..5),
            is_step in any::<bool>()
        ) {
            let costs = Costs {
                encoder_ns: samples.iter().map(|s| s.0).collect(),
                llm_ns: samples.iter().map(|s| s.1).collect(),
                tokens: Some(samples.iter().map(|s| s.2).collect()),
                bytes: None,
            };
            let count = slowness.len() as u32;
            let slowness = Slowness {
                encoder: slowness.iter().map(|s| s.0).collect(),
                llm: slowness.iter().map(|s| s.1).collect(),
            };
            let start: Vec<u32> = (0..samples.len() as u32).map(|at| at % count).collect();
            let tokens = sums(costs.tokens.as_ref().unwrap(), &start, count);
            let cap = tokens.iter().max().copied().unwrap() + 3;
            let limits = Limits { bucket_tokens_max: Some(cap), ..Limits::new(samples.len(), count) };
            let meets = if is_step { Meets::Step } else { Meets::Pipeline };
            let mut bucket = start.clone();
            uneven(&costs, &limits, meets, &slowness, &mut bucket);
            let sorted = |bucket: &[u32]| {
                let mut weights = weights(&costs, meets, &slowness, bucket);
                weights.sort_unstable_by(|a, b| b.cmp(a));
                weights
            };
            prop_assert!(sorted(&bucket) <= sorted(&start));
            prop_assert!(sums(costs.tokens.as_ref().unwrap(), &bucket, count).iter().all(|&t| t <= cap));
            // No single move is left that would help the worst bucket.
            let weights = weights(&costs, meets, &slowness, &bucket);
            let worst = (0..count as usize).max_by_key(|&b| weights[b]).unwrap();
            if !is_step {
                for at in (0..samples.len()).filter(|&at| bucket[at] as usize == worst) {
                    for to in (0..count).filter(|&to| to as usize != worst) {
                        let mut moved = bucket.clone();
                        moved[at] = to;
                        let after = super::tests::weights(&costs, meets, &slowness, &moved);
                        let has_room = sums(costs.tokens.as_ref().unwrap(), &moved, count)[to as usize] <= cap;
                        prop_assert!(!has_room || after[worst].max(after[to as usize]) >= weights[worst]);
                    }
                }
            }
        }
    }
}
