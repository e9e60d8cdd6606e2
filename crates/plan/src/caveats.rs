//! What is not certain about the numbers of a plan, in words. For example: transfers were taken as free, because no
//! network was measured. Nothing is guessed in silence.

use dflop_cost::{Basis, CostModel, Sharding};
use dflop_step::StepSettings;
use dflop_types::number::percent;
use dflop_types::{Component, ModelProfile, PlanPrediction, RankedPlan, counted};

/// What the numbers of a plan are based on.
// Each is a fact of its own.
#[allow(clippy::struct_excessive_bools)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Caveats {
    /// Whether the model profile comes from the analytic model, so that every time and every byte is estimated.
    pub is_estimated: bool,
    /// Whether the profile is estimated with kernels that do not come with `PyTorch`: those of linear attention.
    pub needs_kernels: bool,
    /// Whether transfers were measured. If not, they were taken as free.
    pub is_network_measured: bool,
    /// Whether the time of the plan's gradient reduction comes from measurements with as many ranks and bytes. True if
    /// nothing is reduced.
    pub is_reduction_measured: bool,
    /// Whether the model profile says of experts.
    pub has_experts: bool,
    /// Whether the plan deals out experts over several ranks.
    pub deals_out_experts: bool,
    /// Measured points that were corrected, because a larger size was measured shorter than a smaller one.
    pub num_repaired_points: u32,
}

impl Caveats {
    /// The caveats of `plan`, or without a plan those of the profile and its cost model alone.
    pub fn of(profile: &ModelProfile, model: &CostModel, plan: Option<&RankedPlan>) -> Self {
        Self {
            is_estimated: profile.is_estimated,
            needs_kernels: profile.is_estimated && profile.family.starts_with("qwen3_5"),
            is_network_measured: model.is_network_measured(),
            is_reduction_measured: plan.is_none_or(|plan| is_reduction_measured(model, plan)),
            has_experts: profile.modules.values().any(|module| module.experts.is_some()),
            deals_out_experts: plan.is_some_and(|plan| plan.layout.has_expert_groups()),
            num_repaired_points: model.num_repaired_points(),
        }
    }

    /// One sentence for each caveat that applies.
    pub fn notes(&self, prediction: &PlanPrediction) -> Vec<String> {
        let mut notes = Vec::new();
        if self.is_estimated {
            notes.push("estimated, not measured: times and bytes come from the analytic model".to_owned());
        }
        if self.needs_kernels {
            notes.push(
                "linear attention is estimated with the kernels of flash-linear-attention: without them it takes about nine \
                 times the memory, and more of the time"
                    .to_owned(),
            );
        }
        if self.deals_out_experts {
            notes.push(
                "experts are taken to be read evenly: where some are read more, their rank takes longer and needs more memory. \
                 The all-to-all of their rows is assumed to take as long as an all-gather to as many bytes. `--only llm.ep=1` \
                 plans without it"
                    .to_owned(),
            );
        }
        if prediction.extrapolated_ratio > 0.0 {
            let share = percent(prediction.extrapolated_ratio);
            let (outside, all) = (prediction.num_extrapolated, prediction.num_predictions);
            notes.push(format!(
                "{share} of the predictions ({outside} of {all}) lie outside the measured range"
            ));
        }
        if self.num_repaired_points > 0 {
            let points = counted(self.num_repaired_points.into(), "measured point");
            let (were, they) =
                if self.num_repaired_points == 1 { ("was", "it was") } else { ("were", "they were") };
            notes.push(format!(
                "{points} {were} lower than at a smaller size: that is noise, and {they} smoothed"
            ));
        }
        if !self.is_network_measured {
            notes.push("the network was not measured: transfers are taken as free".to_owned());
        } else if !self.is_reduction_measured {
            notes.push("the reduction of the gradients was not measured: its time is assumed".to_owned());
        }
        notes
    }
}

fn is_reduction_measured(model: &CostModel, plan: &RankedPlan) -> bool {
    let stages = StepSettings::from(plan).stages(model).unwrap_or_default();
    let of = |component| Sharding::of(&plan.layout, component);
    let mut of_stages = stages.into_iter().map(|stage| model.sharded_stage_tail(stage, of(Component::Llm)));
    model.sharded_encoder_tail(of(Component::Encoder)).basis == Basis::Measured
        && of_stages.all(|tail| tail.basis == Basis::Measured)
}
