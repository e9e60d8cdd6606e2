//! The file of a data profile: what is written is read, what is damaged is refused.

#![allow(clippy::unwrap_used, reason = "a test may give up, its helpers too")]

use dflop_data::{problems, table};
use dflop_types::{
    ArtifactError, DataProfile, EncoderParts, EncoderSegments, Fault, Hint, MadeFrom, Place, Problem,
    ProfilePart, ProfiledSample, SampleKind, SampleShape, SourceFile, Stratum, Tower, shown,
};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

fn number() -> impl Strategy<Value = u64> {
    prop_oneof![0..5_u64, any::<u64>()]
}

fn place() -> impl Strategy<Value = Place> {
    (0..4_u32, number(), number()).prop_map(|(file, start, len)| Place { file, start, len })
}

fn shape() -> impl Strategy<Value = SampleShape> {
    let segments = prop::collection::vec((1..9_u32, 1..99_u32), 0..4);
    (segments, 1..500_u32, 0..9_u32, any::<bool>()).prop_map(|(segments, features, text, has_parts)| {
        // Each group of segments is as many parts of one segment, or how they form parts is not known.
        let part = |count| EncoderParts { count, segments: 1, feature_tokens: features };
        let parts: Vec<_> = segments.iter().filter(|_| has_parts).map(|&(count, _)| part(count)).collect();
        let count: u32 = segments.iter().map(|&(count, _)| count).sum();
        let features = match (segments.is_empty(), has_parts) {
            (true, _) => 0,
            (_, true) => count * features,
            (_, false) => features,
        };
        SampleShape {
            encoder_segments: segments
                .into_iter()
                .map(|(count, tokens)| {
                    let tower = if tokens % 2 == 0 { Tower::Second } else { Tower::First };
                    EncoderSegments { tower, ..EncoderSegments::of(count, tokens) }
                })
                .collect(),
            encoder_parts: parts,
            feature_tokens: features,
            llm_tokens: features + text,
            label_tokens: text,
        }
    })
}

fn sample(num_sources: u32) -> impl Strategy<Value = ProfiledSample> {
    let numbers = (number(), number(), number(), number(), number());
    let kind = prop::sample::select(SampleKind::ALL.to_vec());
    (any::<String>(), 0..num_sources, place(), kind, shape(), numbers).prop_map(
        |(id, source, place, kind, shape, (position, media_bytes, media_ms, record_hash, media_hash))| {
            ProfiledSample {
                id,
                source,
                position,
                place,
                kind,
                shape,
                media_bytes,
                media_ms,
                record_hash,
                media_hash,
            }
        },
    )
}

fn problem() -> impl Strategy<Value = Problem> {
    let text = || prop::option::of("[^\0]{1,20}");
    let fault = prop::sample::select(Fault::ALL.to_vec());
    (
        any::<String>(),
        prop::option::of(number()),
        prop::option::of(place()),
        text(),
        fault,
        any::<String>(),
        text(),
    )
        .prop_map(|(file, position, place, id, fault, cause, substitute)| Problem {
            file,
            position,
            place,
            id,
            fault,
            cause,
            substitute,
        })
}

fn profile() -> impl Strategy<Value = DataProfile> {
    let pairs = || prop::collection::btree_map(any::<String>(), any::<String>(), 0..3);
    let sources = prop::collection::vec(any::<String>(), 1..4);
    let stratum = (0..9_u64, 0..9_u64).prop_map(|(n, more)| Stratum { population: n + more, drawn: n });
    let part = prop::option::of((0..3_u32).prop_map(|index| ProfilePart { index, num_parts: 3 }));
    let header = (pairs(), any::<String>(), pairs(), sources, prop::option::of(stratum), part);
    (header, prop::collection::vec(problem(), 0..4)).prop_flat_map(|(header, problems)| {
        let (made_from, family, settings, sources, stratum, part) = header;
        let num_sources = sources.len() as u32;
        let file = (any::<String>(), 0..num_sources, number()).prop_map(|(path, source, bytes)| SourceFile {
            source,
            path,
            bytes,
            version: format!("v{bytes}"),
        });
        let samples = prop::collection::vec(sample(num_sources), 0..20);
        (prop::collection::vec(file, 0..4), samples).prop_map(move |(files, samples)| DataProfile {
            made_from: made_from.clone(),
            family: family.clone(),
            settings: settings.clone(),
            strata: stratum.map_or_else(Vec::new, |stratum| vec![stratum; sources.len()]),
            sources: sources.clone(),
            files,
            part,
            problems: problems.clone(),
            samples,
        })
    })
}

/// The profile with its problems as their table holds them: without control characters and without secrets of URLs.
fn as_shown(mut profile: DataProfile) -> DataProfile {
    for problem in &mut profile.problems {
        problem.file = shown(&problem.file);
        problem.cause = shown(&problem.cause);
        problem.id = problem.id.as_deref().map(shown);
        problem.substitute = problem.substitute.as_deref().map(shown);
    }
    profile
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Any profile is read as it was written, whole, by its header, and row by row; its hash is that of its content.
    #[test]
    fn what_is_written_is_read(profile in profile()) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("new").join(table::FILE_NAME);
        let hash = table::write(&path, &profile).unwrap();
        prop_assert_eq!(&hash, &profile.content_hash());
        let profile = as_shown(profile);
        prop_assert_eq!(&table::read(&path).unwrap(), &profile);
        let (header, num_rows) = table::header(&path).unwrap();
        prop_assert_eq!(num_rows, profile.samples.len() as u64);
        let samples: Vec<_> = table::rows(&path).unwrap().collect::<Result<_, _>>().unwrap();
        prop_assert_eq!(&DataProfile { samples, ..header }, &profile);
        let num_files = std::fs::read_dir(path.parent().unwrap()).unwrap().count();
        prop_assert_eq!(num_files, 1 + usize::from(!profile.problems.is_empty()));
    }
}

fn small(num_samples: u64) -> DataProfile {
    let sample = |position: u64| ProfiledSample {
        id: format!("sample {position}"),
        source: u32::from(position >= num_samples / 2),
        position,
        place: Place { file: 0, start: position * 100, len: 99 },
        kind: SampleKind::Image,
        shape: SampleShape {
            encoder_segments: vec![EncoderSegments::of(1 + (position % 7) as u32, 81)],
            feature_tokens: 9,
            llm_tokens: 20 + (position % 11) as u32,
            label_tokens: 4,
            encoder_parts: vec![EncoderParts {
                count: 1,
                segments: 1 + (position % 7) as u32,
                feature_tokens: 9,
            }],
        },
        media_bytes: position,
        record_hash: position.wrapping_mul(0x9e37_79b9_7f4a_7c15),
        ..ProfiledSample::default()
    };
    DataProfile {
        made_from: MadeFrom::from([("tokenizer".to_owned(), "sha256:a".to_owned())]),
        family: "llava_onevision".to_owned(),
        settings: BTreeMap::from([("seed".to_owned(), "0".to_owned())]),
        // The same name twice: a mixture may take a file twice.
        sources: vec!["a.json".to_owned(), "a.json".to_owned()],
        files: vec![SourceFile {
            source: 0,
            path: "data/a.json".to_owned(),
            bytes: 5,
            version: "1".to_owned(),
        }],
        samples: (0..num_samples).map(sample).collect(),
        ..DataProfile::default()
    }
}

fn bad(position: u64) -> Problem {
    Problem {
        file: "a.json".to_owned(),
        position: Some(position),
        place: Some(Place { file: 0, start: 7, len: 8 }),
        fault: Fault::MediaMissing,
        cause: "no `x, \"y\".jpg`\nat all".to_owned(),
        ..Problem::default()
    }
}

fn written(profile: &DataProfile) -> (tempfile::TempDir, std::path::PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(table::FILE_NAME);
    table::write(&path, profile).unwrap();
    (directory, path)
}

fn names(directory: &Path) -> Vec<String> {
    let mut names: Vec<_> = std::fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Rows that pass one row group wait in a file, and come back in order; the bytes are the same every time.
#[test]
fn many_rows_are_written_in_groups() {
    let profile = small(2 * (1 << 16) + 5);
    let (directory, path) = written(&profile);
    assert_eq!(table::read(&path).unwrap(), profile);
    assert_eq!(names(directory.path()), [table::FILE_NAME]);
    let bytes = std::fs::read(&path).unwrap();
    assert!(bytes.len() < 24 * profile.samples.len(), "{} bytes", bytes.len());
    table::write(&path, &profile).unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), bytes);
}

/// A changed byte or a cut is an error, never a panic and never other numbers.
#[test]
fn damage_is_found_wherever_it_is() {
    let (_directory, path) = written(&DataProfile { problems: vec![bad(3)], ..small(60) });
    let good = std::fs::read(&path).unwrap();
    // Every eleventh byte, by each of its bits in turn: 8 and 11 share no factor.
    for at in (0..good.len()).step_by(11) {
        let mut bytes = good.clone();
        bytes[at] ^= 1 << (at % 8);
        std::fs::write(&path, &bytes).unwrap();
        let error = table::read(&path).unwrap_err();
        assert!(matches!(error, ArtifactError::Malformed { .. }), "byte {at}: {error}");
    }
    for len in (0..good.len()).step_by(101) {
        std::fs::write(&path, &good[..len]).unwrap();
        let error = table::header(&path).unwrap_err();
        assert!(matches!(error, ArtifactError::Malformed { .. }), "{len} bytes: {error}");
    }
}

#[test]
fn files_of_another_kind_are_refused_by_name() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(table::FILE_NAME);
    let refused = |text: &str| {
        std::fs::write(&path, text).unwrap();
        let error = table::read(&path).unwrap_err();
        assert_eq!(error.hint().unwrap(), "make it again with `dflop profile data`");
        error.to_string().replace(&*path.to_string_lossy(), "P")
    };
    assert_eq!(
        refused("{\n\"dflop\": \"data_profile\",\n\"format_version\": 1,\n\"samples\": [{}]\n}\n"),
        "`P` is a data profile of format 1, this dflop reads format 2"
    );
    assert_eq!(
        refused("{\"dflop\": \"plan\", \"format_version\": 1}"),
        "`P` is not a data_profile: its field `dflop` says `plan`"
    );
    assert!(refused("{\"kind\"").starts_with("`P` is not a data_profile: it is no Parquet file: "));
    assert_eq!(refused(""), "`P` is not a data_profile: it has 0 bytes, a Parquet file has at least 12");
    assert_eq!(
        refused("id,source,position"),
        "`P` is not a data_profile: it does not begin as a Parquet file does"
    );
    let error = table::header(Path::new("/no/such/file")).unwrap_err();
    assert!(matches!(error, ArtifactError::Missing { mend: "dflop profile data", .. }), "{error}");
}

/// Each unsound sample is named, the first 20 of many; row by row, the first ends the rows.
#[test]
fn unsound_samples_are_named() {
    let mut profile = small(100);
    profile.samples.iter_mut().skip(10).for_each(|sample| sample.shape.label_tokens = 1000);
    let (_directory, path) = written(&profile);
    let ArtifactError::Unsound { problems, .. } = table::read(&path).unwrap_err() else { panic!("unsound") };
    assert_eq!(problems.len(), 21);
    assert_eq!(problems[0], "samples[10].shape: `label_tokens` is 1000, more than `llm_tokens` 30");
    assert_eq!(problems[20], "and 70 more");
    let rows: Vec<_> = table::rows(&path).unwrap().collect();
    assert_eq!(rows.len(), 11);
    assert!(rows[10].as_ref().unwrap_err().to_string().contains("samples[10].shape"));
}

/// A write that fails or is given up leaves the old file and nothing else.
#[test]
fn an_interrupted_write_leaves_the_old_file() {
    let (directory, path) = written(&small(3));
    let mut writer = table::Writer::create(&path).unwrap();
    for sample in &small((1 << 16) + 1).samples {
        writer.push(sample).unwrap();
    }
    assert_eq!(names(directory.path()).len(), 3, "the file and two neighbours");
    drop(writer);
    assert_eq!(names(directory.path()), [table::FILE_NAME]);

    // A source without a name, and a header that breaks its rules.
    let mut unnamed = small(3);
    unnamed.samples[2].source = 9;
    let error = table::write(&path, &unnamed).unwrap_err().to_string();
    assert!(error.ends_with("a sample's source 9 is past the 2 sources"), "{error}");
    let part = Some(ProfilePart { index: 3, num_parts: 3 });
    let error = table::write(&path, &DataProfile { part, ..small(3) }).unwrap_err().to_string();
    assert!(error.ends_with("part.index: 3, must be below 3"), "{error}");
    assert_eq!(table::read(&path).unwrap(), small(3));

    std::fs::create_dir_all(directory.path().join("taken/kept")).unwrap();
    table::write(&directory.path().join("taken"), &small(3)).unwrap_err();
    assert_eq!(names(directory.path()), [table::FILE_NAME, "taken"]);
}

/// Problems stand beside the profile in plain CSV, and are held to its counts.
#[test]
fn problems_stand_beside_the_profile() {
    let mut profile = DataProfile { problems: vec![bad(3), bad(5)], ..small(4) };
    profile.problems[1].substitute = Some("sample 2".to_owned());
    let (directory, path) = written(&profile);
    let csv = directory.path().join("data_profile.problems.csv");
    assert_eq!(problems::path(&path), csv);
    assert_eq!(problems::path(Path::new("a/part.0")), Path::new("a/part.0.problems.csv"));
    let text = std::fs::read_to_string(&csv).unwrap();
    assert_eq!(
        text,
        "source,position,file,offset,id,fault,cause,substitute,file_index,length\n\
         a.json,3,data/a.json,7,,media_missing,\"no `x, \"\"y\"\".jpg`\\nat all\",,0,8\n\
         a.json,5,data/a.json,7,,media_missing,\"no `x, \"\"y\"\".jpg`\\nat all\",sample 2,0,8\n"
    );
    let refused = |text: &str| {
        std::fs::write(&csv, text).unwrap();
        table::read(&path).unwrap_err().to_string().replace(&*directory.path().to_string_lossy(), "D")
    };
    let lines: Vec<_> = text.split_inclusive('\n').collect();
    assert_eq!(
        refused(&lines[..2].concat()),
        "`D/data_profile.parquet` is not a data_profile: it was written with other problems than \
         `D/data_profile.problems.csv` holds: 2 (media_missing 2), found 1 (media_missing 1)"
    );
    assert_eq!(
        refused(&text.replacen("media_missing", "lost", 1)),
        "`D/data_profile.problems.csv` is not a table of problems: line 2: fault: `lost`, must be one that dflop knows"
    );
    assert!(
        refused(&text.replace("data/a.json", "b")).contains("line 2: file: `b`, the file of file_index is")
    );
    assert!(refused("a,b\n1,2\n").contains("its columns must be source,position,"));
    std::fs::remove_file(&csv).unwrap();
    assert!(matches!(table::read(&path), Err(ArtifactError::Missing { .. })));

    std::fs::write(&csv, text).unwrap();
    assert_eq!(table::read(&path).unwrap(), as_shown(profile));
    table::write(&path, &small(4)).unwrap();
    assert_eq!(names(directory.path()), [table::FILE_NAME], "no problem, no table");
}

/// Links stay, and what they lead to has its problems beside it under each name.
#[cfg(unix)]
#[test]
fn a_profile_is_written_where_links_lead() {
    let directory = tempfile::tempdir().unwrap();
    let place = |name: &str| directory.path().join(name);
    std::fs::create_dir(place("far")).unwrap();
    std::os::unix::fs::symlink("far/profile.parquet", place("link.parquet")).unwrap();
    for count in [1, 2] {
        let profile = DataProfile { problems: (0..count).map(bad).collect(), ..small(5) };
        table::write(&place("link.parquet"), &profile).unwrap();
        for name in ["link.parquet", "far/profile.parquet"] {
            assert_eq!(table::read(&place(name)).unwrap().problems.len() as u64, count);
        }
    }
    assert!(place("link.parquet").is_symlink());
    assert_eq!(names(directory.path()), ["far", "link.parquet"]);
    assert_eq!(names(&place("far")), ["profile.parquet", "profile.problems.csv"]);
}

/// A dataset is a Parquet table, too; a data profile that is damaged may be replaced.
#[test]
fn a_table_of_something_else_is_not_replaced() {
    let (directory, path) = written(&small(5));
    let others = directory.path().join("dataset.parquet");
    let column: arrow_array::ArrayRef = Arc::new(arrow_array::Int64Array::from(vec![1, 2]));
    let batch = arrow_array::RecordBatch::try_from_iter([("id", column)]).unwrap();
    let file = std::fs::File::create(&others).unwrap();
    let mut writer = parquet::arrow::ArrowWriter::try_new(file, batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
    let before = std::fs::read(&others).unwrap();
    let refused = table::write(&others, &small(5)).unwrap_err().to_string();
    assert!(
        refused.contains("it is a Parquet table of something else, must be another data_profile"),
        "{refused}"
    );
    assert_eq!(std::fs::read(&others).unwrap(), before);
    assert_eq!(names(directory.path()), [table::FILE_NAME, "dataset.parquet"]);

    let whole = std::fs::read(&path).unwrap();
    std::fs::write(&path, &whole[..whole.len() / 2]).unwrap();
    table::write(&path, &small(5)).unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), whole);
}

/// What counts as content, and what does not.
#[test]
fn the_content_hash_is_of_rows_and_what_made_them() {
    let profile = small(5);
    let hash = profile.content_hash();
    let elsewhere = DataProfile { files: Vec::new(), problems: vec![bad(1)], ..profile.clone() };
    assert_eq!(elsewhere.content_hash(), hash);
    let mut changed = vec![DataProfile { family: "x".to_owned(), ..profile.clone() }];
    changed.push(DataProfile { samples: profile.samples[..4].to_vec(), ..profile.clone() });
    for change in [
        (|s: &mut ProfiledSample| s.id.push('x')) as fn(&mut ProfiledSample),
        |s| s.shape.encoder_segments[0].count += 1,
        |s| s.shape.encoder_parts.clear(),
        |s| s.shape.label_tokens += 1,
        |s| s.kind = SampleKind::Video,
        |s| s.media_hash += 1,
        |s| s.place.len += 1,
    ] {
        let mut other = profile.clone();
        change(&mut other.samples[4]);
        changed.push(other);
    }
    for other in changed {
        assert_ne!(other.content_hash(), hash);
    }
}

/// A profile made before there were parts is read, its samples as one part each, under the hash that plans carry.
#[test]
fn a_profile_without_parts_is_read() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../fixtures/profiles/data_profile_without_parts.parquet");
    let profile = table::read(&path).unwrap();
    assert_eq!(profile.samples.len(), 24);
    let kinds = |kind| profile.samples.iter().filter(|s| s.kind == kind).count();
    assert_eq!((kinds(SampleKind::Video), kinds(SampleKind::MultiImage), kinds(SampleKind::Text)), (5, 3, 4));
    for ProfiledSample { kind, shape, .. } in &profile.samples {
        assert!(shape.encoder_parts.is_empty());
        assert_eq!(shape.num_parts(), u32::from(*kind != SampleKind::Text));
    }
    // `read` compares the hash of what it reads with that of the file; written anew, it stands in the new table too.
    let (directory, again) = written(&profile);
    assert_eq!(table::read(&again).unwrap(), profile);
    assert_eq!(names(directory.path()), [table::FILE_NAME]);
    assert_eq!(table::rows(&path).unwrap().count(), 24);
}

/// A profile made before segments named the encoder that reads them: all are of the first.
#[test]
fn a_profile_without_towers_is_read() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../fixtures/profiles/data_profile_without_towers.parquet");
    let profile = table::read(&path).unwrap();
    assert_eq!(profile.samples.len(), 24);
    let mut segments = profile.samples.iter().flat_map(|sample| &sample.shape.encoder_segments);
    assert!(segments.clone().count() >= 18 && segments.all(|group| group.tower == Tower::First));
    assert!(profile.samples.iter().any(|sample| !sample.shape.encoder_parts.is_empty()));
    // Its content hash is the same in the new form, which is another table.
    let (_directory, again) = written(&profile);
    assert_eq!(table::read(&again).unwrap(), profile);
}
