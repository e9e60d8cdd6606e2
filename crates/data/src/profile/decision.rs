//! Measured samples in order: good ones become rows, bad ones are decided by the policy.

use super::{OnBadSample, RowSink};
use crate::error::DataError;
use crate::source::unread::UnreadCounts;
use crate::statistics::tally::Tally;
use dflop_types::{DatasetHasher, Problem, ProfiledSample, counted, printable};
use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};

/// A sample that gives no row.
#[derive(Debug)]
pub(crate) struct Rejected {
    pub(crate) problem: Problem,
    /// Whether the sample is not at fault. Then every policy ends the command, because other samples would fail for
    /// the same reason.
    pub(crate) is_of_settings: bool,
}

/// Takes samples in order, hands rows on in order, and keeps count.
pub(crate) struct Decision<'s> {
    sink: &'s mut dyn RowSink,
    /// Whether a neighbour stands in for a bad sample.
    substitutes: bool,
    max_positions: Option<u64>,
    /// The last good sample of the source under way.
    neighbour: Option<ProfiledSample>,
    /// Positions in `problems` that wait for the first good sample of the source under way.
    waiting: Vec<usize>,
    source: u32,
    pub(crate) tally: Tally,
    /// What their records hold that is not read.
    pub(crate) unread: UnreadCounts,
    pub(crate) hash: DatasetHasher,
    pub(crate) problems: Vec<Problem>,
    /// Samples seen, bad ones included.
    pub(crate) num_samples: u64,
    /// Rows handed on.
    pub(crate) num_rows: u64,
    num_silent: u64,
    num_long: u64,
    ids: SeenIds,
}

impl<'s> Decision<'s> {
    /// Nothing seen yet. `policy` is `None` where bad samples are left undecided.
    pub(crate) fn new(
        sink: &'s mut dyn RowSink,
        policy: Option<OnBadSample>,
        max_positions: Option<u64>,
        sources: &[String],
    ) -> Self {
        Self {
            sink,
            substitutes: policy == Some(OnBadSample::Substitute),
            max_positions,
            neighbour: None,
            waiting: Vec::new(),
            source: 0,
            tally: Tally::new(sources),
            unread: UnreadCounts::new(sources.len()),
            hash: DatasetHasher::default(),
            problems: Vec::new(),
            num_samples: 0,
            num_rows: 0,
            num_silent: 0,
            num_long: 0,
            ids: SeenIds::default(),
        }
    }

    /// The next sample of `source`.
    ///
    /// # Errors
    /// [`DataError::OfSettings`] where no sample is at fault; those of the sink.
    pub(crate) fn take(
        &mut self,
        source: u32,
        measured: Result<ProfiledSample, Box<Rejected>>,
    ) -> Result<(), DataError> {
        self.num_samples += 1;
        if source != self.source {
            // Bad samples that still wait have no good one in their source: they are left out.
            (self.source, self.neighbour) = (source, None);
            self.waiting.clear();
        }
        match measured {
            Ok(sample) => {
                self.ids.push(&sample.id);
                for index in std::mem::take(&mut self.waiting) {
                    self.substitute(index, &sample)?;
                }
                self.row(&sample)?;
                if self.substitutes {
                    self.neighbour = Some(sample);
                }
            }
            Err(rejected) if rejected.is_of_settings => {
                return Err(DataError::OfSettings { problem: Box::new(rejected.problem) });
            }
            Err(rejected) => {
                let index = self.problems.len();
                self.problems.push(rejected.problem);
                if self.substitutes {
                    match self.neighbour.clone() {
                        Some(neighbour) => self.substitute(index, &neighbour)?,
                        None => self.waiting.push(index),
                    }
                }
            }
        }
        Ok(())
    }

    /// Puts `neighbour` in the place of a bad sample.
    fn substitute(&mut self, problem: usize, neighbour: &ProfiledSample) -> Result<(), DataError> {
        let problem = &mut self.problems[problem];
        problem.substitute = Some(neighbour.id.clone());
        let position = problem.position.unwrap_or(neighbour.position);
        self.row(&ProfiledSample { position, ..neighbour.clone() })
    }

    fn row(&mut self, sample: &ProfiledSample) -> Result<(), DataError> {
        self.num_rows += 1;
        self.num_silent += u64::from(sample.shape.label_tokens == 0);
        let is_long = self.max_positions.is_some_and(|max| u64::from(sample.shape.llm_tokens) > max);
        self.num_long += u64::from(is_long);
        self.tally.push(sample);
        self.hash.push(sample);
        self.sink.push(sample)
    }

    /// Sentences for people about rows that may surprise them.
    pub(crate) fn notices(&self) -> Vec<String> {
        let mut notices = Vec::new();
        if self.num_silent > 0 {
            notices.push(format!(
                "{} no label token: such samples cost time, but the model learns nothing from them",
                samples_have(self.num_silent)
            ));
        }
        if let Some(max) = self.max_positions.filter(|_| self.num_long > 0) {
            notices.push(format!(
                "{} more LLM tokens than the model's `max_position_embeddings` {max}: none of them is cut",
                samples_have(self.num_long)
            ));
        }
        if let Some(first) = &self.ids.first_repeated {
            notices.push(format!(
                "{} an id that a sample before it has too, `{}` is the first: each is a sample of its own, but messages \
                 and `dflop check --sample` cannot tell them apart",
                samples_have(self.ids.num_repeated),
                printable(first)
            ));
        }
        notices
    }
}

/// The ids of samples, to find those that come again: by their hashes, of the first [`SeenIds::MAX`], so that memory does not
/// grow with the dataset.
#[derive(Default)]
struct SeenIds {
    hashes: HashSet<u64>,
    num_repeated: u64,
    first_repeated: Option<String>,
}

impl SeenIds {
    /// Hashes that are kept: 18 MB.
    const MAX: usize = 1 << 20;

    fn push(&mut self, id: &str) {
        let mut hasher = DefaultHasher::new();
        id.hash(&mut hasher);
        let hash = hasher.finish();
        if self.hashes.contains(&hash) {
            self.num_repeated += 1;
            self.first_repeated.get_or_insert_with(|| id.to_owned());
        } else if self.hashes.len() < Self::MAX {
            self.hashes.insert(hash);
        }
    }
}

fn samples_have(number: u64) -> String {
    format!("{} {}", counted(number, "sample"), if number == 1 { "has" } else { "have" })
}
