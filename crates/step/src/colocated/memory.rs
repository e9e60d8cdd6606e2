//! Memory of colocated ranks. A rank has one microbatch in flight, so its largest microbatch decides.

use crate::colocated::easing::{self, Run};
use crate::error::StepError;
use crate::judge::work::{encoder_work, features, pack};
use crate::place::sides::{EncoderSide, Side};
use crate::scheduler::StepScheduler;
use dflop_cost::{ColocatedMemory, CostModel, Moment, RankMemory, RankMicrobatch, Sharding};
use dflop_schedule::Meets;
use dflop_types::{
    Action, Component, EncoderShare, MicrobatchShape, PartRange, Recomputation, SampleIndex, SampleShape,
    Schedule, StageIndex,
};

/// Predicted peak of every rank.
pub(crate) fn peaks(scheduler: &StepScheduler, llm: &Side, encoder: &EncoderSide) -> Vec<RankMemory> {
    let ranks = 0..scheduler.settings.layout.num_ranks() as usize;
    let fixed = fixed(scheduler);
    ranks
        .map(|rank| {
            let of_rank: Vec<(&[SampleIndex], &[EncoderShare])> =
                llm.iter().zip(encoder).map(|(llm, encoder)| (&*llm[rank], &*encoder[rank])).collect();
            peak(scheduler, &of_rank, fixed)
        })
        .collect()
}

/// The memory of each rank that does not depend on its samples: for the encoder, and for the LLM backbone.
pub(crate) fn fixed(scheduler: &StepScheduler) -> ColocatedMemory {
    scheduler.model.colocated_memory(Sharding::of(&scheduler.settings.layout, Component::Both))
}

/// Predicted peak of a rank over its microbatches, each with what its LLM reads and what its encoder encodes.
pub(crate) fn peak(
    scheduler: &StepScheduler,
    microbatches: &[(&[SampleIndex], &[EncoderShare])],
    fixed: ColocatedMemory,
) -> RankMemory {
    // A microbatch without samples never decides the peak.
    let filled =
        microbatches.iter().enumerate().filter(|(_, (llm, encoder))| !llm.is_empty() || !encoder.is_empty());
    let peaks = filled.map(|(at, (llm, encoder))| {
        let memory = run(scheduler, llm, encoder, fixed).memory;
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

/// How a rank runs one microbatch, of which its LLM reads `llm` and its encoder encodes `encoder`.
pub(crate) fn run<'a>(
    scheduler: &'a StepScheduler,
    llm: &[SampleIndex],
    encoder: &[EncoderShare],
    fixed: ColocatedMemory,
) -> Run<'a> {
    let work = encoder_work(scheduler, encoder);
    let read = RankMicrobatch { shape: pack(scheduler, llm), feature_tokens: features(scheduler, llm) };
    let own = |share: &EncoderShare| share.parts.is_none() && llm.contains(&share.sample);
    // Nothing is exchanged if the rank encodes only samples that it also reads, and all of those.
    let is_exchanged = !encoder.iter().all(own) || work.feature_tokens != read.feature_tokens;
    let models = (&*scheduler.model, &scheduler.eased);
    easing::run(models, scheduler.settings.memory_budget_bytes, (&work, &read, is_exchanged), fixed)
}

/// What each rank recomputes in each microbatch; nothing if all recompute what the plan says.
pub(crate) fn recomputed(scheduler: &StepScheduler, schedule: &Schedule) -> Vec<Vec<Recomputation>> {
    if scheduler.eased.is_empty() {
        return Vec::new();
    }
    let (fixed, of) = (fixed(scheduler), scheduler.model.settings());
    let most = Recomputation { encoder: of.encoder.recompute, llm: of.llm.recompute };
    let columns = schedule.llm.iter().zip(&schedule.encoder);
    let of_rank = |(llm, encoder): (&Vec<SampleIndex>, &Vec<EncoderShare>)| {
        run(scheduler, llm, encoder, fixed).recompute.unwrap_or(most)
    };
    columns.map(|(llm, encoder)| llm.iter().zip(encoder).map(of_rank).collect()).collect()
}

/// Forward and backward of a microbatch on a rank by the times of `model`, without collectives, in nanoseconds.
pub(crate) fn work_ns(
    scheduler: &StepScheduler,
    model: &CostModel,
    llm: &[SampleIndex],
    encoder: &[EncoderShare],
) -> u64 {
    let whole = model.whole_stage();
    let read = pack(scheduler, llm);
    let stage = model.llm_stage(&read, whole.num_layers, whole.is_first, whole.is_last);
    model.encoder(&encoder_work(scheduler, encoder).shape).total_ns().saturating_add(stage.total_ns())
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
        for (samples, shares) in schedule.llm.iter().zip(&schedule.encoder).flat_map(|(l, e)| l.iter().zip(e))
        {
            let model = run(self, samples, shares, fixed).model;
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
    let (ranks, num_parts) = (scheduler.settings.layout.llm.dp, sample.num_parts());
    if scheduler.meets() != Meets::Phase || ranks < 2 || num_parts < 2 {
        return own_bytes;
    }
    let (read, fixed) = (of_sample(sample), fixed(scheduler));
    let count = num_parts.div_ceil(ranks);
    let encoded = |at| {
        let share = of_sample(&sample.share(PartRange { first: at * count, count }));
        scheduler.model.colocated_peak(&share, &read, fixed, true).total_bytes()
    };
    let shared_bytes = (0..num_parts.div_ceil(count)).map(encoded).min().unwrap_or(0);
    own_bytes.min(shared_bytes)
}

/// What a rank needs for one sample alone that it encodes itself, in bytes.
pub(super) fn own_alone(scheduler: &StepScheduler, sample: &SampleShape) -> u64 {
    let own = of_sample(sample);
    scheduler.model.colocated_peak(&own, &own, fixed(scheduler), false).total_bytes()
}

fn of_sample(sample: &SampleShape) -> RankMicrobatch {
    RankMicrobatch {
        shape: MicrobatchShape::pack([sample]),
        feature_tokens: u64::from(sample.feature_tokens),
    }
}
