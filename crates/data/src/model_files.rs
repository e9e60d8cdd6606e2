//! The files of a model directory in Hugging Face form, and the hashes that artifacts carry of them.

use crate::error::DataError;
use crate::family::{self, Family, FamilyFiles};
use dflop_types::MadeFrom;
use dflop_types::artifact::hash_parts;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// The bytes of the files that decide a sample's shape; empty where an optional one is not there.
#[derive(Debug)]
pub(crate) struct ModelFiles {
    pub(crate) config_path: PathBuf,
    pub(crate) config: Vec<u8>,
    preprocessor_path: PathBuf,
    preprocessor: Vec<u8>,
    video_preprocessor_path: PathBuf,
    video_preprocessor: Vec<u8>,
    pub(crate) tokenizer_path: PathBuf,
    pub(crate) tokenizer: Vec<u8>,
    pub(crate) tokenizer_config_path: PathBuf,
    pub(crate) tokenizer_config: Vec<u8>,
    pub(crate) chat_template_path: PathBuf,
    pub(crate) chat_template: Vec<u8>,
}

impl ModelFiles {
    /// The files of `model_dir`.
    ///
    /// # Errors
    /// [`DataError::Io`] for the first that cannot be read.
    pub(crate) fn read(model_dir: &Path) -> Result<Self, DataError> {
        // Of several names for the same thing the first that is there.
        let needed = |names: &[&str]| {
            let path = first_of(model_dir, names);
            read(&path).map(|bytes| (path, bytes))
        };
        let optional = |names: &[&str]| {
            let path = first_of(model_dir, names);
            if path.is_file() { read(&path).map(|bytes| (path, bytes)) } else { Ok((path, Vec::new())) }
        };
        let (config_path, config) = needed(&["config.json"])?;
        // Newer processors keep the image processor's fields in one file with their own.
        let (preprocessor_path, preprocessor) =
            needed(&["preprocessor_config.json", "processor_config.json"])?;
        let (video_preprocessor_path, video_preprocessor) = optional(&["video_preprocessor_config.json"])?;
        let (tokenizer_path, tokenizer) = needed(&["tokenizer.json"])?;
        let (tokenizer_config_path, tokenizer_config) = optional(&["tokenizer_config.json"])?;
        let (chat_template_path, chat_template) = optional(&["chat_template.jinja", "chat_template.json"])?;
        Ok(Self {
            config_path,
            config,
            preprocessor_path,
            preprocessor,
            video_preprocessor_path,
            video_preprocessor,
            tokenizer_path,
            tokenizer,
            tokenizer_config_path,
            tokenizer_config,
            chat_template_path,
            chat_template,
        })
    }

    /// `model_config` (a model profile is made from it), `processor` and `tokenizer` (a data profile is).
    pub(crate) fn hashes(&self) -> MadeFrom {
        let hash = |name: &str, parts: &[&[u8]]| (name.to_owned(), hash_parts(parts.iter().copied()));
        MadeFrom::from([
            hash("model_config", &[&self.config]),
            hash("processor", &[&self.config, &self.preprocessor, &self.video_preprocessor]),
            hash("tokenizer", &[&self.tokenizer, &self.tokenizer_config, &self.chat_template]),
        ])
    }

    /// The files that the family's settings come from.
    ///
    /// # Errors
    /// [`DataError::Model`] for one that is not JSON.
    pub(crate) fn family_files(&self) -> Result<FamilyFiles, DataError> {
        Ok(FamilyFiles {
            config: json(&self.config_path, &self.config)?,
            preprocessor: json(&self.preprocessor_path, &self.preprocessor)?,
            video_preprocessor: json(&self.video_preprocessor_path, &self.video_preprocessor)?,
        })
    }

    /// The shape rule of the model's family.
    ///
    /// # Errors
    /// [`DataError::UnknownFamily`], [`DataError::Config`], [`DataError::Model`].
    pub(crate) fn family(&self) -> Result<Box<dyn Family>, DataError> {
        let files = self.family_files()?;
        family::open(&files)?.ok_or_else(|| DataError::UnknownFamily {
            path: self.config_path.clone(),
            found: files.config["model_type"].as_str().unwrap_or("missing").to_owned(),
            known: family::known(),
        })
    }
}

fn first_of(model_dir: &Path, names: &[&str]) -> PathBuf {
    let paths = || names.iter().map(|name| model_dir.join(name));
    paths().find(|path| path.is_file()).unwrap_or_else(|| model_dir.join(names[0]))
}

fn read(path: &Path) -> Result<Vec<u8>, DataError> {
    std::fs::read(path).map_err(|source| DataError::Io { act: "read", path: path.to_owned(), source })
}

/// Hashes of the files of a model directory: `model_config`, `processor`, `tokenizer`.
///
/// # Errors
/// [`DataError::Io`] for the first file that cannot be read.
pub fn model_hashes(model_dir: &Path) -> Result<MadeFrom, DataError> {
    Ok(ModelFiles::read(model_dir)?.hashes())
}

/// The shape rule of a model directory.
///
/// # Errors
/// [`DataError::Io`], [`DataError::Model`] for a file that is not JSON, [`DataError::UnknownFamily`] and
/// [`DataError::Config`].
pub fn family_of(model_dir: &Path) -> Result<Box<dyn Family>, DataError> {
    ModelFiles::read(model_dir)?.family()
}

/// A file of a model directory as JSON; an empty object where it is not there.
///
/// # Errors
/// [`DataError::Model`].
pub(crate) fn json(path: &Path, bytes: &[u8]) -> Result<Value, DataError> {
    if bytes.is_empty() {
        return Ok(Value::Object(serde_json::Map::new()));
    }
    serde_json::from_slice(bytes).map_err(|error| DataError::Model {
        path: path.to_owned(),
        cause: format!("it is not JSON: {error}"),
    })
}
