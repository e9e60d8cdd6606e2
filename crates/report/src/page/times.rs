//! Step times: the fastest baseline against ours in pairs, every arm, and predicted against measured.

use super::{Section, first_of, plotted};
use crate::arm::arm_class;
use crate::chart::{
    Dots, Mark, ScatterPlot, legend, numbers, pair_plot, partly, ratio_plot, scatter_plot, spread, table,
    words,
};
use crate::{ArmView, Comparison, Report, StepView};
use dflop_types::{Timeline, clipped, number, statistics};
use maud::{Markup, html};

/// The most dots that are drawn in a plot.
const MOST_DOTS: usize = 600;
/// The most rows of a table below a plot.
const MOST_ROWS: usize = 200;

/// The error of a prediction: (predicted - measured) / measured; `None` if the measured time is 0.
pub(super) fn error_of(predicted: &Timeline, measured: &Timeline) -> Option<f64> {
    let (predicted, measured) = (predicted.makespan_ns as f64, measured.makespan_ns as f64);
    (measured > 0.0).then(|| (predicted - measured) / measured)
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
            vec![i.to_string(), number::ms(blind), number::ms(aware), number::times(blind / aware)]
        })
        .collect();
    let (baseline, ours) = (comparison.baseline.as_str(), comparison.ours.as_str());
    let columns = [numbers("pair"), numbers("baseline"), numbers("ours"), numbers("baseline over ours")];
    let interval = (comparison.ratio_low, comparison.ratio_high);
    let ratio_label = format!(
        "Ratio of step times, {baseline} over {ours}, of each pair; {} over all, 95 % interval {} to {}.",
        number::times(comparison.ratio),
        number::times(interval.0),
        number::times(interval.1)
    );
    let body = html! {
        (arms(comparison))
        p {
            "Each pair is one global batch, run by the fastest baseline (" (baseline) ") and by ours (" (ours) "). Ours was the faster one in "
            (number::thousands(wins as u64)) " of " (number::counted(all.len() as u64, "pair")) ". "
            @if let Some(text) = partly(drawn.len(), all.len(), "pair") { span class="note" { "(" (text) ")" } }
        }
        div class="row" {
            (plotted("Step time of each pair", &pair_plot("Step times of pairs, baseline and ours, as in the table below.", &drawn),
                &legend([("a-blind square", baseline), ("a-aware round", ours)])))
            (plotted("Ratio of each pair", &ratio_plot(&ratio_label, &ratios, comparison.ratio, interval),
                &legend([("a-aware round", "a pair"), ("interval", "95 % interval of the ratio")])))
        }
        details {
            summary { "Table: step times of the pairs" }
            (table("Step times of the pairs", &columns, &rows))
            (first_of(rows.len(), all.len(), "pair"))
        }
    };
    Some(Section { id: "pairs", name: "Step times of every arm", body })
}

/// A table of every arm of the comparison; nothing if there are only the two.
fn arms(comparison: &Comparison) -> Markup {
    let row = |arm: &ArmView| {
        let interval = format!("{} to {}", number::times(arm.ratio_low), number::times(arm.ratio_high));
        let is_measure = arm.name == comparison.baseline;
        vec![
            arm.name.clone(),
            if arm.is_baseline { "baseline" } else { "dflop" }.to_owned(),
            number::ms(arm.step_ms),
            number::times(arm.ratio),
            if is_measure { "-".to_owned() } else { interval },
            number::percent(arm.idle_ratio),
        ]
    };
    let mut arms: Vec<&ArmView> = comparison.arms.iter().collect();
    arms.sort_by(|a, b| a.step_ms.total_cmp(&b.step_ms));
    let rows: Vec<Vec<String>> = arms.into_iter().map(row).collect();
    let columns = [
        words("arm"),
        words("kind"),
        numbers("step"),
        numbers("fastest baseline over it"),
        numbers("95 % interval"),
        numbers("idle"),
    ];
    html! {
        @if comparison.arms.len() > 2 {
            p {
                "Every arm trained the same global batches. With -ahead, forwards run ahead as far as memory allows, for baselines and for ours. "
                "All are held against the fastest baseline; above 1 an arm is faster than it."
            }
            (table("Step time of every arm, the fastest first", &columns, &rows))
        }
    }
}

/// Sentences on how far predictions are off: the plain ones, and those corrected by earlier steps. Each error is given as its
/// median and 95th percentile.
fn errors_in_words(
    (median, p95): (f64, f64),
    bias: f64,
    num_steps: usize,
    corrected: Option<(f64, f64)>,
    how: &str,
) -> Markup {
    html! {
        dl class="facts" {
            div { dt { "median error" } dd { strong { (number::percent(median)) } } }
            div { dt { "95th percentile" } dd { (number::percent(p95)) } }
            div { dt { "mean, with its sign" } dd { (number::signed_percent(bias)) } }
            div { dt { "steps" } dd { (number::thousands(num_steps as u64)) } }
            @if let Some((median, p95)) = corrected {
                div { dt { "corrected error, median" } dd { strong { (number::percent(median)) } } }
                div { dt { "95th percentile, corrected" } dd { (number::percent(p95)) } }
            }
        }
        p {
            "The error is |predicted - " (how) "| / " (how) ". On the dashed line both are equal: above it a step took longer than predicted."
        }
        @if corrected.is_some() {
            p {
                "The corrected error is that of a second prediction, made before each step from how long the eight steps before it took "
                "against theirs. It tells a machine that became slower or faster from a cost model that is wrong; the dots, and the schedules, "
                "are without it."
            }
        }
    }
}

/// The positions of the dots that are drawn: a tenth are the steps with the largest errors, the others are evenly spread.
fn with_the_furthest(errors: &[f64]) -> Vec<usize> {
    if errors.len() <= MOST_DOTS {
        return (0..errors.len()).collect();
    }
    let mut order: Vec<usize> = (0..errors.len()).collect();
    order.sort_by(|&a, &b| errors[b].total_cmp(&errors[a]).then(a.cmp(&b)));
    let mut drawn: Vec<usize> = order[..MOST_DOTS / 10].to_vec();
    drawn.extend(spread(errors.len(), MOST_DOTS - MOST_DOTS / 10));
    drawn.sort_unstable();
    drawn.dedup();
    drawn
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
    let own = |part| statistics::quantile(&errors, part).unwrap_or(f64::NAN);
    let (median, p95) = report
        .comparison
        .as_ref()
        .map_or((own(0.5), own(0.95)), |c| (c.prediction_error_median, c.prediction_error_p95));
    let corrected =
        report.comparison.as_ref().and_then(|c| Some((c.corrected_error_median?, c.corrected_error_p95?)));
    let bias = steps.iter().map(|s| s.3).sum::<f64>() / steps.len() as f64;
    let drawn = with_the_furthest(&steps.iter().map(|step| step.3.abs()).collect::<Vec<f64>>());
    let arm = |name: &str, class, mark| Dots {
        class,
        mark,
        points: drawn
            .iter()
            .map(|&i| &steps[i])
            .filter(|s| arm_class(&s.0.arm) == name)
            .map(|s| {
                let text = format!(
                    "step {} {}: predicted {}, {} {} ({})",
                    s.0.step,
                    clipped(&s.0.arm, 20),
                    number::ms(s.1),
                    s.0.how(),
                    number::ms(s.2),
                    number::signed_percent(s.3)
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
    let keys = [("a-blind square", "baselines"), ("a-aware round", "aware"), ("a-other square", "other")];
    let keys = keys.into_iter().zip(&series).filter(|(_, s)| !s.points.is_empty()).map(|(key, _)| key);
    let how = steps[0].0.how();
    let label =
        format!("Predicted against {how} step time, as in the table below; on the line both are equal.");
    let name_y = format!("{how}, ms");
    let plot = ScatterPlot {
        label: &label,
        is_log: false,
        is_square: true,
        show: number::tick,
        name_x: "predicted, ms",
        name_y: &name_y,
    };
    let rows: Vec<Vec<String>> = steps
        .iter()
        .take(MOST_ROWS)
        .map(|s| {
            vec![
                s.0.step.to_string(),
                clipped(&s.0.arm, 40),
                number::ms(s.1),
                number::ms(s.2),
                number::signed_percent(s.3),
            ]
        })
        .collect();
    let columns = [numbers("step"), words("arm"), numbers("predicted"), numbers(how), numbers("error")];
    let title = format!("Step time, predicted against {how}");
    let table_title = format!("Predicted and {how} steps");
    let body = html! {
        div class="row" {
            (plotted(&title, &scatter_plot(&plot, &series), &legend(keys)))
            div {
                (errors_in_words((median, p95), bias, steps.len(), corrected, how))
                @if let Some(text) = partly(drawn.len(), steps.len(), "step") { p class="note" { (text) ", those furthest off among them" } }
            }
        }
        details {
            summary { "Table: predicted and " (how) " steps" }
            (table(&table_title, &columns, &rows))
            (first_of(rows.len(), steps.len(), "step"))
        }
    };
    Some(Section { id: "prediction", name: "Was the prediction right?", body })
}
