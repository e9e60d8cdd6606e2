//! Steps: one global batch twice, why ranks were idle, pairs of step times, prediction against measurement.

use super::{Section, first_of, plotted};
use crate::chart::{
    Bar, Dots, Lanes, Mark, Part, ScatterPlot, TimelineView, arm_class, bars, legend, names, numbers,
    pair_plot, partly, ratio_plot, scatter_plot, spread, table, table_below, words,
};
use crate::figure::idle_ratio;
use crate::format;
use crate::{Report, StepView};
use dflop_types::{ActionKind, Timeline};
use maud::{Markup, html};

/// Dots of a plot, drawn at most.
const MOST_DOTS: usize = 600;
/// Rows of a table below a plot.
const MOST_ROWS: usize = 200;
const WIDTH: f64 = 1060.0;

/// The steps shown as timelines.
struct Shown<'a> {
    steps: Vec<&'a StepView>,
    /// Whether they ran the same global batch.
    is_same_batch: bool,
    /// How they were chosen.
    choice: String,
}

fn best_timeline(step: &StepView) -> Option<&Timeline> {
    step.measured.as_ref().or(step.predicted.as_ref())
}

/// The pair whose ratio is nearest the median, or the one step of median makespan.
fn shown(report: &Report) -> Option<Shown<'_>> {
    let of = |arm: &'static str| {
        report.steps.iter().filter(move |s| s.arm == arm && best_timeline(s).is_some()).collect::<Vec<_>>()
    };
    let (blind, aware) = (of("blind"), of("aware"));
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

/// The measured timelines one above the other on one time axis, the predicted one under each.
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
        @for step in &shown.steps { (panel(step, end_ns)) }
        (summary_of(&shown.steps))
    };
    let name = match (shown.is_same_batch, shown.steps.len()) {
        (true, _) => "One global batch, twice",
        (false, 2) => "A blind step and an aware step",
        _ => "One step",
    };
    Some(Section { id: "timelines", name, body })
}

fn arm_name(arm: &str) -> &str {
    match arm {
        "blind" => "Blind: samples in arrival order",
        "aware" => "Aware: scheduled by dflop",
        "" => "Step",
        other => other,
    }
}

fn panel(step: &StepView, end_ns: u64) -> Markup {
    let draw = |timeline: &Timeline, how: &str, is_main: bool| {
        let lanes = Lanes::new(timeline, end_ns, WIDTH);
        let lane_height = match (is_main, lanes.num_lanes() > 8) {
            (true, false) => 26.0,
            (true, true) | (false, false) => 15.0,
            (false, true) => 9.0,
        };
        let view = TimelineView { end_ns, width: WIDTH, lane_height, has_axis: is_main, has_titles: true };
        let label = format!(
            "Timeline of step {}, {}, {how}: {}, idle {}.",
            step.step,
            step.arm,
            format::ns(timeline.makespan_ns),
            format::percent(idle_ratio(timeline))
        );
        html! {
            div class="scroll" tabindex="0" role="region" aria-label=(label) { (crate::chart::timeline(&label, timeline, &lanes, &view)) }
            @if !lanes.left_out.is_empty() { p class="note" { (lanes.left_out.join("; ")) } }
        }
    };
    let numbers = |timeline: &Timeline| {
        html! { strong { (format::ns(timeline.makespan_ns)) } ", idle " (format::percent(idle_ratio(timeline))) }
    };
    html! {
        div class="panel" {
            h3 { i class={ "swatch " (arm_class(&step.arm)) } aria-hidden="true" {} (arm_name(&step.arm)) " " span class="note" { "step " (step.step) } }
            @if let Some(measured) = &step.measured {
                p class="reading" { "measured " (numbers(measured)) }
                (draw(measured, "measured", true))
            }
            @if let Some(predicted) = &step.predicted {
                div class=[step.measured.is_some().then_some("predicted")] {
                    p class="reading" {
                        "predicted " (numbers(predicted))
                        @if let Some(error) = step.measured.as_ref().and_then(|m| error_of(predicted, m)) {
                            " (" (signed_percent(error)) " off)"
                        }
                    }
                    (draw(predicted, "predicted", step.measured.is_none()))
                }
            }
        }
    }
}

/// (predicted - measured) / measured; `None` where nothing was measured.
fn error_of(predicted: &Timeline, measured: &Timeline) -> Option<f64> {
    let (predicted, measured) = (predicted.makespan_ns as f64, measured.makespan_ns as f64);
    (measured > 0.0).then(|| (predicted - measured) / measured)
}

fn signed_percent(ratio: f64) -> String {
    format!("{}{}", if ratio > 0.0 { "+" } else { "" }, format::percent(ratio))
}

/// The table beside the timelines.
fn summary_of(steps: &[&StepView]) -> Markup {
    let mut rows = Vec::new();
    for step in steps {
        for (how, timeline) in [("measured", &step.measured), ("predicted", &step.predicted)] {
            if let Some(t) = timeline {
                let busy: f64 = t.spans.iter().map(|s| s.end_ns.saturating_sub(s.start_ns) as f64).sum();
                rows.push(vec![
                    format!("{}, {how}", step.arm),
                    format::ns(t.makespan_ns),
                    format::ms(busy / f64::from(t.num_ranks.max(1)) / 1e6),
                    format::percent(idle_ratio(t)),
                    format::count(u64::from(t.num_ranks)),
                    format::count(t.spans.len() as u64),
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

/// Mean idle time a rank and step, in milliseconds, by cause, with the share of the makespan.
struct MeanIdle {
    causes: [(f64, f64); 3],
}

fn mean_idle<'a>(timelines: impl Iterator<Item = &'a Timeline>) -> Option<MeanIdle> {
    let mut causes = [(0.0, 0.0); 3];
    let mut number = 0.0;
    for timeline in timelines.filter(|t| t.num_ranks > 0) {
        number += 1.0;
        let ranks = f64::from(timeline.num_ranks);
        let idle = timeline.idle_ns;
        for (sum, ns) in causes.iter_mut().zip([idle.ramp, idle.imbalance, idle.transfer]) {
            let a_rank = ns as f64 / ranks;
            sum.0 += a_rank / 1e6;
            sum.1 += if timeline.makespan_ns == 0 { 0.0 } else { a_rank / timeline.makespan_ns as f64 };
        }
    }
    (number > 0.0).then(|| MeanIdle { causes: causes.map(|(ms, share)| (ms / number, share / number)) })
}

const CAUSES: [(&str, &str); 3] =
    [("c-ramp", "ramp"), ("c-imbalance", "imbalance"), ("c-transfer", "transfer")];

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
        let measured = mean_idle(of_arm().filter_map(|s| s.measured.as_ref()));
        let predicted = mean_idle(of_arm().filter_map(|s| s.predicted.as_ref()));
        means.extend(measured.map(|mean| (arm, "measured", mean)));
        means.extend(predicted.map(|mean| (arm, "predicted", mean)));
    }
    if means.is_empty() {
        return None;
    }
    let drawn: Vec<Bar> = means
        .iter()
        .map(|(arm, how, mean)| Bar {
            name: format!("{} {how}", format::clipped(arm, 10)),
            is_predicted: *how == "predicted",
            parts: CAUSES
                .iter()
                .zip(mean.causes)
                .map(|((class, cause), (ms, share))| Part {
                    class,
                    value: ms,
                    title: format!(
                        "{arm}, {how}, {cause}: {} a rank and step, {} of the step",
                        format::ms(ms),
                        format::percent(share)
                    ),
                })
                .collect(),
            total: format::percent(mean.causes.iter().map(|c| c.1).sum()),
        })
        .collect();
    let cell = |(ms, share): (f64, f64)| format!("{} ({})", format::number(ms), format::percent(share));
    let rows: Vec<Vec<String>> = means
        .iter()
        .map(|(arm, how, mean)| {
            let mut row = vec![format!("{}, {how}", format::clipped(arm, 40))];
            row.extend(mean.causes.iter().map(|&c| cell(c)));
            row.push(cell(mean.causes.iter().fold((0.0, 0.0), |sum, c| (sum.0 + c.0, sum.1 + c.1))));
            row
        })
        .collect();
    let columns =
        [names("steps"), numbers("ramp"), numbers("imbalance"), numbers("transfer"), numbers("idle")];
    let body = html! {
        p {
            "Mean over all steps, for each rank: time within the step in which it waited. "
            em { "Ramp" } " is what the pipeline order idles even when all work is equal: fill and drain. "
            em { "Imbalance" } " is what uneven microbatches and stages add: what scheduling can take away. "
            em { "Transfer" } " is waiting for data under way."
        }
        div class="row lean" {
            figure {
                figcaption { "Idle time a rank and step, by cause" }
                (bars("Idle time by cause, as in the table beside it.", 420.0, &drawn, format::tick, "ms"))
                (legend(CAUSES))
            }
            (table("Idle time a rank and step in ms, and its share of the step", &columns, &rows))
        }
    };
    Some(Section { id: "idle", name: "Why ranks waited", body })
}

/// Step times of pairs, and their ratios.
pub(super) fn pairs(report: &Report) -> Option<Section> {
    let comparison = report.comparison.as_ref().filter(|c| !c.pairs.is_empty())?;
    let all = &comparison.pairs;
    let drawn: Vec<(usize, f64, f64)> =
        spread(all.len(), MOST_DOTS).into_iter().map(|i| (i, all[i].0, all[i].1)).collect();
    let ratios: Vec<f64> = drawn.iter().map(|p| p.1 / p.2).collect();
    let wins = all.iter().filter(|p| p.0 > p.1).count();
    let rows: Vec<Vec<String>> = all
        .iter()
        .take(MOST_ROWS)
        .enumerate()
        .map(|(i, &(blind, aware))| {
            vec![i.to_string(), format::ms(blind), format::ms(aware), format::times(blind / aware)]
        })
        .collect();
    let columns = [numbers("pair"), numbers("blind"), numbers("aware"), numbers("blind over aware")];
    let interval = (comparison.ratio_low, comparison.ratio_high);
    let ratio_label = format!(
        "Ratio of step times, blind over aware, of each pair; {} over all, 95 % interval {} to {}.",
        format::times(comparison.ratio),
        format::times(interval.0),
        format::times(interval.1)
    );
    let body = html! {
        p {
            "Each pair is one global batch run by both arms. The aware step was the faster one in " (format::count(wins as u64))
            " of " (format::plural(all.len() as u64, "pair")) ". "
            @if let Some(text) = partly(drawn.len(), all.len(), "pair") { span class="note" { "(" (text) ")" } }
        }
        div class="row" {
            (plotted("Step time of each pair", &pair_plot("Step times of pairs, blind and aware, as in the table below.", &drawn),
                &legend([("a-blind square", "blind"), ("a-aware round", "aware")])))
            (plotted("Ratio of each pair", &ratio_plot(&ratio_label, &ratios, comparison.ratio, interval),
                &legend([("a-aware round", "a pair"), ("interval", "95 % interval of the ratio")])))
        }
        details {
            summary { "Table: step times of the pairs" }
            (table("Step times of the pairs", &columns, &rows))
            (first_of(rows.len(), all.len(), "pair"))
        }
    };
    Some(Section { id: "pairs", name: "Step times, pair by pair", body })
}

/// Predicted against measured step time, with the error.
pub(super) fn prediction(report: &Report) -> Option<Section> {
    let steps: Vec<(&StepView, f64, f64, f64)> = report
        .steps
        .iter()
        .filter_map(|step| {
            let (predicted, measured) = (step.predicted.as_ref()?, step.measured.as_ref()?);
            let ms = |t: &Timeline| t.makespan_ns as f64 / 1e6;
            Some((step, ms(predicted), ms(measured), error_of(predicted, measured)?))
        })
        .collect();
    if steps.is_empty() {
        return None;
    }
    let mut errors: Vec<f64> = steps.iter().map(|s| s.3.abs()).collect();
    errors.sort_by(f64::total_cmp);
    let own = |part| format::quantile(&errors, part).unwrap_or(f64::NAN);
    let (median, p95) = report
        .comparison
        .as_ref()
        .map_or((own(0.5), own(0.95)), |c| (c.prediction_error_median, c.prediction_error_p95));
    let bias = steps.iter().map(|s| s.3).sum::<f64>() / steps.len() as f64;
    let drawn = spread(steps.len(), MOST_DOTS);
    let arm = |name: &str, class, mark| Dots {
        class,
        mark,
        points: drawn
            .iter()
            .map(|&i| &steps[i])
            .filter(|s| arm_class(&s.0.arm) == name)
            .map(|s| {
                let text = format!(
                    "step {} {}: predicted {}, measured {} ({})",
                    s.0.step,
                    format::clipped(&s.0.arm, 20),
                    format::ms(s.1),
                    format::ms(s.2),
                    signed_percent(s.3)
                );
                (s.1, s.2, Some(text))
            })
            .collect(),
    };
    let series = [
        arm("a-blind", "a-blind", Mark::Square),
        arm("a-aware", "a-aware", Mark::Circle),
        arm("a-other", "a-other", Mark::Diamond),
    ];
    let keys = [("a-blind square", "blind"), ("a-aware round", "aware"), ("a-other square", "other")];
    let keys = keys.into_iter().zip(&series).filter(|(_, s)| !s.points.is_empty()).map(|(key, _)| key);
    let plot = ScatterPlot {
        label: "Predicted against measured step time, as in the table below; on the line both are equal.",
        is_log: false,
        is_square: true,
        show: format::tick,
        name_x: "predicted, ms",
        name_y: "measured, ms",
    };
    let rows: Vec<Vec<String>> = steps
        .iter()
        .take(MOST_ROWS)
        .map(|s| {
            vec![
                s.0.step.to_string(),
                format::clipped(&s.0.arm, 40),
                format::ms(s.1),
                format::ms(s.2),
                signed_percent(s.3),
            ]
        })
        .collect();
    let columns =
        [numbers("step"), words("arm"), numbers("predicted"), numbers("measured"), numbers("error")];
    let body = html! {
        div class="row" {
            (plotted("Step time, predicted against measured", &scatter_plot(&plot, &series), &legend(keys)))
            div {
                dl class="facts" {
                    div { dt { "median error" } dd { strong { (format::percent(median)) } } }
                    div { dt { "95th percentile" } dd { (format::percent(p95)) } }
                    div { dt { "mean, with its sign" } dd { (signed_percent(bias)) } }
                    div { dt { "steps" } dd { (format::count(steps.len() as u64)) } }
                }
                p {
                    "The error is |predicted - measured| / measured. On the dashed line both are equal: above it a step took longer than predicted."
                }
                @if let Some(text) = partly(drawn.len(), steps.len(), "step") { p class="note" { (text) } }
            }
        }
        details {
            summary { "Table: predicted and measured steps" }
            (table("Predicted and measured steps", &columns, &rows))
            (first_of(rows.len(), steps.len(), "step"))
        }
    };
    Some(Section { id: "prediction", name: "Was the prediction right?", body })
}
