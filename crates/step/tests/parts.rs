//! The encoder's part of each microbatch: shared out over its replicas, large samples in parts, and what of it crosses nodes.

use crate::fixture;
use crate::step::{check, indices, layout, scheduler, settings};
use dflop_step::{Arm, StepError, StepSettings};
use dflop_types::{Component, EncoderShare, SampleIndex, SampleShape, Schedule};
use proptest::prelude::*;

/// The replicas that encode parts of `sample`.
fn encoders_of(schedule: &Schedule, sample: SampleIndex) -> Vec<usize> {
    let has = |shares: &Vec<EncoderShare>| shares.iter().any(|share| share.sample == sample);
    let column = schedule.encoder.iter().find(|column| column.iter().any(has)).expect("it is encoded");
    (0..column.len()).filter(|&replica| has(&column[replica])).collect()
}

#[test]
fn a_giant_video_is_encoded_on_all_replicas() {
    let mut shapes = fixture::shapes(24, 5);
    shapes.push(fixture::video(400, 2, 60));
    let (layout, batch) = (layout(4, 1, 2), indices(25));
    let split = scheduler(settings(layout, 4), shapes.clone(), 7);
    let schedule = split.schedule(0, &batch, Arm::AWARE).unwrap();
    check(&split, &schedule, &batch, &shapes);
    assert_eq!(encoders_of(&schedule, SampleIndex(24)), [0, 1, 2, 3]);
    let traffic = split.traffic(&schedule).unwrap();
    let features: u64 = shapes.iter().map(|s| u64::from(s.feature_tokens)).sum();
    assert_eq!((traffic.feature_tokens, traffic.feature_tokens_across), (features, 0));
    assert!(traffic.num_cut_samples >= 1);
    // The blind arm knows nothing of parts.
    let blind = split.schedule(0, &batch, Arm::BLIND).unwrap();
    assert_eq!(encoders_of(&blind, SampleIndex(24)).len(), 1);
    assert!(2 * schedule.predicted_makespan_ns < blind.predicted_makespan_ns);
    // Without parts it is encoded whole, and the step is longer.
    shapes[24].encoder_parts.clear();
    let whole = scheduler(settings(layout, 4), shapes, 7).schedule(0, &batch, Arm::AWARE).unwrap();
    assert_eq!(encoders_of(&whole, SampleIndex(24)).len(), 1);
    assert!(3 * schedule.predicted_makespan_ns < 2 * whole.predicted_makespan_ns);
}

#[test]
fn a_sample_that_fits_in_parts_is_not_too_large() {
    let shapes = vec![fixture::video(400, 2, 10), fixture::sample(2, 360, 50)];
    let batch = indices(2);
    let with = |encoder_dp, budget| {
        let settings = StepSettings { memory_budget_bytes: budget, ..settings(layout(encoder_dp, 1, 1), 2) };
        scheduler(settings, shapes.clone(), 0)
    };
    let encoder_bytes = |encoder_dp| {
        let scheduler = with(encoder_dp, None);
        let schedule = scheduler.schedule(0, &batch, Arm::AWARE).unwrap();
        let peaks = scheduler.memory(&schedule).unwrap();
        peaks[..encoder_dp as usize].iter().map(dflop_cost::RankMemory::total_bytes).max().unwrap()
    };
    let (one, four) = (encoder_bytes(1), encoder_bytes(4));
    assert!(four < one);
    let budget = Some(four + (one - four) / 4);
    assert!(with(4, budget).schedule(0, &batch, Arm::AWARE).is_ok());
    let refused = with(1, budget).schedule(0, &batch, Arm::AWARE).unwrap_err();
    assert!(matches!(refused, StepError::SampleTooLarge { component: Component::Encoder, .. }), "{refused}");
    assert_eq!(with(4, budget).outliers(2, 2).num_unfit, 0);
}

/// 8 encoder ranks, then 8 LLM ranks, in nodes of 12: LLM replicas 0 to 3 share the node of all encoder replicas. In
/// nodes of 4, no encoder rank has an LLM rank beside it.
#[test]
fn what_crosses_nodes_is_counted() {
    let shapes = fixture::shapes(64, 2);
    let batch = indices(64);
    let plain = scheduler(settings(layout(8, 1, 8), 2), shapes.clone(), 1);
    let schedule = plain.schedule(0, &batch, Arm::AWARE).unwrap();
    let to = |replicas: std::ops::Range<usize>| -> u64 {
        let samples = schedule.llm.iter().flat_map(|column| column[replicas.clone()].iter().flatten());
        samples.map(|s| u64::from(shapes[s.index()].feature_tokens)).sum()
    };
    let across = |ranks| {
        plain.clone().with_ranks_per_node(ranks).unwrap().traffic(&schedule).unwrap().feature_tokens_across
    };
    assert_eq!([across(16), across(12), across(4)], [0, to(4..8), to(0..8)]);
}

/// Encoder ranks 0 to 3, LLM ranks 4 and 5, nodes of 3: of the encoder only replica 3 is beside the LLM. The share that
/// sends most is its own in each microbatch, and what is balanced stays so.
#[test]
fn what_is_sent_most_stays_on_its_node() {
    let shapes = fixture::shapes(40, 4);
    let batch = indices(40);
    let plain = scheduler(settings(layout(4, 1, 2), 3), shapes.clone(), 1);
    let near = plain.clone().with_ranks_per_node(3).unwrap();
    let schedule = near.schedule(0, &batch, Arm::AWARE).unwrap();
    check(&near, &schedule, &batch, &shapes);
    for column in &schedule.encoder {
        let sent: Vec<u32> = column
            .iter()
            .map(|shares| shares.iter().map(|share| shapes[share.sample.index()].feature_tokens).sum())
            .collect();
        assert_eq!(sent.iter().max(), sent.last(), "{sent:?}");
    }
    let traffic = near.traffic(&schedule).unwrap();
    assert!(4 * traffic.feature_tokens_across < 3 * traffic.feature_tokens);
}

/// One equal image a microbatch, two encoder replicas: each replica encodes every second one, not the first replica all.
#[test]
fn microbatches_of_one_image_go_round_the_encoder_replicas() {
    let shapes: Vec<SampleShape> = (0..6).map(|_| fixture::sample(4, 700, 30)).collect();
    let batch = indices(6);
    let scheduler = scheduler(settings(layout(2, 1, 1), 6), shapes, 1);
    let schedule = scheduler.schedule(0, &batch, Arm::AWARE).unwrap();
    let encoded =
        |replica: usize| schedule.encoder.iter().filter(|column| !column[replica].is_empty()).count();
    assert_eq!([encoded(0), encoded(1)], [3, 3], "{:?}", schedule.encoder);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Any mix with videos: each part once, and no slower than with the same samples encoded whole, however those are
    /// dealt out.
    #[test]
    fn parts_are_never_slower_than_whole_samples(
        seed: u64, count in 1usize..20, frames in prop::collection::vec(1u32..200, 0..4),
        encoder_dp in 1u32..6, llm_pp in 1u32..3, llm_dp in 1u32..4, m in 1u32..5, dealt: u64
    ) {
        let mut shapes = fixture::shapes(count, seed);
        shapes.extend(frames.iter().map(|&frames| fixture::video(frames, 49, 30)));
        let batch = indices(shapes.len());
        let scheduler = scheduler(settings(layout(encoder_dp, llm_pp, llm_dp), m), shapes.clone(), seed);
        let schedule = scheduler.schedule(0, &batch, Arm::AWARE).unwrap();
        check(&scheduler, &schedule, &batch, &shapes);
        for (deal, column) in schedule.llm.iter().enumerate() {
            let mut samples: Vec<SampleIndex> = column.iter().flatten().copied().collect();
            samples.retain(|s| shapes[s.index()].num_parts() > 0);
            samples.sort_by_key(|s| std::cmp::Reverse(shapes[s.index()].encoder_tokens()));
            let mut replicas = vec![Vec::new(); encoder_dp as usize];
            for (at, sample) in samples.into_iter().enumerate() {
                let replica = (at as u64 + (dealt >> (deal % 32))) % u64::from(encoder_dp);
                replicas[replica as usize].push(EncoderShare::whole(sample));
            }
            let mut whole = schedule.clone();
            whole.encoder[deal] = replicas;
            let whole_ns = scheduler.simulate(&whole).unwrap().makespan_ns;
            // Dealt out in turn is no better than LPT by more than what LPT may lack.
            prop_assert!(schedule.predicted_makespan_ns <= whole_ns + whole_ns / 20);
        }
    }
}
