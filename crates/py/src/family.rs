//! A shape rule that is a function of Python; see `dflop.data.family`.

use dflop_data::family::{Callable, GivenFamily, Marks, MediaShape, Piece, Question};
use dflop_data::probe::MediaKind;
use dflop_types::{EncoderParts, EncoderSegments};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::path::Path;

/// The family that is given as `family`, or that the configuration names; `None` where there is neither.
///
/// # Errors
/// `ProfileError` of `dflop.data.family` where it cannot be imported or is no rule.
pub(crate) fn find(
    py: Python<'_>,
    family: Option<Bound<'_, PyAny>>,
    configured: Option<&str>,
    directory: &Path,
) -> PyResult<Option<GivenFamily>> {
    let module = || py.import("dflop.data.family");
    match (family, configured) {
        (Some(family), name) => made(&module()?.call_method1("describe", (family, name))?).map(Some),
        (None, Some(name)) => made(&module()?.call_method1("load", (name, directory))?).map(Some),
        (None, None) => Ok(None),
    }
}

/// The rule of a `dflop.data.family.CallableFamily`.
fn made(family: &Bound<'_, PyAny>) -> PyResult<GivenFamily> {
    let mut marks = Vec::new();
    for kind in MediaKind::ALL {
        let found = family.getattr("marks")?.call_method1("get", (kind.as_str(),))?;
        if let Some((placeholder, feature_token)) = found.extract::<Option<(String, String)>>()? {
            marks.push((kind, Marks { placeholder, feature_token, id_fields: &[], number: None }));
        }
    }
    let text = |name: &str| family.getattr(name)?.extract::<String>();
    let function = family.getattr("function")?.unbind();
    Ok(GivenFamily::new(Callable::new(text("name")?, text("version")?, marks, move |question| {
        // Threads of Rust come here: each waits for the interpreter.
        Python::attach(|py| {
            let answer = function.bind(py).call((), Some(&keywords(py, question).map_err(|e| said(py, &e))?));
            let answer = answer.map_err(|error| said(py, &error))?;
            shape(&answer).map_err(|error| format!("gave something else than a shape: {}", error.value(py)))
        })
    })))
}

/// What an exception says, for example `raised ValueError: too thin`.
fn said(py: Python<'_>, error: &PyErr) -> String {
    let kind = error.get_type(py).name().map_or_else(|_| "an exception".to_owned(), |name| name.to_string());
    format!("raised {kind}: {}", error.value(py))
}

fn keywords<'py>(py: Python<'py>, question: &Question) -> PyResult<Bound<'py, PyDict>> {
    let keywords = PyDict::new(py);
    keywords.set_item("kind", question.kind.as_str())?;
    keywords.set_item("height", question.height)?;
    keywords.set_item("width", question.width)?;
    keywords.set_item("num_images", question.num_images)?;
    keywords.set_item("num_frames", question.num_frames)?;
    keywords.set_item("fps", question.fps)?;
    keywords.set_item("duration_s", question.duration_s)?;
    keywords.set_item("sample_rate", question.sample_rate)?;
    keywords.set_item("max_frames", question.max_frames)?;
    keywords.set_item("sample_fps", question.sample_fps)?;
    Ok(keywords)
}

/// A number of features or a text.
#[derive(FromPyObject)]
enum Part {
    Features(u32),
    Text(String),
}

/// The shape in a dict or in the attributes of an object.
fn shape(answer: &Bound<'_, PyAny>) -> PyResult<MediaShape> {
    let field = |name: &str| -> PyResult<Option<Bound<'_, PyAny>>> {
        let found = match answer.cast::<PyDict>() {
            Ok(dict) => dict.get_item(name)?,
            Err(_) => answer.getattr_opt(name)?,
        };
        Ok(found.filter(|value| !value.is_none()))
    };
    let needed = |name: &str| {
        let missing = || pyo3::exceptions::PyKeyError::new_err(format!("`{name}` is missing"));
        field(name)?.ok_or_else(missing)
    };
    let segments: Vec<(u32, u32)> = needed("segments")?.extract()?;
    let parts: Vec<Part> = needed("pieces")?.extract()?;
    let tiles: u64 = segments.iter().map(|(count, _)| u64::from(*count)).sum();
    let num_tiles = match field("num_tiles")? {
        Some(num_tiles) => num_tiles.extract()?,
        None => u32::try_from(tiles)?,
    };
    let groups: Vec<(u32, u32, u32)> =
        field("parts")?.map(|parts| parts.extract()).transpose()?.unwrap_or_default();
    let frame_indices = field("frame_indices")?.map(|indices| indices.extract()).transpose()?;
    Ok(MediaShape {
        num_tiles,
        segments: segments.into_iter().map(|(count, tokens)| EncoderSegments::of(count, tokens)).collect(),
        pieces: parts
            .into_iter()
            .map(|part| match part {
                Part::Features(count) => Piece::Features(count),
                Part::Text(text) => Piece::Text(text),
            })
            .collect(),
        frame_indices: frame_indices.unwrap_or_default(),
        parts: groups
            .into_iter()
            .map(|(count, segments, feature_tokens)| EncoderParts { count, segments, feature_tokens })
            .collect(),
        patches: None,
        first_patches: None,
        last_patches: None,
    })
}
