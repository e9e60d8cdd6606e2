//! What to do if no plan fits: the limit that binds, and a value that would do.

use crate::outcome::Outcome;
use dflop_types::{Component, Rejection, memory_size, thousands};

impl Outcome {
    /// What to do if no plan fits, in words; `None` if there is a plan.
    ///
    /// It names the limit that binds. Candidates that were rejected for their memory or their tokens kept every other rule,
    /// so these limits are named before the rules. If another number of microbatches would fit, that is named before all.
    /// [`crate::way_out`] looks further: at other candidates and at more ranks.
    pub fn hint(&self) -> Option<String> {
        if !self.ranked.is_empty() {
            return None;
        }
        let nearest = self.nearest()?;
        if let (Some(count), Some(own)) = (self.fitting_num_microbatches, self.num_microbatches) {
            return Some(format!(
                "`train.num_microbatches` of {} and {} contradict each other: with {} microbatches a plan fits; set the first to that, or leave it out and `dflop plan` chooses",
                thousands(own.into()),
                self.limit(),
                thousands(count.into())
            ));
        }
        match nearest {
            // Whether more ranks are enough [`crate::way_out`] finds out.
            Rejection::Memory { .. } => Some(self.more_memory()),
            Rejection::TooFewSamples { buckets, .. } if self.num_microbatches.is_some() => {
                Some(format!("raise `global_batch_size` to {buckets} or more, or lower `num_microbatches`"))
            }
            Rejection::TooFewSamples { buckets, .. } => {
                Some(format!("raise `global_batch_size` to {buckets} or more"))
            }
            Rejection::ChunksExceedLayers { layers, .. } => {
                Some(format!("ask for fewer chunks (`--only llm.interleave`): the stages of all ranks are {layers} at most"))
            }
            Rejection::RecomputeExceedsStage { component, mode, layers } => {
                let all = mode.of_first();
                Some(format!(
                    "ask for `{component}.recompute={all}:{layers}` or fewer layers (`--only`), for `{all}`, or for fewer stages"
                ))
            }
            Rejection::StagesExceedLayers { .. } => {
                Some("raise `global_batch_size`, so that the ranks can be LLM replicas".to_owned())
            }
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

    /// The rejection that comes nearest to fitting: of those for lack of memory the one with the fewest bytes, of others the
    /// most frequent.
    fn nearest(&self) -> Option<&Rejection> {
        let binds = |rejection: &Rejection| match rejection {
            Rejection::Memory { needed_bytes, .. } => (0, *needed_bytes),
            Rejection::BucketTokens { .. } => (0, u64::MAX),
            Rejection::TooFewSamples { .. } => (1, 0),
            Rejection::StagesExceedLayers { .. }
            | Rejection::ChunksExceedLayers { .. }
            | Rejection::RecomputeExceedsStage { .. }
            | Rejection::GroupAcrossNodes { .. } => (2, 0),
            Rejection::Bound | Rejection::Estimate => (3, 0),
        };
        // Rejections stand in order of their counts, and of equals this finds the first.
        self.rejections.iter().map(|r| &r.rejection).min_by_key(|rejection| binds(rejection))
    }

    /// Whether some candidate kept all rules but lacked memory.
    pub(crate) fn lacks_memory(&self) -> bool {
        matches!(self.nearest(), Some(Rejection::Memory { .. }))
    }

    /// The limit that the nearest candidate breaks, with its value.
    pub(crate) fn limit(&self) -> String {
        let of = |name: &str, value: u64| format!("`{name}` of {}", thousands(value));
        match self.nearest() {
            Some(Rejection::Memory { budget_bytes, .. }) => {
                format!("the memory budget of {}", memory_size(*budget_bytes))
            }
            Some(Rejection::BucketTokens { bucket_tokens_max, .. }) => {
                of("train.bucket_tokens_max", *bucket_tokens_max)
            }
            Some(Rejection::TooFewSamples { global_batch_size, .. }) => {
                of("train.global_batch_size", (*global_batch_size).into())
            }
            Some(Rejection::StagesExceedLayers { component: Component::Encoder, layers: 1, .. }) => {
                "the model's encoder, which is one stage".to_owned()
            }
            Some(
                Rejection::StagesExceedLayers { layers, .. } | Rejection::ChunksExceedLayers { layers, .. },
            ) => format!("the model's {layers} layers"),
            Some(Rejection::RecomputeExceedsStage { layers, .. }) => {
                format!("the {layers} layers of a stage")
            }
            Some(Rejection::GroupAcrossNodes { ranks_per_node }) => {
                of("cluster.ranks_per_node", (*ranks_per_node).into())
            }
            Some(Rejection::Bound | Rejection::Estimate) | None => {
                of("cluster.num_ranks", self.num_ranks.into())
            }
        }
    }

    /// How much more memory a rank would need at least, as an act.
    pub(crate) fn more_memory(&self) -> String {
        let Some(Rejection::Memory { needed_bytes, .. }) = self.nearest() else { return String::new() };
        let (size, written) = (memory_size(*needed_bytes), written(*needed_bytes));
        if self.is_budget_given {
            format!("raise `cluster.memory_budget_bytes` to {written} ({size}) or more")
        } else {
            format!(
                "take devices on which a rank may use {size} or more (`cluster.memory_budget_bytes: {written}` says that it may)"
            )
        }
    }
}

/// Bytes as a person writes them in `dflop.yaml`, rounded up to a tenth of their unit: `35.2e9`.
fn written(bytes: u64) -> String {
    let (unit, exponent) = match bytes {
        0..1_000_000 => return bytes.to_string(),
        1_000_000..1_000_000_000 => (1_000_000, 6),
        _ => (1_000_000_000, 9),
    };
    let tenths = bytes.div_ceil(unit / 10);
    format!("{}.{}e{exponent}", tenths / 10, tenths % 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_written_with_few_digits_and_never_too_few_bytes() {
        let bytes = [999_999, 64_500_000, 64_500_001, 186_574_799_844, 1_000_000_000];
        assert_eq!(bytes.map(written), ["999999", "64.5e6", "64.6e6", "186.6e9", "1.0e9"]);
    }
}
