use super::*;
use crate::source::mixture;
use crate::source::readers::RawRecord;
use serde_json::json;
use std::path::{Path, PathBuf};

fn source(location: &Path) -> Source {
    let text = format!("datasets: [{{json_path: '{}'}}]", location.display());
    mixture::parse(Path::new("m.yaml"), &text, None).unwrap().sources.remove(0)
}

fn read(directory: &Path, split: Option<&str>) -> Result<Vec<RawRecord>, DataError> {
    let stores = Stores::default();
    let reader = open(&source(directory), split, &stores)?;
    let count = reader.count(&stores)?;
    let records: Vec<RawRecord> = reader.records(&stores)?.collect::<Result<_, _>>()?;
    assert_eq!(records.len() as u64, count);
    for record in &records {
        assert_eq!(&reader.fetch(&stores, record.place)?, record);
    }
    Ok(records)
}

/// A copy of the dataset, in which tests write.
fn copy() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/shards/energon");
    for folder in [".nv-meta", "shards"] {
        std::fs::create_dir(directory.path().join(folder)).unwrap();
        for entry in std::fs::read_dir(from.join(folder)).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), directory.path().join(folder).join(entry.file_name())).unwrap();
        }
    }
    directory
}

fn meta(directory: &tempfile::TempDir, name: &str) -> PathBuf {
    directory.path().join(".nv-meta").join(name)
}

#[test]
fn a_split_is_read_with_its_field_map() {
    let directory = copy();
    let ids = |split| {
        let records = read(directory.path(), split).unwrap();
        records
            .iter()
            .map(|r| r.parse().unwrap()["id"].as_str().unwrap().to_owned())
            .collect::<Vec<_>>()
            .join(" ")
    };
    assert_eq!(ids(None), "000 002 003 004");
    assert_eq!(ids(Some("train")), "000 002 003 004");
    assert_eq!(ids(Some("val")), "005");
    let first = &read(directory.path(), Some("val")).unwrap()[0];
    let expected =
        json!({"id": "005", "image": {"attachment": 0}, "question": "Who is 5?", "answer": "Number 5."});
    assert_eq!(*first.parse().unwrap(), expected);
    assert_eq!(Stores::default().probe(&first.attachments[0]).unwrap().0.format, "webp");
    assert!(is_dataset(&Location::Local(directory.path().to_owned()), &Stores::default()));
    // An excluded sample counts for passing over, too.
    let stores = Stores::default();
    let reader = open(&source(directory.path()), None, &stores).unwrap();
    let second = reader.records(&stores).unwrap().nth(1).unwrap().unwrap();
    assert_eq!(second.parse().unwrap()["id"], "002");
}

#[test]
fn older_and_crude_forms_are_read() {
    let directory = copy();
    std::fs::remove_file(meta(&directory, ".info.json")).unwrap();
    let counts =
        "shard_counts:\n  shards/train-000.tar: 3\n  shards/train-001.tar: 2\n  shards/val-000.tar: 1\n";
    std::fs::write(meta(&directory, ".info.yaml"), counts).unwrap();
    std::fs::write(
        meta(&directory, "dataset.yaml"),
        "__module__: megatron.energon\n__class__: CaptioningWebdataset\nfield_map: {image: 'jpg,webp', caption: 'json[question]'}\n",
    )
    .unwrap();
    assert_eq!(
        *read(directory.path(), Some("val")).unwrap()[0].parse().unwrap(),
        json!({"id": "005", "image": {"attachment": 0}, "caption": "Who is 5?"})
    );
    std::fs::write(
        meta(&directory, "dataset.yaml"),
        "__module__: megatron.energon\n__class__: CrudeWebdataset\n",
    )
    .unwrap();
    assert_eq!(
        *read(directory.path(), Some("val")).unwrap()[0].parse().unwrap(),
        json!({"id": "005", "image": {"attachment": 0}, "question": "Who is 5?", "answers": ["Number 5."]})
    );
    std::fs::write(
        meta(&directory, "dataset.yaml"),
        "sample_type: {__module__: mine, __class__: ChatMLSample}\nfield_map: {imgs: webp, conversation: json}\n",
    )
    .unwrap();
    assert_eq!(
        *read(directory.path(), Some("val")).unwrap()[0].parse().unwrap(),
        json!({"id": "005", "images": {"attachment": 0}, "question": "Who is 5?", "answers": ["Number 5."]})
    );
    // What one sample lacks costs that sample alone.
    std::fs::write(
        meta(&directory, "dataset.yaml"),
        "sample_type: {__class__: CaptioningSample}\nfield_map: {image: webp, caption: txt}\n",
    )
    .unwrap();
    let records = read(directory.path(), None).unwrap();
    assert_eq!(records[0].parse().unwrap_err(), "`000`: `txt` is not there, the field map needs it");
}

#[test]
fn what_does_not_fit_is_named() {
    let mut errors = Vec::new();
    let mut check = |name: &str, text: &str, split: Option<&str>| {
        let directory = copy();
        std::fs::write(meta(&directory, name), text).unwrap();
        let error = read(directory.path(), split).unwrap_err().to_string();
        errors.push(error.replace(&directory.path().display().to_string(), "D"));
    };
    let dataset = std::fs::read_to_string(meta(&copy(), "dataset.yaml")).unwrap();
    check("dataset.yaml", &dataset, Some("dev"));
    check("dataset.yaml", &dataset, Some("test"));
    check("split.yaml", "split_parts: {train: [shards/other.tar]}", None);
    check("split.yaml", "split_parts: {train: shards}", None);
    check("split.yaml", "split_parts: [", None);
    check(
        "split.yaml",
        "exclude: [shards/train-000.tar/009]\nsplit_parts: {train: [shards/train-000.tar]}",
        None,
    );
    check(
        "split.yaml",
        "exclude: ['shards/train-{000..001}.tar']\nsplit_parts: {train: [shards/train-000.tar]}",
        None,
    );
    let info = r#"{"shard_counts": {"shards/train-000.tar": 3, "shards/train-001.tar": 3, "shards/val-000.tar": -1}}"#;
    check(".info.json", info, None);
    check(".info.json", &info.replace("-1", "1"), None);
    check("dataset.yaml", "sample_type: {__class__: OCRSample}", None);
    check(
        "dataset.yaml",
        "sample_type: {__class__: VQASample}\nsample_loader: sample_loader.py:sample_loader",
        None,
    );
    check("dataset.yaml", "__class__: MetadatasetV2", None);
    check("dataset.yaml", "sample_type: {__class__: VQASample}", None);
    check("dataset.yaml", "sample_type: {__class__: VQASample}\nfield_map: {image: jp2}", None);
    insta::assert_snapshot!(errors.join("\n"), @r#"
    `D/.nv-meta/split.yaml`: there is no split `dev`, known are train, val, test
    `D/.nv-meta/split.yaml`: split `test` has no shard
    `D/.nv-meta/split.yaml`: `split_parts.train`: `shards/other.tar` is not in `shard_counts`
    `D/.nv-meta/split.yaml`: `split_parts.train`: "shards" must be a list
    `D/.nv-meta/split.yaml`: it is not YAML: while parsing a node, did not find expected node content at byte 14 line 2 column 1
    `D/shards/train-000.tar`: it has no sample `009`, which is named as excluded
    `D/.nv-meta/split.yaml`: split `train` has no shard
    `D/.nv-meta/.info.json`: `shard_counts`: `shards/val-000.tar` is -1, must be a count
    `D/.nv-meta/.info.json` does not fit `D/shards/train-001.tar`: it declares 3 samples, the shard has 2
    `D/.nv-meta/dataset.yaml`: `__class__` is `OCRSample`, must be CaptioningSample, VQASample, VidQASample, TextSample, ChatMLSample or CrudeWebdataset
    `D/.nv-meta/dataset.yaml`: `sample_loader` is Python code, must be a `field_map` or a crude dataset
    `D/.nv-meta/dataset.yaml`: `__class__` is `MetadatasetV2`, must be CaptioningSample, VQASample, VidQASample, TextSample, ChatMLSample or CrudeWebdataset
    `D/.nv-meta/dataset.yaml`: `field_map` is missing, a `VQASample` needs it
    `D/.nv-meta/dataset.yaml`: `field_map.image` is `jp2`: `jp2` is of no kind we read: images, videos, sounds, json, txt, cls
    "#);
}

#[test]
fn a_metadataset_is_refused() {
    let stores = Stores::default();
    let error =
        crate::source::readers::open(&source(Path::new("mix.yaml")), &stores).unwrap_err().to_string();
    assert!(error.contains("mix.yaml`: a metadataset is a mixture"), "{error}");
}
