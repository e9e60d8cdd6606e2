//! The search: candidates by ascending lower bound, judged until no other can be among the best.

use crate::baseline::compare;
use crate::bound::{self, BatchWork};
use crate::caveats::Caveats;
use crate::error::PlanError;
use crate::evaluate::{Verdict, evaluate};
use crate::feasible;
use crate::outcome::{Outcome, StopReason, group};
use crate::space::{Candidate, space};
use dflop_cost::{CostModel, CostSettings};
use dflop_step::batches::GlobalBatches;
use dflop_step::{GiantPolicy, GiantRule, StepScheduler, StepSettings, check_samples};
use dflop_types::{
    Cluster, MadeFrom, ModelProfile, PipelineOrder, RankedPlan, Recompute, Rejection, SampleIndex,
    SampleShape, Trained,
};
use std::fmt;
use std::sync::Arc;

/// Plans that an outcome holds at most: the best and five runners-up.
pub const NUM_RANKED: usize = 6;

/// Candidates that a search judges at most unless told; a count, not a time, so that searches repeat.
pub const JUDGEMENTS_MAX: u64 = 2_000;

/// What a search needs.
pub struct SearchInput<'a> {
    /// Shapes of the data profile, by sample index.
    pub shapes: Vec<SampleShape>,
    /// What the model was measured to take.
    pub model_profile: &'a ModelProfile,
    /// What may be used.
    pub cluster: Cluster,
    /// Samples of a global batch, at least 1.
    pub global_batch_size: u32,
    /// Microbatches of a step on each LLM replica; `None`: the search chooses.
    pub num_microbatches: Option<u32>,
    /// What becomes of giants.
    pub giants: GiantRule,
    /// The most LLM tokens of a bucket (microbatch x LLM replica); `None`: no cap.
    pub bucket_tokens_max: Option<u64>,
    /// What trains.
    pub trained: Trained,
    /// Order of actions.
    pub order: PipelineOrder,
    /// Global batches each candidate is judged on, at least 1; one alone gives no confidence interval.
    pub num_sampled_batches: u32,
    /// Candidates judged at most, those with the smallest lower bounds; [`JUDGEMENTS_MAX`] is enough for a whole search.
    pub judgements_max: u64,
    /// Seed of the sampled global batches and of their schedules.
    pub seed: u64,
    /// Hashes that the plan carries of what it was made from.
    pub made_from: MadeFrom,
    /// Called with candidates done and candidates in all, as the search goes on.
    pub progress: &'a dyn Fn(u64, u64),
}

impl SearchInput<'_> {
    fn memory_budget_bytes(&self) -> Option<u64> {
        self.model_profile.memory_budget_bytes(self.cluster.memory_budget_bytes)
    }
}

impl fmt::Debug for SearchInput<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SearchInput")
            .field("num_samples", &self.shapes.len())
            .field("cluster", &self.cluster)
            .field("global_batch_size", &self.global_batch_size)
            .field("num_microbatches", &self.num_microbatches)
            .field("giants", &self.giants)
            .field("bucket_tokens_max", &self.bucket_tokens_max)
            .field("trained", &self.trained)
            .field("order", &self.order)
            .field("num_sampled_batches", &self.num_sampled_batches)
            .field("seed", &self.seed)
            .finish_non_exhaustive()
    }
}

/// A candidate with its scheduler and the certified bound of each batch.
struct Contender {
    candidate: Candidate,
    scheduler: StepScheduler,
    bounds_ns: Vec<u64>,
}

impl Contender {
    fn bound_sum_ns(&self) -> u128 {
        self.bounds_ns.iter().map(|&ns| u128::from(ns)).sum()
    }
}

/// The best plans for the cluster, and why the others were not chosen.
///
/// Every candidate is judged on the same sampled global batches, so that two plans differ by their layout and
/// not by their luck. Each batch is filled by the very [`StepScheduler`] that trains and timed by the
/// simulator. Candidates stand by ascending lower bound; once the bound is above the worst plan kept, all
/// that follow fall.
///
/// *Complexity*: candidates x sampled batches x one [`StepScheduler::schedule`], at most `judgements_max` candidates.
///
/// # Errors
/// [`PlanError::TooFewRanks`], [`PlanError::Zero`], [`PlanError::Cost`]; [`PlanError::Step`] where no global batch can be
/// drawn, a sample alone is over the cap on tokens, or times overflow. No plan that fits is no error.
pub fn search(input: &SearchInput<'_>) -> Result<Outcome, PlanError> {
    let num_ranks = input.cluster.num_ranks;
    if num_ranks < 2 {
        return Err(PlanError::TooFewRanks { num_ranks });
    }
    for (field, value) in [
        ("num_microbatches", input.num_microbatches.unwrap_or(1)),
        ("num_sampled_batches", input.num_sampled_batches),
    ] {
        if value == 0 {
            return Err(PlanError::Zero { field });
        }
    }
    check_samples(&input.shapes, input.bucket_tokens_max)?;
    let model = Arc::new(CostModel::with(
        input.model_profile,
        &CostSettings { trained: input.trained, ..CostSettings::default() },
    )?);
    let batches = sampled_batches(input)?;
    let space = space(
        num_ranks,
        model.num_llm_layers(),
        model.is_tied(),
        input.global_batch_size,
        input.num_microbatches,
    );
    let num_candidates = (space.candidates.len() + space.rejections.len()) as u64;
    let mut rejections = space.rejections;
    let mut contenders = contenders(input, &model, &space.candidates, &batches, &mut rejections)?;
    contenders.sort_by_cached_key(|contender| (contender.bound_sum_ns(), contender.candidate));

    let mut ranked: Vec<RankedPlan> = Vec::new();
    let mut stop = StopReason::AllJudged;
    let mut num_judged = 0;
    for (position, contender) in contenders.iter().enumerate() {
        (input.progress)(rejections.len() as u64 + ranked.len() as u64, num_candidates);
        if num_judged >= input.judgements_max {
            stop = StopReason::WorkBudget { num_left: (contenders.len() - position) as u64 };
            break;
        }
        let cutoff_ns = ranked.get(NUM_RANKED - 1).map(|plan| plan.prediction.step_ns_mean);
        match evaluate(&contender.scheduler, &batches, &contender.bounds_ns, cutoff_ns)? {
            Verdict::Falls(rejection) => rejections.push(rejection),
            Verdict::Fits(prediction) => {
                num_judged += 1;
                let plan = RankedPlan {
                    layout: contender.candidate.layout,
                    num_microbatches: contender.candidate.num_microbatches,
                    pipeline_order: input.order,
                    recompute: Recompute::None,
                    prediction,
                };
                let place = ranked.partition_point(|p| p.prediction.step_ns_mean <= prediction.step_ns_mean);
                ranked.insert(place, plan);
            }
        }
    }
    (input.progress)(num_candidates, num_candidates);
    ranked.truncate(NUM_RANKED);
    let caveats = Caveats::of(input.model_profile, &model, ranked.first());
    let is_best = |contender: &&Contender, best: &RankedPlan| {
        let Candidate { layout, num_microbatches } = contender.candidate;
        (layout, num_microbatches) == (best.layout, best.num_microbatches)
    };
    let best = ranked.first().and_then(|best| contenders.iter().find(|contender| is_best(contender, best)));
    let ways = match best {
        Some(best) => compare(&best.scheduler, &batches, input.num_microbatches.is_none())?,
        None => Vec::new(),
    };
    let fitting_num_microbatches = match input.num_microbatches {
        Some(own) if ranked.is_empty() => fitting_num_microbatches(input, own, &model, &batches)?,
        _ => None,
    };
    Ok(Outcome {
        ranked,
        ways,
        num_microbatches: input.num_microbatches,
        fitting_num_microbatches,
        rejections: group(rejections),
        stop,
        num_candidates,
        num_judged,
        num_ranks,
        global_batch_size: input.global_batch_size,
        seed: input.seed,
        num_sampled_batches: batches.len() as u32,
        trained: input.trained,
        memory_budget_bytes: input.memory_budget_bytes(),
        is_budget_given: input.cluster.memory_budget_bytes.is_some(),
        caveats,
        made_from: input.made_from.clone(),
    })
}

/// Candidates judged at most to find a number of microbatches with which a plan fits.
const FITTING_JUDGEMENTS_MAX: usize = 24;

/// A number of microbatches other than `own` with which some candidate fits, the nearest to it that was found.
fn fitting_num_microbatches(
    input: &SearchInput<'_>,
    own: u32,
    model: &Arc<CostModel>,
    batches: &[Vec<SampleIndex>],
) -> Result<Option<u32>, PlanError> {
    let (num_ranks, num_layers) = (input.cluster.num_ranks, model.num_llm_layers());
    let space = space(num_ranks, num_layers, model.is_tied(), input.global_batch_size, None);
    let mut contenders = contenders(input, model, &space.candidates, batches, &mut Vec::new())?;
    contenders.retain(|contender| contender.candidate.num_microbatches != own);
    let distance = |count: u32| (f64::from(count) / f64::from(own.max(1))).ln().abs();
    contenders.sort_by(|a, b| {
        let key = |c: &Contender| distance(c.candidate.num_microbatches);
        key(a).total_cmp(&key(b)).then_with(|| a.bound_sum_ns().cmp(&b.bound_sum_ns()))
    });
    for contender in contenders.iter().take(FITTING_JUDGEMENTS_MAX) {
        let verdict = evaluate(&contender.scheduler, batches, &contender.bounds_ns, None)?;
        if matches!(verdict, Verdict::Fits(_)) {
            return Ok(Some(contender.candidate.num_microbatches));
        }
    }
    Ok(None)
}

/// Global batches as training draws them, whole ones only where there are any: the smaller last batch of an
/// epoch would make the mean too short.
///
/// The first ones; where giants are deferred over more steps than that, as many steps spread over the first window, its
/// last one among them: there the giants stand.
fn sampled_batches(input: &SearchInput<'_>) -> Result<Vec<Vec<SampleIndex>>, PlanError> {
    let num_samples = u32::try_from(input.shapes.len()).unwrap_or(u32::MAX);
    let batches = GlobalBatches::new(num_samples, input.global_batch_size, input.seed)?;
    let batches = if num_samples < input.global_batch_size { batches } else { batches.whole_only()? };
    let batches = batches.with_giants(input.giants, &input.shapes)?;
    let count = u64::from(input.num_sampled_batches);
    let window = match input.giants {
        GiantRule { policy: GiantPolicy::Defer, llm_tokens_max: Some(_), steps_max } => {
            (u64::from(steps_max) + 1).min(batches.steps_per_epoch()).max(count)
        }
        _ => count,
    };
    Ok((1..=count).map(|k| batches.batch(k * window / count - 1)).collect())
}

/// Candidates that may fit, with their bounds; the others add to `rejections`.
fn contenders(
    input: &SearchInput<'_>,
    model: &Arc<CostModel>,
    candidates: &[Candidate],
    batches: &[Vec<SampleIndex>],
    rejections: &mut Vec<Rejection>,
) -> Result<Vec<Contender>, PlanError> {
    let shapes: Arc<[SampleShape]> = input.shapes.as_slice().into();
    let works: Vec<BatchWork> = batches.iter().map(|batch| BatchWork::new(model, &shapes, batch)).collect();
    let heaviest = feasible::heaviest(model, &shapes);
    let mut contenders = Vec::with_capacity(candidates.len());
    for &candidate in candidates {
        let settings = StepSettings {
            layout: candidate.layout,
            num_microbatches: candidate.num_microbatches,
            pipeline_order: input.order,
            memory_budget_bytes: input.memory_budget_bytes(),
        };
        let scheduler = StepScheduler::new(settings, Arc::clone(model), Arc::clone(&shapes), input.seed)?
            .with_ranks_per_node(input.cluster.ranks_per_node)?
            .with_giants(input.giants)
            .with_checked_tokens_max(input.bucket_tokens_max);
        if let Some(rejection) = feasible::rejection(&scheduler, &heaviest) {
            rejections.push(rejection);
            continue;
        }
        let bounds_ns = bound::bounds_ns(&scheduler, &candidate, &works);
        contenders.push(Contender { candidate, scheduler, bounds_ns });
    }
    Ok(contenders)
}
