//! Finds candidates that no schedule can fit into memory, because one sample alone is too much for a rank. Nothing has to
//! be scheduled to know that.

use crate::error::PlanError;
use crate::input::SearchInput;
use crate::models::Models;
use crate::space::Candidate;
use dflop_cost::{CostModel, RankRole, StageLayers};
use dflop_types::{
    Component, ComponentLayout, LayerCut, MicrobatchShape, Recompute, Rejection, SampleShape, Zero,
};
use rayon::prelude::*;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// Positions of the samples that need most memory alone: one for the encoder, one for an LLM layer, one for the head. They
/// may be missing from the sampled batches, so they are checked separately.
///
/// *Complexity*: O(n) for n samples, about a microsecond each: a search asks once.
pub(crate) fn heaviest(model: &CostModel, shapes: &[SampleShape]) -> Vec<usize> {
    let layer = RankRole::Stage(StageLayers { num_layers: 1, is_first: false, is_last: false });
    let asks: [&dyn Fn(&SampleShape) -> u64; 3] = [
        &|shape| model.activation_bytes(RankRole::Encoder, &MicrobatchShape::pack([shape])),
        &|shape| model.activation_bytes(layer, &MicrobatchShape::pack([shape])),
        &|shape| u64::from(shape.label_tokens),
    ];
    let heaviest = |ask: &dyn Fn(&SampleShape) -> u64| {
        (0..shapes.len()).max_by_key(|&position| (ask(&shapes[position]), Reverse(position)))
    };
    let mut positions: Vec<usize> = asks.into_iter().filter_map(heaviest).collect();
    positions.sort_unstable();
    positions.dedup();
    positions
}

/// What the fullest rank needs for one sample of [`heaviest`] alone.
///
/// Many candidates share a need. That of an encoder rank depends on the encoder's degrees, that of an LLM rank on its
/// stages; `Key` has all that decides it. So each need is counted once for each key, not once for each candidate.
#[derive(Debug, Default)]
pub(crate) struct Alone {
    budget_bytes: Option<u64>,
    /// Bytes of the fullest encoder rank.
    encoder: BTreeMap<Key, u64>,
    /// Bytes of the fullest LLM rank.
    llm: BTreeMap<Key, u64>,
    /// Bytes of the fullest rank of each colocated candidate.
    both: BTreeMap<Candidate, u64>,
}

/// What decides the need of a component's ranks: its degrees, the chunks of a pipeline rank, the cut into stages, whether
/// either component has several replicas (then feature rows are copied on their way, which takes bytes), what replicas
/// keep only a part of, and what is recomputed.
type Key = (ComponentLayout, u32, Option<LayerCut>, bool, Zero, Recompute);

fn keys(candidate: &Candidate) -> [(Component, Key); 2] {
    let layout = candidate.layout;
    let (encoder, llm) = (layout.encoder, layout.llm);
    let copies = encoder.dp.max(llm.dp) > 1;
    // All replicas of the LLM backbone need the same, so their number matters only if states are sharded over them.
    let dp = if layout.zero == Zero::Nothing { 1 } else { llm.dp };
    let of_llm = ComponentLayout { dp, ..llm };
    [
        (
            Component::Encoder,
            (encoder, 1, layout.encoder_cut, copies, layout.zero, candidate.recompute.encoder),
        ),
        (
            Component::Llm,
            (of_llm, layout.llm_interleave, layout.llm_cut, copies, layout.zero, candidate.recompute.llm),
        ),
    ]
}

impl Alone {
    /// The needs of all candidates, or nothing if there is no memory budget. Pipelines that differ in their number of
    /// microbatches alone have equal needs, so one of them is enough.
    pub(crate) fn new<'a>(
        input: &SearchInput<'_>,
        models: &Models,
        heaviest: &[usize],
        candidates: impl Iterator<Item = &'a Candidate>,
    ) -> Result<Self, PlanError> {
        let Some(budget_bytes) = input.memory_budget_bytes() else { return Ok(Self::default()) };
        let mut seen = BTreeSet::new();
        let (colocated, pipelines): (Vec<&Candidate>, Vec<&Candidate>) =
            candidates.partition(|candidate| candidate.layout.is_colocated());
        let asks: Vec<(Component, Key, &Candidate)> = pipelines
            .into_iter()
            .flat_map(|candidate| keys(candidate).map(|(component, key)| (component, key, candidate)))
            .filter(|(component, key, _)| seen.insert((*component, *key)))
            .collect();
        let need = |&(component, key, candidate): &(Component, Key, &Candidate)| {
            let scheduler = candidate.scheduler(input, models)?;
            let samples = heaviest.iter().map(|&position| &input.shapes[position]);
            let needs = samples.map(|sample| match component {
                Component::Encoder => scheduler.encoder_alone(sample),
                Component::Llm | Component::Both => scheduler.llm_alone(sample),
            });
            Ok((component, key, needs.max().unwrap_or(0)))
        };
        let needs: Vec<(Component, Key, u64)> =
            asks.par_iter().map(need).collect::<Result<_, PlanError>>()?;
        let both = |candidate: &&Candidate| {
            let scheduler = candidate.scheduler(input, models)?;
            let needs = heaviest.iter().map(|&position| scheduler.alone(&input.shapes[position]).1);
            Ok((**candidate, needs.max().unwrap_or(0)))
        };
        let both = colocated.par_iter().map(both).collect::<Result<_, PlanError>>()?;
        let mut alone = Self { budget_bytes: Some(budget_bytes), both, ..Self::default() };
        for (component, key, bytes) in needs {
            let of_component = match component {
                Component::Encoder => &mut alone.encoder,
                Component::Llm | Component::Both => &mut alone.llm,
            };
            of_component.insert(key, bytes);
        }
        Ok(alone)
    }

    /// Why no schedule of the candidate can fit; `None` if one may. It names the component whose rank needs most for one
    /// sample of [`heaviest`] alone.
    pub(crate) fn rejection(&self, candidate: &Candidate) -> Option<Rejection> {
        let budget_bytes = self.budget_bytes?;
        if let Some(&needed_bytes) = self.both.get(candidate) {
            let rejection = Rejection::Memory { component: Component::Both, needed_bytes, budget_bytes };
            return (needed_bytes > budget_bytes).then_some(rejection);
        }
        let [(_, of_encoder), (_, of_llm)] = keys(candidate);
        let encoder = self.encoder.get(&of_encoder).copied().unwrap_or(0);
        let llm = self.llm.get(&of_llm).copied().unwrap_or(0);
        let (component, needed_bytes) =
            if llm > encoder { (Component::Llm, llm) } else { (Component::Encoder, encoder) };
        (needed_bytes > budget_bytes).then_some(Rejection::Memory { component, needed_bytes, budget_bytes })
    }
}
