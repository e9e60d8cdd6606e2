//! Times of one microbatch on colocated ranks.

use crate::colocated::memory;
use crate::judge::work::{Column, encoder_work, feeds, holder, holders, pack};
use crate::scheduler::StepScheduler;
use dflop_cost::{Prediction, Sharding};
use dflop_types::{Component, EncoderShare, MicrobatchShape, SampleIndex, StageIndex};

/// The predictions of one microbatch on all ranks. If layers are gathered, a rank without samples still takes part in the
/// collectives. If no rank has samples in this microbatch, all ranks skip it.
pub(crate) fn column(
    scheduler: &StepScheduler,
    llm: &[Vec<SampleIndex>],
    encoder: &[Vec<EncoderShare>],
) -> Column {
    let (model, layout) = (&*scheduler.model, scheduler.settings.layout);
    let sharding = Sharding::of(&scheduler.settings().layout, Component::Both);
    let mut column = Column {
        predictions: vec![Prediction::default(); layout.num_rows() as usize],
        feeds: feeds(llm, encoder),
        ..Column::default()
    };
    if llm.iter().all(Vec::is_empty) {
        return column;
    }
    // A rank without samples has only the collectives, which take the same time on all ranks.
    let empty = MicrobatchShape::default();
    let idle =
        [model.sharded_encoder(&empty, sharding), model.sharded_stage(&empty, model.whole_stage(), sharding)];
    let fixed = memory::fixed(scheduler);
    for (replica, (shares, samples)) in (0..).zip(encoder.iter().zip(llm)) {
        let model = if scheduler.eased.is_empty() {
            model
        } else {
            memory::run(scheduler, samples, shares, fixed).model
        };
        let predictions = [
            if shares.is_empty() {
                idle[0]
            } else {
                model.sharded_encoder(&encoder_work(scheduler, shares).shape, sharding)
            },
            if samples.is_empty() {
                idle[1]
            } else {
                model.sharded_stage(&pack(scheduler, samples), model.whole_stage(), sharding)
            },
        ];
        for ((stage, prediction), is_idle) in
            (0..).zip(predictions).zip([shares.is_empty(), samples.is_empty()])
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

/// The most that a rank sends to others or gets from them: its feature tokens, as hidden states of as many bytes.
fn exchanged(scheduler: &StepScheduler, llm: &[Vec<SampleIndex>], encoder: &[Vec<EncoderShare>]) -> u64 {
    let holders = holders(llm);
    let (mut sent, mut got) = (vec![0_u64; encoder.len()], vec![0_u64; llm.len()]);
    for (replica, share) in
        encoder.iter().enumerate().flat_map(|(replica, shares)| shares.iter().map(move |s| (replica, s)))
    {
        if let Some(to) = holder(&holders, share.sample).filter(|&to| to != replica) {
            let tokens = scheduler.feature_tokens(share);
            sent[replica] += tokens;
            got[to] += tokens;
        }
    }
    scheduler.model.features_as_hidden_tokens(sent.into_iter().chain(got).max().unwrap_or(0))
}
