//! The bound: worths of samples that prove a capacity too small, by cutting planes.

use super::best::Best;
use super::price::Knapsack;
use super::{ONE, Solver, Weight, fits, master};

/// Linear programs for one capacity; a few dozen are usual.
const ROUNDS_MAX: usize = 200;

/// Sets the linear program takes up in a round, for each sample.
const SETS_PER_SAMPLE: usize = 2;

/// Sets of the linear program for each sample, beyond which those of little worth are forgotten.
const POOL_PER_SAMPLE: usize = 6;

/// Worths whose sum is this near the linear program's are as good as its own.
const CLOSE: f64 = 2e-3;

/// Nodes in search of a set worth too much that holds one sample.
const NODES_A_SAMPLE: u64 = 1 << 10;

/// Nodes after which a knapsack that has found sets worth too much need not find all.
const NODES_ENOUGH: u64 = 1 << 22;

/// Work of a linear program for each set and sample, in nodes: as measured, for some 500 sets.
const WORK_PER_CELL: u64 = 12;

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
        while top - self.low > gap / 8 && self.work.is_left() {
            let middle = self.low + (top - self.low) / 2;
            match self.refutes(middle, false) {
                Some(true) => self.low = middle + 1,
                Some(false) => top = middle,
                None => return,
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
            let found = self.best_sets(room, &value, 1, NODES_ENOUGH).0;
            self.learn_all(found);
        }
    }

    /// The sets of most worth from `least` on, a few for each sample; the most that a set is worth (at least
    /// `least` - 1), and whether all were looked at.
    fn best_sets(
        &mut self,
        room: Weight,
        value: &[i64],
        least: i64,
        enough: u64,
    ) -> (Vec<Vec<u32>>, i64, bool) {
        let num_sets = SETS_PER_SAMPLE * self.weight.len();
        let mut best = Best::new(num_sets, least);
        let knapsack = Knapsack::new(&self.weight, room, value);
        let is_whole = knapsack.each(least, &mut self.work, enough, &mut |worth, set| best.show(worth, set));
        let most = best.most;
        (best.into_sets(), most, is_whole)
    }

    /// For each sample the best set found that holds it, of those worth `least` or more; each set once.
    fn sets_with_each(&mut self, room: &Weight, value: &[i64], least: i64) -> Vec<Vec<u32>> {
        let knapsack = Knapsack::new(&self.weight, *room, value);
        let mut sets = std::collections::BTreeSet::new();
        for sample in 0..self.weight.len() as u32 {
            let mut best = None;
            knapsack.each_with(sample, least, &mut self.work, NODES_A_SAMPLE, &mut |worth, set| {
                best = Some(set.to_vec());
                worth + 1
            });
            sets.extend(best.map(|mut set| {
                set.sort_unstable();
                set
            }));
        }
        sets.into_iter().collect()
    }

    /// Whether worths prove that `capacity` does not do; `None` where the work does not suffice to tell.
    ///
    /// Cutting planes from inside and outside: `outer`, the answer of the linear program, overstates, `worth`
    /// is proven. Sets are looked for at a point between the two, which either cuts `outer` off deeply or is
    /// itself better than `worth`. At `outer` alone the cuts are shallow, and many times more are needed.
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
            let weighed = self.weigh(&start, &room)?;
            if weighed.is_proof {
                return Some(true);
            }
            self.learn_all(weighed.found);
        }
        let mut forgotten_at = f64::INFINITY;
        for _ in 0..ROUNDS_MAX {
            let sets: Vec<&[u32]> =
                self.pool.iter().filter(|set| fits(&set.1, &room)).map(|set| &set.0[..]).collect();
            let cost = (sets.len() * n) as u64 * WORK_PER_CELL;
            if self.work.take(cost) < cost {
                return None;
            }
            let (sum, outer) = master::worths(n, &sets)?;
            if sum <= m as f64 && (!is_close || sum - self.worth_sum < CLOSE) {
                return Some(false);
            }
            let mut found = Vec::new();
            for share in [0.5, 0.9, 1.0] {
                let point: Vec<f64> = self
                    .worth
                    .iter()
                    .zip(&outer)
                    .map(|(inner, outer)| inner + share * (outer - inner))
                    .collect();
                let weighed = self.weigh(&point, &room)?;
                if weighed.is_proof {
                    return Some(true);
                }
                found = weighed.found;
                if !found.is_empty() {
                    break;
                }
            }
            if found.is_empty() {
                // The linear program knows all sets that matter.
                return Some(false);
            }
            if sum < forgotten_at - CLOSE && self.pool.len() > POOL_PER_SAMPLE * n {
                // A set of little worth seldom counts again. Never twice at one sum: the rounds could go in a ring.
                forgotten_at = sum;
                let worth = |set: &[u32]| set.iter().map(|&i| outer[i as usize]).sum::<f64>();
                self.pool.retain(|(set, weight)| set.len() == 1 || !fits(weight, &room) || worth(set) > 0.95);
            }
            self.learn_all(found);
        }
        None
    }

    /// Worths by load alone: the part of the capacity that a sample takes of the busier component.
    fn load_shares(&self, capacity: i64) -> Vec<f64> {
        let total = self.buckets.problem.total;
        let busier = usize::from(total[1] > total[0]);
        self.weight.iter().map(|weight| weight[busier] as f64 / capacity as f64).collect()
    }

    /// Looks for sets that are worth more than 1 where the samples are worth `point`, and keeps that point,
    /// scaled so that no set is worth more than 1, if it has a larger sum than `worth`. `None` where the work ended.
    fn weigh(&mut self, point: &[f64], room: &Weight) -> Option<Weighed> {
        let value: Vec<i64> = point.iter().map(|&worth| (worth * ONE as f64) as i64).collect();
        // Each of the samples was rounded by less than 1.
        let least = ONE + 1 + point.len().cast_signed() as i64;
        let found = self.sets_with_each(room, &value, least);
        if found.len() > self.weight.len() / 4 {
            return Some(Weighed { found, is_proof: false });
        }
        let (found, most, is_whole) = self.best_sets(*room, &value, least, NODES_ENOUGH);
        if !is_whole {
            return (!found.is_empty()).then_some(Weighed { found, is_proof: false });
        }
        let total: i64 = value.iter().sum();
        let sum = total as f64 / most.max(1) as f64;
        if sum > self.worth_sum {
            self.worth_sum = sum;
            self.worth = point.iter().map(|worth| worth * ONE as f64 / most.max(1) as f64).collect();
        }
        let is_proof = i128::from(total) > self.num_buckets() as i128 * i128::from(most);
        Some(Weighed { found, is_proof })
    }
}
