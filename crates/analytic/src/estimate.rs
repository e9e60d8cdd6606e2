//! A whole model profile that nobody measured: its modules timed by the roofline, its links from the table of hardware.

use crate::architecture::{
    Architecture, CONV_LAYER, DENSE_LAYER, ENCODER_LAYERS, LINEAR_LAYER, LLM_LAYERS, MERGED_LAYER,
    SLIDING_LAYER,
};
use crate::error::AnalyticError;
use crate::gpt::Gpt;
use crate::hardware::Hardware;
use crate::links::{Reduce, network};
use crate::mean::mean_layer;
use crate::modules::Module;
use crate::roofline::Roofline;
use dflop_types::{
    Collective, Device, LinkProfile, LinkSpan, MadeFrom, MemoryReserve, ModelProfile, ModuleProfile, Variant,
};
use std::collections::BTreeMap;

/// Time that PyTorch takes on the host to start one kernel, in nanoseconds: assumed. The device waits for it where its
/// work is shorter.
const DISPATCH_NS: f64 = 5_000.0;
/// Ranks that a layer is cut over.
const DEGREES: [u32; 3] = [2, 4, 8];
/// Memory that the device's context and libraries take, in bytes: measured on an H100 with PyTorch 2.11, all kernels
/// loaded, and the groups of one rank. More ranks need more.
const CONTEXT_BYTES: u64 = 2_760_000_000;
/// Bytes of each float32 gradient that are read and written around the optimizer: its copy in float64 for the norm, and zeroing.
const GRADIENT_BYTES_MOVED: u64 = 4 + 8 + 8 + 4;
/// What the allocator holds above what tensors take, in thousandths: assumed.
const ALLOCATOR_OVERHEAD_PERMILLE: u32 = 50;

/// What is estimated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EstimateSettings {
    /// Name of the model for people.
    pub model: String,
    /// Dtype of parameters and activations: `bfloat16`, `float16` or `float32`.
    pub dtype: String,
    /// Hashes of what the architecture was read from.
    pub made_from: MadeFrom,
    /// Rank of the `LoRA` adapters that the layers of the LLM backbone are estimated with, too; 0: without adapters only.
    pub lora_rank: u32,
}

/// A model profile that nobody measured: marked as estimated, each point with no repeats.
///
/// # Errors
/// [`AnalyticError::Dtype`].
pub fn estimate(
    architecture: &Architecture,
    hardware: &Hardware,
    settings: &EstimateSettings,
) -> Result<ModelProfile, AnalyticError> {
    let modules = architecture.modules();
    let cut = |degree: u32| {
        let of = |module: &Module| {
            let degree = u64::from(degree);
            module.with_vocabulary_cut(degree).or_else(|| module.cut(degree))
        };
        // Layers may be of several kinds, or of two encoders. A degree that does not divide those of every kind cuts none, and
        // then no vocabulary.
        let are_divided = |names: &[&str]| {
            modules.iter().filter(|module| names.contains(&module.name)).all(|one| of(one).is_some())
        };
        let (of_llm, of_encoder) = (are_divided(&LLM_LAYERS), are_divided(&ENCODER_LAYERS));
        let is_kept = |module: &&Module| {
            if module.name.starts_with("llm_") { of_llm } else { of_encoder }
        };
        modules.iter().filter(is_kept).filter_map(of).collect()
    };
    let parts = Parts {
        family: &architecture.family,
        width: architecture.llm.width,
        num_deep_layers: architecture.projector.num_deep_layers,
        is_tied: architecture.llm.is_tied,
        cut: DEGREES.map(|degree| (degree, cut(degree))).into(),
        modules,
        dispatch_ns: DISPATCH_NS,
        reduce_wait_ns: None,
        gradient_bytes_moved: GRADIENT_BYTES_MOVED,
        is_packed: true,
    };
    parts.profile(hardware, settings)
}

/// As [`estimate`], of a text-only model whose layers are cut over `degree` ranks and that runs as its software does. The
/// profile has the modules of the LLM backbone alone, whole and cut.
///
/// # Errors
/// [`AnalyticError::Dtype`]; [`AnalyticError::Degree`].
pub fn estimate_gpt(
    gpt: &Gpt,
    degree: u32,
    hardware: &Hardware,
    settings: &EstimateSettings,
) -> Result<ModelProfile, AnalyticError> {
    let software = gpt.software;
    let parts = Parts {
        family: "gpt",
        width: gpt.width,
        num_deep_layers: 0,
        is_tied: gpt.is_tied,
        modules: gpt.modules(1)?,
        cut: if degree > 1 { vec![(degree, gpt.modules(degree)?)] } else { Vec::new() },
        dispatch_ns: software.dispatch_ns as f64,
        reduce_wait_ns: Some(software.collective_wait_ns),
        gradient_bytes_moved: software.gradient_bytes_moved,
        is_packed: false,
    };
    parts.profile(hardware, settings)
}

/// What a profile is made of.
struct Parts<'a> {
    family: &'a str,
    /// Values of a hidden state.
    width: u64,
    /// Layers of the LLM backbone after which features are added too: a feature is wider by one hidden state for each.
    num_deep_layers: u64,
    is_tied: bool,
    modules: Vec<Module>,
    /// Modules cut over so many ranks.
    cut: Vec<(u32, Vec<Module>)>,
    /// Time that the host takes to start one kernel, in nanoseconds.
    dispatch_ns: f64,
    /// What an all-reduce within a layer takes longer than in a test that runs nothing else, in nanoseconds; `None`: cut
    /// modules are timed without what their ranks do together.
    reduce_wait_ns: Option<u64>,
    /// Bytes of each gradient that are read and written before the optimizer.
    gradient_bytes_moved: u64,
    /// As in [`Roofline`].
    is_packed: bool,
}

impl Parts<'_> {
    fn profile(
        &self,
        hardware: &Hardware,
        settings: &EstimateSettings,
    ) -> Result<ModelProfile, AnalyticError> {
        let (peak_gflops, size) = hardware.rate(&settings.dtype)?;
        let measured = hardware.measured(&settings.dtype);
        let dispatch_ns = self.dispatch_ns;
        let is_packed = self.is_packed;
        let roofline =
            Roofline { hardware, measured, peak_gflops, size, dispatch_ns, reduce: None, is_packed };
        let network = network(hardware);
        let profiles = |modules: &[Module], reduce: Option<Reduce<'_>>| {
            let roofline = Roofline { reduce, ..roofline };
            let timed = modules.iter().map(|module| (module.name.to_owned(), roofline.module(module)));
            let mut found: BTreeMap<String, ModuleProfile> = timed.collect();
            // Layers of two kinds are one kind of layer to all that follows: their mean.
            let of_llm = [LINEAR_LAYER, SLIDING_LAYER, CONV_LAYER].map(|name| (name, "llm_layer"));
            for (name, mean) in of_llm.into_iter().chain([(MERGED_LAYER, "encoder_layer")]) {
                if let Some(other) = found.remove(name)
                    && let Some(full) = found.get_mut(mean)
                {
                    *full = mean_layer(full, &other);
                }
            }
            // The first layers without experts count as layers with them: the mean would be too little for every stage but theirs.
            if let Some(dense) = found.remove(DENSE_LAYER)
                && let Some(full) = found.get_mut("llm_layer")
            {
                full.count += dense.count;
            }
            found
        };
        let reduce = |degree: u32| {
            let wait_ns = self.reduce_wait_ns.filter(|_| degree > 1)?;
            let is_one = |link: &&LinkProfile| {
                link.collective == Collective::AllReduce
                    && link.span == LinkSpan::Node
                    && link.num_ranks >= degree
            };
            Some(Reduce { link: network.links.iter().find(is_one)?, wait_ns })
        };
        let variant = |degree: u32, lora_rank: u32, modules: &[Module]| Variant {
            tensor_parallel_degree: degree,
            lora_rank,
            has_collectives: degree > 1 && self.reduce_wait_ns.is_some(),
            modules: profiles(modules, reduce(degree)),
        };
        let cut = || self.cut.iter().filter(|(_, modules)| !modules.is_empty());
        let mut variants: Vec<Variant> =
            cut().map(|(degree, modules)| variant(*degree, 0, modules)).collect();
        if settings.lora_rank > 0 {
            let with_adapters = |modules: &[Module]| -> Vec<Module> {
                modules.iter().filter_map(|module| module.with_adapters(settings.lora_rank)).collect()
            };
            variants.push(variant(1, settings.lora_rank, &with_adapters(&self.modules)));
            // Without modules where the degree cuts no layer of the backbone: that it cannot be is then what is said.
            variants.extend(
                cut().map(|(degree, modules)| variant(*degree, settings.lora_rank, &with_adapters(modules))),
            );
        }
        // AdamW reads and writes parameters, both moments and (beside 16 bit) the float32 copy, and reads gradients.
        let adamw_bytes = if size == 2 { 30 } else { 28 };
        let optimizer_bytes = u128::from(adamw_bytes + self.gradient_bytes_moved) * 1_000_000;
        Ok(ModelProfile {
            made_from: settings.made_from.clone(),
            family: self.family.to_owned(),
            model: settings.model.clone(),
            is_estimated: true,
            device: Device {
                kind: "cuda".to_owned(),
                name: hardware.title.to_owned(),
                dtype: settings.dtype.clone(),
                memory_bytes: hardware.memory_bytes,
                ..Device::default()
            },
            hidden_bytes: self.width * size,
            feature_bytes: match self.num_deep_layers {
                0 => 0,
                count => (1 + count) * self.width * size,
            },
            is_tied: self.is_tied,
            modules: profiles(&self.modules, None),
            variants,
            network: network.clone(),
            optimizer_ns_per_million: roofline.bytes_ns(optimizer_bytes).round() as u64,
            memory: MemoryReserve {
                context_bytes: CONTEXT_BYTES,
                allocator_overhead_permille: ALLOCATOR_OVERHEAD_PERMILLE,
            },
            renewed: None,
        })
    }
}
