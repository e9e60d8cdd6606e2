//! A dataset in, its data profile out: one shape a sample.

use crate::error::DataError;
use crate::measure::{Corpus, Rule};
use dflop_types::{DataProfile, MadeFrom, Problem, ProfiledSample};
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
    /// Frames read of a video, at most; at least 1.
    pub video_max_frames: u32,
    /// Frames read a second of video; `None`: as many as `video_max_frames` allows.
    pub video_fps: Option<f64>,
    /// What is done about a sample that cannot be read.
    pub on_bad_sample: OnBadSample,
    /// Seed of `random:N` in the mixture.
    pub seed: u64,
}

impl ProfileSettings {
    /// Settings with the defaults: 32 frames a video, bad samples fail, seed 0.
    pub fn new(mixture: impl Into<PathBuf>, model_dir: impl Into<PathBuf>) -> Self {
        Self {
            mixture: mixture.into(),
            media_root: None,
            model_dir: model_dir.into(),
            video_max_frames: 32,
            video_fps: None,
            on_bad_sample: OnBadSample::Fail,
            seed: 0,
        }
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
    for (index, (source, records)) in corpus.mixture.sources.iter().zip(&corpus.records).enumerate() {
        let total = records.places.len() as u64;
        if let Some(asked) = source.sampling.missing(total) {
            notices
                .push(format!("`{}` has {total} samples, {asked} are asked for: all are taken", source.name));
        }
        let positions = source.sampling.choose(total, settings.seed, index as u64);
        chosen.extend(positions.into_iter().map(|position| (index as u32, position)));
    }
    let num_samples = chosen.len() as u64;
    let done = AtomicU64::new(0);
    let measured: Vec<Result<ProfiledSample, Problem>> = chosen
        .par_iter()
        .map(|&(source, position)| {
            let measured = corpus.measure(&rule, source, position);
            progress(done.fetch_add(1, Ordering::Relaxed) + 1, num_samples);
            match measured {
                Ok(sample) => Ok(ProfiledSample {
                    id: sample.id,
                    source,
                    position,
                    kind: sample.kind,
                    shape: sample.shape,
                    media_bytes: sample.media_bytes,
                    media_ms: sample.media_ms,
                }),
                Err(bad) => Err(Problem {
                    file: corpus.mixture.sources[source as usize].name.clone(),
                    position: Some(position),
                    id: bad.id,
                    cause: bad.cause,
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
    let made_from = MadeFrom::from([
        ("dataset".to_owned(), corpus.hash(settings, samples.iter().map(|sample| sample.media_bytes))),
        ("tokenizer".to_owned(), rule.tokenizer_hash.clone()),
        ("processor".to_owned(), rule.processor_hash.clone()),
    ]);
    let profile = DataProfile {
        made_from,
        family: rule.family.to_owned(),
        sources: corpus.mixture.sources.iter().map(|source| source.name.clone()).collect(),
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
