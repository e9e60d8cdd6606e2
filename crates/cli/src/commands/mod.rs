//! The verbs, one file each.

mod advise;
mod advise_inputs;
mod caveats;
mod check;
mod cost_table;
mod costs;
mod current;
mod demo_data;
mod emit;
mod estimate;
mod estimate_runs;
mod export;
mod foreign;
mod from_run;
mod models;
pub(crate) mod models_write;
mod plan;
mod price;
mod probe;
mod profile_data;
mod profile_diff;
mod profile_merge;
mod python;
mod ready;
mod rehearse;
mod renew;
mod replay;
mod report;
mod scale;
mod schedule;
mod shell;
mod show;
mod show_model;
mod simulate;
pub(crate) mod what_if;

use crate::args::{InputFiles, Profile, Verb};
use crate::config::{self, Config};
use crate::{Failure, Outcome};
use dflop_data::family::GivenFamily;
use dflop_data::table;
use dflop_step::batches::GlobalBatches;
use dflop_types::{Artifact, DataProfile, ModelProfile, Plan};
use dflop_types::{artifact, counted};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Bytes of a file that a command reads as a whole, at most.
const INPUT_BYTES_MAX: u64 = 4 << 30;

/// Runs one verb; `family` is what `model.family` names, where Python has imported it.
pub(crate) fn run(verb: Verb, family: Option<&GivenFamily>) -> Result<Outcome, Failure> {
    let done = |result: Result<(), Failure>| result.map(|()| Outcome::Done(0));
    match verb {
        Verb::DemoData(arguments) => done(demo_data::run(&arguments)),
        Verb::Profile(Profile::Data(arguments)) => profile_data::run(&arguments, family),
        Verb::Profile(Profile::Model(arguments)) if arguments.estimate.is_wanted => {
            done(estimate::run(&arguments))
        }
        Verb::Profile(Profile::Model(arguments)) if arguments.from_run.is_some() => {
            done(renew::run(&arguments))
        }
        Verb::Profile(Profile::Model(arguments)) => python::profile_model(&arguments),
        Verb::Profile(Profile::Merge(arguments)) => done(profile_merge::run(&arguments)),
        Verb::Profile(Profile::Diff(arguments)) => profile_diff::run(&arguments).map(Outcome::Done),
        Verb::Plan(arguments) => done(plan::run(&arguments)),
        Verb::Simulate(arguments) => done(simulate::run(&arguments)),
        Verb::Schedule(arguments) => done(schedule::run(&arguments)),
        Verb::Costs(arguments) => done(costs::run(&arguments)),
        Verb::Advise(arguments) => done(advise::run(&arguments)),
        Verb::Check(arguments) => check::run(&arguments),
        Verb::Estimate(arguments) => done(estimate_runs::run(&arguments)),
        Verb::Train(arguments) => python::train(&arguments),
        Verb::Rehearse(arguments) => rehearse::run(&arguments),
        Verb::Export(arguments) => export::run(&arguments),
        Verb::Report(arguments) if arguments.watch => done(report::watch(&arguments)),
        Verb::Report(arguments) => done(report::run(&arguments)),
        Verb::Models(arguments) => done(models::run(&arguments)),
        Verb::Show(arguments) => done(show::run(&arguments)),
        Verb::Completions(arguments) => {
            shell::completions(&arguments);
            Ok(Outcome::Done(0))
        }
        Verb::Man(arguments) => done(shell::man(&arguments)),
        Verb::Probe(arguments) => probe::run(&arguments).map(Outcome::Done),
    }
}

/// The configuration and the two profiles, checked to belong together.
struct Inputs {
    config: Config,
    data_profile_path: PathBuf,
    data_profile: DataProfile,
    model_profile_path: PathBuf,
    model_profile: ModelProfile,
}

impl Inputs {
    /// Those beside the configuration, which must be whole.
    fn read(files: &InputFiles) -> Result<Self, Failure> {
        Self::of(config::load(&files.config.config)?, files)
    }

    /// Those beside the configuration, to plan with: what a model that is named or a device of the table needs is made where
    /// it is not there.
    fn read_to_plan(files: &InputFiles) -> Result<Self, Failure> {
        let config = config::load_plan(&files.config.config)?;
        ready::make_missing(&config, files)?;
        Self::of(config, files)
    }

    /// Those beside the configuration, to rehearse a plan with: as for planning, what trains nothing need not be there.
    fn read_to_rehearse(files: &InputFiles) -> Result<Self, Failure> {
        Self::of(config::load_plan(&files.config.config)?, files)
    }

    fn of(config: Config, files: &InputFiles) -> Result<Self, Failure> {
        let data_profile_path = beside(&config, files.data_profile.as_ref(), table::FILE_NAME);
        let data_profile = table::read(&data_profile_path)?;
        dflop_data::profile::check_whole(&data_profile)?;
        let model_profile_path = beside(&config, files.model_profile.as_ref(), "model_profile.json");
        let model_profile: ModelProfile = artifact::read(&model_profile_path)?;
        current::check_data(&config, &data_profile_path, &data_profile)?;
        let model_config = &config.model_hashes()?["model_config"];
        artifact::check_made_from(&model_profile_path, &model_profile, "model_config", model_config)?;
        let dtype = ("model.dtype", config.model.dtype.clone(), model_profile.device.dtype.clone());
        // An estimate knows of no difference.
        let compiles = model_profile.is_estimated && config.train.compiles_layers();
        let profiled = if compiles || model_profile.device.compiles_layers { "layers" } else { "none" };
        let compile = ("train.compile", config.train.compile.clone(), profiled.to_owned());
        differs(&model_profile_path, ModelProfile::MEND, &[dtype, compile])?;
        Ok(Self { config, data_profile_path, data_profile, model_profile_path, model_profile })
    }

    /// `Ok` if the model profile is of this machine's kind of device, as training asks; a CPU's name is compared too. That
    /// of a GPU is known to PyTorch alone, and compared by the rank that trains on it.
    fn check_device(&self) -> Result<(), Failure> {
        let (configured, profiled) = (&self.config.cluster.device, &self.model_profile.device);
        let mend = format!("measure on this machine with `{}`", ModelProfile::MEND);
        if *configured != profiled.kind {
            return Err(Failure::new(
                format!(
                    "`{}` is of another device: {} ({}), `cluster.device` is `{configured}`",
                    self.model_profile_path.display(),
                    profiled.name,
                    profiled.kind
                ),
                Some(format!(
                    "{mend}; or pass `--other-device` (predicted times are then those of the other); or plan only: `dflop plan` and `dflop simulate` take any device"
                )),
            ));
        }
        match cpu_name() {
            Some(name)
                if configured == "cpu" && !self.model_profile.is_estimated && name != profiled.name =>
            {
                Err(Failure::new(
                    format!(
                        "`{}` is of another device: {}, this machine has {name}",
                        self.model_profile_path.display(),
                        profiled.name
                    ),
                    Some(format!(
                        "{mend}, or pass `--other-device` (predicted times are then those of the other)"
                    )),
                ))
            }
            _ => Ok(()),
        }
    }

    /// Says so on stderr where the profile, and with it the plan, is for another device than the configuration names.
    fn note_device(&self) {
        let (configured, profiled) = (&self.config.cluster.device, &self.model_profile.device);
        if *configured != profiled.kind {
            talk!(
                "note: the plan is for {} ({}), the device of the model profile; `cluster.device` is `{configured}`, so `dflop train` refuses this profile, unless `--other-device` is given",
                profiled.name,
                profiled.kind
            );
        }
    }

    /// The global batches of training.
    fn batches(&self, plan: &Plan) -> Result<GlobalBatches, Failure> {
        let samples = &self.data_profile.samples;
        let batches =
            GlobalBatches::new(samples.len() as u32, plan.global_batch_size, self.config.train.seed)?;
        Ok(batches.with_giants(self.config.giants(), samples.iter().map(|sample| &sample.shape))?)
    }

    /// `Ok` if the plan at `path` was made from these profiles and this configuration.
    fn check_plan(&self, path: &Path, plan: &Plan) -> Result<(), Failure> {
        artifact::check_made_from(path, plan, "data_profile", &self.data_profile.content_hash())?;
        artifact::check_made_from(path, plan, "model_profile", &artifact::hash_of(&self.model_profile))?;
        let (train, best) = (&self.config.train, &plan.best);
        let text = |n: u32| n.to_string();
        let num_free = plan.searched.map_or(0, |searched| searched.num_free_ranks);
        differs(
            path,
            "dflop plan",
            &[
                (
                    "cluster.num_ranks",
                    text(self.config.cluster.num_ranks),
                    text(best.layout.num_ranks().saturating_add(num_free)),
                ),
                ("train.global_batch_size", text(train.global_batch_size), text(plan.global_batch_size)),
                (
                    "train.num_microbatches",
                    text(train.num_microbatches.unwrap_or(best.num_microbatches)),
                    text(best.num_microbatches),
                ),
                (
                    "train.pipeline_order",
                    train.order().unwrap_or(best.pipeline_order).to_string(),
                    best.pipeline_order.to_string(),
                ),
                ("train.recipe (what trains)", self.config.trained().to_string(), plan.trained.to_string()),
                ("train.seed", train.seed.to_string(), plan.seed.to_string()),
            ],
        )
    }
}

/// `Ok` if each field, as (name, its value in the configuration, its value in the file at `path`), is the same.
fn differs(path: &Path, mend: &str, fields: &[(&str, String, String)]) -> Result<(), Failure> {
    let problems: Vec<String> = fields
        .iter()
        .filter(|(_, now, then)| now != then)
        .map(|(name, now, then)| format!("\n  {name}: {then}, now {now}"))
        .collect();
    if problems.is_empty() {
        return Ok(());
    }
    Err(Failure::new(
        format!("`{}` was made with another configuration{}", path.display(), problems.concat()),
        Some(format!("make it again with `{mend}`")),
    ))
}

/// Name of this machine's processor, as a model profile has it; `None` where the system does not say.
fn cpu_name() -> Option<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    line.split_once(':').map(|(_, name)| name.trim().to_owned())
}

/// The path a flag gives, or `name` beside the configuration.
fn beside(config: &Config, flag: Option<&PathBuf>, name: &str) -> PathBuf {
    flag.cloned().unwrap_or_else(|| config.directory.join(name))
}

/// As [`beside`], of an artifact that will be written: what must not be replaced is told before the work begins.
fn out_path<A: Artifact>(config: &Config, flag: Option<&PathBuf>, name: &str) -> Result<PathBuf, Failure> {
    let path = beside(config, flag, name);
    artifact::target(&path, A::KIND)?;
    Ok(path)
}

/// Writes an artifact and says so on stderr.
fn write<A: Artifact + Serialize>(path: &Path, artifact: &A) -> Result<(), Failure> {
    artifact::write(path, artifact)?;
    talk!("wrote {}", path.display());
    Ok(())
}

/// A progress bar on stderr; hidden where stderr is no terminal.
fn progress_bar(total: u64, what: &'static str) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
    bar.set_style(bar_style("{msg} [{bar:30}] {pos}/{len} {per_sec}, {eta} left"));
    bar.set_message(what);
    bar
}

/// The style of a progress bar by its template.
fn bar_style(template: &'static str) -> ProgressStyle {
    let style = ProgressStyle::with_template(template).expect("templates are constants that tests draw");
    style.progress_chars("=> ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_progress_template_is_sound() {
        progress_bar(10, "reading").finish_and_clear();
    }
}
