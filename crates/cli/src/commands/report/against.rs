//! `dflop report --against`: two runs side by side; and the plans of a run that has changed its plan.

use super::found::Found;
use super::planned::Planned;
use super::title;
use crate::Failure;
use crate::args;
use crate::measured::{StepMetrics, StepSchedule};
use dflop_report::{Against, AgainstRow, Change, Report, StepPair, StepView, Unit};
use dflop_types::statistics::{Interval, geometric_mean, quantile_of};
use dflop_types::{RankedPlan, SampleIndex, counted, number};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

/// Adds what was asked for, and what one run shows by itself, to the report of `found`.
pub(super) fn add(found: &Found, report: &mut Report, arguments: &args::Report) -> Result<(), Failure> {
    if found.planned.len() > 1 {
        report.plans = Some(between_plans(found, &report.steps));
    }
    let Some(dir) = &arguments.against else { return Ok(()) };
    let (dir, run) = place(dir, &arguments.dir);
    let other = Found::read(dir, run)?;
    for (of, dir) in [(found, arguments.dir.as_path()), (&other, dir)] {
        if of.metrics.is_empty() {
            return Err(Failure::new(
                format!("`{}` holds no measured step: nothing to hold side by side", dir.display()),
                Some("name a directory with a run/, or the directory of a run".to_owned()),
            ));
        }
    }
    let views = other.step_views()?;
    // Two directories are told by their names, two runs of one directory by theirs.
    let places = run.map_or([dir, &arguments.dir], |run| [run, &found.run]);
    let mut names = places.map(title);
    if names[0] == names[1] {
        names = places.map(|place| place.display().to_string());
    }
    let arms = arms(&other, found);
    let [first, second] = [(&other, &views, &arms[0], 0), (found, &report.steps, &arms[1], 1)]
        .map(|(found, views, arm, at)| Side::of(names[at].clone(), found, views, arm, |_| true));
    let mut against = sides(&first, &second);
    if arms[0] != arms[1] {
        against
            .notes
            .push(format!("No arm was trained in both: `{}` is held against `{}`.", arms[1], arms[0]));
    }
    report.against = Some(against);
    Ok(())
}

/// The directory of profiles, and that of the run, that a name stands for.
fn place<'a>(named: &'a Path, dir: &'a Path) -> (&'a Path, Option<&'a Path>) {
    if !named.join("metrics.jsonl").exists() {
        return (named, None);
    }
    // A run stands beside what it was made from; else that is where the report's own is.
    let parent =
        named.parent().map(|parent| if parent.as_os_str().is_empty() { Path::new(".") } else { parent });
    let beside = parent.filter(|parent| parent.join("plan.json").exists());
    (beside.unwrap_or(dir), Some(named))
}

/// The last step of the first plan and the first of the last, side by side.
fn between_plans(found: &Found, views: &[StepView]) -> Against {
    let arm = found.metrics.first().map_or("", |line| line.arm.as_str());
    let of = |at: usize| {
        let name = found.planned[at].name();
        Side::of(name, found, views, arm, |line| found.plan_index(line) == at)
    };
    let (first, last) = (of(0), of(found.planned.len() - 1));
    let mut against = sides(&first, &last);
    if found.planned.len() > 2 {
        let num = counted(found.planned.len() as u64, "plan");
        against.notes.push(format!("The run was trained with {num}: the first and the last are shown."));
    }
    against
}

/// The arms that are held against each other: the fastest of ours that both trained; else the first of each.
fn arms(first: &Found, second: &Found) -> [String; 2] {
    let mean = |found: &Found, arm: &str| {
        let times = found.metrics.iter().filter(|m| m.arm == arm && m.step_ns > 0);
        geometric_mean(times.map(|m| m.step_ns as f64)).unwrap_or(f64::INFINITY)
    };
    let names = |found: &Found| -> Vec<String> {
        let mut names: Vec<String> = found.metrics.iter().map(|m| m.arm.clone()).collect();
        names.sort_unstable();
        names.dedup();
        names
    };
    let of_first = names(first);
    let common = names(second).into_iter().filter(|name| of_first.contains(name));
    let best = common.min_by(|a, b| mean(second, a).total_cmp(&mean(second, b)));
    let own = |found: &Found| found.metrics.first().map_or_else(String::new, |m| m.arm.clone());
    best.map_or_else(|| [own(first), own(second)], |name| [name.clone(), name])
}

/// Some steps of a run, of one arm.
struct Side<'a> {
    name: String,
    found: &'a Found,
    planned: Option<&'a Planned>,
    steps: Vec<&'a StepMetrics>,
    /// Whether a first step was left out.
    is_cut: bool,
    /// How many of the steps were trained with another plan than `planned`.
    num_replanned: usize,
    /// Samples of each step, ascending.
    samples: BTreeMap<u64, Vec<SampleIndex>>,
    /// Position and view of each step.
    views: BTreeMap<u64, (usize, &'a StepView)>,
}

impl<'a> Side<'a> {
    fn of(
        name: String,
        found: &'a Found,
        views: &'a [StepView],
        arm: &str,
        is_its: impl Fn(&StepSchedule) -> bool,
    ) -> Self {
        let lines: Vec<&StepSchedule> =
            found.schedules.iter().filter(|line| line.arm == arm && is_its(line)).collect();
        let samples: BTreeMap<u64, Vec<SampleIndex>> = lines
            .iter()
            .map(|line| {
                let mut samples = line.samples.clone();
                samples.sort_unstable();
                (line.schedule.step, samples)
            })
            .collect();
        // A run without its schedules says nothing of its samples, but it has times.
        let is_known = |step: u64| found.schedules.is_empty() || samples.contains_key(&step);
        let mut steps: Vec<&StepMetrics> =
            found.metrics.iter().filter(|m| m.arm == arm && m.step_ns > 0 && is_known(m.step)).collect();
        // Ranks connect in the first step; those of a comparison have been warmed up.
        let is_cut = steps.len() > 2 && steps[0].pair.is_none();
        steps.drain(..usize::from(is_cut));
        let views = views.iter().enumerate().filter(|(_, view)| view.arm == arm);
        let views = views.map(|(index, view)| (view.step, (index, view))).collect();
        let planned = lines.last().and_then(|line| found.planned.get(found.plan_index(line)));
        let planned = planned.or(found.planned.last());
        let last = lines.last().map(|line| found.plan_index(line));
        let is_other = |step: u64| {
            lines.iter().any(|line| line.schedule.step == step && Some(found.plan_index(line)) != last)
        };
        let num_replanned = steps.iter().filter(|m| is_other(m.step)).count();
        Self { name, found, planned, steps, is_cut, num_replanned, samples, views }
    }

    fn ranks(&self) -> Option<f64> {
        self.planned.map(|planned| f64::from(planned.plan.best.layout.num_ranks()))
    }
}

/// Both sides with all that differs.
fn sides(first: &Side<'_>, second: &Side<'_>) -> Against {
    let both = [first, second];
    let data = both.map(|side| side.found.data.as_ref().map(dflop_types::DataProfile::content_hash));
    let is_same_data = data[0] == data[1];
    let of_first: BTreeMap<u64, &StepMetrics> = first.steps.iter().map(|m| (m.step, *m)).collect();
    let matched: Vec<(&StepMetrics, &StepMetrics)> = second
        .steps
        .iter()
        .filter(|m| {
            is_same_data
                && first.samples.get(&m.step).is_some_and(|of| second.samples.get(&m.step) == Some(of))
        })
        .filter_map(|m| Some((*of_first.get(&m.step)?, *m)))
        .collect();
    let is_paired = matched.len() >= 2;
    let steps: [Vec<&StepMetrics>; 2] = if is_paired {
        [matched.iter().map(|pair| pair.0).collect(), matched.iter().map(|pair| pair.1).collect()]
    } else {
        both.map(|side| side.steps.clone())
    };
    let numbers = Numbers { both, steps: &steps, is_paired };
    let pairs = if is_paired { matched.as_slice() } else { &[] };
    let pair = |(_, ours): &(&StepMetrics, &StepMetrics)| {
        let other = first.views.get(&ours.step)?.1.clone();
        Some(StepPair { index: second.views.get(&ours.step)?.0, other })
    };
    Against {
        names: both.map(|side| side.name.clone()),
        notes: notes(both, &steps, matched.len(), is_same_data),
        rows: numbers.rows(),
        pairs: pairs.iter().filter_map(pair).collect(),
        step_ms: both.map(|side| side.steps.iter().map(|m| (m.step, m.step_ns as f64 / 1e6)).collect()),
    }
}

/// What the numbers are of, and in what the two differ beside them.
fn notes(
    both: [&Side<'_>; 2],
    steps: &[Vec<&StepMetrics>; 2],
    num_matched: usize,
    is_same_data: bool,
) -> Vec<String> {
    let mut notes = Vec::new();
    let mut add = |text: String| notes.push(text);
    let [first, second] = both;
    let num = |side: &Side<'_>| counted(side.steps.len() as u64, "step");
    if num_matched >= 2 {
        let of = counted(steps[0].len() as u64, "step");
        let is_all = steps[0].len() == first.steps.len() && steps[0].len() == second.steps.len();
        let rest = if is_all {
            String::new()
        } else {
            format!(", of {} in {} and {} in {}", num(first), first.name, num(second), second.name)
        };
        add(format!("The numbers are of {of} that trained the same samples in both{rest}."));
    } else {
        let (one, two) = (num(first), num(second));
        let why = if is_same_data { "" } else { ", and their data profiles differ" };
        let which =
            if num_matched == 0 { "No two of these steps" } else { "Only one of these steps in each" };
        add(format!(
            "{which} trained the same samples{why}: means over {one} of {} and {two} of {}. The interval includes how much global batches differ.",
            first.name, second.name
        ));
    }
    match (first.is_cut, second.is_cut) {
        (true, true) => add("The first step of each is left out: ranks connect in it.".to_owned()),
        (false, false) => {}
        (is_first, _) => {
            let (cut, whole) = if is_first { (first, second) } else { (second, first) };
            add(format!(
                "The first step of {}, in which ranks connect, is left out; that of {} is not, which has {}.",
                cut.name,
                whole.name,
                num(whole)
            ));
        }
    }
    let plans = both.map(|side| side.planned.map(|planned| &planned.plan));
    if let [Some(one), Some(two)] = plans {
        let mut differ = |what: &str, of: &dyn Fn(&RankedPlan) -> String| {
            let (one, two) = (of(&one.best), of(&two.best));
            if one != two {
                add(format!("The {what} differs: {one} in {}, {two} in {}.", first.name, second.name));
            }
        };
        differ("layout", &|plan| plan.layout.to_string());
        differ("number of microbatches", &|plan| plan.num_microbatches.to_string());
        differ("pipeline order", &|plan| plan.pipeline_order.to_string());
        differ("recomputation", &|plan| plan.recompute.to_string());
        if one.global_batch_size != two.global_batch_size {
            add(format!(
                "The global batch differs: {} samples in {}, {} in {}.",
                one.global_batch_size, first.name, two.global_batch_size, second.name
            ));
        }
        for side in both.iter().filter(|side| side.num_replanned > 0) {
            add(format!(
                "Of {} of {}, {} were trained with an earlier plan than the one that is named here.",
                num(side),
                side.name,
                side.num_replanned
            ));
        }
    } else if plans.iter().any(Option::is_some) {
        add("One of the two has no plan beside it: what it differs in is not known.".to_owned());
    }
    let devices = both.map(|side| {
        let model = side.planned.and_then(|planned| planned.model.as_ref()).or(side.found.model.as_ref());
        model.map(|model| format!("{} ({}, {})", model.device.name, model.device.kind, model.device.dtype))
    });
    if let [Some(one), Some(two)] = &devices
        && one != two
    {
        add(format!("The device differs: {one} in {}, {two} in {}.", first.name, second.name));
    }
    let rehearsed = both.map(|side| side.found.is_rehearsed());
    if rehearsed[0] != rehearsed[1] {
        let name = if rehearsed[0] { &first.name } else { &second.name };
        add(format!(
            "{name} is rehearsed: nothing was computed in it, actions slept for their predicted times."
        ));
    }
    notes
}

/// The steps of both that numbers are formed of.
struct Numbers<'a> {
    both: [&'a Side<'a>; 2],
    steps: &'a [Vec<&'a StepMetrics>; 2],
    is_paired: bool,
}

impl Numbers<'_> {
    fn rows(&self) -> Vec<AgainstRow> {
        let ms = |ns: u64| ns as f64 / 1e6;
        let seconds = |m: &StepMetrics| m.step_ns as f64 / 1e9;
        let mut rows = vec![
            self.ratio("step time", Unit::Ms, &|_, m| Some(ms(m.step_ns))),
            self.ratio("predicted step time", Unit::Ms, &|_, m| {
                (m.predicted_ns > 0).then(|| ms(m.predicted_ns))
            }),
            self.ratio("samples", Unit::PerSecond, &|_, m| Some(m.samples? as f64 / seconds(m))),
            self.ratio("tokens", Unit::PerSecond, &|_, m| Some(m.tokens? as f64 / seconds(m))),
            self.difference("idle", Unit::Share, &|_, m| Some(m.bubble_ratio)),
        ];
        // Idle time a rank and step, of each cause; waits for data lie before the step too.
        let idle = |of: fn(&crate::measured::IdleNs) -> u64| {
            move |side: &Side<'_>, m: &StepMetrics| Some(ms(of(m.idle_ns.as_ref()?)) / side.ranks()?)
        };
        rows.extend([
            self.difference("idle a rank: ramp", Unit::Ms, &idle(|idle| idle.ramp)),
            self.difference("idle a rank: imbalance", Unit::Ms, &idle(|idle| idle.imbalance)),
            self.difference("idle a rank: transfer", Unit::Ms, &idle(|idle| idle.transfer)),
            self.difference("waited a rank: data", Unit::Ms, &idle(|idle| idle.data_wait)),
            self.difference("waited for schedules", Unit::Ms, &|_, m| Some(ms(m.schedule_wait_ns))),
            self.difference("busiest rank over the mean", Unit::Plain, &|side, m| {
                busiest(side.views.get(&m.step)?.1)
            }),
        ]);
        let error = |ns: u64, m: &StepMetrics| (ns as f64 - m.step_ns as f64).abs() / m.step_ns as f64;
        for (name, quantile) in [("median", 0.5), ("95th percentile", 0.95)] {
            let values = [0, 1].map(|at: usize| {
                let known = self.steps[at].iter().filter(|m| m.predicted_ns > 0);
                quantile_of(known.map(|m| error(m.predicted_ns, m)).collect(), quantile)
            });
            rows.push(plain(&format!("prediction error, {name}"), Unit::Share, values));
        }
        for (name, quantile) in [("median", 0.5), ("95th percentile", 0.95)] {
            let values = [0, 1].map(|at: usize| {
                let known = self.steps[at].iter().filter_map(|m| Some(error(m.corrected_ns?, m)));
                quantile_of(known.collect(), quantile)
            });
            rows.push(plain(&format!("corrected error, {name}"), Unit::Share, values));
        }
        rows.extend(self.losses());
        let memory = |of: fn(&RankedPlan) -> u64| {
            self.both.map(|side| Some(of(&side.planned?.plan.best) as f64).filter(|bytes| *bytes > 0.0))
        };
        let encoder = memory(|plan| plan.prediction.encoder_memory_bytes_peak);
        rows.push(plain("predicted peak memory, encoder", Unit::Bytes, encoder));
        let llm = memory(|plan| plan.prediction.llm_memory_bytes_peak);
        rows.push(plain("predicted peak memory, LLM", Unit::Bytes, llm));
        rows.retain(|row| row.values.iter().any(Option::is_some));
        rows
    }

    /// The loss after the last step that both trained, in training and of samples that are held out.
    fn losses(&self) -> Vec<AgainstRow> {
        let mut rows = Vec::new();
        let by_step = self.both.map(|side| {
            let losses = side.steps.iter().filter_map(|m| Some((m.step, m.loss?)));
            losses.collect::<BTreeMap<u64, f64>>()
        });
        let held_out = self.both.map(|side| {
            let losses = side.found.evaluations.iter().filter_map(|one| Some((one.step, one.loss?)));
            losses.collect::<BTreeMap<u64, f64>>()
        });
        for (name, [first, second]) in [("loss", by_step), ("held-out loss", held_out)] {
            let last = second.iter().rev().find(|(step, _)| first.contains_key(step));
            if let Some((step, loss)) = last {
                let values = [first.get(step).copied(), Some(*loss)];
                rows.push(plain(
                    &format!("{name} at step {}", number::thousands(*step)),
                    Unit::Plain,
                    values,
                ));
            }
        }
        rows
    }

    fn values(&self, of: &dyn Fn(&Side<'_>, &StepMetrics) -> Option<f64>) -> Option<[Vec<f64>; 2]> {
        // A number that one step lacks is told of no run: it would be of other steps than the rest.
        let values =
            |at: usize| self.steps[at].iter().map(|m| of(self.both[at], m)).collect::<Option<Vec<f64>>>();
        Some([values(0)?, values(1)?])
    }

    /// Geometric means, which divide to the ratio.
    fn ratio(
        &self,
        name: &str,
        unit: Unit,
        of: &dyn Fn(&Side<'_>, &StepMetrics) -> Option<f64>,
    ) -> AgainstRow {
        let Some([first, second]) = self.values(of) else { return plain(name, unit, [None, None]) };
        let change = if self.is_paired {
            Interval::of_ratios(second.iter().zip(&first).map(|(ours, other)| ours / other))
        } else {
            Interval::of_ratio(&second, &first)
        };
        let values = [geometric_mean(first), geometric_mean(second)];
        AgainstRow { change: change.map(Change::Ratio), ..plain(name, unit, values) }
    }

    /// Means, and the mean of differences.
    fn difference(
        &self,
        name: &str,
        unit: Unit,
        of: &dyn Fn(&Side<'_>, &StepMetrics) -> Option<f64>,
    ) -> AgainstRow {
        let Some([first, second]) = self.values(of) else { return plain(name, unit, [None, None]) };
        let change = if self.is_paired {
            Interval::of(&second.iter().zip(&first).map(|(ours, other)| ours - other).collect::<Vec<f64>>())
        } else {
            Interval::of_difference(&second, &first)
        };
        let mean =
            |values: &[f64]| (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64);
        AgainstRow {
            change: change.map(Change::Difference),
            ..plain(name, unit, [mean(&first), mean(&second)])
        }
    }
}

fn plain(name: &str, unit: Unit, values: [Option<f64>; 2]) -> AgainstRow {
    AgainstRow { name: name.to_owned(), unit, values, change: None }
}

/// Work of the rank that has most over the mean of all: 1 where ranks are in balance.
fn busiest(view: &StepView) -> Option<f64> {
    let timeline = view.measured.as_ref()?;
    let mut busy = vec![0.0; timeline.num_ranks as usize];
    for span in &timeline.spans {
        *busy.get_mut(span.rank.index())? += span.duration_ns() as f64;
    }
    let mean = busy.iter().sum::<f64>() / busy.len() as f64;
    (mean > 0.0).then(|| busy.iter().copied().fold(0.0, f64::max) / mean)
}

/// The two in a terminal.
pub(super) fn words(against: &Against) -> String {
    let [first, second] = &against.names;
    let head =
        [String::new(), first.clone(), second.clone(), "change".to_owned(), "95 % interval".to_owned()];
    let rows: Vec<[String; 5]> =
        std::iter::once(head).chain(against.rows.iter().map(AgainstRow::cells)).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let mut text = format!("{second} against {first}:\n");
    for row in &rows {
        let mut line = format!("  {:<width$}", row[0], width = width(0));
        for (column, cell) in row.iter().enumerate().skip(1) {
            let _ = write!(line, "  {cell:>width$}", width = width(column));
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    for note in &against.notes {
        let _ = writeln!(text, "  {note}");
    }
    text
}
