//! The shape rule of Qwen2-VL and Qwen2.5-VL: pictures at their own resolution in patches, frames of a video in pairs.
//!
//! Both families share one processor. Each image is one encoder segment, each frame pair of a video another (their
//! vision towers attend within `cu_seqlens = repeat_interleave(h * w, t)`). Most layers of Qwen2.5-VL attend within
//! windows inside such a segment: the segments here are those of its full-attention layers, windows are a matter of
//! cost. The arithmetic is that of Hugging Face transformers 5.23.0: `Qwen2VLImageProcessor`,
//! `Qwen2VLVideoProcessor`, `Qwen2VLProcessor`, `Qwen2_5_VLProcessor`. `fixtures/shapes` holds what those return.
//!
//! Frames of a video: all of them, unless the processor's `do_sample_frames` is set or the user asks for fewer.
//!
//! ```text
//! fps         n = clamp(total / source fps x fps, min_frames, min(max_frames, total)), rounded down to whole pairs
//! num_frames  n = num_frames rounded to whole pairs; refused above total
//! index_k = floor(k total / n),  k = 0 .. n - 1
//! ```
//!
//! What the user asks for ([`VideoSampling`]) turns sampling on. The user's `fps` replaces `fps` and `num_frames`, and the
//! user's `max_frames` replaces `max_frames`. With `max_frames` alone, and no rate in the settings, that many frames are
//! read of longer clips, and all frames of shorter ones. Two things differ from transformers. It computes indices in 32-bit
//! floats, which from 2^15 frames on may be 1 off. And for some lengths (17 frames of which 14 are read; 4 % of 60,000
//! random ones) it asks for a frame past the end, and then fails; here the n frames that exist are read.

use super::patches::{Depth, Patches, PixelRange, TOO_MANY_TOKENS, fit};
use super::qwen_vl::{Generation, Settings, VideoRule};
use super::video_settings::{FRAMES_MAX, VideoSettings, all_frames, check_clip, frame_rate};
use super::{Clip, FamilyFiles, MediaShape, VideoSampling};
use crate::DataError;

/// Configuration, image processor and video processor alike.
const PATCHES: Patches = Patches { side: 14, merge: 2, frames: 2 };
pub(super) const GENERATION: Generation = Generation {
    families: &["qwen2_vl", "qwen2_5_vl"],
    video_processor: "Qwen2VLVideoProcessor",
    patches: PATCHES,
    image_patches: PATCHES,
    video_patches: PATCHES,
    video: VideoSettings {
        pixels: PixelRange { min: 128 * 28 * 28, max: 28 * 28 * 768 },
        samples_frames: false,
        fps: None,
        num_frames: None,
        min_frames: 4,
        max_frames: 768,
        token_cap: Some(128_000),
    },
    video_has_old_names: true,
};
/// Share of `max_video_tokens` that `cap_pixels_per_frame` spends.
const CAP_SHARE: f64 = 0.9;

/// The shape rule of a Qwen2-VL or Qwen2.5-VL model.
#[derive(Debug, Clone, PartialEq)]
pub struct Qwen2Vl {
    settings: Settings,
}

impl Qwen2Vl {
    /// The rule for a model's files.
    ///
    /// Fields that are missing have the values transformers gives them; without `video_preprocessor_config.json` the
    /// image processor's settings hold for videos too, as transformers has it.
    ///
    /// # Errors
    /// [`DataError::Config`] at the first field for which processor and model would disagree, or that this rule does not
    /// cover.
    ///
    /// # Examples
    /// ```
    /// use dflop_data::family::{Family as _, FamilyFiles, Qwen2Vl, Size};
    /// let config = serde_json::json!({"model_type": "qwen2_5_vl"});
    /// let rule = Qwen2Vl::from_files(&FamilyFiles { config, ..FamilyFiles::default() })?;
    /// let shape = rule.image(Size { height: 480, width: 640 }, 1)?;
    /// // 476 x 644 pixels are 34 x 46 patches, four a feature.
    /// assert_eq!((shape.encoder_tokens(), shape.feature_tokens()), (34 * 46, 391));
    /// # Ok::<(), dflop_data::DataError>(())
    /// ```
    pub fn from_files(files: &FamilyFiles) -> Result<Self, DataError> {
        Settings::read(files, &GENERATION).map(|settings| Self { settings })
    }

    /// The rule with these settings.
    pub(super) const fn of(settings: Settings) -> Self {
        Self { settings }
    }

    /// Positions of the frames that are read of a clip.
    fn frames(&self, clip: &Clip, asked: VideoSampling) -> Result<Vec<u32>, String> {
        let (video, pair) = (&self.settings.video, u64::from(self.settings.patches.frames));
        let asked_max = asked.max_frames.map(u64::from);
        if !video.samples_frames && asked == VideoSampling::default() {
            return all_frames(clip);
        }
        let fixed = if asked.fps.is_some() { None } else { video.num_frames };
        let wanted = match (fixed, asked.fps.or(video.fps), asked_max) {
            (Some(num_frames), _, _) => {
                let rounded = (num_frames as f64 / pair as f64).round_ties_even() as u64 * pair;
                rounded.min(asked_max.map_or(u64::MAX, |max| max / pair * pair))
            }
            (None, Some(fps), _) => {
                let max = asked_max.unwrap_or(video.max_frames).min(clip.num_frames) / pair * pair;
                let wanted = clip.num_frames as f64 / frame_rate(clip)? * fps;
                // The bounds are whole numbers, and the rate is finite: the least of the three is too.
                (wanted.max(video.min_frames as f64).min(max as f64) / pair as f64).floor() as u64 * pair
            }
            (None, None, Some(max)) if clip.num_frames <= max => return all_frames(clip),
            (None, None, Some(max)) => max / pair * pair,
            (None, None, None) => {
                return Err("`do_sample_frames` is set, but neither `fps` nor `num_frames` is: the processor refuses \
                            every video"
                    .to_owned());
            }
        };
        match wanted {
            0 => Err(format!("not one group of {pair} frames would be read of it")),
            n if n > clip.num_frames => Err(format!("{n} frames would be read, more than there are")),
            n if n > FRAMES_MAX => Err(format!("{n} frames would be read, must be at most {FRAMES_MAX}")),
            // Both factors are below 2^32.
            n => Ok((0..n).map(|k| (k * clip.num_frames / n) as u32).collect()),
        }
    }

    /// The most pixels of a frame, of so many.
    fn frame_pixels(&self, num_frames: u64) -> PixelRange {
        let PixelRange { min, max } = self.settings.video.pixels;
        let Some(tokens) = self.settings.video.token_cap else { return self.settings.video.pixels };
        let factor = self.settings.patches.factor();
        // At most 2^20 x 2^60 x 2^15, hence u128.
        let total = ((u128::from(tokens) * u128::from(factor * factor)) as f64 * CAP_SHARE) as u128;
        let share = total * u128::from(self.settings.patches.frames) / u128::from(num_frames);
        let share = u64::try_from(share).unwrap_or(u64::MAX);
        PixelRange { min, max: self.settings.video.capped(max.min(share)) }
    }
}

impl VideoRule for Qwen2Vl {
    fn settings(&self) -> &Settings {
        &self.settings
    }

    fn video_shape(&self, clip: &Clip, asked: VideoSampling) -> Result<MediaShape, String> {
        check_clip(clip, asked)?;
        let frame_indices = self.frames(clip, asked)?;
        let num_frames = frame_indices.len() as u64;
        let size = (u64::from(clip.size.height), u64::from(clip.size.width));
        let resized =
            fit(size, Depth::PICTURE, self.settings.patches.factor(), self.frame_pixels(num_frames))?;
        let grid = self.settings.patches.grid(resized, num_frames).ok_or(TOO_MANY_TOKENS)?;
        Ok(grid.shape(vec![grid.features()], frame_indices))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::family::{Family as _, Size, Sound};
    use crate::media::MediaKind;
    use serde_json::{Value, json};

    fn rule(video_preprocessor: Value) -> Qwen2Vl {
        let config = json!({"model_type": "qwen2_vl"});
        Qwen2Vl::from_files(&FamilyFiles { config, video_preprocessor, ..FamilyFiles::default() }).unwrap()
    }

    fn clip(num_frames: u64) -> Clip {
        Clip { size: Size { height: 280, width: 560 }, num_frames, fps: Some(30.0), duration_s: None }
    }

    /// 7 frames are 4 pairs, the last one twice in the last; 280 x 560 pixels are 20 x 40 patches.
    #[test]
    fn a_clip_is_read_whole_by_hand() {
        let shape = rule(json!({})).video(&clip(7), VideoSampling::default()).unwrap();
        assert_eq!(shape.frame_indices, [0, 1, 2, 3, 4, 5, 6]);
        assert_eq!((shape.num_tiles, shape.encoder_tokens(), shape.feature_tokens()), (4, 3_200, 800));
        assert_eq!(shape.segments[0].count, 4);
    }

    /// 100 frames at 30 a second are 3.33 s: at 2 a second 6.67 frames, in pairs 6, of which frame k is 100 k / 6.
    #[test]
    fn frames_are_sampled_in_pairs_by_hand() {
        let asked = VideoSampling { fps: Some(2.0), max_frames: None };
        let shape = rule(json!({})).video(&clip(100), asked).unwrap();
        assert_eq!(shape.frame_indices, [0, 16, 33, 50, 66, 83]);
        let file = rule(json!({"do_sample_frames": true, "fps": 2.0}));
        assert_eq!(file.video(&clip(100), VideoSampling::default()).unwrap(), shape);
        let at_most = VideoSampling { fps: None, max_frames: Some(5) };
        assert_eq!(file.video(&clip(100), at_most).unwrap().frame_indices, [0, 25, 50, 75]);
    }

    /// In floats 17 / (17 / 14) is more than 14, and transformers asks for a 15th frame: one past the end.
    #[test]
    fn no_frame_past_the_end_is_read() {
        for total in 2..400_u64 {
            for max_frames in [2, 6, 14, 46, 98] {
                let asked = VideoSampling { fps: None, max_frames: Some(max_frames) };
                let frames = rule(json!({})).video(&clip(total), asked).unwrap().frame_indices;
                assert_eq!(frames.len() as u64, total.min(u64::from(max_frames)), "{total}");
            }
        }
    }

    #[test]
    fn clips_that_cannot_be_sampled_are_refused() {
        let refused = |video: Value, clip: &Clip, asked| {
            let DataError::Shape { rule, .. } = rule(video).video(clip, asked).unwrap_err() else { panic!() };
            rule
        };
        let nothing = VideoSampling::default();
        let sampled = json!({"do_sample_frames": true, "fps": 2.0});
        let errors = [
            refused(json!({"do_sample_frames": true}), &clip(100), nothing),
            refused(json!({"do_sample_frames": true, "num_frames": 8}), &clip(7), nothing),
            refused(sampled.clone(), &clip(1), nothing),
            refused(sampled, &Clip { fps: None, ..clip(60) }, nothing),
            refused(json!({}), &clip(60), VideoSampling { fps: None, max_frames: Some(1) }),
            refused(json!({}), &clip(60), VideoSampling { fps: Some(0.0), max_frames: None }),
            refused(json!({}), &clip(0), nothing),
            refused(json!({}), &clip(65_537), nothing),
        ];
        insta::assert_snapshot!(errors.join("\n"), @r"
        `do_sample_frames` is set, but neither `fps` nor `num_frames` is: the processor refuses every video
        8 frames would be read, more than there are
        not one group of 2 frames would be read of it
        the file does not tell its frames a second, which the choice of frames needs
        not one group of 2 frames would be read of it
        0 frames a second are asked, must be above 0
        at least 1 frame is needed
        all its frames would be read, must be at most 65536: ask for frames a second or at most so many
        ");
    }

    #[test]
    fn a_sound_is_not_read() {
        let rule = rule(json!({}));
        assert!(rule.marks(MediaKind::Audio).is_none());
        assert!(rule.audio(&Sound { duration_s: 1.0, sample_rate: 16_000 }).is_err());
        assert_eq!(rule.marks(MediaKind::Video).unwrap().placeholder, "<|video_pad|>");
    }
}
