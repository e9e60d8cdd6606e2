//! One action of a rank, as the runtime sees it.

use crate::error::{Kind, raise};
use dflop_types::ActionKind;
use pyo3::prelude::*;

/// One cell of a step, frozen; see `_native/__init__.pyi`.
#[pyclass(frozen, eq, hash, module = "dflop._native")]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct Action(dflop_types::Action);

impl From<&dflop_types::Action> for Action {
    fn from(action: &dflop_types::Action) -> Self {
        Self(*action)
    }
}

/// The letter of a kind of action.
pub(crate) const fn letter(kind: ActionKind) -> char {
    match kind {
        ActionKind::F => 'F',
        ActionKind::B => 'B',
        ActionKind::I => 'I',
        ActionKind::W => 'W',
    }
}

#[pymethods]
impl Action {
    #[staticmethod]
    fn parse(text: &str) -> PyResult<Self> {
        let parsed = text.parse().map(Self);
        parsed.map_err(|error: dflop_types::ParseActionError| raise(Kind::Schedule, &error.to_string(), None))
    }

    #[getter]
    fn name(&self) -> String {
        self.0.to_string()
    }

    #[getter]
    fn stage(&self) -> u32 {
        self.0.stage.0
    }

    #[getter]
    fn letter(&self) -> char {
        letter(self.0.kind)
    }

    #[getter]
    fn microbatch(&self) -> u32 {
        self.0.microbatch
    }

    #[getter]
    fn takes_gradient(&self) -> bool {
        matches!(self.0.kind, ActionKind::B | ActionKind::I)
    }

    fn __str__(&self) -> String {
        self.name()
    }

    fn __repr__(&self) -> String {
        format!("Action({})", self.0)
    }
}
