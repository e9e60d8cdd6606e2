//! One shard under way: its members, gathered by key, held to its index.

use super::Layout;
use super::index::Index;
use super::sample::{Sample, split};
use crate::error::DataError;
use crate::source::location::Location;
use crate::source::readers::tar::{Member, Tar};
use crate::source::store::Stores;
use dflop_types::Place;

/// The samples of one shard, in order.
pub(super) struct Walk<'a> {
    location: &'a Location,
    tar: Tar<'a>,
    index: Option<Index>,
    /// The first member of the next sample, with its part.
    pending: Option<(Member, String)>,
    /// Samples given or passed over.
    position: u64,
    /// Whether the last move was by the index, so that what is wrong may be wrong there.
    is_jumped: bool,
}

impl<'a> Walk<'a> {
    /// The shard at `location`, before its first sample.
    pub(super) fn open(location: &'a Location, stores: &Stores) -> Result<Self, DataError> {
        let tar = Tar::open(location, stores)?;
        let index = Index::open(location, stores)?;
        Ok(Self { location, tar, index, pending: None, position: 0, is_jumped: false })
    }

    /// The sample at `place` alone.
    pub(super) fn fetch(
        location: &'a Location,
        stores: &Stores,
        place: Place,
        layout: &dyn Layout,
    ) -> Result<Sample, DataError> {
        let tar = Tar::open(location, stores)?;
        let mut walk = Self { location, tar, index: None, pending: None, position: 0, is_jumped: false };
        let end = place.start.saturating_add(place.len);
        walk.tar.seek(place.start, Some(end))?;
        let sample = walk.next(Some(layout))?;
        match sample.filter(|sample| (sample.start, sample.end) == (place.start, end)) {
            Some(sample) if walk.next(None)?.is_none() => Ok(sample),
            _ => {
                let cause = format!("no sample of {} bytes stands there any more", place.len);
                Err(walk.tar.unsound(place.start, &cause))
            }
        }
    }

    /// Samples given or passed over.
    pub(super) const fn position(&self) -> u64 {
        self.position
    }

    /// The next sample; texts are read where `layout` is given and asks for them.
    pub(super) fn next(&mut self, layout: Option<&dyn Layout>) -> Result<Option<Sample>, DataError> {
        let sample = match self.gather(layout) {
            Err(DataError::Record(cause) | DataError::Damaged { cause, .. }) if self.is_jumped => {
                let index = self.index.as_ref().map(|index| index.location.to_string()).unwrap_or_default();
                let from = format!("where `{index}` says that sample {} begins", self.position);
                return Err(DataError::Record(format!("{cause} ({from})")));
            }
            other => other?,
        };
        if let Some(index) = &mut self.index {
            let start = sample.as_ref().map_or(self.tar.at(), |sample| sample.start);
            let past = self.position + u64::from(sample.is_some());
            if past > index.count || (sample.is_none() && past != index.count) {
                let (found, count) = (if past > index.count { "more" } else { "fewer" }, index.count);
                return Err(
                    index.misfit(self.location, &format!("it has {count} samples, the shard {found}"))
                );
            }
            let indexed = index.start(self.position)?;
            if indexed != start {
                let what = match &sample {
                    Some(_) => format!("sample {}", self.position),
                    None => "the end".to_owned(),
                };
                let cause = format!("{what} is at byte {indexed} by the index, at {start} in the shard");
                return Err(index.misfit(self.location, &cause));
            }
        }
        self.is_jumped = false;
        self.position += u64::from(sample.is_some());
        Ok(sample)
    }

    /// Members up to the next key.
    fn gather(&mut self, layout: Option<&dyn Layout>) -> Result<Option<Sample>, DataError> {
        let mut sample: Option<Sample> = None;
        loop {
            let (member, part) = match self.pending.take() {
                Some(pending) => pending,
                None => match self.tar.next()? {
                    None => return Ok(sample),
                    Some(member) => match split(&member.name) {
                        None => continue,
                        Some((key, part)) => {
                            if sample.as_ref().is_some_and(|sample| sample.key != key) {
                                self.pending = Some((member, part));
                                return Ok(sample);
                            }
                            (member, part)
                        }
                    },
                },
            };
            let sample = sample.get_or_insert_with(|| {
                let key = split(&member.name).map_or("", |(key, _)| key);
                Sample::new(key.to_owned(), member.header)
            });
            let is_read = layout.is_some_and(|layout| layout.reads(&part));
            let text = if is_read && sample.has_room(&part, member.len) {
                Some(self.tar.body(member.start, member.len)?)
            } else {
                None
            };
            sample.push(part, member, text);
        }
    }

    /// Passes over up to `count` samples by the index, without a look at each but the last; `None` where there is no
    /// index or no sample left. The last is walked, so that the next one is known to begin where its key begins.
    pub(super) fn jump(&mut self, count: u64) -> Result<Option<u64>, DataError> {
        let Some(index) = &mut self.index else { return Ok(None) };
        let count = count.min(index.count.saturating_sub(self.position));
        if count == 0 {
            return Ok(None);
        }
        if count > 1 {
            self.position += count - 1;
            let start = index.start(self.position)?;
            if !start.is_multiple_of(crate::source::readers::tar::BLOCK) || start > self.tar.len() {
                let cause = format!(
                    "sample {} begins at byte {start} by the index, the shard has {} bytes in blocks of 512",
                    self.position,
                    self.tar.len()
                );
                return Err(index.misfit(self.location, &cause));
            }
            self.pending = None;
            self.tar.seek(start, None)?;
            self.is_jumped = true;
        }
        Ok(self.next(None)?.map(|_| count))
    }

    /// Samples of the shard by its index, held to the shard's last sample and end; `None` where it has none.
    pub(super) fn count_by_index(&mut self) -> Result<Option<u64>, DataError> {
        let Some(index) = &mut self.index else { return Ok(None) };
        let count = index.count;
        if self.jump(count)? != (count > 0).then_some(count) || self.next(None)?.is_some() {
            let cause = format!("it has {count} samples, the shard another number");
            return Err(DataError::Record(format!("`{}` does not fit its index: {cause}", self.location)));
        }
        Ok(Some(count))
    }
}
