//! The bytes of a model's modules under settings, put together for the part of the model that a rank holds.

use crate::cost::{StageLayers, samples_of, segments_of};
use crate::error::CostError;
use crate::memory::footprint::{Bytes, Footprint, Runs};
use crate::memory::walk::{Buffers, MicrobatchBytes, Piece};
use crate::memory::{MemorySettings, RankMemory, RankMicrobatch, RankPart};
use dflop_types::{MemoryReserve, ModelProfile, Recompute};

/// Actions whose receives the runtime has open, the running one included (`num_ahead` of its executor).
const NUM_AHEAD: usize = 4;

/// The bytes of a model's modules under [`MemorySettings`].
#[derive(Debug, Clone)]
pub(crate) struct MemoryModel {
    /// In the order of the forward, with how many of each there are.
    encoder: Vec<(Footprint, u64)>,
    embedding: Footprint,
    layer: Footprint,
    head: Footprint,
    hidden_bytes: u64,
    optimizer_bytes_per_parameter: u64,
    sharding_degree: u64,
    keeps_sent: bool,
    reserve: MemoryReserve,
}

/// Bytes of `AdamW` states a parameter: two fp32 moments, and an fp32 master copy beside bfloat16 parameters.
pub(crate) fn optimizer_bytes_per_parameter(dtype: &str) -> Result<u64, CostError> {
    match dtype {
        "float32" => Ok(8),
        "bfloat16" => Ok(12),
        _ => Err(CostError::Dtype { dtype: dtype.to_owned() }),
    }
}

fn footprint(profile: &ModelProfile, module: &'static str, runs: Runs) -> Result<Footprint, CostError> {
    let measured = profile.modules.get(module).ok_or(CostError::MissingModule { module })?;
    Footprint::new(module, measured, runs)
}

/// The footprint of a module of the LLM backbone whose adapters alone train; one that the variant leaves out has
/// none and is frozen, behind what trains.
fn adapted(
    profile: &ModelProfile,
    module: &'static str,
    runs: Runs,
    lora_rank: u32,
) -> Result<Footprint, CostError> {
    let mut variants = profile.variants.iter();
    let variant = variants.find(|v| v.tensor_parallel_degree == 1 && v.lora_rank == lora_rank);
    let variant = variant.ok_or(CostError::AdaptersNotMeasured { lora_rank })?;
    let frozen = footprint(profile, module, Runs { is_trained: false, ..runs })?;
    let Some(measured) = variant.modules.get(module) else { return Ok(frozen) };
    let mut adapted = Footprint::new(module, measured, Runs { is_trained: false, ..runs })?;
    if runs.is_trained {
        // Numbers that are no larger than the frozen ones are those of the adapters alone.
        let adapters = |all: u64, frozen: u64| if frozen < all { all - frozen } else { all };
        adapted.trained = (
            adapters(adapted.num_parameters, frozen.num_parameters),
            adapters(adapted.parameter_bytes, frozen.parameter_bytes),
        );
    }
    adapted.num_parameters = frozen.num_parameters.saturating_add(adapted.trained.0);
    adapted.parameter_bytes = frozen.parameter_bytes.saturating_add(adapted.trained.1);
    Ok(adapted)
}

impl MemoryModel {
    /// The bytes of a profile's modules.
    ///
    /// # Errors
    /// [`CostError`], by the name of the module and curve at fault.
    pub(crate) fn new(profile: &ModelProfile, settings: &MemorySettings) -> Result<Self, CostError> {
        let MemorySettings {
            encoder_recompute,
            llm_recompute,
            trains_encoder,
            trains_projector,
            trains_llm,
            ..
        } = *settings;
        let runs = |is_trained, trains_before: bool, recompute| Runs {
            is_trained,
            has_backward: is_trained || trains_before,
            recompute,
        };
        let encoder_runs = runs(trains_encoder, false, Recompute::None);
        let encoder_layer_runs = Runs { recompute: encoder_recompute, ..encoder_runs };
        let mut encoder = vec![(footprint(profile, "encoder_embedding", encoder_runs)?, 1)];
        for name in [ModelProfile::WINDOW_LAYER, "encoder_layer"] {
            if profile.modules.contains_key(name) || name == "encoder_layer" {
                let count = u64::from(profile.count(name));
                encoder.push((footprint(profile, name, encoder_layer_runs)?, count));
            }
        }
        let projector_runs = runs(trains_projector, trains_encoder, Recompute::None);
        encoder.push((footprint(profile, "projector", projector_runs)?, 1));
        let llm_runs = runs(trains_llm, trains_encoder || trains_projector, Recompute::None);
        let llm = |name, recompute| {
            let runs = Runs { recompute, ..llm_runs };
            match settings.lora_rank {
                0 => footprint(profile, name, runs),
                lora_rank => adapted(profile, name, runs, lora_rank),
            }
        };
        Ok(Self {
            encoder,
            embedding: llm("llm_embedding", Recompute::None)?,
            layer: llm("llm_layer", llm_recompute)?,
            head: llm("llm_head", Recompute::None)?,
            hidden_bytes: profile.hidden_bytes,
            optimizer_bytes_per_parameter: optimizer_bytes_per_parameter(&profile.device.dtype)?,
            sharding_degree: u64::from(settings.optimizer_sharding_degree.max(1)),
            keeps_sent: profile.device.kind != "cuda",
            reserve: profile.memory,
        })
    }

    /// The modules of a part, with how many of each it holds.
    fn modules(&self, part: RankPart) -> Vec<(&Footprint, u64)> {
        match part {
            RankPart::Encoder => self.encoder.iter().map(|(module, count)| (module, *count)).collect(),
            RankPart::Stage(stage) => {
                let held = [
                    (&self.embedding, u64::from(stage.is_first)),
                    (&self.layer, u64::from(stage.num_layers)),
                    (&self.head, u64::from(stage.is_last)),
                ];
                held.into_iter().filter(|(_, count)| *count > 0).collect()
            }
        }
    }

    /// What a rank holds whatever the samples, and the transient peak of its optimizer, named workspace.
    pub(crate) fn fixed(&self, part: RankPart) -> RankMemory {
        let mut fixed = RankMemory { context_bytes: self.reserve.context_bytes, ..RankMemory::default() };
        let mut num_trained = 0u64;
        for (module, count) in self.modules(part) {
            let add = |sum: &mut u64, bytes: u64| *sum = sum.saturating_add(bytes.saturating_mul(count));
            add(&mut fixed.parameter_bytes, module.parameter_bytes);
            add(&mut fixed.gradient_bytes, module.trained.1);
            add(&mut num_trained, module.trained.0);
        }
        fixed.optimizer_bytes =
            num_trained.saturating_mul(self.optimizer_bytes_per_parameter).div_ceil(self.sharding_degree);
        // AdamW over all tensors at once: the denominators of the update.
        fixed.workspace_bytes = fixed.gradient_bytes.div_ceil(self.sharding_degree);
        fixed
    }

    pub(crate) fn num_parameters(&self, part: RankPart) -> u64 {
        let modules = self.modules(part).into_iter();
        modules
            .fold(0, |sum, (module, count)| sum.saturating_add(module.num_parameters.saturating_mul(count)))
    }

    pub(crate) const fn buffers(&self, copies_rows: bool) -> Buffers {
        Buffers { num_ahead: NUM_AHEAD, keeps_sent: self.keeps_sent, copies_rows }
    }

    pub(crate) const fn allocator_bytes(&self, tensor_bytes: u64) -> u64 {
        tensor_bytes.saturating_mul(self.reserve.allocator_overhead_permille as u64).div_ceil(1_000)
    }

    /// What a microbatch asks of a rank of `part`, and whether a curve was asked outside its measured range.
    pub(crate) fn microbatch(&self, part: RankPart, microbatch: &RankMicrobatch) -> (MicrobatchBytes, bool) {
        match part {
            RankPart::Encoder => self.encoder_microbatch(microbatch),
            RankPart::Stage(stage) => self.stage_microbatch(stage, microbatch),
        }
    }

    fn encoder_microbatch(&self, microbatch: &RankMicrobatch) -> (MicrobatchBytes, bool) {
        let total = microbatch.shape.encoder_tokens();
        if total == 0 {
            return (MicrobatchBytes::default(), false);
        }
        let segments = segments_of(&microbatch.shape.encoder_segments);
        let bytes: Vec<(Bytes, u64)> =
            self.encoder.iter().map(|(module, count)| (module.at(total, segments.clone()), *count)).collect();
        let piece = |index: usize, &(bytes, count): &(Bytes, u64)| Piece {
            kept: bytes.kept.saturating_mul(count),
            workspace: bytes.workspace,
            // A module keeps its input, which is the result of the one before it: no less than that.
            result: self.encoder.get(index + 1).map_or(0, |(next, _)| next.at(total, segments.clone()).kept),
            is_head: false,
        };
        let outgoing = microbatch.feature_tokens.saturating_mul(self.hidden_bytes);
        let pieces = bytes.iter().enumerate().map(|(index, bytes)| piece(index, bytes)).collect();
        let is_extrapolated = bytes.iter().any(|(bytes, _)| bytes.is_extrapolated);
        (MicrobatchBytes { pieces, incoming: 0, outgoing }, is_extrapolated)
    }

    fn stage_microbatch(&self, stage: StageLayers, microbatch: &RankMicrobatch) -> (MicrobatchBytes, bool) {
        let total = microbatch.shape.total_llm_tokens();
        if total == 0 {
            return (MicrobatchBytes::default(), false);
        }
        let hidden = total.saturating_mul(self.hidden_bytes);
        let features = microbatch.feature_tokens.saturating_mul(self.hidden_bytes);
        let (mut pieces, mut is_extrapolated) = (Vec::new(), false);
        let mut push = |bytes: Bytes, count: u64, is_head| {
            is_extrapolated |= bytes.is_extrapolated;
            let kept = bytes.kept.saturating_mul(count);
            pieces.push(Piece { kept, workspace: bytes.workspace, result: hidden, is_head });
        };
        if stage.is_first {
            push(self.embedding.at(total, std::iter::empty()), 1, false);
        }
        if stage.num_layers > 0 {
            let samples = samples_of(&microbatch.shape.llm_tokens);
            push(self.layer.at(total, samples), u64::from(stage.num_layers), false);
        }
        if stage.is_last {
            push(self.head.at(microbatch.shape.label_tokens, std::iter::empty()), 1, true);
        }
        let incoming = if stage.is_first { features } else { hidden };
        if let Some(first) = pieces.first_mut().filter(|_| !stage.is_first) {
            // The first layer keeps its input: that is what came in, and it is named there.
            first.kept = first.kept.saturating_sub(incoming);
        }
        let outgoing = if stage.is_last { 0 } else { hidden };
        (MicrobatchBytes { pieces, incoming, outgoing }, is_extrapolated)
    }

    /// Bytes that a microbatch keeps on a rank of `part` from its forward to its backward, borders apart.
    pub(crate) fn kept(&self, part: RankPart, microbatch: &RankMicrobatch) -> u64 {
        let bytes = self.microbatch(part, microbatch).0;
        bytes.pieces.iter().fold(0, |sum, piece| sum.saturating_add(piece.kept))
    }
}
