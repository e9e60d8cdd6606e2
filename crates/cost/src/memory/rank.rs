//! What a rank holds, by its role (an encoder, a stage of it, a stage of the LLM): independently of the samples, and for one microbatch.

use crate::cost::CostModel;
use crate::memory::bytes::{RankMemory, RankMicrobatch, RankRole};
use crate::memory::footprint::Bytes;
use crate::memory::walk::{End, Gathered, GatheredEnd, MicrobatchBytes, Piece};
use crate::module::{Module, gradient_bytes, in_forward, is_layer};
use crate::sharding::Sharding;
use crate::stage::{EncoderLayers, StageLayers, samples_of, segments_of};
use dflop_types::{ModelProfile, Zero};

/// Bytes of a token's id, position, target (64 bits each) and mask, which every stage gets.
const INPUT_BYTES: u64 = 25;

/// Whether of two neighbours in the order of the forward the second reads what the first makes: not if it begins another
/// encoder.
fn is_read_by(name: &str, next: &str) -> bool {
    ModelProfile::tower_of(name) == ModelProfile::tower_of(next)
}

impl CostModel {
    /// The modules of a stage of the encoder in the order of the forward, with how many of each it has.
    pub(crate) fn encoder_modules(&self, stage: EncoderLayers) -> Vec<(&'static str, &Module, u64)> {
        let mut held: Vec<_> = self.encoder_modules_of(stage).filter(|held| held.2 > 0).collect();
        // Of the layers those come first that recompute everything beside others that do not.
        if self.has_first_layers() {
            held.sort_by_key(|(name, module, _)| in_forward(name, module));
        }
        held
    }

    /// What a rank holds independently of the samples, with its optimizer states cut over `sharding_degree` ranks (at
    /// least 1; 1: not cut). Its workspace is the workspace of the optimizer.
    pub fn fixed_memory(&self, role: RankRole, sharding_degree: u32) -> RankMemory {
        let sum = |of_one: fn(&Module) -> u64| match role {
            RankRole::Encoder => self.over_encoder(of_one),
            RankRole::EncoderStage(stage) => self.over_encoder_stage(stage, of_one),
            RankRole::Stage(stage) => self.over_stage(stage, of_one),
        };
        let num_trained = sum(|module| module.num_trained_parameters);
        let gradient_bytes = match self.holding.gradient_bytes_per_parameter {
            None => sum(|module| module.gradient_bytes),
            Some(bytes) => num_trained.saturating_mul(bytes),
        };
        let of_experts = sum(|module| module.dealt.num_trained);
        let states_of = |number: u64| number.saturating_mul(self.holding.optimizer_bytes_per_parameter);
        let part = |all: u64, of_experts: u64| self.part(all, of_experts, sharding_degree);
        RankMemory {
            parameter_bytes: sum(|module| module.parameter_bytes),
            gradient_bytes,
            optimizer_bytes: part(states_of(num_trained), states_of(of_experts)),
            // AdamW over all tensors at once: the denominators of the update.
            workspace_bytes: part(gradient_bytes, self.gradients_of(of_experts)),
            context_bytes: self.holding.reserve.context_bytes,
            ..RankMemory::default()
        }
    }

    /// As [`CostModel::fixed_memory`], on a replica of `sharding`.
    ///
    /// ```text
    ///             parameters    gradients    optimizer states    gathered
    /// zero 0      P             G            S
    /// zero 1, 2   P + P / n     G            S / n
    /// zero 3      P / n         G / n        S / n               two layers, and what is no unit
    /// ```
    ///
    /// over n replicas. Ranks update their part of the parameters, which exists beside the gathered ones. In bfloat16 that
    /// part is float32: the master of what trains, which is among the states, and of what is frozen 4 bytes a
    /// parameter. Gradients are cut once a step under zero 2 as under zero 1, when all microbatches have
    /// added theirs. Experts that are dealt out have fewer replicas, so that their parts are larger. Under zero 3, what is whole while layers run is counted here; embedding and head add to it where they run.
    pub fn sharded_memory(&self, role: RankRole, sharding: Sharding) -> RankMemory {
        let whole = self.fixed_memory(role, sharding.degree);
        if sharding.zero == Zero::Nothing || sharding.degree < 2 {
            return self.fixed_memory(role, 1);
        }
        let part = |all: u64, of_experts: u64| self.part(all, of_experts, sharding.degree);
        let of_all = |of_one: fn(&Module) -> u64| match role {
            RankRole::Encoder => self.over_encoder(of_one),
            RankRole::EncoderStage(stage) => self.over_encoder_stage(stage, of_one),
            RankRole::Stage(stage) => self.over_stage(stage, of_one),
        };
        let own_bytes = if self.holding.has_masters {
            let frozen = of_all(|module| module.num_parameters - module.num_trained_parameters);
            let of_experts = of_all(|module| module.dealt.num_parameters - module.dealt.num_trained);
            part(gradient_bytes(frozen), gradient_bytes(of_experts))
        } else {
            part(whole.parameter_bytes, of_all(|module| module.dealt.parameter_bytes))
        };
        if sharding.zero < Zero::Parameters {
            return RankMemory { parameter_bytes: whole.parameter_bytes.saturating_add(own_bytes), ..whole };
        }
        let of_experts = self.gradients_of(of_all(|module| module.dealt.num_trained));
        RankMemory {
            parameter_bytes: own_bytes,
            gradient_bytes: part(whole.gradient_bytes, of_experts),
            gathered_bytes: self.gathered(role, sharding).layers,
            ..whole
        }
    }

    /// Bytes of the gradients of so many parameters.
    fn gradients_of(&self, number: u64) -> u64 {
        let given = self.holding.gradient_bytes_per_parameter;
        given.map_or_else(|| gradient_bytes(number), |bytes| number.saturating_mul(bytes))
    }

    /// The part of a rank where replicas keep one of `degree` parts each: of what `of_experts` says, which is among `all`, fewer
    /// ranks have replicas where experts are dealt out, so that the parts are larger.
    ///
    /// ```text
    /// (all - experts) / n + experts / (n / ep)      over n replicas, ep ranks of an expert group
    /// ```
    fn part(&self, all: u64, of_experts: u64, degree: u32) -> u64 {
        let replicas = (degree / self.settings.llm.expert_parallel_degree.max(1)).max(1);
        let rest = all.saturating_sub(of_experts).div_ceil(u64::from(degree.max(1)));
        rest.saturating_add(of_experts.div_ceil(u64::from(replicas)))
    }

    /// What is whole on a rank of `role` for a while, by what runs; nothing where parameters are not cut.
    pub(crate) fn gathered(&self, role: RankRole, sharding: Sharding) -> Gathered {
        if !sharding.gathers_layers() {
            return Gathered::default();
        }
        match role {
            RankRole::Encoder => self.gathered_encoder(self.whole_encoder()),
            RankRole::EncoderStage(stage) => self.gathered_encoder(stage),
            RankRole::Stage(stage) => self.gathered_stage(stage),
        }
    }

    fn gathered_encoder(&self, stage: EncoderLayers) -> Gathered {
        let of = |of_one: fn(&Module) -> u64| {
            let all = self.over_encoder_stage(stage, of_one);
            let layers = self.encoder_layers(stage, of_one);
            let of_layers = layers
                .iter()
                .fold(0, |sum: u64, (one, count)| sum.saturating_add(one.saturating_mul(*count)));
            let held = layers.iter().filter(|(_, count)| *count > 0);
            let largest = held.map(|(one, _)| *one).max().unwrap_or(0);
            all.saturating_sub(of_layers).saturating_add(largest.saturating_mul(2)).min(all)
        };
        let layers = of(|module| module.parameter_bytes).saturating_add(of(|module| module.gradient_bytes));
        Gathered { layers, ..Gathered::default() }
    }

    fn gathered_stage(&self, stage: StageLayers) -> Gathered {
        let mut gathered = Gathered::default();
        let layer = &self.layer;
        // The gradient of a unit as the backward makes it is of the type of its parameters.
        let summing = |end: &Module| {
            let made = if end.gradient_bytes > 0 { end.parameter_bytes } else { 0 };
            end.gradient_bytes.saturating_add(made.min(end.gradient_bytes))
        };
        let running = |end: &Module| end.parameter_bytes.saturating_add(layer.parameter_bytes);
        // The gradient that the unit behind a layer has given to its sum. It is freed when the layer's own is.
        let mut reduced = layer.gradient_bytes;
        if self.shares_matrix(stage) {
            // In no unit of its own. The gradient of a shared matrix waits in the walk.
            let parameters = self.head.parameter_bytes.max(self.embedding.parameter_bytes);
            let besides = self.head.gradient_bytes.saturating_sub(self.embedding.gradient_bytes);
            gathered.layers = parameters.saturating_add(besides);
            gathered.embedding.summing = summing(&self.head);
        } else {
            if stage.is_first {
                let (running, summing) = (running(&self.embedding), summing(&self.embedding));
                gathered.embedding = GatheredEnd { running, summing };
            }
            if stage.is_last {
                reduced = reduced.max(self.head.gradient_bytes);
                let summing = summing(&self.head).saturating_add(layer.parameter_bytes);
                gathered.head = GatheredEnd { running: running(&self.head), summing };
            }
        }
        if stage.num_layers > 0 {
            let parameters = layer.parameter_bytes.saturating_mul(2.min(stage.num_layers.into()));
            let gradients = layer.gradient_bytes.saturating_add(reduced);
            gathered.layers = gathered.layers.saturating_add(parameters).saturating_add(gradients);
        }
        gathered
    }

    /// What `of_one` says of the layers of an encoder stage, with how many of each there are.
    fn encoder_layers(&self, stage: EncoderLayers, of_one: fn(&Module) -> u64) -> Vec<(u64, u64)> {
        let layers = self.encoder_modules_of(stage).filter(|(name, ..)| is_layer(name));
        layers.map(|(_, module, count)| (of_one(module), count)).collect()
    }

    /// The memory that a microbatch needs on a rank of `role`, and whether a curve was asked outside its measured
    /// range.
    pub(crate) fn microbatch_bytes(
        &self,
        role: RankRole,
        microbatch: &RankMicrobatch,
    ) -> (MicrobatchBytes, bool) {
        match role {
            RankRole::Encoder => self.encoder_microbatch(self.whole_encoder(), microbatch),
            RankRole::EncoderStage(stage) => self.encoder_microbatch(stage, microbatch),
            RankRole::Stage(stage) => self.stage_microbatch(stage, microbatch),
        }
    }

    fn encoder_microbatch(
        &self,
        stage: EncoderLayers,
        microbatch: &RankMicrobatch,
    ) -> (MicrobatchBytes, bool) {
        let total = microbatch.shape.encoder_tokens();
        if total == 0 {
            return (MicrobatchBytes::default(), false);
        }
        let tokens = microbatch.shape.tower_tokens();
        let hidden = total.saturating_mul(self.encoder_hidden_bytes);
        let features = microbatch.feature_tokens.saturating_mul(self.feature_bytes);
        let outgoing = if stage.is_last { features } else { hidden };
        let modules = self.encoder_modules(stage);
        let bytes: Vec<(&'static str, Bytes, u64)> = modules
            .into_iter()
            .filter(|(_, module, _)| tokens[module.tower.index()] > 0)
            .map(|(name, module, count)| {
                let segments = segments_of(&microbatch.shape.encoder_segments, module.tower);
                (name, module.footprint.at(tokens[module.tower.index()], segments), count)
            })
            .collect();
        let mut pieces: Vec<Piece> = (0..bytes.len())
            .map(|index| {
                let (name, of_one, count) = bytes[index];
                // A module keeps at least its input, which is the result of the module before it. Between layers that recompute
                // everything and others it is known, and less than those keep.
                let next = bytes.get(index + 1).filter(|(next_name, ..)| is_read_by(name, next_name));
                let next = next.map(|(next_name, next, _)| {
                    let is_between = self.has_first_layers() && is_layer(name) && is_layer(next_name);
                    let of_input = if is_between { next.kept.min(hidden) } else { next.kept };
                    (of_input, next.workspace)
                });
                // Behind the last layers of a run of them stands another layer.
                let behind = if stage.is_last { 0 } else { hidden };
                let result = next.map_or(behind, |(kept, _)| kept);
                // And it makes the gradient of that while it runs back.
                let gradient =
                    next.map_or(behind.min(of_one.workspace), |(kept, workspace)| kept.min(workspace));
                let own = if index + 1 == bytes.len() { outgoing } else { gradient };
                Piece { result, gradient, ..Piece::new(&of_one, count, own) }
            })
            .collect();
        let is_extrapolated = bytes.iter().any(|(_, bytes, _)| bytes.is_extrapolated);
        let incoming = if stage.is_first { 0 } else { hidden };
        // The first layer keeps its input: that is what came in, and it is named there.
        if let Some(first) = pieces.iter_mut().find(|piece| piece.kept > 0) {
            first.kept = first.kept.saturating_sub(incoming);
        }
        (MicrobatchBytes { pieces, incoming, outgoing }, is_extrapolated)
    }

    fn stage_microbatch(&self, stage: StageLayers, microbatch: &RankMicrobatch) -> (MicrobatchBytes, bool) {
        let total = microbatch.shape.total_llm_tokens();
        if total == 0 {
            return (MicrobatchBytes::default(), false);
        }
        let hidden = self.llm_rows(total).saturating_mul(self.hidden_bytes);
        let features = microbatch.feature_tokens.saturating_mul(self.feature_bytes);
        let (mut pieces, mut is_extrapolated) = (Vec::new(), false);
        let mut push = |bytes: Bytes, count: u64, end| {
            is_extrapolated |= bytes.is_extrapolated;
            pieces.push(Piece { end, ..Piece::new(&bytes, count, hidden) });
        };
        if stage.is_first {
            push(self.embedding.footprint.at(total, std::iter::empty()), 1, Some(End::Embedding));
        }
        for (layer, count) in self.layers_of(stage.num_layers) {
            let samples = samples_of(&microbatch.shape.llm_tokens);
            let mut bytes = layer.footprint.at(total, samples);
            bytes.workspace = bytes.workspace.saturating_add(layer.exchanged_bytes(total));
            push(bytes, count, None);
        }
        if stage.is_last {
            push(
                self.head.footprint.at(microbatch.shape.label_tokens, std::iter::empty()),
                1,
                Some(End::Head),
            );
        }
        if self.shares_matrix(stage)
            && let Some((_, before)) = pieces.split_last_mut()
        {
            for piece in before {
                piece.waiting = self.embedding.gradient_bytes;
            }
        }
        let incoming = if stage.is_first { features } else { hidden };
        // An embedding may keep nothing although the layers behind it keep their inputs.
        if let Some(first) = pieces.iter_mut().find(|piece| piece.kept > 0) {
            // The first layer keeps its input. That input came from outside and is counted there.
            let named = if stage.is_first { 0 } else { incoming };
            let inputs = total.saturating_mul(INPUT_BYTES);
            first.kept = first.kept.saturating_sub(named).saturating_add(inputs);
        }
        let outgoing = if stage.is_last { 0 } else { hidden };
        (MicrobatchBytes { pieces, incoming, outgoing }, is_extrapolated)
    }
}
