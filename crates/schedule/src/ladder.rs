//! The units of a bucket by what they cost, so that those in a window of costs are found at once.
//!
//! Near balance nearly every window is empty, and a search looks at a million of them. So the range of costs is cut
//! into cells, many more than there are units. One bit for each cell says whether the cell holds a unit. Reading one
//! machine word mostly shows that a window is empty.

use crate::buckets::Buckets;
use crate::sorted_batch::{Pair, minus};
use crate::units::Units;

/// Cells of a ladder for each unit, as a power of two: most windows then hold no cell with a unit in it.
const CELLS_PER_UNIT: u32 = 6;

/// Cells that a look at the bits covers at most: a word, less the bits before the first.
const CELLS_SEEN_MAX: i64 = 56;

/// Bytes of the bits: one for each number of 16, and the first word again.
const CELL_BYTES: usize = (1 << 13) + 8;

/// The units of a bucket, ascending by their cost in one resource.
pub(crate) struct Ladder {
    pub(crate) units: Units,
    /// Cost of each unit in the resource, and `i64::MAX` behind the last.
    key: Vec<i64>,
    /// The unit at each rung.
    unit: Vec<u16>,
    /// Whether a cell, an equal part of the range of costs, holds a unit. Cells are numbered anew after 2^16.
    bits: Box<[u8; CELL_BYTES]>,
    /// The first unit of each 64 cells, and the number of units behind them.
    start: Vec<u16>,
    least: i64,
    /// Width of a cell, as a power of two.
    shift: u32,
}

impl Ladder {
    pub(crate) fn new() -> Self {
        Self {
            units: Units::new(),
            key: Vec::new(),
            unit: Vec::new(),
            bits: Box::new([0; CELL_BYTES]),
            start: Vec::new(),
            least: 0,
            shift: 0,
        }
    }

    /// The bytes of `bits` in which a cost's cell stands: the first word's stand again behind the last.
    fn bytes(&self, key: i64) -> impl Iterator<Item = usize> + use<> {
        let at = usize::from(self.cell(key) as u16) / 8;
        [Some(at), (at < 8).then_some(CELL_BYTES - 8 + at)].into_iter().flatten()
    }

    fn cell(&self, key: i64) -> usize {
        (key.wrapping_sub(self.least) >> self.shift) as usize
    }

    /// Takes the units of bucket w, by their cost in resource r.
    pub(crate) fn fill(&mut self, buckets: &Buckets, w: u32, r: usize, samples: usize, turn: usize) {
        for at in 0..self.units.count {
            for byte in self.bytes(self.units.key[at]) {
                self.bits[byte] = 0;
            }
        }
        self.units.fill(buckets, w, r, samples, turn);
        let keys = self.units.keys();
        let (least, most) = keys.iter().fold((i64::MAX, 0), |(least, most), &c| (least.min(c), most.max(c)));
        let num_starts = keys.len().next_power_of_two();
        let bits = i64::BITS - most.saturating_sub(least).max(0).leading_zeros();
        self.least = least;
        self.shift = bits.saturating_sub(num_starts.trailing_zeros() + CELLS_PER_UNIT);
        self.start.clear();
        self.start.resize(num_starts + 1, 0);
        for &key in keys {
            let cell = self.cell(key);
            for byte in self.bytes(key) {
                self.bits[byte] |= 1 << (cell % 8);
            }
            self.start[(cell >> CELLS_PER_UNIT) + 1] += 1;
        }
        let mut sum = 0;
        for start in &mut self.start {
            sum += *start;
            *start = sum;
        }
        // From the last to the first, so that the end of each cell moves down to its start.
        self.key.clear();
        self.key.resize(keys.len(), 0);
        self.unit.clear();
        self.unit.resize(keys.len(), 0);
        for (unit, &key) in (0..).zip(keys) {
            let end = (self.cell(key) >> CELLS_PER_UNIT) + 1;
            let end = &mut self.start[end];
            *end -= 1;
            self.key[usize::from(*end)] = key;
            self.unit[usize::from(*end)] = unit;
        }
        self.start.remove(0);
        self.start.extend([keys.len() as u16; 2]);
        for place in 1..self.key.len() {
            let (key, unit) = (self.key[place], self.unit[place]);
            let mut at = place;
            while at > 0 && self.key[at - 1] > key {
                self.key[at] = self.key[at - 1];
                self.unit[at] = self.unit[at - 1];
                at -= 1;
            }
            (self.key[at], self.unit[at]) = (key, unit);
        }
        self.key.push(i64::MAX);
    }

    /// The first of `costs` that some unit may exceed by more than `low` and less than `high`. The answer comes from
    /// cells, so it may be wrong about the cost that it returns: the caller must check that one. It is never wrong
    /// about the costs that it passes over: no unit exceeds them by that much.
    #[inline]
    fn first(&self, costs: &[i64], low: i64, high: i64) -> Option<usize> {
        let width = high.saturating_sub(low) >> self.shift;
        if width >= CELLS_SEEN_MAX {
            return (!costs.is_empty()).then_some(0);
        }
        if width < 0 {
            return None;
        }
        // A window that begins somewhere in a cell reaches one cell further.
        let mask = (4_u64 << width) - 1;
        let (bits, shift) = (&self.bits, self.shift);
        let offset = low.wrapping_sub(self.least);
        costs.iter().position(|&cost| {
            let cell = usize::from((cost.wrapping_add(offset) >> shift) as u16);
            let word = bits[cell / 8..cell / 8 + 8].try_into().map_or(0, u64::from_le_bytes);
            (word >> (cell % 8)) & mask != 0
        })
    }

    /// The place of the first unit of more than `cost`.
    #[inline]
    fn after(&self, cost: i64) -> usize {
        let cell = (cost.wrapping_sub(self.least).max(0) >> self.shift >> CELLS_PER_UNIT) as usize;
        let cell = cell.min(self.start.len() - 2);
        let (mut at, end) = (usize::from(self.start[cell]), usize::from(self.start[cell + 1]));
        if end - at > 8 {
            // Many equal costs.
            at += self.key[at..end].partition_point(|&key| key <= cost);
        }
        while self.key[at] <= cost {
            at += 1;
        }
        at
    }

    /// Calls `weigh` for each pair of one unit of this ladder and one of `theirs` (or none) where the first costs
    /// between `low` and `high` more than the second. `weigh` gets both units and the difference. It returns the new
    /// `low` and `high`, or `None` to end the walk. Returns the number of pairs seen, `most` at most.
    #[inline]
    pub(crate) fn walk(
        &self,
        theirs: &Units,
        (mut low, mut high): (i64, i64),
        most: u64,
        mut weigh: impl FnMut(usize, usize, Pair) -> Option<(i64, i64)>,
    ) -> u64 {
        let (mut num_seen, mut next) = (0_u64, 0);
        loop {
            let left = usize::try_from(most - num_seen).unwrap_or(usize::MAX);
            let costs = &theirs.key[next..=theirs.count];
            let costs = &costs[..costs.len().min(left)];
            if costs.is_empty() {
                return num_seen;
            }
            let Some(skipped) = self.first(costs, low, high) else {
                return num_seen + costs.len() as u64;
            };
            let cost = costs[skipped];
            let their = next + skipped;
            next = their + 1;
            num_seen += skipped as u64 + 1;
            let mut at = self.after(cost.wrapping_add(low));
            if self.key[at].wrapping_sub(cost) >= high {
                continue;
            }
            let their_cost = theirs.cost(their);
            while self.key[at].wrapping_sub(cost) < high && num_seen < most {
                let Some(&unit) = self.unit.get(at) else { break };
                let unit = usize::from(unit);
                at += 1;
                num_seen += 1;
                match weigh(unit, their, minus(self.units.cost(unit), their_cost)) {
                    Some(window) => (low, high) = window,
                    None => return num_seen,
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::costs::Costs;
    use crate::limits::Limits;
    use crate::random::{below, generator};
    use crate::sorted_batch::SortedBatch;

    /// Bucket 0 holds the first half of the samples, bucket 1 the rest.
    fn ladder_and_theirs(costs: &Costs, samples: usize) -> (Ladder, Units) {
        let n = costs.num_samples();
        let batch = SortedBatch::new(costs, &Limits::new(n, 2));
        let bucket: Vec<u32> = (0..n).map(|i| u32::from(i >= n / 2)).collect();
        let buckets = Buckets::new(&batch, batch.by_own_order(&bucket));
        let (mut ladder, mut theirs) = (Ladder::new(), Units::new());
        // A ladder is filled again and again.
        ladder.fill(&buckets, 1, 1, samples, 0);
        ladder.fill(&buckets, 0, 0, samples, 0);
        theirs.fill(&buckets, 1, 0, samples, 0);
        (ladder, theirs)
    }

    #[test]
    fn a_walk_shows_exactly_the_pairs_in_the_window() {
        let mut random = generator(3);
        let mut num_shown = 0;
        for round in 0..200 {
            // From none to sixteen a side, of few costs and many, so that cells are narrow, wide and full.
            let n = below(&mut random, 33);
            let (end, unit) = ([4, 256, 1 << 20, 1 << 20][round % 4], [1, 1, 1, 1 << 20][round % 4]);
            let mut column = || (0..n).map(|_| unit * below(&mut random, end) as u64).collect::<Vec<u64>>();
            let costs = Costs { encoder_ns: column(), llm_ns: column(), ..Costs::default() };
            let (ladder, theirs) = ladder_and_theirs(&costs, 2 + round % 2);
            let mut draw = |end| unit.cast_signed() * below(&mut random, end).cast_signed() as i64;
            let middle = draw(2 * end) - draw(end);
            let width = draw(end) >> (round % 7);
            let (low, high) = (middle - width - 1, middle + width);
            let mut shown = Vec::new();
            ladder.walk(&theirs, (low, high), u64::MAX, |own, their, change| {
                shown.push((own, their, change));
                Some((low, high))
            });
            let mut expected = Vec::new();
            for their in 0..=theirs.count {
                for own in 0..ladder.units.count {
                    let change = minus(ladder.units.cost(own), theirs.cost(their));
                    if low < change[0] && change[0] < high {
                        expected.push((own, their, change));
                    }
                }
            }
            num_shown += shown.len();
            shown.sort_unstable();
            expected.sort_unstable();
            assert_eq!(shown, expected, "round {round}");
        }
        assert!(num_shown > 10_000, "{num_shown}");
    }

    #[test]
    fn a_walk_sees_no_more_than_it_may() {
        let costs = Costs { encoder_ns: (1..9).collect(), llm_ns: vec![1; 8], ..Costs::default() };
        let (ladder, theirs) = ladder_and_theirs(&costs, 3);
        for most in 0..40 {
            let mut num_shown = 0;
            let num_seen = ladder.walk(&theirs, (-100, 100), most, |_, _, _| {
                num_shown += 1;
                Some((-100, 100))
            });
            assert_eq!(num_seen, most);
            assert!(num_shown <= num_seen);
        }
    }
}
