//! Predictions for placed samples: the durations of every action of every rank, and the memory of every rank.

use crate::settings::StepSettings;
use crate::step::StepScheduler;
use dflop_cost::{
    Basis, Prediction, RankMemory, RankMicrobatch, RankPart, RankSteps, microbatches_in_flight,
};
use dflop_sim::{StepInput, order};
use dflop_types::{Action, Component, MicrobatchShape, SampleIndex, SampleShape, StageIndex};

/// Samples of `[microbatch][replica]`.
pub(crate) type Side = Vec<Vec<Vec<SampleIndex>>>;

/// Samples in their places on both sides of the boundary.
#[derive(Debug, Clone, Default)]
pub(crate) struct Placement {
    pub(crate) llm: Side,
    pub(crate) encoder: Side,
}

/// How much of a predicted step was measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Coverage {
    /// Predictions for work that is not empty: one for each microbatch and rank.
    pub num_predictions: u64,
    /// Those outside the measured range.
    pub num_extrapolated: u64,
    /// Those with transfers that nobody measured.
    pub num_assumed: u64,
    /// Whether the reduction of the gradients stands on measurements of as many ranks and bytes; true where nothing is
    /// reduced.
    pub is_reduction_measured: bool,
}

/// Durations of a step, and how much of them was measured.
#[derive(Debug, Clone)]
pub(crate) struct Predicted {
    pub(crate) input: StepInput,
    pub(crate) coverage: Coverage,
}

/// One microbatch on all ranks.
#[derive(Debug, Clone, Default)]
pub(crate) struct Column {
    /// By rank.
    predictions: Vec<Prediction>,
    /// Encoder replica to LLM replica.
    feeds: Vec<Vec<bool>>,
    num_predictions: u64,
    num_messages: u64,
    sent_tokens: u64,
}

/// Microbatches in flight on `stage` at its peak.
pub(crate) fn in_flight(settings: &StepSettings, stage: u32) -> u32 {
    microbatches_in_flight(
        settings.pipeline_order,
        StageIndex(stage),
        settings.layout.num_stages(),
        settings.num_microbatches,
    )
}

/// One microbatch on all ranks, from the samples of each replica. Degrees and samples have been checked.
pub(crate) fn column(
    scheduler: &StepScheduler,
    llm: &[Vec<SampleIndex>],
    encoder: &[Vec<SampleIndex>],
) -> Column {
    let model = &scheduler.model;
    let layout = scheduler.settings.layout;
    let feeds = feeds(llm, encoder);
    let mut column = Column {
        predictions: vec![Prediction::default(); layout.num_ranks() as usize],
        num_messages: feeds.iter().flatten().filter(|&&feeds| feeds).count() as u64,
        feeds,
        ..Column::default()
    };
    for (replica, samples) in encoder.iter().enumerate().filter(|(_, samples)| !samples.is_empty()) {
        column.predictions[replica] = model.encoder(&pack(scheduler, samples));
        column.num_predictions += 1;
        column.sent_tokens += features(scheduler, samples);
    }
    for (replica, samples) in (0..).zip(llm).filter(|(_, samples)| !samples.is_empty()) {
        let shape = pack(scheduler, samples);
        for (stage, layers) in (1..).zip(&scheduler.stages) {
            let rank = layout.rank(replica, StageIndex(stage)).index();
            column.predictions[rank] =
                model.llm_stage(&shape, layers.num_layers, layers.is_first, layers.is_last);
            column.num_predictions += 1;
            if !layers.is_last {
                column.num_messages += 1;
                column.sent_tokens += shape.total_llm_tokens();
            }
        }
    }
    column
}

/// The durations of a step of these microbatches.
pub(crate) fn assemble(scheduler: &StepScheduler, columns: &[Column]) -> Predicted {
    let (settings, model) = (&scheduler.settings, &scheduler.model);
    let layout = settings.layout;
    let encoder_tail = model.encoder_tail(layout.encoder.dp);
    let mut is_reduction_measured = encoder_tail.basis == Basis::Measured;
    let mut tail_ns = vec![encoder_tail.ns; layout.num_ranks() as usize];
    for (stage, layers) in (1..).zip(&scheduler.stages) {
        let tail = model.stage_tail(*layers, layout.llm.dp);
        is_reduction_measured &= tail.basis == Basis::Measured;
        for replica in 0..layout.llm.dp {
            tail_ns[layout.rank(replica, StageIndex(stage)).index()] = tail.ns;
        }
    }
    let by_rank = |of: fn(&Prediction) -> u64| -> Vec<Vec<u64>> {
        (0..tail_ns.len()).map(|rank| columns.iter().map(|c| of(&c.predictions[rank])).collect()).collect()
    };
    let sum = |of: fn(&Column) -> u64| columns.iter().map(of).sum::<u64>();
    // The simulator takes one transfer time for the step: that of the mean message.
    let mean_tokens = sum(|c| c.sent_tokens).div_ceil(sum(|c| c.num_messages).max(1));
    let count =
        |of: fn(&&Prediction) -> bool| columns.iter().flat_map(|c| &c.predictions).filter(of).count() as u64;
    Predicted {
        coverage: Coverage {
            num_predictions: sum(|c| c.num_predictions),
            num_extrapolated: count(|p| p.extrapolated),
            num_assumed: count(|p| p.assumed),
            is_reduction_measured,
        },
        input: StepInput {
            layout,
            order: settings.pipeline_order,
            num_microbatches: settings.num_microbatches,
            forward_ns: by_rank(|p| p.forward_ns),
            backward_ns: by_rank(|p| p.backward_ns),
            feeds: columns.iter().map(|c| c.feeds.clone()).collect(),
            transfer_ns: model.transfer_ns(mean_tokens),
            tail_ns,
        },
    }
}

/// The durations of every action. Degrees and samples have been checked.
pub(crate) fn predict(scheduler: &StepScheduler, llm: &Side, encoder: &Side) -> Predicted {
    let columns: Vec<Column> =
        llm.iter().zip(encoder).map(|(llm, encoder)| column(scheduler, llm, encoder)).collect();
    assemble(scheduler, &columns)
}

/// Predicted peak of every rank. Degrees and samples have been checked.
pub(crate) fn memory(scheduler: &StepScheduler, llm: &Side, encoder: &Side) -> Vec<RankMemory> {
    let settings = &scheduler.settings;
    let layout = settings.layout;
    let of_replica = |side: &Side, replica: usize| -> Vec<RankMicrobatch> {
        side.iter()
            .map(|column| RankMicrobatch {
                shape: pack(scheduler, &column[replica]),
                feature_tokens: features(scheduler, &column[replica]),
            })
            .collect()
    };
    let parts = parts(scheduler);
    let lists: Vec<Vec<Action>> = (0..layout.num_stages())
        .map(|stage| {
            let num_stages = layout.num_stages();
            order::actions(settings.pipeline_order, StageIndex(stage), num_stages, settings.num_microbatches)
        })
        .collect();
    let peak = |stage: usize, microbatches: &[RankMicrobatch]| {
        rank_peak(scheduler, stage, parts[stage], microbatches, &lists[stage])
    };
    let mut peaks: Vec<RankMemory> =
        (0..layout.encoder.dp as usize).map(|replica| peak(0, &of_replica(encoder, replica))).collect();
    for replica in 0..layout.llm.dp as usize {
        let microbatches = of_replica(llm, replica);
        peaks.extend((1..parts.len()).map(|stage| peak(stage, &microbatches)));
    }
    peaks
}

/// What the ranks of each stage hold, the encoder's first.
pub(crate) fn parts(scheduler: &StepScheduler) -> Vec<RankPart> {
    let stages = scheduler.stages.iter().map(|&layers| RankPart::Stage(layers));
    std::iter::once(RankPart::Encoder).chain(stages).collect()
}

fn rank_peak(
    scheduler: &StepScheduler,
    stage: usize,
    part: RankPart,
    microbatches: &[RankMicrobatch],
    actions: &[Action],
) -> RankMemory {
    let layout = scheduler.settings.layout;
    // Between two stages of a replica all rows pass as they are.
    let copies_rows = stage < 2 && layout.encoder.dp.max(layout.llm.dp) > 1;
    let steps = RankSteps { part, microbatches, actions, copies_rows, sharding_degree: 1 };
    // The lists are our own, and name each microbatch of the step once in its turn.
    scheduler.model.rank_peak(&steps).unwrap_or_else(|error| unreachable!("{error}"))
}

/// The component of the fullest rank when one sample is all there is, and what that rank needs, in bytes: the
/// least that any schedule with this sample needs.
pub(crate) fn alone(scheduler: &StepScheduler, sample: &SampleShape) -> (Component, u64) {
    let microbatch = [RankMicrobatch {
        shape: MicrobatchShape::pack([sample]),
        feature_tokens: u64::from(sample.feature_tokens),
    }];
    let need = |stage: usize, part: RankPart| {
        let list = order::actions(scheduler.settings.pipeline_order, StageIndex(0), 1, 1);
        rank_peak(scheduler, stage, part, &microbatch, &list).total_bytes()
    };
    let mut needs = parts(scheduler).into_iter().enumerate().map(|(stage, part)| need(stage, part));
    let encoder = needs.next().unwrap_or(0);
    match needs.max() {
        Some(llm) if llm > encoder => (Component::Llm, llm),
        _ => (Component::Encoder, encoder),
    }
}

fn pack(scheduler: &StepScheduler, samples: &[SampleIndex]) -> MicrobatchShape {
    MicrobatchShape::pack(samples.iter().map(|&sample| scheduler.shape(sample)))
}

fn features(scheduler: &StepScheduler, samples: &[SampleIndex]) -> u64 {
    samples.iter().map(|&sample| u64::from(scheduler.shape(sample).feature_tokens)).sum()
}

/// Who holds samples of whom, in one microbatch: `[encoder replica][llm replica]`.
fn feeds(llm: &[Vec<SampleIndex>], encoder: &[Vec<SampleIndex>]) -> Vec<Vec<bool>> {
    let mut holders: Vec<(SampleIndex, usize)> = llm
        .iter()
        .enumerate()
        .flat_map(|(replica, samples)| samples.iter().map(move |&sample| (sample, replica)))
        .collect();
    holders.sort_unstable();
    encoder
        .iter()
        .map(|samples| {
            let mut row = vec![false; llm.len()];
            for &sample in samples {
                let at = holders.partition_point(|&(held, _)| held < sample);
                if let Some(&(_, replica)) = holders.get(at).filter(|&&(held, _)| held == sample) {
                    row[replica] = true;
                }
            }
            row
        })
        .collect()
}
