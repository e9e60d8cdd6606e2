//! What every drawing shares: scales that only give finite coordinates, axes, and the SVG element with its label.

mod bars;
mod histogram;
mod line;
mod scatter;
mod timeline;

pub(crate) use bars::{Bar, BarPart, bars};
pub(crate) use histogram::{Bins, histogram};
pub(crate) use line::{Line, LinePlot, line_plot};
pub(crate) use scatter::{Dots, Mark, ScatterPlot, pair_plot, ratio_plot, scatter_plot};
pub(crate) use timeline::{Lanes, TimelineView, draw, lane_name, timeline};

use dflop_types::number;
use maud::{Markup, Render, html};

/// A coordinate as text with at most two decimals. A value that is not finite becomes 0, so that the SVG is always valid.
pub(crate) fn px(value: f64) -> String {
    if !value.is_finite() {
        return "0".to_owned();
    }
    let text = format!("{value:.2}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    if text == "-0" { "0".to_owned() } else { text.to_owned() }
}

/// An upper bound for the width of a text in the font of the axes, in pixels. It holds for digits and Latin letters.
pub(crate) fn text_width(text: &str) -> f64 {
    text.chars().count() as f64 * 6.4
}

/// The size of a chart and its margins, in pixels.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Frame {
    pub(crate) width: f64,
    pub(crate) height: f64,
    pub(crate) left: f64,
    pub(crate) right: f64,
    pub(crate) top: f64,
    pub(crate) bottom: f64,
}

impl Frame {
    /// A chart that stands beside another.
    pub(crate) const fn small() -> Self {
        Self { width: 480.0, height: 270.0, left: 50.0, right: 14.0, top: 22.0, bottom: 40.0 }
    }

    /// A chart that stands beside two others.
    pub(crate) const fn third() -> Self {
        Self { width: 350.0, height: 230.0, ..Self::small() }
    }

    pub(crate) fn x(&self) -> (f64, f64) {
        (self.left, self.width - self.right)
    }

    /// The vertical range, from bottom to top as values grow.
    pub(crate) fn y(&self) -> (f64, f64) {
        (self.height - self.bottom, self.top)
    }
}

/// Converts values to pixels. Values outside the domain are drawn at its ends.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scale {
    domain: (f64, f64),
    range: (f64, f64),
    is_log: bool,
    /// The pixel of 0 on a logarithmic scale, beside the other values.
    zero_at: Option<f64>,
}

/// The largest value that the end of a domain may have.
const MOST: f64 = 1e300;

impl Scale {
    /// A linear scale over `domain`. An empty or unsound domain becomes 0 to 1.
    pub(crate) fn linear(domain: (f64, f64), range: (f64, f64)) -> Self {
        let sound = domain.0.is_finite() && domain.1.is_finite();
        // With ends near the largest `f64`, differences and ticks would be infinite.
        let domain = match (domain.0.clamp(-MOST, MOST), domain.1.clamp(-MOST, MOST)) {
            (low, high) if sound && low < high => (low, high),
            (low, _) if sound && low != 0.0 => (low - low.abs() * 0.5, low + low.abs() * 0.5),
            _ => (0.0, 1.0),
        };
        Self { domain, range, is_log: false, zero_at: None }
    }

    /// A logarithmic scale over the positive `domain`. With `has_zero`, 0 has a place of its own before the domain.
    pub(crate) fn log(domain: (f64, f64), range: (f64, f64), has_zero: bool) -> Self {
        let sound = domain.0 > 0.0 && domain.0.is_finite() && domain.1.is_finite();
        let domain = match (domain.0.clamp(1.0 / MOST, MOST), domain.1.clamp(1.0 / MOST, MOST)) {
            (low, high) if sound && low < high => (low, high),
            (low, _) if sound => (low / 2.0, low * 2.0),
            _ => (1.0, 10.0),
        };
        if has_zero {
            let gutter = 30.0_f64.copysign(range.1 - range.0);
            let zero_at = Some(range.0 + gutter / 3.0);
            Self { domain, range: (range.0 + gutter, range.1), is_log: true, zero_at }
        } else {
            Self { domain, range, is_log: true, zero_at: None }
        }
    }

    /// A linear scale with a margin of 6 % around `values`, or over 0 to 1 if there are no values.
    pub(crate) fn around(values: impl Iterator<Item = f64>, range: (f64, f64)) -> Self {
        let (low, high) = extent(values).unwrap_or((0.0, 1.0));
        let margin = (high - low) * 0.06;
        Self::linear((low - margin, high + margin), range)
    }

    /// The pixel of `value`, between the ends of the range.
    pub(crate) fn at(&self, value: f64) -> f64 {
        if let Some(zero) = self.zero_at.filter(|_| value <= 0.0) {
            return zero;
        }
        let share = if self.is_log {
            (value / self.domain.0).ln() / (self.domain.1 / self.domain.0).ln()
        } else {
            (value - self.domain.0) / (self.domain.1 - self.domain.0)
        };
        let share = if share.is_nan() { 0.0 } else { share.clamp(0.0, 1.0) };
        self.range.0 + share * (self.range.1 - self.range.0)
    }

    /// Round numbers inside the domain, at which ticks are drawn: about `most` of them, or fewer.
    pub(crate) fn ticks(&self, most: usize) -> Vec<f64> {
        let mut ticks = if self.is_log { self.log_ticks(most) } else { self.linear_ticks(most) };
        if self.zero_at.is_some() {
            ticks.insert(0, 0.0);
        }
        ticks
    }

    fn linear_ticks(&self, most: usize) -> Vec<f64> {
        let (low, high) = self.domain;
        let raw = (high - low) / most.max(1) as f64;
        let power = 10f64.powf(raw.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|m| m * power).into_iter().find(|&s| s >= raw * 0.999);
        let step = step.unwrap_or(raw);
        if !(step.is_finite() && step > 0.0) {
            return Vec::new();
        }
        let first = (low / step - 1e-9).ceil();
        let number = ((high / step + 1e-9).floor() - first).clamp(-1.0, 100.0);
        (0..=number as i64).filter(|_| number >= 0.0).map(|i| (first + i as f64) * step).collect()
    }

    fn log_ticks(&self, most: usize) -> Vec<f64> {
        let (low, high) = self.domain;
        let decades = (low.log10().floor() as i32)..=(high.log10().ceil() as i32);
        let inside = |value: &f64| *value >= low * 0.999_999 && *value <= high * 1.000_001;
        let of = |steps: &[f64], every: usize| -> Vec<f64> {
            decades
                .clone()
                .step_by(every)
                .flat_map(|d| steps.iter().map(move |s| s * 10f64.powi(d)))
                .filter(inside)
                .collect()
        };
        let fine = of(&[1.0, 2.0, 5.0], 1);
        if fine.len() <= most {
            return fine;
        }
        (1..=decades.clone().count())
            .map(|every| of(&[1.0], every))
            .find(|ticks| ticks.len() <= most.max(1))
            .unwrap_or_default()
    }
}

/// Smallest and largest finite value.
pub(crate) fn extent(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    values.filter(|v| v.is_finite()).fold(None, |range, value| match range {
        None => Some((value, value)),
        Some((low, high)) => Some((low.min(value), high.max(value))),
    })
}

/// A drawing. `label` is the sentence that a screen reader says in its place.
pub(crate) fn svg(frame: &Frame, class: &str, label: &str, body: &Markup) -> Markup {
    let view = format!("0 0 {} {}", px(frame.width), px(frame.height));
    html! { svg class={ "chart " (class) } viewBox=(view) role="img" aria-label=(label) { (body) } }
}

/// Writes the number at a tick.
pub(crate) type Show = fn(f64) -> String;

/// The horizontal axis with its grid, its labels thinned so that none touch, and its title at the right.
pub(crate) fn axis_x(frame: &Frame, scale: &Scale, show: Show, title: &str) -> Markup {
    let (bottom, top) = frame.y();
    let mut free_from = f64::NEG_INFINITY;
    let labels: Vec<(f64, String)> = scale
        .ticks(((frame.x().1 - frame.x().0) / 54.0).clamp(3.0, 9.0) as usize)
        .into_iter()
        .map(|value| (scale.at(value), show(value)))
        .filter(|(x, label)| {
            let half = text_width(label) / 2.0;
            let fits = x - half >= free_from;
            if fits {
                free_from = x + half + 8.0;
            }
            fits
        })
        .collect();
    html! {
        g class="axis" {
            @for (x, label) in &labels {
                line x1=(px(*x)) x2=(px(*x)) y1=(px(top)) y2=(px(bottom)) {}
                text x=(px(*x)) y=(px(bottom + 14.0)) text-anchor="middle" { (label) }
            }
            @if !title.is_empty() { text.name x=(px(frame.x().1)) y=(px(bottom + 30.0)) text-anchor="end" { (title) } }
        }
    }
}

/// The vertical axis with its grid, and its title above it.
pub(crate) fn axis_y(frame: &Frame, scale: &Scale, show: Show, title: &str) -> Markup {
    let (left, right) = frame.x();
    html! {
        g class="axis" {
            @for value in scale.ticks(5) {
                @let y = scale.at(value);
                line x1=(px(left)) x2=(px(right)) y1=(px(y)) y2=(px(y)) {}
                text x=(px(left - 6.0)) y=(px(y + 4.0)) text-anchor="end" { (show(value)) }
            }
            text.name x="2" y=(px(frame.top - 9.0)) { (title) }
        }
    }
}

/// The legend: each colour, given by its class, with its name.
pub(crate) fn legend<'a>(entries: impl IntoIterator<Item = (&'a str, &'a str)>) -> Markup {
    html! {
        ul class="legend" {
            @for (class, name) in entries {
                li { i class={ "swatch " (class) } aria-hidden="true" {} (name) }
            }
        }
    }
}

/// One column of a table: its heading, and the class of its cells.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Column<'a>(&'a str, Option<&'static str>);

/// Heading of a column of words.
pub(crate) const fn words(name: &str) -> Column<'_> {
    Column(name, None)
}

/// Heading of a column of short names, never broken over lines.
pub(crate) const fn names(name: &str) -> Column<'_> {
    Column(name, Some("w"))
}

/// Heading of a column of numbers.
pub(crate) const fn numbers(name: &str) -> Column<'_> {
    Column(name, Some("n"))
}

/// A table that scrolls by itself where the page is narrow.
pub(crate) fn table<C: Render>(caption: &str, columns: &[Column<'_>], rows: &[Vec<C>]) -> Markup {
    html! {
        div class="scroll" tabindex="0" role="region" aria-label=(caption) {
            table {
                caption { (caption) }
                thead { tr { @for column in columns { th scope="col" class=[column.1] { (column.0) } } } }
                tbody {
                    @for row in rows {
                        tr {
                            @for (column, cell) in columns.iter().zip(row) {
                                td class=[column.1] { (cell) }
                            }
                        }
                    }
                }
            }
        }
    }
}

/// A table that is opened on demand, below the chart that shows the same.
pub(crate) fn table_below(caption: &str, columns: &[Column<'_>], rows: &[Vec<String>]) -> Markup {
    html! {
        details { summary { "Table: " (caption) } (table(caption, columns, rows)) }
    }
}

/// The positions of at most `most` of `total` things, evenly spread.
pub(crate) fn spread(total: usize, most: usize) -> Vec<usize> {
    if total <= most {
        (0..total).collect()
    } else {
        (0..most).map(|i| (i as u128 * total as u128 / most as u128) as usize).collect()
    }
}

/// "showing 8 of 64 ranks", or nothing if all are shown.
pub(crate) fn partly(shown: usize, total: usize, noun: &str) -> Option<String> {
    (shown < total).then(|| {
        format!("showing {} of {}", number::thousands(shown as u64), number::counted(total as u64, noun))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scale_gives_a_finite_place_to_everything() {
        let odd = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.0, -1.0, f64::MAX, f64::MIN, 5e-324, 5.0];
        for low in odd {
            for high in odd {
                for scale in [
                    Scale::linear((low, high), (10.0, 90.0)),
                    Scale::log((low, high), (10.0, 90.0), true),
                    Scale::log((low, high), (90.0, 10.0), false),
                    Scale::around([low, high].into_iter(), (10.0, 90.0)),
                ] {
                    for value in odd {
                        let at = scale.at(value);
                        assert!((10.0..=90.0).contains(&at), "{scale:?} at {value}: {at}");
                    }
                    assert!(scale.ticks(6).len() < 120);
                    assert!(scale.ticks(6).iter().all(|t| t.is_finite()), "{scale:?}");
                }
            }
        }
    }

    #[test]
    fn ticks_are_round() {
        assert_eq!(Scale::linear((0.0, 480.0), (0.0, 1.0)).ticks(5), [0.0, 100.0, 200.0, 300.0, 400.0]);
        assert_eq!(Scale::log((50.0, 20_000.0), (0.0, 1.0), false).ticks(4), [100.0, 1e3, 1e4]);
        assert_eq!(Scale::log((1.0, 10.0), (0.0, 100.0), true).ticks(5), [0.0, 1.0, 2.0, 5.0, 10.0]);
    }

    #[test]
    fn a_spread_keeps_order_and_bounds() {
        assert_eq!(spread(3, 5), [0, 1, 2]);
        assert_eq!(spread(10, 4), [0, 2, 5, 7]);
        assert_eq!(partly(4, 10, "rank").unwrap(), "showing 4 of 10 ranks");
        assert_eq!(partly(4, 4, "rank"), None);
    }
}
