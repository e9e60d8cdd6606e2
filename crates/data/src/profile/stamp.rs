//! What tells the media of a sample from other media, and from later versions of themselves.

use crate::digest::first_eight;
use crate::source::location::MediaPlace;
#[cfg(doc)]
use dflop_types::ProfiledSample;
use sha2::{Digest as _, Sha256};

/// What tells the media of a sample from other ones and from later versions of themselves, without their headers.
#[derive(Debug, Default)]
pub(crate) struct MediaStamp {
    /// Of all media.
    pub(crate) bytes: u64,
    num_media: usize,
    versions: Sha256,
    contents: Sha256,
}

impl MediaStamp {
    /// Bytes at either end of a cell that count; the record that it came with may be equal where the cell is not.
    const ENDS: usize = 4096;

    /// Counts one medium in: a file by size and version, the member of a shard by its name too, a cell by its ends.
    pub(crate) fn add(&mut self, place: &MediaPlace, bytes: u64, version: &str) {
        self.bytes = self.bytes.saturating_add(bytes);
        self.num_media += 1;
        self.versions.update(bytes.to_le_bytes());
        self.versions.update(version.as_bytes());
        match place {
            MediaPlace::Whole(_) => {}
            MediaPlace::Range { name, .. } => self.versions.update(name.as_bytes()),
            MediaPlace::Bytes { bytes, .. } => {
                self.versions.update(&bytes[..bytes.len().min(Self::ENDS)]);
                self.versions.update(&bytes[bytes.len().saturating_sub(Self::ENDS)..]);
            }
        }
    }

    /// Counts in what was seen of the last medium: its size and the sampled bytes.
    pub(crate) fn look(&mut self, bytes: u64, sampled: &[u8]) {
        self.contents.update(bytes.to_le_bytes());
        self.contents.update(sampled);
    }

    /// The hash of media of which all were looked into: [`ProfiledSample::media_hash`].
    pub(crate) fn hash(&self) -> MediaHash {
        let contents =
            if self.num_media == 0 { 0 } else { first_eight(&self.contents.clone().finalize()) >> 32 };
        MediaHash { versions: self.versions(), contents: contents as u32 }
    }

    /// The half of the hash that is known without a look into the media; 0 of no medium.
    pub(crate) fn versions(&self) -> u32 {
        if self.num_media == 0 { 0 } else { (first_eight(&self.versions.clone().finalize()) >> 32) as u32 }
    }
}

/// What tells changed media, in the halves of [`ProfiledSample::media_hash`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MediaHash {
    /// Of sizes and versions.
    pub(crate) versions: u32,
    /// Of sizes and sampled bytes.
    pub(crate) contents: u32,
}

impl MediaHash {
    pub(crate) const fn of(media_hash: u64) -> Self {
        Self { versions: (media_hash >> 32) as u32, contents: media_hash as u32 }
    }

    pub(crate) const fn number(self) -> u64 {
        (self.versions as u64) << 32 | self.contents as u64
    }
}
