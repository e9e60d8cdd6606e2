//! Matroska and WebM: track entries, then the headers of all blocks of the first video track, to count frames.
//!
//! Elements that hold others are entered and all others are skipped by their size, without a stack: names are
//! unique, and a live recording has clusters of unknown size.

use super::source::{Fault, Source};
use super::{MediaKind, Probe};

#[derive(Debug, Default, Clone)]
struct Track {
    number: u64,
    kind: u64,
    frame_ns: u64,
    width: u32,
    height: u32,
    roll: f64,
    channels: u32,
    sample_rate: f64,
    is_opus: bool,
}

#[derive(Debug, Default)]
struct File {
    is_webm: bool,
    scale_ns: Option<u64>,
    duration: Option<f64>,
    tracks: Vec<Track>,
    cluster_ticks: u64,
    /// Of the track counted: blocks, and the first and last block's times.
    counted: Option<u64>,
    num_blocks: u64,
    first_ticks: i64,
    last_ticks: i64,
}

pub(super) fn matroska(source: &mut Source<'_>) -> Result<Probe, Fault> {
    let mut file = File::default();
    let mut at = 0;
    while at < source.len() {
        let element = match element(source, at) {
            Ok(element) => element,
            // Cut in the middle of a block, or followed by something else: what was read stands.
            Err(Fault::Unsound(_)) if file.counted.is_some() => break,
            Err(fault) => return Err(fault),
        };
        let end = element.size.map(|size| element.body.saturating_add(size));
        if is_master(element.id) {
            enter(&mut file, element.id);
            at = element.body;
            continue;
        }
        let Some(end) = end else {
            return Fault::unsound(format!("element {:#x} has no size", element.id));
        };
        if end > source.len() && file.counted.is_none() {
            return Fault::unsound(format!(
                "element {:#x} ends at byte {end}, the file at byte {}",
                element.id,
                source.len()
            ));
        }
        leaf(source, &mut file, &element)?;
        at = end;
    }
    answer(&file)
}

fn answer(file: &File) -> Result<Probe, Fault> {
    let first = |kind| file.tracks.iter().find(|track| track.kind == kind);
    let (video, audio) = (first(1), first(2));
    let scale_ns = file.scale_ns.unwrap_or(1_000_000);
    let seconds = |ns: u64| ns as f64 / 1e9;
    let span_ns =
        u64::try_from(file.last_ticks.saturating_sub(file.first_ticks)).unwrap_or(0).saturating_mul(scale_ns);
    let named_s = file.duration.map(|ticks| ticks * scale_ns as f64 / 1e9);
    let format = if file.is_webm { "webm" } else { "mkv" };
    let channels = audio.map(|track| track.channels);
    // Opus decodes at 48 kHz, whatever the original had.
    let sample_rate = audio.map(|track| if track.is_opus { 48_000 } else { track.sample_rate as u32 });
    let Some(video) = video else {
        let Some((channels, sample_rate)) = channels.zip(sample_rate) else {
            return Fault::unsound(format!("none of its {} tracks is video or audio", file.tracks.len()));
        };
        return Ok(
            Probe::sound(format, channels, sample_rate, None).lasting(named_s.or(Some(seconds(span_ns))))
        );
    };
    // Where the file has no duration, the last frame is taken to be as long as the mean of the others.
    let frame_ns = match (video.frame_ns, file.num_blocks) {
        (0, 0 | 1) => 0,
        (0, blocks) => span_ns / (blocks - 1),
        (ns, _) => ns,
    };
    let lies = (video.roll.abs() - 90.0).abs() < 45.0;
    let (width, height) = if lies { (video.height, video.width) } else { (video.width, video.height) };
    let probe = Probe {
        width: Some(width),
        height: Some(height),
        frames: Some(file.num_blocks),
        channels,
        sample_rate,
        ..Probe::new(MediaKind::Video, format)
    }
    .lasting(named_s.or(Some(seconds(span_ns.saturating_add(frame_ns)))));
    // The duration covers sound that may be longer than the pictures: the track's own frame time is truer.
    // It is rounded to a nanosecond, so that 30 frames a second would read 30.0000003.
    // A damaged file may claim frames of centuries, whose rate is rounded to nothing.
    let fps = Some((1e15 / frame_ns as f64).round() / 1e6).filter(|fps| fps.is_finite() && *fps > 0.0);
    Ok(Probe { fps: fps.or(probe.fps), ..probe })
}

struct Element {
    id: u32,
    body: u64,
    /// `None` where it is unknown: to the end of the parent.
    size: Option<u64>,
}

fn element(source: &mut Source<'_>, at: u64) -> Result<Element, Fault> {
    let first = source.u8(at)?;
    let id_bytes = first.leading_zeros() + 1;
    if id_bytes > 4 {
        return Fault::unsound(format!("byte {at} is {first:#04x}, no element begins so"));
    }
    let id = (0..u64::from(id_bytes))
        .try_fold(0, |id, i| Ok::<_, Fault>(id << 8 | u32::from(source.u8(at + i)?)))?;
    let size_at = at + u64::from(id_bytes);
    let (size, size_bytes) = number(source, size_at)?;
    let unknown = (1 << (7 * size_bytes)) - 1;
    Ok(Element { id, body: size_at + size_bytes, size: (size != unknown).then_some(size) })
}

/// A number of variable length without its length marker, and its bytes.
fn number(source: &mut Source<'_>, at: u64) -> Result<(u64, u64), Fault> {
    let first = source.u8(at)?;
    let num_bytes = u64::from(first.leading_zeros()) + 1;
    if num_bytes > 8 {
        return Fault::unsound(format!("byte {at} is 0, no length begins so"));
    }
    let marked = (1..num_bytes)
        .try_fold(u64::from(first), |value, i| Ok::<_, Fault>(value << 8 | u64::from(source.u8(at + i)?)))?;
    Ok((marked & !(1 << (7 * num_bytes)), num_bytes))
}

/// The EBML header, the segment, and of it information, tracks and clusters with their parts.
fn is_master(id: u32) -> bool {
    matches!(
        id,
        0x1853_8067
            | 0x1549_a966
            | 0x1654_ae6b
            | 0xae
            | 0xe0
            | 0x7670
            | 0xe1
            | 0x1f43_b675
            | 0xa0
            | 0x1a45_dfa3
    )
}

fn enter(file: &mut File, id: u32) {
    match id {
        0xae => file.tracks.push(Track { sample_rate: 8000.0, channels: 1, ..Track::default() }),
        0x1f43_b675 if file.counted.is_none() => {
            let track =
                file.tracks.iter().find(|t| t.kind == 1).or_else(|| file.tracks.iter().find(|t| t.kind == 2));
            file.counted = Some(track.map_or(0, |track| track.number));
        }
        _ => {}
    }
}

fn leaf(source: &mut Source<'_>, file: &mut File, element: &Element) -> Result<(), Fault> {
    let size = element.size.unwrap_or(0);
    // Blocks first: they are nearly all there is.
    if matches!(element.id, 0xa3 | 0xa1) {
        return block(source, file, element);
    }
    let mut unsigned = || uint(source, element.body, size);
    match element.id {
        0xe7 => file.cluster_ticks = unsigned()?,
        0x2a_d7b1 => file.scale_ns = Some(unsigned()?),
        0x4489 => {
            let ticks = float(source, element.body, size)?;
            file.duration = Some(ticks).filter(|ticks| ticks.is_finite() && *ticks > 0.0);
        }
        0x4282 => file.is_webm = size >= 4 && &source.bytes::<4>(element.body)? == b"webm",
        id => {
            let Some(track) = file.tracks.last_mut() else { return Ok(()) };
            match id {
                0x86 => track.is_opus = size >= 6 && &source.bytes::<6>(element.body)? == b"A_OPUS",
                0xd7 => track.number = unsigned()?,
                0x83 => track.kind = unsigned()?,
                0x23_e383 => track.frame_ns = unsigned()?,
                0xb0 => track.width = u32::try_from(unsigned()?).unwrap_or(0),
                0xba => track.height = u32::try_from(unsigned()?).unwrap_or(0),
                0x9f => track.channels = u32::try_from(unsigned()?).unwrap_or(0),
                // The rate after a decoder that doubles it replaces the coded one.
                0xb5 | 0x78b5 => track.sample_rate = float(source, element.body, size)?,
                0x7675 => track.roll = float(source, element.body, size)?,
                _ => {}
            }
        }
    }
    Ok(())
}

/// Counts a block of the track in question.
fn block(source: &mut Source<'_>, file: &mut File, element: &Element) -> Result<(), Fault> {
    let (track, track_bytes) = match number(source, element.body) {
        Ok(found) => found,
        Err(Fault::Unsound(_)) => return Ok(()),
        Err(fault) => return Err(fault),
    };
    if Some(track) != file.counted || element.body + track_bytes + 3 > source.len() {
        return Ok(());
    }
    let relative = source.u16_be(element.body + track_bytes)?.cast_signed();
    let ticks = i64::try_from(file.cluster_ticks).unwrap_or(i64::MAX).saturating_add(i64::from(relative));
    if file.num_blocks == 0 {
        (file.first_ticks, file.last_ticks) = (ticks, ticks);
    }
    file.num_blocks += 1;
    file.first_ticks = file.first_ticks.min(ticks);
    file.last_ticks = file.last_ticks.max(ticks);
    Ok(())
}

fn uint(source: &mut Source<'_>, at: u64, size: u64) -> Result<u64, Fault> {
    if size > 8 {
        return Fault::unsound(format!("a number of {size} bytes at byte {at}, at most 8"));
    }
    let bytes = source.slice(at, size as usize)?;
    Ok(bytes.iter().fold(0, |value, &byte| value << 8 | u64::from(byte)))
}

fn float(source: &mut Source<'_>, at: u64, size: u64) -> Result<f64, Fault> {
    match size {
        0 => Ok(0.0),
        4 => source.bytes(at).map(f32::from_be_bytes).map(f64::from),
        8 => source.bytes(at).map(f64::from_be_bytes),
        _ => Fault::unsound(format!("a float of {size} bytes at byte {at}, must be 4 or 8")),
    }
}
