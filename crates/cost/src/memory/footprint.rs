//! Bytes of one module over sizes, as it runs.

use crate::error::CostError;
use crate::grid::Curve;
use dflop_types::{MeasuredCurve, MeasuredPoint, ModuleProfile, Recompute};

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

    /// The linear part and that of all segments, and whether a curve was asked outside its measured range.
    fn at(&self, total: u64, segments: impl Iterator<Item = (u64, u64)>) -> (u64, u64, bool) {
        let linear = self.linear.at(total);
        let (mut sum, mut is_extrapolated) = (0u64, linear.extrapolated);
        if let Some(segment) = &self.segment {
            for (count, tokens) in segments.filter(|segment| segment.0 > 0 && segment.1 > 0) {
                let reading = segment.at(tokens);
                sum = sum.saturating_add(reading.value.saturating_mul(count));
                is_extrapolated |= reading.extrapolated;
            }
        }
        (linear.value, sum, is_extrapolated)
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
}

impl Footprint {
    /// The bytes of a measured module. `has_backward`: a backward passes it, for itself or for what stands before it;
    /// else it keeps nothing.
    ///
    /// # Errors
    /// [`CostError::Curve`]; the caller has seen to it that the mode of recomputation was measured.
    pub(crate) fn new(
        module: &'static str,
        measured: &ModuleProfile,
        has_backward: bool,
        recompute: Recompute,
    ) -> Result<Self, CostError> {
        let kept = Part::new(module, measured, |point| point.activation_bytes)?;
        let recomputed = match measured.recompute.get(&recompute) {
            Some(points) if recompute != Recompute::None && has_backward => {
                let points = points.iter().map(|point| (point.size, point.activation_bytes));
                // The outputs of attention stay with those of the matrix products; in full nothing of it does.
                let segment = kept.segment.clone().filter(|_| recompute == Recompute::Selective);
                Some(Part { linear: envelope(module, "recompute", points)?, segment })
            }
            _ => None,
        };
        let workspace = Part::new(module, measured, |point| point.workspace_bytes)?;
        Ok(Self { kept, workspace, recomputed, has_backward })
    }

    /// What one of it takes for `total` tokens in these segments (count, tokens); nothing for no tokens.
    ///
    /// What is not kept all the same exists while the module runs: in a forward without a backward, and where
    /// the backward makes it again.
    pub(crate) fn at<S: Iterator<Item = (u64, u64)> + Clone>(&self, total: u64, segments: S) -> Bytes {
        if total == 0 {
            return Bytes::default();
        }
        let (linear, attention, mut is_extrapolated) = self.kept.at(total, segments.clone());
        let all = linear.saturating_add(attention);
        let kept = match &self.recomputed {
            _ if !self.has_backward => 0,
            None => all,
            Some(part) => {
                let (linear, attention, outside) = part.at(total, segments.clone());
                is_extrapolated |= outside;
                linear.saturating_add(attention)
            }
        };
        // That of the linear part was measured over packs whole, attention included: only segments far from
        // those of the packs need more.
        let (pack, attention, outside) = self.workspace.at(total, segments);
        Bytes {
            kept,
            workspace: pack.max(attention).saturating_add(all.saturating_sub(kept)),
            is_extrapolated: is_extrapolated || outside,
        }
    }
}
