//! The shape rules against what transformers returned, row by row (`fixtures/shapes`).

#![allow(clippy::unwrap_used)]

use dflop_data::DataError;
use dflop_data::family::{
    self, Clip, Family, FamilyFiles, LlavaOnevision, MediaShape, Piece, Size, Sound, VideoSampling,
};
use dflop_types::SampleShape;
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

/// Its parts have all its segments and features, and nothing else.
fn parts_are_sound(shape: &MediaShape, line: &str) {
    let sample = SampleShape {
        encoder_segments: shape.segments.clone(),
        encoder_parts: shape.encoder_parts(),
        feature_tokens: shape.feature_tokens(),
        llm_tokens: shape.feature_tokens(),
        label_tokens: 0,
    };
    assert_eq!(sample.check(), Ok(()), "{line}");
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

/// A frame of a video is a part of its pooled features; the newline after the last frame is the last part's.
#[test]
fn llava_onevision_cuts_videos_by_frames_and_never_an_image() {
    let rule = rule("real");
    let clip =
        |num_frames| Clip { size: Size { height: 90, width: 160 }, num_frames, fps: None, duration_s: None };
    for (num_frames, expected) in [
        // 27 x 27 features pooled by 2 are 14 x 14.
        (9, vec![(8, 1, 196), (1, 1, 197)]),
        (1, vec![(1, 1, 197)]),
    ] {
        let shape = Family::video(&rule, &clip(num_frames), VideoSampling::default()).unwrap();
        let parts = shape.encoder_parts();
        let found: Vec<_> = parts.iter().map(|p| (p.count, p.segments, p.feature_tokens)).collect();
        assert_eq!(found, expected);
        parts_are_sound(&shape, "a video");
    }
    let size = Size { height: 480, width: 640 };
    for (num_images, segments) in [(1, 5), (3, 1)] {
        let shape = Family::image(&rule, size, num_images).unwrap();
        let parts = shape.encoder_parts();
        assert_eq!((parts.len(), parts[0].count, parts[0].segments), (1, 1, segments));
        parts_are_sound(&shape, "an image");
    }
}

/// The rules of a family's settings, as its files have them.
fn rules(family: &str) -> BTreeMap<String, Box<dyn Family>> {
    let text = std::fs::read_to_string(fixtures().join(format!("{family}_settings.json"))).unwrap();
    let settings: BTreeMap<String, BTreeMap<String, serde_json::Value>> =
        serde_json::from_str(&text).unwrap();
    let made = settings.into_iter().map(|(setting, mut files)| {
        let mut file = |name: &str| files.remove(name).unwrap_or_else(|| serde_json::json!({}));
        let files = FamilyFiles {
            config: file("config"),
            preprocessor: file("preprocessor"),
            video_preprocessor: file("video_preprocessor"),
            ..FamilyFiles::default()
        };
        (setting, family::open(&files).unwrap().unwrap())
    });
    made.collect()
}

/// Every row of a family's table: tiles, encoder tokens, LLM tokens and frames; the number of rows of each kind.
fn rows_equal_transformers(family: &str) -> BTreeMap<String, u32> {
    let table = std::fs::read_to_string(fixtures().join(format!("{family}.csv"))).unwrap();
    let rules = rules(family);
    let mut rows = BTreeMap::new();
    for line in table.lines().skip(1) {
        let cells: Vec<&str> = line.split(',').collect();
        let [setting, kind, height, width, num_frames, fps, max_frames, tiles, encoder, features, frames] =
            cells[..]
        else {
            panic!("{line}")
        };
        let number = |cell: &str| cell.parse::<u32>().unwrap();
        let size = Size { height: number(height), width: number(width) };
        let shape = match kind {
            "image" => rules[setting].image(size, 1),
            "video" => {
                let num_frames = u64::from(number(num_frames));
                let clip = Clip { size, num_frames, fps: fps.parse().ok(), duration_s: None };
                let sampling = VideoSampling { max_frames: max_frames.parse().ok(), fps: None };
                rules[setting].video(&clip, sampling)
            }
            _ => panic!("{line}"),
        }
        .unwrap();
        let indices: Vec<u32> = frames.split_whitespace().map(number).collect();
        assert_eq!(
            (shape.num_tiles, shape.encoder_tokens(), shape.feature_tokens()),
            (number(tiles), u64::from(number(encoder)), number(features)),
            "{line}"
        );
        assert_eq!(shape.frame_indices, indices, "{line}");
        parts_are_sound(&shape, line);
        // InternVL's tiles never meet; LLaVA-NeXT joins those of an image.
        let num_parts = if family == "internvl" { shape.num_tiles } else { 1 };
        assert_eq!(shape.encoder_parts().iter().map(|p| p.count).sum::<u32>(), num_parts, "{line}");
        *rows.entry(kind.to_owned()).or_default() += 1;
    }
    rows
}

#[test]
fn llava_next_equals_transformers() {
    let rows = rows_equal_transformers("llava_next");
    assert!(rows["image"] > 400, "{rows:?}");
}

#[test]
fn internvl_equals_transformers() {
    let rows = rows_equal_transformers("internvl");
    assert!(rows["image"] > 400 && rows["video"] == 60, "{rows:?}");
}

fn named_rule(settings: &str, setting: &str) -> Box<dyn Family> {
    let text = std::fs::read_to_string(fixtures().join(settings)).unwrap();
    let mut settings: serde_json::Value = serde_json::from_str(&text).unwrap();
    let mut file = |name: &str| settings[setting][name].take();
    let files = FamilyFiles {
        config: file("config"),
        preprocessor: file("preprocessor"),
        video_preprocessor: file("video_preprocessor"),
        ..FamilyFiles::default()
    };
    family::open(&files).unwrap().unwrap()
}

/// The last time that the processor writes: Qwen3-VL before a frame pair, GLM behind it.
fn last_stamp(shape: &MediaShape) -> String {
    if let Some(Piece::Text(text)) = shape.pieces.last()
        && let Some(stamp) = text.strip_prefix("<|end_of_image|>")
    {
        return stamp.to_owned();
    }
    let stamps = shape.pieces.iter().rev().filter_map(|piece| match piece {
        Piece::Text(text) => text.strip_suffix("<|vision_start|>"),
        Piece::Features(_) => None,
    });
    stamps.take(1).map(|text| text.trim_start_matches("<|vision_end|>")).collect()
}

/// Every row of the table: groups of frames, encoder tokens, LLM tokens, frames and time stamps; what transformers
/// refuses is refused.
fn patches_equal_transformers(table: &str, settings: &str, least: u32) {
    let table = std::fs::read_to_string(fixtures().join(table)).unwrap();
    let (mut rules, mut rows) = (BTreeMap::new(), BTreeMap::<(String, bool), u32>::new());
    for line in table.lines().skip(1) {
        let cells: Vec<&str> = line.split(',').collect();
        let [setting, kind, height, width, num_frames, fps, expected @ .., stamp] = cells.as_slice() else {
            panic!("{line}")
        };
        let rule = rules.entry((*setting).to_owned()).or_insert_with(|| named_rule(settings, setting));
        let size = Size { height: height.parse().unwrap(), width: width.parse().unwrap() };
        let shape = match *kind {
            "image" => rule.image(size, 1),
            "video" => rule.video(
                &Clip {
                    size,
                    num_frames: num_frames.parse().unwrap(),
                    fps: Some(fps.parse().unwrap()),
                    duration_s: None,
                },
                VideoSampling::default(),
            ),
            _ => panic!("{line}"),
        };
        let is_refused = expected[0] == "0";
        *rows.entry(((*kind).to_owned(), is_refused)).or_default() += 1;
        if is_refused {
            assert!(matches!(shape, Err(DataError::Shape { .. })), "{line}");
            continue;
        }
        let shape = shape.unwrap();
        let found = [
            u64::from(shape.num_tiles),
            shape.encoder_tokens(),
            u64::from(shape.feature_tokens()),
            shape.frame_indices.len() as u64,
            u64::from(shape.frame_indices.last().copied().unwrap_or(0)),
        ];
        assert_eq!(found.map(|number| number.to_string()), expected, "{line}");
        assert_eq!(shape.segments.iter().map(|s| s.count).sum::<u32>(), shape.num_tiles, "{line}");
        assert_eq!(last_stamp(&shape), *stamp, "{line}");
        parts_are_sound(&shape, line);
        // Each group of frames is a part; where the processor writes time stamps, a run of features of its own.
        assert_eq!(shape.encoder_parts().iter().map(|p| p.count).sum::<u32>(), shape.num_tiles, "{line}");
        let runs = shape.pieces.iter().filter_map(|piece| match piece {
            Piece::Features(count) => Some(*count),
            Piece::Text(_) => None,
        });
        let runs: Vec<u32> = runs.collect();
        if runs.len() > 1 {
            let parts = shape.encoder_parts();
            let of_parts = parts.iter().flat_map(|p| std::iter::repeat_n(p.feature_tokens, p.count as usize));
            assert_eq!(of_parts.collect::<Vec<_>>(), runs, "{line}");
        }
    }
    assert!(rows.len() == 4 && rows.values().all(|&count| count > least), "{rows:?}");
}

#[test]
fn qwen_vl_equals_transformers() {
    patches_equal_transformers("qwen_vl.csv", "qwen.json", 100);
}

#[test]
fn glm_equals_transformers() {
    patches_equal_transformers("glm.csv", "glm.json", 50);
}

/// Every row of the table, at the extractor's own rate.
#[test]
fn qwen2_audio_equals_transformers() {
    let table = std::fs::read_to_string(fixtures().join("qwen2_audio.csv")).unwrap();
    let rule = named_rule("qwen.json", "qwen2_audio");
    for line in table.lines().skip(1) {
        let numbers: Vec<u32> = line.split(',').map(|cell| cell.parse().unwrap()).collect();
        let duration_s = f64::from(numbers[0]) / 16_000.0;
        let shape = rule.audio(&Sound { duration_s, sample_rate: 16_000 }).unwrap();
        assert_eq!([shape.encoder_tokens() as u32, shape.feature_tokens()], numbers[1..], "{line}");
        parts_are_sound(&shape, line);
    }
    assert!(table.lines().count() > 250);
}

/// Every row of the table, at the extractor's own rate; a row of zeros is refused.
#[test]
fn audioflamingo3_equals_transformers() {
    let table = std::fs::read_to_string(fixtures().join("audioflamingo3.csv")).unwrap();
    let rules = rules("audioflamingo3");
    let (mut refused, mut joined) = (0, 0);
    for line in table.lines().skip(1) {
        let cells: Vec<&str> = line.split(',').collect();
        let [setting, numbers @ ..] = cells.as_slice() else { panic!("{line}") };
        let numbers: Vec<u32> = numbers.iter().map(|cell| cell.parse().unwrap()).collect();
        let sound = Sound { duration_s: f64::from(numbers[0]) / 16_000.0, sample_rate: 16_000 };
        let Ok(shape) = rules[*setting].audio(&sound) else {
            assert_eq!(numbers[1..], [0; 4], "{line}");
            refused += 1;
            continue;
        };
        let last = shape.parts.last().unwrap();
        let found = [shape.num_tiles, shape.feature_tokens(), last.segments, last.feature_tokens];
        assert_eq!(found, numbers[1..], "{line}");
        parts_are_sound(&shape, line);
        joined += u32::from(last.segments == 2);
    }
    assert!(table.lines().count() > 900 && refused > 40 && joined > 100, "{refused} {joined}");
}
