//! What a rival's layouts recompute beyond the modes that are the same in both components and all layers.

use crate::input::SearchInput;
use crate::models::Models;
use crate::space::Candidate;
use dflop_step::Eased;

/// The colocated candidates once more, whose components recompute different things.
pub(crate) fn unequal(models: &Models, candidates: &[Candidate]) -> Vec<Candidate> {
    let pairs = || models.modes().iter().filter(|pair| pair.of_both().is_none());
    let bases = candidates.iter().filter(|one| one.layout.is_colocated() && one.recompute.is_none());
    bases
        .flat_map(|one| pairs().map(|&recompute| Candidate { recompute, ..*one }))
        .filter(|one| models.has(one))
        .collect()
}

/// The fastest colocated candidate once more with less recomputation: only the first layers recompute, the same ones in every
/// microbatch. The list is empty if it recomputes nothing.
pub(crate) fn partly(input: &SearchInput<'_>, models: &Models, fastest: &Candidate) -> Vec<Candidate> {
    let less = models.easing(input, fastest).map(|easing| easing.below(fastest.recompute));
    let partly = less.iter().flat_map(Eased::modes).filter(|mode| !mode.has_even_layers());
    partly.map(|recompute| Candidate { recompute, ..*fastest }).collect()
}
