//! The model profile as measured curves, and the loss.

use super::{Section, plotted};
use crate::Report;
use crate::chart::{
    Frame, Line, LinePlot, legend, line_plot, numbers, partly, spread, table, table_below, words,
};
use crate::format;
use dflop_types::{MeasuredCurve, MeasuredPoint, ModelProfile};
use maud::{Markup, html};

/// Points of the loss curve, drawn at most.
const MOST_POINTS: usize = 1_000;
/// Modules drawn at most; a sound profile has four.
const MOST_MODULES: usize = 12;
/// Rows of the table below a plot.
const MOST_ROWS: usize = 200;

/// What a module is, in words, and what its size counts.
fn describe(name: &str) -> (&str, &'static str) {
    match name {
        "encoder_embedding" => ("Encoder embedding", "encoder tokens"),
        "encoder_layer" => ("One encoder layer", "encoder tokens"),
        ModelProfile::WINDOW_LAYER => ("One encoder layer with windows", "encoder tokens"),
        "projector" => ("Projector", "encoder tokens"),
        "llm_embedding" => ("LLM embedding", "LLM tokens"),
        "llm_layer" => ("One LLM layer", "LLM tokens"),
        "llm_head" => ("LLM head and loss", "label tokens"),
        other => (other, "tokens"),
    }
}

/// The section.
pub(super) fn section(report: &Report) -> Option<Section> {
    let model = report.model.as_ref()?;
    let curves: Vec<(String, &'static str, &MeasuredCurve)> = model
        .modules
        .iter()
        .take(MOST_MODULES)
        .flat_map(|(name, module)| {
            let (words, unit) = describe(name);
            let words = format::clipped(words, 40);
            let linear = if module.attention.points.is_empty() {
                words.clone()
            } else {
                format!("{words}, without attention")
            };
            [
                (linear, unit, &module.linear),
                (format!("{words}, attention of one segment"), unit, &module.attention),
            ]
        })
        .filter(|(_, _, curve)| !curve.points.is_empty())
        .collect();
    let body = html! {
        @if model.is_estimated {
            p class="note" { strong { "Estimated, not measured:" } " every number here comes from the analytic model." }
        }
        (device(model))
        (legend([("m-forward round", "forward"), ("m-backward round", "backward")]))
        div class="row three" { @for (name, unit, curve) in &curves { (measured(name, unit, curve)) } }
        @if let Some(text) = partly(MOST_MODULES.min(model.modules.len()), model.modules.len(), "module") { p class="note" { (text) } }
        (parameters(model))
    };
    let name = if model.is_estimated { "The model, estimated" } else { "The model, measured" };
    Some(Section { id: "model", name, body })
}

fn device(model: &ModelProfile) -> Markup {
    let d = &model.device;
    let network = match model.network.point_to_point() {
        None => "not measured: transfers are taken as free".to_owned(),
        Some(link) => {
            format!(
                "{} latency, {}/s",
                format::ns(link.latency_ns),
                format::bytes(link.bandwidth_bytes_per_s)
            )
        }
    };
    let device = if d.name.is_empty() { d.kind.clone() } else { format!("{} ({})", d.name, d.kind) };
    let mut facts = vec![
        ("family", model.family.clone()),
        ("device", device),
        ("dtype", d.dtype.clone()),
        ("PyTorch", d.torch.clone()),
        ("layers", format!("{} encoder, {} LLM", model.num_encoder_layers(), model.num_llm_layers())),
        ("links", network),
        ("optimizer", format!("{} for each million parameters", format::ns(model.optimizer_ns_per_million))),
    ];
    if d.num_threads > 0 {
        facts.insert(
            2,
            (
                "threads a rank",
                format!(
                    "{}, beside {}",
                    d.num_threads,
                    format::plural(u64::from(d.num_neighbours), "busy rank")
                ),
            ),
        );
    }
    html! {
        dl class="facts" { @for (name, value) in &facts { @if !value.is_empty() { div { dt { (name) } dd { (value) } } } } }
    }
}

fn measured(name: &str, unit: &str, curve: &MeasuredCurve) -> Markup {
    let points: Vec<&MeasuredPoint> =
        spread(curve.points.len(), MOST_ROWS).into_iter().map(|i| &curve.points[i]).collect();
    let line = |class, what: &str, ns: fn(&MeasuredPoint) -> u64| Line {
        class,
        points: points.iter().map(|p| (p.size as f64, ns(p) as f64 / 1e6)).collect(),
        titles: points
            .iter()
            .map(|p| format!("{what} of {} {unit}: {}", format::count(p.size), format::ns(ns(p))))
            .collect(),
    };
    let lines =
        [line("m-forward", "forward", |p| p.forward_ns), line("m-backward", "backward", |p| p.backward_ns)];
    // Sizes of a grid mostly grow by a factor; a short range is clearer on even axes.
    let (low, high) = (points.first().map_or(1, |p| p.size.max(1)), points.last().map_or(1, |p| p.size));
    let is_log = high / low >= 20;
    let unit_x = if is_log { format!("{unit}, log scale") } else { unit.to_owned() };
    let plot = LinePlot {
        label: &format!("{name}: forward and backward time over {unit}, as in the table below."),
        frame: Frame::third(),
        is_log,
        show_x: format::compact,
        show_y: format::tick,
        name_x: &unit_x,
        name_y: if is_log { "ms, log scale" } else { "ms" },
    };
    let rows: Vec<Vec<String>> = points
        .iter()
        .map(|p| {
            vec![
                format::count(p.size),
                format::ns(p.forward_ns),
                format::ns(p.backward_ns),
                format::ns(p.spread_ns),
                format::bytes(p.activation_bytes),
                format::count(u64::from(p.repeats)),
            ]
        })
        .collect();
    let columns = [
        numbers("tokens"),
        numbers("forward"),
        numbers("backward"),
        numbers("quartile range"),
        numbers("activations"),
        numbers("runs"),
    ];
    plotted(
        name,
        &line_plot(&plot, &lines),
        &html! {
            (table_below(&format!("over {unit}"), &columns, &rows))
            @if let Some(text) = partly(points.len(), curve.points.len(), "point") { p class="note" { (text) } }
        },
    )
}

fn parameters(model: &ModelProfile) -> Markup {
    let rows: Vec<Vec<String>> = model
        .modules
        .iter()
        .take(MOST_MODULES)
        .map(|(name, module)| {
            vec![
                format::clipped(describe(name).0, 40),
                format::count(module.num_parameters),
                format::bytes(module.parameter_bytes),
            ]
        })
        .collect();
    let columns = [words("module"), numbers("parameters"), numbers("bytes")];
    html! { @if !rows.is_empty() { (table("Parameters", &columns, &rows)) } }
}

/// The loss over steps.
pub(super) fn loss(report: &Report) -> Option<Section> {
    let all = &report.loss;
    if all.is_empty() {
        return None;
    }
    let points: Vec<(f64, f64)> =
        spread(all.len(), MOST_POINTS).into_iter().map(|i| (all[i].0 as f64, all[i].1)).collect();
    let num_broken = all.iter().filter(|(_, loss)| !loss.is_finite()).count() as u64;
    let (first, last) = (all[0], all[all.len() - 1]);
    let titles = if points.len() <= 60 {
        points.iter().map(|p| format!("step {}: {}", format::tick(p.0), format::number(p.1))).collect()
    } else {
        Vec::new()
    };
    let label = format!(
        "Loss over steps, from {} at step {} to {} at step {}.",
        format::number(first.1),
        first.0,
        format::number(last.1),
        last.0
    );
    let plot = LinePlot {
        label: &label,
        frame: Frame { width: 1060.0, height: 250.0, ..Frame::small() },
        is_log: false,
        show_x: format::tick,
        show_y: format::tick,
        name_x: "step",
        name_y: "loss a label token",
    };
    let rows: Vec<Vec<String>> = spread(all.len(), MOST_ROWS)
        .into_iter()
        .map(|i| vec![all[i].0.to_string(), format::number(all[i].1)])
        .collect();
    let body = html! {
        p { (label) @if num_broken > 0 { " " strong { "Not finite at " (format::plural(num_broken, "step")) "." } } }
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
