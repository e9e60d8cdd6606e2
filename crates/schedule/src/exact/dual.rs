//! The bound: worths of samples that prove a capacity too small, by cutting planes.

use super::best::Best;
use super::master::Worths;
use super::price::Knapsack;
use super::{ONE, Solver, Weight, fits, sum_of};
use std::collections::BTreeSet;

/// Linear programs for one capacity; a few dozen are usual.
const ROUNDS_MAX: usize = 400;

/// Sets that one search may add to the linear program, for each sample.
const SETS_PER_SAMPLE: usize = 2;

/// Number of sets of the linear program, for each sample, beyond which sets of little worth are dropped.
const POOL_PER_SAMPLE: usize = 8;

/// Worths whose sum is this near the linear program's are as good as its own.
const CLOSE: f64 = 2e-3;

/// Nodes in search of a set worth too much that holds one sample.
const NODES_A_SAMPLE: u64 = 1 << 8;

/// Nodes after which a knapsack that has found sets worth too much need not find all.
const NODES_ENOUGH: u64 = 1 << 18;

/// Multiplications of a linear program that take as long as a node.
const FLOPS_PER_NODE: u64 = 48;

/// One capacity may take this part of the work that is left: a harder one is left open.
const SHARE: u64 = 3;

/// The bound may take all but this part of the work, one in this many; the rest is for assignments, which covers of over 64 samples
/// seldom find.
const RESERVE: u64 = 12;

/// The bound is raised to this part of the gap.
const STEPS: i64 = 16;

/// What a point of worths showed.
struct Weighed {
    /// Sets worth too much.
    found: Vec<Vec<u32>>,
    /// Whether the point proves that the capacity does not do.
    is_proof: bool,
}

impl Solver<'_, '_, '_> {
    fn learn_all(&mut self, sets: Vec<Vec<u32>>) {
        for set in sets {
            self.learn(set);
        }
    }

    /// Raises the bound as far as the linear program alone goes, to a few parts of the gap.
    pub(super) fn raise(&mut self) {
        self.start_pool();
        let (gap, mut top) = (self.high - self.low, self.high);
        let reserve = self.work.left() / RESERVE;
        // Most often proofs of a best assignment need nothing between.
        if self.work.is_left() && self.refutes(top - 1, false) == Some(true) {
            self.low = top;
        }
        while top - self.low > gap / STEPS && self.work.is_left() && self.work.left() > reserve {
            let middle = self.low + (top - self.low) / 2;
            if self.refutes(middle, false) == Some(true) {
                self.low = middle + 1;
            } else {
                // The linear program proves nothing here, or not with what work there is.
                top = middle;
            }
        }
    }

    /// Sets that are full by one load, or by both: linear programs without them begin far from the answer.
    fn start_pool(&mut self) {
        let room = self.room(self.low);
        for share in [0.0, 0.5, 1.0] {
            let part = |w: &Weight| (w[0] as f64 * share + w[1] as f64 * (1.0 - share)) / self.low as f64;
            let value: Vec<i64> =
                self.weight.iter().map(|weight| (part(weight) * ONE as f64) as i64).collect();
            let mut best = Best::new(SETS_PER_SAMPLE * self.weight.len(), 1);
            let knapsack = Knapsack::new(&self.weight, room, &value, &mut self.table);
            let visit = &mut |worth, set: &[u32]| best.show(worth, set);
            knapsack.each_best(1, &mut self.work, NODES_ENOUGH, visit);
            self.learn_all(best.into_sets());
        }
    }

    /// Whether worths prove that `capacity` does not do; `None` where the work does not suffice to tell.
    ///
    /// Cutting planes at the answers of the linear program: a set that is worth more than 1 cuts an answer off,
    /// and where no set is worth an m-th part of all, the answer is a proof, mostly long before the program knows
    /// all sets that matter.
    ///
    /// False means that the linear program proves nothing; with `is_close` `worth` is then near its optimum.
    pub(super) fn refutes(&mut self, capacity: i64, is_close: bool) -> Option<bool> {
        let (n, m) = (self.weight.len(), self.num_buckets());
        let room = self.room(capacity);
        if self.weight.iter().any(|weight| !fits(weight, &room)) {
            return Some(true);
        }
        self.worth_sum = 0.0;
        let before = std::mem::replace(&mut self.worth, vec![0.0; n]);
        for start in [before, self.load_shares(capacity)] {
            let weighed = self.weigh(&start, &room, is_close)?;
            if weighed.is_proof {
                return Some(true);
            }
            self.learn_all(weighed.found);
        }
        let weight = &self.weight;
        self.master.price(|set| fits(&sum_of(weight, set), &room));
        let enough = self.work.left() - self.work.left() / SHARE;
        let mut forgotten_at = f64::INFINITY;
        for _ in 0..ROUNDS_MAX {
            let (solved, flops) = self.master.solve(|| self.work.is_stopped());
            let cost = flops / FLOPS_PER_NODE;
            if self.work.take(cost) < cost || self.work.left() < enough {
                return None;
            }
            let Worths { worth, sum } = solved?;
            if sum <= m as f64 && (!is_close || sum - self.worth_sum < CLOSE) {
                return Some(false);
            }
            let weighed = self.weigh(&worth, &room, is_close)?;
            if weighed.is_proof {
                return Some(true);
            }
            if weighed.found.is_empty() {
                // The linear program knows all sets that matter.
                return Some(false);
            }
            if sum < forgotten_at - CLOSE && self.master.num_sets() > POOL_PER_SAMPLE * n {
                // A set of little worth seldom matters again. Never drop twice at the same sum: the rounds could repeat for ever.
                forgotten_at = sum;
                self.master.forget(&worth, 0.95);
            }
            self.learn_all(weighed.found);
        }
        None
    }

    /// Worths by load alone: the part of the capacity that a sample takes of the busier component.
    fn load_shares(&self, capacity: i64) -> Vec<f64> {
        let total = self.buckets.batch.total;
        let busier = usize::from(total[1] > total[0]);
        self.weight.iter().map(|weight| weight[busier] as f64 / capacity.max(1) as f64).collect()
    }

    /// Looks for sets that are worth more than 1 where the samples are worth `point`, and keeps that point,
    /// scaled so that no set is worth more than 1, if it has a larger sum than `worth`. `None` where the work ended.
    ///
    /// For a proof it is enough that no set is worth the m-th part of the worth of all samples. That part is mostly
    /// above 1, so this is answered much sooner than what the best set is worth. With `is_close` the worth of the
    /// best set is found nevertheless.
    fn weigh(&mut self, point: &[f64], room: &Weight, is_close: bool) -> Option<Weighed> {
        let m = self.num_buckets().cast_signed() as i64;
        let value: Vec<i64> = point.iter().map(|&worth| (worth * ONE as f64) as i64).collect();
        let total: i64 = value.iter().sum();
        // Each of the samples was rounded by less than 1.
        let least = ONE + 1 + point.len().cast_signed() as i64;
        // With no set worth this, m sets are worth less than all samples.
        let disproof = (total - 1).div_euclid(m) + 1;
        let knapsack = Knapsack::new(&self.weight, *room, &value, &mut self.table);
        let cost = knapsack.cost();
        if self.work.take(cost) < cost {
            return None;
        }
        // For each sample the best set that holds it, so that cuts differ; the best of them is the best of all.
        let mut sets = BTreeSet::new();
        let (mut most, mut is_whole) = (least - 1, true);
        for sample in 0..self.weight.len() as u32 {
            let mut best = None;
            let visit = &mut |worth, set: &[u32]| {
                best = Some(set.to_vec());
                most = most.max(worth);
                worth + 1
            };
            is_whole &= knapsack.each_with(sample, least, &mut self.work, NODES_A_SAMPLE, visit);
            sets.extend(best.map(|mut set| {
                set.sort_unstable();
                set
            }));
        }
        let mut found: Vec<Vec<u32>> = sets.into_iter().collect();
        if !is_whole {
            let reached = std::mem::replace(&mut most, knapsack.most());
            if found.len() <= self.weight.len() / 4 && (disproof > reached || is_close) {
                let start = if is_close { reached + 1 } else { disproof };
                let mut best = Best::new(SETS_PER_SAMPLE * self.weight.len(), start);
                let visit = &mut |worth, set: &[u32]| best.show(worth, set);
                is_whole = knapsack.each_best(start, &mut self.work, NODES_ENOUGH, visit);
                if is_whole {
                    most = best.most;
                }
                found.extend(best.into_sets());
                if !is_whole && found.is_empty() {
                    return None;
                }
            }
        }
        let sum = total as f64 / most.max(1) as f64;
        if sum > self.worth_sum {
            self.worth_sum = sum;
            self.worth = point.iter().map(|worth| worth * ONE as f64 / most.max(1) as f64).collect();
        }
        let is_proof = i128::from(total) > i128::from(m) * i128::from(most);
        Some(Weighed { found, is_proof })
    }
}
