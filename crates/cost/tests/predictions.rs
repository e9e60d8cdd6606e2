//! The cost model through its verb: grid points, sums over stages, growth, zero work, marks, errors.

use dflop_cost::{CostError, CostModel, Prediction, StageLayers, Typical};
use dflop_types::{
    Collective, EncoderSegments, Hint, LinkProfile, LinkSpan, MeasuredCurve, MeasuredPoint, MicrobatchShape,
    ModelProfile, ModuleProfile, Network, SampleShape, cut_layers,
};
use proptest::prelude::*;

fn curve(points: &[(u64, u64)], bytes_per_unit: u64) -> MeasuredCurve {
    let points = points
        .iter()
        .map(|&(size, forward_ns)| MeasuredPoint {
            size,
            forward_ns,
            backward_ns: 2 * forward_ns + 7,
            spread_ns: 3,
            activation_bytes: bytes_per_unit * size,
            repeats: 9,
            ..MeasuredPoint::default()
        })
        .collect();
    MeasuredCurve { points, ..MeasuredCurve::default() }
}

fn module(linear: &[(u64, u64)], attention: &[(u64, u64)], num_parameters: u64) -> ModuleProfile {
    ModuleProfile {
        count: 1,
        linear: curve(linear, 100),
        attention: curve(attention, 10),
        num_parameters,
        parameter_bytes: 4 * num_parameters,
        ..ModuleProfile::default()
    }
}

fn profile() -> ModelProfile {
    let mut profile = ModelProfile {
        hidden_bytes: 64,
        network: Network::of_pair(1_000, 64_000_000),
        optimizer_ns_per_million: 5_000_000,
        ..ModelProfile::default()
    };
    "float32".clone_into(&mut profile.device.dtype);
    let modules = [
        ("encoder_embedding", module(&[(729, 1), (7_290, 1)], &[], 0)),
        ("projector", module(&[(729, 1), (7_290, 1)], &[], 0)),
        ("encoder_layer", module(&[(729, 90_000), (7_290, 800_000)], &[(729, 20_000)], 1_000_000)),
        ("llm_embedding", module(&[(64, 500), (1_024, 4_000)], &[], 300_000)),
        (
            "llm_layer",
            module(
                &[(64, 9_000), (256, 30_000), (1_024, 130_000), (4_096, 520_000)],
                &[(16, 900), (256, 6_000), (2_048, 300_000)],
                200_000,
            ),
        ),
        ("llm_head", module(&[(16, 8_000), (512, 190_000)], &[], 300_000)),
    ];
    for (name, module) in modules {
        profile.modules.insert(name.to_owned(), module);
    }
    profile.modules.get_mut("llm_layer").expect("it is there").count = 7;
    profile
}

fn model() -> CostModel {
    CostModel::new(&profile()).expect("the profile is sound")
}

fn tokens(llm_tokens: Vec<u32>, label_tokens: u64) -> MicrobatchShape {
    MicrobatchShape { llm_tokens, label_tokens, ..MicrobatchShape::default() }
}

#[test]
fn grid_points_come_back_exactly() {
    // One sample of 256 tokens: both curves stand at a point. 7 layers, no embedding, no head.
    let stage = model().llm_stage(&tokens(vec![256], 0), 7, false, false);
    let forward = 7 * (30_000 + 6_000);
    assert_eq!(stage.forward_ns, forward);
    assert_eq!(stage.backward_ns, 7 * (2 * 30_000 + 7 + 2 * 6_000 + 7));
    assert!(!stage.extrapolated);
}

#[test]
fn the_encoder_adds_linear_and_attention() {
    let segments = vec![EncoderSegments::of(2, 729), EncoderSegments::of(8, 729)];
    let batch = MicrobatchShape { encoder_segments: segments, ..MicrobatchShape::default() };
    let encoder = model().encoder(&batch);
    assert_eq!(encoder.forward_ns, 800_000 + 10 * 20_000 + 2);
    assert!(!encoder.extrapolated);
}

#[test]
fn outside_the_grid_is_marked() {
    assert!(model().llm_stage(&tokens(vec![9_000], 0), 1, false, false).extrapolated);
    assert!(model().llm_stage(&tokens(vec![8], 0), 1, false, false).extrapolated);
    // The head is asked for 3 labels, its grid begins at 16; a stage without head is not.
    assert!(model().llm_stage(&tokens(vec![256], 3), 1, false, true).extrapolated);
    assert!(!model().llm_stage(&tokens(vec![256], 3), 1, false, false).extrapolated);
}

#[test]
fn no_work_takes_no_time() {
    let model = model();
    assert_eq!(model.encoder(&MicrobatchShape::default()), Prediction::default());
    assert_eq!(model.llm_stage(&MicrobatchShape::default(), 7, true, true), Prediction::default());
    assert_eq!(model.encoder(&tokens(vec![300], 5)), Prediction::default());
    assert_eq!(model.transfer_ns(0, 0.0), 0);
    let text = SampleShape { llm_tokens: 50, label_tokens: 20, ..SampleShape::default() };
    assert_eq!(model.sample_cost(&text, Typical { llm_tokens: 500, ..Typical::default() }).0, 0);
    assert_eq!(model.sample_cost(&SampleShape::default(), Typical::default()), (0, 0));
}

#[test]
fn transfers_take_latency_and_bytes_over_bandwidth() {
    // 64 bytes a token at 64 MB/s: 1 us a token.
    assert_eq!(model().transfer_ns(10, 0.0), 1_000 + 10_000);
    let unmeasured = CostModel::new(&ModelProfile { network: Network::default(), ..profile() }).unwrap();
    assert!(!unmeasured.is_network_measured());
    assert_eq!(unmeasured.transfer_ns(10, 1.0), 0);
    // To another node at half the bandwidth, with twice the latency; known of neighbours alone, it is their time.
    assert_eq!(model().transfer_ns(10, 1.0), 11_000);
    let mut far = profile();
    let near =
        far.network.links.iter().find(|link| link.collective == Collective::PointToPoint).unwrap().clone();
    far.network.links.push(LinkProfile {
        span: LinkSpan::Cluster,
        latency_ns: 2 * near.latency_ns,
        bandwidth_bytes_per_s: near.bandwidth_bytes_per_s / 2,
        ..near
    });
    let far = CostModel::new(&far).unwrap();
    assert_eq!([0.0, 0.25, 1.0].map(|across| far.transfer_ns(10, across)), [11_000, 13_750, 22_000]);
}

/// Features of four hidden states each (`DeepStack`), between encoder and backbone alone.
#[test]
fn wide_features_are_sent_and_held_as_such() {
    let wide = CostModel::new(&ModelProfile { feature_bytes: 4 * 64, ..profile() }).unwrap();
    assert_eq!((model().features_as_hidden_tokens(10), wide.features_as_hidden_tokens(10)), (10, 40));
    // A file that says nothing, or as wide as a hidden state.
    let equal = CostModel::new(&ModelProfile { feature_bytes: 64, ..profile() }).unwrap();
    assert_eq!(equal.features_as_hidden_tokens(10), 10);
    let sample =
        SampleShape { feature_tokens: 10, llm_tokens: 50, label_tokens: 20, ..SampleShape::default() };
    let more = |bytes: fn(&CostModel, &SampleShape) -> u64| bytes(&wide, &sample) - bytes(&model(), &sample);
    assert_eq!(more(|model, sample| model.sample_encoder_bytes(sample, Typical::default())), 3 * 64 * 10);
    let first = StageLayers { num_layers: 1, is_first: true, is_last: false };
    let stages = [(first, 3 * 64 * 10), (StageLayers { is_first: false, ..first }, 0)];
    for (stage, wanted) in stages {
        let of = |model: &CostModel| model.sample_stage_bytes(&sample, Typical::default(), stage);
        assert_eq!(of(&wide) - of(&model()), wanted);
    }
}

#[test]
fn repairs_are_counted_by_curve() {
    assert_eq!(model().num_repaired_points(), 0);
    let mut noisy = profile();
    noisy.modules.get_mut("llm_layer").unwrap().linear.points[1].forward_ns = 140_000;
    let model = CostModel::new(&noisy).unwrap();
    let repairs = model.repairs();
    assert_eq!(repairs.len(), 1);
    assert_eq!((repairs[0].module, repairs[0].part, repairs[0].phase), ("llm_layer", "linear", "forward"));
    assert_eq!(model.num_repaired_points(), 2);
}

#[test]
fn errors_name_the_module_and_the_rule() {
    let message = |mutate: fn(&mut ModelProfile)| {
        let mut profile = profile();
        mutate(&mut profile);
        let error = CostModel::new(&profile).unwrap_err();
        assert!(error.hint().is_some());
        error.to_string()
    };
    assert_eq!(message(|p| drop(p.modules.remove("llm_head"))), "model profile has no module `llm_head`");
    assert_eq!(
        message(|p| p.modules.get_mut("encoder_layer").unwrap().linear.points.clear()),
        "model profile, module `encoder_layer`, curve `linear`: it has no points, at least 1 is needed"
    );
    assert_eq!(
        message(|p| p.modules.get_mut("llm_layer").unwrap().attention.points[2].forward_ns = 0),
        "model profile, module `llm_layer`, curve `attention`: forward time at size 2048 is 0 ns, must be more"
    );
    assert_eq!(
        message(|p| p.modules.get_mut("llm_layer").unwrap().linear.points[1].size = 64),
        "model profile, module `llm_layer`, curve `linear`: size 64 at point 1 does not exceed 64"
    );
    assert_eq!(
        message(|p| p.modules.get_mut("llm_layer").unwrap().count = 0),
        "model profile: `llm_layer.count` is 0, must be at least 1"
    );
    assert_eq!(
        message(|p| p.device.dtype = "int3".to_owned()),
        "model profile: `device.dtype` is `int3`, must be `float32` or `bfloat16`"
    );
    let mut missing = profile();
    missing.modules.remove("encoder_embedding");
    assert_eq!(
        CostModel::new(&missing).unwrap_err(),
        CostError::MissingModule { module: "encoder_embedding" }
    );
    // Without any module of an encoder it is a model of text alone, and the LLM's are missed.
    missing.modules.clear();
    assert_eq!(CostModel::new(&missing).unwrap_err(), CostError::MissingModule { module: "llm_embedding" });
}

fn sample() -> impl Strategy<Value = SampleShape> {
    (0u32..12, 1u32..3_000, 1u32..2_000, any::<bool>()).prop_map(|(tiles, llm, segment, fixed)| {
        let segments = EncoderSegments::of(tiles, if fixed { 729 } else { segment });
        SampleShape {
            encoder_segments: if tiles == 0 { vec![] } else { vec![segments] },
            feature_tokens: tiles.min(llm),
            llm_tokens: llm,
            label_tokens: llm / 3,
            ..SampleShape::default()
        }
    })
}

proptest! {
    #[test]
    fn a_sample_more_never_shortens(samples in prop::collection::vec(sample(), 0..8), extra in sample()) {
        let model = model();
        let before = MicrobatchShape::pack(&samples);
        let after = MicrobatchShape::pack(samples.iter().chain([&extra]));
        let pairs = [
            (model.encoder(&before), model.encoder(&after)),
            (model.llm_stage(&before, 3, true, true), model.llm_stage(&after, 3, true, true)),
        ];
        for (less, more) in pairs {
            prop_assert!(less.forward_ns <= more.forward_ns && less.backward_ns <= more.backward_ns);
        }
    }

    #[test]
    fn the_stages_add_up_to_the_whole(samples in prop::collection::vec(sample(), 0..8), stages in 1u32..8) {
        let model = model();
        let batch = MicrobatchShape::pack(&samples);
        let whole = model.llm_stage(&batch, 7, true, true);
        let cut = cut_layers(7, stages);
        let (mut forward, mut backward) = (0, 0);
        for (stage, &layers) in cut.iter().enumerate() {
            let part = model.llm_stage(&batch, layers, stage == 0, stage + 1 == cut.len());
            forward += part.forward_ns;
            backward += part.backward_ns;
        }
        prop_assert_eq!((forward, backward), (whole.forward_ns, whole.backward_ns));
    }

    #[test]
    fn no_packing_beats_the_certified_work(
        samples in prop::collection::vec((sample(), 0usize..4), 0..12), stages in 1u32..4
    ) {
        let model = model();
        let batch = MicrobatchShape::pack(samples.iter().map(|s| &s.0));
        let parts: Vec<_> = (0..4)
            .map(|part| MicrobatchShape::pack(samples.iter().filter(|s| s.1 == part).map(|s| &s.0)))
            .collect();
        let encoder: u64 = parts.iter().map(|p| model.encoder(p).total_ns()).sum();
        let least = model.work_min(&batch);
        prop_assert!(least.encoder_ns(4) <= encoder);
        for (stage, layers) in cut_layers(7, stages).into_iter().enumerate() {
            let (is_first, is_last) = (stage == 0, stage as u32 + 1 == stages);
            let work: u64 = parts.iter().map(|p| model.llm_stage(p, layers, is_first, is_last).total_ns()).sum();
            let held = StageLayers { num_layers: layers, is_first, is_last };
            prop_assert!(least.stage_ns(held, 4) <= work);
            // Tight enough to be of use: within the measured range the rates differ little.
            prop_assert!(work == 0 || least.stage_ns(held, 4) > work / 20);
        }
    }

    #[test]
    fn the_sample_costs_of_a_batch_come_near_its_work(tokens in prop::collection::vec(64u32..512, 8)) {
        // Within the measured range the linear part is a line here, so that only the floor is missing from
        // the sum.
        let model = model();
        let samples: Vec<_> = tokens
            .iter()
            .map(|&t| SampleShape { llm_tokens: t, label_tokens: t / 4, ..SampleShape::default() })
            .collect();
        let batch = MicrobatchShape::pack(&samples);
        let typical = Typical {
            encoder_tokens: [0; 2],
            llm_tokens: batch.total_llm_tokens(),
            label_tokens: batch.label_tokens,
        };
        let sum: u64 = samples.iter().map(|s| model.sample_cost(s, typical).1).sum();
        let whole = model.llm_stage(&batch, 7, true, true).total_ns();
        let ratio = sum as f64 / whole as f64;
        prop_assert!((0.8..1.2).contains(&ratio), "{ratio}");
    }
}
