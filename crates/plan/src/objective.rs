//! What of the judged global batches decides between plans.

use std::fmt;
use std::str::FromStr;
use thiserror::Error;

/// What a search makes smallest.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Objective {
    /// The mean step: what the whole run takes.
    #[default]
    Mean,
    /// The 95th percentile of the steps: plans whose slow steps are less slow, where their means are alike.
    P95,
}

/// What was asked for is no objective.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("`{0}` is no objective, must be `mean` or `p95`")]
pub struct ParseObjectiveError(String);

impl FromStr for Objective {
    type Err = ParseObjectiveError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "mean" => Ok(Self::Mean),
            "p95" => Ok(Self::P95),
            _ => Err(ParseObjectiveError(text.to_owned())),
        }
    }
}

impl fmt::Display for Objective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == Self::Mean { "mean" } else { "p95" })
    }
}

impl Objective {
    /// The mean of some steps, rounded down, or their 95th percentile, in nanoseconds; 0 if there are none.
    ///
    /// The percentile is the smallest step that 95 % of them do not exceed: of fewer than 20 steps the longest. Where none of
    /// the steps is shorter, neither is their mean nor their percentile. So of lower bounds this gives a lower bound.
    pub fn of(self, steps_ns: &[u64]) -> u64 {
        match self {
            Self::Mean => {
                let sum: u128 = steps_ns.iter().map(|&ns| u128::from(ns)).sum();
                u64::try_from(sum / steps_ns.len().max(1) as u128).unwrap_or(u64::MAX)
            }
            Self::P95 => {
                let mut steps_ns = steps_ns.to_vec();
                steps_ns.sort_unstable();
                let place = (steps_ns.len() * 95).div_ceil(100);
                place.checked_sub(1).and_then(|at| steps_ns.get(at).copied()).unwrap_or(0)
            }
        }
    }

    /// Whether a lower bound on the mean of so many steps also holds for this: nothing exceeds the longest step.
    pub(crate) const fn is_at_least_the_mean(self, num_steps: usize) -> bool {
        matches!(self, Self::Mean) || num_steps < 20
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_objective_is_read_by_its_name() {
        for objective in [Objective::Mean, Objective::P95] {
            assert_eq!(objective.to_string().parse(), Ok(objective));
        }
        let error = "p99".parse::<Objective>().unwrap_err();
        assert_eq!(error.to_string(), "`p99` is no objective, must be `mean` or `p95`");
    }

    #[test]
    fn the_percentile_is_the_nearest_rank() {
        let steps = |n: u64| (1..=n).rev().collect::<Vec<u64>>();
        assert_eq!(Objective::P95.of(&steps(1)), 1);
        assert_eq!(Objective::P95.of(&steps(19)), 19);
        // 19 of 20 steps are 95 % of them.
        assert_eq!(Objective::P95.of(&steps(20)), 19);
        assert_eq!(Objective::P95.of(&steps(100)), 95);
        assert_eq!(Objective::Mean.of(&[1, 2, 9]), 4);
        assert_eq!((Objective::P95.of(&[]), Objective::Mean.of(&[])), (0, 0));
        // One slow step of 20: the mean is above the percentile, so a bound on the mean says nothing about it.
        let slow: Vec<u64> = (0..20).map(|k| if k == 3 { 1_000 } else { 10 }).collect();
        assert!(Objective::P95.of(&slow) < Objective::Mean.of(&slow));
        assert!(!Objective::P95.is_at_least_the_mean(20) && Objective::P95.is_at_least_the_mean(19));
    }
}
