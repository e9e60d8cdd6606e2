//! The last row of the funnel: the plan in front is judged by the scheduler's whole search.

use super::{PATIENT_SAMPLES_MAX, WHOLE_MAX};
use crate::error::PlanError;
use crate::evaluate::{Judged, Verdict, judge_batch};
use crate::found::{Found, NUM_RANKED};
use crate::input::{Depth, SearchInput};
use crate::models::Models;
use crate::space::Candidate;
use dflop_types::{RankedPlan, Rejection, SampleIndex};
use rayon::prelude::*;

/// Samples in one batch up to which the whole search also judges other layouts that are close behind the best plan.
const LAYOUTS_SAMPLES_MAX: usize = 512;

/// Plans that it judges then: one of each layout.
const WHOLE_LAYOUTS_MAX: usize = 4;

/// Judges the best plan again with the scheduler's whole search, as training will run it. Another plan may be in front
/// then; so this goes on until the plan in front has had its whole search. Other layouts that are close behind have theirs too.
pub(super) fn polish(
    input: &SearchInput<'_>,
    models: &Models,
    batches: &[Vec<SampleIndex>],
    depth: Depth,
    found: &mut Found,
) -> Result<(), PlanError> {
    let is_small = batches[0].len() <= PATIENT_SAMPLES_MAX && depth != Depth::Step;
    let searches_layouts = batches[0].len() <= LAYOUTS_SAMPLES_MAX && depth != Depth::Step;
    let most = match depth {
        Depth::Step => 1,
        _ if is_small => NUM_RANKED,
        _ if searches_layouts => WHOLE_LAYOUTS_MAX,
        _ => WHOLE_MAX,
    };
    let mut polished: Vec<Candidate> = Vec::new();
    while polished.len() < most && !(input.halt)() {
        let best_ns = found.ranked.first().map_or(0, |plan| found.value_ns(plan));
        let is_open = |plan: &RankedPlan| !polished.contains(&Candidate::from(plan));
        // A plan in front, or so near that the whole search may put it there: with few samples and a tight memory it gains a
        // quarter.
        let is_near = |plan: &RankedPlan| {
            let is_new = || polished.iter().all(|other| other.layout != plan.layout);
            let margin_ns = match () {
                () if is_small => best_ns / 4,
                // With more samples the whole search gains some percent, more where there are few buckets: tensor groups.
                () if searches_layouts && is_new() => best_ns / 32,
                () => 0,
            };
            found.value_ns(plan) <= best_ns.saturating_add(margin_ns)
        };
        let next = found.ranked.iter().position(|plan| is_open(plan) && is_near(plan));
        let Some(at) = next else { break };
        let candidate = Candidate::from(&found.ranked[at]);
        polished.push(candidate);
        if let Ok(judged) = searched_whole(input, models, &candidate, batches)? {
            found.ranked.remove(at);
            found.insert(&candidate, input, &judged);
        }
    }
    Ok(())
}

/// The whole search for all batches.
fn searched_whole(
    input: &SearchInput<'_>,
    models: &Models,
    candidate: &Candidate,
    batches: &[Vec<SampleIndex>],
) -> Result<Result<Vec<Judged>, Rejection>, PlanError> {
    let scheduler = candidate.scheduler(input, models)?;
    let verdicts: Vec<Verdict> = batches
        .par_iter()
        .enumerate()
        .map(|(step, batch)| judge_batch(&scheduler, step as u64, batch, input.halt))
        .collect::<Result<_, PlanError>>()?;
    Ok(verdicts.into_iter().collect())
}
