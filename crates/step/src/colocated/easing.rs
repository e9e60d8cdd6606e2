//! Easing: a microbatch of a colocated rank recomputes only as much as memory asks for.
//!
//! A rank of a colocated layout has one microbatch in flight, so what one of them recomputes does not depend on the others.
//! A plan that recomputes for the sake of its largest microbatches need not do so in the small ones.

use dflop_cost::{ColocatedMemory, CostModel, CostSettings, RankMemory, RankMicrobatch};
use dflop_types::{ModelProfile, Recomputation, Recompute};
use std::sync::Arc;

/// Number of parts into which the LLM layers are divided. Between two modes of all layers, each rung recomputes one part more.
const PARTS: u32 = 8;

/// Ways to recompute less than a plan does, the least first. Each keeps less than those before it, in both components.
///
/// ```text
/// nothing -> selective in more and more LLM layers -> in the encoder too -> full in more and more LLM layers
/// ```
///
/// The LLM backbone comes first, because its layers keep most. What the plan itself recomputes stands behind all of these.
fn rungs(num_llm_layers: u32) -> Vec<Recomputation> {
    let parts = |of: fn(u32) -> Recompute| {
        let layers = (1..PARTS).map(move |part| num_llm_layers * part / PARTS);
        layers.filter(|&layers| layers > 0).map(of)
    };
    let selective_of =
        |layers| std::num::NonZeroU32::new(layers).map_or(Recompute::None, Recompute::SelectiveOf);
    let of = |encoder| move |llm| Recomputation { encoder, llm };
    let mut rungs = vec![Recomputation::NONE];
    rungs.extend(parts(selective_of).chain([Recompute::Selective]).map(of(Recompute::None)));
    rungs.push(Recomputation::both(Recompute::Selective));
    rungs.extend(parts(Recompute::full_of).chain([Recompute::Full]).map(of(Recompute::Selective)));
    rungs.dedup();
    rungs
}

/// Cost models of the same model that recompute less, with what each recomputes.
#[derive(Debug, Clone, Default)]
pub struct Eased {
    rungs: Vec<(Recomputation, Arc<CostModel>)>,
}

impl Eased {
    /// All that was measured of a profile's model under `settings`, whatever these say of recomputation.
    pub fn of(profile: &ModelProfile, settings: &CostSettings) -> Self {
        let with = |recompute: Recomputation| {
            let model = CostModel::with(profile, &settings.recomputing(recompute)).ok()?;
            Some((recompute, Arc::new(model)))
        };
        Self { rungs: rungs(profile.num_llm_layers()).into_iter().filter_map(with).collect() }
    }

    /// The same models on a cluster whose nodes have `ranks_per_node` ranks.
    #[must_use]
    pub fn with_ranks_per_node(&self, ranks_per_node: u32) -> Self {
        let on_nodes = |(of, model): &(Recomputation, Arc<CostModel>)| {
            (*of, Arc::new(CostModel::clone(model).with_ranks_per_node(ranks_per_node)))
        };
        Self { rungs: self.rungs.iter().map(on_nodes).collect() }
    }

    /// Those that recompute less than `most` in one component, and no more in the other.
    #[must_use]
    pub fn below(&self, most: Recomputation) -> Self {
        let is_less = |(one, _): &&(Recomputation, _)| one.is_at_most(most) && *one != most;
        Self { rungs: self.rungs.iter().filter(is_less).cloned().collect() }
    }

    /// What each of them recomputes, the least first.
    pub fn modes(&self) -> impl Iterator<Item = Recomputation> {
        self.rungs.iter().map(|(of, _)| *of)
    }

    /// The cost model of this mode of recomputation; `None` if it is not among them.
    pub fn of_mode(&self, recompute: Recomputation) -> Option<Arc<CostModel>> {
        self.rungs.iter().find(|(of, _)| *of == recompute).map(|(_, model)| Arc::clone(model))
    }

    /// Whether there is none.
    pub(crate) const fn is_empty(&self) -> bool {
        self.rungs.is_empty()
    }

    /// The model that recomputes least.
    pub(crate) fn least(&self) -> Option<&CostModel> {
        self.rungs.first().map(|(_, model)| &**model)
    }

    /// The models of which all layers of a component do the same, the least first.
    pub(crate) fn even(&self) -> impl Iterator<Item = &CostModel> {
        let is_even = |(of, _): &&(Recomputation, _)| of.llm.first_layers_wanted() == 0;
        self.rungs.iter().filter(is_even).map(|(_, model)| &**model)
    }

    /// What a microbatch recomputes: the least with which `peak` is within the budget. `None`: as much as the plan does.
    fn least_within(
        &self,
        budget_bytes: u64,
        peak: impl Fn(&CostModel) -> RankMemory,
    ) -> Option<(Recomputation, &CostModel, RankMemory)> {
        // Bytes fall from rung to rung. The one that is taken has been asked for its bytes, so it fits in any case.
        let (mut low, mut high, mut found) = (0, self.rungs.len(), None);
        while low < high {
            let middle = usize::midpoint(low, high);
            let (recompute, model) = &self.rungs[middle];
            let memory = peak(model);
            if memory.total_bytes() <= budget_bytes {
                found = Some((*recompute, &**model, memory));
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        found
    }
}

/// What a rank does with one microbatch.
pub(crate) struct Run<'a> {
    /// What it recomputes; `None`: what the plan says.
    pub(crate) recompute: Option<Recomputation>,
    pub(crate) model: &'a CostModel,
    pub(crate) memory: RankMemory,
}

/// How a tensor group runs a microbatch, with the memory of its fullest rank: what each encoder replica of the group encodes (with
/// whether features are exchanged), and what its LLM backbone reads. `most` is the model of the plan; `fixed` is
/// [`CostModel::colocated_memory`].
pub(crate) fn run<'a>(
    (most, eased): (&'a CostModel, &'a Eased),
    budget_bytes: Option<u64>,
    (encoded, llm): (&[(RankMicrobatch, bool)], &RankMicrobatch),
    fixed: ColocatedMemory,
) -> Run<'a> {
    let peak = |model: &CostModel| {
        let peaks =
            encoded.iter().map(|(own, is_exchanged)| model.colocated_peak(own, llm, fixed, *is_exchanged));
        let fuller = |a: RankMemory, b: RankMemory| if b.total_bytes() > a.total_bytes() { b } else { a };
        peaks.reduce(fuller).expect("a tensor group has an encoder replica")
    };
    let least = budget_bytes.and_then(|budget| eased.least_within(budget, peak));
    match least {
        Some((recompute, model, memory)) => Run { recompute: Some(recompute), model, memory },
        None => Run { recompute: None, model: most, memory: peak(most) },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rungs_recompute_more_and_more() {
        for layers in [1, 3, 8, 28, 80] {
            let rungs = rungs(layers);
            assert_eq!(
                (rungs[0], rungs.last()),
                (
                    Recomputation::NONE,
                    Some(&Recomputation { encoder: Recompute::Selective, llm: Recompute::Full })
                )
            );
            for pair in rungs.windows(2) {
                assert!(
                    pair[0].is_at_most(pair[1]) && pair[0] != pair[1],
                    "{layers}: {} {}",
                    pair[0],
                    pair[1]
                );
            }
            let layers_of = rungs.iter().map(|of| of.llm.first_layers_wanted());
            assert!(layers_of.into_iter().all(|first| first < layers.max(2)));
        }
    }
}
