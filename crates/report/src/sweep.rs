//! Plans under other conditions, one line a combination, as an SVG file of its own.

use crate::chart::{Frame, Scale, axis_y, px};
use dflop_types::number;
use maud::{PreEscaped, html};
use std::fmt::Write as _;

const STYLE: &str = concat!(include_str!("../assets/figure.css"), include_str!("../assets/sweep.css"));

const FRAME: Frame = Frame { width: 720.0, height: 360.0, left: 64.0, right: 20.0, top: 34.0, bottom: 48.0 };

/// Colours there are. Further lines begin again with the first; their marks and the legend tell them apart.
const COLOURS: usize = 6;

/// What changes along the horizontal axis, and the lines over it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Sweep {
    /// Name of the field, for example `cluster.num_ranks`.
    pub field: String,
    /// Its values as they are written, in their order. They stand at equal distances.
    pub values: Vec<String>,
    /// One line for each combination of the other fields.
    pub lines: Vec<SweepLine>,
}

/// One line: a place a value of the field; `None` where nothing fits, which interrupts the line.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SweepLine {
    /// The values of the other fields; empty where there are none.
    pub name: String,
    /// Samples a second of the plan.
    pub plan: Vec<Option<f64>>,
    /// Samples a second of the fastest baseline.
    pub baseline: Vec<Option<f64>>,
}

impl SweepLine {
    /// Its two rows with what they are called; the baseline's class is `dashed`.
    fn rows(&self) -> [(&'static str, &'static str, &[Option<f64>]); 2] {
        [("plan", "", &self.plan), ("best baseline", " dashed", &self.baseline)]
    }
}

/// A standalone SVG of a sweep: samples a second from 0 on, plans in full and the best baselines dashed. Each point says
/// its numbers when the pointer is on it.
pub fn sweep(sweep: &Sweep) -> String {
    let all = || sweep.lines.iter().flat_map(|line| line.plan.iter().chain(&line.baseline));
    let most = all().flatten().copied().filter(|y| y.is_finite()).fold(0.0, f64::max);
    let y = Scale::linear((0.0, 1.06 * most), FRAME.y());
    let (left, right) = FRAME.x();
    let slot = (right - left) / sweep.values.len().max(1) as f64;
    let x = |at: usize| left + (at as f64 + 0.5) * slot;
    let (bottom, _) = FRAME.y();
    let height = FRAME.height + 20.0 * (sweep.lines.len() + 1) as f64;
    let label = format!("Samples a second by {}: plans and their best baselines.", sweep.field);
    let svg = html! {
        svg xmlns="http://www.w3.org/2000/svg" width=(px(FRAME.width)) height=(px(height)) viewBox={ "0 0 " (px(FRAME.width)) " " (px(height)) } role="img" aria-label=(label) {
            title { (label) }
            style { (PreEscaped(STYLE)) }
            rect.card x="0.5" y="0.5" width=(px(FRAME.width - 1.0)) height=(px(height - 1.0)) rx="8" {}
            (axis_y(&FRAME, &y, number::tick, "samples a second, predicted"))
            g class="axis" {
                @for (at, value) in sweep.values.iter().enumerate() {
                    text x=(px(x(at))) y=(px(bottom + 16.0)) text-anchor="middle" { (dflop_types::shown(value)) }
                }
                text x=(px(right)) y=(px(bottom + 34.0)) text-anchor="end" { (dflop_types::shown(&sweep.field)) }
            }
            @for (index, line) in sweep.lines.iter().enumerate() {
                @for (way, dashed, row) in line.rows() {
                    g class={ "s" (index % COLOURS) (dashed) } {
                        path d=(path(row, x, &y)) {}
                        @for (at, point) in row.iter().enumerate() {
                            @if let Some(value) = point.filter(|value| value.is_finite()) {
                                circle cx=(px(x(at))) cy=(px(y.at(value))) r="3.5" {
                                    title { (way) " at " (sweep.values.get(at).map_or("", String::as_str)) ": " (number::tick(value)) " a second " (line.name) }
                                }
                            }
                        }
                    }
                }
            }
            g transform={ "translate(" (px(left)) " " (px(FRAME.height + 4.0)) ")" } {
                @for (index, line) in sweep.lines.iter().enumerate() {
                    g class={ "s" (index % COLOURS) } transform={ "translate(0 " (px(20.0 * index as f64)) ")" } {
                        path d="M0 -4H24" {}
                        text x="32" y="0" { @if line.name.is_empty() { "plan" } @else { (dflop_types::shown(&line.name)) } }
                    }
                }
                g class="s0 dashed" transform={ "translate(0 " (px(20.0 * sweep.lines.len() as f64)) ")" } {
                    path d="M0 -4H24" {}
                    text x="32" y="0" { "dashed: the fastest baseline of the same layout" }
                }
            }
        }
    };
    svg.into_string() + "\n"
}

/// The line through the points that there are.
fn path(row: &[Option<f64>], x: impl Fn(usize) -> f64, y: &Scale) -> String {
    let mut text = String::new();
    let mut letter = 'M';
    for (at, point) in row.iter().enumerate() {
        let Some(value) = point.filter(|value| value.is_finite()) else {
            letter = 'M';
            continue;
        };
        let _ = write!(text, "{letter}{} {}", px(x(at)), px(y.at(value)));
        letter = 'L';
    }
    text
}
