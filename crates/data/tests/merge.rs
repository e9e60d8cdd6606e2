//! Parts of a data profile merged: what comes out is what one process would have written.

#![allow(clippy::unwrap_used, reason = "a test may give up, its helpers too")]
#![allow(clippy::result_large_err, reason = "a handful of them")]

use dflop_data::{DataError, merge, table};
use dflop_types::{
    DataProfile, DatasetHasher, Fault, MadeFrom, Place, Problem, ProfilePart, ProfiledSample, SampleShape,
    SourceFile,
};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// What the profiler found, in order: the good samples and the bad ones.
type Found = Vec<Result<ProfiledSample, Problem>>;

fn good(source: u32, position: u64) -> ProfiledSample {
    ProfiledSample {
        id: format!("{source}/{position}"),
        source,
        position,
        place: Place { file: source, start: 10 * position, len: 9 },
        shape: SampleShape { llm_tokens: 5 + position as u32, label_tokens: 1, ..SampleShape::default() },
        record_hash: 100 * u64::from(source) + position,
        ..ProfiledSample::default()
    }
}

fn bad(source: u32, position: u64) -> Problem {
    Problem {
        file: "a.json".to_owned(),
        position: Some(position),
        place: Some(Place { file: source, start: 10 * position, len: 9 }),
        fault: Fault::Record,
        cause: "it is not JSON".to_owned(),
        ..Problem::default()
    }
}

fn header(policy: &str) -> DataProfile {
    let file = |source| SourceFile { source, path: "a.json".to_owned(), bytes: 90, version: "1".to_owned() };
    DataProfile {
        made_from: ["tokenizer", "processor"].map(|name| (name.to_owned(), format!("sha256:{name}"))).into(),
        family: "llava_onevision".to_owned(),
        settings: BTreeMap::from([("on_bad_sample".to_owned(), policy.to_owned())]),
        // One file taken twice: its name does not tell the sources apart.
        sources: vec!["a.json".to_owned(), "a.json".to_owned()],
        files: vec![file(0), file(1)],
        ..DataProfile::default()
    }
}

fn with_dataset(mut profile: DataProfile) -> DataProfile {
    let mut hasher = DatasetHasher::default();
    for sample in &profile.samples {
        hasher.push(sample);
    }
    profile.made_from.insert("dataset".to_owned(), hasher.finish());
    profile
}

/// What one process makes of all samples, by the rule in words: the nearest good one before in the source, else the
/// first after.
fn whole(found: &Found, policy: &str) -> DataProfile {
    let mut profile = header(policy);
    for (index, sample) in found.iter().enumerate() {
        match sample {
            Ok(sample) => profile.samples.push(sample.clone()),
            Err(problem) => {
                let source = problem.place.unwrap().file;
                let is_near = |sample: &&Result<ProfiledSample, Problem>| {
                    sample.as_ref().is_ok_and(|sample| sample.source == source)
                };
                let neighbour = found[..index].iter().rev().find(is_near);
                let neighbour = neighbour.or_else(|| found[index..].iter().find(is_near));
                let mut problem = problem.clone();
                if let (Some(Ok(neighbour)), "substitute") = (neighbour, policy) {
                    problem.substitute = Some(neighbour.id.clone());
                    let position = problem.position.unwrap();
                    profile.samples.push(ProfiledSample { position, ..neighbour.clone() });
                }
                profile.problems.push(problem);
            }
        }
    }
    with_dataset(profile)
}

/// Writes the parts; `part_of` says which one a sample is in.
fn parts(
    directory: &Path,
    found: &Found,
    policy: &str,
    num_parts: u32,
    part_of: impl Fn(usize) -> u32,
) -> Vec<PathBuf> {
    (0..num_parts)
        .map(|index| {
            let mut part = DataProfile { part: Some(ProfilePart { index, num_parts }), ..header(policy) };
            for (_, sample) in found.iter().enumerate().filter(|(at, _)| part_of(*at) == index) {
                match sample {
                    Ok(sample) => part.samples.push(sample.clone()),
                    Err(problem) => part.problems.push(problem.clone()),
                }
            }
            let path = directory.join(format!("part-{index}.parquet"));
            table::write(&path, &with_dataset(part)).unwrap();
            path
        })
        .collect()
}

fn found(is_good: &[bool]) -> Found {
    let split = is_good.len() / 2;
    let key = |at: usize| if at < split { (0, at as u64) } else { (1, (at - split) as u64) };
    is_good
        .iter()
        .enumerate()
        .map(|(at, is_good)| {
            let (source, position) = key(at);
            if *is_good { Ok(good(source, position)) } else { Err(bad(source, position)) }
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Any split into any number of parts, given in any order, gives the bytes that one process writes.
    #[test]
    fn merged_parts_are_the_whole(
        is_good in prop::collection::vec(prop::bool::weighted(0.7), 1..30),
        num_parts in 1..5_u32,
        owners in prop::collection::vec(0..100_u32, 30),
        is_substitute in any::<bool>(),
    ) {
        let policy = if is_substitute { "substitute" } else { "skip" };
        let found = found(&is_good);
        let whole = whole(&found, policy);
        let directory = tempfile::tempdir().unwrap();
        let mut parts = parts(directory.path(), &found, policy, num_parts, |at| owners[at] % num_parts);
        parts.rotate_left((owners[0] % num_parts) as usize);
        let (one, merged) = (directory.path().join("one.parquet"), directory.path().join("merged.parquet"));
        let outcome = merge::merge(&parts, &merged);
        if whole.samples.is_empty() {
            let is_refused = matches!(outcome, Err(DataError::NoSamples { .. }));
            prop_assert!(is_refused);
            prop_assert!(!merged.exists());
            return Ok(());
        }
        let outcome = outcome.unwrap();
        prop_assert_eq!(&table::read(&merged).unwrap(), &whole);
        prop_assert_eq!(outcome.content_hash, table::write(&one, &whole).unwrap());
        prop_assert_eq!(outcome.num_samples, is_good.len() as u64);
        prop_assert_eq!(outcome.num_rows, whole.samples.len() as u64);
        prop_assert_eq!(std::fs::read(&one).unwrap(), std::fs::read(&merged).unwrap());
        if !whole.problems.is_empty() {
            let csv = |name: &str| std::fs::read(directory.path().join(name)).unwrap();
            prop_assert_eq!(csv("one.problems.csv"), csv("merged.problems.csv"));
        }
    }
}

/// By hand: bad ones first, in the middle, last, and a source without a good one.
#[test]
fn a_neighbour_stands_in() {
    let directory = tempfile::tempdir().unwrap();
    let found =
        vec![Err(bad(0, 0)), Ok(good(0, 1)), Err(bad(0, 2)), Ok(good(0, 3)), Err(bad(0, 4)), Err(bad(1, 0))];
    let parts = parts(directory.path(), &found, "substitute", 2, |at| (at % 2) as u32);
    let out = directory.path().join("out.parquet");
    merge::merge(&parts, &out).unwrap();
    let merged = table::read(&out).unwrap();
    let rows: Vec<_> = merged.samples.iter().map(|s| (s.position, s.id.as_str(), s.place.start)).collect();
    assert_eq!(rows, [(0, "0/1", 10), (1, "0/1", 10), (2, "0/1", 10), (3, "0/3", 30), (4, "0/3", 30)]);
    let substitutes: Vec<_> = merged.problems.iter().map(|p| p.substitute.as_deref()).collect();
    assert_eq!(substitutes, [Some("0/1"), Some("0/1"), Some("0/3"), None]);
    assert_eq!(merged.part, None);
}

#[test]
fn parts_that_do_not_belong_together_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let out = directory.path().join("out.parquet");
    let found = found(&[true; 8]);
    let good = parts(directory.path(), &found, "fail", 4, |at| at as u32 / 2);
    let refused = |parts: &[PathBuf]| {
        let error = merge::merge(parts, &out).unwrap_err().to_string();
        assert!(!out.exists());
        error.replace(&format!("{}/", directory.path().display()), "")
    };
    let mut errors = vec![refused(&[]), refused(&good[1..2]), refused(&[&good[..], &good[2..3]].concat())];
    let mut with = |change: &dyn Fn(&mut DataProfile)| {
        let mut part = table::read(&good[1]).unwrap();
        change(&mut part);
        let path = directory.path().join("changed.parquet");
        table::write(&path, &part).unwrap();
        errors.push(refused(&[good[0].clone(), path, good[2].clone(), good[3].clone()]));
    };
    with(&|part| part.part = None);
    with(&|part| part.part = Some(ProfilePart { index: 1, num_parts: 5 }));
    with(&|part| part.made_from = MadeFrom::from([("tokenizer".to_owned(), "sha256:b".to_owned())]));
    with(&|part| part.family = "internvl".to_owned());
    with(&|part| drop(part.settings.insert("seed".to_owned(), "1".to_owned())));
    with(&|part| part.sources[1] = "b.json".to_owned());
    with(&|part| part.files[1].bytes = 91);
    with(&|part| part.samples[0].position = 0);
    with(&|part| part.samples.reverse());
    with(&|part| part.problems.push(bad(0, 2)));
    insta::assert_snapshot!(errors.join("\n"));
}
