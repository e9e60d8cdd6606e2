//! What a run costs: hours and money for a number of samples, and what ours saves against each other way. With scripts both numbers
//! can be changed.

use super::Section;
use crate::Report;
use crate::chart::{numbers, table, words};
use dflop_types::{Plan, RivalPrediction, number};
use maud::{Markup, html};

/// What the table begins with. No price is known here, and 1 is easy to multiply with.
const SAMPLES: u64 = 1_000_000;

/// A way to run, and the way of ours that it is held against: what was measured against what was measured, what is predicted against
/// the plan.
struct Way {
    name: String,
    step_ms: f64,
    /// Step of ours; `None` for ours itself.
    than_ms: Option<f64>,
}

/// All ways of the table. A time that is no number has no price.
fn ways(report: &Report, plan: &Plan) -> Vec<Way> {
    let way = |name: String, step_ms, than_ms| Way { name, step_ms, than_ms };
    let mut ways = Vec::new();
    if let Some(measured) = &report.measured
        && !measured.is_rehearsed
        && report.comparison.is_none()
    {
        ways.push(way("this run, measured".to_owned(), measured.step_ms_median, None));
    }
    if let Some(c) = &report.comparison {
        ways.push(way(format!("{}, measured", c.ours), c.step_ms_ours, None));
        ways.push(way(format!("{}, measured", c.baseline), c.step_ms_baseline, Some(c.step_ms_ours)));
    }
    let ms = |ns: u64| ns as f64 / 1e6;
    let plan_ms = ms(plan.best.prediction.step_ns_mean);
    ways.push(way("the plan, predicted".to_owned(), plan_ms, None));
    let rivals = plan.rivals.iter().map(|rival| (&rival.name, rival.step_ns_mean));
    let baselines = plan.ways.iter().filter(|way| way.is_baseline).map(|way| (&way.way, way.step_ns_mean));
    let predicted = rivals.chain(baselines);
    ways.extend(
        predicted.filter_map(|(name, ns)| Some(way(format!("{name}, predicted"), ms(ns?), Some(plan_ms)))),
    );
    ways.retain(|way| way.step_ms.is_finite() && way.than_ms.is_none_or(f64::is_finite));
    ways
}

/// The section; none without a plan, which says how many ranks run and how many samples a step has.
pub(super) fn section(report: &Report) -> Option<Section> {
    let plan = report.plan.as_ref()?;
    let ways = ways(report, plan);
    // Ranks that the plan leaves free are paid for as well.
    let num_free = plan.searched.map_or(0, |searched| searched.num_free_ranks);
    let ranks = plan.best.layout.num_ranks().saturating_add(num_free);
    let num_steps = SAMPLES.div_ceil(u64::from(plan.global_batch_size.max(1)));
    let row = |way: &Way| {
        let hours = |ms: f64| num_steps as f64 * ms / 3.6e6;
        let of_devices = hours(way.step_ms) * f64::from(ranks);
        let saved = way.than_ms.map(|ms| of_devices - hours(ms) * f64::from(ranks));
        let saved = saved.map_or_else(|| number::NONE.to_owned(), number::number);
        vec![
            way.name.clone(),
            number::ms(way.step_ms),
            number::number(hours(way.step_ms)),
            number::number(of_devices),
            number::number(of_devices),
            saved.clone(),
            saved,
        ]
    };
    let rows: Vec<Vec<String>> = ways.iter().map(row).collect();
    let columns = [
        words("step times of"),
        numbers("step"),
        numbers("hours"),
        numbers("device hours"),
        numbers("price"),
        numbers("device hours saved"),
        numbers("money saved"),
    ];
    let joined = |of: &dyn Fn(&Way) -> String| ways.iter().map(of).collect::<Vec<String>>().join(" ");
    let step_ms = joined(&|way| format!("{}", way.step_ms));
    // Nothing is saved against ours itself.
    let than_ms = joined(&|way| way.than_ms.map_or_else(|| number::NONE.to_owned(), |ms| format!("{ms}")));
    let body = html! {
        p {
            "A run of " span id="cost-samples-shown" { (number::thousands(SAMPLES)) } " samples on "
            (number::counted(u64::from(ranks), "rank")) ", " (number::thousands(u64::from(plan.global_batch_size)))
            " a step, at a price of " span id="cost-price-shown" { "1" } " an hour of a device. Checkpoints, restarts and waits for data are not in it. "
            "Saved is what ours saves against each other way: measured against measured, predicted against the plan."
        }
        div id="cost-inputs" class="controls numbers" data-ranks=(ranks) data-batch=(plan.global_batch_size) data-step-ms=(step_ms) data-than-ms=(than_ms) hidden {
            label { "samples " input type="number" id="cost-samples" min="1" max="1000000000000" step="1" value=(SAMPLES); }
            label { "price of a device and hour " input type="number" id="cost-price" min="0" max="1000000" step="any" value="1"; }
        }
        (table("Hours and price of the run", &columns, &rows))
        @if !plan.rivals.is_empty() { (rivals(plan)) }
    };
    Some(Section { id: "cost", name: "What a run costs", body })
}

/// What people run today, each with what it is.
fn rivals(plan: &Plan) -> Markup {
    let row = |rival: &RivalPrediction| {
        let [layout, num_microbatches] = match rival.step_ns_mean {
            Some(_) => [rival.layout.clone(), rival.num_microbatches.to_string()],
            None => ["nothing of it fits".to_owned(), number::NONE.to_owned()],
        };
        vec![rival.name.clone(), layout, num_microbatches]
    };
    let rows: Vec<Vec<String>> = plan.rivals.iter().map(row).collect();
    let columns =
        [words("what people run today"), words("the best of its own search"), numbers("microbatches")];
    html! {
        (table("What people run today", &columns, &rows))
        p class="note" {
            "Each on the same ranks, samples and memory as the plan (" code { "dflop plan --compare" }
            "). fsdp-dflop has our balance in the layouts of FSDP."
        }
    }
}
