//! Gemma 4: heads by kind of layer, in either form of its file, and the models that are refused.

use dflop_analytic::{Architecture, catalogue_model};
use serde_json::{Value, json};

fn config(text: &Value, whole: &Value) -> Value {
    let mut all = json!({
        "model_type": "gemma4", "vision_config": {},
        "text_config": {
            "hidden_size_per_layer_input": 0, "num_hidden_layers": 4, "attention_k_eq_v": true,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        },
    });
    for (name, value) in text.as_object().into_iter().flatten() {
        all["text_config"][name] = value.clone();
    }
    for (name, value) in whole.as_object().into_iter().flatten() {
        all[name] = value.clone();
    }
    all
}

/// As published, and as transformers saves it: heads of layers 1 and 3 are named one by one.
#[test]
fn both_forms_are_one() {
    let published = config(&json!({"global_head_dim": 32, "num_global_key_value_heads": 2}), &json!({}));
    let own = json!({"head_dim": 32, "num_key_value_heads": 2});
    let saved = config(&json!({"per_layer_config": {"1": own, "3": own}}), &json!({}));
    let read = |config: &Value| Architecture::from_config(config).unwrap();
    assert_eq!(read(&published), read(&saved));
    assert_eq!(read(&published).llm.full_heads.unwrap().head_size, 32);
}

/// 31,273,088,876 values in the hub's files, of which 60 scale layers and 2 x 1,152 features, and do not train.
#[test]
fn the_public_model_has_its_parameters() {
    let model = catalogue_model("gemma-4-31b").unwrap().architecture().unwrap();
    assert_eq!(model.num_parameters(), 31_273_088_876 - 60 - 2 * 1_152);
}

#[test]
fn what_is_not_modelled_is_refused_by_name() {
    let own = json!({"head_dim": 32});
    let cases = [
        (json!({"hidden_size_per_layer_input": 256}), json!({}), "`text_config.hidden_size_per_layer_input`"),
        (
            json!({"hidden_size_per_layer_input": null}),
            json!({}),
            "`text_config.hidden_size_per_layer_input`",
        ),
        (json!({"num_kv_shared_layers": 2}), json!({}), "`text_config.num_kv_shared_layers`"),
        (json!({"enable_moe_block": true}), json!({}), "`text_config.num_experts` is missing"),
        (
            json!({"enable_moe_block": true, "num_experts": 4, "top_k_experts": 5}),
            json!({}),
            "`text_config.top_k_experts` is 5",
        ),
        (
            json!({"use_bidirectional_attention": "all"}),
            json!({}),
            "`text_config.use_bidirectional_attention`",
        ),
        (json!({"final_logit_softcapping": 0}), json!({}), "`text_config.final_logit_softcapping`"),
        (json!({"layer_types": ["full_attention"]}), json!({}), "must name a kind for each layer"),
        (json!({"layer_types": vec!["sliding_attention"; 4]}), json!({}), "must end with"),
        (json!({"num_global_key_value_heads": 3}), json!({}), "must divide 8"),
        (json!({"per_layer_config": {"1": own}}), json!({}), "alike of each full layer alone"),
        (
            json!({"per_layer_config": {"1": own, "3": own, "0": own}}),
            json!({}),
            "alike of each full layer alone",
        ),
        (
            json!({"per_layer_config": {"1": {"x": 1}, "3": {"x": 1}}}),
            json!({}),
            "alike of each full layer alone",
        ),
        (json!({}), json!({"audio_config": {}}), "`audio_config`"),
        (
            json!({}),
            json!({"vision_config": {"use_clipped_linears": true}}),
            "`vision_config.use_clipped_linears`",
        ),
        (
            json!({}),
            json!({"vision_config": {"num_key_value_heads": 3}}),
            "`vision_config.num_key_value_heads`",
        ),
        (json!({}), json!({"vision_config": {"head_dim": 32}}), "`vision_config.head_dim`"),
    ];
    for (text, whole, expected) in cases {
        let error = Architecture::from_config(&config(&text, &whole)).unwrap_err().to_string();
        assert!(error.contains(expected), "{expected}: {error}");
    }
}
