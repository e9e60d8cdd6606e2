//! Prints gap and time of the scheduler on seeded lognormal batches, beside simpler assignments.
//!
//! `cargo run --release -p dflop-schedule --example gaps [-- MOVES]`
#![allow(clippy::print_stdout, reason = "an example talks")]

use dflop_schedule::{Assignment, BalanceError, Limits, baseline, schedule};
use std::time::Instant;

#[path = "../benches/lognormal/mod.rs"]
mod lognormal;

const SEEDS: u64 = 31;

fn main() -> Result<(), BalanceError> {
    let moves: Option<u64> = std::env::args().nth(1).and_then(|text| text.parse().ok());
    for (sigma, is_even) in [(0.8, false), (0.8, true), (0.5, false), (1.2, false)] {
        let totals = if is_even { "equal totals" } else { "independent totals" };
        println!("\nlognormal, sigma {sigma}, {totals}, {SEEDS} seeds; gaps to the bound in %, times in ms");
        println!(
            "     size | arrival sum-LPT  greedy |  median    mean     max proven |   time    max | moves"
        );
        for (n, m) in lognormal::SIZES {
            let (mut ours, mut times, mut simple) = (Vec::new(), Vec::new(), [0.0; 3]);
            let (mut proven, mut num_moves) = (0, 0);
            for seed in 0..SEEDS {
                let costs = lognormal::costs(n, seed, sigma, is_even);
                let mut limits = Limits::new(n, m);
                limits.max_moves = moves.unwrap_or(limits.max_moves);
                let start = Instant::now();
                let found = schedule(&costs, &limits)?;
                times.push(start.elapsed().as_secs_f64() * 1e3);
                proven += u32::from(found.proven_optimal);
                num_moves += found.num_moves / SEEDS;
                ours.push(found.gap() * 100.0);
                let sums: Vec<u64> = costs.encoder_ns.iter().zip(&costs.llm_ns).map(|(e, l)| e + l).collect();
                let arms = [
                    Assignment::judge(&costs, &limits, baseline::arrival_order(n, m))?,
                    Assignment::judge(&costs, &limits, baseline::single_cost_lpt(&sums, m))?,
                    schedule(&costs, &Limits { max_moves: 0, ..limits })?,
                ];
                for (sum, arm) in simple.iter_mut().zip(arms) {
                    *sum += (arm.max_load_ns as f64 / found.lower_bound_ns as f64 - 1.0) * 100.0;
                }
            }
            ours.sort_by(f64::total_cmp);
            times.sort_by(f64::total_cmp);
            let [arrival, lpt, greedy] = simple.map(|sum| sum / SEEDS as f64);
            let (middle, last) = (ours.len() / 2, ours.len() - 1);
            let mean = ours.iter().sum::<f64>() / SEEDS as f64;
            println!(
                "{:>9} | {arrival:>7.1} {lpt:>7.2} {greedy:>7.2} | {:>7.4} {mean:>7.4} {:>7.4} {proven:>6} | {:>6.2} {:>6.2} | {num_moves:>7}",
                format!("{n}x{m}"),
                ours[middle],
                ours[last],
                times[middle],
                times[last]
            );
        }
    }
    Ok(())
}
