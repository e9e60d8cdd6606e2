//! Fit: what each shape bin takes beyond its prediction, from actions that each hold samples of several bins.
//!
//! An action of a pack with the fractions x of bins (by tokens, their sum is 1) took `excess` more than predicted. The excess
//! g of each bin solves a ridge regression over all actions, older steps counting less:
//!
//! ```text
//! minimise  sum over actions  w (excess - x g)^2  +  strength |g|^2
//! w:        the action's part of the work, less where it is far from what is expected (Huber), x 0.98 a step
//! strength: noise^2 / 0.25^2, so that g is 0 where nothing is known
//! error_b:  noise sqrt((A + strength)^-1_bb)
//! ```
//!
//! Only sums, products, quotients and square roots: the same spans give the same numbers on any machine.

/// How far bins lie from their prediction before anything is known: a quarter.
const PRIOR: f64 = 0.25;
/// The least noise of an action's time that is believed in.
const NOISE_MIN: f64 = 0.01;
/// The most.
const NOISE_MAX: f64 = 0.5;
/// That of which nothing is known.
const NOISE_NONE: f64 = 0.05;
/// An action further from what is expected than this many times the noise counts less.
pub(crate) const FAR: f64 = 3.0;
/// Groups of neighbouring bins, at most.
const GROUPS_MAX: usize = 32;
/// Errors that an excess must pass to count at all: with 2 in 128 bins six would pass by chance.
const ERRORS: f64 = 3.5;
/// Excesses below this change no schedule and are taken as none.
const LEAST: f64 = 0.03;
/// Steps in which a bin must have been seen: one may be an accident.
const STEPS_MIN: u32 = 3;
/// Bounds of a bin's excess: a quarter of the predicted time, and 32 times.
const BOUNDS: (f64, f64) = (-0.75, 31.0);

/// What a bin takes beyond its prediction.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Excess {
    /// Measured over predicted time, less 1.
    pub excess: f64,
    /// Its standard error.
    pub error: f64,
    /// From 0, not known, to 1: what part of the excess is used.
    pub confidence: f64,
}

/// What samples of one bin take beyond their prediction.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BinExcess {
    /// Whether it is of the encoder; else of the LLM backbone.
    pub is_encoder: bool,
    /// The fewest tokens of such a sample.
    pub tokens_min: u64,
    /// The most.
    pub tokens_max: u64,
    /// How much, how sure, and what part of it is used.
    pub excess: Excess,
}

impl Excess {
    /// What is used of it: shrunk, bounded, and 0 where it may be chance.
    pub fn used(&self) -> f64 {
        let shrunk = self.shrunk();
        if shrunk.abs() < LEAST { 0.0 } else { shrunk.clamp(BOUNDS.0, BOUNDS.1) }
    }

    fn shrunk(&self) -> f64 {
        self.excess * self.confidence
    }
}

/// The regression of one component.
#[derive(Debug, Clone)]
pub(crate) struct Fit {
    /// Evidence: sums of w x x', row by row.
    evidence: Vec<f64>,
    /// Sums of w x excess.
    moment: Vec<f64>,
    /// Sums of w and of w times the squared distance from what was expected: the noise.
    noise: (f64, f64),
    /// Steps in which each bin was seen.
    num_steps: Vec<u32>,
    /// The group of each bin, ascending.
    groups: Vec<usize>,
}

/// One pack: its cells (bins, or sizes) with their fractions.
#[derive(Debug, Clone)]
pub(crate) struct Observed {
    pub(crate) fractions: Vec<(usize, f64)>,
    /// Measured over predicted time, less 1.
    pub(crate) excess: f64,
    /// Its part of the work, less the older it is.
    pub(crate) weight: f64,
    /// The step that it is of.
    pub(crate) step: usize,
}

impl Observed {
    /// What it takes where its cells take `levels`.
    pub(crate) fn of(&self, levels: &[f64]) -> f64 {
        self.fractions.iter().map(|&(cell, fraction)| fraction * levels[cell]).sum()
    }

    /// The same pack, where each cell is a part of the cell that `of` has at its place; neighbours of one are one.
    pub(crate) fn joined(&self, of: &[usize]) -> Self {
        let mut fractions: Vec<(usize, f64)> = Vec::with_capacity(self.fractions.len());
        for &(cell, fraction) in &self.fractions {
            match fractions.last_mut().filter(|last| last.0 == of[cell]) {
                Some(last) => last.1 += fraction,
                None => fractions.push((of[cell], fraction)),
            }
        }
        Self { fractions, ..*self }
    }

    /// The fraction of the cells from the first to the last of `place`.
    pub(crate) fn within(&self, place: (usize, usize)) -> f64 {
        let its = self.fractions.iter().filter(|(cell, _)| (place.0..=place.1).contains(cell));
        its.map(|its| its.1).sum()
    }
}

/// The weight of what is `distance` from what is expected (Huber).
pub(crate) fn huber(distance: f64, far: f64) -> f64 {
    if distance.abs() > far { far / distance.abs() } else { 1.0 }
}

/// The noise of what is left, by its median: the few that are far do not move it.
pub(crate) fn noise_of(left: &[f64]) -> f64 {
    let mut distances: Vec<f64> = left.iter().map(|left| left.abs()).collect();
    let Some(middle) = distances.len().checked_sub(1).map(|last| last / 2) else { return NOISE_NONE };
    // Of a normal distribution half lie within 0.6745 standard deviations.
    let (_, middle, _) = distances.select_nth_unstable_by(middle, f64::total_cmp);
    (*middle / 0.6745).clamp(NOISE_MIN, NOISE_MAX)
}

/// Groups of neighbours, each of at most so many bins that there are about [`GROUPS_MAX`]; none crosses an end of `parts`.
/// Of each part: its bins, and whether they are taken to be alike, which makes them one group.
pub(crate) fn groups(parts: &[(usize, bool)]) -> Vec<usize> {
    let size_max = parts.iter().map(|part| part.0).sum::<usize>().div_ceil(GROUPS_MAX).max(1);
    let (mut groups, mut first) = (Vec::new(), 0);
    for &(count, is_alike) in parts {
        let size = if is_alike { count.max(1) } else { size_max };
        groups.extend((0..count).map(|bin| first + bin / size));
        first += count.div_ceil(size);
    }
    groups
}

impl Fit {
    /// Of packs whose cells are bins; `expected` is what each is expected to take, and `noise` what it may be off.
    pub(crate) fn new(packs: &[Observed], expected: &[f64], noise: f64, groups: Vec<usize>) -> Self {
        let count = groups.len();
        let mut fit = Self {
            evidence: vec![0.0; count * count],
            moment: vec![0.0; count],
            noise: (0.0, 0.0),
            num_steps: vec![0; count],
            groups,
        };
        let mut last_step = vec![usize::MAX; count];
        let far = FAR * noise;
        for (pack, expected) in packs.iter().zip(expected) {
            // What takes ten times as long has ten times the noise.
            let distance = (pack.excess - expected).abs() / (1.0 + expected).max(1.0);
            let weight = pack.weight * huber(distance, far);
            fit.noise.0 += pack.weight;
            fit.noise.1 += weight * distance * distance.min(far);
            for &(bin, fraction) in &pack.fractions {
                if last_step[bin] != pack.step {
                    last_step[bin] = pack.step;
                    fit.num_steps[bin] += 1;
                }
                fit.moment[bin] += weight * fraction * pack.excess;
                for &(other, part) in &pack.fractions {
                    fit.evidence[bin * count + other] += weight * fraction * part;
                }
            }
        }
        fit
    }

    fn noise(&self) -> f64 {
        let (weight, squares) = self.noise;
        if weight > 0.0 { (squares / weight).sqrt().clamp(NOISE_MIN, NOISE_MAX) } else { NOISE_NONE }
    }

    /// The excess of each bin: first what groups of neighbours take, then what each bin takes beyond what is used of its group.
    /// A machine that treats many sizes alike is learned from all of them, and bins can be narrow.
    pub(crate) fn solved(&self) -> Vec<Excess> {
        let count = self.groups.len();
        if self.noise.0 <= 0.0 {
            return vec![Excess::default(); count];
        }
        let num_groups = self.groups.last().map_or(0, |last| last + 1);
        let mut evidence = vec![0.0; num_groups * num_groups];
        let mut moment = vec![0.0; num_groups];
        let mut num_steps = vec![0; num_groups];
        for bin in 0..count {
            let group = self.groups[bin];
            moment[group] += self.moment[bin];
            num_steps[group] = self.num_steps[bin].max(num_steps[group]);
            for other in 0..count {
                evidence[group * num_groups + self.groups[other]] += self.evidence[bin * count + other];
            }
        }
        let groups = self.estimated(evidence, &moment, &num_steps);
        if num_groups == count {
            return groups;
        }
        let of_group: Vec<f64> = (0..count).map(|bin| groups[self.groups[bin]].shrunk()).collect();
        let left = |bin: usize| {
            let row = &self.evidence[bin * count..(bin + 1) * count];
            self.moment[bin] - row.iter().zip(&of_group).map(|(a, b)| a * b).sum::<f64>()
        };
        let left: Vec<f64> = (0..count).map(left).collect();
        let own = self.estimated(self.evidence.clone(), &left, &self.num_steps);
        let both = own.into_iter().zip(of_group).map(|(own, of_group)| {
            let (excess, used) = (of_group + own.excess, of_group + own.shrunk());
            let confidence = if excess == 0.0 { 0.0 } else { (used / excess).clamp(0.0, 1.0) };
            Excess { excess, confidence, ..own }
        });
        both.collect()
    }

    /// The ridge regression of so many bins or groups.
    fn estimated(&self, mut evidence: Vec<f64>, moment: &[f64], num_steps: &[u32]) -> Vec<Excess> {
        let count = moment.len();
        let noise = self.noise();
        for bin in 0..count {
            evidence[bin * count + bin] += (noise / PRIOR) * (noise / PRIOR);
        }
        let Some(root) = inverse_root(evidence, count) else { return vec![Excess::default(); count] };
        // (M'M) moment, and the diagonal of M'M, both row by row.
        let (mut excesses, mut diagonal) = (vec![0.0; count], vec![0.0; count]);
        for (at, row) in root.chunks(count).enumerate() {
            let of_row: f64 = row[..=at].iter().zip(moment).map(|(a, b)| a * b).sum();
            for (bin, number) in row[..=at].iter().enumerate() {
                excesses[bin] += number * of_row;
                diagonal[bin] += number * number;
            }
        }
        let excess = |bin: usize| {
            let (excess, error) = (excesses[bin], noise * diagonal[bin].sqrt());
            let errors = excess / (ERRORS * error);
            let is_known = num_steps[bin] >= STEPS_MIN && errors.abs() > 1.0;
            let confidence = if is_known { 1.0 - 1.0 / (errors * errors) } else { 0.0 };
            Excess { excess, error, confidence }
        };
        (0..count).map(excess).collect()
    }
}

/// M, a lower triangle with M'M the inverse of a symmetric matrix whose diagonal keeps it away from 0; `None` where numbers
/// fail. Cholesky: the matrix is U'U, and M the inverse of U'. Inner loops run along rows.
fn inverse_root(mut matrix: Vec<f64>, count: usize) -> Option<Vec<f64>> {
    for at in 0..count {
        let (above, below) = matrix.split_at_mut((at + 1) * count);
        let row = &mut above[at * count + at..];
        let pivot = row[0];
        if !(pivot > 1e-12 && pivot.is_finite()) {
            return None;
        }
        let root = pivot.sqrt();
        for number in row.iter_mut() {
            *number /= root;
        }
        for (other, lower) in below.chunks_mut(count).enumerate() {
            let factor = row[other + 1];
            let from = at + 1 + other;
            if factor != 0.0 {
                lower[from..].iter_mut().zip(&row[other + 1..]).for_each(|(a, b)| *a -= factor * b);
            }
        }
    }
    let mut out = vec![0.0; count * count];
    for at in 0..count {
        let (done, row) = out.split_at_mut(at * count);
        row[at] = 1.0;
        for (before, of_before) in done.chunks(count).enumerate() {
            let factor = matrix[before * count + at];
            if factor != 0.0 {
                row[..=before].iter_mut().zip(of_before).for_each(|(a, b)| *a -= factor * b);
            }
        }
        let pivot = matrix[at * count + at];
        for number in &mut row[..=at] {
            *number /= pivot;
        }
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batches::below;
    use rand_chacha::ChaCha8Rng;
    use rand_chacha::rand_core::SeedableRng;

    /// Steps of 16 packs, each of 6 samples of random bins of equal tokens; bins take `excess` more, and each pack a noise
    /// of up to `noise` either way.
    fn packs(excess: &[f64], noise: f64, num_steps: usize, seed: u64) -> Vec<Observed> {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let mut packs = Vec::new();
        for step in 0..num_steps {
            for _ in 0..16 {
                let bins = (0..6).map(|_| below(&mut random, excess.len() as u64) as usize);
                let fractions: Vec<(usize, f64)> = bins.map(|bin| (bin, 1.0 / 6.0)).collect();
                let draw = below(&mut random, 2_001) as f64 / 1_000.0 - 1.0;
                let mut pack = Observed { fractions, excess: 0.0, weight: 1.0, step };
                pack.excess = pack.of(excess) + noise * draw;
                packs.push(pack);
            }
        }
        packs
    }

    /// What is solved where nothing is expected, and again where that is.
    fn solved(packs: &[Observed], count: usize) -> Vec<Excess> {
        let mut expected = vec![0.0; count];
        let mut excesses = Vec::new();
        for _ in 0..3 {
            let of_packs: Vec<f64> = packs.iter().map(|pack| pack.of(&expected)).collect();
            let left: Vec<f64> = packs.iter().zip(&of_packs).map(|(pack, of)| pack.excess - of).collect();
            excesses = Fit::new(packs, &of_packs, noise_of(&left), groups(&[(count, false)])).solved();
            expected = excesses.iter().map(|excess| excess.excess).collect();
        }
        excesses
    }

    fn fitted(excess: &[f64], noise: f64, num_steps: usize, seed: u64) -> Vec<Excess> {
        solved(&packs(excess, noise, num_steps, seed), excess.len())
    }

    #[test]
    fn a_slow_bin_is_found_among_packs_of_several() {
        let mut excess = vec![0.0; 12];
        excess[7] = 1.5;
        excess[3] = -0.3;
        let found = fitted(&excess, 0.03, 30, 1);
        for (bin, (found, &truth)) in found.iter().zip(&excess).enumerate() {
            assert!((found.used() - truth).abs() < 0.06, "bin {bin}: {found:?}, is {truth}");
            assert!(truth != 0.0 || found.used() == 0.0, "bin {bin}: {found:?}");
        }
    }

    #[test]
    fn noise_alone_corrects_nothing() {
        let wrong: usize = (0..10)
            .map(|seed| fitted(&[0.0; 128], 0.1, 60, seed).iter().filter(|e| e.used() != 0.0).count())
            .sum();
        // 1,280 estimates, each beyond 3.5 errors with probability 0.0005.
        assert!(wrong <= 3, "{wrong}");
    }

    #[test]
    fn one_accident_is_no_evidence() {
        let mut packs = packs(&[0.0; 4], 0.02, 30, 3);
        packs.push(Observed { fractions: vec![(2, 1.0)], excess: 9.0, weight: 1.0, step: 30 });
        assert!(solved(&packs, 4)[2].used() < 0.1, "{:?}", solved(&packs, 4)[2]);
    }

    #[test]
    fn no_group_crosses_an_end() {
        assert_eq!(groups(&[(3, false)]), [0, 1, 2]);
        // 66 bins: three a group, 32 at most where there is one part.
        let of_parts = groups(&[(64, false), (1, false), (1, false)]);
        assert_eq!((of_parts[2], of_parts[3], of_parts[63], of_parts[64], of_parts[65]), (0, 1, 21, 22, 23));
        assert_eq!(groups(&[(1, false), (4, true), (0, true), (1, false)]), [0, 1, 1, 1, 1, 2]);
    }

    /// Three twentieths more in 128 bins, of which a step sees 96 samples: too few of each bin, enough of each group.
    #[test]
    fn what_many_bins_have_in_common_is_learned_from_all_of_them() {
        let found = fitted(&[0.15; 128], 0.05, 40, 4);
        let num_used = found.iter().filter(|e| e.used() > 0.03 && e.used() < 0.2).count();
        assert!(num_used > 100, "{num_used}");
        // One bin that differs from its group is told apart from it.
        let mut excess = vec![0.0; 128];
        excess[70] = 1.0;
        let found = fitted(&excess, 0.03, 60, 5);
        for (bin, found) in found.iter().enumerate() {
            assert!((found.used() - excess[bin]).abs() < 0.15, "bin {bin}: {found:?}");
        }
    }

    #[test]
    fn a_root_of_an_inverse_is_one() {
        let matrix = [4.0, 1.0, 0.5, 1.0, 3.0, 0.2, 0.5, 0.2, 2.0];
        let root = inverse_root(matrix.to_vec(), 3).unwrap();
        let inverse = |row: usize, column: usize| -> f64 {
            (0..3).map(|k| root[k * 3 + row] * root[k * 3 + column]).sum()
        };
        for row in 0..3 {
            for column in 0..3 {
                let product: f64 = (0..3).map(|k| matrix[row * 3 + k] * inverse(k, column)).sum();
                let identity = if row == column { 1.0 } else { 0.0 };
                assert!((product - identity).abs() < 1e-12);
            }
        }
        assert!(inverse_root(vec![0.0], 1).is_none());
        assert!(inverse_root(vec![1.0, 2.0, 2.0, 1.0], 2).is_none());
    }
}
