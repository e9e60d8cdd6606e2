//! MP4, MOV and M4A (ISO base media files): boxes down to the sample tables, and fragments where there are any.

use super::boxes::{Box4, Boxes};
use super::edit::{self, Tables};
use super::source::{Fault, Source};
use super::{MediaKind, Probe};

/// Whether a file may begin with a box of this name. Old MOV files need no `ftyp`.
pub(super) fn may_begin(kind: [u8; 4]) -> bool {
    matches!(&kind, b"ftyp" | b"styp" | b"moov" | b"mdat" | b"wide" | b"free" | b"skip" | b"pnot")
}

#[derive(Debug, Default)]
struct Track {
    id: u32,
    handler: [u8; 4],
    timescale: u32,
    /// From the media header, in units of the timescale; 0 where it does not know.
    media_ticks: u64,
    /// Over the sample tables and fragments.
    num_samples: u64,
    sample_ticks: u64,
    /// What the edit list shows of them, in units of the movie; 0 where there is no list.
    edited_ticks: u64,
    tables: Tables,
    /// Samples of the tables that the edit list does not show.
    num_hidden: u64,
    is_aac: bool,
    /// What a decoder gives of AAC in whole packets, where that is known.
    packets_ticks: Option<u64>,
    /// Of a sample in a fragment that says nothing.
    fragment_ticks: u32,
    width: u32,
    height: u32,
    /// Linear part of the transformation for display.
    matrix: [i64; 4],
    channels: u32,
    sample_rate: u32,
}

impl Track {
    /// All samples one after the other.
    fn media_s(&self) -> Option<f64> {
        let ticks = if self.sample_ticks > 0 { self.sample_ticks } else { self.media_ticks };
        (self.timescale > 0 && ticks > 0).then(|| ticks as f64 / f64::from(self.timescale))
    }

    /// What is shown of them: an edit list may cut, as off the silence that an encoder needs to begin.
    fn shown_s(&self, movie_timescale: u32) -> Option<f64> {
        let media_s = self.media_s()?;
        if let Some(ticks) = self.packets_ticks {
            return Some(ticks as f64 / f64::from(self.timescale));
        }
        let edited_s = self.edited_ticks as f64 / f64::from(movie_timescale.max(1));
        Some(if edited_s > 0.0 { media_s.min(edited_s) } else { media_s })
    }
}

/// What the movie header and all tracks say.
#[derive(Debug)]
struct Movie {
    timescale: u32,
    /// Linear part of the transformation for display.
    matrix: [i64; 4],
    tracks: Vec<Track>,
}

pub(super) fn movie(source: &mut Source<'_>) -> Result<Probe, Fault> {
    let mut brand = *b"    ";
    let mut movie = Movie { timescale: 0, matrix: [1 << 16, 0, 0, 1 << 16], tracks: Vec::new() };
    let mut has_moov = false;
    let mut boxes = Boxes::new(0, source.len());
    while let Some(found) = boxes.next(source)? {
        match &found.kind {
            b"ftyp" if !has_moov && found.body + 4 <= found.end => brand = source.bytes(found.body)?,
            b"moov" if !has_moov => {
                has_moov = true;
                read_moov(source, found, &mut movie)?;
            }
            b"moof" => read_moof(source, found, &mut movie.tracks)?,
            _ => {}
        }
    }
    if !has_moov {
        return Fault::unsound(format!("it has {} bytes and no `moov` box", source.len()));
    }
    answer(brand, &movie)
}

fn answer(brand: [u8; 4], movie: &Movie) -> Result<Probe, Fault> {
    let tracks = &movie.tracks;
    let first = |handler: &[u8; 4]| {
        let mut of_kind = tracks.iter().filter(|track| &track.handler == handler);
        // A track without samples is taken for a placeholder, unless the file has no other track.
        of_kind.clone().find(|track| track.num_samples > 0).or_else(|| of_kind.next())
    };
    let (video, audio) = (first(b"vide"), first(b"soun"));
    let format = match &brand {
        b"qt  " | b"    " => "mov",
        b"M4A " | b"M4B " => "m4a",
        _ => "mp4",
    };
    let audio_fields = audio.map(|track| (track.channels, track.sample_rate));
    let Some(video) = video else {
        let Some((audio, (channels, sample_rate))) = audio.zip(audio_fields) else {
            return Fault::unsound(format!("none of its {} tracks is video or audio", tracks.len()));
        };
        let format = if format == "mp4" { "m4a" } else { format };
        return Ok(Probe::sound(format, channels, sample_rate, None).lasting(audio.shown_s(movie.timescale)));
    };
    // Both matrices in turn. The picture is turned by a quarter where x maps to y rather than to x.
    let onto = |column: usize| {
        let through = |row: usize| i128::from(video.matrix[row]) * i128::from(movie.matrix[2 * row + column]);
        (through(0) + through(1)).abs()
    };
    let lies = onto(1) > onto(0);
    let (width, height) = if lies { (video.height, video.width) } else { (video.width, video.height) };
    let probe = Probe {
        width: Some(width),
        height: Some(height),
        frames: Some(video.num_samples),
        channels: audio_fields.map(|(channels, _)| channels).filter(|&channels| channels > 0),
        sample_rate: audio_fields.map(|(_, rate)| rate).filter(|&rate| rate > 0),
        ..Probe::new(MediaKind::Video, format)
    }
    .lasting(video.media_s());
    // The frame rate is that of all frames in the file. A decoder gives only those that the edit list shows.
    let frames = video.num_samples.saturating_sub(video.num_hidden);
    Ok(Probe { frames: Some(frames), duration_s: video.shown_s(movie.timescale), ..probe })
}

fn read_moov(source: &mut Source<'_>, moov: Box4, movie: &mut Movie) -> Result<(), Fault> {
    let mut boxes = Boxes::within(moov);
    let mut mvex = None;
    while let Some(found) = boxes.next(source)? {
        match &found.kind {
            b"mvhd" => {
                let is_long = source.u8(found.body)? == 1;
                movie.timescale = source.u32_be(found.body + if is_long { 20 } else { 12 })?;
                movie.matrix = matrix(source, found.body + if is_long { 48 } else { 36 })?;
            }
            b"trak" => {
                let mut track = Track::default();
                read_trak(source, found, &mut track)?;
                movie.tracks.push(track);
            }
            b"mvex" => mvex = Some(found),
            _ => {}
        }
    }
    for track in movie.tracks.iter_mut().filter(|track| &track.handler == b"vide") {
        let ticks = track.sample_ticks;
        let shown =
            track.tables.num_shown(source, movie.timescale, track.timescale, ticks, mvex.is_some())?;
        track.num_hidden = shown.map_or(0, |shown| track.num_samples.saturating_sub(shown));
    }
    // Of fragments the tables know nothing.
    for track in movie.tracks.iter_mut().filter(|track| track.is_aac && mvex.is_none()) {
        track.packets_ticks = track.tables.whole_packets(source, movie.timescale, track.timescale)?;
    }
    // It may stand before the tracks whose defaults it holds.
    let Some(mvex) = mvex else { return Ok(()) };
    let mut boxes = Boxes::within(mvex);
    while let Some(found) = boxes.next(source)? {
        if &found.kind == b"trex" {
            let id = source.u32_be(found.body + 4)?;
            let ticks = source.u32_be(found.body + 12)?;
            let ours = movie.tracks.iter_mut().filter(|track| track.id == id);
            ours.for_each(|track| track.fragment_ticks = ticks);
        }
    }
    Ok(())
}

fn matrix(source: &mut Source<'_>, at: u64) -> Result<[i64; 4], Fault> {
    let mut linear = [0; 4];
    for (value, offset) in linear.iter_mut().zip([0, 4, 12, 16]) {
        *value = i64::from(source.u32_be(at + offset)?.cast_signed());
    }
    Ok(linear)
}

/// A track header, and the boxes that lead to the sample tables. Their names are unique in a track, so that one
/// list of boxes within boxes is walked instead of a tree.
fn read_trak(source: &mut Source<'_>, header: Box4, track: &mut Track) -> Result<(), Fault> {
    let mut open = vec![Boxes::within(header)];
    while let Some(boxes) = open.last_mut() {
        let Some(found) = boxes.next(source)? else {
            open.pop();
            continue;
        };
        let body = found.body;
        match &found.kind {
            b"edts" | b"mdia" | b"minf" | b"stbl" if open.len() < 4 => open.push(Boxes::within(found)),
            b"tkhd" => {
                let is_long = source.u8(body)? == 1;
                track.id = source.u32_be(body + if is_long { 20 } else { 12 })?;
                let at = body + if is_long { 52 } else { 40 };
                track.matrix = matrix(source, at)?;
                if track.width == 0 {
                    track.width = source.u32_be(at + 36)? >> 16;
                    track.height = source.u32_be(at + 40)? >> 16;
                }
            }
            b"mdhd" => {
                let is_long = source.u8(body)? == 1;
                track.timescale = source.u32_be(body + if is_long { 20 } else { 12 })?;
                let unknown = if is_long { u64::MAX } else { u64::from(u32::MAX) };
                let ticks =
                    if is_long { source.u64_be(body + 24)? } else { u64::from(source.u32_be(body + 16)?) };
                track.media_ticks = if ticks == unknown { 0 } else { ticks };
            }
            b"elst" => {
                let shown = edit::entries(source, found)?.into_iter().filter(|(_, start)| start.is_some());
                track.edited_ticks = shown.fold(0, |sum: u64, (ticks, _)| sum.saturating_add(ticks));
                track.tables.edits = Some(found);
            }
            b"ctts" => track.tables.offsets = Some(found),
            // MOV has a second one, in `minf`, for the way data are stored.
            b"hdlr" if track.handler == [0; 4] => track.handler = source.bytes(body + 8)?,
            b"stsd" => read_stsd(source, found, track)?,
            b"stts" => {
                let num_entries = u64::from(source.u32_be(body + 4)?);
                if num_entries * 8 > found.end.saturating_sub(body + 8) {
                    return Fault::unsound(format!("box `stts` is too small for its {num_entries} entries"));
                }
                for entry in 0..num_entries {
                    let [c3, c2, c1, c0, ticks @ ..] = source.bytes::<8>(body + 8 + entry * 8)?;
                    let count = u64::from(u32::from_be_bytes([c3, c2, c1, c0]));
                    track.num_samples = track.num_samples.saturating_add(count);
                    let ticks = count.saturating_mul(u64::from(u32::from_be_bytes(ticks)));
                    track.sample_ticks = track.sample_ticks.saturating_add(ticks);
                }
                track.tables.durations = Some(found);
            }
            _ => {}
        }
    }
    Ok(())
}

/// The first sample description: size of the pictures, or channels and rate of the sound.
fn read_stsd(source: &mut Source<'_>, stsd: Box4, track: &mut Track) -> Result<(), Fault> {
    if source.u32_be(stsd.body + 4)? == 0 {
        return Ok(());
    }
    let Some(entry) = Boxes::new(stsd.body + 8, stsd.end).next(source)? else { return Ok(()) };
    let body = entry.body;
    match &track.handler {
        b"vide" => {
            let (width, height) = (source.u16_be(body + 24)?, source.u16_be(body + 26)?);
            // The pictures as coded are what a decoder gives; a track header may scale them.
            if width > 0 && height > 0 {
                (track.width, track.height) = (u32::from(width), u32::from(height));
            }
        }
        b"soun" => {
            let version = source.u16_be(body + 8)?;
            track.channels = u32::from(source.u16_be(body + 16)?);
            track.sample_rate = source.u32_be(body + 24)? >> 16;
            let mut children_at = body + 28;
            if version == 1 {
                children_at += 16;
            } else if version == 2 {
                track.sample_rate = f64::from_bits(source.u64_be(body + 32)?) as u32;
                track.channels = source.u32_be(body + 40)?;
                children_at += 36;
            }
            let mut children = Boxes::new(children_at, entry.end);
            while let Some(child) = children.next(source)? {
                if &child.kind == b"esds" {
                    read_esds(source, child, track)?;
                    break;
                }
            }
        }
        _ => {}
    }
    Ok(())
}

/// AAC's own configuration, which is right where the sample description is not: many writers always say 2 channels.
fn read_esds(source: &mut Source<'_>, esds: Box4, track: &mut Track) -> Result<(), Fault> {
    let mut at = esds.body + 4;
    while at + 2 <= esds.end {
        let tag = source.u8(at)?;
        at += 1;
        // A length is at most four bytes of seven bits.
        for _ in 0..4 {
            at += 1;
            if source.u8(at - 1)? & 0x80 == 0 {
                break;
            }
        }
        match tag {
            // The stream: identity and flags, which say what else is there.
            3 => {
                let flags = source.u8(at + 2)?;
                at += 3 + if flags & 0x80 == 0 { 0 } else { 2 };
                if flags & 0x40 != 0 {
                    at += 1 + u64::from(source.u8(at)?);
                }
                at += if flags & 0x20 == 0 { 0 } else { 2 };
            }
            // The decoder; 0x40 and 0x66 to 0x68 are AAC.
            4 => {
                if !matches!(source.u8(at)?, 0x40 | 0x66..=0x68) {
                    return Ok(());
                }
                track.is_aac = true;
                at += 13;
            }
            5 => {
                let bits = source.u16_be(at)?;
                let (object, rate_index, channels) = (bits >> 11, bits >> 7 & 15, bits >> 3 & 15);
                if let Some(&rate) = super::audio::AAC_RATES.get(usize::from(rate_index))
                    && object != 31
                {
                    track.sample_rate = rate;
                    track.channels = match channels {
                        0 => track.channels,
                        7 => 8,
                        channels => u32::from(channels),
                    };
                }
                return Ok(());
            }
            _ => return Ok(()),
        }
    }
    Ok(())
}

/// The samples of a movie fragment, added to their tracks.
fn read_moof(source: &mut Source<'_>, moof: Box4, tracks: &mut [Track]) -> Result<(), Fault> {
    let mut fragments = Boxes::within(moof);
    while let Some(traf) = fragments.next(source)? {
        if &traf.kind != b"traf" {
            continue;
        }
        let mut track = None;
        let mut default_ticks = 0;
        let mut boxes = Boxes::within(traf);
        while let Some(found) = boxes.next(source)? {
            let body = found.body;
            match &found.kind {
                b"tfhd" => {
                    let flags = source.u32_be(body)?;
                    let id = source.u32_be(body + 4)?;
                    track = tracks.iter().position(|track| track.id == id);
                    default_ticks = track.map_or(0, |index| tracks[index].fragment_ticks);
                    if flags & 0x08 != 0 {
                        let at = body + 8 + u64::from(flags & 1) * 8 + u64::from(flags >> 1 & 1) * 4;
                        default_ticks = source.u32_be(at)?;
                    }
                }
                b"trun" => {
                    if let Some(index) = track {
                        let (samples, ticks) = read_trun(source, found, default_ticks)?;
                        let track = &mut tracks[index];
                        track.num_samples = track.num_samples.saturating_add(samples);
                        track.sample_ticks = track.sample_ticks.saturating_add(ticks);
                    }
                }
                _ => {}
            }
        }
    }
    Ok(())
}

/// (samples, ticks) of a track run.
fn read_trun(source: &mut Source<'_>, trun: Box4, default_ticks: u32) -> Result<(u64, u64), Fault> {
    let flags = source.u32_be(trun.body)?;
    let num_samples = u64::from(source.u32_be(trun.body + 4)?);
    if flags & 0x100 == 0 {
        return Ok((num_samples, num_samples * u64::from(default_ticks)));
    }
    let stride = 4 * u64::from((flags & 0xf00).count_ones());
    let first = trun.body + 8 + 4 * u64::from((flags & 0x5).count_ones());
    if num_samples * stride > trun.end.saturating_sub(first) {
        return Fault::unsound(format!("box `trun` is too small for its {num_samples} samples"));
    }
    let mut ticks = 0u64;
    for sample in 0..num_samples {
        ticks = ticks.saturating_add(u64::from(source.u32_be(first + sample * stride)?));
    }
    Ok((num_samples, ticks))
}
