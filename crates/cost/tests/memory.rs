//! The memory model against closed forms worked out by hand.

use crate::heap::{HIDDEN, INPUTS, MODULES, Row};
use dflop_cost::{
    ComponentSettings, CostModel, CostSettings, EncoderLayers, MemoryError, Moment, RankMemory,
    RankMicrobatch, RankRole, RankSteps, Sharding, StageLayers, Trained, openings_ahead,
};
use dflop_types::{
    Action, EncoderSegments, MeasuredCurve, MeasuredPoint, MemoryReserve, MicrobatchShape, ModelProfile,
    ModuleProfile, Recompute, RecomputePoint, SplitBytes, Variant,
};

const LAYERS: [(&str, u32); 2] = [("encoder_layer", 3), ("llm_layer", 7)];

fn curve(kept: u64, workspace: u64, split: Option<&Row>) -> MeasuredCurve {
    let point = |size| MeasuredPoint {
        size,
        forward_ns: size,
        backward_ns: 2 * size,
        input_ns: size,
        weight_ns: size,
        activation_bytes: kept * size,
        workspace_bytes: workspace * size,
        split: split.map(|row| SplitBytes {
            queued_bytes: row.queued * size,
            input_workspace_bytes: row.input_workspace * size,
            weight_workspace_bytes: row.weight_workspace * size,
        }),
        repeats: 1,
        ..MeasuredPoint::default()
    };
    MeasuredCurve { points: [1, 1_000, 10_000].map(point).to_vec(), ..MeasuredCurve::default() }
}

/// A profile; with or without the bytes of I and W, which older ones lack.
fn profile_with(is_split_counted: bool) -> ModelProfile {
    let mut profile = ModelProfile { hidden_bytes: HIDDEN, ..ModelProfile::default() };
    "float32".clone_into(&mut profile.device.dtype);
    "cuda".clone_into(&mut profile.device.kind);
    for row in &MODULES {
        let attention = match row.kept[1] {
            0 => MeasuredCurve::default(),
            kept => curve(kept, row.workspace[1], None),
        };
        let count = LAYERS.iter().find(|layer| layer.0 == row.name).map_or(1, |layer| layer.1);
        let module = ModuleProfile {
            count,
            linear: curve(row.kept[0], row.workspace[0], Some(row).filter(|_| is_split_counted)),
            attention,
            num_parameters: row.num_parameters,
            parameter_bytes: 4 * row.num_parameters,
            ..ModuleProfile::default()
        };
        profile.modules.insert(row.name.to_owned(), module);
    }
    profile
}

pub(crate) fn profile() -> ModelProfile {
    profile_with(true)
}

pub(crate) fn model_with(kind: &str, is_split_counted: bool) -> CostModel {
    let mut profile = profile_with(is_split_counted);
    kind.clone_into(&mut profile.device.kind);
    CostModel::new(&profile).expect("the profile is sound")
}

pub(crate) fn model(kind: &str) -> CostModel {
    model_with(kind, true)
}

pub(crate) fn list(text: &str) -> Vec<Action> {
    text.split_whitespace().map(|action| format!("0{action}").parse().expect("an action")).collect()
}

/// A microbatch of one sample.
pub(crate) fn one(llm_tokens: u32, label_tokens: u64, feature_tokens: u64) -> RankMicrobatch {
    let segments = vec![EncoderSegments::of(2, llm_tokens)];
    let shape = MicrobatchShape {
        encoder_segments: if feature_tokens == 0 { vec![] } else { segments },
        llm_tokens: vec![llm_tokens],
        label_tokens,
    };
    RankMicrobatch { shape, feature_tokens }
}

const MIDDLE: RankRole = RankRole::Stage(StageLayers { num_layers: 2, is_first: false, is_last: false });
const LAST: RankRole = RankRole::Stage(StageLayers { num_layers: 2, is_first: false, is_last: true });

pub(crate) fn peak(
    model: &CostModel,
    role: RankRole,
    microbatches: &[RankMicrobatch],
    actions: &str,
) -> RankMemory {
    let actions = list(actions);
    model
        .rank_peak(&RankSteps {
            role,
            microbatches,
            actions: &actions,
            openings: &openings_ahead(actions.len()),
            copies_rows: false,
            sharding: Sharding::NONE,
        })
        .expect("the list runs")
}

#[test]
fn what_a_rank_holds_whatever_the_samples() {
    let memory = model("cuda").fixed_memory(LAST, 1);
    let parameters = 2 * 8_000 + 31_000;
    assert_eq!((memory.parameter_bytes, memory.gradient_bytes), (4 * parameters, 4 * parameters));
    assert_eq!((memory.optimizer_bytes, memory.workspace_bytes), (8 * parameters, 4 * parameters));
    assert_eq!(memory.static_bytes(), 16 * parameters);
    let bf16 = {
        let mut profile = profile();
        "bfloat16".clone_into(&mut profile.device.dtype);
        CostModel::new(&profile).unwrap()
    };
    assert_eq!(bf16.fixed_memory(LAST, 1).optimizer_bytes, 12 * parameters);
    // Without work the optimizer is the fullest moment.
    let idle = peak(&model("cuda"), LAST, &[RankMicrobatch::default()], "F0 B0");
    assert_eq!((idle.moment, idle.total_bytes()), (Moment::Optimizer, 20 * parameters));
}

/// The embedding's matrix is the head's: one stage that has both holds, updates and reduces it once, two stages have
/// one each.
#[test]
fn a_tied_matrix_is_held_once() {
    let stage = |is_first, is_last| StageLayers { num_layers: 7, is_first, is_last };
    let of = |is_tied, change: fn(&mut ModelProfile)| {
        let mut profile = ModelProfile { is_tied, optimizer_ns_per_million: 1_000_000, ..profile() };
        change(&mut profile);
        CostModel::new(&profile).expect("the profile is sound")
    };
    let bytes = |model: &CostModel, stage| {
        let fixed = model.fixed_memory(RankRole::Stage(stage), 1);
        [fixed.parameter_bytes, fixed.gradient_bytes, fixed.optimizer_bytes, fixed.workspace_bytes]
    };
    let (apart, tied) = (of(false, |_| ()), of(true, |_| ()));
    let embedding = profile().modules["llm_embedding"].num_parameters;
    assert!(profile().modules["llm_head"].num_parameters > embedding);
    let both = stage(true, true);
    let less: Vec<u64> = bytes(&apart, both).iter().zip(bytes(&tied, both)).map(|(a, b)| a - b).collect();
    assert_eq!(less, [4, 4, 8, 4].map(|bytes| bytes * embedding));
    assert_eq!(apart.stage_tail(both, 1).ns - tied.stage_tail(both, 1).ns, embedding);
    for one in [stage(true, false), stage(false, true), stage(false, false)] {
        assert_eq!(bytes(&apart, one), bytes(&tied, one));
    }
    // A head cut over ranks is smaller than the whole embedding: nothing to share.
    let cut = |profile: &mut ModelProfile| {
        let head = profile.modules.get_mut("llm_head").expect("it is there");
        (head.num_parameters, head.parameter_bytes) = (10, 40);
    };
    assert_eq!(bytes(&of(true, cut), both), bytes(&of(false, cut), both));
}

/// Autograd keeps the head's gradient until it has the embedding's, while the layers run back. Two halves add each at
/// once. Under ZeRO-3 it waits too, and is not among what is gathered.
#[test]
fn the_gradient_of_a_tied_matrix_waits_for_its_other_use() {
    let whole = StageLayers { num_layers: 7, is_first: true, is_last: true };
    let of = |is_tied| CostModel::new(&ModelProfile { is_tied, ..profile() }).expect("the profile is sound");
    let (apart, tied) = (of(false), of(true));
    let shared = 4 * profile().modules["llm_embedding"].num_parameters;
    // Long, with one label: layers are fuller than the head.
    let microbatch = [one(9_000, 1, 0)];
    for (actions, waiting) in [("F0 B0", shared), ("F0 I0 W0", 0)] {
        let of = |model: &CostModel| peak(model, RankRole::Stage(whole), &microbatch, actions);
        let (apart, tied) = (of(&apart), of(&tied));
        assert_eq!(tied.workspace_bytes, apart.workspace_bytes + waiting, "{actions}");
        // A matrix, its gradient, and two moments less.
        assert_eq!(tied.total_bytes() + 4 * shared, apart.total_bytes() + waiting, "{actions}");
    }
    assert_eq!(peak(&tied, RankRole::Stage(whole), &microbatch, "F0 B0").moment.to_string(), "0B0");
    let sharding =
        Sharding { degree: 4, ..Sharding { zero: dflop_types::Zero::Parameters, ..Sharding::NONE } };
    let [apart, tied] = [&apart, &tied].map(|model| model.sharded_memory(RankRole::Stage(whole), sharding));
    assert_eq!(apart.gradient_bytes - tied.gradient_bytes, shared / 4);
    // A matrix in no unit of its own is there all the time, and what the head has beside it has a gradient.
    let bytes = |name: &str| 4 * profile().modules[name].num_parameters;
    let (layer, head) = (bytes("llm_layer"), bytes("llm_head"));
    assert_eq!(apart.gathered_bytes, 3 * layer + layer.max(head));
    assert_eq!(tied.gathered_bytes, head + (head - shared) + 4 * layer);
}

/// `M` equal microbatches on a stage in the middle: k of them in flight, each with two borders (the input is the
/// first layer's own), messages open for the next actions, and the workspace of a layer.
#[test]
fn closed_forms() {
    let model = model("cuda");
    let tokens = 100;
    let microbatches = vec![one(tokens, 30, 10); 6];
    let hidden = HIDDEN * u64::from(tokens);
    let in_flight = u64::from(tokens) * (2 * (900 + 120) + INPUTS);
    let fixed = model.fixed_memory(MIDDLE, 1).static_bytes();
    let workspace = u64::from(tokens) * 310;
    // GPipe: at the last forward all six are kept, each with its result; of the four open messages one is the
    // input of the running forward. The first backward holds as much, and four open messages less its own input.
    let gpipe = peak(&model, MIDDLE, &microbatches, "F0 F1 F2 F3 F4 F5 B0 B1 B2 B3 B4 B5");
    assert_eq!(gpipe.activation_bytes, 6 * (in_flight - hidden));
    assert_eq!(gpipe.boundary_bytes, 6 * hidden + 6 * hidden + 4 * hidden);
    assert_eq!(gpipe.workspace_bytes, workspace);
    assert_eq!(gpipe.total_bytes(), fixed + 6 * in_flight + 10 * hidden + workspace);
    assert_eq!(gpipe.moment.to_string(), "0B0");
    // 1F1B, the second of three stages after the encoder: two in flight.
    let one_f_one_b = peak(&model, MIDDLE, &microbatches, "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5");
    assert_eq!(one_f_one_b.activation_bytes, 2 * (in_flight - hidden));
    // Two inputs, two results, four open messages, and one gradient on its way.
    assert_eq!(one_f_one_b.boundary_bytes, (2 + 2 + 4 + 1) * hidden);
    // gloo: what was sent stays: four results, of which two are in flight anyhow.
    let gloo = peak(&self::model("cpu"), MIDDLE, &microbatches, "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5");
    assert!(gloo.total_bytes() > one_f_one_b.total_bytes());
}

/// What passes between stages, and what the layers have been given, is a rank's part of the rows: 51 of 101.
#[test]
fn ranks_that_share_layers_share_the_rows_between_them() {
    let mut profile = profile();
    profile.variants.push(Variant {
        tensor_parallel_degree: 2,
        lora_rank: 0,
        has_collectives: true,
        modules: profile.modules.clone(),
    });
    let of = |degree| {
        let llm = ComponentSettings { tensor_parallel_degree: degree, ..ComponentSettings::default() };
        let model = with(&profile, &CostSettings { llm, ..CostSettings::default() });
        peak(&model, MIDDLE, &vec![one(101, 30, 10); 6], "F0 F1 F2 F3 F4 F5 B0 B1 B2 B3 B4 B5")
    };
    let kept = 101 * (2 * (900 + 120) + INPUTS);
    for (degree, rows) in [(1, 101), (2, 51)] {
        let peak = of(degree);
        assert_eq!(peak.activation_bytes, 6 * (kept - rows * HIDDEN));
        assert_eq!(peak.boundary_bytes, (6 + 6 + 4) * rows * HIDDEN);
    }
}

/// I turns what was kept into what waits, layer by layer, and W frees that.
#[test]
fn closed_forms_of_a_backward_in_two() {
    let model = model("cuda");
    let tokens = 100u64;
    let microbatches = vec![one(100, 30, 10); 3];
    let (kept, queued, hidden) = (tokens * (900 + 120), tokens * 700, tokens * HIDDEN);
    let of_two = 2 * kept - hidden + tokens * INPUTS;
    // Less waits than was kept: the fullest moment is the last layer's I, the first of it.
    let alone = peak(&model, MIDDLE, &microbatches[..1], "F0 I0 W0");
    assert_eq!(alone.moment.to_string(), "0I0");
    assert_eq!((alone.activation_bytes, alone.weight_queue_bytes), (of_two, 0));
    assert_eq!(alone.workspace_bytes, tokens * 500);
    // Input, result, gradient of the result.
    assert_eq!(alone.boundary_bytes, 3 * hidden);
    // One that has had its I holds what waits and nothing else: its border is free.
    let late = peak(&model, MIDDLE, &microbatches, "F0 I0 F1 I1 F2 I2 W0 W1 W2");
    assert_eq!(late.moment.to_string(), "0I2");
    assert_eq!((late.activation_bytes, late.weight_queue_bytes), (of_two, 2 * 2 * queued));
    // W frees: the third finds one in the queue.
    let early = peak(&model, MIDDLE, &microbatches, "F0 I0 F1 I1 W0 F2 I2 W1 W2");
    assert_eq!((early.activation_bytes, early.weight_queue_bytes), (of_two, 2 * queued));
    // The projector's queue is more than it kept.
    let encoder = peak(&model, RankRole::Encoder, &microbatches[..1], "F0 I0 W0");
    assert!(
        encoder.total_bytes()
            >= model.fixed_memory(RankRole::Encoder, 1).static_bytes() + 200 * (11 + 3 * 270)
    );
    // Where nothing but the input was kept, layers behind the first stand on what those before them queued.
    let mut profile = profile();
    let points = [1, 1_000].map(|size| RecomputePoint { size, extra_ns: 0, activation_bytes: HIDDEN * size });
    profile.modules.get_mut("llm_layer").unwrap().recompute.insert(Recompute::Full, points.to_vec());
    let llm = ComponentSettings { recompute: Recompute::Full, ..ComponentSettings::default() };
    let full = with(&profile, &CostSettings { llm, ..CostSettings::default() });
    let again = peak(&full, MIDDLE, &microbatches[..1], "F0 I0 W0");
    assert_eq!((again.activation_bytes, again.weight_queue_bytes), (tokens * INPUTS, queued));
    assert_eq!(again.workspace_bytes, tokens * 500 + kept - hidden);
    assert_eq!(again.boundary_bytes, 4 * hidden);
}

/// Profiles of before the bytes of I and W were counted: above any count.
#[test]
fn what_was_not_counted_is_taken_as_more() {
    let old = model_with("cuda", false);
    let (kept, hidden) = (100 * (900 + 120), 100 * HIDDEN);
    let microbatches = vec![one(100, 30, 10); 2];
    let memory = peak(&old, MIDDLE, &microbatches, "F0 I0 F1 I1 W0 W1");
    // Of the second microbatch one layer is done: its inputs, all its results but one, and that one.
    assert_eq!(memory.weight_queue_bytes, 3 * (2 * kept + hidden));
    assert_eq!(memory.workspace_bytes, 100 * 310 + kept + hidden);
    for role in [RankRole::Encoder, MIDDLE, LAST] {
        for actions in ["F0 I0 W0 F1 I1 W1", "F0 F1 I0 I1 W1 W0"] {
            let counted = peak(&model("cuda"), role, &microbatches, actions);
            assert!(counted.total_bytes() <= peak(&old, role, &microbatches, actions).total_bytes());
        }
    }
}

#[test]
fn the_head_is_named_apart_and_is_gone_when_the_layers_run_back() {
    let memory = peak(&model("cuda"), LAST, &[one(100, 30, 0)], "F0 B0");
    assert_eq!(memory.logits_bytes, 4_000 * 30);
    assert_eq!(memory.workspace_bytes, 5_000 * 30);
    // Few labels: the fullest moment is the layers' backward, the gradient of their result beside.
    let memory = peak(&model("cuda"), LAST, &[one(100, 1, 0)], "F0 B0");
    assert_eq!((memory.logits_bytes, memory.workspace_bytes), (0, 310 * 100));
    assert_eq!(memory.boundary_bytes, 2 * HIDDEN * 100);
}

#[test]
fn the_fullest_moment_is_not_the_one_with_most_in_flight() {
    let sizes = [500, 10, 10, 10];
    let microbatches: Vec<_> = sizes.iter().map(|&tokens| one(tokens, 1, 0)).collect();
    let memory = peak(&model("cuda"), MIDDLE, &microbatches, "F0 B0 F1 F2 F3 B1 B2 B3");
    assert!(matches!(memory.moment, Moment::Action(action) if action.microbatch == 0));
}

#[test]
fn the_reserve_comes_on_top() {
    let mut profile = profile();
    profile.memory = MemoryReserve { context_bytes: 12_345, allocator_overhead_permille: 25 };
    let with = peak(&CostModel::new(&profile).unwrap(), MIDDLE, &[one(100, 1, 0)], "F0 B0");
    let without = peak(&model("cuda"), MIDDLE, &[one(100, 1, 0)], "F0 B0");
    assert_eq!(with.tensor_bytes(), without.total_bytes());
    assert_eq!(with.allocator_bytes, (without.total_bytes() * 25).div_ceil(1_000));
    assert_eq!(with.total_bytes(), without.total_bytes() + with.allocator_bytes + 12_345);
}

#[test]
fn bytes_that_fall_with_the_size_are_raised() {
    let mut profile = profile();
    profile.modules.get_mut("llm_layer").unwrap().linear.points[1].activation_bytes = 20_000_000;
    let memory = peak(&CostModel::new(&profile).unwrap(), MIDDLE, &[one(10_000, 1, 0)], "F0 B0");
    assert!(memory.activation_bytes >= 2 * 20_000_000 - HIDDEN * 10_000);
    assert!(!memory.is_extrapolated);
    assert!(peak(&model("cuda"), MIDDLE, &[one(10_001, 1, 0)], "F0 B0").is_extrapolated);
}

fn with(profile: &ModelProfile, settings: &CostSettings) -> CostModel {
    CostModel::with(profile, settings).expect("the profile has it")
}

/// One layer, recomputed: what it does not keep is made again, for a while.
#[test]
fn recomputation_moves_bytes_from_kept_to_workspace() {
    let mut profile = profile();
    let points = |bytes: u64| {
        [1, 1_000].map(|size| RecomputePoint { size, extra_ns: 0, activation_bytes: bytes * size })
    };
    let layer = profile.modules.get_mut("llm_layer").unwrap();
    layer.recompute.insert(Recompute::Full, points(HIDDEN).to_vec());
    layer.recompute.insert(Recompute::Selective, points(300).to_vec());
    let run = |recompute| {
        let llm = ComponentSettings { recompute, ..ComponentSettings::default() };
        let model = with(&profile, &CostSettings { llm, ..CostSettings::default() });
        peak(&model, MIDDLE, &[one(100, 1, 0)], "F0 B0")
    };
    let (none, selective, full) = (run(Recompute::None), run(Recompute::Selective), run(Recompute::Full));
    let incoming = 100 * HIDDEN;
    let borders = incoming - 100 * INPUTS;
    assert_eq!(none.activation_bytes, 2 * 100 * (900 + 120) - borders);
    assert_eq!(selective.activation_bytes, 2 * 100 * (300 + 120) - borders);
    assert_eq!(selective.workspace_bytes, 100 * (310 + 900 - 300));
    assert_eq!(full.activation_bytes, 2 * incoming - borders);
    assert_eq!(full.workspace_bytes, 100 * (310 + 900 + 120 - HIDDEN));
    assert!(full.total_bytes() < selective.total_bytes() && selective.total_bytes() < none.total_bytes());
}

/// What is frozen has no gradients nor states, and keeps nothing where nothing before it trains.
#[test]
fn frozen_parts_hold_parameters_only() {
    let run = |encoder, projector, llm, role| {
        let trained = Trained { encoder, projector, llm, lora_rank: 0 };
        let model = with(&profile(), &CostSettings { trained, ..CostSettings::default() });
        peak(&model, role, &[one(100, 30, 20)], "F0 B0")
    };
    let frozen = run(false, false, true, RankRole::Encoder);
    assert_eq!((frozen.gradient_bytes, frozen.optimizer_bytes, frozen.activation_bytes), (0, 0, 0));
    assert_eq!(frozen.parameter_bytes, 4 * (700 + 3 * 5_000 + 900));
    // One layer at a time all the same exists.
    assert_eq!(frozen.workspace_bytes, 200 * (130 + 230 + 40));
    let projector = run(false, true, false, RankRole::Encoder);
    assert_eq!((projector.gradient_bytes, projector.optimizer_bytes), (4 * 900, 8 * 900));
    let trained = Trained { encoder: false, ..Trained::default() };
    let model = with(&profile(), &CostSettings { trained, ..CostSettings::default() });
    assert_eq!(model.activation_bytes(RankRole::Encoder, &one(100, 30, 20).shape), 200 * 70);
    // The frozen backbone passes the projector's gradient on, and keeps what it needs for that.
    let behind = run(false, true, false, LAST);
    assert_eq!((behind.gradient_bytes, behind.optimizer_bytes), (0, 0));
    assert!(behind.activation_bytes > 0);
    // No weight waits for a W, and I is the whole backward.
    for role in [RankRole::Encoder, LAST] {
        for is_split_counted in [true, false] {
            let frozen = Trained { encoder: false, projector: role == LAST, llm: false, lora_rank: 0 };
            let settings = CostSettings { trained: frozen, ..CostSettings::default() };
            let model = with(&profile_with(is_split_counted), &settings);
            let [whole, split] =
                ["F0 B0", "F0 I0 W0"].map(|list| peak(&model, role, &[one(100, 30, 20)], list));
            assert_eq!((whole.total_bytes(), split.weight_queue_bytes), (split.total_bytes(), 0));
        }
    }
    let nothing = run(false, false, false, LAST);
    assert_eq!((nothing.activation_bytes, nothing.logits_bytes), (0, 0));
}

#[test]
fn adapters_alone_have_gradients_and_states() {
    let mut profile = profile();
    let mut adapted = profile.modules["llm_layer"].clone();
    adapted.num_parameters += 500;
    adapted.parameter_bytes += 2_000;
    adapted.linear = curve(1_100, 330, None);
    profile.variants.push(Variant {
        tensor_parallel_degree: 1,
        lora_rank: 8,
        modules: [("llm_layer".to_owned(), adapted)].into(),
        ..Variant::default()
    });
    let trained = Trained { lora_rank: 8, ..Trained::default() };
    let model = with(&profile, &CostSettings { trained, ..CostSettings::default() });
    let memory = peak(&model, MIDDLE, &[one(100, 1, 0)], "F0 B0");
    assert_eq!(memory.parameter_bytes, 2 * 4 * 8_500);
    assert_eq!((memory.gradient_bytes, memory.optimizer_bytes), (2 * 2_000, 2 * 8 * 500));
    assert_eq!(memory.activation_bytes, 2 * 100 * (1_100 + 120) - 100 * (HIDDEN - INPUTS));
    // Behind an embedding that keeps nothing the layers keep their input, and the ids are there all the same.
    let trained = Trained { encoder: false, projector: false, ..trained };
    let model = with(&profile, &CostSettings { trained, ..CostSettings::default() });
    let first = RankRole::Stage(StageLayers { num_layers: 2, is_first: true, is_last: false });
    let memory = peak(&model, first, &[one(100, 1, 0)], "F0 B0");
    assert_eq!(memory.activation_bytes, 2 * 100 * (1_100 + 120) + 100 * INPUTS);
}

#[test]
fn sharded_states_are_divided() {
    let (whole, cut) = (model("cuda").fixed_memory(LAST, 1), model("cuda").fixed_memory(LAST, 4));
    assert_eq!(cut.optimizer_bytes, whole.optimizer_bytes / 4);
    assert_eq!((cut.parameter_bytes, cut.gradient_bytes), (whole.parameter_bytes, whole.gradient_bytes));
}

#[test]
fn lists_that_cannot_run_are_refused() {
    let model = model("cuda");
    let run = |actions: &str| {
        let actions = list(actions);
        let microbatches = [one(10, 1, 0)];
        let steps = RankSteps {
            role: MIDDLE,
            microbatches: &microbatches,
            actions: &actions,
            openings: &openings_ahead(actions.len()),
            copies_rows: false,
            sharding: Sharding::NONE,
        };
        model.rank_peak(&steps).map_err(|error| error.to_string())
    };
    assert_eq!(run("F1").unwrap_err(), "action `0F1`: the step has 1 microbatches, counted from 0");
    for actions in ["B0", "F0 F0", "F0 W0", "F0 B0 W0", "F0 I0 B0", "F0 B0 B0"] {
        let action = actions.split(' ').next_back().unwrap();
        let expected = MemoryError::OutOfTurn { action: format!("0{action}").parse().unwrap() };
        assert_eq!(run(actions).unwrap_err(), expected.to_string());
    }
}

/// Stages of the encoder together hold what the whole of it does, and each is a part of it in time.
#[test]
fn stages_of_the_encoder_are_parts_of_it() {
    let model = model("cuda");
    let whole = model.fixed_memory(RankRole::Encoder, 1);
    let stage = |first_layer, num_layers| EncoderLayers {
        first_layer,
        num_layers,
        is_first: first_layer == 0,
        is_last: first_layer + num_layers == 3,
    };
    let shape = one(300, 0, 300).shape;
    for cut in
        [vec![stage(0, 1), stage(1, 2)], vec![stage(0, 1), stage(1, 1), stage(2, 1)], vec![stage(0, 3)]]
    {
        let held = cut.iter().map(|&s| model.fixed_memory(RankRole::EncoderStage(s), 1).parameter_bytes);
        assert_eq!(held.sum::<u64>(), whole.parameter_bytes);
        let times = cut.iter().map(|&s| model.encoder_stage(&shape, s).total_ns());
        assert_eq!(times.sum::<u64>(), model.encoder(&shape).total_ns());
    }
    // The first has no incoming border; the last sends features, the others hidden states of all its tokens.
    let microbatch = [one(300, 0, 300)];
    let of = |s| peak(&model, RankRole::EncoderStage(s), &microbatch, "F0 B0").total_bytes();
    assert!(
        of(stage(0, 1)) < of(stage(0, 2))
            && of(stage(0, 3)) == peak(&model, RankRole::Encoder, &microbatch, "F0 B0").total_bytes()
    );
}
