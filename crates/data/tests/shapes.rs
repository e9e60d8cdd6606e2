//! The shape rules against what transformers returned, row by row (`fixtures/shapes`).

#![allow(clippy::unwrap_used)]

use dflop_data::family::LlavaOnevision;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/shapes")
}

fn rule(setting: &str) -> LlavaOnevision {
    let text = std::fs::read_to_string(fixtures().join(format!("{setting}.json"))).unwrap();
    let files: serde_json::Value = serde_json::from_str(&text).unwrap();
    LlavaOnevision::from_config(&files["config"], &files["preprocessor"]).unwrap()
}

/// Every row of the table: tiles, encoder tokens and LLM tokens, integer for integer.
#[test]
fn llava_onevision_equals_transformers() {
    let table = std::fs::read_to_string(fixtures().join("llava_onevision.csv")).unwrap();
    let mut rules = BTreeMap::new();
    let mut rows: BTreeMap<String, u32> = BTreeMap::new();
    for line in table.lines().skip(1) {
        let cells: Vec<&str> = line.split(',').collect();
        let [setting, kind, numbers @ ..] = cells.as_slice() else { panic!("{line}") };
        let numbers: Vec<u32> = numbers.iter().map(|cell| cell.parse().unwrap()).collect();
        let [height, width, num_frames, num_tiles, encoder_tokens, feature_tokens] = numbers[..] else {
            panic!("{line}")
        };
        let rule = rules.entry((*setting).to_owned()).or_insert_with(|| rule(setting));
        let shape = match *kind {
            "image" => rule.image(height, width),
            "multi_image" => rule.image_among_several(height, width),
            "video" => rule.video(num_frames),
            _ => panic!("{line}"),
        }
        .unwrap();
        assert_eq!(
            (shape.num_tiles, shape.segments.count * shape.segments.tokens, shape.feature_tokens),
            (num_tiles, encoder_tokens, feature_tokens),
            "{line}"
        );
        assert_eq!(shape.segments.count, num_tiles, "{line}");
        *rows.entry((*kind).to_owned()).or_default() += 1;
    }
    assert!(rows["image"] > 4_000 && rows["multi_image"] >= 9 && rows["video"] >= 9, "{rows:?}");
}
