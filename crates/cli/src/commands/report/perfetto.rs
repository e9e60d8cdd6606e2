//! `dflop report --trace`: steps for ui.perfetto.dev, as many as a browser opens.

use super::super::simulate::write_trace;
use crate::Failure;
use dflop_report::{Report, StepView};
use dflop_types::{Timeline, counted, thousands};
use std::ops::RangeInclusive;
use std::path::Path;

/// The most spans where no steps are named: some 60 MB. All of a long run on many ranks is a file that no browser opens.
const SPANS_MAX: usize = 400_000;

/// Writes the measured (or rehearsed) and predicted timelines of `steps`. Where none are named, it writes all steps, or as many as there is room for.
pub(super) fn write(
    path: &Path,
    report: &Report,
    steps: Option<&RangeInclusive<u64>>,
) -> Result<(), Failure> {
    let views: Vec<&StepView> = match steps {
        Some(steps) => report.steps.iter().filter(|view| steps.contains(&view.step)).collect(),
        None => some_of(report, SPANS_MAX),
    };
    if let (Some(steps), true) = (steps, views.is_empty()) {
        let all = || report.steps.iter().map(|view| view.step);
        let known = all().min().zip(all().max());
        let known = known.map_or("there are none".to_owned(), |(first, last)| {
            format!("the first is {}, the last {}", thousands(first), thousands(last))
        });
        return Err(Failure::new(
            format!("`--trace-steps {}..{}` holds no step of the run: {known}", steps.start(), steps.end()),
            None,
        ));
    }
    if steps.is_none() && views.len() < report.steps.len() {
        talk!(
            "note: the trace has {} of {}, the slowest and the last ones; `--trace-steps FIRST..LAST` names others",
            thousands(views.len() as u64),
            counted(report.steps.len() as u64, "step")
        );
    }
    let named: Vec<(String, &Timeline)> = views
        .iter()
        .flat_map(|view| {
            let name = |what: &str| format!("step {} {} {what}", view.step, view.arm);
            [(name("predicted"), view.predicted.as_ref()), (name(view.how()), view.measured.as_ref())]
        })
        .filter_map(|(name, timeline)| Some((name, timeline?)))
        .collect();
    let borrowed: Vec<(&str, &Timeline)> =
        named.iter().map(|(name, timeline)| (name.as_str(), *timeline)).collect();
    write_trace(path, &borrowed)
}

/// All steps within `spans_max`; else the slowest, which the page explains, and the last ones, in their order.
fn some_of(report: &Report, spans_max: usize) -> Vec<&StepView> {
    let num_spans = |view: &StepView| -> usize {
        [&view.predicted, &view.measured].into_iter().flatten().map(|timeline| timeline.spans.len()).sum()
    };
    let is_slow =
        |view: &StepView| report.slow_steps.iter().any(|slow| slow.step == view.step && slow.arm == view.arm);
    let of = |slow: bool| (0..report.steps.len()).rev().filter(move |&at| is_slow(&report.steps[at]) == slow);
    let mut sum = 0;
    let mut taken: Vec<usize> = of(true)
        .chain(of(false))
        .take_while(|&at| {
            sum += num_spans(&report.steps[at]);
            sum <= spans_max
        })
        .collect();
    taken.sort_unstable();
    taken.into_iter().map(|at| &report.steps[at]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflop_report::SlowStep;
    use dflop_types::{Rank, Span};

    /// Ten steps of five spans each, of which step 2 was slow; room for three.
    #[test]
    fn the_slowest_and_the_last_steps_have_room_first() {
        let span = Span { rank: Rank(0), action: "0F0".parse().unwrap(), start_ns: 0, end_ns: 1 };
        let timeline = Timeline { num_ranks: 1, makespan_ns: 1, spans: vec![span; 5], ..Timeline::default() };
        let view = |step| StepView { step, measured: Some(timeline.clone()), ..StepView::default() };
        let slow = SlowStep { step: 2, ..SlowStep::default() };
        let report =
            Report { steps: (0..10).map(view).collect(), slow_steps: vec![slow], ..Report::default() };
        let numbers =
            |spans_max| some_of(&report, spans_max).iter().map(|view| view.step).collect::<Vec<u64>>();
        assert_eq!(numbers(19), [2, 8, 9]);
        assert_eq!(numbers(50), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
    }
}
