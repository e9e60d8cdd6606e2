//! `model:`, a directory or a name.

use super::section::Section;
use dflop_types::Hint as _;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// `model:`
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ModelSection {
    /// Directory with `config.json`, `preprocessor_config.json` and `tokenizer.json` in Hugging Face form; empty where the
    /// model is named.
    pub dir: PathBuf,
    /// A model of the catalogue in place of a directory: enough to plan, not to train.
    pub name: Option<String>,
    /// Directory with the tokenizer of a model that is named; `null`: text tokens are estimated.
    pub tokenizer: Option<PathBuf>,
    /// `float32` or `bfloat16`.
    pub dtype: String,
    /// Who gives the shapes of media: `transformers`, the model's own processor there, or a function of Python, for example
    /// `module:function`; `null`: the rule of the model's `model_type`.
    pub family: Option<String>,
}

impl ModelSection {
    /// What `family` says for the model's own processor in transformers.
    pub const PROCESSOR: &str = "transformers";

    /// The folder in which Python looks for the rule of `family`: that of the model for its processor, else that of the
    /// configuration, for a module beside it.
    pub fn family_directory<'a>(&'a self, configuration: &'a Path) -> &'a Path {
        if self.family.as_deref() == Some(Self::PROCESSOR) { &self.dir } else { configuration }
    }
}

/// The fields of `model:`; paths start at `directory`.
pub(super) fn model_section(section: &mut Section<'_, '_>, directory: &Path) -> ModelSection {
    let name = section.optional_text("name");
    let model = ModelSection {
        dir: match &name {
            Some(_) => section.optional_text("dir").map(PathBuf::from).unwrap_or_default(),
            None => directory.join(section.text("dir", None)),
        },
        tokenizer: section.optional_text("tokenizer").map(|path| directory.join(path)),
        name,
        // The default stands below, where the device is known.
        dtype: section.choice("dtype", &["float32", "bfloat16"], ""),
        family: section.function("family", ModelSection::PROCESSOR),
    };
    if let Some(name) = &model.name {
        if model.family.as_deref() == Some(ModelSection::PROCESSOR) {
            section.problem_at(
                "family",
                format!("`{}` asks the files of a processor, it needs `model.dir`", ModelSection::PROCESSOR),
            );
        }
        if !model.dir.as_os_str().is_empty() {
            section.problem_at("name", "`model.dir` is there too, must be one of them".to_owned());
        }
        if let Err(error) = dflop_analytic::catalogue_model(name) {
            // The names that are near stand in the problem: a configuration's hint is of all its problems.
            let near = error.hint().map_or_else(String::new, |near| format!(": {near}"));
            section.problem_at("name", format!("{error}{near}"));
        }
    } else if model.tokenizer.is_some() {
        section.problem_at("tokenizer", "only where `model.name` names a model".to_owned());
    }
    model
}
