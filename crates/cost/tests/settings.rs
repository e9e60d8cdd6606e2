//! How a model is run decides what is predicted: closed forms by hand for what trains, what is recomputed, and layers cut
//! over ranks.

use crate::fixture;
use crate::fixture::profile;
use dflop_cost::{
    ComponentSettings, CostError, CostModel, CostSettings, EncoderLayers, Prediction, RankMicrobatch,
    RankRole, RankSteps, Sharding, StageLayers, Trained, Typical,
};
use dflop_types::{Action, Hint, MicrobatchShape, ModelProfile, Network, Recompute};
use proptest::prelude::*;

const WHOLE: StageLayers = StageLayers { num_layers: 4, is_first: true, is_last: true };

fn trained(encoder: bool, projector: bool, llm: bool, lora_rank: u32) -> CostSettings {
    CostSettings { trained: Trained { encoder, projector, llm, lora_rank }, ..CostSettings::default() }
}

fn cut(degree: u32, recompute: Recompute) -> CostSettings {
    let component = ComponentSettings { tensor_parallel_degree: degree, recompute, ..Default::default() };
    CostSettings { encoder: component, llm: component, ..CostSettings::default() }
}

/// Encoder and whole LLM backbone for one sample: 2 tiles of 200 tokens, 500 LLM tokens, 100 labels.
fn both(settings: &CostSettings) -> (Prediction, Prediction) {
    let model = CostModel::with(&profile(), settings).unwrap();
    let batch = MicrobatchShape::pack([&fixture::sample(2, 200, 500, 100)]);
    let (encoder, llm) = (model.encoder(&batch), model.llm_stage(&batch, 4, true, true));
    assert!(!encoder.extrapolated && !llm.extrapolated && !encoder.assumed && !llm.assumed);
    (encoder, llm)
}

/// F, B, I and W.
fn times(prediction: &Prediction) -> [u64; 4] {
    [prediction.forward_ns, prediction.backward_ns, prediction.input_ns, prediction.weight_ns]
}

// Forward of each module for that sample: linear over 400 encoder tokens, attention over 2 x 200.
const EMBEDDING: u64 = 2 * 400;
const LAYERS: u64 = 3 * (30 * 400 + 2 * 7 * 200);
const PROJECTOR: u64 = 5 * 400;
const LLM_LAYERS: u64 = 4 * (40 * 500 + 9 * 500);
const LLM_ENDS: u64 = 500 + 11 * 100;

#[test]
fn by_default_all_of_it_runs() {
    let (encoder, llm) = both(&CostSettings::default());
    // I is F + 10 and W is F + 20 for each curve: 1 + 3 * 3 + 1 runs of them in the encoder, 4 * 2 + 2 in the LLM.
    let forward = EMBEDDING + LAYERS + PROJECTOR;
    assert_eq!(times(&encoder), [forward, 2 * forward + 11 * 30, forward + 11 * 10, forward + 11 * 20]);
    let forward = LLM_LAYERS + LLM_ENDS;
    assert_eq!(times(&llm), [forward, 2 * forward + 10 * 30, forward + 10 * 10, forward + 10 * 20]);
    for prediction in [encoder, llm] {
        assert_eq!(prediction.backward_ns, prediction.input_ns + prediction.weight_ns);
    }
}

#[test]
fn a_frozen_encoder_runs_forward_alone() {
    let (encoder, llm) = both(&trained(false, false, true, 0));
    assert_eq!(times(&encoder), [EMBEDDING + LAYERS + PROJECTOR, 0, 0, 0]);
    // Nothing before the embedding trains: its backward is all of W.
    let input = LLM_LAYERS + 11 * 100 + 9 * 10;
    let forward = LLM_LAYERS + LLM_ENDS;
    assert_eq!(times(&llm), [forward, 2 * forward + 10 * 30, input, 2 * forward + 10 * 30 - input]);
}

#[test]
fn a_projector_alone_trains_through_a_frozen_llm() {
    let (encoder, llm) = both(&trained(false, true, false, 0));
    let backward = 2 * PROJECTOR + 30;
    assert_eq!(times(&encoder), [EMBEDDING + LAYERS + PROJECTOR, backward, 0, backward]);
    let forward = LLM_LAYERS + LLM_ENDS;
    let input = forward + 10 * 10;
    assert_eq!(times(&llm), [forward, input, input, 0]);
}

#[test]
fn nothing_before_and_nothing_in_it_trains() {
    let (encoder, llm) = both(&trained(false, false, false, 0));
    assert_eq!((encoder.backward_ns, llm.backward_ns), (0, 0));
    assert_eq!(llm.forward_ns, LLM_LAYERS + LLM_ENDS);
    // A frozen projector behind an encoder that trains passes the gradient on.
    let (encoder, _) = both(&trained(true, false, false, 0));
    assert_eq!(encoder.input_ns, EMBEDDING + LAYERS + PROJECTOR + 11 * 10);
    assert_eq!(encoder.weight_ns, EMBEDDING + LAYERS + 10 * 20);
}

#[test]
fn adapters_are_the_variant_of_their_rank() {
    let (_, llm) = both(&trained(false, false, true, 8));
    // Embedding: frozen, nothing before it. Layers: the variant's, whole. Head: frozen behind adapters.
    let layers = 4 * (42 * 500 + 9 * 500);
    let backward = 2 * layers + 8 * 30 + (11 * 100 + 10);
    assert_eq!(times(&llm), [layers + LLM_ENDS, backward, layers + 8 * 10 + 11 * 100 + 10, layers + 8 * 20]);
    // 100 of a layer's 5,100 parameters train, at 1 ns a parameter.
    let model = CostModel::with(&profile(), &trained(false, false, true, 8)).unwrap();
    assert_eq!(model.stage_tail(WHOLE, 1).ns, 4 * 100);
    assert_eq!(model.encoder_tail(1).ns, 0);
}

#[test]
fn recomputation_lengthens_backward_and_input_gradient() {
    let (plain_encoder, plain_llm) = both(&CostSettings::default());
    for (mode, encoder_ns, llm_ns) in [
        (Recompute::Selective, 3 * 3 * 400, 4 * 3 * 500),
        // The forward of attention once more.
        (Recompute::Full, 3 * (5 * 400 + 2 * 7 * 200), 4 * (5 * 500 + 9 * 500)),
    ] {
        let (encoder, llm) = both(&cut(1, mode));
        for (plain, longer, ns) in [(plain_encoder, encoder, encoder_ns), (plain_llm, llm, llm_ns)] {
            let [f, b, i, w] = times(&plain);
            assert_eq!(times(&longer), [f, b + ns, i + ns, w], "{mode:?}");
        }
    }
    // Of 3 and of 4 layers, 2 in full.
    let (encoder, llm) = both(&cut(1, Recompute::full_of(2)));
    let encoder_ns = 2 * (5 * 400 + 2 * 7 * 200) + 3 * 400;
    let llm_ns = 2 * (5 * 500 + 9 * 500) + 2 * 3 * 500;
    for (plain, longer, ns) in [(plain_encoder, encoder, encoder_ns), (plain_llm, llm, llm_ns)] {
        let [f, b, i, w] = times(&plain);
        assert_eq!(times(&longer), [f, b + ns, i + ns, w]);
    }
    // A frozen encoder has no backward in which to compute anything again.
    let mut frozen = cut(1, Recompute::Full);
    frozen.trained.encoder = false;
    frozen.trained.projector = false;
    assert_eq!(times(&both(&frozen).0), [EMBEDDING + LAYERS + PROJECTOR, 0, 0, 0]);
}

#[test]
fn recomputation_keeps_what_was_measured() {
    let batch = MicrobatchShape::pack([&fixture::sample(0, 0, 500, 100)]);
    // What arrives is counted at the border of the stage; here it is nothing.
    let profile = ModelProfile { hidden_bytes: 0, ..profile() };
    let bytes = |mode| {
        let model = CostModel::with(&profile, &cut(1, mode)).unwrap();
        let layer = StageLayers { num_layers: 1, is_first: false, is_last: false };
        model.activation_bytes(RankRole::Stage(layer), &batch)
    };
    // Ids and the like are kept in any case.
    let saved = |mode| bytes(Recompute::None) - bytes(mode);
    assert_eq!(saved(Recompute::Selective), (8 - 4) * 500);
    assert_eq!(saved(Recompute::Full), (8 + 8 - 1) * 500);
}

#[test]
fn a_cut_layer_sums_up_over_the_network() {
    let (encoder, llm) = both(&cut(2, Recompute::None));
    // 4,000 bytes lie a third of the way from 1,100 to 10,300 ns; 5,000 bytes four ninths of it.
    let (sum_4000, sum_5000, sum_1000) = (1_100 + 9_200 / 3, 1_100 + 9_200 * 4 / 9, 1_100);
    let layers = 3 * (15 * 400 + 2 * 4 * 200);
    let forward = EMBEDDING + layers + PROJECTOR;
    let collectives = 3 * 2 * sum_4000;
    assert_eq!(encoder.forward_ns, forward + collectives);
    assert_eq!(encoder.backward_ns, 2 * forward + 11 * 30 + collectives);
    assert_eq!(encoder.input_ns, forward + 11 * 10 + collectives);
    assert_eq!(encoder.weight_ns, forward + 11 * 20);
    // The embedding was not cut; the head sums up the gradient of its input.
    let layers = 4 * (20 * 500 + 5 * 500);
    let forward = layers + 500 + 6 * 100;
    assert_eq!(llm.forward_ns, forward + 4 * 2 * sum_5000);
    // What is kept in parts is gathered again, before attention and MLP: half a sum each.
    let back = 2 * forward + 10 * 30 + 4 * 2 * sum_5000 + sum_1000;
    assert_eq!(llm.backward_ns, back + 4 * sum_5000);
    // All of a layer once more, its two sums as well, and what they gather.
    let (_, full) = both(&cut(2, Recompute::Full));
    assert_eq!(full.backward_ns - back, 4 * (5 * 500 + 5 * 500 + 2 * sum_5000));
    // Nothing wants the inputs of weights that are frozen.
    let mut frozen = cut(2, Recompute::None);
    frozen.trained.llm = false;
    assert_eq!(both(&frozen).1.backward_ns, llm.input_ns - 4 * sum_5000);
    // Half of the parameters of layers and head.
    let model = CostModel::with(&profile(), &cut(2, Recompute::None)).unwrap();
    assert_eq!(model.stage_tail(WHOLE, 1).ns, 4 * 2_500 + 4_000 + 3_000);
}

#[test]
fn collectives_that_are_measured_with_the_layer_are_not_added() {
    let mut profile = profile();
    profile.variants[0].has_collectives = true;
    let batch = MicrobatchShape::pack([&fixture::sample(0, 0, 500, 100)]);
    let model = CostModel::with(&profile, &cut(2, Recompute::None)).unwrap();
    assert_eq!(model.llm_stage(&batch, 4, false, false).forward_ns, 4 * (20 * 500 + 5 * 500));
    // Nor to the backward, whatever is computed again: the times are those of one cut on a network of no cost.
    let mut alone = self::profile();
    for link in &mut alone.network.links {
        (link.latency_ns, link.bandwidth_bytes_per_s) = (0, u64::MAX);
        link.points.clear();
    }
    for mode in [Recompute::None, Recompute::Selective, Recompute::Full] {
        let of = |profile: &ModelProfile| {
            let model = CostModel::with(profile, &cut(2, mode)).unwrap();
            let stage = model.llm_stage(&batch, 4, true, true);
            (times(&stage), stage.assumed)
        };
        assert_eq!(of(&profile).0, of(&alone).0);
        assert!(!of(&profile).1);
    }
}

#[test]
fn of_two_measurements_of_a_degree_the_one_with_collectives_stands() {
    let with_collectives = |lengthened: u64| {
        let mut profile = profile();
        let mut measured = profile.variants[0].clone();
        measured.has_collectives = true;
        for module in measured.modules.values_mut() {
            module.linear.points.iter_mut().for_each(|point| point.forward_ns *= lengthened);
        }
        // The shard may stand before or behind.
        profile.variants.insert(usize::from(lengthened > 1), measured);
        let batch = MicrobatchShape::pack([&fixture::sample(0, 0, 500, 100)]);
        let model = CostModel::with(&profile, &cut(2, Recompute::None)).unwrap();
        model.llm_stage(&batch, 4, false, false).forward_ns
    };
    assert_eq!(with_collectives(1), 4 * (20 * 500 + 5 * 500));
    assert_eq!(with_collectives(3), 4 * (3 * 20 * 500 + 5 * 500));
}

#[test]
fn collectives_on_an_unknown_network_are_free_and_marked() {
    let mut profile = profile();
    profile.network = Network::default();
    let batch = MicrobatchShape::pack([&fixture::sample(0, 0, 500, 100)]);
    let cut_model = CostModel::with(&profile, &cut(2, Recompute::None)).unwrap();
    let stage = cut_model.llm_stage(&batch, 4, false, false);
    assert_eq!(stage.forward_ns, 4 * (20 * 500 + 5 * 500));
    assert!(stage.assumed);
    assert!(!CostModel::new(&profile).unwrap().llm_stage(&batch, 4, true, true).assumed);
}

#[test]
fn segments_of_another_size_than_measured_are_marked() {
    let mut profile = profile();
    let encoder_layer = profile.modules.get_mut("encoder_layer").unwrap();
    encoder_layer.attention.points.clear();
    encoder_layer.segment_tokens = Some(200);
    let model = CostModel::new(&profile).unwrap();
    let of = |tiles, tokens| model.encoder(&MicrobatchShape::pack([&fixture::sample(tiles, tokens, 9, 3)]));
    assert!(!of(2, 200).extrapolated);
    assert!(of(2, 201).extrapolated);
    // Windows are the model's own, whatever the segments.
    let layer = profile.modules["encoder_layer"].clone();
    profile.modules.get_mut("encoder_layer").unwrap().segment_tokens = None;
    profile.modules.insert("encoder_window_layer".to_owned(), layer);
    let windows = CostModel::new(&profile).unwrap();
    let batch = MicrobatchShape::pack([&fixture::sample(2, 201, 9, 3)]);
    assert!(!windows.encoder(&batch).extrapolated);
    // Three layers more of the same.
    let plain = profile.modules.remove("encoder_window_layer").unwrap();
    let without = CostModel::new(&profile).unwrap().encoder(&batch);
    assert_eq!(windows.encoder(&batch).forward_ns - without.forward_ns, u64::from(plain.count) * 30 * 402);
}

#[test]
fn what_was_not_measured_is_an_error_that_names_what_was() {
    let message = |settings: &CostSettings| {
        let error = CostModel::with(&profile(), settings).unwrap_err();
        (error.to_string(), error.hint().unwrap())
    };
    assert_eq!(
        message(&cut(4, Recompute::None)).0,
        "model profile: tensor parallel degree 4 was not measured; measured: tensor parallel degree 1, \
         tensor parallel degree 1 with LoRA rank 8, tensor parallel degree 2"
    );
    assert_eq!(
        message(&cut(4, Recompute::None)).1,
        "measure it with `dflop profile model --tensor-parallel 1,2,4`"
    );
    let (error, hint) = message(&trained(true, true, true, 16));
    assert!(error.starts_with(
        "model profile: tensor parallel degree 1 with LoRA rank 16 was not measured; measured: "
    ));
    assert_eq!(hint, "measure it with `dflop profile model --tensor-parallel 1,2 --lora-rank 16`");
    // What is estimated for a device that is not there is no reason to measure again.
    let estimated = ModelProfile { is_estimated: true, ..profile() };
    let error = CostModel::with(&estimated, &cut(4, Recompute::None)).unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("model profile: tensor parallel degree 4 was not estimated; estimated: ")
    );
    assert!(error.hint().unwrap().starts_with("take one of those"));
    let error = CostModel::with(&estimated, &trained(true, true, true, 16)).unwrap_err();
    assert_eq!(error.hint().unwrap(), "estimate it with `dflop profile model --estimate --lora-rank 16`");
    assert_eq!(
        message(&trained(true, true, false, 8)).0,
        "`trained.lora_rank` is 8 but `trained.llm` is false, must be 0 then"
    );
    // Measured with this degree, but not this layer: it has heads or a width that the degree does not divide.
    for (module, part) in [("llm_layer", "LLM"), ("encoder_layer", "encoder")] {
        let mut uncut = profile();
        for variant in uncut.variants.iter_mut().filter(|variant| variant.tensor_parallel_degree == 2) {
            assert!(variant.modules.remove(module).is_some());
        }
        let error = CostModel::with(&uncut, &cut(2, Recompute::None)).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("model profile: `{module}` cannot be cut over 2 ranks, only over 1")
        );
        assert!(error.hint().unwrap().contains(&format!("tensor parallel degree of the {part}")));
    }
    let mut bare = profile();
    bare.modules.get_mut("encoder_layer").unwrap().recompute.remove(&Recompute::Full);
    let error = CostModel::with(&bare, &cut(1, Recompute::Full)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "model profile, module `encoder_layer`: recomputation `full` was not measured; measured: `selective`"
    );
    assert_eq!(error.hint().unwrap(), "measure it with `dflop profile model --recompute`");
}

#[test]
fn a_profile_without_split_trains_but_freezes_nothing() {
    let mut whole = profile();
    for module in whole.modules.values_mut() {
        for point in module.linear.points.iter_mut().chain(&mut module.attention.points) {
            (point.input_ns, point.weight_ns) = (0, 0);
        }
    }
    assert!(CostModel::new(&profile()).unwrap().has_split());
    assert!(!CostModel::new(&whole).unwrap().has_split());
    let mut compiled = profile();
    compiled.device.compiles_layers = true;
    assert!(!CostModel::new(&compiled).unwrap().has_split());
    // The I of what is frozen is known all the same.
    assert!(CostModel::with(&compiled, &trained(false, true, false, 0)).is_ok());
    assert_eq!(
        CostModel::with(&whole, &trained(false, true, false, 0)).unwrap_err(),
        CostError::NoInputGradient { module: "llm_embedding", part: "linear" }
    );
    // What runs forward alone needs no split.
    assert!(CostModel::with(&whole, &trained(false, true, true, 0)).is_ok());
}

#[test]
fn repairs_are_counted_in_every_curve() {
    let mut noisy = profile();
    let layer = noisy.modules.get_mut("llm_layer").unwrap();
    layer.linear.points[0].input_ns = 90_000;
    layer.attention.points[0].weight_ns = 90_000;
    layer.recompute.get_mut(&Recompute::Full).unwrap()[0].extra_ns = 90_000;
    let repairs = |recompute| {
        let model = CostModel::with(&noisy, &cut(1, recompute)).unwrap();
        let found: Vec<_> =
            model.repairs().iter().map(|r| (r.module, r.part, r.phase, r.num_points)).collect();
        found
    };
    let measured = [("llm_layer", "linear", "input", 2), ("llm_layer", "attention", "weight", 2)];
    assert_eq!(repairs(Recompute::None), measured);
    // The other mode's points are not read.
    assert_eq!(repairs(Recompute::Selective), measured);
    let [input, weight] = measured;
    assert_eq!(repairs(Recompute::Full), [input, ("llm_layer", "linear", "recompute", 2), weight]);
}

proptest! {
    #[test]
    fn no_packing_beats_the_certified_work_however_it_runs(
        samples in prop::collection::vec((fixture::any_sample(), 0usize..3), 0..10), encoder: bool, degree in 1u32..3
    ) {
        for recompute in [Recompute::None, Recompute::Selective, Recompute::Full] {
            let mut settings = cut(degree, recompute);
            settings.trained.encoder = encoder;
            let model = CostModel::with(&profile(), &settings).unwrap();
            let least = model.work_min(&MicrobatchShape::pack(samples.iter().map(|s| &s.0)));
            let parts: Vec<_> = (0..3)
                .map(|part| MicrobatchShape::pack(samples.iter().filter(|s| s.1 == part).map(|s| &s.0)))
                .collect();
            let work: u64 = parts.iter().map(|p| model.encoder(p).total_ns()).sum();
            prop_assert!(least.encoder_ns(3) <= work);
            let work: u64 = parts.iter().map(|p| model.llm_stage(p, 4, true, true).total_ns()).sum();
            prop_assert!(least.stage_ns(WHOLE, 3) <= work);
        }
    }

    #[test]
    fn sample_costs_hold_recomputation_and_collectives(tokens in prop::collection::vec(100u32..124, 8)) {
        let model = CostModel::with(&profile(), &cut(2, Recompute::Full)).unwrap();
        let samples: Vec<_> = tokens.iter().map(|&t| fixture::sample(1, t, t, t)).collect();
        let batch = MicrobatchShape::pack(&samples);
        let typical = Typical {
            encoder_tokens: batch.tower_tokens(),
            llm_tokens: batch.total_llm_tokens(),
            label_tokens: batch.label_tokens,
        };
        let costs = samples.iter().map(|sample| model.sample_cost(sample, typical));
        let sum = costs.fold((0, 0), |sum, cost| (sum.0 + cost.0, sum.1 + cost.1));
        let whole = (model.encoder(&batch).total_ns(), model.llm_stage(&batch, 4, true, true).total_ns());
        for (sum, whole) in [(sum.0, whole.0), (sum.1, whole.1)] {
            // The floor is missing: 300 ns of constants and 100 of latency in each layer and pass.
            prop_assert!((0.95..1.01).contains(&(sum as f64 / whole as f64)), "{} {}", sum, whole);
        }
    }
}

proptest! {
    /// `full:K` is K layers of mode `full` and the others of mode `selective`, in time and in bytes kept, stage by stage; where
    /// a stage has no more than K it is `full`.
    #[test]
    fn some_layers_in_full_are_a_sum_over_layers(
        samples in proptest::collection::vec(fixture::any_sample(), 1..5), k in 1u32..6, n in 1u32..5, degree in 1u32..3,
    ) {
        let batch = MicrobatchShape::pack(&samples);
        let model = |mode| CostModel::with(&profile(), &cut(degree, mode)).unwrap();
        let [some, selective, full] =
            [Recompute::full_of(k), Recompute::Selective, Recompute::Full].map(model);
        let stage = |num_layers| StageLayers { num_layers, is_first: false, is_last: false };
        let layers = |of: &CostModel, num_layers| times(&of.llm_stage(&batch, num_layers, false, false));
        let sum = |a: [u64; 4], b: [u64; 4]| [0, 1, 2, 3].map(|at| a[at] + b[at]);
        let num_full = k.min(n);
        prop_assert_eq!(layers(&some, n), sum(layers(&full, num_full), layers(&selective, n - num_full)));
        let kept = |of: &CostModel, num_layers| of.activation_bytes(RankRole::Stage(stage(num_layers)), &batch);
        // The inputs of a stage (25 bytes a token) are there once, and what comes in is named apart.
        let border = |of: &CostModel| 2 * kept(of, 1) - kept(of, 2);
        let of_layers = |of: &CostModel, num_layers: u32| u64::from(num_layers) * (kept(of, 2) - kept(of, 1));
        prop_assert_eq!(
            kept(&some, n),
            of_layers(&full, num_full) + of_layers(&selective, n - num_full) + border(&full)
        );
        // The encoder has 3 layers; here as one stage and as stages of 1 and 2.
        let encoder = |of: &CostModel, first_layer, num_layers| {
            let at = EncoderLayers { first_layer, num_layers, is_first: false, is_last: false };
            times(&of.encoder_stage(&batch, at))
        };
        let num_full = k.min(3);
        prop_assert_eq!(encoder(&some, 0, 3), sum(encoder(&full, 0, num_full), encoder(&selective, 0, 3 - num_full)));
        for (first, number) in [(0, 1), (1, 2)] {
            let num_full = k.min(number);
            let parts = sum(encoder(&full, first, num_full), encoder(&selective, first + num_full, number - num_full));
            prop_assert_eq!(encoder(&some, first, number), parts);
        }
        // No stages take less than the bound, whatever number of stages the layers are cut into.
        let least = some.work_min(&batch);
        let of_stages: u64 = (0..4).map(|_| some.llm_stage(&batch, 1, false, false).total_ns()).sum();
        prop_assert!(least.stage_ns(stage(4), 1) <= of_stages);
        prop_assert!(least.stage_ns(stage(4), 1) <= some.llm_stage(&batch, 4, false, false).total_ns());
        prop_assert!(least.stage_ns(stage(4), 1) >= selective.work_min(&batch).stage_ns(stage(4), 1));
        prop_assert!(least.encoder_ns(1) <= some.encoder(&batch).total_ns());
    }

    /// More layers in full never hold more, and never take less time.
    #[test]
    fn memory_falls_and_time_grows_with_the_layers_in_full(
        sample in fixture::any_sample(), order in 1usize..4,
    ) {
        let microbatch = RankMicrobatch {
            shape: MicrobatchShape::pack([&sample]), feature_tokens: sample.feature_tokens.into()
        };
        let microbatches = vec![microbatch; order];
        let text: Vec<String> = (0..order).map(|m| format!("0F{m}")).chain((0..order).map(|m| format!("0B{m}"))).collect();
        let actions: Vec<Action> = text.iter().map(|action| action.parse().unwrap()).collect();
        let mut last: Option<(u64, u64, u64)> = None;
        let modes = (0..5).map(Recompute::full_of).chain([Recompute::Full]);
        for mode in modes {
            let model = CostModel::with(&profile(), &cut(1, mode)).unwrap();
            let peak = |role| {
                let steps = RankSteps {
                    role, microbatches: &microbatches, actions: &actions, openings: &[], copies_rows: false, sharding: Sharding::NONE,
                };
                model.rank_peak(&steps).unwrap().total_bytes()
            };
            let ns = model.llm_stage(&microbatches[0].shape, 4, true, true).total_ns();
            let now = (peak(RankRole::Encoder), peak(RankRole::Stage(WHOLE)), ns);
            if let Some(before) = last {
                prop_assert!(now.0 <= before.0 && now.1 <= before.1 && now.2 >= before.2, "{mode}: {now:?} {before:?}");
            }
            last = Some(now);
        }
    }
}
