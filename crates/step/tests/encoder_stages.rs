//! Encoders of several stages, and cuts of layers that the layout names.

use crate::fixture;
use dflop_cost::CostModel;
use dflop_step::{Arm, StepScheduler, StepSettings};
use dflop_types::{ComponentLayout, LayerCut, Layout, PipelineOrder, Rank, SampleIndex, SampleShape};
use proptest::prelude::*;

fn layout(encoder_dp: u32, llm_pp: u32, replicas: u32) -> Layout {
    Layout::disaggregated(
        ComponentLayout { tp: 1, pp: 1, dp: encoder_dp },
        ComponentLayout { tp: 1, pp: llm_pp, dp: replicas },
    )
}

/// The same with so many encoder stages.
fn with_stages(layout: Layout, pp: u32) -> Layout {
    Layout { encoder: ComponentLayout { pp, ..layout.encoder }, ..layout }
}

fn settings(layout: Layout, num_microbatches: u32) -> StepSettings {
    StepSettings {
        layout,
        num_microbatches,
        pipeline_order: PipelineOrder::OneFOneB,
        memory_budget_bytes: None,
    }
}

/// The fixture with six layers in the encoder.
fn model() -> CostModel {
    let mut profile = fixture::model_profile();
    profile.modules.get_mut("encoder_layer").expect("it is there").count = 6;
    CostModel::new(&profile).expect("the fixture is sound")
}

fn scheduler(settings: StepSettings, shapes: Vec<SampleShape>, seed: u64) -> StepScheduler {
    StepScheduler::new(settings, model(), shapes, seed).expect("the settings are sound")
}

fn indices(count: usize) -> Vec<SampleIndex> {
    (0..count as u32).map(SampleIndex).collect()
}

/// Two encoder stages: each action once on each of four ranks; an encoder rank holds a part of the model, and the step of
/// one microbatch takes the encoder's whole time before its features leave.
#[test]
fn encoder_stages_are_ranks_of_their_own() {
    let shapes = fixture::shapes(24, 3);
    let batch = indices(24);
    let whole = scheduler(settings(layout(1, 2, 1), 4), shapes.clone(), 1);
    let staged = scheduler(settings(with_stages(layout(1, 2, 1), 2), 4), shapes.clone(), 1);
    assert_eq!(
        staged.encoder_stages().iter().map(|s| s.num_layers).sum::<u32>(),
        staged.model().num_encoder_layers()
    );
    let schedule = staged.schedule(0, &batch, Arm::AWARE).unwrap();
    schedule.check(&batch, |s| shapes[s.index()].num_parts()).unwrap();
    let timeline = staged.simulate(&schedule).unwrap();
    let of_rank = |rank| timeline.spans.iter().filter(|span| span.rank == Rank(rank)).count();
    assert_eq!([0, 1, 2, 3].map(of_rank), [8; 4]);
    let memory = staged.memory(&schedule).unwrap();
    assert_eq!(memory.len(), 4);
    let parameters: u64 = memory[..2].iter().map(|peak| peak.parameter_bytes).sum();
    let other = whole.schedule(0, &batch, Arm::AWARE).unwrap();
    assert_eq!(parameters, whole.memory(&other).unwrap()[0].parameter_bytes);
    // The same placement on both: a forward of the encoder takes as long in stages as in one.
    let (one, two) = (whole.step_input(&schedule).unwrap(), staged.step_input(&schedule).unwrap());
    for microbatch in 0..4 {
        let of = |rows: &[Vec<u64>]| rows.iter().map(|row| row[microbatch]).sum::<u64>();
        assert_eq!(of(&one.forward_ns[..1]), of(&two.forward_ns[..2]));
        assert_eq!(of(&one.backward_ns[..1]), of(&two.backward_ns[..2]));
    }
}

/// A cut that is not of the model's layers, and stages that exceed them, are refused by their numbers.
#[test]
fn a_cut_of_other_layers_is_refused() {
    let model = model();
    let (encoder_layers, llm_layers) = (model.num_encoder_layers(), model.num_llm_layers());
    let error = |layout| {
        StepScheduler::new(settings(layout, 2), model.clone(), fixture::shapes(4, 1), 0)
            .unwrap_err()
            .to_string()
    };
    let cut = |layers: &[u32]| Some(LayerCut::new(layers).unwrap());
    let too_many = llm_layers + 1;
    assert_eq!(
        error(Layout { llm_cut: cut(&[1, too_many]), ..layout(1, 2, 1) }),
        format!(
            "llm layers 1+{too_many} are {} in 2 stages, the model has {llm_layers} in the LLM backbone and the layout llm pp 2",
            too_many + 1
        )
    );
    let stages = encoder_layers + 1;
    assert_eq!(
        error(with_stages(layout(1, 1, 1), stages)),
        format!("encoder pp {stages} exceeds the {encoder_layers} layers of the encoder")
    );
    let uneven = Layout { llm_cut: cut(&[llm_layers - 1, 1]), ..layout(1, 2, 1) };
    let scheduler = StepScheduler::new(settings(uneven, 2), model.clone(), fixture::shapes(4, 1), 0).unwrap();
    assert_eq!(scheduler.stages().iter().map(|s| s.num_layers).collect::<Vec<_>>(), [llm_layers - 1, 1]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Any layout with encoder stages: sound schedules of both arms, each list runs to its end, memory of every rank; and
    /// with data-aware lists no slower than without.
    #[test]
    fn every_layout_with_stages_gives_a_sound_schedule(
        seed: u64, count in 0usize..30, m in 1u32..6, degrees in (1u32..3, 1u32..5, 1u32..4, 1u32..3), is_listed: bool
    ) {
        let (encoder_dp, encoder_pp, llm_pp, llm_dp) = degrees;
        let layout = with_stages(layout(encoder_dp, llm_pp, llm_dp), encoder_pp);
        let order = if is_listed { PipelineOrder::DataAware } else { PipelineOrder::OneFOneB };
        let settings = StepSettings { pipeline_order: order, ..settings(layout, m) };
        let shapes = fixture::shapes(count, seed);
        let batch = indices(count);
        let scheduler = scheduler(settings, shapes.clone(), seed);
        let blind = scheduler.schedule(0, &batch, Arm::BLIND).unwrap();
        let aware = scheduler.schedule(0, &batch, Arm::AWARE).unwrap();
        prop_assert!(aware.predicted_makespan_ns <= blind.predicted_makespan_ns);
        for schedule in [&blind, &aware] {
            schedule.check(&batch, |s| shapes[s.index()].num_parts()).unwrap();
            let timeline = scheduler.simulate(schedule).unwrap();
            prop_assert_eq!(timeline.makespan_ns, schedule.predicted_makespan_ns);
            prop_assert_eq!(scheduler.memory(schedule).unwrap().len(), layout.num_ranks() as usize);
        }
    }
}
