//! Rivals: what people run today, each with the best of its own search on the same global batches, ranks and memory.
//!
//! | name | what it does |
//! |---|---|
//! | `megatron` | one pipeline of all ranks of a replica, the encoder before the first stage, interleaved where that is shorter, layers cut over tensor groups where the profile has them; arrival order, equal counts |
//! | `megatron-balanced` | the same; samples by predicted time of both components, longest first (LPT) |
//! | `fsdp` | both components on every rank or tensor group, with each sharding and recomputation; arrival order |
//! | `fsdp-tokens` | the same; samples packed by LLM tokens, longest first |
//! | `fsdp-dflop` | the same, with our balance |
//! | `paper` | the layout that would be fastest if every sample were the mean one (DFLOP, Algorithm 1), with the paper's balance of both components |

use crate::contender::Contender;
use crate::error::PlanError;
use crate::funnel::WHOLE_SAMPLES_MAX;
use crate::input::SearchInput;
use crate::models::Models;
use crate::rival_modes::{self, Timed};
use crate::run_memory::Held;
use crate::space::{Candidate, Rules, colocated, divisors, microbatch_counts};
use crate::wide::{colocated_groups, first_modes};
use crate::{baseline::refusal, only::Only};
use dflop_cost::{CostModel, RankMicrobatch, RankRole, RankSteps, Sharding, StageLayers};
use dflop_schedule::baseline::{arrival_order, single_cost_lpt};
use dflop_sim::{Durations, order, simulate_interleaved};
use dflop_step::{Arm, Method};
use dflop_types::{Action, MicrobatchShape, Rank, Recomputation, SampleIndex, StageIndex, Zero, cut_layers};
use rayon::prelude::*;
use std::collections::BTreeSet;

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
    /// What it is, where dflop's search has such candidates.
    pub(crate) candidate: Option<Candidate>,
}

/// Candidates of a rival that have the scheduler's whole search: those in front by their first answers.
const WHOLE_TRIED: usize = 3;

/// The most layouts that are scheduled for `paper` in each mode of recomputation until one fits, in the order of the
/// paper's estimate.
const PAPER_TRIED: usize = 24;

/// The global batches that a rival is held to: the sampled ones give its time, and fuller ones of the run, with their steps,
/// must fit as well, as they must for the plan.
struct Batches<'a> {
    sampled: &'a [Vec<SampleIndex>],
    fullest: Vec<(u64, Vec<SampleIndex>)>,
}

impl Batches<'_> {
    /// Those that give the time, then those that must fit, each with its step.
    fn all(&self) -> impl Iterator<Item = (u64, &[SampleIndex])> {
        let sampled = (0..).zip(self.sampled);
        sampled.chain(self.fullest.iter().map(|(step, batch)| (*step, batch))).map(|(step, of)| (step, &**of))
    }
}

/// All rivals, each with the fastest configuration that fits. `paper` chooses among all `contenders`; the others have
/// candidates of their own.
pub(crate) fn rivals(
    input: &SearchInput<'_>,
    models: &Models,
    contenders: &[Contender],
    held: &Held<'_>,
) -> Result<Vec<Rival>, PlanError> {
    let batches = &Batches { sampled: held.batches, fullest: held.fullest() };
    let (ranks, nodes) = (input.cluster.num_ranks, input.cluster.ranks_per_node);
    let every = Only::default();
    // Rivals search all tensor degrees, even if our own search was restricted to some.
    let whole;
    let models = if input.only.tensor_degrees() == every.tensor_degrees() {
        models
    } else {
        whole = Models::cut_over(input, every.tensor_degrees())?;
        &whole
    };
    let mut together = colocated(
        ranks,
        nodes,
        input.global_batch_size,
        input.num_microbatches,
        &first_modes(models, &every),
        &every,
    );
    let rules = Rules { only: &every, ..Rules::of(input, models.plain()) };
    together.extend(colocated_groups(&rules, models));
    let mut rivals = Vec::new();
    for (name, is_balanced) in [("megatron", false), ("megatron-balanced", true)] {
        rivals.push(megatron(name, input, models, batches, is_balanced));
    }
    for (name, method) in
        [("fsdp", Method::Blind), ("fsdp-tokens", Method::Tokens), ("fsdp-dflop", Method::Aware)]
    {
        rivals.push(fastest(name, method != Method::Aware, &together, &[method], input, models, batches)?);
    }
    let mut at_mean: Vec<&Contender> =
        contenders.iter().filter(|one| !one.candidate.layout.is_colocated() && !one.rough.is_over).collect();
    at_mean.sort_by_key(|one| (one.rough.at_mean_ns, one.candidate));
    // In every mode of recomputation: what holds most is estimated fastest, and would be all that is tried where it lacks
    // memory. Of one layout the number of microbatches with the least estimate.
    let mut paper: Option<Rival> = None;
    for &mode in models.modes() {
        let mut seen = BTreeSet::new();
        let of_mode = at_mean.iter().filter(|one| one.candidate.recompute == mode);
        let firsts = of_mode.filter(|one| seen.insert(one.candidate.layout));
        for one in firsts.take(PAPER_TRIED) {
            let own = [one.candidate];
            let found = fastest("paper", true, &own, &[Method::Balanced], input, models, batches)?;
            let Some(ns) = found.step_ns_mean else { continue };
            if paper.as_ref().and_then(|best| best.step_ns_mean).is_none_or(|best| ns < best) {
                paper = Some(found);
            }
            break;
        }
    }
    rivals.push(paper.unwrap_or_else(|| none("paper")));
    Ok(rivals)
}

const fn none(name: &'static str) -> Rival {
    Rival {
        name,
        is_of_others: true,
        layout: String::new(),
        num_microbatches: 0,
        step_ns_mean: None,
        bubble_ratio: None,
        candidate: None,
    }
}

/// A layout, and what is recomputed, if anything is.
pub(crate) fn words(layout: &str, recompute: Recomputation) -> String {
    if recompute.is_none() { layout.to_owned() } else { format!("{layout}, {recompute} recomputation") }
}

/// The candidate with the shortest mean step under one of the methods, with and without running ahead.
fn fastest(
    name: &'static str,
    is_of_others: bool,
    candidates: &[Candidate],
    methods: &[Method],
    input: &SearchInput<'_>,
    models: &Models,
    batches: &Batches<'_>,
) -> Result<Rival, PlanError> {
    let arms = methods.iter().flat_map(|&method| {
        let ahead = candidates.iter().any(|candidate| !candidate.layout.is_colocated());
        [false, true]
            .into_iter()
            .filter(move |&is_ahead| ahead || !is_ahead)
            .map(move |is_ahead| Arm { method, is_ahead })
    });
    let arms: Vec<Arm> = arms.collect();
    let tries = |candidates: &[Candidate]| -> Vec<(Candidate, Arm)> {
        arms.iter().flat_map(|&arm| candidates.iter().map(move |&candidate| (candidate, arm))).collect()
    };
    let step = |candidate: &Candidate, arm: Arm, is_whole: bool| -> Result<Option<Timed>, PlanError> {
        let scheduler = candidate.scheduler_of_others(input, models)?;
        let (mut sum, num_sampled) = (0, batches.sampled.len());
        for (at, (step, batch)) in batches.all().enumerate() {
            match scheduler.schedule_until(step, batch, arm, &|| !is_whole || (input.halt)()) {
                Ok(schedule) => sum += u64::from(at < num_sampled) * schedule.predicted_makespan_ns,
                Err(error) if refusal(&error).is_some() => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(Some((sum / num_sampled.max(1) as u64, *candidate, arm)))
    };
    let timed = |candidates: &[Candidate]| -> Result<Vec<Timed>, PlanError> {
        let tries = tries(candidates);
        let steps = tries.par_iter().map(|(candidate, arm)| step(candidate, *arm, false));
        Ok(steps.collect::<Result<Vec<Option<Timed>>, PlanError>>()?.into_iter().flatten().collect())
    };
    let mut steps = timed(candidates)?;
    steps.extend(timed(&rival_modes::unequal(models, candidates, &steps))?);
    steps.extend(timed(&rival_modes::partly(input, models, &steps))?);
    steps.sort_by_key(|&(ns, candidate, _)| (ns, candidate));
    // A method that searches is not judged by its first answer alone. Its candidates in front have the whole search, as
    // ours have.
    let searches = |arm: Arm| matches!(arm.method, Method::Aware | Method::Ordered | Method::Shaped);
    let has_whole = input.global_batch_size as usize <= WHOLE_SAMPLES_MAX;
    if has_whole {
        let whole: Vec<Option<Timed>> = steps
            .iter()
            .filter(|(_, _, arm)| searches(*arm))
            .take(WHOLE_TRIED)
            .collect::<Vec<_>>()
            .par_iter()
            .map(|(_, candidate, arm)| step(candidate, *arm, true))
            .collect::<Result<_, PlanError>>()?;
        steps.extend(whole.into_iter().flatten());
    }
    let Some((ns, candidate, arm)) = steps.into_iter().min_by_key(|&(ns, candidate, _)| (ns, candidate))
    else {
        return Ok(Rival { is_of_others, ..none(name) });
    };
    // Idle time is asked of the winner alone, whose schedules are made once more for it.
    let scheduler = candidate.scheduler_of_others(input, models)?;
    let is_whole = searches(arm) && has_whole;
    let mut idle = 0.0;
    for (step, batch) in (0..).zip(batches.sampled) {
        let schedule = scheduler.schedule_until(step, batch, arm, &|| !is_whole || (input.halt)())?;
        idle += scheduler.simulate(&schedule)?.bubble_ratio();
    }
    Ok(Rival {
        name,
        is_of_others,
        layout: words(&candidate.layout.to_string(), candidate.recompute),
        num_microbatches: candidate.num_microbatches,
        step_ns_mean: Some(ns),
        bubble_ratio: Some(idle / batches.sampled.len().max(1) as f64),
        candidate: Some(candidate),
    })
}

/// One way to run all ranks as pipelines of one shape.
#[derive(Debug, Clone, Copy)]
struct Pipelines {
    /// Tensor degrees of encoder and LLM backbone. An encoder whose layers cannot be cut is whole on each rank.
    tp: [u32; 2],
    pp: u32,
    /// Chunks of a pipeline rank.
    chunks: u32,
    dp: u32,
    num_microbatches: u32,
    recompute: Recomputation,
}

/// The mean step in nanoseconds, and the mean of its idle ratio.
type Judged = (u64, f64);

/// The numbers of chunks on a pipeline rank that are tried.
const CHUNKS: [u32; 4] = [1, 2, 3, 4];

impl Pipelines {
    /// Whether its chunks can be run. Megatron asks for several pipeline ranks, at least one layer in each chunk, and a
    /// number of microbatches that is a multiple of `pp`.
    fn has_rounds(&self, num_layers: u32) -> bool {
        let is_whole = self.pp > 1 && self.num_microbatches.is_multiple_of(self.pp);
        self.chunks == 1 || is_whole && self.pp * self.chunks <= num_layers
    }

    /// The actions of a pipeline rank; `None` if these stages cannot be interleaved.
    fn actions(&self, rank: u32) -> Option<Vec<Action>> {
        order::interleaved(Rank(rank), self.pp, self.pp * self.chunks, self.num_microbatches).ok()
    }
}

/// Microbatch counts to try: those of our own plans, and those that make whole rounds of `pp` microbatches.
fn round_counts(global_batch_size: u32, pp: u32, dp: u32) -> Vec<u32> {
    let mut counts = microbatch_counts(global_batch_size, dp);
    let most = global_batch_size / dp;
    counts.extend((0..32).map_while(|power| pp.checked_mul(1 << power)).take_while(|&m| m <= most));
    counts.sort_unstable();
    counts.dedup();
    counts
}

/// The fastest pipelines whose encoder runs on the rank of the first stage, before it. Optimizer states are sharded over
/// the replicas (ZeRO-1; Megatron calls it the distributed optimizer).
fn megatron(
    name: &'static str,
    input: &SearchInput<'_>,
    models: &Models,
    batches: &Batches<'_>,
    is_balanced: bool,
) -> Rival {
    let (ranks, num_layers) = (input.cluster.num_ranks, models.plain().num_llm_layers());
    let groups = models.degrees().iter().filter(|&&[encoder, tp]| {
        let is_cut = models.degrees().contains(&[tp, tp]);
        ranks.is_multiple_of(tp) && encoder == if is_cut { tp } else { 1 }
    });
    let ways: Vec<Pipelines> = groups
        .flat_map(|&tp| divisors(ranks / tp[1]).into_iter().map(move |pp| (tp, pp)))
        .filter(|&(_, pp)| pp <= num_layers)
        .flat_map(|(tp, pp)| {
            let dp = ranks / tp[1] / pp;
            let counts = input
                .num_microbatches
                .map_or_else(|| round_counts(input.global_batch_size, pp, dp), |count| vec![count]);
            let recompute = Recomputation::NONE;
            counts.into_iter().flat_map(move |num_microbatches| {
                CHUNKS.map(|chunks| Pipelines { tp, pp, chunks, dp, num_microbatches, recompute })
            })
        })
        .filter(|way| way.has_rounds(num_layers))
        .collect();
    let count = batches.sampled.len().max(1);
    let step = |way: &Pipelines| -> Option<Judged> {
        let model = models.cut(way.tp, way.recompute)?;
        let mut sums = (0, 0.0);
        for (at, (_, batch)) in batches.all().enumerate() {
            let (step_ns, idle_ns) = pipelines_ns(input, model, way, batch, is_balanced)?;
            if at < count {
                sums = (sums.0 + step_ns, sums.1 + idle_ns as f64 / step_ns.max(1) as f64);
            }
        }
        Some((sums.0 / count as u64, sums.1 / count as f64))
    };
    // More recomputation never shortens a step of the same microbatches. So a mode is left out if one that recomputes less fits.
    // Balance looks at times, which recomputation changes: there only unequal modes are left out for this.
    let steps = |way: &Pipelines| {
        let mut found: Vec<(Pipelines, Judged)> = Vec::new();
        for &recompute in models.modes() {
            let is_same = !is_balanced || recompute.of_both().is_none();
            if is_same && found.iter().any(|(less, _)| less.recompute.is_at_most(recompute)) {
                continue;
            }
            let way = Pipelines { recompute, ..*way };
            found.extend(step(&way).map(|judged| (way, judged)));
        }
        found
    };
    let found: Vec<(Pipelines, Judged)> = ways.par_iter().flat_map_iter(steps).collect();
    let best = found.into_iter().min_by_key(|(_, (ns, _))| *ns);
    best.map_or_else(
        || none(name),
        |(way, (ns, idle_ratio))| Rival {
            layout: {
                let chunks =
                    if way.chunks > 1 { format!(" interleave {}", way.chunks) } else { String::new() };
                let layout = format!("tp {} pp {} dp {}{chunks}, zero 1", way.tp[1], way.pp, way.dp);
                words(&layout, way.recompute)
            },
            num_microbatches: way.num_microbatches,
            step_ns_mean: Some(ns),
            bubble_ratio: Some(idle_ratio),
            ..none(name)
        },
    )
}

/// The step of a global batch and the mean idle time of its ranks, in nanoseconds; `None` if a rank has too little memory
/// or a microbatch too many tokens.
fn pipelines_ns(
    input: &SearchInput<'_>,
    model: &CostModel,
    way: &Pipelines,
    batch: &[SampleIndex],
    is_balanced: bool,
) -> Option<(u64, u64)> {
    let (m, dp) = (way.num_microbatches as usize, way.dp as usize);
    let num_buckets = way.num_microbatches * way.dp;
    let bucket = if is_balanced {
        let whole = model.whole_stage();
        let cost = |sample: &SampleIndex| {
            let alone = MicrobatchShape::pack([&input.shapes[sample.index()]]);
            model.encoder(&alone).total_ns()
                + model.llm_stage(&alone, whole.num_layers, true, true).total_ns()
        };
        single_cost_lpt(&batch.iter().map(cost).collect::<Vec<u64>>(), num_buckets)
    } else {
        arrival_order(batch.len(), num_buckets)
    };
    let mut samples = vec![Vec::new(); num_buckets as usize];
    for (&sample, bucket) in batch.iter().zip(bucket) {
        samples[bucket as usize].push(&input.shapes[sample.index()]);
    }
    let microbatches: Vec<RankMicrobatch> = samples
        .into_iter()
        .map(|samples| RankMicrobatch {
            shape: MicrobatchShape::pack(samples.iter().copied()),
            feature_tokens: samples.iter().map(|shape| u64::from(shape.feature_tokens)).sum(),
        })
        .collect();
    if input
        .bucket_tokens_max
        .is_some_and(|cap| microbatches.iter().any(|microbatch| microbatch.shape.total_llm_tokens() > cap))
    {
        return None;
    }
    let cut = cut_layers(model.num_llm_layers(), way.pp * way.chunks);
    let last = cut.len() - 1;
    let stages: Vec<StageLayers> = cut
        .into_iter()
        .enumerate()
        .map(|(stage, num_layers)| StageLayers { num_layers, is_first: stage == 0, is_last: stage == last })
        .collect();
    // Megatron numbers first the ranks of a tensor group, then the replicas of a stage, then the stages.
    let sharding = Sharding { stride: way.tp[1], ..Sharding::whole(Zero::States, way.dp) };
    let (mut longest_ns, mut busy_ns) = (0, 0);
    for replica in 0..dp {
        // In arrival order the replicas take turns, microbatch by microbatch. Balanced microbatches are alike, so for those
        // it does not matter which replica has which.
        let own: Vec<RankMicrobatch> = (0..m).map(|at| microbatches[at * dp + replica].clone()).collect();
        if !fits(input, model, way, &stages, sharding, &own)? {
            return None;
        }
        let mut durations = Durations {
            forward_ns: Vec::new(),
            backward_ns: Vec::new(),
            input_ns: Vec::new(),
            weight_ns: Vec::new(),
            transfer_ns: 0,
        };
        let tokens: u64 = own.iter().map(|microbatch| microbatch.shape.total_llm_tokens()).sum();
        durations.transfer_ns = model.transfer_ns(model.llm_rows(tokens / m.max(1) as u64));
        for stage in &stages {
            let both = own.iter().map(|microbatch| {
                let mut one =
                    model.llm_stage(&microbatch.shape, stage.num_layers, stage.is_first, stage.is_last);
                if stage.is_first {
                    let encoder = model.encoder(&microbatch.shape);
                    one.forward_ns += encoder.forward_ns;
                    one.backward_ns += encoder.backward_ns;
                }
                (one.forward_ns, one.backward_ns)
            });
            let (forward_ns, backward_ns): (Vec<u64>, Vec<u64>) = both.unzip();
            busy_ns += forward_ns.iter().chain(&backward_ns).sum::<u64>();
            durations.forward_ns.push(forward_ns);
            durations.backward_ns.push(backward_ns);
        }
        longest_ns = simulate_interleaved(&durations, way.pp).ok()?.makespan_ns.max(longest_ns);
    }
    let held: Vec<StageLayers> = (0..way.pp).map(|rank| held(&stages, way.pp, rank)).collect();
    let of_ranks = held.iter().map(|&held| model.sharded_stage_tail(held, sharding).ns);
    let first_ns = model.sharded_encoder_tail(sharding).ns + model.sharded_stage_tail(held[0], sharding).ns;
    let idle_ns = longest_ns.saturating_sub(busy_ns / u64::from(way.dp * way.pp));
    Some((longest_ns + of_ranks.max().unwrap_or(0).max(first_ns), idle_ns))
}

/// All chunks that a pipeline rank holds, as one stage: their layers together.
fn held(stages: &[StageLayers], pp: u32, rank: u32) -> StageLayers {
    let chunks = || stages.iter().skip(rank as usize).step_by(pp as usize);
    StageLayers {
        num_layers: chunks().map(|chunk| chunk.num_layers).sum(),
        is_first: chunks().any(|chunk| chunk.is_first),
        is_last: chunks().any(|chunk| chunk.is_last),
    }
}

/// Whether the fullest rank of a pipeline fits the memory budget. That is the first rank, which also holds the encoder, or
/// the last one. `None` if the stages cannot be interleaved.
fn fits(
    input: &SearchInput<'_>,
    model: &CostModel,
    way: &Pipelines,
    stages: &[StageLayers],
    sharding: Sharding,
    microbatches: &[RankMicrobatch],
) -> Option<bool> {
    let Some(budget_bytes) = input.memory_budget_bytes() else { return Some(true) };
    let (pp, last) = (way.pp as usize, way.pp - 1);
    let of_rank = |rank: u32| {
        let actions = way.actions(rank)?;
        let role = RankRole::Stage(held(stages, way.pp, rank));
        let steps = RankSteps { role, microbatches, actions: &actions, copies_rows: false, sharding };
        let chunks: Vec<StageLayers> = stages.iter().copied().skip(rank as usize).step_by(pp).collect();
        model.interleaved_peak(&steps, &chunks, |stage| stage.index() / pp).ok()
    };
    // The encoder runs with the first chunk.
    let mut actions = way.actions(0)?;
    actions.retain(|action| action.stage == StageIndex(0));
    let role = RankRole::Encoder;
    let steps = RankSteps { role, microbatches, actions: &actions, copies_rows: false, sharding };
    let encoder = model.rank_peak(&steps).ok()?;
    let (first, end) = (of_rank(0)?, of_rank(last)?);
    // Encoder and first stage are on one device, which has its context only once.
    let first_bytes = (encoder.total_bytes() + first.total_bytes()).saturating_sub(encoder.context_bytes);
    Some(first_bytes.max(end.total_bytes()) <= budget_bytes)
}
