//! Why a dataset, a media file or a model's configuration gives no shape.

use crate::listing::{by_fault, line, list, listed};
use dflop_types::{ArtifactError, Fault, Hint, Problem, ProfilePart, SourceFile, counted, printable};
use std::path::PathBuf;
use thiserror::Error;

/// Why measuring failed. Every variant names the file or the field at fault.
#[derive(Debug, Error)]
pub enum DataError {
    /// The operating system refused.
    #[error("cannot {act} `{}`: {source}", path.display())]
    Io {
        /// What was tried, for example `read`.
        act: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// A file stands where the demo would write its own.
    #[error("`{}` exists, the demo would overwrite it", path.display())]
    Exists {
        /// The file.
        path: PathBuf,
    },
    /// A file between the verbs cannot be used.
    #[error(transparent)]
    Artifact(#[from] ArtifactError),
    /// A media file breaks the rules of its format, or ends before its header does.
    #[error("`{}` is not a valid {format} file: {cause}", path.display())]
    Media {
        /// The file.
        path: PathBuf,
        /// Format its first bytes claim, for example `jpeg`.
        format: &'static str,
        /// Value and rule.
        cause: String,
    },
    /// The first bytes of a file are of no format we read.
    #[error("`{}` is of no media format dflop reads: {start}", path.display())]
    UnknownFormat {
        /// The file.
        path: PathBuf,
        /// What it begins with, in words: its first bytes in hexadecimal, or that it is empty.
        start: String,
    },
    /// A field of a model's or processor's configuration has a value the family's shape rule does not cover.
    #[error("`{file}`: `{field}` is {value}, {rule}")]
    Config {
        /// `config.json` or `preprocessor_config.json`.
        file: &'static str,
        /// Path of the field, for example `vision_config.image_size`.
        field: String,
        /// Its value, as JSON; "missing" where it is not there.
        value: String,
        /// What it must be.
        rule: String,
    },
    /// An image or video of a size that the family's processor refuses too.
    #[error("no {family} shape for {media}: {rule}")]
    Shape {
        /// Model family, for example `llava_onevision`.
        family: &'static str,
        /// Sizes, for example "an image of 1 x 100000 pixels (height x width)".
        media: String,
        /// The rule it breaks.
        rule: String,
    },
    /// A shape rule of the user's own failed.
    #[error("no python shape for {media}: {cause}")]
    Function {
        /// Sizes, for example "an image of 1 x 100000 pixels (height x width)".
        media: String,
        /// The function, and what it raised or gave.
        cause: String,
    },
    /// No sample is at fault, but the configuration, the tokenizer, the chat template or the user's own function.
    #[error("every sample of its kind would fail, {}", line(problem))]
    OfSettings {
        /// The first sample that met it.
        problem: Box<Problem>,
    },
    /// Too many samples are bad to go on without them.
    #[error(
        "{} of {} cannot be used, more than {percent_max} %{}{}",
        problems.len(),
        counted(*num_samples, "sample"),
        listed(problems),
        by_fault(problems)
    )]
    TooManyBad {
        /// Every problem.
        problems: Vec<Problem>,
        /// Samples of the mixture, the bad ones included.
        num_samples: u64,
        /// The share that may be bad.
        percent_max: f64,
        /// Files of the sources; the places of `problems` count these.
        files: Vec<SourceFile>,
    },
    /// The mixture breaks rules; all of them are listed.
    #[error("`{}` is not a valid mixture{}", path.display(), list(problems, 0))]
    Mixture {
        /// The mixture.
        path: PathBuf,
        /// "line N: field: value, rule", each.
        problems: Vec<String>,
    },
    /// Samples cannot be used; the first are listed, and all are counted.
    #[error(
        "{} of {} cannot be used{}{}",
        problems.len(),
        counted(*num_samples, "sample"),
        listed(problems),
        by_fault(problems)
    )]
    Samples {
        /// Every problem.
        problems: Vec<Problem>,
        /// Samples of the mixture, the bad ones included.
        num_samples: u64,
        /// Files of the sources; the places of `problems` count these.
        files: Vec<SourceFile>,
    },
    /// There is no sample.
    #[error("`{}` has {}{}", path.display(), none_left(problems.len()), listed(problems))]
    NoSamples {
        /// The mixture.
        path: PathBuf,
        /// Samples left out, where that is why.
        problems: Vec<Problem>,
        /// Files of the sources; the places of `problems` count these.
        files: Vec<SourceFile>,
    },
    /// A sample that was sound when it was profiled cannot be read any more.
    #[error(
        "sample `{}` of `{file}` could be read when it was profiled, now it cannot be read ({fault}): {cause}",
        printable(id)
    )]
    TurnedBad {
        /// The sample.
        id: String,
        /// The file of its record.
        file: String,
        /// Kind of fault.
        fault: Fault,
        /// What is wrong: file, value, rule.
        cause: String,
    },
    /// A part of a dataset stands where the whole is needed.
    #[error("the data profile is part {} of {} (from 0), the whole is needed", part.index, part.num_parts)]
    IsPart {
        /// Which part.
        part: ProfilePart,
    },
    /// A random sample of a dataset stands where every sample is needed.
    #[error("the data profile holds {drawn} samples drawn of {population}, training needs every one")]
    IsSample {
        /// Samples drawn.
        drawn: u64,
        /// Samples of the dataset.
        population: u64,
    },
    /// A record that the mixture leaves out stands where every record is needed.
    #[error(
        "the data profile has no record {position} of source `{name}`, which the mixture leaves out: an index into all records needs every one"
    )]
    Drawn {
        /// Name of the source.
        name: String,
        /// The first such record in it, from 0.
        position: u64,
    },
    /// A fault of a source as a whole: how many records it has is not known.
    #[error(
        "source `{name}` could not be read to its end ({cause}): an index into all records needs their number"
    )]
    Uncounted {
        /// Name of the source.
        name: String,
        /// What is wrong with it.
        cause: String,
    },
    /// What is asked of the profiler contradicts itself.
    #[error("`{option}`: {rule}")]
    Asked {
        /// The option, as the command line writes it.
        option: &'static str,
        /// Value and rule.
        rule: String,
    },
    /// A file changed while it was profiled.
    #[error("`{file}` changed while it was profiled: {change}")]
    Changed {
        /// The file or source.
        file: String,
        /// Before and after.
        change: String,
    },
    /// A record is not a sample, or a file not a list of records: place, value, rule.
    #[error("{0}")]
    Record(String),
    /// A file of records is not there, or damaged: place, value, rule.
    #[error("{cause}")]
    Damaged {
        /// What is wrong.
        cause: String,
        /// The act that mends it.
        mend: &'static str,
    },
    /// Sources of the mixture cannot be opened; all of them are listed.
    #[error("`{}` is not a valid mixture{}", path.display(), list(problems, 0))]
    Sources {
        /// The mixture.
        path: PathBuf,
        /// Every problem.
        problems: Vec<String>,
        /// The act that mends the first.
        mend: Option<String>,
    },
    /// A file of the model directory cannot be used.
    #[error("`{}`: {cause}", path.display())]
    Model {
        /// The file.
        path: PathBuf,
        /// Field, value, rule.
        cause: String,
    },
    /// The model directory says nowhere how a conversation is written.
    #[error("`{}` has no chat template", model_dir.display())]
    NoTemplate {
        /// The model directory.
        model_dir: PathBuf,
    },
    /// The model directory has its tokenizer in Mistral's form alone.
    #[error("`{}`: there is no `tokenizer.json` beside it, which dflop reads", path.display())]
    Tekken {
        /// `tekken.json`.
        path: PathBuf,
    },
    /// No shape rule is known for the model.
    #[error("`{}`: `model_type` is `{found}`, known are {}", path.display(), known.join(", "))]
    UnknownFamily {
        /// The model's `config.json`.
        path: PathBuf,
        /// The model's family.
        found: String,
        /// Families with a shape rule.
        known: Vec<&'static str>,
    },
    /// A sample is no longer what was profiled.
    #[error(
        "sample `{}` is not as profiled: `{what}` is {}, profiled was {}",
        printable(id),
        printable(found),
        printable(expected)
    )]
    ShapeChanged {
        /// The sample.
        id: String,
        /// The part of the shape.
        what: &'static str,
        /// What it is now.
        found: String,
        /// What the data profile says.
        expected: String,
    },
    /// The data profile was made from something else than what is there now.
    #[error("the data profile was made from another `{name}`: {found}, now {expected}")]
    Stale {
        /// What differs.
        name: &'static str,
        /// Hash in the profile.
        found: String,
        /// Hash of what is there now.
        expected: String,
    },
}

/// Why no sample is left, where `num_bad` were left out.
fn none_left(num_bad: usize) -> String {
    match num_bad {
        0 => "0 samples, at least 1 is needed".to_owned(),
        1 => "no usable sample, at least 1 is needed: the only one is bad".to_owned(),
        n => format!("no usable sample, at least 1 is needed: all {n} are bad"),
    }
}

/// What to do where half the samples or more have the same kind of fault: then one thing is wrong, not every sample.
fn systematic(problems: &[Problem], num_samples: u64) -> Option<&'static str> {
    let is_most = |fault| {
        let num = problems.iter().filter(|problem| problem.fault == fault).count() as u64;
        num > 0 && 2 * num >= num_samples
    };
    if is_most(Fault::MediaMissing) {
        let missing = || problems.iter().filter(|problem| problem.fault == Fault::MediaMissing);
        let num_remote = missing().filter(|problem| problem.cause.contains("://")).count();
        if 2 * num_remote > missing().count() {
            return Some(
                "these media are at URLs: see whether this machine reaches their servers, and may read there \
                 (`docs/data.md`, remote stores); or name local copies",
            );
        }
        if missing().any(|problem| problem.cause.contains("it is a directory")) {
            return Some(
                "a medium is one file; frames of a video that are files of their own are not read: make one video of \
                 them, for example `ffmpeg -framerate 2 -i %04d.jpg video.mp4`",
            );
        }
        return Some(
            "set `data.media_root`, or `media_root` of an entry of the mixture, to the directory at which the paths of \
             media start",
        );
    }
    // A name may be at fault only where a field was not found.
    let is_of_a_name = |problem: &Problem| {
        let words = ["is missing", "but no `", "must be there", "under this name"];
        problem.fault == Fault::Record && words.iter().any(|words| problem.cause.contains(words))
    };
    (is_most(Fault::Record) && problems.iter().any(is_of_a_name)).then_some(
        "records have `conversations`, `messages`, `texts`, a question with its answer, media with a `caption`, or `text` alone; a mixture may \
         name fields that are called otherwise, for example `columns: {image: file_name, question: query}`",
    )
}

/// What to do about bad samples: about the cause that most of them share, else about each.
fn advice(problems: &[Problem], num_samples: u64, of_each: &str) -> String {
    systematic(problems, num_samples).unwrap_or(of_each).to_owned()
}

/// Whether a file is one of those that a model directory must have.
fn is_of_model(path: &std::path::Path) -> bool {
    let name = path.file_name().and_then(std::ffi::OsStr::to_str);
    name.is_some_and(|name| ["config.json", "preprocessor_config.json", "tokenizer.json"].contains(&name))
}

impl Hint for DataError {
    fn hint(&self) -> Option<String> {
        match self {
            Self::Artifact(error) => error.hint(),
            Self::Exists { .. } => Some("choose another directory, or pass `--force`".to_owned()),
            Self::Mixture { .. } => Some(
                "a mixture is `datasets:`, a list of `path` or `json_path`, with `sampling_strategy`, `media_root`, \
                 `format`, `split`, `columns` and `ignore` where needed"
                    .to_owned(),
            ),
            Self::Samples { problems, num_samples, .. } => Some(advice(
                problems,
                *num_samples,
                "fix them, or set `data.on_bad_sample` to `skip` (left out) or `substitute`",
            )),
            Self::OfSettings { .. } => Some(
                "fix the model's configuration, tokenizer or chat template, or the function of `model.family`; a function \
                 refuses a medium by `ValueError`"
                    .to_owned(),
            ),
            Self::TooManyBad { problems, num_samples, .. } => {
                Some(advice(problems, *num_samples, "fix them, or raise `data.bad_samples_max_percent`"))
            }
            Self::NoSamples { problems, .. } => {
                systematic(problems, problems.len() as u64).map(str::to_owned)
            }
            Self::TurnedBad { .. } => Some(
                "fix it, or make the data profile again with `dflop profile data` and `data.on_bad_sample` set to \
                 `skip` or `substitute`"
                    .to_owned(),
            ),
            Self::IsPart { .. } => {
                Some("join the parts of all processes with `dflop profile merge`".to_owned())
            }
            Self::IsSample { .. } => Some("profile every sample: `dflop profile data` without `--sample`".to_owned()),
            Self::Drawn { .. } => Some(
                "take `all` of each source in a mixture and profile that, or give a cost for each sample of your dataset"
                    .to_owned(),
            ),
            Self::Uncounted { .. } => {
                Some("fix the source and run `dflop profile data` again, or give a cost for each sample of your dataset".to_owned())
            }
            Self::Changed { .. } => Some("run `dflop profile data` again".to_owned()),
            Self::ShapeChanged { what, .. } if what.starts_with("media_") => Some(
                "make the data profile again with `dflop profile data`, or train with what is there now: \
                 `data.on_changed_media: warn`"
                    .to_owned(),
            ),
            Self::ShapeChanged { .. } | Self::Stale { .. } => {
                Some("make the data profile again with `dflop profile data`".to_owned())
            }
            Self::NoTemplate { .. } => {
                Some("put `chat_template.jinja` there, or set `data.chat_template` to such a file".to_owned())
            }
            Self::Tekken { path } => Some(format!(
                "let transformers write it: `from transformers.integrations.mistral import convert_tekken_tokenizer; \
                 convert_tekken_tokenizer(\"{}\").save_pretrained(\"{}\")`",
                path.display(),
                path.parent().unwrap_or(std::path::Path::new(".")).display()
            )),
            Self::Io { path, source, .. }
                if source.kind() == std::io::ErrorKind::NotFound && is_of_model(path) =>
            {
                Some(
                    "set `model.dir` to a directory with `config.json`, `preprocessor_config.json` and \
                     `tokenizer.json` in Hugging Face form"
                        .to_owned(),
                )
            }
            Self::Io { source, .. } if source.kind() == std::io::ErrorKind::NotFound => Some(
                "check the path: paths in `dflop.yaml` start at its directory, those in a mixture at the mixture's"
                    .to_owned(),
            ),
            Self::Io { source, .. } if source.to_string().contains("in UTF-8") => {
                Some("save it as UTF-8".to_owned())
            }
            Self::Damaged { mend, .. } => Some((*mend).to_owned()),
            Self::Sources { mend, .. } => mend.clone(),
            Self::Io { .. } | Self::Record(_)
            | Self::Model { .. }
            | Self::Function { .. }
            | Self::Asked { .. } => None,
            // The catalogue has these models in both forms, and only one has a processor in transformers.
            Self::UnknownFamily { found, .. } if found == "internvl_chat" => Some(
                "take the model in transformers' form (`model_type` `internvl`), for example `internvl3-8b-hf` of `dflop models`"
                    .to_owned(),
            ),
            Self::UnknownFamily { .. } => {
                Some("take its sizes from transformers' processor, `model.family: transformers`; or give them by a function of Python (CONTRIBUTING.md)".to_owned())
            }
            Self::Media { path, .. } => {
                Some(format!("replace `{}`, or set `data.on_bad_sample` to `skip`", path.display()))
            }
            Self::UnknownFormat { .. } => Some(
                "convert it to JPEG, PNG, WebP, GIF, BMP, TIFF, AVIF, MP4, MOV, MKV, WebM, AVI, WAV, FLAC, MP3, \
                 OGG or M4A, or set `data.on_bad_sample` to `skip`"
                    .to_owned(),
            ),
            Self::Config { file, field, .. } => Some(format!("set `{field}` in the model directory's `{file}`")),
            Self::Shape { .. } => {
                Some("leave the sample out: set `data.on_bad_sample` to `skip`".to_owned())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A directory for relative paths does not mend a server that nobody reaches.
    #[test]
    fn media_at_urls_have_a_hint_of_their_own() {
        let missing = |path: &str| Problem {
            file: "a.jsonl".to_owned(),
            position: Some(0),
            place: None,
            id: None,
            fault: Fault::MediaMissing,
            cause: format!("cannot read `{path}`: Connection refused"),
            substitute: None,
        };
        let [remote, local] = ["https://a.b/c.png", "data/c.png"].map(missing);
        let hint = |problems: &[Problem]| systematic(problems, 3).unwrap_or_default();
        assert!(
            hint(&[remote.clone(), remote.clone(), local.clone()]).starts_with("these media are at URLs")
        );
        assert!(hint(&[remote, local.clone(), local]).starts_with("set `data.media_root`"));
        assert!(hint(&[]).is_empty());
    }
}
