//! Batches for the bench and an example: lognormal costs on two components, by seed.

use dflop_schedule::Costs;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// `n` samples whose costs are exp of a normal with deviation `sigma`, drawn for each component on its own.
///
/// The totals of independent draws differ by a few per cent, which leaves the lesser component some slack;
/// `is_even` scales the encoder to the LLM's total and takes that slack away.
pub(crate) fn costs(n: usize, seed: u64, sigma: f64, is_even: bool) -> Costs {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut draw = || (2e6 * (sigma * normal(&mut random)).exp()) as u64;
    let (mut encoder_ns, llm_ns): (Vec<u64>, Vec<u64>) = (0..n).map(|_| (draw(), draw())).unzip();
    if is_even {
        let ratio = llm_ns.iter().sum::<u64>() as f64 / encoder_ns.iter().sum::<u64>() as f64;
        for cost in &mut encoder_ns {
            *cost = (*cost as f64 * ratio) as u64;
        }
    }
    Costs { encoder_ns, llm_ns, ..Costs::default() }
}

/// A standard normal number, by Box and Muller.
fn normal(random: &mut ChaCha8Rng) -> f64 {
    let mut uniform = || (random.next_u64() >> 11) as f64 / (1_u64 << 53) as f64;
    let (a, b) = (uniform(), uniform());
    (-2.0 * (1.0 - a).ln()).sqrt() * (std::f64::consts::TAU * b).cos()
}
