//! The sets of samples that one bucket can hold, as far as they are worth enough: a knapsack with several limits.
//!
//! Depth first, each sample taken or left, the most worth a weight first. A branch ends where what is left can be
//! worth too little, by either of two bounds. One is the knapsack of a single limit, a mix of both loads, that may
//! cut its last sample: what keeps both loads keeps every mix of them. The other is a table of both loads: for the
//! samples from each place on, and for each room in cells, the most they are worth where weights are rounded down
//! to cells. It sees both loads at once, which no mix does. Both promise too much at most, never too little.
//!
//! Where only the most worth is looked for, a sample is not taken while one is left out that weighs no more and is
//! worth no less: of many like samples, which mixed data are full of, few choices are left.

use super::bits::Bits;
use super::work::{PORTION, Work};
use super::{RESOURCES, Weight, fits};

/// Shares of the encoder in the mixes that are tried, in sixteenths.
const MIXES: [i64; 7] = [0, 3, 6, 8, 10, 13, 16];

/// Bits of a sum of mixed weights; lower bits of the weights go, rounded down: a mix may let in more, never less.
const MIX_BITS: u32 = 54;

/// Cells of each load in the table: with 64 proofs took up to 1.1 times, with 128 1.2 times the instructions (8 batches of 32 and 48).
const GRID: i64 = 96;

/// Cells of the table that are filled in the time of a node.
const CELLS_PER_NODE: u64 = 32;

/// Shown a set and its worth; gives the least worth to be shown from then on.
type Visit<'v> = dyn FnMut(i64, &[u32]) -> i64 + 'v;

/// The samples as a knapsack sees them, for one worth of each and one capacity.
pub(super) struct Knapsack<'a> {
    weight: &'a [Weight],
    room: Weight,
    /// Samples that fit alone and are worth anything, the most worth a mixed weight first.
    order: Vec<u32>,
    /// Their worths.
    value: Vec<i64>,
    mix: Mix,
    cells: [Cells; 2],
    /// Cells of the room, and one.
    side: [usize; 2],
    /// Bits of worth that the table leaves out.
    bits: u32,
    /// By place of the order, and by cells of room: the most that the samples from that place on are worth.
    table: &'a [i32],
    /// For each place, those before it whose samples weigh no more and are worth no less.
    better: Vec<Bits>,
    /// The least of each resource that any sample from a place of the order on takes.
    least_from: Vec<Weight>,
}

/// A mix of both loads as the one limit of a knapsack.
struct Mix {
    /// Worths and mixed weights in the knapsack's order: sums of the first 0, 1, 2, ..
    sum_value: Vec<i64>,
    sum_weight: Vec<i64>,
    room: i64,
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
    /// The places of `chosen`, where sets that could be exchanged for better ones are passed over.
    places: Option<Bits>,
    visit: &'w mut Visit<'v>,
}

/// Rounds amounts of one resource down to cells, such that a sum of amounts has no fewer cells than they have.
#[derive(Clone, Copy)]
struct Cells {
    shift: u32,
    factor: i64,
}

impl Cells {
    /// Cells of which there are `most` in `room`, or fewer.
    fn new(room: i64, most: i64) -> Self {
        // Two roundings down, each of which keeps the rule: low bits go, then a fraction of 30 bits.
        let shift = (i64::BITS - room.leading_zeros()).saturating_sub(20);
        let rest = (room >> shift).max(1);
        Self { shift, factor: (most.min(rest) << 30) / rest }
    }

    fn of(self, amount: i64) -> usize {
        (((amount >> self.shift) * self.factor) >> 30) as usize
    }
}

impl Mix {
    /// The mixed weight of a place of the order.
    fn of(&self, place: usize) -> i64 {
        self.sum_weight[place + 1] - self.sum_weight[place]
    }

    /// The most that samples from place `from` of the order are worth within a mixed `room`, rounded up.
    fn bound(&self, from: usize, room: i64) -> i64 {
        let limit = self.sum_weight[from] + room;
        // Few samples fit, so looking at them one by one is faster than bisection.
        let next = from + self.sum_weight[from + 1..].iter().take_while(|&&sum| sum <= limit).count();
        let whole = self.sum_value[next] - self.sum_value[from];
        let Some(&over) = self.sum_weight.get(next + 1) else { return whole };
        let (left, wide) = (limit - self.sum_weight[next], over - self.sum_weight[next]);
        let worth = self.sum_value[next + 1] - self.sum_value[next];
        // Worths of 32 bits keep the error of the division far below the 1 that is added.
        whole + (worth as f64 * (left as f64 / wide as f64)) as i64 + 1
    }
}

impl<'a> Knapsack<'a> {
    /// A knapsack of `room`, where sample i is worth `value[i]`, from 0 to 2^32.
    pub(super) fn new(weight: &'a [Weight], room: Weight, value: &[i64], table: &'a mut Vec<i32>) -> Self {
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
            // Compared in whole numbers. In another order the last sample, which is cut, would make the bound too small.
            order.sort_unstable_by(|a, b| {
                let (left, right) = (i128::from(b.0) * i128::from(a.1), i128::from(a.0) * i128::from(b.1));
                left.cmp(&right).then(a.1.cmp(&b.1)).then(a.2.cmp(&b.2))
            });
            let (mut sum_value, mut sum_weight) = (vec![0], vec![0]);
            for &(value, mix, _) in &order {
                sum_value.push(sum_value[sum_value.len() - 1] + value);
                sum_weight.push(sum_weight[sum_weight.len() - 1] + mix);
            }
            let order: Vec<u32> = order.into_iter().map(|(_, _, i)| i).collect();
            let mix = Mix { sum_value, sum_weight, room: ((i128::from(room[0]) * 16) >> shift) as i64 };
            (mix.bound(0, mix.room), order, mix)
        };
        let best = MIXES.into_iter().map(of).min_by_key(|(bound, ..)| *bound);
        let (_, order, mix) = best.expect("there are mixes to try");
        let total: i64 = order.iter().map(|&i| value[i as usize]).sum();
        let bits = (i64::BITS - total.leading_zeros()).saturating_sub(29);
        let cells = [Cells::new(room[0], GRID), Cells::new(room[1], GRID)];
        let side = [cells[0].of(room[0]) + 1, cells[1].of(room[1]) + 1];
        let layer = side[0] * side[1];
        // All but the last layer are written below.
        table.resize(layer * (order.len() + 1), 0);
        table[layer * order.len()..].fill(0);
        for (place, &i) in order.iter().enumerate().rev() {
            let (here, next) = table[place * layer..].split_at_mut(layer);
            let next = &next[..layer];
            // Rounded up: a bound must not promise too little.
            let worth = ((value[i as usize] - 1) >> bits) as i32 + 1;
            let [a, b] = [0, 1].map(|r: usize| cells[r].of(weight[i as usize][r]));
            here[..a * side[1]].copy_from_slice(&next[..a * side[1]]);
            for row in a..side[0] {
                let (here, without) =
                    (&mut here[row * side[1]..][..side[1]], &next[row * side[1]..][..side[1]]);
                let with = &next[(row - a) * side[1]..][..side[1] - b];
                here[..b].copy_from_slice(&without[..b]);
                for ((here, without), with) in here[b..].iter_mut().zip(&without[b..]).zip(with) {
                    *here = (*without).max(with + worth);
                }
            }
        }
        let value: Vec<i64> = order.iter().map(|&i| value[i as usize]).collect();
        let better = (0..order.len())
            .map(|place| {
                let is_better = |&before: &u32| {
                    let [a, b] = [before as usize, place].map(|place| &weight[order[place] as usize]);
                    value[before as usize] >= value[place] && fits(a, b)
                };
                Bits::of((0..place as u32).filter(is_better))
            })
            .collect();
        let mut least = [i64::MAX; RESOURCES];
        let mut least_from: Vec<Weight> = order.iter().map(|&i| weight[i as usize]).collect();
        for here in least_from.iter_mut().rev() {
            for (here, least) in here.iter_mut().zip(&mut least) {
                *least = (*least).min(*here);
                *here = *least;
            }
        }
        Self { weight, room, order, value, mix, cells, side, bits, table, better, least_from }
    }

    /// Work of the table, in nodes.
    pub(super) fn cost(&self) -> u64 {
        self.table.len() as u64 / CELLS_PER_NODE
    }

    /// The most that samples from place `from` of the order are worth within `room`, rounded up.
    fn bound(&self, from: usize, room: &Weight) -> i64 {
        let at = self.cells[0].of(room[0]) * self.side[1] + self.cells[1].of(room[1]);
        i64::from(self.table[from * self.side[0] * self.side[1] + at]) << self.bits
    }

    /// No set is worth more.
    pub(super) fn most(&self) -> i64 {
        self.bound(0, &self.room).min(self.mix.bound(0, self.mix.room))
    }

    /// Shows `visit` every set that fits and is worth at least `least`.
    ///
    /// Whether all were shown: false where the work was spent before, or where after `enough` nodes something
    /// had been shown.
    pub(super) fn each(&self, least: i64, work: &mut Work, enough: u64, visit: &mut Visit) -> bool {
        self.walk(None, least, work, enough, visit)
    }

    /// As [`Knapsack::each`], without sets that can exchange a sample for one that weighs no more and is worth no
    /// less: of those worth the most one is shown.
    pub(super) fn each_best(&self, least: i64, work: &mut Work, enough: u64, visit: &mut Visit) -> bool {
        self.walk(Some(Bits::EMPTY), least, work, enough, visit)
    }

    fn walk(
        &self,
        places: Option<Bits>,
        least: i64,
        work: &mut Work,
        enough: u64,
        visit: &mut Visit,
    ) -> bool {
        let chosen = Vec::new();
        let mut walk =
            Walk { work, nodes: 0, spent: 0, enough, has_shown: false, least, chosen, places, visit };
        let is_whole = self.descend(0, 0, self.room, self.mix.room, &mut walk);
        let unspent = walk.nodes;
        work.give_back(unspent);
        is_whole
    }

    /// As [`Knapsack::each_best`], of the sets that hold `sample`, within `nodes` nodes; what a walk of so few nodes
    /// finds is no proof.
    pub(super) fn each_with(
        &self,
        sample: u32,
        least: i64,
        work: &mut Work,
        nodes: u64,
        visit: &mut Visit,
    ) -> bool {
        let Some(place) = self.order.iter().position(|&i| i == sample) else { return true };
        let mut left = self.room;
        for (left, weight) in left.iter_mut().zip(self.weight[sample as usize]) {
            *left -= weight;
        }
        let nodes = work.take(nodes);
        let (chosen, places) = (vec![sample], Some(Bits::of([place as u32])));
        let mut walk =
            Walk { work, nodes, spent: 0, enough: 0, has_shown: true, least, chosen, places, visit };
        let mix = self.mix.room - self.mix.of(place);
        let is_whole = self.descend(0, self.value[place], left, mix, &mut walk);
        let unspent = walk.nodes;
        work.give_back(unspent);
        is_whole
    }

    fn descend(&self, from: usize, worth: i64, room: Weight, room_mix: i64, walk: &mut Walk) -> bool {
        if worth >= walk.least {
            walk.has_shown = true;
            walk.least = (walk.visit)(worth, &walk.chosen);
        }
        for place in from..self.order.len() {
            if !fits(&self.least_from[place], &room) {
                break;
            }
            let sample = self.order[place];
            let weight = &self.weight[sample as usize];
            if !fits(weight, &room) || walk.chosen.first() == Some(&sample) {
                continue;
            }
            if walk.places.is_some_and(|places| !self.better[place].is_within(&places)) {
                continue;
            }
            if walk.nodes == 0 && !walk.refill() {
                return false;
            }
            walk.nodes -= 1;
            let least = walk.least - worth;
            if self.bound(place, &room) < least || self.mix.bound(place, room_mix) < least {
                break;
            }
            let mut left = room;
            for r in 0..RESOURCES {
                left[r] -= weight[r];
            }
            walk.chosen.push(sample);
            if let Some(places) = &mut walk.places {
                places.insert(place);
            }
            let is_whole =
                self.descend(place + 1, worth + self.value[place], left, room_mix - self.mix.of(place), walk);
            walk.chosen.pop();
            if let Some(places) = &mut walk.places {
                places.remove(place);
            }
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
            let mut table = Vec::new();
            let knapsack = Knapsack::new(&weight, room, &value, &mut table);
            let mut work = Work::new(1 << 40, &stop);
            let mut shown = 0;
            assert!(knapsack.each(least, &mut work, u64::MAX, &mut |_, _| {
                shown += 1;
                least
            }));
            let mut best = 0;
            assert!(knapsack.each_best(1, &mut work, u64::MAX, &mut |worth, _| {
                best = worth;
                worth + 1
            }));
            assert_eq!((shown, best), (expected, most));
        }
    }
}
