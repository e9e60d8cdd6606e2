//! The rows of an earlier profile of the same dataset, found again by what their records and media say.
//!
//! Positions shift when a line is inserted or a source reordered, so rows are found by the hash of their record and of
//! the sizes and versions of its media, within the source of the same name. Of a row only what cannot be had from the
//! record and from file sizes is held: 40 bytes, at most an eighth more while they are read (10 million rows: 0.4 to
//! 0.45 GB). Lists of segments with their parts are held once each; a dataset has few different ones. A row
//! with media whose parts are not known, of a profile made before there were parts, is not found.

use super::stamp::MediaHash;
use crate::digest::first_eight;
use crate::error::DataError;
use dflop_types::{DataProfile, EncoderParts, EncoderSegments, ProfiledSample, SampleShape};
use sha2::{Digest as _, Sha256};
use std::collections::HashMap;

/// Rows are kept apart by the first bits of their key, so that no one list grows by a copy of the whole.
const BUCKETS: usize = 1 << 12;

/// A profile made before, to take over what has not changed.
pub struct Previous<'a> {
    /// It without its samples; what it was made from, its family, settings and sources are looked at.
    pub header: DataProfile,
    /// Its samples.
    pub rows: Box<dyn Iterator<Item = Result<ProfiledSample, DataError>> + Send + 'a>,
}

impl<'a> Previous<'a> {
    /// A profile in memory.
    pub fn new(profile: &'a DataProfile) -> Self {
        let header = DataProfile {
            made_from: profile.made_from.clone(),
            family: profile.family.clone(),
            settings: profile.settings.clone(),
            sources: profile.sources.clone(),
            ..DataProfile::default()
        };
        Self { header, rows: Box::new(profile.samples.iter().cloned().map(Ok)) }
    }
}

/// What a row says that costs headers or tokens to know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct KnownSample {
    pub(crate) shape: SampleShape,
    pub(crate) media_ms: u64,
    pub(crate) media_hash: u64,
}

#[derive(Debug, Clone, Copy)]
struct Row {
    /// Hash of the record, mixed with the name of its source.
    record: u64,
    media: u64,
    media_ms: u64,
    feature_tokens: u32,
    llm_tokens: u32,
    label_tokens: u32,
    /// Position of its lists of segments and parts.
    lists: u32,
}

/// The rows of an earlier profile by their hashes.
#[derive(Debug)]
pub(crate) struct KnownSamples {
    /// One a source of the new profile.
    salts: Vec<u64>,
    buckets: Vec<Vec<Row>>,
    lists: Vec<Lists>,
}

/// The segments of a sample and how they form parts.
type Lists = (Vec<EncoderSegments>, Vec<EncoderParts>);

impl KnownSamples {
    /// The rows of `previous`, for sources of these names.
    ///
    /// # Errors
    /// Those of its rows.
    pub(crate) fn read(previous: Previous<'_>, sources: &[String]) -> Result<Self, DataError> {
        let salt = |name: &String| first_eight(&Sha256::digest(name.as_bytes()));
        let old_salts: Vec<u64> = previous.header.sources.iter().map(salt).collect();
        let mut known = Self {
            salts: sources.iter().map(salt).collect(),
            buckets: vec![Vec::new(); BUCKETS],
            lists: Vec::new(),
        };
        let mut positions: HashMap<Lists, u32> = HashMap::new();
        for row in previous.rows {
            let ProfiledSample { source, shape, media_ms, record_hash, media_hash, .. } = row?;
            let Some(salt) = old_salts.get(source as usize) else { continue };
            if !shape.encoder_segments.is_empty() && shape.encoder_parts.is_empty() {
                continue;
            }
            let record = record_hash ^ salt;
            let next = known.lists.len() as u32;
            let lists = (shape.encoder_segments, shape.encoder_parts);
            let lists = *positions.entry(lists).or_insert_with_key(|lists| {
                known.lists.push(lists.clone());
                next
            });
            let bucket = &mut known.buckets[bucket_of(record)];
            if bucket.len() == bucket.capacity() {
                bucket.reserve_exact(bucket.len() / 8 + 8);
            }
            bucket.push(Row {
                record,
                media: media_hash,
                media_ms,
                feature_tokens: shape.feature_tokens,
                llm_tokens: shape.llm_tokens,
                label_tokens: shape.label_tokens,
                lists,
            });
        }
        for bucket in &mut known.buckets {
            bucket.sort_unstable_by_key(|row| (row.record, row.media));
        }
        Ok(known)
    }

    /// Whether there is a row of this record, whatever its media.
    pub(crate) fn has_record(&self, source: u32, record_hash: u64) -> bool {
        let record = record_hash ^ self.salts[source as usize];
        self.buckets[bucket_of(record)].binary_search_by_key(&record, |row| row.record).is_ok()
    }

    /// The row of this record with media of these sizes and versions ([`MediaHash::versions`]).
    pub(crate) fn find(&self, source: u32, record_hash: u64, versions: u32) -> Option<KnownSample> {
        let record = record_hash ^ self.salts[source as usize];
        let bucket = &self.buckets[bucket_of(record)];
        let key = |row: &Row| (row.record, MediaHash::of(row.media).versions);
        let at = bucket.binary_search_by_key(&(record, versions), key).ok()?;
        let row = &bucket[at];
        let (encoder_segments, encoder_parts) = self.lists[row.lists as usize].clone();
        Some(KnownSample {
            shape: SampleShape {
                encoder_segments,
                encoder_parts,
                feature_tokens: row.feature_tokens,
                llm_tokens: row.llm_tokens,
                label_tokens: row.label_tokens,
            },
            media_ms: row.media_ms,
            media_hash: row.media,
        })
    }
}

const fn bucket_of(record: u64) -> usize {
    (record >> (64 - BUCKETS.trailing_zeros())) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_costs_what_is_said() {
        assert_eq!(size_of::<Row>(), 40);
    }

    #[test]
    fn a_row_is_found_by_source_record_and_media() {
        let sample = |source, record_hash, media_hash: u64, llm_tokens| ProfiledSample {
            source,
            record_hash,
            media_hash: media_hash << 32 | 5,
            shape: SampleShape { llm_tokens, ..SampleShape::default() },
            ..ProfiledSample::default()
        };
        let profile = DataProfile {
            sources: vec!["a".to_owned(), "b".to_owned()],
            // Cells of a table: one text with three pictures.
            samples: vec![
                sample(0, 7, 1, 10),
                sample(0, 7, 2, 11),
                sample(0, 7, 3, 12),
                sample(1, u64::MAX, 0, 13),
            ],
            ..DataProfile::default()
        };
        // The sources have changed places, and a third has come.
        let sources = ["c".to_owned(), "b".to_owned(), "a".to_owned()];
        let known = KnownSamples::read(Previous::new(&profile), &sources).unwrap();
        let found = |source, record, media| known.find(source, record, media).map(|s| s.shape.llm_tokens);
        assert_eq!(known.find(2, 7, 1).unwrap().media_hash, 1 << 32 | 5);
        assert_eq!([1, 2, 3, 4].map(|media| found(2, 7, media)), [Some(10), Some(11), Some(12), None]);
        assert_eq!((found(1, u64::MAX, 0), found(2, u64::MAX, 0), found(0, 7, 1)), (Some(13), None, None));
        assert!(known.has_record(2, 7) && !known.has_record(0, 7) && !known.has_record(2, 8));
    }
}
