//! The scheduler of colocated ranks against the closed form of data parallelism: packed by tokens, they are the same step.

use crate::fixture;
use dflop_cost::{CostModel, RankMemory};
use dflop_plan::DataParallel;
use dflop_step::{Arm, Method, StepScheduler, StepSettings};
use dflop_types::{Layout, PipelineOrder, SampleIndex, Zero};
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn token_packed_data_parallelism_is_a_colocated_layout(
        seed in 0u64..99, ranks in 1u32..6, count in 1usize..40, budget_percent in 40u64..130
    ) {
        let shapes = fixture::shapes(count, seed);
        let batch: Vec<SampleIndex> = (0..count as u32).map(SampleIndex).collect();
        let model = CostModel::new(&fixture::model_profile()).unwrap();
        let plain = |memory_budget_bytes| DataParallel {
            model: &model,
            shapes: &shapes,
            num_ranks: ranks,
            shards_states: false,
            memory_budget_bytes,
            bucket_tokens_max: None,
        };
        let needed_bytes = plain(None).step(&batch).unwrap().needed_bytes;
        for budget in [None, Some(needed_bytes * budget_percent / 100)] {
            let settings = StepSettings {
                layout: Layout::colocated(ranks, Zero::Nothing),
                num_microbatches: 64,
                pipeline_order: PipelineOrder::OneFOneB,
                memory_budget_bytes: budget,
            };
            let scheduler = StepScheduler::new(settings, model.clone(), shapes.clone(), 1).unwrap();
            let found = scheduler.schedule(0, &batch, Arm { method: Method::Tokens, is_ahead: false });
            match plain(budget).step(&batch) {
                Ok(expected) => {
                    let found = found.unwrap();
                    prop_assert_eq!(found.predicted_makespan_ns, expected.makespan_ns);
                    let memory = scheduler.memory(&found).unwrap();
                    let peak = memory.iter().map(RankMemory::total_bytes).max().unwrap();
                    prop_assert_eq!(peak, expected.needed_bytes);
                    let aware = scheduler.schedule(0, &batch, Arm::AWARE).unwrap();
                    prop_assert!(aware.predicted_makespan_ns <= expected.makespan_ns);
                }
                Err(_) => prop_assert!(found.is_err()),
            }
        }
    }
}
