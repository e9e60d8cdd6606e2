//! Links between devices, and what sums over them take.

use crate::hardware::{Hardware, Vendor};
use crate::measured::Measured;
use dflop_types::{Collective, LinkProfile, LinkSpan, Network};

/// An all-reduce within a layer.
#[derive(Clone, Copy)]
pub(super) struct Reduce<'a> {
    pub(super) link: &'a LinkProfile,
    pub(super) wait_ns: u64,
}

impl Reduce<'_> {
    /// Time of so many bytes, in nanoseconds: along the line through what was measured; above it, and where nothing was, by
    /// the bandwidth.
    pub(super) fn ns(&self, bytes: u64) -> f64 {
        let ranks = f64::from(self.link.num_ranks);
        let by_bandwidth = |bytes: u64| {
            let on_wire = bytes as f64 * 2.0 * (ranks - 1.0) / ranks;
            on_wire / self.link.bandwidth_bytes_per_s as f64 * 1e9
        };
        let points = &self.link.points;
        let after = points.partition_point(|point| point.bytes < bytes);
        let ns = match (after.checked_sub(1).map(|at| points[at]), points.get(after)) {
            (Some(before), Some(point)) => {
                let share = (bytes - before.bytes) as f64 / (point.bytes - before.bytes) as f64;
                before.ns as f64 + share * (point.ns as f64 - before.ns as f64)
            }
            (None, Some(point)) => point.ns as f64,
            (Some(last), None) => last.ns as f64 + by_bandwidth(bytes - last.bytes),
            (None, None) => self.link.latency_ns as f64 + by_bandwidth(bytes),
        };
        ns + self.wait_ns as f64
    }
}

/// Links as the table has them, times the efficiency; collectives in a node as they were measured.
pub(super) fn network(hardware: &Hardware) -> Network {
    let reached = |bytes_per_s: u64| bytes_per_s / 1_000 * hardware.efficiency.network_permille;
    // Start of a collective, and one hop from device to device, in nanoseconds: assumed.
    let (start_ns, node_hop_ns, cluster_hop_ns) = (10_000, 2_000, 5_000);
    let mut links = Vec::new();
    let mut add = |collective, span, num_ranks: u32, bandwidth_bytes_per_s| {
        let hop_ns = if span == LinkSpan::Node { node_hop_ns } else { cluster_hop_ns };
        let hops = match collective {
            Collective::PointToPoint => 1,
            Collective::AllReduce => 2 * (u64::from(num_ranks) - 1),
            Collective::AllGather | Collective::ReduceScatter | Collective::AllToAll => {
                u64::from(num_ranks) - 1
            }
        };
        let measured = hardware.chip.and_then(Measured::of_chip).filter(|_| span == LinkSpan::Node);
        let points = measured.map_or_else(Vec::new, |chip| chip.collective(collective, num_ranks));
        links.push(LinkProfile {
            collective,
            span,
            num_ranks,
            latency_ns: points.first().map_or(start_ns + hops * hop_ns, |point| point.ns),
            bandwidth_bytes_per_s,
            points,
        });
    };
    let (pair, cluster) = (reached(hardware.pair_bytes_per_s), reached(hardware.cluster_bytes_per_s));
    add(Collective::PointToPoint, LinkSpan::Node, 2, pair);
    add(Collective::PointToPoint, LinkSpan::Cluster, 2, cluster);
    for collective in [Collective::AllReduce, Collective::AllGather, Collective::ReduceScatter] {
        for num_ranks in [2, 4, 8] {
            // Through a switch a device's links all lead anywhere; without one, to each other device its own.
            let node = reached(hardware.node_bytes_per_s).min(pair * u64::from(num_ranks - 1));
            add(collective, LinkSpan::Node, num_ranks, node);
        }
        for num_ranks in [2, 4, 8, 16] {
            add(collective, LinkSpan::Cluster, num_ranks, cluster);
        }
    }
    let backend = match hardware.vendor {
        // RCCL goes by the same name in PyTorch.
        Vendor::Nvidia | Vendor::Amd => "nccl",
    };
    Network { backend: backend.to_owned(), is_assumed: true, links }
}
