//! Data that attack, odd files and faults: each gets an answer that says what is wrong, within bounds.

#![allow(clippy::unwrap_used, reason = "a test may give up, its helpers too")]

use arrow_array::{ArrayRef, RecordBatch, StringArray};
use arrow_ipc::MetadataVersion;
use arrow_ipc::writer::{FileWriter, IpcWriteOptions};
use dflop_data::dataset::Dataset;
use dflop_data::family::{Callable, GivenFamily, Marks, MediaShape, Piece};
use dflop_data::location::Location;
use dflop_data::mixture::Source;
use dflop_data::probe::{MediaKind, probe, probe_bytes};
use dflop_data::profile::{
    OnBadSample, OnChangedMedia, ProfileOutcome, ProfileSettings, profile, profile_into,
};
use dflop_data::readers::{self, Body};
use dflop_data::store::Stores;
use dflop_data::{DataError, demo};
use dflop_types::{EncoderSegments, Hint as _, SampleIndex};
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::WriterProperties;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tempfile::TempDir;

/// The demo's model, and a mixture of one file with these lines; media stand beside it.
fn made(lines: &[String]) -> (TempDir, ProfileSettings) {
    let dir = tempfile::tempdir().unwrap();
    demo::write(dir.path(), 0, 1, |_, _| {}).unwrap();
    let settings = ProfileSettings::new(dir.path().join("data/own.jsonl"), dir.path().join("model"));
    std::fs::write(&settings.mixture, lines.join("\n")).unwrap();
    (dir, settings)
}

fn record(id: usize, kind: &str, file: &str) -> String {
    format!(
        r#"{{"id": "{id}", "{kind}": "{file}", "conversations": [{{"from": "human", "value": "<{kind}>\nwhat"}}, {{"from": "gpt", "value": "a cup"}}]}}"#
    )
}

fn text(id: usize) -> String {
    format!(r#"{{"id": "{id}", "question": "what", "answer": "a cup"}}"#)
}

fn run(settings: &ProfileSettings) -> Result<ProfileOutcome, DataError> {
    profile(settings, &|_, _| {})
}

/// A PNG of this size; its pixels, where it has any, are `pixels` as they stand in the file.
fn png(width: u32, height: u32, pixels: &[u8]) -> Vec<u8> {
    let mut bytes = b"\x89PNG\r\n\x1a\n".to_vec();
    let mut chunk = |kind: &[u8], body: &[u8]| {
        bytes.extend((body.len() as u32).to_be_bytes());
        bytes.extend([kind, body, &[0; 4]].concat());
    };
    chunk(b"IHDR", &[&width.to_be_bytes()[..], &height.to_be_bytes(), &[1, 0, 0, 0, 0]].concat());
    chunk(b"IDAT", pixels);
    chunk(b"IEND", b"");
    bytes
}

/// A box of an MP4 file.
fn boxed(kind: &[u8], body: &[u8]) -> Vec<u8> {
    [&(body.len() as u32 + 8).to_be_bytes()[..], kind, body].concat()
}

/// An MP4 of one video track of 4 x 4 pixels whose media header claims `seconds`.
fn mp4(seconds: u64) -> Vec<u8> {
    let zeros = |n: usize| vec![0_u8; n];
    let long = [1, 0, 0, 0];
    let movie = [&long[..], &zeros(16), &1_u32.to_be_bytes(), &seconds.to_be_bytes(), &zeros(80)].concat();
    let times = [&long[..], &zeros(16), &1_u32.to_be_bytes(), &seconds.to_be_bytes(), &zeros(4)].concat();
    let tkhd = [&long[..], &zeros(84), &(4_u32 << 16).to_be_bytes(), &(4_u32 << 16).to_be_bytes()].concat();
    let hdlr = [&zeros(8)[..], b"vide", &zeros(12)].concat();
    let entry = boxed(b"avc1", &[&zeros(24)[..], &[0, 4, 0, 4], &zeros(50)].concat());
    let stsd = boxed(b"stsd", &[&zeros(4)[..], &1_u32.to_be_bytes(), &entry].concat());
    // One frame that lasts for no time: the media header says how long all of it is.
    let stts =
        boxed(b"stts", &[&zeros(4)[..], &1_u32.to_be_bytes(), &1_u32.to_be_bytes(), &zeros(4)].concat());
    let minf = boxed(b"minf", &boxed(b"stbl", &[stsd, stts].concat()));
    let mdia = boxed(b"mdia", &[boxed(b"mdhd", &times), boxed(b"hdlr", &hdlr), minf].concat());
    let trak = boxed(b"trak", &[boxed(b"tkhd", &tkhd), mdia].concat());
    let moov = boxed(b"moov", &[boxed(b"mvhd", &movie), trak].concat());
    [boxed(b"ftyp", b"isom\0\0\0\0"), moov].concat()
}

/// Two videos of 1.8e16 seconds have no sum in milliseconds: they are bad samples under every policy, and no panic.
#[test]
fn videos_of_centuries_are_bad_samples() {
    let sane = probe_bytes(Path::new("a.mp4"), &mp4(7)).unwrap();
    assert_eq!((sane.duration_s, sane.frames, sane.width), (Some(7.0), Some(1), Some(4)));
    let mut lines: Vec<String> = (0..2).map(|id| record(id, "video", &format!("{id}.mp4"))).collect();
    lines.push(text(2));
    let (dir, mut settings) = made(&lines);
    for id in 0..2 {
        std::fs::write(dir.path().join(format!("data/{id}.mp4")), mp4(u64::MAX / 1000)).unwrap();
    }
    let error = run(&settings).unwrap_err().to_string();
    assert!(error.starts_with("2 of 3 samples cannot be used"), "{error}");
    assert!(error.contains("its duration is 1.844674407370955e16 s, must be at most 1e7"), "{error}");
    for policy in [OnBadSample::Skip, OnBadSample::Substitute] {
        settings.on_bad_sample = policy;
        let outcome = run(&settings).unwrap();
        assert_eq!(outcome.profile.problems.len(), 2);
    }
}

/// A valid picture that Pillow refuses to decode is a bad sample of the profile, not the end of training.
#[test]
fn a_picture_past_the_decoders_limit_is_a_bad_sample() {
    let (dir, settings) = made(&[record(0, "image", "big.png"), text(1)]);
    let big = png(20_000, 20_000, b"");
    std::fs::write(dir.path().join("data/big.png"), &big).unwrap();
    assert_eq!(probe_bytes(Path::new("big.png"), &big).unwrap().width, Some(20_000));
    let error = run(&settings).unwrap_err().to_string();
    let cause = "big.png` has 20000 x 20000 pixels, which Pillow, the decoder of training, refuses above 178956970 in all";
    assert!(error.contains(cause), "{error}");
}

fn pipe(path: &Path) {
    assert!(std::process::Command::new("mkfifo").arg(path).status().unwrap().success());
}

/// Pipes and devices in the place of a file are told, wherever one is expected; nobody waits for them.
#[test]
fn what_is_no_regular_file_is_refused_at_once() {
    let (dir, settings) = made(&[record(0, "image", "pipe.png"), text(1)]);
    let image = dir.path().join("data/pipe.png");
    pipe(&image);
    let rule = "it is a device, pipe or socket, must be a regular file";
    assert!(probe(&image).unwrap_err().to_string().ends_with(rule));
    let error = run(&settings).unwrap_err().to_string();
    assert!(error.contains(rule), "{error}");

    let named = |name: &str| {
        let path = dir.path().join(name);
        pipe(&path);
        path
    };
    let said = |settings: &ProfileSettings| run(settings).unwrap_err().to_string();
    for name in ["own.yaml", "own.json", "own.parquet", "own.arrow", "own.tar"] {
        let error = said(&ProfileSettings { mixture: named(name), ..settings.clone() });
        assert!(error.contains(rule), "{name}: {error}");
    }
    let template = ProfileSettings { chat_template: Some(named("own.jinja")), ..settings.clone() };
    assert!(said(&template).contains(rule));
    // A device that never ends, as a tokenizer.
    let tokenizer = dir.path().join("model/tokenizer.json");
    std::fs::remove_file(&tokenizer).unwrap();
    std::os::unix::fs::symlink("/dev/zero", &tokenizer).unwrap();
    assert!(
        said(&settings).ends_with("it is a device, pipe or socket, must be a regular file"),
        "{}",
        said(&settings)
    );
}

/// A column of one text of so many letters, packed by zstd.
fn packed_text(path: &Path, num_letters: usize) {
    let values: ArrayRef = Arc::new(StringArray::from(vec!["x".repeat(num_letters)]));
    let answers: ArrayRef = Arc::new(StringArray::from(vec!["a cup"]));
    let batch = RecordBatch::try_from_iter([("question", values), ("answer", answers)]).unwrap();
    let properties = WriterProperties::builder()
        .set_compression(Compression::ZSTD(ZstdLevel::try_new(3).unwrap()))
        .set_dictionary_enabled(false)
        .set_statistics_enabled(parquet::file::properties::EnabledStatistics::None)
        .build();
    let mut writer =
        ArrowWriter::try_new(File::create(path).unwrap(), batch.schema(), Some(properties)).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
}

/// A small file whose one cell unpacks to more than its bytes are worth is refused before it is unpacked.
#[test]
fn a_page_that_unpacks_to_far_more_than_it_is_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("bomb.parquet");
    packed_text(&path, 80 << 20);
    let file_bytes = std::fs::metadata(&path).unwrap().len();
    assert!(file_bytes < 16_000, "{file_bytes}");
    let stores = Stores::default();
    let reader = readers::open(&Source::new(Location::Local(path)), &stores).unwrap();
    let error = reader.records(&stores).unwrap().next().unwrap().unwrap_err().to_string();
    assert!(
        error.contains(" packed bytes claims 8388") && error.contains(" unpacked, must be at most "),
        "{error}"
    );
}

/// Arrow files begin with a magic word and zeros, up to byte 8 (pyarrow) or byte 64 (arrow-rs unless told otherwise).
#[test]
fn arrow_files_are_read_wherever_their_first_message_begins() {
    let values: ArrayRef = Arc::new(StringArray::from(vec!["what", "who"]));
    let batch = RecordBatch::try_from_iter([("question", values.clone()), ("answer", values)]).unwrap();
    let dir = tempfile::tempdir().unwrap();
    for alignment in [8, 64] {
        let path = dir.path().join(format!("{alignment}.arrow"));
        let options = IpcWriteOptions::try_new(alignment, false, MetadataVersion::V5).unwrap();
        let file = File::create(&path).unwrap();
        let mut writer = FileWriter::try_new_with_options(file, &batch.schema(), options).unwrap();
        writer.write(&batch).unwrap();
        writer.write(&batch).unwrap();
        writer.finish().unwrap();
        let bytes = std::fs::read(&path).unwrap();
        assert!(bytes[8..alignment].iter().all(|&byte| byte == 0));
        assert_ne!(bytes[alignment..alignment + 4], [0; 4]);
        let stores = Stores::default();
        let reader = readers::open(&Source::new(Location::Local(path)), &stores).unwrap();
        let records: Vec<_> = reader.records(&stores).unwrap().map(Result::unwrap).collect();
        assert_eq!(records.len(), 4, "aligned to {alignment}");
        assert!(records.iter().all(|record| matches!(record.body, Body::Fields(_))));
    }
}

/// A row with more text than a record of JSON may have is a bad sample; so is a text of more bytes than a tokenizer has
/// memory for.
#[test]
fn texts_of_tables_and_texts_for_tokenizers_are_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("long.arrow");
    let values: ArrayRef = Arc::new(StringArray::from(vec!["x".repeat((64 << 20) + 1), "y".to_owned()]));
    let batch = RecordBatch::try_from_iter([("question", values.clone()), ("answer", values)]).unwrap();
    let mut writer =
        arrow_ipc::writer::StreamWriter::try_new(File::create(&path).unwrap(), &batch.schema()).unwrap();
    writer.write(&batch).unwrap();
    writer.finish().unwrap();
    let stores = Stores::default();
    let reader = readers::open(&Source::new(Location::Local(path)), &stores).unwrap();
    let records: Vec<_> = reader.records(&stores).unwrap().map(Result::unwrap).collect();
    let Body::Unsound(cause) = &records[0].body else { panic!("{:?}", records[0].place) };
    assert_eq!(
        cause,
        "row 0, column `question`: the row has 67108865 bytes of text or more, must have at most 67108864"
    );
    assert!(matches!(records[1].body, Body::Fields(_)), "the next row is read");

    let long = format!(r#"{{"question": "{}", "answer": "y"}}"#, "word ".repeat((4 << 20) / 5 + 1));
    let (_dir, settings) = made(&[long, text(1)]);
    let error = run(&settings).unwrap_err().to_string();
    assert!(error.contains("its text has 4194306 bytes, must have at most 4194304"), "{error}");
}

/// Forty samples, each with the same picture.
fn pictures(dir: &Path, bytes: &[u8]) -> PathBuf {
    let path = dir.join("data/a.png");
    std::fs::write(&path, bytes).unwrap();
    path
}

/// Pixels that changed while size and shape stayed are noticed when the sample is read; the setting decides.
#[test]
fn pixels_that_changed_are_noticed() {
    let (dir, settings) = made(&[record(0, "image", "a.png")]);
    let path = pictures(dir.path(), &png(90, 60, b"these pixels"));
    let outcome = run(&settings).unwrap();
    let open = |settings: &ProfileSettings| Dataset::open(settings, outcome.profile.clone()).unwrap();
    let read = |settings: &ProfileSettings| open(settings).encode(SampleIndex(0));
    assert_eq!(read(&settings).unwrap().notice, None);

    // Only copied: told, and trained.
    let later = SystemTime::now() + Duration::from_secs(7);
    File::options().write(true).open(&path).unwrap().set_modified(later).unwrap();
    let notice = read(&settings).unwrap().notice.unwrap();
    assert!(
        notice.contains("a different time of change") && notice.contains("(4 blocks of 4096 bytes"),
        "{notice}"
    );

    // Other pixels of the same size, with the time of change that was profiled.
    std::fs::write(&path, png(90, 60, b"other pixels")).unwrap();
    let error = read(&settings).unwrap_err();
    assert!(
        error.to_string().contains("sample `0` is not as profiled: `media_hash (sampled bytes)` is "),
        "{error}"
    );
    assert!(error.hint().unwrap().contains("data.on_changed_media: warn"));
    let warned = ProfileSettings { on_changed_media: OnChangedMedia::Warn, ..settings };
    let notice = read(&warned).unwrap().notice.unwrap();
    assert!(notice.starts_with("sample `0` has other media than profiled: "), "{notice}");
}

/// The same of what stands after the first 4 KiB, with the time of change that was profiled: any byte of a small medium,
/// and the second half of a large one. A single byte of a large one may pass (docs/limits.md says so).
#[test]
fn changes_after_the_header_are_noticed() {
    let (dir, settings) = made(&[record(0, "image", "a.png")]);
    for (len, changed) in [(5_000, 4_999..5_000), (16_000, 9_000..9_001), (1_000_000, 500_000..1_000_000)] {
        let path = pictures(dir.path(), &png(90, 60, &vec![7; len]));
        let time = std::fs::metadata(&path).unwrap().modified().unwrap();
        let outcome = run(&settings).unwrap();
        let dataset = Dataset::open(&settings, outcome.profile).unwrap();
        assert_eq!(dataset.encode(SampleIndex(0)).unwrap().notice, None);
        let mut pixels = vec![7; len];
        pixels[changed].fill(8);
        std::fs::write(&path, png(90, 60, &pixels)).unwrap();
        File::options().write(true).open(&path).unwrap().set_modified(time).unwrap();
        let error = dataset.encode(SampleIndex(0)).unwrap_err().to_string();
        assert!(error.contains("`media_hash (sampled bytes)` is "), "{len}: {error}");
    }
}

/// A shape function of one's own, which fails as `answer` says.
fn own(answer: impl Fn() -> Result<MediaShape, String> + Send + Sync + 'static) -> GivenFamily {
    let marks = Marks {
        placeholder: "<image>".to_owned(),
        feature_token: "<image>".to_owned(),
        id_fields: &[],
        number: None,
    };
    GivenFamily::new(Callable::new("own:shape", "1", vec![(MediaKind::Image, marks)], move |_| answer()))
}

/// No policy goes on where no sample is at fault: a function of one's own that fails, a tokenizer without the token.
#[test]
fn faults_that_no_sample_has_end_the_profile() {
    let mut lines: Vec<String> = (0..100).map(text).collect();
    lines.push(record(100, "image", "a.png"));
    let (dir, mut settings) = made(&lines);
    pictures(dir.path(), &png(90, 60, b""));
    settings.on_bad_sample = OnBadSample::Skip;
    let with = |answer: Result<MediaShape, String>| {
        let settings = ProfileSettings { family: Some(own(move || answer.clone())), ..settings.clone() };
        run(&settings)
    };
    let error = with(Err("raised KeyError: 'fps'".to_owned())).unwrap_err();
    assert!(matches!(error, DataError::OfSettings { .. }), "{error}");
    assert!(
        error.to_string().ends_with(
            "no python shape for an image of 60 x 90 pixels (height x width): `own:shape` raised KeyError: 'fps'"
        ),
        "{error}"
    );
    let empty = MediaShape {
        num_tiles: 1,
        segments: Vec::new(),
        pieces: vec![Piece::Features(1)],
        frame_indices: Vec::new(),
        parts: Vec::new(),
        patches: None,
        first_patches: None,
        last_patches: None,
    };
    assert!(matches!(with(Ok(empty.clone())), Err(DataError::OfSettings { .. })));
    // By `ValueError` it refuses the medium: one of 101 samples is left out.
    let outcome = with(Err("raised ValueError: too thin".to_owned())).unwrap();
    assert_eq!((outcome.profile.samples.len(), outcome.profile.problems.len()), (100, 1));

    // The tokenizer lacks the token of the function's marks.
    let shape = MediaShape { segments: vec![EncoderSegments::of(1, 9)], ..empty };
    let marks = Marks {
        placeholder: "<image>".to_owned(),
        feature_token: "<picture>".to_owned(),
        id_fields: &[],
        number: None,
    };
    let family =
        GivenFamily::new(Callable::new("own:shape", "1", vec![(MediaKind::Image, marks)], move |_| {
            Ok(shape.clone())
        }));
    let error = run(&ProfileSettings { family: Some(family), ..settings }).unwrap_err();
    assert!(matches!(error, DataError::OfSettings { .. }), "{error}");
    assert!(error.to_string().contains("the tokenizer lacks the token `<picture>` of image"), "{error}");
}

/// Above 5 % of bad samples `skip` and `substitute` end the profile too; the share is a setting. A handful is no share
/// where the user set none.
#[test]
fn too_many_bad_samples_end_the_profile() {
    let lines = |num_good: usize, num_bad: usize| {
        let good = (0..num_good).map(text);
        good.chain((0..num_bad).map(|_| "{}".to_owned())).collect::<Vec<_>>()
    };
    for policy in [OnBadSample::Skip, OnBadSample::Substitute] {
        let (_dir, mut settings) = made(&lines(94, 6));
        settings.on_bad_sample = policy;
        let mut rows = Vec::new();
        let error = profile_into(&settings, None, &mut rows, &|_| {}).unwrap_err();
        assert!(error.to_string().starts_with("6 of 100 samples cannot be used, more than 5 %\n"), "{error}");
        assert_eq!(error.hint().unwrap(), "fix them, or raise `data.bad_samples_max_percent`");
        settings.bad_samples_max_percent = Some(6.0);
        assert_eq!(run(&settings).unwrap().profile.problems.len(), 6);
        for (num_good, num_bad) in [(95, 5), (4, 4)] {
            let (_dir, settings) = made(&lines(num_good, num_bad));
            let outcome = run(&ProfileSettings { on_bad_sample: policy, ..settings }).unwrap();
            assert_eq!(outcome.profile.problems.len(), num_bad);
        }
        for (num_bad, percent) in [(3, 0.0), (3, 14.0), (1, 4.9), (0, 0.0), (3, 15.0)] {
            let (_dir, mut settings) = made(&lines(20 - num_bad, num_bad));
            (settings.on_bad_sample, settings.bad_samples_max_percent) = (policy, Some(percent));
            let is_allowed = num_bad as f64 * 100.0 <= percent * 20.0;
            match run(&settings) {
                Ok(outcome) => assert!(is_allowed && outcome.profile.problems.len() == num_bad, "{percent}"),
                Err(error) => {
                    let expected = format!("{num_bad} of 20 samples cannot be used, more than {percent} %\n");
                    assert!(!is_allowed && error.to_string().starts_with(&expected), "{error}");
                }
            }
        }
    }
}

/// A `preprocessor_config.json` is asked for where a family reads it, and only there.
#[test]
fn a_processors_file_is_needed_where_it_is_read() {
    let (dir, settings) = made(&[text(0)]);
    std::fs::remove_file(dir.path().join("model/preprocessor_config.json")).unwrap();
    let error = run(&settings).unwrap_err().to_string();
    assert!(error.contains("preprocessor_config.json"), "{error}");
    let family = own(|| Err("raised ValueError: no picture".to_owned()));
    assert_eq!(
        run(&ProfileSettings { family: Some(family), ..settings.clone() }).unwrap().profile.samples.len(),
        1
    );
    assert!(dflop_data::model_hashes(&settings.model_dir).is_ok());
}
