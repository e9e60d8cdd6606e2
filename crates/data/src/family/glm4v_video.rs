//! Which frames GLM-4.1V and GLM-4.6V read of a video: as `Glm4vVideoProcessor` and `Glm46VVideoProcessor` of Hugging Face
//! transformers 5.23.0.
//!
//! ```text
//! Glm4v    up to max_duration seconds: n = floor(duration x fps), at least 1; frame k is ceil(k source fps / fps)
//!          longer: n = floor(max_duration x fps); frame k is ceil(k duration / (n - 1) x source fps), or all if n is enough
//! Glm46V   up to 30 s 6 frames a second, up to 300 s 2, else 1, of the first 2,400 s; at most 640
//!          the first frame at or after each such time; where there are fewer or more than n, n spread evenly
//! ```
//!
//! No frame comes twice, but the last of an odd number: pairs are full. Durations are the file's own; without one, frames
//! over their rate, as transformers' readers have it. If `do_sample_frames` is false, all frames are read.
//!
//! What the user asks for ([`VideoSampling`]) turns sampling on. The user's `fps` takes the place of `fps`, or of
//! GLM-4.6V's rates, and the user's `max_frames`, rounded down to whole pairs, that of GLM-4.6V's 640. Of GLM-4.1V, which has
//! no such limit, `max_frames` are spread over the clip as over one that is too long.

use super::fields::Fields;
use super::video_settings::{FRAMES_MAX, all_frames};
use super::{Clip, VideoSampling};
use crate::DataError;
use std::cmp::Ordering;

/// GLM-4.1V's own, in frames a second and in seconds.
const FPS: f64 = 2.0;
const MAX_DURATION_S: u64 = 300;
/// GLM-4.6V's: (clips of up to so many seconds, frames a second), and what longer ones have.
const RATES: [(f64, f64); 2] = [(30.0, 6.0), (300.0, 2.0)];
const SLOWEST: f64 = 1.0;
/// GLM-4.6V's: seconds that count, and frames, at most.
const COUNTED_S: f64 = 2_400.0;
const MOST: u64 = 640;

/// The generations of processors, which read videos in ways of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Generation {
    /// `Glm4v`.
    First,
    /// `Glm46V`.
    Second,
}

impl Generation {
    /// By the class that `field` names; `absent` where it names none.
    ///
    /// # Errors
    /// [`DataError::Config`] for another class.
    pub(super) fn named(
        fields: &Fields<'_>,
        field: &str,
        kind: &str,
        absent: Self,
    ) -> Result<Self, DataError> {
        let names = ["Glm4v", "Glm46V"].map(|stem| format!("{stem}{kind}"));
        fields.must_be(field, &[&names[0], &names[1]], true)?;
        Ok(match fields.get(field) {
            None => absent,
            Some(name) if *name == names[1] => Self::Second,
            Some(_) => Self::First,
        })
    }

    /// A time as the processor writes it.
    pub(super) fn stamp(self, seconds: f64) -> String {
        match self {
            Self::First => format!("{}", seconds as u64),
            Self::Second => format!("{seconds:.1} seconds"),
        }
    }
}

/// The settings of a video processor.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct FrameRule {
    generation: Generation,
    /// Whether frames are chosen; otherwise all are read.
    samples_frames: bool,
    /// GLM-4.1V's rate, and the seconds above which it is lower.
    fps: f64,
    max_duration_s: u64,
}

impl FrameRule {
    /// The rule for the video processor's fields.
    ///
    /// # Errors
    /// [`DataError::Config`] for a field of another kind than transformers takes.
    pub(super) fn read(fields: &Fields<'_>, generation: Generation) -> Result<Self, DataError> {
        let fps = match fields.get("fps") {
            None => FPS,
            Some(value) => value
                .as_f64()
                .filter(|fps| *fps > 0.0 && fps.is_finite())
                .ok_or_else(|| fields.error("fps", "must be a number above 0".to_owned()))?,
        };
        Ok(Self {
            generation,
            samples_frames: fields.flag("do_sample_frames")?.unwrap_or(true),
            fps,
            max_duration_s: fields.whole("max_duration", 1 << 32)?.unwrap_or(MAX_DURATION_S),
        })
    }

    /// Positions of the frames that are read of a clip, ascending; where frames are chosen, whole pairs.
    ///
    /// # Errors
    /// The rule that the clip breaks.
    pub(super) fn choose(
        &self,
        clip: &Clip,
        source_fps: f64,
        asked: VideoSampling,
    ) -> Result<Vec<u32>, String> {
        if !self.samples_frames && asked == VideoSampling::default() {
            return all_frames(clip);
        }
        let told = clip.duration_s.filter(|seconds| *seconds > 0.0 && seconds.is_finite());
        let duration = told.unwrap_or(clip.num_frames as f64 / source_fps);
        let most = asked.max_frames.map(|max| u64::from(max) / 2 * 2);
        let mut frames = match self.generation {
            Generation::First => self.by_rate(clip.num_frames, source_fps, duration, asked.fps, most)?,
            Generation::Second => by_length(clip.num_frames, source_fps, duration, asked.fps, most),
        };
        frames.dedup();
        let Some(&last) = frames.last() else {
            return Err("not one group of 2 frames would be read of it".to_owned());
        };
        if frames.len() % 2 == 1 {
            frames.push(last);
        }
        Ok(frames)
    }

    /// GLM-4.1V's frames; some may come twice.
    fn by_rate(
        &self,
        total: u64,
        source_fps: f64,
        duration: f64,
        asked_fps: Option<f64>,
        most: Option<u64>,
    ) -> Result<Vec<u32>, String> {
        let fps = asked_fps.unwrap_or(self.fps);
        let is_short = duration <= self.max_duration_s as f64;
        // A product that does not fit 64 bits becomes the largest number that does, and is then refused.
        let wanted = if is_short {
            ((duration * fps) as u64).max(1)
        } else {
            (self.max_duration_s as f64 * fps) as u64
        };
        let n = wanted.min(most.unwrap_or(u64::MAX));
        if n > FRAMES_MAX {
            return Err(format!("{n} frames of it would be read, must be at most {FRAMES_MAX}"));
        }
        let frame = |place: f64| (place.ceil() as u64).min(total - 1) as u32;
        if is_short && n == wanted {
            return Ok((0..n).map(|k| frame(k as f64 * source_fps / fps)).collect());
        }
        if n >= total {
            return Ok((0..total as u32).collect());
        }
        let step = duration / n.saturating_sub(1) as f64;
        let second = |k: u64| match k {
            0 => 0.0,
            _ if k == n - 1 => duration,
            _ => k as f64 * step,
        };
        Ok((0..n).map(|k| frame(second(k) * source_fps)).collect())
    }
}

/// GLM-4.6V's frames; some may come twice.
fn by_length(
    total: u64,
    source_fps: f64,
    duration: f64,
    asked_fps: Option<f64>,
    most: Option<u64>,
) -> Vec<u32> {
    let counted = duration.min(COUNTED_S);
    let own = || RATES.iter().find(|(seconds, _)| counted <= *seconds).map_or(SLOWEST, |(_, rate)| *rate);
    let rate = asked_fps.unwrap_or_else(own);
    let n = ((counted * rate) as u64).min(most.unwrap_or(MOST)).min(FRAMES_MAX);
    if total < n {
        return spread(0, total - 1, n);
    }
    let found = at_times(total, 1.0 / source_fps, 1.0 / rate, duration.trunc(), n);
    match (found.first(), found.last()) {
        (Some(&first), Some(&last)) if (found.len() as u64) < n => spread(first, last, n),
        _ if found.len() as u64 > n => spread(0, total - 1, n),
        _ => found.into_iter().map(|frame| frame as u32).collect(),
    }
}

/// The first frame at or after each time, of a clip whose frames are `each` seconds long, until `end`; more than `enough` are
/// not looked for.
fn at_times(total: u64, each: f64, interval: f64, end: f64, enough: u64) -> Vec<u64> {
    let (mut found, mut time) = (Vec::new(), 0.0);
    loop {
        // Rounding may leave the quotient a frame too far.
        let near = ((time / each) as u64).saturating_sub(2);
        let mut frame = found.last().map_or(0, |last| last + 1).max(near);
        while frame < total && (frame as f64 * each).partial_cmp(&time).is_none_or(Ordering::is_lt) {
            frame += 1;
        }
        if frame >= total {
            return found;
        }
        found.push(frame);
        // Summed up, as transformers does: the sums' rounding decides which frame it is.
        time += interval;
        if time >= end || found.len() as u64 > enough {
            return found;
        }
    }
}

/// As numpy's `linspace` with whole numbers.
fn spread(start: u64, end: u64, n: u64) -> Vec<u32> {
    let step = (end - start) as f64 / n.saturating_sub(1) as f64;
    let position = |k: u64| match k {
        0 => start as u32,
        _ if k == n - 1 => end as u32,
        _ => (k as f64 * step + start as f64) as u32,
    };
    (0..n).map(position).collect()
}

#[cfg(test)]
mod tests {
    use super::super::Size;
    use super::*;

    fn frames(generation: Generation, num_frames: u64, fps: f64, asked: VideoSampling) -> Vec<u32> {
        let rule = FrameRule { generation, samples_frames: true, fps: FPS, max_duration_s: MAX_DURATION_S };
        let clip = Clip { size: Size { height: 1, width: 1 }, num_frames, fps: Some(fps), duration_s: None };
        rule.choose(&clip, fps, asked).unwrap()
    }

    /// Half a second has one frame, twice; 301 s of one frame a second have 301 frames, fewer than 600, and all are read.
    #[test]
    fn pairs_are_full() {
        let of = |n, fps| frames(Generation::First, n, fps, VideoSampling::default());
        assert_eq!(of(5, 10.0), [0, 0]);
        let all = of(301, 1.0);
        assert_eq!((all.len(), all[0], all[300], all[301]), (302, 0, 300, 300));
    }

    /// 400 s of ten frames a second: 600 frames spread over all of it, the last one at its end.
    #[test]
    fn a_long_clip_is_spread() {
        let found = frames(Generation::First, 4_000, 10.0, VideoSampling::default());
        assert_eq!((found.len(), found[0], found[1], found[599]), (600, 0, 7, 3_999));
    }

    /// 10 s have 60 frames, 100 s have 200, 1,000 s have 640.
    #[test]
    fn long_clips_have_fewer_frames_a_second() {
        let of =
            |seconds: u64| frames(Generation::Second, seconds * 30, 30.0, VideoSampling::default()).len();
        assert_eq!((of(10), of(100), of(1_000)), (60, 200, 640));
    }

    #[test]
    fn what_the_user_asks_for_is_read_in_whole_pairs() {
        let asked = VideoSampling { max_frames: Some(5), fps: None };
        assert_eq!(frames(Generation::First, 300, 30.0, asked), [0, 100, 200, 299]);
        assert_eq!(frames(Generation::Second, 300, 30.0, asked), [0, 99, 199, 299]);
        let asked = VideoSampling { max_frames: None, fps: Some(1.0) };
        assert_eq!(frames(Generation::First, 120, 30.0, asked), [0, 30, 60, 90]);
        assert_eq!(frames(Generation::Second, 120, 30.0, asked), [0, 30, 60, 90]);
    }
}
