//! Communication of a plan that no computing hides.

use crate::error::PlanError;
use crate::input::SearchInput;
use crate::models::Models;
use crate::search::sampled_batches;
use crate::space::Candidate;
use dflop_step::Arm;
use dflop_types::{ModelProfile, Network, RankedPlan};

/// The most global batches that the time is a mean of.
const BATCHES: usize = 2;

/// Samples in one batch beyond which one batch is enough.
const LARGE_SAMPLES: usize = 1_024;

/// The time by which a step of `plan` would be shorter if links took no time, in nanoseconds: the mean over two sampled global
/// batches. `None` where nothing is sent or nothing is known of links.
///
/// The same schedules, the scheduler's first answers, are timed with the links of the profile and without any. What is
/// sent beside computing that takes as long makes no difference, so it is not in the time.
///
/// # Errors
/// As [`crate::search()`].
pub fn exposed_communication_ns(
    input: &SearchInput<'_>,
    plan: &RankedPlan,
) -> Result<Option<u64>, PlanError> {
    if plan.layout.num_ranks() < 2 || input.model_profile.network.links.is_empty() {
        return Ok(None);
    }
    let candidate = Candidate::from(plan);
    let degrees = [Some(plan.layout.encoder.tp), Some(plan.layout.llm.tp)];
    let scheduler = candidate.scheduler(input, &Models::cut_over(input, degrees)?)?;
    let profile = ModelProfile { network: Network::default(), ..input.model_profile.clone() };
    let free = SearchInput { model_profile: &profile, ..input.clone() };
    let without = candidate.scheduler(&free, &Models::cut_over(&free, degrees)?)?;
    let mut batches = sampled_batches(input)?;
    batches.truncate(if batches[0].len() > LARGE_SAMPLES { 1 } else { BATCHES });
    let mut sum = 0;
    for (step, batch) in (0..).zip(&batches) {
        let schedule = scheduler.schedule_until(step, batch, Arm::AWARE, &|| true)?;
        let [with, without] = [&scheduler, &without].map(|one| one.simulate(&schedule));
        sum += with?.makespan_ns.saturating_sub(without?.makespan_ns);
    }
    Ok(Some(sum / batches.len().max(1) as u64))
}
