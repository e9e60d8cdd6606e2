//! What a search has found so far: the plans that it keeps, and why others cannot be the plan.

use crate::run_memory::RunMemory;
use crate::space::Candidate;
use dflop_types::{Placement, RankedPlan, Rejection};
use std::collections::BTreeMap;

/// Plans that an outcome holds at most: the best and five runners-up.
pub const NUM_RANKED: usize = 6;

/// The judged candidates of a search, the rejections of the others, and why it ended.
#[derive(Debug, Default)]
pub(crate) struct Found {
    /// By step time, at most [`NUM_RANKED`].
    pub(crate) ranked: Vec<RankedPlan>,
    pub(crate) rejections: Vec<Rejection>,
    pub(crate) num_judged: u64,
    /// Candidates left where a halt struck.
    pub(crate) num_left: u64,
    /// How those that fit fit the other global batches of the run.
    pub(crate) run_memory: BTreeMap<Candidate, RunMemory>,
}

impl Found {
    /// Adds a judged plan in its place.
    pub(crate) fn insert(&mut self, plan: RankedPlan) {
        let ns = plan.prediction.step_ns_mean;
        let place = self.ranked.partition_point(|other| other.prediction.step_ns_mean <= ns);
        self.ranked.insert(place, plan);
    }

    /// Keeps [`NUM_RANKED`] plans; the best of each placement is among them, so that it can be compared.
    pub(crate) fn keep_best(&mut self) {
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

    /// The peaks of all plans over the other global batches of the run too.
    pub(crate) fn raise_peaks(&mut self) {
        for plan in &mut self.ranked {
            let Some(found) = self.run_memory.get(&Candidate::from(&*plan)) else { continue };
            let prediction = &mut plan.prediction;
            let [encoder, llm] = found.peak_bytes;
            prediction.encoder_memory_bytes_peak = prediction.encoder_memory_bytes_peak.max(encoder);
            prediction.llm_memory_bytes_peak = prediction.llm_memory_bytes_peak.max(llm);
        }
    }

    /// A candidate with a longer step cannot be among the best any more, in nanoseconds.
    pub(crate) fn cutoff_ns(&self) -> Option<u64> {
        self.ranked.get(NUM_RANKED - 1).map(|plan| plan.prediction.step_ns_mean)
    }
}
