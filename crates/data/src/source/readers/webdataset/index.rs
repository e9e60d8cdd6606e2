//! Indices that stand beside shards: `shard.tar.idx` of Megatron-Energon, and the shard list of wids.

use crate::error::DataError;
use crate::read_seek::ReadSeek;
use crate::source::location::Location;
use crate::source::store::Stores;
use serde_json::Value;
use std::collections::HashMap;
use std::io::{BufReader, Read as _, Seek as _, SeekFrom};

/// Bytes of a shard list, at most.
const LIST_BYTES_MAX: u64 = 64 << 20;
/// Names that tools give to shard lists.
const LIST_NAMES: [&str; 4] = ["shardindex.json", "wids-meta.json", "wids.json", "index.json"];

/// Where each sample of a shard begins: 64-bit little-endian offsets, the last that of the shard's end.
pub(super) struct Index {
    pub(super) location: Location,
    /// Samples of the shard.
    pub(super) count: u64,
    reader: BufReader<Box<dyn ReadSeek>>,
    /// Entry that is read next.
    next: u64,
}

impl Index {
    /// The index of `shard`; `None` where there is none.
    pub(super) fn open(shard: &Location, stores: &Stores) -> Result<Option<Self>, DataError> {
        let location = shard.parent().join(&format!("{}.idx", shard.name()));
        // An index only saves time: without one, the shard itself is read.
        let Ok(opened) = stores.open(&location) else { return Ok(None) };
        if opened.len == 0 || opened.len % 8 != 0 {
            let cause = format!("an index has 8 bytes a sample and 8 more, not {}", opened.len);
            return Err(DataError::Record(format!("`{location}`: {cause}")));
        }
        Ok(Some(Self { location, count: opened.len / 8 - 1, reader: BufReader::new(opened.reader), next: 0 }))
    }

    /// Where sample `position` begins; the shard's end for the one past the last.
    pub(super) fn start(&mut self, position: u64) -> Result<u64, DataError> {
        let mut entry = [0; 8];
        let by = (position.cast_signed() - self.next.cast_signed()) * 8;
        // Relative, so that what is buffered is kept.
        let found = self.reader.seek_relative(by).and_then(|()| self.reader.read_exact(&mut entry));
        found.map_err(|source| DataError::Io { act: "read", path: self.location.path(), source })?;
        self.next = position + 1;
        Ok(u64::from_le_bytes(entry))
    }

    /// The error that names both.
    pub(super) fn misfit(&self, shard: &Location, cause: &str) -> DataError {
        DataError::Record(format!("`{}` does not fit `{shard}`: {cause}", self.location))
    }
}

/// Samples of each of the `shards` of a directory, by the shard list there; `None` where there is none.
///
/// # Errors
/// [`DataError::Record`] where the list is not of these shards.
pub(super) fn listed(
    files: &[Location],
    shards: &[Location],
    stores: &Stores,
) -> Result<Option<(Location, Vec<u64>)>, DataError> {
    for location in files.iter().filter(|file| LIST_NAMES.contains(&file.name().as_str())) {
        let mut opened = stores.open(location)?;
        if opened.len > LIST_BYTES_MAX {
            continue;
        }
        let mut bytes = Vec::new();
        opened
            .reader
            .seek(SeekFrom::Start(0))
            .and_then(|_| opened.reader.by_ref().take(LIST_BYTES_MAX).read_to_end(&mut bytes))
            .map_err(|source| DataError::Io { act: "read", path: location.path(), source })?;
        // A JSON file of another kind may have such a name.
        let Ok(list) = serde_json::from_slice::<Value>(&bytes) else { continue };
        let Some(entries) = list["shardlist"].as_array() else { continue };
        let counts = counts(location, entries, shards, stores)?;
        return Ok(Some((location.clone(), counts)));
    }
    Ok(None)
}

fn counts(
    list: &Location,
    entries: &[Value],
    shards: &[Location],
    stores: &Stores,
) -> Result<Vec<u64>, DataError> {
    let misfit = |cause: String| DataError::Record(format!("`{list}` does not fit its directory: {cause}"));
    let mut known = HashMap::new();
    for (index, entry) in entries.iter().enumerate() {
        let (Some(url), Some(count)) = (entry["url"].as_str(), entry["nsamples"].as_u64()) else {
            return Err(misfit(format!("`shardlist[{index}]` must have `url` and `nsamples`")));
        };
        known.insert(url.rsplit('/').next().unwrap_or(url), (count, entry["filesize"].as_u64()));
    }
    let mut counts = Vec::with_capacity(shards.len());
    for shard in shards {
        let name = shard.name();
        let Some((count, bytes)) = known.remove(name.as_str()) else {
            return Err(misfit(format!("it does not list `{name}`")));
        };
        if let (Some(listed), Location::Local(_)) = (bytes, shard) {
            let (found, _) = stores.about(shard)?;
            if found != listed {
                return Err(misfit(format!("`{name}` has {found} bytes, by the list {listed}")));
            }
        }
        counts.push(count);
    }
    match known.keys().min() {
        Some(name) => Err(misfit(format!("`{name}` of the list is not there"))),
        None => Ok(counts),
    }
}
