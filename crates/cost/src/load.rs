//! The load of one bucket, kept up to date sample by sample: what a scheduler asks that moves samples about.

use crate::cost::{CostModel, Prediction, StageLayers, segments_of};
use crate::module::Module;
use dflop_types::SampleShape;

/// Sums that nothing overflows, so that what was added can be taken off again exactly.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Total {
    forward_ns: u128,
    backward_ns: u128,
    input_ns: u128,
    weight_ns: u128,
    uncertainty_ns: u128,
    num_extrapolated: u64,
    num_assumed: u64,
}

impl Total {
    /// This sum after `change` of each of its parts by `times` runs of `one`.
    fn changed(
        self,
        one: &Prediction,
        times: u64,
        change: impl Fn(u128, u128) -> u128,
        count: impl Fn(u64, u64) -> u64,
    ) -> Self {
        let part = |sum: u128, ns: u64| change(sum, u128::from(ns) * u128::from(times));
        Self {
            forward_ns: part(self.forward_ns, one.forward_ns),
            backward_ns: part(self.backward_ns, one.backward_ns),
            input_ns: part(self.input_ns, one.input_ns),
            weight_ns: part(self.weight_ns, one.weight_ns),
            uncertainty_ns: part(self.uncertainty_ns, one.uncertainty_ns),
            num_extrapolated: count(self.num_extrapolated, u64::from(one.extrapolated)),
            num_assumed: count(self.num_assumed, u64::from(one.assumed)),
        }
    }

    /// The sum as one prediction.
    fn prediction(&self) -> Prediction {
        let clamp = |ns: u128| u64::try_from(ns).unwrap_or(u64::MAX);
        Prediction {
            forward_ns: clamp(self.forward_ns),
            backward_ns: clamp(self.backward_ns),
            input_ns: clamp(self.input_ns),
            weight_ns: clamp(self.weight_ns),
            uncertainty_ns: clamp(self.uncertainty_ns),
            extrapolated: self.num_extrapolated > 0,
            assumed: self.num_assumed > 0,
        }
    }
}

/// The samples of one bucket as the cost model sees them: sums, not samples.
///
/// Adding and taking off a sample costs what its own segments cost, whatever else the bucket holds, and the
/// predictions equal those of [`CostModel::encoder`] and [`CostModel::llm_stage`] for the packed samples, to the
/// nanosecond.
///
/// ```
/// # use dflop_cost::CostModel;
/// # use dflop_types::{MicrobatchShape, SampleShape};
/// # fn demo(model: &CostModel, samples: &[SampleShape; 2]) {
/// let mut load = model.load();
/// load.add(&samples[0]);
/// load.add(&samples[1]);
/// load.remove(&samples[0]);
/// assert_eq!(load.encoder(), model.encoder(&MicrobatchShape::pack([&samples[1]])));
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Load<'model> {
    model: &'model CostModel,
    num_samples: u64,
    encoder_tokens: u64,
    llm_tokens: u64,
    label_tokens: u64,
    /// Attention of all segments in all layers of the encoder.
    encoder: Total,
    /// Attention of all samples in one layer of the LLM backbone.
    layer: Total,
}

const ADDED: &str = "a sample that is taken off was added before";

impl Load<'_> {
    /// Samples in the bucket.
    pub const fn num_samples(&self) -> u64 {
        self.num_samples
    }

    /// Adds a sample.
    ///
    /// *Complexity*: O(s log n) for the s segment groups of the sample and n measured points; nothing is allocated.
    pub fn add(&mut self, sample: &SampleShape) {
        self.num_samples += 1;
        self.encoder_tokens += sample.encoder_tokens();
        self.llm_tokens += u64::from(sample.llm_tokens);
        self.label_tokens += u64::from(sample.label_tokens);
        let model = self.model;
        for_segments(model, sample, |one, times| {
            self.encoder = self.encoder.changed(one, times, |a, b| a + b, |a, b| a + b);
        });
        if let Some(one) = of_layer(&model.layer, sample) {
            self.layer = self.layer.changed(&one, 1, |a, b| a + b, |a, b| a + b);
        }
    }

    /// Takes off a sample.
    ///
    /// *Complexity*: as [`Load::add`].
    ///
    /// # Panics
    /// If the bucket holds less than the sample: it was not added before.
    pub fn remove(&mut self, sample: &SampleShape) {
        let less = |sum: u64, part: u64| sum.checked_sub(part).expect(ADDED);
        let shorter = |sum: u128, part: u128| sum.checked_sub(part).expect(ADDED);
        self.num_samples = less(self.num_samples, 1);
        self.encoder_tokens = less(self.encoder_tokens, sample.encoder_tokens());
        self.llm_tokens = less(self.llm_tokens, u64::from(sample.llm_tokens));
        self.label_tokens = less(self.label_tokens, u64::from(sample.label_tokens));
        let model = self.model;
        for_segments(model, sample, |one, times| {
            self.encoder = self.encoder.changed(one, times, shorter, less);
        });
        if let Some(one) = of_layer(&model.layer, sample) {
            self.layer = self.layer.changed(&one, 1, shorter, less);
        }
    }

    /// Time of the encoder, projector included, for the samples of the bucket.
    ///
    /// *Complexity*: O(log n), however many samples there are.
    pub fn encoder(&self) -> Prediction {
        let mut sum = self.model.encoder_linear(self.encoder_tokens);
        sum.add(&self.encoder.prediction(), 1);
        sum
    }

    /// Time of one stage of the LLM backbone for the samples of the bucket.
    ///
    /// *Complexity*: O(log n), however many samples there are.
    pub fn stage(&self, stage: StageLayers) -> Prediction {
        let mut sum = self.model.stage_linear(self.llm_tokens, self.label_tokens, stage);
        sum.add(&self.layer.prediction(), u64::from(stage.num_layers));
        sum
    }
}

/// Calls `each` with the attention of one segment and how often the sample runs it in the encoder.
fn for_segments(model: &CostModel, sample: &SampleShape, mut each: impl FnMut(&Prediction, u64)) {
    for (_, module, count) in model.encoder.iter().filter(|(_, module, _)| module.looks_at_segments()) {
        for (segments, tokens) in segments_of(&sample.encoder_segments).filter(|s| s.0 > 0) {
            each(&module.segment(tokens), segments * count);
        }
    }
}

fn of_layer(layer: &Module, sample: &SampleShape) -> Option<Prediction> {
    layer.looks_at_segments().then(|| layer.segment(u64::from(sample.llm_tokens)))
}

impl CostModel {
    /// An empty bucket.
    pub fn load(&self) -> Load<'_> {
        Load {
            model: self,
            num_samples: 0,
            encoder_tokens: 0,
            llm_tokens: 0,
            label_tokens: 0,
            encoder: Total::default(),
            layer: Total::default(),
        }
    }
}
