//! Backbones of which most layers have a short convolution in place of attention.

// `allow-unwrap-in-tests` knows test functions, not what they share.
#![allow(clippy::unwrap_used)]

use dflop_analytic::{
    Architecture, CONV_LAYER, EstimateSettings, Hardware, Module, catalogue_model, estimate,
};
use dflop_types::MadeFrom;
use serde_json::json;

/// Two of three layers have a convolution over 3 tokens.
fn tiny() -> Architecture {
    let config = json!({
        "model_type": "lfm2_vl",
        "vision_config": {
            "hidden_size": 4, "num_attention_heads": 2, "intermediate_size": 6, "patch_size": 2, "num_patches": 9,
            "num_hidden_layers": 1, "vision_use_head": false,
        },
        "text_config": {
            "hidden_size": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 12,
            "block_multiple_of": 4, "num_hidden_layers": 3, "vocab_size": 10, "full_attn_idxs": [1],
        },
        "projector_hidden_size": 5,
    });
    Architecture::from_config(&config).unwrap()
}

fn module(architecture: &Architecture, name: &str) -> Module {
    architecture.modules().into_iter().find(|module| module.name == name).unwrap()
}

#[test]
fn parameters_by_hand() {
    let model = tiny();
    let (conv, full) = (module(&model, CONV_LAYER), module(&model, "llm_layer"));
    assert_eq!((conv.count, full.count), (2, 1));
    // 2/3 of 12 are 8.
    let mlp_and_norms = 3 * 4 * 8 + 2 * 4;
    // Both gates and what they gate 4 x 12, three weights a column, out 4 x 4.
    assert_eq!(conv.num_parameters(), 48 + 12 + 16 + mlp_and_norms);
    // Queries and out 4 x 4, keys and values 4 x 2, two norms of 2.
    assert_eq!(full.num_parameters(), 16 + 16 + 8 + 8 + 4 + mlp_and_norms);
    // Two norms of 4 and of 16; 16 x 5 and 5 x 4, with biases.
    assert_eq!(module(&model, "projector").num_parameters(), 8 + 32 + 80 + 5 + 20 + 4);
    // A patch of 3 x 2 x 2 values, with a bias; a table of 9 positions.
    assert_eq!(module(&model, "encoder_embedding").num_parameters(), 12 * 4 + 4 + 9 * 4);
}

/// A rank has columns with their gates; its products, convolution and MLP are half of the operations.
#[test]
fn a_rank_has_columns() {
    let conv = module(&tiny(), CONV_LAYER);
    let half = conv.cut(2).unwrap();
    assert_eq!(half.num_parameters(), 24 + 6 + 8 + 3 * 4 * 4 + 2 * 4);
    let [of_all, of_half] = [&conv, &half].map(|one| one.flops(&[64, 128]));
    assert_eq!(of_all.forward, 2 * of_half.forward);
    assert_eq!((of_all.input, of_all.weight), (2 * of_half.input, 2 * of_half.weight));
    assert!(conv.cut(3).is_none());
}

#[test]
fn an_estimate_has_the_mean_of_both_kinds() {
    let architecture = catalogue_model("lfm2-vl-1.6b").unwrap().architecture().unwrap();
    let settings = EstimateSettings {
        model: "lfm2-vl-1.6b".to_owned(),
        dtype: "bfloat16".to_owned(),
        made_from: MadeFrom::default(),
        lora_rank: 4,
    };
    let profile = estimate(&architecture, Hardware::named("h100").unwrap(), &settings).unwrap();
    let of = |name: &str| module(&architecture, name).num_parameters();
    let mean = (10 * of(CONV_LAYER) + 6 * of("llm_layer")).div_ceil(16);
    let layer = &profile.modules["llm_layer"];
    assert!(!profile.modules.contains_key(CONV_LAYER));
    assert_eq!((layer.count, layer.num_parameters), (16, mean));
    // A convolution grows with the tokens alone, so only layers with attention have a curve of it.
    let [short, long] = [1, 2].map(|times| module(&architecture, CONV_LAYER).flops(&[2_046 * times]).forward);
    assert!(long <= 2 * short && module(&architecture, CONV_LAYER).attention().is_none());
    let with_layers = profile.variants.iter().filter(|one| one.modules.contains_key("llm_layer"));
    let mut degrees: Vec<(u32, u32)> =
        with_layers.map(|one| (one.tensor_parallel_degree, one.lora_rank)).collect();
    degrees.sort_unstable();
    assert_eq!(degrees, [(1, 4), (2, 0), (2, 4), (4, 0), (4, 4), (8, 0), (8, 4)]);
}
