//! Layers with experts: what their cut parts hold, and what they cost.

use std::collections::BTreeMap;

use dflop_analytic::{EstimateSettings, Hardware, catalogue_model, estimate};
use dflop_types::{ExpertsProfile, Hint, MadeFrom, ModelProfile, ModuleProfile};

use super::profile;

/// The modules of each variant without adapters that has the layers of the backbone, by its degree.
pub(super) fn cut_layers(profile: &ModelProfile) -> Vec<(u64, &BTreeMap<String, ModuleProfile>)> {
    let plain = profile.variants.iter().filter(|one| one.lora_rank == 0);
    let found = plain.filter(|one| one.modules.contains_key("llm_layer"));
    let found: Vec<_> = found.map(|one| (u64::from(one.tensor_parallel_degree), &one.modules)).collect();
    assert!(!found.is_empty());
    found
}

/// A rank has its part of the width of each expert, and the whole router. Its products with experts have that part of the work; the
/// rest, such as copies of rows, each rank does whole.
#[test]
fn experts_are_cut_by_their_width() {
    for name in ["qwen3-vl-30b-a3b", "qwen3-omni-30b-a3b", "gemma-4-26b-a4b"] {
        let profile = profile(name, "h100", "bfloat16");
        let llm = catalogue_model(name).unwrap().architecture().unwrap().llm;
        let experts = llm.experts.unwrap();
        let whole = &profile.modules["llm_layer"];
        let variants = cut_layers(&profile);
        assert_eq!(variants.iter().map(|(degree, _)| *degree).collect::<Vec<_>>(), [2, 4, 8], "{name}");
        for (degree, modules) in variants {
            let layer = &modules["llm_layer"];
            assert_eq!(layer.count, whole.count);
            let widths = 3 * llm.width * experts.count * experts.width;
            let outside = whole.num_parameters - widths;
            // At least the router stays whole, and all that is outside at most.
            let outside_cut = layer.num_parameters - widths / degree;
            assert!((llm.width * experts.count..outside).contains(&outside_cut), "{name} {degree}");
            let forward = |module: &ModuleProfile| module.linear.points.last().unwrap().forward_ns;
            assert!(forward(layer) < forward(whole), "{name} {degree}");
            assert!(degree * forward(layer) > forward(whole), "{name} {degree}");
        }
    }
}

/// A degree that does not divide the width of an expert is refused. The error names both numbers.
#[test]
fn a_width_of_experts_that_a_degree_does_not_divide_is_named() {
    let mut architecture = catalogue_model("qwen3-vl-30b-a3b").unwrap().architecture().unwrap();
    architecture.llm.experts.as_mut().unwrap().width = 772;
    assert!(architecture.check_degrees([None, Some(4)]).is_ok());
    let error = architecture.check_degrees([None, Some(8)]).unwrap_err();
    let message =
        "the LLM has 772 columns in each of its experts, which tensor parallel degree 8 does not divide";
    assert_eq!(error.to_string(), message);
    assert!(error.hint().unwrap().ends_with("the greatest is 4"));
    let layer = architecture.modules().into_iter().find(|module| module.name == "llm_layer").unwrap();
    assert!(layer.cut(8).is_none());
    assert!(layer.cut(4).is_some());
}

/// Time follows the experts that a token reads, memory all of them; few rows an expert are slower than their operations say.
#[test]
fn experts_cost_time_by_what_is_read_and_memory_by_what_is_held() {
    let estimated = |name: &str| profile(name, "h100", "bfloat16").modules["llm_layer"].clone();
    let layer = estimated("qwen3-vl-30b-a3b");
    // 128 experts of 3 x 2,048 x 768, the router, attention with 32 and 4 heads of 128, norms.
    let outside = 2 * 2_048 * 4_096 + 2 * 2_048 * 512 + 2 * 2_048 + 2 * 128;
    assert_eq!(layer.num_parameters, 128 * 3 * 2_048 * 768 + 128 * 2_048 + outside);
    assert_eq!(layer.parameter_bytes, 2 * layer.num_parameters);
    let own = 128 * 3 * 2_048 * 768;
    let experts = ExpertsProfile { count: 128, per_token: 8, num_parameters: own, parameter_bytes: 2 * own };
    assert_eq!(layer.experts, Some(experts));
    // One that every token reads is none of them; nor is an MLP beside experts.
    for name in ["qwen3.5-35b-a3b", "gemma-4-26b-a4b"] {
        let (layer, llm) = (estimated(name), catalogue_model(name).unwrap().architecture().unwrap().llm);
        let (found, experts) = (layer.experts.unwrap(), llm.experts.unwrap());
        assert_eq!(u64::from(found.count), experts.count, "{name}");
        assert_eq!(u64::from(found.per_token), experts.per_token, "{name}");
        assert_eq!(found.num_parameters, experts.count * 3 * llm.width * experts.width, "{name}");
    }
    assert_eq!(estimated("qwen3-vl-8b").experts, None);
    // 120 of 128 experts, in 48 layers.
    let llm = catalogue_model("qwen3-vl-30b-a3b").unwrap().architecture().unwrap().llm;
    assert_eq!(llm.num_unread_parameters(), 48 * 120 * 3 * 2_048 * 768);
    let at = |layer: &dflop_types::ModuleProfile, size: u64| {
        *layer.linear.points.iter().find(|point| point.size == size).unwrap()
    };
    // A dense layer as large as what a token reads, 8 experts as one MLP, takes less time; one as large as all, more.
    let mut dense = catalogue_model("qwen3-vl-30b-a3b").unwrap().architecture().unwrap();
    let mut of_width = |width: u64| {
        dense.llm.experts = None;
        dense.llm.mlp_width = width;
        let settings = EstimateSettings {
            model: String::new(),
            dtype: "bfloat16".to_owned(),
            made_from: MadeFrom::new(),
            lora_rank: 0,
        };
        estimate(&dense, Hardware::named("h100").unwrap(), &settings).unwrap().modules["llm_layer"].clone()
    };
    let (read, all) = (of_width(8 * 768), of_width(128 * 768));
    for size in [16_384, 65_536] {
        let [layer, read, all] = [&layer, &read, &all].map(|layer| at(layer, size));
        assert!(read.forward_ns < layer.forward_ns && layer.forward_ns < all.forward_ns, "{size}");
    }
    // Four times the rows of an expert: less than four times the time where tiles are hardly filled, about that where they are.
    let growth = |few: u64| at(&layer, 4 * few).forward_ns as f64 / at(&layer, few).forward_ns as f64;
    assert!(growth(256) < 2.5 && growth(32_768) > 3.5, "{} {}", growth(256), growth(32_768));
    // The backward of experts is not split: W has the products of attention alone, which are a small part.
    let point = at(&layer, 8_192);
    assert!(2 * point.weight_ns < point.input_ns, "{point:?}");
    let split = point.split.unwrap();
    assert_eq!(split.queued_bytes, 2 * point.size * (2_048 + 4_096 + 4_096 + 2 * 512 + 2_048));
    assert_eq!(split.weight_workspace_bytes, 2 * 2_048 * 4_096);
}
