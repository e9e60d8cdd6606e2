//! Time of one schedule, both arms weighed and the order searched, as the planner and the training ask for it; and of
//! making action lists alone.

#[path = "../../crates/step/tests/fixture/mod.rs"]
mod fixture;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use dflop_cost::CostModel;
use dflop_sim::StepInput;
use dflop_step::lists::{EFFORT, Holding, data_aware_within};
use dflop_step::{Arm, StepScheduler, StepSettings};
use dflop_types::{ComponentLayout, Layout, PipelineOrder, SampleIndex};
use std::hint::black_box;

fn schedule(c: &mut Criterion) {
    let mut group = c.benchmark_group("schedule");
    for (samples, microbatches, encoder_dp, llm_pp, llm_dp) in
        [(64, 16, 1, 1, 1), (64, 16, 1, 2, 1), (64, 8, 2, 1, 2), (256, 16, 4, 2, 4), (1_024, 32, 16, 4, 8)]
    {
        let layout = Layout::disaggregated(
            ComponentLayout { tp: 1, pp: 1, dp: encoder_dp },
            ComponentLayout { tp: 1, pp: llm_pp, dp: llm_dp },
        );
        let settings = StepSettings {
            layout,
            num_microbatches: microbatches,
            pipeline_order: PipelineOrder::OneFOneB,
            memory_budget_bytes: None,
        };
        let model = CostModel::new(&fixture::model_profile()).expect("the fixture is sound");
        let shapes = fixture::shapes(samples, 1);
        let scheduler = StepScheduler::new(settings, model, shapes, 1).expect("the settings are sound");
        let batch: Vec<SampleIndex> = (0..samples as u32).map(SampleIndex).collect();
        let name =
            format!("{samples} samples, {microbatches} microbatches, e{encoder_dp} pp{llm_pp} dp{llm_dp}");
        for arm in [Arm::AWARE, Arm::BLIND] {
            let id = BenchmarkId::new(format!("{arm:?}"), &name);
            group.bench_function(id, |b| b.iter(|| black_box(scheduler.schedule(3, &batch, arm))));
        }
    }
    group.finish();
}

/// Uneven times without a generator: a fixed walk over 1..=1000 us.
fn rows(ranks: usize, m: usize, salt: u64) -> Vec<Vec<u64>> {
    let time = |at: usize| 1_000 * (1 + (at as u64 * 7_919 + salt) % 1_000);
    (0..ranks).map(|rank| (0..m).map(|j| time(rank * m + j)).collect()).collect()
}

/// Making the lists of a step: one pass by one rule, and the search with its usual effort.
fn lists(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("listing");
    for (p, m) in [(8, 32), (16, 64)] {
        let component = |pp| ComponentLayout { tp: 1, pp, dp: 1 };
        let input = StepInput {
            layout: Layout::disaggregated(component(1), component(p - 1)),
            order: PipelineOrder::OneFOneB,
            num_microbatches: m,
            forward_ns: rows(p as usize, m as usize, 1),
            backward_ns: rows(p as usize, m as usize, 5),
            input_ns: rows(p as usize, m as usize, 5),
            weight_ns: rows(p as usize, m as usize, 9),
            feeds: vec![vec![vec![0]]; m as usize],
            transfer_ns: 3_000,
            tail_ns: vec![1_000_000; p as usize],
            ready_ns: Vec::new(),
        };
        let holding = Holding::of_one_f_one_b(&input, 1);
        for (name, effort) in [("one pass", 0), ("search", EFFORT)] {
            group.bench_function(BenchmarkId::new(name, format!("{p}x{m}")), |bencher| {
                bencher.iter(|| data_aware_within(black_box(&input), &holding, true, effort));
            });
        }
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(20).without_plots();
    targets = schedule, lists
}
criterion_main!(benches);
