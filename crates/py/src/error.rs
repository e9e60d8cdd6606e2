//! The one mapping from our errors to Python's: `dflop.Error` and its four children.

use dflop_types::{ArtifactError, Hint, shown_lines};
use pyo3::exceptions::{PyException, PyFileNotFoundError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyList, PyTuple, PyType};

/// Which child of `dflop.Error` is raised.
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    Profile,
    Plan,
    Schedule,
    Artifact,
}

static TYPES: PyOnceLock<[Py<PyType>; 5]> = PyOnceLock::new();

/// `Error`, then its children in the order of [`Kind`].
fn types(py: Python<'_>) -> PyResult<&[Py<PyType>; 5]> {
    TYPES.get_or_try_init(py, || {
        // `type(name, bases, fields)`: `PyErr::new_type` takes one base only.
        let new = |name: &str, doc: &str, bases: &Bound<'_, PyTuple>| -> PyResult<Py<PyType>> {
            let fields = PyDict::new(py);
            fields.set_item("__module__", "dflop")?;
            fields.set_item("__doc__", doc)?;
            Ok(py.get_type::<PyType>().call1((name, bases, fields))?.cast_into::<PyType>()?.unbind())
        };
        let error = new("Error", "What dflop raises.", &PyTuple::new(py, [py.get_type::<PyException>()])?)?;
        // A child is a ValueError too: what is wrong is always a value that somebody gave.
        let bases = PyTuple::new(py, [error.bind(py), &py.get_type::<PyValueError>()])?;
        let child = |name: &str, doc: &str| new(name, doc, &bases);
        Ok([
            error.clone_ref(py),
            child("ProfileError", "Data or a model that cannot be measured.")?,
            child("PlanError", "A plan that cannot be made or run.")?,
            child("ScheduleError", "Samples that cannot be scheduled as asked.")?,
            child("ArtifactError", "A file between the verbs that cannot be used.")?,
        ])
    })
}

/// Adds the exception types to the module.
pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    for kind in types(module.py())? {
        let kind = kind.bind(module.py());
        module.add(kind.name()?, kind)?;
    }
    Ok(())
}

/// An exception of `kind` with the hint as its note.
pub(crate) fn raise(kind: Kind, message: &str, hint: Option<String>) -> PyErr {
    Python::attach(|py| {
        let build = || -> PyResult<PyErr> {
            let class = types(py)?[kind as usize + 1].bind(py).clone();
            // A message may quote a URL with a password, or a name with control characters.
            let error = PyErr::from_type(class, shown_lines(message));
            note(py, &error, hint.as_deref().map(shown_lines))?;
            Ok(error)
        };
        build().unwrap_or_else(|error| error)
    })
}

fn note(py: Python<'_>, error: &PyErr, hint: Option<String>) -> PyResult<()> {
    if let Some(hint) = hint {
        // `add_note` is Python 3.11; 3.10 carries the list all the same.
        error.value(py).setattr("__notes__", PyList::new(py, [hint])?)?;
    }
    Ok(())
}

/// `error` as an exception of `kind`.
pub(crate) fn map<E: std::error::Error + Hint>(kind: Kind) -> impl Fn(E) -> PyErr {
    move |error| raise(kind, &error.to_string(), error.hint())
}

/// A missing artifact is a `FileNotFoundError`, as for any other file.
pub(crate) fn artifact(error: ArtifactError) -> PyErr {
    match &error {
        ArtifactError::Missing { .. } => Python::attach(|py| {
            let raised = PyFileNotFoundError::new_err(error.to_string());
            match note(py, &raised, error.hint()) {
                Ok(()) => raised,
                Err(other) => other,
            }
        }),
        _ => raise(Kind::Artifact, &error.to_string(), error.hint()),
    }
}
