//! Predicted against measured time by size of sample, and memory by part.

use super::{Section, plotted};
use crate::chart::{
    Bar, BarPart, Frame, Line, LinePlot, bars, legend, line_plot, names, numbers, table, words,
};
use crate::{Report, ShapeError, StepView};
use dflop_types::number;
use maud::{Markup, html};

/// The most bins that the sentence names.
const MOST_NAMED: usize = 3;
/// A component that takes this much more or less than predicted, whatever the size of a sample, is named.
const ALIKE_MIN: f64 = 0.1;
/// The most points of a drawn line.
const MOST_POINTS: usize = 32;
/// The fewest samples of a drawn point: the mean of one or two says more of these than of their size.
const SAMPLES_MIN: u64 = 8;
/// Colours of the parts of memory.
const CLASSES: [&str; 10] = ["g-0", "g-1", "g-2", "g-3", "g-4", "g-5", "g-6", "g-7", "g-8", "g-9"];

const COMPONENTS: [(bool, &str); 2] = [(true, "encoder"), (false, "LLM")];

/// Error by component and shape bin.
pub(super) fn section(report: &Report) -> Option<Section> {
    if report.shapes.is_empty() {
        return None;
    }
    let of = |is_encoder: bool| {
        report.shapes.iter().filter(|row| row.is_encoder == is_encoder).collect::<Vec<_>>()
    };
    let how = report.steps.first().map_or("measured", StepView::how);
    let body = html! {
        p { (worst(&report.shapes)) }
        p {
            "An action holds samples of several sizes. Each sample gets a part of the action's predicted time, and of its " (how) " time, by its number of tokens. "
            "The lines and \"error\" in the tables compare the two; below zero the samples took longer than predicted. "
            "\"Samples alone\" is estimated by a regression over all actions: how much longer samples of this size take, without the effect of slow ranks and of the "
            "other samples in the same action. Later steps count more; the standard error stands beside it. A point of the lines stands for at least "
            (SAMPLES_MIN) " samples of neighbouring sizes; the tables have each size."
        }
        div class="row" { @for (is_encoder, name) in COMPONENTS { (drawn(name, &of(is_encoder), how)) } }
        @for (is_encoder, name) in COMPONENTS { (rows(name, &of(is_encoder), how)) }
    };
    Some(Section { id: "shapes", name: "Error by size of sample", body })
}

fn range(row: &ShapeError) -> String {
    let of = |(first, last): (u64, u64)| {
        if first == last {
            number::thousands(first)
        } else {
            format!("{} to {}", number::thousands(first), number::thousands(last))
        }
    };
    of((row.tokens_min, row.tokens_max))
}

/// The worst bins in a sentence.
fn worst(rows: &[ShapeError]) -> Markup {
    let mut sure: Vec<&ShapeError> = rows.iter().filter(|row| row.is_sure()).collect();
    sure.sort_by(|a, b| b.excess.abs().total_cmp(&a.excess.abs()));
    let told = |row: &&ShapeError| {
        format!(
            "{} tokens in the {} ({}, \u{b1} {}; {})",
            range(row),
            if row.is_encoder { "encoder" } else { "LLM" },
            number::signed_percent(row.excess),
            number::percent(2.0 * row.excess_error),
            number::counted(row.num_samples, "sample")
        )
    };
    let named: Vec<String> = sure.iter().take(MOST_NAMED).map(told).collect();
    let alike: Vec<String> =
        COMPONENTS.iter().filter_map(|&(is_encoder, name)| alike(rows, is_encoder, name)).collect();
    html! {
        @if !alike.is_empty() { "Samples of all sizes take " (alike.join(" and ")) ". " }
        @if named.is_empty() && alike.is_empty() {
            "No size of sample parts from its prediction by more than chance."
        } @else if named.is_empty() {
            "No size parts from the others by more than chance. "
        } @else {
            @if alike.is_empty() { "Furthest from their predicted time" } @else { "Furthest from that" }
            ": samples of " strong { (named.join("; of ")) }
            @if sure.len() > MOST_NAMED { ", and " (number::counted((sure.len() - MOST_NAMED) as u64, "other size")) }
            ". "
        }
        @if !named.is_empty() || !alike.is_empty() {
            code { "dflop profile model --from-run" } " renews the profile where all sizes part alike, " code { "dflop profile model" } " measures again."
        }
    }
}

/// What all samples of a component take of their prediction, where that is far from 1.
fn alike(rows: &[ShapeError], is_encoder: bool, name: &str) -> Option<String> {
    let of = || rows.iter().filter(|row| row.is_encoder == is_encoder);
    let ratio = of().map(|row| row.measured_ms).sum::<f64>() / of().map(|row| row.predicted_ms).sum::<f64>();
    let is_far = ratio.is_finite() && ratio > 0.0 && (ratio - 1.0).abs() >= ALIKE_MIN;
    is_far.then(|| format!("{} times the predicted time in the {name}", number::number(ratio)))
}

/// Neighbouring bins together, so that each point is of enough samples and there are few of them.
fn grouped(rows: &[&ShapeError]) -> Vec<ShapeError> {
    let total: u64 = rows.iter().map(|row| row.num_samples).sum();
    let enough = SAMPLES_MIN.max(total.div_ceil(MOST_POINTS as u64));
    let mut groups: Vec<ShapeError> = Vec::new();
    for row in rows {
        match groups.last_mut().filter(|group| group.num_samples < enough) {
            Some(group) => group.join(row),
            None => groups.push(**row),
        }
    }
    // What is left at the end is too few for a point of its own.
    if let Some(last) = groups.pop_if(|last| last.num_samples < SAMPLES_MIN) {
        match groups.last_mut() {
            Some(group) => group.join(&last),
            None => groups.push(last),
        }
    }
    groups
}

/// A plot of the time for a thousand tokens over the number of tokens of a sample.
fn drawn(name: &str, rows: &[&ShapeError], how: &str) -> Markup {
    let known: Vec<&ShapeError> =
        rows.iter().copied().filter(|row| row.num_tokens > 0 && row.num_samples > 0).collect();
    let known = grouped(&known);
    if known.len() < 2 {
        return html! {};
    }
    let line = |class, what: &str, ms: fn(&ShapeError) -> f64| {
        let point = |row: &ShapeError| {
            (row.num_tokens as f64 / row.num_samples as f64, 1e3 * ms(row) / row.num_tokens as f64)
        };
        let points: Vec<(f64, f64)> = known.iter().map(point).collect();
        let title = |(row, point): (&ShapeError, &(f64, f64))| {
            let samples = number::counted(row.num_samples, "sample");
            format!("{} tokens, {samples}, {what}: {} for 1,000 tokens", range(row), number::ms(point.1))
        };
        Line { class, titles: known.iter().zip(&points).map(title).collect(), points }
    };
    let lines =
        [line("a-blind", "predicted", |row| row.predicted_ms), line("a-aware", how, |row| row.measured_ms)];
    let label =
        format!("Time for a thousand tokens in the {name} over the tokens of a sample, predicted and {how}.");
    let plot = LinePlot {
        label: &label,
        frame: Frame::small(),
        is_log: true,
        has_linear_y: true,
        show_x: number::compact,
        show_y: number::tick,
        name_x: "tokens a sample, log scale",
        name_y: "ms for 1,000 tokens",
    };
    let heading = format!("Time in the {name} by size of sample");
    plotted(&heading, &line_plot(&plot, &lines), &legend([("a-blind", "predicted"), ("a-aware", how)]))
}

fn rows(name: &str, rows: &[&ShapeError], how: &str) -> Markup {
    let cells = |row: &&ShapeError| {
        let segments = match row.segments {
            (0, 0) => number::NONE.to_owned(),
            (least, most) if least == most => number::thousands(least),
            (least, most) => format!("{} to {}", number::thousands(least), number::thousands(most)),
        };
        vec![
            range(row),
            segments,
            number::thousands(row.num_samples),
            number::thousands(row.num_actions),
            number::ms(row.predicted_ms),
            number::ms(row.measured_ms),
            number::signed_percent(row.error()),
            number::signed_percent(row.excess),
            number::percent(row.excess_error),
            if row.is_sure() { "yes" } else { "" }.to_owned(),
        ]
    };
    let columns = [
        names("tokens"),
        numbers("tiles or frames"),
        numbers("samples"),
        numbers("actions"),
        numbers("predicted"),
        numbers(how),
        numbers("error"),
        numbers("samples alone"),
        numbers("standard error"),
        words("beyond chance"),
    ];
    let caption = format!("Predicted and {how} time in the {name} by size of sample");
    html! {
        @if !rows.is_empty() {
            details { summary { "Table: " (caption) } (table(&caption, &columns, &rows.iter().map(cells).collect::<Vec<_>>())) }
        }
    }
}

/// Peak memory of each kind of rank by part, and what was measured.
pub(super) fn memory(report: &Report) -> Option<Section> {
    if report.memory.is_empty() {
        return None;
    }
    let mut parts: Vec<&str> = Vec::new();
    for (name, bytes) in report.memory.iter().flat_map(|rank| &rank.parts) {
        if *bytes > 0 && !parts.contains(&name.as_str()) {
            parts.push(name);
        }
    }
    let class =
        |name: &str| CLASSES[parts.iter().position(|part| *part == name).unwrap_or(0) % CLASSES.len()];
    let largest = report.memory.iter().map(|rank| rank.predicted_bytes).max().unwrap_or(0);
    let (unit, unit_bytes) = if largest < 4 << 30 { ("MiB", 1 << 20) } else { ("GiB", 1 << 30) };
    let in_units = |bytes: u64| bytes as f64 / f64::from(unit_bytes);
    let bar = |rank: &crate::RankBytes| Bar {
        name: rank.name.clone(),
        is_predicted: false,
        parts: rank
            .parts
            .iter()
            .filter(|(_, bytes)| *bytes > 0)
            .map(|(name, bytes)| BarPart {
                class: class(name),
                value: in_units(*bytes),
                title: format!("{}, {name}: {}", rank.name, number::memory_size(*bytes)),
            })
            .collect(),
        total: number::compact(in_units(rank.predicted_bytes)),
    };
    let drawn: Vec<Bar> = report.memory.iter().map(bar).collect();
    let is_measured = report.memory.iter().any(|rank| rank.measured_tensor_bytes.is_some());
    let rows: Vec<Vec<String>> = report
        .memory
        .iter()
        .map(|rank| {
            let mut row = vec![rank.name.clone(), rank.rank.to_string(), rank.moment.clone()];
            let of =
                |part: &&str| rank.parts.iter().find(|(name, _)| name == part).map_or(0, |(_, bytes)| *bytes);
            row.extend(parts.iter().map(|part| number::memory_size(of(part))));
            row.push(number::memory_size(rank.predicted_tensor_bytes));
            if is_measured {
                let measured = rank.measured_tensor_bytes;
                row.push(measured.map_or_else(|| number::NONE.to_owned(), number::memory_size));
                let error =
                    measured.map(|bytes| (rank.predicted_tensor_bytes as f64 - bytes as f64) / bytes as f64);
                row.push(error.map_or_else(|| number::NONE.to_owned(), number::signed_percent));
            }
            row
        })
        .collect();
    let mut columns = vec![names("ranks"), numbers("rank"), names("fullest in")];
    columns.extend(parts.iter().map(|part| numbers(part)));
    columns.push(numbers("tensors, predicted"));
    if is_measured {
        columns.extend([numbers("tensors, measured"), numbers("error")]);
    }
    let body = html! {
        p {
            "Peak memory of the fullest rank of each kind, as predicted for a step of this run, by what holds it"
            @if is_measured { ", beside what " code { "--measure-memory-step" } " counted in that step. " }
            @else { ". Nothing was measured: " code { "dflop train --measure-memory-step N" } " counts it in step N. " }
        }
        figure class="wide" {
            figcaption { "Predicted peak memory by part" }
            (bars("Predicted peak memory by part, as in the table below.", 760.0, &drawn, number::tick, unit))
            (legend(parts.iter().map(|part| (class(part), *part))))
        }
        (table("Peak memory of the fullest rank of each kind", &columns, &rows))
    };
    Some(Section { id: "memory", name: "Memory by part", body })
}
