//! Conversations as token ids: counted by the profiler, laid out for training, by one and the same walk.
//!
//! The turn template is ChatML, as Qwen2 and LLaVA-OneVision use it:
//!
//! ```text
//! <|im_start|>{role}\n{content}<|im_end|>\n          once a turn
//! ```
//!
//! A system turn stands only where the record has one (Qwen's own Jinja template would add a default one). Loss is
//! carried by the content of an assistant's turn and its `<|im_end|>`. The header of an assistant's turn is
//! tokenised apart from the content, as it is when the model answers. Where a medium stands, its placeholder id is
//! repeated once a feature token.

use crate::conversation::{Conversation, Part, Role};
use crate::error::DataError;
use crate::family::{Family, MediaShape, Piece};
use crate::model_files::ModelFiles;
use crate::probe::MediaKind;
use serde_json::Value;
use tokenizers::Tokenizer;

/// The label of a position without loss, as PyTorch's cross entropy ignores it.
pub const NO_LABEL: i64 = -100;
/// Defaults of `transformers.LlavaOnevisionConfig` (5.23.0), which its own writer leaves out of `config.json`.
const IMAGE_TOKEN_DEFAULT: u32 = 151_646;
const VIDEO_TOKEN_DEFAULT: u32 = 151_647;

/// A Hugging Face tokenizer with the turn template and the placeholder ids of a model.
#[derive(Debug)]
pub struct ChatTokenizer {
    tokenizer: Tokenizer,
    image_id: u32,
    video_id: u32,
    turn_end: u32,
}

impl ChatTokenizer {
    /// The tokenizer of a model directory, whose `config.json` is `config`.
    ///
    /// # Errors
    /// [`DataError::Model`].
    pub(crate) fn open(files: &ModelFiles, config: &Value, _family: &dyn Family) -> Result<Self, DataError> {
        Self::new(&files.tokenizer, config)
            .map_err(|cause| DataError::Model { path: files.tokenizer_path.clone(), cause })
    }

    /// The tokenizer in `tokenizer_json` with the placeholders of `config` (`image_token_index`, `video_token_index`
    /// or `..._id`).
    ///
    /// # Errors
    /// What is wrong: the tokenizer does not parse, lacks a token of the template, or an id is outside the model's
    /// vocabulary.
    pub fn new(tokenizer_json: &[u8], config: &Value) -> Result<Self, String> {
        let tokenizer =
            Tokenizer::from_bytes(tokenizer_json).map_err(|error| format!("it is no tokenizer: {error}"))?;
        let special = |token: &str| {
            tokenizer.token_to_id(token).ok_or_else(|| format!("the token `{token}` of ChatML is missing"))
        };
        special("<|im_start|>")?;
        let turn_end = special("<|im_end|>")?;
        let vocabulary = config.pointer("/text_config/vocab_size").and_then(Value::as_u64);
        let placeholder = |names: [&str; 2], default: u32| {
            let found = names.into_iter().find_map(|name| config.get(name).and_then(Value::as_u64));
            let id = found.unwrap_or(u64::from(default));
            match vocabulary {
                Some(size) if id >= size => Err(format!(
                    "`{}` of config.json is {id}, must be below `text_config.vocab_size` {size}",
                    names[0]
                )),
                _ => {
                    u32::try_from(id).map_err(|_| format!("`{}` of config.json is {id}, too large", names[0]))
                }
            }
        };
        let image_id = placeholder(["image_token_index", "image_token_id"], IMAGE_TOKEN_DEFAULT)?;
        let video_id = placeholder(["video_token_index", "video_token_id"], VIDEO_TOKEN_DEFAULT)?;
        if let Some(size) = vocabulary {
            let largest = tokenizer.get_vocab(true).into_values().max().unwrap_or(0);
            if u64::from(largest) >= size {
                return Err(format!(
                    "its largest id is {largest}, must be below `text_config.vocab_size` {size}"
                ));
            }
        }
        Ok(Self { tokenizer, image_id, video_id, turn_end })
    }

    /// The conversation's tokens, media not yet repeated.
    ///
    /// *Complexity*: O(characters), the cost of the tokenizer.
    ///
    /// # Errors
    /// What the tokenizer says, where it refuses a text.
    pub fn tokenize(
        &self,
        conversation: &Conversation,
        shapes: &[&MediaShape],
    ) -> Result<TokenizedConversation, String> {
        let mut tokens = TokenizedConversation { runs: Vec::new() };
        let encode = |text: &str| {
            let encoding = self.tokenizer.encode_fast(text, false);
            encoding
                .map(|e| e.get_ids().to_vec())
                .map_err(|error| format!("the tokenizer refuses a text: {error}"))
        };
        for turn in &conversation.turns {
            let is_label = turn.role == Role::Assistant;
            let mut header = format!("<|im_start|>{}\n", turn.role.name());
            if is_label {
                tokens.push(encode(&std::mem::take(&mut header))?, false);
            }
            for part in &turn.parts {
                match part {
                    // Elsewhere header and text go together: a text that begins with a line break may join it.
                    Part::Text(text) => tokens.push(encode(&(std::mem::take(&mut header) + text))?, is_label),
                    Part::Media(index) => {
                        tokens.push(encode(&std::mem::take(&mut header))?, is_label);
                        let is_video = conversation.media[*index].kind == MediaKind::Video;
                        let id = if is_video { self.video_id } else { self.image_id };
                        for piece in &shapes[*index].pieces {
                            match piece {
                                Piece::Text(text) => tokens.push(encode(text)?, is_label),
                                Piece::Features(count) => {
                                    tokens.runs.push(Run::Features { count: *count, id });
                                }
                            }
                        }
                    }
                }
            }
            tokens.push(encode(&header)?, is_label);
            tokens.push(vec![self.turn_end], is_label);
            tokens.push(encode("\n")?, false);
        }
        Ok(tokens)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Run {
    Text { ids: Vec<u32>, is_label: bool },
    Features { count: u32, id: u32 },
}

/// Token ids of a conversation, with places for media of any number of features.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenizedConversation {
    runs: Vec<Run>,
}

/// A sample as the LLM backbone reads it. The three lists are equally long.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tokens {
    /// Token ids; placeholder ids where features go.
    pub input_ids: Vec<u32>,
    /// True where a feature takes the place of the embedding.
    pub feature_mask: Vec<bool>,
    /// The id at each position that carries loss, [`NO_LABEL`] elsewhere; not shifted.
    pub labels: Vec<i64>,
}

impl Tokens {
    /// Positions whose token is predicted from the one before with loss: those with a label, the first aside.
    pub fn label_tokens(&self) -> u32 {
        self.labels.iter().skip(1).filter(|&&label| label != NO_LABEL).count() as u32
    }
}

impl TokenizedConversation {
    fn push(&mut self, ids: Vec<u32>, is_label: bool) {
        if !ids.is_empty() {
            self.runs.push(Run::Text { ids, is_label });
        }
    }

    /// (LLM tokens, label tokens): what [`TokenizedConversation::expand`] would give, without giving it. `None` from
    /// 2^32 tokens.
    pub fn count(&self) -> Option<(u32, u32)> {
        let (mut llm, mut label) = (0_u64, 0_u64);
        for run in &self.runs {
            match run {
                Run::Text { ids, is_label } => {
                    if *is_label {
                        // The first position of a sample is predicted from nothing.
                        label += ids.len() as u64 - u64::from(llm == 0);
                    }
                    llm += ids.len() as u64;
                }
                Run::Features { count, .. } => llm += u64::from(*count),
            }
        }
        Some((u32::try_from(llm).ok()?, label as u32))
    }

    /// The tokens.
    pub fn expand(&self) -> Tokens {
        let mut tokens = Tokens { input_ids: vec![], feature_mask: vec![], labels: vec![] };
        for run in &self.runs {
            match run {
                Run::Text { ids, is_label } => {
                    tokens.input_ids.extend_from_slice(ids);
                    tokens
                        .labels
                        .extend(ids.iter().map(|&id| if *is_label { i64::from(id) } else { NO_LABEL }));
                }
                Run::Features { count, id } => {
                    let length = tokens.input_ids.len() + *count as usize;
                    tokens.feature_mask.resize(tokens.input_ids.len(), false);
                    tokens.input_ids.resize(length, *id);
                    tokens.feature_mask.resize(length, true);
                    tokens.labels.resize(length, NO_LABEL);
                }
            }
        }
        tokens.feature_mask.resize(tokens.input_ids.len(), false);
        tokens
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn tokenizer() -> ChatTokenizer {
        let config =
            json!({"image_token_index": 3, "video_token_id": 4, "text_config": {"vocab_size": 2000}});
        ChatTokenizer::new(include_bytes!("../../../fixtures/demo/tokenizer.json"), &config).unwrap()
    }

    fn features(n: u32) -> MediaShape {
        MediaShape { num_tiles: 1, segments: vec![], pieces: vec![Piece::Features(n)], frame_indices: vec![] }
    }

    fn conversation(turns: &[(&str, &str)], images: usize) -> Conversation {
        let turns: Vec<_> = turns.iter().map(|(role, text)| json!({"from": role, "value": text})).collect();
        let images: Vec<_> = (0..images).map(|n| format!("{n}.png")).collect();
        Conversation::parse(&json!({"image": images, "conversations": turns})).unwrap()
    }

    #[test]
    fn tokens_are_those_of_the_whole_text() {
        let tokenizer = tokenizer();
        let sample = conversation(
            &[("system", "be calm"), ("human", "<image>\nwhat is it?"), ("gpt", "A red cup.")],
            1,
        );
        let tokens = tokenizer.tokenize(&sample, &[&features(3)]).unwrap().expand();
        let text = "<|im_start|>system\nbe calm<|im_end|>\n<|im_start|>user\n<image><image><image>\nwhat is it?\
                    <|im_end|>\n<|im_start|>assistant\nA red cup.<|im_end|>\n";
        assert_eq!(tokens.input_ids, tokenizer.tokenizer.encode(text, false).unwrap().get_ids());
        let features: Vec<_> = tokens
            .input_ids
            .iter()
            .zip(&tokens.feature_mask)
            .filter(|(_, m)| **m)
            .map(|(id, _)| *id)
            .collect();
        assert_eq!(features, [3, 3, 3]);
    }

    #[test]
    fn labels_are_the_answers_and_their_ends() {
        let tokenizer = tokenizer();
        let sample =
            conversation(&[("human", "what"), ("gpt", "A cup."), ("human", "where"), ("gpt", "")], 0);
        let tokens = tokenizer.tokenize(&sample, &[]).unwrap().expand();
        let labelled: Vec<u32> =
            tokens.labels.iter().filter(|&&l| l != NO_LABEL).map(|&l| u32::try_from(l).unwrap()).collect();
        assert_eq!(tokenizer.tokenizer.decode(&labelled, false).unwrap(), "A cup.<|im_end|><|im_end|>");
        assert!(
            tokens.labels.iter().zip(&tokens.input_ids).all(|(&l, &id)| l == NO_LABEL || l == i64::from(id))
        );
        assert_eq!(tokens.label_tokens() as usize, labelled.len());
    }

    #[test]
    fn a_tokenizer_of_another_model_is_refused() {
        let bytes = include_bytes!("../../../fixtures/demo/tokenizer.json");
        let error = |config: Value| ChatTokenizer::new(bytes, &config).unwrap_err();
        assert_eq!(
            error(json!({"text_config": {"vocab_size": 5}})),
            "`image_token_index` of config.json is 151646, must be below `text_config.vocab_size` 5"
        );
        let small = json!({"image_token_index": 3, "video_token_index": 4, "text_config": {"vocab_size": 5}});
        assert!(error(small).contains("its largest id is"));
        assert!(ChatTokenizer::new(b"{}", &json!({})).unwrap_err().starts_with("it is no tokenizer"));
    }

    proptest! {
        #[test]
        fn counting_equals_encoding(
            texts in prop::collection::vec(("[a-z <>|\n.\\PC]{0,30}", 0..3_usize, 0..3_usize), 1..5),
            features in prop::collection::vec(1_u32..50, 15),
        ) {
            let roles = ["human", "gpt", "system"];
            let mut images = 0;
            let turns: Vec<_> = texts
                .iter()
                .map(|(text, role, marks)| {
                    let marks = if *role == 1 { 0 } else { *marks };
                    images += marks;
                    (roles[*role], format!("{text}{}", "<image>".repeat(marks)))
                })
                .collect();
            let turns: Vec<_> = turns.iter().map(|(role, text)| (*role, text.as_str())).collect();
            prop_assume!(turns.iter().all(|(_, text)| !text.contains("<video>")));
            let shapes: Vec<_> = features.iter().map(|&n| self::features(n)).collect();
            let shapes: Vec<_> = shapes.iter().collect();
            let tokenized = tokenizer().tokenize(&conversation(&turns, images), &shapes).unwrap();
            let tokens = tokenized.expand();
            prop_assert_eq!(tokens.labels.len(), tokens.input_ids.len());
            prop_assert_eq!(tokens.feature_mask.len(), tokens.input_ids.len());
            let counted = tokenized.count().unwrap();
            prop_assert_eq!(counted, (tokens.input_ids.len() as u32, tokens.label_tokens()));
            let filled: u32 = features[..images].iter().sum();
            prop_assert_eq!(tokens.feature_mask.iter().filter(|m| **m).count() as u32, filled);
        }
    }
}
