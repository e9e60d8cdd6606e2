//! A model with two encoders: pictures cost what the first takes, sounds what the second does.

use crate::fixture::{layer, module, profile};
use dflop_cost::{CostModel, EncoderLayers, RankRole, Typical};
use dflop_types::{EncoderSegments, MicrobatchShape, ModelProfile, ModuleProfile, SampleShape, Tower};
use proptest::prelude::*;

/// The usual profile, and an encoder of sounds of two layers, four times as slow.
fn both() -> ModelProfile {
    let mut profile = profile();
    let modules = [module(8, 10), ModuleProfile { count: 2, ..layer(120, 28, 20) }, module(20, 30)];
    for (name, module) in ModelProfile::SECOND_TOWER.into_iter().zip(modules) {
        profile.modules.insert(name.to_owned(), module);
    }
    profile
}

/// A sample of so many segments of pictures and of sounds.
fn sample(pictures: (u32, u32), sounds: (u32, u32)) -> SampleShape {
    let group = |(count, tokens), tower| EncoderSegments { count, tokens, tower };
    let groups = [group(pictures, Tower::First), group(sounds, Tower::Second)];
    SampleShape {
        encoder_segments: groups.into_iter().filter(|group| group.count > 0).collect(),
        feature_tokens: pictures.0 + sounds.0,
        llm_tokens: 500,
        label_tokens: 100,
        ..SampleShape::default()
    }
}

/// 200 tokens in two segments of sound: embedding 8, two layers of 120 + 28, projector 20 ns a token, forward alone.
#[test]
fn a_sound_by_hand() {
    let model = CostModel::new(&both()).unwrap();
    let sound = MicrobatchShape::pack(&[sample((0, 1), (2, 100))]);
    assert_eq!(model.encoder(&sound).forward_ns, 200 * (8 + 2 * (120 + 28) + 20));
    // A picture of the same tokens is read by the first: embedding 2, three layers of 30 + 7, projector 5.
    let picture = MicrobatchShape::pack(&[sample((2, 100), (0, 1))]);
    assert_eq!(model.encoder(&picture).forward_ns, 200 * (2 + 3 * (30 + 7) + 5));
}

#[test]
fn both_are_held_and_trained() {
    let (one, two) = (CostModel::new(&profile()).unwrap(), CostModel::new(&both()).unwrap());
    let bytes = |model: &CostModel| model.fixed_memory(RankRole::Encoder, 1).parameter_bytes;
    assert_eq!(bytes(&two) - bytes(&one), 4 * (10 + 2 * 20 + 30));
    assert_eq!((one.num_encoder_layers(), two.num_encoder_layers()), (3, 3));
    let whole = MicrobatchShape::pack(&[sample((2, 100), (2, 100))]);
    assert_eq!(two.encoder_stage(&whole, two.whole_encoder()), two.encoder(&whole));
    // Some of its modules, not all: no such profile is read.
    let mut broken = both();
    broken.modules.remove("sound_projector");
    let problems = dflop_types::Artifact::problems(&broken);
    assert!(problems.iter().any(|problem| problem.contains("sound_layer")), "{problems:?}");
}

/// Two layers of sounds over three of pictures: none in the first stage, one in each of the others.
#[test]
fn stages_of_both_by_hand() {
    let model = CostModel::new(&both()).unwrap();
    let microbatch = MicrobatchShape::pack(&[sample((2, 100), (2, 100))]);
    let stages = [0, 1, 2].map(|first_layer| EncoderLayers {
        first_layer,
        num_layers: 1,
        is_first: first_layer == 0,
        is_last: first_layer == 2,
    });
    let times = stages.map(|stage| model.encoder_stage(&microbatch, stage).forward_ns);
    assert_eq!(times, [200 * (2 + 37 + 8), 200 * (37 + 148), 200 * (37 + 5 + 148 + 20)]);
    assert_eq!(times.iter().sum::<u64>(), model.encoder(&microbatch).forward_ns);
    let bytes = |role| model.fixed_memory(role, 1).parameter_bytes;
    let of_stages: u64 = stages.map(|stage| bytes(RankRole::EncoderStage(stage))).iter().sum();
    assert_eq!(of_stages, bytes(RankRole::Encoder));
}

proptest! {
    /// Time, work and bytes of a microbatch are those of its pictures and of its sounds.
    #[test]
    fn encoders_add_up(
        pictures in (1u32..9, 1u32..1_500), sounds in (1u32..9, 1u32..900), full: bool,
    ) {
        let mut settings = dflop_cost::CostSettings::default();
        if full {
            settings.encoder.recompute = dflop_types::Recompute::Full;
        }
        let model = CostModel::with(&both(), &settings).unwrap();
        let [mixed, first, second] = [
            sample(pictures, sounds), sample(pictures, (0, 1)), sample((0, 1), sounds),
        ];
        let packed = |of: &SampleShape| MicrobatchShape::pack([of]);
        let ns = |of: &SampleShape| model.encoder(&packed(of)).total_ns();
        prop_assert_eq!(ns(&mixed), ns(&first) + ns(&second));
        let kept = |of: &SampleShape| model.activation_bytes(RankRole::Encoder, &packed(of));
        prop_assert_eq!(kept(&mixed), kept(&first) + kept(&second));
        let typical = Typical { encoder_tokens: [700, 300], ..Typical::default() };
        let marginal = |of: &SampleShape| model.sample_encoder_ns(of, typical);
        prop_assert_eq!(marginal(&mixed), marginal(&first) + marginal(&second));
        let least = |of: &SampleShape| model.work_min(&packed(of)).encoder_ns(1);
        prop_assert!(least(&mixed) <= ns(&mixed));
        prop_assert!(least(&mixed) >= least(&first) && least(&mixed) >= least(&second));
    }
}
