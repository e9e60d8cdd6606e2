//! Contenders: candidates that keep every rule and are not certain to lack memory. Each comes with what is known of it
//! before it is scheduled: its rough estimate and its lower bounds.

use crate::batch_shapes::BatchShapes;
use crate::bound::{self, BatchWork};
use crate::error::PlanError;
use crate::facts::Facts;
use crate::feasible::{Alone, heaviest};
use crate::input::SearchInput;
use crate::models::{Models, Way};
use crate::objective::Objective;
use crate::rough::{BatchSizes, Rough, rough};
use crate::space::Candidate;
use dflop_cost::CostModel;
use dflop_step::{StepScheduler, StepSettings};
use dflop_types::{
    Component, Layout, PlanPrediction, RankedPlan, Recomputation, Rejection, SampleIndex, SampleShape,
};
use rayon::prelude::*;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

/// Global batches that the rough estimate looks at. It is too rough to gain from more.
const ROUGH_BATCHES: usize = 2;

/// A candidate with its estimate and the certified bound of each batch.
#[derive(Debug, Clone)]
pub(crate) struct Contender {
    pub(crate) candidate: Candidate,
    pub(crate) rough: Rough,
    pub(crate) bounds_ns: Vec<u64>,
}

impl Contender {
    pub(crate) fn bound_sum_ns(&self) -> u128 {
        self.bounds_ns.iter().map(|&ns| u128::from(ns)).sum()
    }

    /// Lower bound on what the objective says of its steps, in nanoseconds.
    pub(crate) fn bound_ns(&self, objective: Objective) -> u64 {
        objective.of(&self.bounds_ns)
    }
}

impl Candidate {
    /// A candidate of this layout that stands for all others of it, where only the layout matters.
    pub(crate) fn probe(input: &SearchInput<'_>, layout: &Layout) -> Self {
        let order = input.first_order();
        Self { layout: *layout, num_microbatches: 1, recompute: Recomputation::NONE, order }
    }

    /// The settings with which the scheduler runs this candidate.
    pub(crate) fn settings(&self, input: &SearchInput<'_>) -> StepSettings {
        StepSettings {
            layout: self.layout,
            num_microbatches: self.num_microbatches,
            pipeline_order: self.order,
            memory_budget_bytes: input.memory_budget_bytes(),
        }
    }

    /// The scheduler that training would use for this candidate.
    pub(crate) fn scheduler(
        &self,
        input: &SearchInput<'_>,
        models: &Models,
    ) -> Result<StepScheduler, PlanError> {
        let scheduler = self.scheduler_of_others(input, models)?;
        if !self.eases(input) {
            return Ok(scheduler);
        }
        match models.easing(input, self) {
            Some(easing) => Ok(scheduler.with_eased(easing)),
            None => Ok(scheduler),
        }
    }

    /// Whether each of its microbatches recomputes only as much as memory asks for. Modes that somebody asks for by name are
    /// those of all microbatches.
    pub(crate) fn eases(&self, input: &SearchInput<'_>) -> bool {
        self.layout.is_colocated()
            && !self.recompute.is_none()
            && input.memory_budget_bytes().is_some()
            && !input.only.names_modes()
    }

    /// As [`Candidate::scheduler`], as other people run it: all microbatches recompute the same.
    pub(crate) fn scheduler_of_others(
        &self,
        input: &SearchInput<'_>,
        models: &Models,
    ) -> Result<StepScheduler, PlanError> {
        let scheduler = StepScheduler::new(
            self.settings(input),
            Arc::clone(models.of_others(input, self)),
            Arc::clone(&input.shapes),
            input.seed,
        )?;
        Ok(scheduler
            .with_ranks_per_node(input.cluster.ranks_per_node)?
            .with_giants(input.giants)
            .with_checked_tokens_max(input.bucket_tokens_max))
    }

    /// This candidate as a plan, with its prediction.
    pub(crate) fn ranked(&self, input: &SearchInput<'_>, prediction: PlanPrediction) -> RankedPlan {
        RankedPlan {
            layout: self.layout,
            num_microbatches: self.num_microbatches,
            pipeline_order: self.order,
            recompute: self.recompute,
            is_eased: self.eases(input),
            prediction,
        }
    }
}

impl From<&RankedPlan> for Candidate {
    fn from(plan: &RankedPlan) -> Self {
        Self {
            layout: plan.layout,
            num_microbatches: plan.num_microbatches,
            recompute: plan.recompute,
            order: plan.pipeline_order,
        }
    }
}

/// What is known of the sampled global batches if the components run in one way (degrees and recomputation): the work,
/// for the bound, and the sizes, for the rough estimate.
#[derive(Debug)]
pub(crate) struct KnownOfWay {
    pub(crate) works: Vec<BatchWork>,
    pub(crate) sizes: Vec<BatchSizes>,
}

impl KnownOfWay {
    fn new(model: &CostModel, batches: &[BatchShapes<'_>]) -> Self {
        Self {
            works: batches.iter().map(|batch| BatchWork::new(model, batch)).collect(),
            sizes: batches.iter().take(ROUGH_BATCHES).map(|batch| BatchSizes::new(model, batch)).collect(),
        }
    }
}

/// What is known of the sampled global batches, for each way to run the components.
///
/// Most modes of recomputation are asked for in few degrees. So what is not needed by the first candidates is worked out
/// when somebody asks.
#[derive(Debug)]
pub(crate) struct Known<'a> {
    models: &'a Models,
    shapes: &'a [SampleShape],
    batches: Vec<BatchShapes<'a>>,
    heaviest: OnceLock<Vec<usize>>,
    by_way: BTreeMap<Way, OnceLock<KnownOfWay>>,
}

impl<'a> Known<'a> {
    pub(crate) fn new(input: &'a SearchInput<'_>, models: &'a Models, batches: &[Vec<SampleIndex>]) -> Self {
        let batches: Vec<BatchShapes<'_>> =
            batches.par_iter().map(|batch| BatchShapes::new(&input.shapes, batch)).collect();
        let by_way = models.ways().map(|(way, _)| (way, OnceLock::new())).collect();
        let known = Self { models, shapes: &input.shapes, batches, heaviest: OnceLock::new(), by_way };
        let first = input.only.first_modes();
        let firsts: Vec<Way> = models.ways().map(|(way, _)| way).filter(|way| way.modes() == first).collect();
        firsts.par_iter().for_each(|way| _ = known.of_way(way));
        known
    }

    /// Positions of the samples that need most memory alone, of all samples of the data profile ([`heaviest`]).
    pub(crate) fn heaviest(&self) -> &[usize] {
        self.heaviest.get_or_init(|| heaviest(self.models.plain(), self.shapes))
    }

    /// What is known under the way of `candidate`, for which there must be a cost model.
    pub(crate) fn of(&self, candidate: &Candidate) -> &KnownOfWay {
        self.of_way(&Way::from(candidate))
    }

    /// The work of each batch under the way of `candidate`, whose cost model is `model`. It may be a way of other people, which
    /// the search has not.
    pub(crate) fn works_of(&self, candidate: &Candidate, model: &CostModel) -> Cow<'_, [BatchWork]> {
        if self.models.has(candidate) {
            return Cow::Borrowed(&self.of(candidate).works);
        }
        Cow::Owned(self.batches.iter().map(|batch| BatchWork::new(model, batch)).collect())
    }

    /// The work of each batch if layers are cut over so many ranks, in these modes of recomputation; `None` if that was not measured.
    pub(crate) fn works_in(&self, degrees: [u32; 2], modes: Recomputation) -> Option<&[BatchWork]> {
        let way = Way::new(degrees, modes);
        self.by_way.contains_key(&way).then(|| &*self.of_way(&way).works)
    }

    fn of_way(&self, way: &Way) -> &KnownOfWay {
        self.by_way[way].get_or_init(|| KnownOfWay::new(self.models.of_way(way), &self.batches))
    }
}

/// Why the stages of a candidate cannot have as many layers that recompute everything as it asks for; `None` if they can.
fn recompute_exceeds_stage(model: &CostModel, candidate: &Candidate) -> Option<Rejection> {
    let layers = [model.num_encoder_layers(), model.num_llm_layers()];
    let of = [(Component::Encoder, candidate.recompute.encoder), (Component::Llm, candidate.recompute.llm)];
    of.into_iter().zip(layers).find_map(|((component, mode), layers)| {
        let wanted = mode.first_layers_wanted();
        if wanted == 0 {
            return None;
        }
        let stages = candidate.layout.stage_layers(component, layers);
        let layers = stages.into_iter().max().unwrap_or(layers);
        (wanted > layers).then_some(Rejection::RecomputeExceedsStage { component, mode, layers })
    })
}

/// The candidates that may fit into memory, with their estimates and bounds. For each other candidate the reason is
/// added to `rejections`. What layouts have whatever their number of microbatches is looked up once where such candidates
/// follow each other.
pub(crate) fn contenders(
    input: &SearchInput<'_>,
    models: &Models,
    known: &Known<'_>,
    candidates: &[Candidate],
    rejections: &mut Vec<Rejection>,
) -> Result<Vec<Contender>, PlanError> {
    let is_alike = |a: &Candidate, b: &Candidate| a.layout == b.layout && a.recompute == b.recompute;
    let mut alike: Vec<&[Candidate]> = candidates.chunk_by(is_alike).collect();
    alike.retain(|alike| match recompute_exceeds_stage(models.plain(), &alike[0]) {
        None => true,
        Some(rejection) => {
            rejections.extend(std::iter::repeat_n(rejection, alike.len()));
            false
        }
    });
    let alone = Alone::new(input, models, known.heaviest(), alike.iter().map(|alike| &alike[0]))?;
    let budget = input.memory_budget_bytes();
    let of = |alike: &&[Candidate]| -> Result<Vec<Result<Contender, Rejection>>, PlanError> {
        if let Some(rejection) = alone.rejection(&alike[0]) {
            return Ok(vec![Err(rejection); alike.len()]);
        }
        let least = if alike[0].eases(input) {
            Candidate { recompute: Recomputation::NONE, ..alike[0] }
        } else {
            alike[0]
        };
        let (least_model, least_known) = (models.of(&least), known.of(&least));
        let (model, known) = (models.of(&alike[0]), known.of(&alike[0]));
        let facts = Facts::new(model, &alike[0].settings(input))?;
        let ratio = |batch: &BatchSizes| batch.longest_stage_ratio(model, &alike[0].layout);
        let ratios: Vec<f64> = known.sizes.iter().map(ratio).collect();
        let count = known.sizes.len() as u64;
        let contender = |candidate: &Candidate| {
            let batches = known.sizes.iter().zip(&ratios);
            let roughs =
                batches.map(|(batch, &ratio)| rough(model, candidate, (&facts, ratio), budget, batch));
            let none = Rough { is_over: false, step_ns: 0, at_mean_ns: 0, is_tight: false };
            let sum = roughs.fold(none, |sum, one| Rough {
                is_over: sum.is_over | one.is_over,
                is_tight: sum.is_tight | one.is_tight,
                step_ns: sum.step_ns.saturating_add(one.step_ns / count),
                at_mean_ns: sum.at_mean_ns.saturating_add(one.at_mean_ns / count),
            });
            // A candidate whose microbatches may recompute less takes no less than if none of them recomputed anything.
            let least_ns = |work| bound::makespan_min_ns(least_model, candidate, &facts, work);
            let bounds_ns = least_known.works.iter().map(least_ns).collect();
            Ok(Contender { candidate: *candidate, rough: sum, bounds_ns })
        };
        Ok(alike.iter().map(contender).collect())
    };
    let all: Vec<Vec<Result<Contender, Rejection>>> =
        alike.par_iter().map(of).collect::<Result<_, PlanError>>()?;
    let mut contenders = Vec::with_capacity(candidates.len());
    for one in all.into_iter().flatten() {
        match one {
            Ok(contender) => contenders.push(contender),
            Err(rejection) => rejections.push(rejection),
        }
    }
    Ok(contenders)
}
