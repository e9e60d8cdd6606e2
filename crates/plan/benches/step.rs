//! Time of one schedule, both arms weighed and the order searched, as the planner and the training ask for it.

#[path = "../tests/fixture/mod.rs"]
mod fixture;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use dflop_cost::CostModel;
use dflop_plan::{Arm, StepScheduler, StepSettings};
use dflop_types::{ComponentLayout, Layout, PipelineOrder, SampleIndex};
use std::hint::black_box;

fn schedule(c: &mut Criterion) {
    let mut group = c.benchmark_group("schedule");
    for (samples, microbatches, encoder_dp, llm_pp, llm_dp) in
        [(64, 16, 1, 1, 1), (64, 16, 1, 2, 1), (64, 8, 2, 1, 2), (256, 16, 4, 2, 4), (1_024, 32, 16, 4, 8)]
    {
        let layout = Layout {
            encoder: ComponentLayout { tp: 1, pp: 1, dp: encoder_dp },
            llm: ComponentLayout { tp: 1, pp: llm_pp, dp: llm_dp },
        };
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

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(20).without_plots();
    targets = schedule
}
criterion_main!(benches);
