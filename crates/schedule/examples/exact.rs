//! Prints what the exact search adds where few samples share a bucket: gaps and proofs without it and with it.
//!
//! `cargo run --release -p dflop-schedule --example exact [-- SEEDS]`
#![allow(clippy::print_stdout, reason = "an example talks")]

use dflop_schedule::{Assignment, BalanceError, EXACT_WORK, Limits, schedule};

mod lognormal;

/// (samples, buckets) of up to 6 samples a bucket.
const SIZES: [(usize, u32); 6] = [(24, 4), (32, 8), (48, 16), (64, 16), (80, 20), (128, 32)];

fn main() -> Result<(), BalanceError> {
    let seeds: u64 = std::env::args().nth(1).and_then(|text| text.parse().ok()).unwrap_or(11);
    for (sigma, is_even) in [(0.5, false), (0.8, true), (1.0, false)] {
        let totals = if is_even { "equal totals" } else { "independent totals" };
        println!("\nlognormal, sigma {sigma}, {totals}, {seeds} seeds; gaps in %, CPU ms");
        println!("   size |   mean  worst proven | with exact:  mean  worst proven | median ms    max");
        for (n, m) in SIZES {
            let (mut without, mut with, mut times) = (Vec::new(), Vec::new(), Vec::new());
            for seed in 0..seeds {
                let costs = lognormal::costs(n, seed, sigma, is_even);
                let limits = Limits::new(n, m);
                without.push(schedule(&costs, &limits)?);
                let start = cpu_ms();
                with.push(schedule(&costs, &Limits { max_exact_work: EXACT_WORK, ..limits })?);
                times.push(cpu_ms() - start);
            }
            times.sort_by(f64::total_cmp);
            let ([mean, worst], proven) = gaps(&without);
            let ([exact_mean, exact_worst], exact_proven) = gaps(&with);
            println!(
                "{:>7} | {mean:>6.3} {worst:>6.3} {proven:>6} |            {exact_mean:>6.3} {exact_worst:>6.3} {exact_proven:>6} | {:>9.1} {:>6.1}",
                format!("{n}x{m}"),
                times[times.len() / 2],
                times[times.len() - 1]
            );
        }
    }
    Ok(())
}

/// Mean and worst gap in per cent, and how many are proven.
fn gaps(found: &[Assignment]) -> ([f64; 2], usize) {
    let gaps: Vec<f64> = found.iter().map(|found| found.gap() * 100.0).collect();
    let mean = gaps.iter().sum::<f64>() / gaps.len().max(1) as f64;
    let worst = gaps.iter().copied().fold(0.0, f64::max);
    ([mean, worst], found.iter().filter(|found| found.proven_optimal).count())
}

/// Time this thread ran so far, in milliseconds; 0 where the system does not say so.
fn cpu_ms() -> f64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    text.split(' ').next().and_then(|ns| ns.parse::<f64>().ok()).unwrap_or(0.0) / 1e6
}
