//! A way out where no plan fits: what else would have to be asked, and the plan that fits then. For example: without
//! `recompute=none` a plan fits, 1,402 ms a step.

use crate::error::PlanError;
use crate::expert_groups::why_not_dealt_out;
use crate::input::SearchInput;
use crate::only::Only;
use crate::outcome::Outcome;
use crate::search::plan_alone;
use dflop_types::{Cluster, RankedPlan, counted, number};

/// Ranks of a node that a cluster of less than one node is thought to grow to.
const RANKS_OF_A_NODE: u32 = 8;

/// How often the ranks are doubled until a plan fits.
const DOUBLINGS: u32 = 6;

/// Numbers of ranks between one that is too few and one that is enough: more of them are halved, so many are all tried.
const NUM_TRIED: usize = 3;

/// The most ranks that are searched for a way out: beyond these a search takes seconds.
const RANKS_MAX: u32 = 2_048;

/// What would have to change so that a plan fits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// These parts of `--only` are left out.
    WithoutParts(String),
    /// The cluster has so many ranks, on nodes of so many.
    Ranks(u32, u32),
}

/// A plan that fits once something is changed.
#[derive(Debug, Clone, PartialEq)]
pub struct WayOut {
    /// What is changed.
    pub change: Change,
    /// The best plan then.
    pub plan: RankedPlan,
}

/// The nearest change with which a plan fits; `None` if there is a plan, or if no such change was found.
///
/// The parts of `--only` are left out first, each by itself, then all of them. If that gives no plan and memory binds, the
/// cluster gets twice the ranks, four times and so on, up to 64 times, or 2,048 ranks; and then the fewest in between that are
/// found.
///
/// *Complexity*: a quick [`crate::search()`] for each part, each doubling and each number between, on two global batches.
///
/// # Errors
/// As [`crate::search()`].
pub fn way_out(input: &SearchInput<'_>, outcome: &Outcome) -> Result<Option<WayOut>, PlanError> {
    if !outcome.ranked.is_empty() || outcome.fitting_num_microbatches.is_some() {
        return Ok(None);
    }
    let best = |only: Only, cluster: Cluster| -> Result<Option<RankedPlan>, PlanError> {
        plan_alone(&SearchInput {
            only,
            cluster,
            compares: false,
            effort: crate::SearchEffort::Quick,
            num_sampled_batches: input.num_sampled_batches.min(2),
            progress: &|_, _| {},
            ..input.clone()
        })
    };
    let asked = input.only.to_string();
    let parts: Vec<&str> = asked.split(',').filter(|part| !part.is_empty()).collect();
    let mut found: Vec<WayOut> = Vec::new();
    for at in 0..parts.len() {
        let rest = [&parts[..at], &parts[at + 1..]].concat().join(",");
        let Ok(only) = rest.parse() else { continue };
        if let Some(plan) = best(only, input.cluster.clone())? {
            found.push(WayOut { change: Change::WithoutParts(parts[at].to_owned()), plan });
        }
    }
    if found.is_empty()
        && parts.len() > 1
        && let Some(plan) = best(Only::default(), input.cluster.clone())?
    {
        found.push(WayOut { change: Change::WithoutParts(asked.clone()), plan });
    }
    if found.is_empty() && outcome.lacks_memory() {
        found.extend(enough_ranks(input, &|cluster| best(input.only.clone(), cluster))?);
    }
    Ok(found.into_iter().min_by_key(|way| way.plan.prediction.step_ns_mean))
}

/// The fewest ranks found with which `plan_on` has a plan, on nodes as those of the cluster.
///
/// They are doubled until there is a plan. The numbers in between are halved until they are few, and those tried in order: by single
/// ranks in a node, by whole nodes beyond one.
fn enough_ranks(
    input: &SearchInput<'_>,
    plan_on: &dyn Fn(Cluster) -> Result<Option<RankedPlan>, PlanError>,
) -> Result<Option<WayOut>, PlanError> {
    let Cluster { mut num_ranks, mut ranks_per_node, memory_budget_bytes } = input.cluster;
    let mut too_few = num_ranks;
    let mut enough = None;
    for _ in 0..DOUBLINGS {
        if (input.halt)() {
            break;
        }
        // A cluster of less than one node grows within it; the ranks of nodes beyond it are further apart.
        if num_ranks == ranks_per_node && num_ranks * 2 <= RANKS_OF_A_NODE {
            ranks_per_node *= 2;
        }
        too_few = num_ranks;
        num_ranks = num_ranks.saturating_mul(2);
        if num_ranks > RANKS_MAX {
            break;
        }
        if let Some(plan) = plan_on(Cluster { num_ranks, ranks_per_node, memory_budget_bytes })? {
            enough = Some(WayOut { change: Change::Ranks(num_ranks, ranks_per_node), plan });
            break;
        }
    }
    let Some(found) = enough else { return Ok(None) };
    let unit = if num_ranks > ranks_per_node { ranks_per_node.max(1) } else { 1 };
    let on = |num_ranks: u32| {
        let of_node = ranks_per_node.min(num_ranks);
        let plan = plan_on(Cluster { num_ranks, ranks_per_node: of_node, memory_budget_bytes })?;
        Ok::<_, PlanError>(plan.map(|plan| WayOut { change: Change::Ranks(num_ranks, of_node), plan }))
    };
    let mut found = found;
    let between = |low: u32, high: u32| (low / unit + 1..high.div_ceil(unit)).map(|number| number * unit);
    while between(too_few, num_ranks).len() > NUM_TRIED && !(input.halt)() {
        let middle = u32::midpoint(too_few / unit, num_ranks.div_ceil(unit)) * unit;
        match on(middle)? {
            Some(way) => (found, num_ranks) = (way, middle),
            None => too_few = middle,
        }
    }
    // What fits five ranks need not fit six, which divide otherwise. So the last few are all tried, the fewest first.
    for number in between(too_few, num_ranks) {
        if (input.halt)() {
            break;
        }
        if let Some(way) = on(number)? {
            return Ok(Some(way));
        }
    }
    Ok(Some(found))
}

/// Why there is not even a candidate for what is asked for, in words; `None` where there is one, or where all is asked for.
pub fn why_no_candidate(input: &SearchInput<'_>, outcome: &Outcome) -> Option<String> {
    (outcome.num_candidates == 0 && input.only != Only::default()).then(|| {
        let why = input.only.why_not(outcome.num_ranks).or_else(|| why_not_dealt_out(input));
        format!(
            "no layout of {} has `--only {}`{}",
            counted(outcome.num_ranks.into(), "rank"),
            input.only,
            why.map_or_else(String::new, |why| format!(", {why}"))
        )
    })
}

impl WayOut {
    /// The change in words, with the plan that fits then and its step.
    ///
    /// Where two limits contradict each other, both are named.
    pub fn hint(&self, input: &SearchInput<'_>, outcome: &Outcome) -> String {
        let step = number::ns(self.plan.prediction.step_ns_mean);
        // A search of two global batches has found it: a whole one may find a better plan.
        let fits = format!("this plan fits, about {step} a step: {}", self.plan.in_words());
        match &self.change {
            Change::WithoutParts(parts) => {
                let why = why_no_candidate(input, outcome).unwrap_or_else(|| {
                    format!("`--only {}` and {} contradict each other", input.only, outcome.limit())
                });
                format!("{why}: leave out `{parts}`, and {fits}")
            }
            Change::Ranks(num_ranks, ranks_per_node) => {
                // Where nothing says how many samples a step has, more ranks have more: the step is of as many as here.
                let samples = (input.shapes.len() as u64).min(input.global_batch_size.into());
                format!(
                    "give the cluster {} on nodes of {ranks_per_node}, or {}; on those ranks, with {} a step, {fits}",
                    counted((*num_ranks).into(), "rank"),
                    outcome.more_memory(),
                    counted(samples, "sample")
                )
            }
        }
    }
}
