//! Times of one microbatch on colocated ranks.

use crate::colocated::easing::Run;
use crate::colocated::memory::{self, Work};
use crate::groups::by_group;
use crate::judge::work::{Column, GroupRun, feeds, holder, holders};
use crate::scheduler::StepScheduler;
use dflop_cost::{ColocatedMemory, ColocatedSharding, CostModel, Prediction, Sharding};
use dflop_types::{
    Component, EncoderShare, Layout, MicrobatchShape, Recomputation, SampleIndex, SampleShape, Schedule,
    StageIndex,
};

/// The predictions of one microbatch on all ranks. If layers are gathered, a rank without samples still takes part in the
/// collectives. If no rank has samples in this microbatch, all ranks skip it.
pub(crate) fn column(
    scheduler: &StepScheduler,
    llm: &[Vec<SampleIndex>],
    encoder: &[Vec<EncoderShare>],
) -> Column {
    let layout = scheduler.settings.layout;
    let holders = holders(llm);
    let mut column = Column {
        predictions: vec![Prediction::default(); layout.num_rows() as usize],
        feeds: feeds(&holders, encoder, layout.encoder.dp),
        ..Column::default()
    };
    let groups = Groups::new(scheduler);
    if llm.iter().all(Vec::is_empty) {
        column.runs = groups.idle_run.map_or_else(Vec::new, |run| vec![run; llm.len()]);
        return column;
    }
    for (replica, (shares, samples)) in (0..).zip(by_group(encoder, layout.encoder.dp).zip(llm)) {
        let (predictions, run) = groups.of(samples, shares);
        column.runs.extend(run);
        let are_idle = [shares.iter().all(Vec::is_empty), samples.is_empty()];
        for ((stage, prediction), is_idle) in (0..).zip(predictions).zip(are_idle) {
            column.predictions[layout.row(replica, StageIndex(stage))] = prediction;
            // Collectives alone are a prediction, too; a rank that does nothing is none.
            column.num_predictions += u64::from(!is_idle || prediction.forward_ns > 0);
        }
    }
    // All ranks exchange features together. They wait for the rank that sends or gets most.
    column.sent_tokens = exchanged(scheduler, &holders, encoder);
    column.num_messages = u64::from(column.sent_tokens > 0);
    column
}

/// Makespan of a step whose ranks start each action together, in nanoseconds; `None` where they do not, and where times may
/// overflow. The simulator finds the same makespan, and takes several times as long for it.
///
/// ```text
/// sum over microbatches of max F, max B of the encoder + max F, max B of the LLM + exchange there and back
///     + reduction and optimizer
/// ```
pub(crate) fn makespan_ns(scheduler: &StepScheduler, columns: &[Column], transfer_ns: u64) -> Option<u64> {
    let layout = scheduler.settings.layout;
    if !meets_in_each_action(&layout) {
        return None;
    }
    let groups = layout.num_ranks() as usize;
    let mut sum_ns = tail_ns(scheduler);
    for column in columns {
        let is_other = |(group, fed): (u32, &Vec<u32>)| fed.iter().any(|&replica| replica != group);
        if (0..).zip(&column.feeds).any(is_other) {
            sum_ns = sum_ns.checked_add(transfer_ns.checked_mul(2)?)?;
        }
        for rows in column.predictions.chunks(groups) {
            let longest = |of: fn(&Prediction) -> u64| rows.iter().map(of).max().unwrap_or(0);
            sum_ns = sum_ns.checked_add(longest(|row| row.forward_ns))?;
            sum_ns = sum_ns.checked_add(longest(|row| row.backward_ns))?;
        }
    }
    // No sum of the simulator's over all ranks is larger.
    let num_actions = 4 * (groups as u64).checked_mul(columns.len() as u64)?;
    sum_ns.checked_mul(2 * groups as u64)?.checked_add(transfer_ns.checked_mul(num_actions)?)?;
    Some(sum_ns)
}

/// Reduction and optimizer behind the last action.
fn tail_ns(scheduler: &StepScheduler) -> u64 {
    // Which ranks share a node depends on the tensor groups, so this is the layout with them.
    scheduler.model.colocated_tail(ColocatedSharding::of(&scheduler.settings().layout)).ns
}

/// Whether all ranks start each action together. They do where each layer is gathered from all of them, or exchanges rows with
/// the experts of others.
fn meets_in_each_action(layout: &Layout) -> bool {
    layout.meets_in_layers() && (layout.has_expert_groups() || layout.shard_degree(Component::Llm) > 1)
}

/// A step takes no less than this, in nanoseconds: for each component and microbatch the time of the group with most tokens,
/// without what is exchanged. 0 where nothing is known. It takes a small part of the time of a prediction.
pub(super) fn least_ns(scheduler: &StepScheduler, schedule: &Schedule) -> u64 {
    let layout = scheduler.settings.layout;
    if !meets_in_each_action(&layout) || scheduler.adjusted.is_some() {
        return 0;
    }
    let groups = Groups::new(scheduler);
    let tokens = |of: fn(&SampleShape) -> u64| {
        move |samples: &Vec<SampleIndex>| samples.iter().map(|&s| of(scheduler.shape(s))).sum::<u64>()
    };
    let (seen, read) = (tokens(SampleShape::encoder_tokens), tokens(|shape| shape.llm_tokens.into()));
    let per_group = scheduler.encoders_per_group() as usize;
    let of_column = |(llm, encoder): (&Vec<Vec<SampleIndex>>, &Vec<Vec<EncoderShare>>)| {
        if llm.iter().all(Vec::is_empty) {
            return 0;
        }
        let of_group = |group: usize, component: usize| {
            let own = &encoder[group * per_group..][..per_group];
            let one = groups.of(&llm[group], own).0[component];
            one.forward_ns.saturating_add(one.backward_ns)
        };
        let most = |tokens: &dyn Fn(&Vec<SampleIndex>) -> u64| {
            (0..llm.len()).max_by_key(|&group| tokens(&llm[group])).unwrap_or(0)
        };
        of_group(most(&seen), 0).saturating_add(of_group(most(&read), 1))
    };
    schedule.llm.iter().zip(&schedule.encoder).map(of_column).fold(tail_ns(scheduler), u64::saturating_add)
}

/// What all tensor groups have in common in a microbatch.
struct Groups<'a> {
    scheduler: &'a StepScheduler,
    sharding: ColocatedSharding,
    fixed: ColocatedMemory,
    /// A group without samples has only the collectives, which take the same time on all ranks.
    idle: [Prediction; 2],
    idle_run: Option<GroupRun>,
}

impl<'a> Groups<'a> {
    fn new(scheduler: &'a StepScheduler) -> Self {
        let (model, empty) = (&*scheduler.model, MicrobatchShape::default());
        let sharding = ColocatedSharding::of(&scheduler.settings().layout);
        let idle = [
            model.sharded_encoder(&empty, sharding.encoder),
            model.sharded_stage(&empty, model.whole_stage(), sharding.llm),
        ];
        let groups = Self { scheduler, sharding, fixed: memory::fixed(scheduler), idle, idle_run: None };
        let nothing = Work::new(scheduler, &[], &vec![Vec::new(); scheduler.encoders_per_group() as usize]);
        let idle_run = groups.run(&nothing).map(|run| GroupRun { bytes: 0, ..group_run(scheduler, &run) });
        Self { idle_run, ..groups }
    }

    /// How a group runs; `None` if all groups run as the plan says.
    fn run(&self, work: &Work) -> Option<Run<'a>> {
        let is_eased = !self.scheduler.eased.is_empty();
        is_eased.then(|| memory::run(self.scheduler, work, self.fixed))
    }

    /// The times of a group on encoder and LLM, and how it runs.
    fn of(
        &self,
        samples: &[SampleIndex],
        shares: &[Vec<EncoderShare>],
    ) -> ([Prediction; 2], Option<GroupRun>) {
        let encodes_nothing = shares.iter().all(Vec::is_empty);
        if encodes_nothing && samples.is_empty() {
            return (self.idle, self.idle_run);
        }
        let mut predictions = self.idle;
        let work = Work::new(self.scheduler, samples, shares);
        let run = self.run(&work);
        let model = run.as_ref().map_or(&*self.scheduler.model, |run| run.model);
        if !encodes_nothing {
            predictions[0] = encoding(model, (shares, &work), self.idle[0], self.sharding.encoder);
        }
        if !samples.is_empty() {
            let (read, whole) = (&work.read.shape, model.whole_stage());
            predictions[1] = model.sharded_stage(read, whole, self.sharding.llm);
        }
        (predictions, run.map(|run| group_run(self.scheduler, &run)))
    }
}

/// How a group runs a microbatch that has samples.
fn group_run(scheduler: &StepScheduler, run: &Run<'_>) -> GroupRun {
    let of = scheduler.model.settings();
    let most = Recomputation { encoder: of.encoder.recompute, llm: of.llm.recompute };
    GroupRun { recompute: run.recompute.unwrap_or(most), bytes: run.memory.total_bytes() }
}

/// What a tensor group takes to encode its shares, whose work is known: where its ranks hold whole encoders, the longest of
/// their shares and the exchange of features.
fn encoding(
    model: &CostModel,
    (shares, work): (&[Vec<EncoderShare>], &Work),
    idle: Prediction,
    sharding: Sharding,
) -> Prediction {
    let (mut slowest, mut feature_tokens) = (Prediction::default(), 0);
    for (own, (work, _)) in shares.iter().zip(&work.encoded) {
        let one = if own.is_empty() {
            idle
        } else {
            feature_tokens = work.feature_tokens.max(feature_tokens);
            model.sharded_encoder(&work.shape, sharding)
        };
        slowest = slowest.slower(one);
    }
    slowest.with_exchange(model.group_exchange(feature_tokens, shares.len() as u32))
}

/// The most that a rank sends to other tensor groups or gets from them: its feature tokens, as hidden states of as many bytes. A
/// rank that holds a whole encoder sends them to each rank of such a group.
fn exchanged(
    scheduler: &StepScheduler,
    holders: &[(SampleIndex, usize)],
    encoder: &[Vec<EncoderShare>],
) -> u64 {
    let per_group = scheduler.encoders_per_group();
    let (mut sent, mut got) = (vec![0_u64; encoder.len()], vec![0_u64; encoder.len() / per_group as usize]);
    for (replica, share) in
        encoder.iter().enumerate().flat_map(|(replica, shares)| shares.iter().map(move |s| (replica, s)))
    {
        let is_other = |&to: &usize| to != replica / per_group as usize;
        if let Some(to) = holder(holders, share.sample).filter(is_other) {
            let tokens = scheduler.feature_tokens(share);
            sent[replica] += tokens * u64::from(per_group);
            got[to] += tokens;
        }
    }
    scheduler.model.features_as_hidden_tokens(sent.into_iter().chain(got).max().unwrap_or(0))
}
