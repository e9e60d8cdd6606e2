//! The loss over steps.

use super::Section;
use crate::Report;
use crate::chart::{Frame, Line, LinePlot, line_plot, numbers, partly, spread, table};
use dflop_types::number;
use maud::html;

/// Points of the curve, drawn at most.
const MOST_POINTS: usize = 1_000;
/// Rows of the table below the plot.
const MOST_ROWS: usize = 200;

/// The section.
pub(super) fn section(report: &Report) -> Option<Section> {
    let all = &report.loss;
    if all.is_empty() {
        return None;
    }
    let points: Vec<(f64, f64)> =
        spread(all.len(), MOST_POINTS).into_iter().map(|i| (all[i].0 as f64, all[i].1)).collect();
    let num_broken = all.iter().filter(|(_, loss)| !loss.is_finite()).count() as u64;
    let (first, last) = (all[0], all[all.len() - 1]);
    let titles = if points.len() <= 60 {
        points.iter().map(|p| format!("step {}: {}", number::tick(p.0), number::number(p.1))).collect()
    } else {
        Vec::new()
    };
    let label = format!(
        "Loss over steps, from {} at step {} to {} at step {}.",
        number::number(first.1),
        first.0,
        number::number(last.1),
        last.0
    );
    let plot = LinePlot {
        label: &label,
        frame: Frame { width: 760.0, height: 220.0, ..Frame::small() },
        is_log: false,
        show_x: number::tick,
        show_y: number::tick,
        name_x: "step",
        name_y: "loss a label token",
    };
    let rows: Vec<Vec<String>> = spread(all.len(), MOST_ROWS)
        .into_iter()
        .map(|i| vec![all[i].0.to_string(), number::number(all[i].1)])
        .collect();
    let body = html! {
        p { (label) @if num_broken > 0 { " " strong { "Not finite at " (number::counted(num_broken, "step")) "." } } }
        figure class="wide" { div class="scroll" tabindex="0" role="region" aria-label="Loss over steps" { (line_plot(&plot, &[Line { class: "m-loss", points: points.clone(), titles }])) } }
        @if let Some(text) = partly(points.len(), all.len(), "step") { p class="note" { (text) } }
        details {
            summary { "Table: loss by step" }
            (table("Loss by step", &[numbers("step"), numbers("loss")], &rows))
            @if let Some(text) = partly(rows.len(), all.len(), "step") { p class="note" { (text) } }
        }
    };
    Some(Section { id: "loss", name: "Loss", body })
}
