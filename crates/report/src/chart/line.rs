//! Lines through measured points: module times over size, loss over steps.

use super::{Frame, Scale, Show, axis_x, axis_y, extent, px, svg};
use maud::{Markup, html};
use std::fmt::Write as _;

/// One line. It is interrupted at points that are not finite, and on a logarithmic axis at points not above 0.
pub(crate) struct Line {
    pub(crate) class: &'static str,
    pub(crate) points: Vec<(f64, f64)>,
    /// For each point the text that is shown when the pointer is on it; empty for a line without marks.
    pub(crate) titles: Vec<String>,
}

/// What a drawing needs in addition to its lines.
pub(crate) struct LinePlot<'a> {
    pub(crate) label: &'a str,
    pub(crate) frame: Frame,
    /// Whether the axes are logarithmic.
    pub(crate) is_log: bool,
    /// Whether the vertical axis is linear even if `is_log` is set.
    pub(crate) has_linear_y: bool,
    pub(crate) show_x: Show,
    pub(crate) show_y: Show,
    pub(crate) name_x: &'a str,
    pub(crate) name_y: &'a str,
}

/// The drawing.
pub(crate) fn line_plot(plot: &LinePlot, lines: &[Line]) -> Markup {
    let has_place =
        |&&(x, y): &&(f64, f64)| x.is_finite() && y.is_finite() && (!plot.is_log || (x > 0.0 && y > 0.0));
    let points = || lines.iter().flat_map(|line| &line.points).filter(has_place);
    let (x_of, y_of) = (extent(points().map(|p| p.0)), extent(points().map(|p| p.1)));
    let frame = plot.frame;
    let (x, y) = if plot.is_log {
        (
            Scale::log(x_of.unwrap_or((1.0, 10.0)), frame.x(), false),
            if plot.has_linear_y {
                Scale::around(points().map(|p| p.1), frame.y())
            } else {
                Scale::log(y_of.unwrap_or((1.0, 10.0)), frame.y(), false)
            },
        )
    } else {
        (
            Scale::linear(x_of.unwrap_or((0.0, 1.0)), frame.x()),
            Scale::around(points().map(|p| p.1), frame.y()),
        )
    };
    let body = html! {
        (axis_y(&frame, &y, plot.show_y, plot.name_y))
        (axis_x(&frame, &x, plot.show_x, plot.name_x))
        @for line in lines {
            @let path = path(&line.points, |p| has_place(&p), &x, &y);
            @if !path.is_empty() { path class={ "line " (line.class) } d=(path) {} }
            @for (point, title) in line.points.iter().zip(&line.titles).filter(|(p, _)| has_place(p)) {
                circle class=(line.class) cx=(px(x.at(point.0))) cy=(px(y.at(point.1))) r="3" { title { (title) } }
            }
        }
    };
    svg(&frame, "", plot.label, &body)
}

fn path(points: &[(f64, f64)], has_place: impl Fn(&(f64, f64)) -> bool, x: &Scale, y: &Scale) -> String {
    let mut path = String::new();
    let mut is_broken = true;
    for point in points {
        if has_place(point) {
            let letter = if is_broken { 'M' } else { 'L' };
            let _ = write!(path, "{letter}{} {}", px(x.at(point.0)), px(y.at(point.1)));
        }
        is_broken = !has_place(point);
    }
    path
}
