//! The outcome of a search: ranked plans, rejections grouped and counted, and why it stopped.

use crate::caveats::Caveats;
use crate::mend::Mend;
use crate::objective::Objective;
use crate::rival::Rival;
use crate::run_memory::RunMemory;
use crate::space::Candidate;
use dflop_types::{
    MadeFrom, Plan, RankedPlan, Rejection, RejectionCount, RivalPrediction, SearchedSpace, Trained,
    WayPrediction,
};
use std::collections::BTreeMap;

/// Why a search ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    /// Every candidate was judged, or there is a reason why it was not.
    Done,
    /// The search was halted, and gave the best plan so far. The candidates left have the longest estimated steps.
    Halted {
        /// Candidates left unjudged.
        num_left: u64,
        /// Whether there are layouts beyond these that nobody looked at.
        is_cut: bool,
    },
}

/// What a search found. No plan that fits is an outcome too.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    /// Candidates that fit, by what the objective says of their predicted steps; at most [`crate::NUM_RANKED`].
    pub ranked: Vec<RankedPlan>,
    /// Why the others were not chosen, the most frequent cause first.
    pub rejections: Vec<RejectionCount>,
    /// What the plans are ranked by.
    pub objective: Objective,
    /// The 95th percentile of the steps of each plan of `ranked` and of others that were judged on all batches, in
    /// nanoseconds.
    pub p95_ns: BTreeMap<Candidate, u64>,
    /// Why the search ended.
    pub stop: StopReason,
    /// Number of all candidates, including candidates rejected by their numbers alone.
    pub num_candidates: u64,
    /// Candidates judged on all sampled batches.
    pub num_judged: u64,
    /// Ranks of the cluster.
    pub num_ranks: u32,
    /// Ranks of a node of the cluster.
    pub ranks_per_node: u32,
    /// Samples of a global batch, as they were asked for.
    pub global_batch_size: u32,
    /// Samples of the largest global batch that was judged: fewer than were asked for if the data has fewer.
    pub num_samples: u32,
    /// Microbatches of a step that were asked for; `None`: the search chose.
    pub num_microbatches: Option<u32>,
    /// If no plan fits with the number that was asked for: another number with which one fits, if it was found.
    pub fitting_num_microbatches: Option<u32>,
    /// The same global batches run in every way that was compared: the baselines and ours.
    pub ways: Vec<WayPrediction>,
    /// What people run today, each with the best of its own search; empty if rivals were not asked for.
    pub rivals: Vec<Rival>,
    /// What would fit in place of candidates that lack memory. Empty unless rivals were asked for or no plan fits.
    pub mends: Vec<Mend>,
    /// The predicted work of a global batch divided by the number of ranks, as a mean over the batches, in nanoseconds.
    pub work_bound_ns: u64,
    /// Seed of the sampled global batches.
    pub seed: u64,
    /// Global batches each candidate was judged on.
    pub num_sampled_batches: u32,
    /// Which parts of the model are trained.
    pub trained: Trained,
    /// Bytes one rank may use; `None`: memory was not checked.
    pub memory_budget_bytes: Option<u64>,
    /// How the best plan fits the global batches of the run beyond the sampled ones; `None`: memory was not checked.
    pub run_memory: Option<RunMemory>,
    /// Whether somebody gave the memory budget; otherwise it is a fraction of the device's memory.
    pub is_budget_given: bool,
    /// What is not certain about the numbers of the best plan.
    pub caveats: Caveats,
    /// Hashes of what the plan is made from.
    pub made_from: MadeFrom,
}

impl Outcome {
    /// The plan with its runners-up and the reasons of the others; `None` if none fits.
    pub fn plan(&self) -> Option<Plan> {
        let (best, runners_up) = self.ranked.split_first()?;
        Some(Plan {
            made_from: self.made_from.clone(),
            global_batch_size: self.global_batch_size,
            seed: self.seed,
            num_sampled_batches: self.num_sampled_batches,
            trained: self.trained,
            best: *best,
            ways: self.ways.clone(),
            rivals: self.rivals.iter().map(RivalPrediction::from).collect(),
            runners_up: runners_up.to_vec(),
            rejections: self.rejections.clone(),
            searched: Some(self.searched()),
        })
    }

    /// The 95th percentile of the judged steps of a plan, in nanoseconds; `None` if it was not judged here.
    pub fn step_ns_p95(&self, plan: &RankedPlan) -> Option<u64> {
        self.p95_ns.get(&Candidate::from(plan)).copied()
    }

    /// Ranks of the cluster that the plan leaves free; 0 without a plan.
    pub fn num_free_ranks(&self) -> u32 {
        self.ranked.first().map_or(0, |best| self.num_ranks.saturating_sub(best.layout.num_ranks()))
    }

    /// The candidates from which the plan is chosen, and the limits that it must keep.
    pub(crate) fn searched(&self) -> SearchedSpace {
        SearchedSpace {
            num_candidates: self.num_candidates,
            memory_budget_bytes: self.memory_budget_bytes,
            is_budget_given: self.is_budget_given,
            num_samples: Some(self.num_samples),
            num_free_ranks: self.num_free_ranks(),
            ranks_per_node: Some(self.ranks_per_node),
        }
    }
}

/// Rejections grouped by cause, the most frequent first. Each group shows the value that comes nearest to fitting.
pub(crate) fn group(rejections: impl IntoIterator<Item = Rejection>) -> Vec<RejectionCount> {
    let mut groups: Vec<RejectionCount> = Vec::new();
    for rejection in rejections {
        let same = groups.iter_mut().find(|group| is_same_cause(&group.rejection, &rejection));
        match same {
            Some(group) => {
                group.count += 1;
                if is_nearer(&rejection, &group.rejection) {
                    group.rejection = rejection;
                }
            }
            None => groups.push(RejectionCount { rejection, count: 1 }),
        }
    }
    groups.sort_by(|a, b| b.count.cmp(&a.count).then_with(|| a.rejection.cmp(&b.rejection)));
    groups
}

/// Whether the first of two rejections of one cause is nearer to fitting: where layers are too few the one with more of them, else
/// the smaller need, by which rejections are ordered.
fn is_nearer(a: &Rejection, b: &Rejection) -> bool {
    match (a, b) {
        (
            Rejection::RecomputeExceedsStage { layers: a, .. },
            Rejection::RecomputeExceedsStage { layers: b, .. },
        ) => a > b,
        _ => a < b,
    }
}

fn is_same_cause(a: &Rejection, b: &Rejection) -> bool {
    match (a, b) {
        (Rejection::Memory { component: a, .. }, Rejection::Memory { component: b, .. })
        | (
            Rejection::RecomputeExceedsStage { component: a, .. },
            Rejection::RecomputeExceedsStage { component: b, .. },
        ) => a == b,
        _ => std::mem::discriminant(a) == std::mem::discriminant(b),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflop_types::Component;

    #[test]
    fn equal_causes_are_counted_with_the_value_nearest_to_fitting() {
        let memory =
            |component, needed_bytes| Rejection::Memory { component, needed_bytes, budget_bytes: 10 };
        let groups = group([
            memory(Component::Llm, 30),
            Rejection::Bound,
            memory(Component::Llm, 20),
            memory(Component::Encoder, 11),
            memory(Component::Llm, 25),
        ]);
        let count = |rejection, count| RejectionCount { rejection, count };
        assert_eq!(
            groups,
            [
                count(memory(Component::Llm, 20), 3),
                count(memory(Component::Encoder, 11), 1),
                count(Rejection::Bound, 1),
            ]
        );
    }

    #[test]
    fn too_few_layers_to_recompute_are_counted_by_component_with_the_most_layers() {
        let exceeds = |component, layers| Rejection::RecomputeExceedsStage {
            component,
            mode: "full:9".parse().unwrap(),
            layers,
        };
        let (of_llm, of_encoder) = (Component::Llm, Component::Encoder);
        let groups =
            group([exceeds(of_llm, 4), exceeds(of_encoder, 2), exceeds(of_llm, 7), exceeds(of_llm, 5)]);
        let counts: Vec<_> = groups.iter().map(|group| (group.rejection.clone(), group.count)).collect();
        assert_eq!(counts, [(exceeds(of_llm, 7), 3), (exceeds(of_encoder, 2), 1)]);
    }
}
