//! The loss over steps: in training, and of held-out samples; over all samples, and by kind and source.

use super::{Section, plotted};
use crate::chart::{
    Frame, Line, LinePlot, Show, legend, line_plot, numbers, partly, spread, table, table_below, words,
};
use crate::loss::mean;
use crate::{GroupLoss, LossPoint, Report};
use dflop_types::{SampleKind, clipped, number};
use maud::{Markup, html};

/// The most points that are drawn of the curve.
const MOST_POINTS: usize = 1_000;
/// A line with at most this many points shows the value of a point when the pointer is on it.
const MOST_TITLES: usize = 60;
/// The most points of a group's line. If there are more steps, each point is the mean of several, because the few samples of
/// a group in one step say little.
const MOST_MEANS: usize = 60;
/// The most groups that are drawn.
const MOST_LINES: usize = 8;
/// The most rows of a table.
const MOST_ROWS: usize = 200;
/// The most letters of a name.
const MOST_NAME: usize = 40;
/// CSS classes of the groups: they give colours and dashes.
const CLASSES: [&str; MOST_LINES] = ["g-0", "g-1", "g-2", "g-3", "g-4", "g-5", "g-6", "g-7"];

/// The section.
pub(super) fn section(report: &Report) -> Option<Section> {
    let groups = [("kind", &report.loss_by_kind), ("source", &report.loss_by_source)];
    if report.loss.is_empty() && report.held_out.is_empty() && groups.iter().all(|(_, all)| all.is_empty()) {
        return None;
    }
    let axis = if report.is_loss_by_update { "update" } else { "step" };
    let body = html! {
        @if report.is_loss_by_update {
            p class="note" { "Several arms train each global batch, one after the other, and each of them is an update of the model: losses are counted by update." }
        }
        (whole(&report.loss, &report.held_out, axis))
        @for (by, all) in groups { (grouped(by, all, axis)) }
    };
    Some(Section { id: "loss", name: "Loss", body })
}

/// The loss over all samples.
fn whole(all: &[(u64, f64)], held_out: &[LossPoint], axis: &str) -> Markup {
    let (Some(first), Some(last)) = (all.first(), all.last()) else {
        return evaluations(held_out, axis);
    };
    let points: Vec<(f64, f64)> =
        spread(all.len(), MOST_POINTS).into_iter().map(|i| (all[i].0 as f64, all[i].1)).collect();
    let num_broken = all.iter().filter(|(_, loss)| !loss.is_finite()).count() as u64;
    let label = format!(
        "Loss over {axis}s, from {} at {axis} {} to {} at {axis} {}.",
        number::number(first.1),
        first.0,
        number::number(last.1),
        last.0
    );
    let rows: Vec<Vec<String>> = spread(all.len(), MOST_ROWS)
        .into_iter()
        .map(|i| vec![all[i].0.to_string(), number::number(all[i].1)])
        .collect();
    let held = spread(held_out.len(), MOST_POINTS).into_iter().map(|i| place(&held_out[i])).collect();
    let mut lines = vec![line("m-loss", "", axis, points.clone())];
    if !held_out.is_empty() {
        lines.push(line("m-held", "held out, ", axis, held));
    }
    html! {
        p { (label) @if num_broken > 0 { " " strong { "Not finite at " (number::counted(num_broken, axis)) "." } } }
        figure class="wide" {
            div class="scroll" tabindex="0" role="region" aria-label={ "Loss over " (axis) "s" } { (drawn(&label, axis, Frame { width: 760.0, height: 220.0, ..Frame::small() }, &lines)) }
            @if !held_out.is_empty() { (legend([("m-loss", "training"), ("m-held", "held out")])) }
        }
        @if let Some(text) = partly(points.len(), all.len(), axis) { p class="note" { (text) } }
        details {
            summary { "Table: loss by " (axis) }
            (table(&format!("Loss by {axis}"), &[numbers(axis), numbers("loss")], &rows))
            @if let Some(text) = partly(rows.len(), all.len(), axis) { p class="note" { (text) } }
        }
        (evaluations(held_out, axis))
    }
}

/// The loss of held-out samples.
fn evaluations(all: &[LossPoint], axis: &str) -> Markup {
    let (Some(first), Some(last)) = (all.first(), all.last()) else { return html! {} };
    let best = all.iter().filter(|point| point.loss.is_finite()).min_by(|a, b| a.loss.total_cmp(&b.loss));
    let shown = spread(all.len(), MOST_ROWS);
    let rows: Vec<Vec<String>> = shown
        .iter()
        .map(|&i| {
            let point = &all[i];
            vec![point.step.to_string(), number::number(point.loss), number::thousands(point.label_tokens)]
        })
        .collect();
    let columns = [numbers(axis), numbers("loss"), numbers("label tokens")];
    html! {
        p {
            "Held out (" (number::counted(all.len() as u64, "evaluation")) "): from " (number::number(first.loss))
            " after " (axis) " " (first.step) " to " (number::number(last.loss)) " after " (axis) " " (last.step)
            @if let Some(best) = best { "; the lowest is " (number::number(best.loss)) " after " (axis) " " (best.step) }
            "."
        }
        (table_below("loss of samples that are held out", &columns, &rows))
        @if let Some(text) = partly(rows.len(), all.len(), "evaluation") { p class="note" { (text) } }
    }
}

/// The loss by kind or by source: a drawing of the largest groups, and a table.
fn grouped(by: &'static str, groups: &[GroupLoss], axis: &str) -> Markup {
    if groups.is_empty() {
        return html! {};
    }
    let mut order: Vec<&GroupLoss> = groups.iter().collect();
    order.sort_by(|a, b| b.label_tokens().cmp(&a.label_tokens()).then_with(|| a.name.cmp(&b.name)));
    let num_steps = order.iter().map(|group| group.trained.len()).max().unwrap_or(0);
    let per_point = num_steps.div_ceil(MOST_MEANS).max(1);
    let largest = || order.iter().take(MOST_LINES).zip(CLASSES);
    let training: Vec<Line> = largest()
        .map(|(group, class)| {
            line(class, &format!("{}, ", named(group)), axis, means(&group.trained, per_point))
        })
        .collect();
    let held_out: Vec<Line> = largest()
        .map(|(group, class)| {
            let shown = spread(group.held_out.len(), MOST_POINTS);
            line(
                class,
                &format!("{}, ", named(group)),
                axis,
                shown.iter().map(|&i| place(&group.held_out[i])).collect(),
            )
        })
        .collect();
    let is_held_out = order.iter().any(|group| !group.held_out.is_empty());
    let rows: Vec<Vec<String>> = order.iter().take(MOST_ROWS).map(|group| row(group, is_held_out)).collect();
    let (first, last) = (format!("first tenth of {axis}s"), format!("last tenth of {axis}s"));
    let mut columns = vec![words(by), numbers("label tokens"), numbers(&first), numbers(&last)];
    if is_held_out {
        columns.extend([numbers("held out, first"), numbers("held out, last")]);
    }
    let caption = format!("Loss by {by}");
    let label = |what: &str| format!("Loss {what} by {by} over {axis}s, as in the table below.");
    let below = html! {
        @if per_point > 1 { p class="note" { "Each point is the mean over the label tokens of " (number::counted(per_point as u64, axis)) "." } }
    };
    let names: Vec<(&str, String)> = largest().map(|(group, class)| (class, named(group))).collect();
    html! {
        h3 { (caption) }
        (legend(names.iter().map(|(class, name)| (*class, name.as_str()))))
        div class="row" {
            (plotted("In training", &drawn(&label("in training"), axis, Frame::small(), &training), &below))
            @if held_out.iter().any(|line| !line.points.is_empty()) {
                @let held = drawn(&label("of samples that are held out"), axis, Frame::small(), &held_out);
                (plotted("Held out", &held, &html! {}))
            }
        }
        @if let Some(text) = partly(order.len().min(MOST_LINES), order.len(), by) { p class="note" { (text) ", those with the most label tokens" } }
        (table(&caption, &columns, &rows))
        @if let Some(text) = partly(rows.len(), order.len(), by) { p class="note" { (text) } }
    }
}

/// Its name; kinds are called as in the rest of the page.
fn named(group: &GroupLoss) -> String {
    if group.name == SampleKind::MultiImage.to_string() {
        return "several images".to_owned();
    }
    clipped(&group.name, MOST_NAME)
}

/// The row of a group in the table. Losses are means over label tokens.
fn row(group: &GroupLoss, is_held_out: bool) -> Vec<String> {
    let (trained, tenth) = (&group.trained, group.trained.len().div_ceil(10));
    let held =
        |point: Option<&LossPoint>| point.map_or_else(|| number::NONE.to_owned(), |p| number::number(p.loss));
    let mut cells = vec![
        named(group),
        number::thousands(group.label_tokens()),
        number::number(mean(&trained[..tenth])),
        number::number(mean(&trained[trained.len() - tenth..])),
    ];
    if is_held_out {
        cells.extend([held(group.held_out.first()), held(group.held_out.last())]);
    }
    cells
}

/// Makes one point of every `per_point` points: their mean, at the last of their steps.
fn means(all: &[LossPoint], per_point: usize) -> Vec<(f64, f64)> {
    let last = |part: &[LossPoint]| part.last().map_or(0.0, |point| point.step as f64);
    all.chunks(per_point).map(|part| (last(part), mean(part))).collect()
}

fn place(point: &LossPoint) -> (f64, f64) {
    (point.step as f64, point.loss)
}

/// A line. If it has few points, each shows its value when the pointer is on it.
fn line(class: &'static str, name: &str, axis: &str, points: Vec<(f64, f64)>) -> Line {
    let title = |p: &(f64, f64)| format!("{name}{axis} {}: {}", number::tick(p.0), number::number(p.1));
    let titles = if points.len() <= MOST_TITLES { points.iter().map(title).collect() } else { Vec::new() };
    Line { class, points, titles }
}

fn drawn(label: &str, axis: &str, frame: Frame, lines: &[Line]) -> Markup {
    let (show_x, show_y): (Show, Show) = (number::tick, number::tick);
    let name_y = "loss a label token";
    line_plot(
        &LinePlot { label, frame, is_log: false, has_linear_y: true, show_x, show_y, name_x: axis, name_y },
        lines,
    )
}
