//! The log of an earlier run that `dflop train --replay` trains with, checked before anything runs.

use super::Inputs;
use crate::Failure;
use crate::measured::{self, StepSchedule};
use dflop_step::{Arm, StepScheduler};
use dflop_types::artifact::MadeFrom;
use dflop_types::{DataProfile, Plan};
use std::path::Path;

/// The number of steps of the log at `path`, if they follow each other; if every schedule is of `plan` and the data, places
/// each sample of its global batch once, and has actions that can run; and if the run that writes to `out` leaves the log
/// alone.
pub(super) fn check(
    path: &Path,
    out: &Path,
    plan: &Plan,
    inputs: &Inputs,
    made_from: &MadeFrom,
) -> Result<u64, Failure> {
    let place = |path: &Path| path.canonicalize().ok();
    if place(path).is_some_and(|log| place(&out.join("schedules.jsonl")) == Some(log)) {
        return Err(Failure::new(
            format!("`{}` is in the directory of this run, which would overwrite it", path.display()),
            Some("choose another directory with `--out`".to_owned()),
        ));
    }
    let data = &inputs.data_profile;
    let hint = "name the `schedules.jsonl` of a run, as in `--replay run/schedules.jsonl`";
    let is_named_so = path.file_name().is_some_and(|name| name == "schedules.jsonl");
    let read = measured::read_lines::<StepSchedule>(path).map_err(|failure| Failure {
        // Another journal of the run, most likely.
        hint: if is_named_so { failure.hint } else { Some(hint.to_owned()) },
        ..failure
    })?;
    let Some(records) = read else {
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
        .with_ranks_per_node(inputs.config.cluster.ranks_per_node)?
        .with_bucket_tokens_max(inputs.config.train.bucket_tokens_max)?;
    let at = |index: usize| {
        move |cause| Failure::new(format!("`{}` line {}: {cause}", path.display(), index + 1), None)
    };
    for (index, record) in records.iter().enumerate() {
        is_of(path, record, made_from)?;
        check_schedule(record, data, &scheduler).map_err(at(index))?;
    }
    let turns: Vec<(u64, &str)> = records.iter().map(|record| (record.step, record.arm.as_str())).collect();
    check_order(&turns).map_err(|(index, cause)| at(index)(cause))
}

/// The number of steps of a run whose turns these are, as (step, arm): steps count from 0, each has every arm of the first
/// once, in any order, and the last may lack some, as a run that was interrupted leaves it. Else the turn at fault, and why.
fn check_order(turns: &[(u64, &str)]) -> Result<u64, (usize, String)> {
    let mut arms: &[(u64, &str)] = &[];
    let (mut start, mut expected) = (0, 0);
    for round in turns.chunk_by(|a, b| a.0 == b.0) {
        let (step, end) = (round[0].0, start + round.len());
        if step > expected {
            return Err((start, format!("step {step}, but step {expected} is missing before it")));
        }
        if step < expected {
            return Err((start, format!("step {step} comes after step {}", expected - 1)));
        }
        if step == 0 {
            arms = round;
        }
        let has = |round: &[(u64, &str)], arm: &str| round.iter().any(|turn| turn.1 == arm);
        for (index, &(_, arm)) in round.iter().enumerate() {
            if has(&round[..index], arm) {
                return Err((start + index, format!("step {step} has the arm `{arm}` twice")));
            }
            if !has(arms, arm) {
                return Err((start + index, format!("step {step} has the arm `{arm}`, which step 0 lacks")));
            }
        }
        if end < turns.len()
            && let Some((_, arm)) = arms.iter().find(|(_, arm)| !has(round, arm))
        {
            return Err((end, format!("step {step} before it lacks the arm `{arm}`")));
        }
        (start, expected) = (end, expected + 1);
    }
    Ok(expected)
}

/// `Ok` if `record` was made from what `made_from` has.
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
    // This comes first, because it knows the samples that the others look up.
    scheduler.simulate(&record.schedule).map_err(|error| error.to_string())?;
    scheduler.check_tokens(&record.schedule).map_err(|error| error.to_string())?;
    let num_parts = |sample: dflop_types::SampleIndex| {
        data.samples.get(sample.index()).map_or(0, |s| s.shape.num_parts())
    };
    record.schedule.check(&record.samples, num_parts).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_and_arms_follow_each_other() {
        let run = |steps: &[u64]| check_order(&steps.iter().map(|&step| (step, "aware")).collect::<Vec<_>>());
        assert_eq!(run(&[0, 1, 2]), Ok(3));
        let refused = |index: usize, cause: &str| Err((index, cause.to_owned()));
        assert_eq!(run(&[0, 1, 3]), refused(2, "step 3, but step 2 is missing before it"));
        assert_eq!(run(&[1, 2]), refused(0, "step 1, but step 0 is missing before it"));
        assert_eq!(run(&[0, 1, 0]), refused(2, "step 0 comes after step 1"));
        assert_eq!(run(&[0, 1, 1]), refused(2, "step 1 has the arm `aware` twice"));

        // The order of the arms changes from step to step. An interrupted comparison may end inside a step.
        let all = [(0, "blind"), (0, "aware"), (1, "aware"), (1, "blind"), (2, "blind"), (2, "aware")];
        assert_eq!([1, 2, 3, 5, 6].map(|len| check_order(&all[..len])), [1, 1, 2, 3, 3].map(Ok));
        let without = |index: usize| {
            let mut turns = all.to_vec();
            turns.remove(index);
            check_order(&turns)
        };
        assert_eq!(without(0), refused(2, "step 1 has the arm `blind`, which step 0 lacks"));
        assert_eq!(without(2), refused(3, "step 1 before it lacks the arm `aware`"));
        assert_eq!(without(5), Ok(3));
    }
}
