//! The turns of a record, in each of the ways in which records have them.

use super::{Piece, Role, Said, Turns, field, media, tools, type_of};
use crate::media::MediaKind;
use serde_json::{Map, Value};

/// Fields that list turns.
pub(super) const LISTS: [&str; 2] = ["conversations", "messages"];
/// Field that lists questions, each with its answer.
pub(super) const PAIRS: &str = "texts";
pub(super) const QUESTIONS: [&str; 4] = ["question", "query", "problem", "instruction"];
const ANSWERS: [&str; 5] = ["answer", "label", "response", "solution", "output"];
/// A question and its answer where the record has no other question.
pub(super) const PROMPT: [&str; 2] = ["prompt", "completion"];
/// Earlier questions with their answers, beside a question.
const HISTORY: &str = "history";
/// What an instruction is about; it stands below the instruction.
const INPUT: &str = "input";
pub(super) const CAPTIONS: [&str; 2] = ["caption", "text"];
/// Left out, these would change what is asked.
const PARTS_OF_QUESTIONS: [&str; 5] = [INPUT, "choices", "options", "context", "hint"];
/// Types of parts that are text.
pub(super) const TEXTS: [&str; 3] = ["text", "input_text", "output_text"];
/// Fields that say what a part is where it has no `type` (`DashScope`).
const WITHOUT_TYPE: [&str; 7] = ["text", "image", "image_url", "video", "video_url", "audio", "audio_url"];
/// Under which other interfaces name a medium.
const OTHER_NAMES: [&str; 6] = ["source", "data", "file", "file_id", "uri", "src"];
/// Of a record without turns, how many fields are named, and how many letters of a name are shown.
const NAMES_MAX: usize = 6;
const NAME_LETTERS_MAX: usize = 40;
/// Under which a turn says who speaks, and what.
const ROLES: [&str; 2] = ["from", "role"];
const CONTENTS: [&str; 2] = ["value", "content"];
/// Fields of a turn that say whether it carries loss, as trainers name them.
pub(super) const LOSSES: [&str; 4] = ["loss", "train", "training", "weight"];
/// Fields of a turn that hold its thoughts. Where a turn has several, the first of this list counts. Templates read the first two.
pub(crate) const THOUGHTS: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// The turns of the record, media not yet named.
pub(super) fn of_record(record: &Value, has_media: bool) -> Result<Turns, String> {
    if let Some((key, list)) = only(record, &LISTS)? {
        let said = listed(record, key, list)?;
        // Chats keep the media of all turns beside them, and often mark none: trainers put these before the first question.
        return Ok(Turns { said, read: vec![key], asks_with_all: key == "messages" });
    }
    if let Some(question) = only(record, &QUESTIONS)? {
        return asked(record, question);
    }
    // Under this name others have lists of text, for example what is written in a picture.
    let listed_pairs = field(record, PAIRS);
    if let Some(list) = listed_pairs.filter(|list| list.get(0).is_some_and(Value::is_object)) {
        return pairs(record, list);
    }
    if let Some(prompt) = field(record, PROMPT[0]) {
        match field(record, PROMPT[1]) {
            Some(completion) if prompt.is_array() => return completed(record, prompt, completion),
            Some(completion) => return pair(record, Some((PROMPT[0], prompt)), (PROMPT[1], completion)),
            // Beside a caption alone, a prompt is not a question: an image may have been made from it.
            None if only(record, &ANSWERS)?.is_some() => return asked(record, (PROMPT[0], prompt)),
            None => {}
        }
    }
    if has_media && let Some(caption) = only(record, &CAPTIONS)? {
        return pair(record, None, caption);
    }
    if let Some(list) = listed_pairs {
        return pairs(record, list);
    }
    Err(format!("`conversations` or `messages` is missing{}", names_there(record)))
}

/// A question that stands under a field of its own, with what belongs to it.
fn asked(record: &Value, (key, question): (&'static str, &Value)) -> Result<Turns, String> {
    let is_there = |part: &str| field(record, part).is_some_and(|value| !is_empty(value));
    let has_input = key == "instruction" && is_there(INPUT);
    let mut parts = PARTS_OF_QUESTIONS.into_iter().filter(|&part| part != INPUT || !has_input);
    if let Some(part) = parts.find(|part| is_there(part)) {
        return Err(format!(
            "`{part}` stands beside `{key}`, must be part of it: it would be left out (`ignore: [{part}]` in the mixture leaves it out)"
        ));
    }
    let answer = match only(record, &ANSWERS)? {
        Some(answer) => answer,
        None => field(record, CAPTIONS[0])
            .map(|caption| (CAPTIONS[0], caption))
            .ok_or_else(|| format!("`{key}` is there, but no `answer`"))?,
    };
    let mut turns = pair(record, Some((key, question)), answer)?;
    let at = turns.said.len() - 2;
    if has_input {
        let below = &mut turns.said[at].pieces;
        // Trainers join what is not empty.
        if !below.is_empty() {
            below.push(Piece::Text("\n".to_owned()));
        }
        cut(text(INPUT, &record[INPUT])?, below);
        turns.read.push(INPUT);
    }
    if is_there(HISTORY) {
        turns.said.splice(at..at, before(&record[HISTORY])?);
        turns.read.push(HISTORY);
    }
    Ok(turns)
}

/// The turns of `history`: a list of pairs of question and answer.
fn before(history: &Value) -> Result<Vec<Said>, String> {
    let list = history.as_array().map_or(&[][..], Vec::as_slice);
    if list.is_empty() {
        return Err(format!("`{HISTORY}`: {}, must be a list of pairs", type_of(history)));
    }
    let mut said = Vec::with_capacity(2 * list.len());
    for (index, pair) in list.iter().enumerate() {
        let place = format!("{HISTORY}[{index}]");
        let Some([question, answer]) = pair.as_array().map(Vec::as_slice) else {
            return Err(format!("`{place}`: {}, must be a list of a question and its answer", type_of(pair)));
        };
        said.extend(question_and_answer([(&place, question), (&place, answer)])?);
    }
    Ok(said)
}

/// The turns of `texts`: a list of `{"user", "assistant"}`.
fn pairs(record: &Value, list: &Value) -> Result<Turns, String> {
    let list = list.as_array().ok_or_else(|| {
        format!("`{PAIRS}`: {}, must be a list of objects with `user` and `assistant`", type_of(list))
    })?;
    if list.is_empty() {
        return Err(format!("`{PAIRS}` is empty, at least one question is needed"));
    }
    let mut said = system(record)?;
    for (index, pair) in list.iter().enumerate() {
        let place = format!("{PAIRS}[{index}]");
        if !pair.is_object() {
            let kind = type_of(pair);
            return Err(format!("`{place}`: {kind}, must be an object with `user` and `assistant`"));
        }
        let of = |speaker| field(pair, speaker).ok_or_else(|| format!("`{place}`: `{speaker}` is missing"));
        let (question, answer) = (of("user")?, of("assistant")?);
        said.extend(question_and_answer([
            (&format!("{place}.user"), question),
            (&format!("{place}.assistant"), answer),
        ])?);
    }
    Ok(Turns { said, read: vec![PAIRS], asks_with_all: true })
}

/// The turns of a `prompt` and a `completion` that are lists of turns.
fn completed(record: &Value, prompt: &Value, completion: &Value) -> Result<Turns, String> {
    let [key, end] = PROMPT;
    let mut said = listed(record, key, prompt)?;
    // As in TRL, what stands in a prompt carries no loss.
    for one in &mut said {
        one.is_learnt = false;
    }
    let list = completion.as_array().map_or(&[][..], Vec::as_slice);
    let completed = turns_of(end, list, false)?;
    if !completed.iter().any(|one| one.role == Role::Assistant) {
        return Err(format!("`{end}`: {}, must be a list with an answer", type_of(completion)));
    }
    said.extend(completed);
    Ok(Turns { said, read: PROMPT.to_vec(), asks_with_all: true })
}

/// What the record has instead: a name that is misspelt is seen at once.
fn names_there(record: &Value) -> String {
    let Some(fields) = record.as_object().filter(|fields| !fields.is_empty()) else { return String::new() };
    let name = |name: &String| format!("`{}`", name.chars().take(NAME_LETTERS_MAX).collect::<String>());
    let mut names: Vec<String> = fields.keys().take(NAMES_MAX).map(name).collect();
    if fields.len() > NAMES_MAX {
        names.push(format!("{} more", fields.len() - NAMES_MAX));
    }
    format!(": the record has {}", names.join(", "))
}

/// The one of these fields that is there.
fn only<'r>(record: &'r Value, names: &[&'static str]) -> Result<Option<(&'static str, &'r Value)>, String> {
    let mut there = names.iter().filter_map(|name| Some((*name, field(record, name)?)));
    let first = there.next();
    match (first, there.next()) {
        (Some((one, _)), Some((other, _))) => Err(format!("both `{one}` and `{other}` are there")),
        _ => Ok(first),
    }
}

fn pair(
    record: &Value,
    question: Option<(&'static str, &Value)>,
    answer: (&'static str, &Value),
) -> Result<Turns, String> {
    let mut said = system(record)?;
    if let Some(question) = question {
        said.extend(question_and_answer([question, answer])?);
    } else {
        said.push(Said::plain(Role::User, Vec::new()));
        said.push(spoken(Role::Assistant, answer)?);
    }
    let read = question.into_iter().chain([answer]).map(|(key, _)| key).collect();
    Ok(Turns { said, read, asks_with_all: true })
}

/// Two turns, from the names and values of a question and an answer.
fn question_and_answer([question, answer]: [(&str, &Value); 2]) -> Result<[Said; 2], String> {
    Ok([spoken(Role::User, question)?, spoken(Role::Assistant, answer)?])
}

/// A turn that is a text.
fn spoken(role: Role, (key, value): (&str, &Value)) -> Result<Said, String> {
    let mut pieces = Vec::new();
    cut(text(key, value)?, &mut pieces);
    Ok(Said::plain(role, pieces))
}

fn text<'r>(key: &str, value: &'r Value) -> Result<&'r str, String> {
    value.as_str().ok_or_else(|| format!("`{key}`: {}, must be text", type_of(value)))
}

/// The system turn that a record has beside its turns.
fn system(record: &Value) -> Result<Vec<Said>, String> {
    match field(record, "system") {
        None => Ok(Vec::new()),
        Some(Value::String(text)) if text.is_empty() => Ok(Vec::new()),
        Some(value) => Ok(vec![spoken(Role::System, ("system", value))?]),
    }
}

fn listed(record: &Value, key: &str, list: &Value) -> Result<Vec<Said>, String> {
    let list = list.as_array().ok_or_else(|| {
        let is_packed = list.as_str().is_some_and(|text| text.trim_start().starts_with('['));
        let mend =
            if is_packed { "; it looks like JSON in a text: parse it before it is written" } else { "" };
        format!("`{key}`: {}, must be a list of turns{mend}", type_of(list))
    })?;
    if list.is_empty() {
        return Err(format!("`{key}` is empty, at least one turn is needed"));
    }
    let mut said = system(record)?;
    said.append(&mut turns_of(key, list, !said.is_empty())?);
    Ok(said)
}

/// The turns of a list that stands under `key`; `has_system`: a system turn may not be among them.
fn turns_of(key: &str, list: &[Value], has_system: bool) -> Result<Vec<Said>, String> {
    let mut said = Vec::with_capacity(list.len());
    let mut marks_media = [false; 2];
    for (index, turn) in list.iter().enumerate() {
        let place = format!("{key}[{index}]");
        refuse_parts_of_loss(&place, turn)?;
        let is_learnt = is_learnt(turn);
        let (role_name, speaker) = speaker(&place, turn)?;
        if tools::is_caller(speaker) {
            let (name, content) = named(&place, turn, CONTENTS)?;
            let turn = Said { is_learnt, fields: more_of(turn), ..Said::plain(Role::Assistant, Vec::new()) };
            tools::call(&mut said, &format!("{place}.{name}"), content, turn)?;
            continue;
        }
        let role = role(&place, role_name, speaker)?;
        if has_system && role == Role::System {
            return Err(format!("`{place}` is a system turn, and `system` is there too"));
        }
        let calls = tools::of_turn(&place, turn)?;
        if !calls.is_empty() && role != Role::Assistant {
            return Err(format!(
                "`{place}` is a {} turn with calls of tools, must be the assistant's",
                role.name()
            ));
        }
        let mut fields = more_of(turn);
        let thinks = THOUGHTS.into_iter().any(|name| fields.contains_key(name));
        tools::add(&mut fields, calls);
        let says_more = role == Role::Assistant && (thinks || fields.contains_key(tools::CALLS));
        let pieces = match named(&place, turn, CONTENTS) {
            Ok((name, content)) => pieces(&format!("{place}.{name}"), content, &mut marks_media)?,
            // Who calls a tool need not say more, and a tool may give nothing.
            Err(_) if says_more || role == Role::Tool => Vec::new(),
            Err(cause) => return Err(cause),
        };
        said.push(Said { role, pieces, is_learnt, fields });
    }
    if marks_media == [true, true] {
        return Err(format!("`{key}` has media as parts and as marks in texts, must have them one way"));
    }
    Ok(said)
}

fn named<'r>(
    place: &str,
    turn: &'r Value,
    names: [&'static str; 2],
) -> Result<(&'static str, &'r Value), String> {
    names
        .into_iter()
        .find_map(|name| Some((name, field(turn, name)?)))
        .ok_or_else(|| format!("`{place}`: `{}` or `{}` is missing", names[0], names[1]))
}

/// The field that says who speaks, and who it is.
fn speaker<'r>(place: &str, turn: &'r Value) -> Result<(&'static str, &'r str), String> {
    let (name, role) = named(place, turn, ROLES)?;
    let role = role.as_str().ok_or_else(|| format!("`{place}.{name}`: {}, must be text", type_of(role)))?;
    Ok((name, role))
}

fn role(place: &str, name: &str, speaker: &str) -> Result<Role, String> {
    Role::parse(speaker).ok_or_else(|| {
        format!("`{place}.{name}`: `{speaker}`, must be human, gpt, user, assistant, system or tool")
    })
}

/// What a turn has beside who speaks, what is said, whether it carries loss, and tools: a chat template may read it. Thoughts
/// stand under the names that templates read, as transformers puts them.
fn more_of(turn: &Value) -> Map<String, Value> {
    let others = [&ROLES[..], &CONTENTS, &LOSSES, &tools::FIELDS];
    let is_more = |name: &str| !others.iter().any(|names| names.contains(&name));
    let fields = turn.as_object().into_iter().flat_map(Map::iter);
    let fields = fields.filter(|(name, value)| is_more(name) && !value.is_null());
    let mut fields: Map<String, Value> = fields.map(|(name, value)| (name.clone(), value.clone())).collect();
    if let Some(thoughts) = THOUGHTS.into_iter().find_map(|name| fields.get(name)).cloned() {
        let [first, second, _] = THOUGHTS;
        fields.insert(first.to_owned(), thoughts.clone());
        fields.entry(second).or_insert(thoughts);
    }
    fields
}

/// Whether a turn carries loss: it does unless it says otherwise.
fn is_learnt(turn: &Value) -> bool {
    let is_off = |value: &Value| value == false || value.as_f64() == Some(0.0);
    !LOSSES.into_iter().any(|name| field(turn, name).is_some_and(is_off))
}

/// Refuses a turn's loss other than all or nothing.
fn refuse_parts_of_loss(place: &str, turn: &Value) -> Result<(), String> {
    let is_either = |value: &Value| value.is_boolean() || [Some(0.0), Some(1.0)].contains(&value.as_f64());
    let part = |name| Some((name, field(turn, name).filter(|value| !is_either(value))?));
    match LOSSES.into_iter().find_map(part) {
        Some((name, value)) => Err(format!(
            "`{place}.{name}` is {value}, must be 0 or 1: an answer carries loss, or it does not"
        )),
        None => Ok(()),
    }
}

pub(super) fn is_empty(value: &Value) -> bool {
    match value {
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        _ => false,
    }
}

/// What a turn holds; notes whether parts, or marks, place media.
fn pieces(place: &str, content: &Value, marks_media: &mut [bool; 2]) -> Result<Vec<Piece>, String> {
    let mut pieces = Vec::new();
    match content {
        Value::String(text) => marks_media[1] |= cut(text, &mut pieces),
        Value::Array(parts) => {
            for (index, part) in parts.iter().enumerate() {
                one_part(&format!("{place}[{index}]"), part, &mut pieces, marks_media)?;
            }
        }
        _ => return Err(format!("`{place}`: {}, must be text", type_of(content))),
    }
    Ok(pieces)
}

fn one_part(
    place: &str,
    part: &Value,
    pieces: &mut Vec<Piece>,
    marks_media: &mut [bool; 2],
) -> Result<(), String> {
    let part_type = match type_of_part(part) {
        Ok(name) => name,
        Err(fault) => return Err(format!("`{place}{fault}")),
    };
    let kind = match part_type {
        text if TEXTS.contains(&text) => {
            let text = field(part, "text").ok_or_else(|| format!("`{place}`: `text` is missing"))?;
            let text =
                text.as_str().ok_or_else(|| format!("`{place}.text`: {}, must be text", type_of(text)))?;
            marks_media[1] |= cut(text, pieces);
            return Ok(());
        }
        "image" | "image_url" | "input_image" => MediaKind::Image,
        "video" | "video_url" => MediaKind::Video,
        "audio" | "audio_url" | "input_audio" => MediaKind::Audio,
        other => {
            return Err(format!("`{place}.type`: `{other}`, must be text, image, video or audio"));
        }
    };
    marks_media[0] = true;
    let source = media::of_part(place, part, part_type, kind.as_str())?;
    if source.is_none()
        && let Some(name) = OTHER_NAMES.into_iter().find(|name| field(part, name).is_some())
    {
        let kind = kind.as_str();
        return Err(format!("`{place}.{name}` is not read: give `{kind}`, `{kind}_url`, `url` or `path`"));
    }
    pieces.push(Piece::Placeholder { kind, source });
    Ok(())
}

/// What a part is: its `type`, or where it has none the one field that says so, as in `{"image": "cat.jpg"}`. An error begins
/// behind the place of the part.
pub(super) fn type_of_part(part: &Value) -> Result<&str, String> {
    match field(part, "type") {
        Some(Value::String(name)) => return Ok(name),
        Some(other) => return Err(format!(".type`: {}, must be text", type_of(other))),
        None => {}
    }
    let mut there = WITHOUT_TYPE.into_iter().filter(|name| field(part, name).is_some());
    match (there.next(), there.next()) {
        (Some(name), None) => Ok(name),
        (Some(one), Some(other)) => {
            Err(format!("`: both `{one}` and `{other}` are there, and no `type` says which it is"))
        }
        (None, _) => {
            Err("`: `type` is missing, and no `text`, `image`, `video` or `audio` is there".to_owned())
        }
    }
}

/// Cuts a text at its marks; whether it has any.
fn cut(text: &str, pieces: &mut Vec<Piece>) -> bool {
    let mut rest = text;
    let mut has_mark = false;
    loop {
        let next = MediaKind::ALL
            .into_iter()
            .filter_map(|kind| rest.find(kind.mark()).map(|at| (at, kind)))
            .min_by_key(|(at, _)| *at);
        let before = next.map_or(rest, |(at, _)| &rest[..at]);
        if !before.is_empty() {
            pieces.push(Piece::Text(before.to_owned()));
        }
        let Some((at, kind)) = next else { return has_mark };
        has_mark = true;
        pieces.push(Piece::Placeholder { kind, source: None });
        rest = &rest[at + kind.mark().len()..];
    }
}
