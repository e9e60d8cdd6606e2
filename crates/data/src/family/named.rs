//! A model that is known only by name: its published configuration, with text tokens counted by a local tokenizer or
//! estimated.
//!
//! Without a tokenizer, tokens are counted by one that knows no words, made of the pre-tokens that the tokenizers of Qwen2
//! and Llama-3 split a text into before they merge bytes:
//!
//! ```text
//! letters, with the space before them     a token for each 9 of them or less
//! Chinese, Japanese, Korean letters       a token for each 2
//! digits                                  a token each
//! marks; spaces                           a token a run
//! ```
//!
//! Vocabularies of 100,000 tokens and more hold most words of European languages of up to nine letters. On English prose it
//! is about the usual 100 tokens for 75 words. It replaces counts where a plan is tried out, and is marked; nothing is
//! trained with it.

use crate::family::{Family, Marks};
use crate::media::MediaKind;
use serde_json::{Map, Value, json};
use std::path::PathBuf;

/// A model without a directory of its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedModel {
    /// Its name in the catalogue.
    pub name: String,
    /// Its `config.json`.
    pub config: String,
    /// Its `preprocessor_config.json`; empty where it is not known.
    pub preprocessor: String,
    /// Directory with a `tokenizer.json`; `None`: text tokens are estimated.
    pub tokenizer_dir: Option<PathBuf>,
}

/// The pieces of a text that are counted as a token each.
const PIECES: &str = concat!(
    r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Hangul}]{1,2}",
    r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]{1,9}|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+"
);

/// What begins and ends a turn.
const TURN: [&str; 2] = ["<|im_start|>", "<|im_end|>"];

/// What stands around the media of a family that writes such.
const AROUND: [&str; 2] = ["<|vision_start|>", "<|vision_end|>"];

fn marks(family: &dyn Family) -> impl Iterator<Item = (MediaKind, Marks)> + '_ {
    MediaKind::ALL.into_iter().filter_map(|kind| Some((kind, family.marks(kind)?)))
}

/// A `tokenizer.json` that estimates.
pub(crate) fn estimating_tokenizer(config: &Value, family: &dyn Family) -> String {
    let mut vocabulary = Map::from_iter([("<unk>".to_owned(), json!(0))]);
    let own = MediaKind::ALL.into_iter().filter_map(|kind| family.around(kind)).flatten();
    for name in TURN.into_iter().chain(AROUND).chain(own) {
        if vocabulary.contains_key(name) {
            continue;
        }
        vocabulary.insert(name.to_owned(), json!(vocabulary.len()));
    }
    for (_, marks) in marks(family) {
        let id = marks.id_fields.iter().find_map(|field| config.get(*field)?.as_u64());
        for token in [&marks.feature_token, &marks.placeholder] {
            let own = if *token == marks.feature_token { id } else { None };
            let id = own.unwrap_or(vocabulary.len() as u64);
            vocabulary.entry(token.clone()).or_insert_with(|| json!(id));
        }
    }
    for text in family.special_texts() {
        let id = vocabulary.values().filter_map(Value::as_u64).max().unwrap_or_default() + 1;
        vocabulary.entry(text).or_insert_with(|| json!(id));
    }
    let added: Vec<Value> = vocabulary
        .iter()
        .map(|(content, id)| {
            json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                   "normalized": false, "special": true})
        })
        .collect();
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": PIECES}, "behavior": "Isolated", "invert": false},
        "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"}
    })
    .to_string()
}

/// A chat template in the form that most models have (ChatML), with the media of the family.
pub(crate) fn plain_template(config: &Value, family: &dyn Family) -> String {
    let is_framed = config.get("vision_start_token_id").is_some();
    let medium = |(kind, marks): (MediaKind, Marks)| {
        let usual = if is_framed && kind != MediaKind::Audio { AROUND } else { ["", ""] };
        let [start, end] = family.around(kind).unwrap_or(usual);
        format!(
            "{{%- elif part.type == '{}' -%}}{{{{- '{start}{}{end}' -}}}}",
            kind.as_str(),
            marks.placeholder
        )
    };
    let media: String = marks(family).map(medium).collect();
    let [start, end] = TURN;
    format!(
        "{{%- for message in messages -%}}{{{{- '{start}' + message.role + '\\n' -}}}}\
         {{%- if message.content is string -%}}{{{{- message.content -}}}}\
         {{%- else -%}}{{%- for part in message.content -%}}\
         {{%- if part.type == 'text' -%}}{{{{- part.text -}}}}{media}{{%- endif -%}}\
         {{%- endfor -%}}{{%- endif -%}}{{{{- '{end}\\n' -}}}}{{%- endfor -%}}"
    )
}
