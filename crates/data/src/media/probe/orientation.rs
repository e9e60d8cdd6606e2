//! Which way up a picture is displayed: what its EXIF says, and its XMP where EXIF is silent, as Pillow reads them.

use super::directory;
use super::source::{Fault, Source, displayed};

/// Each prefix that JPEG needs; other formats may keep it.
pub(super) const EXIF: &[u8] = b"Exif\0\0";

/// What a picture's metadata say of its orientation.
#[derive(Debug, Default)]
pub(super) struct Turn {
    /// What EXIF says. XMP is not asked where EXIF says anything, even a number that is no orientation.
    exif: Option<u16>,
    xmp: Option<u16>,
}

impl Turn {
    pub(super) const fn of_exif(exif: Option<u16>) -> Self {
        Self { exif, xmp: None }
    }

    /// Takes the EXIF from `at` to `end` in place of an earlier one; up to two prefixes are skipped, as by Pillow.
    pub(super) fn read_exif(&mut self, source: &mut Source<'_>, mut at: u64, end: u64) -> Result<(), Fault> {
        for _ in 0..2 {
            if starts_with(source, at, EXIF)? {
                at += EXIF.len() as u64;
            }
        }
        self.exif = directory::orientation(source, at, end)?;
        Ok(())
    }

    /// The picture lies as it is stored, whatever its metadata say.
    pub(super) const fn leave(&mut self) {
        self.exif = Some(1);
    }

    /// Whether an EXIF names an orientation.
    pub(super) const fn is_told_by_exif(&self) -> bool {
        self.exif.is_some()
    }

    /// Takes the XMP packet from `at` to `end` in place of an earlier one.
    pub(super) fn read_xmp(&mut self, source: &mut Source<'_>, at: u64, end: u64) -> Result<(), Fault> {
        self.xmp = digit_of_xmp(source, at, end)?;
        Ok(())
    }

    /// Sides as displayed, of a picture stored with these.
    pub(super) fn displayed(&self, sides: (u32, u32)) -> (u32, u32) {
        displayed(sides, self.exif.or(self.xmp).unwrap_or(1))
    }
}

pub(super) fn starts_with(source: &mut Source<'_>, at: u64, expected: &[u8]) -> Result<bool, Fault> {
    match source.slice(at, expected.len()) {
        Ok(bytes) => Ok(bytes == expected),
        Err(Fault::Unsound(_)) => Ok(false),
        Err(fault) => Err(fault),
    }
}

/// The digit after the first `tiff:Orientation="` or `tiff:Orientation>` that has one.
fn digit_of_xmp(source: &mut Source<'_>, at: u64, end: u64) -> Result<Option<u16>, Fault> {
    const NAME: &[u8] = b"tiff:Orientation";
    /// The name, `="` and a digit.
    const WHOLE: usize = NAME.len() + 3;
    const PIECE: usize = 2048;
    let end = end.min(source.len());
    let mut at = at;
    while at < end {
        let num_bytes = (end - at).min(PIECE as u64) as usize;
        let piece = source.slice(at, num_bytes)?;
        let digit = piece.windows(NAME.len()).enumerate().filter(|(_, window)| *window == NAME).find_map(
            |(found, _)| match piece[found + NAME.len()..] {
                [b'=', b'"', digit @ b'0'..=b'9', ..] | [b'>', digit @ b'0'..=b'9', ..] => {
                    Some(u16::from(digit - b'0'))
                }
                _ => None,
            },
        );
        if digit.is_some() || num_bytes < PIECE {
            return Ok(digit);
        }
        // Pieces overlap, so that what stands on the seam is found.
        at += (PIECE - WHOLE) as u64;
    }
    Ok(None)
}
