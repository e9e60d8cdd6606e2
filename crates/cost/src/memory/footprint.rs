//! Bytes of one module over sizes, as it runs.

use crate::error::CostError;
use crate::grid::Curve;
use dflop_types::{MeasuredCurve, MeasuredPoint, ModuleProfile, Recompute};

/// What a module runs, as far as memory goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Runs {
    /// Whether its parameters train: gradients and optimizer states.
    pub(crate) is_trained: bool,
    /// Whether a backward passes it, for itself or for what stands before it: it then keeps activations.
    pub(crate) has_backward: bool,
    pub(crate) recompute: Recompute,
}

/// Bytes with a mark whether a curve was asked outside its measured range.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Bytes {
    pub(crate) kept: u64,
    pub(crate) workspace: u64,
    pub(crate) is_extrapolated: bool,
}

/// A quantity of bytes: what is linear in tokens, and what each segment adds.
#[derive(Debug, Clone)]
struct Part {
    linear: Curve,
    segment: Option<Curve>,
}

/// A curve that is nowhere below a measured point: bytes that fell with the size are raised, not averaged.
fn envelope(
    module: &'static str,
    part: &'static str,
    points: impl Iterator<Item = (u64, u64)>,
) -> Result<Curve, CostError> {
    let raised = points.scan(0u64, |most, (size, bytes)| {
        *most = bytes.max(*most);
        Some((size, *most))
    });
    Curve::new(raised).map_err(|source| CostError::Curve { module, part, source })
}

impl Part {
    fn new(
        module: &'static str,
        measured: &ModuleProfile,
        bytes: fn(&MeasuredPoint) -> u64,
    ) -> Result<Self, CostError> {
        let curve = |part, curve: &MeasuredCurve| {
            envelope(module, part, curve.points.iter().map(|point| (point.size, bytes(point))))
        };
        let segment = if measured.attention.points.is_empty() {
            None
        } else {
            Some(curve("attention", &measured.attention)?)
        };
        Ok(Self { linear: curve("linear", &measured.linear)?, segment })
    }

    fn at(&self, total: u64, segments: impl Iterator<Item = (u64, u64)>) -> (u64, bool) {
        let linear = self.linear.at(total);
        let mut sum = (linear.value, linear.extrapolated);
        if let Some(segment) = &self.segment {
            for (count, tokens) in segments.filter(|segment| segment.0 > 0 && segment.1 > 0) {
                let reading = segment.at(tokens);
                sum.0 = sum.0.saturating_add(reading.value.saturating_mul(count));
                sum.1 |= reading.extrapolated;
            }
        }
        sum
    }
}

/// Bytes of one module.
#[derive(Debug, Clone)]
pub(crate) struct Footprint {
    kept: Part,
    workspace: Part,
    /// What is kept instead of `kept`; `None` where nothing is recomputed.
    recomputed: Option<Part>,
    has_backward: bool,
    pub(crate) num_parameters: u64,
    pub(crate) parameter_bytes: u64,
    /// Number and bytes of the parameters that train.
    pub(crate) trained: (u64, u64),
}

impl Footprint {
    /// The bytes of a measured module that runs as `runs` says.
    pub(crate) fn new(module: &'static str, measured: &ModuleProfile, runs: Runs) -> Result<Self, CostError> {
        let kept = Part::new(module, measured, |point| point.activation_bytes)?;
        let recomputed = match runs.recompute {
            Recompute::Selective => Some(("selective", kept.segment.clone())),
            // Of attention nothing is kept; in `selective` it stays with the matrix products' outputs.
            Recompute::Full => Some(("full", None)),
            Recompute::None => None,
        };
        let recomputed = match recomputed {
            Some((mode, segment)) => {
                let points = measured.recompute.get(&runs.recompute);
                let points = points.ok_or(CostError::RecomputeNotMeasured { module, mode })?;
                let points = points.iter().map(|point| (point.size, point.activation_bytes));
                Some(Part { linear: envelope(module, "recompute", points)?, segment })
            }
            None => None,
        };
        let all = (measured.num_parameters, measured.parameter_bytes);
        Ok(Self {
            kept,
            workspace: Part::new(module, measured, |point| point.workspace_bytes)?,
            recomputed,
            has_backward: runs.has_backward,
            num_parameters: measured.num_parameters,
            parameter_bytes: measured.parameter_bytes,
            trained: if runs.is_trained { all } else { (0, 0) },
        })
    }

    /// What one of it takes for `total` tokens in these segments (count, tokens); nothing for no tokens.
    ///
    /// What is not kept all the same exists while the module runs: in a forward without a backward, and where
    /// the backward makes it again.
    pub(crate) fn at<S: Iterator<Item = (u64, u64)> + Clone>(&self, total: u64, segments: S) -> Bytes {
        if total == 0 {
            return Bytes::default();
        }
        let (all, mut is_extrapolated) = self.kept.at(total, segments.clone());
        let kept = match &self.recomputed {
            _ if !self.has_backward => 0,
            None => all,
            Some(part) => {
                let (kept, outside) = part.at(total, segments.clone());
                is_extrapolated |= outside;
                kept
            }
        };
        let (workspace, outside) = self.workspace.at(total, segments);
        Bytes {
            kept,
            workspace: workspace.saturating_add(all.saturating_sub(kept)),
            is_extrapolated: is_extrapolated || outside,
        }
    }
}
