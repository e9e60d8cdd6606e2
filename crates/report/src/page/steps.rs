//! Steps as timelines: one global batch twice, and why ranks were idle.

use super::Section;
use super::times::error_of;
use crate::arm::{arm_class, arm_name};
use crate::chart::{
    Bar, BarPart, Lanes, TimelineView, bars, legend, names, numbers, partly, table, table_below, words,
};
use crate::{Report, StepView};
use dflop_types::{ActionKind, Timeline, clipped, number};
use maud::{Markup, html};

const WIDTH: f64 = 1060.0;
/// The most letters of an arm's name beside a bar. The names of our own arms are no longer.
const MOST_ARM: usize = 14;

/// The steps shown as timelines.
struct Shown<'a> {
    steps: Vec<&'a StepView>,
    /// Whether the steps ran the same global batch.
    is_same_batch: bool,
    /// How these steps were chosen, in words.
    choice: String,
}

fn best_timeline(step: &StepView) -> Option<&Timeline> {
    step.measured.as_ref().or(step.predicted.as_ref())
}

/// The pair of steps whose ratio is nearest to the median. Without pairs, the step with the median makespan.
fn shown(report: &Report) -> Option<Shown<'_>> {
    let of = |arm: &str| {
        report.steps.iter().filter(|s| s.arm == arm && best_timeline(s).is_some()).collect::<Vec<_>>()
    };
    let compared = report.comparison.as_ref().map(|c| (c.baseline.as_str(), c.ours.as_str()));
    let (blind, aware) = compared.unwrap_or(("blind", "aware"));
    let (blind, aware) = (of(blind), of(aware));
    let mut aware_by_step: Vec<&StepView> = aware.clone();
    aware_by_step.sort_by_key(|s| s.step);
    let same: Vec<(&StepView, &StepView)> = blind
        .iter()
        .filter_map(|b| {
            let at = aware_by_step.binary_search_by_key(&b.step, |s| s.step).ok()?;
            Some((*b, aware_by_step[at]))
        })
        .collect();
    let is_same_batch = !same.is_empty();
    let mut pairs = if is_same_batch { same } else { blind.into_iter().zip(aware).collect() };
    // Pairs with a measurement on both sides come before those that are predicted.
    if pairs.iter().any(|(b, a)| b.measured.is_some() && a.measured.is_some()) {
        pairs.retain(|(b, a)| b.measured.is_some() && a.measured.is_some());
    }
    let makespan = |step: &StepView| best_timeline(step).map_or(0.0, |t| t.makespan_ns as f64);
    if !pairs.is_empty() {
        let ratio = |pair: &(&StepView, &StepView)| makespan(pair.0) / makespan(pair.1);
        let mut order: Vec<usize> = (0..pairs.len()).collect();
        order.sort_by(|&a, &b| ratio(&pairs[a]).total_cmp(&ratio(&pairs[b])));
        let pair = pairs[order[(order.len() - 1) / 2]];
        let choice = partly(1, pairs.len(), "pair")
            .map_or(String::new(), |text| text + ": the one with the median ratio");
        return Some(Shown { steps: vec![pair.0, pair.1], is_same_batch, choice });
    }
    let mut steps: Vec<&StepView> = report.steps.iter().filter(|s| best_timeline(s).is_some()).collect();
    steps.sort_by(|a, b| makespan(a).total_cmp(&makespan(b)));
    let step = *steps.get(steps.len().saturating_sub(1) / 2)?;
    let choice = partly(1, steps.len(), "step")
        .map_or(String::new(), |text| text + ": the one with the median makespan");
    Some(Shown { steps: vec![step], is_same_batch: false, choice })
}

/// The measured timelines, one above the other on one time axis. Under each is the predicted one.
pub(super) fn one_batch_twice(report: &Report) -> Option<Section> {
    let shown = shown(report)?;
    let timelines = || shown.steps.iter().flat_map(|s| [&s.measured, &s.predicted]).flatten();
    let end_ns = timelines().map(|t| t.makespan_ns).max().unwrap_or(0);
    let has_both = shown.steps.iter().any(|s| s.measured.is_some() && s.predicted.is_some());
    let kinds: Vec<ActionKind> = [ActionKind::F, ActionKind::B, ActionKind::I, ActionKind::W]
        .into_iter()
        .filter(|kind| timelines().any(|t| t.spans.iter().any(|s| s.action.kind == *kind)))
        .collect();
    let mut keys: Vec<(&str, &str)> = kinds
        .iter()
        .map(|kind| match kind {
            ActionKind::F => ("F", "forward"),
            ActionKind::B => ("B", "backward"),
            ActionKind::I => ("I", "backward, inputs"),
            ActionKind::W => ("W", "backward, weights"),
        })
        .collect();
    keys.extend([("idle", "idle (bubble)"), ("tail", "reduction and optimizer")]);
    let body = html! {
        p {
            "A lane is a rank, a block one forward or backward of a microbatch, with the microbatch's number where it fits. "
            "All timelines share one time axis, in milliseconds. "
            @if !shown.choice.is_empty() { span class="note" { "(" (shown.choice) ")" } }
        }
        div class="legend-row" {
            (legend(keys))
            @if has_both { div class="toggles" hidden { button type="button" data-hide="predicted" aria-pressed="true" { "predicted" } } }
        }
        @for step in &shown.steps { (panel(step, end_ns, arm_class(&step.arm), arm_name(&step.arm))) }
        (summary_of(&shown.steps))
    };
    let name = match (shown.is_same_batch, shown.steps.len()) {
        (true, _) => "One global batch, twice",
        (false, 2) => "A step of the baseline and one of ours",
        _ => "One step",
    };
    Some(Section { id: "timelines", name, body })
}

/// A step under its name: the measured timeline, and the predicted one below it.
pub(super) fn panel(step: &StepView, end_ns: u64, class: &str, name: &str) -> Markup {
    let draw = |timeline: &Timeline, how: &str, is_main: bool| {
        let lanes = Lanes::new(timeline, step.layout.as_ref(), end_ns, WIDTH);
        let lane_height = match (is_main, lanes.num_lanes() > 8) {
            (true, false) => 26.0,
            (true, true) | (false, false) => 15.0,
            // Names are 12 pixels high.
            (false, true) => 12.0,
        };
        let view = TimelineView { end_ns, width: WIDTH, lane_height, has_axis: is_main, has_titles: true };
        let label = format!(
            "Timeline of step {}, {}, {how}: {}, idle {}.",
            step.step,
            step.arm,
            number::ns(timeline.makespan_ns),
            number::percent(timeline.bubble_ratio())
        );
        html! {
            div class="scroll" tabindex="0" role="region" aria-label=(label) { (crate::chart::timeline(&label, timeline, &lanes, &view)) }
            @if !lanes.left_out.is_empty() { p class="note" { (lanes.left_out.join("; ")) } }
        }
    };
    let numbers = |timeline: &Timeline| {
        html! { strong { (number::ns(timeline.makespan_ns)) } ", idle " (number::percent(timeline.bubble_ratio())) }
    };
    html! {
        div class="panel" {
            h3 { i class={ "swatch " (class) } aria-hidden="true" {} (name) " " span class="note" { "step " (step.step) } }
            @if let Some(measured) = &step.measured {
                p class="reading" { (step.how()) " " (numbers(measured)) }
                (draw(measured, step.how(), true))
            }
            @if let Some(predicted) = &step.predicted {
                div class=[step.measured.is_some().then_some("predicted")] {
                    p class="reading" {
                        "predicted " (numbers(predicted))
                        @if let Some(error) = step.measured.as_ref().and_then(|m| error_of(predicted, m)) {
                            " (" (number::signed_percent(error)) " off)"
                        }
                    }
                    (draw(predicted, "predicted", step.measured.is_none()))
                }
            }
        }
    }
}

/// The table beside the timelines.
fn summary_of(steps: &[&StepView]) -> Markup {
    let mut rows = Vec::new();
    for step in steps {
        for (how, timeline) in [(step.how(), &step.measured), ("predicted", &step.predicted)] {
            if let Some(t) = timeline {
                let busy: f64 = t.spans.iter().map(|s| s.end_ns.saturating_sub(s.start_ns) as f64).sum();
                rows.push(vec![
                    format!("{}, {how}", step.arm),
                    number::ns(t.makespan_ns),
                    number::ms(busy / f64::from(t.num_ranks.max(1)) / 1e6),
                    number::percent(t.bubble_ratio()),
                    number::thousands(u64::from(t.num_ranks)),
                    number::thousands(t.spans.len() as u64),
                ]);
            }
        }
    }
    let columns = [
        words("timeline"),
        numbers("makespan"),
        numbers("work a rank"),
        numbers("idle"),
        numbers("ranks"),
        numbers("spans"),
    ];
    table_below("these timelines in numbers", &columns, &rows)
}

/// Mean idle time of a rank in a step: (milliseconds, fraction of the makespan) for each cause.
#[derive(Clone, Copy)]
struct MeanIdle {
    causes: [(f64, f64); 4],
    /// All causes together, within the makespan: so without the wait for data before the step.
    within: (f64, f64),
    num_steps: u64,
}

/// The mean over steps. Each step comes with the time its ranks waited for data before it, in nanoseconds.
fn mean_idle<'a>(steps: impl Iterator<Item = (&'a Timeline, u64)>) -> Option<MeanIdle> {
    let mut causes = [(0.0, 0.0); 4];
    let mut within = (0.0, 0.0);
    let mut num_steps = 0u64;
    for (timeline, data_wait_ns) in steps.filter(|(t, _)| t.num_ranks > 0) {
        num_steps += 1;
        let ranks = f64::from(timeline.num_ranks);
        let add = |sum: &mut (f64, f64), ns: f64| {
            sum.0 += ns / 1e6;
            sum.1 += if timeline.makespan_ns == 0 { 0.0 } else { ns / timeline.makespan_ns as f64 };
        };
        let idle = timeline.idle_ns;
        for (sum, ns) in causes.iter_mut().zip([idle.ramp, idle.imbalance, idle.transfer, idle.data_wait]) {
            add(sum, ns as f64 / ranks);
            add(&mut within, ns as f64 / ranks);
        }
        add(&mut causes[3], data_wait_ns as f64);
    }
    let number = num_steps as f64;
    let mean = |(ms, share): (f64, f64)| (ms / number, share / number);
    (num_steps > 0).then(|| MeanIdle { causes: causes.map(mean), within: mean(within), num_steps })
}

const CAUSES: [(&str, &str); 4] = [
    ("c-ramp", "ramp"),
    ("c-imbalance", "imbalance"),
    ("c-transfer", "transfer"),
    ("c-data-wait", "data wait"),
];

/// A name for some steps, whether they were measured, rehearsed or predicted, and their mean idle time.
type Named<'a> = (&'a str, &'static str, MeanIdle);

/// Whether any steps waited for data. Most do not, and then this cause is not shown.
fn has_data_wait(means: &[Named<'_>]) -> bool {
    means.iter().any(|(.., mean)| mean.causes[3].0 > 0.0)
}

fn drawn(means: &[Named<'_>], label: &str) -> Markup {
    let causes = &CAUSES[..if has_data_wait(means) { 4 } else { 3 }];
    let bar = |(name, how, mean): &Named<'_>| Bar {
        name: format!("{} {how}", clipped(name, MOST_ARM)),
        is_predicted: *how == "predicted",
        parts: causes
            .iter()
            .zip(mean.causes)
            .map(|((class, cause), (ms, share))| BarPart {
                class,
                value: ms,
                title: format!(
                    "{name}, {how}, {cause}: {} a rank and step, {} of the step",
                    number::ms(ms),
                    number::percent(share)
                ),
            })
            .collect(),
        total: number::percent(mean.within.1),
    };
    let drawn: Vec<Bar> = means.iter().map(bar).collect();
    html! {
        figure {
            figcaption { "Idle time a rank and step, by cause" }
            (bars(label, 420.0, &drawn, number::tick, "ms"))
            (legend(causes.iter().copied()))
        }
    }
}

/// Idle time by cause, a bar for each of some named steps.
pub(super) fn mean_idle_bars(named: &[(&str, Vec<(&StepView, &Timeline)>)]) -> Markup {
    let mean = |(name, steps): &(&'_ str, Vec<(&StepView, &Timeline)>)| {
        let how = steps.first().map_or("measured", |(step, _)| step.how());
        let mean = mean_idle(steps.iter().map(|(step, timeline)| (*timeline, step.data_wait_ns)))?;
        Some((how, mean, (*name).to_owned()))
    };
    let means: Vec<_> = named.iter().filter_map(mean).collect();
    let means: Vec<Named<'_>> = means.iter().map(|(how, mean, name)| (name.as_str(), *how, *mean)).collect();
    drawn(&means, "Idle time of both by cause, as in the table above.")
}

/// Of which steps the means are: one number where all rows have as many.
fn counted(means: &[Named<'_>]) -> String {
    let num_steps = |mean: &MeanIdle| number::counted(mean.num_steps, "step");
    let first = means.first().map_or(0, |(_, _, mean)| mean.num_steps);
    if means.iter().all(|(_, _, mean)| mean.num_steps == first) {
        let of_each = if means.len() > 1 { " of each row" } else { "" };
        return means.first().map_or_else(String::new, |(_, _, mean)| num_steps(mean) + of_each);
    }
    let of = |(arm, how, mean): &Named<'_>| format!("{} {} {how}", mean.num_steps, clipped(arm, 20));
    means.iter().map(of).collect::<Vec<_>>().join(", ")
}

/// Idle time by cause, blind against aware.
pub(super) fn idle(report: &Report) -> Option<Section> {
    let mut arms: Vec<&str> = ["blind", "aware"].into();
    for step in &report.steps {
        if !arms.contains(&step.arm.as_str()) && arms.len() < 8 {
            arms.push(&step.arm);
        }
    }
    let mut means = Vec::new();
    for arm in arms {
        let of_arm = || report.steps.iter().filter(|s| s.arm == arm);
        let measured = mean_idle(of_arm().filter_map(|s| Some((s.measured.as_ref()?, s.data_wait_ns))));
        let predicted = mean_idle(of_arm().filter_map(|s| Some((s.predicted.as_ref()?, 0))));
        let how = of_arm().next().map_or("measured", StepView::how);
        means.extend(measured.map(|mean| (arm, how, mean)));
        means.extend(predicted.map(|mean| (arm, "predicted", mean)));
    }
    if means.is_empty() {
        return None;
    }
    let has_data_wait = has_data_wait(&means);
    let causes = &CAUSES[..if has_data_wait { 4 } else { 3 }];
    let counted = counted(&means);
    let cell = |(ms, share): (f64, f64)| format!("{} ({})", number::number(ms), number::percent(share));
    let rows: Vec<Vec<String>> = means
        .iter()
        .map(|(arm, how, mean)| {
            let mut row = vec![format!("{}, {how}", clipped(arm, 40))];
            row.extend(mean.causes.iter().take(causes.len()).map(|&c| cell(c)));
            row.push(cell(mean.within));
            row
        })
        .collect();
    let mut columns = vec![names("steps")];
    columns.extend(causes.iter().map(|&(_, cause)| numbers(cause)));
    columns.push(numbers("idle"));
    let body = html! {
        p {
            "How long a rank waits within a step: the mean over ranks and steps (" (counted) "). "
            em { "Ramp" } ": the pipeline fills and drains. This wait is there even where all work is equal. "
            em { "Imbalance" } ": microbatches or stages are uneven. This is what scheduling can take away. "
            em { "Transfer" } ": data is on its way from another rank."
            @if has_data_wait {
                " " em { "Data wait" } ": samples of the step are not there yet. It lies before the step's clock starts, so it is no part of the step's "
                "time, nor of the last column."
            }
        }
        div class="row lean" {
            (drawn(&means, "Idle time by cause, as in the table beside it."))
            (table("Idle time a rank and step in ms, and its share of the step", &columns, &rows))
        }
    };
    Some(Section { id: "idle", name: "Why ranks waited", body })
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflop_types::{Rank, Span};

    /// Names are 12 pixels high: those of neighbouring lanes are no nearer, whether measured or predicted, of few ranks or many.
    #[test]
    fn names_of_lanes_do_not_overlap() {
        for num_ranks in [2, 8, 9, 64] {
            let span =
                |rank| Span { rank: Rank(rank), action: "0F0".parse().unwrap(), start_ns: 0, end_ns: 90 };
            let spans = (0..num_ranks).map(span).collect();
            let timeline = Timeline { num_ranks, makespan_ns: 100, spans, ..Timeline::default() };
            let step = StepView {
                predicted: Some(timeline.clone()),
                measured: Some(timeline),
                ..StepView::default()
            };
            let page = panel(&step, 100, "a-aware", "aware").into_string();
            let places = page.split("class=\"lane\" x=\"0\" y=\"").skip(1);
            let places: Vec<f64> =
                places.map(|rest| rest.split('"').next().unwrap().parse().unwrap()).collect();
            assert_eq!(places.len(), 2 * num_ranks.min(16) as usize);
            // The second drawing begins at the top again.
            let apart = places.windows(2).map(|pair| pair[1] - pair[0]).filter(|apart| *apart > 0.0);
            assert!(apart.fold(f64::MAX, f64::min) >= 12.0, "{num_ranks} ranks: {places:?}");
        }
    }
}
