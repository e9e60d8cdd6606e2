//! The fields of a model's configuration files, with errors that name file, field, value and rule.

use crate::DataError;
use serde_json::Value;

/// Name of the model's own file in errors.
pub(super) const CONFIG: &str = "config.json";
/// Name of the image processor's file in errors. The fields may stand in another file; then the error names that one, by
/// [`PartNames`](super::PartNames). So it is with the next three names.
pub(super) const PREPROCESSOR: &str = "preprocessor_config.json";
/// Name of the video processor's file in errors.
pub(super) const VIDEO_PREPROCESSOR: &str = "video_preprocessor_config.json";
/// Name of the feature extractor's file in errors. It is not the image processor's: each may stand in a file of its own.
pub(super) const EXTRACTOR: &str = "the feature extractor's file";
/// The file in which newer processors keep all their fields.
pub(super) const PROCESSOR: &str = "processor_config.json";
/// The largest side we take, in pixels: every count then fits in 32 bits.
pub(super) const SIDE_MAX: u32 = 1 << 15;

/// A JSON object of the model directory; fields are named by dotted paths, and null is as good as missing but for
/// [flags](Fields::flag).
pub(super) struct Fields<'a> {
    pub(super) file: &'static str,
    pub(super) object: &'a Value,
}

/// The fields of the image processor: `preprocessor` itself, or those nested in a processor's own file.
pub(super) fn image_fields(preprocessor: &Value) -> Fields<'_> {
    Fields { file: PREPROCESSOR, object: preprocessor.get("image_processor").unwrap_or(preprocessor) }
}

/// The fields of the processor; `None` if `preprocessor` is the file of the image processor alone. In the processor's own
/// file the image processor's fields stand under `image_processor`.
pub(super) fn processor_fields(preprocessor: &Value) -> Option<Fields<'_>> {
    preprocessor.get("image_processor").map(|_| Fields { file: PROCESSOR, object: preprocessor })
}

impl Fields<'_> {
    pub(super) fn get(&self, field: &str) -> Option<&Value> {
        self.written(field).filter(|value| !value.is_null())
    }

    /// The value in the file, which may be null.
    fn written(&self, field: &str) -> Option<&Value> {
        field.split('.').try_fold(self.object, |value, key| value.get(key))
    }

    /// Whether the file says null, which is not as good as missing where a processor takes it for a value.
    pub(super) fn is_null(&self, field: &str) -> bool {
        self.written(field).is_some_and(Value::is_null)
    }

    pub(super) fn error(&self, field: &str, rule: String) -> DataError {
        let value = self.written(field).map_or_else(|| "missing".to_owned(), brief);
        DataError::Config { file: self.file, field: field.to_owned(), value, rule }
    }

    pub(super) fn must_be(&self, field: &str, known: &[&str], may_be_missing: bool) -> Result<(), DataError> {
        match self.get(field) {
            None if may_be_missing => Ok(()),
            Some(value) if known.iter().any(|known| value == known) => Ok(()),
            _ => Err(self.error(field, format!("must be \"{}\"", known.join("\" or \"")))),
        }
    }

    pub(super) fn side(&self, field: &str) -> Result<Option<u32>, DataError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        side(value)
            .map(Some)
            .ok_or_else(|| self.error(field, format!("must be a whole number from 1 to {SIDE_MAX}")))
    }

    /// A whole number from 1 to `most`.
    pub(super) fn whole(&self, field: &str, most: u64) -> Result<Option<u64>, DataError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let number = value.as_u64().filter(|number| (1..=most).contains(number));
        number.map(Some).ok_or_else(|| self.error(field, format!("must be a whole number from 1 to {most}")))
    }

    /// Whether a processor does a thing; `None` where the file does not say. Null is no: transformers takes it in the place of
    /// what the class does.
    pub(super) fn flag(&self, field: &str) -> Result<Option<bool>, DataError> {
        match self.written(field) {
            None => Ok(None),
            Some(Value::Null) => Ok(Some(false)),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(_) => Err(self.error(field, "must be true or false".to_owned())),
        }
    }
}

pub(super) fn side(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|side| u32::try_from(side).ok()).filter(|side| (1..=SIDE_MAX).contains(side))
}

/// A value as JSON, cut where it grows long.
fn brief(value: &Value) -> String {
    let text = value.to_string();
    if text.chars().count() <= 60 {
        text
    } else {
        format!("{}...", text.chars().take(57).collect::<String>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn null_is_no_where_a_processor_is_asked_whether_it_does_a_thing() {
        let object = json!({"yes": true, "no": false, "null": null, "one": 1});
        let fields = Fields { file: PREPROCESSOR, object: &object };
        let found = ["yes", "no", "null", "absent"].map(|field| fields.flag(field).unwrap());
        assert_eq!(found, [Some(true), Some(false), Some(false), None]);
        assert!(fields.flag("one").is_err());
        assert_eq!((fields.get("null"), fields.side("null").unwrap()), (None, None));
        let error = fields.error("null", "must be true".to_owned()).to_string();
        assert_eq!(error, "`preprocessor_config.json`: `null` is null, must be true");
    }
}
