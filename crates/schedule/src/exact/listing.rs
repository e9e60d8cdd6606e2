//! The sets that m buckets may hold, and the partitions they make.

use super::best::Best;
use super::cover::{Choice, Cover};
use super::price::Knapsack;
use super::{ONE, Solver, fits};

/// Sets listed for one cover; with more the best are kept, and nothing is proven.
const LISTED_MAX: usize = 30_000;

/// Number of nodes after which listing ends. The list is then incomplete and proves nothing.
const NODES_ENOUGH: u64 = 1 << 21;

/// Work of a set that is looked at and listed, in nodes.
const NODES_PER_SET: u64 = 32;

/// The share that loads have in the worths sets are listed by: without it a sample of no worth doubles the list.
const LOAD_SHARE: f64 = 1e-4;

/// The sets that m buckets may hold at some capacity, and at any below it from the bound on.
pub(super) struct Listing {
    /// Best first, with their loads.
    sets: Vec<(Vec<u32>, i64)>,
    value: Vec<i64>,
    most: i64,
    /// Whether no set that may be needed is left out.
    pub(super) is_whole: bool,
}

impl Solver<'_, '_, '_> {
    /// The sets worth enough to be one of m at `capacity`; `None` where the work ended.
    ///
    /// A set is left out if one more sample fits at the bound already: then it fits at every capacity from there
    /// on, and the larger set, which is listed, serves wherever the smaller one does.
    pub(super) fn list(&mut self, capacity: i64) -> Option<Listing> {
        let (m, room) = (self.num_buckets().cast_signed() as i64, self.room(capacity));
        let value: Vec<i64> = self
            .worth
            .iter()
            .zip(&self.weight)
            .map(|(&worth, weight)| {
                let parts = weight.iter().zip(room).map(|(&weight, room)| weight as f64 / room.max(1) as f64);
                let load = parts.fold(0.0, f64::max);
                ((worth * (1.0 - LOAD_SHARE) + load * LOAD_SHARE) * ONE as f64) as i64 + 1
            })
            .collect();
        let low_room = self.room(self.low);
        let knapsack = Knapsack::new(&self.weight, room, &value, &mut self.table);
        let mut most = 0;
        if !knapsack.each_best(1, &mut self.work, u64::MAX, &mut |worth, _| {
            most = worth;
            worth + 1
        }) {
            return None;
        }
        let least = (value.iter().sum::<i64>() - (m - 1) * most).max(1);
        let mut best = Best::new(LISTED_MAX, least);
        let (weight, room) = (&self.weight, low_room);
        let (mut is_over, mut num_shown) = (false, 0);
        let is_whole = knapsack.each(least, &mut self.work, NODES_ENOUGH, &mut |worth, set| {
            num_shown += 1;
            let mut left = room;
            for &i in set {
                for (left, weight) in left.iter_mut().zip(weight[i as usize]) {
                    *left -= weight;
                }
            }
            let is_full = (0..).zip(weight).all(|(i, weight)| !fits(weight, &left) || set.contains(&i));
            is_over |= best.is_full();
            if is_full { best.show(worth, set) } else { best.least() }
        });
        self.work.take(num_shown * NODES_PER_SET);
        let sets = best.into_sets();
        let loads: Vec<i64> = sets.iter().map(|set| self.load(set)).collect();
        let sets = sets.into_iter().zip(loads).collect();
        Some(Listing { sets, value, most, is_whole: is_whole && !is_over })
    }

    /// A cover by the sets of `listing` within `capacity`, which is kept if it is better than what there is.
    pub(super) fn choose(&mut self, listing: &Listing, capacity: i64, share: u64) -> Cover {
        let within = listing.sets.iter().filter(|set| set.1 <= capacity);
        let sets: Vec<&[u32]> = within.map(|set| &set.0[..]).collect();
        let choice = Choice { sets: &sets, value: &listing.value, most: listing.most };
        let answer = choice.cover(self.num_buckets(), &mut self.work, share);
        if let Cover::Found(chosen) = &answer {
            let mut is_taken = vec![false; self.weight.len()];
            let mut take = |&i: &u32| !std::mem::replace(&mut is_taken[i as usize], true);
            let found: Vec<Vec<u32>> = chosen
                .iter()
                .map(|&at| sets[at as usize].iter().copied().filter(|i| take(i)).collect())
                .collect();
            let reached = found.iter().map(|set| self.load(set)).max().unwrap_or(0);
            if reached < self.high {
                self.high = reached;
                self.best = Some(found);
            }
        }
        answer
    }
}
