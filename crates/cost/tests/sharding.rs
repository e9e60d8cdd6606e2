//! Sharded replicas by sums worked out by hand, and against a walk layer by layer: collectives beside the work and after
//! it, and what a rank holds.

use crate::fixture;
use dflop_cost::{CostModel, RankMicrobatch, RankRole, Sharding, StageLayers, Transfer};
use dflop_types::{
    Collective, Component, ComponentLayout, EncoderSegments, Layout, LinkSpan, MicrobatchShape, ModelProfile,
    RankOrder, Zero,
};
use proptest::prelude::*;

fn model(kind: &str) -> CostModel {
    let mut profile = fixture::profile();
    kind.clone_into(&mut profile.device.kind);
    CostModel::new(&profile).unwrap()
}

/// Bytes of a row of hidden states, as many as of the final norm.
const NORM_BYTES: u64 = 10;
/// Of the final norm, the embedding, the layers and the head: the units of [`WHOLE`].
const OF_LLM: [u64; 7] = [NORM_BYTES, 16_000, 20_000, 20_000, 20_000, 20_000, 24_000];
const WHOLE: StageLayers = StageLayers { num_layers: 4, is_first: true, is_last: true };

fn over(zero: Zero, replicas: u32) -> Sharding {
    Sharding::whole(zero, replicas)
}

fn texts(tokens: u32, labels: u64) -> MicrobatchShape {
    MicrobatchShape { llm_tokens: vec![tokens], label_tokens: labels, ..MicrobatchShape::default() }
}

fn collective(model: &CostModel, collective: Collective, bytes: u64) -> u64 {
    model.transfer(collective, LinkSpan::Node, 2, bytes).ns
}

/// One pass over units (work, bytes gathered before it, bytes reduced behind it), one by one: the next is gathered, and
/// the gradients of the one before are reduced, while one runs.
fn walked(model: &CostModel, units: &[(u64, u64, u64)]) -> u64 {
    let gather = |at: usize| collective(model, Collective::AllGather, units.get(at).map_or(0, |u| u.1));
    let reduce = |at: usize| collective(model, Collective::ReduceScatter, units[at].2);
    let beside = |at: usize| gather(at + 1) + if at == 0 { 0 } else { reduce(at - 1) };
    let work: u64 = (0..units.len()).map(|at| units[at].0.max(beside(at))).sum();
    gather(0) + work + reduce(units.len() - 1)
}

proptest! {
    /// A GPU gathers beside its work, a CPU in turn; without samples a rank has the collectives alone.
    #[test]
    fn collectives_run_beside_the_layers_of_a_gpu(tokens in 0u32..900, labels in 0u64..400, tiles in 0u32..8) {
        let (gpu, cpu) = (model("cuda"), model("cpu"));
        let segments = if tiles == 0 { vec![] } else { vec![EncoderSegments::of(tiles, 100)] };
        let shape = MicrobatchShape { encoder_segments: segments, ..texts(tokens, labels.min(tokens.into())) };
        let zero_3 = over(Zero::Parameters, 2);
        // Layers apart: those of one stage are the middle layer, and what the ends add.
        let of = |shape: &MicrobatchShape, num_layers, is_first, is_last| {
            gpu.llm_stage(shape, num_layers, is_first, is_last)
        };
        let (layer, embedding, head) =
            (of(&shape, 1, false, false), of(&shape, 0, true, false), of(&shape, 0, false, true));
        // An embedding of 4,000 parameters, whose backward needs none of them; layers of 5,000; a head of 6,000; and the final norm.
        let mut forward = vec![(0, NORM_BYTES, 0), (embedding.forward_ns, 16_000, 0)];
        forward.extend(vec![(layer.forward_ns, 20_000, 0); 4]);
        forward.push((head.forward_ns, 24_000, 0));
        let mut backward = vec![(0, NORM_BYTES, 0), (head.backward_ns, 24_000, 24_000)];
        backward.extend(vec![(layer.backward_ns, 20_000, 20_000); 4]);
        backward.extend([(embedding.backward_ns, 0, 16_000), (0, 0, NORM_BYTES)]);
        let sharded = gpu.sharded_stage(&shape, WHOLE, zero_3);
        prop_assert_eq!(sharded.forward_ns, walked(&gpu, &forward));
        prop_assert_eq!(sharded.backward_ns, walked(&gpu, &backward));
        let all = |c, bytes: &[u64]| bytes.iter().map(|&bytes| collective(&cpu, c, bytes)).sum::<u64>();
        let of_embedding = all(Collective::AllGather, &[16_000]);
        let (gathers, reduces) =
            (all(Collective::AllGather, &OF_LLM), all(Collective::ReduceScatter, &OF_LLM));
        let (plain, in_turn) = (of(&shape, 4, true, true), cpu.sharded_stage(&shape, WHOLE, zero_3));
        prop_assert_eq!(in_turn.forward_ns, plain.forward_ns + gathers);
        prop_assert_eq!(in_turn.backward_ns, plain.backward_ns + gathers - of_embedding + reduces);
        prop_assert!(sharded.total_ns() <= in_turn.total_ns() && sharded.total_ns() >= plain.total_ns());
        // The encoder: an embedding and a projector together, three layers.
        let encoder = cpu.sharded_encoder(&shape, zero_3).total_ns() - cpu.encoder(&shape).total_ns();
        let of_encoder = [16_000, 8_000, 8_000, 8_000];
        prop_assert_eq!(
            encoder,
            2 * all(Collective::AllGather, &of_encoder) + all(Collective::ReduceScatter, &of_encoder)
        );
        // What is not cut by layers runs as before.
        for zero in [Zero::Nothing, Zero::States, Zero::Gradients] {
            prop_assert_eq!(gpu.sharded_stage(&shape, WHOLE, over(zero, 2)), plain);
        }
        prop_assert_eq!(gpu.sharded_stage(&shape, WHOLE, over(Zero::Parameters, 1)), plain);
    }

    /// Cutting more never holds more; what is cut over one rank is whole.
    #[test]
    fn cutting_more_never_holds_more(degree in 1u32..9, copies in 1u32..4, bf16: bool) {
        let mut profile = fixture::profile();
        profile.device.dtype = if bf16 { "bfloat16" } else { "float32" }.to_owned();
        let model = CostModel::new(&profile).unwrap();
        for part in [RankRole::Encoder, RankRole::Stage(WHOLE)] {
            let held = |zero, degree| {
                let sharding = Sharding { degree, ..Sharding::whole(zero, degree * copies) };
                model.sharded_memory(part, sharding).static_bytes()
            };
            let by_zero = Zero::ALL.map(|zero| held(zero, degree));
            if degree == 1 {
                prop_assert!(by_zero.iter().all(|&bytes| bytes == by_zero[0]));
            } else {
                // Cut once a step, gradients are whole until then.
                prop_assert_eq!(by_zero[1], by_zero[2]);
                prop_assert!(by_zero[1] <= by_zero[0], "{:?}", by_zero);
                prop_assert!(held(Zero::Parameters, 2 * degree) <= held(Zero::Parameters, degree));
            }
        }
    }
}

/// By hand, 2 ranks, a stage of 4 layers of 5,000 parameters, an embedding of 4,000 and a head of 6,000, in fp32.
#[test]
fn what_a_replica_holds_by_what_is_cut() {
    let model = model("cuda");
    let held = |zero| {
        let memory = model.sharded_memory(RankRole::Stage(WHOLE), over(zero, 2));
        [memory.parameter_bytes, memory.gradient_bytes, memory.optimizer_bytes]
    };
    let p = 4 * 30_000;
    assert_eq!(held(Zero::Nothing), [p, p, 2 * p]);
    assert_eq!(held(Zero::States), [p + p / 2, p, p]);
    assert_eq!(held(Zero::Gradients), [p + p / 2, p, p]);
    assert_eq!(held(Zero::Parameters), [p / 2, p / 2, p]);
    // The parameters of two layers, the gradient of one, and the head's gradient while it is summed.
    let zero_3 = over(Zero::Parameters, 2);
    let gathered = model.sharded_memory(RankRole::Stage(WHOLE), zero_3).gathered_bytes;
    assert_eq!(gathered, 4 * (2 * 5_000 + 5_000 + 6_000));
    // bfloat16: the fp32 master is the part that ranks update.
    let mut profile = fixture::profile();
    profile.device.dtype = "bfloat16".to_owned();
    let bf16 = CostModel::new(&profile).unwrap();
    let memory = bf16.sharded_memory(RankRole::Stage(WHOLE), over(Zero::States, 2));
    assert_eq!((memory.parameter_bytes, memory.optimizer_bytes), (p, 12 * 30_000 / 2));
    // Both components and one context: no less than what either holds, and what the whole model held before.
    let both = model.colocated_static_bytes(over(Zero::Nothing, 2));
    let one = RankMicrobatch::default();
    assert_eq!(both, model.whole_peak(&one, 1).static_bytes());
    let peak = model.colocated_peak(&one, &one, model.colocated_memory(over(Zero::Nothing, 2)), false);
    assert_eq!(peak, model.whole_peak(&one, 1));
}

/// Reduction, optimizer of a part and gathering; copies of the parts over the groups of a hybrid.
#[test]
fn the_end_of_a_sharded_step() {
    let model = model("cuda");
    let p = 4 * 40_000;
    let plain = model.colocated_tail(Sharding::replicated(2));
    assert_eq!(plain, model.whole_tail(2, 1));
    let ns = |c, n, bytes| model.transfer(c, LinkSpan::Node, n, bytes).ns;
    let within = |n| ns(Collective::ReduceScatter, n, p) + ns(Collective::AllGather, n, p);
    // 40,000 parameters at 1 ns each.
    assert_eq!(model.colocated_tail(over(Zero::States, 4)).ns, within(4) + 10_000);
    assert_eq!(model.colocated_tail(over(Zero::Gradients, 4)).ns, within(4) + 10_000);
    assert_eq!(model.colocated_tail(over(Zero::Parameters, 4)).ns, 10_000);
    let hybrid = |zero| Sharding { degree: 4, ..Sharding::whole(zero, 8) };
    let copies = ns(Collective::AllReduce, 2, p / 4);
    assert_eq!(model.colocated_tail(hybrid(Zero::States)).ns, within(4) + copies + 10_000);
    assert_eq!(model.colocated_tail(hybrid(Zero::Parameters)).ns, 10_000);
    // There they are reduced where the layers run, as is seen of a rank without samples: all units.
    let nothing = MicrobatchShape::default();
    let of = |sharding| model.sharded_stage(&nothing, WHOLE, sharding).backward_ns;
    let layers: u64 = OF_LLM.map(|bytes: u64| ns(Collective::AllReduce, 2, bytes.div_ceil(4))).iter().sum();
    assert_eq!(of(hybrid(Zero::Parameters)) - of(over(Zero::Parameters, 4)), layers);
    assert_eq!(model.colocated_tail(over(Zero::Parameters, 1)), model.colocated_tail(Sharding::NONE));
    let encoder = model.sharded_encoder_tail(Sharding::replicated(3));
    assert_eq!(encoder, model.encoder_tail(3));
    assert_eq!(model.sharded_stage_tail(WHOLE, Sharding::replicated(3)), model.stage_tail(WHOLE, 3));
    // Nothing known of links: no time, and the mark says so.
    let blank = ModelProfile { network: dflop_types::Network::default(), ..fixture::profile() };
    let blank = CostModel::new(&blank).unwrap();
    let Transfer { ns, basis } = blank.colocated_tail(over(Zero::States, 4));
    assert_eq!((ns, basis), (10_000, dflop_cost::Basis::Assumed));
    assert!(blank.sharded_stage(&texts(100, 50), WHOLE, over(Zero::Parameters, 4)).assumed);
}

#[test]
fn a_layout_says_how_each_component_is_cut() {
    let degrees = |dp| ComponentLayout { tp: 1, pp: 1, dp };
    let layout = Layout { zero: Zero::States, ..Layout::disaggregated(degrees(2), degrees(6)) };
    let of_llm = Sharding { first: 2, ..over(Zero::States, 6) };
    assert_eq!(Sharding::of(&layout, Component::Llm), of_llm);
    let hybrid = Layout { shard_ranks: Some(2), ..layout };
    assert_eq!(Sharding::of(&hybrid, Component::Llm), Sharding { degree: 2, ..of_llm });
    // Replicas of two stages stand two ranks apart.
    let stages = Layout { llm: ComponentLayout { tp: 1, pp: 2, dp: 3 }, ..layout };
    assert_eq!(Sharding::of(&stages, Component::Llm).stride, 2);
    // Its ends: next to each other, or, where the replicas of a stage stand together, behind three of them. Of four stages
    // of two ranks, the last stands six ranks behind the first.
    let ends = |layout: Layout| Sharding::of(&layout, Component::Llm).ends;
    let together = Layout { rank_order: RankOrder::TpDpPp, ..stages };
    let wide = Layout { llm: ComponentLayout { tp: 2, pp: 4, dp: 3 }, ..layout };
    assert_eq!([stages, together, wide].map(ends), [1, 3, 6]);
    assert_eq!(Sharding::of(&Layout::colocated(4, Zero::Nothing), Component::Both), Sharding::replicated(4));
}
