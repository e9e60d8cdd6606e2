//! Adjustment: what a schedule is made with beside the profile. It is small, and a log keeps it, so that the same schedule
//! can be made again.

use crate::adapt::bins::{ENCODER, LLM, tokens};
use crate::adapt::rows::median;
use crate::groups::by_group;
use dflop_cost::Prediction;
use dflop_schedule::Slowness;
use dflop_types::{ActionKind, EncoderShare, Layout, SampleIndex, SampleShape, StageIndex};
use serde::{Deserialize, Serialize};

/// What samples of some sizes take of their predicted time in a component.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShapeFactor {
    /// The fewest tokens of such a sample.
    pub tokens_min: u64,
    /// The most.
    pub tokens_max: u64,
    /// Their time over the predicted one.
    pub factor: f64,
}

/// What the actions of a row take of their predicted time, by kind. A row is a rank, or one of its components where it
/// holds both.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RowFactor {
    /// Of forwards.
    pub forward: f64,
    /// Of whole backwards.
    pub backward: f64,
    /// Of the first halves of backwards (I).
    pub input: f64,
    /// Of the second halves (W).
    pub weight: f64,
}

impl RowFactor {
    /// As predicted.
    pub const ONE: Self = Self { forward: 1.0, backward: 1.0, input: 1.0, weight: 1.0 };

    /// That of one kind.
    pub const fn of(&self, kind: ActionKind) -> f64 {
        match kind {
            ActionKind::F => self.forward,
            ActionKind::B => self.backward,
            ActionKind::I => self.input,
            ActionKind::W => self.weight,
        }
    }

    /// That of all work of a row: a backward takes about twice its forward.
    pub(crate) fn of_all(&self) -> f64 {
        (self.forward + 2.0 * self.backward) / 3.0
    }
}

/// Factors on the predicted times. The default changes nothing.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Adjustment {
    /// By size of the encoder's samples, ascending; sizes that are not named take as long as predicted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub encoder: Vec<ShapeFactor>,
    /// The same of the LLM backbone.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub llm: Vec<ShapeFactor>,
    /// By row; empty where all take as long as predicted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rows: Vec<RowFactor>,
}

/// Slowness below which replicas count as equal, in thousandths of the usual replica.
const EQUAL: u32 = 50;

/// An adjustment with what follows from it for a layout.
#[derive(Debug, Clone)]
pub(crate) struct Adjusted {
    pub(crate) adjustment: Adjustment,
    /// Of each replica against the usual one of its component; `None` where all are equally fast.
    pub(crate) slowness: Option<Slowness>,
    /// What a component takes as a whole, over its rows.
    of_component: [f64; 2],
}

impl Adjustment {
    /// Whether it changes nothing.
    pub fn is_nothing(&self) -> bool {
        self.encoder.is_empty() && self.llm.is_empty() && self.rows.is_empty()
    }

    /// The first number that is none, or rows of another layout, in words.
    pub(crate) fn problem(&self, layout: &Layout) -> Option<String> {
        let num_rows = layout.num_rows() as usize;
        if !self.rows.is_empty() && self.rows.len() != num_rows {
            return Some(format!("`rows` has {}, the layout has {num_rows}", self.rows.len()));
        }
        let of_rows = self.rows.iter().flat_map(|row| [row.forward, row.backward, row.input, row.weight]);
        let of_shapes = self.encoder.iter().chain(&self.llm).map(|shape| shape.factor);
        let wrong = of_rows.chain(of_shapes).find(|factor| !(*factor > 0.0 && *factor <= 1e6));
        wrong.map(|factor| format!("a factor is {factor}, must be above 0 and at most 1000000"))
    }

    /// What a sample of so many tokens takes of its predicted time.
    fn of_tokens(&self, component: usize, tokens: u64) -> f64 {
        let shapes = if component == ENCODER { &self.encoder } else { &self.llm };
        let at = shapes.partition_point(|shape| shape.tokens_max < tokens);
        shapes.get(at).filter(|shape| shape.tokens_min <= tokens).map_or(1.0, |shape| shape.factor)
    }

    /// What a sample takes of its predicted time.
    fn of_sample(&self, component: usize, shape: &SampleShape) -> f64 {
        self.of_tokens(component, tokens(shape, component))
    }
}

impl Adjusted {
    pub(crate) fn new(adjustment: Adjustment, layout: &Layout) -> Self {
        let slowness = slowness(&adjustment, layout);
        let of_component = [ENCODER, LLM].map(|component| {
            let rows = rows_of(layout, component);
            let sum: f64 = rows.iter().flatten().map(|&row| of_row(&adjustment, row).of_all()).sum();
            sum / rows.iter().flatten().count().max(1) as f64
        });
        Self { adjustment, slowness, of_component }
    }

    /// What a sample costs a component, where it was predicted to cost `ns`.
    pub(crate) fn sample_ns(&self, component: usize, shape: &SampleShape, ns: u64) -> u64 {
        times(ns, self.of_component[component] * self.adjustment.of_sample(component, shape))
    }

    /// Corrects the predictions of one microbatch on all rows; `shapes` are those of all samples.
    pub(crate) fn apply(
        &self,
        layout: &Layout,
        shapes: &[SampleShape],
        llm: &[Vec<SampleIndex>],
        encoder: &[Vec<EncoderShare>],
        predictions: &mut [Prediction],
    ) {
        for (replica, of_group) in (0..).zip(by_group(encoder, layout.encoder.dp)) {
            let of_pack = match of_group {
                [only] => self.of_encoder(shapes, only),
                several => self.of_encoder(shapes, &several.concat()),
            };
            for stage in 0..layout.encoder.pp {
                self.correct(predictions, layout.row(replica, StageIndex(stage)), of_pack);
            }
        }
        for (replica, samples) in (0..).zip(llm) {
            let of_pack = self.of_llm(shapes, samples);
            for stage in layout.encoder.pp..layout.num_stages() {
                self.correct(predictions, layout.row(replica, StageIndex(stage)), of_pack);
            }
        }
    }

    /// What a pack of samples takes of its predicted time, each by its part of the tokens.
    fn of_llm(&self, shapes: &[SampleShape], samples: &[SampleIndex]) -> f64 {
        if self.adjustment.llm.is_empty() {
            return 1.0;
        }
        weighted(samples.iter().map(|&sample| {
            let tokens = tokens(&shapes[sample.index()], LLM);
            (tokens, self.adjustment.of_tokens(LLM, tokens))
        }))
    }

    /// The same of what an encoder replica encodes; a part of a sample counts as the sample that it is of.
    fn of_encoder(&self, shapes: &[SampleShape], encoded: &[EncoderShare]) -> f64 {
        if self.adjustment.encoder.is_empty() {
            return 1.0;
        }
        weighted(encoded.iter().map(|share| {
            let factor = self.adjustment.of_sample(ENCODER, &shapes[share.sample.index()]);
            (share_tokens(shapes, share), factor)
        }))
    }

    fn correct(&self, predictions: &mut [Prediction], row: usize, of_pack: f64) {
        let of_row = of_row(&self.adjustment, row);
        let Some(prediction) = predictions.get_mut(row) else { return };
        *prediction = Prediction {
            forward_ns: times(prediction.forward_ns, of_pack * of_row.forward),
            backward_ns: times(prediction.backward_ns, of_pack * of_row.backward),
            input_ns: times(prediction.input_ns, of_pack * of_row.input),
            weight_ns: times(prediction.weight_ns, of_pack * of_row.weight),
            ..*prediction
        };
    }
}

/// Encoder tokens of a share.
pub(crate) fn share_tokens(shapes: &[SampleShape], share: &EncoderShare) -> u64 {
    let whole = &shapes[share.sample.index()];
    share.parts.map_or_else(|| whole.encoder_tokens(), |parts| whole.share(parts).encoder_tokens())
}

fn weighted(parts: impl Iterator<Item = (u64, f64)>) -> f64 {
    let (tokens, sum) =
        parts.fold((0.0, 0.0), |(t, s), (tokens, f)| (t + tokens as f64, s + tokens as f64 * f));
    if tokens > 0.0 { sum / tokens } else { 1.0 }
}

fn times(ns: u64, factor: f64) -> u64 {
    // Most samples and rows take as long as predicted, and a number past 2^53 shall stay what it is.
    if factor.total_cmp(&1.0).is_eq() { ns } else { (ns as f64 * factor).round() as u64 }
}

fn of_row(adjustment: &Adjustment, row: usize) -> RowFactor {
    adjustment.rows.get(row).copied().unwrap_or(RowFactor::ONE)
}

/// Rows of a component: `[stage][replica]`; encoder replicas of one tensor group are one.
pub(crate) fn rows_of(layout: &Layout, component: usize) -> Vec<Vec<usize>> {
    let layout = layout.by_group();
    let (degrees, stages) = if component == ENCODER {
        (layout.encoder, 0..layout.encoder.pp)
    } else {
        (layout.llm, layout.encoder.pp..layout.num_stages())
    };
    let row =
        |stage: u32| (0..degrees.dp).map(move |replica| layout.row(replica, StageIndex(stage))).collect();
    stages.map(row).collect()
}

/// A replica is as slow as its slowest stage, against the usual rank of that stage; of two, the faster is the usual one.
fn slowness(adjustment: &Adjustment, layout: &Layout) -> Option<Slowness> {
    if adjustment.rows.is_empty() {
        return None;
    }
    let of = |component: usize| -> Vec<u32> {
        let stages = rows_of(layout, component);
        let replicas = stages.first().map_or(0, Vec::len);
        let mut slowness = vec![0u32; replicas];
        for rows in &stages {
            let taken: Vec<f64> = rows.iter().map(|&row| of_row(adjustment, row).of_all()).collect();
            let usual = median(&mut taken.clone()).unwrap_or(1.0);
            for (slowness, taken) in slowness.iter_mut().zip(taken) {
                *slowness = (*slowness).max((1_000.0 * taken / usual).round() as u32);
            }
        }
        slowness.iter().map(|&s| if s.abs_diff(1_000) <= EQUAL { 1_000 } else { s }).collect()
    };
    let found = Slowness { encoder: of(ENCODER), llm: of(LLM) };
    let is_even = |slowness: &[u32]| slowness.iter().all(|&s| s == 1_000);
    (!is_even(&found.encoder) || !is_even(&found.llm)).then_some(found)
}
