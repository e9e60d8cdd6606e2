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

/// What is left of the evidence of a step after the next one: half after 34 steps.
const KEPT: f64 = 0.98;
/// How far bins lie from their prediction before anything is known: a quarter.
const PRIOR: f64 = 0.25;
/// The least noise of an action's time that is believed in.
const NOISE_MIN: f64 = 0.01;
/// The most.
const NOISE_MAX: f64 = 0.5;
/// An action further from what is expected than this many times the noise counts less.
const FAR: f64 = 3.0;
/// Errors that an excess must pass to count at all: with 2 in 32 bins one would pass by chance.
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
        let shrunk = self.excess * self.confidence;
        if shrunk.abs() < LEAST { 0.0 } else { shrunk.clamp(BOUNDS.0, BOUNDS.1) }
    }
}

/// The regression of one component.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Fit {
    /// Evidence: sums of w x x', row by row.
    pub evidence: Vec<f64>,
    /// Sums of w x excess.
    pub moment: Vec<f64>,
    /// Sums of w and of w times the squared distance from what was expected: the noise.
    pub noise: (f64, f64),
    /// Steps in which each bin was seen.
    pub num_steps: Vec<u32>,
}

/// One action: its bins with their fractions, its excess, and its part of the work (1: that of a mean action).
pub(crate) struct Observed {
    pub(crate) fractions: Vec<(usize, f64)>,
    pub(crate) excess: f64,
    pub(crate) work: f64,
}

impl Fit {
    pub(crate) fn of_bins(count: usize) -> Self {
        Self {
            evidence: vec![0.0; count * count],
            moment: vec![0.0; count],
            noise: (0.0, 0.0),
            num_steps: vec![0; count],
        }
    }

    pub(crate) fn num_bins(&self) -> usize {
        self.moment.len()
    }

    /// Whether its lists are of so many bins and its numbers finite: what a checkpoint may hold.
    pub(crate) fn is_of(&self, count: usize) -> bool {
        let numbers = self.evidence.iter().chain(&self.moment).chain([&self.noise.0, &self.noise.1]);
        self.moment.len() == count
            && self.evidence.len() == count * count
            && self.num_steps.len() == count
            && numbers.into_iter().all(|number| number.is_finite())
    }

    fn noise(&self) -> f64 {
        let (weight, squares) = self.noise;
        if weight > 0.0 { (squares / weight).sqrt().clamp(NOISE_MIN, NOISE_MAX) } else { 0.05 }
    }

    /// Adds the actions of one step.
    pub(crate) fn add(&mut self, actions: &[Observed]) {
        let expected = self.solved();
        let count = self.num_bins();
        let far = FAR * self.noise();
        for number in self.evidence.iter_mut().chain(&mut self.moment) {
            *number *= KEPT;
        }
        self.noise = (self.noise.0 * KEPT, self.noise.1 * KEPT);
        let mut is_seen = vec![false; count];
        for action in actions {
            let of_bins: f64 =
                action.fractions.iter().map(|&(bin, fraction)| fraction * expected[bin].excess).sum();
            let distance = (action.excess - of_bins).abs();
            let huber = if distance > far { far / distance } else { 1.0 };
            let weight = action.work.min(4.0) * huber;
            self.noise.0 += action.work.min(4.0);
            self.noise.1 += weight * distance * distance.min(far);
            for &(bin, fraction) in &action.fractions {
                is_seen[bin] = true;
                self.moment[bin] += weight * fraction * action.excess;
                for &(other, part) in &action.fractions {
                    self.evidence[bin * count + other] += weight * fraction * part;
                }
            }
        }
        for (steps, is_seen) in self.num_steps.iter_mut().zip(is_seen) {
            *steps = steps.saturating_add(u32::from(is_seen));
        }
    }

    /// The excess of each bin.
    pub(crate) fn solved(&self) -> Vec<Excess> {
        let count = self.num_bins();
        if self.noise.0 <= 0.0 {
            return vec![Excess::default(); count];
        }
        let noise = self.noise();
        let strength = (noise / PRIOR) * (noise / PRIOR);
        let mut matrix = self.evidence.clone();
        for bin in 0..count {
            matrix[bin * count + bin] += strength;
        }
        let Some(inverse) = inverse(&matrix, count) else { return vec![Excess::default(); count] };
        (0..count)
            .map(|bin| {
                let row = &inverse[bin * count..(bin + 1) * count];
                let excess: f64 = row.iter().zip(&self.moment).map(|(a, b)| a * b).sum();
                let error = noise * row[bin].max(0.0).sqrt();
                let errors = excess / (ERRORS * error);
                let is_known = self.num_steps[bin] >= STEPS_MIN && errors.abs() > 1.0;
                let confidence = if is_known { 1.0 - 1.0 / (errors * errors) } else { 0.0 };
                Excess { excess, error, confidence }
            })
            .collect()
    }
}

/// The inverse of a symmetric matrix whose diagonal keeps it away from 0; `None` where numbers fail. Gauss and Jordan
/// without exchanges of rows, as positive definite matrices need none.
fn inverse(matrix: &[f64], count: usize) -> Option<Vec<f64>> {
    let mut a = matrix.to_vec();
    let mut out = vec![0.0; count * count];
    for at in 0..count {
        out[at * count + at] = 1.0;
    }
    for at in 0..count {
        let pivot = a[at * count + at];
        if !(pivot > 1e-12 && pivot.is_finite()) {
            return None;
        }
        for column in 0..count {
            a[at * count + column] /= pivot;
            out[at * count + column] /= pivot;
        }
        for row in (0..count).filter(|&row| row != at) {
            let factor = a[row * count + at];
            if factor == 0.0 {
                continue;
            }
            for column in 0..count {
                a[row * count + column] -= factor * a[at * count + column];
                out[row * count + column] -= factor * out[at * count + column];
            }
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

    /// Steps of 16 actions, each of 6 samples of random bins of equal tokens; bins take `excess` more, and each action a noise
    /// of up to `noise` either way.
    fn fitted(excess: &[f64], noise: f64, num_steps: usize, seed: u64) -> Fit {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let mut fit = Fit::of_bins(excess.len());
        for _ in 0..num_steps {
            let actions: Vec<Observed> = (0..16)
                .map(|_| {
                    let bins: Vec<usize> =
                        (0..6).map(|_| below(&mut random, excess.len() as u64) as usize).collect();
                    let fractions: Vec<(usize, f64)> = bins.iter().map(|&bin| (bin, 1.0 / 6.0)).collect();
                    let true_excess: f64 =
                        fractions.iter().map(|&(bin, fraction)| fraction * excess[bin]).sum();
                    let draw = below(&mut random, 2_001) as f64 / 1_000.0 - 1.0;
                    Observed { fractions, excess: true_excess + noise * draw, work: 1.0 }
                })
                .collect();
            fit.add(&actions);
        }
        fit
    }

    #[test]
    fn a_slow_bin_is_found_among_packs_of_several() {
        let mut excess = vec![0.0; 12];
        excess[7] = 1.5;
        excess[3] = -0.3;
        let found = fitted(&excess, 0.03, 30, 1).solved();
        for (bin, (found, &truth)) in found.iter().zip(&excess).enumerate() {
            assert!((found.used() - truth).abs() < 0.06, "bin {bin}: {found:?}, is {truth}");
            assert!(truth != 0.0 || found.used() == 0.0, "bin {bin}: {found:?}");
        }
    }

    #[test]
    fn noise_alone_corrects_nothing() {
        let wrong: usize = (0..40)
            .map(|seed| fitted(&[0.0; 32], 0.1, 60, seed).solved().iter().filter(|e| e.used() != 0.0).count())
            .sum();
        // 1,280 estimates, each beyond 3.5 errors with probability 0.0005.
        assert!(wrong <= 3, "{wrong}");
    }

    #[test]
    fn what_has_passed_is_forgotten() {
        let mut fit = fitted(&[0.0, 0.8, 0.0], 0.02, 40, 2);
        assert!(fit.solved()[1].used() > 0.7);
        for _ in 0..300 {
            fit.add(&[Observed { fractions: vec![(1, 1.0)], excess: 0.0, work: 1.0 }]);
        }
        assert!(fit.solved()[1].used().abs() < 1e-9);
    }

    #[test]
    fn one_accident_is_no_evidence() {
        let mut fit = fitted(&[0.0; 4], 0.02, 30, 3);
        fit.add(&[Observed { fractions: vec![(2, 1.0)], excess: 9.0, work: 1.0 }]);
        assert!(fit.solved()[2].used() < 0.1, "{:?}", fit.solved()[2]);
    }

    #[test]
    fn an_inverse_is_one() {
        let matrix = [4.0, 1.0, 0.5, 1.0, 3.0, 0.2, 0.5, 0.2, 2.0];
        let inverse = inverse(&matrix, 3).unwrap();
        for row in 0..3 {
            for column in 0..3 {
                let product: f64 = (0..3).map(|k| matrix[row * 3 + k] * inverse[k * 3 + column]).sum();
                let identity = if row == column { 1.0 } else { 0.0 };
                assert!((product - identity).abs() < 1e-12);
            }
        }
        assert!(super::inverse(&[0.0], 1).is_none());
    }
}
