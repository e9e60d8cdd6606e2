//! The memory model against closed forms, and against a plain simulation that allocates and frees named buffers.

use dflop_cost::{
    ComponentSettings, CostModel, CostSettings, MemoryError, Moment, RankMemory, RankMicrobatch, RankPart,
    RankSteps, StageLayers, Trained,
};
use dflop_types::{
    Action, ActionKind, EncoderSegments, MeasuredCurve, MeasuredPoint, MemoryReserve, MicrobatchShape,
    ModelProfile, ModuleProfile, Recompute, RecomputePoint, StageIndex, Variant,
};
use proptest::prelude::*;
use std::collections::BTreeMap;

const HIDDEN: u64 = 64;
/// Bytes a token: kept by the linear part and the attention, workspace of both; parameters of one module.
const MODULES: [(&str, [u64; 4], u64); 6] = [
    ("encoder_embedding", [11, 0, 5, 0], 700),
    ("encoder_layer", [230, 40, 90, 130], 5_000),
    ("projector", [70, 0, 60, 0], 900),
    ("llm_embedding", [9, 0, 2_000, 0], 30_000),
    ("llm_layer", [900, 120, 310, 30], 8_000),
    ("llm_head", [4_000, 0, 5_000, 0], 31_000),
];
const LAYERS: [(&str, u32); 2] = [("encoder_layer", 3), ("llm_layer", 7)];

fn curve(kept: u64, workspace: u64) -> MeasuredCurve {
    let point = |size| MeasuredPoint {
        size,
        forward_ns: size,
        backward_ns: 2 * size,
        input_ns: size,
        weight_ns: size,
        activation_bytes: kept * size,
        workspace_bytes: workspace * size,
        repeats: 1,
        ..MeasuredPoint::default()
    };
    MeasuredCurve { points: [1, 1_000, 10_000].map(point).to_vec(), ..MeasuredCurve::default() }
}

fn profile() -> ModelProfile {
    let mut profile = ModelProfile { hidden_bytes: HIDDEN, ..ModelProfile::default() };
    "float32".clone_into(&mut profile.device.dtype);
    "cuda".clone_into(&mut profile.device.kind);
    for (name, [linear, attention, linear_workspace, attention_workspace], num_parameters) in MODULES {
        let attention =
            if attention == 0 { MeasuredCurve::default() } else { curve(attention, attention_workspace) };
        let count = LAYERS.iter().find(|layer| layer.0 == name).map_or(1, |layer| layer.1);
        let module = ModuleProfile {
            count,
            linear: curve(linear, linear_workspace),
            attention,
            num_parameters,
            parameter_bytes: 4 * num_parameters,
            ..ModuleProfile::default()
        };
        profile.modules.insert(name.to_owned(), module);
    }
    profile
}

fn model(kind: &str) -> CostModel {
    let mut profile = profile();
    kind.clone_into(&mut profile.device.kind);
    CostModel::new(&profile).expect("the profile is sound")
}

fn list(text: &str) -> Vec<Action> {
    text.split_whitespace().map(|action| format!("0{action}").parse().expect("an action")).collect()
}

/// A microbatch of one sample.
fn one(llm_tokens: u32, label_tokens: u64, feature_tokens: u64) -> RankMicrobatch {
    let segments = vec![EncoderSegments { count: 2, tokens: llm_tokens }];
    let shape = MicrobatchShape {
        encoder_segments: if feature_tokens == 0 { vec![] } else { segments },
        llm_tokens: vec![llm_tokens],
        label_tokens,
    };
    RankMicrobatch { shape, feature_tokens }
}

const MIDDLE: RankPart = RankPart::Stage(StageLayers { num_layers: 2, is_first: false, is_last: false });
const LAST: RankPart = RankPart::Stage(StageLayers { num_layers: 2, is_first: false, is_last: true });

fn peak(model: &CostModel, part: RankPart, microbatches: &[RankMicrobatch], actions: &str) -> RankMemory {
    let actions = list(actions);
    model
        .rank_peak(&RankSteps {
            part,
            microbatches,
            actions: &actions,
            copies_rows: false,
            sharding_degree: 1,
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

/// `M` equal microbatches on a stage in the middle: k of them in flight, each with two borders (the input is the
/// first layer's own), messages open for the next actions, and the workspace of a layer.
#[test]
fn closed_forms() {
    let model = model("cuda");
    let tokens = 100;
    let microbatches = vec![one(tokens, 30, 10); 6];
    let hidden = HIDDEN * u64::from(tokens);
    let in_flight = u64::from(tokens) * 2 * (900 + 120);
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
    // The weight queue: after I nothing is named activations, and twice is kept.
    let split = peak(&model, MIDDLE, &microbatches[..1], "F0 I0 W0");
    assert_eq!(split.moment.to_string(), "0I0");
    assert_eq!(split.weight_queue_bytes, in_flight - hidden);
    let queued = peak(&model, MIDDLE, &microbatches[..2], "F0 I0 F1 I1 W0 W1");
    assert_eq!(queued.weight_queue_bytes, 3 * (in_flight - hidden));
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
    assert_eq!(none.activation_bytes, 2 * 100 * (900 + 120) - incoming);
    assert_eq!(selective.activation_bytes, 2 * 100 * (300 + 120) - incoming);
    assert_eq!(selective.workspace_bytes, 100 * (310 + 900 - 300));
    assert_eq!(full.activation_bytes, 2 * incoming - incoming);
    assert_eq!(full.workspace_bytes, 100 * (310 + 900 + 120 - HIDDEN));
    assert!(full.total_bytes() < selective.total_bytes() && selective.total_bytes() < none.total_bytes());
}

/// What is frozen has no gradients nor states, and keeps nothing where nothing before it trains.
#[test]
fn frozen_parts_hold_parameters_only() {
    let run = |encoder, projector, llm, part| {
        let trained = Trained { encoder, projector, llm, lora_rank: 0 };
        let model = with(&profile(), &CostSettings { trained, ..CostSettings::default() });
        peak(&model, part, &[one(100, 30, 20)], "F0 B0")
    };
    let frozen = run(false, false, true, RankPart::Encoder);
    assert_eq!((frozen.gradient_bytes, frozen.optimizer_bytes, frozen.activation_bytes), (0, 0, 0));
    assert_eq!(frozen.parameter_bytes, 4 * (700 + 3 * 5_000 + 900));
    // One layer at a time all the same exists.
    assert_eq!(frozen.workspace_bytes, 200 * (130 + 230 + 40));
    let projector = run(false, true, false, RankPart::Encoder);
    assert_eq!((projector.gradient_bytes, projector.optimizer_bytes), (4 * 900, 8 * 900));
    let trained = Trained { encoder: false, ..Trained::default() };
    let model = with(&profile(), &CostSettings { trained, ..CostSettings::default() });
    assert_eq!(model.activation_bytes(RankPart::Encoder, &one(100, 30, 20).shape), 200 * 70);
    // The frozen backbone passes the projector's gradient on, and keeps what it needs for that.
    let behind = run(false, true, false, LAST);
    assert_eq!((behind.gradient_bytes, behind.optimizer_bytes), (0, 0));
    assert!(behind.activation_bytes > 0);
    let nothing = run(false, false, false, LAST);
    assert_eq!((nothing.activation_bytes, nothing.logits_bytes), (0, 0));
}

#[test]
fn adapters_alone_have_gradients_and_states() {
    let mut profile = profile();
    let mut adapted = profile.modules["llm_layer"].clone();
    adapted.num_parameters += 500;
    adapted.parameter_bytes += 2_000;
    adapted.linear = curve(1_100, 330);
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
    assert_eq!(memory.activation_bytes, 2 * 100 * (1_100 + 120) - 100 * HIDDEN);
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
            part: MIDDLE,
            microbatches: &microbatches,
            actions: &actions,
            copies_rows: false,
            sharding_degree: 1,
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

/// Live buffers by name, and the most there ever was.
#[derive(Default)]
struct Heap {
    live: BTreeMap<String, u64>,
    most: u64,
}

impl Heap {
    fn alloc(&mut self, name: String, bytes: u64) {
        assert!(self.live.insert(name, bytes).is_none());
        self.most = self.live.values().sum::<u64>().max(self.most);
    }

    fn free(&mut self, name: &str) {
        assert!(self.live.remove(name).is_some(), "{name}");
    }
}

struct Oracle<'a> {
    heap: Heap,
    part: RankPart,
    microbatches: &'a [RankMicrobatch],
    copies: bool,
    keeps: bool,
    sent: Vec<String>,
    num_sent: usize,
}

impl Oracle<'_> {
    /// Name, kept bytes, workspace and result bytes of each module that microbatch `j` passes, layer by layer.
    fn modules(&self, j: usize) -> Vec<(String, u64, u64, u64)> {
        let shape = &self.microbatches[j].shape;
        let bytes = |name: &str, total: u64, segments: u64| {
            let [kept, kept_attention, workspace, workspace_attention] =
                MODULES.iter().find(|module| module.0 == name).expect("a module").1;
            (
                kept * total + kept_attention * segments,
                (workspace * total).max(workspace_attention * segments),
            )
        };
        let mut modules = Vec::new();
        let mut add = |name: &str, count: u32, total: u64, result: u64| {
            for index in 0..count {
                let (kept, workspace) = bytes(name, total, total);
                modules.push((format!("{name} {index} of {j}"), kept, workspace, result));
            }
        };
        let (encoder, llm) = (shape.encoder_tokens(), shape.total_llm_tokens());
        match self.part {
            RankPart::Encoder if encoder > 0 => {
                // Modules keep their inputs; the width of the encoder is not in the profile.
                add("encoder_embedding", 1, encoder, 270 * encoder);
                add("encoder_layer", 3, encoder, 70 * encoder);
                add("projector", 1, encoder, 0);
            }
            RankPart::Stage(stage) if llm > 0 => {
                let hidden = HIDDEN * llm;
                add("llm_embedding", u32::from(stage.is_first), llm, hidden);
                add("llm_layer", stage.num_layers, llm, hidden);
                add("llm_head", u32::from(stage.is_last), shape.label_tokens, 0);
            }
            _ => {}
        }
        if let (RankPart::Stage(StageLayers { is_first: false, .. }), Some(first)) =
            (self.part, modules.first_mut())
        {
            first.1 -= self.borders(j).0;
        }
        modules
    }

    fn borders(&self, j: usize) -> (u64, u64) {
        let microbatch = &self.microbatches[j];
        let hidden = HIDDEN * microbatch.shape.total_llm_tokens();
        match self.part {
            RankPart::Encoder => (0, HIDDEN * microbatch.feature_tokens),
            RankPart::Stage(stage) => (
                if stage.is_first { HIDDEN * microbatch.feature_tokens } else { hidden },
                if stage.is_last { 0 } else { hidden },
            ),
        }
    }

    fn post(&mut self, action: Action) {
        let (incoming, outgoing) = self.borders(action.microbatch as usize);
        let bytes = if action.kind == ActionKind::F { incoming } else { outgoing };
        self.heap.alloc(format!("message of {action}"), bytes);
    }

    fn send(&mut self, bytes: u64) {
        if bytes == 0 {
            return;
        }
        if !self.keeps {
            for name in std::mem::take(&mut self.sent) {
                self.heap.free(&name);
            }
        }
        self.num_sent += 1;
        let name = format!("sent {}", self.num_sent);
        self.heap.alloc(name.clone(), bytes);
        self.sent.push(name);
    }

    fn run(&mut self, action: Action) {
        let j = action.microbatch as usize;
        let modules = self.modules(j);
        let (incoming, outgoing) = self.borders(j);
        let message = format!("message of {action}");
        let forward = action.kind == ActionKind::F;
        if self.copies {
            self.heap.alloc("joined".to_owned(), if forward { incoming } else { outgoing });
        }
        let last = modules.len().saturating_sub(1);
        let mut between = String::new();
        let mut step = |heap: &mut Heap, index: usize| {
            let (name, kept, workspace, result) = &modules[index];
            if forward {
                heap.alloc(name.clone(), *kept);
            }
            let result = if index < last {
                *result
            } else if forward {
                outgoing
            } else {
                0
            };
            between = format!("result of {name}");
            heap.alloc(between.clone(), result);
            heap.alloc("workspace".to_owned(), *workspace);
            heap.free("workspace");
            heap.free(&between);
            if !forward {
                heap.free(name);
            }
        };
        if forward {
            (0..modules.len()).for_each(|index| step(&mut self.heap, index));
        } else {
            (0..modules.len()).rev().for_each(|index| step(&mut self.heap, index));
        }
        if self.copies {
            self.heap.free("joined");
        }
        if forward {
            self.heap.free(&message);
            self.heap.alloc(format!("incoming {j}"), incoming);
            self.heap.alloc(format!("outgoing {j}"), outgoing);
            if self.copies {
                self.send(outgoing);
            }
        } else {
            self.heap.free(&message);
            self.heap.free(&format!("incoming {j}"));
            self.heap.free(&format!("outgoing {j}"));
            if self.keeps && !self.copies {
                self.send(outgoing);
            }
            self.send(incoming);
        }
    }
}

fn brute_force(
    part: RankPart,
    microbatches: &[RankMicrobatch],
    actions: &[Action],
    copies: bool,
    keeps: bool,
) -> u64 {
    let heap = Heap::default();
    let mut oracle = Oracle { heap, part, microbatches, copies, keeps, sent: vec![], num_sent: 0 };
    for action in actions.iter().take(4) {
        oracle.post(*action);
    }
    for (position, action) in actions.iter().enumerate() {
        oracle.run(*action);
        if let Some(next) = actions.get(position + 4) {
            oracle.post(*next);
        }
    }
    oracle.heap.most
}

/// Any order in which each backward follows its forward.
fn any_list(num_microbatches: u32, choices: &[u8]) -> Vec<Action> {
    let (mut waiting, mut in_flight) = ((0..num_microbatches).collect::<Vec<_>>(), Vec::new());
    let mut actions = Vec::new();
    for choice in choices.iter().cycle().take(2 * num_microbatches as usize) {
        let forward = in_flight.is_empty() || (!waiting.is_empty() && choice % 2 == 0);
        let from = if forward { &mut waiting } else { &mut in_flight };
        let microbatch = from.remove(usize::from(choice / 2) % from.len());
        let kind = if forward { ActionKind::F } else { ActionKind::B };
        if forward {
            in_flight.push(microbatch);
        }
        actions.push(Action { stage: StageIndex(0), kind, microbatch });
    }
    actions
}

fn microbatch() -> impl Strategy<Value = RankMicrobatch> {
    (0u32..400, 1u64..200, 0u64..300).prop_map(|(llm, labels, features)| {
        if llm == 0 { RankMicrobatch::default() } else { one(llm, labels, features) }
    })
}

fn part() -> impl Strategy<Value = RankPart> {
    (0u32..4, any::<bool>(), any::<bool>()).prop_map(|(num_layers, is_first, is_last)| match num_layers {
        0 => RankPart::Encoder,
        _ => RankPart::Stage(StageLayers { num_layers, is_first, is_last }),
    })
}

proptest! {
    #[test]
    fn the_walk_is_a_heap_that_allocates_and_frees(
        part in part(), microbatches in prop::collection::vec(microbatch(), 1..8),
        choices in prop::collection::vec(any::<u8>(), 16), copies_rows: bool, is_cuda: bool
    ) {
        let model = model(if is_cuda { "cuda" } else { "cpu" });
        let actions = any_list(microbatches.len() as u32, &choices);
        let steps = RankSteps { part, microbatches: &microbatches, actions: &actions, copies_rows, sharding_degree: 1 };
        let found = model.rank_peak(&steps).unwrap();
        let fixed = model.fixed_memory(part, 1);
        let most = brute_force(part, &microbatches, &actions, copies_rows, !is_cuda);
        prop_assert_eq!(found.total_bytes(), fixed.static_bytes() + most.max(fixed.workspace_bytes));
        prop_assert_eq!(found.total_bytes(), found.parts().iter().map(|part| part.1).sum::<u64>());
        // Lower bounds: what is held anyhow, and any one microbatch alone.
        for index in 0..microbatches.len() {
            let alone = peak(&model, part, &microbatches[index..=index], "F0 B0").total_bytes();
            prop_assert!(alone <= found.total_bytes());
        }
    }

    #[test]
    fn a_sample_more_never_frees_anything(
        part in part(), microbatches in prop::collection::vec(microbatch(), 1..6), at in 0usize..6,
        extra in 1u32..400, choices in prop::collection::vec(any::<u8>(), 12)
    ) {
        let model = model("cpu");
        let actions = any_list(microbatches.len() as u32, &choices);
        let total = |microbatches: &[RankMicrobatch]| {
            let steps = RankSteps { part, microbatches, actions: &actions, copies_rows: true, sharding_degree: 1 };
            model.rank_peak(&steps).unwrap().total_bytes()
        };
        let mut more = microbatches.clone();
        let index = at % more.len();
        let changed = &mut more[index];
        changed.shape.llm_tokens.push(extra);
        changed.shape.encoder_segments.push(EncoderSegments { count: 1, tokens: extra });
        changed.shape.label_tokens += u64::from(extra / 3);
        changed.feature_tokens += u64::from(extra / 4);
        prop_assert!(total(&microbatches) <= total(&more));
    }

    #[test]
    fn apart_takes_no_less_than_together(
        part in part(), microbatches in prop::collection::vec(microbatch(), 1..6)
    ) {
        // Splitting the backward holds inputs and gradients longer, never shorter.
        let model = model("cuda");
        let run = |text: &[&str]| {
            let actions: Vec<String> = (0..microbatches.len())
                .flat_map(|j| text.iter().map(move |kind| format!("{kind}{j}")))
                .collect();
            peak(&model, part, &microbatches, &actions.join(" ")).total_bytes()
        };
        prop_assert!(run(&["F", "B"]) <= run(&["F", "I", "W"]));
    }
}
