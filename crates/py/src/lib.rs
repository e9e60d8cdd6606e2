//! The native module `dflop._native`: exports, one error mapping, frozen classes; no logic.

mod action;
mod analytic;
mod balance;
mod cost;
mod dataset;
mod error;
mod family;
mod numbers;
mod plan;
mod render;
mod sampler;
mod scheduler;
mod slow_shapes;
mod value;

use pyo3::prelude::*;
use std::time::Duration;

/// How often what works without the GIL looks for Ctrl-C: Python's handler runs only where it is held.
const SIGNALS_EVERY: Duration = Duration::from_millis(20);

#[pymodule]
mod _native {
    use super::PyModule;
    use pyo3::prelude::*;
    use std::collections::BTreeMap;
    use std::path::{Path, PathBuf};

    #[pymodule_export]
    use super::testing;
    #[pymodule_export]
    use crate::action::Action;
    #[pymodule_export]
    use crate::analytic::{ModelFlops, peak_gflops};
    #[pymodule_export]
    use crate::balance::{Balance, balance};
    #[pymodule_export]
    use crate::dataset::{Dataset, EncodedSample, Media, profile_shapes};
    #[pymodule_export]
    use crate::plan::{GlobalBatches, Plan, Schedule};
    #[pymodule_export]
    use crate::sampler::SampleCosts;
    #[pymodule_export]
    use crate::scheduler::StepScheduler;
    #[pymodule_export]
    use crate::slow_shapes::SlowShapes;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        crate::render::render_apart(module.py())?;
        // The module is no package, so its submodule is found by its own name.
        let modules = module.py().import("sys")?.getattr("modules")?;
        modules.set_item("dflop._native.testing", module.getattr("testing")?)?;
        crate::error::add_to(module)
    }

    /// Renders chat templates for another process; see `_native/__init__.pyi`.
    #[pyfunction]
    fn serve_chat_templates(py: Python<'_>) -> PyResult<()> {
        py.detach(|| dflop_data::serve_templates(std::io::stdin().lock(), std::io::stdout().lock()))?;
        Ok(())
    }

    /// Runs the command line; see `_native/__init__.pyi`.
    #[pyfunction]
    #[pyo3(signature = (arguments, family = None))]
    fn run_cli(
        py: Python<'_>,
        arguments: Vec<String>,
        family: Option<Bound<'_, PyAny>>,
    ) -> PyResult<(u8, Option<Py<PyAny>>)> {
        let family = crate::family::find(py, family, None, Path::new("."))?;
        match py.detach(|| dflop_cli::run_with(&arguments, family.as_ref())) {
            dflop_cli::Outcome::Done(status) => Ok((status, None)),
            dflop_cli::Outcome::Python(request) => {
                let request = crate::value::to_python(py, serde_json::to_value(&request))?;
                Ok((0, Some(request.unbind())))
            }
        }
    }

    /// Writes the text of an artifact; see `_native/__init__.pyi`.
    #[pyfunction]
    fn write_text(py: Python<'_>, path: PathBuf, kind: &str, text: &str) -> PyResult<()> {
        py.detach(|| dflop_types::artifact::write_text(&path, kind, text)).map_err(crate::error::artifact)
    }

    /// What dflop can do with each model family; see `_native/__init__.pyi`.
    #[pyfunction]
    fn families() -> BTreeMap<&'static str, BTreeMap<&'static str, bool>> {
        dflop_types::FAMILIES.iter().map(|family| (family.model_type, family.abilities().into())).collect()
    }
}

/// What only tests and benches ask; see `_native/testing.pyi`.
#[pymodule(submodule)]
mod testing {
    use crate::error::{Kind, map};
    use pyo3::prelude::*;
    use std::path::Path;

    #[pymodule_export]
    use crate::analytic::{model_modules, module_activation_bytes, module_flops};
    #[pymodule_export]
    use crate::balance::{baseline, baselines, judge};
    #[pymodule_export]
    use crate::cost::CostModel;
    #[pymodule_export]
    use crate::dataset::{MediaShape, encode_conversations, media_shape};
    #[pymodule_export]
    use crate::scheduler::simulate_measured;

    /// The configuration at `path`; see `_native/testing.pyi`.
    #[pyfunction]
    fn load_config<'py>(py: Python<'py>, path: &str) -> PyResult<Bound<'py, PyAny>> {
        let config = dflop_cli::config::load(Path::new(path)).map_err(map(Kind::Plan))?;
        crate::value::to_python(py, serde_json::to_value(&config))
    }
}
