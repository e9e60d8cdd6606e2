//! Colocated layouts whose experts are dealt out over the ranks of a group (expert parallelism).

use crate::input::SearchInput;
use crate::models::Models;
use crate::space::{COLOCATED_MICROBATCHES, Candidate, Rules};
use crate::wide::first_modes;
use dflop_step::expert_degrees;
use dflop_types::{Layout, Zero};

/// All colocated layouts with groups of ranks that deal out the experts of each layer, with the modes of recomputation of the
/// first round. There are none for a model without experts.
pub(crate) fn colocated_experts(rules: &Rules<'_>, models: &Models) -> Vec<Candidate> {
    let num_ranks = rules.ranks[0];
    let degrees = models.expert_degrees().iter().filter(|&&degree| num_ranks.is_multiple_of(degree));
    let layouts = degrees.flat_map(|&expert_parallel_degree| {
        let of = move |zero| Layout { expert_parallel_degree, ..Layout::colocated(num_ranks, zero) };
        // ZeRO-2 takes as much time and memory as ZeRO-1. It is a candidate only if it is asked for.
        let is_asked = |zero: &Zero| *zero != Zero::Gradients || rules.only.zero() == Some(Zero::Gradients);
        Zero::ALL.into_iter().filter(is_asked).map(of)
    });
    let of_rank = 2 * rules.global_batch_size.div_ceil(num_ranks.max(1));
    let most = rules
        .num_microbatches
        .unwrap_or_else(|| of_rank.max(COLOCATED_MICROBATCHES).min(rules.global_batch_size));
    let first = first_modes(models, rules.only);
    let with_modes = |layout| {
        let of =
            move |&recompute| Candidate { layout, num_microbatches: most, recompute, order: rules.order };
        first.iter().map(of)
    };
    layouts.filter(|layout| rules.only.has_layout(layout)).flat_map(with_modes).collect()
}

/// Why no layout deals out experts over as many ranks as is asked for; `None` where some may, and where nothing of it is asked.
pub(crate) fn why_not_dealt_out(input: &SearchInput<'_>) -> Option<String> {
    let asked = input.only.expert_degree().filter(|&degree| degree > 1)?;
    let listed = |numbers: Vec<String>| match numbers.split_last() {
        Some((last, others)) if !others.is_empty() => format!("{} or {last}", others.join(", ")),
        _ => numbers.concat(),
    };
    let layer = input.model_profile.modules.get("llm_layer");
    let Some(experts) = layer.and_then(|layer| layer.experts) else {
        let how = if input.model_profile.is_estimated { " --estimate" } else { "" };
        return Some(format!(
            "and the model profile says of no experts; of a model with experts make it anew: `dflop profile model{how}`"
        ));
    };
    let cluster = &input.cluster;
    let able = expert_degrees(input.model_profile, cluster.num_ranks, cluster.ranks_per_node);
    if !able.contains(&asked) {
        let able = listed(able.iter().map(u32::to_string).collect());
        return Some(format!(
            "and the {} experts of a layer can be dealt out over {} ranks on nodes of {}",
            experts.count,
            if able.is_empty() { "no" } else { &able },
            cluster.ranks_per_node
        ));
    }
    None
}
