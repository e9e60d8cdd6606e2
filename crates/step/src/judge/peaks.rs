//! Predicted memory of every rank: at its peak, and for one microbatch or one sample alone.

use crate::colocated::memory;
use crate::judge::work::{encoder_work, features, pack};
use crate::openings::first_openings;
use crate::scheduler::StepScheduler;
use dflop_cost::{RankMemory, RankMicrobatch, RankRole, RankSteps, Sharding};
use dflop_sim::order;
use dflop_types::{
    Action, ActionKind, Component, MicrobatchShape, PartRange, Rank, SampleShape, Schedule, StageIndex,
};

/// The work of one rank, microbatch by microbatch, with its first stage and the part of the model that it holds.
struct RankWork {
    rank: Rank,
    stage: usize,
    role: RankRole,
    microbatches: Vec<RankMicrobatch>,
}

/// What one rank runs: its list, and how many actions come before the receives of each.
#[derive(Clone, Copy)]
struct Run<'a> {
    actions: &'a [Action],
    openings: &'a [u32],
}

impl<'a> Run<'a> {
    /// One microbatch: its receives open just before its actions.
    const fn alone(actions: &'a [Action]) -> Self {
        Self { actions, openings: &[] }
    }
}

/// The work of every rank, in their order. Degrees and samples have been checked.
fn ranks(scheduler: &StepScheduler, schedule: &Schedule) -> Vec<RankWork> {
    let layout = scheduler.settings.layout;
    let roles = roles(scheduler);
    let mut ranks = Vec::with_capacity(layout.num_ranks() as usize);
    let num_encoder_stages = layout.encoder.pp as usize;
    for replica in 0..layout.encoder.dp {
        let work = schedule.encoder.iter().map(|column| encoder_work(scheduler, &column[replica as usize]));
        let microbatches: Vec<RankMicrobatch> = work.collect();
        for (stage, &role) in roles[..num_encoder_stages].iter().enumerate() {
            let rank = layout.rank(replica, StageIndex(stage as u32));
            ranks.push(RankWork { rank, stage, role, microbatches: microbatches.clone() });
        }
    }
    for replica in 0..layout.llm.dp {
        let work = schedule.llm.iter().map(|column| RankMicrobatch {
            shape: pack(scheduler, &column[replica as usize]),
            feature_tokens: features(scheduler, &column[replica as usize]),
        });
        let microbatches: Vec<RankMicrobatch> = work.collect();
        for (stage, &role) in roles.iter().enumerate().skip(num_encoder_stages) {
            let rank = layout.rank(replica, StageIndex(stage as u32));
            ranks.push(RankWork { rank, stage, role, microbatches: microbatches.clone() });
        }
    }
    ranks.sort_by_key(|work| work.rank);
    ranks
}

/// Predicted peak of every rank. Degrees, samples and action lists have been checked.
pub(crate) fn memory(scheduler: &StepScheduler, schedule: &Schedule) -> Vec<RankMemory> {
    if scheduler.settings.layout.is_colocated() {
        return memory::peaks(scheduler, &schedule.llm, &schedule.encoder);
    }
    let mut peaks = Vec::with_capacity(scheduler.settings.layout.num_ranks() as usize);
    of_pipelines(scheduler, schedule, |peak| {
        peaks.push(peak);
        true
    });
    peaks
}

/// Whether every rank stays within the budget; the first that does not is the last that is looked at.
pub(crate) fn are_within(scheduler: &StepScheduler, schedule: &Schedule, budget_bytes: u64) -> bool {
    if scheduler.settings.layout.is_colocated() {
        return memory::are_within(scheduler, &schedule.llm, &schedule.encoder, budget_bytes);
    }
    of_pipelines(scheduler, schedule, |peak| peak.total_bytes() <= budget_bytes)
}

/// Calls `goes_on` with the peak of each rank of a disaggregated layout, rank by rank, until it says no; whether it never does.
fn of_pipelines(
    scheduler: &StepScheduler,
    schedule: &Schedule,
    mut goes_on: impl FnMut(RankMemory) -> bool,
) -> bool {
    let settings = &scheduler.settings;
    let (layout, m) = (settings.layout, settings.num_microbatches);
    // One list for each rank of a replica; all replicas run the same lists.
    let first_ranks = (0..layout.encoder.pp + layout.llm.pp).map(|stage| layout.rank(0, StageIndex(stage)));
    let by_stage: Vec<Vec<Action>> =
        first_ranks.filter_map(|rank| order::of_rank(&layout, settings.pipeline_order, rank, m)).collect();
    // Lists that cannot run have been refused. Should one come here, all its receives are open from the start.
    let openings = first_openings(&layout, settings.pipeline_order, schedule).unwrap_or_else(|_| {
        vec![vec![0; 3 * m as usize * layout.llm_interleave.max(1) as usize]; layout.num_ranks() as usize]
    });
    let peak = |work: RankWork| {
        let list = schedule.actions.get(work.rank.index()).unwrap_or(&by_stage[work.stage]);
        let run = Run { actions: list, openings: &openings[work.rank.index()] };
        rank_peak(scheduler, work.stage, work.role, &work.microbatches, run)
    };
    ranks(scheduler, schedule).into_iter().all(|work| goes_on(peak(work)))
}

/// Two lists of bytes. First `[row][microbatch]`: what a microbatch takes if it is the only one in flight, on one stage, in
/// addition to what the rank holds in any case. Second, by rank: what the rank holds in any case. Degrees and samples have
/// been checked.
///
/// With one stage a rank, that includes what the optimizer needs, because the last microbatch has left before it runs. A rank
/// with chunks adds up several of these bytes for each microbatch. So the optimizer's bytes, which are there once, are left out.
pub(crate) fn alone_bytes(
    scheduler: &StepScheduler,
    schedule: &Schedule,
    is_split: bool,
) -> (Vec<Vec<u64>>, Vec<u64>) {
    let kinds: &[ActionKind] = if is_split {
        &[ActionKind::F, ActionKind::I, ActionKind::W]
    } else {
        &[ActionKind::F, ActionKind::B]
    };
    let list: Vec<Action> =
        kinds.iter().map(|&kind| Action { stage: StageIndex(0), kind, microbatch: 0 }).collect();
    let layout = scheduler.settings.layout;
    let peak =
        |steps: &RankSteps| scheduler.model.rank_peak(steps).unwrap_or_else(|error| unreachable!("{error}"));
    let fixed = |role| {
        if layout.is_interleaved() {
            let idle = peak(&rank_steps(scheduler, 0, role, &[], Run::alone(&[])));
            return idle.total_bytes().saturating_sub(idle.workspace_bytes);
        }
        scheduler.model.sharded_memory(role, sharding(scheduler, role)).total_bytes()
    };
    let mut held = vec![Vec::new(); layout.num_rows() as usize];
    let mut fixed_bytes = Vec::with_capacity(layout.num_ranks() as usize);
    for work in ranks(scheduler, schedule) {
        fixed_bytes.push(fixed(work.role));
        let replica = layout.coordinates(work.rank).map_or(0, |at| at.replica);
        for stage in layout.stages(work.rank) {
            // A chunk alone is a stage like any other.
            let role = match work.role {
                RankRole::Stage(_) => {
                    RankRole::Stage(scheduler.stages[stage.index() - layout.encoder.pp as usize])
                }
                encoder => encoder,
            };
            let fixed_bytes = fixed(role);
            let alone = |microbatch: &RankMicrobatch| {
                let steps = rank_steps(
                    scheduler,
                    work.stage,
                    role,
                    std::slice::from_ref(microbatch),
                    Run::alone(&list),
                );
                if layout.is_interleaved() {
                    let added = scheduler.model.added_bytes(&steps);
                    return added.unwrap_or_else(|error| unreachable!("{error}"));
                }
                peak(&steps).total_bytes().saturating_sub(fixed_bytes)
            };
            held[layout.row(replica, stage)] = work.microbatches.iter().map(alone).collect();
        }
    }
    (held, fixed_bytes)
}

/// What each rank of a replica holds, the encoder's ranks first. All chunks of a rank together are one role.
pub(crate) fn roles(scheduler: &StepScheduler) -> Vec<RankRole> {
    let stages = scheduler.rank_layers().into_iter().map(RankRole::Stage);
    let encoder: Vec<RankRole> = match scheduler.encoder_stages[..] {
        [_] => vec![RankRole::Encoder],
        ref several => several.iter().map(|&layers| RankRole::EncoderStage(layers)).collect(),
    };
    encoder.into_iter().chain(stages).collect()
}

/// How the replicas of the role's component are sharded.
pub(crate) fn sharding(scheduler: &StepScheduler, role: RankRole) -> Sharding {
    let component = if role.is_encoder() { Component::Encoder } else { Component::Llm };
    Sharding::of(&scheduler.settings().layout, component)
}

/// What a rank whose first stage is `stage` does.
fn rank_steps<'a>(
    scheduler: &StepScheduler,
    stage: usize,
    role: RankRole,
    microbatches: &'a [RankMicrobatch],
    Run { actions, openings }: Run<'a>,
) -> RankSteps<'a> {
    let (copies_rows, sharding) = (copies_rows(scheduler, stage), sharding(scheduler, role));
    RankSteps { role, microbatches, actions, openings, copies_rows, sharding }
}

/// Whether a rank whose first stage is `stage` copies feature rows. It does only at the boundary: between two stages of a replica
/// all rows are passed on as they are.
fn copies_rows(scheduler: &StepScheduler, stage: usize) -> bool {
    let layout = scheduler.settings.layout;
    let boundary = layout.encoder.pp as usize;
    (boundary - 1..=boundary).contains(&stage) && layout.encoder.dp.max(layout.llm.dp) > 1
}

fn rank_peak(
    scheduler: &StepScheduler,
    stage: usize,
    role: RankRole,
    microbatches: &[RankMicrobatch],
    run: Run<'_>,
) -> RankMemory {
    let (layout, boundary) = (scheduler.settings.layout, scheduler.settings.layout.encoder.pp as usize);
    let steps = rank_steps(scheduler, stage, role, microbatches, run);
    let peak = if layout.is_interleaved() && stage >= boundary {
        let pp = layout.llm.pp as usize;
        let chunks: Vec<_> = scheduler.stages.iter().copied().skip(stage - boundary).step_by(pp).collect();
        scheduler.model.interleaved_peak(&steps, &chunks, |of| (of.index() - stage) / pp)
    } else {
        scheduler.model.rank_peak(&steps)
    };
    // This cannot fail: the lists are our own, and have each microbatch of the step once.
    peak.unwrap_or_else(|error| unreachable!("{error}"))
}

impl StepScheduler {
    /// The component of the fullest rank if one sample is all there is, and what that rank needs, in bytes. Any schedule with
    /// this sample needs at least as much. The parts of the sample are divided over the encoder replicas in equal counts.
    pub fn alone(&self, sample: &SampleShape) -> (Component, u64) {
        if self.settings.layout.is_colocated() {
            return (Component::Both, memory::alone(self, sample));
        }
        let (encoder, llm) = (self.encoder_alone(sample), self.llm_alone(sample));
        if llm > encoder { (Component::Llm, llm) } else { (Component::Encoder, encoder) }
    }

    /// As [`StepScheduler::alone`], for the fullest encoder rank. The LLM's part of the layout does not matter for this.
    pub fn encoder_alone(&self, sample: &SampleShape) -> u64 {
        let (num_parts, replicas) = (sample.num_parts(), self.settings.layout.encoder.dp);
        if num_parts < 2 || replicas < 2 {
            return self.encoder_part_alone(sample);
        }
        let count = num_parts.div_ceil(replicas);
        let share = |at| sample.share(PartRange { first: at * count, count });
        (0..num_parts.div_ceil(count)).map(|at| self.encoder_part_alone(&share(at))).max().unwrap_or(0)
    }

    /// As [`StepScheduler::encoder_alone`], for the `share` of the sample that one replica encodes.
    fn encoder_part_alone(&self, share: &SampleShape) -> u64 {
        self.fullest_alone(roles(self).into_iter().enumerate().take(self.encoder_stages.len()), share)
    }

    /// As [`StepScheduler::alone`], for the fullest LLM rank.
    pub fn llm_alone(&self, sample: &SampleShape) -> u64 {
        self.fullest_alone(roles(self).into_iter().enumerate().skip(self.encoder_stages.len()), sample)
    }

    /// What the fullest of these ranks needs for a sample. Ranks that hold the same and send the same need the same: of a deep
    /// pipeline few differ. With chunks a rank's list counts too.
    fn fullest_alone(&self, stages: impl Iterator<Item = (usize, RankRole)>, sample: &SampleShape) -> u64 {
        let mut asked: Vec<(RankRole, bool)> = Vec::new();
        let mut most = 0;
        for (stage, role) in stages {
            let key = (role, copies_rows(self, stage));
            if self.settings.layout.is_interleaved() || !asked.contains(&key) {
                asked.push(key);
                most = self.role_alone(stage, role, sample).max(most);
            }
        }
        most
    }

    fn role_alone(&self, stage: usize, role: RankRole, sample: &SampleShape) -> u64 {
        let microbatch = [RankMicrobatch {
            shape: MicrobatchShape::pack([sample]),
            feature_tokens: u64::from(sample.feature_tokens),
        }];
        let layout = self.settings.layout;
        let list = if layout.is_interleaved() {
            let rank = layout.rank(0, StageIndex(stage as u32));
            order::of_rank(&layout, self.settings.pipeline_order, rank, 1).unwrap_or_default()
        } else {
            order::actions(self.settings.pipeline_order, StageIndex(0), 1, 1)
        };
        rank_peak(self, stage, role, &microbatch, Run::alone(&list)).total_bytes()
    }
}
