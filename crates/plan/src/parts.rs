//! Parts of the cluster: plans that leave some ranks free. 17 ranks divide into few layouts and 16 into many, so a plan of 16
//! may be the faster one; then it is the plan of 17.

use crate::bound::work_min_ns;
use crate::contender::{Contender, Known, contenders};
use crate::error::PlanError;
use crate::expert_groups::colocated_experts;
use crate::found::Found;
use crate::funnel;
use crate::input::{SearchEffort, SearchInput};
use crate::judge::judge_one;
use crate::models::Models;
use crate::run_memory::Held;
use crate::space::{Candidate, Rules, colocated, layouts_with};
use crate::wide::{ENCODER_STAGES, colocated_groups, ways};
use crate::work_bound::work_bound_ns;
use dflop_types::{Layout, RankedPlan, Recomputation};
use std::collections::BTreeSet;

/// The most sizes of parts whose colocated layouts are tried: those next below all ranks, and as many of whole nodes.
const COLOCATED_SIZES: usize = 16;

/// As [`COLOCATED_SIZES`], for pipelines, by the ranks of the cluster: of a large one each size has thousands of layouts.
const PIPELINE_SIZES: [(u32, usize); 3] = [(24, 8), (128, 3), (1_024, 1)];

/// Pipelines of parts are tried if a pipeline of all ranks takes at most this many times the best step, in percent.
const NEAR_PERCENT: u64 = 120;

/// Judges candidates that leave ranks free, as long as their part of the ranks may be faster than the best plan of all ranks.
/// Those that fit join `found`. The answer is how many candidates that were.
///
/// ```text
/// step on a part >= work bound of all ranks * ranks / ranks of the part
/// ```
///
/// So where all ranks are well used, few parts are looked at. Where no plan of all ranks fits, all sizes are open.
///
/// # Errors
/// As [`crate::search()`].
pub(crate) fn try_parts(
    input: &SearchInput<'_>,
    models: &Models,
    known: &Known<'_>,
    held: &Held<'_>,
    found: &mut Found,
) -> Result<u64, PlanError> {
    let num_ranks = input.cluster.num_ranks;
    let best = found.ranked.first().copied();
    let best_ns = best.map(|plan| found.value_ns(&plan));
    let least = best_ns.map_or(1, |ns| {
        let work_ns = u128::from(work_bound_ns(input, models.plain(), held.batches)) * u128::from(num_ranks);
        u32::try_from(work_ns.div_ceil(u128::from(ns.max(1)))).unwrap_or(u32::MAX).max(1)
    });
    if least >= num_ranks || (input.halt)() {
        return Ok(0);
    }
    // Where nothing fits all ranks, a part is searched for a plan and not for what rejects it.
    let num_before = found.rejections.len();
    let takes_all = input.effort == SearchEffort::Whole && best.is_some();
    let mut candidates = of_colocated(input, models, takes_all, least);
    candidates.extend(of_pipelines(input, models, known, found, takes_all, least));
    candidates.retain(|one| models.has(one));
    let mut rejections = Vec::new();
    let mut all = contenders(input, models, known, &candidates, &mut rejections)?;
    let number = (all.len() + rejections.len()) as u64;
    found.rejections.extend(rejections);
    if takes_all {
        all.sort_by_cached_key(|one| (one.bound_sum_ns(), one.candidate));
        for one in all {
            let rejection = judge_one(input, models, &one.candidate, &one.bounds_ns, held, found)?;
            found.rejections.extend(rejection);
        }
        return Ok(number);
    }
    let estimate_ns = match best {
        Some(plan) => {
            let own = contenders(input, models, known, &[Candidate::from(&plan)], &mut Vec::new())?;
            own.first().map(|own: &Contender| own.rough.step_ns)
        }
        None => None,
    };
    funnel::judge_more(input, models, all, estimate_ns, held, found)?;
    if found.ranked.is_empty() {
        found.rejections.truncate(num_before);
        return Ok(0);
    }
    Ok(number)
}

/// Sizes of parts from `least` on, below all ranks: the next `most`, then as many of whole nodes; or every size. Ranks that fill
/// several nodes divide well, so of those only parts of whole nodes are tried.
fn sizes(input: &SearchInput<'_>, takes_all: bool, least: u32, most: usize) -> BTreeSet<u32> {
    let num_ranks = input.cluster.num_ranks;
    if takes_all {
        return (least..num_ranks).collect();
    }
    let of_node = input.cluster.ranks_per_node.max(1);
    let of_nodes = (1..=(num_ranks - 1) / of_node).rev().map(|nodes| nodes * of_node);
    let fills_nodes = num_ranks > of_node && num_ranks.is_multiple_of(of_node);
    let next = (least..num_ranks).rev().take(if fills_nodes { 0 } else { most });
    next.chain(of_nodes.take_while(|&size| size >= least).take(most)).collect()
}

fn rules<'a>(input: &'a SearchInput<'_>, models: &Models, num_ranks: u32) -> Rules<'a> {
    Rules { ranks: [num_ranks, input.cluster.ranks_per_node], ..Rules::of(input, models.plain()) }
}

/// Colocated layouts of parts, in each mode of recomputation.
fn of_colocated(input: &SearchInput<'_>, models: &Models, takes_all: bool, least: u32) -> Vec<Candidate> {
    let all = models.modes().iter().copied();
    let recomputed: Vec<Recomputation> = all.filter(|&mode| input.only.has_modes(mode)).collect();
    let of = |size| {
        let rules = rules(input, models, size);
        let mut candidates = colocated(
            size,
            input.cluster.ranks_per_node,
            input.global_batch_size,
            input.num_microbatches,
            &recomputed,
            rules.order,
            &input.only,
        );
        candidates.extend(colocated_groups(&rules, models));
        candidates.extend(colocated_experts(&rules, models));
        candidates
    };
    sizes(input, takes_all, least, COLOCATED_SIZES).into_iter().flat_map(of).collect()
}

/// Pipelines of parts, in the modes of recomputation that the pipelines found so far have.
fn of_pipelines(
    input: &SearchInput<'_>,
    models: &Models,
    known: &Known<'_>,
    found: &Found,
    takes_all: bool,
    least: u32,
) -> Vec<Candidate> {
    let most = PIPELINE_SIZES.iter().find(|(ranks, _)| input.cluster.num_ranks <= *ranks);
    let Some(&(_, most)) = most else { return Vec::new() };
    let best_ns = found.ranked.first().map(|plan| found.value_ns(plan));
    let is_pipeline = |plan: &&RankedPlan| !plan.layout.is_colocated();
    let is_near = |ns: u64| best_ns.is_none_or(|best| ns <= best.saturating_mul(NEAR_PERCENT) / 100);
    let pipelines = || found.ranked.iter().filter(is_pipeline);
    if best_ns.is_some() && !pipelines().any(|plan| is_near(found.value_ns(plan))) {
        return Vec::new();
    }
    let first = input.only.first_modes();
    let mut recomputed: BTreeSet<Recomputation> = pipelines().map(|plan| plan.recompute).collect();
    if recomputed.is_empty() || takes_all {
        recomputed.extend(models.modes().iter().copied().filter(|&mode| input.only.has_modes(mode)));
    }
    recomputed.insert(first);
    let mut candidates = Vec::new();
    for size in sizes(input, takes_all, least, most) {
        let rules = rules(input, models, size);
        let layouts = wide_layouts(&rules, models);
        let space = rules.pipelines(layouts, |layout| {
            let probe =
                Candidate { layout: *layout, num_microbatches: 1, recompute: first, order: rules.order };
            let (model, known) = (models.of(&probe), known.of(&probe));
            // No pipeline of these degrees is faster than that, whatever else it has.
            if best_ns.is_some_and(|best| work_min_ns(model, layout, &known.works) > best) {
                return Vec::new();
            }
            ways(input, model, &known.sizes[0], layout)
        });
        for alike in space.candidates.chunk_by(|a, b| a.layout == b.layout) {
            let of =
                |&recompute: &Recomputation| alike.iter().map(move |one| Candidate { recompute, ..*one });
            candidates.extend(recomputed.iter().flat_map(of));
        }
    }
    candidates
}

/// Pipelines of all tensor degrees and numbers of encoder stages that a search has, each once.
fn wide_layouts(rules: &Rules<'_>, models: &Models) -> Vec<Layout> {
    let stages: Vec<u32> = rules.only.encoder_stages().map_or_else(
        || ENCODER_STAGES.into_iter().filter(|&stages| stages <= rules.layers[0].max(1)).collect(),
        |stages| vec![stages],
    );
    let pairs = models.degrees().iter().flat_map(|&degrees| stages.iter().map(move |&at| (degrees, at)));
    let of = |(degrees, stages)| layouts_with(rules.ranks[0], stages, degrees);
    rules.with_chunks(pairs.flat_map(of).collect::<BTreeSet<Layout>>().into_iter().collect())
}
