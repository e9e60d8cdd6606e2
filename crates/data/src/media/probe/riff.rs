//! RIFF: the chunks of WebP, WAV (RIFX and RF64 too) and AVI.

use super::source::{Fault, Source};
use super::{MediaKind, Probe};

/// A chunk: what it is called, and where its contents lie, the end kept within the file.
pub(super) struct Chunk {
    pub(super) kind: [u8; 4],
    pub(super) body: u64,
    pub(super) end: u64,
    /// As the file says, past the end of the file or not.
    pub(super) size: u32,
}

/// Chunks one after the other, from an offset to a limit.
pub(super) struct Chunks {
    at: u64,
    limit: u64,
    is_big_endian: bool,
}

impl Chunks {
    pub(super) const fn new(at: u64, limit: u64) -> Self {
        Self { at, limit, is_big_endian: false }
    }

    pub(super) const fn big_endian(at: u64, limit: u64) -> Self {
        Self { at, limit, is_big_endian: true }
    }

    /// The next chunk; `None` at the limit.
    pub(super) fn next(&mut self, source: &mut Source<'_>) -> Result<Option<Chunk>, Fault> {
        if self.at.saturating_add(8) > self.limit {
            return Ok(None);
        }
        let [k0, k1, k2, k3, size @ ..] = source.bytes::<8>(self.at)?;
        let size = if self.is_big_endian { u32::from_be_bytes(size) } else { u32::from_le_bytes(size) };
        let body = self.at + 8;
        let end = (body + u64::from(size)).min(self.limit);
        // Chunks begin at even offsets.
        self.at = body + u64::from(size) + u64::from(size % 2);
        Ok(Some(Chunk { kind: [k0, k1, k2, k3], body, end, size }))
    }
}

/// The fields of a WAVEFORMATEX that decide a duration.
#[derive(Debug, Default, Clone, Copy)]
struct WaveFormat {
    tag: u16,
    channels: u16,
    sample_rate: u32,
    bytes_per_second: u32,
    block_bytes: u16,
    /// Of formats that pack a fixed number of samples in a block; else 0.
    block_samples: u16,
}

const PCM: u16 = 1;
const ADPCM: u16 = 2;
const FLOAT: u16 = 3;
const A_LAW: u16 = 6;
const MU_LAW: u16 = 7;
const IMA_ADPCM: u16 = 0x11;
const EXTENSIBLE: u16 = 0xfffe;

fn wave_format(source: &mut Source<'_>, chunk: &Chunk, is_big_endian: bool) -> Result<WaveFormat, Fault> {
    if chunk.end - chunk.body < 14 {
        return Fault::unsound(format!("its sound format has {} bytes, at least 14", chunk.end - chunk.body));
    }
    let mut u16_at = |at: u64| -> Result<u16, Fault> {
        if is_big_endian { source.u16_be(chunk.body + at) } else { source.u16_le(chunk.body + at) }
    };
    let mut format = WaveFormat {
        tag: u16_at(0)?,
        channels: u16_at(2)?,
        block_bytes: u16_at(12)?,
        ..WaveFormat::default()
    };
    if format.tag == EXTENSIBLE && chunk.end - chunk.body >= 26 {
        format.tag = u16_at(24)?;
    } else if matches!(format.tag, ADPCM | IMA_ADPCM) && chunk.end - chunk.body >= 20 {
        format.block_samples = u16_at(18)?;
    }
    let mut u32_at = |at: u64| {
        if is_big_endian { source.u32_be(chunk.body + at) } else { source.u32_le(chunk.body + at) }
    };
    format.sample_rate = u32_at(4)?;
    format.bytes_per_second = u32_at(8)?;
    Ok(format)
}

/// `fmt ` and the size of `data`, which is cut to what the file holds: a stream's header claims the largest size.
pub(super) fn wav(source: &mut Source<'_>) -> Result<Probe, Fault> {
    let is_big_endian = source.u8(3)? == b'X';
    let mut chunks = Chunks { at: 12, limit: source.len(), is_big_endian };
    let mut format = None;
    let mut stated_samples = None;
    let mut long_bytes = None;
    while let Some(chunk) = chunks.next(source)? {
        match &chunk.kind {
            b"ds64" if chunk.size >= 16 => {
                let [low, high] = [source.u32_le(chunk.body + 8)?, source.u32_le(chunk.body + 12)?];
                long_bytes = Some(u64::from(high) << 32 | u64::from(low));
            }
            b"fmt " => format = Some(wave_format(source, &chunk, is_big_endian)?),
            b"fact" if chunk.size >= 4 => stated_samples = Some(u64::from(source.u32_le(chunk.body)?)),
            b"data" => {
                let Some(format) = format else { return Fault::unsound("chunk `data` stands before `fmt `") };
                let there = source.len() - chunk.body.min(source.len());
                let stated =
                    if chunk.size == u32::MAX { long_bytes.unwrap_or(there) } else { u64::from(chunk.size) };
                let data_bytes = stated.min(there);
                let samples = wave_samples(format, data_bytes, stated_samples.filter(|_| stated <= there));
                return Ok(Probe::sound("wav", u32::from(format.channels), format.sample_rate, samples));
            }
            _ => {}
        }
    }
    Fault::unsound(format!("it has {} bytes and no chunk `data`", source.len()))
}

fn wave_samples(format: WaveFormat, data_bytes: u64, stated: Option<u64>) -> Option<u64> {
    let blocks = data_bytes.checked_div(u64::from(format.block_bytes));
    match format.tag {
        PCM | FLOAT | A_LAW | MU_LAW => blocks,
        _ => stated.or_else(|| match format.block_samples {
            0 => (data_bytes.saturating_mul(u64::from(format.sample_rate)))
                .checked_div(u64::from(format.bytes_per_second)),
            samples => blocks.map(|blocks| blocks * u64::from(samples)),
        }),
    }
}

/// The stream headers in the first list.
pub(super) fn avi(source: &mut Source<'_>) -> Result<Probe, Fault> {
    let Some(list) = Chunks::new(12, source.len()).next(source)? else {
        return Fault::unsound("it ends before its header list");
    };
    if &list.kind != b"LIST" || &source.bytes::<4>(list.body)? != b"hdrl" {
        return Fault::unsound("its first chunk is not the list `hdrl`");
    }
    let mut probe = Probe::new(MediaKind::Video, "avi");
    let mut duration_s = None;
    let mut streams = Chunks::new(list.body + 4, list.end);
    while let Some(stream) = streams.next(source)? {
        if &stream.kind != b"LIST" || &source.bytes::<4>(stream.body)? != b"strl" {
            continue;
        }
        let mut kind = [0; 4];
        let mut timing = [0; 3];
        let mut fields = Chunks::new(stream.body + 4, stream.end);
        while let Some(field) = fields.next(source)? {
            match (&field.kind, &kind) {
                (b"strh", _) => {
                    kind = source.bytes(field.body)?;
                    for (value, at) in timing.iter_mut().zip([20, 24, 32]) {
                        *value = source.u32_le(field.body + at)?;
                    }
                }
                (b"strf", b"vids") if probe.width.is_none() => {
                    probe.width = Some(source.u32_le(field.body + 4)?);
                    probe.height = Some(source.u32_le(field.body + 8)?.cast_signed().unsigned_abs());
                    let [scale, rate, frames] = timing;
                    probe.frames = Some(u64::from(frames));
                    duration_s = (rate > 0).then(|| f64::from(frames) * f64::from(scale) / f64::from(rate));
                }
                (b"strf", b"auds") if probe.channels.is_none() => {
                    let format = wave_format(source, &field, false)?;
                    probe.channels = Some(u32::from(format.channels));
                    probe.sample_rate = Some(format.sample_rate);
                }
                _ => {}
            }
        }
    }
    if probe.width.is_none() {
        return Fault::unsound("it has no video stream");
    }
    Ok(probe.lasting(duration_s))
}
