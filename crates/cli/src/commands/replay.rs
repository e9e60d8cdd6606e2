//! The log of an earlier run that `dflop train --replay` trains with, checked before anything runs.

use super::Inputs;
use crate::Failure;
use crate::measured::{self, StepSchedule};
use dflop_plan::{Arm, StepScheduler};
use dflop_types::artifact::MadeFrom;
use dflop_types::{DataProfile, Plan};
use std::path::Path;

/// Nothing if every schedule of the log at `path` is of `plan` and the data, places each sample of its global batch
/// once, and has actions that can run; and if the run that writes to `out` leaves the log alone.
pub(super) fn check(
    path: &Path,
    out: &Path,
    plan: &Plan,
    inputs: &Inputs,
    made_from: &MadeFrom,
) -> Result<(), Failure> {
    let place = |path: &Path| path.canonicalize().ok();
    if place(path).is_some_and(|log| place(&out.join("schedules.jsonl")) == Some(log)) {
        return Err(Failure::new(
            format!("`{}` is in the directory of this run, which would overwrite it", path.display()),
            Some("choose another directory with `--out`".to_owned()),
        ));
    }
    let data = &inputs.data_profile;
    let Some(records) = measured::read_lines::<StepSchedule>(path)? else {
        let hint = "name the `schedules.jsonl` of a run, as in `--replay run/schedules.jsonl`";
        return Err(Failure::new(
            format!("no log of schedules at `{}`", path.display()),
            Some(hint.to_owned()),
        ));
    };
    if records.is_empty() {
        return Err(Failure::new(format!("`{}` holds no schedule", path.display()), None));
    }
    let budget_bytes = inputs.config.cluster.memory_budget_bytes;
    let scheduler = StepScheduler::of_plan(plan, data, &inputs.model_profile, budget_bytes, plan.seed)?
        .with_bucket_tokens_max(inputs.config.train.bucket_tokens_max)?;
    for (index, record) in records.iter().enumerate() {
        is_of(path, record, made_from)?;
        check_schedule(record, data, &scheduler).map_err(|cause| {
            Failure::new(format!("`{}` line {}: {cause}", path.display(), index + 1), None)
        })?;
    }
    Ok(())
}

/// Nothing if `record` was made from what `made_from` has.
fn is_of(path: &Path, record: &StepSchedule, made_from: &MadeFrom) -> Result<(), Failure> {
    for (name, now) in made_from {
        let then = record.made_from.get(name).map_or("none", String::as_str);
        if then != now {
            return Err(Failure::new(
                format!("`{}` is of another {name}: {then}, now {now}", path.display()),
                Some(format!("replay with the {name} of that run, or train without `--replay`")),
            ));
        }
    }
    Ok(())
}

fn check_schedule(
    record: &StepSchedule,
    data: &DataProfile,
    scheduler: &StepScheduler,
) -> Result<(), String> {
    record.arm.parse::<Arm>().map_err(|error| error.to_string())?;
    if record.step != record.schedule.step {
        return Err(format!("step {} has the schedule of step {}", record.step, record.schedule.step));
    }
    // First of all: it knows the samples that the others look up.
    scheduler.simulate(&record.schedule).map_err(|error| error.to_string())?;
    scheduler.check_tokens(&record.schedule).map_err(|error| error.to_string())?;
    let num_parts = |sample: dflop_types::SampleIndex| {
        data.samples.get(sample.index()).map_or(0, |s| s.shape.num_parts())
    };
    record.schedule.check(&record.samples, num_parts).map_err(|error| error.to_string())
}
