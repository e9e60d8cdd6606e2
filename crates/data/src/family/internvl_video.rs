//! Which frames InternVL reads of a video: those of `InternVLVideoProcessor` of transformers 5.23.0.
//!
//! ```text
//! step = total / n,  start = step / 2 (`initial_shift` true) or `initial_shift`
//! index_k = floor(start + k step) while below total
//! ```
//!
//! n is `num_frames`, or `floor(total / fps of the file x fps)`; without `do_sample_frames` every frame is read.
//!
//! Not modelled: how torch rounds positions to float32 depends on the width of the machine's vectors. In clips longer
//! than some ten thousand frames of which hundreds are read, a position may be next to that of torch; their number
//! never differs.

use super::qwen_vl::video_fields;
use super::{Clip, FamilyFiles, VideoSampling, refused};
use crate::DataError;
use serde_json::Value;

/// The `model_type` of the models whose videos these rules cut.
pub(super) const FAMILY: &str = "internvl";

/// Frames read of one video that we take at most: a file may claim any number, and each costs a tile.
const FRAMES_MAX: u64 = super::FRAMES_MAX as u64;
/// Side of a frame where the video processor has no `size`, in pixels.
const DEFAULT_FRAME: u32 = 384;

/// How many frames the files of the model ask for.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Wanted {
    All,
    Count(u64),
    Rate(f64),
    /// `do_sample_frames` without a number of frames or a rate: the processor fails.
    Nothing,
}

/// The settings of a video processor.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct FrameRule {
    wanted: Wanted,
    /// Position of the first frame; `None`: half a step.
    shift: Option<f64>,
    /// Why videos cannot be read, though images can.
    refusal: Option<String>,
    /// Name of the file of the settings.
    file: &'static str,
}

impl FrameRule {
    /// The rule for `video_preprocessor_config.json`, for an encoder of `image_size` pixels a side.
    ///
    /// # Errors
    /// [`DataError::Config`] for a field of another kind than transformers takes. Frames of another size than the
    /// encoder's are an error of each video only: images may be sound all the same.
    pub(super) fn read(files: &FamilyFiles, image_size: u32) -> Result<Self, DataError> {
        let fields = video_fields(files);
        let file = files.names.of(fields.file);
        let flag = |field: &str, default: bool| fields.flag(field).map(|flag| flag.unwrap_or(default));
        let number = |field: &str| match fields.get(field).map(Value::as_f64) {
            None => Ok(None),
            Some(Some(number)) if number >= 0.0 => Ok(Some(number)),
            Some(_) => Err(fields.error(field, "must be a number of at least 0".to_owned())),
        };
        let num_frames = match fields.get("num_frames") {
            None => None,
            Some(value) => {
                Some(value.as_u64().filter(|n| (1..=FRAMES_MAX).contains(n)).ok_or_else(|| {
                    fields.error("num_frames", format!("must be a whole number from 1 to {FRAMES_MAX}"))
                })?)
            }
        };
        let wanted = match (flag("do_sample_frames", false)?, num_frames, number("fps")?) {
            (false, ..) => Wanted::All,
            (true, Some(count), _) => Wanted::Count(count),
            (true, None, Some(rate)) => Wanted::Rate(rate),
            (true, None, None) => Wanted::Nothing,
        };
        let shift = match fields.get("initial_shift") {
            None | Some(Value::Bool(true)) => None,
            Some(Value::Bool(false)) => Some(0.0),
            Some(_) => number("initial_shift")?,
        };
        let is_cropped = flag("do_center_crop", false)?;
        let mut refusal = None;
        for (name, is_used, default) in [("size", true, Some(DEFAULT_FRAME)), ("crop_size", is_cropped, None)]
        {
            for side in ["height", "width"].iter().filter(|_| is_used) {
                let field = format!("{name}.{side}");
                let found = fields.side(&field)?.or(default);
                if found != Some(image_size) {
                    let found = found.map_or_else(|| "missing".to_owned(), |side| side.to_string());
                    refusal = Some(format!(
                        "`{field}` of `{file}` is {found}, the encoder reads frames of {image_size} \
                         pixels"
                    ));
                }
            }
        }
        if !flag("do_resize", true)? {
            refusal = Some(format!("`do_resize` of `{file}` is false, frames keep their size"));
        }
        Ok(Self { wanted, shift, refusal, file })
    }

    /// Positions of the frames that are read, ascending.
    ///
    /// What `sampling` asks takes the place of the files' own setting, and of it dflop makes the best: at least one
    /// frame, and at most all.
    ///
    /// # Errors
    /// [`DataError::Shape`] where the processor refuses too, and for more than 65,536 frames.
    pub(super) fn choose(&self, clip: &Clip, sampling: VideoSampling) -> Result<Vec<u32>, DataError> {
        let total = clip.num_frames;
        let refuse = |rule: &str| refused(FAMILY, format!("a video of {total} frames"), rule);
        if let Some(refusal) = &self.refusal {
            return Err(refuse(refusal));
        }
        if clip.size.height == 0 || clip.size.width == 0 || total == 0 {
            return Err(refuse("both sides and the number of frames must be at least 1"));
        }
        let rate = |wanted: f64| {
            let found = clip.fps.or_else(|| clip.duration_s.map(|seconds| total as f64 / seconds));
            let found = found.filter(|fps| *fps > 0.0 && fps.is_finite());
            found
                .map(|found| (total as f64 / found * wanted) as u64)
                .ok_or_else(|| refuse("it does not say its frame rate"))
        };
        let most = sampling.max_frames.map_or(u64::MAX, u64::from);
        let count = match (sampling.fps, sampling.max_frames, self.wanted) {
            (Some(wanted), ..) | (None, Some(_), Wanted::Rate(wanted)) => {
                rate(wanted)?.min(most).clamp(1, total)
            }
            (None, Some(_), _) => most.clamp(1, total),
            (None, None, Wanted::All) => return all(total).ok_or_else(|| refuse(&too_many(total))),
            (None, None, Wanted::Count(count)) => count,
            (None, None, Wanted::Rate(wanted)) => rate(wanted)?,
            (None, None, Wanted::Nothing) => {
                return Err(refuse(&format!(
                    "`{}` samples frames, but has neither `num_frames` nor `fps`",
                    self.file
                )));
            }
        };
        if count == 0 || count > total {
            return Err(refuse(&format!("{count} frames are asked for, must be from 1 to all of them")));
        }
        if count > FRAMES_MAX {
            return Err(refuse(&too_many(count)));
        }
        self.spread(total, count).ok_or_else(|| {
            refuse("`initial_shift` leads past its end: the processor reads a frame that is not there")
        })
    }

    /// `torch.arange(start, total, total / count).int()`; `None` where that fails or leads past the end.
    fn spread(&self, total: u64, count: u64) -> Option<Vec<u32>> {
        let end = total as f64;
        let step = end / count as f64;
        let start = self.shift.unwrap_or(end / count as f64 / 2.0);
        let length = ((end - start) / step).ceil();
        if length < 1.0 {
            return None;
        }
        // Positions are float32, as torch has them.
        let indices = (0..length as u64).map(|k| (start + step * k as f64) as f32 as u64);
        indices.map(|index| u32::try_from(index).ok().filter(|_| index < total)).collect()
    }
}

fn all(total: u64) -> Option<Vec<u32>> {
    (total <= FRAMES_MAX).then(|| (0..total as u32).collect())
}

fn too_many(count: u64) -> String {
    format!("{count} frames are asked for, must be at most {FRAMES_MAX}: set `data.video_max_frames`")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::family::Size;
    use proptest::prelude::*;
    use serde_json::json;

    fn read(video_preprocessor: Value) -> Result<FrameRule, DataError> {
        FrameRule::read(&FamilyFiles { video_preprocessor, ..FamilyFiles::default() }, 448)
    }

    fn rule(more: &Value) -> FrameRule {
        let mut fields = json!({"size": {"height": 448, "width": 448}});
        fields.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        read(fields).unwrap()
    }

    fn clip(num_frames: u64, fps: f64) -> Clip {
        Clip {
            size: Size { height: 48, width: 64 },
            num_frames,
            fps: Some(fps),
            duration_s: Some(num_frames as f64 / fps),
        }
    }

    const NOTHING: VideoSampling = VideoSampling { max_frames: None, fps: None };

    /// 10 frames in 4 parts of 2.5, the middle of each: 1.25, 3.75, 6.25, 8.75.
    #[test]
    fn the_middle_of_each_part_is_read() {
        let asked = rule(&json!({"do_sample_frames": true, "num_frames": 4}));
        assert_eq!(asked.choose(&clip(10, 5.0), NOTHING).unwrap(), [1, 3, 6, 8]);
        let start = rule(&json!({"do_sample_frames": true, "num_frames": 4, "initial_shift": false}));
        assert_eq!(start.choose(&clip(10, 5.0), NOTHING).unwrap(), [0, 2, 5, 7]);
        // 2 s at 2 frames a second.
        let rate = rule(&json!({"do_sample_frames": true, "fps": 2}));
        assert_eq!(rate.choose(&clip(10, 5.0), NOTHING).unwrap(), [1, 3, 6, 8]);
    }

    #[test]
    fn what_is_asked_takes_the_place_of_the_files() {
        let all = rule(&json!({}));
        assert_eq!(all.choose(&clip(3, 5.0), NOTHING).unwrap(), [0, 1, 2]);
        let asked = |max_frames, fps| VideoSampling { max_frames, fps };
        assert_eq!(all.choose(&clip(10, 5.0), asked(Some(4), None)).unwrap(), [1, 3, 6, 8]);
        assert_eq!(all.choose(&clip(3, 5.0), asked(Some(32), None)).unwrap(), [0, 1, 2]);
        assert_eq!(all.choose(&clip(10, 5.0), asked(Some(32), Some(1.0))).unwrap(), [2, 7]);
        assert_eq!(all.choose(&clip(10, 5.0), asked(Some(1), Some(1.0))).unwrap(), [5]);
        // A tenth of a second at 1 frame a second: the one frame in the middle.
        assert_eq!(all.choose(&clip(10, 100.0), asked(None, Some(1.0))).unwrap(), [5]);
    }

    #[test]
    fn what_the_processor_refuses_is_refused() {
        let refused = |fields: Value, num_frames: u64, expected: &str| {
            let error = rule(&fields).choose(&clip(num_frames, 5.0), NOTHING).unwrap_err().to_string();
            assert!(error.contains(expected), "{expected}: {error}");
        };
        refused(json!({"do_sample_frames": true, "num_frames": 4}), 3, "4 frames are asked for");
        refused(json!({"do_sample_frames": true, "fps": 1}), 3, "0 frames are asked for");
        refused(json!({"do_sample_frames": true}), 3, "neither `num_frames` nor `fps`");
        refused(
            json!({"do_sample_frames": true, "num_frames": 1, "initial_shift": 3}),
            3,
            "`initial_shift` leads past",
        );
        refused(json!({"size": {"height": 384, "width": 384}}), 3, "`size.width` of `video_preproc");
        refused(json!({"do_resize": false}), 3, "`do_resize`");
        refused(json!({"do_center_crop": true}), 3, "`crop_size.width`");
        refused(json!({}), 1 << 40, "must be at most 65536");
        refused(json!({}), 0, "at least 1");
        assert!(read(json!({"num_frames": 0})).is_err());
        assert!(read(json!({"initial_shift": -1})).is_err());
        assert!(read(json!({"do_sample_frames": 1})).is_err());
    }

    proptest! {
        #[test]
        fn frames_ascend_within_the_clip(total in 1_u64..1_000_000, max in 1_u32..600) {
            let sampling = VideoSampling { max_frames: Some(max), fps: None };
            let chosen = rule(&json!({})).choose(&clip(total, 30.0), sampling).unwrap();
            prop_assert_eq!(chosen.len() as u64, total.min(u64::from(max)));
            prop_assert!(chosen.windows(2).all(|pair| pair[0] < pair[1]));
            prop_assert!(u64::from(*chosen.last().unwrap()) < total);
        }
    }
}
