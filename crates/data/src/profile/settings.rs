//! What is asked of a profile.

use crate::error::DataError;
use crate::family::model_files::ModelFiles;
use crate::family::{GivenFamily, NamedModel};
use dflop_types::ProfilePart;
use std::path::PathBuf;

/// What is done about a sample that cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnBadSample {
    /// Profile the rest, list every one, and give no profile.
    Fail,
    /// Leave it out, counted and listed in [`dflop_types::DataProfile::problems`].
    Skip,
    /// The nearest good sample before it in its source (else the first after it) takes its turn; counted and listed
    /// likewise. Where a source has no good sample, its bad ones are left out.
    Substitute,
}

/// The setting of a data profile that says so where text tokens are [`ESTIMATED`].
pub const TEXT_TOKENS: &str = "text_tokens";

/// Counted without the model's tokenizer.
pub const ESTIMATED: &str = "estimated";

/// What is done where a medium is no longer the one that was profiled.
///
/// If only the time of change differs, as in a copied dataset, both say so and train the sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnChangedMedia {
    /// A medium of another size, or with other bytes among those that are compared, ends training.
    Fail,
    /// Training says so and goes on; the shape must still be the one that was profiled.
    Warn,
}

/// What is profiled, and how.
#[derive(Debug, Clone, PartialEq)]
pub struct ProfileSettings {
    /// LLaVA mixture, or one source: a file, directory, pattern of shards or URL.
    pub mixture: PathBuf,
    /// Where media paths start, where a source of the mixture names no root; `None`: the directory of its file.
    pub media_root: Option<PathBuf>,
    /// Directory with `config.json`, `preprocessor_config.json` and `tokenizer.json` in Hugging Face form.
    pub model_dir: PathBuf,
    /// The model, where it is known by name and has no directory.
    pub named: Option<NamedModel>,
    /// A chat template in place of the model's.
    pub chat_template: Option<PathBuf>,
    /// Frames read of a video, at most; `None`: as the family has it.
    pub video_max_frames: Option<u32>,
    /// Frames read a second of video; `None`: as the family has it.
    pub video_fps: Option<f64>,
    /// What is done about a sample that cannot be read.
    pub on_bad_sample: OnBadSample,
    /// Percent of bad samples above which the other policies than `fail` end the profile too; `None`:
    /// [`super::BAD_SAMPLES_MAX_PERCENT`], but never because of [`super::BAD_SAMPLES_FEW`] or fewer.
    pub bad_samples_max_percent: Option<f64>,
    /// What is done where a medium changed between profile and training.
    pub on_changed_media: OnChangedMedia,
    /// Seed of `random:N` in the mixture, and of [`ProfileSettings::sample`].
    pub seed: u64,
    /// The shape rule, where it is not that of the model's `model_type`.
    pub family: Option<GivenFamily>,
    /// Profile only this many samples, drawn at random and in proportion from each source; `None`: all.
    pub sample: Option<u64>,
    /// Profile only this part of the dataset: a contiguous block of each source; `None`: the whole.
    pub part: Option<ProfilePart>,
    /// Options of remote stores by the names of `object_store`, for example `("aws_region", "eu-west-1")`.
    pub store_options: Vec<(String, String)>,
}

impl ProfileSettings {
    /// Settings with the defaults: videos as the family reads them, bad samples fail, seed 0.
    pub fn new(mixture: impl Into<PathBuf>, model_dir: impl Into<PathBuf>) -> Self {
        Self {
            mixture: mixture.into(),
            media_root: None,
            model_dir: model_dir.into(),
            named: None,
            chat_template: None,
            video_max_frames: None,
            video_fps: None,
            on_bad_sample: OnBadSample::Fail,
            bad_samples_max_percent: None,
            on_changed_media: OnChangedMedia::Fail,
            seed: 0,
            family: None,
            sample: None,
            part: None,
            store_options: Vec::new(),
        }
    }

    /// The files of the model, with the user's own chat template.
    ///
    /// # Errors
    /// Those of reading them.
    pub(crate) fn model_files(&self) -> Result<ModelFiles, DataError> {
        let files = match &self.named {
            Some(model) => ModelFiles::named(model)?,
            None => ModelFiles::read(&self.model_dir)?,
        };
        files.with_template(self.chat_template.as_deref())
    }

    /// Settings that decide shapes and the choice of samples, by name, as a data profile carries them.
    pub fn facts(&self) -> Vec<(&'static str, String)> {
        let or_family = |text: Option<String>| text.unwrap_or_else(|| "family".to_owned());
        let policy = match self.on_bad_sample {
            OnBadSample::Fail => "fail",
            OnBadSample::Skip => "skip",
            OnBadSample::Substitute => "substitute",
        };
        let mut facts = vec![
            ("video_max_frames", or_family(self.video_max_frames.map(|n| n.to_string()))),
            ("video_fps", or_family(self.video_fps.map(|n| n.to_string()))),
            ("on_bad_sample", policy.to_owned()),
            ("seed", self.seed.to_string()),
        ];
        if self.named.as_ref().is_some_and(|model| model.tokenizer_dir.is_none()) {
            facts.push((TEXT_TOKENS, ESTIMATED.to_owned()));
        }
        facts.extend(self.family.as_ref().map(|family| ("family_version", family.version().to_owned())));
        facts
    }

    /// `Ok` if what is asked can be done.
    pub(super) fn check(&self) -> Result<(), DataError> {
        let asked = |option, rule: String| Err(DataError::Asked { option, rule });
        match (self.sample, self.part) {
            (Some(0), _) => asked("--sample", "0 samples, at least 1 is needed".to_owned()),
            (Some(_), Some(_)) => asked(
                "--shard",
                "it is given with `--sample`, must be alone: a sample is drawn by one process".to_owned(),
            ),
            (_, Some(part)) if part.index >= part.num_parts => asked(
                "--shard",
                format!("{}/{}, parts are counted from 0: must be below {1}", part.index, part.num_parts),
            ),
            _ => Ok(()),
        }
    }
}
