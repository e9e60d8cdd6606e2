//! Text: a record as a conversation, written by a chat template, as tokens.

pub mod conversation;
mod fault;
pub(crate) mod template;
mod tokenized;
mod tokenizer;
pub mod tokens;
