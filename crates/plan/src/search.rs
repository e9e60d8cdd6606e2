//! The search: all candidates in, the best plans and the reasons against the others out.

use crate::baseline::compare_with;
use crate::caveats::Caveats;
use crate::contender::{Contender, Known, contenders};
use crate::error::PlanError;
use crate::evaluate::{Outlook, evaluate};
use crate::expert_groups::colocated_experts;
use crate::found::Found;
use crate::funnel;
use crate::input::{Depth, SearchEffort, SearchInput};
use crate::judge::{judge_one, judge_some};
use crate::mend::mends;
use crate::models::Models;
use crate::objective::Objective;
use crate::orders::try_orders;
use crate::outcome::{Outcome, StopReason, group};
use crate::parts::try_parts;
use crate::rival::Rival;
use crate::rivals::rivals;
use crate::run_memory::{Held, Run};
use crate::space::{Candidate, Rules, colocated};
use crate::wide::{colocated_groups, first_modes, recomputing, ways, wide};
use crate::work_bound::work_bound_ns;
use dflop_step::batches::GlobalBatches;
use dflop_step::{GiantPolicy, GiantRule, check_samples};
use dflop_types::{Cluster, Layout, RankedPlan, Rejection, SampleIndex};

/// The best plans for the cluster, and why the others were not chosen.
///
/// Every candidate is judged on the same sampled global batches, so that two plans differ by their layout and
/// not by their luck. Each batch is filled by the very [`dflop_step::StepScheduler`] that trains and timed by the
/// simulator. With [`SearchEffort::Quick`] a rough estimate chooses which candidates are judged. With
/// [`SearchEffort::Whole`] candidates are judged in order of their lower bounds. Once the bound is above the step of the
/// worst plan kept, no later candidate can be among the best, and all of them are rejected.
///
/// *Complexity*: O(candidates) for the estimate; judged candidates x sampled batches x one
/// [`dflop_step::StepScheduler::schedule`].
///
/// # Errors
/// [`PlanError::TooFewRanks`], [`PlanError::Zero`], [`PlanError::Cost`]; [`PlanError::Step`] where no global batch can be
/// drawn, a sample alone is over the cap on tokens, or times overflow. No plan that fits is no error.
pub fn search(input: &SearchInput<'_>) -> Result<Outcome, PlanError> {
    search_to(input, Depth::Explained)
}

/// The plan of a search alone, on all ranks of its cluster: what only explains an outcome, such as mends of what does not fit, is
/// left out, as it takes longer than such a search.
pub(crate) fn plan_alone(input: &SearchInput<'_>) -> Result<Option<RankedPlan>, PlanError> {
    Ok(search_to(input, Depth::Plan)?.ranked.first().copied())
}

/// The step of the plan that [`plan_alone`] would find, or a little more, in a fraction of its time: the scheduler's whole search
/// judges the plan in front alone.
pub(crate) fn step_alone_ns(input: &SearchInput<'_>) -> Result<Option<u64>, PlanError> {
    Ok(search_to(input, Depth::Step)?.ranked.first().map(|plan| plan.prediction.step_ns_mean))
}

/// Nothing if there is a rank, and no count is 0.
fn check_counts(input: &SearchInput<'_>) -> Result<(), PlanError> {
    let num_ranks = input.cluster.num_ranks;
    if num_ranks < 1 {
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
    Ok(())
}

fn search_to(input: &SearchInput<'_>, depth: Depth) -> Result<Outcome, PlanError> {
    let explains = depth == Depth::Explained;
    check_counts(input)?;
    let num_ranks = input.cluster.num_ranks;
    check_samples(&input.shapes, input.bucket_tokens_max)?;
    let models = Models::new(input)?;
    let model = models.plain();
    let batches = sampled_batches(input)?;
    let known = Known::new(input, &models, &batches);
    let Candidates { contenders, rejections, left_out_ns, number: mut num_candidates, is_cut } =
        candidates(input, &models, &known)?;
    let mut found = Found { objective: input.objective, rejections, ..Found::default() };
    let progress = |found: &Found| {
        (input.progress)(found.rejections.len() as u64 + found.ranked.len() as u64, num_candidates);
    };
    let held = Held { batches: &batches, run: Run::new(input, &batches)? };
    let mut compared =
        if input.compares { rivals(input, &models, &known, &contenders, &held)? } else { Vec::new() };
    let of_rivals = taken_from_rivals(&compared, &contenders);
    match input.effort {
        SearchEffort::Quick => {
            funnel::judge(input, &models, contenders, &held, depth, &mut found, &progress)?;
        }
        SearchEffort::Whole => judge_all(input, &models, contenders, &held, &mut found, &progress)?,
    }
    for (contender, ns) in &of_rivals {
        take_if_faster(input, &models, contender, *ns, &held, &mut found)?;
    }
    if explains && num_candidates > 0 {
        num_candidates += try_parts(input, &models, &known, &held, &mut found)?;
        on_fewer_ranks(input, &models, &known, &held, &found, &mut compared)?;
    }
    num_candidates += try_orders(input, &models, &held, depth, &mut found)?;
    // Some degrees were left out before anything was judged. Their least steps now tell which of them are certainly slower
    // than the plans kept.
    let cutoff_ns = found.cutoff_ns();
    let is_certain = input.objective.is_at_least_the_mean(batches.len());
    found.rejections.extend(left_out_ns.into_iter().map(|least_ns| match cutoff_ns {
        Some(cutoff) if least_ns > cutoff && is_certain => Rejection::Bound,
        _ => Rejection::Estimate,
    }));
    (input.progress)(num_candidates, num_candidates);
    found.keep_best();
    found.raise_peaks();
    let Found { ranked, rejections, num_judged, num_left, run_memory, p95_ns, .. } = found;
    let mends = if explains && (input.compares || ranked.is_empty()) {
        mends(input, &models, &known, &batches, &ranked, &rejections)?
    } else {
        Vec::new()
    };
    let ranked_first = ranked.first().map(Candidate::from);
    let caveats = Caveats::of(input.model_profile, model, ranked.first());
    let ways = match ranked.first().filter(|_| explains) {
        Some(best) => {
            let scheduler = Candidate::from(best).scheduler(input, &models)?;
            compare_with(
                best,
                &scheduler,
                &batches,
                input.num_microbatches.is_none() && !best.layout.is_colocated(),
                funnel::WHOLE_SAMPLES_MAX,
            )?
        }
        None => Vec::new(),
    };
    let fitting_num_microbatches = match input.num_microbatches {
        Some(own) if explains && ranked.is_empty() => {
            fitting_num_microbatches(input, own, &models, &known, &batches)?
        }
        _ => None,
    };
    Ok(Outcome {
        ranked,
        ways,
        rivals: compared,
        mends,
        work_bound_ns: work_bound_ns(input, model, &batches),
        num_microbatches: input.num_microbatches,
        fitting_num_microbatches,
        rejections: group(rejections),
        objective: input.objective,
        p95_ns,
        stop: if num_left > 0 || is_cut { StopReason::Halted { num_left, is_cut } } else { StopReason::Done },
        num_candidates,
        num_judged,
        num_ranks,
        ranks_per_node: input.cluster.ranks_per_node,
        global_batch_size: input.global_batch_size,
        num_samples: batches.iter().map(Vec::len).max().unwrap_or(0) as u32,
        seed: input.seed,
        num_sampled_batches: batches.len() as u32,
        memory_budget_bytes: input.memory_budget_bytes(),
        run_memory: ranked_first.and_then(|best| run_memory.get(&best).copied()),
        is_budget_given: input.cluster.memory_budget_bytes.is_some(),
        caveats,
        trained: input.trained,
        made_from: input.made_from.clone(),
    })
}

/// Candidates that are looked at before the search asks whether it shall end.
const LOOKED_AT_ONCE: usize = 4_096;

/// All candidates of a search: those that may fit, and why the others cannot be the plan.
pub(crate) struct Candidates {
    pub(crate) contenders: Vec<Contender>,
    rejections: Vec<Rejection>,
    /// Degrees whose candidates were all left out, and candidates that recompute: the least step of each, in nanoseconds.
    left_out_ns: Vec<u64>,
    number: u64,
    /// Whether the search was halted before it had all of them.
    is_cut: bool,
}

/// All candidates, made in three rounds: colocated ones and plain pipelines; pipelines of other degrees; pipelines that
/// recompute, and colocated ones whose components recompute different things. Each round looks at what the rounds before it found.
///
/// If the search is halted after a candidate was found that seems to fit, no further candidates are made.
pub(crate) fn candidates(
    input: &SearchInput<'_>,
    models: &Models,
    known: &Known,
) -> Result<Candidates, PlanError> {
    let rules = Rules::of(input, models.plain());
    let of_layout = |layout: &Layout| {
        let probe = Candidate {
            layout: *layout,
            num_microbatches: 1,
            recompute: input.only.first_modes(),
            order: rules.order,
        };
        ways(input, models.of(&probe), &known.of(&probe).sizes[0], layout)
    };
    let mut rejections = Vec::new();
    let [num_ranks, ranks_per_node] = rules.ranks;
    let (size, own) = (rules.global_batch_size, rules.num_microbatches);
    let mut candidates = colocated(
        num_ranks,
        ranks_per_node,
        size,
        own,
        &first_modes(models, &input.only),
        rules.order,
        &input.only,
    );
    candidates.extend(colocated_groups(&rules, models));
    candidates.extend(colocated_experts(&rules, models));
    let mut all = contenders(input, models, known, &candidates, &mut rejections)?;
    // They are few, and made in no time.
    let is_cut = |all: &[Contender]| (input.halt)() && all.iter().any(|one| !one.rough.is_over);
    let as_is = |all: Vec<Contender>, rejections: Vec<Rejection>| {
        let number = (all.len() + rejections.len()) as u64;
        Ok(Candidates { contenders: all, rejections, left_out_ns: Vec::new(), number, is_cut: true })
    };
    if is_cut(&all) {
        return as_is(all, rejections);
    }
    let plain = rules.pipelines(rules.plain(), of_layout);
    rejections.extend(plain.rejections);
    add_contenders(input, models, known, &plain.candidates, &mut all, &mut rejections)?;
    candidates.extend(plain.candidates);
    if is_cut(&all) {
        return as_is(all, rejections);
    }
    // A search in which nothing seems to fit yet goes on, whatever the time.
    let patient = SearchInput { halt: &|| false, ..input.clone() };
    let hasty = |all: &[Contender]| if all.iter().any(|one| !one.rough.is_over) { input } else { &patient };
    let wide = wide(hasty(&all), &rules, models, known, &all);
    rejections.extend(wide.space.rejections);
    add_contenders(input, models, known, &wide.space.candidates, &mut all, &mut rejections)?;
    candidates.extend(wide.space.candidates);
    let more = recomputing(hasty(&all), models, known, &candidates, &all)?;
    add_contenders(input, models, known, &more.space.candidates, &mut all, &mut rejections)?;
    if is_cut(&all) {
        return as_is(all, rejections);
    }
    let left_out_ns = [wide.left_out_ns, more.left_out_ns].concat();
    let number = (all.len() + rejections.len() + left_out_ns.len()) as u64;
    Ok(Candidates { contenders: all, rejections, left_out_ns, number, is_cut: false })
}

/// Adds what seems to fit of the candidates, until the search is halted and has some.
fn add_contenders(
    input: &SearchInput<'_>,
    models: &Models,
    known: &Known,
    candidates: &[Candidate],
    all: &mut Vec<Contender>,
    rejections: &mut Vec<Rejection>,
) -> Result<(), PlanError> {
    let mut has_some = all.iter().any(|one| !one.rough.is_over);
    for some in candidates.chunks(LOOKED_AT_ONCE) {
        if has_some && (input.halt)() {
            break;
        }
        let more = contenders(input, models, known, some, rejections)?;
        has_some = has_some || more.iter().any(|one| !one.rough.is_over);
        all.extend(more);
    }
    Ok(())
}

/// Judges all contenders that no bound rules out.
fn judge_all(
    input: &SearchInput<'_>,
    models: &Models,
    mut contenders: Vec<Contender>,
    held: &Held<'_>,
    found: &mut Found,
    progress: &dyn Fn(&Found),
) -> Result<(), PlanError> {
    contenders.sort_by_cached_key(|contender| (contender.bound_sum_ns(), contender.candidate));
    let mut num_left = contenders.len();
    for some in contenders.chunks(funnel::AT_ONCE) {
        progress(found);
        if found.num_judged > 0 && (input.halt)() {
            found.num_left = num_left as u64;
            break;
        }
        num_left -= some.len();
        judge_some(input, models, some, held, found)?;
    }
    Ok(())
}

/// Gives rivals the ranks of a plan that leaves some free, where they are faster on those: they get what ours gets.
fn on_fewer_ranks(
    input: &SearchInput<'_>,
    models: &Models,
    known: &Known,
    held: &Held<'_>,
    found: &Found,
    compared: &mut [Rival],
) -> Result<(), PlanError> {
    let Some(best) = found.ranked.first() else { return Ok(()) };
    let num_ranks = best.layout.num_ranks();
    if num_ranks == input.cluster.num_ranks || compared.is_empty() || (input.halt)() {
        return Ok(());
    }
    let part = SearchInput { cluster: Cluster { num_ranks, ..input.cluster.clone() }, ..input.clone() };
    let Candidates { contenders, .. } = candidates(&part, models, known)?;
    let of_part = rivals(&part, models, known, &contenders, held)?;
    for (all, fewer) in compared.iter_mut().zip(of_part) {
        if fewer.step_ns_mean.is_some_and(|ns| all.step_ns_mean.is_none_or(|of_all| ns < of_all)) {
            *all = fewer;
        }
    }
    Ok(())
}

/// The layouts of rivals that our search may choose, the fastest first, with their steps in nanoseconds.
fn taken_from_rivals(rivals: &[Rival], contenders: &[Contender]) -> Vec<(Contender, u64)> {
    let of = |rival: &Rival| {
        let contender = contenders.iter().find(|one| Some(one.candidate) == rival.candidate)?;
        Some((contender.clone(), rival.step_ns_mean?))
    };
    let mut taken: Vec<(Contender, u64)> = rivals.iter().filter_map(of).collect();
    taken.sort_by_key(|(contender, ns)| (*ns, contender.candidate));
    taken
}

/// Judges a contender that was seen to take `ns` a step where that is less than the plan takes: the search passed over it
/// by its estimate. Batches above [`funnel::WHOLE_SAMPLES_MAX`] samples are left to the estimate, for their time.
fn take_if_faster(
    input: &SearchInput<'_>,
    models: &Models,
    contender: &Contender,
    ns: u64,
    held: &Held<'_>,
    found: &mut Found,
) -> Result<(), PlanError> {
    let is_ranked = found.ranked.iter().any(|plan| Candidate::from(plan) == contender.candidate);
    let is_slower = found.ranked.first().is_some_and(|best| best.prediction.step_ns_mean <= ns);
    let is_large = input.global_batch_size as usize > funnel::WHOLE_SAMPLES_MAX;
    if is_ranked || is_slower || is_large || input.objective != Objective::Mean || (input.halt)() {
        return Ok(());
    }
    // Where it falls now, it fell before, by its memory: that is counted already.
    if judge_one(input, models, &contender.candidate, &contender.bounds_ns, held, found)?.is_none()
        && let Some(at) = found.rejections.iter().position(|one| *one == Rejection::Estimate)
    {
        found.rejections.swap_remove(at);
    }
    Ok(())
}

/// The most candidates that are judged to find a number of microbatches with which a plan fits.
const FITTING_JUDGEMENTS_MAX: usize = 24;

/// A number of microbatches other than `own` with which some candidate fits, the nearest to it that was found.
fn fitting_num_microbatches(
    input: &SearchInput<'_>,
    own: u32,
    models: &Models,
    known: &Known<'_>,
    batches: &[Vec<SampleIndex>],
) -> Result<Option<u32>, PlanError> {
    let rules = Rules { num_microbatches: None, ..Rules::of(input, models.plain()) };
    let space = rules.pipelines(rules.plain(), |layout| vec![*layout]);
    let mut contenders = contenders(input, models, known, &space.candidates, &mut Vec::new())?;
    contenders.retain(|contender| contender.candidate.num_microbatches != own);
    let distance = |count: u32| (f64::from(count) / f64::from(own.max(1))).ln().abs();
    contenders.sort_by(|a, b| {
        let key = |c: &Contender| distance(c.candidate.num_microbatches);
        key(a).total_cmp(&key(b)).then_with(|| a.bound_sum_ns().cmp(&b.bound_sum_ns()))
    });
    for contender in contenders.iter().take(FITTING_JUDGEMENTS_MAX) {
        let scheduler = contender.candidate.scheduler(input, models)?;
        let verdict = evaluate(&scheduler, batches, &contender.bounds_ns, input.objective, None)?;
        if matches!(verdict, Outlook::Fits(_)) {
            return Ok(Some(contender.candidate.num_microbatches));
        }
    }
    Ok(None)
}

/// The global batches on which candidates are judged, drawn as training draws them. The smaller last batch of an epoch is
/// left out, because it would make the mean too short, unless there is no other.
///
/// They are the first batches of the run. If giants are deferred over more steps than that, the batches are spread over
/// the first window of deferral, and its last step is one of them: that is where the giants are.
pub(crate) fn sampled_batches(input: &SearchInput<'_>) -> Result<Vec<Vec<SampleIndex>>, PlanError> {
    let num_samples = u32::try_from(input.shapes.len()).unwrap_or(u32::MAX);
    let batches = GlobalBatches::new(num_samples, input.global_batch_size, input.seed)?;
    let batches = if num_samples < input.global_batch_size { batches } else { batches.whole_only()? };
    let batches = batches.with_giants(input.giants, input.shapes.iter())?;
    let count = u64::from(input.num_sampled_batches);
    let window = match input.giants {
        GiantRule { policy: GiantPolicy::Defer, llm_tokens_max: Some(_), steps_max } => {
            (u64::from(steps_max) + 1).min(batches.steps_per_epoch()).max(count)
        }
        _ => count,
    };
    Ok((1..=count).map(|k| batches.batch(k * window / count - 1)).collect())
}
