//! The files of a model directory in Hugging Face form, and the hashes that artifacts carry of them.

use crate::error::DataError;
use crate::family::named::{self, NamedModel};
use crate::family::{self, Family, FamilyFiles, PartNames, parts};
use dflop_types::artifact::hash_parts;
use dflop_types::{MadeFrom, regular};
use serde_json::Value;
use std::path::{Path, PathBuf};
use tokenizers::AddedToken;

/// Bytes of one file, at most; the largest tokenizers have some 35 MB.
const BYTES_MAX: u64 = 512 << 20;

/// A file of a model directory.
#[derive(Debug)]
pub(crate) struct ModelFile {
    pub(crate) path: PathBuf,
    /// Empty where it is not there.
    pub(crate) bytes: Vec<u8>,
}

impl ModelFile {
    /// The file at `path`.
    ///
    /// # Errors
    /// [`DataError::Io`] where it cannot be read.
    fn read(path: PathBuf) -> Result<Self, DataError> {
        match regular::read(&path, BYTES_MAX) {
            Ok(bytes) => Ok(Self { path, bytes }),
            Err(source) => Err(DataError::Io { act: "read", path, source }),
        }
    }

    /// The file as JSON; an empty object where it is not there.
    ///
    /// # Errors
    /// [`DataError::Model`].
    pub(crate) fn json(&self) -> Result<Value, DataError> {
        if self.bytes.is_empty() {
            return Ok(Value::Object(serde_json::Map::new()));
        }
        serde_json::from_slice(&self.bytes).map_err(|error| self.unsound(format!("it is not JSON: {error}")))
    }

    /// The file as text.
    ///
    /// # Errors
    /// [`DataError::Model`].
    fn text(&self) -> Result<String, DataError> {
        String::from_utf8(self.bytes.clone())
            .map_err(|error| self.unsound(format!("it is not UTF-8: {error}")))
    }

    /// The error of a file that cannot be used.
    pub(crate) fn unsound(&self, cause: String) -> DataError {
        DataError::Model { path: self.path.clone(), cause }
    }
}

/// The files that decide a sample's shape.
#[derive(Debug)]
pub(crate) struct ModelFiles {
    pub(crate) config: ModelFile,
    preprocessor: ModelFile,
    video_preprocessor: ModelFile,
    pub(crate) tokenizer: ModelFile,
    pub(crate) tokenizer_config: ModelFile,
    special_tokens_map: ModelFile,
    added_tokens: ModelFile,
    processor: ModelFile,
    chat_template: ModelFile,
    /// A template of the user's own, which goes before the model's.
    own_template: Option<ModelFile>,
}

impl ModelFiles {
    /// The files of `model_dir`.
    ///
    /// # Errors
    /// [`DataError::Io`] for the first that cannot be read, [`DataError::Tekken`].
    pub(crate) fn read(model_dir: &Path) -> Result<Self, DataError> {
        let tekken = model_dir.join("tekken.json");
        if tekken.is_file() && !model_dir.join("tokenizer.json").exists() {
            return Err(DataError::Tekken { path: tekken });
        }
        // Of several names for the same thing the first that is there.
        let needed = |names: &[&str]| ModelFile::read(first_of(model_dir, names));
        let optional = |names: &[&str]| {
            let path = first_of(model_dir, names);
            if path.is_file() { ModelFile::read(path) } else { Ok(ModelFile { path, bytes: Vec::new() }) }
        };
        Ok(Self {
            config: needed(&["config.json"])?,
            // Only the families that we know read these.
            preprocessor: optional(&["preprocessor_config.json"])?,
            video_preprocessor: optional(&["video_preprocessor_config.json"])?,
            tokenizer: needed(&["tokenizer.json"])?,
            tokenizer_config: optional(&["tokenizer_config.json"])?,
            special_tokens_map: optional(&["special_tokens_map.json"])?,
            added_tokens: optional(&["added_tokens.json"])?,
            processor: optional(&["processor_config.json"])?,
            // As the processors of transformers: the older file where both are there.
            chat_template: optional(&["chat_template.json", "chat_template.jinja"])?,
            own_template: None,
        })
    }

    /// The files of a model that is known by name. Where its tokenizer is not at hand, one that estimates takes its place,
    /// and where there is no chat template, a plain one.
    ///
    /// # Errors
    /// As [`ModelFiles::read`] and [`ModelFiles::family`].
    pub(crate) fn named(model: &NamedModel) -> Result<Self, DataError> {
        let directory = PathBuf::from(format!("model {}", model.name));
        let file =
            |name: &str, text: String| ModelFile { path: directory.join(name), bytes: text.into_bytes() };
        let local = |name: &str| match &model.tokenizer_dir {
            Some(dir) if dir.join(name).is_file() => ModelFile::read(dir.join(name)),
            _ => Ok(file(name, String::new())),
        };
        let mut files = Self {
            config: file("config.json", model.config.clone()),
            preprocessor: file("preprocessor_config.json", model.preprocessor.clone()),
            video_preprocessor: file("video_preprocessor_config.json", String::new()),
            tokenizer: match &model.tokenizer_dir {
                Some(dir) => ModelFile::read(dir.join("tokenizer.json"))?,
                None => file("tokenizer.json", String::new()),
            },
            tokenizer_config: local("tokenizer_config.json")?,
            special_tokens_map: local("special_tokens_map.json")?,
            added_tokens: local("added_tokens.json")?,
            processor: template_alone(local("processor_config.json")?)?,
            chat_template: match local("chat_template.json")? {
                none if none.bytes.is_empty() => local("chat_template.jinja")?,
                found => found,
            },
            own_template: None,
        };
        let (config, family) = (files.trained_config()?, files.family()?);
        if files.tokenizer.bytes.is_empty() {
            files.tokenizer.bytes = named::estimating_tokenizer(&config, family.as_ref()).into_bytes();
        }
        if matches!(files.template(), Err(DataError::NoTemplate { .. })) {
            files.chat_template =
                file("chat_template.jinja", named::plain_template(&config, family.as_ref()));
        }
        Ok(files)
    }

    /// The files, with the chat template of the file at `path` in place of the model's.
    ///
    /// # Errors
    /// [`DataError::Io`] where it cannot be read.
    pub(crate) fn with_template(mut self, path: Option<&Path>) -> Result<Self, DataError> {
        if let Some(path) = path {
            self.own_template = Some(ModelFile::read(path.to_owned())?);
        }
        Ok(self)
    }

    /// The hash of the user's own chat template, where there is one.
    pub(crate) fn own_template_hash(&self) -> Option<String> {
        self.own_template.as_ref().map(|file| hash_parts([file.bytes.as_slice()]))
    }

    /// The chat template and the file it is from: the user's own, else `processor_config.json`,
    /// `chat_template.json`, `chat_template.jinja`, `tokenizer_config.json`, the first that has one. Where none has, Voxtral's is
    /// that of its processor, which has no Jinja.
    ///
    /// # Errors
    /// [`DataError::NoTemplate`] where no file has one, [`DataError::Model`] where it is of no form we read.
    pub(crate) fn template(&self) -> Result<(PathBuf, String), DataError> {
        if let Some(file) = &self.own_template {
            return Ok((file.path.clone(), file.text()?));
        }
        for file in [&self.processor, &self.chat_template, &self.tokenizer_config] {
            let is_jinja = file.path.extension().is_some_and(|extension| extension == "jinja");
            if is_jinja && !file.bytes.is_empty() {
                return Ok((file.path.clone(), file.text()?));
            }
            let found = template_in(&file.json()?["chat_template"]);
            if let Some(found) = found.map_err(|cause| file.unsound(cause))? {
                return Ok((file.path.clone(), found));
            }
        }
        if self.config.json()?["model_type"] == "voxtral" {
            return Ok((self.config.path.clone(), VOXTRAL.to_owned()));
        }
        Err(DataError::NoTemplate {
            model_dir: self.config.path.parent().unwrap_or(Path::new("")).to_owned(),
        })
    }

    /// The template that the family's processor takes for conversations with a video, whatever the model's files have:
    /// `SmolVLMProcessor` does so, as the published templates write no video. `None` where the user gave a template.
    pub(crate) fn template_of_videos(&self, config: &Value) -> Option<&'static str> {
        (self.own_template.is_none() && config["model_type"] == "smolvlm").then_some(SMOLVLM_WITH_VIDEOS)
    }

    /// Whether the model has a template named `tool_use`, which tokenizers of transformers take in place of the default where there
    /// are tools.
    pub(crate) fn has_template_of_tools(&self) -> Result<bool, DataError> {
        let is_there = |field: &Value| match field {
            Value::Array(list) => list.iter().any(|one| one["name"] == TOOL_USE),
            other => other.get(TOOL_USE).is_some(),
        };
        let folder = self.config.path.parent().unwrap_or(Path::new("")).join("additional_chat_templates");
        let in_tokenizer = is_there(&self.tokenizer_config.json()?["chat_template"]);
        let is_file = folder.join(format!("{TOOL_USE}.jinja")).is_file();
        Ok(self.own_template.is_none() && (in_tokenizer || is_file))
    }

    /// `tokenizer_config.json`, and what `special_tokens_map.json` says where the former lists no `added_tokens_decoder`; whether
    /// it does not.
    fn token_fields(&self) -> Result<(Value, bool), DataError> {
        let mut fields = self.tokenizer_config.json()?;
        let is_older_form = fields.get("added_tokens_decoder").is_none();
        if is_older_form
            && let (Value::Object(fields), Value::Object(more)) =
                (&mut fields, self.special_tokens_map.json()?)
        {
            fields.extend(more);
        }
        Ok((fields, is_older_form))
    }

    /// Special tokens by the names that templates know them by, in transformers' order.
    ///
    /// # Errors
    /// [`DataError::Model`] where a file is not JSON.
    pub(crate) fn special_tokens(&self) -> Result<Vec<(String, String)>, DataError> {
        let (fields, _) = self.token_fields()?;
        let content = |(name, value): (&str, &Value)| Some((name.to_owned(), token_content(value)?));
        Ok(named_tokens(&fields).filter_map(content).collect())
    }

    /// The tokens that stand beside `tokenizer.json`, which transformers adds to it.
    ///
    /// # Errors
    /// [`DataError::Model`] where a file is not JSON.
    pub(crate) fn added_tokens(&self) -> Result<AddedTokens, DataError> {
        let (fields, is_older_form) = self.token_fields()?;
        let lists = ["extra_special_tokens", "additional_special_tokens"].map(|name| fields[name].as_array());
        let listed = lists.into_iter().flatten().find(|list| !list.is_empty()).into_iter().flatten();
        let special: Vec<AddedToken> = named_tokens(&fields)
            .map(|(_, value)| value)
            .chain(listed)
            .filter_map(|value| added_token(value, true))
            .collect();
        let mut by_id: Vec<(u32, AddedToken)> = if is_older_form {
            let older = self.added_tokens.json()?;
            let entry = |(content, id): (&String, &Value)| {
                let is_special = special.iter().any(|token| token.content == *content);
                Some((u32::try_from(id.as_u64()?).ok()?, AddedToken::from(content.clone(), is_special)))
            };
            older.as_object().into_iter().flatten().filter_map(entry).collect()
        } else {
            let entry = |(id, value): (&String, &Value)| Some((id.parse().ok()?, added_token(value, false)?));
            fields["added_tokens_decoder"].as_object().into_iter().flatten().filter_map(entry).collect()
        };
        by_id.sort_by_key(|(id, _)| *id);
        Ok(AddedTokens { by_id, special, is_older_form })
    }

    /// `model_config` (a model profile is made from it), `processor` and `tokenizer` (a data profile is).
    pub(crate) fn hashes(&self) -> MadeFrom {
        let hash = |name: &str, files: &[&ModelFile]| {
            (name.to_owned(), hash_parts(files.iter().map(|file| file.bytes.as_slice())))
        };
        let processors: Vec<&ModelFile> = match [&self.preprocessor, &self.processor] {
            [none, processor] if none.bytes.is_empty() => {
                vec![&self.config, processor, &self.video_preprocessor]
            }
            [own, none] if none.bytes.is_empty() => vec![&self.config, own, &self.video_preprocessor],
            [own, processor] => vec![&self.config, own, &self.video_preprocessor, processor],
        };
        let mut tokenizer = vec![
            &self.tokenizer,
            &self.tokenizer_config,
            &self.special_tokens_map,
            &self.processor,
            &self.chat_template,
        ];
        tokenizer.extend(Some(&self.added_tokens).filter(|file| !file.bytes.is_empty()));
        MadeFrom::from([
            hash("model_config", &[&self.config]),
            hash("processor", &processors),
            hash("tokenizer", &tokenizer),
        ])
    }

    /// The files that the family's settings come from.
    ///
    /// # Errors
    /// [`DataError::Model`] for one that is not JSON.
    pub(crate) fn family_files(&self) -> Result<FamilyFiles, DataError> {
        let processor = parts::with_old_name(self.processor.json()?);
        let (own, video) = (self.preprocessor.json()?, self.video_preprocessor.json()?);
        let names = PartNames::of_files(&own, &video, &processor);
        let (preprocessor, video_preprocessor) = parts::of_files(own, video, &processor);
        Ok(FamilyFiles { config: self.config.json()?, preprocessor, video_preprocessor, processor, names })
    }

    /// `config.json`, or the section of it that describes the model that trains: of Qwen2.5-Omni and Qwen3-Omni the thinker.
    ///
    /// # Errors
    /// [`DataError::Model`] if it is not JSON.
    pub(crate) fn trained_config(&self) -> Result<Value, DataError> {
        let mut config = self.config.json()?;
        Ok(match config.get_mut("thinker_config") {
            Some(thinker) if thinker.is_object() => thinker.take(),
            _ => config,
        })
    }

    /// The shape rule of the model's family.
    ///
    /// # Errors
    /// [`DataError::UnknownFamily`], [`DataError::Config`], [`DataError::Model`]; [`DataError::Io`] where the family reads a
    /// `preprocessor_config.json` and there is none.
    pub(crate) fn family(&self) -> Result<Box<dyn Family>, DataError> {
        let files = self.family_files()?;
        let is_known =
            files.config["model_type"].as_str().is_some_and(|name| family::known().contains(&name));
        if is_known && self.preprocessor.bytes.is_empty() && !parts::holds_parts(&files.processor) {
            let source = std::io::ErrorKind::NotFound.into();
            return Err(DataError::Io { act: "read", path: self.preprocessor.path.clone(), source });
        }
        family::open(&files)?.ok_or_else(|| DataError::UnknownFamily {
            path: self.config.path.clone(),
            found: files.config["model_type"].as_str().unwrap_or("missing").to_owned(),
            known: family::known(),
        })
    }
}

/// Tokens that stand beside `tokenizer.json`.
#[derive(Debug)]
pub(crate) struct AddedTokens {
    /// Ascending by the id that the files say.
    pub(crate) by_id: Vec<(u32, AddedToken)>,
    /// Special tokens, without ids.
    pub(crate) special: Vec<AddedToken>,
    /// Whether `by_id` is of `added_tokens.json`.
    pub(crate) is_older_form: bool,
}

/// The special tokens that have names, by these.
fn named_tokens(fields: &Value) -> impl Iterator<Item = (&str, &Value)> {
    let groups = ["extra_special_tokens", "model_specific_special_tokens"];
    let own = SPECIAL_TOKENS.iter().map(|name| (*name, &fields[*name]));
    let of_groups = groups.into_iter().flat_map(|group| fields[group].as_object().into_iter().flatten());
    own.chain(of_groups.map(|(name, value)| (name.as_str(), value)))
}

/// The text of a token that is written as a text, or as an object with its `content`.
fn token_content(value: &Value) -> Option<String> {
    value.as_str().or_else(|| value["content"].as_str()).map(ToOwned::to_owned)
}

fn added_token(value: &Value, is_special: bool) -> Option<AddedToken> {
    let flag = |name: &str| value[name].as_bool();
    let is_special = is_special || flag("special").unwrap_or(false);
    let token = AddedToken::from(token_content(value)?, is_special)
        .single_word(flag("single_word").unwrap_or(false))
        .lstrip(flag("lstrip").unwrap_or(false))
        .rstrip(flag("rstrip").unwrap_or(false));
    Some(match flag("normalized") {
        Some(is_normalized) => token.normalized(is_normalized),
        None => token,
    })
}

/// Names of special tokens that every tokenizer of transformers has.
const SPECIAL_TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// Writes what `DEFAULT_CHAT_TEMPLATE` of transformers' `processing_smolvlm.py` writes.
const SMOLVLM_WITH_VIDEOS: &str = concat!(
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}:",
    "{% if message['content'][0]['type'] != 'image' %}{{ ' ' }}{% endif %}",
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}",
    "{% elif part['type'] == 'image' %}{{ '<image>' }}{% elif part['type'] == 'video' %}{{ '<video>' }}{% endif %}",
    "{% endfor %}<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}",
);

/// The name of a template for records with tools.
const TOOL_USE: &str = "tool_use";

/// Writes what mistral-common writes for Voxtral (its tokenizers v7 and v11): `VoxtralProcessor` asks it, and the model's files
/// have no template. As there, texts that stand side by side are paragraphs, an answer loses spaces at its end, and sounds
/// beside a system turn are refused.
const VOXTRAL: &str = concat!(
    "<s>{% for message in messages %}",
    "{% if message['role'] == 'user' %}[INST]",
    "{% for part in message['content'] %}",
    "{% if part['type'] == 'text' %}{% if loop.previtem and loop.previtem['type'] == 'text' %}{{ '\n\n' }}{% endif %}",
    "{{ part['text'] }}",
    "{% elif messages[0]['role'] == 'system' %}",
    "{{ raise_exception('a sound beside a system turn, which Voxtral does not take') }}",
    "{% else %}[AUDIO]{% endif %}{% endfor %}[/INST]",
    "{% elif message['role'] == 'system' %}[SYSTEM_PROMPT]{{ message['content'] }}[/SYSTEM_PROMPT]",
    "{% else %}{% generation %}{{ message['content'].rstrip(' ') }}</s>{% endgeneration %}{% endif %}{% endfor %}",
);

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

/// Of a `processor_config.json` the chat template: the rest is of the model whose tokenizer it stands beside.
fn template_alone(mut processor: ModelFile) -> Result<ModelFile, DataError> {
    if let Some(template) = processor.json()?.get("chat_template") {
        processor.bytes = serde_json::json!({"chat_template": template}).to_string().into_bytes();
    } else {
        processor.bytes.clear();
    }
    Ok(processor)
}

fn first_of(model_dir: &Path, names: &[&str]) -> PathBuf {
    let paths = || names.iter().map(|name| model_dir.join(name));
    paths().find(|path| path.is_file()).unwrap_or_else(|| model_dir.join(names[0]))
}

/// Hashes of the files of a model directory: `model_config`, `processor`, `tokenizer`.
///
/// # Errors
/// [`DataError::Io`] for the first file that cannot be read.
pub fn model_hashes(model_dir: &Path) -> Result<MadeFrom, DataError> {
    Ok(ModelFiles::read(model_dir)?.hashes())
}

/// As [`model_hashes`], of a model that is known by name.
///
/// # Errors
/// As [`model_hashes`]; [`DataError::Model`], [`DataError::UnknownFamily`] and [`DataError::Config`].
pub fn named_hashes(model: &NamedModel) -> Result<MadeFrom, DataError> {
    Ok(ModelFiles::named(model)?.hashes())
}

/// The shape rule of a model directory.
///
/// # Errors
/// [`DataError::Io`], [`DataError::Model`] for a file that is not JSON, [`DataError::UnknownFamily`] and
/// [`DataError::Config`].
pub fn family_of(model_dir: &Path) -> Result<Box<dyn Family>, DataError> {
    ModelFiles::read(model_dir)?.family()
}
