//! Experts that are dealt out: the ranks of an expert group each hold a part of the experts of a layer, and rows travel to them.
//!
//! ```text
//! a rank holds         the layer without its experts, and 1 / ep of them, for ep ranks of a group
//! rows                 as many as without: all experts are taken to be read evenly (*assumed*)
//! all-to-all           rows x experts of a token x bytes of a hidden state; there and back, in forward and backward, and there
//!                      and back once more where the layer recomputes
//! replicas of a part   every ep-th rank: gradients of experts are summed, and parts of them cut, over 1 / ep of the replicas
//! ```

use crate::dealt::Dealt;
use crate::error::CostError;
use crate::module::{Collectives, Module, gradient_bytes};
use dflop_types::ExpertsProfile;

/// Halves of an exchange: rows go to their experts and come back, each as one whole.
const THERE_AND_BACK: u64 = 4;

/// Copies of the exchanged rows that a rank has while an exchange runs: what it sends, and what it receives.
const COPIES: u64 = 2;

/// The experts of a layer with this name, which can be dealt out over `degree` ranks.
///
/// # Errors
/// [`CostError::NoExperts`] and [`CostError::ExpertsNotDivided`].
pub(crate) fn divided(
    module: &'static str,
    experts: Option<ExpertsProfile>,
    degree: u32,
) -> Result<ExpertsProfile, CostError> {
    let Some(experts) = experts else { return Err(CostError::NoExperts { module, degree }) };
    let count = experts.count;
    if count.is_multiple_of(degree.max(1)) {
        Ok(experts)
    } else {
        Err(CostError::ExpertsNotDivided { module, count, degree })
    }
}

/// The halves that a layer exchanges in the forward, and in the backward.
pub(crate) const fn exchanged_halves(recomputes: bool) -> (u64, u64) {
    (THERE_AND_BACK, THERE_AND_BACK * if recomputes { 2 } else { 1 })
}

impl Module {
    /// The same layer on one of `degree` ranks among which its experts are dealt out, with their `exchange`. Experts have no
    /// adapters: where these train, `has_adapters`, experts are frozen.
    pub(crate) fn dealt_out(
        mut self,
        experts: &ExpertsProfile,
        degree: u32,
        has_adapters: bool,
        exchange: Collectives,
    ) -> Self {
        let part = |whole: u64| whole.div_ceil(u64::from(degree.max(1)));
        let num_parameters = part(experts.num_parameters);
        let num_trained = if has_adapters || self.num_trained_parameters == 0 { 0 } else { num_parameters };
        let own = Dealt {
            parameter_bytes: part(experts.parameter_bytes),
            num_parameters,
            num_trained,
            gradient_bytes: gradient_bytes(num_trained),
        };
        let others = experts.num_parameters - num_parameters;
        self.num_parameters = self.num_parameters.saturating_sub(others);
        let other_bytes = experts.parameter_bytes - own.parameter_bytes;
        self.parameter_bytes = self.parameter_bytes.saturating_sub(other_bytes);
        if num_trained > 0 {
            self.num_trained_parameters = self.num_trained_parameters.saturating_sub(others);
            self.gradient_bytes = self.gradient_bytes.saturating_sub(gradient_bytes(others));
        }
        self.dealt = own;
        self.collectives = Some(exchange);
        self
    }

    /// Whether its experts are dealt out.
    pub(crate) const fn is_dealt_out(&self) -> bool {
        self.dealt.parameter_bytes > 0
    }

    /// Bytes that a rank has for a while of `rows` that go to experts; 0 where these are not dealt out.
    pub(crate) fn exchanged_bytes(&self, rows: u64) -> u64 {
        match &self.collectives {
            Some(exchange) if self.is_dealt_out() => {
                rows.saturating_mul(exchange.bytes_per_token).saturating_mul(COPIES)
            }
            _ => 0,
        }
    }
}
