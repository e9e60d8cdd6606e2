//! The samples of a data profile, read again for training, and held to what was profiled.

use super::current::{self, Basis};
use super::measure::{BadSample, Corpus, MeasuredSample, Media, Rule};
use super::stamp::MediaHash;
use super::{OnChangedMedia, ProfileSettings, check_complete};
use crate::error::DataError;
use crate::source::location::Location;
use crate::source::readers::RawRecord;
use crate::source::store::{Stores, blocks};
use crate::text::tokens::Tokens;
use dflop_types::{DataProfile, Place, ProfiledSample, SampleIndex, printable};

/// A sample as tokens and media; features take the places where `feature_mask` is true.
#[derive(Debug, Clone, PartialEq)]
pub struct EncodedSample {
    /// The sample's id, as in the data profile.
    pub id: String,
    /// Token ids; placeholder ids where features go.
    pub input_ids: Vec<u32>,
    /// True where a feature takes the place of the embedding, in order.
    pub feature_mask: Vec<bool>,
    /// The id at each position that carries loss, [`crate::text::tokens::NO_LABEL`] elsewhere; not shifted.
    pub labels: Vec<i64>,
    /// In the order of their features.
    pub media: Vec<Media>,
    /// What a person may not expect of its media, one sentence: they changed after they were profiled, or may have.
    pub notice: Option<String>,
}

/// The samples of a data profile.
#[derive(Debug)]
pub struct Dataset {
    profile: DataProfile,
    corpus: Corpus,
    rule: Rule,
    on_changed_media: OnChangedMedia,
}

impl Dataset {
    /// The dataset that `profile` was made from with the same `settings`. Records are read when they are asked for.
    ///
    /// Records and media are not looked at yet: [`Dataset::encode`] compares each with the profile.
    ///
    /// # Errors
    /// [`DataError::IsPart`] and [`DataError::IsSample`] where the profile is not of every sample; [`DataError::Stale`] where tokenizer, processor, settings or the files of the mixture (by name and size) are not those of the
    /// profile; and the errors of reading them.
    pub fn open(settings: &ProfileSettings, profile: DataProfile) -> Result<Self, DataError> {
        check_complete(&profile)?;
        let rule = Rule::open(settings)?;
        let corpus = Corpus::open(settings)?;
        let hashes = [("tokenizer", &rule.tokenizer_hash), ("processor", &rule.processor_hash)];
        let basis = Basis {
            hashes: hashes.map(|(name, hash)| (name.to_owned(), hash.clone())).into(),
            template_hash: rule.template_hash.clone(),
            family: rule.family.name(),
        };
        current::check_settings(settings, &basis, &profile)?;
        current::check_mixture(&corpus.mixture, &profile)?;
        for (index, reader) in corpus.readers.iter().enumerate() {
            current::check_files(index, reader.files(), &corpus.stores, &profile)?;
        }
        Ok(Self { profile, corpus, rule, on_changed_media: settings.on_changed_media })
    }

    /// The data profile.
    pub const fn profile(&self) -> &DataProfile {
        &self.profile
    }

    /// The stores that samples and media are read from.
    pub const fn stores(&self) -> &Stores {
        &self.corpus.stores
    }

    /// Number of samples.
    pub const fn len(&self) -> usize {
        self.profile.samples.len()
    }

    /// Whether there is no sample; a data profile has at least one.
    pub const fn is_empty(&self) -> bool {
        self.profile.samples.is_empty()
    }

    /// The sample as tokens and media, of exactly the shape that was profiled.
    ///
    /// *Complexity*: O(characters and LLM tokens), and one read of each medium's header.
    ///
    /// # Errors
    /// [`DataError::ShapeChanged`] where the sample is not what was profiled, its media by size and sampled bytes among it
    /// unless the settings say otherwise; [`DataError::TurnedBad`] where it cannot
    /// be read any more; those of the reader where its file cannot.
    ///
    /// # Panics
    /// If there is no such sample.
    pub fn encode(&self, sample: SampleIndex) -> Result<EncodedSample, DataError> {
        let profiled = &self.profile.samples[sample.index()];
        let (record, file) = self.record(profiled)?;
        // A substitute has the position of the sample that it replaces; its id shows which sample it is.
        let measured = self.corpus.measure(&self.rule, profiled.source, &profiled.id, &record);
        let measured = measured.map_err(turned_bad(profiled, file))?;
        let notice = self.compare_media(profiled, &measured)?;
        compare(profiled, &measured)?;
        let Tokens { input_ids, feature_mask, labels } = measured.tokens.expand();
        Ok(EncodedSample { id: measured.id, input_ids, feature_mask, labels, media: measured.media, notice })
    }

    /// The messages that the chat template is rendered with for a sample, as JSON: a list of `{"role", "content"}`.
    ///
    /// # Errors
    /// As for [`Dataset::encode`], where its record cannot be read.
    ///
    /// # Panics
    /// If there is no such sample.
    pub fn messages(&self, sample: SampleIndex) -> Result<String, DataError> {
        let profiled = &self.profile.samples[sample.index()];
        let (record, file) = self.record(profiled)?;
        let from = &self.corpus.mixture.sources[profiled.source as usize];
        self.rule.messages(&record, from).map_err(turned_bad(profiled, file))
    }

    /// The record of a sample, and the file that it is in.
    fn record(&self, profiled: &ProfiledSample) -> Result<(RawRecord, &Location), DataError> {
        let index = profiled.source as usize;
        let changed = || DataError::Stale {
            name: "dataset",
            found: format!("file {} of source {index}", profiled.place.file),
            expected: format!("{} sources", self.corpus.readers.len()),
        };
        let reader = self.corpus.readers.get(index).ok_or_else(changed)?;
        let file = profiled.place.file.checked_sub(self.corpus.first_file[index]);
        let file = file.filter(|&file| (file as usize) < reader.files().len()).ok_or_else(changed)?;
        let record = reader.fetch(&self.corpus.stores, Place { file, ..profiled.place })?;
        Ok((record, &reader.files()[file as usize]))
    }

    /// Whether the media of a sample are those that were profiled, as far as sizes, times of change and sampled bytes tell;
    /// and what to say of them.
    ///
    /// # Errors
    /// [`DataError::ShapeChanged`] where they are not, under [`OnChangedMedia::Fail`].
    fn compare_media(
        &self,
        profiled: &ProfiledSample,
        measured: &MeasuredSample,
    ) -> Result<Option<String>, DataError> {
        let id = printable(&profiled.id);
        let (then, now) = (MediaHash::of(profiled.media_hash), MediaHash::of(measured.media_hash));
        // A profile of another version sampled other bytes, or none.
        let sampling = self.profile.settings.get(super::MEDIA_SAMPLING);
        let has_contents = sampling.is_some_and(|sampling| sampling == blocks::SAMPLING);
        let changed = if measured.media_bytes != profiled.media_bytes {
            Some(("media_bytes", measured.media_bytes.to_string(), profiled.media_bytes.to_string()))
        } else if has_contents && now.contents != then.contents {
            let hexadecimal = |hash: u32| format!("{hash:08x}");
            Some(("media_hash (sampled bytes)", hexadecimal(now.contents), hexadecimal(then.contents)))
        } else {
            None
        };
        match (changed, self.on_changed_media) {
            (Some((what, found, expected)), OnChangedMedia::Fail) => {
                Err(DataError::ShapeChanged { id: profiled.id.clone(), what, found, expected })
            }
            (Some((what, found, expected)), OnChangedMedia::Warn) => Ok(Some(format!(
                "sample `{id}` has other media than profiled: `{what}` is {found}, was {expected}"
            ))),
            (None, _) if has_contents && now.versions != then.versions => Ok(Some(format!(
                "the media of sample `{id}` have a different time of change than when they were profiled; their sizes and \
                 the bytes that are compared ({}) are the same",
                blocks::SAMPLING
            ))),
            (None, _) => Ok(None),
        }
    }
}

/// A fault of a sample that was good when it was profiled.
fn turned_bad(profiled: &ProfiledSample, file: &Location) -> impl Fn(BadSample) -> DataError {
    move |bad| DataError::TurnedBad {
        id: profiled.id.clone(),
        file: file.to_string(),
        fault: bad.fault,
        cause: bad.cause,
    }
}

/// Whether a sample is what was profiled.
fn compare(profiled: &ProfiledSample, measured: &MeasuredSample) -> Result<(), DataError> {
    let differs = |what, found: String, expected: String| {
        if found == expected {
            Ok(())
        } else {
            Err(DataError::ShapeChanged { id: profiled.id.clone(), what, found, expected })
        }
    };
    let (now, then) = (&measured.shape, &profiled.shape);
    differs(
        "record_hash",
        format!("{:016x}", measured.record_hash),
        format!("{:016x}", profiled.record_hash),
    )?;
    differs("id", measured.id.clone(), profiled.id.clone())?;
    let segments = |shape: &dflop_types::SampleShape| {
        let groups = shape.encoder_segments.iter().map(|s| format!("{} x {}", s.count, s.tokens));
        format!("[{}]", groups.collect::<Vec<_>>().join(", "))
    };
    differs("encoder_segments", segments(now), segments(then))?;
    // A profile made before there were parts does not name them.
    if !then.encoder_parts.is_empty() {
        let parts = |shape: &dflop_types::SampleShape| {
            let groups = shape.encoder_parts.iter();
            let groups = groups.map(|p| format!("{} x ({}, {})", p.count, p.segments, p.feature_tokens));
            format!("[{}]", groups.collect::<Vec<_>>().join(", "))
        };
        differs("encoder_parts", parts(now), parts(then))?;
    }
    differs("feature_tokens", now.feature_tokens.to_string(), then.feature_tokens.to_string())?;
    differs("llm_tokens", now.llm_tokens.to_string(), then.llm_tokens.to_string())?;
    differs("label_tokens", now.label_tokens.to_string(), then.label_tokens.to_string())
}
