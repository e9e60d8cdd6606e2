//! Boxes of ISO base media files (MP4, MOV, M4A, HEIF, AVIF), one after the other.

use super::source::{Fault, Source};

/// A box: what it is called, and where its contents lie.
#[derive(Debug, Clone, Copy)]
pub(super) struct Box4 {
    pub(super) kind: [u8; 4],
    pub(super) body: u64,
    pub(super) end: u64,
}

/// Boxes one after the other, from an offset to a limit.
pub(super) struct Boxes {
    at: u64,
    limit: u64,
}

impl Boxes {
    pub(super) const fn new(at: u64, limit: u64) -> Self {
        Self { at, limit }
    }

    /// The boxes within another.
    pub(super) const fn within(parent: Box4) -> Self {
        Self { at: parent.body, limit: parent.end }
    }

    /// The next box; `None` at the limit. Only media data may reach past it, where a file is cut.
    pub(super) fn next(&mut self, source: &mut Source<'_>) -> Result<Option<Box4>, Fault> {
        if self.at.saturating_add(8) > self.limit {
            return Ok(None);
        }
        let [s3, s2, s1, s0, kind @ ..] = source.bytes::<8>(self.at)?;
        let (size, header_bytes) = match u32::from_be_bytes([s3, s2, s1, s0]) {
            0 => (self.limit - self.at, 8),
            1 => (source.u64_be(self.at + 8)?, 16),
            size => (u64::from(size), 8),
        };
        let name = || String::from_utf8_lossy(&kind).into_owned();
        if size < header_bytes {
            return Fault::unsound(format!("box `{}` has size {size}, at least {header_bytes}", name()));
        }
        let end = self.at.saturating_add(size);
        if end > self.limit && &kind != b"mdat" {
            return Fault::unsound(format!(
                "box `{}` ends at byte {end}, what holds it at byte {}",
                name(),
                self.limit
            ));
        }
        let found = Box4 { kind, body: self.at + header_bytes, end: end.min(self.limit) };
        self.at = found.end;
        Ok(Some(found))
    }
}
