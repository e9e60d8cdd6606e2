//! Choice: which of the measured modules stands for one of the model's, under given settings.

use crate::error::CostError;
use crate::experts::{divided, exchanged_halves};
use crate::mode::{Mode, Runs};
use crate::module::{Collectives, Module, gradient_bytes};
use crate::network::Links;
use crate::settings::{ComponentSettings, CostSettings};
use dflop_types::{Collective, ExpertsProfile, LinkSpan, ModelProfile, ModuleProfile, Recompute, Variant};
use std::collections::BTreeSet;

/// The measured module that stands for one of the model's.
struct Chosen<'a> {
    measured: &'a ModuleProfile,
    /// It is cut over ranks, and its times do not hold what they do together.
    lacks_collectives: bool,
    /// It holds the adapters that train.
    has_adapters: bool,
    /// Number of parameters beside the adapters.
    num_frozen: u64,
}

/// Makes the modules of a cost model.
pub(crate) struct Choice<'a> {
    pub(crate) profile: &'a ModelProfile,
    pub(crate) settings: &'a CostSettings,
    pub(crate) links: &'a Links,
}

impl<'a> Choice<'a> {
    /// The module of the encoder with this name, as it runs under the settings and this mode of recomputation.
    pub(crate) fn encoder(&self, name: &'static str, recompute: Recompute) -> Result<Module, CostError> {
        let component = ComponentSettings { recompute, ..self.settings.encoder };
        let chosen = self.choose(name, component.tensor_parallel_degree, 0)?;
        self.module(name, component, &chosen, self.settings.encoder_runs(name))
    }

    /// The module of the LLM backbone with this name, as it runs under the settings and this mode of recomputation.
    pub(crate) fn llm(&self, name: &'static str, recompute: Recompute) -> Result<Module, CostError> {
        let component = ComponentSettings { recompute, ..self.settings.llm };
        let trained = self.settings.trained;
        if trained.lora_rank > 0 && !trained.llm {
            return Err(CostError::AdaptersFrozen { lora_rank: trained.lora_rank });
        }
        let chosen = self.choose(name, component.tensor_parallel_degree, trained.lora_rank)?;
        self.module(name, component, &chosen, self.settings.llm_runs(name, chosen.has_adapters))
    }

    fn module(
        &self,
        name: &'static str,
        component: ComponentSettings,
        chosen: &Chosen<'_>,
        runs: Runs,
    ) -> Result<Module, CostError> {
        let is_layer = name.ends_with("_layer");
        let recompute = if is_layer { component.recompute } else { Recompute::None };
        let mode = Mode { name, runs, recompute };
        let collectives =
            chosen.lacks_collectives.then(|| self.collectives(mode, component, chosen.has_adapters));
        let mut module = Module::new(mode, chosen.measured, collectives)?;
        if chosen.has_adapters {
            module.num_trained_parameters = module.num_parameters - chosen.num_frozen;
            module.gradient_bytes = gradient_bytes(module.num_trained_parameters);
        }
        let degree = component.expert_parallel_degree;
        if degree < 2 || name != "llm_layer" {
            return Ok(module);
        }
        let experts = self.profile.modules.get(name).and_then(|layer| layer.experts);
        let experts = divided(name, experts, degree)?;
        Ok(module.dealt_out(&experts, degree, chosen.has_adapters, self.exchange(&experts, mode, degree)))
    }

    /// The rows that a rank sends to the experts of the others of its group, which lies on one node. Selective recomputation keeps
    /// results of products alone, so that rows travel again in its backward too.
    fn exchange(&self, experts: &ExpertsProfile, mode: Mode, degree: u32) -> Collectives {
        let (forward_halves, backward_halves) = exchanged_halves(mode.recompute != Recompute::None);
        Collectives {
            route: self.links.route(Collective::AllToAll, LinkSpan::Node, degree),
            bytes_per_token: self.profile.hidden_bytes.saturating_mul(experts.per_token.into()),
            forward_halves,
            backward_halves,
        }
    }

    /// What the ranks of a cut module sum up together, in the way of Megatron: the outputs of attention and of the MLP
    /// in a layer, and the gradients of their inputs; the output of a projector and of an embedding, the gradient of a
    /// projector's and of the head's input. Recomputing a whole layer, or one with adapters, sums its outputs again.
    ///
    /// In the LLM backbone each sum is a reduce-scatter and an all-gather, which together are the bytes of an all-reduce: each
    /// is counted as half of one. The backward gathers the inputs of weights that train once more, and what leaves the
    /// embedding.
    ///
    /// *Not modelled*: the all-gather before the head, whose bytes are those of all tokens and not of the label tokens; the third
    /// sum of a layer whose experts stand beside an MLP (Gemma 4), where layers were not measured with their collectives.
    ///
    /// *References*: Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3; Korthikanti et al., arXiv 2205.05198,
    /// section 4.2.
    fn collectives(&self, mode: Mode, component: ComponentSettings, has_adapters: bool) -> Collectives {
        // Selective recomputation keeps the result of a linear map, but not that of a map with adapters.
        let is_full =
            mode.recompute == Recompute::Full || mode.recompute == Recompute::Selective && has_adapters;
        let (forward_halves, backward_halves) = match mode.name {
            "encoder_embedding" | "sound_embedding" => (2, 0),
            "llm_embedding" => (2, 1),
            "projector" | "sound_projector" => (2, 2),
            "llm_head" => (0, 2),
            "llm_layer" if !is_full && matches!(mode.runs, Runs::Weight | Runs::Whole) => (4, 6),
            _ => (4, if is_full { 8 } else { 4 }),
        };
        let degree = component.tensor_parallel_degree;
        Collectives {
            route: self.links.route(Collective::AllReduce, LinkSpan::Node, degree),
            bytes_per_token: self.profile.hidden_bytes,
            forward_halves,
            backward_halves,
        }
    }

    fn variant(
        &self,
        degree: u32,
        lora_rank: u32,
        name: &str,
    ) -> Option<(&'a Variant, Option<&'a ModuleProfile>)> {
        let fits = |v: &&Variant| v.tensor_parallel_degree == degree && v.lora_rank == lora_rank;
        // Of two that were measured the one that misses least: it holds the module, and its collectives.
        let fitting = self.profile.variants.iter().filter(fits).map(|v| (v, v.modules.get(name)));
        fitting.max_by_key(|(variant, module)| (module.is_some(), variant.has_collectives))
    }

    fn choose(&self, name: &'static str, degree: u32, lora_rank: u32) -> Result<Chosen<'a>, CostError> {
        let whole = self.profile.modules.get(name).ok_or(CostError::MissingModule { module: name })?;
        let base = Chosen {
            measured: whole,
            lacks_collectives: false,
            has_adapters: false,
            num_frozen: whole.num_parameters,
        };
        if degree == 1 && lora_rank == 0 {
            return Ok(base);
        }
        let not_measured = || CostError::VariantNotMeasured {
            degree,
            lora_rank,
            measured: self.measured(name),
            is_estimated: self.profile.is_estimated,
        };
        let of = |(variant, measured): (&Variant, &'a ModuleProfile), num_frozen| Chosen {
            measured,
            lacks_collectives: variant.tensor_parallel_degree > 1 && !variant.has_collectives,
            has_adapters: variant.lora_rank > 0,
            num_frozen,
        };
        let both = |found: Option<(&'a Variant, Option<&'a ModuleProfile>)>| {
            found.and_then(|(variant, module)| module.map(|module| (variant, module)))
        };
        let cut = if degree == 1 { None } else { both(self.variant(degree, 0, name)) };
        let cut = cut.map(|found| of(found, found.1.num_parameters));
        let num_frozen = cut.as_ref().unwrap_or(&base).num_frozen;
        let wanted = self.variant(degree, lora_rank, name).ok_or_else(not_measured)?;
        if let Some(found) = both(Some(wanted)) {
            let num_parameters = found.1.num_parameters;
            let chosen = of(found, if num_frozen <= num_parameters { num_frozen } else { 0 });
            // Embedding and head are measured frozen, without adapters.
            let has_adapters = chosen.has_adapters && num_frozen != num_parameters;
            return Ok(Chosen { has_adapters, ..chosen });
        }
        // Cut layers differ from whole ones, so a variant that lacks them has them not cut, as training would refuse to.
        if degree > 1 && cut.is_none() && name.ends_with("_layer") {
            let variants = self.profile.variants.iter().filter(|variant| variant.modules.contains_key(name));
            let degrees: BTreeSet<u32> =
                std::iter::once(1).chain(variants.map(|variant| variant.tensor_parallel_degree)).collect();
            return Err(CostError::LayersNotCut {
                module: name,
                degree,
                degrees: degrees.into_iter().collect(),
            });
        }
        Ok(cut.unwrap_or(base))
    }

    /// Degrees and ranks of adapters that the profile holds, ascending.
    fn measured(&self, name: &str) -> Vec<(u32, u32)> {
        // Nobody can measure an estimated profile's other degrees into it: what layers can have is said, and no more.
        let has = |v: &&Variant| !self.profile.is_estimated || v.modules.contains_key(name);
        let variants =
            self.profile.variants.iter().filter(has).map(|v| (v.tensor_parallel_degree, v.lora_rank));
        let mut measured: Vec<(u32, u32)> = std::iter::once((1, 0)).chain(variants).collect();
        measured.sort_unstable();
        measured.dedup();
        measured
    }
}
