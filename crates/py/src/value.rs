//! Records cross as dicts, lists, texts and numbers of Python: what is JSON in a file is no text on the way to it.

use crate::error::{Kind, raise};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple};
use serde_json::{Map, Number, Value};

/// The record that `value` is written as.
pub(crate) fn to_python(
    py: Python<'_>,
    value: Result<Value, serde_json::Error>,
) -> PyResult<Bound<'_, PyAny>> {
    object(py, &value.map_err(|error| raise(Kind::Plan, &error.to_string(), None))?)
}

fn object<'py>(py: Python<'py>, value: &Value) -> PyResult<Bound<'py, PyAny>> {
    Ok(match value {
        Value::Null => py.None().into_bound(py),
        Value::Bool(truth) => PyBool::new(py, *truth).to_owned().into_any(),
        Value::Number(number) => match (number.as_u64(), number.as_i64()) {
            (Some(whole), _) => whole.into_pyobject(py)?.into_any(),
            (None, Some(whole)) => whole.into_pyobject(py)?.into_any(),
            (None, None) => PyFloat::new(py, number.as_f64().unwrap_or(f64::NAN)).into_any(),
        },
        Value::String(text) => PyString::new(py, text).into_any(),
        Value::Array(items) => {
            let list = PyList::empty(py);
            for item in items {
                list.append(object(py, item)?)?;
            }
            list.into_any()
        }
        Value::Object(fields) => {
            let dict = PyDict::new(py);
            for (name, field) in fields {
                dict.set_item(name, object(py, field)?)?;
            }
            dict.into_any()
        }
    })
}

/// What a record of Python's says, for a type that reads it; `what` names it in the error.
pub(crate) fn from_python(what: &str, record: &Bound<'_, PyAny>) -> PyResult<Value> {
    read(record).map_err(|found| {
        let cause = format!("not {what}: it holds {found}, must hold dicts, lists, texts and finite numbers");
        raise(Kind::Schedule, &cause, None)
    })
}

fn read(object: &Bound<'_, PyAny>) -> Result<Value, String> {
    let unknown = || object.get_type().to_string();
    // Before numbers: a bool is an int of Python's.
    if object.is_none() {
        Ok(Value::Null)
    } else if let Ok(truth) = object.cast::<PyBool>() {
        Ok(Value::Bool(truth.is_true()))
    } else if object.is_instance_of::<PyInt>() {
        let whole =
            object.extract::<u64>().map(Number::from).or_else(|_| object.extract::<i64>().map(Number::from));
        whole.map(Value::Number).map_err(|_| format!("{object}"))
    } else if let Ok(number) = object.cast::<PyFloat>() {
        Number::from_f64(number.value()).map(Value::Number).ok_or_else(|| format!("{object}"))
    } else if let Ok(text) = object.cast::<PyString>() {
        text.to_str().map(|text| Value::String(text.to_owned())).map_err(|_| unknown())
    } else if let Ok(dict) = object.cast::<PyDict>() {
        let mut fields = Map::new();
        for (name, field) in dict {
            fields.insert(name.extract::<String>().map_err(|_| format!("the key {name}"))?, read(&field)?);
        }
        Ok(Value::Object(fields))
    } else if let Ok(list) = object.cast::<PyList>() {
        list.iter().map(|item| read(&item)).collect::<Result<_, _>>().map(Value::Array)
    } else if let Ok(tuple) = object.cast::<PyTuple>() {
        tuple.iter().map(|item| read(&item)).collect::<Result<_, _>>().map(Value::Array)
    } else {
        Err(unknown())
    }
}
