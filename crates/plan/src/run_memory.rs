//! Memory over the whole run: the global batches that may need more than those which candidates are judged on.
//!
//! The seed decides every global batch of a run before it starts. Most batches need about as much memory as the sampled
//! ones, but a few hold more large samples. Those are scheduled as well, before a plan counts as one that fits.
//!
//! ```text
//! need of a batch  = max(largest sample, mean microbatch) + (microbatches in flight - 1) * mean microbatch, in tokens
//! expected bytes   = static bytes + bytes held at the sampled peak * need / largest need of the sampled batches
//! near the budget  : expected bytes are over the budget if the bytes held are raised by a reserve
//! ```

use crate::error::PlanError;
use crate::evaluate::{Judged, Verdict, summary};
use crate::input::SearchInput;
use crate::models::Models;
use crate::rough;
use crate::space::Candidate;
use dflop_cost::{ColocatedSharding, CostModel, RankRole, Sharding};
use dflop_step::batches::GlobalBatches;
use dflop_types::{Component, Layout, MicrobatchShape, Rejection, SampleIndex, SampleShape, thousands};
use rayon::prelude::*;
use std::cmp::Reverse;
use std::collections::BTreeSet;

/// The most samples whose global batches are looked at, but at least one epoch. In a run of many epochs the later ones are
/// much like the first.
const SAMPLES_MAX: u64 = 1 << 22;

/// For the plan in front, batches are scheduled that together have this many samples.
const SCHEDULED_SAMPLES: usize = 2_048;
/// The fewest and the most batches that are scheduled for the plan in front. For a runner-up it is always the fewest.
const SCHEDULED: [usize; 2] = [2, 32];

/// The reserve: a batch may hold this many times what is expected, because two schedules with equal needs are not alike.
const RESERVE: f64 = 1.15;

/// If no batch comes near the budget, the fullest one is still scheduled if it may hold more than this many times the
/// sampled peak (with the reserve). So the peak that people read is that of the whole run.
const MUCH_MORE: f64 = 1.2;

/// How a plan fits the global batches of a run that it was not judged on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RunMemory {
    /// Global batches that were looked at: those of the run, and at least those of one epoch.
    pub num_batches: u64,
    /// Batches that come near the memory budget: an estimate with a reserve is over it.
    pub num_near: u64,
    /// Batches that were scheduled, the fullest ones. All of them fit.
    pub num_scheduled: u64,
    /// Peak memory of the fullest encoder rank and of the fullest LLM rank in the scheduled batches, in bytes; 0 if none was
    /// scheduled.
    pub peak_bytes: [u64; 2],
}

impl RunMemory {
    /// What was done about batches near the budget, as a line of an explanation; `None` if there are none.
    pub(crate) fn words(&self) -> Option<String> {
        let Self { num_batches, num_near, num_scheduled, .. } = *self;
        let (comes, batches) = if num_near == 1 { ("comes", "batch") } else { ("come", "batches") };
        let which = if num_scheduled < num_near {
            format!(
                "the fullest {num_scheduled} were scheduled, and fit; the others are expected to hold less"
            )
        } else {
            "scheduled too, and within it".to_owned()
        };
        let of = thousands(num_batches);
        (num_near > 0).then(|| {
            format!("          {num_near} {batches} of the run's {of} {comes} near the budget: {which}\n")
        })
    }
}

/// Tokens of one kind in a global batch: all of them, and those of the largest sample.
#[derive(Debug, Clone, Copy, Default)]
struct Amount {
    sum: u64,
    largest: u64,
}

impl Amount {
    fn add(&mut self, tokens: u64) {
        self.sum = self.sum.saturating_add(tokens);
        self.largest = self.largest.max(tokens);
    }

    /// Tokens that a rank holds if `in_flight` microbatches are in flight and the batch is spread over `num_buckets`.
    fn held(self, in_flight: f64, num_buckets: u64) -> f64 {
        let mean = self.sum as f64 / num_buckets.max(1) as f64;
        (in_flight - 1.0).max(0.0) * mean + mean.max(self.largest as f64)
    }
}

/// What the memory of a global batch is estimated from.
#[derive(Debug, Clone, Copy, Default)]
struct Load {
    encoder: Amount,
    /// Encoder tokens of the largest part; a part cannot be divided over replicas.
    encoder_part: u64,
    llm: Amount,
    labels: Amount,
}

impl Load {
    fn of<'a>(samples: impl IntoIterator<Item = &'a SampleShape>) -> Self {
        let mut load = Self::default();
        for shape in samples {
            let tokens = shape.encoder_tokens();
            load.encoder.add(tokens);
            load.encoder_part = load.encoder_part.max(tokens / u64::from(shape.num_parts().max(1)));
            load.llm.add(shape.llm_tokens.into());
            load.labels.add(shape.label_tokens.into());
        }
        load
    }

    /// Encoder tokens, if the parts of each sample may be divided over so many replicas.
    fn encoder(&self, replicas: u32) -> Amount {
        let largest = (self.encoder.largest / u64::from(replicas.max(1))).max(self.encoder_part);
        Amount { largest, ..self.encoder }
    }

    /// Tokens held under a candidate: encoder tokens on an encoder rank, LLM tokens on a rank of the first LLM stage, LLM
    /// tokens on a rank of the last LLM stage, and label tokens there.
    fn needs(&self, candidate: &Candidate) -> [f64; 4] {
        let (layout, m) = (candidate.layout, candidate.num_microbatches);
        let buckets = |dp: u32| u64::from(m) * u64::from(dp);
        let encoder = self.encoder(layout.encoder.dp);
        let [of_encoder, of_first, of_last] = in_flight(&layout, m);
        [
            encoder.held(of_encoder, buckets(layout.encoder.dp)),
            self.llm.held(of_first, buckets(layout.llm.dp)),
            self.llm.held(of_last, buckets(layout.llm.dp)),
            // The head has the labels of one microbatch at a time.
            self.labels.held(1.0, buckets(layout.llm.dp)),
        ]
    }
}

/// Microbatches in flight at once: on the encoder's first stage, on the first LLM rank and on the last LLM rank. Ranks with
/// interleaved stages hold parts of microbatches.
fn in_flight(layout: &Layout, num_microbatches: u32) -> [f64; 3] {
    if layout.is_interleaved() {
        return rough::wanted(layout, num_microbatches);
    }
    [layout.num_stages(), layout.llm.pp, 1].map(|stages| f64::from(stages.min(num_microbatches)))
}

/// The scheduler's answer for a candidate, a step and its batch.
type Answer<'a> = dyn Fn(&Candidate, u64, &[SampleIndex]) -> Result<Verdict, PlanError> + Sync + 'a;

/// The global batches of a run, as training draws them.
#[derive(Debug)]
pub(crate) struct Run {
    budget_bytes: u64,
    batches: GlobalBatches,
    /// The load of each step.
    loads: Vec<Load>,
    /// Steps whose batches are among the sampled ones, on which candidates are judged anyway.
    sampled_steps: Vec<usize>,
    sampled: Vec<Load>,
    /// The first sampled batch as one microbatch.
    whole: MicrobatchShape,
}

/// The global batches on which candidates are judged.
pub(crate) struct Held<'a> {
    /// The sampled batches: they give time and memory.
    pub(crate) batches: &'a [Vec<SampleIndex>],
    /// All batches of the run: they are checked for memory only. `None` if memory is not checked.
    pub(crate) run: Option<Run>,
}

impl Held<'_> {
    /// The fullest batches of the run beside the sampled ones, each with its step: the one with the most encoder tokens, the
    /// one with the most LLM tokens, and those with the largest samples of both kinds.
    pub(crate) fn fullest(&self) -> Vec<(u64, Vec<SampleIndex>)> {
        let Some(run) = &self.run else { return Vec::new() };
        let kinds: [fn(&Load) -> u64; 4] = [
            |load| load.encoder.sum,
            |load| load.llm.sum,
            |load| load.encoder.largest,
            |load| load.llm.largest,
        ];
        let others = || (0..run.loads.len()).filter(|step| !run.sampled_steps.contains(step));
        let fullest =
            |of: fn(&Load) -> u64| others().max_by_key(|&step| (of(&run.loads[step]), Reverse(step)));
        let steps: BTreeSet<usize> = kinds.into_iter().filter_map(fullest).collect();
        steps.into_iter().map(|step| (step as u64, run.batches.batch(step as u64))).collect()
    }
}

impl Run {
    /// The global batches of the run that `input` asks for; `None` if there is no memory budget to check.
    ///
    /// # Errors
    /// [`PlanError::Step`] where no global batch can be drawn.
    pub(crate) fn new(
        input: &SearchInput<'_>,
        sampled: &[Vec<SampleIndex>],
    ) -> Result<Option<Self>, PlanError> {
        let Some(budget_bytes) = input.memory_budget_bytes() else { return Ok(None) };
        let num_samples = u32::try_from(input.shapes.len()).unwrap_or(u32::MAX);
        let batches = GlobalBatches::new(num_samples, input.global_batch_size, input.seed)?;
        let batches = batches.with_giants(input.giants, input.shapes.iter())?;
        let of_epoch = batches.steps_per_epoch();
        let most = (SAMPLES_MAX / u64::from(input.global_batch_size)).max(of_epoch);
        let shape = |sample: &SampleIndex| &input.shapes[sample.index()];
        let load = |batch: &[SampleIndex]| Load::of(batch.iter().map(shape));
        let mut sampled_steps = Vec::new();
        let mut loads = Vec::new();
        for step in 0..input.num_steps.clamp(of_epoch, most) {
            let batch = batches.batch(step);
            if sampled.contains(&batch) {
                sampled_steps.push(loads.len());
            }
            loads.push(load(&batch));
        }
        Ok(Some(Self {
            budget_bytes,
            batches,
            loads,
            sampled_steps,
            sampled: sampled.iter().map(|batch| load(batch)).collect(),
            whole: MicrobatchShape::pack(sampled[0].iter().map(shape)),
        }))
    }

    /// The number of steps whose batches may be over the budget under `candidate`, and the steps to schedule, the fullest
    /// first. `peaks` are the candidate's peaks over the sampled batches: of its encoder ranks and of its LLM ranks, in bytes.
    fn near(
        &self,
        input: &SearchInput<'_>,
        model: &CostModel,
        candidate: &Candidate,
        peaks: [u64; 2],
    ) -> Result<(usize, Vec<u64>), PlanError> {
        let budget = self.budget_bytes as f64;
        let fullness: Vec<f64> = if candidate.layout.is_colocated() {
            self.colocated(model, candidate)
        } else {
            let mut most = [0.0_f64; 4];
            for needs in self.sampled.iter().map(|load| load.needs(candidate)) {
                most = std::array::from_fn(|at| most[at].max(needs[at]));
            }
            let fixed = static_bytes(input, model, candidate)?;
            let expected = |load: &Load| {
                let needs = load.needs(candidate);
                let ratio = |at: usize| {
                    if most[at] > 0.0 { needs[at] / most[at] } else { f64::from(needs[at] > 0.0) }
                };
                let of = |at: usize, ratio: f64| {
                    let held = peaks[at].saturating_sub(fixed[at]) as f64;
                    fixed[at] as f64 + RESERVE * ratio * held
                };
                of(0, ratio(0)).max(of(1, (1..4).map(ratio).fold(0.0, f64::max)))
            };
            self.loads.iter().map(expected).collect()
        };
        let is_near = |step: &usize| fullness[*step] > budget && !self.sampled_steps.contains(step);
        let mut near: Vec<usize> = (0..fullness.len()).filter(is_near).collect();
        let fuller = |a: &usize, b: &usize| fullness[*b].total_cmp(&fullness[*a]).then(a.cmp(b));
        near.sort_by(fuller);
        let num_near = near.len();
        // No batch comes near the budget. If the fullest one holds much more than the sampled ones it is scheduled all the
        // same, so that the peak that people read is that of the run.
        if near.is_empty() && !candidate.layout.is_colocated() {
            let told = MUCH_MORE * peaks[0].max(peaks[1]) as f64;
            near.extend((0..fullness.len()).min_by(fuller).filter(|&step| fullness[step] > told));
        }
        Ok((num_near, near.into_iter().map(|step| step as u64).collect()))
    }

    /// For each step, the bytes that the fullest colocated rank needs, with the reserve.
    ///
    /// A colocated rank takes the fewest microbatches that fit. So this is what it needs if it spreads its samples over as
    /// many microbatches as it may: if that fits, some number of microbatches does.
    fn colocated(&self, model: &CostModel, candidate: &Candidate) -> Vec<f64> {
        let layout = candidate.layout;
        let fixed = model.colocated_static_bytes(ColocatedSharding::of(&layout)) as f64;
        let buckets = f64::from(candidate.num_microbatches) * f64::from(layout.llm.dp);
        let shares = f64::from(candidate.num_microbatches) * f64::from(layout.encoder.dp);
        let of_token =
            |part, tokens: u64| model.activation_bytes(part, &self.whole) as f64 / tokens.max(1) as f64;
        let encoder = of_token(RankRole::Encoder, self.whole.encoder_tokens());
        let llm = of_token(RankRole::Stage(model.whole_stage()), self.whole.total_llm_tokens());
        let held = |amount: Amount, parts: f64| amount.sum as f64 / parts + amount.largest as f64;
        let encoders = layout.encoders_per_group();
        let need = |load: &Load| {
            // The ranks of a group that hold whole encoders divide its samples.
            let of_encoder = if encoders > 1 { load.encoder(encoders) } else { load.encoder };
            encoder * held(of_encoder, shares) + llm * held(load.llm, buckets)
        };
        self.loads.iter().map(|load| fixed + RESERVE * need(load)).collect()
    }

    /// Schedules each candidate on the batches of the run that come near the budget, and says which candidates fit. The
    /// answers are in the order of `judged`.
    ///
    /// Each candidate is scheduled on the fullest two batches. With `is_plan` there are more: as many as have some thousand
    /// samples together. `judge` gives the scheduler's answer for one candidate and batch.
    pub(crate) fn check(
        &self,
        input: &SearchInput<'_>,
        models: &Models,
        judged: &[(Candidate, [u64; 2])],
        is_plan: bool,
        judge: &Answer<'_>,
    ) -> Result<Vec<Result<RunMemory, Rejection>>, PlanError> {
        let size = self.batches.batch(0).len().max(1);
        let [fewest, most] = SCHEDULED;
        let most = if is_plan { (SCHEDULED_SAMPLES / size).clamp(fewest, most) } else { fewest };
        let near = |(candidate, peaks): &(Candidate, [u64; 2])| {
            self.near(input, models.of(candidate), candidate, *peaks)
        };
        let near: Vec<(usize, Vec<u64>)> = judged.par_iter().map(near).collect::<Result<_, PlanError>>()?;
        let asks: Vec<(usize, u64)> = (0..judged.len())
            .flat_map(|at| near[at].1.iter().take(most).map(move |&step| (at, step)))
            .collect();
        let verdict = |&(at, step): &(usize, u64)| judge(&judged[at].0, step, &self.batches.batch(step));
        let verdicts: Vec<Verdict> = asks.par_iter().map(verdict).collect::<Result<_, PlanError>>()?;
        let mut verdicts = asks.into_iter().zip(verdicts).peekable();
        let mut checked = Vec::with_capacity(judged.len());
        for (at, &(num_near, _)) in near.iter().enumerate() {
            let own = std::iter::from_fn(|| verdicts.next_if(|((of, _), _)| *of == at));
            // All verdicts of this candidate are taken, also those after a rejection: the next ones belong to the next candidate.
            let own: Vec<Verdict> = own.map(|(_, verdict)| verdict).collect();
            let num_scheduled = own.len() as u64;
            checked.push(own.into_iter().collect::<Result<Vec<Judged>, Rejection>>().map(|fitting| {
                let peaks = summary(&fitting);
                RunMemory {
                    num_batches: self.loads.len() as u64,
                    num_near: num_near as u64,
                    num_scheduled,
                    peak_bytes: [peaks.encoder_memory_bytes_peak, peaks.llm_memory_bytes_peak],
                }
            }));
        }
        Ok(checked)
    }
}

/// The bytes that do not depend on samples: of the encoder rank that has the fewest, and of the LLM rank that has the fewest.
fn static_bytes(
    input: &SearchInput<'_>,
    model: &CostModel,
    candidate: &Candidate,
) -> Result<[u64; 2], PlanError> {
    let settings = candidate.settings(input);
    let of = |part, component| {
        model.sharded_memory(part, Sharding::of(&candidate.layout, component)).static_bytes()
    };
    let encoder = settings.encoder_stages(model)?.into_iter();
    let encoder = encoder.map(|stage| of(RankRole::EncoderStage(stage), Component::Encoder));
    let llm = settings.rank_stages(model)?.into_iter();
    let llm = llm.map(|held| of(RankRole::Stage(held), Component::Llm));
    Ok([encoder.min().unwrap_or(0), llm.min().unwrap_or(0)])
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflop_types::ComponentLayout;

    /// Counted by hand in the lists of two LLM ranks with two chunks each and four microbatches. The first LLM rank has five of
    /// the eight chunks in flight, the last one three, and the encoder has all microbatches.
    #[test]
    fn chunks_in_flight_are_parts_of_microbatches() {
        let degrees = |pp| ComponentLayout { tp: 1, pp, dp: 1 };
        let plain = Layout::disaggregated(degrees(1), degrees(2));
        // In halves, which are whole numbers.
        let halves = |layout: &Layout, m| in_flight(layout, m).map(|held| (2.0 * held).round() as u32);
        assert_eq!(halves(&plain, 4), [6, 4, 2]);
        assert_eq!(halves(&plain, 1), [2, 2, 2]);
        assert_eq!(halves(&Layout { llm_interleave: 2, ..plain }, 4), [8, 5, 3]);
        // Two microbatches of 10 tokens and one of 30: the largest is in flight beside one and a half of mean size.
        let mut amount = Amount::default();
        for tokens in [10, 10, 30] {
            amount.add(tokens);
        }
        assert!((amount.held(2.5, 5) - (1.5 * 10.0 + 30.0)).abs() < 1e-9);
    }
}
