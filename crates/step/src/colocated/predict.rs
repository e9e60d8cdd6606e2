//! Times of one microbatch on colocated ranks.

use crate::colocated::memory;
use crate::groups::by_group;
use crate::judge::work::{Column, encoder_work, feeds, holder, holders, pack};
use crate::scheduler::StepScheduler;
use dflop_cost::{ColocatedSharding, CostModel, Prediction, Sharding};
use dflop_types::{EncoderShare, MicrobatchShape, SampleIndex, StageIndex};

/// The predictions of one microbatch on all ranks. If layers are gathered, a rank without samples still takes part in the
/// collectives. If no rank has samples in this microbatch, all ranks skip it.
pub(crate) fn column(
    scheduler: &StepScheduler,
    llm: &[Vec<SampleIndex>],
    encoder: &[Vec<EncoderShare>],
) -> Column {
    let (model, layout) = (&*scheduler.model, scheduler.settings.layout);
    let sharding = ColocatedSharding::of(&scheduler.settings().layout);
    let mut column = Column {
        predictions: vec![Prediction::default(); layout.num_rows() as usize],
        feeds: feeds(llm, encoder, layout.encoder.dp),
        ..Column::default()
    };
    if llm.iter().all(Vec::is_empty) {
        return column;
    }
    // A rank without samples has only the collectives, which take the same time on all ranks.
    let empty = MicrobatchShape::default();
    let idle = [
        model.sharded_encoder(&empty, sharding.encoder),
        model.sharded_stage(&empty, model.whole_stage(), sharding.llm),
    ];
    let fixed = memory::fixed(scheduler);
    for (replica, (shares, samples)) in (0..).zip(by_group(encoder, layout.encoder.dp).zip(llm)) {
        let model = if scheduler.eased.is_empty() {
            model
        } else {
            memory::run(scheduler, samples, shares, fixed).model
        };
        let encodes_nothing = shares.iter().all(Vec::is_empty);
        let predictions = [
            if encodes_nothing {
                idle[0]
            } else {
                encoding(scheduler, model, shares, idle[0], sharding.encoder)
            },
            if samples.is_empty() {
                idle[1]
            } else {
                model.sharded_stage(&pack(scheduler, samples), model.whole_stage(), sharding.llm)
            },
        ];
        for ((stage, prediction), is_idle) in
            (0..).zip(predictions).zip([encodes_nothing, samples.is_empty()])
        {
            column.predictions[layout.row(replica, StageIndex(stage))] = prediction;
            // Collectives alone are a prediction, too; a rank that does nothing is none.
            column.num_predictions += u64::from(!is_idle || prediction.forward_ns > 0);
        }
    }
    // All ranks exchange features together. They wait for the rank that sends or gets most.
    column.sent_tokens = exchanged(scheduler, llm, encoder);
    column.num_messages = u64::from(column.sent_tokens > 0);
    column
}

/// What a tensor group takes to encode its `shares`: where its ranks hold whole encoders, the longest of their shares and the
/// exchange of features.
fn encoding(
    scheduler: &StepScheduler,
    model: &CostModel,
    shares: &[Vec<EncoderShare>],
    idle: Prediction,
    sharding: Sharding,
) -> Prediction {
    let (mut slowest, mut feature_tokens) = (Prediction::default(), 0);
    for own in shares {
        let one = if own.is_empty() {
            idle
        } else {
            let work = encoder_work(scheduler, own);
            feature_tokens = work.feature_tokens.max(feature_tokens);
            model.sharded_encoder(&work.shape, sharding)
        };
        slowest = slowest.slower(one);
    }
    slowest.with_exchange(model.group_exchange(feature_tokens, shares.len() as u32))
}

/// The most that a rank sends to other tensor groups or gets from them: its feature tokens, as hidden states of as many bytes. A
/// rank that holds a whole encoder sends them to each rank of such a group.
fn exchanged(scheduler: &StepScheduler, llm: &[Vec<SampleIndex>], encoder: &[Vec<EncoderShare>]) -> u64 {
    let holders = holders(llm);
    let per_group = scheduler.encoders_per_group();
    let (mut sent, mut got) = (vec![0_u64; encoder.len()], vec![0_u64; llm.len()]);
    for (replica, share) in
        encoder.iter().enumerate().flat_map(|(replica, shares)| shares.iter().map(move |s| (replica, s)))
    {
        let is_other = |&to: &usize| to != replica / per_group as usize;
        if let Some(to) = holder(&holders, share.sample).filter(is_other) {
            let tokens = scheduler.feature_tokens(share);
            sent[replica] += tokens * u64::from(per_group);
            got[to] += tokens;
        }
    }
    scheduler.model.features_as_hidden_tokens(sent.into_iter().chain(got).max().unwrap_or(0))
}
