//! A certified lower bound on the step of a candidate. With it the search can drop a candidate without scheduling a
//! batch.

use crate::batch_shapes::BatchShapes;
use crate::facts::{EqualStages, Facts};
use crate::space::Candidate;
use dflop_cost::{ColocatedSharding, CostModel, StageLayers, WorkMin};
use dflop_types::{ComponentLayout, Layout, MicrobatchShape};
use std::cmp::Reverse;

/// What every layout must do for one global batch.
#[derive(Debug, Clone)]
pub(crate) struct BatchWork {
    least: WorkMin,
    /// Time from the first forward to the last backward of the sample that takes longest, among the samples of one
    /// part, in nanoseconds.
    longest_sample_ns: u64,
    /// For samples of several parts: the least work of the encoder, and the time through all stages of the LLM backbone in
    /// nanoseconds. Parts may be encoded on different replicas, so the encoder's time depends on the layout. A sample that
    /// takes no longer than another on both components is left out: it is never the longest.
    in_parts: Vec<(WorkMin, u64)>,
}

impl BatchWork {
    pub(crate) fn new(model: &CostModel, batch: &BatchShapes<'_>) -> Self {
        let mut work =
            Self { least: model.work_min(&batch.whole), longest_sample_ns: 0, in_parts: Vec::new() };
        for &sample in &batch.longest {
            let alone = MicrobatchShape::pack([sample]);
            let llm_ns = model.llm_stage(&alone, model.num_llm_layers(), true, true).total_ns();
            if sample.num_parts() > 1 {
                work.in_parts.push((model.work_min(&alone), llm_ns));
            } else {
                let sample_ns = model.encoder(&alone).total_ns().saturating_add(llm_ns);
                work.longest_sample_ns = work.longest_sample_ns.max(sample_ns);
            }
        }
        let encoder_ns = |(least, _): &(WorkMin, u64)| least.encoder_ns(1);
        work.in_parts.sort_by_key(|one| Reverse((one.1, encoder_ns(one))));
        let mut most_ns = None;
        work.in_parts.retain(|one| {
            let is_more = most_ns.is_none_or(|most| encoder_ns(one) > most);
            most_ns = most_ns.max(Some(encoder_ns(one)));
            is_more
        });
        work
    }

    /// The least work of the encoder in at most so many microbatches, in nanoseconds.
    pub(crate) fn encoder_min_ns(&self, parts: u64) -> u64 {
        self.least.encoder_ns(parts)
    }

    /// As [`BatchWork::encoder_min_ns`], of a stage of the LLM backbone.
    pub(crate) fn stage_min_ns(&self, stage: StageLayers, parts: u64) -> u64 {
        self.least.stage_ns(stage, parts)
    }

    /// Time of the sample that takes longest, if each sample is encoded on at most `replicas` replicas, in nanoseconds.
    fn longest_ns(&self, replicas: u64) -> u64 {
        let in_parts = self.in_parts.iter();
        in_parts
            .map(|(least, llm_ns)| (least.encoder_ns(replicas) / replicas).saturating_add(*llm_ns))
            .fold(self.longest_sample_ns, u64::max)
    }
}

/// No schedule of the batch has a smaller makespan than this, in nanoseconds.
///
/// ```text
/// makespan >= least work of a stage / its replicas + its tail           for each LLM stage
/// makespan >= mean least work of an encoder stage / its replicas + tail  the tail only if there is one encoder stage
/// makespan >= F and B of one sample through all stages + encoder's tail  for each sample; if the sample has several
///             parts, its encoder work counts as if it were spread evenly over all encoder replicas
/// ```
///
/// The first two bounds hold because the fullest replica has at least the mean work. The third holds because a
/// microbatch that holds the sample takes at least as long as the sample alone, on every stage, and because the step
/// ends after the encoder's last backward.
pub(crate) fn makespan_min_ns(
    model: &CostModel,
    candidate: &Candidate,
    facts: &Facts,
    work: &BatchWork,
) -> u64 {
    if candidate.layout.is_colocated() {
        return colocated_min_ns(model, candidate, work);
    }
    let microbatches = u64::from(candidate.num_microbatches);
    let replicas = |dp: u32| (u64::from(dp), u64::from(dp) * microbatches);
    let (encoder_dp, encoder_parts) = replicas(candidate.layout.encoder.dp);
    let (llm_dp, llm_parts) = replicas(candidate.layout.llm.dp);
    let path = work.longest_ns(encoder_dp);
    // The fullest of several encoder stages does at least the mean work. Which stage that is, and so which tail follows
    // it, is not known: then no tail is added.
    let encoder_stages = u64::from(candidate.layout.encoder.pp);
    let tail_ns = if encoder_stages == 1 { facts.encoder_tail_ns } else { 0 };
    let encoder = (work.least.encoder_ns(encoder_parts) / (encoder_dp * encoder_stages)).max(path) + tail_ns;
    let of_stage = |equal: &EqualStages| work.least.stage_ns(equal.stage, llm_parts) / llm_dp + equal.tail_ns;
    facts.stages.iter().map(of_stage).fold(encoder, u64::max)
}

/// No pipeline of these degrees has a smaller mean makespan over the batches than this, in nanoseconds, whatever its
/// number of microbatches and its cut into stages. It is the work of a component, divided by its number of tensor groups.
pub(crate) fn work_min_ns(model: &CostModel, layout: &Layout, works: &[BatchWork]) -> u64 {
    let over = |ns: u64, degrees: ComponentLayout| ns / u64::from(degrees.pp * degrees.dp).max(1);
    let of_batch = |work: &BatchWork| {
        let encoder_ns = work.least.encoder_ns(layout.encoder.dp.into());
        let llm_ns = work.least.stage_ns(model.whole_stage(), layout.llm.dp.into());
        over(encoder_ns, layout.encoder).max(over(llm_ns, layout.llm))
    };
    let sum: u128 = works.iter().map(|work| u128::from(of_batch(work))).sum();
    u64::try_from(sum / works.len().max(1) as u128).unwrap_or(u64::MAX)
}

/// As [`makespan_min_ns`], for ranks that hold both components.
///
/// ```text
/// makespan >= least work of the encoder / its replicas + least work of the LLM backbone / its replicas + tail
/// makespan >= F and B of one sample + tail     a sample of several parts: its encoder work is spread over the replicas
/// ```
pub(crate) fn colocated_min_ns(model: &CostModel, candidate: &Candidate, work: &BatchWork) -> u64 {
    let (encoders, ranks) = (u64::from(candidate.layout.encoder.dp), u64::from(candidate.layout.llm.dp));
    let parts = |replicas: u64| replicas.saturating_mul(candidate.num_microbatches.into());
    let encoder_ns = work.encoder_min_ns(parts(encoders)) / encoders;
    let all_ns = work.stage_min_ns(model.whole_stage(), parts(ranks)) / ranks + encoder_ns;
    let tail = model.colocated_tail(ColocatedSharding::of(&candidate.layout));
    all_ns.max(work.longest_ns(encoders)).saturating_add(tail.ns)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;
    use crate::rough::BatchSizes;
    use crate::space::layouts_with;
    use dflop_cost::{ComponentSettings, CostSettings};
    use dflop_step::{Method, StepScheduler, StepSettings};
    use dflop_types::{ExpertsProfile, PipelineOrder, Recomputation, SampleIndex, SampleShape, Zero};
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// No schedule of either arm is predicted faster than the bound, and the bound is above a twelfth of it.
        #[test]
        fn no_schedule_beats_the_bound(
            seed: u64, count in 1usize..40, ranks in 2u32..6, which in 0usize..32, m in 1u32..9
        ) {
            let mut shapes = fixture::shapes(count, seed);
            // A video in parts: every replica may encode some of it.
            shapes[0] = fixture::video(1 + (seed % 300) as u32, 2, 40);
            let batch: Vec<SampleIndex> = (0..count as u32).map(SampleIndex).collect();
            let several = (1..3).flat_map(|pp| layouts_with(ranks, pp, [1, 1]));
            let mut layouts: Vec<_> = several.filter(|l| l.llm.pp <= 4).collect();
            let chunked = |l: &Layout| l.llm.pp == 2;
            let interleaved: Vec<_> = layouts.iter().copied().filter(chunked).map(|l| Layout { llm_interleave: 2, ..l }).collect();
            layouts.extend(interleaved);
            layouts.extend(Zero::ALL.map(|zero| Layout::colocated(ranks, zero)));
            if ranks.is_multiple_of(2) {
                let dealt = |zero| Layout { expert_parallel_degree: 2, ..Layout::colocated(ranks, zero) };
                layouts.extend(Zero::ALL.map(dealt));
            }
            let candidate = Candidate { layout: layouts[which % layouts.len()], num_microbatches: m, recompute: Recomputation::NONE, order: PipelineOrder::OneFOneB };
            let settings = StepSettings {
                layout: candidate.layout,
                num_microbatches: m,
                pipeline_order: PipelineOrder::OneFOneB,
                memory_budget_bytes: None,
            };
            let mut profile = fixture::model_profile();
            profile.modules.get_mut("encoder_layer").expect("it is there").count = 3;
            let layer = profile.modules.get_mut("llm_layer").expect("it is there");
            let [num_parameters, parameter_bytes] = [layer.num_parameters, layer.parameter_bytes].map(|all| all / 2);
            layer.experts = Some(ExpertsProfile { count: 4, per_token: 2, num_parameters, parameter_bytes });
            let model = CostModel::with(&profile, &CostSettings::default().in_layout(&candidate.layout)).unwrap();
            let work = BatchWork::new(&model, &BatchShapes::new(&shapes, &batch));
            let facts = Facts::new(&model, &settings).unwrap();
            let scheduler = StepScheduler::new(settings, model, shapes, seed).unwrap();
            let bound_ns = makespan_min_ns(scheduler.model(), &candidate, &facts, &work);
            let pair = scheduler.pair(0, &batch, Method::Aware, &|| false).unwrap();
            prop_assert!(bound_ns <= pair.aware.predicted_makespan_ns);
            prop_assert!(bound_ns <= pair.blind.predicted_makespan_ns);
            prop_assert!(bound_ns > pair.aware.predicted_makespan_ns / 12);
        }

        /// A search may leave out all pipelines of some degrees because of their least work. So no such pipeline may have a
        /// mean step below that: whatever its tensor degrees, its cut into stages, its microbatches, and its heaviest batch.
        #[test]
        fn no_pipeline_beats_the_least_work_of_its_degrees(
            seed: u64, count in 4usize..40, ranks in 2u32..9, which in 0usize..256, m in 1u32..9,
            degrees in (0usize..3, 0usize..3), heavy_first: bool, is_cut: bool, is_even: bool,
        ) {
            let degrees = [degrees.0, degrees.1].map(|at| [1, 2, 4][at]);
            let mut shapes = fixture::shapes(count, seed);
            let tokens = |shape: &SampleShape| (shape.encoder_tokens(), shape.llm_tokens);
            shapes.sort_by_key(|shape| tokens(shape));
            if heavy_first {
                shapes.reverse();
            }
            let all: Vec<SampleIndex> = (0..count as u32).map(SampleIndex).collect();
            let batches: [&[SampleIndex]; 2] = all.split_at(count / 2).into();
            let layouts: Vec<_> = (1..4).flat_map(|pp| layouts_with(ranks, pp, degrees)).filter(|l| l.llm.pp <= 4).collect();
            prop_assume!(!layouts.is_empty());
            let zero = if is_cut { Zero::States } else { Zero::Nothing };
            let layout = Layout { zero, ..layouts[which % layouts.len()] };
            let of = |tensor_parallel_degree| ComponentSettings { tensor_parallel_degree, ..ComponentSettings::default() };
            let settings = CostSettings { encoder: of(degrees[0]), llm: of(degrees[1]), ..CostSettings::default() };
            let model = CostModel::with(&fixture::cuttable(), &settings).unwrap();
            let layout = if is_even {
                layout
            } else {
                BatchSizes::new(&model, &BatchShapes::new(&shapes, batches[0])).shortest_cut(&model, &layout)
            };
            let works = batches.map(|batch| BatchWork::new(&model, &BatchShapes::new(&shapes, batch)));
            let least_ns = work_min_ns(&model, &layout, &works);
            let settings = StepSettings {
                layout,
                num_microbatches: m,
                pipeline_order: PipelineOrder::OneFOneB,
                memory_budget_bytes: None,
            };
            let scheduler = StepScheduler::new(settings, model, shapes, seed).unwrap();
            let mut sums = [0; 2];
            for (step, batch) in (0..).zip(batches) {
                let pair = scheduler.pair(step, batch, Method::Aware, &|| false).unwrap();
                sums[0] += pair.aware.predicted_makespan_ns;
                sums[1] += pair.blind.predicted_makespan_ns;
            }
            prop_assert!(least_ns <= sums[0] / 2 && least_ns <= sums[1] / 2, "{layout}: {least_ns} {sums:?}");
        }
    }
}
