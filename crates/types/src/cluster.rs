//! The cluster: what the planner may use.

use serde::{Deserialize, Serialize};

/// Devices and their memory budget.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cluster {
    /// Number of ranks in all, one device each; at least 1.
    pub num_ranks: u32,
    /// Ranks inside one node, where links are fast.
    pub ranks_per_node: u32,
    /// Bytes one rank may use; `None`: not limited, and the plan says so.
    pub memory_budget_bytes: Option<u64>,
}
