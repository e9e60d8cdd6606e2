//! The first directory of TIFF, classic and big, and of EXIF, which is a TIFF header without a picture.

use super::source::{Fault, Source};

const WIDTH: u16 = 256;
const HEIGHT: u16 = 257;
const ORIENTATION: u16 = 274;
const XMP: u16 = 700;
/// Entries of a directory we look at; real ones have dozens.
const ENTRIES_MAX: u64 = 4096;

/// What the first directory says.
#[derive(Debug, Default)]
pub(super) struct Directory {
    pub(super) width: Option<u32>,
    pub(super) height: Option<u32>,
    /// 1 where the entry holds no number that is an orientation.
    pub(super) orientation: Option<u16>,
    /// Where the XMP packet stands.
    pub(super) xmp: Option<(u64, u64)>,
}

/// The EXIF orientation in the TIFF header from `at` to `end`. It is none where no entry says it, or the directory is
/// broken. It is 1, and the picture is displayed as stored, where the entry holds something else than an orientation.
///
/// # Errors
/// [`Fault::Unsound`] where no TIFF header stands there: Pillow, which decodes in training, refuses the picture.
pub(super) fn orientation(source: &mut Source<'_>, at: u64, end: u64) -> Result<Option<u16>, Fault> {
    if at >= end {
        return Ok(None);
    }
    let head = if end - at < 8 { None } else { source.bytes::<8>(at).ok() };
    match head.as_ref().and_then(|head| head.first_chunk()) {
        // The last is the header of a big TIFF, behind which Pillow reads a classic directory all the same.
        Some(b"II*\0" | b"II\0*" | b"MM\0*" | b"MM*\0" | b"MM\0+") => {}
        _ => return Fault::unsound("its EXIF does not begin with a TIFF header"),
    }
    match directory_of(source, at, end, |_| false) {
        Ok(directory) => Ok(directory.orientation),
        Err(Fault::Unsound(_)) => Ok(None),
        Err(fault) => Err(fault),
    }
}

pub(super) fn first_directory(source: &mut Source<'_>, at: u64, end: u64) -> Result<Directory, Fault> {
    directory_of(source, at, end, |magic| magic == 43)
}

/// The first directory; `is_big` says of the magic number whether it is one of a big TIFF.
fn directory_of(
    source: &mut Source<'_>,
    at: u64,
    end: u64,
    is_big: impl Fn(u64) -> bool,
) -> Result<Directory, Fault> {
    let header = source.bytes::<16>(at).or_else(|_| {
        // A header of 8 bytes may end the file.
        let mut header = [0; 16];
        header[..8].copy_from_slice(&source.bytes::<8>(at)?);
        Ok::<_, Fault>(header)
    })?;
    let order = match &header[..2] {
        b"II" => Order::Little,
        b"MM" => Order::Big,
        _ => return Fault::unsound("its byte order is neither II nor MM"),
    };
    let is_big = match order.number(&header[2..4]) {
        // Some writers turn its bytes around.
        magic @ (42 | 0x2a00 | 43) => is_big(magic),
        magic => return Fault::unsound(format!("its magic number is {magic}, must be 42 or 43")),
    };
    let offset = order.number(if is_big { &header[8..16] } else { &header[4..8] });
    let directory_at = at.saturating_add(offset);
    let (num_entries, mut entry_at) = if is_big {
        (order.number(&source.bytes::<8>(directory_at)?), directory_at.saturating_add(8))
    } else {
        (order.number(&source.bytes::<2>(directory_at)?), directory_at.saturating_add(2))
    };
    if num_entries > ENTRIES_MAX {
        return Fault::unsound(format!(
            "its first directory has {num_entries} entries, at most {ENTRIES_MAX}"
        ));
    }
    let mut directory = Directory::default();
    let entry_bytes = if is_big { 20 } else { 12 };
    for _ in 0..num_entries {
        if entry_at.saturating_add(entry_bytes) > end {
            break;
        }
        let tag = order.number(&source.bytes::<2>(entry_at)?) as u16;
        match tag {
            WIDTH => directory.width = entry_value(source, order, entry_at, is_big)?,
            HEIGHT => directory.height = entry_value(source, order, entry_at, is_big)?,
            // Pillow keeps the first of several, passes over one without values, and takes no number from one of bytes.
            ORIENTATION
                if directory.orientation.is_none()
                    && order.number(&source.bytes::<4>(entry_at + 4)?) != 0 =>
            {
                let is_number = order.number(&source.bytes::<2>(entry_at + 2)?) != 1;
                let value = entry_value(source, order, entry_at, is_big)?.filter(|_| is_number);
                directory.orientation = Some(value.and_then(|v| u16::try_from(v).ok()).unwrap_or(1));
            }
            XMP if !is_big => {
                let num_bytes = order.number(&source.bytes::<4>(entry_at + 4)?);
                let packet_at = at.saturating_add(order.number(&source.bytes::<4>(entry_at + 8)?));
                directory.xmp = Some((packet_at, packet_at.saturating_add(num_bytes)));
            }
            _ => {}
        }
        entry_at += entry_bytes;
    }
    Ok(directory)
}

/// The value of an entry that holds one whole number; `None` for any other type.
fn entry_value(
    source: &mut Source<'_>,
    order: Order,
    entry_at: u64,
    is_big: bool,
) -> Result<Option<u32>, Fault> {
    let kind = order.number(&source.bytes::<2>(entry_at + 2)?);
    let value = source.bytes::<4>(entry_at + if is_big { 12 } else { 8 })?;
    let num_bytes = match kind {
        1 => 1,
        // Signed, too.
        3 | 8 => 2,
        4 | 9 => 4,
        // A number of eight bytes. No picture has a side that needs more than four.
        16 if is_big => {
            let whole = order.number(&source.bytes::<8>(entry_at + 12)?);
            return Ok(u32::try_from(whole).ok());
        }
        _ => return Ok(None),
    };
    Ok(Some(order.number(&value[..num_bytes]) as u32))
}

#[derive(Debug, Clone, Copy)]
enum Order {
    Little,
    Big,
}

impl Order {
    /// Up to 8 bytes as a whole number.
    fn number(self, bytes: &[u8]) -> u64 {
        let join = |number: u64, byte: &u8| number << 8 | u64::from(*byte);
        match self {
            Self::Little => bytes.iter().rev().fold(0, join),
            Self::Big => bytes.iter().fold(0, join),
        }
    }
}
