//! One step on one time axis: a lane for each rank, work in solid colours, bubbles shaded.

use super::{Frame, Scale, axis_x, partly, px, spread, svg};
use dflop_types::{ActionKind, Component, Layout, Rank, Span, StageIndex, Timeline, number};
use maud::{Markup, html};

/// The most lanes that are drawn.
const MOST_LANES: usize = 16;
/// The most spans that are drawn in one timeline. Narrow spans are joined first; then lanes are left out.
const MOST_SPANS: usize = 3_000;
/// Spans narrower than this many pixels are joined with a neighbour of the same kind.
const NARROW: f64 = 0.6;

/// What one drawing of a timeline needs in addition to its spans.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TimelineView {
    /// End of the time axis, in nanoseconds. Drawings that are compared have the same.
    pub(crate) end_ns: u64,
    /// Width in pixels.
    pub(crate) width: f64,
    /// Height of a lane in pixels.
    pub(crate) lane_height: f64,
    /// Whether the labels of the axis are drawn.
    pub(crate) has_axis: bool,
    /// Whether each span shows its times when the pointer is on it.
    pub(crate) has_titles: bool,
}

/// A run of one kind of work on a lane, in pixels and nanoseconds.
struct Block {
    kind: ActionKind,
    from: f64,
    to: f64,
    start_ns: u64,
    end_ns: u64,
    /// The span that the block stands for; `None` if several are joined.
    span: Option<Span>,
}

/// A lane: the name of a rank, its work, its bubbles in pixels, and its idle time as a fraction of the makespan.
struct Lane {
    name: String,
    blocks: Vec<Block>,
    bubbles: Vec<(f64, f64)>,
    idle_ratio: f64,
}

/// The lanes of a timeline that are drawn, and what was left out.
pub(crate) struct Lanes {
    drawn: Vec<Lane>,
    /// When the last action ends, in nanoseconds. Then come the reduction and the optimizer.
    tail_from_ns: u64,
    /// What the drawing leaves out, a sentence each.
    pub(crate) left_out: Vec<String>,
}

const LEFT: f64 = 118.0;
const RIGHT: f64 = 74.0;

impl Lanes {
    /// Sorts spans into lanes. Spans that are too narrow to see are joined, and lanes that are too many are left out.
    /// The layout gives the names of lanes.
    pub(crate) fn new(timeline: &Timeline, layout: Option<&Layout>, end_ns: u64, width: f64) -> Self {
        let scale = Scale::linear((0.0, end_ns as f64), (LEFT, width - RIGHT));
        let tail_from_ns =
            timeline.spans.iter().map(|s| s.end_ns).max().unwrap_or(0).min(timeline.makespan_ns);
        let mut by_rank: Vec<Vec<Span>> = Vec::new();
        let known = timeline.spans.iter().map(|s| s.rank.0.saturating_add(1)).max().unwrap_or(0);
        // An unsound file may claim billions of ranks. Nothing is stored for ranks that are not drawn.
        let num_ranks = (timeline.num_ranks.max(known)) as usize;
        let mut ranks: Vec<u32> = spread(num_ranks, MOST_LANES).into_iter().map(|r| r as u32).collect();
        by_rank.resize_with(ranks.len(), Vec::new);
        for span in &timeline.spans {
            if let Ok(lane) = ranks.binary_search(&span.rank.0) {
                by_rank[lane].push(*span);
            }
        }
        let mut num_joined = 0;
        let mut num_drawn = 0;
        let mut lanes = Vec::new();
        for (rank, mut spans) in ranks.drain(..).zip(by_rank) {
            spans.sort_by_key(|s| (s.start_ns, s.end_ns));
            let (blocks, joined) = join(&spans, &scale);
            if num_drawn + blocks.len() > MOST_SPANS && !lanes.is_empty() {
                break;
            }
            num_drawn += blocks.len();
            num_joined += joined;
            lanes.push(Lane {
                name: lane_name(rank, layout),
                bubbles: gaps(&spans, tail_from_ns, &scale),
                idle_ratio: idle_ratio(&spans, tail_from_ns, timeline.makespan_ns),
                blocks,
            });
        }
        let mut left_out: Vec<String> = partly(lanes.len(), num_ranks, "rank").into_iter().collect();
        if num_joined > 0 {
            left_out
                .push(format!("{} too narrow to draw apart are joined", number::counted(num_joined, "span")));
        }
        Self { drawn: lanes, tail_from_ns, left_out }
    }
}

impl Lanes {
    /// Lanes drawn.
    pub(crate) fn num_lanes(&self) -> usize {
        self.drawn.len()
    }
}

/// The name of a lane: a rank, and what the layout puts there. Stages are counted over both components. A component of one
/// stage has no number, and of more than two stages of a rank the first two are named: a lane has room for no more. A rank
/// that holds both components has its number alone, and so has a rank of an unknown layout.
pub(crate) fn lane_name(rank: u32, layout: Option<&Layout>) -> String {
    let name = format!("rank {rank}");
    // A lane is a tensor group.
    let Some((layout, at)) =
        layout.map(Layout::by_group).and_then(|of| Some((of, of.coordinates(Rank(rank))?)))
    else {
        return name;
    };
    let (component, num_stages) = match at.component {
        Component::Both => return name,
        Component::Encoder => ("encoder", layout.encoder.pp),
        Component::Llm => ("LLM", layout.num_llm_stages()),
    };
    let stages: Vec<StageIndex> = layout.stages(Rank(rank)).collect();
    match stages[..] {
        _ if num_stages == 1 => format!("{name} {component}"),
        [first, second] => format!("{name} {component} {first}, {second}"),
        [first, second, ..] => format!("{name} {component} {first}, {second}.."),
        _ => format!("{name} {component} {}", at.stage),
    }
}

fn join(spans: &[Span], scale: &Scale) -> (Vec<Block>, u64) {
    let mut blocks: Vec<Block> = Vec::new();
    let mut joined = 0;
    // An empty microbatch takes no time: there is nothing to draw, and nothing is left out.
    for span in spans.iter().filter(|span| span.end_ns > span.start_ns) {
        let (from, to) = (scale.at(span.start_ns as f64), scale.at(span.end_ns.max(span.start_ns) as f64));
        if let Some(last) = blocks.last_mut()
            && last.kind == span.action.kind
            && (to - from < NARROW || last.to - last.from < NARROW)
            && from - last.to < NARROW
        {
            joined += if last.span.take().is_some() { 2 } else { 1 };
            last.to = last.to.max(to);
            last.end_ns = last.end_ns.max(span.end_ns);
            continue;
        }
        blocks.push(Block {
            kind: span.action.kind,
            from,
            to,
            start_ns: span.start_ns,
            end_ns: span.end_ns.max(span.start_ns),
            span: Some(*span),
        });
    }
    (blocks, joined)
}

/// The times from 0 to `until_ns` without a span, as ranges of pixels.
fn gaps(spans: &[Span], until_ns: u64, scale: &Scale) -> Vec<(f64, f64)> {
    let mut gaps = Vec::new();
    let mut busy_until = 0;
    let ends = spans.iter().map(|s| (s.start_ns, s.end_ns)).chain([(until_ns, until_ns)]);
    for (start, end) in ends {
        if start > busy_until {
            let (from, to) = (scale.at(busy_until as f64), scale.at(start as f64));
            if to - from >= NARROW {
                gaps.push((from, to));
            }
        }
        busy_until = busy_until.max(end);
    }
    gaps
}

fn idle_ratio(spans: &[Span], tail_from_ns: u64, makespan_ns: u64) -> f64 {
    if makespan_ns == 0 {
        return 0.0;
    }
    let mut idle = 0.0;
    let mut busy_until = 0;
    for (start, end) in spans.iter().map(|s| (s.start_ns, s.end_ns)).chain([(tail_from_ns, tail_from_ns)]) {
        idle += start.saturating_sub(busy_until) as f64;
        busy_until = busy_until.max(end);
    }
    idle / makespan_ns as f64
}

/// Draws the timeline. `label` is the sentence that a screen reader says in its place.
pub(crate) fn timeline(label: &str, shown: &Timeline, lanes: &Lanes, view: &TimelineView) -> Markup {
    let (frame, body) = draw(shown, lanes, view);
    svg(&frame, "timeline", label, &body)
}

/// The drawing and its size, to be put into a larger one.
///
/// Its colours come from the classes `F B I W idle tail` of the page or of the standalone file.
pub(crate) fn draw(shown: &Timeline, lanes: &Lanes, view: &TimelineView) -> (Frame, Markup) {
    let gap = if view.lane_height < 14.0 { 2.0 } else { 4.0 };
    let pitch = view.lane_height + gap;
    let frame = Frame {
        width: view.width,
        height: 4.0 + pitch * lanes.drawn.len() as f64 + if view.has_axis { 20.0 } else { 4.0 },
        left: LEFT,
        right: RIGHT,
        top: 4.0,
        bottom: if view.has_axis { 20.0 } else { 4.0 },
    };
    let scale = Scale::linear((0.0, view.end_ns as f64 / 1e6), frame.x());
    let at = |ns: u64| scale.at(ns as f64 / 1e6);
    let (bottom, top) = frame.y();
    let (tail, end) = (at(lanes.tail_from_ns), at(shown.makespan_ns));
    let body = html! {
        @if view.has_axis { (axis_x(&frame, &scale, number::tick, "")) text x=(px(LEFT - 12.0)) y=(px(bottom + 14.0)) text-anchor="end" { "ms" } }
        @for (index, lane) in lanes.drawn.iter().enumerate() {
            @let y = top + index as f64 * pitch;
            text.lane x="0" y=(px(y + view.lane_height / 2.0 + 4.0)) { (lane.name) }
            @for (from, to) in &lane.bubbles {
                rect.idle x=(px(*from)) y=(px(y)) width=(px(to - from)) height=(px(view.lane_height)) {}
            }
            @if end - tail >= NARROW {
                rect.tail x=(px(tail)) y=(px(y)) width=(px(end - tail)) height=(px(view.lane_height)) {
                    @if view.has_titles { title { "reduction and optimizer: " (number::ns(shown.makespan_ns.saturating_sub(lanes.tail_from_ns))) } }
                }
            }
            @for block in &lane.blocks { (work(block, y, view)) }
            text.share x=(px(frame.width)) y=(px(y + view.lane_height / 2.0 + 4.0)) text-anchor="end" {
                "idle " (number::percent(lane.idle_ratio))
            }
        }
        @if !lanes.drawn.is_empty() {
            line.end x1=(px(end)) x2=(px(end)) y1=(px(top - 3.0)) y2=(px(bottom)) {}
        }
    };
    (frame, body)
}

fn work(block: &Block, y: f64, view: &TimelineView) -> Markup {
    let class = format!("{:?}", block.kind);
    let width = (block.to - block.from).max(0.4);
    let number = block.span.map(|span| span.action.microbatch.to_string());
    // A thin gap between neighbours lets the reader tell blocks of one kind apart.
    let drawn = if width > 3.0 { width - 0.6 } else { width };
    html! {
        rect class=(class) x=(px(block.from)) y=(px(y)) width=(px(drawn)) height=(px(view.lane_height)) {
            @if view.has_titles {
                title {
                    @match block.span {
                        Some(span) => (span.action),
                        None => { "several " (class) },
                    }
                    ": " (number::ns(block.end_ns - block.start_ns)) ", from " (number::ns(block.start_ns))
                }
            }
        }
        @if let Some(number) = number.filter(|n| view.lane_height >= 13.0 && width >= n.len() as f64 * 6.4 + 4.0) {
            text class={ "on" (class) } x=(px(block.from + width / 2.0)) y=(px(y + view.lane_height / 2.0 + 3.6)) text-anchor="middle" { (number) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflop_types::{ComponentLayout, Zero};

    fn span(rank: u32, action: &str, start_ns: u64, end_ns: u64) -> Span {
        Span { rank: Rank(rank), action: action.parse().unwrap(), start_ns, end_ns }
    }

    #[test]
    fn a_gap_is_a_bubble_and_the_tail_is_not() {
        let timeline = Timeline {
            num_ranks: 1,
            makespan_ns: 100,
            spans: vec![span(0, "0F0", 0, 20), span(0, "0B0", 50, 80)],
            ..Timeline::default()
        };
        let lanes = Lanes::new(&timeline, None, 100, LEFT + RIGHT + 100.0);
        assert_eq!(lanes.tail_from_ns, 80);
        assert_eq!(lanes.drawn[0].bubbles, [(LEFT + 20.0, LEFT + 50.0)]);
        assert!((lanes.drawn[0].idle_ratio - 0.3).abs() < 1e-12);
        assert!(lanes.left_out.is_empty());
    }

    /// One list for each kind of layout, an encoder of several stages among them.
    #[test]
    fn a_lane_names_what_the_layout_puts_there() {
        let names = |layout: Layout| -> Vec<String> {
            let num_ranks = layout.by_group().num_ranks();
            (0..num_ranks).map(|rank| lane_name(rank, Some(&layout))).collect()
        };
        let degrees = |tp, pp, dp| ComponentLayout { tp, pp, dp };
        let usual = Layout::disaggregated(degrees(1, 1, 1), degrees(1, 1, 1));
        assert_eq!(names(usual), ["rank 0 encoder", "rank 1 LLM"]);
        assert_eq!(
            names(Layout { llm: degrees(2, 2, 1), ..usual }),
            ["rank 0 encoder", "rank 1 LLM 1", "rank 2 LLM 2"]
        );
        let cut = Layout { encoder: degrees(1, 2, 1), ..usual };
        assert_eq!(names(cut), ["rank 0 encoder 0", "rank 1 encoder 1", "rank 2 LLM"]);
        let interleaved = Layout { llm: degrees(1, 2, 1), llm_interleave: 2, ..usual };
        assert_eq!(names(interleaved), ["rank 0 encoder", "rank 1 LLM 1, 3", "rank 2 LLM 2, 4"]);
        let more = Layout { llm_interleave: 3, ..interleaved };
        assert_eq!(names(more), ["rank 0 encoder", "rank 1 LLM 1, 3..", "rank 2 LLM 2, 4.."]);
        assert_eq!(names(Layout::colocated(2, Zero::Nothing)), ["rank 0", "rank 1"]);
        assert_eq!([lane_name(0, None), lane_name(9, Some(&usual))], ["rank 0", "rank 9"]);
    }

    #[test]
    fn what_is_left_out_is_said() {
        let spans = (0..20_000).map(|i| span(0, "0F0", i, i + 1)).collect();
        let timeline = Timeline { num_ranks: 64, makespan_ns: 20_000, spans, ..Timeline::default() };
        let lanes = Lanes::new(&timeline, None, 20_000, 1000.0);
        assert_eq!(lanes.drawn.len(), 16);
        assert!(lanes.drawn[0].blocks.len() < 2_000);
        assert_eq!(lanes.left_out[0], "showing 16 of 64 ranks");
        assert_eq!(lanes.left_out[1], "20,000 spans too narrow to draw apart are joined");
    }

    /// By hand: a microbatch of samples, and two without any, whose actions take no time.
    #[test]
    fn empty_microbatches_are_not_left_out() {
        let spans = vec![span(0, "0F0", 0, 50), span(0, "0F1", 50, 50), span(0, "0F2", 50, 50)];
        let timeline = Timeline { num_ranks: 1, makespan_ns: 100, spans, ..Timeline::default() };
        let lanes = Lanes::new(&timeline, None, 100, 1000.0);
        assert_eq!((lanes.drawn[0].blocks.len(), lanes.left_out.as_slice()), (1, [].as_slice()));
    }
}
