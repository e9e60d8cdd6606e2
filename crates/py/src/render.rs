//! Chat templates of Python's processes: rendered in children, as a template may end its process.

use pyo3::prelude::*;
use std::ffi::OsString;

/// What a child of Python runs. The folder that it stands in is no place to import from: a dataset may have files of any
/// name.
const SERVE: &str = "import sys; sys.path = [p for p in sys.path if p]; \
                     from dflop._native import serve_chat_templates; serve_chat_templates()";

/// Names the command that renders chat templates: this Python. A program that embeds Python and does not say where it is
/// renders them itself.
pub(crate) fn render_apart(py: Python<'_>) -> PyResult<()> {
    let executable: Option<OsString> = py.import("sys")?.getattr("executable")?.extract()?;
    if let Some(executable) = executable.filter(|path| !path.is_empty()) {
        dflop_data::render_templates_with(vec![executable, "-c".into(), SERVE.into()]);
    }
    Ok(())
}
