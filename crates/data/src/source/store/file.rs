//! A remote object that reads as a file: pieces are fetched where they are asked for, and the last few kept.
//!
//! A jump costs one request of [`BLOCK_BYTES`]; reading on doubles the pieces, so that a long file read from its start
//! to its end costs few requests and a header costs one.

use super::clients::Object;
use super::remote::{About, Fetched, Remote};
use std::io::{Error, ErrorKind, Read, Result, Seek, SeekFrom};
use std::ops::Range;
use std::sync::Arc;

/// Bytes of one request for a header: more than nearly every image needs.
pub(super) const BLOCK_BYTES: u64 = 64 << 10;
/// Bytes of one request, at most.
const PIECE_BYTES_MAX: u64 = 8 << 20;
/// Pieces kept.
const PIECES_MAX: usize = 8;

/// An object, or a part of one, open for reading.
pub(super) struct RemoteFile {
    remote: Arc<Remote>,
    object: Object,
    about: About,
    /// The part of the object that is read.
    part: Range<u64>,
    /// Position in the object.
    at: u64,
    /// The last used at the end.
    pieces: Vec<Fetched>,
    /// Where the last fetched piece ends, and how many were fetched in a row.
    run: (u64, u32),
}

impl RemoteFile {
    /// The object, or `part` of it. What is `known` of it saves the first request; else its first block is fetched.
    pub(super) fn open(
        remote: Arc<Remote>,
        object: Object,
        part: Option<Range<u64>>,
        known: Option<About>,
    ) -> Result<Self> {
        let mut pieces = Vec::new();
        let mut run = (0, 0);
        let start = part.as_ref().map_or(0, |part| part.start);
        let about = match known {
            Some(about) => about,
            None if part.as_ref().is_some_and(Range::is_empty) => remote.about(&object)?,
            None => {
                let end = start.saturating_add(BLOCK_BYTES);
                let end = part.as_ref().map_or(end, |part| part.end.min(end));
                let (about, piece) = remote.get(&object, Some(start..end))?;
                run = (piece.start + piece.bytes.len() as u64, 1);
                pieces.push(piece);
                about
            }
        };
        let part = part.unwrap_or(0..about.bytes);
        if part.end > about.bytes {
            let cause = format!("bytes {} to {} are asked for, it has {}", part.start, part.end, about.bytes);
            return Err(Error::new(ErrorKind::UnexpectedEof, cause));
        }
        Ok(Self { remote, object, about, at: part.start, part, pieces, run })
    }

    pub(super) const fn about(&self) -> &About {
        &self.about
    }

    pub(super) const fn len(&self) -> u64 {
        self.part.end - self.part.start
    }

    /// The kept bytes from the present position on; none where they are not kept.
    fn kept(&mut self) -> Option<&[u8]> {
        let at = self.at;
        let holds = |piece: &Fetched| at >= piece.start && at - piece.start < piece.bytes.len() as u64;
        let index = self.pieces.iter().position(holds)?;
        let piece = self.pieces.remove(index);
        self.pieces.push(piece);
        let piece = self.pieces.last()?;
        let end = self.part.end.min(piece.start + piece.bytes.len() as u64);
        Some(&piece.bytes[(at - piece.start) as usize..(end - piece.start) as usize])
    }

    /// The bytes to fetch for a read of `wanted` bytes here.
    fn next(&self, wanted: u64) -> Range<u64> {
        let at = self.at;
        let (last_end, in_a_row) = self.run;
        // One block after another may be a header of more than a block; from the third on it is a walk.
        let reads_on = at >= last_end && at - last_end < BLOCK_BYTES;
        let grown = if reads_on { BLOCK_BYTES << in_a_row.saturating_sub(1).min(7) } else { BLOCK_BYTES };
        let mut end = at.saturating_add(grown.max(wanted).min(PIECE_BYTES_MAX)).min(self.part.end);
        let mut start = at;
        // The end of a file is fetched as a whole: a table of contents there is read backwards, too.
        if self.part.end - at < BLOCK_BYTES {
            start = self.part.end.saturating_sub(BLOCK_BYTES).max(self.part.start);
        }
        for piece in &self.pieces {
            let piece_end = piece.start + piece.bytes.len() as u64;
            if piece_end <= at {
                start = start.max(piece_end);
            } else if piece.start > at {
                end = end.min(piece.start);
            }
        }
        start..end
    }

    fn fetch(&mut self, wanted: u64) -> Result<()> {
        let range = self.next(wanted);
        let reads_on = self.at >= self.run.0 && self.at - self.run.0 < BLOCK_BYTES;
        let (about, piece) = self.remote.get(&self.object, Some(range))?;
        if about != self.about {
            return Err(Error::new(ErrorKind::InvalidData, "it changed while it was read"));
        }
        self.run = (piece.start + piece.bytes.len() as u64, if reads_on { self.run.1 + 1 } else { 1 });
        self.pieces.push(piece);
        let kept_bytes =
            |pieces: &[Fetched]| pieces.iter().map(|piece| piece.bytes.len()).sum::<usize>() as u64;
        while self.pieces.len() > PIECES_MAX
            || (self.pieces.len() > 1
                && kept_bytes(&self.pieces) > PIECE_BYTES_MAX + PIECES_MAX as u64 * BLOCK_BYTES)
        {
            self.pieces.remove(0);
        }
        Ok(())
    }
}

impl Read for RemoteFile {
    fn read(&mut self, buffer: &mut [u8]) -> Result<usize> {
        if buffer.is_empty() || self.at >= self.part.end {
            return Ok(0);
        }
        if self.kept().is_none() {
            self.fetch(buffer.len() as u64)?;
        }
        let Some(kept) = self.kept() else {
            return Err(Error::new(ErrorKind::UnexpectedEof, "the answer lacks the bytes asked for"));
        };
        let read = kept.len().min(buffer.len());
        buffer[..read].copy_from_slice(&kept[..read]);
        self.at += read as u64;
        Ok(read)
    }
}

impl Seek for RemoteFile {
    fn seek(&mut self, to: SeekFrom) -> Result<u64> {
        let at = match to {
            SeekFrom::Start(at) => self.part.start.checked_add(at),
            SeekFrom::End(by) => self.part.end.checked_add_signed(by),
            SeekFrom::Current(by) => self.at.checked_add_signed(by),
        };
        let at =
            at.filter(|&at| at >= self.part.start).ok_or_else(|| Error::from(ErrorKind::InvalidInput))?;
        self.at = at;
        Ok(at - self.part.start)
    }
}
