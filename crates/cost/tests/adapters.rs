//! Layers with adapters: what trains beside them, and what their ranks sum up.

use crate::fixture;
use crate::fixture::profile;
use dflop_cost::{ComponentSettings, CostModel, CostSettings, StageLayers, Trained};
use dflop_types::{MicrobatchShape, Recompute, Variant};

const WHOLE: StageLayers = StageLayers { num_layers: 4, is_first: true, is_last: true };

/// Profiling measures embedding and head frozen beside layers with adapters: a variant holds them with as many parameters.
#[test]
fn what_was_measured_frozen_beside_adapters_does_not_train() {
    let trained = Trained { encoder: false, projector: true, llm: true, lora_rank: 8 };
    let settings = CostSettings { trained, ..CostSettings::default() };
    let bare = profile();
    let mut measured = profile();
    for name in ["llm_embedding", "llm_head"] {
        let frozen = measured.modules[name].clone();
        let of_adapters = measured.variants.iter_mut().find(|variant| variant.lora_rank == 8).unwrap();
        of_adapters.modules.insert(name.to_owned(), frozen);
    }
    let [bare, measured] = [&bare, &measured].map(|profile| CostModel::with(profile, &settings).unwrap());
    let batch = MicrobatchShape::pack([&fixture::sample(2, 200, 500, 100)]);
    assert_eq!(measured.llm_stage(&batch, 4, true, true), bare.llm_stage(&batch, 4, true, true));
    // The optimizer has the adapters alone: 100 parameters in each of 4 layers.
    assert_eq!(measured.stage_tail(WHOLE, 1).ns, bare.stage_tail(WHOLE, 1).ns);
    assert_eq!(bare.stage_tail(WHOLE, 1).ns, 4 * 100);
}

/// In mode `selective` the sums of a layer with adapters are made again, as in `full`: two, each half of a sum less where
/// the layer has none.
#[test]
fn selective_recomputation_sums_what_adapters_give_again() {
    let mut profile = profile();
    let cut_layer = profile.variants[0].modules["llm_layer"].clone();
    profile.variants.push(Variant {
        tensor_parallel_degree: 2,
        lora_rank: 8,
        has_collectives: false,
        modules: [("llm_layer".to_owned(), cut_layer.clone())].into(),
    });
    // The part of the adapters.
    profile.variants[2].modules.get_mut("llm_layer").unwrap().num_parameters += 50;
    let times = |lora_rank, recompute| {
        let llm = ComponentSettings { tensor_parallel_degree: 2, recompute, ..Default::default() };
        let trained = Trained { lora_rank, ..Trained::default() };
        let settings = CostSettings { llm, trained, ..CostSettings::default() };
        let model = CostModel::with(&profile, &settings).unwrap();
        let batch = MicrobatchShape::pack([&fixture::sample(0, 0, 500, 100)]);
        model.llm_stage(&batch, 1, false, false).backward_ns
    };
    let sum_5000 = 1_100 + 9_200 * 4 / 9;
    assert_eq!(times(8, Recompute::None), times(0, Recompute::None));
    assert_eq!(times(8, Recompute::Full), times(0, Recompute::Full));
    assert_eq!(times(8, Recompute::Selective) - times(0, Recompute::Selective), sum_5000);
}
