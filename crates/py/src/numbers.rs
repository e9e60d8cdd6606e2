//! Integers from Python: lists, and arrays and tensors that convert to one. An entry that is not an integer is named.

use crate::error::{Kind, raise};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use std::ops::RangeInclusive;

/// Characters of a value that an error shows.
const SHOWN: usize = 60;

/// What is right for costs, sizes and seeds.
pub(crate) const ANY: RangeInclusive<u64> = 0..=u64::MAX;

/// The integers of a list, or of what has `tolist`, as arrays and tensors have, on any device.
pub(crate) fn integers(name: &str, given: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
    if let Ok(numbers) = given.extract() {
        return Ok(numbers);
    }
    let list = if given.hasattr("tolist")? { given.call_method0("tolist")? } else { given.clone() };
    // All at once: entry by entry is slow, and only needed to name the wrong one.
    if let Ok(numbers) = list.extract() {
        return Ok(numbers);
    }
    let entries = list.try_iter().map_err(|_| {
        PyTypeError::new_err(format!("`{name}` is {}, must be a list of integers", shown(given)))
    })?;
    let entries = entries.enumerate();
    entries.map(|(index, entry)| integer(&format!("{name}[{index}]"), &entry?, ANY)).collect()
}

/// An integer of `range`.
pub(crate) fn integer(name: &str, given: &Bound<'_, PyAny>, range: RangeInclusive<u64>) -> PyResult<u64> {
    if let Ok(number) = given.extract()
        && range.contains(&number)
    {
        return Ok(number);
    }
    let rule = format!("must be an integer from {} to {}", range.start(), range.end());
    let message = format!("`{name}` is {}, {rule}", shown(given));
    let is_integer = given.call_method0("__index__").is_ok();
    Err(if is_integer { raise(Kind::Schedule, &message, None) } else { PyTypeError::new_err(message) })
}

/// As Python writes it, cut where it is long.
fn shown(value: &Bound<'_, PyAny>) -> String {
    let text = value.repr().map_or_else(|_| "something".to_owned(), |text| text.to_string());
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}
