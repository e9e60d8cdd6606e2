//! A file read through a window: every access is checked against the file's length and counted.

use crate::read_seek::ReadSeek;
use std::io::{self, SeekFrom};

/// Fields read from one file before we give up; a video of ten hours needs about two million.
pub(super) const STEPS_MAX: u32 = 1 << 22;
/// Bytes read at once: the headers of most images, in one call.
const WINDOW_BYTES: usize = 4096;
/// Bytes by which formats are recognised.
pub(super) const PREFIX_BYTES: usize = 16;

/// Why a header gives no answer.
#[derive(Debug)]
pub(super) enum Fault {
    /// The operating system refused.
    Io(io::Error),
    /// Value and rule.
    Unsound(String),
}

impl Fault {
    pub(super) fn unsound<T>(cause: impl Into<String>) -> Result<T, Self> {
        Err(Self::Unsound(cause.into()))
    }
}

/// A file, or bytes in memory, read at any offset.
pub(super) struct Source<'a> {
    reader: Box<dyn ReadSeek + 'a>,
    len: u64,
    window: [u8; WINDOW_BYTES],
    window_at: u64,
    window_len: usize,
    steps_left: u32,
}

impl<'a> Source<'a> {
    pub(super) fn new(reader: Box<dyn ReadSeek + 'a>, len: u64) -> Self {
        Self { reader, len, window: [0; WINDOW_BYTES], window_at: 0, window_len: 0, steps_left: STEPS_MAX }
    }

    /// Bytes of the whole file.
    pub(super) const fn len(&self) -> u64 {
        self.len
    }

    /// The `N` bytes at offset `at`.
    pub(super) fn bytes<const N: usize>(&mut self, at: u64) -> Result<[u8; N], Fault> {
        const { assert!(N <= WINDOW_BYTES) };
        let mut bytes = [0; N];
        bytes.copy_from_slice(self.slice(at, N)?);
        Ok(bytes)
    }

    /// The `num_bytes` bytes at offset `at`, at most a window's worth.
    pub(super) fn slice(&mut self, at: u64, num_bytes: usize) -> Result<&[u8], Fault> {
        assert!(num_bytes <= WINDOW_BYTES, "{num_bytes} bytes do not fit the window");
        if at.checked_add(num_bytes as u64).is_none_or(|end| end > self.len) {
            return Fault::unsound(format!("it has {} bytes, its header goes on at byte {at}", self.len));
        }
        let Some(steps_left) = self.steps_left.checked_sub(1) else {
            return Fault::unsound(format!("its headers have more than {STEPS_MAX} fields"));
        };
        self.steps_left = steps_left;
        let covers = at >= self.window_at
            && at - self.window_at <= (self.window_len.saturating_sub(num_bytes)) as u64
            && self.window_len >= num_bytes;
        if !covers {
            self.fill(at, num_bytes)?;
        }
        let start = (at - self.window_at) as usize;
        Ok(&self.window[start..start + num_bytes])
    }

    /// Appends the bytes from `at` to `end` to `bytes`; those behind the end of the file are left out. The caller bounds them.
    pub(super) fn append(&mut self, bytes: &mut Vec<u8>, at: u64, end: u64) -> Result<(), Fault> {
        let end = end.min(self.len);
        for piece_at in (at..end).step_by(WINDOW_BYTES) {
            bytes
                .extend_from_slice(self.slice(piece_at, (end - piece_at).min(WINDOW_BYTES as u64) as usize)?);
        }
        Ok(())
    }

    fn fill(&mut self, at: u64, num_bytes: usize) -> Result<(), Fault> {
        self.window_len = 0;
        self.window_at = at;
        self.reader.seek(SeekFrom::Start(at)).map_err(Fault::Io)?;
        while self.window_len < WINDOW_BYTES {
            match self.reader.read(&mut self.window[self.window_len..]) {
                Ok(0) => break,
                Ok(read) => self.window_len += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Fault::Io(error)),
            }
            if self.window_len >= num_bytes {
                break;
            }
        }
        if self.window_len < num_bytes {
            return Fault::unsound(format!(
                "it ended while it was read, at byte {}",
                at + self.window_len as u64
            ));
        }
        Ok(())
    }

    /// The first bytes, with zeros after the end of a shorter file.
    pub(super) fn prefix(&mut self) -> Result<[u8; PREFIX_BYTES], Fault> {
        let mut prefix = [0; PREFIX_BYTES];
        let num_bytes = self.len.min(PREFIX_BYTES as u64) as usize;
        prefix[..num_bytes].copy_from_slice(self.slice(0, num_bytes)?);
        Ok(prefix)
    }

    /// What the file begins with, for an error: its first bytes in hexadecimal.
    pub(super) fn start_in_words(&mut self) -> String {
        let num_bytes = self.len.min(8) as usize;
        match self.slice(0, num_bytes) {
            Ok([]) => "it is empty".to_owned(),
            // The first bytes were read before: it has shrunk since.
            Err(_) => "its first bytes could not be read again".to_owned(),
            Ok(bytes) => {
                let bytes: Vec<String> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
                format!("it begins with {}", bytes.join(" "))
            }
        }
    }

    pub(super) fn u8(&mut self, at: u64) -> Result<u8, Fault> {
        Ok(self.bytes::<1>(at)?[0])
    }

    pub(super) fn u16_be(&mut self, at: u64) -> Result<u16, Fault> {
        self.bytes(at).map(u16::from_be_bytes)
    }

    pub(super) fn u16_le(&mut self, at: u64) -> Result<u16, Fault> {
        self.bytes(at).map(u16::from_le_bytes)
    }

    pub(super) fn u32_be(&mut self, at: u64) -> Result<u32, Fault> {
        self.bytes(at).map(u32::from_be_bytes)
    }

    pub(super) fn u32_le(&mut self, at: u64) -> Result<u32, Fault> {
        self.bytes(at).map(u32::from_le_bytes)
    }

    pub(super) fn u64_be(&mut self, at: u64) -> Result<u64, Fault> {
        self.bytes(at).map(u64::from_be_bytes)
    }
}

/// Sides as displayed, of a picture stored with this EXIF orientation: 5 to 8 lie on their side.
pub(super) const fn displayed((width, height): (u32, u32), orientation: u16) -> (u32, u32) {
    if orientation >= 5 && orientation <= 8 { (height, width) } else { (width, height) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Cursor;

    #[test]
    fn any_offset_is_read_or_refused() {
        let bytes: Vec<u8> = (0..10_000u32).map(|i| (i % 251) as u8).collect();
        let mut source = Source::new(Box::new(Cursor::new(&bytes)), bytes.len() as u64);
        for at in [0usize, 1, 4_093, 4_096, 9_998, 5, 4_095, 9_000, 8_999] {
            assert_eq!(source.bytes::<2>(at as u64).unwrap(), bytes[at..at + 2], "{at}");
        }
        for at in [9_999, 10_000, u64::MAX - 1, u64::MAX] {
            assert!(matches!(source.bytes::<2>(at), Err(Fault::Unsound(_))), "{at}");
        }
    }

    #[test]
    fn steps_are_counted() {
        let mut source = Source::new(Box::new(Cursor::new([0u8; 8])), 8);
        source.steps_left = 2;
        assert!(source.u8(0).is_ok() && source.u8(0).is_ok());
        assert!(matches!(source.u8(0), Err(Fault::Unsound(cause)) if cause.contains("fields")));
    }
}
