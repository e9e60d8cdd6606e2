//! What a run costs, on the page.

use crate::small::small;
use crate::soundness::{check, shown};
use dflop_report::Report;
use dflop_types::RivalPrediction;

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
    let cells = cells(&page, "the plan, predicted");
    let number = |cell: &str| cell.parse::<f64>().unwrap();
    assert!((number(&cells[1]) - 15.6).abs() < 0.05, "{cells:?}");
    assert!((number(&cells[2]) / (15.625 * ranks) - 1.0).abs() < 0.01, "{cells:?}");
    assert_eq!(cells[2], cells[3]);
    assert_eq!(&cells[4..], ["-", "-"]);
}

/// What people run today stands in the table with what the plan saves against each of it: by hand from half as long and half as
/// long again. What does not fit costs nothing and is named.
#[test]
fn rivals_stand_beside_the_plan_with_what_it_saves() {
    let mut report = Report { plan: small().plan, ..Report::default() };
    let plan = report.plan.as_mut().unwrap();
    plan.global_batch_size = 64;
    plan.best.prediction.step_ns_mean = 3_600_000_000;
    let rival = |name: &str, step_ns_mean| RivalPrediction {
        name: name.to_owned(),
        is_of_others: true,
        layout: format!("layout of {name}"),
        num_microbatches: 4,
        step_ns_mean,
    };
    plan.rivals = vec![
        rival("megatron", Some(5_400_000_000)),
        rival("fsdp-tokens", Some(1_800_000_000)),
        rival("paper", None),
    ];
    let ranks = f64::from(plan.best.layout.num_ranks());
    let page = shown(&report);
    check(&page);
    let saved = |name: &str| -> f64 {
        let cells = cells(&page, &format!("{name}, predicted"));
        assert_eq!(cells[4], cells[5], "money at a price of 1");
        cells[4].parse().unwrap()
    };
    assert!((saved("megatron") / (7.8125 * ranks) - 1.0).abs() < 0.01);
    assert!((saved("fsdp-tokens") / (-7.8125 * ranks) - 1.0).abs() < 0.01);
    let of = |name: &str, nth: usize| {
        let row = page.split(&format!(">{name}</td>")).nth(1).unwrap();
        row.split("</td>").nth(nth).unwrap().rsplit('>').next().unwrap().to_owned()
    };
    assert_eq!([of("megatron", 0), of("megatron", 1)], ["layout of megatron", "4"]);
    assert_eq!([of("paper", 0), of("paper", 1)], ["nothing of it fits", "-"]);
    assert!(!page.contains("paper, predicted</td>"));
    assert_eq!(page.matches("data-than-ms=\"- 3600 3600").count(), 1);
}

/// The sentence divides by the fastest of all, be it in the plan's own layout or in one of its own.
#[test]
fn the_sentence_names_the_fastest_other_way() {
    let mut report = Report { plan: small().plan, ..Report::default() };
    let plan = report.plan.as_mut().unwrap();
    let own_ns = plan.best.prediction.step_ns_mean;
    let rival = |name: &str, is_of_others, step_ns_mean| RivalPrediction {
        name: name.to_owned(),
        is_of_others,
        layout: String::new(),
        num_microbatches: 4,
        step_ns_mean: Some(step_ns_mean),
    };
    // In the plan's layout the best takes 1.028 times as long. Our balance in another layout is not other people's.
    plan.rivals = vec![rival("fsdp-dflop", false, own_ns / 2), rival("megatron", true, own_ns * 2)];
    assert!(shown(&report).contains("the best baseline that can run (blind-ahead) 37.0 ms (1.028x)"));
    report.plan.as_mut().unwrap().rivals.push(rival("fsdp-tokens", true, own_ns));
    assert!(shown(&report).contains("the best baseline that can run (fsdp-tokens) 36.0 ms (1.000x)"));
}

/// The cells of the row that begins with `name`, without the name.
fn cells(page: &str, name: &str) -> Vec<String> {
    let row = page.split(&format!("{name}</td>")).nth(1).unwrap();
    row.split("</td>").take(6).map(|cell| cell.rsplit('>').next().unwrap().to_owned()).collect()
}
