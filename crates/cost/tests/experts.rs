//! Experts that are dealt out, by sums worked out by hand: what a rank holds, what travels, and over which replicas parts are cut.

use crate::fixture;
use dflop_cost::{
    Basis, ComponentSettings, CostError, CostModel, CostSettings, Prediction, RankRole, Sharding, StageLayers,
};
use dflop_types::{
    Collective, ExpertsProfile, LinkProfile, LinkSpan, MicrobatchShape, ModelProfile, Recompute, Zero,
};

const WHOLE: StageLayers = StageLayers { num_layers: 4, is_first: true, is_last: true };
const EXPERTS: ExpertsProfile =
    ExpertsProfile { count: 8, per_token: 2, num_parameters: 4_000, parameter_bytes: 16_000 };

/// Of the 5,000 parameters of each of four layers 4,000 are those of 8 experts; a token reads 2 of them.
fn profile() -> ModelProfile {
    let mut profile = fixture::profile();
    profile.modules.get_mut("llm_layer").unwrap().experts = Some(EXPERTS);
    profile
}

fn with(profile: &ModelProfile, degree: u32, recompute: Recompute) -> Result<CostModel, CostError> {
    let llm = ComponentSettings { expert_parallel_degree: degree, recompute, ..ComponentSettings::default() };
    CostModel::with(profile, &CostSettings { llm, ..CostSettings::default() })
}

fn model(degree: u32) -> CostModel {
    with(&profile(), degree, Recompute::None).unwrap()
}

fn of_kind(kind: &str, degree: u32) -> CostModel {
    let mut profile = profile();
    kind.clone_into(&mut profile.device.kind);
    with(&profile, degree, Recompute::None).unwrap()
}

fn texts(tokens: u32) -> MicrobatchShape {
    MicrobatchShape { llm_tokens: vec![tokens], ..MicrobatchShape::default() }
}

fn zero(zero: Zero, replicas: u32) -> Sharding {
    Sharding::whole(zero, replicas)
}

fn ns(model: &CostModel, collective: Collective, num_ranks: u32, bytes: u64) -> u64 {
    model.transfer(collective, LinkSpan::Node, num_ranks, bytes).ns
}

/// 100 tokens, two experts of each, 10 bytes a row: 2,000 bytes go there and come back, in the forward and in the backward, and
/// once more where the layer recomputes.
#[test]
fn rows_travel_to_their_experts_and_back() {
    for (mode, times_back) in [(Recompute::None, 2), (Recompute::Selective, 4), (Recompute::Full, 4)] {
        let [plain, dealt] = [1, 2].map(|degree| with(&profile(), degree, mode).unwrap());
        let one = ns(&dealt, Collective::AllToAll, 2, 2_000);
        assert!(one > 0);
        let layers = |model: &CostModel| model.llm_stage(&texts(100), 3, false, false);
        let (plain, dealt) = (layers(&plain), layers(&dealt));
        assert_eq!(dealt.forward_ns - plain.forward_ns, 3 * 2 * one, "{mode}");
        assert_eq!(dealt.backward_ns - plain.backward_ns, 3 * times_back * one, "{mode}");
        assert!(dealt.assumed && !plain.assumed);
    }
    assert_eq!(model(2).llm_stage(&texts(0), 3, false, false), Prediction::default());
    // It was not measured, so it is that of an all-gather to as many bytes; where it was, it is its own.
    let transfer = |model: &CostModel, of| model.transfer(of, LinkSpan::Node, 4, 2_000);
    let all = [Collective::AllToAll, Collective::AllGather].map(|of| transfer(&model(2), of));
    assert_eq!((all[0].ns, all[0].basis), (all[1].ns, Basis::Assumed));
    let mut profile = profile();
    profile.network.links.push(all_to_all(4, 1_000_000_000));
    let known = with(&profile, 2, Recompute::None).unwrap();
    let own = transfer(&known, Collective::AllToAll);
    // Three quarters of what a rank has leave it.
    assert_eq!((own.ns, own.basis), (7 + 1_500, Basis::Measured));
}

fn all_to_all(num_ranks: u32, bandwidth_bytes_per_s: u64) -> LinkProfile {
    LinkProfile {
        collective: Collective::AllToAll,
        span: LinkSpan::Node,
        num_ranks,
        latency_ns: 7,
        bandwidth_bytes_per_s,
        points: Vec::new(),
    }
}

/// Four layers of 1,000 parameters beside experts, an embedding of 4,000 and a head of 6,000: 14,000. Of 16,000 parameters of
/// experts a rank of a group of 2 has 8,000.
#[test]
fn a_rank_holds_its_experts_and_all_else() {
    let model = model(2);
    let held = |sharding| {
        let memory = model.sharded_memory(RankRole::Stage(WHOLE), sharding);
        [memory.parameter_bytes, memory.gradient_bytes, memory.optimizer_bytes]
    };
    let own = 4 * (14_000 + 8_000);
    assert_eq!(held(zero(Zero::Nothing, 8)), [own, own, 2 * own]);
    // Over 8 replicas of all else, and 4 of an expert: a rank has as much of the whole as where nothing is dealt out.
    let part = 4 * 30_000 / 8;
    assert_eq!(held(zero(Zero::States, 8)), [own + part, own, 2 * part]);
    assert_eq!(held(zero(Zero::Parameters, 8)), [part, part, 2 * part]);
    // One group: its experts are cut no further.
    assert_eq!(held(zero(Zero::Parameters, 2)), [4 * 15_000, 4 * 15_000, 8 * 15_000]);
    // While layers run: the parameters of two, the gradient of one, and the head's while it is summed.
    let gathered = model.sharded_memory(RankRole::Stage(WHOLE), zero(Zero::Parameters, 8)).gathered_bytes;
    assert_eq!(gathered, 4 * (2 * 3_000 + 3_000 + 6_000));
}

/// Of the parameters of a layer 1,000 are gathered over all 4 replicas, and 2,000 over the 2 that have the same experts.
#[test]
fn experts_are_gathered_over_their_own_replicas() {
    let model = of_kind("cpu", 2);
    let nothing = MicrobatchShape::default();
    let of = |collective, num_ranks, bytes| ns(&model, collective, num_ranks, bytes);
    let layer = |collective| of(collective, 4, 4_000) + of(collective, 2, 8_000);
    let around = |collective| of(collective, 4, 10) + of(collective, 4, 24_000) + 4 * layer(collective);
    let sharded = model.sharded_stage(&nothing, WHOLE, zero(Zero::Parameters, 4));
    let (gather, scatter) = (Collective::AllGather, Collective::ReduceScatter);
    assert_eq!(sharded.forward_ns, around(gather) + of(gather, 4, 16_000));
    assert_eq!(sharded.backward_ns, around(gather) + around(scatter) + of(scatter, 4, 16_000));
    // A single group has nothing of its experts to gather.
    let sharded = model.sharded_stage(&nothing, WHOLE, zero(Zero::Parameters, 2));
    let rest = [10, 24_000, 16_000, 4_000, 4_000, 4_000, 4_000].map(|bytes| of(gather, 2, bytes));
    assert_eq!(sharded.forward_ns, rest.iter().sum::<u64>());
}

/// 24,000 parameters that all 4 replicas have, and 8,000 that 2 of them have.
#[test]
fn the_end_of_a_step_sums_experts_over_their_own_replicas() {
    let model = model(2);
    let of = |collective, num_ranks, bytes| ns(&model, collective, num_ranks, bytes);
    let each = |collective| of(collective, 4, 4 * 24_000) + of(collective, 2, 4 * 8_000);
    let tail = |of: Zero| model.colocated_tail(zero(of, 4)).ns;
    let replicated = model.colocated_tail(Sharding::replicated(4)).ns;
    assert_eq!(replicated, each(Collective::AllReduce) + 32_000);
    let ends = each(Collective::ReduceScatter) + each(Collective::AllGather);
    assert_eq!(tail(Zero::States), ends + 24_000 / 4 + 8_000 / 2);
    assert_eq!(tail(Zero::Gradients), tail(Zero::States));
    assert_eq!(tail(Zero::Parameters), 24_000 / 4 + 8_000 / 2);
}

/// Rows use the links that layers are gathered over, so that no gather is hidden by them: the slower the rows, the longer the step
/// by just that.
#[test]
fn nothing_is_gathered_while_rows_travel() {
    let over = |bandwidth| {
        let mut profile = profile();
        "cuda".clone_into(&mut profile.device.kind);
        profile.network.links.push(all_to_all(2, bandwidth));
        with(&profile, 2, Recompute::None).unwrap()
    };
    let gpu_ns = |bandwidth: u64, tokens: u32| {
        let model = over(bandwidth);
        let sharded = model.sharded_stage(&texts(tokens), WHOLE, zero(Zero::Parameters, 4));
        let plain = model.llm_stage(&texts(tokens), 4, true, true);
        (sharded.forward_ns - plain.forward_ns, sharded.backward_ns - plain.backward_ns, sharded.total_ns())
    };
    for tokens in [1, 10, 100, 1_000] {
        let [slow, fast] = [1_000_000, 1_000_000_000].map(|bandwidth| gpu_ns(bandwidth, tokens));
        assert_eq!((slow.0, slow.1), (fast.0, fast.1), "{tokens} tokens");
        assert!(slow.2 > fast.2);
    }
}

/// A rank has a copy of what it sends and of what it receives, for a while.
#[test]
fn an_exchange_takes_memory_while_it_runs() {
    let peak = |per_token: u32| {
        let mut profile = profile();
        profile.modules.get_mut("llm_layer").unwrap().experts = Some(ExpertsProfile { per_token, ..EXPERTS });
        let model = with(&profile, 2, Recompute::None).unwrap();
        let microbatch = dflop_cost::RankMicrobatch { shape: texts(900), feature_tokens: 0 };
        let fixed = model.colocated_memory(zero(Zero::Parameters, 4));
        model.colocated_peak(&microbatch, &microbatch, fixed, false).total_bytes()
    };
    assert_eq!(peak(8) - peak(4), 2 * 900 * 4 * 10);
}

#[test]
fn a_degree_of_one_changes_nothing() {
    let (with_experts, without) = (model(1), CostModel::new(&fixture::profile()).unwrap());
    let sharding = zero(Zero::Parameters, 4);
    let of = |model: &CostModel| {
        let stage = model.sharded_stage(&texts(300), WHOLE, sharding);
        let memory = model.sharded_memory(RankRole::Stage(WHOLE), sharding);
        (stage, memory, model.colocated_tail(zero(Zero::States, 4)))
    };
    assert_eq!(of(&with_experts), of(&without));
}

/// Where adapters train, experts are frozen: they have no gradients, and nothing of them is summed.
#[test]
fn experts_have_no_adapters() {
    let of = |degree| {
        let llm = ComponentSettings { expert_parallel_degree: degree, ..ComponentSettings::default() };
        let trained = dflop_cost::Trained { lora_rank: 8, ..dflop_cost::Trained::default() };
        CostModel::with(&profile(), &CostSettings { llm, trained, ..CostSettings::default() }).unwrap()
    };
    let memory = |degree| of(degree).sharded_memory(RankRole::Stage(WHOLE), zero(Zero::Nothing, 4));
    let (whole, dealt) = (memory(1), memory(2));
    assert_eq!(whole.parameter_bytes - dealt.parameter_bytes, 4 * 8_000);
    assert_eq!((whole.gradient_bytes, whole.optimizer_bytes), (dealt.gradient_bytes, dealt.optimizer_bytes));
    let tail = |degree| of(degree).colocated_tail(zero(Zero::Nothing, 4)).ns;
    assert_eq!(tail(1), tail(2));
}

#[test]
fn experts_that_cannot_be_dealt_out_are_refused_with_their_numbers() {
    let error = |profile: &ModelProfile, degree| with(profile, degree, Recompute::None).unwrap_err();
    assert_eq!(
        error(&fixture::profile(), 2).to_string(),
        "model profile says of no experts in `llm_layer`, which shall be dealt out over 2 ranks"
    );
    assert_eq!(
        error(&profile(), 3).to_string(),
        "the 8 experts of `llm_layer` shall be dealt out over 3 ranks, must be a multiple of that"
    );
}
