//! Predictions for placed samples: the durations of every action of every rank, and the memory of every rank.

use crate::scheduler::StepScheduler;
use crate::settings::StepSettings;
use dflop_cost::{
    Basis, Prediction, RankMemory, RankMicrobatch, RankPart, RankSteps, Sharding, StageLayers, Transfer,
    microbatches_in_flight,
};
use dflop_sim::{StepInput, order};
use dflop_types::{
    Action, ActionKind, Component, EncoderShare, MicrobatchShape, PartRange, PipelineOrder, Rank,
    SampleIndex, SampleShape, Schedule, StageIndex,
};
use std::borrow::Cow;

/// Samples of `[microbatch][replica]`.
pub(crate) type Side = Vec<Vec<Vec<SampleIndex>>>;

/// Shares of samples of `[microbatch][encoder replica]`.
pub(crate) type EncoderSide = Vec<Vec<Vec<EncoderShare>>>;

/// Samples in their places on both sides of the boundary.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Placement {
    pub(crate) llm: Side,
    pub(crate) encoder: EncoderSide,
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
    /// By row: a rank, or the encoder's and then the LLM's part of all colocated ranks.
    pub(crate) predictions: Vec<Prediction>,
    /// Encoder replica to LLM replica.
    pub(crate) feeds: Vec<Vec<bool>>,
    pub(crate) num_predictions: u64,
    pub(crate) num_messages: u64,
    pub(crate) sent_tokens: u64,
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

/// One microbatch on all ranks, from the samples of each replica, as measured steps have corrected it. Degrees and samples
/// have been checked.
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

/// The same as the model profile has it.
fn column_of_profile(
    scheduler: &StepScheduler,
    llm: &[Vec<SampleIndex>],
    encoder: &[Vec<EncoderShare>],
) -> Column {
    let model = &scheduler.model;
    let layout = scheduler.settings.layout;
    if layout.is_colocated() {
        return crate::colocated::predict::column(scheduler, llm, encoder);
    }
    let feeds = feeds(llm, encoder);
    let mut column = Column {
        predictions: vec![Prediction::default(); layout.num_rows() as usize],
        num_messages: feeds.iter().flatten().filter(|&&feeds| feeds).count() as u64,
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
        column.sent_tokens += work.feature_tokens;
    }
    for (replica, samples) in (0..).zip(llm).filter(|(_, samples)| !samples.is_empty()) {
        let shape = pack(scheduler, samples);
        // Stages of equal layers take equally long: most are.
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
                column.sent_tokens += shape.total_llm_tokens();
            }
        }
    }
    column
}

/// What comes after the last action, by rank, in nanoseconds, and whether all of it was measured.
fn tails(scheduler: &StepScheduler) -> (Vec<u64>, bool) {
    let (model, layout) = (&scheduler.model, scheduler.settings.layout);
    // Where ranks stand on the nodes is told by tensor groups too.
    let asked = scheduler.settings().layout;
    let is_measured = |tail: Transfer| tail.basis == Basis::Measured;
    if layout.is_colocated() {
        let tail = model.colocated_tail(Sharding::of(&asked, Component::Both));
        return (vec![tail.ns; layout.num_ranks() as usize], is_measured(tail));
    }
    let of_encoder = Sharding::of(&asked, Component::Encoder);
    let of_llm = Sharding::of(&asked, Component::Llm);
    let encoder = scheduler.encoder_stages.iter();
    let encoder =
        encoder.map(|&stage| (model.sharded_encoder_stage_tail(stage, of_encoder), layout.encoder.dp));
    let llm = scheduler.stages.iter();
    let llm = llm.map(|&stage| (model.sharded_stage_tail(stage, of_llm), layout.llm.dp));
    let mut is_all_measured = true;
    let mut tail_ns = vec![0; layout.num_ranks() as usize];
    for (stage, (tail, replicas)) in (0..).zip(encoder.chain(llm)) {
        is_all_measured &= is_measured(tail);
        for replica in 0..replicas {
            tail_ns[layout.rank(replica, StageIndex(stage)).index()] = tail.ns;
        }
    }
    (tail_ns, is_all_measured)
}

/// The durations of a step of these microbatches.
pub(crate) fn assemble(scheduler: &StepScheduler, columns: &[Column], order: PipelineOrder) -> Predicted {
    let (settings, model) = (&scheduler.settings, &scheduler.model);
    let layout = settings.layout;
    let (tail_ns, is_reduction_measured) = tails(scheduler);
    let by_row = |of: fn(&Prediction) -> u64| -> Vec<Vec<u64>> {
        let rows = 0..layout.num_rows() as usize;
        rows.map(|row| columns.iter().map(|c| of(&c.predictions[row])).collect()).collect()
    };
    let sum = |of: fn(&Column) -> u64| columns.iter().map(of).sum::<u64>();
    // The simulator takes one transfer time for the whole step: the time of a message of mean size.
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
            order,
            num_microbatches: settings.num_microbatches,
            forward_ns: by_row(|p| p.forward_ns),
            backward_ns: by_row(|p| p.backward_ns),
            input_ns: if model.has_split() { by_row(|p| p.input_ns) } else { Vec::new() },
            weight_ns: if model.has_split() { by_row(|p| p.weight_ns) } else { Vec::new() },
            feeds: columns.iter().map(|c| c.feeds.clone()).collect(),
            transfer_ns: model.transfer_ns(mean_tokens),
            tail_ns,
            ready_ns: Vec::new(),
        },
    }
}

/// The durations of every action. Degrees and samples have been checked.
pub(crate) fn predict(
    scheduler: &StepScheduler,
    llm: &Side,
    encoder: &EncoderSide,
    order: PipelineOrder,
) -> Predicted {
    let columns: Vec<Column> =
        llm.iter().zip(encoder).map(|(llm, encoder)| column(scheduler, llm, encoder)).collect();
    assemble(scheduler, &columns, order)
}

/// What each rank computes, microbatch by microbatch, with its stage and the part of the model it holds.
struct RankWork {
    rank: Rank,
    stage: usize,
    part: RankPart,
    microbatches: Vec<RankMicrobatch>,
}

/// The work of every rank, in their order. Degrees and samples have been checked.
fn ranks(scheduler: &StepScheduler, schedule: &Schedule) -> Vec<RankWork> {
    let layout = scheduler.settings.layout;
    let parts = parts(scheduler);
    let mut ranks = Vec::with_capacity(layout.num_ranks() as usize);
    let num_encoder_stages = layout.encoder.pp as usize;
    for replica in 0..layout.encoder.dp {
        let work = schedule.encoder.iter().map(|column| encoder_work(scheduler, &column[replica as usize]));
        let microbatches: Vec<RankMicrobatch> = work.collect();
        for (stage, &part) in parts[..num_encoder_stages].iter().enumerate() {
            let rank = layout.rank(replica, StageIndex(stage as u32));
            ranks.push(RankWork { rank, stage, part, microbatches: microbatches.clone() });
        }
    }
    for replica in 0..layout.llm.dp {
        let work = schedule.llm.iter().map(|column| RankMicrobatch {
            shape: pack(scheduler, &column[replica as usize]),
            feature_tokens: features(scheduler, &column[replica as usize]),
        });
        let microbatches: Vec<RankMicrobatch> = work.collect();
        for (stage, &part) in parts.iter().enumerate().skip(num_encoder_stages) {
            let rank = layout.rank(replica, StageIndex(stage as u32));
            ranks.push(RankWork { rank, stage, part, microbatches: microbatches.clone() });
        }
    }
    ranks.sort_by_key(|work| work.rank);
    ranks
}

/// Predicted peak of every rank. Degrees, samples and action lists have been checked.
pub(crate) fn memory(scheduler: &StepScheduler, schedule: &Schedule) -> Vec<RankMemory> {
    let settings = &scheduler.settings;
    if settings.layout.is_colocated() {
        return crate::colocated::memory::peaks(scheduler, &schedule.llm, &schedule.encoder);
    }
    let (p, m) = (settings.layout.num_stages(), settings.num_microbatches);
    let by_stage: Vec<Vec<Action>> =
        (0..p).map(|stage| order::actions(settings.pipeline_order, StageIndex(stage), p, m)).collect();
    let peak = |work: RankWork| {
        let list = schedule.actions.get(work.rank.index()).unwrap_or(&by_stage[work.stage]);
        rank_peak(scheduler, work.stage, work.part, &work.microbatches, list)
    };
    ranks(scheduler, schedule).into_iter().map(peak).collect()
}

/// Bytes that each microbatch takes on `[rank][microbatch]` if it is the only one in flight, beside what the rank
/// holds in any case; and the latter, by rank. Degrees and samples have been checked.
pub(crate) fn alone_bytes(
    scheduler: &StepScheduler,
    schedule: &Schedule,
    is_split: bool,
) -> (Vec<Vec<u64>>, Vec<u64>) {
    let kinds: &[ActionKind] = if is_split {
        &[ActionKind::F, ActionKind::I, ActionKind::W]
    } else {
        &[ActionKind::F, ActionKind::B]
    };
    let list: Vec<Action> =
        kinds.iter().map(|&kind| Action { stage: StageIndex(0), kind, microbatch: 0 }).collect();
    let of = |work: RankWork| {
        let sharding = sharding(scheduler, work.part);
        let fixed_bytes = scheduler.model.sharded_memory(work.part, sharding).total_bytes();
        let alone = |microbatch: &RankMicrobatch| {
            let one = std::slice::from_ref(microbatch);
            let peak = rank_peak(scheduler, work.stage, work.part, one, &list);
            peak.total_bytes().saturating_sub(fixed_bytes)
        };
        (work.microbatches.iter().map(alone).collect::<Vec<u64>>(), fixed_bytes)
    };
    ranks(scheduler, schedule).into_iter().map(of).unzip()
}

/// What the ranks of each stage hold, the encoder's first.
pub(crate) fn parts(scheduler: &StepScheduler) -> Vec<RankPart> {
    let stages = scheduler.stages.iter().map(|&layers| RankPart::Stage(layers));
    let encoder: Vec<RankPart> = match scheduler.encoder_stages[..] {
        [_] => vec![RankPart::Encoder],
        ref several => several.iter().map(|&layers| RankPart::EncoderStage(layers)).collect(),
    };
    encoder.into_iter().chain(stages).collect()
}

/// How the replicas of a part's component share what they hold.
pub(crate) fn sharding(scheduler: &StepScheduler, part: RankPart) -> Sharding {
    let component = if part.is_encoder() { Component::Encoder } else { Component::Llm };
    Sharding::of(&scheduler.settings().layout, component)
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
    let boundary = layout.encoder.pp as usize;
    let copies_rows = (boundary - 1..=boundary).contains(&stage) && layout.encoder.dp.max(layout.llm.dp) > 1;
    let steps = RankSteps { part, microbatches, actions, copies_rows, sharding: sharding(scheduler, part) };
    // The lists are our own, and name each microbatch of the step once in its turn.
    scheduler.model.rank_peak(&steps).unwrap_or_else(|error| unreachable!("{error}"))
}

impl StepScheduler {
    /// The component of the fullest rank when one sample is all there is, and what that rank needs, in bytes: the
    /// least that any schedule with this sample needs, its parts being divided over the encoder replicas in equal
    /// counts.
    pub fn alone(&self, sample: &SampleShape) -> (Component, u64) {
        if self.settings.layout.is_colocated() {
            return (Component::Both, crate::colocated::memory::alone(self, sample));
        }
        let (encoder, llm) = (self.encoder_alone(sample), self.llm_alone(sample));
        if llm > encoder { (Component::Llm, llm) } else { (Component::Encoder, encoder) }
    }

    /// As [`StepScheduler::alone`], of the fullest encoder rank; the LLM's part of the layout does not matter.
    pub fn encoder_alone(&self, sample: &SampleShape) -> u64 {
        let (num_parts, replicas) = (sample.num_parts(), self.settings.layout.encoder.dp);
        if num_parts < 2 || replicas < 2 {
            return self.encoder_part_alone(sample);
        }
        let count = num_parts.div_ceil(replicas);
        let share = |at| sample.share(PartRange { first: at * count, count });
        (0..num_parts.div_ceil(count)).map(|at| self.encoder_part_alone(&share(at))).max().unwrap_or(0)
    }

    /// As [`StepScheduler::encoder_alone`], of what one replica encodes.
    fn encoder_part_alone(&self, share: &SampleShape) -> u64 {
        let stages = parts(self).into_iter().enumerate().take(self.encoder_stages.len());
        stages.map(|(stage, part)| self.part_alone(stage, part, share)).max().unwrap_or(0)
    }

    /// As [`StepScheduler::alone`], of the fullest LLM rank.
    pub fn llm_alone(&self, sample: &SampleShape) -> u64 {
        let stages = parts(self).into_iter().enumerate().skip(self.encoder_stages.len());
        stages.map(|(stage, part)| self.part_alone(stage, part, sample)).max().unwrap_or(0)
    }

    fn part_alone(&self, stage: usize, part: RankPart, sample: &SampleShape) -> u64 {
        let microbatch = [RankMicrobatch {
            shape: MicrobatchShape::pack([sample]),
            feature_tokens: u64::from(sample.feature_tokens),
        }];
        let list = order::actions(self.settings.pipeline_order, StageIndex(0), 1, 1);
        rank_peak(self, stage, part, &microbatch, &list).total_bytes()
    }
}

pub(crate) fn pack(scheduler: &StepScheduler, samples: &[SampleIndex]) -> MicrobatchShape {
    MicrobatchShape::pack(samples.iter().map(|&sample| scheduler.shape(sample)))
}

pub(crate) fn features(scheduler: &StepScheduler, samples: &[SampleIndex]) -> u64 {
    samples.iter().map(|&sample| u64::from(scheduler.shape(sample).feature_tokens)).sum()
}

/// What an encoder replica does for its shares of one microbatch.
pub(crate) fn encoder_work(scheduler: &StepScheduler, shares: &[EncoderShare]) -> RankMicrobatch {
    let mut work = RankMicrobatch { shape: MicrobatchShape::default(), feature_tokens: 0 };
    for share in shares {
        let whole = scheduler.shape(share.sample);
        let shape = share.parts.map_or(Cow::Borrowed(whole), |parts| Cow::Owned(whole.share(parts)));
        work.shape.encoder_segments.extend_from_slice(&shape.encoder_segments);
        work.feature_tokens += u64::from(shape.feature_tokens);
    }
    work
}

/// The LLM replica of each sample of a microbatch, by sample.
pub(crate) fn holders(llm: &[Vec<SampleIndex>]) -> Vec<(SampleIndex, usize)> {
    let of_replica = |(replica, samples): (usize, &Vec<SampleIndex>)| -> Vec<(SampleIndex, usize)> {
        samples.iter().map(|&sample| (sample, replica)).collect()
    };
    let mut holders: Vec<_> = llm.iter().enumerate().flat_map(of_replica).collect();
    holders.sort_unstable();
    holders
}

/// The LLM replica that holds `sample`.
pub(crate) fn holder(holders: &[(SampleIndex, usize)], sample: SampleIndex) -> Option<usize> {
    let at = holders.binary_search_by_key(&sample, |&(held, _)| held).ok()?;
    Some(holders[at].1)
}

/// Who holds samples of whom, in one microbatch: `[encoder replica][llm replica]`.
pub(crate) fn feeds(llm: &[Vec<SampleIndex>], encoder: &[Vec<EncoderShare>]) -> Vec<Vec<bool>> {
    let holders = holders(llm);
    let fed = |shares: &Vec<EncoderShare>| {
        let mut row = vec![false; llm.len()];
        for replica in shares.iter().filter_map(|share| holder(&holders, share.sample)) {
            row[replica] = true;
        }
        row
    };
    encoder.iter().map(fed).collect()
}
