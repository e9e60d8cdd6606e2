//! Backbones of which most layers see a window.

// `allow-unwrap-in-tests` knows test functions, not what they share.
#![allow(clippy::unwrap_used)]

use dflop_analytic::{
    Architecture, EstimateSettings, Hardware, Kind, Module, NormKind, SLIDING_LAYER, catalogue_model,
    estimate,
};
use dflop_types::{MadeFrom, MicrobatchShape, ModelProfile, ModuleProfile};
use serde_json::{Value, json};

/// Two layers of three see 8 tokens; a picture of 4 x 4 patches has 4 features.
fn tiny() -> Value {
    json!({
        "model_type": "gemma3",
        "mm_tokens_per_image": 4,
        "vision_config": {
            "hidden_size": 4, "num_attention_heads": 2, "intermediate_size": 6, "num_hidden_layers": 2,
            "patch_size": 2, "image_size": 8, "vision_use_head": false,
        },
        "text_config": {
            "hidden_size": 6, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
            "intermediate_size": 8, "num_hidden_layers": 3, "vocab_size": 10, "sliding_window": 8,
            "sliding_window_pattern": 3,
        },
    })
}

fn module(config: &Value, name: &str) -> Module {
    let modules = Architecture::from_config(config).unwrap().modules();
    modules.into_iter().find(|module| module.name == name).unwrap()
}

fn profile(config: &Value) -> ModelProfile {
    let settings = EstimateSettings {
        model: "gemma".to_owned(),
        dtype: "bfloat16".to_owned(),
        made_from: MadeFrom::default(),
        lora_rank: 0,
    };
    let architecture = Architecture::from_config(config).unwrap();
    estimate(&architecture, Hardware::named("h100").unwrap(), &settings).unwrap()
}

#[test]
fn both_kinds_of_layers_by_hand() {
    let (sliding, full) = (module(&tiny(), SLIDING_LAYER), module(&tiny(), "llm_layer"));
    assert_eq!((sliding.count, full.count), (2, 1));
    // Queries 6 x 8, keys and values 2 x 6 x 4, out 8 x 6; the MLP; four norms of 6, two of a head.
    let parameters = 48 + 48 + 48 + 3 * 6 * 8 + 4 * 6 + 2 * 4;
    assert_eq!((sliding.num_parameters(), full.num_parameters()), (parameters, parameters));
    // Of 20 tokens each sees 8: two products of 2 heads of 4, forward; five, backward.
    let own = |module: &Module, tokens| {
        module.attention().unwrap().work(&[tokens], dflop_analytic::Phase::Forward, 2).flops
    };
    assert_eq!((own(&full, 20), own(&sliding, 20)), (2 * 2 * 20 * 20 * 8, 2 * 2 * 20 * 8 * 8));
    assert_eq!(own(&full, 8), own(&sliding, 8));
    let (of_full, of_sliding) = (full.flops(&[20, 5]), sliding.flops(&[20, 5]));
    assert_eq!(of_full.forward - of_sliding.forward, 2 * 2 * 20 * 12 * 8);
    assert_eq!(of_full.input - of_sliding.input, 5 * 2 * 20 * 12 * 8);
    // Two heads are for two ranks, which both have the one of keys and values.
    assert!(sliding.cut(2).is_some() && full.cut(2).is_some() && sliding.cut(4).is_none());
    assert_eq!(
        sliding.operations.iter().filter(|one| one.kind == Kind::Norm(NormKind::RmsCentred, 6)).count(),
        4
    );
}

#[test]
fn the_projector_takes_means_between_two_norms() {
    let projector = module(&tiny(), "projector");
    assert_eq!(projector.num_parameters(), 2 * 4 + 4 + 4 * 6);
    assert_eq!(projector.flops(&[16, 16]).forward, 2 * 8 * 4 * 6);
}

#[test]
fn an_estimate_has_the_mean_of_both_kinds() {
    let config = catalogue_model("gemma-3-4b").unwrap().config.clone();
    let with = |kind: &str| {
        let mut config = config.clone();
        config["text_config"]["layer_types"] = json!(vec![format!("{kind}_attention"); 34]);
        // At least one layer must have full attention.
        config["text_config"]["layer_types"][33] = json!("full_attention");
        profile(&config).modules["llm_layer"].clone()
    };
    let (mean, full, sliding) =
        (profile(&config).modules["llm_layer"].clone(), with("full"), with("sliding"));
    assert_eq!((mean.count, mean.num_parameters), (34, full.num_parameters));
    let ns = |layer: &ModuleProfile, at: usize| layer.attention.points[at].forward_ns as f64;
    for (at, point) in full.attention.points.iter().enumerate() {
        // 5 of 34 layers have full attention; with one of 34 the rest is of the window.
        let of_window = (34.0 * ns(&sliding, at) - ns(&full, at)) / 33.0;
        let expected = (5.0 * ns(&full, at) + 29.0 * of_window) / 34.0;
        assert!((ns(&mean, at) - expected).abs() <= 2.0 + expected / 1e3, "{} {expected}", ns(&mean, at));
        // Up to the window all layers are alike; far beyond it most cost next to nothing.
        if point.size <= 1_024 {
            assert!((ns(&mean, at) - ns(&full, at)).abs() <= 2.0, "{}", point.size);
        }
    }
    let last = full.attention.points.len() - 1;
    assert!(ns(&mean, last) < 0.2 * ns(&full, last));
    let profile = profile(&config);
    assert!(!profile.modules.contains_key(SLIDING_LAYER));
    // Its 8 heads, 4 of keys and values, are cut over 8 ranks at most.
    assert_eq!(profile.variants.iter().filter(|one| one.modules.contains_key("llm_layer")).count(), 3);
}

#[test]
fn operations_of_the_model_grow_with_the_window() {
    let architecture = catalogue_model("gemma-3-27b").unwrap().architecture().unwrap();
    let flops = |tokens: u32| {
        let shape = MicrobatchShape { llm_tokens: vec![tokens], ..MicrobatchShape::default() };
        architecture.training_flops(&shape)
    };
    // Ten layers of 62 see all tokens, 32 heads of 128 each; the others 1,024. Seven products of twice so many operations.
    let attention = |tokens: u128| 14 * 32 * 128 * tokens * (10 * tokens + 52 * tokens.min(1_024));
    let linear = |tokens: u32| flops(tokens) - attention(u128::from(tokens));
    assert_eq!(4 * linear(2_000), linear(8_000));
    assert_eq!(2 * linear(1_000), linear(2_000));
}

#[test]
fn what_is_not_understood_is_refused_by_name() {
    let refused = |field: &str, value: Value| {
        let mut config = tiny();
        config["text_config"][field] = value;
        Architecture::from_config(&config).unwrap_err().to_string()
    };
    for (field, value, expected) in [
        ("layer_types", json!(["full_attention", "linear_attention", "full_attention"]), "must be of"),
        (
            "layer_types",
            json!(vec!["sliding_attention"; 3]),
            "must leave at least one layer with full attention",
        ),
        ("layer_types", json!(["full_attention"]), "must name a kind for each layer"),
        ("sliding_window_pattern", json!(4), "must leave at least one"),
        ("sliding_window", json!(0), "must be a whole number"),
        ("use_bidirectional_attention", json!(true), "must be false"),
        ("attn_logit_softcapping", json!(50.0), "must be null"),
        ("final_logit_softcapping", json!(30.0), "must be null"),
        ("hidden_activation", json!("silu"), "must be \"gelu_pytorch_tanh\""),
        ("model_type", json!("gemma2"), "must be \"gemma3_text\""),
    ] {
        let error = refused(field, value);
        assert!(error.contains(&format!("`text_config.{field}`")) && error.contains(expected), "{error}");
    }
    let mut config = tiny();
    config["mm_tokens_per_image"] = json!(9);
    let error = Architecture::from_config(&config).unwrap_err().to_string();
    assert!(
        error.contains("`mm_tokens_per_image` is 9, must be the square of a number that divides 4"),
        "{error}"
    );
}
