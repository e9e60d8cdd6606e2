//! Every step, one at a time: a timeline with a slider over the steps, drawn by the page's script, and their table.

use super::Section;
use super::encode::{Encoder, RESOLUTIONS, quoted};
use super::times::error_of;
use crate::chart::{lane_name, names, numbers, partly, spread, table, words};
use crate::{Report, StepView};
use dflop_types::{Layout, Timeline, number};
use maud::{Markup, PreEscaped, html};
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// What the section has beside spans and table, at most.
const WORDS_BYTES: usize = 4_000;
/// The most ranks that have a lane.
const MOST_RANKS: u32 = 1_024;
/// The most rows of the table.
const MOST_ROWS: usize = 1_000;

/// A step, and the step of another run on the same samples that is drawn under it.
#[derive(Debug, Clone, Copy)]
struct Item<'a> {
    step: &'a StepView,
    timeline: &'a Timeline,
    other: Option<(&'a StepView, &'a Timeline)>,
}

impl<'a> Item<'a> {
    fn timelines(self) -> impl Iterator<Item = &'a Timeline> {
        [Some(self.timeline), self.other.map(|(_, timeline)| timeline)].into_iter().flatten()
    }
}

/// The names of the two runs, the other first; `None` if there is one.
type Names<'a> = Option<&'a [String; 2]>;

/// The steps whose spans are in the page.
struct Held<'a> {
    steps: Vec<Item<'a>>,
    /// For each step its encoded spans, and those of the other run if there is one.
    texts: Vec<Vec<String>>,
    lists: Vec<String>,
    parts: u64,
    num_all: usize,
}

/// The measured timeline of a step, or else the predicted one. `None` if there are no spans.
fn shown(step: &StepView) -> Option<(&StepView, &Timeline)> {
    let timeline = step.measured.as_ref().or(step.predicted.as_ref())?;
    (!timeline.spans.is_empty()).then_some((step, timeline))
}

/// The number of ranks of the steps, without a limit.
fn all_ranks(steps: &[Item<'_>]) -> u32 {
    let of = |timeline: &Timeline| {
        let known = timeline.spans.iter().map(|s| s.rank.0.saturating_add(1)).max().unwrap_or(0);
        known.max(timeline.num_ranks)
    };
    steps.iter().flat_map(|item| item.timelines()).map(of).max().unwrap_or(0)
}

/// The number of ranks that have a lane.
fn num_ranks(steps: &[Item<'_>]) -> u32 {
    all_ranks(steps).min(MOST_RANKS)
}

/// The steps as finely as `most_bytes` of JSON have room for. If there is no room for all steps, some are taken.
fn held<'a>(all: &[Item<'a>], names: Names<'_>, most_bytes: usize) -> Held<'a> {
    let ranks = num_ranks(all);
    let encoded = |steps: Vec<Item<'a>>, parts: u64| {
        let mut encoder = Encoder::default();
        let mut texts = Vec::with_capacity(steps.len());
        for item in &steps {
            let of_step = item.timelines().map(|timeline| encoder.timeline(timeline, ranks, parts));
            texts.push(of_step.collect::<Vec<String>>());
        }
        let held = Held { steps, texts, lists: encoder.lists, parts, num_all: all.len() };
        let num_bytes = held.json(names).len();
        (held, num_bytes)
    };
    let (mut held, mut num_bytes) = encoded(all.to_vec(), RESOLUTIONS[0]);
    for coarser in RESOLUTIONS.into_iter().skip(1) {
        if num_bytes > most_bytes {
            (held, num_bytes) = encoded(held.steps, coarser);
        }
    }
    while num_bytes > most_bytes && held.steps.len() > 1 {
        // Steps differ in size. So this takes a tenth fewer steps than would fit if all were equal.
        let num = held.steps.len();
        let most = (num * 9 / 10).min(num * (most_bytes / 10 * 9) / num_bytes).max(1);
        (held, num_bytes) = encoded(some_of(&held.steps, most), held.parts);
    }
    if num_bytes > most_bytes {
        held = Held { steps: Vec::new(), texts: Vec::new(), lists: Vec::new(), ..held };
    }
    held
}

/// Some of the steps, evenly spread, among them the last and the slowest: these are the ones that people look for.
fn some_of<'a>(steps: &[Item<'a>], most: usize) -> Vec<Item<'a>> {
    let slowest = (0..steps.len()).max_by_key(|&at| (steps[at].timeline.makespan_ns, std::cmp::Reverse(at)));
    let mut taken = spread(steps.len(), most);
    if let Some(last) = taken.last_mut() {
        *last = steps.len() - 1;
    }
    if let Some((slowest, nearest)) =
        slowest.and_then(|at| Some((at, (0..taken.len()).min_by_key(|&i| taken[i].abs_diff(at))?)))
    {
        taken[nearest] = slowest;
    }
    taken.into_iter().map(|at| steps[at]).collect()
}

impl Held<'_> {
    /// The layouts of the steps, each once. Steps name their lanes by the place of theirs.
    fn layouts(&self) -> Vec<Option<Layout>> {
        let mut layouts = Vec::new();
        for item in &self.steps {
            for step in [Some(item.step), item.other.map(|(step, _)| step)].into_iter().flatten() {
                if !layouts.contains(&step.layout) {
                    layouts.push(step.layout);
                }
            }
        }
        layouts
    }

    /// The names of all lanes in a layout, as JSON.
    fn lane_names(&self, layout: Option<&Layout>) -> String {
        let names: Vec<String> =
            (0..num_ranks(&self.steps)).map(|rank| quoted(&lane_name(rank, layout))).collect();
        format!("[{}]", names.join(","))
    }

    /// The JSON that `viewer.js` reads.
    fn json(&self, names: Names<'_>) -> String {
        let mut text = format!("{{\"parts\":{},\"ranks\":{},", self.parts, num_ranks(&self.steps));
        if let Some([other, own]) = names {
            let _ = write!(text, "\"names\":[{},{}],", quoted(own), quoted(other));
        }
        text.push_str("\"lists\":[");
        let lists: Vec<String> = self.lists.iter().map(|list| quoted(list)).collect();
        text.push_str(&lists.join(","));
        text.push_str("],\"lanes\":[");
        let layouts = self.layouts();
        let names: Vec<String> = layouts.iter().map(|layout| self.lane_names(layout.as_ref())).collect();
        text.push_str(&names.join(","));
        text.push_str("],\"steps\":[");
        for (index, (item, spans)) in self.steps.iter().zip(&self.texts).enumerate() {
            text.push_str(if index == 0 { "" } else { "," });
            let _ = write!(text, "{{\"step\":{},", item.step.step);
            fields(&mut text, item.step, item.timeline, &spans[0], &layouts);
            if let (Some((step, timeline)), Some(spans)) = (item.other, spans.get(1)) {
                text.push_str(",\"other\":{");
                fields(&mut text, step, timeline, spans, &layouts);
                text.push('}');
            }
            text.push('}');
        }
        text.push_str("]}");
        text
    }
}

/// Writes the fields that a step and the step of the other run both have.
fn fields(text: &mut String, step: &StepView, timeline: &Timeline, spans: &str, layouts: &[Option<Layout>]) {
    let lanes = layouts.iter().position(|layout| *layout == step.layout).unwrap_or(0);
    let tail_from = timeline.spans.iter().map(|s| s.end_ns).max().unwrap_or(0);
    let predicted = step.measured.as_ref().and(step.predicted.as_ref()).map_or(0, |p| p.makespan_ns);
    let how = if step.measured.is_some() { step.how() } else { "predicted" };
    let _ = write!(
        text,
        "\"arm\":{},\"how\":\"{how}\",\"ns\":{},\"tail\":{},\"predicted\":{predicted},\"idle\":\"{}\",\"lanes\":{lanes},\"spans\":\"{spans}\"",
        quoted(&step.arm),
        timeline.makespan_ns,
        timeline.makespan_ns.saturating_sub(tail_from),
        number::percent(timeline.bubble_ratio()),
    );
}

/// Whether a step has a timeline to look at.
pub(super) fn holds(report: &Report, number: u64, arm: &str) -> bool {
    report.steps.iter().any(|step| step.step == number && step.arm == arm && shown(step).is_some())
}

/// The steps with spans, each with the other run's step on the same samples.
fn items(report: &Report) -> Vec<Item<'_>> {
    let pairs = report.against.iter().flat_map(|against| &against.pairs);
    let others: BTreeMap<usize, (&StepView, &Timeline)> =
        pairs.filter_map(|pair| Some((pair.index, shown(&pair.other)?))).collect();
    let known = report.steps.iter().enumerate().filter_map(|(index, step)| Some((index, shown(step)?)));
    known
        .map(|(index, (step, timeline))| Item { step, timeline, other: others.get(&index).copied() })
        .collect()
}

/// The section, of at most `most_bytes`; nothing if no step has spans.
pub(super) fn section(report: &Report, most_bytes: usize) -> Option<Section> {
    let all = items(report);
    if all.is_empty() {
        return None;
    }
    let summary = summary(&all);
    let names = report.against.as_ref().map(|against| &against.names);
    let held = held(&all, names, most_bytes.saturating_sub(summary.0.len() + WORDS_BYTES));
    let body = html! {
        p {
            "Each step as " (how_steps_came(&all)) @if num_ranks(&held.steps) > 1 { ", a lane a rank" } ". The bars are the steps by their time: click on one, or use the slider. Drag over the "
            "timeline to look at a part of it, and point at a block for its times. "
            span class="note" {
                "Keys on the timeline: + and - zoom, left and right move, 0 shows all, page up and page down go to the step before and after."
            }
        }
        noscript { p class="note" { "The timelines are drawn by a script of this page; without it the table below has each step's numbers." } }
        @if !held.steps.is_empty() { (viewer(&held, names)) }
        (left_out(&held))
        (summary)
    };
    Some(Section { id: "steps", name: "Step by step", body })
}

/// What the steps show: those of a plan alone never ran.
fn how_steps_came(items: &[Item<'_>]) -> &'static str {
    if items.iter().all(|item| item.step.measured.is_none()) {
        "the simulator predicts it"
    } else if items.iter().all(|item| item.step.is_rehearsed) {
        "it was rehearsed"
    } else {
        "it ran"
    }
}

fn viewer(held: &Held<'_>, names: Names<'_>) -> Markup {
    let last = (held.steps.len() - 1).to_string();
    html! {
        div class="viewer" id="viewer" hidden {
            div class="controls" {
                button type="button" data-do="before" aria-label="the step before" { "\u{2039}" }
                label class="number" { "step " input type="number" id="viewer-number" min="0" step="1"; }
                input type="range" id="viewer-step" aria-label="step" min="0" max=(last) value="0" step="1";
                button type="button" data-do="after" aria-label="the next step" { "\u{203a}" }
                button type="button" data-do="slowest" { "slowest" }
                span class="gap" {}
                button type="button" data-do="in" aria-label="zoom in" { "+" }
                button type="button" data-do="out" aria-label="zoom out" { "\u{2212}" }
                button type="button" data-do="all" { "whole step" }
            }
            canvas id="viewer-strip" aria-hidden="true" {}
            p class="reading" id="viewer-reading" role="status" {}
            canvas id="viewer-canvas" tabindex="0" role="img" aria-label="timeline" {}
        }
        script type="application/json" id="viewer-data" { (PreEscaped(held.json(names))) }
    }
}

fn left_out(held: &Held<'_>) -> Markup {
    let mut said: Vec<String> = partly(held.steps.len(), held.num_all, "step").into_iter().collect();
    let (lanes, ranks) = (num_ranks(&held.steps), all_ranks(&held.steps));
    said.extend((lanes < ranks).then(|| {
        let ranks = number::counted(ranks.into(), "rank");
        format!("showing the first {} of {ranks}", number::thousands(lanes.into()))
    }));
    if held.parts < RESOLUTIONS[0] {
        said.push(format!("times of spans are rounded to 1/{} of their step", number::thousands(held.parts)));
    }
    html! { @if !said.is_empty() { p class="note" { (said.join("; ")) } } }
}

/// A table of the steps in numbers.
fn summary(all: &[Item<'_>]) -> Markup {
    let rows: Vec<Vec<String>> = spread(all.len(), MOST_ROWS)
        .into_iter()
        .map(|at| {
            let Item { step, timeline, .. } = all[at];
            let both = step.measured.as_ref().zip(step.predicted.as_ref());
            let none = || number::NONE.to_owned();
            let ranks = f64::from(timeline.num_ranks.max(1));
            let idle = timeline.idle_ns;
            let mut row = vec![
                number::thousands(step.step),
                step.arm.clone(),
                if step.measured.is_some() { step.how() } else { "predicted" }.to_owned(),
                number::ns(timeline.makespan_ns),
                both.map_or_else(none, |(_, predicted)| number::ns(predicted.makespan_ns)),
                both.and_then(|(m, p)| error_of(p, m)).map_or_else(none, number::signed_percent),
                number::percent(timeline.bubble_ratio()),
            ];
            let by_cause = [idle.ramp, idle.imbalance, idle.transfer];
            row.extend(by_cause.map(|ns| number::ms(ns as f64 / ranks / 1e6)));
            row
        })
        .collect();
    let columns = [
        numbers("step"),
        names("arm"),
        words("how"),
        numbers("makespan"),
        numbers("predicted"),
        numbers("off"),
        numbers("idle"),
        numbers("ramp a rank"),
        numbers("imbalance"),
        numbers("transfer"),
    ];
    html! {
        details {
            summary { "Table: the steps in numbers" }
            (table("The steps in numbers", &columns, &rows))
            @if let Some(text) = partly(rows.len(), all.len(), "step") { p class="note" { (text) } }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{EventView, GroupLoss, LossPoint};
    use dflop_types::{Rank, Span};

    fn steps(num_steps: u64, num_ranks: u32, num_microbatches: u32) -> Vec<StepView> {
        let step = |step: u64| {
            let mut spans = Vec::new();
            for rank in 0..num_ranks {
                let mut at = 1_000 * u64::from(rank) + step * 17 % 911;
                for action in 0..2 * num_microbatches {
                    let kind = if action % 2 == 0 { "F" } else { "B" };
                    let name = format!("{}{kind}{}", rank % 4, action / 2);
                    let duration = 90_000 + (step * 7_919 + u64::from(rank * 31 + action) * 104_729) % 50_000;
                    spans.push(Span {
                        rank: Rank(rank),
                        action: name.parse().unwrap(),
                        start_ns: at,
                        end_ns: at + duration,
                    });
                    at += duration + if action % 5 == 0 { 20_000 } else { 0 };
                }
            }
            let makespan_ns = spans.iter().map(|s| s.end_ns).max().unwrap() + 50_000;
            let measured = Timeline { num_ranks, makespan_ns, spans, ..Timeline::default() };
            StepView { step, arm: "aware".to_owned(), measured: Some(measured), ..StepView::default() }
        };
        (0..num_steps).map(step).collect()
    }

    #[test]
    fn steps_of_a_plan_alone_are_not_said_to_have_run() {
        let words = |change: fn(StepView) -> StepView| {
            let steps = steps(2, 2, 2).into_iter().map(change).collect();
            crate::render(&Report { steps, ..Report::default() })
        };
        assert!(words(|step| step).contains("Each step as it ran, a lane a rank"));
        let predicted = |step: StepView| StepView { predicted: step.measured, measured: None, ..step };
        assert!(words(predicted).contains("Each step as the simulator predicts it, a lane a rank"));
        let rehearsed = |step| StepView { is_rehearsed: true, ..step };
        assert!(words(rehearsed).contains("Each step as it was rehearsed"));
    }

    /// A thousand steps of 64 ranks, 16 actions each, with all that a run has beside them: every step is held, in 5 MB.
    #[test]
    fn a_thousand_steps_of_64_ranks_are_a_page_of_five_megabytes() {
        let page = crate::render(&long_run(1_000, 64));
        assert!(page.len() < 5_000_000, "{} bytes", page.len());
        assert_eq!(page.matches("\"spans\":\"").count(), 1_000);
    }

    /// Whatever a run has, the page is no larger: spans get what the rest leaves. The slowest step is held, and the last one.
    #[test]
    fn a_longer_run_is_a_page_of_five_megabytes_too() {
        let report = long_run(6_000, 64);
        let page = crate::render(&report);
        assert!(page.len() < 5_000_000, "{} bytes", page.len());
        let held = page.matches("\"spans\":\"").count();
        assert!(
            held > 1_000
                && page.contains(&format!("showing {} of 6,000 steps", number::thousands(held as u64)))
        );
        let makespan_ns = |step: &StepView| step.measured.as_ref().unwrap().makespan_ns;
        let slowest =
            report.steps.iter().max_by_key(|step| (makespan_ns(step), std::cmp::Reverse(step.step)));
        let slowest = slowest.unwrap();
        assert!(page.contains("{\"step\":5999,\"arm\":"));
        assert!(page.contains(&format!(
            "{{\"step\":{},\"arm\":\"aware\",\"how\":\"measured\",\"ns\":{}",
            slowest.step,
            makespan_ns(slowest)
        )));
    }

    /// A run as long as asked, with predictions, losses by kind and source, and events, as the command line gives them.
    fn long_run(num_steps: u64, num_ranks: u32) -> Report {
        let mut steps = steps(num_steps, num_ranks, 8);
        for step in &mut steps {
            step.predicted.clone_from(&step.measured);
        }
        let losses = || (0..num_steps).map(|step| (step, 9.0 / (1.0 + step as f64 / 50.0)));
        let point = |(step, loss)| LossPoint { step, loss, label_tokens: 1_000 };
        let group = |name: &str| GroupLoss {
            name: name.to_owned(),
            trained: losses().map(point).collect(),
            held_out: losses().step_by(100).map(point).collect(),
        };
        let event = |step| EventView {
            step,
            is_alarm: step % 96 == 0,
            words: "the correction of schedules saves 1.00 ms a step and costs 0.40 ms: it stays on"
                .to_owned(),
        };
        Report {
            steps,
            loss: losses().collect(),
            held_out: losses().step_by(100).map(point).collect(),
            loss_by_kind: ["text", "image", "video", "audio", "mixed"].map(group).into(),
            loss_by_source: (0..20).map(|number| group(&format!("source-{number}.jsonl"))).collect(),
            events: (0..num_steps).step_by(32).map(event).collect(),
            ..Report::default()
        }
    }

    #[test]
    fn what_has_no_room_is_left_out_evenly_and_said() {
        let report = Report { steps: steps(40, 8, 8), ..Report::default() };
        let all = items(&report);
        let whole = held(&all, None, usize::MAX);
        assert_eq!((whole.steps.len(), whole.parts), (40, RESOLUTIONS[0]));
        assert_eq!(left_out(&whole).into_string(), "");
        let part = held(&all, None, 8_000);
        let shown: Vec<u64> = part.steps.iter().map(|item| item.step.step).collect();
        assert!(
            shown.len() > 5 && shown.len() < 40 && shown[0] == 0 && shown[shown.len() - 1] > 30,
            "{shown:?}"
        );
        assert!(part.json(None).len() < 9_000);
        let said = left_out(&part).into_string();
        assert!(said.contains("of 40 steps; times of spans are rounded to 1/2,048 of their step"), "{said}");
        assert!(held(&all, None, 10).steps.is_empty());
    }
}
