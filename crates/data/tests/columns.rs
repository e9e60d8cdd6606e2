//! Columnar sources against what `datasets` says of their rows, and against damage.

#![allow(clippy::unwrap_used, reason = "a test may give up, its helpers too")]

use dflop_data::DataError;
use dflop_data::location::{Location, MediaPlace};
use dflop_data::mixture::Source;
use dflop_data::readers::{self, Body, RawRecord};
use dflop_data::store::Stores;
use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};
use std::path::{Path, PathBuf};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/huggingface")
}

fn expected(name: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(fixtures().join("expected.json")).unwrap();
    serde_json::from_str::<Value>(&text).unwrap()[name].as_array().unwrap().clone()
}

fn source(path: &Path) -> Source {
    Source::new(Location::Local(path.to_owned()))
}

/// The source of question and answer, under the names that its columns have.
fn questions(path: &Path, split: Option<&str>) -> Source {
    let columns = [("image", "img"), ("question", "query"), ("answer", "label")];
    Source {
        split: split.map(str::to_owned),
        columns: columns.map(|(ours, theirs)| (ours.to_owned(), theirs.to_owned())).into(),
        ..source(path)
    }
}

/// Every record; each is fetched alone too, and must be the same.
fn records(source: &Source) -> Result<Vec<RawRecord>, DataError> {
    let stores = Stores::default();
    let reader = readers::open(source, &stores)?;
    let records = reader.records(&stores)?.collect::<Result<Vec<_>, _>>()?;
    assert_eq!(reader.count(&stores)?, records.len() as u64);
    for record in &records {
        assert_eq!(&reader.fetch(&stores, record.place)?, record);
    }
    Ok(records)
}

/// The fields with the bytes of their media shown as `make.py` shows them.
fn shown(record: &RawRecord) -> Value {
    fn fill(value: &mut Value, attachments: &[MediaPlace]) {
        if let Some(index) = value.get("attachment").and_then(Value::as_u64) {
            let MediaPlace::Bytes { bytes, name } = &attachments[index as usize] else {
                panic!("they are bytes")
            };
            let digest = Sha256::digest(bytes);
            let hex = format!("{:016x}", u64::from_be_bytes(digest[..8].try_into().unwrap()));
            let path = name.split_once(" (").map(|(path, _)| path);
            *value = json!({"bytes": {"sha256": hex, "len": bytes.len()}, "path": path});
            *value = without_nulls(value);
            return;
        }
        match value {
            Value::Array(items) => items.iter_mut().for_each(|item| fill(item, attachments)),
            Value::Object(fields) => fields.values_mut().for_each(|field| fill(field, attachments)),
            _ => {}
        }
    }
    let Body::Fields(fields) = &record.body else { panic!("rows are fields") };
    let mut fields = fields.clone();
    fill(&mut fields, &record.attachments);
    fields
}

/// `datasets` gives nulls where we leave fields out.
fn without_nulls(value: &Value) -> Value {
    match value {
        Value::Array(items) => items.iter().map(without_nulls).collect(),
        Value::Object(fields) => {
            let there = fields.iter().filter(|(_, field)| !field.is_null());
            Value::Object(
                there.map(|(name, field)| (name.clone(), without_nulls(field))).collect::<Map<_, _>>(),
            )
        }
        other => other.clone(),
    }
}

fn check(source: &Source, rows: &[Value], unused: &[&str]) {
    let records = records(source).unwrap();
    let found: Vec<_> = records.iter().map(shown).collect();
    let mut rows: Vec<_> = rows.iter().map(without_nulls).collect();
    for row in &mut rows {
        row.as_object_mut().unwrap().retain(|name, _| !unused.contains(&name.as_str()));
    }
    assert_eq!(found, rows);
}

#[test]
fn rows_are_what_datasets_says() {
    let unused = ["thumbnail", "score"];
    check(&source(&fixtures().join("saved")), &expected("saved"), &[]);
    for split in ["train", "test"] {
        let saved = questions(&fixtures().join("splits"), Some(split));
        check(&saved, &expected(&format!("splits/{split}")), &unused);
        let hub = questions(&fixtures().join("hub"), Some(split));
        check(&hub, &expected(&format!("hub/{split}")), &unused);
    }
    // The file format; batches that are packed and have a dictionary.
    check(&source(&fixtures().join("arrow/file.arrow")), &expected("saved"), &[]);
    for name in ["lz4.arrow", "zstd.arrow", "pages.parquet"] {
        check(&source(&fixtures().join("arrow").join(name)), &expected("arrow/codec"), &[]);
    }
}

#[test]
fn files_and_places_are_those_of_the_split() {
    let stores = Stores::default();
    let source = questions(&fixtures().join("hub"), Some("train"));
    let reader = readers::open(&source, &stores).unwrap();
    let names: Vec<_> = reader.files().iter().map(Location::name).collect();
    assert_eq!(names, (0..3).map(|k| format!("train-0000{k}-of-00003.parquet")).collect::<Vec<_>>());
    let places: Vec<_> = reader.records(&stores).unwrap().map(|record| record.unwrap().place).collect();
    let pairs: Vec<_> = places.iter().map(|place| (place.file, place.start)).collect();
    assert_eq!(pairs, [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]);
    let past = dflop_types::Place { file: 1, start: 3, len: 0 };
    assert!(
        reader.fetch(&stores, past).unwrap_err().to_string().contains("row 3 is asked for, it has 3 rows")
    );
    let no_file = dflop_types::Place { file: 3, start: 0, len: 0 };
    assert!(reader.fetch(&stores, no_file).is_err());
}

#[test]
fn media_are_probed_where_they_stand() {
    let stores = Stores::default();
    let records = records(&questions(&fixtures().join("splits"), Some("train"))).unwrap();
    let (probe, _) = stores.probe(&records[1].attachments[0]).unwrap();
    assert_eq!((probe.format, probe.width, probe.height), ("png", Some(64), Some(64)));
    let name = records[1].attachments[0].to_string();
    assert_eq!(name, "pillow_i_trns.png (data-00000-of-00001.arrow, row 1, column img)");
}

#[test]
fn a_source_that_is_not_as_asked_is_refused() {
    let root = fixtures();
    let stores = Stores::default();
    let cause = |source: &Source| readers::open(source, &stores).map(|_| ()).unwrap_err().to_string();
    let plain = source(&root.join("hub"));
    assert!(cause(&plain).ends_with("has 2 splits: `test`, `train`; name one in the mixture as `split`"));
    let dict = source(&root.join("splits"));
    assert!(cause(&dict).contains("has 2 splits: `test`, `train`"), "{}", cause(&dict));
    let other = Source { split: Some("dev".to_owned()), ..dict };
    assert!(cause(&other).ends_with("has no split `dev`, it has `test`, `train`"), "{}", cause(&other));
    let unnamed = Source {
        columns: [("image".to_owned(), "photo".to_owned())].into(),
        ..questions(&root.join("hub"), Some("test"))
    };
    assert!(
        cause(&unnamed).contains("there is no column `photo`, there are `id`, `img`"),
        "{}",
        cause(&unnamed)
    );
    let split_of_file = questions(&root.join("hub/data/test-00000-of-00001.parquet"), Some("test"));
    assert!(cause(&split_of_file).contains("a file has no splits"));
    assert!(cause(&source(&root.join("../media"))).contains("holds no dataset"));
    assert!(matches!(readers::open(&source(&root.join("gone")), &stores), Err(DataError::Io { .. })));
    assert!(cause(&source(&root.join("make.py"))).contains("ending in `py` is of no form we read"));
}

#[test]
fn packed_text_is_refused_with_the_way_out() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.jsonl.gz");
    std::fs::write(&path, b"\x1f\x8b\x08").unwrap();
    let error = readers::open(&source(&path), &Stores::default()).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("it is compressed") && error.contains("gzip -d"), "{error}");
}

/// What reading `bytes` as a file of this name gives: rows in all, or the error.
fn read_damaged(directory: &Path, name: &str, bytes: &[u8]) -> Result<usize, String> {
    let path = directory.join(name);
    std::fs::write(&path, bytes).unwrap();
    let (stores, mut source) = (Stores::default(), source(&path));
    if name.contains("train") || name.contains("test") {
        source = questions(&path, None);
    }
    let reader = readers::open(&source, &stores).map_err(|error| error.to_string())?;
    // A row may be damaged alone: each is fetched, whatever becomes of the others.
    for row in 0..reader.count(&stores).map_err(|error| error.to_string())?.min(20) {
        let _ = reader.fetch(&stores, dflop_types::Place { file: 0, start: row, len: 0 });
    }
    let mut rows = 0;
    for record in reader.records(&stores).map_err(|error| error.to_string())? {
        record.map_err(|error| error.to_string())?;
        rows += 1;
    }
    Ok(rows)
}

const FILES: [&str; 6] = [
    "saved/data-00001-of-00002.arrow",
    "arrow/file.arrow",
    "arrow/lz4.arrow",
    "arrow/zstd.arrow",
    "arrow/pages.parquet",
    "hub/data/train-00000-of-00003.parquet",
];

#[test]
fn files_cut_off_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    for file in FILES {
        let bytes = std::fs::read(fixtures().join(file)).unwrap();
        let name = Path::new(file).file_name().unwrap().to_string_lossy();
        assert!(read_damaged(directory.path(), &name, &bytes).is_ok(), "{file}");
        for len in (0..bytes.len()).step_by(97).chain(bytes.len().saturating_sub(40)..bytes.len()) {
            let error = read_damaged(directory.path(), &name, &bytes[..len]).unwrap_err();
            assert!(error.contains(&*name), "{file} cut at {len}: {error}");
        }
    }
}

#[test]
fn damaged_files_are_read_or_refused() {
    let directory = tempfile::tempdir().unwrap();
    let mut random = 1_u64;
    for file in FILES {
        let bytes = std::fs::read(fixtures().join(file)).unwrap();
        let name = Path::new(file).file_name().unwrap().to_string_lossy();
        for _ in 0..400 {
            let mut damaged = bytes.clone();
            for _ in 0..3 {
                // Knuth's MMIX generator.
                random =
                    random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let at = (random >> 33) as usize % damaged.len();
                damaged[at] = [0xff, 0x7f, 0x80, 0, (random >> 20) as u8][(random >> 29) as usize % 5];
            }
            let _ = read_damaged(directory.path(), &name, &damaged);
        }
    }
}

/// Where the decoder panics, the error names the file and says why.
#[test]
fn what_a_decoder_panics_on_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus");
    for (file, name, cause) in [
        ("records_arrow/offsets_cut_in_the_middle", "r.arrow", "assertion failed"),
        ("records_parquet/dictionary_of_no_values", "r.parquet", "attempt to divide by zero"),
    ] {
        let error =
            read_damaged(directory.path(), name, &std::fs::read(corpus.join(file)).unwrap()).unwrap_err();
        let expected = format!("file: the code that reads it gave up: {cause}");
        assert!(error.contains(name) && error.contains(&expected), "{error}");
    }
}

/// Most memory that this process has had since the last call, in bytes.
fn peak_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

/// Counts and streams the source; says how long it took and how much memory.
#[expect(clippy::print_stderr, reason = "the numbers are what it is for")]
fn measure(source: &Source, num_rows: u64) -> u64 {
    let stores = Stores::default();
    peak_bytes();
    let start = std::time::Instant::now();
    let reader = readers::open(source, &stores).unwrap();
    assert_eq!(reader.count(&stores).unwrap(), num_rows);
    let counted_s = start.elapsed().as_secs_f64();
    let mut bytes = 0;
    for record in reader.records(&stores).unwrap() {
        bytes += match record.unwrap() {
            RawRecord { body: Body::Json { text, .. }, .. } => text.len() as u64,
            RawRecord { attachments, .. } => {
                let len = |place: &MediaPlace| match place {
                    MediaPlace::Bytes { bytes, .. } => bytes.len() as u64,
                    _ => 0,
                };
                attachments.iter().map(len).sum()
            }
        };
    }
    let (seconds, peak) = (start.elapsed().as_secs_f64(), peak_bytes());
    eprintln!(
        "{}: {bytes} bytes, counted in {counted_s:.2} s, all in {seconds:.2} s, peak {peak} bytes",
        source.name
    );
    peak
}

#[test]
#[ignore = "writes some gigabytes; alone in its process, for memory is measured"]
fn streaming_large_files_takes_little_memory() {
    use arrow_array::{ArrayRef, BinaryArray, RecordBatch};
    use std::io::Write as _;
    const LIMIT: u64 = 100_000_000;
    let directory = tempfile::tempdir().unwrap();
    let record =
        json!({"id": "x", "conversations": [{"from": "human", "value": "w ".repeat(500)}]}).to_string();
    let num_records = (1 << 30) / record.len() as u64;
    for (name, (begin, between, end)) in [("a.jsonl", ("", "\n", "")), ("a.json", ("[", ",\n", "]"))] {
        let path = directory.path().join(name);
        let mut file = std::io::BufWriter::new(std::fs::File::create(&path).unwrap());
        write!(file, "{begin}{record}").unwrap();
        for _ in 1..num_records {
            write!(file, "{between}{record}").unwrap();
        }
        write!(file, "{end}").unwrap();
        drop(file);
        let peak = measure(&source(&path), num_records);
        assert!(peak < LIMIT, "{name}: {peak} bytes");
        std::fs::remove_file(path).unwrap();
    }
    // One batch, one row group of 512 images of a mebibyte.
    let image = vec![7_u8; 1 << 20];
    for name in ["a.arrow", "a.parquet"] {
        let path = directory.path().join(name);
        let images: ArrayRef =
            std::sync::Arc::new(BinaryArray::from_iter_values(std::iter::repeat_n(&image, 512)));
        let batch = RecordBatch::try_from_iter([("image", images)]).unwrap();
        let file = std::fs::File::create(&path).unwrap();
        if name == "a.arrow" {
            let mut writer = arrow_ipc::writer::StreamWriter::try_new(file, &batch.schema()).unwrap();
            writer.write(&batch).unwrap();
            writer.finish().unwrap();
        } else {
            let plain =
                parquet::file::properties::WriterProperties::builder().set_dictionary_enabled(false).build();
            let mut writer = parquet::arrow::ArrowWriter::try_new(file, batch.schema(), Some(plain)).unwrap();
            writer.write(&batch).unwrap();
            writer.close().unwrap();
        }
        drop(batch);
        let peak = measure(&source(&path), 512);
        assert!(peak < LIMIT, "{name}: {peak} bytes");
    }
}
