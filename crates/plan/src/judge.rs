//! Candidates, judged by the scheduler and the simulator.

use crate::contender::Contender;
use crate::error::PlanError;
use crate::evaluate::{Judged, Outlook, evaluate, judge_batch, summary};
use crate::found::Found;
use crate::input::SearchInput;
use crate::models::Models;
use crate::run_memory::{Held, RunMemory};
use crate::space::Candidate;
use dflop_types::{Rejection, SampleIndex};
use rayon::prelude::*;

/// Where a candidate fits: its judged batches, and its memory on the batches of the run. Where it does not: why.
type Answer = Result<(Vec<Judged>, Option<RunMemory>), Rejection>;

/// Judges a candidate on all batches, and its memory on those of the run. `bounds_ns` has a lower bound of its step on each
/// batch; 0 where none is known. It falls where no step below `cutoff_ns` is left to it.
fn answer(
    input: &SearchInput<'_>,
    models: &Models,
    candidate: &Candidate,
    bounds_ns: &[u64],
    Held { batches, run }: &Held<'_>,
    cutoff_ns: Option<u64>,
) -> Result<Answer, PlanError> {
    let scheduler = candidate.scheduler(input, models)?;
    let judged = match evaluate(&scheduler, batches, bounds_ns, input.objective, cutoff_ns)? {
        Outlook::Falls(rejection) => return Ok(Err(rejection)),
        Outlook::Fits(judged) => judged,
    };
    let prediction = summary(&judged);
    let peaks = [prediction.encoder_memory_bytes_peak, prediction.llm_memory_bytes_peak];
    let whole = |_: &Candidate, step, batch: &[SampleIndex]| judge_batch(&scheduler, step, batch, &|| false);
    let asked = [(*candidate, peaks)];
    let checked = run.as_ref().map(|run| run.check(input, models, &asked, true, &whole)).transpose()?;
    Ok(match checked.and_then(|mut one| one.pop()) {
        Some(Err(rejection)) => Err(rejection),
        Some(Ok(of_run)) => Ok((judged, Some(of_run))),
        None => Ok((judged, None)),
    })
}

/// Adds a candidate that fits to `found`; else the answer is why it falls.
fn take(
    input: &SearchInput<'_>,
    candidate: &Candidate,
    answer: Answer,
    found: &mut Found,
) -> Option<Rejection> {
    let (judged, of_run) = match answer {
        Ok(fitting) => fitting,
        Err(rejection) => return Some(rejection),
    };
    found.run_memory.extend(of_run.map(|of_run| (*candidate, of_run)));
    found.num_judged += 1;
    found.insert(candidate, input, &judged);
    None
}

/// Judges a candidate on all batches, and its memory on those of the run. `bounds_ns` has a lower bound of its step on each
/// batch; 0 where none is known. The candidate joins `found`, or the answer is why it falls.
pub(crate) fn judge_one(
    input: &SearchInput<'_>,
    models: &Models,
    candidate: &Candidate,
    bounds_ns: &[u64],
    held: &Held<'_>,
    found: &mut Found,
) -> Result<Option<Rejection>, PlanError> {
    let answer = answer(input, models, candidate, bounds_ns, held, found.cutoff_ns())?;
    Ok(take(input, candidate, answer, found))
}

/// As [`judge_one`], for several contenders at a time. Each joins `found`, or the reason why it falls does.
pub(crate) fn judge_some(
    input: &SearchInput<'_>,
    models: &Models,
    contenders: &[Contender],
    held: &Held<'_>,
    found: &mut Found,
) -> Result<(), PlanError> {
    let cutoff_ns = found.cutoff_ns();
    let of = |one: &Contender| answer(input, models, &one.candidate, &one.bounds_ns, held, cutoff_ns);
    let answers: Vec<Answer> = contenders.par_iter().map(of).collect::<Result<_, PlanError>>()?;
    for (one, answer) in contenders.iter().zip(answers) {
        let rejection = take(input, &one.candidate, answer, found);
        found.rejections.extend(rejection);
    }
    Ok(())
}
