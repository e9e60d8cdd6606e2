//! The cost model: what a packed microbatch takes on the encoder and on a stage of the LLM backbone.

use crate::choice::Choice;
use crate::error::CostError;
use crate::memory::holding::Holding;
use crate::module::{Module, in_forward, is_layer};
use crate::network::{Group, Links, Route, Transfer};
use crate::prediction::Prediction;
use crate::repair::Repair;
use crate::settings::CostSettings;
use crate::stage::{EncoderLayers, StageLayers, samples_of, segments_of};
use dflop_types::{Collective, LinkSpan, MicrobatchShape, ModelProfile, Recompute, Tower, TowerTokens};

/// Durations and bytes predicted from a [`ModelProfile`].
///
/// ```text
/// encoder   = sum over its modules of count * (linear(encoder tokens)
///           + sum over segments of attention(segment tokens))
/// llm stage = num_layers * (layer.linear(T) + sum over samples of layer.attention(t_i))
///           + embedding(T) if first + head(label tokens) if last,    T = sum of t_i
/// ```
///
/// for each of F, B, I and W. Zero tokens take zero time; adding a sample never makes a time smaller. Only the linear
/// part of the embedding and the head is used.
///
/// What each module runs follows the [`CostSettings`]:
///
/// ```text
/// trained                        F, B, I and W as measured
/// frozen, trains before it       F, and I as the whole backward
/// frozen, nothing before it      F
/// trained, nothing before it     F, and B as W: of I only the very first product is saved, which no measurement shows
/// recomputed                     B and I longer by the measured extra time, and by the forward of attention in `full`
/// `full:K`                       the first K layers of a stage as in `full`, its others as in `selective`
/// `selective:K`                  the first K layers of a stage as in `selective`, its others keep everything
/// cut over ranks                 the variant of that degree; with the all-reduces where they are not in it
/// ```
///
/// *Not modelled*: contention between ranks of one device, caches, clock throttling, padding.
#[derive(Debug, Clone)]
pub struct CostModel {
    /// Modules of the encoder in the order of the forward, with how many of each it has.
    pub(crate) encoder: Vec<(&'static str, Module, u64)>,
    pub(crate) embedding: Module,
    /// A layer of the LLM backbone, but for those of `first`.
    pub(crate) layer: Module,
    pub(crate) first: FirstLayers,
    pub(crate) head: Module,
    pub(crate) num_llm_layers: u32,
    pub(crate) hidden_bytes: u64,
    /// Of a feature as it leaves the encoder; at least `hidden_bytes`.
    pub(crate) feature_bytes: u64,
    /// Of an encoder token between two layers of the encoder.
    pub(crate) encoder_hidden_bytes: u64,
    pub(crate) is_tied: bool,
    compiles_layers: bool,
    pub(crate) links: Links,
    /// Ranks of a node; `None`: not known.
    pub(crate) ranks_per_node: Option<u32>,
    /// From stage to stage: inside a node, and to another one.
    pub(crate) message: [Route; 2],
    pub(crate) settings: CostSettings,
    pub(crate) optimizer_ns_per_million: u64,
    pub(crate) holding: Holding,
}

/// Layers as they run where the first ones of each stage recompute more than its others. How many these are
/// says the mode of the component; without such a mode nothing stands here.
#[derive(Debug, Clone, Default)]
pub(crate) struct FirstLayers {
    /// Of the encoder, by name.
    pub(crate) encoder: Vec<(&'static str, Module)>,
    llm: Option<Module>,
}

impl FirstLayers {
    fn new(choice: &Choice<'_>, encoder: &[(&'static str, Module, u64)]) -> Result<Self, CostError> {
        let [of_encoder, of_llm] = [choice.settings.encoder, choice.settings.llm].map(|of| of.recompute);
        let is_mixed = |mode: Recompute| mode.first_layers_wanted() > 0;
        let mut first = Self::default();
        if is_mixed(of_encoder) {
            for (name, ..) in encoder.iter().filter(|(name, ..)| is_layer(name)) {
                first.encoder.push((name, choice.encoder(name, of_encoder.of_first())?));
            }
        }
        if is_mixed(of_llm) {
            first.llm = Some(choice.llm("llm_layer", of_llm.of_first())?);
        }
        Ok(first)
    }
}

impl CostModel {
    /// The cost model of a profile, where everything trains, nothing is recomputed and no layer is cut.
    ///
    /// # Errors
    /// As [`CostModel::with`].
    pub fn new(profile: &ModelProfile) -> Result<Self, CostError> {
        Self::with(profile, &CostSettings::default())
    }

    /// The cost model of a profile under these settings.
    ///
    /// # Errors
    /// [`CostError`], by the name of the module and curve at fault, and by what was measured where the settings ask for
    /// something else.
    pub fn with(profile: &ModelProfile, settings: &CostSettings) -> Result<Self, CostError> {
        let links = Links::new(&profile.network)?;
        let choice = Choice { profile, settings, links: &links };
        let [of_encoder, of_llm] = [settings.encoder, settings.llm].map(|of| of.recompute.of_rest());
        let mut encoder = Vec::new();
        let names = ["encoder_embedding", "encoder_layer", "projector"];
        // A text-only model has none of them, and its encoder takes no time.
        let has_encoder = names.iter().any(|name| profile.modules.contains_key(*name));
        for name in names.into_iter().filter(|_| has_encoder) {
            encoder.push((name, choice.encoder(name, of_encoder)?, u64::from(profile.count(name))));
        }
        let window = ModelProfile::WINDOW_LAYER;
        if profile.modules.contains_key(window) {
            encoder.push((window, choice.encoder(window, of_encoder)?, u64::from(profile.count(window))));
        }
        if profile.modules.contains_key(ModelProfile::SECOND_TOWER[1]) {
            for name in ModelProfile::SECOND_TOWER {
                encoder.push((name, choice.encoder(name, of_encoder)?, u64::from(profile.count(name))));
            }
        }
        let [embedding, layer, head] =
            ["llm_embedding", "llm_layer", "llm_head"].map(|name| choice.llm(name, of_llm));
        let (embedding, layer, head) = (embedding?, layer?, head?);
        let first = FirstLayers::new(&choice, &encoder)?;
        let empty = encoder.iter().find(|(_, _, count)| *count == 0).map(|(name, _, _)| *name);
        encoder.sort_by_key(|(name, module, _)| in_forward(name, module));
        let num_llm_layers = profile.num_llm_layers();
        if let Some(module) = empty.or_else(|| (num_llm_layers == 0).then_some("llm_layer")) {
            return Err(CostError::ZeroCount { module });
        }
        Ok(Self {
            encoder,
            embedding,
            layer,
            first,
            head,
            num_llm_layers,
            hidden_bytes: profile.hidden_bytes,
            feature_bytes: profile.feature_bytes.max(profile.hidden_bytes),
            encoder_hidden_bytes: encoder_hidden_bytes(profile),
            is_tied: profile.is_tied,
            compiles_layers: profile.device.compiles_layers,
            message: [LinkSpan::Node, LinkSpan::Cluster]
                .map(|span| links.route(Collective::PointToPoint, span, 2)),
            links,
            ranks_per_node: None,
            settings: *settings,
            optimizer_ns_per_million: profile.optimizer_ns_per_million,
            holding: Holding::new(profile)?,
        })
    }

    /// The same model with gradients of so many bytes a parameter, as where they are summed in float32 beside parameters
    /// of 16 bit; without this they have the dtype of the profile.
    #[must_use]
    pub const fn with_gradients_of(mut self, bytes_per_parameter: u64) -> Self {
        self.holding.gradient_bytes_per_parameter = Some(bytes_per_parameter);
        self
    }

    /// The same model for nodes of so many ranks, numbered node by node: groups that lie in a node meet over its links, and
    /// those that do not use the network of all their ranks. Without this every group is taken to meet over the widest
    /// links that are known, one rank on each node.
    #[must_use]
    pub const fn with_ranks_per_node(mut self, ranks_per_node: u32) -> Self {
        self.ranks_per_node = Some(ranks_per_node);
        self
    }

    /// Ranks of a node; `None`: not known.
    pub const fn ranks_per_node(&self) -> Option<u32> {
        self.ranks_per_node
    }

    /// The settings it was made with.
    pub const fn settings(&self) -> &CostSettings {
        &self.settings
    }

    /// Layers of the LLM backbone.
    pub const fn num_llm_layers(&self) -> u32 {
        self.num_llm_layers
    }

    /// Whether embedding and head are one matrix.
    pub const fn is_tied(&self) -> bool {
        self.is_tied
    }

    /// Whether a backward may run as I and W: the profile holds both for every module that has a backward, and its layers
    /// are not compiled. A compiled backward is one piece; the I of such a profile is only for what is frozen.
    pub fn has_split(&self) -> bool {
        !self.compiles_layers && self.modules().all(|(_, module)| module.has_split)
    }

    /// All modules by name.
    pub(crate) fn modules(&self) -> impl Iterator<Item = (&'static str, &Module)> {
        let llm = [("llm_embedding", &self.embedding), ("llm_layer", &self.layer), ("llm_head", &self.head)];
        self.encoder.iter().map(|(name, module, _)| (*name, module)).chain(llm)
    }

    /// Time of the encoder, projector included, for the segments of a microbatch.
    ///
    /// *Complexity*: O(s log n) for s segment groups and n measured points; nothing is allocated.
    pub fn encoder(&self, microbatch: &MicrobatchShape) -> Prediction {
        self.encoder_stage(microbatch, self.whole_encoder())
    }

    /// As [`CostModel::encoder`], of one stage.
    pub fn encoder_stage(&self, microbatch: &MicrobatchShape, stage: EncoderLayers) -> Prediction {
        let mut sum = Prediction::default();
        let tokens = microbatch.tower_tokens();
        for (_, module, count) in self.encoder_modules_of(stage) {
            sum.add(&module.linear(tokens[module.tower.index()]), count);
            sum.add(&module.segments(segments_of(&microbatch.encoder_segments, module.tower)), count);
        }
        sum
    }

    /// Time of a run of layers of the LLM backbone for a microbatch; the embedding belongs to the first
    /// stage, final norm, logits and loss to the last.
    ///
    /// *Complexity*: O(s log n) for s samples and n measured points, whatever the number of layers; nothing is
    /// allocated.
    pub fn llm_stage(
        &self,
        microbatch: &MicrobatchShape,
        num_layers: u32,
        is_first: bool,
        is_last: bool,
    ) -> Prediction {
        let stage = StageLayers { num_layers, is_first, is_last };
        let mut sum = self.stage_linear(microbatch.total_llm_tokens(), microbatch.label_tokens, stage);
        for (layer, count) in self.layers_of(num_layers) {
            sum.add(&layer.segments(samples_of(&microbatch.llm_tokens)), count);
        }
        sum
    }

    /// Time of the encoder, projector included, over these tokens without attention.
    pub fn encoder_linear(&self, tokens: TowerTokens) -> Prediction {
        self.encoder_stage_linear(tokens, self.whole_encoder())
    }

    /// As [`CostModel::encoder_linear`], of one stage.
    pub fn encoder_stage_linear(&self, tokens: TowerTokens, stage: EncoderLayers) -> Prediction {
        let mut sum = Prediction::default();
        for (_, module, count) in self.encoder_modules_of(stage) {
            sum.add(&module.linear(tokens[module.tower.index()]), count);
        }
        sum
    }

    /// Time of a stage of the LLM backbone over these tokens without attention.
    pub fn stage_linear(&self, tokens: u64, label_tokens: u64, stage: StageLayers) -> Prediction {
        let mut sum = Prediction::default();
        for (layer, count) in self.layers_of(stage.num_layers) {
            sum.add(&layer.linear(tokens), count);
        }
        if stage.is_first {
            sum.add(&self.embedding.linear(tokens), 1);
        }
        if stage.is_last {
            sum.add(&self.head.linear(label_tokens), 1);
        }
        sum
    }

    /// Time of the gradients' reduction over `dp` replicas and of the optimizer on an encoder rank.
    pub fn encoder_tail(&self, dp: u32) -> Transfer {
        self.encoder_stage_tail(self.whole_encoder(), dp)
    }

    /// As [`CostModel::encoder_tail`], of a rank of one stage of the encoder.
    pub fn encoder_stage_tail(&self, stage: EncoderLayers, dp: u32) -> Transfer {
        let number = self.over_encoder_stage(stage, |module| module.num_trained_parameters);
        self.tail(number, self.over_encoder_stage(stage, |module| module.gradient_bytes), Group::of(dp))
    }

    /// Time of the gradients' reduction over `dp` replicas and of the optimizer on a rank of one stage of the LLM
    /// backbone.
    pub fn stage_tail(&self, stage: StageLayers, dp: u32) -> Transfer {
        let number = self.over_stage(stage, |module| module.num_trained_parameters);
        self.tail(number, self.stage_gradient_bytes(stage), Group::of(dp))
    }

    /// Bytes of the gradients of a rank of one stage of the LLM backbone.
    pub(crate) fn stage_gradient_bytes(&self, stage: StageLayers) -> u64 {
        match self.holding.gradient_bytes_per_parameter {
            None => self.over_stage(stage, |module| module.gradient_bytes),
            Some(bytes) => {
                self.over_stage(stage, |module| module.num_trained_parameters).saturating_mul(bytes)
            }
        }
    }

    /// All layers of the LLM backbone, with embedding and head.
    pub const fn whole_stage(&self) -> StageLayers {
        StageLayers { num_layers: self.num_llm_layers, is_first: true, is_last: true }
    }

    /// Time of the gradients' reduction over `dp` replicas of the whole model and of the optimizer, whose states are cut
    /// over `sharding_degree` ranks (at least 1). Where they are cut, gradients are reduced to their owners and
    /// parameters gathered from them: as many bytes as in one all-reduce.
    pub fn whole_tail(&self, dp: u32, sharding_degree: u32) -> Transfer {
        let stage = self.whole_stage();
        let number = |module: &Module| module.num_trained_parameters;
        let bytes = |module: &Module| module.gradient_bytes;
        let num_parameters = self.over_encoder(number).saturating_add(self.over_stage(stage, number));
        let gradient_bytes = self.over_encoder(bytes).saturating_add(self.over_stage(stage, bytes));
        self.tail(num_parameters.div_ceil(u64::from(sharding_degree.max(1))), gradient_bytes, Group::of(dp))
    }

    /// One all-reduce of all gradients over `group`, and the optimizer.
    pub(crate) fn tail(&self, num_parameters: u64, gradient_bytes: u64, group: Group) -> Transfer {
        let optimizer_ns = crate::grid::scale(num_parameters, self.optimizer_ns_per_million, 1_000_000);
        let reduction = self.meeting(Collective::AllReduce, group, gradient_bytes);
        Transfer { ns: reduction.ns.saturating_add(optimizer_ns), basis: reduction.basis }
    }

    /// Layers of the encoder that can be dealt out to stages, those that attend within windows included. Of two encoders they
    /// are those of the first: layers of the second go with them.
    pub fn num_encoder_layers(&self) -> u32 {
        u32::try_from(self.num_layers_of(Tower::First)).unwrap_or(u32::MAX)
    }

    /// All layers of one encoder.
    fn num_layers_of(&self, tower: Tower) -> u64 {
        let layers = self.encoder.iter().filter(|(name, module, _)| is_layer(name) && module.tower == tower);
        layers.map(|(_, _, count)| count).sum()
    }

    /// All layers of the encoder, with what stands before and behind them.
    pub fn whole_encoder(&self) -> EncoderLayers {
        let num_layers = self.num_encoder_layers();
        EncoderLayers { first_layer: 0, num_layers, is_first: true, is_last: true }
    }

    /// Whether the first layers of an encoder stage recompute more than its others.
    pub(crate) const fn has_first_layers(&self) -> bool {
        !self.first.encoder.is_empty()
    }

    /// The layers of a stage of the LLM backbone that has `num_layers`, in the order of the forward: each kind with how many
    /// of it there are, which is not 0.
    pub(crate) fn layers_of(&self, num_layers: u32) -> impl Iterator<Item = (&Module, u64)> {
        let num_first =
            self.first.llm.as_ref().map_or(0, |_| self.settings.llm.recompute.first_layers(num_layers));
        let first = self.first.llm.iter().map(move |layer| (layer, u64::from(num_first)));
        let rest = std::iter::once((&self.layer, u64::from(num_layers - num_first)));
        first.chain(rest).filter(|(_, count)| *count > 0)
    }

    /// The modules of a stage of the encoder by name, with how many of each it holds; layers that recompute more than
    /// others come first. Where some layers attend within
    /// windows and some do not, either kind is taken to be spread evenly, a layer without windows behind those with: so
    /// it is in Qwen2.5-VL. So are the layers of a second encoder over those of the first, in training too.
    pub(crate) fn encoder_modules_of(
        &self,
        stage: EncoderLayers,
    ) -> impl Iterator<Item = (&'static str, &Module, u64)> {
        let all = self.num_layers_of(Tower::First).max(1);
        let full = self.encoder.iter().find(|(name, ..)| *name == "encoder_layer").map_or(0, |m| m.2);
        let before = |layer: u64| layer * full / all;
        let (first, number) = (u64::from(stage.first_layer), u64::from(stage.num_layers));
        let num_full = before(first + number) - before(first);
        let num_first = if self.has_first_layers() {
            u64::from(self.settings.encoder.recompute.first_layers(number as u32))
        } else {
            0
        };
        let first_full = before(first + num_first) - before(first);
        let firsts = self.first.encoder.iter().map(move |(name, module)| {
            let held = match *name {
                "encoder_layer" => first_full,
                ModelProfile::WINDOW_LAYER => num_first - first_full,
                // A second encoder stands behind the first, whose layers alone recompute more than others.
                _ => 0,
            };
            (*name, module, held)
        });
        firsts.chain(self.encoder.iter().map(move |(name, module, count)| {
            let held = match *name {
                "encoder_layer" => num_full - first_full,
                ModelProfile::WINDOW_LAYER => (number - num_full) - (num_first - first_full),
                name if is_layer(name) => (first + number) * count / all - first * count / all,
                name if ModelProfile::is_projector(name) => u64::from(stage.is_last) * count,
                _ => u64::from(stage.is_first) * count,
            };
            (*name, module, held)
        }))
    }

    /// The sum of what `of_one` says of each module of the encoder, times how many of it there are.
    pub(crate) fn over_encoder(&self, of_one: impl Fn(&Module) -> u64) -> u64 {
        self.over_encoder_stage(self.whole_encoder(), of_one)
    }

    /// As [`CostModel::over_encoder`], of one stage.
    pub(crate) fn over_encoder_stage(&self, stage: EncoderLayers, of_one: impl Fn(&Module) -> u64) -> u64 {
        let modules = self.encoder_modules_of(stage);
        modules.map(|(_, module, count)| of_one(module).saturating_mul(count)).fold(0, u64::saturating_add)
    }

    /// The sum of what `of_one` says of the parameters of each module of a stage of the LLM backbone; a matrix that
    /// embedding and head share counts once.
    pub(crate) fn over_stage(&self, stage: StageLayers, of_one: impl Fn(&Module) -> u64) -> u64 {
        let has_embedding = stage.is_first && !self.shares_matrix(stage);
        let mut sum = of_one(&self.layer).saturating_mul(u64::from(stage.num_layers));
        for (module, is_held) in [(&self.embedding, has_embedding), (&self.head, stage.is_last)] {
            if is_held {
                sum = sum.saturating_add(of_one(module));
            }
        }
        sum
    }

    /// Whether the stage has embedding and head, and both are one matrix.
    pub(crate) fn shares_matrix(&self, stage: StageLayers) -> bool {
        // A head that is cut over ranks cannot share its matrix with a whole embedding: then there are two matrices.
        let is_one = self.is_tied && self.head.num_parameters >= self.embedding.num_parameters;
        is_one && stage.is_first && stage.is_last
    }

    /// Curves with points that had to be repaired; empty for a profile without noise.
    pub fn repairs(&self) -> Vec<Repair> {
        let mut repairs: Vec<Repair> =
            self.modules().flat_map(|(_, module)| module.repairs.iter().cloned()).collect();
        // The same curves as those of other layers, but for recomputation.
        let firsts = self.first.encoder.iter().map(|(_, module)| module).chain(&self.first.llm);
        for repair in firsts.flat_map(|module| &module.repairs) {
            if !repairs.contains(repair) {
                repairs.push(repair.clone());
            }
        }
        repairs.extend(self.links.repairs());
        repairs
    }

    /// Points over all curves that had to be repaired.
    pub fn num_repaired_points(&self) -> u32 {
        self.repairs().iter().map(|r| r.num_points).sum()
    }
}

/// Bytes of an encoder token between two layers of the encoder: what a layer keeps that keeps its input alone. Where
/// that was not measured, as many as in the LLM backbone, which is wider than encoders are.
fn encoder_hidden_bytes(profile: &ModelProfile) -> u64 {
    let layer = profile.modules.get("encoder_layer");
    let inputs = layer.and_then(|layer| layer.recompute.get(&Recompute::Full)?.last());
    let of_one = inputs.map(|point| point.activation_bytes.div_ceil(point.size.max(1)));
    of_one.filter(|&bytes| bytes > 0).unwrap_or(profile.hidden_bytes)
}
