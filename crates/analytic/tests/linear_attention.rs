//! Backbones of which most layers have linear attention.

// `allow-unwrap-in-tests` knows test functions, not what they share.
#![allow(clippy::unwrap_used)]

use dflop_analytic::{
    Architecture, EstimateSettings, Hardware, LINEAR_LAYER, Module, catalogue_model, estimate,
};
use dflop_types::{Hint, MadeFrom, ModelProfile, Recompute, Variant};
use serde_json::{Value, json};

/// Three layers of four have linear attention: two heads of keys of 2, four of values of 3, a convolution over 4 tokens.
fn tiny() -> Value {
    json!({
        "model_type": "qwen3_5",
        "vision_config": {
            "depth": 2, "hidden_size": 4, "num_heads": 2, "intermediate_size": 6, "patch_size": 2,
            "temporal_patch_size": 1, "out_hidden_size": 4, "num_position_embeddings": 4,
        },
        "text_config": {
            "hidden_size": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
            "intermediate_size": 9, "num_hidden_layers": 4, "vocab_size": 10, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "linear_key_head_dim": 2, "linear_value_head_dim": 3,
        },
    })
}

fn modules(config: &Value) -> Vec<Module> {
    Architecture::from_config(config).unwrap().modules()
}

fn module(config: &Value, name: &str) -> Module {
    modules(config).into_iter().find(|module| module.name == name).unwrap()
}

fn profile(model: &str) -> ModelProfile {
    let architecture = catalogue_model(model).unwrap().architecture().unwrap();
    let settings = EstimateSettings {
        model: model.to_owned(),
        dtype: "bfloat16".to_owned(),
        made_from: MadeFrom::default(),
        lora_rank: 0,
    };
    estimate(&architecture, Hardware::named("h100").unwrap(), &settings).unwrap()
}

#[test]
fn both_kinds_of_layers_by_hand() {
    let (linear, full) = (module(&tiny(), LINEAR_LAYER), module(&tiny(), "llm_layer"));
    assert_eq!((linear.count, full.count), (3, 1));
    let mlp_and_norms = 3 * 4 * 9 + 2 * 4;
    // Queries, keys and values 4 x (4 + 4 + 12), gates 4 x 12, two numbers a head 2 x 4 x 4, out 12 x 4; the convolution
    // 20 x 4, rates and biases of the decay 2 x 4, a norm of 3.
    assert_eq!(linear.num_parameters(), 80 + 48 + 32 + 48 + 80 + 8 + 3 + mlp_and_norms);
    // Queries and their gates 4 x 16, keys and values 2 x 4 x 4, out 8 x 4, two norms of 4.
    assert_eq!(full.num_parameters(), 64 + 32 + 32 + 8 + mlp_and_norms);
}

/// A rank has a head of keys and of queries, and the two heads of values that read it; the norm over single heads is whole.
#[test]
fn a_rank_has_heads_of_keys_with_those_of_values_that_read_them() {
    let mut config = tiny();
    config["text_config"]["intermediate_size"] = json!(8);
    let (linear, full) = (module(&config, LINEAR_LAYER), module(&config, "llm_layer"));
    let half = linear.cut(2).unwrap();
    // Of what is counted in the test above: 40 + 24 + 16 + 24 + 40 + 4; a norm of 3; half of the MLP, and two norms of 4.
    assert_eq!(half.num_parameters(), 40 + 24 + 16 + 24 + 40 + 4 + 3 + 3 * 4 * 4 + 8);
    // Products of its part, over all rows: half of the operations but for what is whole.
    let [of_all, of_half] = [&linear, &half].map(|one| one.flops(&[64, 128]));
    assert_eq!(of_all.forward, 2 * of_half.forward);
    assert_eq!(of_all.input, 2 * of_half.input);
    assert_eq!(of_all.weight, 2 * of_half.weight);
    // Of two heads of keys four ranks get none, though there are four of values, and full layers repeat theirs.
    assert!(linear.cut(4).is_none() && full.cut(2).is_some());
    let architecture = Architecture::from_config(&config).unwrap();
    assert!(architecture.check_degrees([None, Some(2)]).is_ok());
    config["text_config"]["num_attention_heads"] = json!(4);
    let error = Architecture::from_config(&config).unwrap().check_degrees([None, Some(4)]).unwrap_err();
    let message =
        "the LLM has 2 heads of keys in its linear attention, which tensor parallel degree 4 does not divide";
    assert_eq!(error.to_string(), message);
    assert!(error.hint().unwrap().ends_with("the greatest is 2"));
    let plain = EstimateSettings {
        model: "tiny".to_owned(),
        dtype: "bfloat16".to_owned(),
        made_from: MadeFrom::default(),
        lora_rank: 0,
    };
    let profile = estimate(&architecture, Hardware::named("h100").unwrap(), &plain).unwrap();
    let has = |one: &Variant| one.modules.contains_key("llm_layer");
    let degrees = profile.variants.iter().filter(|one| has(one)).map(|one| one.tensor_parallel_degree);
    // A degree that divides the full layers alone cuts none.
    assert_eq!(degrees.collect::<Vec<_>>(), [2]);
}

#[test]
fn an_estimate_has_the_mean_of_both_kinds() {
    let architecture = catalogue_model("qwen3.5-9b").unwrap().architecture().unwrap();
    let profile = profile("qwen3.5-9b");
    let layer = &profile.modules["llm_layer"];
    assert!(!profile.modules.contains_key(LINEAR_LAYER));
    assert_eq!(layer.count, 32);
    let of = |name: &str| {
        architecture.modules().into_iter().find(|module| module.name == name).unwrap().num_parameters()
    };
    assert_eq!(layer.num_parameters, (3 * of(LINEAR_LAYER) + of("llm_layer")).div_ceil(4));
    // Attention grows with the square of the length in one layer of four alone. A backbone without linear layers has four
    // times as much.
    let mut config = catalogue_model("qwen3.5-9b").unwrap().config.clone();
    config["text_config"]["layer_types"] = json!(vec!["full_attention"; 32]);
    let all = Architecture::from_config(&config).unwrap();
    let settings = EstimateSettings {
        model: "all".to_owned(),
        dtype: "bfloat16".to_owned(),
        made_from: MadeFrom::default(),
        lora_rank: 0,
    };
    let all = &estimate(&all, Hardware::named("h100").unwrap(), &settings).unwrap().modules["llm_layer"];
    for (mean, full) in layer.attention.points.iter().zip(&all.attention.points) {
        assert!(full.forward_ns.abs_diff(4 * mean.forward_ns) <= 4, "{full:?} {mean:?}");
    }
    let long = layer.linear.points.iter().find(|point| point.size >= 8_192).unwrap();
    assert!(long.forward_ns > 0 && long.activation_bytes > 0);
    for mode in [Recompute::Selective, Recompute::Full] {
        assert_eq!(layer.recompute[&mode].len(), layer.linear.points.len());
    }
    // A variant has the mean of both kinds' parts.
    for variant in profile.variants.iter().filter(|one| one.modules.contains_key("llm_layer")) {
        let degree = u64::from(variant.tensor_parallel_degree);
        let of = |name: &str| {
            let module = architecture.modules().into_iter().find(|module| module.name == name).unwrap();
            module.cut(degree).unwrap().num_parameters()
        };
        let cut = &variant.modules["llm_layer"];
        assert_eq!(cut.num_parameters, (3 * of(LINEAR_LAYER) + of("llm_layer")).div_ceil(4));
        for (part, whole) in cut.linear.points.iter().zip(&layer.linear.points) {
            // A smaller matrix may run a little faster for its size.
            assert!(part.forward_ns <= whole.forward_ns);
            assert!(10 * degree * part.forward_ns >= 9 * whole.forward_ns);
            assert!(part.activation_bytes < whole.activation_bytes);
            assert!(degree * part.activation_bytes >= whole.activation_bytes);
        }
    }
    let degrees = profile.variants.iter().map(|one| one.tensor_parallel_degree);
    assert_eq!(degrees.collect::<Vec<_>>(), [2, 4, 8]);
}

#[test]
fn totals_are_those_of_the_names() {
    for (name, billions) in [
        ("qwen3.5-0.8b", 0.85),
        ("qwen3.5-2b", 2.21),
        ("qwen3.5-4b", 4.54),
        ("qwen3.5-9b", 9.41),
        ("qwen3.5-27b", 27.36),
        ("qwen3.5-35b-a3b", 35.11),
        ("qwen3.5-122b-a10b", 122.56),
        ("qwen3.5-397b-a17b", 396.80),
    ] {
        let architecture = catalogue_model(name).unwrap().architecture().unwrap();
        let found = architecture.num_parameters() as f64 / 1e9;
        assert!((found - billions).abs() < 0.01, "{name}: {found}");
    }
    // Of the larger ones a token reads what their names say: encoder and embedding aside.
    for (name, billions) in
        [("qwen3.5-35b-a3b", 3.0), ("qwen3.5-122b-a10b", 10.0), ("qwen3.5-397b-a17b", 17.0)]
    {
        let architecture = catalogue_model(name).unwrap().architecture().unwrap();
        let modules = architecture.modules();
        let llm = modules.iter().filter(|one| one.name.starts_with("llm") && one.name != "llm_embedding");
        let all: u64 = llm.map(|module| module.count * module.num_parameters()).sum();
        let read = (all - architecture.llm.num_unread_parameters()) as f64 / 1e9;
        assert!((read / billions - 1.0).abs() < 0.2, "{name}: {read}");
    }
}

#[test]
fn kinds_of_layers_that_are_not_understood_are_refused_by_name() {
    let refused = |field: &str, value: Value| {
        let mut config = tiny();
        config["text_config"][field] = value;
        Architecture::from_config(&config).unwrap_err().to_string()
    };
    let kinds = |of: [&str; 4]| json!(of.map(|kind| format!("{kind}_attention")));
    let error = refused("layer_types", kinds(["linear", "sliding", "linear", "full"]));
    assert!(error.contains("`text_config.layer_types`") && error.contains("must be of"), "{error}");
    let error = refused("layer_types", kinds(["linear"; 4]));
    assert!(error.contains("must leave at least one layer with full attention"), "{error}");
    let error = refused("full_attention_interval", json!(5));
    assert!(error.contains("`text_config.full_attention_interval` is 5"), "{error}");
    let error = refused("layer_types", json!(["full_attention"]));
    assert!(error.contains("must name a kind for each layer"), "{error}");
    let error = refused("linear_num_key_heads", json!(3));
    assert!(error.contains("`text_config.linear_num_key_heads` is 3, must divide 4"), "{error}");
    let error = refused("partial_rotary_factor", json!(2.0));
    assert!(error.contains("`text_config.partial_rotary_factor`"), "{error}");
}
