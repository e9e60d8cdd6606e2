//! What of an MP4 track its edit list shows: a clip that was cut without encoding keeps more than it shows.

use super::boxes::Box4;
use super::source::{Fault, Source};

/// Comparisons of a run of samples with an edit, for one file; real lists have one edit, or some.
const COMPARISONS_MAX: u64 = 1 << 26;

/// Where the tables of a track stand that say when each sample is shown.
#[derive(Debug, Default)]
pub(super) struct Tables {
    pub(super) edits: Option<Box4>,
    pub(super) durations: Option<Box4>,
    pub(super) offsets: Option<Box4>,
}

impl Tables {
    /// Number of samples that are shown: those whose time lies within an edit, as `FFmpeg` decodes them. None where
    /// no edit has media, where one of a fragmented file has no end, and where one edit shows all samples; they last
    /// `sample_ticks`. Of a file without fragments an edit of no length shows nothing.
    pub(super) fn num_shown(
        &self,
        source: &mut Source<'_>,
        movie_timescale: u32,
        timescale: u32,
        sample_ticks: u64,
        is_fragmented: bool,
    ) -> Result<Option<u64>, Fault> {
        let (Some(list), Some(durations)) = (self.edits, self.durations) else { return Ok(None) };
        if movie_timescale == 0 {
            return Ok(None);
        }
        let (mut edits, mut is_without_length) = (Vec::new(), false);
        for (ticks, start) in entries(source, list)? {
            let Some(start) = start else {
                is_without_length |= ticks == 0 && !is_fragmented;
                continue;
            };
            let ticks = i128::from(rounded(ticks, timescale, movie_timescale));
            if ticks == 0 && is_fragmented {
                return Ok(None);
            } else if ticks == 0 {
                is_without_length = true;
                continue;
            }
            edits.push((i128::from(start), i128::from(start) + ticks));
        }
        if edits.is_empty() {
            return Ok(is_without_length.then_some(0));
        }
        let num_durations = u64::from(source.u32_be(durations.body + 4)?);
        let mut offsets = Offsets::new(source, self.offsets)?;
        if let [(start, end)] = edits[..] {
            let (first, _) = offsets.first(source)?;
            // The end of the edit is rounded to a tick of the movie. It may be off by so much, at most two
            // milliseconds: no frame is that short.
            let rounded = timescale.div_ceil(movie_timescale).min(timescale / 500);
            if start <= first && end + i128::from(rounded) >= first + i128::from(sample_ticks) {
                return Ok(None);
            }
        }
        let comparisons = (num_durations + offsets.num_left).saturating_mul(edits.len() as u64);
        if comparisons > COMPARISONS_MAX {
            return Fault::unsound(format!(
                "its edit list has {} entries for {num_durations} runs of samples, too many to compare",
                edits.len()
            ));
        }
        let (mut shown, mut decoded_at) = (0u64, 0i128);
        for entry in 0..num_durations {
            let (mut left, ticks) = pair(source, durations.body + 8 + entry * 8)?;
            let ticks = i128::from(ticks);
            while left > 0 {
                let (offset, num_equal) = offsets.next(source, left)?;
                let first = decoded_at + offset;
                for &(start, end) in &edits {
                    shown = shown.saturating_add(within(first, ticks, num_equal, start, end));
                }
                decoded_at += ticks * i128::from(num_equal);
                left -= num_equal;
            }
        }
        Ok(Some(shown))
    }

    /// Ticks of the media that a decoder gives of a track of AAC. It decodes whole packets, also the last one, within
    /// which the edit list or the packet's own duration may end; nothing where the edit list shows none. None where packets
    /// differ in length, or where several edits have a length; then the durations of the tables hold.
    pub(super) fn whole_packets(
        &self,
        source: &mut Source<'_>,
        movie_timescale: u32,
        timescale: u32,
    ) -> Result<Option<u64>, Fault> {
        let Some(durations) = self.durations else { return Ok(None) };
        let num_runs = u64::from(source.u32_be(durations.body + 4)?);
        let (mut num_packets, mut packet_ticks) = (0u64, 0u64);
        for run in 0..num_runs {
            let (count, ticks) = pair(source, durations.body + 8 + run * 8)?;
            let ticks = u64::from(ticks);
            if run == 0 {
                packet_ticks = ticks;
            } else if ticks > packet_ticks || (ticks < packet_ticks && (count, run + 1) != (1, num_runs)) {
                return Ok(None);
            }
            num_packets = num_packets.saturating_add(count);
        }
        let Some(all) = num_packets.checked_mul(packet_ticks).filter(|&ticks| ticks > 0) else {
            return Ok(None);
        };
        let list = match self.edits {
            Some(list) => entries(source, list)?,
            None => Vec::new(),
        };
        if list.is_empty() {
            return Ok(Some(all));
        }
        if movie_timescale == 0 {
            return Ok(None);
        }
        let shown = |(ticks, start): (u64, u64)| {
            let end = start.saturating_add(rounded(ticks, timescale, movie_timescale)).min(all);
            (end.div_ceil(packet_ticks) * packet_ticks).saturating_sub(start)
        };
        let edits: Vec<(u64, u64)> =
            list.into_iter().filter_map(|(ticks, start)| Some((ticks, start?.unsigned_abs()))).collect();
        // An edit of no length shows nothing, unless it is the first: then the rest of the packet in which it stands.
        let first = edits.first().filter(|(ticks, _)| *ticks == 0).map_or(0, |&edit| shown(edit));
        let mut with_length = edits.into_iter().filter(|(ticks, _)| *ticks > 0);
        Ok(match (with_length.next(), with_length.next()) {
            (None, _) => Some(first),
            (Some(edit), None) => Some(first.saturating_add(shown(edit))),
            _ => None,
        })
    }
}

/// Ticks of the movie in ticks of the media: the nearest, as `FFmpeg` rounds.
fn rounded(ticks: u64, timescale: u32, movie_timescale: u32) -> u64 {
    let (timescale, movie_timescale) = (u128::from(timescale), u128::from(movie_timescale));
    let nearest = (2 * u128::from(ticks) * timescale + movie_timescale) / (2 * movie_timescale);
    u64::try_from(nearest).unwrap_or(u64::MAX)
}

/// Of the times `first`, `first + step`, ... those from `start` to before `end`.
fn within(first: i128, step: i128, count: u64, start: i128, end: i128) -> u64 {
    if step == 0 {
        return if (start..end).contains(&first) { count } else { 0 };
    }
    // The number of times before `bound`.
    let before = |bound: i128| (bound - first + step - 1).div_euclid(step).clamp(0, i128::from(count));
    u64::try_from(before(end) - before(start)).unwrap_or(0)
}

/// Entries of an edit list: ticks of the movie, and where they start in the media; a pause has no start.
pub(super) fn entries(source: &mut Source<'_>, elst: Box4) -> Result<Vec<(u64, Option<i64>)>, Fault> {
    let is_long = source.u8(elst.body)? == 1;
    let num_entries = u64::from(source.u32_be(elst.body + 4)?);
    let entry_bytes = if is_long { 20 } else { 12 };
    if num_entries * entry_bytes > elst.end.min(source.len()).saturating_sub(elst.body + 8) {
        return Fault::unsound(format!("box `elst` is too small for its {num_entries} entries"));
    }
    let mut entries = Vec::new();
    for entry in 0..num_entries {
        let at = elst.body + 8 + entry * entry_bytes;
        let (ticks, start) = if is_long {
            (source.u64_be(at)?, source.u64_be(at + 8)?.cast_signed())
        } else {
            (u64::from(source.u32_be(at)?), i64::from(source.u32_be(at + 4)?.cast_signed()))
        };
        entries.push((ticks, (start >= 0).then_some(start)));
    }
    Ok(entries)
}

/// How much later than it is decoded each sample is shown, in runs; 0 behind the table's end.
struct Offsets {
    at: u64,
    num_left: u64,
    run: (i128, u64),
}

impl Offsets {
    fn new(source: &mut Source<'_>, table: Option<Box4>) -> Result<Self, Fault> {
        let Some(table) = table else { return Ok(Self { at: 0, num_left: 0, run: (0, 0) }) };
        let num_left = u64::from(source.u32_be(table.body + 4)?);
        if num_left * 8 > table.end.saturating_sub(table.body + 8) {
            return Fault::unsound(format!("box `ctts` is too small for its {num_left} entries"));
        }
        Ok(Self { at: table.body + 8, num_left, run: (0, 0) })
    }

    /// That of the first sample; nothing is taken.
    fn first(&self, source: &mut Source<'_>) -> Result<(i128, u64), Fault> {
        Self { at: self.at, num_left: self.num_left, run: self.run }.next(source, 1)
    }

    /// The offset of the next samples, and how many of them have it, at most `most`.
    fn next(&mut self, source: &mut Source<'_>, most: u64) -> Result<(i128, u64), Fault> {
        while self.run.1 == 0 && self.num_left > 0 {
            let (count, offset) = pair(source, self.at)?;
            self.run = (i128::from(offset.cast_signed()), count);
            self.at += 8;
            self.num_left -= 1;
        }
        if self.run.1 == 0 {
            return Ok((0, most));
        }
        let num_equal = most.min(self.run.1);
        self.run.1 -= num_equal;
        Ok((self.run.0, num_equal))
    }
}

/// A run of a table: a count, and what that many samples have.
fn pair(source: &mut Source<'_>, at: u64) -> Result<(u64, u32), Fault> {
    let [c3, c2, c1, c0, value @ ..] = source.bytes::<8>(at)?;
    Ok((u64::from(u32::from_be_bytes([c3, c2, c1, c0])), u32::from_be_bytes(value)))
}

#[cfg(test)]
mod tests {
    use super::within;

    /// Counted one by one.
    #[test]
    fn times_within_an_edit_are_counted() {
        for first in -6..6i128 {
            for step in 0..4i128 {
                for (start, end) in [(-3, 4), (0, 1), (2, 2), (-20, 20), (5, 30)] {
                    let expected = (0..7).filter(|k| (start..end).contains(&(first + k * step))).count();
                    assert_eq!(within(first, step, 7, start, end), expected as u64, "{first} {step}");
                }
            }
        }
    }
}
