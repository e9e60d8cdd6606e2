//! One rival: its fastest configuration, and the global batches that it is held to.

use crate::space::Candidate;
use dflop_types::{Recomputation, RivalPrediction, SampleIndex};

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
    /// Whether the time limit struck before all its configurations were looked at: a faster one may be left.
    pub is_cut: bool,
    /// What it is, where dflop's search has such candidates.
    pub(crate) candidate: Option<Candidate>,
}

impl From<&Rival> for RivalPrediction {
    fn from(rival: &Rival) -> Self {
        Self {
            name: rival.name.to_owned(),
            is_of_others: rival.is_of_others,
            layout: rival.layout.clone(),
            num_microbatches: rival.num_microbatches,
            step_ns_mean: rival.step_ns_mean,
        }
    }
}

/// The global batches that a rival is held to: the sampled ones give its time, and fuller ones of the run, with their steps,
/// must fit as well, as they must for the plan.
pub(crate) struct Batches<'a> {
    pub(crate) sampled: &'a [Vec<SampleIndex>],
    /// Each with its step.
    pub(crate) fullest: Vec<(u64, Vec<SampleIndex>)>,
}

impl Batches<'_> {
    /// Those that give the time, then those that must fit, each with its step.
    pub(crate) fn all(&self) -> impl Iterator<Item = (u64, &[SampleIndex])> {
        let sampled = (0..).zip(self.sampled);
        sampled.chain(self.fullest.iter().map(|(step, batch)| (*step, batch))).map(|(step, of)| (step, &**of))
    }
}

/// A rival of which nothing fits.
pub(crate) const fn none(name: &'static str) -> Rival {
    Rival {
        name,
        is_of_others: true,
        layout: String::new(),
        num_microbatches: 0,
        step_ns_mean: None,
        bubble_ratio: None,
        is_cut: false,
        candidate: None,
    }
}

/// A layout, and what is recomputed, if anything is.
pub(crate) fn words(layout: &str, recompute: Recomputation) -> String {
    if recompute.is_none() { layout.to_owned() } else { format!("{layout}, {recompute} recomputation") }
}
