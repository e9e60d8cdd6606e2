//! What a record says beside its conversation.

use super::turns::{LISTS, LOSSES, PAIRS, TEXTS, is_empty, type_of_part};
use super::{field, tools};
use crate::source::mixture::MEDIA;
use crate::source::unread::{UnreadField, is_media_under_its_name, may_be_media, mend, names_media};
use serde_json::{Map, Value};

/// Fields of one record that are named, at most.
const NAMES_MAX: usize = 64;
/// Characters of a value shown.
const SHOWN: usize = 60;

/// Where a field stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Level {
    Record,
    /// In a turn of this list.
    Turn(&'static str),
    /// In a part of the content of a turn of this list.
    Part(&'static str, &'static str),
}

impl Level {
    fn name(self, field: &str) -> String {
        match self {
            Self::Record => field.to_owned(),
            Self::Turn(list) => format!("{list}[].{field}"),
            Self::Part(list, content) => format!("{list}[].{content}[].{field}"),
        }
    }
}

/// The fields that say something and are not read, each once; `read` are those that the turns are made of.
pub(super) fn of_record(record: &Value, read: &[&str], has_no_media: bool) -> Vec<UnreadField> {
    let mut found: Vec<(Level, &str, bool)> = Vec::new();
    walk(record, read, &mut |level, name, value| {
        let may_be_media = has_no_media && may_be_media(value);
        if let Some((_, _, is_media)) = found.iter_mut().find(|(l, n, _)| (*l, *n) == (level, name)) {
            *is_media |= may_be_media;
        } else if found.len() < NAMES_MAX {
            found.push((level, name, may_be_media));
        }
    });
    let named = |(level, name, may_be_media): (Level, &str, bool)| UnreadField {
        name: level.name(name),
        may_be_media,
    };
    found.into_iter().map(named).collect()
}

/// The field of turns that a notice names: `name` of `messages[].name`.
pub(crate) fn field_of_turns(field: &UnreadField) -> Option<&str> {
    let name = LISTS.iter().find_map(|list| field.name.strip_prefix(list))?;
    name.strip_prefix("[].").filter(|name| !name.contains("[]"))
}

/// `Ok` if no field beside those that are read is one of media by its name and by its value.
pub(super) fn refuse_media(record: &Value) -> Result<(), String> {
    let mut refused = None;
    // Whichever list says the turns, media have no place in them.
    for list in LISTS {
        walk(record, &[list], &mut |level, name, value| {
            if refused.is_none() && names_media(name) && is_media_under_its_name(value) {
                refused = Some((level.name(name), value));
            }
        });
    }
    let Some((name, value)) = refused else { return Ok(()) };
    let shown = match value {
        Value::String(text) => format!("`{}`", text.chars().take(SHOWN).collect::<String>()),
        other => super::type_of(other).to_owned(),
    };
    Err(format!("`{name}` is {shown}, media under this name are not read: {}", mend(&name)))
}

/// Calls `tell` with every field that is not read and not empty.
fn walk<'r>(record: &'r Value, read: &[&str], tell: &mut impl FnMut(Level, &'r str, &'r Value)) {
    let others = ["id", "system"];
    each(record, |name, value| {
        let is_read = read.contains(&name) || others.contains(&name);
        if !is_read && !MEDIA.contains(&name) && !tools::FIELDS.contains(&name) {
            tell(Level::Record, name, value);
        }
    });
    if read.contains(&PAIRS) {
        for pair in record[PAIRS].as_array().into_iter().flatten() {
            each(pair, |name, value| {
                if !["user", "assistant"].contains(&name) {
                    tell(Level::Turn(PAIRS), name, value);
                }
            });
        }
    }
    let Some(list) = LISTS.into_iter().find(|list| read.contains(list)) else { return };
    for turn in record[list].as_array().into_iter().flatten() {
        let first = |names: [&'static str; 2]| names.into_iter().find(|name| field(turn, name).is_some());
        let (role, content) = (first(["from", "role"]), first(["value", "content"]));
        each(turn, |name, value| {
            let is_read = role == Some(name) || content == Some(name) || LOSSES.contains(&name);
            if !is_read && !tools::FIELDS.contains(&name) {
                tell(Level::Turn(list), name, value);
            }
        });
        let Some(content) = content else { continue };
        for part in turn[content].as_array().into_iter().flatten() {
            let part_type = type_of_part(part).unwrap_or_default();
            each(part, |name, value| {
                if !is_read_of_part(part_type, name) {
                    tell(Level::Part(list, content), name, value);
                }
            });
        }
    }
}

/// Whether a part of this type is made of the field.
fn is_read_of_part(part_type: &str, name: &str) -> bool {
    if TEXTS.contains(&part_type) {
        return ["type", "text"].contains(&name);
    }
    let kind = part_type.trim_start_matches("input_").trim_end_matches("_url");
    ["type", part_type, kind, "url", "path", "attachment"].contains(&name)
        || name.strip_suffix("_url") == Some(kind)
}

/// Calls `visit` with the fields of an object that are not empty.
fn each<'r>(object: &'r Value, mut visit: impl FnMut(&'r str, &'r Value)) {
    for (name, value) in object.as_object().into_iter().flat_map(Map::iter) {
        if !value.is_null() && !is_empty(value) {
            visit(name, value);
        }
    }
}
