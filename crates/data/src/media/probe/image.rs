//! JPEG, PNG (animated too), GIF, WebP and BMP: sizes as displayed, frames and durations.

use super::Probe;
use super::orientation::{EXIF, Turn, starts_with};
use super::png_text::Texts;
use super::riff::Chunks;
use super::source::{Fault, Source};
use std::io::Cursor;

const XMP: &[u8] = b"http://ns.adobe.com/xap/1.0/\0";
/// Bytes of several EXIF segments of a JPEG, at most; real ones have some 100 KB.
const EXIF_BYTES_MAX: usize = 1 << 24;
/// A GIF frame with a shorter delay, in hundredths of a second, is shown for [`PLAIN_DELAY`], as browsers do.
const DELAY_MIN: u16 = 2;
const PLAIN_DELAY: u16 = 10;

/// Segments up to the first scan: one of them has the size, others may have the orientation.
pub(super) fn jpeg(source: &mut Source<'_>) -> Result<Probe, Fault> {
    let mut at = 2;
    let mut size = None;
    let (mut exif, mut has_density) = (Vec::new(), false);
    let mut turn = Turn::default();
    while at + 4 <= source.len() {
        // A marker may be filled up with any number of 0xff; other bytes between segments are skipped, as libjpeg does.
        let [ff, marker] = source.bytes(at)?;
        if ff != 0xff || matches!(marker, 0x00 | 0xff) {
            at += 1;
            continue;
        }
        if matches!(marker, 0x01 | 0xd0..=0xd8) {
            at += 2;
            continue;
        }
        if matches!(marker, 0xd9 | 0xda) {
            break;
        }
        let length = u64::from(source.u16_be(at + 2)?);
        let (body, end) = (at + 4, at + 2 + length);
        match marker {
            _ if length < 2 => {
                return Fault::unsound(format!("segment {marker:#04x} has length {length}, at least 2"));
            }
            // Frame headers; c4, c8 and cc are tables and extensions.
            0xc0..=0xcf if !matches!(marker, 0xc4 | 0xc8 | 0xcc) => {
                let [_, h1, h0, w1, w0] = source.bytes(body)?;
                size = Some((u32::from(w1) << 8 | u32::from(w0), u32::from(h1) << 8 | u32::from(h0)));
            }
            // Where it says how dense the pixels are, in inches or centimetres.
            0xe0 if length >= 14 && body + 8 <= source.len() && starts_with(source, body, b"JFIF")? => {
                let [unit] = source.bytes(body + 7)?;
                has_density |= matches!(unit, 1 | 2);
            }
            // Pillow joins EXIF segments; of XMP the last one counts.
            0xe1 if length >= 8 && starts_with(source, body, EXIF)? => exif.push((body, end)),
            0xe1 if length > XMP.len() as u64 && starts_with(source, body, XMP)? => {
                turn.read_xmp(source, body + XMP.len() as u64, end)?;
            }
            _ => {}
        }
        at = end;
    }
    let Some(size) = size else {
        return Fault::unsound(format!(
            "it has {} bytes and no frame header before its first scan",
            source.len()
        ));
    };
    let read = match exif.as_slice() {
        [] => Ok(()),
        [(at, end)] => turn.read_exif(source, *at, *end),
        segments => read_joined(source, segments, &mut turn),
    };
    match read {
        // Pillow looks there for the density first. Then it knows the EXIF as broken, and asks nothing more.
        Err(Fault::Unsound(_)) if !has_density => turn.leave(),
        read => read?,
    }
    Ok(Probe::image("jpeg", turn.displayed(size)))
}

/// Tells `turn` what several segments of EXIF say, which go on from one to the next; each begins with the same prefix.
fn read_joined(source: &mut Source<'_>, segments: &[(u64, u64)], turn: &mut Turn) -> Result<(), Fault> {
    let mut joined = EXIF.to_vec();
    for &(at, end) in segments {
        source.append(&mut joined, at + EXIF.len() as u64, end)?;
        if joined.len() > EXIF_BYTES_MAX {
            return Fault::unsound(format!(
                "its {} segments of EXIF have more than {EXIF_BYTES_MAX} bytes",
                segments.len()
            ));
        }
    }
    let len = joined.len() as u64;
    turn.read_exif(&mut Source::new(Box::new(Cursor::new(joined)), len), 0, len)
}

/// Chunks from IHDR on; EXIF, texts and frames may stand after the pixels.
pub(super) fn png(source: &mut Source<'_>) -> Result<Probe, Fault> {
    let header = source.bytes::<8>(8)?;
    if &header[4..] != b"IHDR" {
        return Fault::unsound("its first chunk is not IHDR");
    }
    let size = (source.u32_be(16)?, source.u32_be(20)?);
    let mut turn = Turn::default();
    // Of several the last one counts, as in Pillow.
    let mut exif = None;
    let mut texts = Texts::default();
    let mut is_animated = false;
    let mut has_pixels = false;
    let mut frames = 0;
    let mut duration_ns = 0u64;
    let mut at = 8;
    while at + 12 <= source.len() {
        let header = source.bytes::<8>(at)?;
        let [l3, l2, l1, l0, kind @ ..] = header;
        let length = u64::from(u32::from_be_bytes([l3, l2, l1, l0]));
        let body = at + 8;
        match &kind {
            b"IEND" => break,
            // After the pixels it would come too late for a viewer to know.
            b"acTL" if !has_pixels && length >= 8 => is_animated = source.u32_be(body)? > 0,
            b"IDAT" => {
                has_pixels = true;
                at = last_of_equals(source, at, header, length)?;
            }
            b"fcTL" if is_animated && length >= 26 && body + 26 <= source.len() => {
                let [n1, n0, d1, d0] = source.bytes(body + 20)?;
                let denominator = u64::from(u16::from_be_bytes([d1, d0]));
                let numerator = u64::from(u16::from_be_bytes([n1, n0]));
                frames += 1;
                let delay_ns = numerator * 1_000_000_000 / if denominator == 0 { 100 } else { denominator };
                duration_ns = duration_ns.saturating_add(delay_ns);
            }
            b"eXIf" => exif = Some((body, body + length)),
            b"tEXt" | b"zTXt" | b"iTXt" => texts.note(source, kind, body, body + length)?,
            _ => {}
        }
        at += 12 + length;
    }
    if let Some((at, end)) = exif {
        turn.read_exif(source, at, end)?;
    }
    texts.tell(source, &mut turn, exif.is_some())?;
    Ok(Probe::animation("png", turn.displayed(size), frames, duration_ns))
}

/// Start of the last chunk in the run of chunks like the one at `at`: writers cut pixels into hundreds of equal ones.
///
/// Positions are doubled, then halved; each is taken only where the very same length and name stand, so that a file
/// of other cuts is walked as far as it is regular, and chunk by chunk from there.
fn last_of_equals(source: &mut Source<'_>, at: u64, header: [u8; 8], length: u64) -> Result<u64, Fault> {
    let step = length + 12;
    let most = (source.len() - at) / step;
    let (mut last, mut end) = (0, 1);
    let mut is_like = |k: u64| -> Result<bool, Fault> {
        let start = at + k * step;
        Ok(k <= most && start + 12 <= source.len() && source.bytes::<8>(start)? == header)
    };
    while is_like(end)? {
        last = end;
        end *= 2;
    }
    while end - last > 1 {
        let middle = last + (end - last) / 2;
        if is_like(middle)? {
            last = middle;
        } else {
            end = middle;
        }
    }
    Ok(at + last * step)
}

/// Blocks to the trailer: each image descriptor is a frame, the extension before it holds its delay.
pub(super) fn gif(source: &mut Source<'_>) -> Result<Probe, Fault> {
    let table_bytes = |flags: u8| if flags & 0x80 == 0 { 0 } else { 3u64 << ((flags & 7) + 1) };
    let mut size = (u32::from(source.u16_le(6)?), u32::from(source.u16_le(8)?));
    let mut at = 13 + table_bytes(source.u8(10)?);
    let mut frames = 0u64;
    let mut duration_ns = 0u64;
    let mut delay = 0;
    // A file cut in the middle still shows the frames that began; without a frame it shows nothing.
    while at < source.len() {
        match source.u8(at)? {
            0x3b => break,
            0x21 => {
                if at + 8 <= source.len() && source.bytes(at + 1)? == [0xf9, 4] {
                    delay = source.u16_le(at + 4)?;
                }
                at = after_sub_blocks(source, at + 2)?;
            }
            0x2c => {
                if at + 10 > source.len() {
                    break;
                }
                let [x0, x1, y0, y1, w0, w1, h0, h1, flags] = source.bytes(at + 1)?;
                let number = |low, high| u32::from(u16::from_le_bytes([low, high]));
                if frames == 0 {
                    // Pillow grows the screen to hold its first frame.
                    let reach = (number(x0, x1) + number(w0, w1), number(y0, y1) + number(h0, h1));
                    size = (size.0.max(reach.0), size.1.max(reach.1));
                }
                frames += 1;
                duration_ns += u64::from(if delay < DELAY_MIN { PLAIN_DELAY } else { delay }) * 10_000_000;
                delay = 0;
                at = after_sub_blocks(source, at + 11 + table_bytes(flags))?;
            }
            _ => at += 1,
        }
    }
    if frames == 0 {
        return Fault::unsound(format!("it has {} bytes and no frame", source.len()));
    }
    Ok(Probe::animation("gif", size, frames, duration_ns))
}

/// The offset after the sub-blocks at `at`, or the end of a file that is cut within them.
fn after_sub_blocks(source: &mut Source<'_>, mut at: u64) -> Result<u64, Fault> {
    while at < source.len() {
        let length = source.u8(at)?;
        at += 1 + u64::from(length);
        if length == 0 {
            break;
        }
    }
    Ok(at)
}

/// Chunks: VP8, VP8L or VP8X has the size, ANMF a frame's duration, EXIF or XMP the orientation.
pub(super) fn webp(source: &mut Source<'_>) -> Result<Probe, Fault> {
    let u24 = |bytes: &[u8]| u32::from(bytes[0]) | u32::from(bytes[1]) << 8 | u32::from(bytes[2]) << 16;
    let mut size = None;
    let mut extended = None;
    let mut turn = Turn::default();
    let (mut has_exif, mut has_xmp) = (false, false);
    let mut frames = 0;
    let mut duration_ns = 0u64;
    let mut chunks = Chunks::new(12, source.len());
    while let Some(chunk) = chunks.next(source)? {
        match &chunk.kind {
            b"VP8X" => {
                let canvas = source.bytes::<6>(chunk.body + 4)?;
                size = Some((u24(&canvas[..3]) + 1, u24(&canvas[3..]) + 1));
                extended = Some(source.u8(chunk.body)?);
            }
            b"VP8 " if size.is_none() => {
                let [_, _, _, s0, s1, s2, w0, w1, h0, h1] = source.bytes(chunk.body)?;
                if [s0, s1, s2] != [0x9d, 0x01, 0x2a] {
                    return Fault::unsound("its VP8 frame has no start code");
                }
                let pixels = |low, high| u32::from(u16::from_le_bytes([low, high]) & 0x3fff);
                size = Some((pixels(w0, w1), pixels(h0, h1)));
            }
            b"VP8L" if size.is_none() => {
                let [signature, bits @ ..] = source.bytes::<5>(chunk.body)?;
                if signature != 0x2f {
                    return Fault::unsound("its VP8L frame has no signature");
                }
                let bits = u32::from_le_bytes(bits);
                size = Some(((bits & 0x3fff) + 1, (bits >> 14 & 0x3fff) + 1));
            }
            b"ANMF" => {
                if chunk.body + 15 > source.len() {
                    break;
                }
                frames += 1;
                let delay_ns = u64::from(u24(&source.bytes::<3>(chunk.body + 12)?)) * 1_000_000;
                duration_ns = duration_ns.saturating_add(delay_ns);
            }
            // libwebp gives what the flags of VP8X announce, and the first of several.
            b"EXIF" if !has_exif && extended.is_some_and(|flags| flags & 8 != 0) => {
                has_exif = true;
                turn.read_exif(source, chunk.body, chunk.end)?;
            }
            b"XMP " if !has_xmp && extended.is_some_and(|flags| flags & 4 != 0) => {
                has_xmp = true;
                turn.read_xmp(source, chunk.body, chunk.end)?;
            }
            _ => {}
        }
        // A simple file is one chunk; only an extended one goes on.
        if size.is_some() && extended.is_none() {
            break;
        }
    }
    let Some(size) = size else { return Fault::unsound("none of its chunks has a size") };
    Ok(Probe::animation("webp", turn.displayed(size), frames, duration_ns))
}

pub(super) fn bmp(source: &mut Source<'_>) -> Result<Probe, Fault> {
    let size = if source.u32_le(14)? == 12 {
        (u32::from(source.u16_le(18)?), u32::from(source.u16_le(20)?))
    } else {
        // A height below zero says that rows run from top to bottom.
        (source.u32_le(18)?, source.u32_le(22)?.cast_signed().unsigned_abs())
    };
    if size.0 > i32::MAX as u32 {
        return Fault::unsound(format!("width is {}, must be at least 1", size.0.cast_signed()));
    }
    Ok(Probe::image("bmp", size))
}
