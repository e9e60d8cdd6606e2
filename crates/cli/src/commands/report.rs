//! `dflop report`: whatever a directory holds, as one page.

use super::counted;
use super::report_loss;
use super::report_path::slow_steps;
use super::simulate::write_trace;
use crate::Failure;
use crate::args;
use crate::comparison::{ArmSummary, Comparison, Steps, Waits};
use crate::config;
use crate::measured::{self, Evaluation, StepEvent, StepMetrics, StepSchedule, StepTrace};
use dflop_cost::{CostModel, CostSettings};
use dflop_data::table;
use dflop_plan::Caveats;
use dflop_report::{Report, StepView};
use dflop_step::StepScheduler;
use dflop_types::artifact::MadeFrom;
use dflop_types::statistics::quantile_of;
use dflop_types::{ArtifactError, DataProfile, ModelProfile, Plan, Timeline, artifact, number};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

pub(super) fn run(arguments: &args::Report) -> Result<(), Failure> {
    let found = Found::read(&arguments.dir, arguments.run.as_deref())?;
    let comparison = found.comparison();
    let views = found.step_views()?;
    let page = found.page(&arguments.dir, comparison.as_ref(), &views)?;
    let out = arguments.out.clone().unwrap_or_else(|| arguments.dir.join("report.html"));
    artifact::write_text(&out, "report", &page)?;
    if let Some(path) = &arguments.trace {
        let named: Vec<(String, &Timeline)> = views
            .iter()
            .flat_map(|view| {
                let name = |what: &str| format!("step {} {} {what}", view.step, view.arm);
                [(name("predicted"), view.predicted.as_ref()), (name("measured"), view.measured.as_ref())]
            })
            .filter_map(|(name, timeline)| Some((name, timeline?)))
            .collect();
        let borrowed: Vec<(&str, &Timeline)> = named.iter().map(|(n, t)| (n.as_str(), *t)).collect();
        write_trace(path, &borrowed)?;
    }
    if let Some(path) = &arguments.figure {
        // Without a comparison it may still be that one step of each was trained.
        let arms = comparison.as_ref().map(|c| (c.best.baseline.as_str(), c.best.ours.as_str()));
        let (baseline, ours) = arms.unwrap_or(("blind", "aware"));
        let step = found.usual_step(baseline, ours);
        let measured = |arm: &str| {
            views.iter().find(|v| v.arm == arm && Some(v.step) == step).and_then(|v| v.measured.as_ref())
        };
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
        let figure = dflop_report::figure(&steps, &caption);
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
    outln!("report: {}", out.display());
    Ok(())
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

/// What the directory holds.
struct Found {
    data: Option<DataProfile>,
    model: Option<ModelProfile>,
    plan: Option<Plan>,
    metrics: Vec<StepMetrics>,
    traces: Vec<StepTrace>,
    schedules: Vec<StepSchedule>,
    events: Vec<StepEvent>,
    evaluations: Vec<Evaluation>,
}

/// The page of a directory as it is now, for `--watch`.
pub(super) fn page(dir: &Path, run: Option<&Path>) -> Result<String, Failure> {
    let found = Found::read(dir, run)?;
    found.page(dir, found.comparison().as_ref(), &found.step_views()?)
}

/// The directory of the run that is shown: `run`, or `run` in `dir`, or `rehearsal` where nothing was trained.
pub(super) fn run_dir(dir: &Path, run: Option<&Path>) -> PathBuf {
    let of_dir = ["run", "rehearsal"].map(|name| dir.join(name));
    let holds_steps = |run: &&PathBuf| run.join("metrics.jsonl").exists();
    run.map_or_else(|| of_dir.iter().find(holds_steps).unwrap_or(&of_dir[0]).clone(), Path::to_owned)
}

impl Found {
    fn page(
        &self,
        dir: &Path,
        comparison: Option<&Comparison>,
        views: &[StepView],
    ) -> Result<String, Failure> {
        Ok(dflop_report::render(&Report {
            title: title(dir),
            facts: self.facts(),
            steps: views.to_vec(),
            measured: Steps::of(&self.metrics).map(|steps| dflop_report::Measured {
                num_steps: steps.count as u64,
                is_rehearsed: self.is_rehearsed(),
                step_ms_median: steps.step_ms_median,
                over_predicted_median: steps.over_predicted_median,
                idle_ratio: steps.idle_ratio,
            }),
            comparison: comparison.map(for_page),
            plan: self.plan.clone(),
            data: self.data.clone(),
            outliers: self.outliers(dir)?,
            model: self.model.clone(),
            loss: self.metrics.iter().filter_map(|m| Some((m.step, m.loss?))).collect(),
            held_out: report_loss::held_out(&self.evaluations),
            loss_by_kind: report_loss::groups("kind", &self.metrics, &self.evaluations),
            loss_by_source: report_loss::groups("source", &self.metrics, &self.evaluations),
            events: self.events.iter().map(StepEvent::view).collect(),
            slow_steps: self.slow_steps(views)?,
            warnings: self.warnings()?,
        }))
    }

    /// `run`: the directory of the run; `None`: `run` in `dir`, or `rehearsal` where nothing was trained.
    fn read(dir: &Path, run: Option<&Path>) -> Result<Self, Failure> {
        let run = run_dir(dir, run);
        let schedules_path = run.join("schedules.jsonl");
        let found = Self {
            data: optional(table::read(&dir.join(table::FILE_NAME)))?,
            model: optional(artifact::read(&dir.join("model_profile.json")))?,
            plan: optional(artifact::read(&dir.join("plan.json")))?,
            metrics: measured::read_lines(&run.join("metrics.jsonl"))?.unwrap_or_default(),
            traces: measured::read_lines(&run.join("trace.jsonl"))?.unwrap_or_default(),
            schedules: measured::read_lines(&schedules_path)?.unwrap_or_default(),
            events: measured::read_lines(&run.join("events.jsonl"))?.unwrap_or_default(),
            evaluations: measured::read_lines(&run.join("evaluations.jsonl"))?.unwrap_or_default(),
        };
        if found.data.is_none() && found.model.is_none() && found.plan.is_none() && found.metrics.is_empty() {
            return Err(Failure::new(
                format!(
                    "`{}` holds nothing to report: no data_profile.parquet, model_profile.json, plan.json or run/",
                    dir.display()
                ),
                Some("begin with `dflop profile data`".to_owned()),
            ));
        }
        measured::check_run(&schedules_path, &found.schedules, &found.hashes())?;
        Ok(found)
    }

    /// Whether the steps are those of a rehearsal.
    fn is_rehearsed(&self) -> bool {
        self.metrics.iter().any(|step| step.is_rehearsed)
    }

    /// Hashes of what a run is made from, of those files that are there.
    fn hashes(&self) -> MadeFrom {
        let plan = self.plan.as_ref().map(|plan| ("plan".to_owned(), artifact::hash_of(plan)));
        let data = self.data.as_ref().map(|data| ("data_profile".to_owned(), data.content_hash()));
        plan.into_iter().chain(data).collect()
    }

    /// What the figure shows, in one line.
    fn caption(&self, comparison: Option<&Comparison>) -> String {
        let device = self.model.as_ref().map_or("this machine", |model| model.device.name.as_str());
        let ranks = self.plan.as_ref().map_or(0, |plan| plan.best.layout.num_ranks());
        let measured = comparison.map_or_else(String::new, |c| {
            format!(
                "; over {} global batches {} takes {:.3} times as long as {} ({:.3} to {:.3})",
                c.steps, c.best.baseline, c.best.ratio, c.best.ours, c.best.ratio_low, c.best.ratio_high
            )
        });
        format!("One global batch, measured: {ranks} ranks on {device}{measured}.")
    }

    fn comparison(&self) -> Option<Comparison> {
        // The traces say it too, where there is no plan; either may be missing.
        let traced = || self.traces.iter().map(StepTrace::num_ranks).max().unwrap_or(0);
        let ranks = self.plan.as_ref().map_or_else(traced, |plan| plan.best.layout.num_ranks());
        Comparison::of(&self.metrics, ranks)
    }

    /// Measured steps with what was predicted of them, in the order in which they ran.
    fn step_views(&self) -> Result<Vec<StepView>, Failure> {
        let (Some(plan), Some(data), Some(model)) = (&self.plan, &self.data, &self.model) else {
            return Ok(Vec::new());
        };
        let scheduler = StepScheduler::of_plan(plan, data, model, None, plan.seed)?;
        let mut views = Vec::new();
        for trace in &self.traces {
            let is_its = |s: &&StepSchedule| s.schedule.step == trace.step && s.arm == trace.arm;
            let Some(schedule) = self.schedules.iter().find(is_its) else { continue };
            let metrics = self.metrics.iter().find(|m| m.step == trace.step && m.arm == trace.arm);
            views.push(StepView {
                step: trace.step,
                arm: trace.arm.clone(),
                predicted: Some(scheduler.simulate(&schedule.schedule)?),
                measured: Some(scheduler.measured(
                    &schedule.schedule,
                    &trace.spans(&plan.best.layout),
                    trace.makespan_ns,
                )?),
                is_rehearsed: metrics.is_some_and(|m| m.is_rehearsed),
                data_wait_ns: metrics.map_or(0, |m| m.data_wait_ns),
            });
        }
        Ok(views)
    }

    /// The slowest steps, and why.
    fn slow_steps(&self, views: &[StepView]) -> Result<Vec<dflop_report::SlowStep>, Failure> {
        let (Some(plan), Some(data), Some(model)) = (&self.plan, &self.data, &self.model) else {
            return Ok(Vec::new());
        };
        let scheduler = StepScheduler::of_plan(plan, data, model, None, plan.seed)?;
        slow_steps(&scheduler, data, views, &self.schedules, &self.metrics)
    }

    /// The global batch whose ratio of step times is nearest to the median: the figure shows a usual pair, not a lucky
    /// one.
    fn usual_step(&self, baseline: &str, ours: &str) -> Option<u64> {
        let time = |step: u64, arm: &str| {
            self.metrics.iter().find(|m| m.step == step && m.arm == arm).map(|m| m.step_ns as f64)
        };
        let ratios: Vec<(f64, u64)> = self
            .metrics
            .iter()
            .filter(|m| m.arm == ours)
            .filter_map(|m| Some((time(m.step, baseline)? / time(m.step, ours)?, m.step)))
            .collect();
        let median = quantile_of(ratios.iter().map(|r| r.0).collect(), 0.5)?;
        ratios.into_iter().min_by(|a, b| (a.0 - median).abs().total_cmp(&(b.0 - median).abs())).map(|r| r.1)
    }

    fn facts(&self) -> Vec<(String, String)> {
        let mut facts = Vec::new();
        let mut add = |name: &str, value: String| facts.push((name.to_owned(), value));
        if let Some(model) = &self.model {
            let device = &model.device;
            add("device", format!("{} ({})", device.name, device.kind));
            add("dtype", device.dtype.clone());
            add("PyTorch", device.torch.clone());
            if device.num_threads > 0 {
                add("threads a rank", device.num_threads.to_string());
            }
        }
        if let Some(plan) = &self.plan {
            add("layout", plan.best.layout.to_string());
            add("microbatches", plan.best.num_microbatches.to_string());
            add("global batch", format!("{} samples", plan.global_batch_size));
        }
        let waits = Waits::of(&self.metrics);
        if !self.metrics.is_empty() {
            add(
                "waited for schedules",
                format!(
                    "{} in {} steps, {} of their time; at most {} before one",
                    number::ns(waits.ns),
                    self.metrics.len(),
                    number::percent(waits.ratio),
                    number::ns(waits.ns_max)
                ),
            );
        }
        for arm in ArmSummary::all(&self.metrics) {
            add(&format!("arm {}", arm.arm), arm.words());
        }
        add("dflop", env!("CARGO_PKG_VERSION").to_owned());
        facts
    }

    /// What the heaviest samples do to a step of the plan, under the memory budget of the configuration beside it.
    fn outliers(&self, dir: &Path) -> Result<Option<dflop_report::Outliers>, Failure> {
        const NAMED: usize = 10;
        let (Some(plan), Some(data), Some(model)) = (&self.plan, &self.data, &self.model) else {
            return Ok(None);
        };
        // A report is also made of a directory without a configuration: then there is no budget to hold to.
        let given = config::load(&dir.join("dflop.yaml")).ok().and_then(|c| c.cluster.memory_budget_bytes);
        let scheduler = StepScheduler::of_plan(plan, data, model, given, plan.seed)?;
        let found = scheduler.outliers(plan.global_batch_size, NAMED);
        let ms = |ns: u64| ns as f64 / 1e6;
        let view = |o: &dflop_step::Outlier| dflop_report::OutlierView {
            id: data.samples[o.sample.index()].id.clone(),
            encoder_ms: ms(o.encoder_ns),
            llm_ms: ms(o.llm_ns),
            needed_bytes: o.needed_bytes,
        };
        Ok(Some(dflop_report::Outliers {
            even_encoder_ms: ms(found.even_encoder_ns),
            even_llm_ms: ms(found.even_llm_ns),
            heaviest: found.heaviest.iter().map(view).collect(),
            num_longer: found.num_longer,
            unfit: found.unfit.iter().map(view).collect(),
            num_unfit: found.num_unfit,
            budget_bytes: scheduler.settings().memory_budget_bytes,
        }))
    }

    /// What was not made from what stands beside it: the page shows both, and says so.
    fn stale(&self) -> Vec<String> {
        let Some(plan) = &self.plan else { return Vec::new() };
        let hashes = [
            ("data_profile", self.data.as_ref().map(DataProfile::content_hash)),
            ("model_profile", self.model.as_ref().map(artifact::hash_of)),
        ];
        hashes
            .into_iter()
            .filter(|(name, hash)| hash.is_some() && plan.made_from.get(*name) != hash.as_ref())
            .map(|(name, _)| {
                format!("the plan was made from another {name} than the one shown: plan and train again")
            })
            .collect()
    }

    /// Measured steps whose schedules do not say what they were made from, where there is a plan or a data profile that they
    /// could differ from.
    fn num_unsure(&self) -> u64 {
        if self.hashes().is_empty() {
            return 0;
        }
        let says = self.schedules.iter().filter(|line| !line.made_from.is_empty());
        let known: BTreeSet<(u64, &str)> = says.map(|line| (line.schedule.step, line.arm.as_str())).collect();
        self.metrics.iter().filter(|step| !known.contains(&(step.step, step.arm.as_str()))).count() as u64
    }

    /// Every act that changed the answer, as a sentence with its count.
    fn warnings(&self) -> Result<Vec<String>, Failure> {
        let mut warnings = self.stale();
        if self.is_rehearsed() {
            warnings.push(
                "the steps are rehearsed: nothing was computed, each action slept for its predicted time"
                    .to_owned(),
            );
        }
        let num_unsure = self.num_unsure();
        if num_unsure > 0 {
            warnings.push(format!(
                "the run does not say with which plan and data profile it trained in {}: whether they are the ones \
                 shown is not known",
                counted(num_unsure, "step")
            ));
        }
        if let Some(data) = &self.data {
            let num_replaced = data.problems.iter().filter(|p| p.substitute.is_some()).count();
            let acts =
                [(data.problems.len() - num_replaced, "left out"), (num_replaced, "replaced by a neighbour")];
            warnings.extend(
                acts.into_iter().filter(|(count, _)| *count > 0).map(|(count, act)| {
                    format!("{} could not be read: {act}", counted(count as u64, "sample"))
                }),
            );
            if !data.strata.is_empty() {
                warnings.push("the data profile is of a random sample: `dflop train` refuses it".to_owned());
            }
            let num_silent = data.samples.iter().filter(|sample| sample.shape.label_tokens == 0).count();
            if num_silent > 0 {
                warnings.push(format!(
                    "{} without a label token: they cost time, but the model learns nothing from them",
                    counted(num_silent as u64, "sample")
                ));
            }
        }
        if let (Some(plan), Some(profile)) = (&self.plan, &self.model) {
            let trains = CostSettings { trained: plan.trained, ..CostSettings::default() };
            let model = CostModel::with(profile, &trains.in_layout(&plan.best.layout))?;
            warnings.extend(Caveats::of(profile, &model, Some(&plan.best)).notes(&plan.best.prediction));
        }
        warnings.extend(Steps::of(&self.metrics).and_then(|steps| steps.miss()));
        // The same samples each time: the evaluation that lacked most says how many there are.
        let num_unread = self.evaluations.iter().map(|one| one.bad.len()).max().unwrap_or(0);
        if num_unread > 0 {
            warnings.push(format!(
                "{} of the evaluation could not be read: left out of its loss",
                counted(num_unread as u64, "sample")
            ));
        }
        let num_stopped = self.metrics.iter().filter(|step| step.was_stopped).count();
        if num_stopped > 0 {
            warnings.push(format!(
                "the search for a schedule was stopped by its wall limit in {}",
                counted(num_stopped as u64, "step")
            ));
        }
        Ok(warnings)
    }
}

/// The artifact that was read; `None` if there is no such file.
fn optional<A>(read: Result<A, ArtifactError>) -> Result<Option<A>, Failure> {
    match read {
        Ok(artifact) => Ok(Some(artifact)),
        Err(ArtifactError::Missing { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}
