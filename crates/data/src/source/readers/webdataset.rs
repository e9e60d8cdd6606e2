//! `WebDataset`: tar shards whose members of one key are one sample.
//!
//! A source is one `.tar` file, a brace pattern of them (`shard-{000000..000012}.tar`), or a directory. Media are not
//! read: each becomes an attachment, a range of the shard. A shard with an index (`shard.tar.idx`) is counted and
//! sought in by it; an index that does not fit its shard is an error.

mod apart;
pub(super) mod braces;
mod index;
mod sample;
mod walk;

use super::{Body, RawRecord, Reader, Records};
use crate::error::DataError;
use crate::source::location::Location;
use crate::source::mixture::Source;
use crate::source::store::Stores;
use apart::Earlier;
use dflop_types::Place;
pub(super) use sample::{Sample, is_text};
use std::collections::BTreeSet;
use std::fmt;
use walk::Walk;

/// What becomes of the members of a sample.
pub(super) trait Layout: Send + Sync + fmt::Debug {
    /// Whether the record needs the text of this part.
    fn reads(&self, part: &str) -> bool;

    /// The record, or why there is none.
    fn body(&self, sample: &Sample) -> Result<Body, String>;
}

/// Fields by the names of members, as `WebDataset` has it.
#[derive(Debug)]
pub(super) struct Plain;

impl Layout for Plain {
    fn reads(&self, part: &str) -> bool {
        is_text(part)
    }

    fn body(&self, sample: &Sample) -> Result<Body, String> {
        sample.plain()
    }
}

/// What a file beside the shards says of one of them.
#[derive(Debug, Clone, Default)]
pub(super) struct Declared {
    /// Its samples, those left out included.
    pub(super) count: Option<u64>,
    /// Keys of samples that are left out.
    pub(super) excluded: BTreeSet<String>,
}

/// Tar shards, in order.
#[derive(Debug)]
pub(super) struct Shards {
    files: Vec<Location>,
    /// One a file.
    declared: Vec<Declared>,
    /// The file that declares, for messages.
    declared_by: Option<Location>,
    layout: Box<dyn Layout>,
}

/// The reader for a `.tar` file, a brace pattern, or a directory of `.tar` files.
///
/// # Errors
/// [`DataError::Io`] where it is not there, [`DataError::Record`] where the pattern is broken, the directory has no
/// shard, or its shard list is not of its shards.
pub(super) fn open(source: &Source, stores: &Stores) -> Result<Box<dyn Reader>, DataError> {
    let location = &source.location;
    // A compressed one is refused by its first bytes.
    let name = location.name().to_ascii_lowercase();
    if [".tar", ".tar.gz", ".tgz"].iter().any(|ending| name.ends_with(ending)) {
        let files = if is_pattern(location) { expand(location)? } else { vec![location.clone()] };
        if let [file] = files.as_slice() {
            stores.about(file)?;
        }
        let declared = vec![Declared::default(); files.len()];
        return Ok(Box::new(Shards::new(files, declared, None, Box::new(Plain))));
    }
    let listed = stores.list(location)?;
    let files: Vec<Location> = listed.iter().filter(|file| file.extension() == "tar").cloned().collect();
    if files.is_empty() {
        return Err(DataError::Record(format!("`{location}`: the directory has no `.tar` file")));
    }
    let (declared_by, counts) = match index::listed(&listed, &files, stores)? {
        Some((list, counts)) => (Some(list), counts.into_iter().map(Some).collect()),
        None => (None, vec![None; files.len()]),
    };
    let declared = counts.into_iter().map(|count| Declared { count, ..Declared::default() }).collect();
    Ok(Box::new(Shards::new(files, declared, declared_by, Box::new(Plain))))
}

/// Whether the location stands for several; a file that is there stands for itself.
pub(super) fn is_pattern(location: &Location) -> bool {
    match location {
        Location::Local(path) => path.to_string_lossy().contains('{') && !path.exists(),
        Location::Remote(url) => url.contains('{'),
    }
}

/// Every location that a pattern stands for.
fn expand(pattern: &Location) -> Result<Vec<Location>, DataError> {
    let names = braces::expand(&pattern.to_string()).map_err(DataError::Record)?;
    Ok(names.iter().map(|name| Location::parse(name)).collect())
}

impl Shards {
    /// Shards in this order, and what is declared of each.
    pub(super) fn new(
        files: Vec<Location>,
        declared: Vec<Declared>,
        declared_by: Option<Location>,
        layout: Box<dyn Layout>,
    ) -> Self {
        Self { files, declared, declared_by, layout }
    }

    /// Whether a shard can hold as many samples as are declared. A look at a remote one costs a request: only counts
    /// that are out of the ordinary are worth it.
    fn check_size(&self, file: usize, count: u64, stores: &Stores) -> Result<(), DataError> {
        let shard = &self.files[file];
        if count < 1 << 20 && matches!(shard, Location::Remote(_)) {
            return Ok(());
        }
        let (bytes, _) = stores.about(shard)?;
        if count <= bytes / super::tar::BLOCK {
            return Ok(());
        }
        let by = self.declared_by.as_ref().map(ToString::to_string).unwrap_or_default();
        let cause = format!("it declares {count} samples, the shard has {bytes} bytes");
        Err(DataError::Record(format!("`{by}` does not fit `{shard}`: {cause}")))
    }

    /// Samples of one shard, those left out not included.
    fn count_of(&self, file: usize, stores: &Stores) -> Result<u64, DataError> {
        let declared = &self.declared[file];
        if let (Some(count), true) = (declared.count, declared.excluded.is_empty()) {
            self.check_size(file, count, stores)?;
            return Ok(count);
        }
        let mut walk = Walk::open(&self.files[file], stores)?;
        if declared.excluded.is_empty()
            && let Some(count) = walk.count_by_index()?
        {
            return Ok(count);
        }
        let mut samples = Samples {
            shards: self,
            stores,
            file,
            end: file + 1,
            walk: Some(walk),
            seen: BTreeSet::new(),
            earlier: Earlier::default(),
            is_over: false,
        };
        let mut count = 0;
        while samples.step(false)?.is_some() {
            count += 1;
        }
        Ok(count)
    }
}

impl Reader for Shards {
    fn files(&self) -> &[Location] {
        &self.files
    }

    fn count(&self, stores: &Stores) -> Result<u64, DataError> {
        (0..self.files.len()).map(|file| self.count_of(file, stores)).sum()
    }

    fn records<'a>(&'a self, stores: &'a Stores) -> Result<Records<'a>, DataError> {
        let end = self.files.len();
        Ok(Box::new(Samples {
            shards: self,
            stores,
            file: 0,
            end,
            walk: None,
            seen: BTreeSet::new(),
            earlier: Earlier::default(),
            is_over: false,
        }))
    }

    fn fetch(&self, stores: &Stores, place: Place) -> Result<RawRecord, DataError> {
        let Some(location) = self.files.get(place.file as usize) else {
            let cause = format!("file {} of {} is asked for", place.file, self.files.len());
            return Err(DataError::Record(cause));
        };
        let sample = Walk::fetch(location, stores, place, self.layout.as_ref())?;
        Ok(sample.record(place.file, location, |sample| self.layout.body(sample)))
    }
}

/// The samples of shards, one after the other. After an error there is no more: what stands behind a broken place of a
/// shard cannot be told, and a shard left out would be missed.
struct Samples<'a> {
    shards: &'a Shards,
    stores: &'a Stores,
    /// The shard under way.
    file: usize,
    /// Where to stop.
    end: usize,
    walk: Option<Walk<'a>>,
    /// Samples that are left out, found in the shard under way.
    seen: BTreeSet<String>,
    /// Samples of the shard under way.
    earlier: Earlier,
    is_over: bool,
}

impl Samples<'_> {
    /// The next sample that is not left out, with its texts or without.
    fn step(&mut self, is_read: bool) -> Result<Option<Sample>, DataError> {
        while self.file < self.end {
            let location = &self.shards.files[self.file];
            let walk = match &mut self.walk {
                Some(walk) => walk,
                none => none.insert(Walk::open(location, self.stores)?),
            };
            let layout = is_read.then_some(self.shards.layout.as_ref());
            let declared = &self.shards.declared[self.file];
            match walk.next(layout)? {
                Some(sample) if declared.excluded.contains(&sample.key) => {
                    self.seen.insert(sample.key);
                }
                Some(mut sample) => {
                    self.earlier.compare(&mut sample);
                    return Ok(Some(sample));
                }
                None => {
                    let found = walk.position();
                    self.check(declared, found)?;
                    (self.walk, self.seen, self.earlier) = (None, BTreeSet::new(), Earlier::default());
                    self.file += 1;
                }
            }
        }
        Ok(None)
    }

    /// Whether the shard under way, at its end, is what was declared.
    fn check(&self, declared: &Declared, found: u64) -> Result<(), DataError> {
        let Some(by) = &self.shards.declared_by else { return Ok(()) };
        let shard = &self.shards.files[self.file];
        if let Some(count) = declared.count.filter(|&count| count != found) {
            let cause = format!("it declares {count} samples, the shard has {found}");
            return Err(DataError::Record(format!("`{by}` does not fit `{shard}`: {cause}")));
        }
        if let Some(missing) = declared.excluded.difference(&self.seen).next() {
            return Err(DataError::Record(format!(
                "`{shard}`: it has no sample `{missing}`, which is named as excluded"
            )));
        }
        Ok(())
    }

    /// Passes over as many of the next `count` samples as can be without a look at each, at least one.
    fn skip(&mut self, count: u64) -> Result<Option<u64>, DataError> {
        let declared = self.shards.declared.get(self.file).filter(|declared| declared.excluded.is_empty());
        if self.file < self.end && declared.is_some() {
            let whole = declared.and_then(|declared| declared.count).filter(|&whole| whole <= count);
            if let (None, Some(whole)) = (&self.walk, whole) {
                self.file += 1;
                return Ok(Some(whole));
            }
            let walk = match &mut self.walk {
                Some(walk) => walk,
                none => none.insert(Walk::open(&self.shards.files[self.file], self.stores)?),
            };
            if let Some(skipped) = walk.jump(count)? {
                return Ok(Some(skipped));
            }
        }
        Ok(self.step(false)?.map(|_| 1))
    }

    fn try_nth(&mut self, count: usize) -> Result<Option<RawRecord>, DataError> {
        let mut left = count as u64;
        while left > 0 {
            match self.skip(left)? {
                Some(skipped) => left -= skipped,
                None => return Ok(None),
            }
        }
        let Some(sample) = self.step(true)? else { return Ok(None) };
        let location = &self.shards.files[self.file];
        Ok(Some(sample.record(self.file as u32, location, |sample| self.shards.layout.body(sample))))
    }
}

impl Iterator for Samples<'_> {
    type Item = Result<RawRecord, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.nth(0)
    }

    /// By the index, where there is one: samples passed over cost no read.
    fn nth(&mut self, count: usize) -> Option<Self::Item> {
        if self.is_over {
            return None;
        }
        let found = self.try_nth(count).transpose();
        self.is_over = !matches!(found, Some(Ok(_)));
        found
    }
}

#[cfg(test)]
mod tests;
