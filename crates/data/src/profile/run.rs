//! Records measured in chunks by many threads, and handed on in order.

use super::Progress;
use super::chunks::{self, Limits, TakenRecord};
use super::decision::{Decision, Rejected};
use super::measure::{BadSample, Corpus, ParsedRecord, Rule, with_line};
use super::previous::KnownSamples;
use super::selection::Selection;
use crate::error::DataError;
use crate::source::location::Location;
use crate::source::unread::Fields;
use dflop_types::{Place, Problem, ProfiledSample, SourceFile};
use rayon::prelude::*;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;

/// Threads where a file is remote: they wait for answers, not for a core.
const REMOTE_THREADS: usize = 32;

/// The threads that measure.
pub(super) struct Workers {
    /// `None`: those of the caller.
    pool: Option<rayon::ThreadPool>,
}

impl Workers {
    pub(super) fn new(corpus: &Corpus) -> Result<Self, DataError> {
        if !corpus.is_remote() || rayon::current_num_threads() >= REMOTE_THREADS {
            return Ok(Self { pool: None });
        }
        let pool = rayon::ThreadPoolBuilder::new().num_threads(REMOTE_THREADS).build();
        let pool = pool.map_err(|error| DataError::Record(format!("no threads to read with: {error}")))?;
        Ok(Self { pool: Some(pool) })
    }

    pub(super) fn run<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        match &self.pool {
            Some(pool) => pool.install(work),
            None => work(),
        }
    }
}

/// How far a run has come.
pub(super) struct Clock {
    /// Bytes before each file of all.
    before: Vec<u64>,
    num_bytes: u64,
    num_samples: Option<u64>,
    samples: AtomicU64,
    bytes: AtomicU64,
}

impl Clock {
    pub(super) fn new(files: &[SourceFile], selections: &[Selection]) -> Self {
        let mut num_bytes = 0;
        let before = files.iter().map(|file| {
            num_bytes += file.bytes;
            num_bytes - file.bytes
        });
        Self {
            before: before.collect(),
            num_bytes,
            num_samples: selections.iter().map(|selection| selection.num_taken).sum(),
            samples: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
        }
    }

    /// One more sample is done, whose record stands at `place`.
    fn tick(&self, place: Place) -> Progress {
        let at = self.before.get(place.file as usize).copied().unwrap_or(0);
        // Of a columnar record `start` is a row.
        let within = if place.len > 0 { place.start.saturating_add(place.len) } else { 0 };
        let at = at.saturating_add(within);
        Progress {
            samples: self.samples.fetch_add(1, Ordering::Relaxed) + 1,
            num_samples: self.num_samples,
            bytes: self.bytes.fetch_max(at, Ordering::Relaxed).max(at),
            num_bytes: self.num_bytes,
        }
    }
}

/// What measuring a record needs.
pub(super) struct Run<'r> {
    pub(super) rule: &'r Rule,
    pub(super) corpus: &'r Corpus,
    pub(super) known: Option<&'r KnownSamples>,
    pub(super) clock: Clock,
    /// Sizes and versions of the files of the sources: members of a shard need no look each.
    pub(super) versions: HashMap<&'r Location, (u64, String)>,
    pub(super) num_reused: AtomicU64,
    pub(super) progress: &'r (dyn Fn(Progress) + Sync),
}

impl Run<'_> {
    /// Measures what is selected, chunk by chunk, and hands it to `decision` in order.
    pub(super) fn all(
        &self,
        workers: &Workers,
        selections: Vec<Selection>,
        limits: Limits,
        decision: &mut Decision<'_>,
    ) -> Result<Vec<String>, DataError> {
        // One chunk is read, one waits, one is measured.
        let (sender, chunks) = mpsc::sync_channel(1);
        std::thread::scope(|scope| {
            let reading = scope.spawn(move || chunks::send(self.corpus, selections, limits, &sender));
            let decided = self.chunks(workers, chunks, decision);
            let read = reading.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            decided.and(read)
        })
    }

    /// By value, so that an error here stops the reading thread.
    fn chunks(
        &self,
        workers: &Workers,
        chunks: mpsc::Receiver<Vec<TakenRecord>>,
        decision: &mut Decision<'_>,
    ) -> Result<(), DataError> {
        for chunk in chunks {
            let measured: Vec<_> = workers.run(|| chunk.par_iter().map(|taken| self.row(taken)).collect());
            for (taken, measured) in chunk.iter().zip(measured) {
                let measured = measured.map(|(sample, fields)| {
                    decision.unread.push(taken.source, sample.place.file, fields);
                    sample
                });
                decision.take(taken.source, measured)?;
            }
        }
        Ok(())
    }

    /// The row of a record, and what else the record has.
    fn row(&self, taken: &TakenRecord) -> Result<(ProfiledSample, Fields), Box<Rejected>> {
        let TakenRecord { source, position, record } = taken;
        let file = self.corpus.first_file[*source as usize] + record.place.file;
        let place = Place { file, ..record.place };
        let measured = self.sample(taken).map_err(|bad| with_line(record, bad));
        (self.progress)(self.clock.tick(place));
        match measured {
            Ok((sample, fields)) => {
                Ok((ProfiledSample { source: *source, position: *position, place, ..sample }, fields))
            }
            Err(bad) => Err(Box::new(Rejected {
                is_of_settings: bad.is_of_settings,
                problem: Problem {
                    file: self.corpus.mixture.sources[*source as usize].name.clone(),
                    position: Some(*position),
                    place: Some(place),
                    id: bad.id,
                    fault: bad.fault,
                    cause: bad.cause,
                    substitute: None,
                },
            })),
        }
    }

    /// The record as a sample, its place left open.
    fn sample(&self, taken: &TakenRecord) -> Result<(ProfiledSample, Fields), BadSample> {
        let from = &self.corpus.mixture.sources[taken.source as usize];
        let fallback_id = self.corpus.fallback_id(taken.source, taken.position);
        let mut parsed = ParsedRecord::new(&taken.record, from)?;
        parsed.fields.unread.retain(|field| !self.rule.tokenizer.reads(field));
        if let Some(sample) = self.known_sample(taken.source, &parsed, &fallback_id) {
            self.num_reused.fetch_add(1, Ordering::Relaxed);
            return Ok((sample, parsed.fields));
        }
        let sample = self.rule.measure_parsed(&parsed, &fallback_id, &self.corpus.stores)?;
        let sample = ProfiledSample {
            id: sample.id,
            kind: sample.kind,
            shape: sample.shape,
            media_bytes: sample.media_bytes,
            media_ms: sample.media_ms,
            record_hash: sample.record_hash,
            media_hash: sample.media_hash,
            ..ProfiledSample::default()
        };
        Ok((sample, parsed.fields))
    }

    /// The sample as the earlier profile has it, where record and media are the same.
    fn known_sample(&self, source: u32, parsed: &ParsedRecord, fallback_id: &str) -> Option<ProfiledSample> {
        let known = self.known.filter(|known| known.has_record(source, parsed.hash))?;
        let stamp = parsed.stamp(|location| match self.versions.get(location) {
            Some(about) => Ok(about.clone()),
            None => self.corpus.stores.about(location),
        })?;
        let sample = known.find(source, parsed.hash, stamp.versions())?;
        Some(ProfiledSample {
            id: parsed.id(fallback_id),
            kind: parsed.kind(),
            shape: sample.shape,
            media_bytes: stamp.bytes,
            media_ms: sample.media_ms,
            record_hash: parsed.hash,
            media_hash: sample.media_hash,
            ..ProfiledSample::default()
        })
    }
}
