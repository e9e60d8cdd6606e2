//! Transfers between ranks: what a message or a collective takes, by what was measured, and marked where nothing was.

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
    /// No measurement of it: a table of hardware, another collective, another span; or nothing at all is known, and
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
        Collective::AllGather | Collective::ReduceScatter => (ranks - 1, (ranks - 1, ranks)),
    }
}

pub(crate) const fn collective_name(collective: Collective) -> &'static str {
    match collective {
        Collective::PointToPoint => "point_to_point",
        Collective::AllReduce => "all_reduce",
        Collective::AllGather => "all_gather",
        Collective::ReduceScatter => "reduce_scatter",
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
    pub(crate) fn route(&self, collective: Collective, span: LinkSpan, num_ranks: u32) -> Route {
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
