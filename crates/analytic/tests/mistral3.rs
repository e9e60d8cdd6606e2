//! What of a Mistral3 is refused.

use dflop_analytic::Architecture;
use serde_json::{Value, json};

/// A Mistral attends within windows unless its file says that it does not; Ministral 3 only if its file says so.
#[test]
fn windows_of_mistral_are_refused() {
    let config = |kind: &str, window: Option<Value>| {
        let mut text = json!({"model_type": kind});
        if let Some(window) = window {
            text["sliding_window"] = window;
        }
        Architecture::from_config(
            &json!({"model_type": "mistral3", "vision_config": {}, "text_config": text}),
        )
    };
    assert!(config("mistral", Some(Value::Null)).is_ok() && config("ministral3", None).is_ok());
    for refused in
        [config("mistral", None), config("mistral", Some(json!(4096))), config("ministral3", Some(json!(9)))]
    {
        let error = refused.unwrap_err().to_string();
        assert!(error.contains("`text_config.sliding_window`") && error.contains("must be null"), "{error}");
    }
}

#[test]
fn a_mistral3_that_reads_another_layer_is_refused() {
    let config = |layer: Value| {
        let text = json!({"model_type": "ministral3"});
        let config = json!({"model_type": "mistral3", "vision_config": {}, "text_config": text, "vision_feature_layer": layer});
        Architecture::from_config(&config)
    };
    assert!(config(json!(-1)).is_ok());
    for layer in [json!(-2), json!([-1, -2])] {
        let error = config(layer).unwrap_err().to_string();
        assert!(error.contains("`vision_feature_layer`") && error.contains("must be -1"), "{error}");
    }
}
