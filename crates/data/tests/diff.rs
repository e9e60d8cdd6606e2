//! What changed between two data profiles, by hand.

#![allow(clippy::unwrap_used, reason = "a test may give up, its helpers too")]
#![allow(clippy::float_cmp, reason = "sums of small whole numbers are exact")]

use dflop_data::diff::{self, Drift, SampleChanges};
use dflop_data::table;
use dflop_types::{DataProfile, EncoderSegments, MadeFrom, ProfiledSample, SampleKind, SampleShape, Stratum};
use std::collections::BTreeMap;

/// A sample of source 0 with so many LLM tokens; an image where it has encoder tokens.
fn sample(record: u64, encoder: u32, llm: u32) -> ProfiledSample {
    let group = EncoderSegments::of(1, encoder);
    let segments = if encoder > 0 { vec![group] } else { Vec::new() };
    ProfiledSample {
        id: record.to_string(),
        position: record,
        kind: if encoder > 0 { SampleKind::Image } else { SampleKind::Text },
        shape: SampleShape {
            encoder_segments: segments,
            feature_tokens: u32::from(encoder > 0),
            llm_tokens: llm,
            label_tokens: 1,
            ..SampleShape::default()
        },
        record_hash: record,
        ..ProfiledSample::default()
    }
}

fn profile(samples: Vec<ProfiledSample>) -> DataProfile {
    DataProfile {
        made_from: MadeFrom::from([("tokenizer".to_owned(), "sha256:a".to_owned())]),
        family: "llava_onevision".to_owned(),
        settings: BTreeMap::from([("seed".to_owned(), "0".to_owned())]),
        sources: vec!["a.json".to_owned(), "b.json".to_owned()],
        samples,
        ..DataProfile::default()
    }
}

fn compared(a: &DataProfile, b: &DataProfile) -> Drift {
    let directory = tempfile::tempdir().unwrap();
    let paths = ["a.parquet", "b.parquet"].map(|name| directory.path().join(name));
    table::write(&paths[0], a).unwrap();
    table::write(&paths[1], b).unwrap();
    let drift = diff::diff(&paths[0], &paths[1]).unwrap();
    let text = diff::text(&drift);
    assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
    drift
}

/// The same sizes of other samples: no reason for another layout, but training refuses the old plan.
#[test]
fn other_samples_of_the_same_sizes_need_the_plan_made_again() {
    let of = |first: u64| profile((0..40).map(|i| sample(first + i, 81, 10 + i as u32)).collect());
    let same = diff::text(&compared(&of(0), &of(0)));
    assert!(same.ends_with("no new plan is needed\n"), "{same}");
    let drift = compared(&of(0), &of(100));
    assert!(!drift.drifted && drift.samples.same == 0);
    let text = diff::text(&drift);
    let end = "refuses a plan of other samples: run `dflop plan` before you train on them\n";
    assert!(text.ends_with(end) && !text.contains("no new plan"), "{text}");
}

#[test]
fn a_profile_is_like_itself() {
    let a = profile((1..=40).map(|i| sample(i, 81, 10 + i as u32)).collect());
    let drift = compared(&a, &a);
    assert!(!drift.drifted && drift.findings.is_empty() && drift.differing.is_empty());
    assert_eq!(drift.samples, SampleChanges { before: 40, after: 40, same: 40, ..SampleChanges::default() });
    let llm = &drift.groups[0].sizes[1];
    // 11 to 50: the mean is 30.5, the 20th is 30, the 38th 48.
    assert_eq!((llm.mean, llm.p50, llm.p95, llm.max), ([30.5; 2], [30; 2], [48; 2], [50; 2]));
    assert!(llm.distance.abs() < 1e-12);
}

/// LLM tokens 1 to 100 against 31 to 130: shares differ by 0.30 at most, the mean moves from 50.5 to 80.5.
#[test]
fn a_shift_is_measured_and_said() {
    let a = profile((1..=100).map(|i| sample(i, 81, 1 + i as u32)).collect());
    let b = profile((1..=100).map(|i| sample(i, 81, 31 + i as u32)).collect());
    let drift = compared(&a, &b);
    let llm = &drift.groups[0].sizes[1];
    assert!((llm.distance - 0.30).abs() < 1e-12);
    // 1.358 x sqrt(200 / 10000)
    assert!((llm.distance_max - 0.192_050).abs() < 1e-6);
    assert_eq!(llm.mean, [51.5, 81.5]);
    assert_eq!(
        drift.findings,
        ["llm_tokens: mean 51.5 -> 81.5 (+58.3 %), distance 0.30, above 0.19 is drift"]
    );
    assert_eq!((drift.samples.same, drift.samples.changed, drift.samples.added), (0, 100, 0));
    assert!(drift.drifted);
    assert!(!drift.groups[0].sizes[0].drifted);
}

/// Ten of a hundred images become text: a share moves by 10 points, which 100 samples do by chance and 10,000 do not.
#[test]
fn the_share_of_a_kind_counts_beyond_chance() {
    let of =
        |n: u64, texts: u64| profile((0..n).map(|i| sample(i, if i < texts { 0 } else { 81 }, 20)).collect());
    let few = compared(&of(100, 20), &of(100, 30));
    assert!(!few.drifted, "{:?}", few.findings);
    let many = compared(&of(10_000, 2_000), &of(10_000, 3_000));
    let kinds: Vec<_> =
        many.groups.iter().filter(|g| g.of == "kind").map(|g| (g.name.as_str(), g.share)).collect();
    assert_eq!(kinds, [("image", [0.8, 0.7]), ("text", [0.2, 0.3])]);
    assert_eq!(
        many.findings[1..],
        [
            "image samples: 80.0 % before, 70.0 % after, a change above 5 points is drift",
            "text samples: 20.0 % before, 30.0 % after, a change above 5 points is drift"
        ]
    );
    assert!(
        many.findings[0].starts_with("encoder_tokens: mean 64.8 -> 56.7 (-12.5 %), "),
        "{}",
        many.findings[0]
    );
}

/// Three videos of 120 samples are 2.5 % of them and a third of the encoder's work: (117 x 100 + 3 x 2000) / 120 = 147.5.
/// That they are gone is no chance: 0.975^120 = 0.048.
#[test]
fn a_kind_that_is_gone_and_a_mean_that_fell_by_a_third_are_drift() {
    let video = |record| ProfiledSample { kind: SampleKind::Video, ..sample(record, 2000, 20) };
    let with = profile((0..120).map(|i| if i < 3 { video(i) } else { sample(i, 100, 20) }).collect());
    let without = profile((0..120).map(|i| sample(i, 100, 20)).collect());
    let drift = compared(&with, &without);
    assert!(drift.drifted);
    assert!(
        drift.findings[0].starts_with("encoder_tokens: mean 147.5 -> 100.0 (-32.2 %), "),
        "{:?}",
        drift.findings
    );
    assert_eq!(drift.findings[1..], ["video samples: all 3 are gone"]);
    assert_eq!(compared(&without, &with).findings[1..], ["video samples: 3 where there were none"]);
    // Of random samples, three videos may come or not.
    let mut drawn = [with, without];
    for profile in &mut drawn {
        profile.strata = vec![Stratum { population: 12_000, drawn: 120 }, Stratum::default()];
    }
    let drift = compared(&drawn[0], &drawn[1]);
    assert_eq!(drift.findings, ["video samples: all 3 are gone"]);
}

#[test]
fn samples_are_told_apart_by_source_and_record() {
    let a = profile(vec![sample(1, 81, 20), sample(2, 81, 20), sample(3, 0, 20), sample(3, 0, 20)]);
    let mut b = profile(vec![sample(1, 81, 20), sample(2, 162, 20), sample(3, 0, 20), sample(9, 0, 20)]);
    // The same record in another source is another sample.
    b.samples.push(ProfiledSample { source: 1, ..sample(1, 81, 20) });
    let changes = compared(&a, &b).samples;
    assert_eq!(changes, SampleChanges { before: 4, after: 5, same: 2, changed: 1, added: 2, removed: 1 });
}

#[test]
fn another_tokenizer_is_drift_another_seed_is_not() {
    let a = profile((0..9).map(|i| sample(i, 0, 20)).collect());
    let mut b = a.clone();
    b.settings.insert("seed".to_owned(), "1".to_owned());
    let drift = compared(&a, &b);
    assert!(!drift.drifted);
    assert_eq!(drift.differing, [("seed".to_owned(), "0".to_owned(), "1".to_owned())]);
    b.made_from.insert("tokenizer".to_owned(), "sha256:b".to_owned());
    let drift = compared(&a, &b);
    assert_eq!(drift.findings, ["the tokenizer differs: a plan made before is refused"]);
}

/// A drawn sample counts for what it stands for: 1 of 9 and 1 of 1 give a mean of (9 x 10 + 20) / 10.
#[test]
fn drawn_samples_are_weighed() {
    let mut a = profile(vec![sample(1, 0, 10), ProfiledSample { source: 1, ..sample(2, 0, 20) }]);
    a.strata = vec![Stratum { population: 9, drawn: 1 }, Stratum { population: 1, drawn: 1 }];
    let drift = compared(&a, &a);
    assert_eq!(drift.groups[0].sizes[1].mean, [11.0; 2]);
    assert_eq!(drift.groups[0].sizes[1].p50, [10; 2]);
    assert_eq!(drift.groups.last().unwrap().share, [0.1; 2]);
}
