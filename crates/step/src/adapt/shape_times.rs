//! What samples of each size were predicted to take and took, over the steps of a run: for people.

use crate::adapt::bins::{ENCODER, LLM, tokens};
use crate::adapt::correction::Correction;
use crate::adapt::fit::Excess;
use crate::error::StepError;
use crate::scheduler::StepScheduler;
use dflop_types::{Schedule, Span};

/// Predicted and measured time of samples of like size in one component.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ShapeTime {
    /// Whether it is of the encoder; else of the LLM backbone.
    pub is_encoder: bool,
    /// The fewest tokens of such a sample.
    pub tokens_min: u64,
    /// The most; `u64::MAX` for the last bin.
    pub tokens_max: u64,
    /// Samples of all steps: one that comes in ten steps counts ten times.
    pub num_samples: u64,
    /// Their tokens.
    pub num_tokens: u64,
    /// Actions that held some of them.
    pub num_actions: u64,
    /// Their part of the actions' predicted time, in nanoseconds: an action is divided by tokens.
    pub predicted_ns: f64,
    /// Their part of the measured time, divided alike.
    pub measured_ns: f64,
    /// What is laid to these samples alone: ranks, and the other samples of their actions, are taken off. Of the last steps, as
    /// evidence halves in 34.
    pub excess: Excess,
}

#[derive(Debug, Clone, Copy, Default)]
struct Sums {
    num_samples: u64,
    num_tokens: u64,
    num_actions: u64,
    predicted_ns: f64,
    measured_ns: f64,
}

/// Sums by component and shape bin, filled by [`StepScheduler::add_shape_times`].
#[derive(Debug, Clone)]
pub struct ShapeTimes {
    correction: Correction,
    sums: [Vec<Sums>; 2],
}

impl ShapeTimes {
    /// Of no step yet.
    pub fn new(scheduler: &StepScheduler) -> Self {
        let correction = Correction::new(scheduler);
        let bins = correction.bins();
        let sums = [ENCODER, LLM].map(|component| vec![Sums::default(); bins.count(component)]);
        Self { correction, sums }
    }

    /// The bins that were seen, the encoder's first, by tokens.
    pub fn rows(&self) -> Vec<ShapeTime> {
        let all = self.sums.iter().flatten();
        let rows = self.correction.shapes().into_iter().zip(all).map(|(bin, sums)| ShapeTime {
            is_encoder: bin.is_encoder,
            tokens_min: bin.tokens_min,
            tokens_max: bin.tokens_max,
            num_samples: sums.num_samples,
            num_tokens: sums.num_tokens,
            num_actions: sums.num_actions,
            predicted_ns: sums.predicted_ns,
            measured_ns: sums.measured_ns,
            excess: bin.excess,
        });
        rows.filter(|row| row.num_actions > 0).collect()
    }
}

impl StepScheduler {
    /// Adds a measured step to the sums; `makespan_ns` is that of the whole step.
    ///
    /// # Errors
    /// As [`StepScheduler::measured`].
    pub fn add_shape_times(
        &self,
        times: &mut ShapeTimes,
        schedule: &Schedule,
        spans: &[Span],
        makespan_ns: u64,
    ) -> Result<(), StepError> {
        for action in self.observed(&times.correction, schedule, spans)? {
            for &(bin, fraction) in &action.fractions {
                let sums = &mut times.sums[action.component][bin];
                sums.num_actions += 1;
                sums.predicted_ns += fraction * action.predicted_ns as f64;
                sums.measured_ns += fraction * action.measured_ns as f64;
            }
        }
        // Each sample of the step stands once in the LLM's lists; the encoder reads all of it, on however many replicas.
        for &sample in schedule.llm.iter().flatten().flatten() {
            for component in [ENCODER, LLM] {
                let num_tokens = tokens(self.shape(sample), component);
                if num_tokens > 0 {
                    let sums = &mut times.sums[component][times.correction.bins().bin(component, num_tokens)];
                    sums.num_samples += 1;
                    sums.num_tokens += num_tokens;
                }
            }
        }
        self.observe(&mut times.correction, schedule, spans, makespan_ns, true)
    }
}
