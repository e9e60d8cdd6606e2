//! Random numbers that are the same on any machine: `ChaCha8`, and a range rule of our own, so that another
//! version of `rand` cannot change a schedule.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// The generator of `seed`.
pub(crate) fn generator(seed: u64) -> ChaCha8Rng {
    ChaCha8Rng::seed_from_u64(seed)
}

/// A number below `end`, which is at least 1. Uniform but for a bias of `end` / 2^32, of no weight in a search.
pub(crate) fn below(random: &mut ChaCha8Rng, end: usize) -> usize {
    ((u64::from(random.next_u32()) * end as u64) >> 32) as usize
}
