//! What the targets check: no panic, and an answer that keeps the rules of its kind.

use dflop_data::conversation::Conversation;
use dflop_data::family::{self, Clip, FamilyFiles, Size, Sound, VideoSampling};
use dflop_data::location::Location;
use dflop_data::mixture::Source;
use dflop_data::probe::{DURATION_MAX_S, FRAMES_MAX, MediaKind, probe_bytes};
use dflop_data::store::Stores;
use dflop_data::tokens::ChatTokenizer;
use dflop_data::{DataError, readers, table};
use dflop_types::artifact::{self, Artifact};
use dflop_types::{ModelProfile, Plan};
use serde::Serialize;
use serde::de::DeserializeOwned;
use sha2::{Digest as _, Sha256};
use std::fmt::Debug;
use std::path::Path;

/// A target: its name, and what it does with an input.
pub type Target = (&'static str, fn(&[u8]));

/// Every target.
pub const TARGETS: [Target; 30] = [
    ("probe_adts", |bytes| probe(b"\xff\xf1\x50\x80", bytes)),
    ("probe_aiff", |bytes| probe(b"FORM\0\0\0\0AIFF", bytes)),
    ("probe_any_media", |bytes| probe(b"", bytes)),
    ("probe_avi", |bytes| probe(b"RIFF\0\0\0\0AVI ", bytes)),
    ("probe_bmp", |bytes| probe(b"BM\0\0\0\0\0\0\0\0\0\0\0\0\x28\0", bytes)),
    ("probe_flac", |bytes| probe(b"fLaC", bytes)),
    ("probe_gif", |bytes| probe(b"GIF89a", bytes)),
    ("probe_heif", |bytes| probe(b"\0\0\0\x10ftypavif", bytes)),
    ("probe_jpeg", |bytes| probe(b"\xff\xd8\xff", bytes)),
    ("probe_matroska", |bytes| probe(b"\x1a\x45\xdf\xa3", bytes)),
    ("probe_mp3", |bytes| probe(b"ID3\x04", bytes)),
    ("probe_mp4", |bytes| probe(b"\0\0\0\x10ftypisom", bytes)),
    ("probe_ogg", |bytes| probe(b"OggS", bytes)),
    ("probe_png", |bytes| probe(b"\x89PNG\r\n\x1a\n", bytes)),
    ("probe_tiff", |bytes| probe(b"II*\0", bytes)),
    ("probe_wav", |bytes| probe(b"RIFF\0\0\0\0WAVE", bytes)),
    ("probe_webp", |bytes| probe(b"RIFF\0\0\0\0WEBP", bytes)),
    ("records_arrow", |bytes| records("r.arrow", bytes)),
    ("records_json", |bytes| records("r.json", bytes)),
    ("records_jsonl", |bytes| records("r.jsonl", bytes)),
    ("records_parquet", |bytes| records("r.parquet", bytes)),
    ("records_tar", |bytes| records("r.tar", bytes)),
    ("conversation", conversation),
    ("family", family),
    ("mixture", mixture),
    ("model_profile", model_profile),
    ("plan", plan),
    ("profile", profile),
    ("template", template),
    ("tokenizer", tokenizer),
];

/// Runs the target of this name.
pub fn check(target: &str, bytes: &[u8]) {
    let (_, run) = TARGETS.iter().find(|(name, _)| *name == target).expect("it is a target");
    run(bytes);
}

/// Reads `start` and then `noise` as a media file; `start` leads to the reader under test.
pub fn probe(start: &[u8], noise: &[u8]) {
    let bytes = if noise.starts_with(start) { noise.to_vec() } else { [start, noise].concat() };
    match probe_bytes(Path::new("file"), &bytes) {
        Ok(found) => {
            assert_eq!(found.bytes, bytes.len() as u64);
            assert_eq!(found.width.is_some(), found.kind != MediaKind::Audio, "{found:?}");
            assert!(found.width != Some(0) && found.height != Some(0), "{found:?}");
            assert!(found.frames != Some(0), "{found:?}");
            assert!(found.duration_s.is_none_or(|s| s.is_finite() && s > 0.0), "{found:?}");
            assert!(found.fps.is_none_or(|fps| fps.is_finite() && fps > 0.0), "{found:?}");
            // What is summed over the samples of a dataset fits in the sum.
            assert!(found.duration_s.is_none_or(|s| s <= DURATION_MAX_S), "{found:?}");
            assert!(found.frames.is_none_or(|frames| frames <= FRAMES_MAX), "{found:?}");
        }
        Err(DataError::Media { .. } | DataError::UnknownFormat { .. }) => {}
        Err(other) => panic!("bytes in memory give no other error: {other}"),
    }
}

thread_local! {
    /// One file a thread, in memory where the system has a place for that.
    static FILE_DIR: tempfile::TempDir = {
        let memory = Path::new("/dev/shm");
        let dir = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
        dir.expect("a fuzzer may write")
    };
}

/// Runs `read` on a file of this name that holds `bytes`.
fn with_file(name: &str, bytes: &[u8], read: impl FnOnce(&Path)) {
    FILE_DIR.with(|dir| {
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).expect("a fuzzer may write");
        read(&path);
    });
}

/// Reads `bytes` as a source of records: each parses or says why not, and is found again at its place.
pub fn records(name: &str, bytes: &[u8]) {
    with_file(name, bytes, |path| {
        let stores = Stores::default();
        let source = Source::new(Location::Local(path.to_owned()));
        let Ok(reader) = readers::open(&source, &stores) else { return };
        let count = reader.count(&stores);
        let Ok(records) = reader.records(&stores) else { return };
        let mut num_records = 0;
        for record in records.take(1_000) {
            let Ok(record) = record else { return };
            num_records += 1;
            if let Ok(value) = record.parse() {
                let _ = Conversation::parse(&value);
            }
            let again = reader.fetch(&stores, record.place);
            // Single rows of a Parquet file are sought by its page index, which may be damaged alone. Where that leads
            // to another row, training misses the hash in the profile.
            if !name.ends_with(".parquet") {
                let again = again.expect("what was read is read again");
                assert_eq!((again.place, again.hash()), (record.place, record.hash()));
            }
        }
        if num_records < 1_000
            && let Ok(count) = count
        {
            assert_eq!(count, num_records);
        }
    });
}

/// Reads `bytes` as a model profile: one that is taken has numbers that can be added up, and reads back as it is written.
pub fn model_profile(bytes: &[u8]) {
    let Some(profile) = artifact::<ModelProfile>("model_profile.json", bytes) else { return };
    let modules = profile.modules.values().chain(profile.variants.iter().flat_map(|v| v.modules.values()));
    for module in modules {
        for point in module.linear.points.iter().chain(&module.attention.points) {
            assert!(point.forward_ns.max(point.backward_ns) <= 10_u64.pow(13), "{point:?}");
            assert!(point.activation_bytes.max(point.workspace_bytes) <= 1 << 50, "{point:?}");
        }
    }
}

/// Reads `bytes` as a plan: one that is taken has ranks that can be counted, and reads back as it is written.
pub fn plan(bytes: &[u8]) {
    let Some(plan) = artifact::<Plan>("plan.json", bytes) else { return };
    let layout = plan.best.layout;
    assert!((1..=1 << 20).contains(&layout.num_ranks()), "{layout:?}");
}

/// The artifact in `bytes`, if there is one.
fn artifact<A: Artifact + Serialize + DeserializeOwned + PartialEq + Debug>(
    name: &str,
    bytes: &[u8],
) -> Option<A> {
    let found: A = artifact::parse(Path::new(name), std::str::from_utf8(bytes).ok()?).ok()?;
    let again =
        artifact::parse(Path::new(name), &artifact::to_text(&found)).expect("what was read is read again");
    assert_eq!(found, again);
    Some(found)
}

/// Reads `bytes` as a data profile, as it is and under a seal of its own: damage would not get past the old one.
pub fn profile(bytes: &[u8]) {
    let sealed = sealed(bytes);
    for bytes in [Some(bytes), sealed.as_deref()].into_iter().flatten() {
        with_file("data_profile.parquet", bytes, |path| {
            let _ = table::read(path);
        });
    }
}

/// The profile with hashes that fit; nothing where it has no place for them.
fn sealed(bytes: &[u8]) -> Option<Vec<u8>> {
    let hex = |hash: Sha256| -> Vec<u8> {
        let halves = hash.finalize().into_iter().flat_map(|byte| [byte >> 4, byte & 15]);
        halves.map(|half| b"0123456789abcdef"[usize::from(half)]).collect()
    };
    let tail = bytes.len().checked_sub(8)?;
    let footer_bytes = u32::from_le_bytes(bytes[tail..tail + 4].try_into().ok()?);
    let start = tail.checked_sub(footer_bytes as usize)?;
    let at = start + bytes[start..].windows(6).rposition(|window| window == b"pages=")? + 6;
    let own_at = at + 64 + b" footer=".len();
    let mut sealed = bytes.to_vec();
    sealed.get(own_at..own_at + 64)?;
    sealed[at..at + 64].copy_from_slice(&hex(Sha256::new().chain_update(&bytes[..start])));
    let own = Sha256::new().chain_update(&sealed[start..own_at]).chain_update(&sealed[own_at + 64..]);
    sealed[own_at..own_at + 64].copy_from_slice(&hex(own));
    Some(sealed)
}

/// Reads `bytes` as a mixture.
pub fn mixture(bytes: &[u8]) {
    if let Ok(text) = std::str::from_utf8(bytes) {
        let _ = dflop_data::mixture::parse(Path::new("mixture.yaml"), text, None);
    }
}

/// Reads `bytes` as a record: a conversation whose every medium has its place, or why not.
pub fn conversation(bytes: &[u8]) {
    if let Ok(value) = serde_json::from_slice(bytes) {
        let _ = Conversation::parse(&value);
    }
}

/// What the model directories of the targets hold beside the file under test.
const MODEL: [(&str, &str); 3] = [
    ("config.json", r#"{"model_type": "llava_onevision"}"#),
    ("preprocessor_config.json", "{}"),
    ("tokenizer_config.json", r#"{"bos_token": "<s>", "eos_token": "</s>"}"#),
];
/// Of few words, so that templates come fast.
const TOKENIZER: &str = r#"{
    "version": "1.0", "truncation": null, "padding": null,
    "added_tokens": [
        {"id": 1, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true},
        {"id": 2, "content": "</s>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}
    ],
    "normalizer": null, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
    "model": {"type": "WordLevel", "vocab": {"<unk>": 0, "<s>": 1, "</s>": 2, "hi": 3, "the": 4, "cat": 5}, "unk_token": "<unk>"}
}"#;
const TEMPLATE: &str = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}";

/// Opens a model directory with this tokenizer and template, and tokenises conversations with it.
fn tokenize(tokenizer: &[u8], template: &[u8]) {
    const RECORDS: [&str; 3] = [
        r#"{"conversations": []}"#,
        r#"{"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": " the cat\n"}]}"#,
        r#"{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "\u00e9 \u4f60"},
            {"role": "assistant", "content": ""}, {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "a b"}]}"#,
    ];
    with_file("config.json", MODEL[0].1.as_bytes(), |path| {
        let dir = path.parent().expect("it lies in a folder");
        for (name, text) in MODEL {
            std::fs::write(dir.join(name), text).expect("a fuzzer may write");
        }
        std::fs::write(dir.join("tokenizer.json"), tokenizer).expect("a fuzzer may write");
        std::fs::write(dir.join("chat_template.jinja"), template).expect("a fuzzer may write");
        let Ok(tokenizer) = ChatTokenizer::of_model(dir, [None, None, None]) else { return };
        for record in RECORDS {
            let record = serde_json::from_str(record).expect("it is JSON");
            let Ok(conversation) = Conversation::parse(&record) else { continue };
            let Ok(found) = tokenizer.tokenize(&conversation, &[]) else { continue };
            let tokens = found.expand();
            assert_eq!(found.count(), Some((tokens.input_ids.len() as u32, tokens.label_tokens())));
        }
    });
}

/// Reads `bytes` as a chat template: one that ends, or an error.
pub fn template(bytes: &[u8]) {
    tokenize(TOKENIZER.as_bytes(), bytes);
}

/// Reads `bytes` as a tokenizer.
pub fn tokenizer(bytes: &[u8]) {
    tokenize(bytes, TEMPLATE.as_bytes());
}

/// Reads `bytes` as the configuration files of a model, and asks the family for shapes.
pub fn family(bytes: &[u8]) {
    let Ok(serde_json::Value::Array(mut files)) = serde_json::from_slice(bytes) else { return };
    files.resize(4, serde_json::Value::Null);
    let [config, preprocessor, video_preprocessor, processor] =
        <[serde_json::Value; 4]>::try_from(files).expect("it was cut to four");
    let files = FamilyFiles { config, preprocessor, video_preprocessor, processor, ..FamilyFiles::default() };
    let Ok(Some(rule)) = family::open(&files) else { return };
    for (height, width) in [(1, 1), (480, 640), (u32::MAX, 1), (0, 7), (4_000, 7_000)] {
        let size = Size { height, width };
        let _ = rule.image(size, 1);
        let _ = rule.image(size, 3);
        for num_frames in [1, 77, u64::MAX] {
            let clip = Clip { size, num_frames, fps: Some(24.0), duration_s: Some(3.2) };
            let _ = rule.video(&clip, VideoSampling::default());
        }
    }
    for duration_s in [0.0, 7.3, 75.0, 1e9] {
        let _ = rule.audio(&Sound { duration_s, sample_rate: 44_100 });
    }
}
