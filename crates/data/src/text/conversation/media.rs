//! Names of media: those of the record, and those of a part.

use super::{MediaSource, field, type_of};
use crate::media::MediaKind;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;

/// The media under a record's own fields, by kind in the order of [`MediaKind::ALL`].
pub(super) fn of_record(record: &Value) -> Result<[Vec<MediaSource>; 3], String> {
    let mut listed = [Vec::new(), Vec::new(), Vec::new()];
    for (kind, list) in MediaKind::ALL.into_iter().zip(&mut listed) {
        let (kind, plural) = (kind.as_str(), kind.plural());
        for key in [kind, plural] {
            match field(record, key) {
                None => {}
                Some(Value::Array(empty)) if empty.is_empty() => {}
                Some(_) if !list.is_empty() => return Err(format!("both `{kind}` and `{key}` are there")),
                Some(Value::Array(all)) => {
                    *list = all.iter().map(|value| named(key, value)).collect::<Result<_, _>>()?;
                }
                Some(value) => *list = vec![named(key, value)?],
            }
        }
    }
    Ok(listed)
}

/// The medium that a part names; `None` where it is the next of the record's.
pub(super) fn of_part(
    place: &str,
    part: &Value,
    part_type: &str,
    kind: &str,
) -> Result<Option<MediaSource>, String> {
    let with_url = format!("{kind}_url");
    let mut found: Option<(&str, MediaSource)> = None;
    let mut seen = Vec::new();
    for key in [part_type, kind, &with_url, "url", "path", "attachment"] {
        if seen.contains(&key) {
            continue;
        }
        seen.push(key);
        let Some(value) = field(part, key) else { continue };
        let source =
            if key == "attachment" { named(place, part) } else { named(&format!("{place}.{key}"), value) }?;
        if let Some((other, _)) = found {
            return Err(format!("`{place}`: both `{other}` and `{key}` are there"));
        }
        found = Some((key, source));
    }
    Ok(found.map(|(_, source)| source))
}

/// `PATH_MAX` of Linux without the zero at its end.
const PATH_BYTES_MAX: usize = 4095;

/// A path or URL, an object of one, or what came with the record.
pub(super) fn named(key: &str, value: &Value) -> Result<MediaSource, String> {
    match value {
        Value::String(text) if text.is_empty() => Err(format!("`{key}`: a path is empty")),
        Value::String(text) if text.starts_with("data:") => {
            let (_, packed) = text
                .split_once(";base64,")
                .ok_or_else(|| format!("`{key}`: a `data:` URL without `;base64,`, must have it"))?;
            inline(key, packed)
        }
        Value::String(text) if text.len() > PATH_BYTES_MAX && !text.contains("://") => Err(format!(
            "`{key}`: a text of {} bytes is no path, which has at most {PATH_BYTES_MAX}; base64 needs \
             `data:image/jpeg;base64,` (or another type) before it",
            text.len()
        )),
        Value::String(text) => Ok(MediaSource::Name(text.clone())),
        Value::Object(_) => match field(value, "attachment") {
            Some(index) => index
                .as_u64()
                .and_then(|index| usize::try_from(index).ok())
                .map(MediaSource::Attachment)
                .ok_or_else(|| format!("`{key}.attachment`: {}, must be a number", type_of(index))),
            None => match ["path", "url"].into_iter().find_map(|name| Some((name, field(value, name)?))) {
                Some((name, inner @ Value::String(_))) => named(&format!("{key}.{name}"), inner),
                Some((name, inner)) => Err(format!("`{key}.{name}`: {}, must be text", type_of(inner))),
                None => match (field(value, "data"), field(value, "bytes")) {
                    (Some(Value::String(packed)), _) => inline(&format!("{key}.data"), packed),
                    (None, None) => Err(nameless(key, value)),
                    _ => Err(format!("`{key}`: bytes in text, must be a path, a URL or `data` in base64")),
                },
            },
        },
        Value::Array(_) if key.rsplit('.').next().is_some_and(|name| name.starts_with("video")) => {
            Err(format!(
                "`{key}`: a list in place of a video, must be a path or a list of paths; frames as files of their own are not \
             read, make one video of them"
            ))
        }
        _ => Err(format!("`{key}`: {}, must be a path or a list of paths", type_of(value))),
    }
}

/// Why an object names no medium.
fn nameless(key: &str, value: &Value) -> String {
    let has = |name| field(value, name).is_some();
    if has("array") && has("sampling_rate") {
        return format!(
            "`{key}`: decoded sound (`array` and `sampling_rate`) is not read: store the file, for example by \
             `cast_column(\"{key}\", Audio(decode=False))` before the dataset is written"
        );
    }
    format!("`{key}`: an object without `path`, `url`, `bytes` or `data`")
}

/// A medium whose bytes the record holds in base64.
fn inline(key: &str, packed: &str) -> Result<MediaSource, String> {
    match STANDARD.decode(packed.trim_ascii()) {
        Ok(bytes) => Ok(MediaSource::Inline { bytes: bytes.into(), field: key.to_owned() }),
        Err(cause) => Err(format!("`{key}`: it is not base64: {cause}")),
    }
}
