//! Times of one microbatch on colocated ranks.

use crate::colocated::easing::Run;
use crate::colocated::memory::{self, Work};
use crate::groups::by_group;
use crate::judge::work::{Column, GroupRun, feeds, holder, holders};
use crate::scheduler::StepScheduler;
use dflop_cost::{ColocatedSharding, CostModel, Prediction, Sharding};
use dflop_types::{EncoderShare, MicrobatchShape, Recomputation, SampleIndex, StageIndex};

/// The predictions of one microbatch on all ranks. If layers are gathered, a rank without samples still takes part in the
/// collectives. If no rank has samples in this microbatch, all ranks skip it.
pub(crate) fn column(
    scheduler: &StepScheduler,
    llm: &[Vec<SampleIndex>],
    encoder: &[Vec<EncoderShare>],
) -> Column {
    let (model, layout) = (&*scheduler.model, scheduler.settings.layout);
    let sharding = ColocatedSharding::of(&scheduler.settings().layout);
    let holders = holders(llm);
    let mut column = Column {
        predictions: vec![Prediction::default(); layout.num_rows() as usize],
        feeds: feeds(&holders, encoder, layout.encoder.dp),
        ..Column::default()
    };
    let fixed = memory::fixed(scheduler);
    let run = |work: &Work| (!scheduler.eased.is_empty()).then(|| memory::run(scheduler, work, fixed));
    let nothing = Work::new(scheduler, &[], &vec![Vec::new(); scheduler.encoders_per_group() as usize]);
    let of_nothing = run(&nothing).map(|run| GroupRun { bytes: 0, ..group_run(scheduler, &run) });
    if llm.iter().all(Vec::is_empty) {
        column.runs = of_nothing.map_or_else(Vec::new, |run| vec![run; llm.len()]);
        return column;
    }
    // A rank without samples has only the collectives, which take the same time on all ranks.
    let empty = MicrobatchShape::default();
    let idle = [
        model.sharded_encoder(&empty, sharding.encoder),
        model.sharded_stage(&empty, model.whole_stage(), sharding.llm),
    ];
    for (replica, (shares, samples)) in (0..).zip(by_group(encoder, layout.encoder.dp).zip(llm)) {
        let encodes_nothing = shares.iter().all(Vec::is_empty);
        let mut predictions = idle;
        if encodes_nothing && samples.is_empty() {
            column.runs.extend(of_nothing);
        } else {
            let work = Work::new(scheduler, samples, shares);
            let run = run(&work);
            column.runs.extend(run.as_ref().map(|run| group_run(scheduler, run)));
            let model = run.map_or(model, |run| run.model);
            if !encodes_nothing {
                predictions[0] = encoding(model, (shares, &work), idle[0], sharding.encoder);
            }
            if !samples.is_empty() {
                predictions[1] = model.sharded_stage(&work.read.shape, model.whole_stage(), sharding.llm);
            }
        }
        for ((stage, prediction), is_idle) in
            (0..).zip(predictions).zip([encodes_nothing, samples.is_empty()])
        {
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
