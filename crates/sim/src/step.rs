//! Step input: a layout, its pipeline order and the duration of every action on every rank.

use crate::engine::{Feeds, Place, Rows, SLOTS_MAX, Source};
use crate::error::{Problem, SimError};
use dflop_types::{Action, ActionKind, Layout, PipelineOrder, Rank, StageIndex};
use serde::{Deserialize, Serialize};

/// One step of a layout with encoder and LLM replicas: what the simulator needs to time it.
///
/// Every rank runs a forward and a backward for each microbatch; where it has no samples, the action is there
/// and takes no time.
///
/// *Invariants* (checked by [`StepInput::check`]): no degree is 0, both tensor-parallel degrees are 1 (a rank
/// stands for its tensor-parallel group); every list has the length that the layout and `num_microbatches`
/// give.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepInput {
    /// Degrees of both components; gives the ranks.
    pub layout: Layout,
    /// Order of the actions on each rank.
    pub order: PipelineOrder,
    /// Microbatches of the step, on every replica; 0 is an empty step.
    pub num_microbatches: u32,
    /// Forward of `[rank][microbatch]`, in nanoseconds.
    pub forward_ns: Vec<Vec<u64>>,
    /// Backward of `[rank][microbatch]`, in nanoseconds.
    pub backward_ns: Vec<Vec<u64>>,
    /// `[microbatch][encoder replica][llm replica]`: that encoder replica holds samples of that LLM replica.
    pub feeds: Vec<Vec<Vec<bool>>>,
    /// What an action's output takes to another rank, in nanoseconds.
    pub transfer_ns: u64,
    /// Reduction and optimizer of `[rank]`, after the last action of all ranks of its component, in
    /// nanoseconds.
    pub tail_ns: Vec<u64>,
}

impl StepInput {
    /// The action list of `rank`; `None` past the last rank.
    pub fn actions(&self, rank: Rank) -> Option<Vec<Action>> {
        let at = self.layout.coordinates(rank)?;
        Some(crate::order::actions(self.order, at.stage, self.layout.num_stages(), self.num_microbatches))
    }

    /// Nothing if the invariants hold.
    ///
    /// # Errors
    /// [`SimError::Unsound`] with every invariant that does not.
    pub fn check(&self) -> Result<(), SimError> {
        let mut problems = self.layout_problems();
        // With such a layout no count below means anything.
        if problems.is_empty() {
            self.find_wrong_counts(&mut problems);
        }
        if problems.is_empty() { Ok(()) } else { Err(SimError::Unsound { subject: "the step", problems }) }
    }

    fn layout_problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        let mut actions = 0;
        for (component, degrees, path) in [
            ("encoder", self.layout.encoder, "layout.encoder.tensor_parallel_degree"),
            ("llm", self.layout.llm, "layout.llm.tensor_parallel_degree"),
        ] {
            if degrees.pp == 0 {
                let path = format!("layout.{component}.pipeline_parallel_degree");
                problems.push(Problem::Zero { path, what: "stage" });
            }
            if degrees.dp == 0 {
                let path = format!("layout.{component}.data_parallel_degree");
                problems.push(Problem::Zero { path, what: "replica" });
            }
            if degrees.tp != 1 {
                problems.push(Problem::TensorParallel { path, degree: degrees.tp });
            }
            // Ranks are numbered in an empty step too.
            let of_rank = 2 * u128::from(self.num_microbatches.max(1));
            actions += of_rank * u128::from(degrees.pp) * u128::from(degrees.dp);
        }
        if actions > u128::from(SLOTS_MAX) {
            problems.push(Problem::TooMany { actions });
        }
        problems
    }

    fn find_wrong_counts(&self, problems: &mut Vec<Problem>) {
        let ranks = self.layout.num_ranks() as usize;
        let (encoders, llms) = (self.layout.encoder.dp as usize, self.layout.llm.dp as usize);
        let m = self.num_microbatches as usize;
        let mut compare = |path: &dyn Fn() -> String, found, what, other, expected| {
            if found != expected {
                problems.push(Problem::Count { path: path(), found, what, other, expected });
            }
        };
        for (name, list) in [("forward_ns", &self.forward_ns), ("backward_ns", &self.backward_ns)] {
            compare(&|| name.to_owned(), list.len(), "rank", "the layout", ranks);
            for (rank, row) in list.iter().enumerate() {
                compare(&|| format!("{name}[{rank}]"), row.len(), "microbatch", "the step", m);
            }
        }
        compare(&|| "tail_ns".to_owned(), self.tail_ns.len(), "rank", "the layout", ranks);
        compare(&|| "feeds".to_owned(), self.feeds.len(), "microbatch", "the step", m);
        for (j, column) in self.feeds.iter().enumerate() {
            compare(&|| format!("feeds[{j}]"), column.len(), "encoder replica", "the layout", encoders);
            for (e, row) in column.iter().enumerate() {
                compare(&|| format!("feeds[{j}][{e}]"), row.len(), "LLM replica", "the layout", llms);
            }
        }
    }

    /// What each rank holds. The input has been checked.
    pub(crate) fn places(&self) -> Vec<Place> {
        let layout = self.layout;
        let (boundary, last) = (layout.encoder.pp, layout.num_stages() - 1);
        let replicas = (0..layout.encoder.dp).map(|r| (r, 0..boundary));
        let replicas = replicas.chain((0..layout.llm.dp).map(|r| (r, boundary..last + 1)));
        let place = |replica, stage| {
            let neighbour = |stage| Source::Rank(layout.rank(replica, StageIndex(stage)).0);
            Place {
                stage: StageIndex(stage),
                forward: match stage {
                    0 => Source::Nothing,
                    _ if stage == boundary => Source::Boundary { replica },
                    _ => neighbour(stage - 1),
                },
                backward: match stage {
                    _ if stage == last => Source::Nothing,
                    _ if stage + 1 == boundary => Source::Boundary { replica },
                    _ => neighbour(stage + 1),
                },
                component: usize::from(stage >= boundary),
            }
        };
        replicas.flat_map(|(replica, stages)| stages.map(move |stage| place(replica, stage))).collect()
    }

    /// Ranks that hold `stage`, replica by replica.
    pub(crate) fn ranks_of(&self, stage: StageIndex) -> impl Iterator<Item = u32> + use<> {
        let layout = self.layout;
        let component = if stage.0 < layout.encoder.pp { layout.encoder } else { layout.llm };
        (0..component.dp).map(move |replica| layout.rank(replica, stage).0)
    }

    /// Who shares samples over the boundary. The input has been checked.
    pub(crate) fn boundary(&self) -> Feeds {
        let layout = self.layout;
        let (encoders, llms) = (layout.encoder.dp, layout.llm.dp);
        let mut feeds = Feeds { forward: Rows::new(llms as usize), backward: Rows::new(encoders as usize) };
        let last_encoder = StageIndex(layout.encoder.pp - 1);
        let first_llm = StageIndex(layout.encoder.pp);
        for column in &self.feeds {
            for r in 0..llms {
                let fed_by = (0..encoders).filter(|&e| column[e as usize][r as usize]);
                feeds.forward.push(fed_by.map(|e| layout.rank(e, last_encoder).0));
            }
            for e in 0..encoders {
                let feeding = (0..llms).filter(|&r| column[e as usize][r as usize]);
                feeds.backward.push(feeding.map(|r| layout.rank(r, first_llm).0));
            }
        }
        feeds
    }

    /// Slots of the `lists` of all ranks, rank by rank. The input has been checked.
    pub(crate) fn slots(&self, lists: &[Vec<Action>]) -> Result<Vec<u32>, SimError> {
        let m = self.num_microbatches as usize;
        let mut problems = Vec::new();
        let ranks = self.layout.num_ranks() as usize;
        if lists.len() != ranks {
            problems.push(Problem::Count {
                path: "lists".to_owned(),
                found: lists.len(),
                what: "rank",
                other: "the layout",
                expected: ranks,
            });
        }
        let mut slots = Vec::with_capacity(2 * m * ranks);
        for (rank, list) in (0..).map(Rank).zip(lists).take(ranks) {
            let path = || format!("lists[{rank}]");
            let mut count = vec![0; 2 * m];
            for &action in list {
                if let Some(local) = self.local_slot(rank, action) {
                    count[local] += 1;
                    slots.push((rank.index() * 2 * m + local) as u32);
                } else {
                    problems.push(Problem::Foreign { path: path(), rank, action });
                }
            }
            for (local, count) in count.into_iter().enumerate().filter(|&(_, count)| count != 1) {
                let action = self.local_action(rank, local);
                problems.push(Problem::NotOnce { path: path(), action, count });
            }
        }
        if problems.is_empty() {
            Ok(slots)
        } else {
            Err(SimError::Unsound { subject: "the action lists", problems })
        }
    }

    /// Position of `action` among the 2m slots of `rank`; `None` if the rank does not run it.
    pub(crate) fn local_slot(&self, rank: Rank, action: Action) -> Option<usize> {
        let at = self.layout.coordinates(rank)?;
        if at.stage != action.stage || action.microbatch >= self.num_microbatches {
            return None;
        }
        match action.kind {
            ActionKind::F => Some(action.microbatch as usize),
            ActionKind::B => Some((self.num_microbatches + action.microbatch) as usize),
            ActionKind::I | ActionKind::W => None,
        }
    }

    /// The action at position `local` among the 2m slots of `rank`.
    pub(crate) fn local_action(&self, rank: Rank, local: usize) -> Action {
        let m = self.num_microbatches as usize;
        let kind = if local < m { ActionKind::F } else { ActionKind::B };
        let stage = self.layout.coordinates(rank).map_or(StageIndex(0), |at| at.stage);
        Action { stage, kind, microbatch: if local < m { local } else { local - m } as u32 }
    }
}
