//! A certified lower bound on the step of a candidate: what lets the search drop it without scheduling a
//! batch.

use crate::space::Candidate;
use crate::step::StepScheduler;
use dflop_cost::{CostModel, StageLayers, WorkMin};
use dflop_types::{MicrobatchShape, SampleIndex, SampleShape};

/// What every layout must do for one global batch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BatchWork {
    least: WorkMin,
    /// Time of the sample that takes longest from the first forward to the last backward, in nanoseconds.
    longest_sample_ns: u64,
}

impl BatchWork {
    pub(crate) fn new(model: &CostModel, shapes: &[SampleShape], batch: &[SampleIndex]) -> Self {
        let samples = || batch.iter().map(|sample| &shapes[sample.index()]);
        let longest_sample_ns = samples().map(|sample| {
            let alone = MicrobatchShape::pack([sample]);
            let llm = model.llm_stage(&alone, model.num_llm_layers(), true, true);
            model.encoder(&alone).total_ns().saturating_add(llm.total_ns())
        });
        Self {
            longest_sample_ns: longest_sample_ns.max().unwrap_or(0),
            least: model.work_min(&MicrobatchShape::pack(samples())),
        }
    }
}

/// No schedule of the batch has a smaller makespan than this, in nanoseconds.
///
/// ```text
/// makespan >= least work of a stage / its replicas + its tail      for each stage
/// makespan >= F and B of one sample through all stages + the encoder's tail
/// ```
///
/// The first holds as the fullest replica is no emptier than the mean; the second as a microbatch that holds
/// the sample takes no less than the sample alone, stage by stage, and the step ends after the encoder's last
/// backward.
pub(crate) fn makespan_min_ns(
    model: &CostModel,
    candidate: &Candidate,
    stages: &[StageLayers],
    work: &BatchWork,
) -> u64 {
    let microbatches = u64::from(candidate.num_microbatches);
    let replicas = |dp: u32| (u64::from(dp), u64::from(dp) * microbatches);
    let (encoder_dp, encoder_parts) = replicas(candidate.layout.encoder.dp);
    let (llm_dp, llm_parts) = replicas(candidate.layout.llm.dp);
    let path = work.longest_sample_ns;
    let encoder = (work.least.encoder_ns(encoder_parts) / encoder_dp).max(path)
        + model.encoder_tail(candidate.layout.encoder.dp).ns;
    stages
        .iter()
        .map(|&stage| {
            let tail_ns = model.stage_tail(stage, candidate.layout.llm.dp).ns;
            work.least.stage_ns(stage, llm_parts) / llm_dp + tail_ns
        })
        .fold(encoder, u64::max)
}

/// The bound for each batch under the scheduler's settings.
pub(crate) fn bounds_ns(scheduler: &StepScheduler, candidate: &Candidate, works: &[BatchWork]) -> Vec<u64> {
    works.iter().map(|work| makespan_min_ns(&scheduler.model, candidate, &scheduler.stages, work)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{StepSettings, fixture, layouts};
    use dflop_types::PipelineOrder;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// No schedule of either arm is predicted faster than the bound, and the bound is of use.
        #[test]
        fn no_schedule_beats_the_bound(
            seed: u64, count in 1usize..40, ranks in 2u32..6, which in 0usize..20, m in 1u32..9
        ) {
            let shapes = fixture::shapes(count, seed);
            let batch: Vec<SampleIndex> = (0..count as u32).map(SampleIndex).collect();
            let layouts: Vec<_> = layouts(ranks).into_iter().filter(|l| l.llm.pp <= 4).collect();
            let candidate = Candidate { layout: layouts[which % layouts.len()], num_microbatches: m };
            let settings = StepSettings {
                layout: candidate.layout,
                num_microbatches: m,
                pipeline_order: PipelineOrder::OneFOneB,
                memory_budget_bytes: None,
            };
            let model = CostModel::new(&fixture::model_profile()).unwrap();
            let work = BatchWork::new(&model, &shapes, &batch);
            let scheduler = StepScheduler::new(settings, model, shapes, seed).unwrap();
            let bound_ns = bounds_ns(&scheduler, &candidate, &[work])[0];
            let pair = scheduler.pair(0, &batch).unwrap();
            prop_assert!(bound_ns <= pair.aware.predicted_makespan_ns);
            prop_assert!(bound_ns <= pair.blind.predicted_makespan_ns);
            prop_assert!(bound_ns > pair.aware.predicted_makespan_ns / 12);
        }
    }
}
