//! What to do if no plan fits: the limit that binds, and a value that would do.

use crate::outcome::Outcome;
use dflop_types::Rejection;

impl Outcome {
    /// What to do if no plan fits, in words; `None` if there is a plan.
    ///
    /// It names the limit that binds. Candidates that were rejected for their memory or their tokens kept every other rule,
    /// so these limits are named before the rules. If another number of microbatches would fit, that is named before all.
    pub fn hint(&self) -> Option<String> {
        if !self.ranked.is_empty() {
            return None;
        }
        if let (Some(count), Some(own)) = (self.fitting_num_microbatches, self.num_microbatches) {
            return Some(format!(
                "`train.num_microbatches` is {own}: with {count} a plan fits; set it to that, or leave it out and `dflop plan` chooses"
            ));
        }
        let binds = |rejection: &Rejection| match rejection {
            Rejection::Memory { .. } | Rejection::BucketTokens { .. } => 0,
            Rejection::TooFewSamples { .. } => 1,
            Rejection::StagesExceedLayers { .. }
            | Rejection::ChunksExceedLayers { .. }
            | Rejection::TiedStages { .. }
            | Rejection::GroupAcrossNodes { .. } => 2,
            Rejection::Bound | Rejection::Estimate => 3,
        };
        // Rejections stand in order of their counts. So of several that bind equally, this finds the most frequent.
        let nearest =
            self.rejections.iter().map(|r| &r.rejection).min_by_key(|rejection| binds(rejection))?;
        match nearest {
            Rejection::Memory { needed_bytes, .. } if !self.is_budget_given => Some(format!(
                "give the cluster more ranks, or devices on which a rank may use {needed_bytes} bytes or more; \
                 `cluster.memory_budget_bytes` says how many it may"
            )),
            Rejection::Memory { needed_bytes, .. } => Some(format!(
                "raise `memory_budget_bytes` to {needed_bytes} or more, or give the cluster more ranks"
            )),
            Rejection::TooFewSamples { buckets, .. } if self.num_microbatches.is_some() => {
                Some(format!("raise `global_batch_size` to {buckets} or more, or lower `num_microbatches`"))
            }
            Rejection::TooFewSamples { buckets, .. } => {
                Some(format!("raise `global_batch_size` to {buckets} or more"))
            }
            Rejection::ChunksExceedLayers { layers, .. } => {
                Some(format!("ask for fewer chunks (`--only llm.interleave`): the stages of all ranks are {layers} at most"))
            }
            Rejection::StagesExceedLayers { .. } => {
                Some("raise `global_batch_size`, so that the ranks can be LLM replicas".to_owned())
            }
            Rejection::TiedStages { .. } => Some("ask for `llm.pp=1` or `zero=0` (`--only`)".to_owned()),
            Rejection::GroupAcrossNodes { .. } => Some(
                "ask for tensor parallel degrees (`--only`) and encoder replicas that divide the ranks of a node"
                    .to_owned(),
            ),
            Rejection::BucketTokens { needed_tokens, .. } => Some(format!(
                "raise `train.bucket_tokens_max` to {needed_tokens} or more, or `train.num_microbatches`, or lower `train.global_batch_size`"
            )),
            Rejection::Bound | Rejection::Estimate => None,
        }
    }
}
