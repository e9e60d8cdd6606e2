//! A load kept up to date equals the prediction from scratch, exactly; uncertainty and launch floors.

#![allow(clippy::unwrap_used, reason = "tests may give up, their helpers too")]

mod fixture;

use dflop_cost::{ComponentSettings, CostModel, CostSettings, StageLayers, Trained};
use dflop_types::{MicrobatchShape, Recompute, SampleShape};
use fixture::{any_sample, profile, sample};
use proptest::prelude::*;

fn models() -> Vec<CostModel> {
    let cut = ComponentSettings { tensor_parallel_degree: 2, recompute: Recompute::Full };
    let frozen = Trained { encoder: false, ..Trained::default() };
    let mut fixed = profile();
    let encoder_layer = fixed.modules.get_mut("encoder_layer").unwrap();
    encoder_layer.attention.points.clear();
    encoder_layer.segment_tokens = Some(200);
    let mut huge = profile();
    huge.modules.get_mut("llm_layer").unwrap().attention.points[1].forward_ns = u64::MAX / 3;
    vec![
        CostModel::new(&profile()).unwrap(),
        CostModel::with(&profile(), &CostSettings { encoder: cut, llm: cut, trained: frozen }).unwrap(),
        CostModel::new(&fixed).unwrap(),
        CostModel::new(&huge).unwrap(),
    ]
}

proptest! {
    #[test]
    fn a_load_equals_the_prediction_from_scratch(
        samples in prop::collection::vec((any_sample(), any::<bool>()), 0..10),
        num_layers in 0u32..5, is_first: bool, is_last: bool
    ) {
        let stage = StageLayers { num_layers, is_first, is_last };
        for model in models() {
            let mut load = model.load();
            let mut held: Vec<&SampleShape> = Vec::new();
            for (sample, goes) in &samples {
                load.add(sample);
                held.push(sample);
                if *goes {
                    let gone = held.remove(held.len() / 2);
                    load.remove(gone);
                }
                let batch = MicrobatchShape::pack(held.iter().copied());
                prop_assert_eq!(load.num_samples(), held.len() as u64);
                prop_assert_eq!(load.encoder(), model.encoder(&batch));
                prop_assert_eq!(load.stage(stage), model.llm_stage(&batch, num_layers, is_first, is_last));
            }
        }
    }

    #[test]
    fn a_sample_more_never_shortens_any_time(
        samples in prop::collection::vec(any_sample(), 0..6), extra in any_sample()
    ) {
        let stage = StageLayers { num_layers: 3, is_first: true, is_last: true };
        for model in models() {
            let mut load = model.load();
            for sample in &samples {
                load.add(sample);
            }
            let before = (load.encoder(), load.stage(stage));
            load.add(&extra);
            for (less, more) in [(before.0, load.encoder()), (before.1, load.stage(stage))] {
                prop_assert!(less.forward_ns <= more.forward_ns && less.backward_ns <= more.backward_ns);
                prop_assert!(less.input_ns <= more.input_ns && less.weight_ns <= more.weight_ns);
            }
        }
    }

    #[test]
    fn the_stages_add_up_in_every_part(samples in prop::collection::vec(any_sample(), 0..6), cut in 0u32..=4) {
        for model in models() {
            let batch = MicrobatchShape::pack(&samples);
            let whole = model.llm_stage(&batch, 4, true, true);
            let (a, b) = (model.llm_stage(&batch, cut, true, false), model.llm_stage(&batch, 4 - cut, false, true));
            // Sums are held at the largest number, in the whole and in its parts.
            prop_assert_eq!(a.forward_ns.saturating_add(b.forward_ns), whole.forward_ns);
            prop_assert_eq!(a.backward_ns.saturating_add(b.backward_ns), whole.backward_ns);
            prop_assert_eq!(a.input_ns.saturating_add(b.input_ns), whole.input_ns);
            prop_assert_eq!(a.weight_ns.saturating_add(b.weight_ns), whole.weight_ns);
            prop_assert_eq!(a.uncertainty_ns.saturating_add(b.uncertainty_ns), whole.uncertainty_ns);
            prop_assert_eq!(a.extrapolated || b.extrapolated, whole.extrapolated);
        }
    }
}

#[test]
#[should_panic(expected = "was added before")]
fn what_was_not_added_cannot_be_taken_off() {
    let model = CostModel::new(&profile()).unwrap();
    let mut load = model.load();
    load.add(&sample(0, 0, 50, 10));
    load.remove(&sample(1, 200, 50, 10));
}

#[test]
fn the_uncertainty_is_that_of_the_medians_at_most() {
    // Each point: 1.25 * 108 / (1.35 * 4) = 25 ns. 4 layers, linear and attention, embedding and head.
    let model = CostModel::new(&profile()).unwrap();
    let stage = |llm| model.llm_stage(&MicrobatchShape::pack([&sample(0, 0, llm, 100)]), 4, true, true);
    assert_eq!(stage(500).uncertainty_ns, 25 * (4 * 2 + 2));
    assert_eq!(stage(100).uncertainty_ns, 25 * (4 * 2 + 2));
    // Twice the largest size measured: twice as uncertain, but for the head.
    assert_eq!(stage(2_000).uncertainty_ns, 50 * (4 * 2 + 1) + 25);
    let mut once = profile();
    for module in once.modules.values_mut() {
        for point in &mut module.linear.points {
            point.repeats = 0;
        }
    }
    let estimated = CostModel::new(&once).unwrap();
    let batch = MicrobatchShape::pack([&sample(0, 0, 500, 100)]);
    assert_eq!(estimated.llm_stage(&batch, 0, true, true).uncertainty_ns, 0);
}

#[test]
fn the_launch_floor_is_what_a_token_takes() {
    // The linear curves go through 0 but for the backward, whose line meets 30 there: 1 + 3 + 1 linear curves.
    let model = CostModel::new(&profile()).unwrap();
    let floor = model.encoder_launch_floor();
    assert_eq!(floor.forward_ns, 2 + 3 * 30 + 5);
    assert_eq!(floor.backward_ns, 2 * floor.forward_ns + 5 * 30);
    assert!(floor.extrapolated);
    let stage = model.stage_launch_floor(StageLayers { num_layers: 4, is_first: false, is_last: true });
    assert_eq!(stage.forward_ns, 4 * 40 + 11);
}
