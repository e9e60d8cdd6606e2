//! `dflop simulate`: durations of a file, or a plan on its data.

use super::{Inputs, beside, milliseconds};
use crate::Failure;
use crate::args;
use dflop_sim::Durations;
use dflop_step::{Arm, StepScheduler};
use dflop_types::{PipelineOrder, Plan, Timeline, artifact, counted};
use serde_json::json;
use std::path::Path;

pub(super) fn run(arguments: &args::Simulate) -> Result<(), Failure> {
    match &arguments.durations {
        Some(path) => durations(arguments, path),
        None => plan(arguments),
    }
}

fn durations(arguments: &args::Simulate, path: &Path) -> Result<(), Failure> {
    let text = std::fs::read_to_string(path)
        .map_err(|e| Failure::new(format!("cannot read `{}`: {e}", path.display()), None))?;
    let durations = Durations::from_json(&text).map_err(|e| {
        let mut failure = Failure::from(e);
        failure.message = format!("`{}`: {}", path.display(), failure.message);
        failure
    })?;
    let order = match arguments.order {
        args::Order::GPipe => PipelineOrder::GPipe,
        args::Order::OneFOneB => PipelineOrder::OneFOneB,
        args::Order::Interleaved => PipelineOrder::Interleaved,
        args::Order::ZeroBubble => PipelineOrder::ZeroBubble,
        args::Order::DataAware => PipelineOrder::DataAware,
    };
    let num_stages = durations.forward_ns.len();
    let timeline = match (order, arguments.ranks) {
        (PipelineOrder::Interleaved, Some(ranks)) => dflop_sim::simulate_interleaved(&durations, ranks)?,
        (PipelineOrder::Interleaved, None) => {
            let hint = format!("give `--ranks`, a divisor of the number of stages, {num_stages}");
            return Err(Failure::new(format!("`{order}` needs to know the ranks"), Some(hint)));
        }
        (_, Some(ranks)) if ranks as usize != num_stages => {
            let hint = "leave out `--ranks`, or take `--order interleaved-1f1b`".to_owned();
            let stages = counted(num_stages as u64, "stage");
            let message = format!("`--ranks {ranks}`: `{order}` has one rank a stage, {stages}");
            return Err(Failure::new(message, Some(hint)));
        }
        (PipelineOrder::DataAware, _) => dflop_step::lists::simulate_pipeline(&durations)?,
        _ => dflop_sim::simulate(&durations, order)?,
    };
    if let Some(path) = &arguments.trace {
        write_trace(path, &[("simulated", &timeline)])?;
    }
    if arguments.json {
        let spans: Vec<_> = timeline
            .spans
            .iter()
            .map(|s| json!({"rank": s.rank, "stage": s.action.stage, "action": s.action, "start_ns": s.start_ns, "end_ns": s.end_ns}))
            .collect();
        outln!(
            "{}",
            json!({"makespan_ns": timeline.makespan_ns, "ideal_ns": timeline.ideal_ns(),
                   "idle_ns": timeline.idle_ns, "spans": spans})
        );
    } else {
        let num_microbatches = durations.forward_ns.first().map_or(0, Vec::len);
        outln!(
            "{order}, {}, {}, {num_microbatches} microbatch{}",
            counted(num_stages as u64, "stage"),
            counted(timeline.num_ranks.into(), "rank"),
            if num_microbatches == 1 { "" } else { "es" }
        );
        outln!("{}", summary(&timeline));
        let ideal_ns = timeline.ideal_ns();
        outln!(
            "ideal    {}, the work of the busiest rank; the makespan is {:.3} times that",
            milliseconds(ideal_ns),
            timeline.makespan_ns as f64 / ideal_ns.max(1) as f64
        );
    }
    Ok(())
}

/// Makespan and idle time by cause, in one line.
fn summary(timeline: &Timeline) -> String {
    let whole = (u64::from(timeline.num_ranks) * timeline.makespan_ns).max(1) as f64;
    let percent = |ns: u64| ns as f64 / whole * 100.0;
    let data_wait = match timeline.idle_ns.data_wait {
        0 => String::new(),
        ns => format!(", data wait {:.1} %", percent(ns)),
    };
    format!(
        "makespan {}, idle {:.1} % (ramp {:.1} %, imbalance {:.1} %, transfer {:.1} %{data_wait})",
        milliseconds(timeline.makespan_ns),
        timeline.bubble_ratio() * 100.0,
        percent(timeline.idle_ns.ramp),
        percent(timeline.idle_ns.imbalance),
        percent(timeline.idle_ns.transfer)
    )
}

fn plan(arguments: &args::Simulate) -> Result<(), Failure> {
    let inputs = Inputs::read(&arguments.files.inputs)?;
    inputs.note_device();
    let path = beside(&inputs.config, arguments.files.plan.as_ref(), "plan.json");
    let plan: Plan = artifact::read(&path)?;
    inputs.check_plan(&path, &plan)?;
    let seed = inputs.config.train.seed;
    let scheduler = StepScheduler::of_plan(
        &plan,
        &inputs.data_profile,
        &inputs.model_profile,
        inputs.config.cluster.memory_budget_bytes,
        seed,
    )?
    .with_giants(inputs.config.giants());
    // Arrival order knows no cap: its times are shown without it, and how often it passes it is said.
    let bucket_tokens_max = inputs.config.train.bucket_tokens_max;
    let (scheduler, uncapped) = (scheduler.clone().with_bucket_tokens_max(bucket_tokens_max)?, scheduler);
    let batches = inputs.batches(&plan)?;
    let mut steps = Vec::new();
    let (mut num_predictions, mut num_extrapolated, mut num_assumed) = (0, 0, 0);
    let (mut is_reduction_measured, mut num_over) = (true, 0);
    for step in 0..u64::from(arguments.steps) {
        let batch = batches.batch(step);
        let mut timeline = |of: &StepScheduler, arm| -> Result<Timeline, Failure> {
            let schedule = of.schedule(step, &batch, arm)?;
            num_over += u64::from(scheduler.check_tokens(&schedule).is_err());
            let coverage = scheduler.coverage(&schedule)?;
            num_predictions += coverage.num_predictions;
            num_extrapolated += coverage.num_extrapolated;
            num_assumed += coverage.num_assumed;
            is_reduction_measured &= coverage.is_reduction_measured;
            Ok(scheduler.simulate(&schedule)?)
        };
        let blind = timeline(&uncapped, Arm::BLIND)?;
        steps.push((blind, timeline(&scheduler, Arm::AWARE)?));
    }
    if let Some(path) = &arguments.trace {
        let named: Vec<(String, &Timeline)> = steps
            .iter()
            .enumerate()
            .flat_map(|(k, (b, a))| [(format!("step {k} blind"), b), (format!("step {k} aware"), a)])
            .collect();
        let borrowed: Vec<(&str, &Timeline)> = named.iter().map(|(n, t)| (n.as_str(), *t)).collect();
        write_trace(path, &borrowed)?;
    }
    let mean = |pick: &dyn Fn(&(Timeline, Timeline)) -> f64| {
        steps.iter().map(pick).sum::<f64>() / steps.len().max(1) as f64
    };
    let blind_ns = mean(&|s| s.0.makespan_ns as f64);
    let aware_ns = mean(&|s| s.1.makespan_ns as f64);
    let (blind_idle, aware_idle) = (mean(&|s| s.0.bubble_ratio()), mean(&|s| s.1.bubble_ratio()));
    if arguments.json {
        let list: Vec<_> = steps
            .iter()
            .map(|(b, a)| {
                json!({"blind": {"makespan_ns": b.makespan_ns, "idle_ns": b.idle_ns},
                       "aware": {"makespan_ns": a.makespan_ns, "idle_ns": a.idle_ns}})
            })
            .collect();
        outln!(
            "{}",
            json!({"steps": list, "blind_ns_mean": blind_ns, "aware_ns_mean": aware_ns,
                   "num_predictions": num_predictions, "num_extrapolated": num_extrapolated,
                   "num_assumed": num_assumed, "is_reduction_measured": is_reduction_measured,
                   "bucket_tokens_max": bucket_tokens_max, "num_blind_over_tokens": num_over})
        );
        return Ok(());
    }
    let num_microbatches = plan.best.num_microbatches;
    let noun = if num_microbatches == 1 { "microbatch" } else { "microbatches" };
    outln!("{}, {num_microbatches} {noun}, {}", plan.best.layout, plan.best.pipeline_order);
    print_steps(&steps);
    outln!(
        "{:>6} {:>12} {:>12} {:>8.3}   idle {:.1} % -> {:.1} %  (simulated, from the {} model profile)",
        "mean",
        milliseconds(blind_ns as u64),
        milliseconds(aware_ns as u64),
        blind_ns / aware_ns.max(1.0),
        blind_idle * 100.0,
        aware_idle * 100.0,
        if inputs.model_profile.is_estimated { "estimated, not measured" } else { "measured" }
    );
    print_notes(num_predictions, num_extrapolated, num_assumed);
    if let Some(cap) = bucket_tokens_max.filter(|_| num_over > 0) {
        outln!(
            "note: arrival order passes `bucket_tokens_max` {cap} in {num_over} of {} steps; its times are without the cap",
            steps.len()
        );
    }
    if !is_reduction_measured {
        outln!("note: the reduction of the gradients was not measured as it is: its time is assumed");
    }
    Ok(())
}

/// Simulated time of each step under both arms.
fn print_steps(steps: &[(Timeline, Timeline)]) {
    outln!("{:>6} {:>12} {:>12} {:>8}", "step", "blind", "aware", "ratio");
    for (step, (blind, aware)) in steps.iter().enumerate() {
        outln!(
            "{step:>6} {:>12} {:>12} {:>8.3}",
            milliseconds(blind.makespan_ns),
            milliseconds(aware.makespan_ns),
            blind.makespan_ns as f64 / aware.makespan_ns.max(1) as f64
        );
    }
}

/// Says how many of the predictions stand on less than measurements.
fn print_notes(num_predictions: u64, num_extrapolated: u64, num_assumed: u64) {
    for (count, what) in [
        (num_extrapolated, "lie outside the measured range"),
        (num_assumed, "hold transfers that were not measured"),
    ] {
        if count > 0 {
            outln!("note: {count} of {num_predictions} predictions {what}");
        }
    }
}

/// Writes a trace for ui.perfetto.dev.
pub(super) fn write_trace(path: &Path, timelines: &[(&str, &Timeline)]) -> Result<(), Failure> {
    artifact::write_text(path, "trace", &dflop_sim::perfetto(timelines))
        .map_err(|error| Failure::of_flag(error, "--trace"))?;
    talk!("wrote {} (open it at ui.perfetto.dev)", path.display());
    Ok(())
}
