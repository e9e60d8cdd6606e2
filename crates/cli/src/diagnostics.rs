//! Errors as people see them: what failed, why, and the act that mends it.

use dflop_types::{ArtifactError, Hint};
use std::fmt::Write as _;

/// An error on its way to a person: text and hint, its type no longer needed.
#[derive(Debug)]
pub struct Failure {
    /// What failed: value, rule. Further lines are indented details.
    pub message: String,
    /// The act that mends it.
    pub hint: Option<String>,
    /// 1: the inputs are valid but the answer is no; 2: wrong arguments or files.
    pub status: i32,
}

impl Failure {
    /// A failure of the caller's arguments or files.
    pub fn new(message: impl Into<String>, hint: Option<String>) -> Self {
        Self { message: message.into(), hint, status: 2 }
    }

    /// The inputs are valid, and the answer is no.
    pub fn answer(message: impl Into<String>, hint: Option<String>) -> Self {
        Self { message: message.into(), hint, status: 1 }
    }

    /// A file that could not be written where `flag` says: that flag names another place, not `--out`.
    pub(crate) fn of_flag(error: ArtifactError, flag: &str) -> Self {
        Self { hint: Some(format!("choose another place with `{flag}`")), ..error.into() }
    }

    /// The text for stderr, with a final line end.
    pub fn render(&self) -> String {
        let mut text = format!("error: {}\n", self.message.trim_end());
        if let Some(hint) = &self.hint {
            let _ = write!(text, "\nhint: {hint}\n");
        }
        text
    }
}

impl<E: std::error::Error + Hint> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::new(error.to_string(), error.hint())
    }
}
