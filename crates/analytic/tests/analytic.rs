//! The analytic model: closed forms of a model small enough for a hand, and what an estimate must hold.

// `allow-unwrap-in-tests` knows test functions, not what they share.
#![allow(clippy::unwrap_used)]

use dflop_analytic::{
    Architecture, DENSE_LAYER, EstimateSettings, HARDWARE, Hardware, Module, ModuleFlops, Operation, Router,
    catalogue, catalogue_model, estimate,
};
use dflop_cost::{CostModel, CostSettings};
use dflop_types::{
    Artifact, LinkSpan, MadeFrom, MicrobatchShape, ModelProfile, ModuleProfile, Recipe, Recompute,
};
use serde_json::{Value, json};
use std::collections::BTreeMap;

mod experts;

/// Two tokens a side, all widths below ten.
fn tiny() -> Value {
    json!({
        "model_type": "llava_onevision",
        "vision_config": {
            "model_type": "siglip_vision_model", "hidden_size": 4, "num_attention_heads": 2, "intermediate_size": 6,
            "num_hidden_layers": 3, "image_size": 5, "patch_size": 2, "vision_use_head": false,
        },
        "text_config": {
            "model_type": "qwen2", "hidden_size": 4, "num_attention_heads": 2, "num_key_value_heads": 1,
            "intermediate_size": 6, "num_hidden_layers": 2, "vocab_size": 10,
        },
    })
}

fn module(config: &Value, name: &str) -> Module {
    let modules = Architecture::from_config(config).unwrap().modules();
    modules.into_iter().find(|module| module.name == name).unwrap()
}

fn profile(model: &str, hardware: &str, dtype: &str) -> ModelProfile {
    profile_with(model, hardware, dtype, 0)
}

fn profile_with(model: &str, hardware: &str, dtype: &str, lora_rank: u32) -> ModelProfile {
    let architecture = catalogue_model(model).unwrap().architecture().unwrap();
    let settings = EstimateSettings {
        model: model.to_owned(),
        dtype: dtype.to_owned(),
        made_from: MadeFrom::new(),
        lora_rank,
    };
    estimate(&architecture, Hardware::named(hardware).unwrap(), &settings).unwrap()
}

#[test]
fn an_llm_layer_by_hand() {
    let layer = module(&tiny(), "llm_layer");
    // Queries 4 x 4 + 4, keys and values 4 x 2 + 2, out 4 x 4, MLP 3 x 4 x 6, two norms of 4.
    assert_eq!((layer.count, layer.num_parameters()), (2, 20 + 10 + 10 + 16 + 72 + 8));
    // Products: 2 x 3 tokens x 120 weights. Attention: 2 products of 2 x 3^2 x 4 forward, 5 backward. The last product,
    // 2 x 3 x 24, is not run again.
    let expected = ModuleFlops { forward: 720 + 144, input: 720 + 360, weight: 720, recomputed: 720 };
    assert_eq!(layer.flops(&[3]), expected);
    // Segments do not see each other: 1^2 + 2^2 instead of 3^2.
    assert_eq!(layer.flops(&[1, 2]).forward, 720 + 80);
    // A token: two norms of 4 x (4 + 2) + 4, inputs of products 8 + 8 + 8 + 12, attention 8 x 2 + 2 x 4, gate 3 x 6 x 2.
    let kept: u64 = layer.operations.iter().map(|operation| operation.kept_bytes(&[5], 2)).sum();
    assert_eq!(kept, 5 * (56 + 36 + 24 + 36));
}

#[test]
fn a_layer_whose_ranks_share_the_rows_by_hand() {
    let mut config = tiny();
    config["text_config"]["num_key_value_heads"] = json!(2);
    let kept = |layer: &Module, tokens: u64| {
        layer.operations.iter().map(|operation| operation.kept_bytes(&[tokens], 2)).sum::<u64>()
    };
    let layer = module(&config, "llm_layer");
    // As above, and two heads of keys and values: attention keeps 12 x 2 + 2 x 4.
    assert_eq!(kept(&layer, 6), 6 * (56 + 36 + 32 + 36));
    // Three of six rows at the norms, a head, half of the inner width, and half of the rows that two products read.
    let part = layer.cut(2).unwrap();
    assert_eq!((kept(&part, 6), part.input_width), (3 * (56 + 36 + 32 + 36), 2));
    // Of seven rows one rank has four at the norms.
    assert_eq!(kept(&part, 7), 4 * 56 + 7 * (36 + 32 + 36) / 2);
    // One head of keys and values is on both ranks: the part is that of two heads.
    let repeated = module(&tiny(), "llm_layer").cut(2).unwrap();
    assert_eq!((repeated.operations, repeated.input_width), (part.operations, part.input_width));
    // Three ranks cannot share two heads.
    assert!(module(&tiny(), "llm_layer").cut(3).is_none());
}

/// As `tiny`, with three experts in place of the MLP, of which a token reads two.
fn tiny_experts() -> Value {
    json!({
        "model_type": "qwen3_vl_moe",
        "vision_config": {
            "depth": 2, "hidden_size": 4, "num_heads": 2, "intermediate_size": 6, "patch_size": 2,
            "temporal_patch_size": 1, "out_hidden_size": 4, "num_position_embeddings": 4,
            "deepstack_visual_indexes": [],
        },
        "text_config": {
            "hidden_size": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 9,
            "num_hidden_layers": 2, "vocab_size": 10, "num_experts": 3, "num_experts_per_tok": 2,
            "moe_intermediate_size": 5,
        },
    })
}

#[test]
fn a_layer_with_experts_by_hand() {
    let layer = module(&tiny_experts(), "llm_layer");
    // Queries and out 4 x 4, keys and values 4 x 2, norms of 4, 4, 2 and 2, router 4 x 3, three experts of 3 x 4 x 5.
    let outside = 16 + 16 + 8 + 8 + 12;
    assert_eq!((layer.count, layer.num_parameters()), (2, outside + 12 + 180));
    // Each of 3 tokens goes through two experts.
    let products = 2 * 3 * (48 + 12 + 2 * 60);
    // What the last product gives is kept for its share, so that recomputation runs all.
    let forward = products + 144;
    let expected = ModuleFlops { forward, input: products + 360, weight: products, recomputed: forward };
    assert_eq!(layer.flops(&[3]), expected);
    // A token, of experts: its copies for two products, both halves and the activation of the first, results of the last;
    // in float32 three chances, two of them, their sum; and two shares.
    let kept = |layer: &Module| layer.operations.iter().map(|o| o.kept_bytes(&[6], 2)).sum::<u64>();
    let dense = module(&tiny(), "llm_layer");
    // The norms of heads: two of 2 and one of 2, in float32 and the dtype, with a scale. The router keeps what the norm gave,
    // as the MLP did; that kept two products of 6, an activation and their product.
    let of_norms = 3 * (2 * 6 + 4);
    let of_experts = 2 * 2 * (4 + 15 + 5 + 4) + 4 * (3 + 1 + 2) + 2 * 2;
    assert_eq!(kept(&layer), kept(&dense) + 6 * (of_norms + of_experts - 4 * 6 * 2));
    assert!([2, 4].iter().all(|degree| layer.cut(*degree).is_none()));
    let mut config = tiny_experts();
    config["text_config"]["mlp_only_layers"] = json!([0, 1]);
    // 3 x 4 x 9.
    assert_eq!(module(&config, "llm_layer").num_parameters(), outside + 108);
}

#[test]
fn experts_that_are_not_understood_are_refused_by_name() {
    let refused = |field: &str, value: Value| {
        let mut config = tiny_experts();
        config["text_config"][field] = value;
        Architecture::from_config(&config).unwrap_err().to_string()
    };
    assert_eq!(
        refused("mlp_only_layers", json!([1])),
        "config.json: `text_config.mlp_only_layers` is [1], must leave all 2 layers with experts or none: now 1 have them"
    );
    assert_eq!(
        refused("decoder_sparse_step", json!(2)),
        "config.json: `text_config.decoder_sparse_step` is 2, must leave all 2 layers with experts or none: now 1 have them"
    );
    assert_eq!(
        refused("num_experts_per_tok", json!(4)),
        "config.json: `text_config.num_experts_per_tok` is 4, must be at most the 3 experts"
    );
    // As transformers 5 writes it.
    let mut config = tiny_experts();
    config["text_config"]["num_experts"] = Value::Null;
    config["text_config"]["num_local_experts"] = json!(7);
    assert_eq!(Architecture::from_config(&config).unwrap().llm.experts.unwrap().count, 7);
}

/// Bytes that a module keeps in 16 bit.
fn kept(module: &Module, tokens: u64) -> u64 {
    module.operations.iter().map(|operation| operation.kept_bytes(&[tokens], 2)).sum()
}

#[test]
fn a_layer_with_adapters_by_hand() {
    let base = module(&tiny(), "llm_layer");
    let layer = base.with_adapters(3).unwrap();
    // Inputs and outputs of queries and out 4 + 4, keys and values 4 + 2, three maps of the MLP 4 + 6.
    let adapters = 3 * (2 * 8 + 2 * 6 + 3 * 10);
    assert_eq!(layer.num_parameters(), base.num_parameters() + adapters);
    // 2 x 3 tokens x weights. W is the adapters' alone. The last B, 3 x 4, is not run again.
    let beside = 6 * u128::from(adapters);
    let expected = ModuleFlops {
        forward: 864 + beside,
        input: 1_080 + beside,
        weight: beside,
        recomputed: 864 + beside - 6 * 12,
    };
    assert_eq!(layer.flops(&[3]), expected);
    // As without, but a norm keeps no result before its weight; and what A gives, 3 wide, seven times.
    assert_eq!(kept(&layer, 5), 5 * (40 + 36 + 24 + 36 + 42));
    // From I to W wait A's inputs, 4 three times and 6, and what B reads; gradients of what A gives, and of what B gives.
    let [inputs, gradients] = [Operation::queued_input_bytes, Operation::queued_gradient_bytes]
        .map(|of| layer.operations.iter().map(|one| of(one, &[5], 2)).sum::<u64>());
    assert_eq!((inputs, gradients), (10 * (18 + 21), 10 * (21 + 4 + 2 + 2 + 4 + 6 + 6 + 4)));
    // Rank 0 is no adapter, and no other module gets one.
    for module in Architecture::from_config(&tiny()).unwrap().modules() {
        assert_eq!(module.with_adapters(0), None);
        assert_eq!(module.with_adapters(3).is_some(), module.name == "llm_layer");
    }
}

/// Where outputs are cut B is, where inputs are cut A is; what A gives is whole on both ranks.
#[test]
fn a_cut_layer_with_adapters_by_hand() {
    let mut config = tiny();
    config["text_config"]["num_key_value_heads"] = json!(2);
    let base = module(&config, "llm_layer").cut(2).unwrap();
    let part = base.with_adapters(3).unwrap();
    // Queries, keys and values 4 + 2, out 2 + 4, gate and up 4 + 3, down 3 + 4.
    assert_eq!(part.num_parameters(), base.num_parameters() + 3 * (4 * 6 + 3 * 7));
    assert_eq!(kept(&part, 6), 3 * (40 + 36 + 32 + 36) + 6 * 42);
    // The weights' gradients of all ranks: those that are whole count once for each.
    assert_eq!(part.flops(&[5]).weight, 2 * 5 * 3 * (4 * 6 + 3 * 7));
}

#[test]
fn experts_and_router_stay_frozen_without_adapters() {
    let base = module(&tiny_experts(), "llm_layer");
    let layer = base.with_adapters(3).unwrap();
    // On attention alone: queries and out 4 + 4, keys and values 4 + 2.
    let adapters = 3 * (2 * 8 + 2 * 6);
    assert_eq!(layer.num_parameters(), base.num_parameters() + adapters);
    assert_eq!(layer.flops(&[3]).weight, 6 * u128::from(adapters));
    assert_eq!(layer.flops(&[3]).input, base.flops(&[3]).input + 6 * u128::from(adapters));
    // Two norms of 4 and those of 3 heads of 2 keep no result before the weight; router and experts keep no input: 4, and of
    // two copies 4 and 5.
    let unkept = 2 * (2 * 4 + 3 * 2) + 2 * (4 + 2 * (4 + 5));
    assert_eq!(kept(&layer, 6), kept(&base, 6) + 6 * (4 * 3 * 2) - 6 * unkept);
}

/// Of every model of the catalogue: parameters of the adapters in closed form; less is kept, and wide models take less time, than
/// where all trains; and each degree that cuts the layers cuts those with adapters.
#[test]
fn every_model_is_estimated_with_adapters() {
    for model in catalogue() {
        let profile = profile_with(&model.name, "h100", "bfloat16", 16);
        assert!(profile.problems().is_empty(), "{}: {:?}", model.name, profile.problems());
        let without = profile_with(&model.name, "h100", "bfloat16", 0);
        let of_rank = |rank: u32| profile.variants.iter().filter(move |one| one.lora_rank == rank);
        assert!(of_rank(0).eq(without.variants.iter()) && profile.modules == without.modules);
        let llm = model.architecture().unwrap().llm;
        let (queries, keys) = (llm.num_heads * llm.head_size, llm.num_key_value_heads * llm.head_size);
        let full = 4 * llm.width + (2 + u64::from(llm.has_output_gate)) * queries + 2 * keys;
        // In the mean of both kinds, a layer with linear attention has queries, keys and values of one map, gates, two maps to
        // one value a head, and out.
        let attention = llm.linear.map_or(full, |one| {
            let values = one.num_value_heads * one.value_size;
            let mixed = 2 * one.num_key_heads * one.key_size + values;
            let linear = 5 * llm.width + mixed + 2 * values + 2 * one.num_value_heads;
            (one.num_layers * linear + (llm.num_layers - one.num_layers) * full) / llm.num_layers
        });
        // A short convolution has two maps: one to both gates and what they gate, and out.
        let attention = llm.conv.map_or(attention, |one| {
            (one.num_layers * 6 * llm.width + (llm.num_layers - one.num_layers) * full) / llm.num_layers
        });
        // Where one map is for gate and up, one A is too.
        let num_inputs = if llm.has_one_gate_product { 2 } else { 3 };
        let mlp = match llm.experts {
            // The expert that all tokens read, and its gate.
            Some(experts) if experts.shared_width > 0 => {
                let gate = if experts.has_shared_gate { llm.width + 1 } else { 0 };
                3 * (llm.width + experts.shared_width) + gate
            }
            Some(experts) if experts.router != Router::Scaled => 0,
            _ => num_inputs * llm.width + 3 * llm.mlp_width,
        };
        let (base, layer) = (&profile.modules["llm_layer"], of_rank(16).next().unwrap());
        assert_eq!(layer.tensor_parallel_degree, 1);
        let layer = &layer.modules["llm_layer"];
        let adapted = llm.full_heads.map_or(16 * attention, |own| {
            let full = 3 * llm.width + (2 * llm.num_heads + own.num_key_value_heads) * own.head_size;
            16 * (5 * attention + full) / 6
        });
        assert_eq!(layer.num_parameters - base.num_parameters, adapted + 16 * mlp, "{}", model.name);
        for (with, all) in layer.linear.points.iter().zip(&base.linear.points) {
            assert!(with.repeats == 0 && with.activation_bytes < all.activation_bytes);
            // Below, the host is slower than the device, and adapters have more kernels.
            if with.size >= 16_384 {
                assert!(with.forward_ns > all.forward_ns, "{}: {with:?}, {all:?}", model.name);
                // All of the backward of experts that train is I.
                let (is_longer, of_experts) = (with.input_ns > all.input_ns, llm.experts.is_some());
                assert!(is_longer != of_experts, "{}: {with:?}, {all:?}", model.name);
            }
        }
        let degrees = |rank: u32| {
            let cut = of_rank(rank).filter(|one| one.modules.contains_key("llm_layer"));
            cut.map(|one| one.tensor_parallel_degree).filter(|&degree| degree > 1).collect::<Vec<_>>()
        };
        assert_eq!(degrees(16), degrees(0), "{}", model.name);
        let microbatch = MicrobatchShape {
            llm_tokens: vec![1_024; 16],
            label_tokens: 4_096,
            ..MicrobatchShape::default()
        };
        let step_ns = |recipe: Recipe| {
            let settings = CostSettings { trained: recipe.trained(16), ..CostSettings::default() };
            let cost = CostModel::with(&profile, &settings).unwrap();
            let stage = cost.llm_stage(&microbatch, llm.num_layers as u32, true, true);
            stage.forward_ns + stage.backward_ns
        };
        // On narrow layers what adapters read and write costs more than the gradients of the weights, which they spare.
        if llm.width >= 3_584 {
            assert!(step_ns(Recipe::Lora) < step_ns(Recipe::Full), "{}", model.name);
        }
    }
}

/// GLM-4.5V, 106B-A12B: its first layer has no experts. A profile takes it for one that has them, as what the mean of both kinds
/// would spare no other stage has.
#[test]
fn a_first_layer_without_experts_counts_as_one_with_them() {
    let model = catalogue_model("glm-4.5v").unwrap();
    let architecture = model.architecture().unwrap();
    let modules = architecture.modules();
    let of = |name: &str| modules.iter().find(|module| module.name == name).unwrap();
    let attention = 2 * 4_096 * 12_288 + 2 * 4_096 * 1_024 + 12_288 + 2 * 1_024 + 2 * 4_096;
    assert_eq!((of(DENSE_LAYER).count, of("llm_layer").count), (1, 45));
    assert_eq!(of(DENSE_LAYER).num_parameters(), attention + 3 * 4_096 * 10_944);
    assert_eq!(of("llm_layer").num_parameters(), attention + 129 * 3 * 4_096 * 1_408 + 128 * 4_096);
    let profile = profile("glm-4.5v", "h100", "bfloat16");
    let layer = &profile.modules["llm_layer"];
    assert_eq!((layer.count, layer.num_parameters), (46, of("llm_layer").num_parameters()));
    assert!(!profile.modules.contains_key(DENSE_LAYER));
    // Cut too, it is one more of the others.
    for (degree, variant) in experts::cut_layers(&profile) {
        assert!(!variant.contains_key(DENSE_LAYER));
        // A part of attention and of all widths; a head of keys and values at least, and the whole router and norms.
        let few = 128 * 8_u64.max(degree) / degree;
        let outside = 2 * 4_096 * 12_288 / degree + 12_288 / degree + 2 * (4_096 + 1) * few + 2 * 4_096;
        let layer = &variant["llm_layer"];
        assert_eq!(
            (layer.count, layer.num_parameters),
            (46, outside + 129 * 3 * 4_096 * 1_408 / degree + 128 * 4_096)
        );
    }
    // Of 108 billion parameters a token reads 14, those of encoder, embedding and head among them.
    let read = architecture.num_parameters() - architecture.llm.num_unread_parameters();
    assert_eq!(architecture.llm.num_unread_parameters(), 45 * 120 * 3 * 4_096 * 1_408);
    assert_eq!(read / 1_000_000_000, 14);
}

#[test]
fn an_encoder_by_hand() {
    let layer = module(&tiny(), "encoder_layer");
    // Four products 4 x 4 + 4, MLP 4 x 6 + 6 and 6 x 4 + 4, two norms of 8.
    assert_eq!((layer.count, layer.num_parameters()), (3, 80 + 58 + 16));
    // Two tiles of 2 x 2 patches: 2 x 8 x 112 weights, and 4 x (4^2 + 4^2) x 4.
    assert_eq!(layer.flops(&[4, 4]).forward, 1_792 + 512);
    assert_eq!(layer.segment_tokens, Some(4));
    let embedding = module(&tiny(), "encoder_embedding");
    // A patch of 3 x 2 x 2 values to 4, bias 4, positions 4 x 4.
    assert_eq!(embedding.num_parameters(), 48 + 4 + 16);
    assert_eq!(embedding.flops(&[4]), ModuleFlops { forward: 384, input: 0, weight: 384, recomputed: 384 });
    // Two products 4 x 4 + 4, the newline, the tower's last norm.
    assert_eq!(module(&tiny(), "projector").num_parameters(), 40 + 4 + 8);
    assert_eq!(module(&tiny(), "llm_head").flops(&[5]).forward, 2 * 5 * 4 * 10);
}

#[test]
fn tensor_parallel_parts_add_up() {
    let layer = module(&catalogue_model("internvl3-8b").unwrap().config, "llm_layer");
    let (whole, part) = (layer.flops(&[4_096]), layer.cut(4).unwrap().flops(&[4_096]));
    assert_eq!(
        (4 * part.forward, 4 * part.input, 4 * part.weight),
        (whole.forward, whole.input, whole.weight)
    );
    // 28 heads and 4 of keys: 8 divides neither.
    assert!(layer.cut(8).is_none());
    // 25 heads: the encoder of the large models is not cut, its layers are.
    let large = profile("internvl3-78b", "h100", "bfloat16");
    let variant = large.variants.iter().find(|variant| variant.tensor_parallel_degree == 8).unwrap();
    assert_eq!(variant.modules.keys().collect::<Vec<_>>(), ["llm_embedding", "llm_head", "llm_layer"]);
    assert!(!variant.has_collectives);
    // A rank has an eighth of the rows of the vocabulary, 151,674, rounded up; the last norm is whole.
    let [embedding, head] = ["llm_embedding", "llm_head"].map(|name| variant.modules[name].num_parameters);
    assert_eq!((embedding, head), (18_960 * 8_192, 18_960 * 8_192 + 8_192));
    let time = |modules: &BTreeMap<String, ModuleProfile>| {
        modules["llm_head"].linear.points.last().unwrap().forward_ns
    };
    assert!(7 * time(&variant.modules) < time(&large.modules));
}

#[test]
fn every_estimate_is_a_sound_and_marked_profile() {
    for model in catalogue() {
        for hardware in &HARDWARE {
            for dtype in ["bfloat16", "float32"] {
                let profile = profile(&model.name, hardware.name, dtype);
                assert!(profile.problems().is_empty(), "{}: {:?}", model.name, profile.problems());
                assert!(profile.is_estimated && profile.network.is_assumed);
                CostModel::new(&profile).unwrap();
                for module in profile.modules.values() {
                    for curve in [&module.linear, &module.attention] {
                        assert!(curve.points.iter().all(|p| p.repeats == 0 && p.spread_ns == 0));
                        assert!(curve.points.windows(2).all(|pair| pair[0].forward_ns <= pair[1].forward_ns
                            && pair[0].backward_ns <= pair[1].backward_ns
                            && pair[0].activation_bytes <= pair[1].activation_bytes));
                        assert!(curve.points.iter().all(|p| p.backward_ns == p.input_ns + p.weight_ns));
                    }
                }
                let layer = &profile.modules["llm_layer"];
                assert!(layer.num_parameters > 0 && layer.recompute.contains_key(&Recompute::Full));
            }
        }
    }
}

/// No estimate is faster than the peak, nor so slow that it would be no estimate: a large layer reaches 30 to 75 %.
#[test]
fn large_layers_reach_a_plausible_share_of_the_peak() {
    let architecture = catalogue_model("qwen2.5-vl-7b").unwrap().architecture().unwrap();
    let layer = architecture.modules().into_iter().find(|module| module.name == "llm_layer").unwrap();
    for (hardware, most) in [("a100", 0.80), ("h100", 0.75), ("h200", 0.75), ("b200", 0.75), ("mi300x", 0.75)]
    {
        let device = Hardware::named(hardware).unwrap();
        let model = CostModel::new(&profile("qwen2.5-vl-7b", hardware, "bfloat16")).unwrap();
        let microbatch = MicrobatchShape { llm_tokens: vec![1_024; 8], ..MicrobatchShape::default() };
        let stage = model.llm_stage(&microbatch, 1, false, false);
        assert!(!stage.extrapolated);
        let flops = layer.flops(&[1_024; 8]);
        let all = (flops.forward + flops.input + flops.weight) as f64;
        let share = all / (stage.forward_ns + stage.backward_ns) as f64 / device.half_gflops as f64;
        assert!((0.30..most).contains(&share), "{hardware}: {share}");
    }
}

#[test]
fn selective_recomputation_costs_less_time_and_more_memory_than_full() {
    let layer = &profile("llava-onevision-qwen2-7b", "h100", "bfloat16").modules["llm_layer"];
    let (selective, full) = (&layer.recompute[&Recompute::Selective], &layer.recompute[&Recompute::Full]);
    for ((selective, full), none) in selective.iter().zip(full).zip(&layer.linear.points) {
        assert_eq!((selective.size, full.size), (none.size, none.size));
        assert!(selective.extra_ns < full.extra_ns && full.extra_ns <= none.forward_ns);
        assert!(full.activation_bytes < selective.activation_bytes);
        assert!(selective.activation_bytes < none.activation_bytes);
    }
    // Full keeps the layer's input and nothing else: 3,584 values of 2 bytes.
    assert_eq!(full[0].activation_bytes, full[0].size * 3_584 * 2);
}

/// Qwen2 7B: width 3,584, keys and values 512, inner width 18,944; queries, keys and values read one input, gate and
/// up another.
#[test]
fn what_waits_for_the_weights_is_in_closed_form() {
    let profile = profile("llava-onevision-qwen2-7b", "h100", "bfloat16");
    for point in &profile.modules["llm_layer"].linear.points {
        let (inputs, gradients) = (3 * 3_584 + 18_944, 3 * 3_584 + 2 * 512 + 2 * 18_944);
        let split = point.split.expect("it is estimated");
        assert_eq!(split.queued_bytes, 2 * point.size * (inputs + gradients));
        assert!(split.input_workspace_bytes >= 2 * point.size * gradients);
    }
    assert!(profile.modules["llm_layer"].attention.points.iter().all(|point| point.split.is_none()));
}

#[test]
fn links_across_nodes_are_slower() {
    for hardware in &HARDWARE {
        let network = profile("qwen2-audio-7b", hardware.name, "bfloat16").network;
        let pair = |span| network.links.iter().find(|link| link.num_ranks == 2 && link.span == span).unwrap();
        let (node, cluster) = (pair(LinkSpan::Node), pair(LinkSpan::Cluster));
        assert!(node.bandwidth_bytes_per_s > cluster.bandwidth_bytes_per_s, "{}", hardware.name);
        assert!(node.latency_ns < cluster.latency_ns);
        // What is reached is below what the vendor promises.
        assert!(node.bandwidth_bytes_per_s < hardware.pair_bytes_per_s);
    }
}

#[test]
fn fields_that_transformers_fills_in_are_filled_in() {
    let mut config = tiny();
    config["text_config"] = json!({"model_type": "llama"});
    let llm = Architecture::from_config(&config).unwrap().llm;
    // `LlamaConfig()`: Llama 2 7B.
    assert_eq!((llm.width, llm.num_layers, llm.num_key_value_heads, llm.head_size), (4_096, 32, 32, 128));
    assert!(!llm.has_qkv_bias && !llm.is_tied);
    let refused = |change: Value| Architecture::from_config(&change).unwrap_err().to_string();
    assert_eq!(
        refused(json!({"model_type": "bert"})),
        "config.json: `model_type` is `bert`, known are gemma3, gemma4, glm4v, glm4v_moe, glm46v, glm_ocr, idefics3, smolvlm, lfm2_vl, lighton_ocr, llava_onevision, llava, llava_next, internvl, internvl_chat, minicpmv4_6, mistral3, paddleocr_vl, \
         qwen2_vl, qwen2_5_omni, qwen2_5_vl, qwen3_omni_moe, qwen3_vl, qwen3_vl_moe, qwen3_5, qwen3_5_moe, qwen2_audio, audioflamingo3, voxtral"
    );
    assert_eq!(
        refused(json!({"model_type": "qwen2_vl"})),
        "config.json: `vision_config` is missing, must be a section"
    );
}
