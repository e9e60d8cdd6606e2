//! Layouts whose LLM ranks hold several chunks: schedules, memory, and what is refused.

use crate::fixture;
use crate::scheduling::all_arms;
use dflop_cost::CostModel;
use dflop_step::{Arm, Method, StepError, StepScheduler, StepSettings};
use dflop_types::{
    ActionKind, ComponentLayout, Hint, LayerCut, Layout, PipelineOrder, Rank, SampleIndex, SampleShape,
    Schedule, Zero,
};
use proptest::prelude::*;

fn layout(encoder: (u32, u32), llm: (u32, u32), llm_interleave: u32) -> Layout {
    let degrees = |(pp, dp)| ComponentLayout { tp: 1, pp, dp };
    Layout { llm_interleave, ..Layout::disaggregated(degrees(encoder), degrees(llm)) }
}

fn settings(layout: Layout, num_microbatches: u32) -> StepSettings {
    let pipeline_order = PipelineOrder::OneFOneB;
    StepSettings { layout, num_microbatches, pipeline_order, memory_budget_bytes: None }
}

/// The fixture with twelve layers in the LLM backbone and three in the encoder.
fn model() -> CostModel {
    let mut profile = fixture::model_profile();
    profile.modules.get_mut("llm_layer").unwrap().count = 12;
    profile.modules.get_mut("encoder_layer").unwrap().count = 3;
    CostModel::new(&profile).unwrap()
}

fn scheduler(settings: StepSettings, shapes: Vec<SampleShape>) -> StepScheduler {
    StepScheduler::new(settings, model(), shapes, 3).unwrap()
}

fn indices(count: usize) -> Vec<SampleIndex> {
    (0..count as u32).map(SampleIndex).collect()
}

/// Chunks change where layers stand, not how many there are: a rank holds the parameters of all its chunks, the embedding
/// on the first and the head on the last, and keeps more activations than without chunks; the pipeline's idle time shrinks.
#[test]
fn chunks_cost_memory_and_save_time() {
    // One sample of text, again and again: even microbatches, and an encoder that keeps nobody waiting.
    let text = fixture::shapes(64, 3).into_iter().find(|shape| shape.num_parts() == 0).unwrap();
    let shapes = vec![text; 48];
    let batch = indices(48);
    let plain = scheduler(settings(layout((1, 2), (3, 1), 1), 12), shapes.clone());
    let chunked = scheduler(settings(layout((1, 2), (3, 1), 2), 12), shapes);
    let layers = |s: &StepScheduler| s.stages().iter().map(|stage| stage.num_layers).collect::<Vec<_>>();
    assert_eq!((layers(&plain), layers(&chunked)), (vec![4, 4, 4], vec![2; 6]));
    let schedule = plain.schedule(0, &batch, Arm::BLIND).unwrap();
    let memory = [&plain, &chunked].map(|scheduler| scheduler.memory(&schedule).unwrap());
    for (one, several) in memory[0].iter().zip(&memory[1]).skip(2) {
        assert_eq!(one.static_bytes(), several.static_bytes());
        assert!(several.activation_bytes >= one.activation_bytes, "{several:?} {one:?}");
    }
    assert!(memory[1][2].activation_bytes > memory[0][2].activation_bytes);
    // Without messages; each takes as long for a chunk as for a stage.
    let makespan_ns = |scheduler: &StepScheduler| {
        let mut input = scheduler.step_input(&schedule).unwrap();
        input.transfer_ns = 0;
        dflop_sim::simulate_step(&input).unwrap().makespan_ns
    };
    assert!(makespan_ns(&chunked) < makespan_ns(&plain), "{} {}", makespan_ns(&chunked), makespan_ns(&plain));
}

/// A sample keeps a rank for all of its chunks: what is heavy is what is heavy without chunks.
#[test]
fn outliers_take_a_ranks_chunks_together() {
    let of = |chunks| {
        let scheduler = scheduler(settings(layout((1, 2), (3, 1), chunks), 4), fixture::shapes(40, 9));
        scheduler.outliers(16, 5)
    };
    let (plain, chunked) = (of(1), of(2));
    assert_eq!(plain.heaviest.len(), 5);
    let times = |outliers: &dflop_step::Outliers| {
        let heaviest = outliers.heaviest.iter().map(|o| (o.sample, o.encoder_ns, o.llm_ns));
        (heaviest.collect::<Vec<_>>(), outliers.even_llm_ns, outliers.num_longer)
    };
    assert_eq!(times(&chunked), times(&plain));
}

/// What a rank holds at its peak: 3 microbatches of 2 chunks of 3 layers each on 2 LLM ranks, or of 6 layers in one run.
#[test]
fn the_fullest_moment_counts_all_chunks() {
    let shapes = vec![fixture::shapes(8, 3)[0].clone(); 3];
    let of = |pipeline_order, chunks| {
        let settings = StepSettings { pipeline_order, ..settings(layout((1, 1), (2, 1), chunks), 3) };
        let scheduler = scheduler(settings, shapes.clone());
        let schedule = scheduler.schedule(0, &indices(3), Arm::BLIND).unwrap();
        scheduler.memory(&schedule).unwrap()
    };
    // Under GPipe every forward is held at the end: the same activations, however they are dealt out, but that what the
    // first layer of a chunk keeps came as a message.
    let (one, two) = (of(PipelineOrder::GPipe, 1), of(PipelineOrder::GPipe, 2));
    let total =
        |memory: &[dflop_cost::RankMemory]| -> u64 { memory[1..].iter().map(|m| m.activation_bytes).sum() };
    let close = total(&one) / 100 * 98..=total(&one);
    assert!(close.contains(&total(&two)), "{} {}", total(&one), total(&two));
    // The borders between chunks are messages: more of them are open and held.
    assert!(two[1].boundary_bytes >= one[1].boundary_bytes);
}

/// What cannot be interleaved is refused by its numbers.
#[test]
fn what_cannot_be_interleaved_is_refused() {
    let refused = |settings: StepSettings| {
        let error = StepScheduler::new(settings, model(), fixture::shapes(4, 1), 0).unwrap_err();
        (error.to_string(), error.hint().unwrap())
    };
    let anew = "make the plan anew with `dflop plan`";
    let rule = "chunks are dealt round over the ranks of a pipeline, llm pp must be 2 or more and the components on ranks of their own";
    let alone = layout((1, 1), (1, 2), 2);
    assert_eq!(
        refused(settings(alone, 2)),
        (format!("layout `{alone}` has `llm_interleave` 2: {rule}"), anew.to_owned())
    );
    let together = Layout { llm_interleave: 3, ..Layout::colocated(2, Zero::Nothing) };
    assert_eq!(
        refused(settings(together, 2)).0,
        format!("layout `{together}` has `llm_interleave` 3: {rule}")
    );
    assert_eq!(
        refused(settings(layout((1, 1), (2, 1), 0), 2)).0,
        "`layout.llm_interleave` is 0, must be at least 1"
    );
    assert_eq!(
        refused(settings(layout((1, 1), (5, 1), 3), 2)).0,
        "llm pp 5 x interleave 3 exceeds the 12 layers of the LLM backbone"
    );
    let cut = Layout { llm_cut: Some(LayerCut::new(&[6, 6]).unwrap()), ..layout((1, 1), (2, 1), 2) };
    assert_eq!(
        refused(settings(cut, 2)).0,
        "llm layers 6+6 are 12 in 2 stages, the model has 12 in the LLM backbone and the layout llm pp 2 x interleave 2"
    );
    let order = |pipeline_order, chunks| StepSettings {
        pipeline_order,
        ..settings(layout((1, 1), (2, 1), chunks), 2)
    };
    assert_eq!(
        refused(order(PipelineOrder::ZeroBubble, 2)),
        (
            "pipeline order `zero-bubble` is not for this layout: `llm_interleave` is 2, must be 1"
                .to_owned(),
            "set `train.pipeline_order` to `1f1b` or `data-aware`".to_owned()
        )
    );
    assert_eq!(
        refused(order(PipelineOrder::Interleaved, 1)).0,
        "pipeline order `interleaved-1f1b` is not for this layout: `llm_interleave` is 1, must be 2 or more"
    );
}

/// Under a memory budget microbatches are built that fit it, or the numbers are said.
#[test]
fn the_memory_budget_holds() {
    let shapes = fixture::shapes(40, 9);
    let batch = indices(40);
    let free = settings(layout((1, 2), (2, 2), 3), 6);
    let blind = scheduler(free, shapes.clone());
    let schedule = blind.schedule(0, &batch, Arm::BLIND).unwrap();
    let most =
        blind.memory(&schedule).unwrap().iter().map(dflop_cost::RankMemory::total_bytes).max().unwrap();
    let mut fitted = 0;
    for permille in [1_000, 990, 970, 950, 900, 800, 500] {
        let memory_budget_bytes = Some(most / 1_000 * permille);
        let tight = scheduler(StepSettings { memory_budget_bytes, ..free }, shapes.clone());
        match tight.schedule(0, &batch, Arm::AWARE) {
            Ok(schedule) => {
                let peaks = tight.memory(&schedule).unwrap();
                assert!(peaks.iter().all(|peak| Some(peak.total_bytes()) <= memory_budget_bytes));
                fitted += 1;
            }
            Err(
                StepError::Memory { needed_bytes, budget_bytes, .. }
                | StepError::SampleTooLarge { needed_bytes, budget_bytes, .. },
            ) => {
                assert!(needed_bytes > budget_bytes && Some(budget_bytes) == memory_budget_bytes);
            }
            Err(other) => panic!("{other}"),
        }
    }
    assert!((1..7).contains(&fitted), "{fitted} of 7 budgets: the test shows both answers");
}

/// Lists made for the durations are shorter than interleaved 1F1B with the same samples in the same places.
#[test]
fn lists_shorten_the_step() {
    let shapes = fixture::shapes(48, 5);
    let batch = indices(48);
    let aware =
        StepSettings { pipeline_order: PipelineOrder::DataAware, ..settings(layout((1, 2), (3, 1), 2), 12) };
    let scheduler = scheduler(aware, shapes);
    let schedule = scheduler.schedule(0, &batch, Arm::AWARE).unwrap();
    assert_eq!(schedule.actions.len(), 5);
    let in_order = Schedule { actions: Vec::new(), ..schedule.clone() };
    assert!(schedule.predicted_makespan_ns < scheduler.simulate(&in_order).unwrap().makespan_ns);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// Any layout with chunks, any arm: each sample once, each action of the lists once on its rank, the prediction is the
    /// simulation's, memory of every rank, and the aware arm no slower than arrival order.
    #[test]
    fn every_layout_with_chunks_gives_a_sound_schedule(
        seed: u64, count in 0usize..30, m in 1u32..9,
        degrees in (1u32..3, 1u32..3, 2u32..4, 1u32..3), chunks in 2u32..5, order in 0usize..3,
    ) {
        let (encoder_pp, encoder_dp, llm_pp, llm_dp) = degrees;
        let layout = layout((encoder_pp, encoder_dp), (llm_pp, llm_dp), chunks);
        let pipeline_order = [PipelineOrder::OneFOneB, PipelineOrder::GPipe, PipelineOrder::DataAware][order];
        let shapes = fixture::shapes(count, seed);
        let batch = indices(count);
        let scheduler = scheduler(StepSettings { pipeline_order, ..settings(layout, m) }, shapes.clone());
        let mut blind_ns = None;
        for arm in all_arms() {
            let schedule = scheduler.schedule(0, &batch, arm).unwrap();
            schedule.check(&batch, |s| shapes[s.index()].num_parts()).unwrap();
            // Only lists that are no slower are taken, and only arms that make any have them.
            let is_listed = arm.is_ahead || arm.method == Method::Aware && order == 2;
            prop_assert!(is_listed || schedule.actions.is_empty());
            let timeline = scheduler.simulate(&schedule).unwrap();
            prop_assert_eq!(timeline.makespan_ns, schedule.predicted_makespan_ns);
            prop_assert!(timeline.makespan_ns <= *blind_ns.get_or_insert(timeline.makespan_ns) || arm != Arm::AWARE);
            prop_assert_eq!(scheduler.memory(&schedule).unwrap().len(), layout.num_ranks() as usize);
            for rank in (0..layout.num_ranks()).map(Rank) {
                let forwards = timeline.spans.iter().filter(|s| s.rank == rank && s.action.kind == ActionKind::F);
                prop_assert_eq!(forwards.count(), m as usize * layout.stages(rank).count());
            }
            let path = scheduler.critical_path(&schedule, &timeline).unwrap();
            let explained: u64 = path.iter().map(|link| link.gap_ns + link.span.duration_ns()).sum();
            prop_assert_eq!(explained, timeline.spans.iter().map(|span| span.end_ns).max().unwrap());
        }
    }
}
