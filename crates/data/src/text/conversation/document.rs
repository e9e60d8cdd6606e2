//! A record as a document: text that is read from its beginning to its end, with images between its paragraphs.

use super::turns::{CAPTIONS, LISTS, PAIRS, PROMPT, QUESTIONS};
use super::{Conversation, MediaReference, Role, Turn, TurnPart, field, id_of, media, tools, type_of};
use crate::media::MediaKind;
use serde_json::{Map, Value};

/// Field of a document that is text alone.
const TEXT: &str = CAPTIONS[1];
/// Field that lists the images of a document.
const IMAGES: &str = "images";

/// The document in a record, and the fields that say it; `None` where the record says turns.
///
/// # Errors
/// What is wrong: field, value, rule.
pub(super) fn of_record(record: &Value) -> Result<Option<(Conversation, Vec<&'static str>)>, String> {
    let turns = LISTS.into_iter().chain(QUESTIONS).chain([PROMPT[0], CAPTIONS[0]]);
    if turns.into_iter().any(|name| field(record, name).is_some()) {
        return Ok(None);
    }
    let (parts, media, read) = match (field(record, PAIRS), field(record, TEXT)) {
        (Some(Value::Array(texts)), None) if is_text(texts) => {
            let (parts, media) = interleaved(texts, record)?;
            (parts, media, vec![PAIRS])
        }
        // A field of media that is null belongs to a table whose other rows have media: there it is a caption without them.
        (None, Some(Value::String(text))) if !names_media(record) => {
            (vec![TurnPart::Text(text.clone())], Vec::new(), vec![TEXT])
        }
        _ => return Ok(None),
    };
    if !parts.iter().any(|part| matches!(part, TurnPart::Text(text) if !text.is_empty())) {
        return Err(format!("`{}` of a document is empty, must have some text", read[0]));
    }
    if !tools::of_record(record)?.is_empty() {
        return Err(format!("`tools` stand beside `{}` of a document, which nobody calls", read[0]));
    }
    let turns = vec![Turn { role: Role::Assistant, parts, is_learnt: true, fields: Map::new() }];
    Ok(Some((Conversation { id: id_of(record), turns, media, is_document: true, tools: Vec::new() }, read)))
}

/// Whether a list holds text, and nothing else but nulls.
fn is_text(list: &[Value]) -> bool {
    list.iter().any(Value::is_string) && list.iter().all(|value| value.is_string() || value.is_null())
}

/// Whether the record has a field of media, with media or without.
fn names_media(record: &Value) -> bool {
    media_fields().any(|name| record.get(name).is_some())
}

/// The names of fields of media: `image`, `images`, and so on.
fn media_fields() -> impl Iterator<Item = &'static str> {
    MediaKind::ALL.into_iter().flat_map(|kind| [kind.as_str(), kind.plural()])
}

/// Texts and images of two lists that are equally long: at each place one of them has something, the other null.
fn interleaved(texts: &[Value], record: &Value) -> Result<(Vec<TurnPart>, Vec<MediaReference>), String> {
    if let Some(name) = media_fields().find(|&name| name != IMAGES && field(record, name).is_some()) {
        return Err(format!(
            "`{name}` stands beside `{PAIRS}` of a document, its media must be under `{IMAGES}`"
        ));
    }
    let images = match field(record, IMAGES) {
        Some(Value::Array(images)) => images.as_slice(),
        Some(other) => {
            return Err(format!("`{IMAGES}`: {}, must be a list as long as `{PAIRS}`", type_of(other)));
        }
        None => {
            return Err(format!("`{PAIRS}` is a list of text, `{IMAGES}` must be there, as long as it is"));
        }
    };
    if images.len() != texts.len() {
        let (images, texts) = (images.len(), texts.len());
        return Err(format!(
            "`{IMAGES}` has {images} places and `{PAIRS}` {texts}: a document must have as many of both"
        ));
    }
    let (mut parts, mut media) = (Vec::with_capacity(texts.len()), Vec::new());
    for (index, (text, image)) in texts.iter().zip(images).enumerate() {
        match (text, image) {
            (Value::String(text), Value::Null) => parts.push(TurnPart::Text(text.clone())),
            (Value::Null, Value::Null) => {}
            (Value::Null, image) => {
                parts.push(TurnPart::Media(media.len()));
                let source = media::named(&format!("{IMAGES}[{index}]"), image)?;
                media.push(MediaReference { source, kind: MediaKind::Image });
            }
            _ => {
                return Err(format!(
                    "`{PAIRS}[{index}]` and `{IMAGES}[{index}]` are both there, a place of a document must have one of them"
                ));
            }
        }
    }
    Ok((parts, media))
}
