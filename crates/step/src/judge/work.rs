//! The work that the samples of one microbatch make for each rank, and which encoder replica sends features to which LLM
//! replica.

use crate::groups::by_group;
use crate::scheduler::StepScheduler;
use dflop_cost::{Prediction, RankMicrobatch};
use dflop_types::{EncoderShare, MicrobatchShape, Recomputation, SampleIndex};
use std::borrow::Cow;

/// The predictions of one microbatch on all ranks.
#[derive(Debug, Clone, Default)]
pub(crate) struct Column {
    /// The prediction of each row (`Layout::row`). Colocated ranks have two rows each: all encoder rows come first.
    pub(crate) predictions: Vec<Prediction>,
    /// For each tensor group that encodes the LLM replicas that it feeds, ascending.
    pub(crate) feeds: Vec<Vec<u32>>,
    /// How each colocated tensor group runs it; empty unless each recomputes as its memory asks.
    pub(crate) runs: Vec<GroupRun>,
    pub(crate) num_predictions: u64,
    pub(crate) num_messages: u64,
    pub(crate) sent_tokens: u64,
}

/// How a tensor group runs one microbatch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GroupRun {
    pub(crate) recompute: Recomputation,
    /// Predicted peak of its fullest rank; 0 if the group has no samples in this microbatch.
    pub(crate) bytes: u64,
}

pub(crate) fn pack(scheduler: &StepScheduler, samples: &[SampleIndex]) -> MicrobatchShape {
    MicrobatchShape::pack(samples.iter().map(|&sample| scheduler.shape(sample)))
}

pub(crate) fn features(scheduler: &StepScheduler, samples: &[SampleIndex]) -> u64 {
    samples.iter().map(|&sample| u64::from(scheduler.shape(sample).feature_tokens)).sum()
}

/// The work of an encoder replica for its shares of one microbatch.
pub(crate) fn encoder_work(scheduler: &StepScheduler, shares: &[EncoderShare]) -> RankMicrobatch {
    let mut work = RankMicrobatch { shape: MicrobatchShape::default(), feature_tokens: 0 };
    for share in shares {
        let whole = scheduler.shape(share.sample);
        let shape = share.parts.map_or(Cow::Borrowed(whole), |parts| Cow::Owned(whole.share(parts)));
        work.shape.encoder_segments.extend_from_slice(&shape.encoder_segments);
        work.feature_tokens += u64::from(shape.feature_tokens);
    }
    work
}

/// The samples of a microbatch in ascending order, each with the LLM replica that holds it.
pub(crate) fn holders(llm: &[Vec<SampleIndex>]) -> Vec<(SampleIndex, usize)> {
    let of_replica = |(replica, samples): (usize, &Vec<SampleIndex>)| -> Vec<(SampleIndex, usize)> {
        samples.iter().map(|&sample| (sample, replica)).collect()
    };
    let mut holders: Vec<_> = llm.iter().enumerate().flat_map(of_replica).collect();
    holders.sort_unstable();
    holders
}

/// The LLM replica that holds `sample`.
pub(crate) fn holder(holders: &[(SampleIndex, usize)], sample: SampleIndex) -> Option<usize> {
    let at = holders.binary_search_by_key(&sample, |&(held, _)| held).ok()?;
    Some(holders[at].1)
}

/// For each tensor group that encodes the LLM replicas that it feeds in one microbatch, ascending. `holders` are the
/// [`holders`] of its samples.
pub(crate) fn feeds(
    holders: &[(SampleIndex, usize)],
    encoder: &[Vec<EncoderShare>],
    encoder_groups: u32,
) -> Vec<Vec<u32>> {
    let fed = |of_group: &[Vec<EncoderShare>]| {
        let of_share = |share: &EncoderShare| holder(holders, share.sample).map(|replica| replica as u32);
        let mut fed: Vec<u32> = of_group.iter().flatten().filter_map(of_share).collect();
        fed.sort_unstable();
        fed.dedup();
        fed
    };
    by_group(encoder, encoder_groups).map(fed).collect()
}
