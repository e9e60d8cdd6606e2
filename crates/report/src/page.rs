//! The page: its sections, in the order in which a reader asks.

mod against;
mod data;
mod encode;
mod links;
mod loss;
mod model;
mod path;
mod plan;
mod price;
mod shapes;
mod steps;
mod times;
mod viewer;

use crate::Report;
use crate::chart::{table, words};
use dflop_types::{MadeFrom, number};
use maud::{DOCTYPE, Markup, PreEscaped, html};

/// The most bytes of a page, as long as warnings and facts are few. What the other sections leave is for the spans of the steps.
const MOST_BYTES: usize = 5_000_000;
/// Of these, what stands around the sections: heading, list of contents, the drawings' pattern, warnings.
const AROUND_BYTES: usize = 30_000;
const STYLE: &str = include_str!("../assets/style.css");
const SCRIPT: &str = include_str!("../assets/page.js");
const COST: &str = include_str!("../assets/cost.js");
const VIEWER: &str = include_str!("../assets/viewer.js");

/// One part of the page: its anchor, its name in the list of contents, and what it shows.
pub(crate) struct Section {
    id: &'static str,
    name: &'static str,
    body: Markup,
}

/// The whole page.
pub(crate) fn page(report: &Report) -> Markup {
    let mut before = against::sections(report);
    before.extend(vec_of([steps::one_batch_twice(report), steps::idle(report)]));
    let after = vec_of([
        path::slow_steps(report),
        path::changes(report),
        times::pairs(report),
        times::prediction(report),
        shapes::section(report),
        plan::section(report),
        price::section(report),
        shapes::memory(report),
        data::section(report),
        model::section(report),
        loss::section(report),
        warnings(report),
        provenance(report),
    ]);
    let others: usize = before.iter().chain(&after).map(|section| section.body.0.len()).sum();
    let around = AROUND_BYTES + [STYLE, SCRIPT, COST, VIEWER].map(str::len).iter().sum::<usize>();
    let steps = viewer::section(report, MOST_BYTES.saturating_sub(others + around));
    let sections: Vec<Section> = before.into_iter().chain(steps).chain(after).collect();
    let title = if report.title.is_empty() { "dflop report" } else { report.title.as_str() };
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                meta name="generator" content={ "dflop " (env!("CARGO_PKG_VERSION")) };
                title { (title) }
                style { (PreEscaped(STYLE)) }
            }
            body {
                (patterns())
                a class="skip" href="#main" { "Skip to the content" }
                header {
                    h1 { (title) }
                    p class="headline" { (headline(report)) }
                    (tiles(report))
                    @if !report.warnings.is_empty() {
                        p class="note" { a href="#warnings" { (number::counted(report.warnings.len() as u64, "warning")) } " on what these numbers leave out." }
                    }
                }
                @if sections.len() > 1 {
                    nav aria-label="Contents" {
                        ul { @for section in &sections { li { a href={ "#" (section.id) } { (section.name) } } } }
                    }
                }
                main id="main" {
                    @for section in &sections {
                        section id=(section.id) aria-labelledby={ (section.id) "-name" } {
                            h2 id={ (section.id) "-name" } { (section.name) }
                            (section.body)
                        }
                    }
                }
                footer { p { "Made by dflop " (env!("CARGO_PKG_VERSION")) ". This file needs no network and no other file." } }
                script {
                    (PreEscaped(SCRIPT))
                    @if sections.iter().any(|section| section.id == "cost") { (PreEscaped(COST)) }
                    @if sections.iter().any(|section| section.id == "steps") { (PreEscaped(VIEWER)) }
                }
            }
        }
    }
}

fn vec_of<const N: usize>(sections: [Option<Section>; N]) -> Vec<Section> {
    sections.into_iter().flatten().collect()
}

/// A sentence as the command line writes it: what stands in backticks is a name.
pub(crate) fn marked(sentence: &str) -> Markup {
    let parts: Vec<&str> = sentence.split('`').collect();
    // One backtick too many is no mark.
    if parts.len().is_multiple_of(2) {
        return html! { (sentence) };
    }
    html! {
        @for (at, part) in parts.into_iter().enumerate() {
            @if at % 2 == 1 { code { (part) } } @else { (part) }
        }
    }
}

/// The pattern of bubbles. The page has it once, and all drawings use it.
fn patterns() -> Markup {
    html! {
        svg class="patterns" width="0" height="0" aria-hidden="true" focusable="false" {
            defs {
                pattern id="hatched" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)" {
                    rect.ground width="7" height="7" {}
                    line.hatch x1="0" y1="0" x2="0" y2="7" {}
                }
            }
        }
    }
}

/// The one sentence for people who read no further. If something was measured, it begins with the measured number.
fn headline(report: &Report) -> Markup {
    if let Some(c) = &report.comparison {
        let interval = format!("{} to {}", number::times(c.ratio_low), number::times(c.ratio_high));
        let pairs = number::counted(c.pairs.len() as u64, "pair");
        if !c.ratio.is_finite() {
            return html! { "The ratio of the step times is not known." };
        }
        if c.ratio_low <= 1.0 && c.ratio_high >= 1.0 {
            return html! {
                "No difference measured between data-aware steps (" (c.ours) ") and the fastest baseline (" (c.baseline) "): "
                strong { (number::times(c.ratio)) } " (95\u{a0}% interval " (interval) ", " (pairs) "), "
                (number::ms(c.step_ms_ours)) " against " (number::ms(c.step_ms_baseline)) "."
            };
        }
        return html! {
            "Data-aware steps (" (c.ours) ") are " strong { (number::times(c.ratio)) " as fast" } " as the fastest baseline ("
            (c.baseline) "): " (number::ms(c.step_ms_ours)) " a step against " (number::ms(c.step_ms_baseline))
            " (95\u{a0}% interval " (interval) ", " (pairs) ")."
        };
    }
    if let Some(measured) = &report.measured {
        let predicted = measured.over_predicted_median;
        if measured.is_rehearsed {
            return html! {
                strong { "Rehearsed:" } " nothing was computed, each action took its predicted time. A step took "
                strong { (number::ms(measured.step_ms_median)) } " (median of "
                (number::counted(measured.num_steps, "rehearsed step")) "), idle " (number::percent(measured.idle_ratio))
                ", " (number::times(predicted)) " the time that was simulated."
            };
        }
        return html! {
            "A step took " strong { (number::ms(measured.step_ms_median)) } " (median of "
            (number::counted(measured.num_steps, "measured step")) "), idle " (number::percent(measured.idle_ratio)) ", "
            (number::times(predicted)) " the time that was predicted."
        };
    }
    if let Some(plan) = &report.plan {
        return plan::sentence(plan);
    }
    if let Some(data) = &report.data {
        return html! {
            strong { (number::counted(data.samples.len() as u64, "sample")) } " measured by the shape rule of " (data.family) "."
        };
    }
    if let Some(model) = &report.model {
        let how = if model.is_estimated { " estimated for " } else { " measured on " };
        return html! { strong { (model.family) } (how) (model.device.name) "." };
    }
    if !report.steps.is_empty() {
        return html! { strong { (number::counted(report.steps.len() as u64, "step")) } ", no comparison of arms." };
    }
    html! { "There is nothing to show: no steps, plan or profile was given." }
}

fn tiles(report: &Report) -> Markup {
    let Some(c) = &report.comparison else { return html! {} };
    let tile = |name: &str, value: String, more: String| {
        html! { div { dt { (name) } dd { span class="value" { (value) } span class="more" { (more) } } } }
    };
    html! {
        dl class="tiles" {
            (tile(&format!("step, {}", c.baseline), number::ms(c.step_ms_baseline), format!("idle {}", number::percent(c.idle_ratio_baseline))))
            (tile(&format!("step, {}", c.ours), number::ms(c.step_ms_ours), format!("idle {}", number::percent(c.idle_ratio_ours))))
            (tile("baseline over ours", number::times(c.ratio), format!("{} to {}", number::times(c.ratio_low), number::times(c.ratio_high))))
            (tile("prediction error, median", number::percent(c.prediction_error_median), format!("95th percentile {}", number::percent(c.prediction_error_p95))))
            @if let (Some(median), Some(p95)) = (c.corrected_error_median, c.corrected_error_p95) {
                (tile("corrected error, median", number::percent(median), format!("95th percentile {}", number::percent(p95))))
            }
        }
    }
}

fn warnings(report: &Report) -> Option<Section> {
    if report.warnings.is_empty() {
        return None;
    }
    let body = html! {
        p { "Nothing is extrapolated, skipped or dropped in silence. This run did:" }
        ul class="warnings" { @for warning in &report.warnings { li { (warning) } } }
    };
    Some(Section { id: "warnings", name: "Warnings", body })
}

fn provenance(report: &Report) -> Option<Section> {
    let sources: [(&str, Option<&MadeFrom>); 3] = [
        ("plan", report.plan.as_ref().map(|p| &p.made_from)),
        ("data profile", report.data.as_ref().map(|p| &p.made_from)),
        ("model profile", report.model.as_ref().map(|p| &p.made_from)),
    ];
    let hashes: Vec<Vec<String>> = sources
        .iter()
        .filter_map(|(name, made_from)| made_from.map(|m| (name, m)))
        .flat_map(|(name, made_from)| {
            made_from.iter().map(move |(of, hash)| vec![(*name).to_owned(), of.clone(), hash.clone()])
        })
        .collect();
    if report.facts.is_empty() && hashes.is_empty() {
        return None;
    }
    let body = html! {
        @if !report.facts.is_empty() {
            dl class="facts" {
                @for (name, value) in &report.facts { div { dt { (name) } dd { (value) } } }
            }
        }
        @if !hashes.is_empty() {
            div class="hashes" { (table("What each part was made from", &[words("part"), words("made from"), words("hash")], &hashes)) }
        }
    };
    Some(Section { id: "provenance", name: "Where this comes from", body })
}

/// A drawing with its heading above. `below` is for example the note that says what it leaves out.
pub(crate) fn plotted(name: &str, drawing: &Markup, below: &Markup) -> Markup {
    html! { figure { figcaption { (name) } (drawing) (below) } }
}

/// "showing the first 200 of 1,000 steps", or nothing.
pub(crate) fn first_of(shown: usize, total: usize, noun: &str) -> Markup {
    html! {
        @if shown < total {
            p class="note" { "showing the first " (number::thousands(shown as u64)) " of " (number::counted(total as u64, noun)) }
        }
    }
}
