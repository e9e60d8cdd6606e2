//! The cost model: what a packed microbatch takes on the encoder and on a stage of the LLM backbone.

use crate::error::CostError;
use crate::grid::Curve;
use crate::memory::{MemoryModel, MemorySettings, RankPart};
use dflop_types::{
    EncoderSegments, MeasuredCurve, MicrobatchShape, ModelProfile, ModuleProfile, Network, SampleShape,
};

/// Predicted time of one microbatch on one stage.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Prediction {
    /// Forward, in nanoseconds; 0 for no work.
    pub forward_ns: u64,
    /// Backward (inputs and weights), in nanoseconds; 0 for no work.
    pub backward_ns: u64,
    /// Whether a curve was asked outside its measured range.
    pub extrapolated: bool,
}

impl Prediction {
    /// Forward and backward together, in nanoseconds.
    pub const fn total_ns(&self) -> u64 {
        self.forward_ns.saturating_add(self.backward_ns)
    }
}

/// The size of a microbatch on one replica around which the cost of a single sample is read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Typical {
    /// Encoder tokens of one encoder replica's share of a microbatch.
    pub encoder_tokens: u64,
    /// LLM tokens of a microbatch on one LLM replica.
    pub llm_tokens: u64,
    /// Label tokens of a microbatch on one LLM replica.
    pub label_tokens: u64,
}

/// The layers that one stage of the LLM backbone holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StageLayers {
    /// Layers of the stage.
    pub num_layers: u32,
    /// Whether it holds the embedding.
    pub is_first: bool,
    /// Whether it holds the final norm, the head and the loss.
    pub is_last: bool,
}

/// Points of one curve that had to be repaired because a larger size was measured faster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Repair {
    /// The module, as in `llm_layer`.
    pub module: &'static str,
    /// `linear` or `attention`.
    pub part: &'static str,
    /// `forward`, `backward` or `activation`.
    pub phase: &'static str,
    /// Points replaced.
    pub num_points: u32,
}

/// The three measured quantities of one part of a module.
#[derive(Debug, Clone)]
pub(crate) struct Phases {
    pub(crate) forward: Curve,
    pub(crate) backward: Curve,
    pub(crate) activation: Curve,
}

impl Phases {
    fn new(module: &'static str, part: &'static str, measured: &MeasuredCurve) -> Result<Self, CostError> {
        if let Some(point) = measured.points.iter().find(|p| p.forward_ns == 0 && p.size > 0) {
            return Err(CostError::ZeroTime { module, part, size: point.size });
        }
        let curve = |value: fn(&dflop_types::MeasuredPoint) -> u64| {
            Curve::new(measured.points.iter().map(|p| (p.size, value(p))))
                .map_err(|source| CostError::Curve { module, part, source })
        };
        Ok(Self {
            forward: curve(|p| p.forward_ns)?,
            backward: curve(|p| p.backward_ns)?,
            activation: curve(|p| p.activation_bytes)?,
        })
    }

    /// Adds `times` runs at `size`; nothing at size 0.
    fn add(&self, sum: &mut Prediction, size: u64, times: u64) {
        if size == 0 || times == 0 {
            return;
        }
        let (forward, backward) = (self.forward.at(size), self.backward.at(size));
        sum.forward_ns = sum.forward_ns.saturating_add(forward.value.saturating_mul(times));
        sum.backward_ns = sum.backward_ns.saturating_add(backward.value.saturating_mul(times));
        sum.extrapolated |= forward.extrapolated;
    }

    /// Forward and backward of one more run at `size`, in nanoseconds; 0 at size 0.
    fn whole_ns(&self, size: u64) -> u64 {
        if size == 0 { 0 } else { self.forward.at(size).value.saturating_add(self.backward.at(size).value) }
    }

    /// Forward and backward that `size` more tokens add to about `typical` tokens, in nanoseconds.
    fn marginal_ns(&self, size: u64, typical: u64) -> u64 {
        self.forward.marginal(size, typical).saturating_add(self.backward.marginal(size, typical))
    }

    /// No way to cut `size` tokens into parts takes less, in nanoseconds, but for the rounding of each part.
    pub(crate) fn ns_min(&self, size: u64) -> f64 {
        (self.forward.rate_min(size) + self.backward.rate_min(size)) * size as f64
    }
}

/// One measured module.
#[derive(Debug, Clone)]
pub(crate) struct Module {
    pub(crate) linear: Phases,
    /// `None` where the module has no attention, or where `linear` holds it.
    pub(crate) attention: Option<Phases>,
}

impl Module {
    fn new(profile: &ModelProfile, name: &'static str) -> Result<Self, CostError> {
        let module: &ModuleProfile =
            profile.modules.get(name).ok_or(CostError::MissingModule { module: name })?;
        let attention = if module.attention.points.is_empty() {
            None
        } else {
            Some(Phases::new(name, "attention", &module.attention)?)
        };
        Ok(Self { linear: Phases::new(name, "linear", &module.linear)?, attention })
    }

    fn add(&self, sum: &mut Prediction, total: u64, segments: impl Iterator<Item = (u64, u64)>, times: u64) {
        self.linear.add(sum, total, times);
        if let Some(attention) = &self.attention {
            for (count, tokens) in segments {
                attention.add(sum, tokens, count * times);
            }
        }
    }

    pub(crate) fn attention_ns(&self, segments: impl Iterator<Item = (u64, u64)>) -> u64 {
        self.attention.as_ref().map_or(0, |attention| {
            segments.map(|(count, tokens)| attention.whole_ns(tokens).saturating_mul(count)).sum()
        })
    }

    fn attention_bytes(&self, segments: impl Iterator<Item = (u64, u64)>) -> u64 {
        self.attention.as_ref().map_or(0, |attention| {
            segments
                .filter(|s| s.1 > 0)
                .map(|(count, tokens)| attention.activation.at(tokens).value.saturating_mul(count))
                .fold(0, u64::saturating_add)
        })
    }
}

pub(crate) fn segments_of(segments: &[EncoderSegments]) -> impl Iterator<Item = (u64, u64)> + Clone + '_ {
    segments.iter().map(|s| (u64::from(s.count), u64::from(s.tokens)))
}

pub(crate) fn samples_of(llm_tokens: &[u32]) -> impl Iterator<Item = (u64, u64)> + Clone + '_ {
    llm_tokens.iter().map(|&tokens| (1, u64::from(tokens)))
}

/// Durations and bytes predicted from a [`ModelProfile`].
///
/// ```text
/// encoder   = linear(encoder tokens) + sum over segments of attention(segment tokens)
/// llm stage = num_layers * (layer.linear(T) + sum over samples of layer.attention(t_i))
///           + embedding(T) if first + head(label tokens) if last,    T = sum of t_i
/// ```
///
/// Zero tokens take zero time; nothing shortens when a sample is added. The embedding and the head are taken
/// by their linear part alone.
///
/// *Not modelled*: contention between ranks of one device, caches, clock throttling, padding.
#[derive(Debug, Clone)]
pub struct CostModel {
    /// With how many of each the encoder has.
    pub(crate) encoder: Vec<(&'static str, Module, u64)>,
    pub(crate) embedding: Module,
    pub(crate) layer: Module,
    pub(crate) head: Module,
    pub(crate) num_llm_layers: u32,
    pub(crate) hidden_bytes: u64,
    pub(crate) network: Network,
    pub(crate) optimizer_ns_per_million: u64,
    pub(crate) memory: MemoryModel,
}

impl CostModel {
    /// The cost model of a profile.
    ///
    /// # Errors
    /// [`CostError`], by the name of the module and curve at fault.
    pub fn new(profile: &ModelProfile) -> Result<Self, CostError> {
        if profile.num_llm_layers() == 0 {
            return Err(CostError::NoLayers);
        }
        let mut encoder = Vec::new();
        for name in ["encoder_embedding", "encoder_layer", "projector"] {
            encoder.push((name, Module::new(profile, name)?, u64::from(profile.count(name))));
        }
        let window = ModelProfile::WINDOW_LAYER;
        if profile.modules.contains_key(window) {
            encoder.push((window, Module::new(profile, window)?, u64::from(profile.count(window))));
        }
        Ok(Self {
            encoder,
            embedding: Module::new(profile, "llm_embedding")?,
            layer: Module::new(profile, "llm_layer")?,
            head: Module::new(profile, "llm_head")?,
            num_llm_layers: profile.num_llm_layers(),
            hidden_bytes: profile.hidden_bytes,
            network: profile.network.clone(),
            optimizer_ns_per_million: profile.optimizer_ns_per_million,
            memory: MemoryModel::new(profile, &MemorySettings::default())?,
        })
    }

    /// Layers of the LLM backbone.
    pub const fn num_llm_layers(&self) -> u32 {
        self.num_llm_layers
    }

    /// Time of the encoder, projector included, for the segments of a microbatch.
    ///
    /// *Complexity*: O(s log n) for s segment groups and n measured points.
    pub fn encoder(&self, microbatch: &MicrobatchShape) -> Prediction {
        let mut sum = Prediction::default();
        for (_, module, count) in &self.encoder {
            let segments = segments_of(&microbatch.encoder_segments);
            module.add(&mut sum, microbatch.encoder_tokens(), segments, *count);
        }
        sum
    }

    /// Time of a run of layers of the LLM backbone for a microbatch; the embedding belongs to the first
    /// stage, final norm, logits and loss to the last.
    ///
    /// *Complexity*: O(s log n) for s samples and n measured points, whatever the number of layers.
    pub fn llm_stage(
        &self,
        microbatch: &MicrobatchShape,
        num_layers: u32,
        is_first: bool,
        is_last: bool,
    ) -> Prediction {
        let mut sum = Prediction::default();
        let total = microbatch.total_llm_tokens();
        self.layer.add(&mut sum, total, samples_of(&microbatch.llm_tokens), u64::from(num_layers));
        if is_first {
            self.embedding.linear.add(&mut sum, total, 1);
        }
        if is_last {
            self.head.linear.add(&mut sum, microbatch.label_tokens, 1);
        }
        sum
    }

    /// Forward and backward time that one sample adds to a microbatch of about `typical` size, in
    /// nanoseconds, on the encoder and on the whole LLM backbone.
    ///
    /// Additive, as a scheduler needs it: the linear part by its slope around `typical` (the launch floor is
    /// paid by the microbatch, not by the sample), the attention as it is.
    pub fn sample_cost(&self, sample: &SampleShape, typical: Typical) -> (u64, u64) {
        let whole = StageLayers { num_layers: self.num_llm_layers, is_first: true, is_last: true };
        (self.sample_encoder_ns(sample, typical), self.sample_stage_ns(sample, typical, whole))
    }

    /// Forward and backward time that one sample adds on the encoder, in nanoseconds; 0 for a text-only
    /// sample.
    pub fn sample_encoder_ns(&self, sample: &SampleShape, typical: Typical) -> u64 {
        self.over_encoder(|module| {
            module
                .linear
                .marginal_ns(sample.encoder_tokens(), typical.encoder_tokens)
                .saturating_add(module.attention_ns(segments_of(&sample.encoder_segments)))
        })
    }

    /// Forward and backward time that one sample adds on one stage of the LLM backbone, in nanoseconds.
    pub fn sample_stage_ns(&self, sample: &SampleShape, typical: Typical, stage: StageLayers) -> u64 {
        let tokens = u64::from(sample.llm_tokens);
        let layer = self
            .layer
            .linear
            .marginal_ns(tokens, typical.llm_tokens)
            .saturating_add(self.layer.attention_ns(std::iter::once((1, tokens))));
        let mut sum = layer.saturating_mul(u64::from(stage.num_layers));
        if stage.is_first {
            sum = sum.saturating_add(self.embedding.linear.marginal_ns(tokens, typical.llm_tokens));
        }
        if stage.is_last {
            let labels = u64::from(sample.label_tokens);
            sum = sum.saturating_add(self.head.linear.marginal_ns(labels, typical.label_tokens));
        }
        sum
    }

    /// Activation and boundary bytes that one sample adds on the encoder while its microbatch is in flight.
    pub fn sample_encoder_bytes(&self, sample: &SampleShape, typical: Typical) -> u64 {
        let kept = self.over_encoder(|module| {
            let attention = module.attention_bytes(segments_of(&sample.encoder_segments));
            let linear = module.linear.activation.marginal(sample.encoder_tokens(), typical.encoder_tokens);
            linear.saturating_add(attention)
        });
        kept + u64::from(sample.feature_tokens) * self.hidden_bytes
    }

    /// Activation and boundary bytes that one sample adds on a stage of the LLM backbone while its microbatch
    /// is in flight.
    pub fn sample_stage_bytes(&self, sample: &SampleShape, typical: Typical, stage: StageLayers) -> u64 {
        let tokens = u64::from(sample.llm_tokens);
        let layer = self.layer.linear.activation.marginal(tokens, typical.llm_tokens)
            + self.layer.attention_bytes(std::iter::once((1, tokens)));
        let mut sum = layer.saturating_mul(u64::from(stage.num_layers));
        let incoming = if stage.is_first { u64::from(sample.feature_tokens) } else { tokens };
        let outgoing = if stage.is_last { 0 } else { tokens };
        if stage.is_first {
            sum += self.embedding.linear.activation.marginal(tokens, typical.llm_tokens);
        }
        if stage.is_last {
            let labels = u64::from(sample.label_tokens);
            sum += self.head.linear.activation.marginal(labels, typical.label_tokens);
        }
        sum.saturating_add((incoming + outgoing).saturating_mul(self.hidden_bytes))
    }

    /// Time of reduction and optimizer on an encoder rank, in nanoseconds.
    pub fn encoder_tail_ns(&self) -> u64 {
        self.tail_ns(self.memory.num_parameters(RankPart::Encoder))
    }

    /// Time of reduction and optimizer on a rank of one stage of the LLM backbone, in nanoseconds.
    pub fn stage_tail_ns(&self, stage: StageLayers) -> u64 {
        self.tail_ns(self.memory.num_parameters(RankPart::Stage(stage)))
    }

    /// The sum of what `of_one` says of each module of the encoder, times how many of it there are.
    pub(crate) fn over_encoder(&self, of_one: impl Fn(&Module) -> u64) -> u64 {
        let times = |(_, module, count): &(_, Module, u64)| of_one(module).saturating_mul(*count);
        self.encoder.iter().map(times).fold(0, u64::saturating_add)
    }

    fn tail_ns(&self, num_parameters: u64) -> u64 {
        crate::grid::scale(num_parameters, self.optimizer_ns_per_million, 1_000_000)
    }

    /// Curves with points that had to be repaired; empty for a profile without noise.
    pub fn repairs(&self) -> Vec<Repair> {
        let llm = [("llm_embedding", &self.embedding), ("llm_layer", &self.layer), ("llm_head", &self.head)];
        let encoder = self.encoder.iter().map(|(name, module, _)| (*name, module));
        let mut repairs = Vec::new();
        for (module, measured) in encoder.chain(llm) {
            let parts = [("linear", Some(&measured.linear)), ("attention", measured.attention.as_ref())];
            for (part, phases) in parts.into_iter().filter_map(|(part, phases)| phases.map(|p| (part, p))) {
                for (phase, curve) in [
                    ("forward", &phases.forward),
                    ("backward", &phases.backward),
                    ("activation", &phases.activation),
                ] {
                    let num_points = curve.num_repaired();
                    if num_points > 0 {
                        repairs.push(Repair { module, part, phase, num_points });
                    }
                }
            }
        }
        repairs
    }

    /// Points over all curves that had to be repaired.
    pub fn num_repaired_points(&self) -> u32 {
        self.repairs().iter().map(|r| r.num_points).sum()
    }
}
