//! A record as a conversation: turns of text with placeholders for images, videos and sounds.
//!
//! A record gives its turns in one of these ways; the first way of which the record has a field is taken. Its other fields
//! are not read. A notice names them. If they hold media and the record has no other media, the record is refused.
//!
//! | way | fields |
//! |---|---|
//! | LLaVA, `ShareGPT` | `conversations`: list of `{"from", "value"}` |
//! | `OpenAI` | `messages`: list of `{"role", "content"}` |
//! | question and answer | one of `question`, `query`, `problem`, `instruction`, and one of `answer`, `label`, `response`, `solution`, `output`, or where it has none of these `caption`; beside it `history`, a list of earlier pairs, and beside `instruction` an `input` |
//! | The Cauldron, `FineVision` | `texts`: list of `{"user", "assistant"}` |
//! | prompt and completion | `prompt` and `completion` where no question is there: texts, or lists of turns (TRL) |
//! | caption | media, and `caption` or `text`: the media ask, the text answers |
//! | document | `texts`, a list of text and nulls, with `images`, which has an image where `texts` has null (OBELICS, `OmniCorpus`); or `text` alone (TRL's language modeling) |
//!
//! *Turns.* Both lists take either pair of names. Speakers are `human` and `user`; `gpt`, `assistant`, `chatgpt`,
//! `bard`, `bing` and `model`; `system`. A text under `system` beside the turns is a system turn before them. `choices`, `options`,
//! `context` and `hint` beside a question are refused, since leaving them out would change what is asked. An answer whose `loss`,
//! `train` or `training` is false, or whose `weight` is 0, carries no loss; between 0 and 1 they are refused. `input` is refused beside
//! a question other than an `instruction`, under which it stands in a line of its own, as in Alpaca's data.
//!
//! *Tools.* `tools` beside the turns, `tool_calls` or `function_call` in an assistant's, and turns of `tool`, `function`,
//! `observation`, `tool_response` or `ipython`, which may show media. A turn of `function_call` or `tool_call` is JSON: its calls
//! belong to the answer before it. All of these may be JSON in a text.
//!
//! *Other fields* of a turn, such as `reasoning_content`, are given to the chat template. A notice names the fields that the template
//! does not read.
//!
//! *Content* is text, or a list of parts: `{"type": "text", "text"}` and media of the types `image`, `image_url`,
//! `input_image`, `video`, `video_url`, `audio`, `audio_url` and `input_audio`. A part without `type` is what its one field
//! says, as `{"image": "cat.jpg"}` (`DashScope`). A medium is named under its type, its
//! kind, its kind with `_url`, `url` or `path`, as text or as an object with `url` or `path`. A medium without a name is
//! the next one of the record's media. The texts of an assistant's turn are joined to one text.
//!
//! *Media* of the record stand under `image` or `images`, `video` or `videos`, `audio` or `audios`: a path or URL, an
//! object of `path` or `url`, or a list of these. A `data:` URL, or an object with `data`, holds the medium itself in base64.
//!
//! *Places.* `<image>`, `<video>` and `<audio>` in a text mark where the record's media stand, in order, unless the
//! content is a list of parts. There must be as many placeholders as media. Three customs of existing datasets are kept. A single
//! medium without any placeholder stands before the first question, on a line of its own; so do all media without placeholders
//! of every way but `conversations`. Where there are videos, no images, and as many `<image>` as videos, `<image>` means a video.

mod document;
mod media;
mod placeholders;
mod tools;
mod turns;
mod unread;

pub(crate) use tools::CALLS;
pub(crate) use turns::THOUGHTS;
pub(crate) use unread::field_of_turns;

use crate::media::MediaKind;
use crate::source::unread::UnreadField;
use bytes::Bytes;
use serde_json::{Map, Value};

/// Who speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Instructions; no loss.
    System,
    /// Questions; no loss.
    User,
    /// Answers: their tokens carry loss.
    Assistant,
    /// What a tool gave; no loss.
    Tool,
}

impl Role {
    /// The role's name in a chat template.
    pub const fn name(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }

    fn parse(name: &str) -> Option<Self> {
        match name {
            "system" => Some(Self::System),
            "human" | "user" => Some(Self::User),
            "gpt" | "assistant" | "chatgpt" | "bard" | "bing" | "model" => Some(Self::Assistant),
            tool if tools::SPEAKERS.contains(&tool) => Some(Self::Tool),
            _ => None,
        }
    }
}

/// A piece of a turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TurnPart {
    /// Text, never empty.
    Text(String),
    /// The placeholder of the medium at this position in [`Conversation::media`].
    Media(usize),
}

/// What one speaker says at once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Turn {
    /// Who speaks.
    pub role: Role,
    /// Texts and media, in order.
    pub parts: Vec<TurnPart>,
    /// Whether an assistant's turn carries loss; of no meaning elsewhere.
    pub is_learnt: bool,
    /// What else it has, which a chat template may read: `reasoning_content`, `tool_calls`, `name`.
    pub fields: Map<String, Value>,
}

/// Where the record says a medium is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MediaSource {
    /// A path or URL.
    Name(String),
    /// It came with the record: its position in [`crate::source::readers::RawRecord::attachments`].
    Attachment(usize),
    /// It stands in the record's text.
    Inline {
        /// Its bytes.
        bytes: Bytes,
        /// The field that holds it.
        field: String,
    },
}

/// A medium that a record names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MediaReference {
    /// As the record writes it.
    pub source: MediaSource,
    /// What the record calls it.
    pub kind: MediaKind,
}

/// A sample before its media are looked at.
///
/// *Invariants* (kept by [`Conversation::parse`]): at least one turn; every medium has exactly one placeholder, and placeholders
/// are in the order of `media`; none is in an assistant's turn, but for a document, which is one turn of the assistant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conversation {
    /// The record's own id.
    pub id: Option<String>,
    /// In the order in which they are spoken.
    pub turns: Vec<Turn>,
    /// In the order of their placeholders.
    pub media: Vec<MediaReference>,
    /// Whether it is a document: text without speakers, which no chat template writes, and which carries loss as a whole.
    pub is_document: bool,
    /// Tools that may be called, as chat templates read them.
    pub tools: Vec<Value>,
}

impl Conversation {
    /// The conversation in a record.
    ///
    /// # Errors
    /// What is wrong: field, value, rule.
    pub fn parse(record: &Value) -> Result<Self, String> {
        Self::parse_whole(record).map(|(conversation, _)| conversation)
    }

    /// The conversation in a record, and the fields of the record that are not read.
    pub(crate) fn parse_whole(record: &Value) -> Result<(Self, Vec<UnreadField>), String> {
        if !record.is_object() {
            return Err(format!("it is {}, must be an object", type_of(record)));
        }
        if let Some((document, read)) = document::of_record(record)? {
            if document.media.is_empty() {
                unread::refuse_media(record)?;
            }
            let unread = unread::of_record(record, &read, document.media.is_empty());
            return Ok((document, unread));
        }
        let listed = media::of_record(record)?;
        let has_media = listed.iter().any(|list| !list.is_empty());
        let parsed = turns::of_record(record, has_media).and_then(|mut said| {
            placeholders::fill(&mut said, &listed)?;
            let read = std::mem::take(&mut said.read);
            placeholders::name(said, listed).map(|(turns, media)| (turns, media, read))
        });
        // A medium that cannot be read is the cause; a placeholder without a medium only follows from it. Report the cause.
        if !has_media && parsed.as_ref().map_or(true, |(_, media, _)| media.is_empty()) {
            unread::refuse_media(record)?;
        }
        let (turns, media, read) = parsed?;
        let unread = unread::of_record(record, &read, media.is_empty());
        Ok((
            Self { id: id_of(record), turns, media, is_document: false, tools: tools::of_record(record)? },
            unread,
        ))
    }
}

/// The id of a record that may be broken otherwise.
pub fn id_of(record: &Value) -> Option<String> {
    match record.get("id")? {
        Value::String(id) if id.is_empty() => None,
        Value::String(id) => Some(id.clone()),
        Value::Number(id) => Some(id.to_string()),
        _ => None,
    }
}

fn type_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a truth value",
        Value::Number(_) => "a number",
        Value::String(_) => "text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// The field, where it is there and not null: tables write null where a row has no such field.
fn field<'r>(record: &'r Value, name: &str) -> Option<&'r Value> {
    record.get(name).filter(|value| !value.is_null())
}

/// A turn whose media have no names yet.
#[derive(Debug)]
struct Said {
    role: Role,
    pieces: Vec<Piece>,
    /// As in [`Turn`].
    is_learnt: bool,
    /// As in [`Turn`].
    fields: Map<String, Value>,
}

impl Said {
    /// A turn that says no more than its pieces, and carries loss where the assistant speaks.
    fn plain(role: Role, pieces: Vec<Piece>) -> Self {
        Self { role, pieces, is_learnt: true, fields: Map::new() }
    }
}

#[derive(Debug)]
enum Piece {
    Text(String),
    /// Where a medium stands, and its name where the placeholder has it.
    Placeholder {
        kind: MediaKind,
        source: Option<MediaSource>,
    },
}

/// The turns of a record.
#[derive(Debug)]
struct Turns {
    said: Vec<Said>,
    /// The fields that say them.
    read: Vec<&'static str>,
    /// Where no placeholder stands all media stand before the first question, not a single one alone.
    asks_with_all: bool,
}

#[cfg(test)]
mod refused;
#[cfg(test)]
mod tests;
