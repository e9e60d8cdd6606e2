//! What a training run left: `metrics.jsonl`, `trace.jsonl`, `schedules.jsonl`, `events.jsonl`, `evaluations.jsonl`.

use crate::Failure;
use dflop_types::artifact::MadeFrom;
use dflop_types::{Action, Layout, Rank, SampleIndex, Schedule, Span, artifact};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Losses by `kind` and by `source`, then by name.
pub(crate) type Groups = BTreeMap<String, BTreeMap<String, GroupEntry>>;

/// What some samples lost.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct GroupEntry {
    /// Mean over label tokens; `None` where it was no finite number.
    pub(crate) loss: Option<f64>,
    pub(crate) label_tokens: u64,
}

/// Idle time of all ranks in a step by cause, in nanoseconds; the wait for data before the step is in `data_wait`.
#[derive(Debug, Clone, Copy, Deserialize)]
pub(crate) struct IdleNs {
    pub(crate) ramp: u64,
    pub(crate) imbalance: u64,
    pub(crate) transfer: u64,
    pub(crate) data_wait: u64,
}

/// One line of `metrics.jsonl`.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct StepMetrics {
    pub(crate) step: u64,
    pub(crate) arm: String,
    /// `None` where it was no finite number.
    pub(crate) loss: Option<f64>,
    /// Empty in runs of earlier versions.
    #[serde(default)]
    pub(crate) loss_by: Groups,
    /// Start of the first action to the end of the optimizer, in nanoseconds.
    pub(crate) step_ns: u64,
    /// Predicted by the simulator before the step ran, in nanoseconds.
    pub(crate) predicted_ns: u64,
    /// The same, corrected by how the steps before it went; `None` in runs of earlier versions.
    #[serde(default)]
    pub(crate) corrected_ns: Option<u64>,
    /// Idle time over ranks x makespan.
    pub(crate) bubble_ratio: f64,
    /// By cause, over all ranks; `None` in runs of earlier versions, as the two below.
    #[serde(default)]
    pub(crate) idle_ns: Option<IdleNs>,
    /// LLM tokens of the global batch.
    #[serde(default)]
    pub(crate) tokens: Option<u64>,
    /// Samples of the global batch.
    #[serde(default)]
    pub(crate) samples: Option<u64>,
    /// Until the last rank had its samples, before the step, in nanoseconds.
    #[serde(default)]
    pub(crate) data_wait_ns: u64,
    /// How long training waited for the schedule before the step, in nanoseconds.
    #[serde(default)]
    pub(crate) schedule_wait_ns: u64,
    /// Whether the search for its schedule was cut short.
    #[serde(default)]
    pub(crate) was_stopped: bool,
    /// Whether nothing was computed: `dflop rehearse` wrote it.
    #[serde(default)]
    pub(crate) is_rehearsed: bool,
    /// Whether ranks connected in it, the first step after their start. Rehearsals say so.
    #[serde(default)]
    pub(crate) is_first: bool,
    /// Position of the pair that this step belongs to, in a comparison; `null` otherwise.
    #[serde(default)]
    pub(crate) pair: Option<u64>,
}

/// The `cluster.device` that a run was asked to train on; `None` where no single command started its ranks.
pub(crate) fn device_of(run: &Path) -> Option<String> {
    let request: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(run.join("request.json")).ok()?).ok()?;
    Some(request["config"]["cluster"]["device"].as_str()?.to_owned())
}

/// One line of `trace.jsonl`.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct StepTrace {
    pub(crate) step: u64,
    pub(crate) arm: String,
    pub(crate) makespan_ns: u64,
    spans: Vec<(u32, Action, u64, u64)>,
}

impl StepTrace {
    /// Ranks that ran an action.
    pub(crate) fn num_ranks(&self) -> u32 {
        self.spans.iter().map(|span| span.0 + 1).max().unwrap_or(0)
    }

    /// The spans by tensor group, whose ranks run the same actions at the same time: those of the first rank of each.
    pub(crate) fn spans(&self, layout: &Layout) -> Vec<Span> {
        let of_group = |&(rank, action, start_ns, end_ns): &(u32, Action, u64, u64)| {
            let rank = Rank(rank);
            let is_other = layout.coordinates(rank).is_some_and(|at| at.tensor > 0);
            // A rank that the plan does not have is an error of whoever reads the spans.
            let group = layout.group(rank).unwrap_or(rank);
            (!is_other).then_some(Span { rank: group, action, start_ns, end_ns })
        };
        self.spans.iter().filter_map(of_group).collect()
    }
}

/// One line of `schedules.jsonl`.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct StepSchedule {
    pub(crate) step: u64,
    pub(crate) arm: String,
    /// Hashes of the plan and of the data profile.
    #[serde(default)]
    pub(crate) made_from: MadeFrom,
    /// Ranks of each node that it was made for; logs before November 2026 do not say it.
    #[serde(default)]
    pub(crate) ranks_per_node: Option<u32>,
    /// The global batch, in arrival order.
    pub(crate) samples: Vec<SampleIndex>,
    pub(crate) schedule: Schedule,
}

/// One line of `events.jsonl`.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct StepEvent {
    step: u64,
    kind: String,
    /// Of an alarm.
    #[serde(default)]
    cause: Option<String>,
    words: String,
}

impl StepEvent {
    /// The likely cause of an alarm; `None` of all else.
    pub(crate) fn alarm(&self) -> Option<&str> {
        (self.kind == "alarm").then(|| self.cause.as_deref().unwrap_or("unknown"))
    }

    pub(crate) fn view(&self) -> dflop_report::EventView {
        dflop_report::EventView { step: self.step, is_alarm: self.kind == "alarm", words: self.words.clone() }
    }
}

impl Line for StepEvent {
    fn problem(&self) -> Option<String> {
        None
    }
}

/// One line of `evaluations.jsonl`.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Evaluation {
    /// The last that was trained before it.
    pub(crate) step: u64,
    /// Mean over label tokens; `None` where it was no finite number.
    pub(crate) loss: Option<f64>,
    pub(crate) label_tokens: u64,
    pub(crate) loss_by: Groups,
    /// Samples left out, each with its cause.
    pub(crate) bad: Vec<(u64, String)>,
}

impl Line for Evaluation {
    fn problem(&self) -> Option<String> {
        None
    }
}

/// The lines of a run, by step and arm, that were made from a plan which is not in `now`, where other lines were made from one
/// that is: the plan was replaced while the run went on. Empty where no line was made from one of `now`.
pub(crate) fn of_other_plans(schedules: &[StepSchedule], now: &[MadeFrom]) -> BTreeSet<(u64, String)> {
    let is_now = |plan: &String| now.iter().any(|now| now.get("plan") == Some(plan));
    let plans = || schedules.iter().filter_map(|line| Some((line, line.made_from.get("plan")?)));
    if !plans().any(|(_, plan)| is_now(plan)) {
        return BTreeSet::new();
    }
    let others = plans().filter(|(_, plan)| !is_now(plan));
    others.map(|(line, _)| (line.schedule.step, line.arm.clone())).collect()
}

/// `Ok` if every schedule of a run that says what it was made from was made from what stands beside the run now.
///
/// `now` has the hash of each file that is there, by name: `plan` and `data_profile`; more than once where there are several plans.
///
/// # Errors
/// The first line that was made from something else, with both hashes.
pub(crate) fn check_run(path: &Path, schedules: &[StepSchedule], now: &[MadeFrom]) -> Result<(), Failure> {
    for (index, line) in schedules.iter().enumerate().filter(|(_, line)| !line.made_from.is_empty()) {
        let other = |now: &MadeFrom| {
            let found = |name: &String| line.made_from.get(name).map_or("none", String::as_str);
            let differs = |(name, hash): &(&String, &String)| found(name) != hash.as_str();
            now.iter().find(differs).map(|(name, hash)| (name.clone(), hash.clone(), found(name).to_owned()))
        };
        if now.iter().any(|now| other(now).is_none()) {
            continue;
        }
        // Of several plans the one that differs in least is told: in the data, where the plan is among them.
        let Some((name, hash, found)) = now.iter().filter_map(other).min_by_key(|(name, ..)| name == "plan")
        else {
            continue;
        };
        return Err(Failure::new(
            format!(
                "`{}` line {} was made from another `{name}`: {found}, the one beside it is {hash}",
                path.display(),
                index + 1
            ),
            Some(match name.as_str() {
                // The run can go on: its steps under the plan that is here are then shown.
                "plan" => "put back the plan that the run was trained with, or go on with the one that is there: \
                           `dflop train --resume auto`. A new run in the same place, `dflop train --force`, loses this one"
                    .to_owned(),
                _ => format!(
                    "put back the {name} that the run was trained with, or train to another place: `dflop train --out DIR`"
                ),
            }),
        ));
    }
    Ok(())
}

/// The longest time that a run may have written down, in nanoseconds: eleven days. Sums of such times over all ranks and
/// steps of a run fit their integers.
const NS_MAX: u64 = 1_000_000_000_000_000;
/// The most ranks that a run may have written down.
const RANKS_MAX: u32 = 1 << 20;

/// A line of a run, with the rules that its numbers keep.
pub(crate) trait Line: for<'de> Deserialize<'de> {
    /// The first rule that is broken, as "field: value, rule".
    fn problem(&self) -> Option<String>;
}

/// The first of these times that no step takes.
fn too_long(times: &[(&str, u64)]) -> Option<String> {
    let (name, ns) = times.iter().find(|(_, ns)| *ns > NS_MAX)?;
    Some(format!("{name}: {ns}, must be at most {NS_MAX} (eleven days)"))
}

impl Line for StepMetrics {
    fn problem(&self) -> Option<String> {
        let times = [
            ("step_ns", self.step_ns),
            ("predicted_ns", self.predicted_ns),
            ("corrected_ns", self.corrected_ns.unwrap_or(0)),
            ("data_wait_ns", self.data_wait_ns),
            ("schedule_wait_ns", self.schedule_wait_ns),
        ];
        let is_ratio = (0.0..=1.0).contains(&self.bubble_ratio);
        too_long(&times).or_else(|| {
            (!is_ratio).then(|| format!("bubble_ratio: {}, must be from 0 to 1", self.bubble_ratio))
        })
    }
}

impl Line for StepTrace {
    fn problem(&self) -> Option<String> {
        let of_span = |(index, &(rank, action, start_ns, end_ns)): (usize, &(u32, Action, u64, u64))| {
            if rank >= RANKS_MAX {
                return Some(format!("spans[{index}]: rank {rank}, must be below {RANKS_MAX}"));
            }
            if end_ns < start_ns {
                return Some(format!(
                    "spans[{index}]: `{action}` ends at {end_ns}, before its start at {start_ns}"
                ));
            }
            too_long(&[("end_ns", end_ns)]).map(|problem| format!("spans[{index}]: {problem}"))
        };
        let makespan = too_long(&[("makespan_ns", self.makespan_ns)]);
        makespan.or_else(|| self.spans.iter().enumerate().find_map(of_span))
    }
}

impl Line for StepSchedule {
    fn problem(&self) -> Option<String> {
        let schedule = &self.schedule;
        too_long(&[
            ("schedule.predicted_makespan_ns", schedule.predicted_makespan_ns),
            ("schedule.max_load_ns", schedule.max_load_ns),
            ("schedule.lower_bound_ns", schedule.lower_bound_ns),
        ])
    }
}

/// The lines of a JSONL file; `None` if there is no such file. A last line cut short by a kill is left out.
pub(crate) fn read_lines<T: Line>(path: &Path) -> Result<Option<Vec<T>>, Failure> {
    read_journal(path, &mut Vec::new())
}

/// As [`read_lines`]; a file whose last line is left out is also put into `cut`, as a sentence.
pub(crate) fn read_journal<T: Line>(path: &Path, cut: &mut Vec<String>) -> Result<Option<Vec<T>>, Failure> {
    // A run of any length: its lines are the user's own.
    let text = match artifact::read_text(path, u64::MAX) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Failure::new(format!("cannot read `{}`: {error}", path.display()), None)),
    };
    let is_cut = !text.is_empty() && !text.ends_with('\n');
    let lines: Vec<&str> = text.lines().collect();
    let mut records: Vec<T> = Vec::with_capacity(lines.len());
    for (index, line) in lines.iter().enumerate() {
        let refused = |cause: String| {
            Failure::new(
                format!("`{}` line {}: {cause}", path.display(), index + 1),
                Some("the file was changed or written by another version of dflop: train again".to_owned()),
            )
        };
        match serde_json::from_str::<T>(line) {
            Ok(record) => match record.problem() {
                None => records.push(record),
                Some(problem) => return Err(refused(problem)),
            },
            Err(_) if is_cut && index + 1 == lines.len() => {
                let sentence = format!("`{}`: its last line is cut short and left out", path.display());
                talk!("warning: {sentence}");
                cut.push(sentence);
            }
            Err(error) => return Err(refused(error.to_string())),
        }
    }
    Ok(Some(records))
}

/// A step of one pair, for tests: idle for a fifth of it in arrival order and for a tenth otherwise, corrected 5 % too high.
#[cfg(test)]
pub(crate) fn step_of_pair(pair: u64, arm: &str, step_ns: u64, predicted_ns: u64) -> StepMetrics {
    StepMetrics {
        step: pair,
        arm: arm.to_owned(),
        loss: Some(1.0),
        loss_by: Groups::new(),
        step_ns,
        predicted_ns,
        corrected_ns: Some(step_ns + step_ns / 20),
        bubble_ratio: if arm == "blind" { 0.2 } else { 0.1 },
        idle_ns: None,
        tokens: None,
        samples: None,
        data_wait_ns: 0,
        schedule_wait_ns: pair,
        was_stopped: false,
        is_rehearsed: false,
        is_first: false,
        pair: Some(pair),
    }
}
