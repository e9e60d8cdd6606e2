//! One candidate, judged by the scheduler and the simulator.

use crate::error::PlanError;
use crate::evaluate::{Outlook, evaluate, judge_batch, summary};
use crate::found::Found;
use crate::input::SearchInput;
use crate::models::Models;
use crate::run_memory::Held;
use crate::space::Candidate;
use dflop_types::{Rejection, SampleIndex};

/// Judges a candidate on all batches, and its memory on those of the run. `bounds_ns` has a lower bound of its step on each
/// batch; 0 where none is known. The candidate joins `found`, or the answer is why it falls.
pub(crate) fn judge_one(
    input: &SearchInput<'_>,
    models: &Models,
    candidate: &Candidate,
    bounds_ns: &[u64],
    Held { batches, run }: &Held<'_>,
    found: &mut Found,
) -> Result<Option<Rejection>, PlanError> {
    let scheduler = candidate.scheduler(input, models)?;
    let judged = match evaluate(&scheduler, batches, bounds_ns, input.objective, found.cutoff_ns())? {
        Outlook::Falls(rejection) => return Ok(Some(rejection)),
        Outlook::Fits(judged) => judged,
    };
    let prediction = summary(&judged);
    let peaks = [prediction.encoder_memory_bytes_peak, prediction.llm_memory_bytes_peak];
    let whole = |_: &Candidate, step, batch: &[SampleIndex]| judge_batch(&scheduler, step, batch, &|| false);
    let asked = [(*candidate, peaks)];
    let checked = run.as_ref().map(|run| run.check(input, models, &asked, true, &whole)).transpose()?;
    match checked.and_then(|mut one| one.pop()) {
        Some(Err(rejection)) => return Ok(Some(rejection)),
        Some(Ok(of_run)) => _ = found.run_memory.insert(*candidate, of_run),
        None => {}
    }
    found.num_judged += 1;
    found.insert(candidate, input, &judged);
    Ok(None)
}
