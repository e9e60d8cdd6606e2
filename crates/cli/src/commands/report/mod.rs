//! `dflop report`: whatever a directory holds, as one page.

mod against;
mod blame;
mod forecast;
mod found;
mod loss;
mod metrics;
mod path;
mod perfetto;
mod planned;
mod shapes;
mod watch;

use crate::Failure;
use crate::args;
use crate::arms::ArmSummary;
use crate::comparison::{Comparison, usual_step};
use dflop_report::StepView;
use dflop_types::{Timeline, artifact};
use found::Found;
pub(super) use planned::{Planned, named_in};
use std::path::Path;
pub(super) use watch::run as watch;

pub(super) fn run(arguments: &args::Report) -> Result<(), Failure> {
    // Without one named the page is of what there is.
    if let Some(run) = arguments.run.as_ref().filter(|run| !run.join("metrics.jsonl").exists()) {
        return Err(Failure::new(
            format!("`{}` holds no run: there is no file `metrics.jsonl`", run.display()),
            Some(
                "name a directory that `dflop train` or `dflop rehearse` wrote, or leave `--run` out"
                    .to_owned(),
            ),
        ));
    }
    let found = Found::read(&arguments.dir, arguments.run.as_deref())?;
    let comparison = found.comparison();
    let mut report = found.report(&arguments.dir, comparison.as_ref(), views(&found)?)?;
    against::add(&found, &mut report, arguments)?;
    let page = dflop_report::render(&report);
    let views = &report.steps;
    let out = arguments.out.clone().unwrap_or_else(|| arguments.dir.join("report.html"));
    artifact::write_text(&out, "report", &page)?;
    if let Some(path) = &arguments.trace {
        perfetto::write(path, &report, arguments.trace_steps.as_ref())?;
    }
    if let Some(path) = &arguments.figure {
        // Without a comparison it may still be that one step of each was trained.
        let arms = comparison.as_ref().map(|c| (c.best.baseline.as_str(), c.best.ours.as_str()));
        let (baseline, ours) = arms.unwrap_or(("blind", "aware"));
        let step = usual_step(&found.metrics, baseline, ours);
        let view = |arm: &str| views.iter().find(|v| v.arm == arm && Some(v.step) == step);
        let measured = |arm: &str| view(arm).and_then(|v| v.measured.as_ref());
        let layout = view(ours).and_then(|v| v.layout.as_ref());
        let (Some(before), Some(after)) = (measured(baseline), measured(ours)) else {
            return Err(Failure::new(
                format!(
                    "`{}` holds no step of both arms, the figure shows one of each",
                    arguments.dir.display()
                ),
                Some("train with `dflop train --compare`".to_owned()),
            ));
        };
        let caption = found.caption(comparison.as_ref());
        // Arrival order, and the fastest that runs ahead, where they are not the fastest baseline anyway.
        let ahead = comparison.as_ref().and_then(Comparison::fastest_ahead);
        let shown = ["blind"].into_iter().chain(ahead).filter(|arm| *arm != baseline);
        let others = shown.filter_map(|arm| Some((arm, measured(arm)?)));
        let steps: Vec<(&str, &Timeline)> = others.chain([(baseline, before), (ours, after)]).collect();
        let figure = dflop_report::figure(&steps, layout, &caption);
        artifact::write_text(path, "figure", &figure).map_err(|error| Failure::of_flag(error, "--figure"))?;
        talk!("wrote {}", path.display());
    }
    if let Some(comparison) = &comparison {
        let mut text = serde_json::to_string_pretty(comparison)
            .map_err(|e| Failure::new(format!("cannot write the summary: {e}"), None))?;
        text.push('\n');
        let path = arguments.dir.join("summary.json");
        artifact::write_text(&path, "summary", &text).map_err(|error| Failure {
            // The page is written, wherever `--out` says; the summary has one place.
            hint: Some(format!("it stands in the directory: make `{}` writable", arguments.dir.display())),
            ..error.into()
        })?;
        outln!("{}", comparison.sentence());
        for arm in &comparison.arms {
            outln!("{}: {}", arm.arm, arm.words());
        }
        if !comparison.is_gain() {
            outln!(
                "On {} ranks nothing is gained over the fastest baseline; `dflop simulate --num-ranks 8,16,32,64` simulates larger clusters.",
                comparison.ranks
            );
        }
        talk!("wrote {}", path.display());
    } else {
        for arm in ArmSummary::all(&found.metrics) {
            outln!("{}: {}", arm.arm, arm.words());
        }
        // A file of an earlier comparison would describe a run that is no longer here.
        let _ = std::fs::remove_file(arguments.dir.join("summary.json"));
    }
    if let Some(words) = found.of_another_device() {
        outln!("{words}");
    }
    for against in [&report.against, &report.plans].into_iter().flatten() {
        out!("{}", against::words(against));
    }
    if let Some(words) = found.of_other_plans() {
        outln!("{words}");
    }
    outln!("report: {}", out.display());
    Ok(())
}

/// The page of a directory as it is now, for `--watch`.
fn page(arguments: &args::Report) -> Result<String, Failure> {
    let found = Found::read(&arguments.dir, arguments.run.as_deref())?;
    let mut report = found.report(&arguments.dir, found.comparison().as_ref(), views(&found)?)?;
    against::add(&found, &mut report, arguments)?;
    Ok(dflop_report::render(&report))
}

/// The steps that were measured, or what is predicted of one where none was trained.
fn views(found: &Found) -> Result<Vec<StepView>, Failure> {
    match (found.planned.last(), &found.data) {
        (Some(planned), Some(data)) if found.metrics.is_empty() => forecast::views(planned, data),
        _ => found.step_views(),
    }
}

fn title(dir: &Path) -> String {
    let name = dir.canonicalize().ok().and_then(|d| d.file_name().map(|n| n.to_string_lossy().into_owned()));
    name.unwrap_or_else(|| dir.display().to_string())
}

fn for_page(comparison: &Comparison) -> dflop_report::Comparison {
    let best = &comparison.best;
    let arm = |arm: &ArmSummary| dflop_report::ArmView {
        name: arm.arm.clone(),
        is_baseline: arm.is_baseline,
        step_ms: arm.step_ms,
        ratio: arm.ratio,
        ratio_low: arm.ratio_low,
        ratio_high: arm.ratio_high,
        idle_ratio: arm.idle_ratio,
    };
    dflop_report::Comparison {
        baseline: best.baseline.clone(),
        ours: best.ours.clone(),
        step_ms_baseline: best.step_ms_baseline,
        step_ms_ours: best.step_ms_ours,
        ratio: best.ratio,
        ratio_low: best.ratio_low,
        ratio_high: best.ratio_high,
        pairs: best.pairs.clone(),
        idle_ratio_baseline: best.idle_ratio_baseline,
        idle_ratio_ours: best.idle_ratio_ours,
        prediction_error_median: comparison.prediction_error_median,
        prediction_error_p95: comparison.prediction_error_p95,
        corrected_error_median: comparison.corrected_error_median,
        corrected_error_p95: comparison.corrected_error_p95,
        arms: comparison.arms.iter().map(arm).collect(),
    }
}
