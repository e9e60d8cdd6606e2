//! What a rival's layouts recompute beyond the modes that are the same in both components and all layers.

use crate::input::SearchInput;
use crate::models::Models;
use crate::space::Candidate;
use dflop_step::Arm;
use dflop_types::{Layout, Recomputation};

/// A mean step in nanoseconds, with the candidate and the arm that take it.
pub(crate) type Timed = (u64, Candidate, Arm);

/// The colocated candidates once more, whose components recompute different things. Where a layout is the fastest without
/// recomputation, as `steps` say, more of it gains nothing, and it has none of them.
pub(crate) fn unequal(models: &Models, candidates: &[Candidate], steps: &[Timed]) -> Vec<Candidate> {
    let fastest = |layout: &Layout| {
        let of_layout = steps.iter().filter(|(_, candidate, _)| candidate.layout == *layout);
        of_layout
            .min_by_key(|(ns, candidate, _)| (*ns, *candidate))
            .map(|(_, candidate, _)| candidate.recompute)
    };
    let is_tight = |candidate: &&Candidate| {
        let is_base = candidate.layout.is_colocated() && candidate.recompute.is_none();
        is_base && !fastest(&candidate.layout).is_some_and(Recomputation::is_none)
    };
    let pairs = || models.modes().iter().filter(|pair| pair.of_both().is_none());
    let tight = candidates.iter().filter(is_tight);
    tight
        .flat_map(|candidate| pairs().map(|&recompute| Candidate { recompute, ..*candidate }))
        .filter(|candidate| models.has(candidate))
        .collect()
}

/// The fastest colocated candidate once more with less recomputation: only the first layers recompute, the same ones in every
/// microbatch. The list is empty if the fastest candidate recomputes nothing.
pub(crate) fn partly(input: &SearchInput<'_>, models: &Models, steps: &[Timed]) -> Vec<Candidate> {
    let colocated = steps.iter().filter(|(_, candidate, _)| candidate.layout.is_colocated());
    let Some(&(_, fastest, _)) = colocated.min_by_key(|&&(ns, candidate, _)| (ns, candidate)) else {
        return Vec::new();
    };
    let less = models.eased(input, &fastest);
    let partly = less.modes().filter(|mode| mode.llm.first_layers_wanted() > 0);
    partly.map(|recompute| Candidate { recompute, ..fastest }).collect()
}
