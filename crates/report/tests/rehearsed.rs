//! The page of a rehearsal: nothing in it is called measured.

use crate::small::small;
use dflop_report::{Measured, Report, ShapeError, StepView, render};

/// A page of steps and of errors by size alone, whose steps are rehearsed or not.
fn page(is_rehearsed: bool) -> String {
    let steps: Vec<StepView> =
        small().steps.into_iter().map(|step| StepView { is_rehearsed, ..step }).collect();
    let bin = |tokens| ShapeError {
        tokens_min: tokens,
        tokens_max: tokens,
        num_samples: 9,
        num_tokens: tokens * 9,
        num_actions: 9,
        predicted_ms: 1.0,
        measured_ms: 2.0,
        ..ShapeError::default()
    };
    let measured = Measured {
        num_steps: 2,
        is_rehearsed,
        step_ms_median: 35.0,
        over_predicted_median: 1.0,
        idle_ratio: 0.2,
    };
    render(&Report { steps, shapes: vec![bin(100), bin(200)], measured: Some(measured), ..Report::default() })
}

#[test]
fn nothing_on_the_page_of_a_rehearsal_is_measured() {
    let (trained, rehearsed) = (page(false), page(true));
    assert!(trained.contains("|predicted - measured| / measured"));
    assert!(rehearsed.contains("|predicted - rehearsed| / rehearsed"));
    let around = rehearsed.find("measured").map(|at| &rehearsed[at.saturating_sub(100)..at + 60]);
    assert_eq!(around, None);
}
