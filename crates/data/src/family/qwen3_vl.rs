//! The shape rule of Qwen3-VL and Qwen3.5, dense and with experts: pictures in patches of 16, videos with time stamps.
//!
//! An image is as in Qwen2-VL with another patch. A video differs: its range of pixels counts all frames together,
//! it is sampled unless `do_sample_frames` says otherwise, and each frame pair has its own run of features:
//!
//! ```text
//! n       = clamp(int(total / source fps x fps), min_frames, min(max_frames, total))
//! index_k = k (total - 1) / (n - 1), halves to even,  k = 0 .. n - 1
//! text    = <T seconds><|vision_start|> features <|vision_end|>          once a pair, T the mean of its two times
//! ```
//!
//! That text takes the place of `<|video_pad|>` alone; the `<|vision_start|>` and `<|vision_end|>` that the chat
//! template writes around it stay (earlier versions of transformers replaced all three). Each frame pair is one encoder
//! segment. The arithmetic is that of Hugging Face transformers 5.23.0: `Qwen3VLVideoProcessor`, `Qwen3VLProcessor`.
//! `fixtures/shapes` holds what those return.
//!
//! What the user asks for ([`VideoSampling`]) turns sampling on and replaces the processor's `fps` and `max_frames`. If a
//! file gives no rate, transformers assumes 24 frames a second; we take frames over duration, and refuse a clip that gives
//! neither.

use super::patches::{Depth, Patches, PixelRange, TOO_MANY_TOKENS, enlarged, fit};
use super::qwen_vl::{Generation, Settings, VideoRule};
use super::video_settings::{FRAMES_MAX, VideoSettings, all_frames, check_clip, frame_rate};
use super::{Clip, FamilyFiles, MediaShape, Piece, VideoSampling};
use crate::DataError;

/// Configuration and video processor alike.
const PATCHES: Patches = Patches { side: 16, merge: 2, frames: 2 };
const GENERATION: Generation = Generation {
    families: &["qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"],
    video_processor: "Qwen3VLVideoProcessor",
    patches: PATCHES,
    // The image processor is Qwen2-VL's, and so are its defaults.
    image_patches: Patches { side: 14, merge: 2, frames: 2 },
    video_patches: PATCHES,
    video: VideoSettings {
        pixels: PixelRange { min: 128 * 32 * 32, max: 32 * 32 * 768 },
        samples_frames: true,
        fps: Some(2.0),
        num_frames: None,
        min_frames: 4,
        max_frames: 768,
        token_cap: Some(768),
    },
    video_has_old_names: false,
};

/// The shape rule of a Qwen3-VL model.
#[derive(Debug, Clone, PartialEq)]
pub struct Qwen3Vl {
    settings: Settings,
}

impl Qwen3Vl {
    /// The rule for a model's files.
    ///
    /// Fields that are missing have the values transformers gives them; without `video_preprocessor_config.json` the
    /// image processor's settings hold for videos too, as transformers has it. The image processor is that of Qwen2-VL,
    /// whose own patch is 14: a `preprocessor_config.json` must name `patch_size`.
    ///
    /// # Errors
    /// [`DataError::Config`] at the first field for which processor and model would disagree, or that this rule does not
    /// cover.
    ///
    /// # Examples
    /// ```
    /// use dflop_data::family::{Clip, Family as _, FamilyFiles, Qwen3Vl, Size, VideoSampling};
    /// let config = serde_json::json!({"model_type": "qwen3_vl"});
    /// let preprocessor = serde_json::json!({"patch_size": 16});
    /// let rule = Qwen3Vl::from_files(&FamilyFiles { config, preprocessor, ..FamilyFiles::default() })?;
    /// let size = Size { height: 64, width: 64 };
    /// let clip = Clip { size, num_frames: 60, fps: Some(30.0), duration_s: Some(2.0) };
    /// let shape = rule.video(&clip, VideoSampling::default())?;
    /// assert_eq!(shape.frame_indices, [0, 20, 39, 59]);
    /// # Ok::<(), dflop_data::DataError>(())
    /// ```
    pub fn from_files(files: &FamilyFiles) -> Result<Self, DataError> {
        Settings::read(files, &GENERATION).map(|settings| Self { settings })
    }

    /// Positions of the frames that are read of a clip.
    fn frames(&self, clip: &Clip, source_fps: f64, asked: VideoSampling) -> Result<Vec<u32>, String> {
        if !self.settings.video.samples_frames && asked == VideoSampling::default() {
            return all_frames(clip);
        }
        let total = clip.num_frames;
        let video = &self.settings.video;
        let max = asked.max_frames.map_or(video.max_frames, u64::from).min(FRAMES_MAX);
        let n = match (asked.fps.or(video.fps), video.num_frames) {
            // A quotient that does not fit 64 bits becomes the largest number that does, and then `max`.
            (Some(fps), _) => {
                ((total as f64 / source_fps * fps) as u64).max(video.min_frames).min(max).min(total)
            }
            // `fps` is null in the file. Then frames of short clips are read twice.
            (None, Some(num_frames)) if asked.max_frames.is_none() => num_frames,
            (None, _) => total.max(video.min_frames).min(max),
        };
        let step = (total - 1) as f64 / n.saturating_sub(1) as f64;
        Ok((0..n)
            .map(|k| match k {
                0 => 0,
                _ if k == n - 1 => (total - 1) as u32,
                _ => (k as f64 * step).round_ties_even() as u32,
            })
            .collect())
    }

    /// The most pixels of a clip of so many frames.
    fn clip_pixels(&self, num_frames: u64) -> PixelRange {
        let PixelRange { min, max } = self.settings.video.pixels;
        let Some(tokens) = self.settings.video.token_cap else { return self.settings.video.pixels };
        let factor = self.settings.patches.factor();
        let frame = tokens.saturating_mul(factor * factor).min(max / num_frames);
        PixelRange { min, max: self.settings.video.capped(frame).saturating_mul(num_frames) }
    }
}

impl VideoRule for Qwen3Vl {
    fn settings(&self) -> &Settings {
        &self.settings
    }

    fn video_shape(&self, clip: &Clip, asked: VideoSampling) -> Result<MediaShape, String> {
        check_clip(clip, asked)?;
        let source_fps = frame_rate(clip)?;
        let frame_indices = self.frames(clip, source_fps, asked)?;
        let (frames, pair) = (frame_indices.len() as u64, u64::from(self.settings.patches.frames));
        if frames < pair {
            return Err(format!("{frames} frames of it are read, must be at least {pair}"));
        }
        let factor = self.settings.patches.factor();
        let rounded = (frames as f64 / pair as f64).round_ties_even() as u64 * pair;
        let sides = enlarged((u64::from(clip.size.height), u64::from(clip.size.width)), factor)?;
        let resized = fit(sides, Depth { frames, rounded }, factor, self.clip_pixels(frames))?;
        let grid = self.settings.patches.grid(resized, frames).ok_or(TOO_MANY_TOKENS)?;
        let mut pieces = Vec::with_capacity(2 * grid.pairs as usize + 1);
        let mut before = "";
        for group in frame_indices.chunks(self.settings.patches.frames as usize) {
            // A group that is not full ends with its last frame again.
            let (first, last) = (group[0], group[group.len() - 1]);
            let seconds = f64::midpoint(f64::from(first) / source_fps, f64::from(last) / source_fps);
            pieces.push(Piece::Text(format!("{before}<{seconds:.1} seconds><|vision_start|>")));
            pieces.push(Piece::Features(grid.frame_features));
            before = "<|vision_end|>";
        }
        pieces.push(Piece::Text(before.to_owned()));
        Ok(grid.shape(pieces, frame_indices))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::family::{Family as _, Size};
    use serde_json::json;

    /// Five frames of eight a second, all read: pairs (0, 1), (2, 3) and (4, 4), at 1 / 16, 5 / 16 and 1 / 2 s. 96 x
    /// 128 pixels are 6 x 8 patches; with 4 frames' worth of pixels (5 / 2 rounds to 2 pairs) they are in range.
    #[test]
    fn a_clip_by_hand() {
        let files = FamilyFiles {
            config: json!({"model_type": "qwen3_vl"}),
            preprocessor: json!({"patch_size": 16}),
            video_preprocessor: json!({"do_sample_frames": false, "size": {"shortest_edge": 4_096, "longest_edge": 49_152}}),
            ..FamilyFiles::default()
        };
        let rule = Qwen3Vl::from_files(&files).unwrap();
        let size = Size { height: 96, width: 128 };
        let clip = Clip { size, num_frames: 5, fps: Some(8.0), duration_s: None };
        let shape = rule.video(&clip, VideoSampling::default()).unwrap();
        let text = |text: &str| Piece::Text(text.to_owned());
        assert_eq!(
            shape.pieces,
            [
                text("<0.1 seconds><|vision_start|>"),
                Piece::Features(12),
                text("<|vision_end|><0.3 seconds><|vision_start|>"),
                Piece::Features(12),
                text("<|vision_end|><0.5 seconds><|vision_start|>"),
                Piece::Features(12),
                text("<|vision_end|>"),
            ]
        );
        assert_eq!((shape.num_tiles, shape.encoder_tokens()), (3, 3 * 48));
        assert_eq!(rule.name(), "qwen3_vl");
        // One frame is less than a pair.
        let one = Clip { num_frames: 1, ..clip };
        let error = rule.video(&one, VideoSampling::default()).unwrap_err().to_string();
        assert!(error.ends_with("1 frames of it are read, must be at least 2"), "{error}");
    }

    /// Qwen3.5 has the same processors, with and without experts.
    #[test]
    fn qwen3_5_reads_as_qwen3_vl() {
        let rule = |family: &str| {
            let config = json!({"model_type": family, "vision_config": {"patch_size": 16}});
            let preprocessor = json!({"patch_size": 16});
            let files = FamilyFiles { config, preprocessor, ..FamilyFiles::default() };
            Qwen3Vl::from_files(&files).unwrap()
        };
        let size = Size { height: 333, width: 512 };
        let clip = Clip { size, num_frames: 50, fps: Some(25.0), duration_s: None };
        let before = rule("qwen3_vl");
        for family in ["qwen3_5", "qwen3_5_moe"] {
            let after = rule(family);
            assert_eq!(after.name(), family);
            assert_eq!(after.image(size, 1).unwrap(), before.image(size, 1).unwrap());
            let videos = [&after, &before].map(|rule| rule.video(&clip, VideoSampling::default()).unwrap());
            assert_eq!(videos[0], videos[1]);
        }
    }

    /// A quarter and three quarters: halves to even, as Python writes them.
    #[test]
    fn time_stamps_round_as_python_does() {
        assert_eq!(format!("{:.1} {:.1} {:.1} {:.1}", 0.25, 0.75, 1.25, 0.05), "0.2 0.8 1.2 0.1");
    }
}
