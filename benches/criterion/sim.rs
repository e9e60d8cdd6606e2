//! Actions a second: a whole timeline with idle by cause, and one makespan of a search, over growing steps; a swap
//! against a whole pass; lists with I and W.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use dflop_sim::{Durations, Simulator, StepInput, simulate, simulate_step};
use dflop_types::{ComponentLayout, Layout, PipelineOrder, Rank};
use std::hint::black_box;

/// Uneven times without a generator: a fixed walk over 1..=1000 us.
fn rows(ranks: usize, m: usize, salt: u64) -> Vec<Vec<u64>> {
    let time = |at: usize| 1_000 * (1 + (at as u64 * 7_919 + salt) % 1_000);
    (0..ranks).map(|rank| (0..m).map(|j| time(rank * m + j)).collect()).collect()
}

fn pipelines(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("simulate");
    for (p, m) in [(8, 32), (16, 128), (64, 512)] {
        let durations = Durations {
            forward_ns: rows(p, m, 1),
            backward_ns: rows(p, m, 5),
            transfer_ns: 3_000,
            ..Durations::default()
        };
        group.throughput(Throughput::Elements(2 * (p * m) as u64));
        for order in [PipelineOrder::GPipe, PipelineOrder::OneFOneB] {
            let id = BenchmarkId::new(order.to_string(), format!("{p}x{m}"));
            group.bench_function(id, |bencher| bencher.iter(|| simulate(black_box(&durations), order)));
        }
    }
    group.finish();
}

fn steps(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("step");
    for (encoders, replicas, stages, m) in [(2, 2, 7, 32), (16, 16, 3, 32), (128, 128, 7, 64)] {
        let component = |pp, dp| ComponentLayout { tp: 1, pp, dp };
        let layout = Layout::disaggregated(component(1, encoders), component(stages, replicas));
        let ranks = layout.num_ranks() as usize;
        // Each encoder replica feeds its neighbours: a sample's segments are seldom spread over all.
        let near = |e: u32, r: u32| (e + encoders - r * encoders / replicas) % encoders < 2;
        let column: Vec<Vec<u32>> =
            (0..encoders).map(|e| (0..replicas).filter(|&r| near(e, r)).collect()).collect();
        let input = StepInput {
            layout,
            order: PipelineOrder::OneFOneB,
            num_microbatches: m,
            forward_ns: rows(ranks, m as usize, 1),
            backward_ns: rows(ranks, m as usize, 5),
            input_ns: rows(ranks, m as usize, 5),
            weight_ns: rows(ranks, m as usize, 9),
            feeds: vec![column; m as usize],
            transfer_ns: 3_000,
            tail_ns: vec![1_000_000; ranks],
            ready_ns: Vec::new(),
        };
        group.throughput(Throughput::Elements(2 * ranks as u64 * u64::from(m)));
        let size = format!("{encoders}+{replicas}x{stages} ranks x{m}");
        group.bench_function(BenchmarkId::new("timeline", &size), |bencher| {
            bencher.iter(|| simulate_step(black_box(&input)));
        });
        let mut simulator = Simulator::new(&input).expect("the input is sound");
        let order: Vec<usize> = (0..m as usize).rev().collect();
        group.bench_function(BenchmarkId::new("makespan in order", &size), |bencher| {
            bencher.iter(|| simulator.makespan_in_order(black_box(&order)));
        });
        // Two microbatches anywhere change places and back: half of the step is timed anew on the mean.
        let mut at = 0;
        group.bench_function(BenchmarkId::new("swap and undo", &size), |bencher| {
            bencher.iter(|| {
                at += 7_919;
                let makespan_ns = simulator.swap(at % m as usize, (at / 3) % m as usize);
                simulator.undo();
                makespan_ns
            });
        });
        let input = StepInput { order: PipelineOrder::ZeroBubble, ..input };
        group.throughput(Throughput::Elements(3 * ranks as u64 * u64::from(m)));
        let lists: Vec<_> = (0..layout.num_ranks()).filter_map(|rank| input.actions(Rank(rank))).collect();
        let mut simulator = Simulator::with_lists(&input, &lists).expect("the lists are sound");
        group.bench_function(BenchmarkId::new("makespan of lists with I and W", &size), |bencher| {
            bencher.iter(|| black_box(&mut simulator).makespan_ns());
        });
    }
    group.finish();
}

criterion_group!(benches, pipelines, steps);
criterion_main!(benches);
