//! Colocated tensor groups whose ranks each hold a whole encoder: who encodes what, how long that takes, and its memory.

use crate::fixture;
use crate::scheduling::{all_arms, batch};
use dflop_cost::{ColocatedSharding, CostModel, CostSettings, Prediction, RankMemory, RankMicrobatch};
use dflop_step::{Arm, Method, StepError, StepScheduler, StepSettings};
use dflop_types::{
    ComponentLayout, EncoderShare, Layout, MicrobatchShape, PartRange, PipelineOrder, SampleIndex,
    SampleShape, Schedule, StageIndex, Zero,
};
use proptest::prelude::*;

/// `dp` tensor groups of `tp` ranks.
fn layout(tp: u32, dp: u32, zero: Zero) -> Layout {
    let degrees = |tp, dp| ComponentLayout { tp, pp: 1, dp };
    Layout { encoder: degrees(1, tp * dp), llm: degrees(tp, dp), ..Layout::colocated(1, zero) }
}

fn scheduler(
    layout: Layout,
    num_microbatches: u32,
    shapes: &[SampleShape],
    budget: Option<u64>,
) -> StepScheduler {
    let model = CostModel::with(&fixture::cuttable(), &CostSettings::default().in_layout(&layout)).unwrap();
    let pipeline_order = PipelineOrder::OneFOneB;
    let settings = StepSettings { layout, num_microbatches, pipeline_order, memory_budget_bytes: budget };
    StepScheduler::new(settings, model, shapes.to_vec(), 3).unwrap()
}

fn encoded(own: &[EncoderShare], shapes: &[SampleShape]) -> RankMicrobatch {
    let of = |share: &EncoderShare| {
        let whole = &shapes[share.sample.index()];
        share.parts.map_or_else(|| whole.clone(), |parts| whole.share(parts))
    };
    let parts: Vec<SampleShape> = own.iter().map(of).collect();
    RankMicrobatch {
        shape: MicrobatchShape {
            encoder_segments: parts.iter().flat_map(|part| part.encoder_segments.clone()).collect(),
            ..MicrobatchShape::default()
        },
        feature_tokens: parts.iter().map(|part| u64::from(part.feature_tokens)).sum(),
    }
}

/// The times of a microbatch's encoder action on a group, told by hand: the longest of its ranks, and the exchange.
fn encoder_of_group(
    model: &CostModel,
    divided: &[Vec<EncoderShare>],
    shapes: &[SampleShape],
    zero: ColocatedSharding,
) -> Prediction {
    let works: Vec<RankMicrobatch> = divided.iter().map(|own| encoded(own, shapes)).collect();
    let each = works.iter().map(|work| model.sharded_encoder(&work.shape, zero.encoder));
    let slowest = each.reduce(Prediction::slower).unwrap();
    let fullest = works.iter().map(|work| work.feature_tokens).max().unwrap();
    slowest.with_exchange(model.group_exchange(fullest, divided.len() as u32))
}

/// A schedule is sound, its durations are those of the division that it names, and its memory that of the fullest rank.
fn check(scheduler: &StepScheduler, schedule: &Schedule, shapes: &[SampleShape]) {
    let (layout, model) = (scheduler.settings().layout, scheduler.model());
    let (tp, dp) = (layout.llm.tp as usize, layout.llm.dp as usize);
    schedule.check(&batch(shapes), |s| shapes[s.index()].num_parts()).unwrap();
    let timeline = scheduler.simulate(schedule).unwrap();
    assert_eq!(timeline.makespan_ns, schedule.predicted_makespan_ns);
    assert!(schedule.lower_bound_ns <= schedule.max_load_ns);
    let (input, sharding) = (scheduler.step_input(schedule).unwrap(), ColocatedSharding::of(&layout));
    let memory = scheduler.memory(schedule).unwrap();
    assert_eq!((memory.len(), input.layout), (dp, layout.by_group()));
    let fixed = model.colocated_memory(sharding);
    for (at, (llm, encoder)) in schedule.llm.iter().zip(&schedule.encoder).enumerate() {
        assert_eq!((llm.len(), encoder.len()), (dp, tp * dp));
        for (group, (samples, shares)) in llm.iter().zip(encoder.chunks(tp)).enumerate() {
            let is_own = |share: &EncoderShare| samples.contains(&share.sample);
            assert!(
                layout.zero == Zero::Parameters || shares.iter().flatten().all(is_own),
                "each group encodes its own"
            );
            if llm.iter().all(Vec::is_empty) {
                continue;
            }
            let wanted = encoder_of_group(model, shares, shapes, sharding);
            let row = input.layout.row(group as u32, StageIndex(0));
            assert_eq!(input.forward_ns[row][at], wanted.forward_ns);
            assert_eq!(input.backward_ns[row][at], wanted.backward_ns);
            let read = MicrobatchShape::pack(samples.iter().map(|s| &shapes[s.index()]));
            let feature_tokens = samples.iter().map(|s| u64::from(shapes[s.index()].feature_tokens)).sum();
            let read = RankMicrobatch { shape: read, feature_tokens };
            for own in shares {
                let peak = model.colocated_peak(&encoded(own, shapes), &read, fixed, false);
                assert!(
                    peak.total_bytes() <= memory[group].total_bytes(),
                    "the fullest rank of the group decides"
                );
            }
        }
    }
}

#[test]
fn every_arm_divides_what_a_group_encodes() {
    let texts: Vec<SampleShape> = (1..20).map(|i| fixture::sample(0, 0, 30 * i)).collect();
    let mut videos = fixture::shapes(20, 4);
    videos.push(fixture::video(40, 49, 100));
    for shapes in [fixture::shapes(37, 1), texts, fixture::shapes(3, 2), videos, vec![]] {
        for (tp, dp) in [(2, 1), (2, 2), (4, 1), (4, 3)] {
            for zero in Zero::ALL {
                let scheduler = scheduler(layout(tp, dp, zero), 4, &shapes, None);
                for arm in all_arms() {
                    let schedule = scheduler.schedule(0, &batch(&shapes), arm).unwrap();
                    check(&scheduler, &schedule, &shapes);
                }
            }
        }
    }
}

/// By hand: one group of two ranks. Of two equal pictures each rank encodes one; of a video of 8 frames each encodes 4.
#[test]
fn the_ranks_of_a_group_get_equal_parts() {
    let of = |shapes: &[SampleShape]| {
        let one = scheduler(layout(2, 1, Zero::Nothing), 1, shapes, None);
        let schedule =
            one.schedule(0, &batch(shapes), Arm { method: Method::Blind, is_ahead: false }).unwrap();
        schedule.encoder[0].clone()
    };
    let picture = fixture::sample(3, 600, 50);
    let whole = |sample| EncoderShare::whole(SampleIndex(sample));
    assert_eq!(of(&[picture.clone(), fixture::sample(0, 0, 70), picture.clone()]), [[whole(0)], [whole(2)]]);
    assert_eq!(of(&[picture]), [vec![whole(0)], vec![]]);
    let half = |first| EncoderShare { sample: SampleIndex(0), parts: Some(PartRange { first, count: 4 }) };
    assert_eq!(of(&[fixture::video(8, 49, 20)]), [[half(0)], [half(4)]]);
}

/// Encoder layers on each rank of a group hold as much as those of one rank, and are reduced over all ranks: what ZeRO cuts is cut
/// over four times as many as the LLM backbone.
#[test]
fn encoders_are_cut_over_all_ranks() {
    let of = |layout: Layout| {
        let sharding = ColocatedSharding::of(&layout);
        [
            (sharding.encoder.replicas, sharding.encoder.degree, sharding.encoder.stride),
            (sharding.llm.replicas, sharding.llm.degree, sharding.llm.stride),
        ]
    };
    assert_eq!(of(layout(4, 2, Zero::States)), [(8, 8, 1), (2, 2, 4)]);
    assert_eq!(of(layout(4, 2, Zero::Nothing)), [(8, 1, 1), (2, 1, 4)]);
    let hybrid = Layout { shard_ranks: Some(2), ..layout(4, 4, Zero::Parameters) };
    assert_eq!(of(hybrid), [(16, 2, 1), (4, 2, 4)]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    /// What fits is within the budget on every rank, in every arm.
    #[test]
    fn the_memory_budget_is_kept(seed in 0u64..50, tp in 1u32..3, dp in 1u32..3, zero in 0usize..4, percent in 5u64..110) {
        let shapes = fixture::shapes(16, seed);
        let layout = layout(2 * tp, dp, Zero::ALL[zero]);
        let free = scheduler(layout, 16, &shapes, None);
        let peak = |scheduler: &StepScheduler, schedule: &Schedule| {
            scheduler.memory(schedule).unwrap().iter().map(RankMemory::total_bytes).max().unwrap()
        };
        let high = peak(&free, &free.schedule(0, &batch(&shapes), Arm::AWARE).unwrap());
        let low = shapes.iter().map(|shape| free.alone(shape).1).max().unwrap();
        let budget = low + high.saturating_sub(low) * percent / 100;
        let tight = scheduler(layout, 16, &shapes, Some(budget));
        for arm in all_arms().filter(|arm| !arm.is_ahead) {
            match tight.schedule(0, &batch(&shapes), arm) {
                Ok(schedule) => {
                    check(&tight, &schedule, &shapes);
                    prop_assert!(peak(&tight, &schedule) <= budget);
                }
                Err(StepError::Memory { needed_bytes, .. }) => prop_assert!(needed_bytes > budget),
                Err(error) => prop_assert!(false, "{error}"),
            }
        }
    }
}
