//! The files of a model directory in Hugging Face form, and the hashes that artifacts carry of them.

use crate::error::DataError;
use crate::family::LlavaOnevision;
use dflop_types::MadeFrom;
use dflop_types::artifact::hash_parts;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// The bytes of the three files that decide a sample's shape.
#[derive(Debug)]
pub(crate) struct ModelFiles {
    pub(crate) config_path: PathBuf,
    pub(crate) config: Vec<u8>,
    pub(crate) preprocessor_path: PathBuf,
    pub(crate) preprocessor: Vec<u8>,
    pub(crate) tokenizer_path: PathBuf,
    pub(crate) tokenizer: Vec<u8>,
}

impl ModelFiles {
    /// The files of `model_dir`.
    ///
    /// # Errors
    /// [`DataError::Io`] for the first that cannot be read.
    pub(crate) fn read(model_dir: &Path) -> Result<Self, DataError> {
        let config_path = model_dir.join("config.json");
        let config = read(&config_path)?;
        // Newer processors keep the image processor's fields in one file with their own.
        let preprocessor_path = ["preprocessor_config.json", "processor_config.json"]
            .into_iter()
            .map(|name| model_dir.join(name))
            .find(|path| path.is_file())
            .unwrap_or_else(|| model_dir.join("preprocessor_config.json"));
        let preprocessor = read(&preprocessor_path)?;
        let tokenizer_path = model_dir.join("tokenizer.json");
        let tokenizer = read(&tokenizer_path)?;
        Ok(Self { config_path, config, preprocessor_path, preprocessor, tokenizer_path, tokenizer })
    }

    /// `model_config` (a model profile is made from it), `processor` and `tokenizer` (a data profile is).
    pub(crate) fn hashes(&self) -> MadeFrom {
        let hash = |name: &str, parts: &[&[u8]]| (name.to_owned(), hash_parts(parts.iter().copied()));
        MadeFrom::from([
            hash("model_config", &[&self.config]),
            hash("processor", &[&self.config, &self.preprocessor]),
            hash("tokenizer", &[&self.tokenizer]),
        ])
    }
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

/// The LLaVA-OneVision shape rule of a model directory.
///
/// # Errors
/// [`DataError::Io`], [`DataError::Model`] for a file that is not JSON, and [`DataError::Config`].
pub fn llava_onevision_of(model_dir: &Path) -> Result<LlavaOnevision, DataError> {
    let files = ModelFiles::read(model_dir)?;
    let config = json(&files.config_path, &files.config)?;
    LlavaOnevision::from_config(&config, &json(&files.preprocessor_path, &files.preprocessor)?)
}

/// A file of a model directory as JSON.
///
/// # Errors
/// [`DataError::Model`].
pub(crate) fn json(path: &Path, bytes: &[u8]) -> Result<Value, DataError> {
    serde_json::from_slice(bytes).map_err(|error| DataError::Model {
        path: path.to_owned(),
        cause: format!("it is not JSON: {error}"),
    })
}
