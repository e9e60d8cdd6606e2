//! Where the time and the memory of a plan go.
//!
//! ```text
//! step = work + recomputation + waiting by cause + end of the step + the rest
//! ```
//!
//! `work` is the work bound: the predicted work of the global batch divided by the number of ranks, at the rate of the
//! whole batch and without recomputation. `the rest` is what microbatches take beyond their part of that: kernel launches,
//! smaller and so less efficient matrix products, and gathers of sharded layers that take longer than the work beside them.

use crate::error::PlanError;
use crate::input::{SearchEffort, SearchInput};
use crate::models::Models;
use crate::search::{sampled_batches, step_alone_ns};
use crate::space::Candidate;
use crate::work_bound::work_bound_ns;
use dflop_cost::RankMemory;
use dflop_step::{Arm, Method, StepError, StepScheduler};
use dflop_types::number::{self, percent, times};
use dflop_types::{Cluster, Rank, RankedPlan, Recomputation, SampleIndex, Schedule, Zero, memory_size};
use std::fmt::Write as _;

/// The most global batches that the detail is a mean of.
const BATCHES: usize = 4;

/// The most global batches of [`spent`].
const FIRST_ANSWERS: usize = 2;

/// Where time and memory of a plan go, as means over sampled global batches, in nanoseconds and bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spent {
    /// Parts of the step by name; together the step.
    pub time_ns: Vec<(&'static str, u64)>,
    /// How many sampled global batches this is of: the first of those that the search judges.
    pub num_batches: u32,
    /// The mean step of these batches.
    pub step_ns: u64,
    /// The longest of them.
    pub step_ns_max: u64,
    /// The bytes of the fullest rank, by what they hold.
    pub memory: Vec<(&'static str, u64)>,
    /// Which rank that is.
    pub fullest_rank: u32,
}

/// Where time and memory of a plan go, and what it would take without some of its parts.
#[derive(Debug, Clone, PartialEq)]
pub struct Detail {
    /// Sampled global batches that the search judges: the detail may be of fewer.
    pub num_sampled_batches: u32,
    /// Time and memory.
    pub spent: Spent,
    /// The same layout under simpler methods, from arrival order up to ours: the name of the method, and its step in
    /// nanoseconds; `None` if it does not fit.
    pub without: Vec<(String, Option<u64>)>,
    /// The best plans without a part of this one, its sharding or its kind of layout, under the same scheduler: what each is, and its
    /// step in nanoseconds; `None` if none was found that fits. Without what this plan does not have there is no row.
    pub without_parts: Vec<(&'static str, Option<u64>)>,
}

/// What each method adds to the one before it, in this order.
const LADDER: [Method; 6] =
    [Method::Blind, Method::Tokens, Method::Balanced, Method::Ordered, Method::Shaped, Method::Aware];

/// The detail of `plan`, a plan of `input`.
///
/// # Errors
/// As [`crate::search`].
pub fn detail(input: &SearchInput<'_>, plan: &RankedPlan) -> Result<Detail, PlanError> {
    let candidate = Candidate::from(plan);
    let models = Models::cut_over(input, [Some(plan.layout.encoder.tp), Some(plan.layout.llm.tp)])?;
    let scheduler = candidate.scheduler(input, &models)?;
    let mut batches = sampled_batches(input)?;
    let num_sampled_batches = batches.len() as u32;
    batches.truncate(BATCHES);
    let count = batches.len().max(1) as u64;
    let mut answers = Vec::with_capacity(batches.len());
    for (step, batch) in (0..).zip(&batches) {
        answers.push(scheduler.schedule_until(step, batch, Arm::AWARE, input.halt)?);
    }
    let spent = spent_on(input, (&models, &scheduler), plan, &batches, &answers)?;
    let mut without = Vec::new();
    for method in LADDER {
        let arm = Arm { method, is_ahead: false };
        let mut sum = Some(0);
        for (step, batch) in (0..).zip(&batches) {
            let ns = match scheduler.schedule_until(step, batch, arm, input.halt) {
                Ok(schedule) => Some(schedule.predicted_makespan_ns),
                Err(error) if crate::refusal(&error).is_some() => None,
                // A simple method may find no place for some sample under the caps that the aware one keeps.
                Err(StepError::Balance(_)) => None,
                Err(error) => return Err(error.into()),
            };
            sum = sum.zip(ns).map(|(sum, ns)| sum + ns);
        }
        without.push((arm.to_string(), sum.map(|sum: u64| sum / count)));
    }
    let without_parts = without_parts(input, plan)?;
    Ok(Detail { num_sampled_batches, spent, without, without_parts })
}

/// Where time and memory of `plan`, a plan of `input`, go by the scheduler's first answers on up to two sampled global batches. A
/// batch whose first answer is over the memory is searched whole; one that fits by no schedule is left out. `None` if none fits.
///
/// # Errors
/// As [`crate::search()`].
pub fn spent(input: &SearchInput<'_>, plan: &RankedPlan) -> Result<Option<Spent>, PlanError> {
    let candidate = Candidate::from(plan);
    let models = Models::cut_over(input, [Some(plan.layout.encoder.tp), Some(plan.layout.llm.tp)])?;
    let scheduler = candidate.scheduler(input, &models)?;
    let mut sampled = sampled_batches(input)?;
    sampled.truncate(FIRST_ANSWERS);
    let (mut batches, mut answers) = (Vec::new(), Vec::new());
    for (step, batch) in (0..).zip(sampled) {
        let first = scheduler.schedule_until(step, &batch, Arm::AWARE, &|| true);
        match first.or_else(|_| scheduler.schedule(step, &batch, Arm::AWARE)) {
            Ok(schedule) => {
                answers.push(schedule);
                batches.push(batch);
            }
            Err(error) if crate::refusal(&error).is_some() => {}
            Err(error) => return Err(error.into()),
        }
    }
    if batches.is_empty() {
        return Ok(None);
    }
    spent_on(input, (&models, &scheduler), plan, &batches, &answers).map(Some)
}

/// Where time and memory go under these answers of the batches.
fn spent_on(
    input: &SearchInput<'_>,
    (models, scheduler): (&Models, &StepScheduler),
    plan: &RankedPlan,
    batches: &[Vec<SampleIndex>],
    answers: &[Schedule],
) -> Result<Spent, PlanError> {
    let candidate = Candidate::from(plan);
    let count = batches.len().max(1) as u64;
    // Ranks of a tensor group wait at the same times, and hold as much as each other.
    let ranks = u64::from(plan.layout.by_group().num_ranks()).max(1);
    let (mut steps, mut ends, mut idle) = (Vec::new(), 0, [0_u64; 3]);
    let mut eased_ns = 0;
    let (mut memory, mut fullest_rank) = (RankMemory::default(), 0);
    for schedule in answers {
        let timeline = scheduler.simulate(schedule)?;
        steps.push(timeline.makespan_ns);
        let last = timeline.spans.iter().map(|span| span.end_ns).max().unwrap_or(0);
        ends += timeline.makespan_ns.saturating_sub(last);
        for (sum, ns) in idle.iter_mut().zip([
            timeline.idle_ns.ramp,
            timeline.idle_ns.imbalance,
            timeline.idle_ns.transfer,
        ]) {
            *sum += ns / ranks;
        }
        eased_ns += scheduler.recomputation_ns(schedule)? / ranks;
        for (rank, of_rank) in (0..).zip(scheduler.memory(schedule)?) {
            if of_rank.total_bytes() > memory.total_bytes() {
                let first = plan.layout.ranks_of_group(Rank(rank)).next().map_or(rank, |first| first.0);
                (memory, fullest_rank) = (of_rank, first);
            }
        }
    }
    let step_ns = steps.iter().sum::<u64>() / count;
    // The ranks of the plan do the work: those that it leaves free do none.
    let used = SearchInput {
        cluster: Cluster { num_ranks: plan.layout.num_ranks(), ..input.cluster.clone() },
        ..input.clone()
    };
    let work_ns = work_bound_ns(&used, models.plain(), batches).min(step_ns);
    let without = Candidate { recompute: Recomputation::NONE, ..candidate };
    let recomputed_ns = if candidate.eases(input) {
        eased_ns / count
    } else {
        let with = work_bound_ns(&used, models.of(&candidate), batches);
        with.saturating_sub(work_bound_ns(&used, models.of(&without), batches))
    };
    let named = [
        ("work", work_ns),
        ("recomputation", recomputed_ns),
        ("ramp", idle[0] / count),
        ("imbalance", idle[1] / count),
        ("transfer", idle[2] / count),
        ("reduction and optimizer", ends / count),
    ];
    // The waiting time includes ranks that have ended and wait for the last, so the parts may add up to more than the
    // step. No part gets more than what is left of it.
    let mut left = step_ns;
    let mut time_ns: Vec<(&'static str, u64)> = named
        .into_iter()
        .map(|(name, ns)| {
            let part = ns.min(left);
            left -= part;
            (name, part)
        })
        .collect();
    time_ns.push(("launches, small products, collectives", left));
    Ok(Spent {
        num_batches: batches.len() as u32,
        time_ns,
        step_ns,
        step_ns_max: steps.into_iter().max().unwrap_or(0),
        memory: memory.by_use().into_iter().filter(|(_, bytes)| *bytes > 0).collect(),
        fullest_rank,
    })
}

/// What `--only` says of candidates without a part of `plan`, and the name of those.
fn parts(plan: &RankedPlan) -> Vec<(&'static str, &'static str)> {
    let mut parts = Vec::new();
    if plan.layout.zero != Zero::Nothing {
        parts.push(("zero=0", "the best plan that shards nothing"));
    }
    parts.push(if plan.layout.is_colocated() {
        ("colocated=false", "the best pipeline")
    } else {
        ("colocated=true", "the best plan with both components on each rank")
    });
    parts
}

/// The best plans without a part of `plan`. A part that the search is restricted to is left as it is.
fn without_parts(
    input: &SearchInput<'_>,
    plan: &RankedPlan,
) -> Result<Vec<(&'static str, Option<u64>)>, PlanError> {
    let asked = input.only.to_string();
    let mut found = Vec::new();
    for (part, name) in parts(plan) {
        let both = if asked.is_empty() { part.to_owned() } else { format!("{asked},{part}") };
        let Ok(only) = both.parse() else { continue };
        // On the batches of the detail, whose step it is compared with.
        let step_ns = step_alone_ns(&SearchInput {
            only,
            compares: false,
            effort: SearchEffort::Quick,
            num_sampled_batches: input.num_sampled_batches.min(BATCHES as u32),
            progress: &|_, _| {},
            ..input.clone()
        })?;
        found.push((name, step_ns));
    }
    Ok(found)
}

impl Detail {
    /// Which steps the detail is of: fewer than the plan's own number is.
    fn of_batches(&self) -> String {
        let (looked_at, judged) = (self.spent.num_batches, self.num_sampled_batches);
        if looked_at < judged {
            format!("the first {looked_at} of the {judged} sampled global batches")
        } else {
            format!("{looked_at} sampled global batch{}", if looked_at == 1 { "" } else { "es" })
        }
    }

    /// The detail for people. Ends with a line end.
    pub fn words(&self) -> String {
        let spent = &self.spent;
        let whole = spent.step_ns.max(1) as f64;
        let mut text = format!(
            "\nwhere {} go: the mean of {}, the longest {}\n",
            number::ns(spent.step_ns),
            self.of_batches(),
            number::ns(spent.step_ns_max)
        );
        for (name, ns) in spent.time_ns.iter().filter(|(_, ns)| *ns > 0) {
            let _ = writeln!(text, "  {:>11}  {:>6}  {name}", number::ns(*ns), percent(*ns as f64 / whole));
        }
        let bytes: u64 = spent.memory.iter().map(|(_, bytes)| bytes).sum();
        let _ =
            writeln!(text, "\nwhat rank {} holds at its fullest, {}", spent.fullest_rank, memory_size(bytes));
        for (name, bytes) in &spent.memory {
            let _ = writeln!(text, "  {:>11}  {name}", memory_size(*bytes));
        }
        let row = |text: &mut String, name: &str, ns: Option<u64>| {
            let _ = match ns {
                Some(ns) => {
                    writeln!(text, "  {:>11}  {:>6}  {name}", number::ns(ns), times(ns as f64 / whole))
                }
                None => writeln!(text, "  {:>11}  does not fit  {name}", number::NONE),
            };
        };
        text.push_str("\nthe same layout with less of the scheduler\n");
        for (name, ns) in &self.without {
            row(&mut text, name, *ns);
        }
        if !self.without_parts.is_empty() {
            text.push_str("\nthe same scheduler without a part of the plan\n");
        }
        for (name, ns) in &self.without_parts {
            row(&mut text, name, *ns);
        }
        text
    }
}
