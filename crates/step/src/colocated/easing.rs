//! Easing: a microbatch of a colocated rank recomputes only as much as memory asks for.
//!
//! A rank of a colocated layout has one microbatch in flight, so what one of them recomputes does not depend on the others.
//! A plan that recomputes for the sake of its largest microbatches need not do so in the small ones.

use dflop_cost::{ColocatedMemory, CostModel, CostSettings, RankMemory, RankMicrobatch, RankRole};
use dflop_types::{Component, EncoderSegments, MicrobatchShape, ModelProfile, Recomputation, Recompute};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Number of parts into which the layers of a component are divided. Between two modes of all its layers, each rung recomputes
/// one part more.
const PARTS: u32 = 8;

/// Recomputation by component: what [`Component::Encoder`] and [`Component::Llm`] have, in this order.
type OfEach<T> = [T; 2];

/// What a component recomputes from rung to rung, in two climbs: from nothing to `selective`, and on to `full`.
fn climbs(num_layers: u32) -> [Vec<Recompute>; 2] {
    let parts = |of: fn(u32) -> Recompute| {
        let layers = (1..PARTS).map(move |part| num_layers * part / PARTS);
        layers.filter(|&layers| layers > 0).map(of)
    };
    let selective_of =
        |layers| std::num::NonZeroU32::new(layers).map_or(Recompute::None, Recompute::SelectiveOf);
    [
        parts(selective_of).chain([Recompute::Selective]).collect(),
        parts(Recompute::full_of).chain([Recompute::Full]).collect(),
    ]
}

/// Ways to recompute less than a plan does, the least first. Each recomputes more layers of one component than the way before it.
///
/// Either component climbs twice, as [`climbs`] has it. The climb that saves most bytes for the time it takes comes first
/// (`saving`, bytes a nanosecond of each climb): a large encoder that reads four times as many tokens as the LLM backbone
/// recomputes before it, a small one after it. What the plan itself recomputes stands behind all of these.
fn rungs(num_layers: OfEach<u32>, saving: OfEach<[f64; 2]>) -> Vec<Recomputation> {
    let climbs = num_layers.map(climbs);
    let mut modes = [Recompute::None; 2];
    let mut rungs = vec![Recomputation::NONE];
    let mut next = [0, 0];
    while next != [2, 2] {
        let worth = |of: usize| saving[of].get(next[of]).copied().unwrap_or(-1.0);
        // Of equals the LLM backbone: its layers are more.
        let of = usize::from(worth(0) <= worth(1));
        for &mode in &climbs[of][next[of]] {
            modes[of] = mode;
            rungs.push(Recomputation { encoder: modes[0], llm: modes[1] });
        }
        next[of] += 1;
    }
    rungs
}

/// Those of the `rungs` that a plan takes which recomputes `most`. Of each rung the plan takes no more in a component than it
/// recomputes there itself. What it recomputes itself stands behind all of these.
///
/// For example, the rung `encoder selective and llm selective:4` of a plan `llm full` is `llm selective:4`.
fn cut(rungs: &[Recomputation], most: Recomputation) -> Vec<Recomputation> {
    let cut = rungs.iter().map(|rung| rung.at_most(most)).filter(|rung| *rung != most);
    let mut cut: Vec<Recomputation> = cut.collect();
    cut.dedup();
    cut
}

/// Bytes of activations that each climb of each component saves a nanosecond that it adds.
fn saving(model_of: impl Fn(Recomputation) -> Option<CostModel>) -> OfEach<[f64; 2]> {
    // Bytes and times are nearly linear in the tokens, so that their ratio hardly depends on these.
    let microbatch = MicrobatchShape {
        encoder_segments: vec![EncoderSegments::of(4, 1024)],
        llm_tokens: vec![1024; 4],
        label_tokens: 1024,
    };
    [Component::Encoder, Component::Llm].map(|component| {
        let of = |mode: Recompute| {
            let none = Recompute::None;
            let is_encoder = component == Component::Encoder;
            let (encoder, llm) = if is_encoder { (mode, none) } else { (none, mode) };
            let model = model_of(Recomputation { encoder, llm })?;
            let stage = model.whole_stage();
            let (role, time) = if is_encoder {
                (RankRole::Encoder, model.encoder(&microbatch))
            } else {
                (RankRole::Stage(stage), model.llm_stage(&microbatch, stage.num_layers, true, true))
            };
            let bytes = model.activation_bytes(role, &microbatch);
            Some((bytes as f64, time.total_ns() as f64))
        };
        let modes = Recompute::ALL.map(of);
        [0, 1].map(|climb| match (modes[climb], modes[climb + 1]) {
            // What adds no time by the measurement is worth most.
            (Some((bytes, ns)), Some((fewer, longer))) => (bytes - fewer).max(0.0) / (longer - ns).max(1.0),
            _ => 0.0,
        })
    })
}

/// Cost models of the same model that recompute less, with what each recomputes.
#[derive(Debug, Clone, Default)]
pub struct Eased {
    rungs: Vec<(Recomputation, Arc<CostModel>)>,
}

/// Cost models of the same model for plans of several modes of recomputation, from which each plan takes its own with
/// [`Easing::below`].
#[derive(Debug, Clone)]
pub struct Easing {
    rungs: Vec<Recomputation>,
    models: BTreeMap<Recomputation, Arc<CostModel>>,
}

impl Easing {
    /// All that was measured of a profile's model under `settings`, whatever these say of recomputation, for plans whose
    /// recomputation is among `plans`.
    pub fn of(
        profile: &ModelProfile,
        settings: &CostSettings,
        plans: impl IntoIterator<Item = Recomputation>,
    ) -> Self {
        let model_of =
            |recompute: Recomputation| CostModel::with(profile, &settings.recomputing(recompute)).ok();
        // `full:K` of an encoder counts the layers of its first tower.
        let num_encoder_layers = profile.count("encoder_layer") + profile.count(ModelProfile::WINDOW_LAYER);
        let rungs = rungs([num_encoder_layers, profile.num_llm_layers()], saving(model_of));
        let wanted: BTreeSet<Recomputation> = plans.into_iter().flat_map(|most| cut(&rungs, most)).collect();
        let with_model = |of: Recomputation| Some((of, Arc::new(model_of(of)?)));
        Self { models: wanted.into_iter().filter_map(with_model).collect(), rungs }
    }

    /// The same models on a cluster whose nodes have `ranks_per_node` ranks.
    #[must_use]
    pub fn with_ranks_per_node(mut self, ranks_per_node: u32) -> Self {
        for model in self.models.values_mut() {
            *model = Arc::new(CostModel::clone(model).with_ranks_per_node(ranks_per_node));
        }
        self
    }

    /// The cost model of this mode of recomputation; `None` if no plan eases to it.
    pub fn of_mode(&self, recompute: Recomputation) -> Option<&Arc<CostModel>> {
        self.models.get(&recompute)
    }

    /// Those that recompute less than `most`, which is what a plan recomputes, in one component, and no more in the other.
    #[must_use]
    pub fn below(&self, most: Recomputation) -> Eased {
        let with_model = |of: Recomputation| Some((of, Arc::clone(self.models.get(&of)?)));
        Eased { rungs: cut(&self.rungs, most).into_iter().filter_map(with_model).collect() }
    }
}

impl Eased {
    /// The same models on a cluster whose nodes have `ranks_per_node` ranks.
    #[must_use]
    pub fn with_ranks_per_node(&self, ranks_per_node: u32) -> Self {
        let on_nodes = |(of, model): &(Recomputation, Arc<CostModel>)| {
            (*of, Arc::new(CostModel::clone(model).with_ranks_per_node(ranks_per_node)))
        };
        Self { rungs: self.rungs.iter().map(on_nodes).collect() }
    }

    /// What each of them recomputes, the least first.
    pub fn modes(&self) -> impl Iterator<Item = Recomputation> {
        self.rungs.iter().map(|(of, _)| *of)
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
        let is_even = |(of, _): &&(Recomputation, _)| of.has_even_layers();
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
        for layers in [[1, 1], [27, 3], [0, 8], [32, 28], [45, 80]] {
            for saving in [[[9.0, 1.0], [9.0, 2.0]], [[3.0, 2.0], [1.0, 4.0]], [[0.0; 2]; 2]] {
                let all = rungs(layers, saving);
                assert_eq!(all.last(), Some(&Recomputation::both(Recompute::Full)));
                for most in Recomputation::all() {
                    let mut rungs = cut(&all, most);
                    assert_eq!(rungs.first(), (!most.is_none()).then_some(&Recomputation::NONE));
                    rungs.push(most);
                    for pair in rungs.windows(2) {
                        let is_less = pair[0].is_at_most(pair[1]) && pair[0] != pair[1];
                        assert!(is_less, "{layers:?}, {most}: {} {}", pair[0], pair[1]);
                    }
                    for of in &rungs {
                        for (mode, layers) in [of.encoder, of.llm].into_iter().zip(layers) {
                            assert!(mode.first_layers_wanted() < layers.max(2));
                        }
                    }
                }
            }
        }
    }

    /// Whichever component climbs first, a plan that recomputes one of them alone has every part of that one between.
    #[test]
    fn plans_of_one_component_ease_it_part_by_part() {
        for saving in [[[9.0, 4.0], [8.0, 1.0]], [[0.0; 2], [8.0, 1.0]]] {
            let rungs = rungs([8, 8], saving);
            for mode in [Recompute::Selective, Recompute::Full] {
                let parts = if mode == Recompute::Full { 16 } else { 8 };
                for most in [
                    Recomputation { encoder: mode, llm: Recompute::None },
                    Recomputation { encoder: Recompute::None, llm: mode },
                ] {
                    assert_eq!(cut(&rungs, most).len(), parts, "{most}");
                }
            }
        }
    }

    /// The climbs of 8 layers each, by where they end.
    #[test]
    fn what_saves_most_for_its_time_recomputes_first() {
        let ends = |saving| {
            let even = rungs([8, 8], saving).into_iter().filter(|of| of.has_even_layers());
            even.map(|of| of.to_string()).collect::<Vec<_>>()
        };
        // A large encoder keeps more for the same time.
        assert_eq!(
            ends([[9.0, 4.0], [8.0, 1.0]]),
            ["none", "encoder selective", "selective", "encoder full and llm selective", "full"]
        );
        assert_eq!(
            ends([[9.0, 8.0], [1.0, 1.0]]),
            ["none", "encoder selective", "encoder full", "encoder full and llm selective", "full"]
        );
        // A small one, and one that is frozen and keeps nothing.
        assert_eq!(
            ends([[0.0; 2], [8.0, 1.0]]),
            ["none", "llm selective", "llm full", "encoder selective and llm full", "full"]
        );
    }
}
