//! Error by size of sample: what is said, and what is drawn.

use dflop_report::{Report, ShapeError, render};

/// A bin of the LLM whose samples took `times` their prediction; `excess` is laid to them alone.
fn bin(tokens: u64, num_samples: u64, times: f64, excess: f64) -> ShapeError {
    let predicted_ms = (tokens * num_samples) as f64 / 1e3;
    ShapeError {
        tokens_min: tokens,
        tokens_max: tokens,
        num_samples,
        num_tokens: tokens * num_samples,
        num_actions: num_samples,
        predicted_ms,
        measured_ms: predicted_ms * times,
        excess,
        excess_error: 0.01,
        ..Default::default()
    }
}

fn section(shapes: Vec<ShapeError>) -> String {
    let page = render(&Report { shapes, ..Report::default() });
    let rest = page.split_once("<section id=\"shapes\"").unwrap().1;
    rest.split_once("</section>").unwrap().0.to_owned()
}

#[test]
fn what_all_sizes_take_alike_is_said_before_what_single_sizes_take() {
    let said = |times, excess| section(vec![bin(100, 9, times, 0.0), bin(200, 9, times, excess)]);
    let chance = "No size of sample parts from its prediction by more than chance.";
    assert!(said(1.02, 0.0).contains(chance));
    let all = said(10.0, 0.0);
    assert!(all.contains(
        "Samples of all sizes take 10.0 times the predicted time in the LLM. No size parts from the others"
    ));
    assert!(!all.contains(chance), "ten times the prediction is no chance");
    assert!(
        said(1.02, 0.5)
            .contains("Furthest from their predicted time: samples of <strong>200 tokens in the LLM")
    );
    assert!(
        said(10.0, 0.5).contains("in the LLM. Furthest from that: samples of <strong>200 tokens in the LLM")
    );
}

/// Points of both lines: each bin of one sample would be one.
#[test]
fn points_are_of_several_samples_and_few() {
    let num_points = |shapes: Vec<ShapeError>| section(shapes).matches("<circle").count();
    // 40 bins of one sample: five groups of eight. 42: the last two join the fifth group.
    assert_eq!(num_points((1..=40).map(|at| bin(100 * at, 1, 1.0, 0.0)).collect()), 2 * 5);
    assert_eq!(num_points((1..=42).map(|at| bin(100 * at, 1, 1.0, 0.0)).collect()), 2 * 5);
    // 128 bins of a hundred samples: 32 points. Their tables keep all rows.
    let many: Vec<ShapeError> = (1..=128).map(|at| bin(100 * at, 100, 1.0, 0.0)).collect();
    assert_eq!(num_points(many.clone()), 2 * 32);
    assert_eq!(section(many).matches("<tr>").count(), 1 + 128);
    // Three tile counts with samples enough stay as they are.
    assert_eq!(num_points((1..=3).map(|at| bin(100 * at, 30, 1.0, 0.0)).collect()), 2 * 3);
}
