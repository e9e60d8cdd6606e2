//! What samples of each size took in a run, and what its ranks hold: for `dflop report`.

use crate::Failure;
use crate::measured::{self, Line, StepSchedule, StepTrace};
use dflop_report::{RankBytes, ShapeError};
use dflop_step::{ShapeTimes, StepScheduler};
use dflop_types::{Component, DataProfile, Rank};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::Path;

/// Steps that are looked at, the last ones.
const STEPS_MAX: usize = 1_024;

/// A measured step and what it ran.
type Step<'a> = (&'a StepTrace, &'a StepSchedule);

/// Error by component and shape bin, over the last ones of `steps`, those of the scheduler's plan.
pub(super) fn shapes(
    steps: &[Step<'_>],
    scheduler: &StepScheduler,
    data: &DataProfile,
) -> Result<Vec<ShapeError>, Failure> {
    let mut times = ShapeTimes::new(scheduler);
    let layout = &scheduler.settings().layout;
    for (trace, line) in &steps[steps.len().saturating_sub(STEPS_MAX)..] {
        scheduler.add_shape_times(&mut times, &line.schedule, &trace.spans(layout), trace.makespan_ns)?;
    }
    let rows = times.rows().into_iter().map(|row| {
        let tokens = |at: usize| {
            let shape = &data.samples[at].shape;
            if row.is_encoder { shape.encoder_tokens() } else { u64::from(shape.llm_tokens) }
        };
        let is_its = |at: &usize| (row.tokens_min..=row.tokens_max).contains(&tokens(*at)) && tokens(*at) > 0;
        let its = || (0..data.samples.len()).filter(is_its);
        let segments =
            its().map(|at| data.samples[at].shape.encoder_segments.iter().map(|s| u64::from(s.count)).sum());
        let segments: Vec<u64> = segments.collect();
        ShapeError {
            is_encoder: row.is_encoder,
            // Of the sizes that occur: the first and the last bin have no ends of their own.
            tokens_min: its().map(tokens).min().unwrap_or(row.tokens_min),
            tokens_max: its().map(tokens).max().unwrap_or(row.tokens_max),
            segments: (
                segments.iter().copied().min().unwrap_or(0),
                segments.iter().copied().max().unwrap_or(0),
            ),
            num_samples: row.num_samples,
            num_tokens: row.num_tokens,
            num_actions: row.num_actions,
            predicted_ms: row.predicted_ns / 1e6,
            measured_ms: row.measured_ns / 1e6,
            excess: row.excess.excess,
            excess_error: row.excess.error,
        }
    });
    Ok(rows.collect())
}

/// One line of `memory.jsonl`.
#[derive(Debug, Clone, Deserialize)]
struct StepMemory {
    step: u64,
    arm: String,
    ranks: Vec<RankMemoryLine>,
}

#[derive(Debug, Clone, Deserialize)]
struct RankMemoryLine {
    rank: u32,
    measured: MeasuredBytes,
}

#[derive(Debug, Clone, Deserialize)]
struct MeasuredBytes {
    tensor_bytes: u64,
}

impl Line for StepMemory {
    fn problem(&self) -> Option<String> {
        None
    }
}

/// Memory of the fullest rank of each kind in the step of the run in `dir` that was measured, or in the last of `steps`; `cut`
/// as for [`measured::read_journal`].
pub(super) fn memory(
    dir: &Path,
    steps: &[Step<'_>],
    scheduler: &StepScheduler,
    cut: &mut Vec<String>,
) -> Result<Vec<RankBytes>, Failure> {
    let measured: Vec<StepMemory> =
        measured::read_journal(&dir.join("memory.jsonl"), cut)?.unwrap_or_default();
    // Of a step that was measured; else of the last one.
    let of_memory = measured.iter().rev().find_map(|memory| {
        let is_its = |(trace, _): &&Step<'_>| trace.step == memory.step && trace.arm == memory.arm;
        Some((Some(memory), *steps.iter().find(is_its)?))
    });
    let Some((memory, (_, line))) = of_memory.or_else(|| Some((None, *steps.last()?))) else {
        return Ok(Vec::new());
    };
    let layout = scheduler.settings().layout;
    let mut fullest: BTreeMap<(u32, String), RankBytes> = BTreeMap::new();
    for (group, predicted) in scheduler.memory(&line.schedule)?.into_iter().enumerate() {
        let Some(rank) = layout.ranks_of_group(Rank(group as u32)).next() else { continue };
        let Some(at) = layout.coordinates(rank) else { continue };
        let name = match at.component {
            Component::Encoder if layout.encoder.pp > 1 => format!("encoder stage {}", at.stage.0),
            Component::Encoder => "encoder".to_owned(),
            Component::Llm if layout.is_interleaved() => {
                let chunks: Vec<String> = layout.stages(rank).map(|stage| stage.0.to_string()).collect();
                format!("LLM stages {}", chunks.join(", "))
            }
            Component::Llm if layout.llm.pp > 1 => format!("LLM stage {}", at.stage.0),
            Component::Llm => "LLM".to_owned(),
            Component::Both => "all ranks".to_owned(),
        };
        let of_rank = memory.and_then(|memory| memory.ranks.iter().find(|line| line.rank == rank.0));
        let bytes = RankBytes {
            name: name.clone(),
            rank: rank.0,
            parts: predicted.by_use().into_iter().map(|(name, bytes)| (name.to_owned(), bytes)).collect(),
            predicted_tensor_bytes: predicted.tensor_bytes(),
            predicted_bytes: predicted.total_bytes(),
            moment: predicted.moment.to_string(),
            measured_tensor_bytes: of_rank.map(|line| line.measured.tensor_bytes),
        };
        let key = (at.stage.0, name);
        let known = fullest.entry(key).or_insert_with(|| bytes.clone());
        if bytes.predicted_bytes > known.predicted_bytes {
            *known = bytes;
        }
    }
    Ok(fullest.into_values().collect())
}
