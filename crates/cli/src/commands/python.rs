//! `dflop profile model` and `dflop train`: checked here, carried out by Python.

use super::profile_data::EVALUATION_FILE_NAME;
use super::{Inputs, beside, current, differs, out_path, replay};
use crate::args;
use crate::config;
use crate::{Failure, Outcome, Request};
use dflop_data::table;
use dflop_step::Arm;
use dflop_step::batches::GlobalBatches;
use dflop_types::artifact::MadeFrom;
use dflop_types::{Artifact, DataProfile, ModelProfile, Plan, SampleIndex, artifact};
use serde_json::json;
use std::collections::HashSet;
use std::path::{Path, PathBuf};

/// The request for `dflop profile model`: the grid ends at the largest sizes the data can form.
pub(super) fn profile_model(arguments: &args::ProfileModel) -> Result<Outcome, Failure> {
    let config = config::load_plan(&arguments.config.config)?;
    can_be_measured(&config)?;
    let (flag, budget, budget_s) = match arguments.budget_seconds {
        Some(seconds) => ("--budget-seconds", seconds, seconds),
        None => ("--budget-minutes", arguments.budget_minutes, 60.0 * arguments.budget_minutes),
    };
    if !(budget_s > 0.0 && budget_s.is_finite()) {
        return Err(Failure::new(format!("`{flag}` is {budget}, must be above 0"), None));
    }
    if arguments.network && !arguments.fresh {
        let out = beside(&config, arguments.out.as_ref(), "model_profile.json");
        if out.exists() {
            return network(&config, &out, budget_s);
        }
    }
    let data_path = beside(&config, arguments.data_profile.as_ref(), table::FILE_NAME);
    let data = table::read(&data_path)?;
    current::check_data(&config, &data_path, &data)?;
    let sizes = Sizes::of(&data, &config);
    let out = out_path::<ModelProfile>(&config, arguments.out.as_ref(), "model_profile.json")?;
    let mut partial = out.clone();
    partial.set_extension("partial.jsonl");
    Ok(Outcome::Python(Request {
        verb: "profile_model".to_owned(),
        arguments: json!({
            "model_dir": config.model.dir,
            "dtype": config.model.dtype,
            "compile": config.train.compile,
            "device": config.cluster.device,
            "num_neighbours": if config.cluster.device == "cpu" { config.cluster.ranks_per_node - 1 } else { 0 },
            "budget_s": budget_s,
            "max_encoder_tokens": sizes.encoder,
            "max_encoder_segment_tokens": sizes.segment,
            "max_llm_tokens": sizes.llm,
            "max_segment_tokens": sizes.sample,
            "max_label_tokens": sizes.label,
            "recompute": arguments.recompute,
            "tensor_parallel_degrees": arguments.tensor_parallel,
            "lora_rank": arguments.lora_rank,
            "out": out,
            "partial": partial,
            "fresh": arguments.fresh,
            "network": arguments.network,
            "environment": environment(&config),
        }),
    }))
}

/// The request to measure the links between ranks and put them in the model profile at `out`.
fn network(config: &config::Config, out: &Path, budget_s: f64) -> Result<Outcome, Failure> {
    let profile: ModelProfile = artifact::read(out)?;
    let hashes = config.model_hashes()?;
    artifact::check_made_from(out, &profile, "model_config", &hashes["model_config"])?;
    let kind = ("cluster.device", config.cluster.device.clone(), profile.device.kind);
    differs(out, ModelProfile::MEND, &[kind])?;
    Ok(Outcome::Python(Request {
        verb: "profile_model".to_owned(),
        arguments: json!({
            "device": config.cluster.device,
            "num_neighbours": if config.cluster.device == "cpu" { config.cluster.ranks_per_node - 1 } else { 0 },
            "budget_s": budget_s,
            "out": out,
            "network_only": true,
            "environment": environment(config),
        }),
    }))
}

/// Environment of a process that trains or measures; what the user has set stays.
///
/// On a CPU one thread a rank: ranks share the cores. glibc gives large tensors back to the system and faults them in
/// again at each step; kept, steps are steady (docs/log.md). On a GPU PyTorch's allocator gets segments that grow: no two
/// microbatches have the same shapes, and of segments of fixed size some of each would stay unused.
fn environment(config: &config::Config) -> serde_json::Value {
    if config.cluster.device == "cpu" {
        json!({
            "OMP_NUM_THREADS": "1",
            "MALLOC_MMAP_MAX_": "0",
            "MALLOC_TRIM_THRESHOLD_": (1_u64 << 35).to_string(),
            "MALLOC_TOP_PAD_": (1_u64 << 26).to_string(),
        })
    } else if std::env::var_os("PYTORCH_CUDA_ALLOC_CONF").is_some() {
        // The older name of the same setting: PyTorch reads one of them.
        json!({})
    } else {
        json!({ "PYTORCH_ALLOC_CONF": "expandable_segments:True" })
    }
}

/// Upper ends of the measured grid, in tokens of one microbatch.
struct Sizes {
    encoder: u64,
    llm: u64,
    label: u64,
    /// LLM tokens of the largest sample.
    sample: u64,
    /// Encoder tokens of the largest segment.
    segment: u64,
}

impl Sizes {
    /// Twice what an even microbatch of the mean sample holds, and at least one and a half of the largest sample: a
    /// balanced microbatch stays below, a data-blind one nearly always.
    ///
    /// On a GPU at least one and a half of what a rank has of a global batch: where memory allows it, all of that is one
    /// microbatch, since each one more starts its kernels anew. On a CPU large microbatches gain nothing.
    fn of(data: &DataProfile, config: &config::Config) -> Self {
        let batch = u64::from(config.train.global_batch_size);
        let microbatches = u64::from(config.train.num_microbatches.unwrap_or(1).max(1));
        let of_rank = 3 * batch.div_ceil(u64::from(config.cluster.num_ranks.max(1)));
        let is_cpu = config.cluster.device == "cpu";
        let most_samples =
            (2 * batch.div_ceil(microbatches)).max(if is_cpu { 0 } else { of_rank.div_ceil(2) });
        let count = data.samples.len().max(1) as u64;
        let grid_end = |size: &dyn Fn(&dflop_types::SampleShape) -> u64| {
            let total: u64 = data.samples.iter().map(|s| size(&s.shape)).sum();
            let largest = data.samples.iter().map(|s| size(&s.shape)).max().unwrap_or(0);
            (most_samples * total.div_ceil(count)).max(largest + largest / 2).max(1)
        };
        let segments = data.samples.iter().flat_map(|s| &s.shape.encoder_segments);
        Self {
            encoder: grid_end(&|s| s.encoder_tokens()),
            llm: grid_end(&|s| u64::from(s.llm_tokens)),
            label: grid_end(&|s| u64::from(s.label_tokens)),
            sample: data.samples.iter().map(|s| u64::from(s.shape.llm_tokens)).max().unwrap_or(1).max(1),
            segment: segments.map(|s| u64::from(s.tokens)).max().unwrap_or(0),
        }
    }
}

/// `Ok` if the model has a directory: what is known by name alone can be planned, and neither measured nor trained.
pub(super) fn has_directory(config: &config::Config) -> Result<(), Failure> {
    let Some(name) = &config.model.name else { return Ok(()) };
    let hint = "set `model.dir` to a directory with its config.json, weights and tokenizer, as `huggingface-cli download` \
                makes it, in place of `model.name`";
    let message = format!("`model.name` is `{name}`, which is enough to plan, but not to measure or train");
    Err(Failure::new(message, Some(hint.to_owned())))
}

/// As [`has_directory`], where an estimate may do in place of a measurement.
fn can_be_measured(config: &config::Config) -> Result<(), Failure> {
    has_directory(config).map_err(|failure| {
        let estimate = "estimate its times, without a device: `dflop profile model --estimate`";
        let hint = failure.hint.map_or_else(|| estimate.to_owned(), |hint| format!("{estimate}; or {hint}"));
        Failure { hint: Some(hint), ..failure }
    })
}

/// The request for `dflop train`, with the plan checked against what is there now.
pub(super) fn train(arguments: &args::Train) -> Result<Outcome, Failure> {
    let inputs = Inputs::read(&arguments.files.inputs)?;
    has_directory(&inputs.config)?;
    if !arguments.other_device {
        inputs.check_device()?;
    }
    dflop_data::profile::check_complete(&inputs.data_profile)?;
    let config = &inputs.config;
    let plan_path = beside(config, arguments.files.plan.as_ref(), "plan.json");
    let plan: Plan = artifact::read(&plan_path)?;
    inputs.check_plan(&plan_path, &plan)?;
    check_cores(&plan, config, arguments.oversubscribe)?;
    check_arms(&arguments.arms)?;
    let made_from: MadeFrom = [
        ("plan".to_owned(), artifact::hash_of(&plan)),
        ("data_profile".to_owned(), inputs.data_profile.content_hash()),
    ]
    .into();
    let out = beside(config, arguments.out.as_ref(), "run");
    // The profile is estimated for a device of our table, under the table's name. No machine reports that very name.
    let is_checked = !arguments.other_device && !inputs.model_profile.is_estimated;
    let profile_device = is_checked.then(|| inputs.model_profile.device.name.clone());
    let may_overwrite = may_overwrite(&out, arguments.resume.as_deref(), arguments.force)?;
    // Giants that are refused, before any rank starts; and what teaches nothing.
    let batches = inputs.batches(&plan)?;
    let steps = arguments.steps.unwrap_or(config.train.steps);
    let num_steps = match &arguments.replay {
        Some(log) => replay::check(log, &out, &plan, &inputs, &made_from)?,
        None if arguments.compare => steps.saturating_add(arguments.warmup_pairs.into()),
        None => steps,
    };
    // The steps of a replay have been trained.
    if arguments.replay.is_none() {
        let size = u64::from(config.train.global_batch_size);
        check_labels(&batches, &inputs.data_profile, size, num_steps)?;
    }
    check_measured_step(arguments.measure_memory_step, num_steps)?;
    let evaluation_profile = held_out(arguments, config, &inputs.data_profile)?;
    Ok(Outcome::Python(Request {
        verb: "train".to_owned(),
        arguments: json!({
            "config_path": arguments.files.inputs.config.config,
            "config": config,
            "plan": plan_path,
            "data_profile": inputs.data_profile_path,
            "model_profile": inputs.model_profile_path,
            "evaluation_profile": evaluation_profile,
            "out": out,
            "steps": steps,
            "compare": arguments.compare,
            "arms": arguments.arms.iter().map(ToString::to_string).collect::<Vec<_>>(),
            "replay": arguments.replay,
            "resume": arguments.resume,
            "may_overwrite": may_overwrite,
            "max_restarts": max_restarts(arguments.max_restarts, config, arguments.compare || arguments.replay.is_some()),
            "made_from": made_from,
            "warmup_pairs": arguments.warmup_pairs,
            "measure_memory_step": arguments.measure_memory_step,
            "oversubscribe": arguments.oversubscribe,
            "num_ranks": plan.best.layout.num_ranks(),
            "profile_device": profile_device,
            "environment": environment(config),
        }),
    }))
}

/// How often ranks are started again in a row. A comparison and a replay (`leaves_none`) leave no checkpoints to go on from.
pub(super) fn max_restarts(asked: Option<u32>, config: &config::Config, leaves_none: bool) -> u32 {
    const DEFAULT: u32 = 3;
    let has_checkpoints = config.checkpoint.every.is_some() && !leaves_none;
    asked.unwrap_or(if has_checkpoints { DEFAULT } else { 0 })
}

/// The profile of the samples that are held out, where there are any; a warning where some of them are trained on.
fn held_out(
    arguments: &args::Train,
    config: &config::Config,
    trained: &DataProfile,
) -> Result<Option<PathBuf>, Failure> {
    if config.evaluation.mixture.is_none() {
        return Ok(None);
    }
    let path = beside(config, arguments.evaluation_profile.as_ref(), EVALUATION_FILE_NAME);
    if !path.exists() {
        return Err(Failure::new(
            format!("no profile of `evaluation.mixture` at `{}`", path.display()),
            Some("make it with `dflop profile data --evaluation`".to_owned()),
        ));
    }
    let profile = table::read(&path)?;
    dflop_data::profile::check_complete(&profile)?;
    current::check_evaluation(config, &path, &profile)?;
    let hashes: HashSet<u64> = trained.samples.iter().map(|sample| sample.record_hash).collect();
    let num_both = profile.samples.iter().filter(|sample| hashes.contains(&sample.record_hash)).count();
    if num_both > 0 {
        talk!(
            "warning: {num_both} of {} samples of `evaluation.mixture` are trained on: their records are the same",
            profile.samples.len()
        );
    }
    Ok(Some(path))
}

/// Samples that are drawn to count label tokens before a run, at most: seconds.
const COUNTED_SAMPLES_MAX: u64 = 20_000_000;

/// `Ok` if every global batch of `size` samples has label tokens, by which its loss is divided.
fn check_labels(
    batches: &GlobalBatches,
    data: &DataProfile,
    size: u64,
    num_steps: u64,
) -> Result<(), Failure> {
    let is_unlabelled = |sample: &SampleIndex| data.samples[sample.index()].shape.label_tokens == 0;
    let num_samples = data.samples.len();
    let num_unlabelled = (0..num_samples as u32).map(SampleIndex).filter(is_unlabelled).count();
    if num_unlabelled == 0 {
        return Ok(());
    }
    let mut steps = 0..num_steps.min(COUNTED_SAMPLES_MAX / size.max(1));
    let Some(step) = steps.find(|&step| batches.batch(step).iter().all(is_unlabelled)) else {
        return Ok(());
    };
    let cause = format!(
        "the global batch of step {step} would have no label token, must have at least 1: {num_unlabelled} of \
         {num_samples} samples have none, and nothing can be learned from them alone"
    );
    let hint = "take samples without an answer out of the mixture, or set another `train.global_batch_size`: the last \
                batch of an epoch may be short";
    Err(Failure::new(cause, Some(hint.to_owned())))
}

/// `Ok` if there are arms to compare, each once.
fn check_arms(arms: &[Arm]) -> Result<(), Failure> {
    if arms.len() < 2 {
        return Err(Failure::new(format!("`--arms` names {}, must be at least 2", arms.len()), None));
    }
    match arms.iter().enumerate().find(|(index, arm)| arms[..*index].contains(arm)) {
        Some((_, arm)) => {
            Err(Failure::new(format!("`--arms` names `{arm}` twice, each must stand once"), None))
        }
        None => Ok(()),
    }
}

/// `Ok` if the step whose memory is counted is one of the run.
fn check_measured_step(step: Option<u64>, num_steps: u64) -> Result<(), Failure> {
    match step {
        Some(step) if step >= num_steps => Err(Failure::new(
            format!(
                "`--measure-memory-step` is {step}, must be below {num_steps}, the number of steps (from 0, with a warm-up's)"
            ),
            None,
        )),
        _ => Ok(()),
    }
}

/// `Ok` if each rank on this machine has a core of its own.
fn check_cores(plan: &Plan, config: &config::Config, oversubscribe: bool) -> Result<(), Failure> {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let ranks = plan.best.layout.num_ranks().min(config.cluster.ranks_per_node) as usize;
    if config.cluster.device == "cpu" && ranks > cores && !oversubscribe {
        return Err(Failure::new(
            format!("{ranks} ranks on this machine, which has {cores} cores: ranks that share a core wait for each other"),
            Some("lower `cluster.num_ranks` and plan again, or pass `--oversubscribe` (times then mean nothing)".to_owned()),
        ));
    }
    Ok(())
}

/// Whether the run goes on with the run of `out`: `resume` is `auto`, or a checkpoint in there.
fn continues(out: &Path, resume: Option<&Path>) -> Result<bool, Failure> {
    let Some(resume) = resume else { return Ok(false) };
    if resume == Path::new("auto") {
        return Ok(true);
    }
    let found = resume.canonicalize().map_err(|error| {
        let cause = error.to_string().to_lowercase();
        let hint = "name a directory such as `run/checkpoints/step-100`, or pass `--resume auto`";
        Failure::new(format!("no checkpoint at `{}`: {cause}", resume.display()), Some(hint.to_owned()))
    })?;
    Ok(out.canonicalize().is_ok_and(|out| found.starts_with(out)))
}

/// Whether an earlier run in `out` may be written over, or gone on with; an error where it may not and there is one.
///
/// Ranks of an external torchrun do not look here: one that ended by itself would leave the others waiting for it, so they
/// look together, once they have met (`runtime/directory.py`).
pub(super) fn may_overwrite(out: &Path, resume: Option<&Path>, force: bool) -> Result<bool, Failure> {
    let may = continues(out, resume)? || force;
    if !may && std::env::var_os("RANK").is_none() {
        check_empty(out)?;
    }
    Ok(may)
}

/// `Ok` if `out` holds no earlier run. One that ended before its first step is none.
fn check_empty(out: &Path) -> Result<(), Failure> {
    let holds_steps = std::fs::metadata(out.join("metrics.jsonl")).is_ok_and(|file| file.len() > 0);
    if holds_steps {
        return Err(Failure::new(
            format!("`{}` holds an earlier run, it would be overwritten", out.display()),
            Some(
                "continue it with `--resume auto`, choose another directory with `--out`, or pass `--force`"
                    .to_owned(),
            ),
        ));
    }
    Ok(())
}
