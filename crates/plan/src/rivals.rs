//! Rivals: what people run today, each with the best of its own search on the same global batches, ranks and memory.
//!
//! | name | what it does |
//! |---|---|
//! | `megatron` | one pipeline of all ranks of a replica, the encoder before the first stage, interleaved where that is shorter, fewer layers on the first and the last rank where that evens them out, layers cut over tensor groups where the profile has them; arrival order, equal counts |
//! | `megatron-balanced` | the same; samples by predicted time of both components, longest first (LPT) |
//! | `fsdp` | both components on every rank or tensor group, with each sharding and recomputation, experts dealt out where that is faster; arrival order |
//! | `fsdp-tokens` | the same; samples packed by LLM tokens, longest first |
//! | `fsdp-dflop` | the same, with our balance |
//! | `paper` | the layout that would be fastest if every sample were the mean one (DFLOP, Algorithm 1), with the paper's balance of both components |

use crate::contender::{Contender, Known};
use crate::error::PlanError;
use crate::expert_groups::colocated_experts;
use crate::fastest::Field;
use crate::input::SearchInput;
use crate::megatron::megatron;
use crate::models::Models;
use crate::only::Only;
use crate::paper::paper;
use crate::rival::{Batches, Rival};
use crate::run_memory::Held;
use crate::space::{Rules, colocated};
use crate::wide::{colocated_groups, first_modes};
use dflop_step::Method;

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
    together.extend(colocated_experts(&rules, models));
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

#[cfg(test)]
mod tests;
