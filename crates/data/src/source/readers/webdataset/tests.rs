use super::*;
use crate::media::probe::probe;
use crate::source::mixture;
use crate::source::readers;
use crate::source::readers::tar::tests::member;
use dflop_types::Place;
use rand::{RngExt, SeedableRng};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

const LONG: &str = "a-directory-of-a-long-name/a-directory-of-a-long-name/a-directory-of-a-long-name/\
                    a-directory-of-a-long-name/";

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures")
}

fn source(location: &Path) -> Source {
    let text = format!("datasets: [{{json_path: '{}'}}]", location.display());
    mixture::parse(Path::new("m.yaml"), &text, None).unwrap().sources.remove(0)
}

fn reader(location: &Path) -> Box<dyn Reader> {
    readers::open(&source(location), &Stores::default()).unwrap()
}

fn all(reader: &dyn Reader) -> Result<Vec<RawRecord>, DataError> {
    reader.records(&Stores::default())?.collect()
}

/// A directory with a copy of the plain shards, without their indices.
fn copy() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    for number in 0..3 {
        let name = format!("shard-00000{number}.tar");
        std::fs::copy(fixtures().join("shards/plain").join(&name), directory.path().join(name)).unwrap();
    }
    directory
}

#[test]
fn samples_are_those_that_tarfile_lists() {
    let expected = std::fs::read_to_string(fixtures().join("shards/expected.json")).unwrap();
    let expected: Value = serde_json::from_str(&expected).unwrap();
    let stores = Stores::default();
    let mut num_samples = 0;
    for (name, samples) in expected.as_object().unwrap() {
        let reader = reader(&fixtures().join("shards").join(name));
        let records = all(reader.as_ref()).unwrap();
        let samples = samples.as_array().unwrap().split_last().unwrap().1;
        assert_eq!(records.len(), samples.len(), "{name}");
        assert_eq!(reader.count(&stores).unwrap(), samples.len() as u64, "{name}");
        for (record, sample) in records.iter().zip(samples) {
            let start = sample["start"].as_u64().unwrap();
            let len = sample["end"].as_u64().unwrap() - start;
            assert_eq!(record.place, Place { file: 0, start, len });
            let members = sample["members"].as_array().unwrap();
            let media: Vec<Value> =
                members.iter().filter(|m| !is_text(m[1].as_str().unwrap())).cloned().collect();
            let attached = record.attachments.iter().map(|place| match place {
                crate::source::location::MediaPlace::Range { start, len, name, .. } => {
                    json!([name, split_name(name), start, len])
                }
                other => panic!("{other}"),
            });
            assert_eq!(attached.collect::<Vec<_>>(), media);
            assert_eq!(&reader.fetch(&stores, record.place).unwrap(), record);
        }
        num_samples += samples.len();
    }
    assert_eq!(num_samples, 14);
}

fn split_name(name: &str) -> String {
    sample::split(name).unwrap().1
}

#[test]
fn records_hold_what_the_members_say() {
    let reader = reader(&fixtures().join("shards/plain/shard-{000000..000002}.tar"));
    let records = all(reader.as_ref()).unwrap();
    let media = |index: usize| json!({"attachment": index});
    let talk = |question: &str, answer: &str| json!([{"from": "human", "value": question}, {"from": "gpt", "value": answer}]);
    let expected = [
        json!({"id": "first", "image": media(0), "conversations": talk("<image>\nWhat moves?", "A ball.")}),
        json!({"id": "train/001", "image": media(0), "caption": "Grace Hopper, 1984. Caf\u{e9}."}),
        json!({"id": format!("{LONG}002"), "images": [media(0), media(1)],
               "conversations": talk("<image><image>\nWhich is larger?", "The first.")}),
        json!({"id": "train/003", "video": media(0), "conversations": talk("<video>\nWhat is it?", "A test card.")}),
        json!({"id": "004", "audio": media(0), "caption": "a tone"}),
        json!({"id": format!("{LONG}005"), "images": [media(1), media(0)],
               "conversations": talk("<image><image>\nIn order?", "Yes.")}),
        json!({"id": format!("{LONG}Gr\u{f6}\u{df}e-006"), "conversations": talk("Hello?", "Hello.")}),
        json!({"id": "007", "image": media(0), "cls": 12}),
    ];
    let found: Vec<Value> = records.iter().map(|record| record.parse().unwrap().into_owned()).collect();
    assert_eq!(found, expected);
    let files: Vec<u32> = records.iter().map(|record| record.place.file).collect();
    assert_eq!(files, [0, 0, 0, 0, 1, 1, 2, 2]);
    assert_eq!(reader.files()[1].name(), "shard-000001.tar");
}

#[test]
fn a_member_probes_as_the_file_it_was() {
    let stores = Stores::default();
    let originals = [
        ("000.gif", "pillow_dispose_prev.gif"),
        ("001.webp", "pillow_hopper.webp"),
        ("002.1.png", "pillow_i_trns.png"),
        ("003.mp4", "go_mp4_sample.mp4"),
        ("004.wav", "made_pcm.wav"),
    ];
    let mut num_probed = 0;
    for record in all(reader(&fixtures().join("shards/plain")).as_ref()).unwrap() {
        for place in &record.attachments {
            let name = place.to_string();
            let Some((_, original)) = originals.iter().find(|(member, _)| name.ends_with(member)) else {
                continue;
            };
            let path = fixtures().join("media").join(original);
            assert_eq!(stores.probe(place).unwrap().0, probe(&path).unwrap());
            assert_eq!(stores.read_media(place).unwrap(), std::fs::read(path).unwrap());
            num_probed += 1;
        }
    }
    assert_eq!(num_probed, originals.len());
}

#[test]
fn passing_over_samples_leads_where_reading_them_leads() {
    let without_index = copy();
    let listed = copy();
    let list = json!({"__kind__": "wids-shard-index-v1", "wids_version": 1, "shardlist": [
        {"url": "shard-000000.tar", "nsamples": 4, "filesize": 40960},
        {"url": "s3://bucket/shard-000001.tar", "nsamples": 2}, {"url": "shard-000002.tar", "nsamples": 2}]});
    std::fs::write(listed.path().join("shardindex.json"), list.to_string()).unwrap();
    let stores = Stores::default();
    for directory in [&fixtures().join("shards/plain"), without_index.path(), listed.path()] {
        let reader = reader(directory);
        assert_eq!(reader.count(&stores).unwrap(), 8);
        let records = all(reader.as_ref()).unwrap();
        for first in 0..10 {
            for second in 0..10 {
                let mut found = reader.records(&stores).unwrap();
                let mut expected = records.iter();
                assert_eq!(found.nth(first).map(Result::unwrap).as_ref(), expected.nth(first));
                assert_eq!(found.nth(second).map(Result::unwrap).as_ref(), expected.nth(second));
                assert_eq!(found.next().map(Result::unwrap).as_ref(), expected.next());
            }
        }
    }
}

#[test]
fn members_that_stand_apart_are_named() {
    let directory = tempfile::tempdir().unwrap();
    let shard = directory.path().join("a.tar");
    // Both parts of `a`, a whole `b` that comes twice, a text `c` before its picture.
    let names = ["a.jpg", "b.jpg", "b.txt", "a.txt", "b.jpg", "b.txt", "c.txt", "d.txt", "c.jpg"];
    let members: Vec<u8> = names.iter().flat_map(|name| member(name, b'0', b"xy")).collect();
    std::fs::write(&shard, [members, vec![0; 1024]].concat()).unwrap();
    let found: Vec<String> = all(reader(&shard).as_ref())
        .unwrap()
        .iter()
        .map(|record| record.parse().map_or_else(|cause| cause, |_| "a record".to_owned()))
        .collect();
    insta::assert_snapshot!(found.join("\n"), @r"
    a record
    a record
    `a`: its members do not stand beside each other: others are at byte 0 of the shard, before other samples. Pack the shard so that they do (`tar --sort=name`)
    a record
    a record
    a record
    `c`: its members do not stand beside each other: others are at byte 6144 of the shard, before other samples. Pack the shard so that they do (`tar --sort=name`)
    ");
}

#[test]
fn an_index_that_does_not_fit_is_an_error_naming_both() {
    let directory = copy();
    let shard = directory.path().join("shard-000000.tar");
    let stores = Stores::default();
    // 512, 5632, 10752, 20992, end 31232.
    for (entries, cause) in [
        (vec![512_u64, 5632, 10752, 31232], "fit"),
        (vec![512, 5632, 10752, 20992, 31232, 31232], "fit"),
        (vec![0, 5632, 10752, 20992, 31232], "sample 0 is at byte 0 by the index, at 512 in the shard"),
        (vec![512, 5632, 12288, 20992, 31232], "sample 2 is at byte 12288 by the index, at 10752"),
        (vec![512, 5632, 10753, 20992, 31232], "10753"),
        (vec![512, 5632, 10752, 20992, 31744], "the end is at byte 31744 by the index, at 31232"),
        (vec![512, 5632, 10752, 20992, u64::MAX], "fit"),
        (vec![0, 1 << 63, u64::MAX, 1 << 40, 5], "fit"),
        (vec![0; 5], "fit"),
        (vec![0], "fit"),
        (vec![], "8 bytes a sample"),
    ] {
        let bytes: Vec<u8> = entries.iter().flat_map(|entry| entry.to_le_bytes()).collect();
        std::fs::write(directory.path().join("shard-000000.tar.idx"), bytes).unwrap();
        let reader = reader(&shard);
        let error = all(reader.as_ref()).unwrap_err().to_string();
        assert!(error.contains(cause), "{entries:?}: {error}");
        assert!(error.contains("shard-000000.tar"), "{entries:?}: {error}");
        assert!(error.contains("shard-000000.tar.idx"), "{entries:?}: {error}");
        // What can be told without a walk: the number of samples, the last and the end.
        let _ = reader.count(&stores);
        for first in 0..5 {
            let _ = reader.records(&stores).unwrap().nth(first);
        }
    }
    std::fs::write(directory.path().join("shard-000000.tar.idx"), [0; 12]).unwrap();
    assert!(reader(&shard).count(&stores).is_err());
    let swapped = fixtures().join("shards/plain/shard-000002.tar.idx");
    std::fs::copy(swapped, directory.path().join("shard-000000.tar.idx")).unwrap();
    let error = reader(&shard).count(&stores).unwrap_err().to_string();
    assert!(error.contains("shard-000000.tar.idx"), "{error}");
}

#[test]
fn a_list_of_shards_that_does_not_fit_is_an_error() {
    let directory = copy();
    let stores = Stores::default();
    let check = |list: Value, cause: &str| {
        std::fs::write(directory.path().join("wids-meta.json"), list.to_string()).unwrap();
        let opened = readers::open(&source(directory.path()), &stores);
        let error = opened.and_then(|reader| all(reader.as_ref())).unwrap_err().to_string();
        assert!(error.contains(cause) && error.contains("wids-meta.json"), "{error}");
    };
    let entry =
        |number: u32, count: u64| json!({"url": format!("shard-00000{number}.tar"), "nsamples": count});
    check(json!({"shardlist": [entry(0, 4), entry(1, 2)]}), "does not list `shard-000002.tar`");
    check(
        json!({"shardlist": [entry(0, 4), entry(1, 2), entry(2, 2), entry(3, 2)]}),
        "`shard-000003.tar` of the list is not there",
    );
    check(
        json!({"shardlist": [entry(0, 4), entry(1, 3), entry(2, 2)]}),
        "it declares 3 samples, the shard has 2",
    );
    check(
        json!({"shardlist": [{"url": "shard-000000.tar", "nsamples": 4, "filesize": 7}]}),
        "has 40960 bytes",
    );
    check(json!({"shardlist": [3]}), "`shardlist[0]` must have");
    let claims = json!({"shardlist": [entry(0, u64::MAX), entry(1, u64::MAX), entry(2, 2)]});
    std::fs::write(directory.path().join("wids-meta.json"), claims.to_string()).unwrap();
    let error = reader(directory.path()).count(&stores).unwrap_err().to_string();
    assert!(error.contains("declares 18446744073709551615 samples, the shard has 40960 bytes"), "{error}");
    // A file of that name that is no list.
    std::fs::write(directory.path().join("wids-meta.json"), "{}").unwrap();
    assert_eq!(reader(directory.path()).count(&stores).unwrap(), 8);
}

/// What the iterator gives of a shard: samples, then at most one error, then nothing.
fn drain(shard: &Path) -> (Vec<RawRecord>, Option<String>) {
    let stores = Stores::default();
    let reader = match readers::open(&source(shard), &stores) {
        Ok(reader) => reader,
        Err(error) => return (Vec::new(), Some(error.to_string())),
    };
    let mut records = reader.records(&stores).unwrap();
    let mut samples = Vec::new();
    let mut error = None;
    for record in records.by_ref() {
        assert!(error.is_none(), "a sample after an error");
        match record {
            Ok(record) => samples.push(record),
            Err(found) => error = Some(found.to_string()),
        }
    }
    assert!(records.next().is_none());
    (samples, error)
}

#[test]
fn a_cut_shard_gives_what_is_whole_and_then_one_error() {
    let directory = copy();
    for (name, end) in [("shard-000000.tar", 31232), ("shard-000001.tar", 12800), ("shard-000002.tar", 5120)]
    {
        let shard = directory.path().join(name);
        let bytes = std::fs::read(&shard).unwrap();
        let (whole, error) = drain(&shard);
        assert_eq!(error, None);
        let ends: Vec<u64> = whole.iter().map(|record| record.place.start + record.place.len).collect();
        assert_eq!(ends.last(), Some(&end), "{name}");
        for len in (0..bytes.len()).step_by(512).flat_map(|len| [len, len + 100]) {
            std::fs::write(&shard, &bytes[..len]).unwrap();
            let (samples, error) = drain(&shard);
            if len as u64 >= end + 512 {
                // One zero block says that the archive ends; the rest is padding.
                assert_eq!((samples.len(), error), (whole.len(), None), "{name} cut at {len}");
                continue;
            }
            let error = error.unwrap_or_else(|| panic!("{name} cut at {len} is taken"));
            assert!(error.contains(name) && error.contains("at byte "), "{error}");
            // The last one before the cut may go on behind it.
            let known = ends.iter().filter(|&&end| end < len as u64).count();
            assert!(samples.len() <= known && samples.len() + 1 >= known, "{name} cut at {len}");
            assert_eq!(samples, whole[..samples.len()]);
        }
    }
}

#[test]
fn flipped_bytes_give_an_answer() {
    let directory = copy();
    let mut random = rand_chacha::ChaCha8Rng::seed_from_u64(7);
    for number in 0..3 {
        let shard = directory.path().join(format!("shard-00000{number}.tar"));
        let bytes = std::fs::read(&shard).unwrap();
        for _ in 0..300 {
            let mut broken = bytes.clone();
            for _ in 0..random.random_range(1..4) {
                let at = random.random_range(0..broken.len());
                broken[at] = random.random();
            }
            std::fs::write(&shard, &broken).unwrap();
            let (samples, _) = drain(&shard);
            for record in samples {
                let _ = record.parse();
            }
        }
    }
}

#[test]
fn a_place_that_is_no_sample_is_refused() {
    let reader = reader(&fixtures().join("shards/plain/shard-000000.tar"));
    let stores = Stores::default();
    for (file, start, len) in [
        (1, 512, 3072),
        (0, 0, 3584),
        (0, 512, 10240),
        (0, 513, 3072),
        (0, 512, u64::MAX),
        (0, 1 << 40, 512),
        (0, 0, 0),
        (0, 1024, 2560),
    ] {
        let error = reader.fetch(&stores, Place { file, start, len }).unwrap_err();
        assert!(matches!(error, DataError::Record(_) | DataError::Damaged { .. }), "{start} {len}: {error}");
    }
}

#[test]
fn sources_that_are_no_shards_are_named() {
    let directory = tempfile::tempdir().unwrap();
    let stores = Stores::default();
    let open = |name: &str| readers::open(&source(&directory.path().join(name)), &stores);
    assert!(open("").unwrap_err().to_string().contains("has no `.tar` file"));
    assert!(matches!(open("missing.tar").unwrap_err(), DataError::Io { .. }));
    assert!(open("a-{0..x}.tar").unwrap_err().to_string().contains("a range of numbers"));
    let missing = open("a-{0..3}.tar").unwrap();
    assert!(matches!(missing.count(&stores).unwrap_err(), DataError::Io { .. }));
    std::fs::write(directory.path().join("packed.tar"), [&[0x1f, 0x8b][..], &[7; 2000]].concat()).unwrap();
    let (_, error) = drain(&directory.path().join("packed.tar"));
    assert!(error.unwrap().contains("compressed (gzip)"));
    // A file with braces in its name is that file.
    std::fs::copy(fixtures().join("shards/plain/shard-000002.tar"), directory.path().join("x{0..9}.tar"))
        .unwrap();
    assert_eq!(open("x{0..9}.tar").unwrap().count(&stores).unwrap(), 2);
}
