//! Predictions for placed samples: the durations of every action of every rank, and the memory of every rank.

use crate::settings::StepSettings;
use crate::step::StepScheduler;
use dflop_cost::{Prediction, RankMemory, RankMicrobatch, microbatches_in_flight};
use dflop_sim::StepInput;
use dflop_types::{Component, MicrobatchShape, SampleIndex, SampleShape, StageIndex};

/// Samples of `[microbatch][replica]`.
pub(crate) type Side = Vec<Vec<Vec<SampleIndex>>>;

/// Samples in their places on both sides of the boundary.
#[derive(Debug, Clone, Default)]
pub(crate) struct Placement {
    pub(crate) llm: Side,
    pub(crate) encoder: Side,
}

impl Placement {
    /// The same places with microbatch `order[j]` as the j-th.
    pub(crate) fn reorder(mut self, order: &[usize]) -> Self {
        let mut pick = |side: fn(&mut Self) -> &mut Side| {
            order.iter().map(|&j| std::mem::take(&mut side(&mut self)[j])).collect::<Side>()
        };
        let llm = pick(|p| &mut p.llm);
        let encoder = pick(|p| &mut p.encoder);
        Self { llm, encoder }
    }
}

/// Durations of a step, and how many of them left the measured range.
#[derive(Debug, Clone)]
pub(crate) struct Predicted {
    pub(crate) input: StepInput,
    /// Predictions for work that is not empty.
    pub(crate) num_predictions: u64,
    /// Those outside the measured range.
    pub(crate) num_extrapolated: u64,
}

impl Predicted {
    fn add(&mut self, rank: usize, has_work: bool, prediction: Prediction) {
        self.input.forward_ns[rank].push(prediction.forward_ns);
        self.input.backward_ns[rank].push(prediction.backward_ns);
        self.num_predictions += u64::from(has_work);
        self.num_extrapolated += u64::from(prediction.extrapolated);
    }
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

/// The durations of every action. Degrees and samples have been checked.
pub(crate) fn predict(scheduler: &StepScheduler, llm: &Side, encoder: &Side) -> Predicted {
    let (settings, model) = (&scheduler.settings, &scheduler.model);
    let layout = settings.layout;
    let num_ranks = layout.num_ranks() as usize;
    let empty = || vec![Vec::with_capacity(llm.len()); num_ranks];
    let mut predicted = Predicted {
        input: StepInput {
            layout,
            order: settings.pipeline_order,
            num_microbatches: settings.num_microbatches,
            forward_ns: empty(),
            backward_ns: empty(),
            feeds: Vec::with_capacity(llm.len()),
            transfer_ns: 0,
            tail_ns: vec![model.encoder_tail_ns(); num_ranks],
        },
        num_predictions: 0,
        num_extrapolated: 0,
    };
    let (mut num_messages, mut sent_tokens) = (0u64, 0u64);
    for (llm, encoder) in llm.iter().zip(encoder) {
        for (replica, samples) in encoder.iter().enumerate() {
            let shape = pack(scheduler, samples);
            predicted.add(replica, !samples.is_empty(), model.encoder(&shape));
            sent_tokens += features(scheduler, samples);
        }
        let feeds = feeds(llm, encoder);
        num_messages += feeds.iter().flatten().filter(|&&feeds| feeds).count() as u64;
        predicted.input.feeds.push(feeds);
        for (replica, samples) in (0..).zip(llm) {
            let shape = pack(scheduler, samples);
            for (stage, layers) in (1..).zip(&scheduler.stages) {
                let rank = layout.rank(replica, StageIndex(stage)).index();
                let prediction = model.llm_stage(&shape, layers.num_layers, layers.is_first, layers.is_last);
                predicted.add(rank, !samples.is_empty(), prediction);
                if !layers.is_last && !samples.is_empty() {
                    num_messages += 1;
                    sent_tokens += shape.total_llm_tokens();
                }
            }
        }
    }
    for replica in 0..layout.llm.dp {
        for (stage, layers) in (1..).zip(&scheduler.stages) {
            let rank = layout.rank(replica, StageIndex(stage)).index();
            predicted.input.tail_ns[rank] = model.stage_tail_ns(*layers);
        }
    }
    // The simulator takes one transfer time for the step: that of the mean message.
    predicted.input.transfer_ns = model.transfer_ns(sent_tokens.div_ceil(num_messages.max(1)));
    predicted
}

/// Predicted peak of every rank. Degrees and samples have been checked.
pub(crate) fn memory(scheduler: &StepScheduler, llm: &Side, encoder: &Side) -> Vec<RankMemory> {
    let (settings, model) = (&scheduler.settings, &scheduler.model);
    let layout = settings.layout;
    let of_replica = |side: &Side, replica: usize| -> Vec<RankMicrobatch> {
        side.iter()
            .map(|column| RankMicrobatch {
                shape: pack(scheduler, &column[replica]),
                feature_tokens: features(scheduler, &column[replica]),
            })
            .collect()
    };
    let mut peaks: Vec<RankMemory> = (0..layout.encoder.dp as usize)
        .map(|replica| model.encoder_memory(&of_replica(encoder, replica), in_flight(settings, 0)))
        .collect();
    for replica in 0..layout.llm.dp as usize {
        let microbatches = of_replica(llm, replica);
        peaks.extend(
            (1..).zip(&scheduler.stages).map(|(stage, layers)| {
                model.stage_memory(&microbatches, *layers, in_flight(settings, stage))
            }),
        );
    }
    peaks
}

/// The component of the fullest rank when one sample is all there is, and what that rank needs, in bytes: the
/// least that any schedule with this sample needs.
pub(crate) fn alone(scheduler: &StepScheduler, sample: &SampleShape) -> (Component, u64) {
    let microbatch = [RankMicrobatch {
        shape: MicrobatchShape::pack([sample]),
        feature_tokens: u64::from(sample.feature_tokens),
    }];
    let encoder = scheduler.model.encoder_memory(&microbatch, 1).total_bytes();
    let stages = scheduler.stages.iter();
    let llm = stages.map(|&layers| scheduler.model.stage_memory(&microbatch, layers, 1).total_bytes()).max();
    match llm {
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
