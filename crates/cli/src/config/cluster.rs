//! `cluster:`, ranks on a device that is at hand or one of the table.

use super::section::Section;
use dflop_analytic::HARDWARE;
use serde::Serialize;
use std::ops::RangeInclusive;

/// `cluster:`
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ClusterSection {
    /// Ranks in all, one device each.
    pub num_ranks: u32,
    /// Ranks inside one node. The last node has what is left.
    pub ranks_per_node: u32,
    /// Bytes one rank may use; `null`: not limited.
    pub memory_budget_bytes: Option<u64>,
    /// `cpu` or `cuda`.
    pub device: String,
    /// The device of the hardware table whose times are estimated, for example `h100`; `null`: the one that is measured.
    pub hardware: Option<String>,
}

impl ClusterSection {
    /// Limits of `num_ranks` and `ranks_per_node`.
    pub(crate) const NUM_RANKS: RangeInclusive<u64> = 1..=100_000;
    /// Limits of `memory_budget_bytes`.
    pub(crate) const MEMORY_BUDGET_BYTES: RangeInclusive<u64> = 1..=1 << 50;
}

/// Devices of a node of the hardware table.
pub(crate) const NODE_DEVICES: u32 = 8;

/// The fields of `cluster:`.
pub(super) fn cluster_section(section: &mut Section<'_, '_>) -> ClusterSection {
    let num_problems = section.problems.len();
    let num_ranks = section.count("num_ranks", ClusterSection::NUM_RANKS, None) as u32;
    let num_problems_of_ranks = section.problems.len() - num_problems;
    let known: Vec<&str> =
        ["cpu", "cuda"].into_iter().chain(HARDWARE.iter().map(|device| device.name)).collect();
    let device = section.choice("device", &known, "cpu");
    let hardware = HARDWARE.iter().any(|known| known.name == device).then(|| device.clone());
    // A named device stands in nodes of eight, as the systems of the table do.
    let of_node = if hardware.is_some() { num_ranks.clamp(1, NODE_DEVICES) } else { num_ranks };
    let num_problems = section.problems.len();
    let ranks_per_node =
        section.count("ranks_per_node", ClusterSection::NUM_RANKS, Some(u64::from(of_node))) as u32;
    // A number that is already a problem is not compared.
    let is_comparable = num_problems_of_ranks == 0 && section.problems.len() == num_problems;
    if is_comparable && ranks_per_node > num_ranks {
        let rule = format!("must not exceed `cluster.num_ranks`, {num_ranks}");
        section.problem_at("ranks_per_node", format!("{ranks_per_node}, {rule}"));
    }
    ClusterSection {
        num_ranks,
        ranks_per_node,
        memory_budget_bytes: section
            .optional_count("memory_budget_bytes", ClusterSection::MEMORY_BUDGET_BYTES),
        // PyTorch knows devices of both vendors by this name.
        device: if hardware.is_some() { "cuda".to_owned() } else { device },
        hardware,
    }
}
