//! Qwen2.5-Omni and Qwen3-Omni: an encoder of pictures and one of sounds before one backbone.

// `allow-unwrap-in-tests` knows test functions, not what they share.
#![allow(clippy::unwrap_used)]

use dflop_analytic::{Architecture, EstimateSettings, Hardware, catalogue_model, estimate};
use dflop_types::{Artifact as _, EncoderSegments, MadeFrom, MicrobatchShape, ModelProfile, Tower};
use serde_json::{Value, json};

fn architecture(name: &str) -> Architecture {
    catalogue_model(name).unwrap().architecture().unwrap()
}

/// As Hugging Face's `Qwen2_5OmniThinkerForConditionalGeneration` and `Qwen3OmniMoeThinkerForConditionalGeneration` count
/// them on the meta device.
#[test]
fn thinkers_have_the_parameters_of_transformers() {
    for (name, whole, pictures, sounds) in [
        ("qwen2.5-omni-7b", 8_931_813_888, 676_550_144, 639_647_232),
        ("qwen2.5-omni-3b", 4_703_464_448, 668_684_288, 637_676_544),
        ("qwen3-omni-30b-a3b", 31_719_205_488, 538_631_408, 647_927_168),
    ] {
        let architecture = architecture(name);
        assert_eq!(architecture.num_parameters(), whole, "{name}");
        let of = |is_sound: bool| -> u64 {
            let is_of = |name: &str| {
                ModelProfile::is_of_encoder(name)
                    && (ModelProfile::tower_of(name) == Tower::Second) == is_sound
            };
            let modules = architecture.modules().into_iter().filter(|module| is_of(module.name));
            modules.map(|module| module.count * module.num_parameters()).sum()
        };
        assert_eq!((of(false), of(true)), (pictures, sounds), "{name}");
    }
}

#[test]
fn operations_of_both_encoders_add_up() {
    for name in ["qwen2.5-omni-7b", "qwen3-omni-30b-a3b"] {
        both_encoders(&architecture(name));
    }
}

fn both_encoders(architecture: &Architecture) {
    let group = |tower| EncoderSegments { tower, ..EncoderSegments::of(3, 100) };
    let flops = |towers: &[Tower]| {
        let encoder_segments = towers.iter().map(|tower| group(*tower)).collect();
        architecture.training_flops(&MicrobatchShape { encoder_segments, ..MicrobatchShape::default() })
    };
    let (pictures, sounds) = (flops(&[Tower::First]), flops(&[Tower::Second]));
    assert_eq!(flops(&Tower::ALL), pictures + sounds);
    assert!(pictures > 0 && sounds > 0 && pictures != sounds);
}

/// Convolutions are a fifth of what a second of sound takes, and each halves both sides of a chunk.
#[test]
fn convolutions_of_chunks_are_counted() {
    let architecture = architecture("qwen3-omni-30b-a3b");
    let modules = architecture.modules();
    let of = |name: &str| modules.iter().find(|module| module.name == name).unwrap();
    let places = [50 * 64, 25 * 32, 13 * 16];
    let products = places[0] * 9 * 480 + (places[1] + places[2]) * 9 * 480 * 480 + 13 * 16 * 480 * 1_280;
    assert_eq!(of("sound_embedding").flops(&[13]).forward, 2 * products);
    // Eight of them are a window.
    assert_eq!(of("sound_embedding").flops(&[104]).forward, 16 * products);
    let layers = 32 * of("sound_layer").flops(&[104]).forward;
    let share = (16 * products) as f64 / (16 * products + layers) as f64;
    assert!((0.2..0.22).contains(&share), "{share}");
}

/// Cut over ranks are both encoders or none: the planner takes its degrees from what is there. Of 16 heads of pictures and 20 of
/// sounds eight ranks get none.
#[test]
fn a_profile_has_both_encoders_whole_and_cut() {
    let settings = EstimateSettings {
        model: String::new(),
        dtype: "bfloat16".to_owned(),
        made_from: MadeFrom::default(),
        lora_rank: 0,
    };
    let hardware = Hardware::named("h100").unwrap();
    let profile = estimate(&architecture("qwen2.5-omni-7b"), hardware, &settings).unwrap();
    assert_eq!(profile.problems(), Vec::<String>::new());
    assert_eq!(profile.num_encoder_layers(), 64);
    assert!(ModelProfile::SECOND_TOWER.iter().all(|name| profile.modules.contains_key(*name)));
    assert!(profile.variants.iter().any(|variant| variant.modules.contains_key("llm_layer")));
    for variant in &profile.variants {
        let (degree, has) = (variant.tensor_parallel_degree, |name| variant.modules.contains_key(name));
        let layers = ["encoder_layer", ModelProfile::WINDOW_LAYER, "sound_layer"];
        assert_eq!(layers.map(has), [degree < 8; 3], "{degree}");
        if degree < 8 {
            // Attention of 1,280 without a bias of keys, an MLP of 5,120; norms, and what is added behind a sum, are whole.
            let cut = (4 * 1_280 * 1_280 + 2 * 1_280 * 5_120 + 2 * 1_280 + 5_120) / u64::from(degree);
            assert_eq!(variant.modules["sound_layer"].num_parameters, cut + 2 * 1_280 + 4 * 1_280);
        }
    }
}

#[test]
fn what_is_not_counted_is_refused_by_name() {
    let refused = |section: &str, fields: Value| {
        let mut config = json!({"model_type": "qwen2_5_omni", "thinker_config": {
            "audio_config": {}, "vision_config": {"hidden_size": 1_280}, "text_config": {}}});
        assert!(Architecture::from_config(&config).is_ok());
        config["thinker_config"][section] = fields;
        Architecture::from_config(&config).unwrap_err().to_string()
    };
    let whole = Architecture::from_config(&json!({"model_type": "qwen2_5_omni"})).unwrap_err();
    for (error, named) in [
        (whole.to_string(), "`thinker_config` is missing"),
        (refused("audio_config", json!({"dropout": 0.1})), "`thinker_config.audio_config.dropout` is 0.1"),
        (
            refused("audio_config", json!({"output_dim": 1_280})),
            "`thinker_config.audio_config.output_dim` is 1280",
        ),
        (
            refused("audio_config", json!({"model_type": "qwen2_audio_encoder"})),
            "must be \"qwen2_5_omni_audio_encoder\"",
        ),
        (
            refused("vision_config", json!({"hidden_size": 1_280, "out_hidden_size": 2_048})),
            "`thinker_config.vision_config.out_hidden_size` is 2048",
        ),
        (
            refused("text_config", json!({"use_sliding_window": true})),
            "`thinker_config.text_config.use_sliding_window` is true",
        ),
        (refused("audio_config", Value::Null), "`thinker_config.audio_config` is missing, must be a section"),
    ] {
        assert!(error.contains(named), "{error}");
    }
}
