//! `dflop.balance`: costs in, buckets out.

use crate::error::{Kind, map};
use dflop_schedule::{Assignment, Costs, Limits};
use pyo3::prelude::*;

/// An assignment of samples to buckets; see `_native.pyi`.
#[pyclass(frozen, module = "dflop")]
pub(crate) struct Balance(Assignment);

#[pymethods]
impl Balance {
    #[getter]
    fn assignment(&self) -> Vec<u32> {
        self.0.bucket.clone()
    }

    #[getter]
    fn encoder_load_ns(&self) -> Vec<u64> {
        self.0.encoder_load_ns.clone()
    }

    #[getter]
    fn llm_load_ns(&self) -> Vec<u64> {
        self.0.llm_load_ns.clone()
    }

    #[getter]
    fn max_load_ns(&self) -> u64 {
        self.0.max_load_ns
    }

    #[getter]
    fn lower_bound_ns(&self) -> u64 {
        self.0.lower_bound_ns
    }

    #[getter]
    fn gap(&self) -> f64 {
        self.0.gap()
    }

    #[getter]
    fn proven_optimal(&self) -> bool {
        self.0.proven_optimal
    }

    fn __repr__(&self) -> String {
        format!(
            "Balance({} samples, {} buckets, max_load_ns={}, gap={:.6}, proven_optimal={})",
            self.0.bucket.len(),
            self.0.llm_load_ns.len(),
            self.0.max_load_ns,
            self.0.gap(),
            if self.0.proven_optimal { "True" } else { "False" }
        )
    }
}

/// Balances samples into `num_buckets` buckets; see `_native.pyi`.
#[pyfunction]
#[pyo3(signature = (encoder_ns, llm_ns, num_buckets, *, seed = 0))]
pub(crate) fn balance(
    py: Python<'_>,
    encoder_ns: Vec<u64>,
    llm_ns: Vec<u64>,
    num_buckets: u32,
    seed: u64,
) -> PyResult<Balance> {
    let limits = Limits { seed, ..Limits::new(llm_ns.len(), num_buckets) };
    let costs = Costs { encoder_ns, llm_ns, bytes: None };
    py.detach(|| dflop_schedule::schedule(&costs, &limits)).map(Balance).map_err(map(Kind::Schedule))
}
