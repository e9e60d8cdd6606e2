//! A way out for candidates that lacked memory: what would fit in their place, with its step time. For example: "with full
//! recomputation it fits: 1,402 ms".

use crate::contender::{Contender, Known, contenders};
use crate::error::PlanError;
use crate::evaluate::judge_batch;
use crate::input::SearchInput;
use crate::models::Models;
use crate::rival::words;
use crate::space::{Candidate, Rules};
use dflop_types::{Component, RankedPlan, Recomputation, Recompute, Rejection, SampleIndex};

/// The most recomputing pipelines that are judged until one fits.
const TRIED: usize = 6;

/// A candidate that fits, while others of its kind (pipelines, or colocated layouts) lack memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mend {
    /// Whose ranks lack memory, as rejections name it.
    pub component: Component,
    /// The candidate in words.
    pub words: String,
    /// Its step, in nanoseconds.
    pub step_ns: u64,
}

/// One mend for each component whose ranks lack memory in some candidate: the fastest candidate of that kind that fits.
///
/// Ranked plans are looked at first. If no pipeline is among them, pipelines with full recomputation are judged on the
/// first batch, in order of their estimates, until one fits.
pub(crate) fn mends(
    input: &SearchInput<'_>,
    models: &Models,
    known: &Known<'_>,
    batches: &[Vec<SampleIndex>],
    ranked: &[RankedPlan],
    rejections: &[Rejection],
) -> Result<Vec<Mend>, PlanError> {
    let lacks = |component: Component| {
        rejections
            .iter()
            .any(|r| matches!(r, Rejection::Memory { component: found, .. } if *found == component))
    };
    let mut found = Vec::new();
    if lacks(Component::Both)
        && let Some(plan) = ranked.iter().find(|plan| plan.layout.is_colocated())
    {
        let words = words(&plan.layout.to_string(), plan.recompute);
        found.push(Mend { component: Component::Both, words, step_ns: plan.prediction.step_ns_mean });
    }
    let of_pipelines: Vec<Component> =
        [Component::Encoder, Component::Llm].into_iter().filter(|component| lacks(*component)).collect();
    let full = Recomputation::both(Recompute::Full);
    if of_pipelines.is_empty() || !models.modes().contains(&full) {
        return Ok(found);
    }
    if let Some(plan) = ranked.iter().find(|plan| !plan.layout.is_colocated()) {
        let words = words(&plan.layout.to_string(), plan.recompute);
        let mend =
            |component| Mend { component, words: words.clone(), step_ns: plan.prediction.step_ns_mean };
        found.extend(of_pipelines.into_iter().map(mend));
        return Ok(found);
    }
    let rules = Rules::of(input, models.plain());
    let space = rules.pipelines(rules.plain(), |layout| vec![*layout]);
    let mut candidates: Vec<Candidate> =
        space.candidates.into_iter().map(|candidate| Candidate { recompute: full, ..candidate }).collect();
    candidates.sort_unstable();
    candidates.dedup();
    let mut able = contenders(input, models, known, &candidates, &mut Vec::new())?;
    able.retain(|contender: &Contender| !contender.rough.is_over);
    able.sort_by_key(|contender| (contender.rough, contender.candidate));
    for contender in able.into_iter().take(TRIED) {
        let candidate = contender.candidate;
        let scheduler = candidate.scheduler(input, models)?;
        if let Ok(judged) = judge_batch(&scheduler, 0, &batches[0], &|| true)? {
            let words = words(&candidate.layout.to_string(), candidate.recompute);
            let mend = |component| Mend { component, words: words.clone(), step_ns: judged.makespan_ns() };
            found.extend(of_pipelines.iter().map(|component| mend(*component)));
            break;
        }
    }
    Ok(found)
}
