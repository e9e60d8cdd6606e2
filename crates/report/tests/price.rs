//! What a run costs, on the page.

use crate::small::small;
use crate::soundness::{check, shown};
use dflop_report::Report;

/// A million samples in steps of so many: hours, hours of all devices, and their price, by hand.
#[test]
fn a_run_costs_its_hours_times_its_devices() {
    let mut report = Report { plan: small().plan, ..Report::default() };
    let plan = report.plan.as_mut().unwrap();
    plan.global_batch_size = 64;
    plan.best.prediction.step_ns_mean = 3_600_000_000;
    plan.ways.clear();
    let ranks = f64::from(plan.best.layout.num_ranks());
    let page = shown(&report);
    check(&page);
    // 15,625 steps of 3.6 s are 15.625 hours.
    let cells: Vec<&str> = page
        .split("the plan, predicted</td>")
        .nth(1)
        .unwrap()
        .split("</td>")
        .take(4)
        .map(|cell| cell.rsplit('>').next().unwrap())
        .collect();
    let number = |cell: &str| cell.parse::<f64>().unwrap();
    assert!((number(cells[1]) - 15.6).abs() < 0.05, "{cells:?}");
    assert!((number(cells[2]) / (15.625 * ranks) - 1.0).abs() < 0.01, "{cells:?}");
    assert_eq!(cells[2], cells[3]);
}
