//! The processors of a model directory in one object, each part under its own name, as transformers finds them in the files.
//!
//! `processor_config.json` has the fields of the processor itself. Newer ones also hold its parts (image processor, video
//! processor, feature extractor), each under its name; such a part goes before the file of its own that older models have, which
//! stays in a directory where a processor is saved again.

use super::fields::{EXTRACTOR, PREPROCESSOR, PROCESSOR, VIDEO_PREPROCESSOR};
use crate::DataError;
use serde_json::{Map, Value};

/// Names of the parts. Of an older file the fields of two of them stand side by side.
const OF_FILE: [&str; 2] = ["image_processor", "feature_extractor"];
const VIDEO: &str = "video_processor";
/// The field in which files of old parts say whose part they are.
const CLASS: &str = "processor_class";

/// The names of the files that hold the parts of a processor, for errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartNames {
    /// Of the image processor.
    pub image: &'static str,
    /// Of the feature extractor.
    pub extractor: &'static str,
    /// Of the video processor.
    pub video: &'static str,
    /// Of the processor itself.
    pub whole: &'static str,
}

impl Default for PartNames {
    /// Each part in the older file of its own.
    fn default() -> Self {
        let [image, extractor] = [PREPROCESSOR; 2];
        Self { image, extractor, video: VIDEO_PREPROCESSOR, whole: PROCESSOR }
    }
}

impl PartNames {
    /// The file that rules call `file`.
    pub(super) fn of(&self, file: &'static str) -> &'static str {
        match file {
            PREPROCESSOR => self.image,
            EXTRACTOR => self.extractor,
            VIDEO_PREPROCESSOR => self.video,
            PROCESSOR => self.whole,
            other => other,
        }
    }

    /// The error of a rule, with the file that holds the field.
    pub(super) fn in_own_file(&self, error: DataError) -> DataError {
        match error {
            DataError::Config { file, field, value, rule } => {
                DataError::Config { file: self.of(file), field, value, rule }
            }
            other => other,
        }
    }

    /// Those of a directory with these files; of a field that stands nowhere the file that transformers would look in first.
    pub(super) fn of_files(own: &Value, video: &Value, processor: &Value) -> Self {
        let holds = |file: &Value, part: &str| file.get(part).is_some_and(|found| !found.is_null());
        let is_told = !is_empty(own);
        // Without a file of its own a part stands in the newer file, or nowhere.
        let newer = |part: &str| if is_told && !holds(processor, part) { PREPROCESSOR } else { PROCESSOR };
        let [image, extractor] = if is_whole(processor) { OF_FILE.map(newer) } else { [PREPROCESSOR; 2] };
        let video = match video {
            _ if holds(processor, VIDEO) => PROCESSOR,
            _ if !is_whole(processor) && holds(own, VIDEO) => PREPROCESSOR,
            none if is_empty(none) && is_told => PREPROCESSOR,
            none if is_empty(none) => image,
            _ => VIDEO_PREPROCESSOR,
        };
        let nests = !is_whole(processor) && OF_FILE.iter().any(|part| holds(own, part));
        Self { image, extractor, video, whole: if nests { PREPROCESSOR } else { PROCESSOR } }
    }
}

/// The image processor's and the video processor's file, from those of a directory: `own` is `preprocessor_config.json`, `video`
/// `video_preprocessor_config.json` and `processor` `processor_config.json`, each an empty object where it is not there.
pub(super) fn of_files(own: Value, video: Value, processor: &Value) -> (Value, Value) {
    let Some(fields) = processor.as_object().filter(|_| is_whole(processor)) else { return (own, video) };
    // A part that is null is in a file of its own.
    let is_null_part =
        |name: &str, value: &Value| value.is_null() && (OF_FILE.contains(&name) || name == VIDEO);
    let mut whole: Map<String, Value> = fields.clone();
    whole.retain(|name, value| !is_null_part(name, value));
    // Without a video processor in any file, transformers takes the older file, whatever the newer one has for images.
    let video = if is_empty(&video) && !whole.contains_key(VIDEO) { own.clone() } else { video };
    if is_empty(&own) {
        return (Value::Object(whole), video);
    }
    if let (None, Some(class)) = (whole.get(CLASS), own.get(CLASS)) {
        whole.insert(CLASS.to_owned(), class.clone());
    }
    for part in OF_FILE {
        whole.entry(part).or_insert_with(|| own.get(part).unwrap_or(&own).clone());
    }
    (Value::Object(whole), video)
}

/// A `processor_config.json` with the feature extractor under its older name, which goes before the newer one (`audio_processor`).
pub(super) fn with_old_name(mut processor: Value) -> Value {
    if let Some(fields) = processor.as_object_mut()
        && !fields.contains_key(OF_FILE[1])
        && let Some(extractor) = fields.get("audio_processor").cloned()
    {
        fields.insert(OF_FILE[1].to_owned(), extractor);
    }
    processor
}

/// Whether a `processor_config.json` holds parts, and not only what belongs to the processor itself.
pub(super) fn holds_parts(processor: &Value) -> bool {
    OF_FILE.iter().chain([&VIDEO]).any(|part| processor.get(part).is_some_and(|found| !found.is_null()))
}

/// Whether a `processor_config.json` says anything of the processor; a chat template alone does not.
fn is_whole(processor: &Value) -> bool {
    processor.as_object().is_some_and(|fields| fields.keys().any(|name| name != "chat_template"))
}

fn is_empty(file: &Value) -> bool {
    file.as_object().is_none_or(Map::is_empty)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_feature_extractor_has_two_names() {
        let new = json!({"audio_processor": {"feature_size": 80}});
        assert_eq!(with_old_name(new)["feature_extractor"], json!({"feature_size": 80}));
        // As in transformers, where the older name is there it counts, null included.
        let both = json!({"audio_processor": {"feature_size": 80}, "feature_extractor": null});
        assert_eq!(with_old_name(both.clone()), both);
    }

    /// Files of image processor, feature extractor, video processor and processor.
    #[test]
    fn names_are_those_of_the_files_that_hold_the_parts() {
        const OLD: &str = PREPROCESSOR;
        const VIDEOS: &str = VIDEO_PREPROCESSOR;
        const NEW: &str = PROCESSOR;
        let (none, old, image) = (json!({}), json!({"size": 1}), json!({"image_processor": {"size": 2}}));
        let (sound, video) = (json!({"feature_extractor": {}}), json!({"video_processor": {}}));
        let own = json!({"patch_size": 14});
        for (files, expected) in [
            ([&old, &none, &none], [OLD, OLD, OLD, NEW]),
            ([&old, &old, &none], [OLD, OLD, VIDEOS, NEW]),
            ([&image, &none, &none], [OLD, OLD, OLD, OLD]),
            ([&none, &none, &image], [NEW, NEW, NEW, NEW]),
            ([&old, &none, &image], [NEW, OLD, OLD, NEW]),
            ([&old, &old, &image], [NEW, OLD, VIDEOS, NEW]),
            ([&old, &none, &sound], [OLD, NEW, OLD, NEW]),
            ([&old, &old, &video], [OLD, OLD, NEW, NEW]),
            ([&old, &old, &own], [OLD, OLD, VIDEOS, NEW]),
        ] {
            let found = PartNames::of_files(files[0], files[1], files[2]);
            assert_eq!([found.image, found.extractor, found.video, found.whole], expected, "{files:?}");
        }
    }

    #[test]
    fn a_part_in_the_processors_file_goes_before_a_file_of_its_own() {
        let none = || json!({});
        let old = || json!({"size": 1, "processor_class": "Old"});
        // One file alone is that file.
        assert_eq!(of_files(old(), none(), &none()), (old(), none()));
        let new = json!({"image_processor": {"size": 2}, "patch_size": 14});
        assert_eq!(of_files(none(), none(), &new), (new.clone(), none()));
        // A processor that was saved again: its own parts count. What it does not hold is in the older files.
        let (found, video) = of_files(old(), none(), &new);
        assert_eq!((&found["image_processor"], &found["patch_size"]), (&json!({"size": 2}), &json!(14)));
        assert_eq!((&found["feature_extractor"], &found["processor_class"]), (&old(), &json!("Old")));
        assert_eq!(video, old());
        let with_videos = json!({"image_processor": {"size": 2}, "video_processor": {"size": 3}});
        assert_eq!(of_files(old(), none(), &with_videos).1, none());
        // An older processor has its fields in a file of its own, beside that of its part.
        let (found, video) = of_files(old(), json!({"fps": 2}), &json!({"patch_size": 14}));
        assert_eq!((&found["image_processor"], &found["patch_size"]), (&old(), &json!(14)));
        assert_eq!(video, json!({"fps": 2}));
        // A template that stands beside a tokenizer changes nothing, and a part that is null is not there.
        let template = json!({"chat_template": "{{ messages }}"});
        assert_eq!(of_files(old(), none(), &template), (old(), none()));
        let null = json!({"image_processor": null, "video_processor": null, "patch_size": 14});
        let (found, video) = of_files(old(), none(), &null);
        assert_eq!((&found["image_processor"], video), (&old(), old()));
        assert!(!holds_parts(&null));
        assert!(holds_parts(&new) && !holds_parts(&json!({"patch_size": 14})));
    }
}
