//! Times `schedule` with its default moves, for who changes it; `make bench-schedule` has the gaps.
#![allow(missing_docs, reason = "criterion's macros make undocumented items")]

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use dflop_schedule::{Costs, Limits, schedule};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::hint::black_box;

/// `n` samples whose costs are exp of a normal with deviation `sigma`, drawn for each component on its own.
///
/// The totals of independent draws differ by a few per cent, which leaves the lesser component some slack;
/// `is_even` scales the encoder to the LLM's total and takes that slack away.
fn lognormal(n: usize, seed: u64, sigma: f64, is_even: bool) -> Costs {
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

fn sizes(criterion: &mut Criterion) {
    for (name, is_even) in [("independent", false), ("equal_totals", true)] {
        let mut group = criterion.benchmark_group(name);
        group.sample_size(10);
        for (n, m) in [(64, 8), (64, 16), (256, 16), (512, 32), (2048, 128)] {
            // Seed and sigma such that no giant ends the search at once.
            let costs = lognormal(n, 1, 0.5, is_even);
            let limits = Limits::new(n, m);
            let id = BenchmarkId::from_parameter(format!("{n}x{m}"));
            group.bench_with_input(id, &costs, |bencher, costs| {
                bencher.iter(|| schedule(black_box(costs), &limits).expect("sound costs"));
            });
        }
        group.finish();
    }
}

criterion_group!(benches, sizes);
criterion_main!(benches);
