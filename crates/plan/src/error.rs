//! Errors of the search: wrong inputs. "No plan fits" is an [`crate::Outcome`], not an error.

use dflop_cost::CostError;
use dflop_step::StepError;
use dflop_types::Hint;
use thiserror::Error;

/// Why a search has no answer.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PlanError {
    /// The cluster has no rank.
    #[error("`num_ranks` is {num_ranks}, at least 1 is needed")]
    TooFewRanks {
        /// Ranks of the cluster.
        num_ranks: u32,
    },
    /// A count that must be at least 1.
    #[error("`{field}` is 0, must be at least 1")]
    Zero {
        /// The field.
        field: &'static str,
    },
    /// No cost model can be made of the model profile.
    #[error(transparent)]
    Cost(#[from] CostError),
    /// No global batch can be drawn, or none can be scheduled.
    #[error(transparent)]
    Step(#[from] StepError),
}

impl Hint for PlanError {
    fn hint(&self) -> Option<String> {
        match self {
            Self::TooFewRanks { .. } => Some("set `cluster.num_ranks` to 1 or more".to_owned()),
            Self::Zero { field } => Some(format!("set `{field}` to 1 or more")),
            Self::Cost(error) => error.hint(),
            Self::Step(error) => error.hint(),
        }
    }
}
