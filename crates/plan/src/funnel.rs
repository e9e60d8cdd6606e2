//! The funnel: which candidates are judged, and how thoroughly.
//!
//! ```text
//! all           a rough estimate                                          microseconds each
//! the first     one global batch, the scheduler's first answer            tens of milliseconds each
//! the six best  all global batches, the scheduler's first answer
//! the best      all global batches, the scheduler's whole search
//! ```
//!
//! Every rung looks at the same global batches. Counts, not times, decide how many candidates pass, so that searches
//! repeat.

use crate::contender::Contender;
use crate::error::PlanError;
use crate::evaluate::{Judged, Verdict, judge_batch, summary};
use crate::search::{Found, NUM_RANKED, SearchInput};
use dflop_cost::CostModel;
use dflop_types::{PlanPrediction, RankedPlan, Rejection, SampleIndex};
use rayon::prelude::*;
use std::sync::Arc;

/// Candidates judged on one batch at most.
const FIRST_MAX: usize = 24;
/// And fewest, where there are as many.
const FIRST_MIN: usize = 2;
/// Samples of all candidates judged on one batch together: a sample takes some tenth of a millisecond.
const FIRST_SAMPLES: usize = 24_576;

/// Samples in one batch beyond which the scheduler's whole search would take longer than all that comes before it.
pub(crate) const WHOLE_SAMPLES_MAX: usize = 8_192;

/// Candidates tried at most until one fits.
const TRIED_MAX: usize = 192;

/// Candidates that the scheduler's whole search may judge: the best, and whoever is better than it then.
const WHOLE_MAX: usize = 2;

/// Candidates judged at once, so that a search does the same on any number of cores.
const AT_ONCE: usize = 8;

/// A contender and its judged batches.
struct Judgement {
    contender: Contender,
    judged: Vec<Judged>,
}

impl Judgement {
    fn prediction(&self) -> PlanPrediction {
        summary(&self.judged)
    }

    fn step_ns(&self) -> u64 {
        self.prediction().step_ns_mean
    }
}

/// Judges the candidates in front; all others fall.
pub(crate) fn judge(
    input: &SearchInput<'_>,
    model: &Arc<CostModel>,
    mut contenders: Vec<Contender>,
    batches: &[Vec<SampleIndex>],
    found: &mut Found,
    progress: &dyn Fn(&Found),
) -> Result<(), PlanError> {
    contenders.sort_by_key(|contender| (contender.rough, contender.candidate));
    let size = batches[0].len().max(1);
    let first = (FIRST_SAMPLES / size).clamp(FIRST_MIN, FIRST_MAX);
    let mut waiting = contenders.into_iter().peekable();
    let mut judged: Vec<Judgement> = Vec::new();
    let mut num_tried = 0;
    while waiting.peek().is_some()
        && (judged.is_empty() && num_tried < TRIED_MAX.max(first) || num_tried < first)
    {
        if !judged.is_empty() && (input.halt)() {
            break;
        }
        progress(found);
        let best_ns = judged.iter().map(Judgement::step_ns).min();
        let cutoff_ns = found.cutoff_ns().into_iter().chain(best_ns.map(|ns| ns + ns / 4)).min();
        let next: Vec<Contender> = waiting.by_ref().take(AT_ONCE.min(first)).collect();
        num_tried += next.len();
        let verdicts: Vec<_> = next
            .into_par_iter()
            .map(|contender| {
                if cutoff_ns.is_some_and(|cutoff| contender.bounds_ns[0] > cutoff) {
                    return Ok((contender, Err(Rejection::Bound)));
                }
                let scheduler = contender.candidate.scheduler(input, model)?;
                let verdict = judge_batch(&scheduler, 0, &batches[0], &|| true)?;
                Ok((contender, verdict))
            })
            .collect::<Result<_, PlanError>>()?;
        for (contender, verdict) in verdicts {
            match verdict {
                Ok(one) => judged.push(Judgement { contender, judged: vec![one] }),
                Err(rejection) => found.rejections.push(rejection),
            }
        }
    }
    judged.sort_by_key(|one| (one.step_ns(), one.contender.candidate));
    found.num_judged += judged.len() as u64;
    let slower = judged.split_off(judged.len().min(NUM_RANKED));
    drop(slower);
    for one in rest_of_batches(input, model, judged, batches, found)? {
        found.insert(one.contender.candidate.ranked(input.order, one.prediction()));
    }
    if size <= WHOLE_SAMPLES_MAX {
        polish(input, model, batches, found)?;
    }
    let was_halted = (input.halt)();
    let cutoff_ns = found.cutoff_ns();
    for contender in waiting {
        if cutoff_ns.is_some_and(|cutoff| contender.bound_mean_ns() > cutoff) {
            found.rejections.push(Rejection::Bound);
        } else if was_halted && num_tried < first {
            found.num_left += 1;
        } else {
            found.rejections.push(Rejection::Estimate);
        }
    }
    Ok(())
}

/// The same candidates on the batches that are left; those that do not fit there fall.
fn rest_of_batches(
    input: &SearchInput<'_>,
    model: &Arc<CostModel>,
    judged: Vec<Judgement>,
    batches: &[Vec<SampleIndex>],
    found: &mut Found,
) -> Result<Vec<Judgement>, PlanError> {
    let pairs: Vec<(usize, usize)> =
        (0..judged.len()).flat_map(|at| (1..batches.len()).map(move |step| (at, step))).collect();
    let verdicts: Vec<Verdict> = pairs
        .par_iter()
        .map(|&(at, step)| {
            let scheduler = judged[at].contender.candidate.scheduler(input, model)?;
            judge_batch(&scheduler, step as u64, &batches[step], &|| true)
        })
        .collect::<Result<_, PlanError>>()?;
    let mut fitting = Vec::with_capacity(judged.len());
    let mut verdicts = verdicts.into_iter();
    for mut one in judged {
        let own: Result<Vec<Judged>, Rejection> = verdicts.by_ref().take(batches.len() - 1).collect();
        match own {
            Ok(rest) => {
                one.judged.extend(rest);
                fitting.push(one);
            }
            Err(rejection) => {
                found.num_judged -= 1;
                found.rejections.push(rejection);
            }
        }
    }
    Ok(fitting)
}

/// The scheduler's whole search for the best plan, as training will run it, until the best is one that had it.
fn polish(
    input: &SearchInput<'_>,
    model: &Arc<CostModel>,
    batches: &[Vec<SampleIndex>],
    found: &mut Found,
) -> Result<(), PlanError> {
    let is_same = |a: &RankedPlan, b: &RankedPlan| {
        (a.layout, a.num_microbatches) == (b.layout, b.num_microbatches)
    };
    let mut polished: Vec<RankedPlan> = Vec::new();
    while polished.len() < WHOLE_MAX && !(input.halt)() {
        let Some(best) = found.ranked.first().copied() else { break };
        if polished.iter().any(|done| is_same(done, &best)) {
            break;
        }
        let candidate = crate::space::Candidate {
            layout: best.layout,
            num_microbatches: best.num_microbatches,
        };
        let scheduler = candidate.scheduler(input, model)?;
        let steps: Vec<(u64, &Vec<SampleIndex>)> = (0..).zip(batches).collect();
        let verdicts: Vec<Verdict> = steps
            .par_iter()
            .map(|&(step, batch)| judge_batch(&scheduler, step, batch, &|| (input.halt)()))
            .collect::<Result<_, PlanError>>()?;
        let Ok(judged) = verdicts.into_iter().collect::<Result<Vec<Judged>, Rejection>>() else { break };
        found.ranked.remove(0);
        let plan = candidate.ranked(input.order, summary(&judged));
        found.insert(plan);
        polished.push(plan);
    }
    Ok(())
}
