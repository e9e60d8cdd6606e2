//! Prints makespan over ideal (the work of the busiest rank) by stages and microbatches, for every order.
//!
//! `cargo run --release -p dflop-step --example ratios`. The durations are made up: samples with lognormal text, most
//! with pictures and some with long videos, on one encoder stage and LLM stages of equal layers, the last with the
//! head. Each forward takes a third of the whole, I and W as much each. Samples are dealt into microbatches by the
//! larger of both loads, largest first; `arrival` is 1F1B without that. Within 1F1B's microbatches in flight, or (2x)
//! twice those, the lists are made by `listing`; `shaped` ones have smaller microbatches at both ends. The mean of
//! 8 draws; an argument sets the effort.

#![allow(clippy::print_stdout, reason = "printing is what it does")]

use dflop_sim::{StepInput, simulate_lists, simulate_step};
use dflop_step::lists::{Holding, data_aware_within};
use dflop_types::{ComponentLayout, Layout, PipelineOrder};
use std::time::Instant;

/// A stream of numbers from 0 to 1 (`SplitMix64`).
struct Random(u64);

impl Random {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
    }

    fn lognormal(&mut self, sigma: f64) -> f64 {
        let (u, v) = (self.next().max(1e-12), self.next());
        (sigma * (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()).exp()
    }
}

/// Encoder and LLM time of each sample, in the unit of a mean LLM sample of text.
fn samples(count: usize, random: &mut Random) -> Vec<[f64; 2]> {
    let mut sample = || {
        let text = random.lognormal(0.8);
        match random.next() {
            kind if kind < 0.3 => [0.0, text],
            kind if kind < 0.9 => [random.lognormal(0.5), text + random.lognormal(0.5)],
            _ => [4.0 * random.lognormal(0.6), text + 3.0 * random.lognormal(0.6)],
        }
    };
    (0..count).map(|_| sample()).collect()
}

/// How samples are dealt into microbatches.
#[derive(Clone, Copy, PartialEq)]
enum Dealing {
    /// As they come.
    Arrival,
    /// Into the one that is least full with it, largest first.
    Balanced,
    /// As balanced, with less in the first and last microbatches: from 0.3 of the others on, over so many.
    Shaped(usize),
}

/// Loads of `m` microbatches.
fn pack(samples: &[[f64; 2]], m: usize, dealing: Dealing) -> Vec<[f64; 2]> {
    let target = |j: usize| match dealing {
        Dealing::Shaped(ramp) if j.min(m - 1 - j) < ramp => 0.3 + 0.7 * j.min(m - 1 - j) as f64 / ramp as f64,
        _ => 1.0,
    };
    let mut loads = vec![[0.0_f64; 2]; m];
    let total = samples.iter().fold([0.0, 0.0], |sum, s| [sum[0] + s[0], sum[1] + s[1]]);
    let weight = |s: &[f64; 2]| (s[0] / total[0]).max(s[1] / total[1]);
    let mut order: Vec<usize> = (0..samples.len()).collect();
    if dealing != Dealing::Arrival {
        order.sort_by(|&a, &b| weight(&samples[b]).total_cmp(&weight(&samples[a])));
    }
    for (at, sample) in order.into_iter().map(|at| samples[at]).enumerate() {
        let with = |j: usize| weight(&[loads[j][0] + sample[0], loads[j][1] + sample[1]]) / target(j);
        let j = match dealing {
            Dealing::Arrival => at % m,
            _ => (0..m).min_by(|&a, &b| with(a).total_cmp(&with(b))).unwrap_or(0),
        };
        loads[j] = [loads[j][0] + sample[0], loads[j][1] + sample[1]];
    }
    loads
}

fn step(stages: u32, loads: &[[f64; 2]]) -> StepInput {
    let component = |pp| ComponentLayout { tp: 1, pp, dp: 1 };
    let total = loads.iter().fold([0.0, 0.0], |sum, s| [sum[0] + s[0], sum[1] + s[1]]);
    // The encoder takes as long as a stage of the LLM on the whole; the head makes the last stage the longest.
    let ns = |stage: u32, load: &[f64; 2]| match stage {
        0 => load[0] * total[1] / total[0] * 1e5,
        s if s + 1 == stages => load[1] * 1.05e5,
        _ => load[1] * 1e5,
    };
    let rows = |parts: f64| -> Vec<Vec<u64>> {
        (0..stages).map(|s| loads.iter().map(|load| (parts * ns(s, load)) as u64).collect()).collect()
    };
    StepInput {
        layout: Layout::disaggregated(component(1), component(stages - 1)),
        order: PipelineOrder::OneFOneB,
        num_microbatches: loads.len() as u32,
        forward_ns: rows(1.0),
        backward_ns: rows(2.0),
        input_ns: rows(1.0),
        weight_ns: rows(1.0),
        feeds: vec![vec![vec![0]]; loads.len()],
        transfer_ns: 0,
        tail_ns: vec![0; stages as usize],
        ready_ns: Vec::new(),
    }
}

fn main() -> Result<(), dflop_sim::SimError> {
    let effort: usize = std::env::args().nth(1).and_then(|text| text.parse().ok()).unwrap_or(200_000);
    let names = [
        "arrival",
        "gpipe",
        "1f1b",
        "zb",
        "aware F/B",
        "aware I/W",
        "I/W 2x",
        "shaped F/B",
        "shaped I/W",
        "ms a list",
    ];
    print!("{:>6} {:>6}", "stages", "m");
    for name in names {
        print!(" {name:>11}");
    }
    println!();
    for stages in [4, 8, 16] {
        for m in [8, 16, 32, 64] {
            let seeds = 8;
            let mut sums = vec![0.0; names.len()];
            for seed in 0..seeds {
                let samples = samples(8 * m, &mut Random(seed));
                let balanced = step(stages, &pack(&samples, m, Dealing::Balanced));
                let load = |rank: usize| -> u64 {
                    balanced.forward_ns[rank].iter().chain(&balanced.backward_ns[rank]).sum()
                };
                let ideal_ns = (0..stages as usize).map(load).max().unwrap_or(1) as f64;
                let ordered = |input: &StepInput, order| {
                    simulate_step(&StepInput { order, ..input.clone() })
                        .map(|t| t.makespan_ns as f64 / ideal_ns)
                };
                sums[0] +=
                    ordered(&step(stages, &pack(&samples, m, Dealing::Arrival)), PipelineOrder::OneFOneB)?;
                sums[1] += ordered(&balanced, PipelineOrder::GPipe)?;
                sums[2] += ordered(&balanced, PipelineOrder::OneFOneB)?;
                sums[3] += ordered(&balanced, PipelineOrder::ZeroBubble)?;
                let shaped = step(stages, &pack(&samples, m, Dealing::Shaped(stages as usize)));
                let arms = [(&balanced, 1, false), (&balanced, 1, true), (&balanced, 2, true)];
                let arms = arms.into_iter().chain([(&shaped, 1, false), (&shaped, 1, true)]);
                for (at, (input, depth, is_split)) in (4..).zip(arms) {
                    let start = Instant::now();
                    let holding = Holding::of_one_f_one_b(input, depth);
                    let lists = data_aware_within(input, &holding, is_split, effort)?;
                    sums[9] += start.elapsed().as_secs_f64() * 1e3 / 5.0;
                    sums[at] += simulate_lists(input, &lists)?.makespan_ns as f64 / ideal_ns;
                }
            }
            print!("{stages:>6} {m:>6}");
            for sum in sums {
                print!(" {:>11.3}", sum / seeds as f64);
            }
            println!();
        }
    }
    Ok(())
}
