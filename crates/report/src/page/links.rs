//! Links between ranks: time over message size, latency and bandwidth.

use super::plotted;
use crate::chart::{Frame, Line, LinePlot, legend, line_plot, numbers, partly, table, table_below, words};
use dflop_types::{Collective, LinkProfile, LinkSpan, Network, clipped, number};
use maud::{Markup, html};

/// The most links that are shown: five kinds of communication, for some groups of ranks within and across nodes.
const MOST_LINKS: usize = 24;

/// The class of a line and the name of what the ranks do.
fn describe(collective: Collective) -> (&'static str, &'static str) {
    match collective {
        Collective::PointToPoint => ("n-pair", "point to point"),
        Collective::AllReduce => ("n-reduce", "all-reduce"),
        Collective::AllGather => ("n-gather", "all-gather"),
        Collective::ReduceScatter => ("n-scatter", "reduce-scatter"),
        Collective::AllToAll => ("n-all", "all-to-all"),
    }
}

fn span(link: &LinkProfile) -> &'static str {
    match link.span {
        LinkSpan::Node => "within a node",
        LinkSpan::Cluster => "across nodes",
    }
}

/// The table of links, and a plot for each group of ranks whose messages were timed.
pub(super) fn links(network: &Network) -> Markup {
    let shown: Vec<&LinkProfile> = network.links.iter().take(MOST_LINKS).collect();
    let mut groups: Vec<(LinkSpan, u32)> =
        shown.iter().filter(|l| !l.points.is_empty()).map(|l| (l.span, l.num_ranks)).collect();
    groups.sort_unstable();
    groups.dedup();
    let origin = match (network.is_assumed, network.backend.as_str()) {
        (true, _) => "assumed: from a table of hardware, not measured".to_owned(),
        (false, "") => "measured".to_owned(),
        (false, backend) => format!("measured over {}", clipped(backend, 40)),
    };
    html! {
        h3 { "Links between ranks" }
        @if shown.is_empty() {
            p class="note" { "None was measured: transfers are taken as free." }
        } @else {
            (table_of(&origin, &shown))
            @if let Some(text) = partly(shown.len(), network.links.len(), "link") { p class="note" { (text) } }
        }
        @if !groups.is_empty() {
            (legend(
                [
                    Collective::PointToPoint, Collective::AllReduce, Collective::AllGather,
                    Collective::ReduceScatter, Collective::AllToAll,
                ]
                    .into_iter()
                    .filter(|kind| shown.iter().any(|link| link.collective == *kind && !link.points.is_empty()))
                    .map(|kind| { let (class, name) = describe(kind); (class, name) })
            ))
            div class="row three" {
                @for group in &groups {
                    @let members: Vec<&LinkProfile> = shown.iter().copied().filter(|l| (l.span, l.num_ranks) == *group && !l.points.is_empty()).collect();
                    (plot(&members))
                }
            }
        }
    }
}

fn table_of(origin: &str, links: &[&LinkProfile]) -> Markup {
    let rows: Vec<Vec<String>> = links
        .iter()
        .map(|link| {
            vec![
                describe(link.collective).1.to_owned(),
                span(link).to_owned(),
                number::thousands(u64::from(link.num_ranks)),
                number::ns(link.latency_ns),
                format!("{} GB/s", number::number(link.bandwidth_bytes_per_s as f64 / 1e9)),
                number::thousands(link.points.len() as u64),
            ]
        })
        .collect();
    let columns = [
        words("communication"),
        words("ranks are"),
        numbers("ranks"),
        numbers("latency"),
        numbers("bandwidth a rank"),
        numbers("sizes measured"),
    ];
    table(&format!("Links ({origin})"), &columns, &rows)
}

/// A plot of time over message size for the links of one group of ranks.
fn plot(links: &[&LinkProfile]) -> Markup {
    let name = links.first().map_or_else(String::new, |l| {
        format!("{}, {}", number::counted(u64::from(l.num_ranks), "rank"), span(l))
    });
    let curves: Vec<Line> = links
        .iter()
        .map(|link| {
            let (class, what) = describe(link.collective);
            Line {
                class,
                points: link.points.iter().map(|p| (p.bytes as f64, p.ns as f64 / 1e6)).collect(),
                titles: link
                    .points
                    .iter()
                    .map(|p| format!("{what} of {}: {}", number::memory_size(p.bytes), number::ns(p.ns)))
                    .collect(),
            }
        })
        .collect();
    let plot = LinePlot {
        label: &format!("{name}: time over message size, as in the table below."),
        frame: Frame::third(),
        is_log: true,
        has_linear_y: false,
        show_x: number::compact,
        show_y: number::tick,
        name_x: "bytes, log scale",
        name_y: "ms, log scale",
    };
    let rows: Vec<Vec<String>> = links
        .iter()
        .flat_map(|link| {
            link.points.iter().map(|p| {
                vec![describe(link.collective).1.to_owned(), number::memory_size(p.bytes), number::ns(p.ns)]
            })
        })
        .collect();
    let columns = [words("communication"), numbers("message"), numbers("time")];
    plotted(&name, &line_plot(&plot, &curves), &table_below(&name, &columns, &rows))
}
