//! What the targets check: no panic, and an answer that keeps the rules of its kind.

use dflop_data::conversation::Conversation;
use dflop_data::family::{self, Clip, FamilyFiles, Size, Sound, VideoSampling};
use dflop_data::location::Location;
use dflop_data::mixture::Source;
use dflop_data::probe::{MediaKind, probe_bytes};
use dflop_data::store::Stores;
use dflop_data::{DataError, readers, table};
use std::path::Path;

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
            let again = reader.fetch(&stores, record.place).expect("what was read is read again");
            assert_eq!((again.place, again.hash()), (record.place, record.hash()));
        }
        if num_records < 1_000
            && let Ok(count) = count
        {
            assert_eq!(count, num_records);
        }
    });
}

/// Reads `bytes` as a data profile: one that is sealed, or an error.
pub fn profile(bytes: &[u8]) {
    with_file("data_profile.parquet", bytes, |path| {
        let _ = table::read(path);
    });
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

/// Reads `bytes` as the configuration files of a model, and asks the family for shapes.
pub fn family(bytes: &[u8]) {
    let Ok(serde_json::Value::Array(mut files)) = serde_json::from_slice(bytes) else { return };
    files.resize(3, serde_json::Value::Null);
    let [config, preprocessor, video_preprocessor] =
        <[serde_json::Value; 3]>::try_from(files).expect("it was cut to three");
    let files = FamilyFiles { config, preprocessor, video_preprocessor };
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
    let _ = rule.audio(&Sound { duration_s: 7.3, sample_rate: 44_100 });
}
