//! Plans, schedules and global batches, as the runtime sees them.

use crate::SIGNALS_EVERY;
use crate::action::{Action, letter};
use crate::error::{Kind, artifact, map, raise};
use dflop_step::{Arm, Correction, GiantRule, Prefetch, StepScheduler as Scheduler};
use dflop_types::{
    ActionKind, Component, ModelProfile, Placement, Rank, Recompute, SampleIndex, Span, StageIndex,
};
use pyo3::prelude::*;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Which samples form the global batch of each step; see `_native/__init__.pyi`.
#[pyclass(frozen, module = "dflop._native")]
pub(crate) struct GlobalBatches(dflop_step::batches::GlobalBatches);

#[pymethods]
impl GlobalBatches {
    #[new]
    #[pyo3(signature = (
        num_samples, global_batch_size, seed, giants = Vec::new(), giant_steps_max = 0, *, shuffle = true,
        drop_last = false
    ))]
    fn new(
        num_samples: u32,
        global_batch_size: u32,
        seed: u64,
        giants: Vec<u32>,
        giant_steps_max: u32,
        shuffle: bool,
        drop_last: bool,
    ) -> PyResult<Self> {
        let giants: Vec<SampleIndex> = giants.into_iter().map(SampleIndex).collect();
        dflop_step::batches::GlobalBatches::new(num_samples, global_batch_size, seed)
            .map(|batches| if shuffle { batches } else { batches.unshuffled() })
            .and_then(|batches| if drop_last { batches.whole_only() } else { Ok(batches) })
            .and_then(|batches| batches.with_deferred(&giants, giant_steps_max))
            .map(Self)
            .map_err(map(Kind::Plan))
    }

    fn batch(&self, step: u64) -> Vec<u32> {
        self.0.batch(step).into_iter().map(|sample| sample.0).collect()
    }

    fn samples(&self, epoch: u64, first: usize, count: usize) -> Vec<u32> {
        self.0.samples(epoch, first, count).into_iter().map(|sample| sample.0).collect()
    }

    fn deferred(&self, step: u64) -> Vec<(u32, u64)> {
        self.0.deferred(step).into_iter().map(|(sample, steps)| (sample.0, steps)).collect()
    }

    fn epoch(&self, step: u64) -> u64 {
        self.0.epoch(step)
    }

    #[getter]
    fn steps_per_epoch(&self) -> u64 {
        self.0.steps_per_epoch()
    }
}

/// A plan, frozen; see `_native/__init__.pyi`.
#[pyclass(frozen, module = "dflop._native")]
pub(crate) struct Plan(dflop_types::Plan);

#[pymethods]
impl Plan {
    #[staticmethod]
    fn read(path: PathBuf) -> PyResult<Self> {
        dflop_types::artifact::read(&path).map(Self).map_err(artifact)
    }

    #[getter]
    fn encoder_replicas(&self) -> u32 {
        self.0.best.layout.encoder.dp
    }

    #[getter]
    fn llm_replicas(&self) -> u32 {
        self.0.best.layout.llm.dp
    }

    #[getter]
    fn llm_stages(&self) -> u32 {
        self.0.best.layout.llm.pp
    }

    #[getter]
    fn placement(&self) -> &'static str {
        match self.0.best.layout.placement {
            Placement::Disaggregated => "disaggregated",
            Placement::Colocated => "colocated",
        }
    }

    #[getter]
    fn zero(&self) -> u8 {
        self.0.best.layout.zero.into()
    }

    #[getter]
    fn shard_ranks(&self) -> Option<u32> {
        self.0.best.layout.shard_ranks
    }

    #[getter]
    fn recompute(&self) -> &'static str {
        match self.0.best.recompute {
            Recompute::None => "none",
            Recompute::Selective => "selective",
            Recompute::Full => "full",
        }
    }

    #[getter]
    fn num_ranks(&self) -> u32 {
        self.0.best.layout.num_ranks()
    }

    #[getter]
    fn num_microbatches(&self) -> u32 {
        self.0.best.num_microbatches
    }

    #[getter]
    fn global_batch_size(&self) -> u32 {
        self.0.global_batch_size
    }

    #[getter]
    fn pipeline_order(&self) -> String {
        self.0.best.pipeline_order.to_string()
    }

    #[getter]
    fn predicted_step_ns(&self) -> u64 {
        self.0.best.prediction.step_ns_mean
    }

    fn coordinates(&self, rank: u32) -> PyResult<(&'static str, u32, u32)> {
        let layout = self.0.best.layout;
        let at = layout.coordinates(Rank(rank)).ok_or_else(|| {
            raise(
                Kind::Plan,
                &format!("rank {rank} is past the {} ranks of the plan", layout.num_ranks()),
                None,
            )
        })?;
        let component = match at.component {
            Component::Encoder => "encoder",
            Component::Llm => "llm",
            Component::Both => "both",
        };
        Ok((component, at.replica, at.stage.0))
    }

    fn rank(&self, replica: u32, stage: u32) -> u32 {
        self.0.best.layout.rank(replica, StageIndex(stage)).0
    }

    fn stages(&self, rank: u32) -> Vec<u32> {
        self.0.best.layout.stages(Rank(rank)).map(|stage| stage.0).collect()
    }

    fn llm_layers(&self, stage: u32, num_layers: u32) -> PyResult<(u32, u32)> {
        let stages = self.0.best.layout.llm.pp;
        if stage == 0 || stage > stages {
            return Err(raise(
                Kind::Plan,
                &format!("stage {stage} is no LLM stage, they are 1 to {stages}"),
                None,
            ));
        }
        let cut = dflop_types::cut_layers(num_layers, stages);
        let position = stage as usize - 1;
        Ok((cut[..position].iter().sum(), cut[position]))
    }

    fn actions(&self, rank: u32) -> PyResult<Vec<Action>> {
        self.coordinates(rank)?;
        let best = &self.0.best;
        let list =
            dflop_sim::order::of_rank(&best.layout, best.pipeline_order, Rank(rank), best.num_microbatches);
        let list = list.unwrap_or_default();
        Ok(list.iter().map(Action::from).collect())
    }
}

/// A schedule, frozen; see `_native/__init__.pyi`.
#[pyclass(frozen, module = "dflop._native")]
pub(crate) struct Schedule(pub(crate) dflop_types::Schedule);

/// A sample and (first part, number of parts); `None`: all of them.
type Share = (u32, Option<(u32, u32)>);

impl Schedule {
    fn of<T>(side: &[Vec<Vec<T>>], microbatch: usize, replica: usize) -> PyResult<&[T]> {
        let items = side.get(microbatch).and_then(|replicas| replicas.get(replica)).ok_or_else(|| {
            raise(
                Kind::Schedule,
                &format!("the schedule has no microbatch {microbatch} on replica {replica}"),
                None,
            )
        })?;
        Ok(items)
    }
}

#[pymethods]
impl Schedule {
    #[staticmethod]
    fn from_json(text: &str) -> PyResult<Self> {
        serde_json::from_str(text)
            .map(Self)
            .map_err(|error| raise(Kind::Schedule, &format!("not a schedule: {error}"), None))
    }

    fn to_json(&self) -> PyResult<String> {
        serde_json::to_string(&self.0).map_err(|error| raise(Kind::Schedule, &error.to_string(), None))
    }

    /// How it is pickled: ranks send each other the schedule itself.
    fn __reduce__(slf: &Bound<'_, Self>) -> PyResult<(Py<PyAny>, (String,))> {
        let read = slf.get_type().getattr("from_json")?.unbind();
        Ok((read, (slf.get().to_json()?,)))
    }

    #[getter]
    fn step(&self) -> u64 {
        self.0.step
    }

    #[getter]
    fn num_microbatches(&self) -> u32 {
        self.0.num_microbatches()
    }

    #[getter]
    fn label_tokens(&self) -> u64 {
        self.0.label_tokens
    }

    #[getter]
    fn predicted_makespan_ns(&self) -> u64 {
        self.0.predicted_makespan_ns
    }

    #[getter]
    fn giants(&self) -> Vec<u32> {
        self.0.giants.iter().map(|sample| sample.0).collect()
    }

    #[getter]
    fn was_stopped(&self) -> bool {
        self.0.was_stopped
    }

    fn llm(&self, microbatch: usize, replica: usize) -> PyResult<Vec<u32>> {
        let samples = Self::of(&self.0.llm, microbatch, replica)?;
        Ok(samples.iter().map(|sample| sample.0).collect())
    }

    fn encoder(&self, microbatch: usize, replica: usize) -> PyResult<Vec<Share>> {
        let shares = Self::of(&self.0.encoder, microbatch, replica)?;
        Ok(shares.iter().map(|s| (s.sample.0, s.parts.map(|parts| (parts.first, parts.count)))).collect())
    }

    /// The actions of a rank in this step; none where it follows the pipeline order of the plan.
    fn actions(&self, rank: usize) -> Option<Vec<Action>> {
        self.0.actions.get(rank).map(|list| list.iter().map(Action::from).collect())
    }

    fn digest(&self) -> String {
        self.0.digest()
    }
}

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

/// Row, letter, predicted and measured nanoseconds of one step's actions of a kind; and of what follows them.
type ObservedStep = (Vec<(usize, char, u64, u64)>, u64);

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
        Ok(Self { scheduler, prefetch, correction: Mutex::default() })
    }

    fn submit(&self, step: u64, samples: Vec<u32>, arm: &str) -> PyResult<()> {
        self.prefetch.submit((step, self::arm(arm)?), samples.into_iter().map(SampleIndex).collect());
        Ok(())
    }

    fn take(&self, py: Python<'_>, step: u64, arm: &str) -> PyResult<(Schedule, u64)> {
        let key = (step, self::arm(arm)?);
        let start = Instant::now();
        let schedule = loop {
            let found = py.detach(|| self.prefetch.take_within(key, SIGNALS_EVERY));
            if let Some(schedule) = found.map_err(map(Kind::Schedule))? {
                break schedule;
            }
            py.check_signals()?;
        };
        Ok((Schedule(schedule), u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX)))
    }

    fn predict_makespan_ns(&self, py: Python<'_>, schedule: &Schedule) -> PyResult<u64> {
        py.detach(|| self.scheduler.simulate(&schedule.0))
            .map(|timeline| timeline.makespan_ns)
            .map_err(map(Kind::Plan))
    }

    /// Spans of all ranks, tail of each rank, transfer time.
    fn predicted_spans(&self, py: Python<'_>, schedule: &Schedule) -> PyResult<PredictedSpans> {
        let found = py.detach(|| {
            let timeline = self.scheduler.simulate(&schedule.0)?;
            Ok((timeline, self.scheduler.step_input(&schedule.0)?))
        });
        let (timeline, input) = found.map_err(map::<dflop_step::StepError>(Kind::Plan))?;
        let span = |s: &Span| (s.rank.0, s.action.to_string(), s.start_ns, s.end_ns);
        Ok((timeline.spans.iter().map(span).collect(), input.tail_ns, input.transfer_ns))
    }

    fn predict_corrected_ns(&self, py: Python<'_>, schedule: &Schedule) -> PyResult<u64> {
        let correction = self.correction.lock().unwrap_or_else(PoisonError::into_inner).clone();
        py.detach(|| self.scheduler.simulate_corrected(&schedule.0, &correction))
            .map(|timeline| timeline.makespan_ns)
            .map_err(map(Kind::Plan))
    }

    fn observe(
        &self,
        schedule: &Schedule,
        spans: Vec<(u32, String, u64, u64)>,
        makespan_ns: u64,
    ) -> PyResult<()> {
        let spans = self::spans(spans)?;
        let mut correction = self.correction.lock().unwrap_or_else(PoisonError::into_inner);
        self.scheduler.observe(&mut correction, &schedule.0, &spans, makespan_ns).map_err(map(Kind::Plan))
    }

    fn correction(&self) -> Vec<ObservedStep> {
        let correction = self.correction.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let named = |(row, kind, predicted, measured)| (row, letter(kind), predicted, measured);
        let steps = correction.steps().into_iter();
        steps.map(|(sums, tail_ns)| (sums.into_iter().map(named).collect(), tail_ns)).collect()
    }

    fn correct_by(&self, steps: Vec<ObservedStep>) -> PyResult<()> {
        let mut read = Vec::new();
        for (sums, tail_ns) in steps {
            let sums: PyResult<Vec<_>> =
                sums.into_iter().map(|(row, kind, p, m)| Ok((row, self::kind(kind)?, p, m))).collect();
            read.push((sums?, tail_ns));
        }
        *self.correction.lock().unwrap_or_else(PoisonError::into_inner) = Correction::of_steps(read);
        Ok(())
    }

    fn memory(&self, py: Python<'_>, schedule: &Schedule) -> PyResult<Vec<RankBytes>> {
        let peaks = py.detach(|| self.scheduler.memory(&schedule.0)).map_err(map(Kind::Plan))?;
        Ok(peaks
            .iter()
            .map(|peak| {
                (peak.parts().to_vec(), peak.tensor_bytes(), peak.total_bytes(), peak.moment.to_string())
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
        let spans = self::spans(spans)?;
        let idle =
            self.scheduler.measured(&schedule.0, &spans, makespan_ns).map_err(map(Kind::Plan))?.idle_ns;
        Ok((idle.ramp, idle.imbalance, idle.transfer, idle.data_wait))
    }

    #[pyo3(signature = (schedule, spans, tail_ns = None))]
    fn simulate_measured(
        &self,
        schedule: &Schedule,
        spans: Vec<(u32, String, u64, u64)>,
        tail_ns: Option<u64>,
    ) -> PyResult<u64> {
        let spans = self::spans(spans)?;
        self.scheduler
            .simulate_measured(&schedule.0, &spans, tail_ns)
            .map(|t| t.makespan_ns)
            .map_err(map(Kind::Plan))
    }
}
