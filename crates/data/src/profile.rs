//! A dataset in, its data profile out: one shape a sample.

use crate::error::DataError;
use crate::measure::{Corpus, Rule};
use dflop_types::{DataProfile, DatasetHasher, MadeFrom, Place, Problem, ProfiledSample, SourceFile};
use rayon::prelude::*;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

/// What is done about a sample that cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnBadSample {
    /// Stop, and list every one.
    Fail,
    /// Leave it out, counted and listed in [`DataProfile::problems`].
    Skip,
}

/// What is profiled, and how.
#[derive(Debug, Clone, PartialEq)]
pub struct ProfileSettings {
    /// LLaVA mixture, or one JSON or JSONL file.
    pub mixture: PathBuf,
    /// Where media paths start, where a source of the mixture names no root; `None`: the directory of its file.
    pub media_root: Option<PathBuf>,
    /// Directory with `config.json`, `preprocessor_config.json` and `tokenizer.json` in Hugging Face form.
    pub model_dir: PathBuf,
    /// Frames read of a video, at most; `None`: as the family has it.
    pub video_max_frames: Option<u32>,
    /// Frames read a second of video; `None`: as the family has it.
    pub video_fps: Option<f64>,
    /// What is done about a sample that cannot be read.
    pub on_bad_sample: OnBadSample,
    /// Seed of `random:N` in the mixture.
    pub seed: u64,
    /// Options of remote stores by the names of `object_store`, as in `("aws_region", "eu-west-1")`.
    pub store_options: Vec<(String, String)>,
}

impl ProfileSettings {
    /// Settings with the defaults: videos as the family reads them, bad samples fail, seed 0.
    pub fn new(mixture: impl Into<PathBuf>, model_dir: impl Into<PathBuf>) -> Self {
        Self {
            mixture: mixture.into(),
            media_root: None,
            model_dir: model_dir.into(),
            video_max_frames: None,
            video_fps: None,
            on_bad_sample: OnBadSample::Fail,
            seed: 0,
            store_options: Vec::new(),
        }
    }

    /// Settings that decide shapes and the choice of samples, by name, as a data profile carries them.
    pub fn facts(&self) -> Vec<(&'static str, String)> {
        let or_family = |text: Option<String>| text.unwrap_or_else(|| "family".to_owned());
        let policy = match self.on_bad_sample {
            OnBadSample::Fail => "fail",
            OnBadSample::Skip => "skip",
        };
        vec![
            ("video_max_frames", or_family(self.video_max_frames.map(|n| n.to_string()))),
            ("video_fps", or_family(self.video_fps.map(|n| n.to_string()))),
            ("on_bad_sample", policy.to_owned()),
            ("seed", self.seed.to_string()),
        ]
    }
}

/// A data profile and what there is to say about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProfileOutcome {
    /// The data profile, sound by its own rules.
    pub profile: DataProfile,
    /// Samples that the mixture takes, those left out included.
    pub num_samples: u64,
    /// What was done that a person may not expect, one sentence each.
    pub notices: Vec<String>,
}

/// The data profile of a dataset: headers are read, no pixel is decoded.
///
/// `progress` is called with samples done and all samples, from several threads. The order of samples is that of the
/// mixture, whatever the number of threads. *Complexity*: O(characters of text + media headers).
///
/// # Errors
/// [`DataError::Samples`] with every bad sample, under [`OnBadSample::Fail`]; [`DataError::NoSamples`] if none is
/// left; and what stops before the first sample: [`DataError::Mixture`], [`DataError::Io`], [`DataError::Record`],
/// [`DataError::Model`], [`DataError::UnknownFamily`], [`DataError::Config`].
pub fn profile(
    settings: &ProfileSettings,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<ProfileOutcome, DataError> {
    let rule = Rule::open(settings)?;
    let corpus = Corpus::open(settings)?;
    let mut notices = Vec::new();
    let mut chosen = Vec::new();
    for (index, (source, reader)) in corpus.mixture.sources.iter().zip(&corpus.readers).enumerate() {
        let total = reader.count(&corpus.stores)?;
        if let Some(asked) = source.sampling.missing(total) {
            notices
                .push(format!("`{}` has {total} samples, {asked} are asked for: all are taken", source.name));
        }
        let mut positions = source.sampling.choose(total, settings.seed, index as u64).into_iter().peekable();
        for (position, record) in reader.records(&corpus.stores)?.enumerate() {
            let record = record?;
            if positions.next_if_eq(&(position as u64)).is_some() {
                chosen.push((index as u32, position as u64, record));
            }
        }
    }
    let num_samples = chosen.len() as u64;
    let done = AtomicU64::new(0);
    let measured: Vec<Result<ProfiledSample, Problem>> = chosen
        .par_iter()
        .map(|(source, position, record)| {
            let measured = corpus.measure(&rule, *source, *position, record);
            progress(done.fetch_add(1, Ordering::Relaxed) + 1, num_samples);
            let file = corpus.first_file[*source as usize] + record.place.file;
            let place = Place { file, ..record.place };
            match measured {
                Ok(sample) => Ok(ProfiledSample {
                    id: sample.id,
                    source: *source,
                    position: *position,
                    place,
                    kind: sample.kind,
                    shape: sample.shape,
                    media_bytes: sample.media_bytes,
                    media_ms: sample.media_ms,
                    record_hash: sample.record_hash,
                    media_hash: sample.media_hash,
                }),
                Err(bad) => Err(Problem {
                    file: corpus.mixture.sources[*source as usize].name.clone(),
                    position: Some(*position),
                    place: Some(place),
                    id: bad.id,
                    fault: bad.fault,
                    cause: bad.cause,
                    substitute: None,
                }),
            }
        })
        .collect();
    let (mut samples, mut problems) = (Vec::new(), Vec::new());
    for result in measured {
        match result {
            Ok(sample) => samples.push(sample),
            Err(problem) => problems.push(problem),
        }
    }
    if settings.on_bad_sample == OnBadSample::Fail && !problems.is_empty() {
        return Err(DataError::Samples { problems, num_samples });
    }
    if samples.is_empty() {
        return Err(DataError::NoSamples { path: settings.mixture.clone(), problems });
    }
    notices.extend(notices_about(&samples, rule.max_positions));
    let mut dataset = DatasetHasher::default();
    for sample in &samples {
        dataset.push(sample);
    }
    let made_from = MadeFrom::from([
        ("dataset".to_owned(), dataset.finish()),
        ("tokenizer".to_owned(), rule.tokenizer_hash.clone()),
        ("processor".to_owned(), rule.processor_hash.clone()),
    ]);
    let mut files = Vec::new();
    for (index, reader) in corpus.readers.iter().enumerate() {
        for location in reader.files() {
            let (bytes, version) = corpus.stores.about(location)?;
            files.push(SourceFile { source: index as u32, path: location.to_string(), bytes, version });
        }
    }
    let profile = DataProfile {
        made_from,
        family: rule.family.name().to_owned(),
        settings: settings.facts().into_iter().map(|(name, value)| (name.to_owned(), value)).collect(),
        sources: corpus.mixture.sources.iter().map(|source| source.name.clone()).collect(),
        files,
        strata: Vec::new(),
        part: None,
        problems,
        samples,
    };
    Ok(ProfileOutcome { profile, num_samples, notices })
}

fn notices_about(samples: &[ProfiledSample], max_positions: Option<u64>) -> Vec<String> {
    let mut notices = Vec::new();
    let silent = samples.iter().filter(|sample| sample.shape.label_tokens == 0).count();
    if silent > 0 {
        notices.push(format!("{silent} samples have no label token: they cost time and teach nothing"));
    }
    if let Some(max) = max_positions {
        let long = samples.iter().filter(|sample| u64::from(sample.shape.llm_tokens) > max).count();
        if long > 0 {
            notices.push(format!(
                "{long} samples have more LLM tokens than the model's `max_position_embeddings` {max}: they are \
                 kept whole"
            ));
        }
    }
    notices
}
