//! Memory of colocated ranks. A rank has one microbatch in flight, so its largest microbatch decides.

use crate::colocated::easing::{self, Run};
use crate::error::StepError;
use crate::groups::by_group;
use crate::judge::work::{Column, encoder_work, features, pack};
use crate::place::sides::{EncoderSide, Side};
use crate::scheduler::StepScheduler;
use dflop_cost::{ColocatedMemory, ColocatedSharding, CostModel, Moment, RankMemory, RankMicrobatch};
use dflop_schedule::Meets;
use dflop_types::{
    Action, EncoderShare, MicrobatchShape, PartRange, SampleIndex, SampleShape, Schedule, StageIndex,
};

/// Predicted peak of every tensor group: of its fullest rank.
pub(crate) fn peaks(scheduler: &StepScheduler, llm: &Side, encoder: &EncoderSide) -> Vec<RankMemory> {
    let (fixed, ranks) = (fixed(scheduler), scheduler.settings.layout.num_ranks() as usize);
    (0..ranks).map(|rank| peak(scheduler, &of_rank(scheduler, llm, encoder, rank), fixed)).collect()
}

/// Whether every tensor group stays within the budget.
pub(crate) fn are_within(
    scheduler: &StepScheduler,
    llm: &Side,
    encoder: &EncoderSide,
    budget_bytes: u64,
) -> bool {
    let (fixed, ranks) = (fixed(scheduler), scheduler.settings.layout.num_ranks() as usize);
    let is_within = |rank: usize| {
        peak(scheduler, &of_rank(scheduler, llm, encoder, rank), fixed).total_bytes() <= budget_bytes
    };
    (0..ranks).all(is_within)
}

/// What a tensor group reads and encodes in each microbatch.
fn of_rank<'a>(
    scheduler: &StepScheduler,
    llm: &'a Side,
    encoder: &'a EncoderSide,
    rank: usize,
) -> Vec<(&'a [SampleIndex], &'a [Vec<EncoderShare>])> {
    let per_group = scheduler.encoders_per_group() as usize;
    let columns = llm.iter().zip(encoder);
    columns.map(|(llm, encoder)| (&*llm[rank], &encoder[rank * per_group..][..per_group])).collect()
}

/// The memory of each rank that does not depend on its samples: for the encoder, and for the LLM backbone.
pub(crate) fn fixed(scheduler: &StepScheduler) -> ColocatedMemory {
    scheduler.model.colocated_memory(ColocatedSharding::of(&scheduler.settings().layout))
}

/// Predicted peak of a tensor group over its microbatches, each with what its LLM reads and what its encoder replicas encode.
pub(crate) fn peak(
    scheduler: &StepScheduler,
    microbatches: &[(&[SampleIndex], &[Vec<EncoderShare>])],
    fixed: ColocatedMemory,
) -> RankMemory {
    // A microbatch without samples never decides the peak.
    let filled = microbatches
        .iter()
        .enumerate()
        .filter(|(_, (llm, encoder))| !llm.is_empty() || !encoder.iter().all(Vec::is_empty));
    let peaks = filled.map(|(at, (llm, encoder))| {
        let memory = run(scheduler, &Work::new(scheduler, llm, encoder), fixed).memory;
        let moment = match memory.moment {
            // The peak belongs to both components together. It is shown as an action of the LLM backbone.
            Moment::Action(action) => {
                Moment::Action(Action { stage: StageIndex(1), microbatch: at as u32, ..action })
            }
            Moment::Optimizer => Moment::Optimizer,
        };
        RankMemory { moment, ..memory }
    });
    // Of equal peaks the first one is taken.
    let fullest =
        peaks.reduce(|most, other| if other.total_bytes() > most.total_bytes() { other } else { most });
    fullest.unwrap_or_else(|| {
        let none = RankMicrobatch::default();
        scheduler.model.colocated_peak(&none, &none, fixed, false)
    })
}

/// The work of a tensor group in one microbatch.
pub(crate) struct Work {
    /// What its LLM reads.
    pub(crate) read: RankMicrobatch,
    /// What each of its encoder replicas encodes, with whether it exchanges features for that.
    pub(crate) encoded: Vec<(RankMicrobatch, bool)>,
}

impl Work {
    /// Of a group whose LLM reads `llm` and whose encoder replicas encode `encoder`.
    pub(crate) fn new(scheduler: &StepScheduler, llm: &[SampleIndex], encoder: &[Vec<EncoderShare>]) -> Self {
        let read = RankMicrobatch { shape: pack(scheduler, llm), feature_tokens: features(scheduler, llm) };
        let own = |share: &EncoderShare| share.parts.is_none() && llm.contains(&share.sample);
        // Nothing is exchanged if the rank encodes only samples that it also reads, and all of those.
        let of_replica = |shares: &Vec<EncoderShare>| {
            let work = encoder_work(scheduler, shares);
            let is_exchanged = !shares.iter().all(own) || work.feature_tokens != read.feature_tokens;
            (work, is_exchanged)
        };
        Self { encoded: encoder.iter().map(of_replica).collect(), read }
    }
}

/// How a tensor group runs one microbatch. All its ranks recompute the same; the memory is that of the fullest.
pub(crate) fn run<'a>(scheduler: &'a StepScheduler, work: &Work, fixed: ColocatedMemory) -> Run<'a> {
    let models = (&*scheduler.model, &scheduler.eased);
    easing::run(models, scheduler.settings.memory_budget_bytes, (&work.encoded, &work.read), fixed)
}

/// Predicted peak of every tensor group in bytes, as [`peaks`] has it, from what the columns of an eased schedule say.
pub(crate) fn peak_bytes(scheduler: &StepScheduler, columns: &[Column]) -> Vec<u64> {
    let mut peaks = vec![0; scheduler.settings.layout.num_ranks() as usize];
    for column in columns {
        for (peak, run) in peaks.iter_mut().zip(&column.runs) {
            *peak = run.bytes.max(*peak);
        }
    }
    if peaks.contains(&0) {
        let none = peak(scheduler, &[], fixed(scheduler)).total_bytes();
        peaks.iter_mut().filter(|peak| **peak == 0).for_each(|peak| *peak = none);
    }
    peaks
}

/// Forward and backward of a microbatch on a tensor group by the times of `model`, without collectives, in nanoseconds.
pub(crate) fn work_ns(
    scheduler: &StepScheduler,
    model: &CostModel,
    llm: &[SampleIndex],
    encoder: &[Vec<EncoderShare>],
) -> u64 {
    let whole = model.whole_stage();
    let read = pack(scheduler, llm);
    let stage = model.llm_stage(&read, whole.num_layers, whole.is_first, whole.is_last);
    let encoder_ns = encoder.iter().map(|own| model.encoder(&encoder_work(scheduler, own).shape).total_ns());
    encoder_ns.max().unwrap_or(0).saturating_add(stage.total_ns())
}

impl StepScheduler {
    /// What all ranks together recompute in a step of microbatches that recompute as their memory asks, in nanoseconds; 0 where
    /// all recompute what the plan says.
    ///
    /// # Errors
    /// As [`StepScheduler::step_input`].
    pub fn recomputation_ns(&self, schedule: &Schedule) -> Result<u64, StepError> {
        self.check_is_ours(schedule)?;
        let Some(least) = self.eased.least() else { return Ok(0) };
        let fixed = fixed(self);
        let mut sum: u64 = 0;
        let groups = self.settings.layout.encoder.dp;
        let columns = schedule.llm.iter().zip(&schedule.encoder);
        for (samples, shares) in columns.flat_map(|(llm, e)| llm.iter().zip(by_group(e, groups))) {
            let model = run(self, &Work::new(self, samples, shares), fixed).model;
            let total_ns = |model: &CostModel| work_ns(self, model, samples, shares);
            sum = sum.saturating_add(total_ns(model).saturating_sub(total_ns(least)));
        }
        Ok(sum)
    }
}

/// What a rank needs for one sample alone, in bytes: the least that any schedule with this sample needs. Where the encoder's
/// work may be shared out, all ranks encode parts of the sample in equal counts.
pub(crate) fn alone(scheduler: &StepScheduler, sample: &SampleShape) -> u64 {
    let own_bytes = own_alone(scheduler, sample);
    if scheduler.meets() != Meets::Phase {
        return own_bytes;
    }
    own_bytes.min(divided_alone(scheduler, sample, scheduler.num_encoders()))
}

/// What a rank needs for one sample alone that its tensor group encodes itself, in bytes.
pub(super) fn own_alone(scheduler: &StepScheduler, sample: &SampleShape) -> u64 {
    divided_alone(scheduler, sample, scheduler.encoders_per_group())
}

/// The same where `replicas` of the encoder encode parts of the sample in equal counts: the bytes of the rank with the smallest.
fn divided_alone(scheduler: &StepScheduler, sample: &SampleShape, replicas: u32) -> u64 {
    let (read, fixed, num_parts) = (of_sample(sample), fixed(scheduler), sample.num_parts());
    if replicas < 2 || num_parts < 2 {
        return scheduler.model.colocated_peak(&read, &read, fixed, false).total_bytes();
    }
    let count = num_parts.div_ceil(replicas);
    let encoded = |at| {
        let share = of_sample(&sample.share(PartRange { first: at * count, count }));
        scheduler.model.colocated_peak(&share, &read, fixed, true).total_bytes()
    };
    (0..num_parts.div_ceil(count)).map(encoded).min().unwrap_or(0)
}

fn of_sample(sample: &SampleShape) -> RankMicrobatch {
    RankMicrobatch {
        shape: MicrobatchShape::pack([sample]),
        feature_tokens: u64::from(sample.feature_tokens),
    }
}
