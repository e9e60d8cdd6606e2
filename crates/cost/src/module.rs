//! One measured module as it runs under given settings: its parts, and what ranks do together in it.

use crate::dealt::Dealt;
use crate::error::CostError;
use crate::grid::marginal;
use crate::memory::footprint::Footprint;
use crate::mode::{Mode, Runs};
use crate::network::{Basis, Route};
use crate::phases::Phases;
use crate::prediction::Prediction;
use crate::repair::Repair;
use dflop_types::{MeasuredPoint, ModelProfile, ModuleProfile, Recompute, Tower};

/// Whether a module is one of the layers that are gathered one by one; the others are gathered together.
pub(crate) fn is_layer(name: &str) -> bool {
    name.ends_with("_layer")
}

/// Where a module of the encoder stands in the forward: encoder by encoder, its embedding, its layers, its projector.
pub(crate) fn in_forward(name: &str, module: &Module) -> (Tower, bool, bool) {
    (module.tower, ModelProfile::is_projector(name), is_layer(name))
}

/// What ranks of one layer do together, where its times do not hold it.
#[derive(Debug, Clone)]
pub(crate) struct Collectives {
    pub(crate) route: Route,
    pub(crate) bytes_per_token: u64,
    /// Halves of an all-reduce in the forward.
    pub(crate) forward_halves: u64,
    /// Those for the gradient of the input.
    pub(crate) backward_halves: u64,
}

/// Time of what ranks of one layer do together in it, in nanoseconds.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Sent {
    pub(crate) forward_ns: u64,
    pub(crate) backward_ns: u64,
    basis: Basis,
}

/// One measured module.
#[derive(Debug, Clone)]
pub(crate) struct Module {
    /// The encoder to which it belongs, if it belongs to one.
    pub(crate) tower: Tower,
    linear: Phases,
    /// `None` where the module has no attention, or where `linear` holds it.
    attention: Option<Phases>,
    /// Tokens of the only segments that `linear` was measured with.
    segment_tokens: Option<u64>,
    pub(crate) collectives: Option<Collectives>,
    runs: Runs,
    pub(crate) num_parameters: u64,
    pub(crate) parameter_bytes: u64,
    /// Parameters that train.
    pub(crate) num_trained_parameters: u64,
    /// Bytes of their gradients, which are added up and summed over ranks in float32, whatever type layers compute in.
    pub(crate) gradient_bytes: u64,
    /// Of these, what a rank has of experts that are dealt out; nothing where they are not.
    pub(crate) dealt: Dealt,
    pub(crate) footprint: Footprint,
    /// Whether I and W were measured separately.
    pub(crate) has_split: bool,
    pub(crate) repairs: Vec<Repair>,
}

/// Bytes of the gradients of so many parameters.
pub(crate) const fn gradient_bytes(num_parameters: u64) -> u64 {
    num_parameters.saturating_mul(4)
}

impl Module {
    /// The module of a profile as `mode` runs it.
    ///
    /// # Errors
    /// [`CostError`], by the name of the module and curve at fault.
    pub(crate) fn new(
        mode: Mode,
        measured: &ModuleProfile,
        collectives: Option<Collectives>,
    ) -> Result<Self, CostError> {
        let module = mode.name;
        let mut repairs = Vec::new();
        let extra = match mode.recompute {
            Recompute::None => None,
            _ if mode.runs == Runs::Forward => None,
            recompute => Some(measured.recompute.get(&recompute).ok_or_else(|| {
                let measured = measured.recompute.keys().copied().collect();
                CostError::RecomputeNotMeasured { module, mode: recompute, measured }
            })?),
        };
        let linear = Phases::new(mode, "linear", &measured.linear, extra.map(Vec::as_slice), &mut repairs)?;
        let attention = if measured.attention.points.is_empty() {
            None
        } else {
            Some(Phases::new(mode, "attention", &measured.attention, None, &mut repairs)?)
        };
        let any = |of: fn(&MeasuredPoint) -> u64| measured.linear.points.iter().map(of).any(|ns| ns > 0);
        let is_trained = matches!(mode.runs, Runs::Weight | Runs::Whole);
        Ok(Self {
            footprint: Footprint::new(module, measured, mode.runs, mode.recompute)?,
            tower: ModelProfile::tower_of(module),
            linear,
            attention,
            // The windows of such a layer are the model's own, whatever the segments.
            segment_tokens: measured
                .segment_tokens
                .filter(|_| module != ModelProfile::WINDOW_LAYER)
                .map(u64::from),
            collectives,
            runs: mode.runs,
            num_parameters: measured.num_parameters,
            parameter_bytes: measured.parameter_bytes,
            num_trained_parameters: if is_trained { measured.num_parameters } else { 0 },
            gradient_bytes: if is_trained { gradient_bytes(measured.num_parameters) } else { 0 },
            dealt: Dealt::default(),
            has_split: any(|p| p.input_ns) || any(|p| p.weight_ns) || !any(|p| p.backward_ns),
            repairs,
        })
    }

    /// Which of its passes it runs.
    pub(crate) const fn runs(&self) -> Runs {
        self.runs
    }

    /// The linear part of one run over `size` tokens, collectives included; nothing at size 0.
    ///
    /// *Complexity*: O(log n).
    pub(crate) fn linear(&self, size: u64) -> Prediction {
        if size == 0 {
            return Prediction::default();
        }
        let mut one = self.linear.one(size);
        let sent = self.sent(size);
        one.forward_ns = one.forward_ns.saturating_add(sent.forward_ns);
        one.lengthen(sent.backward_ns, self.runs == Runs::Weight);
        one.extrapolated |= sent.basis == Basis::Extrapolated;
        one.assumed |= sent.basis == Basis::Assumed;
        one
    }

    /// What the ranks of the layer do together for `size` tokens: nothing beside it hides any of it.
    pub(crate) fn sent(&self, size: u64) -> Sent {
        let Some(collectives) = &self.collectives else { return Sent::default() };
        let transfer = collectives.route.transfer(size.saturating_mul(collectives.bytes_per_token));
        let of = |halves: u64| transfer.ns.saturating_mul(halves) / 2;
        let backward_halves = if self.runs == Runs::Forward { 0 } else { collectives.backward_halves };
        Sent {
            forward_ns: of(collectives.forward_halves),
            backward_ns: of(backward_halves),
            basis: transfer.basis,
        }
    }

    /// The attention of one run over one segment, with the mark of a segment that `linear` was not measured with;
    /// nothing at size 0.
    ///
    /// *Complexity*: O(log n).
    pub(crate) fn segment(&self, tokens: u64) -> Prediction {
        if tokens == 0 {
            return Prediction::default();
        }
        let mut one = self.attention.as_ref().map_or_else(Prediction::default, |a| a.one(tokens));
        one.extrapolated |= self.is_foreign(tokens);
        one
    }

    /// Whether `linear` holds the attention of other segments than this.
    fn is_foreign(&self, tokens: u64) -> bool {
        tokens > 0 && self.segment_tokens.is_some_and(|measured| measured != tokens)
    }

    /// The attention of one run over segments (count, tokens).
    pub(crate) fn segments(&self, segments: impl Iterator<Item = (u64, u64)>) -> Prediction {
        let mut sum = Prediction::default();
        if self.attention.is_some() {
            for (count, tokens) in segments {
                sum.add(&self.segment(tokens), count);
            }
        } else if self.segment_tokens.is_some() {
            let mut held = segments.filter(|&(count, _)| count > 0);
            sum.extrapolated = held.any(|(_, tokens)| self.is_foreign(tokens));
        }
        sum
    }

    /// Forward and backward of the attention of one run, in nanoseconds.
    pub(crate) fn attention_ns(&self, segments: impl Iterator<Item = (u64, u64)>) -> u64 {
        self.attention.as_ref().map_or(0, |attention| {
            segments
                .map(|(count, tokens)| attention.whole_ns(tokens).saturating_mul(count))
                .fold(0, u64::saturating_add)
        })
    }

    /// Forward and backward that `size` more tokens add to the linear part of about `typical`, in nanoseconds.
    pub(crate) fn marginal_ns(&self, size: u64, typical: u64) -> u64 {
        let whole_ns = self.linear.marginal_ns(size, typical);
        let Some(collectives) = &self.collectives else { return whole_ns };
        let backward = if self.runs == Runs::Forward { 0 } else { collectives.backward_halves };
        let transfer_ns = marginal(size, typical, |size| {
            collectives.route.transfer(size.saturating_mul(collectives.bytes_per_token)).ns
        });
        whole_ns.saturating_add(transfer_ns.saturating_mul(collectives.forward_halves + backward) / 2)
    }

    /// No way to cut `size` tokens into parts takes less in the linear part, in nanoseconds, but for the rounding of
    /// each part. Collectives are left out, which keeps it a bound.
    pub(crate) fn ns_min(&self, size: u64) -> f64 {
        self.linear.ns_min(size)
    }

    /// Bytes that the linear part keeps for the backward.
    pub(crate) fn linear_bytes(&self, total: u64) -> u64 {
        self.linear.activation.as_ref().map_or(0, |curve| curve.at(total).value)
    }

    /// Bytes that `size` more tokens add to those of about `typical`.
    pub(crate) fn marginal_bytes(&self, size: u64, typical: u64) -> u64 {
        marginal(size, typical, |size| self.linear_bytes(size))
    }

    /// Bytes that the attention keeps for the backward.
    pub(crate) fn attention_bytes(&self, segments: impl Iterator<Item = (u64, u64)>) -> u64 {
        let Some(curve) = self.attention.as_ref().and_then(|attention| attention.activation.as_ref()) else {
            return 0;
        };
        segments
            .filter(|s| s.1 > 0)
            .map(|(count, tokens)| curve.at(tokens).value.saturating_mul(count))
            .fold(0, u64::saturating_add)
    }
}
