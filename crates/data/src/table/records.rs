//! Which record of the dataset each row of a data profile is.
//!
//! Bad samples have no row of their own, so a row's position is not the position of its record in the dataset. Code that
//! indexes into all records, such as a loader of batches, needs the number of records before each row.

use crate::error::DataError;
use crate::table;
use crate::table::complete::check_complete;
use crate::table::merge::ordered_problems;
use dflop_types::{DataProfile, ProfiledSample, SampleShape};
use std::collections::BTreeSet;
use std::path::Path;

/// A good sample and where it stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Its position among all records, source after source, bad ones counted; from 0.
    pub index: u64,
    /// What decides its cost.
    pub shape: SampleShape,
}

/// The good samples of a dataset, and how many are bad.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Records {
    /// In order. A row that stands in for a bad sample is not among them: it is there under its own index.
    pub good: Vec<Record>,
    /// Bad samples.
    pub num_bad: u64,
}

/// The records of the data profile at `path`. *Complexity*: O(rows + bad samples).
///
/// # Errors
/// As [`visit`].
pub fn read(path: &Path) -> Result<Records, DataError> {
    let mut good = Vec::new();
    let num_bad = visit(path, &mut |index, shape| good.push(Record { index, shape: shape.clone() }))?;
    Ok(Records { good, num_bad })
}

/// Hands the position and the shape of each good sample to `take`, in order; returns how many are bad.
///
/// What `take` keeps is all that is held of them: a profile of ten million samples needs no more.
///
/// # Errors
/// [`DataError::IsPart`] and [`DataError::IsSample`] where the profile is not of every sample, [`DataError::Drawn`]
/// where the mixture passes over records, [`DataError::Uncounted`]; and those of [`table::rows`].
pub fn visit(path: &Path, take: &mut dyn FnMut(u64, &SampleShape)) -> Result<u64, DataError> {
    let header = table::header(path)?;
    check_complete(&header.0)?;
    let mut bad = BTreeSet::new();
    for ((source, position), problem) in ordered_problems(std::slice::from_ref(&header))? {
        if problem.position.is_none() {
            return Err(DataError::Uncounted { name: problem.file, cause: problem.cause });
        }
        bad.insert((source, position));
    }
    let mut counting = Counting { header: &header.0, bad: &bad, source: 0, position: 0, before: 0 };
    for row in table::rows(path)? {
        let row = row?;
        let index = counting.reach(&row)?;
        if !bad.contains(&(row.source, row.position)) {
            take(index, &row.shape);
        }
    }
    Ok(bad.len() as u64)
}

/// How far the records are counted.
struct Counting<'a> {
    header: &'a DataProfile,
    bad: &'a BTreeSet<(u32, u64)>,
    source: u32,
    /// Records of `source` that are counted.
    position: u64,
    /// Records of the sources before it.
    before: u64,
}

impl Counting<'_> {
    /// Counts up to `row` and gives its index.
    fn reach(&mut self, row: &ProfiledSample) -> Result<u64, DataError> {
        while self.source < row.source {
            // Bad ones at the end of a source, or all of it, have no row behind them.
            let rest = self.bad.range((self.source, self.position)..(self.source + 1, 0));
            for &(_, position) in rest {
                self.count_to(position)?;
                self.position = position + 1;
            }
            self.before += self.position;
            (self.source, self.position) = (self.source + 1, 0);
        }
        self.count_to(row.position)?;
        self.position = row.position + 1;
        Ok(self.before + row.position)
    }

    /// Counts the bad ones before `position`; no other may be passed.
    fn count_to(&mut self, position: u64) -> Result<(), DataError> {
        while self.position < position {
            if !self.bad.contains(&(self.source, self.position)) {
                let name = self.header.sources.get(self.source as usize).cloned().unwrap_or_default();
                return Err(DataError::Drawn { name, position: self.position });
            }
            self.position += 1;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflop_types::Problem;

    /// The records of a profile whose rows and bad samples stand at these places, (source, position).
    fn records(rows: &[(u32, u64)], bad: &[(u32, u64)]) -> Result<Records, DataError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(table::FILE_NAME);
        let samples = rows.iter().map(|&(source, position)| ProfiledSample {
            source,
            position,
            shape: SampleShape { llm_tokens: 1 + position as u32, label_tokens: 1, ..SampleShape::default() },
            ..ProfiledSample::default()
        });
        let problems = bad.iter().map(|&(source, position)| Problem {
            file: format!("s{source}"),
            position: Some(position),
            ..Problem::default()
        });
        let profile = DataProfile {
            sources: (0..4).map(|source| format!("s{source}")).collect(),
            problems: problems.collect(),
            samples: samples.collect(),
            ..DataProfile::default()
        };
        table::write(&path, &profile)?;
        read(&path)
    }

    fn indices(records: &Records) -> Vec<u64> {
        records.good.iter().map(|record| record.index).collect()
    }

    #[test]
    fn bad_samples_are_counted_and_have_no_index() {
        // Bad: the first of source 0, its last, all of source 1, the second of source 3; source 2 is empty.
        let rows = [(0, 1), (0, 2), (3, 0), (3, 2)];
        let found = records(&rows, &[(0, 0), (0, 3), (1, 0), (1, 1), (3, 1)]).unwrap();
        assert_eq!((indices(&found), found.num_bad), (vec![1, 2, 6, 8], 5));
        assert_eq!(found.good[3].shape.llm_tokens, 3);
        assert_eq!(indices(&records(&[(0, 0), (0, 1), (1, 0)], &[]).unwrap()), [0, 1, 2]);
    }

    #[test]
    fn a_row_that_stands_in_for_another_is_left_out() {
        let found = records(&[(0, 0), (0, 1), (0, 2)], &[(0, 1)]).unwrap();
        assert_eq!((indices(&found), found.num_bad), (vec![0, 2], 1));
    }

    #[test]
    fn records_that_the_mixture_leaves_out_are_an_error() {
        // `random:`, `end:`, and a gap before a bad sample at the end of a source.
        for (rows, bad, at) in [
            (&[(0, 0), (0, 2)][..], &[][..], ("s0", 1)),
            (&[(0, 0), (1, 4)], &[], ("s1", 0)),
            (&[(0, 0), (1, 0)], &[(0, 5)], ("s0", 1)),
        ] {
            match records(rows, bad) {
                Err(DataError::Drawn { name, position }) => assert_eq!((name.as_str(), position), at),
                other => panic!("{other:?}"),
            }
        }
    }
}
