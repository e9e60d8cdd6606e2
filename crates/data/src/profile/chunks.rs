//! The records of a mixture in bounded chunks, read by one thread while others measure the chunk before.

use super::measure::Corpus;
use super::selection::Selection;
use crate::error::DataError;
use crate::source::location::MediaPlace;
use crate::source::readers::{Body, RawRecord};
use serde_json::Value;
use std::sync::mpsc::SyncSender;

/// Where a chunk ends.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Records of a chunk, at most.
    pub(crate) records: usize,
    /// A chunk ends with the record that brings it to this many bytes.
    pub(crate) bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { records: 2048, bytes: 32 << 20 }
    }
}

/// A record that is taken.
#[derive(Debug)]
pub(crate) struct TakenRecord {
    pub(crate) source: u32,
    /// Among the records of its source, from 0.
    pub(crate) position: u64,
    pub(crate) record: RawRecord,
}

/// Reads what `selections` (one a source) take, in order, and sends it in chunks; ends early where nobody listens any
/// more. The answer is what a person may not expect.
///
/// # Errors
/// Those of the readers, and [`DataError::Changed`] where a source has not the records that were counted.
pub(crate) fn send(
    corpus: &Corpus,
    selections: Vec<Selection>,
    limits: Limits,
    chunks: &SyncSender<Vec<TakenRecord>>,
) -> Result<Vec<String>, DataError> {
    let mut notices = Vec::new();
    let (mut chunk, mut bytes) = (Vec::new(), 0);
    for (index, (reader, mut selection)) in corpus.readers.iter().zip(selections).enumerate() {
        let source = &corpus.mixture.sources[index];
        let mut position = 0;
        let mut is_whole = true;
        // A source of which no sample is taken is opened too, so that an unreadable one is reported.
        for record in reader.records(&corpus.stores)? {
            if selection.is_done() {
                is_whole = false;
                break;
            }
            let record = record?;
            if selection.takes() {
                bytes += weight(&record);
                chunk.push(TakenRecord { source: index as u32, position, record });
            }
            position += 1;
            if chunk.len() >= limits.records || bytes >= limits.bytes {
                bytes = 0;
                if chunks.send(std::mem::take(&mut chunk)).is_err() {
                    return Ok(notices);
                }
            }
        }
        let total = selection.total.or(is_whole.then_some(position));
        if let Some((asked, total)) = total.and_then(|total| Some((source.sampling.missing(total)?, total))) {
            notices
                .push(format!("`{}` has {total} samples, {asked} are asked for: all are taken", source.name));
        }
        if let Some(counted) = selection.total.filter(|&counted| is_whole && counted != position) {
            return Err(DataError::Changed {
                file: source.name.clone(),
                change: format!("it had {counted} samples when they were counted, then {position}"),
            });
        }
    }
    if !chunk.is_empty() {
        // Where nobody listens, the measuring side has its own error.
        let _ = chunks.send(chunk);
    }
    Ok(notices)
}

/// About how many bytes of memory a record takes.
fn weight(record: &RawRecord) -> usize {
    let body = match &record.body {
        Body::Json { text, .. } => text.len(),
        Body::Fields(fields) => weight_of(fields),
        Body::Unsound(cause) => cause.len(),
    };
    let of_medium = |place: &MediaPlace| match place {
        MediaPlace::Bytes { bytes, .. } => bytes.len(),
        MediaPlace::Whole(_) | MediaPlace::Range { .. } => 0,
    };
    size_of::<TakenRecord>()
        + body
        + record
            .attachments
            .iter()
            .map(|place| size_of::<MediaPlace>() + 64 + of_medium(place))
            .sum::<usize>()
}

fn weight_of(value: &Value) -> usize {
    size_of::<Value>()
        + match value {
            Value::Null | Value::Bool(_) | Value::Number(_) => 0,
            Value::String(text) => text.len(),
            Value::Array(list) => list.iter().map(weight_of).sum(),
            Value::Object(fields) => fields.iter().map(|(key, value)| key.len() + weight_of(value)).sum(),
        }
}
