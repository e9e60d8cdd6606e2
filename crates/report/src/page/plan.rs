//! The plan and why it was chosen: the choice, the runners-up, and why the others were not chosen.

use super::Section;
use crate::Report;
use crate::chart::{Dots, Mark, ScatterPlot, names, numbers, scatter_plot, table, words};
use dflop_types::{Plan, RankedPlan, WayPrediction, Zero, number};
use maud::{Markup, html};

/// The most rows of a table.
const MOST_ROWS: usize = 50;

/// The choice in one sentence, compared with the best baseline that can run, what people run today included where it is known.
pub(super) fn sentence(plan: &Plan) -> Markup {
    let best = &plan.best;
    let p = &best.prediction;
    html! {
        "The plan is " strong { (best.in_words()) } ": a step is expected to take "
        strong { (number::ns(p.step_ns_mean)) } " \u{b1} " (number::ns(p.step_ns_half_width))
        @if let Some((name, ns)) = fastest_other(plan) {
            ", the best baseline that can run (" (name) ") " (number::ns(ns)) " (" (number::times(over(ns, p.step_ns_mean))) ")."
        } @else if plan.ways.is_empty() {
            "."
        } @else {
            "; no baseline can run on these ranks."
        }
    }
}

/// Of the baselines in the plan's layout and of other people's ways in layouts of their own, the fastest, with its mean step in
/// nanoseconds.
fn fastest_other(plan: &Plan) -> Option<(&str, u64)> {
    let way = WayPrediction::best_baseline(&plan.ways).map(|(way, ns)| (&*way.way, ns));
    let rivals = plan.rivals.iter().filter(|rival| rival.is_of_others);
    let rivals = rivals.filter_map(|rival| Some((&*rival.name, rival.step_ns_mean?)));
    way.into_iter().chain(rivals).min_by_key(|(_, ns)| *ns)
}

fn over(ns: u64, own_ns: u64) -> f64 {
    ns as f64 / own_ns as f64
}

/// A table of the same global batches run in other ways; nothing if no way was compared.
fn ways(plan: &Plan) -> Markup {
    let own_ns = plan.best.prediction.step_ns_mean;
    let has_refused = plan.ways.iter().any(|way| way.refusal.is_some());
    let row = |way: &WayPrediction| {
        let (step, ratio) = match way.step_ns_mean {
            Some(ns) => (number::ns(ns), number::times(over(ns, own_ns))),
            None => ("-".to_owned(), "-".to_owned()),
        };
        let mut row = vec![
            way.way.clone(),
            if way.is_baseline { "baseline" } else { "dflop" }.to_owned(),
            way.num_microbatches.to_string(),
            step,
            ratio,
        ];
        if has_refused {
            row.push(way.refusal.as_ref().map_or_else(String::new, ToString::to_string));
        }
        row
    };
    let rows: Vec<Vec<String>> = plan.ways.iter().map(row).collect();
    let mut columns =
        vec![words("way"), words("kind"), numbers("microbatches"), numbers("step"), numbers("over the plan")];
    if has_refused {
        columns.push(words("cannot run"));
    }
    html! {
        @if !rows.is_empty() {
            p {
                "The same global batches on the same ranks in other ways, all within the same memory. With -ahead, forwards run ahead as far as "
                "memory allows. Data-parallel has the whole model on every rank and packs samples by LLM tokens; sharded, its optimizer states are "
                "cut over the ranks. No ratio is formed with a way that cannot run."
            }
            (table("The plan beside other ways", &columns, &rows))
        }
    }
}

/// The bytes of the fullest rank.
fn peak_bytes(plan: &RankedPlan) -> u64 {
    plan.prediction.encoder_memory_bytes_peak.max(plan.prediction.llm_memory_bytes_peak)
}

/// Which plans, given as (step in nanoseconds, bytes), no other one beats in both: none is faster with no more memory.
fn pareto(plans: &[(u64, u64)]) -> Vec<bool> {
    let beats = |one: &(u64, u64), two: &(u64, u64)| one.0 <= two.0 && one.1 <= two.1 && one != two;
    plans.iter().map(|plan| !plans.iter().any(|other| beats(other, plan))).collect()
}

/// Step time against memory of the plan and its runners-up; nothing where there is no choice.
fn trade_off(plan: &Plan) -> Markup {
    let all: Vec<&RankedPlan> =
        std::iter::once(&plan.best).chain(plan.runners_up.iter().take(MOST_ROWS)).collect();
    if all.len() < 2 {
        return html! {};
    }
    let sizes: Vec<(u64, u64)> = all.iter().map(|p| (p.prediction.step_ns_mean, peak_bytes(p))).collect();
    let is_best = pareto(&sizes);
    let dots = |class, mark, of: &dyn Fn(usize) -> bool| Dots {
        class,
        mark,
        points: (0..all.len())
            .filter(|&at| of(at))
            .map(|at| {
                let (ns, bytes) = sizes[at];
                let text =
                    format!("{}: {}, {}", all[at].in_words(), number::ns(ns), number::memory_size(bytes));
                (ns as f64 / 1e6, bytes as f64 / f64::from(1 << 30), Some(text))
            })
            .collect(),
    };
    let plot = ScatterPlot {
        label: "Step time and memory of the plan and its runners-up",
        is_log: false,
        is_square: false,
        show: number::tick,
        name_x: "step, ms",
        name_y: "GiB of the fullest rank",
    };
    let series = [
        dots("a-blind", Mark::Square, &|at| at > 0 && !is_best[at]),
        dots("a-aware", Mark::Diamond, &|at| at > 0 && is_best[at]),
        dots("a-aware", Mark::Circle, &|at| at == 0),
    ];
    html! {
        p {
            "Time against memory: the plan is the dot. Diamonds are on the Pareto front with it: no other of these candidates is faster in as little memory. "
            "Squares are beaten in one and at most equal in the other."
        }
        (scatter_plot(&plot, &series))
    }
}

fn row(name: String, plan: &RankedPlan) -> Vec<String> {
    let (p, layout) = (&plan.prediction, plan.layout);
    let sharded = |degrees: String| match layout.zero {
        Zero::Nothing => degrees,
        zero => format!("{degrees}, zero {}", u8::from(zero)),
    };
    let (encoder, llm) = if layout.is_colocated() {
        (layout.to_string(), "on the same ranks".to_owned())
    } else {
        (sharded(layout.encoder.to_string()), sharded(layout.llm.to_string()))
    };
    vec![
        name,
        encoder,
        llm,
        plan.num_microbatches.to_string(),
        plan.pipeline_order.to_string(),
        format!(
            "{} \u{b1} {}",
            number::number(p.step_ns_mean as f64 / 1e6),
            number::number(p.step_ns_half_width as f64 / 1e6)
        ),
        number::percent(p.bubble_ratio),
        number::memory_size(p.encoder_memory_bytes_peak),
        number::memory_size(p.llm_memory_bytes_peak),
        number::percent(p.extrapolated_ratio),
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
        numbers("idle"),
        numbers("encoder memory"),
        numbers("LLM memory"),
        numbers("off the profile"),
    ];
    let rejected: Vec<Vec<String>> = plan
        .rejections
        .iter()
        .take(MOST_ROWS)
        .map(|r| vec![number::thousands(r.count), r.rejection.to_string()])
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
            "Each candidate was judged on " (number::thousands(batches)) " sampled global batch" (if batches == 1 { "" } else { "es" }) " of "
            (number::counted(u64::from(plan.global_batch_size), "sample")) " (seed " (plan.seed) "), filled by the scheduler that trains and timed by the simulator. "
            "Step times are means with the half width of their 95 % interval; memory is the predicted peak of the fullest rank; "
            "off the profile is the share of predictions outside the measured range."
        }
        (ways(plan))
        div class="first-strong" { (table("The plan and its runners-up, by step time", &columns, &rows)) }
        (super::first_of(rows.len() - 1, plan.runners_up.len(), "runner-up"))
        (trade_off(plan))
        @if rejected.is_empty() {
            p { (number::counted(num_fit, "candidate")) " fit, none was rejected." }
        } @else {
            (table(&format!("{} rejected, and why", number::counted(num_rejected, "candidate")), &[numbers("candidates"), words("why")], &rejected))
            (super::first_of(rejected.len(), plan.rejections.len(), "cause"))
        }
    };
    Some(Section { id: "plan", name: "The plan, and why", body })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_front_has_what_none_beats_in_both() {
        let plans = [(10, 5), (12, 5), (12, 4), (20, 9), (10, 5), (30, 1)];
        assert_eq!(pareto(&plans), [true, false, true, false, true, true]);
    }
}
