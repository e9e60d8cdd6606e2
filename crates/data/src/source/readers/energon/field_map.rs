//! Field maps: which members of a sample, or which values in its JSON, become which fields.

use crate::media::MediaKind;
use crate::source::readers::Body;
use crate::source::readers::webdataset::{Layout, Sample, is_text};
use serde_json::{Map, Value};

/// Fields of sample types, and what a record calls them; no name: it decides no shape.
const FIELDS: [(&str, Option<&str>); 18] = [
    ("image", Some("image")),
    ("images", Some("images")),
    ("imgs", Some("images")),
    ("video", Some("video")),
    ("videos", Some("videos")),
    ("audio", Some("audio")),
    ("audios", Some("audios")),
    ("caption", Some("caption")),
    ("text", Some("text")),
    ("context", Some("question")),
    ("question", Some("question")),
    ("answers", Some("answer")),
    ("answer", Some("answer")),
    ("conversation", Some("conversations")),
    ("conversations", Some("conversations")),
    ("messages", Some("conversations")),
    ("answer_weights", None),
    ("__key__", None),
];

/// Where a value is: a part of the sample, and keys or positions inside its JSON.
#[derive(Debug, PartialEq, Eq)]
struct Access {
    part: String,
    keys: Vec<String>,
}

/// The fields of a record, each with its places, of which the first that is there counts.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct FieldMap {
    fields: Vec<(&'static str, String, Vec<Access>)>,
}

impl FieldMap {
    /// The map in `field_map`.
    ///
    /// # Errors
    /// Field, value, rule.
    pub(super) fn parse(map: &Value) -> Result<Self, String> {
        let map = map.as_object().filter(|map| !map.is_empty());
        let map = map.ok_or("`field_map` must be a mapping of fields to parts of a sample")?;
        let mut fields = Vec::new();
        for (name, value) in map {
            let known = FIELDS.iter().find(|(known, _)| known == name);
            let Some((_, field)) = known else {
                let known: Vec<&str> = FIELDS.iter().map(|(name, _)| *name).collect();
                return Err(format!(
                    "`field_map.{name}` is no field we read, must be of {}",
                    known.join(", ")
                ));
            };
            let Some(field) = field else { continue };
            let text =
                value.as_str().ok_or_else(|| format!("`field_map.{name}` is {value}, must be text"))?;
            let places = text.split(',').map(access).collect::<Result<_, _>>();
            let places = places.map_err(|cause| format!("`field_map.{name}` is `{text}`: {cause}"))?;
            fields.push((*field, text.to_owned(), places));
        }
        Ok(Self { fields })
    }
}

impl Layout for FieldMap {
    fn reads(&self, part: &str) -> bool {
        is_text(part) && self.fields.iter().flat_map(|(_, _, places)| places).any(|place| place.part == part)
    }

    fn body(&self, sample: &Sample) -> Result<Body, String> {
        let mut fields = Map::new();
        for (field, text, places) in &self.fields {
            let mut found = None;
            for place in places {
                if found.is_none() {
                    found = place.value(sample)?;
                }
            }
            let value = found.ok_or_else(|| format!("`{text}` is not there, the field map needs it"))?;
            set(&mut fields, field, value)?;
        }
        sample.resolve(&mut fields);
        Ok(Body::Fields(sample.identified(fields)))
    }
}

impl Access {
    fn value(&self, sample: &Sample) -> Result<Option<Value>, String> {
        let Some(value) = sample.value(&self.part)? else { return Ok(None) };
        let found = self.keys.iter().try_fold(&value, |value, key| match value {
            Value::Array(list) => list.get(key.parse::<usize>().ok()?),
            value => value.get(key),
        });
        Ok(found.cloned())
    }
}

/// One place: `jpg`, `json[key]`, `json[key][0]`.
fn access(text: &str) -> Result<Access, String> {
    let wrong = || "must be a part as `jpg`, or a value in JSON as `json[key][0]`".to_owned();
    let (part, mut rest) = text.trim().split_at(text.trim().find('[').unwrap_or(text.trim().len()));
    let mut keys = Vec::new();
    while !rest.is_empty() {
        let inner = rest.strip_prefix('[').and_then(|rest| rest.split_once(']')).ok_or_else(wrong)?;
        if inner.0.is_empty() || inner.0.contains('[') {
            return Err(wrong());
        }
        keys.push(inner.0.to_owned());
        rest = inner.1;
    }
    let part = part.to_ascii_lowercase();
    if part.is_empty() || part.contains([']', ';', ' ']) {
        return Err(wrong());
    }
    let is_json = part.rsplit('.').next() == Some("json");
    if !keys.is_empty() && !is_json {
        return Err(format!("only JSON has values inside, `{part}` has none"));
    }
    if !is_text(&part) && MediaKind::of_ending(&part).is_none() {
        return Err(format!("`{part}` is of no kind we read: images, videos, sounds, json, txt, cls"));
    }
    Ok(Access { part, keys })
}

/// Sets a field, as records have it.
fn set(fields: &mut Map<String, Value>, field: &str, value: Value) -> Result<(), String> {
    let value = match (field, value) {
        ("answer", Value::Array(mut answers)) if answers.len() == 1 => answers.swap_remove(0),
        ("answer", Value::Array(answers)) => {
            return Err(format!(
                "it has {} answers, of which training draws one: map one, as in `json[answers][0]`",
                answers.len()
            ));
        }
        // A whole record, of which the conversation is one field.
        ("conversations", Value::Object(record)) => {
            for (key, value) in record {
                fields.entry(key).or_insert(value);
            }
            return Ok(());
        }
        (_, value) => value,
    };
    fields.insert(field.to_owned(), value);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn simple_forms_are_taken() {
        let map = FieldMap::parse(
            &json!({"image": "jpg,PNG", "caption": "json[texts][0]", "answer_weights": "npy"}),
        );
        let place = |part: &str, keys: &[&str]| Access {
            part: part.to_owned(),
            keys: keys.iter().map(|&k| k.to_owned()).collect(),
        };
        let fields = vec![
            ("image", "jpg,PNG".to_owned(), vec![place("jpg", &[]), place("png", &[])]),
            ("caption", "json[texts][0]".to_owned(), vec![place("json", &["texts", "0"])]),
        ];
        assert_eq!(map, Ok(FieldMap { fields }));
    }

    #[test]
    fn other_forms_are_refused_by_name() {
        let errors = [
            json!({"image": "jpgs"}),
            json!({"image": "jpg;png"}),
            json!({"image": "jpg[0]"}),
            json!({"caption": "json[a"}),
            json!({"caption": "json[]"}),
            json!({"caption": ["txt"]}),
            json!({"lines": "json[lines]"}),
            json!("jpg"),
        ]
        .map(|map| FieldMap::parse(&map).unwrap_err());
        insta::assert_snapshot!(errors.join("\n"), @r#"
        `field_map.image` is `jpgs`: `jpgs` is of no kind we read: images, videos, sounds, json, txt, cls
        `field_map.image` is `jpg;png`: must be a part as `jpg`, or a value in JSON as `json[key][0]`
        `field_map.image` is `jpg[0]`: only JSON has values inside, `jpg` has none
        `field_map.caption` is `json[a`: must be a part as `jpg`, or a value in JSON as `json[key][0]`
        `field_map.caption` is `json[]`: must be a part as `jpg`, or a value in JSON as `json[key][0]`
        `field_map.caption` is ["txt"], must be text
        `field_map.lines` is no field we read, must be of image, images, imgs, video, videos, audio, audios, caption, text, context, question, answers, answer, conversation, conversations, messages, answer_weights, __key__
        `field_map` must be a mapping of fields to parts of a sample
        "#);
    }
}
