//! Times of modules from their work and the rates of a device.
//!
//! ```text
//! product   = as measured, by its sizes                                    where its chip was measured, in 16 bit
//! attention = operations / (peak * efficiency of its length), as measured  likewise
//! step      = max(operations / (peak * efficiency), bytes / (bandwidth * efficiency)) + kernels * KERNEL_NS    else
//! module    = max(sum over steps, kernels * dispatch)
//! ```
//!
//! Attention over the segments of a microbatch is one kernel: its start is counted with the rest of the layer, whatever the
//! number of segments.

use crate::hardware::Hardware;
use crate::links::Reduce;
use crate::measured::Measured;
use crate::modules::Module;
use crate::operations::{Attention, Kind, Operation};
use crate::product::Product;
use crate::work::Phase;
use dflop_types::{MeasuredCurve, MeasuredPoint, ModuleProfile, Recompute, RecomputePoint, SplitBytes};
use std::collections::BTreeMap;

/// Start and end of a kernel on the device, in nanoseconds: assumed.
const KERNEL_NS: f64 = 1_500.0;
/// How much longer a product takes whose rows do not all begin at a multiple of 16 bytes, which the tensor cores' loads
/// want. Read off the head of the GPT runs of `results/2026-11_estimate_runs.md`: their vocabulary of 50,257.
const UNALIGNED: f64 = 2.75;
/// Rows that a kernel of products computes at once: assumed. Of each expert's rows the last such tile is filled by half on
/// the average, and a few rows cost as much as a whole one.
const TILE_ROWS: u64 = 128;
/// The largest sizes of the grids, in tokens: beyond them predictions are marked as extrapolated.
const MAX_TOKENS: u64 = 1 << 18;

/// A device at one dtype.
#[derive(Clone, Copy)]
pub(crate) struct Roofline<'a> {
    pub(crate) hardware: &'a Hardware,
    pub(crate) measured: Option<&'static Measured>,
    pub(crate) peak_gflops: u64,
    /// Bytes of a value.
    pub(crate) size: u64,
    pub(crate) dispatch_ns: f64,
    pub(crate) reduce: Option<Reduce<'a>>,
    /// Whether causal attention is that over packed samples, as PyTorch has it (`varlen_attn`).
    pub(crate) is_packed: bool,
}

/// How much longer PyTorch's attention over packed samples takes on the H100 than the kernel of the table, forward and
/// backward, by the size of heads: `FlashAttention-2` beside a kernel made for Hopper. Measured with PyTorch 2.11 at the
/// longest segments, 8,192 and 7,522 tokens (`results/2026-11_h100.md`).
fn packed_ratio(head_size: u64) -> (f64, f64) {
    if head_size > 96 { (1.7, 1.65) } else { (2.2, 2.0) }
}

impl Roofline<'_> {
    pub(crate) fn bytes_ns(&self, bytes: u128) -> f64 {
        let efficiency = self.hardware.efficiency.memory_permille as f64 / 1e3;
        bytes as f64 / (self.hardware.memory_bytes_per_s as f64 * efficiency) * 1e9
    }

    /// Time of `flops` at this share of the peak, in nanoseconds: 10^9 operations a second are one a nanosecond.
    fn flops_ns(&self, flops: u128, share: f64) -> f64 {
        flops as f64 / (self.peak_gflops as f64 * share)
    }

    /// Time of a step without the host's part and without its kernels' starts, in nanoseconds.
    fn operation_ns(&self, operation: &Operation, segments: &[u64], phase: Phase) -> f64 {
        let work = operation.work(segments, phase, self.size);
        let memory_ns = self.bytes_ns(work.bytes);
        let constant = self.hardware.efficiency.matmul_permille as f64 / 1e3;
        match operation.kind {
            Kind::Reduce { .. } => match (self.reduce, operation.reduced_bytes(segments, phase, self.size)) {
                (Some(reduce), bytes) if bytes > 0 => reduce.ns(bytes),
                _ => 0.0,
            },
            Kind::Attention(attention) => {
                self.attention_ns(attention, &operation.segments(segments), phase).max(memory_ns)
            }
            Kind::Product(product) if work.flops > 0 => {
                let starts_ns = work.kernels as f64 * KERNEL_NS;
                let rows = operation.rows.of(segments);
                // Experts fill tiles of their own, and read weights of their own.
                let filled = filled_rows(product, rows);
                let flops = (work.flops as f64 * filled as f64 / rows as f64) as u128;
                match self.measured {
                    Some(measured) if product.num_experts > 1 => {
                        let beside = product.summed_bytes(phase, self.size);
                        let own_ns = experts_ns(measured, product, rows, phase);
                        own_ns.max(self.bytes_ns(work.bytes - beside)) + self.bytes_ns(beside) + starts_ns
                            - KERNEL_NS
                    }
                    Some(measured) => {
                        // The product has its own start.
                        let beside_ns = self.bytes_ns(product.summed_bytes(phase, self.size));
                        product_ns(measured, product, rows, phase) + beside_ns + starts_ns - KERNEL_NS
                    }
                    None => self.flops_ns(flops, constant).max(memory_ns) + starts_ns,
                }
            }
            _ => self.flops_ns(work.flops, constant).max(memory_ns) + work.kernels as f64 * KERNEL_NS,
        }
    }

    /// Time of attention by its operations, which a causal mask leaves a share of; each length has its own efficiency.
    fn attention_ns(&self, attention: Attention, segments: &[u64], phase: Phase) -> f64 {
        let efficiency = &self.hardware.efficiency;
        let permille = match phase {
            Phase::Forward => efficiency.attention_forward_permille,
            Phase::Input | Phase::Weight => efficiency.attention_backward_permille,
        };
        let one = |&tokens: &u64| {
            let share = match self.measured {
                // The backward is slower by as much as is assumed where nothing was measured.
                Some(measured) => {
                    measured.attention_utilization(
                        attention.is_causal,
                        attention.head_size,
                        attention.seen(tokens),
                    ) * permille as f64
                        / efficiency.attention_forward_permille as f64
                }
                None => permille as f64 / 1e3,
            };
            let left = if attention.is_causal { causal_share(tokens, attention.seen(tokens)) } else { 1.0 };
            self.flops_ns(attention.flops(&[tokens], phase), share) * left
        };
        // Segments are mostly of one length.
        let sum_ns = match segments.split_first() {
            Some((first, rest)) if rest.iter().all(|tokens| tokens == first) => {
                one(first) * segments.len() as f64
            }
            _ => segments.iter().map(one).sum(),
        };
        if !(self.is_packed && attention.is_causal && self.hardware.chip == Some("h100")) {
            return sum_ns;
        }
        let (forward, backward) = packed_ratio(attention.head_size);
        let tokens: u64 = segments.iter().sum();
        // Before it, heads of keys and values are repeated; behind its backward, their gradients are summed.
        let is_repeated = attention.num_key_value_heads < attention.num_heads;
        let repeated =
            if is_repeated { 2 * attention.num_heads * attention.head_size * self.size } else { 0 };
        let moved_ns = self.bytes_ns(u128::from(2 * repeated) * u128::from(tokens));
        match phase {
            Phase::Forward => sum_ns * forward + moved_ns,
            Phase::Input => sum_ns * backward + 2.0 * moved_ns,
            Phase::Weight => sum_ns,
        }
    }

    /// Time of steps one after the other.
    fn time(&self, operations: &[&Operation], starts: Starts<'_>, segments: &[u64], phase: Phase) -> Time {
        let device: f64 = operations.iter().map(|o| self.operation_ns(o, segments, phase)).sum();
        let kernels = |o: &Operation| o.work(segments, phase, self.size).kernels as f64;
        let is_attention = |o: &&&Operation| matches!(o.kind, Kind::Attention(_));
        let own: f64 = operations.iter().map(|o| kernels(o)).sum();
        let attention: f64 = operations.iter().filter(is_attention).map(|o| kernels(o)).sum();
        let (started, more) = match starts {
            Starts::Own => (own, attention),
            Starts::And(apart) => (own + kernels(apart), kernels(apart)),
            Starts::Elsewhere => (0.0, 0.0),
        };
        Time { device_ns: device + more * KERNEL_NS, host_ns: started * self.dispatch_ns }
    }

    /// Time of a backward: I and W follow each other closely, and the host runs ahead through both.
    fn backward(&self, operations: &[&Operation], starts: Starts<'_>, segments: &[u64]) -> [Time; 2] {
        [Phase::Input, Phase::Weight].map(|phase| self.time(operations, starts, segments, phase))
    }

    fn point(
        &self,
        module: &Module,
        operations: &[&Operation],
        starts: Starts<'_>,
        segments: &[u64],
    ) -> MeasuredPoint {
        let forward = self.time(operations, starts, segments, Phase::Forward);
        let [input, weight] = self.backward(operations, starts, segments);
        // Forwards and backwards take turns, and the host runs ahead through all of them: the sum is that of the slower of
        // the two, shared out by what each would take alone.
        let alone_ns = [forward.ns(), input.ns(), weight.ns()];
        let sum_ns: f64 = alone_ns.iter().sum();
        let ratio = if sum_ns > 0.0 { forward.and(input).and(weight).ns() / sum_ns } else { 0.0 };
        let [forward_ns, mut input_ns, mut weight_ns] = alone_ns.map(|ns| (ns * ratio).round() as u64);
        let joint_ns = (weight_ns as f64 * self.joint_share(operations, segments)).round() as u64;
        (input_ns, weight_ns) = (input_ns + joint_ns, weight_ns - joint_ns);
        if !module.has_input_gradient {
            // What lies between its weights is then needed for those weights alone.
            weight_ns += std::mem::take(&mut input_ns);
        }
        let held = logits_at_once(operations, segments);
        if held != segments {
            // Logits of a chunk are freed, and made again in the backward.
            input_ns += forward_ns;
        }
        let at_once = |o: &Operation| if is_norm(o) { segments } else { &held };
        let widest = operations.iter().map(|o| o.workspace_bytes(at_once(o), self.size)).max().unwrap_or(0);
        let kept = |o: &&Operation| {
            o.kept_bytes(if matches!(o.kind, Kind::Loss { .. }) { &held } else { segments }, self.size)
        };
        MeasuredPoint {
            size: segments.iter().sum(),
            forward_ns: forward_ns.max(1),
            backward_ns: input_ns + weight_ns,
            input_ns,
            weight_ns,
            spread_ns: 0,
            activation_bytes: operations.iter().map(kept).sum(),
            workspace_bytes: widest,
            split: Some(self.split(operations, &held, widest)),
            repeats: 0,
        }
    }

    /// The share of gradients of weights that are computed with those of what the module reads.
    fn joint_share(&self, operations: &[&Operation], segments: &[u64]) -> f64 {
        let is_joint = |o: &&&Operation| {
            matches!(o.kind, Kind::Convolution(_) | Kind::Product(Product { is_split: false, .. }))
        };
        let ns = |o: &&Operation| self.operation_ns(o, segments, Phase::Weight);
        let joint: f64 = operations.iter().filter(is_joint).map(ns).sum();
        if joint > 0.0 { joint / operations.iter().map(ns).sum::<f64>() } else { 0.0 }
    }

    /// What I and W hold: I at most all gradients that it queues beside the widest step of a whole backward.
    fn split(&self, operations: &[&Operation], segments: &[u64], widest: u64) -> SplitBytes {
        let sum = |of: fn(&Operation, &[u64], u64) -> u64| {
            operations.iter().map(|o| of(o, segments, self.size)).sum::<u64>()
        };
        let gradients = sum(Operation::queued_gradient_bytes);
        let waits = |o: &&&Operation| !matches!(o.kind, Kind::Product(product) if !product.waits());
        let weights = operations.iter().filter(waits).map(|o| o.num_parameters() * self.size);
        let weight = weights.max().unwrap_or(0);
        SplitBytes {
            queued_bytes: gradients + sum(Operation::queued_input_bytes),
            input_workspace_bytes: widest + gradients,
            weight_workspace_bytes: weight,
        }
    }

    pub(crate) fn module(&self, module: &Module) -> ModuleProfile {
        let attention = module.attention().filter(|_| module.segment_tokens.is_none());
        let linear: Vec<&Operation> =
            module.operations.iter().filter(|o| attention.is_none_or(|attention| *o != attention)).collect();
        let segments = |total: u64| match module.segment_tokens {
            // Segments of one size; of a window the last may be cut short.
            Some(tokens) if total >= tokens => vec![tokens; (total / tokens) as usize],
            _ => vec![total],
        };
        let sizes = grid(module.unit_tokens, 2.0);
        let starts = attention.map_or(Starts::Own, Starts::And);
        let point =
            |&size: &u64| MeasuredPoint { size, ..self.point(module, &linear, starts, &segments(size)) };
        let mut points = rising(sizes.iter().map(point).collect());
        let mut curve = Vec::new();
        if let Some(attention) = attention {
            // What attention keeps grows with the tokens alone, so it is counted with the rest that recomputation replaces.
            for point in &mut points {
                point.activation_bytes += attention.kept_bytes(&[point.size], self.size);
            }
            let sizes = grid(module.unit_tokens, 2f64.powf(0.25));
            let points = sizes
                .into_iter()
                .map(|size| MeasuredPoint {
                    activation_bytes: 0,
                    split: None,
                    ..self.point(module, &[attention], Starts::Elsewhere, &[size])
                })
                .collect();
            curve = rising(points);
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
            recompute: self.recompute(module, &linear, attention, &sizes, &segments),
            num_parameters,
            parameter_bytes: num_parameters * self.size,
            experts: module.experts(self.size),
        }
    }

    /// Of layers: what selective and full recomputation change.
    fn recompute(
        &self,
        module: &Module,
        linear: &[&Operation],
        apart: Option<&Operation>,
        sizes: &[u64],
        segments: &dyn Fn(u64) -> Vec<u64>,
    ) -> BTreeMap<Recompute, Vec<RecomputePoint>> {
        if !module.name.ends_with("_layer") {
            return BTreeMap::new();
        }
        let is_made =
            |o: &Operation| matches!(o.kind, Kind::Product(_) | Kind::Attention(_) | Kind::Scores(_));
        let light: Vec<&Operation> = module.operations.iter().filter(|o| !is_made(o)).collect();
        let again: Vec<&Operation> =
            module.recomputed().iter().filter(|o| apart.is_none_or(|apart| *o != apart)).collect();
        // Attention apart is not computed here, but started.
        let with = apart.map_or(Starts::Own, Starts::And);
        let points = |operations: &[&Operation], starts: Starts<'_>, keeps_made: bool| {
            let point = |&size: &u64| {
                let segments = segments(size);
                let made = |o: &Operation| o.made_bytes(&segments, self.size);
                let made: u64 = if keeps_made { module.operations.iter().map(made).sum() } else { 0 };
                // It runs in the backward, through which the host runs ahead.
                let [input, weight] = self.backward(linear, with, &segments);
                let backward = input.and(weight);
                let again = backward.and(self.time(operations, starts, &segments, Phase::Forward));
                RecomputePoint {
                    size,
                    extra_ns: (again.ns() - backward.ns()).round() as u64,
                    activation_bytes: size * module.input_width * self.size + made,
                }
            };
            sizes.iter().map(point).collect()
        };
        BTreeMap::from([
            (Recompute::Selective, points(&light, Starts::Own, true)),
            (Recompute::Full, points(&again, with, false)),
        ])
    }
}

/// Points of ascending size, none with less time than one before: a measured kernel may be faster on more rows.
fn rising(mut points: Vec<MeasuredPoint>) -> Vec<MeasuredPoint> {
    for at in 1..points.len() {
        let (before, point) = (points[at - 1], &mut points[at]);
        point.forward_ns = point.forward_ns.max(before.forward_ns);
        point.input_ns = point.input_ns.max(before.input_ns);
        point.weight_ns = point.weight_ns.max(before.weight_ns);
        point.backward_ns = point.input_ns + point.weight_ns;
    }
    points
}

/// Time of a phase of a product as its chip was measured, in nanoseconds. Its gradients are products of the same three
/// sizes in other places; that they take as long as a forward of those sizes is assumed.
fn product_ns(measured: &Measured, product: Product, rows: u64, phase: Phase) -> f64 {
    let (inputs, outputs) = (product.inputs, product.outputs);
    let ns = match phase {
        Phase::Forward => measured.product_ns(rows, outputs, inputs),
        Phase::Input => measured.product_ns(rows, inputs, outputs),
        Phase::Weight => measured.product_ns(inputs, outputs, rows),
    };
    // 16 bytes are eight values.
    if (inputs | outputs).is_multiple_of(8) { ns } else { ns * UNALIGNED }
}

/// Rows that experts compute for these, which are dealt out evenly; all rows where there is one matrix.
fn filled_rows(product: Product, rows: u64) -> u64 {
    if product.num_experts == 1 {
        return rows;
    }
    let experts = product.num_read(rows);
    experts * (rows / experts + TILE_ROWS / 2).max(TILE_ROWS)
}

/// Time of a phase of products of experts in one kernel, in nanoseconds: as long as one product with as many rows, tiles
/// that are not full counted as full. That the kernel reaches the rate of one product is assumed.
fn experts_ns(measured: &Measured, product: Product, rows: u64, phase: Phase) -> f64 {
    let experts = product.num_read(rows);
    match phase {
        Phase::Forward | Phase::Input => product_ns(measured, product, filled_rows(product, rows), phase),
        // One below the other, each of its own rows alone.
        Phase::Weight => {
            measured.product_ns(experts * product.inputs, product.outputs, rows.div_ceil(experts))
        }
    }
}

/// Bytes of logits in float32 that the loss makes at a time on a GPU; `LOGITS_BYTES_MAX` of `models/loss.py`.
const LOGITS_BYTES_MAX: u64 = 1 << 30;

/// The rows whose logits are in memory at a time; all `segments` where there is no loss.
fn logits_at_once(operations: &[&Operation], segments: &[u64]) -> Vec<u64> {
    let classes = operations
        .iter()
        .find_map(|o| if let Kind::Loss { classes, .. } = o.kind { Some(classes) } else { None });
    match classes {
        Some(classes) => {
            vec![segments.iter().sum::<u64>().min((LOGITS_BYTES_MAX / (4 * classes.max(1))).max(1))]
        }
        None => segments.to_vec(),
    }
}

const fn is_norm(operation: &Operation) -> bool {
    matches!(operation.kind, Kind::Norm(..))
}

/// The share of `s w` that a causal mask leaves where a token sees `w` at most: `w (w + 1) / 2 + (s - w) w`. Of the whole
/// square, where `w` is `s`, it is `(s + 1) / 2 s`.
fn causal_share(tokens: u64, seen: u64) -> f64 {
    let (s, w) = (tokens.max(1) as f64, seen.max(1) as f64);
    1.0 - (w - 1.0) / (2.0 * s)
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

/// Time of some steps on the device, and of the host to start them.
#[derive(Debug, Clone, Copy)]
struct Time {
    device_ns: f64,
    host_ns: f64,
}

impl Time {
    /// The host runs ahead: who is slower decides.
    const fn ns(self) -> f64 {
        self.device_ns.max(self.host_ns)
    }

    fn and(self, after: Self) -> Self {
        Self { device_ns: self.device_ns + after.device_ns, host_ns: self.host_ns + after.host_ns }
    }
}

/// Whose kernels are started with steps that are timed.
#[derive(Debug, Clone, Copy)]
enum Starts<'a> {
    /// Their own.
    Own,
    /// Their own, and those of this one, which is timed apart.
    And(&'a Operation),
    /// They are counted with others.
    Elsewhere,
}
