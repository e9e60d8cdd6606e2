//! Lower bounds of the worst bucket: what no assignment can beat, each with its proof.
//!
//! Every bound looks at one column of costs. It is computed for the encoder, for the LLM, and for half of their sum, because
//! the worse of two loads is at least their mean. The largest of all these bounds is used.

use crate::bisection::least;
use crate::sorted_batch::{SortedBatch, plus, worse};

/// A load, in nanoseconds, that the worst bucket of any assignment reaches.
///
/// `reached` is the worst load of some assignment: no bound is looked for above it.
///
/// *Complexity*: O(n log n + (n + m log n) log `reached`).
pub(crate) fn lower_bound(batch: &SortedBatch, reached: i64) -> i64 {
    let m = batch.num_buckets;
    // Largest sample: some bucket holds it.
    let largest = batch.cost.iter().copied().map(worse).max().unwrap_or(0);
    let columns: [Vec<i64>; 3] = [0, 1, 2].map(|column| {
        let mut cost: Vec<i64> =
            batch.cost.iter().map(|c| if column == 2 { c[0] + c[1] } else { c[column] }).collect();
        cost.sort_unstable_by(|a, b| b.cmp(a));
        cost
    });
    let before = columns.each_ref().map(|cost| running_sums(cost));
    let [encoder, llm, both] = before.each_ref().map(|before| average(before, m).max(pigeonhole(before, m)));
    let mut known = largest.max(encoder).max(llm).max(half(both));
    for ((cost, before), times) in columns.iter().zip(&before).zip([1, 1, 2]) {
        known = bisect(known, reached, |capacity| packing_fails(cost, before, m, times * capacity));
    }
    let giants = Giants::new(batch);
    bisect(known, reached, |capacity| giants.fail(capacity))
}

/// `known`, or one more than a load above it (below `reached`) at which buckets provably do not suffice.
///
/// Every load that fails is proof on its own, so bisection may miss the best bound and never gives a wrong one.
fn bisect(known: i64, reached: i64, fails: impl Fn(i64) -> bool) -> i64 {
    let (low, high) = (known.cast_unsigned(), reached.max(known).cast_unsigned());
    least(low, high, |load| !fails(load.cast_signed())).cast_signed()
}

/// The sums of the first 0, 1, 2, .. of `values`.
fn running_sums(values: &[i64]) -> Vec<i64> {
    let mut sum = 0;
    let sums = values.iter().map(|value| {
        sum += value;
        sum
    });
    std::iter::once(0).chain(sums).collect()
}

fn signed(count: usize) -> i64 {
    count.cast_signed() as i64
}

fn half(sum: i64) -> i64 {
    sum / 2 + sum % 2
}

/// The mean load, rounded up: not all buckets are below their mean, and loads are whole.
fn average(before: &[i64], m: usize) -> i64 {
    let (total, m) = (before[before.len() - 1], signed(m));
    total / m + i64::from(total % m > 0)
}

/// For each k, the sum of the k + 1 least of the k m + 1 largest costs: one of m buckets holds k + 1 of those.
/// `before[i]` is the sum of the i largest. *Complexity*: O(n / m).
fn pigeonhole(before: &[i64], m: usize) -> i64 {
    (1..).map_while(|k| Some(before.get(k * m + 1)? - before[k * (m - 1)])).max().unwrap_or(0)
}

/// Whether some threshold proves that buckets of `capacity` C do not suffice on one column.
///
/// Take a threshold a <= C / 2, and cut the costs into: large (over C - a), half (over C / 2), small (at least a).
/// Large and half ones need a bucket each, and large ones share it with none of the small. So the small ones
/// must fit into the room the half ones leave, and into the buckets that neither has:
///
/// ```text
/// sum(small) <= C (m - #large) - sum(half)         and         #large + #half <= m
/// ```
///
/// `cost` descends, `before[i]` is the sum of its first i. *Complexity*: O(n).
///
/// *References*: Martello and Toth, "Knapsack Problems", 1990, section 8.3 (bound L2 of bin packing).
fn packing_fails(cost: &[i64], before: &[i64], m: usize, capacity: i64) -> bool {
    let over_half = cost.partition_point(|&c| 2 * c > capacity);
    if over_half > m {
        return true;
    }
    // Thresholds worth a look are the costs up to C / 2, descending; the large ones become fewer as they do.
    let mut large = over_half;
    (over_half..cost.len()).any(|smallest| {
        while large > 0 && cost[large - 1] <= capacity - cost[smallest] {
            large -= 1;
        }
        let needed = before[smallest + 1] - before[large];
        needed > capacity.saturating_mul(signed(m - large))
    })
}

/// What samples that are giants in one resource waste of the other.
///
/// Let r be a resource, s the other, and G some samples each over C / 2 in r. Each needs a bucket of its own,
/// and only samples of at most C / 2 may lie beside them, which have together at most the room
/// R = sum over G of C less the cost in r. The most of s that fits into R is a knapsack, K(R), filled in parts by
/// the ratio of s to r. All other work of s must fit into the other buckets:
///
/// ```text
/// (sum of s over all) - (sum of s over G) - K(R) <= C (m - |G|)
/// ```
///
/// A video that fills its bucket on the encoder alone leaves that bucket's LLM time to what little the encoder
/// can still take. *Complexity*: O(n log n) once, O(n + m log n) for each C.
struct Giants<'a> {
    batch: &'a SortedBatch,
    /// Samples by llm / encoder, the highest ratio first.
    by_ratio: Vec<[i64; 2]>,
}

impl<'a> Giants<'a> {
    fn new(batch: &'a SortedBatch) -> Self {
        let mut by_ratio = batch.cost.clone();
        let product = |a: i64, b: i64| i128::from(a) * i128::from(b);
        by_ratio.retain(|&cost| worse(cost) > 0);
        by_ratio.sort_unstable_by(|a, b| product(b[1], a[0]).cmp(&product(a[1], b[0])));
        Self { batch, by_ratio }
    }

    /// Whether giants of either resource prove that buckets of `capacity` do not suffice.
    fn fail(&self, capacity: i64) -> bool {
        [0, 1].into_iter().any(|r| self.fail_in(r, capacity))
    }

    fn fail_in(&self, r: usize, capacity: i64) -> bool {
        let (s, m) = (1 - r, self.batch.num_buckets);
        let sorted = &self.batch.sorted[r];
        let small = sorted.partition_point(|(cost, _)| 2 * cost[r] <= capacity);
        let giants = &sorted[small..];
        if giants.is_empty() {
            return false;
        }
        let order: Box<dyn Iterator<Item = &[i64; 2]>> =
            if r == 0 { Box::new(self.by_ratio.iter()) } else { Box::new(self.by_ratio.iter().rev()) };
        let mut fills = vec![[0, 0]];
        for cost in order.filter(|cost| 2 * cost[r] <= capacity) {
            fills.push(plus(fills[fills.len() - 1], *cost));
        }
        let knapsack = |room: i64| {
            let next = fills.partition_point(|fill| fill[r] <= room);
            let whole = fills[next - 1];
            let Some(&over) = fills.get(next) else { return whole[s] };
            let part = i128::from(room - whole[r]) * i128::from(over[s] - whole[s]);
            // Rounded up: a bound must not promise more than the knapsack holds.
            whole[s] + (part / i128::from(over[r] - whole[r])) as i64 + 1
        };
        let (mut left, mut room) = (self.batch.total[s], 0_i64);
        for (number, (cost, _)) in giants.iter().rev().take(m).enumerate() {
            left -= cost[s];
            room = room.saturating_add(capacity - cost[r]);
            let others = capacity.saturating_mul(signed(m - number - 1));
            if left - knapsack(room) > others {
                return true;
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::costs::Costs;
    use crate::limits::Limits;

    fn bound(encoder_ns: &[u64], llm_ns: &[u64], m: u32) -> i64 {
        let costs =
            Costs { encoder_ns: encoder_ns.to_vec(), llm_ns: llm_ns.to_vec(), bytes: None, tokens: None };
        let total: u64 = encoder_ns.iter().chain(llm_ns).sum();
        lower_bound(&SortedBatch::new(&costs, &Limits::new(llm_ns.len(), m)), total.cast_signed())
    }

    #[test]
    fn each_bound_alone_gives_its_hand_worked_value() {
        let [average, pigeonhole] =
            [average, pigeonhole].map(|of| move |cost: &[i64], m| of(&running_sums(cost), m));
        assert_eq!(average(&[5, 3, 2], 3), 4);
        // Two buckets, three of 7: two stand together. With five, three do.
        assert_eq!(pigeonhole(&[7, 7, 7], 2), 14);
        assert_eq!(pigeonhole(&[7, 7, 7, 7, 7], 2), 21);
        // The samples of rank m and m + 1 by size, although rank m + 1 is not the smallest of all.
        assert_eq!(pigeonhole(&[9, 8, 6, 5, 1], 3), 11);
        assert_eq!(pigeonhole(&[9], 1), 0);
        assert_eq!(pigeonhole(&[9, 1], 1), 10);
    }

    #[test]
    fn packing_sees_room_that_nothing_fits_into() {
        // Three of 6 fill three buckets to 6. Four of 5, no two of which fit beside a 6 below 11 (mean 9.5,
        // pairs 5 + 6), so at 10 there is room for two 5 in one bucket only: 11 is needed.
        let cost = [6, 6, 6, 5, 5, 5, 5];
        let before = running_sums(&cost);
        assert_eq!(average(&before, 4), 10);
        assert_eq!(pigeonhole(&before, 4), 10);
        assert!(packing_fails(&cost, &before, 4, 10));
        assert!(!packing_fails(&cost, &before, 4, 11));
        assert_eq!(bound(&[6, 6, 6, 5, 5, 5, 5], &[0; 7], 4), 11);
    }

    #[test]
    fn a_giant_of_one_component_wastes_the_other() {
        // Three buckets. Two videos of 10 on the encoder; ten samples of (1, 3): LLM mean 10. At 10 the videos
        // take no sample beside them, so all 30 of LLM go to one bucket. At C each takes C - 10 samples, the
        // third bucket C / 3 of them: C = 12 gives 2 + 2 + 4 < 10, C = 13 gives 3 + 3 + 4 = 10.
        let mut encoder = vec![10, 10];
        encoder.extend([1; 10]);
        let mut llm = vec![0, 0];
        llm.extend([3; 10]);
        // In parts: 6 (C - 10) + C >= 30 needs C >= 90 / 7, so 13.
        assert_eq!(bound(&encoder, &llm, 3), 13);
        assert_eq!(bound(&llm, &encoder, 3), 13);
    }

    #[test]
    fn both_components_bound_together_where_neither_does_alone() {
        // Each of three samples costs 4 + 4 somewhere; two share a bucket: 16 in two resources, 8 in one.
        assert_eq!(bound(&[8, 0, 4], &[0, 8, 4], 2), 8);
        // Five of (6, 4) or (4, 6) in two buckets: three together, 30 of both, 15 of one; means 13.
        assert_eq!(bound(&[6, 4, 6, 4, 5], &[4, 6, 4, 6, 5], 2), 15);
        assert_eq!(bound(&[], &[], 3), 0);
        assert_eq!(bound(&[0, 0], &[0, 0], 1), 0);
    }
}
