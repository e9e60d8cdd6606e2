//! One sample of a shard: the members that share a key, and the record they make.

use crate::media::MediaKind;
use crate::source::location::{Location, MediaPlace};
use crate::source::readers::tar::Member;
use crate::source::readers::{Body, RawRecord};
use dflop_types::Place;
use serde_json::{Map, Value, json};
use std::collections::HashMap;

/// Bytes of text in one sample, at most: its `.json`, `.txt` and `.cls` together.
pub(in crate::source::readers) const TEXT_BYTES_MAX: u64 = 64 << 20;
/// Members of one sample, at most.
const MEMBERS_MAX: usize = 4096;

const TEXTS: [&str; 3] = ["json", "txt", "cls"];

/// Keys under which a record names media of a kind, for one and for several.
const fn keys_of(kind: MediaKind) -> [&'static str; 2] {
    [kind.as_str(), kind.plural()]
}

/// Keys of a content part under which a name of a medium may stand.
const NAMES: [&str; 5] = ["path", "url", "image_url", "video_url", "audio_url"];
/// Keys of a conversation: beside it, a text is no caption.
const CONVERSATIONS: [&str; 2] = ["conversations", "messages"];

/// Key and suffix of a member, as `WebDataset` splits its name: the key ends before the first dot of the last component,
/// the suffix begins behind it, in lower case. `None` for what belongs to no sample.
pub(super) fn split(name: &str) -> Option<(&str, String)> {
    let first = name.split('/').next().unwrap_or(name);
    if first.len() >= 4 && first.starts_with("__") && first.ends_with("__") {
        return None;
    }
    let component = name.rfind('/').map_or(0, |at| at + 1);
    let dot = name[component..].find('.').filter(|&dot| dot > 0)? + component;
    Some((&name[..dot], name[dot + 1..].to_ascii_lowercase()))
}

/// The ending of a suffix: `jpg` of `img1.jpg`.
fn ending(suffix: &str) -> &str {
    suffix.rsplit('.').next().unwrap_or(suffix)
}

/// Whether the suffix names text that a record is made of.
pub(in crate::source::readers) fn is_text(suffix: &str) -> bool {
    TEXTS.contains(&ending(suffix))
}

/// One member of a sample.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::source::readers) struct SampleMember {
    /// Its name behind the key, for example `jpg` or `img1.jpg`.
    pub(in crate::source::readers) suffix: String,
    /// Its body, where it is text and was asked for.
    pub(in crate::source::readers) text: Option<Vec<u8>>,
    name: String,
    start: u64,
    len: u64,
}

/// The members that share a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::source::readers) struct Sample {
    /// Directory and name up to the first dot.
    pub(in crate::source::readers) key: String,
    /// First byte of the first member's header.
    pub(super) start: u64,
    /// First byte after the last member.
    pub(super) end: u64,
    /// In the order of the shard.
    pub(in crate::source::readers) members: Vec<SampleMember>,
    /// Why it makes no record.
    unsound: Option<String>,
}

impl Sample {
    pub(super) const fn new(key: String, start: u64) -> Self {
        Self { key, start, end: start, members: Vec::new(), unsound: None }
    }

    /// Whether the text of a member of `len` bytes may still be read.
    pub(super) fn has_room(&mut self, suffix: &str, len: u64) -> bool {
        let read: usize = self.members.iter().filter_map(|member| member.text.as_ref()).map(Vec::len).sum();
        let sum = len.saturating_add(read as u64);
        if sum > TEXT_BYTES_MAX {
            let cause =
                format!("its text up to `{suffix}` has {sum} bytes, must have at most {TEXT_BYTES_MAX}");
            self.unsound.get_or_insert(cause);
        }
        sum <= TEXT_BYTES_MAX
    }

    pub(super) fn push(&mut self, suffix: String, member: Member, text: Option<Vec<u8>>) {
        self.end = member.end();
        if self.members.len() == MEMBERS_MAX {
            self.unsound.get_or_insert_with(|| format!("it has more than {MEMBERS_MAX} members"));
        } else if self.members.iter().any(|other| other.suffix == suffix) {
            self.unsound.get_or_insert_with(|| format!("member `{}` is there twice", member.name));
        } else {
            let Member { name, start, len, .. } = member;
            self.members.push(SampleMember { suffix, text, name, start, len });
        }
    }

    /// It is a part of the sample whose first member stands at byte `earlier`.
    pub(super) fn stands_apart(&mut self, earlier: u64) {
        self.unsound.get_or_insert_with(|| {
            format!(
                "its members do not stand beside each other: others are at byte {earlier} of the shard, before other \
                 samples. Pack the shard so that they do (`tar --sort=name`)"
            )
        });
    }

    /// The record that `fields` makes of it, in shard `file`.
    pub(super) fn record(
        &self,
        file: u32,
        location: &Location,
        fields: impl FnOnce(&Self) -> Result<Body, String>,
    ) -> RawRecord {
        let place = Place { file, start: self.start, len: self.end - self.start };
        let body = match &self.unsound {
            Some(cause) => Err(cause.clone()),
            None => fields(self),
        };
        let attachments = self.media().map(|(member, _)| MediaPlace::Range {
            file: location.clone(),
            start: member.start,
            len: member.len,
            name: member.name.clone(),
        });
        let body = body.unwrap_or_else(|cause| Body::Unsound(format!("`{}`: {cause}", self.key)));
        RawRecord { place, body, attachments: attachments.collect() }
    }

    /// The media among its members; their order is that of the attachments.
    fn media(&self) -> impl Iterator<Item = (&SampleMember, MediaKind)> {
        self.members.iter().filter_map(|member| Some((member, MediaKind::of_ending(&member.suffix)?)))
    }

    /// The value of a member: an attachment, JSON, a number or text; `None` where there is no such member.
    pub(in crate::source::readers) fn value(&self, name: &str) -> Result<Option<Value>, String> {
        if let Some(index) = self.media().position(|(member, _)| member.suffix == name) {
            return Ok(Some(json!({"attachment": index})));
        }
        let Some(bytes) =
            self.members.iter().find(|member| member.suffix == name).and_then(|p| p.text.as_ref())
        else {
            return Ok(None);
        };
        // Editors of some systems put a byte order mark before a text.
        let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
        if ending(name) == "json" {
            let value = crate::source::readers::json::parse(bytes, 1)
                .map_err(|cause| format!("`{name}`: {cause}"))?;
            return Ok(Some(value));
        }
        let text = std::str::from_utf8(bytes)
            .map_err(|error| format!("`{name}`: it is not UTF-8 at byte {}", error.valid_up_to()))?;
        let class = text.trim().parse::<i64>().ok().filter(|_| ending(name) == "cls");
        Ok(Some(class.map_or_else(|| Value::from(text), Value::from)))
    }

    /// The record of a plain shard: the fields of `.json`, the other texts, and the media.
    pub(super) fn plain(&self) -> Result<Body, String> {
        let mut fields = match self.value("json")? {
            None => Map::new(),
            Some(Value::Object(fields)) => fields,
            // What is no object is no record, and is named where records are checked.
            Some(other) => return Ok(Body::Fields(other)),
        };
        let has_media = self.media().next().is_some();
        let is_talk = CONVERSATIONS.iter().any(|key| fields.get(*key).is_some_and(|value| !value.is_null()));
        for member in self.members.iter().filter(|member| member.text.is_some() && member.suffix != "json") {
            let name = match member.suffix.as_str() {
                "txt" if is_talk || fields.contains_key("text") => "txt",
                "txt" if has_media => "caption",
                "txt" => "text",
                name => name,
            };
            if fields.get(name).is_none_or(Value::is_null) {
                fields.insert(name.to_owned(), self.value(&member.suffix)?.unwrap_or_default());
            }
        }
        let named = self.resolve(&mut fields);
        for kind in MediaKind::ALL.into_iter().filter(|kind| !named.contains(kind)) {
            let keys = keys_of(kind);
            self.attach(&mut fields, kind, keys)?;
        }
        Ok(Body::Fields(self.identified(fields)))
    }

    /// The fields with the key as `id` where they have none.
    pub(in crate::source::readers) fn identified(&self, mut fields: Map<String, Value>) -> Value {
        if fields.get("id").is_none_or(Value::is_null) {
            fields.insert("id".to_owned(), Value::from(self.key.as_str()));
        }
        Value::Object(fields)
    }

    /// Puts the attachment where a field names a member: by its whole name, its last component, or its suffix where that
    /// has a dot. Returns the kinds of which one was named.
    pub(in crate::source::readers) fn resolve(&self, fields: &mut Map<String, Value>) -> Vec<MediaKind> {
        let mut names = HashMap::new();
        for (index, (member, kind)) in self.media().enumerate() {
            let whole = bare(&member.name);
            let last = whole.rsplit('/').next().unwrap_or(whole);
            let dotted = member.suffix.contains('.').then_some(member.suffix.as_str());
            for name in [Some(whole), Some(last), dotted].into_iter().flatten() {
                names.insert(name, (index, kind));
            }
        }
        let mut kinds = Vec::new();
        if !names.is_empty() {
            for (key, value) in fields {
                resolve(key, value, &names, &mut kinds);
            }
        }
        kinds
    }

    /// Sets the field of one kind of media, of which the record names no member, to the attachments in order.
    fn attach(
        &self,
        fields: &mut Map<String, Value>,
        kind: MediaKind,
        keys: [&str; 2],
    ) -> Result<(), String> {
        let found: Vec<Value> = self
            .media()
            .enumerate()
            .filter(|(_, (_, other))| *other == kind)
            .map(|(index, _)| json!({"attachment": index}))
            .collect();
        if found.is_empty() {
            return Ok(());
        }
        let count = |key: &str| match fields.get(key) {
            None | Some(Value::Null) => 0,
            Some(Value::Array(list)) => list.len(),
            Some(_) => 1,
        };
        let key = keys.into_iter().find(|key| count(key) > 0);
        match key.map(|key| (key, count(key))) {
            Some((key, named)) if named != found.len() => Err(format!(
                "`{key}` names {named}, none of them a member of the sample, which has {}: must be as many",
                found.len()
            )),
            named => {
                let key = named.map_or(keys[usize::from(found.len() > 1)], |(key, _)| key);
                let is_list = found.len() > 1 || fields.get(key).is_some_and(Value::is_array);
                let mut found = found;
                let value = if is_list { Value::Array(found) } else { found.swap_remove(0) };
                fields.insert(key.to_owned(), value);
                Ok(())
            }
        }
    }
}

fn bare(name: &str) -> &str {
    name.strip_prefix("./").unwrap_or(name)
}

fn resolve(
    key: &str,
    value: &mut Value,
    names: &HashMap<&str, (usize, MediaKind)>,
    kinds: &mut Vec<MediaKind>,
) {
    match value {
        Value::String(name) if is_media_key(key) => {
            if let Some(&(index, kind)) = names.get(bare(name)) {
                *value = json!({"attachment": index});
                if !kinds.contains(&kind) {
                    kinds.push(kind);
                }
            }
        }
        // JSON nests at most as deep as its parser allows.
        Value::Array(list) => list.iter_mut().for_each(|value| resolve(key, value, names, kinds)),
        Value::Object(fields) => {
            for (key, value) in fields.iter_mut() {
                resolve(key, value, names, kinds);
            }
            // `{"url": name}` under a medium's key is the medium.
            let found =
                ["path", "url"].into_iter().find_map(|key| fields.get(key)?.get("attachment").cloned());
            if let Some(index) = found.filter(|_| is_media_key(key)) {
                *value = json!({"attachment": index});
            }
        }
        _ => {}
    }
}

fn is_media_key(key: &str) -> bool {
    NAMES.contains(&key) || MediaKind::ALL.into_iter().any(|kind| keys_of(kind).contains(&key))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::location::Location;
    use std::borrow::Cow;

    fn sample(members: &[(&str, &str)]) -> Sample {
        let mut sample = Sample::new(split(members[0].0).unwrap().0.to_owned(), 0);
        for (at, (name, text)) in members.iter().enumerate() {
            let (_, part) = split(name).unwrap();
            let text = is_text(&part).then(|| text.as_bytes().to_vec());
            let member = Member {
                header: at as u64 * 1024,
                name: (*name).to_owned(),
                start: at as u64 * 1024 + 512,
                len: 3,
            };
            sample.push(part, member, text);
        }
        sample
    }

    fn fields(members: &[(&str, &str)]) -> Result<Value, String> {
        let location = Location::parse("a.tar");
        sample(members).record(0, &location, Sample::plain).parse().map(Cow::into_owned)
    }

    #[test]
    fn names_are_split_as_webdataset_splits_them() {
        for (name, expected) in [
            ("000.jpg", Some(("000", "jpg"))),
            ("a.b/c/000.IMG1.JPG", Some(("a.b/c/000", "img1.jpg"))),
            ("./000.json", Some(("./000", "json"))),
            ("000.", Some(("000", ""))),
            ("a.b/000", None),
            ("._000.jpg", None),
            ("__meta__/x.json", None),
            ("__meta__", None),
            ("__x.json", Some(("__x", "json"))),
        ] {
            let found = split(name);
            let found = found.as_ref().map(|(key, part)| (*key, part.as_str()));
            assert_eq!(found, expected, "{name}");
        }
    }

    #[test]
    fn members_make_the_fields_of_a_record() {
        let attachment = |index: usize| json!({"attachment": index});
        let talk = json!([{"from": "human", "value": "<image>"}]);
        let one = json!({"image": "coco/1.jpg", "conversations": talk}).to_string();
        assert_eq!(
            fields(&[("d/1.jpg", ""), ("d/1.json", &one)]).unwrap(),
            json!({"image": attachment(0), "conversations": talk, "id": "d/1"})
        );
        assert_eq!(
            fields(&[("1.json", "\u{feff}{\"id\": 3}"), ("1.txt", "\u{feff}a caption")]).unwrap(),
            json!({"id": 3, "text": "a caption"})
        );
        let by_name = json!({"id": 7, "images": ["1.b.png", "./1.a.png", "other.png"]}).to_string();
        assert_eq!(
            fields(&[("1.json", &by_name), ("1.a.png", ""), ("1.b.png", "")]).unwrap(),
            json!({"id": 7, "images": [attachment(1), attachment(0), "other.png"]})
        );
        let parts = json!({"id": "x", "messages": [
            {"role": "user", "content": [
                {"type": "image", "image": "b.png"},
                {"type": "image_url", "image_url": {"url": "1.a.png"}},
                {"type": "text", "text": "b.png"}]}]});
        let expected = json!({"id": "x", "messages": [
            {"role": "user", "content": [
                {"type": "image", "image": attachment(1)},
                {"type": "image_url", "image_url": attachment(0)},
                {"type": "text", "text": "b.png"}]}]});
        assert_eq!(
            fields(&[("1.json", &parts.to_string()), ("1.a.png", ""), ("1.b.png", "")]).unwrap(),
            expected
        );
        assert_eq!(
            fields(&[("1.0.jpg", ""), ("1.1.jpg", ""), ("1.txt", "cats"), ("1.cls", " 3\n"), ("1.npy", "")])
                .unwrap(),
            json!({"caption": "cats", "cls": 3, "images": [attachment(0), attachment(1)], "id": "1"})
        );
        assert_eq!(
            fields(&[("1.wav", ""), ("1.mp4", ""), ("1.txt", "a bell")]).unwrap(),
            json!({"caption": "a bell", "video": attachment(1), "audio": attachment(0), "id": "1"})
        );
        assert_eq!(
            fields(&[("1.json", r#"{"text": "y"}"#), ("1.jpg", ""), ("1.txt", "x")]).unwrap(),
            json!({"text": "y", "txt": "x", "image": attachment(0), "id": "1"})
        );
        assert_eq!(fields(&[("1.txt", "only text")]).unwrap(), json!({"text": "only text", "id": "1"}));
        let both = json!({"conversations": []}).to_string();
        assert_eq!(
            fields(&[("1.json", &both), ("1.txt", "x"), ("1.detail.json", "[1]")]).unwrap(),
            json!({"conversations": [], "txt": "x", "detail.json": [1], "id": "1"})
        );
    }

    #[test]
    fn what_makes_no_record_is_named() {
        let three = json!({"images": ["a", "b", "c"]}).to_string();
        let mut errors = vec![
            fields(&[("1.json", "{\"a\": 1,}")]).unwrap_err(),
            fields(&[("1.json", "{}"), ("1.jpg", ""), ("1.JPG", "")]).unwrap_err(),
            fields(&[("1.json", &three), ("1.0.jpg", ""), ("1.1.jpg", "")]).unwrap_err(),
        ];
        let mut large = sample(&[("1.txt", "x")]);
        assert!(!large.has_room("json", TEXT_BYTES_MAX));
        errors.push(large.record(0, &Location::parse("a.tar"), Sample::plain).parse().unwrap_err());
        let mut latin = sample(&[("1.jpg", ""), ("1.txt", "")]);
        latin.members[1].text = Some(b"caf\xe9".to_vec());
        errors.push(latin.record(0, &Location::parse("a.tar"), Sample::plain).parse().unwrap_err());
        insta::assert_snapshot!(errors.join("\n"), @r"
        `1`: `json`: line 1, column 9: it is not JSON: trailing comma
        `1`: member `1.JPG` is there twice
        `1`: `images` names 3, none of them a member of the sample, which has 2: must be as many
        `1`: its text up to `json` has 67108865 bytes, must have at most 67108864
        `1`: `txt`: it is not UTF-8 at byte 3
        ");
    }
}
