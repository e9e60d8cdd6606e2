//! Rivals: what people run today, each with the best of its own search on the same global batches, ranks and memory.
//!
//! | name | what it does |
//! |---|---|
//! | `megatron` | one pipeline of all ranks of a replica, the encoder before the first stage, interleaved where that is shorter, fewer layers on the first and the last rank where that evens them out, layers cut over tensor groups where the profile has them; arrival order, equal counts |
//! | `megatron-balanced` | the same; samples by predicted time of both components, longest first (LPT) |
//! | `fsdp` | both components on every rank or tensor group, with each sharding and recomputation; arrival order |
//! | `fsdp-tokens` | the same; samples packed by LLM tokens, longest first |
//! | `fsdp-dflop` | the same, with our balance |
//! | `paper` | the layout that would be fastest if every sample were the mean one (DFLOP, Algorithm 1), with the paper's balance of both components |

use crate::contender::{Contender, Known};
use crate::error::PlanError;
use crate::fastest::Field;
use crate::input::SearchInput;
use crate::megatron::megatron;
use crate::models::Models;
use crate::only::Only;
use crate::paper::paper;
use crate::run_memory::Held;
use crate::space::{Candidate, Rules, colocated};
use crate::wide::{colocated_groups, first_modes};
use dflop_step::Method;
use dflop_types::{Recomputation, RivalPrediction, SampleIndex};

/// What people run today, or our balance in it.
#[derive(Debug, Clone, PartialEq)]
pub struct Rival {
    /// Its name.
    pub name: &'static str,
    /// Whether it is other people's work; `false` for our balance in their layouts. Ratios are formed with other people's.
    pub is_of_others: bool,
    /// Its layout and what it recomputes, in words; empty where nothing of it fits.
    pub layout: String,
    /// Microbatches of a step on each replica.
    pub num_microbatches: u32,
    /// Mean step over the global batches, in nanoseconds; `None` where nothing of it fits.
    pub step_ns_mean: Option<u64>,
    /// Idle time over ranks and makespan, as the mean over the global batches; `None` where nothing of it fits.
    pub bubble_ratio: Option<f64>,
    /// Whether the time limit struck before all its configurations were looked at: a faster one may be left.
    pub is_cut: bool,
    /// What it is, where dflop's search has such candidates.
    pub(crate) candidate: Option<Candidate>,
}

impl From<&Rival> for RivalPrediction {
    fn from(rival: &Rival) -> Self {
        Self {
            name: rival.name.to_owned(),
            is_of_others: rival.is_of_others,
            layout: rival.layout.clone(),
            num_microbatches: rival.num_microbatches,
            step_ns_mean: rival.step_ns_mean,
        }
    }
}

/// The global batches that a rival is held to: the sampled ones give its time, and fuller ones of the run, with their steps,
/// must fit as well, as they must for the plan.
pub(crate) struct Batches<'a> {
    pub(crate) sampled: &'a [Vec<SampleIndex>],
    /// Each with its step.
    pub(crate) fullest: Vec<(u64, Vec<SampleIndex>)>,
}

impl Batches<'_> {
    /// Those that give the time, then those that must fit, each with its step.
    pub(crate) fn all(&self) -> impl Iterator<Item = (u64, &[SampleIndex])> {
        let sampled = (0..).zip(self.sampled);
        sampled.chain(self.fullest.iter().map(|(step, batch)| (*step, batch))).map(|(step, of)| (step, &**of))
    }
}

/// All rivals, each with the fastest configuration that fits. `paper` chooses among all `contenders`; the others have
/// candidates of their own.
pub(crate) fn rivals(
    input: &SearchInput<'_>,
    models: &Models,
    known: &Known<'_>,
    contenders: &[Contender],
    held: &Held<'_>,
) -> Result<Vec<Rival>, PlanError> {
    rivals_with(input, (models, known), contenders, held, true)
}

/// As [`rivals`]. Without `prunes` every configuration is judged: the answer is the same.
fn rivals_with(
    input: &SearchInput<'_>,
    (models, known): (&Models, &Known<'_>),
    contenders: &[Contender],
    held: &Held<'_>,
    prunes: bool,
) -> Result<Vec<Rival>, PlanError> {
    let batches = &Batches { sampled: held.batches, fullest: held.fullest() };
    let (ranks, nodes) = (input.cluster.num_ranks, input.cluster.ranks_per_node);
    let every = Only::default();
    // Rivals search all tensor degrees, even if our own search was restricted to some.
    let (whole, of_whole);
    let (models, known) = if input.only.tensor_degrees() == every.tensor_degrees() {
        (models, known)
    } else {
        whole = Models::cut_over(input, every.tensor_degrees())?;
        of_whole = Known::new(input, &whole, held.batches);
        (&whole, &of_whole)
    };
    let mut together = colocated(
        ranks,
        nodes,
        input.global_batch_size,
        input.num_microbatches,
        &first_modes(models, &every),
        input.first_order(),
        &every,
    );
    let rules = Rules { only: &every, ..Rules::of(input, models.plain()) };
    together.extend(colocated_groups(&rules, models));
    let field = Field { input, models, known, batches, prunes };
    let mut rivals = Vec::new();
    for (name, is_balanced) in [("megatron", false), ("megatron-balanced", true)] {
        rivals.push(megatron(&field, name, is_balanced));
    }
    for (name, method) in
        [("fsdp", Method::Blind), ("fsdp-tokens", Method::Tokens), ("fsdp-dflop", Method::Aware)]
    {
        rivals.push(field.fastest(name, method, &together)?);
    }
    rivals.push(paper(&field, contenders)?);
    Ok(rivals)
}

/// A rival of which nothing fits.
pub(crate) const fn none(name: &'static str) -> Rival {
    Rival {
        name,
        is_of_others: true,
        layout: String::new(),
        num_microbatches: 0,
        step_ns_mean: None,
        bubble_ratio: None,
        is_cut: false,
        candidate: None,
    }
}

/// A layout, and what is recomputed, if anything is.
pub(crate) fn words(layout: &str, recompute: Recomputation) -> String {
    if recompute.is_none() { layout.to_owned() } else { format!("{layout}, {recompute} recomputation") }
}

#[cfg(test)]
mod tests;
