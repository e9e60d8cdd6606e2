//! The analytic model's integers, for those who check or use them.

use crate::dataset::Dataset;
use crate::error::{Kind, map};
use dflop_analytic::{AnalyticError, Architecture, Hardware};
use dflop_types::{MicrobatchShape, Recipe, Trained};
use pyo3::prelude::*;
use std::collections::BTreeMap;

/// The modules of a model, with adapters of this rank on those that get them.
fn modules(architecture: &Architecture, lora_rank: u32) -> Vec<dflop_analytic::Module> {
    let modules = architecture.modules().into_iter();
    modules.map(|module| module.with_adapters(lora_rank).unwrap_or(module)).collect()
}

/// How many of a module there are, and the parameters of one, by name.
type Counted = BTreeMap<String, (u64, u64)>;

fn architecture(config: &str) -> PyResult<Architecture> {
    let config = serde_json::from_str(config).map_err(|error| {
        crate::error::raise(Kind::Profile, &format!("config.json is not JSON: {error}"), None)
    })?;
    Architecture::from_config(&config).map_err(map(Kind::Profile))
}

/// Operations that training a model takes; see `_native/__init__.pyi`.
#[pyclass(frozen, module = "dflop._native")]
pub(crate) struct ModelFlops {
    architecture: Architecture,
    trained: Trained,
}

#[pymethods]
impl ModelFlops {
    #[new]
    fn new(config: &str, recipe: &str, lora_rank: u32) -> PyResult<Self> {
        let recipe: Recipe =
            recipe.parse().map_err(|rule: String| crate::error::raise(Kind::Profile, &rule, None))?;
        Ok(Self { architecture: architecture(config)?, trained: recipe.trained(lora_rank) })
    }

    fn of(&self, dataset: &Dataset, samples: Vec<u32>) -> PyResult<u128> {
        let shapes = samples.into_iter().map(|sample| Ok(&dataset.profiled(sample)?.shape));
        let shapes: Vec<_> = shapes.collect::<PyResult<_>>()?;
        Ok(self.architecture.training_flops_of(&MicrobatchShape::pack(shapes), &self.trained))
    }
}

/// Peak rate of a device by its driver's name; see `_native/__init__.pyi`.
#[pyfunction]
pub(crate) fn peak_gflops(device: &str, dtype: &str) -> PyResult<Option<u64>> {
    let Some(hardware) = Hardware::of_device(device) else { return Ok(None) };
    hardware.rate(dtype).map(|(gflops, _)| Some(gflops)).map_err(map(Kind::Profile))
}

/// Modules of a model with their counts and parameters; see `_native/testing.pyi`.
#[pyfunction]
#[pyo3(signature = (config, *, lora_rank = 0))]
pub(crate) fn model_modules(config: &str, lora_rank: u32) -> PyResult<(Counted, u64)> {
    let architecture = architecture(config)?;
    let modules = modules(&architecture, lora_rank);
    let counted = modules.iter().map(|m| (m.name.to_owned(), (m.count, m.num_parameters())));
    Ok((counted.collect(), architecture.num_parameters()))
}

/// Floating point operations of a module; see `_native/testing.pyi`.
#[pyfunction]
#[pyo3(signature = (config, module, segments, *, lora_rank = 0))]
pub(crate) fn module_flops(
    config: &str,
    module: &str,
    segments: Vec<u64>,
    lora_rank: u32,
) -> PyResult<BTreeMap<&'static str, u128>> {
    let found = find(config, module, lora_rank)?;
    let flops = found.flops(&segments);
    Ok(BTreeMap::from([
        ("forward", flops.forward),
        ("input", flops.input),
        ("weight", flops.weight),
        ("recomputed", flops.recomputed),
    ]))
}

/// Bytes that a module's forward keeps; see `_native/testing.pyi`.
#[pyfunction]
#[pyo3(signature = (config, module, segments, *, value_bytes = 2, lora_rank = 0))]
pub(crate) fn module_activation_bytes(
    config: &str,
    module: &str,
    segments: Vec<u64>,
    value_bytes: u64,
    lora_rank: u32,
) -> PyResult<u64> {
    let found = find(config, module, lora_rank)?;
    Ok(found.operations.iter().map(|operation| operation.kept_bytes(&segments, value_bytes)).sum())
}

fn find(config: &str, name: &str, lora_rank: u32) -> PyResult<dflop_analytic::Module> {
    let modules = modules(&architecture(config)?, lora_rank);
    let known = modules.iter().map(|module| module.name).collect::<Vec<_>>().join(", ");
    let missing = || AnalyticError::UnknownModule { name: name.to_owned(), known };
    modules.into_iter().find(|module| module.name == name).ok_or_else(missing).map_err(map(Kind::Profile))
}
