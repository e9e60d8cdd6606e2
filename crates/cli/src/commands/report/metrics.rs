//! `/metrics` of `dflop report --watch`: the numbers of a running job in the text format of Prometheus.

use super::found::run_dir;
use crate::Failure;
use crate::args;
use crate::measured::{self, StepEvent, StepMetrics};
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// What the format is called in a `Content-Type`.
pub(super) const KIND: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Likely causes of alarms.
const CAUSES: [&str; 6] = ["clock", "data", "loader", "network", "population", "rank"];

/// Whether a number only grows.
#[derive(Clone, Copy)]
enum Type {
    Counter,
    Gauge,
}

/// A family of the text: its name, what it says, and samples of labels and number.
struct Family {
    name: &'static str,
    help: &'static str,
    kind: Type,
    samples: Vec<(String, f64)>,
}

impl Family {
    fn one(name: &'static str, help: &'static str, kind: Type, value: Option<f64>) -> Self {
        Self { name, help, kind, samples: value.map(|value| (String::new(), value)).into_iter().collect() }
    }

    /// A family without a sample is left out.
    fn write(&self, text: &mut String) {
        if self.samples.is_empty() {
            return;
        }
        let kind = match self.kind {
            Type::Counter => "counter",
            Type::Gauge => "gauge",
        };
        let _ = writeln!(text, "# HELP {} {}", self.name, self.help);
        let _ = writeln!(text, "# TYPE {} {kind}", self.name);
        for (labels, value) in &self.samples {
            let _ = writeln!(text, "{}{labels} {value}", self.name);
        }
    }
}

/// The numbers of the run as it is now.
pub(super) fn text(arguments: &args::Report) -> Result<String, Failure> {
    let run = run_dir(&arguments.dir, arguments.run.as_deref());
    let metrics: Vec<StepMetrics> = measured::read_lines(&run.join("metrics.jsonl"))?.unwrap_or_default();
    let events: Vec<StepEvent> = measured::read_lines(&run.join("events.jsonl"))?.unwrap_or_default();
    let mut text = String::new();
    for family in families(&metrics, &events) {
        family.write(&mut text);
    }
    Ok(text)
}

#[allow(clippy::too_many_lines, reason = "one list, number by number")]
fn families(metrics: &[StepMetrics], events: &[StepEvent]) -> Vec<Family> {
    let last = metrics.last();
    let seconds = |ns: u64| ns as f64 / 1e9;
    let all =
        |of: &dyn Fn(&StepMetrics) -> u64| (!metrics.is_empty()).then(|| metrics.iter().map(of).sum::<u64>());
    let known = |of: &dyn Fn(&StepMetrics) -> Option<u64>| {
        metrics.iter().map(of).sum::<Option<u64>>().filter(|_| !metrics.is_empty())
    };
    let (counter, gauge) = (Type::Counter, Type::Gauge);
    let rate = |of: Option<u64>| Some(of? as f64 / seconds(last?.step_ns).max(f64::MIN_POSITIVE));
    vec![
        Family::one("dflop_step", "Number of the last step.", gauge, last.map(|line| line.step as f64)),
        Family::one(
            "dflop_is_rehearsed",
            "1 where steps are rehearsed: nothing was computed, actions slept for their predicted times; else 0.",
            gauge,
            last.map(|_| f64::from(u8::from(metrics.iter().any(|line| line.is_rehearsed)))),
        ),
        Family::one(
            "dflop_steps_total",
            "Steps in the run's metrics.",
            counter,
            last.map(|_| metrics.len() as f64),
        ),
        Family::one(
            "dflop_step_duration_seconds",
            "Duration of the last step, to the end of the optimizer on its last rank.",
            gauge,
            last.map(|line| seconds(line.step_ns)),
        ),
        Family::one(
            "dflop_step_predicted_seconds",
            "Duration of the last step as predicted before it.",
            gauge,
            last.map(|line| seconds(line.predicted_ns)),
        ),
        Family::one(
            "dflop_step_corrected_seconds",
            "The same, corrected by the steps before it.",
            gauge,
            last.and_then(|line| Some(seconds(line.corrected_ns?))),
        ),
        Family::one(
            "dflop_steps_duration_seconds_total",
            "Duration of all steps.",
            counter,
            all(&|line| line.step_ns).map(seconds),
        ),
        Family::one(
            "dflop_idle_ratio",
            "Idle time of the last step over ranks x makespan.",
            gauge,
            last.map(|line| line.bubble_ratio),
        ),
        Family {
            name: "dflop_idle_seconds_total",
            help: "Time that ranks waited, over all ranks and steps, by cause; data_wait lies before the steps too.",
            kind: counter,
            samples: idle(metrics),
        },
        Family::one(
            "dflop_schedule_wait_seconds_total",
            "Time that training waited for schedules, outside of its steps.",
            counter,
            all(&|line| line.schedule_wait_ns).map(seconds),
        ),
        Family::one(
            "dflop_tokens_total",
            "LLM tokens trained.",
            counter,
            known(&|line| line.tokens).map(|n| n as f64),
        ),
        Family::one(
            "dflop_samples_total",
            "Samples trained.",
            counter,
            known(&|line| line.samples).map(|n| n as f64),
        ),
        Family::one(
            "dflop_tokens_per_second",
            "LLM tokens of the last step over its duration.",
            gauge,
            rate(last.and_then(|line| line.tokens)),
        ),
        Family::one(
            "dflop_loss",
            "Loss of the last step, the mean over label tokens.",
            gauge,
            last.and_then(|line| line.loss),
        ),
        Family {
            name: "dflop_alarms_total",
            help: "Alarms raised, by likely cause.",
            kind: counter,
            samples: if last.is_some() { alarms(events) } else { Vec::new() },
        },
    ]
}

/// Seconds that ranks waited in all steps, by cause; none where a step does not say.
fn idle(metrics: &[StepMetrics]) -> Vec<(String, f64)> {
    let Some(all) = metrics.iter().map(|line| line.idle_ns).collect::<Option<Vec<_>>>() else {
        return Vec::new();
    };
    let sum = |of: fn(&measured::IdleNs) -> u64| all.iter().map(of).sum::<u64>() as f64 / 1e9;
    let causes = [
        ("ramp", sum(|idle| idle.ramp)),
        ("imbalance", sum(|idle| idle.imbalance)),
        ("transfer", sum(|idle| idle.transfer)),
        ("data_wait", sum(|idle| idle.data_wait)),
    ];
    let is_there = !all.is_empty();
    causes.into_iter().filter(|_| is_there).map(|(cause, s)| (format!("{{cause=\"{cause}\"}}"), s)).collect()
}

/// Alarms by likely cause, each cause from the start: a counter that is not there yet cannot be told from one that is not kept.
fn alarms(events: &[StepEvent]) -> Vec<(String, f64)> {
    let mut alarms: BTreeMap<&str, f64> = CAUSES.into_iter().map(|cause| (cause, 0.0)).collect();
    for cause in events.iter().filter_map(StepEvent::alarm) {
        *alarms.entry(cause).or_default() += 1.0;
    }
    alarms.into_iter().map(|(cause, count)| (format!("{{cause=\"{}\"}}", escaped(cause)), count)).collect()
}

/// A value of a label.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}
