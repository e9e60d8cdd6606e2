//! The part of the page that shows a model profile.

use crate::soundness::{check, shown};
use dflop_report::Report;
use dflop_types::{
    Collective, Device, LinkProfile, LinkSpan, MeasuredCurve, MeasuredPoint, MemoryReserve, MessagePoint,
    ModelProfile, ModuleProfile, Network, Recompute, RecomputePoint, Variant,
};
use proptest::prelude::*;

fn point(size: u64) -> MeasuredPoint {
    MeasuredPoint {
        size,
        forward_ns: 1_000 * size,
        backward_ns: 2_100 * size,
        input_ns: 1_000 * size,
        weight_ns: 1_100 * size,
        spread_ns: 155 * size,
        activation_bytes: 64 * size,
        workspace_bytes: 32 * size,
        split: None,
        repeats: 5,
    }
}

fn module(sizes: &[u64]) -> ModuleProfile {
    let curve = MeasuredCurve { points: sizes.iter().copied().map(point).collect(), out_of_memory_at: None };
    ModuleProfile {
        count: 3,
        linear: curve,
        num_parameters: 1_000,
        parameter_bytes: 4_000,
        ..Default::default()
    }
}

fn link(collective: Collective, span: LinkSpan, num_ranks: u32, sizes: &[u64]) -> LinkProfile {
    LinkProfile {
        collective,
        span,
        num_ranks,
        latency_ns: 70_000,
        bandwidth_bytes_per_s: 2 << 30,
        points: sizes.iter().map(|&bytes| MessagePoint { bytes, ns: 70_000 + bytes / 2 }).collect(),
    }
}

/// A profile that has everything a profile can have.
fn whole() -> ModelProfile {
    let mut layer = module(&[16, 64, 512]);
    layer.attention = layer.linear.clone();
    layer.attention.out_of_memory_at = Some(2_048);
    let recomputed = |extra_ns| vec![RecomputePoint { size: 512, extra_ns, activation_bytes: 4_096 }];
    layer.recompute =
        [(Recompute::Selective, recomputed(51_200)), (Recompute::Full, recomputed(512_000))].into();
    let cut = Variant {
        tensor_parallel_degree: 2,
        lora_rank: 0,
        has_collectives: false,
        modules: [("llm_layer".to_owned(), layer.clone())].into(),
    };
    let lora = Variant { tensor_parallel_degree: 1, lora_rank: 16, ..cut.clone() };
    let tile = ModuleProfile { segment_tokens: Some(729), ..module(&[729, 1_458]) };
    ModelProfile {
        family: "llava_onevision".to_owned(),
        model: "a model".to_owned(),
        device: Device {
            kind: "cuda".to_owned(),
            name: "NVIDIA H200".to_owned(),
            dtype: "bfloat16".to_owned(),
            ..Default::default()
        },
        network: Network {
            backend: "nccl".to_owned(),
            is_assumed: false,
            links: vec![
                link(Collective::PointToPoint, LinkSpan::Node, 2, &[1 << 10, 1 << 20]),
                link(Collective::AllReduce, LinkSpan::Node, 2, &[1 << 10, 1 << 20]),
                link(Collective::ReduceScatter, LinkSpan::Cluster, 16, &[1 << 10, 1 << 20]),
                link(Collective::AllGather, LinkSpan::Cluster, 16, &[]),
            ],
        },
        modules: [("encoder_layer".to_owned(), tile), ("llm_layer".to_owned(), layer)].into(),
        variants: vec![cut, lora],
        memory: MemoryReserve { context_bytes: 512 << 20, allocator_overhead_permille: 30 },
        ..ModelProfile::default()
    }
}

fn page(model: ModelProfile) -> String {
    let page = shown(&Report { model: Some(model), ..Report::default() });
    check(&page);
    page
}

/// Recomputation, variants, links and what did not fit are on the page, as a person reviewed it.
#[test]
fn a_whole_profile_looks_as_reviewed() {
    let page = page(whole()).replace(env!("CARGO_PKG_VERSION"), "[VERSION]").replace("><", ">\n<");
    insta::assert_snapshot!(page);
}

/// What was not measured is never shown as if it had been.
#[test]
fn estimates_and_assumptions_are_marked() {
    let measured = page(whole());
    assert!(!measured.contains("stimated") && !measured.contains("assumed"));
    let mut model = whole();
    model.is_estimated = true;
    model.network.is_assumed = true;
    for module in model.modules.values_mut() {
        module.linear.points.iter_mut().for_each(|point| point.repeats = 0);
    }
    let estimated = page(model);
    for mark in [
        "The model, estimated",
        "estimated for ",
        "<strong>Estimated, not measured:</strong>",
        "LLM (estimated)",
        "One LLM layer, without attention (estimated)",
        ">estimated</td>",
        "Links (assumed: from a table of hardware, not measured)",
    ] {
        assert!(estimated.contains(mark), "{mark}");
    }
    assert!(!estimated.contains("The model, measured"));
    let mut model = whole();
    model.network = Network::default();
    assert!(page(model).contains("None was measured: transfers are taken as free."));
}

fn any_ns() -> impl Strategy<Value = u64> {
    prop_oneof![Just(0), 0u64..1_000_000_000, any::<u64>()]
}

proptest! {
    /// Whatever is measured, the page is well formed and shows no number that is none.
    #[test]
    fn any_profile_makes_a_sound_page(
        numbers in prop::collection::vec((any_ns(), any_ns(), any_ns(), any_ns()), 0..6),
        num_ranks in any::<u32>(),
        degree in any::<u32>(),
    ) {
        let mut model = whole();
        let layer = model.modules.get_mut("llm_layer").unwrap();
        layer.linear.points = numbers.iter().map(|&(size, a, b, c)| MeasuredPoint {
            size, forward_ns: a, backward_ns: b, input_ns: c, spread_ns: a, activation_bytes: b, ..point(1)
        }).collect();
        let recomputed = numbers.iter().map(|&(size, extra_ns, activation_bytes, _)| RecomputePoint {
            size, extra_ns, activation_bytes
        });
        layer.recompute.insert(Recompute::Full, recomputed.collect());
        model.network.links[0].points = numbers.iter().map(|&(bytes, ns, ..)| MessagePoint { bytes, ns }).collect();
        model.network.links[0].num_ranks = num_ranks;
        model.network.links[0].bandwidth_bytes_per_s = numbers.first().map_or(0, |n| n.0);
        model.variants[0].tensor_parallel_degree = degree;
        page(model);
    }
}
