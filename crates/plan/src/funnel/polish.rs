//! The last row of the funnel: the plan in front is judged by the scheduler's whole search.

use super::{PATIENT_SAMPLES_MAX, TRIED_WHOLE_MAX, WHOLE_MAX, first_answer, first_of};
use crate::error::PlanError;
use crate::evaluate::{Judged, Verdict, judge_batch};
use crate::found::{Found, NUM_RANKED};
use crate::input::SearchInput;
use crate::models::Models;
use crate::space::Candidate;
use dflop_types::{RankedPlan, Rejection, SampleIndex};
use rayon::prelude::*;
use std::collections::BTreeMap;

/// Judges the best plan again with the scheduler's whole search, as training will run it. Another plan may be in front
/// then; so this goes on until the plan in front has had its whole search.
pub(super) fn polish(
    input: &SearchInput<'_>,
    models: &Models,
    batches: &[Vec<SampleIndex>],
    found: &mut Found,
) -> Result<(), PlanError> {
    let is_small = batches[0].len() <= PATIENT_SAMPLES_MAX;
    let mut polished: Vec<Candidate> = Vec::new();
    let mut searched = BTreeMap::new();
    if !is_small {
        polished.extend(promote(input, models, batches, found, &mut searched)?);
    }
    while polished.len() < if is_small { NUM_RANKED } else { WHOLE_MAX } && !(input.halt)() {
        let best_ns = found.ranked.first().map_or(0, |plan| found.value_ns(plan));
        let is_open = |plan: &RankedPlan| !polished.contains(&Candidate::from(plan));
        // A plan in front, or so near that the whole search may put it there. The search gains more on colocated ranks than
        // on pipelines, so for those "near" is wider.
        let is_near = |plan: &RankedPlan| {
            let part = if plan.layout.is_colocated() { 4 } else { 8 };
            let near_ns = if is_small { best_ns.saturating_add(best_ns / part) } else { best_ns };
            found.value_ns(plan) <= near_ns
        };
        let next = found.ranked.iter().position(|plan| is_open(plan) && is_near(plan));
        let Some(at) = next else { break };
        let candidate = Candidate::from(&found.ranked[at]);
        polished.push(candidate);
        let first = searched.remove(&candidate);
        if let Ok(judged) = searched_whole(input, models, &candidate, batches, first)? {
            found.ranked.remove(at);
            found.insert(&candidate, input, &judged);
        }
    }
    Ok(())
}

/// The whole search for all batches. `first` is its verdict on the first batch, if that is already known.
fn searched_whole(
    input: &SearchInput<'_>,
    models: &Models,
    candidate: &Candidate,
    batches: &[Vec<SampleIndex>],
    first: Option<Verdict>,
) -> Result<Result<Vec<Judged>, Rejection>, PlanError> {
    let scheduler = candidate.scheduler(input, models)?;
    let known = usize::from(first.is_some());
    let rest: Vec<Verdict> = batches[known..]
        .par_iter()
        .enumerate()
        .map(|(at, batch)| judge_batch(&scheduler, (known + at) as u64, batch, input.halt))
        .collect::<Result<_, PlanError>>()?;
    Ok(first.into_iter().chain(rest).collect())
}

/// Tries the whole search on the colocated candidates near the best, with the first batch only. If that puts another
/// candidate in front, this candidate is searched on all batches, takes its place in `found`, and is returned.
///
/// A candidate gains most by the search if its memory asks for several microbatches. So first answers alone would not
/// rank such candidates rightly: of 1,024 ranks a colocated layout fell from 1,597 to 1,356 ms, and a pipeline in front of it,
/// which the search improves little, stayed at 1,589 ms.
fn promote(
    input: &SearchInput<'_>,
    models: &Models,
    batches: &[Vec<SampleIndex>],
    found: &mut Found,
    searched: &mut BTreeMap<Candidate, Verdict>,
) -> Result<Option<Candidate>, PlanError> {
    let most = first_of(batches[0].len()).min(TRIED_WHOLE_MAX + 1);
    let Some(best) = found.ranked.first().copied() else { return Ok(None) };
    let best_ns = found.value_ns(&best);
    let is_near =
        |plan: &&RankedPlan| plan.layout.is_colocated() && found.value_ns(plan) <= best_ns + best_ns / 4;
    let tried: Vec<Candidate> = found.ranked.iter().filter(is_near).take(most).map(Candidate::from).collect();
    let verdicts: Vec<(Candidate, Verdict)> = tried
        .par_iter()
        .map(|candidate| {
            let scheduler = candidate.scheduler(input, models)?;
            Ok((*candidate, judge_batch(&scheduler, 0, &batches[0], input.halt)?))
        })
        .collect::<Result<_, PlanError>>()?;
    searched.extend(verdicts);
    let shortest = searched
        .iter()
        .filter_map(|(candidate, verdict)| Some((verdict.as_ref().ok()?.makespan_ns(), *candidate)));
    let Some(shortest) = shortest.min() else { return Ok(None) };
    let best = Candidate::from(&best);
    // Of a pipeline, which was not tried. The mean over all batches, `best_ns`, would not do: those tried have the first alone.
    let first_ns = if best.layout.is_colocated() {
        None
    } else {
        let first = first_answer(input, &best.scheduler(input, models)?, 0, &batches[0])?;
        Some(first.map_or(u64::MAX, |judged| judged.makespan_ns()))
    };
    let Some(front) = promoted(best, first_ns, shortest) else { return Ok(None) };
    let first = searched.remove(&front);
    if let Ok(judged) = searched_whole(input, models, &front, batches, first)? {
        found.ranked.retain(|plan| Candidate::from(plan) != front);
        found.insert(&front, input, &judged);
        return Ok(Some(front));
    }
    Ok(None)
}

/// The candidate that the whole search puts in front of the best plan by first answers: of those tried, the one with the
/// shortest step on the first batch, `shortest_ns`. A colocated best plan was tried too: `untried_ns` is `None`. A pipeline
/// was not, as the search improves it little: `untried_ns` is the first answer for it.
pub(super) fn promoted(
    best: Candidate,
    untried_ns: Option<u64>,
    (shortest_ns, shortest): (u64, Candidate),
) -> Option<Candidate> {
    let is_in_front = untried_ns.map_or(shortest != best, |best_ns| shortest_ns < best_ns);
    is_in_front.then_some(shortest)
}
