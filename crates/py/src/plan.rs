//! Plans, schedules and global batches, as the runtime sees them.

use crate::action::Action;
use crate::error::{Kind, artifact, map, raise};
use crate::value;
use dflop_sim::Opening;
use dflop_types::{Component, Placement, Rank, SampleIndex, StageIndex};
use pyo3::prelude::*;
use std::collections::{HashMap, HashSet};
use std::path::PathBuf;

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
    fn encoder_stages(&self) -> u32 {
        self.0.best.layout.encoder.pp
    }

    #[getter]
    fn llm_stages(&self) -> u32 {
        self.0.best.layout.llm.pp
    }

    #[getter]
    fn num_stages(&self) -> u32 {
        self.0.best.layout.num_stages()
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
    fn expert_parallel_degree(&self) -> u32 {
        self.0.best.layout.expert_parallel_degree
    }

    /// The expert group of a rank; its own number where experts are not dealt out.
    fn expert_group(&self, rank: u32) -> u32 {
        self.0.best.layout.expert_group(Rank(rank)).unwrap_or(rank)
    }

    #[getter]
    fn meets_in_layers(&self) -> bool {
        self.0.best.layout.meets_in_layers()
    }

    #[getter]
    fn encoder_recompute(&self) -> String {
        self.0.best.recompute.encoder.to_string()
    }

    #[getter]
    fn llm_recompute(&self) -> String {
        self.0.best.recompute.llm.to_string()
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

    #[pyo3(signature = (replica, stage, tensor = 0))]
    fn rank(&self, replica: u32, stage: u32, tensor: u32) -> u32 {
        self.0.best.layout.rank(replica, StageIndex(stage)).0 + tensor
    }

    /// The encoder replica of a rank; none where it holds nothing of the encoder.
    fn encoder_replica(&self, rank: u32) -> Option<u32> {
        self.0.best.layout.encoder_replica(Rank(rank))
    }

    #[getter]
    fn encoders_per_group(&self) -> u32 {
        self.0.best.layout.encoders_per_group()
    }

    /// Position of a rank in its tensor group.
    fn tensor(&self, rank: u32) -> u32 {
        self.0.best.layout.coordinates(Rank(rank)).map_or(0, |at| at.tensor)
    }

    /// The tensor group of a rank, by which schedules know it.
    fn group(&self, rank: u32) -> u32 {
        self.0.best.layout.group(Rank(rank)).map_or(rank, |group| group.0)
    }

    #[getter]
    fn encoder_tensor(&self) -> u32 {
        self.0.best.layout.encoder.tp
    }

    #[getter]
    fn llm_tensor(&self) -> u32 {
        self.0.best.layout.llm.tp
    }

    #[getter]
    fn num_groups(&self) -> u32 {
        self.0.best.layout.by_group().num_ranks()
    }

    fn stages(&self, rank: u32) -> Vec<u32> {
        self.0.best.layout.stages(Rank(rank)).map(|stage| stage.0).collect()
    }

    fn encoder_layers(&self, stage: u32, num_layers: u32) -> PyResult<(u32, u32)> {
        self.layers(Component::Encoder, stage, num_layers)
    }

    fn llm_layers(&self, stage: u32, num_layers: u32) -> PyResult<(u32, u32)> {
        self.layers(Component::Llm, stage, num_layers)
    }

    fn actions(&self, rank: u32) -> PyResult<Vec<Action>> {
        self.coordinates(rank)?;
        let best = &self.0.best;
        let group = best.layout.group(Rank(rank)).unwrap_or(Rank(rank));
        let layout = best.layout.by_group();
        let list = dflop_sim::order::of_rank(&layout, best.pipeline_order, group, best.num_microbatches);
        let list = list.unwrap_or_default();
        Ok(list.iter().map(Action::from).collect())
    }

    fn openings(
        &self,
        py: Python<'_>,
        schedule: &Schedule,
        rank: u32,
    ) -> PyResult<Vec<HashMap<u32, (u32, u64)>>> {
        self.coordinates(rank)?;
        let best = &self.0.best;
        let of_actions = py
            .detach(|| dflop_step::openings(&best.layout, best.pipeline_order, &schedule.0, Rank(rank)))
            .map_err(map(Kind::Schedule))?;
        let by_giver =
            |all: Vec<Opening>| all.iter().map(|o| (o.giver.0, (o.num_before, o.start_ns))).collect();
        Ok(of_actions.into_iter().map(by_giver).collect())
    }
}

impl Plan {
    /// The first layer of a stage of the whole step among those of its component, and how many it has.
    fn layers(&self, component: Component, stage: u32, num_layers: u32) -> PyResult<(u32, u32)> {
        self.0
            .best
            .layout
            .layers_of_stage(component, StageIndex(stage), num_layers)
            .map_err(|message| raise(Kind::Plan, &message, None))
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

    #[staticmethod]
    fn from_record(record: &Bound<'_, PyAny>) -> PyResult<Self> {
        serde_json::from_value(value::from_python("a schedule", record)?)
            .map(Self)
            .map_err(|error| raise(Kind::Schedule, &format!("not a schedule: {error}"), None))
    }

    fn record<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        value::to_python(py, serde_json::to_value(&self.0))
    }

    /// `instead` names what takes the place of a sample, or `None`; `encoded` what of that has media.
    fn replaced(&self, instead: HashMap<u32, Option<u32>>, encoded: HashSet<u32>, label_tokens: u64) -> Self {
        let instead =
            instead.into_iter().map(|(old, new)| (SampleIndex(old), new.map(SampleIndex))).collect();
        let has_media = |sample: SampleIndex| encoded.contains(&sample.0);
        Self(self.0.replaced(&instead, has_media, label_tokens))
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

    /// What a replica of a colocated layout recomputes in a microbatch: of the encoder, and of the LLM backbone.
    fn recompute(&self, microbatch: usize, replica: usize) -> Option<(String, String)> {
        let found = self.0.recompute.get(microbatch)?.get(replica)?;
        Some((found.encoder.to_string(), found.llm.to_string()))
    }

    /// The actions of a tensor group in this step; none where it follows the pipeline order of the plan.
    fn actions(&self, group: usize) -> Option<Vec<Action>> {
        self.0.actions.get(group).map(|list| list.iter().map(Action::from).collect())
    }

    fn digest(&self) -> String {
        self.0.digest()
    }
}
