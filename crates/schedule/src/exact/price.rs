//! The sets of samples that one bucket can hold, as far as they are worth enough: a knapsack with several limits.
//!
//! Depth first, each sample taken or left, the most worth a weight first. A branch ends where even a knapsack
//! that may cut its last sample is worth too little. That knapsack has one limit, a mix of both resources: what
//! keeps both keeps every mix of them, so its worth is never below the true one.

use super::work::{PORTION, Work};
use super::{RESOURCES, Weight, fits};

/// Shares of the encoder in the mixes that are tried, in sixteenths.
const MIXES: [i64; 7] = [0, 3, 6, 8, 10, 13, 16];

/// Bits of a sum of mixed weights; lower bits of the weights go, rounded down: a mix may let in more, never less.
const MIX_BITS: u32 = 54;

/// Shown a set and its worth; gives the least worth to be shown from then on.
type Visit<'v> = dyn FnMut(i64, &[u32]) -> i64 + 'v;

/// The samples as a knapsack sees them, for one worth of each and one capacity.
pub(super) struct Knapsack<'a> {
    weight: &'a [Weight],
    room: Weight,
    /// Samples that fit alone and are worth anything, most worth a mixed weight first.
    order: Vec<u32>,
    /// Worths and mixed weights in that order: sums of the first 0, 1, 2, ..
    sum_value: Vec<i64>,
    sum_mix: Vec<i64>,
    room_mix: i64,
    /// The least of each resource that any sample from a place of the order on takes.
    least_from: Vec<Weight>,
}

/// One search through a knapsack.
struct Walk<'w, 'v, 's> {
    work: &'w mut Work<'s>,
    /// Nodes taken and not spent.
    nodes: u64,
    spent: u64,
    /// After this many the walk ends if it has shown a set.
    enough: u64,
    has_shown: bool,
    least: i64,
    chosen: Vec<u32>,
    visit: &'w mut Visit<'v>,
}

impl<'a> Knapsack<'a> {
    /// A knapsack of `room`, where sample i is worth `value[i]`, from 0 to 2^32.
    pub(super) fn new(weight: &'a [Weight], room: Weight, value: &[i64]) -> Self {
        let largest = weight.iter().map(|w| w[0].max(w[1])).fold(room[0], i64::saturating_add);
        let shift = (i64::BITS - largest.leading_zeros() + 4).saturating_sub(MIX_BITS);
        let counts = |&i: &u32| value[i as usize] > 0 && fits(&weight[i as usize], &room);
        let alone: Vec<u32> = (0..weight.len() as u32).filter(counts).collect();
        let of = |share: i64| {
            let mix = |i: u32| {
                let weight = &weight[i as usize];
                (weight[0] >> shift) * share + (weight[1] >> shift) * (16 - share)
            };
            let mut order: Vec<(i64, i64, u32)> =
                alone.iter().map(|&i| (value[i as usize], mix(i), i)).collect();
            // By whole numbers: in any other order the last sample that is cut would promise too little.
            order.sort_unstable_by(|a, b| {
                let (left, right) = (i128::from(b.0) * i128::from(a.1), i128::from(a.0) * i128::from(b.1));
                left.cmp(&right).then(a.1.cmp(&b.1)).then(a.2.cmp(&b.2))
            });
            let (mut sum_value, mut sum_mix) = (vec![0], vec![0]);
            for &(value, mix, _) in &order {
                sum_value.push(sum_value[sum_value.len() - 1] + value);
                sum_mix.push(sum_mix[sum_mix.len() - 1] + mix);
            }
            let order: Vec<u32> = order.into_iter().map(|(_, _, i)| i).collect();
            let room_mix = ((i128::from(room[0]) * 16) >> shift) as i64;
            let knapsack = Self { weight, room, order, sum_value, sum_mix, room_mix, least_from: Vec::new() };
            (knapsack.bound(0, room_mix), knapsack)
        };
        let best = MIXES.into_iter().map(of).min_by_key(|(bound, _)| *bound);
        let mut best = best.expect("there are mixes to try").1;
        let mut least = [i64::MAX; RESOURCES];
        best.least_from = best.order.iter().map(|&i| weight[i as usize]).collect();
        for here in best.least_from.iter_mut().rev() {
            for (here, least) in here.iter_mut().zip(&mut least) {
                *least = (*least).min(*here);
                *here = *least;
            }
        }
        best
    }

    /// The most that samples from place `from` of the order are worth within a mixed `room`, rounded up.
    fn bound(&self, from: usize, room: i64) -> i64 {
        let limit = self.sum_mix[from] + room;
        let next = from + self.sum_mix[from + 1..].partition_point(|&sum| sum <= limit);
        let whole = self.sum_value[next] - self.sum_value[from];
        let Some(&over) = self.sum_mix.get(next + 1) else { return whole };
        let (left, wide) = (limit - self.sum_mix[next], over - self.sum_mix[next]);
        let worth = self.sum_value[next + 1] - self.sum_value[next];
        // Worths of 32 bits keep the error of the division far below the 1 that is added.
        whole + (worth as f64 * (left as f64 / wide as f64)) as i64 + 1
    }

    /// Shows `visit` every set that fits and is worth at least `least`.
    ///
    /// Whether all were shown: false where the work was spent before, or where after `enough` nodes something
    /// had been shown.
    pub(super) fn each(&self, least: i64, work: &mut Work, enough: u64, visit: &mut Visit) -> bool {
        let mut walk =
            Walk { work, nodes: 0, spent: 0, enough, has_shown: false, least, chosen: Vec::new(), visit };
        let is_whole = self.descend(0, 0, self.room, self.room_mix, &mut walk);
        let unspent = walk.nodes;
        work.give_back(unspent);
        is_whole
    }

    /// As [`Knapsack::each`], of the sets that hold `sample`, within `nodes` nodes; what a walk of so few nodes
    /// finds is no proof.
    pub(super) fn each_with(&self, sample: u32, least: i64, work: &mut Work, nodes: u64, visit: &mut Visit) {
        let Some(place) = self.order.iter().position(|&i| i == sample) else { return };
        let mut left = self.room;
        for (left, weight) in left.iter_mut().zip(self.weight[sample as usize]) {
            *left -= weight;
        }
        let nodes = work.take(nodes);
        let mut walk =
            Walk { work, nodes, spent: 0, enough: 0, has_shown: true, least, chosen: vec![sample], visit };
        let value = self.sum_value[place + 1] - self.sum_value[place];
        let mix = self.sum_mix[place + 1] - self.sum_mix[place];
        self.descend(0, value, left, self.room_mix - mix, &mut walk);
        let unspent = walk.nodes;
        work.give_back(unspent);
    }

    fn descend(&self, from: usize, worth: i64, room: Weight, room_mix: i64, walk: &mut Walk) -> bool {
        if worth >= walk.least {
            walk.has_shown = true;
            walk.least = (walk.visit)(worth, &walk.chosen);
        }
        for place in from..self.order.len() {
            let is_over = !fits(&self.least_from[place], &room);
            if is_over || worth + self.bound(place, room_mix) < walk.least {
                break;
            }
            if walk.nodes == 0 && !walk.refill() {
                return false;
            }
            walk.nodes -= 1;
            let sample = self.order[place];
            let weight = &self.weight[sample as usize];
            if !fits(weight, &room) || walk.chosen.first() == Some(&sample) {
                continue;
            }
            let mut left = room;
            for r in 0..RESOURCES {
                left[r] -= weight[r];
            }
            let value = self.sum_value[place + 1] - self.sum_value[place];
            let mix = self.sum_mix[place + 1] - self.sum_mix[place];
            walk.chosen.push(sample);
            let is_whole = self.descend(place + 1, worth + value, left, room_mix - mix, walk);
            walk.chosen.pop();
            if !is_whole {
                return false;
            }
        }
        true
    }
}

impl Walk<'_, '_, '_> {
    fn refill(&mut self) -> bool {
        if self.has_shown && self.spent >= self.enough {
            return false;
        }
        self.nodes = self.work.take(PORTION);
        self.spent += self.nodes;
        self.nodes > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stop::Stop;

    #[test]
    fn every_set_of_enough_worth_is_shown_once() {
        // All 2^12 sets against the walk, at several capacities and worths, with caps on both sizes.
        let mut state = 7_u64;
        let mut next = |end: i64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33).cast_signed() % end
        };
        let stop = Stop::never();
        for _ in 0..60 {
            let weight: Vec<Weight> = (0..12).map(|_| [next(50), next(50), next(9), next(9)]).collect();
            let value: Vec<i64> = (0..12).map(|_| next(40)).collect();
            // One capacity for both loads, as the solver has.
            let capacity = 60 + next(60);
            let room = [capacity, capacity, 10 + next(20), 10 + next(20)];
            let least = 1 + next(150);
            let mut expected = 0;
            let mut most = 0;
            for code in 0..1_u32 << 12 {
                let members = || (0..12).filter(|i| code >> i & 1 == 1);
                let sum: Weight = [0, 1, 2, 3].map(|r: usize| members().map(|i: usize| weight[i][r]).sum());
                let worth: i64 = members().map(|i| value[i]).sum();
                // Samples of no worth are left out by the walk: they make no set worth more.
                if fits(&sum, &room) && members().all(|i| value[i] > 0) {
                    expected += u32::from(worth >= least);
                    most = most.max(worth);
                }
            }
            let knapsack = Knapsack::new(&weight, room, &value);
            let mut work = Work::new(1 << 40, &stop);
            let mut shown = 0;
            assert!(knapsack.each(least, &mut work, u64::MAX, &mut |_, _| {
                shown += 1;
                least
            }));
            let mut best = 0;
            assert!(knapsack.each(1, &mut work, u64::MAX, &mut |worth, _| {
                best = worth;
                worth + 1
            }));
            assert_eq!((shown, best), (expected, most));
        }
    }
}
