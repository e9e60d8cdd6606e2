//! Which frames SmolVLM reads of a video, and what it writes of them: as `SmolVLMVideoProcessor` and `SmolVLMProcessor`
//! of Hugging Face transformers 5.23.0.
//!
//! ```text
//! n       = min(round(fps x duration), num_frames), at least 1
//! index_k = floor(start + k (end - start) / (n - 1)),  k = 0 .. n - 1
//! text    = You are provided the following series of <n in words> frames from a <h:mm:ss> [H:MM:SS] video.
//!           Frame from <mm:ss>: features                              once a frame
//! ```
//!
//! A second is left out at both ends of a clip that is longer than `num_frames x fps` seconds by two. Where neither
//! `video_sampling` nor the user asks for frames, all are read. Every frame is one tile.

use super::fields::Fields;
use super::video_settings::{FRAMES_MAX, all_frames, check_clip, frame_rate};
use super::{Clip, VideoSampling};
use crate::DataError;
use serde_json::Value;

/// Side of a frame where the video processor names none, in pixels.
const DEFAULT_FRAME: u32 = 364;
/// Seconds that are left out at both ends of a long clip.
const SKIPPED_S: f64 = 1.0;

/// The frames that are read of a clip, and what is written of them.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Chosen {
    /// Positions, ascending.
    pub(super) indices: Vec<u32>,
    /// What stands before the first frame.
    pub(super) intro: String,
    /// The time of each frame, as `01:07`.
    pub(super) stamps: Vec<String>,
}

/// The settings of a video processor.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct FrameRule {
    fps: Option<f64>,
    num_frames: Option<u64>,
    samples_frames: bool,
    /// Why videos cannot be read, though images can.
    refusal: Option<String>,
}

impl FrameRule {
    /// The rule for the video processor's fields, which stand in `file`, for an encoder that reads tiles of `tile` pixels.
    ///
    /// # Errors
    /// [`DataError::Config`] for a field of another kind than transformers takes. Frames of another size than the
    /// encoder's are an error of each video only: images may be sound all the same.
    pub(super) fn read(fields: &Fields<'_>, file: &str, tile: u32) -> Result<Self, DataError> {
        let (rate, count) = if fields.get("video_sampling").is_some() {
            ("video_sampling.fps", "video_sampling.max_frames")
        } else {
            ("fps", "num_frames")
        };
        let fps = match fields.get(rate).map(Value::as_f64) {
            None => None,
            Some(Some(fps)) if fps > 0.0 => Some(fps),
            Some(_) => return Err(fields.error(rate, "must be a number above 0".to_owned())),
        };
        let num_frames = fields.whole(count, FRAMES_MAX)?;
        let edge = fields.side("max_image_size.longest_edge")?.unwrap_or(DEFAULT_FRAME);
        let mut refusal = (edge != tile).then(|| {
            format!(
                "`max_image_size.longest_edge` of `{file}` is {edge}, the encoder reads frames of {tile} \
                 pixels"
            )
        });
        if !fields.flag("do_resize")?.unwrap_or(true) {
            refusal = Some(format!("`do_resize` of `{file}` is false, frames keep their size"));
        }
        let samples_frames = fields.flag("do_sample_frames")?.unwrap_or(false);
        // The processor's chat template turns sampling on wherever there is something to sample by.
        let samples_frames = samples_frames || fps.is_some() || num_frames.is_some();
        Ok(Self { fps, num_frames, samples_frames, refusal })
    }

    /// The frames that are read of a clip, and the text around them.
    ///
    /// What `sampling` asks takes the place of the files' own setting.
    ///
    /// # Errors
    /// The rule that the clip breaks.
    pub(super) fn choose(&self, clip: &Clip, sampling: VideoSampling) -> Result<Chosen, String> {
        if let Some(refusal) = &self.refusal {
            return Err(refusal.clone());
        }
        check_clip(clip, sampling)?;
        if clip.size.height == 0 || clip.size.width == 0 {
            return Err("both sides must be at least 1".to_owned());
        }
        let source_fps = frame_rate(clip)?;
        let duration = clip.duration_s.unwrap_or(clip.num_frames as f64 / source_fps);
        let indices = self.indices(clip, (source_fps, duration), sampling)?;
        let seconds: Vec<f64> = indices.iter().map(|index| f64::from(*index) / source_fps).collect();
        let stamps = seconds.iter().map(|s| format!("{:02}:{:02}", (s / 60.0) as u64, (s % 60.0) as u64));
        let intro = format!(
            "You are provided the following series of {} frames from a {} [H:MM:SS] video.\n",
            in_words(indices.len() as u64),
            hours(duration as u64)
        );
        Ok(Chosen { stamps: stamps.collect(), intro, indices })
    }

    fn indices(
        &self,
        clip: &Clip,
        (source_fps, duration): (f64, f64),
        asked: VideoSampling,
    ) -> Result<Vec<u32>, String> {
        if !self.samples_frames && asked == VideoSampling::default() {
            return all_frames(clip);
        }
        let total = clip.num_frames;
        let fps = asked.fps.or(self.fps);
        let most = asked.max_frames.map(u64::from).or(self.num_frames);
        if asked == VideoSampling::default() && (fps.is_none() || most.is_none()) {
            // The processor fails there.
            let rule = "its frames are chosen by a rate and a greatest number, and the settings have not both: set \
                        `video_sampling`, or ask for frames";
            return Err(rule.to_owned());
        }
        // A product that does not fit 64 bits becomes the largest number that does, and then the limit.
        let wanted = fps.map_or(u64::MAX, |fps| (fps * duration).round_ties_even() as u64);
        let n = wanted.min(most.unwrap_or(u64::MAX)).max(1);
        if n > FRAMES_MAX {
            return Err(format!("{n} frames of it would be read, must be at most {FRAMES_MAX}"));
        }
        let (mut start, mut end) = (0, total - 1);
        if let (Some(fps), Some(most)) = (fps, most)
            && duration - 2.0 * SKIPPED_S > most as f64 * fps
        {
            start = (SKIPPED_S * source_fps) as u64;
            end = ((total as f64 - SKIPPED_S * source_fps) as u64).min(total - 1);
        }
        if start >= end {
            (start, end) = (0, total - 1);
        }
        // As numpy's `linspace` with whole numbers.
        let step = (end - start) as f64 / (n.max(2) - 1) as f64;
        let position = |k: u64| match k {
            _ if k > 0 && k == n - 1 => end as u32,
            _ => (k as f64 * step + start as f64) as u32,
        };
        let mut indices: Vec<u32> = (0..n).map(position).collect();
        indices.dedup();
        Ok(indices)
    }
}

/// Seconds as Python writes a `timedelta`: `1:02:03`, `2 days, 0:00:01`.
fn hours(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    let clock = format!("{}:{:02}:{:02}", rest / 3_600, rest / 60 % 60, rest % 60);
    match days {
        0 => clock,
        1 => format!("1 day, {clock}"),
        _ => format!("{days} days, {clock}"),
    }
}

/// A number below a million in English words, as the package num2words has it: `one hundred and one`.
fn in_words(number: u64) -> String {
    const ONES: [&str; 20] = [
        "zero",
        "one",
        "two",
        "three",
        "four",
        "five",
        "six",
        "seven",
        "eight",
        "nine",
        "ten",
        "eleven",
        "twelve",
        "thirteen",
        "fourteen",
        "fifteen",
        "sixteen",
        "seventeen",
        "eighteen",
        "nineteen",
    ];
    const TENS: [&str; 10] =
        ["", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"];
    match number {
        0..20 => ONES[number as usize].to_owned(),
        20..100 if number.is_multiple_of(10) => TENS[(number / 10) as usize].to_owned(),
        20..100 => format!("{}-{}", TENS[(number / 10) as usize], ONES[(number % 10) as usize]),
        100..1_000 => joined(&format!("{} hundred", in_words(number / 100)), number % 100),
        _ => joined(&format!("{} thousand", in_words(number / 1_000)), number % 1_000),
    }
}

fn joined(before: &str, rest: u64) -> String {
    match rest {
        0 => before.to_owned(),
        1..100 => format!("{before} and {}", in_words(rest)),
        _ => format!("{before}, {}", in_words(rest)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::family::Size;
    use serde_json::json;

    fn clip(num_frames: u64, fps: f64) -> Clip {
        let duration_s = Some(num_frames as f64 / fps);
        Clip { size: Size { height: 9, width: 9 }, num_frames, fps: Some(fps), duration_s }
    }

    fn read(object: &Value) -> Result<FrameRule, DataError> {
        FrameRule::read(&Fields { file: "video.json", object }, "video.json", 364)
    }

    fn rule(sampling: &Value) -> FrameRule {
        read(&json!({"video_sampling": sampling})).unwrap()
    }

    /// 10 s at 30 frames a second, 1 frame a second: 10 of 300, both ends among them.
    #[test]
    fn frames_and_words_by_hand() {
        let chosen =
            rule(&json!({"fps": 1, "max_frames": 64})).choose(&clip(300, 30.0), VideoSampling::default());
        let chosen = chosen.unwrap();
        assert_eq!(chosen.indices, [0, 33, 66, 99, 132, 166, 199, 232, 265, 299]);
        assert_eq!(chosen.stamps[..3], ["00:00", "00:01", "00:02"]);
        assert_eq!(
            chosen.intro,
            "You are provided the following series of ten frames from a 0:00:10 [H:MM:SS] video.\n"
        );
    }

    /// 100 s are more than 64 x 1 + 2: a second of 25 frames is left out at both ends.
    #[test]
    fn the_ends_of_a_long_clip_are_left_out() {
        let chosen =
            rule(&json!({"fps": 1, "max_frames": 64})).choose(&clip(2500, 25.0), VideoSampling::default());
        let indices = chosen.unwrap().indices;
        assert_eq!((indices.len(), indices[0], indices[63]), (64, 25, 2475));
    }

    #[test]
    fn numbers_and_times_in_words() {
        let cases = [
            (1, "one"),
            (64, "sixty-four"),
            (100, "one hundred"),
            (101, "one hundred and one"),
            (999, "nine hundred and ninety-nine"),
            (1_000, "one thousand"),
            (1_001, "one thousand and one"),
            (1_100, "one thousand, one hundred"),
            (65_536, "sixty-five thousand, five hundred and thirty-six"),
        ];
        for (number, words) in cases {
            assert_eq!(in_words(number), words);
        }
        assert_eq!(hours(59), "0:00:59");
        assert_eq!(hours(86_400 + 3_661), "1 day, 1:01:01");
        assert_eq!(hours(172_800), "2 days, 0:00:00");
    }

    #[test]
    fn what_cannot_be_read_is_said() {
        let other = read(&json!({"max_image_size": {"longest_edge": 512}})).unwrap();
        let error = other.choose(&clip(3, 1.0), VideoSampling::default()).unwrap_err();
        assert!(error.contains("is 512, the encoder reads frames of 364 pixels"), "{error}");
        for half in [json!({"do_sample_frames": true}), json!({"fps": 1}), json!({"num_frames": 8})] {
            let half = read(&half).unwrap();
            let error = half.choose(&clip(3, 1.0), VideoSampling::default()).unwrap_err();
            assert!(error.contains("the settings have not both"), "{error}");
        }
        let asked = VideoSampling { max_frames: None, fps: Some(30.0) };
        let error = read(&json!({})).unwrap().choose(&clip(90_000, 30.0), asked).unwrap_err();
        assert!(error.contains("90000 frames of it would be read, must be at most 65536"), "{error}");
        assert!(read(&json!({"video_sampling": {"fps": 0}})).is_err());
        let untold = Clip { fps: None, duration_s: None, ..clip(3, 1.0) };
        assert!(rule(&json!({"fps": 1})).choose(&untold, VideoSampling::default()).is_err());
    }
}
