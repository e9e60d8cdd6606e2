//! Videos of the Qwen-VL families: what a processor's fields say of them, and the clips that are refused.

use super::fields::Fields;
use super::patches::PixelRange;
use super::{Clip, VideoSampling};
use crate::DataError;

/// [`super::FRAMES_MAX`] for counts of files.
pub(super) const FRAMES_MAX: u64 = super::FRAMES_MAX as u64;
/// What `cap_pixels_per_frame` leaves a frame at least, in shares of the least pixels.
const CAP_FLOOR: f64 = 1.05;

/// What the processors say of videos.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct VideoSettings {
    pub(super) pixels: PixelRange,
    /// Whether frames are chosen; otherwise all are read.
    pub(super) samples_frames: bool,
    pub(super) fps: Option<f64>,
    pub(super) num_frames: Option<u64>,
    pub(super) min_frames: u64,
    pub(super) max_frames: u64,
    /// Tokens that `cap_pixels_per_frame` allows, where it is set.
    pub(super) token_cap: Option<u64>,
}

impl VideoSettings {
    /// The settings in the processor's fields; `default` for those it leaves out, its `token_cap` being
    /// `max_video_tokens`.
    pub(super) fn read(processor: &Fields, default: Self, old_names: bool) -> Result<Self, DataError> {
        let fps = processor.get("fps").map(|value| {
            let fps = value.as_f64().filter(|fps| *fps > 0.0 && fps.is_finite());
            fps.ok_or_else(|| processor.error("fps", "must be a number above 0".to_owned()))
        });
        let caps = processor.flag("cap_pixels_per_frame")?.unwrap_or(false);
        let cap = processor.whole("max_video_tokens", 1 << 20)?.or(default.token_cap);
        let settings = Self {
            pixels: PixelRange::read(processor, default.pixels, old_names)?,
            samples_frames: processor.flag("do_sample_frames")?.unwrap_or(default.samples_frames),
            // A null in the file means that no rate is asked for. The class's rate does not count then.
            fps: if processor.is_null("fps") { None } else { fps.transpose()?.or(default.fps) },
            num_frames: processor.whole("num_frames", FRAMES_MAX)?,
            min_frames: processor.whole("min_frames", FRAMES_MAX)?.unwrap_or(default.min_frames),
            max_frames: processor.whole("max_frames", FRAMES_MAX)?.unwrap_or(default.max_frames),
            token_cap: cap.filter(|_| caps),
        };
        if let (true, Some(fps), Some(_)) = (settings.samples_frames, settings.fps, settings.num_frames) {
            let rule = format!("`fps` is {fps}, the processor takes one of the two");
            return Err(processor.error("num_frames", rule));
        }
        Ok(settings)
    }

    /// The most pixels that `cap_pixels_per_frame` leaves a frame whose share is `pixels`.
    pub(super) fn capped(&self, pixels: u64) -> u64 {
        pixels.max((self.pixels.min as f64 * CAP_FLOOR) as u64)
    }
}

/// Frames a second of the clip: as the file tells, or frames over duration.
///
/// # Errors
/// Where it tells neither.
pub(super) fn frame_rate(clip: &Clip) -> Result<f64, String> {
    let mean = clip.duration_s.filter(|seconds| *seconds > 0.0).map(|s| clip.num_frames as f64 / s);
    let fps = clip.fps.filter(|fps| *fps > 0.0).or(mean).filter(|fps| fps.is_finite() && *fps > 0.0);
    fps.ok_or_else(|| {
        "the file does not tell its frames a second, which the choice of frames needs".to_owned()
    })
}

/// Every frame of a clip.
///
/// # Errors
/// The rule that a clip breaks that is too long to be read as a whole.
pub(super) fn all_frames(clip: &Clip) -> Result<Vec<u32>, String> {
    if clip.num_frames > FRAMES_MAX {
        return Err(format!(
            "all its frames would be read, must be at most {FRAMES_MAX}: ask for frames a second or at most so many"
        ));
    }
    Ok((0..clip.num_frames as u32).collect())
}

/// Refuses a clip without frames, one of more than fit in 32 bits, and a rate that cannot be asked.
pub(super) fn check_clip(clip: &Clip, asked: VideoSampling) -> Result<(), String> {
    match (clip.num_frames, asked.fps) {
        (0, _) => Err("at least 1 frame is needed".to_owned()),
        (n, _) if u32::try_from(n).is_err() => Err("its frames must be fewer than 2^32".to_owned()),
        (_, Some(fps)) if !(fps.is_finite() && fps > 0.0) => {
            Err(format!("{fps} frames a second are asked, must be above 0"))
        }
        _ => Ok(()),
    }
}
