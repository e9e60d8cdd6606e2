//! Predictions for placed samples: the durations of every action of every rank.

use crate::colocated::predict as colocated;
use crate::judge::work::{Column, encoder_work, feeds, holders, pack};
use crate::place::sides::{EncoderSide, Side};
use crate::scheduler::StepScheduler;
use crate::settings::StepSettings;
use dflop_cost::{
    Basis, ColocatedSharding, Prediction, Sharding, StageLayers, Transfer, microbatches_in_flight,
};
use dflop_sim::{StepInput, order};
use dflop_types::{ActionKind, Component, EncoderShare, PipelineOrder, SampleIndex, StageIndex};

/// How much of a predicted step was measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Coverage {
    /// Number of predictions: one for each microbatch and rank whose work is not empty.
    pub num_predictions: u64,
    /// Predictions for sizes outside the measured range.
    pub num_extrapolated: u64,
    /// Predictions with transfers that nobody measured.
    pub num_assumed: u64,
    /// Whether the time of the gradient reduction comes from measurements with as many ranks and bytes. True if nothing is
    /// reduced.
    pub is_reduction_measured: bool,
}

/// Durations of a step, and how much of them was measured.
#[derive(Debug, Clone)]
pub(crate) struct Predicted {
    pub(crate) input: StepInput,
    pub(crate) coverage: Coverage,
}

/// The most microbatches in flight on the rank whose first stage is `stage`. If the rank holds several chunks, chunks in
/// flight are converted to microbatches, rounded up.
pub(crate) fn in_flight(settings: &StepSettings, stage: u32) -> u32 {
    let layout = settings.layout;
    if layout.is_interleaved() {
        let rank = layout.rank(0, StageIndex(stage));
        let list = order::of_rank(&layout, settings.pipeline_order, rank, settings.num_microbatches);
        let (mut held, mut peak) = (0_u32, 0);
        for action in list.unwrap_or_default() {
            held = if action.kind == ActionKind::F { held + 1 } else { held - 1 };
            peak = peak.max(held);
        }
        return peak.div_ceil(layout.stages(rank).count().max(1) as u32);
    }
    microbatches_in_flight(
        settings.pipeline_order,
        StageIndex(stage),
        settings.layout.num_stages(),
        settings.num_microbatches,
    )
}

/// The predictions of one microbatch on all ranks, from the samples of each replica. They are corrected by measured steps,
/// if there are any. Degrees and samples have been checked.
pub(crate) fn column(
    scheduler: &StepScheduler,
    llm: &[Vec<SampleIndex>],
    encoder: &[Vec<EncoderShare>],
) -> Column {
    let mut column = column_of_profile(scheduler, llm, encoder);
    if let Some(adjusted) = &scheduler.adjusted {
        adjusted.apply(&scheduler.settings.layout, &scheduler.shapes, llm, encoder, &mut column.predictions);
    }
    column
}

/// The same predictions from the model profile alone, without corrections.
fn column_of_profile(
    scheduler: &StepScheduler,
    llm: &[Vec<SampleIndex>],
    encoder: &[Vec<EncoderShare>],
) -> Column {
    let model = &scheduler.model;
    let layout = scheduler.settings.layout;
    if layout.is_colocated() {
        return colocated::column(scheduler, llm, encoder);
    }
    let feeds = feeds(&holders(llm), encoder, layout.encoder.dp);
    let mut column = Column {
        predictions: vec![Prediction::default(); layout.num_rows() as usize],
        num_messages: feeds.iter().map(Vec::len).sum::<usize>() as u64,
        feeds,
        ..Column::default()
    };
    for (replica, shares) in (0..).zip(encoder).filter(|(_, shares)| !shares.is_empty()) {
        let work = encoder_work(scheduler, shares);
        for (stage, &layers) in (0..).zip(&scheduler.encoder_stages) {
            column.predictions[layout.row(replica, StageIndex(stage))] =
                model.encoder_stage(&work.shape, layers);
            column.num_predictions += 1;
            if !layers.is_last {
                column.num_messages += 1;
                column.sent_tokens += model.as_hidden_tokens(work.shape.encoder_tokens());
            }
        }
        column.sent_tokens += model.features_as_hidden_tokens(work.feature_tokens);
    }
    for (replica, samples) in (0..).zip(llm).filter(|(_, samples)| !samples.is_empty()) {
        let shape = pack(scheduler, samples);
        // Stages with equal layers take equally long. Most stages are equal to the one before, so its prediction is reused.
        let mut last: Option<(StageLayers, Prediction)> = None;
        for (stage, &layers) in (layout.encoder.pp..).zip(&scheduler.stages) {
            let row = layout.row(replica, StageIndex(stage));
            let prediction = match last {
                Some((equal, prediction)) if equal == layers => prediction,
                _ => model.llm_stage(&shape, layers.num_layers, layers.is_first, layers.is_last),
            };
            last = Some((layers, prediction));
            column.predictions[row] = prediction;
            column.num_predictions += 1;
            if !layers.is_last {
                column.num_messages += 1;
                column.sent_tokens += model.llm_rows(shape.total_llm_tokens());
            }
        }
    }
    column
}

/// The tail of each rank in nanoseconds (reduction and optimizer after its last action), and whether all tails come from
/// measurements.
fn tails(scheduler: &StepScheduler) -> (Vec<u64>, bool) {
    let (model, layout) = (&scheduler.model, scheduler.settings.layout);
    // Which ranks share a node depends on the tensor groups, so this is the layout with them.
    let asked = scheduler.settings().layout;
    let is_measured = |tail: Transfer| tail.basis == Basis::Measured;
    if layout.is_colocated() {
        let tail = model.colocated_tail(ColocatedSharding::of(&asked));
        return (vec![tail.ns; layout.num_ranks() as usize], is_measured(tail));
    }
    let of_encoder = Sharding::of(&asked, Component::Encoder);
    let of_llm = Sharding::of(&asked, Component::Llm);
    let encoder = scheduler.encoder_stages.iter();
    let encoder =
        encoder.map(|&stage| (model.sharded_encoder_stage_tail(stage, of_encoder), layout.encoder.dp));
    let llm = scheduler.rank_layers().into_iter();
    let llm = llm.map(|held| (model.sharded_stage_tail(held, of_llm), layout.llm.dp));
    let mut is_all_measured = true;
    let mut tail_ns = vec![0; layout.num_ranks() as usize];
    // The index is the first stage of each rank.
    for (stage, (tail, replicas)) in (0..).zip(encoder.chain(llm)) {
        is_all_measured &= is_measured(tail);
        for replica in 0..replicas {
            tail_ns[layout.rank(replica, StageIndex(stage)).index()] = tail.ns;
        }
    }
    (tail_ns, is_all_measured)
}

/// The one transfer time that the simulator takes for the whole step, in nanoseconds: the mean over its borders of a message of
/// mean size.
pub(crate) fn transfer_ns(scheduler: &StepScheduler, columns: &[Column]) -> u64 {
    let sum = |of: fn(&Column) -> u64| columns.iter().map(of).sum::<u64>();
    // Which ranks share a node depends on the tensor groups, so this is the layout with them.
    let across_nodes = scheduler.model.ratio_across_nodes(&scheduler.settings().layout);
    let mean_tokens = sum(|c| c.sent_tokens).div_ceil(sum(|c| c.num_messages).max(1));
    scheduler.model.transfer_ns(mean_tokens, across_nodes)
}

/// The durations of a step from the predictions of its microbatches.
pub(crate) fn assemble(scheduler: &StepScheduler, columns: &[Column], order: PipelineOrder) -> Predicted {
    let (settings, model) = (&scheduler.settings, &scheduler.model);
    let layout = settings.layout;
    let (tail_ns, is_reduction_measured) = tails(scheduler);
    let by_row = |of: fn(&Prediction) -> u64| -> Vec<Vec<u64>> {
        let rows = 0..layout.num_rows() as usize;
        rows.map(|row| columns.iter().map(|c| of(&c.predictions[row])).collect()).collect()
    };
    let count =
        |of: fn(&&Prediction) -> bool| columns.iter().flat_map(|c| &c.predictions).filter(of).count() as u64;
    Predicted {
        coverage: Coverage {
            num_predictions: columns.iter().map(|c| c.num_predictions).sum(),
            num_extrapolated: count(|p| p.extrapolated),
            num_assumed: count(|p| p.assumed),
            is_reduction_measured,
        },
        input: StepInput {
            layout,
            order,
            num_microbatches: settings.num_microbatches,
            forward_ns: by_row(|p| p.forward_ns),
            backward_ns: by_row(|p| p.backward_ns),
            input_ns: if model.has_split() { by_row(|p| p.input_ns) } else { Vec::new() },
            weight_ns: if model.has_split() { by_row(|p| p.weight_ns) } else { Vec::new() },
            feeds: columns.iter().map(|c| c.feeds.clone()).collect(),
            transfer_ns: transfer_ns(scheduler, columns),
            tail_ns,
            ready_ns: Vec::new(),
        },
    }
}

/// The predictions of each microbatch. Degrees and samples have been checked.
pub(crate) fn columns(scheduler: &StepScheduler, llm: &Side, encoder: &EncoderSide) -> Vec<Column> {
    llm.iter().zip(encoder).map(|(llm, encoder)| column(scheduler, llm, encoder)).collect()
}

/// The durations of every action. Degrees and samples have been checked.
pub(crate) fn predict(
    scheduler: &StepScheduler,
    llm: &Side,
    encoder: &EncoderSide,
    order: PipelineOrder,
) -> Predicted {
    assemble(scheduler, &columns(scheduler, llm, encoder), order)
}
