//! Bytes of one module over sizes, as it runs.

use crate::error::CostError;
use crate::grid::Curve;
use crate::mode::Runs;
use dflop_types::{MeasuredCurve, MeasuredPoint, ModuleProfile, Recompute, SplitBytes};

/// Bytes with a mark whether a curve was asked outside its measured range.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Bytes {
    pub(crate) kept: u64,
    pub(crate) workspace: u64,
    /// Bytes of I and W; `None` where they were not counted.
    pub(crate) split: Option<SplitBytes>,
    /// What is kept where nothing is recomputed.
    whole: u64,
    pub(crate) is_extrapolated: bool,
}

impl Bytes {
    /// Bytes of I and W, for a result of `result` bytes.
    ///
    /// Where these bytes were not counted, upper bounds are taken. The inputs of all weights are at most what the
    /// forward kept. The gradients of their outputs are at most as much again, plus the gradient of the module's own
    /// result, which the next module keeps. I holds all those gradients beside what a whole backward holds; W holds
    /// at most what that backward holds.
    pub(crate) fn split(&self, result: u64) -> SplitBytes {
        self.split.unwrap_or_else(|| {
            let gradients = self.whole.saturating_add(result);
            SplitBytes {
                queued_bytes: self.whole.saturating_add(gradients),
                input_workspace_bytes: self.workspace.saturating_add(gradients),
                weight_workspace_bytes: self.workspace,
            }
        })
    }
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

    /// The linear part plus the part of all segments, and whether a curve was asked outside its measured range.
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

/// Bytes of I and W, in the order of [`SplitBytes`]: linear in tokens, as attention has no weights.
#[derive(Debug, Clone)]
struct SplitCurves {
    queued: Curve,
    input_workspace: Curve,
    weight_workspace: Curve,
}

impl SplitCurves {
    /// The curves of a module; `None` where one of its points lacks the split.
    fn new(module: &'static str, measured: &MeasuredCurve) -> Result<Option<Self>, CostError> {
        let points: Option<Vec<(u64, SplitBytes)>> =
            measured.points.iter().map(|point| Some((point.size, point.split?))).collect();
        let Some(points) = points else { return Ok(None) };
        let curve = |bytes: fn(&SplitBytes) -> u64| {
            envelope(module, "split", points.iter().map(|(size, split)| (*size, bytes(split))))
        };
        Ok(Some(Self {
            queued: curve(|split| split.queued_bytes)?,
            input_workspace: curve(|split| split.input_workspace_bytes)?,
            weight_workspace: curve(|split| split.weight_workspace_bytes)?,
        }))
    }

    /// What was counted for `total` tokens.
    fn at(&self, total: u64) -> SplitBytes {
        SplitBytes {
            queued_bytes: self.queued.at(total).value,
            input_workspace_bytes: self.input_workspace.at(total).value,
            weight_workspace_bytes: self.weight_workspace.at(total).value,
        }
    }
}

/// Bytes of one module.
#[derive(Debug, Clone)]
pub(crate) struct Footprint {
    kept: Part,
    workspace: Part,
    /// What is kept instead of `kept`; `None` where nothing is recomputed.
    recomputed: Option<Part>,
    /// `None` where they were not counted.
    split: Option<SplitCurves>,
    runs: Runs,
}

impl Footprint {
    /// The bytes of a measured module under how it is run. A module that no backward passes, neither for its own
    /// weights nor for a module before it, keeps nothing. Where its weights are frozen, nothing waits for W.
    ///
    /// # Errors
    /// [`CostError::Curve`]; the caller has seen to it that the mode of recomputation was measured.
    pub(crate) fn new(
        module: &'static str,
        measured: &ModuleProfile,
        runs: Runs,
        recompute: Recompute,
    ) -> Result<Self, CostError> {
        let kept = Part::new(module, measured, |point| point.activation_bytes)?;
        let recomputed = match measured.recompute.get(&recompute) {
            Some(points) if recompute != Recompute::None && runs != Runs::Forward => {
                let points = points.iter().map(|point| (point.size, point.activation_bytes));
                // The outputs of attention stay with those of the matrix products; in full nothing of it does.
                let segment = kept.segment.clone().filter(|_| recompute == Recompute::Selective);
                Some(Part { linear: envelope(module, "recompute", points)?, segment })
            }
            _ => None,
        };
        let workspace = Part::new(module, measured, |point| point.workspace_bytes)?;
        let split = SplitCurves::new(module, &measured.linear)?;
        Ok(Self { kept, workspace, recomputed, split, runs })
    }

    /// Bytes of one such module for `total` tokens in these segments (count, tokens); nothing for no tokens.
    ///
    /// Tensors that are not kept exist while the module runs, too: in a forward without a backward, and where the
    /// backward computes them again.
    pub(crate) fn at<S: Iterator<Item = (u64, u64)> + Clone>(&self, total: u64, segments: S) -> Bytes {
        if total == 0 {
            return Bytes { split: Some(SplitBytes::default()), ..Bytes::default() };
        }
        let (linear, attention, mut is_extrapolated) = self.kept.at(total, segments.clone());
        let all = linear.saturating_add(attention);
        let kept = match &self.recomputed {
            _ if self.runs == Runs::Forward => 0,
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
        let made_again = all.saturating_sub(kept);
        let workspace = pack.max(attention).saturating_add(made_again);
        let split = if matches!(self.runs, Runs::Weight | Runs::Whole) {
            self.split.as_ref().map(|curves| {
                let mut split = curves.at(total);
                let more = attention.saturating_sub(pack).saturating_add(made_again);
                split.input_workspace_bytes = split.input_workspace_bytes.saturating_add(more);
                split
            })
        } else {
            Some(SplitBytes { queued_bytes: 0, input_workspace_bytes: workspace, weight_workspace_bytes: 0 })
        };
        Bytes { kept, workspace, split, whole: all, is_extrapolated: is_extrapolated || outside }
    }
}
