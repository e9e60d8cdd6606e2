//! Step input: a layout, its pipeline order and the duration of every action on every rank.

use crate::engine::SLOTS_MAX;
use crate::error::{SimError, Violation};
use crate::lists::Lists;
use crate::rows::DurationRows;
use crate::wiring::{Feeds, Rows, Source, WiredRow};
use dflop_types::{
    Action, ActionKind, Component, ComponentLayout, Layout, PipelineOrder, Rank, RankOrder, StageIndex,
};
use serde::{Deserialize, Serialize};

/// One step of a layout with encoder and LLM replicas: what the simulator needs to time it.
///
/// Every rank runs a forward and a backward, whole or split, for each microbatch. If it has no samples in a microbatch,
/// its actions are still there and take no time. So a forward of 0 nanoseconds stands for no samples: nothing is sent to it,
/// nor to the backward of the same microbatch.
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
    /// Forward of `[row][microbatch]`, in nanoseconds. A row is a stage of a replica ([`Layout::row`]). If each rank holds
    /// one stage, row r is rank r. Else the encoder's rows come first and then the LLM's, each replica by replica.
    pub forward_ns: Vec<Vec<u64>>,
    /// Backward of `[row][microbatch]`, in nanoseconds.
    pub backward_ns: Vec<Vec<u64>>,
    /// The part of the backward that gives the gradient of the stage's input (I), of `[row][microbatch]`, in nanoseconds;
    /// empty if no backward is split.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub input_ns: Vec<Vec<u64>>,
    /// The part that gives the gradients of the weights (W), as `input_ns`. I and W together may take longer than B.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub weight_ns: Vec<Vec<u64>>,
    /// `[microbatch][encoder replica]`: the LLM replicas whose samples that encoder replica encodes, ascending. These are
    /// lists because most encoder replicas feed few LLM replicas. With thousands of ranks, a table of all pairs would be
    /// larger than the rest of the step.
    pub feeds: Vec<Vec<Vec<u32>>>,
    /// How long an action's output takes to reach another rank, in nanoseconds. Between the components of a colocated
    /// rank nothing is sent, unless ranks encode samples of each other.
    pub transfer_ns: u64,
    /// Reduction and optimizer of `[rank]`, after the last action of all ranks of its component, in
    /// nanoseconds.
    pub tail_ns: Vec<u64>,
    /// When the data of `[rank]` is there, in nanoseconds since the start of the step. The rank starts nothing before
    /// that. Empty if all data is there from the start.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ready_ns: Vec<u64>,
}

impl StepInput {
    /// The action list of `rank`; `None` past the last rank.
    pub fn actions(&self, rank: Rank) -> Option<Vec<Action>> {
        crate::order::of_rank(&self.layout, self.order, rank, self.num_microbatches)
    }

    /// Nothing if the invariants hold.
    ///
    /// # Errors
    /// [`SimError::Unsound`] with every invariant that does not.
    pub fn check(&self) -> Result<(), SimError> {
        let mut violations = self.layout_violations();
        // The counts are compared with the layout, so they are checked only if the layout is sound.
        if violations.is_empty() {
            self.find_wrong_counts(&mut violations);
        }
        if violations.is_empty() {
            Ok(())
        } else {
            Err(SimError::Unsound { subject: "the step", violations })
        }
    }

    /// Nothing if the pipeline order can be run as it is.
    ///
    /// # Errors
    /// [`SimError::Unsound`] for interleaved 1F1B in a layout with one stage on each rank, for an order with split backwards
    /// if stages are interleaved, and for such an order if there are no times of I and W.
    pub(crate) fn check_order(&self) -> Result<(), SimError> {
        if self.layout.is_colocated() {
            // Each rank takes one microbatch after another.
            return Ok(());
        }
        let needs = match self.order {
            PipelineOrder::Interleaved if !self.layout.is_interleaved() => {
                "several stages a rank, the layout has one"
            }
            order if crate::order::is_split(order) && self.layout.is_interleaved() => {
                "one stage a rank, the layout has several"
            }
            order if crate::order::is_split(order) && !self.has_split() => "`input_ns` and `weight_ns`",
            _ => return Ok(()),
        };
        let violations = vec![Violation::Order { path: "order", order: self.order, needs }];
        Err(SimError::Unsound { subject: "the step", violations })
    }

    /// Whether there are times of I and W.
    pub fn has_split(&self) -> bool {
        !self.input_ns.is_empty() || !self.weight_ns.is_empty()
    }

    pub(crate) fn rows(&self) -> DurationRows<'_> {
        DurationRows {
            forward_ns: &self.forward_ns,
            backward_ns: &self.backward_ns,
            input_ns: &self.input_ns,
            weight_ns: &self.weight_ns,
        }
    }

    fn layout_violations(&self) -> Vec<Violation> {
        let mut violations = Vec::new();
        let mut actions = 0;
        let chunks = self.layout.llm_interleave;
        if chunks == 0 {
            violations.push(Violation::Zero { path: "layout.llm_interleave".to_owned(), what: "chunk" });
        }
        for (component, degrees, path, chunks) in [
            ("encoder", self.layout.encoder, "layout.encoder.tensor_parallel_degree", 1),
            ("llm", self.layout.llm, "layout.llm.tensor_parallel_degree", chunks),
        ] {
            if degrees.pp == 0 {
                let path = format!("layout.{component}.pipeline_parallel_degree");
                violations.push(Violation::Zero { path, what: "stage" });
            }
            if degrees.dp == 0 {
                let path = format!("layout.{component}.data_parallel_degree");
                violations.push(Violation::Zero { path, what: "replica" });
            }
            if degrees.tp != 1 {
                violations.push(Violation::TensorParallel { path, degree: degrees.tp });
            }
            // An empty step has ranks too, and they are numbered.
            let of_rank = if self.has_split() { 3 } else { 2 } * u128::from(self.num_microbatches.max(1));
            actions += of_rank * u128::from(degrees.pp) * u128::from(degrees.dp) * u128::from(chunks);
        }
        let (encoder, llm) = (self.layout.encoder, self.layout.llm);
        if self.layout.is_colocated() && (encoder != llm || llm.pp != 1 || chunks != 1) {
            violations.push(Violation::Colocated { layout: self.layout });
        }
        if actions > u128::from(SLOTS_MAX) {
            violations.push(Violation::TooMany { actions });
        }
        violations
    }

    fn find_wrong_counts(&self, violations: &mut Vec<Violation>) {
        let ranks = self.layout.num_ranks() as usize;
        let has_several = self.layout.is_colocated() || self.layout.is_interleaved();
        let of_rows = if has_several { "stage of a replica" } else { "rank" };
        let rows = self.layout.num_rows() as usize;
        let encoders = self.layout.encoder.dp as usize;
        let m = self.num_microbatches as usize;
        let mut compare = |path: &dyn Fn() -> String, found, what, other, expected| {
            if found != expected {
                violations.push(Violation::Count { path: path(), found, what, other, expected });
            }
        };
        for (name, list) in [("forward_ns", &self.forward_ns), ("backward_ns", &self.backward_ns)] {
            compare(&|| name.to_owned(), list.len(), of_rows, "the layout", rows);
            for (rank, row) in list.iter().enumerate() {
                compare(&|| format!("{name}[{rank}]"), row.len(), "microbatch", "the step", m);
            }
        }
        // I and W go together: if one list is there, the other must be there too.
        let split = [("input_ns", &self.input_ns), ("weight_ns", &self.weight_ns)];
        for (name, list) in split.into_iter().filter(|_| self.has_split()) {
            compare(&|| name.to_owned(), list.len(), of_rows, "the layout", rows);
            for (rank, row) in list.iter().enumerate() {
                compare(&|| format!("{name}[{rank}]"), row.len(), "microbatch", "the step", m);
            }
        }
        if !self.ready_ns.is_empty() {
            compare(&|| "ready_ns".to_owned(), self.ready_ns.len(), "rank", "the layout", ranks);
        }
        compare(&|| "tail_ns".to_owned(), self.tail_ns.len(), "rank", "the layout", ranks);
        compare(&|| "feeds".to_owned(), self.feeds.len(), "microbatch", "the step", m);
        for (j, column) in self.feeds.iter().enumerate() {
            compare(&|| format!("feeds[{j}]"), column.len(), "encoder replica", "the layout", encoders);
        }
        for (j, column) in self.feeds.iter().enumerate() {
            for (e, fed) in column.iter().enumerate() {
                let is_ascending = fed.windows(2).all(|pair| pair[0] < pair[1]);
                if !is_ascending || fed.last().is_some_and(|&last| last >= self.layout.llm.dp) {
                    let path = format!("feeds[{j}][{e}]");
                    violations.push(Violation::Fed { path, replicas: self.layout.llm.dp });
                }
            }
        }
    }

    /// All rows, each with its stage, its rank, and what it waits for. The input has been checked.
    pub fn wired_rows(&self) -> Vec<WiredRow> {
        let layout = self.layout;
        let is_colocated = layout.is_colocated();
        let (boundary, last) = (layout.encoder.pp, layout.num_stages() - 1);
        let replicas = (0..layout.encoder.dp).map(|r| (r, 0..boundary));
        let replicas = replicas.chain((0..layout.llm.dp).map(|r| (r, boundary..last + 1)));
        let row = |replica, stage| {
            let neighbour = |stage| Source::Row(layout.row(replica, StageIndex(stage)) as u32);
            WiredRow {
                stage: StageIndex(stage),
                rank: layout.rank(replica, StageIndex(stage)).0,
                forward: match stage {
                    0 => Source::Nothing,
                    _ if stage == boundary && !is_colocated => Source::Boundary { replica },
                    _ => neighbour(stage - 1),
                },
                backward: match stage {
                    _ if stage == last => Source::Nothing,
                    _ if stage + 1 == boundary && !is_colocated => Source::Boundary { replica },
                    _ => neighbour(stage + 1),
                },
                component: usize::from(stage >= boundary && !is_colocated),
            }
        };
        replicas.flat_map(|(replica, stages)| stages.map(move |stage| row(replica, stage))).collect()
    }

    /// The row of `stage` on `rank`: the index of its durations. The rank must hold the stage.
    pub fn row(&self, rank: Rank, stage: StageIndex) -> usize {
        // This is called for every action. So if each rank has the row of its own number, it does without a division.
        if self.layout.is_colocated() {
            self.layout.row(rank.0, stage)
        } else if self.layout.is_interleaved() || self.layout.rank_order != RankOrder::TpPpDp {
            self.layout.coordinates(rank).map_or(0, |at| self.layout.row(at.replica, stage))
        } else {
            rank.index()
        }
    }

    /// Whether all ranks start each action together. They do if they gather the parameters of each layer (ZeRO-3), or exchange
    /// rows with the experts of others (taken as all ranks; it is those of an expert group). If several groups of ranks hold copies, these groups also wait for each other: gradients are reduced over them after
    /// each layer's backward.
    pub(crate) fn meets(&self) -> bool {
        let layout = self.layout;
        layout.meets_in_layers() && (layout.has_expert_groups() || layout.shard_degree(Component::Llm) > 1)
    }

    /// Rows of `stage`, replica by replica.
    pub(crate) fn rows_of(&self, stage: StageIndex) -> impl Iterator<Item = u32> + use<> {
        let layout = self.layout;
        let component = if stage.0 < layout.encoder.pp { layout.encoder } else { layout.llm };
        (0..component.dp).map(move |replica| layout.row(replica, stage) as u32)
    }

    /// The same step with one replica of each component, which is one pipeline, and without times. The input has been
    /// checked.
    pub(crate) fn pipeline(&self) -> Self {
        let one = |degrees: ComponentLayout| ComponentLayout { dp: 1, ..degrees };
        let layout = Layout { encoder: one(self.layout.encoder), llm: one(self.layout.llm), ..self.layout };
        Self {
            layout,
            order: self.order,
            num_microbatches: self.num_microbatches,
            forward_ns: Vec::new(),
            backward_ns: Vec::new(),
            input_ns: Vec::new(),
            weight_ns: Vec::new(),
            feeds: vec![vec![vec![0]]; self.num_microbatches as usize],
            transfer_ns: 0,
            tail_ns: Vec::new(),
            ready_ns: Vec::new(),
        }
    }

    /// Which encoder and LLM replicas share samples over the boundary. The input has been checked.
    pub fn boundary(&self) -> Feeds {
        let layout = self.layout;
        let (encoders, llms) = (layout.encoder.dp, layout.llm.dp);
        let mut feeds = Feeds {
            forward: Rows::new(llms as usize),
            backward: Rows::new(encoders as usize),
            exchanges: Vec::new(),
        };
        for column in &self.feeds {
            if layout.is_colocated() {
                let is_other = |(e, fed): (u32, &Vec<u32>)| fed.iter().any(|&replica| replica != e);
                feeds.exchanges.push((0..).zip(column).any(is_other));
            } else {
                push_rows(layout, column, &mut feeds);
            }
        }
        feeds
    }

    /// The `lists` of all ranks, checked. The input has been checked.
    pub(crate) fn lists(&self, lists: &[Vec<Action>]) -> Result<Lists, SimError> {
        let m = self.num_microbatches as usize;
        let mut violations = Vec::new();
        let ranks = self.layout.num_ranks() as usize;
        if lists.len() != ranks {
            violations.push(Violation::Count {
                path: "lists".to_owned(),
                found: lists.len(),
                what: "rank",
                other: "the layout",
                expected: ranks,
            });
        }
        let is_of_split = |action: &Action| matches!(action.kind, ActionKind::I | ActionKind::W);
        let has_split = self.has_split() && lists.iter().flatten().any(is_of_split);
        let mut read = Lists::new(self.layout.num_rows() as usize, m, has_split);
        for (rank, list) in (0..).map(Rank).zip(lists).take(ranks) {
            let path = || format!("lists[{rank}]");
            let mut counts: Vec<_> = self.layout.stages(rank).map(|stage| (stage, Counts::new(m))).collect();
            for &action in list {
                if self.is_of(rank, action) {
                    let of_stage = counts.iter_mut().find(|(stage, _)| *stage == action.stage);
                    if let Some((_, counts)) = of_stage {
                        counts.add(action);
                    }
                    read.push(self.row(rank, action.stage), action.kind, action.microbatch as usize);
                } else {
                    violations.push(Violation::Foreign { path: path(), rank, action });
                }
            }
            for (stage, counts) in &counts {
                counts.find_violations(*stage, path, &mut violations);
            }
            read.end_rank();
        }
        if self.meets() {
            let other = (0..lists.len().min(ranks)).find(|&rank| lists[rank] != lists[0]);
            violations.extend(other.map(|rank| Violation::Apart { rank }));
        }
        if violations.is_empty() {
            Ok(read)
        } else {
            Err(SimError::Unsound { subject: "the action lists", violations })
        }
    }

    /// Whether `rank` could run `action`.
    pub(crate) fn is_of(&self, rank: Rank, action: Action) -> bool {
        self.layout.stages(rank).any(|stage| stage == action.stage)
            && action.microbatch < self.num_microbatches
            && (matches!(action.kind, ActionKind::F | ActionKind::B) || self.has_split())
    }
}

/// How often each action of one rank occurs: counts of F, B, I and W by `[microbatch]`.
#[derive(Debug, Clone)]
pub(crate) struct Counts(pub(crate) Vec<[usize; 4]>);

impl Counts {
    const KINDS: [ActionKind; 4] = [ActionKind::F, ActionKind::B, ActionKind::I, ActionKind::W];

    pub(crate) fn new(num_microbatches: usize) -> Self {
        Self(vec![[0; 4]; num_microbatches])
    }

    pub(crate) fn add(&mut self, action: Action) {
        self.0[action.microbatch as usize][action.kind as usize] += 1;
    }

    /// The actions that must occur once but do not, each with its count.
    pub(crate) fn not_once(&self, stage: StageIndex) -> impl Iterator<Item = (Action, usize)> + '_ {
        // Forwards are named first, because ranks run them first.
        let by_kind = Self::KINDS.into_iter().flat_map(move |kind| (0..self.0.len()).map(move |j| (kind, j)));
        by_kind.filter_map(move |(kind, j)| {
            let [_, whole, input, weight] = self.0[j];
            let is_split = input + weight > 0;
            let is_needed = match kind {
                ActionKind::F => true,
                ActionKind::B => !is_split || whole > 1,
                ActionKind::I | ActionKind::W => is_split,
            };
            let count = self.0[j][kind as usize];
            (is_needed && count != 1).then_some((Action { stage, kind, microbatch: j as u32 }, count))
        })
    }

    fn find_violations(&self, stage: StageIndex, path: impl Fn() -> String, violations: &mut Vec<Violation>) {
        let not_once = self.not_once(stage);
        violations.extend(not_once.map(|(action, count)| Violation::NotOnce { path: path(), action, count }));
        violations.extend(self.both(stage).map(|action| Violation::Both { path: path(), action }));
    }

    /// Backwards that occur both whole and split.
    pub(crate) fn both(&self, stage: StageIndex) -> impl Iterator<Item = Action> + '_ {
        let is_both = |&(_, counts): &(usize, &[usize; 4])| counts[1] > 0 && counts[2] + counts[3] > 0;
        self.0.iter().enumerate().filter(is_both).map(move |(j, _)| Action {
            stage,
            kind: ActionKind::B,
            microbatch: j as u32,
        })
    }
}

/// Adds one microbatch to `feeds`. `column[encoder replica]` has the LLM replicas which that encoder replica feeds.
fn push_rows(layout: Layout, column: &[Vec<u32>], feeds: &mut Feeds) {
    let last_encoder = StageIndex(layout.encoder.pp - 1);
    let first_llm = StageIndex(layout.encoder.pp);
    let mut fed_by = vec![Vec::new(); layout.llm.dp as usize];
    for (e, fed) in (0..).zip(column) {
        for &r in fed {
            fed_by[r as usize].push(layout.row(e, last_encoder) as u32);
        }
        feeds.backward.push(fed.iter().map(|&r| layout.row(r, first_llm) as u32));
    }
    for ranks in fed_by {
        feeds.forward.push(ranks.into_iter());
    }
}

/// The feeds of one microbatch alone: the rows that forwards wait for, and those that backwards wait for.
pub(crate) fn feed_rows(layout: Layout, column: &[Vec<u32>]) -> (Rows, Rows) {
    let (encoders, llms) = (layout.encoder.dp as usize, layout.llm.dp as usize);
    let mut feeds = Feeds { forward: Rows::new(llms), backward: Rows::new(encoders), exchanges: Vec::new() };
    push_rows(layout, column, &mut feeds);
    (feeds.forward, feeds.backward)
}
