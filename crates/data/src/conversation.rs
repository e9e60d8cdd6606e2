//! A record as a conversation: turns of text with places for images and videos.
//!
//! LLaVA records: `{"id", "image": path or list, "video": path or list, "conversations": [{"from": "human" | "gpt" |
//! "system", "value"}]}`. Records of role and content, `{"messages": [{"role": "user" | "assistant" | "system",
//! "content"}], "images": [...], "videos": [...]}`, are read too. Other keys are ignored.
//!
//! `<image>` and `<video>` in a value mark where media stand; there must be as many as there are media, in their
//! order. Two customs of LLaVA are kept: a single image or video without any mark stands before the first user turn,
//! on a line of its own; and where there are videos, no images, and as many `<image>` as videos, those mean the videos.

use crate::probe::MediaKind;
use serde_json::Value;

/// Who speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Instructions; no loss.
    System,
    /// Questions; no loss.
    User,
    /// Answers: their tokens carry loss.
    Assistant,
}

impl Role {
    /// The role's name in a chat template.
    pub const fn name(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
        }
    }

    fn parse(name: &str) -> Option<Self> {
        match name {
            "system" => Some(Self::System),
            "human" | "user" => Some(Self::User),
            "gpt" | "assistant" => Some(Self::Assistant),
            _ => None,
        }
    }
}

/// A piece of a turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part {
    /// Text, never empty.
    Text(String),
    /// The place of the medium at this position in [`Conversation::media`].
    Media(usize),
}

/// What one speaker says at once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Turn {
    /// Who speaks.
    pub role: Role,
    /// Texts and media, in order.
    pub parts: Vec<Part>,
}

/// Where the record says a medium is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MediaSource {
    /// A path or URL.
    Name(String),
    /// It came with the record: its position in [`crate::readers::RawRecord::attachments`].
    Attachment(usize),
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
/// *Invariants* (kept by [`Conversation::parse`]): at least one turn; every medium has exactly one place, and places
/// are in the order of `media`; none is in an assistant's turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conversation {
    /// The record's own id.
    pub id: Option<String>,
    /// In the order in which they are spoken.
    pub turns: Vec<Turn>,
    /// In the order of their places.
    pub media: Vec<MediaReference>,
}

const MARKS: [&str; 2] = ["<image>", "<video>"];

impl Conversation {
    /// The conversation in a record.
    ///
    /// # Errors
    /// What is wrong: field, value, rule.
    pub fn parse(record: &Value) -> Result<Self, String> {
        if !record.is_object() {
            return Err(format!("it is {}, must be an object", type_of(record)));
        }
        let id = match &record["id"] {
            Value::String(id) => Some(id.clone()),
            Value::Number(id) => Some(id.to_string()),
            _ => None,
        };
        let images = paths(record, ["image", "images"])?;
        let videos = paths(record, ["video", "videos"])?;
        let mut turns = turns(record)?;
        place(&mut turns, images.len(), videos.len())?;
        split(turns, &images, &videos).map(|(turns, media)| Self { id, turns, media })
    }
}

/// The id of a record that may be broken otherwise.
pub fn id_of(record: &Value) -> Option<String> {
    match record.get("id")? {
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

/// Paths under one of two keys: one text, a list of texts, or nothing.
fn paths(record: &Value, keys: [&str; 2]) -> Result<Vec<MediaSource>, String> {
    let mut found = Vec::new();
    for key in keys {
        let path = |value: &Value| match value.as_str() {
            Some("") => Err(format!("`{key}`: a path is empty")),
            Some(text) => Ok(MediaSource::Name(text.to_owned())),
            None if value["attachment"].is_u64() => {
                Ok(MediaSource::Attachment(value["attachment"].as_u64().unwrap_or_default() as usize))
            }
            None => Err(format!("`{key}`: {}, must be a path or a list of paths", type_of(value))),
        };
        match record.get(key) {
            None | Some(Value::Null) => {}
            Some(_) if !found.is_empty() => return Err(format!("both `{}` and `{key}` are there", keys[0])),
            Some(Value::Array(list)) => found = list.iter().map(path).collect::<Result<_, _>>()?,
            Some(value) => found = vec![path(value)?],
        }
    }
    Ok(found)
}

/// Role and whole text of each turn.
fn turns(record: &Value) -> Result<Vec<(Role, String)>, String> {
    let (key, list) = ["conversations", "messages"]
        .into_iter()
        .find_map(|key| record.get(key).map(|list| (key, list)))
        .ok_or("`conversations` is missing")?;
    let list =
        list.as_array().ok_or_else(|| format!("`{key}`: {}, must be a list of turns", type_of(list)))?;
    if list.is_empty() {
        return Err(format!("`{key}` is empty, at least one turn is needed"));
    }
    let turn = |(index, turn): (usize, &Value)| {
        let field = |names: [&'static str; 2]| {
            let (name, value) = names
                .into_iter()
                .find_map(|name| turn.get(name).map(|value| (name, value)))
                .ok_or_else(|| format!("`{key}[{index}]`: `{}` or `{}` is missing", names[0], names[1]))?;
            value
                .as_str()
                .map(|text| (name, text))
                .ok_or_else(|| format!("`{key}[{index}].{name}`: {}, must be text", type_of(value)))
        };
        let (name, role) = field(["from", "role"])?;
        let role = Role::parse(role).ok_or_else(|| {
            format!("`{key}[{index}].{name}`: `{role}`, must be human, gpt, user, assistant or system")
        })?;
        Ok((role, field(["value", "content"])?.1.to_owned()))
    };
    list.iter().enumerate().map(turn).collect()
}

/// Makes the marks fit the media, or says why they do not.
fn place(turns: &mut [(Role, String)], images: usize, videos: usize) -> Result<(), String> {
    if let Some((_, text)) = turns
        .iter()
        .find(|(role, text)| *role == Role::Assistant && MARKS.iter().any(|mark| text.contains(mark)))
    {
        let mark = MARKS.iter().find(|mark| text.contains(**mark)).unwrap_or(&MARKS[0]);
        return Err(format!("`{mark}` stands in an assistant's turn, must stand in a question"));
    }
    let count = |turns: &[(Role, String)], mark| -> usize {
        turns.iter().map(|(_, text)| text.matches(mark).count()).sum()
    };
    let [mut image_marks, mut video_marks] = MARKS.map(|mark| count(turns, mark));
    if images == 0 && videos > 0 && video_marks == 0 && image_marks == videos {
        for (_, text) in turns.iter_mut() {
            *text = text.replace(MARKS[0], MARKS[1]);
        }
        (image_marks, video_marks) = (0, videos);
    }
    if images + videos == 1 && image_marks + video_marks == 0 {
        let mark = MARKS[usize::from(videos == 1)];
        let (_, text) = turns
            .iter_mut()
            .find(|(role, _)| *role == Role::User)
            .ok_or_else(|| format!("there is no question to put `{mark}` before"))?;
        *text = format!("{mark}\n{text}");
        (image_marks, video_marks) = (images, videos);
    }
    for (mark, marks, media) in [(MARKS[0], image_marks, images), (MARKS[1], video_marks, videos)] {
        if marks != media {
            let key = mark.trim_matches(['<', '>']);
            return Err(format!("{marks} `{mark}` in the turns, but {media} under `{key}`: must be as many"));
        }
    }
    Ok(())
}

/// Cuts the texts at their marks and puts the media in the order of the marks.
fn split(
    turns: Vec<(Role, String)>,
    images: &[MediaSource],
    videos: &[MediaSource],
) -> Result<(Vec<Turn>, Vec<MediaReference>), String> {
    let (mut images, mut videos) = (images.iter(), videos.iter());
    let mut media = Vec::new();
    let mut cut = Vec::with_capacity(turns.len());
    for (role, text) in turns {
        let mut parts = Vec::new();
        let mut rest = text.as_str();
        loop {
            let next = MARKS
                .iter()
                .filter_map(|mark| rest.find(mark).map(|at| (at, *mark)))
                .min_by_key(|(at, _)| *at);
            let before = next.map_or(rest, |(at, _)| &rest[..at]);
            if !before.is_empty() {
                parts.push(Part::Text(before.to_owned()));
            }
            let Some((at, mark)) = next else { break };
            let is_video = mark == MARKS[1];
            let path = if is_video { videos.next() } else { images.next() };
            let source = path.ok_or_else(|| format!("one `{mark}` too many"))?.clone();
            parts.push(Part::Media(media.len()));
            let kind = if is_video { MediaKind::Video } else { MediaKind::Image };
            media.push(MediaReference { source, kind });
            rest = &rest[at + mark.len()..];
        }
        cut.push(Turn { role, parts });
    }
    Ok((cut, media))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn record(extra: &Value, question: &str) -> Value {
        let mut record = json!({"id": 7, "conversations": [
            {"from": "human", "value": question}, {"from": "gpt", "value": "a cat"}]});
        record.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        record
    }

    fn parts(extra: &Value, question: &str) -> Result<Vec<Part>, String> {
        Conversation::parse(&record(extra, question)).map(|c| c.turns[0].parts.clone())
    }

    fn text(text: &str) -> Part {
        Part::Text(text.to_owned())
    }

    #[test]
    fn marks_are_where_media_stand() {
        let several = json!({"image": ["a.png", "b.png"], "video": "c.gif"});
        let conversation = Conversation::parse(&record(&several, "x<image><video>\ny <image>")).unwrap();
        assert_eq!(conversation.id.as_deref(), Some("7"));
        assert_eq!(
            conversation.turns[0].parts,
            [text("x"), Part::Media(0), Part::Media(1), text("\ny "), Part::Media(2)]
        );
        let media: Vec<_> = conversation.media.iter().map(|m| (m.source.clone(), m.kind)).collect();
        let named = |name: &str, kind| (MediaSource::Name(name.to_owned()), kind);
        let (image, video) = (MediaKind::Image, MediaKind::Video);
        assert_eq!(media, [named("a.png", image), named("c.gif", video), named("b.png", image)]);
        assert_eq!(conversation.turns[1], Turn { role: Role::Assistant, parts: vec![text("a cat")] });
    }

    #[test]
    fn customs_of_llava_are_kept() {
        let one = [Part::Media(0), text("\nwhat")];
        assert_eq!(parts(&json!({"image": "a.png"}), "what").unwrap(), one);
        assert_eq!(parts(&json!({"video": ["a.mp4"]}), "what").unwrap(), one);
        let video = Conversation::parse(&record(&json!({"video": "a.mp4"}), "<image>\nwhat")).unwrap();
        assert_eq!(video.media[0].kind, MediaKind::Video);
        assert_eq!(video.turns[0].parts, one);
    }

    #[test]
    fn role_and_content_are_read_too() {
        let record = json!({"images": ["a.png"], "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "<image>"}, {"role": "assistant", "content": ""}]});
        let conversation = Conversation::parse(&record).unwrap();
        assert_eq!(
            conversation.turns.iter().map(|t| t.role.name()).collect::<Vec<_>>(),
            ["system", "user", "assistant"]
        );
        assert_eq!(conversation.turns[2].parts, []);
    }

    #[test]
    fn what_is_no_conversation_is_named() {
        let broken = |record: &Value| Conversation::parse(record).unwrap_err();
        let errors = [
            broken(&json!([])),
            broken(&json!({"id": "x"})),
            broken(&json!({"conversations": "hello"})),
            broken(&json!({"conversations": []})),
            broken(&json!({"conversations": [{"from": "robot", "value": "x"}]})),
            broken(&json!({"conversations": [{"value": "x"}]})),
            broken(&json!({"conversations": [{"from": "gpt", "value": 3}]})),
            broken(&json!({"image": "a.png", "conversations": [{"from": "gpt", "value": "x"}]})),
            broken(&record(&json!({"image": [3]}), "x")),
            broken(&record(&json!({"image": ""}), "x")),
            broken(&record(&json!({"image": "a", "images": ["a"]}), "x")),
            broken(&record(&json!({"image": ["a", "b"]}), "no marks")),
            broken(&record(&json!({"image": "a"}), "<image><image>")),
            broken(&record(&json!({}), "<image> of nothing")),
            broken(&record(&json!({"video": "a", "image": "b"}), "<image>")),
            broken(&json!({"image": "a", "conversations": [{"from": "gpt", "value": "<image>"}]})),
        ];
        insta::assert_snapshot!(errors.join("\n"), @r"
        it is a list, must be an object
        `conversations` is missing
        `conversations`: text, must be a list of turns
        `conversations` is empty, at least one turn is needed
        `conversations[0].from`: `robot`, must be human, gpt, user, assistant or system
        `conversations[0]`: `from` or `role` is missing
        `conversations[0].value`: a number, must be text
        there is no question to put `<image>` before
        `image`: a number, must be a path or a list of paths
        `image`: a path is empty
        both `image` and `images` are there
        0 `<image>` in the turns, but 2 under `image`: must be as many
        2 `<image>` in the turns, but 1 under `image`: must be as many
        1 `<image>` in the turns, but 0 under `image`: must be as many
        0 `<video>` in the turns, but 1 under `video`: must be as many
        `<image>` stands in an assistant's turn, must stand in a question
        ");
    }
}
