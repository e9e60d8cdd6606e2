//! A dataset in, its data profile out: one shape a sample.
//!
//! Records are read in chunks while the chunk before is measured by all cores, and rows are handed on in order: memory
//! does not grow with the dataset, except by a bit of each bad sample, and by 40 to 45 bytes a row of an earlier
//! profile whose rows are taken over ([`Previous`]). The rows do not depend on the number of threads.

mod chunks;
mod current;
pub mod dataset;
mod decision;
pub(crate) mod measure;
mod previous;
mod run;
mod selection;
mod settings;
mod stamp;

use crate::error::DataError;
use crate::source::location::Location;
use crate::source::store::blocks;
use crate::statistics::summary::Statistics;
use crate::table::{Writer, problems};
use chunks::Limits;
use decision::Decision;
use dflop_types::{DataProfile, MadeFrom, ProfiledSample, SourceFile};
use measure::{Corpus, Rule};
use previous::KnownSamples;
use rayon::prelude::*;
use run::{Clock, Run, Workers};
use selection::{Selection, allocate};
use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;

use crate::table::merge::{BAD_SAMPLES_DEFAULT, BAD_SAMPLES_MAX};

pub use crate::table::complete::{check_complete, check_whole};
pub use crate::table::problems::{BAD_SAMPLES_FEW, BAD_SAMPLES_MAX_PERCENT};
pub use current::check_current;
pub use previous::Previous;
pub use settings::{ESTIMATED, OnBadSample, OnChangedMedia, ProfileSettings, TEXT_TOKENS};

/// Settings that decide which samples are taken, not what their shapes are.
const OF_CHOICE: [&str; 4] = ["on_bad_sample", BAD_SAMPLES_MAX, "seed", current::MIXTURE];
/// The setting that names the profiler, so that rows of another version are not taken over.
const MEASURED_BY: &str = "measured_by";

/// The setting that says which bytes of a medium [`ProfiledSample::media_hash`] has.
const MEDIA_SAMPLING: &str = "media_sampling";

/// Where rows go, one by one, in the order of the mixture.
pub trait RowSink {
    /// Takes the next row.
    ///
    /// # Errors
    /// Of the sink: they end the profile.
    fn push(&mut self, sample: &ProfiledSample) -> Result<(), DataError>;
}

impl RowSink for Vec<ProfiledSample> {
    fn push(&mut self, sample: &ProfiledSample) -> Result<(), DataError> {
        self.push(sample.clone());
        Ok(())
    }
}

impl RowSink for Writer {
    fn push(&mut self, sample: &ProfiledSample) -> Result<(), DataError> {
        Self::push(self, sample)
    }
}

/// How far a profile has come.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Progress {
    /// Samples measured.
    pub samples: u64,
    /// Samples there are, where that is known before they are read.
    pub num_samples: Option<u64>,
    /// Bytes of the sources that lie behind; a columnar file counts when it is done.
    pub bytes: u64,
    /// Bytes of all sources.
    pub num_bytes: u64,
}

/// A data profile whose rows went to a sink, and what there is to say about it.
#[derive(Debug, Clone, PartialEq)]
pub struct ProfiledRows {
    /// The data profile without its samples.
    pub header: DataProfile,
    /// Samples that were looked at, bad ones included.
    pub num_samples: u64,
    /// Samples taken over from the earlier profile, their media not opened and their text not tokenized.
    pub num_reused: u64,
    /// Requests sent to remote stores; each try counts.
    pub num_requests: u64,
    /// Bytes of objects received from them.
    pub received_bytes: u64,
    /// What the rows come to.
    pub statistics: Statistics,
    /// What was done that a person may not expect, one sentence each.
    pub notices: Vec<String>,
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

/// The data profile of a dataset, in memory: [`profile_into`] a list.
///
/// `progress` is called with samples done and all samples (0 where they are not known before they are read), from
/// several threads.
///
/// # Errors
/// Those of [`profile_into`].
pub fn profile(
    settings: &ProfileSettings,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<ProfileOutcome, DataError> {
    let mut samples = Vec::new();
    let progress = |at: Progress| progress(at.samples, at.num_samples.unwrap_or(0));
    let ProfiledRows { header, num_samples, notices, .. } =
        profile_into(settings, None, &mut samples, &progress)?;
    Ok(ProfileOutcome { profile: DataProfile { samples, ..header }, num_samples, notices })
}

/// The data profile of a dataset, its rows handed to `sink`: headers are read, no pixel is decoded.
///
/// Rows come in the order of the mixture, whatever the number of threads. A sample of `previous` (made with the same
/// tokenizer, processor, family and settings) whose record says the same and whose media have the same sizes and
/// versions is taken over. `progress` is called from several threads. *Complexity*: O(characters of text + media
/// headers); O(bytes of records + number of media) where all are taken over. A source is read twice where its
/// sampling, a sample or a part needs the number of its records.
///
/// # Errors
/// [`DataError::Samples`] with every bad sample, under [`OnBadSample::Fail`], when all are measured (a part leaves bad
/// samples to the merge); [`DataError::TooManyBad`] under the other policies; [`DataError::OfSettings`] under each of them;
/// [`DataError::NoSamples`] if none is left; what stops before the first sample:
/// [`DataError::Asked`], [`DataError::Mixture`], [`DataError::Io`], [`DataError::Record`], [`DataError::Model`],
/// [`DataError::UnknownFamily`], [`DataError::Config`]; [`DataError::Changed`]; and those of the sink.
pub fn profile_into(
    settings: &ProfileSettings,
    previous: Option<Previous<'_>>,
    sink: &mut dyn RowSink,
    progress: &(dyn Fn(Progress) + Sync),
) -> Result<ProfiledRows, DataError> {
    profile_in_chunks(settings, previous, sink, progress, Limits::default())
}

/// [`profile_into`] with chunks of any size.
fn profile_in_chunks(
    settings: &ProfileSettings,
    previous: Option<Previous<'_>>,
    sink: &mut dyn RowSink,
    progress: &(dyn Fn(Progress) + Sync),
    limits: Limits,
) -> Result<ProfiledRows, DataError> {
    settings.check()?;
    let rule = Rule::open(settings)?;
    let corpus = Corpus::open(settings)?;
    let workers = Workers::new(&corpus)?;
    let mut header = DataProfile {
        made_from: MadeFrom::from([
            ("tokenizer".to_owned(), rule.tokenizer_hash.clone()),
            ("processor".to_owned(), rule.processor_hash.clone()),
        ]),
        family: rule.family.name().to_owned(),
        settings: settings_of(settings),
        sources: corpus.mixture.sources.iter().map(|source| source.name.clone()).collect(),
        files: workers.run(|| files_of(&corpus))?,
        part: settings.part,
        ..DataProfile::default()
    };
    header.settings.insert(current::MIXTURE.to_owned(), current::mixture_hash(&corpus.mixture));
    header.settings.extend(rule.llm_size.clone().map(|size| (DataProfile::LLM_SIZE.to_owned(), size)));
    header.made_from.extend(rule.template_hash.clone().map(|hash| ("chat_template".to_owned(), hash)));
    let mut notices = Vec::new();
    if header.settings.get(TEXT_TOKENS).is_some_and(|how| how == ESTIMATED) {
        notices.push(
            "text tokens are estimated, because no tokenizer was given (`model.tokenizer` names a directory with one)".to_owned(),
        );
    }
    let known = known_samples(previous, &header, &mut notices);
    let selections = workers.run(|| select(settings, &corpus))?;
    header.strata = selections.iter().filter_map(|selection| selection.stratum).collect();
    // A sample of all is no sample: it trains, too.
    if header.strata.iter().all(|stratum| stratum.drawn == stratum.population) {
        header.strata.clear();
    }
    let run = Run {
        rule: &rule,
        corpus: &corpus,
        known: known.as_ref(),
        clock: Clock::new(&header.files, &selections),
        versions: header
            .files
            .iter()
            .zip(corpus.readers.iter().flat_map(|reader| reader.files()))
            .map(|(file, location)| (location, (file.bytes, file.version.clone())))
            .collect(),
        num_reused: AtomicU64::new(0),
        progress,
    };
    let policy = settings.part.is_none().then_some(settings.on_bad_sample);
    let mut decision = Decision::new(sink, policy, rule.max_positions, &header.sources);
    notices.extend(run.all(&workers, selections, limits, &mut decision)?);
    check_unchanged(&corpus, &header.files)?;

    for (source, reader) in corpus.readers.iter().enumerate() {
        for file in 0..reader.files().len() {
            for column in reader.unread(file) {
                decision.unread.push_column(source, corpus.first_file[source] as usize + file, column);
            }
        }
    }
    notices.extend(decision.unread.missing(&corpus.mixture.sources));
    notices.extend(decision.unread.notices(&header.sources));
    notices.extend(decision.notices());
    let num_reused = run.num_reused.into_inner();
    let Decision { tally, hash, problems, num_samples, num_rows, .. } = decision;
    if policy == Some(OnBadSample::Fail) && !problems.is_empty() {
        return Err(DataError::Samples { problems, num_samples, files: header.files });
    }
    if policy.is_some() && num_rows > 0 {
        problems::check_bad_samples(&problems, num_samples, settings.bad_samples_max_percent, &header.files)?;
    }
    if num_rows == 0 && settings.part.is_none() {
        return Err(DataError::NoSamples { path: settings.mixture.clone(), problems, files: header.files });
    }
    header.problems = problems;
    header.made_from.insert("dataset".to_owned(), hash.finish());
    let statistics = tally.finish(&header);
    let (num_requests, received_bytes) = corpus.stores.traffic();
    Ok(ProfiledRows { header, num_samples, num_reused, num_requests, received_bytes, statistics, notices })
}

/// The settings as a data profile carries them.
fn settings_of(settings: &ProfileSettings) -> BTreeMap<String, String> {
    let measured_by = (MEASURED_BY.to_owned(), concat!("dflop ", env!("CARGO_PKG_VERSION")).to_owned());
    let facts = settings.facts().into_iter().map(|(name, value)| (name.to_owned(), value));
    let sampling = (MEDIA_SAMPLING.to_owned(), blocks::SAMPLING.to_owned());
    let max_percent = settings.bad_samples_max_percent;
    let max_percent =
        max_percent.map_or_else(|| BAD_SAMPLES_DEFAULT.to_owned(), |percent| percent.to_string());
    let max_percent = (BAD_SAMPLES_MAX.to_owned(), max_percent);
    facts.chain([measured_by, sampling, max_percent]).collect()
}

/// The files of all sources, in order.
fn files_of(corpus: &Corpus) -> Result<Vec<SourceFile>, DataError> {
    let files = corpus.readers.iter().enumerate();
    let files: Vec<_> = files.flat_map(|(i, reader)| reader.files().iter().map(move |l| (i, l))).collect();
    files
        .into_par_iter()
        .map(|(index, location)| {
            let (bytes, version) = corpus.stores.about(location)?;
            Ok(SourceFile { source: index as u32, path: location.to_string(), bytes, version })
        })
        .collect()
}

/// `Ok` if the local files are those that were looked at first. A look at remote ones would cost a request each.
fn check_unchanged(corpus: &Corpus, files: &[SourceFile]) -> Result<(), DataError> {
    let locations = corpus.readers.iter().flat_map(|reader| reader.files());
    for (before, location) in files.iter().zip(locations) {
        if matches!(location, Location::Local(_)) {
            let (bytes, version) = corpus.stores.about(location)?;
            if (bytes, &version) != (before.bytes, &before.version) {
                let change =
                    format!("{} bytes at {}, then {bytes} at {version}", before.bytes, before.version);
                return Err(DataError::Changed { file: before.path.clone(), change });
            }
        }
    }
    Ok(())
}

/// The rows of `previous` where they may be taken over, else a notice of why not.
fn known_samples(
    previous: Option<Previous<'_>>,
    header: &DataProfile,
    notices: &mut Vec<String>,
) -> Option<KnownSamples> {
    let previous = previous?;
    let mut differs = Vec::new();
    for name in ["tokenizer", "processor", "chat_template"] {
        if previous.header.made_from.get(name) != header.made_from.get(name) {
            differs.push(name);
        }
    }
    if previous.header.family != header.family {
        differs.push("family");
    }
    let (then, now) = (&previous.header.settings, &header.settings);
    let names: std::collections::BTreeSet<&str> = then.keys().chain(now.keys()).map(String::as_str).collect();
    differs
        .extend(names.iter().filter(|name| !OF_CHOICE.contains(name) && then.get(**name) != now.get(**name)));
    if !differs.is_empty() {
        let differs = differs.join("`, `");
        notices
            .push(format!("the earlier profile was made with another `{differs}`: every sample is measured"));
        return None;
    }
    match KnownSamples::read(previous, &header.sources) {
        Ok(known) => Some(known),
        Err(error) => {
            notices.push(format!("the earlier profile cannot be read: every sample is measured ({error})"));
            None
        }
    }
}

/// What is taken of each source; records are counted only where that is needed.
fn select(settings: &ProfileSettings, corpus: &Corpus) -> Result<Vec<Selection>, DataError> {
    let needs_all = settings.sample.is_some() || settings.part.is_some();
    let sources: Vec<_> = corpus.mixture.sources.iter().zip(&corpus.readers).enumerate().collect();
    let mut selections: Vec<Selection> = sources
        .into_par_iter()
        .map(|(index, (source, reader))| {
            let is_counted = needs_all || Selection::needs_total(source.sampling);
            let total = is_counted.then(|| reader.count(&corpus.stores)).transpose()?;
            Ok(Selection::new(source.sampling, total, settings.seed, index as u64))
        })
        .collect::<Result<_, DataError>>()?;
    if let Some(wanted) = settings.sample {
        let populations: Vec<u64> = selections.iter().map(|s| s.num_taken.unwrap_or(0)).collect();
        let drawn = allocate(&populations, wanted).map_err(|num_filled| DataError::Asked {
            option: "--sample",
            rule: format!("{wanted} samples, at least 1 of each of the {num_filled} sources is needed"),
        })?;
        for (index, (selection, drawn)) in selections.iter_mut().zip(drawn).enumerate() {
            selection.sample(drawn, settings.seed, index as u64);
        }
    }
    if let Some(part) = settings.part {
        for selection in &mut selections {
            selection.part(part);
        }
    }
    Ok(selections)
}

#[cfg(test)]
mod tests;
