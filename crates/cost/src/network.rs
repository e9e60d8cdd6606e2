//! Transfers between ranks: how long a message or a collective takes by the measurements, marked where nothing was measured.

use crate::error::CostError;
use crate::grid::{Curve, scale};
use crate::repair::Repair;
use dflop_types::{Collective, LinkProfile, LinkSpan, Network};
use std::sync::Arc;

/// Where a predicted time comes from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Basis {
    /// This transfer itself was measured, or nothing was sent.
    #[default]
    Measured,
    /// Measurements of the same collective over other sizes or another number of ranks.
    Extrapolated,
    /// It was not measured: the time is from a table of hardware, another collective or another span; or nothing is known, and
    /// the time is taken as 0.
    Assumed,
}

/// Time of one message or collective.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Transfer {
    /// In nanoseconds.
    pub ns: u64,
    /// What stands behind it.
    pub basis: Basis,
}

/// The ranks that meet in a collective: `num_ranks` of them, every `stride`th from `first` on. Ranks are numbered node by
/// node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Group {
    pub(crate) first: u32,
    pub(crate) num_ranks: u32,
    pub(crate) stride: u32,
}

impl Group {
    /// Ranks that follow each other from the first of a node on.
    pub(crate) const fn of(num_ranks: u32) -> Self {
        Self { first: 0, num_ranks, stride: 1 }
    }

    /// How many nodes of so many ranks the group stands on, and how many of its ranks the node has that has fewest of them;
    /// `None`: it lies in one node.
    fn nodes(&self, ranks_per_node: u32) -> Option<(u32, u32)> {
        let (first, stride) = (u64::from(self.first), u64::from(self.stride.max(1)));
        let per_node = u64::from(ranks_per_node.max(1));
        let last = first + stride * u64::from(self.num_ranks.max(1) - 1);
        let between = last / per_node - first / per_node;
        if between == 0 {
            return None;
        }
        let of_first = (per_node - first % per_node).div_ceil(stride);
        let of_last = last % per_node / stride + 1;
        // Far apart, they pass nodes that have none of them. Both numbers are at most a u32.
        let number = (between + 1).min(u64::from(self.num_ranks)) as u32;
        Some((number, (per_node / stride).min(of_first).min(of_last).max(1) as u32))
    }
}

/// How far apart the ranks of a group are, and how many of them share a node: each brings its share of the node's network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Spread {
    pub(crate) span: LinkSpan,
    /// Nodes that they stand on.
    pub(crate) num_nodes: u32,
    /// Ranks on the node that has fewest of them.
    pub(crate) per_node: u32,
}

impl Spread {
    /// So many ranks of one node.
    pub(crate) const fn within(num_ranks: u32) -> Self {
        Self { span: LinkSpan::Node, num_nodes: 1, per_node: num_ranks }
    }
}

/// How one collective over one group of ranks is timed.
///
/// ```text
/// bytes measured:        linear between points, and from (0, latency) to the first
/// above the last point:  t_n + (bytes - bytes_n) * wire / bandwidth
/// no points:             latency + bytes * wire / bandwidth
/// ```
#[derive(Debug, Clone)]
pub(crate) struct Route {
    curve: Option<Arc<Curve>>,
    latency_ns: u64,
    /// Bytes that cross each link of a ring, of each byte of the tensor.
    wire: (u64, u64),
    /// 0: nothing is known.
    bandwidth: u64,
    basis: Basis,
}

impl Route {
    /// Whether anything is known of such a transfer.
    pub(crate) const fn is_known(&self) -> bool {
        self.bandwidth > 0
    }

    /// Time of `bytes`; 0 for 0 bytes.
    ///
    /// *Complexity*: O(log n).
    pub(crate) fn transfer(&self, bytes: u64) -> Transfer {
        if bytes == 0 {
            return Transfer::default();
        }
        if !self.is_known() {
            return Transfer { ns: 0, basis: Basis::Assumed };
        }
        let on_wire =
            |bytes: u64| scale(scale(bytes, self.wire.0, self.wire.1), 1_000_000_000, self.bandwidth);
        let Some(curve) = &self.curve else {
            return Transfer { ns: self.latency_ns.saturating_add(on_wire(bytes)), basis: self.basis };
        };
        let last = curve.range().1;
        let ns = curve.at(bytes.min(last)).value;
        if bytes <= last {
            return Transfer { ns, basis: self.basis };
        }
        Transfer { ns: ns.saturating_add(on_wire(bytes - last)), basis: self.basis.max(Basis::Extrapolated) }
    }
}

/// Steps that a ring of this many ranks takes, and the share of the tensor that crosses each of its links.
fn ring(collective: Collective, num_ranks: u32) -> (u64, (u64, u64)) {
    let ranks = u64::from(num_ranks.max(2));
    match collective {
        Collective::PointToPoint => (1, (1, 1)),
        Collective::AllReduce => (2 * (ranks - 1), (2 * (ranks - 1), ranks)),
        Collective::AllGather | Collective::ReduceScatter | Collective::AllToAll => {
            (ranks - 1, (ranks - 1, ranks))
        }
    }
}

pub(crate) const fn collective_name(collective: Collective) -> &'static str {
    match collective {
        Collective::PointToPoint => "point_to_point",
        Collective::AllReduce => "all_reduce",
        Collective::AllGather => "all_gather",
        Collective::ReduceScatter => "reduce_scatter",
        Collective::AllToAll => "all_to_all",
    }
}

/// All that a profile knows of links.
#[derive(Debug, Clone)]
pub(crate) struct Links {
    links: Vec<(LinkProfile, Option<Arc<Curve>>)>,
    is_assumed: bool,
}

impl Links {
    /// The links of a profile.
    ///
    /// # Errors
    /// [`CostError::Link`] and [`CostError::Bandwidth`].
    pub(crate) fn new(network: &Network) -> Result<Self, CostError> {
        let links = network.links.iter().map(|link| {
            let (collective, num_ranks) = (collective_name(link.collective), link.num_ranks);
            if link.bandwidth_bytes_per_s == 0 {
                return Err(CostError::Bandwidth { collective, num_ranks });
            }
            let points = || link.points.iter().map(|point| (point.bytes, point.ns));
            let curve = match link.points.first() {
                None => None,
                Some(first) => {
                    let broken = |source| CostError::Link { collective, num_ranks, source };
                    // First as they are, so that an error counts them as the file does.
                    Curve::new(points()).map_err(broken)?;
                    let empty = (first.bytes > 0).then_some((0, link.latency_ns.min(first.ns)));
                    Some(Arc::new(Curve::new(empty.into_iter().chain(points())).map_err(broken)?))
                }
            };
            Ok((link.clone(), curve))
        });
        Ok(Self { links: links.collect::<Result<_, _>>()?, is_assumed: network.is_assumed })
    }

    /// The widest span over which anything is known.
    pub(crate) fn widest(&self) -> LinkSpan {
        self.links.iter().map(|(link, _)| link.span).max().unwrap_or(LinkSpan::Node)
    }

    /// How to time `collective` over `num_ranks` ranks that lie `span` apart. The first that is known is used: the
    /// same collective over as many ranks; over the nearest number of ranks; over another span; the steps of a ring
    /// of point-to-point messages; the links of an all-reduce. Otherwise it counts as free.
    ///
    /// An all-to-all that is not known takes as long as an all-gather to parts of the same sum: as many bytes leave and reach
    /// each rank (assumed).
    pub(crate) fn route(&self, collective: Collective, span: LinkSpan, num_ranks: u32) -> Route {
        let is_known = |asked: Collective| self.links.iter().any(|(link, _)| link.collective == asked);
        if collective == Collective::AllToAll && !is_known(collective) {
            return Route { basis: Basis::Assumed, ..self.route(Collective::AllGather, span, num_ranks) };
        }
        let nearest = |collective: Collective| {
            let known = self.links.iter().filter(|(link, _)| link.collective == collective);
            known.min_by_key(|(link, _)| {
                (link.span != span, link.num_ranks.abs_diff(num_ranks), link.num_ranks)
            })
        };
        let (steps, wire) = ring(collective, num_ranks);
        let pair = || nearest(Collective::PointToPoint).map(|found| (found, Basis::Assumed));
        let whole = || nearest(Collective::AllReduce).map(|found| (found, Basis::Assumed));
        let found = nearest(collective).map(|found| (found, Basis::Measured)).or_else(pair).or_else(whole);
        let Some(((link, curve), mut basis)) = found else {
            return Route { curve: None, latency_ns: 0, wire, bandwidth: 0, basis: Basis::Assumed };
        };
        let is_same = link.collective == collective
            && (link.num_ranks == num_ranks || collective == Collective::PointToPoint);
        if self.is_assumed || link.span != span {
            basis = Basis::Assumed;
        } else if !is_same {
            basis = basis.max(Basis::Extrapolated);
        }
        let measured_steps = ring(link.collective, link.num_ranks).0;
        Route {
            curve: curve.clone().filter(|_| is_same),
            latency_ns: scale(link.latency_ns, steps, measured_steps),
            wire,
            bandwidth: link.bandwidth_bytes_per_s,
            basis,
        }
    }

    /// How far apart the ranks of a group are; where the size of a node is not known, as far as anything is known.
    pub(crate) fn spread(&self, group: Group, ranks_per_node: Option<u32>) -> Spread {
        match ranks_per_node {
            None => Spread { span: self.widest(), num_nodes: group.num_ranks, per_node: 1 },
            Some(size) => match group.nodes(size) {
                None => Spread::within(group.num_ranks),
                Some((num_nodes, per_node)) => Spread { span: LinkSpan::Cluster, num_nodes, per_node },
            },
        }
    }

    /// As [`Links::route`], for ranks of which several share a node.
    ///
    /// A ring that runs through all ranks of a node enters and leaves it once, and there are as many rings as the node's
    /// ranks bring network cards: together they have the bandwidth of all of those, or of the links in a node where these
    /// have less, be it less than one card: no ring leaves a node without passing through it. What was measured across nodes has
    /// that in it already; a table of hardware has not.
    ///
    /// ```text
    /// bandwidth = min(k * cluster, node)            k ranks on the node that has fewest, such as the last one
    /// latency   = hops in nodes + hops between them
    /// ```
    ///
    /// *References*: NVIDIA's engineers, github.com/NVIDIA/nccl issues 687 (rings enter a node once) and 812 (8 cards of 25
    /// GB/s on each DGX A100: 192 GB/s measured), nccl-tests issue 290 (46 to 48 of 50 GB/s a card on H100).
    pub(crate) fn route_of(&self, collective: Collective, spread: Spread, num_ranks: u32) -> Route {
        let plain = self.route(collective, spread.span, num_ranks);
        let is_ring = !matches!(collective, Collective::PointToPoint);
        let shares_nodes = spread.span == LinkSpan::Cluster && spread.num_nodes < num_ranks;
        if !(self.is_assumed && is_ring && shares_nodes) {
            return plain;
        }
        let nearest = |span, ranks: u32| {
            let known = self.links.iter().map(|(link, _)| link);
            let known = known.filter(|link| link.collective == collective && link.span == span);
            known.min_by_key(|link| (link.num_ranks.abs_diff(ranks), link.num_ranks))
        };
        let num_nodes = spread.num_nodes;
        let (Some(near), Some(far)) =
            (nearest(LinkSpan::Node, spread.per_node), nearest(LinkSpan::Cluster, num_nodes))
        else {
            return plain;
        };
        let (steps, wire) = ring(collective, num_ranks);
        let steps_between = ring(collective, num_nodes).0.min(steps);
        let latency_of =
            |link: &LinkProfile, steps| scale(link.latency_ns, steps, ring(collective, link.num_ranks).0);
        Route {
            curve: None,
            latency_ns: latency_of(far, steps_between)
                .saturating_add(latency_of(near, steps - steps_between)),
            wire,
            bandwidth: far
                .bandwidth_bytes_per_s
                .saturating_mul(spread.per_node.into())
                .min(near.bandwidth_bytes_per_s),
            basis: Basis::Assumed,
        }
    }

    /// Messages whose times fell with their size.
    pub(crate) fn repairs(&self) -> impl Iterator<Item = Repair> + '_ {
        let repaired = |(link, curve): &(LinkProfile, Option<Arc<Curve>>)| {
            let num_points = curve.as_ref()?.num_repaired();
            let part = collective_name(link.collective);
            (num_points > 0).then_some(Repair { module: "network", part, phase: "time", num_points })
        };
        self.links.iter().filter_map(repaired)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(
        collective: Collective,
        span: LinkSpan,
        num_ranks: u32,
        bandwidth_bytes_per_s: u64,
    ) -> LinkProfile {
        let steps = ring(collective, num_ranks).0;
        let hop_ns = if span == LinkSpan::Node { 2_000 } else { 5_000 };
        let latency_ns = steps * hop_ns;
        LinkProfile { collective, span, num_ranks, latency_ns, bandwidth_bytes_per_s, points: Vec::new() }
    }

    /// Eight devices a node: 300 GB/s in it, a card of 40 GB/s each.
    fn links(is_assumed: bool) -> Links {
        let all = [Collective::AllReduce, Collective::AllGather].into_iter().flat_map(|collective| {
            let of = move |span, ranks, giga: u64| link(collective, span, ranks, giga * 1_000_000_000);
            [of(LinkSpan::Node, 8, 300), of(LinkSpan::Cluster, 2, 40), of(LinkSpan::Cluster, 16, 40)]
        });
        Links::new(&Network { backend: "nccl".to_owned(), is_assumed, links: all.collect() }).unwrap()
    }

    #[test]
    fn ranks_of_a_group_share_nodes() {
        let nodes = |first, num_ranks, stride| Group { first, num_ranks, stride }.nodes(8);
        assert_eq!(nodes(0, 8, 1), None);
        assert_eq!(nodes(8, 8, 1), None);
        assert_eq!(nodes(0, 64, 1), Some((8, 8)));
        // One more than two nodes, or not at the start of one: the node with fewest has one, three.
        assert_eq!(nodes(0, 17, 1), Some((3, 1)));
        assert_eq!(nodes(5, 16, 1), Some((3, 3)));
        // Every second, every eighth, every twelfth rank.
        assert_eq!((nodes(0, 32, 2), nodes(0, 4, 2)), (Some((8, 4)), None));
        assert_eq!((nodes(3, 8, 8), nodes(0, 5, 12)), (Some((8, 1)), Some((5, 1))));
        // A node of one rank, a group of one.
        assert_eq!((Group::of(4).nodes(1), Group::of(1).nodes(1)), (Some((4, 1)), None));
    }

    #[test]
    fn a_ring_uses_the_cards_of_all_its_ranks() {
        let links = links(true);
        let spread =
            |per_node, ranks: u32| Spread { span: LinkSpan::Cluster, num_nodes: ranks / per_node, per_node };
        let gather = |per_node, ranks| links.route_of(Collective::AllGather, spread(per_node, ranks), ranks);
        // 64 ranks of 8 nodes: 7 hops between nodes, 56 in them; 8 cards are 320 GB/s, the links in a node 300.
        let all = gather(8, 64);
        assert_eq!(
            (all.latency_ns, all.bandwidth, all.wire),
            (7 * 5_000 + 56 * 2_000, 300_000_000_000, (63, 64))
        );
        assert_eq!(gather(4, 32).bandwidth, 160_000_000_000);
        // One rank a node: as in the table.
        assert_eq!(gather(1, 8).bandwidth, 40_000_000_000);
        let sum = links.route_of(Collective::AllReduce, spread(8, 64), 64);
        assert_eq!((sum.latency_ns, sum.bandwidth), (2 * all.latency_ns, all.bandwidth));
        // What was measured across nodes stands as it is.
        let measured = super::tests::links(false);
        assert_eq!(measured.route_of(Collective::AllGather, spread(8, 16), 16).bandwidth, 40_000_000_000);
        // Without the size of a node all are taken to be as far apart as anything is known.
        assert_eq!(links.spread(Group::of(64), None), spread(1, 64));
        assert_eq!(links.spread(Group::of(64), Some(8)), spread(8, 64));
        assert_eq!(links.spread(Group::of(8), Some(8)).span, LinkSpan::Node);
        // 17 ranks: two full nodes and one rank, whose card is all that the ring has; two hops between nodes.
        let uneven = links.spread(Group::of(17), Some(8));
        let all = links.route_of(Collective::AllGather, uneven, 17);
        assert_eq!((all.latency_ns, all.bandwidth), (2 * 5_000 + 14 * 2_000, 40_000_000_000));
    }

    /// Links in a node that are slower than one rank's card: a ring over several nodes passes through them as one in a node does.
    #[test]
    fn a_ring_is_no_faster_than_the_links_in_its_nodes() {
        let slow = |giga: u64| {
            let of = |span, ranks, giga: u64| link(Collective::AllReduce, span, ranks, giga * 1_000_000_000);
            let all = vec![of(LinkSpan::Node, 8, giga), of(LinkSpan::Cluster, 2, 40)];
            Links::new(&Network { backend: "nccl".to_owned(), is_assumed: true, links: all }).unwrap()
        };
        let bandwidth = |giga, ranks| {
            let links = slow(giga);
            let spread = links.spread(Group::of(ranks), Some(8));
            links.route_of(Collective::AllReduce, spread, ranks).bandwidth / 1_000_000_000
        };
        assert_eq!((bandwidth(10, 8), bandwidth(10, 64)), (10, 10));
        assert_eq!((bandwidth(100, 8), bandwidth(100, 64)), (100, 100));
        // Faster ones than all cards together change nothing.
        assert_eq!((bandwidth(900, 64), bandwidth(1_800, 64)), (320, 320));
    }
}
