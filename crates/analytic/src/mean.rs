//! The mean of two kinds of layers, as which a model profile has the layers of a backbone.
//!
//! A stage's layers are predicted with it. That is exact for stages that hold both kinds in the backbone's own proportion, such
//! as any multiple of four layers where every fourth has full attention.

use dflop_types::{MeasuredCurve, MeasuredPoint, ModuleProfile, RecomputePoint, SplitBytes};

/// How many layers there are of each kind.
#[derive(Clone, Copy)]
struct Counts(u64, u64);

impl Counts {
    /// The mean, rounded up: no number of bytes or parameters is then too small.
    fn mean(self, one: u64, other: u64) -> u64 {
        let Self(n, m) = self;
        let sum = u128::from(n) * u128::from(one) + u128::from(m) * u128::from(other);
        sum.div_ceil(u128::from(n + m)) as u64
    }
}

/// The mean of `full` and `other`, two layers that were timed at the same sizes; `other` may have no attention apart. What
/// is held for a while is the more of both.
pub(super) fn mean_layer(full: &ModuleProfile, other: &ModuleProfile) -> ModuleProfile {
    let counts = Counts(u64::from(full.count), u64::from(other.count));
    let pairs = full.linear.points.iter().zip(&other.linear.points);
    let recompute = full.recompute.iter().filter_map(|(mode, points)| {
        let pairs = points.iter().zip(other.recompute.get(mode)?);
        let mean = |(one, other): (&RecomputePoint, &RecomputePoint)| RecomputePoint {
            size: one.size,
            extra_ns: counts.mean(one.extra_ns, other.extra_ns),
            activation_bytes: counts.mean(one.activation_bytes, other.activation_bytes),
        };
        Some((*mode, pairs.map(mean).collect()))
    });
    let nothing = MeasuredPoint::default();
    let of_other = other.attention.points.iter().chain(std::iter::repeat(&nothing));
    let attention =
        full.attention.points.iter().zip(of_other).map(|(one, other)| mean_point(counts, one, other));
    ModuleProfile {
        count: full.count + other.count,
        linear: MeasuredCurve {
            points: pairs.map(|(one, other)| mean_point(counts, one, other)).collect(),
            out_of_memory_at: None,
        },
        attention: MeasuredCurve { points: attention.collect(), out_of_memory_at: None },
        segment_tokens: None,
        recompute: recompute.collect(),
        num_parameters: counts.mean(full.num_parameters, other.num_parameters),
        parameter_bytes: counts.mean(full.parameter_bytes, other.parameter_bytes),
        // Layers of either kind have the same.
        experts: full.experts,
    }
}

fn mean_point(counts: Counts, one: &MeasuredPoint, other: &MeasuredPoint) -> MeasuredPoint {
    let mean = |of: fn(&MeasuredPoint) -> u64| counts.mean(of(one), of(other));
    let (input_ns, weight_ns) = (mean(|point| point.input_ns), mean(|point| point.weight_ns));
    let split = one.split.zip(other.split).map(|(one, other)| SplitBytes {
        queued_bytes: counts.mean(one.queued_bytes, other.queued_bytes),
        input_workspace_bytes: one.input_workspace_bytes.max(other.input_workspace_bytes),
        weight_workspace_bytes: one.weight_workspace_bytes.max(other.weight_workspace_bytes),
    });
    MeasuredPoint {
        size: one.size,
        forward_ns: mean(|point| point.forward_ns),
        backward_ns: input_ns + weight_ns,
        input_ns,
        weight_ns,
        activation_bytes: mean(|point| point.activation_bytes),
        workspace_bytes: one.workspace_bytes.max(other.workspace_bytes),
        split,
        ..*one
    }
}
