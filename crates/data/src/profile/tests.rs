//! The driver on the demo's data and on small sets of text.

#![allow(clippy::unwrap_used, reason = "a test may give up, its helpers too")]

use super::*;
use crate::demo;
use crate::profile::dataset::Dataset;
use crate::source::location::MediaPlace;
use dflop_types::{Fault, ProfilePart, SampleIndex, SampleKind, Stratum};
use proptest::prelude::*;
use std::fmt::Write as _;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};
use tempfile::TempDir;

fn made(num_samples: u32) -> (TempDir, ProfileSettings) {
    let dir = tempfile::tempdir().unwrap();
    demo::write(dir.path(), 0, num_samples, |_, _| {}).unwrap();
    let settings = ProfileSettings::new(dir.path().join("data/mixture.yaml"), dir.path().join("model"));
    (dir, settings)
}

/// Text samples in one file a list of texts; an empty text is a broken record.
fn texts(sources: &[&[&str]]) -> (TempDir, ProfileSettings) {
    let (dir, mut settings) = made(1);
    let mut mixture = "datasets:\n".to_owned();
    for (index, texts) in sources.iter().enumerate() {
        let lines = texts.iter().map(|text| match *text {
            "" => "{\"id\": 3\n".to_owned(),
            text => format!(
                "{{\"conversations\": [{{\"from\": \"human\", \"value\": \"{text}\"}}, \
                 {{\"from\": \"gpt\", \"value\": \"yes\"}}]}}\n"
            ),
        });
        std::fs::write(dir.path().join(format!("data/t{index}.jsonl")), lines.collect::<String>()).unwrap();
        let _ = writeln!(mixture, "- json_path: t{index}.jsonl");
    }
    settings.mixture = dir.path().join("data/texts.yaml");
    // Sets are small here, and one bad sample of them a large share.
    settings.bad_samples_max_percent = Some(100.0);
    std::fs::write(&settings.mixture, mixture).unwrap();
    (dir, settings)
}

fn rows(settings: &ProfileSettings) -> Result<(ProfiledRows, DataProfile), DataError> {
    again(settings, None)
}

fn again(
    settings: &ProfileSettings,
    previous: Option<&DataProfile>,
) -> Result<(ProfiledRows, DataProfile), DataError> {
    let mut samples = Vec::new();
    let outcome = profile_into(settings, previous.map(Previous::new), &mut samples, &|_| {})?;
    let profile = DataProfile { samples, ..outcome.header.clone() };
    Ok((outcome, profile))
}

#[test]
fn rows_do_not_depend_on_chunks_or_threads() {
    let (_dir, settings) = made(48);
    let whole = profile(&settings, &|_, _| {}).unwrap().profile;
    for (records, bytes) in [(1, 1 << 20), (5, 1 << 20), (1000, 1), (1000, 3000), (48, 1 << 20)] {
        let mut samples = Vec::new();
        let limits = Limits { records, bytes };
        let outcome = profile_in_chunks(&settings, None, &mut samples, &|_| {}, limits).unwrap();
        assert_eq!(outcome.statistics, Statistics::new(&whole));
        assert_eq!(DataProfile { samples, ..outcome.header }, whole);
    }
}

#[test]
fn progress_ends_with_everything() {
    let (_dir, settings) = made(24);
    let last = std::sync::Mutex::new(Progress::default());
    profile_into(&settings, None, &mut Vec::new(), &|at| {
        let mut last = last.lock().unwrap();
        if at.samples > last.samples {
            *last = at;
        }
    })
    .unwrap();
    let last = last.into_inner().unwrap();
    assert_eq!((last.samples, last.num_samples), (24, None), "nothing was counted");
    assert!(last.bytes <= last.num_bytes && last.bytes > last.num_bytes * 9 / 10, "{last:?}");

    let sampled = ProfileSettings { sample: Some(9), ..settings };
    let seen = AtomicU64::new(0);
    profile_into(&sampled, None, &mut Vec::new(), &|at| {
        assert_eq!(at.num_samples, Some(9));
        seen.fetch_add(1, Ordering::Relaxed);
    })
    .unwrap();
    assert_eq!(seen.into_inner(), 9);
}

#[test]
fn a_sink_that_refuses_ends_the_profile() {
    struct Full;
    impl RowSink for Full {
        fn push(&mut self, _: &ProfiledSample) -> Result<(), DataError> {
            Err(DataError::Record("full".to_owned()))
        }
    }
    let (_dir, settings) = made(16);
    let limits = Limits { records: 1, bytes: 1 };
    let error = profile_in_chunks(&settings, None, &mut Full, &|_| {}, limits).unwrap_err();
    assert_eq!(error.to_string(), "full");
}

#[test]
fn only_what_changed_is_measured() {
    let (dir, settings) = made(48);
    let (first, before) = rows(&settings).unwrap();
    assert_eq!((first.num_samples, first.num_reused), (48, 0));
    let (second, same) = again(&settings, Some(&before)).unwrap();
    assert_eq!((second.num_reused, &same), (48, &before));
    assert_eq!(second.statistics, first.statistics);

    let dataset = Dataset::open(&settings, before.clone()).unwrap();
    let image = before.samples.iter().position(|sample| sample.kind == SampleKind::Image).unwrap();
    let image = dataset.encode(SampleIndex(image as u32)).unwrap().media[0].place.to_string();
    let later = SystemTime::now() + Duration::from_secs(7);
    std::fs::File::options().write(true).open(&image).unwrap().set_modified(later).unwrap();
    let (touched, after) = again(&settings, Some(&before)).unwrap();
    assert_eq!(touched.num_reused, 47);
    let changed = before.samples.iter().zip(&after.samples).filter(|(old, new)| old != new);
    assert_eq!(changed.count(), 1);

    let path = dir.path().join("data/images.jsonl");
    let text = std::fs::read_to_string(&path).unwrap();
    let line = r#"{"conversations": [{"from": "human", "value": "new"}]}"#;
    std::fs::write(&path, format!("{line}\n{text}")).unwrap();
    let (inserted, with_line) = again(&settings, Some(&after)).unwrap();
    assert_eq!((inserted.num_samples, inserted.num_reused), (49, 48));
    assert_eq!(with_line, rows(&settings).unwrap().1, "as if measured anew");

    // What decides the choice of samples changes no shape; what decides shapes changes all.
    let skipping = ProfileSettings { on_bad_sample: OnBadSample::Skip, seed: 3, ..settings.clone() };
    assert_eq!(again(&skipping, Some(&with_line)).unwrap().0.num_reused, 49);
    let frames = ProfileSettings { video_max_frames: Some(2), ..settings.clone() };
    let (outcome, _) = again(&frames, Some(&with_line)).unwrap();
    assert_eq!(outcome.num_reused, 0);
    assert!(outcome.notices[0].contains("another `video_max_frames`"), "{:?}", outcome.notices);
    let tokenizer = settings.model_dir.join("tokenizer.json");
    let text = std::fs::read_to_string(&tokenizer).unwrap();
    std::fs::write(&tokenizer, format!("{text} ")).unwrap();
    let (outcome, _) = again(&settings, Some(&with_line)).unwrap();
    assert_eq!(outcome.num_reused, 0);
    assert!(outcome.notices[0].contains("another `tokenizer`"), "{:?}", outcome.notices);
}

#[test]
fn an_earlier_profile_that_breaks_off_is_told() {
    let (_dir, settings) = texts(&[&["a", "b"]]);
    let (_, before) = rows(&settings).unwrap();
    let broken = Previous {
        rows: Box::new(std::iter::once(Err(DataError::Record("row 1 is broken".to_owned())))),
        ..Previous::new(&before)
    };
    let outcome = profile_into(&settings, Some(broken), &mut Vec::new(), &|_| {}).unwrap();
    assert_eq!(outcome.num_reused, 0);
    assert!(outcome.notices[0].contains("row 1 is broken"), "{:?}", outcome.notices);
}

#[test]
fn a_neighbour_stands_in_for_a_bad_sample() {
    let (_dir, mut settings) =
        texts(&[&["", "", "one word", "three words here", "", ""], &["", ""], &["x", ""]]);
    settings.on_bad_sample = OnBadSample::Substitute;
    let (outcome, profile) = rows(&settings).unwrap();
    let found: Vec<_> =
        profile.samples.iter().map(|s| (s.source, s.position, s.id.as_str(), s.place.file)).collect();
    assert_eq!(
        found,
        [
            (0, 0, "t0.jsonl#2", 0),
            (0, 1, "t0.jsonl#2", 0),
            (0, 2, "t0.jsonl#2", 0),
            (0, 3, "t0.jsonl#3", 0),
            (0, 4, "t0.jsonl#3", 0),
            (0, 5, "t0.jsonl#3", 0),
            (2, 0, "t2.jsonl#0", 2),
            (2, 1, "t2.jsonl#0", 2)
        ]
    );
    let substitutes: Vec<_> = profile.problems.iter().map(|p| p.substitute.as_deref()).collect();
    let (two, three) = (Some("t0.jsonl#2"), Some("t0.jsonl#3"));
    assert_eq!(substitutes, [two, two, three, three, None, None, Some("t2.jsonl#0")]);
    assert_eq!((outcome.num_samples, outcome.statistics.num_samples), (10, 8));
    let text = crate::statistics::summary::text_of(&outcome.header, &outcome.statistics, &[]);
    assert!(
        text.contains("replaced by a neighbour: 5 samples") && text.contains("left out: 2 samples"),
        "{text}"
    );

    let dataset = Dataset::open(&settings, profile).unwrap();
    let encoded = |index| dataset.encode(SampleIndex(index)).unwrap();
    assert_eq!(encoded(0), encoded(2));
    assert_eq!(encoded(5), encoded(3));
    assert_ne!(encoded(2), encoded(3));
}

#[test]
fn failing_lists_all_and_names_the_files() {
    let (_dir, settings) = texts(&[&["a"], &[""; 30]]);
    let error = rows(&settings).unwrap_err();
    let DataError::Samples { problems, num_samples: 31, files } = &error else { panic!("{error}") };
    assert_eq!((problems.len(), files.len()), (30, 2));
    assert!(problems.iter().all(|problem| problem.place.unwrap().file == 1));
    assert!(error.to_string().ends_with("and 10 more\n  by fault: record 30"), "{error}");
    let dir = tempfile::tempdir().unwrap();
    let table = crate::table::problems::write(&dir.path().join("p.parquet"), problems, files).unwrap();
    let table = std::fs::read_to_string(table).unwrap();
    assert_eq!(table.lines().count(), 31);
    assert!(table.contains("t1.jsonl,0,") && table.contains(",record,"), "{table}");
}

#[test]
fn a_sample_that_turns_bad_says_what_to_do() {
    let (_dir, settings) = made(24);
    let (_, profile) = rows(&settings).unwrap();
    let index = profile.samples.iter().position(|sample| sample.kind == SampleKind::Image).unwrap();
    let dataset = Dataset::open(&settings, profile).unwrap();
    let sample = dataset.encode(SampleIndex(index as u32)).unwrap();
    let image = sample.media[0].place.to_string();
    std::fs::remove_file(&image).unwrap();
    let error = dataset.encode(SampleIndex(index as u32)).unwrap_err();
    assert!(matches!(&error, DataError::TurnedBad { fault: Fault::MediaMissing, .. }), "{error}");
    let text = format!("{error} {}", dflop_types::Hint::hint(&error).unwrap());
    for part in [&sample.id, &image, "images.jsonl", "No such file", "`dflop profile data`"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn a_sample_is_drawn_of_each_source_and_says_so() {
    let many: Vec<String> = (1..=90).map(|n| "word ".repeat(n)).collect();
    let many: Vec<&str> = many.iter().map(|text| text.trim_end()).collect();
    let (_dir, settings) = texts(&[&many, &["few", "words"], &[]]);
    let (_, whole) = rows(&settings).unwrap();
    let sampled = ProfileSettings { sample: Some(23), seed: 5, ..settings.clone() };
    let (outcome, profile) = rows(&sampled).unwrap();
    let stratum = |population, drawn| Stratum { population, drawn };
    assert_eq!(profile.strata, [stratum(90, 22), stratum(2, 1), stratum(0, 0)]);
    assert_eq!(profile.samples.len(), 23);
    assert!(profile.samples.iter().all(|sample| whole.samples.contains(sample)));
    assert!(
        profile
            .samples
            .windows(2)
            .all(|pair| { (pair[0].source, pair[0].position) < (pair[1].source, pair[1].position) })
    );
    assert_eq!(rows(&sampled).unwrap().1, profile);
    assert_ne!(rows(&ProfileSettings { seed: 6, ..sampled.clone() }).unwrap().1.samples, profile.samples);
    assert_eq!(outcome.statistics.num_population, Some(92));
    assert_eq!(outcome.statistics, Statistics::new(&profile));
    let llm = &outcome.statistics.distributions[1];
    let truth = Statistics::new(&whole).distributions[1].clone();
    let half = llm.intervals.as_ref().unwrap().mean_half_width.unwrap();
    assert!((llm.mean - truth.mean).abs() < 2.0 * half, "{} {half} {}", llm.mean, truth.mean);

    let error = Dataset::open(&settings, profile).unwrap_err().to_string();
    assert_eq!(error, "the data profile holds 23 samples drawn of 92, training needs every one");
    let error = rows(&ProfileSettings { sample: Some(1), ..settings.clone() }).unwrap_err().to_string();
    assert_eq!(error, "`--sample`: 1 samples, at least 1 of each of the 2 sources is needed");
    // As many as there are, and more: all of them, which train.
    for number in [92, 500] {
        let (_, all) = rows(&ProfileSettings { sample: Some(number), ..settings.clone() }).unwrap();
        assert_eq!(all, whole);
        Dataset::open(&settings, all).unwrap();
    }
}

#[test]
fn a_part_leaves_its_bad_samples_undecided() {
    let (_dir, settings) = texts(&[&["a", "", "b", "c"]]);
    let part = |index, policy| {
        let part = Some(ProfilePart { index, num_parts: 2 });
        rows(&ProfileSettings { part, on_bad_sample: policy, ..settings.clone() })
    };
    for policy in [OnBadSample::Fail, OnBadSample::Substitute] {
        let (_, first) = part(0, policy).unwrap();
        assert_eq!((first.samples.len(), first.problems.len()), (1, 1));
        assert_eq!(first.problems[0].substitute, None);
        assert!(matches!(Dataset::open(&settings, first), Err(DataError::IsPart { .. })));
        assert_eq!(part(1, policy).unwrap().1.samples.len(), 2);
    }
    let error = part(2, OnBadSample::Fail).unwrap_err().to_string();
    assert_eq!(error, "`--shard`: 2/2, parts are counted from 0: must be below 2");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    #[test]
    fn parts_in_order_are_the_whole(sizes in prop::collection::vec(0_usize..7, 1..4), num_parts in 1_u32..5) {
        let words: Vec<Vec<String>> = sizes
            .iter()
            .map(|&size| (0..size).map(|n| if n % 3 == 1 { String::new() } else { "w ".repeat(n) + "w" }).collect())
            .collect();
        let words: Vec<Vec<&str>> = words.iter().map(|list| list.iter().map(String::as_str).collect()).collect();
        let lists: Vec<&[&str]> = words.iter().map(Vec::as_slice).collect();
        let (_dir, mut settings) = texts(&lists);
        settings.on_bad_sample = OnBadSample::Skip;
        prop_assume!(sizes.iter().any(|&size| size > 0));
        let (_, whole) = rows(&settings).unwrap();
        let (mut samples, mut problems) = (Vec::new(), Vec::new());
        for source in 0..sizes.len() as u32 {
            for index in 0..num_parts {
                let part = Some(ProfilePart { index, num_parts });
                let (_, part) = rows(&ProfileSettings { part, ..settings.clone() }).unwrap();
                prop_assert_eq!(&part.files, &whole.files);
                samples.extend(part.samples.into_iter().filter(|sample| sample.source == source));
                problems.extend(
                    part.problems.into_iter().filter(|problem| problem.place.unwrap().file == source),
                );
            }
        }
        prop_assert_eq!(samples, whole.samples);
        prop_assert_eq!(problems, whole.problems);
    }
}

#[test]
fn fields_that_are_not_read_are_told_by_source() {
    let (dir, mut settings) = made(1);
    let line = |more: &str| format!("{{\"question\": \"a\", \"answer\": \"b\"{more}}}\n");
    let write = |name: &str, lines: &[String]| std::fs::write(dir.path().join(name), lines.concat()).unwrap();
    let many = [0, 1, 2, 3, 4, 5, 6].map(|n| format!(", \"f{n}\": 1")).concat();
    write("t.jsonl", &[line(", \"url\": \"x.jpg\""), line(&many), line(", \"f3\": 2"), line("")]);
    write("u.jsonl", &[line("")]);
    settings.mixture = dir.path().join("m.yaml");
    let mixture = |more: &str| format!("datasets:\n- path: t.jsonl\n{more}- path: u.jsonl\n");
    std::fs::write(&settings.mixture, mixture("")).unwrap();
    let (outcome, before) = rows(&settings).unwrap();
    let told = "`t.jsonl`, not read: `url` (1 record), `f3` (2 records), `f0` (1 record), `f1` (1 record), \
                `f2` (1 record) and 3 more; where `url` holds media, give it our name in the mixture, \
                `columns: {image: url}`, or list it under `ignore` there";
    assert_eq!(outcome.notices, [told]);
    // Rows that are taken over are told of too.
    assert_eq!(again(&settings, Some(&before)).unwrap().0.notices, [told]);

    std::fs::write(&settings.mixture, mixture("  ignore: [url, f0, f1, f2, f3, f4, f5]\n")).unwrap();
    assert_eq!(rows(&settings).unwrap().0.notices, ["`t.jsonl`, not read: `f6` (1 record)"]);
}

#[test]
fn media_under_an_unknown_name_are_bad_samples() {
    let (dir, mut settings) = made(1);
    settings.mixture = dir.path().join("t.jsonl");
    let line = "{\"question\": \"a\", \"answer\": \"b\"";
    std::fs::write(&settings.mixture, format!("{line}, \"img\": \"a.jpg\"}}\n{line}}}\n")).unwrap();
    let error = rows(&settings).unwrap_err().to_string();
    assert!(error.contains("line 1: `img` is `a.jpg`, media under this name are not read"), "{error}");
    let parts = [0, 1].map(|index| {
        let part = ProfilePart { index, num_parts: 2 };
        rows(&ProfileSettings { part: Some(part), ..settings.clone() }).unwrap().1
    });
    assert_eq!(parts.map(|part| part.problems.len()), [1, 0], "a part leaves it to the merge");
    settings.on_bad_sample = OnBadSample::Skip;
    let (_, profile) = rows(&settings).unwrap();
    assert_eq!((profile.samples.len(), profile.problems[0].fault), (1, Fault::Record));
}

/// The same picture in a file and inside the record: one shape, the same bytes in training, and a change is noticed.
#[test]
fn a_medium_inside_its_record_is_measured_and_read_as_a_file_is() {
    use base64::Engine as _;
    let (dir, mut settings) = made(24);
    let (_, profile) = rows(&settings).unwrap();
    let index = profile.samples.iter().position(|sample| sample.kind == SampleKind::Image).unwrap();
    let dataset = Dataset::open(&settings, profile).unwrap();
    let picture = dataset.encode(SampleIndex(index as u32)).unwrap().media[0].place.to_string();
    let bytes = std::fs::read(&picture).unwrap();
    settings.mixture = dir.path().join("inside.jsonl");
    let write = |bytes: &[u8]| {
        let packed = base64::engine::general_purpose::STANDARD.encode(bytes);
        let line =
            |image: &str| format!("{{\"image\": \"{image}\", \"question\": \"a\", \"answer\": \"b\"}}\n");
        let lines = line(&picture) + &line(&format!("data:image/jpeg;base64,{packed}"));
        std::fs::write(&settings.mixture, lines).unwrap();
    };
    write(&bytes);
    let (_, profile) = rows(&settings).unwrap();
    assert_eq!(profile.samples[0].shape, profile.samples[1].shape);
    let dataset = Dataset::open(&settings, profile.clone()).unwrap();
    let place = dataset.encode(SampleIndex(1)).unwrap().media[0].place.clone();
    assert!(matches!(&place, MediaPlace::Bytes { bytes: read, .. } if read[..] == bytes[..]), "{place}");
    write(&[&bytes[..], b"x"].concat());
    let (outcome, _) = again(&settings, Some(&profile)).unwrap();
    assert_eq!(outcome.num_reused, 1, "the file is as it was");
}

#[test]
fn columns_that_are_not_read_are_told() {
    use arrow_array::{ArrayRef, BinaryArray, RecordBatch, StringArray};
    let (dir, mut settings) = made(1);
    settings.mixture = dir.path().join("t.parquet");
    let write = |bytes: &str| {
        let text = || -> ArrayRef { std::sync::Arc::new(StringArray::from(vec!["a", "b"])) };
        let cells: ArrayRef = std::sync::Arc::new(BinaryArray::from_vec(vec![b"x", b"y"]));
        let columns = [("query", text()), ("answer", text()), ("source", text()), (bytes, cells)];
        let batch =
            RecordBatch::try_from_iter(columns.into_iter().filter(|(name, _)| !name.is_empty())).unwrap();
        let file = std::fs::File::create(&settings.mixture).unwrap();
        let mut writer = parquet::arrow::ArrowWriter::try_new(file, batch.schema(), None).unwrap();
        writer.write(&batch).unwrap();
        writer.close().unwrap();
    };
    write("");
    assert_eq!(rows(&settings).unwrap().0.notices, ["`t.parquet`, not read: `source` (2 records)"]);
    write("img");
    let error = rows(&settings).unwrap_err().to_string();
    assert!(error.contains("column `img` holds bytes, and no column that is read holds media"), "{error}");
}
