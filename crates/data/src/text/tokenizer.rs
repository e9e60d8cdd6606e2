//! A model's tokenizer, as transformers sets it up from several files.

use crate::error::DataError;
use crate::family::model_files::{AddedTokens, ModelFiles};
use crate::foreign::guarded;
use serde_json::Value;
use std::collections::HashMap;
use tokenizers::processors::template::TemplateProcessing;
use tokenizers::utils::padding::PaddingStrategy;
use tokenizers::{AddedToken, Tokenizer};

/// Larger numbers of transformers mean "no limit" (`VERY_LARGE_INTEGER`).
const NO_LIMIT: u64 = 1_000_000_000_000_000_000;

/// A tokenizer, and what it must not be asked for.
#[derive(Debug)]
pub(super) struct ModelTokenizer {
    pub(super) tokenizer: Tokenizer,
    /// Tokens that transformers would add with ids that the model has no embedding for.
    strangers: Vec<String>,
    cut: Option<Cut>,
}

/// Where the processor cuts a sample.
#[derive(Debug, PartialEq, Eq)]
struct Cut {
    num_tokens: u64,
    /// The file and the setting that say so.
    setting: &'static str,
}

impl ModelTokenizer {
    /// The tokenizer of a model whose LLM backbone has `vocabulary` embeddings.
    ///
    /// # Errors
    /// [`DataError::Model`] for a file that is not as transformers takes it.
    pub(super) fn open(
        files: &ModelFiles,
        special_tokens: &[(String, String)],
        vocabulary: Option<u64>,
    ) -> Result<Self, DataError> {
        let settings = files.tokenizer_config.json()?;
        if settings["split_special_tokens"] == true {
            let cause = "`split_special_tokens` is true, must be false: the tokens that stand for media would be split";
            return Err(files.tokenizer_config.unsound(cause.to_owned()));
        }
        let added = files.added_tokens()?;
        let made = || {
            let mut tokenizer = Tokenizer::from_bytes(&files.tokenizer.bytes)
                .map_err(|error| format!("it is no tokenizer: {error}"))?;
            let cut = cut(&settings, &tokenizer);
            tokenizer
                .with_truncation(None)
                .map_err(|error| format!("its truncation cannot be undone: {error}"))?;
            tokenizer.with_padding(None);
            let strangers = add_tokens(&mut tokenizer, added, vocabulary);
            surround(&mut tokenizer, &settings, special_tokens)?;
            Ok::<Self, String>(Self { tokenizer, strangers, cut })
        };
        let opened = guarded(made).map_err(|cause| files.tokenizer.unsound(cause))?;
        if let Some(size) = vocabulary {
            let largest = opened.tokenizer.get_vocab(true).into_values().max().unwrap_or(0);
            if u64::from(largest) >= size {
                let cause =
                    format!("its largest id is {largest}, must be below the model's `vocab_size` {size}");
                return Err(files.tokenizer.unsound(cause));
            }
        }
        Ok(opened)
    }

    /// `Ok` if the model has an embedding for every token of the text.
    pub(super) fn check_text(&self, text: &str) -> Result<(), String> {
        match self.strangers.iter().find(|token| text.contains(token.as_str())) {
            Some(token) => Err(format!(
                "its text holds `{token}`, a token that the model's files name and that neither `tokenizer.json` nor the \
                 model's `vocab_size` has: must not"
            )),
            None => Ok(()),
        }
    }

    /// `Ok` if the processor takes a sample of so many tokens whole.
    pub(super) fn check_length(&self, num_tokens: u64) -> Result<(), String> {
        match &self.cut {
            Some(Cut { num_tokens: most, setting }) if num_tokens > *most => Err(format!(
                "it has {num_tokens} tokens, and {setting} lets the processor cut it to {most}: nothing is cut here; set \
                 it to null to train such samples whole"
            )),
            _ => Ok(()),
        }
    }
}

/// Where transformers' processors cut: its tokenizers keep these settings as defaults, and a `max_length` alone cuts.
fn cut(settings: &Value, tokenizer: &Tokenizer) -> Option<Cut> {
    let own =
        |name: &'static str, setting| settings[name].as_u64().map(|num_tokens| Cut { num_tokens, setting });
    let max_length = || {
        if settings.get("max_length").is_some() {
            return own("max_length", "`max_length` of tokenizer_config.json");
        }
        if let Some(truncation) = tokenizer.get_truncation() {
            let num_tokens = truncation.max_length as u64;
            return Some(Cut { num_tokens, setting: "`truncation.max_length` of tokenizer.json" });
        }
        match tokenizer.get_padding()?.strategy {
            PaddingStrategy::Fixed(length) => {
                Some(Cut { num_tokens: length as u64, setting: "`padding.strategy.Fixed` of tokenizer.json" })
            }
            PaddingStrategy::BatchLongest => None,
        }
    };
    let cut = match settings.get("truncation") {
        None | Some(Value::Null) => max_length(),
        Some(Value::Bool(false)) => None,
        Some(Value::String(name)) if name == "do_not_truncate" => None,
        Some(_) => max_length().or_else(|| {
            own("model_max_length", "`truncation` with `model_max_length` of tokenizer_config.json")
        }),
    };
    cut.filter(|cut| cut.num_tokens < NO_LIMIT)
}

/// Adds the tokens that stand beside `tokenizer.json`; which ones the model has no embedding for, and were left out.
fn add_tokens(tokenizer: &mut Tokenizer, added: AddedTokens, vocabulary: Option<u64>) -> Vec<String> {
    let there = tokenizer.get_added_tokens_decoder();
    let mut tokens: Vec<AddedToken> = added
        .by_id
        .into_iter()
        // In the older form, what `tokenizer.json` says of an id stands.
        .filter(|(id, _)| !added.is_older_form || !there.contains_key(id))
        .map(|(_, token)| token)
        .collect();
    let mut known: Vec<&str> = there.values().map(|token| token.content.as_str()).collect();
    known.extend(tokens.iter().map(|token| token.content.as_str()));
    let mut special = Vec::<AddedToken>::new();
    for token in added.special {
        let content = token.content.as_str();
        if !known.contains(&content) && !special.iter().any(|other| other.content == content) {
            special.push(token);
        }
    }
    tokens.extend(special);
    let by_content: HashMap<&str, &AddedToken> =
        there.values().map(|token| (token.content.as_str(), token)).collect();
    // A new one has the id behind all others; models list thousands that are no news.
    let last = there.keys().max().map_or(0, |&id| u64::from(id) + 1);
    let mut next = last.max(tokenizer.get_vocab_size(false) as u64);
    let (mut news, mut strangers) = (Vec::new(), Vec::new());
    for token in tokens {
        let is_known = by_content.get(token.content.as_str()).is_some_and(|known| **known == token);
        if token.content.is_empty() || is_known {
            continue;
        }
        let is_new = tokenizer.token_to_id(&token.content).is_none();
        if is_new && vocabulary.is_some_and(|size| next >= size) {
            strangers.push(token.content);
            continue;
        }
        next += u64::from(is_new);
        news.push(token);
    }
    tokenizer.add_tokens(&news);
    strangers
}

/// Obeys `add_bos_token` and `add_eos_token` where they are there.
fn surround(
    tokenizer: &mut Tokenizer,
    settings: &Value,
    special_tokens: &[(String, String)],
) -> Result<(), String> {
    let asked = ["add_bos_token", "add_eos_token"].map(|name| settings.get(name));
    if asked.iter().all(Option::is_none) {
        return Ok(());
    }
    let token = |name: &str| special_tokens.iter().find(|(found, _)| found == name).map(|(_, token)| token);
    let tokens = [token("bos_token"), token("eos_token")];
    let [bos, eos] = [0, 1].map(|k| tokens[k].filter(|_| asked[k].and_then(Value::as_bool) == Some(true)));
    let mut builder = TemplateProcessing::builder();
    let mut single = Vec::new();
    let mut known = Vec::new();
    for (token, is_first) in [(bos, true), (None, false), (eos, true)] {
        if let Some(token) = token {
            let id = tokenizer
                .token_to_id(token)
                .ok_or_else(|| format!("it lacks `{token}`, which tokenizer_config.json has it add"))?;
            single.push(token.clone());
            known.push((token.clone(), id));
        } else if !is_first {
            single.push("$A".to_owned());
        }
    }
    let cause = |error: String| format!("its special tokens cannot be added: {error}");
    let processor = builder
        .try_single(single)
        .map_err(cause)?
        .special_tokens(known)
        .build()
        .map_err(|error| cause(error.to_string()))?;
    tokenizer.with_post_processor(Some(processor));
    Ok(())
}
