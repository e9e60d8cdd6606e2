//! `--from-run DIR`: what a run's spans say of the profile it was planned with, and whether another layout pays.

use super::report::Planned;
use super::{Inputs, beside};
use crate::Failure;
use crate::config::Config;
use crate::measured::{self, StepMetrics, StepSchedule, StepTrace};
use dflop_step::{Arm, Correction, Live, RowFactor, ShapeFactor, StepScheduler};
use dflop_types::artifact::MadeFrom;
use dflop_types::{
    DataProfile, ModelProfile, Plan, RankedPlan, SampleIndex, artifact, counted, number, thousands,
};
use serde_json::{Value, json};
use std::collections::{BTreeSet, HashMap};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// Where the renewed profile goes unless told: the measured one stays, as the plan and the run are of that.
pub(super) const FILE_NAME: &str = "model_profile.live.json";
/// Where the plan goes unless told.
const PLAN_NAME: &str = "plan.live.json";
/// Steps that are looked at, the last ones of a run: evidence halves in 34.
const STEPS_MAX: usize = 256;
/// Fewer steps say nothing: a factor is used from three on, and the first is spent on connecting.
const STEPS_MIN: usize = 4;
/// Global batches that plans are held against each other on: the next ones of the run.
const BATCHES: u64 = 8;
/// A restart, unless told: start of the ranks, loading of the model and of the checkpoint.
const RESTART_SECONDS: f64 = 60.0;

/// What a run says, and the plan it was made with.
pub(super) struct FromRun {
    dir: PathBuf,
    /// The plan of its last steps.
    plan: Plan,
    /// Its file: beside the configuration, or the run's own copy.
    plan_path: PathBuf,
    is_copy: bool,
    /// The files of all plans that its steps were trained with.
    names: Vec<String>,
    live: Live,
    /// The profile with the run's times.
    pub(super) renewed: ModelProfile,
    num_steps: u64,
    /// Arms that they were measured under.
    num_arms: u64,
    last_step: u64,
}

impl FromRun {
    /// The run that was asked for; `inputs` get its model profile.
    pub(super) fn asked(dir: Option<&Path>, inputs: &mut Inputs) -> Result<Option<Self>, Failure> {
        let Some(dir) = dir else { return Ok(None) };
        let found = Self::read(dir, &inputs.config, &inputs.data_profile, &inputs.model_profile)?;
        inputs.model_profile = found.renewed.clone();
        Ok(Some(found))
    }

    /// The run in `dir`, with the plans beside the configuration or the run's own copies of them; `data` and `model` are what
    /// stands beside the configuration.
    pub(super) fn read(
        dir: &Path,
        config: &Config,
        data: &DataProfile,
        model: &ModelProfile,
    ) -> Result<Self, Failure> {
        let schedules_path = dir.join("schedules.jsonl");
        let mut logged: Vec<StepSchedule> = measured::read_lines(&schedules_path)?.unwrap_or_default();
        // A run that has changed its plan is planned by the last one: its steps since then say how things are.
        let planned = Planned::of(&config.directory, Some(dir), &logged)?;
        let plan_path = beside(config, None, "plan.json");
        let current = logged.last().and_then(|line| line.made_from.get("plan"));
        let is_current = |planned: &&Planned| Some(&planned.hash) == current;
        let Some(last) = planned.iter().find(is_current).or_else(|| planned.last()) else {
            // No plan at all, or none of those that the run names: the usual one is told to be missing.
            let usual: Plan = artifact::read(&plan_path)?;
            let now = [("plan".to_owned(), artifact::hash_of(&usual))].into();
            measured::check_run(&schedules_path, &logged, &[now])?;
            return Err(Failure::new(format!("`{}` names no plan", dir.display()), None));
        };
        let plan = last.plan.clone();
        let is_its = |model: &&ModelProfile| {
            plan.made_from.get("model_profile").is_none_or(|hash| *hash == artifact::hash_of(*model))
        };
        let model = [Some(model), last.model.as_ref()].into_iter().flatten().find(is_its).unwrap_or(model);
        artifact::check_made_from(&last.path, &plan, "model_profile", &artifact::hash_of(model))?;
        let data_hash = data.content_hash();
        let now: Vec<MadeFrom> = planned
            .iter()
            .map(|planned| {
                [("plan".to_owned(), planned.hash.clone()), ("data_profile".to_owned(), data_hash.clone())]
                    .into()
            })
            .collect();
        if planned.iter().any(|planned| is_current(&planned)) {
            // Steps of plans before it are of no use here, whether their plans are still there or not.
            logged.retain(|line| line.made_from.get("plan").is_none_or(|hash| *hash == last.hash));
        }
        measured::check_run(&schedules_path, &logged, &now)?;
        logged.retain(|line| line.made_from.get("plan").is_none_or(|hash| *hash == last.hash));
        let metrics: Vec<StepMetrics> = measured::read_lines(&dir.join("metrics.jsonl"))?.unwrap_or_default();
        if metrics.iter().any(|step| step.is_rehearsed) {
            return Err(Failure::new(
                format!("`{}` is a rehearsal: nothing was measured in it", dir.display()),
                Some("name the directory of a run of `dflop train`".to_owned()),
            ));
        }
        let traces: Vec<StepTrace> = measured::read_lines(&dir.join("trace.jsonl"))?.unwrap_or_default();
        let by_turn: HashMap<(u64, &str), &StepSchedule> =
            logged.iter().map(|line| ((line.schedule.step, line.arm.as_str()), line)).collect();
        let mut measured: Vec<(&StepTrace, &StepSchedule)> = traces
            .iter()
            .filter_map(|trace| Some((trace, *by_turn.get(&(trace.step, trace.arm.as_str()))?)))
            .collect();
        if measured.len() < STEPS_MIN {
            let found = counted(measured.len() as u64, "measured step");
            return Err(Failure::new(
                format!("`{}` holds {found}, must be at least {STEPS_MIN}", dir.display()),
                Some("train some steps first: `dflop train`".to_owned()),
            ));
        }
        measured.drain(..measured.len().saturating_sub(STEPS_MAX));
        let budget = config.cluster.memory_budget_bytes;
        let of_log = measured.iter().rev().find_map(|(_, line)| line.ranks_per_node);
        let scheduler = StepScheduler::of_plan(&plan, data, model, budget, plan.seed)?
            .with_ranks_per_node(of_log.unwrap_or(config.cluster.ranks_per_node))?;
        let mut correction = Correction::new(&scheduler);
        let layout = plan.best.layout;
        for (trace, line) in &measured {
            scheduler.observe(
                &mut correction,
                &line.schedule,
                &trace.spans(&layout),
                trace.makespan_ns,
                true,
            )?;
        }
        let live = scheduler.live(&correction);
        let (num_steps, last_step) =
            (measured.len() as u64, measured.iter().map(|(trace, _)| trace.step).max().unwrap_or(0));
        let mut renewed = live.renewed(model, num_steps, last_step);
        renewed.made_from.insert("model_profile".to_owned(), artifact::hash_of(model));
        let num_arms = measured.iter().map(|(trace, _)| &trace.arm).collect::<BTreeSet<_>>().len() as u64;
        let names = planned.iter().map(Planned::name).collect();
        Ok(Self {
            dir: dir.to_owned(),
            plan_path: last.path.clone(),
            is_copy: last.path.parent() != Some(&*config.directory),
            plan,
            names,
            live,
            renewed,
            num_steps,
            num_arms,
            last_step,
        })
    }

    /// Where the next plan goes unless told: no file that the run still needs.
    pub(super) fn plan_name(&self) -> String {
        let name =
            |number: usize| if number < 2 { PLAN_NAME.to_owned() } else { format!("plan.live{number}.json") };
        let is_free = |number: &usize| !self.names.contains(&name(*number));
        // Of one name more than there are plans, one is free.
        name((1..=self.names.len()).find(is_free).unwrap_or(self.names.len() + 1))
    }

    /// Mean step of a plan over the next global batches of the run, with all that its steps say; `None` where they do not fit.
    fn step_ns(&self, inputs: &Inputs, best: &RankedPlan) -> Result<Option<u64>, Failure> {
        let plan = Plan { best: *best, ..self.plan.clone() };
        let config = &inputs.config;
        let arm: Arm = config.train.schedule.parse().unwrap_or(Arm::AWARE);
        let scheduler = StepScheduler::of_plan(
            &plan,
            &inputs.data_profile,
            &inputs.model_profile,
            config.cluster.memory_budget_bytes,
            plan.seed,
        )?
        .with_ranks_per_node(config.cluster.ranks_per_node)?
        .with_bucket_tokens_max(config.train.bucket_tokens_max)?
        .adjusted(self.live.adjustment(&best.layout))?;
        let batches = inputs.batches(&self.plan)?;
        let mut sum_ns = 0u64;
        for step in self.last_step + 1..=self.last_step + BATCHES {
            let batch: Vec<SampleIndex> = batches.batch(step);
            // What does not fit is no plan to change to.
            let Ok(schedule) = scheduler.schedule(step, &batch, arm) else { return Ok(None) };
            sum_ns = sum_ns.saturating_add(scheduler.simulate(&schedule)?.makespan_ns);
        }
        Ok(Some(sum_ns / BATCHES))
    }

    /// Sorts plans by what the run says of each, and holds the first against the plan of the run.
    pub(super) fn change(
        &self,
        inputs: &Inputs,
        ranked: &mut Vec<RankedPlan>,
        restart_seconds: Option<f64>,
    ) -> Result<Change, Failure> {
        let mut judged: Vec<(Option<u64>, RankedPlan)> = Vec::with_capacity(ranked.len());
        for plan in ranked.iter() {
            judged.push((self.step_ns(inputs, plan)?, *plan));
        }
        // What does not fit its next batches comes last; the search's order decides between equals.
        judged.sort_by_key(|(ns, _)| ns.unwrap_or(u64::MAX));
        *ranked = judged.iter().map(|(_, plan)| *plan).collect();
        let best_ns = judged.first().and_then(|(ns, _)| *ns);
        let steps = inputs.config.train.steps;
        Ok(Change {
            is_same: judged.first().is_some_and(|(_, plan)| is_same(plan, &self.plan.best)),
            now_ns: self.step_ns(inputs, &self.plan.best)?,
            best_ns,
            steps_left: steps.saturating_sub(self.last_step + 1),
            restart_seconds: restart_seconds.unwrap_or(RESTART_SECONDS),
            is_assumed: restart_seconds.is_none(),
        })
    }

    /// What the run says of its profile, for people.
    pub(super) fn words(&self) -> String {
        let live = &self.live;
        let (run, last) = (self.dir.display(), self.last_step);
        let mut text = match self.num_arms {
            // A comparison runs each step once for each arm, so it has more measurements than steps.
            arms @ 2.. => format!(
                "{} measured steps of `{run}`, a comparison: {arms} arms run the same steps, up to step {last}",
                self.num_steps
            ),
            _ => format!("{} of `{run}`, the last is step {last}", counted(self.num_steps, "step")),
        };
        text.push_str(": against the profile\n");
        if self.is_copy {
            let _ = writeln!(
                text,
                "  (its plan is read from its own copy, `{}`: the one that it ran is not beside the configuration any more)",
                self.plan_path.display()
            );
        }
        for (name, of) in [("encoder", &live.encoder), ("LLM", &live.llm)] {
            let (forward, backward) = (number::times(of.forward), number::times(of.backward));
            let _ = writeln!(text, "  {name} ranks take {forward} (forward) and {backward} (backward)");
        }
        for (rank, slowness) in live.slowness.iter().enumerate().filter(|(_, s)| s.total_cmp(&1.0).is_ne()) {
            let _ = writeln!(text, "  rank {rank} takes {} of what its peers take", number::times(*slowness));
        }
        for (name, shapes) in [("encoder", &live.encoder_shapes), ("LLM", &live.llm_shapes)] {
            for shape in shapes {
                let _ = writeln!(
                    text,
                    "  samples of {} take {}",
                    tokens(shape, name),
                    number::times(shape.factor)
                );
            }
        }
        text
    }

    /// Says what a change brings, and writes the renewed profile beside the plan at `out`.
    pub(super) fn tell(
        &self,
        change: &Change,
        config: &Path,
        out: &Path,
        is_json: bool,
    ) -> Result<(), Failure> {
        let profile = Self::profile_beside(out);
        if !is_json {
            let go_on = format!(
                "dflop train --resume auto --config {} --plan {} --model-profile {}",
                config.display(),
                out.display(),
                profile.display()
            );
            out!("\n{}{}", self.words(), change.words(&go_on));
        }
        super::write(&profile, &self.renewed)
    }

    /// Where the renewed model profile of a plan stands.
    pub(super) fn profile_beside(plan: &Path) -> PathBuf {
        plan.with_file_name(profile_name(plan))
    }

    pub(super) fn json(&self) -> Value {
        let component = |of: &RowFactor, shapes: &[ShapeFactor]| {
            json!({"forward": of.forward, "backward": of.backward, "input": of.input, "weight": of.weight,
                   "shapes": shapes})
        };
        json!({"plan": self.plan_path, "num_steps": self.num_steps, "num_arms": self.num_arms, "last_step": self.last_step, "slowness": self.live.slowness,
               "encoder": component(&self.live.encoder, &self.live.encoder_shapes),
               "llm": component(&self.live.llm, &self.live.llm_shapes)})
    }
}

/// The profile's name beside a plan that is called as [`FromRun::plan_name`] says; [`FILE_NAME`] beside any other.
fn profile_name(plan: &Path) -> String {
    let number =
        plan.file_name().and_then(|name| name.to_str()?.strip_prefix("plan.live")?.strip_suffix(".json"));
    number.map_or_else(|| FILE_NAME.to_owned(), |number| format!("model_profile.live{number}.json"))
}

fn tokens(shape: &ShapeFactor, component: &str) -> String {
    if shape.tokens_max == u64::MAX {
        format!("{} {component} tokens or more", thousands(shape.tokens_min))
    } else {
        format!("{} to {} {component} tokens", thousands(shape.tokens_min), thousands(shape.tokens_max))
    }
}

/// Whether ranks would do the same under both: nothing is gained by a change.
fn is_same(a: &RankedPlan, b: &RankedPlan) -> bool {
    (a.layout, a.num_microbatches, a.pipeline_order, a.recompute, a.is_eased)
        == (b.layout, b.num_microbatches, b.pipeline_order, b.recompute, b.is_eased)
}

/// What a change to the best plan brings.
#[derive(Debug, Clone, Copy)]
pub(super) struct Change {
    is_same: bool,
    /// A step of the plan that runs; `None` where its next batches do not fit.
    now_ns: Option<u64>,
    /// A step of the best plan.
    best_ns: Option<u64>,
    /// Steps of `train.steps` that are left.
    steps_left: u64,
    restart_seconds: f64,
    /// Whether nobody said what a restart takes.
    is_assumed: bool,
}

impl Change {
    /// Seconds saved by a step; 0 where nothing changes or is known.
    fn saved_s(&self) -> f64 {
        match (self.is_same, self.now_ns, self.best_ns) {
            (false, Some(now), Some(best)) => (now as f64 - best as f64) / 1e9,
            _ => 0.0,
        }
    }

    /// Seconds gained over the steps that are left, the restart taken off.
    fn net_s(&self) -> f64 {
        self.saved_s() * self.steps_left as f64 - self.restart_seconds
    }

    /// Whether it pays.
    pub(super) fn pays(&self) -> bool {
        !self.is_same && self.net_s() > 0.0
    }

    /// In words; `go_on` is the command that changes over.
    pub(super) fn words(&self, go_on: &str) -> String {
        let ms = |ns: Option<u64>| ns.map_or_else(|| "does not fit".to_owned(), number::ns);
        if self.is_same {
            return format!(
                "The plan of the run stays the best: {} a step with these times.\n",
                ms(self.now_ns)
            );
        }
        let mut text = format!(
            "A step takes {} as the run is planned, and {} by the best plan, with these times.\n",
            ms(self.now_ns),
            ms(self.best_ns)
        );
        if self.now_ns.is_none() || self.best_ns.is_none() {
            return text;
        }
        let assumed = if self.is_assumed { ", assumed: --restart-seconds" } else { "" };
        let saved = self.saved_s();
        let _ = writeln!(
            text,
            "{} left: {} s saved, less {} s for a restart{assumed}: {} s {}.",
            counted(self.steps_left, "step"),
            number::number(saved * self.steps_left as f64),
            number::tick(self.restart_seconds),
            number::number(self.net_s().abs()),
            if self.net_s() > 0.0 { "gained" } else { "lost" }
        );
        if self.pays() {
            let _ = writeln!(text, "Change over with: {go_on}");
        } else if saved > 0.0 {
            let _ = writeln!(
                text,
                "Stay: a change pays from {} on.",
                counted((self.restart_seconds / saved).ceil() as u64, "step")
            );
        } else {
            text.push_str("Stay.\n");
        }
        text
    }

    pub(super) fn json(&self) -> Value {
        json!({"is_same": self.is_same, "step_ns": self.now_ns, "best_step_ns": self.best_ns,
               "steps_left": self.steps_left, "restart_seconds": self.restart_seconds,
               "is_restart_assumed": self.is_assumed, "net_seconds": if self.is_same { 0.0 } else { self.net_s() },
               "pays": self.pays()})
    }
}
