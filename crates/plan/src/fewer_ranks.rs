//! Fewer ranks: whether a part of the cluster gives nearly the same samples a second, so that the others are free.

use crate::error::PlanError;
use crate::input::SearchInput;
use crate::outcome::Outcome;
use crate::search::plan_alone;
use dflop_types::number::{self, percent, times};
use dflop_types::{Cluster, RankedPlan};

/// A part of the ranks that gives at least this much of the samples a second of all of them is worth a word, in percent.
const ENOUGH_PERCENT: u128 = 95;

/// Parts of the ranks that are tried, in quarters; the fewest ranks first.
const QUARTERS: [u32; 3] = [1, 2, 3];

/// A plan on fewer ranks that is nearly as fast.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FewerRanks {
    /// Ranks of the plan.
    pub num_ranks: u32,
    /// Ranks of the cluster.
    pub of_ranks: u32,
    /// Ranks of the plan that it is compared with.
    pub than_ranks: u32,
    /// The best plan on `num_ranks` ranks.
    pub plan: RankedPlan,
    /// Its samples a second, as a part of those of the best plan on all ranks.
    pub speed_ratio: f64,
}

impl FewerRanks {
    /// A line of words, without a line end.
    pub fn words(&self) -> String {
        format!(
            "fewer ranks: {} of {} give {} of the samples a second, {} as many of each rank: {}, {}",
            self.num_ranks,
            self.of_ranks,
            percent(self.speed_ratio),
            times(self.speed_ratio * f64::from(self.than_ranks) / f64::from(self.num_ranks)),
            number::ns(self.plan.prediction.step_ns_mean),
            self.plan.in_words(),
        )
    }
}

/// The fewest whole nodes (of a quarter, a half, three quarters of the ranks) whose best plan has at least 95 % of the
/// samples a second of the best plan of `outcome`; `None` if no such part has.
///
/// Global batches are the same. A part is searched only if its work bound allows those 95 %, so where all ranks are well
/// used this takes no time.
///
/// # Errors
/// As [`crate::search()`].
pub fn fewer_ranks(input: &SearchInput<'_>, outcome: &Outcome) -> Result<Option<FewerRanks>, PlanError> {
    let Some(best) = outcome.ranked.first() else { return Ok(None) };
    let step_ns = u128::from(best.prediction.step_ns_mean);
    let (of_ranks, of_node) = (input.cluster.num_ranks, input.cluster.ranks_per_node.max(1));
    let than_ranks = best.layout.num_ranks();
    let is_enough = |ns: u128| ns * ENOUGH_PERCENT <= step_ns * 100;
    let mut last = 0;
    for quarters in QUARTERS {
        let part = u64::from(of_ranks) * u64::from(quarters) / 4;
        let num_ranks = u32::try_from(part).unwrap_or(of_ranks) / of_node * of_node;
        let bound_ns =
            u128::from(outcome.work_bound_ns) * u128::from(of_ranks) / u128::from(num_ranks.max(1));
        if num_ranks == last || num_ranks >= than_ranks || !is_enough(bound_ns) {
            continue;
        }
        last = num_ranks;
        let found = plan_alone(&SearchInput {
            cluster: Cluster { num_ranks, ..input.cluster.clone() },
            compares: false,
            ..input.clone()
        })?;
        if let Some(plan) = found
            && is_enough(plan.prediction.step_ns_mean.into())
        {
            let speed_ratio = step_ns as f64 / plan.prediction.step_ns_mean.max(1) as f64;
            return Ok(Some(FewerRanks { num_ranks, of_ranks, than_ranks, plan, speed_ratio }));
        }
    }
    Ok(None)
}
