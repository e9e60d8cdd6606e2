//! Orders of actions. Which layout is best hardly depends on the order, but its step does: so all candidates are judged under
//! one order, and the best pipelines once more under the others.

use crate::error::PlanError;
use crate::evaluate::{Judged, Verdict, summary};
use crate::found::Found;
use crate::funnel::{TINY_SAMPLES_MAX, far, first_answer, on_run};
use crate::input::{Depth, SearchInput};
use crate::judge::judge_one;
use crate::models::Models;
use crate::run_memory::Held;
use crate::space::Candidate;
use dflop_types::{PipelineOrder, RankedPlan, Rejection};
use rayon::prelude::*;

/// Pipelines that are judged under the other orders.
const TRIED_MAX: usize = 2;

/// Pipelines with orders that are given the scheduler's whole search though others are in front of them, where batches are not
/// tiny. It takes up to half a second a batch where memory is tight. There it gained 2.4 % over the first answers of eight batches,
/// and 9 % on one (`InternVL3` 8B on 8 H100, 2026-11-27).
const WHOLE_MAX: usize = 2;

/// Samples in one batch beyond which making lists would take longer than the rest of the search.
const LISTS_SAMPLES_MAX: usize = 1_024;

/// Judges the best pipelines of `found` under the orders that they were not judged under, where none is asked for. Those that
/// fit join `found`. The answer is how many candidates that were.
///
/// An order changes how long ranks are idle, not what they compute. So a pipeline is tried only if it would be the best plan
/// without any idle time. Interleaved stages have no split backward. Action lists of more than [`LISTS_SAMPLES_MAX`] samples take too long.
///
/// # Errors
/// As [`crate::search()`].
pub(crate) fn try_orders(
    input: &SearchInput<'_>,
    models: &Models,
    held: &Held<'_>,
    depth: Depth,
    found: &mut Found,
) -> Result<u64, PlanError> {
    let is_large = held.batches.iter().any(|batch| batch.len() > LISTS_SAMPLES_MAX);
    let Some(best) = found.ranked.first().filter(|_| input.order.is_none() && !is_large) else {
        return Ok(0);
    };
    let best_ns = found.value_ns(best) as f64;
    let busy_ns = |plan: &RankedPlan| {
        found.value_ns(plan) as f64 * (1.0 - plan.prediction.bubble_ratio.clamp(0.0, 1.0))
    };
    let pipelines = found.ranked.iter().filter(|plan| !plan.layout.is_colocated());
    let tried: Vec<Candidate> =
        pipelines.filter(|plan| busy_ns(plan) < best_ns).take(TRIED_MAX).map(Candidate::from).collect();
    let mut others = Vec::new();
    for candidate in tried {
        for order in [PipelineOrder::DataAware, PipelineOrder::ZeroBubble] {
            let is_split = order == PipelineOrder::ZeroBubble;
            let can_split = candidate.layout.llm_interleave == 1 && models.of(&candidate).has_split();
            if candidate.order != order && (!is_split || can_split) && !(input.halt)() {
                others.push(Candidate { order, ..candidate });
            }
        }
    }
    let (num_tried, no_bounds_ns) = (others.len() as u64, vec![0; held.batches.len()]);
    let whole = |candidate: &Candidate, found: &mut Found| -> Result<(), PlanError> {
        let rejection = judge_one(input, models, candidate, &no_bounds_ns, held, found)?;
        found.rejections.extend(rejection);
        Ok(())
    };
    if held.batches.iter().all(|batch| batch.len() <= TINY_SAMPLES_MAX) {
        others.iter().try_for_each(|candidate| whole(candidate, found))?;
        return Ok(num_tried);
    }
    let answers = first_answers(input, models, &others, held, found)?;
    for (place, (first_ns, candidate, judged)) in answers.into_iter().enumerate() {
        let best_ns = found.ranked.first().map_or(u64::MAX, |best| found.value_ns(best));
        let may_be_best = first_ns < best_ns || place < WHOLE_MAX && first_ns <= far(best_ns);
        if may_be_best && depth != Depth::Step && !(input.halt)() {
            whole(&candidate, found)?;
        } else {
            insert_first(input, models, held, (&candidate, &judged), found)?;
        }
    }
    Ok(num_tried)
}

/// The scheduler's first answers for candidates that fit all batches, with what the objective says of them in nanoseconds; the
/// fastest first. The others are rejected.
fn first_answers(
    input: &SearchInput<'_>,
    models: &Models,
    candidates: &[Candidate],
    held: &Held<'_>,
    found: &mut Found,
) -> Result<Vec<(u64, Candidate, Vec<Judged>)>, PlanError> {
    let steps = 0..held.batches.len();
    let asks: Vec<(Candidate, usize)> =
        candidates.iter().flat_map(|&candidate| steps.clone().map(move |step| (candidate, step))).collect();
    let answer = |(candidate, step): &(Candidate, usize)| {
        let scheduler = candidate.scheduler(input, models)?;
        first_answer(input, &scheduler, *step as u64, &held.batches[*step])
    };
    let verdicts: Vec<Verdict> = asks.par_iter().map(answer).collect::<Result<_, PlanError>>()?;
    let mut fitting = Vec::with_capacity(candidates.len());
    for (&candidate, own) in candidates.iter().zip(verdicts.chunks(held.batches.len().max(1))) {
        match own.iter().cloned().collect::<Result<Vec<Judged>, Rejection>>() {
            Ok(judged) => {
                let steps: Vec<u64> = judged.iter().map(Judged::makespan_ns).collect();
                fitting.push((input.objective.of(&steps), candidate, judged));
            }
            Err(rejection) => found.rejections.push(rejection),
        }
    }
    fitting.sort_by_key(|(ns, candidate, _)| (*ns, *candidate));
    Ok(fitting)
}

/// Adds a candidate by its first answers, if it also fits the fullest batches of the run; else it is rejected.
fn insert_first(
    input: &SearchInput<'_>,
    models: &Models,
    held: &Held<'_>,
    (candidate, judged): (&Candidate, &[Judged]),
    found: &mut Found,
) -> Result<(), PlanError> {
    if let Some(run) = &held.run {
        match on_run(input, models, run, &[(*candidate, summary(judged))], false)?.pop() {
            Some(Err(rejection)) => {
                found.rejections.push(rejection);
                return Ok(());
            }
            checked => found.run_memory.extend(checked.and_then(Result::ok).map(|of| (*candidate, of))),
        }
    }
    found.num_judged += 1;
    found.insert(candidate, input, judged);
    Ok(())
}
