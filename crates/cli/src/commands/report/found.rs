//! What a directory holds for a report: profiles, plans, and a run.

use super::path::slow_steps;
use super::planned::{Planned, optional};
use super::{for_page, loss, shapes, title};
use crate::Failure;
use crate::arms::ArmSummary;
use crate::commands::counted;
use crate::comparison::Comparison;
use crate::config;
use crate::measured::{self, Evaluation, StepEvent, StepMetrics, StepSchedule, StepTrace};
use crate::steps::{Steps, Waits};
use dflop_cost::{CostModel, CostSettings};
use dflop_data::table;
use dflop_plan::Caveats;
use dflop_report::{Report, StepView};
use dflop_step::StepScheduler;
use dflop_types::artifact::MadeFrom;
use dflop_types::{DataProfile, ModelProfile, Plan, artifact, number};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// What the directory holds.
pub(super) struct Found {
    /// The directory of the run.
    pub(super) run: PathBuf,
    pub(super) data: Option<DataProfile>,
    /// That of the plan.
    pub(super) model: Option<ModelProfile>,
    /// The plan that the last steps were trained with.
    pub(super) plan: Option<Plan>,
    /// Every plan that steps were trained with, in their order; or the plan of the directory where the run names none.
    pub(super) planned: Vec<Planned>,
    pub(super) metrics: Vec<StepMetrics>,
    /// All steps that were trained, those of plans that are not here among them: their losses are still true.
    trained: Vec<StepMetrics>,
    traces: Vec<StepTrace>,
    pub(super) schedules: Vec<StepSchedule>,
    events: Vec<StepEvent>,
    pub(super) evaluations: Vec<Evaluation>,
    /// Files whose last line is left out, a sentence each.
    cut: Vec<String>,
}

/// The directory of the run that is shown: `run`, or `run` in `dir`, or `rehearsal` where nothing was trained.
pub(super) fn run_dir(dir: &Path, run: Option<&Path>) -> PathBuf {
    let of_dir = ["run", "rehearsal"].map(|name| dir.join(name));
    let holds_steps = |run: &&PathBuf| run.join("metrics.jsonl").exists();
    run.map_or_else(|| of_dir.iter().find(holds_steps).unwrap_or(&of_dir[0]).clone(), Path::to_owned)
}

/// `Ok` if it is one.
fn check_directory(dir: &Path) -> Result<(), Failure> {
    let is_there = dir.exists();
    if is_there && !dir.is_file() {
        return Ok(());
    }
    let what = if is_there { "is a file" } else { "is not there" };
    let hint = "name the directory that holds `dflop.yaml` and what was made beside it, for example `dflop report .`";
    Err(Failure::new(format!("`{}` {what}, must be a directory", dir.display()), Some(hint.to_owned())))
}

/// What to do where a directory holds nothing to report: it may be that of a run.
fn hint_of_nothing(dir: &Path) -> String {
    if !dir.join("metrics.jsonl").exists() {
        return "begin with `dflop profile data`".to_owned();
    }
    let around = dir.parent().filter(|around| !around.as_os_str().is_empty()).unwrap_or(Path::new("."));
    format!(
        "it is a run: name the directory around it, `dflop report {} --run {}`",
        around.display(),
        dir.display()
    )
}

impl Found {
    /// All that a page shows, but for what another run shows.
    pub(super) fn report(
        &self,
        dir: &Path,
        comparison: Option<&Comparison>,
        views: Vec<StepView>,
    ) -> Result<Report, Failure> {
        let last = self.schedulers()?.pop().flatten();
        let mut cut = self.cut.clone();
        let (shapes, memory) = match (&last, &self.data) {
            // What slept for its predicted time says nothing of shapes.
            (Some(scheduler), Some(data)) if !self.is_rehearsed() => {
                let steps = self.measured_steps(self.planned.len() - 1);
                let memory = shapes::memory(&self.run, &steps, scheduler, &mut cut)?;
                (shapes::shapes(&steps, scheduler, data)?, memory)
            }
            _ => (Vec::new(), Vec::new()),
        };
        let axis = loss::Axis::of(&self.trained);
        Ok(Report {
            shapes,
            memory,
            title: title(dir),
            facts: self.facts(),
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
            loss: loss::trained(&self.trained, &axis),
            is_loss_by_update: axis.is_by_update,
            held_out: loss::held_out(&self.evaluations, &axis),
            loss_by_kind: loss::groups("kind", &self.trained, &self.evaluations, &axis),
            loss_by_source: loss::groups("source", &self.trained, &self.evaluations, &axis),
            events: self.events.iter().map(StepEvent::view).collect(),
            slow_steps: self.slow_steps(&views)?,
            warnings: [self.warnings()?, cut].concat(),
            steps: views,
            against: None,
            plans: None,
        })
    }

    /// `run`: the directory of the run; `None`: `run` in `dir`, or `rehearsal` where nothing was trained.
    pub(super) fn read(dir: &Path, run: Option<&Path>) -> Result<Self, Failure> {
        check_directory(dir)?;
        let run = run_dir(dir, run);
        let schedules_path = run.join("schedules.jsonl");
        let mut cut = Vec::new();
        let schedules: Vec<StepSchedule> =
            measured::read_journal(&schedules_path, &mut cut)?.unwrap_or_default();
        let planned = Planned::of(dir, Some(&run), &schedules)?;
        let last = planned.last();
        let model = match last {
            Some(last) => last.model.clone(),
            None => optional(artifact::read(&dir.join("model_profile.json")))?,
        };
        let metrics: Vec<StepMetrics> =
            measured::read_journal(&run.join("metrics.jsonl"), &mut cut)?.unwrap_or_default();
        let mut found = Self {
            data: optional(table::read(&dir.join(table::FILE_NAME)))?,
            model,
            plan: last.map(|last| last.plan.clone()),
            trained: metrics.clone(),
            metrics,
            traces: measured::read_journal(&run.join("trace.jsonl"), &mut cut)?.unwrap_or_default(),
            events: measured::read_journal(&run.join("events.jsonl"), &mut cut)?.unwrap_or_default(),
            evaluations: measured::read_journal(&run.join("evaluations.jsonl"), &mut cut)?
                .unwrap_or_default(),
            planned,
            schedules,
            cut,
            run,
        };
        if found.data.is_none() && found.model.is_none() && found.plan.is_none() && found.metrics.is_empty() {
            return Err(Failure::new(
                format!(
                    "`{}` holds nothing to report: no data_profile.parquet, model_profile.json, plan.json or run/",
                    dir.display()
                ),
                Some(hint_of_nothing(dir)),
            ));
        }
        let others = measured::of_other_plans(&found.schedules, &found.hashes());
        let is_other = |step: u64, arm: &str| others.contains(&(step, arm.to_owned()));
        found.schedules.retain(|line| !is_other(line.schedule.step, &line.arm));
        found.metrics.retain(|line| !is_other(line.step, &line.arm));
        found.traces.retain(|line| !is_other(line.step, &line.arm));
        measured::check_run(&schedules_path, &found.schedules, &found.hashes())?;
        Ok(found)
    }

    /// Says so where the steps ran on another kind of device than their predictions are for; the run says which, as far as
    /// one command started its ranks.
    pub(super) fn of_another_device(&self) -> Option<String> {
        let profiled = &self.model.as_ref()?.device;
        let trained = measured::device_of(&self.run)?;
        (!self.is_rehearsed() && !self.metrics.is_empty() && trained != profiled.kind).then(|| {
            format!(
                "The steps ran on another device, `{trained}`, than their predictions are for, {} ({}): errors of predictions say nothing.",
                profiled.name, profiled.kind
            )
        })
    }

    /// Whether the steps are those of a rehearsal.
    pub(super) fn is_rehearsed(&self) -> bool {
        self.metrics.iter().any(|step| step.is_rehearsed)
    }

    /// What a run may be made from: of each plan its hash and that of the data, of those files that are there.
    fn hashes(&self) -> Vec<MadeFrom> {
        let data = self.data.as_ref().map(|data| ("data_profile".to_owned(), data.content_hash()));
        let with = |plan: Option<&Planned>| {
            plan.map(|of| ("plan".to_owned(), of.hash.clone())).into_iter().chain(data.clone())
        };
        let all: Vec<MadeFrom> = self.planned.iter().map(|plan| with(Some(plan)).collect()).collect();
        if all.is_empty() { vec![with(None).collect()] } else { all }
    }

    /// Which of [`Found::planned`] a step was trained with.
    pub(super) fn plan_index(&self, line: &StepSchedule) -> usize {
        let hash = line.made_from.get("plan");
        self.planned.iter().position(|planned| Some(&planned.hash) == hash).unwrap_or(0)
    }

    /// What the figure shows, in one line.
    pub(super) fn caption(&self, comparison: Option<&Comparison>) -> String {
        let device = self.model.as_ref().map_or("this machine", |model| model.device.name.as_str());
        let ranks = self.plan.as_ref().map_or(0, |plan| plan.best.layout.num_ranks());
        let measured = comparison.map_or_else(String::new, |c| {
            format!(
                "; over {} global batches {} takes {} as long as {} ({})",
                c.steps,
                c.best.baseline,
                number::times(c.best.ratio),
                c.best.ours,
                number::ratios(c.best.ratio_low, c.best.ratio_high)
            )
        });
        format!("One global batch, measured: {ranks} ranks on {device}{measured}.")
    }

    pub(super) fn comparison(&self) -> Option<Comparison> {
        // The traces say it too, where there is no plan; either may be missing.
        let traced = || self.traces.iter().map(StepTrace::num_ranks).max().unwrap_or(0);
        let ranks = self.plan.as_ref().map_or_else(traced, |plan| plan.best.layout.num_ranks());
        Comparison::of(&self.metrics, ranks)
    }

    /// The scheduler of each plan; none without data and a model profile.
    pub(super) fn schedulers(&self) -> Result<Vec<Option<StepScheduler>>, Failure> {
        let of = |(index, planned): (usize, &Planned)| {
            let (Some(data), Some(model)) = (&self.data, &planned.model) else { return Ok(None) };
            let scheduler = StepScheduler::of_plan(&planned.plan, data, model, None, planned.plan.seed)?;
            let lines = self.schedules.iter().rev();
            let nodes =
                lines.filter(|line| self.plan_index(line) == index).find_map(|line| line.ranks_per_node);
            Ok(Some(scheduler.on_nodes(nodes)?))
        };
        self.planned.iter().enumerate().map(of).collect()
    }

    /// The measured steps of one of [`Found::planned`], each with its schedule, in the order in which they ran.
    pub(super) fn measured_steps(&self, index: usize) -> Vec<(&StepTrace, &StepSchedule)> {
        let lines: BTreeMap<(u64, &str), &StepSchedule> =
            self.schedules.iter().map(|line| ((line.schedule.step, line.arm.as_str()), line)).collect();
        let of = |trace: &'_ StepTrace| lines.get(&(trace.step, trace.arm.as_str())).copied();
        let all = self.traces.iter().filter_map(|trace| Some((trace, of(trace)?)));
        all.filter(|(_, line)| self.plan_index(line) == index).collect()
    }

    /// Measured steps with what was predicted of them, plan by plan in the order in which they ran.
    pub(super) fn step_views(&self) -> Result<Vec<StepView>, Failure> {
        let all_metrics: BTreeMap<(u64, &str), &StepMetrics> =
            self.metrics.iter().map(|line| ((line.step, line.arm.as_str()), line)).collect();
        let mut views = Vec::new();
        for (index, scheduler) in self.schedulers()?.iter().enumerate() {
            let Some(scheduler) = scheduler else { continue };
            let layout = &self.planned[index].plan.best.layout;
            for (trace, line) in self.measured_steps(index) {
                let metrics = all_metrics.get(&(trace.step, trace.arm.as_str()));
                let spans = trace.spans(layout);
                views.push(StepView {
                    step: trace.step,
                    arm: trace.arm.clone(),
                    layout: Some(*layout),
                    predicted: Some(scheduler.simulate(&line.schedule)?),
                    measured: Some(scheduler.measured(&line.schedule, &spans, trace.makespan_ns)?),
                    is_rehearsed: metrics.is_some_and(|m| m.is_rehearsed),
                    data_wait_ns: metrics.map_or(0, |m| m.data_wait_ns),
                });
            }
        }
        Ok(views)
    }

    /// The slowest steps of the last plan, and why.
    fn slow_steps(&self, views: &[StepView]) -> Result<Vec<dflop_report::SlowStep>, Failure> {
        let (Some(data), Some(Some(scheduler))) = (&self.data, self.schedulers()?.pop()) else {
            return Ok(Vec::new());
        };
        let is_last = |line: &&StepSchedule| self.plan_index(line) + 1 == self.planned.len();
        let of_plan: BTreeSet<(u64, &str)> = self
            .schedules
            .iter()
            .filter(is_last)
            .map(|line| (line.schedule.step, line.arm.as_str()))
            .collect();
        let views: Vec<&StepView> =
            views.iter().filter(|view| of_plan.contains(&(view.step, view.arm.as_str()))).collect();
        slow_steps(&scheduler, data, &views, &self.schedules, &self.metrics)
    }

    fn facts(&self) -> Vec<(String, String)> {
        let mut facts = Vec::new();
        let mut add = |name: &str, value: String| facts.push((name.to_owned(), value));
        if let Some(model) = &self.model {
            let device = &model.device;
            add("device", format!("{} ({})", device.name, device.kind));
            add("dtype", device.dtype.clone());
            if device.compiles_layers {
                add("compiled", "layers".to_owned());
            }
            add("PyTorch", device.torch.clone());
            if device.num_threads > 0 {
                add("threads a rank", device.num_threads.to_string());
            }
        }
        if let Some(plan) = &self.plan {
            for before in self.planned.iter().rev().skip(1).rev() {
                add(&format!("layout before ({})", before.name()), before.plan.best.layout.to_string());
            }
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
        let config = config::load_plan(&dir.join("dflop.yaml")).ok();
        let given = config.as_ref().and_then(|c| c.cluster.memory_budget_bytes);
        let nodes = config.map(|c| c.cluster.ranks_per_node);
        let scheduler = StepScheduler::of_plan(plan, data, model, given, plan.seed)?.on_nodes(nodes)?;
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
        if self.plan.is_none() && self.data.is_none() {
            return 0;
        }
        let says = self.schedules.iter().filter(|line| !line.made_from.is_empty());
        let known: BTreeSet<(u64, &str)> = says.map(|line| (line.schedule.step, line.arm.as_str())).collect();
        self.metrics.iter().filter(|step| !known.contains(&(step.step, step.arm.as_str()))).count() as u64
    }

    /// How many steps are left out, as their plan is not here; `None` where none are.
    pub(super) fn of_other_plans(&self) -> Option<String> {
        let num_others = (self.trained.len() - self.metrics.len()) as u64;
        (num_others > 0).then(|| {
            format!(
                "{} of the run were trained with a plan that is not there any more: their losses are shown, their times are not",
                counted(num_others, "step")
            )
        })
    }

    /// Steps of several plans, which numbers over all steps do not tell apart.
    fn of_several_plans(&self) -> Option<String> {
        let used: BTreeSet<usize> = self.schedules.iter().map(|line| self.plan_index(line)).collect();
        let last = self.schedules.iter().filter(|line| Some(&self.plan_index(line)) == used.last()).count();
        (used.len() > 1).then(|| {
            format!(
                "the run was trained with {}, {last} of its {} with the last one: the step time, its error and all that is \
                 over all steps mix them",
                counted(used.len() as u64, "plan"),
                counted(self.schedules.len() as u64, "step"),
            )
        })
    }

    /// Every act that changed the answer, as a sentence with its count.
    fn warnings(&self) -> Result<Vec<String>, Failure> {
        let mut warnings = self.stale();
        warnings.extend(self.of_other_plans());
        warnings.extend(self.of_several_plans());
        warnings.extend(self.of_another_device());
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
