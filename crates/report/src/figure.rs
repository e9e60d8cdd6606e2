//! One global batch trained in several ways, as an SVG file of its own. The README has such a figure.

use crate::arm::arm_name;
use crate::chart::{Lanes, TimelineView, draw, px};
use dflop_types::{Layout, Timeline, number};
use maud::{PreEscaped, html};

/// The figure is drawn on a card with its own background, so that its text can be read on any page.
const STYLE: &str = include_str!("../assets/figure.css");

const WIDTH: f64 = 960.0;
const MARGIN: f64 = 18.0;

/// A standalone SVG of one global batch trained in several ways, on one time axis with shaded bubbles, and `caption` below.
/// Each step has the name of its arm, and each lane names what `layout` puts on its rank. Steps are drawn in the order given: baselines come first and ours last.
///
/// The figure has its own background and colours for light and dark, so it can be read on any page. Control characters in
/// the caption, which XML forbids, are written out. A large timeline is drawn in part, and the figure says so.
pub fn figure(steps: &[(&str, &Timeline)], layout: Option<&Layout>, caption: &str) -> String {
    let end_ns = steps.iter().map(|(_, timeline)| timeline.makespan_ns).max().unwrap_or(0);
    let inner = WIDTH - 2.0 * MARGIN;
    let mut y = MARGIN;
    let mut left_out = Vec::new();
    let mut panels = Vec::new();
    let mut said = Vec::new();
    for (index, &(arm, timeline)) in steps.iter().enumerate() {
        let lanes = Lanes::new(timeline, layout, end_ns, inner);
        left_out.extend(lanes.left_out.iter().filter(|text| text.starts_with("showing")).cloned());
        let lane_height = if lanes.num_lanes() > 8 { 14.0 } else { 24.0 };
        let has_axis = index + 1 == steps.len();
        let view = TimelineView { end_ns, width: inner, lane_height, has_axis, has_titles: false };
        let (frame, body) = draw(timeline, &lanes, &view);
        let idle = number::percent(timeline.bubble_ratio());
        let numbers = format!("{}, idle {idle}", number::ns(timeline.makespan_ns));
        said.push(format!("{arm} {numbers}"));
        panels.push((y, arm_name(arm), numbers, body));
        y += 24.0 + frame.height + 8.0;
    }
    left_out.dedup();
    let caption = dflop_types::shown(caption);
    let lines = wrapped(&caption, 140);
    let keys = [("F", "forward"), ("B", "backward"), ("idle", "idle"), ("tail", "reduction and optimizer")];
    let keys_y = y + 12.0;
    let height = keys_y + 14.0 + 18.0 * lines.len() as f64 + MARGIN;
    let label = format!("One training step before and after: {}.", said.join("; "));
    let svg = html! {
        svg xmlns="http://www.w3.org/2000/svg" width=(px(WIDTH)) height=(px(height)) viewBox={ "0 0 " (px(WIDTH)) " " (px(height)) } role="img" aria-label=(label) {
            title { (label) }
            style { (PreEscaped(STYLE)) }
            defs {
                pattern id="hatched" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)" {
                    rect.ground width="7" height="7" {}
                    line.hatch x1="0" y1="0" x2="0" y2="7" {}
                }
            }
            rect.card x="0.5" y="0.5" width=(px(WIDTH - 1.0)) height=(px(height - 1.0)) rx="8" {}
            @for (y, name, numbers, body) in &panels {
                g transform={ "translate(" (px(MARGIN)) " " (px(*y)) ")" } {
                    text.head x="0" y="13" { (name) }
                    text.numbers x=(px(inner)) y="13" text-anchor="end" { (numbers) }
                    g transform="translate(0 24)" { (body) }
                }
            }
            g transform={ "translate(" (px(MARGIN)) " " (px(keys_y)) ")" } {
                @for (index, (class, name)) in keys.iter().enumerate() {
                    @let x = 118.0 + 110.0 * index as f64;
                    rect class=(class) x=(px(x)) y="-10" width="12" height="12" {}
                    text x=(px(x + 18.0)) y="0" { (name) }
                }
                @if !left_out.is_empty() { text x=(px(inner)) y="0" text-anchor="end" { (left_out.join("; ")) } }
                @for (index, line) in lines.iter().enumerate() {
                    text x="0" y=(px(24.0 + 18.0 * index as f64)) { (line) }
                }
            }
        }
    };
    svg.into_string() + "\n"
}

/// The text in lines of at most `most` characters, broken between words. A longer word is a line of its own.
fn wrapped(text: &str, most: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= most => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}
