//! The plan and why: the choice, the runners-up, and what made the others fall.

use super::Section;
use crate::Report;
use crate::chart::{names, numbers, table, words};
use crate::format;
use dflop_types::{Plan, RankedPlan};
use maud::{Markup, html};

/// Rows of a table.
const MOST_ROWS: usize = 50;

/// The choice in one sentence.
pub(super) fn sentence(plan: &Plan) -> Markup {
    let best = &plan.best;
    let p = &best.prediction;
    html! {
        "The plan is " strong { (best.layout) ", " (microbatches(best.num_microbatches)) ", " (best.pipeline_order) } ": a step is expected to take "
        strong { (format::ns(p.step_ns_mean)) } " \u{b1} " (format::ns(p.step_ns_half_width)) ", " (format::ns(p.blind_step_ns_mean))
        " in arrival order (" (format::times(gain(best))) ")."
    }
}

fn microbatches(number: u32) -> String {
    format!("{number} microbatch{}", if number == 1 { "" } else { "es" })
}

fn gain(plan: &RankedPlan) -> f64 {
    plan.prediction.blind_step_ns_mean as f64 / plan.prediction.step_ns_mean as f64
}

fn row(name: String, plan: &RankedPlan) -> Vec<String> {
    let p = &plan.prediction;
    vec![
        name,
        plan.layout.encoder.to_string(),
        plan.layout.llm.to_string(),
        plan.num_microbatches.to_string(),
        plan.pipeline_order.to_string(),
        format!(
            "{} \u{b1} {}",
            format::number(p.step_ns_mean as f64 / 1e6),
            format::number(p.step_ns_half_width as f64 / 1e6)
        ),
        format::number(p.blind_step_ns_mean as f64 / 1e6),
        format::times(gain(plan)),
        format::percent(p.bubble_ratio),
        format::bytes(p.encoder_memory_bytes_peak),
        format::bytes(p.llm_memory_bytes_peak),
        format::percent(p.extrapolated_ratio),
    ]
}

/// The section.
pub(super) fn section(report: &Report) -> Option<Section> {
    let plan = report.plan.as_ref()?;
    let best = &plan.best;
    let mut rows = vec![row("chosen".to_owned(), best)];
    rows.extend(plan.runners_up.iter().take(MOST_ROWS).enumerate().map(|(i, p)| row((i + 2).to_string(), p)));
    let columns = [
        words("rank"),
        names("encoder"),
        names("LLM"),
        numbers("microbatches"),
        words("order"),
        numbers("step, ms"),
        numbers("arrival order, ms"),
        numbers("gain"),
        numbers("idle"),
        numbers("encoder memory"),
        numbers("LLM memory"),
        numbers("off the profile"),
    ];
    let rejected: Vec<Vec<String>> = plan
        .rejections
        .iter()
        .take(MOST_ROWS)
        .map(|r| vec![format::count(r.count), r.rejection.to_string()])
        .collect();
    let num_rejected = plan.rejections.iter().fold(0u64, |sum, r| sum.saturating_add(r.count));
    let num_fit = 1 + plan.runners_up.len() as u64;
    let batches = u64::from(plan.num_sampled_batches);
    let body = html! {
        p { (sentence(plan)) }
        @if report.model.as_ref().is_some_and(|model| model.is_estimated) {
            p class="note" { strong { "Estimated, not measured:" } " the model profile comes from the analytic model; so do all times and bytes here." }
        }
        p {
            "Each candidate was judged on " (format::count(batches)) " sampled global batch" (if batches == 1 { "" } else { "es" }) " of "
            (format::plural(u64::from(plan.global_batch_size), "sample")) " (seed " (plan.seed) "), filled by the scheduler that trains and timed by the simulator. "
            "Step times are means with the half width of their 95 % interval; memory is the predicted peak of the fullest rank; "
            "off the profile is the share of predictions outside the measured range."
        }
        div class="first-strong" { (table("The plan and its runners-up, by step time", &columns, &rows)) }
        (super::first_of(rows.len() - 1, plan.runners_up.len(), "runner-up"))
        @if rejected.is_empty() {
            p { (format::plural(num_fit, "candidate")) " fit, none was rejected." }
        } @else {
            (table(&format!("{} rejected, and why", format::plural(num_rejected, "candidate")), &[numbers("candidates"), words("why")], &rejected))
            (super::first_of(rejected.len(), plan.rejections.len(), "cause"))
        }
    };
    Some(Section { id: "plan", name: "The plan, and why", body })
}
