//! Dots: samples by their two sizes, predicted against measured, and pairs of step times.

use super::{Frame, Scale, Show, axis_x, axis_y, extent, px, svg};
use dflop_types::number;
use maud::{Markup, html};

/// The shape of a dot. It differs between series, so that they can be told apart without colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mark {
    Circle,
    Square,
    Diamond,
    Triangle,
    Cross,
}

impl Mark {
    /// The outline around a place, as path data.
    fn path(self, x: f64, y: f64) -> String {
        let at = |dx: f64, dy: f64| format!("{} {}", px(x + dx), px(y + dy));
        match self {
            Self::Circle => format!("M{}a3 3 0 1 1 0 6a3 3 0 1 1 0 -6z", at(0.0, -3.0)),
            Self::Square => format!("M{}h5.2v5.2h-5.2z", at(-2.6, -2.6)),
            Self::Diamond => format!("M{}l3.8 3.8l-3.8 3.8l-3.8 -3.8z", at(0.0, -3.8)),
            Self::Triangle => format!("M{}l3.6 6.2h-7.2z", at(0.0, -3.8)),
            Self::Cross => format!("M{}h2v2.4h2.4v2h-2.4v2.4h-2v-2.4h-2.4v-2h2.4z", at(-1.0, -3.4)),
        }
    }
}

/// A series of dots with an optional text each.
pub(crate) struct Dots {
    pub(crate) class: &'static str,
    pub(crate) mark: Mark,
    pub(crate) points: Vec<(f64, f64, Option<String>)>,
}

/// What a drawing needs in addition to its dots.
pub(crate) struct ScatterPlot<'a> {
    pub(crate) label: &'a str,
    /// Whether both axes are logarithmic, with a place for 0 beside them.
    pub(crate) is_log: bool,
    /// Whether both axes show the same range of values, with the line of equal values.
    pub(crate) is_square: bool,
    pub(crate) show: Show,
    pub(crate) name_x: &'a str,
    pub(crate) name_y: &'a str,
}

/// The drawing.
pub(crate) fn scatter_plot(plot: &ScatterPlot, series: &[Dots]) -> Markup {
    let frame = if plot.is_square {
        Frame { height: 360.0, ..Frame::small() }
    } else {
        Frame { height: 320.0, ..Frame::small() }
    };
    let points =
        || series.iter().flat_map(|dots| &dots.points).filter(|p| p.0.is_finite() && p.1.is_finite());
    let (xs, ys) = (points().map(|p| p.0), points().map(|p| p.1));
    let (x, y) = if plot.is_square {
        let both = || points().flat_map(|p| [p.0, p.1]);
        (Scale::around(both(), frame.x()), Scale::around(both(), frame.y()))
    } else if plot.is_log {
        let scale = |values: &mut dyn Iterator<Item = f64>, range| {
            let values: Vec<f64> = values.collect();
            let domain = extent(values.iter().copied().filter(|&v| v > 0.0)).unwrap_or((1.0, 10.0));
            Scale::log((domain.0 / 1.15, domain.1 * 1.15), range, values.iter().any(|&v| v <= 0.0))
        };
        (scale(&mut { xs }, frame.x()), scale(&mut { ys }, frame.y()))
    } else {
        (Scale::around(xs, frame.x()), Scale::around(ys, frame.y()))
    };
    let diagonal = extent(points().flat_map(|p| [p.0, p.1])).filter(|_| plot.is_square);
    let body = html! {
        (axis_y(&frame, &y, plot.show, plot.name_y))
        (axis_x(&frame, &x, plot.show, plot.name_x))
        @if let Some((low, high)) = diagonal {
            line.equal x1=(px(x.at(low))) y1=(px(y.at(low))) x2=(px(x.at(high))) y2=(px(y.at(high))) {}
        }
        @for dots in series {
            g class={ "dots " (dots.class) } {
                @for point in dots.points.iter().filter(|p| p.0.is_finite() && p.1.is_finite()) {
                    path d=(dots.mark.path(x.at(point.0), y.at(point.1))) {
                        @if let Some(text) = &point.2 { title { (text) } }
                    }
                }
            }
        }
    };
    svg(&frame, "", plot.label, &body)
}

/// Step times of pairs in the order in which they ran. The two of a pair, blind and aware, are joined by a line.
pub(crate) fn pair_plot(label: &str, pairs: &[(usize, f64, f64)]) -> Markup {
    let frame = Frame::small();
    let last = pairs.iter().map(|p| p.0).max().unwrap_or(0) as f64;
    let x = Scale::linear((-0.5, last + 0.5), (frame.x().0 + 4.0, frame.x().1));
    let y = Scale::around(pairs.iter().flat_map(|p| [p.1, p.2]), frame.y());
    let body = html! {
        (axis_y(&frame, &y, number::tick, "ms a step"))
        (axis_x(&frame, &x, number::tick, "pair, in the order in which they ran"))
        @for (index, blind, aware) in pairs.iter().filter(|p| p.1.is_finite() && p.2.is_finite()) {
            @let (at, from, to) = (x.at(*index as f64), y.at(*blind), y.at(*aware));
            g class="dots" {
                title { "pair " (index) ": blind " (number::ms(*blind)) ", aware " (number::ms(*aware)) ", " (number::times(blind / aware)) }
                line.pair x1=(px(at)) x2=(px(at)) y1=(px(from)) y2=(px(to)) {}
                path.a-blind d=(Mark::Square.path(at, from)) {}
                path.a-aware d=(Mark::Circle.path(at, to)) {}
            }
        }
    };
    svg(&frame, "", label, &body)
}

/// The ratio of each pair as a dot, with the ratio over all pairs, its interval, and the line of no difference.
pub(crate) fn ratio_plot(label: &str, ratios: &[f64], ratio: f64, interval: (f64, f64)) -> Markup {
    const SLOT: f64 = 7.0;
    let frame = Frame::small();
    let shown = ratios.iter().copied().filter(|r| r.is_finite());
    let x = Scale::around(shown.clone().chain([1.0, ratio, interval.0, interval.1]), frame.x());
    let (bottom, top) = frame.y();
    let most = (((bottom - top) / SLOT) as usize).saturating_sub(3);
    let mut sorted: Vec<f64> = shown.collect();
    sorted.sort_by(f64::total_cmp);
    // Dots at the same place are piled up. If a pile is higher than the frame, its dots are drawn closer together.
    let mut piles: Vec<(i64, Vec<f64>)> = Vec::new();
    for value in sorted {
        let slot = (x.at(value) / SLOT).round() as i64;
        match piles.last_mut() {
            Some((last, pile)) if *last == slot => pile.push(value),
            _ => piles.push((slot, vec![value])),
        }
    }
    let body = html! {
        (axis_x(&frame, &x, |v| format!("{}x", number::tick(v)), "step time, baseline over ours"))
        rect.interval x=(px(x.at(interval.0))) y=(px(top)) width=(px((x.at(interval.1) - x.at(interval.0)).max(0.0))) height=(px(bottom - top)) {
            title { "95 % interval " (number::times(interval.0)) " to " (number::times(interval.1)) }
        }
        line.equal x1=(px(x.at(1.0))) x2=(px(x.at(1.0))) y1=(px(top)) y2=(px(bottom)) {}
        text.share x=(px(x.at(1.0))) y=(px(top - 8.0)) text-anchor="middle" { "no difference" }
        @if ratio.is_finite() {
            line.middle x1=(px(x.at(ratio))) x2=(px(x.at(ratio))) y1=(px(top)) y2=(px(bottom)) {}
            @if (x.at(ratio) - x.at(1.0)).abs() > 70.0 {
                text.strong x=(px(x.at(ratio))) y=(px(top - 8.0)) text-anchor="middle" { (number::times(ratio)) }
            }
        }
        g class="dots a-aware" {
            @for (slot, pile) in &piles {
                @for (height, value) in pile.iter().enumerate() {
                    @let step = if pile.len() > most { SLOT * most as f64 / pile.len() as f64 } else { SLOT };
                    path d=(Mark::Circle.path(*slot as f64 * SLOT, bottom - 6.0 - height as f64 * step)) { title { (number::times(*value)) } }
                }
            }
        }
    };
    svg(&frame, "", label, &body)
}
