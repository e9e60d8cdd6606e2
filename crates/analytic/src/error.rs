//! Why no estimate can be made.

use dflop_types::Hint;
use thiserror::Error;

/// Why no estimate can be made of a model on a device.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum AnalyticError {
    /// A field of `config.json` that decides the model's size is missing, or has a value that we do not know.
    #[error("config.json: `{field}` is {value}, {rule}")]
    Config {
        /// Its dotted path.
        field: String,
        /// What it holds, as JSON; `missing`.
        value: String,
        /// What it must be.
        rule: String,
    },
    /// No such model family.
    #[error("config.json: `model_type` is `{found}`, known are {known}")]
    UnknownFamily {
        /// What the file says.
        found: String,
        /// The known ones.
        known: String,
    },
    /// No such model in the catalogue.
    #[error("no model named `{name}` in the catalogue")]
    UnknownModel {
        /// What was asked for.
        name: String,
        /// Names that share a part with it, or all.
        near: String,
    },
    /// No such device in the table.
    #[error("no hardware named `{name}` in the table, known are {known}")]
    UnknownHardware {
        /// What was asked for.
        name: String,
        /// The known ones.
        known: String,
    },
    /// A dtype whose peak rate we do not know.
    #[error("dtype is `{dtype}`, must be `float32`, `bfloat16` or `float16`")]
    Dtype {
        /// What was asked for.
        dtype: String,
    },
    /// A layer that cannot be cut over so many ranks.
    #[error("`{what}` is {count}, tensor parallelism of {degree} does not divide it")]
    Degree {
        /// What would be cut.
        what: &'static str,
        /// How many there are.
        count: u64,
        /// The degree.
        degree: u64,
    },
    /// A component whose layers cannot be cut over so many ranks.
    #[error("the {component} has {count} {what}, which tensor parallel degree {degree} does not divide")]
    Undivided {
        /// Encoder or LLM.
        component: &'static str,
        /// What would be dealt out to the ranks.
        what: &'static str,
        /// How many there are.
        count: u64,
        /// The degree.
        degree: u64,
        /// The greatest smaller degree that divides heads and all columns.
        near: u64,
    },
    /// No module of that name.
    #[error("model has no module `{name}`, it has {known}")]
    UnknownModule {
        /// What was asked for.
        name: String,
        /// Those it has.
        known: String,
    },
}

impl Hint for AnalyticError {
    fn hint(&self) -> Option<String> {
        match self {
            Self::UnknownModel { near, .. } => Some(format!("`dflop models` lists them, as {near}")),
            Self::UnknownHardware { .. } => Some("`dflop models` lists the table".to_owned()),
            Self::Undivided { near, .. } => Some(format!(
                "take a degree that divides attention heads and widths: of the smaller ones the greatest is {near}"
            )),
            Self::Config { .. } | Self::UnknownFamily { .. } => {
                Some("measure it on a device: `dflop profile model` without `--estimate`".to_owned())
            }
            _ => None,
        }
    }
}
