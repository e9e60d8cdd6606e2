//! Tar shards through the profiler and the dataset: what one reads in order, the other finds by its place.

#![allow(clippy::unwrap_used, reason = "a test may give up, its helpers too")]

use dflop_data::dataset::Dataset;
use dflop_data::demo;
use dflop_data::profile::{OnBadSample, ProfileSettings, profile};
use dflop_types::{SampleIndex, SampleKind};
use std::path::Path;

#[test]
fn samples_of_shards_are_encoded_as_they_were_profiled() {
    let directory = tempfile::tempdir().unwrap();
    demo::write(directory.path(), 0, 1, |_, _| {}).unwrap();
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures");
    let shards = fixtures.join("shards/plain/shard-{000000..000002}.tar");
    let mixture = directory.path().join("shards.yaml");
    std::fs::write(&mixture, format!("datasets: [{{json_path: '{}'}}]", shards.display())).unwrap();
    let settings = ProfileSettings {
        on_bad_sample: OnBadSample::Skip,
        ..ProfileSettings::new(mixture, directory.path().join("model"))
    };
    let outcome = profile(&settings, &|_, _| {}).unwrap();
    assert_eq!((outcome.num_samples, outcome.profile.files.len()), (8, 3));
    let found = |end: &str| outcome.profile.samples.iter().find(|sample| sample.id.ends_with(end)).unwrap();
    let bytes = |name: &str| std::fs::metadata(fixtures.join("media").join(name)).unwrap().len();
    let (webp, png) = (bytes("pillow_hopper.webp"), bytes("pillow_i_trns.png"));
    for (end, kind, media_bytes) in [
        ("first", SampleKind::Image, bytes("pillow_dispose_prev.gif")),
        ("/002", SampleKind::MultiImage, webp + png),
        ("/003", SampleKind::Video, bytes("go_mp4_sample.mp4")),
        ("/005", SampleKind::MultiImage, webp + png),
        ("-006", SampleKind::Text, 0),
    ] {
        assert_eq!((found(end).kind, found(end).media_bytes), (kind, media_bytes), "{end}");
    }
    let dataset = Dataset::open(&settings, outcome.profile).unwrap();
    for (index, profiled) in dataset.profile().samples.iter().enumerate() {
        let sample = dataset.encode(SampleIndex(index as u32)).unwrap();
        assert_eq!(sample.input_ids.len(), profiled.shape.llm_tokens as usize);
    }
}
