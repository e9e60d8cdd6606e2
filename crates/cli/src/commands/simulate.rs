//! `dflop simulate`: durations of a file, or a plan on its data.

use super::{Inputs, beside, scale, what_if};
use crate::Failure;
use crate::args;
use dflop_plan::{data_parallel_of, refusal};
use dflop_sim::Durations;
use dflop_step::{Arm, Coverage, Method, StepScheduler};
use dflop_types::{PipelineOrder, Plan, Refusal, SampleIndex, Timeline, artifact, counted, number, regular};
use serde_json::json;
use std::path::Path;

pub(super) fn run(arguments: &args::Simulate) -> Result<(), Failure> {
    match &arguments.durations {
        Some(path) => durations(arguments, path),
        None => plan(arguments),
    }
}

fn durations(arguments: &args::Simulate, path: &Path) -> Result<(), Failure> {
    let text = regular::read_to_string(path, super::INPUT_BYTES_MAX)
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
        // Without work there is nothing to divide by.
        let over = match timeline.ideal_ns() {
            0 => String::new(),
            ideal_ns => {
                let over = number::times(timeline.makespan_ns as f64 / ideal_ns as f64);
                format!("; the makespan is {over} that")
            }
        };
        outln!("ideal    {}, the work of the busiest rank{over}", number::ns(timeline.ideal_ns()));
    }
    Ok(())
}

/// Makespan and idle time by cause, in one line.
fn summary(timeline: &Timeline) -> String {
    let whole = (u64::from(timeline.num_ranks) * timeline.makespan_ns).max(1) as f64;
    let percent = |ns: u64| number::percent(ns as f64 / whole);
    let data_wait = match timeline.idle_ns.data_wait {
        0 => String::new(),
        ns => format!(", data wait {}", percent(ns)),
    };
    format!(
        "makespan {}, idle {} (ramp {}, imbalance {}, transfer {}{data_wait})",
        number::ns(timeline.makespan_ns),
        number::percent(timeline.bubble_ratio()),
        percent(timeline.idle_ns.ramp),
        percent(timeline.idle_ns.imbalance),
        percent(timeline.idle_ns.transfer)
    )
}

/// One way over all steps: its simulated steps, or why one of them cannot run.
struct Way {
    name: String,
    is_baseline: bool,
    /// By step: nanoseconds, and the timeline where the way has one.
    steps: Vec<Result<(u64, Option<Timeline>), Refusal>>,
}

impl Way {
    /// Mean of the steps, in nanoseconds; `None` if one cannot run.
    fn mean_ns(&self) -> Option<f64> {
        let sum =
            self.steps.iter().map(|step| step.as_ref().ok().map(|step| step.0 as f64)).sum::<Option<f64>>();
        sum.map(|sum| sum / self.steps.len().max(1) as f64)
    }

    /// Mean idle share; `None` if one cannot run, or nothing is known of it.
    fn idle(&self) -> Option<f64> {
        let ratio = |step: &Result<(u64, Option<Timeline>), Refusal>| {
            step.as_ref().ok().and_then(|step| step.1.as_ref()).map(Timeline::bubble_ratio)
        };
        let sum = self.steps.iter().map(ratio).sum::<Option<f64>>();
        sum.map(|sum| sum / self.steps.len().max(1) as f64)
    }

    /// Why the first step that cannot run cannot, and how many cannot.
    fn refusal(&self) -> Option<(Refusal, usize)> {
        let refusals = || self.steps.iter().filter_map(|step| step.as_ref().err());
        refusals().next().map(|first| (*first, refusals().count()))
    }
}

/// How much of the predictions stands on measurements.
#[derive(Default)]
struct Basis {
    num_predictions: u64,
    num_extrapolated: u64,
    num_assumed: u64,
    lacks_reduction: bool,
}

impl Basis {
    fn add(&mut self, coverage: Coverage) {
        self.num_predictions += coverage.num_predictions;
        self.num_extrapolated += coverage.num_extrapolated;
        self.num_assumed += coverage.num_assumed;
        self.lacks_reduction |= !coverage.is_reduction_measured;
    }
}

/// Every way in which the steps are simulated: baselines, then ours.
fn ways(
    scheduler: &StepScheduler,
    batches: &[Vec<SampleIndex>],
    basis: &mut Basis,
) -> Result<Vec<Way>, Failure> {
    let mut arm = |method, is_ahead| -> Result<Way, Failure> {
        let arm = Arm { method, is_ahead };
        let mut steps = Vec::with_capacity(batches.len());
        for (step, batch) in (0..).zip(batches) {
            steps.push(match scheduler.schedule(step, batch, arm) {
                Ok(schedule) => {
                    basis.add(scheduler.coverage(&schedule)?);
                    let timeline = scheduler.simulate(&schedule)?;
                    Ok((timeline.makespan_ns, Some(timeline)))
                }
                // One arm that cannot run must not hide the others.
                Err(error) => Err(refusal(&error).ok_or(error)?),
            });
        }
        Ok(Way { name: arm.to_string(), is_baseline: method != Method::Aware, steps })
    };
    // Colocated ranks have one microbatch in flight: nothing runs ahead.
    let ahead: &[bool] = if scheduler.settings().layout.is_colocated() { &[false] } else { &[false, true] };
    let mut ways = Vec::new();
    for method in [Method::Blind, Method::Tokens] {
        for &is_ahead in ahead {
            ways.push(arm(method, is_ahead)?);
        }
    }
    let ours = ahead.iter().map(|&is_ahead| arm(Method::Aware, is_ahead)).collect::<Result<Vec<_>, _>>()?;
    // A cost model of layers that are cut knows none of whole ones.
    let is_cut = scheduler.settings().layout.cuts_layers();
    for shards_states in [false, true].into_iter().filter(|_| !is_cut) {
        let plain = data_parallel_of(scheduler, shards_states);
        let step = |batch: &Vec<SampleIndex>| plain.step(batch).map(|step| (step.makespan_ns, None));
        let steps = batches.iter().map(step).collect();
        ways.push(Way { name: plain.name().to_owned(), is_baseline: true, steps });
    }
    ways.extend(ours);
    Ok(ways)
}

fn plan(arguments: &args::Simulate) -> Result<(), Failure> {
    what_if::check_named_once(&arguments.set)?;
    let inputs = Inputs::read_to_plan(&arguments.files.inputs)?;
    inputs.note_device();
    if !arguments.set.is_empty() {
        let files = what_if::Files { csv: arguments.csv.as_deref(), plot: arguments.plot.as_deref() };
        return what_if::run(&inputs, &arguments.set, files, arguments.json);
    }
    let path = beside(&inputs.config, arguments.files.plan.as_ref(), "plan.json");
    let plan: Plan = artifact::read(&path)?;
    inputs.check_plan(&path, &plan)?;
    if !arguments.num_ranks.is_empty() {
        return scale::run(&inputs, &plan, &arguments.num_ranks, arguments.json);
    }
    let bucket_tokens_max = inputs.config.train.bucket_tokens_max;
    let scheduler = StepScheduler::of_plan(
        &plan,
        &inputs.data_profile,
        &inputs.model_profile,
        inputs.config.cluster.memory_budget_bytes,
        inputs.config.train.seed,
    )?
    .with_ranks_per_node(inputs.config.cluster.ranks_per_node)?
    .with_giants(inputs.config.giants())
    .with_bucket_tokens_max(bucket_tokens_max)?;
    let batches = inputs.batches(&plan)?;
    let batches: Vec<Vec<SampleIndex>> =
        (0..u64::from(arguments.steps)).map(|step| batches.batch(step)).collect();
    let mut basis = Basis::default();
    let ways = ways(&scheduler, &batches, &mut basis)?;
    if let Some(path) = &arguments.trace {
        let named: Vec<(String, &Timeline)> = (0..batches.len())
            .flat_map(|step| ways.iter().map(move |way| (step, way)))
            .filter_map(|(step, way)| {
                let timeline = way.steps[step].as_ref().ok()?.1.as_ref()?;
                Some((format!("step {step} {}", way.name), timeline))
            })
            .collect();
        let borrowed: Vec<(&str, &Timeline)> = named.iter().map(|(n, t)| (n.as_str(), *t)).collect();
        write_trace(path, &borrowed)?;
    }
    if arguments.json {
        print_json(&ways, batches.len(), &basis, bucket_tokens_max);
    } else {
        outln!("{}", plan.best.in_words());
        outln!(
            "{}, times simulated from the {} model profile",
            counted(batches.len() as u64, "global batch").replace("batchs", "batches"),
            if inputs.model_profile.is_estimated { "estimated, not measured," } else { "measured" }
        );
        print_ways(&ways, batches.len());
        print_notes(basis.num_predictions, basis.num_extrapolated, basis.num_assumed);
        if !scheduler.model().is_network_measured() {
            outln!("note: the network was not measured: transfers are taken as free");
        } else if basis.lacks_reduction {
            outln!("note: the reduction of the gradients was not measured: its time is assumed");
        }
    }
    let trained = inputs.config.train.schedule.as_str();
    let refused = ways.iter().find(|way| way.name == trained).and_then(Way::refusal);
    match refused {
        None => Ok(()),
        Some((refusal, count)) => Err(Failure::answer(
            format!(
                "`{trained}`, which `dflop train` would run, cannot run {count} of {}: it {refusal}",
                counted(batches.len() as u64, "step")
            ),
            Some("run `dflop plan` again, or raise the limit".to_owned()),
        )),
    }
}

/// The steps of every way and what they stand on, as JSON.
fn print_json(ways: &[Way], num_steps: usize, basis: &Basis, bucket_tokens_max: Option<u64>) {
    let step = |step: usize| {
        let of_way = |way: &Way| {
            let value = match &way.steps[step] {
                Ok((ns, Some(timeline))) => json!({"makespan_ns": ns, "idle_ns": timeline.idle_ns}),
                Ok((ns, None)) => json!({"makespan_ns": ns}),
                Err(refusal) => json!({"refusal": refusal}),
            };
            (way.name.clone(), value)
        };
        ways.iter().map(of_way).collect::<serde_json::Map<_, _>>()
    };
    let mean = |name: &str| ways.iter().find(|way| way.name == name).and_then(Way::mean_ns);
    let best = best_baseline(ways);
    let over_tokens = |way: &&Way| way.name == "blind";
    let is_over = |step: &&Result<_, Refusal>| matches!(step, Err(Refusal::BucketTokens { .. }));
    let num_over = ways.iter().find(over_tokens).map_or(0, |way| way.steps.iter().filter(is_over).count());
    outln!(
        "{}",
        json!({"steps": (0..num_steps).map(step).collect::<Vec<_>>(),
               "blind_ns_mean": mean("blind"), "aware_ns_mean": mean("aware"),
               "best_baseline": best.map(|(way, _)| way.name.as_str()),
               "best_baseline_ns_mean": best.map(|(_, ns)| ns),
               "num_predictions": basis.num_predictions, "num_extrapolated": basis.num_extrapolated,
               "num_assumed": basis.num_assumed, "is_reduction_measured": !basis.lacks_reduction,
               "bucket_tokens_max": bucket_tokens_max, "num_blind_over_tokens": num_over})
    );
}

/// The baseline with the shortest mean step among those that can run every step.
fn best_baseline(ways: &[Way]) -> Option<(&Way, f64)> {
    let runs = ways.iter().filter(|way| way.is_baseline).filter_map(|way| Some((way, way.mean_ns()?)));
    runs.min_by(|a, b| a.1.total_cmp(&b.1))
}

/// Mean step of every way, held against the best baseline that can run.
fn print_ways(ways: &[Way], num_steps: usize) {
    let best = best_baseline(ways);
    outln!("{:<22} {:<9} {:>12} {:>26} {:>7}", "way", "", "mean step", "best baseline over it", "idle");
    for way in ways {
        let kind = if way.is_baseline { "baseline" } else { "dflop" };
        match (way.mean_ns(), way.refusal()) {
            (Some(ns), _) => {
                let over = best
                    .map_or_else(|| number::NONE.to_owned(), |(_, best)| number::times(best / ns.max(1.0)));
                let idle = way.idle().map_or_else(|| number::NONE.to_owned(), number::percent);
                outln!("{:<22} {kind:<9} {:>12} {over:>26} {idle:>7}", way.name, number::ns(ns as u64));
            }
            (None, Some((refusal, count))) => {
                outln!(
                    "{:<22} {kind:<9} {refusal} ({count} of {})",
                    way.name,
                    counted(num_steps as u64, "step")
                );
            }
            (None, None) => {}
        }
    }
    let ours = ways.iter().filter(|way| !way.is_baseline);
    let ours = ours.filter_map(|way| Some((way, way.mean_ns()?))).min_by(|a, b| a.1.total_cmp(&b.1));
    match (best, ours) {
        (Some((baseline, baseline_ns)), Some((way, ns))) => {
            let ratio = baseline_ns / ns.max(1.0);
            let verdict = if ratio > 1.0 { "gain" } else { "no gain" };
            outln!(
                "{verdict}: {} {} over the best baseline that can run, {}",
                way.name,
                number::times(ratio),
                baseline.name
            );
        }
        (None, Some(_)) => outln!("no baseline can run every step: there is nothing to divide by"),
        (_, None) => outln!("no way of dflop can run every step"),
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
