//! The step scheduler, as the runtime sees it: schedules from a thread, predictions, and what measured steps say of them.

use crate::SIGNALS_EVERY;
use crate::action::letter;
use crate::error::{Kind, artifact, map, raise};
use crate::plan::Schedule;
use crate::slow_shapes::SlowShapes;
use crate::value;
use dflop_step::{
    Adjustment, Arm, Correction, CorrectionState, GiantRule, Job, Pack, Prefetch, StepScheduler as Scheduler,
    Sum, Tail, Watch,
};
use dflop_types::{ActionKind, Layout, ModelProfile, Rank, SampleIndex, Span};
use pyo3::prelude::*;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

fn arm(name: &str) -> PyResult<Arm> {
    name.parse().map_err(|error: dflop_step::ParseArmError| raise(Kind::Schedule, &error.to_string(), None))
}

fn spans(raw: Vec<(u32, String, u64, u64)>) -> PyResult<Vec<Span>> {
    raw.into_iter()
        .map(|(rank, action, start_ns, end_ns)| {
            let action: dflop_types::Action = action
                .parse()
                .map_err(|e: dflop_types::ParseActionError| raise(Kind::Schedule, &e.to_string(), None))?;
            if end_ns < start_ns {
                let message =
                    format!("{action} on rank {rank} ends at {end_ns} ns, before its start at {start_ns} ns");
                return Err(raise(Kind::Schedule, &message, None));
            }
            Ok(Span { rank: Rank(rank), action, start_ns, end_ns })
        })
        .collect()
}

/// What stands by tensor group, by rank.
fn by_rank<T: Clone>(layout: &Layout, by_group: &[T]) -> Vec<T> {
    let of_group = |(group, value): (u32, &T)| {
        let ranks = layout.ranks_of_group(Rank(group)).count();
        std::iter::repeat_n(value.clone(), ranks)
    };
    (0..).zip(by_group).flat_map(of_group).collect()
}

/// The spans of tensor groups, of each of their ranks.
fn of_ranks(layout: &Layout, spans: &[Span]) -> Vec<(u32, String, u64, u64)> {
    let of_group = |s: &Span| {
        let (action, start_ns, end_ns) = (s.action.to_string(), s.start_ns, s.end_ns);
        layout.ranks_of_group(s.rank).map(move |rank| (rank.0, action.clone(), start_ns, end_ns))
    };
    spans.iter().flat_map(of_group).collect()
}

/// Row, letter, predicted and measured nanoseconds and median ratio of one step's actions of a kind; and nanoseconds of
/// what follows them, and of it beyond the predicted tails.
type ObservedStep = (Vec<(usize, char, u64, u64, f64)>, u64, Option<i64>);

/// The packs of each step of a component: excess, work, and the sizes of the samples with their tokens.
type StepPacks = Vec<Vec<(f64, f64, Vec<(u64, u64)>)>>;

/// A schedule, nanoseconds waited, its adjustment as JSON, corrected makespans without and with it.
type Taken = (Schedule, u64, Option<Py<PyAny>>, Option<(u64, u64)>);

/// The kind of action that a letter names.
fn kind(letter: char) -> PyResult<ActionKind> {
    let action: Result<dflop_types::Action, _> = format!("0{letter}0").parse();
    action
        .map(|a| a.kind)
        .map_err(|e: dflop_types::ParseActionError| raise(Kind::Schedule, &e.to_string(), None))
}

/// Parts by name in bytes, tensor bytes, all bytes, and the moment.
type RankBytes = (Vec<(&'static str, u64)>, u64, u64, String);

/// (rank, action, start, end) of all ranks, tail of each rank, transfer time; in nanoseconds.
type PredictedSpans = (Vec<(u32, String, u64, u64)>, Vec<u64>, u64);

/// Computes schedules in a Rust thread while Python trains; see `_native/__init__.pyi`.
#[pyclass(frozen, module = "dflop._native")]
pub(crate) struct StepScheduler {
    scheduler: Arc<Scheduler>,
    prefetch: Prefetch,
    correction: Mutex<Correction>,
    watch: Mutex<Watch>,
}

#[pymethods]
impl StepScheduler {
    #[new]
    #[pyo3(signature = (
        plan_path, data_profile_path, model_profile_path, seed, memory_budget_bytes = None, ranks_per_node = None,
        schedule_seconds_max = 10.0, *, giants = "alone", bucket_tokens_max = None
    ))]
    // Arguments of Python, which names them.
    #[allow(clippy::too_many_arguments)]
    fn new(
        plan_path: PathBuf,
        data_profile_path: PathBuf,
        model_profile_path: PathBuf,
        seed: u64,
        memory_budget_bytes: Option<u64>,
        ranks_per_node: Option<u32>,
        schedule_seconds_max: f64,
        giants: &str,
        bucket_tokens_max: Option<u64>,
    ) -> PyResult<Self> {
        let policy = giants
            .parse()
            .map_err(|e: dflop_step::ParseGiantPolicyError| raise(Kind::Plan, &e.to_string(), None))?;
        let plan: dflop_types::Plan = dflop_types::artifact::read(&plan_path).map_err(artifact)?;
        let data = dflop_data::table::read(&data_profile_path).map_err(artifact)?;
        let model: ModelProfile = dflop_types::artifact::read(&model_profile_path).map_err(artifact)?;
        let scheduler = Scheduler::of_plan(&plan, &data, &model, memory_budget_bytes, seed)
            .and_then(|scheduler| scheduler.with_bucket_tokens_max(bucket_tokens_max))
            .map_err(map(Kind::Plan))?
            .with_giants(GiantRule { policy, ..GiantRule::default() });
        let scheduler = Arc::new(match ranks_per_node {
            Some(ranks) => scheduler.with_ranks_per_node(ranks).map_err(map(Kind::Plan))?,
            None => scheduler,
        });
        let limit = Duration::try_from_secs_f64(schedule_seconds_max).map_err(|error| {
            let message = format!("`schedule_seconds_max` is {schedule_seconds_max}: {error}");
            raise(Kind::Schedule, &message, None)
        })?;
        let wall_limit = Box::new(move || -> Box<dyn Fn() -> bool> {
            let start = Instant::now();
            Box::new(move || start.elapsed() > limit)
        });
        let prefetch = Prefetch::new(Arc::clone(&scheduler), wall_limit).map_err(map(Kind::Plan))?;
        let correction = Mutex::new(Correction::new(&scheduler));
        Ok(Self { scheduler, prefetch, correction, watch: Mutex::default() })
    }

    #[pyo3(signature = (step, samples, arm, *, corrected = false, compared = false))]
    fn submit(
        &self,
        step: u64,
        samples: Vec<u32>,
        arm: &str,
        corrected: bool,
        compared: bool,
    ) -> PyResult<()> {
        let adjustment =
            if corrected { self.held().adjustment(&self.scheduler) } else { Adjustment::default() };
        let samples = samples.into_iter().map(SampleIndex).collect();
        self.prefetch.submit((step, self::arm(arm)?), Job { samples, adjustment, is_compared: compared });
        Ok(())
    }

    fn take(&self, py: Python<'_>, step: u64, arm: &str) -> PyResult<Taken> {
        let key = (step, self::arm(arm)?);
        let start = Instant::now();
        let answer = loop {
            let found = py.detach(|| self.prefetch.take_within(key, SIGNALS_EVERY));
            if let Some(answer) = found.map_err(map(Kind::Schedule))? {
                break answer;
            }
            py.check_signals()?;
        };
        let waited_ns = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let adjustment = record(py, &answer.adjustment)?;
        Ok((Schedule(answer.schedule), waited_ns, adjustment, answer.compared_ns))
    }

    #[pyo3(signature = (step, samples, arm, adjustment = None))]
    fn schedule(
        &self,
        py: Python<'_>,
        step: u64,
        samples: Vec<u32>,
        arm: &str,
        adjustment: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Schedule> {
        let (arm, adjustment) = (self::arm(arm)?, self::adjustment(adjustment.as_ref())?);
        let samples: Vec<SampleIndex> = samples.into_iter().map(SampleIndex).collect();
        py.detach(|| self.scheduler.adjusted(adjustment)?.schedule(step, &samples, arm))
            .map(Schedule)
            .map_err(map(Kind::Schedule))
    }

    fn predict_makespan_ns(&self, py: Python<'_>, schedule: &Schedule) -> PyResult<u64> {
        py.detach(|| self.scheduler.simulate(&schedule.0))
            .map(|timeline| timeline.makespan_ns)
            .map_err(map(Kind::Plan))
    }

    /// Spans of all ranks, tail of each rank, transfer time; where shapes are slow, as long as these take.
    #[pyo3(signature = (schedule, slow_shapes = None))]
    fn predicted_spans(
        &self,
        py: Python<'_>,
        schedule: &Schedule,
        slow_shapes: Option<&SlowShapes>,
    ) -> PyResult<PredictedSpans> {
        let found = py.detach(|| {
            let timeline = match slow_shapes {
                None => self.scheduler.simulate(&schedule.0)?,
                Some(slow) => self.scheduler.simulate_slow(&schedule.0, &slow.0)?,
            };
            Ok((timeline, self.scheduler.step_input(&schedule.0)?))
        });
        let (timeline, input) = found.map_err(map::<dflop_step::StepError>(Kind::Plan))?;
        let layout = self.scheduler.settings().layout;
        Ok((of_ranks(&layout, &timeline.spans), by_rank(&layout, &input.tail_ns), input.transfer_ns))
    }

    fn slow_shapes(
        &self,
        py: Python<'_>,
        usual: &Schedule,
        share: f64,
        times: f64,
        seed: u64,
    ) -> PyResult<SlowShapes> {
        py.detach(|| dflop_step::SlowShapes::drawn(&self.scheduler, &usual.0, share, times, seed))
            .map(SlowShapes)
            .map_err(map(Kind::Plan))
    }

    fn predict_corrected_ns(&self, py: Python<'_>, schedule: &Schedule) -> PyResult<u64> {
        let correction = self.held().clone();
        py.detach(|| self.scheduler.simulate_corrected(&schedule.0, &correction))
            .map(|timeline| timeline.makespan_ns)
            .map_err(map(Kind::Plan))
    }

    #[pyo3(signature = (schedule, spans, makespan_ns, *, fitted = true))]
    fn observe(
        &self,
        schedule: &Schedule,
        spans: Vec<(u32, String, u64, u64)>,
        makespan_ns: u64,
        fitted: bool,
    ) -> PyResult<()> {
        let spans = self.spans(spans)?;
        let correction = &mut self.held();
        self.scheduler.observe(correction, &schedule.0, &spans, makespan_ns, fitted).map_err(map(Kind::Plan))
    }

    /// Name, words, mend and size of each alarm that the last observed step raised.
    fn alarms(&self, loader_wait: f64, network_wait: f64) -> Vec<(&'static str, String, &'static str, f64)> {
        let mut watch = self.watch.lock().unwrap_or_else(PoisonError::into_inner);
        let layout = self.scheduler.settings().layout;
        let alarms = self.held().alarms(&mut watch, &layout, (loader_wait, network_wait));
        alarms.iter().map(|a| (a.cause.name(), a.to_string(), a.cause.mend(), a.times)).collect()
    }

    /// What the watch knows.
    fn watched<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let watch = self.watch.lock().unwrap_or_else(PoisonError::into_inner);
        value::to_python(py, serde_json::to_value(&*watch))
    }

    fn watch_from(&self, record: &Bound<'_, PyAny>) -> PyResult<()> {
        let read = serde_json::from_value(value::from_python("the state of a watch", record)?)
            .map_err(|error| raise(Kind::Schedule, &format!("not the state of a watch: {error}"), None))?;
        *self.watch.lock().unwrap_or_else(PoisonError::into_inner) = read;
        Ok(())
    }

    fn adjustment(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        record(py, &self.held().adjustment(&self.scheduler))
    }

    fn correction(&self) -> (Vec<ObservedStep>, Vec<StepPacks>) {
        let state = self.held().state();
        let named = |s: Sum| (s.row, letter(s.kind), s.predicted_ns, s.measured_ns, s.median);
        let steps = state.steps.into_iter();
        let step = |(sums, tail): (Vec<Sum>, Tail)| {
            (sums.into_iter().map(named).collect(), tail.of_all_ns, tail.of_components_ns)
        };
        let steps = steps.map(step).collect();
        let told = |pack: Pack| (pack.excess, pack.work, pack.parts);
        let of_steps = |steps: Vec<Vec<Pack>>| -> StepPacks {
            steps.into_iter().map(|packs| packs.into_iter().map(told).collect()).collect()
        };
        (steps, state.packs.map(of_steps).into())
    }

    fn correct_by(&self, steps: Vec<ObservedStep>, packs: [StepPacks; 2]) -> PyResult<()> {
        let mut read = Vec::new();
        for (sums, of_all_ns, of_components_ns) in steps {
            let sum = |(row, letter, predicted_ns, measured_ns, median)| {
                Ok(Sum { row, kind: self::kind(letter)?, predicted_ns, measured_ns, median })
            };
            let tail = Tail { of_all_ns, of_components_ns };
            read.push((sums.into_iter().map(sum).collect::<PyResult<Vec<_>>>()?, tail));
        }
        let pack = |(excess, work, parts)| Pack { excess, work, parts };
        let packs =
            packs.map(|steps| steps.into_iter().map(|packs| packs.into_iter().map(pack).collect()).collect());
        let mut correction = self.held();
        *correction = correction.clone().with_state(CorrectionState { steps: read, packs });
        Ok(())
    }

    fn memory(&self, py: Python<'_>, schedule: &Schedule) -> PyResult<Vec<RankBytes>> {
        let peaks = py.detach(|| self.scheduler.memory(&schedule.0)).map_err(map(Kind::Plan))?;
        let peaks = by_rank(&self.scheduler.settings().layout, &peaks);
        Ok(peaks
            .iter()
            .map(|peak| {
                (peak.by_use().to_vec(), peak.tensor_bytes(), peak.total_bytes(), peak.moment.to_string())
            })
            .collect())
    }

    /// Messages, feature tokens, those that cross nodes, samples that several replicas encode.
    fn traffic(&self, schedule: &Schedule) -> PyResult<(u64, u64, u64, u64)> {
        let traffic = self.scheduler.traffic(&schedule.0).map_err(map(Kind::Plan))?;
        Ok((
            traffic.num_messages,
            traffic.feature_tokens,
            traffic.feature_tokens_across,
            traffic.num_cut_samples,
        ))
    }

    fn idle_by_cause(
        &self,
        schedule: &Schedule,
        spans: Vec<(u32, String, u64, u64)>,
        makespan_ns: u64,
    ) -> PyResult<(u64, u64, u64, u64)> {
        let spans = self.spans(spans)?;
        let idle =
            self.scheduler.measured(&schedule.0, &spans, makespan_ns).map_err(map(Kind::Plan))?.idle_ns;
        Ok((idle.ramp, idle.imbalance, idle.transfer, idle.data_wait))
    }
}

/// The makespan that the simulator gives for measured durations; see `_native/testing.pyi`.
#[pyfunction]
#[pyo3(signature = (scheduler, schedule, spans, tail_ns = None))]
pub(crate) fn simulate_measured(
    scheduler: &StepScheduler,
    schedule: &Schedule,
    spans: Vec<(u32, String, u64, u64)>,
    tail_ns: Option<u64>,
) -> PyResult<u64> {
    let spans = scheduler.spans(spans)?;
    let found = scheduler.scheduler.simulate_measured(&schedule.0, &spans, tail_ns);
    found.map(|timeline| timeline.makespan_ns).map_err(map(Kind::Plan))
}

impl StepScheduler {
    /// The spans of the first rank of each tensor group, by group: its ranks run the same actions at the same time.
    fn spans(&self, raw: Vec<(u32, String, u64, u64)>) -> PyResult<Vec<Span>> {
        let layout = self.scheduler.settings().layout;
        let of_group = |span: Span| match layout.coordinates(span.rank) {
            Some(at) if at.tensor > 0 => None,
            // A rank that the plan does not have is an error of whoever reads the spans.
            _ => Some(Span { rank: layout.group(span.rank).unwrap_or(span.rank), ..span }),
        };
        Ok(spans(raw)?.into_iter().filter_map(of_group).collect())
    }

    fn held(&self) -> std::sync::MutexGuard<'_, Correction> {
        self.correction.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// `None` where nothing is adjusted.
fn record(py: Python<'_>, adjustment: &Adjustment) -> PyResult<Option<Py<PyAny>>> {
    let of = || value::to_python(py, serde_json::to_value(adjustment)).map(Bound::unbind);
    (!adjustment.is_nothing()).then(of).transpose()
}

fn adjustment(record: Option<&Bound<'_, PyAny>>) -> PyResult<Adjustment> {
    let Some(record) = record else { return Ok(Adjustment::default()) };
    serde_json::from_value(value::from_python("a correction", record)?)
        .map_err(|error| raise(Kind::Schedule, &format!("not a correction: {error}"), None))
}
