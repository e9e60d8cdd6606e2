//! What a run costs: hours and money for a number of samples. With scripts both numbers can be changed.

use super::Section;
use crate::Report;
use crate::chart::{numbers, table, words};
use dflop_types::{WayPrediction, number};
use maud::html;

/// What the table begins with. No price is known here, and 1 is easy to multiply with.
const SAMPLES: u64 = 1_000_000;

/// The section; none without a plan, which says how many ranks run and how many samples a step has.
pub(super) fn section(report: &Report) -> Option<Section> {
    let plan = report.plan.as_ref()?;
    let mut steps: Vec<(String, f64)> = Vec::new();
    if let Some(measured) = &report.measured
        && !measured.is_rehearsed
        && report.comparison.is_none()
    {
        steps.push(("this run, measured".to_owned(), measured.step_ms_median));
    }
    if let Some(c) = &report.comparison {
        steps.push((format!("{}, measured", c.ours), c.step_ms_ours));
        steps.push((format!("{}, measured", c.baseline), c.step_ms_baseline));
    }
    steps.push(("the plan, predicted".to_owned(), plan.best.prediction.step_ns_mean as f64 / 1e6));
    let way = |way: &WayPrediction| {
        let ns = way.step_ns_mean.filter(|_| way.is_baseline)?;
        Some((format!("{}, predicted", way.way), ns as f64 / 1e6))
    };
    steps.extend(plan.ways.iter().filter_map(way));
    // A time that is no number has no price.
    steps.retain(|(_, ms)| ms.is_finite());
    let ranks = plan.best.layout.num_ranks();
    let num_steps = SAMPLES.div_ceil(u64::from(plan.global_batch_size.max(1)));
    let row = |(name, ms): &(String, f64)| {
        let hours = num_steps as f64 * ms / 3.6e6;
        let of_devices = hours * f64::from(ranks);
        vec![
            name.clone(),
            number::ms(*ms),
            number::number(hours),
            number::number(of_devices),
            number::number(of_devices),
        ]
    };
    let rows: Vec<Vec<String>> = steps.iter().map(row).collect();
    let columns = [
        words("step times of"),
        numbers("step"),
        numbers("hours"),
        numbers("device hours"),
        numbers("price"),
    ];
    let step_ms: Vec<String> = steps.iter().map(|(_, ms)| format!("{ms}")).collect();
    let body = html! {
        p {
            "A run of " span id="cost-samples-shown" { (number::thousands(SAMPLES)) } " samples on "
            (number::counted(u64::from(ranks), "rank")) ", " (number::thousands(u64::from(plan.global_batch_size)))
            " a step, at a price of " span id="cost-price-shown" { "1" } " an hour of a device. Checkpoints, restarts and waits for data are not in it."
        }
        div id="cost-inputs" class="controls numbers" data-ranks=(ranks) data-batch=(plan.global_batch_size) data-step-ms=(step_ms.join(" ")) hidden {
            label { "samples " input type="number" id="cost-samples" min="1" max="1000000000000" step="1" value=(SAMPLES); }
            label { "price of a device and hour " input type="number" id="cost-price" min="0" max="1000000" step="any" value="1"; }
        }
        (table("Hours and price of the run", &columns, &rows))
    };
    Some(Section { id: "cost", name: "What a run costs", body })
}
