//! Fields of records that are not read. They are counted, and a notice names them. Media among them are an error, because
//! otherwise a sample with an image would become a sample of text in silence.

use crate::media::MediaKind;
use crate::source::mixture::Source;
use dflop_types::counted;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

/// Different names kept of a source; fields of others are counted together.
const NAMES_MAX: usize = 1000;
/// Names told of a source.
const SHOWN: usize = 5;
/// What the name of a field of media has in it.
const IN_NAMES: [&str; 7] = ["image", "img", "video", "audio", "media", "picture", "photo"];
/// Other names of media, beside the endings of their files.
const NAMES: [&str; 5] = ["file_name", "filename", "file_names", "frames", "sound"];
/// Text of at least this many bytes without a space, in a field named like media, counts as a medium in base64.
const BASE64_BYTES: usize = 256;

/// A field that is not read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct UnreadField {
    /// As in `img`, or `messages[].image` in a turn.
    pub(crate) name: String,
    /// Whether its value may be a medium, and the record has none.
    pub(crate) may_be_media: bool,
}

/// What was found in a record beside its conversation.
#[derive(Debug, Clone, Default)]
pub(crate) struct Fields {
    /// Those that are not read.
    pub(crate) unread: Vec<UnreadField>,
    /// Those that `columns` of the mixture names, by their name in the data.
    pub(crate) renamed: Vec<String>,
}

/// Whether a field of this name is one of media wherever its value may be a medium.
pub(crate) fn names_media(name: &str) -> bool {
    let has = |part: &str| {
        name.as_bytes().windows(part.len()).any(|bytes| bytes.eq_ignore_ascii_case(part.as_bytes()))
    };
    IN_NAMES.into_iter().any(has)
        || NAMES.into_iter().any(|other| name.eq_ignore_ascii_case(other))
        || MediaKind::of_ending(&name.to_ascii_lowercase()).is_some()
}

/// Whether the value may be a medium: bytes, or text that ends as the name of its file does.
pub(crate) fn may_be_media(value: &Value) -> bool {
    match value {
        Value::String(text) => {
            // Behind a file's name, a URL may say more.
            let is_url = text.contains("://");
            let path = if is_url { text.split(['?', '#']).next().unwrap_or(text) } else { text };
            let ending = path.rsplit_once('.').map(|(_, ending)| ending).filter(|ending| ending.len() <= 4);
            ending.is_some_and(|ending| MediaKind::of_ending(&ending.to_ascii_lowercase()).is_some())
                || text.starts_with("data:")
        }
        Value::Array(items) => items.iter().find(|item| !item.is_null()).is_some_and(may_be_media),
        Value::Object(fields) => {
            let is_there = |name| fields.get(name).is_some_and(|value| !value.is_null());
            is_there("attachment")
                || is_there("bytes")
                || ["path", "url"].iter().any(|name| fields.get(*name).is_some_and(may_be_media))
        }
        _ => false,
    }
}

/// Whether the value is a medium, given that its field has a name of media: less is asked of it.
pub(crate) fn is_media_under_its_name(value: &Value) -> bool {
    let is_packed = |text: &str| {
        text.len() >= BASE64_BYTES
            && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+/=-_\r\n".contains(&byte))
    };
    match value {
        Value::String(text) => text.contains("://") || is_packed(text) || may_be_media(value),
        Value::Array(items) => items.iter().find(|item| !item.is_null()).is_some_and(is_media_under_its_name),
        Value::Object(fields) => {
            ["path", "url"].iter().any(|name| fields.get(*name).is_some_and(Value::is_string))
                || may_be_media(value)
        }
        _ => false,
    }
}

/// What to do about media under a field of this name.
pub(crate) fn mend(name: &str) -> String {
    if name.contains("[]") {
        return "media stand under `image`, `video` or `audio` of the record, or are parts of the content"
            .to_owned();
    }
    let lower = name.to_ascii_lowercase();
    let ours = ["video", "audio"].into_iter().find(|kind| lower.contains(kind)).unwrap_or("image");
    format!("give it our name in the mixture, `columns: {{{ours}: {name}}}`, or list it under `ignore` there")
}

/// How many records have which unread fields, by source.
#[derive(Debug)]
pub(crate) struct UnreadCounts {
    sources: Vec<OfSource>,
    /// By source, the fields that its `columns` name and that some record has.
    renamed: Vec<BTreeSet<String>>,
    /// Records seen of each file of all.
    files: Vec<u64>,
}

#[derive(Debug, Clone, Default)]
struct OfSource {
    /// By name: records, and whether the value of one may be a medium.
    fields: BTreeMap<String, (u64, bool)>,
    /// Fields of further names.
    num_others: u64,
}

impl UnreadCounts {
    /// Nothing yet, of so many sources.
    pub(crate) fn new(num_sources: usize) -> Self {
        Self {
            sources: vec![OfSource::default(); num_sources],
            renamed: vec![BTreeSet::new(); num_sources],
            files: Vec::new(),
        }
    }

    /// Counts a record in; `file` counts the files of all sources.
    pub(crate) fn push(&mut self, source: u32, file: u32, fields: Fields) {
        let file = file as usize;
        if self.files.len() <= file {
            self.files.resize(file + 1, 0);
        }
        self.files[file] += 1;
        if let Some(renamed) = self.renamed.get_mut(source as usize) {
            renamed.extend(fields.renamed);
        }
        for UnreadField { name, may_be_media } in fields.unread {
            self.add(source as usize, &name, 1, may_be_media);
        }
    }

    /// Counts in a column of a file, which every record of the file has.
    pub(crate) fn push_column(&mut self, source: usize, file: usize, name: &str) {
        match self.files.get(file) {
            None | Some(0) => {}
            Some(&num_records) => self.add(source, name, num_records, false),
        }
    }

    fn add(&mut self, source: usize, name: &str, num_records: u64, may_be_media: bool) {
        let Some(found) = self.sources.get_mut(source) else { return };
        if let Some((count, is_media)) = found.fields.get_mut(name) {
            *count += num_records;
            *is_media |= may_be_media;
        } else if found.fields.len() < NAMES_MAX {
            found.fields.insert(name.to_owned(), (num_records, may_be_media));
        } else {
            found.num_others += num_records;
        }
    }

    /// One sentence for each field that `columns` of a source names and that no record of it has.
    pub(crate) fn missing(&self, sources: &[Source]) -> Vec<String> {
        let mut notices = Vec::new();
        for (source, found) in sources.iter().zip(&self.renamed) {
            for (ours, theirs) in source.columns.iter().filter(|(_, theirs)| !found.contains(*theirs)) {
                notices.push(format!(
                    "`{}`: no record has `{theirs}`, which `columns: {{{ours}: {theirs}}}` of the mixture names",
                    source.name
                ));
            }
        }
        notices
    }

    /// One sentence for each source of these names that has such fields, the most frequent first.
    pub(crate) fn notices(&self, sources: &[String]) -> Vec<String> {
        let told = sources.iter().zip(&self.sources).filter(|(_, found)| !found.fields.is_empty());
        told.map(|(source, found)| format!("`{source}`, not read: {}", found.text())).collect()
    }
}

impl OfSource {
    fn text(&self) -> String {
        let mut fields: Vec<_> =
            self.fields.iter().map(|(name, (count, media))| (name, *count, *media)).collect();
        // What may be media first, then what most records have; stable: equals by name.
        fields.sort_by_key(|(_, count, media)| (!media, std::cmp::Reverse(*count)));
        let shown = fields
            .iter()
            .take(SHOWN)
            .map(|(name, count, _)| format!("`{name}` ({})", counted(*count, "record")));
        let mut text = shown.collect::<Vec<_>>().join(", ");
        if self.num_others > 0 {
            let _ = write!(text, " and more than {} others", NAMES_MAX - SHOWN);
        } else if fields.len() > SHOWN {
            let _ = write!(text, " and {} more", fields.len() - SHOWN);
        }
        let media: Vec<_> = fields.iter().take(SHOWN).filter(|(_, _, media)| *media).collect();
        if let Some((first, ..)) = media.first() {
            let names: Vec<_> = media.iter().map(|(name, ..)| format!("`{name}`")).collect();
            let _ = write!(text, "; where {} holds media, {}", names.join(" or "), mend(first));
        }
        text
    }
}
