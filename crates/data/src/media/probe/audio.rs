//! FLAC, MP3, AAC in ADTS, Ogg (Vorbis, Opus, Speex, FLAC) and AIFF: rate, channels and number of samples.

use super::Probe;
use super::riff::Chunks;
use super::source::{Fault, Source};

/// Sample rates of AAC, by index.
pub(super) const AAC_RATES: [u32; 13] =
    [96_000, 88_200, 64_000, 48_000, 44_100, 32_000, 24_000, 22_050, 16_000, 12_000, 11_025, 8_000, 7_350];
/// Bytes without a frame after which a stream of frames is over, or none begins.
const SEARCH_BYTES: u64 = 1 << 16;

type Reader = fn(&mut Source<'_>) -> Result<Probe, Fault>;

/// Formats that may follow an ID3 tag, and those known by their first frame alone.
pub(super) fn sniff(source: &mut Source<'_>) -> Result<Option<(&'static str, Reader)>, Fault> {
    let start = source.prefix()?;
    let at = after_id3(source)?;
    let first = if at + 4 <= source.len() { source.bytes::<4>(at)? } else { [0; 4] };
    Ok(Some(match first {
        [b'f', b'L', b'a', b'C'] => ("flac", flac),
        [0xff, second, ..] if second & 0xf6 == 0xf0 => ("aac", adts),
        _ if MpegFrame::parse(first).is_some() || start.starts_with(b"ID3") => ("mp3", mp3),
        _ => return Ok(None),
    }))
}

/// The offset after ID3 tags; 10 where a tag claims to be longer than the file.
fn after_id3(source: &mut Source<'_>) -> Result<u64, Fault> {
    let mut at = 0;
    while at + 10 <= source.len() {
        let [i, d, three, _, _, flags, s3, s2, s1, s0] = source.bytes(at)?;
        if [i, d, three] != *b"ID3" {
            break;
        }
        let size = [s3, s2, s1, s0].iter().fold(0, |size, byte| size << 7 | u64::from(byte & 0x7f));
        let end = at + 10 + size + if flags & 0x10 == 0 { 0 } else { 10 };
        if end >= source.len() {
            return Ok(at + 10);
        }
        at = end;
    }
    Ok(at)
}

pub(super) fn flac(source: &mut Source<'_>) -> Result<Probe, Fault> {
    let at = after_id3(source)?;
    stream_info(source, at + 4, "flac")
}

/// STREAMINFO, the first block after `fLaC`; a stream that was written without its length is read from its end.
fn stream_info(source: &mut Source<'_>, at: u64, format: &'static str) -> Result<Probe, Fault> {
    if source.u8(at)? & 0x7f != 0 {
        return Fault::unsound("its first block is not STREAMINFO");
    }
    let max_block = u64::from(source.u16_be(at + 6)?);
    let packed = source.u64_be(at + 14)?;
    let sample_rate = (packed >> 44) as u32;
    let channels = (packed >> 41 & 7) as u32 + 1;
    let stated = packed & 0xf_ffff_ffff;
    let samples = if stated > 0 { Some(stated) } else { last_flac_sample(source, max_block)? };
    Ok(Probe::sound(format, channels, sample_rate, samples))
}

/// Samples up to the end of the last frame header that is sound, within the last 256 KiB.
fn last_flac_sample(source: &mut Source<'_>, max_block: u64) -> Result<Option<u64>, Fault> {
    const PIECE: u64 = 4096;
    const HEADER_MAX: u64 = 16;
    let mut piece_at = source.len().saturating_sub(PIECE);
    for _ in 0..64 {
        let num_bytes = (source.len() - piece_at).min(PIECE) as usize;
        let piece = source.slice(piece_at, num_bytes)?;
        let found = (0..piece.len()).rev().find_map(|start| flac_frame_end(&piece[start..], max_block));
        if found.is_some() || piece_at == 0 {
            return Ok(found);
        }
        piece_at = piece_at.saturating_sub(PIECE - HEADER_MAX);
    }
    Ok(None)
}

/// The sample after a frame whose header begins here, checked by its CRC.
fn flac_frame_end(bytes: &[u8], max_block: u64) -> Option<u64> {
    let &[0xff, sync @ (0xf8 | 0xf9), sizes, channels, ..] = bytes else { return None };
    if channels >> 4 > 10 || channels & 1 != 0 || sizes & 15 == 15 {
        return None;
    }
    // The number is encoded as UTF-8 encodes a character, with up to 36 bits.
    let first = *bytes.get(4)?;
    let ones = first.leading_ones();
    if ones == 1 || ones > 7 {
        return None;
    }
    let mut number = u64::from(first) & if ones == 0 { 0x7f } else { 0x7f >> ones };
    let mut at = 5;
    for _ in 1..ones {
        let byte = *bytes.get(at)?;
        if byte & 0xc0 != 0x80 {
            return None;
        }
        number = number << 6 | u64::from(byte & 0x3f);
        at += 1;
    }
    let block = match sizes >> 4 {
        0 => return None,
        1 => 192,
        code @ 2..=5 => 576 << (code - 2),
        6 => u64::from(*bytes.get(at)?) + 1,
        7 => u64::from(u16::from_be_bytes([*bytes.get(at)?, *bytes.get(at + 1)?])) + 1,
        code => 256 << (code - 8),
    };
    at += match sizes >> 4 {
        6 => 1,
        7 => 2,
        _ => 0,
    };
    at += match sizes & 15 {
        12 => 1,
        13 | 14 => 2,
        _ => 0,
    };
    let crc = bytes.get(..at)?.iter().fold(0u8, |crc, byte| {
        (0..8).fold(crc ^ byte, |crc, _| if crc & 0x80 == 0 { crc << 1 } else { crc << 1 ^ 0x07 })
    });
    if crc != *bytes.get(at)? || block > max_block {
        return None;
    }
    let first_sample = if sync == 0xf8 { number * max_block } else { number };
    Some(first_sample + block)
}

/// The header of an MPEG audio frame, layers 1 to 3.
#[derive(Debug, Clone, Copy, PartialEq)]
struct MpegFrame {
    sample_rate: u32,
    channels: u32,
    samples: u32,
    bytes: u32,
    /// Where the index of a stream may stand in its first frame.
    index_at: u64,
    /// Version and layer: one stream does not change them.
    family: u8,
}

impl MpegFrame {
    /// The frame whose first bytes these are; free bit rates are not known, as their frames have no length.
    fn parse([sync, version, rates, mode]: [u8; 4]) -> Option<Self> {
        const KBITS: [[u32; 14]; 5] = [
            [32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 352, 384, 416, 448],
            [32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384],
            [32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320],
            [32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256],
            [8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160],
        ];
        // The sync takes eleven bits, version and layer two each.
        if sync != 0xff || version & 0xe0 != 0xe0 {
            return None;
        }
        let (family, layer) = (version & 0x1e, 4 - (version >> 1 & 3));
        let (bits_index, rate_index) = (usize::from(rates >> 4), usize::from(rates >> 2 & 3));
        let version = version >> 3 & 3;
        if version == 1 || layer == 4 || rate_index == 3 || !(1..15).contains(&bits_index) {
            return None;
        }
        let is_first_version = version == 3;
        let row = match (is_first_version, layer) {
            (true, layer) => usize::from(layer) - 1,
            (false, 1) => 3,
            (false, _) => 4,
        };
        let halvings = [2, 0, 1, 0][usize::from(version)];
        let sample_rate = [44_100, 48_000, 32_000][rate_index] >> halvings;
        let bits = KBITS[row][bits_index - 1] * 1000;
        let padding = u32::from(rates >> 1 & 1);
        let (samples, bytes) = match (layer, is_first_version) {
            (1, _) => (384, (12 * bits / sample_rate + padding) * 4),
            (2, _) | (3, true) => (1152, 144 * bits / sample_rate + padding),
            _ => (576, 72 * bits / sample_rate + padding),
        };
        let channels = if mode >> 6 == 3 { 1 } else { 2 };
        let index_at = match (is_first_version, channels) {
            (true, 2) => 36,
            (true, _) | (false, 2) => 21,
            (false, _) => 13,
        };
        Some(Self { sample_rate, channels, samples, bytes, index_at, family })
    }
}

fn mpeg_frame(source: &mut Source<'_>, at: u64) -> Result<Option<MpegFrame>, Fault> {
    if at + 4 > source.len() {
        return Ok(None);
    }
    Ok(MpegFrame::parse(source.bytes(at)?))
}

/// The index in the first frame (Xing, Info, VBRI), else every frame header.
pub(super) fn mp3(source: &mut Source<'_>) -> Result<Probe, Fault> {
    let tag_end = after_id3(source)?;
    let mut at = tag_end;
    // The first frame counts as found where another frame of its kind follows it, or where it ends the file.
    let first = loop {
        if at + 4 > source.len() || at - tag_end > SEARCH_BYTES {
            return Fault::unsound(format!("no MPEG audio frame begins from byte {tag_end} on"));
        }
        if let Some(frame) = mpeg_frame(source, at)? {
            let next_at = at + u64::from(frame.bytes);
            let next = mpeg_frame(source, next_at)?;
            if next_at >= source.len() || next.is_some_and(|next| next.family == frame.family) {
                break frame;
            }
        }
        at += 1;
    };
    let num_samples = match indexed_samples(source, at, first)? {
        Some(samples) => samples,
        None => walked_samples(source, at, first.family)?,
    };
    Ok(Probe::sound("mp3", first.channels, first.sample_rate, Some(num_samples)))
}

/// Samples by the index of a first frame that holds one, without the encoder's delay and padding where it tells.
fn indexed_samples(source: &mut Source<'_>, at: u64, frame: MpegFrame) -> Result<Option<u64>, Fault> {
    let per_frame = u64::from(frame.samples);
    let end = at + u64::from(frame.bytes);
    let index_at = at + frame.index_at;
    if index_at + 16 > end.min(source.len()) {
        return Ok(None);
    }
    if matches!(&source.bytes::<4>(index_at)?, b"Xing" | b"Info") {
        let flags = source.u32_be(index_at + 4)?;
        if flags & 1 == 0 {
            return Ok(None);
        }
        let whole = u64::from(source.u32_be(index_at + 8)?) * per_frame;
        let lame_at = index_at
            + 8
            + 4 * u64::from((flags & 0b1011).count_ones())
            + if flags & 4 == 0 { 0 } else { 100 };
        if lame_at + 24 > end.min(source.len()) {
            return Ok(Some(whole));
        }
        let trimmed = match &source.bytes::<4>(lame_at)? {
            b"LAME" | b"Lavf" | b"Lavc" | b"L3.9" => {
                let [high, middle, low] = source.bytes(lame_at + 21)?;
                // Two numbers of twelve bits: samples before the sound, and after it.
                let delay = (u64::from(high) << 4) | u64::from(middle >> 4);
                let padding = (u64::from(middle & 15) << 8) | u64::from(low);
                delay + padding
            }
            _ => 0,
        };
        return Ok(Some(whole.saturating_sub(trimmed)));
    }
    if index_at.max(at + 36) + 18 <= end.min(source.len()) && &source.bytes::<4>(at + 36)? == b"VBRI" {
        return Ok(Some(u64::from(source.u32_be(at + 36 + 14)?) * per_frame));
    }
    Ok(None)
}

fn walked_samples(source: &mut Source<'_>, mut at: u64, family: u8) -> Result<u64, Fault> {
    let mut num_samples = 0;
    let mut last_end = at;
    while at + 4 <= source.len() && at - last_end <= SEARCH_BYTES {
        match mpeg_frame(source, at)?.filter(|frame| frame.family == family) {
            Some(frame) => {
                num_samples += u64::from(frame.samples);
                at += u64::from(frame.bytes);
                last_end = at;
            }
            None => at += 1,
        }
    }
    Ok(num_samples)
}

/// Every frame header.
pub(super) fn adts(source: &mut Source<'_>) -> Result<Probe, Fault> {
    let mut at = after_id3(source)?;
    let mut format = None;
    let mut num_samples = 0;
    while at + 7 <= source.len() {
        let [0xff, second, b2, b3, b4, b5, b6] = source.bytes(at)? else { break };
        if second & 0xf6 != 0xf0 {
            break;
        }
        if format.is_none() {
            let rate_index = usize::from(b2 >> 2 & 15);
            let Some(&rate) = AAC_RATES.get(rate_index) else {
                return Fault::unsound(format!("its sample rate index is {rate_index}, at most 12"));
            };
            let channels = u32::from(b2 & 1) << 2 | u32::from(b3 >> 6);
            format = Some((rate, if channels == 7 { 8 } else { channels }));
        }
        let bytes = u64::from(b3 & 3) << 11 | u64::from(b4) << 3 | u64::from(b5 >> 5);
        if bytes < 7 {
            return Fault::unsound(format!("a frame has {bytes} bytes, at least 7"));
        }
        num_samples += 1024 * (u64::from(b6 & 3) + 1);
        at += bytes;
    }
    let Some((rate, channels)) = format else { return Fault::unsound("it has no frame") };
    Ok(Probe::sound("aac", channels, rate, Some(num_samples)))
}

/// The first page tells the codec, the last whole page of the stream its length.
pub(super) fn ogg(source: &mut Source<'_>) -> Result<Probe, Fault> {
    let serial = source.u32_le(14)?;
    let packet_at = 27 + u64::from(source.u8(26)?);
    let start = source.bytes::<8>(packet_at)?;
    // (channels, rate, rate of the positions, positions before the first sample)
    let (channels, sample_rate, position_rate, skipped) = match &start {
        [1, b'v', b'o', b'r', b'b', b'i', b's', _] => {
            let rate = source.u32_le(packet_at + 12)?;
            (u32::from(source.u8(packet_at + 11)?), rate, rate, 0)
        }
        b"OpusHead" => {
            // Opus decodes at 48 kHz; the rate in the header is that of the original.
            (u32::from(source.u8(packet_at + 9)?), 48_000, 48_000, source.u16_le(packet_at + 10)?)
        }
        b"Speex   " => {
            let rate = source.u32_le(packet_at + 36)?;
            (source.u32_le(packet_at + 48)?, rate, rate, 0)
        }
        [0x7f, b'F', b'L', b'A', b'C', ..] => {
            let probe = stream_info(source, packet_at + 13, "ogg")?;
            if probe.duration_s.is_some() {
                return Ok(probe);
            }
            let rate = probe.sample_rate.unwrap_or(0);
            (probe.channels.unwrap_or(0), rate, rate, 0)
        }
        _ => return Fault::unsound("its first stream is not Vorbis, Opus, Speex or FLAC"),
    };
    let mut last = None;
    let mut at = 0;
    while at + 27 <= source.len() && &source.bytes::<4>(at)? == b"OggS" {
        let position = source.bytes(at + 6).map(i64::from_le_bytes)?;
        let is_ours = source.u32_le(at + 14)? == serial;
        let num_segments = usize::from(source.u8(at + 26)?);
        let table_end = at + 27 + num_segments as u64;
        if table_end > source.len() {
            break;
        }
        let body: u64 = source.slice(at + 27, num_segments)?.iter().map(|&bytes| u64::from(bytes)).sum();
        at = table_end + body;
        if is_ours && position >= 0 && at <= source.len() {
            last = Some(position as u64);
        }
    }
    let num_samples = last.map(|position| position.saturating_sub(u64::from(skipped)));
    let duration_s = num_samples.filter(|_| position_rate > 0).map(|n| n as f64 / f64::from(position_rate));
    Ok(Probe::sound("ogg", channels, sample_rate, None).lasting(duration_s))
}

/// The common chunk.
pub(super) fn aiff(source: &mut Source<'_>) -> Result<Probe, Fault> {
    let mut chunks = Chunks::big_endian(12, source.len());
    while let Some(chunk) = chunks.next(source)? {
        if &chunk.kind != b"COMM" {
            continue;
        }
        let channels = u32::from(source.u16_be(chunk.body)?);
        let frames = u64::from(source.u32_be(chunk.body + 2)?);
        // An 80-bit float: sign and exponent, then a mantissa with its leading one.
        let exponent = i32::from(source.u16_be(chunk.body + 8)? & 0x7fff) - 16_383 - 63;
        let sample_rate = source.u64_be(chunk.body + 10)? as f64 * 2f64.powi(exponent);
        return Ok(Probe::sound("aiff", channels, sample_rate as u32, Some(frames)));
    }
    Fault::unsound(format!("it has {} bytes and no chunk `COMM`", source.len()))
}
