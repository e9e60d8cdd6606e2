//! Two runs side by side: their numbers, their step times, and one global batch as each trained it.

use super::steps::{mean_idle_bars, panel};
use super::{Section, plotted};
use crate::chart::{Frame, Line, LinePlot, legend, line_plot, names, numbers, partly, spread, table};
use crate::{Against, Report, StepView};
use dflop_types::{Timeline, clipped, number};
use maud::{Markup, html};

/// The most points that are drawn of a line.
const MOST_POINTS: usize = 600;
/// The most letters of a run's name at the head of a column.
const MOST_NAME: usize = 40;
/// CSS classes of the two runs. They give colours, and the shapes in the legend.
const CLASSES: [&str; 2] = ["a-blind", "a-aware"];

/// A section for each pair of runs.
pub(super) fn sections(report: &Report) -> Vec<Section> {
    let ids = ["against", "against-plans"];
    let section = |(against, id): (&Against, &'static str)| {
        let name = if id == ids[0] { "Two runs side by side" } else { "Before and after the plan changed" };
        Section { id, name, body: body(against, &report.steps) }
    };
    let given =
        [report.against.as_ref().map(|of| (of, ids[0])), report.plans.as_ref().map(|of| (of, ids[1]))];
    given.into_iter().flatten().map(section).collect()
}

fn body(against: &Against, steps: &[StepView]) -> Markup {
    let names_of: Vec<String> = against.names.iter().map(|name| clipped(name, MOST_NAME)).collect();
    let rows: Vec<Vec<String>> = against.rows.iter().map(|row| row.cells().to_vec()).collect();
    let columns = [
        names(""),
        numbers(&names_of[0]),
        numbers(&names_of[1]),
        numbers("change"),
        numbers("95 % interval of the change"),
    ];
    let pairs: Vec<Pair<'_>> = against
        .pairs
        .iter()
        .filter_map(|pair| {
            let ours = steps.get(pair.index)?;
            Some(Pair { other: (&pair.other, drawn(&pair.other)?), ours: (ours, drawn(ours)?) })
        })
        .collect();
    html! {
        p { (said(against)) }
        @if !against.notes.is_empty() { ul { @for note in &against.notes { li { (note) } } } }
        (table("Both runs in numbers", &columns, &rows))
        p class="note" {
            "A change is " (names_of[1]) " against " (names_of[0]) "; below zero is less. The interval says how sure these steps are of it; "
            "it does not say how either run would go on another day."
        }
        div class="row" {
            @if against.step_ms.iter().any(|times| times.len() > 1) { (step_times(against, &names_of)) }
            @if !pairs.is_empty() {
                (mean_idle_bars(&[
                    (&names_of[0], pairs.iter().map(|pair| pair.other).collect()),
                    (&names_of[1], pairs.iter().map(|pair| pair.ours).collect()),
                ]))
            }
        }
        (twice(&pairs, &names_of))
    }
}

/// A step of both runs, each with the timeline that is drawn.
struct Pair<'a> {
    other: (&'a StepView, &'a Timeline),
    ours: (&'a StepView, &'a Timeline),
}

fn drawn(step: &StepView) -> Option<&Timeline> {
    step.measured.as_ref().or(step.predicted.as_ref())
}

/// The first row of the table, which is the step time, as a sentence.
fn said(against: &Against) -> Markup {
    let Some(row) = against.rows.first() else { return html! {} };
    let [name, first, second, change, interval] = row.cells();
    html! {
        "The " (name) " is " strong { (second) } " in " (against.names[1]) " and " strong { (first) } " in " (against.names[0]) ": "
        @if row.change.is_none() { (change) ", and too few steps to say how sure that is." }
        @else if row.is_sure() { strong { (change) } " (95\u{a0}% interval " (interval) ")." }
        @else { "no difference measured, " (change) " (95\u{a0}% interval " (interval) ")." }
    }
}

fn step_times(against: &Against, names: &[String]) -> Markup {
    let line = |at: usize| {
        let all = &against.step_ms[at];
        let points: Vec<(f64, f64)> =
            spread(all.len(), MOST_POINTS).into_iter().map(|i| (all[i].0 as f64, all[i].1)).collect();
        let titles = points
            .iter()
            .map(|(step, ms)| format!("{}, step {}: {}", names[at], number::tick(*step), number::ms(*ms)))
            .collect();
        Line { class: CLASSES[at], points, titles }
    };
    let lines = [line(0), line(1)];
    let label = format!("Step time over steps of {} and of {}.", names[0], names[1]);
    let plot = LinePlot {
        label: &label,
        frame: Frame::small(),
        is_log: false,
        has_linear_y: false,
        show_x: number::tick,
        show_y: number::tick,
        name_x: "step",
        name_y: "step time, ms",
    };
    let most = against.step_ms.iter().map(Vec::len).max().unwrap_or(0);
    let below = html! {
        (legend([("a-blind", names[0].as_str()), ("a-aware", names[1].as_str())]))
        @if let Some(text) = partly(most.min(MOST_POINTS), most, "step") { p class="note" { (text) } }
    };
    plotted("Step time of both", &line_plot(&plot, &lines), &below)
}

/// The pair of steps with the median ratio, drawn one above the other on one time axis.
fn twice(pairs: &[Pair<'_>], names: &[String]) -> Markup {
    let ratio = |pair: &Pair<'_>| pair.ours.1.makespan_ns as f64 / pair.other.1.makespan_ns.max(1) as f64;
    let mut order: Vec<&Pair<'_>> = pairs.iter().collect();
    order.sort_by(|a, b| ratio(a).total_cmp(&ratio(b)));
    let Some(pair) = order.get(order.len().saturating_sub(1) / 2) else { return html! {} };
    let shown = [pair.other, pair.ours];
    let timelines = || shown.iter().flat_map(|(step, _)| [&step.measured, &step.predicted]).flatten();
    let end_ns = timelines().map(|timeline| timeline.makespan_ns).max().unwrap_or(0);
    html! {
        h3 { "One global batch in both runs" }
        p {
            "Step " (number::thousands(pair.ours.0.step)) ", on one time axis in milliseconds: the samples are the same."
            @if let Some(text) = partly(1, pairs.len(), "step") { " " span class="note" { "(" (text) ": the one with the median ratio)" } }
            " The timeline under \"Step by step\" shows both runs of every such step."
        }
        @for ((step, _), (name, class)) in shown.iter().zip(names.iter().zip(CLASSES)) {
            (panel(step, end_ns, class, &format!("{name}: {}", step.arm)))
        }
    }
}
