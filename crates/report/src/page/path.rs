//! What has changed during a run, and why its slowest steps were slow.

use super::Section;
use crate::chart::{numbers, partly, table, words};
use crate::{EventView, Report, SlowStep};
use dflop_types::number;
use maud::{Markup, html};

/// The most rows of a table.
const MOST_ROWS: usize = 200;
/// Width of a drawing, and height of a lane, in pixels.
const WIDTH: f64 = 1060.0;
const LANE: f64 = 16.0;

/// Alarms and decisions, in the order in which they came.
pub(super) fn changes(report: &Report) -> Option<Section> {
    if report.events.is_empty() {
        return None;
    }
    let num_alarms = report.events.iter().filter(|event| event.is_alarm).count();
    let shown = shown_events(&report.events);
    let rows: Vec<Vec<Markup>> = shown
        .iter()
        .map(|event| {
            let what = if event.is_alarm { "alarm" } else { "correction" };
            vec![html! { (number::thousands(event.step)) }, html! { (what) }, super::marked(&event.words)]
        })
        .collect();
    let body = html! {
        p {
            (number::counted(num_alarms as u64, "alarm"))
            ". An alarm names what is likely at fault and what mends it; a line about the correction says whether schedules are made with measured times, "
            "and what that saves and costs."
        }
        (table("Alarms and decisions", &[numbers("after step"), words("what"), words("in words")], &rows))
        @if let Some(text) = partly(rows.len(), report.events.len(), "event") { p class="note" { (text) ", alarms first" } }
    };
    Some(Section { id: "changes", name: "What changed", body })
}

/// Those that the table has room for, in their order: alarms before decisions, which come every 32 steps, and of each the last ones.
fn shown_events(events: &[EventView]) -> Vec<&EventView> {
    let of = |is_alarm: bool| (0..events.len()).rev().filter(move |&at| events[at].is_alarm == is_alarm);
    let mut shown: Vec<usize> = of(true).chain(of(false)).take(MOST_ROWS).collect();
    shown.sort_unstable();
    shown.into_iter().map(|at| &events[at]).collect()
}

/// The critical path of the slowest steps, drawn and in words.
pub(super) fn slow_steps(report: &Report) -> Option<Section> {
    if report.slow_steps.is_empty() {
        return None;
    }
    let body = html! {
        p {
            "The steps that took longest against their prediction. The critical path is the chain of actions, each waiting for the one before, "
            "that made the step as long as it was: what is not on it could have taken longer without anyone noticing."
        }
        @for step in &report.slow_steps {
            h3 {
                "Step " (number::thousands(step.step)) " (" (step.arm) "): " (number::ns(step.makespan_ns)) " "
                @if super::viewer::holds(report, step.step, &step.arm) {
                    a class="note" href="#steps" data-step=(step.step) data-arm=(step.arm) { "its timeline" }
                }
            }
            @for sentence in &step.words { p { (super::marked(sentence)) } }
            (drawn(step))
            (links(step))
        }
    };
    Some(Section { id: "slow", name: "Why the slowest steps were slow", body })
}

/// Draws a critical path: a lane for each rank on the path, and a line from action to action.
fn drawn(step: &SlowStep) -> Markup {
    let end_ns = step.path.iter().map(|link| link.end_ns).max().unwrap_or(0).max(1);
    let mut ranks: Vec<u32> = step.path.iter().map(|link| link.rank).collect();
    ranks.sort_unstable();
    ranks.dedup();
    let lane = |rank: u32| ranks.iter().position(|&r| r == rank).unwrap_or(0) as f64 * LANE;
    let left = 70.0;
    let x = |ns: u64| left + (WIDTH - left) * ns as f64 / end_ns as f64;
    let height = ranks.len() as f64 * LANE + 4.0;
    let label =
        format!("Critical path of step {}: {} actions on {} ranks.", step.step, step.path.len(), ranks.len());
    let corners: Vec<String> = step
        .path
        .iter()
        .flat_map(|link| {
            let y = lane(link.rank) + LANE / 2.0;
            [format!("{:.1},{y:.1}", x(link.start_ns)), format!("{:.1},{y:.1}", x(link.end_ns))]
        })
        .collect();
    html! {
        figure {
            div class="scroll" tabindex="0" role="region" aria-label=(label) {
            svg class="chart timeline" viewBox={ "0 0 " (WIDTH) " " (format!("{height:.0}")) } role="img" aria-label=(label) {
                @for &rank in &ranks {
                    text x="0" y=(format!("{:.1}", lane(rank) + LANE * 0.75)) class="lane" { "rank " (rank) }
                }
                @for link in &step.path {
                    rect class=(if link.is_forward { "F" } else { "B" }) x=(format!("{:.1}", x(link.start_ns)))
                        y=(format!("{:.1}", lane(link.rank) + 2.0)) width=(format!("{:.1}", (x(link.end_ns) - x(link.start_ns)).max(0.5)))
                        height=(LANE - 4.0) { title { (link.action) " on rank " (link.rank) ": " (number::ns(link.end_ns - link.start_ns)) } }
                }
                polyline class="path" fill="none" stroke="currentColor" stroke-width="1" points=(corners.join(" ")) {}
            }
            }
        }
    }
}

fn links(step: &SlowStep) -> Markup {
    let rows: Vec<Vec<String>> = step
        .path
        .iter()
        .take(MOST_ROWS)
        .map(|link| {
            let took = link.end_ns - link.start_ns;
            vec![
                link.action.clone(),
                link.rank.to_string(),
                number::ns(link.start_ns),
                number::ns(took),
                number::ns(link.predicted_ns),
                number::ns(link.gap_ns),
                link.samples.clone(),
            ]
        })
        .collect();
    let columns = [
        words("action"),
        numbers("rank"),
        numbers("from"),
        numbers("took"),
        numbers("predicted"),
        numbers("waited before"),
        words("largest sample"),
    ];
    html! {
        details {
            summary { "Table: the critical path of step " (step.step) }
            (table("The critical path", &columns, &rows))
            (super::first_of(rows.len(), step.path.len(), "action"))
        }
    }
}
