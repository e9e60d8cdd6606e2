//! Stacked horizontal bars on one scale.

use super::{Frame, Scale, Show, axis_x, px, svg, text_width};
use maud::{Markup, html};

/// One coloured piece of a bar.
pub(crate) struct BarPart {
    pub(crate) class: &'static str,
    pub(crate) value: f64,
    /// The text that is shown when the pointer is on it.
    pub(crate) title: String,
}

/// One bar: its name at the left, the sum in words behind its end.
pub(crate) struct Bar {
    pub(crate) name: String,
    /// Whether it is a prediction beside a measurement. It is drawn lighter and smaller.
    pub(crate) is_predicted: bool,
    pub(crate) parts: Vec<BarPart>,
    pub(crate) total: String,
}

/// Draws `bars` from top to bottom. The scale goes from 0 to the longest bar.
pub(crate) fn bars(label: &str, width: f64, bars: &[Bar], show: Show, unit: &str) -> Markup {
    const ROW: f64 = 32.0;
    // Names are to the left of the axis, and are never cut short.
    let longest_name = bars.iter().map(|bar| text_width(&bar.name)).fold(0.0, f64::max);
    let bottom = if unit.is_empty() { 20.0 } else { 36.0 };
    let frame = Frame {
        width,
        height: 6.0 + ROW * bars.len() as f64 + bottom,
        left: (longest_name + 8.0).max(118.0),
        right: 60.0,
        top: 6.0,
        bottom,
    };
    let finite = |value: f64| if value.is_finite() { value.max(0.0) } else { 0.0 };
    let longest =
        bars.iter().map(|b| b.parts.iter().map(|p| finite(p.value)).sum::<f64>()).fold(0.0, f64::max);
    let scale = Scale::linear((0.0, longest), frame.x());
    let body = html! {
        (axis_x(&frame, &scale, show, unit))
        @for (index, bar) in bars.iter().enumerate() {
            @let height = if bar.is_predicted { 14.0 } else { 22.0 };
            @let y = frame.top + ROW * index as f64 + (ROW - height) / 2.0;
            @let ends: Vec<f64> = bar.parts.iter().scan(0.0, |sum, part| { *sum += finite(part.value); Some(*sum) }).collect();
            g class=[bar.is_predicted.then_some("predicted")] {
                text.lane x="0" y=(px(y + height / 2.0 + 4.0)) { (bar.name) }
                @for (part, end) in bar.parts.iter().zip(&ends) {
                    @let from = scale.at(end - finite(part.value));
                    rect class=(part.class) x=(px(from)) y=(px(y)) width=(px(scale.at(*end) - from)) height=(px(height)) {
                        title { (part.title) }
                    }
                }
                text.share x=(px(scale.at(ends.last().copied().unwrap_or(0.0)) + 6.0)) y=(px(y + height / 2.0 + 4.0)) { (bar.total) }
            }
        }
    };
    svg(&frame, "wide", label, &body)
}
