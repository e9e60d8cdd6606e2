//! The texts of a PNG that say its orientation: XMP, and the EXIF that older writers (`ImageMagick`) keep as a text.

use super::orientation::{Turn, starts_with};
use super::source::{Fault, Source};
use flate2::read::ZlibDecoder;
use std::io::{Cursor, ErrorKind, Read as _};

const XMP: &[u8] = b"XML:com.adobe.xmp\0";
const PROFILE: &[u8] = b"Raw profile type exif\0";
/// Bytes of one of these texts, also unpacked; Pillow refuses a picture whose text unpacks to more.
const TEXT_BYTES_MAX: u64 = 1 << 20;

/// A chunk of text: its type, and where it goes on behind its keyword.
type Place = ([u8; 4], u64, u64);

/// Where these texts stand; of two with one keyword the last one counts.
#[derive(Debug, Default)]
pub(super) struct Texts {
    xmp: Option<Place>,
    profile: Option<Place>,
}

impl Texts {
    /// Remembers the chunk of text from `at` to `end`, if it is one of them.
    pub(super) fn note(
        &mut self,
        source: &mut Source<'_>,
        kind: [u8; 4],
        at: u64,
        end: u64,
    ) -> Result<(), Fault> {
        if starts_with(source, at, XMP)? {
            self.xmp = Some((kind, at + XMP.len() as u64, end));
        } else if starts_with(source, at, PROFILE)? {
            self.profile = Some((kind, at + PROFILE.len() as u64, end));
        }
        Ok(())
    }

    /// Tells `turn` what the texts say; the text with EXIF counts only where no chunk has EXIF (`has_exif`).
    pub(super) fn tell(&self, source: &mut Source<'_>, turn: &mut Turn, has_exif: bool) -> Result<(), Fault> {
        if let Some(place) = self.profile.filter(|_| !has_exif) {
            let Some(exif) = unhexed(&text(source, place)?) else {
                return Fault::unsound("its text `Raw profile type exif` is not hexadecimal");
            };
            let len = exif.len() as u64;
            turn.read_exif(&mut Source::new(Box::new(Cursor::new(exif)), len), 0, len)?;
        }
        if let Some(place) = self.xmp {
            let packet = text(source, place)?;
            let len = packet.len() as u64;
            turn.read_xmp(&mut Source::new(Box::new(Cursor::new(packet)), len), 0, len)?;
        }
        Ok(())
    }
}

/// The text of a chunk, unpacked; empty where it cannot be unpacked, as Pillow takes it.
fn text(source: &mut Source<'_>, (kind, at, end): Place) -> Result<Vec<u8>, Fault> {
    let bytes = read(source, at, end)?;
    match (&kind, &bytes[..]) {
        (b"zTXt", [0, packed @ ..]) | (b"iTXt", [1..=255, 0, packed @ ..]) => {
            let packed = if &kind == b"iTXt" { after_names(packed) } else { packed };
            unpacked(packed)
        }
        (b"zTXt", [method, ..]) => {
            Fault::unsound(format!("its text is packed by method {method}, the only one is 0"))
        }
        (b"iTXt", [0, _, plain @ ..]) => Ok(after_names(plain).to_vec()),
        (b"tEXt", _) => Ok(bytes),
        _ => Ok(Vec::new()),
    }
}

/// What stands behind the language and the translated keyword of an international text.
fn after_names(bytes: &[u8]) -> &[u8] {
    bytes.splitn(3, |&byte| byte == 0).nth(2).unwrap_or_default()
}

fn read(source: &mut Source<'_>, at: u64, end: u64) -> Result<Vec<u8>, Fault> {
    let num_bytes = end.min(source.len()).saturating_sub(at);
    if num_bytes > TEXT_BYTES_MAX {
        return Fault::unsound(format!("a text of it has {num_bytes} bytes, at most {TEXT_BYTES_MAX}"));
    }
    let mut bytes = Vec::new();
    source.append(&mut bytes, at, end)?;
    Ok(bytes)
}

fn unpacked(packed: &[u8]) -> Result<Vec<u8>, Fault> {
    let mut bytes = Vec::new();
    match ZlibDecoder::new(packed).take(TEXT_BYTES_MAX + 1).read_to_end(&mut bytes) {
        Err(error) if error.kind() != ErrorKind::UnexpectedEof => Ok(Vec::new()),
        _ if bytes.len() as u64 > TEXT_BYTES_MAX => {
            Fault::unsound(format!("a text of it unpacks to more than {TEXT_BYTES_MAX} bytes"))
        }
        // A text that is cut off counts as far as it goes.
        _ => Ok(bytes),
    }
}

/// The bytes that stand in hexadecimal from the fourth line on: name and length stand before.
fn unhexed(text: &[u8]) -> Option<Vec<u8>> {
    let digits: Option<Vec<u8>> = text
        .splitn(4, |&byte| byte == b'\n')
        .nth(3)
        .unwrap_or_default()
        .iter()
        .filter(|byte| !byte.is_ascii_whitespace())
        .map(|&byte| char::from(byte).to_digit(16).map(|digit| digit as u8))
        .collect();
    let digits = digits?;
    let pairs = digits.chunks_exact(2);
    pairs.remainder().is_empty().then(|| pairs.map(|pair| pair[0] << 4 | pair[1]).collect())
}
