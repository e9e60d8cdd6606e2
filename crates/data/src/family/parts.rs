//! The processors of a model directory in one object, each part under its own name, as transformers finds them in the files.
//!
//! `processor_config.json` has the fields of the processor itself. Newer ones also hold its parts (image processor, video
//! processor, feature extractor), each under its name; such a part goes before the file of its own that older models have, which
//! stays in a directory where a processor is saved again.

use serde_json::{Map, Value};

/// Names of the parts. Of an older file the fields of two of them stand side by side.
const OF_FILE: [&str; 2] = ["image_processor", "feature_extractor"];
const VIDEO: &str = "video_processor";
/// The field in which files of old parts say whose part they are.
const CLASS: &str = "processor_class";

/// The image processor's and the video processor's file, from those of a directory: `own` is `preprocessor_config.json`, `video`
/// `video_preprocessor_config.json` and `processor` `processor_config.json`, each an empty object where it is not there.
pub(super) fn of_files(own: Value, video: Value, processor: &Value) -> (Value, Value) {
    // A chat template alone is no processor.
    let Some(fields) =
        processor.as_object().filter(|fields| fields.keys().any(|name| name != "chat_template"))
    else {
        return (own, video);
    };
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

/// Whether a `processor_config.json` holds parts, and not only what belongs to the processor itself.
pub(super) fn holds_parts(processor: &Value) -> bool {
    OF_FILE.iter().chain([&VIDEO]).any(|part| processor.get(part).is_some_and(|found| !found.is_null()))
}

fn is_empty(file: &Value) -> bool {
    file.as_object().is_none_or(Map::is_empty)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

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
