//! What is wrong with `dflop.yaml`: every problem with its line and field.

use dflop_types::Hint;
use std::fmt::{self, Write as _};
use std::path::PathBuf;
use thiserror::Error;

/// One problem of the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigProblem {
    /// Line, from 1; 0 where the file as a whole is at fault.
    pub line: usize,
    /// Path of the field, for example `train.steps`.
    pub field: String,
    /// Value, rule.
    pub message: String,
    /// Whether the field has to be there and is not.
    pub is_missing: bool,
}

impl fmt::Display for ConfigProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.line > 0 {
            write!(f, "line {}: ", self.line)?;
        }
        write!(f, "{}: {}", self.field, self.message)
    }
}

/// Why the configuration cannot be used.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// There is no such file.
    #[error("no configuration at `{}`", .0.display())]
    Missing(PathBuf),
    /// The operating system refused.
    #[error("cannot read `{}`: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// The file is not YAML.
    #[error("`{}` is not YAML: {cause}", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// Line and cause.
        cause: String,
    },
    /// The file breaks rules; all of them are listed.
    #[error("`{}` has {} problem{}{}", path.display(), problems.len(), if problems.len() == 1 { "" } else { "s" }, list(problems))]
    Unsound {
        /// The file.
        path: PathBuf,
        /// Every problem, by line.
        problems: Vec<ConfigProblem>,
    },
}

fn list(problems: &[ConfigProblem]) -> String {
    problems.iter().fold(String::new(), |mut text, problem| {
        let _ = write!(text, "\n  {problem}");
        text
    })
}

impl Hint for ConfigError {
    fn hint(&self) -> Option<String> {
        match self {
            Self::Missing(_) => {
                Some("name one with `--config FILE`, or make a demo with `dflop demo-data demo`".to_owned())
            }
            Self::Unsound { .. } => Some("docs/configuration.md lists every field".to_owned()),
            Self::Io { source, .. } if source.to_string().contains("in UTF-8") => {
                Some("save it as UTF-8".to_owned())
            }
            Self::Syntax { .. } => Some(
                "fix that line: indent with spaces, quote text that holds `: ` or ` #`, close what is open"
                    .to_owned(),
            ),
            Self::Io { .. } => None,
        }
    }
}
