//! Tar: where each member begins and ends, from header to header. Bodies are passed over.
//!
//! POSIX ustar, GNU (long names, sizes in base 256) and pax (`path`, `size`) are read; so are the headers of Unix
//! version 7. Whatever holds its bytes elsewhere (links, sparse members) is refused, since a member must be a part of
//! the file. Nothing is allocated by a size that a header claims.

use crate::error::DataError;
use crate::read_seek::ReadSeek;
use crate::source::location::Location;
use crate::source::store::Stores;
use std::io::{Read as _, Seek as _, SeekFrom};

/// What is wrong with a packed archive.
const GZIP: &str = "it is compressed (gzip), must be a plain tar archive";
/// Bytes of a header, and what bodies are padded to.
pub(super) const BLOCK: u64 = 512;
/// Bytes of one extended header, at most; it holds a name, or a few `key=value`.
const EXTENDED_BYTES_MAX: u64 = 1 << 20;
/// Zero bytes that may follow the last member; writers pad to 10 KiB, some to their own block.
const PADDING_BYTES_MAX: u64 = 1 << 24;
/// Bytes read at once: few where members are large, since most would be passed over.
const REACH_BYTES: [usize; 2] = [4 << 10, 256 << 10];

/// One file in the archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Member {
    /// First byte of its first header, an extended one where it has that.
    pub(super) header: u64,
    /// Path in the archive; bytes that are not UTF-8 are escaped, for example `\xe9`.
    pub(super) name: String,
    /// First byte of its body.
    pub(super) start: u64,
    /// Bytes of its body.
    pub(super) len: u64,
}

impl Member {
    /// First byte after its padded body.
    pub(super) const fn end(&self) -> u64 {
        padded(self.start + self.len)
    }
}

const fn padded(at: u64) -> u64 {
    at.next_multiple_of(BLOCK)
}

/// An archive, or a part of one, under way.
pub(super) struct Tar<'a> {
    location: &'a Location,
    reader: Box<dyn ReadSeek>,
    /// Bytes of the whole file.
    len: u64,
    /// Where to stop; `None`: at the mark of the archive's end, which must be there.
    stop: Option<u64>,
    /// The next header.
    at: u64,
    window: Vec<u8>,
    window_start: u64,
    reach: usize,
}

/// What a header says of the block itself.
struct Header {
    kind: u8,
    name: String,
    size: u64,
}

/// What extended headers say of the member that follows.
#[derive(Default)]
struct Extended {
    start: Option<u64>,
    name: Option<String>,
    size: Option<u64>,
}

impl<'a> Tar<'a> {
    /// The archive at `location`, to be read from its first byte on.
    pub(super) fn open(location: &'a Location, stores: &Stores) -> Result<Self, DataError> {
        let opened = stores.open(location)?;
        let tar = Self {
            location,
            reader: opened.reader,
            len: opened.len,
            stop: None,
            at: 0,
            window: Vec::new(),
            window_start: 0,
            reach: REACH_BYTES[0],
        };
        if tar.len == 0 {
            return Err(tar.unsound(0, "it is empty, must be a tar archive"));
        }
        Ok(tar)
    }

    /// Goes on at `start`, where a header must stand, and ends before `stop` where that is given.
    pub(super) fn seek(&mut self, start: u64, stop: Option<u64>) -> Result<(), DataError> {
        let end = stop.unwrap_or(start);
        if start > end || end > self.len || !start.is_multiple_of(BLOCK) {
            let cause = format!("no member can stand there: its {} bytes end before {end}", self.len);
            return Err(self.unsound(start, &cause));
        }
        (self.at, self.stop) = (start, stop);
        Ok(())
    }

    /// Bytes of the file.
    pub(super) const fn len(&self) -> u64 {
        self.len
    }

    /// Where the next header is read.
    pub(super) const fn at(&self) -> u64 {
        self.at
    }

    /// The error for what is wrong at byte `at`.
    pub(super) fn unsound(&self, at: u64, cause: &str) -> DataError {
        let mend = if cause == GZIP {
            "unpack it with `gzip -d`: records are found by their position in bytes"
        } else {
            "copy or download the archive again, or write it again"
        };
        DataError::Damaged { cause: format!("`{}`: at byte {at}: {cause}", self.location), mend }
    }

    /// The next file; directories are passed over. `None` at the end.
    pub(super) fn next(&mut self) -> Result<Option<Member>, DataError> {
        let mut extended = Extended::default();
        loop {
            let at = self.at;
            if self.stop.is_some_and(|stop| at >= stop) {
                return self.end(at, &extended);
            }
            let Some(header) = self.header(at)? else {
                self.check_padding(at)?;
                return self.end(at, &extended);
            };
            let body = at + BLOCK;
            // Directories hold no bytes, whatever size their headers state.
            let is_empty = matches!(header.kind, b'5' | b'V');
            let size = if is_empty { 0 } else { extended.size.unwrap_or(header.size) };
            let end = body.checked_add(size).filter(|&end| end <= self.len).ok_or_else(|| {
                let cause = format!(
                    "`{}` has {size} bytes, only {} follow its header: the archive is cut off",
                    header.name,
                    self.len - body
                );
                self.unsound(at, &cause)
            })?;
            self.at = padded(end);
            match header.kind {
                b'0' | b'7' | 0 => {
                    let name = extended.name.unwrap_or(header.name);
                    let header = extended.start.unwrap_or(at);
                    // Version 7 has no type for directories.
                    if !name.ends_with('/') {
                        return Ok(Some(Member { header, name, start: body, len: size }));
                    }
                    extended = Extended::default();
                }
                b'5' | b'V' => extended = Extended::default(),
                kind => self.extend(&mut extended, at, kind, &header.name, body, header.size)?,
            }
        }
    }

    /// The body at `start`, which a member has, in memory.
    pub(super) fn body(&mut self, start: u64, len: u64) -> Result<Vec<u8>, DataError> {
        if let Some(bytes) = self.windowed(start, len) {
            return Ok(bytes.to_vec());
        }
        if len <= self.reach as u64 {
            self.fill(start)?;
            if let Some(bytes) = self.windowed(start, len) {
                return Ok(bytes.to_vec());
            }
        }
        let mut bytes = Vec::new();
        self.reader
            .seek(SeekFrom::Start(start))
            .and_then(|_| self.reader.by_ref().take(len).read_to_end(&mut bytes))
            .map_err(|source| self.io(source))?;
        if bytes.len() as u64 != len {
            return Err(self.unsound(start, &format!("{} of {len} bytes could be read", bytes.len())));
        }
        Ok(bytes)
    }

    fn end(&self, at: u64, extended: &Extended) -> Result<Option<Member>, DataError> {
        match extended.start {
            Some(start) => Err(self.unsound(start, &format!("no member follows the header, end is at {at}"))),
            None => Ok(None),
        }
    }

    /// Applies an extended header, or says why the member cannot be read.
    fn extend(
        &mut self,
        extended: &mut Extended,
        at: u64,
        kind: u8,
        name: &str,
        body: u64,
        size: u64,
    ) -> Result<(), DataError> {
        let elsewhere = |what| format!("`{name}` is {what}: its bytes are elsewhere, shards must hold files");
        let cause = match kind {
            b'L' | b'K' | b'x' | b'g' if size <= EXTENDED_BYTES_MAX => {
                let bytes = self.body(body, size)?;
                if kind != b'g' {
                    extended.start.get_or_insert(at);
                }
                let applied = match kind {
                    b'L' => {
                        extended.name = Some(text(&bytes));
                        Ok(())
                    }
                    b'K' => Ok(()),
                    _ => pax(&bytes, kind == b'g', extended),
                };
                return applied.map_err(|cause| self.unsound(at, &cause));
            }
            b'L' | b'K' | b'x' | b'g' => {
                format!("an extended header of {size} bytes, must have at most {EXTENDED_BYTES_MAX}")
            }
            b'1' => elsewhere("a hard link"),
            b'2' => elsewhere("a symbolic link"),
            b'S' => format!("`{name}` is a sparse member, shards must hold files as they are"),
            kind => format!("`{name}` is of type `{}`, must be a file", [kind].escape_ascii()),
        };
        Err(self.unsound(at, &cause))
    }

    /// The header at `at`; `None` where the archive ends.
    fn header(&mut self, at: u64) -> Result<Option<Header>, DataError> {
        if self.len.saturating_sub(at) < BLOCK {
            // Cut inside the last zeros, nothing is lost.
            let cause = if at >= self.len {
                "the archive ends without its end mark of zero bytes: it is cut off".to_owned()
            } else {
                format!("a header has {BLOCK} bytes, only {} are left: it is cut off", self.len - at)
            };
            return Err(self.unsound(at.min(self.len), &cause));
        }
        if self.windowed(at, BLOCK).is_none() {
            self.fill(at)?;
        }
        let Some(block) = self.windowed(at, BLOCK) else {
            return Err(self.unsound(at, "the file has become shorter while it was read"));
        };
        if block.iter().all(|&byte| byte == 0) {
            return Ok(None);
        }
        parse(block).map(Some).map_err(|cause| self.unsound(at, &cause))
    }

    /// Whether nothing but zeros follows the end of the archive.
    fn check_padding(&mut self, end: u64) -> Result<(), DataError> {
        let mut at = end;
        if self.len - end > PADDING_BYTES_MAX {
            let cause = format!(
                "{} bytes follow the end of the archive, at most {PADDING_BYTES_MAX} may pad it",
                self.len - end
            );
            return Err(self.unsound(end, &cause));
        }
        while at < self.len {
            if self.windowed(at, 1).is_none() {
                self.fill(at)?;
            }
            let from = (at - self.window_start) as usize;
            let Some(rest) = self.window.get(from..).filter(|rest| !rest.is_empty()) else { break };
            if let Some(found) = rest.iter().position(|&byte| byte != 0) {
                let cause =
                    format!("there is more after the end of the archive at byte {end}: is it two in one?");
                return Err(self.unsound(at + found as u64, &cause));
            }
            at += rest.len() as u64;
        }
        Ok(())
    }

    fn windowed(&self, at: u64, len: u64) -> Option<&[u8]> {
        let from = usize::try_from(at.checked_sub(self.window_start)?).ok()?;
        let to = from.checked_add(usize::try_from(len).ok()?)?;
        self.window.get(from..to)
    }

    /// Reads the window anew from `at` on.
    fn fill(&mut self, at: u64) -> Result<(), DataError> {
        let seen = self.window_start + self.window.len() as u64;
        let is_near = at >= self.window_start && at <= seen + self.reach as u64;
        self.reach = if is_near { (self.reach * 2).min(REACH_BYTES[1]) } else { REACH_BYTES[0] };
        self.window.clear();
        self.window_start = at;
        self.reader
            .seek(SeekFrom::Start(at))
            .and_then(|_| self.reader.by_ref().take(self.reach as u64).read_to_end(&mut self.window))
            .map(|_| ())
            .map_err(|source| self.io(source))
    }

    fn io(&self, source: std::io::Error) -> DataError {
        DataError::Io { act: "read", path: self.location.path(), source }
    }
}

/// What the header block says, if its checksum fits.
fn parse(block: &[u8]) -> Result<Header, String> {
    let checked = |is_signed: bool| {
        block.iter().enumerate().fold(0_i64, |sum, (at, &byte)| {
            let byte = if (148..156).contains(&at) { b' ' } else { byte };
            sum + if is_signed { i64::from(byte.cast_signed()) } else { i64::from(byte) }
        })
    };
    let stated = number(&block[148..156]).map(u64::cast_signed);
    // Some old writers summed signed bytes.
    if stated.as_ref() != Ok(&checked(false)) && stated.as_ref() != Ok(&checked(true)) {
        return Err(match block {
            [0x1f, 0x8b, ..] => GZIP.to_owned(),
            _ => {
                "no tar header stands here (its checksum does not fit): corrupt, or no tar archive".to_owned()
            }
        });
    }
    let mut name = text(&block[..100]);
    // GNU has other fields where ustar has the prefix.
    if block[257..263] == *b"ustar\0" && block[345] != 0 {
        name = format!("{}/{name}", text(&block[345..500]));
    }
    let size = number(&block[124..136]).map_err(|cause| format!("the size of `{name}` {cause}"))?;
    Ok(Header { kind: block[156], name, size })
}

/// A number in octal digits, or in base 256 as GNU writes large ones.
fn number(field: &[u8]) -> Result<u64, String> {
    if field[0] & 0x80 != 0 {
        let mut digits = std::iter::once(field[0] & 0x7f).chain(field[1..].iter().copied());
        let value = digits.try_fold(0_u64, |value, digit| value.checked_mul(256)?.checked_add(digit.into()));
        // Beyond that no offset can be added to it.
        return value.filter(|&value| value < 1 << 62).ok_or_else(|| "is past 2^62 bytes".to_owned());
    }
    let end = field.iter().position(|&byte| byte == 0).unwrap_or(field.len());
    let digits = field[..end].trim_ascii();
    digits
        .iter()
        .try_fold(0_u64, |value, &digit| match digit {
            // Twelve digits at most: no overflow.
            b'0'..=b'7' => Some(value * 8 + u64::from(digit - b'0')),
            _ => None,
        })
        .ok_or_else(|| format!("is `{}`, must be an octal number", digits.escape_ascii()))
}

/// The text before the first NUL.
fn text(field: &[u8]) -> String {
    let end = field.iter().position(|&byte| byte == 0).unwrap_or(field.len());
    match std::str::from_utf8(&field[..end]) {
        Ok(text) => text.to_owned(),
        // Two names that differ must stay two.
        Err(_) => field[..end].escape_ascii().to_string(),
    }
}

/// Applies the records of a pax header, "length key=value\n" each.
fn pax(mut bytes: &[u8], is_global: bool, extended: &mut Extended) -> Result<(), String> {
    let broken = || "a pax header must hold lines of `length key=value`".to_owned();
    while bytes.iter().any(|&byte| byte != 0) {
        let space = bytes.iter().take(20).position(|&byte| byte == b' ').ok_or_else(broken)?;
        let length: usize = std::str::from_utf8(&bytes[..space])
            .ok()
            .and_then(|text| text.parse().ok())
            .ok_or_else(broken)?;
        let record = bytes.get(space + 1..length).and_then(|record| record.strip_suffix(b"\n"));
        let record = record.ok_or_else(broken)?;
        let equals = record.iter().position(|&byte| byte == b'=').ok_or_else(broken)?;
        let (key, value) = (&record[..equals], &record[equals + 1..]);
        match key {
            b"path" | b"size" if is_global => {
                return Err(format!("a global pax header sets `{}` of all members", key.escape_ascii()));
            }
            b"path" => extended.name = Some(text(value)),
            b"size" => {
                let size: Option<u64> = std::str::from_utf8(value).ok().and_then(|text| text.parse().ok());
                let size = size.filter(|&size| size < 1 << 62);
                extended.size = Some(size.ok_or_else(|| {
                    format!("`size` in a pax header is `{}`, must be a number", value.escape_ascii())
                })?);
            }
            key if key.starts_with(b"GNU.sparse.") => {
                return Err("a sparse member, shards must hold files as they are".to_owned());
            }
            _ => {}
        }
        bytes = &bytes[length..];
    }
    Ok(())
}

#[cfg(test)]
pub(super) mod tests;
