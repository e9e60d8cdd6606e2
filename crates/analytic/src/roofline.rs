//! A whole model profile from work and peak rates.
//!
//! ```text
//! step   = max(operations / (peak * efficiency), bytes / (bandwidth * efficiency)) + kernels * KERNEL_NS
//! module = max(sum over steps, kernels * DISPATCH_NS)
//! ```

use crate::architecture::Architecture;
use crate::error::AnalyticError;
use crate::hardware::{Hardware, Vendor};
use crate::modules::Module;
use crate::operations::{Kind, Operation, Phase, Work};
use dflop_types::{
    Collective, Device, LinkProfile, LinkSpan, MadeFrom, MeasuredCurve, MeasuredPoint, MemoryReserve,
    ModelProfile, ModuleProfile, Network, Recompute, RecomputePoint, SplitBytes, Variant,
};
use std::collections::BTreeMap;

/// Start and end of a kernel on the device, in nanoseconds: assumed.
const KERNEL_NS: f64 = 1_500.0;
/// Time that PyTorch takes on the host to start one kernel, in nanoseconds: assumed. The device waits for it where its
/// work is shorter.
const DISPATCH_NS: f64 = 5_000.0;
/// The largest sizes of the grids, in tokens: beyond them predictions are marked as extrapolated.
const MAX_TOKENS: u64 = 1 << 18;
/// Ranks that a layer is cut over.
const DEGREES: [u32; 3] = [2, 4, 8];
/// Memory that the device's context and libraries take, in bytes: assumed.
const CONTEXT_BYTES: u64 = 1 << 30;
/// What the allocator holds above what tensors take, in thousandths: assumed.
const ALLOCATOR_OVERHEAD_PERMILLE: u32 = 50;

/// What is estimated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EstimateSettings {
    /// Name of the model for people.
    pub model: String,
    /// Dtype of parameters and activations: `bfloat16`, `float16` or `float32`.
    pub dtype: String,
    /// Hashes of what the architecture was read from.
    pub made_from: MadeFrom,
}

/// A model profile that nobody measured: marked as estimated, each point with no repeats.
///
/// # Errors
/// [`AnalyticError::Dtype`].
pub fn estimate(
    architecture: &Architecture,
    hardware: &Hardware,
    settings: &EstimateSettings,
) -> Result<ModelProfile, AnalyticError> {
    let (peak_gflops, size) = hardware.rate(&settings.dtype)?;
    let roofline = Roofline { hardware, peak_gflops, size };
    let modules = architecture.modules();
    let profiles = |modules: &[Module]| {
        modules.iter().map(|module| (module.name.to_owned(), roofline.module(module))).collect()
    };
    let variants = DEGREES.iter().filter_map(|&degree| {
        let cut: Vec<Module> = modules.iter().filter_map(|module| module.cut(u64::from(degree))).collect();
        (!cut.is_empty()).then(|| Variant {
            tensor_parallel_degree: degree,
            lora_rank: 0,
            has_collectives: false,
            modules: profiles(&cut),
        })
    });
    // AdamW reads and writes parameters, both moments and (beside 16 bit) the float32 copy, and reads gradients.
    let optimizer_bytes = if size == 2 { 30 } else { 28 } * 1_000_000;
    Ok(ModelProfile {
        made_from: settings.made_from.clone(),
        family: architecture.family.clone(),
        model: settings.model.clone(),
        is_estimated: true,
        device: Device {
            kind: "cuda".to_owned(),
            name: hardware.title.to_owned(),
            dtype: settings.dtype.clone(),
            memory_bytes: hardware.memory_bytes,
            ..Device::default()
        },
        hidden_bytes: architecture.llm.width * size,
        is_tied: architecture.llm.is_tied,
        network: network(hardware),
        modules: profiles(&modules),
        variants: variants.collect(),
        optimizer_ns_per_million: roofline.bytes_ns(optimizer_bytes).round() as u64,
        memory: MemoryReserve {
            context_bytes: CONTEXT_BYTES,
            allocator_overhead_permille: ALLOCATOR_OVERHEAD_PERMILLE,
        },
    })
}

/// A device at one dtype.
struct Roofline<'a> {
    hardware: &'a Hardware,
    peak_gflops: u64,
    /// Bytes of a value.
    size: u64,
}

impl Roofline<'_> {
    fn bytes_ns(&self, bytes: u128) -> f64 {
        let efficiency = self.hardware.efficiency.memory_permille as f64 / 1e3;
        bytes as f64 / (self.hardware.memory_bytes_per_s as f64 * efficiency) * 1e9
    }

    /// Time of a step without the host's part, in nanoseconds.
    fn operation_ns(&self, operation: &Operation, segments: &[u64], phase: Phase) -> f64 {
        let Work { flops, bytes, kernels } = operation.work(segments, phase, self.size);
        let efficiency = &self.hardware.efficiency;
        let (permille, share) = match operation.kind {
            Kind::Attention(attention) => {
                let permille = match phase {
                    Phase::Forward => efficiency.attention_forward_permille,
                    Phase::Input | Phase::Weight => efficiency.attention_backward_permille,
                };
                (permille, if attention.is_causal { causal_share(segments) } else { 1.0 })
            }
            _ => (efficiency.matmul_permille, 1.0),
        };
        // 10^9 operations a second are one a nanosecond.
        let flops_ns = flops as f64 * share / (self.peak_gflops as f64 * permille as f64 / 1e3);
        flops_ns.max(self.bytes_ns(bytes)) + kernels as f64 * KERNEL_NS
    }

    /// Time of steps one after the other, in nanoseconds.
    fn ns(&self, operations: &[&Operation], segments: &[u64], phase: Phase) -> u64 {
        let device: f64 = operations.iter().map(|o| self.operation_ns(o, segments, phase)).sum();
        let kernels: u64 = operations.iter().map(|o| o.work(segments, phase, self.size).kernels).sum();
        device.max(kernels as f64 * DISPATCH_NS).round() as u64
    }

    fn point(
        &self,
        module: &Module,
        operations: &[&Operation],
        total: u64,
        segments: &[u64],
    ) -> MeasuredPoint {
        let mut input_ns = self.ns(operations, segments, Phase::Input);
        let mut weight_ns = self.ns(operations, segments, Phase::Weight);
        if !module.has_input_gradient {
            // What stands between its weights is then for their sake alone.
            weight_ns += std::mem::take(&mut input_ns);
        }
        let widest = operations.iter().map(|o| o.workspace_bytes(segments, self.size)).max().unwrap_or(0);
        MeasuredPoint {
            size: total,
            forward_ns: self.ns(operations, segments, Phase::Forward).max(1),
            backward_ns: input_ns + weight_ns,
            input_ns,
            weight_ns,
            spread_ns: 0,
            activation_bytes: operations.iter().map(|o| o.kept_bytes(segments, self.size)).sum(),
            workspace_bytes: widest,
            split: Some(self.split(operations, segments, widest)),
            repeats: 0,
        }
    }

    /// What I and W hold: I at most all gradients that it queues beside the widest step of a whole backward.
    fn split(&self, operations: &[&Operation], segments: &[u64], widest: u64) -> SplitBytes {
        let sum = |of: fn(&Operation, &[u64], u64) -> u64| {
            operations.iter().map(|o| of(o, segments, self.size)).sum::<u64>()
        };
        let gradients = sum(Operation::queued_gradient_bytes);
        let weight = operations.iter().map(|o| o.num_parameters() * self.size).max().unwrap_or(0);
        SplitBytes {
            queued_bytes: gradients + sum(Operation::queued_input_bytes),
            input_workspace_bytes: widest + gradients,
            weight_workspace_bytes: weight,
        }
    }

    fn module(&self, module: &Module) -> ModuleProfile {
        let attention = module.attention().filter(|_| module.segment_tokens.is_none());
        let linear: Vec<&Operation> =
            module.operations.iter().filter(|o| attention.is_none_or(|attention| *o != attention)).collect();
        let segments = |total: u64| match module.segment_tokens {
            // Segments of one size; of a window the last may be cut short.
            Some(tokens) if total >= tokens => vec![tokens; (total / tokens) as usize],
            _ => vec![total],
        };
        let sizes = grid(module.unit_tokens, 2.0);
        let mut points: Vec<MeasuredPoint> =
            sizes.iter().map(|&total| self.point(module, &linear, total, &segments(total))).collect();
        let mut curve = Vec::new();
        if let Some(attention) = attention {
            // What attention keeps grows with tokens alone: it stands with the rest, which recomputation replaces.
            for point in &mut points {
                point.activation_bytes += attention.kept_bytes(&[point.size], self.size);
            }
            curve = grid(module.unit_tokens, 2f64.powf(0.25))
                .into_iter()
                .map(|size| MeasuredPoint {
                    activation_bytes: 0,
                    split: None,
                    ..self.point(module, &[attention], size, &[size])
                })
                .collect();
        }
        let num_parameters = module.num_parameters();
        ModuleProfile {
            count: module.count as u32,
            linear: MeasuredCurve { points, out_of_memory_at: None },
            attention: MeasuredCurve { points: curve, out_of_memory_at: None },
            segment_tokens: module
                .segment_tokens
                .filter(|_| module.attention().is_some())
                .map(|tokens| tokens as u32),
            recompute: self.recompute(module, attention, &sizes, &segments),
            num_parameters,
            parameter_bytes: num_parameters * self.size,
        }
    }

    /// Of layers: what selective and full recomputation change.
    fn recompute(
        &self,
        module: &Module,
        apart: Option<&Operation>,
        sizes: &[u64],
        segments: &dyn Fn(u64) -> Vec<u64>,
    ) -> BTreeMap<Recompute, Vec<RecomputePoint>> {
        if module.attention().is_none() {
            return BTreeMap::new();
        }
        let is_made = |o: &Operation| matches!(o.kind, Kind::Product(_) | Kind::Attention(_));
        let light: Vec<&Operation> = module.operations.iter().filter(|o| !is_made(o)).collect();
        let again: Vec<&Operation> =
            module.recomputed().iter().filter(|o| apart.is_none_or(|apart| *o != apart)).collect();
        let points = |operations: &[&Operation], keeps_made: bool| {
            let point = |&size: &u64| {
                let segments = segments(size);
                let made = |o: &Operation| o.made_bytes(&segments, self.size);
                let made: u64 = if keeps_made { module.operations.iter().map(made).sum() } else { 0 };
                RecomputePoint {
                    size,
                    extra_ns: self.ns(operations, &segments, Phase::Forward),
                    activation_bytes: size * module.input_width * self.size + made,
                }
            };
            sizes.iter().map(point).collect()
        };
        BTreeMap::from([
            (Recompute::Selective, points(&light, true)),
            (Recompute::Full, points(&again, false)),
        ])
    }
}

/// The share of the square that a causal mask leaves: `s (s + 1) / 2` of `s^2`.
fn causal_share(segments: &[u64]) -> f64 {
    let sum = |of: &dyn Fn(f64) -> f64| segments.iter().map(|&s| of(s as f64)).sum::<f64>();
    let whole = sum(&|s| s * s);
    if whole > 0.0 { sum(&|s| s * (s + 1.0) / 2.0) / whole } else { 1.0 }
}

/// Multiples of `unit` up to [`MAX_TOKENS`], each about `ratio` times the one before.
fn grid(unit: u64, ratio: f64) -> Vec<u64> {
    let last = (MAX_TOKENS / unit).max(1);
    let mut sizes = Vec::new();
    let mut exact = 1.0f64;
    while exact.round() < last as f64 {
        sizes.push(exact.round() as u64);
        exact *= ratio;
    }
    sizes.push(last);
    sizes.dedup();
    sizes.into_iter().map(|count| count * unit).collect()
}

/// Links as the table has them, times the efficiency.
fn network(hardware: &Hardware) -> Network {
    let reached = |bytes_per_s: u64| bytes_per_s / 1_000 * hardware.efficiency.network_permille;
    // Start of a collective, and one hop from device to device, in nanoseconds: assumed.
    let (start_ns, node_hop_ns, cluster_hop_ns) = (10_000, 2_000, 5_000);
    let mut links = Vec::new();
    let mut add = |collective, span, num_ranks: u32, bandwidth_bytes_per_s| {
        let hop_ns = if span == LinkSpan::Node { node_hop_ns } else { cluster_hop_ns };
        let hops = match collective {
            Collective::PointToPoint => 1,
            Collective::AllReduce => 2 * (u64::from(num_ranks) - 1),
            Collective::AllGather | Collective::ReduceScatter => u64::from(num_ranks) - 1,
        };
        links.push(LinkProfile {
            collective,
            span,
            num_ranks,
            latency_ns: start_ns + hops * hop_ns,
            bandwidth_bytes_per_s,
            points: Vec::new(),
        });
    };
    let (pair, cluster) = (reached(hardware.pair_bytes_per_s), reached(hardware.cluster_bytes_per_s));
    add(Collective::PointToPoint, LinkSpan::Node, 2, pair);
    add(Collective::PointToPoint, LinkSpan::Cluster, 2, cluster);
    for collective in [Collective::AllReduce, Collective::AllGather, Collective::ReduceScatter] {
        for num_ranks in [2, 4, 8] {
            // Through a switch a device's links all lead anywhere; without one, to each other device its own.
            let node = reached(hardware.node_bytes_per_s).min(pair * u64::from(num_ranks - 1));
            add(collective, LinkSpan::Node, num_ranks, node);
        }
        for num_ranks in [2, 4, 8, 16] {
            add(collective, LinkSpan::Cluster, num_ranks, cluster);
        }
    }
    let backend = match hardware.vendor {
        // RCCL goes by the same name in PyTorch.
        Vendor::Nvidia | Vendor::Amd => "nccl",
    };
    Network { backend: backend.to_owned(), is_assumed: true, links }
}
