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
    special_tokens_map_path: PathBuf,
    special_tokens_map: Vec<u8>,
    processor_path: PathBuf,
    processor: Vec<u8>,
    chat_template_path: PathBuf,
    chat_template: Vec<u8>,
    /// A template of the user's own, which goes before the model's.
    own_template: Option<(PathBuf, Vec<u8>)>,
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
        let (special_tokens_map_path, special_tokens_map) = optional(&["special_tokens_map.json"])?;
        let (processor_path, processor) = optional(&["processor_config.json"])?;
        // As the processors of transformers: the older file where both are there.
        let (chat_template_path, chat_template) = optional(&["chat_template.json", "chat_template.jinja"])?;
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
            special_tokens_map_path,
            special_tokens_map,
            processor_path,
            processor,
            chat_template_path,
            chat_template,
            own_template: None,
        })
    }

    /// The files, with the chat template of the file at `path` in place of the model's.
    ///
    /// # Errors
    /// [`DataError::Io`] where it cannot be read.
    pub(crate) fn with_template(mut self, path: Option<&Path>) -> Result<Self, DataError> {
        if let Some(path) = path {
            self.own_template = Some((path.to_owned(), read(path)?));
        }
        Ok(self)
    }

    /// The hash of the user's own chat template, where there is one.
    pub(crate) fn own_template_hash(&self) -> Option<String> {
        self.own_template.as_ref().map(|(_, text)| hash_parts([text.as_slice()]))
    }

    /// The chat template and the file it is from: the user's own, else `processor_config.json`,
    /// `chat_template.json`, `chat_template.jinja`, `tokenizer_config.json`, the first that has one.
    ///
    /// # Errors
    /// [`DataError::Model`] where no file has one, or it is of no form we read.
    pub(crate) fn template(&self) -> Result<(PathBuf, String), DataError> {
        let text = |path: &Path, bytes: &[u8]| {
            String::from_utf8(bytes.to_vec()).map_err(|error| DataError::Model {
                path: path.to_owned(),
                cause: format!("it is not UTF-8: {error}"),
            })
        };
        if let Some((path, bytes)) = &self.own_template {
            return Ok((path.clone(), text(path, bytes)?));
        }
        let jinja = |path: &Path| path.extension().is_some_and(|extension| extension == "jinja");
        let files = [
            (&self.processor_path, &self.processor),
            (&self.chat_template_path, &self.chat_template),
            (&self.tokenizer_config_path, &self.tokenizer_config),
        ];
        for (path, bytes) in files {
            if !bytes.is_empty() && jinja(path) {
                return Ok((path.clone(), text(path, bytes)?));
            }
            let found = template_in(&json(path, bytes)?["chat_template"]);
            if let Some(found) = found.map_err(|cause| DataError::Model { path: path.clone(), cause })? {
                return Ok((path.clone(), found));
            }
        }
        Err(DataError::NoTemplate {
            model_dir: self.config_path.parent().unwrap_or(Path::new("")).to_owned(),
        })
    }

    /// `tokenizer_config.json`.
    ///
    /// # Errors
    /// [`DataError::Model`] where it is not JSON.
    pub(crate) fn tokenizer_config(&self) -> Result<Value, DataError> {
        json(&self.tokenizer_config_path, &self.tokenizer_config)
    }

    /// Special tokens by the names that templates know them by, in transformers' order: those of
    /// `tokenizer_config.json`, and of `special_tokens_map.json` where the former lists no `added_tokens_decoder`.
    ///
    /// # Errors
    /// [`DataError::Model`] where one is not JSON.
    pub(crate) fn special_tokens(&self) -> Result<Vec<(String, String)>, DataError> {
        let mut fields = self.tokenizer_config()?;
        if fields.get("added_tokens_decoder").is_none()
            && let (Value::Object(fields), Value::Object(more)) =
                (&mut fields, json(&self.special_tokens_map_path, &self.special_tokens_map)?)
        {
            fields.extend(more);
        }
        let text =
            |value: &Value| value.as_str().or_else(|| value["content"].as_str()).map(ToOwned::to_owned);
        let mut tokens: Vec<(String, String)> = SPECIAL_TOKENS
            .iter()
            .filter_map(|name| Some(((*name).to_owned(), text(&fields[*name])?)))
            .collect();
        for group in ["extra_special_tokens", "model_specific_special_tokens"] {
            let named = fields[group].as_object().into_iter().flatten();
            tokens.extend(named.filter_map(|(name, value)| Some((name.clone(), text(value)?))));
        }
        Ok(tokens)
    }

    /// `model_config` (a model profile is made from it), `processor` and `tokenizer` (a data profile is).
    pub(crate) fn hashes(&self) -> MadeFrom {
        let hash = |name: &str, parts: &[&[u8]]| (name.to_owned(), hash_parts(parts.iter().copied()));
        MadeFrom::from([
            hash("model_config", &[&self.config]),
            hash("processor", &[&self.config, &self.preprocessor, &self.video_preprocessor]),
            hash(
                "tokenizer",
                &[
                    &self.tokenizer,
                    &self.tokenizer_config,
                    &self.special_tokens_map,
                    &self.processor,
                    &self.chat_template,
                ],
            ),
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

/// Names of special tokens that every tokenizer of transformers has.
const SPECIAL_TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// The template in a `chat_template` field: a text, or of several the one named `default`.
fn template_in(field: &Value) -> Result<Option<String>, String> {
    match field {
        Value::Null => Ok(None),
        Value::String(text) => Ok(Some(text.clone())),
        _ => {
            let named = |value: &Value| value["template"].as_str().map(ToOwned::to_owned);
            let default = match field {
                Value::Array(list) => list.iter().find(|one| one["name"] == "default").and_then(named),
                _ => field["default"].as_str().map(ToOwned::to_owned),
            };
            default.map(Some).ok_or_else(|| {
                "`chat_template` has no template named `default`, must be text or have one".to_owned()
            })
        }
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
