//! Times `schedule` with its default moves, for who changes it; `make bench-schedule` has the gaps.
#![allow(missing_docs, reason = "criterion's macros make undocumented items")]

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use dflop_schedule::{Limits, schedule};
use std::hint::black_box;

#[path = "../../crates/schedule/examples/lognormal/mod.rs"]
mod lognormal;

fn sizes(criterion: &mut Criterion) {
    for (name, is_even) in [("independent", false), ("equal_totals", true)] {
        let mut group = criterion.benchmark_group(name);
        group.sample_size(10);
        for (n, m) in [(64, 8), (64, 16), (256, 16), (512, 32), (2048, 128)] {
            // Seed and sigma such that no giant ends the search at once.
            let costs = lognormal::costs(n, 1, 0.5, is_even);
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
