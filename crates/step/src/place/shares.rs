//! Shares: the samples of a microbatch are spread over the encoder replicas. Large ones are cut into runs of parts.

use dflop_types::PartRange;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// For each replica what it encodes: positions in a list of samples, each with a run of parts; `None`: all parts.
pub(crate) type Shares = Vec<Vec<(usize, Option<PartRange>)>>;

/// The times of the parts of a sample, in order, as runs of equal parts: (number of parts, nanoseconds of each).
pub(crate) type PartCosts = Vec<(u32, u64)>;

/// Sum of `costs`.
pub(crate) fn total(costs: &[(u32, u64)]) -> u64 {
    costs.iter().fold(0, |sum: u64, &(count, ns)| sum.saturating_add(ns.saturating_mul(u64::from(count))))
}

pub(crate) fn num_parts(costs: &[(u32, u64)]) -> u32 {
    costs.iter().map(|&(count, _)| count).sum()
}

/// Time of the first `parts` parts.
fn before(costs: &[(u32, u64)], parts: u32) -> u64 {
    let mut left = parts;
    costs.iter().fold(0, |sum: u64, &(count, ns)| {
        let taken = left.min(count);
        left -= taken;
        sum.saturating_add(ns.saturating_mul(u64::from(taken)))
    })
}

/// The number of parts, from the first on, whose time together is nearest to `target_ns`.
fn nearest(costs: &[(u32, u64)], target_ns: u64) -> u32 {
    let (mut parts, mut left) = (0, target_ns);
    for &(count, ns) in costs {
        let whole = ns.saturating_mul(u64::from(count));
        if whole > left {
            // Rounded: a part counts if at least half of it lies within the target.
            return parts + u32::try_from((left + ns / 2) / ns).unwrap_or(count).min(count);
        }
        left -= whole;
        parts += count;
    }
    parts
}

/// Shares of whole samples: `replica_of` names the replica of each sample.
pub(crate) fn whole(replica_of: &[u32], replicas: u32) -> Shares {
    let mut shares = vec![Vec::new(); replicas as usize];
    for (position, &replica) in replica_of.iter().enumerate() {
        shares[replica as usize].push((position, None));
    }
    shares
}

/// Spreads the samples over `replicas`, in runs of parts. No replica takes longer than the even share plus one part. Only
/// samples of a single part may exceed that: they are placed first, by LPT.
///
/// ```text
/// T     even share = time of all samples / replicas
/// room  of a replica = T - its load
/// a sample that fits into the largest room goes there whole. Else it fills the largest rooms one after the other, and
/// is cut between the parts nearest to the end of a room: at most half a part too much at either end of a run
/// ```
///
/// *Complexity*: O(r + n log r) for r replicas and n samples, and O(log r + g) for each run of a sample with g groups of equal
/// parts.
pub(crate) fn spread(costs: &[&PartCosts], replicas: u32) -> Shares {
    spread_over(costs, &vec![0; (replicas as usize).max(1)])
}

/// As `spread`, for replicas that are not equally fast. `slowness` is that of each replica in thousandths: 1,200 takes 1.2
/// times as long. A slow replica begins with a load, so that it gets less work:
///
/// ```text
/// C = sum / (1/s_1 + ... + 1/s_n)     the time that all replicas take if they end together
/// replica k begins with C - C / s_k
/// ```
pub(crate) fn spread_by_speed(costs: &[&PartCosts], slowness: &[u32]) -> Shares {
    let sum = costs.iter().fold(0, |sum: u64, costs| sum.saturating_add(total(costs)));
    let slow = |&s: &u32| f64::from(s.max(1)) / 1_000.0;
    let all_ns = sum as f64 / slowness.iter().map(|s| 1.0 / slow(s)).sum::<f64>();
    let lacks: Vec<f64> = slowness.iter().map(|s| all_ns - all_ns / slow(s)).collect();
    let least = lacks.iter().copied().fold(0.0, f64::min);
    spread_over(costs, &lacks.iter().map(|ns| (ns - least).round() as u64).collect::<Vec<u64>>())
}

/// As `spread`, for replicas that already have the loads `load_ns`.
fn spread_over(costs: &[&PartCosts], load_ns: &[u64]) -> Shares {
    let replicas = load_ns.len();
    let of_costs = costs.iter().map(|costs| total(costs));
    let sum = of_costs.chain(load_ns.iter().copied()).fold(0, u64::saturating_add);
    let even_ns = sum.div_ceil(replicas as u64);
    let mut order: Vec<usize> = (0..costs.len()).collect();
    order.sort_by_key(|&at| (num_parts(costs[at]) > 1, Reverse(total(costs[at])), at));
    let mut shares: Shares = vec![Vec::new(); replicas];
    // The replica with the largest room is on top; of equal ones that with fewer shares.
    let of_replica = |(replica, &ns): (usize, &u64)| Reverse((ns, 0, replica));
    let mut by_room: BinaryHeap<Reverse<(u64, usize, usize)>> =
        load_ns.iter().enumerate().map(of_replica).collect();
    let mut visited = Vec::new();
    for at in order {
        let (costs, sample_ns) = (costs[at], total(costs[at]));
        let parts = num_parts(costs);
        let mut freest = by_room.peek_mut().expect("there is a replica");
        let Reverse((freest_ns, num_shares, replica)) = &mut *freest;
        if parts < 2 || freest_ns.saturating_add(sample_ns) <= even_ns {
            shares[*replica].push((at, None));
            (*freest_ns, *num_shares) = (freest_ns.saturating_add(sample_ns), *num_shares + 1);
            continue;
        }
        drop(freest);
        let (mut first, mut filled_ns) = (0, 0u64);
        while let Some(Reverse((mut load_ns, mut num_shares, replica))) = by_room.pop() {
            filled_ns = filled_ns.saturating_add(even_ns.saturating_sub(load_ns));
            // The rooms together are large enough for all samples that are left. The last replica takes the rest in any
            // case, because sums that pass 64 bits are cut off.
            let is_last = filled_ns >= sample_ns || by_room.is_empty();
            let end = if is_last { parts } else { nearest(costs, filled_ns) };
            if end > first {
                let is_whole = first == 0 && end == parts;
                let range = (!is_whole).then_some(PartRange { first, count: end - first });
                shares[replica].push((at, range));
                let run_ns = before(costs, end) - before(costs, first);
                (load_ns, num_shares) = (load_ns.saturating_add(run_ns), num_shares + 1);
                first = end;
            }
            visited.push(Reverse((load_ns, num_shares, replica)));
            if first == parts {
                break;
            }
        }
        by_room.extend(visited.drain(..));
    }
    // Shares stand in the order of the samples, as whole samples would.
    for share in &mut shares {
        share.sort_unstable_by_key(|&(at, _)| at);
    }
    shares
}

/// Time of the fullest replica.
pub(crate) fn fullest_ns(costs: &[&PartCosts], shares: &Shares) -> u64 {
    let run_ns = |&(at, range): &(usize, Option<PartRange>)| match range {
        None => total(costs[at]),
        Some(r) => before(costs[at], r.first + r.count) - before(costs[at], r.first),
    };
    let load_ns = |share: &Vec<_>| share.iter().map(run_ns).fold(0, u64::saturating_add);
    shares.iter().map(load_ns).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn loads(costs: &[&PartCosts], shares: &Shares) -> Vec<u64> {
        shares.iter().map(|share| fullest_ns(costs, &vec![share.clone()])).collect()
    }

    #[test]
    fn a_run_ends_where_its_parts_are_nearest() {
        // Three parts of 10, then one of 4.
        let costs = [(3, 10), (1, 4)];
        assert_eq!(
            [0, 4, 5, 14, 15, 30, 31, 32, 34, 99].map(|ns| nearest(&costs, ns)),
            [0, 0, 1, 1, 2, 3, 3, 4, 4, 4]
        );
        assert_eq!([0, 1, 3, 4, 9].map(|parts| before(&costs, parts)), [0, 10, 30, 34, 34]);
        assert_eq!(nearest(&[(5, 0), (2, 3)], 0), 5);
    }

    /// By hand: 64 frames of 10 beside an image of 100 on 4 replicas, 185 each. The image first; then rooms of 185, 185,
    /// 185 and 85 end at frames 18.5, 37 and 55.5.
    #[test]
    fn a_giant_fills_the_rooms_of_all_replicas() {
        let (image, video) = (vec![(1, 100)], vec![(64, 10)]);
        let costs = [&image, &video];
        let shares = spread(&costs, 4);
        let run = |first, count| vec![(1, Some(PartRange { first, count }))];
        assert_eq!(
            shares,
            [
                vec![(0, None), (1, Some(PartRange { first: 56, count: 8 }))],
                run(0, 19),
                run(19, 18),
                run(37, 19)
            ]
        );
        assert_eq!(loads(&costs, &shares), [180, 190, 180, 190]);
    }

    /// By hand: 110 frames of 10 on replicas that take 1, 1 and 1.2 of the usual time: C = 1,100 / (2 + 5/6) = 388, so the
    /// slow one gets 323 and the others 388.
    #[test]
    fn a_slow_replica_encodes_less() {
        let video = vec![(110, 10)];
        let shares = spread_by_speed(&[&video], &[1_000, 1_000, 1_200]);
        assert_eq!(loads(&[&video], &shares), [390, 390, 320]);
        let even = spread_by_speed(&[&video], &[1_000, 1_000]);
        assert_eq!(even, spread(&[&video], 2));
    }

    #[test]
    fn what_is_even_stays_whole() {
        let video = vec![(8, 10)];
        let shares = spread(&[&video, &video, &video, &video], 2);
        assert_eq!(shares, [vec![(0, None), (2, None)], vec![(1, None), (3, None)]]);
        assert_eq!(spread(&[], 3), vec![Vec::new(); 3]);
        assert_eq!(spread(&[&video], 1), [[(0, None)]]);
    }

    proptest! {
        /// Each part is encoded once. The fullest replica has at most the even share and one part, unless samples of a single
        /// part alone are more. A giant is spread over every replica.
        #[test]
        fn shares_are_even_and_cover_each_part_once(
            samples in prop::collection::vec(prop::collection::vec((1u32..40, 0u64..30), 1..4), 0..12),
            giant in prop::option::of(100u32..4_000),
            replicas in 1u32..9
        ) {
            let mut samples = samples;
            samples.extend(giant.map(|frames| vec![(frames, 1_000)]));
            let costs: Vec<&PartCosts> = samples.iter().collect();
            let shares = spread(&costs, replicas);
            prop_assert_eq!(shares.len(), replicas as usize);
            for (at, costs) in costs.iter().enumerate() {
                let of_sample = shares.iter().flatten().filter(|(sample, _)| *sample == at);
                let all = PartRange { first: 0, count: num_parts(costs) };
                let mut runs: Vec<PartRange> = of_sample.map(|(_, range)| range.unwrap_or(all)).collect();
                runs.sort_unstable();
                let mut next = 0;
                for run in runs {
                    prop_assert_eq!(run.first, next);
                    prop_assert!(run.count > 0);
                    next += run.count;
                }
                prop_assert_eq!(next, num_parts(costs));
            }
            let sum: u64 = costs.iter().map(|costs| total(costs)).sum();
            let even_ns = sum.div_ceil(u64::from(replicas));
            let part_ns = samples.iter().flatten().map(|&(_, ns)| ns).max().unwrap_or(0);
            let single: Vec<&PartCosts> = costs.iter().copied().filter(|c| num_parts(c) < 2).collect();
            let single_ns = fullest_ns(&single, &spread(&single, replicas));
            prop_assert!(fullest_ns(&costs, &shares) <= (even_ns + part_ns).max(single_ns));
            if giant.is_some_and(|frames| frames >= 40 * replicas) {
                let at = costs.len() - 1;
                prop_assert!(shares.iter().all(|share| share.iter().any(|(sample, _)| *sample == at)));
            }
        }
    }
}
