//! Ranges: neighbouring sizes that a machine treats unlike the sizes beside them, wherever they begin and end.
//!
//! What a size takes is taken to be constant but for some ranges. They are found one after the other, the one that explains
//! most of what is left first:
//!
//! ```text
//! left of a pack    e = excess - sum over its sizes of fraction x level
//! gain of a size    sum over packs of w (loss(e) - loss(e - fraction x level)), at a level; levels are tried from 0.05 to 32
//! its ends          the neighbours with the largest sum of gains (Kadane), O(sizes)
//! its level         weighted mean of what is left; ends and level in turn until they stay
//! ```
//!
//! The loss is a square near 0 and a line far from it (Huber), so single packs move no end; and a range counts if it stands out where each pack is cut at
//! three times the noise, so that neither one accident nor three are a range.

use crate::adapt::fit::{FAR, Observed, huber, noise_of};
use crate::adapt::rows::median;

/// Ranges of a component, at most.
const RANGES_MAX: usize = 12;
/// What is left must be this many standard errors from 0: there are some 10^7 ranges to choose from, of which noise alone passes
/// five in one of three data sets.
const ERRORS: f64 = 6.0;
/// Steps and packs in which a range must have been seen.
const SEEN_MIN: usize = 3;
/// Turns of ends and level.
const TURNS: usize = 4;

/// What was found of a component.
pub(crate) struct Ranges {
    /// Places of the first and the last size of each, in the list of sizes.
    pub(crate) found: Vec<(usize, usize)>,
    /// What each size takes beyond its prediction.
    pub(crate) levels: Vec<f64>,
    /// The noise of a pack.
    pub(crate) noise: f64,
}

/// The ranges of `num_sizes` sizes; cells of the packs are sizes.
pub(crate) fn ranges(packs: &[Observed], num_sizes: usize) -> Ranges {
    let mut ranges = Ranges { found: Vec::new(), levels: vec![0.0; num_sizes], noise: 0.0 };
    loop {
        let left: Vec<f64> = packs.iter().map(|pack| pack.excess - pack.of(&ranges.levels)).collect();
        ranges.noise = noise_of(&left);
        if ranges.found.len() == RANGES_MAX {
            return ranges;
        }
        let Some((place, level)) = next(packs, &left, num_sizes, ranges.noise) else { return ranges };
        ranges.levels[place.0..=place.1].iter_mut().for_each(|of_size| *of_size += level);
        ranges.found.push(place);
    }
}

/// The range that explains most of what is left, and its level; `None` where it may be chance.
fn next(packs: &[Observed], left: &[f64], num_sizes: usize, noise: f64) -> Option<((usize, usize), f64)> {
    let levels = (0..12).map(|power| (0..power).fold(0.05, |level, _| level * 1.8));
    let tried = levels.flat_map(|level| [level, -level]).filter(|level| *level > -0.8);
    let gain = |level, range| largest(&gains(packs, left, level, range, num_sizes, FAR * noise));
    let best = tried.filter_map(|level| gain(level, None));
    let (_, mut place) = best.max_by(|a, b| a.0.total_cmp(&b.0))?;
    for _ in 0..TURNS {
        let level = level_of(packs, left, place, noise)?;
        let (_, moved) = gain(level, Some(place))?;
        if moved == place {
            break;
        }
        place = moved;
    }
    let level = level_of(packs, left, place, noise)?;
    is_sure(packs, left, place, noise).then_some((place, level))
}

/// The gain of each size at a level; where a range has that level already, of its own sizes as if they had not.
fn gains(
    packs: &[Observed],
    left: &[f64],
    level: f64,
    range: Option<(usize, usize)>,
    num_sizes: usize,
    far: f64,
) -> Vec<f64> {
    let mut gains = vec![0.0; num_sizes];
    for (pack, left) in packs.iter().zip(left) {
        let left = range.map_or(*left, |place| left - level * pack.within(place));
        let of_left = loss(left, far);
        for &(size, fraction) in &pack.fractions {
            let is_own = range.is_some_and(|place| (place.0..=place.1).contains(&size));
            let gain = if is_own {
                loss(left + level * fraction, far) - of_left
            } else {
                of_left - loss(left - level * fraction, far)
            };
            gains[size] += pack.weight * gain;
        }
    }
    gains
}

/// Half the square near 0, and beyond `far` a line (Huber).
fn loss(distance: f64, far: f64) -> f64 {
    let distance = distance.abs();
    if distance > far { far * (distance - far / 2.0) } else { distance * distance / 2.0 }
}

/// The neighbours with the largest sum of gains, and that sum; `None` where none is above 0.
fn largest(gains: &[f64]) -> Option<(f64, (usize, usize))> {
    let (mut sum, mut first) = (0.0, 0);
    let mut best: Option<(f64, (usize, usize))> = None;
    for (at, gain) in gains.iter().enumerate() {
        if sum <= 0.0 {
            (sum, first) = (0.0, at);
        }
        sum += gain;
        if sum > best.map_or(0.0, |best| best.0) {
            best = Some((sum, (first, at)));
        }
    }
    best
}

/// The level of a range: packs count less the further they are from it.
fn level_of(packs: &[Observed], left: &[f64], place: (usize, usize), noise: f64) -> Option<f64> {
    let its: Vec<(f64, f64, f64)> = (packs.iter().zip(left))
        .map(|(pack, left)| (pack.weight, pack.within(place), *left))
        .filter(|it| it.1 > 0.0)
        .collect();
    // What each pack says alone: the middle one is a start that accidents do not move.
    let mut alone: Vec<f64> = its.iter().map(|(_, fraction, left)| left / fraction).collect();
    let mut level = median(&mut alone)?;
    for _ in 0..TURNS {
        let (mut x, mut y) = (0.0, 0.0);
        for (weight, fraction, left) in &its {
            let weight = weight * huber(left - level * fraction, FAR * noise);
            x += weight * fraction * left;
            y += weight * fraction * fraction;
        }
        if y <= 0.0 {
            return None;
        }
        level = x / y;
    }
    Some(level)
}

fn is_sure(packs: &[Observed], left: &[f64], place: (usize, usize), noise: f64) -> bool {
    let (mut x, mut y, mut num_packs) = (0.0, 0.0, 0);
    let mut steps: Vec<usize> = Vec::new();
    for (pack, left) in packs.iter().zip(left) {
        let fraction = pack.within(place);
        if fraction > 0.0 {
            x += pack.weight * fraction * left.clamp(-FAR * noise, FAR * noise);
            y += pack.weight * fraction * fraction;
            num_packs += 1;
            steps.push(pack.step);
        }
    }
    steps.dedup();
    steps.len() >= SEEN_MIN && num_packs >= SEEN_MIN && x * x > ERRORS * ERRORS * noise * noise * y
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batches::below;
    use rand_chacha::ChaCha8Rng;
    use rand_chacha::rand_core::SeedableRng;

    /// 40 steps of 16 packs of three samples of 400 sizes each; what sizes take has a noise of up to `noise` either way.
    fn packs(levels: &[f64], noise: f64, seed: u64) -> Vec<Observed> {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let mut draw = |end: u64| below(&mut random, end);
        let pack = |at: usize| {
            let fractions = (0..3).map(|_| (draw(levels.len() as u64) as usize, 1.0 / 3.0)).collect();
            let mut pack = Observed { fractions, excess: 0.0, weight: 1.0, step: at / 16 };
            let off = noise * (draw(2_001) as f64 / 1_000.0 - 1.0);
            pack.excess = (1.0 + pack.of(levels)) * (1.0 + off) - 1.0;
            pack
        };
        (0..640).map(pack).collect()
    }

    /// Ends anywhere, mild and tenfold, two at once and one that is faster: each is found with its ends and its level.
    #[test]
    fn ranges_are_found_with_their_ends() {
        for (seed, &(first, last, level)) in
            [(100, 103, 0.6), (7, 19, 0.25), (390, 399, 8.7), (0, 4, -0.5)].iter().enumerate()
        {
            let mut levels = vec![0.0; 400];
            levels[first..=last].fill(level);
            levels[250..=255].fill(1.5);
            let found = ranges(&packs(&levels, 0.03, seed as u64), 400);
            let mut places = found.found.clone();
            places.sort_unstable();
            let mut expected = vec![(first, last), (250, 255)];
            expected.sort_unstable();
            assert_eq!(places, expected, "level {level}");
            let off = found.levels.iter().zip(&levels).map(|(found, truth)| (found - truth).abs());
            assert!(off.fold(0.0, f64::max) < 0.05 * level.abs().max(1.0), "level {level}");
        }
    }

    #[test]
    fn neither_noise_nor_accidents_are_a_range() {
        for seed in 0..8 {
            let mut packs = packs(&[0.0; 400], 0.1, seed);
            // Two of 640 take four times as long, whatever they hold.
            for at in [100, 300] {
                packs[at].excess = 3.0;
            }
            assert_eq!(ranges(&packs, 400).found, [], "seed {seed}");
        }
        assert_eq!(ranges(&[], 0).found, []);
    }
}
