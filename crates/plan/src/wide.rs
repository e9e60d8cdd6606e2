//! Beyond plain pipelines: layers cut over the ranks of a tensor group, encoders of several stages, states cut over
//! replicas, layers cut unevenly into stages, recomputation where memory is tight.
//!
//! There are many times more of these candidates than of plain ones. So they come second: if the least work of some
//! degrees already takes longer than the best estimate of a plain pipeline, all candidates of these degrees are left out.

use crate::bound::work_min_ns;
use crate::contender::{Contender, Known};
use crate::error::PlanError;
use crate::facts::Facts;
use crate::funnel::TINY_SAMPLES_MAX;
use crate::input::{SearchEffort, SearchInput};
use crate::models::Models;
use crate::only::Only;
use crate::rank_order::rank_orders;
use crate::rough::{AMPLE, BatchSizes, rooms};
use crate::space::{Candidate, Rules, Space, colocated_shardings, layouts_with, node_groups};
use dflop_cost::{CostModel, RankRole, Sharding};
use dflop_step::PIPELINE_SHARDINGS;
use dflop_types::{Component, ComponentLayout, Layout, Recomputation, Zero};
use rayon::prelude::*;
use std::collections::{BTreeSet, HashMap};

/// Numbers of encoder stages that are tried where none is asked for.
pub(crate) const ENCODER_STAGES: [u32; 6] = [1, 2, 3, 4, 6, 8];

/// Candidates beyond the plain ones. `left_out_ns` has the least step of each layout, or candidate that recomputes, that was
/// left out, in nanoseconds.
#[derive(Debug, Default)]
pub(crate) struct Wide {
    pub(crate) space: Space,
    pub(crate) left_out_ns: Vec<u64>,
}

impl Wide {
    /// Several as one, in this order.
    fn joined(parts: Vec<Self>) -> Self {
        let mut joined = Self::default();
        for part in parts {
            joined.space.candidates.extend(part.space.candidates);
            joined.space.rejections.extend(part.space.rejections);
            joined.left_out_ns.extend(part.left_out_ns);
        }
        joined
    }
}

/// Pipelines with cut layers or several encoder stages. `plain` are the contenders that have neither.
pub(crate) fn wide(
    input: &SearchInput<'_>,
    rules: &Rules<'_>,
    models: &Models,
    known: &Known<'_>,
    plain: &[Contender],
) -> Wide {
    let limit_ns = limit_ns(input, plain);
    let of_encoder: Vec<u32> = rules.only.encoder_stages().map_or_else(
        || ENCODER_STAGES.into_iter().filter(|&stages| stages <= rules.layers[0].max(1)).collect(),
        |stages| vec![stages],
    );
    let is_plain: BTreeSet<Layout> = rules.plain().into_iter().collect();
    let of = |&(degrees, stages): &([u32; 2], u32)| {
        if (input.halt)() {
            return Wide::default();
        }
        let layouts = rules.with_chunks(layouts_with(rules.ranks[0], stages, degrees));
        let layouts = layouts.into_iter().filter(|layout| !is_plain.contains(layout)).collect();
        let mut left_out_ns = Vec::new();
        let space = rules.pipelines(layouts, |layout| {
            let recompute = rules.only.first_modes();
            let probe = Candidate { layout: *layout, num_microbatches: 1, recompute, order: rules.order };
            let (model, known) = (models.of(&probe), known.of(&probe));
            let least_ns = work_min_ns(model, layout, &known.works);
            if limit_ns.is_some_and(|limit| least_ns > limit) {
                left_out_ns.push(least_ns);
                return Vec::new();
            }
            ways(input, model, &known.sizes[0], layout)
        });
        Wide { space, left_out_ns }
    };
    let pairs: Vec<([u32; 2], u32)> = models
        .degrees()
        .iter()
        .flat_map(|&degrees| of_encoder.iter().map(move |&stages| (degrees, stages)))
        .collect();
    // Those of few degrees have most layouts: each is taken by itself.
    let found: Vec<Wide> = pairs.par_iter().with_max_len(1).map(of).collect();
    Wide::joined(found)
}

/// Colocated layouts whose layers are cut over several ranks, with the modes of recomputation of the first round.
pub(crate) fn colocated_groups(rules: &Rules<'_>, models: &Models) -> Vec<Candidate> {
    let [num_ranks, ranks_per_node] = rules.ranks;
    let (mut candidates, first) = (Vec::new(), first_modes(models, rules.only));
    for &[encoder, tp] in models.degrees() {
        let is_within = num_ranks.is_multiple_of(tp) && ranks_per_node.is_multiple_of(tp);
        // The encoder is cut as the LLM backbone is, or each rank of a group holds a whole one.
        if (encoder != tp && encoder != 1) || tp == 1 || !is_within {
            continue;
        }
        let dp = num_ranks / tp;
        let degrees = |tp| ComponentLayout { tp, pp: 1, dp: num_ranks / tp };
        let of_rank = 2 * rules.global_batch_size.div_ceil(dp.max(1));
        let most = rules.num_microbatches.unwrap_or_else(|| {
            of_rank.max(crate::space::COLOCATED_MICROBATCHES).min(rules.global_batch_size)
        });
        // ZeRO-2 takes as much time and memory as ZeRO-1 here. It is a candidate only if it is asked for.
        // Nor are groups of a node: with them a search for 64 H100 took an eighth longer, and gave the same plan.
        let is_asked = |zero: Zero| rules.only.zero() == Some(zero);
        let mut groups = node_groups(rules.ranks, tp);
        groups.retain(|&replicas| is_asked(Zero::Parameters) || replicas > ranks_per_node / tp);
        let shardings = colocated_shardings([num_ranks / encoder, dp], &groups, rules.only).into_iter();
        for (zero, shard_ranks) in shardings.filter(|&(zero, _)| zero != Zero::Gradients || is_asked(zero)) {
            let (encoder, llm) = (degrees(encoder), degrees(tp));
            let layout = Layout { encoder, llm, shard_ranks, ..Layout::colocated(dp, zero) };
            if !rules.only.has_layout(&layout) {
                continue;
            }
            let of = |&recompute| Candidate { layout, num_microbatches: most, recompute, order: rules.order };
            candidates.extend(first.iter().map(of).filter(|candidate| models.has(candidate)));
        }
    }
    candidates
}

/// The shortest estimated step of the pipelines that seem to fit, in nanoseconds. A further pipeline is looked at only if
/// its least step is not above this. `None`: all are looked at.
fn limit_ns(input: &SearchInput<'_>, contenders: &[Contender]) -> Option<u64> {
    let fitting = contenders.iter().filter(|one| !one.candidate.layout.is_colocated() && !one.rough.is_over);
    match input.effort {
        SearchEffort::Quick => fitting.map(|one| one.rough.step_ns).min(),
        SearchEffort::Whole => None,
    }
}

/// The modes of recomputation that colocated layouts are tried with first: the same for both components, or those that are
/// asked for.
pub(crate) fn first_modes(models: &Models, only: &Only) -> Vec<Recomputation> {
    let is_first = |pair: &&Recomputation| pair.of_both().is_some() || **pair == only.first_modes();
    models.modes().iter().filter(is_first).copied().filter(|&pair| only.has_modes(pair)).collect()
}

/// The candidates once more, with recomputation: pipelines as [`chain`] has them, and colocated layouts whose components
/// recompute different things. Those that have memory enough without, as `contenders` say, are no candidates. Pipelines
/// whose least work with recomputation already takes too long are left out: `left_out_ns` has one time for each of them.
///
/// If the search is halted, no further candidates are made.
///
/// # Errors
/// As [`Facts::new`].
pub(crate) fn recomputing(
    input: &SearchInput<'_>,
    models: &Models,
    known: &Known<'_>,
    candidates: &[Candidate],
    contenders: &[Contender],
) -> Result<Wide, PlanError> {
    let Some(budget_bytes) = input.memory_budget_bytes() else { return Ok(Wide::default()) };
    let first = input.only.first_modes();
    let is_tight: HashMap<&Candidate, bool> =
        contenders.iter().map(|contender| (&contender.candidate, contender.rough.is_tight)).collect();
    let is_ample = |one: &Candidate| input.effort == SearchEffort::Quick && is_tight.get(one) == Some(&false);
    let tight: Vec<Candidate> =
        candidates.iter().filter(|one| one.recompute == first && !is_ample(one)).copied().collect();
    let limit_ns = limit_ns(input, contenders);
    let tried_before = first_modes(models, &input.only);
    let is_tiny = input.global_batch_size as usize <= TINY_SAMPLES_MAX;
    let is_asked = |pair: &Recomputation| *pair != first && input.only.has_modes(*pair);
    let every: Vec<Recomputation> = models.modes().iter().copied().filter(is_asked).collect();
    let alike: Vec<&[Candidate]> = tight.chunk_by(|a, b| a.layout == b.layout).collect();
    let of_layout = |alike: &&[Candidate]| -> Result<Wide, PlanError> {
        if (input.halt)() {
            return Ok(Wide::default());
        }
        let has_model = |pair: &&Recomputation| models.has(&Candidate { recompute: **pair, ..alike[0] });
        let every: Vec<Recomputation> = every.iter().filter(has_model).copied().collect();
        let has_unequal = every.iter().any(|pair| pair.of_both().is_none());
        let mut more = Vec::new();
        let mut add = |pairs: &[Recomputation], candidate: &Candidate| {
            more.extend(pairs.iter().map(|&recompute| Candidate { recompute, ..*candidate }));
        };
        if alike[0].layout.is_colocated() {
            let others: Vec<_> = every.iter().copied().filter(|pair| !tried_before.contains(pair)).collect();
            alike.iter().for_each(|candidate| add(&others, candidate));
        } else if input.effort == SearchEffort::Whole {
            alike.iter().for_each(|candidate| add(&every, candidate));
        } else {
            let facts = Facts::new(models.of(&alike[0]), &alike[0].settings(input))?;
            for candidate in *alike {
                // The estimate knows mean samples. So it says little of a candidate that does not fit its largest sample, which is no
                // contender, and little of batches of few samples. A frozen encoder has no mode of its own: there is nothing to choose.
                let is_known = is_tight.contains_key(candidate) && !is_tiny;
                let chosen = if is_known && has_unequal {
                    chain(candidate, &facts, budget_bytes, &every, known)
                } else {
                    every.clone()
                };
                add(&chosen, candidate);
            }
        }
        // Candidates that differ in the number of microbatches alone follow each other, as `contenders` asks for.
        more.sort_by_key(|one: &Candidate| one.recompute);
        let mut wide = Wide::default();
        for alike in more.chunk_by(|a, b| a.recompute == b.recompute) {
            let probe = &alike[0];
            // The least work is that of a layout, whatever its number of microbatches is.
            let least_ns = || work_min_ns(models.of(probe), &probe.layout, &known.of(probe).works);
            match limit_ns.filter(|_| !probe.layout.is_colocated()) {
                Some(limit) if least_ns() > limit => {
                    wide.left_out_ns.extend(std::iter::repeat_n(least_ns(), alike.len()));
                }
                _ => wide.space.candidates.extend(alike),
            }
        }
        Ok(wide)
    };
    let found: Vec<Wide> = alike.par_iter().map(of_layout).collect::<Result<_, PlanError>>()?;
    Ok(Wide::joined(found))
}

/// The modes of `every` that give a pipeline ever more room in memory, with the least recomputation for it: of the two
/// components the one with less room recomputes more, until there is room for all the microbatches in flight that the order
/// wants. All other modes recompute more and have no more room than one of these.
///
/// Beside them the modes of one component alone. Room is estimated: where a batch has less of it, a component that recomputes
/// more than seemed to be needed may hold more microbatches, and the pipeline stands still less.
fn chain(
    candidate: &Candidate,
    facts: &Facts,
    budget_bytes: u64,
    every: &[Recomputation],
    known: &Known<'_>,
) -> Vec<Recomputation> {
    let wanted = AMPLE * f64::from(facts.num_stages() + candidate.layout.encoder.pp);
    let rooms = |recompute: Recomputation| {
        let one = Candidate { recompute, ..*candidate };
        let of_batches = known.of(&one).sizes.iter().map(|batch| rooms(&one, facts, budget_bytes, batch));
        of_batches.fold([wanted; 2], |least, found| [0, 1].map(|at| least[at].min(found[at])))
    };
    let mut modes = Vec::new();
    let mut last = candidate.recompute;
    loop {
        let [of_encoder, of_llm] = rooms(last);
        let is_encoder = of_encoder < of_llm;
        let is_more = |modes: &&Recomputation| {
            let (more, same) = if is_encoder {
                (modes.encoder > last.encoder, modes.llm == last.llm)
            } else {
                (modes.llm > last.llm, modes.encoder == last.encoder)
            };
            more && same
        };
        let next = every.iter().filter(is_more).min();
        let Some(&next) = next.filter(|_| of_encoder.min(of_llm) < wanted) else { break };
        modes.push(next);
        last = next;
    }
    let plain = candidate.recompute;
    let is_of_one = |pair: &&Recomputation| {
        (pair.encoder == plain.encoder) != (pair.llm == plain.llm) && !modes.contains(pair)
    };
    let of_one: Vec<Recomputation> = every.iter().filter(is_of_one).copied().collect();
    [modes, of_one].concat()
}

/// The cuts, rank orders and shardings of a pipeline that are worth a look. Cuts: the even one, and the one that makes the
/// longest stage shortest. Shardings: if one of two is better in both the end of the step and memory, only that one.
pub(crate) fn ways(
    input: &SearchInput<'_>,
    model: &CostModel,
    sizes: &BatchSizes,
    layout: &Layout,
) -> Vec<Layout> {
    let uneven = sizes.shortest_cut(model, layout);
    let cuts = std::iter::once(*layout).chain((uneven != *layout).then_some(uneven));
    let orders = cuts.flat_map(|layout| rank_orders(input, model, sizes, &layout));
    orders.flat_map(|layout| shardings(input, model, &layout)).collect()
}

/// The layout with the sharding that is asked for. If none is, with each sharding that no other beats in both time and
/// memory.
fn shardings(input: &SearchInput<'_>, model: &CostModel, layout: &Layout) -> Vec<Layout> {
    let of = |zero| Layout { zero, ..*layout };
    if let Some(zero) = input.only.zero() {
        return PIPELINE_SHARDINGS.into_iter().filter(|&able| able == zero).map(of).collect();
    }
    // In pipelines ZeRO-2 takes as much time and memory as ZeRO-1, so it need not be tried.
    let [whole, cut] = [of(Zero::Nothing), of(Zero::States)];
    if layout.encoder.dp.max(layout.llm.dp) == 1 {
        return vec![whole];
    }
    let [of_whole, of_cut] = [ends(input, model, &whole), ends(input, model, &cut)];
    let is_less = |a: &[u64], b: &[u64]| a.iter().zip(b).all(|(a, b)| a <= b);
    if is_less(&of_whole, &of_cut) {
        vec![whole]
    } else if is_less(&of_cut, &of_whole) {
        vec![cut]
    } else {
        vec![whole, cut]
    }
}

/// Two numbers for each stage of a layout: the end of the step (reduction and optimizer) in nanoseconds, and the bytes that
/// do not depend on samples.
fn ends(input: &SearchInput<'_>, model: &CostModel, layout: &Layout) -> Vec<u64> {
    let probe = Candidate::probe(input, layout);
    let settings = probe.settings(input);
    let [encoder, llm] = [Component::Encoder, Component::Llm].map(|of| Sharding::of(layout, of));
    let mut values = Vec::new();
    for stage in settings.encoder_stages(model).unwrap_or_default() {
        values.push(model.sharded_encoder_stage_tail(stage, encoder).ns);
        values.push(model.sharded_memory(RankRole::EncoderStage(stage), encoder).static_bytes());
    }
    let mut last = None;
    let stages = settings.rank_stages(model).unwrap_or_default();
    for stage in stages.into_iter().filter(|stage| last.replace(*stage) != Some(*stage)) {
        values.push(model.sharded_stage_tail(stage, llm).ns);
        values.push(model.sharded_memory(RankRole::Stage(stage), llm).static_bytes());
    }
    values
}
