//! Giants: samples far larger than the others. The user chooses what is done with them.

use crate::batches::GlobalBatches;
use crate::error::StepError;
use dflop_types::{SampleIndex, SampleShape};
use std::{cmp::Reverse, fmt, str::FromStr};
use thiserror::Error;

/// What is done with a giant.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum GiantPolicy {
    /// It is trained in the step in which it arrives. If memory requires it, the pipeline runs empty around it.
    #[default]
    Alone,
    /// As `Alone`, but giants (by the limit on tokens) wait until several can be trained in one step:
    /// [`GlobalBatches::with_deferred`].
    Defer,
    /// It is an error.
    Refuse,
}

const POLICIES: [(GiantPolicy, &str); 3] =
    [(GiantPolicy::Alone, "alone"), (GiantPolicy::Defer, "defer"), (GiantPolicy::Refuse, "refuse")];

impl fmt::Display for GiantPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(POLICIES.iter().find(|(policy, _)| policy == self).map_or("", |(_, name)| name))
    }
}

/// A text that names no policy.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("policy `{0}`, must be one of: alone, defer, refuse")]
pub struct ParseGiantPolicyError(pub String);

impl FromStr for GiantPolicy {
    type Err = ParseGiantPolicyError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let found = POLICIES.iter().find(|(_, name)| *name == text);
        found.map(|&(policy, _)| policy).ok_or_else(|| ParseGiantPolicyError(text.to_owned()))
    }
}

/// Which samples are giants, and what is done with them.
///
/// Under [`GiantPolicy::Alone`] and [`GiantPolicy::Refuse`], a sample that fits a rank alone but not beside others is a giant
/// too. That depends on the layout, so it is found only when the step of the sample is scheduled.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GiantRule {
    /// What is done with giants.
    pub policy: GiantPolicy,
    /// Samples with more LLM tokens than this are giants; `None`: none is.
    pub llm_tokens_max: Option<u64>,
    /// The most steps that a giant may be late under [`GiantPolicy::Defer`].
    pub steps_max: u32,
}

/// Samples with more LLM tokens than `llm_tokens_max`, in order, each with its tokens.
pub fn giants<'a>(
    shapes: impl IntoIterator<Item = &'a SampleShape>,
    llm_tokens_max: u64,
) -> impl Iterator<Item = (SampleIndex, u32)> {
    let samples = (0..).map(SampleIndex).zip(shapes.into_iter().map(|shape| shape.llm_tokens));
    samples.filter(move |&(_, llm_tokens)| u64::from(llm_tokens) > llm_tokens_max)
}

impl GlobalBatches {
    /// The same batches under a rule for giants. `shapes` are the shapes of all samples of the data profile, by
    /// sample index.
    ///
    /// # Errors
    /// [`StepError::GiantTokens`] where the rule refuses a sample, [`StepError::UnknownSample`] for more shapes than
    /// samples.
    pub fn with_giants<'a>(
        self,
        rule: GiantRule,
        shapes: impl IntoIterator<Item = &'a SampleShape>,
    ) -> Result<Self, StepError> {
        let Some(llm_tokens_max) = rule.llm_tokens_max else { return Ok(self) };
        let giants: Vec<(SampleIndex, u32)> = giants(shapes, llm_tokens_max).collect();
        let largest = giants.iter().max_by_key(|(sample, llm_tokens)| (*llm_tokens, Reverse(*sample)));
        match (rule.policy, largest) {
            (GiantPolicy::Refuse, Some(&(sample, llm_tokens))) => {
                Err(StepError::GiantTokens { num_giants: giants.len(), sample, llm_tokens, llm_tokens_max })
            }
            (GiantPolicy::Defer, Some(_)) => {
                let giants: Vec<SampleIndex> = giants.into_iter().map(|(sample, _)| sample).collect();
                self.with_deferred(&giants, rule.steps_max)
            }
            _ => Ok(self),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflop_types::Hint;

    #[test]
    fn a_rule_refuses_or_defers_what_is_over_its_tokens() {
        let shape = |llm_tokens| SampleShape { llm_tokens, ..SampleShape::default() };
        let shapes: Vec<SampleShape> = [10, 500, 20, 30, 501, 500].map(shape).to_vec();
        let with = |policy, llm_tokens_max| {
            let rule = GiantRule { policy, llm_tokens_max, steps_max: 2 };
            GlobalBatches::new(6, 2, 1).unwrap().with_giants(rule, &shapes)
        };
        let steps = |batches: &GlobalBatches| [0, 1, 2].map(|step| batches.batch(step));
        let plain = steps(&GlobalBatches::new(6, 2, 1).unwrap());
        for (policy, max) in [
            (GiantPolicy::Alone, Some(100)),
            (GiantPolicy::Refuse, Some(501)),
            (GiantPolicy::Refuse, None),
            (GiantPolicy::Defer, Some(501)),
        ] {
            assert_eq!(steps(&with(policy, max).unwrap()), plain);
        }
        let mut last = with(GiantPolicy::Defer, Some(499)).unwrap().batch(2);
        last.sort_unstable();
        assert!(last.iter().all(|s| [1, 4, 5].contains(&s.0)), "{last:?}");
        let refused = with(GiantPolicy::Refuse, Some(499)).unwrap_err();
        assert_eq!(
            format!("{refused}; {}", refused.hint().unwrap()),
            "samples with more than 499 LLM tokens (`train.giant_llm_tokens`): 3, the largest is sample 4 with 501, and \
             `train.giants` is `refuse`; raise `train.giant_llm_tokens`, or set `train.giants` to `alone` or `defer`, or \
             leave them out of the dataset"
        );
    }

    #[test]
    fn policies_have_names() {
        for (policy, name) in POLICIES {
            assert_eq!((name.parse(), policy.to_string().as_str()), (Ok(policy), name));
        }
        assert_eq!(
            "drop".parse::<GiantPolicy>().unwrap_err().to_string(),
            "policy `drop`, must be one of: alone, defer, refuse"
        );
    }
}
