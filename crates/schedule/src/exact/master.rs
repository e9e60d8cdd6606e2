//! The linear program of the bound: column generation's, solved by a simplex method that goes on where it stopped.
//!
//! Over the known sets S, which cost `c_S`:
//!
//! ```text
//! minimise  sum_S c_S x_S    where    sum_(S holds i) x_S - s_i = 1 for each sample i,    x, s >= 0
//! ```
//!
//! Its dual values are the worths: the largest sum u such that no set is worth more than its cost. A set costs 1
//! where it fits. Where it does not it costs as much as its samples alone, and is never better than they are: so
//! the program stays feasible whatever the capacity, and the last basis is a start for the next one, as it is
//! after sets were added. A library that solves each program from the beginning took most of the search's time.
//!
//! Where sample i weighs no more than j, it can take j's place in any set, so that it need not be worth more. The
//! program may say so from the start ("dual-optimal inequalities"): then it begins nearer its end.
//!
//! *References*: Dantzig and Wolfe 1960; Ben Amor, Desrosiers and Valerio de Carvalho, "Dual-optimal inequalities
//! for stabilized column generation", 2006.

/// Reduced costs and pivots nearer 0 than this are 0.
const EPSILON: f64 = 1e-9;

/// How much the right sides differ from 1, so that ties of the ratio test are broken and pivots do not go in a ring.
const PERTURBATION: f64 = 1e-6;

/// Pivots after which the inverse is made anew.
const PIVOTS_MAX: usize = 400;

/// Pivots of one solution for each sample, beyond which it is given up.
const PIVOTS_PER_SAMPLE: usize = 60;

/// Pivots between two questions whether to stop: some 0.3 ms for 160 samples.
const PIVOTS_UNASKED: usize = 16;

/// A set of samples and what it costs; or an exchange, which takes a sample from a set for a lighter one.
struct Column {
    set: Vec<u32>,
    /// The heavier sample of an exchange.
    less: Option<u32>,
    cost: f64,
}

impl Column {
    fn worth(&self, worth: &[f64]) -> f64 {
        let more: f64 = self.set.iter().map(|&i| worth[i as usize]).sum();
        self.less.map_or(more, |less| more - worth[less as usize])
    }

    fn is_kept(&self) -> bool {
        self.set.len() == 1
    }
}

/// The program and its last basis.
pub(super) struct Master {
    num_samples: usize,
    columns: Vec<Column>,
    /// For each row of the basis, what is in it: a column, or, from `SURPLUS` on, the surplus of a sample.
    basis: Vec<usize>,
    /// The basis' inverse, by columns (one a sample).
    inverse: Vec<f64>,
    /// Values of the basis.
    value: Vec<f64>,
    pivots: usize,
}

/// A number of a basic variable from which on it is a surplus.
const SURPLUS: usize = 1 << 32;

/// What the program says.
pub(super) struct Worths {
    /// The worth of each sample, 0 or more.
    pub(super) worth: Vec<f64>,
    /// Their sum.
    pub(super) sum: f64,
}

impl Master {
    /// The program whose sets are the samples alone.
    pub(super) fn new(num_samples: usize) -> Self {
        let columns =
            (0..num_samples as u32).map(|i| Column { set: vec![i], less: None, cost: 1.0 }).collect();
        let mut master = Self {
            num_samples,
            columns,
            basis: (0..num_samples).collect(),
            inverse: Vec::new(),
            value: Vec::new(),
            pivots: 0,
        };
        master.invert();
        master
    }

    pub(super) fn add(&mut self, set: Vec<u32>, cost: f64) {
        self.columns.push(Column { set, less: None, cost });
    }

    /// Says that `light` weighs no more than `heavy`, so that it need not be worth more.
    pub(super) fn exchange(&mut self, light: u32, heavy: u32) {
        self.columns.push(Column { set: vec![light], less: Some(heavy), cost: 0.0 });
    }

    pub(super) fn num_sets(&self) -> usize {
        self.columns.len()
    }

    /// Says which sets fit.
    pub(super) fn price(&mut self, fits: impl Fn(&[u32]) -> bool) {
        for column in self.columns.iter_mut().filter(|column| column.less.is_none()) {
            column.cost = if fits(&column.set) { 1.0 } else { column.set.len() as f64 };
        }
    }

    /// Forgets sets that are out of the basis and worth less than `least`, but for samples alone.
    pub(super) fn forget(&mut self, worth: &[f64], least: f64) {
        let mut is_kept: Vec<bool> =
            self.columns.iter().map(|column| column.is_kept() || column.worth(worth) >= least).collect();
        for &at in self.basis.iter().filter(|&&at| at < SURPLUS) {
            is_kept[at] = true;
        }
        let mut next = 0;
        let place: Vec<usize> = is_kept
            .iter()
            .map(|&is_kept| {
                next += usize::from(is_kept);
                next.wrapping_sub(1)
            })
            .collect();
        for at in self.basis.iter_mut().filter(|at| **at < SURPLUS) {
            *at = place[*at];
        }
        let mut kept = is_kept.into_iter();
        self.columns.retain(|_| kept.next().unwrap_or(true));
    }

    /// The worths with the largest sum such that no known set is worth more than it costs, and the multiplications
    /// it took; `None` for them where the pivots did not suffice, or where `stop` said so before.
    pub(super) fn solve(&mut self, stop: impl Fn() -> bool) -> (Option<Worths>, u64) {
        let n = self.num_samples;
        let mut flops = 0;
        for pivot in 0..PIVOTS_PER_SAMPLE * n {
            if pivot % PIVOTS_UNASKED == PIVOTS_UNASKED - 1 && stop() {
                break;
            }
            if self.pivots >= PIVOTS_MAX {
                self.invert();
                flops += (n * n * n / 2) as u64;
            }
            let worth = self.duals();
            let Some(entering) = self.entering(&worth) else {
                let worth: Vec<f64> = worth.into_iter().map(|worth| worth.max(0.0)).collect();
                let sum = worth.iter().sum();
                return (Some(Worths { worth, sum }), flops);
            };
            flops += self.pivot(entering);
        }
        (None, flops)
    }

    fn cost(&self, at: usize) -> f64 {
        if at >= SURPLUS { 0.0 } else { self.columns[at].cost }
    }

    fn duals(&self) -> Vec<f64> {
        let cost: Vec<f64> = self.basis.iter().map(|&at| self.cost(at)).collect();
        self.inverse.chunks_exact(self.num_samples).map(|column| dot(&cost, column)).collect()
    }

    /// What lowers the cost most a unit.
    fn entering(&self, worth: &[f64]) -> Option<usize> {
        let mut best = (-EPSILON, None);
        for (at, column) in self.columns.iter().enumerate() {
            let reduced = column.cost - column.worth(worth);
            if reduced < best.0 {
                best = (reduced, Some(at));
            }
        }
        for (i, &worth) in worth.iter().enumerate() {
            if worth < best.0 {
                best = (worth, Some(SURPLUS + i));
            }
        }
        best.1
    }

    fn pivot(&mut self, entering: usize) -> u64 {
        let n = self.num_samples;
        let mut direction = vec![0.0; n];
        let add = |direction: &mut [f64], column: &[f64], sign: f64| {
            for (direction, column) in direction.iter_mut().zip(column) {
                *direction += sign * column;
            }
        };
        if entering >= SURPLUS {
            let i = entering - SURPLUS;
            add(&mut direction, &self.inverse[i * n..][..n], -1.0);
        } else {
            for &i in &self.columns[entering].set {
                add(&mut direction, &self.inverse[i as usize * n..][..n], 1.0);
            }
            if let Some(i) = self.columns[entering].less {
                add(&mut direction, &self.inverse[i as usize * n..][..n], -1.0);
            }
        }
        let mut leaving = None;
        let mut least = f64::INFINITY;
        for (row, (&step, &value)) in direction.iter().zip(&self.value).enumerate() {
            if step > 1e-7 && value.max(0.0) / step < least {
                (least, leaving) = (value.max(0.0) / step, Some(row));
            }
        }
        // The cost is at least 0, so something leaves, but for what rounding does.
        let Some(row) = leaving else {
            self.pivots = PIVOTS_MAX;
            return 0;
        };
        let size = direction[row];
        for (value, step) in self.value.iter_mut().zip(&direction) {
            *value -= least * step;
        }
        self.value[row] = least;
        direction[row] = size - 1.0;
        let mut flops = 0;
        for column in self.inverse.chunks_exact_mut(n) {
            let factor = column[row] / size;
            if factor != 0.0 {
                flops += n as u64;
                for (entry, step) in column.iter_mut().zip(&direction) {
                    *entry -= factor * step;
                }
            }
        }
        self.basis[row] = entering;
        self.pivots += 1;
        flops + (n * n + 4 * self.columns.len()) as u64
    }

    /// Makes the inverse from the basis; from the samples alone if rounding has left none.
    fn invert(&mut self) {
        if !self.try_invert() {
            self.basis = (0..self.num_samples).collect();
            let is_regular = self.try_invert();
            debug_assert!(is_regular, "the samples alone are the unit matrix");
        }
        self.pivots = 0;
    }

    fn try_invert(&mut self) -> bool {
        let n = self.num_samples;
        // Gauss and Jordan on the transposed pair: row r of `left` is what is in place r of the basis.
        let mut left = vec![0.0_f64; n * n];
        for (row, &at) in self.basis.iter().enumerate() {
            if at >= SURPLUS {
                left[row * n + at - SURPLUS] = -1.0;
            } else {
                for &i in &self.columns[at].set {
                    left[row * n + i as usize] = 1.0;
                }
                if let Some(i) = self.columns[at].less {
                    left[row * n + i as usize] = -1.0;
                }
            }
        }
        let mut right = vec![0.0_f64; n * n];
        for row in 0..n {
            right[row * n + row] = 1.0;
        }
        for at in 0..n {
            let size = |row: &usize| left[row * n + at].abs();
            let Some(best) = (at..n).max_by(|a, b| size(a).total_cmp(&size(b))) else { return false };
            if size(&best) < EPSILON {
                return false;
            }
            for matrix in [&mut left, &mut right] {
                if best != at {
                    let (head, tail) = matrix.split_at_mut(best * n);
                    head[at * n..][..n].swap_with_slice(&mut tail[..n]);
                }
            }
            let size = left[at * n + at];
            for matrix in [&mut left, &mut right] {
                for entry in &mut matrix[at * n..][..n] {
                    *entry /= size;
                }
            }
            let pivot = [left[at * n..][..n].to_vec(), right[at * n..][..n].to_vec()];
            for row in (0..n).filter(|&row| row != at) {
                let factor = left[row * n + at];
                if factor != 0.0 {
                    for (matrix, pivot) in [&mut left, &mut right].into_iter().zip(&pivot) {
                        for (entry, pivot) in matrix[row * n..][..n].iter_mut().zip(pivot) {
                            *entry -= factor * pivot;
                        }
                    }
                }
            }
        }
        // left: B^T as rows by basis place, columns by sample; right = (B^T)^-1, rows by sample.
        self.inverse = right;
        self.value = vec![0.0; n];
        for (i, column) in self.inverse.chunks_exact(n).enumerate() {
            let right = 1.0 + PERTURBATION * spread(i);
            for (value, entry) in self.value.iter_mut().zip(column) {
                *value += right * entry;
            }
        }
        true
    }
}

/// A number between 0 and 1 for each sample, without a pattern.
fn spread(i: usize) -> f64 {
    ((i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as f64 / (1_u64 << 24) as f64
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use good_lp::{Expression, Solution, SolverModel, Variable, microlp, variable, variables};

    /// The same by a library: maximise the sum of worths from 0 to 1 where no set is worth more than 1.
    fn oracle(num_samples: usize, sets: &[Vec<u32>]) -> f64 {
        let mut names = variables!();
        let worth: Vec<Variable> =
            (0..num_samples).map(|_| names.add(variable().min(0.0).max(1.0))).collect();
        let goal: Expression = worth.iter().sum();
        let mut model = names.maximise(goal.clone()).using(microlp);
        for set in sets {
            let sum: Expression = set.iter().map(|&i| worth[i as usize]).sum();
            model.add_constraint(sum.leq(1.0));
        }
        model.solve().expect("all 0 is an answer").eval(goal)
    }

    #[test]
    fn worths_stay_those_of_a_library_when_sets_come_and_go() {
        let mut state = 11_u64;
        let mut next = |end: u32| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as u32 % end
        };
        for n in [1, 2, 7, 30, 70] {
            let mut master = Master::new(n);
            let mut sets: Vec<Vec<u32>> = Vec::new();
            for round in 0..12 {
                for _ in 0..n / 2 {
                    let mut set: Vec<u32> = (0..=next(5)).map(|_| next(n as u32)).collect();
                    set.sort_unstable();
                    set.dedup();
                    sets.push(set.clone());
                    master.add(set, 1.0);
                }
                // In every third round no set of the first sample fits, but alone.
                let is_within = |set: &[u32]| round % 3 < 2 || set.len() == 1 || !set.contains(&0);
                master.price(is_within);
                let fitting: Vec<Vec<u32>> = sets.iter().filter(|set| is_within(set)).cloned().collect();
                let found = master.solve(|| false).0.expect("some pivots suffice");
                assert!((found.sum - oracle(n, &fitting)).abs() < 1e-4, "{n} samples, round {round}");
                for set in &fitting {
                    assert!(set.iter().map(|&i| found.worth[i as usize]).sum::<f64>() < 1.0 + 1e-6);
                }
                if round == 6 {
                    master.forget(&found.worth, 0.5);
                    let worth = |set: &[u32]| set.iter().map(|&i| found.worth[i as usize]).sum::<f64>();
                    let is_kept = |set: &Vec<u32>| set.len() == 1 || worth(set) >= 0.5;
                    sets.retain(is_kept);
                    let again = master.solve(|| false).0.expect("some pivots suffice").sum;
                    assert!((again - oracle(n, &sets)).abs() < 1e-4, "{n} samples, forgotten");
                }
            }
        }
    }

    #[test]
    fn a_stop_ends_a_program_which_goes_on_from_there() {
        let n = 60;
        let sets: Vec<Vec<u32>> = (0..n as u32 - 1).map(|i| vec![i, i + 1]).collect();
        let mut master = Master::new(n);
        for set in &sets {
            master.add(set.clone(), 1.0);
        }
        assert!(master.solve(|| true).0.is_none());
        let found = master.solve(|| false).0.expect("some pivots suffice");
        assert!((found.sum - oracle(n, &sets)).abs() < 1e-4);
    }

    #[test]
    fn an_exchange_keeps_the_lighter_sample_from_being_worth_more() {
        // {0, 1} and {2, 1}: without an exchange 1 is worth nothing and 0 and 2 are worth 1.
        let mut master = Master::new(3);
        master.add(vec![0, 1], 1.0);
        master.add(vec![1, 2], 1.0);
        let sum = |found: Worths| (found.sum * 1e6).round() / 1e6;
        assert!((sum(master.solve(|| false).0.expect("solved")) - 2.0).abs() < 1e-4);
        // With 0 and 2 worth no more than 1 all are worth a half.
        master.exchange(0, 1);
        master.exchange(2, 1);
        let found = master.solve(|| false).0.expect("solved");
        assert!(found.worth.iter().all(|worth| (worth - 0.5).abs() < 1e-4));
    }
}
