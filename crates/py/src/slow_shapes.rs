//! Samples that a rehearsal makes slower than predicted, as the runtime sees them.

use pyo3::prelude::*;

/// Which samples, and what they add, frozen; see `_native/__init__.pyi`.
#[pyclass(frozen, eq, module = "dflop._native")]
#[derive(PartialEq)]
pub(crate) struct SlowShapes(pub(crate) dflop_step::SlowShapes);

#[pymethods]
impl SlowShapes {
    #[getter]
    fn tokens_min(&self) -> u32 {
        self.0.tokens_min
    }

    #[getter]
    fn tokens_max(&self) -> u32 {
        self.0.tokens_max
    }

    #[getter]
    fn num_samples(&self) -> u64 {
        self.0.num_samples
    }

    #[getter]
    fn forward_ns(&self) -> u64 {
        self.0.forward_ns
    }

    #[getter]
    fn backward_ns(&self) -> u64 {
        self.0.backward_ns
    }
}
