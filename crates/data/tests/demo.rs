//! The demo data through the profiler and the dataset: what one writes, the others read.

#![allow(clippy::unwrap_used, reason = "a test may give up, its helpers too")]

use dflop_data::dataset::Dataset;
use dflop_data::demo;
use dflop_data::probe::MediaKind;
use dflop_data::profile::{OnBadSample, ProfileSettings, profile};
use dflop_data::summary::{self, Statistics};
use dflop_data::{DataError, table};
use dflop_types::{SampleIndex, SampleKind};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

const SEED: u64 = 0;

fn settings(dir: &Path) -> ProfileSettings {
    ProfileSettings {
        video_max_frames: Some(32),
        ..ProfileSettings::new(dir.join("data/mixture.yaml"), dir.join("model"))
    }
}

fn made(num_samples: u32) -> (tempfile::TempDir, ProfileSettings) {
    let dir = tempfile::tempdir().unwrap();
    demo::write(dir.path(), SEED, num_samples, |_, _| {}).unwrap();
    let settings = settings(dir.path());
    (dir, settings)
}

fn quiet(_done: u64, _all: u64) {}

/// Every sample is encoded with exactly the shape that was profiled; kinds and counts are those of the demo.
#[test]
fn what_is_profiled_is_what_is_encoded() {
    let (dir, settings) = made(64);
    let calls = AtomicU64::new(0);
    let outcome = profile(&settings, &|_, all| {
        assert_eq!(all, 0, "nothing was counted");
        calls.fetch_add(1, Ordering::Relaxed);
    })
    .unwrap();
    assert_eq!(calls.into_inner(), 64);
    assert_eq!((outcome.num_samples, outcome.notices.len()), (64, 0));
    let statistics = Statistics::new(&outcome.profile);
    let kinds: Vec<_> = statistics.kinds.iter().map(|k| (k.name.as_str(), k.samples)).collect();
    assert_eq!(kinds, [("text", 10), ("image", 32), ("multi_image", 9), ("video", 13)]);

    let dataset = Dataset::open(&settings, outcome.profile).unwrap();
    for (index, profiled) in dataset.profile().samples.iter().enumerate() {
        let sample = dataset.encode(SampleIndex(index as u32)).unwrap();
        let shape = &profiled.shape;
        assert_eq!(sample.id, profiled.id);
        assert_eq!(sample.input_ids.len(), shape.llm_tokens as usize);
        let features = sample.feature_mask.iter().filter(|m| **m).count();
        assert_eq!(features, shape.feature_tokens as usize);
        assert_eq!(sample.media.iter().map(|m| m.shape.feature_tokens() as usize).sum::<usize>(), features);
        assert_eq!(
            sample.media.iter().map(|m| u64::from(m.shape.num_tiles)).sum::<u64>(),
            shape.num_segments()
        );
        for media in &sample.media {
            assert_eq!(media.kind == MediaKind::Video, !media.shape.frame_indices.is_empty());
            assert!(media.shape.frame_indices.len() <= 32);
            assert!(media.place.to_string().starts_with(&*dir.path().to_string_lossy()), "{}", media.place);
        }
        assert_eq!(profiled.kind == SampleKind::Text, sample.media.is_empty());
    }
}

/// The profile does not depend on the number of threads, and is read back as it was written.
#[test]
fn a_profile_is_the_same_every_time() {
    let (dir, settings) = made(24);
    let one = profile(&settings, &quiet).unwrap().profile;
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    let two = pool.install(|| profile(&settings, &quiet)).unwrap().profile;
    assert_eq!(one, two);
    let path = dir.path().join(table::FILE_NAME);
    assert_eq!(table::write(&path, &one).unwrap(), one.content_hash());
    assert_eq!(table::read(&path).unwrap(), one);
    assert!(summary::text(&one, &[]).contains("24 samples"));
}

/// Bad samples are all listed under `fail`, left out and listed under `skip`; with none left there is no profile.
#[test]
fn bad_samples_follow_the_policy() {
    let (dir, mut settings) = made(24);
    let path = dir.path().join("data/images.jsonl");
    let mut lines: Vec<String> = std::fs::read_to_string(&path).unwrap().lines().map(str::to_owned).collect();
    let num_lines = lines.len();
    lines[1] = "{\"id\": \"broken\",".to_owned();
    lines[3] =
        r#"{"id": "lost", "image": "no.jpg", "conversations": [{"from": "human", "value": "x"}]}"#.to_owned();
    std::fs::write(&path, lines.join("\n")).unwrap();

    let error = profile(&settings, &quiet).unwrap_err();
    let DataError::Samples { problems, num_samples: 24, .. } = &error else { panic!("{error}") };
    assert_eq!(problems.iter().map(|p| p.position).collect::<Vec<_>>(), [Some(1), Some(3)]);
    assert!(problems[0].cause.contains("line 2"), "{}", problems[0].cause);
    assert_eq!(problems[1].id.as_deref(), Some("lost"));
    assert!(
        error.to_string().starts_with("2 of 24 samples cannot be used\n  images.jsonl: sample 1: "),
        "{error}"
    );

    settings.on_bad_sample = OnBadSample::Skip;
    let outcome = profile(&settings, &quiet).unwrap();
    assert_eq!((outcome.profile.samples.len(), outcome.profile.problems.len()), (22, 2));
    assert!(outcome.profile.samples.iter().all(|s| s.id != "lost"));
    assert!(summary::text(&outcome.profile, &[]).contains("left out: 2 samples"));
    let dataset = Dataset::open(&settings, outcome.profile).unwrap();
    assert_eq!(dataset.len(), 22);
    dataset.encode(SampleIndex(21)).unwrap();

    std::fs::write(&path, "{}\n".repeat(num_lines)).unwrap();
    settings.mixture = path;
    let error = profile(&settings, &quiet).unwrap_err();
    assert!(
        matches!(&error, DataError::NoSamples { problems, .. } if problems.len() == num_lines),
        "{error}"
    );
}

/// What changed after profiling is refused: text, settings and tokenizer at once, a medium when its sample is read.
#[test]
fn a_changed_dataset_is_refused() {
    let (dir, settings) = made(24);
    let profile = profile(&settings, &quiet).unwrap().profile;
    let refused = |settings: &ProfileSettings| match Dataset::open(settings, profile.clone()) {
        Err(DataError::Stale { name, .. }) => name,
        other => panic!("{other:?}"),
    };
    assert_eq!(
        refused(&ProfileSettings { video_max_frames: Some(8), ..settings.clone() }),
        "video_max_frames"
    );

    let index = profile.samples.iter().position(|s| s.kind == SampleKind::Video).unwrap();
    let dataset = Dataset::open(&settings, profile.clone()).unwrap();
    let sample = dataset.encode(SampleIndex(index as u32)).unwrap();
    let other = profile.samples.iter().rposition(|s| s.kind == SampleKind::Video).unwrap();
    let other = dataset.encode(SampleIndex(other as u32)).unwrap();
    std::fs::copy(other.media[0].place.to_string(), sample.media[0].place.to_string()).unwrap();
    let error = dataset.encode(SampleIndex(index as u32)).unwrap_err();
    let DataError::ShapeChanged { id, what, .. } = &error else { panic!("{error}") };
    assert_eq!((id, *what), (&sample.id, "media_bytes"));

    let text = dir.path().join("data/videos.json");
    std::fs::write(&text, std::fs::read_to_string(&text).unwrap().replacen("the", "a", 1)).unwrap();
    assert_eq!(refused(&settings), "dataset");
    let config = settings.model_dir.join("config.json");
    std::fs::write(&config, std::fs::read_to_string(&config).unwrap().replace("256", "192")).unwrap();
    assert_eq!(refused(&settings), "processor");
}

/// A dataset that has moved is the same: what is trained on elsewhere need not be profiled there.
#[test]
fn a_moved_dataset_is_the_same() {
    let (dir, settings) = made(8);
    let profile = profile(&settings, &quiet).unwrap().profile;
    let moved = tempfile::tempdir().unwrap();
    let to = moved.path().join("elsewhere");
    std::fs::rename(dir.path(), &to).unwrap();
    let there = |path: &Path| to.join(path.strip_prefix(dir.path()).unwrap());
    let settings = ProfileSettings {
        mixture: there(&settings.mixture),
        model_dir: there(&settings.model_dir),
        ..settings.clone()
    };
    let dataset = Dataset::open(&settings, profile).unwrap();
    assert_eq!(dataset.encode(SampleIndex(7)).unwrap().id, dataset.profile().samples[7].id);
}

/// What stops before the first sample is named: file, field, rule.
#[test]
fn errors_before_the_first_sample() {
    let (dir, good) = made(8);
    let error = |settings: &ProfileSettings| {
        let text = profile(settings, &quiet).unwrap_err().to_string();
        text.replace(dir.path().to_str().unwrap(), "DEMO")
    };
    let missing = ProfileSettings { mixture: dir.path().join("no.json"), ..good.clone() };
    let mut errors = vec![error(&missing)];
    let mixture = |text: &str| {
        std::fs::write(&good.mixture, text).unwrap();
        error(&good)
    };
    errors.push(mixture("datasets: [{json_path: no.json}, {json_path: images.jsonl}]\n"));
    errors.push(mixture("datasets: [{json_path: images.jsonl, sampling_strategy: 'first:0'}]\n"));
    errors.push(mixture("datasets: [{json_path: images.jsonl, sampling: all}]\n"));
    std::fs::write(dir.path().join("data/videos.json"), "{}").unwrap();
    errors.push(mixture("datasets: [{json_path: videos.json}]\n"));
    let config = good.model_dir.join("config.json");
    std::fs::write(&config, "{\"model_type\": \"mammoth_vl\"}").unwrap();
    errors.push(error(&good));
    std::fs::write(good.model_dir.join("tokenizer.json"), "{}").unwrap();
    std::fs::write(&config, "{").unwrap();
    errors.push(error(&good));
    insta::assert_snapshot!(errors.join("\n"), @r"
    cannot read `DEMO/no.json`: No such file or directory (os error 2)
    `DEMO/data/mixture.yaml` is not a valid mixture
      cannot read `DEMO/data/no.json`: No such file or directory (os error 2)
    `DEMO/data/mixture.yaml` has 0 samples, at least 1 is needed
    `DEMO/data/mixture.yaml` is not a valid mixture
      line 1: datasets[0].sampling: unknown key, known are path, json_path, sampling_strategy, media_root, image_folder, format, split, columns, ignore
    `DEMO/data/videos.json`: it begins with `{`, must be an array of samples (one a line is `.jsonl`: rename it, or set `format: jsonl`)
    `DEMO/model/config.json`: `model_type` is `mammoth_vl`, known are gemma3, gemma4, glm4v, glm4v_moe, glm46v, glm_ocr, idefics3, internvl, lfm2_vl, lighton_ocr, llava, llava_next, llava_onevision, minicpmv4_6, mistral3, paddleocr_vl, qwen2_vl, qwen2_5_vl, qwen3_vl, qwen3_vl_moe, qwen3_5, qwen3_5_moe, smolvlm, audioflamingo3, qwen2_5_omni, qwen3_omni_moe, qwen2_audio, voxtral
    `DEMO/model/config.json`: it is not JSON: EOF while parsing an object at line 1 column 1
    ");
}

/// The whole demo: small, made in seconds, and its costs spread as the demo needs them.
#[test]
fn the_whole_demo_is_small_and_uneven() {
    let dir = tempfile::tempdir().unwrap();
    let report = demo::write(dir.path(), SEED, 512, |_, _| {}).unwrap();
    assert!(report.media_bytes < 30_000_000, "{}", report.media_bytes);
    let profile = profile(&settings(dir.path()), &quiet).unwrap().profile;
    let statistics = Statistics::new(&profile);
    let [encoder, llm, label] = statistics.distributions.as_slice() else { panic!("three sizes") };
    // What the demo is made for: both components have work, and samples differ enough for the schedule to matter.
    assert!((500.0..650.0).contains(&encoder.mean), "{}", encoder.mean);
    assert!((400.0..600.0).contains(&llm.mean), "{}", llm.mean);
    assert!(encoder.p5 == 0 && encoder.p95 as f64 > 4.0 * encoder.mean && label.p50 > 20);
}
