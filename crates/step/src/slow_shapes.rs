//! Slow shapes that are made up: samples of neighbouring sizes that take longer than predicted, for rehearsals and benches.

use crate::error::StepError;
use crate::judge::timeline::play;
use crate::scheduler::StepScheduler;
use dflop_sim::StepInput;
use dflop_types::{SampleShape, Schedule, StageIndex, Timeline};

/// Samples whose LLM tokens lie in one range, and what each adds to every action of the LLM backbone that holds it.
///
/// Real ones come from a kernel that is slow for some sizes, or from sizes between two points of a profile. The encoder takes
/// as predicted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlowShapes {
    /// The fewest LLM tokens of a slow sample.
    pub tokens_min: u32,
    /// The most.
    pub tokens_max: u32,
    /// Samples of the data profile in this range.
    pub num_samples: u64,
    /// What a slow sample adds to a forward, in nanoseconds.
    pub forward_ns: u64,
    /// What it adds to a backward.
    pub backward_ns: u64,
}

impl SlowShapes {
    /// Slow shapes of neighbouring sizes that about `share` of the samples have; equal arguments give equal ones.
    ///
    /// Each slow sample adds `times` the mean time of an action on the stage where it is longest in `usual`, as predicted:
    /// forwards and backwards are taken apart. Samples of one size are slow together. So where many have the same size, more
    /// of them are slow than `share`; of all ranges the seed draws among those that come nearest to it.
    ///
    /// # Errors
    /// `usual` does not belong to this scheduler.
    pub fn drawn(
        scheduler: &StepScheduler,
        usual: &Schedule,
        share: f64,
        times: f64,
        seed: u64,
    ) -> Result<Self, StepError> {
        let mut sizes: Vec<u32> = scheduler.shapes().iter().map(|shape| shape.llm_tokens).collect();
        sizes.sort_unstable();
        let wanted = ((share * sizes.len() as f64).round() as usize).clamp(1, sizes.len());
        // Every range that begins with a size and is just long enough: (samples too many, first, last).
        let mut ranges: Vec<(usize, u32, u32)> = Vec::new();
        let mut first = 0;
        while first + wanted <= sizes.len() {
            let last = sizes[first + wanted - 1];
            let end = sizes.partition_point(|&size| size <= last);
            ranges.push((end - first - wanted, sizes[first], last));
            first = sizes.partition_point(|&size| size <= sizes[first]);
        }
        let least = ranges.iter().map(|range| range.0).min().unwrap_or(0);
        ranges.retain(|range| range.0 == least);
        let (too_many, tokens_min, tokens_max) = ranges[(mixed(seed) % ranges.len() as u64) as usize];
        let (forward, backward) = longest_stage_ns(&scheduler.step_input(usual)?);
        Ok(Self {
            tokens_min,
            tokens_max,
            num_samples: (wanted + too_many) as u64,
            forward_ns: (times * forward) as u64,
            backward_ns: (times * backward) as u64,
        })
    }

    /// Whether samples of this shape are slow.
    pub fn holds(&self, shape: &SampleShape) -> bool {
        (self.tokens_min..=self.tokens_max).contains(&shape.llm_tokens)
    }

    /// Adds what the slow samples of a schedule take, to the times that were predicted of it.
    pub fn add_to(&self, input: &mut StepInput, scheduler: &StepScheduler, schedule: &Schedule) {
        let layout = input.layout;
        for (microbatch, column) in schedule.llm.iter().enumerate() {
            for (replica, samples) in (0..).zip(column) {
                let slow = samples.iter().filter(|s| self.holds(&scheduler.shapes()[s.index()]));
                let count = slow.count() as u64;
                for stage in layout.encoder.pp..layout.num_stages() {
                    let row = layout.row(replica, StageIndex(stage));
                    for (rows, ns) in
                        [(&mut input.forward_ns, self.forward_ns), (&mut input.backward_ns, self.backward_ns)]
                    {
                        rows[row][microbatch] =
                            rows[row][microbatch].saturating_add(ns.saturating_mul(count));
                    }
                }
            }
        }
    }
}

impl StepScheduler {
    /// The timeline of a schedule on a machine that takes longer for slow shapes, and as predicted for all others.
    ///
    /// # Errors
    /// As `simulate`.
    pub fn simulate_slow(&self, schedule: &Schedule, slow: &SlowShapes) -> Result<Timeline, StepError> {
        let mut input = self.step_input(schedule)?;
        slow.add_to(&mut input, self, schedule);
        Ok(play(&input, schedule)?)
    }
}

/// Mean forward and backward on the row where both together take longest; actions without a sample do not count.
fn longest_stage_ns(input: &StepInput) -> (f64, f64) {
    let mean = |times: &Vec<u64>| {
        let used = times.iter().filter(|&&ns| ns > 0).count().max(1);
        times.iter().sum::<u64>() as f64 / used as f64
    };
    let rows = input.forward_ns.iter().zip(&input.backward_ns);
    let all = rows.map(|(forward, backward)| (mean(forward), mean(backward)));
    all.fold((0.0, 0.0), |most: (f64, f64), it| if it.0 + it.1 > most.0 + most.1 { it } else { most })
}

/// A number that looks drawn, from a seed (splitmix64).
const fn mixed(seed: u64) -> u64 {
    let z = seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
