//! What a search has found so far: the plans that it keeps, and why others cannot be the plan.

use crate::evaluate::{Judged, summary};
use crate::input::SearchInput;
use crate::objective::Objective;
use crate::run_memory::RunMemory;
use crate::space::Candidate;
use dflop_types::{Placement, RankedPlan, Rejection};
use std::collections::{BTreeMap, BTreeSet};

/// The most plans that an outcome holds: the best and five runners-up.
pub const NUM_RANKED: usize = 6;

/// The judged candidates of a search, the rejections of the others, and why it ended.
#[derive(Debug, Default)]
pub(crate) struct Found {
    /// Whether the mean step or the 95th percentile decides.
    pub(crate) objective: Objective,
    /// The best plans by that, the fastest first, at most [`NUM_RANKED`].
    pub(crate) ranked: Vec<RankedPlan>,
    /// The 95th percentile of the judged steps of each plan, in nanoseconds.
    pub(crate) p95_ns: BTreeMap<Candidate, u64>,
    pub(crate) rejections: Vec<Rejection>,
    pub(crate) num_judged: u64,
    /// Candidates that were not judged because the search was halted.
    pub(crate) num_left: u64,
    /// For candidates that fit the sampled batches: how they fit the other global batches of the run.
    pub(crate) run_memory: BTreeMap<Candidate, RunMemory>,
}

impl Found {
    /// Adds a plan with its judged batches, in order of the objective.
    pub(crate) fn insert(&mut self, candidate: &Candidate, input: &SearchInput<'_>, judged: &[Judged]) {
        let steps: Vec<u64> = judged.iter().map(Judged::makespan_ns).collect();
        self.p95_ns.insert(*candidate, Objective::P95.of(&steps));
        let plan = candidate.ranked(input, summary(judged));
        let ns = self.value_ns(&plan);
        let place = self.ranked.partition_point(|other| self.value_ns(other) <= ns);
        self.ranked.insert(place, plan);
    }

    /// What the objective says of the steps of a plan that was inserted, in nanoseconds.
    pub(crate) fn value_ns(&self, plan: &RankedPlan) -> u64 {
        match self.objective {
            Objective::Mean => plan.prediction.step_ns_mean,
            Objective::P95 => {
                self.p95_ns.get(&Candidate::from(plan)).copied().unwrap_or(plan.prediction.step_ns_mean)
            }
        }
    }

    /// Keeps [`NUM_RANKED`] plans. The best plan of each placement stays among them, so that people can compare the two.
    pub(crate) fn keep_best(&mut self) {
        self.drop_repeated();
        let is_other = |plan: &RankedPlan, than: Placement| plan.layout.placement != than;
        let Some(best) = self.ranked.first().map(|plan| plan.layout.placement) else { return };
        let other = self.ranked.iter().find(|plan| is_other(plan, best)).copied();
        let has_other = self.ranked.iter().take(NUM_RANKED).any(|plan| is_other(plan, best));
        self.ranked.truncate(NUM_RANKED);
        if let Some(other) = other.filter(|_| !has_other) {
            self.ranked.pop();
            self.ranked.push(other);
        }
    }

    /// Leaves out plans that differ from a faster one in their order of actions alone. And plans that may recompute more than
    /// another one of the same layout, and never do: where microbatches recompute only as much as memory asks for, they are the
    /// same plan.
    fn drop_repeated(&mut self) {
        let is_same = |a: &RankedPlan, b: &RankedPlan| {
            (a.layout, a.num_microbatches, a.prediction) == (b.layout, b.num_microbatches, b.prediction)
        };
        let mut seen = BTreeSet::new();
        self.ranked.retain(|plan| seen.insert((plan.layout, plan.num_microbatches, plan.recompute)));
        let plans = self.ranked.clone();
        self.ranked.retain(|plan| {
            let repeats = |other: &RankedPlan| other.recompute < plan.recompute && is_same(other, plan);
            !plan.is_eased || !plans.iter().any(repeats)
        });
    }

    /// Raises the memory peaks of all plans to those that the other global batches of the run reach.
    pub(crate) fn raise_peaks(&mut self) {
        for plan in &mut self.ranked {
            let Some(found) = self.run_memory.get(&Candidate::from(&*plan)) else { continue };
            let prediction = &mut plan.prediction;
            let [encoder, llm] = found.peak_bytes;
            prediction.encoder_memory_bytes_peak = prediction.encoder_memory_bytes_peak.max(encoder);
            prediction.llm_memory_bytes_peak = prediction.llm_memory_bytes_peak.max(llm);
        }
    }

    /// The value of the objective above which a candidate cannot be among the best any more, in nanoseconds; `None` while there is room.
    pub(crate) fn cutoff_ns(&self) -> Option<u64> {
        self.ranked.get(NUM_RANKED - 1).map(|plan| self.value_ns(plan))
    }
}
